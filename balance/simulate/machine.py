"""Times of plans on real devices, with noise, slow devices and communication, per layer if needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_cost, as_count, as_speeds
from odc.balance.costs import CostModel, attention_costs, evaluate
from odc.balance.layout import microbatch_costs
from odc.balance.plan import Comm, Plan
from odc.balance.random_numbers import normal_quantiles, random_generator, uniform
from odc.errors import shown


@runtime_checkable
class LayeredCost(Protocol):
    """A cost model that also tells what kinds of layers cost, e.g. ``TransformerCost``."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each kind."""

    def by_group(self, lengths: npt.ArrayLike, /) -> FloatArray:
        """Cost of one layer of each kind, (num_kinds, num_samples)."""


@dataclass(frozen=True)
class Machine:
    """How real devices differ from the assumptions of plans. The default has no differences.

    Times are in the unit of the cost model, for a device of speed 1.

    Example:
        >>> cost = TransformerCost.from_config("qwen2.5-1.5b")
        >>> epoch = Scenario(even_lengths("longalign", 256), cost, world_size=8, minibatch_size=4).plan("lb-mini")
        >>> late = epoch.run("odc", Machine(speeds=(1, 1, 1, 1, 1, 1, 1, 0.5)))  # one device is slow
        >>> late.bubble_rate > epoch.run("odc").bubble_rate
        True
    """

    noise: float = 0.0
    """Standard deviation of the ratio of a sample's true cost to its estimate; the ratio is lognormal with mean 1."""

    speeds: tuple[float, ...] | None = None
    """True speed of each rank, from 1e-9 to 1e9; None: the speeds of the plan."""

    gather: float = 0.0
    """Time of one gather of one layer's parameters; two per layer and microbatch, forward and backward."""

    scatter: float = 0.0
    """Time of one push of one layer's gradients; one per layer and microbatch, in the backward."""

    overlap: float = 1.0
    """Fraction of the communication, from 0 to 1, that compute hides, as far as there is compute."""

    num_layers: int = 1
    """Layers that communicate, for a cost model that has no layers of its own."""

    forward_share: float = 1 / 3
    """Fraction of the compute in the forward: 1/4 if the backward recomputes all activations."""

    seed: int = 0
    """Seed of the noise."""

    synchronization: float = 0.0
    """Time of communication at the end of each minibatch, which nothing hides."""

    def __post_init__(self) -> None:
        costs = ("noise", "gather", "scatter", "synchronization", "overlap", "forward_share")
        checked: dict[str, object] = {name: as_cost(getattr(self, name), name) for name in costs}
        for name in ("overlap", "forward_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number from 0 to 1")
        checked["num_layers"] = as_count(self.num_layers, "num_layers")
        checked["seed"] = as_count(self.seed, "seed", minimum=0, maximum=None)
        if self.speeds is not None:
            checked["speeds"] = tuple(as_speeds(self.speeds, max(1, np.size(self.speeds))).tolist())
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def noise_factors(self, num_samples: int) -> FloatArray:
        """True cost over estimated cost of every sample of a dataset, (num_samples,)."""
        if self.noise == 0:
            return np.ones(num_samples)
        variance = np.log1p(self.noise**2)
        normal = normal_quantiles(uniform(random_generator("noise", self.seed), num_samples))
        factors: FloatArray = np.exp(np.sqrt(variance) * normal - variance / 2)
        return factors

    def rates(self, plan: Plan) -> FloatArray:
        """True speed of each rank, (world_size,)."""
        speeds = plan.speeds if self.speeds is None else self.speeds
        return np.ones(plan.world_size) if speeds is None else as_speeds(speeds, plan.world_size)


@dataclass(frozen=True)
class Elapsed:
    """The time of a minibatch."""

    makespan: float
    """Until the last rank was done."""

    busy: float
    """Time of all ranks together in which they did not wait for each other."""


class Stopwatch:
    """Works out what the plans of one dataset take under one kind of communication.

    Collectives follow equation (1) of the paper: the sum, over microbatches and layers, of the slowest rank's
    time, forward and backward apart. With ODC the slowest rank's own sum counts.
    """

    def __init__(self, cost: CostModel, lengths: IntArray, machine: Machine) -> None:
        self._cost, self._lengths = cost, lengths
        self._machine = machine
        self._noise = machine.noise_factors(lengths.size)
        if isinstance(cost, LayeredCost):
            self._counts = np.array(cost.counts, dtype=np.float64)
            self._costs = np.asarray(cost.by_group(lengths)) * self._noise
        else:
            self._counts = np.array([machine.num_layers], dtype=np.float64)
            self._costs = evaluate(cost, lengths)[None] * self._noise / machine.num_layers

    def time(self, plan: Plan, samples: IntArray, comm: Comm) -> Elapsed:
        """What ``plan`` takes for these samples of the dataset.

        Raises:
            ValueError: ``comm`` is neither "odc" nor "collective", or the plan pads attention, and the cost model
                does not tell attention's part.
        """
        if comm not in ("odc", "collective"):
            raise ValueError(f"comm={shown(comm)}: expected 'odc' or 'collective'")
        machine, share = self._machine, self._machine.forward_share
        # Part of the compute, and communication: of a forward, then of a backward.
        stages = (share, machine.gather), (1 - share, machine.gather + machine.scatter)
        exists = np.arange(max(plan.num_microbatches))[None] < np.array(plan.num_microbatches)[:, None]
        rates = machine.rates(plan)[:, None]
        busy, makespan = np.zeros(exists.shape), 0.0
        attention = None
        if plan.layout == "padded-attention":
            # Of a model with one kind of layer: others do not tell attention's part.
            attention = attention_costs(self._cost, self._lengths[samples]) * self._noise[samples] / self._counts[0]
        for count, costs in zip(self._counts, self._costs[:, samples], strict=True):
            compute = microbatch_costs(plan.microbatches, costs, plan.lengths, plan.layout, attention)
            if plan.microbatch_cost:
                compute = compute + exists * plan.microbatch_cost / self._counts.sum()
            for part, communication in stages:
                work = part * compute / rates
                times = count * (work + communication - machine.overlap * np.minimum(work, communication))
                if comm == "odc":
                    times = times * exists
                makespan += float(times.max(axis=0, initial=0.0).sum())
                busy += times
        if comm == "odc":
            makespan = float(busy.sum(axis=1).max(initial=0.0))
        end = machine.synchronization
        return Elapsed(makespan + end, float(busy.sum()) + end * plan.world_size)
