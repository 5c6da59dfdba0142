"""Items on demand: what one rank has computed and another one needs, read from its producer's published memory.

In multimodal training a rank encodes images and audio of samples whose language-model part runs on other ranks. Here a
producer publishes what it has encoded, part by part, and a consumer reads an item when it needs it: no rank waits for
one whose items it does not read. Gradients go back in the same way, in a channel of their own.

PROTOCOL.md beside this file states the rules and why they suffice; tests/test_items.py and tests/test_items_streams.py
run this under random delays and check that it fails when any of its orders is removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field

import torch

from odc.config import RuntimeConfig
from odc.errors import MisuseError, OdcError, PeerClosedError, PeerDiedError, ProtocolError, SetupError
from odc.items.rounds import Readers, Round, Signal
from odc.items.routes import Layout, Routes
from odc.liveness.watchdog import StreamWatchdog
from odc.setup.agreement import Exchange, together
from odc.setup.context import RankContext, agree, complete, connect, weak_abort
from odc.timeline import Timeline
from odc.transports.base import HOST, SymmetricBuffer, Transport, aligned

_RING = 4  # rounds whose words are kept, see [Note: Words of four rounds]
_WORDS = 3  # round, and two of the digest of all routes so far


@dataclass
class ItemStats:
    """What this rank has done since the exchange was created. Seconds are wall-clock, bytes are payload; lists are by
    rank of the group, this rank included."""

    published_bytes: list[int] = field(default_factory=list)
    """By the rank that they are for."""
    read_bytes: list[int] = field(default_factory=list)
    """By the rank that they are from."""
    waited_s: list[float] = field(default_factory=list)
    """Blocked, by the rank that came last of those waited for."""
    publish_s: float = 0.0
    """In publish, waiting for readers of the round before the last included."""
    read_s: float = 0.0
    """In read and read_many, waiting for producers included."""
    waits: int = 0
    wait_s: float = 0.0
    """Blocked until another rank did something; part of the times above, but for waits in begin."""

    def as_dict(self) -> dict[str, float | list[int] | list[float]]:
        return asdict(self)


class ItemExchange(RankContext):
    """One rank's end of exchanges of items. Build with :meth:`create` (collective); a context manager, or
    :meth:`close`.

    Items move in *rounds* of a *channel*, a minibatch's worth each. Channels do not wait for each other. All operations
    of one exchange belong to one thread at a time.

    >>> channels = ["images", "image gradients"]
    >>> with ItemExchange.create(exchange, channels, capacity_bytes=1 << 20) as items:  # doctest: +SKIP
    ...     images = items.begin("images", routes)  # on every rank, with the same routes
    ...     images.publish(0, outputs)  # tensors of this rank's part 0
    ...     images.read(7, out)  # waits for the producer of item 7, if at all
    ...     images.done()
    """

    kind = "item exchange"

    def __init__(
        self, transport: Transport, config: RuntimeConfig, channels: Sequence[str], capacity_bytes: int
    ) -> None:
        world_size = transport.topology.world_size
        self.stats = ItemStats([0] * world_size, [0] * world_size, [0.0] * world_size)
        super().__init__(transport, config, self.stats)
        self.timeline: Timeline | None = None
        capacity_bytes = aligned(max(capacity_bytes, 1))
        transport.reserve(2 * capacity_bytes * len(channels))
        transport.open(num_signals=len(Signal) * len(channels), num_locks=0)
        buffers = [transport.allocate(2 * capacity_bytes, f"items of {name!r}") for name in channels]
        words = transport.allocate_host(8 * len(channels) * world_size * _RING * _WORDS, "words of items")
        self._channels = {
            name: Channel(self, transport, name, number, capacity_bytes, buffers[number], words)
            for number, name in enumerate(channels)
        }

    @classmethod
    def create(
        cls,
        exchange: Exchange,
        channels: Sequence[str],
        config: RuntimeConfig | None = None,
        *,
        capacity_bytes: int,
        device: torch.device | None = None,
        beside: RankContext | None = None,
    ) -> ItemExchange:
        """Connect the ranks of ``exchange``. Collective.

        Args:
            channels: the names of the channels, the same on every rank.
            capacity_bytes: what a rank can publish in one round of a channel at first, each item rounded up to 64
                bytes; twice that is allocated per channel. A round that needs more makes its channel grow
                (:meth:`begin`); but NVSHMEM's heap, which has one size, may have no room for that.
            device: where the items are; default: host memory.
            beside: another context of this rank, over the same ranks (the runtime of its model, say). What fails in one
                is heard in the other, and a rank that waits in one is not taken for silent in the other.

        Raises:
            SetupError: on all ranks, naming the first difference between them or the resource that is missing.
            ValueError: ``channels`` is empty or has a name twice, or ``capacity_bytes`` is negative; where that is so
                on other ranks only, a SetupError says it.
        """
        config = config or RuntimeConfig()
        together(exchange, lambda: _check_channels(channels, capacity_bytes))
        described = {"channels": ", ".join(map(repr, channels)), "capacity_bytes": str(capacity_bytes)}
        agree(exchange, config, {"item exchange": described})
        transport = connect(exchange, config, device or HOST)

        def finish(items: ItemExchange) -> None:
            items.faults.hit("setup")
            transport.seal()
            if transport.engine.has_streams:
                together(transport.exchange, items._start_watchdog)
            if beside is not None:
                items._waiter.job.add(beside._transport)
                beside._waiter.job.add(transport)

        return complete(transport, lambda: cls(transport, config, channels, capacity_bytes), finish)

    def begin(self, channel: str, routes: Routes) -> Round:
        """Begin the next round of ``channel``. Every rank begins every round of it, with the same routes.

        Waits for nobody, but for ranks that have not read yet what this one published four rounds ago; and where the
        round needs more than the channel holds. Then it waits for all ranks to begin this round, and all allocate
        memory for it, doubling what a round may take until it suffices. So begin the rounds of a minibatch together,
        before the first of its publications and reads, in one order on all ranks.

        Args:
            routes: ``routes[rank][part]``: (item, bytes, consumer) of what that rank publishes at once.

        Raises:
            ValueError: no channel has this name, or the routes cannot be (see :meth:`odc.items.routes.Layout.of`).
            MisuseError: this rank has not published all of the last round, or not ended the one before it.
            ProtocolError: on all ranks: where the channel has to grow, ranks have come with different routes, or to
                different places of their scripts.
            SetupError: on all ranks: there is no memory to grow.
        """
        if channel not in self._channels:
            raise ValueError(f"no channel {channel!r}: expected one of {', '.join(map(repr, self._channels))}")
        layout = Layout.of(routes, self.topology.rank, self.topology.world_size)
        with self.reporting:
            return self._channels[channel].begin(layout)

    def _start_watchdog(self) -> None:
        self._watchdog = StreamWatchdog(self._transport, weak_abort(self))

    @property
    def device(self) -> torch.device:
        """Where items are."""
        return self._transport.device

    # Observation

    def start_timeline(self, timeline: Timeline | None = None) -> Timeline:
        """Record spans ("publish", "read", "wait") from now on, in ``timeline`` if another context of this rank has one
        already."""
        self.timeline = self._waiter.timeline = timeline = timeline or Timeline(self.topology.rank)
        return timeline

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's memory for items, by channel, and what the transport spends beyond."""
        channels = {name: channel.num_bytes for name, channel in self._channels.items()}
        return {**channels, "transport": self._transport.extra_bytes}

    # What channels and rounds need

    def check(self) -> None:
        """Raise if this rank or another one has failed."""
        self._waiter.check()

    def explain(self, error: OdcError, what: str) -> OdcError:
        """See :meth:`odc.liveness.waiting.Waiter.explain`."""
        return self._waiter.explain(error, what)

    def record(self, kind: str, label: str, started_ns: int) -> float:
        ended_ns = time.monotonic_ns()
        if self.timeline is not None:
            self.timeline.record(kind, label, started_ns, ended_ns)
        return (ended_ns - started_ns) * 1e-9

    def after_chunk(self) -> None:
        """Called after each chunk of a read: progress that others can see, and a fault point."""
        self._transport.tick()
        self.faults.hit("items.read.after_chunk")

    def wait(self, ranks: Iterable[int], is_there: Callable[[int], bool], what: Callable[[], str]) -> None:
        """Return when ``is_there(rank)`` for all of ``ranks``.

        Raises:
            ProtocolError: it never will be for one of them.
            what :meth:`odc.liveness.waiting.Waiter.wait` raises.
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


def _check_channels(channels: Sequence[str], capacity_bytes: int) -> None:
    if not channels or len(set(channels)) != len(channels) or capacity_bytes < 0:
        raise ValueError(
            f"channels {list(channels)} of {capacity_bytes} bytes: expected at least one name, each once, and 0 bytes "
            "or more"
        )


class Channel:
    """Rounds of one kind, with signals and memory of their own."""

    def __init__(
        self,
        items: ItemExchange,
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
        self._first_word = number * transport.topology.world_size * _RING * _WORDS
        self._word_buffer = words
        self._rank = transport.topology.rank
        self._capacity_bytes = capacity_bytes
        self._buffers: list[tuple[SymmetricBuffer, dict[int, int]]] = [(buffer, {})]
        """The last one is in use; rounds in those before it are being read. With the last round that each rank reads
        from this one there."""
        self.rounds: dict[int, Round] = {}
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

    def begin(self, layout: Layout) -> Round:
        self.items.check()
        number = self.begun + 1
        self._require_room(number)
        # [Note: Words of four rounds] A rank may be ahead of its readers: its words of a round must stay until they
        # have looked. Who is done with a round has looked at the words of it.
        long_ago = self.rounds.get(number - _RING)
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
        found = self.rounds[number] = Round(
            self,
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
        self.rounds.pop(number - _RING, None)
        self._totals = [total + posts for total, posts in zip(self._totals, layout.posts, strict=True)]
        self.transport.tick()
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
        return self._first_word + (rank * _RING + number % _RING) * _WORDS

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
        self._words_of(self._rank)[at : at + _WORDS] = words
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
        found, expected = self._words_of(rank)[at : at + _WORDS], self._expected_words(number)
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
            buffer = self.transport.extend(2 * wanted, f"items of {self.name!r}")
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
        self.transport.tick()
        self._release_old()
