"""Makes a loader that accelerate has prepared yield bundles of minibatches that a policy has planned."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from odc.balance.checks import IntArray
from odc.balance.data.ahead import Later
from odc.balance.data.reader import as_it_is
from odc.balance.late_binding.steal_policy import queues_of
from odc.balance.plan import Plan
from odc.errors import ConfigError, UnsupportedError
from odc.trainers.accelerate import DataRanks, PreparedLoader, random_states_kept, same_on_all_ranks
from odc.trainers.batches import Bundle, LateStep, Microbatch, StepEnd, cut
from odc.trainers.models import check_rows
from odc.trainers.options import BalanceOptions, Planner
from odc.trainers.packing import (
    Collate,
    check_batches,
    check_sample,
    collate_sample,
    counts_of,
    num_first_labels,
    pack,
)

logger = logging.getLogger("odc")
_NUM_COMPARED = 8


# How many tokens each sample of a dataset has


def sample_lengths(
    dataset: Any, length_column: str = "length", num_tokens_of: Callable[[int], int] | None = None
) -> IntArray:
    """Tokens of every sample, (num_samples,). Plans are as good as these are right; limits are kept whatever they say.

    A column of that name is believed, as transformers' samplers do, unless a few samples show that it counts something
    else (words). Else a ``datasets`` table is asked for the sizes of its ``input_ids`` without reading them; any other
    dataset, and one with a transform of its own, is read once.

    Args:
        num_tokens_of: tokens of a sample as it is trained on, to compare with a column; None: it is not compared.

    Raises:
        UnsupportedError: it has no length, its samples have no ``input_ids``, or a length is no count.
    """
    has_indices = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not has_indices or isinstance(dataset, IterableDataset):
        raise UnsupportedError(
            f"{type(dataset).__name__}: an iterable dataset, whose lengths show when samples are read, cannot be "
            "balanced by a policy: stream it (odc run --online --max-tokens N, or online=True), or use a map-style "
            "dataset"
        )
    columns = getattr(dataset, "column_names", None) or []
    is_table = hasattr(dataset, "with_format")
    if length_column in columns:
        stored = dataset.with_format(None) if is_table else dataset
        lengths = _as_counts(stored[length_column], f"column {length_column!r}")
        if num_tokens_of is None or not _counts_something_else(lengths, length_column, num_tokens_of):
            return lengths
    if "input_ids" in columns and is_table and dict(getattr(dataset, "format", {})).get("type") != "custom":
        return _as_counts(_table_lengths(dataset), "the size of input_ids")
    return _as_counts([_num_tokens(dataset[index]) for index in range(len(dataset))], "the size of input_ids")


def _counts_something_else(lengths: IntArray, name: str, num_tokens_of: Callable[[int], int]) -> bool:
    for index in np.unique(np.linspace(0, lengths.size - 1, _NUM_COMPARED, dtype=np.int64)).tolist():
        found = num_tokens_of(index)
        if abs(int(lengths[index]) - found) > 0.1 * found + 8:
            logger.warning(
                "odc: column %r says %d for sample %d, which has %d tokens: it is not used for balancing",
                name,
                lengths[index],
                index,
                found,
            )
            return True
    return False


def _as_counts(values: Iterable[Any], what: str) -> IntArray:
    found = list(values)
    for index, value in enumerate(found):
        if not isinstance(value, int | np.integer) or value < 0:
            raise UnsupportedError(f"{what} is {value!r} for sample {index} of the dataset: expected a count of tokens")
    return np.array(found, dtype=np.int64)


def _table_lengths(dataset: Any) -> list[int]:
    import pyarrow.compute as pc  # comes with datasets

    batches = dataset.with_format("arrow").select_columns("input_ids").iter(batch_size=10_000)
    return [length for batch in batches for length in pc.list_value_length(batch["input_ids"]).to_pylist()]


def _num_tokens(sample: Any) -> int:
    if not hasattr(sample, "keys") or "input_ids" not in sample:
        raise UnsupportedError(
            f"the dataset's samples have no input_ids (a sample is a {type(sample).__name__}): tokenize the dataset "
            "before training, so that lengths are known"
        )
    return int(np.shape(sample["input_ids"])[-1])


# The batch sampler


@dataclass
class GivenBatches:
    """Batches that were drawn already, as the batch sampler that they came from."""

    batches: Sequence[Sequence[int]]
    batch_size: int | None
    drop_last: bool

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        return map(list, self.batches)  # copies: accelerate appends to them


@dataclass(frozen=True, eq=False)
class Part:
    """What takes the place of a rank's batch: one part of an optimizer step, not planned yet.

    It is planned where it is read, in workers if there are any. So skipped parts (to resume) cost nothing.
    """

    samples: IntArray
    """Dataset indices of the whole step, of all ranks, in the same order on all of them."""

    index: int
    num_parts: int
    """As many as a rank would have got batches in this step."""

    following: IntArray | None = None
    """The samples of the next step, to plan ahead; None: there is none."""


class BalancedBatches:
    """Yields a :class:`Part` for every batch that this rank would have got.

    Every rank draws the batches of all ranks, and takes those of one optimizer step together. So a step trains on
    exactly the samples it would have trained on, the repeated ones at the end of an epoch included.

    Args:
        inner: the batch sampler of the whole dataset.
        world_size: number of ranks.
        accumulation_steps: batches per rank and optimizer step.
        split_batches: whether ranks share each batch, rather than take turns.
        even_batches: whether samples are repeated so that all ranks get as many batches.
    """

    def __init__(
        self,
        inner: Any,
        world_size: int,
        accumulation_steps: int,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = inner  # where libraries look for it
        self.num_processes = world_size
        self.batch_size = getattr(inner, "batch_size", None)
        self.drop_last = bool(getattr(inner, "drop_last", False))
        self.accumulation_steps = accumulation_steps
        self._dealt_out = {"split_batches": split_batches, "even_batches": even_batches}
        self._per_round = 1 if split_batches else world_size

    def _shard_of(self, batches: Any, rank: int) -> Any:
        """The batches of a rank, as accelerate deals them out."""
        from accelerate.data_loader import BatchSamplerShard

        return BatchSamplerShard(batches, self.num_processes, rank, **self._dealt_out)

    @property
    def sampler(self) -> Any:
        """That of the whole dataset; libraries call its ``set_epoch``."""
        return getattr(self.batch_sampler, "sampler", None)

    def __len__(self) -> int:
        """Batches per rank of the rank that has most: they are dealt out from the first rank on."""
        return len(self._shard_of(self.batch_sampler, 0))

    def set_epoch(self, epoch: int) -> None:
        """Pass it on to whatever has one."""
        for sampler in (self.batch_sampler, self.sampler):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[Part]:
        rounds, num_parts = self.rounds(), self.accumulation_steps
        steps = [rounds[first : first + num_parts] for first in range(0, len(rounds), num_parts)]
        samples = [np.concatenate(step) for step in steps]
        for step, mine, following in zip(steps, samples, [*samples, None][1:], strict=True):
            for index in range(len(step)):
                yield Part(mine, index, len(step), following)

    def rounds(self) -> list[IntArray]:
        """The samples of an epoch by rounds, in each of which every rank gets a batch."""
        drawn = [list(batch) for batch in self.batch_sampler]
        sizes = same_on_all_ranks(np.array([len(batch) for batch in drawn], dtype=np.int64))
        samples = same_on_all_ranks(np.fromiter(itertools.chain.from_iterable(drawn), dtype=np.int64))
        ends = np.concatenate([[0], np.cumsum(sizes)])
        num_full = self._num_full_rounds(sizes)
        starts = ends[: num_full * self._per_round + 1 : self._per_round]
        full = [samples[first:stop] for first, stop in itertools.pairwise(starts)]
        return [*full, *self._dealt_out_rest(samples, ends, num_full)]

    def _num_full_rounds(self, sizes: IntArray) -> int:
        """Rounds at the beginning of the epoch that any way of dealing out gives to the ranks as they are."""
        last_of_round = sizes[self._per_round - 1 :: self._per_round]
        if self.batch_size is None:
            return int(last_of_round.size)
        short = np.flatnonzero(last_of_round != self.batch_size)
        return int(short[0]) if short.size else int(last_of_round.size)

    def _dealt_out_rest(self, samples: IntArray, ends: IntArray, num_full: int) -> list[IntArray]:
        """The rounds behind the full ones, as the library deals them out: it may leave batches out or repeat samples.

        It is asked for every rank, and goes through all batches each time: so it gets the first round, of which it
        repeats samples, and this rest, rather than the whole epoch.
        """
        done = num_full * self._per_round
        if done == ends.size - 1:
            return []
        chosen = [*range(self._per_round if num_full else 0), *range(done, ends.size - 1)]
        batches = [samples[ends[i] : ends[i + 1]].tolist() for i in chosen]
        given = GivenBatches(batches, self.batch_size, self.drop_last)
        ranks = [list(self._shard_of(given, rank))[bool(num_full) :] for rank in range(self.num_processes)]
        return [
            np.array([sample for batch in batches for sample in batch], dtype=np.int64)
            for batches in itertools.zip_longest(*ranks, fillvalue=())
        ]


# The dataset


class PackedDataset(Dataset[Bundle]):
    """A dataset whose "index" is a :class:`Part` and whose item the bundle of this rank.

    Args:
        dataset: of the user.
        collate: of the user.
        planner: of the dataset; its ``max_tokens`` is kept by what is counted in the rows.
        lengths: tokens of each sample as they were known before, (num_samples,), for messages.
        rank: of this process.
        example: one sample by itself, which tells the columns; empty if there is none.
        context: most tokens of a sample, see :func:`~odc.trainers.models.check_rows`.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Collate,
        planner: Planner,
        lengths: IntArray,
        rank: int,
        example: Microbatch,
        context: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.collate = collate
        self.planner = planner
        self.example = example
        self._lengths = lengths
        self._rank = rank
        self._context = context
        self._warned = False
        self._planned: tuple[IntArray, Plan] | None = None
        self._ahead: tuple[IntArray, Later[Plan]] | None = None
        """Of the step after this one."""

    def __getitems__(self, part: Part) -> Bundle:
        """Plan, read, collate and pack. Torch's loaders ask for a whole batch by this name.

        Where samples are bound late, all microbatches of a step are in its last bundle, with what it takes to give them
        to other ranks.

        Raises:
            UnsupportedError: a sample cannot be packed; names it.
            ConfigError: a sample has more tokens than ``max_tokens``, or a microbatch and cannot be split.
        """
        plan = self._plan(part)
        planned = self.planner.microbatches(plan, part.samples, self._rank)
        is_last = part.index == part.num_parts - 1
        mine = cut(planned, part.num_parts)[part.index]
        if self.planner.binds_late:
            mine = planned if is_last else []
        read = [[(sample, self.collated(sample)) for sample in microbatch] for microbatch in mine]
        rows = [self.rows(microbatch) for microbatch in read]
        alone = [one for microbatch in read for _, one in microbatch]
        bundle = Bundle([row for of_microbatch in rows for row in of_microbatch], num_first_labels(alone))
        if part.index == 0:
            bundle.planned = len(planned)
        if is_last:
            bundle.end = StepEnd()
        if is_last and self.planner.binds_late:
            counts = np.array([counts_of(one) for one in alone], dtype=np.int64).reshape(-1, 2).T
            bundle.late = LateStep(part.samples, queues_of(plan), counts, list(map(len, rows)))
        return bundle

    def __len__(self) -> int:
        """Samples, as of the dataset itself: libraries print it."""
        return len(self.dataset)

    def __getstate__(self) -> dict[str, Any]:
        """What workers that are not forked get."""
        return {**self.__dict__, "_ahead": None}

    def _plan(self, part: Part) -> Plan:
        """The parts of a step are read one after the other, so its plan is kept for the next, and meanwhile a thread
        plans the following step; not in workers, which are ahead as they are."""
        if self._planned is None or not np.array_equal(self._planned[0], part.samples):
            ahead, self._ahead = self._ahead, None
            if ahead is not None and np.array_equal(ahead[0], part.samples):
                self._planned = part.samples, ahead[1].result()
            else:
                self._planned = part.samples, self._make_plan(part.samples)
            if part.following is not None and get_worker_info() is None:
                self._ahead = part.following, Later(partial(self._make_plan, part.following))
        return self._planned[1]

    def _make_plan(self, samples: IntArray) -> Plan:
        plan = self.planner.plan(samples)
        plan.microbatches[self._rank]  # packed here, beside the training
        return plan

    def collated(self, sample: int) -> dict[str, torch.Tensor]:
        """A sample by itself.

        Raises:
            UnsupportedError: it cannot be packed; names it.
            ConfigError: it has more tokens than ``max_tokens``.
        """
        alone = collate_sample(self.collate, self.dataset, sample)
        name, says = f"sample {sample} of the dataset", f"its length says {self._lengths[sample]}"
        check_sample(name, alone, self.example, self._context, remark=f" ({says})")
        num_tokens, max_tokens = alone["input_ids"].shape[1], self.planner.job.max_tokens
        if self.planner.keeps_limit and num_tokens > max_tokens:
            raise ConfigError(
                f"{name} has {num_tokens} tokens after data_collator, more than max_tokens={max_tokens}; {says}. A "
                "sample is never cut: raise max_tokens, or filter the dataset by what the collator makes of it"
            )
        return alone

    def rows(self, microbatch: list[tuple[int, Microbatch]]) -> list[Microbatch]:
        """Samples packed into one row, unless they have more tokens than was planned.

        Raises:
            ConfigError: they cannot be split.
        """
        kept = [one for _, one in microbatch if one["input_ids"].shape[1]]
        rows = _in_rows(kept, self.planner.job.max_tokens)
        if len(rows) > 1 and not self.planner.may_split:
            if self.planner.keeps_limit:
                raise ConfigError(
                    f"{self._too_long(microbatch)}. With this policy all ranks run as many microbatches, so it cannot "
                    "be split: give lengths as the collator makes them (a column), or use lb-mini with on-demand "
                    "communication"
                )
            rows = [kept]
        if len(rows) > 1 and not self._warned:
            self._warned = True  # once per process
            logger.warning("odc: %s, so it becomes %d", self._too_long(microbatch), len(rows))
        return [pack(row, self.example) for row in rows]

    def _too_long(self, microbatch: list[tuple[int, Microbatch]]) -> str:
        counts = {sample: one["input_ids"].shape[1] for sample, one in microbatch}
        worst = max(counts, key=lambda sample: counts[sample] - int(self._lengths[sample]))
        return (
            f"the microbatch of samples {list(counts)} has {sum(counts.values())} tokens after data_collator, more "
            f"than max_tokens={self.planner.job.max_tokens}: sample {worst} of the dataset has {counts[worst]}, its "
            f"length says {self._lengths[worst]}"
        )


def _in_rows(samples: list[Microbatch], max_tokens: int) -> list[list[Microbatch]]:
    """In their order; one row at least."""
    rows: list[list[Microbatch]] = [[]]
    room = max_tokens
    for one in samples:
        num_tokens = one["input_ids"].shape[1]
        if num_tokens > room and rows[-1]:
            rows.append([])
            room = max_tokens
        rows[-1].append(one)
        room -= num_tokens
    return rows


# The loader


_SAME = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""Options of a torch loader that stay what they are."""
_SAME_OF_ACCELERATE = ("device", "rng_types", "synchronized_generator", "_drop_last", "_non_blocking")


def balanced_loader(
    loader: Any,
    options: BalanceOptions,
    ranks: DataRanks,
    *,
    accumulation_steps: int,
    configs: Sequence[object] = (),
    length_column: str = "length",
) -> Any:
    """``loader`` with the same dataset, samples per optimizer step, length, workers and device, but a
    :class:`~odc.trainers.batches.Bundle` in place of each batch.

    It is a loader of accelerate's own class, so skipping batches (to resume), epochs, random states and the end of the
    loader work as they do for any other. Collective: ranks go by the lengths that the first one finds.

    Args:
        configs: see :func:`~odc.trainers.models.configs_of`.

    Raises:
        UnsupportedError: the loader cannot be balanced; names the reason.
        ConfigError: a sample is longer than ``options.max_tokens``.
    """
    from accelerate.data_loader import DataLoaderShard

    given = PreparedLoader(loader, ranks.world_size)
    with random_states_kept():
        lengths, example = _tried_out(loader, length_column, getattr(given.batches, "batch_size", None))
    lengths = same_on_all_ranks(lengths)
    planner = options.planner(lengths, ranks.world_size, next(iter(configs), None))
    context = check_rows(configs, int(lengths.max(initial=1)), planner.job.max_tokens)
    made = DataLoaderShard(
        PackedDataset(loader.dataset, loader.collate_fn, planner, lengths, ranks.rank, example, context),
        batch_sampler=BalancedBatches(
            given.batches,
            ranks.world_size,
            accumulation_steps,
            split_batches=given.split_batches,
            even_batches=given.even_batches,
        ),
        collate_fn=as_it_is,
        **{name: getattr(loader, name) for name in _SAME},
        **{name: vars(loader)[name] for name in _SAME_OF_ACCELERATE if name in vars(loader)},
    )
    made.iteration = getattr(loader, "iteration", 0)
    return made


def _tried_out(loader: Any, length_column: str, batch_size: int | None) -> tuple[IntArray, Microbatch]:
    """Lengths of the samples, and the longest one as it is packed: what is refused is refused here, not in a worker."""
    dataset, collate = loader.dataset, loader.collate_fn

    def num_tokens_of(index: int) -> int:
        return int(collate_sample(collate, dataset, index)["input_ids"].shape[1])

    lengths = sample_lengths(dataset, length_column, num_tokens_of)
    if not lengths.size:
        return lengths, {}
    longest, shortest = int(lengths.argmax()), int(np.where(lengths > 0, lengths, lengths.max()).argmin())
    if longest == shortest:
        shortest = lengths.size - 1 - longest
    example = collate_sample(collate, dataset, longest)
    if batch_size != 1 and shortest != longest:
        check_batches(collate, {f"sample {index} of the dataset": dataset[index] for index in (shortest, longest)})
    return lengths, example
