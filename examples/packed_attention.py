"""Attention over packed samples: each attends to itself only, and costs its own length squared.

A packed microbatch is one sequence of T tokens that holds several samples one after the other. A mask would
keep them apart too, but would compute all T x T scores. Here each sample goes through
``scaled_dot_product_attention`` by itself, so the cost is the sum of s_i^2, which the balancer counts on.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface

NAME = "packed_sdpa"


def packed_sdpa(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a packed sequence.

    Args:
        query: (1, num_heads, T, head_dim).
        key, value: (1, num_kv_heads, T, head_dim); num_heads is a multiple of num_kv_heads.
        attention_mask: must be None: ``cu_seqlens`` says it all.
        scaling: of the scores; default 1 / sqrt(head_dim).
        cu_seqlens: (num_samples + 1,) integers, ascending from 0 to T; without it all T tokens are one
            sample. Keep it on the CPU: its values decide what is launched.

    Returns:
        (1, T, num_heads, head_dim), and None for the attention weights, which are never formed.

    Raises:
        ValueError: more than one sequence, a mask, or a ``cu_seqlens`` that does not cover the sequence.
    """
    num_tokens = query.shape[2]
    if query.shape[0] != 1 or key.shape[2] != num_tokens:
        raise ValueError(
            f"query {tuple(query.shape)}, key {tuple(key.shape)}: expected one packed sequence and no cache"
        )
    if attention_mask is not None:
        raise ValueError("packed_sdpa takes cu_seqlens, not an attention_mask")
    bounds = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != num_tokens or min(lengths) < 1:
        raise ValueError(f"cu_seqlens={bounds}: expected to ascend from 0 to {num_tokens}")
    outputs = [
        F.scaled_dot_product_attention(
            q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def register() -> str:
    """Make it known to transformers; returns the name to pass as ``attn_implementation``.

    transformers builds no attention mask for an implementation it has no mask function for; we need none.
    """
    AttentionInterface.register(NAME, packed_sdpa)
    return NAME
