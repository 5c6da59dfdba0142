"""Layer 1: steps of a trainer whose samples are bound late, two ranks of them in this process, in virtual time."""

from __future__ import annotations

import contextlib
import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from late_ranks import Clock, keep_time, run_timed
from tiny_trainers import hf_trainer, losses, model, pad, samples
from torch.utils.data import DataLoader
from transformers import Trainer

from odc.balance import LinearCost
from odc.errors import UnsupportedError
from odc.trainers import BalanceOptions, balance, install, minibatches
from odc.trainers import late as late_module
from odc.trainers.batches import check_step
from odc.trainers.late import LateSteps
from odc.trainers.packing import collate_alone, counts_of
from odc.trainers.planned import PackedDataset, Part
from odc.trainers.transformers import check_trainer

MAX_TOKENS = 64
DATA = samples(37)
COUNTS = np.array([counts_of(collate_alone(pad, sample)) for sample in DATA]).T


class Ranks:
    """Two, of which the second is slow."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, collate: Any = pad) -> None:
        self.clock, store = Clock(), dist.HashStore()
        keep_time(monkeypatch, self.clock)
        monkeypatch.setattr(late_module, "own_store", lambda: store)
        options = BalanceOptions(max_tokens=MAX_TOKENS, cost=LinearCost(), late_binding=True)
        planner = options.planner(COUNTS[0], 2, None)
        example = collate_alone(pad, DATA[0])
        self.samples, self.is_running = np.arange(0), False
        self.datasets = [PackedDataset(DATA, collate, planner, COUNTS[0], rank, example) for rank in range(2)]
        self.steps = [
            LateSteps(
                SimpleNamespace(
                    num_processes=2, process_index=rank, device=torch.device("cpu"), reduce=self._reduce,
                    parallelism_config=None,
                ),
                self.datasets[rank],
            )
            for rank in range(2)
        ]  # fmt: skip

    def _reduce(self, counts: torch.Tensor, how: str) -> torch.Tensor:
        assert how == "sum"
        expected = torch.from_numpy(COUNTS[:, self.samples])
        assert ((counts == expected) | (counts == 0)).all()
        return expected

    def step(self, indices: list[int], num_parts: int = 3) -> list[list[dict[str, torch.Tensor]]]:
        """The rows of both ranks."""
        self.samples, self.is_running = np.array(indices), False
        loops = []
        for dataset, late in zip(self.datasets, self.steps, strict=True):
            bundles = [dataset.__getitems__(Part(self.samples, index, num_parts)) for index in range(num_parts)]
            check_step(bundles)
            assert not any(bundle.microbatches for bundle in bundles[:-1])
            late.begin(bundles[-1].to("cpu"))
            loops.append(late.rows())
        self.is_running = True
        return run_timed(loops, self.clock, lambda rank, row: row["input_ids"].shape[1] * (4.0 if rank else 1.0))[1]


def found_in(rows: list[dict[str, torch.Tensor]]) -> list[list[int]]:
    """The samples that were packed."""
    found = []
    for row in rows:
        assert row["input_ids"].shape[1] <= MAX_TOKENS
        starts = [*np.flatnonzero(row["position_ids"][0].numpy() == 0).tolist(), row["input_ids"].shape[1]]
        tokens = row["input_ids"][0].tolist()
        found += [tokens[a:b] for a, b in itertools.pairwise(starts)]
    return found


def test_each_sample_is_run_once_whoever_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch)
    rng = random.Random(0)
    for number in range(8):
        indices = [rng.randrange(len(DATA)) for _ in range(16)]  # some twice
        fast, slow = map(found_in, ranks.step(indices))
        assert sorted([*fast, *slow]) == sorted(DATA[index]["input_ids"] for index in indices)
        if number:
            assert sum(map(len, fast)) > 1.5 * sum(map(len, slow))
    assert ranks.steps[0].num_taken > 8


def test_a_rank_without_samples_runs_a_row_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Ranks(monkeypatch).step([3])
    assert sorted(int((row["labels"] != -100).sum()) for mine in rows for row in mine) == [0, COUNTS[1, 3] - 1]


def test_a_collator_that_makes_something_else_each_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def collate(batch: list[Any]) -> dict[str, torch.Tensor]:
        made = pad(batch)
        if ranks.is_running:
            made["labels"][:, -1] = -100
        return made

    ranks = Ranks(monkeypatch, collate)
    words = r"sample \d+ of the dataset has \d+ tokens and \d+ labels where it was taken"
    with pytest.raises(UnsupportedError, match=words):
        ranks.step(list(range(32)))


# Where it is not offered


def test_rollouts_are_refused(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, cls=type("GRPOTrainer", (Trainer,), {}))
    with pytest.raises(UnsupportedError, match="late_binding=True, but it trains on"):
        check_trainer(trainer, BalanceOptions(late_binding=True))


def test_a_loop_of_ones_own_is_refused() -> None:
    with contextlib.closing(install("lb-mini", 64, late_binding=True)):
        accelerator = Accelerator(cpu=True)
        loader = accelerator.prepare(DataLoader(DATA, batch_size=2, collate_fn=pad))
        with pytest.raises(UnsupportedError, match="late_binding=True in a loop of one's own"):
            minibatches(accelerator, model(), loader, 4)


def test_one_rank_has_nobody_to_take_from(tmp_path: Path) -> None:
    found = []
    for late in (False, True):
        trainer = hf_trainer(tmp_path, num_train_epochs=1)
        balance(trainer, max_tokens=MAX_TOKENS, late_binding=late)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]
    assert len(found[0]) == 5
