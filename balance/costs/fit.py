"""Fit a cost model to measured times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_costs, as_lengths
from odc.balance.costs.models import LinearCost, QuadraticCost
from odc.errors import shown

Form = Literal["quadratic", "linear"]
Lengths = npt.ArrayLike | Sequence[npt.ArrayLike]

# Smallest singular value over the largest, all columns scaled to length 1, at which coefficients can be told
# apart: beyond it, rounding of the input alone changes them in their third digit.
_RANK_TOLERANCE = 1e-12
_ROUNDING = 1e-9  # of the longest time: growth that a solver may find in times that are all the same


@dataclass(frozen=True)
class Measurement:
    """One measurement and the prediction of the fit."""

    index: int
    lengths: tuple[int, ...]
    """Tokens of each sample of the microbatch."""

    seconds: float
    predicted_s: float


@dataclass(frozen=True)
class CostFit:
    """A cost model in seconds, and how well it fits. Made by :func:`fit_cost`.

    Example:
        >>> fit = fit_cost([1000, 2000, 4000, 8000], [0.11, 0.23, 0.52, 1.28])
        >>> fit.predict([3000]).round(2)
        array([0.37])
        >>> fit.max_relative_error < 0.02
        True
    """

    cost: QuadraticCost | LinearCost
    """Cost model of a sample in seconds."""

    microbatch_s: float
    """Fixed seconds of a microbatch in addition to its samples: the ``microbatch_cost`` of policies."""

    mean_relative_error: float
    """Mean of abs(predicted - measured) / measured."""

    max_relative_error: float
    r_squared: float
    """1 - squared errors / squared deviations from the mean, in seconds; 0 if all seconds are equal."""

    num_measurements: int
    worst: Measurement
    """The measurement with the largest relative error."""

    def predict(self, lengths: Lengths) -> FloatArray:
        """Seconds of microbatches, (num_microbatches,); ``lengths`` as for :func:`fit_cost`.

        Raises:
            ValueError: a length is not a positive integer.
        """
        return np.array([self.microbatch_s + self.cost(samples).sum() for samples in _as_microbatches(lengths)])

    def explain(self) -> str:
        """A short text with the coefficients, the errors and the worst measurement."""
        terms = [f"{self.cost.b:.3g} s per token"]
        if isinstance(self.cost, QuadraticCost):
            terms.insert(0, f"{self.cost.a:.3g} s per squared token")
        terms.append(f"{self.microbatch_s:.3g} s per microbatch")
        shown = ", ".join(map(str, self.worst.lengths[:8])) + (", ..." if len(self.worst.lengths) > 8 else "")
        return "\n".join(
            [
                " + ".join(terms),
                f"{self.num_measurements} measurements: relative error {self.mean_relative_error:.1%} on average, "
                f"{self.max_relative_error:.1%} at most, R^2 {self.r_squared:.4f}",
                f"worst: measurement {self.worst.index} of lengths {shown}: measured {self.worst.seconds:.3g} s, "
                f"predicted {self.worst.predicted_s:.3g} s",
            ]
        )


def fit_cost(lengths: Lengths, seconds: npt.ArrayLike, *, form: Form = "quadratic", fixed: bool = True) -> CostFit:
    """Fit ``a * sum(s**2) + b * sum(s) + c`` to measured microbatches; no coefficient is negative.

    Minimizes the squares of relative errors, (predicted - measured) / measured, because timing noise grows with the
    time and short samples should fit as well as long ones. With noise of relative deviation r, predictions are too
    small by about 2 r^2.

    Args:
        lengths: tokens. Either one number per measurement, (num_measurements,), for microbatches of one sample; or for
            each measurement the list of the lengths in its packed microbatch.
        seconds: time of forward and backward of each measurement, (num_measurements,).
        form: "linear" leaves out ``a``.
        fixed: False leaves out ``c``.

    Raises:
        ValueError: lengths or seconds are invalid, there are fewer measurements than coefficients, the lengths are too
            similar to determine the coefficients, or the times do not grow with the lengths.

    Example:
        >>> fit = fit_cost([1000, 2000, 4000, 8000], seconds=[0.11, 0.23, 0.52, 1.28])
        >>> fit.cost([16_000]).round(1)  # in seconds
        array([3.5])
    """
    if form not in ("quadratic", "linear"):
        raise ValueError(f"form={shown(form)}: expected 'quadratic' or 'linear'")
    microbatches = _as_microbatches(lengths)
    times = as_costs(seconds, "seconds")
    if times.size != len(microbatches):
        raise ValueError(f"{times.size} seconds for {len(microbatches)} lengths: expected one per measurement")
    if not times.all():
        raise ValueError(f"seconds[{int(np.argmin(times))}] is 0: expected more than 0")
    terms = [*("a" if form == "quadratic" else ""), "b", *("c" if fixed else "")]
    if len(microbatches) < len(terms):
        raise ValueError(
            f"{len(microbatches)} measurements for {len(terms)} coefficients ({', '.join(terms)}): "
            "measure more lengths, or leave coefficients out (form='linear', fixed=False)"
        )
    tokens = [samples.astype(np.float64) for samples in microbatches]
    sums = np.array([(float(each @ each), float(each.sum()), 1.0) for each in tokens])
    columns = sums[:, ["abc".index(term) for term in terms]]
    _check_rank(columns / times[:, None], terms, microbatches)
    found = dict(zip(terms, _non_negative(columns / times[:, None]), strict=True))
    a, b, c = (float(found.get(term, 0.0)) for term in "abc")
    growth_s = max(a * float(sums[:, 0].max()), b * float(sums[:, 1].max()))
    if growth_s <= _ROUNDING * float(times.max()):
        raise ValueError(
            "the times do not grow with the lengths, so no cost per token can be read from them: measure longer "
            "samples, after a warm-up, and take the median of several runs of each"
        )
    cost = QuadraticCost(a, b) if form == "quadratic" else LinearCost(b)
    return _describe(cost, c, microbatches, times, sums @ np.array([a, b, c]))


def _describe(
    cost: QuadraticCost | LinearCost,
    microbatch_s: float,
    microbatches: list[IntArray],
    times: FloatArray,
    predicted: FloatArray,
) -> CostFit:
    errors = np.abs(predicted - times) / times
    worst = int(np.argmax(errors))
    deviation = float(np.square(times - times.mean()).sum())
    return CostFit(
        cost=cost,
        microbatch_s=microbatch_s,
        mean_relative_error=float(errors.mean()),
        max_relative_error=float(errors.max()),
        r_squared=1 - float(np.square(predicted - times).sum()) / deviation if deviation else 0.0,
        num_measurements=times.size,
        worst=Measurement(worst, tuple(microbatches[worst].tolist()), float(times[worst]), float(predicted[worst])),
    )


def _non_negative(matrix: FloatArray) -> FloatArray:
    """``x >= 0`` that minimizes ``|matrix @ x - 1|``, of at most three columns: the best of all active sets."""
    scale = np.linalg.norm(matrix, axis=0)
    best, best_error = np.zeros(matrix.shape[1]), math.inf
    for count in range(1, matrix.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(matrix.shape[1]), count)):
            part = matrix[:, chosen] / scale[chosen]
            solution = np.linalg.lstsq(part, np.ones(len(matrix)), rcond=None)[0]
            error = float(np.square(part @ solution - 1).sum())
            if (solution >= 0).all() and error < best_error:
                best, best_error = np.zeros(matrix.shape[1]), error
                best[chosen] = solution / scale[chosen]
    return best


def _as_microbatches(lengths: Lengths) -> list[IntArray]:
    values: list[Any] = list(lengths)  # type: ignore[arg-type]
    if all(np.ndim(value) == 0 for value in values):
        return list(as_lengths(values)[:, None])
    if not all(np.ndim(value) == 1 for value in values):
        raise ValueError("lengths mixes numbers and lists: expected one length, or one list, for every measurement")
    microbatches = [as_lengths(value, name=f"lengths[{index}]") for index, value in enumerate(values)]
    if empty := [index for index, samples in enumerate(microbatches) if not samples.size]:
        raise ValueError(f"lengths[{empty[0]}] is empty: expected at least one sample in every measured microbatch")
    return microbatches


def _check_rank(matrix: FloatArray, terms: list[str], microbatches: list[IntArray]) -> None:
    singular = np.linalg.svd(matrix / np.linalg.norm(matrix, axis=0), compute_uv=False)
    if singular[-1] <= _RANK_TOLERANCE * singular[0]:
        distinct = np.unique(np.concatenate(microbatches))
        shown = f"all lengths are {distinct[0]}" if distinct.size == 1 else f"there are {distinct.size} lengths"
        raise ValueError(
            f"{shown}: the coefficients {', '.join(terms)} cannot be told apart; measure at least {len(terms)} "
            "microbatches of different lengths, from the shortest to the longest that occur"
        )
