"""Layer 2: ranks as threads. Items where work happens later than the call: on streams.

The streams are those of ``bench/fake``, which lag behind the host at random and run beside each other; the transport
and the exchange of items are the real ones. As in training a rank encodes on some streams, reads on others, and says
that it is done on another one still. The last tests take one order away at a time. Each holds a stream until the damage
is done, so that it is certain to be seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from item_ranks import LIMIT_S, ONE_WAY, Case, Violation, cases, reach, run_case, run_ranks_of
from thread_ranks import ThreadExchange, values

from odc import ItemExchange
from odc.bench.fake.cuda import FakeEngine
from odc.items.channel import Channel, Readers, Signal

pytestmark = pytest.mark.usefixtures("fakes")

NEAR, FAR = {"transport": "fake_cuda_streams"}, {"transport": "fake_nvshmem_streams", "hosts": 2}
A_MOMENT_S = 0.3  # for a stream that nothing holds back
WAYS = pytest.mark.parametrize("way", [NEAR, FAR], ids=["cuda_ipc", "nvshmem"])
NEAR_FIRST = pytest.mark.parametrize(
    "way", [pytest.param(NEAR, id="cuda_ipc"), pytest.param(FAR, id="nvshmem", marks=pytest.mark.extended)]
)


@settings(max_examples=12, deadline=None, print_blob=True)
@given(cases("fake_cuda_streams"))
def test_streams_see_what_was_published_for_them(case: Case) -> None:
    run_case(case)


@settings(max_examples=5, deadline=None, print_blob=True)
@given(cases("fake_nvshmem_streams", least_hosts=2))
def test_so_they_do_across_hosts(case: Case) -> None:
    run_case(case)


class Gate:
    """Holds a stream until it is opened, or the rank has failed: its end waits for its streams."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine, self._open = engine, threading.Event()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *error: object) -> None:
        self.open()

    def hold(self) -> None:
        """The current stream, from here on."""
        self._engine.await_condition(partial(self._open.wait, 0.05), "a gate to be opened")

    def open(self) -> None:
        self._open.set()


def engine_of(items: ItemExchange) -> FakeEngine:
    engine = items._transport.engine
    assert isinstance(engine, FakeEngine)
    return engine


def on_stream(engine: FakeEngine, name: str, values_of: Sequence[torch.Tensor]) -> list[list[float]]:
    """What tensors hold when the stream of this name has come so far."""
    with engine.on(name):
        found: list[list[float]] = []
        engine.run(lambda: found.extend(one.tolist() for one in values_of))
        assert engine._stream(name).event().wait(LIMIT_S)
    return found


# Adversaries. ``damage`` is set when what must not happen has had its time. With all orders in place it would never be,
# so the tests that nothing breaks set it before, and a moment has to do.


def late_publication(items: ItemExchange, exchange: ThreadExchange, damage: threading.Event) -> None:
    """Rank 0's stream comes to its copy of part 0 when rank 1's stream is through with its read. Part 1 comes from
    another stream, which nothing holds."""
    engine = engine_of(items)
    one = items.begin("c", [[[(7, 8, 1)], [(8, 8, 1)]], []])
    if exchange.rank == 0:
        with Gate(engine) as gate:
            with engine.on("encode"):
                gate.hold()
                one.publish(0, [torch.tensor([42])])
            with engine.on("encode too"):
                one.publish(1, [torch.tensor([43])])
            reach(damage)
    else:
        out = torch.tensor([-1])
        with engine.on("read"):
            one.read(7, out)
        found = on_stream(engine, "read", [out])
        damage.set()
        if found != [[42]]:
            raise Violation(f"read {found}")
    one.done()


def late_read(
    items: ItemExchange,
    exchange: ThreadExchange,
    damage: threading.Event,
    streams: Callable[[int], tuple[str, str]] = lambda _: ("read", "step"),
    rounds: Sequence[int] = (1, 2, 3),
) -> None:
    """Rank 1's stream comes to its read of round 1 when rank 0's stream is through with its copies of all rounds, of
    which the last goes where round 1 was. Rank 1's host has said long before that it is done.

    Args:
        streams: of rank 1, for a round: that reads, and that is the current one when it says so.
        rounds: in which rank 0 publishes anything.
    """
    engine = engine_of(items)
    outs = {number: torch.tensor([-1]) for number in rounds}
    with Gate(engine) as gate:
        for number in range(1, rounds[-1] + 1):
            reading, ending = streams(number)
            one = items.begin("c", ONE_WAY if number in rounds else [[], []])
            if number in rounds and exchange.rank == 0:
                with engine.on("encode"):
                    one.publish(0, [torch.tensor([number])])
            elif number in rounds:
                with engine.on(reading):
                    if number == 1:
                        gate.hold()
                    one.read(7, outs[number])
            with engine.on(ending):
                one.done()
        if exchange.rank == 0:
            await_copies(engine, damage)
        exchange.all_gather(b"")
    found = [on_stream(engine, streams(number)[0], [outs[number]]) for number in rounds] if exchange.rank else []
    exchange.all_gather(b"")
    if found != [[[number]] for number in rounds if exchange.rank]:
        raise Violation(f"read {found}")


def await_copies(engine: FakeEngine, damage: threading.Event) -> None:
    """Until the stream that publishes has made its copies, or has had the time to."""
    is_through = engine._stream("encode").event().wait(A_MOMENT_S if damage.is_set() else LIMIT_S)
    assert is_through or damage.is_set()
    damage.set()


def late_read_on_streams_of_its_own(items: ItemExchange, exchange: ThreadExchange, damage: threading.Event) -> None:
    """As :func:`late_read`, each round on another stream."""
    late_read(items, exchange, damage, lambda number: (f"read {number}", f"read {number}"))


def late_read_long_ago(items: ItemExchange, exchange: ThreadExchange, damage: threading.Event) -> None:
    """As :func:`late_read`; round 3, which would go there, has nothing of rank 0's."""
    late_read(items, exchange, damage, rounds=(1, 2, 5))


def late_read_in_far_rounds(items: ItemExchange, exchange: ThreadExchange, damage: threading.Event) -> None:
    """As :func:`late_read_long_ago`, more rounds ago than are remembered for other ends."""
    late_read(items, exchange, damage, rounds=(1, 11))


def own_items(
    items: ItemExchange, exchange: ThreadExchange, damage: threading.Event, rounds: Sequence[int] = (1, 2, 3)
) -> None:
    """As :func:`late_read`, of a rank's own items."""
    engine = engine_of(items)
    outs = [torch.tensor([-1]) for _ in rounds]
    waiting = iter(outs)
    with Gate(engine) as gate:
        for number in range(1, rounds[-1] + 1):
            one = items.begin("c", [[[(7, 8, 0)]] if number in rounds else []])
            if number in rounds:
                with engine.on("encode"):
                    one.publish(0, [torch.tensor([number])])
                with engine.on("read"):
                    if number == 1:
                        gate.hold()
                    one.read(7, next(waiting))
            with engine.on("step"):
                one.done()
        await_copies(engine, damage)
    found = on_stream(engine, "read", outs)
    if found != [[number] for number in rounds]:
        raise Violation(f"read {found}")


def own_items_long_ago(items: ItemExchange, exchange: ThreadExchange, damage: threading.Event) -> None:
    """As :func:`own_items`, with a round of nothing between."""
    own_items(items, exchange, damage, rounds=(1, 2, 5))


RANKS = {
    late_publication: 2,
    late_read: 2,
    late_read_on_streams_of_its_own: 2,
    late_read_long_ago: 2,
    late_read_in_far_rounds: 2,
    own_items: 1,
    own_items_long_ago: 1,
}


def run(body: Callable[..., None], damage: threading.Event, way: dict[str, Any]) -> None:
    way = way if RANKS[body] > 1 else {**way, "hosts": 1}
    values(run_ranks_of(RANKS[body], lambda items, exchange: body(items, exchange, damage), **way))


@NEAR_FIRST
@pytest.mark.parametrize("body", RANKS)
def test_slow_streams_alone_break_nothing(body: Callable[..., None], way: dict[str, Any]) -> None:
    damage = threading.Event()
    damage.set()
    run(body, damage, way)


@WAYS
@pytest.mark.parametrize(
    ("body", "signal"),
    [
        (late_publication, Signal.PUBLISHED),
        (late_read, Signal.DONE),
        (late_read_long_ago, Signal.DONE),
        (late_read_in_far_rounds, Signal.DONE),
        (own_items, Signal.DONE),
        (own_items_long_ago, Signal.DONE),
    ],
)
def test_without_the_order_of_a_signal_wrong_bytes_are_read(
    body: Callable[..., None], signal: Signal, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Channel.order_after

    def order_after(self: Channel, ranks: Sequence[int], index: Signal, count: int) -> None:
        if index is not signal:
            original(self, ranks, index, count)

    monkeypatch.setattr(Channel, "order_after", order_after)
    with pytest.raises(Violation):
        run(body, threading.Event(), way)


@WAYS
@pytest.mark.parametrize("body", [late_read_long_ago, late_read_in_far_rounds, own_items_long_ago])
def test_whoever_forgets_readers_in_a_round_of_nothing_overwrites_what_they_read(
    body: Callable[..., None], way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Channel.order_after_done

    def of_two_rounds_ago(self: Channel, readers: Readers) -> None:
        if readers.round == self.begun - 2:
            original(self, readers)

    monkeypatch.setattr(Channel, "order_after_done", of_two_rounds_ago)
    with pytest.raises(Violation):
        run(body, threading.Event(), way)


@WAYS
@pytest.mark.parametrize(
    ("body", "order"),
    [
        (late_publication, "published"),  # the second post would overtake the first
        (late_read_on_streams_of_its_own, "done"),  # likewise
        (late_read, "read by"),  # done would not wait for the stream that reads
        (own_items, "read by"),
    ],
)
def test_without_an_order_of_this_ranks_own_streams_wrong_bytes_are_read(
    body: Callable[..., None], order: str, way: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Channel.take
    monkeypatch.setattr(
        Channel, "take", lambda self, what: nullcontext() if what.startswith(order) else original(self, what)
    )
    with pytest.raises(Violation):
        run(body, threading.Event(), way)
