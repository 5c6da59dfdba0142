"""Layer 3: ranks as processes. A small Llama, parallelized by the calls that torchtitan makes, in its order: tensor and
sequence parallelism, activation checkpointing, each block compiled, FSDP2 with mixed precision; the loss is parallel,
too, and gradients are clipped by a norm that the script computes from what is in ``.grad``. Compiled by "eager", which
traces as any other; "aot_eager" of torch 2.13, which traces backward passes, too, fails for a block with tensor
parallelism and checkpointing, without ODC ("expected all tensors_saved_with_vc_check to be Tensors, got ...").
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from process_ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from training import largest_difference, use_up

import odc

DIM, HEADS, HIDDEN, VOCABULARY, TOKENS, NUM_LAYERS, STEPS = 16, 4, 24, 32, 8, 1, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (w(x).view(rows, tokens, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = (
            torch.cat([a * positions[0] - b * positions[1], a * positions[1] + b * positions[0]], -1)
            for a, b in (y.chunk(2, -1) for y in (q, k))
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(rows, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleDict({str(i): Layer() for i in range(NUM_LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        angles = torch.outer(torch.arange(TOKENS).float(), 0.1 ** torch.arange(DIM // HEADS // 2).float())
        self.register_buffer("positions", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x, self.positions)
        return self.output(self.norm(x))


@functools.cache
def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))


def parallelized(backend: str) -> Llama:
    torch.manual_seed(0)
    model, mesh = Llama(), make_mesh()
    parallelize_module(
        model,
        mesh["tp"],
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )
    for layer in model.layers.values():
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
                ),
                **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
                "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
    for name, layer in model.layers.named_children() if backend != "aot_eager" else ():
        model.layers.register_module(name, checkpoint_wrapper(layer, preserve_rng_state=False))
    for name, layer in model.layers.named_children() if backend else ():
        model.layers.register_module(name, torch.compile(layer, backend=backend, fullgraph=True))
    options: dict[str, Any] = {
        "mesh": mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32),
    }
    fully_shard(model.tok_embeddings, **options, reshard_after_forward=True)
    for layer in model.layers.values():
        fully_shard(layer, **options, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    return fully_shard(model, **options)


COUNTS = (1, 3)
"""Microbatches of each group of ranks that compute together."""


def train(model: Llama, group: int, num_microbatches: int) -> dict[str, Any]:
    """Losses, norms, and this rank's parameters. Microbatches beyond those of :data:`COUNTS` count nothing: plain FSDP2
    has to run as many everywhere."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = dict[str, Any]()
    for step in range(STEPS):
        for m in range(num_microbatches):
            generator = torch.Generator().manual_seed(100 * step + 10 * group + m)
            tokens = torch.randint(VOCABULARY, (2, TOKENS + 1), generator=generator)
            with loss_parallel():
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum") / 32
                (loss * (m < COUNTS[group])).backward()
            if m < COUNTS[group]:
                found[f"loss {step} {m}"] = loss.full_tensor() if isinstance(loss, DTensor) else loss
        parameters = list(model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        found[f"norm {step}"] = norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, norm)
        use_up(optimizer)
    found |= {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    return {name: value.detach().clone().numpy() for name, value in found.items()}


def difference(rank: int, world_size: int, backend: str) -> float:
    group = rank // 2
    theirs = train(parallelized(backend), group, max(COUNTS))
    model = parallelized(backend)
    with odc.patch_fsdp(model):
        ours = train(model, group, COUNTS[group])
    return largest_difference(ours, theirs)


@pytest.mark.parametrize(
    "backend", ["", *(pytest.param(name, marks=pytest.mark.extended) for name in ("eager", "aot_eager"))]
)
def test_a_llama_that_is_parallelized_as_by_torchtitan_trains_as_under_plain_fsdp2(backend: str) -> None:
    assert max(run_ranks(4, difference, backend, timeout_s=300)) < 1e-5
