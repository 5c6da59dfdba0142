"""How long a minibatch of several modalities takes, by its plan: under collectives, and under ODC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray
from odc.balance.layout import FlatMicrobatches
from odc.balance.multimodal.schedule import FORWARD_SHARE, MinibatchSchedule, forward_ends
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
    plan, items = FlatMicrobatches.of(schedule.language.microbatches), schedule.lengths.items
    # When all outputs of a sample are there, and then when its gradients are.
    ready, ends = np.zeros((2, schedule.language.num_samples))
    for name, encoder in schedule.encoders.items():
        flat = FlatMicrobatches.of(encoder.microbatches)
        forwards, clock = forward_ends(encoder, clock)
        np.maximum.at(ready, items[name].sample[flat.samples], np.repeat(forwards, flat.sizes))
    # Of microbatches that a rank does not have, nothing is awaited and nothing computed.
    done = np.zeros_like(language)
    for number, awaited in enumerate(plan.table(plan.largest(ready)).T):
        clock = done[:, number] = np.maximum(clock, awaited) + language[:, number]
    ends[plan.samples] = np.repeat(done[plan.places()], plan.sizes)
    for name in reversed(list(schedule.encoders)):
        if is_frozen[name]:
            continue
        flat = FlatMicrobatches.of(schedule.encoders[name].microbatches)
        awaited = flat.table(flat.largest(ends[items[name].sample]))
        for number in reversed(range(awaited.shape[1])):
            clock = np.maximum(clock, awaited[:, number]) + (1 - FORWARD_SHARE) * encoders[name][:, number]
    return float(clock.max())
