"""How much two computations of the same logits may differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_LEAST, _MOST = 2e-4, 0.15
"""A tolerance's range: positions that are not honoured show by 0.3 and more."""

_TF32 = 2.0**-10
"""Rounding of float32 matrix products on GPUs that may use TF32."""


@dataclass(frozen=True)
class Rounding:
    """Of logits computed in several dtypes, of which the coarsest counts."""

    epsilon: float
    """From 1 to the next number."""

    @property
    def tolerance(self) -> float:
        """For :meth:`difference` of a row and a shorter one, which other kernels may compute."""
        return min(max(_LEAST, 8 * self.epsilon), _MOST)

    def difference(self, given: torch.Tensor, expected: torch.Tensor) -> float:
        """Of the token that differs most, relative to its logits' size.

        Logits (..., num_classes) in float64. Their mean is left out, since no loss sees it, except for its rounding:
        some models' logits are all near -100.
        """
        size = _centred(expected).norm(dim=-1) + expected.norm(dim=-1) * (self.epsilon / self.tolerance)
        return float((_centred(given - expected).norm(dim=-1) / size).max())


def rounding(trainer: Any, model: nn.Module, logits: torch.Tensor) -> Rounding:
    """Of this model as this trainer runs it: its parameters' dtypes, autocast, FSDP's mixed precision."""
    dtypes: set[torch.dtype | None] = {logits.dtype, *(p.dtype for p in model.parameters())}
    dtypes.add({"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision))
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    dtypes.add(getattr(getattr(plugin, "mixed_precision_policy", None), "param_dtype", None))
    epsilons = [torch.finfo(dtype).eps for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return Rounding(max(*epsilons, 0.0 if logits.device.type == "cpu" else _TF32))


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(dim=-1, keepdim=True)
