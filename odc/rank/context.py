"""The base of a rank's contexts: transport, waits, failure, end.

:class:`odc.Runtime` (parameters and gradients) and :class:`odc.ItemExchange` (outputs of encoders) each have a
transport, and follow the same rules: the first failure ends the job on all ranks; misuse changes nothing; a closed or
forked context refuses every operation; and a context that was never closed tells its peers so at exit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch

from odc._version import __version__
from odc.config import RuntimeConfig
from odc.errors import AbortedError, MisuseError, OdcError
from odc.liveness.faults import FaultInjector
from odc.liveness.leaving import CLOSING, Closable, has_failed_at_exit, last_error, run_all
from odc.liveness.threads import in_helper
from odc.rank.waiting import Failure, Job, Waiter, WaitStats
from odc.rank.watchdog import StreamWatchdog
from odc.setup.agreement import Exchange, is_known_everywhere, no_op, require_agreement
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports._rendezvous import require_descriptors
from odc.transports.base import Transport

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("odc")


def shut_down(parts: Sequence[Closable], *transports: Transport) -> None:
    """Close the parts, in this order, and then what they work on. Waits for no other rank longer than a moment.

    Raises:
        as :func:`run_all`.
    """
    for transport in transports:
        transport.peers.is_leaving = True
    says = [transport.announce_close for transport in transports]  # none waits for what another one has to wait for
    closes = [transport.close for transport in transports]
    run_all([*(part.close for part in parts), *says, *closes])


def give_up(error: BaseException, parts: Sequence[Closable], *transports: Transport) -> None:
    """The end of a set-up that has failed here: unless all ranks know, they are told, and wait for this one no more."""
    for transport in transports if not is_known_everywhere(error) else ():
        transport.peers.abort(f"{transport.topology.whoami}: {type(error).__name__}: {error}")
    try:
        shut_down(parts, *transports)
    except Exception as another:  # the first cause is the one to raise
        logger.error("odc: while giving up: %s: %s", type(another).__name__, another)


class Leaving:
    """What happens to a runtime that nobody has closed: its user has dropped it, or the interpreter ends."""

    def __init__(self, parts: Sequence[Closable], transports: Sequence[Transport], job: Job, whoami: str) -> None:
        self._parts = parts
        self._transports = transports
        self._job = job
        self._whoami = whoami
        self._pid = os.getpid()
        self._earlier_error = id(last_error())  # in a notebook, say, where it ended nothing

    def without_close(self) -> None:
        if os.getpid() != self._pid:
            return
        # [Note: Garbage is collected anywhere] Also in a helper thread of this very runtime, which can neither join
        # itself nor wait for a lock that it holds. It has to go on, see that it is to end, and be joined by another.
        if in_helper():
            with contextlib.suppress(RuntimeError):  # no thread can be started any more
                threading.Thread(target=self._end, name=CLOSING, daemon=False).start()
                return
        self._end()

    def _end(self) -> None:
        run_all([self._tell_why, lambda: shut_down(self._parts, *self._transports)])

    def _tell_why(self) -> None:
        error = last_error()
        if has_failed_at_exit(self._earlier_error):
            self._job.abort(f"{self._whoami}: {type(error).__name__}: {error}")


class RankContext:
    """One rank's part in a group, owned by the caller, with :meth:`close`; no process-global state.

    Args:
        leader: another context of this rank, which owns this one: what fails in one fails in both, and the ranks of
            both groups are told.
    """

    kind: ClassVar[str]
    """What messages call it."""

    def __init__(
        self, transport: Transport, config: RuntimeConfig, stats: WaitStats, leader: RankContext | None = None
    ) -> None:
        self.config = config
        self.topology = transport.topology
        self.faults: FaultInjector = FaultInjector(config.fault, self.topology.me) if leader is None else leader.faults
        self._transport = transport
        self._leader = leader
        self._failure: Failure = Failure() if leader is None else leader._failure
        self._failure_lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[[], RankContext] | None = None
        self._watchdog: StreamWatchdog | None = None
        job = None if leader is None else leader._waiter.job
        self._waiter: Waiter = Waiter(transport, config.timeout_s, self.faults, stats, self._failure, job)
        transport.peers.check_context = self._waiter.check

    # What a kind of context adds

    def _parts(self) -> list[Closable]:
        """What has to be closed, in this order, before the transports."""
        return [] if self._watchdog is None else [self._watchdog]

    def _transports(self) -> list[Transport]:
        return [self._transport]

    def _at_failure(self) -> None:
        """This rank has failed, or been told of a failure; its peers have not been told yet."""

    def _refused(self, error: OdcError) -> None:
        """This rank has refused something, and nothing was changed; its script may catch that, and go on."""

    def _let_go(self) -> None:
        """Closed: let go of all memory of the transport."""

    # Operations. Each tells the other ranks of a failure that cannot be undone before raising it here.

    @property
    def reporting(self) -> _Reporting:
        """A context: what fails in it cannot be undone, so it ends the job on all ranks at once; misuse has changed
        nothing."""
        return _Reporting(self)

    def _report(self, error: BaseException) -> None:
        if self._leader is not None:
            self._leader._report(error)
        elif isinstance(error, MisuseError):
            self._refused(error)
        else:
            self._failure.is_raised = True
            self.abort(error)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:  # a forked child has a copy of this object, and none of the memory behind it
            raise OdcError(
                f"this {self.kind} belongs to process {self._pid}; a process forked from it (a DataLoader worker, say) "
                "cannot communicate"
            )
        if self._closed:
            raise OdcError(f"this {self.kind} is closed")

    @property
    def has_failed(self) -> bool:
        """Whether this rank has told the others of an error, or been told of one."""
        return self._failure.error is not None

    @property
    def transport_name(self) -> str:
        return self._transport.name

    @property
    def _whoami(self) -> str:
        return self.topology.whoami

    def abort(self, error: BaseException) -> None:
        """Tell every peer that this rank has failed, once; they raise ``AbortedError`` at their next operation."""
        if self._leader is not None:
            self._leader.abort(error)
            return
        if os.getpid() != self._pid:
            return  # a forked child's failures are its own
        with self._failure_lock:
            if self._closed or self._failure.error is not None:
                return
            self._failure.error = error
        self._at_failure()
        heard = self._waiter.job.abort_notice() if isinstance(error, AbortedError) else None
        self._waiter.job.abort(heard or f"{self._whoami}: {type(error).__name__}: {error}")
        self._transport.peers.wake_self()

    def close(self) -> None:
        """Release everything this rank holds. Local and idempotent.

        Ranks that have not closed yet may still read what is published, in an evaluation, say. Where that needs this
        process (between hosts, and on GPUs), closing goes on in the background until they have closed, too; the
        interpreter waits for it at its end.
        """
        if self._closed:
            return
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
            if os.getpid() == self._pid:  # a forked child has nothing to release
                shut_down(self._parts(), *self._transports())
                self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(error)
        self.close()


class _Reporting:
    """See :attr:`RankContext.reporting`. (Not made of a generator, which every gather would pay for.)"""

    __slots__ = ("_context",)

    def __init__(self, context: RankContext) -> None:
        self._context = context

    def __enter__(self) -> None:
        self._context._require_open()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._context._report(error)


def weak_abort(context: RankContext) -> Callable[[BaseException], None]:
    """For helper threads, which must not keep a context alive that its user has dropped."""
    reference = weakref.ref(context)

    def abort(error: BaseException) -> None:
        alive = reference()
        if alive is not None:
            alive.abort(error)

    return abort


# Set-up: collective, in this order


def agree(
    exchange: Exchange,
    config: RuntimeConfig,
    tables: Mapping[str, Mapping[str, str]],
    check: Callable[[], None] = no_op,
) -> None:
    """Check that all ranks have the same versions, options and ``tables`` (title -> item -> value), room for what
    set-up opens, and pass ``check``.

    Raises:
        SetupError: on all ranks; what ``check`` raises, on those whose check it is.
    """
    versions = {"odc": __version__, "torch": torch.__version__, "machine": platform.machine()}

    def check_all() -> None:
        check()
        require_descriptors(exchange.world_size, now=1)  # what follows opens a file; who is on this host is not known

    require_agreement(exchange, {"versions": versions, "options": config.shared(), **tables}, check_all)


def connect(exchange: Exchange, config: RuntimeConfig, device: torch.device) -> Transport:
    """The transport that all ranks of ``exchange`` can use, constructed.

    Raises:
        SetupError: on all ranks, if there is none, or they cannot connect.
    """
    topology = Topology.discover(exchange, config.host_id, config.address)
    transport_class = registry.choose(config.transport, topology, device, exchange)
    return transport_class(exchange, topology, config.timeout_s, device)


C = TypeVar("C", bound=RankContext)


def complete(transport: Transport, make: Callable[[], C], finish: Callable[[C], None]) -> C:
    """``make`` a context on ``transport`` and ``finish`` its set-up; if that fails, nothing is left of it."""
    parts: list[Closable] = []
    transports = [transport]
    try:
        context = make()
        try:
            finish(context)
        finally:
            parts, transports = context._parts(), context._transports()
        # An interpreter that ends without close() must still tell its peers so.
        leaving = Leaving(parts, transports, context._waiter.job, context._whoami)
        context._finalizer = weakref.finalize(context, leaving.without_close)
        transport.serves_readers = True
    except BaseException as error:
        give_up(error, parts, *transports)
        raise
    return context
