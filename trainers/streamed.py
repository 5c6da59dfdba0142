"""Balanced minibatches of samples whose lengths show when they are read: a stream in the place of a prepared loader.

What is measured is what the user's collator makes of each sample by itself, in a worker if there are any. Ranks fill
equal quotas of cost (:class:`~odc.balance.StreamLoader`, ``align="minibatch"``), so which samples are in a step is not
what it would have been, but how many are, on average, and how many steps an epoch has.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from odc.balance import StreamLoader
from odc.balance.data.collate import IGNORED
from odc.balance.data.from_torch import workers_of
from odc.balance.data.samples import NUM_FIRST, IterableYields, sum_of
from odc.balance.random_numbers import random_generator
from odc.errors import ConfigError, UnsupportedError
from odc.trainers.bundles import Bundle, Microbatch, StepEnd, cut
from odc.trainers.checks import check_rows
from odc.trainers.options import BalanceOptions, default_cost
from odc.trainers.order import same_on_all_ranks
from odc.trainers.packing import Collate, check_batches, collate_alone, pack, random_states_kept

_LEAST_POOL, _POOLED_MINIBATCHES = 256, 16


class StreamedBatches:
    """The bundles of a stream, in the place of a batch sampler: what yields so many batches per optimizer step.

    There is one bundle for each batch that the rank would have got in a step. Those of steps that are done (after
    :meth:`resume`) are empty placeholders, for a library that skips them.

    Args:
        stream: whose batches are packed rows, each with the number of first labels (:class:`_Packer`).
        accumulation_steps: bundles per step.
        batch_size: samples of a rank in a bundle on average, for libraries that look at it.
        num_steps: optimizer steps of an epoch, for a stream without an end.
    """

    drop_last = False

    def __init__(
        self,
        stream: StreamLoader[Microbatch, Packed],
        packer: Packer,
        accumulation_steps: int,
        batch_size: int,
        num_steps: int | None,
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.num_processes = stream.world_size
        self.batch_sampler = self.sampler = self  # wherever libraries look for something with an epoch
        self._packer = packer
        self._accumulation_steps = accumulation_steps
        self._num_steps = num_steps
        self._resumed: dict[int, int] = {}
        """Steps that are done, of the epoch that is resumed."""

    def __len__(self) -> int:
        """Bundles of an epoch.

        Raises:
            TypeError: the dataset is an iterable.
        """
        return len(self.stream) * self._accumulation_steps

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self.stream.set_epoch(epoch)

    @property
    def num_steps(self) -> int | None:
        """Optimizer steps of an epoch; None: as many as the data gives."""
        try:
            return len(self.stream) if self._num_steps is None else self._num_steps
        except TypeError:
            return None

    def state_dict(self) -> dict[str, Any]:
        """Before the first step of an iteration; behind a step, :func:`state_of` it."""
        return {"step": self._resumed.get(self.stream.epoch, 0), "stream": self.stream.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind a step. The next iteration of its epoch begins with placeholders for what is done.

        Raises:
            ValueError: the state is of another stream.
        """
        self.stream.load_state_dict(state["stream"])
        self._resumed = {self.stream.epoch: int(state["step"])}

    def __iter__(self) -> Iterator[Bundle]:
        num_done = self._resumed.pop(self.stream.epoch, 0)
        self._resumed = {}
        for _ in range(num_done * self._accumulation_steps):
            yield Bundle([], is_placeholder=True)
        stream = iter(self.stream)
        while num_done != self._num_steps:
            minibatch = next(stream, None)
            if minibatch is None:
                return
            num_done += 1
            rows = minibatch.microbatches or [self._packer([])]
            end = StepEnd(num_done, minibatch.num_samples, self.stream.state_dict())
            for index, mine in enumerate(cut(rows, self._accumulation_steps)):
                is_last = index == self._accumulation_steps - 1
                num_first_labels = sum(packed.num_first_labels for packed in mine)
                yield Bundle([packed.row for packed in mine], num_first_labels, end=end if is_last else None)


def state_of(end: StepEnd) -> dict[str, Any]:
    """What :meth:`StreamedBatches.load_state_dict` needs to go on behind a step; for JSON."""
    return {"step": end.step, "stream": end.state}


def streamed_loader(
    loader: Any,
    options: BalanceOptions,
    *,
    rank: int,
    world_size: int,
    accumulation_steps: int,
    configs: Sequence[object] = (),
    num_steps: int | None = None,
    timeout_s: float = 1800.0,
) -> Any:
    """``loader`` with the same dataset, workers and device, and as many samples per optimizer step on average, but a
    :class:`~odc.trainers.bundles.Bundle` in place of each batch. Its ``batch_sampler`` is a :class:`StreamedBatches`.

    A dataset with indices comes in the order of its sampler, every sample of an epoch once, whatever ``drop_last`` and
    ``even_batches`` say, and an epoch has as many optimizer steps as before. An iterable is shared out by samples, or
    by the shards of ``datasets``.

    Args:
        options: with ``online``.
        configs: see :func:`~odc.trainers.checks.configs_of`.
        num_steps: optimizer steps of an iterable dataset, which begins anew as often as need be; None: as many as it
            gives once.
        timeout_s: most seconds to wait for a rank that does not come for its next step.

    Raises:
        UnsupportedError: the loader cannot be streamed; names the reason.
        ConfigError: ``pool_size`` is too small for a step, or ranks have datasets of different sizes.
    """
    from accelerate.data_loader import DataLoaderShard

    assert options.max_tokens is not None  # checked by the options
    _check(loader, world_size)
    batch_size = _batch_size(loader, world_size)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    where: dict[str, Any] = {"infinite": is_iterable and num_steps is not None}
    if is_iterable:
        dataset, where["iterable_yields"] = _own_part(loader, rank, world_size)
    else:
        dataset, where["sampler"] = loader.dataset, _AgreedOrder(_sampler(loader))
        _check_sizes(len(dataset), len(where["sampler"]), rank)
    minibatch_size = batch_size * accumulation_steps
    if options.pool_size is not None and options.pool_size < 4 * minibatch_size:
        raise ConfigError(
            f"pool_size={options.pool_size} with {minibatch_size} samples of a rank in a step (batch size x "
            f"accumulation steps): expected at least {4 * minibatch_size}, as some are chosen from while others are "
            "trained on"
        )
    packer = Packer()
    stream: StreamLoader[Microbatch, Packed] = StreamLoader(
        dataset,
        packer,
        rank,
        world_size,
        max_tokens=options.max_tokens,
        transform=_Collated(loader.collate_fn, check_rows(configs, 1, options.max_tokens)),
        length=_num_tokens,
        grouping="pack",
        pool_size=options.pool_size or max(_LEAST_POOL, _POOLED_MINIBATCHES * minibatch_size),
        align="minibatch",
        minibatch_size=minibatch_size,
        cost=options.cost or default_cost(next(iter(configs), None)),
        loss_scaling="none",  # the trainer counts the labels of all ranks
        check_batches=False,
        exchange_timeout_s=timeout_s,
        **where,
        **workers_of(loader),
    )
    batches = StreamedBatches(stream, packer, accumulation_steps, batch_size, num_steps if is_iterable else None)
    return DataLoaderShard(
        _AsGiven(None if is_iterable else len(loader.dataset)),
        batch_sampler=batches,
        collate_fn=_as_it_is,
        pin_memory=loader.pin_memory,
        device=_device(loader),
        _drop_last=False,
        _non_blocking=loader._non_blocking,
    )


class _AsGiven(Dataset[Bundle]):
    """A dataset whose "index" is its item already."""

    def __init__(self, num_samples: int | None) -> None:
        self._num_samples = num_samples

    def __getitems__(self, bundle: Bundle) -> Bundle:
        """Torch's loaders ask for a whole batch by this name."""
        return bundle

    def __len__(self) -> int:
        """Samples, as of the user's dataset: libraries print it."""
        if self._num_samples is None:
            raise TypeError("an iterable dataset has no length")
        return self._num_samples


def _as_it_is(bundle: Bundle) -> Bundle:
    return bundle


class _AgreedOrder:
    """A sampler's order on rank 0, for all ranks (see :func:`same_on_all_ranks`).

    What it draws from the random states of the process is drawn from states that the epoch alone decides, so that an
    epoch has the same order when training is resumed in it.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._seed = torch.initial_seed()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[int]:
        with random_states_kept():
            seed = int(random_generator("order", self._seed, self._epoch).random_raw()) % 2**32
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            drawn = np.fromiter(self._sampler, dtype=np.int64)
        return iter(same_on_all_ranks(drawn).tolist())

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


class Packed:
    """A packed row."""

    def __init__(self, row: Microbatch, num_first_labels: int) -> None:
        self.row = row
        self.num_first_labels = num_first_labels
        """See :class:`~odc.trainers.bundles.Bundle`."""


class Packer:
    """Packs what :class:`_Collated` made; of nothing, a row without loss and with the columns of the others."""

    def __init__(self) -> None:
        self.example: Microbatch = {}

    def __call__(self, samples: list[Microbatch]) -> Packed:
        kept = [sample for sample in samples if sample["input_ids"].shape[1]]
        if kept and not self.example:
            self.example = kept[0]
        for sample in kept:
            if sample.keys() != self.example.keys():
                raise UnsupportedError(
                    f"data_collator gives the columns {sorted(sample)} for a sample and {sorted(self.example)} for "
                    "another; packed samples need the same ones"
                )
        num_first_labels = sum(int((sample["labels"][:, :1] != IGNORED).sum()) for sample in samples)
        return Packed(pack(kept, self.example), num_first_labels)


class _Collated:
    """The user's collator on each sample by itself. Of the first two of different lengths in each process, also on both
    together: what it pads must be the same."""

    def __init__(self, collate: Collate, context: int | None) -> None:
        self._collate = collate
        self._context = context
        self._first: tuple[Any, int] | None = None
        self._is_checked = False

    def __call__(self, sample: Any) -> Microbatch:
        alone = collate_alone(self._collate, sample)
        num_tokens = alone["input_ids"].shape[1]
        if self._context is not None and num_tokens > self._context:
            raise UnsupportedError(
                f"a sample has {num_tokens} tokens after data_collator, and beyond {self._context} the model's rotary "
                "frequencies depend on the longest sample of a row; filter the dataset"
            )
        if not self._is_checked:
            self._check(sample, num_tokens)
        return alone

    def _check(self, sample: Any, num_tokens: int) -> None:
        if self._first is None:
            self._first = sample, num_tokens
        elif self._first[1] != num_tokens:
            with random_states_kept():
                check_batches(self._collate, {"the first sample that was read": self._first[0], "this sample": sample})
            self._is_checked, self._first = True, None


def _num_tokens(sample: Microbatch) -> int:
    return max(int(sample["input_ids"].shape[1]), 1)  # one without tokens is packed as nothing


def _check(loader: Any, world_size: int) -> None:
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard

    is_iterable = isinstance(loader.dataset, IterableDataset)
    known = isinstance(loader, DataLoaderShard) or (is_iterable and isinstance(loader, DataLoaderDispatcher))
    if not known or getattr(loader, "use_stateful_dataloader", False):
        raise UnsupportedError(
            f"the training loader is a {type(loader).__name__}"
            f"{' with use_stateful_dataloader' if known else ''}: expected what Accelerator.prepare makes of a torch "
            "DataLoader" + ("" if is_iterable else ", with dispatch_batches=False")
        )
    shares = getattr(loader.dataset if is_iterable else loader.batch_sampler, "num_processes", world_size)
    if shares != world_size:
        raise UnsupportedError(
            f"the loader deals out batches to {shares} of {world_size} ranks (tensor, context or sequence parallelism):"
            " ranks that share their batches cannot be balanced"
        )


def _batch_size(loader: Any, world_size: int) -> int:
    """Samples of a rank in a batch."""
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher

    if isinstance(loader.dataset, IterableDataset):
        size = getattr(loader.dataset, "batch_size", None) or loader.batch_size
        is_shared = bool(getattr(loader.dataset, "split_batches", False))
        is_shared |= isinstance(loader, DataLoaderDispatcher) and loader.split_batches
    else:
        given = loader.batch_sampler
        is_shared = isinstance(given, BatchSamplerShard) and given.split_batches
        size = getattr(given, "batch_size", None)
    if not isinstance(size, int) or size < 1:
        raise UnsupportedError(
            f"{'the loader' if loader.batch_sampler is None else type(loader.batch_sampler).__name__} has no "
            "batch_size, so how many samples an optimizer step has is not known: give the loader a batch_size"
        )
    return max(size // world_size, 1) if is_shared else size


def _check_sizes(num_samples: int, num_drawn: int, rank: int) -> None:
    agreed = same_on_all_ranks(np.array([num_samples, num_drawn])).tolist()
    if agreed != [num_samples, num_drawn]:
        raise ConfigError(
            f"rank {rank} has a dataset of {num_samples} samples and an order of {num_drawn}, rank 0 one of "
            f"{agreed[0]} and {agreed[1]}: all ranks must have the same dataset"
        )


def _sampler(loader: Any) -> Any:
    from accelerate.data_loader import BatchSamplerShard

    given = loader.batch_sampler
    inner = given.batch_sampler if isinstance(given, BatchSamplerShard) else given
    sampler = getattr(inner, "sampler", None)
    if not hasattr(sampler, "__len__"):
        raise UnsupportedError(
            f"the batch sampler ({type(inner).__name__}) has no sampler of a known length, whose order a stream could "
            "follow: give the trainer a dataset and a sampler of the whole dataset"
        )
    return sampler


def _own_part(loader: Any, rank: int, world_size: int) -> tuple[Any, IterableYields]:
    """The iterable to go through on this rank, and what it yields there."""
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard

    dataset = loader.dataset
    if isinstance(dataset, IterableDatasetShard):
        return dataset.dataset, "all"
    datasets: Any = sys.modules.get("datasets")
    if datasets is None or not isinstance(dataset, datasets.IterableDataset):
        return dataset, "all"
    if isinstance(loader, DataLoaderDispatcher) and world_size > 1 and dataset._distributed is None:
        if dataset.num_shards < world_size:
            return dataset, "all"
        _check_order(dataset, rank)
        return dataset.shard(num_shards=world_size, index=rank), "worker"
    return dataset, "worker"  # accelerate or the user has taken this rank's shards


def _check_order(dataset: Any, rank: int) -> None:
    """Ranks that take shards of a shuffled stream must have shuffled them alike."""
    with random_states_kept():
        first = np.array([sum_of(item) for item in itertools.islice(iter(dataset), NUM_FIRST)], dtype=np.int64)
    if same_on_all_ranks(first).tolist() != first.tolist():
        raise ConfigError(
            f"rank {rank} goes through its streaming dataset in another order than rank 0, so samples would be lost "
            "and come twice: shuffle it by a seed that is the same on all ranks, shuffle(seed=...)"
        )


def _device(loader: Any) -> Any:
    from accelerate import PartialState
    from accelerate.data_loader import DataLoaderDispatcher

    return PartialState().device if isinstance(loader, DataLoaderDispatcher) else loader.device
