"""How long ranks wait: epochs of streams on shipped laws, and the rows of their table.

The second table of :mod:`.batching`, which says what the ways are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from odc.balance import sample_lengths
from odc.balance.checks import IntArray
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.rounds import AlignedRounds, EqualStepRounds, QuotaRounds, Rounds
from odc.balance.random_numbers import random_generator
from odc.balance.simulate.simulator import Scenario
from odc.bench.batching.streamed import StreamedEpoch, stream_epoch
from odc.bench.harness.benchmark import Column
from odc.bench.planning.paper_costs import paper_cost

WORLD_SIZE, POOL_SIZE = 8, 1024


def shuffled(law: str, num_samples: int, seed: int) -> IntArray:
    """Lengths of a law in random order, (num_samples,)."""
    lengths = sample_lengths(law, num_samples, seed)
    return lengths[np.argsort(random_generator("batching", seed).random_raw(num_samples), kind="stable")]


WAITING = (("longalign", 10_000, 65536), ("sharegpt4o", 57_284, 16384))
"""Laws, numbers of samples and token budgets of the second table."""
MINIBATCH_SIZE, SMALL_POOL = 4, 256
STREAMS = ("dgap", "steps", "pool-sort", "minibatch", "minibatch/shards")
"""What is streamed in the second table."""


def simulate_stream(kind: str, law: str, num_samples: int, max_tokens: int, seed: int = 0) -> StreamedEpoch:
    """One row of the second table."""
    cost = paper_cost("1.5B")
    padded = Grouping("token-budget", max_tokens, None, True)
    packed = Grouping("pack", max_tokens, None, True)
    in_fours = Grouping("pool-sort", 4 * max_tokens, 4, True)
    make: dict[str, Callable[[int], Rounds]] = {
        "dgap": lambda rank: AlignedRounds(padded, SMALL_POOL, rank, WORLD_SIZE),
        "steps": lambda rank: EqualStepRounds(padded, SMALL_POOL, rank, WORLD_SIZE, cost=cost),
        "pool-sort": lambda rank: AlignedRounds(in_fours, POOL_SIZE, rank, WORLD_SIZE),
        "minibatch": lambda rank: QuotaRounds(
            packed,
            SMALL_POOL,
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
    """LB-Mini on the same samples, whose lengths it knows; each minibatch is the next ones in their order.

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
    """Until 85 % of the samples are done."""
    padding_percent: float = 0.0
    samples_per_step: float = float(MINIBATCH_SIZE)
    """Of one rank, on average."""
    oldest: int = 0
    """Most steps that a sample has waited in its pool."""

    @classmethod
    def of(cls, law: str, kind: str, epoch: StreamedEpoch) -> StreamRow:
        """Of an epoch."""
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
    """All rows of one law."""
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
