"""A loader that yields, per minibatch, the packed microbatches of this rank and the scale of their loss."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import numpy.typing as npt
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import as_count, as_one_of, check_kind, fingerprint
from odc.balance.data.ahead import ahead
from odc.balance.data.iteration import COMMS, Comm, Iterations, check_counts, check_state, filled_up
from odc.balance.data.loss_tokens import as_loss_tokens
from odc.balance.data.microbatches import BatchT, Dataset, MicrobatchDataset, SampleT
from odc.balance.data.old_names import lengths_for_sampler
from odc.balance.data.place import Place
from odc.balance.data.reader import Reader, ReadOptions
from odc.balance.data.sampler import MinibatchSampler
from odc.balance.late_binding.microbatches import LateMicrobatches, check_late_binding
from odc.balance.late_binding.steal_policy import largest_first
from odc.balance.late_binding.work_queues import WorkQueues, own_store, together_on
from odc.balance.plan import Plan, PlannedMinibatch
from odc.balance.policies import LBMini
from odc.balance.random_numbers import random_generator


@dataclass(frozen=True, eq=False)
class Minibatch(Generic[BatchT]):
    """One minibatch of one rank.

    Example:
        >>> sampler = MinibatchSampler(lengths, world_size=world_size, minibatch_size=4, cost=LinearCost())
        >>> loader = MinibatchLoader(dataset, sampler, pack_collate, rank)
        >>> minibatch = next(iter(loader))
        >>> minibatch.num_samples  # of all ranks
        8
        >>> len(minibatch.microbatches) == minibatch.plan.num_microbatches[rank]
        True
        >>> loader.close()
    """

    microbatches: list[BatchT] | LateMicrobatches[BatchT]
    """Collated microbatches of this rank in the order of execution; may be empty. With ``late_binding`` each microbatch
    is made when the loop asks for it."""

    loss_scale: float
    """Factor for the summed loss of every microbatch, see :func:`loss_scale`."""

    num_loss_tokens: int
    """Number of loss tokens of the global minibatch."""

    num_samples: int
    """Number of samples of the global minibatch."""

    plan: Plan | None = None
    """The plan of all ranks; a rank's part is packed when it is accessed. None in a stream without ``late_binding``,
    where no rank knows the lengths of other ranks' samples."""

    def to(self, device: Any, *, non_blocking: bool = False) -> Minibatch[BatchT]:
        """This minibatch with its microbatches on a device. Lightning and accelerate call this method.

        Moves every object that has a method ``to`` (tensors, for example), also in dicts, lists and tuples.
        ``cu_seqlens`` of :func:`pack_collate` are moved, too. If the host needs their values, make a list of them
        before.

        Args:
            device: as for ``torch.Tensor.to``.
            non_blocking: copy from pinned memory without waiting.

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
    """The factor for summed losses with which a minibatch's gradient is that of the mean loss over its tokens, for any
    packing.

    The factor is ``world_size / num_loss_tokens``, because FSDP divides the sum of gradients by ``world_size``.
    Multiply the *sum* of the token losses of each microbatch by it. (With means of microbatch means, the weight of a
    token would depend on how many tokens share its microbatch.)

    The factor is 0 if there are no loss tokens; such a minibatch has no gradient.

    Example:
        >>> loss_scale(world_size=8, num_loss_tokens=4096)
        0.001953125
    """
    return world_size / num_loss_tokens if num_loss_tokens else 0.0


class MinibatchLoader(Generic[SampleT, BatchT]):
    """Iterates over one rank's minibatches of an epoch.

    For each minibatch: run every microbatch, multiply its *summed* loss by ``minibatch.loss_scale``, backward; then
    step. All ranks must pass the same arguments, except for ``rank``; ``mesh`` is the same on all. Ranks do not
    communicate. There is one iteration at a time: it ends when another begins, or when an epoch is set or a state is
    loaded. A thread plans the next minibatch during training.

    With ``num_workers``, worker processes read and collate microbatches during training. Minibatches and
    :meth:`state_dict` are the same as without workers if a sample depends only on its index. Other random numbers in a
    worker are seeded from the sampler's ``seed``, the epoch, the rank and the worker's number. Workers start and end
    with an iteration, also if the loop ends early.

    Args:
        dataset: gives sample i as ``dataset[i]``; only samples of this rank are read.
        sampler: plans the minibatches: lengths, cost model, policy, token budget, order. Its epoch is that of the
            loader, so give each loader its own sampler.
        collate: makes a batch from a list of samples, e.g. :func:`~odc.balance.pack_collate`. For an empty microbatch
            it gets an empty list and must return a batch whose summed loss is 0. (Policies other than "lb-mini" need
            empty microbatches if they cannot divide samples evenly.)
        rank: this process's rank among the ``world_size`` ranks of the sampler.
        mesh: instead of ``rank``, the data-parallel dimensions of a ``DeviceMesh``: ``mesh["dp"]``, or
            ``mesh["dp_replicate", "dp_shard"]`` (counted in row-major order). Ranks that differ only in other
            dimensions (tensor parallelism) get the same microbatches.
        num_loss_tokens: tokens of each sample that have a loss, (num_samples,); see
            :func:`~odc.balance.count_loss_tokens`. Default: ``lengths - 1``, all tokens but the first, which no token
            predicts.
        check_loss_tokens: compare ``num_loss_tokens`` with ``batch["labels"]`` if a batch has them. Turn this off if
            labels are not like those of :func:`~odc.balance.pack_collate`.
        comm: whether ranks may have different numbers of microbatches (policy "lb-mini"). "odc": they may.
            "collective": ranks with fewer microbatches also get empty ones, so that all have the same number. "auto",
            the default: they may; but if ``torch.distributed`` has several ranks and ODC is not active in this process
            (by ``odc.patch_fsdp(model)`` or ``odc run``), the first such minibatch is refused, because collectives
            would wait forever.
        late_binding: ranks that finish early take samples from slower ranks, so cost estimates may be wrong and devices
            may differ in speed. ``microbatches`` is then not a list: each microbatch is chosen when the loop asks for
            it. Needs policy "lb-mini" and active ODC. Ranks share their choices through ``torch.distributed``'s store;
            of ranks that compute together (``mesh``), one chooses for all. Each step has the same samples, but
            gradients are summed in an order that differs between runs. The sampler's ``microbatch_cost`` is the cost of
            one more microbatch. Without training (inspection, evaluation) the loader yields the planned microbatches.
        read: worker processes and pinned memory.

    Raises:
        TypeError: ``sampler``, ``read`` or ``mesh`` is something else.
        ValueError: an argument is out of range, the numbers of lengths and samples differ, or the sampler is for
            another number of ranks than the mesh has. While iterating: labels and ``num_loss_tokens`` disagree, or a
            packed batch has more tokens than a given ``max_tokens``.
        RuntimeError: while iterating: ranks have different numbers of microbatches and ``comm="auto"`` finds no active
            ODC; a worker died or timed out; or another iteration has ended this one. Errors of ``dataset`` and
            ``collate`` keep their type, and name the samples.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> cost = TransformerCost.from_config(model.config)
        >>> sampler = MinibatchSampler(lengths, world_size=world_size, minibatch_size=4, max_tokens=64, cost=cost)
        >>> loader = MinibatchLoader(dataset, sampler, pack_collate, rank)
        >>> for minibatch in loader:
        ...     for batch in minibatch.microbatches:
        ...         (loss(model, batch) * minibatch.loss_scale).backward()  # summed over tokens, with use_cache=False
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> len(loader)
        4
        >>> session.close()
    """

    @lengths_for_sampler
    def __init__(
        self,
        dataset: Dataset[SampleT],
        sampler: MinibatchSampler,
        collate: Callable[[list[SampleT]], BatchT],
        rank: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        num_loss_tokens: npt.ArrayLike | None = None,
        check_loss_tokens: bool = True,
        comm: Comm = "auto",
        late_binding: bool = False,
        read: ReadOptions = ReadOptions(),
    ) -> None:
        check_kind(sampler, "sampler", MinibatchSampler, "MinibatchSampler(lengths, ...)")
        check_kind(read, "read", ReadOptions, "ReadOptions(...)")
        place = Place.of(rank, sampler.world_size if mesh is None else None, mesh)
        if place.world_size != sampler.world_size:
            raise ValueError(
                f"a mesh of {place.world_size} ranks, and a sampler for world_size={sampler.world_size}: expected "
                "MinibatchSampler(..., world_size=mesh.size())"
            )
        self.rank = place.rank
        self.sampler = sampler
        self.comm: Comm = as_one_of(comm, "comm", COMMS)
        self.num_loss_tokens = as_loss_tokens(sampler.lengths, num_loss_tokens)
        self._dataset = MicrobatchDataset(
            dataset,
            collate,
            self.num_loss_tokens if check_loss_tokens else None,
            sampler.lengths,
            sampler.max_tokens if sampler.has_limit else None,
        )
        self._reader = Reader[list[int], BatchT](self._dataset, read)
        self._planner = sampler
        """Plans the last iteration."""
        self._epoch = sampler.epoch
        self._num_yielded = 0
        self._start = 0
        self._iterations = Iterations()
        self.late_binding = late_binding
        self._queues: WorkQueues | None = None
        if late_binding:
            self._check_late_binding()
            self._queues = WorkQueues(
                place,
                self._late_identity(),
                own_store(),
                sampler.speeds,
                together_on(mesh),
                sampler.microbatch_cost,
                learns_speeds=True,
            )

    def __len__(self) -> int:
        """Number of minibatches of an epoch."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Minibatch[BatchT]]:
        self.set_epoch(self.sampler.epoch)  # it may have been chosen there
        self._num_yielded = self._start  # not when the first is asked for: a state taken before it has none done
        return self._iterate()

    def _iterate(self) -> Iterator[Minibatch[BatchT]]:
        start, self._start = self._start, 0
        self._num_yielded = start
        iteration = self._iterations.begin()
        if self._queues is not None:
            self._queues.begin_pass()
        with closing(ahead(self._planned(start))) as planned_ahead:
            plans, batches = self._read_ahead(planned_ahead, start)
            for number, planned in enumerate(plans, start):
                self._check_counts(planned.plan, number)
                mine = self._mine(planned, batches, f"{self._epoch}.{number}")
                self._num_yielded = number + 1
                yield self._minibatch(planned, mine)
                if isinstance(mine, LateMicrobatches):
                    mine.close()
                self._iterations.check(iteration, number + 1)

    @property
    def num_taken(self) -> int:
        """With ``late_binding``, the number of samples that this rank has taken from others so far."""
        return 0 if self._queues is None else self._queues.num_taken

    @property
    def speeds(self) -> list[float]:
        """The ranks' speeds in the last planned minibatch; 1 is the usual speed. With ``late_binding`` they are
        measured during training."""
        return [1.0] * self.sampler.world_size if self._planner.speeds is None else self._planner.speeds.tolist()

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch (from 0). Call it before each epoch, on every rank; or call the sampler's,
        which counts from the next iteration on.

        After :meth:`load_state_dict`, the epoch of the state continues where it stopped; any other starts at
        its beginning.
        """
        self.sampler.set_epoch(epoch)
        if self.sampler.epoch != self._epoch:
            self._start = self._num_yielded = 0
            self._iterations.begin()
        self._epoch = self.sampler.epoch

    def state_dict(self) -> dict[str, int | str]:
        """The position of the loader. A minibatch counts as done once it was yielded."""
        return {**self.sampler.identity(), "epoch": self._epoch, "num_minibatches_done": self._num_yielded}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, at the next iteration, after the minibatches that were done when ``state`` was taken.

        Raises:
            TypeError: the state is not a mapping.
            ValueError: the state is of a loader with other minibatches, is incomplete, or is out of range.
        """
        state = check_state(state, self.sampler.identity(), ("epoch", "num_minibatches_done"))
        epoch = as_count(state["epoch"], "epoch", minimum=0, maximum=None)
        num_done = as_count(state["num_minibatches_done"], "num_minibatches_done", minimum=0)
        if num_done > len(self):
            raise ValueError(f"num_minibatches_done={num_done}: expected at most {len(self)}")
        self.set_epoch(epoch)
        self._start = self._num_yielded = num_done
        self._iterations.begin()

    def close(self) -> None:
        """End the iteration and persistent workers. A new iteration starts new workers."""
        self._iterations.begin()
        self._reader.close()
        if self._queues is not None:
            self._queues.close()

    def _planned(self, start: int) -> Iterator[PlannedMinibatch]:
        # A copy: meanwhile others that use the sampler may set its epoch, or count with other speeds.
        planner = self._planner = copy.copy(self.sampler)
        planner.set_epoch(self._epoch)
        plans = planner.starting_at(start)
        for number in range(start, len(self)):
            if self._queues is not None:
                estimates = self._queues.estimates.plan_with(self._epoch, number)
                planner.count_with(estimates.speeds, estimates.microbatch_cost)
            planned = next(plans)
            found = replace(planned, plan=filled_up(planned.plan)) if self.comm == "collective" else planned
            if self._queues is not None:
                found = replace(found, plan=largest_first(found.plan))
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
        if self._queues is not None:
            check_late_binding()
        if self.comm == "auto":
            check_counts(plan, f"minibatch {number}")

    def _read_ahead(
        self, planned: Iterator[PlannedMinibatch], start: int
    ) -> tuple[Iterator[PlannedMinibatch], Iterator[BatchT] | None]:
        """The plans, and this rank's microbatches; None where they are made when it is known who computes them."""
        if self._queues is not None and not self._reader.num_workers:
            return planned, None
        # The plans are read twice: by the reader, early, for what to make, and later for what that belongs to.
        plans, early = itertools.tee(planned)
        seed = random_generator("workers", self.sampler.seed, self._epoch, self.rank, start).random_raw()
        return plans, self._reader.read(_microbatches(early, self.rank), int(seed))

    def _mine(
        self, planned: PlannedMinibatch, batches: Iterator[BatchT] | None, key: str
    ) -> list[BatchT] | LateMicrobatches[BatchT]:
        if self._queues is not None:
            return LateMicrobatches(self._queues, key, planned, batches, self._dataset)
        assert batches is not None
        return [next(batches) for _ in planned.plan.microbatches[self.rank]]

    def _minibatch(self, planned: PlannedMinibatch, mine: list[BatchT] | LateMicrobatches[BatchT]) -> Minibatch[BatchT]:
        total = int(self.num_loss_tokens[planned.samples].sum())
        scale = loss_scale(self.sampler.world_size, total)
        return Minibatch(mine, scale, total, planned.plan.num_samples, planned.plan)


def _microbatches(planned: Iterable[PlannedMinibatch], rank: int) -> Iterator[list[int]]:
    for minibatch in planned:
        yield from minibatch.of_rank(rank)
