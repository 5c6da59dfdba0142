"""What a sample costs: time or FLOPs per sample, fits of them, memory per token."""

from odc.balance.costs.models import CostModel, LinearCost, QuadraticCost, evaluate
from odc.balance.costs.presets import preset, preset_names
from odc.balance.costs.shapes import TransformerShape
from odc.balance.costs.transformer import LayerGroup, TransformerCost

__all__ = [
    "CostModel",
    "LayerGroup",
    "LinearCost",
    "QuadraticCost",
    "TransformerCost",
    "TransformerShape",
    "evaluate",
    "preset",
    "preset_names",
]
