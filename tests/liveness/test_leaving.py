"""Layers 1 and 2: no ranks, ranks as threads. The end of a runtime, of one that nobody has closed too, and what its
peers are told."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from thread_ranks import ThreadExchange, of_one_unit, run_threads, values
from watching import until

from odc import PeerClosedError, Runtime
from odc.rank.context import Leaving, shut_down


class Part:
    """A transport, as far as leaving asks."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.closed = 0
        self.peers = SimpleNamespace(is_leaving=False)

    def abort(self, text: str) -> None:
        self.told.append(text)

    def announce_close(self) -> None:
        """To nobody."""

    def close(self) -> None:
        self.closed += 1


class SpeechlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


EARLIER = ValueError("in an earlier cell")


@pytest.mark.parametrize(
    ("error", "is_at_exit", "told"),
    [
        (TypeError("sample 17"), True, ["rank 1 (pid 4): TypeError: sample 17"]),
        (TypeError("sample 17"), False, []),
        (EARLIER, True, []),
        (None, True, []),
    ],
    ids=["a script that failed", "dropped while running", "an old error", "a script that ended"],
)
def test_peers_are_told_of_what_has_ended_the_script(
    error: Exception | None, is_at_exit: bool, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = leave(error, is_at_exit, monkeypatch)
    assert part.told == told
    assert part.closed == 1


def test_an_error_without_a_text_does_not_keep_anything_open(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part()
    with pytest.raises(RuntimeError, match="no text"):
        leave(SpeechlessError(), True, monkeypatch, part)
    assert part.closed == 1


def leave(error: Exception | None, is_at_exit: bool, monkeypatch: pytest.MonkeyPatch, part: Part | None = None) -> Part:
    monkeypatch.setattr(sys, "last_value", EARLIER, raising=False)
    part = part or Part()
    transport: Any = part
    leaving = Leaving([], [transport], transport, "rank 1 (pid 4)")
    monkeypatch.setattr(sys, "last_value", error)
    if is_at_exit:
        monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    leaving.without_close()
    return part


class Failing(Part):
    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__()
        self._text, self._error = name, error

    def close(self) -> None:
        super().close()
        raise self._error


@pytest.mark.parametrize("error", [ValueError("the first"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
def test_every_part_is_closed_behind_one_that_fails(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """A transport that stays open would make the peers wait for the whole limit."""
    parts = [Part(), Failing("a", error), Failing("b", OSError("the second")), Part()]
    transport: Any = Part()
    with pytest.raises(type(error)) as caught:
        shut_down(parts, transport)
    assert caught.value is error
    assert [part.closed for part in [*parts, transport]] == [1] * 5
    assert [r.getMessage() for r in caplog.records] == ["odc: while closing, after another error: OSError: the second"]


def have_collected(runtime: Runtime, within: str) -> Callable[[], None]:
    """Have garbage collected in the thread of the runtime's links, once the returned function is called; it returns
    then. ``within``: at what the thread takes in."""
    dropped, collected = threading.Event(), threading.Event()

    def collect(*_: object) -> None:
        if dropped.wait(30) and not collected.is_set():
            assert threading.current_thread().name == "odc-links"
            collected.set()  # for the other way round this thread would have to survive
            gc.collect()

    transport: Any = runtime._transport
    link = next(iter(transport._links.by_rank.values()))
    if within == "control":
        link.__dict__["_take_control"] = collect
    else:
        link._peers.__dict__["deliver"] = collect

    def drop() -> None:
        dropped.set()
        assert collected.wait(30), "nothing was tested"

    return drop


@pytest.mark.parametrize("within", ["control", "data"])
def test_a_runtime_may_be_collected_in_a_thread_of_its_own(within: str) -> None:
    """Which cannot join itself; everything is closed all the same, and the other rank learns of it."""
    before = descriptors()

    def body(exchange: ThreadExchange) -> None:
        runtime = of_one_unit(exchange, 1000, timeout_s=60, host_id=f"h{exchange.rank}")
        runtime.publish(0, lambda shard: shard.fill_(1.0))
        runtime.begin()
        if exchange.rank == 0:
            drop = have_collected(runtime, within)
        exchange.all_gather(b"")
        if exchange.rank == 0:
            runtime.__dict__["itself"] = runtime  # only a collection frees it
            del runtime
            drop()
            return
        runtime._transport.post(0)  # for the thread of the links
        with runtime, pytest.raises(PeerClosedError, match="rank 0 .*closed its session"):
            runtime.finish()

    gc.disable()  # not before that thread does it
    try:
        values(run_threads(2, body))
    finally:
        gc.enable()
    until(lambda: not own_threads() and descriptors() <= before, "a thread or a descriptor is left", 30.0)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("odc-")]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
