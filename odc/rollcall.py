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
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from odc.config import LaunchEnvironment
from odc.errors import ConfigError
from odc.transports._process import WatchedProcess

_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_MOMENT_S, _POLL_S = 2.0, 0.02  # for others to come, or to end, which they may be about to
_NO_STORE = (RuntimeError, ValueError)  # it has gone with rank 0, or is not to be had

T = TypeVar("T")


class RollCall:
    """Of the ranks of one group, which enters once for each set-up. A store that fails tells nothing, and nobody."""

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
            store.set(f"process/{self._me}", json.dumps([os.getpid(), _place()]))
            return store.add(self._times(self._me), 1)

        self._entered = self._ask(enter, 0)

    def _times(self, rank: int) -> str:
        return f"times/{self._name}/{rank}"

    def leave_word(self, reason: str) -> None:
        """For those who will miss this rank, in this group or in another one."""
        word = json.dumps([os.getpid(), reason])
        self._ask(lambda store: store.set(f"reason/{self._me}", word), None)

    def absent(self) -> list[int]:
        """The ranks, by their numbers in the job, that have not come yet."""
        nothing: list[int] = []
        times = self._ask(lambda store: [store.add(self._times(rank), 0) for rank in self._ranks], nothing)
        return [rank for rank, count in zip(self._ranks, times, strict=False) if count < self._entered]

    def account(self) -> str | None:
        """Who has made set-up fail, for people; None if nobody can tell."""
        deadline = time.monotonic() + _MOMENT_S
        while True:
            absent = self.absent()
            for rank in self._ranks:
                found = None if rank == self._me else self._ask(partial(self._end_of, rank), None)
                if found is not None:
                    return found
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        if not absent:
            return None
        who = f"rank {absent[0]} has" if len(absent) == 1 else f"one of the ranks {absent} has"
        return f"{who} not come to it, and has ended, as its own output may tell, or is out of reach"

    def _end_of(self, rank: int, store: Store) -> str | None:
        """What has become of a rank that had come, here or to the set-up of another group, and is there no more."""
        if not store.check([f"process/{rank}"]):
            return None
        pid, place = json.loads(store.get(f"process/{rank}"))
        if store.check([f"reason/{rank}"]):
            left_by, reason = json.loads(store.get(f"reason/{rank}"))
            if left_by == pid:
                return f"it failed on rank {rank} (pid {pid}): {reason}"
        end = _end_of(pid) if place == _place() else None
        return None if end is None else f"rank {rank} (pid {pid}) has ended: {end}"

    def _ask(self, question: Callable[[Store], T], otherwise: T) -> T:
        try:
            return otherwise if self._store is None else question(self._store)
        except _NO_STORE:
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
