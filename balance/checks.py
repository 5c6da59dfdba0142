"""Input checks shared by this package: every array is validated before any work is done with it."""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def as_lengths(lengths: npt.ArrayLike, name: str = "lengths", minimum: int = 1) -> IntArray:
    """``lengths`` as a one-dimensional int64 array.

    Raises:
        ValueError: not one-dimensional, not integers, or a value below ``minimum``.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension, one integer per sample")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}: expected integers (counts of tokens)")
    if (array < minimum).any():
        bad = int(np.flatnonzero(array < minimum)[0])
        raise ValueError(f"{name}[{bad}] is {array[bad]}: expected at least {minimum}")
    return array.astype(np.int64)


def as_costs(costs: npt.ArrayLike, name: str = "costs") -> FloatArray:
    """``costs`` as a one-dimensional float64 array.

    Raises:
        ValueError: not one-dimensional, not numbers, or a value that is negative, infinite or NaN.
    """
    try:
        array = np.asarray(costs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as one float per sample: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension, one number per sample")
    if not (np.isfinite(array) & (array >= 0)).all():
        bad = int(np.flatnonzero(~(np.isfinite(array) & (array >= 0)))[0])
        raise ValueError(f"{name}[{bad}] is {array[bad]}: expected a finite number of at least 0")
    return array


def as_cost(value: float, name: str) -> float:
    """``value`` as one cost.

    Raises:
        ValueError: not a finite number of at least 0.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value!r}: expected a finite number of at least 0")
    return float(value)


def as_speeds(speeds: npt.ArrayLike, num_devices: int) -> FloatArray:
    """``speeds`` as a float64 array, (num_devices,).

    Raises:
        ValueError: not one number per device, or one that is not finite and above 0.
    """
    array = as_costs(speeds, "speeds")
    if array.size != num_devices:
        raise ValueError(f"speeds has {array.size} entries: expected one for each of the {num_devices} devices")
    if not array.all():
        raise ValueError(f"speeds[{int(np.argmin(array))}] is 0: expected more than 0")
    return array


def as_count(value: int, name: str, minimum: int = 1) -> int:
    """``value`` as an int of at least ``minimum``.

    Raises:
        ValueError: not an integer (a bool is not one), or below ``minimum``.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {minimum}")
    return number


def check_fit(lengths: IntArray, max_tokens: int) -> None:
    """Check that every sample fits into a microbatch of its own.

    Raises:
        ValueError: a sample is longer than ``max_tokens``.
    """
    too_long = np.flatnonzero(lengths > max_tokens)
    if too_long.size:
        first = int(too_long[0])
        raise ValueError(
            f"{too_long.size} of {lengths.size} samples are longer than max_tokens={max_tokens} "
            f"(the first: sample {first} with {lengths[first]} tokens): "
            f"raise max_tokens to at least {lengths.max()}, or truncate or drop these samples"
        )
