"""What batches an epoch has under online dynamic batching: the paper's updates and padding, rebuilt from lengths alone.

The first table rebuilds Tables 13 and 14 of the paper on Online Dynamic Batching (ODB). Samples are drawn from the
shipped laws of its Table 10. Their number is what the paper trained on (updates x samples per update: 95 % of each data
set). There are 8 ranks. Methods:

    odb         each rank fills a pool of 1024 samples from its share and groups them by a token budget. The ranks align
                their numbers of batches; samples that are left over go back into the pools
    gmt         the paper's offline comparator: all samples are sorted, cut into padded batches of the token budget, and
                dealt out to the ranks
    standard    batches of a fixed size

The second table shows how long ranks wait. Costs are those of the 1.5B model of the ODC paper (:mod:`.paper_costs`).
The loader's own code forms the batches; there is no data behind the lengths.

    dgap, pool-sort, steps      for collectives, where each step waits for the slowest rank: ODB's alignment, batches of
                                a sorted pool, steps of equal cost
    minibatch                   for on-demand communication: each rank packs an equal quota of cost from its own pool

The third table rebuilds ODB's Tables 4 and 5: how many samples of an epoch may be dropped without join, and how many
come twice because the number of ranks does not divide the number of samples.

Not covered: accuracy and samples per second, which need the models and the GPUs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

import numpy as np
import typer

from odc.balance import LinearCost
from odc.balance.checks import IntArray
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.rounds import AlignedRounds
from odc.bench.batching.streamed import (
    MINIBATCH_SIZE,
    POOL_SIZE,
    SMALL_POOL,
    STREAM_COLUMNS,
    STREAM_KEYS,
    STREAMS,
    WAITING,
    WORLD_SIZE,
    StreamedEpoch,
    StreamRow,
    shuffled,
    simulate_streams,
    stream_epoch,
)
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table

LARGEST_ERROR = {"odb": 0.09, "gmt": 0.01, "standard": 1.0}
"""The largest allowed difference between simulated and published values: relative for updates of ODB and GMT, in points
for padding of Standard."""


@dataclass(frozen=True)
class Row:
    """A row of Table 13 (8B) or 14 (2B)."""

    dataset: str
    model: str
    method: str
    setting: int
    """Token budget of ODB and GMT, batch size of Standard."""

    num_samples: int
    paper: float
    """Updates per epoch of ODB and GMT, padding of Standard in percent."""

    padding_percent: float | None = None
    """Published padding of ODB."""


# Samples that were trained on: updates, and samples of each on average.
ULTRACHAT, LLAVA, SHAREGPT4O = round(2692 * 73.36), round(844 * 177.59), round(1030 * 52.82)
ROWS = (
    Row("ultrachat", "8B", "odb", 12288, ULTRACHAT, 2692, 1.3),
    Row("llava", "8B", "odb", 12288, LLAVA, 844, 2.1),
    Row("sharegpt4o", "8B", "odb", 12288, SHAREGPT4O, 1030, 0.9),
    Row("ultrachat", "2B", "odb", 16384, ULTRACHAT, 2003, 1.7),
    Row("llava", "2B", "odb", 8192, LLAVA, 1259, 1.6),
    Row("sharegpt4o", "2B", "odb", 4096, SHAREGPT4O, 2719, 0.4),
    Row("ultrachat", "8B", "gmt", 16384, ULTRACHAT, 1890),
    Row("llava", "8B", "gmt", 16384, LLAVA, 591),
    Row("llava", "2B", "gmt", 4096, LLAVA, 2496),
    Row("llava", "8B", "standard", 8, LLAVA, 32.5),
    Row("llava", "2B", "standard", 4, LLAVA, 24.2),
)


def odb_epoch(
    lengths: IntArray,
    max_tokens: int,
    world_size: int = WORLD_SIZE,
    pool_size: int = POOL_SIZE,
    *,
    joins: bool = True,
) -> StreamedEpoch:
    """Simulate an epoch of ODB. Sample i belongs to rank i % world_size. With ``joins`` a rank whose samples are used
    up goes on until all ranks are done.

    Args:
        lengths: of the shuffled samples, (num_samples,).
    """
    grouping = Grouping("token-budget", max_tokens, pool_size, shuffle=False)
    rounds = [AlignedRounds(grouping, rank, world_size, joins=joins) for rank in range(world_size)]
    return stream_epoch(lengths, LinearCost(), rounds, has_indices=False)


def gmt_updates(lengths: IntArray, max_tokens: int, world_size: int = WORLD_SIZE) -> int:
    """Number of updates of the offline comparator (appendix I). All samples are sorted and cut into padded batches,
    each as large as fits. The list of batches is filled up to a multiple of the ranks."""
    ascending = np.sort(lengths).tolist()
    num_batches, size = 0, 0
    for length in ascending:
        if size and (size + 1) * length > max_tokens:
            num_batches, size = num_batches + 1, 0
        size += 1
    return -(-(num_batches + bool(size)) // world_size)


def standard_padding(lengths: IntArray, batch_size: int) -> float:
    """Padding in percent if the samples are cut, in their order, into batches of ``batch_size``."""
    batches = [lengths[start : start + batch_size] for start in range(0, lengths.size, batch_size)]
    return float(100 * (1 - lengths.sum() / sum(int(batch.max()) * batch.size for batch in batches)))


@dataclass(frozen=True)
class Result:
    """A published row beside its simulated values."""

    row: Row
    simulated: float
    simulated_padding_percent: float | None = None

    @property
    def error(self) -> float:
        """Simulated less published, in the units of :data:`LARGEST_ERROR`."""
        difference = self.simulated - self.row.paper
        return difference if self.row.method == "standard" else difference / self.row.paper

    @property
    def is_good(self) -> bool:
        return abs(self.error) <= LARGEST_ERROR[self.row.method]


def simulate(row: Row, seed: int = 0) -> Result:
    """Simulate one row; its lengths are drawn anew, in random order."""
    lengths = shuffled(row.dataset, row.num_samples, seed)
    if row.method == "odb":
        epoch = odb_epoch(lengths, row.setting)
        assert int(epoch.num_samples.sum()) == row.num_samples
        return Result(row, epoch.updates, epoch.padding_percent)
    if row.method == "gmt":
        return Result(row, gmt_updates(lengths, row.setting))
    return Result(row, standard_padding(lengths, row.setting))


@dataclass(frozen=True)
class Bound:
    """A row of Table 4. Its data set has no law if it cannot be simulated."""

    dataset: str
    max_tokens: int
    num_samples: int
    depth: int
    """D, the largest number of a rank's samples that are fetched and not yet emitted."""

    paper_percent: float

    @property
    def percent(self) -> float:
        """The largest part of the samples that an epoch without join drops: W x D of N (lemma 4)."""
        return 100 * WORLD_SIZE * self.depth / self.num_samples


BOUNDS = (
    Bound("llava", 12288, 157_712, 4096, 20.8),
    Bound("ultrachat", 8192, 207_865, 1024, 3.9),
    Bound("ultrachat", 8192, 207_865, 4096, 15.8),
    Bound("ultrachat", 16384, 207_865, 2048, 7.9),
    Bound("sharegpt4o", 4096, 54_424, 4096, 60.2),
    Bound("MM-Mix", 8192, 545_178, 1024, 1.5),
    Bound("MM-Mix", 4096, 545_178, 8192, 12.0),
)
SURPLUS = {"sharegpt4o": (57_284, 4), "ultrachat": (207_865, 7)}
"""Table 5: the number of samples of a data set, and how many of them come twice on 8 ranks."""


def dropped_percent(bound: Bound, seed: int = 0) -> float | None:
    """The part of the samples that is left in pools and shares when the first rank has used up its own; None if there
    is no law for the data set."""
    if bound.dataset == "MM-Mix":
        return None
    lengths = shuffled(bound.dataset, bound.num_samples, seed)
    epoch = odb_epoch(lengths, bound.max_tokens, pool_size=bound.depth, joins=False)
    return 100 * (1 - int(epoch.num_samples.sum()) / bound.num_samples)


def measure(
    run: Run,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths and their order.")] = 0,
    only: Annotated[str, typer.Option(help="Of the laws' names, e.g. sharegpt4o.")] = "",
) -> Entries:
    rows = [row for row in ROWS if only in row.dataset]
    waiting = [each for each in WAITING if only in each[0]]
    bounds = [bound for bound in BOUNDS if only in bound.dataset]
    total = sum(row.num_samples for row in rows) + sum(bound.num_samples for bound in bounds)
    run.begin(total + len(STREAMS) * sum(number for _, number, _ in waiting))
    results: list[Result] = []
    streams: list[StreamRow] = []
    dropped = []
    for row in rows:
        results.append(simulate(row, seed))
        run.advance(row.num_samples)
        if not results[-1].is_good:
            run.miss(f"{row.dataset} {row.model} {row.method}: further off than {LARGEST_ERROR[row.method]:g}")
    for law, num_samples, max_tokens in waiting:
        streams += simulate_streams(law, num_samples, max_tokens, seed)
        run.advance(len(STREAMS) * num_samples)
    for bound in bounds:
        dropped.append({**asdict(bound), "bound_percent": bound.percent, "found_percent": dropped_percent(bound, seed)})
        run.advance(bound.num_samples)
    return {
        "rows": [{**asdict(result), "error": round(result.error, 5)} for result in results],
        "streams": [asdict(row) for row in streams],
        "dropped": dropped,
        "pool_size": POOL_SIZE,
        "small_pool": SMALL_POOL,
        "world_size": WORLD_SIZE,
    }


def _bubbles(result: Entries, kind: str) -> list[float]:
    return [row["bubble_percent"] for row in result["streams"] if row["kind"] == kind]


def figures(result: Entries) -> Figures:
    cells = {kind: " % / ".join(f"{rate:.1f}" for rate in _bubbles(result, kind)) for kind in ("dgap", "steps")}
    yield "(online dynamic batching) | collectives |", f" {cells['dgap']} % |"
    yield "the microbatches of a step **cost** the same | collectives, a cost model |", f" {cells['steps']} % |"
    ours, known, pool_sort = (_bubbles(result, kind) for kind in ("minibatch", "LB-Mini (known)", "pool-sort"))
    yield "padded or packed | ODC, a cost model |", f" {ours[0]:.1f} % / {ours[1]:.1f} % |"
    yield "at one time | |", f" {pool_sort[0]:.1f} % / {pool_sort[1]:.1f} % (pool sort, pools of {result['pool_size']})"
    yield "the samples of each minibatch together, has ", f"{known[0]:.1f} % / {known[1]:.1f} %."


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "rows",
            "online dynamic batching on 8 ranks, ODB's Tables 13 and 14: updates per epoch (standard: padding %)",
            tuple(Column(name, f"row.{name}") for name in ("dataset", "model", "method", "setting")),
            (
                Column("simulated", "simulated", ".1f"),
                Column("published", "row.paper", ".1f"),
                Column("off by", "error", "+.3f"),
                Column("padding %", "simulated_padding_percent", ".1f"),
                Column("published", "row.padding_percent", ".1f"),
            ),
        ),
        Table(
            "streams",
            f"streams on {WORLD_SIZE} ranks, pools of {SMALL_POOL} (pool-sort: {POOL_SIZE}); minibatches of about "
            f"{MINIBATCH_SIZE}",
            STREAM_KEYS,
            STREAM_COLUMNS,
        ),
        Table(
            "dropped",
            "dropped without join, percent (ODB, Table 4)",
            (Column("data set", "dataset"), Column("tokens", "max_tokens"), Column("depth", "depth")),
            (
                Column("bound", "bound_percent", ".1f"),
                Column("published", "paper_percent", ".1f"),
                Column("simulated", "found_percent", ".2f"),
            ),
            "Twice in an epoch, as DistributedSampler deals: "
            + ", ".join(f"{law} {-number % WORLD_SIZE} / {paper}" for law, (number, paper) in SURPLUS.items())
            + " (Table 5). Streams here: 0",
        ),
    ),
    quick={"only": "sharegpt4o"},
    figures=(("docs/streams.md", figures, ["batching"]),),
)
