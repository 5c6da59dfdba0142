"""Published configurations of models, by name: what their ``config.json`` says about their sizes.

Source: the ``config.json`` of each model on the Hugging Face Hub, only the fields that costs depend on. The
DeepSeek-R1-Distill-Qwen models are the ones the paper trains (section 5).
"""

from __future__ import annotations

import difflib

from odc.errors import shown

Fields = dict[str, object]

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
)

# name: sizes in the order of _SIZES, and whether the head shares the embedding's weights.
_QWEN2 = {
    "qwen2.5-0.5b": ((896, 24, 14, 2, 4864, 151936), True),
    "qwen2.5-1.5b": ((1536, 28, 12, 2, 8960, 151936), True),
    "qwen2.5-3b": ((2048, 36, 16, 2, 11008, 151936), True),
    "qwen2.5-7b": ((3584, 28, 28, 4, 18944, 152064), False),
    "qwen2.5-14b": ((5120, 48, 40, 8, 13824, 152064), False),
    "qwen2.5-32b": ((5120, 64, 40, 8, 27648, 152064), False),
    "qwen2.5-72b": ((8192, 80, 64, 8, 29568, 152064), False),
    "deepseek-r1-distill-qwen-1.5b": ((1536, 28, 12, 2, 8960, 151936), False),
    "deepseek-r1-distill-qwen-7b": ((3584, 28, 28, 4, 18944, 152064), False),
    "deepseek-r1-distill-qwen-14b": ((5120, 48, 40, 8, 13824, 152064), False),
    "deepseek-r1-distill-qwen-32b": ((5120, 64, 40, 8, 27648, 152064), False),
}
_QWEN3 = {
    "qwen3-0.6b": ((1024, 28, 16, 8, 3072, 151936), True),
    "qwen3-1.7b": ((2048, 28, 16, 8, 6144, 151936), True),
    "qwen3-4b": ((2560, 36, 32, 8, 9728, 151936), True),
    "qwen3-8b": ((4096, 36, 32, 8, 12288, 151936), False),
    "qwen3-14b": ((5120, 40, 40, 8, 17408, 151936), False),
    "qwen3-32b": ((5120, 64, 64, 8, 25600, 151936), False),
}
_LLAMA = {
    "llama-3.1-8b": ((4096, 32, 32, 8, 14336, 128256), False),
    "llama-3.1-70b": ((8192, 80, 64, 8, 28672, 128256), False),
    "llama-3.2-1b": ((2048, 16, 32, 8, 8192, 128256), True),
    "llama-3.2-3b": ((3072, 28, 24, 8, 8192, 128256), True),
}
_MISTRAL_SIZES = (4096, 32, 32, 8, 14336, 32000)


def preset_names() -> tuple[str, ...]:
    """All names of configurations for :func:`preset`.

    Example:
        >>> "qwen2.5-7b" in preset_names()
        True
    """
    return tuple(_PRESETS)


def preset(name: str) -> Fields:
    """A copy of the configuration ``name`` (case is ignored), with the fields of ``config.json``.

    Raises:
        ValueError: there is no configuration of this name.

    Example:
        >>> preset("qwen2.5-7b")["hidden_size"]
        3584
    """
    found = _PRESETS.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        close = (
            difflib.get_close_matches(shown(name)[:100].lower().strip("'"), _PRESETS, n=3, cutoff=0.5) or preset_names()
        )
        raise ValueError(
            f"no model is called {shown(name)}; close: {', '.join(close)}. "
            "preset_names() lists all; any other model: give its config, or the path of its config.json"
        )
    return dict(found)


def _config(model_type: str, sizes: tuple[int, ...], tied: bool, **more: object) -> Fields:
    return {
        "model_type": model_type,
        **dict(zip(_SIZES, sizes, strict=True)),
        "tie_word_embeddings": tied,
        **more,
    }


def _all() -> dict[str, Fields]:
    configs = {name: _config("qwen2", sizes, tied, use_sliding_window=False) for name, (sizes, tied) in _QWEN2.items()}
    configs |= {
        name: _config("qwen3", sizes, tied, head_dim=128, attention_bias=False, use_sliding_window=False)
        for name, (sizes, tied) in _QWEN3.items()
    }
    configs |= {
        name: _config("llama", sizes, tied, attention_bias=False, mlp_bias=False)
        for name, (sizes, tied) in _LLAMA.items()
    }
    # v0.1: from v0.2 on, the models of this family have no window.
    configs["mistral-7b"] = _config("mistral", _MISTRAL_SIZES, False, sliding_window=4096)
    configs["qwen3-30b-a3b"] = _config(
        "qwen3_moe",
        (2048, 48, 32, 4, 6144, 151936),
        False,
        head_dim=128,
        attention_bias=False,
        use_sliding_window=False,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )
    configs["mixtral-8x7b"] = _config(
        "mixtral", _MISTRAL_SIZES, False, sliding_window=None, num_local_experts=8, num_experts_per_tok=2
    )
    return configs


_PRESETS = _all()
