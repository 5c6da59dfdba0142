"""How many tokens have a loss: as given for each sample, and as found in a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.balance.checks import IntArray, as_lengths
from odc.balance.data.collate import count_loss_tokens


def as_loss_tokens(lengths: IntArray, given: npt.ArrayLike | None) -> IntArray:
    """``given`` as one count per sample, (num_samples,); by default all tokens but the first of each.

    Raises:
        ValueError: not one count per sample, or one that is negative or more than the sample's length.
    """
    if given is None:
        return lengths - 1
    counts = as_lengths(given, "num_loss_tokens", minimum=0)
    if counts.shape != lengths.shape:
        raise ValueError(
            f"num_loss_tokens has {counts.size} entries for {lengths.size} lengths: expected one per sample"
        )
    if (counts > lengths).any():
        bad = int(np.flatnonzero(counts > lengths)[0])
        raise ValueError(f"num_loss_tokens[{bad}] is {counts[bad]}: expected at most its length, {lengths[bad]}")
    return counts


def check_labels(batch: object, samples: Sequence[int], expected: int) -> None:
    """Compare the labels of a batch, if it has any, with the ``expected`` number of loss tokens of its samples.

    Raises:
        ValueError: they have another number.
    """
    if not (isinstance(batch, Mapping) and "labels" in batch):
        return
    labels: Any = batch["labels"]
    found = count_loss_tokens(labels)
    if found != expected:
        raise ValueError(
            f"the labels of samples {list(samples)} have {found} loss tokens, num_loss_tokens says "
            f"{expected}: the loss scale would be wrong. Pass num_loss_tokens=[count_loss_tokens(labels) for "
            "each sample], or check_loss_tokens=False if these labels are counted in another way"
        )
