"""What a microbatch holds and costs: its samples one behind the other, or padded to the longest of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_one_of

ScalarT = TypeVar("ScalarT", bound=np.generic)
Layout = Literal["packed", "padded", "padded-attention"]
"""In "packed" microbatches, tokens and costs are the sums of those of the samples. In "padded" ones they are the number
of samples times those of the longest one (of several longest, the last). In "padded-attention" ones only attention is
computed on padded samples (ConvTransformer): tokens and all other costs are sums as in packed ones, and attention costs
the number of samples times that of the longest one."""

Microbatches = Sequence[Sequence[Sequence[int]]]
"""``microbatches[rank][m]``: samples of microbatch m of a rank."""


def as_layout(layout: str) -> Layout:
    """``layout``, checked.

    Raises:
        ValueError: there is no such layout.
    """
    known: Layout = as_one_of(layout, "layout", get_args(Layout))
    return known


def by_rank(microbatches: Microbatches) -> list[IntArray]:
    """What each rank has, in the order of its microbatches."""
    sizes = [sum(map(len, mine)) for mine in microbatches]
    return split(_samples(microbatches, sum(sizes)), np.cumsum([0, *sizes]))


def split(items: npt.NDArray[ScalarT], ends: IntArray) -> list[npt.NDArray[ScalarT]]:
    """Part i from ``ends[i]`` to ``ends[i + 1]``. (``np.split`` takes ten times as long.)"""
    return [items[a:b] for a, b in itertools.pairwise(ends.tolist())]


def _samples(microbatches: Microbatches, number: int) -> IntArray:
    chain = itertools.chain.from_iterable
    return np.fromiter(chain(chain(microbatches)), dtype=np.int64, count=number)


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
    width = max(map(len, microbatches))
    parts = [part for mine in microbatches for part in (*mine, *((),) * (width - len(mine)))]
    counts = np.array([len(part) for part in parts], dtype=np.int64)
    samples = _samples(microbatches, int(counts.sum()))
    owners = np.repeat(np.arange(len(parts)), counts)
    if layout != "padded":
        found = np.bincount(owners, weights=values[samples], minlength=len(parts)).astype(np.float64, copy=False)
    else:
        found = np.zeros(len(parts))
        by_length = samples[np.lexsort((lengths[samples], owners))]
        longest = by_length[np.cumsum(counts)[counts > 0] - 1]
        found[counts > 0] = counts[counts > 0] * values[longest]
    return found.reshape(len(microbatches), width)
