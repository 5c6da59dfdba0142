"""Layer 2: ranks as threads. Pushes that come late, early, twice or out of order. Fault test 19.

What the runtime never does is done below it, by hand: a push of another minibatch through the pusher, a signal without
a push, a push that is repeated on the wire. The sums are compared bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from thread_ranks import ThreadExchange, begin, run_runtimes
from watching import until

from odc import OdcError, ParamSlice, ProtocolError, Runtime, UnitSpec
from odc.minibatch.daemon import AccumulationDaemon
from odc.transports._frames import Frame
from odc.transports._link import Link
from odc.units import Layout, Rows

pytestmark = pytest.mark.usefixtures("fakes")

NUMEL = 1000
UNITS = [
    UnitSpec("pushed", NUMEL, torch.float32, (ParamSlice("w", NUMEL - 10), ParamSlice("b", 10))),
    UnitSpec("untouched", NUMEL, torch.float32, (ParamSlice("w", NUMEL),)),
]


def gradients(seed: int) -> torch.Tensor:
    """One row for each of two owners; sums of them depend on every bit."""
    return torch.randn(2 * NUMEL, generator=torch.Generator().manual_seed(seed))


def bits(tensor: torch.Tensor) -> str:
    """Equal only where every bit is."""
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


def sums_of(runtime: Runtime, minibatch: int) -> list[tuple[str, list[bool]] | None]:
    """This rank's sums so far, final or not."""
    found = [runtime._store.collect(unit, minibatch) for unit in range(len(UNITS))]
    return [None if result is None else (bits(result[0]), result[1]) for result in found]


def drain(runtime: Runtime) -> None:
    """Return when this rank's pushes are in the sums."""
    daemon, transport = runtime._daemon, runtime._transport
    if daemon is not None:
        signal, owners = daemon._acked_at + runtime.topology.rank, range(runtime.topology.world_size)
        until(
            lambda: all(transport.has_arrived(owner, signal, daemon.sent) for owner in owners),
            "a push does not come",
        )


def push_to(runtime: Runtime, owner: int, unit: int, present: list[bool], minibatch: int) -> None:
    """A push without what the protocol waits for before it; to all owners where there is no other."""
    layout, grads = Layout.of(UNITS[unit], [NUMEL], present), gradients(99)
    parts = [Rows(grads.view(2, NUMEL), NUMEL)]
    if runtime._daemon is not None:
        runtime._daemon.push(unit, parts, layout, minibatch)
    elif runtime._transport.engine.has_streams:
        runtime._store.add_to_all(unit, parts, layout, minibatch)
    else:
        runtime._store.add(owner, unit, (grads[:NUMEL],), layout, minibatch)


def in_minibatch(runtime: Runtime, exchange: ThreadExchange, number: int) -> None:
    """Run all minibatches before ``number``, and push to one unit in that one, whose sums are then known."""
    for minibatch in range(1, number + 1):
        begin(runtime)
        for turn in range(2):  # one after the other: the order of an addition is in its last bit
            if exchange.rank == turn:
                runtime.scatter_accumulate(0, gradients(10 * minibatch + turn), present=[True, True])
                drain(runtime)
            exchange.all_gather(b"")
        if minibatch < number:
            runtime.finish()


def expected_sum(owner: int, minibatch: int) -> str:
    rows = [gradients(10 * minibatch + turn).view(2, -1)[owner] for turn in range(2)]
    return bits(rows[0] + rows[1])


# Fault test 19, where the client itself adds: in the three kinds of store

DIRECT = [
    pytest.param({"accumulate": "direct"}, id="shared"),
    pytest.param({"accumulate": "direct", "deterministic": True}, id="per-client"),
    pytest.param({"accumulate": "direct", "transport": "fake_cuda"}, id="atomic"),
]


@pytest.mark.parametrize("mode", DIRECT)
def test_a_push_of_another_minibatch_is_refused_and_changes_no_sum(mode: dict[str, Any]) -> None:
    """Late, early, and long past, to a unit that has been pushed and to one that has not; in minibatch 3."""

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        in_minibatch(runtime, exchange, 3)
        before = sums_of(runtime, 3)
        assert before == [(expected_sum(exchange.rank, 3), [True, True]), None]
        for number in (2, 4, 1, 0):
            for unit, flags in ((0, [True, True]), (1, [True])):
                words = f"for minibatch {number}, unit '{UNITS[unit].name}', refused by rank [01]"
                with pytest.raises(ProtocolError, match=words):
                    push_to(runtime, 1 - exchange.rank, unit, flags, number)
        exchange.all_gather(b"")
        assert sums_of(runtime, 3) == before
        runtime.finish()
        assert sums_of(runtime, 3) == before

    run_runtimes(2, UNITS, body, **mode)


@pytest.mark.parametrize("mode", DIRECT)
def test_a_push_that_comes_after_the_end_does_not_change_gradients_that_are_in_use(mode: dict[str, Any]) -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        in_minibatch(runtime, exchange, 1)
        runtime.finish()
        exchange.all_gather(b"")
        if exchange.rank == 1:
            with pytest.raises(ProtocolError, match="its sum of minibatch 1 is final"):
                push_to(runtime, 0, 0, [True, True], 1)
        exchange.all_gather(b"")
        assert sums_of(runtime, 1) == [(expected_sum(exchange.rank, 1), [True, True]), None]

    run_runtimes(2, UNITS, body, **mode)


# Fault test 19, where the owner's daemon adds: slots on one host and across hosts

DAEMONS = [
    pytest.param({"accumulate": "daemon"}, id="shm"),
    pytest.param({"accumulate": "daemon", "deterministic": True}, id="shm-deterministic"),
    pytest.param({"hosts": 2}, id="tcp"),
    pytest.param({"hosts": 2, "deterministic": True}, id="tcp-deterministic"),
    pytest.param({"accumulate": "daemon", "transport": "fake_cuda"}, id="cuda"),
    pytest.param({"hosts": 2, "transport": "fake_nvshmem"}, id="nvshmem"),
]


def daemon_of(runtime: Runtime) -> AccumulationDaemon:
    assert runtime._daemon is not None
    return runtime._daemon


def announce(runtime: Runtime) -> None:
    """Tell all daemons that rank 1's next slot has been filled."""
    runtime._transport.post(daemon_of(runtime)._posted, daemon=True)


def refused_by_daemon(mode: dict[str, Any], number: int, wrong: Callable[[Runtime], None], words: str) -> None:
    """In minibatch ``number`` rank 1 does ``wrong``: rank 0 fails with ``words``, rank 1 is told, no sum changes."""

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        in_minibatch(runtime, exchange, number)
        before = sums_of(runtime, number)
        assert before == [(expected_sum(exchange.rank, number), [True, True]), None]
        exchange.all_gather(b"")
        does_wrong(runtime, exchange, wrong)
        assert sums_of(runtime, number) == before
        assert_failed(runtime, exchange, words)

    run_runtimes(2, UNITS, body, **mode)


def does_wrong(runtime: Runtime, exchange: ThreadExchange, wrong: Callable[[Runtime], None]) -> None:
    """Rank 1 does; rank 0's daemon, or rank 1's own, must have refused it when this returns."""

    def is_refused() -> bool:
        return runtime.has_failed or runtime._transport.peers.abort_notice() is not None

    daemon = daemon_of(runtime)
    handled = daemon._handled[1]
    exchange.all_gather(b"")
    if exchange.rank == 1:
        wrong(runtime)
    else:
        until(lambda: is_refused() or daemon._handled[1] > handled, "the push does not come")
        assert is_refused(), "it was accepted"
    exchange.all_gather(b"")


def assert_failed(runtime: Runtime, exchange: ThreadExchange, words: str) -> None:
    """The minibatch ends with an error for both, and nobody gets a gradient. A wrong push is for all owners, so it is
    either daemon, or both, that has refused it."""
    until(lambda: runtime.has_failed or runtime._transport.peers.abort_notice() is not None, "nothing has failed")
    who = rf"(rank {exchange.rank} failed earlier|because rank {1 - exchange.rank})"
    with pytest.raises(OdcError, match=f"{who}.*ProtocolError: .*{words}"):
        runtime.finish()
    with pytest.raises(ProtocolError, match="is not final"):
        runtime.gradient(0)
    exchange.all_gather(b"")


@pytest.mark.parametrize("mode", DAEMONS)
@pytest.mark.parametrize("number", [1, 3, 0], ids=["late", "early", "never"])
def test_a_slot_of_another_minibatch_is_refused_and_changes_no_sum(mode: dict[str, Any], number: int) -> None:
    def push(runtime: Runtime) -> None:
        push_to(runtime, 0, 0, [True, True], number)

    words = f"push of rank 1 for minibatch {number}, unit 'pushed', refused by rank [01]"
    refused_by_daemon(mode, 2, push, words)


@pytest.mark.parametrize("mode", DAEMONS)
def test_a_slot_that_is_announced_twice_is_added_once(mode: dict[str, Any]) -> None:
    """Out of order too: what the second announcement was for has not come yet."""

    refused_by_daemon(mode, 2, announce, "rank 1")


@pytest.mark.parametrize("mode", DAEMONS)
def test_a_slot_that_is_announced_before_it_was_ever_filled_is_refused(mode: dict[str, Any]) -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        begin(runtime)
        does_wrong(runtime, exchange, announce)
        assert sums_of(runtime, 1) == [None, None]
        assert_failed(runtime, exchange, "rank 1")

    run_runtimes(2, UNITS, body, **mode)


@pytest.mark.parametrize("mode", [*DIRECT, *DAEMONS])
def test_a_push_that_comes_before_the_owner_has_published_the_unit_is_refused(mode: dict[str, Any]) -> None:
    """Rank 0 has not taken its gradients of minibatch 1 yet; a client that has not waited pushes for minibatch 2."""

    def push(runtime: Runtime) -> None:
        push_to(runtime, 0, 0, [True, True], 2)

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        in_minibatch(runtime, exchange, 1)
        runtime.finish()
        before = sums_of(runtime, 1)
        assert before == [(expected_sum(exchange.rank, 1), [True, True]), None]
        exchange.all_gather(b"")
        if runtime._daemon is not None:
            does_wrong(runtime, exchange, push)
        elif exchange.rank == 1:
            with pytest.raises(ProtocolError, match="push of rank 1 for minibatch 2, unit 'pushed', refused"):
                push(runtime)
        exchange.all_gather(b"")
        assert sums_of(runtime, 1) == before

    run_runtimes(2, UNITS, body, **mode)


class Recorder:
    """What one link sends, so that it can be sent again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._original = Link._send
        self._frames: list[tuple[Frame, bytes]] = []
        self._link: Link | None = None
        recorder = self

        def send(self: Link, frame: Frame, payload: Sequence[memoryview] = (), *rest: Any) -> None:
            if self is recorder._link:
                recorder._frames.append((frame, b"".join(payload)))
            recorder._original(self, frame, payload, *rest)

        monkeypatch.setattr(Link, "_send", send)

    def record(self, link: Link, action: Callable[[], None]) -> None:
        self._link = link
        action()
        self._link = None

    def repeat(self, link: Link) -> None:
        assert [frame.kind.name for frame, _ in self._frames] == ["WRITE", "WRITE", "POST"]
        for frame, payload in self._frames:
            self._original(link, frame, [memoryview(payload)])


@pytest.mark.parametrize("deterministic", [False, True], ids=["shared", "per-client"])
@pytest.mark.parametrize("later", [pytest.param(False, id="at once"), pytest.param(True, id="a minibatch later")])
def test_a_push_that_is_repeated_on_the_wire_is_added_once(
    later: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder(monkeypatch)

    def link_of(runtime: Runtime) -> Link:
        return runtime._transport._links.by_rank[0]  # type: ignore[union-attr]

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        begin(runtime)
        exchange.all_gather(b"")  # by hand nobody waits for the owner's sums to be open
        if exchange.rank == 1:
            recorder.record(link_of(runtime), lambda: push_to(runtime, 0, 0, [True, True], 1))
            drain(runtime)
        exchange.all_gather(b"")
        if later:
            runtime.finish()
            begin(runtime)
        before = sums_of(runtime, 1 + later)
        if exchange.rank == 0:
            assert before == [None if later else (bits(gradients(99)[:NUMEL]), [True, True]), None]
        does_wrong(runtime, exchange, lambda runtime: recorder.repeat(link_of(runtime)))
        assert sums_of(runtime, 1 + later) == before
        assert_failed(runtime, exchange, "rank 1")

    run_runtimes(2, UNITS, body, hosts=2, deterministic=deterministic)
