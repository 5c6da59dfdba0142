"""A wrapper of ``torch.distributed``'s store whose requests do not hang if the store is lost. (Needs torch.)"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from odc.balance.data.iteration import wait_for_rank
from odc.errors import OdcError, PeerDiedError, PeerSilentError, shorten

T = TypeVar("T")
_Asked = tuple[Callable[[Any], Any], Future[Any]]

_MOMENT_S = 0.02
"""Most answers are there sooner, without a look at the ranks."""
_LONGEST_END_S = 2.0
_ACCOUNT_S = 2.5
"""Within which the death of a rank is noticed, which is a better account than that of the store it held."""


class WatchedStore:
    """The methods of a store, each asked in a thread.

    A call to a store waits in C++, for the store's own limit or for ever where its process is stopped. So this thread
    looks meanwhile after the ranks, as in any wait of ODC. A store that was lost once is asked no more.

    Args:
        connect: gives a connection of its own, or a store in memory; called when the store is asked first.
        what: what ranks do by it, for messages.

    Raises (each method):
        PeerSilentError: no answer came in time.
        PeerDiedError: the process that has it is gone.
        OdcError: a rank has failed meanwhile.
    """

    def __init__(self, connect: Callable[[], Any], what: str) -> None:
        self._connect = connect
        self._text = f"an answer of the store of torch.distributed, by which {what}"
        self._questions: SimpleQueue[_Asked | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # a plan is made beside the training
        self._lost: OdcError | None = None

    def close(self) -> None:
        """End the thread and its connection. To ask again begins others."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None and self._lost is None:  # else it may never come back
            self._questions.put(None)
            thread.join(_LONGEST_END_S)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):  # of copying and pickling
            raise AttributeError(method)
        return lambda *args: self.ask(lambda store: getattr(store, method)(*args))

    def ask(self, question: Callable[[Any], T], patience_s: float | None = None) -> T:
        """What ``question`` returns of the store, in its thread.

        Args:
            patience_s: how long to wait for it, of one who can do without: no rank is looked at, nor told. None: as
                long as ODC waits for ranks.
        """
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))
        with self._starting:
            if self._thread is None:
                # Not a method: an object that is dropped ends its thread, which it must not be kept by.
                self._thread = threading.Thread(
                    target=_answer, args=(self._connect, self._questions), name="odc-store", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._questions.put, None)
        answer: Future[T] = Future()
        self._questions.put((question, answer))
        try:
            self._await(answer, patience_s)
        except OdcError as error:
            self._lost = error
            raise
        return answer.result()

    def _await(self, answer: Future[Any], patience_s: float | None) -> None:
        if not wait([answer], _MOMENT_S if patience_s is None else patience_s).done:
            if patience_s is not None:
                raise PeerSilentError(f"{patience_s:g} s have gone by in waiting for {self._text}")
            wait_for_rank(answer.done, self._text, None)
        if (error := answer.exception()) is None:
            return
        gone = PeerDiedError(
            f"a process is gone from which this rank wanted {self._text} ({shorten(str(error))}). It was that of "
            "rank 0, or torchrun's on the first host"
        )
        if patience_s is not None:
            raise gone from error  # who asks so can do without, and nobody else needs to hear of it
        until = time.monotonic() + _ACCOUNT_S

        def give_up() -> bool:
            if time.monotonic() < until:
                return False
            raise gone from error

        wait_for_rank(give_up, self._text, None)  # raised there, the other ranks hear of it


def _answer(connect: Callable[[], Any], questions: SimpleQueue[_Asked | None]) -> None:
    store = None
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            store = connect() if store is None else store
            answer.set_result(question(store))
        except Exception as error:  # raised where it is asked
            answer.set_exception(error)
        del asked, question, answer
