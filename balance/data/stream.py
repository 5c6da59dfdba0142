"""A loader for samples whose lengths are not known before they are read: pools, groups, and steps that fit together."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic, Literal, get_args

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import as_cost, as_count, as_one_of, fingerprint
from odc.balance.costs.models import CostModel, LinearCost, check_cost
from odc.balance.data.exchange import Alone, Exchange, VectorExchange
from odc.balance.data.iterable_source import IterableSource
from odc.balance.data.iteration import Iterations, check_state, ranks_go_in_step
from odc.balance.data.loader import Minibatch, loss_scale
from odc.balance.data.loss_tokens import check_batch
from odc.balance.data.microbatches import BatchT, SampleT
from odc.balance.data.order import Order, size_of
from odc.balance.data.place import Place
from odc.balance.data.reader import Reader, name_samples
from odc.balance.data.samples import IterableYields, Measure, SampleDataset
from odc.balance.data.sources import IndexedSource, Requests, Source
from odc.balance.data.steps import StepStream, entries_of
from odc.balance.grouping.alignment import Align, Alignment
from odc.balance.grouping.methods import Grouping, Name
from odc.balance.grouping.quota import num_minibatches
from odc.balance.grouping.rounds import Entry, Step
from odc.balance.late_binding.microbatches import LateMicrobatches, check_late_binding
from odc.balance.late_binding.shares import Shares, own_store, together_on
from odc.balance.late_binding.stream import ChosenSamples, chosen_by_all, planned_of
from odc.balance.random_numbers import random_generator
from odc.errors import shown

LossScaling = Literal["exact", "approx", "sample", "none"]
"""See :class:`StreamLoader`."""

_PLACE = ("epoch", "position")
_POSITION = ("rounds", "source", "places", "num_emitted", "is_dealt_anew", "num_steps_done")
_COUNTED = ("num_emitted", "is_dealt_anew", "num_steps_done", "is_done")
"""What of a position is the same on all ranks."""
_LONGEST_S = 10.0 * 365 * 86400


class StreamLoader(Generic[SampleT, BatchT]):
    """Iterates over the minibatches of a stream of samples whose lengths are known only once they are read.

    Every rank reads its part of the samples into a pool and cuts the pool into groups (``grouping``). The ranks agree
    on what each does next (``align``), and each collates its groups. Use the minibatches like those of
    :class:`~odc.balance.MinibatchLoader`: run every microbatch, multiply its *summed* loss by ``minibatch.loss_scale``,
    backward; then step.

    In an epoch every sample is trained on exactly once, for any number of samples. The stream depends on the arguments
    and the epoch, not on timing or the number of workers (if a sample depends only on its index or position). At the
    end of an epoch, "steps" and "minibatch" redistribute the samples of the last pools, so some ranks read some samples
    again.

    If a rank fails, leaves its loop or dies, the others raise an error that names it, at their next exchange at the
    latest. Collectives of the script in between wait as for any failed rank.

    Args:
        dataset: has samples ``dataset[i]`` and ``len(dataset)``, or is any iterable.
        transform: makes a sample from what the dataset yields (by tokenizing, for example). Runs in workers if there
            are any, for this rank's samples only. ``collate``, ``length`` and ``num_loss_tokens`` get its result.
            Default: no transform.
        collate: makes a batch from a list of samples. If a rank has no samples in a step ("dgap", "steps"), it gets an
            empty list and must return a batch whose summed loss is 0.
        rank, world_size: this process's rank among those that share the data, and their number.
        mesh: instead of ``rank``, ``world_size`` and ``group``, the data-parallel dimensions of a ``DeviceMesh``, see
            :class:`~odc.balance.MinibatchLoader`. Ranks that differ only in other dimensions read the same samples and
            get the same microbatches, without communication.
        max_tokens: maximum tokens per microbatch, including padding. A longer sample is refused.
        length: returns the tokens of a sample. Called where the sample is read, in a worker if there are any.
        num_loss_tokens: returns the tokens of a sample that have a loss; default: ``length(sample) - 1``, all but the
            first.
        grouping: how a pool is cut into microbatches. "token-budget": padded batches of similar lengths and about
            ``max_tokens`` (Online Dynamic Batching). "prefer-closest", "prefer-first": padded batches around the oldest
            sample, as full as possible (load-balanced dynamic batching). "pack": the same for packed batches.
            "pool-sort": the sorted pool in batches of ``batch_size``, shuffled in the same way on all ranks
            (LengthPoolSort). "none": ``batch_size`` samples in their order. Batches of the last two end early if
            ``max_tokens`` would be exceeded.
        pool_size: maximum number of samples in a rank's pool.
        batch_size: samples of a microbatch, for "pool-sort" and "none".
        align: how ranks are kept equal. "dgap": all ranks have the same number of steps with one microbatch each, as
            collectives need. Groups are split or put back into pools until numbers are equal (ODB). One exchange per
            round of steps. "steps": the same, but each rank knows the lengths in all pools, and the padded microbatches
            of a step have about the same cost on all ranks. They replace the groups of grouping="token-budget".
            "minibatch": all ranks have the same cost per minibatch, and any number of microbatches, which needs ODC.
            All agree on a quota, and each fills its minibatch from its own pool. One exchange per minibatch. "none": no
            communication. Ranks may have different numbers of steps.
        join: with "dgap", continue until no rank has samples left. False: an epoch ends once the number of trained
            samples equals the size of the dataset. Whenever a rank has no samples left, the data restarts in another
            order, so some samples of an epoch come twice and others not at all. An iterable of unknown size ends
            instead of restarting.
        minibatch_size: with "minibatch", the average number of samples per rank in a minibatch; at most a quarter of
            ``pool_size``. An epoch of a dataset with indices has ``ceil(num_samples / (world_size * minibatch_size))``
            minibatches, which is ``len()`` of the loader.
        gradient_accumulation_steps: the number of steps of "dgap", "steps" and "none" per minibatch.
        cost: cost model of a sample, for "steps" and "minibatch"; default: its length.
        loss_scaling: the loss whose gradient results. "exact": the mean over all loss tokens of the minibatch. The
            others are weighted means of each rank's mean over its own loss tokens. Weights are, for n samples of a rank
            in the minibatch: "approx": n times the mean loss tokens per sample in the rank's pool; "sample": n; "none":
            equal. (ODB, equation 2 and appendix B.)
        seed, shuffle: order of a dataset with indices. An iterable has its own order; ``dataset.set_epoch`` is called
            if it exists. Without ``shuffle`` the groups of a sorted pool come shortest first, as in ODB; otherwise in a
            random order that is the same on all aligned ranks.
        sampler: gives the order of a dataset with indices instead: any iterable of indices with a length, the same on
            all ranks. It may leave out or repeat samples; its ``set_epoch`` is called if it exists. Resuming needs the
            same order for an epoch again.
        infinite: epochs follow each other without end, each in another order; pools are not emptied between epochs.
        iterable_yields: what an iterable dataset yields on a rank. "all": every sample, in the same order in every rank
            and worker; each keeps its part. "rank": only samples of this rank. "worker": only samples of this rank, and
            in a worker only those of that worker (``torch.utils.data.get_worker_info()``).
        check_batches: compare batches with their samples, if they have ``input_ids`` and ``labels``.
        comm: "odc" permits different numbers of microbatches ("minibatch") without checking that ODC is active, see
            :class:`~odc.balance.MinibatchLoader`.
        late_binding: ranks that finish early take samples of the same minibatch from slower ranks, see
            :class:`~odc.balance.MinibatchLoader`. Minibatches have the same samples as without it. Needs
            align="minibatch", grouping="pack", loss_scaling="exact" and a dataset with indices, whose samples any rank
            can read. One more exchange per minibatch.
        microbatch_cost: with ``late_binding``, the fixed cost of a microbatch in addition to its samples, in the unit
            of ``cost``.
        group: the process group of the ranks that share the data; default: all ranks. The loader does not use this
            group to communicate; it makes its own gloo connections between the same ranks.
        exchange_timeout_s: maximum seconds to wait for the other ranks.
        num_workers, prefetch_factor, persistent_workers, multiprocessing_context, worker_timeout_s, worker_init_fn: as
            in :class:`~odc.balance.MinibatchLoader`. Workers read samples and their lengths; this process collates.

    Raises:
        ValueError: an argument is out of range or contradicts another. While iterating: a sample is longer than
            ``max_tokens``, has no length, or is missing in its batch.
        TypeError: an argument has the wrong type.
        RuntimeError: while iterating: "minibatch" without active ODC, or another iteration has ended this one.
        OdcError: while iterating: another rank failed, died, or left its loop; its number is in the message.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> loader = StreamLoader(
        ...     dataset,
        ...     pack_collate,
        ...     rank,
        ...     world_size,
        ...     max_tokens=64,
        ...     length=lambda sample: len(sample["input_ids"]),
        ...     grouping="pack",
        ...     align="minibatch",
        ...     minibatch_size=2,
        ...     pool_size=8,
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

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[SampleT]], BatchT],
        rank: int | None = None,
        world_size: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        max_tokens: int,
        length: Callable[[SampleT], int],
        transform: Callable[[Any], SampleT] | None = None,
        num_loss_tokens: Callable[[SampleT], int] | None = None,
        grouping: Name = "token-budget",
        pool_size: int = 1024,
        batch_size: int | None = None,
        align: Align = "dgap",
        join: bool = True,
        minibatch_size: int | None = None,
        gradient_accumulation_steps: int = 1,
        cost: CostModel | None = None,
        loss_scaling: LossScaling = "exact",
        seed: int = 0,
        shuffle: bool = True,
        sampler: Iterable[int] | None = None,
        infinite: bool = False,
        iterable_yields: IterableYields = "all",
        check_batches: bool = True,
        comm: Literal["auto", "odc"] = "auto",
        late_binding: bool = False,
        microbatch_cost: float = 0.0,
        group: dist.ProcessGroup | None = None,
        exchange_timeout_s: float = 1800.0,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        multiprocessing_context: str | BaseContext | None = None,
        worker_timeout_s: float = 600.0,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> None:
        self._place = Place.of(rank, world_size, mesh, group)
        self.rank, self.world_size = self._place.rank, self._place.world_size
        self.pool_size = as_count(pool_size, "pool_size", maximum=2**20)
        self.seed = as_count(seed, "seed", minimum=0, maximum=None)
        self.shuffle = bool(shuffle)
        self.infinite = bool(infinite)
        self.loss_scaling = as_one_of(loss_scaling, "loss_scaling", get_args(LossScaling))
        self.comm = as_one_of(comm, "comm", ("auto", "odc"))
        most = as_count(max_tokens, "max_tokens")
        size = None if batch_size is None else as_count(batch_size, "batch_size")
        self.cost = LinearCost() if cost is None else check_cost(cost)
        self.grouping = Grouping(grouping, most, size, self.shuffle)
        self.alignment = Alignment(
            align,
            self.grouping,
            self.pool_size,
            self.rank,
            self.world_size,
            self.cost,
            minibatch_size,
            gradient_accumulation_steps,
            bool(join),
        )
        needed = {"collate": collate, "length": length}
        optional = {"transform": transform, "num_loss_tokens": num_loss_tokens}
        for name, function in {**needed, **optional}.items():
            if not (callable(function) or (function is None and name in optional)):
                raise TypeError(f"{name}={shown(function)}: expected a function")
        if not join and self.infinite:
            raise ValueError("join=False with infinite=True: such a stream has no end to choose")
        if align == "none" and self.world_size > 1 and self.loss_scaling != "none":
            raise ValueError(
                f"loss_scaling={self.loss_scaling!r} with align='none', where no rank knows the others' samples: pass "
                "loss_scaling='none' (each rank's own mean), or use another align"
            )
        size = size_of(dataset)
        if size is None and sampler is not None:
            raise ValueError("sampler with an iterable dataset, which has no indices: leave it out")
        self._order = None if size is None else Order(size, sampler, self.seed, self.shuffle, self.infinite)
        self._num_samples = None if self._order is None else self._order.num_samples
        too_few = self._num_samples is not None and self._num_samples < self.world_size
        if too_few and (not join or (self.infinite and align == "none")):
            raise ValueError(
                f"{self._num_samples} samples on {self.world_size} ranks with join={join}, align={align!r}, "
                f"infinite={self.infinite}: expected at least one sample for each rank"
            )
        self.dataset = dataset
        self._collate = collate
        self._checks = bool(check_batches)
        self._group = group
        self._timeout_s = as_cost(exchange_timeout_s, "exchange_timeout_s")
        if not 0 < self._timeout_s <= _LONGEST_S:
            raise ValueError(
                f"exchange_timeout_s={shown(exchange_timeout_s)}: expected more than 0, at most {_LONGEST_S:g}"
            )
        self._samples = SampleDataset(
            dataset,
            transform,
            Measure(length, num_loss_tokens, self.grouping.max_tokens),
            self.rank,
            self.world_size,
            iterable_yields,
        )
        self._reader: Reader[Any, Any] = Reader(
            self._samples,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=False,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            worker_timeout_s=worker_timeout_s,
            worker_init_fn=worker_init_fn,
        )
        self.iterable_yields = iterable_yields
        self.epoch = 0
        self._exchange: Exchange = Alone()
        self._iterations = Iterations()
        self._position: dict[str, Any] = {}
        self._start: dict[str, Any] = {}
        self.microbatch_cost = as_cost(microbatch_cost, "microbatch_cost")
        self.late_binding = late_binding
        self._shares: Shares | None = None
        if late_binding:
            self._check_late_binding(mesh)
            self._shares = Shares(
                self._place,
                f"{self._shared_identity()}",
                own_store(),
                together=together_on(mesh),
                microbatch_cost=self.microbatch_cost,
            )
        elif self.microbatch_cost:
            raise ValueError(
                f"microbatch_cost={shown(microbatch_cost)} without late_binding=True: quotas do not count microbatches"
            )

    def __iter__(self) -> Iterator[Minibatch[BatchT]]:
        self._position = self._start  # not when the first is asked for: a state taken before it has none done
        return self._iterate()

    def __len__(self) -> int:
        """Minibatches of an epoch.

        Raises:
            TypeError: only the stream will tell. (Known for "minibatch" and a dataset with indices.)
        """
        size = self.alignment.minibatch_size
        if self._num_samples is None or size is None or self.infinite:
            raise TypeError(
                "this stream has no length: how many minibatches an epoch has is known for align='minibatch' and a "
                "dataset with indices, without infinite=True"
            )
        return num_minibatches(self._num_samples, self.world_size, size)

    @property
    def num_taken(self) -> int:
        """With ``late_binding``, the number of samples that this rank has taken from others so far."""
        return 0 if self._shares is None else self._shares.num_taken

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
        if self._shares is not None:
            self._shares.close()
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
        if self._shares is not None:
            self._shares.begin_pass()
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
        dummy: list[list[Entry]] = [] if self.alignment.name == "minibatch" else [[]]
        quota = None if self.alignment.join else self._num_samples
        known = None if self.infinite else self._num_samples
        stream = StepStream(partial(self.alignment.rounds, known), source, exchange, quota)
        for number, (step, position) in enumerate(stream.run(start)):
            if self._shares is not None:
                yield self._late_minibatch(self._shares, step, source, exchange, number), position
                continue
            steps.append(step)
            # At once: what the source has of a lap that is over is gone.
            batches += [self._batch(entries, list(map(source.take, entries))) for entries in step.microbatches or dummy]
            if len(steps) == self.alignment.accumulated:
                yield self._minibatch(steps, batches), position
                steps, batches = [], []
        if steps:
            yield self._minibatch(steps, batches), position

    def _minibatch(self, steps: Sequence[Step], batches: list[BatchT]) -> Minibatch[BatchT]:
        num_loss_tokens = sum(step.num_loss_tokens for step in steps)
        return Minibatch(batches, self._loss_scale(steps), num_loss_tokens, sum(step.num_samples for step in steps))

    def _late_minibatch(
        self, shares: Shares, step: Step, source: Source, exchange: Exchange, number: int
    ) -> Minibatch[BatchT]:
        assert isinstance(source, IndexedSource)
        mine = entries_of([step])
        chosen = chosen_by_all(mine, step.counts, exchange.gather)
        estimates = shares.estimates.plan_with(self.epoch, number)
        planned = planned_of(chosen, self.grouping.max_tokens, estimates.microbatch_cost)
        own = {entry.place: source.take(entry) for entry in mine}
        samples = ChosenSamples(chosen, own, source, self._samples, self._batch, exchange.tell_failure)
        late = LateMicrobatches(shares, f"{self.epoch}.{number}", planned, None, samples)
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
        seed = int(random_generator("workers", self.seed, self.epoch, self.rank).random_raw())
        requests = Requests(self._reader, seed)
        rank, _ = self.alignment.among
        common = (rank, self.pool_size, self.infinite)
        if self._num_samples is None:
            num_workers = max(self._reader.num_workers, 1)
            name = f"rank {self.rank}"
            announce = self._samples.announce_epoch
            is_shared = self.iterable_yields == "all" and self.world_size > 1
            return IterableSource(
                requests, self.cost, num_workers, iteration, self.epoch, name, is_shared, announce, *common
            )
        order = self._order
        assert order is not None
        if self.alignment.name == "none":
            mine = slice(self.rank, None, self.world_size)
            num_mine = len(range(self._num_samples)[mine])
            return IndexedSource(requests, self.cost, num_mine, lambda lap: order.of_lap(lap)[mine], *common)
        return IndexedSource(requests, self.cost, self._num_samples, order.of_lap, *common)

    def _begin_order(self, start: Mapping[str, Any]) -> int:
        """Have the order of this epoch drawn anew; what it is known by, which must be what it was."""
        if self._order is None or start.get("is_done"):
            return 0
        self._order.begin(self.epoch)
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
        return 0 if self._order is None else self._order.fingerprint(lap)

    def _own_exchange(self) -> Exchange:
        if self.alignment.among[1] > 1 and isinstance(self._exchange, Alone):
            self._exchange = VectorExchange(self._place.global_ranks(self._group), self._timeout_s)
        return self._exchange

    def _check_late_binding(self, mesh: DeviceMesh | None) -> None:
        for name, given, expected, why in (
            ("align", self.alignment.name, "minibatch", "whose ranks have any number of microbatches"),
            ("grouping", self.grouping.name, "pack", "where samples leave a microbatch and join another as they are"),
            ("loss_scaling", self.loss_scaling, "exact", "which weighs a sample alike, whoever computes it"),
        ):
            if given != expected:
                raise ValueError(f"late_binding=True with {name}={given!r}: expected {expected!r}, {why}")
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
        if self._shares is not None:
            check_late_binding()
        unequal = self.alignment.name == "minibatch" and self.world_size > 1
        if unequal and self.comm == "auto" and ranks_go_in_step():
            raise RuntimeError(
                "align='minibatch' gives ranks different numbers of microbatches, and ODC is not at work in this "
                "process: the collectives of FSDP or DDP would wait forever. Call odc.patch_fsdp(model) before the "
                "first minibatch, or start the script with `odc run`. Otherwise use align='dgap', or pass comm='odc' "
                "if your ranks communicate once per minibatch in another way"
            )

    def _shared_identity(self) -> dict[str, int | str]:
        found = {name: value for name, value in self._identity().items() if name != "rank"}
        # Not in the state, which goes on with it and without.
        return {**found, "late_binding": int(self._shares is not None)}

    def _identity(self) -> dict[str, int | str]:
        """What another loader must have in common with this one for the same minibatches."""
        found: dict[str, int | str] = {
            "num_samples": -1 if self._num_samples is None else self._num_samples,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "infinite": int(self.infinite),
            "grouping": self.grouping.name,
            "max_tokens": self.grouping.max_tokens,
            "batch_size": self.grouping.batch_size or 0,
            "pool_size": self.pool_size,
            "align": self.alignment.name,
            "join": int(self.alignment.join),
            "gradient_accumulation_steps": self.alignment.accumulated,
            "loss_scaling": self.loss_scaling,
        }
        if self._num_samples is None:
            found["iterable_yields"] = self.iterable_yields
            if self.iterable_yields == "worker":
                found["num_workers"] = self._reader.num_workers
        if self.alignment.minibatch_size is not None:
            found["minibatch_size"] = self.alignment.minibatch_size
        if (costs := self.alignment.costs_of_some()).size:
            found["costs_fingerprint"] = fingerprint(costs.tobytes())
        return found
