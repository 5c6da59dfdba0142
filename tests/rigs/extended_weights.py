"""Weights with FSDP2's all-gather extension: what travels of them is made by ``fsdp_pre_all_gather``.

As torchao's: a wrapper subclass around the high-precision weight, which optimizers, DTensor and checkpoints see, and of
which FSDP2 makes a plain full parameter again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_aten = torch.ops.aten
_PRESERVED = {
    *(_aten.detach.default, _aten.clone.default, _aten.empty_like.default, _aten.new_zeros.default),
    *(_aten.view.default, _aten.as_strided.default, _aten.slice.Tensor, _aten.split.Tensor),
    *(_aten.copy_.default, _aten._to_copy.default),
}
Made = tuple[tuple[torch.Tensor, ...], Any]


class Extended(torch.Tensor):
    """The high-precision weight ``inner``, and the scale that the script has computed, if it has."""

    evaluations: ClassVar[int] = 0
    """How often this process has made what travels."""

    inner: torch.Tensor
    scale: torch.Tensor | None

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Extended:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        assert isinstance(wrapper, cls)
        return wrapper

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner, self.scale = inner, None

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], None

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(Extended, lambda one: one.inner, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in _PRESERVED else result

    def full(self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        """The full parameter, of what was gathered."""
        raise NotImplementedError

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        full = self.full(all_gather_outputs, metadata, param_dtype)
        if out is None:
            return full, (full,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(full[: out.shape[0]])
        return None


class Rounded(Extended):
    """bfloat16 travels; the old signature."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Made:
        Extended.evaluations += 1
        return (self.inner.to(torch.bfloat16),), None

    def full(self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        return outputs[0].to(dtype)


class Scaled(Extended):
    """float8 with one scale for all of the weight, which is in the metadata of each rank: a maximum over the ranks, or
    what :func:`precompute_scales` has set."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Made:
        Extended.evaluations += 1
        scale = self.scale
        if scale is None:
            largest = self.inner.abs().max()
            dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.get_group())
            scale = _scale_for(largest)
        return ((self.inner * scale).clamp(-_LARGEST, _LARGEST).to(FLOAT8),), (scale,)

    def full(self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        return outputs[0].to(dtype) / metadata[0].to(dtype)


class RowScaled(Extended):
    """float8, and a scale in float32 for each row: both travel, with padding."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,
    ) -> Made:
        Extended.evaluations += 1
        rows = -(-outer_size[0] // mesh.size())
        inner = torch.cat([self.inner, self.inner.new_zeros(rows - self.inner.shape[0], self.inner.shape[1])])
        scales = _scale_for(inner.abs().amax(1, keepdim=True)).expand_as(inner).contiguous()
        return ((inner * scales).to(FLOAT8), scales), (outer_size,)

    def full(self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        data, scales = outputs
        return (data.to(dtype) / scales.to(dtype))[: metadata[0][0]].contiguous()


def _scale_for(largest: torch.Tensor) -> torch.Tensor:
    return _LARGEST / largest.clamp(min=1e-12)


def extend(model: nn.Module, kind: Callable[[torch.Tensor], Extended], world_size: int = 1) -> None:
    """Let the weights of all linear modules of ``model`` that can be cut evenly be of a ``kind``."""
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.shape[0] % world_size == 0:
            weight = module.weight
            module.weight = nn.Parameter(kind(weight.detach()), requires_grad=weight.requires_grad)


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """Set the scales of all weights, with one collective, as torchao's ``precompute_float8_dynamic_scale_for_fsdp``."""
    weights = [parameter._local_tensor for parameter in model.parameters() if is_extended(parameter)]
    largest = torch.stack([weight.inner.abs().max() for weight in weights])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    for weight, scale in zip(weights, _scale_for(largest), strict=True):
        weight.scale = scale


def is_extended(parameter: torch.Tensor) -> bool:
    return isinstance(getattr(parameter, "_local_tensor", None), Extended)
