"""The context object: everything one rank holds to communicate on demand with the others of its group.

Owned by the caller, with :meth:`Runtime.close`; no process-global state. The FSDP patch builds one per model; the
benchmarks and the protocol tests build theirs directly.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed as dist

from odc._version import __version__
from odc.accumulators import AccumulatorStore, StorePlan
from odc.config import RuntimeConfig
from odc.copier import CopyThread
from odc.daemon import AccumulationDaemon
from odc.engine import TransferTable
from odc.errors import AbortedError, ConfigError, MisuseError, OdcError
from odc.exchange import Exchange, gather_json, raise_together, require_agreement, together
from odc.faults import FaultInjector
from odc.gloo import is_of_collective
from odc.leaving import Closable, Leaving, give_up, shut_down
from odc.protocol import End, MinibatchProtocol, State
from odc.timeline import Stats, Timeline
from odc.topology import Topology
from odc.transports import registry
from odc.transports._rendezvous import require_descriptors
from odc.transports.base import HOST, SymmetricBuffer, Transport, aligned
from odc.units import UnitSpec
from odc.waiting import Endpoint, Failure, Waiter
from odc.watchdog import JobWatchdog, Outside, StreamWatchdog


class Runtime:
    """One rank's end of on-demand communication. Build with :meth:`create` (collective)."""

    def __init__(
        self, transport: Transport, config: RuntimeConfig, units: Sequence[UnitSpec], prefers_daemon: bool = False
    ) -> None:
        topology = transport.topology
        self.config = config
        self.topology = topology
        self.units = tuple(units)
        self.stats = Stats()
        self._transport = transport
        self._failure = Failure()
        self._failure_lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._finalizer: weakref.finalize[[], Runtime] | None = None
        self.faults = FaultInjector(config.fault, topology.me)
        self._waiter = Waiter(transport, config.timeout_s, self.faults, self.stats, self._failure)
        transport.use_check(self._waiter.check)
        end = Endpoint(transport, self._waiter, self.faults, self.stats)
        plan = StorePlan.of(config, transport, prefers_daemon)
        world_size, signals = topology.world_size, MinibatchProtocol.num_signals(len(self.units))
        offsets = list(itertools.accumulate((aligned(u.shard_bytes) for u in units), initial=0))
        slots = 0 if plan.is_direct else AccumulationDaemon.slots_bytes(units, world_size)
        transport.reserve(offsets[-1] + slots + plan.shared_bytes(units, world_size))
        transport.open(
            num_signals=signals + (0 if plan.is_direct else AccumulationDaemon.num_signals(world_size)),
            num_locks=plan.num_locks(self.units, transport.engine),
        )
        self._published = transport.allocate(offsets[-1], "published shards")
        self._store: AccumulatorStore = plan.make(end, self.units)
        self._daemon: AccumulationDaemon | None = None
        if not plan.is_direct:
            self._daemon = AccumulationDaemon(end, self._store, self.units, signals, _weak_abort(self))
        self._copier: CopyThread | None = None
        self._watchdog: StreamWatchdog | None = None
        self._job_watchdog: JobWatchdog | None = None
        self._end_collectives: Callable[[], object] | None = None
        self._replicas: Transport | None = None
        self._meetings = 0  # with the replicas
        self.outside = Outside()
        """To be filled in by whoever enters a collective of torch."""
        self._protocol = MinibatchProtocol(end, self.units, self._published, offsets, self._store, self._daemon)

    @classmethod
    def create(
        cls,
        exchange: Exchange,
        units: Sequence[UnitSpec],
        config: RuntimeConfig | None = None,
        *,
        device: torch.device | None = None,
        agreement: Mapping[str, Mapping[str, str]] | None = None,
        replicas: Exchange | None = None,
        end_collectives: Callable[[], object] | None = None,
    ) -> Runtime:
        """Connect the ranks of ``exchange``. Collective.

        Args:
            units: what is communicated; the same on every rank.
            agreement: further tables that must be equal on all ranks (title -> item -> value).
            replicas: between the ranks with this one's place in their groups, if there are several groups.
            end_collectives: makes collectives of torch in this process fail, for those that wait for a rank which has
                failed. None: nothing outside of this runtime is looked after.

        Raises:
            SetupError: on all ranks, naming the first difference between them or the resource that is missing.
            ConfigError: an option has an unusable value.
        """
        config = config or RuntimeConfig()
        require_agreement(exchange, {**_own_tables(config, units), **(agreement or {})})
        # What follows opens a file. Who is on this host is not known yet.
        together(exchange, lambda: require_descriptors(exchange.world_size, now=1))
        transfers, prefers_daemon = _load_transfers(exchange, config)
        topology = Topology.discover(exchange, config.host_id, config.address)
        device = device or HOST
        transport_class = registry.choose(config.transport, topology, device, exchange)
        transport = transport_class(exchange, topology, config.timeout_s, device)
        parts: list[Closable] = []
        transports = [transport]
        try:
            runtime = cls(transport, config, units, prefers_daemon)
            try:
                runtime._complete(transfers)
                if replicas is not None:
                    runtime._join(replicas)
                if end_collectives is not None:
                    runtime._watch_job(end_collectives)
            finally:
                parts, transports = runtime._parts(), runtime._transports()
            # An interpreter that ends without close() must still tell its peers so.
            leaving = Leaving(parts, transports, runtime._waiter.job, runtime._whoami)
            runtime._finalizer = weakref.finalize(runtime, leaving.without_close)
            transport.lend()
        except BaseException as error:
            give_up(error, parts, *transports)
            raise
        return runtime

    def _complete(self, transfers: TransferTable | None) -> None:
        """The rest of set-up. Collective."""
        self.faults.hit("setup")
        self._transport.seal()
        sums = self.config.accumulate_dtype
        dtypes = {(unit.dtype, unit.grad_dtype, sums) for unit in self.units}
        together(self._transport.exchange, lambda: self._transport.engine.prepare(dtypes))
        if transfers is not None:
            self._transport.engine.choose_by(transfers)
        together(self._transport.exchange, self._start_threads)

    def _join(self, exchange: Exchange) -> None:
        """Hear of the replicas, too. Collective over them and over the shard group; what fails, fails on all."""
        problem: Exception | None = None
        try:
            topology = Topology.discover(exchange, self.config.host_id, self.config.address)
            kind = registry.choose("tcp", topology, HOST, exchange)
            transport = self._replicas = kind(exchange, topology, self.config.timeout_s)
            transport.open(num_signals=1, num_locks=0)
            transport.seal()
        except Exception as error:  # whatever it is, the other groups must not wait for this one
            problem = error
        for group in (self._transport.exchange, exchange):
            try:
                raise_together(group, problem)
            except Exception as error:
                problem = error
        if problem is not None:
            raise problem
        self._waiter.job.add(transport)

    def _watch_job(self, end_collectives: Callable[[], object]) -> None:
        self._end_collectives = end_collectives
        self._job_watchdog = JobWatchdog(
            self._waiter.job, self._failure, self.outside, self.config.timeout_s, _weak_abort(self), end_collectives
        )

    def _parts(self) -> list[Closable]:
        """What has to be closed, in this order, before the transports."""
        parts = (self._job_watchdog, self._watchdog, self._copier, self._daemon)
        return [part for part in parts if part is not None]

    def _transports(self) -> list[Transport]:
        return [transport for transport in (self._transport, self._replicas) if transport is not None]

    def _start_threads(self) -> None:
        if self._daemon is not None:
            self._daemon.start()
        if _wants_copy_thread(self.config, self.topology, self._published):
            self._copier = CopyThread()
        if self._transport.engine.has_streams:
            self._watchdog = StreamWatchdog(self._transport, _weak_abort(self))

    # Operations. Each tells the other ranks of a failure that cannot be undone before raising it here.

    @property
    def state(self) -> State:
        return self._protocol.state

    @property
    def minibatch(self) -> int:
        """Number of the current minibatch, from 1."""
        return self._protocol.minibatch

    def is_published(self, unit: int) -> bool:
        """Whether this rank's shard of ``unit`` for the coming or running minibatch is out."""
        return self._protocol.is_published(unit)

    def published_shard(self, unit: int) -> torch.Tensor:
        """This rank's own shard of ``unit`` as the others read it; not to be written."""
        self._require_open()
        return self._protocol.shard(unit)

    @property
    def ends(self) -> list[End]:
        """See :attr:`odc.protocol.MinibatchProtocol.ends`."""
        return self._protocol.ends

    def at_home(self) -> AbstractContextManager[object]:
        """See :meth:`odc.engine.Engine.at_home`."""
        return self._transport.engine.at_home()

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object]) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.publish`."""
        with self.reporting:
            self._protocol.publish(unit, fill)

    def begin(self) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.begin`."""
        with self.reporting:
            self._protocol.begin()

    def gather(self, unit: int, out: torch.Tensor, *, own_in_place: bool = False) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.gather`.

        Raises:
            ValueError: ``out`` has the wrong length or dtype.
        """
        spec = self.units[unit]
        _check_flat(out, spec.shard_numel * self.topology.world_size, spec.dtype, f"gather of {spec.name!r}, out")
        with self.reporting:
            self._protocol.gather(unit, out, own_in_place)

    def gather_ahead(self, unit: int, out: torch.Tensor, *, own_in_place: bool = False) -> Callable[[], None] | None:
        """A :meth:`gather` that overlaps with what this thread does until it calls the returned function.

        None if the gather is complete on return: without a copy thread, and where an owner has to be waited for.
        """
        if self._copier is not None:
            spec = self.units[unit]
            _check_flat(out, spec.shard_numel * self.topology.world_size, spec.dtype, f"gather of {spec.name!r}, out")
            with self.reporting:
                wait = self._protocol.gather_ahead(self._copier, unit, out, own_in_place)
            if wait is not None:
                return functools.partial(self._reported, wait)
        self.gather(unit, out, own_in_place=own_in_place)
        return None

    def _reported(self, operation: Callable[[], None]) -> None:
        with self.reporting:
            operation()

    def scatter_accumulate(self, unit: int, grads: torch.Tensor, *, present: Sequence[bool] | None = None) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.scatter_accumulate`.

        Raises:
            ValueError: ``grads`` or ``present`` does not fit the unit.
        """
        spec = self.units[unit]
        if present is not None and len(present) != len(spec.params):
            raise ValueError(f"unit {spec.name!r}: {len(present)} flags for {len(spec.params)} parameters")
        numel = spec.grad_numel if present is None else sum(p.numel for i, p in enumerate(spec.params) if present[i])
        if not numel:
            raise ValueError(f"push of {spec.name!r} without any gradient: leave it out")
        _check_flat(grads, numel * self.topology.world_size, spec.grad_dtype, f"push of {spec.name!r}, grads")
        with self.reporting:
            self._protocol.scatter_accumulate(unit, grads, present)

    def finish(self, how: End | None = None) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.finish`."""
        with self.reporting:
            self._protocol.finish(how)

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        """See :meth:`odc.protocol.MinibatchProtocol.gradient`."""
        self._require_open()
        return self._protocol.gradient(unit)

    def meet_replicas(self, what: str) -> None:
        """Wait until every replica has come to as many meetings as this rank.

        A collective cannot be taken back once it has begun, so it begins when all are there.
        """
        replicas = self._replicas
        if replicas is None:
            return
        with self.reporting:
            self._waiter.check()
            self.faults.hit("replicas.before")
            self._meetings += 1
            number, others = self._meetings, [r for r in replicas.topology.rotation() if r != replicas.topology.rank]
            replicas.post(0)
            self._waiter.wait(
                lambda: [rank for rank in others if replicas.count(rank, 0) < number], lambda: what, among=replicas
            )

    def wait_for_work(self, work: dist.Work, what: str, ranks: Sequence[int], *, on_host: bool) -> None:
        """Wait for a collective on a process group, with this runtime's limit, warnings and abort notices.

        Args:
            ranks: the ranks of that group, by their numbers in the job.
            on_host: it works on host memory. On a device only the current stream waits, and the process group has a
                watchdog of its own for what never completes.
        """
        with self.reporting:
            started = time.monotonic()
            try:
                if on_host:
                    self._waiter.wait_for_work(work.is_completed, what, ranks)
                work.wait()  # raises what went wrong
            except BaseException as error:
                cause = self.explain(error, what, time.monotonic() - started) or error
                self.abort(cause)
                if on_host and not work.is_completed() and self._end_collectives is not None:
                    self._end_collectives()  # nobody will wait for it, and the process could not end before it does
                raise cause from None

    def made_progress(self) -> None:
        """The training loop has come out of a collective of torch."""
        if not self._closed and os.getpid() == self._pid:
            self._waiter.waits_no_more()

    def explain(self, error: BaseException, what: str, waited_s: float) -> OdcError | None:
        """What is behind an error that a collective of torch has raised: the failure of a rank of the job.

        None if ``error`` is no such error, or nothing is heard of a failure within a moment.
        """
        if isinstance(error, OdcError) or not is_of_collective(error) or os.getpid() != self._pid or self._closed:
            return None
        return self._waiter.explain_collective(what, waited_s)

    @property
    def reporting(self) -> _Reporting:
        """A context: what fails in it cannot be undone, so it ends the job on all ranks at once; misuse has changed
        nothing."""
        return _Reporting(self)

    def _require_open(self) -> None:
        if os.getpid() != self._pid:  # a forked child has a copy of this object, and none of the memory behind it
            raise OdcError(
                f"this runtime belongs to process {self._pid}; a process forked from it (a DataLoader worker, say) "
                "cannot communicate"
            )
        if self._closed:
            raise OdcError("this runtime is closed")

    @property
    def has_failed(self) -> bool:
        """Whether this rank has told the others of an error, or been told of one."""
        return self._failure.error is not None

    @property
    def _whoami(self) -> str:
        return self.topology.whoami

    def abort(self, error: BaseException) -> None:
        """Tell every peer that this rank has failed, once; they raise ``AbortedError`` at their next operation."""
        if os.getpid() != self._pid:
            return  # a forked child's failures are its own
        with self._failure_lock:
            if self._closed or self._failure.error is not None:
                return
            self._failure.error = error
        if self._end_collectives is not None:  # what is pending then would hold up the end of the process
            atexit.register(_in_this_process(self._end_collectives))
        heard = self._waiter.job.abort_notice() if isinstance(error, AbortedError) else None
        self._waiter.job.abort_peers(heard or f"{self._whoami}: {type(error).__name__}: {error}")
        self._transport.wake_self()

    # Observation

    def start_timeline(self) -> Timeline:
        """Record spans from now on."""
        timeline = Timeline(self.topology.rank)
        self._protocol.timeline = self._waiter.timeline = timeline
        return timeline

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's shared memory, by purpose."""
        return {
            "published_shards": self._published.num_bytes,
            "sums": self._store.num_bytes,
            "slots": self._daemon.num_bytes if self._daemon is not None else 0,
            "transport": self._transport.extra_bytes,
        }

    @property
    def transport_name(self) -> str:
        return self._transport.name

    def close(self) -> None:
        """Release everything this rank holds. Local and idempotent.

        Ranks that have not closed yet may still gather what is published, in an evaluation, say. Where that needs this
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
                self._protocol.release()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(error)
        self.close()


class _Reporting:
    """See :attr:`Runtime.reporting`. (Not made of a generator, which every gather would pay for.)"""

    __slots__ = ("_runtime",)

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __enter__(self) -> None:
        self._runtime._require_open()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, MisuseError):
            self._runtime.abort(error)


def _weak_abort(runtime: Runtime) -> Callable[[BaseException], None]:
    """For the daemon thread, which must not keep a runtime alive that its user has dropped."""
    reference = weakref.ref(runtime)

    def abort(error: BaseException) -> None:
        alive = reference()
        if alive is not None:
            alive.abort(error)

    return abort


def _in_this_process(action: Callable[[], object]) -> Callable[[], None]:
    """``action``, which does nothing in a forked child."""
    pid = os.getpid()

    def act() -> None:
        if os.getpid() == pid:
            action()

    return act


def _wants_copy_thread(config: RuntimeConfig, topology: Topology, published: SymmetricBuffer) -> bool:
    """On a GPU streams do this; on a CPU a thread needs a core that no rank computes on."""
    if config.copy_thread != "auto" or published.local.device.type != "cpu":
        return config.copy_thread == "on" and published.local.device.type == "cpu"
    ranks_here = topology.host_ids.count(topology.host_ids[topology.rank])
    return len(os.sched_getaffinity(0)) > ranks_here


def _load_transfers(exchange: Exchange, config: RuntimeConfig) -> tuple[TransferTable | None, bool]:
    """This rank's table, and whether a rank's table says that daemons should add. Collective."""
    table, problem = None, None
    try:
        table = TransferTable.load(Path(config.transfer_table)) if config.transfer_table else None
    except ConfigError as error:
        problem = error
    raise_together(exchange, problem)
    return table, "daemon" in gather_json(exchange, table.accumulate if table is not None else "")


def _own_tables(config: RuntimeConfig, units: Sequence[UnitSpec]) -> dict[str, dict[str, str]]:
    return {
        "versions": {"odc": __version__, "torch": torch.__version__, "machine": platform.machine()},
        "options": config.shared(),
        "units": {f"{i}: {unit.name}": unit.describe() for i, unit in enumerate(units)},
    }


def _check_flat(tensor: torch.Tensor, numel: int, dtype: torch.dtype, what: str) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(
            f"{what}: expected a contiguous 1-D tensor of {numel} x {dtype}, got shape {tuple(tensor.shape)} of "
            f"{tensor.dtype}"
        )
