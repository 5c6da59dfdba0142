"""Which rank has which items, and which rank shall have them: the rearrangement of OrchMLLM (section 5.1)."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import MAX_COUNT, MAX_PARTS, IntArray, as_integer
from odc.balance.layout import split
from odc.errors import shown

_SHOWN = 5

Items = Sequence[int] | IntArray
"""Numbers of items."""


@dataclass(frozen=True, eq=False)
class Rearrangement:
    """Says from which rank each of ``num_items`` items comes and to which rank it goes. The same on every rank.

    Make one with :meth:`between`. Rearrangements can be composed (:meth:`then`) and inverted, so that two moves in a
    row become one (OrchMLLM section 6, rearrangement composition).

    Example:
        >>> rearrangement = Rearrangement.between([[0, 1, 2], [3]], [[0, 3], [1, 2]])
        >>> rearrangement.volume([10, 20, 30, 40])  # bytes of each item, say
        array([[10., 50.],
               [40.,  0.]])
        >>> rearrangement.sends(0, to=1)
        [1, 2]
        >>> rearrangement.inverse().sends(1, to=0)
        [1, 2]
    """

    source: tuple[IntArray, ...]
    """``source[rank]``: the items that the rank has, in the order in which it has them."""

    target: tuple[IntArray, ...]
    """``target[rank]``: the items that the rank gets, in this order."""

    @classmethod
    def between(cls, source: Sequence[Items], target: Sequence[Items]) -> Rearrangement:
        """Make the rearrangement from one distribution of items 0 .. n - 1 over the ranks to another.

        Args:
            source, target: item numbers per rank, in order; each number once in each of the two.

        Raises:
            ValueError: the numbers of ranks differ, or ``source`` or ``target`` is not a permutation of the items. The
                message names the first missing, repeated or unknown items.
        """
        begin = as_ranks(source, "source")
        if len(source) != len(target):
            raise ValueError(f"source has {len(source)} ranks, target {len(target)}: expected as many")
        return cls(begin, _checked(target, sum(map(len, source)), "target"))

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.source)

    @property
    def num_items(self) -> int:
        """Number of items on all ranks."""
        return sum(len(items) for items in self.source)

    @property
    def is_at_rest(self) -> bool:
        """Whether no item leaves its rank; the order within ranks may change."""
        return bool((owners(self.source) == owners(self.target)).all())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rearrangement):
            return NotImplemented
        return self.num_ranks == other.num_ranks and all(
            np.array_equal(mine, theirs)
            for mine, theirs in zip((*self.source, *self.target), (*other.source, *other.target), strict=True)
        )

    def inverse(self) -> Rearrangement:
        """The reverse rearrangement, from ``target`` to ``source``."""
        return Rearrangement(self.target, self.source)

    def then(self, other: Rearrangement) -> Rearrangement:
        """This rearrangement followed by ``other``, as one.

        Raises:
            ValueError: ``other`` does not begin where this one ends. The message names the first rank with a
                difference.
        """
        if self.num_ranks != other.num_ranks:
            raise ValueError(f"{other.num_ranks} ranks cannot follow {self.num_ranks}: expected as many")
        for rank, (mine, theirs) in enumerate(zip(self.target, other.source, strict=True)):
            if mine is not theirs and not np.array_equal(mine, theirs):
                raise ValueError(
                    f"the second rearrangement begins with items {_few(theirs)} on rank {rank}, where the first one "
                    f"ends with {_few(mine)}: expected the same items in the same order"
                )
        return Rearrangement(self.source, other.target)

    def volume(self, sizes: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The amounts that move, (num_ranks, num_ranks) float64: row i, column j is the amount from rank i to rank j.
        The diagonal is what stays.

        Args:
            sizes: size of each item in any unit (rows, bytes), (num_items,).

        Raises:
            ValueError: ``sizes`` does not have one number of at least 0 per item.
        """
        weights = np.asarray(sizes, dtype=np.float64)
        if weights.shape != (self.num_items,):
            raise ValueError(f"sizes has shape {weights.shape}: expected one number for each of {self.num_items} items")
        if (bad := np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))).size:
            raise ValueError(f"sizes[{bad[0]}] is {weights[bad[0]]}: expected a finite number of at least 0")
        pairs = owners(self.source) * self.num_ranks + owners(self.target)
        total = np.bincount(pairs, weights=weights, minlength=self.num_ranks**2)
        return total.reshape(self.num_ranks, self.num_ranks).astype(np.float64, copy=False)

    def sends(self, rank: int, to: int) -> list[int]:
        """The items that go from ``rank`` to ``to``, in the order in which ``to`` wants them."""
        mine = set(self.source[rank].tolist())
        return [item for item in self.target[to].tolist() if item in mine]

    def digest(self) -> bytes:
        """32 bytes that are equal on two ranks exactly if their rearrangements are equal."""
        found = hashlib.sha256(np.array([self.num_ranks, self.num_items], dtype="<i8").tobytes())
        for items in (*self.source, *self.target):
            found.update(np.array([items.size, *items], dtype="<i8").tobytes())
        return found.digest()

    def difference(self, other: Rearrangement) -> str:
        """The first difference of two rearrangements, for messages: what this one says, and what the other."""
        if self.num_ranks != other.num_ranks or self.num_items != other.num_items:
            return (
                f"{self.num_items} items on {self.num_ranks} ranks against "
                f"{other.num_items} items on {other.num_ranks} ranks"
            )
        for name, mine, theirs in (("from", self.source, other.source), ("to", self.target, other.target)):
            changed = np.flatnonzero(owners(mine) != owners(theirs))
            if changed.size:
                item = int(changed[0])
                return f"item {item} goes {name} rank {owners(mine)[item]} against rank {owners(theirs)[item]}"
            for rank, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if not np.array_equal(a, b):
                    end = "source" if name == "from" else "target"
                    return f"{end}[{rank}] is {_few(a)} against {_few(b)}"
        return "none"


def as_ranks(ranks: Sequence[Items], name: str) -> tuple[IntArray, ...]:
    """The items of each rank, checked.

    Raises:
        ValueError: there is no rank, or an item is missing, repeated or unknown.
    """
    if not len(ranks) or len(ranks) > MAX_PARTS:
        raise ValueError(f"{name} has {len(ranks)} ranks: expected 1 to {MAX_PARTS}")
    return _checked(ranks, sum(map(len, ranks)), name)


def _checked(ranks: Sequence[Items], num_items: int, name: str) -> tuple[IntArray, ...]:
    together = _all_items(ranks, name)
    counts = np.bincount(together[together < num_items], minlength=num_items)
    unknown = together[together >= num_items]
    missing, repeated = np.flatnonzero(counts == 0), np.flatnonzero(counts > 1)
    if unknown.size or missing.size or repeated.size:
        raise ValueError(
            f"{name} is no permutation: expected each of the items 0..{num_items - 1} once; missing: {_few(missing)}, "
            f"repeated: {_few(repeated)}, unknown: {_few(unknown)}"
        )
    together.flags.writeable = False  # and so its parts
    return tuple(split(together, np.cumsum([0, *map(len, ranks)])))


def _all_items(ranks: Sequence[Items], name: str) -> IntArray:
    """Rank by rank, (num_items,)."""
    if all(isinstance(items, np.ndarray) and items.dtype == np.int64 and items.ndim == 1 for items in ranks):
        together: IntArray = np.concatenate(ranks)
        if not together.size or together.min() >= 0:
            return together
    if all(type(items) is list for items in ranks):
        listed = list(itertools.chain.from_iterable(ranks))
        if set(map(type, listed)) == {int} and min(listed) >= 0 and max(listed) < MAX_COUNT:
            return np.array(listed, dtype=np.int64)
    return np.concatenate([_as_items(items, f"{name}[{rank}]") for rank, items in enumerate(ranks)])


def _as_items(items: Items, name: str) -> IntArray:
    array = np.array(items, dtype=object if not len(items) else None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        bad = next((item for item in items if as_integer(item, 0) is None), items)
        raise ValueError(f"{name} holds {shown(bad)}: expected item numbers, integers from 0 on")
    if array.size and array.min() < 0:
        raise ValueError(f"{name} holds {array.min()}: expected item numbers, integers from 0 on")
    return array.astype(np.int64)


def owners(ranks: Sequence[Items]) -> IntArray:
    """The rank of each item, (num_items,)."""
    sizes = [len(items) for items in ranks]
    found = np.zeros(sum(sizes), dtype=np.int64)
    found[_all_items(ranks, "ranks")] = np.repeat(np.arange(len(ranks)), sizes)
    return found


def batches(owner: IntArray, num_ranks: int) -> list[IntArray]:
    """The items of each rank, ascending, given the rank of each, (num_items,)."""
    small = owner.astype(np.uint16) if num_ranks <= 2**16 else owner  # sorts in linear time
    ends = np.cumsum(np.concatenate([[0], np.bincount(owner, minlength=num_ranks)]))
    return split(np.argsort(small, kind="stable"), ends)


def _few(items: IntArray) -> str:
    some = ", ".join(map(str, items[:_SHOWN].tolist()))
    return f"[{some}{', ...' if items.size > _SHOWN else ''}]"
