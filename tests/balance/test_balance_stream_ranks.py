"""Layer 3: ranks as processes. The exchange over gloo, and what ranks are told when one of them does not come."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks, start_ranks
from stream_ranks import run_streams
from test_balance_stream import Indices, make_loader, samples_of, summary
from torch import nn
from torch.distributed.fsdp import fully_shard

import odc
from odc.balance.late_binding import microbatches


def epoch(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    torch.manual_seed(rank)
    loader = make_loader(rank, world_size, **options)
    found = summary(loader)
    for _ in loader:  # left by all ranks at the same place
        break
    assert summary(loader) == found  # another iteration over the same connections
    loader.close()
    loader.close()
    return found


def test_the_exchange_of_processes_is_that_of_threads() -> None:
    for options in ({"align": "dgap"}, {"align": "minibatch", "grouping": "pack"}):
        expected = run_streams(3, lambda rank, given=options: make_loader(rank, 3, **given), summary)
        assert run_ranks(3, epoch, options) == expected


def of_half(rank: int, world_size: int) -> tuple[list[Any], str]:
    """Ranks 0 and 1 are one model, 2 and 3 another: those of either share no data."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    loader = make_loader(rank % 2, 2, seed=rank // 2, group=halves[rank // 2])
    try:
        list(make_loader(rank % 2, 2))
    except ValueError as error:
        return summary(loader), str(error)
    return summary(loader), ""


def test_ranks_that_share_data_are_a_group() -> None:
    found = run_ranks(4, of_half)
    for half in (0, 2):
        assert samples_of([mine for mine, _ in found[half : half + 2]]) == list(range(203))
    assert found[0][0] != found[2][0]
    for rank, (_, message) in enumerate(found):
        assert f"rank={rank % 2}, world_size=2: this process is rank {rank} of 4 in the process group" in message


def test_without_a_process_group_nothing_is_exchanged() -> None:
    with pytest.raises(RuntimeError, match="call torch.distributed.init_process_group first, or use Unaligned"):
        next(iter(make_loader(0, 2)))


def trouble(rank: int, world_size: int, kind: str, align: str) -> tuple[str, str, float]:
    """Rank 1 does something after two minibatches. What the others are told, and after how many seconds."""

    def length_of(index: int) -> int:
        if kind == "sample" and rank == 1 and started.is_set():
            raise OSError(f"no such file: sample_{index}.jpg")
        return 1 + index % 40

    def collate(samples: list[int]) -> list[int]:
        if kind == "collate" and rank == 1 and started.is_set():
            raise TypeError("no batch of these")
        return samples

    started = threading.Event()
    options: dict[str, Any] = {"length": length_of, "collate": collate, "timeout_s": 2.0}
    if align == "late":
        microbatches.ranks_go_in_step = lambda: False  # here nobody trains
        options |= {"align": "minibatch", "grouping": "pack", "late_binding": True}
    else:
        options["align"] = align
    loader = make_loader(rank, world_size, **options)
    begun = time.monotonic()
    try:
        for number, minibatch in enumerate(loader, 1):
            list(minibatch.microbatches)
            begun = time.monotonic()
            if number < 2 or rank != 1:
                continue
            started.set()
            if kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "left":
                break
            if kind == "late" and number == 2:
                time.sleep(3.0)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "", "ended", time.monotonic() - begun


TROUBLES = [
    (
        "sample",
        "minibatch",
        "AbortedError",
        r"the data of rank 1 ended with an error: OSError: .*no such file: sample_",
    ),
    ("collate", "dgap", "AbortedError", "the data of rank 1 ended with an error: TypeError: no batch of these"),
    ("collate", "late", "AbortedError", "the data of rank 1 ended with an error: TypeError: no batch of these"),
    (
        "left",
        "minibatch",
        "PeerClosedError",
        "rank 1 has left its loop after 2 minibatches, while another waits for it",
    ),
    ("left", "dgap", "PeerClosedError", "rank 1 has left its loop after 2 minibatches, while another waits"),
    ("late", "minibatch", "PeerSilentError", "rank 1 did not come for its next minibatch within 2 s"),
]


def all_troubles(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    """One after the other, each with a loader of its own: the processes live on."""
    found = []
    for kind, align, *_ in TROUBLES:
        found.append(trouble(rank, world_size, kind, align))
        dist.barrier()
    return found


def test_a_rank_that_fails_is_named_to_the_others() -> None:
    ranks = run_ranks(3, all_troubles)
    for at, (kind, _, error, message) in enumerate(TROUBLES):
        for rank in (0, 2):
            name, text, seconds = ranks[rank][at]
            assert (name, bool(re.search(message, text))) == (error, True), text
            assert seconds < 10
        if kind in ("sample", "collate"):
            assert ranks[1][at][0] == {"sample": "OSError", "collate": "TypeError"}[kind]


def test_a_rank_that_is_killed_is_named_to_the_others() -> None:
    results = start_ranks(3, trouble, "killed", "dgap").join(60.0)
    for rank in (0, 2):
        name, text, seconds = results[rank].value
        assert name == "PeerDiedError"
        assert "rank 1 is gone" in text
        assert seconds < 10


def slow(rank: int, world_size: int) -> tuple[str, str, float]:
    """Rank 2 is killed while rank 1 is in a long step, and rank 0 waits for both."""
    loader = make_loader(rank, world_size, align="minibatch")
    begun = time.monotonic()
    try:
        for number, _ in enumerate(loader):
            begun = time.monotonic()
            if number == 2 and rank == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 2 and rank == 1:
                time.sleep(4.0)
    except odc.errors.OdcError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    raise AssertionError("it has ended")


def test_a_dead_rank_is_named_although_another_is_late() -> None:
    results = start_ranks(3, slow).join(60.0)
    name, text, seconds = results[0].value
    assert name == "PeerDiedError"
    assert "rank 2 is gone" in text
    assert seconds < 3
    assert "rank 2 is gone" in results[1].value[1]


def different(rank: int, world_size: int, kind: str) -> str:
    """Ranks whose loaders, epochs or states are not the same ones, or that iterate differently."""
    options: dict[str, Any] = {"align": "minibatch", "pool_size": 60}
    if kind == "seed":
        options["seed"] = rank
    if kind == "pool_size":
        options = {"pool_size": 60 + rank}
    loader = make_loader(rank, world_size, **options)
    if kind == "epoch":
        loader.set_epoch(rank)
    if kind in ("state", "one state", "done"):
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader), loader.state_dict()]
        if kind == "state":
            loader.load_state_dict(states[3 + rank])
        elif kind == "done":
            loader.load_state_dict(states[-1 - rank])
        elif rank:
            loader.load_state_dict(states[3])
    iterator = iter(loader)
    try:
        for _ in range(3 if kind == "iterations" else 7):
            next(iterator)
        if kind in ("iterations", "at the deal") and rank:
            iterator = iter(loader)
        if kind == "set_epoch" and rank:
            loader.set_epoch(1)
        if kind == "close" and rank:
            loader.close()
        for _ in iterator:
            pass
    except (RuntimeError, StopIteration, ValueError) as error:
        return str(error)
    return "ended"


def all_differences(rank: int, world_size: int) -> list[str]:
    """One after the other: whoever is told is told by a living rank."""
    found = []
    for kind, *_ in DIFFERENCES:
        found.append(different(rank, world_size, kind))
        dist.barrier()
    return found


ARGUMENTS = "their loaders must have the same arguments and epoch, and states that were taken after the same minibatch"


DIFFERENCES = [
    ("seed", f"ranks 1 and 0 differ in seed (0 has 0): {ARGUMENTS}", "ranks 0 and 1 differ in seed (1 has 1)"),
    ("pool_size", "ranks 1 and 0 differ in pool_size (0 has 60)", "ranks 0 and 1 differ in pool_size (1 has 61)"),
    ("epoch", "ranks 1 and 0 differ in epoch (0 has 0)", "ranks 0 and 1 differ in epoch (1 has 1)"),
    ("state", "differ in num_emitted", "differ in num_emitted"),
    ("one state", "differ in num_emitted (0 has 0)", "differ in num_emitted"),
    ("done", "differ in num_emitted", "differ in num_emitted"),
    ("iterations", "every rank must", "every rank must"),
    ("at the deal", "every rank must", "every rank must"),
    ("set_epoch", "rank 1 has left its loop after 7 minibatches", "this iteration ended after minibatch 6"),
    ("close", "rank 1 has left its loop after 7 minibatches", "this iteration ended after minibatch 6"),
]


def test_ranks_that_are_not_at_the_same_are_told() -> None:
    found = run_ranks(2, all_differences)
    for at, (kind, first, second) in enumerate(DIFFERENCES):
        assert (kind, first in found[0][at]) == (kind, True), found[0][at]
        assert (kind, second in found[1][at]) == (kind, True), found[1][at]


def leak(rank: int, world_size: int) -> list[int]:
    """Descriptors and threads of this process after each of some loaders."""
    found = []
    for number in range(6):
        loader = make_loader(rank, world_size)
        list(loader)
        if number % 2:
            loader.close()
        del loader
        gc.collect()
        dist.barrier()
        found.append(len(os.listdir("/proc/self/fd")) + len(os.listdir("/proc/self/task")))
    return found


def test_loaders_leave_no_connections() -> None:
    for counts in run_ranks(2, leak):
        assert max(counts[2:]) <= counts[1] + 2


def train(
    rank: int, world_size: int, patched: bool, dies: bool = False, num_samples: int = 0
) -> tuple[str, list[float], int]:
    """An epoch of FSDP2: with ODC, ranks may have different numbers of microbatches; without, that is refused."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = odc.patch_fsdp(model) if patched else None

    def collate(samples: list[int]) -> torch.Tensor:
        return torch.tensor([[float(1 + i % 7)] for i in samples])

    options: dict[str, Any] = {"align": "minibatch", "grouping": "pack", "comm": "auto", "collate": collate}
    if num_samples:
        options |= {"dataset": Indices(num_samples), "minibatch_size": 1}
    loader = make_loader(rank, world_size, **options)
    idle = 0
    try:
        for number, minibatch in enumerate(loader):
            if dies and number == 2 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            idle += not minibatch.microbatches
            for batch in minibatch.microbatches:
                (model(batch).square().sum() * minibatch.loss_scale).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error), [], idle
    weights: Any = model.weight
    if session is not None:
        session.close()
    return "", weights.full_tensor().flatten().tolist(), idle


def test_minibatches_of_equal_cost_need_odc() -> None:
    for message, *_ in run_ranks(2, train, False):
        assert "EqualMinibatches gives ranks different numbers of microbatches, and ODC is not at work" in message
    for num_samples in (0, 2):
        ranks = run_ranks(3, train, True, False, num_samples)
        assert [message for message, *_ in ranks] == [""] * 3
        assert ranks[0][1] == ranks[1][1] == ranks[2][1]
    assert sum(idle for *_, idle in ranks) > 0  # of two samples on three ranks


def test_a_killed_rank_is_named_whether_others_train_or_load() -> None:
    """Under ODC two parts wait for a rank, the stream's exchange and the minibatch's end: either names it."""
    begun = time.monotonic()
    results = start_ranks(3, train, True, True).join(60.0)
    assert time.monotonic() - begun < 30
    for rank in (0, 2):
        said = results[rank].error or results[rank].value[0]
        assert "rank 1" in said
        assert "dead" in said or "gone" in said
