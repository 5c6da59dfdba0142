"""One parameter of an FSDP2 unit: what is read of ``FSDPParam``, which has no public door."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from odc.errors import UnsupportedError


class FsdpParam:
    """One parameter of a unit, as FSDP2 shards it."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self.name = name

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded DTensor parameter the optimizer sees."""
        parameter: nn.Parameter = self._inner.sharded_param
        return parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, without padding."""
        tensor: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return tensor

    @property
    def padded(self) -> torch.Tensor:
        """This rank's shard, flat, padded to the same length on every rank; shares memory with ``local``."""
        tensor: torch.Tensor = self._inner._sharded_param_data
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    def compute_dtype(self, param_dtype: torch.dtype | None) -> torch.dtype:
        """What FSDP casts the parameter to for the all-gather."""
        return param_dtype if param_dtype is not None and self.dtype.is_floating_point else self.dtype

    def grad_dtype(self, param_dtype: torch.dtype | None) -> torch.dtype:
        """What FSDP reduces the gradient in where the policy has no ``reduce_dtype``."""
        keeps_own = hasattr(type(self._inner), "unsharded_grad_dtype")  # torch 2.15
        return self.dtype if keeps_own else self.compute_dtype(param_dtype)

    @property
    def has_gradient(self) -> bool:
        """Whether backward has left an unsharded gradient that the next reduction will take."""
        if not self.was_unsharded:
            return False
        return self._inner.unsharded_accumulated_grad is not None or self._inner._unsharded_param.grad is not None

    @property
    def was_unsharded(self) -> bool:
        return hasattr(self._inner, "_unsharded_param")

    @property
    def full(self) -> torch.Tensor | None:
        """The parameter that stands in the module while the unit is unsharded; the same one each time."""
        parameter: torch.Tensor | None = getattr(self._inner, "_unsharded_param", None)
        return parameter

    @property
    def shared_by_fewer(self) -> torch.Tensor | None:
        """The parameter that stands in the module behind a forward with ``reshard_after_forward=<int>``; another one
        each time."""
        parameter: torch.Tensor | None = getattr(self._inner, "_sharded_post_forward_param", None)
        return parameter

    def drop_gradient(self) -> None:
        """Forget the unsharded gradient that :attr:`has_gradient` tells of."""
        if self.was_unsharded:
            if "unsharded_accumulated_grad" in vars(self._inner):  # in torch 2.15 the next line alone clears it
                self._inner.unsharded_accumulated_grad = None
            self._inner._unsharded_param.grad = None

    def check_hooks(self, where: str) -> None:
        """Refuse an optimizer in backward: FSDP calls such hooks at every reduction."""
        if getattr(self.sharded, "_post_accumulate_grad_hooks", None):
            raise UnsupportedError(
                f"{where}: parameter {self.name!r} has register_post_accumulate_grad_hook (optimizer in backward); "
                "under ODC a gradient is final only at the end of the minibatch"
            )

    def describe(self) -> str:
        """One line that is equal on two ranks exactly if the parameters are."""
        frozen = "" if self.sharded.requires_grad else ", frozen"
        dim = int(self._inner.fsdp_placement.dim)
        return f"{list(self.sharded.size())} {self.dtype} sharded on dim {dim}{frozen}"

    def add_to_grad(self, flat: torch.Tensor) -> None:
        """Add this rank's part of the gradient, flat and without padding, to ``.grad``, or let it become that."""
        # FSDP lays a shard out contiguously in its own shape, whichever dimension is sharded.
        local = flat.view(self.local.shape)
        sharded = self.sharded
        assert isinstance(sharded, DTensor)
        if isinstance(sharded.grad, DTensor):
            sharded.grad.to_local().add_(local.to(self.local.device))
            return
        local = local.to(device=self.local.device, dtype=self.dtype)
        sharded.grad = DTensor.from_local(
            local,
            sharded.device_mesh,
            sharded.placements,
            run_check=False,
            shape=sharded.size(),
            stride=sharded.stride(),
        )

    @property
    def local_grad(self) -> torch.Tensor | None:
        """This rank's part of ``.grad``."""
        grad = self.sharded.grad
        return grad._local_tensor if isinstance(grad, DTensor) else None
