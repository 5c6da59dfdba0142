"""Ranks of a loader that binds late, in virtual time: microbatches take as long as they are told."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

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
    """Let late binding read this clock, and look at each store through :class:`Prefixed`."""
    patch.setattr(shares, "PrefixStore", Prefixed)
    for module in (estimates, microbatches, shares):
        patch.setattr(module, "time", clock)


class BusyStore(dist.HashStore):
    """A store on which, before each access of a rank, another rank may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.interrupt: Callable[[], None] = nothing


class Prefixed:
    """In place of torch's ``PrefixStore``, which calls C++ whatever a subclass in Python says."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix, self._store = prefix, store

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(key: str | list[str], *args: Any) -> Any:
            if isinstance(self._store, BusyStore):
                self._store.interrupt()
            keys = f"{self._prefix}/{key}" if isinstance(key, str) else [f"{self._prefix}/{one}" for one in key]
            return getattr(self._store, name)(keys, *args)

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
