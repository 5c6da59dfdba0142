"""The batch sampler behind a balanced loader: the same samples per optimizer step, shared out anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from odc.trainers.bundles import cut
from odc.trainers.options import Planner

ShardOf = Callable[[Any, int], Any]
"""(batch sampler of the whole dataset, rank) -> the batches of that rank."""


@dataclass
class GivenBatches:
    """Batches that were drawn already, as the batch sampler that they came from."""

    batches: Sequence[Sequence[int]]
    batch_size: int | None
    drop_last: bool

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self.batches)  # copies: accelerate appends to them


class BalancedBatches:
    """Yields, for every batch that this rank would have got, a bundle: a list of microbatches, lists of samples.

    Every rank draws the batches of all ranks, takes those of one optimizer step together, plans, and keeps its own
    part, cut into as many bundles as there would have been batches. So a step trains on exactly the samples it would
    have trained on, the repeated ones at the end of an epoch included.

    Args:
        inner: the batch sampler of the whole dataset.
        shard_of: the library's own way of dealing out its batches.
        planner: of this dataset.
        rank: of this process.
        accumulation_steps: batches per rank and optimizer step.
        agree: makes the batches that an epoch draws the same on all ranks.
    """

    def __init__(
        self,
        inner: Any,
        shard_of: ShardOf,
        planner: Planner,
        rank: int,
        accumulation_steps: int,
        agree: Callable[[Sequence[Sequence[int]]], Sequence[Sequence[int]]] = list,
    ) -> None:
        self.batch_sampler = inner  # where libraries look for it
        self.num_processes = planner.world_size
        self.batch_size = getattr(inner, "batch_size", None)
        self.drop_last = bool(getattr(inner, "drop_last", False))
        self.accumulation_steps = accumulation_steps
        self._shard_of = shard_of
        self._planner = planner
        self._rank = rank
        self._agree = agree

    @property
    def sampler(self) -> Any:
        """That of the whole dataset; libraries call its ``set_epoch``."""
        return getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        """Batches per rank of the rank that has most."""
        return max(len(self._shard_of(self.batch_sampler, rank)) for rank in range(self._planner.world_size))

    def set_epoch(self, epoch: int) -> None:
        """Pass it on to whatever has one."""
        for sampler in (self.batch_sampler, self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[list[int]]]:
        for samples, num_batches in self.steps():
            yield from cut(self._planner.microbatches(samples)[self._rank], num_batches)

    def steps(self) -> Iterator[tuple[list[int], int]]:
        """Of each optimizer step of an epoch, the samples of all ranks and the number of batches per rank."""
        batches = self._agree([list(batch) for batch in self.batch_sampler])
        drawn = GivenBatches(batches, self.batch_size, self.drop_last)
        ranks = [list(self._shard_of(drawn, rank)) for rank in range(self._planner.world_size)]
        num_batches = max(map(len, ranks))
        for start in range(0, num_batches, self.accumulation_steps):
            stop = min(start + self.accumulation_steps, num_batches)
            yield [sample for batches in ranks for batch in batches[start:stop] for sample in batch], stop - start
