"""Checks ``protocol``, ``soak`` and ``items``: random minibatches, many pushes, and outputs of encoders, on streams."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from odc import ItemExchange, RuntimeConfig
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.streams import MODES, TIMEOUT_S, Case, RandomRun, Verdicts, streams_of
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange

CASES, QUICK_CASES = 20, 2
NUMELS = (40, 4099, 1_000_003)
_CONTROL_TRIES = 5
_NOTHING_SEEN = "with the order of streams taken away nothing was seen: these streams hide mistakes"


def _in_short(failures: Sequence[str]) -> str:
    return f"{failures[0]} (and {len(failures) - 1} more)" if failures else ""


def check_protocol(setting: Setting) -> Report:
    """Check ``protocol``: random minibatches on real streams, and that they would show a missing order.

    The host logic of the protocol is proven without a GPU, on streams that are threads. Here the streams are the
    device's: gathers, pushes and steps on three streams of each of 2 and 4 ranks, random microbatch counts (0
    included), pushes by daemon, by atomics, and one sum per client.
    """
    found = {f"{world} ranks": run_ranks(setting, world, run_cases)[0] for world in setting.worlds}
    seen = sum(run_ranks(setting, min(setting.worlds), run_without_order))
    require(seen > 0, _NOTHING_SEEN)
    cases, comparisons = (sum(of_world[what] for of_world in found.values()) for what in ("cases", "comparisons"))
    text = f"{cases} cases, {comparisons} comparisons per rank; a control without order is seen"
    return Report(text, {**found, "violations seen without order": seen})


def run_cases(rank: Rank) -> dict[str, int]:
    """Run all random cases, the same on every rank."""
    numels = NUMELS if rank.device.type == "cuda" else NUMELS[:2]
    done = {"cases": 0, "comparisons": 0}
    for mode in MODES:
        generator = random.Random(f"{mode} {rank.world_size}")
        for _ in range(QUICK_CASES if rank.place.quick else CASES):
            case = Case.draw(generator, rank.world_size, mode, numels)
            run = RandomRun(case, rank)
            failures = run.run()
            require(not failures, f"{case}: {_in_short(failures)}")
            done["cases"] += 1
            done["comparisons"] += run.verdicts.count
            rank.meet()
    return done


def run_without_order(rank: Rank) -> int:
    """How many wrong values this rank sees when its streams do not wait for other ranks' streams.

    Nobody waits for a device then, only for signals of hosts, so this ends whatever is read.
    """
    seen = 0
    for seed in range(_CONTROL_TRIES):
        counts = ((1,) * rank.world_size,) * 3
        case = Case(counts=counts, numel=4099, seed=seed, slow_rank=rank.world_size - 1, longest_delay_s=0.02)
        run = RandomRun(case, rank)
        transport: Any = run.runtime._transport
        transport.order_after = lambda ranks, index, count: None
        seen += len(run.run())
        rank.meet()
    return seen


NUMEL = 65_537
MOST_PUSHES = 4
_LIMIT_S = 600.0
_LONGEST_DELAY_S = 3e-4
_SOAK_MODES = ("daemon", "direct")
_CONTROL_MINIBATCHES = 3


def check_soak(setting: Setting) -> Report:
    """Check ``soak``: many pushes under uneven load, and none is lost or counted twice.

    Rank 0 only owns; the others push whole numbers, every one a random number of times in each minibatch, on streams
    that are busy for random times. The sums of each minibatch are compared on the device, exactly, and what came out
    is read once, at the end. A control leaves out one push and must be noticed.
    """
    world_size, minibatches = max(setting.worlds), setting.minibatches
    data: dict[str, object] = {"ranks": world_size, "minibatches": minibatches}
    for mode in _SOAK_MODES:
        started = time.monotonic()
        wrong, pushes = _soaked(setting, world_size, mode, minibatches, False)
        data[mode] = {"pushes": pushes, "seconds": time.monotonic() - started}
        require(not wrong, f"{mode}: {wrong} times elements of sums over {pushes} pushes are wrong")
        lost, _ = _soaked(setting, world_size, mode, _CONTROL_MINIBATCHES, True)
        require(lost > 0, f"{mode}: a push that was left out on purpose was not noticed")
    total = minibatches * len(_SOAK_MODES)
    return Report(f"{world_size - 1} clients, {total} minibatches, {pushes} pushes by atomics, none lost", data)


def _soaked(setting: Setting, world_size: int, mode: str, minibatches: int, lose_one: bool) -> tuple[int, int]:
    """(wrong sums, pushes of one unit) over all ranks."""
    results = run_ranks(setting, world_size, soak, mode, minibatches, lose_one, limit_s=_LIMIT_S)
    return sum(wrong for wrong, _ in results), sum(pushes for _, pushes in results)


def soak(rank: Rank, mode: str, minibatches: int, lose_one: bool) -> tuple[int, int]:
    """Run the soak on this rank. Returns how often its sums were wrong, and how often it has pushed."""
    chance = random.Random(minibatches)
    clients = range(1, rank.world_size)
    counts = [[0, *(chance.randint(0, MOST_PUSHES) for _ in clients)] for _ in range(minibatches)]
    # The others count on two more of the last rank.
    counts[0][-1] += 1 if lose_one and rank.rank == rank.world_size - 1 else 2
    numel = NUMEL if rank.device.type == "cuda" else NUMEL // 64
    by_minibatch = tuple(map(tuple, counts))
    case = Case(by_minibatch, mode, num_units=1, numel=numel, blind=True, longest_delay_s=_LONGEST_DELAY_S)
    return len(RandomRun(case, rank).run()), sum(row[rank.rank] for row in counts)


ROUNDS, QUICK_ROUNDS = 60, 16
CAPACITY_BYTES = 1 << 18
LARGE_BYTES = 64 << 20
_CONTROL_ROUNDS = 12
_DELAY_S = 2e-3
_LAG = 16  # times as long: so late is a stream that it comes rounds after the hosts


def check_items(setting: Setting) -> Report:
    """Check ``items``: what encoders make is read from its producer on real streams, and a missing order would be seen.

    Rounds of a channel as a model of several modalities has them: each rank publishes items in parts, from a stream
    that is kept busy, and overwrites what it has published; each reads what the routes have for it on another stream,
    and compares. Now and then that stream is rounds behind, and there are rounds in which a rank publishes nothing. The
    last rounds need more than the channel holds, so it grows in the middle.
    """
    num_rounds = QUICK_ROUNDS if setting.quick else ROUNDS
    found = {world: run_ranks(setting, world, exchange_items, num_rounds, _DELAY_S, True) for world in setting.worlds}
    for world, ranks in found.items():
        failures = [failure for rank in ranks for failure in rank["failures"]]
        require(not failures, f"{world} ranks: {_in_short(failures)}")
    control = run_ranks(setting, min(setting.worlds), exchange_items, _CONTROL_ROUNDS, 0.02, False)
    require(any(rank["failures"] for rank in control), _NOTHING_SEEN)
    comparisons = sum(rank["comparisons"] for ranks in found.values() for rank in ranks)
    slowest = min(rank["read_bytes_per_s"] for ranks in found.values() for rank in ranks)
    figures = (
        f"{num_rounds} rounds, {comparisons} comparisons; reads of {LARGE_BYTES >> 20} MiB at {slowest / 1e9:.1f} GB/s"
    )
    return Report(figures, {f"{world} ranks": ranks for world, ranks in found.items()})


def routes_of(world_size: int, number: int) -> list[list[list[tuple[int, int, int]]]]:
    """Random routes, the same on every rank. Each rank has up to 3 parts of up to 4 items (item, bytes, consumer) of
    float32."""
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


def exchange_items(rank: Rank, num_rounds: int, delay_s: float, is_ordered: bool) -> dict[str, Any]:
    """Exchange items; return what went wrong on this rank, and how fast it reads. Collective."""
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


def _item_value(number: int, item: int) -> float:
    return float(number * 1000 + item)


def _round(rank: Rank, items: ItemExchange, streams: Any, verdicts: Verdicts, number: int, delay_s: float) -> None:
    routes = routes_of(rank.world_size, number)
    one = items.begin("items", routes)
    with streams.on("publish"):
        for part, row in enumerate(routes[rank.rank]):
            tensors = [torch.zeros(num_bytes // 4, device=rank.device) for _, num_bytes, _ in row]
            streams.delay(delay_s)
            for tensor, (item, _, _) in zip(tensors, row, strict=True):
                value = _item_value(number, item)
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
            verdicts.expect(f"item {item} of round {number}", out, _item_value(number, item))
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
