"""Three TCP connections to a rank of another host: for what it reads, writes and signals; for news of it; and one that
shows whether its host is there.

A receiving thread does what the other rank asks for: it posts here on its behalf, writes what it pushes, and queues
what it wants to read. A sending thread sends what is queued, so that two ranks that read from each other at the same
time never both wait for the other to receive.

News (status, errors, farewells) have a connection of their own, see :mod:`odc.transports._news`: they overtake data,
and get through when a transfer was given up in the middle. So a rank that has said farewell has left only when the last
of its data is here too: what it did before may still be on its way. It goes on answering whoever still reads from it.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import select
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Protocol

from odc.engine import AfterChunk, no_op
from odc.errors import OdcError, PeerClosedError, PeerDiedError, PeerSilentError
from odc.leaving import run_all
from odc.threads import HelperThread
from odc.transports._control import Closing
from odc.transports._frames import HEADER, MAX_TEXT_BYTES, Frame, Kind, receive, receive_into
from odc.transports._news import News, Pulse
from odc.transports._peers import Neighbour
from odc.transports._silence import SLICE_S, Silence, Waiting
from odc.transports.base import Signs

CHUNK_BYTES = 4 << 20
_TAKES_NOTHING, _GIVES_NOTHING = "received nothing", "answered nothing"
_MOMENT_S = 5.0  # for which the end of the data waits for news that explain it


class LinkOwner(Waiting, Protocol):
    """What a link does at its own rank."""

    def deliver(self, rank: int, index: int, daemon: bool) -> None:
        """``rank`` has posted its signal ``index``; wake who waits for it, or the daemon."""
        ...

    def memory(self, buffer: int) -> memoryview | None:
        """This rank's copy of a buffer, or None if there is none that other hosts may use."""
        ...

    def notice(self, text: str) -> None:
        """Leave an abort notice here."""
        ...

    def lost(self) -> None:
        """Wake whoever waits here: a link has ended."""
        ...


@dataclass
class _Reading:
    """An answer that is on its way. The target is not ours: it may be freed as soon as nobody waits for the answer."""

    target: memoryview
    left: int
    done: threading.Event = field(default_factory=threading.Event)
    filling: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False


class Link(Neighbour):
    """The other rank, over connected sockets. Threads start with :meth:`start`; :attr:`news` and :attr:`pulse` are
    read by who has it."""

    def __init__(
        self,
        rank: int,
        who: str,
        data: socket.socket,
        news: socket.socket,
        pulse: socket.socket,
        owner: LinkOwner,
        timeout_s: float,
    ) -> None:
        self._rank = rank
        self._who = who
        self._data = data
        self.news = News(news, self)
        self.pulse = Pulse(pulse, self)
        self._owner = owner
        self._timeout_s = timeout_s
        self._sending = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Frame, memoryview | None] | None] = queue.SimpleQueue()
        self._readings: dict[int, _Reading] = {}
        self._requests = 0
        self._asking = threading.Lock()
        self._signs, self._waits_for = Signs(0, 0, 0), 0
        self._closing = Closing.OPEN
        self._has_said_all = False
        self._ended: str | None = None
        self._gave_up: BaseException | None = None
        self._is_leaving = self._is_closing = self._is_lost = False
        self._explained = threading.Event()  # an abort, a farewell or the end of the news has come
        self._threads = [
            HelperThread(target, f"odc-link-{name}")
            for name, target in (("receive", self._receive_all), ("send", self._send_queue))
        ]
        _close_in_children(self)

    def start(self) -> None:
        """Begin to serve the other rank."""
        for thread in self._threads:
            thread.start()

    # Sending data

    def _send(self, frame: Frame, payload: memoryview | None = None, after_chunk: AfterChunk = no_op) -> None:
        """Send a frame whole. One that is given up in the middle leaves a connection that nobody can use any more.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: the other rank cannot or does not receive.
            AbortedError: another rank reported a failure.
        """
        with self._silence(self._timeout_s) as silence:
            while not self._sending.acquire(timeout=SLICE_S):
                self._require_alive()
                self._look(silence, _TAKES_NOTHING)
            try:
                self._require_alive()
                self._send_whole(frame, payload, silence, after_chunk)
            finally:
                self._sending.release()

    def _silence(self, limit_s: float) -> Silence:
        return Silence(self._owner, self._rank, self._who, limit_s)

    def _send_whole(self, frame: Frame, payload: memoryview | None, silence: Silence, after_chunk: AfterChunk) -> None:
        try:
            header = memoryview(frame.pack())
            while header:
                header = header[self._send_some(header, silence) :]
            while payload:
                payload = payload[self._send_some(payload, silence) :]
                after_chunk()
        except BaseException as error:
            self._end("a transfer to it was given up in the middle", error)
            raise

    def _send_some(self, data: memoryview, silence: Silence) -> int:
        """Send a piece of ``data`` as soon as there is room for it; how many bytes."""
        poll = select.poll()
        poll.register(self._data, select.POLLOUT)
        while True:
            self._require_alive()
            if poll.poll(SLICE_S * 1000):
                try:
                    count = self._data.send(data[:CHUNK_BYTES], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                except BlockingIOError:
                    continue
                except OSError as problem:
                    self._end_explained(f"its connection ended: {problem.strerror}")
                    continue
                silence.end()
                return count
            self._look(silence, _TAKES_NOTHING)

    def _look(self, silence: Silence, what: str) -> None:
        """The other rank still has, for example, "received nothing": whether to go on waiting.

        Raises:
            OdcError: this rank is closing, or as :meth:`Silence.look`.
        """
        if self._is_leaving and silence.is_watched:
            raise OdcError(f"given up, because this rank has closed its session: {self._who} has {what} so far")
        silence.look(what)

    def _require_alive(self) -> None:
        if self._ended is not None:
            self._owner.check()  # its own account of what happened is better than ours
            if self._closing is not Closing.OPEN:
                raise PeerClosedError(f"{self._who} has closed its session")
            if isinstance(self._gave_up, PeerSilentError):
                raise PeerSilentError(str(self._gave_up))
            raise PeerDiedError(f"{self._who} cannot be reached any more: {self._ended}")

    def _send_queue(self) -> None:
        # Without a limit of its own: how long the other rank may be silent is for those to say who wait for it here.
        while (item := self._queue.get()) is not None:
            with self._sending:
                try:
                    self._send_whole(*item, self._silence(math.inf), no_op)
                except OdcError:
                    return  # the link has ended, and whoever waits reports what became of it

    # Receiving data

    def _receive_all(self) -> None:
        try:
            while True:
                self._handle(Frame.unpack(receive(self._data, HEADER.size)))
        except Exception as problem:  # whatever was sent must not end this thread unnoticed
            self._end_explained(str(problem))

    def _handle(self, frame: Frame) -> None:
        if frame.kind is Kind.POST:
            self._owner.deliver(self._rank, frame.number, bool(frame.a))
        elif frame.kind is Kind.WRITE:
            receive_into(self._data, self._range(frame))
        elif frame.kind is Kind.READ:
            self._queue_answer(frame)
        elif frame.kind is Kind.DATA:
            self._take_answer(frame)
        elif frame.kind is Kind.BYE:
            self._has_said_all = True
            self._owner.lost()
        else:
            raise ValueError(f"it sent a frame of kind {frame.kind.name}, which does not belong here")

    def _range(self, frame: Frame) -> memoryview:
        memory = self._owner.memory(frame.number)
        if memory is None or frame.a + frame.b > len(memory):
            size = "nothing" if memory is None else f"{len(memory)} bytes"
            raise ValueError(f"it asked for bytes {frame.a} to {frame.a + frame.b} of buffer {frame.number}: {size}")
        return memory[frame.a : frame.a + frame.b]

    def _queue_answer(self, frame: Frame) -> None:
        memory = self._range(frame)
        for offset in range(0, len(memory), CHUNK_BYTES):
            part = memory[offset : offset + CHUNK_BYTES]
            self._queue.put((Frame(Kind.DATA, a=offset, b=len(part), c=frame.c), part))

    def _take_answer(self, frame: Frame) -> None:
        reading = self._readings.get(frame.c)
        if reading is None or frame.a + frame.b > len(reading.target):
            raise ValueError(f"it sent {frame.b} bytes that nobody had asked for")
        with reading.filling:
            if reading.is_over:
                raise ConnectionError("a transfer from it was given up in the middle")
            receive_into(self._data, reading.target[frame.a : frame.a + frame.b])
            reading.left -= frame.b
            if reading.left <= 0:
                reading.done.set()

    def _end_explained(self, reason: str) -> None:
        """The data have ended; why, the news may tell in a moment."""
        deadline = time.monotonic() + _MOMENT_S
        with contextlib.suppress(OdcError):  # another account of what happened is there
            while not self._explained.wait(SLICE_S) and time.monotonic() < deadline:
                self._owner.check()
        self._end(reason)

    def _end(self, reason: str, gave_up: BaseException | None = None) -> None:
        """There will be no more data; ``gave_up``: because this rank itself has given up a transfer."""
        if self._ended is None:
            self._ended, self._gave_up = reason, gave_up
            with contextlib.suppress(OSError):
                self._data.shutdown(socket.SHUT_RDWR)  # the other side must notice too
            for reading in list(self._readings.values()):
                reading.done.set()
            if not self._is_closing:
                self._owner.lost()

    # Memory of the other rank

    def read(self, buffer: int, offset: int, target: memoryview, after_chunk: AfterChunk) -> None:
        """Fill ``target`` from the other rank's copy of a buffer.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: it did not answer.
        """
        with self._asking:
            self._requests += 1
            request = self._requests
        reading = self._readings[request] = _Reading(target, len(target))
        try:
            self._send(Frame(Kind.READ, buffer, offset, len(target), request))
            self._await(reading, after_chunk)
        finally:
            del self._readings[request]
            with reading.filling:  # the receiving thread writes there no more: an ended connection wakes it
                reading.is_over = True

    def _await(self, reading: _Reading, after_chunk: AfterChunk) -> None:
        try:
            self._watch(reading, after_chunk)
        except BaseException as error:
            self._end("a transfer from it was given up in the middle", error)  # its answer may still come
            raise
        if reading.left > 0:
            self._require_alive()
        after_chunk()

    def _watch(self, reading: _Reading, after_chunk: AfterChunk) -> None:
        left = reading.left
        with self._silence(self._timeout_s) as silence:
            while not reading.done.wait(SLICE_S):
                if reading.left != left:
                    left = reading.left
                    silence.end()
                    after_chunk()
                self._look(silence, _GIVES_NOTHING)

    def write(self, buffer: int, offset: int, source: memoryview, after_chunk: AfterChunk = no_op) -> None:
        """Put ``source`` into the other rank's copy of a buffer, before the next :meth:`post`."""
        self._send(Frame(Kind.WRITE, buffer, offset, len(source)), source, after_chunk)

    def post(self, index: int, daemon: bool) -> None:
        """Tell it of a signal that this rank has posted."""
        # A rank that has closed needs no signals; of one that has died, whoever waits for its answer reports it.
        with contextlib.suppress(PeerClosedError, PeerDiedError):
            self._send(Frame(Kind.POST, index, int(daemon)))

    # News

    def hear(self, frame: Frame, text: bytes) -> None:
        """A piece of news has come; see :class:`odc.transports._news.News`."""
        if frame.kind is Kind.STATUS:
            # Each of these is a beat: it comes from a thread of its own.
            self._signs = Signs(frame.a, frame.c, self._signs.beats + 1)
            self._waits_for = frame.b
            return
        if frame.kind is Kind.ABORT:
            self._owner.notice(text.decode(errors="replace"))
        else:
            self._closing = Closing(frame.a)
            self._owner.lost()
        self._explained.set()

    def news_ended(self, reason: str, *, is_lost: bool = False) -> None:
        """There will be no more news: the other rank, its host or the network is gone, or it has closed."""
        self._explained.set()
        if is_lost or self._closing is Closing.OPEN:
            self._is_lost = True
            self._end(reason)

    def send_status(self, signs: Signs, waiting_on: int | None) -> None:
        """Tell it how this rank is doing."""
        waits_for = 0 if waiting_on is None else waiting_on + 1
        self.news.tell(Frame(Kind.STATUS, a=signs.progress, b=waits_for, c=signs.looks))

    def abort(self, text: str) -> None:
        data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
        self.news.tell(Frame(Kind.ABORT, b=len(data)), data)

    def tell_closed(self, how: Closing) -> None:
        self.news.tell(Frame(Kind.CLOSED, a=how.value))
        self._queue.put((Frame(Kind.BYE), None))

    @property
    def signs(self) -> Signs:
        return self._signs

    @property
    def waiting_on(self) -> int | None:
        return self._waits_for - 1 if self._waits_for else None

    @property
    def closing(self) -> Closing:
        return self._closing

    @property
    def is_dead(self) -> bool:
        # What this rank has given up says nothing of the other one: who waits for it sees for how long it is silent.
        return self._is_lost or (self._ended is not None and self._gave_up is None)

    @property
    def has_left(self) -> bool:
        return self._closing is not Closing.OPEN and (self._has_said_all or self._ended is not None)

    def describe(self) -> str:
        return self._ended or "running, as far as its host tells"

    # The end

    def end_transfers(self) -> None:
        """Threads of this rank that wait for the other one give up within a slice; it is still answered."""
        self._is_leaving = True

    def close(self) -> None:
        self._is_leaving = self._is_closing = True
        self._explained.set()
        self._queue.put(None)
        with contextlib.suppress(OSError):  # it has ended already
            self._data.shutdown(socket.SHUT_RDWR)
        run_all([*(thread.end for thread in self._threads), self._data.close, self.news.close, self.pulse.close])

    def close_in_child(self) -> None:
        """A forked child must not hold the connections: its parent's death would not end them."""
        self._data.close()
        self.news.close()
        self.pulse.close()


# Python knows no way to take a fork handler back, so there is one for all links.
_links: weakref.WeakSet[Link] = weakref.WeakSet()
_has_handler = threading.Event()


def _close_in_children(link: Link) -> None:
    """Have ``link`` closed in every child that this process forks (DataLoader workers)."""
    if not _has_handler.is_set():
        _has_handler.set()
        os.register_at_fork(after_in_child=_close_all)
    _links.add(link)


def _close_all() -> None:
    for link in list(_links):
        link.close_in_child()
