"""Makes a loader that accelerate has prepared yield bundles of balanced microbatches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from odc.balance.checks import IntArray
from odc.errors import UnsupportedError
from odc.trainers.batches import BalancedBatches, Bundle, Microbatch
from odc.trainers.checks import check_rows
from odc.trainers.options import BalanceOptions
from odc.trainers.packing import PackedDataset, check_batches, collate_sample, random_states_kept
from odc.trainers.prepared import DealtOut, check_loader, same_on_all_ranks

# How many tokens each sample of a dataset has


logger = logging.getLogger("odc")
_NUM_COMPARED = 8


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
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
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

    lengths: list[int] = []
    for batch in dataset.with_format("arrow").select_columns("input_ids").iter(batch_size=10_000):
        lengths += pc.list_value_length(batch["input_ids"]).to_pylist()
    return lengths


def _num_tokens(sample: Any) -> int:
    has_ids = isinstance(sample, Mapping) or hasattr(sample, "keys")
    if not has_ids or "input_ids" not in sample:
        raise UnsupportedError(
            f"the dataset's samples have no input_ids (a sample is a {type(sample).__name__}): tokenize the dataset "
            "before training, so that lengths are known"
        )
    return int(np.shape(sample["input_ids"])[-1])


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
    *,
    rank: int,
    world_size: int,
    accumulation_steps: int,
    configs: Sequence[object] = (),
    length_column: str = "length",
) -> Any:
    """``loader`` with the same dataset, samples per optimizer step, length, workers and device, but a
    :class:`~odc.trainers.batches.Bundle` in place of each batch.

    It is a loader of accelerate's own class, so skipping batches (to resume), epochs, random states and the end of the
    loader work as they do for any other. Collective: ranks go by the lengths that the first one finds.

    Args:
        configs: see :func:`~odc.trainers.checks.configs_of`.

    Raises:
        UnsupportedError: the loader cannot be balanced; names the reason.
        ConfigError: a sample is longer than ``options.max_tokens``.
    """
    from accelerate.data_loader import BatchSamplerShard, DataLoaderShard

    _check(loader, world_size)
    given = loader.batch_sampler
    if isinstance(given, BatchSamplerShard):
        inner, even, split = given.batch_sampler, given.even_batches, given.split_batches
    else:
        inner, even, split = DealtOut(given) if DealtOut.is_of(loader) else given, False, False

    def shard_of(batches: Any, of_rank: int) -> Any:
        return BatchSamplerShard(batches, world_size, of_rank, split_batches=split, even_batches=even)

    with random_states_kept():
        lengths, example = _tried_out(loader, length_column, batch_size=getattr(inner, "batch_size", None))
    lengths = same_on_all_ranks(lengths)
    planner = options.planner(lengths, world_size, next(iter(configs), None))
    dataset = PackedDataset(
        loader.dataset,
        loader.collate_fn,
        planner,
        lengths,
        rank,
        example,
        keeps_limit=options.max_tokens is not None,
        may_split=world_size == 1 or not options.equal_counts,
        context=check_rows(configs, int(lengths.max(initial=1)), planner.job.max_tokens),
        late_binding=options.late_binding and world_size > 1,
    )
    batches = BalancedBatches(
        inner, shard_of, world_size, accumulation_steps, split_batches=split, agree=same_on_all_ranks
    )
    made = DataLoaderShard(
        dataset,
        batch_sampler=batches,
        collate_fn=_as_it_is,
        **{name: getattr(loader, name) for name in _SAME},
        **{name: vars(loader)[name] for name in _SAME_OF_ACCELERATE if name in vars(loader)},
    )
    made.iteration = getattr(loader, "iteration", 0)
    return made


def _as_it_is(bundle: Bundle) -> Bundle:
    return bundle


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


def _check(loader: Any, world_size: int) -> None:
    from accelerate.data_loader import DataLoaderDispatcher
    from torch.utils.data import IterableDataset

    if isinstance(loader.dataset, IterableDataset):
        raise UnsupportedError(
            f"{type(loader.dataset).__name__}: an iterable dataset, whose lengths show when samples are read, cannot "
            "be balanced by a policy: stream it (odc run --online --max-tokens N, or online=True), or use a map-style "
            "dataset"
        )
    if isinstance(loader, DataLoaderDispatcher):
        raise UnsupportedError(
            "dispatch_batches: rank 0 reads all batches and sends them out one by one, in step; set "
            "dispatch_batches=False"
        )
    check_loader(loader, world_size)
