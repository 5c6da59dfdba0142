"""One round of a channel of an :class:`odc.ItemExchange`, in which a rank publishes and reads items."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch

from odc.errors import MisuseError
from odc.items.channel import Channel, RoundState, Signal
from odc.items.routes import Place
from odc.rank.waiting import GONE

Row = tuple[Place, torch.Tensor]
"""An item, and where it is copied to."""


class Round:
    """One round of a channel on one rank, made by :meth:`odc.items.item_exchange.ItemExchange.begin`.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> items = session.exchange_items(["images"], capacity_bytes=1024)
        >>> images = items.begin("images", [[[(0, 16, 0), (1, 16, 1)]], []])  # rank 0 makes both items, each reads one
        >>> if rank == 0:
        ...     images.publish(0, [torch.zeros(4), torch.ones(4)])
        >>> out = torch.empty(4)
        >>> images.read(rank, out)
        >>> images.done()
        >>> images.channel, images.number, images.is_done
        ('images', 1, True)
        >>> items.close()
        >>> session.close()
    """

    def __init__(self, channel: Channel, state: RoundState) -> None:
        self.number = state.number
        """In its channel, from 1."""
        self.layout = state.layout
        self._state, self._buffer = state, state.buffer
        self._channel = channel
        self._items = channel.items
        self._rank = channel.transport.topology.rank
        self._streams: set[str] = set()  # that have read in it

    @property
    def channel(self) -> str:
        """Its name."""
        return self._channel.name

    @property
    def is_done(self) -> bool:
        """Whether this rank has ended its reads of this round."""
        return self._channel.done >= self.number

    # Publishing

    def publish(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        """Copy this rank's part number ``part`` into its published memory, and notify the ranks that wait for it.

        Waits only for ranks that still read the memory that this overwrites: that of the round two before this one, or
        of an earlier round if this rank published nothing then.

        Args:
            part: parts are published in order, each once. A part without items may be left out.
            tensors: one per item of the part, in the order of the routes; any shape and dtype. They may be reused after
                this returns (on a GPU: on the current stream).

        Raises:
            ValueError: the number of tensors or of their bytes differs from the routes. Nothing was copied.
            MisuseError: another part is the next one.
        """
        own, me = self.layout.parts, self._items.topology.me
        if not 0 <= part < len(own):
            raise ValueError(f"{self._part(part)}: rank {me} has {len(own)} parts in it, numbered from 0")
        places = own[part]
        if len(tensors) != len(places):
            raise ValueError(f"{self._part(part)} of rank {me}: {len(tensors)} tensors for {len(places)} items")
        for place, tensor in zip(places, tensors, strict=True):
            if tensor.nbytes != place.num_bytes:
                raise ValueError(
                    f"{self._part(part)} of rank {me}: item {place.id} has {place.num_bytes} bytes in the routes, "
                    f"{tensor.nbytes} were given (shape {tuple(tensor.shape)} of {tensor.dtype})"
                )
        with self._items.reporting:
            self._publish(part, tensors)

    def _publish(self, part: int, tensors: Sequence[torch.Tensor]) -> None:
        channel, items = self._channel, self._items
        items.check()
        earlier = [one for one in self._state.unpublished if one < part]
        if part < self._state.next_part or earlier:
            turn = f"publish part {earlier[0]} first" if earlier else "it has been published, or left out, already"
            raise MisuseError(f"{self._part(part)} cannot be published now: {turn}")
        started_ns = time.monotonic_ns()
        items.faults.hit("items.publish.before")
        places = self.layout.parts[part]
        if places:
            if self._state.overwritten is not None:
                channel.await_done(self._state.overwritten, lambda: self._part(part))
            # [Note: Posts in one order] A signal's posts must not overtake each other, whatever streams they come from.
            with channel.take("published"):
                if self._state.overwritten is not None:
                    channel.order_after_done(self._state.overwritten)
                for place, tensor in zip(places, tensors, strict=True):
                    self._copy_in(place, tensor.detach())
                items.faults.hit("items.publish.before_post")
                channel.post(Signal.PUBLISHED)
            channel.transport.engine.note_use()  # close() waits for this stream
        self._state.next_part = part + 1
        channel.transport.peers.tick()
        for place in places:
            items.stats.published_bytes[place.consumer] += place.num_bytes
        items.stats.publish_s += items.record("publish", self._part(part), started_ns, places)

    def _copy_in(self, place: Place, tensor: torch.Tensor) -> None:
        if not place.num_bytes:
            return
        engine, start = self._channel.transport.engine, self._state.start_bytes + place.offset_bytes
        out = self._buffer.local[start : start + place.num_bytes].view(tensor.dtype)
        if tensor.is_contiguous():
            engine.copy([out], [tensor.view(-1)], self._channel.transport.peers.tick)
        else:
            engine.run(partial(out.view(tensor.shape).copy_, tensor))

    # Reading

    def read(self, item: int, out: torch.Tensor) -> None:
        """Copy one item into ``out``. Waits only until the producer has published the part with this item.

        Args:
            out: contiguous, any shape and dtype, with the number of bytes in the routes.

        Raises:
            ValueError: ``out`` does not fit the item, or the item is not for this rank. Nothing was changed.
            MisuseError: called after :meth:`done`, or this rank is the producer and has not published the item yet.
            ProtocolError: the producer has other routes, or can never publish the item.
        """
        self.read_many([item], [out])

    def read_many(self, items: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        """Like :meth:`read` for several items: first the items that are published already, then the others, producer by
        producer. Adjacent items of a producer on another host are sent together; all items of one part for one rank are
        adjacent."""
        if len(items) != len(outs):
            raise ValueError(f"read in {self._name}: {len(items)} items into {len(outs)} tensors")
        wanted: dict[tuple[int, int], list[Row]] = {}
        for item, out in zip(items, outs, strict=True):
            place = self._place_of(item, out)
            if place.num_bytes:
                wanted.setdefault((place.producer, place.posts), []).append((place, out.detach().view(-1)))
        with self._items.reporting:
            self._read(wanted)

    def _place_of(self, item: int, out: torch.Tensor) -> Place:
        place, me = self.layout.places.get(item), self._items.topology.me
        if place is None or place.consumer != self._rank:
            raise ValueError(f"item {item} of {self._name} is not for rank {me} in the routes")
        if out.nbytes != place.num_bytes or not out.is_contiguous():
            form = "" if out.is_contiguous() else ", not contiguous"
            raise ValueError(
                f"item {item} of {self._name}, from rank {self._items.topology.global_rank(place.producer)} to rank "
                f"{me}, has {place.num_bytes} bytes in the routes; out has {out.nbytes} (shape {tuple(out.shape)} of "
                f"{out.dtype}{form})"
            )
        return place

    def _read(self, wanted: dict[tuple[int, int], list[Row]]) -> None:
        channel, items, engine = self._channel, self._items, self._channel.transport.engine
        items.check()
        if self.is_done:
            raise MisuseError(f"{self._name}: this rank is done() with it, so that others may overwrite it")
        for (producer, posts), rows in wanted.items():
            if producer == self._rank and not self.is_published(producer, posts):
                raise MisuseError(f"{self._item(rows[0][0])} is this rank's own, and not published yet")
        started_ns = time.monotonic_ns()
        items.faults.hit("items.read.before")
        for (producer, posts), rows in sorted(wanted.items(), key=lambda one: not self.is_published(*one[0])):
            items.wait([producer], partial(self.is_published, posts=posts), partial(self._item, rows[0][0]))
            stream = f"read by stream {engine.stream_key()} in round {self.number % 2}"
            with channel.take(stream):
                channel.order_after([producer], Signal.PUBLISHED, self._state.before[producer] + posts)
                self._copy_out(producer, rows)
            self._streams.add(stream)
        engine.note_use()  # close() waits for this stream
        channel.transport.peers.tick()
        label = f"{self._name}: {sum(map(len, wanted.values()))} items"
        read = (place for rows in wanted.values() for place, _ in rows)
        items.stats.read_s += items.record("read", label, started_ns, read)

    def is_published(self, producer: int, posts: int) -> bool:
        """Whether ``producer`` has published this number of parts of this round, with the same routes as this rank.

        Raises:
            ProtocolError: the producer has other routes.
        """
        if producer != self._rank and not self._channel.has_begun(producer, self.number):
            return False
        return self._channel.has_published(producer, self._state.before[producer] + posts)

    def _copy_out(self, producer: int, rows: Sequence[Row]) -> None:
        transport, after_chunk = self._channel.transport, self._items.after_chunk
        runs = [[row] for row in rows] if self._buffer.reaches(producer) else _runs(rows)
        for run in runs:
            start = self._state.start_bytes + run[0][0].offset_bytes
            try:
                if len(run) == 1:
                    transport.read([([run[0][1]], producer)], self._buffer, start, after_chunk)
                else:
                    self._read_run(producer, start, run)
            except GONE as error:
                raise self._items.explain(error, self._item(run[0][0])) from None
        for place, _ in rows:
            self._items.stats.read_bytes[producer] += place.num_bytes

    def _read_run(self, producer: int, start: int, run: Sequence[Row]) -> None:
        """Several items that lie side by side, by way of memory that holds them all."""
        transport, first, last = self._channel.transport, run[0][0], run[-1][0]
        num_bytes = last.offset_bytes + last.num_bytes - first.offset_bytes
        whole = torch.empty(num_bytes, dtype=torch.uint8, device=self._buffer.local.device)
        transport.read([([whole], producer)], self._buffer, start, self._items.after_chunk)
        for place, out in run:
            low = place.offset_bytes - first.offset_bytes
            transport.engine.copy([out.view(torch.uint8)], [whole[low : low + place.num_bytes]])

    def done(self) -> None:
        """Tell the producers that this rank has ended its reads of this round. Every rank must end every round in
        order, also a round in which it reads nothing. Its own parts may be published later.

        Raises:
            MisuseError: this round has ended already, or the round before it has not.
        """
        with self._items.reporting:
            if self._channel.done != self.number - 1:
                state = "is done already" if self.is_done else f"cannot be done before round {self._channel.done + 1}"
                raise MisuseError(f"{self._name} {state}")
            self._channel.end(self.number, self._streams)

    # For messages

    @property
    def _name(self) -> str:
        return f"round {self.number} of {self._channel.name!r}"

    def _part(self, part: int) -> str:
        return f"part {part} of {self._name}"

    def _item(self, place: Place) -> str:
        return f"item {place.id} ({place.num_bytes} bytes) in {self._part(place.part)}"


def _runs(rows: Sequence[Row]) -> list[list[Row]]:
    """``rows`` of one part, those together that lie side by side."""
    runs: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: row[0].offset_bytes):
        if runs and runs[-1][-1][0].end_bytes == row[0].offset_bytes:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
