"""How minibatches are to be balanced, and what that needs to know of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from odc.balance import CostModel, LinearCost, Plan, Policy, TransformerCost, get_policy
from odc.errors import ConfigError

logger = logging.getLogger("odc")


@dataclass(frozen=True)
class BalanceOptions:
    """A policy and its arguments."""

    policy: str = "lb-mini"
    """Name of a policy of :mod:`odc.balance`."""

    max_tokens: int | None = None
    """Most tokens in one microbatch; default: the longest sample, so no microbatch needs more memory than that one."""

    cost: CostModel | None = None
    """What a sample costs; default: FLOPs of the model's configuration, or tokens where that is not understood."""

    microbatch_cost: float = 0.0
    """What every microbatch costs besides its samples, in the unit of ``cost``."""

    def __post_init__(self) -> None:
        get_policy(self.policy)  # an unknown name is refused here
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens}: expected at least 1")

    @property
    def equal_counts(self) -> bool:
        """Whether all ranks get the same number of microbatches, so that collectives would do."""
        return get_policy(self.policy).equal_counts

    def planner(self, lengths: Sequence[int], world_size: int, config: object, tally: Tally | None = None) -> Planner:
        """For a dataset with these lengths and a model of this configuration; ``tally`` is told what it plans.

        Raises:
            ConfigError: a sample is longer than ``max_tokens``.
        """
        longest = max(lengths, default=1)
        max_tokens = longest if self.max_tokens is None else self.max_tokens
        if longest > max_tokens:
            raise ConfigError(
                f"max_tokens={max_tokens}: the longest sample has {longest} tokens, and a sample is never cut; give at "
                f"least {longest}, or filter the dataset"
            )
        cost = self.cost or default_cost(config)
        policy = get_policy(self.policy)
        return Planner(policy, lengths, world_size, max_tokens, cost, self.microbatch_cost, tally or Tally())


@dataclass
class Tally:
    """What was planned, for people."""

    minibatches: int = 0
    unequal: int = 0
    """Minibatches in which ranks got different numbers of microbatches."""

    microbatches: list[int] = field(default_factory=list)
    """Of each rank."""

    def add(self, counts: Sequence[int]) -> None:
        """One minibatch with so many microbatches per rank."""
        self.minibatches += 1
        self.unequal += len(set(counts)) > 1
        before = self.microbatches or [0] * len(counts)
        self.microbatches = [a + b for a, b in zip(before, counts, strict=True)]

    def __str__(self) -> str:
        per_rank = " ".join(map(str, self.microbatches))
        return (
            f"{self.minibatches} minibatches planned; microbatches of each rank: {per_rank}; different numbers in "
            f"{self.unequal} minibatches"
        )


@dataclass(frozen=True)
class Planner:
    """Plans minibatches of one dataset; every rank gets the same plans without communication."""

    policy: Policy
    lengths: Sequence[int]
    """Tokens of each sample of the dataset."""

    world_size: int
    max_tokens: int
    cost: CostModel
    microbatch_cost: float = 0.0
    tally: Tally = field(default_factory=Tally)

    def plan(self, samples: Sequence[int]) -> Plan:
        """Of one minibatch; its indices are positions in ``samples``, which may hold a sample twice."""
        return self.policy.plan(
            [self.lengths[sample] for sample in samples],
            world_size=self.world_size,
            max_tokens=self.max_tokens,
            cost=self.cost,
            microbatch_cost=self.microbatch_cost,
        )

    def microbatches(self, samples: Sequence[int]) -> list[list[list[int]]]:
        """``[rank][microbatch]``: lists of samples. At least one microbatch per rank, an empty one if need be."""
        ranks = [
            [[samples[position] for position in microbatch] for microbatch in mine] or [[]]
            for mine in self.plan(samples).microbatches
        ]
        self.tally.add([len(mine) for mine in ranks])
        return ranks


def default_cost(config: object) -> CostModel:
    """FLOPs of a model with this configuration; tokens where it is not understood."""
    try:
        return TransformerCost.from_config(config)
    except ValueError as error:
        logger.warning("odc: samples are balanced by their tokens, not by FLOPs: %s", error)
        return LinearCost()
