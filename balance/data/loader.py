"""A loader that yields, per minibatch, the packed microbatches of this rank and the scale of their loss."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic

import numpy.typing as npt
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import as_count, as_one_of, fingerprint
from odc.balance.costs import CostModel
from odc.balance.data.ahead import ahead
from odc.balance.data.iteration import COMMS, Comm, Iterations, check_counts, check_state, filled_up
from odc.balance.data.loss_tokens import as_loss_tokens
from odc.balance.data.microbatches import BatchT, Dataset, MicrobatchDataset, SampleT
from odc.balance.data.place import Place
from odc.balance.data.reader import Reader
from odc.balance.data.sampler import MinibatchSampler
from odc.balance.late_binding.microbatches import LateMicrobatches, check_late_binding
from odc.balance.late_binding.outlook import falling
from odc.balance.late_binding.shares import Shares, own_store, together_on
from odc.balance.plan import Plan, PlannedMinibatch
from odc.balance.policies import LBMini, Policy
from odc.balance.random_numbers import random_generator


@dataclass(frozen=True, eq=False)
class Minibatch(Generic[BatchT]):
    """What one rank gets for one minibatch.

    Example:
        >>> loader = MinibatchLoader(
        ...     dataset, lengths, pack_collate, rank, world_size, minibatch_size=4, cost=LinearCost()
        ... )
        >>> minibatch = next(iter(loader))
        >>> minibatch.num_samples  # of all ranks
        8
        >>> len(minibatch.microbatches) == minibatch.plan.num_microbatches[rank]
        True
        >>> loader.close()
    """

    microbatches: list[BatchT] | LateMicrobatches[BatchT]
    """Collated microbatches of this rank, in the order to run them; possibly none. With ``late_binding`` each is made
    when the loop asks for it."""

    loss_scale: float
    """Factor for the loss of every microbatch, see :func:`loss_scale`."""

    num_loss_tokens: int
    """Number of loss tokens of the global minibatch."""

    num_samples: int
    """Number of samples of the global minibatch."""

    plan: Plan | None = None
    """The plan of all ranks, each packed when it is looked at; None in a stream without ``late_binding``, where no rank
    knows the lengths of the others' samples."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Minibatch[BatchT]:
        """This minibatch with its microbatches on a device, as Lightning and accelerate ask for it.

        Moved is what has a method ``to``, a tensor for one, also within dicts, lists and tuples. So ``cu_seqlens`` of
        :func:`pack_collate` are moved, too, and by FSDP where a model is given them; where they decide what is
        launched, take a list of them before.

        Args:
            device: as ``torch.Tensor.to`` takes it.
            non_blocking: from pinned memory, without waiting for the copies.

        Example:
            >>> minibatch = Minibatch([{"input_ids": torch.ones(1, 3)}], 1.0, num_loss_tokens=3, num_samples=1)
            >>> minibatch.to("meta").microbatches[0]["input_ids"].device
            device(type='meta')
        """
        options = {"non_blocking": True} if non_blocking else {}
        if isinstance(self.microbatches, LateMicrobatches):
            return replace(
                self, microbatches=self.microbatches.changed(partial(_moved, device=device, options=options))
            )
        return replace(self, microbatches=[_moved(batch, device, options) for batch in self.microbatches])


def _moved(value: Any, device: Any, options: Mapping[str, bool]) -> Any:
    if hasattr(value, "to"):
        return value.to(device, **options)
    if isinstance(value, Mapping):
        return {key: _moved(part, device, options) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [_moved(part, device, options) for part in value]
        return parts if isinstance(value, list) else value._make(parts) if hasattr(value, "_make") else tuple(parts)
    return value


def loss_scale(world_size: int, num_loss_tokens: int) -> float:
    """Factor that makes a minibatch's gradient that of the mean loss over its tokens, however it is packed.

    FSDP averages gradients over ranks: it divides their sum by ``world_size``. So if the loss of a microbatch
    is the *sum* of the losses of its tokens, times this factor, then the losses of all microbatches of all
    ranks, summed and divided by ``world_size``, are the mean over the ``num_loss_tokens`` of the global
    minibatch. (Means of microbatch means would weigh a token by the number of tokens it happens to share a
    microbatch with.)

    0 if there are no loss tokens: such a minibatch has no gradient.

    Example:
        >>> loss_scale(world_size=8, num_loss_tokens=4096)
        0.001953125
    """
    return world_size / num_loss_tokens if num_loss_tokens else 0.0


class MinibatchLoader(Generic[SampleT, BatchT]):
    """Iterates over the minibatches of an epoch as one rank sees them.

    For each minibatch: run every microbatch, multiply its *summed* loss by ``minibatch.loss_scale``,
    backward; then step. Every rank makes the loader with the same arguments but its own ``rank``, or all with the same
    ``mesh``; nothing is communicated. There is one iteration at a time: another, another epoch or a state loaded ends
    it. The next minibatch is planned in a thread while one is trained on: who gets which samples, and how this rank
    packs its own.

    With ``num_workers``, microbatches are read and collated by worker processes while this one trains, and
    minibatches are planned as far ahead as that needs. What is yielded, and :meth:`state_dict`, are the same
    as without, as long as a sample depends on its index alone; what else it draws at random is seeded in each
    worker from ``seed``, the epoch, the rank and the worker's number. Workers start with an iteration and end
    with it, also where the loop is left early.

    Args:
        dataset: gives sample i as ``dataset[i]``; only samples of this rank are read.
        lengths: tokens of each sample, (num_samples,).
        collate: makes a batch of a list of samples, e.g. :func:`~odc.balance.pack_collate`. It gets an empty
            list for an empty microbatch (policies other than "lb-mini", when samples cannot be dealt out
            evenly) and must return a batch whose summed loss is 0.
        rank, world_size: of this process.
        mesh: in place of these two, the dimensions of a ``DeviceMesh`` over which ranks have different samples:
            ``mesh["dp"]``, or ``mesh["dp_replicate", "dp_shard"]``, which count in row-major order. Ranks that differ
            in other dimensions only (tensor parallelism) get the same microbatches.
        minibatch_size, cost, policy, max_tokens, batch_size, microbatch_cost, speeds: see
            :class:`~odc.balance.MinibatchSampler`.
        seed, shuffle, group_by_length, drop_last: see there, too.
        num_loss_tokens: tokens of each sample that have a loss, (num_samples,); see
            :func:`~odc.balance.count_loss_tokens`. Default: ``lengths - 1``, all but the first, which nothing
            predicts.
        check_loss_tokens: compare ``num_loss_tokens`` with the ``"labels"`` of a batch that is a mapping and
            has them. Turn it off if those labels are not in the form of :func:`~odc.balance.pack_collate`.
        num_workers: processes that read ahead; 0: samples are read here, when their minibatch is asked for.
            This and the arguments below are those of ``torch.utils.data.DataLoader``, with a microbatch in
            place of a batch.
        prefetch_factor: microbatches that each worker makes in advance; default 2.
        comm: how the ranks that train communicate, which matters where a policy ("lb-mini") gives them different
            numbers of microbatches. "odc": they may. "collective": those with fewer get empty microbatches, as many
            as the others have more. "auto", the default: they may, except where ``torch.distributed`` runs several
            ranks and ODC is not at work in this process, neither by ``odc.patch_fsdp(model)`` nor by ``odc run``:
            then collectives would wait forever, and the first such minibatch is refused.
        late_binding: ranks that are through before others take samples from these, so the plan need not be exact, nor
            devices equal. ``microbatches`` of a minibatch is then no list: each is chosen when the loop asks for it.
            For policy "lb-mini", where ODC is at work. Of ranks that compute together (``mesh``), one chooses for all.
            It goes through the store of ``torch.distributed``. Gradients are those of the same samples, summed in
            an order that differs from run to run. ``microbatch_cost`` tells it what a further microbatch costs. A
            loader that is only looked at, or evaluated with, has the microbatches of the plan.
        pin_memory: copy the tensors of the batches into pinned memory, for faster copies to the GPU.
        persistent_workers: keep the workers from one epoch to the next, until the loader is gone.
        multiprocessing_context: how workers start, "fork", "spawn" or "forkserver", or a context. The last
            two pickle ``dataset``, ``collate`` and ``worker_init_fn``. Default: that of Python.
        worker_timeout_s: most seconds to wait for one microbatch of the workers; 0: without limit, as in torch.
        worker_init_fn: called in each worker with its number, from 0, before it reads. ``dataset`` is
            ``torch.utils.data.get_worker_info().dataset.dataset`` there.

    Raises:
        ValueError: an argument is out of range, is about workers where there are none, or there is not one length for
            each sample of ``dataset``. While iterating:
            labels and ``num_loss_tokens`` disagree, or a packed batch has more tokens than ``max_tokens`` (where that
            was given).
        TypeError: ``policy`` is something else.
        RuntimeError: while iterating: ranks have different numbers of microbatches and ``comm="auto"`` finds no ODC
            at work; a worker died or was silent for too long, or the iteration was ended by another. Errors of
            ``dataset`` and ``collate`` keep their type, and name the samples.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> loader = MinibatchLoader(
        ...     dataset,
        ...     lengths,
        ...     pack_collate,
        ...     rank,
        ...     world_size,
        ...     minibatch_size=4,
        ...     max_tokens=64,
        ...     cost=TransformerCost.from_config(model.config),
        ... )
        >>> for minibatch in loader:
        ...     for batch in minibatch.microbatches:
        ...         (loss(model, batch) * minibatch.loss_scale).backward()  # summed over tokens, with use_cache=False
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> len(loader)
        4
        >>> session.close()
    """

    def __init__(
        self,
        dataset: Dataset[SampleT],
        lengths: npt.ArrayLike,
        collate: Callable[[list[SampleT]], BatchT],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        minibatch_size: int,
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
        num_loss_tokens: npt.ArrayLike | None = None,
        check_loss_tokens: bool = True,
        comm: Comm = "auto",
        late_binding: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        worker_timeout_s: float = 600.0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        place = Place.of(rank, world_size, mesh)
        self.rank = place.rank
        self.sampler = MinibatchSampler(
            lengths,
            minibatch_size=minibatch_size,
            world_size=place.world_size,
            policy=policy,
            cost=cost,
            max_tokens=max_tokens,
            batch_size=batch_size,
            microbatch_cost=microbatch_cost,
            speeds=speeds,
            seed=seed,
            shuffle=shuffle,
            group_by_length=group_by_length,
            drop_last=drop_last,
        )
        self.comm: Comm = as_one_of(comm, "comm", COMMS)
        self.num_loss_tokens = as_loss_tokens(self.sampler.lengths, num_loss_tokens)
        self._dataset = MicrobatchDataset(
            dataset,
            collate,
            self.num_loss_tokens if check_loss_tokens else None,
            self.sampler.lengths,
            None if max_tokens is None else self.sampler.max_tokens,
        )
        self._reader = Reader[list[int], BatchT](
            self._dataset,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_timeout_s=worker_timeout_s,
            worker_init_fn=worker_init_fn,
        )
        self._num_yielded = 0
        self._start = 0
        self._iterations = Iterations()
        self.late_binding = late_binding
        self._shares: Shares | None = None
        if late_binding:
            self._check_late_binding()
            together = together_on(mesh)
            self._shares = Shares(
                place,
                self._late_identity(),
                own_store(),
                self.sampler.speeds,
                together,
                microbatch_cost,
                learns_speeds=True,
            )

    def __len__(self) -> int:
        """Number of minibatches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Minibatch[BatchT]]:
        self._num_yielded = self._start  # not when the first is asked for: a state taken before it has none done
        return self._iterate()

    def _iterate(self) -> Iterator[Minibatch[BatchT]]:
        start, self._start = self._start, 0
        self._num_yielded = start
        iteration = self._iterations.begin()
        if self._shares is not None:
            self._shares.begin_pass()
        with closing(ahead(self._planned(start))) as planned_ahead:
            plans, batches = self._read_ahead(planned_ahead, start)
            for number, planned in enumerate(plans, start):
                self._check_counts(planned.plan, number)
                mine = self._mine(planned, batches, f"{self.sampler.epoch}.{number}")
                self._num_yielded = number + 1
                yield self._minibatch(planned, mine)
                if isinstance(mine, LateMicrobatches):
                    mine.close()
                self._iterations.check(iteration, number + 1)

    @property
    def num_taken(self) -> int:
        """Samples that this rank has taken from others so far, with ``late_binding``."""
        return 0 if self._shares is None else self._shares.num_taken

    @property
    def speeds(self) -> list[float]:
        """Of the ranks, as the minibatch that was planned last assumes them; 1 is the usual one. With ``late_binding``
        they are measured while training."""
        return [1.0] * self.sampler.world_size if self.sampler.speeds is None else self.sampler.speeds.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch (from 0). Call it before each epoch, on every rank.

        After :meth:`load_state_dict`, the epoch of the state continues where it stopped; any other starts at
        its beginning.
        """
        if epoch != self.sampler.epoch:
            self._start = self._num_yielded = 0
            self._iterations.begin()
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int | str]:
        """Where the loader is: a minibatch counts as done once it was handed out."""
        return {**self.sampler.identity(), "epoch": self.sampler.epoch, "num_minibatches_done": self._num_yielded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, at the next iteration, after the minibatches that were done when ``state`` was taken.

        Raises:
            TypeError: the state is not a mapping.
            ValueError: the state is of a loader that cuts its minibatches otherwise, lacks something, or is out of
                range.
        """
        state = check_state(state, self.sampler.identity(), ("epoch", "num_minibatches_done"))
        epoch = as_count(state["epoch"], "epoch", minimum=0, maximum=None)
        num_done = as_count(state["num_minibatches_done"], "num_minibatches_done", minimum=0)
        if num_done > len(self):
            raise ValueError(f"num_minibatches_done={num_done}: expected at most {len(self)}")
        self.sampler.set_epoch(epoch)
        self._start = self._num_yielded = num_done
        self._iterations.begin()

    def close(self) -> None:
        """End the iteration, and workers that stay. Another iteration starts others."""
        self._iterations.begin()
        self._reader.close()
        if self._shares is not None:
            self._shares.close()

    def _planned(self, start: int) -> Iterator[PlannedMinibatch]:
        plans = self.sampler.starting_at(start)
        for number in range(start, len(self)):
            if self._shares is not None:
                estimates = self._shares.estimates.plan_with(self.sampler.epoch, number)
                self.sampler.count_with(estimates.speeds, estimates.microbatch_cost)
            planned = next(plans)
            found = replace(planned, plan=filled_up(planned.plan)) if self.comm == "collective" else planned
            if self._shares is not None:
                found = replace(found, plan=falling(found.plan))
            found.plan.microbatches[self.rank]  # packed here, beside the training
            yield found

    def _late_identity(self) -> str:
        """What loaders must have in common for samples to go from one to the other."""
        sampler = self.sampler
        arrays = (sampler.lengths, sampler.cost(sampler.lengths), self.num_loss_tokens)
        return f"{sampler.identity()} {sampler.max_tokens} {[fingerprint(array.tobytes()) for array in arrays]}"

    def _check_late_binding(self) -> None:
        if type(self.sampler.policy) is not LBMini:
            raise ValueError(
                f"late_binding=True with policy {self.sampler.policy.name!r}: expected 'lb-mini', whose ranks take any "
                "number of samples and pack their own"
            )
        if self.comm == "collective":
            raise ValueError(
                "late_binding=True with comm='collective', where all ranks have the same number of microbatches: leave "
                "one of them out"
            )

    def _check_counts(self, plan: Plan, number: int) -> None:
        """All ranks have the same plan, so they come to the same minibatch and all refuse it."""
        if self._shares is not None:
            check_late_binding()
        if self.comm == "auto":
            check_counts(plan, f"minibatch {number}")

    def _read_ahead(
        self, planned: Iterator[PlannedMinibatch], start: int
    ) -> tuple[Iterator[PlannedMinibatch], Iterator[BatchT] | None]:
        """The plans, and this rank's microbatches; None where they are made when it is known who computes them."""
        if self._shares is not None and not self._reader.num_workers:
            return planned, None
        # The plans are read twice: by the reader, early, for what to make, and later for what that belongs to.
        plans, early = itertools.tee(planned)
        seed = random_generator("workers", self.sampler.seed, self.sampler.epoch, self.rank, start).random_raw()
        return plans, self._reader.read(_microbatches(early, self.rank), int(seed))

    def _mine(
        self, planned: PlannedMinibatch, batches: Iterator[BatchT] | None, key: str
    ) -> list[BatchT] | LateMicrobatches[BatchT]:
        if self._shares is not None:
            return LateMicrobatches(self._shares, key, planned, batches, self._dataset)
        assert batches is not None
        return [next(batches) for _ in planned.plan.microbatches[self.rank]]

    def _minibatch(self, planned: PlannedMinibatch, mine: list[BatchT] | LateMicrobatches[BatchT]) -> Minibatch[BatchT]:
        total = int(self.num_loss_tokens[planned.samples].sum())
        scale = loss_scale(self.sampler.world_size, total)
        return Minibatch(mine, scale, total, planned.plan.num_samples, planned.plan)


def _microbatches(planned: Iterable[PlannedMinibatch], rank: int) -> Iterator[list[int]]:
    for minibatch in planned:
        yield from minibatch.of_rank(rank)
