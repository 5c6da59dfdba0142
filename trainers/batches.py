"""The batch sampler behind a balanced loader: the same samples per optimizer step, to be shared out anew."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from odc.balance.checks import IntArray

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


@dataclass(frozen=True, eq=False)
class Part:
    """What takes the place of a rank's batch: one part of an optimizer step, not planned yet.

    It is planned where it is read, in workers if there are any. So skipped parts (to resume) cost nothing.
    """

    samples: IntArray
    """Dataset indices of the whole step, of all ranks, in the same order on all of them."""

    index: int
    num_parts: int
    """As many as a rank would have got batches in this step."""

    following: IntArray | None = None
    """The samples of the next step, to plan ahead; None: there is none."""


class BalancedBatches:
    """Yields a :class:`Part` for every batch that this rank would have got.

    Every rank draws the batches of all ranks, and takes those of one optimizer step together. So a step trains on
    exactly the samples it would have trained on, the repeated ones at the end of an epoch included.

    Args:
        inner: the batch sampler of the whole dataset.
        shard_of: the library's own way of dealing out its batches.
        world_size: number of ranks.
        accumulation_steps: batches per rank and optimizer step.
        split_batches: whether ranks share each batch, rather than take turns.
        agree: makes what an epoch draws the same on all ranks.
    """

    def __init__(
        self,
        inner: Any,
        shard_of: ShardOf,
        world_size: int,
        accumulation_steps: int,
        *,
        split_batches: bool = False,
        agree: Callable[[IntArray], IntArray] = np.asarray,
    ) -> None:
        self.batch_sampler = inner  # where libraries look for it
        self.num_processes = world_size
        self.batch_size = getattr(inner, "batch_size", None)
        self.drop_last = bool(getattr(inner, "drop_last", False))
        self.accumulation_steps = accumulation_steps
        self._shard_of = shard_of
        self._per_round = 1 if split_batches else world_size
        self._agree = agree

    @property
    def sampler(self) -> Any:
        """That of the whole dataset; libraries call its ``set_epoch``."""
        return getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        """Batches per rank of the rank that has most: they are dealt out from the first rank on."""
        return len(self._shard_of(self.batch_sampler, 0))

    def set_epoch(self, epoch: int) -> None:
        """Pass it on to whatever has one."""
        for sampler in (self.batch_sampler, self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Part]:
        samples, starts = self.rounds()
        ends = [*range(0, len(starts) - 1, self.accumulation_steps), len(starts) - 1]
        steps = [samples[starts[first] : starts[stop]] for first, stop in itertools.pairwise(ends)]
        for number, step in enumerate(steps):
            num_parts = ends[number + 1] - ends[number]
            following = steps[number + 1] if number + 1 < len(steps) else None
            for index in range(num_parts):
                yield Part(step, index, num_parts, following)

    def rounds(self) -> tuple[IntArray, IntArray]:
        """The samples of an epoch by rounds, in each of which every rank gets a batch.

        Returns:
            Dataset indices, and where each round begins in them, and the last one ends: (num_rounds + 1,).
        """
        drawn = [list(batch) for batch in self.batch_sampler]
        sizes = self._agree(np.array([len(batch) for batch in drawn], dtype=np.int64))
        samples = self._agree(np.fromiter(itertools.chain.from_iterable(drawn), dtype=np.int64))
        ends = np.concatenate([[0], np.cumsum(sizes)])
        num_full = self._num_full_rounds(sizes)
        starts = ends[: num_full * self._per_round + 1 : self._per_round]
        rest = self._dealt_out_rest(samples, ends, num_full)
        if not rest:
            return samples[: starts[-1]], starts
        lengths = [len(one) for one in rest]
        return (
            np.concatenate([samples[: starts[-1]], *(np.array(one, dtype=np.int64) for one in rest)]),
            np.concatenate([starts, starts[-1] + np.cumsum(lengths)]),
        )

    def _num_full_rounds(self, sizes: IntArray) -> int:
        """Rounds at the beginning of the epoch that any way of dealing out gives to the ranks as they are."""
        last_of_round = sizes[self._per_round - 1 :: self._per_round]
        if self.batch_size is None:
            return int(last_of_round.size)
        short = np.flatnonzero(last_of_round != self.batch_size)
        return int(short[0]) if short.size else int(last_of_round.size)

    def _dealt_out_rest(self, samples: IntArray, ends: IntArray, num_full: int) -> list[list[int]]:
        """The rounds behind the full ones, as the library deals them out: it may leave batches out or repeat samples.

        It is asked for every rank, and goes through all batches each time: so it gets the first round, of which it
        repeats samples, and this rest, rather than the whole epoch.
        """
        done = num_full * self._per_round
        if done == ends.size - 1:
            return []
        chosen = [*range(self._per_round if num_full else 0), *range(done, ends.size - 1)]
        batches = [samples[ends[i] : ends[i + 1]].tolist() for i in chosen]
        given = GivenBatches(batches, self.batch_size, self.drop_last)
        ranks = [list(self._shard_of(given, rank))[bool(num_full) :] for rank in range(self.num_processes)]
        return [
            [sample for batch in batches if batch is not None for sample in batch]
            for batches in itertools.zip_longest(*ranks)
        ]
