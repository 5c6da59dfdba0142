"""Reads requested samples, in this process or ahead of time in workers. (Needs torch.)"""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic, TypeVar

import torch
from torch.utils import data as torch_data

from odc.balance.checks import as_cost, as_count, as_optional_count, keep
from odc.errors import shown

_PR_SET_PDEATHSIG = 1

WantedT = TypeVar("WantedT")
ItemT = TypeVar("ItemT")


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a loader reads samples: in this process, or ahead of time in worker processes.

    The options work as in ``torch.utils.data.DataLoader``. One item of a worker is a microbatch in a
    :class:`~odc.balance.MinibatchLoader`, and a few samples in a :class:`~odc.balance.StreamLoader`, which collates in
    this process.

    Raises:
        ValueError: an option is out of range, or needs workers where ``num_workers`` is 0.

    Example:
        >>> ReadOptions(num_workers=4, prefetch_factor=8).num_ahead
        32
    """

    num_workers: int = 0
    """Processes that read ahead. 0: this process reads samples when the loop asks for their minibatch."""

    prefetch_factor: int | None = None
    """Items that each worker prepares in advance; default 2."""

    pin_memory: bool = False
    """Copy the tensors of the batches into pinned memory, for faster copies to the GPU. (``MinibatchLoader`` only.)"""

    persistent_workers: bool = False
    """Keep the workers between epochs, until the loader is closed or deleted."""

    multiprocessing_context: str | BaseContext | None = None
    """How workers start: "fork", "spawn", "forkserver", or a context. "spawn" and "forkserver" pickle the dataset, its
    functions and ``worker_init_fn``. Default: Python's."""

    worker_timeout_s: float = 600.0
    """Maximum seconds to wait for one item of a worker; 0: no limit, as in torch."""

    worker_init_fn: Callable[[int], None] | None = None
    """Called in each worker with its number, from 0, before it reads. In a ``MinibatchLoader`` the dataset is
    ``torch.utils.data.get_worker_info().dataset.dataset`` there."""

    def __post_init__(self) -> None:
        keep(
            self,
            num_workers=as_count(self.num_workers, "num_workers", minimum=0),
            prefetch_factor=as_optional_count(self.prefetch_factor, "prefetch_factor"),  # torch takes 0: yields nothing
        )
        as_cost(self.worker_timeout_s, "worker_timeout_s")
        about_workers = {
            "prefetch_factor": self.prefetch_factor,
            "persistent_workers": self.persistent_workers or None,
            "multiprocessing_context": self.multiprocessing_context,
        }
        for name, value in about_workers.items():
            if value is not None and not self.num_workers:
                raise ValueError(
                    f"{name}={shown(value)} without workers: leave it out, or pass num_workers of at least 1"
                )

    @property
    def num_ahead(self) -> int:
        """Items that are made before the first of them is taken."""
        return self.num_workers * (2 if self.prefetch_factor is None else self.prefetch_factor)


class Reader(Generic[WantedT, ItemT]):
    """A ``torch.utils.data.DataLoader`` that is told at each iteration which items of a dataset to make.

    Args:
        dataset: gives ``dataset[wanted]`` for what is wanted: the samples of a microbatch, say.
    """

    def __init__(self, dataset: torch_data.Dataset[ItemT], options: ReadOptions) -> None:
        self.num_workers = options.num_workers
        self.num_ahead = options.num_ahead
        self._wanted = _Wanted()
        self._generator = torch.Generator()  # or DataLoader would draw its seed from the model's
        self._make: Callable[[], torch_data.DataLoader[ItemT]] = partial(
            torch_data.DataLoader,
            dataset,
            batch_size=None,
            sampler=self._wanted,
            collate_fn=as_it_is,  # by default torch would make tensors of numpy arrays
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            pin_memory=options.pin_memory,
            persistent_workers=options.persistent_workers,
            multiprocessing_context=options.multiprocessing_context,
            timeout=options.worker_timeout_s if options.num_workers else 0,
            worker_init_fn=_FirstInWorker(options.worker_init_fn),
            generator=self._generator,
        )
        self._loader = self._make()

    def close(self) -> None:
        """End persistent workers. The next iteration starts others."""
        self._loader = self._make()

    def read(self, wanted: Iterator[WantedT], seed: int) -> Iterator[ItemT]:
        """What is wanted, in its order.

        Workers, seeded with ``seed``, start at the first item and end with the iterator, unless they are
        persistent: then an iterator must not be used after the next one was made.
        """
        self._wanted.items = wanted
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


@dataclass
class _FirstInWorker:
    """What a worker does first: see to it that it ends with its parent, then what the user wants.

    A worker has copies of its parent's connections. As long as it lives, they are open, and the other ranks wait for a
    parent that is dead; in the middle of a slow sample it would not look for it.
    """

    then: Callable[[int], None] | None

    def __call__(self, number: int) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if self.then is not None:
            self.then(number)


class _Wanted:
    """What a ``DataLoader`` takes its indices from, one at a time, each when a worker is to get it."""

    def __init__(self) -> None:
        self.items: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.items


def as_it_is(item: ItemT) -> ItemT:
    """No other than what was given."""
    return item


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
