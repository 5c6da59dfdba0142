"""The schedule of a minibatch with several modalities: which rank computes what, and what moves between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray, IntArray, fingerprint
from odc.balance.layout import FlatMicrobatches
from odc.balance.multimodal.lengths import MinibatchLengths
from odc.balance.plan import Plan
from odc.balance.rearrange.rearrangement import Rearrangement

FORWARD_SHARE = 1 / 3
"""Of a forward and a backward, which computes two products for each one of the forward."""


@dataclass(frozen=True, eq=False)
class MinibatchSchedule:
    """The plan of one minibatch: which rank computes what, and what moves between ranks. The same on every rank.

    Example:
        >>> orchestrator = Orchestrator([Phase("image", image_cost)], Phase("language", language_cost), num_ranks=2)
        >>> image = ItemLengths(encoder=64, output=16)
        >>> read = [SampleLengths(100, {"image": [image] * 4})], [SampleLengths(100)]  # by rank 0, by rank 1
        >>> encoder = orchestrator.plan(read).encoders["image"]
        >>> encoder.microbatches[0], encoder.microbatches[1]  # rank 1 encodes two images of rank 0's
        ([[1, 2]], [[0, 3]])
    """

    lengths: MinibatchLengths
    """The lengths from which the schedule was made."""

    language: Plan
    """Plan of samples: microbatches of the language model."""

    encoders: Mapping[str, Plan]
    """Plans of items, as microbatches of each encoder."""

    samples: Rearrangement
    """Moves of samples without their items, from the rank that reads a sample to the rank that trains on it."""

    inputs: Mapping[str, Rearrangement]
    """Moves of items of each modality, from the rank that reads an item to the rank that encodes it."""

    outputs: Mapping[str, Rearrangement]
    """Moves of encoders' outputs: from the rank that encodes an item to the rank that trains on its sample, in the
    order of the latter's microbatches. Gradients move in the reverse direction."""

    frozen: Mapping[str, bool]
    """Which encoders are not trained."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return self.language.world_size

    def items_of(self, modality: str, rank: int, microbatch: int) -> list[int]:
        """The items of ``modality``, in order, that a microbatch of the language model on ``rank`` needs."""
        return self.lengths.items[modality].of_samples(self.language.microbatches[rank][microbatch])

    def as_vector(self) -> IntArray:
        """All decisions as numbers: two schedules are the same exactly if these are."""
        parts: list[IntArray] = []
        for plan in (self.language, *self.encoders.values()):
            flat = FlatMicrobatches.of(plan.microbatches)
            parts += [*_places(flat), flat.counts, flat.samples]
        return np.concatenate(parts)

    def fingerprint(self) -> int:
        """48 bits that differ where decisions do."""
        return fingerprint(self.as_vector().tobytes())

    def difference(self, other: IntArray) -> str:
        """The first decision in which this schedule differs from that of another rank, given :meth:`as_vector`."""
        at = 0
        for name, plan in (("language model", self.language), *self.encoders.items()):
            ranks, _ = _places(FlatMicrobatches.of(plan.microbatches))
            theirs = other[at : at + ranks.size]
            at += 3 * ranks.size + self.num_ranks
            if theirs.size != ranks.size:
                break
            if (changed := np.flatnonzero(theirs != ranks)).size:
                number = int(changed[0])
                what = f"sample {number}" if plan is self.language else self.lengths.name(name, number)
                return f"phase {name!r}: {what} goes to rank {ranks[number]} here, to rank {theirs[number]} there"
        return "their microbatches are not the same"


def forward_ends(plan: Plan, clocks: FloatArray) -> tuple[FloatArray, FloatArray]:
    """When the forward of each microbatch of an encoder ends, (num_microbatches,), and all of those of each rank,
    (num_ranks,), if ranks begin at ``clocks``; in units of cost."""
    ends = np.cumsum(np.column_stack([clocks, FORWARD_SHARE * plan.microbatch_times()]), axis=1)
    ranks, numbers = FlatMicrobatches.of(plan.microbatches).places()
    return ends[ranks, numbers + 1], ends[:, -1]


def _places(microbatches: FlatMicrobatches) -> tuple[IntArray, IntArray]:
    """The rank of each item of a plan, and its microbatch there."""
    found = np.zeros((2, microbatches.samples.size), dtype=np.int64)
    found[:, microbatches.samples] = np.repeat(microbatches.places(), microbatches.sizes, axis=1)
    return found[0], found[1]
