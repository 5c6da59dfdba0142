"""Routes: which items move in one round of an :class:`odc.ItemExchange`, and the layout that one rank derives from
them.

All ranks have the same routes. So each rank knows, without communication, the position of an item in another rank's
memory, and after how many publications of that rank it is available.
"""

from __future__ import annotations

import hashlib
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from odc.errors import shown
from odc.transports.base import aligned


class Item(NamedTuple):
    """One piece of data that one rank publishes and one rank reads, such as an encoder's output for one image, or its
    gradient.

    Example:
        >>> odc.Item(id=7, num_bytes=2 * 1024, consumer=1)
        Item(id=7, num_bytes=2048, consumer=1)
    """

    id: int
    """Any number; each number occurs once per round."""
    num_bytes: int
    """Size in bytes. 0: there is nothing to read, and no rank waits."""
    consumer: int
    """The rank of the group that reads the item; may be the producer itself."""


Routes = Sequence[Sequence[Sequence[Item | tuple[int, int, int]]]]
"""``routes[rank][part]``: the items that ``rank`` publishes at once, as its part number ``part`` of the round."""


class Place(NamedTuple):
    """Where an item is."""

    id: int
    num_bytes: int
    consumer: int
    producer: int
    part: int
    offset_bytes: int
    """In the producer's memory of this round."""
    posts: int
    """How many parts the producer has published in this round once the item is there; parts without items are none."""

    @property
    def end_bytes(self) -> int:
        """The offset at which the next item begins."""
        return self.offset_bytes + aligned(self.num_bytes)


@dataclass(frozen=True)
class Layout:
    """The routes of one round, as one rank sees them."""

    places: dict[int, Place]
    """By item: those that this rank publishes or reads."""
    parts: list[list[Place]]
    """Of this rank, in the order of the routes."""
    posts: list[int]
    """How many parts each rank publishes: those that have items."""
    needed_bytes: list[int]
    """Memory that each rank's items take."""
    consumers: list[int]
    """The ranks that read from this one, this one included."""
    digest: bytes
    """Equal on two ranks exactly if their routes are."""

    @classmethod
    def of(cls, routes: Routes, rank: int, world_size: int) -> Layout:
        """
        Raises:
            ValueError: the routes are not for ``world_size`` ranks, name a rank that there is not, have an item twice
                or a negative size.

        >>> layout = Layout.of([[[(7, 100, 1)], []], [[(8, 4, 0), (9, 4, 0)]]], rank=0, world_size=2)
        >>> layout.posts, layout.needed_bytes, layout.consumers, layout.places[9].offset_bytes
        ([1, 1], [128, 128], [1], 64)
        """
        if len(routes) != world_size:
            raise ValueError(f"routes of {len(routes)} ranks for a group of {world_size}: expected one list per rank")
        numbers, posts, needed = array("q", [world_size]), [0] * world_size, [0] * world_size
        places: dict[int, Place] = {}
        own: list[list[Place]] = []
        seen: set[int] = set()
        consumers: set[int] = set()
        for producer, parts in enumerate(routes):
            numbers.append(len(parts))
            offset = 0
            for number, part in enumerate(parts):
                numbers.append(len(part))
                posts[producer] += bool(part)
                found: dict[int, Place] = {}
                items = [_checked(item, producer, world_size, seen) for item in part]
                # [Note: One span for each reader] What one rank reads of a part lies together, so that from another
                # host it can be read at once.
                for item in sorted(items, key=lambda item: item.consumer):
                    numbers.extend(item)
                    place = Place(*item, producer, number, offset, posts[producer])
                    offset = place.end_bytes
                    if rank in (producer, item.consumer):
                        places[item.id] = found[item.id] = place
                    if producer == rank and item.num_bytes:
                        consumers.add(item.consumer)
                if producer == rank:
                    own.append([found[item.id] for item in items])
            needed[producer] = offset
        digest = hashlib.sha256(numbers.tobytes()).digest()
        return cls(places, own, posts, needed, sorted(consumers), digest)


def _checked(item: Item | tuple[int, int, int], producer: int, world_size: int, seen: set[int]) -> Item:
    try:
        number, num_bytes, consumer = map(operator.index, item)
    except (TypeError, ValueError):
        raise ValueError(f"routes of rank {producer}: {shown(item)} is not (item, bytes, consumer), integers") from None
    what = f"item {number} of rank {producer}"
    if not 0 <= consumer < world_size:
        raise ValueError(f"{what}: consumer {consumer}, expected a rank from 0 to {world_size - 1}")
    if not (0 <= num_bytes < 1 << 63 and -(1 << 63) <= number < 1 << 63):
        raise ValueError(f"{what}: {num_bytes} bytes; expected 0 or more, and an item number of at most 64 bits")
    if number in seen:
        raise ValueError(f"{what} is in the routes of this round twice: an item goes to one rank")
    seen.add(number)
    return Item(number, num_bytes, consumer)
