"""Layouts of a microbatch, packed or padded to the longest sample: tokens and cost."""

from __future__ import annotations

import itertools
import reprlib
from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args, overload

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_one_of

T = TypeVar("T")
ScalarT = TypeVar("ScalarT", bound=np.generic)
Layout = Literal["packed", "padded", "padded-attention"]
"""In "packed" microbatches, tokens and costs are the sums of those of the samples. In "padded" ones they are the number
of samples times those of the longest one (of several longest, the last). In "padded-attention" ones only attention is
computed on padded samples (ConvTransformer): tokens and all other costs are sums as in packed ones, and attention costs
the number of samples times that of the longest one."""

Microbatches = Sequence[Sequence[Sequence[int]]]
"""``microbatches[rank][m]``: samples of microbatch m of a rank."""


class OfRanks(Sequence[list[list[int]]]):
    """The microbatches of all ranks, of which a rank's are made when they are asked for."""

    @abstractmethod
    def of_rank(self, rank: int) -> list[list[int]]:
        """Those of a rank, from 0 to ``len(self) - 1``."""

    @overload
    def __getitem__(self, rank: int) -> list[list[int]]: ...

    @overload
    def __getitem__(self, rank: slice) -> list[list[list[int]]]: ...

    def __getitem__(self, rank: int | slice) -> list[list[int]] | list[list[list[int]]]:
        if isinstance(rank, slice):
            return [self[each] for each in range(len(self))[rank]]
        return self.of_rank(range(len(self))[rank])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class FlatMicrobatches(OfRanks):
    """Microbatches of all ranks in three arrays: a rank's are made into lists when they are asked for.

    Of thousands of ranks that is no hundred thousand objects, which would take time to make and to be gone through by
    the garbage collector, for the few lists that one rank needs.

    Args:
        samples: of all microbatches, one behind the other, (num_samples,) int64.
        sizes: samples of each microbatch, rank by rank, (num_microbatches,) int64.
        counts: microbatches of each rank, (num_ranks,) int64.
    """

    def __init__(self, samples: IntArray, sizes: IntArray, counts: IntArray) -> None:
        self.samples, self.sizes, self.counts = samples, sizes, counts
        self._starts, self._firsts = _starts(sizes), _starts(counts)

    @classmethod
    def of(cls, microbatches: Microbatches) -> FlatMicrobatches:
        """The same ones."""
        if isinstance(microbatches, cls):
            return microbatches
        parts = list(itertools.chain.from_iterable(microbatches))
        sizes = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
        counts = np.fromiter(map(len, microbatches), dtype=np.int64, count=len(microbatches))
        samples = itertools.chain.from_iterable(parts)
        return cls(np.fromiter(samples, dtype=np.int64, count=int(sizes.sum())), sizes, counts)

    @classmethod
    def one_each(cls, batches: Sequence[IntArray], *, keep_empty: bool) -> FlatMicrobatches:
        """One microbatch for each rank, of its batch; none for a rank without samples, but with ``keep_empty``, if any
        rank has some."""
        sizes = np.fromiter(map(len, batches), dtype=np.int64, count=len(batches))
        has_one = np.full(sizes.size, True) if keep_empty and sizes.any() else sizes > 0
        return cls(np.concatenate(batches), sizes[has_one], has_one.astype(np.int64))

    def by_rank(self) -> list[IntArray]:
        """What each rank has, in the order of its microbatches."""
        return split(self.samples, self._starts[self._firsts])

    def places(self) -> tuple[IntArray, IntArray]:
        """The rank and the number there of each microbatch, (num_microbatches,) both."""
        ranks = np.repeat(np.arange(self.counts.size), self.counts)
        return ranks, np.arange(self.sizes.size) - self._firsts[ranks]

    def largest(self, values: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
        """Of each microbatch the largest of what its samples have, values of at least 0; 0 without samples."""
        found, has_some = np.zeros(self.sizes.size, dtype=values.dtype), self.sizes > 0
        if self.samples.size:
            found[has_some] = np.maximum.reduceat(values[self.samples], self._starts[:-1][has_some])
        return found

    def table(self, values: npt.NDArray[ScalarT]) -> npt.NDArray[ScalarT]:
        """What each microbatch has, (num_microbatches,), as (num_ranks, largest number); 0 where there is none."""
        found = np.zeros((len(self), int(self.counts.max())), dtype=values.dtype)
        found[self.places()] = values
        return found

    def reordered(self, order: IntArray) -> FlatMicrobatches:
        """Microbatch ``order[i]`` in place i, (num_microbatches,): another one of the same rank."""
        parts = split(self.samples, self._starts)
        samples = np.concatenate([self.samples[:0], *(parts[number] for number in order.tolist())])
        return FlatMicrobatches(samples, self.sizes[order], self.counts)

    def __len__(self) -> int:
        return int(self.counts.size)

    def of_rank(self, rank: int) -> list[list[int]]:
        ends = self._starts[self._firsts[rank] : self._firsts[rank + 1] + 1].tolist()
        return [self.samples[a:b].tolist() for a, b in itertools.pairwise(ends)]

    def __repr__(self) -> str:
        # One rank more than is shown, so that "..." stands for the others.
        return f"FlatMicrobatches({reprlib.repr(self[: reprlib.aRepr.maxlist + 1])}, num_ranks={len(self)})"


def _starts(sizes: IntArray) -> IntArray:
    """Where each part starts, and where the last one ends."""
    starts = np.zeros(sizes.size + 1, dtype=np.int64)
    np.cumsum(sizes, out=starts[1:])
    return starts


def as_layout(layout: str) -> Layout:
    """``layout``, checked.

    Raises:
        ValueError: there is no such layout.
    """
    known: Layout = as_one_of(layout, "layout", get_args(Layout))
    return known


def by_rank(microbatches: Microbatches) -> list[IntArray]:
    """What each rank has, in the order of its microbatches."""
    return FlatMicrobatches.of(microbatches).by_rank()


def split(items: npt.NDArray[ScalarT], ends: IntArray) -> list[npt.NDArray[ScalarT]]:
    """Part i from ``ends[i]`` to ``ends[i + 1]``. (``np.split`` takes ten times as long.)"""
    return [items[a:b] for a, b in itertools.pairwise(ends.tolist())]


def permuted(batches: Sequence[T], ranks: Sequence[int]) -> list[T]:
    """Batch i at place ``ranks[i]``."""
    found = list(batches)
    for batch, rank in zip(batches, ranks, strict=True):
        found[rank] = batch
    return found


def microbatch_tokens(microbatches: Microbatches, lengths: IntArray, layout: Layout) -> IntArray:
    """Tokens of each microbatch, padding included, (world_size, largest number); 0 where there is none.

    Args:
        lengths: tokens of each sample, (num_samples,).
    """
    return _of_microbatches(microbatches, lengths.astype(np.float64), lengths, layout).astype(np.int64)


def microbatch_costs(
    microbatches: Microbatches,
    costs: FloatArray,
    lengths: IntArray,
    layout: Layout,
    attention_costs: FloatArray | None = None,
) -> FloatArray:
    """Cost of the samples of each microbatch, (world_size, largest number); 0 where there is none.

    Args:
        costs: of each sample by itself, without padding, (num_samples,).
        lengths: tokens of each sample, (num_samples,): they tell which one is the longest.
        attention_costs: the part of ``costs`` that is attention's, (num_samples,); for "padded-attention", and only
            used there.
    """
    if layout == "padded-attention":
        assert attention_costs is not None, "a padded-attention layout without the costs of attention"
        others = _of_microbatches(microbatches, costs - attention_costs, lengths, "packed")
        return others + _of_microbatches(microbatches, attention_costs, lengths, "padded")
    return _of_microbatches(microbatches, costs, lengths, layout)


def _of_microbatches(microbatches: Microbatches, values: FloatArray, lengths: IntArray, layout: Layout) -> FloatArray:
    flat = FlatMicrobatches.of(microbatches)
    of_sample = np.repeat(np.arange(flat.sizes.size), flat.sizes)
    if layout != "padded":
        return flat.table(np.bincount(of_sample, values[flat.samples], flat.sizes.size).astype(np.float64, copy=False))
    longest = np.flatnonzero(lengths[flat.samples] == flat.largest(lengths)[of_sample])
    found = np.zeros(flat.sizes.size)
    found[of_sample[longest]] = values[flat.samples[longest]]  # of several the last one
    return flat.table(flat.sizes * found)
