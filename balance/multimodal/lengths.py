"""Lengths of a minibatch with several modalities, known before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from odc.balance.checks import FloatArray, IntArray, as_integer, as_optional_count
from odc.balance.costs.models import CostModel, check_cost
from odc.balance.layout import Layout, as_layout, split
from odc.errors import shorten, shown


@dataclass(frozen=True)
class Phase:
    """A part of the model with its own batches: an encoder, or the language model (OrchMLLM section 2.1).

    Example:
        >>> vision = TransformerCost.from_config("qwen2.5-0.5b")
        >>> phase = Phase("image", vision, layout="packed", max_tokens=65_536, frozen=True)
        >>> phase.name, phase.layout
        ('image', 'packed')
    """

    name: str
    """Name of the modality, as samples use it for their items."""

    cost: CostModel
    """Cost model of an item (for the language model: a sample), forward and backward, by length. All phases must use
    the same unit. Layouts other than "packed" need a :class:`~odc.balance.QuadraticCost` (equation 2)."""

    layout: Layout = "packed"
    """How the items of a batch are combined, which determines the batch's cost."""

    max_tokens: int | None = None
    """Maximum tokens (patches, frames) per microbatch, including padding; None: no limit."""

    frozen: bool = False
    """The phase is not trained: there is no backward through it, and no gradient of its outputs is sent."""

    row_bytes: int | None = None
    """Bytes of a row of an encoder's output, to weigh traffic; None: outputs and inputs count equally in total."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"a phase is called {shown(self.name)}: expected a text, the name of a modality")
        try:
            check_cost(self.cost)
        except ValueError as error:
            raise ValueError(f"phase {self.name!r}: {error}") from error
        as_layout(self.layout)
        as_optional_count(self.max_tokens, f"max_tokens of phase {self.name!r}")
        as_optional_count(self.row_bytes, f"row_bytes of phase {self.name!r}")


class ItemLengths(NamedTuple):
    """Lengths of one item: an image, a clip.

    Example:
        >>> ItemLengths(encoder=1024, output=256)  # an image of 1,024 patches, of which 256 rows come out
        ItemLengths(encoder=1024, output=256)
    """

    encoder: int
    """Tokens in the encoder (patches, frames), at least 1. They determine the item's cost."""

    output: int
    """Rows of the encoder's output, which become part of the sample's sequence; at least 0."""


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of one sample.

    Example:
        >>> SampleLengths(1200, {"image": [ItemLengths(encoder=1024, output=256)]}).length
        1200
    """

    length: int
    """Tokens of the whole interleaved sequence, including outputs of encoders (OrchMLLM section 6)."""

    items: Mapping[str, Sequence[ItemLengths]] = field(default_factory=dict)
    """The sample's items of each modality, in the order of the sequence. Modalities may be missing."""


@dataclass(frozen=True, eq=False)
class Items:
    """The items of one modality in a minibatch, numbered in the order of samples."""

    sample: IntArray
    """The sample of each, (num_items,), rising."""

    encoder: IntArray
    """Tokens in the encoder, (num_items,)."""

    output: IntArray
    """Rows that come out of it, (num_items,)."""

    num_bytes: IntArray
    """Bytes of what goes into the encoder, (num_items,); 0 where that is not known."""

    @property
    def number(self) -> int:
        """How many there are."""
        return int(self.sample.size)

    @cached_property
    def _starts(self) -> IntArray:
        """The first item of each sample up to the last one that has some, and then how many items there are."""
        return np.concatenate([[0], np.cumsum(np.bincount(self.sample))])

    def of_samples(self, samples: Sequence[int]) -> list[int]:
        """The items of these samples, sample by sample."""
        found: list[int] = self.of_ranks([np.asarray(samples, dtype=np.int64)])[0].tolist()
        return found

    def of_ranks(self, ranks: Sequence[IntArray]) -> list[IntArray]:
        """The items of the samples of each rank, sample by sample."""
        samples = np.concatenate(ranks)
        # Samples behind the last one that has items begin and end where all items end.
        first = self._starts.take(samples, mode="clip")
        counts = self._starts.take(samples + 1, mode="clip") - first
        ends = np.concatenate([[0], np.cumsum(counts)])
        items = np.repeat(first - ends[:-1], counts) + np.arange(ends[-1])
        return split(items, ends[np.cumsum([0, *map(len, ranks)])])


@dataclass(frozen=True, eq=False)
class MinibatchLengths:
    """The lengths of all samples of a minibatch, and which rank has them. Samples are numbered rank by rank."""

    microbatches: list[list[list[int]]]
    """``microbatches[rank][m]``: samples, as the loader of that rank has them."""

    language: IntArray
    """Tokens of each sample's sequence, (num_samples,)."""

    num_bytes: IntArray
    """Bytes of each sample without its items, (num_samples,); 0 where that is not known."""

    items: Mapping[str, Items]
    """Of each modality; all modalities of the orchestrator are there."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.microbatches)

    @property
    def num_samples(self) -> int:
        """Number of samples, of all ranks."""
        return int(self.language.size)

    def samples_of(self, rank: int) -> list[int]:
        """The samples that ``rank`` has, in its order."""
        return [sample for microbatch in self.microbatches[rank] for sample in microbatch]

    def rank_of(self, sample: int) -> int:
        """Which rank has a sample."""
        return next(rank for rank in range(self.num_ranks) if sample in self.samples_of(rank))

    def name(self, modality: str, item: int) -> str:
        """An item, for messages."""
        sample = int(self.items[modality].sample[item])
        place = item - int(np.searchsorted(self.items[modality].sample, sample))
        return f"{modality} item {place} of sample {sample} of the minibatch (read by rank {self.rank_of(sample)})"

    @classmethod
    def of_ranks(cls, rows: Sequence[RankLengths], modalities: Sequence[str]) -> MinibatchLengths:
        """Put together what the ranks have."""
        starts = np.concatenate([[0], np.cumsum([row.language.size for row in rows])])
        microbatches = []
        for row, start in zip(rows, starts.tolist(), strict=False):
            ends = np.cumsum([start, *row.microbatch_sizes])
            microbatches.append([list(range(a, b)) for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)])
        items = {}
        for name in modalities:
            parts = [row.items[name] for row in rows]
            samples = [part.sample + start for part, start in zip(parts, starts.tolist(), strict=False)]
            items[name] = Items(
                np.concatenate(samples),
                np.concatenate([part.encoder for part in parts]),
                np.concatenate([part.output for part in parts]),
                np.concatenate([part.num_bytes for part in parts]),
            )
        language = np.concatenate([row.language for row in rows])
        return cls(microbatches, language, np.concatenate([row.num_bytes for row in rows]), items)

    @classmethod
    def of_samples(cls, ranks: Sequence[Sequence[SampleLengths]], modalities: Sequence[str]) -> MinibatchLengths:
        """Of samples that are there with their lengths alone; each rank has one microbatch.

        Raises:
            ValueError: see :meth:`RankLengths.of_samples`.
        """
        return cls.of_ranks([RankLengths.of_samples([mine] if mine else [], modalities) for mine in ranks], modalities)


@dataclass(frozen=True, eq=False)
class RankLengths:
    """What one rank has: its part of :class:`MinibatchLengths`, its samples numbered from 0."""

    microbatch_sizes: list[int]
    language: IntArray
    num_bytes: IntArray
    items: Mapping[str, Items]

    @classmethod
    def of_samples(
        cls,
        microbatches: Sequence[Sequence[SampleLengths]],
        modalities: Sequence[str],
        num_bytes: Sequence[int] | None = None,
        item_bytes: Mapping[str, Sequence[int]] | None = None,
    ) -> RankLengths:
        """Check the lengths of a rank's samples, and count.

        Args:
            num_bytes: of each sample without its items.
            item_bytes: of the items of each modality, in the order of samples.

        Raises:
            ValueError: a sample or an item has no length, a modality is not one of ``modalities``, or a sample is
                shorter than what encoders put into it; sample and modality are named.
        """
        samples = [sample for microbatch in microbatches for sample in microbatch]
        for number, sample in enumerate(samples):
            _check(number, sample, modalities)
        items = {}
        for name in modalities:
            rows = [(number, *item) for number, sample in enumerate(samples) for item in sample.items.get(name, ())]
            table = np.array(rows, dtype=np.int64).reshape(-1, 3)
            sizes = np.array([0] * len(rows) if item_bytes is None else item_bytes[name], dtype=np.int64)
            items[name] = Items(table[:, 0], table[:, 1], table[:, 2], sizes)
        language = np.array([sample.length for sample in samples], dtype=np.int64)
        own = np.array([0] * len(samples) if num_bytes is None else num_bytes, dtype=np.int64)
        return cls([len(microbatch) for microbatch in microbatches], language, own, items)

    def as_vector(self) -> FloatArray:
        """All of it as numbers, exact as floats, for a ranks' exchange of vectors."""
        parts: list[Any] = [
            [len(self.microbatch_sizes), *self.microbatch_sizes],
            [self.language.size, *self.language, *self.num_bytes],
        ]
        parts += [[p.number, *p.sample, *p.encoder, *p.output, *p.num_bytes] for p in self.items.values()]
        return np.concatenate([np.asarray(part, dtype=np.float64) for part in parts])

    @classmethod
    def of_vector(cls, vector: FloatArray, modalities: Sequence[str]) -> RankLengths:
        """Restores the result of :meth:`as_vector`; further numbers are ignored."""
        values = vector.astype(np.int64)
        (sizes,), at = _read(values, 0, 1)
        (language, num_bytes), at = _read(values, at, 2)
        items = {}
        for name in modalities:
            columns, at = _read(values, at, 4)
            items[name] = Items(*columns)
        return cls(sizes.tolist(), language, num_bytes, items)


def _read(values: IntArray, at: int, num_columns: int) -> tuple[list[IntArray], int]:
    """A number n and so many columns of n, from position ``at`` on; and where they end."""
    size, start = int(values[at]), at + 1
    end = start + num_columns * size
    return list(values[start:end].reshape(num_columns, size)), end


def _check(number: int, sample: SampleLengths, modalities: Sequence[str]) -> None:
    where = f"sample {number} of this rank's minibatch"
    if not isinstance(sample, SampleLengths):
        raise ValueError(f"{where} has lengths {shown(sample)}: expected a SampleLengths")
    if as_integer(sample.length, 1) is None:
        raise ValueError(f"{where} has length {shown(sample.length)}: expected its tokens, an integer of at least 1")
    rows = 0
    for name, items in sample.items.items():
        if name not in modalities:
            known = ", ".join(map(repr, modalities)) or "none"
            raise ValueError(
                f"{where} has items of {shown(name)}, and the orchestrator has no such encoder (its encoders: "
                f"{known}): add a Phase, or leave the items out"
            )
        for place, item in enumerate(items):
            if not isinstance(item, tuple) or len(item) != 2:
                raise ValueError(
                    f"{where}, phase {name!r}: item {place} has lengths {shown(item)}: expected ItemLengths(encoder, "
                    "output)"
                )
            for what, value, least in (("encoder", item[0], 1), ("output", item[1], 0)):
                if as_integer(value, least) is None:
                    raise ValueError(
                        f"{where}, phase {name!r}: item {place} has {what} length {shown(value)}: expected an integer "
                        f"of at least {least}"
                    )
            rows += item[1]
    if rows > sample.length:
        raise ValueError(
            f"{where} has {sample.length} tokens, and its items put {rows} into it: its length must be that of the "
            f"whole interleaved sequence ({shorten(str(dict(sample.items)))})"
        )
