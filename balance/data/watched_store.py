"""A store of ``torch.distributed`` that can be lost without holding up who asks it. (Needs torch.)"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

from odc.balance.data.iteration import wait_for_rank
from odc.errors import OdcError, PeerDiedError, PeerSilentError, shorten

_MOMENT_S = 0.02
"""Most answers are there sooner, without a look at the ranks."""
_ACCOUNT_S = 2.5
"""Within which the death of a rank is noticed, which is a better account than that of the store it held."""


class WatchedStore:
    """The methods of a store, each asked in a thread.

    A call to a store waits in C++, for the store's own limit or for ever where its process is stopped. So this thread
    looks meanwhile after the ranks, as in any wait of ODC. A store that was lost once is asked no more.

    Args:
        connect: gives a connection of its own, or a store in memory; called when the store is asked first.
        what: what it serves, for messages.
        patience_s: how long to wait for an answer without a look at the ranks; None: as long as ODC waits for ranks.

    Raises (each method):
        PeerSilentError: no answer came in time.
        PeerDiedError: the process that has it is gone.
        OdcError: a rank has failed meanwhile.
    """

    def __init__(self, connect: Callable[[], Any], what: str, patience_s: float | None = None) -> None:
        self._connect = connect
        self._what = what
        self._patience_s = patience_s
        self._questions: SimpleQueue[_Question | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()  # a plan is made beside the training
        self._lost: OdcError | None = None

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return partial(self._ask, method)

    def _ask(self, method: str, *args: Any) -> Any:
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
        question = _Question(method, args)
        self._questions.put(question)
        try:
            self._await(question)
        except OdcError as error:
            self._lost = error
            raise
        return question.answer

    def _await(self, question: _Question) -> None:
        if not question.is_answered.wait(_MOMENT_S if self._patience_s is None else self._patience_s):
            where = f"an answer of the store of torch.distributed, by which {self._what}"
            if self._patience_s is not None:
                raise PeerSilentError(f"{self._patience_s:g} s have gone by in waiting for {where}")
            wait_for_rank(question.is_answered.is_set, where, None)
        if question.error is None:
            return
        if self._patience_s is None:
            until = time.monotonic() + _ACCOUNT_S
            wait_for_rank(lambda: time.monotonic() > until, "what has become of a rank", None)
        raise PeerDiedError(
            f"the store of torch.distributed is gone, by which {self._what} ({shorten(str(question.error))}). It is in "
            "the process of rank 0, or in torchrun's on the first host"
        ) from question.error


class _Question:
    def __init__(self, method: str, args: tuple[Any, ...]) -> None:
        self.method = method
        self.args = args
        self.is_answered = threading.Event()
        self.answer: Any = None
        self.error: Exception | None = None


def _answer(connect: Callable[[], Any], questions: SimpleQueue[_Question | None]) -> None:
    store = None
    while (question := questions.get()) is not None:
        try:
            store = connect() if store is None else store
            question.answer = getattr(store, question.method)(*question.args)
        except Exception as error:  # raised where it is asked
            question.error = error
        question.is_answered.set()
        del question
