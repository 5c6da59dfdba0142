"""Collated microbatches, made in this process or by workers that read ahead. (Needs torch.)"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils import data as torch_data

from odc.balance.checks import IntArray, as_cost, as_count
from odc.balance.data.loss_tokens import check_labels, check_tokens
from odc.errors import shown

SampleT = TypeVar("SampleT")
SampleT_co = TypeVar("SampleT_co", covariant=True)
BatchT = TypeVar("BatchT")


class Dataset(Protocol[SampleT_co]):
    """Anything that gives a sample for an index."""

    def __getitem__(self, index: int, /) -> SampleT_co: ...


@dataclass(frozen=True, eq=False)
class MicrobatchDataset(torch_data.Dataset[BatchT], Generic[SampleT, BatchT]):
    """A dataset of microbatches: its "index" is the list of the samples of one, its item their batch.

    Errors keep their type and are told which samples they are about.
    """

    dataset: Dataset[SampleT]
    collate: Callable[[list[SampleT]], BatchT]

    num_loss_tokens: IntArray | None
    """Tokens of each sample that have a loss, to compare labels with; None: labels are not looked at."""

    lengths: IntArray
    """Tokens of each sample, as they were planned with."""

    max_tokens: int | None
    """Most tokens in one microbatch; None: the user gave no limit."""

    def __getitem__(self, samples: list[int]) -> BatchT:
        read = [self._read(sample) for sample in samples]
        try:
            batch = self.collate(read)
        except Exception as error:
            name_samples(error, f"when samples {samples} were collated")
            raise
        if self.max_tokens is not None:
            check_tokens(batch, samples, read, self.lengths, self.max_tokens)
        if self.num_loss_tokens is not None:
            check_labels(batch, samples, int(self.num_loss_tokens[samples].sum()))
        return batch

    def _read(self, sample: int) -> SampleT:
        try:
            return self.dataset[sample]
        except Exception as error:
            name_samples(error, f"when sample {sample} was read")
            raise


class MicrobatchReader(Generic[BatchT]):
    """A ``torch.utils.data.DataLoader`` of microbatches that is told at each iteration which ones to make.

    Args: as of :class:`~odc.balance.MinibatchLoader`.

    Raises:
        ValueError: an argument is out of range, or is about workers where there are none.
    """

    def __init__(
        self,
        dataset: MicrobatchDataset[Any, BatchT],
        *,
        num_workers: int,
        prefetch_factor: int | None,
        pin_memory: bool,
        persistent_workers: bool,
        multiprocessing_context: str | BaseContext | None,
        worker_timeout_s: float,
        worker_init_fn: Callable[[int], None] | None,
    ) -> None:
        num_workers = as_count(num_workers, "num_workers", minimum=0)
        if prefetch_factor is not None:
            as_count(prefetch_factor, "prefetch_factor")  # torch takes 0, and then yields nothing
        timeout_s = as_cost(worker_timeout_s, "worker_timeout_s")
        about_workers = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers or None,
            "multiprocessing_context": multiprocessing_context,
        }
        if not num_workers:
            _refuse(about_workers)
        self._wanted = _Wanted()
        self._generator = torch.Generator()  # or DataLoader would draw its seed from the model's
        self._make: Callable[[], torch_data.DataLoader[BatchT]] = partial(
            torch_data.DataLoader,
            dataset,
            batch_size=None,
            sampler=self._wanted,
            collate_fn=_as_it_is,  # by default torch would make tensors of numpy arrays
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            multiprocessing_context=multiprocessing_context,
            timeout=timeout_s if num_workers else 0,
            worker_init_fn=worker_init_fn,
            generator=self._generator,
        )
        self._loader = self._make()

    def read(self, wanted: Iterator[list[int]], seed: int) -> Iterator[BatchT]:
        """The batches of these microbatches, in their order.

        Workers, seeded with ``seed``, start at the first batch and end with the iterator, unless they are
        persistent: then an iterator must not be used after the next one was made.
        """
        self._wanted.microbatches = wanted
        self._generator.manual_seed(seed)
        try:
            yield from self._loader
        except Exception as error:
            if self._loader.num_workers:
                # torch raises a worker's error in a frame that holds it, and by its callers the workers: with
                # that cycle they would wait for the garbage collector, and it for them, 5 s each.
                traceback.clear_frames(error.__traceback__)
            self._loader = self._make()  # one of the workers, if they are persistent, may be dead
            raise


class _Wanted:
    """What a ``DataLoader`` takes its indices from, one at a time, each when a worker is to get it."""

    def __init__(self) -> None:
        self.microbatches: Iterator[list[int]] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self.microbatches


def _as_it_is(batch: BatchT) -> BatchT:
    return batch


def _refuse(about_workers: Mapping[str, object]) -> None:
    for name, value in about_workers.items():
        if value is not None:
            raise ValueError(f"{name}={shown(value)} without workers: leave it out, or pass num_workers of at least 1")


def name_samples(error: Exception, when: str) -> None:
    """Add ``when`` to an error that is about to be raised again.

    Raises:
        RuntimeError: with ``error`` as its cause, where it cannot be raised again as it is.
    """
    # Not re-raised as it is: a StopIteration, which would pass for the end of the data, and any error in
    # Python 3.10, which has no notes. torch sends the notes of a worker's error along in the message.
    if isinstance(error, StopIteration) or sys.version_info < (3, 11):
        raise RuntimeError(f"{type(error).__name__} {when}: {error}") from error
    error.add_note(f"({when})")
