"""An existing ``torch.utils.data.DataLoader`` as a stream: its data set, collate, order and workers. (Needs torch.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import data as torch_data

from odc.balance.data.collate import IGNORED
from odc.balance.data.old_names import as_objects
from odc.balance.data.order import Order
from odc.balance.data.reader import ReadOptions
from odc.balance.data.stream import StreamLoader
from odc.errors import shown


def stream(
    dataloader: torch_data.DataLoader[Any],
    *,
    length: Callable[[Any], int],
    dummy: Callable[[], Any] | None = None,
    **options: Any,
) -> StreamLoader[Any, Any]:
    """Make a :class:`~odc.balance.StreamLoader` from a DataLoader: the same samples and ``collate_fn``, in batches of a
    token budget.

    Defaults of the arguments come from the DataLoader: ``dataset``, ``collate_fn``, ``read``, and ``order`` with the
    shuffle and seed of its sampler, or with the sampler itself if it is not one of torch's (then it must give the same
    order on all ranks). An ``order`` or ``read`` that you give replaces the DataLoader's as a whole.
    Without ``mesh``, rank and world size are those of a ``DistributedSampler``, otherwise of ``torch.distributed``.
    ``batch_size`` and ``drop_last`` are ignored: no sample is left out. The DataLoader is not changed.

    Args:
        dataloader: a DataLoader of a dataset with indices or of an iterable.
        length: see :class:`~odc.balance.StreamLoader`.
        dummy: makes the batch for a step in which this rank has no samples. Default: the batch of one sample of this
            rank, with all ``"labels"`` -100.
        options: ``grouping``, and further arguments of :class:`~odc.balance.StreamLoader`.

    Raises:
        TypeError: ``dataloader`` is not a DataLoader.
        ValueError: the DataLoader has its own batch sampler, or an option is refused.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataloader = DataLoader(dataset, batch_size=4, shuffle=True, collate_fn=pad)  # pad to the longest
        >>> budget = Grouping("token-budget", max_tokens=64)
        >>> loader = stream(dataloader, grouping=budget, length=lambda sample: len(sample["input_ids"]))
        >>> batches = [batch for minibatch in loader for batch in minibatch.microbatches]
        >>> max(batch["input_ids"].numel() for batch in batches) <= 64
        True
        >>> loader.close()
    """
    if not isinstance(dataloader, torch_data.DataLoader):
        raise TypeError(f"dataloader={shown(dataloader)}: expected a torch.utils.data.DataLoader")
    is_old = "max_tokens" in options and options.get("grouping") in ("pool-sort", "none")
    if is_old and dataloader.batch_size is not None:
        options.setdefault("batch_size", dataloader.batch_size)
    order, read = _order_of(dataloader), read_options_of(dataloader)
    taken = {"order": order, "read": read, **as_objects(options, order, read)}
    if options.get("mesh") is None:
        taken = {**_ranks_of(dataloader), **taken}
    return StreamLoader(dataloader.dataset, _Collate(dataloader.collate_fn, dummy), length=length, **taken)


class _Collate:
    """A ``collate_fn`` that was never asked for a batch of nothing."""

    def __init__(self, collate: Callable[[list[Any]], Any], dummy: Callable[[], Any] | None) -> None:
        self._collate = collate
        self._dummy = dummy
        self._sample: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        if samples:
            self._sample = self._sample or samples[:1]
            return self._collate(samples)
        if self._dummy is not None:
            return self._dummy()
        batch = self._collate(self._sample) if self._sample else None
        if not (isinstance(batch, Mapping) and isinstance(batch.get("labels"), torch.Tensor)):
            raise ValueError(
                "this rank has no samples in a step that the other ranks train on, and no batch of it has labels that "
                "could be masked: pass dummy=, a function that makes a batch whose summed loss is 0"
            )
        return {**batch, "labels": torch.full_like(batch["labels"], IGNORED)}


def _ranks_of(dataloader: torch_data.DataLoader[Any]) -> dict[str, Any]:
    sampler = dataloader.sampler
    if isinstance(sampler, torch_data.DistributedSampler):
        return {"rank": sampler.rank, "world_size": sampler.num_replicas}
    if dist.is_available() and dist.is_initialized():
        return {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    return {"rank": 0, "world_size": 1}


def _order_of(dataloader: torch_data.DataLoader[Any]) -> Order:
    if isinstance(dataloader.dataset, torch_data.IterableDataset):
        return Order()
    sampler: Any = dataloader.sampler
    if dataloader.batch_size is None and dataloader.batch_sampler is not None:  # given by the user
        if type(dataloader.batch_sampler) is not torch_data.BatchSampler:
            raise ValueError(
                f"the DataLoader has a batch sampler of its own, a {type(dataloader.batch_sampler).__name__}, whose "
                "batches a stream would not keep: give the DataLoader its sampler instead, or call "
                "odc.balance.StreamLoader"
            )
        sampler = dataloader.batch_sampler.sampler
    if isinstance(sampler, torch_data.DistributedSampler):
        return Order(shuffle=sampler.shuffle, seed=sampler.seed)
    if type(sampler) is torch_data.SequentialSampler:
        return Order(shuffle=False)
    is_plain = type(sampler) is torch_data.RandomSampler and not sampler.replacement
    if is_plain and len(sampler) == len(dataloader.dataset):  # type: ignore[arg-type]
        generator = sampler.generator
        return Order(seed=0 if generator is None else generator.initial_seed())
    return Order(sampler=sampler)


def read_options_of(dataloader: torch_data.DataLoader[Any]) -> ReadOptions:
    """How its workers start and work."""
    if not dataloader.num_workers:
        return ReadOptions()
    return ReadOptions(
        num_workers=dataloader.num_workers,
        prefetch_factor=dataloader.prefetch_factor,
        persistent_workers=dataloader.persistent_workers,
        multiprocessing_context=dataloader.multiprocessing_context,
        worker_init_fn=dataloader.worker_init_fn,
        worker_timeout_s=dataloader.timeout or ReadOptions.worker_timeout_s,
    )
