"""Packs several samples into one row, from the user's collator's output for each single sample.

The collator's output decides: its mask, positions and number of tokens. Lengths that are known before are used only for
the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from odc.balance.data.collate import IGNORED, concatenate, without_padding
from odc.balance.data.reader import name_samples
from odc.errors import UnsupportedError
from odc.trainers.batches import Microbatch

logger = logging.getLogger("odc")

_NOT_PACKED = frozenset({"attention_mask", "position_ids", "shift_labels"})
_NUM_REPEATS = 4
Collate = Callable[[list[Any]], Any]


def collate_alone(collate: Collate, sample: Any) -> dict[str, torch.Tensor]:
    """The user's collator on one sample, checked, without padding.

    Returns:
        ``input_ids``, ``labels`` and whatever else there is per token: (1, num_tokens).

    Raises:
        UnsupportedError: the collator's output is not one value per token, or a packed row could not say what its mask
            or positions say.
    """
    batch = _as_mapping(collate([sample]))
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
    return _row_without_padding(batch, 0)


def collate_sample(collate: Collate, dataset: Any, index: int) -> dict[str, torch.Tensor]:
    """:func:`collate_alone` of one sample of a dataset, whose errors name it."""
    try:
        return collate_alone(collate, dataset[index])
    except UnsupportedError as error:
        raise UnsupportedError(f"sample {index} of the dataset: {error}") from error
    except Exception as error:
        name_samples(error, f"when sample {index} of the dataset was read and collated")
        raise


def check_sample(
    name: str, alone: Microbatch, example: Microbatch, context: int | None = None, *, remark: str = ""
) -> None:
    """Refuse a sample by itself that rows cannot have.

    Args:
        name: of the sample, for messages.
        alone: see :func:`collate_alone`.
        example: another sample, which tells the columns; empty: any columns will do.
        context: see :func:`~odc.trainers.models.check_rows`.
        remark: on the number of its tokens.

    Raises:
        UnsupportedError: it has other columns, or more tokens than the model takes.
    """
    if example and alone.keys() != example.keys():
        raise UnsupportedError(
            f"{name}: data_collator gives the columns {sorted(alone)} for it and {sorted(example)} for another sample; "
            "packed samples need the same ones"
        )
    num_tokens = alone["input_ids"].shape[1]
    if context is not None and num_tokens > context:
        raise UnsupportedError(
            f"{name} has {num_tokens} tokens after data_collator{remark}, and beyond {context} the model's rotary "
            "frequencies depend on the longest sample of a row; filter the dataset"
        )


def num_first_labels(samples: Sequence[Microbatch]) -> int:
    """Of how many of these samples by themselves the first token has a label, which a packed row takes away."""
    return sum(int((sample["labels"][:, :1] != IGNORED).sum()) for sample in samples)


def counts_of(alone: Microbatch) -> tuple[int, int]:
    """Tokens and labels of a sample by itself."""
    return alone["input_ids"].shape[1], int((alone["labels"] != IGNORED).sum())


def pack(
    samples: Sequence[Mapping[str, torch.Tensor]], example: Mapping[str, torch.Tensor] | None = None
) -> Microbatch:
    """Samples of :func:`collate_alone` one behind the other in one row, see
    :func:`~odc.balance.data.collate.concatenate`.

    There is no attention mask; most of transformers' models attend within samples, which they tell apart by positions
    that start anew (:func:`odc.balance.check_packing` finds those that do not). No samples give two tokens without
    loss, for a rank that has nothing else to run, with the columns of ``example``.
    """
    chosen = samples or [_dummy(example or {})]
    row = concatenate([{k: v[0] for k, v in sample.items()} for sample in chosen])
    return {k: v for k, v in row.items() if k != "cu_seqlens"}


def check_batches(collate: Collate, samples: Mapping[str, Any]) -> None:
    """Refuse a collator that makes something else of a sample in a batch than by itself, on the right of which there is
    at most padding.

    Args:
        collate: of the user.
        samples: two of different lengths, by what messages call them.

    Raises:
        UnsupportedError: it pads on the left, gives padding a loss, or depends on the other samples of the batch.
    """
    try:
        batch = _as_mapping(collate(list(samples.values())))
    except Exception as error:  # one that cannot pad: then a batch has samples of one length, as in a row
        logger.debug("odc: data_collator cannot put samples %s into one batch: %s", list(samples), error)
        return
    if any(not torch.is_tensor(batch.get(k)) or len(batch[k]) != len(samples) for k in ("input_ids", "labels")):
        return  # not one row per sample: nothing is padded
    alone = [collate_alone(collate, sample) for sample in samples.values()]
    for row, (name, mine) in enumerate(zip(samples, alone, strict=True)):
        try:
            found = _row_without_padding(batch, row, mine)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}, in a batch with another: {error}") from error
        differing = [k for k in mine if k not in found or not torch.equal(found[k], mine[k])]
        if differing and all(_equal(collate_alone(collate, samples[name]), mine) for _ in range(_NUM_REPEATS)):
            raise UnsupportedError(
                f"data_collator: its {' and '.join(differing)} of {name} are others in a batch "
                "with another sample than by itself, so packing would change the loss"
            )


def _row_without_padding(
    batch: Mapping[str, Any], row: int, alone: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """One row of what a collator gave, (1, num_tokens) per column.

    ``alone``: the same sample by itself, which tells where padding is if there is no mask.
    """
    given = {k: v[row] for k, v in batch.items() if torch.is_tensor(v) and v.dim() == 2}
    columns = {k: v for k, v in given.items() if k not in _NOT_PACKED}
    mask = given.get("attention_mask")
    if mask is None and alone is not None:
        mask = _mask_by(alone["input_ids"][0], columns["input_ids"])
    try:
        kept = without_padding(columns, mask, given.get("position_ids"))
    except ValueError as error:
        raise UnsupportedError(f"data_collator: {error}") from None
    return {k: v[None] for k, v in kept.items()}


def _mask_by(tokens: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Where in ``row`` these ``tokens`` are: at its beginning, unless they match better at its end."""
    mask = torch.zeros_like(row, dtype=torch.bool)
    size = min(tokens.numel(), row.numel())
    start, end = row[:size] == tokens[:size], row[row.numel() - size :] == tokens[:size]
    on_the_left = int(end.sum()) > int(start.sum())
    mask[row.numel() - size if on_the_left else 0 :][:size] = True
    return mask


def _dummy(example: Mapping[str, torch.Tensor]) -> Microbatch:
    if not example or not example["input_ids"].shape[1]:
        nothing = torch.zeros(1, 2, dtype=torch.int64, device="cpu")
        example = {"input_ids": nothing, "labels": nothing}
    columns = {k: v[:, torch.arange(2, device=v.device) % v.shape[1]] for k, v in example.items()}
    return {**columns, "labels": torch.full_like(columns["labels"], IGNORED)}


def _equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def _as_mapping(batch: Any) -> dict[str, Any]:
    return dict(batch) if hasattr(batch, "keys") else {"(not a mapping)": batch}


def _shapes(batch: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{k} of shape {tuple(v.shape)}" if torch.is_tensor(v) else f"{k} ({type(v).__name__})"
        for k, v in batch.items()
    )
