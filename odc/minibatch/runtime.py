"""The runtime: everything that one rank needs for on-demand communication with its group.

The caller owns a runtime and closes it with :meth:`Runtime.close`. There is no process-global state. The FSDP patch
makes one per model; benchmarks and protocol tests make theirs directly.

If units are on several meshes (experts and the rest of a model, for example), the first mesh's runtime holds those of
the other meshes. They share counters and failures, so a failure on one mesh is one on all. A minibatch begins and ends
on all meshes at once (see PROTOCOL.md). Units are numbered mesh by mesh.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from odc.config import RuntimeConfig
from odc.engines.base import TransferTable
from odc.errors import OUR_FAULT, MisuseError, OdcError, ProtocolError
from odc.liveness.gloo import is_of_collective, num_entered
from odc.liveness.leaving import Closable
from odc.minibatch.accumulators import AccumulatorStore, StorePlan
from odc.minibatch.daemon import AccumulationDaemon
from odc.minibatch.partners import Counts, Partners, why_stuck
from odc.minibatch.protocol import End, MinibatchProtocol
from odc.minibatch.state import JointState, MinibatchState, Phase
from odc.rank.context import RankContext, agree, complete, connect, weak_abort
from odc.rank.waiting import Endpoint
from odc.rank.watchdog import InCollective, JobWatchdog, StreamWatchdog
from odc.setup.agreement import Exchange, gather_together, raise_together, together
from odc.setup.topology import Topology
from odc.timeline import Stats, Timeline
from odc.transports import registry
from odc.transports._peers import in_collective
from odc.transports.base import HOST, Transport, aligned
from odc.units import Destination, Rows, UnitSpec


class Mesh(NamedTuple):
    """A mesh, as one of its ranks sees it."""

    units: Sequence[UnitSpec]
    exchange: Exchange
    """Between the ranks of its shard group."""
    replicas: Exchange | None = None
    """See :meth:`Runtime.create`."""


class Runtime(RankContext):
    """On-demand communication of one rank. Make it with :meth:`create` (collective).

    Example:
        >>> from odc.setup.agreement import ProcessGroupExchange
        >>> unit = odc.UnitSpec("layer", 4, torch.float32, (odc.ParamSlice("weight", 4),))
        >>> runtime = odc.Runtime.create(ProcessGroupExchange(), [unit])  # on two ranks
        >>> runtime.publish(0, lambda shard: shard.fill_(rank))
        >>> runtime.begin()
        >>> whole = torch.empty(8)
        >>> runtime.gather(0, whole)  # waits for what its owners have published, and for nothing else
        >>> whole.tolist()
        [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
        >>> for microbatch in range(1 + rank):  # as many as this rank has
        ...     runtime.scatter_accumulate(0, torch.ones(8))
        >>> runtime.finish()  # the one wait for all ranks
        >>> total, has_gradient = runtime.gradient(0)
        >>> total.tolist()
        [3.0, 3.0, 3.0, 3.0]
        >>> runtime.close()
    """

    kind = "runtime"

    def __init__(
        self,
        transport: Transport,
        config: RuntimeConfig,
        units: Sequence[UnitSpec],
        prefers_daemon: bool = False,
        stats: Stats | None = None,
        leader: Runtime | None = None,
    ) -> None:
        self.stats: Stats = stats or (Stats() if leader is None else leader.stats)
        super().__init__(transport, config, self.stats, leader)
        self.units = tuple(units)
        end = Endpoint(transport, self._waiter, self.faults, self.stats)
        plan = StorePlan.of(config, transport, prefers_daemon)
        world_size = self.topology.world_size
        signals = MinibatchProtocol.num_signals(len(self.units))
        offsets = list(itertools.accumulate((aligned(u.shard_bytes) for u in units), initial=0))
        slots = 0 if plan.is_direct else AccumulationDaemon.slots_bytes(units, world_size)
        transport.open(
            num_signals=signals + (0 if plan.is_direct else AccumulationDaemon.num_signals(world_size)),
            num_locks=plan.num_locks(self.units, transport.engine),
            num_bytes=offsets[-1] + slots + plan.shared_bytes(units, world_size),
        )
        self._published = transport.allocate(offsets[-1], "published shards")
        self._store: AccumulatorStore = plan.make(end, self.units)
        self._daemon: AccumulationDaemon | None = None
        if not plan.is_direct:
            self._daemon = AccumulationDaemon(end, self._store, self.units, signals, weak_abort(self))
        self._job_watchdog: JobWatchdog | None = None
        self._end_collectives: Callable[[], object] | None = None
        self._replicas: Transport | None = None
        self._partners: list[Partners] = []
        self._beside: list[Transport] = []  # over which this rank hears of others: its replicas, its partners
        self._meetings = [0, 0]  # with the replicas: at ends, and to publish
        self._has_refused = False  # since the last end of a minibatch
        self._in_collective = InCollective()
        self._protocol = MinibatchProtocol(end, self.units, self._published, offsets, self._store, self._daemon)
        self.state: MinibatchState | JointState = self._protocol.state
        self._others: list[Runtime] = []
        self._places = [(self._protocol, unit) for unit in range(len(self.units))]

    @classmethod
    def create(
        cls,
        exchange: Exchange,
        units: Sequence[UnitSpec],
        config: RuntimeConfig | None = None,
        *,
        device: torch.device | None = None,
        replicas: Exchange | None = None,
        partners: Sequence[tuple[Exchange, Counts]] = (),
        end_collectives: Callable[[], object] | None = None,
        stats: Stats | None = None,
        leader: Runtime | None = None,
        others: Sequence[Mesh] = (),
    ) -> Runtime:
        """Connect the ranks of ``exchange``. Collective.

        Args:
            units: the units to communicate; the same on every rank.
            replicas: with several shard groups, the process group of the ranks that have this rank's place in their
                shard groups.
            partners: process groups of ranks that compute together, each with the number of collectives that this rank
                has entered (see :class:`odc.minibatch.partners.Partners`). If one of these ranks fails, all of them
                fail.
            end_collectives: makes torch's collectives in this process fail, since they may wait for a failed rank.
                None: such collectives are not ended.
            stats: existing counters to continue.
            leader: another runtime of this rank, see :class:`~odc.rank.context.RankContext`.
            others: meshes of further units. ``create`` is collective over their ranks, too.

        Raises:
            SetupError: the ranks differ, or a resource is missing; the message names it. Raised on all ranks.
            ConfigError: an option has an invalid value.
        """
        config = config or RuntimeConfig()
        table = {f"{i}: {unit.name}": unit.describe() for i, unit in enumerate(units)}
        agree(exchange, config, {"units": table})
        path, transfers = config.transfer_table, list[TransferTable]()

        def load_transfers() -> str:
            transfers.extend([TransferTable.load(Path(path))] if path else [])
            return transfers[0].accumulate if transfers else ""

        prefers_daemon = "daemon" in gather_together(exchange, load_transfers)
        # Additions carry float32, twice the bytes of such gradients, which slots take as they are.
        prefers_daemon |= {unit.grad_dtype for unit in units if unit.params} == {torch.bfloat16}
        transport = connect(exchange, config, device or HOST)

        def finish(runtime: Runtime) -> None:
            runtime._complete(transfers[0] if transfers else None)
            if leader is not None:  # what this rank shows in one group, it shows in both
                leader._waiter.job.add(transport.peers)
                transport.peers.show_to(leader._transport.peers)
            if replicas is not None:
                runtime._replicas = runtime._join(replicas)
            for beside, counts in partners:
                runtime._join(beside, functools.partial(runtime._meet, counts))
            runtime._add(others)
            if end_collectives is not None:
                runtime._watch_job(end_collectives)

        return complete(transport, lambda: cls(transport, config, units, prefers_daemon, stats, leader), finish)

    def _complete(self, transfers: TransferTable | None) -> None:
        """The rest of set-up. Collective."""
        self.faults.hit("setup")
        self._transport.seal()
        sums = self.config.accumulate_dtype
        dtypes = {(unit.dtype, unit.grad_dtype, sums) for unit in self.units}

        def begin() -> None:
            self._transport.engine.prepare(dtypes)
            if transfers is not None:
                self._transport.engine.choose_by(transfers)
            if self._daemon is not None:
                self._daemon.start()
            if self._transport.engine.has_streams:
                self._watchdog = StreamWatchdog(self._transport, weak_abort(self))

        together(self._transport.exchange, begin)

    def _join(self, exchange: Exchange, prepare: Callable[[Transport], object] = lambda transport: None) -> Transport:
        """Hear of these ranks, too. Collective over them and over the shard group; what fails, fails on all."""
        problem: Exception | None = None
        try:
            topology = Topology.discover(exchange, self.config.host_id, self.config.address)
            kind = registry.choose("tcp", topology, HOST, exchange)
            transport = kind(exchange, topology, self.config.timeout_s)
            self._beside.append(transport)
            transport.open(num_signals=2, num_locks=0)
            prepare(transport)
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
        self._waiter.job.add(transport.peers)
        return transport

    def _meet(self, counts: Counts, transport: Transport) -> None:
        self._partners.append(Partners(transport, counts))

    def _watch_job(self, end_collectives: Callable[[], object]) -> None:
        self._end_collectives = end_collectives
        if self._partners:
            self.state.on_border = functools.partial(_count_at_border, self._partners)
        self._job_watchdog = JobWatchdog(
            self._waiter.job,
            self._failure,
            self._in_collective,
            self.config.timeout_s,
            weak_abort(self),
            end_collectives,
            functools.partial(_why_stuck, self._partners, self.state, self._in_collective, weakref.ref(self._protocol)),
        )

    def _add(self, meshes: Sequence[Mesh]) -> None:
        """Connect the ranks of other meshes, too. Collective over them and over the first; what fails, fails on all."""
        for units, exchange, replicas in meshes:
            problem: Exception | None = None
            try:
                device = self._transport.device
                one = Runtime.create(exchange, units, self.config, device=device, replicas=replicas, leader=self)
                self._others.append(one)
                if one._finalizer is not None:
                    one._finalizer.detach()  # this one's is for both
            except Exception as error:  # whatever it is, the other groups must not wait for this one
                problem = error
            raise_together(self._transport.exchange, problem)
        if self._others:
            self._protocol.others = [one._protocol for one in self._others]
            self.units = tuple(unit for one in self.meshes for unit in one.units)
            self._places = [place for one in self.meshes for place in one._places]
            self.state = JointState([one.state for one in self._protocol.meshes])

    def _parts(self) -> list[Closable]:
        """What has to be closed, in this order, before the transports."""
        own = (self._job_watchdog, self._watchdog, self._daemon)
        rest = [part for one in self._others for part in one._parts()]
        return [*(part for part in own if part is not None), *rest]

    def _transports(self) -> list[Transport]:
        return [self._transport, *self._beside, *(each for one in self._others for each in one._transports())]

    def close(self) -> None:
        for one in self._others:
            one._closed = True
        super().close()

    # Operations

    @property
    def meshes(self) -> Sequence[Runtime]:
        """This one, and those of further meshes."""
        return [self, *self._others]

    @property
    def minibatch(self) -> int:
        """Number of the current minibatch, from 1."""
        return self.state.minibatch

    def published_shard(self, unit: int) -> torch.Tensor:
        """This rank's shard of ``unit`` that other ranks read. Do not write to it."""
        self._require_open()
        protocol, number = self._places[unit]
        return protocol.shard(number)

    @property
    def ends(self) -> list[End]:
        """See :attr:`odc.minibatch.protocol.MinibatchProtocol.ends`; of each mesh, those of the first one first."""
        return [end for protocol in self._protocol.meshes for end in protocol.ends]

    def at_home(self) -> AbstractContextManager[object]:
        """See :meth:`odc.engines.base.Engine.at_home`."""
        return self._transport.engine.at_home()

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object] | None) -> None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.publish`."""
        protocol, number = self._places[unit]
        with self.reporting:
            protocol.publish(number, fill)

    def open_sums(self) -> None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.open_sums`."""
        with self.reporting:
            # A mesh of which all units are published has opened its sums. Where that is each, the first one refuses.
            due = [one for one in self._protocol.meshes if one.state.phase is Phase.FINISHED]
            for protocol in due or [self._protocol]:
                protocol.open_sums()

    def begin(self) -> None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.begin`."""
        with self.reporting:
            for protocol in self._protocol.meshes:
                protocol.begin()

    def gather(self, unit: int, out: torch.Tensor | Destination, *, own_in_place: bool = False) -> None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.gather`.

        Args:
            out: a flat tensor counts as one part: ``world_size * shard_numel`` elements, shards in the order of ranks.

        Raises:
            ValueError: ``out`` has the wrong length or dtype.
        """
        spec, (protocol, number) = self.units[unit], self._places[unit]
        if isinstance(out, torch.Tensor):
            _check_flat(out, spec.shard_numel * protocol.world_size, spec.dtype, "gather of {!r}, out", spec)
            out = Destination([out.view(protocol.world_size, -1)])
        elif out.shard_numel != spec.shard_numel or out.dtype != spec.dtype:
            raise ValueError(
                f"gather of {spec.name!r}: room for {out.shard_numel} x {out.dtype} of each rank, which publishes "
                f"{spec.shard_numel} x {spec.dtype}. {OUR_FAULT}"
            )
        self._require_open()
        try:  # as `reporting`, which is slower: this is called for each unit and microbatch
            protocol.gather(number, out, own_in_place)
        except BaseException as error:
            self._report(error)
            raise

    def scatter_accumulate(
        self, unit: int, grads: torch.Tensor | Sequence[Rows], *, present: Sequence[bool] | None = None
    ) -> None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.scatter_accumulate`.

        Args:
            grads: a flat tensor has ``world_size`` rows. A row holds the slices of the present parameters, back to
                back.

        Raises:
            ValueError: ``grads`` or ``present`` does not fit the unit.
        """
        spec, (protocol, number) = self.units[unit], self._places[unit]
        if present is not None and len(present) != len(spec.params):
            raise ValueError(f"unit {spec.name!r}: {len(present)} flags for {len(spec.params)} parameters. {OUR_FAULT}")
        if present is not None and all(present):
            present = None
        numel = spec.grad_numel if present is None else spec.pushed_numel(present)
        if not numel:
            raise ValueError(f"push of {spec.name!r} without any gradient: leave it out. {OUR_FAULT}")
        if isinstance(grads, torch.Tensor):
            _check_flat(grads, numel * protocol.world_size, spec.grad_dtype, "push of {!r}, grads", spec)
            grads = Rows.of_flat(grads, spec, present, protocol.world_size)
        elif (given := sum([part.numel for part in grads])) != numel:
            raise ValueError(f"push of {spec.name!r}: rows of {given} elements, expected {numel}. {OUR_FAULT}")
        self._require_open()
        try:
            protocol.scatter_accumulate(number, grads, present)
        except BaseException as error:
            self._report(error)
            raise

    def finish(self, how: End | None = None) -> None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.finish`."""
        with self.reporting:
            self.state.check_finish()
            self.state.leave_minibatch()
            for partners in self._partners:
                partners.end(self.state.num_pushed, self._waiter, self.minibatch)
            self._protocol.finish(how)
        if self._has_refused:  # and has gone on
            self._has_refused = False
            self._waiter.job.set_refusal("")

    def refusal(self, text: str, kind: type[OdcError] = MisuseError) -> OdcError:
        """The error to raise for a refused operation, which has changed nothing. Ranks that wait for this rank later
        mention it: a script that catches the error may do something else than the other ranks."""
        error = kind(text)
        self._refused(error)
        return error

    def _refused(self, error: OdcError) -> None:
        if not self._closed and os.getpid() == self._pid:
            self._has_refused = True
            self._waiter.job.set_refusal(f"{self._waiter.where()}: {type(error).__name__}: {error}")

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        """See :meth:`odc.minibatch.protocol.MinibatchProtocol.gradient`."""
        self._require_open()
        protocol, number = self._places[unit]
        return protocol.gradient(number)

    def meet_replicas(self, what: str, *, to_publish: bool = False) -> None:
        """Wait until every replica has come to as many meetings as this rank. Meetings are ends of minibatches and,
        with ``to_publish``, publications.

        A collective cannot be undone once it has begun, so it begins when all replicas are there.

        Raises:
            ProtocolError: a replica has come to a meeting of the other kind.
        """
        replicas = self._replicas
        if replicas is None:
            return
        kind, numbers = int(to_publish), self._meetings

        def missing() -> list[int]:
            late = [rank for rank in others if replicas.count(rank, kind) < numbers[kind]]
            for rank in late:
                if replicas.count(rank, 1 - kind) > numbers[1 - kind]:
                    there = "the end of a minibatch" if to_publish else "a publication of parameters"
                    raise ProtocolError(
                        f"rank {replicas.topology.global_rank(rank)} is at {there}, and this rank at {what}: not all "
                        "ranks have changed parameters, or one has used the model (an evaluation) between the end of a "
                        "minibatch and its step. Change them on all ranks, or call session.publish() on every rank "
                        "behind that; evaluate after optimizer.step()"
                    )
            return late

        with self.reporting:
            self._waiter.check()
            self.faults.hit("replicas.before")
            numbers[kind] += 1
            others = [r for r in replicas.topology.rotation() if r != replicas.topology.rank]
            replicas.post(kind)
            self._waiter.wait(missing, lambda: what, among=replicas)

    def wait_for_work(self, work: dist.Work, what: str, ranks: Sequence[int], *, on_host: bool) -> None:
        """Wait for a collective on a process group, with this runtime's limit, warnings and abort notices.

        Args:
            ranks: the ranks of that group, by their numbers in the job.
            on_host: the collective works on host memory. On a device only the current stream waits, and the process
                group's own watchdog ends collectives that never complete.
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

    def hears_of(self, rank: int | None) -> bool:
        """Whether a failure of this rank of the job, or of any other one, would be known here."""
        return not self._closed and os.getpid() == self._pid and (rank is None or self._waiter.job.sees(rank))

    def wait_until(self, is_there: Callable[[], bool], what: str, rank: int | None) -> None:
        """Wait for what a rank of the job does outside of this runtime, as for a collective; None: for what a process
        outside of the job does, whatever the ranks do meanwhile."""
        ranks = self._waiter.job.others if rank is None else [rank]
        with self.reporting:
            self._waiter.wait_for_work(is_there, what, ranks, is_outside=rank is None)

    def enters_collective(self, what: str, *, is_due: bool) -> None:
        """The training loop may wait for other ranks in a collective of torch.

        Args:
            is_due: every rank comes to it at the end of its minibatch.
        """
        if not self._closed and os.getpid() == self._pid:
            self._in_collective.is_due, self._in_collective.what = is_due, what
            self._protocol.num_collectives += is_due
            if not is_due:  # else the watchdog says for whom
                self._waiter.job.own.set_waiting_on(in_collective(num_entered(dist.group.WORLD)))

    def leaves_collective(self) -> None:
        """The training loop has left that collective."""
        if not self._closed and os.getpid() == self._pid:
            self._in_collective.what, self._in_collective.is_due = "", False
            self._waiter.waits_no_more()

    def explain(self, error: BaseException, what: str, waited_s: float) -> OdcError | None:
        """The failure of a rank that caused an error of one of torch's collectives.

        None if ``error`` is another error, or if no failure becomes known within a moment.
        """
        if isinstance(error, OdcError) or not is_of_collective(error) or os.getpid() != self._pid or self._closed:
            return None
        cause = self._waiter.explain_collective(what, waited_s)
        self._failure.is_raised |= cause is not None
        return cause

    def _at_failure(self) -> None:
        if self._end_collectives is not None:  # what is pending then would hold up the end of the process
            atexit.register(_in_this_process(self._end_collectives))

    def _let_go(self) -> None:
        for protocol in self._protocol.meshes:
            protocol.release()

    # Observation

    @property
    def transport_name(self) -> str:
        return " and ".join(dict.fromkeys(one._transport.name for one in self.meshes))

    @property
    def timeline(self) -> Timeline | None:
        """The timeline in which spans are recorded; None: spans are not recorded."""
        return self._protocol.timeline

    def record_in(self, timeline: Timeline) -> Timeline:
        """Record spans there from now on."""
        for one in self.meshes:
            one._protocol.timeline = one._waiter.timeline = timeline
        return timeline

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's shared memory, by purpose."""
        return {
            "published_shards": sum(one._published.num_bytes for one in self.meshes),
            "sums": sum(one._store.num_bytes for one in self.meshes),
            "slots": sum(one._daemon.num_bytes for one in self.meshes if one._daemon is not None),
            "transport": sum(one._transport.extra_bytes for one in self.meshes),
        }


def _count_at_border(groups: Iterable[Partners], is_entered: bool) -> None:
    for partners in groups:
        partners.count_at_border(is_entered)


def _why_stuck(
    partners: Sequence[Partners],
    state: MinibatchState | JointState,
    inside: InCollective,
    reference: weakref.ref[MinibatchProtocol],
) -> str | None:
    """Why the collective that the training loop is in will not complete. Not for the training loop itself."""
    what, protocol = inside.what, reference()
    rank = protocol.left_behind() if inside.is_due and protocol is not None else None
    if rank is None or not inside.is_due:
        return why_stuck(partners, state, bool(what))
    coming = state.minibatch + (state.phase is Phase.FINISHED)
    return (
        f"this rank is in {what}, with gradients of minibatch {coming - 1}, and rank {rank} has ended minibatch "
        f"{coming} before it came to that: it waits for this rank there, and this rank for it here. A rank without a "
        "microbatch cannot know that others add to gradients that are kept: call odc.session_of(model).finish() on "
        "every rank before that line"
    )


def _in_this_process(action: Callable[[], object]) -> Callable[[], None]:
    """``action``, which does nothing in a forked child."""
    pid = os.getpid()

    def act() -> None:
        if os.getpid() == pid:
            action()

    return act


def _check_flat(tensor: torch.Tensor, numel: int, dtype: torch.dtype, what: str, spec: UnitSpec) -> None:
    if tensor.dtype != dtype or tensor.dim() != 1 or tensor.numel() != numel or not tensor.is_contiguous():
        raise ValueError(
            f"{what.format(spec.name)}: expected a contiguous 1-D tensor of {numel} x {dtype}, got shape "
            f"{tuple(tensor.shape)} of {tensor.dtype}. {OUR_FAULT}"
        )
