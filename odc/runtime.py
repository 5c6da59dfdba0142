"""The context object: everything one rank holds to communicate on demand with the others of its group.

Owned by the caller, with :meth:`Runtime.close`; no process-global state. The FSDP patch builds one per model; the
benchmarks and the protocol tests build theirs directly.
"""

from __future__ import annotations

import itertools
import platform
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from odc._version import __version__
from odc.accumulators import AccumulatorStore, PerClientStore, SharedStore
from odc.config import RuntimeConfig
from odc.endpoint import Endpoint
from odc.errors import OdcError
from odc.exchange import Exchange, require_agreement
from odc.faults import FaultInjector
from odc.protocol import MinibatchProtocol, State
from odc.pushers import DaemonPusher, DirectPusher, Pusher
from odc.stats import Stats
from odc.timeline import Timeline
from odc.topology import Topology
from odc.transports import registry
from odc.transports.base import Transport, aligned
from odc.units import UnitSpec
from odc.waiting import Failure, Waiter


class Runtime:
    """One rank's end of on-demand communication. Build with :meth:`create` (collective)."""

    def __init__(self, transport: Transport, config: RuntimeConfig, units: Sequence[UnitSpec]) -> None:
        topology = transport.topology
        self.config = config
        self.topology = topology
        self.units = tuple(units)
        self.stats = Stats()
        self._transport = transport
        self._failure = Failure()
        self._failure_lock = threading.Lock()
        self._closed = False
        self._finalizer: weakref.finalize[[Pusher, Transport], Runtime] | None = None
        self.faults = FaultInjector(config.fault, topology.rank)
        self._waiter = Waiter(transport, config.timeout_s, self.faults, self.stats, self._failure)
        end = Endpoint(transport, self._waiter, self.faults, self.stats)
        store_class: type[SharedStore] | type[PerClientStore] = PerClientStore if config.deterministic else SharedStore
        protocol_signals = MinibatchProtocol.num_signals(len(self.units), topology.world_size)
        num_signals = protocol_signals + Pusher.num_signals(topology.world_size)
        transport.open(num_signals=num_signals, num_locks=store_class.num_locks(self.units))
        offsets = list(itertools.accumulate((aligned(u.shard_bytes) for u in units), initial=0))
        self._published = transport.allocate(offsets[-1], "published shards")
        self._store: AccumulatorStore = store_class(end, self.units, config.accumulate_dtype)
        self._pusher = self._make_pusher(end, protocol_signals)
        self._protocol = MinibatchProtocol(end, self.units, self._published, offsets, self._store, self._pusher)

    @classmethod
    def create(
        cls,
        exchange: Exchange,
        units: Sequence[UnitSpec],
        config: RuntimeConfig | None = None,
        *,
        device: torch.device | None = None,
        agreement: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Runtime:
        """Connect the ranks of ``exchange``. Collective.

        Args:
            units: what is communicated; the same on every rank.
            agreement: further tables that must be equal on all ranks (title -> item -> value).

        Raises:
            SetupError: on all ranks, naming the first difference between them or the resource that is missing.
            ConfigError: an option has an unusable value.
        """
        config = config or RuntimeConfig()
        require_agreement(exchange, {**_own_tables(config, units), **(agreement or {})})
        topology = Topology.discover(exchange, config.host_id)
        transport_class = registry.choose(config.transport, topology, device or torch.device("cpu"))
        transport = transport_class(exchange, topology, config.timeout_s)
        try:
            runtime = cls(transport, config, units)
            runtime.faults.hit("setup")
            transport.seal()
        except BaseException:
            transport.close()
            raise
        runtime._pusher.start()
        # An interpreter that ends without close() must still tell its peers so.
        runtime._finalizer = weakref.finalize(runtime, _shut_down, runtime._pusher, transport)
        return runtime

    def _make_pusher(self, end: Endpoint, signals_at: int) -> Pusher:
        if self.config.accumulate != "daemon":  # on host memory "auto" is direct: one pass less over the gradient
            return DirectPusher(end.rank, self._store)
        return DaemonPusher(end, self._store, self.units, signals_at, _weak_abort(self))

    # Operations. Each reports its own failure to the other ranks before raising it here.

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
        return self._protocol.shard(unit, self.topology.rank)

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object]) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.publish`."""
        with self._reporting():
            self._protocol.publish(unit, fill)

    def begin(self) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.begin`."""
        with self._reporting():
            self._protocol.begin()

    def gather(self, unit: int, out: torch.Tensor, *, own_in_place: bool = False) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.gather`.

        Raises:
            ValueError: ``out`` has the wrong length or dtype.
        """
        spec = self.units[unit]
        _check_flat(out, spec.shard_numel * self.topology.world_size, spec.dtype, f"gather of {spec.name!r}, out")
        with self._reporting():
            self._protocol.gather(unit, out, own_in_place)

    def scatter_accumulate(self, unit: int, grads: torch.Tensor, *, present: Sequence[bool] | None = None) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.scatter_accumulate`.

        Raises:
            ValueError: ``grads`` or ``present`` does not fit the unit.
        """
        spec = self.units[unit]
        if present is not None and len(present) != len(spec.params):
            raise ValueError(f"unit {spec.name!r}: {len(present)} flags for {len(spec.params)} parameters")
        numel = sum(p.numel for i, p in enumerate(spec.params) if present is None or present[i])
        if not numel:
            raise ValueError(f"push of {spec.name!r} without any gradient: leave it out")
        _check_flat(grads, numel * self.topology.world_size, spec.grad_dtype, f"push of {spec.name!r}, grads")
        with self._reporting():
            self._protocol.scatter_accumulate(unit, grads, present)

    def finish(self) -> None:
        """See :meth:`odc.protocol.MinibatchProtocol.finish`."""
        with self._reporting():
            self._protocol.finish()

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        """See :meth:`odc.protocol.MinibatchProtocol.gradient`."""
        return self._protocol.gradient(unit)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        if self._closed:
            raise OdcError("this runtime is closed")
        try:
            yield
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Tell every peer that this rank has failed, once; they raise ``AbortedError`` at their next operation."""
        with self._failure_lock:
            if self._closed or self._failure.error is not None:
                return
            self._failure.error = error
        text = f"rank {self.topology.rank} (pid {self.topology.pids[self.topology.rank]}): "
        self._transport.abort_peers(text + f"{type(error).__name__}: {error}")
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
            "accumulators": self._store.num_bytes,
            "slots": self._pusher.num_bytes,
        }

    @property
    def transport_name(self) -> str:
        return self._transport.name

    def close(self) -> None:
        """Release everything this rank holds. Local, idempotent, never waits for another rank."""
        if self._closed:
            return
        self._closed = True
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.abort(error)
        self.close()


def _weak_abort(runtime: Runtime) -> Callable[[BaseException], None]:
    """For the daemon thread, which must not keep a runtime alive that its user has dropped."""
    reference = weakref.ref(runtime)

    def abort(error: BaseException) -> None:
        alive = reference()
        if alive is not None:
            alive.abort(error)

    return abort


def _shut_down(pusher: Pusher, transport: Transport) -> None:
    pusher.close()
    transport.close()


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
