"""What to make of a comparison: which communication and policy, whether it fits, what holds it back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from odc.balance import Scenario, Simulation
from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import evaluate
from odc.balance.simulate import PlannedEpoch
from odc.cli.comparison import COMM_NAMES, Comparison
from odc.cli.costs import Training
from odc.cli.output import gigabytes
from odc.cli.samples import shuffled

# A gain below this is within what a cost model can be wrong about.
_NOT_WORTH_IT = 0.02
# A difference below this is shown as none.
_NOTHING = 0.0005
_LARGEST_SIZE, _FEW_MINIBATCHES = 64, 16


def recommend(comparison: Comparison) -> str:
    """What to use and why, in a few sentences."""
    odc, fsdp = comparison.best("odc"), comparison.best("collective")
    if odc is None or fsdp is None:
        chosen = odc or fsdp or comparison.baseline
        text = f"{COMM_NAMES[chosen.comm]} with {chosen.policy} is the fastest of these."
    elif odc.speedup(fsdp) - 1 < _NOT_WORTH_IT:
        chosen, text = fsdp, _stay(comparison, fsdp, odc)
    else:
        chosen, text = odc, _use_odc(fsdp, odc)
    if odc is not None:
        text += _about_longest(comparison, odc)
    if comparison.fits(chosen):
        return text
    return f"Does not fit: {_misfit(comparison, chosen)} Memory aside: {text}"


def _use_odc(fsdp: Simulation, odc: Simulation) -> str:
    return (
        f"Use ODC with {odc.policy}: {odc.speedup(fsdp):.2f}x speedup over the best FSDP plan ({fsdp.policy}), "
        f"waiting {fsdp.bubble_rate:.1%} -> {odc.bubble_rate:.1%}."
    )


def _stay(comparison: Comparison, fsdp: Simulation, odc: Simulation) -> str:
    gain = odc.speedup(fsdp) - 1
    text = f"Stay with FSDP and {fsdp.policy}: ranks wait for {fsdp.bubble_rate:.1%} of the time, and ODC would "
    if gain >= _NOTHING:
        return f"{text}bring {gain:.1%} more samples/s."
    if gain > -_NOTHING:
        return f"{text}be no faster."
    share = _share_of_transfers(comparison, odc)
    because = f": its transfers take {share:.1%} of its time" if share >= _NOTHING else ""
    return f"{text}be {-gain:.1%} slower{because}."


def _share_of_transfers(comparison: Comparison, simulation: Simulation) -> float:
    """Part of the time that would not pass if transfers took none."""
    free = replace(comparison.machines[simulation.comm], gather=0.0, scatter=0.0)
    return 1 - comparison.planned[simulation.policy].run(simulation.comm, free).total / simulation.total


def _misfit(comparison: Comparison, simulation: Simulation) -> str:
    """What needs how much memory, and what to do."""
    training, longest = comparison.training, int(comparison.lengths.max())
    memory = training.device.memory_bytes
    limit = training.most_tokens()
    tokens = simulation.peak_tokens if limit else 1
    if limit:
        what = f"the largest microbatch, {tokens:,} tokens, needs {gigabytes(training.memory_bytes(tokens))}"
    elif training.state.bytes > memory:
        what = f"the model's sharded state alone needs {gigabytes(training.state.bytes)}"
    else:
        what = f"even a microbatch of one token needs {gigabytes(training.memory_bytes(tokens))}"
    ways = []
    if training.state.unsharded_bytes + training.activations.bytes(tokens) < memory:
        ways.append("more ranks")
    if not training.recompute:
        ways.append("--recompute")
    if limit:
        ways.append(f"--max-tokens {limit}{' --truncate' if limit < longest else ''}")
    return f"{what} of {gigabytes(memory)}. Use {', or '.join([*ways, 'a device with more memory'])}."


def _about_longest(comparison: Comparison, odc: Simulation) -> str:
    """A sentence about long samples, if they are what ranks wait for."""
    fixed = share_fixed_by_longest(comparison.planned[odc.policy])
    if odc.bubble_rate <= 0.05 or fixed < 0.5:
        return ""
    size = size_that_hides_longest(comparison)
    way_out = f"with --minibatch-size {size}, in fewer than half" if size else "a larger minibatch would hide them"
    return (
        f" The longest samples hold it back: one alone takes longer than a rank's fair share in {fixed:.0%} of "
        f"the minibatches; {way_out}."
    )


def share_fixed_by_longest(epoch: PlannedEpoch) -> float:
    """Part of the minibatches in which one sample alone costs more than the mean rank."""
    plans = [minibatch.plan for minibatch in epoch.minibatches]
    return sum(_is_fixed(epoch.scenario, plan.lengths, plan.costs) for plan in plans) / len(plans)


def size_that_hides_longest(comparison: Comparison) -> int | None:
    """The smallest of a few larger minibatch sizes at which samples longer than a fair share are rare.

    None: there is none up to 64, or as far as the samples go. Nothing is planned: bounds suffice.
    """
    scenario, order = comparison.scenario, shuffled(comparison.lengths.size, comparison.scenario.seed)
    size = 2 * scenario.minibatch_size
    while size <= _LARGEST_SIZE and size * scenario.world_size <= order.size:
        per_minibatch = size * scenario.world_size
        num_minibatches = min(_FEW_MINIBATCHES, order.size // per_minibatch)
        lengths = comparison.lengths[order[: num_minibatches * per_minibatch]].reshape(num_minibatches, -1)
        if sum(_is_fixed(scenario, row, evaluate(scenario.cost, row)) for row in lengths) < num_minibatches / 2:
            return size
        size *= 2
    return None


def _is_fixed(scenario: Scenario, lengths: IntArray, costs: FloatArray) -> bool:
    """Whether one sample alone takes longer than an even division of all work over the ranks."""
    speeds = np.ones(scenario.world_size) if scenario.speeds is None else np.asarray(scenario.speeds)
    least = max(scenario.world_size, -(-int(lengths.sum()) // (scenario.max_tokens or int(lengths.max()))))
    even = (costs.sum() + least * scenario.microbatch_cost) / speeds.sum()
    alone = (costs.max() + scenario.microbatch_cost) / speeds.max()
    return bool(alone > even * (1 + 1e-9))


def memory_note(training: Training, max_tokens: int) -> str:
    """How the limit on tokens compares with what would fit."""
    limit = training.most_tokens()
    memory = gigabytes(training.device.memory_bytes)
    if limit == 0:
        return f"the sharded state needs {gigabytes(training.state.bytes)}, which leaves nothing of {memory}"
    verdict = "fits" if max_tokens <= limit else "does not fit"
    return f"{memory} would hold a microbatch of {limit:,} tokens, so the limit of {max_tokens:,} {verdict}"
