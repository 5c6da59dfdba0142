"""From a dataset's lengths to one plan per minibatch, the same on every rank without communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import IntArray, as_count, as_lengths, check_fit
from odc.balance.costs import CostModel
from odc.balance.plan import Plan
from odc.balance.policies import Policy, get_policy


@dataclass(frozen=True, eq=False)
class PlannedMinibatch:
    """One global minibatch: which samples of the dataset it has, and who trains on which of them."""

    samples: IntArray
    """Dataset indices, (num_samples,) int64; sample i of ``plan`` is ``samples[i]``."""

    plan: Plan

    def of_rank(self, rank: int) -> list[list[int]]:
        """Dataset indices of each microbatch of ``rank``."""
        return [self.samples[microbatch].tolist() for microbatch in self.plan.microbatches[rank]]


class MinibatchSampler:
    """Shuffles a dataset, cuts it into global minibatches and plans each of them.

    A function of its arguments and the epoch alone: every rank that makes one with the same arguments gets
    the same plans. Iterating yields the :class:`PlannedMinibatch` objects of the current epoch.

    Args:
        lengths: tokens of each sample of the dataset, at least 1.
        minibatch_size: samples per rank in a minibatch; a global minibatch has ``world_size`` times that.
        world_size: number of ranks.
        policy: a name for :func:`~odc.balance.get_policy`, or a policy.
        cost: cost model.
        max_tokens: most tokens in one microbatch; by default the longest sample of the dataset (paper section
            5.1).
        seed: of the shuffle, at least 0.
        shuffle: without it, samples keep their order in every epoch.
        drop_last: leave out the samples after the last full minibatch of an epoch; else they form a smaller
            one.

    Raises:
        ValueError: an argument is out of range, a sample is longer than ``max_tokens``, or there would be no
            minibatch.
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        minibatch_size: int,
        world_size: int,
        policy: str | Policy,
        cost: CostModel,
        max_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
    ) -> None:
        self.lengths = as_lengths(lengths)
        self.world_size = as_count(world_size, "world_size")
        self.minibatch_size = as_count(minibatch_size, "minibatch_size")
        self.policy = get_policy(policy) if isinstance(policy, str) else policy
        self.cost = cost
        longest = int(self.lengths.max(initial=1))
        self.max_tokens = longest if max_tokens is None else as_count(max_tokens, "max_tokens")
        self.seed = as_count(seed, "seed", minimum=0)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0
        check_fit(self.lengths, self.max_tokens)
        if len(self) == 0:
            raise ValueError(
                f"{self.lengths.size} samples make no minibatch of minibatch_size={minibatch_size} on "
                f"world_size={world_size} ranks ({self.global_size} samples): lower minibatch_size, or pass "
                "drop_last=False if there are any samples"
            )

    @property
    def global_size(self) -> int:
        """Number of samples of a full minibatch, all ranks together."""
        return self.minibatch_size * self.world_size

    def __len__(self) -> int:
        """Number of minibatches of an epoch."""
        num_full, num_left = divmod(int(self.lengths.size), self.global_size)
        return num_full + (num_left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[PlannedMinibatch]:
        return self.starting_at(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch (from 0). Call it before each epoch, on every rank."""
        self.epoch = as_count(epoch, "epoch", minimum=0)

    def starting_at(self, first: int) -> Iterator[PlannedMinibatch]:
        """The minibatches of the current epoch from number ``first`` on; earlier ones are not planned."""
        order = self._order()
        for number in range(first, len(self)):
            samples = order[number * self.global_size : (number + 1) * self.global_size]
            yield PlannedMinibatch(samples, self._plan(samples))

    def _plan(self, samples: IntArray) -> Plan:
        return self.policy.plan(
            self.lengths[samples], world_size=self.world_size, max_tokens=self.max_tokens, cost=self.cost
        )

    def _order(self) -> IntArray:
        if not self.shuffle:
            return np.arange(self.lengths.size)
        # Sorting by the raw stream: numpy keeps that one stable across versions, but not permutation().
        keys = np.random.PCG64([self.seed, self.epoch]).random_raw(self.lengths.size)
        return np.argsort(keys, kind="stable")
