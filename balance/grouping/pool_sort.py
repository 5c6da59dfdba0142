"""Samples of similar length at the same time on all ranks, without communication (LengthPoolSort)."""

from __future__ import annotations

import random

import numpy.typing as npt

from odc.balance.checks import as_count, as_lengths


def pool_sort(
    lengths: npt.ArrayLike, pool_size: int, batch_size: int = 1, *, shuffle: bool = True, num_before: int = 0
) -> list[int]:
    """The order of samples if each pool is sorted by length and then shuffled with a seed that all ranks share.

    The pools of all ranks have the same distribution of lengths, so the i-th sorted sample has about the same length on
    each. The shared permutation keeps this, and mixes short and long samples. The seed is 42 plus the index of the
    sample that completed the pool, so it depends on ``pool_size`` alone.

    Args:
        lengths: tokens of each sample of one rank, (num_samples,), at least 1 each, in the order in which they come.
        pool_size: samples that are sorted together; what is left in the end is a smaller pool.
        batch_size: samples that stay together when a pool is shuffled, so that a batch is of about one length. (Single
            samples, as published, have a batch of 4 padded by about half.) What is left of a pool stays at its end.
        shuffle: False leaves a pool sorted by length.
        num_before: samples of the rank that came before these.

    Returns:
        Indices into ``lengths``, every one once.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> pool_sort([30, 10, 20, 40], pool_size=4, shuffle=False)
        [1, 2, 0, 3]
    """
    tokens = as_lengths(lengths).tolist()
    pool_size, batch_size = as_count(pool_size, "pool_size"), as_count(batch_size, "batch_size")
    num_before = as_count(num_before, "num_before", minimum=0)
    order: list[int] = []
    for start in range(0, len(tokens), pool_size):
        pool = sorted(range(start, min(start + pool_size, len(tokens))), key=tokens.__getitem__)
        num_whole = len(pool) // batch_size * batch_size
        blocks = [pool[at : at + batch_size] for at in range(0, num_whole, batch_size)]
        if shuffle:
            random.Random(42 + num_before + start + len(pool) - 1).shuffle(blocks)
        order += [sample for block in blocks for sample in block] + pool[num_whole:]
    return order
