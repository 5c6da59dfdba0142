"""Set-up exchanges between ranks: JSON over the process group, never pickle.

Used while a runtime is created and by nothing after that. Every exchange is collective.
"""

from __future__ import annotations

import ctypes
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from odc.config import RuntimeConfig
from odc.errors import SetupError
from odc.pausing import Reminder, look_until
from odc.rollcall import RollCall

logger = logging.getLogger("odc")

MAX_PAYLOAD_BYTES = 64 << 20
_LEAST_TIMEOUT_S = 600.0
_KNOWN = "odc_is_known_everywhere"
_OWNERSHIP_S, _BETWEEN_LOOKS_S = 2.0, 1e-4
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
    """Exchange over a ``torch.distributed`` group, with tensors of bytes. Waits can be interrupted."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._group = group
        self._timeout_s = setup_timeout_s() if timeout_s is None else timeout_s
        # Where one backend serves both, as gloo does, host memory is the surer way.
        serves_hosts = "cpu:" in dist.get_backend_config(group)
        self._device = torch.device("cpu") if device is None or serves_hosts else device
        self._is_let_go = self._device.type == "cpu"  # a backend that keeps results is waited for once
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)

    @cached_property
    def global_ranks(self) -> Sequence[int]:
        """The ranks' numbers in the job."""
        return dist.get_process_group_ranks(self._group)

    @cached_property
    def _roll_call(self) -> RollCall:
        roll_call = RollCall(self._group, self.global_ranks, self.global_ranks[self.rank])
        roll_call.enter()
        return roll_call

    def leave_word(self, error: BaseException) -> None:
        """Set-up has failed here: why, for ranks that learn of it only by missing this one."""
        self._roll_call.leave_word(f"{type(error).__name__}: {error}")

    def all_gather(self, payload: bytes, check: Callable[[], None] = no_op) -> list[bytes]:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise SetupError(f"set-up message of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
        sizes = [int(row.item()) for row in self._gather(torch.tensor([len(payload)], dtype=torch.int64), check)]
        if max(sizes) > MAX_PAYLOAD_BYTES:
            raise SetupError(f"a rank announced a set-up message of {max(sizes)} bytes")
        padded = torch.zeros(max(max(sizes), 1), dtype=torch.uint8)
        if payload:
            padded[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        rows = self._gather(padded, check)
        return [bytes(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, row: torch.Tensor, check: Callable[[], None]) -> list[torch.Tensor]:
        roll_call = self._roll_call  # before the first collective: who waits must be known to have come
        tensors = [row.to(self._device, copy=True)]
        tensors += [torch.empty_like(tensors[0]) for _ in range(self.world_size)]
        work = dist.all_gather(tensors[1:], tensors[0], group=self._group, async_op=True)
        try:
            self._await(work, check)
        except BaseException:
            _keep_for_ever(self._group or dist.group.WORLD)
            raise
        try:
            work.wait()
        except RuntimeError as problem:
            account = roll_call.account()
            if account is None:
                reason = (str(problem).splitlines() or [type(problem).__name__])[0]
                account = f"a rank has ended or is out of reach: {reason}"
            raise BrokenExchangeError(f"set-up cannot go on: {account}") from None
        finally:
            del work
            if self._is_let_go:
                self._is_let_go = await_sole_ownership(tensors)
        return [tensor.cpu() for tensor in tensors[1:]]

    def _await(self, work: dist.Work, check: Callable[[], None]) -> None:
        """Not by ``work.wait()``, inside which Ctrl-C is not heard."""
        reminder, me = Reminder(), self.global_ranks[self.rank]

        def look(waited_s: float) -> None:
            check()
            if waited_s > self._timeout_s:
                raise SetupError(
                    f"rank {me} has waited {waited_s:.0f} s in set-up for {self._missing()}: not all of them have "
                    "come here. Every rank has to patch its model, and none may have failed before. If they are only "
                    f"slow, raise timeout_s or ODC_TIMEOUT above {self._timeout_s:g} s."
                )
            if reminder.is_due(waited_s):
                logger.warning("odc: rank %d has waited %.0f s in set-up for %s", me, waited_s, self._missing())

        look_until(work.is_completed, look)

    def _missing(self) -> str:
        absent = self._roll_call.absent()
        return f"ranks {absent}" if absent else "the other ranks"


def setup_timeout_s(timeout_s: float | None = None) -> float:
    """How long set-up waits for the others, by default as ``ODC_TIMEOUT`` says, and never for less than ten minutes: a
    short limit on silence in training must not be one on how long ranks load their checkpoints."""
    wanted = RuntimeConfig.from_environment().timeout_s if timeout_s is None else timeout_s
    return max(wanted, _LEAST_TIMEOUT_S)


def _keep_for_ever(group: object) -> None:
    """Never let ``group`` be destroyed: it would wait, at the end of this process, for an operation that is under way,
    and nothing else takes one back."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def await_sole_ownership(tensors: list[torch.Tensor]) -> bool:
    """Return when nothing but Python refers to the ``tensors``, or after two seconds; whether it is so.

    A thread of gloo lets go of an operation a moment after it is complete, and needs Python for the tensors in it. If
    Python begins to end just then, as it does after a set-up that fails, the process is aborted ("terminate called
    without an active exception").
    """
    deadline = time.monotonic() + _OWNERSHIP_S
    sole = torch.empty(0)._use_count()  # type: ignore[attr-defined]
    while any(tensor._use_count() > sole for tensor in tensors):  # type: ignore[attr-defined]
        if time.monotonic() > deadline:
            return False
        time.sleep(_BETWEEN_LOOKS_S)
    return True


def gather_json(exchange: Exchange, value: Any) -> list[Any]:
    """Every rank's JSON-serialisable ``value``, in rank order."""
    return [json.loads(raw) for raw in exchange.all_gather(json.dumps(value).encode())]


def raise_together(exchange: Exchange, error: BaseException | None) -> None:
    """Turn the failure of one rank into an error on all of them, so that none is left waiting in set-up.

    Raises:
        the local ``error`` on the rank that has one, unless it follows from another rank's; :class:`SetupError` naming
        that rank on the others.
    """
    row = None if error is None else [f"{type(error).__name__}: {error}", isinstance(error, OutOfReachError)]
    failed = [(row[1], rank, row[0]) for rank, row in enumerate(gather_json(exchange, row)) if row is not None]
    if not failed:
        return
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
    error: Exception | None = None
    try:
        result = action()
    except Exception as problem:  # whatever it is, the other ranks must not wait for this one
        error = problem
    raise_together(exchange, error)
    return result


def require_agreement(exchange: Exchange, tables: Mapping[str, Mapping[str, str]]) -> None:
    """Check that every rank has the same tables (versions, options, units and parameters).

    Raises:
        SetupError: on all ranks, naming the first table and item that differs from rank 0 and both values.
    """
    everyone = gather_json(exchange, {title: dict(table) for title, table in tables.items()})
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
