"""FSDP2: the units of a model, unsupported options, forward methods, time limits of collectives."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.errors import UnsupportedError
from odc.fsdp_patch.compat import is_tested, param_groups
from odc.fsdp_patch.fsdp2_extension import Extension
from odc.fsdp_patch.fsdp2_unit import Fsdp2Unit, OdcAllGather
from odc.fsdp_patch.unit import check_grad_dtype, shadow
from odc.timeline import Timeline

logger = logging.getLogger("odc")


def find_fsdp2_units(model: nn.Module) -> list[Fsdp2Unit]:
    """All FSDP2 units below ``model`` in module order (a unit shared by several modules appears once)."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    units = [Fsdp2Unit(module, group, name, names) for name, module, group in _groups(model)]
    shared = {unit.shard_group.group_name: unit.sharing for unit in units if unit.is_sharded and unit.sharing}
    for unit in units:  # of which some have reshard_after_forward=<int>: so that nothing crosses
        if unit.is_sharded and unit.sharing is None and unit.copy_group is None:
            unit.sharing = shared.get(unit.shard_group.group_name)
    return units


def _groups(model: nn.Module) -> Iterator[tuple[str, FSDPModule, Any]]:
    seen: set[int] = set()
    for name, module in model.named_modules():
        groups = param_groups(module)
        for number, group in enumerate(groups):
            assert isinstance(module, FSDPModule)
            if id(group) not in seen:
                seen.add(id(group))
                yield (name or "<root>") + (f" (mesh {number})" if len(groups) > 1 else ""), module, group


def check_fsdp2(units: Sequence[Fsdp2Unit]) -> None:
    """Refuse what cannot be honoured, before anything is allocated or changed.

    Raises:
        UnsupportedError: naming the module, the option and what to do.
    """
    for unit in units:
        _check_unit(unit)


def check_fsdp2_meshes(units: Sequence[Fsdp2Unit]) -> None:
    """Refuse units that are not sharded at all (``replicate()`` of torch 2.10 and later is FSDP2 with such a mesh)."""
    for unit in units:
        if not unit.is_sharded:
            raise UnsupportedError(
                f"unit {unit.name!r}: a mesh that only replicates has nothing to gather on demand: shard over it, or "
                "keep the collectives"
            )


def _check_unit(unit: Fsdp2Unit) -> None:
    group, where = unit.group, f"unit {unit.name!r}"
    if isinstance(group._all_gather_comm, OdcAllGather):
        raise UnsupportedError(f"{where} is patched already: close() the other session first")
    unit.check_doors(is_entered=False)
    if unit.trainable:
        check_grad_dtype(where, unit.grad_dtype)
    for param in unit.params:
        if param.sharded.device.type == "meta":
            raise ValueError(
                f"{where}: parameter {param.name!r} is on the meta device; materialise the model before patching"
            )
        if getattr(param.inner, "is_spmd_types", False):
            raise UnsupportedError(
                f"{where}: parameter {param.name!r} has types of spmd_types, which is not supported: shard it as a "
                "DTensor, or keep FSDP's own collectives"
            )
        if param.extension is not None:
            _check_extension(param.name, param.extension, where)
    if unit.process_group.size() == 1 and unit.replica_group is not None:
        logger.warning(
            "odc: %s is sharded over one rank and replicated, and is left to FSDP2: it all-reduces these gradients in "
            "every backward, so every rank must run as many microbatches",
            where,
        )


def _check_extension(name: str, extension: Extension, where: str) -> None:
    if not is_tested():
        raise UnsupportedError(
            f"{where}: parameter {name!r} uses the all-gather extension of {extension.kind}, with torch "
            f"{torch.__version__}, for which nobody has tried it: switch it off"
        )


def watch_forward_methods(model: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` before and ``end`` after each method of a module of ``model`` that a script has made a forward
    (``register_fsdp_forward_method``): no module hook sees these. Returns the undo.

    They look up the two halves of FSDP2's forward in the module's state each time; its own hooks were bound once.
    """
    found = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    states = {id(state): state for state in found}.values()  # one may belong to several modules
    undos = [shadow(state, _pre_forward=_telling(state._pre_forward, begin)) for state in states]
    undos += [shadow(state, _post_forward=_telling(state._post_forward, end)) for state in states]

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _telling(original: Callable[..., Any], tell: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(original)
    def telling(*args: Any, **kwargs: Any) -> Any:
        tell()
        return original(*args, **kwargs)

    return telling


class _Timed:
    """Wraps one of FSDP's communication objects and records each call as a span."""

    def __init__(self, inner: Any, timeline: Timeline, kind: str, label: str) -> None:
        self._inner = inner
        self._timeline = timeline
        self._kind = kind
        self._label = label

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor: torch.Tensor = self._inner.allocate(size, dtype=dtype, device=device)
        return tensor

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        # The larger one: of a gather what comes out, of a reduce-scatter what goes in.
        whole: torch.Tensor = kwargs["output_tensor" if self._kind == "gather" else "input_tensor"]
        with self._timeline.span(self._kind, self._label, bytes=whole.nbytes):
            work: dist.Work | None = self._inner(*args, **kwargs)
        return work


class Observation:
    """Timed collectives in one model, until :meth:`close`."""

    def __init__(self, units: Sequence[Fsdp2Unit], timeline: Timeline) -> None:
        self._undo: list[Callable[[], None]] = []
        for unit in units:
            self._undo.append(
                unit.swap_comms(
                    _Timed(unit.group._all_gather_comm, timeline, "gather", unit.name),
                    _Timed(unit.group._reduce_scatter_comm, timeline, "scatter", unit.name),
                )
            )

    def close(self) -> None:
        """Take the timers out again. Idempotent."""
        for undo in self._undo:
            undo()
        self._undo.clear()


def observe_fsdp(model: nn.Module, timeline: Timeline) -> Observation:
    """Record every all-gather ("gather") and reduce-scatter ("scatter") of an FSDP2 model in ``timeline``.

    Raises:
        ValueError: the model has no FSDP2 modules.
    """
    units = find_fsdp2_units(model)
    if not units:
        raise ValueError(f"{type(model).__name__} has no FSDP2 modules to observe: call fully_shard first")
    return Observation(units, timeline)
