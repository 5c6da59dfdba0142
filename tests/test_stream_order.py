"""Layer 2: ranks as threads. The minibatch protocol where work happens later than the call: on streams.

The streams are those of ``bench/fake``, which lag behind the host at random and run beside each other; the transport,
the protocol, the daemon and the stores are the real ones. As under FSDP a rank gathers on one stream, pushes on another
and steps on a third. The last tests take one order away at a time and check that wrong numbers are then seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadExchange, run_threads, values

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.fake.cuda import AsynchronousFakeCudaTransport, FakeCudaTransport, FakeEngine, registered_fakes
from odc.engines.base import Engine
from odc.errors import OdcError
from odc.transports.cuda_ipc import CudaIpcTransport
from odc.transports.nvshmem import NvshmemTransport

NUMEL = 40
MODES = [("daemon", False), ("direct", False), ("daemon", True), ("direct", True)]


@pytest.fixture(autouse=True, scope="module")
def fakes() -> Iterator[None]:
    with registered_fakes():
        yield


class Violation(AssertionError):
    """A stream saw what it must not see."""


@dataclass(frozen=True)
class Case:
    """One random run: microbatches of [minibatch][rank], and the pauses of the streams."""

    counts: tuple[tuple[int, ...], ...]
    num_units: int
    seed: int
    mode: tuple[str, bool] = ("daemon", False)
    blind: bool = False
    """Pushes come without gathers before them."""
    hosts: int = 1
    """How many hosts the ranks pose as: several talk by the ``nvshmem`` transport on a fake heap."""
    slow: tuple[tuple[str, int, float], ...] = ()
    """(operation, rank, seconds): that rank's stream takes so long over the operation."""

    @property
    def world_size(self) -> int:
        return len(self.counts[0])


def version(minibatch: int, unit: int, owner: int) -> float:
    return minibatch * 100.0 + unit * 10.0 + owner


def contribution(minibatch: int, unit: int, client: int, microbatch: int) -> float:
    return float(((minibatch * 7 + unit * 5 + client * 3 + microbatch) % 1000) + 1)


class RankRun:
    """One rank's part, with everything that touches a tensor on a stream."""

    def __init__(self, case: Case, exchange: ThreadExchange) -> None:
        self.case, self.rank, self.exchange = case, exchange.rank, exchange
        self.random = random.Random(case.seed * 31 + exchange.rank)
        units = [UnitSpec(f"u{u}", NUMEL, torch.float32, (ParamSlice("w", NUMEL),)) for u in range(case.num_units)]
        far = case.hosts > 1
        options = RuntimeConfig(
            transport="fake_nvshmem_streams" if far else "fake_cuda_streams",
            timeout_s=15,
            accumulate=case.mode[0],
            deterministic=case.mode[1],
            host_id=f"host{exchange.rank * case.hosts // case.world_size}" if far else "",
        )
        self.runtime = Runtime.create(exchange, units, options)
        engine = self.runtime._transport.engine
        assert isinstance(engine, FakeEngine)
        self.engine = engine
        self.violations: list[str] = []
        self.checks = 0

    def on_stream(self, operation: str, work: Callable[[], object]) -> None:
        pause = sum(s for name, rank, s in self.case.slow if (name, rank) == (operation, self.rank))
        if pause:
            self.engine.run(lambda: time.sleep(pause))
        self.engine.run(work)

    def order(self) -> list[int]:
        return self.random.sample(range(self.case.num_units), self.case.num_units)

    def run(self) -> int:
        """Checks made."""
        with self.runtime:
            for minibatch, counts in enumerate(self.case.counts, start=1):
                for unit in self.order():
                    self.runtime.publish(unit, self.filler(minibatch, unit))
                self.runtime.begin()
                for microbatch in range(counts[self.rank]):
                    self.microbatch(minibatch, microbatch)
                self.runtime.finish()
                for unit in self.order():
                    self.check_gradient(minibatch, unit, counts)
            assert self.engine.synchronize(20)
            self.exchange.all_gather(b"")  # where an order is taken away, streams may still read what others release
            self.violations += [repr(error) for error in self.engine.errors]
            if self.violations:
                raise Violation(f"rank {self.rank}: {self.violations[0]} (and {len(self.violations) - 1} more)")
            return self.checks

    def filler(self, minibatch: int, unit: int) -> Callable[[torch.Tensor], object]:
        value = version(minibatch, unit, self.rank)

        def fill(shard: torch.Tensor) -> None:
            pause = sum(s for name, rank, s in self.case.slow if (name, rank) == ("fill", self.rank))
            time.sleep(pause)
            shard.fill_(value)

        return fill

    def microbatch(self, minibatch: int, microbatch: int) -> None:
        order = self.order()
        with self.engine.on("gather"):
            for unit in order if not self.case.blind else ():
                self.check_gather(minibatch, unit)
        with self.engine.on("push"):
            for unit in reversed(order):
                self.push(minibatch, unit, microbatch)

    def check_gather(self, minibatch: int, unit: int) -> None:
        out = torch.full((NUMEL * self.case.world_size,), -1.0)
        self.on_stream("gather", lambda: None)
        self.runtime.gather(unit, out)
        expected = [version(minibatch, unit, owner) for owner in range(self.case.world_size)]
        self.expect(f"gather of minibatch {minibatch}", out, expected)

    def push(self, minibatch: int, unit: int, microbatch: int) -> None:
        value = contribution(minibatch, unit, self.rank, microbatch)
        grads = torch.zeros(NUMEL * self.case.world_size)
        rows = torch.arange(self.case.world_size).repeat_interleave(NUMEL) * 1000.0 + value
        self.on_stream("push", lambda: grads.copy_(rows))  # computed on the stream, long after the call below
        self.runtime.scatter_accumulate(unit, grads)
        self.engine.run(lambda: grads.fill_(float("nan")))  # used for something else, in the order of the stream

    def check_gradient(self, minibatch: int, unit: int, counts: tuple[int, ...]) -> None:
        pushes = [(c, m) for c in range(self.case.world_size) for m in range(counts[c])]
        result = self.runtime.gradient(unit)
        if (result is None) != (not pushes):
            self.violations.append(f"minibatch {minibatch} unit {unit}: {result} after {len(pushes)} pushes")
        elif result is not None:
            expected = sum(1000.0 * self.rank + contribution(minibatch, unit, c, m) for c, m in pushes)
            self.on_stream("read", lambda: None)
            self.expect(f"sum of minibatch {minibatch}", result[0], [expected])

    def expect(self, what: str, found: torch.Tensor, values: list[float]) -> None:
        self.checks += 1
        wanted = torch.tensor(values).repeat_interleave(found.numel() // len(values))

        def check() -> None:
            if not torch.equal(found, wanted):
                self.violations.append(f"{what}: {sorted(set(found.tolist()))}, expected {values}")

        self.engine.run(check)


def run_seeds(case: Case) -> None:
    """The case several times; one of them may be lucky."""
    for seed in range(5):
        run_case(replace(case, seed=seed))


def run_case(case: Case) -> list[int]:
    return values(run_threads(case.world_size, lambda exchange: RankRun(case, exchange).run(), timeout_s=120))


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


def num_checks(case: Case) -> list[int]:
    sums = sum(any(row) for row in case.counts)
    gathers = [0 if case.blind else sum(row[rank] for row in case.counts) for rank in range(case.world_size)]
    return [case.num_units * (sums + own) for own in gathers]


@st.composite
def cases_across_hosts(draw: st.DrawFn) -> Case:
    case = draw(cases())
    modes = [mode for mode in MODES if mode[0] == "daemon"]
    return replace(case, hosts=draw(st.integers(2, case.world_size)), mode=draw(st.sampled_from(modes)))


@settings(max_examples=12, deadline=None, print_blob=True)
@given(cases_across_hosts())
def test_so_they_do_across_hosts(case: Case) -> None:
    assert run_case(case) == num_checks(case)


# Rank 1's streams are slow at everything that others must not overtake.
ADVERSARY = Case(
    counts=((1, 2), (2, 1), (1, 1)),
    num_units=2,
    seed=3,
    slow=(("fill", 1, 0.01), ("push", 1, 0.01), ("gather", 1, 0.01), ("read", 1, 0.01)),
)


# Where it gathers only, the pushes of a minibatch, for which finish waits, are long over while it still reads.
SLOW_READER = replace(ADVERSARY, slow=(("gather", 1, 0.05),))


@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_slow_stream_alone_breaks_nothing(mode: tuple[str, bool], blind: bool) -> None:
    run_case(replace(ADVERSARY, mode=mode, blind=blind))


def without_order(monkeypatch: pytest.MonkeyPatch, transport: type[CudaIpcTransport], dropped: range) -> None:
    """Let streams ignore the order that some signals carry."""
    original = transport.order_after

    def order_after(self: CudaIpcTransport, ranks: Sequence[int], index: int, count: int) -> None:
        if index not in dropped:
            original(self, ranks, index, count)

    monkeypatch.setattr(transport, "order_after", order_after)


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
    ("signals", "case"),
    [
        (range(2), ADVERSARY),
        (range(3, 4), replace(ADVERSARY, mode=("direct", False), blind=True)),
        (range(2, 3), SLOW_READER),
    ],
    ids=["published", "open", "done"],
)
def test_without_one_order_wrong_numbers_are_seen(signals: range, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    without_order(monkeypatch, CudaIpcTransport, signals)
    with pytest.raises(Violation):
        run_seeds(case)


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


@pytest.mark.parametrize(
    ("signals", "case"), [(range(2), ADVERSARY), (range(2, 3), SLOW_READER)], ids=["published", "done"]
)
def test_without_one_order_wrong_numbers_are_seen_across_hosts(
    signals: range, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_order(monkeypatch, NvshmemTransport, signals)
    with pytest.raises(Violation):
        run_seeds(replace(case, hosts=2))


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
