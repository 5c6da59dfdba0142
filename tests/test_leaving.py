"""Layer 1: no ranks. A runtime that nobody has closed, and what its peers are told."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from odc.leaving import Leaving


class Part:
    """A transport, as far as leaving asks."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.closed = 0

    def abort_peers(self, text: str) -> None:
        self.told.append(text)

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
    leaving = Leaving([part], transport, "rank 1 (pid 4)")
    monkeypatch.setattr(sys, "last_value", error)
    if is_at_exit:
        monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(is_alive=lambda: False))
    leaving.without_close()
    return part
