"""Bundles, which replace the user's batches: some of a rank's microbatches.

Training libraries count batches to find the end of an optimizer step. So every rank gets one bundle for each batch that
it would have got, for any number of microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, TypeVar

import torch

from odc.balance.checks import IntArray
from odc.errors import UnsupportedError

T = TypeVar("T")

Microbatch = dict[str, Any]


@dataclass(frozen=True)
class StepEnd:
    """What is known where an optimizer step ends, of a stream."""

    num_samples: int = 0
    """All ranks together."""

    state: dict[str, Any] = field(default_factory=dict)
    """What :meth:`odc.trainers.streamed.StreamedBatches.load_state_dict` needs to go on behind the step; for JSON."""


@dataclass
class LateStep:
    """A step whose samples are bound late: what is needed to take some of other ranks."""

    samples: IntArray
    """Dataset indices of all ranks, which may have one twice."""

    shares: list[list[int]]
    """Positions in ``samples`` of those of each rank."""

    counts: IntArray
    """Tokens and labels of each sample of this rank's share as it was collated, in the order of its microbatches,
    (2, num_samples)."""

    num_rows: list[int]
    """Rows of each of this rank's microbatches, in the order of its plan."""


@dataclass
class Bundle:
    """The microbatches of one item of a balanced loader, possibly none."""

    microbatches: list[Microbatch]
    num_first_labels: int = 0
    """First tokens of samples that had a label before they were packed."""

    planned: int = 0
    """Microbatches that the step's plan has for this rank; in the first bundle of a step only."""

    end: StepEnd | None = None
    """The optimizer step ends with this bundle."""

    late: LateStep | None = None
    """All samples of the step are bound when they are trained on, those of this bundle first; in the last one only."""

    is_placeholder: bool = False
    """Stands for one that was trained on before, and is to be skipped."""

    def to(self, device: Any, non_blocking: bool = False) -> Bundle:
        """As of a tensor: loaders move what they yield."""
        moved = [{k: v.to(device, non_blocking=non_blocking) for k, v in one.items()} for one in self.microbatches]
        return replace(self, microbatches=moved)

    def pin_memory(self) -> Bundle:
        """As of a tensor."""
        return replace(self, microbatches=[{k: v.pin_memory() for k, v in one.items()} for one in self.microbatches])


def cut(microbatches: Sequence[T], num_bundles: int) -> list[list[T]]:
    """``num_bundles`` runs of about equal length; the last is not empty unless all are.

    That the last has something matters where gradients are only reduced in the last batch of a step
    (``Accelerator.no_sync``).

    >>> cut("ab", 3)
    [[], ['a'], ['b']]
    """
    cuts = [len(microbatches) * i // num_bundles for i in range(num_bundles + 1)]
    return [list(microbatches[a:b]) for a, b in itertools.pairwise(cuts)]


def check_step(bundles: Sequence[Bundle]) -> None:
    """Refuse to train on other bundles than all of one step.

    Raises:
        UnsupportedError: a training library has taken fewer or more together, or has not skipped placeholders.
    """
    if any(bundle.is_placeholder for bundle in bundles):
        raise UnsupportedError(
            "training goes on from a checkpoint, but begins with a batch that was trained on before it: the trainer "
            "must skip what is done. Resume with the same numbers of batches, steps and ranks, or set "
            "ignore_data_skip=True"
        )
    if [bundle.end is not None for bundle in bundles] != [False] * (len(bundles) - 1) + [True]:
        raise UnsupportedError(
            f"the trainer takes {len(bundles)} batches for an optimizer step, which are not those of one: "
            "gradient_accumulation_steps must be the same from the loader to the last step"
        )


def microbatches_of(items: Sequence[Any]) -> list[Any]:
    """The microbatches of bundles; anything else is one already."""
    return [one for item in items for one in (item.microbatches if isinstance(item, Bundle) else [item])]


def counted_batches_of(items: Sequence[Any]) -> list[Any]:
    """The microbatches, for counting labels as the trainer would have in the user's batches.

    Where it knows that the model shifts labels, it counts all but each row's first; else (GPT2LMHeadModel) all, also
    the first ones, which packing has taken away. So they follow as rows of one label, which the former does not count.
    """
    batches = microbatches_of(items)
    num_first_labels = sum(item.num_first_labels for item in items if isinstance(item, Bundle))
    if not num_first_labels:
        return batches
    return [*batches, {"labels": torch.zeros(num_first_labels, 1, device=batches[0]["labels"].device)}]


@dataclass
class Tally:
    """Counts of planned and trained samples and microbatches, for the log."""

    planned: list[int] = field(default_factory=list)
    """Microbatches that were planned for this rank, a minibatch each. (How many other ranks have is known to these: a
    rank packs its own.)"""

    streamed: list[int] = field(default_factory=list)
    """Samples of all ranks in minibatches of a stream."""

    num_run: int = 0
    """Microbatches of this rank."""

    num_taken: int = 0
    """Samples of other ranks that this one has run, bound late."""

    @property
    def minibatches(self) -> int:
        """How many were trained on."""
        return len(self.planned) + len(self.streamed)

    def add(self, bundle: Bundle) -> None:
        """The first bundle of a step tells what was planned, the last one what was streamed."""
        self.num_run += len(bundle.microbatches)
        if bundle.planned:
            self.planned.append(bundle.planned)
        if bundle.end is not None and bundle.end.num_samples:
            self.streamed.append(bundle.end.num_samples)

    def __str__(self) -> str:
        if self.streamed:
            return (
                f"{len(self.streamed)} minibatches of {fmean(self.streamed):.1f} samples on average; microbatches of "
                f"this rank: {self.num_run}"
            )
        if self.planned:
            return (
                f"{len(self.planned)} minibatches planned; microbatches of this rank: {self.num_run}, "
                f"{min(self.planned)} to {max(self.planned)} in a minibatch"
                + f"; {self.num_taken} samples taken from other ranks"
                * bool(self.num_taken)
            )
        return "no minibatch was trained on"
