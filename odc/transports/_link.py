"""A link: three TCP connections to a rank of another host, for data, for control messages, and for keep-alive. One
thread serves all links of a rank (:class:`odc.transports._links.LinkThread`).

*Data* (reads, writes, signals). The link thread handles the other rank's frames as they arrive: it posts signals,
receives pushes and answers directly into their target memory (also in several pieces), and queues answers to reads.
Other threads of this rank send their own frames while the link thread continues to receive. So two ranks that push to
or read from each other at the same time cannot both wait for the other to receive.

*Control* (status, errors, closing). A few bytes per second, which never fill the receiver's buffer. They overtake data,
and arrive even if a transfer was given up in the middle. So a rank that announced its closing has left only when the
last of its data has arrived, too. A closing rank continues to answer ranks that read from it.

*Keep-alive*. Shows whether the other host is reachable. The kernel answers, so a rank that computes, is stopped or
holds its interpreter's lock stays alive.

[Note: Nothing is sent on the keep-alive connection] The kernel resends unacknowledged data after 0.2, 0.4, 0.8, ...
seconds. After four seconds without a network, the next attempt may come seconds after the network is back, so a limit
of a few seconds cannot tell a short interruption from a lasting one. On a connection without data in flight the kernels
probe each other every second instead, and need no process for this.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE

from odc import limits
from odc.engines.base import AfterChunk, no_op
from odc.errors import OUR_FAULT, OdcError, PeerClosedError, PeerDiedError, PeerSilentError
from odc.liveness.leaving import run_all
from odc.liveness.threads import Reminder
from odc.transports._control import Closing, Heartbeats
from odc.transports._frames import (
    CHUNK_BYTES,
    HEADER,
    MAX_RANKS,
    MAX_TEXT_BYTES,
    Frame,
    Kind,
    Outgoing,
    SendQueue,
    cut,
    fill,
)
from odc.transports._peers import Peer, Peers

logger = logging.getLogger("odc")

_TAKES_NOTHING, _GIVES_NOTHING = "received nothing", "answered nothing"

# Asked a second after the last answer, and every second; lost a second after the sixth question without an answer. So
# five seconds without a network change nothing, and seven (and some milliseconds of the kernel's timers) end the link.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 6))
_CONTROL_TIMEOUT_MS = 60_000  # should something cut off the keep-alive connection and let control frames through
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN)
_NO_SIGN_OF_LIFE = "no sign of life from its host or the network"
_LARGEST = {
    Kind.STATUS: MAX_RANKS,
    Kind.ABORT: MAX_TEXT_BYTES,
    Kind.CLOSED: MAX_TEXT_BYTES,
    Kind.REFUSAL: MAX_TEXT_BYTES,
}


class _ProgressTimeout:
    """Of one transfer for which this rank waits: how long the other one may go without progress.

    A transfer that takes less than a slice tells nobody anything.
    """

    def __init__(self, peers: Peers, rank: int, who: str, limit_s: float) -> None:
        self._peers = peers
        self._rank = rank
        self._who = who
        self._limit_s = limit_s
        self._is_known = False
        self.restart()

    def restart(self) -> None:
        """The other rank has made progress."""
        self._since = time.monotonic()
        self._reminder = Reminder()

    def check(self, what: str) -> None:
        """It still has, for example, "received nothing".

        Raises:
            PeerSilentError: for longer than the limit.
            AbortedError, OdcError: this rank or another one has failed meanwhile, or this one is about to close.
        """
        self._peers.check()
        self._peers.waits_for(self._rank)
        self._is_known = True
        silent_s = time.monotonic() - self._since
        if silent_s > self._limit_s:
            raise PeerSilentError(f"{self._who} has {what} for {self._limit_s:g} s")
        if self._reminder.is_due(silent_s):
            logger.warning("%s has %s for %.0f s", self._who, what, silent_s)

    def __enter__(self) -> _ProgressTimeout:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_known:
            self._peers.waits_for(None)


@dataclass
class _Reading:
    """An answer that is on its way. The targets are not ours: they may be freed as soon as nobody waits for it."""

    targets: Sequence[memoryview]
    num_bytes: int
    left: int
    done: threading.Event = field(default_factory=threading.Event)
    filling: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False

    def receive(self, connection: socket.socket, part: memoryview) -> int:
        with self.filling:
            if self.is_over:
                raise ConnectionError("a transfer from it was given up in the middle")
            count = connection.recv_into(part)
        self.left -= count
        return count


class Link(Peer):
    """The other rank, over connected sockets, which are the link's from now on.

    What is called ``serve_...`` is for the one thread that serves it: it is called when a connection is ready, and
    returns for what to wait next (``selectors.EVENT_...``), 0 when there is nothing more. It waits for nobody.
    """

    def __init__(
        self,
        rank: int,
        who: str,
        data: socket.socket,
        control: socket.socket,
        keepalive: socket.socket,
        peers: Peers,
        timeout_s: float,
        ask_for_service: Callable[[Link], None],
    ) -> None:
        """
        Args:
            ask_for_service: called, by any thread, when :attr:`data_events` has changed.
        """
        self._rank = rank
        self.who = who
        self.data, self.control, self.keepalive = data, control, keepalive
        self._peers = peers
        self._timeout_s = timeout_s
        self._set_options()
        self._queue = SendQueue(data, partial(ask_for_service, self))
        self._incoming_data = self._take_in_data()
        self._incoming_control = self._take_in_control()
        self._sending_control = threading.Lock()
        self._readings: dict[int, _Reading] = {}
        self._requests = 0
        self._asking = threading.Lock()
        self._heartbeats, self._waits_for = Heartbeats(0, 0, 0), 0
        self._closing = Closing.OPEN
        self._refusal = ""
        self._has_said_all = False
        self._unexplained: tuple[str, float] | None = None  # why the data have ended, and until when to wait for more
        self._is_explained = False  # an abort, a close or the end of the control frames has come
        self._ended: str | None = None
        self._has_ended = threading.Event()
        self._gave_up: BaseException | None = None
        self._is_closing = self._is_lost = False

    def _set_options(self) -> None:
        for connection in (self.data, self.control, self.keepalive):
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.control.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _CONTROL_TIMEOUT_MS)
        self.keepalive.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            self.keepalive.setsockopt(socket.IPPROTO_TCP, option, value)

    # Sending data

    def _send(self, frame: Frame, payload: Sequence[memoryview] = (), after_chunk: AfterChunk = no_op) -> None:
        """Send a frame whole. One that is given up in the middle leaves a connection that nobody can use any more.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: the other rank cannot or does not receive.
            AbortedError: another rank reported a failure.
        """
        outgoing = Outgoing(frame, payload)
        with self._progress_timeout() as timeout:
            try:
                self._queue.enter(outgoing)
                self._send_whole(outgoing, timeout, after_chunk)
            except BaseException as error:
                if self._queue.withdraw(outgoing):
                    self._end("a transfer to it was given up in the middle", error)
                raise
            finally:
                self._queue.leave(outgoing)

    def _progress_timeout(self) -> _ProgressTimeout:
        return _ProgressTimeout(self._peers, self._rank, self.who, self._timeout_s)

    def _send_whole(self, outgoing: Outgoing, timeout: _ProgressTimeout, after_chunk: AfterChunk) -> None:
        queue, num_sent, left = self._queue, self._queue.num_sent, outgoing.left
        while not outgoing.is_sent:
            self._require_alive()
            if not queue.send_some() and not outgoing.is_sent and not self._wait_for_room():
                timeout.check(_TAKES_NOTHING)
            if queue.num_sent != num_sent:
                num_sent = queue.num_sent
                timeout.restart()
            if outgoing.left < left:
                left = outgoing.left
                after_chunk()

    def _wait_for_room(self) -> bool:
        if self._queue.problem is None:
            return self._queue.wait_for_room(limits.LINK_SLICE_S)
        # The thread that receives finds out what became of the other rank.
        return self._has_ended.wait(limits.LINK_SLICE_S)

    def _require_alive(self) -> None:
        if self._ended is not None:
            self._peers.check()  # its own account of what happened is better than ours
            if self._closing is not Closing.OPEN:
                raise PeerClosedError(f"{self.who} has closed its session")
            if isinstance(self._gave_up, PeerSilentError):
                raise PeerSilentError(str(self._gave_up))
            raise PeerDiedError(f"{self.who} cannot be reached any more: {self._ended}")

    # Receiving data

    @property
    def data_events(self) -> int:
        """For what the data's connection waits."""
        return EVENT_READ | EVENT_WRITE if self._queue.needs_service else EVENT_READ

    def serve_data(self, events: int) -> int:
        """At most a chunk in each direction, so that other links get their turn."""
        if events & EVENT_WRITE:
            self._queue.serve()
        if events & EVENT_READ:
            try:
                next(self._incoming_data)
            except Exception as problem:  # whatever was sent must not end the thread of all links
                self._unexplained = str(problem), time.monotonic() + limits.LINK_EXPLANATION_S
                return 0
        return self.data_events

    def _take_in_data(self) -> Iterator[None]:
        """Does what the frames ask for, as they come; see :func:`odc.transports._frames.fill`."""
        header = bytearray(HEADER.size)
        while True:
            yield from fill(memoryview(header), self.data.recv_into)
            frame = Frame.unpack(header)
            if frame.kind is Kind.POST:
                self._peers.deliver(self._rank, frame.number, bool(frame.a))
            elif frame.kind is Kind.WRITE:
                yield from fill(self._range(frame), self.data.recv_into)
            elif frame.kind is Kind.READ:
                self._answer(frame)
            elif frame.kind is Kind.DATA:
                yield from self._take_in_answer(frame)
            elif frame.kind is Kind.BYE:
                self._has_said_all = True
                self._peers.lost()
            else:
                raise ValueError(f"it sent a frame of kind {frame.kind.name}, which does not belong here. {OUR_FAULT}")
            yield

    def _range(self, frame: Frame) -> memoryview:
        buffers = self._peers.memory
        memory = buffers[frame.number] if frame.number < len(buffers) else None
        if memory is None or frame.a + frame.b > len(memory):
            size = "nothing" if memory is None else f"{len(memory)} bytes"
            end = frame.a + frame.b
            raise ValueError(f"it asked for bytes {frame.a} to {end} of buffer {frame.number}: {size}. {OUR_FAULT}")
        return memory[frame.a : frame.a + frame.b]

    def _answer(self, frame: Frame) -> None:
        memory = self._range(frame)
        offsets = range(0, max(len(memory), 1), CHUNK_BYTES)
        parts = ((offset, memory[offset : offset + CHUNK_BYTES]) for offset in offsets)
        frames = ((Frame(Kind.DATA, a=offset, b=len(part), c=frame.c), [part]) for offset, part in parts)
        self._queue.put(Outgoing(*next(frames), frames))

    def _take_in_answer(self, frame: Frame) -> Iterator[None]:
        reading = self._readings.get(frame.c)
        if reading is None or frame.b > reading.left or frame.a + frame.b > reading.num_bytes:
            raise ValueError(f"it sent {frame.b} bytes that nobody had asked for. {OUR_FAULT}")
        for piece in cut(reading.targets, frame.a, frame.b):
            yield from fill(piece, partial(reading.receive, self.data))
        if reading.left <= 0:
            reading.done.set()

    def settle(self) -> bool:
        """Behind the end of a connection. If it was the data's: end the link as soon as a control frame explains why,
        or none has come for a moment. Whether nothing is left to settle."""
        if self._unexplained is None or self._ended is not None:
            return True
        reason, deadline = self._unexplained
        with contextlib.suppress(OdcError):  # another account of what happened is there
            self._peers.check()
            if not self._is_explained and time.monotonic() < deadline:
                return False
        self._end(reason)
        return True

    def _end(self, reason: str, gave_up: BaseException | None = None) -> None:
        """There will be no more data; ``gave_up``: because this rank itself has given up a transfer."""
        if self._ended is not None:
            return
        self._gave_up = gave_up  # before the next line: it is not dead in between
        self._ended = reason
        self._queue.close()
        with contextlib.suppress(OSError):
            self.data.shutdown(socket.SHUT_RDWR)  # the other side must notice too
        self._has_ended.set()
        for reading in list(self._readings.values()):
            reading.done.set()
        if not self._is_closing:
            self._peers.lost()

    # Memory of the other rank

    def read(self, buffer: int, offset: int, targets: Sequence[memoryview], after_chunk: AfterChunk) -> None:
        """Fill ``targets``, one behind the other, from the other rank's copy of a buffer.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError: it did not answer.
        """
        with self._asking:
            self._requests += 1
            request = self._requests
        num_bytes = sum(map(len, targets))
        reading = self._readings[request] = _Reading(targets, num_bytes, num_bytes)
        try:
            self._send(Frame(Kind.READ, buffer, offset, num_bytes, request))
            self._await(reading, after_chunk)
            after_chunk()
        finally:
            del self._readings[request]
            if reading.left > 0:
                with reading.filling:  # nobody writes there any more
                    reading.is_over = True

    def _await(self, reading: _Reading, after_chunk: AfterChunk) -> None:
        left = reading.left
        try:
            with self._progress_timeout() as timeout:
                while not reading.done.wait(limits.LINK_SLICE_S):
                    if reading.left != left:
                        left = reading.left
                        timeout.restart()
                        after_chunk()
                    timeout.check(_GIVES_NOTHING)
        except BaseException as error:
            self._end("a transfer from it was given up in the middle", error)  # its answer may still come
            raise
        if reading.left > 0:
            self._require_alive()

    def write(self, buffer: int, offset: int, sources: Sequence[memoryview], after_chunk: AfterChunk = no_op) -> None:
        """Put ``sources``, one behind the other, into its copy of a buffer, before the next :meth:`post`."""
        self._send(Frame(Kind.WRITE, buffer, offset, sum(map(len, sources))), sources, after_chunk)

    def post(self, index: int, daemon: bool) -> None:
        """Tell it of a signal that this rank has posted."""
        # A rank that has closed needs no signals; of one that has died, whoever waits for its answer reports it.
        with contextlib.suppress(PeerClosedError, PeerDiedError):
            self._send(Frame(Kind.POST, index, int(daemon)))

    # Control frames

    def serve_control(self, _: int) -> int:
        """Take in what has come."""
        try:
            next(self._incoming_control)
        except Exception as problem:
            if isinstance(problem, OSError) and problem.errno in _UNREACHABLE:
                self._lose(_NO_SIGN_OF_LIFE)
            else:
                self._control_ended(str(problem))
            return 0
        return EVENT_READ

    def _take_in_control(self) -> Iterator[None]:
        header = bytearray(HEADER.size)
        while True:
            yield from fill(memoryview(header), self.control.recv_into)
            frame = Frame.unpack(header)
            if frame.b > _LARGEST.get(frame.kind, -1):
                raise ValueError(
                    f"it sent a control frame of kind {frame.kind.name} with {frame.b}, which cannot be. {OUR_FAULT}"
                )
            text = bytearray(frame.b if frame.kind in (Kind.ABORT, Kind.REFUSAL) else 0)
            yield from fill(memoryview(text), self.control.recv_into)
            self._take_control(frame, bytes(text))
            yield

    def _take_control(self, frame: Frame, text: bytes) -> None:
        if frame.kind is Kind.STATUS:
            # Each of these is a beat: it comes from a thread of its own.
            self._heartbeats = Heartbeats(frame.a, frame.c, self._heartbeats.beats + 1)
            self._waits_for = frame.b
            return
        if frame.kind is Kind.REFUSAL:
            self._refusal = text.decode(errors="replace")
            return
        if frame.kind is Kind.ABORT:
            self._peers.notice(text.decode(errors="replace"))
        else:
            self._closing = Closing(frame.a)
            self._peers.lost()
        self._is_explained = True

    def _control_ended(self, reason: str) -> None:
        """There will be no more control frames: the other rank is gone, or it has closed."""
        self._is_explained = True
        if self._closing is Closing.OPEN:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """The other rank, its host or the network is gone: nothing more comes, whatever it has said."""
        self._is_explained = self._is_lost = True
        self._end(reason)

    def serve_keepalive(self, _: int) -> int:
        """Whether its host is still there. If the other rank has ended, its control frames say so."""
        try:
            if self.keepalive.recv(1):
                self._control_ended("it sent something where nothing belongs")
        except BlockingIOError:
            return EVENT_READ
        except OSError as problem:
            if problem.errno in _UNREACHABLE:
                self._lose(_NO_SIGN_OF_LIFE)
        return 0

    def _send_control(self, frame: Frame, text: bytes = b"") -> None:
        """Never waits, never raises. There is always room, unless the other side has long been lost."""
        data = frame.pack() + text
        with self._sending_control:
            try:
                sent = self.control.send(data, socket.MSG_NOSIGNAL)
            except OSError:
                return  # serve_control() finds out why
        if sent < len(data):
            self._lose("it has not taken in control frames for long")

    def send_status(self, signs: Heartbeats, waiting_on: int | None) -> None:
        """Tell it how this rank is doing."""
        waits_for = 0 if waiting_on is None else waiting_on + 1
        self._send_control(Frame(Kind.STATUS, a=signs.progress, b=waits_for, c=signs.looks))

    def abort(self, text: str) -> None:
        data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
        self._send_control(Frame(Kind.ABORT, b=len(data)), data)

    def tell_refusal(self, text: str) -> None:
        data = text.encode(errors="replace")[:MAX_TEXT_BYTES]
        self._send_control(Frame(Kind.REFUSAL, b=len(data)), data)

    def tell_closed(self, how: Closing) -> None:
        self._send_control(Frame(Kind.CLOSED, a=how.value))
        bye = Outgoing(Frame(Kind.BYE))
        try:
            self._queue.enter(bye)
            while not bye.is_sent and self._queue.send_some():
                continue
        finally:
            self._queue.leave(bye)  # if there was no room, the thread that serves this link sends it

    @property
    def heartbeats(self) -> Heartbeats:
        return self._heartbeats

    @property
    def waiting_on(self) -> int | None:
        return self._waits_for - 1 if self._waits_for else None

    @property
    def closing(self) -> Closing:
        return self._closing

    @property
    def refusal(self) -> str:
        return self._refusal

    @property
    def is_dead(self) -> bool:
        # What this rank has given up says nothing of the other one: who waits for it sees for how long it is silent.
        return self._is_lost or (self._ended is not None and self._gave_up is None)

    @property
    def has_left(self) -> bool:
        return self._closing is not Closing.OPEN and (self._has_said_all or self._ended is not None)

    def describe_process(self) -> str:
        return self._ended or "running, as far as its host tells"

    # The end

    def close(self) -> None:
        """Behind the end of the thread that serves it."""
        self._is_closing = True
        self._end("this rank has closed its links")
        self.close_sockets()

    def close_sockets(self) -> None:
        """And nothing else, in a forked child: there they are another process's connections."""
        run_all([self.data.close, self.control.close, self.keepalive.close])
