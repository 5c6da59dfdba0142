"""Attention over packed samples: each attends to itself only, and costs its own length squared.

A packed microbatch is one sequence of T tokens that holds several samples one after the other. A dense mask would
keep them apart too, but would compute all T x T scores. With each of the three functions here the cost is about the sum
of s_i^2, which the balancer counts on: each sample through ``scaled_dot_product_attention`` by itself, variable-length
flash attention, or ``flex_attention``, which leaves out the blocks between samples.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface
from transformers.utils import is_flash_attn_2_available

BLOCK = 128
"""Of flex_attention: queries, and keys."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, list[int], float | None, float], torch.Tensor]
"""Query, key and value of a packed sequence, lengths of its samples, scaling, dropout: (1, T, num_heads, head_dim)."""


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and query.dtype == torch.float32:
        # Of the kernels that do not form all scores, the one for float32 knows no groups.
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        grouped = False
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling, is_causal=True, enable_gqa=grouped)
        for q, k, v in zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """One launch for all samples. GPUs and 16-bit types only.

    Of the package flash-attn where it is installed, else torch's own (2.12 and newer), which has no dropout.
    """
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(query.device, non_blocking=True)
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (T, heads, head_dim)
    bounds = (starts, starts, max(lengths), max(lengths))
    if is_flash_attn_2_available():
        from flash_attn import flash_attn_varlen_func

        exact = torch.are_deterministic_algorithms_enabled()
        options = {"dropout_p": dropout, "softmax_scale": scaling, "causal": True, "deterministic": exact}
        out = flash_attn_varlen_func(*rows, *bounds, **options)
    else:
        from torch.nn.attention.varlen import varlen_attn

        if dropout:
            raise ValueError(f"dropout={dropout}: torch's varlen_attn has none; install flash-attn, or take sdpa")
        grouped = query.shape[1] != key.shape[1]
        # No token to the right: causal.
        out = varlen_attn(*rows, *bounds, scale=scaling, window_size=(-1, 0), enable_gqa=grouped)
    return out[None]


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """By flex_attention: compiled on GPUs; elsewhere slow, with all scores. No dropout."""
    if dropout:
        raise ValueError(f"dropout={dropout}: flex_attention has none; take sdpa")
    mask = _block_mask(tuple(lengths), query.device)
    attend = _compiled_flex() if query.is_cuda else flex_attention
    out = attend(query, key, value, block_mask=mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2).contiguous()


@functools.lru_cache(maxsize=2)  # the layers of a microbatch share it
def _block_mask(lengths: tuple[int, ...], device: torch.device) -> BlockMask:
    """As ``create_block_mask`` makes it, which forms all T x T places to find the blocks with some."""
    num_tokens = sum(lengths)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    starts = torch.arange(0, num_tokens, BLOCK)
    first, last = owner[starts], owner[(starts + BLOCK - 1).clamp(max=num_tokens - 1)]  # sample of each block
    earlier = starts[:, None] > starts
    some = (earlier | (starts[:, None] == starts)) & (first[:, None] <= last)
    # Those at the end are not full: some places lie behind it.
    whole = earlier & (first == last[:, None]) & (starts[:, None] + BLOCK <= num_tokens)
    of_device = owner.to(device)

    def same_sample(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (of_device[query] == of_device[key])

    def blocks(which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """How many of each row, and which of them, these first."""
        order = which.int().argsort(dim=-1, descending=True, stable=True)
        return which.sum(-1, dtype=torch.int32)[None, None].to(device), order.int()[None, None].to(device)

    return BlockMask.from_kv_blocks(
        *blocks(some & ~whole),
        *blocks(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=same_sample,
        seq_lengths=(num_tokens, num_tokens),
    )


@functools.cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=True)


def packed(attend: Attend) -> Callable[..., tuple[torch.Tensor, None]]:
    """Causal attention within each sample of a packed sequence, as transformers calls it."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        dropout: float = 0.0,
        cu_seqlens: torch.Tensor | list[int] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend to one's own sample.

        Args:
            query: (1, num_heads, T, head_dim).
            key, value: (1, num_kv_heads, T, head_dim); num_heads is a multiple of num_kv_heads.
            attention_mask: must be None: ``cu_seqlens`` says it all.
            scaling: of the scores; default 1 / sqrt(head_dim).
            cu_seqlens: (num_samples + 1,) integers, ascending from 0 to T; without it all T tokens are one
                sample. Its values decide what is launched. Give a list on GPUs: FSDP moves each tensor that a model is
                given there, and every layer would wait to have it back.

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
            raise ValueError("packed attention takes cu_seqlens, not an attention_mask")
        bounds = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens or [0, num_tokens]
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        if bounds[0] != 0 or bounds[-1] != num_tokens or min(lengths) < 1:
            raise ValueError(f"cu_seqlens={bounds}: expected to ascend from 0 to {num_tokens}")
        return attend(query, key, value, lengths, scaling, dropout), None

    return attention


FUNCTIONS = {"sdpa": packed(_sdpa), "flash": packed(_flash), "flex": packed(_flex)}


def register(name: str = "sdpa", dtype: torch.dtype = torch.float32) -> str:
    """Make one of them known to transformers; returns the name to pass as ``attn_implementation``.

    transformers builds no attention mask for an implementation it has no mask function for; we need none.

    Args:
        name: of :data:`FUNCTIONS`, or "auto": flash where there is a GPU with flash-attn, and ``dtype`` is of 16 bits;
            else sdpa.
        dtype: that of compute.
    """
    if name == "auto":
        name = "flash" if dtype.itemsize == 2 and is_flash_attn_2_available() else "sdpa"
    known_as = f"packed_{name}".replace("flash", "varlen")  # transformers takes what is called flash for one of its own
    AttentionInterface.register(known_as, FUNCTIONS[name])
    return known_as
