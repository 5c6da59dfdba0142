"""Minibatches whose work happens later than the call, on streams: what each rank sees of them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from thread_ranks import ThreadExchange, run_threads, values

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.fake.cuda import FakeEngine
from odc.transports.cuda_ipc import CudaIpcTransport

NUMEL = 40


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


def run_case(case: Case) -> list[int]:
    return values(run_threads(case.world_size, lambda exchange: RankRun(case, exchange).run(), timeout_s=120))


def num_checks(case: Case) -> list[int]:
    sums = sum(any(row) for row in case.counts)
    gathers = [0 if case.blind else sum(row[rank] for row in case.counts) for rank in range(case.world_size)]
    return [case.num_units * (sums + own) for own in gathers]


# Rank 1's streams are slow at everything that others must not overtake.
ADVERSARY = Case(
    counts=((1, 2), (2, 1), (1, 1)),
    num_units=2,
    seed=3,
    slow=(("fill", 1, 0.01), ("push", 1, 0.01), ("gather", 1, 0.01), ("read", 1, 0.01)),
)


# Where it gathers only, the pushes of a minibatch, for which finish waits, are long over while it still reads.
SLOW_READER = replace(ADVERSARY, slow=(("gather", 1, 0.05),))


def without_order(monkeypatch: pytest.MonkeyPatch, transport: type[CudaIpcTransport], dropped: range) -> None:
    """Let streams ignore the order that some signals carry."""
    original = transport.order_after

    def order_after(self: CudaIpcTransport, ranks: Sequence[int], index: int, count: int) -> None:
        if index not in dropped:
            original(self, ranks, index, count)

    monkeypatch.setattr(transport, "order_after", order_after)
