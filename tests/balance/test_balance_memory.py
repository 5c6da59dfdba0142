"""Layer 1: no processes. Bytes of activations and state, against what models of transformers keep and hold."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from odc.balance.costs import ActivationMemory, ShardedState, TransformerShape

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
# The largest relative error: the estimate leaves out the indices of experts' tokens.
DENSE, SPARSE = 0.001, 0.03
MODELS = [
    ("qwen2", {}, DENSE),
    ("llama", {"head_dim": 32}, DENSE),
    ("qwen2", {"vocab_size": 4096}, DENSE),
    ("qwen3", {"head_dim": 32}, DENSE),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, SPARSE),
    ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 80}, SPARSE),
    ("qwen3_moe", EXPERTS, SPARSE),
]
DTYPES = [(torch.float32, 4), (torch.bfloat16, 2)]
TOKENS = 512


def build(model_type: str, options: dict[str, Any], dtype: torch.dtype) -> tuple[Any, Any]:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**{**TINY, **options})
    config._attn_implementation = "sdpa"
    return config, AutoModelForCausalLM.from_config(config).to(dtype)


def loss_of(model: Any) -> torch.Tensor:
    tokens = torch.arange(TOKENS)[None] % TINY["vocab_size"]
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def kept_bytes(model: Any) -> int:
    """Bytes of the distinct storages that autograd keeps after a forward, without parameters."""
    ignored = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        # Holding the tensor keeps its address from being used again.
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in ignored)


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of all storages that live at once, of those made while it is on."""

    def __init__(self, ignored: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._alive = dict.fromkeys((tensor.untyped_storage()._cdata for tensor in ignored), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._alive:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = storage.nbytes()
                self._now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self._now)
        return result

    def _free(self, storage: int) -> None:
        self._now -= self._alive.pop(storage)


def peak_bytes(model: Any) -> int:
    """Most bytes at once of a forward and backward, without parameters and their gradients."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    state = [tensor for parameter in model.parameters() for tensor in (parameter, parameter.grad)]
    with PeakBytes(state) as counter:
        loss_of(model).backward()
    return counter.peak


@pytest.mark.parametrize(("dtype", "dtype_bytes"), DTYPES)
@pytest.mark.parametrize(("model_type", "options", "tolerance"), MODELS)
def test_kept_bytes(
    model_type: str, options: dict[str, Any], tolerance: float, dtype: torch.dtype, dtype_bytes: int
) -> None:
    config, model = build(model_type, options, dtype)
    memory = ActivationMemory.from_config(config, dtype_bytes=dtype_bytes)
    assert TOKENS * memory.kept_bytes_per_token == pytest.approx(kept_bytes(model), rel=tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(("dtype", "dtype_bytes"), DTYPES)
@pytest.mark.parametrize(("model_type", "options", "_"), [MODELS[0], MODELS[2], MODELS[6]])
def test_peak_bytes(
    model_type: str, options: dict[str, Any], _: float, dtype: torch.dtype, dtype_bytes: int, recompute: bool
) -> None:
    config, model = build(model_type, options, dtype)
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": True})
        model.train()
    memory = ActivationMemory.from_config(config, dtype_bytes=dtype_bytes, recompute=recompute)
    assert memory.bytes(TOKENS) == pytest.approx(peak_bytes(model), rel=SPARSE)


def test_recomputation_keeps_the_inputs_of_layers() -> None:
    shallow, deep = (
        ActivationMemory.from_config({**TINY, "num_hidden_layers": layers}, recompute=True) for layers in (1, 5)
    )
    assert deep.kept_bytes_per_token - shallow.kept_bytes_per_token == 4 * 64 * 2


def test_chunked_logits_are_a_fixed_cost() -> None:
    wide = {**TINY, "vocab_size": 50_000}
    full = ActivationMemory.from_config(wide)
    chunked = ActivationMemory.from_config(wide, logits="chunked", chunk_tokens=100)
    assert full.fixed_bytes == 0
    assert full.kept_bytes_per_token - chunked.kept_bytes_per_token == 4 * 50_000
    assert full.bytes(100) <= chunked.bytes(100) < full.bytes(200)
    assert chunked.bytes(1000) < full.bytes(1000) / 3


@pytest.mark.parametrize("logits", ["full", "chunked"])
def test_max_tokens_is_the_largest_that_fits(logits: Any) -> None:
    memory = ActivationMemory.from_config("qwen2.5-1.5b", logits=logits)
    for budget in (memory.bytes(1), memory.bytes(777) - 1, 20 * 10**9):
        tokens = memory.max_tokens(budget)
        assert memory.bytes(tokens) <= budget < memory.bytes(tokens + 1)
    with pytest.raises(ValueError, match=f"expected at least {memory.bytes(1)}"):
        memory.max_tokens(memory.bytes(1) - 1)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (ActivationMemory, {"dtype_bytes": 0}, "dtype_bytes=0"),
        (ActivationMemory, {"logits": "none"}, "logits='none'"),
        (ActivationMemory, {"chunk_tokens": 0}, "chunk_to"),
        (ShardedState, {"world_size": 0}, "world_size=0"),
    ],
)
def test_bad_options(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind.from_config(TINY, **options)


def test_sharded_state_counts_the_tensors_of_fsdp() -> None:
    config, model = build("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, torch.float32)
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
    root = total - sum(layers)
    state = ShardedState.from_config(config, world_size=8)
    assert state.sharded_bytes == pytest.approx(16 * total / 8, abs=16)
    gathered, gradients = 2 * (root + 2 * layers[0]), 2 * (root + layers[0])
    assert state.unsharded_bytes == gathered + gradients + 4 * layers[0]
    assert state.whole_bytes == (2 + 4) * total + 2 * layers[0]
    assert state.bytes == state.sharded_bytes + state.unsharded_bytes


def test_sharded_state_takes_the_largest_layers() -> None:
    config = {**TINY, **EXPERTS, "mlp_only_layers": [0, 2]}
    dense, sparse, _ = TransformerShape.from_config(config).layer_parameters
    assert dense < sparse
    one = ShardedState.from_config(config, 4, gathered_layers=1)
    two = ShardedState.from_config(config, 4, gathered_layers=2)
    assert two.unsharded_bytes - one.unsharded_bytes == 2 * dense
    more_ranks = ShardedState.from_config(config, 8)
    assert more_ranks.unsharded_bytes == two.unsharded_bytes
    assert more_ranks.sharded_bytes == pytest.approx(two.sharded_bytes / 2, abs=16)
