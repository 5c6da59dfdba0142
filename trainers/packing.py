"""Several samples in one row, made of what the user's own collator makes of each of them alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from odc.balance.data.collate import IGNORED
from odc.errors import UnsupportedError
from odc.trainers.bundles import Microbatch

_NOT_PACKED = frozenset({"attention_mask", "position_ids", "shift_labels"})
Collate = Callable[[list[Any]], Any]


def collate_alone(collate: Collate, sample: Any) -> dict[str, torch.Tensor]:
    """The user's collator on one sample, checked, without padding.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` and whatever else there is per token: (1, num_tokens).

    Raises:
        UnsupportedError: the collator's output is not one value per token.
    """
    batch = collate([sample])
    batch = dict(batch) if hasattr(batch, "keys") else {"(not a mapping)": batch}
    ids = batch.get("input_ids")
    if not torch.is_tensor(ids) or "labels" not in batch or ids.dim() != 2 or ids.shape[0] != 1:
        raise UnsupportedError(
            f"data_collator: for a list of one sample it gave {_shapes(batch)}; balanced minibatches need input_ids "
            "and labels of shape (1, num_tokens)"
        )
    odd = {k: v for k, v in batch.items() if v is not None and (not torch.is_tensor(v) or v.shape != ids.shape)}
    if odd or "shift_labels" in batch:
        raise UnsupportedError(
            f"data_collator: it gives {_shapes(odd or {'shift_labels': batch['shift_labels']})} besides input_ids of "
            f"shape {tuple(ids.shape)}; balanced minibatches pack samples by themselves and can only pack values per "
            "token (in TRL: packing=False, padding_free=False)"
        )
    columns = {k: v for k, v in batch.items() if v is not None and k not in _NOT_PACKED}
    positions = batch.get("position_ids")
    mask = batch.get("attention_mask")
    if mask is not None and not mask.all():  # a collator that pads to a multiple pads also a single sample
        keep = mask[0].bool()
        columns = {k: v[:, keep] for k, v in columns.items()}
        positions = None if positions is None else positions[:, keep]
    num_tokens = columns["input_ids"].shape[1]
    columns["position_ids"] = torch.arange(num_tokens)[None] if positions is None else positions
    return columns


def pack(samples: Sequence[dict[str, torch.Tensor]]) -> Microbatch:
    """Samples of :func:`collate_alone` one behind the other in one row.

    The first label of each becomes -100: nothing of the same sample predicts it. There is no attention mask;
    most of transformers' models attend within samples, which they tell apart by positions that start anew
    (:mod:`odc.trainers.probe` finds those that do not). No samples give two tokens without loss, for a rank that has
    nothing else to run.
    """
    if not samples:
        zeros = torch.zeros(1, 2, dtype=torch.int64)
        return {"input_ids": zeros, "labels": torch.full((1, 2), IGNORED), "position_ids": torch.arange(2)[None]}
    row = {k: torch.cat([sample[k] for sample in samples], dim=1) for k in samples[0]}
    starts = torch.tensor([0, *(sample["input_ids"].shape[1] for sample in samples[:-1])]).cumsum(0)
    row["labels"][:, starts] = IGNORED
    return row


@dataclass(frozen=True)
class PackedDataset(Dataset[tuple[Microbatch, int]]):
    """A dataset whose "index" is the list of the samples of a microbatch, and whose item is the packed microbatch and
    its number of first labels, for :meth:`Bundle.of <odc.trainers.bundles.Bundle.of>`.
    """

    dataset: Any
    collate: Collate
    example: Microbatch = field(default_factory=dict)
    """One sample as :func:`collate_alone` gives it; empty if there is none."""

    def __getitem__(self, samples: Sequence[int]) -> tuple[Microbatch, int]:
        alone = [collate_alone(self.collate, self.dataset[sample]) for sample in samples]
        return pack(alone), sum(int((one["labels"][:, :1] != IGNORED).sum()) for one in alone)

    def __len__(self) -> int:
        """Samples, as of the dataset itself: libraries print it."""
        return len(self.dataset)


def _shapes(batch: dict[str, Any]) -> str:
    return ", ".join(
        f"{k} of shape {tuple(v.shape)}" if torch.is_tensor(v) else f"{k} ({type(v).__name__})"
        for k, v in batch.items()
    )
