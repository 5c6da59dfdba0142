"""FLOPs of a transformer, read from its configuration."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, as_cost, as_count, as_optional_count
from odc.balance.costs.models import check_coefficients
from odc.balance.costs.shapes import TransformerShape

# A multiply-add is two; a forward and a backward, which counts as two forwards.
_FLOPS = 2.0
_PASSES = 3.0
_PASSES_WITH_RECOMPUTE = 4.0


@dataclass(frozen=True)
class LayerGroup:
    """Layers of equal cost. The costs are those of one layer of them, forward and backward."""

    num_layers: int
    """How many there are, at least 1."""

    flops_per_token: float
    """FLOPs that do not depend on the sample's length."""

    flops_per_pair: float = 0.0
    """FLOPs per pair of a query and a key that it attends to; 0 for a layer without attention."""

    window: int | None = None
    """Keys that a query attends to at most, itself included; None: all before it."""

    def __post_init__(self) -> None:
        as_count(self.num_layers, "num_layers")
        as_cost(self.flops_per_token, "flops_per_token")
        as_cost(self.flops_per_pair, "flops_per_pair")
        as_optional_count(self.window, "window")

    def __call__(self, tokens: FloatArray) -> FloatArray:
        """FLOPs of one layer for samples of so many tokens, same shape."""
        return self.flops_per_token * tokens + self.flops_per_pair * self.pairs(tokens)

    def pairs(self, tokens: FloatArray) -> FloatArray:
        """Pairs of a sample of ``s`` tokens: s^2 / 2, and W s - W^2 / 2 once it exceeds the window W.

        The integral of min(position, W), the usual count; a sum over tokens has half a token more each.
        """
        if self.window is None:
            return tokens * tokens / 2
        near = np.minimum(tokens, self.window)
        return near * near / 2 + (tokens - near) * self.window


@dataclass(frozen=True)
class TransformerCost:
    """FLOPs of the matrix products of one forward and backward of a decoder-only transformer.

    The backward counts as two forwards, causal attention as half of all pairs. Only the experts that a token visits
    count. Not counted: normalization, activation functions, softmax, the embedding lookup.

    A cost model: calling it with lengths gives one cost per sample.

    Example:
        >>> cost = TransformerCost.from_config("qwen2.5-7b")  # or a model's config, or the path of its config.json
        >>> short, long = cost([1_000, 64_000])
        >>> round(long / short)  # for 64 times as many tokens
        120
    """

    groups: tuple[LayerGroup, ...]
    """Kinds of layers, in the order of their first occurrence in the model. The last group is the output head, 1
    layer."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("groups is empty: expected at least one LayerGroup")
        check_coefficients(
            flops_per_token=max(group.flops_per_token for group in self.groups),
            flops_per_pair=max(group.flops_per_pair for group in self.groups),
        )

    def __call__(self, lengths: npt.ArrayLike, /) -> FloatArray:
        return np.tensordot(np.array(self.counts, dtype=np.float64), self.by_group(lengths), axes=1)

    def by_group(self, lengths: npt.ArrayLike, /) -> FloatArray:
        """FLOPs of ONE layer of each group, float64, of shape ``(num_groups, *lengths.shape)``.

        A step that waits at each layer (paper equation 1) is worked out from these and :attr:`counts`.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return np.stack([group(tokens) for group in self.groups])

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each group."""
        return tuple(group.num_layers for group in self.groups)

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token of all layers, without the pairs of attention."""
        return sum(group.num_layers * group.flops_per_token for group in self.groups)

    @property
    def flops_per_squared_token(self) -> float:
        """FLOPs per squared token of all layers.

        Raises:
            ValueError: some layers have a window, so the cost is no polynomial.
        """
        if any(group.window is not None and group.flops_per_pair for group in self.groups):
            raise ValueError(
                "layers with a window do not cost a multiple of the squared tokens: call the model, or use by_group"
            )
        return sum(group.num_layers * group.flops_per_pair / 2 for group in self.groups)

    @classmethod
    def from_config(cls, config: object, *, gated_mlp: bool = True, recompute: bool = False) -> TransformerCost:
        """The cost of the model that ``config`` describes.

        Args:
            config: see :meth:`TransformerShape.from_config`.
            gated_mlp: three matrices in an MLP (Llama, Qwen), else two.
            recompute: the backward runs each layer's forward again (full activation recomputation), but not the head's.

        Raises:
            ValueError: as :meth:`TransformerShape.from_config`.
        """
        shape = TransformerShape.from_config(config, gated_mlp=gated_mlp)
        passes = _PASSES_WITH_RECOMPUTE if recompute else _PASSES
        hidden, attention = shape.hidden_size, shape.attention
        groups = [
            LayerGroup(
                num_layers=count,
                flops_per_token=_FLOPS * passes * (attention.active_weights(hidden) + layer.mlp.active_weights(hidden)),
                # A score, and its part of the weighted sum of values.
                flops_per_pair=_FLOPS * passes * 2 * attention.query_size,
                window=layer.window,
            )
            for layer, count in Counter(shape.layers).items()
        ]
        head = LayerGroup(1, flops_per_token=_FLOPS * _PASSES * hidden * shape.vocab_size)
        return cls((*groups, head))
