"""Layer 2: ranks as threads. The minibatch protocol where work happens later than the call: on streams.

The streams are those of ``bench/fake``, which lag behind the host at random and run beside each other; the transport,
the protocol, the daemon and the stores are the real ones. As under FSDP a rank gathers on one stream, pushes on another
and steps on a third. The last tests take one order away at a time and check that wrong numbers are then seen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streamed_minibatches import (
    ADVERSARY,
    SLOW_READER,
    Case,
    RankRun,
    Violation,
    num_checks,
    run_case,
    without_order,
)
from thread_ranks import ThreadExchange, run_threads, values

from odc.bench.fake.cuda import AsynchronousFakeCudaTransport, FakeCudaTransport, FakeEngine
from odc.engines.base import Engine
from odc.errors import OdcError
from odc.transports.cuda_ipc import CudaIpcTransport
from odc.transports.nvshmem import NvshmemTransport

pytestmark = pytest.mark.usefixtures("fakes")

MODES = [("daemon", False), ("direct", False), ("daemon", True), ("direct", True)]


def run_seeds(case: Case) -> None:
    """The case several times; one of them may be lucky."""
    for seed in range(5):
        run_case(replace(case, seed=seed))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(2, 4))
    rank_counts = st.tuples(*[st.integers(0, 3)] * world_size)
    return Case(
        counts=tuple(draw(st.lists(rank_counts, min_size=2, max_size=4))),
        num_units=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 10**6)),
        mode=draw(st.sampled_from(MODES)),
        blind=draw(st.booleans()),
    )


@settings(max_examples=30, deadline=None, print_blob=True)
@given(cases())
def test_streams_see_their_versions_and_every_push_counts_once(case: Case) -> None:
    assert run_case(case) == num_checks(case)


@st.composite
def cases_across_hosts(draw: st.DrawFn) -> Case:
    case = draw(cases())
    modes = [mode for mode in MODES if mode[0] == "daemon"]
    return replace(case, hosts=draw(st.integers(2, case.world_size)), mode=draw(st.sampled_from(modes)))


@settings(max_examples=6, deadline=None, print_blob=True)
@given(cases_across_hosts())
def test_so_they_do_across_hosts(case: Case) -> None:
    assert run_case(case) == num_checks(case)


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_slow_stream_alone_breaks_nothing(mode: tuple[str, bool], blind: bool) -> None:
    run_case(replace(ADVERSARY, mode=mode, blind=blind))


def without_arrivals(monkeypatch: pytest.MonkeyPatch, signals: range) -> dict[tuple[int, int], int]:
    """Let hosts take pushes and acknowledgements for arrived as soon as the poster's host has asked for them; how many
    acknowledgements, to be cleared for the next ranks."""
    original, asked_for = CudaIpcTransport.has_arrived, dict[tuple[int, int], int]()

    def acknowledge(self: CudaIpcTransport, posts: Sequence[tuple[int, int]]) -> None:
        original_acknowledge(self, posts)
        for index, _ in posts:
            asked_for[self.topology.rank, index] = asked_for.get((self.topology.rank, index), 0) + 1

    def has_arrived(self: CudaIpcTransport, rank: int, index: int, count: int) -> bool:
        if index not in signals:
            return original(self, rank, index, count)
        return max(self.count(rank, index), asked_for.get((rank, index), 0)) >= count

    original_acknowledge = CudaIpcTransport.acknowledge
    monkeypatch.setattr(CudaIpcTransport, "acknowledge", acknowledge)
    monkeypatch.setattr(CudaIpcTransport, "has_arrived", has_arrived)
    return asked_for


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_slow_stream_breaks_nothing_across_hosts(deterministic: bool, blind: bool) -> None:
    run_case(replace(ADVERSARY, mode=("daemon", deterministic), blind=blind, hosts=2))


# Signals of each of 2 ranks, 2 units: published 0-1, done 2, open 3, posted 4, acknowledged 5-6.
@pytest.mark.parametrize(
    ("signals", "case", "hosts"),
    [
        pytest.param(range(2), ADVERSARY, 1, id="published"),
        pytest.param(range(3, 4), replace(ADVERSARY, mode=("direct", False), blind=True), 1, id="open"),
        pytest.param(range(2, 3), SLOW_READER, 1, id="done"),
        pytest.param(range(2), ADVERSARY, 2, id="published across hosts"),
        pytest.param(range(2, 3), SLOW_READER, 2, id="done across hosts"),
    ],
)
def test_without_one_order_wrong_numbers_are_seen(
    signals: range, case: Case, hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_order(monkeypatch, NvshmemTransport if hosts > 1 else CudaIpcTransport, signals)
    with pytest.raises(Violation):
        run_seeds(replace(case, hosts=hosts))


@pytest.mark.parametrize("signals", [range(4, 5), range(5, 7)], ids=["posted", "acknowledged"])
def test_without_looking_for_arrivals_wrong_numbers_are_seen(signals: range, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for = without_arrivals(monkeypatch, signals)
    add_slots = FakeEngine.add_slots

    def add_late(self: FakeEngine, *arguments: Any) -> None:
        self.run(lambda: time.sleep(0.003))
        add_slots(self, *arguments)

    monkeypatch.setattr(FakeEngine, "add_slots", add_late)

    def run() -> None:
        for seed in range(5):
            asked_for.clear()
            run_case(replace(ADVERSARY, counts=((4, 4), (4, 4)), seed=seed))

    with pytest.raises((Violation, OdcError)):  # a slot filled anew has another push's header, too
        run()


def test_staging_memory_is_one_streams_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four streams that gather by way of two halves: without the order the third would overwrite what the first has not
    copied out yet."""

    def gather_on_two(rank_run: RankRun, minibatch: int, microbatch: int) -> None:
        for unit in range(rank_run.case.num_units):
            with rank_run.engine.on(f"gather-{unit}"):
                rank_run.check_gather(minibatch, unit)

    monkeypatch.setattr(RankRun, "microbatch", gather_on_two)
    monkeypatch.setattr(RankRun, "check_gradient", lambda *_: None)
    case = replace(ADVERSARY, hosts=2, num_units=4, counts=((4, 4),) * 3)
    run_case(case)
    monkeypatch.setattr(FakeEngine, "take", lambda self, memory: nullcontext())
    with pytest.raises(Violation):
        run_seeds(case)


def test_done_waits_for_the_streams_that_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(SLOW_READER, counts=((1, 2),) * 4)
    run_case(case)
    monkeypatch.setattr(FakeEngine, "join", lambda self: None)
    with pytest.raises(Violation):
        run_seeds(case)


def test_a_stream_waits_only_for_what_was_submitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else torch.cuda.synchronize() could wait for another rank's host: here every wait finds its write submitted."""
    submitted: dict[tuple[int, int], int] = {}
    original = CudaIpcTransport.post
    checked = []

    def post(self: CudaIpcTransport, index: int, *, to: int | None = None, daemon: bool = False) -> None:
        poster = self.topology.rank
        submitted[poster, index] = submitted.get((poster, index), 0) + 1
        original(self, index, to=to, daemon=daemon)

    def order_after(self: CudaIpcTransport, ranks: Sequence[int], index: int, count: int) -> None:
        for rank in ranks:
            assert submitted.get((rank, index), 0) >= count
            checked.append((rank, index))
        original_order(self, ranks, index, count)

    original_order = CudaIpcTransport.order_after
    monkeypatch.setattr(CudaIpcTransport, "post", post)
    monkeypatch.setattr(CudaIpcTransport, "order_after", order_after)
    run_case(ADVERSARY)
    assert len(set(checked)) == 8  # published of two units, open and done, of two ranks


def test_nothing_is_left_with_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.limits.CLOSE_GRACE_S", 30.0)  # a rank may be slow to close

    def body(exchange: ThreadExchange) -> list[str]:
        run = RankRun(replace(ADVERSARY, slow=()), exchange)
        transport = run.runtime._transport
        assert isinstance(transport, FakeCudaTransport)
        run.run()
        return transport.leaked

    assert values(run_threads(2, body, timeout_s=120)) == [[], []]


def test_the_fake_is_no_engine_of_the_product() -> None:
    assert issubclass(FakeEngine, Engine)
    assert AsynchronousFakeCudaTransport.name not in {"shm", "cuda_ipc"}
