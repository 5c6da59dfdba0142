"""How minibatches are to be balanced, and what that needs to know of the model."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from odc.balance import CostModel, LinearCost, Plan, Policy, TransformerCost, get_policy
from odc.balance.checks import IntArray
from odc.balance.policies.base import Job
from odc.errors import ConfigError
from odc.trainers.bundles import Bundle

logger = logging.getLogger("odc")


@dataclass(frozen=True)
class BalanceOptions:
    """A policy and its arguments."""

    policy: str = "lb-mini"
    """Name of a policy of :mod:`odc.balance`."""

    max_tokens: int | None = None
    """Most tokens in one microbatch, as counted when it is packed, whatever the dataset's lengths say; default: those
    of the longest sample, so no microbatch needs more memory than that one."""

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

    def planner(self, lengths: npt.ArrayLike, world_size: int, config: object) -> Planner:
        """For a dataset with these lengths and a model of this configuration.

        Raises:
            ConfigError: a sample is longer than ``max_tokens``.
        """
        tokens = np.maximum(np.asarray(lengths, dtype=np.int64), 1)  # a sample without tokens is packed as nothing
        longest = int(tokens.max(initial=1))
        max_tokens = longest if self.max_tokens is None else self.max_tokens
        if longest > max_tokens:
            raise ConfigError(
                f"max_tokens={max_tokens}: the longest sample has {longest} tokens (sample {int(tokens.argmax())}), "
                f"and a sample is never cut; give at least {longest}, or filter the dataset"
            )
        job = Job.create(
            tokens,
            world_size=world_size,
            max_tokens=max_tokens,
            cost=self.cost or default_cost(config),
            microbatch_cost=self.microbatch_cost,
        )
        return Planner(get_policy(self.policy), job)


@dataclass
class Tally:
    """What was planned and trained, for people."""

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

    def add_planned(self, item: object) -> None:
        """Of an item of a loader, if it is the first bundle of a step."""
        if isinstance(item, Bundle) and item.planned:
            self.add(item.planned)

    def __str__(self) -> str:
        per_rank = " ".join(map(str, self.microbatches))
        return (
            f"{self.minibatches} minibatches planned; microbatches of each rank: {per_rank}; different numbers in "
            f"{self.unequal} minibatches"
        )


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans minibatches of one dataset; every rank gets the same plans without communication."""

    policy: Policy
    job: Job
    """All samples of the dataset."""

    def plan(self, samples: Sequence[int] | IntArray) -> Plan:
        """Of one minibatch; its indices are positions in ``samples``, which may hold a sample twice."""
        return self.policy.plan_job(self.job.of(samples))

    def microbatches(self, samples: Sequence[int] | IntArray) -> list[list[list[int]]]:
        """``[rank][microbatch]``: lists of samples. At least one microbatch per rank, an empty one if need be."""
        indices = np.asarray(samples, dtype=np.int64)
        return [
            [indices[microbatch].tolist() for microbatch in mine] or [[]] for mine in self.plan(indices).microbatches
        ]


def default_cost(config: object) -> CostModel:
    """FLOPs of a model with this configuration; tokens where it is not understood."""
    try:
        return TransformerCost.from_config(config)
    except ValueError as error:
        logger.warning("odc: samples are balanced by their tokens, not by FLOPs: %s", error)
        return LinearCost()
