"""From a dataset's lengths to one plan per minibatch, the same on every rank without communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_count, as_lengths, as_optional_count, as_speeds, fingerprint
from odc.balance.costs import CostModel
from odc.balance.plan import PlannedMinibatch
from odc.balance.policies import Policy, get_policy
from odc.balance.policies.base import Job
from odc.balance.random_numbers import random_generator

_MEGABATCH = 50
"""Minibatches of a rank among whose samples like lengths are looked for."""


class MinibatchSampler:
    """Shuffles a dataset, cuts it into global minibatches and plans each of them.

    Plans depend only on the arguments and the epoch, so ranks with the same arguments get the same plans. Iterating
    yields the :class:`PlannedMinibatch` objects of the current epoch.

    Args:
        lengths: tokens of each sample of the dataset, at least 1 each and at most 2**53 in all.
        minibatch_size: samples per rank in a minibatch; a global minibatch has ``world_size`` times as many.
        world_size: number of ranks.
        cost: cost model of a sample, such as :class:`~odc.balance.TransformerCost`.
        policy: a name for :func:`~odc.balance.get_policy`, or a policy.
        max_tokens: maximum tokens per microbatch; default: the longest sample of the dataset (paper section 5.1).
        batch_size: samples per rank that a two-level policy ("verl-native") balances together before it cuts them into
            minibatches; a multiple of ``minibatch_size``. In RL these are the samples of one rollout. Default: all
            samples of an epoch. Other policies plan one minibatch at a time.
        microbatch_cost, speeds: see :meth:`Policy.plan`.
        seed: seed of the shuffle, at least 0.
        shuffle: False keeps the samples in their order in every epoch.
        group_by_length: put samples of similar lengths into the same minibatch, see :func:`grouped_by_length`. Then
            ranks hardly wait, but some steps have only long samples and others only short ones.
        drop_last: leave out the samples after the last full minibatch of an epoch; otherwise they form a smaller one.

    Raises:
        ValueError: an argument is out of range, a sample is longer than ``max_tokens``, or there would be no
            minibatch.
        TypeError: ``policy`` is neither a name nor a policy.

    Example:
        >>> lengths = [5, 90, 30, 40, 80, 10, 20, 60]
        >>> sampler = MinibatchSampler(lengths, minibatch_size=2, world_size=2, cost=LinearCost())
        >>> for planned in sampler:
        ...     print(planned.of_rank(0), planned.of_rank(1))
        [[3, 2, 6]] [[1]]
        [[0, 7, 5]] [[4]]
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        minibatch_size: int,
        world_size: int,
        cost: CostModel,
        policy: str | Policy = "lb-mini",
        max_tokens: int | None = None,
        batch_size: int | None = None,
        microbatch_cost: float = 0.0,
        speeds: npt.ArrayLike | None = None,
        seed: int = 0,
        shuffle: bool = True,
        group_by_length: bool = False,
        drop_last: bool = True,
    ) -> None:
        self.lengths = as_lengths(lengths)
        self.world_size = as_count(world_size, "world_size")
        self.minibatch_size = as_count(minibatch_size, "minibatch_size")
        self.policy = policy if isinstance(policy, Policy) else get_policy(policy)
        self.cost = cost
        self.max_tokens = as_count(self.lengths.max(initial=1) if max_tokens is None else max_tokens, "max_tokens")
        self.has_limit = max_tokens is not None
        """Whether ``max_tokens`` was given."""
        self.seed = as_count(seed, "seed", minimum=0, maximum=None)
        self.shuffle = shuffle
        self.group_by_length = group_by_length
        self.drop_last = drop_last
        self.epoch = 0
        self._job = Job.create(
            self.lengths,
            world_size=self.world_size,
            max_tokens=self.max_tokens,
            cost=cost,
            microbatch_cost=microbatch_cost,
            speeds=speeds,
        )
        self.batch_size = self._batch_size(batch_size)
        if len(self) == 0:
            raise ValueError(
                f"{self.lengths.size} samples make no minibatch of minibatch_size={minibatch_size} on "
                f"world_size={world_size} ranks ({self.global_size} samples): lower minibatch_size, or pass "
                "drop_last=False if there are any samples"
            )

    @property
    def global_size(self) -> int:
        """Number of samples of a full minibatch on all ranks together."""
        return self.minibatch_size * self.world_size

    @property
    def speeds(self) -> FloatArray | None:
        """The speed of each rank, (world_size,), for the minibatches that are planned next; None: all are equal."""
        return self._job.speeds

    @property
    def microbatch_cost(self) -> float:
        """The fixed cost of a microbatch, for the minibatches that are planned next."""
        return self._job.microbatch_cost

    def count_with(self, speeds: FloatArray | None, microbatch_cost: float | None = None) -> None:
        """Use these speeds of ranks and this fixed cost of microbatches for the next plans (None: as before)."""
        self._job = replace(
            self._job,
            speeds=None if speeds is None else as_speeds(speeds, self.world_size),
            microbatch_cost=self._job.microbatch_cost if microbatch_cost is None else microbatch_cost,
        )

    def identity(self) -> dict[str, int | str]:
        """What another sampler must have in common with this one for the same samples in each minibatch.

        A policy that looks at one minibatch only has no say in that, nor has the number of ranks. A two-level policy
        deals out whole batches first, by costs and speeds, so that there all of these count.
        """
        found: dict[str, int | str] = {
            "num_samples": int(self.lengths.size),
            "global_size": self.global_size,
            "global_batch_size": self.batch_size * self.world_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }
        if self.group_by_length:
            found["lengths_fingerprint"] = fingerprint(self.lengths.tobytes())
        if self.policy.two_level:
            weights = [self._job.costs, *([] if self._job.speeds is None else [self._job.speeds])]
            found |= {
                "policy": self.policy.name,
                "world_size": self.world_size,
                "drop_last": int(self.drop_last),
                "costs_fingerprint": fingerprint(b"".join(array.tobytes() for array in weights)),
            }
        return found

    def __len__(self) -> int:
        """Number of minibatches of an epoch."""
        num_full, num_left = divmod(int(self.lengths.size), self.global_size)
        return num_full + (num_left > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[PlannedMinibatch]:
        return self.starting_at(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch (from 0). Call it before each epoch, on every rank."""
        self.epoch = as_count(epoch, "epoch", minimum=0, maximum=None)

    def starting_at(self, first: int) -> Iterator[PlannedMinibatch]:
        """The minibatches of the current epoch from number ``first`` on; earlier ones are not packed."""
        first = as_count(first, "first", minimum=0)
        epoch, order = self.epoch, self._order()  # another one may be chosen while these are planned
        if self.drop_last:
            order = order[: len(self) * self.global_size]
        per_batch = self.batch_size // self.minibatch_size
        for batch in range(first // per_batch, -(-len(self) // per_batch)):
            samples = order[batch * self.batch_size * self.world_size :][: self.batch_size * self.world_size]
            seed = int(random_generator("batch", self.seed, epoch, batch).random_raw())
            skipped = max(0, first - batch * per_batch)
            for minibatch in self.policy.plan_batch(self._job.of(samples), self.minibatch_size, seed, skipped):
                yield PlannedMinibatch(samples[minibatch.samples], minibatch.plan)

    def _batch_size(self, given: int | None) -> int:
        """Samples per rank that are planned together."""
        size = as_optional_count(given, "batch_size")
        if size is not None and size % self.minibatch_size:
            raise ValueError(f"batch_size={size}: expected a multiple of minibatch_size={self.minibatch_size}")
        if not self.policy.two_level:
            return self.minibatch_size
        return size or max(1, len(self)) * self.minibatch_size

    def _order(self) -> IntArray:
        size = self.lengths.size
        order = shuffled(size, self.seed, self.epoch) if self.shuffle else np.arange(size)
        return grouped_by_length(order, self.lengths, self.minibatch_size) if self.group_by_length else order


def shuffled(num_samples: int, *keys: int) -> IntArray:
    """The indices of the samples in an order that depends on the keys alone, (num_samples,)."""
    # Sorting by the raw stream: numpy keeps that one stable across versions, but not permutation().
    return np.argsort(np.random.PCG64(list(keys)).random_raw(num_samples), kind="stable")


def grouped_by_length(order: IntArray, lengths: IntArray, minibatch_size: int) -> IntArray:
    """The samples so that like lengths follow each other, as ``group_by_length`` of transformers has them.

    Of every ``50 * minibatch_size`` samples (of a small dataset: of a fourth of all) the longest comes first. Its
    ``LengthGroupedSampler`` also begins with the longest of all, which makes no difference here and is left out.

    Args:
        order: a shuffle, (num_samples,).
        lengths: tokens of each sample of the dataset.
        minibatch_size: samples per rank and optimizer step.
    """
    size = minibatch_size * max(1, min(_MEGABATCH, order.size // (4 * minibatch_size)))
    megabatches = [order[start : start + size] for start in range(0, order.size, size)]
    return np.concatenate([mine[np.argsort(-lengths[mine], kind="stable")] for mine in megabatches])
