"""Make the next result in a thread while the previous one is used.

A thread makes one result and ends, so there is nothing to shut down. After a fork the child either has the result or
makes it itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Later(Generic[T]):
    """The result of a function, which a thread of its own calls from now on."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._found: T | None = None
        self._error: BaseException | None = None
        self._is_made = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="odc-ahead")
        self._thread.start()

    def result(self) -> T:
        """What the function returned, as soon as it has; to be asked for once.

        Raises:
            BaseException: what the function raised.
        """
        self.wait()
        if not self._is_made:  # in a child that was forked before
            self._run()
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # whose traceback holds this object
        return cast(T, self._found)

    def wait(self) -> None:
        """Until the thread has ended."""
        if self._pid == os.getpid():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._found = self._make()
        except BaseException as error:  # raised where the result is asked for
            self._error = error
        self._is_made = True


def ahead(items: Iterator[T]) -> Generator[T]:
    """The items of an iterator, the next one made in a thread while one is in use.

    The first two are made when they are asked for: workers that are forked for the first one start before any thread
    does. What the iterator raises is raised in the place of the item. No thread is left when this ends or is closed.
    """
    end = object()

    def make() -> T | object:
        return next(items, end)

    following: Later[T | object] | None = None
    item = make()
    try:
        while item is not end:
            yield cast(T, item)
            item = make() if following is None else following.result()
            following = Later(make) if item is not end else None
    finally:
        if following is not None:
            following.wait()
