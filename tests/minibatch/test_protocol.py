"""Layer 2: ranks as threads. The minibatch protocol by itself, under random counts, orders and delays.

Every gather must see exactly the shard version of its minibatch, every push must be counted once and in its own
minibatch. The last tests remove one signal at a time and check that the same property then fails.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ONE_UNIT, ThreadExchange, of_one_unit, run_runtimes, run_threads, sum_of, values
from watching import until

from odc import AbortedError, MisuseError, ParamSlice, ProtocolError, Runtime, RuntimeConfig, UnitSpec
from odc.minibatch.accumulators import AccumulatorStore
from odc.minibatch.protocol import End, EndKind, MinibatchProtocol
from odc.minibatch.state import Phase

NUMEL = 48
MODES = [("direct", False), ("daemon", False), ("direct", True), ("daemon", True)]


class Violation(AssertionError):
    """The protocol let something wrong through."""


@dataclass(frozen=True)
class Case:
    """One random run."""

    counts: tuple[tuple[int, ...], ...]  # microbatches of [minibatch][rank]
    num_units: int
    seed: int
    delay_s: float
    mode: tuple[str, bool] = ("direct", False)
    slow: dict[tuple[str, int], float] = field(default_factory=dict)  # (operation, rank) -> extra delay
    hosts: int = 1
    blind: bool = False  # pushes come without gathers before them
    kept: frozenset[int] = frozenset()  # minibatches whose parameters are those of the one before
    early: bool = False  # sums are opened before the parameters are published

    @property
    def world_size(self) -> int:
        return len(self.counts[0])


def version(minibatch: int, unit: int, owner: int, kept: frozenset[int] = frozenset()) -> float:
    while minibatch in kept:
        minibatch -= 1
    return minibatch * 100.0 + unit * 10.0 + owner


def contribution(minibatch: int, unit: int, client: int, microbatch: int) -> float:
    """Distinct small integers, so that float32 sums are exact and tell who is missing."""
    return float(((minibatch * 7 + unit * 5 + client * 3 + microbatch) % 1000) + 1)


class RankRun:
    """One rank's part of a case."""

    def __init__(self, case: Case, exchange: ThreadExchange) -> None:
        self.case = case
        self.rank = exchange.rank
        self.random = random.Random(case.seed * 31 + exchange.rank)
        units = [
            UnitSpec(f"layers.{u}", NUMEL, torch.float32, (ParamSlice("w", NUMEL),)) for u in range(case.num_units)
        ]
        host = f"host{exchange.rank * case.hosts // case.world_size}" if case.hosts > 1 else ""
        config = RuntimeConfig(timeout_s=10, accumulate=case.mode[0], deterministic=case.mode[1], host_id=host)
        self.runtime = Runtime.create(exchange, units, config)

    def pause(self, operation: str) -> None:
        time.sleep(self.random.random() * self.case.delay_s + self.case.slow.get((operation, self.rank), 0.0))

    def order(self) -> list[int]:
        return self.random.sample(range(self.case.num_units), self.case.num_units)

    def run(self) -> int:
        with self.runtime:
            for minibatch, counts in enumerate(self.case.counts, start=1):
                if self.case.early and minibatch > 1:
                    self.runtime.open_sums()
                self.publish(minibatch)
                self.runtime.begin()
                for microbatch in range(counts[self.rank]):
                    self.microbatch(minibatch, microbatch)
                self.pause("finish")
                self.runtime.finish(End(notes=(minibatch, self.rank, -1, 2**40, 3)))
                self.check_ends(minibatch, counts)
                for unit in self.order():
                    self.check_gradient(minibatch, unit)
            return self.runtime.stats.gathers

    def publish(self, minibatch: int) -> None:
        for unit in self.order():
            self.pause("publish")
            if (
                minibatch > 1 and not self.case.early
            ):  # until now the sum is this rank's own, whatever the others do meanwhile
                self.check_gradient(minibatch - 1, unit)

            def fill(out: torch.Tensor, unit: int = unit) -> None:
                value = version(minibatch, unit, self.rank)
                out[: NUMEL // 2] = value  # in two halves: a reader in between would see both versions
                self.pause("fill")
                out[NUMEL // 2 :] = value

            self.runtime.publish(unit, None if minibatch in self.case.kept else fill)

    def microbatch(self, minibatch: int, microbatch: int) -> None:
        order = self.order()
        for unit in order if not self.case.blind else ():
            self.pause("gather")
            self.check_gather(minibatch, unit)
        for unit in reversed(order):
            self.pause("push")
            value = contribution(minibatch, unit, self.rank, microbatch)
            grads = torch.arange(self.case.world_size).repeat_interleave(NUMEL) * 1000.0 + value
            self.runtime.scatter_accumulate(unit, grads)

    def check_gather(self, minibatch: int, unit: int) -> None:
        out = torch.empty(NUMEL * self.case.world_size)
        self.runtime.gather(unit, out)
        expected = [version(minibatch, unit, owner, self.case.kept) for owner in range(self.case.world_size)]
        if not torch.equal(out, torch.tensor(expected).repeat_interleave(NUMEL)):
            found = sorted(set(out.tolist()))
            raise Violation(f"rank {self.rank} minibatch {minibatch} unit {unit}: saw {found}, expected {expected}")

    def check_gradient(self, minibatch: int, unit: int) -> None:
        counts = self.case.counts[minibatch - 1]
        pushes = [(c, m) for c in range(self.case.world_size) for m in range(counts[c])]
        result = self.runtime.gradient(unit)
        expected = sum(1000.0 * self.rank + contribution(minibatch, unit, c, m) for c, m in pushes)
        found = None if result is None else result[0].unique().tolist()
        if found != ([expected] if pushes else None):
            raise Violation(f"rank {self.rank} minibatch {minibatch} unit {unit}: sum {found}, expected {expected}")

    def check_ends(self, minibatch: int, counts: tuple[int, ...]) -> None:
        expected = [
            End(notes=(minibatch, rank, -1, 2**40, 3), has_pushed=counts[rank] > 0)
            for rank in range(self.case.world_size)
        ]
        if self.runtime.ends != expected:
            raise Violation(f"rank {self.rank} minibatch {minibatch}: ends {self.runtime.ends}, expected {expected}")


def run_case(case: Case) -> list[int]:
    return values(run_threads(case.world_size, lambda exchange: RankRun(case, exchange).run(), timeout_s=120))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(2, 4))
    rank_counts = st.tuples(*[st.integers(0, 3)] * world_size)
    counts = tuple(draw(st.lists(rank_counts, min_size=2, max_size=4)))
    return Case(
        counts=counts,
        kept=frozenset(draw(st.sets(st.integers(2, len(counts))))),
        early=draw(st.booleans()),
        num_units=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 10**6)),
        delay_s=draw(st.sampled_from([0.0, 0.0005, 0.003])),
        blind=draw(st.booleans()),
        mode=draw(st.sampled_from(MODES)),
    )


@st.composite
def cases_across_hosts(draw: st.DrawFn) -> Case:
    """Ranks that pose as two or more hosts, and talk over TCP."""
    case = draw(cases())
    hosts = draw(st.integers(2, case.world_size))
    return replace(case, hosts=hosts, mode=draw(st.sampled_from([mode for mode in MODES if mode[0] == "daemon"])))


@settings(max_examples=40, deadline=None, print_blob=True)
@given(cases())
def test_every_gather_sees_its_version_and_every_push_counts_once(case: Case) -> None:
    assert run_case(case) == num_gathers(case)


def num_gathers(case: Case) -> list[int]:
    num_units = 0 if case.blind else case.num_units
    return [sum(row[rank] for row in case.counts) * num_units for rank in range(case.world_size)]


@settings(max_examples=20, deadline=None, print_blob=True)
@given(cases_across_hosts())
def test_so_they_do_across_hosts(case: Case) -> None:
    assert run_case(case) == num_gathers(case)


# Rank 1 is slow to publish (so that an impatient reader sees the version before) and slow to push (so that an
# impatient owner takes an incomplete sum).
ADVERSARY = Case(
    counts=((1, 2), (1, 2), (2, 1)),
    num_units=2,
    seed=5,
    delay_s=0.0,
    slow={("publish", 1): 0.02, ("fill", 1): 0.02, ("push", 1): 0.03},
)


@pytest.mark.parametrize("mode", MODES)
def test_the_adversary_alone_breaks_nothing(mode: tuple[str, bool]) -> None:
    for blind in (False, True):
        run_case(replace(ADVERSARY, mode=mode, blind=blind))


@pytest.mark.parametrize("early", [False, True])
def test_what_a_signal_says_is_true_when_it_is_posted(early: bool) -> None:
    """However soon another rank looks: shards are written, and all sums accept pushes."""
    case = replace(ADVERSARY, early=early, slow={})

    def body(exchange: ThreadExchange) -> int:
        run = RankRun(case, exchange)
        runtime, transport, post = run.runtime, run.runtime._transport, run.runtime._transport.post

        def look(index: int, **options: Any) -> None:
            coming = runtime.state.coming
            if index < case.num_units:
                assert set(runtime.published_shard(index).tolist()) == {version(coming, index, run.rank)}
            elif index == runtime._protocol._open:
                assert list(runtime._store._of(run.rank).accepts) == [coming] * case.num_units
            post(index, **options)

        transport.post = look  # type: ignore[method-assign]
        return run.run()

    assert values(run_threads(2, body)) == num_gathers(case)


def run_until_it_fails(case: Case) -> None:
    """Several times: a machine that holds up the fast rank for long enough hides what is missing."""
    for _ in range(10):
        run_case(case)


@pytest.mark.parametrize(
    ("signal", "raised"),
    [
        ("_await_published", Violation),  # gathers read the shard of the minibatch before
        ("_await_done", (Violation, ProtocolError)),
    ],
)
def test_without_a_signal_the_property_fails(signal: str, raised: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MinibatchProtocol, signal, lambda *args: None)
    with pytest.raises(raised):
        run_until_it_fails(ADVERSARY)


@pytest.mark.parametrize("early", [False, True])
def test_without_the_open_signal_pushes_are_refused(early: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They meet the sum of the minibatch before."""
    monkeypatch.setattr(MinibatchProtocol, "_await_open", lambda *args: None)
    with pytest.raises(ProtocolError, match="refused by rank"):
        run_until_it_fails(replace(ADVERSARY, blind=True, early=early))


@pytest.mark.parametrize("mode", MODES)
def test_pushes_that_nothing_holds_back_are_refused_or_seen(
    mode: tuple[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the second line of defence, the word that says which minibatch a sum accepts, sums are wrong: that is
    what the signal is for."""
    monkeypatch.setattr(MinibatchProtocol, "_await_open", lambda *args: None)
    monkeypatch.setattr(AccumulatorStore, "_check_open", lambda *args: None)
    with pytest.raises(Violation):
        run_until_it_fails(replace(ADVERSARY, blind=True, mode=mode))


def test_ranks_that_end_a_minibatch_in_different_ways_fail_at_once() -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> str:
        runtime.publish(0, lambda out: out.zero_())
        runtime.begin()
        with pytest.raises((ProtocolError, AbortedError)) as caught:
            runtime.finish(End(EndKind.DISCARD if exchange.rank == 1 else EndKind.USE))
        return str(caught.value)

    for text in run_runtimes(3, ONE_UNIT, body):
        assert "ended minibatch 1 in different ways" in text
        assert "for a step" in text
        assert "to throw it away (discard)" in text


def test_what_a_rank_says_of_its_end_stays_until_all_have_looked() -> None:
    """Rank 1 is done with minibatch 2 before rank 0 looks how it has ended minibatch 1."""

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        protocol, look = runtime._protocol, runtime._protocol._check_ends

        def look_late() -> None:
            if exchange.rank == 0:
                until(lambda: runtime._transport.count(1, protocol._done) >= 2, "rank 1 is not done", 10.0)
            look()

        protocol._check_ends = look_late  # type: ignore[method-assign]
        for minibatch in (1, 2):
            runtime.publish(0, lambda out: out.zero_())
            runtime.begin()
            runtime.finish(End(notes=(minibatch, 0, 0, 0, 0)))
            assert [end.notes[0] for end in runtime.ends] == [minibatch] * 2

    run_runtimes(2, ONE_UNIT, body)


def test_a_fast_rank_is_at_most_one_minibatch_ahead() -> None:
    """Rank 0 runs nothing and never waits for parameters; it still cannot end minibatch k + 1 before rank 1 ends k."""
    ends: dict[tuple[int, int], float] = {}

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        for minibatch in range(1, 4):
            runtime.publish(0, lambda out: out.zero_())
            runtime.begin()
            if exchange.rank == 1:
                time.sleep(0.05)
            runtime.finish()
            ends[exchange.rank, minibatch] = time.monotonic()

    run_runtimes(2, ONE_UNIT, body)
    assert all(ends[0, k + 1] >= ends[1, k] for k in (1, 2))


@pytest.mark.parametrize("hosts", [1, 2])
def test_who_has_changed_nothing_waits_for_nobody(hosts: int) -> None:
    """Rank 1 has finished minibatch 1 and publishes nothing: rank 0 gathers and pushes in minibatch 2 before it does,
    for its parameters are what they were and its sums are open."""
    is_through = threading.Event()

    def body(runtime: Runtime, exchange: ThreadExchange) -> list[float]:
        out = torch.empty(8)
        runtime.publish(0, lambda shard: shard.fill_(exchange.rank + 1.0))
        runtime.begin()
        runtime.finish()
        runtime.open_sums()
        if exchange.rank == 1:
            assert is_through.wait(10), "rank 0 waits for a rank that has changed nothing"
        runtime.publish(0, None)
        runtime.begin()
        if exchange.rank == 0:
            runtime.gather(0, out)
            runtime.scatter_accumulate(0, torch.ones(8))
            is_through.set()
        runtime.finish()
        assert sum_of(runtime).tolist() == [1.0] * 4
        return out.tolist()

    assert run_runtimes(2, ONE_UNIT, body, hosts=hosts)[0] == [1.0] * 4 + [2.0] * 4


def test_operations_out_of_turn_are_refused_and_say_what_to_do() -> None:
    def body(exchange: ThreadExchange) -> None:
        runtime = of_one_unit(exchange)
        out = torch.zeros(8)
        with pytest.raises(MisuseError, match="publish every unit first"):
            runtime.begin()
        runtime.publish(0, lambda shard: shard.fill_(exchange.rank))
        with pytest.raises(MisuseError, match="a shard is published once"):
            runtime.publish(0, lambda shard: shard.zero_())
        with pytest.raises(MisuseError, match="outside a minibatch"):
            runtime.scatter_accumulate(0, out)
        with pytest.raises(MisuseError, match="not final"):
            runtime.gradient(0)
        runtime.gather(0, out)  # an evaluation before the minibatch
        runtime.begin()
        with pytest.raises(MisuseError, match="minibatch 1 is open"):
            runtime.begin()
        runtime.scatter_accumulate(0, out + 1)
        runtime.finish()
        with pytest.raises(MisuseError, match=r"Evaluate inside the minibatch, or after optimizer.step\(\)"):
            runtime.gather(0, out)
        with pytest.raises(MisuseError, match="without an open minibatch"):
            runtime.finish()
        assert runtime.state.phase is Phase.FINISHED
        # Each refusal has changed nothing, here or there: the sum is right, and the next minibatch works.
        assert sum_of(runtime).tolist() == [2.0 + 2 * exchange.rank] * 4
        runtime.publish(0, lambda shard: shard.zero_())
        with pytest.raises(MisuseError, match="take gradients after finish"):
            runtime.gradient(0)
        with pytest.raises(MisuseError, match="before minibatch 2 was finished"):
            runtime.open_sums()
        runtime.begin()
        runtime.finish()
        assert not runtime.has_failed
        exchange.all_gather(b"")
        runtime.close()

    values(run_threads(2, body))
