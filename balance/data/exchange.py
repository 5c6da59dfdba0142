"""Exchange a small vector between all ranks over separate connections, and find the responsible rank if one is
missing."""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from odc.balance.checks import FloatArray, fingerprint
from odc.balance.data.watched_store import WatchedStore
from odc.errors import AbortedError, OdcError, PeerClosedError, PeerDiedError, PeerSilentError, shorten

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_HEADER, _FRAME = 3, 16
"""Numbers in front of a vector (iteration, number of the exchange, size), and of a frame. What ranks send first has the
size of a frame, whatever they are at: gloo ends a process that gets more or less than it expects."""
_MOST_THREADS = 32
_STORE_S = 2.0
"""Without an answer the store is asked no more."""
_LONGEST_END_S = 2.0
_Tables = SimpleQueue[torch.Tensor | None]
"""What a thread is to exchange: (world_size, n), with this rank's vector in its row. None: nothing more."""


class Alone:
    """The exchange of one rank with itself."""

    rank = 0

    def gather(self, vector: FloatArray) -> FloatArray:
        """See :meth:`VectorExchange.gather`."""
        return vector[None]

    def tell_failure(self, error: BaseException) -> None:
        """Nobody has to know."""

    def tell_left(self, iteration: int, num_done: int) -> None:
        """Nobody has to know."""

    def close(self) -> None:
        """There is nothing to end."""


class VectorExchange:
    """All-gathers float64 vectors over gloo, apart from the groups that train.

    The waiting is done by threads, a peer's connection in each: one that breaks is seen at once, whoever else is late.
    This thread looks meanwhile for what another rank has left in the store: that it failed, of what, or that it left
    its loop. Whoever first finds a rank dead leaves its name there too, since a rank that ends for that reason would
    otherwise look like the culprit to those who wait for it.

    Args:
        ranks: global ranks of those that exchange, in their order. All of them make this at the same time, and nobody
            else: it is no group of ``torch.distributed``.
        timeout_s: most seconds to wait for a rank that is alive.
    """

    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        self._store = WatchedStore(_get_default_store, "ranks tell each other why they have ended")
        self.rank, self.world_size = ranks.index(dist.get_rank()), len(ranks)
        self._ranks = ranks
        # A name that no other exchange has had: ranks make theirs in the same order. (The names of torch's groups come
        # again when a group has ended, with what is left of it in the store.)
        whose = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
        name, rank, world_size = f"odc/stream/{whose}", self.rank, self.world_size

        def connect(store: Any) -> tuple[str, Any]:
            own = f"{name}/{store.add(f'{name}/made/{rank}', 1)}"
            return own, dist.ProcessGroupGloo(PrefixStore(own, store), rank, world_size, timedelta(seconds=timeout_s))

        self._name, group = self._store.ask(connect, timeout_s + _STORE_S)
        self._timeout_s = timeout_s
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        self._jobs: list[_Tables] = []
        threads: list[threading.Thread] = []
        self._results: SimpleQueue[tuple[int, Exception | None]] = SimpleQueue()
        for first in range(min(len(peers), _MOST_THREADS)):
            jobs: _Tables = SimpleQueue()
            # Not a method of this object: a loader that is dropped takes its threads along.
            work = (group, self.rank, peers[first::_MOST_THREADS], jobs, self._results)
            thread = threading.Thread(target=_work, args=work, name="odc-stream-exchange", daemon=True)
            thread.start()
            self._jobs.append(jobs)
            threads.append(thread)
        self._num_peers = len(peers)
        self._end = weakref.finalize(self, _end, self._jobs, threads)  # at the latest where the interpreter ends
        self._iteration = 0
        self._number = 0
        self._failure: OdcError | None = None
        """Why there will be no other exchange; the others know of it, or are the reason."""

    @property
    def _me(self) -> int:
        """This rank's number in the job, as of the others in messages."""
        return self._ranks[self.rank]

    def begin(self, identity: Mapping[str, int | str], position: Mapping[str, int]) -> int:
        """Begin another iteration on all ranks, if they have the same loader and are at the same place. Its number.

        Raises:
            ValueError: a rank has another argument or state; the message names both.
        """
        self._iteration += 1
        self._number = 0
        names = [*identity, *position]
        known = [fingerprint(repr(value).encode()) for value in identity.values()]
        mine = np.array([*known, *position.values()], dtype=np.float64)
        for rank, row in enumerate(self.gather(mine)):
            if (other := np.flatnonzero(row != mine)).size:
                name = names[other[0]]
                value = {**identity, **position}[name]
                raise ValueError(
                    f"ranks {self._ranks[rank]} and {self._me} differ in {name} ({self._me} has {value!r}): their "
                    "loaders must have the same arguments and epoch, and states that were taken after the same "
                    "minibatch"
                )
        return self._iteration

    def gather(self, vector: FloatArray) -> FloatArray:
        """The vectors of all ranks, (world_size, n), in the order of ranks.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError, AbortedError: a rank does not come; its number is in the
                message. There is no other exchange after that.
        """
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))
        self._number += 1
        frame = np.zeros(_FRAME)
        frame[:_HEADER] = (self._iteration, self._number, vector.size)
        fits = vector.size <= _FRAME - _HEADER
        if fits:
            frame[_HEADER : _HEADER + vector.size] = vector
        found = self._swap(frame)
        self._check_headers(found)
        return found[:, _HEADER : _HEADER + vector.size] if fits else self._swap(vector)

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know that this rank ends, and of what; unless the exchange has failed before."""
        if self._failure is None:
            what = f"{type(error).__name__}: {shorten(str(error))}"
            self._tell("failed", AbortedError, f"the data of rank {self._me} ended with an error: {what}")

    def tell_left(self, iteration: int, num_done: int) -> None:
        """Let the others know that this rank has left the loop of this iteration, after so many minibatches."""
        text = (
            f"rank {self._me} has left its loop after {num_done} minibatches, while another waits for it: "
            "every rank must take as many minibatches as the others"
        )
        self._tell(f"left/{iteration}", PeerClosedError, text)

    def close(self) -> None:
        """End threads and connections. The others must not wait for this rank any more."""
        self._end()

    def _swap(self, vector: FloatArray) -> FloatArray:
        table = torch.zeros(self.world_size, vector.size, dtype=torch.float64, device="cpu")
        table[self.rank] = torch.from_numpy(vector)
        for jobs in self._jobs:
            jobs.put(table)
        for _ in range(self._num_peers):
            while True:
                try:
                    peer, error = self._results.get(timeout=_LOOK_EVERY_S)
                except Empty:
                    if (failure := self._told_by_others()) is not None:
                        raise self._failed(failure) from None
                    continue
                if error is not None:
                    raise self._failed(self._explained(peer, error)) from error
                break
        return np.asarray(table.numpy())

    def _check_headers(self, table: FloatArray) -> None:
        mine = tuple(table[self.rank, :_HEADER].astype(np.int64).tolist())
        for rank, row in enumerate(table[:, :_HEADER].astype(np.int64).tolist()):
            if tuple(row[:2]) != mine[:2]:
                raise self._failed(
                    OdcError(
                        f"rank {self._ranks[rank]} is at exchange {row[1]} of its iteration {row[0]} over the stream, "
                        f"this rank {self._me} at exchange {mine[1]} of iteration {mine[0]}: every rank must iterate "
                        "over its loader as often as the others, and take as many minibatches"
                    )
                )
            if row[2] != mine[2]:
                raise self._failed(
                    OdcError(
                        f"rank {self._ranks[rank]} exchanges {row[2]} numbers, this rank {self._me} {mine[2]}: their "
                        "loaders must have the same arguments (align, pool_size)"
                    )
                )

    def _failed(self, failure: OdcError) -> OdcError:
        self._failure = failure
        if isinstance(failure, PeerDiedError | PeerSilentError):
            self._tell("missing", type(failure), str(failure))
        return failure

    def _explained(self, peer: int, error: Exception) -> OdcError:
        """Why ``peer`` did not come: what is in the store, if another rank is the reason."""
        for _ in range(4):  # who ends for another's sake has told of that, but the store may take a moment
            if (failure := self._told_by_others()) is not None:
                return failure
            time.sleep(0.1)
        who = f"rank {self._ranks[peer]}"
        if "timed out" in str(error).lower():
            return PeerSilentError(
                f"{who} did not come for its next minibatch within {self._timeout_s:g} s. If it may take so "
                "long (an evaluation, a checkpoint), raise timeout_s of the stream's alignment, or "
                "exchange_timeout_s of a MultimodalLoader"
            )
        return PeerDiedError(f"{who} is gone, while rank {self._me} waited for it ({shorten(str(error))})")

    def _told_by_others(self) -> OdcError | None:
        """What another rank has left in the store."""
        for what in ("failed", "missing", f"left/{self._iteration}"):
            key = self._key(what)
            try:
                told = self._store.ask(partial(_told, key), _STORE_S)
            except RuntimeError:
                return None  # the process that has the store is gone, or silent: the connections say what there is
            if told is not None:
                kind, _, text = told.partition("|")
                return _KINDS[kind](text)
        return None

    def _tell(self, what: str, kind: type[OdcError], text: str) -> None:
        """The first rank that tells is heard."""
        if sys.is_finalizing():
            return
        try:
            self._store.ask(lambda store: store.compare_set(self._key(what), "", f"{kind.__name__}|{text}"), _STORE_S)
        except RuntimeError as error:
            # The process that has the store is gone, or torch.distributed has ended: nobody is there to hear.
            logger.debug("the other ranks cannot be told (%s): %s", error, text)

    def _key(self, what: str) -> str:
        return f"{self._name}/{what}"


def _told(key: str, store: Any) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


_KINDS = {kind.__name__: kind for kind in (AbortedError, PeerClosedError, PeerDiedError, PeerSilentError)}


Exchange = VectorExchange | Alone


def _work(
    group: Any, rank: int, peers: Sequence[int], jobs: _Tables, results: SimpleQueue[tuple[int, Exception | None]]
) -> None:
    """Swap vectors with some peers, one result for each."""
    while (table := jobs.get()) is not None:
        works: list[tuple[int, list[dist.Work]]] = []
        for peer in peers:
            try:
                receive = group.recv([table[peer]], peer, 0)
                works.append((peer, [receive, group.send([table[rank]], peer, 0)]))
            except Exception as error:
                results.put((peer, error))  # told in the thread that asked
        for peer, both in works:
            try:
                for work in both:
                    work.wait()
            except Exception as error:
                results.put((peer, error))
            else:
                results.put((peer, None))
        del table


def _end(queues: Sequence[_Tables], threads: Sequence[threading.Thread]) -> None:
    """The connections end with the last thread.

    That is waited for: a process in which a thread ends them while the interpreter ends would be aborted. A thread that
    waits for a rank which does not come is left.
    """
    for jobs in queues:
        jobs.put(None)
    until = time.monotonic() + _LONGEST_END_S
    for thread in threads:
        if thread is not threading.current_thread():  # garbage may be collected in any
            thread.join(max(until - time.monotonic(), 0.0))
