"""Small models for the checks, sharded by either FSDP."""

from __future__ import annotations

import importlib.util

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc.bench.proof.conformance.training import Net
from odc.bench.proof.sharding import by_unit, wrap_of

VOCABULARY = 17  # that of Net
PRECISIONS = ("fp32", "bf16")
FSDPS = ("fsdp2", "fsdp1")


class Perceptron(nn.Module):
    """Linear layers only: nothing in it makes a host wait for its device."""

    def __init__(self, width: int = 128, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def language_model() -> nn.Module:
    """The same weights in every process: a tiny Qwen2 if transformers is installed, else a small transformer."""
    torch.manual_seed(0)
    return _qwen2() if importlib.util.find_spec("transformers") else Net()


def _qwen2() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=136,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model: nn.Module = Qwen2ForCausalLM(config)
    return model


def logits_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of whichever of the two models it is."""
    out = model(tokens)
    logits: torch.Tensor = out if isinstance(out, torch.Tensor) else out.logits
    return logits


def shard(model: nn.Module, fsdp: str, precision: str, device: torch.device, world_size: int) -> nn.Module:
    """The model on ``device``, one unit per layer and one for the rest. Collective."""
    mesh = init_device_mesh(device.type, (world_size,))
    dtypes = (torch.bfloat16, torch.float32) if precision == "bf16" else None
    kind = "fsdp1-orig" if fsdp == "fsdp1" else fsdp
    return by_unit(model.to(device), wrap_of(kind, mesh, dtypes=dtypes, device=device))
