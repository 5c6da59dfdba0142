"""What a few lengths say about whether batching by length is worth it (ODB, section 4 and appendix K)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy.typing as npt

from odc.balance.checks import as_count, as_lengths

_CV_WEIGHT, _SHORT_WEIGHT = 1.41, 6.23
_HIGH_CV, _MANY_SHORT = 0.8, 0.2


@dataclass(frozen=True)
class LengthSketch:
    """Two features of a dataset's lengths; a sample of 1,000 to 5,000 lengths is enough.

    Example:
        >>> sketch = sketch_lengths([100, 120, 150, 4000], max_tokens=8192)
        >>> sketch.is_promising
        True
    """

    num_samples: int
    mean: float
    """Tokens."""

    cv: float
    """Coefficient of variation (standard deviation / mean), which shows how much padding there would be."""

    short_fraction: float
    """f_s, the fraction of lengths below a quarter of the token budget, which shows how much larger batches could
    be."""

    @property
    def is_promising(self) -> bool:
        """Whether CV (about 0.8) or f_s (above 0.2) is as high as in the cases where ODB gained most."""
        return self.cv >= _HIGH_CV or self.short_fraction > _MANY_SHORT

    @property
    def odb_speedup(self) -> float:
        """Equation (5): 1 + 1.41 CV + 6.23 f_s, over batches of a fixed size.

        A summary of two measured workloads (CV 0.80 to 1.00, f_s 0.01 to 0.37) and no prediction, as its authors say;
        outside of that range it means nothing.
        """
        return 1 + _CV_WEIGHT * self.cv + _SHORT_WEIGHT * self.short_fraction


def sketch_lengths(lengths: npt.ArrayLike, max_tokens: int) -> LengthSketch:
    """The features of some lengths, for a token budget.

    Args:
        lengths: tokens of each sample, (num_samples,), at least one sample and 1 each.
        max_tokens: token budget of a padded batch.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> sketch_lengths([100, 120, 150, 4000], max_tokens=8192).short_fraction
        0.75
    """
    tokens = as_lengths(lengths)
    max_tokens = as_count(max_tokens, "max_tokens")
    if not tokens.size:
        raise ValueError("there are no lengths: expected at least one, 1,000 to 5,000 are enough")
    mean = float(tokens.mean())
    short = float((tokens < max_tokens / 4).mean())
    return LengthSketch(int(tokens.size), mean, float(tokens.std()) / mean, short)
