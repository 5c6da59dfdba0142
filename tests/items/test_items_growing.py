"""Layers 2 and 3. Ranks that exchange items, with routes that differ, and with rounds that need more memory.

Ranks that disagree must all be told, soon, before a byte is used; where all wait for all, nobody may wait for ever.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from faulty_jobs import a_round
from item_ranks import LIMIT_S, ONE_WAY, WAYS, reach, read_value, run_ranks_of
from process_ranks import across, run_ranks
from thread_ranks import ThreadExchange, values

import odc.transports._memfd
from odc import (
    AbortedError,
    ItemExchange,
    OdcError,
    ProtocolError,
    RuntimeConfig,
)
from odc.items.channel import Channel
from odc.setup.agreement import ProcessGroupExchange

# Ranks that disagree


def all_told(results: list[Any], *words: str) -> None:
    """Every rank has failed with one and the same cause, found by one of them at least."""
    kinds = [type(result) for result in results]
    assert ProtocolError in kinds, results
    assert set(kinds) <= {ProtocolError, AbortedError}, results
    for result in results:
        for word in words:
            assert word in str(result), f"{word!r} not in: {result}"


def differing(items: ItemExchange, exchange: ThreadExchange, first: int, mine: Any, theirs: Any, read: int) -> None:
    """From round ``first`` on rank 1 has other routes; in round ``read`` it reads item 1."""
    for number in range(1, 6):
        one = items.begin("c", theirs if exchange.rank == 1 and number == first else mine)
        for part, places in enumerate(one.layout.parts):
            one.publish(part, [torch.zeros(place.num_bytes, dtype=torch.uint8) for place in places])
        if exchange.rank == 1 and number == read:
            one.read(1, torch.full((8,), 3, dtype=torch.uint8))
        one.done()
        exchange.all_gather(b"")


PLAIN: Any = [[[(1, 8, 1)]], [], [[(9, 8, 2)]]]


@WAYS
@pytest.mark.parametrize(
    ("first", "theirs"),
    [
        (2, [[[(1, 8, 1), (2, 8, 1)]], [], [[(9, 8, 2)]]]),  # one item more, in the round that is read
        (1, [[[(1, 8, 1)]], [], [[(9, 9, 2)]]]),  # of other ranks only, in the round before
        (1, [[[(1, 8, 1)], [(2, 8, 1)]], [], [[(9, 8, 2)]]]),  # a part more: it waits for more than there will ever be
        (1, [[[]], [], [[(1, 8, 2)]]]),  # a part less: it would read what was there before
    ],
)
def test_other_routes_are_found_before_a_byte_is_used(first: int, theirs: Any, hosts: int) -> None:
    started = time.monotonic()
    results = run_ranks_of(
        3, lambda items, exchange: differing(items, exchange, first, PLAIN, theirs, 2), hosts=hosts, timeout_s=60
    )
    told = [r for r in results if isinstance(r, OdcError)]  # rank 2 reads nothing, and may have been in all_gather
    assert isinstance(results[1], ProtocolError)
    for result in told:
        for word in ("rank 1", "rank 0", "round 2 of 'c'", "different routes", "No byte of it was used"):
            assert word in str(result)
    assert time.monotonic() - started < LIMIT_S


def test_a_rank_far_ahead_that_never_thought_to_be_read_is_found() -> None:
    """Rank 1 believes that it reads from rank 0, which goes on, round after round, for nobody."""
    ahead = threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", [[[(1, 8, exchange.rank)]], []])
        if exchange.rank == 1:
            reach(ahead)
            one.read(1, torch.zeros(1, dtype=torch.int64))
        for _ in range(9):
            one.publish(0, [torch.tensor([1])])
            one.done()
            one = items.begin("c", [[[(1, 8, 0)]], []])
        ahead.set()
        while True:
            items.check()
            time.sleep(0.001)

    all_told(run_ranks_of(2, body), "rank 1", "rank 0", "round 1 of 'c'", "that rank is at round 9 already")


# Growing


@WAYS
def test_a_round_that_needs_more_grows_on_all_ranks_while_older_ones_are_read(hosts: int) -> None:
    sizes = [10, 1000, 20, 5000, 6000, 30]

    def body(items: ItemExchange, exchange: ThreadExchange) -> list[int]:
        rounds, memory = [], []
        for number, size in enumerate(sizes, start=1):
            routes = [[[(1, size, 1)]], [[(2, 8, 0)]]]
            if number > 2:
                read_and_end(rounds[number - 3], exchange.rank)
            rounds.append(items.begin("c", routes))
            bytes_of = [size, 8][exchange.rank]
            rounds[-1].publish(0, [torch.full((bytes_of,), number, dtype=torch.uint8)])
            memory.append(items.memory()["c"])
        for one in rounds[-2:]:
            read_and_end(one, exchange.rank)
        exchange.all_gather(b"")
        items.begin("c", [[], []]).done()
        return [*memory, items.memory()["c"]]

    def read_and_end(one: Any, rank: int) -> None:
        out = torch.zeros([8, sizes[one.number - 1]][rank], dtype=torch.uint8)
        one.read([2, 1][rank], out)
        assert out.eq(one.number).all()
        one.done()

    for memory in values(run_ranks_of(2, body, capacity_bytes=64, hosts=hosts)):
        assert memory[0] == 2 * 64
        assert max(memory) <= 2 * (64 + 1024 + 8192)
        assert memory[-1] == 2 * 8192  # what was too small is given back


@WAYS
def test_memory_before_a_growth_stays_until_the_last_reader_is_done(hosts: int) -> None:
    """Rank 1 reads round 1 when rank 0 has grown for round 2, has done all that it has to in round 1, and looked."""
    given_up = threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> int:
        first = items.begin("c", ONE_WAY)
        if exchange.rank == 0:
            first.publish(0, [torch.tensor([42])])
        second = items.begin("c", [[[(7, 1 << 14, 0)]], []])
        if exchange.rank == 0:
            second.publish(0, [torch.zeros(1 << 11, dtype=torch.int64)])
            first.done()
            second.done()
            given_up.set()
            return 42
        reach(given_up)
        found = read_value(first)
        first.done()
        second.done()
        return found

    assert values(run_ranks_of(2, body, hosts=hosts)) == [42, 42]


def test_memory_that_is_not_there_is_refused_by_name_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    original = odc.transports._memfd.require_available

    def require_available(num_bytes: int, label: str) -> None:
        original(num_bytes if num_bytes < 1 << 30 else 1 << 60, label)

    monkeypatch.setattr(odc.transports._memfd, "require_available", require_available)

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        items.begin("c", [[], [[(1, 1 << 30, 0)]]])

    for result in run_ranks_of(2, body, channels=("a", "c")):
        assert isinstance(result, OdcError)
        assert "round 1 of 'c' takes 1073741824 bytes on rank 1" in str(result)
        assert "the channel has to grow from 4096 to 1073741824 bytes" in str(result)
        assert "are available" in str(result)


LARGE: Any = [[[(1, 1 << 14, 0)]], [[(2, 8, 0)]]]
SMALL: Any = [[[(1, 8, 0)]], [[(2, 8, 0)]]]


def test_one_rank_that_would_grow_and_another_that_would_not_fail_at_once() -> None:
    """Rank 1 has begun the round, and waits for what rank 0 will not publish; both say what is wrong."""
    routes: Any = [[[(1, 8, 1)]], []]
    grows: Any = [[[(1, 1 << 14, 1)]], []]

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", grows if exchange.rank == 0 else routes)
        one.read(1, torch.zeros(1, dtype=torch.int64))

    all_told(run_ranks_of(2, body, timeout_s=60), "round 1 of 'c'", "different routes", "rank 0", "rank 1")


def test_ranks_that_come_to_two_growths_in_different_orders_fail_at_once() -> None:
    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        for channel in ("c", "d") if exchange.rank == 0 else ("d", "c"):
            items.begin(channel, LARGE)

    results = run_ranks_of(2, body, channels=("c", "d"), timeout_s=60)
    all_told(results, "for all ranks to come there", "in the same order", "rank 0", "rank 1")


def test_a_read_of_a_rank_that_waits_for_this_one_to_grow_fails_at_once() -> None:
    """Rank 1 reads in one channel what rank 0 publishes after it has begun, and so grown, another one."""

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", ONE_WAY)
        if exchange.rank == 1:
            read_value(one)
        items.begin("d", LARGE)

    results = run_ranks_of(2, body, channels=("c", "d"), timeout_s=60)
    all_told(results, "item 7 (8 bytes) in part 0 of round 1 of 'c'", "begin('d')")


def test_without_the_look_for_growths_such_ranks_would_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the limit on waits in a circle."""
    monkeypatch.setattr(Channel, "is_growing_at", lambda *_: False)
    ended = threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", ONE_WAY)
        if exchange.rank == 1:
            threading.Timer(0.5, lambda: (ended.set(), items.abort(OdcError("half a second was over")))).start()
            read_value(one)
        items.begin("d", LARGE)

    results = run_ranks_of(2, body, channels=("c", "d"), timeout_s=60)
    assert ended.is_set()
    assert all("half a second was over" in str(result) for result in results), results


def test_who_grows_after_it_has_published_is_no_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 looks whether the item is there before rank 0 publishes it, and whether rank 0 grows when it does."""
    original, looks = Channel.is_growing_at, threading.Event()

    def is_growing_at(self: Channel, rank: int) -> bool:
        if self.name == "d" and rank == 0:
            looks.set()
            ends = time.monotonic() + LIMIT_S
            while not original(self, rank):
                assert time.monotonic() < ends, "rank 0 has not come to its growth"
        return original(self, rank)

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        one = items.begin("c", ONE_WAY)
        if exchange.rank == 0:
            reach(looks)
            one.publish(0, [torch.tensor([42])])
        else:
            assert read_value(one) == 42
            monkeypatch.setattr(Channel, "is_growing_at", original)
        items.begin("d", LARGE)

    monkeypatch.setattr(Channel, "is_growing_at", is_growing_at)
    values(run_ranks_of(2, body, channels=("c", "d")))


# In processes


def grow(rank: int, world_size: int) -> tuple[str, dict[str, int]]:
    """Rounds of more and more bytes; the ranks come at different times."""
    config = RuntimeConfig.from_environment()
    with ItemExchange.create(ProcessGroupExchange(), ["outputs"], config, capacity_bytes=64) as items:
        for number, numel in enumerate([1, 100, 50, 10_000, 100, 300_000, 10], start=1):
            time.sleep(0.01 * rank)
            a_round(items, rank, world_size, number, numel)
        return items.transport_name, items.memory()


@pytest.mark.parametrize(("hosts", "name"), [(1, "shm"), (2, "tcp")])
def test_processes_grow_together(hosts: int, name: str) -> None:
    for transport, memory in run_ranks(3, across, hosts, grow):
        assert transport == name
        assert memory["outputs"] >= 2 * 2 * 4 * 300_000
