"""An epoch of a stream on all ranks, simulated in one process by the loader's own code, without data.

The lengths alone decide which samples each rank trains on in each step, and so what the step costs. The second half of
this module measures how long ranks wait in such an epoch, for each way to group samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from odc.balance import sample_lengths
from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import CostModel, evaluate
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.quota import deal
from odc.balance.grouping.rounds import AlignedRounds, Entry, EqualStepRounds, QuotaRounds, Rounds, lacking
from odc.balance.random_numbers import random_generator
from odc.balance.simulate.simulator import Scenario
from odc.bench.harness.benchmark import Column
from odc.bench.planning.paper_costs import paper_cost


@dataclass
class StreamedEpoch:
    """A simulated epoch of all ranks."""

    costs: FloatArray
    """Cost of each step on each rank, padding included, (num_steps, world_size)."""

    num_samples: IntArray
    """Samples of each step, all ranks together, (num_steps,)."""

    tokens: int
    padded_tokens: int
    """Number of tokens, padding included."""

    oldest: int
    """The largest number of steps that a sample has waited in its pool."""

    @property
    def updates(self) -> int:
        """Number of steps."""
        return len(self.costs)

    @property
    def time_per_1000(self) -> float:
        """Sum over steps of the slowest rank's cost, per 1000 samples."""
        return float(self.costs.max(axis=1).sum()) * 1000 / int(self.num_samples.sum())

    @property
    def padding_percent(self) -> float:
        """Padding, in percent of all tokens."""
        return 100 * (1 - self.tokens / self.padded_tokens)

    def bubble_rate(self, part: float = 1.0) -> float:
        """Idle time over total time of the steps until ``part`` of the samples is done."""
        done = np.cumsum(self.num_samples)
        costs = self.costs[: int(np.searchsorted(done, part * done[-1], side="right" if part == 1.0 else "left")) + 1]
        return float(1 - costs.sum() / (costs.max(axis=1).sum() * costs.shape[1]))


def stream_epoch(
    lengths: IntArray,
    cost: CostModel,
    rounds: Sequence[Rounds],
    *,
    has_indices: bool = True,
) -> StreamedEpoch:
    """Simulate the rounds of all ranks until no sample is left.

    Args:
        lengths: of the shuffled samples, (num_samples,), each with as many loss tokens.
        rounds: of every rank, with empty pools.
        has_indices: the data set has indices, so samples are dealt out as ranks need them, and where rounds want
            that, those of the last pools are dealt anew. Else sample i is rank i % world_size's.
    """
    world_size, pool_size = len(rounds), rounds[0].pool_size
    costs = evaluate(cost, lengths).tolist()
    entries = [Entry(i, length, length, costs[i]) for i, length in enumerate(lengths.tolist())]
    shares = [entries[rank::world_size] for rank in range(world_size)]
    arrived: dict[int, int] = {}
    coming, is_dealt_anew = 0, False
    table: list[list[float]] = []
    numbers: list[int] = []
    tokens = padded_tokens = oldest = 0
    pooled = [0] * world_size
    while True:
        wanted = lacking(pooled, pool_size)
        if has_indices:
            wanted = deal(wanted, len(entries) - coming)
        for rank, (number, share) in enumerate(zip(wanted, shares, strict=True)):
            come = entries[coming : coming + number] if has_indices else share[:number]
            coming += len(come)
            del share[:number]
            arrived.update((entry.place, len(table)) for entry in come)
            rounds[rank].add(come)
        if has_indices and coming == len(entries) and rounds[0].deals_anew and not is_dealt_anew:
            is_dealt_anew = True
            vectors = np.array([mine.pool_vector() for mine in rounds])
            for mine, places in [(mine, mine.dealt_anew(vectors)) for mine in rounds]:
                mine.replace([entries[place] for place in places])
        left = [has_indices or not share for share in shares]
        ends = [coming == len(entries) and none_left for none_left in left]
        offers = np.array([mine.offer(end) for mine, end in zip(rounds, ends, strict=True)])
        planned = [mine.plan(offers) for mine in rounds]
        for steps in zip(*planned, strict=True):
            is_packed = rounds[0].grouping.layout == "packed"
            loads = [load_of(step.microbatches, is_packed) for step in steps]
            table.append([load for load, _, _ in loads])
            numbers.append(steps[0].num_samples)
            tokens += sum(plain for _, plain, _ in loads)
            padded_tokens += sum(padded for _, _, padded in loads)
            places = [entry.place for step in steps for part in step.microbatches for entry in part]
            oldest = max(oldest, *(len(table) - 1 - arrived[place] for place in places))
        if rounds[0].is_done:
            return StreamedEpoch(np.array(table), np.array(numbers), tokens, padded_tokens, oldest)
        pooled = rounds[0].pooled if len(rounds[0].pooled) == world_size else [mine.pooled[0] for mine in rounds]


def load_of(microbatches: Iterable[Sequence[Entry]], is_packed: bool) -> tuple[float, int, int]:
    """Cost, tokens, and tokens with padding of one rank in one step. In a padded microbatch each sample costs as much
    as the longest one."""
    cost, tokens, padded = 0.0, 0, 0
    for part in microbatches:
        plain = sum(entry.length for entry in part)
        longest = max(part, key=lambda entry: entry.length)
        tokens += plain
        padded += plain if is_packed else len(part) * longest.length
        cost += sum(entry.cost for entry in part) if is_packed else len(part) * longest.cost
    return cost, tokens, padded


# How long ranks wait


WORLD_SIZE, POOL_SIZE = 8, 1024


def shuffled(law: str, num_samples: int, seed: int) -> IntArray:
    """Lengths of a law in random order, (num_samples,)."""
    lengths = sample_lengths(law, num_samples, seed)
    return lengths[np.argsort(random_generator("batching", seed).random_raw(num_samples), kind="stable")]


WAITING = (("longalign", 10_000, 65536), ("sharegpt4o", 57_284, 16384))
"""Laws, numbers of samples and token budgets of the second table."""
MINIBATCH_SIZE, SMALL_POOL = 4, 256
STREAMS = ("dgap", "steps", "pool-sort", "minibatch", "minibatch/shards")
"""The kinds of streams in the second table."""


def simulate_stream(kind: str, law: str, num_samples: int, max_tokens: int, seed: int = 0) -> StreamedEpoch:
    """Simulate one row of the second table."""
    cost = paper_cost("1.5B")
    padded = Grouping("token-budget", max_tokens, SMALL_POOL)
    packed = Grouping("pack", max_tokens, SMALL_POOL)
    in_fours = Grouping("pool-sort", 4 * max_tokens, POOL_SIZE, batch_size=4)
    make: dict[str, Callable[[int], Rounds]] = {
        "dgap": lambda rank: AlignedRounds(padded, rank, WORLD_SIZE),
        "steps": lambda rank: EqualStepRounds(padded, rank, WORLD_SIZE, cost=cost),
        "pool-sort": lambda rank: AlignedRounds(in_fours, rank, WORLD_SIZE),
        "minibatch": lambda rank: QuotaRounds(
            packed,
            rank,
            WORLD_SIZE,
            minibatch_size=MINIBATCH_SIZE,
            num_samples=None if is_iterable else num_samples,
        ),
    }
    name, _, is_iterable = kind.partition("/")
    rounds = [make[name](rank) for rank in range(WORLD_SIZE)]
    return stream_epoch(shuffled(law, num_samples, seed), cost, rounds, has_indices=not is_iterable)


def simulate_known(law: str, num_samples: int, seed: int = 0) -> tuple[float, float]:
    """Simulate LB-Mini, which knows all lengths, on the same samples. Each minibatch is the next samples in their
    order.

    Returns:
        Time per 1000 samples, bubble rate.
    """
    scenario = Scenario(shuffled(law, num_samples, seed), paper_cost("1.5B"), WORLD_SIZE, MINIBATCH_SIZE)
    planned = scenario.plan("lb-mini")
    times = [minibatch.plan.makespan("odc") for minibatch in planned.minibatches]
    trained_on = sum(minibatch.plan.num_samples for minibatch in planned.minibatches)
    return sum(times) * 1000 / trained_on, planned.run("odc").bubble_rate


@dataclass(frozen=True)
class StreamRow:
    """A row of the second table."""

    law: str
    kind: str
    time_per_1000: float
    bubble_percent: float
    early_bubble_percent: float | None = None
    """Bubble rate until 85 % of the samples are done."""
    padding_percent: float = 0.0
    samples_per_step: float = float(MINIBATCH_SIZE)
    """Samples of one rank in a step, on average."""
    oldest: int = 0
    """The largest number of steps that a sample has waited in its pool."""

    @classmethod
    def of(cls, law: str, kind: str, epoch: StreamedEpoch) -> StreamRow:
        """The row of a simulated epoch."""
        return cls(
            law,
            kind,
            round(epoch.time_per_1000, 3),
            round(100 * epoch.bubble_rate(), 3),
            round(100 * epoch.bubble_rate(0.85), 3),
            round(epoch.padding_percent, 3),
            round(int(epoch.num_samples.sum()) / WORLD_SIZE / epoch.updates, 2),
            epoch.oldest,
        )


def simulate_streams(law: str, num_samples: int, max_tokens: int, seed: int = 0) -> list[StreamRow]:
    """Simulate all rows of one law."""
    time_per_1000, bubble_rate = simulate_known(law, num_samples, seed)
    known = StreamRow(law, "LB-Mini (known)", round(time_per_1000, 3), round(100 * bubble_rate, 3))
    streamed = [StreamRow.of(law, kind, simulate_stream(kind, law, num_samples, max_tokens, seed)) for kind in STREAMS]
    return [*streamed, known]


STREAM_KEYS = (Column("data set", "law"), Column("aligned by", "kind"))
STREAM_COLUMNS = (
    Column("time/1000", "time_per_1000", ".1f"),
    Column("bubble %", "bubble_percent", ".2f"),
    Column("until 85 %", "early_bubble_percent", ".2f"),
    Column("padding %", "padding_percent", ".1f"),
    Column("samples", "samples_per_step", ".1f"),
    Column("waited", "oldest"),
)
