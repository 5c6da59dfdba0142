"""Set-up exchanges between ranks: JSON through the store of the process group, never pickle.

Used only while a runtime is created. Every exchange is collective.

[Note: One collective] A set-up begins with a barrier of the process group. The barrier fails if a rank has ended
without coming, which a store cannot detect. The rest goes through the store, which does not keep a process from ending
and shows which rank is missing.

[Note: Stores] A request to a store has no time limit: if the store's process is stopped, it waits forever. So a thread
makes the request, and the training loop watches that thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.distributed_c10d import _get_default_store

from odc import limits
from odc.config import LaunchEnvironment, RuntimeConfig
from odc.errors import OUR_FAULT, ConfigError, OdcError, SetupError
from odc.liveness.gloo import num_connections
from odc.liveness.process import WatchedProcess
from odc.liveness.threads import HelperThread, Reminder, look_until

logger = logging.getLogger("odc")

MAX_PAYLOAD_BYTES = 64 << 20
_KNOWN = "odc_is_known_everywhere"
_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
_NO_STORE = (RuntimeError, ValueError)  # it has gone with rank 0, or is not to be had
T = TypeVar("T")


def no_op() -> None:
    """The default of ``check``."""


class BrokenExchangeError(SetupError):
    """The process group has failed: a rank has ended, or cannot be reached."""


class OutOfReachError(SetupError):
    """A rank cannot be reached. If it has failed itself, that is what all ranks are told instead."""


class Exchange(Protocol):
    """How the ranks of one group swap small messages during set-up."""

    rank: int
    world_size: int

    @property
    def global_ranks(self) -> Sequence[int]:
        """The number in the job of each rank of the group: what people know it by."""
        ...

    def all_gather(self, payload: bytes, check: Callable[[], None] = no_op) -> list[bytes]:
        """Every rank's payload, in rank order, on every rank. Collective; acts as a barrier.

        Args:
            check: called from time to time while this rank waits; ends the wait by raising.
        """
        ...


class ProcessGroupExchange:
    """Exchange over a ``torch.distributed`` group: see [Note: One collective]. Waits can be interrupted.

    Args:
        device: of the barrier, where the group has no backend for host memory.
        timeout_s: how long to wait for the others; default: :func:`setup_timeout_s`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._group = group
        self._device = device
        self._timeout_s = setup_timeout_s() if timeout_s is None else timeout_s
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._store: Store | None = None  # of this exchange alone, once all ranks have entered
        self._connections = 0
        self._round = 0

    @cached_property
    def global_ranks(self) -> Sequence[int]:
        """The ranks' numbers in the job."""
        return dist.get_process_group_ranks(self._group)

    @cached_property
    def _participants(self) -> Participants:
        return Participants(self._group, self.global_ranks, self.global_ranks[self.rank])

    def leave_word(self, error: BaseException) -> None:
        """Set-up has failed here: why, for ranks that learn of it only by missing this one."""
        self._participants.leave_word(f"{type(error).__name__}: {error}")

    def all_gather(self, payload: bytes, check: Callable[[], None] = no_op) -> list[bytes]:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise SetupError(f"set-up message of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}. {OUR_FAULT}")
        store = self._store = self._store or self._enter(check)
        self._round += 1
        number = self._round
        swap = _Swap(store, number, self.rank, self.world_size, payload)
        reminder, started = Reminder(), time.monotonic()
        next_look, next_word = started + limits.LOSSES_LOOK_S, started + limits.WORDS_LOOK_S

        def look() -> None:
            nonlocal next_look, next_word
            check()
            now = time.monotonic()
            self._remind(now - started, reminder, lambda: self._participants.missing(store, number))
            if now > next_look:
                next_look = now + limits.LOSSES_LOOK_S
                self._look_for_losses(swap)
            if now > next_word:
                next_word = now + limits.WORDS_LOOK_S
                self._look_for_words()

        swap.run(look)
        if swap.error is not None:
            self._raise_broken(f"the store of the process group is out of reach: {_first_line(swap.error)}")
        return swap.rows

    def _enter(self, check: Callable[[], None]) -> Store:
        """Come to a set-up with all other ranks, and give it a place of its own in the store."""
        patience_s = min(self._timeout_s, limits.STORE_BEGIN_S)
        self._participants.enter(patience_s)  # before the barrier: who waits must be known to have come
        self._meet(check)
        self._connections = num_connections() or 0
        store = self._participants.begin(patience_s)
        if store is None:
            raise SetupError(
                "the process group has no store that answers, through which ranks could agree: initialise it with "
                "torchrun, or with an init_method or a store"
            )
        return store

    def _meet(self, check: Callable[[], None]) -> None:
        on_host = "cpu:" in dist.get_backend_config(self._group)  # where one backend serves both, host memory is surer
        devices = None if on_host or self._device is None or self._device.index is None else [self._device.index]
        work = dist.barrier(self._group, async_op=True, device_ids=devices)
        reminder = Reminder()

        def look(waited_s: float) -> None:
            check()
            self._remind(waited_s, reminder, self._participants.absent)

        try:
            self._await(work, look)
        except BaseException:
            _keep_for_ever(self._group or dist.group.WORLD)
            raise
        try:
            work.wait()
        except RuntimeError as problem:
            self._raise_broken(
                f"a rank has ended or is out of reach: {_first_line(problem)}. If all are running, an earlier session "
                "has failed while a rank was in a collective, and its process group was ended with that: on every rank "
                "call dist.destroy_process_group(), then dist.init_process_group() with a store of its own, and shard "
                "the model anew; or start the job again"
            )

    @staticmethod
    def _await(work: dist.Work, look: Callable[[float], None]) -> None:
        """Not by ``work.wait()``, inside which Ctrl-C is not heard."""
        look_until(work.is_completed, look)

    def _raise_broken(self, otherwise: str) -> NoReturn:
        account = self._participants.account()
        raise BrokenExchangeError(f"set-up cannot go on: {account or otherwise}") from None

    def _remind(self, waited_s: float, reminder: Reminder, absent: Callable[[], list[int]]) -> None:
        """Warn of a long wait, and end it at the limit."""
        me = self.global_ranks[self.rank]
        is_over = waited_s > self._timeout_s
        if not is_over and not reminder.is_due(waited_s):
            return
        missing = absent()
        whom = f"ranks {missing}" if missing else "the other ranks"
        if is_over:
            raise SetupError(
                f"rank {me} has waited {waited_s:.0f} s in set-up for {whom}: not all of them have come here. Every "
                "rank has to patch its model, and none may have failed before. If they are only slow, raise timeout_s "
                f"or ODC_TIMEOUT above {self._timeout_s:g} s."
            )
        logger.warning("odc: rank %d has waited %.0f s in set-up for %s", me, waited_s, whom)

    def _look_for_losses(self, swap: _Swap) -> None:
        """All ranks have entered; whoever has ended since then will not come."""
        lost = self._participants.ended()
        left = num_connections()
        is_cut_off = left is not None and left < self._connections
        # It may have brought its part, and ended.
        if (lost is None and not is_cut_off) or swap.done.wait(limits.LOSSES_LOOK_S):
            return
        # What it has said may name another one, of a group that this rank is not in.
        account = self._participants.account() if lost is None else self._participants.end_of_any()
        raise BrokenExchangeError(f"set-up cannot go on: {account or lost or 'a rank has ended or is out of reach'}")

    def _look_for_words(self) -> None:
        """A rank that has failed here, and whose process goes on all the same, has left word."""
        if (account := self._participants.end_of_any()) is not None:
            raise BrokenExchangeError(f"set-up cannot go on: {account}")


class _Swap:
    """One exchange under way, in a thread: see [Note: Stores]."""

    def __init__(self, store: Store, number: int, rank: int, world_size: int, payload: bytes) -> None:
        self._store = store
        self._number = number
        self._rank = rank
        self._world_size = world_size
        self._payload = payload
        self.rows: list[bytes] = []
        self.error: BaseException | None = None
        self.done, self._given_up = threading.Event(), threading.Event()

    def run(self, look: Callable[[], None]) -> None:
        """``look`` is called from time to time, and ends it by raising."""
        thread = HelperThread(lambda: self._attempt(no_op), "odc-exchange")
        try:
            try:
                thread.start()
            except SetupError:  # which the other ranks have to be told of all the same
                self._attempt(look)
            while not self.done.wait(limits.STORE_SLICE_S):
                look()
        finally:
            self._given_up.set()
            if thread.is_alive():  # one that a store holds up is not waited for
                thread.join(limits.STORE_SLICE_S)

    def _attempt(self, look: Callable[[], None]) -> None:
        try:
            self._swap(look)
        except OdcError:
            raise
        except Exception as error:  # raised where the exchange is awaited
            self.error = error
        self.done.set()

    def _swap(self, look: Callable[[], None]) -> None:
        store, prefix, old = self._store, f"{self._number}/", f"{self._number - 2}/"
        store.set(f"{prefix}{self._rank}", self._payload)  # type: ignore[arg-type]
        if self._number > 2:  # who has come to the exchange before this one has read all of the one before that
            store.delete_key(f"{old}{self._rank}")
            if self._rank == 0:
                store.delete_key(f"{old}arrived")
        arrived, pause_s = store.add(f"{prefix}arrived", 1), limits.STORE_PAUSES_S[0]
        while arrived < self._world_size:
            if self._given_up.wait(pause_s):
                return
            look()
            pause_s = min(2 * pause_s, limits.STORE_PAUSES_S[1])
            arrived = store.add(f"{prefix}arrived", 0)
        self.rows = store.multi_get([f"{prefix}{rank}" for rank in range(self._world_size)])


class Participants:
    """Who has come to set-up, and what became of those who have not.

    When a barrier breaks it names nobody. The store outlives the ranks, so whoever is left can look up there who never
    came, who came and has ended, and what a rank of another group has left as its reason. A store that has failed or
    not answered once is asked no more; then nobody is told anything.
    """

    def __init__(self, group: dist.ProcessGroup | None, ranks: Sequence[int], me: int) -> None:
        self._ranks = ranks
        self._me = me
        self._entered = 0
        self._processes: dict[int, int] = {}  # of the ranks whose processes can be seen from here
        self._store: Store | None = None
        self._is_silent = False
        with contextlib.suppress(*_NO_STORE, ConfigError):
            group = group or dist.group.WORLD
            attempt = LaunchEnvironment.from_environment().attempt
            self._store = PrefixStore(f"odc/{attempt}", _get_default_store())
            self._name = "" if group is None else group.group_name

    def enter(self, patience_s: float = limits.STORE_PATIENCE_S) -> None:
        """This rank has come to set-up."""

        def enter(store: Store) -> int:
            store.set(f"reason/{self._me}", "")  # of an earlier set-up
            store.set(f"process/{self._me}", json.dumps([os.getpid(), _place()]))
            store.add(f"entries/{self._name}", 1)
            return store.add(self._times(self._me), 1)

        self._entered = self._ask(enter, 0, patience_s)

    def begin(self, patience_s: float) -> Store | None:
        """All ranks have come: the part of the store that is this set-up's alone; None if the store does not answer."""

        def begin(store: Store) -> Store:
            # All have entered, and none enters again before this set-up has its first exchange: all read the same.
            entries = store.add(f"entries/{self._name}", 0)
            processes = store.multi_get([f"process/{rank}" for rank in self._ranks])
            for rank, (pid, place) in zip(self._ranks, map(json.loads, processes), strict=True):
                if place == _place() and rank != self._me:
                    self._processes[rank] = pid
            return PrefixStore(f"{self._name}/{entries}", store)

        return self._ask(begin, None, patience_s)

    def ended(self) -> str | None:
        """A rank that had come and whose process has ended since, for people; asks no store."""
        for rank, pid in self._processes.items():
            if (end := _end_of(pid)) is not None:
                return f"rank {rank} (pid {pid}) has ended: {end}"
        return None

    def missing(self, store: Store, number: int) -> list[int]:
        """The ranks, by their numbers in the job, that have not come to an exchange of a set-up yet."""
        ranks = list(enumerate(self._ranks))
        return self._ask(lambda _: [who for rank, who in ranks if not store.check([f"{number}/{rank}"])], [])

    def _times(self, rank: int) -> str:
        return f"times/{self._name}/{rank}"

    def leave_word(self, reason: str) -> None:
        """For those who will miss this rank, in this group or in another one; also by a store that was silent once."""
        self._is_silent = False

        def leave(store: Store) -> None:
            times = self._entered or store.add(self._times(self._me), 0) + 1  # it may fail before it enters
            store.set(f"reason/{self._me}", json.dumps([self._name, times, reason]))

        self._ask(leave, None)

    def end_of_any(self) -> str | None:
        """What has become of a rank that had come and is there no more, or has failed, for people."""
        return self._ask(self._first_end, None)

    def absent(self) -> list[int]:
        """The ranks, by their numbers in the job, that have not come yet."""
        return self._ask(self._absent, [])

    def _absent(self, store: Store) -> list[int]:
        return [rank for rank in self._ranks if store.add(self._times(rank), 0) < self._entered]

    def account(self) -> str | None:
        """Who has made set-up fail, for people; None if nobody can tell."""
        deadline = time.monotonic() + limits.ABSENT_MOMENT_S
        nothing: tuple[list[int], str | None] = ([], None)
        while True:
            absent, end = self._ask(lambda store: (self._absent(store), self._first_end(store)), nothing)
            if end is not None or self._store is None or self._is_silent:
                return end
            if time.monotonic() > deadline:
                break
            time.sleep(limits.ABSENT_PAUSE_S)
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
            end, word = _end_of(pid) if place == _place() else None, self._word(store, rank)
            if end is not None:
                said = f"; it had said: {word}" if word and "signal" not in end else ""  # who is killed says nothing
                return f"rank {rank} (pid {pid}) has ended: {end}{said}"
            if word:
                words.append(f"it failed on rank {rank} (pid {pid}): {word}")
        return words[0] if words else None

    def _word(self, store: Store, rank: int) -> str:
        """The reason that a rank has left, but for one of an earlier set-up of this group: it may have ended since."""
        left = store.get(f"reason/{rank}")
        name, times, reason = json.loads(left) if left else ("", 0, "")
        return "" if name == self._name and times < self._entered else str(reason)

    def _ask(self, question: Callable[[Store], T], otherwise: T, patience_s: float = limits.STORE_PATIENCE_S) -> T:
        """See [Note: Stores]."""
        answers: list[T] = []
        store = self._store
        if store is None or self._is_silent:
            return otherwise

        def ask() -> None:
            with contextlib.suppress(*_NO_STORE):
                answers.append(question(store))

        thread = _run_aside(ask, "odc-participants")
        if thread.is_alive():
            thread.join(patience_s)
        self._is_silent = not answers
        return answers[0] if answers else otherwise


def _run_aside(work: Callable[[], None], name: str) -> HelperThread:
    """Have ``work``, which never raises, done by a thread; by this one where none can be started, which the other ranks
    have to be told of all the same."""
    thread = HelperThread(work, name)
    try:
        thread.start()
    except SetupError:
        work()
    return thread


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


def _first_line(problem: BaseException) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


def setup_timeout_s(timeout_s: float | None = None) -> float:
    """How long set-up waits for the others, by default as ``ODC_TIMEOUT`` says, and never for less than ten minutes: a
    short limit on silence in training must not be one on how long ranks load their checkpoints."""
    wanted = RuntimeConfig.from_environment().timeout_s if timeout_s is None else timeout_s
    return max(wanted, limits.SETUP_LEAST_TIMEOUT_S)


def _keep_for_ever(group: object) -> None:
    """Never let ``group`` be destroyed: it would wait, at the end of this process, for an operation that is under way,
    and nothing else takes one back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def gather_json(exchange: Exchange, value: Any) -> list[Any]:
    """Every rank's JSON-serialisable ``value``, in rank order."""
    return [json.loads(raw) for raw in exchange.all_gather(json.dumps(value).encode())]


def raise_together(exchange: Exchange, error: BaseException | None, value: Any = None) -> list[Any]:
    """Turn the failure of one rank into an error on all of them, so that none is left waiting in set-up.

    Returns:
        every rank's JSON-serialisable ``value``, in rank order, if none has failed.

    Raises:
        the local ``error`` on the rank that has one, unless it follows from another rank's; :class:`SetupError` naming
        that rank on the others.
    """
    row = None if error is None else [f"{type(error).__name__}: {error}", isinstance(error, OutOfReachError)]
    rows = gather_json(exchange, [row, value if error is None else None])
    failed = [(row[1], rank, row[0]) for rank, (row, _) in enumerate(rows) if row is not None]
    if not failed:
        return [found for _, found in rows]
    is_consequence, rank, text = min(failed)  # causes first
    problem = error
    if problem is None or (isinstance(problem, OutOfReachError) and not is_consequence):
        problem = SetupError(f"set-up failed on rank {exchange.global_ranks[rank]}: {text}")
    problem.__dict__[_KNOWN] = True
    raise problem


def is_known_everywhere(error: BaseException) -> bool:
    """Whether it comes from :func:`raise_together`: every rank has it, or one like it."""
    return _KNOWN in error.__dict__


def together(exchange: Exchange, action: Callable[[], T]) -> T:
    """What ``action``, which must not be collective itself, returns here; if it fails on any rank, it fails on all.

    Raises:
        as :func:`raise_together`.
    """
    result, error = _attempt(action)
    raise_together(exchange, error)
    return cast(T, result)


def gather_together(exchange: Exchange, action: Callable[[], Any]) -> list[Any]:
    """As :func:`together`: what ``action`` returns on each rank, in rank order, by JSON."""
    result, error = _attempt(action)
    return raise_together(exchange, error, result)


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        return None, problem


def require_agreement(
    exchange: Exchange, tables: Mapping[str, Mapping[str, str]], check: Callable[[], None] = no_op
) -> None:
    """Check that every rank has the same tables (versions, options, units and parameters), and passes ``check``.

    Raises:
        SetupError: on all ranks, naming the first table and item that differs from rank 0 and both values.
        what ``check`` raises, as :func:`raise_together`.
    """
    own = {title: dict(table) for title, table in tables.items()}

    def digest() -> str:
        check()
        return hashlib.sha256(json.dumps(own).encode()).hexdigest()

    if len(set(gather_together(exchange, digest))) == 1:  # every rank would read the tables of all
        return
    everyone = gather_json(exchange, own)
    for rank in range(1, exchange.world_size):
        difference = _first_difference(everyone[0], everyone[rank])
        if difference:
            title, item, ours, theirs = difference
            first, other = exchange.global_ranks[0], exchange.global_ranks[rank]
            raise SetupError(
                f"rank {other} differs from rank {first} in {title}, item {item!r}: rank {first} has {ours}, rank "
                f"{other} has {theirs}. All ranks must run the same versions, options and model."
            )


def _first_difference(
    left: Mapping[str, Mapping[str, str]], right: Mapping[str, Mapping[str, str]]
) -> tuple[str, str, str, str] | None:
    for title in left:
        a, b = left[title], right.get(title, {})
        for item in [*a, *(key for key in b if key not in a)]:
            if a.get(item) != b.get(item):
                return title, item, a.get(item, "(absent)"), b.get(item, "(absent)")
        if list(a) != list(b):
            return title, "order of items", str(list(a)), str(list(b))
    return None
