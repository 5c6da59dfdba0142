"""Layer 1: no ranks. One link to a bare socket: what it carries, refuses, and notices."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

import pytest
from watching import until

from odc import OdcError, PeerClosedError, PeerDiedError, PeerSilentError, limits
from odc.engines.base import no_op
from odc.setup.topology import Topology
from odc.transports._control import Closing, Heartbeats
from odc.transports._frames import CHUNK_BYTES, HEADER, MAX_RANKS, Frame, Kind
from odc.transports._link import Link
from odc.transports._links import LinkThread
from odc.transports._peers import Peers


class Owner(Peers):
    """A rank that has 100 bytes of memory, or those that are given, and four signals."""

    def __init__(self, memory: bytearray | None = None) -> None:
        super().__init__(Topology(0, ("host",), ("host",), (0,)))
        self.bytes = memory or bytearray(range(100))
        self.memory = [memoryview(self.bytes)]
        self.delivered: list[tuple[int, bool]] = []
        self.notices: list[str] = []
        self.losses = 0
        self.failure: Exception | None = None
        self.waited_for: list[int | None] = []

    def deliver(self, rank: int, index: int, daemon: bool) -> None:
        if index > 3:
            raise IndexError(f"index {index} of 4")
        self.delivered.append((index, daemon))

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def lost(self) -> None:
        self.losses += 1

    def check(self) -> None:
        super().check()
        if self.failure is not None:
            raise self.failure

    def waits_for(self, rank: int | None) -> None:
        self.waited_for.append(rank)


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        far = socket.create_connection(listener.getsockname())
        far.settimeout(30.0)
        return far, listener.accept()[0]


class Pair:
    """A link, the thread that serves it, and the bare sockets at its other end."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        (self.far, data), (self.control, control), (self.keepalive, keepalive) = (connection() for _ in range(3))
        self.owner = Owner()
        self.thread = LinkThread()
        self.link = Link(7, "rank 7", data, control, keepalive, self.owner, timeout_s, self.thread.ask_for_service)
        self.thread.start([self.link], lambda: (Heartbeats(0, 0, 0), None))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.far.close()
        self.control.close()
        self.keepalive.close()
        self.thread.close()
        self.link.close()

    def until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30.0
        while not holds():
            assert time.monotonic() < deadline, self.link.describe()
            time.sleep(0.005)

    @staticmethod
    def receive(connection: socket.socket, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            part = connection.recv(num_bytes - len(data))
            assert part
            data += part
        return data

    @contextlib.contextmanager
    def answering(self, answer: Callable[[Frame], object]) -> Iterator[None]:
        """A thread at the other end answers the next request meanwhile."""
        thread = threading.Thread(target=lambda: answer(Frame.unpack(self.receive(self.far, HEADER.size))))
        thread.start()
        yield
        thread.join()

    def receive_control(self) -> Frame:
        """The next control frame that is not about how the link's rank is doing."""
        while (frame := Frame.unpack(self.receive(self.control, HEADER.size))).kind is Kind.STATUS:
            continue
        return frame


def test_frames_do_what_they_say() -> None:
    with Pair() as pair:
        pair.far.sendall(Frame(Kind.WRITE, 0, 10, 3).pack() + b"abc" + Frame(Kind.POST, 3, 1).pack())
        pair.until(lambda: pair.owner.delivered == [(3, True)])
        assert bytes(pair.owner.bytes[9:14]) == b"\x09abc\x0d"
        pair.far.sendall(Frame(Kind.READ, 0, 10, 3, 99).pack())
        assert pair.receive(pair.far, HEADER.size + 3) == Frame(Kind.DATA, a=0, b=3, c=99).pack() + b"abc"


def test_control_frames_come_in_pieces_and_several_at_a_time() -> None:
    with Pair() as pair:
        news = Frame(Kind.STATUS, a=41, b=3).pack() + Frame(Kind.ABORT, b=2).pack() + "é".encode()
        for byte in news[:40]:
            pair.control.sendall(bytes([byte]))
        pair.until(lambda: (pair.link.heartbeats.progress, pair.link.waiting_on) == (41, 2))
        assert not pair.owner.notices
        pair.control.sendall(news[40:] + Frame(Kind.CLOSED, a=Closing.FAILED.value).pack())
        pair.until(lambda: pair.link.closing is Closing.FAILED)
        assert pair.owner.notices == ["é"]
        assert not pair.link.is_dead


BAD_DATA = [
    (Frame(Kind.WRITE, 0, 98, 3).pack() + b"abc", "bytes 98 to 101 of buffer 0: 100 bytes"),
    (Frame(Kind.READ, 0, 2**63, 2**62).pack(), "of buffer 0: 100 bytes"),
    (Frame(Kind.READ, 1, 0, 1).pack(), "of buffer 1: nothing"),
    (Frame(Kind.DATA, a=0, b=1, c=5).pack() + b"x", "1 bytes that nobody had asked for"),
    (Frame(Kind.POST, 4).pack(), "index 4 of 4"),
    (Frame(Kind.HELLO).pack(), "a frame of kind HELLO, which does not belong here"),
    (Frame(Kind.ABORT).pack(), "a frame of kind ABORT, which does not belong here"),
    (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(64), "71 is not a valid Kind"),
    (b"\x80\x04\x95" + bytes(64), "128 is not a valid Kind"),
]
BAD_CONTROL = [
    (Frame(Kind.CLOSED, a=77).pack(), "77 is not a valid Closing"),
    (Frame(Kind.POST, 1).pack(), "control frame of kind POST"),
    (Frame(Kind.ABORT, b=10**9).pack(), "control frame of kind ABORT with 1000000000, which cannot be"),
]


@pytest.mark.parametrize(
    ("data", "words", "by"), [(*row, "far") for row in BAD_DATA] + [(*row, "control") for row in BAD_CONTROL]
)
def test_what_does_not_fit_ends_the_link_and_touches_nothing(
    data: bytes, words: str, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault test 21, once connected: garbage, HTTP, a pickle, lengths, offsets and numbers that lie."""
    monkeypatch.setattr(limits, "LINK_EXPLANATION_S", 0.1)  # nothing will explain it
    with Pair() as pair:
        getattr(pair, by).sendall(data)
        pair.until(lambda: pair.link.is_dead)
        assert words in pair.link.describe()
        assert bytes(pair.owner.bytes) == bytes(range(100))
        assert not pair.owner.delivered
        with pytest.raises(PeerDiedError, match="rank 7 cannot be reached any more"):
            pair.link.write(0, 0, [memoryview(b"x")])


def test_status_is_a_sign_of_life_and_names_ranks_of_the_whole_job() -> None:
    with Pair() as pair:
        pair.control.sendall(
            Frame(Kind.STATUS, a=1, b=9000, c=5).pack() + Frame(Kind.STATUS, a=2, b=10_000, c=6).pack()
        )
        pair.until(lambda: pair.link.heartbeats == (2, 6, 2))
        assert pair.link.waiting_on == 9999
        pair.control.sendall(Frame(Kind.STATUS, a=3, b=MAX_RANKS + 1).pack())
        pair.until(lambda: pair.link.is_dead)
        assert pair.link.heartbeats.progress == 2


def test_an_answer_longer_than_asked_for_is_refused() -> None:
    with Pair() as pair:
        target = bytearray(4)

        def answer(request: Frame) -> None:
            pair.far.sendall(Frame(Kind.DATA, a=2, b=3, c=request.c).pack() + b"xyz")

        with pair.answering(answer), pytest.raises(PeerDiedError, match="3 bytes that nobody had asked for"):
            pair.link.read(0, 0, [memoryview(target)], no_op)
        assert target == bytearray(4)


SIZES = {"few": [0, 3, CHUNK_BYTES, 5, 0, 2 * CHUNK_BYTES + 1, 7], "many": [1 + n % 3 for n in range(3000)]}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_memory_in_several_pieces_travels_as_if_it_were_one(sizes: list[int]) -> None:
    """More than one call or one frame can take, and pieces that go on in the next one."""
    data = os.urandom(sum(sizes))
    ends = list(itertools.accumulate(sizes))
    with Pair() as pair:
        sources = [memoryview(data)[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        push = threading.Thread(target=pair.link.write, args=(0, 5, sources))
        push.start()
        assert pair.receive(pair.far, HEADER.size) == Frame(Kind.WRITE, 0, 5, len(data)).pack()
        assert pair.receive(pair.far, len(data)) == data
        push.join()

        def answer(request: Frame) -> None:
            assert request == Frame(Kind.READ, 0, 5, len(data), request.c)
            for low in range(0, len(data), 3000):
                part = data[low : low + 3000]
                pair.far.sendall(Frame(Kind.DATA, a=low, b=len(part), c=request.c).pack() + part)

        targets = [bytearray(size) for size in sizes]
        with pair.answering(answer):
            pair.link.read(0, 5, list(map(memoryview, targets)), no_op)
        assert b"".join(targets) == data


def test_a_read_that_was_given_up_writes_nothing_any_more() -> None:
    """Its targets may be somebody else's memory by then."""
    with Pair(timeout_s=0.5) as pair:
        targets = [bytearray(4) for _ in range(3)]

        def answer(request: Frame) -> None:
            pair.far.sendall(Frame(Kind.DATA, a=0, b=12, c=request.c).pack() + b"half" + b"ha")

        with pair.answering(answer), pytest.raises(PeerSilentError, match="rank 7 has answered nothing for 0.5 s"):
            pair.link.read(0, 0, list(map(memoryview, targets)), no_op)
        with contextlib.suppress(OSError):
            pair.far.sendall(b"lflate")
        pair.until(lambda: pair.link.data not in pair.thread._selector.get_map())
        assert [bytes(target) for target in targets] == [b"half", b"ha\0\0", bytes(4)]


def test_an_answer_that_does_not_come_is_silence() -> None:
    with Pair(timeout_s=0.2) as pair, pytest.raises(PeerSilentError, match="rank 7 has answered nothing for 0.2 s"):
        pair.link.read(0, 0, [memoryview(bytearray(4))], no_op)


def test_a_long_wait_is_warned_of_and_known_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits, "FIRST_REMINDER_S", 0.4)
    with Pair() as pair:
        target = bytearray(4)

        def answer(request: Frame) -> None:
            pair.until(lambda: bool(caplog.records))
            pair.far.sendall(Frame(Kind.DATA, a=0, b=4, c=request.c).pack() + b"late")

        with pair.answering(answer):
            pair.link.read(0, 0, [memoryview(target)], no_op)
        assert target == b"late"
        assert pair.owner.waited_for[0] == 7
        assert pair.owner.waited_for[-1] is None
    texts = [record.getMessage() for record in caplog.records]
    assert texts
    assert all(text.startswith("rank 7 has answered nothing for ") for text in texts)


def interrupted() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("cause", ["silence", "another rank's failure", "Ctrl-C"])
def test_half_a_frame_ends_the_data_but_not_the_control_frames(cause: str) -> None:
    """Nothing can follow half a frame; the other rank hears why, and that there is nothing more to come."""
    with Pair(timeout_s=0.2) as pair:
        expected: type[BaseException] = {"silence": PeerSilentError, "Ctrl-C": KeyboardInterrupt}.get(cause, OdcError)
        pair.owner.failure = OdcError("rank 3: ValueError") if expected is OdcError else None
        with pytest.raises(expected):
            pair.link.write(0, 0, [memoryview(bytearray(64 << 20))], interrupted if cause == "Ctrl-C" else no_op)
        with pytest.raises(expected if cause == "silence" else OdcError):  # whoever else needs it hears why
            pair.link.read(0, 0, [memoryview(bytearray(4))], no_op)
        assert not pair.link.is_dead  # it may be well: who waits for a signal of it sees for how long it is silent
        pair.link.abort("rank 0: it was so")
        frame = pair.receive_control()
        assert pair.receive(pair.control, frame.b) == b"rank 0: it was so"
        while pair.far.recv(1 << 20):  # what was sent, and then the end
            continue


@pytest.mark.parametrize("what", ["read", "write", "post behind a write"])
def test_closing_waits_for_no_transfer(what: str) -> None:
    """A thread of this rank waits for a rank that neither answers nor receives; that must not hold up the end."""
    ends: list[str] = []

    def transfer(action: Callable[[], None]) -> None:
        try:
            action()
        except OdcError as error:
            ends.append(str(error))

    with Pair(timeout_s=300.0) as pair:
        read = partial(pair.link.read, 0, 0, [memoryview(bytearray(4))], no_op)
        write = partial(pair.link.write, 0, 0, [memoryview(bytearray(64 << 20))])
        actions = {"read": [read], "write": [write], "post behind a write": [write, partial(pair.link.post, 0, False)]}
        threads = [threading.Thread(target=transfer, args=(action,)) for action in actions[what]]
        threads[0].start()
        pair.receive(pair.far, HEADER.size)  # it has begun
        for thread in threads[1:]:
            thread.start()
            pair.until(lambda: 7 in pair.owner.waited_for)  # for its turn
        started = time.monotonic()
        pair.owner.is_leaving = True
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - started < 30
        assert len(ends) >= 1
        assert all("because this rank has closed its session" in end or "given up" in end for end in ends)


def test_control_frames_overtake_data() -> None:
    with Pair() as pair:
        ends: list[str] = []

        def push() -> None:
            try:
                pair.link.write(0, 0, [memoryview(bytearray(64 << 20))])
            except PeerDiedError as error:
                ends.append(str(error))

        stuck = threading.Thread(target=push)
        stuck.start()
        pair.receive(pair.far, HEADER.size + 1)  # it has begun; nobody takes in the rest
        pair.link.abort("first things first")
        assert pair.receive_control().kind is Kind.ABORT
        assert stuck.is_alive()
        pair.far.close()
        stuck.join()
        assert ends


LARGE = 24 << 20  # more than sockets hold
ACTIONS = {"push": ("write",), "read": ("read",), "push and read": ("write", "read"), "all": ("write", "read") * 2}


@pytest.mark.parametrize("what", ACTIONS)
def test_ranks_that_transfer_to_each_other_at_the_same_time_do_not_wait_for_each_other(what: str) -> None:
    """However little the sockets hold: while a thread of a rank sends, another one receives, and what is queued goes
    out between what the threads of the rank send themselves."""
    pairs = [connection() for _ in range(3)]
    owners = [Owner(bytearray(LARGE)) for _ in range(2)]
    sources = [bytes([41 + rank]) * LARGE for rank in range(2)]
    threads = [LinkThread(), LinkThread()]
    links = [
        Link(1 - rank, f"rank {1 - rank}", *(pair[rank] for pair in pairs), owners[rank], 60.0, thread.ask_for_service)
        for rank, thread in enumerate(threads)
    ]
    both_begin, read, errors = threading.Barrier(2 * len(ACTIONS[what])), [], []

    def transfer(rank: int, action: str) -> None:
        try:
            both_begin.wait(30)
            if action == "write":
                links[rank].write(0, 0, [memoryview(sources[rank])])
                links[rank].post(rank, False)
            else:
                target = bytearray(LARGE)
                links[rank].read(0, 0, [memoryview(target)], no_op)
                read.append(set(target[:: 1 << 16]))
        except Exception as error:
            errors.append(error)

    transfers = [threading.Thread(target=transfer, args=(r, action)) for r in range(2) for action in ACTIONS[what]]
    try:
        for link, thread in zip(links, threads, strict=True):
            thread.start([link], lambda: (Heartbeats(0, 0, 0), None))
        for transfer_thread in transfers:
            transfer_thread.start()
        for transfer_thread in transfers:
            transfer_thread.join(100)
        assert not errors
        num_writes, num_reads = (ACTIONS[what].count(action) for action in ("write", "read"))
        # A post comes behind what was written.
        until(lambda: all(len(owner.delivered) >= num_writes for owner in owners), "a post does not come", 30.0)
        for rank, owner in enumerate(owners):
            assert owner.delivered == [(1 - rank, False)] * num_writes
            assert owner.bytes == (sources[1 - rank] if num_writes else bytes(LARGE))
        assert len(read) == 2 * num_reads
        assert all(values <= {0, 41, 42} for values in read)
    finally:
        for part in (*threads, *links):
            part.close()


def test_an_answer_that_nobody_takes_holds_up_no_signal() -> None:
    """The other rank asks for much and receives nothing for a while; then it finds everything, whole and in order."""
    with Pair() as pair:
        pair.owner.bytes = bytearray(os.urandom(1 << 20) * 16)
        pair.owner.memory[0] = memoryview(pair.owner.bytes)
        pair.far.sendall(Frame(Kind.READ, 0, 0, len(pair.owner.bytes), 5).pack())
        pair.until(lambda: pair.link._queue.needs_service)
        pair.far.sendall(Frame(Kind.POST, 1).pack())
        pair.until(lambda: pair.owner.delivered == [(1, False)])
        posts = [threading.Thread(target=pair.link.post, args=(index, True)) for index in (2, 3)]
        for post in posts:
            post.start()
        answer, posted, left = bytearray(len(pair.owner.bytes)), [], len(pair.owner.bytes)
        while left or len(posted) < len(posts):
            frame = Frame.unpack(pair.receive(pair.far, HEADER.size))
            if frame.kind is Kind.POST:
                posted.append(frame.number)
            else:
                answer[frame.a : frame.a + frame.b] = pair.receive(pair.far, frame.b)
                left -= frame.b
        for post in posts:
            post.join()
        assert answer == pair.owner.bytes
        assert sorted(posted) == [2, 3]


def test_the_end_of_the_connection_wakes_a_reader() -> None:
    with Pair() as pair:

        def leave() -> None:
            pair.far.close()
            pair.control.close()

        timer = threading.Timer(0.1, leave)
        timer.start()
        with pytest.raises(PeerDiedError, match="rank 7 cannot be reached any more: .*[Cc]onnection"):
            pair.link.read(0, 0, [memoryview(bytearray(4))], no_op)
        timer.join()
        pair.until(lambda: pair.owner.losses >= 1)


def test_a_rank_that_has_closed_is_told_from_one_that_died(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_EXPLANATION_S", 30.0)  # however long the farewell is on its way
    with Pair() as pair:
        pair.far.close()  # the data's end may be seen before the farewell
        pair.control.sendall(Frame(Kind.CLOSED, a=Closing.COMPLETE.value).pack())
        pair.until(lambda: pair.link.is_dead)
        with pytest.raises(PeerClosedError, match="rank 7 has closed its session"):
            pair.link.write(0, 0, [memoryview(b"x")])
        pair.link.post(0, False)  # it needs none any more


@pytest.mark.parametrize("control_ends", [False, True], ids=["farewell", "farewell, and the end of control"])
def test_a_rank_has_left_only_when_all_that_it_posted_is_here(control_ends: bool) -> None:
    """Control frames overtake data: the last signals of a rank that closes may come after its farewell."""
    with Pair() as pair:
        pair.control.sendall(Frame(Kind.CLOSED, a=Closing.COMPLETE.value).pack())
        if control_ends:
            pair.control.close()
            pair.until(lambda: pair.link.control not in pair.thread._selector.get_map())
        pair.until(lambda: pair.link.closing is Closing.COMPLETE)
        assert not pair.link.has_left
        assert not pair.link.is_dead
        pair.far.sendall(Frame(Kind.POST, 3, 0).pack())
        pair.far.close()
        pair.until(lambda: pair.link.has_left)
        assert pair.owner.delivered == [(3, False)]


def test_a_host_that_vanishes_behind_its_farewell_is_not_waited_for() -> None:
    with Pair() as pair:
        pair.control.sendall(Frame(Kind.CLOSED, a=Closing.COMPLETE.value).pack())
        pair.until(lambda: pair.link.closing is Closing.COMPLETE)
        assert not pair.link.has_left
        pair.link._lose("no sign of life from its host or the network")
        assert pair.link.has_left


def test_a_silent_host_is_dead_and_a_silent_process_is_not() -> None:
    """By the kernel's own timers; that they are set is all that can be shown without cutting a network."""
    with Pair() as pair:
        keepalive = pair.link.keepalive
        assert keepalive.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        assert [keepalive.getsockopt(socket.IPPROTO_TCP, option) for option in options] == [1, 1, 6, 0]
        assert not pair.link.data.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)  # its window may be shut for long
        for _ in range(1000):  # more than a quarter of an hour of a rank that reads no control frames
            pair.link.send_status(Heartbeats(1, 0, 0), 2)
        assert not pair.link.is_dead


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH])
def test_a_host_that_answers_no_more_ends_the_link(number: int) -> None:
    """However the kernel calls it: the last thing it has heard of the way there is what it reports."""
    with Pair() as pair:
        assert pair.link.serve_keepalive(EVENT_READ) == EVENT_READ
        pair.link.keepalive.close()
        pair.link.keepalive = Unreachable(number)  # type: ignore[assignment]
        assert pair.link.serve_keepalive(EVENT_READ) == 0
        assert pair.link.describe() == "no sign of life from its host or the network"
        assert pair.link.is_dead


def test_the_keepalive_connection_ends_with_its_rank_and_nothing_is_sent_on_it() -> None:
    with Pair() as pair:
        pair.keepalive.close()
        pair.until(lambda: pair.link.keepalive not in pair.thread._selector.get_map())
        assert not pair.link.is_dead  # control frames tell how it has ended
    with Pair() as pair:
        pair.keepalive.sendall(b"x")
        pair.until(lambda: pair.link.is_dead)
        assert "it sent something where nothing belongs" in pair.link.describe()


class Unreachable:
    def __init__(self, number: int) -> None:
        self._number = number

    def recv(self, *_: int) -> bytes:
        raise OSError(self._number, os.strerror(self._number))

    def close(self) -> None:
        """Closed already."""


def test_descriptors_beyond_1024_are_as_good_as_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.dup(0) for _ in range(1050)]
    try:
        with Pair() as pair:
            assert pair.link.control.fileno() > 1024
            pair.link.abort("x")
            pair.link.tell_closed(Closing.COMPLETE)
            assert pair.receive_control().kind is Kind.ABORT
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Answering:
    """As much of a link as its thread looks at: it has nothing more to send, until it is asked for something."""

    def __init__(self, connection: socket.socket) -> None:
        self.data, self.data_events = connection, EVENT_READ

    def serve_data(self, events: int) -> int:
        self.data_events = EVENT_READ | EVENT_WRITE
        return self.data_events


def test_an_answer_goes_out_that_is_asked_for_when_the_one_before_has_just_gone() -> None:
    """In one round the connection is told to wait for reading only, and then has something to write again."""
    thread, (ours, theirs) = LinkThread(), socket.socketpair()
    link: Any = Answering(ours)
    thread._selector.register(ours, EVENT_READ | EVENT_WRITE, (link, link.serve_data))
    bell, data = thread._selector.get_key(thread._wake_fd), thread._selector.get_key(ours)  # as one select() has it
    thread.ask_for_service(link)
    thread._handle(bell, EVENT_READ)
    assert thread._selector.get_key(ours).events == EVENT_READ
    thread._handle(data, EVENT_READ)
    assert thread._selector.get_key(ours).events == EVENT_READ | EVENT_WRITE
    thread.close()
    ours.close()
    theirs.close()
