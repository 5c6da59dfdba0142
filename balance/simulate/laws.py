"""Laws of sequence lengths, fitted to what papers publish of their data sets; the data sets themselves are not here.

Three are fitted so that the bubble rates of the ODC paper's tables come out: to the 1.5B rows of Tables 4 and 6
(appendix G); ``odc bench tables`` shows how close they come. Three are fitted to Table 10 of the paper on
Online Dynamic Batching (mean, median, 95th and 99th percentile, largest, coefficient of variation), and ``llava`` to
the padding of its Standard rows in Tables 13 and 14 as well.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from odc.balance.checks import FloatArray, IntArray, as_count
from odc.balance.random_numbers import normal_quantiles, random_generator, uniform
from odc.errors import shown


class Law(Protocol):
    """A distribution of lengths."""

    def quantiles(self, u: FloatArray, v: FloatArray, /) -> FloatArray:
        """Lengths (tokens, not rounded) for independent uniform numbers ``u`` and ``v`` in (0, 1)."""


@dataclass(frozen=True)
class Lognormal:
    """A lognormal law: ``mu`` and ``sigma`` of the logarithm of the length."""

    mu: float
    sigma: float


@dataclass(frozen=True)
class LognormalMixture:
    """With probability ``weight`` the first of two lognormal laws, else the second, both truncated."""

    weight: float
    first: Lognormal
    second: Lognormal
    low: float
    high: float

    def quantiles(self, u: FloatArray, v: FloatArray, /) -> FloatArray:
        return np.where(v < self.weight, self._truncated(self.first, u), self._truncated(self.second, u))

    def _truncated(self, law: Lognormal, u: FloatArray) -> FloatArray:
        normal = NormalDist(law.mu, law.sigma)
        low, high = normal.cdf(np.log(self.low)), normal.cdf(np.log(self.high))
        return np.exp(law.mu + law.sigma * normal_quantiles(low + (high - low) * u))


@dataclass(frozen=True)
class BoundedPareto:
    """Density proportional to ``s ** -(alpha + 1)`` between ``low`` and ``high``; ``alpha`` is not 0."""

    alpha: float
    low: float
    high: float

    def quantiles(self, u: FloatArray, v: FloatArray, /) -> FloatArray:
        ratio = (self.low / self.high) ** self.alpha
        lengths: FloatArray = self.low * (1 - u * (1 - ratio)) ** (-1 / self.alpha)
        return lengths


LAWS: dict[str, Law] = {
    # SFT on LongAlign, at most 64k tokens.
    "longalign": LognormalMixture(0.7538, Lognormal(9.088, 0.415), Lognormal(10.745, 0.653), 7423.6, 65536.0),
    # SFT on trajectories of SWE-Smith. The tables do not fix its scale.
    "swesmith": BoundedPareto(-0.0859, 11892.2, 70140.4),
    # RL on AIME prompts: prompt and response.
    "aime": LognormalMixture(0.5939, Lognormal(8.8764, 0.3688), Lognormal(9.5537, 0.108), 3392.6, 24576.0),
    # SFT on text, and on text with images: tokens as Qwen3-VL counts them, images included.
    "ultrachat": LognormalMixture(0.59954, Lognormal(6.25188, 0.77024), Lognormal(7.25588, 0.28382), 469.2, 4471.0),
    "llava": LognormalMixture(0.89108, Lognormal(5.97974, 0.31359), Lognormal(6.66124, 0.09456), 335.9, 1260.0),
    "sharegpt4o": LognormalMixture(0.24591, Lognormal(7.42592, 1.13602), Lognormal(5.12755, 0.74297), 732.0, 12110.0),
}


def law_names() -> list[str]:
    """All names of length laws for :func:`sample_lengths`.

    Example:
        >>> law_names()
        ['longalign', 'swesmith', 'aime', 'ultrachat', 'llava', 'sharegpt4o']
    """
    return list(LAWS)


def even_lengths(law: str | Law, num_samples: int) -> IntArray:
    """``num_samples`` lengths (tokens) spread evenly over the law, without the noise of random samples.

    Lengths are in the order of their quantiles. Shuffle them before cutting minibatches.

    Raises:
        ValueError: there is no law of that name, or ``num_samples`` is less than 1.

    Example:
        >>> even_lengths("longalign", 5)
        array([ 7987,  9180, 10597, 45782, 16512])
    """
    position = np.arange(as_count(num_samples, "num_samples"), dtype=np.float64)
    # Multiples of the golden ratio cover the second dimension evenly, whatever the number of samples.
    second: FloatArray = position * ((5**0.5 - 1) / 2) % 1.0
    return _rounded(_get(law), (position + 0.5) / num_samples, second)


def sample_lengths(law: str | Law, num_samples: int, seed: int = 0) -> IntArray:
    """Draw ``num_samples`` lengths (tokens). The same arguments give the same lengths with every numpy version.

    Raises:
        ValueError: there is no law of that name, or a number is out of range.

    Example:
        >>> sample_lengths("longalign", 4, seed=1)
        array([11361, 10104,  9673, 14502])
    """
    law = _get(law)
    num_samples, seed = as_count(num_samples, "num_samples"), as_count(seed, "seed", minimum=0, maximum=None)
    numbers = uniform(random_generator("lengths", seed), 2 * num_samples)
    return _rounded(law, numbers[:num_samples], numbers[num_samples:])


def _get(law: str | Law) -> Law:
    if isinstance(law, str) and law in LAWS:
        return LAWS[law]
    if isinstance(law, str):
        near = difflib.get_close_matches(law[:100], LAWS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"length law {shown(law)} is not known: expected one of {', '.join(LAWS)}{hint}")
    if isinstance(law, type) or not callable(getattr(law, "quantiles", None)):
        raise ValueError(f"length law {shown(law)}: expected one of {', '.join(LAWS)}, or a Law with quantiles(u, v)")
    return law


def _rounded(law: Law, u: FloatArray, v: FloatArray) -> IntArray:
    return np.rint(law.quantiles(u, v)).astype(np.int64)
