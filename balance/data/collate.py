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

    A sample has ``input_ids`` (one-dimensional, at least one token) and, of the same length, ``labels``
    (default: ``input_ids``); other entries are ignored. Labels are not shifted: a ``transformers`` model
    predicts ``labels[t + 1]`` from token t by itself. So that the last token of a sample does not have to
    predict the first one of the next, the first label of every sample becomes -100. It would have no loss in
    a sample of its own either.

    An empty list, the mark of an empty microbatch, gives a dummy of two tokens without loss. A model run on
    it must *sum* the losses of its tokens: their mean would be 0 / 0.

    Example: the samples 5 6 7 and 8 9 give input_ids 5 6 7 8 9, labels -100 6 7 -100 9,
    position_ids 0 1 2 0 1, cu_seqlens 0 3 5.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``: (1, num_tokens) int64; the positions start at 0
            in each sample.
        ``cu_seqlens``: (num_samples + 1,) int32, where each sample starts, and the number of tokens.

    Raises:
        ValueError: a sample has no ``input_ids``, is empty or not one-dimensional, or its labels differ in
            shape.
    """
    if not samples:
        return _concatenate([(torch.zeros(2, dtype=torch.int64), torch.full((2,), IGNORED))])
    return _concatenate([_read(sample, i) for i, sample in enumerate(samples)])


def count_loss_tokens(labels: object) -> int:
    """Number of tokens that have a loss in a model that shifts its labels.

    That is all labels but -100 and but the first of a sequence, which no token predicts. ``labels``:
    (num_tokens,) or (batch, num_tokens). The count of a packed microbatch is the sum of its samples' counts.
    """
    tensor = _as_tensor(labels)
    return int((tensor[..., 1:] != IGNORED).sum())


def _concatenate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    lengths = [ids.numel() for ids, _ in samples]
    labels = torch.cat([labels for _, labels in samples])
    starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    labels[starts[:-1].long()] = IGNORED
    return {
        "input_ids": torch.cat([ids for ids, _ in samples])[None],
        "labels": labels[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "cu_seqlens": starts,
    }


def _read(sample: Mapping[str, Any], i: int) -> tuple[torch.Tensor, torch.Tensor]:
    if "input_ids" not in sample:
        raise ValueError(f"sample {i} of the microbatch has no input_ids, only {sorted(sample)}")
    ids = _as_tensor(sample["input_ids"])
    if ids.dim() != 1 or ids.numel() == 0:
        raise ValueError(
            f"input_ids of sample {i} of the microbatch have shape {tuple(ids.shape)}: expected (n,), n > 0"
        )
    given = sample.get("labels")
    labels = ids if given is None else _as_tensor(given)
    if labels.shape != ids.shape:
        raise ValueError(
            f"labels of sample {i} of the microbatch have shape {tuple(labels.shape)}: "
            f"expected that of input_ids, {tuple(ids.shape)}"
        )
    return ids, labels


def _as_tensor(values: object) -> torch.Tensor:
    return torch.as_tensor(values).to(torch.int64)
