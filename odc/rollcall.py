"""Who has come to set-up, and what became of those who have not: told through the store of the process group.

During set-up a process group is all that ranks have in common, and when a collective of it breaks it names nobody. Its
store outlives the ranks, so whoever is left can look up there who never came, who came and has ended, and what a rank
of another group has left as its reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from odc.config import LaunchEnvironment
from odc.errors import ConfigError, SetupError
from odc.threads import HelperThread
from odc.transports._process import WatchedProcess

_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_MOMENT_S, _POLL_S = 2.0, 0.1  # for others to come, or to end, which they may be about to
_PATIENCE_S = 2.0  # with the store
_NO_STORE = (RuntimeError, ValueError)  # it has gone with rank 0, or is not to be had

T = TypeVar("T")


class RollCall:
    """Of the ranks of one group, which enters once for each set-up.

    [Note: Stores] Asking a store has no time limit: whoever asks one whose process is stopped waits for ever. So a
    thread asks, and a store that has failed or not answered once is asked no more; then nobody is told anything.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], me: int) -> None:
        self._ranks = ranks
        self._me = me
        self._entered = 0
        self._store: Store | None = None
        with contextlib.suppress(*_NO_STORE, ConfigError):
            group = group or dist.group.WORLD
            attempt = LaunchEnvironment.from_environment().attempt
            self._store = PrefixStore(f"odc/{attempt}", _get_default_store())
            self._name = "" if group is None else group.group_name

    def enter(self) -> None:
        """This rank has come to set-up."""

        def enter(store: Store) -> int:
            store.set(f"reason/{self._me}", "")  # of an earlier set-up
            store.set(f"process/{self._me}", json.dumps([os.getpid(), _place()]))
            return store.add(self._times(self._me), 1)

        self._entered = self._ask(enter, 0)

    def _times(self, rank: int) -> str:
        return f"times/{self._name}/{rank}"

    def leave_word(self, reason: str) -> None:
        """For those who will miss this rank, in this group or in another one."""
        self._ask(lambda store: store.set(f"reason/{self._me}", reason), None)

    def absent(self) -> list[int]:
        """The ranks, by their numbers in the job, that have not come yet."""
        return self._ask(self._absent, [])

    def _absent(self, store: Store) -> list[int]:
        return [rank for rank in self._ranks if store.add(self._times(rank), 0) < self._entered]

    def account(self) -> str | None:
        """Who has made set-up fail, for people; None if nobody can tell."""
        deadline = time.monotonic() + _MOMENT_S
        nothing: tuple[list[int], str | None] = ([], None)
        while True:
            absent, end = self._ask(lambda store: (self._absent(store), self._first_end(store)), nothing)
            if end is not None or self._store is None:
                return end
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if not absent:
            return None
        who = f"rank {absent[0]} has" if len(absent) == 1 else f"one of the ranks {absent} has"
        return f"{who} not come to it, and has ended, as its own output may tell, or is out of reach"

    def _first_end(self, store: Store) -> str | None:
        """What has become of a rank that had come, here or to the set-up of another group, and is there no more."""
        words: list[str] = []
        for rank in self._ranks:
            if rank == self._me or not store.check([f"process/{rank}"]):
                continue
            pid, place = json.loads(store.get(f"process/{rank}"))
            end, word = _end_of(pid) if place == _place() else None, store.get(f"reason/{rank}").decode()
            if end is not None:
                said = f"; it had said: {word}" if word and "signal" not in end else ""  # who is killed says nothing
                return f"rank {rank} (pid {pid}) has ended: {end}{said}"
            if word:
                words.append(f"it failed on rank {rank} (pid {pid}): {word}")
        return words[0] if words else None

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        """See [Note: Stores]."""
        answers: list[T] = []
        store = self._store

        def ask() -> None:
            with contextlib.suppress(*_NO_STORE):
                if store is not None:
                    answers.append(question(store))

        with contextlib.suppress(SetupError):  # no thread can be started
            thread = HelperThread(ask, "odc-roll-call")
            thread.start()
            thread.join(_PATIENCE_S)
        if answers:
            return answers[0]
        self._store = None
        return otherwise


def _place() -> str:
    """Where process numbers mean the same."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PID_NAMESPACE)}"
    except OSError:
        return f"process {os.getpid()}"


def _end_of(pid: int) -> str | None:
    """How the process has ended, or None while it runs."""
    try:
        process = WatchedProcess(pid)
    except OSError as problem:
        return "its process is gone" if isinstance(problem, ProcessLookupError) else None
    try:
        return process.cause_of_death() if process.is_dead() else None
    finally:
        process.close()
