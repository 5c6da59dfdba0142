"""Cells on ranks: one process group for all cells of a world size, a new one after a cell that broke it."""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from odc.bench.harness.ranks import meet, rank_processes
from odc.bench.proof.conformance.cells import Cell
from odc.bench.proof.conformance.comparison import Outcome, measure
from odc.config import HOST_ID, TIMEOUT

CELL_LIMIT_S = 120.0  # a cell takes a second or two
SILENCE_LIMIT_S = 60  # of one rank towards another, in either run
RANKS_PER_HOST = 2
Prepare = Callable[[int], None]
"""Called with its rank in every rank before the first cell; a module-level function. Tests break something here."""


def run_cells(
    cells: Sequence[Cell], on_outcome: Callable[[Outcome], None] = lambda _: None, prepare: Prepare | None = None
) -> list[Outcome]:
    """Measure cells on CPU processes of this machine; the outcomes, in the order of ``cells``.

    An error other than a refusal, or no result in time, fails its cell; the others go on with new ranks.
    """
    outcomes = {}
    for world_size in sorted({cell.world_size for cell in cells}):
        left = [cell for cell in cells if cell.world_size == world_size]
        while left:
            for outcome in _run_on_one_group(world_size, left, prepare):
                outcomes[outcome.cell] = outcome
                on_outcome(outcome)
            left = [cell for cell in left if cell not in outcomes]
    return [outcomes[cell] for cell in cells]


def _run_on_one_group(world_size: int, cells: Sequence[Cell], prepare: Prepare | None) -> Iterator[Outcome]:
    """One outcome after the other, until the last one or one that broke the group."""
    with rank_processes(world_size, _main, (cells, prepare)) as pipes:
        for cell in cells:
            outcome = _collect(cell, pipes)
            if isinstance(outcome, str):
                yield Outcome(cell, "failed", outcome)
                return
            yield outcome


def _collect(cell: Cell, pipes: Sequence[Connection]) -> Outcome | str:
    """The outcome that all ranks agree on, or why there is none."""
    left, outcomes = list(pipes), []
    while left:
        ready = wait(left, CELL_LIMIT_S)
        if not ready:
            return f"no result from ranks {[pipes.index(pipe) for pipe in left]} within {CELL_LIMIT_S:g} s"
        failures = []
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                left.remove(pipe)
                message = _receive(pipe)
                if isinstance(message, str):
                    failures.append(f"rank {rank}: {message}")
                else:
                    outcomes.append(message)
        if failures:  # all that are there: one may be only what another one led to
            return "; ".join(failures)
    return outcomes[-1]


def _receive(pipe: Connection) -> Outcome | str:
    try:
        message: Outcome | str = pipe.recv()
    except EOFError:
        return "its process ended"
    return message


def _main(
    rank: int, world_size: int, store: str, pipe: Connection, cells: Sequence[Cell], prepare: Prepare | None
) -> None:
    try:
        mesh = _set_up(rank, world_size, store)
        if prepare is not None:
            prepare(rank)
        for cell in cells:
            pipe.send(measure(cell, mesh))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {error}")
        os._exit(1)  # a failed rank does nothing collective on its way out
    dist.destroy_process_group()


def _set_up(rank: int, world_size: int, store: str) -> DeviceMesh:
    warnings.filterwarnings("ignore", module=r"torch\.")  # FSDP1 has much to say about its own future
    torch.set_num_threads(1)
    os.environ[HOST_ID] = f"host-{rank // RANKS_PER_HOST}"
    os.environ.setdefault(TIMEOUT, str(SILENCE_LIMIT_S))
    meet(rank, world_size, store, "gloo", SILENCE_LIMIT_S)
    if world_size == RANKS_PER_HOST:
        return init_device_mesh("cpu", (world_size,))
    shape = (world_size // RANKS_PER_HOST, RANKS_PER_HOST)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
