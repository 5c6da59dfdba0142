"""Layer 2: ranks as threads. An exchange of items and the runtime beside it; what is counted.

What fails in one is heard in the other, and a wait in one is seen in the other.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from item_ranks import LIMIT_S, ONE_WAY, WAYS, config_of, reach, read_value, run_ranks_of
from thread_ranks import ThreadExchange, run_threads, values
from watching import until

from odc import (
    AbortedError,
    ItemExchange,
    OdcError,
    PeerClosedError,
    Runtime,
)
from odc.transports._peers import PeerState

# Failures, and two contexts beside each other


def test_what_fails_on_one_rank_ends_the_others_waits() -> None:
    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", ONE_WAY)
        if exchange.rank == 0:
            raise RuntimeError("the encoder is out of memory")
        read_value(one)

    first, second = run_ranks_of(2, body)
    assert isinstance(first, RuntimeError)
    assert isinstance(second, AbortedError)
    assert "rank 0" in str(second)
    assert "the encoder is out of memory" in str(second)


@pytest.mark.parametrize("fails", ["items", "runtime"])
def test_what_fails_in_one_context_is_heard_in_the_one_beside(fails: str) -> None:
    def body(exchange: ThreadExchange) -> None:
        config = config_of(exchange)
        with (
            Runtime.create(exchange, [], config) as runtime,
            ItemExchange.create(exchange, ["c"], config, capacity_bytes=64, beside=runtime) as items,
        ):
            if exchange.rank == 0:
                (items if fails == "items" else runtime).abort(OdcError("it went wrong"))
                time.sleep(0.2)
                return
            if fails == "runtime":
                read_value(items.begin("c", ONE_WAY))
            else:
                runtime.begin()
                runtime.finish()

    _, result = run_threads(2, body, 60)
    assert isinstance(result, AbortedError), result
    assert "it went wrong" in str(result)


@WAYS
def test_what_a_rank_has_published_is_read_when_it_has_closed(hosts: int) -> None:
    """And what it has not published is waited for by nobody: it is named."""
    routes = [[[(7, 8, 1)], [(8, 8, 1)]], []]

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", routes)
        if exchange.rank == 0:
            one.publish(0, [torch.tensor([42])])
            return
        peer = items._transport.peers.by_rank[0]
        until(lambda: peer.state is PeerState.CLOSED, "rank 0 has not closed", LIMIT_S)
        assert read_value(one, 7) == 42
        read_value(one, 8)

    first, second = run_ranks_of(2, body, hosts=hosts)
    assert first is None
    assert isinstance(second, PeerClosedError)
    assert "item 8 (8 bytes) in part 1 of round 1 of 'c'" in str(second)
    assert "rank 0" in str(second)


@WAYS
@pytest.mark.parametrize("closes_first", ["runtime", "items"])
def test_contexts_beside_each_other_end_in_any_order(closes_first: str, hosts: int) -> None:
    def body(exchange: ThreadExchange) -> None:
        config = config_of(exchange, hosts=hosts)
        runtime = Runtime.create(exchange, [], config)
        items = ItemExchange.create(exchange, ["c"], config, capacity_bytes=64, beside=runtime)
        for closed in (None, runtime, items) if closes_first == "runtime" else (None, items, runtime):
            if closed is not None:
                closed.close()
            exchange.all_gather(b"")
            if closed is not items and not items._closed:
                one = items.begin("c", ONE_WAY)
                if exchange.rank == 0:
                    time.sleep(0.02)
                    one.publish(0, [torch.tensor([42])])
                else:
                    assert read_value(one) == 42
                one.done()
            if closed is not runtime and not runtime._closed:
                runtime.begin()
                time.sleep(0.02 * exchange.rank)
                runtime.finish()

    values(run_threads(2, body, 60))


@pytest.mark.parametrize("first", ["runtime", pytest.param("items", marks=pytest.mark.extended)])
def test_who_waits_in_one_context_is_not_taken_for_silent_in_the_one_beside(first: str) -> None:
    """Rank 0 waits in one for rank 1, which waits in the other for rank 2, for longer than the limit; rank 2 works, and
    shows it."""
    limit_s = 0.8
    for_runtime: Any = [[], [], [[(1, 8, 1)]]]
    for_items: Any = [[], [[(1, 8, 0)]], []]

    def work(runtime: Runtime) -> None:
        ends = time.monotonic() + 2.5 * limit_s
        while time.monotonic() < ends:
            time.sleep(limit_s / 10)
            runtime._waiter.job.own.tick()

    def body(exchange: ThreadExchange) -> None:
        config = config_of(exchange, timeout_s=limit_s)
        with (
            Runtime.create(exchange, [], config) as runtime,
            ItemExchange.create(exchange, ["c"], config, capacity_bytes=64, beside=runtime) as items,
        ):
            exchange.all_gather(b"")
            one = items.begin("c", for_runtime if first == "runtime" else for_items)
            if exchange.rank == 2:
                work(runtime)
            if first == "runtime":
                if exchange.rank == 2:
                    one.publish(0, [torch.tensor([4])])
                if exchange.rank == 1:
                    assert read_value(one, 1) == 4
                runtime.begin()
                runtime.finish()
            elif exchange.rank == 0:
                assert read_value(one, 1) == 4
            elif exchange.rank == 1:
                count = runtime._transport.count
                runtime._waiter.wait(lambda: [] if count(2, 0) else [2], lambda: "the work of rank 2")
                one.publish(0, [torch.tensor([4])])
            else:
                runtime._transport.post(0)
            one.done()
            exchange.all_gather(b"")

    values(run_threads(3, body, 60))


# Observation


def test_bytes_waits_and_spans_are_counted_by_rank() -> None:
    begun = threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> Any:
        timeline = items.start_timeline()
        one = items.begin("c", [[[(1, 24, 1), (2, 8, 0)]], [[(3, 16, 0)]]])
        if exchange.rank == 0:
            reach(begun)
            time.sleep(0.05)
            one.publish(0, [torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)])
            read_value(one, 2)
        else:
            one.publish(0, [torch.zeros(2, dtype=torch.int64)])
            begun.set()
            one.read(1, torch.zeros(3, dtype=torch.int64))
        one.done()
        return items.stats, {span.kind for span in timeline.spans}, timeline.spans

    (first, kinds, _), (second, second_kinds, spans) = values(run_ranks_of(2, body))
    assert (first.published_bytes, first.read_bytes) == ([8, 24], [8, 0])
    assert (second.published_bytes, second.read_bytes) == ([16, 0], [24, 0])
    assert second.waited_s[0] >= 0.04
    assert second.waited_s[1] == 0
    assert second.read_s >= second.wait_s >= 0.04
    assert first.waits == 0
    assert (kinds, second_kinds) == ({"publish", "read"}, {"publish", "read", "wait"})
    assert [(span.kind, span.arguments) for span in spans] == [
        ("publish", {"bytes": 16}),
        ("wait", {"peer": 0}),
        ("read", {"bytes": 24}),
    ]
    labels = {span.kind: span.label for span in spans}
    assert labels["wait"] == "item 1 (24 bytes) in part 0 of round 1 of 'c'"
    assert labels["publish"] == "part 0 of round 1 of 'c'"
    assert second.as_dict()["read_bytes"] == [24, 0]
