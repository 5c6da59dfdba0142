"""Cost models: what a sample of a given length costs to train on.

A cost model is a callable from lengths (tokens) to costs. The unit is its own (seconds, FLOPs): balancing and
bubble rates only need ratios. Samples packed into one microbatch do not attend to each other, so the cost of
a microbatch is the sum of the costs of its samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_costs
from odc.errors import shorten, shown


class CostModel(Protocol):
    """A cost model: any function that maps an array of lengths to an array of costs.

    Example:
        >>> import numpy as np
        >>> cost: CostModel = lambda lengths: np.asarray(lengths, dtype=np.float64) ** 1.5
        >>> policy = get_policy("lb-mini")
        >>> policy.plan([100, 200, 300, 400], world_size=2, max_tokens=500, cost=cost).num_microbatches
        (1, 1)
    """

    def __call__(self, lengths: npt.ArrayLike, /) -> FloatArray:
        """Costs (float64, not negative, same shape) of samples with these ``lengths`` (tokens)."""


@dataclass(frozen=True)
class LinearCost:
    """``b * s`` for a sample of ``s`` tokens: a model in which attention costs nothing.

    Example:
        >>> LinearCost(b=2.0)([10, 20])
        array([20., 40.])
    """

    b: float = 1.0
    """Cost per token, greater than 0."""

    def __post_init__(self) -> None:
        check_coefficients(b=self.b)

    def __call__(self, lengths: npt.ArrayLike, /) -> FloatArray:
        return self.b * np.asarray(lengths, dtype=np.float64)


@dataclass(frozen=True)
class QuadraticCost:
    """``a * s**2 + b * s`` for a sample of ``s`` tokens (paper section 4: attention is O(s^2)).

    Example:
        >>> QuadraticCost(a=0.01, b=1.0)([100, 200])
        array([200., 600.])
    """

    a: float
    """Cost per squared token, at least 0."""

    b: float
    """Cost per token, at least 0; not both 0."""

    def __post_init__(self) -> None:
        check_coefficients(a=self.a, b=self.b)

    def __call__(self, lengths: npt.ArrayLike, /) -> FloatArray:
        tokens = np.asarray(lengths, dtype=np.float64)
        return (self.a * tokens + self.b) * tokens


def evaluate(cost: CostModel, lengths: IntArray) -> FloatArray:
    """``cost(lengths)``, checked.

    Raises:
        ValueError: ``cost`` is no model, or no function of arrays; or it returned another shape, or costs that are
            negative, infinite or NaN.
    """
    if not callable(cost):
        raise ValueError(f"cost={shown(cost)}: expected a cost model, a function of lengths")
    try:
        returned = cost(lengths)
    except Exception as error:
        raise ValueError(
            f"cost={shown(cost)} fails for an array of {lengths.size} lengths ({type(error).__name__}: "
            f"{shorten(str(error))}): expected a function of an array, as lambda lengths: np.maximum(lengths, 5); one "
            "of a single length becomes one by np.vectorize(function)"
        ) from error
    costs = as_costs(returned, name=f"{shown(cost)}(lengths)")
    if costs.shape != lengths.shape:
        got = f"{costs.size} costs for {lengths.size} lengths"
        raise ValueError(f"{shown(cost)} returned {got}: expected one per sample")
    return costs


def check_cost(cost: CostModel) -> CostModel:
    """``cost``, where lengths are not known yet.

    Raises:
        ValueError: as :func:`evaluate`.
    """
    evaluate(cost, np.array([1, 2]))
    return cost


def attention_costs(cost: CostModel, lengths: IntArray) -> FloatArray:
    """The part of ``cost(lengths)`` that is attention's, (num_samples,): what layout "padded-attention" pads.

    Raises:
        ValueError: ``cost`` is neither a :class:`QuadraticCost` nor a :class:`LinearCost`, whose attention costs
            nothing: of other models it is not known.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    if isinstance(cost, QuadraticCost):
        # Rounded as in the whole cost, so never above it.
        return cost.a * tokens * tokens
    if isinstance(cost, LinearCost):
        return np.zeros(tokens.shape)
    raise ValueError(
        f"cost={shown(cost)}: layout 'padded-attention' needs the part that is attention's, which is known of "
        "QuadraticCost (and 0 for LinearCost); fit one with fit_cost, or use another layout"
    )


def check_coefficients(**coefficients: float) -> None:
    for name, value in coefficients.items():
        if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{name}={shown(value)}: expected a finite number of at least 0")
    if not any(coefficients.values()):
        names = " and ".join(coefficients)
        raise ValueError(f"{names} must not be 0: every sample would cost nothing, so nothing could be balanced")
