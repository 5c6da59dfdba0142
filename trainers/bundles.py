"""What takes the place of a user's batch: some of a rank's microbatches.

Training libraries count batches: so many make one optimizer step. So every rank gets as many bundles per step as it
would have got batches, whatever the number of its microbatches.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

T = TypeVar("T")

Microbatch = dict[str, Any]


@dataclass
class Bundle:
    """The microbatches of one item of a balanced loader, possibly none."""

    microbatches: list[Microbatch]
    num_first_labels: int = 0
    """First tokens of samples that had a label before they were packed."""

    planned: tuple[int, ...] = ()
    """Microbatches that the step's plan has for each rank; in the first bundle of a step only."""

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
