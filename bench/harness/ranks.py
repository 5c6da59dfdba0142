"""Ranks of a benchmark as processes of this machine: started, joined into a group, never left behind."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

logger = logging.getLogger("odc")

SILENCE_LIMIT_S = 600.0  # of all ranks of run_ranks: they report their progress
_END_LIMIT_S = 20.0
_PR_SET_PDEATHSIG = 1
# torch._dynamo: fully_shard and optimizers import it when first used, which is most of a short rank's time.
FOR_TRAINING = ("torch._dynamo", "torch.distributed.fsdp", "odc.fsdp_patch", "odc.transports.shm")


class RankFailedError(RuntimeError):
    """A rank of :func:`run_ranks` has failed; its traceback is on standard error."""


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    on_progress: Callable[[float], object] = lambda amount: None,
    have_children: bool = False,
) -> list[Any]:
    """What ``body(report, rank, world_size, *arguments)`` returned on every CPU rank, inside a gloo group.

    Args:
        body: a function of a module; what it gives to ``report`` reaches ``on_progress``.
        have_children: ranks may start processes, such as the workers of a loader, and end them themselves.

    Raises:
        RankFailedError: a rank failed or ended, or none said anything for ten minutes. The others do not outlive it.
    """
    results: list[Any] = [None] * world_size
    with rank_processes(world_size, _run_body, (body, arguments), have_children=have_children) as pipes:
        awaited = {pipe: rank for rank, pipe in enumerate(pipes)}
        while awaited:
            ready = wait(list(awaited), SILENCE_LIMIT_S)
            if not ready:
                raise RankFailedError(f"ranks {sorted(awaited.values())} said nothing for {SILENCE_LIMIT_S:g} s")
            for pipe in [pipe for pipe in awaited if pipe in ready]:
                kind, payload = _receive(pipe, awaited[pipe])
                if kind == "progress":
                    on_progress(payload)
                else:
                    results[awaited.pop(pipe)] = payload
    return results


def _receive(pipe: Connection, rank: int) -> tuple[str, Any]:
    try:
        kind, payload = pipe.recv()
    except EOFError:
        raise RankFailedError(f"rank {rank} ended without a result") from None
    if kind == "error":
        raise RankFailedError(f"rank {rank}: {payload}")
    return kind, payload


def _run_body(
    rank: int, world_size: int, store: str, pipe: Connection, body: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        meet(rank, world_size, store, "gloo", SILENCE_LIMIT_S)
        dist.barrier()  # one that ends before the others have all their connections takes theirs along
        pipe.send(("value", body(lambda amount: pipe.send(("progress", amount)), rank, world_size, *arguments)))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        pipe.close()
        os._exit(1)  # a failed rank does nothing collective on its way out
    pipe.close()
    dist.destroy_process_group()


def process_of_fork_server(
    main: Callable[..., None], *arguments: Any, preload: Sequence[str] = (), daemon: bool = False
) -> Any:
    """A process, to be started, that calls ``main(*arguments)`` and is killed when this one ends.

    It need not import torch: a fork server has. As that only imports, what it forks may use CUDA, which a fork of a
    process that uses CUDA itself cannot.

    Args:
        preload: modules that the fork server is to import besides that of ``main``, if it does not run already.
    """
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([main.__module__, *preload])
    return context.Process(target=_main, args=(dict(os.environ), main, *arguments), daemon=daemon)


@contextmanager
def rank_processes(
    world_size: int,
    main: Callable[..., None],
    arguments: Sequence[Any],
    *,
    preload: Sequence[str] = FOR_TRAINING,
    have_children: bool = False,
) -> Iterator[list[Connection]]:
    """The ranks' ends of their pipes while they run; no rank outlives the block, nor is waited for if it raises.

    Args:
        main: called in each rank's process with rank, world size, the path of the file through which they
            :func:`meet`, its own end of the pipe, and ``arguments``.
        preload: see :func:`process_of_fork_server`.
        have_children: see :func:`run_ranks`.
    """
    processes, pipes, failed = [], [], True
    with tempfile.TemporaryDirectory(prefix="odc-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe(duplex=False)
                words = (rank, world_size, str(Path(folder, "store")), theirs, *arguments)
                process = process_of_fork_server(main, *words, preload=preload, daemon=not have_children)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            yield pipes
            failed = False
        finally:
            deadline = time.monotonic() + (0.0 if failed else _END_LIMIT_S)
            for rank, process in enumerate(processes):
                process.join(max(deadline - time.monotonic(), 0.0))
                if process.is_alive() and not failed:  # it hangs in something that its results do not show
                    logger.warning(
                        "rank %d (pid %d) has not ended within %g s behind its result, and is killed",
                        rank,
                        process.pid,
                        _END_LIMIT_S,
                    )
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _main(environment: Mapping[str, str], main: Callable[..., None], *arguments: Any) -> None:
    die_with_parent()
    os.environ.clear()  # the fork server's own is that of the time when it was started
    os.environ.update(environment)
    main(*arguments)


def die_with_parent() -> None:
    """Have this process killed when the one that asked for it ends, however that ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The kernel means who started it: a fork server, which in turn lives as long as what it has started.
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_after, args=(parent,), name="odc-parent", daemon=True).start()


def _die_after(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def meet(rank: int, world_size: int, store: str, backend: str, limit_s: float) -> None:
    """Join the process group of these ranks. They meet through a file, so no port is fixed."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: whatever its name resolves to
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
