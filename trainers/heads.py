"""The output layer of a language model if it is not called: TRL's fused head uses only its weight.

If that layer is a separate FSDP2 unit, as accelerate makes it in a model with adapters, FSDP does not gather the
weight. TRL gathers it by a collective in every microbatch, so ranks with different numbers of microbatches would wait
forever.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.errors import UnsupportedError
from odc.trainers.checks import base_model

_NOTHING = (lambda: None).__code__


def gather_head(model: Any) -> None:
    """Gather that layer before ``model`` runs, if it is frozen: then no gradient has to come back."""
    head = _own_unit(model)
    if head is not None and not head.weight.requires_grad:
        head.unshard()


def check_head(model: nn.Module, name: str) -> None:
    """Refuse that layer where it is trained.

    Args:
        name: of the way to balance.

    Raises:
        UnsupportedError: names the layer.
    """
    head = _own_unit(model)
    if head is not None and head.weight.requires_grad:
        raise UnsupportedError(
            f"balancing by {name!r} gives ranks different numbers of microbatches, but the output layer is trained and "
            "an FSDP2 unit of its own, whose weight TRL gathers by a collective in each microbatch: leave it out of "
            "modules_to_save (peft), or use a policy with equal numbers (lb-micro)"
        )


def _own_unit(model: Any) -> Any:
    """None: the layer is called, or it is in a unit with others, which gather it when they are."""
    base = base_model(model)
    is_fused = "fused_lm_head" in getattr(getattr(base, "forward", None), "__code__", _NOTHING).co_varnames
    head = base.get_output_embeddings() if is_fused else None
    if not isinstance(head, FSDPModule):
        return None
    group = head._get_fsdp_state()._fsdp_param_group
    return None if group is None or len(group.modules) > 1 else head
