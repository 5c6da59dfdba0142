"""FLOPs of a transformer, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray
from odc.balance.costs.models import check_coefficients


@dataclass(frozen=True)
class TransformerCost:
    """FLOPs of the matrix products of one forward and backward of a decoder-only transformer.

    ``flops_per_token * s + flops_per_squared_token * s**2``. The backward counts as two forwards. Not
    counted: activation recomputation, normalization, activation functions, softmax, the embedding lookup.
    """

    flops_per_token: float
    flops_per_squared_token: float

    def __post_init__(self) -> None:
        check_coefficients(flops_per_token=self.flops_per_token, flops_per_squared_token=self.flops_per_squared_token)

    def __call__(self, lengths: npt.ArrayLike, /) -> FloatArray:
        tokens = np.asarray(lengths, dtype=np.float64)
        return (self.flops_per_squared_token * tokens + self.flops_per_token) * tokens

    @classmethod
    def from_config(cls, config: object, *, gated_mlp: bool = True) -> TransformerCost:
        """Read the sizes from ``config``: a mapping or an object (a ``transformers`` config fits).

        Needed: ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``intermediate_size``,
        ``vocab_size``. Optional: ``num_key_value_heads`` (default: as many as attention heads) and
        ``head_dim`` (default: hidden_size / num_attention_heads). ``gated_mlp``: three matrices in the MLP
        (Llama, Qwen), else two.

        Raises:
            ValueError: a size is missing, not a positive integer, or the heads do not divide evenly.
        """
        hidden = _size(config, "hidden_size")
        num_layers = _size(config, "num_hidden_layers")
        num_heads = _size(config, "num_attention_heads")
        num_kv_heads = _size(config, "num_key_value_heads", default=num_heads)
        head_dim = _size(config, "head_dim", default=_default_head_dim(config, hidden, num_heads))
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is not a multiple of num_key_value_heads={num_kv_heads}")
        attention = 2 * hidden * head_dim * (num_heads + num_kv_heads)  # q and o, k and v
        mlp = (3 if gated_mlp else 2) * hidden * _size(config, "intermediate_size")
        weights = num_layers * (attention + mlp) + hidden * _size(config, "vocab_size")
        # Two FLOPs per multiply-add, three passes (the backward is two). Scores and their product with the
        # values are two products of s * s * num_heads * head_dim, of which a causal mask needs half.
        return cls(
            flops_per_token=6.0 * weights,
            flops_per_squared_token=6.0 * num_layers * num_heads * head_dim,
        )


def _size(config: object, name: str, default: int | None = None) -> int:
    value = _read(config, name)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"the config has no {name}: TransformerCost needs it")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"{name}={value!r} in the config: expected a positive integer")
    return int(value)


def _default_head_dim(config: object, hidden: int, num_heads: int) -> int:
    if _read(config, "head_dim") is None and hidden % num_heads:
        raise ValueError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}: put head_dim into the config"
        )
    return max(1, hidden // num_heads)


def _read(config: object, name: str) -> object:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
