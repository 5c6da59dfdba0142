"""Ranks of one check, and what each of them returned. The first that fails ends the group: the others would only
report that it is gone.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from odc.bench.gpu.setting import CheckFailedError, NotRunError, Setting
from odc.bench.harness.ranks import meet, rank_processes

_MEETING_LIMIT_S = 120.0


@dataclass(frozen=True)
class Rank:
    """One rank of a check, inside a process group."""

    rank: int
    world_size: int
    setting: Setting
    device: torch.device

    def meet(self) -> None:
        """All ranks are here, and what their devices were given is done."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.largest(0.0)

    def largest(self, value: float) -> float:
        """The largest ``value`` of all ranks. Collective, between hosts' memories only."""
        word = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX)
        return float(word.item())


def run_ranks(
    setting: Setting,
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    limit_s: float | None = None,
    expendable: Collection[int] = (),
) -> list[Any]:
    """What ``body(rank, *arguments)`` returned on every rank; None for the ``expendable`` ones, which may die.

    Raises:
        NotRunError: a rank raised it.
        CheckFailedError: a rank failed, died, or had not ended after ``limit_s`` (default: the setting's).
    """
    limit_s = limit_s or setting.group_limit_s
    # Nothing for training: of the checks, each of which has a fork server for its ranks, few train.
    with rank_processes(world_size, _main, (setting, body, tuple(arguments)), preload=()) as pipes:
        awaited = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in expendable}
        results: list[Any] = [None] * world_size
        deadline = time.monotonic() + limit_s
        while awaited:
            ready = wait(list(awaited), max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise CheckFailedError(f"ranks {sorted(awaited.values())} had not ended after {limit_s:g} s")
            for pipe in [pipe for pipe in awaited if pipe in ready]:
                rank = awaited.pop(pipe)
                results[rank] = _receive(pipe, rank, world_size)
    return results


def _receive(pipe: Connection, rank: int, world_size: int) -> Any:
    try:
        kind, payload = pipe.recv()
    except EOFError:
        raise CheckFailedError(f"rank {rank} of {world_size}: its process ended without a result") from None
    if kind == "not run":
        raise NotRunError(payload)
    if kind == "error":
        raise CheckFailedError(f"rank {rank} of {world_size}: {payload}")
    return payload


def _main(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    setting: Setting,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        pipe.send(("value", body(_set_up(rank, world_size, setting, store), *arguments)))
    except BaseException as error:
        traceback.print_exc()
        kind = "not run" if isinstance(error, NotRunError) else "error"
        text = str(error) if isinstance(error, NotRunError | CheckFailedError) else f"{type(error).__name__}: {error}"
        pipe.send((kind, text))
        pipe.close()
        os._exit(1)  # a failed rank does nothing collective on its way out
    pipe.close()
    dist.destroy_process_group()


def _set_up(rank: int, world_size: int, setting: Setting, store: str) -> Rank:
    setting.be_prepared()
    device = setting.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    meet(rank, world_size, store, setting.backend(world_size), _MEETING_LIMIT_S)
    return Rank(rank, world_size, setting, device)
