"""One parameter of an FSDP2 unit: what is read of ``FSDPParam``, which has no public door."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from odc.fsdp_patch.fsdp2_extension import Extension, has_extension
from odc.fsdp_patch.pending import settled


class FsdpParam:
    """One parameter of a unit, as FSDP2 shards it: what is read of ``FSDPParam``."""

    def __init__(self, inner: Any, name: str) -> None:
        self.inner = inner
        self.name = name
        self.patched_dtype = self.dtype
        self._hidden: dict[int, Callable[[torch.Tensor], object]] | None = None
        self.extension = Extension(inner, name) if has_extension(self.local) else None
        """Where something else travels than the shard in the compute dtype."""

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded DTensor parameter the optimizer sees."""
        parameter: nn.Parameter = self.inner.sharded_param
        return parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, without padding."""
        tensor: torch.Tensor = self.inner.sharded_param._local_tensor
        return tensor

    @property
    def padded(self) -> torch.Tensor:
        """This rank's shard, flat, padded to the same length on every rank; shares memory with ``local``."""
        tensor: torch.Tensor = self.inner._sharded_param_data
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    def compute_dtype(self, param_dtype: torch.dtype | None) -> torch.dtype:
        """What FSDP casts the parameter to for the all-gather."""
        return param_dtype if param_dtype is not None and self.dtype.is_floating_point else self.dtype

    def grad_dtype(self, param_dtype: torch.dtype | None) -> torch.dtype:
        """What FSDP reduces the gradient in where the policy has no ``reduce_dtype``."""
        keeps_own = hasattr(type(self.inner), "unsharded_grad_dtype")  # torch 2.15
        return self.dtype if keeps_own else self.compute_dtype(param_dtype)

    @property
    def full(self) -> torch.Tensor | None:
        """The parameter that stands in the module while the unit is unsharded; the same one each time."""
        parameter: torch.Tensor | None = getattr(self.inner, "_unsharded_param", None)
        return parameter

    @functools.cached_property
    def numel(self) -> int:
        """Elements of :attr:`padded`."""
        return self.padded.numel()

    @functools.cached_property
    def shard_dim(self) -> int:
        """The dimension that is divided among the ranks. Only 0 is divided unevenly, with padding."""
        return int(self.inner.fsdp_placement.dim)

    def allocate_full(self, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
        """Give the unsharded parameter its memory, as FSDP2 does before it copies there what it has gathered."""
        self.inner.init_all_gather_outputs([self.numel], [dtype], world_size, device)
        self.inner.alloc_all_gather_outputs()

    @property
    def gathered(self) -> torch.Tensor:
        """The memory of the unsharded parameter: flat, with the padding of all ranks behind it; the same tensor each
        time."""
        tensor: torch.Tensor = self.inner.all_gather_outputs[0]
        return tensor

    def rows_of(self, whole: torch.Tensor, world_size: int) -> torch.Tensor:
        """The unsharded parameter, or its gradient: contiguous, in its shape or flat, as [world_size, ...], row r for
        rank r. A gradient without the padding that its last rows would have: flat."""
        if self.shard_dim:
            size = list(self.inner.padded_sharded_param_size)
            size.insert(self.shard_dim, world_size)
            return whole.view(size).movedim(self.shard_dim, 0)
        is_whole = whole.numel() == world_size * self.numel
        return whole.view(world_size, self.numel) if is_whole else whole.view(-1)

    def drop_gradient(self) -> None:
        """Forget the unsharded gradient that :func:`have_gradients` tells of."""
        if self.full is not None:
            if "unsharded_accumulated_grad" in vars(self.inner):  # in torch 2.15 the next line alone clears it
                self.inner.unsharded_accumulated_grad = None
            self.inner._unsharded_param.grad = None

    @property
    def hooks(self) -> dict[int, Callable[[torch.Tensor], object]]:
        """That FSDP calls with the sharded parameter at every reduction, unless they are hidden."""
        return self._hidden or getattr(self.sharded, "_post_accumulate_grad_hooks", None) or {}

    def hide_hooks(self) -> None:
        """From FSDP."""
        self._hidden = self.hooks
        self.sharded._post_accumulate_grad_hooks = None  # type: ignore[assignment]

    def show_hooks(self) -> None:
        """Undo :meth:`hide_hooks`."""
        if self._hidden is not None:
            self.sharded._post_accumulate_grad_hooks, self._hidden = self._hidden, None

    def describe(self) -> str:
        """One line that is equal on two ranks exactly if the parameters are."""
        frozen = "" if self.sharded.requires_grad else ", frozen"
        extension = "" if self.extension is None else f", all-gather extension of {self.extension.kind}"
        return f"{list(self.sharded.size())} {self.dtype} sharded on dim {self.shard_dim}{frozen}{extension}"

    def as_dtensor(self, local: torch.Tensor) -> torch.Tensor:
        """A gradient of this rank's part as FSDP2 puts it in ``.grad``."""
        gradient: torch.Tensor = self.inner.to_sharded_dtensor(local)
        return gradient

    def add_to_grad(self, flat: torch.Tensor, handle: torch.Tensor | None) -> None:
        """Add this rank's part of the gradient, flat and without padding, to ``.grad``, or let it become that.

        Args:
            handle: the DTensor to put there if there is none; None: a new one.
        """
        # FSDP lays a shard out contiguously in its own shape, whichever dimension is sharded.
        local, sharded = flat.view(self.local.shape), self.sharded
        if isinstance(sharded.grad, DTensor):
            sharded.grad._local_tensor.add_(local.to(self.local.device))
            return
        local = local.to(device=self.local.device, dtype=self.dtype)
        if isinstance(handle, DTensor):
            handle._local_tensor = local
        sharded.grad = self.as_dtensor(local) if handle is None else handle

    @property
    def local_grad(self) -> torch.Tensor | None:
        """This rank's part of ``.grad``."""
        grad = settled(self.sharded.grad)
        return grad._local_tensor if isinstance(grad, DTensor) else grad


def have_gradients(params: Sequence[FsdpParam]) -> list[bool]:
    """Of which backward has left an unsharded gradient that the next reduction will take."""
    return [
        (full := getattr(p.inner, "_unsharded_param", None)) is not None
        and (full.grad is not None or p.inner.unsharded_accumulated_grad is not None)
        for p in params
    ]


def reaches_optimizer(thing: object, depth: int = 4) -> bool:
    """Whether a hook has an optimizer at hand: in its closure, arguments, object, or by a global name."""
    if isinstance(thing, torch.optim.Optimizer):
        return True
    if depth == 0 or isinstance(thing, (str, bytes, type, ModuleType, torch.Tensor)):
        return False
    parts: list[object] = []
    if isinstance(thing, FunctionType):
        parts += [cell.cell_contents for cell in thing.__closure__ or () if cell != CellType()]
        parts += [*(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
        parts += [thing.__globals__.get(name) for name in thing.__code__.co_names]
    elif isinstance(thing, MethodType):
        parts += [thing.__func__, thing.__self__]
    elif isinstance(thing, functools.partial):
        parts += [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, dict):
        parts += thing.values()
    elif isinstance(thing, (list, tuple, set)):
        parts += thing
    else:
        parts += getattr(thing, "__dict__", {}).values()
    return any(reaches_optimizer(part, depth - 1) for part in parts)
