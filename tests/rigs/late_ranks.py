"""Ranks of a loader that binds late, in virtual time: microbatches take as long as they are told.

They are known to train from the start, but in tests of how a loader finds out.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

from odc.balance.data.iteration import Trained
from odc.balance.late_binding import estimates, work_queues

BatchT = TypeVar("BatchT")


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1e6

    def monotonic(self) -> float:
        return self.now


class Training:
    """In place of what ODC tells: whenever one looks, another backward has ended."""

    def __init__(self) -> None:
        self.minibatches = self.backwards = 0

    def __call__(self) -> Trained:
        self.backwards += 1
        return Trained(self.minibatches, self.backwards, 0.0)


def keep_time(patch: pytest.MonkeyPatch, clock: Clock) -> Training:
    """Let late binding read this clock, and take part from the start."""
    training, begin_pass = Training(), work_queues.WorkQueues.begin_pass

    def begin(self: work_queues.WorkQueues) -> None:
        begin_pass(self)
        self.binds = True

    patch.setattr(work_queues, "trained", training)
    patch.setattr(work_queues.WorkQueues, "begin_pass", begin)
    for module in (estimates, work_queues):
        patch.setattr(module, "time", clock)
    return training


class BusyStore:
    """A store on which, before each access of a rank, another rank may go on."""

    def __init__(self) -> None:
        self._store = dist.HashStore()
        self.interrupt: Callable[[], None] = nothing

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.interrupt()
            return getattr(self._store, name)(*args)

        return call


def nothing() -> None:
    pass


def run_timed(
    loops: Sequence[Iterator[BatchT]], clock: Clock, seconds: Callable[[int, BatchT], float]
) -> tuple[float, list[list[BatchT]]]:
    """A minibatch: how long until the last rank is through, and the microbatches of each.

    Args:
        seconds: how long a rank takes for a microbatch.
    """
    done: list[list[BatchT]] = [[] for _ in loops]
    started = end = clock.now
    queue = [(started, rank) for rank in range(len(loops))]
    while queue:
        now, rank = heapq.heappop(queue)
        clock.now = now
        for batch in loops[rank]:
            done[rank].append(batch)
            heapq.heappush(queue, (now + seconds(rank, batch), rank))
            break
        else:
            end = max(end, now)
    clock.now = end
    return end - started, done


def run_at_random(
    loops: Sequence[Iterator[BatchT]], clock: Clock, store: BusyStore, noise: float, rng: random.Random
) -> list[BatchT]:
    """The microbatches of a minibatch in the order in which they were begun. Before a rank looks at a word or replaces
    it, another one may go on."""
    left, running = set(range(len(loops))), set[int]()
    begun: list[BatchT] = []

    def go_on(rank: int) -> None:
        running.add(rank)
        clock.now += rng.uniform(0.0, 2.0)
        batch = next(loops[rank], None)
        running.discard(rank)
        if batch is None:
            left.discard(rank)
        else:
            begun.append(batch)
            clock.now += rng.lognormvariate(0.0, noise)

    def interrupt() -> None:
        if rng.random() < 0.3 and (others := sorted(left - running)):
            go_on(rng.choice(others))

    store.interrupt = interrupt
    while left:
        go_on(rng.choice(sorted(left)))
    store.interrupt = nothing
    return begun
