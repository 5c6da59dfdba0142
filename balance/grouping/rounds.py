"""Rounds: a rank describes its pool by a vector and, given the vectors of all ranks, chooses its next samples.

No communication: :meth:`Rounds.add` adds samples, the caller exchanges one vector per rank and round, and the result
are steps. From the vectors each rank computes the same numbers of samples, loss tokens and steps.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from odc.balance.checks import FloatArray, IntArray, fingerprint
from odc.balance.costs import CostModel, evaluate
from odc.balance.grouping.equal_steps import PoolView, plan_equal_steps
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.quota import Offer, Quotas, even_out, fill_quota, plan_last
from odc.balance.grouping.token_budget import Group, align_groups
from odc.balance.random_numbers import random_generator

_KEPT = 0.5
"""Part of a pool that stays when steps of equal cost are planned: what they are chosen from."""


class Entry(NamedTuple):
    """A sample in a pool."""

    place: int
    """Where it stands in the stream of all samples: what it is known by."""

    length: int
    num_loss_tokens: int
    cost: float


@dataclass(frozen=True)
class Step:
    """What one rank trains on until the next synchronization, and what it has to know of the others."""

    microbatches: list[list[Entry]]
    """Of this rank, none empty. None at all: the rank has nothing to train on in this step."""

    num_samples: int
    """All ranks together; also the two below."""

    num_loss_tokens: int
    approximate_loss_tokens: float
    """From each rank's mean per sample before the alignment, as ODB estimates them (appendix B)."""

    own_approximate_loss_tokens: float

    counts: list[int] = field(default_factory=list)
    """Samples of each rank, of a step that has any number of microbatches."""


def lacking(pooled: Sequence[int], pool_size: int) -> list[int]:
    """Samples to read for each rank's pool: none as long as it lacks less than a sixteenth, as each time takes time."""
    return [lack if (lack := pool_size - number) >= max(pool_size // 16, 1) else 0 for number in pooled]


class Rounds(ABC):
    """The pool of one rank, and its part in the rounds."""

    is_done: bool = False
    """Whether no rank has anything left."""

    deals_anew: ClassVar[bool] = False
    """Whether the pools should be evened out by cost once nothing more comes."""

    def __init__(self, grouping: Grouping, rank: int, world_size: int) -> None:
        self.grouping = grouping
        self.pool_size = grouping.pool_size
        self.rank = rank
        self.world_size = world_size
        self.pool: list[Entry] = []
        """Samples to choose from, the oldest first."""
        self.pooled = [0] * world_size
        """How many samples each rank has in its pool, as all of them know it after the last round. (In
        :class:`QuotaRounds` what was chosen since is not yet taken off.)"""
        self.num_added = 0

    def add(self, entries: Sequence[Entry]) -> None:
        """Put samples into the pool, in the order in which they came."""
        self.pool += entries
        self.num_added += len(entries)

    def pool_vector(self) -> FloatArray:
        """The pool, for :meth:`dealt_anew`: its size, then places and costs of its samples, (1 + 2 * pool_size,)."""
        vector = np.zeros(1 + 2 * self.pool_size)
        vector[0] = len(self.pool)
        table = vector[1:].reshape(2, self.pool_size)
        table[0, : len(self.pool)] = [entry.place for entry in self.pool]
        table[1, : len(self.pool)] = [entry.cost for entry in self.pool]
        return vector

    def dealt_anew(self, vectors: FloatArray) -> list[int]:
        """Places of the samples that this rank is to have, once nothing more comes, so that all have the same cost.

        Args:
            vectors: the pools of all ranks, (world_size, 1 + 2 * pool_size).
        """
        tables = _pool_tables(vectors, self.pool_size)
        parts = even_out([costs for _, costs in tables], self.pool_size)
        return [int(tables[rank][0][at]) for rank, at in parts[self.rank]]

    def replace(self, entries: Sequence[Entry]) -> None:
        """Have these samples in the pool instead. They were seen before, by this rank or by another."""
        self.pool = list(entries)

    @abstractmethod
    def offer(self, is_finished: bool) -> FloatArray:
        """What to tell the other ranks before the next steps, (n,), as many numbers on all of them.

        Args:
            is_finished: nothing more will be added.
        """

    @abstractmethod
    def plan(self, offers: FloatArray) -> list[Step]:
        """The next steps, given what all ranks have told, (world_size, n).

        The samples of these steps leave the pool. Every rank gets equally many steps.
        """

    def state(self) -> dict[str, Any]:
        """What :meth:`load` needs besides the pool to go on from between two rounds; for JSON."""
        return {"num_added": self.num_added}

    def load(self, state: Mapping[str, Any], entries: Sequence[Entry]) -> None:
        """Go on from a state, with the samples that it names in :meth:`places`."""
        self.pool = list(entries)
        self.num_added = int(state["num_added"])

    def places(self) -> list[int]:
        """Of all samples that are here and not yet in a step that was given out."""
        return [entry.place for entry in self.pool]

    def _take(self, numbers: Iterable[int]) -> None:
        """Remove these samples of the pool."""
        gone = set(numbers)
        self.pool = [entry for i, entry in enumerate(self.pool) if i not in gone]

    def _steps(self, groups: list[list[Group]], counts: list[IntArray], own: list[Entry]) -> list[Step]:
        """Steps of one microbatch each, or none where a rank's group is empty.

        Args:
            groups: of every step and rank, as numbers of the rank's samples.
            counts: loss tokens of all samples of every rank that could have been chosen.
            own: those of this rank.
        """
        means = [float(mine.mean()) if mine.size else 0.0 for mine in counts]
        steps = []
        for step in groups:
            approximate = [len(group) * mean for group, mean in zip(step, means, strict=True)]
            tokens = sum(int(mine[group].sum()) for group, mine in zip(step, counts, strict=True))
            mine = [own[at] for at in step[self.rank]]
            number = sum(map(len, step))
            steps.append(Step([mine] if mine else [], number, tokens, sum(approximate), approximate[self.rank]))
        return steps

    def _mixed(self, steps: list[Step], told: bytes) -> list[Step]:
        """The steps of a round, which come from the shortest samples to the longest, in another order, if wanted: the
        same on all ranks to which the same was told."""
        if not (self.grouping.shuffle and self.grouping.name == "token-budget"):
            return steps
        keys = random_generator("steps", fingerprint(told)).random_raw(len(steps))
        return [steps[at] for at in np.argsort(keys, kind="stable")]

    def _groups(self) -> list[Group]:
        lengths = np.array([entry.length for entry in self.pool], dtype=np.int64)
        return self.grouping.of_pool(lengths, self.num_added - len(self.pool))


def _pool_tables(vectors: FloatArray, pool_size: int) -> list[FloatArray]:
    """Places and costs of the samples in each rank's pool, (2, num_samples) each."""
    return [row[1:].reshape(2, pool_size)[:, : int(row[0])] for row in vectors]


class FreeRounds(Rounds):
    """Each rank by itself: its steps are its groups, and nothing is known of the other ranks (nor of their counts)."""

    def offer(self, is_finished: bool) -> FloatArray:
        return np.zeros(0)

    def plan(self, offers: FloatArray) -> list[Step]:
        groups = self._groups()
        steps = []
        for group in groups:
            entries = [self.pool[i] for i in group]
            num_loss_tokens = sum(entry.num_loss_tokens for entry in entries)
            steps.append(Step([entries], len(entries), num_loss_tokens, num_loss_tokens, num_loss_tokens))
        self._take(i for group in groups for i in group)
        self.pooled = [len(self.pool)]
        self.is_done = not steps
        return self._mixed(steps, str(self.num_added).encode())


class AlignedRounds(Rounds):
    """As many groups on every rank that has any, one in each step (ODB: the distributed group alignment problem).

    The vector: number of groups (0: none yet, so that all wait for another round; -1: none, and nothing to come),
    samples in the pool, samples in the groups; the size of each group; the loss tokens of each sample, in the order of
    the groups. It is ODB's own with one number more, and tells after one gather what ODB tells after two: which samples
    every rank keeps, so how many loss tokens each step has.

    A grouping around the oldest sample gives one group per round, so that each has the whole pool to choose from.

    Args:
        joins: go on until no rank has anything left. Else until the first one has: what the others have in their
            pools then is dropped.
    """

    def __init__(self, grouping: Grouping, rank: int, world_size: int, *, joins: bool = True) -> None:
        super().__init__(grouping, rank, world_size)
        self.joins = joins
        self._order: list[int] = []

    def offer(self, is_finished: bool) -> FloatArray:
        groups = self._groups()
        self._order = [i for group in groups for i in group]
        counts = [self.pool[i].num_loss_tokens for i in self._order]
        vector = np.zeros(3 + 2 * self.pool_size)
        vector[:3] = (len(groups) or -int(is_finished), len(self.pool), len(counts))
        vector[3 : 3 + len(groups)] = [len(group) for group in groups]
        vector[3 + self.pool_size : 3 + self.pool_size + len(counts)] = counts
        return vector

    def plan(self, offers: FloatArray) -> list[Step]:
        codes = offers[:, 0].astype(np.int64)
        if (codes < 0).all() or (not self.joins and (codes < 0).any()):
            self.pool, self.pooled, self.is_done = [], [0] * self.world_size, True
            return []
        if not codes.all():
            self.pooled = offers[:, 1].astype(np.int64).tolist()
            return []
        counts = [vector[3 + self.pool_size :][: int(vector[2])].astype(np.int64) for vector in offers]
        groups = [_ranges(vector[3:][: max(int(vector[0]), 0)].astype(np.int64)) for vector in offers]
        aligned, _ = align_groups(groups, [0] * self.world_size)
        by_step = [[mine[at] if mine else [] for mine in aligned] for at in range(max(map(len, aligned)))]
        steps = self._steps(by_step, counts, [self.pool[i] for i in self._order])
        self._take(self._order[at] for group in aligned[self.rank] for at in group)
        used = [sum(map(len, mine)) for mine in aligned]
        self.pooled = [int(pooled) - number for pooled, number in zip(offers[:, 1], used, strict=True)]
        return self._mixed(steps, offers.tobytes())


def _ranges(sizes: IntArray) -> list[Group]:
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for end, size in zip(ends, sizes.tolist(), strict=True)]


class EqualStepRounds(Rounds):
    """One group on every rank in each step, all of the same cost (:mod:`odc.balance.grouping.equal_steps`).

    The vector: 1 if the rank has samples, else 0, or -1 if nothing is to come; how many; of each, the oldest first, its
    length, loss tokens, and steps in the pool. So every rank knows all pools, and plans the steps of all ranks until
    half of a pool is left; once nothing is to come, until all pools are empty.
    """

    deals_anew = True

    def __init__(self, grouping: Grouping, rank: int, world_size: int, *, cost: CostModel) -> None:
        super().__init__(grouping, rank, world_size)
        self._cost = cost
        self._num_steps = 0
        self._arrived: dict[int, int] = {}
        """Steps before each sample of the pool came, by place."""

    def add(self, entries: Sequence[Entry]) -> None:
        super().add(entries)
        self._arrived.update((entry.place, self._num_steps) for entry in entries)

    def offer(self, is_finished: bool) -> FloatArray:
        size = len(self.pool)
        vector = np.zeros(3 + 3 * self.pool_size)
        vector[:3] = (1 if size else -int(is_finished), size, is_finished)
        table = vector[3:].reshape(3, self.pool_size)
        for column, entry in enumerate(self.pool):
            table[:, column] = (entry.length, entry.num_loss_tokens, self._num_steps - self._arrived[entry.place])
        return vector

    def plan(self, offers: FloatArray) -> list[Step]:
        codes, sizes = offers[:, 0], offers[:, 1].astype(np.int64).tolist()
        self.pooled = sizes
        self.is_done = bool((codes < 0).all())
        if self.is_done or not codes.all():
            return []
        tables = [row[3:].reshape(3, -1)[:, :size].astype(np.int64) for row, size in zip(offers, sizes, strict=True)]
        pools = [PoolView(table[0], evaluate(self._cost, table[0]), table[2]) for table in tables]
        keep = 0.0 if offers[:, 2].all() else _KEPT
        planned = plan_equal_steps(pools, self.grouping.max_tokens, keep, self.pool_size)
        steps = self._steps(planned, [table[1] for table in tables], self.pool)
        self._take(i for groups in planned for i in groups[self.rank])
        self._num_steps += len(planned)
        self._arrived = {entry.place: self._arrived[entry.place] for entry in self.pool}
        self.pooled = [size - sum(len(groups[rank]) for groups in planned) for rank, size in enumerate(sizes)]
        return steps

    def replace(self, entries: Sequence[Entry]) -> None:
        super().replace(entries)
        self._arrived = {entry.place: self._arrived.get(entry.place, self._num_steps) for entry in entries}

    def state(self) -> dict[str, Any]:
        waited = [self._num_steps - self._arrived[entry.place] for entry in self.pool]
        return {**super().state(), "waited": waited}

    def load(self, state: Mapping[str, Any], entries: Sequence[Entry]) -> None:
        super().load(state, entries)
        self._num_steps = 0
        self._arrived = {entry.place: -int(waited) for entry, waited in zip(entries, state["waited"], strict=True)}


@dataclass
class _Chosen:
    """What a rank has chosen for its next step."""

    entries: list[Entry] = field(default_factory=list)
    mean_loss_tokens: float = 0.0
    """Per sample, of the pool that they were chosen from."""


class QuotaRounds(Rounds):
    """Every rank fills the same quota of cost from its own pool: one step per round, with any number of microbatches.

    Samples are chosen one round before they are trained on, so that one vector per round is enough: it tells what was
    chosen (samples, loss tokens), for the loss scale of this step, and what there is to choose from, for the quota of
    the next one. The vector: samples in the pool; samples, loss tokens and mean loss tokens per sample of what was
    chosen; number and cost of all samples ever seen, cost of the oldest and of all in the pool; whether nothing is to
    come.

    None waits for long: the oldest sample of a pool is always chosen, so a sample is, at the latest, once as many
    rounds have gone by as there were samples in the pool before it.

    Args:
        num_samples: of all ranks, which are to make :func:`~odc.balance.grouping.quota.num_minibatches` steps. What is
            in the pools once nothing more comes is shared out over the last of them (:meth:`dealt_anew`). Default: the
            rounds end when the samples do.
    """

    deals_anew = True

    def __init__(
        self,
        grouping: Grouping,
        rank: int,
        world_size: int,
        *,
        minibatch_size: int,
        num_samples: int | None = None,
    ) -> None:
        super().__init__(grouping, rank, world_size)
        self._quotas = Quotas(minibatch_size, num_samples)
        self._seen_cost = 0.0
        self._chosen = _Chosen()
        self._last_sizes: list[int] | None = None
        """Samples of this rank in the last minibatches, in the order of the pool; None: not yet shared out."""

    def add(self, entries: Sequence[Entry]) -> None:
        super().add(entries)
        for entry in entries:
            self._seen_cost += entry.cost

    def offer(self, is_finished: bool) -> FloatArray:
        chosen = self._chosen
        oldest = self.pool[0].cost if self.pool else 0.0
        tokens = sum(entry.num_loss_tokens for entry in chosen.entries)
        mine = (len(self.pool), len(chosen.entries), tokens, chosen.mean_loss_tokens)
        pooled_cost = sum(entry.cost for entry in self.pool)
        return np.array([*mine, self.num_added, self._seen_cost, oldest, pooled_cost, is_finished], dtype=np.float64)

    def plan(self, offers: FloatArray) -> list[Step]:
        steps = self._chosen_step(offers)
        taken = self._taken_next(offers)
        mean = float(np.mean([entry.num_loss_tokens for entry in self.pool])) if self.pool else 0.0
        self._chosen = _Chosen([self.pool[i] for i in taken], mean)
        self._take(taken)
        self.pooled = offers[:, 0].astype(np.int64).tolist()
        self.is_done = not offers[:, 0].any() and bool(offers[:, 8].all())
        return steps

    def _taken_next(self, offers: FloatArray) -> list[int]:
        """What this rank takes of its pool, as numbers of its samples."""
        if self._last_sizes is not None:
            return list(range(self._last_sizes.pop(0) if self._last_sizes else len(self.pool)))
        offered = [Offer(row[6], row[5], int(row[4]), row[7], int(row[0])) for row in offers.tolist()]
        grant = self._quotas.grant(offered)
        costs = [entry.cost for entry in self.pool]
        taken = fill_quota(costs, grant.quota, grant.usual, grant.most[self.rank])
        chosen = set(taken)
        others = (i for i in range(len(costs)) if i not in chosen)
        return sorted([*taken, *itertools.islice(others, max(grant.least[self.rank] - len(taken), 0))])

    def dealt_anew(self, vectors: FloatArray) -> list[int]:
        if self._quotas.num_samples is None:
            return super().dealt_anew(vectors)
        tables = _pool_tables(vectors, self.pool_size)
        planned = plan_last([costs for _, costs in tables], self._quotas.num_left(self.world_size))[self.rank]
        self._last_sizes = [len(part) for part in planned]
        return [int(tables[rank][0][at]) for part in planned for rank, at in part]

    def state(self) -> dict[str, Any]:
        return {
            **super().state(),
            "num_granted": self._quotas.num_granted,
            "seen_cost": self._seen_cost,
            "num_chosen": len(self._chosen.entries),
            "mean_loss_tokens": self._chosen.mean_loss_tokens,
            "last_sizes": None if self._last_sizes is None else list(self._last_sizes),
        }

    def load(self, state: Mapping[str, Any], entries: Sequence[Entry]) -> None:
        num_chosen = int(state["num_chosen"])
        super().load(state, entries[num_chosen:])
        self._chosen = _Chosen(list(entries[:num_chosen]), float(state["mean_loss_tokens"]))
        self._quotas = replace(self._quotas, num_granted=int(state["num_granted"]))
        sizes = state["last_sizes"]
        self._last_sizes = None if sizes is None else [int(size) for size in sizes]
        self._seen_cost = float(state["seen_cost"])

    def places(self) -> list[int]:
        return [*(entry.place for entry in self._chosen.entries), *super().places()]

    def _chosen_step(self, offers: FloatArray) -> list[Step]:
        num_samples = int(offers[:, 1].sum())
        if not num_samples:
            return []
        entries = self._chosen.entries
        lengths = np.array([entry.length for entry in entries], dtype=np.int64)
        costs = np.array([entry.cost for entry in entries])
        groups = self.grouping.of_minibatch(lengths, costs) if entries else []
        approximate = offers[:, 1] * offers[:, 3]
        return [
            Step(
                [[entries[i] for i in group] for group in groups],
                num_samples,
                int(offers[:, 2].sum()),
                float(approximate.sum()),
                float(approximate[self.rank]),
                offers[:, 1].astype(np.int64).tolist(),
            )
        ]
