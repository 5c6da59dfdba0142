"""Ranks of a loader that binds late, in virtual time: microbatches take as long as they are told."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pytest
import torch.distributed as dist

from odc.balance.late_binding import estimates, microbatches, shares

BatchT = TypeVar("BatchT")


class Clock:
    """In place of the module ``time``."""

    def __init__(self) -> None:
        self.now = 1e6

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


def keep_time(patch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let late binding read this clock."""
    for module in (estimates, microbatches, shares):
        patch.setattr(module, "time", clock)


class BusyStore(dist.HashStore):
    """A store on which, before some of the calls of a rank, another rank goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] = nothing

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.interrupt()
        return super().compare_set(key, expected, desired)


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
