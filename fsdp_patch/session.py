"""The session: ODC inside one FSDP model, from :func:`patch_fsdp` to :meth:`Session.close`."""

from __future__ import annotations

import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from odc.errors import MisuseError, OdcError, UnsupportedError
from odc.fsdp_patch.gradient_events import script_frame
from odc.fsdp_patch.gradient_state import Notes, Said
from odc.fsdp_patch.gradient_use import GradientUse
from odc.fsdp_patch.guard import Guard
from odc.fsdp_patch.interception import listen, listening, trained
from odc.fsdp_patch.packed_rows import watch_packed_rows
from odc.fsdp_patch.pending import Use
from odc.fsdp_patch.publishing import Publisher, Turns, UnitStep
from odc.fsdp_patch.replicas import Replicas
from odc.fsdp_patch.unit import Alone, Unit, check_backward_complete, describe_meshes
from odc.items.item_exchange import ItemExchange
from odc.minibatch.fences import pass_fences
from odc.minibatch.protocol import End, EndKind
from odc.minibatch.runtime import Runtime
from odc.minibatch.state import Phase
from odc.setup.agreement import ProcessGroupExchange, setup_timeout_s
from odc.timeline import MinibatchStats, Stats, Timeline
from odc.units import Destination, Rows

logger = logging.getLogger("odc")


@dataclass(frozen=True)
class MemoryReport:
    """Memory of this rank in bytes; print it for a table."""

    parameters: int
    """Parameter shards of the optimizer."""
    gradients: int
    """All current ``.grad``, which exist from the end of a minibatch until the script clears them."""
    published_shards: int
    """Shards in the compute dtype, which other ranks read."""
    sums: int
    """Sums of gradients: one gradient shard per unit, in the accumulators' dtype; with ``deterministic=True`` one for
    each rank."""
    slots: int
    """Slots, in which other ranks leave gradients that this rank adds."""
    transport: int
    """Rounding of allocations, and staging memory of the transport."""

    @property
    def overhead(self) -> int:
        """Bytes that plain FSDP does not need: all of ODC's buffers."""
        return self.published_shards + self.sums + self.slots + self.transport

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "overhead": self.overhead}

    def __str__(self) -> str:
        rows = {**asdict(self), "more than plain FSDP": self.overhead}
        return "\n".join(f"{name.replace('_', ' '):<22}{size / 2**20:>12.1f} MiB" for name, size in rows.items())


class Connection(NamedTuple):
    """The parts that a session uses."""

    meshes: Sequence[Sequence[Unit]]
    """The units that are communicated, by mesh, as :attr:`odc.minibatch.runtime.Runtime.meshes`."""
    runtime: Runtime
    alone: Sequence[Unit]
    """Those whose shard group is of one rank."""


class Session:
    """The connection between one patched model and ODC. :func:`patch_fsdp` returns it.

    A minibatch is the microbatches of one optimizer step. It ends automatically when the script clips gradients,
    unscales them, or steps an optimizer that has parameters of the model. Every rank must do this, also one that had no
    microbatch. :meth:`minibatch` and :meth:`finish` end a minibatch explicitly.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> print(session.describe())
        5 units over 2 ranks, transport shm, in place
        >>> with session.minibatch():
        ...     for microbatch in minibatches[0]:
        ...         loss(model, microbatch).backward()
        >>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
        >>> session.memory().overhead > 0
        True
        >>> session.close()
    """

    def __init__(self, connection: Connection, connect_again: Callable[[nn.Module, Stats], Connection]) -> None:
        self._connect_again = connect_again
        self._undo: list[Callable[[], None]] = []
        self._closed = False
        self._has_warned = False
        self._has_exchange = False
        self._model: Callable[[], nn.Module | None] = lambda: None
        self.on_finish: Callable[[], None] | None = None
        """Called at the end of each minibatch, before this rank waits for the others."""
        self.last_minibatch: MinibatchStats | None = None
        """The last minibatch that has ended; None before the first end, and if the shard group has one rank."""
        self._observers: list[Callable[[MinibatchStats], object]] = []
        self._take(connection)
        self._ended_s, self._before = time.monotonic(), self.stats()

    def _take(self, connection: Connection) -> None:
        meshes, runtime, alone = connection
        self._units = [unit for units in meshes for unit in units]
        self._meshes = describe_meshes(meshes)
        self._runtime = runtime
        self._replicas: list[Replicas] = []
        for units, one in zip(meshes, runtime.meshes, strict=False):
            if (group := units[0].replica_group) is not None:
                self._replicas.append(Replicas(group, one, units[0].device))
                for unit in units:
                    unit.replicas = self._replicas[-1]
        self._alone = Alone(alone)
        self._guard = Guard(self._units, runtime)
        self._publisher = Publisher(self._units, runtime, self._guard)
        self._gradients = GradientUse(self, self._publisher, runtime, self._units)
        self._turns = Turns(self._units, runtime, self._publisher)

    def start(self, model: nn.Module) -> None:
        """Publish the current parameters and intercept the model. Called by :func:`patch_fsdp`."""
        self._model = weakref.ref(model)
        self._publisher.publish_all(lockstep=True)
        for index, unit in enumerate(self._units):
            self._undo.append(unit.enter(index, self))
        self._undo += [listen(self._gradients), self._gradients.watch_forwards(model), watch_packed_rows(model)]
        load_hook = model.register_load_state_dict_post_hook(self._after_load)  # type: ignore[no-untyped-call]
        self._undo.append(load_hook.remove)
        self._gradients.expect_next(none=True)
        logger.info("odc: patched %s", self.describe())

    def before_training(self, *, is_method: bool) -> None:
        """A forward of the model that keeps a graph begins, or another method that is one."""
        if self._runtime.state.phase is not Phase.OPEN and self._patch_anew():
            self._gradients.begin_forward(is_method=is_method)
        if self._units:
            self._alone.begin()

    def _patch_anew(self) -> bool:
        """If parameters are trained that were frozen when the model was patched: patch it with these. Whether it was.

        Collective then: every rank comes here, with its first forward or at the end of the coming minibatch. One
        without a microbatch must not wait for the others in a collective of the script before that.

        Raises:
            UnsupportedError: items are exchanged beside it.
            UnsupportedError, SetupError: as :func:`patch_fsdp`. The session is closed.
        """
        model, runtime = self._model(), self._runtime
        unfrozen = [unit.name for unit in self._units if unit.is_unfrozen()]
        if not unfrozen or model is None:
            return False
        if self._has_exchange:
            raise UnsupportedError(
                f"parameters of unit {unfrozen[0]!r} are trained that were frozen when the model was patched, and "
                "items are exchanged beside it: set requires_grad before patch_fsdp"
            )
        logger.info("odc: patching anew: parameters of %d units are trained that were frozen", len(unfrozen))
        asleep = self._publisher.frozen_since()
        self._closed = True
        self._leave(in_error=False)
        try:
            for parameter in asleep:  # of a GAN, say: it will be trained again
                parameter.requires_grad_(True)
            self._take(self._connect_again(model, runtime.stats))
        finally:
            for parameter in asleep:
                parameter.requires_grad_(False)
        self._closed = False
        if runtime.timeline is not None:
            self._runtime.record_in(runtime.timeline)
        self.start(model)
        return True

    def describe(self) -> str:
        """One line of text that says what was patched."""
        if not self._units:
            return "nothing to communicate in a shard group of one rank"
        ways = "".join(dict.fromkeys(f", {unit.staging}" for unit in self._units if unit.staging))
        return f"{self._meshes}, transport {self._runtime.transport_name}{ways}"

    # The minibatch

    @contextmanager
    def minibatch(self) -> Iterator[None]:
        """A context manager for the microbatches of one optimizer step. On exit every ``.grad`` is final.

        Ranks enter and leave at different times and may run different numbers of microbatches, also none. Inside the
        block gradients are not final: clip, unscale, step and read ``.grad`` after it. An exception inside is reported
        to the other ranks and then raised.
        """
        self._require_open()
        self._begin()
        self._gradients.in_block = True
        try:
            yield
        except BaseException as error:
            self._runtime.abort(error)
            raise
        finally:
            self._gradients.in_block = False
        if self._runtime.state.phase is Phase.OPEN:
            self.finish()

    def finish(self, step: UnitStep | None = None) -> None:
        """End the minibatch. Gradients are final when this returns.

        Every rank must do this once per optimizer step, also one that ran no microbatch. Clipping, unscaling,
        ``optimizer.step`` and using the data of a ``.grad`` after a backward do it automatically.

        Args:
            step: used by :func:`odc.step_by_unit`.
        """
        self._require_open()
        if any(unit.is_summoned for unit in self._units):
            raise self._runtime.refusal(
                "the minibatch would end inside summon_full_params (something has clipped, stepped, used a .grad or "
                "called session.finish()), where gradients have no place: do that before or behind that block; or, to "
                "see full gradients in it, pass with_grads=True"
            )
        with self._runtime.reporting:
            check_backward_complete(self._units)
        if waiting := [unit.name for unit in self._units if unit.waiting_factor is not None]:
            raise self._runtime.refusal(
                f"the last microbatch of minibatch {self._runtime.minibatch} that has used unit {waiting[0]!r} ran "
                "under set_requires_all_reduce(False): plain FSDP2 would leave its gradients out of .grad and of the "
                "step. Set it to True for the last microbatch, and let that use every unit; or leave it out, as ODC "
                "sums over replicas once a step",
                UnsupportedError,
            )
        self._gradients.end_if_cleared()
        self._end_minibatch(EndKind.USE, step)

    def discard(self) -> None:
        """Drop the gradients of this minibatch on all ranks instead of using them in a step.

        Every rank must call this in place of clipping and stepping (``if loss_is_bad_anywhere: session.discard()``).
        ``.grad`` keeps its value from before the minibatch. Clearing all gradients between backward and step does the
        same on a rank that ran microbatches; a rank without microbatches must call this method.
        """
        self._end_minibatch(EndKind.DISCARD)
        self._publisher.publish_all(lockstep=True)

    def _end_minibatch(self, kind: EndKind, step: UnitStep | None = None) -> None:
        """Wait until every rank is done with it. The sums are then final, and those to be used in ``.grad``, or used by
        ``step``."""
        self._require_open()
        self._publisher.gradients.leave(self._publisher.all_trainable)
        self.publish_changed()
        if self._runtime.state.phase is not Phase.OPEN:
            self._begin()
        if self.on_finish is not None:
            self.on_finish()
        microbatches = self._runtime.state.num_pushed
        with self._runtime.reporting:  # to the end: sums that are final, and not in .grad, must get into no step
            ends = self._finish_on_all(kind)
            done = trained()
            done.minibatches, done.met_s = done.minibatches + 1, time.monotonic()
            compute_s = {notes.rank: notes.compute_ns * 1e-9 for notes in (Notes(*end.notes) for end in ends)}
            self.last_minibatch = last = MinibatchStats(
                self._runtime.minibatch,
                done.met_s - self._ended_s,
                microbatches,
                self.counters.since(self._before),
                compute_s,
            )
            self._ended_s, self._before = done.met_s, self.stats()
            self._guard.check_answers()
            for unit in self._units:
                unit.withdraw()
            self._gradients.ended(ends)
            for unit in self._units:
                unit.discard_gathered()
            self._alone.end(is_discarded=kind is EndKind.DISCARD)
            without = self._turns.take(step) if kind is EndKind.USE else self._units
            for unit in self._units:
                unit.settle()
            self._gradients.installed(len(without) < len(self._units))
            if self._runtime.state.phase is Phase.FINISHED:
                self._runtime.open_sums()  # taken: others may push the next ones, whatever the script does next
        if kind is EndKind.USE and not self._has_warned and self._runtime.topology.rank == 0:
            self._warn_of_unsent([unit.name for unit in without if unit.holds_unsent])
        for call in tuple(self._observers):
            call(last)

    def _warn_of_unsent(self, names: Sequence[str]) -> None:
        """On one rank, for all of them, and once: what was meant once is meant in each minibatch."""
        if not names:
            return
        self._has_warned = True
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        frame = script_frame()
        warnings.warn_explicit(
            f"no microbatch of minibatch {self._runtime.minibatch} has synchronized the gradients of unit {names[0]!r}"
            f"{others}: all backward passes ran under no_sync() or set_requires_gradient_sync(False). So they are in "
            "no .grad, the norm is without them (0.0 if there are no others) and the step does not train with them, as "
            "under plain FSDP. Run the last microbatch of every minibatch with synchronization",
            RuntimeWarning,
            frame.f_code.co_filename,
            frame.f_lineno,
        )

    def _finish_on_all(self, kind: EndKind) -> Sequence[End]:
        """End the minibatch in the shard groups, and then among the replicas; how each rank of them has ended it."""
        in_odc_s = self.counters.communication_s - self._before.communication_s
        compute_ns = max(0, int((time.monotonic() - self._ended_s - in_odc_s) * 1e9))
        self._runtime.finish(End(kind, self._gradients.notes()._replace(compute_ns=compute_ns)))
        for replicas in self._replicas:  # all: nobody waits for a late rank once a collective has begun
            replicas.meet()
        return [*self._runtime.ends, *(end for replicas in self._replicas for end in replicas.ends())]

    def _begin(self) -> None:
        if not self._gradients.is_in_backward:  # the gradients of which are refused then
            self._patch_anew()
        self._publisher.publish_all()
        if not self._gradients.is_in_backward:
            self.publish_changed()
        for index in range(len(self._units)):
            self._guard.compare(index)
        self._gradients.steps_in_backward = any(unit.steps_in_backward for unit in self._units)
        self._runtime.begin()

    def publish(self) -> None:
        """Publish parameters that were changed outside ``optimizer.step``. Every rank must call it.

        ODC publishes changes between steps automatically when the model is next used (averages swapped in for an
        evaluation, a frozen model moved towards another one, ``load_state_dict``). Call this only for changes that ODC
        cannot see on all ranks: those through ``.data``, and those of parameters or elements that not all ranks hold.

        Raises:
            MisuseError: a minibatch is open. Nothing was changed.
            ProtocolError: another rank did something else with this minibatch.
        """
        self._require_open()
        if self._runtime.state.phase is Phase.OPEN:
            raise self._runtime.refusal(
                f"publish() inside minibatch {self._runtime.minibatch}: the other ranks compute with the published "
                "parameters. Change and publish them before the first backward of a step, or after optimizer.step()"
            )
        self._publisher.publish_all(lockstep=True, is_said=True)
        self._publisher.all_changed = True
        self.publish_changed()

    def publish_changed(self, *, may_leave: bool = False, is_evaluation: bool = False) -> None:
        """Publish again, in all sessions of this process, the parameters that the script has changed since they were
        published. Called before the script uses a model or waits for other ranks, which may be about to use one. The
        other ranks do the same. PROTOCOL.md says why all sessions take part.

        Args:
            may_leave: continue without publishing if no other rank comes.
            is_evaluation: the script is about to use this model without a graph.
        """
        sessions = {one._runtime: one for one in open_sessions() if not one._runtime.has_failed}
        for session in sessions.values():
            session._publisher.publish_stepped_by_hand()
        is_in = any(runtime.state.phase is Phase.OPEN for runtime in sessions)
        due = {
            runtime: session
            for runtime, session in sessions.items()
            if session._is_due(is_evaluation and session is self, is_in)
        }
        if not due:
            return
        if sum(session._publisher.communicates for session in due.values()) > 1:
            raise self._runtime.refusal(
                f"{len(due)} models have changed since they were published, and fsdp_pre_all_gather of their "
                "parameters communicates, which all ranks have to do in one order: behind the change of each call "
                "odc.session_of(model).publish() on every rank, before the next one is changed",
                UnsupportedError,
            )
        hows = [End(EndKind.FENCE, session._gradients.notes()) for session in due.values()]
        with self._runtime.at_home():
            for runtime in pass_fences(list(due), hows, list(sessions), may_leave=may_leave):
                due[runtime]._publish_anew()

    def _is_due(self, is_evaluation: bool, is_in_minibatch: bool) -> bool:
        phase = self._runtime.state.phase
        if phase is not Phase.PUBLISHED:
            return phase is Phase.FENCED
        return self._publisher.is_any_changed(is_evaluation=is_evaluation, is_in_minibatch=is_in_minibatch)

    def _publish_anew(self) -> None:
        # Replicas are not waited for: one that has not done the same is found at the next end.
        with self._runtime.reporting:
            self._publisher.gradients.check_kept([Notes(*end.notes) for end in self._runtime.ends])
        self._publisher.publish_anew()
        for unit in self._units:
            unit.discard_gathered()

    def is_of(self, module: nn.Module) -> bool:
        """Whether this is the session of ``module``, of a model that contains it, or of one that it contains."""
        root = self._model()
        return root is not None and (module in root.modules() or root in module.modules())

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        pushed = self._runtime.state.pushed
        if not self._publisher.after_load():
            return
        if pushed:
            raise self._runtime.refusal(
                f"load_state_dict(assign=True) within a minibatch: gradients of {len(pushed)} units have "
                "gone to the other ranks, for the parameters that were there before. Load before the first backward or "
                "after the step; or call odc.session_of(model).discard() on every rank before it"
            )
        for unit in self._units:
            unit.withdraw()
            unit.expect_again()

    def exchange_items(self, channels: Sequence[str], *, capacity_bytes: int) -> ItemExchange:
        """Make an exchange for other data than parameters (outputs of encoders, for example) between the ranks of the
        model's shard group. With units on several meshes, the ranks are those of the largest mesh.

        Collective. A failure in the exchange is reported in this session, and the reverse. The caller closes the
        exchange before the session.

        Args:
            channels, capacity_bytes: see :meth:`odc.ItemExchange.create`.

        Raises:
            MisuseError: the model's shard group is of one rank.
            SetupError, ValueError: see :meth:`odc.ItemExchange.create`.
        """
        self._require_open()
        if not self._units:
            raise MisuseError("a shard group of one rank has nobody to exchange items with")
        self._has_exchange = True
        config, unit = self._runtime.config, self._units[0]
        exchange = ProcessGroupExchange(unit.shard_group, unit.device, setup_timeout_s(config.timeout_s))
        return ItemExchange.create(
            exchange, channels, config, capacity_bytes=capacity_bytes, device=unit.device, beside=self._runtime
        )

    # What FSDP calls

    def gather(self, unit: int, out: torch.Tensor | Destination, *, own_in_place: bool) -> None:
        """FSDP's all-gather of one unit."""
        # FSDP calls from streams of its own; shards are published, and sums opened, where gradients became final.
        state = self._runtime.state
        if state.is_ready and not self._gradients.is_computing and self._publisher.is_changed(unit):
            self.publish_changed()
        if state.phase is Phase.FINISHED:
            if not (state.in_forward or self._publisher.gradients.stepped):
                self._publisher.gradients.said |= Said.BETWEEN
            with self._runtime.at_home():
                self._publisher.publish_all()
        if not (self._gradients.is_in_backward and self._units[unit].pushes_behind_backward):  # that is checked, too
            self._guard.check_gather(unit, state.in_forward)
        mine = self._units[unit]
        self._runtime.gather(unit, mine.destination(out), own_in_place=own_in_place and mine.sharing is None)

    def scatter_accumulate(self, unit: int, grads: torch.Tensor | Sequence[Rows], present: Sequence[bool]) -> None:
        """FSDP's reduce-scatter of one unit."""
        state = self._runtime.state
        if state.phase is Phase.OPEN:
            self._guard.check_push(unit)
        elif state.is_ready:
            self._begin()  # used without the context manager: the first backward opens the minibatch
        is_first = not any(state.pushes)
        grads, present = self._units[unit].pushed(grads, present)
        self._runtime.scatter_accumulate(unit, grads, present=present)
        if is_first:
            self._gradients.expect_others(unit)

    @property
    def data_of(self) -> Use:
        """See :attr:`odc.fsdp_patch.gradient_use.GradientUse.weak_data_of`."""
        return self._gradients.weak_data_of

    # For people

    def stats(self) -> Stats:
        """A copy of this rank's counters since the model was patched."""
        return self.counters.since(Stats())

    @property
    def counters(self) -> Stats:
        """The counters themselves (no copy). They stay valid after the session is closed."""
        return self._runtime.stats

    def on_minibatch(self, call: Callable[[MinibatchStats], object]) -> Callable[[], None]:
        """Call ``call`` at the end of each minibatch, when gradients are final. Returns a function that stops this.

        Exceptions of ``call`` are raised by the clipping or step that ended the minibatch.
        """
        self._observers.append(call)
        return lambda: self._observers.remove(call)

    def memory(self) -> MemoryReport:
        """This rank's memory by purpose, and how much more it is than under plain FSDP."""
        resident = [pair for unit in (*self._units, *self._alone.units) for pair in unit.resident()]
        parameters = sum(shard.nbytes for shard, _ in resident)
        gradients = sum(grad.nbytes for _, grad in resident if grad is not None)
        return MemoryReport(parameters, gradients, **self._runtime.memory())

    def start_timeline(self, timeline: Timeline | None = None) -> Timeline:
        """Record the operations of this rank from now on, in ``timeline`` or a new one. Set ``timeline.minibatch`` in
        the loop to number the spans."""
        return self._runtime.record_in(timeline or Timeline(self._runtime.topology.rank))

    @property
    def transport(self) -> str:
        return self._runtime.transport_name

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has failed. They raise at their next operation."""
        self._runtime.abort(error)

    def close(self) -> None:
        """Return the model to plain FSDP and free all resources. A second call does nothing.

        Not collective: the other ranks need not call it at the same time. It waits at most two seconds for
        them, and on a GPU until the device has done its work.

        Warns if this drops gradients that this rank has sent and no step has used.
        """
        if self._closed:
            return
        self._closed = True
        in_error = self._runtime.has_failed or sys.exc_info()[0] is not None
        pushed = self._runtime.state.pushed
        if pushed and not in_error:
            warnings.warn(
                f"odc: closed in the middle of a minibatch: gradients of {len(pushed)} units, which no step has used, "
                "are dropped",
                RuntimeWarning,
                stacklevel=2,
            )
        self._leave(in_error)

    def _leave(self, in_error: bool) -> None:
        """The model is plain FSDP again."""
        try:
            if not in_error:  # full parameters that an evaluation has left on some ranks only
                for unit in self._units:
                    unit.discard_gathered()
            for unit in self._units:
                unit.withdraw()
                unit.settle()
            while self._undo:
                self._undo.pop()()
        finally:
            self._runtime.close()
            for replicas in self._replicas:
                replicas.close()
            self._units.clear()  # a closed session that somebody keeps does not keep the model
            self._alone = Alone([])
            self._publisher.forget()
            self._guard.forget()

    def _require_open(self) -> None:
        if self._closed:
            raise OdcError("this session is closed: the model is plain FSDP again")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._runtime.abort(error)
        self.close()


def session_of(model: nn.Module) -> Session:
    """The session of a patched model, also under ``odc run``. ``model`` may be a part of it.

    Raises:
        OdcError: the model is not patched (yet): ``odc run`` patches at the first forward.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> odc.session_of(model.layers[0]) is session  # of a part of it, too
        True
        >>> session.close()
    """
    session = find_session(model)
    if session is None:
        raise OdcError(
            f"{type(model).__name__} is not patched. Call odc.patch_fsdp(model) first; `odc run` patches a model at "
            "its first forward, so ask after that"
        )
    return session


def find_session(model: nn.Module) -> Session | None:
    """As :func:`session_of`; None where the model is not patched."""
    return next((session for session in open_sessions() if session.is_of(model)), None)


def close_failed() -> None:
    """Close the sessions of this process that ended with an error. Called before a model is patched, since a script may
    have caught the error (in a notebook or a test suite)."""
    for session in open_sessions():
        if session._runtime.has_failed:
            session.close()


def open_sessions() -> list[Session]:
    """Of this process, in the order in which they were made."""
    found = [listener.session() for listener in listening() if isinstance(listener, GradientUse)]
    return [session for session in found if isinstance(session, Session)]
