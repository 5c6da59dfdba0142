"""Bundles, which replace the user's batches: the same samples per optimizer step, redistributed over the ranks.

Training libraries count batches to find the end of an optimizer step. So every rank gets one bundle for each batch that
it would have got, for any number of microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from odc.balance.checks import IntArray
from odc.errors import UnsupportedError

# A bundle: some of a rank's microbatches


T = TypeVar("T")

Microbatch = dict[str, Any]


@dataclass(frozen=True)
class StepEnd:
    """What is known where an optimizer step ends."""

    step: int = 0
    """Steps of the epoch until now. It and what follows: of a stream."""

    num_samples: int = 0
    """All ranks together."""

    state: dict[str, Any] = field(default_factory=dict)
    """Of the stream behind the step."""


@dataclass
class LateStep:
    """A step whose samples are bound late: what is needed to take some of other ranks."""

    samples: IntArray
    """Dataset indices of all ranks, which may have one twice."""

    shares: list[list[int]]
    """Positions in ``samples`` of those of each rank."""

    counts: IntArray
    """Tokens and labels of each sample of this rank's share as it was collated, in the order of its microbatches,
    (2, num_samples)."""

    num_rows: list[int]
    """Rows of each of this rank's microbatches, in the order of its plan."""


@dataclass
class Bundle:
    """The microbatches of one item of a balanced loader, possibly none."""

    microbatches: list[Microbatch]
    num_first_labels: int = 0
    """First tokens of samples that had a label before they were packed."""

    planned: int = 0
    """Microbatches that the step's plan has for this rank; in the first bundle of a step only."""

    end: StepEnd | None = None
    """The optimizer step ends with this bundle."""

    late: LateStep | None = None
    """All samples of the step are bound when they are trained on, those of this bundle first; in the last one only."""

    is_placeholder: bool = False
    """Stands for one that was trained on before, and is to be skipped."""

    def to(self, device: Any, non_blocking: bool = False) -> Bundle:
        """As of a tensor: loaders move what they yield."""
        moved = [{k: v.to(device, non_blocking=non_blocking) for k, v in one.items()} for one in self.microbatches]
        return replace(self, microbatches=moved)

    def pin_memory(self) -> Bundle:
        """As of a tensor."""
        return replace(self, microbatches=[{k: v.pin_memory() for k, v in one.items()} for one in self.microbatches])


def cut(microbatches: Sequence[T], num_bundles: int) -> list[list[T]]:
    """``num_bundles`` runs of about equal length; the last is not empty unless all are.

    That the last has something matters where gradients are only reduced in the last batch of a step
    (``Accelerator.no_sync``).

    >>> cut("ab", 3)
    [[], ['a'], ['b']]
    """
    cuts = [len(microbatches) * i // num_bundles for i in range(num_bundles + 1)]
    return [list(microbatches[a:b]) for a, b in itertools.pairwise(cuts)]


def check_step(bundles: Sequence[Bundle]) -> None:
    """Refuse to train on other bundles than all of one step.

    Raises:
        UnsupportedError: a training library has taken fewer or more together, or has not skipped placeholders.
    """
    if any(bundle.is_placeholder for bundle in bundles):
        raise UnsupportedError(
            "training goes on from a checkpoint, but begins with a batch that was trained on before it: the trainer "
            "must skip what is done. Resume with the same numbers of batches, steps and ranks, or set "
            "ignore_data_skip=True"
        )
    if [bundle.end is not None for bundle in bundles] != [False] * (len(bundles) - 1) + [True]:
        raise UnsupportedError(
            f"the trainer takes {len(bundles)} batches for an optimizer step, which are not those of one: "
            "gradient_accumulation_steps must be the same from the loader to the last step"
        )


def microbatches_of(items: Sequence[Any]) -> list[Any]:
    """The microbatches of bundles; anything else is one already."""
    return [one for item in items for one in (item.microbatches if isinstance(item, Bundle) else [item])]


def counted_batches_of(items: Sequence[Any]) -> list[Any]:
    """The microbatches, for counting labels as the trainer would have in the user's batches.

    Where it knows that the model shifts labels, it counts all but each row's first; else (GPT2LMHeadModel) all, also
    the first ones, which packing has taken away. So they follow as rows of one label, which the former does not count.
    """
    batches = microbatches_of(items)
    num_first_labels = sum(item.num_first_labels for item in items if isinstance(item, Bundle))
    if not num_first_labels:
        return batches
    return [*batches, {"labels": torch.zeros(num_first_labels, 1, device=batches[0]["labels"].device)}]


# The batch sampler behind a balanced loader


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
