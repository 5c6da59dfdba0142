"""What takes the place of a user's batch: some of a rank's microbatches.

Training libraries count batches: so many make one optimizer step. So every rank gets as many bundles per step as it
would have got batches, whatever the number of its microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from odc.errors import UnsupportedError

T = TypeVar("T")

Microbatch = dict[str, Any]


@dataclass(frozen=True)
class StepEnd:
    """What is known where an optimizer step ends."""

    step: int = 0
    """Steps of the epoch until now. It and what follows: of a stream."""

    num_samples: int = 0
    """All ranks together."""

    state: dict[str, Any] = field(default_factory=dict)
    """Of the stream behind the step."""


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
