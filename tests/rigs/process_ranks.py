"""Ranks as real processes for the tests: started in milliseconds, watched, never left behind.

A fork server that has imported torch once forks each rank. Ranks meet through a ``FileStore`` (no ports); each rank's
failure reaches the caller with its traceback; a rank that outlives its time limit is killed and reported.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import on_device
import pytest
import torch
import torch.distributed as dist

_NO_RESULT = "ended without a result"
_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo: fully_shard and optimizers import it when first used, which is most of a short rank's time.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "odc", "odc.fsdp_patch"]
_CONTEXT.set_forkserver_preload(["on_device", *_PRELOADED, "odc.transports.shm", "process_ranks", "warm_ranks"])


@functools.cache
def _start_server() -> None:
    """The process that forks the ranks. It finds modules of this folder by the environment only (Python 3.11)."""
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.path.dirname(__file__), path]))
    try:
        forkserver.ensure_running()
    finally:
        if path is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = path


@dataclass
class RankResult:
    """How one rank ended: what its function returned, or its error, and the exit code of its process."""

    value: Any = None
    error: str | None = None
    error_type: str | None = None
    exitcode: int | None = None
    seconds: float = 0.0


@dataclass
class RankGroup:
    """Running ranks."""

    processes: list[Any]
    pipes: list[Connection]
    folder: str
    started: float = field(default_factory=time.monotonic)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def join(self, timeout_s: float, expendable: Sequence[int] = ()) -> list[RankResult]:
        """Wait for all ranks but the ``expendable`` ones; kill what is left then, or after ``timeout_s``."""
        deadline = self.started + timeout_s
        results = [RankResult() for _ in self.processes]
        open_pipes = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in expendable}
        while open_pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(open_pipes), timeout=left):
                rank = open_pipes.pop(pipe)  # type: ignore[call-overload]
                results[rank] = self._receive(pipe)  # type: ignore[arg-type]
                results[rank].seconds = time.monotonic() - self.started
        for rank in expendable:
            self.processes[rank].kill()
        for rank, process in enumerate(self.processes):
            process.join(max(deadline - time.monotonic(), 5.0))  # one that has been killed takes its time, too
            if process.is_alive():
                process.kill()
                process.join()
                results[rank].error = results[rank].error or f"killed by the test after {timeout_s} s"
            results[rank].exitcode = process.exitcode
            if results[rank].error == _NO_RESULT:
                results[rank].error = f"{_NO_RESULT}: exit code {process.exitcode}"
        shutil.rmtree(self.folder, ignore_errors=True)
        return results

    @staticmethod
    def _receive(pipe: Connection) -> RankResult:
        try:
            kind, *payload = pipe.recv()
        except EOFError:
            return RankResult(error=_NO_RESULT)
        if kind == "value":
            return RankResult(value=payload[0])
        return RankResult(error=payload[1], error_type=payload[0])


def _main(
    rank: int,
    world_size: int,
    store: str,
    env: Mapping[str, str],
    pipe: Connection,
    body: Callable[..., Any],
    args: Any,
    enter: Callable[[int, int], None] | None,
) -> None:
    os.environ.update(env)
    if enter is not None:
        enter(rank, world_size)
    torch.set_num_threads(1)
    gc.set_threshold(20_000, 20, 20)  # a rank is over before garbage counts, and looking for it takes time
    on_device.enter()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )
    dist.barrier()  # a rank that ends before the others have all their connections takes theirs along
    try:
        pipe.send(("value", on_device.leave(body(rank, world_size, *args))))
    except BaseException as error:
        pipe.send(("error", type(error).__name__, f"{error}\n{traceback.format_exc()}"))
        pipe.close()
        os._exit(1)  # a failed rank does nothing collective on its way out
    pipe.close()
    dist.destroy_process_group()


def start_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    env: Mapping[str, str] | None = None,
    enter: Callable[[int, int], None] | None = None,
) -> RankGroup:
    """Start ``body(rank, world_size, *args)`` on every rank, inside a gloo process group.

    ``enter(rank, world_size)`` is what each process does first.
    """
    _start_server()
    folder = tempfile.mkdtemp(prefix="odc-test-")
    store = os.path.join(folder, "store")
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(
            target=_main, args=(rank, world_size, store, env or {}, theirs, body, args, enter), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return RankGroup(processes, pipes, folder)


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout_s: float = 180.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run ``body`` on every rank and return what each returned; raise the first rank's error otherwise."""
    results = start_ranks(world_size, body, *args, env=env).join(timeout_s)
    for rank, result in enumerate(results):
        if on_device.NAME == "cuda" and "it serves one host, the ranks are on 2" in str(result.error):
            pytest.skip("ranks that pose as two hosts share one GPU, which NVSHMEM refuses")
        if result.error is not None:
            raise AssertionError(f"rank {rank}: {result.error_type}: {result.error}")
        assert result.exitcode == 0, f"rank {rank} has given its result, and ended with {result.exitcode}"
    return [result.value for result in results]


def assert_one_says(results: list[RankResult], kind: str, *words: str) -> None:
    """A rank fails with ``kind`` and ``words``; another may be told of it."""
    assert all(r.error_type in (kind, "AbortedError", "PeerClosedError") for r in results), results
    assert any(r.error_type == kind and all(word in (r.error or "") for word in words) for r in results), results


def assert_all_say(results: Sequence[RankResult], *words: str, kinds: Sequence[str] = ()) -> None:
    """Each has failed with all of these words, and with an error of one of these ``kinds``."""
    for result in results:
        assert result.error, "it has not failed"
        assert not kinds or result.error_type in kinds, result
        assert all(word in result.error for word in words), (words, result)


def wait_until(holds: Callable[[], bool], otherwise: str, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def found_by(function: Callable[..., Any], functions: Sequence[Callable[..., Any]], world_size: int = 2) -> list[Any]:
    """What ``function`` returned on each rank. All ``functions`` run on the same ranks, one after the other: once."""
    return [of_rank[functions.index(function)] for of_rank in _run_all(tuple(functions), world_size)]


@functools.cache
def _run_all(functions: Sequence[Callable[..., Any]], world_size: int) -> list[list[Any]]:
    return run_ranks(world_size, _call_all, functions, env={"ODC_TIMEOUT": "60"}, timeout_s=300)


def _call_all(rank: int, world_size: int, functions: Sequence[Callable[..., Any]]) -> list[Any]:
    return [function(rank, world_size) for function in functions]


def across(rank: int, world_size: int, hosts: int, body: Callable[..., Any], *args: Any) -> Any:
    """``body`` on ranks that pose as so many hosts, and share nothing in each."""
    os.environ["ODC_SHARE_IN_HOST"] = "off"
    os.environ["ODC_HOST_ID"] = f"host{rank * hosts // world_size}"
    return body(rank, world_size, *args)
