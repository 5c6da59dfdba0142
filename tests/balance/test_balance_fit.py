"""Layer 1: no processes. Cost models fitted to measurements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance.costs import LinearCost, QuadraticCost, fit_cost

MANY = np.array([64, 128, 256, 512, 1000, 2000, 4000, 8000, 16000])


@st.composite
def coefficients(draw: st.DrawFn) -> tuple[float, float, float]:
    """Such that each term is a fair part of the time of one of the MANY lengths."""
    share = st.floats(0.1, 10)
    scale = draw(st.floats(1e-4, 1e2))
    return scale * draw(share) / 4000**2, scale * draw(share) / 2000, scale * draw(share) / 10


def seconds_of(microbatches: Any, a: float, b: float, c: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    tokens = [np.atleast_1d(np.asarray(samples, dtype=np.float64)) for samples in microbatches]
    return np.array([a * (s * s).sum() + b * s.sum() + c for s in tokens])


@given(coefficients())
@settings(max_examples=20, deadline=None)
def test_exact_data_is_recovered(abc: tuple[float, float, float]) -> None:
    a, b, c = abc
    fit = fit_cost(MANY, seconds_of(MANY, a, b, c))
    assert isinstance(fit.cost, QuadraticCost)
    np.testing.assert_allclose([fit.cost.a, fit.cost.b, fit.microbatch_s], abc, rtol=1e-8)
    assert fit.max_relative_error < 1e-9
    assert fit.r_squared == pytest.approx(1)
    assert fit.num_measurements == MANY.size


@given(coefficients(), st.lists(st.lists(st.integers(10, 20000), min_size=1, max_size=5), min_size=12, max_size=30))
@settings(max_examples=20, deadline=None)
def test_packed_microbatches_are_recovered(abc: tuple[float, float, float], microbatches: list[list[int]]) -> None:
    # Some that tell the coefficients apart, whatever was drawn.
    microbatches = [[64], [4000, 64], [16000], *microbatches]
    seconds = seconds_of(microbatches, *abc)
    fit = fit_cost(microbatches, seconds)
    np.testing.assert_allclose(fit.predict(microbatches), seconds, rtol=1e-8)
    np.testing.assert_allclose(fit.cost([500, 900]).sum() + fit.microbatch_s, fit.predict([[500, 900]])[0])


@given(coefficients(), st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_another_unit_of_time_scales_the_fit(abc: tuple[float, float, float], factor: float, seed: int) -> None:
    seconds = seconds_of(MANY, *abc) * np.random.default_rng(seed).uniform(0.8, 1.2, MANY.size)
    fit, scaled = fit_cost(MANY, seconds), fit_cost(MANY, factor * seconds)
    np.testing.assert_allclose(scaled.predict(MANY), factor * fit.predict(MANY), rtol=1e-9)
    assert scaled.mean_relative_error == pytest.approx(fit.mean_relative_error, rel=1e-6)
    assert scaled.r_squared == pytest.approx(fit.r_squared)
    assert scaled.worst.index == fit.worst.index


@given(coefficients(), st.floats(0.001, 0.1), st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_errors_are_about_the_noise(abc: tuple[float, float, float], noise: float, seed: int) -> None:
    lengths = np.repeat(MANY, 20)
    true = seconds_of(lengths, *abc)
    fit = fit_cost(lengths, true * np.random.default_rng(seed).uniform(1 - noise, 1 + noise, true.size))
    # Uniform noise is half its limit on average.
    assert noise / 2 * 0.75 < fit.mean_relative_error < noise / 2 * 1.25
    assert fit.max_relative_error < 2 * noise
    np.testing.assert_allclose(fit.predict(lengths), true, rtol=0.6 * noise)


@given(st.lists(st.floats(0.01, 10), min_size=9, max_size=9), st.booleans(), st.sampled_from(["quadratic", "linear"]))
@settings(max_examples=40, deadline=None)
def test_no_other_coefficients_fit_better(seconds: list[float], fixed: bool, form: Any) -> None:
    """Kuhn-Tucker: the error falls in no direction that keeps all coefficients at least 0."""
    try:
        fit = fit_cost(MANY, seconds, form=form, fixed=fixed)
    except ValueError:
        # The best fit is a constant: the times fall with the lengths.
        assert fixed
        return
    columns = [MANY**2.0, MANY * 1.0, MANY**0.0]
    found = [getattr(fit.cost, "a", 0.0), fit.cost.b, fit.microbatch_s]
    used = [form == "quadratic", True, fixed]
    residual = fit.predict(MANY) / seconds - 1
    for column, value, free in zip(columns, found, used, strict=True):
        relative = column / seconds
        slope = float(residual @ relative) / float(np.linalg.norm(relative))
        assert value >= 0
        assert free or value == 0
        if free:
            assert slope == pytest.approx(0, abs=1e-7) if value > 0 else slope > -1e-7


def test_terms_that_would_be_negative_are_left_out() -> None:
    fit = fit_cost(MANY, 1e-3 * MANY**0.9)
    assert isinstance(fit.cost, QuadraticCost)
    assert fit.cost.a == 0
    assert fit.cost.b > 0
    assert fit_cost(MANY, 1e-9 * MANY**2.0 + 1e-6 * MANY - 1e-7).microbatch_s == 0


def test_relative_errors_count() -> None:
    """One outlier of a factor: as bad at the shortest sample as at the longest one."""
    seconds = 1e-3 * MANY
    errors = []
    for outlier in (0, -1):
        off = seconds.copy()
        off[outlier] *= 0.5
        fit = fit_cost(MANY, off, form="linear", fixed=False)
        assert fit.worst.index == outlier % MANY.size
        errors.append(fit.cost.b)
    assert errors[0] == pytest.approx(errors[1])


def test_forms() -> None:
    linear = fit_cost([1, 2], [3.0, 5.0], form="linear")
    assert isinstance(linear.cost, LinearCost)
    assert (linear.cost.b, linear.microbatch_s) == (pytest.approx(2), pytest.approx(1))
    quadratic = fit_cost([1, 2], [2.0, 6.0], fixed=False)
    assert isinstance(quadratic.cost, QuadraticCost)
    assert (quadratic.cost.a, quadratic.cost.b, quadratic.microbatch_s) == (pytest.approx(1), pytest.approx(1), 0)
    single = fit_cost([7], [3.5], form="linear", fixed=False)
    assert single.cost.b == pytest.approx(0.5)
    assert single.r_squared == 0


def test_explain_names_the_worst_measurement() -> None:
    seconds = seconds_of(MANY, 1e-9, 1e-6, 1e-3)
    seconds[4] *= 2
    fit = fit_cost(MANY, seconds)
    assert (fit.worst.index, fit.worst.lengths) == (4, (1000,))
    assert fit.worst.predicted_s == pytest.approx(fit.predict([1000])[0])
    text = fit.explain()
    for part in ("per squared token", "s per microbatch", "9 measurements", "measurement 4 of lengths 1000:"):
        assert part in text
    assert f"{fit.max_relative_error:.1%} at most" in text
    assert "squared" not in fit_cost(MANY, seconds, form="linear").explain()


@pytest.mark.parametrize(
    ("lengths", "seconds", "options", "message"),
    [
        ([1, 2], [1.0, 2.0], {}, "2 measurements for 3 coefficients"),
        ([], [], {}, "0 measurements for 3 coefficients"),
        ([5, 5, 5], [1.0, 1.1, 0.9], {}, "all lengths are 5: .* cannot be told apart"),
        ([5, 5, 9, 9], [1.0, 1.1, 2.0, 2.1], {}, "there are 2 lengths"),
        ([[5], [5, 5], [5, 5, 5]], [1.0, 2.0, 3.0], {}, "all lengths are 5"),
        ([1, 2, 3], [1.0, 2.0], {}, "2 seconds for 3 lengths"),
        ([1, 2, 3], [1.0, float("nan"), 2.0], {}, r"seconds\[1\] is nan"),
        ([1, 2, 3], [1.0, -1.0, 2.0], {}, r"seconds\[1\] is -1"),
        ([1, 2, 3], [1.0, 0.0, 2.0], {}, r"seconds\[1\] is 0"),
        ([1, 0, 3], [1.0, 1.0, 2.0], {}, r"lengths\[1\] is 0"),
        ([1, 2.5, 3], [1.0, 1.0, 2.0], {}, "dtype float64"),
        ([[1], [2, -1], [3]], [1.0, 1.0, 2.0], {}, r"lengths\[1\]\[1\] is -1"),
        ([[1], [], [3]], [1.0, 1.0, 2.0], {}, r"lengths\[1\] is empty"),
        ([[1], 2, [3]], [1.0, 1.0, 2.0], {}, "mixes numbers and lists"),
        ([1, 2, 3], [3.0, 3.0, 3.0], {}, "do not grow with the lengths"),
        ([1, 2, 3], [1.0, 2.0, 3.0], {"form": "cubic"}, "form='cubic'"),
    ],
)
def test_bad_measurements(lengths: Any, seconds: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_cost(lengths, seconds, **options)
