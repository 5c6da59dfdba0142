"""Facts about families of models that their configurations do not contain: biases, norms, which layers have a window.

Source: the modeling and configuration files of transformers 5. A family that is not listed is read like Llama:
its matrices are right if its field names are, its norms and biases may not be. Those without a gated MLP are
listed for that only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WindowRule = Literal["guess", "none", "every", "upper", "lower_even", "pattern"]
QkNorm = Literal["none", "head", "full"]


@dataclass(frozen=True)
class Family:
    """How to read the configurations of one family. A string names the field that decides."""

    qkv_bias: bool | str = "attention_bias"
    """Queries, keys and values have biases."""

    output_bias: bool | str = "attention_bias"
    """The output projection of attention has a bias."""

    mlp_bias: bool | str = False
    """The MLP, or every expert and the router, has biases."""

    bias_default: bool = False
    """What a field says that is not there."""

    gated_mlp: bool = True
    """The MLP has three matrices; else two."""

    qk_norm: QkNorm = "none"
    """Queries and keys are normalized: each head by itself, or all heads together."""

    qk_norm_field: str = ""
    """The field that switches this on; empty: it is always on."""

    sinks: bool = False
    """Each head has a learned attention sink."""

    norms_per_layer: int = 2
    """Norms of ``hidden_size`` weights."""

    tied: bool = False
    """The head shares the embedding's weights if the configuration does not say."""

    head_dim: int | None = None
    """Size of a head if the configuration does not say; None: hidden_size / num_attention_heads."""

    shared_gate: bool = False
    """The shared expert's output is multiplied by a learned gate."""

    windows: WindowRule = "guess"
    """Which layers have the window if there are no layer_types: see ``windows.py``."""

    window_default: bool = True
    """Whether windows are used if there is no ``use_sliding_window``."""

    window_pattern: int = 1
    """For "pattern": every so manieth layer has none, if there is no ``sliding_window_pattern``."""


_QWEN2 = Family(qkv_bias=True, output_bias=False, windows="upper", window_default=False)
_QWEN3 = Family(qk_norm="head", head_dim=128, windows="upper", window_default=False)
_QWEN3_MOE = Family(qk_norm="head", windows="every", window_default=False)
_NO_BIAS = Family(qkv_bias=False, output_bias=False, windows="every")
_UNGATED = Family(gated_mlp=False)
_GEMMA2 = Family(norms_per_layer=4, tied=True, head_dim=256, windows="pattern", window_pattern=2)
_GEMMA3 = Family(norms_per_layer=4, tied=True, head_dim=256, qk_norm="head", windows="pattern", window_pattern=6)

FAMILIES = {
    "": Family(mlp_bias="mlp_bias"),
    "llama": Family(mlp_bias="mlp_bias", windows="none"),
    "mistral": _NO_BIAS,
    "mixtral": _NO_BIAS,
    "phi3": _NO_BIAS,
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen2_moe": Family(
        qkv_bias="qkv_bias",
        output_bias=False,
        bias_default=True,
        shared_gate=True,
        windows="lower_even",
        window_default=False,
    ),
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_vl_moe_text": _QWEN3_MOE,
    "olmo2": Family(qk_norm="full", windows="none"),
    "olmoe": Family(qk_norm="full", windows="none"),
    "gemma": Family(tied=True, head_dim=256, windows="none"),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(mlp_bias=True, bias_default=True, sinks=True, head_dim=64, windows="pattern", window_pattern=2),
    "glm4_moe": Family(output_bias=False, qk_norm="head", qk_norm_field="use_qk_norm", windows="none"),
    "dots1": Family(qk_norm="head", windows="upper"),
    "apertus": _UNGATED,
    "arcee": _UNGATED,
    "gpt_neox": _UNGATED,
    "nemotron": _UNGATED,
    "persimmon": _UNGATED,
    "phi": _UNGATED,
    "starcoder2": _UNGATED,
}


def family(model_type: str) -> Family:
    """The family called ``model_type``, or one like Llama."""
    return FAMILIES.get(model_type, FAMILIES[""])
