"""Jobs on ranks of this machine: one process group for many of them, a new one after a job that broke it."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from odc.bench.harness.ranks import rank_processes

Prepare = Callable[[int], None]
"""Called with its rank in every rank before the first job; a module-level function. Tests break something here."""
Message = dict[str, Any]
"""What a rank says of a job: what it has measured, or "error" and "text"."""
Job = TypeVar("Job")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Suite(Generic[Job]):
    """What a rank does, in functions of modules."""

    set_up: Callable[[int, int, str], Any]
    """With rank, world size, and the path of the file through which ranks meet."""
    measure: Callable[[Job, int, Any], Message]
    """With a job, the rank, and what it has set up."""
    tell: Callable[[BaseException], Message]
    """Of an error that is none of the job's outcomes: a rank has ended then."""


def run_jobs(
    jobs: Mapping[int, Job],
    world_size_of: Callable[[Job], int],
    suite: Suite[Job],
    judge: Callable[[int, Job, Sequence[Connection]], tuple[Outcome, bool]],
    prepare: Prepare | None,
    most: int,
) -> dict[int, Outcome]:
    """Outcomes of jobs, which have numbers.

    Args:
        judge: waits for what ranks say of a job; its outcome, and whether they can go on.
        most: jobs of one group.
    """
    outcomes: dict[int, Outcome] = {}
    for world_size in sorted({world_size_of(job) for job in jobs.values()}):
        left = {number: job for number, job in jobs.items() if world_size_of(job) == world_size}
        while left:
            some = dict(list(left.items())[:most])
            with rank_processes(world_size, _main, (list(some.values()), suite, prepare)) as pipes:
                for number in some:
                    outcomes[number], can_go_on = judge(number, left.pop(number), pipes)
                    if not can_go_on:
                        for pipe in pipes:
                            pipe.close()
                        break
    return outcomes


def collect(pipes: Sequence[Connection], limit_s: float, last_words_s: float) -> list[Message | None]:
    """What each rank has to say; None of one that says nothing in time, or soon after another one has failed."""
    messages: list[Message | None] = [None] * len(pipes)
    left, deadline = list(pipes), time.monotonic() + limit_s
    while left and (ready := wait(left, max(deadline - time.monotonic(), 0.0))):
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                left.remove(pipe)
                message = messages[rank] = _receive(pipe)
                if "error" in message:
                    deadline = min(deadline, time.monotonic() + last_words_s)
    return messages


def _receive(pipe: Connection) -> Message:
    try:
        message: Message = pipe.recv()
    except EOFError:
        return {"error": "Died", "text": "its process ended without a word"}
    return message


def _main(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    jobs: Sequence[Job],
    suite: Suite[Job],
    prepare: Prepare | None,
) -> None:
    try:
        place = suite.set_up(rank, world_size, store)
        if prepare is not None:
            prepare(rank)
        for job in jobs:
            pipe.send(suite.measure(job, rank, place))
    except BaseException as error:
        traceback.print_exc()
        pipe.send(suite.tell(error))
        os._exit(1)  # a failed rank does nothing collective on its way out
    dist.destroy_process_group()
