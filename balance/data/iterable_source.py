"""The samples of an iterable dataset. To resume, the dataset is iterated again from the beginning, or restores its own
state."""

from __future__ import annotations

import warnings
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from odc.balance.checks import FloatArray, fingerprint
from odc.balance.costs import CostModel
from odc.balance.data.samples import NUM_FIRST, Chunk, Continue, Snapshot, Start
from odc.balance.data.sources import MOST_IN_REQUEST, Requests, Source
from odc.balance.grouping.rounds import Entry, lacking

ANOTHER_ORDER = (
    "go through the dataset in different orders, and each keeps its part of what comes, so samples would be lost and "
    "come twice: shuffle it by a seed that is the same for all (datasets: shuffle(seed=...)), or give each its own "
    "part (iterable_yields)"
)


_Waiting = tuple[Any, int, int, int | str, int]
"""A sample that a worker has handed over, whose turn has not come: what :meth:`Chunk.add` takes."""


class _Mark(NamedTuple):
    """A point of the stream that workers can be sent back to."""

    num_taken: int
    lap: int
    turn: int
    starts: tuple[Start, ...]


class IterableSource(Source):
    """An iterable dataset, of which this rank gets its part: by turns a sample of each worker that has one.

    A state is gone back to by reading up to it: from where the oldest sample was that is still to be used, if the
    dataset has a ``state_dict`` that leads back there, else from the beginning of its lap.

    Args:
        num_workers: processes that iterate, each over its part; at least 1, this one.
        iteration: of the loader.
        epoch: of the first lap.
        name: of this rank, for messages.
        is_shared: ranks go through the same items, and each keeps its part.
        announce: called with the epoch of a lap before anything of it is asked for.
        rank, pool_size, endless: as of :class:`~odc.balance.data.sources.Source`.
    """

    def __init__(
        self,
        requests: Requests,
        cost: CostModel,
        num_workers: int,
        iteration: int,
        epoch: int,
        name: str,
        is_shared: bool,
        announce: Callable[[int], None],
        rank: int,
        pool_size: int,
        endless: bool,
    ) -> None:
        super().__init__(requests, cost, rank, pool_size, endless)
        self._num_workers = num_workers
        self._iteration = iteration
        self._epoch = epoch
        self._name = name
        self._is_shared = is_shared
        self._announce = announce
        self._num_taken = 0
        """Samples that were given out, in all laps; the place of the next one."""
        self._laps: list[tuple[int, int]] = [(0, 0)]
        """Laps so far, and their first places."""
        self._missing = 0
        self._sums: dict[int, int] = {}
        """Of the samples that are here, by place."""
        self._marks: deque[_Mark] = deque()
        """The last one that is not behind the oldest sample that is here, and those after it."""
        self._has_state = True
        """Whether workers tell where they are, as far as is known."""
        self._begin(_Mark(0, 0, 0, ()))
        self._mark()

    def _begin(self, mark: _Mark) -> None:
        """Go on from there, with nothing read."""
        self._num_taken, self._lap, self._turn, self._starts = mark
        self._announced = -1
        self._buffers: list[deque[_Waiting]] = [deque() for _ in range(self._num_workers)]
        starts = self._starts or (Start(None, 0, False),) * self._num_workers
        self._ended = [start.is_ended for start in starts]
        self._chunks: list[deque[list[Any]]] = [deque() for _ in range(self._num_workers)]
        """Of each worker, those whose samples are not all given out: where it was before, and how many of them are."""
        self._before: list[tuple[Snapshot | None, int]] = [(start.snapshot, start.skipped) for start in starts]
        """Where each worker was when it had handed over its last chunk."""
        self._first: list[int] = []

    def want(self, pooled: Sequence[int]) -> None:
        self._missing = 0 if self.is_finished else lacking(pooled, self._pool_size)[self._rank]
        self._ask(self._missing - sum(map(len, self._buffers)))

    def arrivals(self) -> list[Entry]:
        first, chunk = self._num_taken, Chunk()
        while self._missing and self._has_next():
            self._move_next(chunk)
        self._missing = 0
        self._mark()
        entries = self._kept(range(first, self._num_taken), chunk)
        self._forget_marks()
        return entries

    def read_on(self, most: int) -> None:
        while len(self.requests) > most:
            self._receive()

    def first(self) -> FloatArray | None:
        if not self._is_shared:
            return None
        found = np.zeros(NUM_FIRST)
        found[: len(self._first)] = self._first
        return found

    def take(self, entry: Entry) -> tuple[Any, int | str]:
        del self._sums[entry.place]
        return super().take(entry)

    def state(self) -> dict[str, Any]:
        oldest = self._oldest()
        ends = [first for _, first in self._laps[1:]] + [oldest + 1]
        laps = [list(one) for one, end in zip(self._laps, ends, strict=True) if end > oldest]
        found: dict[str, Any] = {
            "num_taken": self._num_taken,
            "laps": laps,
            "is_finished": int(self.is_finished),
            "sum": self._sum(),
        }
        if self._marks:
            self._forget_marks()
            found["mark"] = self._marks[0]
        return found

    def _oldest(self) -> int:
        """Place of the oldest sample that is still to be used."""
        return min(self._samples, default=self._num_taken)

    def load(self, state: Mapping[str, Any], places: Sequence[int]) -> list[Entry]:
        laps = [(int(lap), int(first)) for lap, first in state["laps"]]
        mark = _mark_of(state.get("mark"))
        if mark is not None and len(mark.starts) == self._num_workers:
            self._laps = [one for one in laps if one[0] <= mark.lap]
            self._begin(mark)
            self._marks = deque([mark])
            entries = self._go_on(int(state["num_taken"]), places)
            if entries is not None and self._sum() == state["sum"]:
                self.is_finished = bool(state["is_finished"])
                return entries
            self._samples.clear()
            self._sums.clear()
            self._marks.clear()
            self._iteration = -self._iteration  # another one for the workers
            while len(self.requests):
                self.requests.take()
            reason = "whose state_dict does not lead back to the same samples (shuffle buffers lose theirs)"
        else:
            reason = "which has no indices and no state_dict"
        self._laps = laps[:1]
        self._begin(_Mark(laps[0][1], laps[0][0], 0, ()))
        self._marks.clear()
        self._mark()
        target = int(state["num_taken"])
        if target > self._num_taken:
            warnings.warn(
                f"{self._name} iterates again over {target - self._num_taken} samples of its dataset, {reason}, to "
                "come to where the state was taken",
                stacklevel=2,
            )
        entries = self._go_on(target, places)
        if entries is None:
            raise RuntimeError(
                f"the dataset of {self._name} ended after {self._num_taken} samples, and had {target} when "
                "the state was taken: it must yield the same samples again"
            )
        if self._sum() != state["sum"]:
            raise RuntimeError(
                f"the dataset of {self._name} yields other samples than when the state was taken: what it yields must "
                "depend on the epoch alone (set_epoch), not on a random state of the process"
            )
        self.is_finished = bool(state["is_finished"])
        return entries

    def _go_on(self, target: int, places: Sequence[int]) -> list[Entry] | None:
        """Read until so many samples are given out, and keep those at these places; None: there are not so many."""
        kept, chunk = set(places), Chunk()
        while self._num_taken < target:
            self._missing = target - self._num_taken
            if not self._has_next():
                return None
            self._move_next(chunk if self._num_taken in kept else Chunk())
            if not self._missing % self._pool_size:
                self._mark()
        self._missing = 0
        self._mark()
        entries = {entry.place: entry for entry in self._kept(sorted(kept), chunk)}
        return [entries[place] for place in places]

    def _kept(self, places: Sequence[int], chunk: Chunk) -> list[Entry]:
        self._sums.update(zip(places, chunk.sums, strict=True))
        return self._entries(places, chunk)

    def _sum(self) -> int:
        """Of all samples that are here."""
        return fingerprint(np.array(sorted(self._sums.items()), dtype=np.int64).tobytes())

    def _mark(self) -> None:
        if not self._has_state:
            return
        starts = []
        for chunks, before, is_ended in zip(self._chunks, self._before, self._ended, strict=True):
            (snapshot, skipped), used = (chunks[0][0], chunks[0][1]) if chunks else (before, 0)
            starts.append(Start(snapshot, skipped + used, is_ended and not chunks))
        self._marks.append(_Mark(self._num_taken, self._lap, self._turn, tuple(starts)))

    def _forget_marks(self) -> None:
        """Those before the last one that is not behind the oldest sample."""
        oldest = self._oldest()
        while len(self._marks) > 1 and self._marks[1].num_taken <= oldest:
            self._marks.popleft()

    def _move_next(self, chunk: Chunk) -> None:
        """Add the next one by turns. There is one."""
        sample, length, count, name, content = self._buffers[self._turn].popleft()
        sum_of_all = zlib.crc32(np.array([length, count, content], dtype=np.int64).tobytes())
        chunk.add(sample, length, count, name, sum_of_all)
        front = self._chunks[self._turn][0]
        front[1] += 1
        if front[1] == front[2]:
            self._chunks[self._turn].popleft()
        self._turn = (self._turn + 1) % self._num_workers
        self._num_taken += 1
        self._missing -= 1

    def _has_next(self) -> bool:
        """Whether there is another sample, of the worker whose turn it is then. Waits until that is known."""
        while True:
            for _ in range(self._num_workers):
                if self._buffers[self._turn] or not self._ended[self._turn]:
                    break
                self._turn = (self._turn + 1) % self._num_workers
            if self._buffers[self._turn]:
                return True
            if all(self._ended) and not any(self._buffers):
                if not self._endless:
                    self.is_finished = True
                    return False
                if self._num_taken == self._laps[-1][1]:
                    raise ValueError(f"the dataset of {self._name} yields nothing, which infinite=True would repeat")
                self._begin_lap()
            if not len(self.requests):
                self._ask(max(self._missing - sum(map(len, self._buffers)), 1))
            self._receive()

    def _begin_lap(self) -> None:
        while len(self.requests):
            self._receive()
        self._laps.append((self._lap + 1, self._num_taken))
        self._begin(_Mark(self._num_taken, self._lap + 1, 0, ()))

    def _ask(self, number: int) -> None:
        """For about so many samples, as many of each worker."""
        if number <= 0 or all(self._ended):
            return
        if self._announced != self._lap:
            self._announce(self._epoch + self._lap)
            self._announced = self._lap
        each = -(-number // self._num_workers)
        requests = [
            Continue(
                self._iteration,
                self._lap,
                self._epoch + self._lap,
                min(MOST_IN_REQUEST, each - at),
                self._starts,
            )
            for at in range(0, each, MOST_IN_REQUEST)
            for _ in range(self._num_workers)
        ]
        self.requests.ask(requests)

    def _receive(self) -> None:
        chunk = self.requests.take()
        if chunk.lap != self._lap:
            assert not chunk.samples
            return
        if any(mine != its for mine, its in zip(self._first, chunk.first, strict=False) if mine and its):
            raise ValueError(f"the workers of {self._name} {ANOTHER_ORDER}")
        self._first = max(self._first, chunk.first, key=len)
        worker = chunk.worker
        if chunk.samples:
            self._buffers[worker] += zip(
                chunk.samples, chunk.lengths, chunk.num_loss_tokens, chunk.names, chunk.sums, strict=True
            )
            self._chunks[worker].append([self._before[worker], 0, len(chunk.samples)])
        self._before[worker] = (chunk.after, 0)
        if chunk.after is None:
            self._has_state = False
            self._marks.clear()
        self._ended[worker] |= chunk.is_end


def _mark_of(given: Any) -> _Mark | None:
    """As it comes back from JSON."""
    if given is None:
        return None
    num_taken, lap, turn, starts = given
    return _Mark(
        int(num_taken),
        int(lap),
        int(turn),
        tuple(
            Start(None if snapshot is None else Snapshot(*snapshot), int(skipped), bool(is_ended))
            for snapshot, skipped, is_ended in starts
        ),
    )
