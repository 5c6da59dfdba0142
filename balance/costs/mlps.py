"""The MLP of a layer: dense, or a mixture of experts; its size, and which layers have which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from odc.balance.checks import as_count, check_counts
from odc.balance.costs.configs import Config
from odc.balance.costs.families import Family
from odc.errors import shown


@dataclass(frozen=True)
class DenseMlp:
    """Two matrices between ``hidden_size`` and ``intermediate_size``; three if gated (SwiGLU, GeGLU)."""

    intermediate_size: int
    gated: bool = True
    bias: bool = False

    def __post_init__(self) -> None:
        as_count(self.intermediate_size, "intermediate_size")

    def active_weights(self, hidden_size: int) -> int:
        """Entries of the matrices that one token is multiplied by."""
        return (3 if self.gated else 2) * hidden_size * self.intermediate_size

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters, biases included."""
        inner = (2 if self.gated else 1) * self.intermediate_size
        return self.active_weights(hidden_size) + (inner + hidden_size if self.bias else 0)

    def num_active_parameters(self, hidden_size: int) -> int:
        """All of them."""
        return self.num_parameters(hidden_size)


@dataclass(frozen=True)
class MoeMlp:
    """A router, ``num_experts`` experts of which each token visits a few, and maybe one that all visit."""

    num_experts: int
    num_experts_per_token: int
    expert: DenseMlp
    shared: DenseMlp | None = None
    """The expert of all tokens; several of them count as one of their total size."""

    shared_gate: bool = False
    """The shared expert's output is multiplied by a gate, a matrix of one column."""

    router_bias: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "num_experts", "num_experts_per_token")
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token={self.num_experts_per_token}: expected at most num_experts={self.num_experts}"
            )

    def active_weights(self, hidden_size: int) -> int:
        """Entries of the matrices that one token is multiplied by: router, its experts, shared expert, gate."""
        shared = self.shared.active_weights(hidden_size) if self.shared else 0
        gate = hidden_size if self.shared and self.shared_gate else 0
        experts = self.num_experts_per_token * self.expert.active_weights(hidden_size)
        return hidden_size * self.num_experts + experts + shared + gate

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters of all experts, biases included."""
        return self._parameters(hidden_size, self.num_experts)

    def num_active_parameters(self, hidden_size: int) -> int:
        """Parameters that one token uses, biases included."""
        return self._parameters(hidden_size, self.num_experts_per_token)

    def _parameters(self, hidden_size: int, num_experts: int) -> int:
        shared = self.shared.num_parameters(hidden_size) if self.shared else 0
        gate = hidden_size if self.shared and self.shared_gate else 0
        router = hidden_size * self.num_experts + (self.num_experts if self.router_bias else 0)
        return router + num_experts * self.expert.num_parameters(hidden_size) + shared + gate


Mlp: TypeAlias = DenseMlp | MoeMlp


def read_mlps(config: Config, family: Family, num_layers: int, gated: bool) -> list[Mlp]:
    """The MLP of each layer.

    Raises:
        ValueError: a size is missing or not a positive integer, or a list has not one entry per layer.
    """
    gated = gated and family.gated_mlp
    bias = config.flag(family.mlp_bias, family.bias_default)
    if config.count("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts") == 0:
        return [DenseMlp(config.size("intermediate_size"), gated, bias)] * num_layers
    mixture = _mixture(config, family, gated, bias)
    sparse = _sparse_layers(config, num_layers)
    if all(sparse):
        return [mixture] * num_layers
    dense = DenseMlp(config.size("intermediate_size"), gated, bias)
    return [mixture if layer else dense for layer in sparse]


def _mixture(config: Config, family: Family, gated: bool, bias: bool) -> MoeMlp:
    expert_size = config.size("moe_intermediate_size", "intermediate_size")
    num_shared = config.count("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared_size = config.count("shared_expert_intermediate_size") or num_shared * expert_size
    return MoeMlp(
        num_experts=config.size("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        num_experts_per_token=config.size("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
        expert=DenseMlp(expert_size, gated, bias),
        shared=DenseMlp(shared_size, gated, bias) if shared_size else None,
        shared_gate=family.shared_gate and shared_size > 0,
        router_bias=bias,
    )


def _sparse_layers(config: Config, num_layers: int) -> list[bool]:
    kinds = config.per_layer("mlp_layer_types", num_layers)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)):
        raise ValueError(f"mlp_only_layers={shown(dense)} in the config: expected a list of layer numbers")
    step = config.size("decoder_sparse_step", default=1)
    first = config.count("first_k_dense_replace", "num_dense_layers")
    if isinstance(config.get("moe_layer_freq"), (list, tuple)):
        at_frequency = [bool(entry) for entry in config.per_layer("moe_layer_freq", num_layers) or ()]
    else:
        frequency = config.size("moe_layer_freq", default=1)
        at_frequency = [layer % frequency == 0 for layer in range(num_layers)]
    return [
        layer not in dense and (layer + 1) % step == 0 and layer >= first and at_frequency[layer]
        for layer in range(num_layers)
    ]
