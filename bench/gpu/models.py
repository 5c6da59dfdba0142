"""Small models for the checks, sharded by either FSDP."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

from odc.bench.proof.conformance.training import Net

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


def blocks_of(model: nn.Module) -> Iterable[tuple[nn.ModuleList, int]]:
    """The layers that become units, as (list, index): FSDP1 replaces them."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for index in range(len(module)):
                yield module, index


def shard(model: nn.Module, fsdp: str, precision: str, device: torch.device, world_size: int) -> nn.Module:
    """The model on ``device``, one unit per layer and one for the rest. Collective."""
    model = model.to(device)
    blocks = list(blocks_of(model))
    if fsdp == "fsdp1":
        options: dict[str, Any] = {"device_id": device, "use_orig_params": True}
        if precision == "bf16":
            options["mixed_precision"] = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
        for modules, index in blocks:
            modules[index] = FullyShardedDataParallel(modules[index], **options)
        return FullyShardedDataParallel(model, **options)
    options = {"mesh": init_device_mesh(device.type, (world_size,))}
    if precision == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for modules, index in blocks:
        fully_shard(modules[index], **options)
    fully_shard(model, **options)
    return model
