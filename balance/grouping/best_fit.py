"""Batches from a pool of samples, each seeded by the oldest one (load-balanced dynamic batching)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy.typing as npt

from odc.balance.checks import IntArray, as_count, as_lengths, as_one_of

Strategy = Literal["prefer-closest", "prefer-first", "pack"]


def best_fit_batches(
    lengths: npt.ArrayLike, max_tokens: int, pool_size: int, strategy: Strategy = "prefer-closest"
) -> list[list[int]]:
    """Cut a sequence of samples into batches, each chosen as the best fit among the next ``pool_size`` samples.

    Before each batch the pool is filled up. The oldest sample in the pool begins the batch, so no sample waits for more
    than ``pool_size`` batches. Then samples are added as long as one fits:

    - "prefer-closest", "prefer-first" (padded batches): the sample with which count x longest is least. Of equal ones
      that whose length is closest to the longest one of the batch, or the oldest; of equally close ones the oldest.
    - "pack" (packed batches): the samples of the pool in their order, each if the sum keeps the limit.

    Args:
        lengths: tokens of each sample, (num_samples,), at least 1 each, in the order in which they come.
        max_tokens: most tokens of a batch: count x longest, or their sum with "pack". A sample of so many tokens or
            more is alone.
        pool_size: samples to choose from, the oldest one included.

    Returns:
        Lists of indices into ``lengths``, none empty, together every index once, in the order in which each batch took
        them.

    Raises:
        ValueError: an argument is out of range, or there is no such strategy.

    Example:
        >>> best_fit_batches([300, 700, 400, 100, 600], max_tokens=1000, pool_size=4, strategy="pack")
        [[0, 1], [2, 3], [4]]
    """
    tokens = as_lengths(lengths).tolist()
    max_tokens, pool_size = as_count(max_tokens, "max_tokens"), as_count(pool_size, "pool_size")
    as_one_of(strategy, "strategy", tuple(_TAKE))
    batches: list[list[int]] = []
    pool: list[int] = []
    following = 0
    while pool or following < len(tokens):
        wanted = min(pool_size - len(pool), len(tokens) - following)
        pool += range(following, following + wanted)
        following += wanted
        batch = _TAKE[strategy](pool, tokens, max_tokens)
        taken = set(batch)
        pool = [sample for sample in pool if sample not in taken]
        batches.append(batch)
    return batches


def best_fit(lengths: IntArray, max_tokens: int, strategy: Strategy) -> list[int]:
    """The first batch of a pool, see :func:`best_fit_batches`. There is at least one sample."""
    return _TAKE[strategy](list(range(lengths.size)), lengths.tolist(), max_tokens)


def _pack(pool: list[int], tokens: list[int], max_tokens: int) -> list[int]:
    batch, total = [pool[0]], tokens[pool[0]]
    for sample in pool[1:]:
        if total + tokens[sample] <= max_tokens:
            batch.append(sample)
            total += tokens[sample]
    return batch


def _pad(pool: list[int], tokens: list[int], max_tokens: int, prefer: Callable[[int, int], int]) -> list[int]:
    """A padded batch; of equal areas the one with the least ``prefer(length, longest)``, then the oldest."""
    batch, left = [pool[0]], pool[1:]
    longest = tokens[pool[0]]
    while left:
        # Count times the longer of two grows with the sample: what is least is so for the longest there can be.
        best = min(left, key=lambda sample: (max(tokens[sample], longest), prefer(tokens[sample], longest)))
        if (len(batch) + 1) * max(tokens[best], longest) > max_tokens:
            break
        batch.append(best)
        left.remove(best)
        longest = max(longest, tokens[best])
    return batch


_TAKE: dict[str, Callable[[list[int], list[int], int], list[int]]] = {
    "prefer-closest": partial(_pad, prefer=lambda length, longest: abs(length - longest)),
    "prefer-first": partial(_pad, prefer=lambda length, longest: 0),
    "pack": _pack,
}
