"""What batches an epoch has under online dynamic batching: the paper's updates and padding, rebuilt from lengths alone.

    python -m odc.bench.batching
    python -m odc.bench.batching --json runs/batching.json

Samples are drawn from the shipped laws of Table 10 of the paper on Online Dynamic Batching (ODB), as many as its
Tables 13 and 14 have trained on (updates x samples per update: 95 % of each data set). Each of 8 ranks has a pool of
1024 of its share, which becomes groups of a token budget; the ranks are aligned, what was returned goes back into the
pool, and the pool is filled up. GMT is the paper's offline comparator: all samples sorted, cut into padded batches of
the budget, dealt out to the ranks. Standard has batches of a fixed size.

The second table is what only on-demand communication can do: ranks that need not run in step fill equal quotas of cost,
each from its own pool (:mod:`odc.balance.grouping.quota`), and wait at the end of a minibatch only. Costs are those of
the 1.5B model of the ODC paper (:mod:`odc.bench.paper_costs`), minibatches of about 4 samples per rank, pools of 256.

Not covered: accuracy and samples per second, which need the models and the GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from odc.balance import align_groups, sample_lengths, token_budget_groups
from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import CostModel, evaluate
from odc.balance.grouping.quota import Offer, Quotas, even_out, fill_quota
from odc.balance.random_numbers import random_generator
from odc.balance.simulate.simulator import Scenario, Simulation
from odc.bench.environment import describe_environment
from odc.bench.paper_costs import paper_cost
from odc.bench.progress import progress_bar

WORLD_SIZE, POOL_SIZE = 8, 1024
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


@dataclass
class Epoch:
    """What batches one epoch has."""

    updates: int = 0
    num_samples: int = 0
    tokens: int = 0
    padded_tokens: int = 0

    def add_batch(self, lengths: IntArray) -> None:
        """A padded batch; ``updates`` are counted elsewhere, as a batch on each rank makes one."""
        self.num_samples += lengths.size
        self.tokens += int(lengths.sum())
        self.padded_tokens += int(lengths.max()) * lengths.size

    @property
    def padding_percent(self) -> float:
        return 100 * (1 - self.tokens / self.padded_tokens)


def odb_epoch(lengths: IntArray, max_tokens: int, world_size: int = WORLD_SIZE, pool_size: int = POOL_SIZE) -> Epoch:
    """An epoch of ODB in join mode: every sample once, ranks aligned until all of them are done.

    Args:
        lengths: of the shuffled samples, (num_samples,). Sample i is rank i % world_size's.
    """
    shares = [np.arange(rank, lengths.size, world_size).tolist() for rank in range(world_size)]
    pools: list[list[int]] = [[] for _ in range(world_size)]
    epoch = Epoch()
    while True:
        for pool, share in zip(pools, shares, strict=True):
            wanted = pool_size - len(pool)
            pool += share[:wanted]
            del share[:wanted]
        if not any(pools):
            return epoch
        groups = [
            [[pool[i] for i in group] for group in token_budget_groups(lengths[pool], max_tokens)] for pool in pools
        ]
        aligned, pools = align_groups(groups, [0] * world_size)
        epoch.updates += max(map(len, aligned))
        for mine in aligned:
            for group in mine:
                epoch.add_batch(lengths[group])


@dataclass(frozen=True)
class Waiting:
    """How an epoch went in which ranks wait for one another at the end of each minibatch only."""

    time_per_1000: float
    """Sum over minibatches of the slowest rank's cost, per 1000 samples."""

    bubble_rate: float
    bubble_before_the_end: float
    """Of the minibatches until 85 % of the samples are done."""

    samples_per_minibatch: float
    """Of one rank, on average."""

    oldest: int
    """Most minibatches that a sample has waited in its pool."""


def minibatch_epoch(
    lengths: IntArray,
    cost: CostModel,
    minibatch_size: int,
    pool_size: int,
    *,
    world_size: int = WORLD_SIZE,
    deals: bool = True,
) -> Waiting:
    """An epoch in which every rank fills the same quota of cost from its own pool.

    Samples come into the pools in one order: a rank that has used more gets more of what comes next.

    Args:
        lengths: of the shuffled samples, (num_samples,).
        deals: deal the samples of the last pools out anew, see :func:`~odc.balance.grouping.quota.even_out`.
    """
    costs = evaluate(cost, lengths)
    pools: list[list[int]] = [[] for _ in range(world_size)]
    since = np.zeros(lengths.size, dtype=np.int64)
    seen: list[list[float]] = [[0.0, 0] for _ in range(world_size)]
    loads: list[list[float]] = []
    quotas, coming, done, oldest = Quotas(minibatch_size), 0, [0], 0
    while True:
        wanted = [pool_size - len(pool) for pool in pools]
        left = lengths.size - coming
        if sum(wanted) > left:  # the last ones are dealt out evenly
            wanted = [min(own, left // world_size + (rank < left % world_size)) for rank, own in enumerate(wanted)]
        for rank, (pool, own) in enumerate(zip(pools, wanted, strict=True)):
            pool += range(coming, coming + own)
            since[coming : coming + own] = len(loads)
            seen[rank][0] += float(costs[coming : coming + own].sum())
            seen[rank][1] += own
            coming += own
        if deals and coming == lengths.size:
            pools = [[pools[rank][at] for rank, at in mine] for mine in even_out([costs[pool] for pool in pools], pool_size)]
            deals = False
        offers = [
            Offer(float(costs[pool[0]]) if pool else 0.0, cost_seen, int(num_seen))
            for pool, (cost_seen, num_seen) in zip(pools, seen, strict=True)
        ]
        quota = quotas.grant(offers)
        if not quota:
            break
        spent, used = [], 0
        for rank, pool in enumerate(pools):
            chosen = fill_quota(costs[pool], quota, quotas.usual)
            spent.append(float(costs[[pool[i] for i in chosen]].sum()))
            used += len(chosen)
            oldest = max(oldest, *(len(loads) - int(since[pool[i]]) for i in chosen), 0)
            gone = set(chosen)
            pools[rank] = [sample for i, sample in enumerate(pool) if i not in gone]
        loads.append(spent)
        done.append(done[-1] + used)
    table = np.array(loads)
    early = table[: int(np.searchsorted(done, 0.85 * lengths.size))]
    return Waiting(
        time_per_1000=float(table.max(axis=1).sum()) * 1000 / lengths.size,
        bubble_rate=_bubble(table),
        bubble_before_the_end=_bubble(early),
        samples_per_minibatch=lengths.size / world_size / len(table),
        oldest=oldest,
    )


def _bubble(loads: FloatArray) -> float:
    return float(1 - loads.sum() / (loads.max(axis=1).sum() * loads.shape[1]))


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
    epoch = Epoch()
    for start in range(0, lengths.size, batch_size):
        epoch.add_batch(lengths[start : start + batch_size])
    return epoch.padding_percent


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
    lengths = _shuffled(row.dataset, row.num_samples, seed)
    if row.method == "odb":
        epoch = odb_epoch(lengths, row.setting)
        assert epoch.num_samples == row.num_samples
        return Result(row, epoch.updates, epoch.padding_percent)
    if row.method == "gmt":
        return Result(row, gmt_updates(lengths, row.setting))
    return Result(row, standard_padding(lengths, row.setting))


def _shuffled(law: str, num_samples: int, seed: int) -> IntArray:
    lengths = sample_lengths(law, num_samples, seed)
    return lengths[np.argsort(random_generator("batching", seed).random_raw(num_samples), kind="stable")]


WAITING = (("longalign", 10_000), ("sharegpt4o", 57_284))
"""Laws and numbers of samples of the second table."""
MINIBATCH_SIZE, SMALL_POOL = 4, 256


def simulate_waiting(law: str, num_samples: int, deals: bool, seed: int = 0) -> Waiting:
    """One row of the second table."""
    lengths = _shuffled(law, num_samples, seed)
    return minibatch_epoch(lengths, paper_cost("1.5B"), MINIBATCH_SIZE, SMALL_POOL, deals=deals)


def simulate_known(law: str, num_samples: int, seed: int = 0) -> Simulation:
    """LB-Mini on the same samples, whose lengths it knows; each minibatch is the next ones in their order."""
    scenario = Scenario(_shuffled(law, num_samples, seed), paper_cost("1.5B"), WORLD_SIZE, MINIBATCH_SIZE)
    return scenario.plan("lb-mini").run("odc")


def show_waiting(found: Mapping[tuple[str, bool], Waiting], known: Mapping[str, Simulation]) -> Table:
    """The second table."""
    table = Table(
        title=f"Equal quotas on {WORLD_SIZE} ranks: minibatches of about {MINIBATCH_SIZE}, pools of {SMALL_POOL}"
    )
    table.add_column("data set")
    table.add_column("last pools")
    for name in ("time per 1000", "bubble %", "until 85 %", "per minibatch", "waited"):
        table.add_column(name, justify="right")
    for (law, deals), one in found.items():
        if not deals:
            table.add_row(law, "LB-Mini: known", "", f"{100 * known[law].bubble_rate:.2f}")
        table.add_row(
            law,
            "dealt out anew" if deals else "as they are",
            f"{one.time_per_1000:.1f}",
            f"{100 * one.bubble_rate:.2f}",
            f"{100 * one.bubble_before_the_end:.2f}",
            f"{one.samples_per_minibatch:.1f}",
            str(one.oldest),
        )
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
) -> None:
    """Rebuild the updates and the padding of ODB's Tables 13 and 14, and simulate equal quotas.

    Exits with 1 if a row is further off than it should be.
    """
    results, waiting, known = [], {}, {}
    with progress_bar(Console(stderr=True)) as progress:
        total = sum(row.num_samples for row in ROWS) + 2 * sum(num_samples for _, num_samples in WAITING)
        bar = progress.add_task("batching", total=total)
        for row in ROWS:
            results.append(simulate(row, seed))
            progress.advance(bar, row.num_samples)
        for law, num_samples in WAITING:
            known[law] = simulate_known(law, num_samples, seed)
            for deals in (False, True):
                waiting[law, deals] = simulate_waiting(law, num_samples, deals, seed)
                progress.advance(bar, num_samples)
    given = Console()
    console = Console(width=given.width if given.is_terminal else WIDTH)
    console.print(show(results))
    console.print(show_waiting(waiting, known))
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(result), "error": round(result.error, 5)} for result in results]
        quotas = [{"law": law, "deals": deals, **asdict(one)} for (law, deals), one in waiting.items()]
        document = {
            "rows": rows,
            "quotas": quotas,
            "lb_mini": {law: one.bubble_rate for law, one in known.items()},
            "seed": seed,
            "pool_size": POOL_SIZE,
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
