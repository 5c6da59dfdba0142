"""Groupings: ways in which a rank cuts its pool into microbatches, independent of other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from odc.balance.checks import FloatArray, IntArray, as_count, as_one_of, keep
from odc.balance.grouping.best_fit import best_fit, best_fit_batches
from odc.balance.grouping.pool_sort import pool_sort
from odc.balance.grouping.token_budget import Group, token_budget_groups
from odc.balance.layout import Layout
from odc.balance.policies.packing import pack
from odc.errors import shown

GroupingName = Literal["token-budget", "prefer-closest", "prefer-first", "pack", "pool-sort", "none"]
"""See :class:`~odc.balance.Grouping`."""

_OF_FIXED_SIZE = ("pool-sort", "none")
_BEST_FIT = ("prefer-closest", "prefer-first", "pack")


@dataclass(frozen=True)
class Grouping:
    """How a rank of a :class:`~odc.balance.StreamLoader` cuts its pool of samples into microbatches.

    Raises:
        ValueError: there is no grouping of this name; or a size is out of range, is missing, or is not one of this
            grouping.

    Example:
        >>> Grouping("pack", max_tokens=16_384).layout
        'packed'
        >>> Grouping("pool-sort", max_tokens=16_384, batch_size=4).layout
        'padded'
    """

    name: GroupingName
    """"token-budget": padded batches of similar lengths and about ``max_tokens`` (Online Dynamic Batching).
    "prefer-closest", "prefer-first": padded batches around the oldest sample, as full as possible (load-balanced
    dynamic batching). "pack": the same for packed batches. "pool-sort": the sorted pool in batches of ``batch_size``,
    shuffled in the same way on all ranks (LengthPoolSort). "none": ``batch_size`` samples in their order. With
    "pool-sort" and "none" a batch has fewer samples if ``max_tokens`` would be exceeded."""

    max_tokens: int
    """Maximum tokens per microbatch, including padding. A longer sample is refused."""

    pool_size: int = 1024
    """Maximum number of samples in a rank's pool."""

    batch_size: int | None = None
    """Samples of a microbatch, for "pool-sort" and "none"."""

    shuffle: bool = True
    """Whether the groups of a sorted pool ("token-budget", "pool-sort") come in a random order, the same on all aligned
    ranks. Otherwise the shortest samples come first, as in ODB."""

    def __post_init__(self) -> None:
        as_one_of(self.name, "grouping", get_args(GroupingName))
        keep(
            self,
            max_tokens=as_count(self.max_tokens, "max_tokens"),
            pool_size=as_count(self.pool_size, "pool_size", maximum=2**20),
            shuffle=bool(self.shuffle),
        )
        if self.name in _OF_FIXED_SIZE:
            if self.batch_size is None:
                raise ValueError(f"grouping={self.name!r} needs batch_size, the number of samples in a microbatch")
            keep(self, batch_size=as_count(self.batch_size, "batch_size"))
        elif self.batch_size is not None:
            raise ValueError(
                f"batch_size={shown(self.batch_size)} with grouping={self.name!r}, which cuts by max_tokens: leave it "
                "out, or use grouping='pool-sort' or 'none'"
            )

    @property
    def layout(self) -> Layout:
        """How the samples of a group lie in a microbatch."""
        return "packed" if self.name == "pack" else "padded"

    def of_pool(self, lengths: IntArray, num_before: int) -> list[Group]:
        """The groups that a pool gives before it is filled up again, in the order in which they come.

        That is the whole pool, or one group around its oldest sample, so that each has a whole pool to choose from.

        Args:
            lengths: of the samples, the oldest first, none more than ``max_tokens``.
            num_before: samples of this rank that came before these; with "pool-sort" a pool is shuffled by its place.
        """
        if self.name == "token-budget":
            return token_budget_groups(lengths, self.max_tokens)
        if self.name in _BEST_FIT:
            return [best_fit(lengths, self.max_tokens, self.name)] if lengths.size else []  # type: ignore[arg-type]
        assert self.batch_size is not None
        order = list(range(lengths.size))
        if self.name == "pool-sort" and order:
            order = pool_sort(lengths, lengths.size, self.batch_size, shuffle=self.shuffle, num_before=num_before)
        batches = [order[at : at + self.batch_size] for at in range(0, len(order), self.batch_size)]
        return [part for batch in batches for part in self._within_limit(batch, lengths)]

    def of_minibatch(self, lengths: IntArray, costs: FloatArray) -> list[Group]:
        """Microbatches of samples that one rank has chosen for one minibatch: few, and of similar cost if packed."""
        if self.name == "pack":
            return [part for part in pack(lengths, costs, self.max_tokens) if part]
        if self.name in _BEST_FIT:
            return best_fit_batches(lengths, self.max_tokens, lengths.size, self.name)  # type: ignore[arg-type]
        return self.of_pool(lengths, 0)

    def _within_limit(self, batch: Sequence[int], lengths: IntArray) -> list[Group]:
        parts: list[Group] = [[]]
        longest = 0
        for sample in batch:
            longest = max(longest, int(lengths[sample]))
            if parts[-1] and (len(parts[-1]) + 1) * longest > self.max_tokens:
                parts.append([])
                longest = int(lengths[sample])
            parts[-1].append(sample)
        return parts
