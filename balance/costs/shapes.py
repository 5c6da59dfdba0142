"""The shape of a decoder-only transformer, from which its costs, parameters and memory follow."""

from __future__ import annotations

from dataclasses import dataclass

from odc.balance.checks import as_count, as_optional_count, check_counts
from odc.balance.costs.configs import Config, open_config
from odc.balance.costs.families import Family, QkNorm, family
from odc.balance.costs.mlps import Mlp, read_mlps
from odc.balance.costs.windows import read_windows


@dataclass(frozen=True)
class AttentionShape:
    """Attention with ``num_heads`` query heads, of which groups share a head of keys and values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: QkNorm = "none"
    """Queries and keys are normalized: "head", with weights per head's dimension, or "full", all heads together."""

    sinks: bool = False
    """Each query head has one learned attention sink."""

    def __post_init__(self) -> None:
        check_counts(self, "num_heads", "num_kv_heads", "head_dim")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads={self.num_kv_heads}"
            )

    @property
    def query_size(self) -> int:
        """Width of the queries, and of the output of the heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys, and of the values."""
        return self.num_kv_heads * self.head_dim

    def active_weights(self, hidden_size: int) -> int:
        """Entries of the four matrices."""
        return 2 * hidden_size * (self.query_size + self.kv_size)

    def num_parameters(self, hidden_size: int) -> int:
        """Parameters: matrices, biases, norms of queries and keys, sinks."""
        biases = (self.query_size + 2 * self.kv_size) * self.qkv_bias + hidden_size * self.output_bias
        norms = {"none": 0, "head": 2 * self.head_dim, "full": self.query_size + self.kv_size}[self.qk_norm]
        return self.active_weights(hidden_size) + biases + norms + self.num_heads * self.sinks


@dataclass(frozen=True)
class LayerShape:
    """What layers of one model differ in."""

    mlp: Mlp
    window: int | None = None
    """Tokens that a token attends to at most, itself included; None: all before it."""

    def __post_init__(self) -> None:
        as_optional_count(self.window, "window")


@dataclass(frozen=True)
class TransformerShape:
    """A decoder-only transformer with RMSNorm and rotary positions.

    For the families in ``families.py``, numbers of parameters equal those of the models in transformers. Weights of a
    vision tower are not counted.

    Example:
        >>> shape = TransformerShape.from_config("qwen2.5-7b")
        >>> shape.num_layers, f"{shape.num_parameters / 1e9:.2f} billion"
        (28, '7.62 billion')
    """

    hidden_size: int
    vocab_size: int
    attention: AttentionShape
    layers: tuple[LayerShape, ...]
    tie_word_embeddings: bool = False
    norms_per_layer: int = 2

    def __post_init__(self) -> None:
        check_counts(self, "hidden_size", "vocab_size")
        as_count(self.norms_per_layer, "norms_per_layer", minimum=0)
        if not self.layers:
            raise ValueError("layers is empty: expected at least one LayerShape")

    @classmethod
    def from_config(cls, config: object, *, gated_mlp: bool = True) -> TransformerShape:
        """Read the shape from ``config``.

        Args:
            config: a mapping, an object (a ``transformers`` config), the path of a ``config.json``, the name of a
                preset (:func:`preset_names`), or a shape, which is returned as it is. Needed are
                ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``intermediate_size`` (or the
                sizes of experts) and ``vocab_size``; the field names are those of transformers.
            gated_mlp: three matrices in an MLP (Llama, Qwen); else two, as in families known to have two.

        Raises:
            ValueError: a size is missing or not a positive integer, the heads do not divide evenly, or the model
                has parts that are not described here (latent or linear attention, state-space layers, ...).
        """
        if isinstance(config, cls):
            return config
        opened = open_config(config)
        kind = family(opened.model_type)
        num_layers = opened.size("num_hidden_layers")
        attention = _read_attention(opened, kind)
        windows = read_windows(opened, kind, num_layers)
        mlps = read_mlps(opened, kind, num_layers, gated_mlp)
        return cls(
            hidden_size=opened.size("hidden_size"),
            vocab_size=opened.size("vocab_size"),
            attention=attention,
            layers=tuple(LayerShape(mlp, window) for mlp, window in zip(mlps, windows, strict=True)),
            tie_word_embeddings=opened.tied(kind.tied),
            norms_per_layer=kind.norms_per_layer,
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def layer_parameters(self) -> tuple[int, ...]:
        """Parameters of each layer. If every layer is an FSDP unit, they are gathered and pushed at once."""
        return tuple(self._outside_mlp + layer.mlp.num_parameters(self.hidden_size) for layer in self.layers)

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm, and the head unless it is the embedding."""
        num_tables = 1 if self.tie_word_embeddings else 2
        return num_tables * self.vocab_size * self.hidden_size + self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All parameters."""
        return sum(self.layer_parameters) + self.root_parameters

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts that it does not visit."""
        mlps = sum(layer.mlp.num_active_parameters(self.hidden_size) for layer in self.layers)
        return mlps + self.num_layers * self._outside_mlp + self.root_parameters

    @property
    def _outside_mlp(self) -> int:
        return self.attention.num_parameters(self.hidden_size) + self.norms_per_layer * self.hidden_size


def _read_attention(config: Config, kind: Family) -> AttentionShape:
    num_heads = config.size("num_attention_heads")
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", default=num_heads),
        head_dim=_head_dim(config, kind, num_heads),
        qkv_bias=config.flag(kind.qkv_bias, kind.bias_default),
        output_bias=config.flag(kind.output_bias, kind.bias_default),
        qk_norm=kind.qk_norm if not kind.qk_norm_field or config.flag(kind.qk_norm_field, False) else "none",
        sinks=kind.sinks,
    )


def _head_dim(config: Config, kind: Family, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return config.size("head_dim")
    hidden = config.size("hidden_size")
    if kind.head_dim is not None:
        return kind.head_dim
    if hidden % num_heads:
        raise ValueError(
            f"hidden_size={hidden} is not a multiple of num_attention_heads={num_heads}: put head_dim into the config"
        )
    return hidden // num_heads
