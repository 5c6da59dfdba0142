"""Balance samples of different lengths over ranks: costs, partitions, packing, policies, plans, loaders.

Start at :func:`get_policy` (plan one minibatch), :class:`MinibatchLoader` (a dataset whose lengths are known),
:class:`StreamLoader` (a dataset whose lengths are known only once samples are read) or :func:`balance_batch` (samples
that are on the ranks already, such as rollouts). Needs numpy only; names that need torch are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc._lazy import lazy
from odc.balance.costs import (
    ActivationMemory,
    CostFit,
    CostModel,
    LinearCost,
    QuadraticCost,
    ShardedState,
    TransformerCost,
    TransformerShape,
    fit_cost,
    preset,
    preset_names,
)
from odc.balance.data.sampler import MinibatchSampler
from odc.balance.grouping import (
    AlignedGroups,
    EqualMinibatches,
    EqualSteps,
    Grouping,
    LengthSketch,
    Unaligned,
    align_groups,
    best_fit_batches,
    pool_sort,
    sketch_lengths,
    token_budget_groups,
)
from odc.balance.multimodal import ItemLengths, MinibatchSchedule, Orchestrator, Phase, SampleLengths
from odc.balance.partition import ExactPartition, exact_partition, karmarkar_karp
from odc.balance.plan import Plan, PlannedMinibatch, bubble_rate
from odc.balance.policies import Policy, get_policy, policy_names
from odc.balance.rearrange.nodes import place_on_nodes
from odc.balance.rearrange.post_balance import post_balance
from odc.balance.rearrange.rearrangement import Rearrangement
from odc.balance.rearrange.rebalance import rebalance
from odc.balance.simulate import Machine, Scenario, Simulation, even_lengths, law_names, sample_lengths

if TYPE_CHECKING:
    from odc.balance.data.batch import BalancedBatch, balance_batch
    from odc.balance.data.collate import count_loss_tokens, pack_collate
    from odc.balance.data.from_torch import stream
    from odc.balance.data.loader import Minibatch, MinibatchLoader, loss_scale
    from odc.balance.data.order import Order
    from odc.balance.data.probe import check_packing
    from odc.balance.data.reader import ReadOptions
    from odc.balance.data.stream import StreamLoader
    from odc.balance.multimodal import Encoder, MultimodalLoader, SampleParts, run_minibatch
    from odc.balance.rearrange.exchange import Received, exchange

__all__ = [
    "ActivationMemory",
    "AlignedGroups",
    "BalancedBatch",
    "CostFit",
    "CostModel",
    "Encoder",
    "EqualMinibatches",
    "EqualSteps",
    "ExactPartition",
    "Grouping",
    "ItemLengths",
    "LengthSketch",
    "LinearCost",
    "Machine",
    "Minibatch",
    "MinibatchLoader",
    "MinibatchSampler",
    "MinibatchSchedule",
    "MultimodalLoader",
    "Orchestrator",
    "Order",
    "Phase",
    "Plan",
    "PlannedMinibatch",
    "Policy",
    "QuadraticCost",
    "ReadOptions",
    "Rearrangement",
    "Received",
    "SampleLengths",
    "SampleParts",
    "Scenario",
    "ShardedState",
    "Simulation",
    "StreamLoader",
    "TransformerCost",
    "TransformerShape",
    "Unaligned",
    "align_groups",
    "balance_batch",
    "best_fit_batches",
    "bubble_rate",
    "check_packing",
    "count_loss_tokens",
    "even_lengths",
    "exact_partition",
    "exchange",
    "fit_cost",
    "get_policy",
    "karmarkar_karp",
    "law_names",
    "loss_scale",
    "pack_collate",
    "place_on_nodes",
    "policy_names",
    "pool_sort",
    "post_balance",
    "preset",
    "preset_names",
    "rebalance",
    "run_minibatch",
    "sample_lengths",
    "sketch_lengths",
    "stream",
    "token_budget_groups",
]

_NEED_TORCH = {
    "BalancedBatch": "odc.balance.data.batch",
    "balance_batch": "odc.balance.data.batch",
    "Minibatch": "odc.balance.data.loader",
    "MinibatchLoader": "odc.balance.data.loader",
    "Encoder": "odc.balance.multimodal",
    "MultimodalLoader": "odc.balance.multimodal",
    "Received": "odc.balance.rearrange.exchange",
    "SampleParts": "odc.balance.multimodal",
    "check_packing": "odc.balance.data.probe",
    "Order": "odc.balance.data.order",
    "ReadOptions": "odc.balance.data.reader",
    "count_loss_tokens": "odc.balance.data.collate",
    "exchange": "odc.balance.rearrange.exchange",
    "StreamLoader": "odc.balance.data.stream",
    "run_minibatch": "odc.balance.multimodal",
    "loss_scale": "odc.balance.data.loader",
    "stream": "odc.balance.data.from_torch",
    "pack_collate": "odc.balance.data.collate",
}

__getattr__, __dir__ = lazy(__name__, _NEED_TORCH, __all__)
