"""How many tokens each sample of a dataset has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from odc.errors import UnsupportedError


def sample_lengths(dataset: Any, length_column: str = "length") -> list[int]:
    """Tokens of every sample.

    A column of that name is believed, as transformers' samplers do. Else a ``datasets`` table is asked for the sizes of
    its ``input_ids`` without reading them, and any other dataset is read once.

    Raises:
        UnsupportedError: it has no length, or its samples have no ``input_ids``.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise UnsupportedError(
            f"{type(dataset).__name__}: an iterable dataset cannot be balanced, since the lengths of samples must be "
            "known before they are read; use a map-style dataset"
        )
    columns = getattr(dataset, "column_names", None) or []
    if length_column in columns:
        return [int(length) for length in dataset[length_column]]
    if "input_ids" in columns and hasattr(dataset, "with_format"):
        return _table_lengths(dataset)
    return [_num_tokens(dataset[index]) for index in range(len(dataset))]


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
