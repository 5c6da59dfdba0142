"""Ranks of a benchmark as processes of this machine: started, joined into a process group, and always ended."""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store

from odc.config import LaunchEnvironment

logger = logging.getLogger("odc")

SILENCE_LIMIT_S = 600.0  # of all ranks of run_ranks: they report their progress
_END_LIMIT_S = 20.0
_PR_SET_PDEATHSIG = 1
# torch._dynamo: fully_shard and optimizers import it when first used, which is most of a short rank's time.
FOR_TRAINING = ("torch._dynamo", "torch.distributed.fsdp", "odc.fsdp_patch", "odc.transports.shm")


class BenchError(RuntimeError):
    """Ends a benchmark or a check. The text alone says what is wrong."""


class RankFailedError(BenchError):
    """A rank of :func:`run_ranks` has failed; its traceback is on standard error."""


class NotRunError(BenchError):
    """The measurement cannot run on this machine; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where ranks compute, and over which transport."""

    transport: str = "auto"
    device_type: str = "cpu"
    num_gpus: int = 0
    quick: bool = False
    """Fewer cases, sizes and repetitions: a first look, not a proof."""
    prepare: str = ""
    """``"module:function"`` to call in every process first: fake transports are registered there."""

    @classmethod
    def of_this_machine(cls) -> Place:
        """This machine's GPUs if there are any, else its cores."""
        if torch.cuda.is_available() and torch.cuda.device_count():
            return cls(device_type="cuda", num_gpus=torch.cuda.device_count())
        return cls()

    def owns_gpus(self, world_size: int) -> bool:
        """Whether every rank has a GPU of its own."""
        return self.device_type == "cuda" and self.num_gpus >= world_size

    def device(self, rank: int) -> torch.device:
        """The device of ``rank`` of one host. Ranks share GPUs if there are fewer of them."""
        if self.device_type != "cuda":
            return torch.device(self.device_type)
        return torch.device("cuda", rank % max(self.num_gpus, 1))

    def backend(self, world_size: int) -> str:
        """The process group for set-up and baselines: NCCL refuses two ranks on one GPU."""
        return "cpu:gloo,cuda:nccl" if self.owns_gpus(world_size) else "gloo"

    def be_prepared(self) -> None:
        if self.prepare:
            resolve(self.prepare)()


CPU = Place()


def resolve(location: str) -> Callable[..., Any]:
    """The function at ``"module:name"``."""
    module, _, name = location.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


@dataclass(frozen=True)
class Rank:
    """One rank, inside a process group."""

    rank: int
    world_size: int
    place: Place
    device: torch.device
    report: Callable[[float], object] = lambda amount: None
    """Report progress to the bar of the process that started the ranks."""

    def meet(self) -> None:
        """Wait until all ranks are here and their devices have done what they were given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.largest(0.0)

    def largest(self, value: float) -> float:
        """The largest ``value`` of all ranks. Collective on host memory."""
        word = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return float(word.item())


def run_ranks(
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    place: Place = CPU,
    on_progress: Callable[[float], object] = lambda amount: None,
    limit_s: float | None = None,
    expendable: Collection[int] = (),
    preload: Sequence[str] = FOR_TRAINING,
    enter: Callable[[int, int], object] | None = None,
) -> list[Any]:
    """Run ``body(rank, *arguments)``, with a :class:`Rank`, on every rank of a new process group. Returns the values.

    Args:
        body: a function of a module.
        limit_s: of all together; without one they must report progress every ten minutes.
        expendable: ranks that may die; what they return is not waited for, and None.
        preload: see :func:`process_of_fork_server`.
        enter: what each process does first, with rank and world size.

    Raises:
        NotRunError: a rank raised it.
        RankFailedError: a rank failed, ended or was late. The others do not outlive it.
    """
    results: list[Any] = [None] * world_size
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with rank_processes(world_size, _run_body, (place, body, arguments, enter), preload=preload) as pipes:
        awaited = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in expendable}
        while awaited:
            ready = wait(list(awaited), SILENCE_LIMIT_S if deadline is None else max(deadline - time.monotonic(), 0.0))
            if not ready:
                what = (
                    f"said nothing for {SILENCE_LIMIT_S:g}" if limit_s is None else f"had not ended after {limit_s:g}"
                )
                raise RankFailedError(f"ranks {sorted(awaited.values())} {what} s")
            for pipe in [pipe for pipe in awaited if pipe in ready]:
                kind, payload = _receive(pipe, f"rank {awaited[pipe]} of {world_size}")
                if kind == "progress":
                    on_progress(payload)
                else:
                    results[awaited.pop(pipe)] = payload
    return results


def _receive(pipe: Connection, who: str) -> tuple[str, Any]:
    try:
        kind, payload = pipe.recv()
    except EOFError:
        raise RankFailedError(f"{who}: its process ended without a result") from None
    if kind == "not run":
        raise NotRunError(payload)
    if kind == "error":
        raise RankFailedError(f"{who}: {payload}")
    return kind, payload


def _run_body(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    place: Place,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
    enter: Callable[[int, int], object] | None,
) -> None:
    try:
        if enter is not None:
            enter(rank, world_size)
        me = join(rank, world_size, place, store, lambda amount: pipe.send(("progress", amount)))
        pipe.send(("value", body(me, *arguments)))
    except BaseException as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, BenchError) else f"{type(error).__name__}: {error}"
        pipe.send(("not run" if isinstance(error, NotRunError) else "error", text))
        pipe.close()
        os._exit(1)  # a failed rank does nothing collective on its way out
    pipe.close()
    dist.destroy_process_group()


def join(
    rank: int, world_size: int, place: Place, store: str, report: Callable[[float], object] = lambda amount: None
) -> Rank:
    """Join the process group of these ranks. They meet through the file ``store``, or, if that is empty, as torchrun
    says."""
    place.be_prepared()
    launched = LaunchEnvironment.from_environment()
    device = place.device(rank if store else launched.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if store:
        meet(rank, world_size, store, place.backend(world_size), SILENCE_LIMIT_S)
    elif not dist.is_initialized():
        backend = place.backend(launched.local_world_size)
        dist.init_process_group(backend, timeout=timedelta(seconds=SILENCE_LIMIT_S))
    me = Rank(rank, world_size, place, device, report)
    me.largest(0.0)  # one that ends before the others have all their connections takes theirs along
    return me


def process_of_fork_server(
    main: Callable[..., None], *arguments: Any, preload: Sequence[str] = (), daemon: bool = False
) -> Any:
    """A process, not yet started, that calls ``main(*arguments)`` and is killed when this one ends.

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
) -> Iterator[list[Connection]]:
    """Start ranks; give this process's ends of their pipes. No rank outlives the block, and a block that raises does
    not wait for the ranks.

    Args:
        main: called in each rank's process with rank, world size, the path of the file through which they
            :func:`meet`, its own end of the pipe, and ``arguments``.
        preload: see :func:`process_of_fork_server`.
    """
    processes, pipes, failed = [], [], True
    with tempfile.TemporaryDirectory(prefix="odc-ranks-") as folder:
        try:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe(duplex=False)
                words = (rank, world_size, str(Path(folder, "store")), theirs, *arguments)
                process = process_of_fork_server(main, *words, preload=preload, daemon=True)
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


def keep_from_collector() -> None:
    """Exclude all present objects from garbage collection. Later collections would look at all that was imported, and
    in a fork so copy its memory."""
    gc.collect()
    gc.freeze()


def die_with_parent() -> None:
    """Have this process killed when the process that asked for it ends, however that ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The kernel means who started it: a fork server, which in turn lives as long as what it has started.
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_die_after, args=(parent,), name="odc-parent", daemon=True).start()


def _die_after(parent: Any) -> None:
    parent.join()
    os.kill(os.getpid(), signal.SIGKILL)


def meet(rank: int, world_size: int, store: str | Store, backend: str, limit_s: float) -> None:
    """Join the process group of these ranks, which meet through a file, so that no port is fixed, or through a
    store."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one host: whatever its name resolves to
    dist.init_process_group(
        backend,
        store=FileStore(store, world_size) if isinstance(store, str) else store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=limit_s),
    )
