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
import torch.distributed as dist
from torch.utils.data import Dataset, IterableDataset

from odc.balance import EqualMinibatches, Grouping, Order, StreamLoader
from odc.balance.data.collate import IGNORED
from odc.balance.data.from_torch import read_options_of
from odc.errors import ConfigError, UnsupportedError
from odc.trainers.batches import Bundle, Microbatch, StepEnd, cut
from odc.trainers.checks import check_rows
from odc.trainers.options import BalanceOptions, default_cost
from odc.trainers.packing import Collate, check_batches, collate_alone, pack, random_states_kept
from odc.trainers.prepared import AgreedOrder, batch_size_of, check_loader, device_of, own_part

_LEAST_POOL, _POOLED_MINIBATCHES = 256, 16


class StreamedBatches:
    """The bundles of a stream, in the place of a batch sampler: what yields so many batches per optimizer step.

    There is one bundle for each batch that the rank would have got in a step. Those of steps that are done (after
    :meth:`load_state_dict`) are empty placeholders, for a library that skips them.

    Args:
        stream: whose batches are packed rows, each with the number of first labels (:class:`Packer`).
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
            rows = list(minibatch.microbatches) or [self._packer([])]
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
    group: dist.ProcessGroup | None = None,
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
    check_loader(loader, world_size)
    batch_size = batch_size_of(loader, world_size)
    is_iterable = isinstance(loader.dataset, IterableDataset)
    if is_iterable:
        dataset, iterable_yields = own_part(loader, rank, world_size)
        order = Order(infinite=num_steps is not None, iterable_yields=iterable_yields)
    else:
        dataset, order = loader.dataset, Order(sampler=AgreedOrder(loader, rank))
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
    batches = StreamedBatches(stream, packer, accumulation_steps, batch_size, num_steps if is_iterable else None)
    return DataLoaderShard(
        _AsGiven(None if is_iterable else len(loader.dataset)),
        batch_sampler=batches,
        collate_fn=_as_it_is,
        pin_memory=loader.pin_memory,
        device=device_of(loader),
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


class Packed:
    """A packed row."""

    def __init__(self, row: Microbatch, num_first_labels: int) -> None:
        self.row = row
        self.num_first_labels = num_first_labels
        """See :class:`~odc.trainers.batches.Bundle`."""


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


# In checkpoints


logger = logging.getLogger("odc")

_AGAIN = (
    "samples are read again from the beginning of the epoch, and those of the steps that are done are skipped. To "
    "begin the data anew instead: ignore_data_skip=True"
)


def save_stream(trainer: Any, folder: Path, end: StepEnd) -> None:
    """Into a checkpoint, which holds the step that the trainer is in as done."""
    path = _path(folder, trainer.accelerator.process_index)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(state_of(end)))
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
    counted = state is not None and _place(state) == _counted_by(trainer, batches)
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


def _place(state: dict[str, Any]) -> tuple[int, int]:
    return int(state["stream"]["epoch"]), int(state["step"])


def _counted_by(trainer: Any, batches: StreamedBatches) -> tuple[int, int]:
    """The epoch and its steps that a trainer takes for done, as it was left at the end of a step."""
    in_epoch = batches.num_steps or trainer.args.max_steps
    epoch, step = divmod(int(trainer.state.global_step) - 1, in_epoch)
    return epoch, step + 1


def _path(folder: Path, rank: int) -> Path:
    return folder / f"odc_stream_{rank}.json"
