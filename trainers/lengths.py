"""How many tokens each sample of a dataset has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from odc.balance.checks import IntArray
from odc.errors import UnsupportedError

logger = logging.getLogger("odc")
_NUM_COMPARED = 8


def sample_lengths(
    dataset: Any, length_column: str = "length", num_tokens_of: Callable[[int], int] | None = None
) -> IntArray:
    """Tokens of every sample, (num_samples,). Plans are as good as these are right; limits are kept whatever they say.

    A column of that name is believed, as transformers' samplers do, unless a few samples show that it counts something
    else (words). Else a ``datasets`` table is asked for the sizes of its ``input_ids`` without reading them; any other
    dataset, and one with a transform of its own, is read once.

    Args:
        num_tokens_of: tokens of a sample as it is trained on, to compare with a column; None: it is not compared.

    Raises:
        UnsupportedError: it has no length, its samples have no ``input_ids``, or a length is no count.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UnsupportedError(
            f"{type(dataset).__name__}: an iterable dataset, whose lengths show when samples are read, cannot be "
            "balanced by a policy: stream it (odc run --online --max-tokens N, or online=True), or use a map-style "
            "dataset"
        )
    columns = getattr(dataset, "column_names", None) or []
    is_table = hasattr(dataset, "with_format")
    if length_column in columns:
        stored = dataset.with_format(None) if is_table else dataset
        lengths = _as_counts(stored[length_column], f"column {length_column!r}")
        if num_tokens_of is None or not _counts_something_else(lengths, length_column, num_tokens_of):
            return lengths
    if "input_ids" in columns and is_table and dict(getattr(dataset, "format", {})).get("type") != "custom":
        return _as_counts(_table_lengths(dataset), "the size of input_ids")
    return _as_counts([_num_tokens(dataset[index]) for index in range(len(dataset))], "the size of input_ids")


def _counts_something_else(lengths: IntArray, name: str, num_tokens_of: Callable[[int], int]) -> bool:
    for index in np.unique(np.linspace(0, lengths.size - 1, _NUM_COMPARED, dtype=np.int64)).tolist():
        found = num_tokens_of(index)
        if abs(int(lengths[index]) - found) > 0.1 * found + 8:
            logger.warning(
                "odc: column %r says %d for sample %d, which has %d tokens: it is not used for balancing",
                name,
                lengths[index],
                index,
                found,
            )
            return True
    return False


def _as_counts(values: Iterable[Any], what: str) -> IntArray:
    found = list(values)
    for index, value in enumerate(found):
        if not isinstance(value, int | np.integer) or value < 0:
            raise UnsupportedError(f"{what} is {value!r} for sample {index} of the dataset: expected a count of tokens")
    return np.array(found, dtype=np.int64)


def _table_lengths(dataset: Any) -> list[int]:
    import pyarrow.compute as pc  # comes with datasets

    lengths: list[int] = []
    for batch in dataset.with_format("arrow").select_columns("input_ids").iter(batch_size=10_000):
        lengths += pc.list_value_length(batch["input_ids"]).to_pylist()
    return lengths


def _num_tokens(sample: Any) -> int:
    has_ids = isinstance(sample, Mapping) or hasattr(sample, "keys")
    if not has_ids or "input_ids" not in sample:
        raise UnsupportedError(
            f"the dataset's samples have no input_ids (a sample is a {type(sample).__name__}): tokenize the dataset "
            "before training, so that lengths are known"
        )
    return int(np.shape(sample["input_ids"])[-1])
