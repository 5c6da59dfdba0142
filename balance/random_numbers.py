"""Random numbers that depend only on their name and keys."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from odc.balance.checks import FloatArray


def random_generator(name: str, *keys: int) -> np.random.PCG64:
    """The raw generator called ``name`` with these keys; numpy keeps its stream stable across versions.

    The name keeps streams apart: lengths drawn from the stream that shuffles them would come out sorted.
    """
    return np.random.PCG64([int.from_bytes(name.encode(), "big"), *keys])


def uniform(stream: np.random.PCG64, size: int) -> FloatArray:
    """``size`` numbers in (0, 1), without the ends."""
    return ((stream.random_raw(size) >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def normal_quantiles(probabilities: FloatArray) -> FloatArray:
    """Of the standard normal law."""
    return np.array(list(map(NormalDist().inv_cdf, probabilities.tolist())))
