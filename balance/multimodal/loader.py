"""Feed an orchestrator from a loader: measure lengths, exchange them and plan, one minibatch ahead. (Needs torch.)

Source: OrchMLLM section 6, computation overhead overlapping: lengths are known as soon as a minibatch is drawn, so
planning overlaps with training on the previous minibatch.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any, Generic, NoReturn, Protocol, TypeVar

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import FloatArray, as_count
from odc.balance.data.exchange import Alone, Exchange, VectorExchange
from odc.balance.data.iteration import Iterations
from odc.balance.data.loader import Minibatch
from odc.balance.data.microbatches import SampleT
from odc.balance.data.place import Place
from odc.balance.data.reader import name_samples
from odc.balance.multimodal.lengths import MinibatchLengths, RankLengths
from odc.balance.multimodal.orchestrator import Orchestrator
from odc.balance.multimodal.payload import SampleParts, check_parts, count_bytes, named
from odc.balance.multimodal.run import MultimodalMinibatch
from odc.balance.multimodal.schedule import MinibatchSchedule
from odc.errors import OUR_FAULT, shown

DrawnT = TypeVar("DrawnT")

_LOOK_EVERY_S = 0.1
_LONGEST_END_S = 2.0


class Feed(Protocol[SampleT]):
    """A loader of lists of samples: a MinibatchLoader or a StreamLoader whose ``collate`` is ``list``."""

    def __iter__(self) -> Iterator[Minibatch[list[SampleT]]]:
        """Over the minibatches of an epoch."""

    def state_dict(self) -> Any:
        """The position after the last minibatch that was yielded."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from that position at the next iteration."""

    def set_epoch(self, epoch: int) -> None:
        """Choose what is iterated over next."""


@dataclass(frozen=True, eq=False)
class _Ready:
    """One minibatch, with the state of the loader behind it; or how the iteration has ended."""

    minibatch: MultimodalMinibatch | None
    state: Any
    planning_s: float = 0.0
    error: BaseException | None = None


class MultimodalLoader(Generic[SampleT]):
    """Iterates over the minibatches of another loader, and adds a schedule of all phases (modalities).

    During training, a thread draws the next minibatch of the loader, splits its samples, all-gathers their lengths, and
    plans. If ranks make different plans of the same lengths, all ranks raise an error. There is one iteration at a
    time. All ranks may leave it after the same number of minibatches and iterate again, also after an error, which all
    ranks get.

    Args:
        loader: a :class:`~odc.balance.MinibatchLoader` or a :class:`~odc.balance.StreamLoader` whose ``collate`` is
            ``list``, without ``late_binding``. Its lengths must be those of whole interleaved sequences.
        split: splits a sample into its parts; called in the thread, for this rank's samples.
        orchestrator: plans the minibatches; the same on all ranks.
        rank: this process's rank among those that share the data.
        mesh: instead of ``rank`` and ``group``, as in :class:`~odc.balance.MinibatchLoader`.
        group: the process group of these ranks; default: all ranks. The loader does not use it to communicate.
        exchange_timeout_s: maximum seconds to wait for the other ranks.
        prefetch: minibatches that are ready in advance, at least 1.

    Raises:
        ValueError: the orchestrator has no such ``rank``, or the loader uses late binding. While iterating: a sample
            has no length for an item, or has a modality that the orchestrator does not know; or ranks have different
            orchestrators or plans.
        OdcError: while iterating: another rank failed, died, or left its loop; its number is in the message.

    Example:
        >>> phases = [Phase("image", image_cost), Phase("audio", audio_cost)]
        >>> orchestrator = Orchestrator(phases, Phase("language", language_cost), world_size)
        >>> sampler = MinibatchSampler(lengths, world_size=world_size, minibatch_size=4, cost=language_cost)
        >>> loader = MinibatchLoader(dataset, sampler, list, rank, comm="odc")
        >>> minibatches = MultimodalLoader(loader, split, orchestrator, rank)  # split: a sample -> SampleParts
        >>> sum(1 for minibatch in minibatches)
        4
        >>> minibatches.close()
    """

    def __init__(
        self,
        loader: Feed[SampleT],
        split: Callable[[SampleT], SampleParts],
        orchestrator: Orchestrator,
        rank: int | None = None,
        *,
        mesh: DeviceMesh | None = None,
        group: dist.ProcessGroup | None = None,
        exchange_timeout_s: float = 600.0,
        prefetch: int = 1,
    ) -> None:
        self.loader = loader
        self.orchestrator = orchestrator
        self._place = Place.of(rank, orchestrator.num_ranks if mesh is None else None, mesh, group)
        self.rank = self._place.rank
        if self._place.world_size != orchestrator.num_ranks:
            raise ValueError(
                f"a mesh of {self._place.world_size} ranks: expected as many as the orchestrator's "
                f"num_ranks={orchestrator.num_ranks}"
            )
        if getattr(loader, "late_binding", False):
            raise ValueError(
                "a loader with late_binding=True: the samples of all ranks are shared out anew for each modality, "
                "before any is computed, so none can be bound late. Give it a loader without"
            )
        if not callable(split):
            raise TypeError(f"split={shown(split)}: expected a function that takes a sample apart")
        self._split = split
        self._prefetch = as_count(prefetch, "prefetch")
        self._group = group
        self._timeout_s = exchange_timeout_s
        self._exchange: Exchange = Alone()
        self._iterations = Iterations()
        self._leave: Callable[[], None] | None = None
        """Ends the iteration that is going on."""
        self._state: Any = loader.state_dict()
        self.planning_s: list[float] = []
        """Seconds of planning for each yielded minibatch, including the exchange of lengths. Planning runs parallel to
        training."""

    def __iter__(self) -> Iterator[MultimodalMinibatch]:
        self._state = self.loader.state_dict()
        return self._iterate()

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Call it before each, on every rank; see the loader's."""
        self._end()
        self.loader.set_epoch(epoch)
        self._state = self.loader.state_dict()

    def state_dict(self) -> Any:
        """The position of the loader. A minibatch counts as done once this loader has yielded it."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue, at the next iteration, after the minibatches that were done when ``state`` was taken."""
        self._end()
        self.loader.load_state_dict(state)
        self._state = self.loader.state_dict()

    def close(self) -> None:
        """End the iteration, the loader's workers, and the connections to other ranks. Call it on every rank."""
        self._end()
        getattr(self.loader, "close", lambda: None)()
        self._exchange.close()
        self._exchange = Alone()

    def _end(self) -> None:
        """An iteration that is going on ends here."""
        self._iterations.begin()
        if self._leave is not None:
            self._leave()

    def _iterate(self) -> Iterator[MultimodalMinibatch]:
        self._end()
        number = self._iterations.begin()
        exchange = self._own_exchange()
        begun = 0 if isinstance(exchange, Alone) else exchange.begin(self.orchestrator.identity(), {})
        ready: Queue[_Ready] = Queue(self._prefetch)
        stop, ended = threading.Event(), threading.Event()
        num_done, has_failed = 0, False

        def leave() -> None:
            """The thread ends, and what it may still do is no business of a later iteration."""
            if self._leave is not leave:
                return  # it has been left already
            self._leave = None
            stop.set()
            if not ended.is_set() and not has_failed:
                exchange.tell_left(begun, num_done)
            thread.join(_LONGEST_END_S)  # one that waits for a rank which does not come is left
            if not ended.is_set():
                # The threads of the ranks may have stopped at different vectors, and some may have heard that others
                # have left: so the next iteration, which all begin if one does, has an exchange of its own.
                self._exchange = Alone()

        minibatches = iter(self.loader)
        arguments = (minibatches, _first_drawn(minibatches), exchange, ready, stop, ended)
        thread = threading.Thread(target=self._prepare, args=arguments, name="odc-multimodal", daemon=True)
        thread.start()
        self._leave = leave
        try:
            while True:
                found = _take(ready, thread)
                if found.error is not None:
                    has_failed = True
                    raise found.error
                self._state = found.state
                if found.minibatch is None:
                    return
                self.planning_s.append(found.planning_s)
                num_done += 1
                yield found.minibatch
                self._iterations.check(number, num_done)
        finally:
            leave()

    def _own_exchange(self) -> Exchange:
        if self._place.world_size > 1 and isinstance(self._exchange, Alone):
            self._exchange = VectorExchange(self._place.global_ranks(self._group), self._timeout_s)
        return self._exchange

    # In the thread.

    def _prepare(
        self,
        minibatches: Iterator[Minibatch[list[SampleT]]],
        drawing: Iterator[Minibatch[list[SampleT]]],
        exchange: Exchange,
        ready: Queue[_Ready],
        stop: threading.Event,
        ended: threading.Event,
    ) -> None:
        try:
            while not stop.is_set():
                drawn = next(drawing, None)
                state = self.loader.state_dict()
                if drawn is None:
                    # All ranks have come to the end of their loaders at the same minibatch.
                    if exchange.gather(np.zeros(1)).any():
                        raise RuntimeError(
                            "this rank has no further minibatch, and others have: their loaders must be the same"
                        )
                    ended.set()
                    _put(ready, _Ready(None, state), stop)
                    return
                started = time.monotonic()
                minibatch = self._planned(drawn, exchange)
                _put(ready, _Ready(minibatch, state, time.monotonic() - started), stop)
        except BaseException as error:  # raised where minibatches are asked for
            exchange.tell_failure(error)
            _put(ready, _Ready(None, None, error=error), stop)
        finally:
            getattr(minibatches, "close", lambda: None)()

    def _planned(self, drawn: Minibatch[list[SampleT]], exchange: Exchange) -> MultimodalMinibatch:
        parts = [[self._take_apart(sample) for sample in microbatch] for microbatch in drawn.microbatches]
        flat = [part for microbatch in parts for part in microbatch]
        modalities = self.orchestrator.modalities
        # Bytes are what would be moved; those of samples that stay on their rank are nobody's business.
        moves = self.orchestrator.num_ranks > 1
        num_bytes = [count_bytes(named(part.text)) if moves else 0 for part in flat]
        item_bytes = {
            name: [count_bytes(item) if moves else 0 for part in flat for item in part.items.get(name, ())]
            for name in modalities
        }
        lengths = [[part.lengths for part in microbatch] for microbatch in parts]
        rows = self._gathered(RankLengths.of_samples(lengths, modalities, num_bytes, item_bytes), exchange)
        schedule = self.orchestrator.plan(MinibatchLengths.of_ranks(rows, modalities))
        self._require_same(schedule, exchange)
        return MultimodalMinibatch(
            schedule, self.rank, flat, drawn.loss_scale, drawn.num_loss_tokens, drawn.num_samples
        )

    def _take_apart(self, sample: SampleT) -> SampleParts:
        try:
            parts = self._split(sample)
            check_parts(parts, "a sample")
        except Exception as error:
            name_samples(error, f"when a sample of rank {self.rank} was taken apart: {shown(sample)}")
            raise
        return parts

    def _gathered(self, mine: RankLengths, exchange: Exchange) -> list[RankLengths]:
        """What all ranks have."""
        vector = mine.as_vector()
        sizes = exchange.gather(np.array([vector.size], dtype=np.float64))[:, 0]
        if not sizes.all():
            raise RuntimeError("a rank has no further minibatch, and others have: their loaders must be the same")
        padded: FloatArray = np.zeros(int(sizes.max()))
        padded[: vector.size] = vector
        return [RankLengths.of_vector(row, self.orchestrator.modalities) for row in exchange.gather(padded)]

    def _require_same(self, schedule: MinibatchSchedule, exchange: Exchange) -> None:
        """Plans come from the same lengths by the same rules; if they differ all the same, no rank goes on.

        Raises:
            ValueError: on all ranks, naming two ranks and the first difference of their plans.
        """
        marks = exchange.gather(np.array([schedule.fingerprint()], dtype=np.float64))[:, 0]
        if (marks == marks[0]).all():
            return
        table = exchange.gather(schedule.as_vector().astype(np.float64))
        other = int(np.flatnonzero(marks != marks[self.rank])[0])
        raise ValueError(
            f"ranks {self.rank} and {other} have planned a minibatch differently: "
            f"{schedule.difference(table[other].astype(np.int64))}"
        )


def _first_drawn(minibatches: Iterator[DrawnT]) -> Iterator[DrawnT]:
    """``minibatches``, the first of which is drawn here and now; if that fails, it fails for whoever goes on.

    [Note: Workers are forks of the caller's thread] A loader starts its workers when the first minibatch is drawn. They
    end with the thread that has started them (``PR_SET_PDEATHSIG``), and what other threads have in their
    ``threading.local`` is torn down in a fork: with that of the main thread, forks have crashed.
    """
    try:
        first = list(itertools.islice(minibatches, 1))
    except BaseException as error:
        return map(_raise, [error])
    return itertools.chain(first, minibatches)


def _raise(error: BaseException) -> NoReturn:
    raise error


def _take(ready: Queue[_Ready], thread: threading.Thread) -> _Ready:
    while True:
        try:
            return ready.get(timeout=_LOOK_EVERY_S)
        except Empty:
            if not thread.is_alive() and ready.empty():
                raise RuntimeError(f"the thread that prepares minibatches has ended. {OUR_FAULT}") from None


def _put(ready: Queue[_Ready], what: _Ready, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            ready.put(what, timeout=_LOOK_EVERY_S)
            return
        except Full:
            continue
