"""A channel of an :class:`odc.ItemExchange`: its signals, its memory, the agreement of ranks on routes, and its
growth."""

from __future__ import annotations

import contextlib
import enum
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

from odc.config import RuntimeConfig
from odc.errors import MisuseError, OdcError, PeerClosedError, PeerDiedError, ProtocolError, SetupError
from odc.items.routes import Layout, Place
from odc.rank.context import RankContext
from odc.timeline import Timeline
from odc.transports.base import SymmetricBuffer, Transport

RING = 4  # rounds whose words are kept, see [Note: Words of four rounds]
WORDS = 3  # round, and two of the digest of all routes so far


class Signal(enum.IntEnum):
    """Of each channel: a counter that each rank advances; see PROTOCOL.md."""

    BEGUN = 0
    """Rounds whose routes this rank has been given."""
    PUBLISHED = 1
    """Parts, of all rounds."""
    DONE = 2
    """Rounds of which this rank reads nothing any more."""
    GROWING = 3
    """Times that the channel was to grow."""


@dataclass
class ItemStats:
    """Counters of this rank since the exchange was created. Seconds are wall-clock time, bytes are payload. Lists have
    one entry for each rank of the group, including this rank.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> items = session.exchange_items(["images"], capacity_bytes=1024)
        >>> images = items.begin("images", [[[(0, 16, 1)]], [[(1, 16, 0)]]])
        >>> images.publish(0, [torch.ones(4)])
        >>> images.read(1 - rank, torch.empty(4))
        >>> images.done()
        >>> sum(items.stats.published_bytes), sum(items.stats.read_bytes)
        (16, 16)
        >>> items.close()
        >>> session.close()
    """

    published_bytes: list[int] = field(default_factory=list)
    """By the rank that reads them."""
    read_bytes: list[int] = field(default_factory=list)
    """By the rank that published them."""
    waited_s: list[float] = field(default_factory=list)
    """Time blocked, by the rank that was awaited last."""
    publish_s: float = 0.0
    """Time in publish, including waits for readers of the round before the last."""
    read_s: float = 0.0
    """Time in read and read_many, including waits for producers."""
    waits: int = 0
    wait_s: float = 0.0
    """Time blocked until another rank did something. Except for waits in begin, part of the times above."""

    def add_wait(self, seconds: float, whom: int | None) -> None:
        self.waits += 1
        self.wait_s += seconds

    def as_dict(self) -> dict[str, float | list[int] | list[float]]:
        return asdict(self)


class Readers(NamedTuple):
    """Who reads from this rank in one round."""

    round: int
    ranks: Sequence[int]


@dataclass(eq=False)
class RoundState:
    """What one rank knows of a round that it has begun."""

    number: int
    """In its channel, from 1."""
    layout: Layout
    buffer: SymmetricBuffer
    start_bytes: int
    """Where the items of this round lie in it."""
    overwritten: Readers | None
    """Who reads what was there before."""
    before: Sequence[int]
    """Parts that each rank has published before this round."""
    digest: bytes
    """Of the routes of this round and all before it."""
    next_part: int = 0
    """To be published."""

    @property
    def unpublished(self) -> list[int]:
        """This rank's parts that it has yet to publish: those that have items."""
        return [part for part in range(self.next_part, len(self.layout.parts)) if self.layout.parts[part]]

    @property
    def readers(self) -> Readers:
        return Readers(self.number, self.layout.consumers)


class ItemContext(RankContext):
    """What channels and rounds of one rank need of the exchange that they belong to."""

    kind = "item exchange"

    def __init__(self, transport: Transport, config: RuntimeConfig) -> None:
        world_size = transport.topology.world_size
        self.stats = ItemStats([0] * world_size, [0] * world_size, [0.0] * world_size)
        super().__init__(transport, config, self.stats)
        self.timeline: Timeline | None = None
        self._channels: dict[str, Channel] = {}

    def check(self) -> None:
        """Raise if this rank or another one has failed."""
        self._waiter.check()

    def explain(self, error: OdcError, what: str) -> OdcError:
        """See :meth:`odc.rank.waiting.Waiter.explain`."""
        return self._waiter.explain(error, what)

    def record(self, kind: str, label: str, started_ns: int, places: Iterable[Place]) -> float:
        ended_ns = time.monotonic_ns()
        if self.timeline is not None:
            self.timeline.record(kind, label, started_ns, ended_ns, bytes=sum(place.num_bytes for place in places))
        return (ended_ns - started_ns) * 1e-9

    def after_chunk(self) -> None:
        """Called after each chunk of a read: progress that others can see, and a fault point."""
        self._transport.peers.tick()
        self.faults.hit("items.read.after_chunk")

    def wait(self, ranks: Iterable[int], is_there: Callable[[int], bool], what: Callable[[], str]) -> None:
        """Return when ``is_there(rank)`` for all of ``ranks``.

        Raises:
            ProtocolError: it never will be for one of them.
            what :meth:`odc.rank.waiting.Waiter.wait` raises.
        """
        late = [rank for rank in ranks if not is_there(rank)]
        if not late:
            return
        last, started = late[0], time.monotonic()

        def pending() -> list[int]:
            nonlocal last
            left = [rank for rank in late if not is_there(rank)]
            if left:
                last = left[0]
                self._require_no_circle(left, is_there, what)
            return left

        try:
            self._waiter.wait(pending, what)
        finally:
            self.stats.waited_s[last] += time.monotonic() - started

    # [Note: Who grows waits for all] A rank in a growth to which this one has not come goes on when this one comes to
    # it. If this one waits for that rank, neither ever goes on. What the rank did before it came there has been seen by
    # whoever looks again once it has seen it there.

    def _require_no_circle(
        self, ranks: Sequence[int], is_there: Callable[[int], bool], what: Callable[[], str]
    ) -> None:
        for rank in ranks:
            stuck = [channel for channel in self._channels.values() if channel.is_growing_at(rank)]
            if stuck and not is_there(rank):
                raise ProtocolError(
                    f"rank {self.topology.me} waits for {self.topology.describe(rank)}: {what()}; that rank waits in "
                    f"begin({stuck[0].name!r}) for all ranks to come there, since the channel has to grow. Every rank "
                    "must begin the same rounds with the same routes, in the same order, before it reads in them"
                )


class Channel:
    """Rounds of one kind, with signals and memory of their own."""

    def __init__(
        self,
        items: ItemContext,
        transport: Transport,
        name: str,
        number: int,
        capacity_bytes: int,
        buffer: SymmetricBuffer,
        words: SymmetricBuffer,
    ) -> None:
        self.items = items
        self.transport = transport
        self.name = name
        self._first_signal = len(Signal) * number
        self._first_word = number * transport.topology.world_size * RING * WORDS
        self._word_buffer = words
        self._rank = transport.topology.rank
        self._capacity_bytes = capacity_bytes
        self._buffers: list[tuple[SymmetricBuffer, dict[int, int]]] = [(buffer, {})]
        """The last one is in use; rounds in those before it are being read. With the last round that each rank reads
        from this one there."""
        self.rounds: dict[int, RoundState] = {}
        self._halves: dict[int, Readers] = {}
        """Of the last buffer: who reads there what this rank has published last."""
        self._digest = b""
        self._totals = [0] * transport.topology.world_size  # parts that each rank publishes, of all rounds begun
        self._growths = 0
        self.begun = 0
        self.done = 0

    @property
    def num_bytes(self) -> int:
        return sum(buffer.num_bytes for buffer, _ in self._buffers)

    def post(self, signal: Signal) -> None:
        self.transport.post(self._first_signal + signal)

    def count(self, rank: int, signal: Signal) -> int:
        return self.transport.count(rank, self._first_signal + signal)

    def order_after(self, ranks: Sequence[int], signal: Signal, count: int) -> None:
        """See :meth:`odc.transports.base.Transport.order_after`."""
        if self.transport.engine.has_streams:
            self.transport.order_after(ranks, self._first_signal + signal, count)

    def take(self, what: str) -> contextlib.AbstractContextManager[object]:
        """See :meth:`odc.engines.base.Engine.take`."""
        return self.transport.engine.take(f"items of channel {self._first_signal}: {what}")

    # Beginning a round

    def begin(self, layout: Layout) -> RoundState:
        self.items.check()
        number = self.begun + 1
        self._require_room(number)
        # [Note: Words of four rounds] A rank may be ahead of its readers: its words of a round must stay until they
        # have looked. Who is done with a round has looked at the words of it.
        long_ago = self.rounds.get(number - RING)
        if long_ago is not None:
            self.await_done(long_ago.readers, lambda: f"begin of round {number} of {self.name!r}")
        self._digest = hashlib.sha256(self._digest + layout.digest).digest()
        self._write_words(number)
        self.begun = number
        self.post(Signal.BEGUN)
        if max(layout.needed_bytes) > self._capacity_bytes:
            self._grow(number, layout)
        buffer, readers = self._buffers[-1]
        readers.update(dict.fromkeys(layout.consumers, number))
        half = number % 2
        found = self.rounds[number] = RoundState(
            number,
            layout,
            buffer,
            half * self._capacity_bytes,
            self._halves.get(half),
            list(self._totals),
            self._digest[:16],
        )
        # [Note: Rounds in which a rank publishes nothing] They take no memory: what lies there from before may still be
        # read. So the next one to take it waits for those readers, however many rounds ago that was.
        if layout.consumers:
            self._halves[half] = found.readers
        self.rounds.pop(number - RING, None)
        self._totals = [total + posts for total, posts in zip(self._totals, layout.posts, strict=True)]
        self.transport.peers.tick()
        self._release_old()
        return found

    def _require_room(self, number: int) -> None:
        last = self.rounds.get(number - 1)
        if last is not None and last.unpublished:
            raise MisuseError(
                f"round {number} of {self.name!r} cannot begin: this rank has not published part {last.unpublished[0]} "
                f"of round {number - 1}"
            )
        if self.done < number - 2:
            raise MisuseError(
                f"round {number} of {self.name!r} cannot begin: it takes the memory of round {number - 2}, with which "
                "this rank is not done()"
            )

    def await_done(self, readers: Readers, what: Callable[[], str]) -> None:
        """Wait until ``readers`` of this rank have read."""
        number, ranks = readers
        others = [rank for rank in ranks if rank != self._rank]
        self.items.wait(
            others, lambda rank: self.is_done(rank, number), lambda: f"reads of round {number}, before {what()}"
        )

    def has_published(self, rank: int, count: int) -> bool:
        """Whether ``rank`` has published so many parts, of all rounds."""
        return self.count(rank, Signal.PUBLISHED) >= count

    def is_done(self, rank: int, number: int) -> bool:
        """Whether ``rank`` has said that it reads nothing of round ``number`` any more."""
        return self.count(rank, Signal.DONE) >= number

    def order_after_done(self, readers: Readers) -> None:
        """The current stream goes on when the streams of ``readers`` of this rank have read."""
        self.order_after(readers.ranks, Signal.DONE, readers.round)

    # Agreement

    def _words_at(self, rank: int, number: int) -> int:
        return self._first_word + (rank * RING + number % RING) * WORDS

    def _words_of(self, rank: int) -> memoryview:
        words = self._word_buffer
        memory = words.peer(rank) if words.reaches(rank) else words.local
        return memory.numpy().data.cast("B").cast("q")

    def _expected_words(self, number: int) -> memoryview:
        return memoryview(number.to_bytes(8, "little") + self._rounds_digest(number)).cast("q")

    def _rounds_digest(self, number: int) -> bytes:
        found = self.rounds.get(number)
        return self._digest[:16] if found is None else found.digest

    def _write_words(self, number: int) -> None:
        words, at = self._expected_words(number), self._words_at(self._rank, number)
        self._words_of(self._rank)[at : at + WORDS] = words
        for rank in self.transport.topology.ranks_elsewhere():
            with contextlib.suppress(PeerClosedError, PeerDiedError):  # whoever waits for its answer reports it
                self.transport.write_host(self._word_buffer, rank, 8 * at, words.tobytes())

    def has_begun(self, rank: int, number: int) -> bool:
        """Whether ``rank`` has begun round ``number``, with the routes that this rank has.

        Raises:
            ProtocolError: with other ones.
        """
        if self.count(rank, Signal.BEGUN) < number:
            return False
        at = self._words_at(rank, number)
        found, expected = self._words_of(rank)[at : at + WORDS], self._expected_words(number)
        if found != expected:
            whose = f"rank {self.items.topology.me} and {self.items.topology.describe(rank)}"
            further = "" if found[0] == number else f" (that rank is at round {found[0]} already)"
            raise ProtocolError(
                f"{whose} have begun round {number} of {self.name!r}, or one before it, with different routes{further}."
                f" Digests: {expected[1:].tobytes().hex()} and {found[1:].tobytes().hex()}. No byte of it was used. "
                "Every rank must call begin() with the same routes"
            )
        return True

    # Growing

    def is_growing_at(self, rank: int) -> bool:
        """Whether ``rank`` has come to a growth to which this one has not."""
        return self.count(rank, Signal.GROWING) > self._growths

    def _grow(self, number: int, layout: Layout) -> None:
        needed = max(layout.needed_bytes)
        most = layout.needed_bytes.index(needed)
        bytes_now = wanted = self._capacity_bytes
        while wanted < needed:
            wanted *= 2
        why = (
            f"round {number} of {self.name!r} takes {needed} bytes on rank {self.items.topology.global_rank(most)}, "
            f"and the channel has to grow from {bytes_now} to {wanted}"
        )
        self._growths += 1
        self.post(Signal.GROWING)
        others = [rank for rank in self.transport.topology.rotation() if rank != self._rank]
        self.items.wait(others, lambda rank: self.has_begun(rank, number), lambda: why)
        try:
            buffer = self.transport.allocate(2 * wanted, f"items of {self.name!r}")
        except SetupError as problem:
            raise SetupError(f"{why} bytes: {problem}") from problem
        self._buffers.append((buffer, {}))
        self._halves.clear()
        self._capacity_bytes = wanted

    def _release_old(self) -> None:
        """Give back the memory before the last growth, once everybody has read what was in it."""
        while len(self._buffers) > 1:
            buffer, readers = self._buffers[0]
            used = [number for number, one in self.rounds.items() if one.buffer is buffer]
            left = [rank for rank, number in readers.items() if rank != self._rank and not self.is_done(rank, number)]
            if left or any(number > self.done for number in used):
                return
            self.transport.release(buffer)
            del self._buffers[0]

    # The end of a round

    def end(self, number: int, streams: Iterable[str]) -> None:
        self.items.check()
        self.items.faults.hit("items.done.before")
        for stream in streams:  # the current one goes on after what that one has read
            with self.take(stream):
                pass
        with self.take("done"):
            self.post(Signal.DONE)
        self.done = number
        self.transport.peers.tick()
        self._release_old()
