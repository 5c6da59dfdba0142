"""How many bytes a microbatch needs: activations on one rank, and the sharded state beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from odc.balance.checks import as_count, check_counts
from odc.balance.costs.mlps import DenseMlp, Mlp
from odc.balance.costs.shapes import TransformerShape
from odc.errors import shown

# Norms, router probabilities, softmaxes and losses are computed in float32 whatever the model's type.
_FP32 = 4
# A token's id and its label.
_IDS = 2 * 8


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes of the activations of one packed microbatch, with memory-efficient attention.

    Per token and layer, a layer of transformers 5 without fusion or compilation keeps (h: hidden size, q and k: widths
    of queries and keys, m: the MLP's intermediate size, d: bytes of the model's dtype):

    - each norm: its input in float32, its normalized input in d, 4 bytes of statistics; 2 norms of h per layer,
      and where queries and keys are normalized, norms of q + k with the statistics of each head;
    - the outputs of the norms before attention and before the MLP: 2 h d;
    - attention: queries and output 2 q d, keys and values 2 k d, 4 bytes of statistics per head;
    - a dense or shared MLP: gate, activated gate, up, product: 4 m d (ungated: 2 m d);
    - experts, for each that a token visits: its input and its output 2 h d, and an MLP; 4 bytes per expert of
      the router's probabilities.

    Per token once: sines and cosines of the positions, ids, the last norm and its output, and with
    ``logits="full"`` the logarithms of the probabilities in float32.

    With ``recompute=True`` a layer keeps its input only, h d.

    The peak comes at the start of the backward, with two float32 gradients of the logits; or, where the head is
    small or chunked, in a layer, with the gradients in its MLP, and all that it recomputed.

    Not counted: attention masks (padding makes SDPA keep one of s^2, so does a window, and keys and values
    repeated for every query head with it), dropout, what an allocator loses to fragmentation, indices of experts'
    tokens, and norms that differ from Llama's (Gemma).

    Example:
        >>> memory = ActivationMemory.from_config("qwen2.5-7b", recompute=True, logits="chunked")
        >>> f"{memory.bytes(32_768) / 1e9:.1f} GB"
        '18.8 GB'
        >>> memory.max_tokens(40 * 10**9)
        73791
    """

    kept_bytes_per_token: int
    """Bytes per token that autograd keeps from the forward to the backward."""

    transient_bytes_per_token: int
    """Further bytes per token at the peak."""

    fixed_bytes: int = 0
    """Bytes that do not depend on the number of tokens: the head's chunk."""

    def __post_init__(self) -> None:
        as_count(self.kept_bytes_per_token, "kept_bytes_per_token")
        check_counts(self, "transient_bytes_per_token", "fixed_bytes", minimum=0)

    @classmethod
    def from_config(
        cls,
        config: object,
        *,
        dtype_bytes: int = 2,
        recompute: bool = False,
        logits: Literal["full", "chunked"] = "full",
        chunk_tokens: int = 1024,
    ) -> ActivationMemory:
        """The activations of the model that ``config`` describes.

        Args:
            config: see :meth:`TransformerShape.from_config`.
            dtype_bytes: bytes of the dtype in which the model computes.
            recompute: the backward runs each layer's forward again (full activation recomputation).
            logits: "full": the logits of all tokens exist at once, and the loss is computed in float32. "chunked":
                forward and backward compute logits of ``chunk_tokens`` tokens at a time, so their bytes are fixed.
            chunk_tokens: number of tokens in such a chunk.

        Raises:
            ValueError: as :meth:`TransformerShape.from_config`, or an option is none of these.
        """
        as_count(dtype_bytes, "dtype_bytes")
        as_count(chunk_tokens, "chunk_tokens")
        if logits not in ("full", "chunked"):
            raise ValueError(f"logits={shown(logits)}: expected 'full' or 'chunked'")
        shape = TransformerShape.from_config(config)
        sizes = [_layer_bytes(shape, layer.mlp, dtype_bytes) for layer in shape.layers]
        gradients = [_gradient_bytes(shape, layer.mlp, dtype_bytes) for layer in shape.layers]
        inputs = shape.num_layers * shape.hidden_size * dtype_bytes
        once = 2 * shape.attention.head_dim * dtype_bytes + _IDS
        end = _norm_bytes(shape.hidden_size, 1, dtype_bytes) + shape.hidden_size * dtype_bytes
        log_probs = _FP32 * shape.vocab_size
        logit_gradients = 2 * log_probs
        fixed = 0
        if logits == "chunked":
            fixed, log_probs, logit_gradients = chunk_tokens * (log_probs + logit_gradients), 0, 0
        in_layer = max(map(sum, zip(sizes, gradients, strict=True)) if recompute else gradients)
        return cls(
            kept_bytes_per_token=once + (inputs if recompute else sum(sizes)) + end + log_probs,
            # The head's tensors are gone when the backward reaches the layers.
            transient_bytes_per_token=max(logit_gradients, in_layer - end - log_probs, 0),
            fixed_bytes=fixed,
        )

    def bytes(self, tokens: int) -> int:
        """Peak bytes of a microbatch of ``tokens`` tokens.

        Raises:
            ValueError: ``tokens`` is not an integer of at least 0.
        """
        as_count(tokens, "tokens", minimum=0)
        return self.fixed_bytes + tokens * (self.kept_bytes_per_token + self.transient_bytes_per_token)

    def max_tokens(self, budget_bytes: int) -> int:
        """The largest number of tokens of a microbatch whose peak is within ``budget_bytes``.

        Raises:
            ValueError: not even one token fits.
        """
        as_count(budget_bytes, "budget_bytes", minimum=0)
        if self.bytes(1) > budget_bytes:
            raise ValueError(
                f"budget_bytes={budget_bytes}: expected at least {self.bytes(1)}, which one token needs; "
                "use recompute=True, chunked logits, or more ranks to shard over"
            )
        return (budget_bytes - self.fixed_bytes) // (self.kept_bytes_per_token + self.transient_bytes_per_token)


@dataclass(frozen=True)
class ShardedState:
    """Bytes on each rank of parameters, gradients and Adam's state under full sharding (FSDP2's memory layout).

    Sharded over all ranks, per parameter: the master copy, its gradient, and Adam's two moments. Whole, in the
    type of the computation: the root unit (embedding, last norm, head), which stays gathered through forward and
    backward, and its gradients; two layers, the one at work and the one gathered ahead; the gradients of one
    layer, and their copy in the type in which they are reduced.

    If communication happens only once per step, a rank keeps ``whole_bytes`` instead of this second part: all
    parameters in the dtype of the computation, all gradients in the dtype in which they are reduced, and the gradients
    of one layer as backward makes them.

    ODC also needs ``on_demand_bytes``: the copy of a shard that other ranks read, in the dtype of the computation, and
    the sum of gradients that they add to, in the dtype in which gradients are reduced.

    Not counted: padding of shards to equal size, slots and words of a transport, temporaries of the optimizer.

    Example:
        >>> state = ShardedState.from_config("qwen2.5-7b", world_size=8)
        >>> f"{state.bytes / 1e9:.1f} GB, of which {state.sharded_bytes / 1e9:.1f} GB are sharded"
        '21.9 GB, of which 15.2 GB are sharded'
        >>> f"{state.on_demand_bytes / 1e9:.1f} GB more with ODC"
        '5.7 GB more with ODC'
    """

    sharded_bytes: int
    unsharded_bytes: int
    whole_bytes: int
    on_demand_bytes: int = 0

    def __post_init__(self) -> None:
        check_counts(self, "sharded_bytes", "unsharded_bytes", "whole_bytes", "on_demand_bytes", minimum=0)

    @classmethod
    def from_config(
        cls,
        config: object,
        world_size: int,
        *,
        param_bytes: int = 2,
        master_bytes: int = 4,
        grad_bytes: int = 4,
        moment_bytes: int = 4,
        gathered_layers: int = 2,
        num_sharing: int | None = None,
    ) -> ShardedState:
        """The state of the model that ``config`` describes, each layer and the root an FSDP unit.

        Args:
            config: see :meth:`TransformerShape.from_config`.
            world_size: number of ranks.
            param_bytes: bytes of a parameter in the dtype of the computation.
            master_bytes: bytes of a parameter in the optimizer.
            grad_bytes: bytes of a gradient when it is reduced and kept.
            moment_bytes: bytes of each of Adam's two moments.
            gathered_layers: number of layers that are gathered at the same time.
            num_sharing: number of ranks of a host, which share published parameters and sums; None: all ranks.

        Raises:
            ValueError: as :meth:`TransformerShape.from_config`, or a number is not a positive integer.
        """
        numbers = {
            "param_bytes": param_bytes,
            "master_bytes": master_bytes,
            "grad_bytes": grad_bytes,
            "moment_bytes": moment_bytes,
            "gathered_layers": gathered_layers,
            "world_size": world_size,
        }
        for name, value in numbers.items():
            as_count(value, name)
        shape = TransformerShape.from_config(config)
        shard = -(-shape.num_parameters // world_size)
        published = -(-shape.num_parameters // as_count(num_sharing or world_size, "num_sharing"))
        layers = sorted(shape.layer_parameters, reverse=True)
        gathered = 2 * shape.root_parameters + sum(layers[:gathered_layers]) + layers[0]
        return cls(
            sharded_bytes=shard * (master_bytes + grad_bytes + 2 * moment_bytes),
            unsharded_bytes=gathered * param_bytes + layers[0] * grad_bytes,
            whole_bytes=shape.num_parameters * (param_bytes + grad_bytes) + layers[0] * param_bytes,
            on_demand_bytes=published * (param_bytes + grad_bytes),
        )

    @property
    def bytes(self) -> int:
        """The total; the rest of a rank's memory is left for activations."""
        return self.sharded_bytes + self.unsharded_bytes


def _layer_bytes(shape: TransformerShape, mlp: Mlp, dtype_bytes: int) -> int:
    attention = shape.attention
    heads = attention.num_heads + attention.num_kv_heads
    kept = shape.norms_per_layer * _norm_bytes(shape.hidden_size, 1, dtype_bytes)
    kept += 2 * shape.hidden_size * dtype_bytes
    kept += 2 * (attention.query_size + attention.kv_size) * dtype_bytes + _FP32 * attention.num_heads
    if attention.qk_norm != "none":
        num_norms = heads if attention.qk_norm == "head" else 2
        kept += _norm_bytes(attention.query_size + attention.kv_size, num_norms, dtype_bytes)
    return kept + _mlp_bytes(shape.hidden_size, mlp, dtype_bytes)


def _gradient_bytes(shape: TransformerShape, mlp: Mlp, dtype_bytes: int) -> int:
    """Bytes per token of the gradients that are there at once in a layer, most in its MLP."""
    hidden = shape.hidden_size
    if isinstance(mlp, DenseMlp):
        inner = (2 if mlp.gated else 1) * mlp.intermediate_size
    else:
        inner = mlp.num_experts_per_token * 2 * (hidden + mlp.expert.intermediate_size)
    return _FP32 * hidden + inner * dtype_bytes


def _norm_bytes(width: int, num_norms: int, dtype_bytes: int) -> int:
    return width * (max(_FP32, dtype_bytes) + dtype_bytes) + _FP32 * num_norms


def _mlp_bytes(hidden_size: int, mlp: Mlp, dtype_bytes: int) -> int:
    if isinstance(mlp, DenseMlp):
        return (4 if mlp.gated else 2) * mlp.intermediate_size * dtype_bytes
    visited = 2 * hidden_size * dtype_bytes + _mlp_bytes(hidden_size, mlp.expert, dtype_bytes)
    shared = _mlp_bytes(hidden_size, mlp.shared, dtype_bytes) if mlp.shared else 0
    gate = hidden_size * dtype_bytes if mlp.shared_gate else 0
    return _FP32 * mlp.num_experts + mlp.num_experts_per_token * visited + shared + gate
