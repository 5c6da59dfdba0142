"""Layer 1: no ranks. The door of set-up by itself: who is let in past strangers, and what if no descriptor is left."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from odc.errors import SetupError
from odc.liveness.threads import HelperThread
from odc.transports._rendezvous import MOST_WAITING, Acceptor


class Listener(socket.socket):
    """Refuses to accept for as long as :attr:`exhausted` is set."""

    exhausted = False

    def accept(self) -> tuple[socket.socket, object]:
        if self.exhausted:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


@contextmanager
def open_door() -> Iterator[tuple[Acceptor, Listener, list[socket.socket]]]:
    """It lets in whoever says "friend"."""
    friends: list[socket.socket] = []

    def admit(connection: socket.socket, greeting: bytes) -> bool:
        if greeting != b"friend":
            return False
        connection.send(b"come in")
        friends.append(connection)
        return True

    listener = Listener(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(200)
    door = Acceptor(listener, 6, admit)
    door.open()
    try:
        yield door, listener, friends
    finally:
        door.close()
        door.close()
        for friend in friends:
            friend.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "odc-acceptor"]


def knock(address: object, data: bytes) -> socket.socket:
    connection = socket.create_connection(address, timeout=30)  # type: ignore[arg-type]
    connection.sendall(data)
    return connection


def test_a_friend_comes_in_past_any_number_of_strangers() -> None:
    with open_door() as (_, listener, _):
        strangers = [knock(listener.getsockname(), b"" if i % 2 else b"f") for i in range(5 * MOST_WAITING)]
        for _ in range(3):
            with knock(listener.getsockname(), b"friend") as friend:
                assert friend.recv(7) == b"come in"
        # The oldest strangers had to go, the latest may still say who they are.
        assert strangers[0].recv(1) == b""
        strangers[-1].sendall(b"friend")
        assert strangers[-1].recv(7) == b"come in"
        for stranger in strangers:
            stranger.close()


def test_one_byte_at_a_time_is_a_greeting_too() -> None:
    with open_door() as (_, listener, _), knock(listener.getsockname(), b"f") as slow:
        for byte in b"riend":
            slow.sendall(bytes([byte]))
            time.sleep(0.01)  # a packet each
        assert slow.recv(7) == b"come in"


@pytest.mark.parametrize("data", [b"foe...", b"GET / HTTP/1.1\r\n"])
def test_a_stranger_is_sent_away_without_a_word(data: bytes) -> None:
    with open_door() as (_, listener, friends), knock(listener.getsockname(), data) as stranger:
        with contextlib.suppress(ConnectionResetError):  # it had more to say
            assert stranger.recv(7) == b""
        assert not friends


def test_without_descriptors_the_oldest_stranger_goes_and_then_the_door_closes() -> None:
    with open_door() as (door, listener, _):
        address = listener.getsockname()
        stranger = knock(listener.getsockname(), b"f")
        with knock(listener.getsockname(), b"friend") as friend:
            assert friend.recv(7) == b"come in"  # so the stranger is in, too
        listener.exhausted = True
        with pytest.raises(ConnectionResetError):  # when it knocks, or when it waits for an answer
            knock(address, b"friend").recv(1)
        assert stranger.recv(1) == b""
        stranger.close()
        door._thread.join(30)
        assert door.problem is not None
        assert door.problem.errno == errno.EMFILE
        with pytest.raises(ConnectionRefusedError):
            knock(address, b"")


def test_a_door_without_a_thread_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever calls would wait for the whole limit of set-up."""

    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    with pytest.raises(SetupError, match="can't start new thread"):
        Acceptor(listener, 6, lambda connection, greeting: True).open()
    with pytest.raises(ConnectionRefusedError):
        knock(address, b"")


def test_a_thread_that_cannot_start_names_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(SetupError) as caught:
        HelperThread(print, "odc-links").start()
    for words in ("can't start new thread (odc-links)", "(ulimit -u)", "(ulimit -v)", "run fewer ranks"):
        assert words in str(caught.value)
