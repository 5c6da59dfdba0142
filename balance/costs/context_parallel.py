"""Costs of microbatches that several devices compute together: context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, replace

from odc.balance.checks import as_cost, check_counts
from odc.balance.costs.memory import ActivationMemory
from odc.balance.costs.models import LinearCost, QuadraticCost
from odc.balance.costs.shapes import TransformerShape
from odc.balance.costs.transformer import TransformerCost
from odc.errors import shown

# Keys and values are gathered for the forward and, as they are not kept, for the backward; their gradients are reduced.
_TRANSFERS = 3


@dataclass(frozen=True)
class ContextParallel:
    """``size`` devices that run the same microbatches, each on its slice of every sample.

    The work is divided evenly, attention's too: each device has parts from both ends of a sample, as in zigzag and
    head-tail orders. In each layer a device gathers the keys and values of the others' slices, for the forward and
    again for the backward, and the gradients of all are reduced to their owners. Nothing hides these three transfers,
    which take as long as their bytes do at ``bytes_per_s`` (an all-gather; a ring hides a part of them behind compute).
    Layers with a window exchange as many as others.

    With a size of 1 all stays as it is.

    Example:
        >>> group = ContextParallel.from_config("qwen2.5-7b", size=8, bytes_per_s=450e9)
        >>> f"{group.exchange_s * 28 * 65_536:.4f} s of exchange for a sample of 65,536 tokens"
        '0.0219 s of exchange for a sample of 65,536 tokens'
    """

    size: int
    kv_bytes: int
    """Of a token's keys and values in one layer."""

    num_layers: int
    bytes_per_s: float
    """What a device receives, while it sends as much."""

    def __post_init__(self) -> None:
        check_counts(self, "size", "kv_bytes", "num_layers")
        if not as_cost(self.bytes_per_s, "bytes_per_s"):
            raise ValueError(f"bytes_per_s={shown(self.bytes_per_s)}: expected a number greater than 0")

    @classmethod
    def from_config(cls, config: object, size: int, bytes_per_s: float, *, dtype_bytes: int = 2) -> ContextParallel:
        """Of the model that ``config`` describes, see :meth:`TransformerShape.from_config`."""
        shape = TransformerShape.from_config(config)
        return cls(size, 2 * shape.attention.kv_size * dtype_bytes, shape.num_layers, bytes_per_s)

    @property
    def exchange_s(self) -> float:
        """Seconds per token of a sample and layer, in each device of the group."""
        return _TRANSFERS * self.kv_bytes * (self.size - 1) / self.size / self.bytes_per_s

    def flops(self, whole: TransformerCost, flops_per_s: float) -> TransformerCost:
        """The cost of a sample on the group, from that on one device; exchange counts as what is computed meanwhile."""
        exchange = self.exchange_s * flops_per_s
        groups = tuple(
            replace(
                layers,
                flops_per_token=layers.flops_per_token / self.size + (exchange if layers.flops_per_pair else 0.0),
                flops_per_pair=layers.flops_per_pair / self.size,
            )
            for layers in whole.groups
        )
        return replace(whole, groups=groups)

    def seconds(self, whole: QuadraticCost | LinearCost) -> QuadraticCost | LinearCost:
        """The same of a cost in seconds."""
        per_token = whole.b / self.size + self.exchange_s * self.num_layers
        if isinstance(whole, QuadraticCost):
            return replace(whole, a=whole.a / self.size, b=per_token)
        return replace(whole, b=per_token)

    def activations(self, whole: ActivationMemory) -> ActivationMemory:
        """What a token of a device's slice needs: at the peak also one layer's keys and values of the others' slices,
        and the gradients of these."""
        gathered = 2 * self.kv_bytes * (self.size - 1)
        return replace(whole, transient_bytes_per_token=whole.transient_bytes_per_token + gathered)
