"""Layer 1: no processes. FLOPs and attended pairs, against torch's counter on models of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from odc.balance.costs import TransformerCost, TransformerShape

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TOKENS = 24
WINDOW = 7
MODELS = [
    ("qwen2", {}),
    ("llama", {"head_dim": 16}),
    ("mistral", {"sliding_window": WINDOW}),
    ("qwen3", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    ("gpt_oss", {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
]


def build(model_type: str, options: dict[str, Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**TINY, **options)
    # Eager: attention is two matrix products, and every expert runs on the tokens that visit it.
    config._attn_implementation = config._experts_implementation = "eager"
    return config, AutoModelForCausalLM.from_config(config)


def count(model: Any) -> tuple[int, int]:
    """FLOPs of one forward and backward: of products with weights, and of attention."""
    tokens = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    flops = {str(name): value for name, value in counter.get_flop_counts()["Global"].items()}
    attention = flops.pop("aten.bmm")
    assert set(flops) <= {"aten.mm", "aten.addmm"}
    return sum(flops.values()), attention


@pytest.mark.parametrize(("model_type", "options"), MODELS)
def test_flops_are_those_of_the_counter(model_type: str, options: dict[str, Any]) -> None:
    config, model = build(model_type, options)
    weights, attention = count(model)
    cost = TransformerCost.from_config(config)
    assert cost.flops_per_token * TOKENS == weights
    # The counter does not know masks: it counts all pairs.
    per_pair = sum(group.num_layers * group.flops_per_pair for group in cost.groups)
    assert per_pair * TOKENS**2 == attention


def test_recomputation_adds_a_forward_of_the_layers() -> None:
    config, model = build("qwen2", {})
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.train()
    weights, attention = count(model)
    cost = TransformerCost.from_config(config, recompute=True)
    assert cost.flops_per_token * TOKENS == weights
    assert 2 * cost.flops_per_squared_token * TOKENS**2 == attention


@pytest.mark.parametrize("tokens", [3, WINDOW, WINDOW + 1, TOKENS])
@pytest.mark.parametrize("model_type", ["mistral", "gpt_oss", "qwen2"])
def test_pairs_are_those_that_the_model_attends_to(model_type: str, tokens: int) -> None:
    options = {"gpt_oss": {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}}.get(model_type, {})
    window = {} if model_type == "qwen2" else {"sliding_window": WINDOW}
    config, model = build(model_type, {**options, **window})
    layers = TransformerShape.from_config(config).layers
    groups = {group.window: group for group in TransformerCost.from_config(config).groups if group.flops_per_pair}
    output = model(input_ids=torch.arange(tokens)[None], output_attentions=True, use_cache=False)
    for layer, weights in zip(layers, output.attentions, strict=True):
        attended = int((weights[0, 0] > 0).sum())
        # The cost is the integral; the sum over tokens is half a token larger for each that has no full window.
        half_tokens = min(tokens, layer.window or tokens) / 2
        assert float(groups[layer.window].pairs(torch.tensor(float(tokens)).numpy())) + half_tokens == attended
