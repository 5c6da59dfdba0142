"""Layers 2 and 3. Ranks of several hosts: what their links carry, refuse, and notice. Ranks here pose as hosts.

The faults are those of ``test_faults.py``; what is sent and in which order is in ``test_protocol.py`` and
``test_transport_conformance.py``. A network that is cut is in ``test_network.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_cases import some_of
from process_ranks import across, run_ranks, start_ranks, wait_until
from thread_ranks import ThreadExchange, of_one_unit, run_threads, values
from training import build, full_parameters, largest_difference, reference, shard, train

import odc
from odc import (
    ConfigError,
    ParamSlice,
    Runtime,
    RuntimeConfig,
    SetupError,
    UnitSpec,
)
from odc.minibatch.accumulators import StorePlan
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology, route_address
from odc.transports import _rendezvous
from odc.transports._frames import Frame, Kind
from odc.transports._rendezvous import TcpRendezvous
from odc.transports.tcp import TcpTransport

# Training


def patched(rank: int, world_size: int, counts: list[int]) -> list[tuple[str, dict[str, Any]]]:
    """By the daemon, and deterministic."""
    found = []
    for options in ({}, {"deterministic": True}):
        model = shard(build(), world_size)
        with odc.patch_fsdp(model, **options) as session:
            train(model, session, rank, world_size, counts, 5)
            name = session.transport
        found.append((name, full_parameters(model)))
    return found


def test_training_across_hosts_matches_one_float64_process() -> None:
    counts = [1, 3, 0, 2]
    expected = reference(counts, 5)
    for of_rank in run_ranks(4, across, 2, patched, counts, timeout_s=180):
        for name, parameters in of_rank:
            assert name == "tcp"
            assert largest_difference(parameters, expected) < 1e-5


def test_direct_accumulation_across_hosts_is_refused() -> None:
    def body(exchange: ThreadExchange) -> None:
        with pytest.raises(ConfigError, match="the ranks of 2 hosts do not share: use 'daemon' or 'auto'"):
            of_one_unit(exchange, accumulate="direct", host_id=f"h{exchange.rank}")

    values(run_threads(2, body))


# Deaths, silence, failures


def be_impatient(runtime: Runtime) -> None:
    """A short limit on silence, which set-up has not had to keep."""
    runtime._waiter._timeout_s = 2.0
    transport = runtime._transport
    assert isinstance(transport, TcpTransport)
    assert transport._links is not None
    for link in transport._links.by_rank.values():
        link._timeout_s = 2.0


def reading_from_a_stopped_rank(rank: int, world_size: int) -> None:
    """Rank 2 stops; rank 1 reads from it over its link, patiently; rank 0 has pushed nothing and waits for both."""
    units = [UnitSpec("u", 4, torch.float32, (ParamSlice("w", 4),))]
    runtime = Runtime.create(ProcessGroupExchange(), units, RuntimeConfig.from_environment(timeout_s=90.0))
    runtime.publish(0, lambda shard: shard.fill_(rank))
    runtime.begin()
    ProcessGroupExchange().all_gather(b"")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 0:
        wait_until(lambda: runtime._transport.peers.by_rank[1].waiting_on == 2, "rank 1 did not wait for its link")
        be_impatient(runtime)
    if rank == 1:
        wait_for_stop(runtime.topology.pids[2])
        runtime.gather(0, torch.empty(12))
    runtime.finish()


def wait_for_stop(pid: int) -> None:
    status = Path(f"/proc/{pid}/status")
    wait_until(lambda: "State:\tT" in status.read_text(), "rank 2 did not stop: nothing was tested")


def test_a_rank_that_waits_for_its_link_is_not_to_blame() -> None:
    results = start_ranks(3, across, 2, reading_from_a_stopped_rank).join(90, expendable=[2])
    assert results[0].error_type == "PeerSilentError", results[0].error
    for words in ("for rank 1", "(rank 1 itself waits for rank 2 (host", "Cause: rank 2 is alive but silent"):
        assert words in (results[0].error or "")
    assert results[1].error_type == "AbortedError", results[1].error


SHARD_BYTES = 16 << 20


def beside_a_stopped_rank(rank: int, world_size: int) -> tuple[float, float, bool]:
    """Ranks 0 and 1 read from each other: before rank 2 stops, and when it has. It stops while it reads from both, so
    answers to it are under way, and rank 0 pushes to it besides."""
    numel = SHARD_BYTES // 4
    units = [UnitSpec("u", numel, torch.float32, (ParamSlice("w", numel),))]
    exchange = ProcessGroupExchange()
    runtime = Runtime.create(exchange, units, RuntimeConfig.from_environment(timeout_s=90.0))
    runtime.publish(0, lambda shard: shard.fill_(rank))
    transport, buffer = runtime._transport, runtime._protocol._buffer
    assert runtime._daemon is not None
    slots = runtime._daemon._slots

    def read(owner: int, times: int) -> float:
        started = time.monotonic()
        for _ in range(times):
            out = torch.empty(numel)
            transport.read([([out], owner)], buffer, 0)
            assert out.eq(owner).all()
        return time.monotonic() - started

    def read_more_than_sockets_hold(owner: int) -> None:
        while True:
            transport.read([([torch.empty(slots.num_bytes, dtype=torch.uint8)], owner)], slots, 0)

    exchange.all_gather(b"")
    before_s = read(1 - rank, 10) if rank < 2 else 0.0
    exchange.all_gather(b"")
    if rank == 2:
        for owner in range(2):
            threading.Thread(target=read_more_than_sockets_hold, args=(owner,), daemon=True).start()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGSTOP)
    wait_for_stop(runtime.topology.pids[2])
    push = threading.Thread(target=transport.write, args=(slots, 2, 0, [torch.ones(8 * numel)]), daemon=True)
    if rank == 0:
        push.start()
    after_s = read(1 - rank, 10)
    return before_s, after_s, push.is_alive()


def test_a_stopped_rank_does_not_slow_down_transfers_between_others() -> None:
    results = start_ranks(3, across, 3, beside_a_stopped_rank).join(120, expendable=[2])
    assert all(result.error is None for result in results[:2]), results
    for before_s, after_s, _ in (result.value for result in results[:2]):
        assert after_s < 4 * before_s + 2.0  # for a busy machine; the stopped rank is waited for 90 s
    assert results[0].value[2], "the push to the stopped rank has ended: nothing was tested"


def test_a_rank_has_one_thread_for_all_others() -> None:
    def body(exchange: ThreadExchange) -> list[str]:
        with of_one_unit(exchange, timeout_s=30, host_id=f"h{exchange.rank}"):
            exchange.all_gather(b"")
            names = [thread.name for thread in threading.enumerate() if thread.name.startswith("odc-")]
            exchange.all_gather(b"")
        return names

    def threads_per_rank(num_ranks: int) -> dict[str, float]:
        names = values(run_threads(num_ranks, body))[0]  # those of all ranks, which are threads here
        return {name: names.count(name) / num_ranks for name in names}

    assert threads_per_rank(2) == threads_per_rank(4)
    assert threads_per_rank(4)["odc-links"] == 1


# Set-up


@pytest.mark.parametrize(("hosts", "step"), some_of([1, 2], [(StorePlan, "make"), (Runtime, "_complete")]))
def test_a_failure_between_the_steps_of_set_up_reaches_all_ranks(
    hosts: int, step: tuple[type, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only those failures that the ranks ask one another about."""
    original = getattr(*step)

    def fail(self: Any, *args: Any) -> Any:
        rank = self.topology.rank if isinstance(self, Runtime) else args[0].rank
        if rank == 1:
            raise LookupError("nobody has thought of this")
        return original(self, *args)

    monkeypatch.setattr(*step, fail)
    has_failed = threading.Barrier(2)

    def body(exchange: ThreadExchange) -> str:
        with pytest.raises(LookupError if exchange.rank == 1 else SetupError) as caught:
            of_one_unit(exchange, timeout_s=100, host_id=f"h{exchange.rank % hosts}")
        has_failed.wait(60)  # the exchange goes on until all ranks know
        return str(caught.value)

    told = values(run_threads(2, body))[0]
    assert "set-up failed on rank 1 (pid " in told
    assert "LookupError: nobody has thought of this" in told
    wait_until(lambda: not any(t.name.startswith("odc-") for t in threading.enumerate()), "a thread has not ended")


def set_up(exchange: ThreadExchange, timeout_s: float = 600.0) -> str:
    """One minibatch over tcp."""
    with of_one_unit(exchange, timeout_s=timeout_s, host_id=f"h{exchange.rank}") as runtime:
        runtime.publish(0, lambda shard: shard.fill_(exchange.rank))
        runtime.begin()
        out = torch.empty(4 * exchange.world_size)
        runtime.gather(0, out)
        runtime.finish()
        return f"{runtime.transport_name} {out.sum().item()}"


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n" + bytes(60), b"\x80\x04\x95" + bytes(90), Frame(Kind.HELLO, 1).pack() + bytes(16)]


@pytest.mark.parametrize("silent", [pytest.param(3, marks=pytest.mark.extended), 40])
def test_strangers_at_the_door_hold_nobody_up(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault test 21 during set-up: before the ranks come to a door there are some who talk HTTP, pickle, show a wrong
    key, have hung up or half hung up, or say nothing, more than there is room for."""
    strangers: list[socket.socket] = []
    original = TcpRendezvous.connect

    def stranger_at(address: tuple[str, int], data: bytes, how: int | None = None) -> None:
        strangers.append(socket.create_connection(address, timeout=30))
        with contextlib.suppress(ConnectionError):  # it was sent away before, to make room
            strangers[-1].sendall(data)
            if how is not None:
                strangers[-1].shutdown(how)

    def connect(self: TcpRendezvous, rows: Any, timeout_s: float) -> None:
        for address in ((str(row[0]), int(row[1])) for row in rows):
            for data in GARBAGE:
                stranger_at(address, data)
            stranger_at(address, b"x", socket.SHUT_WR)
            stranger_at(address, b"", socket.SHUT_RDWR)
            for _ in range(silent):
                stranger_at(address, b"")
        original(self, rows, timeout_s)

    monkeypatch.setattr(TcpRendezvous, "connect", connect)
    started = time.monotonic()
    assert values(run_threads(2, set_up)) == ["tcp 4.0"] * 2
    assert time.monotonic() - started < 30  # two seconds for each silent one would be 160
    assert len(strangers) == 4 * (len(GARBAGE) + 2 + silent)
    for stranger in strangers:
        stranger.close()


def test_strangers_who_come_all_the_time_and_talk_slowly_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    over, addresses = threading.Event(), []
    original = TcpRendezvous.connect

    def come_again_and_again(address: tuple[str, int], data: bytes) -> None:
        kept: list[socket.socket] = []
        while not over.is_set():
            try:
                kept.append(socket.create_connection(address, timeout=30))
                kept[-1].sendall(data)
            except OSError:  # the door is closed by now, or has closed this one
                over.wait(0.01)
            if len(kept) > 50:
                kept.pop(0).close()
        for connection in kept:
            connection.close()

    def connect(self: TcpRendezvous, rows: Any, timeout_s: float) -> None:
        if self._topology.rank == 0:
            addresses.append((str(rows[0][0]), int(rows[0][1])))
            for data in (b"", b"\x01", *GARBAGE):
                threads.append(threading.Thread(target=come_again_and_again, args=(addresses[0], data)))
                threads[-1].start()
        original(self, rows, timeout_s)

    threads: list[threading.Thread] = []
    monkeypatch.setattr(TcpRendezvous, "connect", connect)
    try:
        started = time.monotonic()
        assert values(run_threads(3, set_up)) == ["tcp 12.0"] * 3
        assert time.monotonic() - started < 60
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert addresses


REFUSED = {
    "wrong key": "it does not hold this job's key, so it belongs to another job",
    "wrong version": "it speaks version 77 between hosts, this one ",
    "wrong rank": "it calls rank 7, but this is rank 0",
    "unknown rank": "rank 9 is not expected here",
}


@pytest.mark.parametrize("fails", [False, True])
def test_who_is_let_in_while_the_door_is_closed_is_hung_up_on(fails: bool) -> None:
    """Also where the door cannot be closed."""
    meeting = TcpRendezvous(Topology(0, ("a", "b"), ("a", "b"), (1, 2), ("127.0.0.1", "127.0.0.1")))
    meeting.listen()
    mine, theirs = socket.socketpair()

    def close_door() -> None:
        meeting.sockets[1, 0] = mine
        type(meeting)._close_door(meeting)
        if fails:
            raise OSError("as told")

    meeting._close_door = close_door  # type: ignore[method-assign]
    with theirs, pytest.raises(OSError, match="as told") if fails else contextlib.nullcontext():
        meeting.close()
    assert mine.fileno() == -1


@pytest.mark.parametrize("what", REFUSED)
def test_who_is_refused_says_why_on_all_ranks_at_once(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not after ODC_TIMEOUT, for which the others would wait at their doors. Rank 2 shows something wrong."""
    original = TcpRendezvous._refusal
    changes: dict[str, dict[str, int]] = {
        "wrong version": {"c": 77},
        "wrong rank": {"b": 7},
        "unknown rank": {"number": 9},
    }

    def refusal(self: TcpRendezvous, hello: Frame, proof: bytes) -> str | None:
        if (hello.number, self._topology.rank) != (2, 0):
            return original(self, hello, proof)
        shown = hello._replace(**changes.get(what, {}))
        return original(self, shown, bytes(16) if what == "wrong key" else self._proof(shown))

    monkeypatch.setattr(TcpRendezvous, "_refusal", refusal)
    started = time.monotonic()
    results = run_threads(4, set_up)
    assert time.monotonic() - started < 30
    assert {type(result) for result in results} == {SetupError}, "\n".join(map(str, results))
    for rank, result in enumerate(results):
        assert "has refused rank 2 (host h2, pid " in str(result), result
        assert REFUSED[what] in str(result), result
        assert ("set-up failed on rank 2: SetupError: " in str(result)) == (rank != 2)


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n" + bytes(60), Frame(Kind.WELCOME).pack() + bytes(16)]
)
def test_what_answers_and_is_no_rank_of_this_job_is_named(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an address is wrong, anything may listen there."""
    original = TcpRendezvous.listen

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)
            connection.recv(1000)

    def listen(self: TcpRendezvous) -> list[Any]:
        row = original(self)
        return [*listener.getsockname()[:2], row[2]] if self._topology.rank == 0 else row

    monkeypatch.setattr(TcpRendezvous, "listen", listen)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        results = run_threads(2, set_up)
        thread.join()
    assert {type(result) for result in results} == {SetupError}, "\n".join(map(str, results))
    assert all("what listens where rank 0 (host h0, pid " in str(result) for result in results)
    assert all("should be is no rank of this job" in str(result) for result in results)


def test_a_host_that_cannot_be_reached_is_named_with_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], timeout: float) -> socket.socket:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.setattr(_rendezvous.socket, "create_connection", refuse)
    results = run_threads(2, partial(set_up, timeout_s=0.5))
    assert any(isinstance(result, SetupError) and "set ODC_ADDRESS on each host" in str(result) for result in results)


def test_no_way_out_is_a_reason_against_tcp() -> None:
    topology = Topology(0, ("a", "b"), ("a", "b"), (1, 2), ("", "10.0.0.2"))
    reason = TcpTransport.unavailable(topology, torch.device("cpu"))
    assert reason is not None
    assert "set ODC_ADDRESS" in reason


@pytest.mark.parametrize(
    ("addresses", "words"),
    [
        (["127.0.0.1", "10.0.0.2"], "ODC_ADDRESS='127.0.0.1' of rank 0 (host a, pid "),
        (["10.0.0.1", "::1"], "ODC_ADDRESS='::1' of rank 1 (host b, pid "),
        (["10.0.0.1", "10.0.0.1"], "rank 0 (host a) and rank 1 (host b, pid "),
        (["10.0.0.1", "10.0.0.2"], ""),
    ],
)
@pytest.mark.parametrize("machines", [1, 2])
def test_addresses_that_lead_to_no_other_machine_are_refused_on_all_ranks(
    addresses: list[str], words: str, machines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers of one machine may share its network, and may be right."""
    boot = threading.local()
    monkeypatch.setattr(odc.setup.topology, "_boot_id", lambda: boot.id)

    def body(exchange: ThreadExchange) -> str:
        boot.id = f"boot{exchange.rank % machines}"
        try:
            Topology.discover(exchange, "ab"[exchange.rank], addresses[exchange.rank])
        except SetupError as error:
            return str(error)
        return ""

    for told in values(run_threads(2, body)):
        if machines == 1 or not words:
            assert not told
        else:
            assert words in told
            assert "Set ODC_ADDRESS on each host to its own IP address" in told


def test_the_address_is_that_of_a_route_that_leads_out() -> None:
    assert route_address(["127.0.0.1", ""]) == ""
    assert route_address(["no-such-host.invalid"]) == ""


def test_an_address_that_is_not_this_hosts_fails_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = TcpRendezvous.listen

    def listen(self: TcpRendezvous) -> list[Any]:
        if self._topology.rank == 1:  # reserved for documentation: nobody's address
            self._topology = replace(self._topology, addresses=("127.0.0.1", "203.0.113.7", "127.0.0.1"))
        return original(self)

    monkeypatch.setattr(TcpRendezvous, "listen", listen)
    before = len(os.listdir("/proc/self/fd"))

    results = run_threads(3, set_up)
    assert {type(result) for result in results} == {SetupError}, "\n".join(map(str, results))
    assert all("cannot listen at its address 203.0.113.7" in str(result) for result in results)
    assert all("Set ODC_ADDRESS on that host" in str(result) for result in results)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_thread_that_cannot_start_fails_on_all_ranks_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    original = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if self.name == "odc-links" and next(starts) == 1:
            raise RuntimeError("can't start new thread")
        original(self)

    starts = itertools.count()
    monkeypatch.setattr(threading.Thread, "start", start)
    before = len(os.listdir("/proc/self/fd"))

    results = run_threads(3, set_up)
    assert all(isinstance(result, (SetupError, RuntimeError)) for result in results), results
    assert all("can't start new thread" in str(result) for result in results)
    wait_until(lambda: not any(t.name.startswith("odc-") for t in threading.enumerate()), "a thread has not ended")
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.extended
def test_a_rank_that_holds_its_interpreter_for_long_is_not_dead() -> None:
    """Fault test 6, across hosts: longer than any sign of life is waited for."""
    assert run_ranks(2, across, 2, holding, 8.0, env={"ODC_TIMEOUT": "60"}) == ["tcp", "tcp"]


def holding(rank: int, world_size: int, seconds: float) -> str:
    units = [UnitSpec("u", 4, torch.float32, (ParamSlice("w", 4),))]
    with Runtime.create(ProcessGroupExchange(), units, RuntimeConfig.from_environment()) as runtime:
        runtime.publish(0, lambda shard: shard.fill_(rank))
        runtime.begin()
        runtime.gather(0, torch.empty(8))
        if rank == 1:
            ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL keeps the lock
        runtime.scatter_accumulate(0, torch.ones(8))
        runtime.finish()
        return runtime.transport_name
