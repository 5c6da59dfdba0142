"""Layers 1 and 2: ranks as threads. Items that ranks read from each other, under random routes, orders and delays.

Every read must see exactly what its producer published for it. Then one wait is taken away at a time; an adversary that
does not go on before the damage is done makes it certain that the property then fails.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from item_ranks import ONE_WAY, WAYS, Case, Violation, cases, reach, read_value, run_case, run_ranks_of
from thread_ranks import ThreadExchange, run_threads, values

from odc import (
    Item,
    ItemExchange,
    MisuseError,
    OdcError,
    ProtocolError,
    RuntimeConfig,
    SetupError,
)
from odc.items.channel import Channel
from odc.items.routes import Layout


@settings(max_examples=40, deadline=None, print_blob=True)
@given(cases())
def test_every_read_sees_what_was_published_for_it(case: Case) -> None:
    run_case(case)


@settings(max_examples=12, deadline=None, print_blob=True)
@given(cases(least_hosts=2))
def test_so_it_does_across_hosts(case: Case) -> None:
    run_case(case)


# What is taken away is seen. Each adversary waits until the damage is done.


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

        def read(parts: Any, *args: Any) -> None:
            reads.append(sum(out.nbytes for out in parts[0][0]))
            original(parts, *args)

        monkeypatch.setattr(items._transport, "read", read)
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
def test_channels_without_names_of_their_own_are_refused_on_all_ranks(channels: list[str]) -> None:
    def body(exchange: ThreadExchange) -> None:
        ItemExchange.create(exchange, channels if exchange.rank else ["a"], RuntimeConfig(), capacity_bytes=8)

    first, second = run_threads(2, body)
    assert isinstance(first, SetupError)
    assert isinstance(second, ValueError)
    for result in (first, second):
        assert "expected at least one name, each once" in str(result)


@pytest.mark.parametrize("difference", ["channels", "capacity_bytes"])
def test_exchanges_that_differ_are_refused_on_all_ranks(difference: str) -> None:
    def body(exchange: ThreadExchange) -> None:
        is_odd = exchange.rank == 1
        channels = ["b"] if is_odd and difference == "channels" else ["a"]
        capacity_bytes = 16 if is_odd and difference == "capacity_bytes" else 8
        ItemExchange.create(exchange, channels, RuntimeConfig(), capacity_bytes=capacity_bytes)

    for result in run_threads(2, body):
        assert isinstance(result, SetupError)
        assert f"rank 1 differs from rank 0 in item exchange, item '{difference}'" in str(result)


def test_rounds_that_are_over_are_forgotten() -> None:
    def body(exchange: ThreadExchange) -> int:
        with ItemExchange.create(exchange, ["c"], RuntimeConfig(timeout_s=15), capacity_bytes=64) as items:
            for number in range(20):
                one = items.begin("c", [[[(number, 8, 1)]], []])
                if exchange.rank == 0:
                    one.publish(0, [torch.tensor([number])])
                else:
                    assert read_value_of(one, number) == number
                one.done()
            return len(items._channels["c"].rounds)

    assert max(values(run_threads(2, body, timeout_s=60))) <= 4


def read_value_of(one: Any, item: int) -> int:
    out = torch.zeros(1, dtype=torch.int64)
    one.read(item, out)
    return int(out)
