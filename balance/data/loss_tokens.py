"""Numbers of tokens and loss tokens: compares the given numbers of each sample with a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from odc.balance.checks import IntArray, as_lengths
from odc.balance.data.collate import count_loss_tokens
from odc.balance.layout import Layout


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
    if (more := np.flatnonzero(counts > lengths)).size:
        bad = more[0]
        raise ValueError(f"num_loss_tokens[{bad}] is {counts[bad]}: expected at most its length, {lengths[bad]}")
    return counts


_ADVICE = (
    "Pass num_loss_tokens=[count_loss_tokens(labels) for each sample], or check_loss_tokens=False if these labels are "
    "counted in another way"
)
_ADVICE_FOR_STREAMS = (
    "Pass num_loss_tokens=lambda sample: count_loss_tokens(sample['labels']), or check_batches=False if these labels "
    "are counted in another way"
)


def check_labels(batch: object, samples: Sequence[int | str], expected: int, advice: str = _ADVICE) -> None:
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
            f"{expected}: the loss scale would be wrong. {advice}"
        )


def check_tokens(
    batch: object, samples: Sequence[int], read: Sequence[object], lengths: IntArray, max_tokens: int
) -> None:
    """Compare the tokens of a batch, if it has ``input_ids``, with the limit that its samples were planned for.

    Args:
        batch: of ``samples``, which were ``read`` from the dataset.
        lengths: tokens of each sample of the dataset, as given, (num_samples,).

    Raises:
        ValueError: they are more.
    """
    found = _num_tokens(batch)
    if found is None or found <= max_tokens or not samples:
        return
    longer = [
        f"sample {sample} has {number} tokens, its length says {lengths[sample]}"
        for sample, one in zip(samples, read, strict=True)
        if (number := _num_tokens(one)) is not None and number != lengths[sample]
    ]
    raise ValueError(
        f"the microbatch of samples {list(samples)} has {found} tokens, more than max_tokens={max_tokens}; lengths say "
        f"{int(lengths[list(samples)].sum())}. "
        + ("; ".join(longer[:5]) if longer else "The samples are as long as they should be, so collate adds tokens")
        + ". Pass as lengths the number of tokens that each sample has in a batch"
    )


def check_length(sample: object, length: int, name: str) -> None:
    """Compare the ``input_ids`` of a sample, if it has them in one array, with its length.

    Raises:
        ValueError: there are more or fewer.
    """
    found = _num_tokens(sample)
    if found is not None and found != length:
        raise ValueError(
            f"{name} has {found} tokens in its input_ids, and its length says {length}: pass as lengths the tokens "
            "that each sample has in a batch; of one that is padded, its attention_mask beside input_ids says them"
        )


def check_batch(
    batch: object,
    samples: Sequence[int | str],
    lengths: Sequence[int],
    num_loss_tokens: int,
    max_tokens: int,
    layout: Layout,
) -> None:
    """Compare a batch of a stream with its samples, as far as it has ``input_ids`` and ``labels`` in one array each.

    Args:
        samples: what the user knows them by; none for a dummy, which must have no loss.
        lengths: tokens of each of them.
        num_loss_tokens: of all of them.

    Raises:
        ValueError: a sample is not in the batch, or the batch has more tokens, padding included, or other loss tokens.
    """
    if not isinstance(batch, Mapping):
        return
    if hasattr(batch.get("labels"), "shape"):
        check_labels(batch, samples, num_loss_tokens, _ADVICE_FOR_STREAMS)
    ids: Any = batch.get("input_ids")
    if not samples or not hasattr(ids, "shape"):
        return
    shape: tuple[int, ...] = tuple(ids.shape)
    if (area := int(np.prod(shape))) > max_tokens:
        raise ValueError(
            f"the batch of samples {list(samples)} has {area} tokens, padding included: expected at most "
            f"max_tokens={max_tokens}. Their lengths are {list(lengths)}, and {_why_larger(shape, lengths, layout)}"
        )
    found = _lengths_in(batch, shape, layout)
    if found is None or len(found) >= len(samples):
        return
    left = Counter(found)
    missing = []
    for sample, length in zip(samples, lengths, strict=True):
        if not left[length]:
            missing.append(sample)
        left[length] -= 1
    known = len(missing) == len(samples) - len(found)
    raise ValueError(
        f"collate made a batch of {len(found)} samples out of samples {list(samples)}: "
        f"{missing if known else 'some'} are not in it. Leave samples out where they are made, before their length is "
        "taken: what is dropped here would still count in the loss scale"
    )


def _why_larger(shape: tuple[int, ...], lengths: Sequence[int], layout: Layout) -> str:
    """Why a batch of this shape has more tokens than its samples should have."""
    if len(shape) > 1 and shape[0] > 1 and layout == "packed":
        return (
            f"collate pads them to {shape[0]} rows of {shape[1]}, where grouping='pack' counts on one row without "
            "padding: collate by pack_collate, or take a grouping that counts padding, such as 'token-budget'"
        )
    if len(shape) > 1 and shape[0] == len(lengths) and shape[1] > max(lengths):
        return (
            f"their rows have {shape[1]}: length(sample) must return the tokens of a sample in a batch. If collate "
            "pads rows to more than the longest sample, round lengths up likewise"
        )
    return "length(sample) must return the tokens of a sample in a batch, with what collate adds"


def _lengths_in(batch: Mapping[str, Any], shape: tuple[int, ...], layout: Layout) -> list[int] | None:
    """Tokens of each sample of a batch, padded or not; None: they cannot be told."""
    if layout != "padded":
        starts = batch.get("cu_seqlens")
        return None if starts is None else [int(number) for number in torch.as_tensor(starts, device="cpu").diff()]
    if len(shape) != 2:
        return None
    mask = batch.get("attention_mask")
    if mask is not None and tuple(np.shape(mask)) == shape:
        return [int(number) for number in torch.as_tensor(mask, device="cpu").bool().sum(dim=1)]
    return [shape[1]] * shape[0]


def _num_tokens(batch: object) -> int | None:
    """Tokens of a sample or packed batch that are not padding; None: they cannot be told."""
    if not (isinstance(batch, Mapping) and "input_ids" in batch):
        return None
    ids = batch["input_ids"]
    if isinstance(ids, list | tuple) and any(np.ndim(one) for one in ids):
        return None  # several sequences
    shape = np.shape(ids)
    mask = batch.get("attention_mask")
    if mask is not None and np.shape(mask) == shape:
        return int(torch.as_tensor(mask, device="cpu").bool().sum())
    return int(np.prod(shape)) if len(shape) == 1 or (len(shape) == 2 and shape[0] == 1) else None
