"""Publishing: a unit's new shard goes out as soon as nothing can change it any more, and nothing may change it then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from odc.errors import ProtocolError
from odc.fsdp_patch.comparison import comparison_for
from odc.fsdp_patch.unit import Unit
from odc.protocol import State
from odc.runtime import Runtime


class Publisher:
    """Publishes the units of one session and keeps watch over what was published."""

    def __init__(self, units: Sequence[Unit], runtime: Runtime) -> None:
        self._units = units
        self._runtime = runtime
        self._parameters: list[list[nn.Parameter]] = []  # kept: the id of one that is gone may be given to another
        self._trainable: list[set[int]] = []
        self._all_trainable: set[int] = set()
        self._look_up_parameters()
        self._comparison = comparison_for(units[0].device if units else torch.device("cpu"))
        self._stepped: set[int] = set()  # ids of parameters that an optimizer has updated since finish
        self._versions: list[list[tuple[str, int]]] = [[] for _ in units]
        self._verified = [False] * len(units)  # published shard compared with the parameters, since publication
        self.reloaded = False  # a checkpoint was loaded over published parameters

    def _look_up_parameters(self) -> None:
        self._parameters = [unit.trainable_parameters() for unit in self._units]
        self._trainable = [{id(p) for p in parameters} for parameters in self._parameters]
        self._all_trainable = set().union(*self._trainable)

    def forget(self) -> None:
        """The session is closed: no parameter is ours any more."""
        self._parameters, self._trainable, self._all_trainable = [], [], set()

    def owned(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Which of ``tensors`` are trainable parameters of these units, by id."""
        return {id(t) for t in tensors} & self._all_trainable

    def units_of(self, tensors: Sequence[torch.Tensor]) -> set[int]:
        """Indices of the units that any of these parameters belongs to."""
        owned = self.owned(tensors)
        return {index for index, trainable in enumerate(self._trainable) if not owned.isdisjoint(trainable)}

    @property
    def has_stepped(self) -> bool:
        """Whether an optimizer has updated any parameter since the last finish."""
        return bool(self._stepped)

    def unstepped(self) -> set[int]:
        """Trainable parameters that no optimizer has updated since the last finish, by id."""
        return self._all_trainable - self._stepped

    def already_stepped(self, owned: set[int]) -> bool:
        """Whether an optimizer has updated any of these parameters since the last finish."""
        return not self._stepped.isdisjoint(owned)

    def forget_steps(self) -> None:
        """A new minibatch is final: no optimizer has used its gradients yet."""
        self._stepped.clear()

    def after_step(self, owned: set[int]) -> None:
        """Publish at once every unit whose trainable parameters have all been updated.

        At once, not at the next gather: else a fast rank would wait for a slow one's first forward. A unit that is
        split between optimizers waits for the last of them; one with parameters in no optimizer is published when the
        next minibatch begins.
        """
        self._stepped |= owned
        for index, trainable in enumerate(self._trainable):
            if trainable <= self._stepped and not self._runtime.is_published(index):
                self._publish(index)

    def publish_all(self) -> None:
        """Publish what is not published yet, if this is the time for it."""
        if self._runtime.state is not State.FINISHED:
            return
        for index in range(len(self._units)):
            if not self._runtime.is_published(index):
                self._publish(index)

    def _publish(self, index: int) -> None:
        unit = self._units[index]
        self._runtime.publish(index, unit.fill_shard)
        self._versions[index] = unit.versions()
        self._verified[index] = False

    def is_any_changed(self) -> bool:
        """Whether any parameter differs from what was published, or was written since."""
        if any(unit.versions() != then for unit, then in zip(self._units, self._versions, strict=True)):
            return True
        pairs = (pair for i, unit in enumerate(self._units) for pair in unit.beside(self._runtime.published_shard(i)))
        return not all(torch.equal(left, right) for left, right in pairs)

    def gradients_are_cleared(self) -> bool:
        """Whether no trainable parameter has a ``.grad``."""
        return all(p.grad is None for unit in self._units for p in unit.trainable_parameters())

    def after_load(self) -> None:
        """A checkpoint was loaded, perhaps as new parameters. What is not published yet will be published as it is
        now."""
        self._look_up_parameters()
        self.reloaded |= any(self._runtime.is_published(index) for index in range(len(self._units)))

    def check_unchanged(self, index: int, whole: bool = False) -> None:
        """Refuse to compute with parameters that are not the ones the other ranks read.

        By version counters every time. They miss changes through ``param.data`` and checkpoints loaded in place, so
        bits are compared too: all of them at the first check of a publication and where ``whole`` asks for it (once per
        minibatch; at every gather it would cost as much as the gather), a sample of each parameter otherwise. On a GPU
        the bits' answer comes late, see :class:`~odc.fsdp_patch.comparison.DeviceComparison`, and where nothing is
        trainable, so that no minibatch comes, all are compared each time: its memory is faster than the wire.
        """
        unit = self._units[index]
        versions = unit.versions()
        changed = [now[0] for now, then in zip(versions, self._versions[index], strict=True) if now != then]
        # Written is not changed: FSDP1's summon_full_params writes back what it has read, torch 2.9 gives padded shards
        # new tensors at the first forward, and a step with a learning rate of 0 changes nothing.
        is_seldom_seen = not self._comparison.samples and not self._all_trainable
        whole = whole or bool(changed) or not self._verified[index] or is_seldom_seen
        if whole or self._comparison.samples:
            what = f"parameter {changed[0]!r}" if changed else f"a parameter of unit {unit.name!r}"
            found = self._comparison.compare(unit.beside(self._runtime.published_shard(index), whole), what)
        else:
            found = self._comparison.found()
        if found is not None:
            self._fail_changed(found)
        if whole:
            self._versions[index], self._verified[index] = versions, True

    def check_answers(self) -> None:
        """Refuse to use gradients of parameters that a comparison has found changed since it was asked."""
        found = self._comparison.found()
        if found is not None:
            self._fail_changed(found)

    def _fail_changed(self, what: str) -> NoReturn:
        error = ProtocolError(
            f"{what} was changed after it was published to the other ranks. Change parameters before optimizer.step, "
            "or call session.publish() on every rank after changing them (odc.session_of(model) finds the session)."
        )
        self._runtime.abort(error)
        raise error
