"""Pack tokenized samples into one sequence. (Needs torch.)"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

IGNORED = -100
"""Label of a token that has no loss, as in ``torch.nn.functional.cross_entropy`` and ``transformers``."""


def pack_collate(samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Concatenate samples into one packed microbatch.

    A sample has ``input_ids`` (one-dimensional, at least one token) and, of the same length, ``labels`` (default:
    ``input_ids``). It may have an ``attention_mask``, whose zeros at the end are padding and are removed, and
    ``position_ids``, which must count from 0. Other entries are ignored. Labels are not shifted: a ``transformers``
    model itself predicts ``labels[t + 1]`` from token t. The first label of every sample becomes -100, so that the last
    token of a sample does not predict the first token of the next one. Without packing, this label has no loss either.

    An empty list, which stands for an empty microbatch, gives two dummy tokens without loss. The model must *sum* the
    losses of tokens: their mean would be 0 / 0.

    Returns:
        ``input_ids``, ``labels`` and ``position_ids``, (1, num_tokens) int64, the positions beginning at 0 in each
        sample; ``cu_seqlens``, (num_samples + 1,) int32: where each sample starts, and the number of tokens.

    Raises:
        ValueError: a sample has no ``input_ids``, is empty or not one-dimensional, its labels differ in shape, or its
            mask or positions cannot be kept in a packed row (:func:`without_padding`).

    Example:
        >>> batch = pack_collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> batch["input_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 8, 9]], [[-100, 6, 7, -100, 9]])
        >>> batch["position_ids"].tolist(), batch["cu_seqlens"].tolist()
        ([[0, 1, 2, 0, 1]], [0, 3, 5])
    """
    if not samples:
        nothing = torch.zeros(2, dtype=torch.int64, device="cpu")
        return concatenate([{"input_ids": nothing, "labels": torch.full_like(nothing, IGNORED)}])
    return concatenate([_read(sample, i) for i, sample in enumerate(samples)])


def concatenate(samples: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pack samples one after the other into one row, for loaders and trainers.

    There is no attention mask. Samples are separated by positions, which restart at 0. The first label of each becomes
    -100, since no token of the same sample predicts it.

    Args:
        samples: at least one, of at least one token each; ``input_ids``, ``labels`` and any other columns,
            (num_tokens,), the same ones in all samples.

    Returns:
        The columns and ``position_ids``, (1, num_tokens); ``cu_seqlens``, see :func:`pack_collate`.
    """
    lengths = [sample["input_ids"].numel() for sample in samples]
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cpu")
    row = {name: torch.cat([sample[name] for sample in samples])[None] for name in samples[0]}
    row["labels"][:, starts[:-1].long()] = IGNORED
    row["position_ids"] = torch.cat([torch.arange(length, device=row["input_ids"].device) for length in lengths])[None]
    row["cu_seqlens"] = starts
    return row


def without_padding(
    columns: Mapping[str, torch.Tensor], mask: torch.Tensor | None, positions: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """The columns of one sample, including ``labels``, without the padding at its end; all are (n,).

    Raises:
        ValueError: a packed row, which has no mask and counts positions from 0 in each sample, would have another
            loss than the sample by itself. The message says why, without the sample's name.
    """
    labels = columns["labels"]
    attended = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask.bool()
    num_tokens = int(attended.sum())
    if not attended[:num_tokens].all():
        first = int(attended.int().argmax())
        if attended[first:].all():
            raise ValueError(
                f"its attention_mask begins with {first} zeros: with padding on the left the first token of a sample "
                "is predicted from padding, or not, depending on the batch; pad on the right "
                "(tokenizer.padding_side='right')"
            )
        raise ValueError(
            f"its attention_mask has zeros between tokens that are attended to (the first at token "
            f"{int((~attended[first:]).int().argmax()) + first}): packed rows have no mask; leave such tokens out"
        )
    if (counted := int((labels[num_tokens:] != IGNORED).sum())) > 0:
        raise ValueError(
            f"{counted} tokens of its padding (attention_mask 0) have labels, and so a loss; set them to {IGNORED}"
        )
    if positions is not None:
        found = positions[:num_tokens]
        expected = torch.arange(num_tokens, device=found.device)
        if not torch.equal(found.long(), expected):
            at = int((found != expected).int().argmax())
            raise ValueError(
                f"its position_ids are not 0, 1, 2, ...: at token {at} it is {found[at].item()}. Packed samples are "
                "told apart by positions, so they cannot jump or begin elsewhere"
            )
    return {name: values[:num_tokens] for name, values in columns.items()}


def count_loss_tokens(labels: object) -> int:
    """Number of tokens that have a loss in a model that shifts its labels.

    These are all labels other than -100, without the first of a sequence, which no token predicts. ``labels``:
    (num_tokens,) or (batch, num_tokens). The count of a packed microbatch is the sum of its samples' counts.

    Example:
        >>> count_loss_tokens([-100, -100, 7, 8, 9])
        3
    """
    return int((_as_tensor(labels)[..., 1:] != IGNORED).sum())


def _read(sample: Mapping[str, Any], i: int) -> dict[str, torch.Tensor]:
    if "input_ids" not in sample:
        raise ValueError(f"sample {i} of the microbatch has no input_ids, only {sorted(sample)}")
    ids = _as_tensor(sample["input_ids"])
    if ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(
            f"input_ids of sample {i} of the microbatch have shape {tuple(ids.shape)}: expected (n,), n > 0"
        )
    given = {name: sample.get(name) for name in ("labels", "attention_mask", "position_ids")}
    found = {name: _as_tensor(values) for name, values in given.items() if values is not None}
    for name, values in found.items():
        if values.shape != ids.shape:
            raise ValueError(
                f"{name} of sample {i} of the microbatch have shape {tuple(values.shape)}: "
                f"expected that of input_ids, {tuple(ids.shape)}"
            )
    columns = {"input_ids": ids, "labels": found.get("labels", ids)}
    try:
        packed = without_padding(columns, found.get("attention_mask"), found.get("position_ids"))
    except ValueError as error:
        raise ValueError(f"sample {i} of the microbatch cannot be packed: {error}") from None
    if packed["input_ids"].numel() == 0:
        raise ValueError(f"sample {i} of the microbatch is all padding: its attention_mask is 0 everywhere")
    return packed


def _as_tensor(values: object) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")
    return tensor.to(torch.int64)
