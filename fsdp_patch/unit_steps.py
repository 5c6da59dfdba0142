"""The optimizer step unit by unit, with the gradients of only one unit in memory (:mod:`odc.fsdp_patch.publishing`).

[Note: One optimizer for all] The optimizers of ``torch.optim`` keep their state separately for each parameter, and skip
parameters without a gradient. So one that holds the whole model may step once for each unit while the other units have
no gradients; together this is one step. Other optimizers count steps or use statistics of all parameters, and so may
hooks of the step. They must hold parameters of one unit only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from odc.errors import MisuseError, OdcError, UnsupportedError
from odc.fsdp_patch.gradient_use import GradientUse
from odc.fsdp_patch.interception import listening, parameters_of
from odc.fsdp_patch.pending import settled
from odc.fsdp_patch.publishing import Turns
from odc.fsdp_patch.session import Session, find_session, open_sessions, session_of
from odc.fsdp_patch.unit import Unit
from odc.minibatch.state import Phase

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | Mapping[nn.Parameter, torch.optim.Optimizer]
_NAME = "odc.step_by_unit"


def step_by_unit(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    skip_nonfinite: bool = False,
) -> torch.Tensor | None:
    """End the minibatch with one optimizer step per FSDP unit, so that only one unit's gradients are in memory at a
    time.

    Use it in place of clipping, ``optimizer.step()`` and ``zero_grad()``; the result is the same. For each unit in
    turn, the final gradient is put into ``.grad``, clipped, used by the optimizers and freed. Every rank must call this
    function, also one that had no microbatch. A failure in the middle ends the job on all ranks.

    Args:
        model: a patched model. If it is a part of one, the whole patched model steps.
        optimizers: one, several, or a mapping by parameter; together they must hold all trainable parameters. An
            optimizer of ``torch.optim`` without hooks may hold parameters of several units, and steps once for each
            unit. Any other optimizer must hold parameters of one unit only. Parameters outside of all units step last.
        max_norm: clip all gradients together to this norm, as ``clip_grad_norm_`` does. With ``inf`` the norm is
            computed and nothing is scaled.
        norm_type: the p of the p-norm, or ``inf``.
        skip_nonfinite: if the norm is not finite, no rank takes a step.

    Returns:
        The norm before clipping, a tensor without dimensions; None without ``max_norm``.

    Raises:
        UnsupportedError: an optimizer holds parameters of several units, or of another patched model.
        MisuseError: a parameter is in no optimizer, ``.grad`` holds gradients of an earlier minibatch, or gradients of
            this minibatch were used already. In both cases nothing was changed.
        OdcError: the model is not patched.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> for microbatches in minibatches:
        ...     for microbatch in microbatches:
        ...         loss(model, microbatch).backward()
        ...     norm = odc.step_by_unit(model, optimizer, max_norm=1.0)
        >>> session.memory().gradients
        0
        >>> session.close()
    """
    if skip_nonfinite and max_norm is None:
        raise ValueError("skip_nonfinite asks for a norm: give max_norm; float('inf') scales nothing")
    session = find_session(model)
    if session is None:  # under `odc run`, on a rank that has had no microbatch; or in a dry run, which ends here
        others, parameters = [one for one in listening() if not isinstance(one, GradientUse)], list(model.parameters())
        for listener in others:
            listener.before_reading(_NAME, parameters)
        for listener in others if find_session(model) is None else ():
            listener.after_step(_NAME, parameters)
        session = session_of(model)
    found = _flat(optimizers)
    session._gradients.check_by_unit(_NAME)
    if session._runtime.state.phase is not Phase.OPEN:
        session._patch_anew()  # as the end of the minibatch would, and then there are other units
    norms = None if max_norm is None else _Norms(session, norm_type)
    step = _Step(session, found, norms, max_norm or 0.0, skip_nonfinite)
    session._gradients.finish(_NAME, step=step)
    return step.norm


def _flat(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    """Each once."""
    if isinstance(optimizers, Mapping):
        optimizers = optimizers.values()
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    for one in found:
        if not isinstance(one, torch.optim.Optimizer):
            raise ValueError(f"{_NAME} expects optimizers of torch.optim.Optimizer, got {type(one).__name__}")
    return list({id(one): one for one in found}.values())


class _Step:
    """One of a session."""

    def __init__(
        self,
        session: Session,
        optimizers: Sequence[torch.optim.Optimizer],
        norms: _Norms | None,
        max_norm: float,
        skip_nonfinite: bool,
    ) -> None:
        self._units = session._units
        self._norms, self._max_norm, self._skip_nonfinite = norms, max_norm, skip_nonfinite
        self._optimizers: list[list[torch.optim.Optimizer]] = [[] for _ in range(len(self._units) + 1)]  # by unit; rest
        self._rest: list[torch.Tensor] = []
        self._aside: list[torch.Tensor | None] = []  # the gradients of the rest
        self.norm: torch.Tensor | None = None
        self._is_skipped = False
        try:
            self._assign(session, optimizers)
        except OdcError as error:
            raise session._runtime.refusal(str(error), type(error)) from None

    def _assign(self, session: Session, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        trainable = [[p for p in unit.trainable_parameters() if p.requires_grad] for unit in self._units]
        unit_of = {id(p): index for index, parameters in enumerate(trainable) for p in parameters}
        others = [one._publisher for one in open_sessions() if one is not session]
        rest = dict[int, torch.Tensor]()
        held = set[int]()
        for optimizer in optimizers:
            parameters = [p for p in parameters_of(optimizer) if p.requires_grad]
            if any(publisher.owned(parameters) for publisher in others):
                raise UnsupportedError(
                    f"{_NAME}: an optimizer ({type(optimizer).__name__}) has parameters of another patched model. Make "
                    "one for each model, and call it for each"
                )
            places = sorted({unit_of.get(id(p), len(self._units)) for p in parameters})
            if len(places) > 1 and not _is_by_parameter(optimizer):
                names = [*(repr(unit.name) for unit in self._units), "no unit"]
                raise UnsupportedError(
                    f"{_NAME}: an optimizer ({type(optimizer).__name__}) has parameters of units {names[places[0]]} "
                    f"and {names[places[1]]}. Only those of torch.optim without hooks may step once for each unit. "
                    "Make one for each parameter: {p: Optimizer([p]) for p in model.parameters()}"
                )
            for place in places:
                self._optimizers[place].append(optimizer)
            rest.update({id(p): p for p in parameters if id(p) not in unit_of})
            held.update(map(id, parameters))
        self._rest.extend(rest.values())
        for unit, own in zip(self._units, trainable, strict=True):
            if left := sum(id(p) not in held for p in own):
                raise MisuseError(
                    f"{_NAME}: {left} trained parameters of unit {unit.name!r} are in none of the optimizers, and "
                    "their gradients would be dropped. Give all optimizers at once, or set requires_grad = False"
                )
            if any(settled(p.grad) is not None for p in own):
                raise MisuseError(
                    f"{_NAME}: gradients of an earlier minibatch are in .grad of unit {unit.name!r}. Clear them before "
                    "the first backward (zero_grad(), with set_to_none=True); this function clears those that it uses"
                )
        if self._norms is not None:
            _check_meshes([*zip(self._units, trainable, strict=True), (None, self._rest)])

    def begin(self, turns: Turns) -> None:
        self._aside = [p.grad for p in self._rest]
        if self._norms is not None:
            self._norms.add(self._rest, None)
        for parameter in self._rest:  # else they would step with each unit
            parameter.grad = None
        if self._norms is None:
            return
        for index, unit in enumerate(self._units):
            turns.make(index, will_be_made_again=True)
            self._norms.add(unit.trainable_parameters(), unit)
            unit.clear_gradients()
        self.norm = self._norms.total()
        self._is_skipped = self._skip_nonfinite and not bool(torch.isfinite(self.norm))

    def use(self, index: int) -> None:
        self._use(self._units[index].trainable_parameters(), self._optimizers[index])

    def end(self) -> None:
        for parameter, gradient in zip(self._rest, self._aside, strict=True):
            parameter.grad = gradient
        self._use(self._rest, self._optimizers[-1])
        for parameter in self._rest:
            parameter.grad = None

    def _use(self, parameters: Sequence[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if self._is_skipped:
            return
        if self.norm is not None and not math.isinf(self._max_norm):
            scale = torch.clamp(self._max_norm / (self.norm + 1e-6), max=1.0)  # as clip_grad_norm_ does
            gradients = [gradient for p in parameters if (gradient := _gradient_of(p)) is not None]
            if gradients:
                torch._foreach_mul_(gradients, scale.to(gradients[0].device))
        for optimizer in optimizers:
            optimizer.step()


def _check_meshes(parts: Sequence[tuple[Unit | None, Sequence[torch.Tensor]]]) -> None:
    """Refuse a norm where no mesh tells whether ranks beyond it have copies of a parameter, or others (experts)."""
    known = dict[object, str]()
    for unit, parameters in parts:
        name = "no unit" if unit is None else f"unit {unit.name!r}"
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                known.setdefault(parameter.device_mesh, name)
            elif unit is not None:
                known.setdefault(unit.shard_group, name)
    found = {tuple(sorted(_ranks_of(where))): name for where, name in known.items()}
    if len(found) > 1:
        (one, name), (other, other_name), *_ = ((list(ranks), name) for ranks, name in found.items())
        raise UnsupportedError(
            f"{_NAME} with max_norm: parameters of {name} are on a mesh of ranks {one}, those of {other_name} on one "
            f"of {other}, and whether other ranks have copies or other parameters is not known here. Leave max_norm "
            "out; or clip as your script does, and call optimizer.step()"
        )


def _ranks_of(where: Any) -> list[int]:
    if isinstance(where, DeviceMesh):
        ranks: list[int] = where.mesh.flatten().tolist()
        return ranks
    return dist.get_process_group_ranks(where)


def _is_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """See [Note: One optimizer for all]."""
    has_hooks = bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    is_of_torch = type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]
    return is_of_torch and not isinstance(optimizer, torch.optim.LBFGS) and not has_hooks


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of it."""
    gradient = parameter.grad
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


class _Norms:
    """The norm of all gradients of a model: of each parameter's part here, of these together, of those of all ranks."""

    def __init__(self, session: Session, norm_type: float) -> None:
        self._runtime = session._runtime
        self._order = norm_type
        units = (*session._units, *session._alone.units)
        self._device = units[0].device if units else torch.device("cpu")
        self._parts: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}  # by who have the other parts

    def add(self, parameters: Sequence[torch.Tensor], unit: Unit | None) -> None:
        for parameter in parameters:
            norms = self._parts.setdefault(_spread_over(parameter, unit), [])  # also if this rank has no part
            gradient = _gradient_of(parameter)
            if gradient is not None and gradient.numel():
                dtype = torch.promote_types(gradient.dtype, torch.float32)
                norms.append(torch.linalg.vector_norm(gradient, self._order, dtype=dtype))

    def total(self) -> torch.Tensor:
        """Collective."""
        found = []
        for groups, norms in self._parts.items():
            norm = self._together(norms)
            for group in groups:
                norm = self._over(group, norm)
            found.append(norm)
        return self._together(found)

    def _together(self, norms: Sequence[torch.Tensor]) -> torch.Tensor:
        if not norms:
            return torch.zeros((), device=self._device)
        norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([one.to(self._device) for one in norms]), self._order)
        return norm

    def _over(self, group: dist.ProcessGroup, norm: torch.Tensor) -> torch.Tensor:
        if group.size() == 1:
            return norm
        is_largest = math.isinf(self._order)
        total = norm.clone() if is_largest else norm.pow(self._order)
        op = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
        ranks = dist.get_process_group_ranks(group)
        work = dist.all_reduce(total, op, group, async_op=True)
        assert work is not None
        self._runtime.wait_for_work(work, f"norm of the gradients, with ranks {ranks}", ranks, on_host=total.is_cpu)
        return total if is_largest else total.pow(1.0 / self._order)


def _spread_over(parameter: torch.Tensor, unit: Unit | None) -> tuple[dist.ProcessGroup, ...]:
    """The groups of ranks that have parts of a parameter, each other ones; not those that have copies."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if not placement.is_replicate())
    return () if unit is None else (unit.shard_group,)
