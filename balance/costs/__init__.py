"""What a sample costs: time or FLOPs per sample, fits of them, memory per token."""

from odc.balance.costs.models import CostModel, LinearCost, QuadraticCost, evaluate
from odc.balance.costs.transformer import TransformerCost

__all__ = ["CostModel", "LinearCost", "QuadraticCost", "TransformerCost", "evaluate"]
