"""Late binding in streams: all ranks know what each has chosen for a minibatch, and can read it. (Needs torch.)"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from odc.balance.checks import FloatArray
from odc.balance.data.microbatches import BatchT
from odc.balance.data.samples import Chunk, Read, SampleDataset
from odc.balance.data.sources import IndexedSource
from odc.balance.grouping.rounds import Entry
from odc.balance.late_binding.steal_policy import pack_largest_first
from odc.balance.plan import Plan, PlannedMinibatch


def chosen_by_all(
    mine: Sequence[Entry], counts: Sequence[int], gather: Callable[[FloatArray], FloatArray]
) -> list[list[Entry]]:
    """The samples that each rank has chosen for a minibatch, the same on all ranks.

    Args:
        mine: those of this rank.
        counts: how many each rank has.
        gather: the vectors of all ranks, given this one's.
    """
    table = np.zeros((len(Entry._fields), max(counts)))
    table[:, : len(mine)] = np.array(mine, dtype=np.float64).reshape(len(mine), len(Entry._fields)).T
    vectors = gather(table.ravel()).reshape(len(counts), *table.shape)
    return [
        [Entry(int(place), int(length), int(num_loss_tokens), cost) for place, length, num_loss_tokens, cost in rows]
        for rows in (vector[:, :count].T.tolist() for vector, count in zip(vectors, counts, strict=True))
    ]


def planned_of(chosen: Sequence[Sequence[Entry]], max_tokens: int, microbatch_cost: float) -> PlannedMinibatch:
    """The plan by which each rank computes what it has chosen; its samples are known by their places in the stream."""
    entries = list(itertools.chain(*chosen))
    ends = np.cumsum([0, *map(len, chosen)]).tolist()
    queues = [list(range(start, end)) for start, end in itertools.pairwise(ends)]
    lengths = np.array([entry.length for entry in entries], dtype=np.int64)
    costs = np.array([entry.cost for entry in entries])
    microbatches = pack_largest_first(queues, lengths, costs, max_tokens)
    plan = Plan(microbatches, lengths, costs, max_tokens, "stream", microbatch_cost)
    return PlannedMinibatch(np.array([entry.place for entry in entries], dtype=np.int64), plan)


class ChosenSamples(Generic[BatchT]):
    """Makes microbatches of any samples of one minibatch, given by their places. Those of other ranks are read here.

    Args:
        chosen: the samples of all ranks.
        own: those of this rank, by place: the sample, and what the user knows it by.
        source: tells the index of a place.
        dataset: reads and measures a sample.
        collate: makes a microbatch of samples, as ``own`` has them.
        tell_failure: called with an error of these.
    """

    def __init__(
        self,
        chosen: Sequence[Sequence[Entry]],
        own: dict[int, tuple[Any, int | str]],
        source: IndexedSource,
        dataset: SampleDataset,
        collate: Callable[[list[Entry], list[tuple[Any, int | str]]], BatchT],
        tell_failure: Callable[[BaseException], None],
    ) -> None:
        self._entries = {entry.place: entry for entry in itertools.chain(*chosen)}
        self._own = own
        self._source = source
        self._dataset = dataset
        self._collate = collate
        self._tell_failure = tell_failure

    def __getitem__(self, places: list[int]) -> BatchT:
        entries = [self._entries[place] for place in places]
        try:
            own = self._own
            samples = [own.pop(entry.place) if entry.place in own else self._read(entry) for entry in entries]
            return self._collate(entries, samples)
        except BaseException as error:
            self._tell_failure(error)
            raise

    def _read(self, entry: Entry) -> tuple[Any, int | str]:
        """One that another rank has chosen.

        Raises:
            ValueError: it is not as the rank has found it that it was dealt to, so the loss scale would be wrong.
        """
        chunk = self._dataset[Read([self._source.index(entry.place)])]
        assert isinstance(chunk, Chunk)  # no worker reads here
        found = chunk.lengths[0], chunk.num_loss_tokens[0]
        if found != (entry.length, entry.num_loss_tokens):
            raise ValueError(
                f"sample {chunk.names[0]} has {found[0]} tokens and {found[1]} loss tokens where rank "
                f"{self._dataset.rank} reads it, which has taken it, and {entry.length} and {entry.num_loss_tokens} "
                "where it was chosen: with late_binding=True a sample must be the same whoever reads it"
            )
        return chunk.samples[0], chunk.names[0]
