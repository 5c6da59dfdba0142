"""A loader for samples whose lengths are not known before they are read: pools, groups, and steps that fit together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import as_count, as_one_of, check_kind, fingerprint
from odc.balance.data.exchange import Alone, Exchange, VectorExchange
from odc.balance.data.iterable_source import IterableSource
from odc.balance.data.iteration import Iterations, check_state, ranks_go_in_step
from odc.balance.data.loader import Minibatch, loss_scale
from odc.balance.data.loss_tokens import check_batch
from odc.balance.data.microbatches import BatchT, SampleT
from odc.balance.data.old_names import names_for_objects
from odc.balance.data.order import Indices, Order, size_of
from odc.balance.data.place import Place
from odc.balance.data.reader import Reader, ReadOptions, name_samples
from odc.balance.data.samples import Measure, SampleDataset
from odc.balance.data.sources import IndexedSource, Requests, Source
from odc.balance.data.steps import StepStream, entries_of
from odc.balance.grouping.alignment import AlignedGroups, Alignment, EqualMinibatches
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.quota import num_minibatches
from odc.balance.grouping.rounds import Entry, Step
from odc.balance.late_binding.microbatches import LateMicrobatches, check_late_binding
from odc.balance.late_binding.stream import ChosenSamples, chosen_by_all, planned_of
from odc.balance.late_binding.work_queues import WorkQueues, own_store, together_on
from odc.balance.random_numbers import random_generator
from odc.errors import shown

LossScaling = Literal["exact", "approx", "sample", "none"]
"""See :class:`StreamLoader`."""

_PLACE = ("epoch", "position")
_POSITION = ("rounds", "source", "places", "num_emitted", "is_dealt_anew", "num_steps_done")
_COUNTED = ("num_emitted", "is_dealt_anew", "num_steps_done", "is_done")
"""What of a position is the same on all ranks."""


class StreamLoader(Generic[SampleT, BatchT]):
    """Iterates over the minibatches of a stream of samples whose lengths are known only once they are read.

    Every rank reads its part of the samples into a pool and cuts the pool into groups (``grouping``). The ranks agree
    on what each does next (``align``), and each collates its groups. Use the minibatches like those of
    :class:`~odc.balance.MinibatchLoader`: run every microbatch, multiply its *summed* loss by ``minibatch.loss_scale``,
    backward; then step.

    In an epoch every sample is trained on exactly once, for any number of samples. The stream depends on the arguments
    and the epoch, not on timing or the number of workers (if a sample depends only on its index or position). At the
    end of an epoch, ``EqualSteps`` and ``EqualMinibatches`` redistribute the samples of the last pools, so some ranks
    read some samples again.

    If a rank fails, leaves its loop or dies, the others raise an error that names it, at their next exchange at the
    latest. Collectives of the script in between wait as for any failed rank.

    Args:
        dataset: has samples ``dataset[i]`` and ``len(dataset)``, or is any iterable.
        collate: makes a batch from a list of samples. If a rank has no samples in a step (``AlignedGroups``,
            ``EqualSteps``), it gets an empty list and must return a batch whose summed loss is 0.
        rank, world_size: this process's rank among those that share the data, and their number.
        length: returns the tokens of a sample. Called where the sample is read, in a worker if there are any.
        grouping: how a pool is cut into microbatches, the token budget of a microbatch, and the size of the pool.
        align: how ranks are kept equal: :class:`~odc.balance.AlignedGroups`, :class:`~odc.balance.EqualSteps`,
            :class:`~odc.balance.EqualMinibatches` or :class:`~odc.balance.Unaligned`.
        mesh: instead of ``rank``, ``world_size`` and ``group``, the data-parallel dimensions of a ``DeviceMesh``, see
            :class:`~odc.balance.MinibatchLoader`. Ranks that differ only in other dimensions read the same samples and
            get the same microbatches, without communication.
        group: the process group of the ranks that share the data; default: all ranks. The loader does not use this
            group to communicate; it makes its own gloo connections between the same ranks.
        transform: makes a sample from what the dataset yields (by tokenizing, for example). Runs in workers if there
            are any, for this rank's samples only. ``collate``, ``length`` and ``num_loss_tokens`` get its result.
            Default: no transform.
        num_loss_tokens: returns the tokens of a sample that have a loss; default: ``length(sample) - 1``, all but the
            first.
        order: which samples an epoch has, and in which order.
        loss_scaling: the loss whose gradient results. "exact": the mean over all loss tokens of the minibatch. The
            others are weighted means of each rank's mean over its own loss tokens. Weights are, for n samples of a rank
            in the minibatch: "approx": n times the mean loss tokens per sample in the rank's pool; "sample": n; "none":
            equal. (ODB, equation 2 and appendix B.)
        check_batches: compare batches with their samples, if they have ``input_ids`` and ``labels``.
        read: worker processes. They read samples and their lengths; this process collates.

    Raises:
        ValueError: an argument contradicts another. While iterating: a sample is longer than ``max_tokens``, has no
            length, or is missing in its batch.
        TypeError: an argument has the wrong type.
        RuntimeError: while iterating: ``EqualMinibatches`` without active ODC, or another iteration has ended this one.
        OdcError: while iterating: another rank failed, died, or left its loop; its number is in the message.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> loader = StreamLoader(
        ...     dataset,
        ...     pack_collate,
        ...     rank,
        ...     world_size,
        ...     length=lambda sample: len(sample["input_ids"]),
        ...     grouping=Grouping("pack", max_tokens=64, pool_size=8),
        ...     align=EqualMinibatches(minibatch_size=2),
        ... )
        >>> for minibatch in loader:
        ...     for batch in minibatch.microbatches:
        ...         (loss(model, batch) * minibatch.loss_scale).backward()  # summed over tokens, with use_cache=False
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> len(loader)
        8
        >>> loader.close()
        >>> session.close()
    """

    @names_for_objects
    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[SampleT]], BatchT],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        length: Callable[[SampleT], int],
        grouping: Grouping,
        align: Alignment = AlignedGroups(),
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        transform: Callable[[Any], SampleT] | None = None,
        num_loss_tokens: Callable[[SampleT], int] | None = None,
        order: Order = Order(),
        loss_scaling: LossScaling = "exact",
        check_batches: bool = True,
        read: ReadOptions = ReadOptions(),
    ) -> None:
        check_kind(grouping, "grouping", Grouping, "a grouping, such as Grouping('pack', max_tokens=32_768),")
        check_kind(
            align, "align", Alignment, "AlignedGroups(), EqualSteps(), EqualMinibatches(minibatch_size) or Unaligned()"
        )
        check_kind(order, "order", Order, "Order(...)")
        check_kind(read, "read", ReadOptions, "ReadOptions(...)")
        for name, function, is_needed in (
            ("collate", collate, True),
            ("length", length, True),
            ("transform", transform, False),
            ("num_loss_tokens", num_loss_tokens, False),
        ):
            if not callable(function) and (is_needed or function is not None):
                raise TypeError(f"{name}={shown(function)}: expected a function")
        self._place = Place.of(rank, world_size, mesh, group)
        self.rank, self.world_size = self._place.rank, self._place.world_size
        self.grouping, self.alignment, self.order = grouping, align, order
        self.loss_scaling = as_one_of(loss_scaling, "loss_scaling", get_args(LossScaling))
        align.check(grouping)
        if read.pin_memory:
            raise ValueError("pin_memory=True for a stream, whose batches are made in this process: leave it out")
        if not align.join and order.infinite:
            raise ValueError("join=False with infinite=True: such a stream has no end to choose")
        if not align.communicates and self.world_size > 1 and self.loss_scaling != "none":
            raise ValueError(
                f"loss_scaling={self.loss_scaling!r} with ranks that are not aligned, where no rank knows the others' "
                "samples: pass loss_scaling='none' (each rank's own mean), or another alignment"
            )
        size = size_of(dataset)
        if size is None and order.sampler is not None:
            raise ValueError("sampler with an iterable dataset, which has no indices: leave it out")
        self._indices = None if size is None else Indices(size, order)
        self._num_samples = None if self._indices is None else self._indices.num_samples
        too_few = self._num_samples is not None and self._num_samples < self.world_size
        if too_few and (not align.join or (order.infinite and not align.communicates)):
            raise ValueError(
                f"{self._num_samples} samples on {self.world_size} ranks with join={align.join}, "
                f"align={type(align).__name__}(), infinite={order.infinite}: expected at least one sample for each rank"
            )
        self.dataset = dataset
        self._collate = collate
        self._checks = bool(check_batches)
        self._group = group
        measure = Measure(length, num_loss_tokens, grouping.max_tokens)
        self._samples = SampleDataset(dataset, transform, measure, self.rank, self.world_size, order.iterable_yields)
        self._reader: Reader[Any, Any] = Reader(self._samples, read)
        self.epoch = 0
        self._exchange: Exchange = Alone()
        self._iterations = Iterations()
        self._position: dict[str, Any] = {}
        self._start: dict[str, Any] = {}
        self.late_binding = align.late_binding
        self._queues: WorkQueues | None = None
        if align.late_binding:
            self._check_late_binding(mesh)
            self._queues = WorkQueues(
                self._place,
                f"{self._shared_identity()}",
                own_store(),
                together=together_on(mesh),
                microbatch_cost=align.microbatch_cost,
            )

    def __iter__(self) -> Iterator[Minibatch[BatchT]]:
        self._position = self._start  # not when the first is asked for: a state taken before it has none done
        return self._iterate()

    def __len__(self) -> int:
        """Minibatches of an epoch.

        Raises:
            TypeError: only the stream will tell. (Known for ``EqualMinibatches`` and a dataset with indices.)
        """
        size = self.alignment.minibatch_size
        if self._num_samples is None or size is None or self.order.infinite:
            raise TypeError(
                "this stream has no length: how many minibatches an epoch has is known for EqualMinibatches and a "
                "dataset with indices, without infinite=True"
            )
        return num_minibatches(self._num_samples, self.world_size, size)

    @property
    def num_taken(self) -> int:
        """With ``late_binding``, the number of samples that this rank has taken from others so far."""
        return 0 if self._queues is None else self._queues.num_taken

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch (from 0). Call it before each epoch, on every rank.

        After :meth:`load_state_dict`, the epoch of the state continues where it stopped; any other starts at its
        beginning.
        """
        epoch = as_count(epoch, "epoch", minimum=0, maximum=None)
        if epoch != self.epoch:
            self._start = self._position = {}
            self._iterations.begin()
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """This rank's position, as JSON values. A minibatch counts as done once it was yielded.

        Every rank must keep its own state. Samples in the pool are stored by their position in the order, and read
        again.
        """
        return {**self._identity(), "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, at the next iteration, after the minibatches that were done when ``state`` was taken.

        All ranks must do this, each with its own state. The states must be taken after the same minibatch.

        Raises:
            TypeError: the state is not a mapping.
            ValueError: the state is of a loader with other minibatches or of another rank, or is incomplete.
        """
        state = check_state(state, self._identity(), _PLACE)
        epoch = as_count(state["epoch"], "epoch", minimum=0, maximum=None)
        if not isinstance(state["position"], Mapping):
            raise ValueError(f"position={shown(state['position'])}: expected a mapping, as of state_dict()")
        position = dict(state["position"])
        if position and "is_done" not in position and (missing := [name for name in _POSITION if name not in position]):
            raise ValueError(f"the position has no {' and no '.join(missing)}: expected what state_dict() returned")
        self.epoch = epoch
        self._start = self._position = position
        self._iterations.begin()

    def close(self) -> None:
        """End the iteration, persistent workers and the connections to other ranks. Call it on every rank."""
        self._iterations.begin()
        self._reader.close()
        if self._queues is not None:
            self._queues.close()
        self._exchange.close()
        self._exchange = Alone()

    def _iterate(self) -> Iterator[Minibatch[BatchT]]:
        start, self._start = self._start, {}
        self._position = start
        number = self._iterations.begin()
        exchange = self._own_exchange()
        try:
            counted = {name: int(start.get(name, 0)) for name in _COUNTED}
            at = {"epoch": self.epoch, **counted, "order": self._begin_order(start)}
        except BaseException as error:
            exchange.tell_failure(error)
            raise
        begun = 0 if isinstance(exchange, Alone) else exchange.begin(self._shared_identity(), at)
        if start.get("is_done"):
            return
        source = self._source(number)
        if self._queues is not None:
            self._queues.begin_pass()
        minibatches = self._minibatches(source, exchange, start)
        num_done, is_told = 0, False
        try:
            while True:
                try:
                    self._check_communication()
                    found = next(minibatches, None)
                except BaseException as error:
                    is_told = True
                    exchange.tell_failure(error)
                    raise
                if found is None:
                    break
                minibatch, position = found
                self._position = {**position, "order": self._order_at(position)}
                num_done += 1
                yield minibatch
                self._iterations.check(number, num_done)
            self._position = {"is_done": 1}
            is_told = True
        finally:
            if not is_told:
                exchange.tell_left(begun, num_done)
            minibatches.close()
            source.close()

    def _minibatches(
        self, source: Source, exchange: Exchange, start: Mapping[str, Any]
    ) -> Generator[tuple[Minibatch[BatchT], dict[str, Any]], None, None]:
        """Minibatches, and the position behind each."""
        steps: list[Step] = []
        batches: list[BatchT] = []
        position: dict[str, Any] = {}
        # What a rank without samples goes through in a step that others make.
        dummy: list[list[Entry]] = [] if isinstance(self.alignment, EqualMinibatches) else [[]]
        quota = None if self.alignment.join else self._num_samples
        known = None if self.order.infinite else self._num_samples
        make_rounds = partial(self.alignment.rounds, self.grouping, self.rank, self.world_size, known)
        stream = StepStream(make_rounds, source, exchange, quota)
        for number, (step, position) in enumerate(stream.run(start)):
            if self._queues is not None:
                yield self._late_minibatch(self._queues, step, source, exchange, number), position
                continue
            steps.append(step)
            # At once: what the source has of a lap that is over is gone.
            batches += [self._batch(entries, list(map(source.take, entries))) for entries in step.microbatches or dummy]
            if len(steps) == self.alignment.gradient_accumulation_steps:
                yield self._minibatch(steps, batches), position
                steps, batches = [], []
        if steps:
            yield self._minibatch(steps, batches), position

    def _minibatch(self, steps: Sequence[Step], batches: list[BatchT]) -> Minibatch[BatchT]:
        num_loss_tokens = sum(step.num_loss_tokens for step in steps)
        return Minibatch(batches, self._loss_scale(steps), num_loss_tokens, sum(step.num_samples for step in steps))

    def _late_minibatch(
        self, queues: WorkQueues, step: Step, source: Source, exchange: Exchange, number: int
    ) -> Minibatch[BatchT]:
        assert isinstance(source, IndexedSource)
        mine = entries_of([step])
        chosen = chosen_by_all(mine, step.counts, exchange.gather)
        estimates = queues.estimates.plan_with(self.epoch, number)
        planned = planned_of(chosen, self.grouping.max_tokens, estimates.microbatch_cost)
        own = {entry.place: source.take(entry) for entry in mine}
        samples = ChosenSamples(chosen, own, source, self._samples, self._batch, exchange.tell_failure)
        late = LateMicrobatches(queues, f"{self.epoch}.{number}", planned, None, samples)
        # Not that of own samples: a rank without any may take some.
        scale = loss_scale(self.world_size, step.num_loss_tokens)
        return Minibatch(late, scale, step.num_loss_tokens, step.num_samples, planned.plan)

    def _batch(self, entries: list[Entry], taken: list[tuple[Any, int | str]]) -> BatchT:
        names = [name for _, name in taken]
        try:
            batch = self._collate([sample for sample, _ in taken])
            if self._checks:
                check_batch(
                    batch,
                    names,
                    [entry.length for entry in entries],
                    sum(entry.num_loss_tokens for entry in entries),
                    self.grouping.max_tokens,
                    self.grouping.layout,
                )
        except Exception as error:
            name_samples(error, f"when samples {names} were collated")
            raise
        return batch

    def _loss_scale(self, steps: Sequence[Step]) -> float:
        """The weight of this rank's mean loss among the ranks' times world_size, over the rank's loss tokens."""
        entries = entries_of(steps)
        own = sum(entry.num_loss_tokens for entry in entries)
        if not own:
            return 0.0
        if self.loss_scaling == "exact":
            return self.world_size / sum(step.num_loss_tokens for step in steps)
        if self.loss_scaling == "approx":
            mine = sum(step.own_approximate_loss_tokens for step in steps)
            return self.world_size * mine / sum(step.approximate_loss_tokens for step in steps) / own
        if self.loss_scaling == "sample":
            return self.world_size * len(entries) / sum(step.num_samples for step in steps) / own
        return 1 / own

    def _source(self, iteration: int) -> Source:
        seed = int(random_generator("workers", self.order.seed, self.epoch, self.rank).random_raw())
        requests = Requests(self._reader, seed)
        indices, cost, are_aligned = self._indices, self.alignment.cost, self.alignment.communicates
        common = (self.rank if are_aligned else 0, self.grouping.pool_size, self.order.infinite)
        if indices is None:
            num_workers = max(self._reader.num_workers, 1)
            name = f"rank {self.rank}"
            announce = self._samples.announce_epoch
            is_shared = self.order.iterable_yields == "all" and self.world_size > 1
            return IterableSource(
                requests, cost, num_workers, iteration, self.epoch, name, is_shared, announce, *common
            )
        if not are_aligned:
            mine = slice(self.rank, None, self.world_size)
            num_mine = len(range(indices.num_samples)[mine])
            return IndexedSource(requests, cost, num_mine, lambda lap: indices.of_lap(lap)[mine], *common)
        return IndexedSource(requests, cost, indices.num_samples, indices.of_lap, *common)

    def _begin_order(self, start: Mapping[str, Any]) -> int:
        """Have the order of this epoch drawn anew; what it is known by, which must be what it was."""
        if self._indices is None or start.get("is_done"):
            return 0
        self._indices.begin(self.epoch)
        found = self._order_at(start)
        if start and start.get("order", 0) != found:
            raise ValueError(
                f"the sampler gives another order for epoch {self.epoch} than when the state was taken: it must depend "
                "on the epoch alone, not on a random state of the process (accelerate: use_seedable_sampler=True; the "
                "same seed). To begin the data anew in a Trainer: ignore_data_skip=True"
            )
        return found

    def _order_at(self, position: Mapping[str, Any]) -> int:
        lap = int(position["source"].get("lap", 0)) if position else 0
        return 0 if self._indices is None else self._indices.fingerprint(lap)

    def _own_exchange(self) -> Exchange:
        if self.alignment.communicates and self.world_size > 1 and isinstance(self._exchange, Alone):
            self._exchange = VectorExchange(self._place.global_ranks(self._group), self.alignment.timeout_s)
        return self._exchange

    def _check_late_binding(self, mesh: DeviceMesh | None) -> None:
        if self.loss_scaling != "exact":
            raise ValueError(
                f"late_binding=True with loss_scaling={self.loss_scaling!r}: expected 'exact', which weighs a sample "
                "alike, whoever computes it"
            )
        if self._num_samples is None:
            raise ValueError(
                "late_binding=True with an iterable dataset, whose samples no other rank can read: give a dataset with "
                "indices (__getitem__ and __len__), or leave late_binding out"
            )
        if mesh is None and dist.is_initialized() and self.world_size < dist.get_world_size():
            raise ValueError(
                f"late_binding=True with {self.world_size} of {dist.get_world_size()} ranks, and no mesh: which ranks "
                "compute together is not known. Give mesh=, the data-parallel dimensions of the mesh of all ranks"
            )

    def _check_communication(self) -> None:
        if self._queues is not None:
            check_late_binding()
        align = self.alignment
        unequal = isinstance(align, EqualMinibatches) and align.comm == "auto" and self.world_size > 1
        if unequal and ranks_go_in_step():
            raise RuntimeError(
                "EqualMinibatches gives ranks different numbers of microbatches, and ODC is not at work in this "
                "process: the collectives of FSDP or DDP would wait forever. Call odc.patch_fsdp(model) before the "
                "first minibatch, or start the script with `odc run`. Otherwise use AlignedGroups, or pass comm='odc' "
                "if your ranks communicate once per minibatch in another way"
            )

    def _shared_identity(self) -> dict[str, int | str]:
        found = {name: value for name, value in self._identity().items() if name != "rank"}
        # Not in the state, which goes on with it and without.
        return {**found, "late_binding": int(self._queues is not None)}

    def _identity(self) -> dict[str, int | str]:
        """What another loader must have in common with this one for the same minibatches."""
        order, grouping, align = self.order, self.grouping, self.alignment
        found: dict[str, int | str] = {
            "num_samples": -1 if self._num_samples is None else self._num_samples,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": order.seed,
            "shuffle": int(order.shuffle),
            "infinite": int(order.infinite),
            "grouping": grouping.name,
            "max_tokens": grouping.max_tokens,
            "batch_size": grouping.batch_size or 0,
            "pool_size": grouping.pool_size,
            "align": align.name,
            "join": int(align.join),
            "gradient_accumulation_steps": align.gradient_accumulation_steps,
            "loss_scaling": self.loss_scaling,
        }
        if grouping.shuffle != order.shuffle:
            found["shuffle_groups"] = int(grouping.shuffle)
        if self._num_samples is None:
            found["iterable_yields"] = order.iterable_yields
            if order.iterable_yields == "worker":
                found["num_workers"] = self._reader.num_workers
        if align.minibatch_size is not None:
            found["minibatch_size"] = align.minibatch_size
        if (costs := align.costs_of_some(grouping.max_tokens)).size:
            found["costs_fingerprint"] = fingerprint(costs.tobytes())
        return found
