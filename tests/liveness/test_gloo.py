"""Layer 3. Ending gloo's connections, and nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks

from odc.liveness import gloo

TIME_LIMIT_S = 60


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname(), TIME_LIMIT_S)
        return one, server.accept()[0]


class AsyncioEcho:
    """A thread with an event loop, and a connection to a server in it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.reader, self.writer, self.server = self._run(self._connect())

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Server]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                writer.write(line)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return *await asyncio.open_connection(*server.sockets[0].getsockname()), server

    def _run(self, of_loop: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(of_loop, self.loop).result(TIME_LIMIT_S)

    def works(self) -> bool:
        async def ask() -> bytes:
            self.writer.write(b"hello\n")
            return await self.reader.readline()

        return bool(self._run(ask()) == b"hello\n")

    def close(self) -> None:
        async def end() -> None:
            self.writer.close()
            self.server.close()
            await self.writer.wait_closed()
            await self.server.wait_closed()

        self._run(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


class SelfPipeLoop:
    """An event loop with a pipe that wakes it, connections and a listening socket: what gloo's looks like."""

    def __init__(self) -> None:
        self.pipe = os.pipe()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.pair = tcp_pair()
        self.epoll = select.epoll()
        for watched in (self.pipe[0], self.listener, *self.pair):
            self._watch(watched if isinstance(watched, int) else watched.fileno())

    def _watch(self, fd: int) -> None:
        self.epoll.register(fd, select.EPOLLIN)

    def works(self) -> bool:
        self.pair[0].sendall(b"hello")
        ready = self.epoll.poll(TIME_LIMIT_S)
        return len(ready) == 1 and self.pair[1].recv(5) == b"hello"

    def close(self) -> None:
        self.epoll.close()
        for end in (self.listener, *self.pair):
            end.close()
        for fd in self.pipe:
            os.close(fd)


class EpollEvent(ctypes.Structure):
    _pack_ = 1 if os.uname().machine == "x86_64" else 0
    _fields_ = (("events", ctypes.c_uint32), ("data", ctypes.c_uint64))


class ObjectsLoop(SelfPipeLoop):
    """One that keeps addresses of objects with virtual functions beside its descriptors, as gloo does: first one of
    another type, then an object that is not there any more, an odd address and the highest one."""

    def _watch(self, fd: int) -> None:
        if not hasattr(self, "addresses"):
            self.type = (ctypes.c_void_p * 2)()
            self.table = (ctypes.c_void_p * 2)(ctypes.addressof(self.type), None)
            self.object = (ctypes.c_void_p * 1)(ctypes.addressof(self.table) + ctypes.sizeof(ctypes.c_void_p))
            gone = (ctypes.c_void_p * 1)(0xDEAD0000)
            self.gone = gone
            self.addresses = [2**64 - 1, 0x1001, ctypes.addressof(gone), ctypes.addressof(self.object)]
        event = EpollEvent(select.EPOLLIN, self.addresses.pop())
        libc = ctypes.CDLL(None, use_errno=True)
        failed = libc.epoll_ctl(self.epoll.fileno(), 1, fd, ctypes.byref(event))
        assert not failed, os.strerror(ctypes.get_errno())

    def works(self) -> bool:
        self.pair[0].sendall(b"hello")
        return self.pair[1].recv(5) == b"hello"


@contextlib.contextmanager
def connections_of_a_script() -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        kinds = (AsyncioEcho, SelfPipeLoop, ObjectsLoop)
        yield [stack.enter_context(contextlib.closing(kind())) for kind in kinds]


def end_at_rank_0(rank: int, world_size: int) -> None:
    dist.all_reduce(torch.ones(1))
    with connections_of_a_script() as loops:
        assert [loop.works() for loop in loops] == [True] * 3
        found = gloo.num_connections()
        assert found is not None
        assert found >= 1
        dist.barrier()
        if rank == 0:
            assert gloo.end_connections() == found
        with pytest.raises(RuntimeError) as caught:
            dist.all_reduce(torch.ones(1))
        assert gloo.is_of_collective(caught.value)
        assert [loop.works() for loop in loops] == [True] * 3


def test_gloos_connections_end_and_those_of_a_script_go_on() -> None:
    run_ranks(2, end_at_rank_0, timeout_s=2 * TIME_LIMIT_S)


def test_without_gloo_nothing_is_taken_for_it() -> None:
    with connections_of_a_script() as loops:
        assert gloo.num_connections() == 0
        assert gloo.end_connections() == 0
        assert [loop.works() for loop in loops] == [True] * 3


def end_where_types_are_unknown(rank: int, world_size: int) -> None:
    gloo._TYPES = ("_ZTIN4gloo11NotExportedE",)
    with connections_of_a_script() as loops:
        assert gloo.end_connections() == 0
        assert [loop.works() for loop in loops] == [True] * 3
    dist.all_reduce(torch.ones(1))


def test_where_types_are_unknown_nothing_is_ended() -> None:
    run_ranks(2, end_where_types_are_unknown, timeout_s=2 * TIME_LIMIT_S)


@pytest.mark.parametrize("missing", ["_FDS", "_MEMORY"])
def test_where_there_is_nothing_to_look_with_nothing_is_raised(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, missing, Path("/nonexistent"))
    assert gloo.end_connections() == 0
    assert gloo.num_connections() in (None, 0)
