"""Tiny samples that any language model takes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from odc.trainers.bundles import Microbatch
from odc.trainers.checks import base_model, refusal

_NUM_TOKENS = 12


@dataclass(frozen=True)
class Identity:
    """What is asked of a model before it is wrapped, after which it has another class and another ``forward``."""

    name: str
    vocab_size: int
    special: frozenset[int]
    """Tokens with a meaning of their own: padding, images."""

    takes_mask: bool
    rounds_by_row: bool
    """What a token's logits round to depends on the other tokens of the row: those that go to the same expert, or those
    that are quantized by one scale."""

    options: Mapping[str, Any]
    """Arguments with which the trainer calls the model besides the batch."""


@dataclass(frozen=True)
class ProbeSamples:
    """As :func:`~odc.trainers.packing.collate_alone` gives them."""

    first: Microbatch
    """Four tokens."""

    second: Microbatch
    """Five others, except the fourth: what a model makes of it in each sample tells how far it depends on the tokens
    before."""

    other_first: Microbatch
    """Four others again, to stand in the place of the first."""


def identity_of(trainer: Any) -> Identity:
    """Of the trainer's model.

    Raises:
        UnsupportedError: its configuration does not tell the size of the vocabulary.
    """
    model = base_model(trainer.model)
    whole: Any = getattr(model, "config", None)
    config: Any = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    if whole is None or getattr(config, "vocab_size", None) is None or not hasattr(config, "to_dict"):
        raise refusal(
            trainer,
            f"whether {type(model).__name__} tells packed samples apart cannot be measured: its config is a "
            f"{type(config).__name__}; expected a transformers configuration with a vocab_size",
        )
    values = {**whole.to_dict(), **config.to_dict()}
    special = [value for name, value in values.items() if name.endswith(("_token_id", "_token_index"))]
    return Identity(
        name=type(model).__name__,
        vocab_size=int(config.vocab_size),
        special=frozenset(v for v in special if isinstance(v, int)),
        rounds_by_row=_rounds_by_row(values),
        takes_mask="attention_mask" in inspect.signature(type(model).forward).parameters,
        options={"use_cache": False} if _is_trls(trainer) else {},
    )


def probe_samples(identity: Identity, example: Mapping[str, torch.Tensor]) -> ProbeSamples:
    """The same on all ranks. Every token has a label. Columns that only the collator knows come from ``example``."""
    a, b, c, d, *others = _spread(identity, _NUM_TOKENS)
    first, second, other = [a, b, c, d], [*others[:3], d, others[3]], others[4:]
    return ProbeSamples(*(_sample(tokens, example) for tokens in (first, second, other)))


def _spread(identity: Identity, count: int) -> list[int]:
    """Ordinary tokens from all over the vocabulary."""
    usable = [token for token in range(identity.vocab_size) if token not in identity.special]
    return [usable[(2 * i + 1) * len(usable) // (2 * count)] for i in range(count)]


def _sample(tokens: list[int], example: Mapping[str, torch.Tensor]) -> Microbatch:
    ids = torch.tensor([tokens])
    own = {"input_ids": ids, "labels": ids.clone(), "position_ids": torch.arange(len(tokens))[None]}
    further = {k: v[:, torch.arange(len(tokens)) % v.shape[1]] for k, v in example.items() if k not in own}
    return {**further, **own}


def _rounds_by_row(config: Mapping[str, Any]) -> bool:
    experts = [value for name, value in config.items() if "expert" in name and isinstance(value, int)]
    return any(value > 1 for value in experts) or bool(config.get("quantization_config"))


def _is_trls(trainer: Any) -> bool:
    """TRL switches the cache off in every call, and not in the configuration."""
    if "trl" not in sys.modules:
        return False
    from trl import SFTTrainer

    return isinstance(trainer, SFTTrainer)
