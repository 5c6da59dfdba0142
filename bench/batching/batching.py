"""What batches an epoch has under online dynamic batching: the paper's updates and padding, rebuilt from lengths alone.

    python -m odc.bench.batching.batching
    python -m odc.bench.batching.batching --json runs/batching.json
    python -m odc.bench.batching.batching --peers    # the second table alone, with the batches of other packages

Samples are drawn from the shipped laws of Table 10 of the paper on Online Dynamic Batching (ODB), as many as its
Tables 13 and 14 have trained on (updates x samples per update: 95 % of each data set). Each of 8 ranks has a pool of
1024 of its share, which becomes groups of a token budget; the ranks are aligned, what was returned goes back into the
pool, and the pool is filled up. GMT is the paper's offline comparator: all samples sorted, cut into padded batches of
the budget, dealt out to the ranks. Standard has batches of a fixed size.

The second table is how long ranks wait. Under collectives, where each step waits for the slowest rank: ODB's alignment
("dgap"), batches of a sorted pool ("pool-sort"), steps of equal cost ("steps"). With on-demand communication, where
ranks need not run in step: equal quotas of cost, each rank's from its own pool ("minibatch"), packed. Costs are those
of the 1.5B model of the ODC paper (:mod:`.paper_costs`). All of it are the loader's own rounds, without data.

The third is ODB's Tables 4 and 5: how many samples of an epoch may be dropped without join, and how many come twice
because ranks do not divide their number.

Not covered: accuracy and samples per second, which need the models and the GPUs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.balance import LinearCost
from odc.balance.checks import IntArray
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.rounds import AlignedRounds
from odc.bench.batching.peers import PeerError, compare
from odc.bench.batching.streamed import StreamedEpoch, stream_epoch
from odc.bench.batching.waiting import (
    POOL_SIZE,
    SMALL_POOL,
    STREAMS,
    WAITING,
    WORLD_SIZE,
    StreamRow,
    show_streams,
    shuffled,
    simulate_streams,
)
from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar

WIDTH = 100  # columns of the table
LARGEST_ERROR = {"odb": 0.09, "gmt": 0.01, "standard": 1.0}
"""How far simulated may be from published: updates of ODB and of GMT, relative; padding of Standard, in points."""


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
    """Of ODB."""


def _trained_on(updates: int, per_update: float) -> int:
    return round(updates * per_update)


ULTRACHAT, LLAVA = _trained_on(2692, 73.36), _trained_on(844, 177.59)
SHAREGPT4O = _trained_on(1030, 52.82)
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
    lengths: IntArray, max_tokens: int, world_size: int = WORLD_SIZE, pool_size: int = POOL_SIZE
) -> StreamedEpoch:
    """An epoch of ODB in join mode: sample i is rank i % world_size's, ranks go on until all of them are done.

    Args:
        lengths: of the shuffled samples, (num_samples,).
    """
    grouping = Grouping("token-budget", max_tokens, None, True)
    rounds = [AlignedRounds(grouping, pool_size, rank, world_size) for rank in range(world_size)]
    return stream_epoch(lengths, LinearCost(), rounds, has_indices=False)


def gmt_updates(lengths: IntArray, max_tokens: int, world_size: int = WORLD_SIZE) -> int:
    """Updates of the offline comparator (appendix I): padded batches of the sorted samples, each as large as fits; the
    list is filled up to a multiple of the ranks."""
    ascending = np.sort(lengths).tolist()
    num_batches, size = 0, 0
    for length in ascending:
        if size and (size + 1) * length > max_tokens:
            num_batches, size = num_batches + 1, 0
        size += 1
    return -(-(num_batches + bool(size)) // world_size)


def standard_padding(lengths: IntArray, batch_size: int) -> float:
    """Padding in percent of the samples in their order, ``batch_size`` at a time."""
    batches = [lengths[start : start + batch_size] for start in range(0, lengths.size, batch_size)]
    return float(100 * (1 - lengths.sum() / sum(int(batch.max()) * batch.size for batch in batches)))


@dataclass(frozen=True)
class Result:
    """A row beside what comes out."""

    row: Row
    simulated: float
    simulated_padding_percent: float | None = None

    @property
    def error(self) -> float:
        """As in :data:`LARGEST_ERROR`."""
        difference = self.simulated - self.row.paper
        return difference if self.row.method == "standard" else difference / self.row.paper

    @property
    def is_good(self) -> bool:
        return abs(self.error) <= LARGEST_ERROR[self.row.method]


def simulate(row: Row, seed: int = 0) -> Result:
    """One row, with lengths drawn anew, in random order."""
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
    """A row of Table 4, and what comes out where there is a law for its data set."""

    dataset: str
    max_tokens: int
    num_samples: int
    depth: int
    """D, most samples of a rank that are fetched and not emitted."""

    paper_percent: float

    @property
    def percent(self) -> float:
        """Most samples that an epoch without join drops: W x D of N (lemma 4)."""
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
"""Table 5: samples of a data set, and how many come twice on 8 ranks."""


def dropped_percent(bound: Bound, seed: int = 0) -> float | None:
    """Samples that are left in pools and shares when the first rank has nothing left; None: there is no law."""
    if bound.dataset == "MM-Mix":
        return None
    lengths = shuffled(bound.dataset, bound.num_samples, seed)
    grouping = Grouping("token-budget", bound.max_tokens, None, True)
    ranks = range(WORLD_SIZE)
    rounds = [AlignedRounds(grouping, bound.depth, rank, WORLD_SIZE, joins=False) for rank in ranks]
    epoch = stream_epoch(lengths, LinearCost(), rounds, has_indices=False)
    return 100 * (1 - int(epoch.num_samples.sum()) / bound.num_samples)


def show_bounds(dropped: Sequence[float | None]) -> Table:
    """The third table."""
    surplus = ", ".join(f"{law} {-num_samples % WORLD_SIZE} / {paper}" for law, (num_samples, paper) in SURPLUS.items())
    table = Table(
        title="Dropped without join: bound / published, and simulated (ODB, Table 4)",
        caption=f"Twice in an epoch, as DistributedSampler deals: {surplus} (Table 5). Streams here: 0",
    )
    for name in ("data set", "tokens", "depth", "bound %", "dropped %"):
        table.add_column(name, justify="left" if name == "data set" else "right")
    for bound, found in zip(BOUNDS, dropped, strict=True):
        figures = (f"{bound.percent:.1f} / {bound.paper_percent:.1f}", "" if found is None else f"{found:.2f}")
        table.add_row(bound.dataset, str(bound.max_tokens), str(bound.depth), *figures)
    return table


def show(results: Sequence[Result]) -> Table:
    """Simulated beside published."""
    table = Table(title="Online dynamic batching on 8 ranks: simulated / published (ODB, Tables 13 and 14)")
    for name in ("data set", "model", "method", "tokens or size", "updates per epoch", "padding %", "off by"):
        table.add_column(name, justify="left" if name in ("data set", "model", "method") else "right")
    for result in results:
        row = result.row
        updates, padding = f"{result.simulated:.0f} / {row.paper:.0f}", ""
        if row.method == "standard":
            updates, padding = "", f"{result.simulated:.1f} / {row.paper:.1f}"
        elif result.simulated_padding_percent is not None:
            padding = f"{result.simulated_padding_percent:.1f} / {row.padding_percent:.1f}"
        error = f"{result.error:+.1f} points" if row.method == "standard" else f"{result.error:+.1%}"
        table.add_row(row.dataset, row.model, row.method, str(row.setting), updates, padding, error)
    return table


app = typer.Typer(add_completion=False)


@app.command()
def main(
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths and their order.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all rows to this file.")] = None,
    with_peers: Annotated[
        bool, typer.Option("--peers", help="Only how long ranks wait, beside the batches of other packages.")
    ] = False,
    peers_folder: Annotated[Path, typer.Option(help="Where these packages are installed.")] = Path("runs/peers"),
) -> None:
    """Rebuild the updates and the padding of ODB's Tables 13 and 14, and simulate streams on the same laws.

    Exits with 1 if a row is further off than it should be.
    """
    if with_peers:
        try:
            compare(peers_folder, seed, json_file)
        except PeerError as error:
            print(error, file=sys.stderr)
            raise typer.Exit(1) from None
        return
    results: list[Result] = []
    streams: list[StreamRow] = []
    with progress_bar(Console(stderr=True)) as progress:
        each = len(STREAMS)
        total = sum(row.num_samples for row in (*ROWS, *BOUNDS))
        total += each * sum(num_samples for _, num_samples, _ in WAITING)
        bar = progress.add_task("batching", total=total)
        for row in ROWS:
            results.append(simulate(row, seed))
            progress.advance(bar, row.num_samples)
        for law, num_samples, max_tokens in WAITING:
            streams += simulate_streams(law, num_samples, max_tokens, seed)
            progress.advance(bar, each * num_samples)
        dropped = []
        for bound in BOUNDS:
            dropped.append(dropped_percent(bound, seed))
            progress.advance(bar, bound.num_samples)
    given = Console()
    console = Console(width=given.width if given.is_terminal else WIDTH)
    console.print(show(results))
    console.print(show_streams(streams))
    console.print(show_bounds(dropped))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "rows": [{**asdict(result), "error": round(result.error, 5)} for result in results],
            "streams": [asdict(row) for row in streams],
            "dropped": [{**asdict(one), "found_percent": found} for one, found in zip(BOUNDS, dropped, strict=True)],
            "seed": seed,
            "pool_size": POOL_SIZE,
            "small_pool": SMALL_POOL,
            "world_size": WORLD_SIZE,
        }
        json_file.write_text(json.dumps({**document, "environment": describe_environment()}, indent=1) + "\n")
    bad = [result.row for result in results if not result.is_good]
    for row in bad:
        print(f"{row.dataset} {row.model} {row.method}: further off than {LARGEST_ERROR[row.method]:g}")
    if bad:
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
