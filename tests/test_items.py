"""Layers 1 and 2: ranks as threads. Items that ranks read from each other, under random routes, orders and delays.

Every read must see exactly what its producer published for it. Then one wait is taken away at a time; an adversary that
does not go on before the damage is done makes it certain that the property then fails.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from item_ranks import Case, Violation, cases, config_of, run_case, run_ranks_of
from thread_ranks import ThreadExchange, run_threads, values

import odc.transports._memfd
from odc import AbortedError, Item, ItemExchange, MisuseError, OdcError, ProtocolError, Runtime, RuntimeConfig
from odc.items import Channel
from odc.routes import Layout

LIMIT_S = 20.0


@settings(max_examples=40, deadline=None, print_blob=True)
@given(cases())
def test_every_read_sees_what_was_published_for_it(case: Case) -> None:
    run_case(case)


@settings(max_examples=12, deadline=None, print_blob=True)
@given(cases(least_hosts=2))
def test_so_it_does_across_hosts(case: Case) -> None:
    run_case(case)


# What is taken away is seen. Each adversary waits until the damage is done.


def reach(event: threading.Event) -> None:
    assert event.wait(LIMIT_S), "the other rank has not come so far"


ONE_WAY = [[[(7, 8, 1)]], []]  # rank 0 publishes 8 bytes for rank 1


def read_value(one: Any, item: int = 7) -> int:
    out = torch.full((1,), -1)
    one.read(item, out)
    return int(out)


def early_read(items: ItemExchange, exchange: ThreadExchange, has_read: threading.Event) -> None:
    """Rank 0 publishes when rank 1 has read, or, if ``has_read`` was set before, at once."""
    one = items.begin("c", ONE_WAY)
    if exchange.rank == 0:
        reach(has_read)
        one.publish(0, [torch.tensor([42])])
    else:
        found = read_value(one)
        has_read.set()
        if found != 42:
            raise Violation(f"read {found}")
    one.done()


def overwritten(items: ItemExchange, exchange: ThreadExchange, published: threading.Event) -> None:
    """Rank 1 reads round 1 when rank 0 has published round 3, or, if ``published`` was set before, at once."""
    rounds = [items.begin("c", ONE_WAY)]
    if exchange.rank == 0:
        rounds[0].publish(0, [torch.tensor([1])])
        for number in (2, 3):
            rounds[-1].done()
            rounds.append(items.begin("c", ONE_WAY))
            rounds[-1].publish(0, [torch.tensor([number])])
        published.set()
    else:
        reach(published)
        found = read_value(rounds[0])
        if found != 1:
            raise Violation(f"read {found}")
        rounds[0].done()


WAYS = pytest.mark.parametrize("hosts", [1, 2])


@WAYS
def test_the_adversaries_alone_break_nothing(hosts: int) -> None:
    for body in (early_read, overwritten):
        begun = threading.Event()
        begun.set()
        values(run_ranks_of(2, lambda items, exchange: body(items, exchange, begun), hosts=hosts))  # noqa: B023


@WAYS
@pytest.mark.parametrize(("body", "wait"), [(early_read, "has_published"), (overwritten, "is_done")])
def test_without_one_wait_wrong_bytes_are_read(
    body: Any, wait: str, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, wait, lambda *_: True)
    damage = threading.Event()
    with pytest.raises(Violation):
        values(run_ranks_of(2, lambda items, exchange: body(items, exchange, damage), hosts=hosts))


def five_rounds(items: ItemExchange, exchange: ThreadExchange, ahead: threading.Event) -> None:
    """Rank 1 reads round 1 when rank 0 has begun a fifth, for which its words of round 1 must go; or, if ``ahead`` was
    set before, at once."""
    one = items.begin("c", ONE_WAY)
    if exchange.rank == 0:
        one.publish(0, [torch.tensor([1])])
        for _ in range(2, 6):
            one.done()
            one = items.begin("c", [[], []])
        ahead.set()
    else:
        reach(ahead)
        assert read_value(one) == 1
        one.done()


def test_words_of_a_round_stay_until_its_readers_have_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = threading.Event()
    ahead.set()
    values(run_ranks_of(2, lambda items, exchange: five_rounds(items, exchange, ahead)))
    monkeypatch.setattr(Channel, "is_done", lambda *_: True)
    ahead.clear()
    with pytest.raises(ProtocolError, match="that rank is at round 5 already"):
        values(run_ranks_of(2, lambda items, exchange: five_rounds(items, exchange, ahead)))


# Who needs nothing of a slow rank does not wait for it


@WAYS
def test_what_a_slow_producer_has_not_published_holds_up_those_only_that_read_it(hosts: int) -> None:
    """Rank 1 publishes for rank 2, when rank 0 is through, and rank 2 has read what it reads from rank 0."""
    routes = [[[(1, 8, 2)]], [[(2, 8, 2)]], [[(3, 8, 0)]]]
    through, read_first = threading.Event(), threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> int:
        one = items.begin("c", routes)
        if exchange.rank == 1:
            reach(through)
            reach(read_first)
        one.publish(0, [torch.tensor([10 + exchange.rank])])
        if exchange.rank == 0:
            assert read_value(one, 3) == 12
        if exchange.rank == 2:
            assert read_value(one, 1) == 10
            read_first.set()
            assert read_value(one, 2) == 11
        one.done()
        if exchange.rank == 0:
            through.set()
        return 0

    values(run_ranks_of(3, body, hosts=hosts))


@WAYS
def test_ranks_that_need_nothing_of_one_that_does_not_even_begin_go_on_without_end(hosts: int) -> None:
    finished = threading.Event()
    routes = [[[(1, 8, 1)]], [[(2, 8, 0)]], [[(3, 8, 2)]]]

    def body(items: ItemExchange, exchange: ThreadExchange) -> int:
        if exchange.rank == 2:
            reach(finished)
        for number in range(20):
            one = items.begin("c", routes)
            one.publish(0, [torch.tensor([number])])
            assert read_value(one, {0: 2, 1: 1, 2: 3}[exchange.rank]) == number
            one.done()
        if exchange.rank == 0:
            finished.set()
        return items.stats.waits if exchange.rank == 2 else 0

    assert values(run_ranks_of(3, body, hosts=hosts))[2] == 0


def test_a_slow_channel_does_not_hold_up_another_one() -> None:
    """Rank 0's audio comes when rank 1 has been through ten rounds of vision."""
    seen = threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        audio = items.begin("audio", ONE_WAY)
        for number in range(10):
            vision = items.begin("vision", ONE_WAY)
            if exchange.rank == 0:
                vision.publish(0, [torch.tensor([number])])
            else:
                assert read_value(vision) == number
            vision.done()
        if exchange.rank == 0:
            reach(seen)
            audio.publish(0, [torch.tensor([77])])
        else:
            seen.set()
            assert read_value(audio) == 77
        audio.done()

    values(run_ranks_of(2, body, channels=("vision", "audio")))


# Shapes and sizes


def test_one_rank_reads_its_own_and_waits_for_nobody() -> None:
    def body(items: ItemExchange, exchange: ThreadExchange) -> int:
        for number in range(4):
            one = items.begin("c", [[[], [(1, 0, 0), (2, 8 << number, 0)], []]])
            with pytest.raises(
                MisuseError, match=r"item 2 \(\d+ bytes\) in part 1 of round . of 'c' is this rank's own"
            ):
                one.read(2, torch.empty(1 << number, dtype=torch.int64))
            one.publish(0, [])
            one.publish(1, [torch.empty(0, 5), torch.arange(1 << number)])
            out = torch.empty(1 << number, dtype=torch.int64)
            one.read_many([1, 2], [torch.empty(3, 0), out])
            assert torch.equal(out, torch.arange(1 << number))
            one.done()
        return items.stats.waits

    assert values(run_ranks_of(1, body, capacity_bytes=0)) == [0]


@WAYS
def test_tensors_of_any_shape_and_kind_travel_and_nothing_is_tracked(hosts: int) -> None:
    tensors = [
        torch.arange(6.0).reshape(2, 3).t(),  # not contiguous
        torch.tensor(3.5),  # without a dimension
        torch.tensor([True, False]),
        torch.randn(3, requires_grad=True),
        torch.tensor([1 + 2j]),
        torch.ones(2, 1, dtype=torch.bfloat16).expand(2, 4),
        torch.empty(0, 7),
    ]
    routes = [[[Item(number, tensor.nbytes, 1) for number, tensor in enumerate(tensors)]], []]

    def body(items: ItemExchange, exchange: ThreadExchange) -> list[torch.Tensor]:
        one = items.begin("c", routes)
        outs = [torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        if exchange.rank == 0:
            one.publish(0, tensors)
        else:
            outs[3].requires_grad_()
            one.read_many(range(len(tensors)), outs)
        one.done()
        return outs

    found = values(run_ranks_of(2, body, hosts=hosts))[1]
    for tensor, out in zip(tensors, found, strict=True):
        assert torch.equal(tensor, out)
        assert out.grad_fn is None


def test_what_lies_side_by_side_on_another_host_travels_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a rank reads of one part, in whatever order the routes and the reader have it; where it leaves something
    out, two journeys."""
    sizes = [8, 24, 8, 64, 8]
    part = [Item(number, size, consumer) for number, size in enumerate(sizes) for consumer in (1,)]
    mixed = [row for item in part for row in (item, Item(item.id + 10, 8, 0))]

    def body(items: ItemExchange, exchange: ThreadExchange) -> list[int]:
        reads = []
        original = items._transport.read
        monkeypatch.setattr(items._transport, "read", lambda *args: (reads.append(args[0].nbytes), original(*args)))
        for wanted in ([3, 0, 4, 1, 2], [4, 1, 0, 3]):
            one = items.begin("c", [[mixed], []])
            if exchange.rank == 0:
                one.publish(0, [torch.full((item.num_bytes,), item.id, dtype=torch.uint8) for item in mixed])
            else:
                outs = [torch.zeros(sizes[number] // 4, dtype=torch.int32) for number in wanted]
                one.read_many(wanted, outs)
                assert all(out.view(torch.uint8).eq(n).all() for n, out in zip(wanted, outs, strict=True))
            one.done()
        return reads

    assert values(run_ranks_of(2, body, hosts=2))[1] == [4 * 64 + 8, 64 + 24, 64 + 8]


def test_an_item_without_bytes_is_waited_for_by_nobody() -> None:
    has_read = threading.Event()

    def body(items: ItemExchange, exchange: ThreadExchange) -> int:
        if exchange.rank == 0:
            reach(has_read)
        one = items.begin("c", [[[(1, 0, 1)]], []])
        if exchange.rank == 0:
            one.publish(0, [torch.empty(0)])
        else:
            one.read(1, torch.empty(0, 3))
            has_read.set()
        one.done()
        return items.stats.waits

    assert values(run_ranks_of(2, body)) == [0, 0]


# Misuse is refused before anything has changed


def test_what_does_not_fit_the_routes_is_refused_by_name_and_nothing_is_copied() -> None:
    routes = [[[(4, 8, 1), (5, 16, 1)]], []]

    def body(items: ItemExchange, exchange: ThreadExchange) -> tuple[int, ...]:
        one = items.begin("c", routes)
        if exchange.rank == 0:
            with pytest.raises(ValueError, match=r"part 0 of round 1 of 'c' of rank 0: 1 tensors for 2 items"):
                one.publish(0, [torch.zeros(2)])
            with pytest.raises(ValueError, match=r"item 5 has 16 bytes in the routes, 12 were given \(shape \(3,\)"):
                one.publish(0, [torch.full((1,), 9), torch.zeros(3)])
            assert items._channels["c"]._buffers[-1][0].local.count_nonzero() == 0
            with pytest.raises(ValueError, match="rank 0 has 1 parts in it"):
                one.publish(1, [])
            one.publish(0, [torch.full((1,), 9), torch.ones(2, dtype=torch.int64)])
            with pytest.raises(ValueError, match="item 4 of round 1 of 'c' is not for rank 0"):
                one.read(4, torch.zeros(1))
        else:
            with pytest.raises(
                ValueError, match="item 5 of round 1 of 'c', from rank 0 to rank 1, has 16 bytes in the"
            ):
                one.read(5, torch.zeros(3))
            with pytest.raises(ValueError, match="not contiguous"):
                one.read(4, torch.zeros(1, 2).expand(2, 2)[:, 0])
            with pytest.raises(ValueError, match="item 6 of round 1 of 'c' is not for rank 1"):
                one.read(6, torch.zeros(1))
            assert read_value(one, 4) == 9
        one.done()
        assert not items.has_failed
        return tuple(items.stats.published_bytes + items.stats.read_bytes)

    assert values(run_ranks_of(2, body)) == [(0, 24, 0, 0), (0, 0, 8, 0)]


def test_operations_out_of_turn_are_refused() -> None:
    routes = [[[(1, 8, 0)], [(2, 8, 0)]]]
    value = [torch.tensor([5])]

    def body(items: ItemExchange, exchange: ThreadExchange) -> None:
        with pytest.raises(ValueError, match="no channel 'd': expected one of 'c'"):
            items.begin("d", routes)
        first = items.begin("c", routes)
        with pytest.raises(MisuseError, match="part 1 of round 1 of 'c' cannot be published now: publish part 0 first"):
            first.publish(1, value)
        first.publish(0, value)
        with pytest.raises(MisuseError, match="published, or left out, already"):
            first.publish(0, value)
        with pytest.raises(MisuseError, match="has not published part 1 of round 1"):
            items.begin("c", routes)
        first.publish(1, value)
        second = items.begin("c", routes)
        for part in range(2):
            second.publish(part, value)
        with pytest.raises(MisuseError, match="with which this rank is not done"):
            items.begin("c", routes)
        with pytest.raises(MisuseError, match="cannot be done before round 1"):
            second.done()
        first.done()
        with pytest.raises(MisuseError, match="is done already"):
            first.done()
        with pytest.raises(MisuseError, match=r"done\(\) with it, so that others may overwrite it"):
            read_value(first, 1)
        assert read_value(second, 2) == 5
        second.done()
        assert not items.has_failed
        items.close()
        with pytest.raises(OdcError, match="this item exchange is closed"):
            read_value(second, 2)

    values(run_ranks_of(1, body))


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        ([[]], "routes of 1 ranks for a group of 2"),
        ([[[(1, 8, 2)]], []], "item 1 of rank 0: consumer 2, expected a rank from 0 to 1"),
        ([[[(1, 8, 0)]], [[(1, 8, 0)]]], "item 1 of rank 1 is in the routes of this round twice"),
        ([[[(1, -8, 0)]], []], "item 1 of rank 0: -8 bytes"),
        ([[[(1, 8.5, 0)]], []], r"\(1, 8.5, 0\) is not \(item, bytes, consumer\)"),
        ([[[1]], []], r"1 is not \(item, bytes, consumer\)"),
    ],
)
def test_routes_that_cannot_be_are_refused(routes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Layout.of(routes, 0, 2)


@pytest.mark.parametrize(
    "other",
    [
        [[[(1, 8, 1)], [(2, 8, 1)]], []],
        [[[(1, 8, 1), (2, 8, 0)]], []],
        [[[(1, 8, 1), (2, 9, 1)]], []],
        [[[(1, 8, 1), (3, 8, 1)]], []],
        [[], [[(1, 8, 1), (2, 8, 1)]]],
        [[[], [(1, 8, 1), (2, 8, 1)]], []],
    ],
)
def test_routes_that_differ_have_different_digests(other: Any) -> None:
    routes = [[[(1, 8, 1), (2, 8, 1)]], []]
    assert Layout.of(routes, 0, 2).digest != Layout.of(other, 0, 2).digest
    assert Layout.of(routes, 0, 2).digest == Layout.of(routes, 1, 2).digest


@pytest.mark.parametrize("channels", [[], ["a", "a"]])
def test_channels_without_names_of_their_own_are_refused(channels: list[str]) -> None:
    def body(exchange: ThreadExchange) -> None:
        ItemExchange.create(exchange, channels, RuntimeConfig(), capacity_bytes=8)

    with pytest.raises(ValueError, match="expected at least one name, each once"):
        values(run_threads(1, body))


# Ranks that disagree


def all_told(results: list[Any], *words: str, within_s: float = 10.0) -> None:
    """Every rank has failed with one and the same cause, found by one of them at least, and soon."""
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


@pytest.mark.parametrize("first", ["runtime", "items"])
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
            runtime._waiter.job.tick()

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
    labels = {span.kind: span.label for span in spans}
    assert labels["wait"] == "item 1 (24 bytes) in part 0 of round 1 of 'c'"
    assert labels["publish"] == "part 0 of round 1 of 'c'"
    assert second.as_dict()["read_bytes"] == [24, 0]
