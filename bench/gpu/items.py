"""Check ``items``: what encoders make is read from its producer on real streams, and a missing order would be seen.

Rounds of a channel as a model of several modalities has them: each rank publishes items in parts, from a stream that is
kept busy, and overwrites what it has published; each reads what the routes have for it on another stream, and compares.
Now and then that stream is rounds behind, and there are rounds in which a rank publishes nothing. The last rounds need
more than the channel holds, so it grows in the middle.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from odc import ItemExchange, RuntimeConfig
from odc.bench.gpu.minibatches import TIMEOUT_S
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, run_ranks
from odc.bench.gpu.streams import Verdicts, streams_of
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange

ROUNDS, QUICK_ROUNDS = 60, 16
CAPACITY_BYTES = 1 << 18
LARGE_BYTES = 64 << 20
_CONTROL_ROUNDS = 12
_DELAY_S = 2e-3
_LAG = 16  # times as long: so late is a stream that it comes rounds after the hosts


def check(setting: Setting) -> Report:
    num_rounds = QUICK_ROUNDS if setting.quick else ROUNDS
    found = {world: run_ranks(setting, world, run, num_rounds, _DELAY_S, True) for world in setting.worlds}
    for world, ranks in found.items():
        failures = [failure for rank in ranks for failure in rank["failures"]]
        if failures:
            raise CheckFailedError(f"{world} ranks: {failures[0]} (and {len(failures) - 1} more)")
    control = run_ranks(setting, min(setting.worlds), run, _CONTROL_ROUNDS, 0.02, False)
    if not any(rank["failures"] for rank in control):
        raise CheckFailedError("with the order of streams taken away nothing was seen: these streams hide mistakes")
    comparisons = sum(rank["comparisons"] for ranks in found.values() for rank in ranks)
    slowest = min(rank["read_bytes_per_s"] for ranks in found.values() for rank in ranks)
    figures = (
        f"{num_rounds} rounds, {comparisons} comparisons; reads of {LARGE_BYTES >> 20} MiB at {slowest / 1e9:.1f} GB/s"
    )
    return Report(figures, {f"{world} ranks": ranks for world, ranks in found.items()})


def routes_of(world_size: int, number: int) -> list[list[list[tuple[int, int, int]]]]:
    """The same on every rank: of each, up to 3 parts of up to 4 items (item, bytes, consumer), float32."""
    generator = random.Random(f"{world_size} {number}")
    largest = 40 if number < 4 else 100_000  # elements; the channel has to grow then
    ids = iter(range(10**6))
    return [
        [
            [
                (next(ids), 4 * generator.randint(0, largest), generator.randrange(world_size))
                for _ in range(generator.randint(0, 4))
            ]
            for _ in range(generator.randint(0, 3))
        ]
        for _ in range(world_size)
    ]


def run(rank: Rank, num_rounds: int, delay_s: float, is_ordered: bool) -> dict[str, Any]:
    """What went wrong on this rank, and how fast it reads. Collective."""
    config = RuntimeConfig(transport=rank.place.transport, timeout_s=TIMEOUT_S)
    items = ItemExchange.create(
        ProcessGroupExchange(), ["items"], config, capacity_bytes=CAPACITY_BYTES, device=rank.device
    )
    with items:
        transport: Any = items._transport
        if not is_ordered:
            transport.order_after = lambda ranks, index, count: None
        streams = streams_of(transport.engine, rank.device)
        verdicts = Verdicts(streams)
        generator = random.Random(rank.rank)
        for number in range(num_rounds):
            _round(rank, items, streams, verdicts, number, generator.random() * delay_s if is_ordered else delay_s)
        failures = verdicts.failures()
        rank.meet()
        memory = items.memory()["items"]
        return {
            "failures": failures,
            "memory_bytes": memory,
            "comparisons": verdicts.count,
            "read_bytes_per_s": _speed(rank, items, streams) if is_ordered else 0.0,
        }


def _value(number: int, item: int) -> float:
    return float(number * 1000 + item)


def _round(rank: Rank, items: ItemExchange, streams: Any, verdicts: Verdicts, number: int, delay_s: float) -> None:
    routes = routes_of(rank.world_size, number)
    one = items.begin("items", routes)
    with streams.on("publish"):
        for part, row in enumerate(routes[rank.rank]):
            tensors = [torch.zeros(num_bytes // 4, device=rank.device) for _, num_bytes, _ in row]
            streams.delay(delay_s)
            for tensor, (item, _, _) in zip(tensors, row, strict=True):
                value = _value(number, item)
                streams.engine.run(lambda tensor=tensor, value=value: tensor.fill_(value))
            one.publish(part, tensors)
            for tensor in tensors:  # may be reused, in the order of the stream
                streams.engine.run(lambda tensor=tensor: tensor.fill_(float("nan")))
    mine = [row for parts in routes for part in parts for row in part if row[2] == rank.rank and row[1]]
    with streams.on("read"):
        outs = [torch.full((num_bytes // 4,), -1.0, device=rank.device) for _, num_bytes, _ in mine]
        streams.delay(delay_s * _LAG if number % 3 == 0 else delay_s / 4)
        one.read_many([item for item, _, _ in mine], outs)
        for (item, _, _), out in zip(mine, outs, strict=True):
            verdicts.expect(f"item {item} of round {number}", out, _value(number, item))
        one.done()


def _speed(rank: Rank, items: ItemExchange, streams: Any) -> float:
    """Bytes per second of one read of a large item from the next rank, the fastest of three."""
    numel, best = LARGE_BYTES // 4 if rank.device.type == "cuda" else 1 << 16, 0.0
    source, out = torch.ones(numel, device=rank.device), torch.zeros(numel, device=rank.device)
    for _ in range(3):
        one = items.begin("items", [[[(r, 4 * numel, (r + 1) % rank.world_size)]] for r in range(rank.world_size)])
        one.publish(0, [source])
        rank.meet()
        started = time.perf_counter()
        one.read((rank.rank - 1) % rank.world_size, out)
        streams.synchronize()
        best = max(best, 4 * numel / (time.perf_counter() - started))
        one.done()
    return best
