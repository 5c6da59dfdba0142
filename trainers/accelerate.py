"""Reads from a loader that accelerate has prepared: samples per batch, their order, and this rank's part."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from odc.balance.checks import IntArray
from odc.balance.data.samples import NUM_FIRST, IterableYields, sum_of
from odc.balance.random_numbers import random_generator
from odc.errors import ConfigError, UnsupportedError

# Ranks


class DataRanks(NamedTuple):
    """This process among those that get different samples. Tensor parallel ranks share theirs."""

    rank: int
    world_size: int

    group: dist.ProcessGroup | None = None
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
            return cls(accelerator.process_index, accelerator.num_processes)
        if not config.dp_dim_names:
            return cls(0, 1)
        mine = mesh["dp"]  # replicas and shards in one dimension: accelerate has made it
        return cls(mine.get_local_rank(), mine.size(), mine.get_group())

    def num_partners(self, accelerator: Any) -> int:
        """Ranks that have the same samples as this one, itself included."""
        return int(accelerator.num_processes) // self.world_size


def same_on_all_ranks(values: IntArray) -> IntArray:
    """Rank 0's (any number of) integers, for all ranks. Collective.

    Samplers that are not seeded by the epoch draw from torch's global random state. Ranks that run different numbers of
    microbatches use it differently (dropout), and would plan different minibatches from the second epoch on. So would
    ranks that read different lengths of the same samples.
    """
    if not dist.is_initialized():
        return values
    from accelerate import PartialState
    from accelerate.utils import broadcast

    device = PartialState().device
    size = int(broadcast(torch.tensor([values.size], device=device)).item())
    mine = np.resize(values, size)  # of the size that rank 0 sends
    agreed: IntArray = broadcast(torch.tensor(mine, dtype=torch.int64, device=device)).cpu().numpy()
    return agreed


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Collators, samplers and datasets that are tried out in the block draw from generators that are put back behind
    it."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


# Loaders


class DealtOut:
    """The batches of all ranks, rank after rank, of a batch sampler that knows its rank and gives it its own ones.

    That is ms-swift's, in a loader that accelerate has not prepared. accelerate's samplers have all batches, and are
    wrapped in what deals them out.
    """

    @staticmethod
    def is_of(batches: Any) -> bool:
        """Whether that is such a sampler."""
        return all(isinstance(getattr(type(batches), name, None), property) for name in ("rank", "world_size"))

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


class PreparedLoader:
    """What a loader that accelerate has made reads, and how it deals out batches.

    Args:
        loader: of a trainer or a loop.
        world_size: ranks that have samples of their own.

    Raises:
        UnsupportedError: accelerate has not made it, or it deals out to other ranks; names what it is.
    """

    def __init__(self, loader: Any, world_size: int) -> None:
        from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard

        given = loader.batch_sampler
        is_shard, knows_rank = isinstance(given, BatchSamplerShard), DealtOut.is_of(given)
        self.is_iterable = isinstance(loader.dataset, IterableDataset)
        self.is_dispatched = isinstance(loader, DataLoaderDispatcher)
        """Rank 0 reads for all ranks."""

        known = knows_rank or isinstance(loader, DataLoaderShard) or (self.is_iterable and self.is_dispatched)
        if not known or getattr(loader, "use_stateful_dataloader", False):
            raise UnsupportedError(
                f"the training loader is a {type(loader).__name__}"
                f"{' with use_stateful_dataloader' if known else ''}: expected what Accelerator.prepare makes of a "
                "torch DataLoader" + ("" if self.is_iterable else ", with dispatch_batches=False")
            )
        dealer = loader.dataset if self.is_iterable else given
        shares = getattr(dealer, "world_size" if knows_rank else "num_processes", world_size)
        if shares != world_size:
            raise UnsupportedError(
                f"the loader deals out batches to {shares} ranks, and {world_size} have samples of their own: prepare "
                "it with the Accelerator that it is trained with"
            )
        if world_size > 1 and not (self.is_iterable or knows_rank or is_shard):
            raise UnsupportedError(
                f"the batch sampler ({type(given).__name__}) is not dealt out to ranks by accelerate: give the trainer "
                "a dataset and a sampler of the whole dataset"
            )
        self.loader = loader
        self.world_size = world_size
        self.batches = given.batch_sampler if is_shard else DealtOut(given) if knows_rank else given
        """The batch sampler of the whole dataset."""

        self.even_batches = is_shard and bool(given.even_batches)
        self.split_batches = any(getattr(one, "split_batches", False) for one in (dealer, loader))
        """Ranks share each batch, rather than take turns."""

    @property
    def batch_size(self) -> int:
        """Samples of a rank in a batch.

        Raises:
            UnsupportedError: it has no size.
        """
        size = getattr(self.loader.dataset if self.is_iterable else self.batches, "batch_size", None)
        size = size or self.loader.batch_size
        if not isinstance(size, int) or size < 1:
            raise UnsupportedError(
                f"{'the loader' if self.batches is None else type(self.batches).__name__} has no batch_size, so how "
                "many samples an optimizer step has is not known: give the loader a batch_size"
            )
        return max(size // self.world_size, 1) if self.split_batches else size

    @property
    def device(self) -> Any:
        """To which it moves batches; None: it does not."""
        from accelerate import PartialState

        return PartialState().device if self.is_dispatched else self.loader.device

    def own_part(self, rank: int) -> tuple[Any, IterableYields]:
        """Of an iterable: what to go through on this rank, and what that yields there. Collective, for streams of
        ``datasets``.

        Raises:
            ConfigError: ranks have shuffled it differently.
        """
        from accelerate.data_loader import IterableDatasetShard

        dataset = self.loader.dataset
        if isinstance(dataset, IterableDatasetShard):
            return dataset.dataset, "all"
        datasets: Any = sys.modules.get("datasets")
        if datasets is None or not isinstance(dataset, datasets.IterableDataset):
            return dataset, "all"
        if not self.is_dispatched or self.world_size == 1 or dataset._distributed is not None:
            return dataset, "worker"  # accelerate or the user has taken this rank's shards
        if dataset.num_shards < self.world_size:
            return dataset, "all"
        with random_states_kept():
            first = np.array([sum_of(item) for item in itertools.islice(iter(dataset), NUM_FIRST)], dtype=np.int64)
        if same_on_all_ranks(first).tolist() != first.tolist():
            raise ConfigError(
                f"rank {rank} goes through its streaming dataset in another order than rank 0, so samples would be "
                "lost and come twice: shuffle it by a seed that is the same on all ranks, shuffle(seed=...)"
            )
        return dataset.shard(num_shards=self.world_size, index=rank), "worker"


class AgreedOrder:
    """The order of a loader's sampler on rank 0, for all ranks (see :func:`same_on_all_ranks`). Collective.

    What it draws from the random states of the process is drawn from states that the epoch alone decides, so that an
    epoch has the same order when training is resumed in it.

    Raises:
        UnsupportedError: the loader has no sampler of a known length.
        ConfigError: ranks have datasets of different sizes.
    """

    def __init__(self, given: PreparedLoader, rank: int) -> None:
        self._sampler: Any = getattr(given.batches, "sampler", None)
        if not hasattr(self._sampler, "__len__"):
            raise UnsupportedError(
                f"the batch sampler ({type(given.batches).__name__}) has no sampler of a known length, whose order a "
                "stream could follow: give the trainer a dataset and a sampler of the whole dataset"
            )
        mine = [len(given.loader.dataset), len(self)]
        agreed = same_on_all_ranks(np.array(mine)).tolist()
        if agreed != mine:
            raise ConfigError(
                f"rank {rank} has a dataset of {mine[0]} samples and an order of {mine[1]}, rank 0 one of {agreed[0]} "
                f"and {agreed[1]}: all ranks must have the same dataset"
            )
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
