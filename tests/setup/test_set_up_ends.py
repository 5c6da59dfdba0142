"""Layer 3. A rank that never comes to set-up, or ends in it before anything watches it, is named by all others."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from process_ranks import run_ranks, start_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import Net, build, shard

import odc
from odc.setup import agreement as exchange

LIMIT_S = 30.0  # two seconds, and a busy machine; far below the limits of set-up and of the process group


def fail() -> None:
    raise ValueError("no such checkpoint")


ENDS: dict[str, Callable[[], object]] = {
    "raises": fail,
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "leaves": lambda: os._exit(0),
}


def never_coming(rank: int, world_size: int, end: str) -> None:
    model = shard(build(num_blocks=1), world_size)
    if rank == 1:
        ENDS[end]()
    odc.patch_fsdp(model)


@pytest.mark.parametrize("end", ["raises", "is killed", pytest.param("leaves", marks=pytest.mark.extended)])
def test_a_rank_that_ends_before_set_up_is_named(end: str) -> None:
    results = start_ranks(3, never_coming, end).join(120)
    for rank in (0, 2):
        assert results[rank].error_type == "BrokenExchangeError", results[rank].error
        assert "rank 1 has not come to it, and has ended" in (results[rank].error or "")
        assert results[rank].seconds < LIMIT_S


def ending_in_its_first_exchange(rank: int, world_size: int) -> None:
    model = shard(build(num_blocks=1), world_size)
    if rank == 2:

        def die(self: exchange.ProcessGroupExchange, *_: object) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        exchange.ProcessGroupExchange._await = die  # type: ignore[assignment,method-assign]
    odc.patch_fsdp(model)


def test_a_rank_that_dies_while_nothing_watches_it_yet_is_named_with_its_process() -> None:
    group = start_ranks(3, ending_in_its_first_exchange)
    results = group.join(120)
    for rank in (0, 1):
        assert results[rank].error_type == "BrokenExchangeError", results[rank].error
        assert f"rank 2 (pid {group.pids[2]}) has ended" in (results[rank].error or "")


def replicated(rank: int, world_size: int) -> None:
    """Ranks 0 and 1 share one replica, 2 and 3 the other one; 0 and 2 hold the same shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: Net = build(num_blocks=1)
    fully_shard(model, mesh=mesh)
    if rank == 0:
        time.sleep(1.0)
        raise ValueError("no such checkpoint")
    odc.patch_fsdp(model)


def test_a_rank_of_another_group_is_named_through_those_in_between() -> None:
    """Rank 3 shares no group with rank 0: it learns from rank 1, which has given up."""
    results = start_ranks(4, replicated).join(120)
    for result in results[1:]:
        assert result.error_type == "BrokenExchangeError", result.error
        assert "rank 0 has not come to it, and has ended" in (result.error or "")
        assert result.seconds < LIMIT_S
    assert "rank 1 (pid " in (results[3].error or "")


def after_a_failed_attempt(rank: int, world_size: int) -> None:
    """The first set-up is refused on all ranks; the script mends it and tries again."""
    model = shard(build(num_blocks=1), world_size)
    with pytest.raises(odc.SetupError, match="differs"):
        odc.patch_fsdp(model, deterministic=rank == 0)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    odc.patch_fsdp(model)


def test_who_has_died_is_named_whatever_others_said_in_an_earlier_set_up() -> None:
    group = start_ranks(3, after_a_failed_attempt)
    for result in group.join(120)[:2]:
        assert re.search(rf"rank 2 \(pid {group.pids[2]}\) has ended: [^;]*(killed|gone)", result.error or ""), (
            result.error
        )


def ask_a_lost_store(port: int, end: str, folder: str, rank: int, world_size: int) -> None:
    for stream, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT), stream)
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL if end == "dead" else signal.SIGSTOP)
    started = time.monotonic()
    try:
        exchange.ProcessGroupExchange(timeout_s=5.0).all_gather(b"x")
    except Exception as error:
        os.write(1, f"{type(error).__name__}: {error}".encode())
    os._exit(0 if time.monotonic() - started < 40 else 1)


@pytest.mark.parametrize("end", ["dead", pytest.param("stopped", marks=pytest.mark.extended)])
def test_a_store_that_does_not_answer_holds_nobody_up(end: str, tmp_path: Path) -> None:
    """Where rank 0 hosts it, it ends or stops with rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = start_ranks(3, never_coming, enter=partial(ask_a_lost_store, port, end, str(tmp_path)))
    results = group.join(120, expendable=[0])
    for rank in (1, 2):
        said = (tmp_path / f"out{rank}").read_text()
        assert results[rank].exitcode == 0, said
        assert ("BrokenExchangeError" if end == "dead" else "SetupError: rank") in said
        assert (tmp_path / f"err{rank}").stat().st_size < 20_000, (
            "torch prints a page for each question to a dead store"
        )


def words_of_an_earlier_set_up(rank: int, world_size: int) -> tuple[int, str | None, str | None]:
    """Rank 1 has failed once, and has not come a second time: what it had said then explains nothing."""
    first, again = (exchange.Participants(None, range(world_size), rank) for _ in range(2))
    first.enter()
    dist.barrier()
    assert first.absent() == []
    if rank == 1:
        first.leave_word("ValueError: the first time")
    dist.barrier()
    if rank == 0:
        again.enter()
        assert again.absent() == [1]
        assert again.end_of_any() is None
    dist.barrier()
    if rank == 1:
        again.leave_word("ValueError: before it has come")
    dist.barrier()
    found = again.end_of_any() if rank == 0 else None
    dist.barrier()
    if rank == 1:
        again.enter()
        again.leave_word("ValueError: x")
    dist.barrier()
    account = again.account() if rank == 0 else None
    dist.barrier()
    return os.getpid(), found, account


def test_who_came_once_has_not_come_again_and_its_word_of_then_is_not_one_of_now() -> None:
    (_, found, account), (pid, _, _) = run_ranks(2, words_of_an_earlier_set_up)
    assert found is not None
    assert "ValueError: before it has come" in found
    assert account == f"it failed on rank 1 (pid {pid}): ValueError: x"
