"""What a sample costs: time or FLOPs per sample, fits of them, memory per token."""

from odc.balance.costs.fit import CostFit, fit_cost
from odc.balance.costs.memory import ActivationMemory, ShardedState
from odc.balance.costs.models import CostModel, LinearCost, QuadraticCost, attention_costs, evaluate
from odc.balance.costs.presets import preset, preset_names
from odc.balance.costs.shapes import TransformerShape
from odc.balance.costs.transformer import LayerGroup, TransformerCost

__all__ = [
    "ActivationMemory",
    "CostFit",
    "CostModel",
    "LayerGroup",
    "LinearCost",
    "QuadraticCost",
    "ShardedState",
    "TransformerCost",
    "TransformerShape",
    "attention_costs",
    "evaluate",
    "fit_cost",
    "preset",
    "preset_names",
]
