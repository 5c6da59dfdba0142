"""Options of balancing, the plans that follow from them, and what ``odc run`` has chosen for a whole process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.balance import CostModel, Plan, get_policy
from odc.balance.checks import IntArray
from odc.balance.late_binding.steal_policy import largest_first
from odc.balance.policies import LBMini
from odc.balance.policies.base import Job
from odc.errors import ConfigError
from odc.trainers.batches import Tally
from odc.trainers.models import default_cost


@dataclass(frozen=True)
class BalanceOptions:
    """A policy and its arguments.

    Example:
        >>> BalanceOptions("lb-micro", max_tokens=32_768).policy
        'lb-micro'
    """

    policy: str = "lb-mini"
    """Name of a policy of :mod:`odc.balance`."""

    max_tokens: int | None = None
    """Maximum tokens per microbatch, counted when it is packed (not by the dataset's lengths). Default: the longest
    sample, so that no microbatch needs more memory than this sample."""

    cost: CostModel | None = None
    """Cost model of a sample; default: FLOPs by the model's configuration, or tokens if the configuration is not
    understood."""

    microbatch_cost: float = 0.0
    """Fixed cost of every microbatch in addition to its samples, in the unit of ``cost``."""

    online: bool = False
    """Balance samples as they are read, instead of by a policy, which needs known lengths; see
    :mod:`odc.trainers.streamed`. Needs ``max_tokens``, because the longest sample is not known."""

    late_binding: bool = False
    """Ranks that finish early take samples from slower ranks, see :mod:`odc.trainers.late`; for "lb-mini"."""

    pool_size: int | None = None
    """With ``online``, maximum number of samples in a rank's pool; default: 256, or 16 minibatches if that is more."""

    def __post_init__(self) -> None:
        get_policy(self.policy)  # an unknown name is refused here
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens}: expected at least 1")
        if self.late_binding and self.online:
            raise ConfigError(
                "late_binding=True with online=True: accelerate's loaders ask for the next step before this one is "
                "trained on, and what ranks have chosen for it is not known then. Leave one of them out"
            )
        if self.late_binding and self.policy != LBMini.name:
            raise ConfigError(
                f"late_binding=True with policy {self.policy!r}: expected {LBMini.name!r}, whose ranks take any number "
                "of samples and pack their own"
            )
        if not self.online:
            if self.pool_size is not None:
                raise ConfigError(f"pool_size={self.pool_size} is of online balancing: leave it out, or ask for that")
            return
        if self.max_tokens is None:
            raise ConfigError(
                "online balancing needs max_tokens, the most tokens of a microbatch: lengths are not known before "
                "samples are read, so there is no longest one to go by"
            )
        if self.pool_size is not None and self.pool_size < 1:
            raise ConfigError(f"pool_size={self.pool_size}: expected at least 1")
        if self.microbatch_cost:
            raise ConfigError(f"microbatch_cost={self.microbatch_cost}: online balancing does not count microbatches")

    @classmethod
    def choose(cls, policy: str | None, *, online: bool, **options: Any) -> BalanceOptions:
        """Options from users' arguments: a policy (default: "lb-mini") or ``online``, and the other fields.

        Raises:
            ConfigError: both are given, or an option is out of range or belongs to the other mode.
            ValueError: the policy is not known.
        """
        if online and policy is not None:
            raise ConfigError(
                f"policy={policy!r} with online=True, which fills quotas instead of planning: give one of them"
            )
        return cls(policy or "lb-mini", online=online, **options)

    @property
    def name(self) -> str:
        """For messages."""
        return "online" if self.online else self.policy

    @property
    def equal_counts(self) -> bool:
        """Whether all ranks get the same number of microbatches, so that collectives would do."""
        return not self.online and get_policy(self.policy).equal_counts

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
        return Planner(replace(self, cost=None), job)  # costs are known, and workers cannot be sent every user's model


@dataclass(frozen=True, eq=False)
class Planner:
    """Plans minibatches of one dataset; every rank gets the same plans without communication."""

    options: BalanceOptions
    job: Job
    """All samples of the dataset."""

    @property
    def binds_late(self) -> bool:
        """Whether ranks take samples from slower ranks."""
        return self.options.late_binding and self.job.world_size > 1

    @property
    def keeps_limit(self) -> bool:
        """``max_tokens`` is the user's; else the longest sample, whatever it turns out to have."""
        return self.options.max_tokens is not None

    @property
    def may_split(self) -> bool:
        """A row that turns out too long may become two; not where ranks run equal numbers."""
        return self.job.world_size == 1 or not self.options.equal_counts

    def plan(self, samples: Sequence[int] | IntArray) -> Plan:
        """Of one minibatch; its indices are positions in ``samples``, which may hold a sample twice."""
        plan = get_policy(self.options.policy).plan_job(self.job.of(samples))
        return largest_first(plan) if self.binds_late else plan

    def microbatches(self, plan: Plan, samples: Sequence[int] | IntArray, rank: int) -> list[list[int]]:
        """Those of one rank in the plan of ``samples``, as lists of samples: at least one, an empty one if need be."""
        indices = np.asarray(samples, dtype=np.int64)
        return [indices[microbatch].tolist() for microbatch in plan.microbatches[rank]] or [[]]


# What ``odc run --balance`` has installed


_launched: list[Launched] = []


class Launched:
    """The changes that :func:`install` made to this process; :meth:`close` undoes them.

    Example:
        >>> launched = install("lb-micro")
        >>> launched.close()
    """

    def __init__(self, options: BalanceOptions, undo: Callable[[], None]) -> None:
        self.options = options
        self.used = False
        """Whether anything was balanced."""

        self.tally = Tally()
        self._undo = undo
        _launched.append(self)

    def close(self) -> None:
        """Leave everything as it was. Idempotent."""
        if self in _launched:
            _launched.remove(self)
            self._undo()


def launched() -> Launched | None:
    """What was installed last in this process; None: nothing."""
    return _launched[-1] if _launched else None
