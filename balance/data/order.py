"""The order of samples of a dataset with indices, and a check that it is the same after resuming. (Needs torch.)"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from torch.utils import data as torch_data

from odc.balance.checks import IntArray, as_count, as_integer, as_one_of, fingerprint, keep
from odc.balance.data.sampler import shuffled
from odc.balance.data.samples import IterableYields
from odc.errors import shown


@dataclass(frozen=True, kw_only=True)
class Order:
    """Which samples of a dataset an epoch of a :class:`~odc.balance.StreamLoader` has, and in which order.

    Raises:
        TypeError: the sampler has no length, or cannot be iterated.
        ValueError: ``seed`` is out of range, or there is no such value of ``iterable_yields``.

    Example:
        >>> Order(seed=3, infinite=True).shuffle
        True
    """

    seed: int = 0
    """Of the shuffle of a dataset with indices."""

    shuffle: bool = True
    """False keeps a dataset with indices in its order. (An iterable has its own order; ``dataset.set_epoch`` is called
    if it exists.)"""

    sampler: Iterable[int] | None = None
    """Gives the order of a dataset with indices in place of a shuffle: any iterable of indices with a length, the same
    on all ranks. It may leave out or repeat samples; its ``set_epoch`` is called if it exists. Resuming needs the same
    order for an epoch again."""

    infinite: bool = False
    """Epochs follow each other without end, each in another order; pools are not emptied between epochs."""

    iterable_yields: IterableYields = "all"
    """What an iterable dataset yields on a rank. "all": every sample, in the same order in every rank and worker; each
    keeps its part. "rank": only samples of this rank. "worker": only samples of this rank, and in a worker only those
    of that worker (``torch.utils.data.get_worker_info()``)."""

    def __post_init__(self) -> None:
        seed = as_count(self.seed, "seed", minimum=0, maximum=None)
        keep(self, seed=seed, shuffle=bool(self.shuffle), infinite=bool(self.infinite))
        as_one_of(self.iterable_yields, "iterable_yields", get_args(IterableYields))
        if self.sampler is not None and not (hasattr(self.sampler, "__iter__") and hasattr(self.sampler, "__len__")):
            raise TypeError(f"sampler={shown(self.sampler)}: expected an iterable of indices that has a length")


class Indices:
    """Indices of a dataset, for every epoch and lap (an endless stream has a lap after each; so has one that ends by a
    number of samples).

    Args:
        size: of the dataset.

    Raises:
        ValueError: the sampler is empty. Later: it gives another number of indices than its length, or indices that the
            dataset has not.
    """

    def __init__(self, size: int, order: Order) -> None:
        self._sampler: Any = order.sampler
        self.num_samples = size if self._sampler is None else len(order.sampler)  # type: ignore[arg-type]
        if not self.num_samples:
            raise ValueError(f"sampler={shown(self._sampler)} gives no indices: expected at least one")
        self._size = size
        self._seed = order.seed
        self._shuffle = order.shuffle
        self._infinite = order.infinite
        self.begin(0)

    def begin(self, epoch: int) -> None:
        """Forget the order of another iteration; a sampler is asked again."""
        self._epoch = epoch
        self._drawn: dict[int, IntArray] = {}
        self._known = (-1, 0)
        """A lap, and its fingerprint."""

    def of_lap(self, lap: int) -> IntArray:
        """(num_samples,)."""
        if lap not in self._drawn:
            self._drawn = {known: order for known, order in self._drawn.items() if known >= lap - 1}
            self._drawn[lap] = self._draw(lap)
        return self._drawn[lap]

    def fingerprint(self, lap: int) -> int:
        """Of what a sampler gives for this lap; 0 without one, as the loader's arguments say it all then."""
        if self._sampler is None:
            return 0
        if self._known[0] != lap:  # asked for at every minibatch
            self._known = lap, fingerprint(self.of_lap(lap).tobytes())
        return self._known[1]

    def _draw(self, lap: int) -> IntArray:
        if self._sampler is not None:
            return self._sampled(self._epoch + lap)
        if not self._shuffle:
            return np.arange(self._size)
        if self._infinite or not lap:  # a lap is the epoch that it would be without
            return shuffled(self._size, self._seed, self._epoch + lap)
        return shuffled(self._size, self._seed, self._epoch, lap)

    def _sampled(self, epoch: int) -> IntArray:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        drawn = list(self._sampler)
        indices = [as_integer(index, 0) for index in drawn]
        for given, index in zip(drawn, indices, strict=True):
            if index is None or index >= self._size:
                raise ValueError(f"the sampler gives {shown(given)}: expected an index from 0 to {self._size - 1}")
        if len(drawn) != self.num_samples:
            raise ValueError(f"the sampler gives {len(drawn)} indices, its length says {self.num_samples}")
        return np.array(indices, dtype=np.int64)


def size_of(dataset: Any) -> int | None:
    """Number of samples; None: the dataset is an iterable.

    Raises:
        TypeError: it is neither, or iterates in place of having indices and is a part of another already.
        ValueError: it is empty.
    """
    is_iterable = isinstance(dataset, torch_data.IterableDataset)  # has __getitem__ of its base, and maybe a length
    if not is_iterable and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        if not len(dataset):
            raise ValueError("the dataset has no samples: expected at least one")
        return len(dataset)
    if not hasattr(dataset, "__iter__"):
        raise TypeError(
            f"dataset={shown(dataset)}: expected one with indices (__getitem__ and __len__), or an iterable"
        )
    if hasattr(dataset, "__next__"):
        raise TypeError(
            f"dataset={shown(dataset)} is an iterator, which can be gone through once: expected an iterable, that "
            "gives a new iterator for each epoch and worker"
        )
    return None
