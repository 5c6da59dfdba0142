"""Layer 3: ranks as processes. A rank dies in a step of reinforcement learning: while it makes rollouts, while they
change ranks, in the pass for log-probabilities, while it trains, in the optimizer's step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from faulty_ranks import NOTICE_S, TIMEOUT, assert_told, survivors
from process_ranks import start_ranks
from training import loss_of, start, use_up

import odc
from odc.balance import LinearCost, balance_batch
from odc.balance.rearrange.exchange import Meeting

PHASES = ["generation", "exchange", "log-probabilities", "training", "step"]
DEAD, STEP = 1, 2


def rollouts_for_ever(rank: int, world_size: int, phase: str, killed: str) -> None:
    """Each step rank 0 makes most of the tokens, so that rollouts change ranks."""

    def at(where: str) -> None:
        if (rank, step, where) == (DEAD, STEP, phase):
            Path(killed).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    class Watched(Meeting):
        def all_to_all(self, *args: object) -> torch.Tensor:
            at("exchange")
            return super().all_to_all(*args)  # type: ignore[arg-type]

    odc.balance.data.batch.Meeting = odc.balance.rearrange.exchange.Meeting = Watched  # type: ignore[misc]
    model, session, optimizer = start(world_size, num_blocks=1)
    step = 0
    while True:
        sizes = [9, 7, 8, 6] if rank == 0 else [2]
        rollouts = [{"ids": torch.arange(size)[None] % 17} for size in sizes]
        at("generation")
        batch = balance_batch(rollouts, sizes, cost=LinearCost(), max_tokens=9)
        with torch.no_grad():
            for sample in batch.samples:
                at("log-probabilities")
                sample["reference"] = loss_of(model, sample["ids"])
        with session.minibatch():
            for sample in batch.samples:
                loss_of(model, sample["ids"]).backward()
                at("training")
        at("step")
        use_up(optimizer)
        step += 1


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_dies_in_a_phase_of_a_step_is_named_by_all_others(tmp_path: Path, phase: str) -> None:
    killed = tmp_path / "killed"
    began = time.time()
    group = start_ranks(3, rollouts_for_ever, phase, str(killed), env=TIMEOUT)
    results = group.join(120)
    assert results[DEAD].exitcode == -signal.SIGKILL
    for result in survivors(results, DEAD):
        # These ranks end without last words, which a script has: another survivor that has told of it may be named.
        told_of = [one for one in range(3) if one != DEAD and f"rank {one} is dead" in (result.error or "")]
        assert_told(results[told_of[0]] if told_of else result, f"rank {DEAD}")
        assert began + result.seconds - killed.stat().st_mtime < NOTICE_S
