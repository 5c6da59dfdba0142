"""Layer 1: no processes. Times of minibatches of several modalities, against ranks that go through them by events."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from toy_modalities import orchestrator

from odc.balance.multimodal import ItemLengths, MinibatchSchedule, SampleLengths, step_times

Key = tuple[Any, ...]


@dataclass
class Step:
    """Of a rank's program: it begins once ``needs`` are there and, with a ``meeting``, once all ranks have come."""

    seconds: float = 0.0
    needs: Sequence[Key] = ()
    gives: Sequence[Key] = ()
    meeting: Key | None = None
    came: list[int] = field(default_factory=list)


def end_of(programs: Sequence[Sequence[Step]]) -> float:
    """When the last rank is done."""
    num_ranks = len(programs)
    clocks, at = [0.0] * num_ranks, [0] * num_ranks
    there: dict[Key, float] = {}
    arrivals: dict[Key, dict[int, float]] = {}
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] == len(program):
                continue
            step = program[at[rank]]
            begin = clocks[rank]
            if step.meeting is not None:
                arrivals.setdefault(step.meeting, {})[rank] = begin
                if len(arrivals[step.meeting]) < num_ranks:
                    continue
                begin = max(arrivals[step.meeting].values())
            if any(key not in there for key in step.needs):
                continue
            clocks[rank] = max([begin, *(there[key] for key in step.needs)]) + step.seconds
            there.update(dict.fromkeys(step.gives, clocks[rank]))
            at[rank] += 1
            moved = True
    assert at == [len(program) for program in programs], "ranks wait for each other for ever"
    return max(clocks)


def program_of(schedule: MinibatchSchedule, rank: int, kind: str) -> list[Step]:
    """What :func:`run_minibatch` does on a rank."""
    steps: list[Step] = []
    collective, in_step = kind == "collective", kind != "odc"

    def meeting(*key: Any) -> Key | None:
        return key if collective else None

    for name, plan in schedule.encoders.items():
        times = plan.microbatch_times()[rank]
        for m, items in enumerate(plan.microbatches[rank]):
            outputs = [("output", name, item) for item in items]
            steps.append(Step(times[m] / 3, gives=outputs, meeting=meeting("forward", name, m)))
        if in_step:
            steps.append(Step(meeting=("outputs", name)))
    times = schedule.language.microbatch_times()[rank]
    for m in range(len(schedule.language.microbatches[rank])):
        items = [(name, item) for name in schedule.encoders for item in schedule.items_of(name, rank, m)]
        needs = [("output", *key) for key in items]
        steps.append(Step(times[m] / 3, needs=needs, meeting=meeting("language", m)))
        gives = [("gradient", *key) for key in items]
        steps.append(Step(times[m] * 2 / 3, gives=gives, meeting=meeting("language back", m)))
    if in_step:
        steps.append(Step(meeting=("gradients",)))
    for name in reversed(list(schedule.encoders)):
        if schedule.frozen[name]:
            continue
        plan = schedule.encoders[name]
        for m in reversed(range(len(plan.microbatches[rank]))):
            needs = [("gradient", name, item) for item in plan.microbatches[rank][m]]
            took = plan.microbatch_times()[rank, m] * 2 / 3
            steps.append(Step(took, needs=needs, meeting=meeting("backward", name, m)))
    return steps


def draw(seed: int, num_ranks: int) -> list[list[SampleLengths]]:
    rng = random.Random(seed)

    def sample() -> SampleLengths:
        items = {
            name: [ItemLengths(tokens, tokens // 2) for tokens in rng.choices(range(1, 40), k=rng.choice([0, 0, 1, 2]))]
            for name in ("vision", "audio")
        }
        rows = sum(item.output for found in items.values() for item in found)
        return SampleLengths(rows + rng.randrange(1, 30), items)

    return [[sample() for _ in range(rng.randrange(0, 5))] for _ in range(num_ranks)]


@pytest.mark.parametrize("kind", ["collective", "odc", "odc in step"])
@pytest.mark.parametrize("frozen", [(), ("audio",)])
def test_times_are_those_of_ranks_that_go_through_it(kind: str, frozen: tuple[str, ...]) -> None:
    comm: Any = kind.split()[0]
    waits = 0
    for seed in range(30):
        num_ranks = 1 + seed % 4
        options = {"policy": [None, "lb-mini"][seed % 2], "balance_encoders": seed % 3 > 0, "comm": comm}
        schedule = orchestrator(num_ranks, frozen=frozen, **options).plan(draw(seed, num_ranks))
        found = step_times(schedule, comm, in_step=kind == "odc in step")
        programs = [program_of(schedule, rank, kind) for rank in range(num_ranks)]
        assert found.makespan == pytest.approx(end_of(programs), abs=1e-9)
        alone = [sum(step.seconds for step in program) for program in programs]
        assert found.work == pytest.approx(sum(alone), abs=1e-9)
        waits += found.makespan > max(alone) * 1.001
    assert waits > 2  # ranks wait for one another, or this proves nothing
