"""A loader that yields, per minibatch, the packed microbatches of this rank and the scale of their loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from odc.balance.checks import IntArray, as_count, as_lengths
from odc.balance.costs import CostModel
from odc.balance.data.collate import count_loss_tokens
from odc.balance.data.sampler import MinibatchSampler
from odc.balance.plan import Plan, PlannedMinibatch
from odc.balance.policies import Policy

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)
BatchT = TypeVar("BatchT")


class Dataset(Protocol[SampleT_co]):
    """Anything that gives a sample for an index."""

    def __getitem__(self, index: int, /) -> SampleT_co: ...


@dataclass(frozen=True, eq=False)
class Minibatch(Generic[BatchT]):
    """What one rank gets for one minibatch."""

    microbatches: list[BatchT]
    """Collated microbatches of this rank, in the order to run them; possibly none."""

    loss_scale: float
    """Factor for the loss of every microbatch, see :func:`loss_scale`."""

    num_loss_tokens: int
    """Number of loss tokens of the global minibatch."""

    plan: Plan
    """The plan of all ranks."""


def loss_scale(world_size: int, num_loss_tokens: int) -> float:
    """Factor that makes a minibatch's gradient that of the mean loss over its tokens, however it is packed.

    FSDP averages gradients over ranks: it divides their sum by ``world_size``. So if the loss of a microbatch
    is the *sum* of the losses of its tokens, times this factor, then the losses of all microbatches of all
    ranks, summed and divided by ``world_size``, are the mean over the ``num_loss_tokens`` of the global
    minibatch. (Means of microbatch means would weigh a token by the number of tokens it happens to share a
    microbatch with.)

    0 if there are no loss tokens: such a minibatch has no gradient.
    """
    return world_size / num_loss_tokens if num_loss_tokens else 0.0


class MinibatchLoader(Generic[SampleT, BatchT]):
    """Iterates over the minibatches of an epoch as one rank sees them.

    For each minibatch: run every microbatch, multiply its *summed* loss by ``minibatch.loss_scale``,
    backward; then step. Every rank makes the loader with the same arguments but its own ``rank``; nothing is
    communicated.

    Args:
        dataset: gives sample i as ``dataset[i]``; only samples of this rank are read.
        lengths: tokens of each sample, (num_samples,).
        collate: makes a batch of a list of samples, e.g. :func:`~odc.balance.pack_collate`. It gets an empty
            list for an empty microbatch (policies other than "lb-mini", when samples cannot be dealt out
            evenly) and must return a batch whose summed loss is 0.
        rank, world_size: of this process.
        minibatch_size, cost, policy, max_tokens, seed, shuffle, drop_last: see
            :class:`~odc.balance.MinibatchSampler`.
        num_loss_tokens: tokens of each sample that have a loss, (num_samples,); see
            :func:`~odc.balance.count_loss_tokens`. Default: ``lengths - 1``, all but the first, which nothing
            predicts.
        check_loss_tokens: compare ``num_loss_tokens`` with the ``"labels"`` of a batch that is a mapping and
            has them. Turn it off if those labels are not in the form of :func:`~odc.balance.pack_collate`.

    Raises:
        ValueError: an argument is out of range. While iterating: labels and ``num_loss_tokens`` disagree.
    """

    def __init__(
        self,
        dataset: Dataset[SampleT],
        lengths: npt.ArrayLike,
        collate: Callable[[list[SampleT]], BatchT],
        rank: int,
        world_size: int,
        *,
        minibatch_size: int,
        cost: CostModel,
        policy: str | Policy = "lb-mini",
        max_tokens: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_loss_tokens: npt.ArrayLike | None = None,
        check_loss_tokens: bool = True,
    ) -> None:
        self.sampler = MinibatchSampler(
            lengths,
            minibatch_size=minibatch_size,
            world_size=world_size,
            policy=policy,
            cost=cost,
            max_tokens=max_tokens,
            seed=seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        self.dataset = dataset
        self.collate = collate
        self.rank = as_count(rank, "rank", minimum=0)
        if self.rank >= self.sampler.world_size:
            raise ValueError(f"rank={rank}: expected less than world_size={world_size}")
        self.num_loss_tokens = _loss_tokens(self.sampler.lengths, num_loss_tokens)
        self.check_loss_tokens = check_loss_tokens
        self._num_yielded = 0
        self._start = 0

    def __len__(self) -> int:
        """Number of minibatches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Minibatch[BatchT]]:
        start, self._start = self._start, 0
        for number, planned in enumerate(self.sampler.starting_at(start), start):
            minibatch = self._collate(planned)
            self._num_yielded = number + 1
            yield minibatch

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch (from 0). Call it before each epoch, on every rank.

        After :meth:`load_state_dict`, the epoch of the state continues where it stopped; any other starts at
        its beginning.
        """
        if epoch != self.sampler.epoch:
            self._start = self._num_yielded = 0
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: a minibatch counts as done once it was handed out."""
        return {**self._identity(), "epoch": self.sampler.epoch, "num_minibatches_done": self._num_yielded}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue, at the next iteration, after the minibatches that were done when ``state`` was taken.

        Raises:
            ValueError: the state is of a loader that cuts its minibatches otherwise, or is out of range.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(
                    f"the state has {name}={state.get(name)}, this loader {name}={value}: "
                    "their minibatches are not the same ones"
                )
        num_done = as_count(state["num_minibatches_done"], "num_minibatches_done", minimum=0)
        if num_done > len(self):
            raise ValueError(f"num_minibatches_done={num_done}: expected at most {len(self)}")
        self.sampler.set_epoch(state["epoch"])
        self._start = self._num_yielded = num_done

    def _identity(self) -> dict[str, int]:
        sampler = self.sampler
        return {
            "num_samples": int(sampler.lengths.size),
            "global_size": sampler.global_size,
            "seed": sampler.seed,
            "shuffle": int(sampler.shuffle),
        }

    def _collate(self, planned: PlannedMinibatch) -> Minibatch[BatchT]:
        batches = []
        for samples in planned.of_rank(self.rank):
            batch = self.collate([self.dataset[sample] for sample in samples])
            if self.check_loss_tokens:
                _check_labels(batch, samples, int(self.num_loss_tokens[samples].sum()))
            batches.append(batch)
        total = int(self.num_loss_tokens[planned.samples].sum())
        return Minibatch(batches, loss_scale(self.sampler.world_size, total), total, planned.plan)


def _loss_tokens(lengths: IntArray, given: npt.ArrayLike | None) -> IntArray:
    if given is None:
        return lengths - 1
    counts = as_lengths(given, "num_loss_tokens", minimum=0)
    if counts.shape != lengths.shape:
        raise ValueError(
            f"num_loss_tokens has {counts.size} entries for {lengths.size} lengths: expected one per sample"
        )
    if (counts > lengths).any():
        bad = int(np.flatnonzero(counts > lengths)[0])
        raise ValueError(f"num_loss_tokens[{bad}] is {counts[bad]}: expected at most its length, {lengths[bad]}")
    return counts


def _check_labels(batch: object, samples: Sequence[int], expected: int) -> None:
    if not (isinstance(batch, Mapping) and "labels" in batch):
        return
    labels: Any = batch["labels"]
    found = count_loss_tokens(labels)
    if found != expected:
        raise ValueError(
            f"the labels of samples {list(samples)} have {found} loss tokens, num_loss_tokens says "
            f"{expected}: the loss scale would be wrong. Pass num_loss_tokens=[count_loss_tokens(labels) for "
            "each sample], or check_loss_tokens=False if these labels are counted in another way"
        )
