"""Layer 3. A rank that never comes to set-up, or ends in it before anything watches it, is named by all others."""

from __future__ import annotations

import os
import signal
import socket
import time
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from faulty_jobs import sets_up, sets_up_replicas
from faulty_ranks import Fault
from process_ranks import run_ranks, start_ranks

from odc.setup import agreement as exchange


def test_a_rank_of_another_group_is_named_through_those_in_between() -> None:
    """Rank 3 shares no group with rank 0: it learns from rank 1, which has given up."""
    told = "rank 0 has not come to it, and has ended"
    results = Fault(0, "set-up", "raise", sets_up_replicas, ranks=4, told=told).check()
    assert "rank 1 (pid " in (results[3].error or "")


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
    group = start_ranks(3, sets_up, enter=partial(ask_a_lost_store, port, end, str(tmp_path)))
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
