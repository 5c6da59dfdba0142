"""Layer 3: ranks as processes. Late binding whose store is stopped, killed or slow: ended by name, or trained on."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from process_ranks import RankResult, run_ranks, start_ranks
from test_late_binding import build, known_lengths
from test_mesh_loaders import Steps
from torch.distributed.fsdp import fully_shard

import odc
from odc.balance.data.watched_store import WatchedStore
from odc.balance.late_binding.estimates import LearnedEstimates
from odc.balance.late_binding.work_queues import WorkQueues

TIMEOUT_S = 3
PHASES = {
    "plan": (LearnedEstimates, "plan_with"),
    "begin": (WorkQueues, "begin"),
    "look": (WorkQueues, "of_others"),
    "take": (WorkQueues, "steal"),
    "tell": (LearnedEstimates, "tell"),
    "next": (WorkQueues, "expect"),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """A folder in which the process of a store leaves where it is."""
    yield tmp_path
    with contextlib.suppress(OSError, ValueError):
        os.kill(int((tmp_path / "store").read_text().split()[0]), signal.SIGKILL)


def serve(folder: Path) -> None:
    """Fork the process of a store, as a launcher has one."""
    if os.fork():
        return
    signal.alarm(60)
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    (folder / "new").write_text(f"{os.getpid()} {server.port}")
    (folder / "new").rename(folder / "store")
    while True:
        time.sleep(1.0)


def train(rank: int, world_size: int, folder: Path, phase: str, fault: str) -> list[list[int]]:
    """The samples of each minibatch that this rank computed."""
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        serve(folder)
    while not (folder / "store").exists():
        time.sleep(0.02)
    pid, port = map(int, (folder / "store").read_text().split())
    meet: Any = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=world_size)
    of, name = PHASES[phase]
    act = {
        "stop": lambda: os.kill(pid, signal.SIGSTOP),
        "kill": lambda: os.kill(pid, signal.SIGKILL),
        "slow": lambda: slow_down(),
    }[fault]
    set_off(of, name, act if rank == 1 or fault == "slow" else lambda: None)
    steps, computed = Steps(fully_shard(build())), []
    with odc.patch_fsdp(steps.model):
        loader = known_lengths(rank=rank, world_size=world_size)
        for epoch in range(4 if fault == "slow" else 200):
            loader.set_epoch(epoch)
            for minibatch in loader:
                mine = []
                for numbers, rows in minibatch.microbatches:
                    mine += numbers
                    time.sleep(1e-3 * len(rows) * (4 if rank == 2 else 1))
                    steps.backward(rows, minibatch.loss_scale)
                steps.step()
                computed.append(mine)
    return computed


def set_off(of: type, name: str, act: Callable[[], object]) -> None:
    """Do it before the sixth call of this method."""
    calls, original = iter(range(10**9)), getattr(of, name)

    def method(self: Any, *args: Any) -> Any:
        if next(calls) == 5:
            act()
        return original(self, *args)

    setattr(of, name, method)


def slow_down() -> None:
    ask = WatchedStore.ask

    def slowly(self: WatchedStore, question: Callable[[Any], Any], patience_s: float | None = None) -> Any:
        def late(store: Any) -> Any:
            time.sleep(1.0)
            return question(store)

        return ask(self, late, patience_s)

    WatchedStore.ask = slowly  # type: ignore[method-assign]


def run(store: Path, phase: str, fault: str, limit_s: float = 45.0) -> list[RankResult]:
    return start_ranks(3, train, store, phase, fault, env={"ODC_TIMEOUT": str(TIMEOUT_S)}).join(limit_s)


def some(default: set[tuple[str, str]]) -> list[Any]:
    every = [(phase, fault) for phase in PHASES for fault in ("stop", "kill")]
    return [pytest.param(*one, marks=() if one in default else pytest.mark.extended) for one in every]


@pytest.mark.parametrize(("phase", "fault"), some({("take", "stop"), ("begin", "kill")}))
def test_a_store_that_is_lost_ends_training_by_name(store: Path, phase: str, fault: str) -> None:
    kind = {"stop": "PeerSilentError", "kill": "PeerDiedError"}[fault]
    results = run(store, phase, fault)
    assert all(result.error_type in (kind, "AbortedError") for result in results), results
    assert all("an answer of the store of torch.distributed, by which ranks" in str(r.error) for r in results), results


@pytest.mark.extended
def test_with_a_slow_store_training_goes_on(store: Path) -> None:
    results = run(store, "begin", "slow", 120.0)
    assert [result.error for result in results] == [None] * 3
    for minibatch in zip(*(result.value for result in results), strict=True):
        samples = sorted(i for mine in minibatch for i in mine)
        assert len(samples) == len(set(samples)) == 12


def ask_when_another_has_closed(rank: int, world_size: int) -> str:
    session = odc.patch_fsdp(fully_shard(build()))
    if rank:
        session.close()
    dist.barrier()
    found = WatchedStore(lambda: "answer", "ranks tell each other").ask(lambda store: time.sleep(0.5) or store)
    session.close()
    return found


def test_a_rank_that_has_closed_its_session_is_not_missed_by_who_asks_a_store() -> None:
    """It was through earlier: another one still evaluates, or plans what it will not train on."""
    assert run_ranks(2, ask_when_another_has_closed) == ["answer"] * 2
