"""Layer 1: no processes. Shapes read from configurations: against the models and configs of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from odc.balance.costs import TransformerShape, preset, preset_names
from odc.balance.costs.mlps import DenseMlp, MoeMlp
from odc.balance.costs.shapes import AttentionShape, LayerShape

TINY: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "vocab_size": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 10}
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
# Each once with what its family can vary.
MODELS = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10}),
    ("mistral", {"sliding_window": 8}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("phi3", {}),
    ("qwen2", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen2_moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 14}),
    ("qwen2_moe", {**QWEN_EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2, "qkv_bias": False}),
    ("qwen3", {"head_dim": 8}),
    ("qwen3", {"head_dim": 8, "attention_bias": True}),
    ("qwen3_moe", {**QWEN_EXPERTS, "head_dim": 8, "mlp_only_layers": [3]}),
    ("olmo2", {}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("gemma", {"head_dim": 8}),
    ("gemma2", {"head_dim": 8}),
    ("gemma3_text", {"head_dim": 8}),
    ("gpt_oss", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
    ("glm4_moe", DEEPSEEK_EXPERTS),
    ("glm4_moe", {**DEEPSEEK_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
    ("dots1", DEEPSEEK_EXPERTS),
]


@pytest.mark.parametrize(("model_type", "options"), MODELS)
def test_parameters_are_those_of_the_model(model_type: str, options: dict[str, Any]) -> None:
    config = CONFIG_MAPPING[model_type](**TINY, **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]
    total = sum(p.numel() for p in model.parameters())
    as_mapping = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    for given in (config, config.to_dict(), as_mapping):
        shape = TransformerShape.from_config(given)
        assert list(shape.layer_parameters) == layers
        assert shape.num_parameters == total
        assert shape.root_parameters == total - sum(layers)


def test_active_parameters_leave_out_the_other_experts() -> None:
    shape = TransformerShape.from_config({**TINY, "num_local_experts": 4, "num_experts_per_tok": 3})
    one_expert = 3 * 24 * 20
    assert shape.num_parameters - shape.num_active_parameters == 4 * (4 - 3) * one_expert
    dense = TransformerShape.from_config(TINY)
    assert dense.num_active_parameters == dense.num_parameters


SLIDING = {"sliding_window": 8, "use_sliding_window": True}
WINDOWED = [
    ("qwen2", {**SLIDING, "max_window_layers": 3}, [None, None, None, 8]),
    ("qwen2", {**SLIDING, "max_window_layers": 3, "use_sliding_window": False}, [None] * 4),
    ("qwen2", {"sliding_window": 8}, [None] * 4),
    ("qwen3", {**SLIDING, "max_window_layers": 1}, [None, 8, 8, 8]),
    ("qwen2_moe", {**QWEN_EXPERTS, **SLIDING, "max_window_layers": 2}, [8, None, None, None]),
    ("gemma2", {"sliding_window": 8}, [8, None, 8, None]),
    ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}, [8, 8, 8, 8, 8, None, 8]),
    ("gpt_oss", {"sliding_window": 8}, [8, None, 8, None]),
    ("dots1", {**DEEPSEEK_EXPERTS, "sliding_window": 8, "max_window_layers": 2}, [None, None, 8, 8]),
]


@pytest.mark.parametrize(("model_type", "options", "windows"), WINDOWED)
def test_windows_agree_with_layer_types(model_type: str, options: dict[str, Any], windows: list[int | None]) -> None:
    """The configs of transformers work out layer_types; a config.json without them must give the same."""
    config = CONFIG_MAPPING[model_type](**{**TINY, **options})
    has_window = [kind == "sliding_attention" for kind in config.layer_types]
    assert [window is not None for window in windows] == has_window
    for given in (config, {**TINY, **options, "model_type": model_type}):
        assert [layer.window for layer in TransformerShape.from_config(given).layers] == windows


TYPES = ["full_attention", "sliding_attention", "attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, [8] * 4),
        ({"model_type": "mixtral", "sliding_window": None}, [None] * 4),
        ({"model_type": "llama", "sliding_window": 8}, [None] * 4),
        ({"model_type": "qwen3_moe", **SLIDING, "max_window_layers": 2}, [8] * 4),
        ({"sliding_window": 8}, [8] * 4),
        ({"sliding_window": 8, "use_sliding_window": False}, [None] * 4),
        ({"sliding_window": 8, "max_window_layers": 3}, [None, None, None, 8]),
        ({"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None]),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": TYPES}, [None, 8, None, 8]),
    ],
)
def test_windows_without_layer_types(options: dict[str, object], windows: list[int | None]) -> None:
    assert [layer.window for layer in TransformerShape.from_config({**TINY, **options}).layers] == windows


@pytest.mark.parametrize(
    ("options", "experts"),
    [
        ({}, [True] * 4),
        ({"first_k_dense_replace": 2}, [False, False, True, True]),
        ({"moe_layer_freq": 2}, [True, False, True, False]),
        ({"moe_layer_freq": [0, 1, 1, 0]}, [False, True, True, False]),
        ({"mlp_layer_types": ["dense", "sparse", "sparse", "dense"]}, [False, True, True, False]),
        ({"n_routed_experts": None}, [False] * 4),
    ],
)
def test_where_experts_are(options: dict[str, object], experts: list[bool]) -> None:
    shape = TransformerShape.from_config({**TINY, **DEEPSEEK_EXPERTS, "first_k_dense_replace": 0, **options})
    assert [isinstance(layer.mlp, MoeMlp) for layer in shape.layers] == experts


def test_what_experts_are() -> None:
    dense, sparse, *_ = TransformerShape.from_config({**TINY, **DEEPSEEK_EXPERTS}).layers
    assert (dense.mlp, sparse.mlp) == (DenseMlp(20), MoeMlp(6, 2, DenseMlp(10), shared=DenseMlp(20)))


def test_forms_of_a_config(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["qwen2"](**TINY)
    config.save_pretrained(tmp_path)
    shape = TransformerShape.from_config(config)
    assert TransformerShape.from_config(tmp_path) == shape
    assert TransformerShape.from_config(str(tmp_path / "config.json")) == shape
    assert TransformerShape.from_config(SimpleNamespace(**config.to_dict())) == shape
    assert TransformerShape.from_config(shape) is shape


def test_text_part_of_a_multimodal_config() -> None:
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=TINY, tie_word_embeddings=True)
    text = TransformerShape.from_config({**TINY, "model_type": "qwen2", "tie_word_embeddings": True})
    assert TransformerShape.from_config(config) == text
    assert TransformerShape.from_config(config.to_dict()) == text


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("deepseek_v3", "kv_lora_rank=512: multi-head latent attention"),
        ("qwen3_next", "linear attention"),
        ("jamba", "Mamba"),
        ("llama4_text", "chunked attention"),
        ("t5", "an encoder and a decoder"),
    ],
)
def test_models_of_other_kinds_are_refused(model_type: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"{reason}.*fit_cost"):
        TransformerShape.from_config(CONFIG_MAPPING[model_type]())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types of the config has linear_attention"),
        ({"layer_types": ["full_attention"] * 3}, "one entry per layer, 4"),
        ({"layer_types": ["sliding_attention"] * 4}, "no sliding_window"),
        ({"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_token=5: expected at most num_experts=4"),
        ({"num_local_experts": 4}, "no num_experts_per_tok or"),
        ({"num_local_experts": -1, "num_experts_per_tok": 1}, "num_local_experts=-1"),
        ({"mlp_only_layers": 3, "num_experts": 4, "num_experts_per_tok": 1}, "mlp_only_layers=3"),
        ({"use_sliding_window": "yes"}, "use_sliding_window='yes'"),
        ({"hidden_size": None}, "no hidden_size.*AutoConfig"),
    ],
)
def test_bad_configs(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerShape.from_config({**TINY, **change})


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file.*nowhere"):
        TransformerShape.from_config(tmp_path / "nowhere")
    for text, message in [("{", "not JSON"), ("[1]", "holds a list")]:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            TransformerShape.from_config(tmp_path)


def test_a_config_that_cannot_be_read() -> None:
    class Broken(SimpleNamespace):
        @property
        def head_dim(self) -> int:
            raise RuntimeError("differs from layer to layer")

    with pytest.raises(ValueError, match="head_dim cannot be read: differs"):
        TransformerShape.from_config(Broken(**TINY))


ATTENTION = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformerShape(24, 40, ATTENTION, ()), "layers is empty"),
        (lambda: LayerShape(DenseMlp(20), window=0), "window=0"),
        (lambda: TransformerShape(0, 40, ATTENTION, (LayerShape(DenseMlp(20)),)), "hidden_size=0"),
        (lambda: TransformerShape.from_config("qwen2.5-8b"), r"'qwen2.5-8b'; close: .*qwen2.5-7b"),
        (lambda: preset("#"), "close: qwen2.5-0.5b.*mixtral-8x7b"),
    ],
)
def test_shapes_built_by_hand_and_presets_are_checked(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Billions of parameters: the models' own pages on the Hugging Face Hub, as precise as they say.
PUBLISHED = {
    "qwen2.5-0.5b": 0.494,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.62,
    "qwen2.5-14b": 14.77,
    "qwen2.5-32b": 32.76,
    "qwen2.5-72b": 72.71,
    "deepseek-r1-distill-qwen-1.5b": 1.78,
    "deepseek-r1-distill-qwen-7b": 7.62,
    "deepseek-r1-distill-qwen-14b": 14.77,
    "deepseek-r1-distill-qwen-32b": 32.76,
    "qwen3-0.6b": 0.596,
    "qwen3-1.7b": 1.72,
    "qwen3-4b": 4.02,
    "qwen3-8b": 8.19,
    "qwen3-14b": 14.77,
    "qwen3-32b": 32.76,
    "qwen3-30b-a3b": 30.53,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.55,
    "llama-3.2-1b": 1.236,
    "llama-3.2-3b": 3.213,
    "mistral-7b": 7.242,
    "mixtral-8x7b": 46.70,
}


def test_presets_have_their_published_sizes() -> None:
    assert set(preset_names()) == set(PUBLISHED)
    for name, billions in PUBLISHED.items():
        assert TransformerShape.from_config(name).num_parameters / 1e9 == pytest.approx(billions, rel=4e-3), name
    # Qwen says 3.3 billion, Mistral 12.9.
    assert TransformerShape.from_config("qwen3-30b-a3b").num_active_parameters / 1e9 == pytest.approx(3.3, abs=0.06)
    assert TransformerShape.from_config("Mixtral-8x7B").num_active_parameters / 1e9 == pytest.approx(12.9, abs=0.06)
    assert {layer.window for layer in TransformerShape.from_config("mistral-7b").layers} == {4096}


def test_presets_are_copies_and_json() -> None:
    preset("qwen2.5-7b").clear()
    assert json.loads(json.dumps(preset("qwen2.5-7b")))["hidden_size"] == 3584
