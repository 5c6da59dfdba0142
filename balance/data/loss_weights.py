"""Normalization of losses of reinforcement learning and preference training, as one factor per sample."""

from __future__ import annotations

import numpy as np

from odc.balance.checks import FloatArray, IntArray, as_count, as_one_of
from odc.errors import UnsupportedError

_OF_TOKENS = ("dapo", "cispo", "vespo")
_OF_SEQUENCES = ("grpo", "sapo")
LOSS_TYPES = (*_OF_TOKENS, *_OF_SEQUENCES, "dr_grpo", "sample")

_OF_A_MICROBATCH = {
    "bnpo": "the mean over the tokens of a microbatch",
}
"""Losses that change with the samples that share a microbatch, and what is in the way."""


def loss_weights(
    loss_type: str,
    num_loss_tokens: IntArray | None,
    world_size: int,
    *,
    num_samples: int,
    max_completion_length: int | None = None,
) -> FloatArray:
    """What the summed loss of each sample of an optimizer step is multiplied by, (num_samples,).

    FSDP divides the sum of the ranks' gradients by ``world_size``; so these factors hold it.

    Args:
        loss_type: see :meth:`~odc.balance.BalancedBatch.loss_weights`.
        num_loss_tokens: of each sample, (num_samples,); None: not known.

    Raises:
        UnsupportedError: the loss depends on how samples share microbatches.
        ValueError: it is not known, or a number that it divides by is missing.
    """
    if loss_type in _OF_A_MICROBATCH:
        raise UnsupportedError(
            f"loss_type={loss_type!r}: it is {_OF_A_MICROBATCH[loss_type]}, so it depends on which samples share one, "
            "and a balanced batch packs others together. Use 'dapo', the mean over the tokens of the whole step"
        )
    as_one_of(loss_type, "loss_type", LOSS_TYPES)
    if (max_completion_length is not None) != (loss_type == "dr_grpo"):
        raise ValueError(
            f"max_completion_length={max_completion_length} with loss_type={loss_type!r}: 'dr_grpo' divides by it, and "
            "no other does"
        )
    if loss_type == "sample":
        return np.full(num_samples, world_size / max(num_samples, 1))
    if loss_type == "dr_grpo":
        longest = as_count(max_completion_length or 0, "max_completion_length")
        return np.full(num_samples, world_size / max(num_samples * longest, 1))
    if num_loss_tokens is None:
        raise ValueError(
            f"loss_type={loss_type!r} divides by loss tokens, and the batch was balanced without num_loss_tokens: give "
            "balance_batch the number of tokens of each sample that have a loss (of its completion)"
        )
    if loss_type in _OF_SEQUENCES:
        return world_size / (max(num_samples, 1) * np.maximum(num_loss_tokens, 1).astype(np.float64))
    return np.full(num_samples, world_size / max(int(num_loss_tokens.sum()), 1))
