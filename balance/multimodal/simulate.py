"""How long a minibatch of several modalities takes, by its plan: under collectives, and under ODC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray
from odc.balance.multimodal.schedule import FORWARD_SHARE, MinibatchSchedule
from odc.balance.plan import Comm


@dataclass(frozen=True)
class StepTimes:
    """What one minibatch takes, in units of cost. Moving and planning take no time here."""

    makespan: float
    """Until the last rank is done."""

    work: float
    """What all ranks compute in all, padding included."""

    num_ranks: int

    @property
    def bubble_rate(self) -> float:
        """Idle device time over total device time, from 0 to 1."""
        total = self.makespan * self.num_ranks
        return max(0.0, 1.0 - self.work / total) if total else 0.0


def step_times(schedule: MinibatchSchedule, comm: Comm, *, in_step: bool = False) -> StepTimes:
    """Times of one minibatch; of frozen encoders only the forward is computed.

    "collective": in each phase every microbatch takes as long as its slowest rank, forward and backward, since every
    layer of it has collectives, and what moves between the phases moves by all-to-all besides. "odc": a rank goes
    through its own forwards of encoders, microbatches of the language model and backwards of encoders, and waits only
    for the outputs that a microbatch needs, and for the gradients of the outputs that it has made.

    Args:
        in_step: under ODC, what moves between the phases moves by all-to-all (:class:`~odc.balance.multimodal.InStep`):
            all ranks wait for all behind the forwards of each encoder, and behind the language model.
    """
    is_frozen = schedule.frozen
    encoders = {name: plan.microbatch_times() for name, plan in schedule.encoders.items()}
    share = {name: FORWARD_SHARE if is_frozen[name] else 1.0 for name in encoders}
    language = schedule.language.microbatch_times()
    work = float(language.sum()) + sum(float(times.sum()) * share[name] for name, times in encoders.items())
    if comm == "collective":
        plans = [(schedule.language, 1.0), *((schedule.encoders[name], share[name]) for name in encoders)]
        makespan = sum(plan.makespan("collective") * part for plan, part in plans)
    elif in_step:
        makespan = _in_step(encoders, language, is_frozen)
    else:
        makespan = _on_demand(schedule, encoders, language, is_frozen)
    return StepTimes(float(makespan), work, schedule.num_ranks)


def _in_step(encoders: Mapping[str, FloatArray], language: FloatArray, is_frozen: Mapping[str, bool]) -> float:
    loads = {name: times.sum(axis=1) for name, times in encoders.items()}
    forward = sum(FORWARD_SHARE * float(load.max()) for load in loads.values())
    # The gradients of all encoders meet behind the language model; the backwards follow each other without.
    backward = sum((load for name, load in loads.items() if not is_frozen[name]), np.zeros(len(language)))
    return forward + float(language.sum(axis=1).max()) + (1 - FORWARD_SHARE) * float(backward.max())


def _on_demand(
    schedule: MinibatchSchedule,
    encoders: Mapping[str, FloatArray],
    language: FloatArray,
    is_frozen: Mapping[str, bool],
) -> float:
    clock = np.zeros(schedule.num_ranks)
    # When each item's output is there, and then when its gradient is.
    ready = {name: np.zeros(plan.num_samples) for name, plan in schedule.encoders.items()}
    for name, plan in schedule.encoders.items():
        for rank, mine in enumerate(plan.microbatches):
            for number, items in enumerate(mine):
                clock[rank] += FORWARD_SHARE * encoders[name][rank, number]
                ready[name][items] = clock[rank]
    ends = {name: np.zeros_like(times) for name, times in ready.items()}
    owner = {name: _item_order(schedule, name) for name in ready}
    for rank, microbatches in enumerate(schedule.language.microbatches):
        for number in range(len(microbatches)):
            needs = [(name, owner[name][rank][number]) for name in ready]
            latest = [float(ready[name][items].max()) for name, items in needs if items]
            clock[rank] = max([float(clock[rank]), *latest]) + language[rank, number]
            for name, items in needs:
                ends[name][items] = clock[rank]
    for name in reversed(list(schedule.encoders)):
        if is_frozen[name]:
            continue
        for rank, mine in enumerate(schedule.encoders[name].microbatches):
            for number in reversed(range(len(mine))):
                awaited = float(ends[name][mine[number]].max()) if mine[number] else 0.0
                took = (1 - FORWARD_SHARE) * encoders[name][rank, number]
                clock[rank] = max(float(clock[rank]), awaited) + took
    return float(clock.max())


def _item_order(schedule: MinibatchSchedule, modality: str) -> list[list[list[int]]]:
    """``[rank][microbatch]``: the items that a microbatch of the language model needs."""
    return [
        [schedule.lengths.items[modality].of_samples(samples) for samples in mine]
        for mine in schedule.language.microbatches
    ]
