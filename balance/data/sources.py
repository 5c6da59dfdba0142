"""Sources of a stream's samples: which samples a rank gets next, and reading ahead.

What all sources have in common, and the one of a dataset with indices. The other one is
:mod:`odc.balance.data.iterable_source`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from odc.balance.checks import FloatArray, IntArray
from odc.balance.costs import CostModel, evaluate
from odc.balance.data.reader import Reader, name_samples
from odc.balance.data.samples import Chunk, Continue, Read, unpack_chunk
from odc.balance.grouping.quota import deal
from odc.balance.grouping.rounds import Entry, lacking

MOST_IN_REQUEST = 16
"""Samples that a worker reads before it hands them over: many enough that handing over costs little."""

Request = Read | Continue


class Requests:
    """Asks a reader for chunks, a few at a time, and takes what comes back in the same order.

    A ``DataLoader`` gives its workers another item only when one is taken from it, and ends when there is none. So it
    is given empty requests where nothing is wanted yet, and those that have come back are taken when something is.
    """

    def __init__(self, reader: Reader[Request | None, Chunk | bytes | torch.Tensor | None], seed: int) -> None:
        self.num_ahead = reader.num_ahead
        self._waiting: deque[Request] = deque()
        self._num_under_way = 0
        self._is_started = False
        self._results = reader.read(self._next_ones(), seed)

    def ask(self, requests: Sequence[Request]) -> None:
        """Have these read, after all that was asked for before."""
        was_idle = not self._num_under_way
        self._waiting += requests
        self._num_under_way += len(requests)
        if was_idle and self._is_started and requests:
            for _ in range(self.num_ahead):  # empty ones, each of which makes room for another
                chunk = next(self._results)
                assert chunk is None

    def __len__(self) -> int:
        """Chunks that were asked for and not taken."""
        return self._num_under_way

    def take(self) -> Chunk:
        """The next chunk. Waits for it."""
        assert self._num_under_way
        self._is_started = True
        while (chunk := next(self._results)) is None:
            pass
        self._num_under_way -= 1
        return chunk if isinstance(chunk, Chunk) else unpack_chunk(chunk)

    def close(self) -> None:
        """End the workers, unless they are persistent."""
        self._results.close()  # type: ignore[attr-defined]

    def _next_ones(self) -> Iterator[Request | None]:
        while True:
            yield self._waiting.popleft() if self._waiting else None


class Source(ABC):
    """The samples that one rank gets, in their order. What was read is kept here until it is taken.

    Args:
        rank: this rank, among those that are given in :meth:`want`.
        endless: another lap follows each.
    """

    is_finished = False
    """Whether nothing comes after what was wanted so far."""

    all_dealt = False
    """Whether every sample is some rank's, and any rank could read it; the same on all ranks."""

    def __init__(self, requests: Requests, cost: CostModel, rank: int, pool_size: int, endless: bool) -> None:
        self.requests = requests
        self._cost = cost
        self._rank = rank
        self._pool_size = pool_size
        self._endless = endless
        self._samples: dict[int, tuple[Any, int | str]] = {}
        """By place: the sample, and what the user knows it by."""

    @abstractmethod
    def want(self, pooled: Sequence[int]) -> None:
        """Have read what the pools lack.

        Args:
            pooled: samples in the pool of each rank, (world_size,), the same on all ranks.
        """

    @abstractmethod
    def arrivals(self) -> list[Entry]:
        """What was wanted, in its order. Waits for it."""

    @abstractmethod
    def read_on(self, most: int) -> None:
        """Take what was read meanwhile, so that workers can go on, until so many requests are under way."""

    def take(self, entry: Entry) -> tuple[Any, int | str]:
        """The sample, which is forgotten here, and what the user knows it by (see :attr:`Chunk.names`)."""
        return self._samples.pop(entry.place)

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Where the source is, for JSON."""

    @abstractmethod
    def load(self, state: Mapping[str, Any], places: Sequence[int]) -> list[Entry]:
        """Go on from a state, and read again the samples that are still to be used, given by their places."""

    def close(self) -> None:
        """End the workers, unless they are persistent."""
        self._samples.clear()
        self.requests.close()

    def first(self) -> FloatArray | None:
        """Of what the first items hold that this rank keeps its part of, (NUM_FIRST,), 0 where it is not known; to
        compare with other ranks. None: ranks do not share what each of them goes through."""
        return None

    def _entries(self, places: Sequence[int], chunk: Chunk) -> list[Entry]:
        try:
            costs = evaluate(self._cost, np.array(chunk.lengths, dtype=np.int64)).tolist()
        except Exception as error:
            name_samples(error, f"when the costs of samples {chunk.names} were worked out")
            raise
        self._samples.update(zip(places, zip(chunk.samples, chunk.names, strict=True), strict=True))
        return list(map(Entry, places, chunk.lengths, chunk.num_loss_tokens, costs))


class IndexedSource(Source):
    """A dataset with indices, of which all ranks have one order: whoever has used more gets more of what comes next.

    The numbers that say so are known to all ranks after each round, so every rank knows what it gets without being
    told. The last samples are dealt out evenly.

    Args:
        num_samples: of the dataset.
        order: indices of the dataset in a lap (0, 1, ...), (num_samples,); asked for each sample.
        rank, pool_size, endless: as of :class:`Source`.
    """

    def __init__(
        self,
        requests: Requests,
        cost: CostModel,
        num_samples: int,
        order: Callable[[int], IntArray],
        rank: int,
        pool_size: int,
        endless: bool,
    ) -> None:
        super().__init__(requests, cost, rank, pool_size, endless)
        self._num_samples = num_samples
        self._order = order
        self._lap = 0
        self._dealt = 0
        """Samples of all ranks so far."""
        self._wanted: deque[int] = deque()
        self._read: list[Entry] = []

    @property
    def all_dealt(self) -> bool:  # type: ignore[override]
        return not self._endless and self._dealt == (self._lap + 1) * self._num_samples

    def want(self, pooled: Sequence[int]) -> None:
        wanted = lacking(pooled, self._pool_size)
        if not self._endless:
            wanted = deal(wanted, (self._lap + 1) * self._num_samples - self._dealt)
        first = self._dealt + sum(wanted[: self._rank])
        self._dealt += sum(wanted)
        self.is_finished = self.all_dealt
        self._ask(range(first, first + wanted[self._rank]))

    def arrivals(self) -> list[Entry]:
        self.read_on(0)
        entries, self._read = self._read, []
        return entries

    def read_on(self, most: int) -> None:
        while len(self.requests) > most:
            chunk = self.requests.take()
            self._read += self._entries([self._wanted.popleft() for _ in chunk.samples], chunk)

    def read_places(self, places: Sequence[int]) -> list[Entry]:
        """Entries of these samples, in their order, which are read if they are not here."""
        assert not len(self.requests)
        self._ask(places)
        return self.arrivals()

    def forget(self, entries: Sequence[Entry]) -> None:
        """Other ranks have these now."""
        for entry in entries:
            del self._samples[entry.place]

    def state(self) -> dict[str, Any]:
        return {"lap": self._lap, "dealt": self._dealt}

    def load(self, state: Mapping[str, Any], places: Sequence[int]) -> list[Entry]:
        self._lap, self._dealt = int(state["lap"]), int(state["dealt"])
        self.is_finished = self.all_dealt
        return self.read_places(places)

    def next_lap(self) -> None:
        """Begin anew, in another order; what was not given out is dropped."""
        self._lap += 1
        self._dealt = self._lap * self._num_samples
        self.is_finished = False
        self._samples.clear()

    def _ask(self, places: Sequence[int]) -> None:
        self._wanted += places
        indices = [self.index(place) for place in places]
        size = max(1, min(MOST_IN_REQUEST, -(-len(indices) // max(self.requests.num_ahead, 1))))
        self.requests.ask([Read(indices[at : at + size]) for at in range(0, len(indices), size)])

    def index(self, place: int) -> int:
        """Of the sample at a place, in the dataset; of other ranks' too, where all have one order."""
        lap, at = divmod(place, self._num_samples)
        return int(self._order(lap)[at])
