"""An epoch of a stream on all ranks, in one process: the loader's own rounds, without data behind them.

Which samples every rank trains on in each step, and so what the step costs, follows from the lengths alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import CostModel, evaluate
from odc.balance.grouping.quota import deal
from odc.balance.grouping.rounds import Entry, Rounds, lacking


@dataclass
class StreamedEpoch:
    """What all ranks have done."""

    costs: FloatArray
    """Of every step and rank, padding included, (num_steps, world_size)."""

    num_samples: IntArray
    """Of every step, all ranks together, (num_steps,)."""

    tokens: int
    padded_tokens: int
    """With padding."""

    oldest: int
    """Most steps that a sample has waited in its pool."""

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
        """Padding in all tokens."""
        return 100 * (1 - self.tokens / self.padded_tokens)

    def bubble_rate(self, part: float = 1.0) -> float:
        """Idle time over total time of the steps until this part of the samples is done."""
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
    """Run the rounds of all ranks until nothing is left.

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
    """Cost, tokens, and tokens with padding of one rank in one step. Where samples are padded, each costs what the
    longest of its microbatch does."""
    cost, tokens, padded = 0.0, 0, 0
    for part in microbatches:
        plain = sum(entry.length for entry in part)
        longest = max(part, key=lambda entry: entry.length)
        tokens += plain
        padded += plain if is_packed else len(part) * longest.length
        cost += sum(entry.cost for entry in part) if is_packed else len(part) * longest.cost
    return cost, tokens, padded
