"""One small vector of every rank to every other, in a group of its own; and who is to blame where one does not come."""

from __future__ import annotations

import logging
import sys
import threading
from datetime import timedelta
from queue import Empty, SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from odc.balance.checks import FloatArray
from odc.errors import AbortedError, OdcError, PeerClosedError, PeerDiedError, PeerSilentError, shorten

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.5
_HEADER = 2  # iteration and number of the exchange


class VectorExchange:
    """All-gathers float64 vectors over gloo, apart from the groups that train.

    The waiting is done by a thread, so that this one can look for what another rank has left in the store: that it
    failed, of what, or that it left its loop. Whoever first finds a rank dead leaves its name there too, since a rank
    that ends for that reason would otherwise look like the culprit to those who wait for it.

    Args:
        ranks: global ranks of those that exchange, in their order. All of them make this at the same time.
        timeout_s: most seconds to wait for a rank that is alive.
    """

    def __init__(self, ranks: list[int], timeout_s: float) -> None:
        # All ranks of one order, whoever else there is.
        self._group = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
        )
        assert isinstance(self._group, dist.ProcessGroup)
        self._name = self._group.group_name
        self._timeout_s = timeout_s
        self.rank = self._group.rank()
        self.world_size = self._group.size()
        self._jobs: SimpleQueue[FloatArray | None] = SimpleQueue()
        self._results: SimpleQueue[FloatArray | tuple[int, Exception]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="odc-stream-exchange", daemon=True)
        self._thread.start()
        self._iteration = 0
        self._number = 0
        self._failure: OdcError | None = None

    def begin(self) -> int:
        """Another iteration begins, on all ranks: its number."""
        self._iteration += 1
        self._number = 0
        return self._iteration

    def gather(self, vector: FloatArray) -> FloatArray:
        """The vectors of all ranks, (world_size, n), in the order of ranks.

        Raises:
            PeerDiedError, PeerClosedError, PeerSilentError, AbortedError: a rank does not come; its number is in the
                message. There is no other exchange after that.
        """
        if self._failure is not None:
            raise self._failure
        self._number += 1
        self._jobs.put(np.concatenate([[self._iteration, self._number], vector]))
        while True:
            try:
                found = self._results.get(timeout=_LOOK_EVERY_S)
            except Empty:
                if (failure := self._left_by_others()) is not None:
                    raise self._failed(failure) from None
                continue
            if isinstance(found, tuple):
                raise self._failed(self._explained(*found)) from found[1]
            self._check_headers(found)
            return found[:, _HEADER:]

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know that this rank ends, and of what."""
        self._tell("failed", f"{type(error).__name__}: {shorten(str(error))}")

    def tell_left(self, iteration: int, num_done: int) -> None:
        """Let the others know that this rank has left the loop of this iteration, after so many minibatches."""
        self._tell(f"left/{iteration}", f"after {num_done} minibatches")

    def close(self) -> None:
        """End the thread, if no exchange is under way."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._results.put(self._swap(job))

    def _swap(self, vector: FloatArray) -> FloatArray | tuple[int, Exception]:
        table = torch.zeros(self.world_size, vector.size, dtype=torch.float64)
        table[self.rank] = torch.from_numpy(vector)
        works: list[tuple[int, dist.Work | None]] = []
        peer = self.rank
        try:
            for peer in {*range(self.world_size)} - {self.rank}:
                works.append((peer, dist.irecv(table[peer], group=self._group, group_src=peer)))
                works.append((peer, dist.isend(table[self.rank], group=self._group, group_dst=peer)))
            while works:
                peer, work = works.pop(0)
                if work is not None:
                    work.wait()
        except Exception as error:  # whatever gloo raises is the answer, and told in the thread that asked
            return peer, error
        return np.asarray(table.numpy())

    def _check_headers(self, table: FloatArray) -> None:
        mine = (self._iteration, self._number)
        for rank, row in enumerate(table[:, :_HEADER].astype(np.int64).tolist()):
            if tuple(row) != mine:
                raise self._failed(
                    OdcError(
                        f"rank {rank} is at exchange {row[1]} of its iteration {row[0]} over the stream, this rank "
                        f"{self.rank} at exchange {mine[1]} of iteration {mine[0]}: every rank must iterate over its "
                        "loader as often as the others, and take as many minibatches"
                    )
                )

    def _failed(self, failure: OdcError) -> OdcError:
        self._failure = failure
        if isinstance(failure, PeerDiedError | PeerSilentError):
            self._tell("missing", str(failure))
        return failure

    def _explained(self, peer: int, error: Exception) -> OdcError:
        """Why ``peer`` did not come: what is in the store, if another rank is the reason."""
        pause = threading.Event()
        for _ in range(4):  # who ends for another's sake has told of that, but the store may take a moment
            if (failure := self._left_by_others()) is not None:
                return failure
            pause.wait(0.1)
        if "timed out" in str(error).lower():
            return PeerSilentError(
                f"rank {peer} did not come for its next minibatch within {self._timeout_s:g} s. If it may take so "
                "long (an evaluation, a checkpoint), raise exchange_timeout_s of the loader"
            )
        return PeerDiedError(f"rank {peer} is gone, while this rank {self.rank} waited for it ({shorten(str(error))})")

    def _left_by_others(self) -> OdcError | None:
        """What another rank has left in the store."""
        for what in ("failed", "missing", f"left/{self._iteration}"):
            if (told := self._told(what)) is None:
                continue
            rank, _, text = told.partition("|")
            if what == "failed":
                return AbortedError(f"the data of rank {rank} ended with an error: {text}")
            if what == "missing":
                return PeerDiedError(f"{text} (found by rank {rank})")
            return PeerClosedError(
                f"rank {rank} has left its loop {text}, and this rank {self.rank} waits for its next vector: every "
                "rank must take as many minibatches as the others"
            )
        return None

    def _told(self, what: str) -> str | None:
        key = self._key(what)
        try:
            store = _get_default_store()
            return store.get(key).decode() if store.check([key]) else None
        except (RuntimeError, ValueError):
            return None  # the process that has the store is gone: the connections say what there is to say

    def _tell(self, what: str, text: str) -> None:
        """The first rank that tells is heard."""
        if sys.is_finalizing():
            return
        try:
            _get_default_store().compare_set(self._key(what), "", f"{self.rank}|{text}")
        except (RuntimeError, ValueError) as error:
            # The process that has the store is gone, or torch.distributed has ended: nobody is there to hear.
            logger.debug("the other ranks cannot be told (%s): %s", error, text)

    def _key(self, what: str) -> str:
        return f"odc/stream/{self._name}/{what}"
