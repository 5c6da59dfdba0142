"""Reads from a loader that accelerate has prepared: samples per batch, their order, and this rank's part."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from odc.balance.checks import IntArray
from odc.balance.data.samples import NUM_FIRST, IterableYields, sum_of
from odc.balance.random_numbers import random_generator
from odc.errors import ConfigError, UnsupportedError
from odc.trainers.packing import random_states_kept


def same_on_all_ranks(values: IntArray) -> IntArray:
    """Rank 0's (any number of) integers, for all ranks. Collective.

    Samplers that are not seeded by the epoch draw from torch's global random state. Ranks that run different numbers of
    microbatches use it differently (dropout), and would plan different minibatches from the second epoch on. So would
    ranks that read different lengths of the same samples.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast

    state = PartialState()
    if state.num_processes == 1:
        return values
    size = int(broadcast(torch.tensor([values.size], device=state.device)).item())
    mine = np.resize(values, size)  # of the size that rank 0 sends
    agreed: IntArray = broadcast(torch.tensor(mine, dtype=torch.int64, device=state.device)).cpu().numpy()
    return agreed


class DataRanks(NamedTuple):
    """This process among those that get different samples. Tensor parallel ranks share theirs."""

    rank: int
    world_size: int

    group: dist.ProcessGroup | None
    """Of those; None: all."""

    @classmethod
    def of(cls, accelerator: Any) -> DataRanks:
        """By the mesh of a ``ParallelismConfig``, as accelerate's own loaders deal out batches.

        Raises:
            UnsupportedError: ranks share out the tokens of a row, too.
        """
        config: Any = getattr(accelerator, "parallelism_config", None)
        mesh = None if config is None else accelerator.torch_device_mesh
        if config is not None and (config.cp_enabled or config.sp_enabled):
            raise UnsupportedError(
                f"cp_size={config.cp_size}, sp_size={config.sp_size}: ranks share out each row of a batch, for which "
                "accelerate drops attention masks, so packed samples would attend to one another. Train it without "
                "balancing (`odc run` alone)"
            )
        if mesh is None:
            return cls(accelerator.process_index, accelerator.num_processes, None)
        if not config.dp_dim_names:
            return cls(0, 1, None)
        mine = mesh["dp"]  # replicas and shards in one dimension: accelerate has made it
        return cls(mine.get_local_rank(), mine.size(), mine.get_group())


class DealtOut:
    """The batches of all ranks, rank after rank, of a batch sampler that knows its rank and gives it its own ones.

    That is ms-swift's, in a loader that accelerate has not prepared. accelerate's samplers have all batches, and are
    wrapped in what deals them out.
    """

    @staticmethod
    def is_of(loader: Any) -> bool:
        """Whether the loader has such a sampler."""
        kind = type(loader.batch_sampler)
        return all(isinstance(getattr(kind, name, None), property) for name in ("rank", "world_size"))

    def __init__(self, of_rank: Any) -> None:
        self._of_rank = of_rank
        self.batch_size: int = of_rank.batch_size
        self.drop_last: bool = of_rank.drop_last

    def __len__(self) -> int:
        return len(self._of_rank) * int(self._of_rank.world_size)

    def set_epoch(self, epoch: int) -> None:
        self._of_rank.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        kind = type(self._of_rank)
        samplers = []
        for rank in range(self._of_rank.world_size):
            samplers.append(copy.copy(self._of_rank))
            samplers[-1].__class__ = type(kind.__name__, (kind,), {"rank": rank})
        for batches in zip(*samplers, strict=True):  # it gives all ranks as many
            yield from batches


def check_loader(loader: Any, world_size: int) -> None:
    """Refuse what is no loader that accelerate has made, and deals out to this many ranks.

    Raises:
        UnsupportedError: names what it is.
    """
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard

    is_iterable, knows_rank = isinstance(loader.dataset, IterableDataset), DealtOut.is_of(loader)
    known = (
        knows_rank or isinstance(loader, DataLoaderShard) or (is_iterable and isinstance(loader, DataLoaderDispatcher))
    )
    if not known or getattr(loader, "use_stateful_dataloader", False):
        raise UnsupportedError(
            f"the training loader is a {type(loader).__name__}"
            f"{' with use_stateful_dataloader' if known else ''}: expected what Accelerator.prepare makes of a torch "
            "DataLoader" + ("" if is_iterable else ", with dispatch_batches=False")
        )
    dealer = loader.dataset if is_iterable else loader.batch_sampler
    shares = getattr(dealer, "world_size" if knows_rank else "num_processes", world_size)
    if shares != world_size:
        raise UnsupportedError(
            f"the loader deals out batches to {shares} ranks, and {world_size} have samples of their own: prepare it "
            "with the Accelerator that it is trained with"
        )
    if world_size > 1 and not (is_iterable or knows_rank or isinstance(loader.batch_sampler, BatchSamplerShard)):
        raise UnsupportedError(
            f"the batch sampler ({type(loader.batch_sampler).__name__}) is not dealt out to ranks by accelerate: give "
            "the trainer a dataset and a sampler of the whole dataset"
        )


def batch_size_of(loader: Any, world_size: int) -> int:
    """Samples of a rank in a batch.

    Raises:
        UnsupportedError: it has no size.
    """
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


def _check_sizes(num_samples: int, num_drawn: int, rank: int) -> None:
    agreed = same_on_all_ranks(np.array([num_samples, num_drawn])).tolist()
    if agreed != [num_samples, num_drawn]:
        raise ConfigError(
            f"rank {rank} has a dataset of {num_samples} samples and an order of {num_drawn}, rank 0 one of "
            f"{agreed[0]} and {agreed[1]}: all ranks must have the same dataset"
        )


class AgreedOrder:
    """The order of a loader's sampler on rank 0, for all ranks (see :func:`same_on_all_ranks`). Collective.

    What it draws from the random states of the process is drawn from states that the epoch alone decides, so that an
    epoch has the same order when training is resumed in it.

    Raises:
        UnsupportedError: the loader has no sampler of a known length.
        ConfigError: ranks have datasets of different sizes.
    """

    def __init__(self, loader: Any, rank: int) -> None:
        self._sampler = _sampler(loader)
        _check_sizes(len(loader.dataset), len(self._sampler), rank)
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


def own_part(loader: Any, rank: int, world_size: int) -> tuple[Any, IterableYields]:
    """The iterable to go through on this rank, and what it yields there. Collective, for streams of ``datasets``.

    Raises:
        ConfigError: ranks have shuffled it differently.
    """
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


def device_of(loader: Any) -> Any:
    """Where the loader moves its batches; None: it does not."""
    from accelerate import PartialState
    from accelerate.data_loader import DataLoaderDispatcher

    return PartialState().device if isinstance(loader, DataLoaderDispatcher) else loader.device
