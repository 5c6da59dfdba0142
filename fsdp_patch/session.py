"""``odc.patch_fsdp`` and the session it returns."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from odc.config import RuntimeConfig
from odc.errors import OdcError, ProtocolError, UnsupportedError
from odc.exchange import ProcessGroupExchange, raise_together
from odc.fsdp_patch import gradients
from odc.fsdp_patch.checks import check_model
from odc.fsdp_patch.comms import OdcAllGather, OdcReduceScatter
from odc.fsdp_patch.internals import FsdpUnit, all_params, find_units, warn_if_untested
from odc.protocol import State
from odc.runtime import Runtime
from odc.stats import Stats
from odc.timeline import Timeline

logger = logging.getLogger("odc")


def patch_fsdp(
    model: nn.Module,
    *,
    transport: str = "auto",
    accumulate: str = "auto",
    accumulate_dtype: torch.dtype = torch.float32,
    deterministic: bool = False,
    timeout_s: float = 600.0,
) -> Session:
    """Replace the collectives of an FSDP2 model by on-demand communication. Collective over the model's mesh.

    The script keeps its forward, backward, clipping, optimizer and numbers (to the rounding of a sum in another
    order); it puts ``with session.minibatch():`` around the microbatches of one optimizer step, of which each rank may
    have any number, also none.

    Args:
        model: a model on whose layers ``torch.distributed.fsdp.fully_shard`` was called.
        transport: "auto" or the name of a transport.
        accumulate: "direct", "daemon" or "auto"; see :class:`odc.RuntimeConfig`.
        accumulate_dtype: float32 or float64.
        deterministic: bit-equal gradients whatever the timing, for one full gradient of memory per rank.
        timeout_s: silence of an awaited rank after which a wait raises. ``ODC_TIMEOUT`` overrides it.

    Raises:
        UnsupportedError: the model uses an option that is not supported yet; on all ranks.
        SetupError: the ranks differ, or a resource is missing; on all ranks.
        ConfigError, ValueError: an argument cannot be used.
    """
    config = RuntimeConfig.from_environment(
        transport=transport,
        accumulate=accumulate,
        accumulate_dtype=accumulate_dtype,
        deterministic=deterministic,
        timeout_s=timeout_s,
    )
    warn_if_untested()
    units = find_units(model)
    if not units:
        check_model(model, units)  # raises: without units there is no group to tell
    exchange = ProcessGroupExchange(units[0].process_group, units[0].device)
    problem: Exception | None = None
    try:
        check_model(model, units)
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        problem = error
    raise_together(exchange, problem)
    # FSDP communicates nothing on a group of one, and neither do we: it leaves the gradients in .grad itself.
    communicated = units if exchange.world_size > 1 else []
    runtime = Runtime.create(
        exchange,
        [unit.spec() for unit in communicated],
        config,
        device=units[0].device,
        agreement=_agreement(units),
    )
    session = Session(communicated, runtime)
    try:
        session.start(model)
    except BaseException as error:
        runtime.abort(error)
        session.close()
        raise
    return session


class Session:
    """ODC at work in one model. Made by :func:`patch_fsdp`."""

    def __init__(self, units: Sequence[FsdpUnit], runtime: Runtime) -> None:
        self._units = list(units)
        self._runtime = runtime
        self._undo: list[Callable[[], None]] = []
        self._present: list[list[bool]] = [[] for _ in units]
        self._stepped: set[int] = set()  # ids of parameters that an optimizer has updated since finish
        self._published_versions: list[list[int]] = [[] for _ in units]
        self._verified = [False] * len(units)  # published shard compared with the parameters, since publication
        self._reloaded = False
        self._closed = False

    def start(self, model: nn.Module) -> None:
        """Publish the parameters as they are and enter the model. Called once, by :func:`patch_fsdp`."""
        self._publish_all()
        self._patch(model)
        logger.info(
            "odc: patched %d units over %d ranks, transport %s",
            len(self._units),
            self._runtime.topology.world_size,
            self._runtime.transport_name,
        )

    def _patch(self, model: nn.Module) -> None:
        for index, unit in enumerate(self._units):
            self._undo.append(unit.swap_comms(OdcAllGather(self, index), OdcReduceScatter(self, index)))
            self._undo.append(unit.watch_post_backward(functools.partial(self._note_present, index)))
        handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
            model.register_load_state_dict_post_hook(self._after_load),  # type: ignore[no-untyped-call]
        ]
        self._undo.extend(handle.remove for handle in handles)

    # The minibatch

    @contextmanager
    def minibatch(self) -> Iterator[None]:
        """Around the microbatches of one optimizer step; on exit every ``.grad`` is final.

        Ranks enter and leave at their own pace and may run different numbers of microbatches, none included. Inside,
        ``.grad`` is what it was before the block: clip, unscale and step behind it. An exception inside is reported to
        the other ranks before it goes on.
        """
        self._require_open()
        self._begin()
        try:
            yield
        except BaseException as error:
            self._runtime.abort(error)
            raise
        if self._runtime.state is State.OPEN:
            self.finish()

    def finish(self) -> None:
        """End the minibatch without the context manager: gradients are final when this returns.

        Every rank must call it once per optimizer step, also one that ran no microbatch.
        """
        self._require_open()
        if self._runtime.state is not State.OPEN:
            self._begin()
        self._runtime.finish()
        self._stepped.clear()
        for index, unit in enumerate(self._units):
            result = self._runtime.gradient(index)
            if result is not None:
                gradients.install(unit, *result)

    def _begin(self) -> None:
        if self._reloaded:
            self.publish()
        self._publish_all()
        for index in range(len(self._units)):
            self._check_unchanged(index)
        self._runtime.begin()

    # Publishing

    def publish(self) -> None:
        """Publish parameters that were changed outside ``optimizer.step``. Every rank must call it.

        Needed after changing parameters by hand between a publication and the next use of the model (an evaluation with
        averaged weights, a checkpoint loaded after patching). ``optimizer.step`` publishes by itself, and a
        ``load_state_dict`` of the patched model is published when the next minibatch begins.

        Raises:
            ProtocolError: inside a minibatch, or another rank is training on the old parameters already.
        """
        self._require_open()
        self._publish_all()
        # An empty minibatch is the fence: when all ranks are done with it nobody reads the old shards.
        self._runtime.begin()
        self._runtime.finish()
        if any(self._runtime.gradient(i) is not None for i in range(len(self._units))):
            self._fail("publish() was not called on every rank: another rank has trained meanwhile")
        self._publish_all()
        self._reloaded = False

    def _publish_all(self) -> None:
        if self._runtime.state is not State.FINISHED:
            return
        for index in range(len(self._units)):
            if not self._runtime.is_published(index):
                self._publish(index)

    def _publish(self, index: int) -> None:
        unit = self._units[index]
        self._runtime.publish(index, unit.fill_shard)
        self._published_versions[index] = [p.version for p in unit.params]
        self._verified[index] = False

    def _check_unchanged(self, index: int) -> None:
        """Refuse to compute with parameters that are not the ones the other ranks read.

        By version counters every time; bit by bit once per publication, because counters miss changes through
        ``param.data`` and checkpoints loaded in place.
        """
        unit = self._units[index]
        for param, version in zip(unit.params, self._published_versions[index], strict=True):
            if param.version != version:
                self._fail_changed(f"parameter {param.name!r}")
        if not self._verified[index]:
            if not unit.matches_shard(self._runtime.published_shard(index)):
                self._fail_changed(f"a parameter of unit {unit.name!r}")
            self._verified[index] = True

    def _fail_changed(self, what: str) -> NoReturn:
        self._fail(
            f"{what} was changed after it was published to the other ranks. Change parameters before optimizer.step, "
            "or call session.publish() on every rank after changing them."
        )

    def _fail(self, text: str) -> NoReturn:
        error = ProtocolError(text)
        self._runtime.abort(error)
        raise error

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._runtime.state is State.OPEN and self._own_params(optimizer):
            raise ProtocolError(
                "optimizer.step() inside the minibatch: gradients are final only after it. Move step() behind the "
                "`with session.minibatch():` block, or call session.finish() before it."
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Publish at once every unit whose trainable parameters have all been updated.

        At once, not at the next gather: else a fast rank would wait for a slow one's first forward. A unit that is
        split between optimizers waits for the last of them; one with parameters in no optimizer is published when
        the next minibatch begins.
        """
        stepped = self._own_params(optimizer)
        if not stepped or self._runtime.state is not State.FINISHED:
            return
        self._stepped |= stepped
        for index, unit in enumerate(self._units):
            complete = all(id(p.sharded) in self._stepped for p in unit.trainable)
            if complete and not self._runtime.is_published(index):
                self._publish(index)

    def _own_params(self, optimizer: torch.optim.Optimizer) -> set[int]:
        ours = {id(p.sharded) for p in all_params(self._units)}
        return ours & {id(p) for group in optimizer.param_groups for p in group["params"]}

    def _after_load(self, module: nn.Module, incompatible: Any) -> None:
        # What is not published yet will be published as it is now.
        self._reloaded |= any(self._runtime.is_published(index) for index in range(len(self._units)))

    # What FSDP calls

    def gather(self, unit: int, out: torch.Tensor) -> None:
        """FSDP's all-gather of one unit; its own shard is in place already."""
        if self._runtime.state is State.FINISHED and (self._stepped or self._gradients_are_cleared()):
            # An evaluation after the step, with units that no optimizer owns completely; or after a step that was
            # skipped (GradScaler), whose gradients are gone: no later step can change the parameters.
            self._publish_all()
        if self._runtime.state is not State.FINISHED:
            self._check_unchanged(unit)
        self._runtime.gather(unit, out, own_in_place=True)

    def _gradients_are_cleared(self) -> bool:
        return all(p.sharded.grad is None for unit in self._units for p in unit.trainable)

    def scatter_accumulate(self, unit: int, grads: torch.Tensor) -> None:
        """FSDP's reduce-scatter of one unit."""
        if self._runtime.state is State.PUBLISHED:
            self._begin()  # used without the context manager: the first backward opens the minibatch
        self._runtime.scatter_accumulate(unit, grads, present=self._present[unit])

    def _note_present(self, index: int) -> None:
        unit = self._units[index]
        late = [p.name for p in unit.params if p.has_gradient and p not in unit.trainable]
        if late:
            raise UnsupportedError(
                f"parameters {late} received a gradient but were frozen when the model was patched: set "
                "requires_grad before patch_fsdp, or close() the session and patch again"
            )
        self._present[index] = unit.present()

    # For people

    def stats(self) -> Stats:
        """A copy of this rank's counters since patching."""
        return replace(self._runtime.stats)

    def memory(self) -> dict[str, int]:
        """Bytes of shared memory that ODC added on this rank, by purpose."""
        return self._runtime.memory()

    def start_timeline(self) -> Timeline:
        """Record what this rank does from now on. Set ``timeline.minibatch`` in the loop to number the spans."""
        return self._runtime.start_timeline()

    @property
    def transport(self) -> str:
        return self._runtime.transport_name

    def close(self) -> None:
        """Give the model back to plain FSDP2 and release everything. Local, idempotent, never waits."""
        if self._closed:
            return
        self._closed = True
        try:
            while self._undo:
                self._undo.pop()()
        finally:
            self._runtime.close()

    def _require_open(self) -> None:
        if self._closed:
            raise OdcError("this session is closed: the model is plain FSDP2 again")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._runtime.abort(error)
        self.close()


def _agreement(units: Sequence[FsdpUnit]) -> dict[str, dict[str, str]]:
    """What must be equal on all ranks beyond the runtime's own tables."""
    parameters, options = {}, {}
    for unit in units:
        policy = unit.group.mp_policy
        options[unit.name] = (
            f"divide by {unit.divide_factor:g}, param_dtype {policy.param_dtype}, reduce_dtype {policy.reduce_dtype}"
        )
        for param in unit.params:
            frozen = "" if param.sharded.requires_grad else ", frozen"
            parameters[param.name] = (
                f"{list(param.global_shape)} {param.dtype} sharded on dim {param.shard_dim}{frozen}"
            )
    return {"parameters": parameters, "FSDP options": options}
