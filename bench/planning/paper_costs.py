"""What a sample costs for the paper's models.

The costs of the models of 1.5B and 7B, ``a s**2 + b s``, were fitted to the paper's tables together with the length
laws; their unit of length is 32000 tokens. The costs of the other models are counted FLOPs. Each model has a unit of
cost of its own.
"""

from __future__ import annotations

from odc.balance import CostModel, QuadraticCost, TransformerCost

MODELS = ("1.5B", "7B", "14B", "32B")
_FITTED = {"1.5B": (1.982122, 2.611821), "7B": (4.348357, 8.768377)}
_FITTED_UNIT = 32000


def paper_cost(model: str) -> CostModel:
    """The cost model of one of :data:`MODELS`."""
    if model in _FITTED:
        a, b = _FITTED[model]
        return QuadraticCost(a / _FITTED_UNIT**2, b / _FITTED_UNIT)
    return TransformerCost.from_config(f"deepseek-r1-distill-qwen-{model.lower()}")
