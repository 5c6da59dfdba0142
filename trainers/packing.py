"""Packs several samples into one row, from the user's collator's output for each single sample.

The collator's output decides: its mask, positions and number of tokens. Lengths that are known before are used only for
the plan.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from odc.balance.checks import IntArray
from odc.balance.data.ahead import Later
from odc.balance.data.collate import IGNORED, concatenate, without_padding
from odc.balance.data.reader import name_samples
from odc.balance.late_binding.steal_policy import largest_first, queues_of
from odc.errors import ConfigError, UnsupportedError
from odc.trainers.batches import Bundle, LateStep, Microbatch, Part, StepEnd, cut
from odc.trainers.options import Planner

logger = logging.getLogger("odc")

_NOT_PACKED = frozenset({"attention_mask", "position_ids", "shift_labels"})
_NUM_REPEATS = 4
Collate = Callable[[list[Any]], Any]


def collate_alone(collate: Collate, sample: Any) -> dict[str, torch.Tensor]:
    """The user's collator on one sample, checked, without padding.

    Returns:
        ``input_ids``, ``labels``, ``position_ids`` and whatever else there is per token: (1, num_tokens).

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
    row = concatenate([{k: v[0] for k, v in sample.items() if k != "position_ids"} for sample in chosen])
    return {k: v for k, v in row.items() if k != "cu_seqlens"}


class PackedDataset(Dataset[Bundle]):
    """A dataset whose "index" is a :class:`~odc.trainers.batches.Part` and whose item the bundle of this rank.

    Args:
        dataset: of the user.
        collate: of the user.
        planner: of the dataset; its ``max_tokens`` is kept by what is counted in the rows.
        lengths: tokens of each sample as they were known before, (num_samples,), for messages.
        rank: of this process.
        example: one sample as :func:`collate_alone` gives it, which tells the columns; empty if there is none.
        keeps_limit: ``max_tokens`` is the user's; else the longest sample, whatever it turns out to have.
        may_split: a row that turns out too long may become two; not where ranks run equal numbers.
        context: most tokens of a sample, see :func:`~odc.trainers.checks.check_rows`.
        late_binding: all microbatches of a step are in its last bundle, with what it takes to give them to other ranks.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        planner: Planner,
        lengths: IntArray,
        rank: int,
        example: Microbatch,
        *,
        keeps_limit: bool = True,
        may_split: bool = True,
        context: int | None = None,
        late_binding: bool = False,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.example = example
        self.planner = planner
        self._lengths = lengths
        self._rank = rank
        self._keeps_limit = keeps_limit
        self._may_split = may_split
        self._context = context
        self._late_binding = late_binding
        self._warned = False
        self._planned: tuple[IntArray, _Planned] | None = None
        self._ahead: tuple[IntArray, Later[_Planned]] | None = None
        """Of the step after this one."""

    def __getitems__(self, part: Part) -> Bundle:
        """Plan, read, collate and pack. Torch's loaders ask for a whole batch by this name.

        Raises:
            UnsupportedError: a sample cannot be packed; names it.
            ConfigError: a sample has more tokens than ``max_tokens``, or a microbatch and cannot be split.
        """
        planned, shares = self._plan(part)
        end = StepEnd() if part.index == part.num_parts - 1 else None
        if shares is not None and end is None:
            return Bundle([])
        mine = cut(planned, part.num_parts)[part.index] if shares is None else planned
        alone = [[(sample, self.collated(sample)) for sample in microbatch] for microbatch in mine]
        num_first_labels = sum(int((one["labels"][:, :1] != IGNORED).sum()) for row in alone for _, one in row)
        rows = [self.rows(microbatch) for microbatch in alone]
        flat = [row for of_microbatch in rows for row in of_microbatch]
        if shares is None:
            return Bundle(flat, num_first_labels, len(planned) if part.index == 0 else 0, end)
        counts = np.array([counts_of(one) for microbatch in alone for _, one in microbatch], dtype=np.int64)
        late = LateStep(part.samples, shares, counts.reshape(-1, 2).T, list(map(len, rows)))
        # A rank without samples counts those of a row that has none, as the others count.
        return Bundle(flat or [pack([], self.example)], num_first_labels, max(len(planned), 1), end, late)

    def __len__(self) -> int:
        """Samples, as of the dataset itself: libraries print it."""
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        """What workers that are not forked get."""
        return {**self.__dict__, "_ahead": None}

    def _plan(self, part: Part) -> _Planned:
        """The microbatches of this rank. The parts of a step are read one after the other, so its plan is kept for the
        next, and meanwhile a thread plans the following step; not in workers, which are ahead as they are."""
        if self._planned is None or not np.array_equal(self._planned[0], part.samples):
            ahead, self._ahead = self._ahead, None
            if ahead is not None and np.array_equal(ahead[0], part.samples):
                self._planned = part.samples, ahead[1].result()
            else:
                self._planned = part.samples, self._make_plan(part.samples)
            if part.following is not None and get_worker_info() is None:
                self._ahead = part.following, Later(partial(self._make_plan, part.following))
        return self._planned[1]

    def _make_plan(self, samples: IntArray) -> _Planned:
        if not self._late_binding:
            return _Planned(self.planner.microbatches(samples, self._rank), None)
        plan = largest_first(self.planner.plan(samples))
        return _Planned([samples[part].tolist() for part in plan.microbatches[self._rank]], queues_of(plan))

    def collated(self, sample: int) -> dict[str, torch.Tensor]:
        """A sample by itself.

        Raises:
            UnsupportedError: it cannot be packed; names it.
            ConfigError: it has more tokens than ``max_tokens``.
        """
        alone = collate_sample(self.collate, self.dataset, sample)
        if self.example and alone.keys() != self.example.keys():
            raise UnsupportedError(
                f"sample {sample} of the dataset: data_collator gives the columns {sorted(alone)} for it and "
                f"{sorted(self.example)} for another sample; packed samples need the same ones"
            )
        num_tokens = alone["input_ids"].shape[1]
        if self._context is not None and num_tokens > self._context:
            raise UnsupportedError(
                f"sample {sample} of the dataset has {num_tokens} tokens after data_collator (its length says "
                f"{self._lengths[sample]}), and beyond {self._context} the model's rotary frequencies depend on the "
                "longest sample of a row; filter the dataset"
            )
        if self._keeps_limit and num_tokens > self.planner.job.max_tokens:
            raise ConfigError(
                f"sample {sample} of the dataset has {num_tokens} tokens after data_collator, more than "
                f"max_tokens={self.planner.job.max_tokens}; its length says {self._lengths[sample]}. A sample is "
                "never cut: raise max_tokens, or filter the dataset by what the collator makes of it"
            )
        return alone

    def rows(self, microbatch: list[tuple[int, Microbatch]]) -> list[Microbatch]:
        """Samples packed into one row, unless they have more tokens than was planned.

        Raises:
            ConfigError: they cannot be split.
        """
        return [pack(row, self.example) for row in self._split(microbatch)]

    def _split(self, microbatch: list[tuple[int, Microbatch]]) -> list[list[Microbatch]]:
        """Samples without tokens are left out."""
        limit = self.planner.job.max_tokens
        rows: list[list[Microbatch]] = [[]]
        room = limit
        for _, one in microbatch:
            num_tokens = one["input_ids"].shape[1]
            if num_tokens > room and rows[-1]:
                rows.append([])
                room = limit
            if num_tokens:
                rows[-1].append(one)
                room -= num_tokens
        if len(rows) > 1 and not self._may_split:
            if self._keeps_limit:
                raise ConfigError(self._too_long(microbatch) + f". {_FOR_EQUAL_COUNTS}")
            rows = [[one for row in rows for one in row]]
        if len(rows) > 1 and not self._warned:
            self._warned = True  # once per process
            logger.warning("odc: %s, so it becomes %d", self._too_long(microbatch), len(rows))
        return rows

    def _too_long(self, microbatch: list[tuple[int, Microbatch]]) -> str:
        counts = {sample: one["input_ids"].shape[1] for sample, one in microbatch}
        worst = max(counts, key=lambda sample: counts[sample] - int(self._lengths[sample]))
        return (
            f"the microbatch of samples {list(counts)} has {sum(counts.values())} tokens after data_collator, more "
            f"than max_tokens={self.planner.job.max_tokens}: sample {worst} of the dataset has {counts[worst]}, its "
            f"length says {self._lengths[worst]}"
        )


class _Planned(NamedTuple):
    microbatches: list[list[int]]
    """Of this rank."""

    shares: list[list[int]] | None
    """See :class:`~odc.trainers.batches.LateStep`."""


def counts_of(alone: Microbatch) -> tuple[int, int]:
    """Tokens and labels of a sample by itself."""
    return alone["input_ids"].shape[1], int((alone["labels"] != IGNORED).sum())


_FOR_EQUAL_COUNTS = (
    "With this policy all ranks run as many microbatches, so it cannot be split: give lengths as the collator makes "
    "them (a column), or use lb-mini with on-demand communication"
)


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


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Collators and datasets that are tried out in the block draw from generators that are put back behind it."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


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
    result = {k: v[None] for k, v in kept.items()}
    result["position_ids"] = torch.arange(result["input_ids"].shape[1], device=result["input_ids"].device)[None]
    return result


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
        return {"input_ids": nothing, "labels": torch.full_like(nothing, IGNORED)}
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
