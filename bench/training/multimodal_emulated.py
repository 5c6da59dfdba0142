"""Does a run of several modalities take what its plan says? OrchMLLM's models on 8 ranks, with emulated compute.

Each rank is a process. It loads minibatches through :class:`~odc.balance.multimodal.MultimodalLoader` and runs them
with :func:`~odc.balance.multimodal.run_minibatch`. Encoders and language model are sleeps, as long as the cost model
says of the items and samples that have come; a third of a sleep is the forward. Tensors between encoders and language
model are really sent, but smaller: a row of an output has the hidden size of the language model divided by
``--shrink``, and inputs are smaller by the same factor. Models, lengths, costs and ways to train are those of
:mod:`.multimodal_simulated`. Under collectives all ranks meet before each forward and backward of a microbatch in each
phase and after the backward, as FSDP's collectives make them do; then a minibatch is as long as its slowest ranks.

    planned      what :func:`~odc.balance.multimodal.step_times` says
    waiting      for other ranks: in lockstep, before an all-to-all, at the end of a minibatch
    moving       exchanging items, outputs and gradients, without waiting
    planning     in the loader's thread, beside the training; ``waited for`` is the part that the training waited for
    MB moved     between ranks, of all ranks: as the schedule says, and counted where tensors arrive

Eight ranks share few cores: ranks that exchange wait for each other's turn on a core, so the time of moving is an upper
bound. Beside it stands the CPU time of a rank's training thread while it moves tensors.

Not covered: parameters and their gradients (they move in :mod:`.emulated`), GPUs, real bandwidths: 8 ranks share the
memory of one host, so the time of moving is not that of a cluster.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

from odc import ItemExchange
from odc.balance.checks import IntArray
from odc.balance.data.loader import Minibatch
from odc.balance.multimodal import (
    InStep,
    ItemLengths,
    MinibatchLengths,
    MultimodalLoader,
    OnDemand,
    Orchestrator,
    RankLengths,
    SampleLengths,
    SampleParts,
    channels_of,
    run_minibatch,
    step_times,
)
from odc.balance.multimodal.carriers import Mover
from odc.balance.multimodal.payload import count_bytes, named
from odc.balance.multimodal.schedule import FORWARD_SHARE
from odc.balance.plan import Comm
from odc.balance.rearrange.rearrangement import Rearrangement
from odc.balance.simulate.modalities import sample_modalities
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table, check_known
from odc.bench.harness.ranks import Rank, keep_from_collector
from odc.bench.planning import multimodal_simulated
from odc.bench.planning.multimodal_sizes import SIZES, ModelSize
from odc.bench.training.bubble import Segment, spent_ns
from odc.bench.training.emulated import add_ratios
from odc.bench.training.sleeping import DTYPE, Counting, ModalityModel, RankRun, segments
from odc.setup.agreement import ProcessGroupExchange

NUM_UNTIMED = 1  # minibatches at the start
CAPACITY_BYTES = 1 << 20  # of a channel at first


_ODC = ", ODC"
WAYS: dict[str, Comm] = {"none": "collective", "language": "collective", "all": "collective", f"all{_ODC}": "odc"}
"""Ways of :mod:`.multimodal_simulated` with their communication. Under collectives items move by all-to-all, so all
ranks wait for all."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run."""

    ranks: int = 8
    minibatches: int = 4
    minibatch_size: int = 0
    """Samples of a rank; 0: as many as in the paper on 128 ranks."""
    scale: float = 5.0
    """Seconds that a rank computes in an average minibatch, padding apart."""
    shrink: int = 64
    seed: int = 0

    def samples_per_rank(self, size: ModelSize) -> int:
        """Samples of a rank in one minibatch."""
        return self.minibatch_size or size.samples_per_rank(self.ranks)

    def samples(self, size: ModelSize, rank: int, number: int) -> list[SampleParts]:
        """Samples of a minibatch that a rank has read. The untimed minibatch is the same as the first timed one."""
        count = self.samples_per_rank(size)
        drawn = sample_modalities(self.ranks * count, self.seed + max(0, number - NUM_UNTIMED))
        mine = drawn.take(range(rank * count, (rank + 1) * count))
        tokens = size.tokens(mine)
        found = []
        for at in range(count):
            lengths, items, rows = {}, {}, 0
            for name, encoder in size.encoders.items():
                if num_tokens := int(tokens[name][at]):
                    made = int(size.rows(name, tokens[name][at : at + 1])[0])
                    lengths[name] = [ItemLengths(num_tokens, made)]
                    channels = max(1, encoder.token_bytes // self.shrink)
                    items[name] = [(torch.zeros(num_tokens, channels, dtype=torch.uint8),)]
                    rows += made
            # Two bytes for each token's 16, which is more than its share.
            text = {"ids": torch.zeros(int(mine.text[at]), 2, dtype=torch.uint8)}
            text["num_items"] = torch.tensor([len(items.get(name, ())) for name in size.encoders])
            found.append(SampleParts(text, items, SampleLengths(int(mine.text[at]) + rows, lengths)))
        return found

    def width(self, size: ModelSize) -> int:
        """Number of elements in a row of an encoder's output."""
        return max(1, size.hidden // self.shrink)


def orchestrator(size: ModelSize, ranks: int, way: str) -> Orchestrator:
    """The plans of one of :data:`WAYS`, on ranks of one node."""
    balanced = multimodal_simulated.WAYS[way.removesuffix(_ODC)]
    return Orchestrator(size.phases, size.language, ranks, comm=WAYS[way], **balanced)


def planned(size: ModelSize, settings: Settings, way: str) -> list[dict[str, Any]]:
    """For each timed minibatch: ``makespan`` in FLOPs, the FLOPs that all ranks ``compute``, those without padding
    (``work``), and the ``bytes`` of each kind that move."""
    plans = orchestrator(size, settings.ranks, way)
    found = []
    for number in range(NUM_UNTIMED, NUM_UNTIMED + settings.minibatches):
        rows = []
        for rank in range(settings.ranks):
            parts = settings.samples(size, rank, number)
            item_bytes = {
                name: [count_bytes(item) for part in parts for item in part.items.get(name, ())]
                for name in size.encoders
            }
            text_bytes = [count_bytes(named(part.text)) for part in parts]
            lengths = [[part.lengths for part in parts]]
            rows.append(RankLengths.of_samples(lengths, plans.modalities, text_bytes, item_bytes))
        schedule = plans.plan(MinibatchLengths.of_ranks(rows, plans.modalities))
        moved = Counter({"samples": _moved(schedule.samples, schedule.lengths.num_bytes)})
        for name, items in schedule.lengths.items.items():
            moved[f"{name}/inputs"] = _moved(schedule.inputs[name], items.num_bytes)
            rows_bytes = items.output * settings.width(size) * DTYPE.itemsize
            for kind in ("outputs", "gradients"):
                moved[f"{name}/{kind}"] = _moved(schedule.outputs[name], rows_bytes)
        times = step_times(schedule, WAYS[way], in_step=WAYS[way] == "collective")
        work = multimodal_simulated.useful(schedule)
        found.append({"makespan": times.makespan, "compute": times.work, "work": work, "bytes": dict(moved)})
    return found


def _moved(route: Rearrangement, num_bytes: IntArray) -> int:
    volume = route.volume(num_bytes)
    return int(volume.sum() - np.trace(volume))


class Feed:
    """The minibatches of one rank, drawn when they are asked for. It poses as a loader of lists of samples."""

    def __init__(self, size: ModelSize, settings: Settings, rank: int) -> None:
        self._size, self._settings, self._rank = size, settings, rank

    def __iter__(self) -> Iterator[Minibatch[list[SampleParts]]]:
        for number in range(NUM_UNTIMED + self._settings.minibatches):
            samples = self._settings.samples(self._size, self._rank, number)
            yield Minibatch([samples], 1.0, 1, len(samples) * self._settings.ranks)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        raise NotImplementedError("a benchmark is not resumed")

    def set_epoch(self, epoch: int) -> None:
        raise NotImplementedError("a benchmark has one epoch")


def run_rank(me: Rank, model: str, settings: Settings, way: str, pace: float) -> RankRun:
    """Train on this rank. Other ranks see no difference to real training. ``pace`` is seconds per FLOP."""
    keep_from_collector()
    rank, size, is_in_step = me.rank, SIZES[model], WAYS[way] == "collective"
    emulated = ModalityModel(size, settings.width(size), pace, lockstep=is_in_step)
    encoders, run = emulated.encoders(), emulated.run
    items: ItemExchange | None = None
    mover: Mover = InStep()
    if not is_in_step:
        channels = channels_of(list(size.encoders))
        items = ItemExchange.create(ProcessGroupExchange(), channels, capacity_bytes=CAPACITY_BYTES)
        mover = OnDemand(items, rank)
    feed: Any = Feed(size, settings, rank)
    loader: MultimodalLoader[SampleParts] = MultimodalLoader(
        feed, lambda sample: sample, orchestrator(size, me.world_size, way), rank
    )
    minibatches = iter(loader)
    for number in range(NUM_UNTIMED + settings.minibatches):
        dist.barrier()
        emulated.minibatch = number
        counting = Counting(mover, emulated, items)
        with emulated.span("minibatch", str(number)):
            with emulated.span("load", "minibatch"):
                minibatch = next(minibatches)
            run_minibatch(minibatch, encoders, emulated.language, mover=counting, span=emulated.span)
            emulated.meet("finish")
        run.compute_ns.append(emulated.clock.take())
        run.cost_s.append(emulated.cost_s)
        run.moving_cpu_ns.append(emulated.moving_cpu_ns)
        emulated.cost_s, emulated.moving_cpu_ns = 0.0, 0
        run.num_bytes.append(dict(counting.num_bytes))
        me.report(1.0 if rank == 0 else 0.0)
    run.planning_s = loader.planning_s
    for _ in minibatches:
        raise AssertionError("more minibatches than were asked for")
    loader.close()
    if items is not None:
        items.close()
    dist.barrier()
    return run


def run_way(run: Run, model: str, way: str, settings: Settings) -> tuple[dict[str, Any], list[RankRun]]:
    """Plan, run and compare. Returns the result's entry of one way, and the runs of the ranks."""
    plans = planned(SIZES[model], settings, way)
    work = sum(plan["work"] for plan in plans)
    pace = settings.scale * settings.ranks * len(plans) / work
    runs = run.ranks(settings.ranks, run_rank, model, settings, way, pace)
    moved: Counter[str] = Counter()
    for plan in plans:
        moved.update(plan["bytes"])
    return {
        "model": model,
        "way": way,
        "comm": WAYS[way],
        "in_step": WAYS[way] == "collective",
        "planned_s": pace * sum(plan["makespan"] for plan in plans) / len(plans),
        "planned_compute_s": pace * sum(plan["compute"] for plan in plans) / (len(plans) * settings.ranks),
        "planned_bytes": {name: count // len(plans) for name, count in moved.items()},
        **shares(runs, range(NUM_UNTIMED, NUM_UNTIMED + len(plans))),
    }, runs


def shares(runs: Sequence[RankRun], minibatches: Sequence[int]) -> dict[str, Any]:
    """Where the time of all ranks went in these minibatches.

    Returns:
        Of an average minibatch. ``minibatch_s``: what it takes; ``compute``, ``waiting``, ``moving``, ``load`` and
        ``rest`` (host work) are parts of it, together 1. ``planning_s``: beside it. ``bytes``: that came from other
        ranks, of all ranks.
    """
    spent = spent_ns([segments(run, number) for run in runs for number in minibatches])
    num_bytes: Counter[str] = Counter()
    for run in runs:
        for number in minibatches:
            num_bytes.update({name: count for name, count in run.num_bytes[number].items() if count})
    compute_ns = sum(run.compute_ns[number] for run in runs for number in minibatches)
    total = spent.total()
    parts = {"compute": compute_ns, "waiting": spent["wait"], "moving": spent["move"], "load": spent["load"]}
    count = len(runs) * len(minibatches)
    return {
        "minibatch_s": total * 1e-9 / count,
        **{name: part / total for name, part in parts.items()},
        "rest": 1 - sum(parts.values()) / total,
        "compute_s": compute_ns * 1e-9 / count,
        "moving_s": parts["moving"] * 1e-9 / count,
        "moving_cpu_s": sum(run.moving_cpu_ns[number] for run in runs for number in minibatches) * 1e-9 / count,
        "planning_s": sum(run.planning_s[number] for run in runs for number in minibatches) / count,
        "waited_for_plans_s": spent["load"] * 1e-9 / count,
        "bytes": {name: value // len(minibatches) for name, value in num_bytes.items()},
    }


def measure(
    run: Run,
    model: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(SIZES)}.")] = None,
    way: Annotated[list[str] | None, typer.Option(help=f"Only these: {'; '.join(WAYS)}.")] = None,
    scale: Annotated[float, typer.Option(min=1e-6, help="Seconds of compute of a rank in a minibatch.")] = 5.0,
    minibatches: Annotated[int, typer.Option(min=1, help="That are timed; one more comes first.")] = 4,
    minibatch_size: Annotated[int, typer.Option(min=0, help="Of a rank; 0: the paper's on 128 ranks.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="That are started on this host.")] = 8,
    shrink: Annotated[int, typer.Option(min=1, help="Times that tensors are smaller than the model's.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the first minibatch.")] = 0,
    timelines: Annotated[Path | None, typer.Option(help="Write what all ranks did when to this file.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the last minibatch of the last model.")] = None,
) -> Entries:
    check_known(model=(model, SIZES), way=(way, WAYS))
    models, ways = model or list(SIZES), way or list(WAYS)
    settings = Settings(ranks, minibatches, minibatch_size, scale, shrink, seed)
    run.begin(len(models) * len(ways) * (minibatches + NUM_UNTIMED))
    rows: list[dict[str, Any]] = []
    spans: dict[str, dict[str, Any]] = {name: {} for name in models}
    drawn: dict[str, list[list[Segment]]] = {}
    for name in models:
        for how in ways:
            run.describe(f"{name}, {how}")
            entry, runs = run_way(run, name, how, settings)
            rows.append(entry)
            drawn[how] = [segments(rank, minibatches) for rank in runs]
            spans[name][how] = [[list(asdict(span).values()) for span in rank.spans] for rank in runs]
        of_model = sorted(rows[-len(ways) :], key=lambda row: bool(row["way"] != "none"))
        if "none" in ways:
            add_ratios(of_model)
    if picture is not None:
        from odc.bench.training.plots import plot_timelines  # only here: matplotlib is an extra

        plot_timelines(picture, drawn, f"{minibatches} minibatches")
    if timelines is not None:
        timelines.write_text(json.dumps(spans))
    return {"forward_share": FORWARD_SHARE, "runs": rows}


def figures(result: Entries) -> Figures:
    for model in dict.fromkeys(row["model"] for row in result["runs"]):
        ways = {row["way"]: row for row in result["runs"] if row["model"] == model}
        ratios = " | ".join(f"{ways[way]['ratio']:.2f}x" for way in ("language", "all", "all, ODC"))
        odc = ways["all, ODC"]
        yield (
            f"| {model}, emulated |",
            f" {ratios} | {odc['planned_ratio']:.2f}x | {100 * odc['waiting']:.1f} % | {100 * odc['moving']:.1f} % |",
        )


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "runs",
            "{settings[ranks]} ranks, tensors {settings[shrink]} times smaller: a minibatch in ms, parts in percent",
            (Column("model", "model"), Column("way", "way")),
            (
                Column("planned", "planned_s", ".0f", 1e3),
                Column("measured", "minibatch_s", ".0f", 1e3),
                Column("planned, of none", "planned_ratio", ".3f"),
                Column("of none", "ratio", ".3f"),
                *(Column(name, name, ".1f", 100) for name in ("compute", "waiting", "moving", "load", "rest")),
                Column("CPU of moving", "moving_cpu_s", ".1f", 1e3),
                Column("planning", "planning_s", ".1f", 1e3),
                Column("waited for", "waited_for_plans_s", ".1f", 1e3),
                Column("MB planned", lambda row: f"{sum(row['planned_bytes'].values()) / 1e6:.1f}"),
                Column("MB moved", lambda row: f"{sum(row['bytes'].values()) / 1e6:.1f}"),
            ),
        ),
    ),
    quick={"model": ["MLLM-84B"], "minibatches": 1, "scale": 1.0},
    figures=(("docs/multimodal.md", figures, ["multimodal_emulated"]),),
)
