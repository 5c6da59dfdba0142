"""Alignments: how the ranks of a stream are kept equal, and which rounds that makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from odc.balance.checks import FloatArray, as_cost, as_count, as_one_of, keep
from odc.balance.costs.models import CostModel, LinearCost, check_cost, evaluate
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.rounds import AlignedRounds, EqualStepRounds, FreeRounds, QuotaRounds, Rounds
from odc.errors import shown

_LONGEST_S = 10.0 * 365 * 86400


class Alignment(ABC):
    """What the ranks of a stream agree on. A subclass has fields for what a user can choose; all else is as here."""

    name: ClassVar[str]
    """Its name in the states of loaders."""

    communicates: ClassVar[bool] = True
    uses_cost: ClassVar[bool] = False
    cost: CostModel = LinearCost()
    gradient_accumulation_steps: int = 1
    minibatch_size: int | None = None
    join: bool = True
    late_binding: bool = False
    microbatch_cost: float = 0.0
    timeout_s: float = 1800.0

    def __post_init__(self) -> None:
        check_cost(self.cost)
        num_steps = as_count(self.gradient_accumulation_steps, "gradient_accumulation_steps")
        keep(self, gradient_accumulation_steps=num_steps, join=bool(self.join))
        if not 0 < as_cost(self.timeout_s, "timeout_s") <= _LONGEST_S:
            raise ValueError(f"timeout_s={shown(self.timeout_s)}: expected more than 0, at most {_LONGEST_S:g}")

    def check(self, grouping: Grouping) -> None:  # noqa: B027  # most go with any
        """Refuse a grouping that this alignment cannot go with.

        Raises:
            ValueError: names both.
        """

    @abstractmethod
    def rounds(self, grouping: Grouping, rank: int, world_size: int, num_samples: int | None) -> Rounds:
        """With an empty pool.

        Args:
            num_samples: of an epoch, all ranks together; None: not known, or without end.
        """

    def costs_of_some(self, max_tokens: int) -> FloatArray:
        """Of 16 lengths from 1 to the longest, which tell cost models apart; none where costs do not matter."""
        if not self.uses_cost:
            return np.zeros(0)
        return evaluate(self.cost, np.unique(np.geomspace(1, max_tokens, num=16).astype(np.int64)))


@dataclass(frozen=True, kw_only=True)
class AlignedGroups(Alignment):
    """All ranks have the same number of steps, of one microbatch each, as collectives need.

    Groups are split or put back into pools until numbers are equal (the distributed group alignment problem of Online
    Dynamic Batching). Ranks exchange one vector per round: after filling their pools, before the next steps.

    Example:
        >>> AlignedGroups(gradient_accumulation_steps=4).join
        True
    """

    name = "dgap"

    join: bool = True
    """Continue until no rank has samples left. False: an epoch ends once the number of trained samples equals the size
    of the dataset. Whenever a rank has no samples left, the data restarts in another order, so some samples of an epoch
    come twice and others not at all. An iterable of unknown size ends instead of restarting."""

    gradient_accumulation_steps: int = 1
    """Steps per minibatch."""

    timeout_s: float = 1800.0
    """Maximum seconds to wait for the other ranks."""

    def rounds(self, grouping: Grouping, rank: int, world_size: int, num_samples: int | None) -> Rounds:
        return AlignedRounds(grouping, rank, world_size, joins=self.join)


@dataclass(frozen=True)
class EqualSteps(Alignment):
    """All ranks have the same number of steps, and the padded microbatches of a step have about the same cost.

    Each rank knows the lengths in all pools, and makes these microbatches in place of the groups of
    ``Grouping("token-budget")``; no other grouping is taken. Ranks exchange one vector per round: after filling their
    pools, before the next steps.

    Example:
        >>> EqualSteps(cost=QuadraticCost(1e-2, 1.0)).gradient_accumulation_steps
        1
    """

    name = "steps"
    uses_cost = True

    cost: CostModel = LinearCost()
    """Cost model of a sample."""

    gradient_accumulation_steps: int = 1
    """Steps per minibatch."""

    timeout_s: float = 1800.0
    """Maximum seconds to wait for the other ranks."""

    def check(self, grouping: Grouping) -> None:
        if grouping.name != "token-budget":
            raise ValueError(
                f"grouping={grouping.name!r} with EqualSteps, which makes padded groups of equal cost itself: expected "
                "Grouping('token-budget', ...)"
            )

    def rounds(self, grouping: Grouping, rank: int, world_size: int, num_samples: int | None) -> Rounds:
        return EqualStepRounds(grouping, rank, world_size, cost=self.cost)


@dataclass(frozen=True)
class EqualMinibatches(Alignment):
    """All ranks have the same cost per minibatch, and any number of microbatches, which needs ODC.

    All ranks agree on a quota of cost, and each fills its minibatch from its own pool up to this quota. One exchange
    per minibatch.

    Example:
        >>> EqualMinibatches(minibatch_size=4, cost=QuadraticCost(1e-2, 1.0)).late_binding
        False
    """

    name = "minibatch"
    uses_cost = True

    minibatch_size: int = field()  # no default, though Alignment has a value
    """Average number of samples per rank in a minibatch; at most a quarter of the grouping's ``pool_size``. An epoch of
    a dataset with indices has ``ceil(num_samples / (world_size * minibatch_size))`` minibatches, which is ``len()`` of
    the loader."""

    cost: CostModel = LinearCost()
    """Cost model of a sample."""

    comm: Literal["auto", "odc"] = "auto"
    """"odc" permits different numbers of microbatches without checking that ODC is active, see
    :class:`~odc.balance.MinibatchLoader`."""

    late_binding: bool = False
    """Ranks that finish early take samples of the same minibatch from slower ranks, see
    :class:`~odc.balance.MinibatchLoader`. Minibatches have the same samples as without it. Needs ``Grouping("pack")``,
    ``loss_scaling="exact"`` and a dataset with indices, whose samples any rank can read. One more exchange per
    minibatch."""

    microbatch_cost: float = 0.0
    """With ``late_binding``, the fixed cost of a microbatch in addition to its samples, in the unit of ``cost``."""

    timeout_s: float = 1800.0
    """Maximum seconds to wait for the other ranks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        keep(self, minibatch_size=as_count(self.minibatch_size, "minibatch_size"))
        as_one_of(self.comm, "comm", ("auto", "odc"))
        if as_cost(self.microbatch_cost, "microbatch_cost") and not self.late_binding:
            raise ValueError(
                f"microbatch_cost={shown(self.microbatch_cost)} without late_binding=True: quotas do not count "
                "microbatches"
            )

    def check(self, grouping: Grouping) -> None:
        if grouping.pool_size < 4 * self.minibatch_size:
            raise ValueError(
                f"pool_size={grouping.pool_size} with minibatch_size={self.minibatch_size}: expected at least four "
                "times as many, as some are chosen from while others are trained on; 16 times balance well"
            )
        if self.late_binding and grouping.name != "pack":
            raise ValueError(
                f"late_binding=True with grouping={grouping.name!r}: expected 'pack', where samples leave a microbatch "
                "and join another as they are"
            )

    def rounds(self, grouping: Grouping, rank: int, world_size: int, num_samples: int | None) -> Rounds:
        return QuotaRounds(grouping, rank, world_size, minibatch_size=self.minibatch_size, num_samples=num_samples)


@dataclass(frozen=True)
class Unaligned(Alignment):
    """No communication: ranks may have different numbers of steps. Several ranks need ``loss_scaling="none"``.

    Example:
        >>> Unaligned(gradient_accumulation_steps=4).communicates
        False
    """

    name = "none"
    communicates = False

    gradient_accumulation_steps: int = 1
    """Steps per minibatch."""

    def rounds(self, grouping: Grouping, rank: int, world_size: int, num_samples: int | None) -> Rounds:
        return FreeRounds(grouping, 0, 1)


ALIGNMENTS: dict[str, type[Alignment]] = {
    each.name: each for each in (AlignedGroups, EqualSteps, EqualMinibatches, Unaligned)
}
