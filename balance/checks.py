"""Input checks shared by this package: every array is validated before any work is done with it."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.errors import shorten, shown

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Up to here every integer is a float64, and sums and small multiples stay far from the end of int64.
MAX_COUNT = 2**53
# More parts or ranks than that are a mistake, and each takes memory.
MAX_PARTS = 2**20
# Costs are 0 or between these, all together too. Times are costs over speeds and are squared: with these limits
# that neither overflows nor loses digits.
MIN_COST, MAX_COST = 1e-140, 1e140
MIN_SPEED, MAX_SPEED, MAX_SPEED_RATIO = 1e-9, 1e9, 1e9


def as_lengths(lengths: npt.ArrayLike, name: str = "lengths", minimum: int = 1) -> IntArray:
    """``lengths`` as a one-dimensional int64 array.

    Raises:
        ValueError: not one-dimensional, not integers, a value below ``minimum``, or more than 2**53 in all.
    """
    array = np.asarray(lengths)
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension, one integer per sample")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    if array.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {array.dtype}: expected integers (counts of tokens, at most 2**53 in all)")
    if (small := np.flatnonzero(array < minimum)).size:
        raise ValueError(f"{name}[{small[0]}] is {array[small[0]]}: expected at least {minimum}")
    # The sum of floats is rough but does not wrap around, that of integers is exact where the other is small.
    if array.sum(dtype=np.float64) > MAX_COUNT or array.sum() > MAX_COUNT:
        raise ValueError(f"{name} add up to {shown(sum(array.tolist()))} tokens: expected at most 2**53 in all")
    return array.astype(np.int64)


def as_costs(costs: npt.ArrayLike, name: str = "costs") -> FloatArray:
    """``costs`` as a one-dimensional float64 array.

    Raises:
        ValueError: not one-dimensional, not numbers, a value that is negative, infinite, NaN, or below 1e-140
            but not 0, or more than 1e140 in all.
    """
    array = _as_numbers(costs, name)
    if (small := np.flatnonzero((array > 0) & (array < MIN_COST))).size:
        raise ValueError(
            f"{name}[{small[0]}] is {array[small[0]]}: expected 0 or at least {MIN_COST}; use another unit"
        )
    # Scaled, since the sum may be too large for a float.
    if (array / MAX_COST).sum() > 1:
        largest = int(np.argmax(array))
        raise ValueError(
            f"{name} add up to more than {MAX_COST} (the largest: {name}[{largest}] is {array[largest]}): "
            f"expected less; use another unit"
        )
    return array


def as_cost(value: float, name: str) -> float:
    """``value`` as one cost, of any real type.

    Raises:
        ValueError: not a finite number of at least 0, or more than 1e140.
    """
    is_real = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not is_real or not 0 <= value < float("inf"):
        raise ValueError(f"{name}={shown(value)}: expected a finite number of at least 0")
    # Compared as integers where a float would be too small for the value, as floats where its type is too small.
    if (isinstance(value, int) and value > int(MAX_COST)) or (number := float(value)) > MAX_COST:
        raise ValueError(f"{name}={shown(value)}: expected at most {MAX_COST}")
    return number


def as_speeds(speeds: npt.ArrayLike, num_devices: int) -> FloatArray:
    """``speeds`` as a float64 array, (num_devices,).

    Raises:
        ValueError: not one number per device, one that is not between 1e-9 and 1e9, or one that is more than
            1e9 times another.
    """
    array = _as_numbers(speeds, "speeds")
    if array.size != num_devices:
        raise ValueError(f"speeds has {array.size} entries: expected one for each of the {num_devices} devices")
    if (bad := np.flatnonzero((array < MIN_SPEED) | (array > MAX_SPEED))).size:
        raise ValueError(
            f"speeds[{bad[0]}] is {array[bad[0]]:g}: expected more than 0, from {MIN_SPEED:g} to {MAX_SPEED:g}"
        )
    if array.size and array.max() > MAX_SPEED_RATIO * array.min() * (1 + 1e-12):
        raise ValueError(
            f"speeds are from {array.min():g} to {array.max():g}: expected the fastest to be at most "
            f"{MAX_SPEED_RATIO:g} times as fast as the slowest"
        )
    return array


def as_count(value: int, name: str, minimum: int = 1, maximum: int | None = MAX_COUNT) -> int:
    """``value`` as an int from ``minimum`` to ``maximum``, by default 2**53.

    Raises:
        ValueError: not an integer (a bool is not one), or out of range.
    """
    number = as_integer(value, minimum)
    if number is None:
        raise ValueError(f"{name}={shown(value)}: expected an integer of at least {minimum}")
    if maximum is not None and number > maximum:
        raise ValueError(f"{name}={shown(value)}: expected an integer of at most {maximum}")
    return number


def as_optional_count(value: int | None, name: str) -> int | None:
    """:func:`as_count`; None stays."""
    return None if value is None else as_count(value, name)


def check_counts(owner: object, *names: str, minimum: int = 1) -> None:
    """:func:`as_count` of attributes, by name."""
    for name in names:
        as_count(getattr(owner, name), name, minimum)


def keep(owner: object, **values: object) -> None:
    """Set attributes of a frozen dataclass to what its checks have made of them: numbers of numpy would wrap around in
    small types, and no state with them could be written as JSON."""
    for name, value in values.items():
        object.__setattr__(owner, name, value)


def as_integer(value: Any, minimum: int) -> int | None:
    """``value`` as an int; None: it is no integer (a bool is not one), or less than ``minimum``."""
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return None if isinstance(value, bool) or number < minimum else number


def as_one_of(value: Any, name: str, allowed: Sequence[str]) -> Any:
    """``value``, which is one of these.

    Raises:
        ValueError: it is something else.
    """
    if value not in allowed:
        raise ValueError(f"{name}={shown(value)}: expected one of {', '.join(map(repr, allowed))}")
    return value


def check_kind(value: object, name: str, kind: type, example: str) -> None:
    """Refuse a value that is not of this class.

    Raises:
        TypeError: says what one of it looks like.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name}={shown(value)}: expected {example} of odc.balance")


def fingerprint(data: bytes) -> int:
    """48 bits that are others for other data, the same in every process; exact as a float64."""
    return int.from_bytes(hashlib.sha256(data).digest()[:6], "little")


def check_fit(lengths: IntArray, max_tokens: int) -> None:
    """Check that every sample fits into a microbatch of its own.

    Raises:
        ValueError: a sample is longer than ``max_tokens``.
    """
    if (too_long := np.flatnonzero(lengths > max_tokens)).size:
        first = int(too_long[0])
        raise ValueError(
            f"{too_long.size} of {lengths.size} samples are longer than max_tokens={max_tokens} "
            f"(the first: sample {first} with {lengths[first]} tokens): "
            f"raise max_tokens to at least {lengths.max()}, or truncate or drop these samples"
        )


def _as_numbers(values: npt.ArrayLike, name: str) -> FloatArray:
    """``values`` as a one-dimensional float64 array of finite numbers of at least 0."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} cannot be read as one float per sample: {shorten(str(error))}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}: expected one dimension, one number per sample")
    if (bad := np.flatnonzero(~(np.isfinite(array) & (array >= 0)))).size:
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}: expected a finite number of at least 0")
    return array
