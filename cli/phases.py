"""Compares what balancing no phase, some phases or all phases would gain, for samples of several modalities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from odc.balance import MinibatchSampler, Rearrangement
from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import evaluate
from odc.balance.multimodal import MinibatchLengths, MinibatchSchedule, Orchestrator, Phase, RankLengths, step_times
from odc.balance.multimodal.schedule import FORWARD_SHARE
from odc.balance.plan import Comm
from odc.balance.policies.packing import pack_together
from odc.cli.costs import Training
from odc.cli.lengths import draw, larger_sizes
from odc.cli.modalities import LANGUAGE, Dataset, Modality

Balanced = Literal["none", "language", "whole", "all", "joint"]
_OUTPUT_BYTES = 2  # of a number in a row that an encoder makes: bf16
_TEXT_BYTES = 16  # of a token: its number and its label

CHOICES: tuple[tuple[Balanced, str | None, tuple[Comm, ...]], ...] = (
    ("none", None, ("collective", "odc")),
    ("language", "lb-micro", ("collective",)),
    ("language", "lb-mini", ("odc",)),
    ("whole", "whole", ("odc",)),
    ("all", "lb-micro", ("collective",)),
    ("all", "lb-mini", ("odc",)),
    ("joint", "joint", ("odc",)),
)
"""What is balanced, by which policy of the language model (None: samples stay on their rank), and what it runs with.

A sum over phases ("whole", "joint") means something under ODC alone, where ranks are not in step phase by phase.
"""

BALANCES_ENCODERS: tuple[Balanced, ...] = ("all", "joint")
"""With these, items are shared out anew; with the others they are encoded where their sample's sequence is."""

_SUMS: tuple[Balanced, ...] = ("whole", "joint")
"""These even out the sum of all phases, and leave each of them uneven."""


MOVED = ("item", "output", "text")
"""What goes to another rank: items, from who reads them to who encodes them; what encoders make, to who runs the
language model, and its gradients on the way back; the rest of the samples, from who reads them to who runs that."""

Moved = dict[str, float]
"""Bytes of each of these, of all minibatches together."""


@dataclass
class Outcome:
    """All minibatches under one choice and one kind of communication. Times are in seconds."""

    balanced: Balanced
    comm: Comm
    policy: str
    num_samples: int
    makespans: list[float] = field(default_factory=list)
    """What each minibatch takes."""

    loads: list[FloatArray] = field(default_factory=list)
    """What each rank computes in each phase of each minibatch, (num_phases, num_ranks); the language model is last."""

    spans: list[list[float]] = field(default_factory=list)
    """What each phase of each minibatch would take by itself."""

    padding: FloatArray = field(default_factory=lambda: np.zeros(0))
    """Part of the loads that is padding, by phase, (num_phases,)."""

    planning_s: float = 0.0
    """Seconds of planning per minibatch, on this machine."""

    moved: Moved = field(default_factory=lambda: dict.fromkeys(MOVED, 0.0))
    """Between ranks."""

    between_nodes: Moved = field(default_factory=lambda: dict.fromkeys(MOVED, 0.0))
    """The part that goes to another node."""

    @property
    def total(self) -> float:
        """What all minibatches take."""
        return float(sum(self.makespans))

    @property
    def work(self) -> FloatArray:
        """What all ranks compute, padding included, by phase, (num_phases,)."""
        found: FloatArray = np.array([loads.sum(axis=1) for loads in self.loads]).sum(axis=0)
        return found

    @property
    def waiting(self) -> FloatArray:
        """What ranks would wait for each other in each phase, were it alone, (num_phases,)."""
        num_ranks = self.loads[0].shape[1]
        found: FloatArray = np.maximum(0.0, num_ranks * np.array(self.spans).sum(axis=0) - self.work)
        return found

    @property
    def bubble_rate(self) -> float:
        """Idle device time over total device time, from 0 to 1."""
        num_ranks = int(self.loads[0].shape[1])
        return max(0.0, 1 - float(self.work.sum()) / (num_ranks * self.total))

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together."""
        return self.num_samples / self.total

    def speedup(self, baseline: Outcome) -> float:
        """Throughput over that of ``baseline``."""
        return self.samples_per_s / baseline.samples_per_s


@dataclass(frozen=True, eq=False)
class PhaseComparison:
    """All choices on one dataset."""

    dataset: Dataset
    modalities: Sequence[Modality]
    training: Training
    num_ranks: int
    minibatch_size: int
    max_tokens: int
    ranks_per_node: int | None
    order: IntArray
    """The samples that were planned, minibatch by minibatch."""

    outcomes: Sequence[Outcome]

    @property
    def phases(self) -> list[str]:
        """Names: encoders, then the language model."""
        return [*(modality.name for modality in self.modalities), LANGUAGE]

    @property
    def num_minibatches(self) -> int:
        """How many were planned."""
        return len(self.outcomes[0].makespans)

    @property
    def baseline(self) -> Outcome:
        """What speedups refer to: nothing is balanced, with FSDP."""
        return self.outcomes[0]

    def of(self, balanced: Balanced, comm: Comm) -> Outcome:
        """One of the outcomes."""
        return next(found for found in self.outcomes if (found.balanced, found.comm) == (balanced, comm))


def compare_phases(
    dataset: Dataset,
    modalities: Sequence[Modality],
    training: Training,
    *,
    num_ranks: int,
    minibatch_size: int,
    max_tokens: int | None = None,
    ranks_per_node: int | None = None,
    num_minibatches: int = 200,
    seed: int = 0,
    on_plan: Callable[[int, int], object] | None = None,
) -> PhaseComparison:
    """Plan and simulate all choices on the same minibatches, drawn as ``odc plan`` draws those of text.

    Args:
        max_tokens: of a microbatch of the language model; default: the longest sample.
        num_minibatches: at most so many.
        on_plan: called after each plan with how many are made, and how many will be.

    Raises:
        ValueError: a sample is longer than ``max_tokens``, or nodes are not full.
    """
    longest = int(dataset.tokens.max())
    limit = longest if max_tokens is None else max_tokens
    if too_long := int((dataset.tokens > limit).sum()):
        raise ValueError(
            f"{too_long:,} of {dataset.tokens.size:,} samples are longer than --max-tokens {limit}: raise --max-tokens "
            f"to {longest}, the longest sample"
        )
    chosen = draw(dataset.tokens.size, num_minibatches * num_ranks * minibatch_size, seed)
    language = Phase(LANGUAGE, training.cost, max_tokens=limit)
    planners = [
        Orchestrator(
            [modality.phase for modality in modalities],
            language,
            num_ranks,
            policy=policy,
            balance_encoders=balanced in BALANCES_ENCODERS,
            ranks_per_node=ranks_per_node,
            comm=comms[0],
        )
        for balanced, policy, comms in CHOICES
    ]
    sampler = MinibatchSampler(
        dataset.tokens[chosen],
        minibatch_size=minibatch_size,
        world_size=num_ranks,
        policy="none",
        cost=training.cost,
        max_tokens=limit,
        seed=seed,
    )
    num_samples = len(sampler) * sampler.global_size
    outcomes = [
        [Outcome(balanced, comm, policy or "none", num_samples) for comm in comms]
        for balanced, policy, comms in CHOICES
    ]
    meter = _Meter(modalities, training, ranks_per_node)
    order: list[int] = []
    done = 0
    for minibatch in sampler:
        ranks = [
            [int(chosen[sample]) for part in minibatch.of_rank(rank) for sample in part] for rank in range(num_ranks)
        ]
        order += [sample for mine in ranks for sample in mine]
        lengths = _loaded(dataset, ranks, language, [modality.name for modality in modalities])
        schedules = []
        for planner, each in zip(planners, outcomes, strict=True):
            start = time.perf_counter()
            schedules.append(planner.plan(lengths))
            elapsed = time.perf_counter() - start
            for outcome in each:
                outcome.planning_s += elapsed / len(sampler)
                meter.add(outcome, schedules[-1])
            done += 1
            if on_plan:
                on_plan(done, len(sampler) * len(planners))
    return PhaseComparison(
        dataset,
        modalities,
        training,
        num_ranks,
        minibatch_size,
        limit,
        ranks_per_node,
        np.array(order, dtype=np.int64),
        [outcome for each in outcomes for outcome in each],
    )


def _loaded(dataset: Dataset, ranks: list[list[int]], language: Phase, modalities: list[str]) -> MinibatchLengths:
    """What ranks have when nothing moves: samples as drawn, packed into few microbatches, as many on each rank."""
    assert language.max_tokens is not None
    tokens = [dataset.tokens[mine] for mine in ranks]
    packed = pack_together(tokens, [evaluate(language.cost, each) for each in tokens], language.max_tokens)
    rows = []
    for mine, parts in zip(ranks, packed, strict=True):
        samples = [[dataset.sample(mine[at]) for at in part] for part in parts]
        rows.append(RankLengths.of_samples(samples, modalities))
    return MinibatchLengths.of_ranks(rows, modalities)


class _Meter:
    """Writes down what a schedule takes and moves."""

    def __init__(self, modalities: Sequence[Modality], training: Training, ranks_per_node: int | None) -> None:
        self._fixed = {LANGUAGE: training.microbatch_s, **{each.name: each.microbatch_s for each in modalities}}
        self._token_bytes = {modality.name: modality.token_bytes for modality in modalities}
        self._width, self._ranks_per_node = training.shape.hidden_size, ranks_per_node

    def add(self, outcome: Outcome, schedule: MinibatchSchedule) -> None:
        schedule = self._with_fixed_costs(schedule)
        comm = outcome.comm
        plans = {**schedule.encoders, LANGUAGE: schedule.language}
        share = {name: FORWARD_SHARE if schedule.frozen.get(name) else 1.0 for name in plans}
        outcome.makespans.append(step_times(schedule, comm).makespan)
        outcome.loads.append(np.array([plan.microbatch_times().sum(axis=1) * share[n] for n, plan in plans.items()]))
        outcome.spans.append([plan.makespan(comm) * share[name] for name, plan in plans.items()])
        alone = [
            (float(plan.costs.sum()) + self._fixed[name] * sum(plan.num_microbatches)) * share[name]
            for name, plan in plans.items()
        ]
        outcome.padding = np.maximum(0.0, outcome.loads[-1].sum(axis=1) - alone) + (
            outcome.padding if outcome.padding.size else 0.0
        )
        self._add_moves(outcome, schedule)

    def _with_fixed_costs(self, schedule: MinibatchSchedule) -> MinibatchSchedule:
        """With what microbatches take besides their samples, which the orchestrator does not know of."""
        if not any(self._fixed.values()):
            return schedule
        encoders = {name: replace(plan, microbatch_cost=self._fixed[name]) for name, plan in schedule.encoders.items()}
        language = replace(schedule.language, microbatch_cost=self._fixed[LANGUAGE])
        return replace(schedule, encoders=encoders, language=language)

    def _add_moves(self, outcome: Outcome, schedule: MinibatchSchedule) -> None:
        for what, route, num_bytes in self._routes(schedule):
            volume = route.volume(num_bytes)
            nodes = np.arange(route.num_ranks) // (self._ranks_per_node or route.num_ranks)
            outcome.moved[what] += float(volume.sum() - np.trace(volume))
            outcome.between_nodes[what] += float(volume[nodes[:, None] != nodes[None, :]].sum())

    def _routes(self, schedule: MinibatchSchedule) -> Iterator[tuple[str, Rearrangement, npt.ArrayLike]]:
        """What goes where, and the bytes of each piece of it."""
        text = schedule.lengths.language.astype(np.float64)
        for name, items in schedule.lengths.items.items():
            np.subtract.at(text, items.sample, items.output)
            row = self._width * _OUTPUT_BYTES * (1 if schedule.frozen[name] else 2)
            yield "output", schedule.outputs[name], items.output * row
            yield "item", schedule.inputs[name], items.encoder * self._token_bytes[name]
        yield "text", schedule.samples, text * _TEXT_BYTES


class Pieces:
    """How large the pieces are that a choice shares out, against what a rank has of all of them. Padding apart.

    Args:
        balanced: "whole" shares out samples by what they cost in all phases; "joint" items and sequences, of which
            all together are to be even; the others the pieces of each phase by themselves.
        phase: looked at by the others: index into ``found.phases``.
    """

    def __init__(self, found: PhaseComparison, balanced: Balanced, phase: int) -> None:
        self._found = found
        phases = range(len(found.phases)) if balanced in _SUMS else [phase]
        self._largest, self._total = np.zeros((2, found.dataset.tokens.size))  # of each sample
        for number in phases:
            owners, costs = _costs(found, number)
            np.maximum.at(self._largest, owners, costs)
            np.add.at(self._total, owners, costs)
        if balanced == "whole":
            self._largest = self._total

    def held_by_one(self, minibatch_size: int) -> float:
        """The part of minibatches of this size in which one piece costs more than a rank's fair share."""
        found = self._found
        per_minibatch = minibatch_size * found.num_ranks
        number = found.order.size // per_minibatch
        samples = found.order[: number * per_minibatch].reshape(number, per_minibatch)
        fair = self._total[samples].sum(axis=1) / found.num_ranks * (1 + 1e-9)
        return float((self._largest[samples].max(axis=1) > fair).mean())

    def size_that_hides_one(self) -> int | None:
        """The smallest of a few larger minibatch sizes at which such pieces are in fewer than half of the minibatches.

        None: there is none. Nothing is planned: costs suffice.
        """
        sizes = larger_sizes(self._found.minibatch_size, self._found.num_ranks, self._found.order.size)
        return next((size for size in sizes if self.held_by_one(size) < 0.5), None)


def _costs(found: PhaseComparison, phase: int) -> tuple[IntArray, FloatArray]:
    """Of each piece of a phase: its sample, and its cost."""
    if found.phases[phase] == LANGUAGE:
        return np.arange(found.dataset.tokens.size), evaluate(found.training.cost, found.dataset.tokens)
    encoder = found.modalities[phase].phase
    items = found.dataset.items[encoder.name]
    return items.sample, evaluate(encoder.cost, items.encoder) * (FORWARD_SHARE if encoder.frozen else 1.0)
