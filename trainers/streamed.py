"""Balanced minibatches of samples whose lengths are known only once they are read: a stream replaces a prepared loader.

The length of a sample is that of the user's collator's output for it, computed in a worker if there are any. Ranks fill
equal quotas of cost (:class:`~odc.balance.StreamLoader`, ``EqualMinibatches``). So a step has other samples than
without balancing, but the same number on average, and an epoch has the same number of steps. A trainer's checkpoints
hold the position of the stream: a file of each rank, in the folder of its random state.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from odc.balance import EqualMinibatches, Grouping, Order, StreamLoader
from odc.balance.data.from_torch import read_options_of
from odc.balance.data.reader import as_it_is
from odc.errors import ConfigError
from odc.trainers.accelerate import AgreedOrder, DataRanks, PreparedLoader, random_states_kept
from odc.trainers.batches import Bundle, Microbatch, StepEnd, cut, microbatches_of
from odc.trainers.models import check_rows, default_cost
from odc.trainers.options import BalanceOptions
from odc.trainers.packing import Collate, check_batches, check_sample, collate_alone, num_first_labels, pack

logger = logging.getLogger("odc")
_LEAST_POOL, _POOLED_MINIBATCHES = 256, 16


class StreamedBatches:
    """The bundles of a stream, in the place of a batch sampler: what yields so many batches per optimizer step.

    There is one bundle for each batch that the rank would have got in a step. Those of steps that are done (after
    :meth:`load_state_dict`) are empty placeholders, for a library that skips them.

    Args:
        stream: whose batches are bundles of one packed row (:class:`Packer`).
        accumulation_steps: bundles per step.
        batch_size: samples of a rank in a bundle on average, for libraries that look at it.
        num_steps: optimizer steps of an epoch, for a stream without an end.
    """

    drop_last = False

    def __init__(
        self,
        stream: StreamLoader[Microbatch, Bundle],
        packer: Packer,
        accumulation_steps: int,
        batch_size: int,
        num_steps: int | None,
    ) -> None:
        self.stream = stream
        self.batch_size = batch_size
        self.num_processes = stream.world_size
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

    @property
    def sampler(self) -> StreamedBatches:
        """Libraries look here, or one level deeper, for something that has an epoch."""
        return self

    batch_sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of this epoch."""
        self.stream.set_epoch(epoch)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an epoch.

        Raises:
            TypeError: there are as many as the data gives.
        """
        return len(self.stream) if self._num_steps is None else self._num_steps

    def state_dict(self) -> dict[str, Any]:
        """Before the first step of an iteration; behind a step, that of its end."""
        return self._state(self._resumed.get(self.stream.epoch, 0))

    def _state(self, num_done: int) -> dict[str, Any]:
        return {"step": num_done, "stream": self.stream.state_dict()}

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
            rows = list(minibatch.microbatches) or [self._packer([])]
            bundles = [
                Bundle(microbatches_of(mine), sum(row.num_first_labels for row in mine))
                for mine in cut(rows, self._accumulation_steps)
            ]
            bundles[-1].end = StepEnd(minibatch.num_samples, self._state(num_done))
            yield from bundles


def streamed_loader(
    loader: Any,
    options: BalanceOptions,
    ranks: DataRanks,
    *,
    accumulation_steps: int,
    configs: Sequence[object] = (),
    num_steps: int | None = None,
    timeout_s: float = 1800.0,
) -> Any:
    """``loader`` with the same dataset, workers and device, and as many samples per optimizer step on average, but a
    :class:`~odc.trainers.batches.Bundle` in place of each batch. Its ``batch_sampler`` is a :class:`StreamedBatches`.

    A dataset with indices comes in the order of its sampler, every sample of an epoch once, whatever ``drop_last`` and
    ``even_batches`` say, and an epoch has as many optimizer steps as it has without ``drop_last``. An iterable is
    shared out by samples, or by the shards of ``datasets``.

    Args:
        options: with ``online``.
        configs: see :func:`~odc.trainers.models.configs_of`.
        num_steps: of an iterable dataset only: optimizer steps, for which it begins anew as often as need be; None: as
            many as it gives once.
        timeout_s: most seconds to wait for a rank that does not come for its next step.

    Raises:
        UnsupportedError: the loader cannot be streamed; names the reason.
        ConfigError: ``pool_size`` is too small for a step, or ranks have datasets of different sizes.
    """
    from accelerate.data_loader import DataLoaderShard

    assert options.max_tokens is not None  # checked by the options
    rank, world_size, group = ranks
    given = PreparedLoader(loader, world_size)
    minibatch_size = given.batch_size * accumulation_steps
    if given.is_iterable:
        dataset, iterable_yields = given.own_part(rank)
        order = Order(infinite=num_steps is not None, iterable_yields=iterable_yields)
    else:
        dataset, order = loader.dataset, Order(infinite=num_steps is not None, sampler=AgreedOrder(given, rank))
    if options.pool_size is not None and options.pool_size < 4 * minibatch_size:
        raise ConfigError(
            f"pool_size={options.pool_size} with {minibatch_size} samples of a rank in a step (batch size x "
            f"accumulation steps): expected at least {4 * minibatch_size}, as some are chosen from while others are "
            "trained on"
        )
    packer = Packer()
    stream: StreamLoader[Microbatch, Bundle] = StreamLoader(
        dataset,
        packer,
        rank,
        world_size,
        transform=_Collated(loader.collate_fn, check_rows(configs, 1, options.max_tokens)),
        length=_num_tokens,
        grouping=Grouping(
            "pack",
            max_tokens=options.max_tokens,
            pool_size=options.pool_size or max(_LEAST_POOL, _POOLED_MINIBATCHES * minibatch_size),
        ),
        align=EqualMinibatches(
            minibatch_size,
            cost=options.cost or default_cost(next(iter(configs), None)),
            timeout_s=timeout_s,
        ),
        order=order,
        loss_scaling="none",  # the trainer counts the labels of all ranks
        check_batches=False,
        group=group,
        read=read_options_of(loader),
    )
    return DataLoaderShard(
        _AsGiven(None if given.is_iterable else len(loader.dataset)),
        batch_sampler=StreamedBatches(stream, packer, accumulation_steps, given.batch_size, num_steps),
        collate_fn=as_it_is,
        pin_memory=loader.pin_memory,
        device=given.device,
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


class Packer:
    """Packs what :class:`_Collated` made into a bundle of one row; of nothing, one without loss and with the columns of
    the others."""

    def __init__(self) -> None:
        self.example: Microbatch = {}

    def __call__(self, samples: list[Microbatch]) -> Bundle:
        kept = [sample for sample in samples if sample["input_ids"].shape[1]]
        if kept and not self.example:
            self.example = kept[0]
        for sample in kept:
            check_sample("a sample", sample, self.example)
        return Bundle([pack(kept, self.example)], num_first_labels(samples))


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
        check_sample("a sample", alone, {}, self._context)
        if not self._is_checked:
            self._check(sample, alone["input_ids"].shape[1])
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


# In checkpoints


_AGAIN = (
    "samples are read again from the beginning of the epoch, and those of the steps that are done are skipped. To "
    "begin the data anew instead: ignore_data_skip=True"
)


def save_stream(trainer: Any, folder: Path, end: StepEnd) -> None:
    """Into a checkpoint, which holds the step that the trainer is in as done."""
    path = _path(folder, trainer.accelerator.process_index)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(end.state))
    os.replace(unfinished, path)


def load_stream(trainer: Any, folder: Path, batches: StreamedBatches) -> None:
    """From a checkpoint that the trainer goes on from. Collective.

    Where a rank finds nothing in it, or the trainer counts its steps in another way than they came (an epoch was
    stopped early), the stream is gone through again from the beginning of the epoch, and a warning says so.

    Raises:
        ConfigError: the checkpoint is of another number of ranks, or a file of it cannot be read.
        ValueError: it is of another stream; names what differs.
    """
    accelerator = trainer.accelerator
    state = _read(_path(folder, accelerator.process_index))
    counted = state is not None and _is_counted(state, trainer, batches)
    mine = [-1 if state is None else int(state["stream"]["world_size"]), int(counted)]
    ranks = accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist()
    others = {size for size, _ in ranks if size not in (-1, batches.num_processes)}
    if others:
        raise ConfigError(
            f"{folder} is of {others.pop()} ranks, this job has {batches.num_processes}: their streams are not the "
            "same, so neither are the steps that are done. Resume with as many ranks, or set ignore_data_skip=True, "
            "which begins the data anew"
        )
    missing = [rank for rank, (size, _) in enumerate(ranks) if size == -1]
    if missing:
        logger.warning("odc: %s has no odc_stream_*.json of ranks %s: %s", folder, missing, _AGAIN)
    elif not all(counted for _, counted in ranks):
        logger.warning("odc: %s was left in another epoch than its number of steps tells: %s", folder, _AGAIN)
    else:
        assert state is not None
        batches.load_state_dict(state)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text())
        numbers = (state["stream"]["world_size"], state["stream"]["epoch"], state["step"])
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"expected three integers, not {numbers}")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} does not say where a stream was ({type(error).__name__}: {error}): restore it, or remove the "
            "odc_stream_*.json of all ranks, so that samples are read again from the beginning of the epoch"
        ) from None
    return dict(state)


def _is_counted(state: dict[str, Any], trainer: Any, batches: StreamedBatches) -> bool:
    """Whether the epoch and its steps that are done are those that a trainer takes for done, left at a step's end."""
    epoch, step = divmod(int(trainer.state.global_step) - 1, batches.num_steps)
    return (state["stream"]["epoch"], state["step"]) == (epoch, step + 1)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"odc_stream_{rank}.json"
