"""Layer 2: threads, and a fork. What is made ahead: in order, one thing only, errors in their place, nothing left."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from odc.balance.data.ahead import Later, ahead


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("odc-")]


class Counted:
    """Counts to ten, and knows how far it was asked, and by whom; may fail on the way."""

    def __init__(self, fail_at: int = -1) -> None:
        self.asked: list[str] = []
        self._fail_at = fail_at

    def __iter__(self) -> Iterator[int]:
        for number in range(10):
            self.asked.append(threading.current_thread().name)
            if number == self._fail_at:
                raise KeyError(number)
            yield number


@pytest.mark.parametrize("number", [0, 1, 2, 9, 10])
def test_the_same_items_in_their_order_one_ahead(number: int) -> None:
    counted = Counted()
    items = ahead(iter(counted))
    assert [next(items) for _ in range(number)] == list(range(number))
    items.close()
    assert not names()
    assert len(counted.asked) == min(10, number + (number > 1))
    assert counted.asked[:2] == ["MainThread"] * min(number, 2)
    assert set(counted.asked[2:]) <= {"odc-ahead"}
    assert list(ahead(iter(Counted()))) == list(range(10))
    assert list(ahead(iter(()))) == []


@pytest.mark.parametrize("number", [0, 1, 2, 7])
def test_an_error_comes_in_the_place_of_its_item(number: int) -> None:
    items = ahead(iter(Counted(fail_at=number)))
    assert [next(items) for _ in range(number)] == list(range(number))
    with pytest.raises(KeyError, match=str(number)):
        next(items)
    assert list(items) == []
    assert not names()


def test_dropped_items_leave_no_thread() -> None:
    items = ahead(iter(Counted()))
    next(items), next(items)
    del items
    assert not names()


def test_a_forked_child_makes_for_itself_what_its_parent_is_making() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def make() -> int:
        begun.set()
        assert go_on.wait(30)
        return os.getpid()

    later = Later(make)
    assert begun.wait(30)
    if (pid := os.fork()) == 0:
        go_on.set()
        os._exit(later.result() != os.getpid())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    go_on.set()
    assert later.result() == os.getpid()
    assert not names()
