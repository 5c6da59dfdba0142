"""The steps of one rank of a stream: its pool, filled from a source, and rounds of agreement with the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from odc.balance.data.exchange import Exchange
from odc.balance.data.iterable_source import ANOTHER_ORDER
from odc.balance.data.sources import IndexedSource, Source
from odc.balance.grouping.rounds import Entry, Rounds, Step


class StepStream:
    """Runs rounds: fill the pool, exchange a vector, plan, have read what the pool lacks now, give out the steps.

    A position is the round that a step is of, as it was before it was planned, and how many of its steps were given
    out: whoever goes on from it exchanges and plans that round again, the same on all ranks.

    Args:
        make_rounds: rounds with an empty pool.
        quota: None: go on until no rank has anything left. Else the rounds end as soon as one has nothing left, and
            begin anew in another lap of the source until so many samples, of all ranks, were given out.
    """

    def __init__(
        self,
        make_rounds: Callable[[], Rounds],
        source: Source,
        exchange: Exchange,
        quota: int | None,
    ) -> None:
        self._make_rounds = make_rounds
        self._rounds = make_rounds()
        self._source = source
        self._exchange = exchange
        self._quota = quota
        self._num_emitted = 0
        self._is_dealt_anew = False

    def run(self, start: Mapping[str, Any]) -> Iterator[tuple[Step, dict[str, Any]]]:
        """Steps, and the position behind each, from the position ``start`` on; none: from the beginning."""
        num_done = 0
        if start:
            self._rounds.load(start["rounds"], self._source.load(start["source"], start["places"]))
            self._num_emitted = int(start["num_emitted"])
            self._is_dealt_anew = bool(start["is_dealt_anew"])
            num_done = int(start["num_steps_done"])
        else:
            self._source.want(self._rounds.pooled)
        is_begun = False
        while True:
            self._rounds.add(self._source.arrivals())
            if not is_begun:
                self._compare_first()
                is_begun = True
            self._deal_anew()
            position = self._position()
            steps = self._rounds.plan(self._exchange.gather(self._rounds.offer(self._source.is_finished)))
            if not self._rounds.is_done:
                self._source.want(self._rounds.pooled)
            num_requests = len(self._source.requests)
            for number, step in enumerate(steps, 1):
                self._num_emitted += step.num_samples
                if number > num_done:
                    yield step, {**position, "num_steps_done": number}
                else:
                    for entry in entries_of([step]):
                        self._source.take(entry)
                # Workers go on as fast as steps are taken: what they read is spread over the round.
                self._source.read_on(num_requests * (len(steps) - number) // len(steps))
                if self._quota is not None and self._num_emitted >= self._quota:
                    return
            num_done = 0
            if self._rounds.is_done:
                if self._quota is None or self._num_emitted >= self._quota:
                    return
                assert isinstance(self._source, IndexedSource)  # others have no number of samples to reach
                self._source.next_lap()
                self._rounds = self._make_rounds()
                self._source.want(self._rounds.pooled)

    def _compare_first(self) -> None:
        """Whether ranks go through the same items in the same order, where each keeps its part of them."""
        mine = self._source.first()
        if mine is None:
            return
        for rank, row in enumerate(self._exchange.gather(mine)):
            if ((row != mine) & (row > 0) & (mine > 0)).any():
                raise ValueError(f"ranks {rank} and {self._exchange.rank} {ANOTHER_ORDER}")

    def _position(self) -> dict[str, Any]:
        return {
            "rounds": self._rounds.state(),
            "source": self._source.state(),
            "places": self._rounds.places(),
            "num_emitted": self._num_emitted,
            "is_dealt_anew": int(self._is_dealt_anew),
        }

    def _deal_anew(self) -> None:
        """Even out what is left in the pools once nothing more comes, where any rank can read any sample."""
        rounds, source = self._rounds, self._source
        if not (rounds.deals_anew and source.all_dealt) or self._is_dealt_anew:
            return
        assert isinstance(source, IndexedSource)
        self._is_dealt_anew = True
        here = {entry.place: entry for entry in rounds.pool}
        mine = rounds.dealt_anew(self._exchange.gather(rounds.pool_vector()))
        source.forget([entry for place, entry in here.items() if place not in set(mine)])
        missing = [place for place in mine if place not in here]
        here.update(zip(missing, source.read_places(missing), strict=True))
        rounds.replace([here[place] for place in mine])


def entries_of(steps: Sequence[Step]) -> list[Entry]:
    """The samples that this rank trains on in these steps."""
    return [entry for step in steps for entries in step.microbatches for entry in entries]
