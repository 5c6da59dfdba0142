"""Ranks as threads that exchange items: random routes, random orders, and a check of every byte that is read."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from thread_ranks import ThreadExchange, run_threads, values

from odc import Item, ItemExchange, Round, RuntimeConfig
from odc.bench.fake.cuda import FakeEngine

LIMIT_S = 20.0
WAYS = pytest.mark.parametrize("hosts", [1, 2])
ONE_WAY = [[[(7, 8, 1)]], []]  # rank 0 publishes 8 bytes for rank 1
SIZES = (0, 1, 3, 8, 64, 100, 257)
DTYPES = {1: torch.uint8, 3: torch.uint8, 257: torch.uint8, 8: torch.float64, 64: torch.float32, 100: torch.bfloat16}


class Violation(AssertionError):
    """A read has seen what it must not see."""


@dataclass(frozen=True)
class Case:
    """One random run."""

    world_size: int
    num_rounds: int
    num_channels: int
    seed: int
    capacity_bytes: int = 1 << 12
    delay_s: float = 0.0
    transport: str = "auto"
    hosts: int = 1

    @property
    def channels(self) -> list[str]:
        return [f"channel {number}" for number in range(self.num_channels)]

    def routes(self, channel: str, number: int) -> list[list[list[Item]]]:
        """The same on every rank."""
        chance = random.Random(f"{self.seed} {channel} {number}")
        found = []
        item = 0
        for _ in range(self.world_size):
            parts = []
            for _ in range(chance.choice((0, 1, 1, 2, 3))):
                sizes = [chance.choice(SIZES) for _ in range(chance.choice((0, 1, 2, 4)))]
                parts.append([Item(item + i, n, chance.randrange(self.world_size)) for i, n in enumerate(sizes)])
                item += len(sizes)
            found.append(parts)
        return found


def content(case: Case, channel: str, number: int, item: Item) -> torch.Tensor:
    """Of an item in a round; no two in a run are likely to be alike."""
    seed = hash((case.channels.index(channel), number, item.id)) % (1 << 32)
    data = torch.randint(0, 256, (item.num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return data.view(DTYPES.get(item.num_bytes, torch.uint8))


def config_of(exchange: ThreadExchange, transport: str = "auto", hosts: int = 1, **options: Any) -> RuntimeConfig:
    host = f"host{exchange.rank * hosts // exchange.world_size}" if hosts > 1 else ""
    return RuntimeConfig(transport=transport, timeout_s=options.pop("timeout_s", 15), host_id=host, **options)


class RankRun:
    """One rank's part of a case. On streams, everything that touches a tensor happens there."""

    def __init__(self, case: Case, exchange: ThreadExchange) -> None:
        self.case, self.rank, self.exchange = case, exchange.rank, exchange
        self.random = random.Random(case.seed * 31 + exchange.rank)
        self.items = ItemExchange.create(
            exchange,
            case.channels,
            config_of(exchange, case.transport, case.hosts),
            capacity_bytes=case.capacity_bytes,
        )
        self.engine = self.items._transport.engine
        self.violations: list[str] = []
        self.bytes_read = 0

    def on(self, stream: str) -> AbstractContextManager[object]:
        return self.engine.on(stream) if isinstance(self.engine, FakeEngine) else nullcontext()

    def pause(self) -> None:
        if self.case.delay_s:
            time.sleep(self.random.random() * self.case.delay_s)

    def run(self) -> int:
        """Bytes read."""
        with self.items:
            open_rounds: list[Round] = []
            for number in range(1, self.case.num_rounds + 1):
                begun = []
                for channel in self.case.channels:
                    self.pause()
                    begun.append(self.items.begin(channel, self.case.routes(channel, number)))
                self.end(open_rounds)  # rounds are begun while those before them are being read
                unread = self.publish_and_read(begun)
                self.left = unread
                open_rounds = begun
            self.end(open_rounds)
            self.finish()
        return self.bytes_read

    def finish(self) -> None:
        assert self.engine.synchronize(20)
        self.exchange.all_gather(b"")
        if isinstance(self.engine, FakeEngine):
            self.violations += [repr(error) for error in self.engine.errors]
        if self.violations:
            raise Violation(f"rank {self.rank}: {self.violations[0]} (and {len(self.violations) - 1} more)")

    def publish_and_read(self, rounds: list[Round]) -> dict[Round, list[Item]]:
        """Level by level: what a rank reads before it has published its part p are parts before p of others, so no two
        ranks wait for each other. What is not read here is read when the next round has begun."""
        wanted: list[tuple[int, Round, Item]] = []
        left: dict[Round, list[Item]] = {one: [] for one in rounds}
        for one in rounds:
            routes = self.case.routes(one.channel, one.number)
            for parts in routes:
                for level, part in enumerate(parts):
                    wanted += [(level, one, item) for item in part if item.consumer == self.rank]
        for level in range(4):
            for one in self.random.sample(rounds, len(rounds)):
                self.publish(one, level)
            for row in self.random.sample(wanted, len(wanted)):
                if row[0] <= level and self.random.random() < 0.5:
                    wanted.remove(row)
                    self.read(row[1], [row[2]])
        for _, one, item in wanted:
            left[one].append(item)
        return left

    def publish(self, one: Round, part: int) -> None:
        routes = self.case.routes(one.channel, one.number)[self.rank]
        if part >= len(routes) or (not routes[part] and self.random.random() < 0.5):
            return
        self.pause()
        tensors = [torch.zeros_like(content(self.case, one.channel, one.number, item)) for item in routes[part]]
        with self.on(self.random.choice(["encode", "encode too"])):
            for tensor, item in zip(tensors, routes[part], strict=True):
                value = content(self.case, one.channel, one.number, item)
                self.engine.run(lambda tensor=tensor, value=value: tensor.copy_(value))
            one.publish(part, tensors)
            for tensor in tensors:  # used for something else, in the order of the stream
                self.engine.run(lambda tensor=tensor: tensor.zero_())

    def read(self, one: Round, items: list[Item]) -> None:
        self.pause()
        with self.on(self.random.choice(["language", "language too"])):
            outs = [torch.zeros_like(content(self.case, one.channel, one.number, item)) for item in items]
            if self.engine.has_streams and self.random.random() < 0.1:  # it comes to this rounds after the hosts
                self.engine.run(partial(time.sleep, 10 * self.case.delay_s))
            one.read_many([item.id for item in items], outs)
            for item, out in zip(items, outs, strict=True):
                self.expect(one, item, out)
                self.bytes_read += item.num_bytes

    def expect(self, one: Round, item: Item, out: torch.Tensor) -> None:
        wanted = content(self.case, one.channel, one.number, item)

        def check() -> None:
            if not torch.equal(out.view(torch.uint8), wanted.view(torch.uint8)):
                self.violations.append(f"item {item} of round {one.number} of {one.channel!r} has other bytes")

        self.engine.run(check)

    def end(self, rounds: list[Round]) -> None:
        for one in rounds:
            self.read(one, self.left[one])
            self.pause()
            with self.on("step"):
                one.done()


def run_case(case: Case) -> None:
    """Every byte that the routes speak of is read, and right."""
    found = values(run_threads(case.world_size, lambda exchange: RankRun(case, exchange).run(), timeout_s=120))
    expected = [0] * case.world_size
    for channel in case.channels:
        for number in range(1, case.num_rounds + 1):
            for parts in case.routes(channel, number):
                for item in (item for part in parts for item in part):
                    expected[item.consumer] += item.num_bytes
    assert found == expected


@st.composite
def cases(draw: st.DrawFn, transport: str = "auto", least_hosts: int = 1) -> Case:
    world_size = draw(st.integers(least_hosts, 4))
    return Case(
        world_size=world_size,
        num_rounds=draw(st.integers(1, 8)),
        num_channels=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 10**6)),
        capacity_bytes=draw(st.sampled_from([0, 200, 1 << 12])),
        delay_s=draw(st.sampled_from([0.0, 0.0005, 0.002])),
        transport=transport,
        hosts=draw(st.integers(least_hosts, world_size)) if least_hosts > 1 else 1,
    )


def run_ranks_of(
    world_size: int,
    body: Callable[[ItemExchange, ThreadExchange], Any],
    *,
    channels: tuple[str, ...] = ("c",),
    capacity_bytes: int = 1 << 12,
    **options: Any,
) -> list[Any]:
    """``body`` on every rank; results, or exceptions."""

    def run(exchange: ThreadExchange) -> Any:
        config = config_of(exchange, **options)
        with ItemExchange.create(exchange, channels, config, capacity_bytes=capacity_bytes) as items:
            return body(items, exchange)

    return run_threads(world_size, run, 60)


def reach(event: threading.Event) -> None:
    assert event.wait(LIMIT_S), "the other rank has not come so far"


def read_value(one: Any, item: int = 7) -> int:
    out = torch.full((1,), -1)
    one.read(item, out)
    return int(out)
