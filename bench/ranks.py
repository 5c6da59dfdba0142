"""Ranks of a benchmark as processes of this machine: started, joined into a group, never left behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist

_END_LIMIT_S = 20.0
_PR_SET_PDEATHSIG = 1
# torch._dynamo: fully_shard and optimizers import it when first used, which is most of a short rank's time.
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "odc.fsdp_patch", "odc.transports.shm"]


@contextmanager
def rank_processes(
    world_size: int, main: Callable[..., None], arguments: Sequence[Any], *, spawn: bool = False
) -> Iterator[list[Connection]]:
    """The ranks' ends of their pipes while they run; no rank outlives the block, nor is waited for if it raises.

    Args:
        main: called in each rank's process with rank, world size, the path of the file through which they
            :func:`meet`, its own end of the pipe, and ``arguments``.
        spawn: start from nothing. A forked process cannot use CUDA if its parent has; on a CPU a fork server saves
            importing torch in every rank.
    """
    context: Any = multiprocessing.get_context("spawn" if spawn else "forkserver")
    if not spawn:
        context.set_forkserver_preload([*_PRELOADED, main.__module__])
    processes, pipes, failed = [], [], True
    with tempfile.TemporaryDirectory(prefix="odc-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                words = (main, rank, world_size, str(Path(folder, "store")), theirs, *arguments)
                process = context.Process(target=_main, args=words, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                pipes.append(ours)
            yield pipes
            failed = False
        finally:
            deadline = time.monotonic() + (0.0 if failed else _END_LIMIT_S)
            for process in processes:
                process.join(max(deadline - time.monotonic(), 0.0))
                process.kill()
                process.join()
            for pipe in pipes:
                pipe.close()


def _main(main: Callable[..., None], *words: Any) -> None:
    die_with_parent()
    main(*words)


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
