"""What balancing needs to know of a model, and the models that cannot be balanced."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from odc.balance import CostModel, LinearCost, TransformerCost
from odc.errors import UnsupportedError

logger = logging.getLogger("odc")
_NOTHING = (lambda: None).__code__


def base_model(model: Any) -> Any:
    """Without peft around it, whose forward takes anything."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of a model and its parts, the model's own first, whatever it is wrapped in: DDP, FSDP, peft,
    ``torch.compile``, a module of one's own."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


def default_cost(config: object) -> CostModel:
    """FLOPs of a model with this configuration; tokens where it is not understood."""
    try:
        return TransformerCost.from_config(config)
    except ValueError as error:
        logger.warning("odc: samples are balanced by their tokens, not by FLOPs: %s", error)
        return LinearCost()


# The length of a row


def check_rows(configs: Sequence[Any], longest: int, max_tokens: int) -> int | None:
    """Refuse what makes a token's logits depend on the length of its row, at lengths that a probe does not reach.

    Args:
        configs: see :func:`configs_of`.
        longest: tokens of the longest sample.
        max_tokens: most tokens in a row.

    Returns:
        Most tokens that a sample may turn out to have; None: any number.

    Raises:
        UnsupportedError: names the option and both numbers.
    """
    contexts = [found for config in configs for found in _rotary_contexts(config)]
    for kind, context in contexts:
        if longest > context:
            raise UnsupportedError(
                f"rope_type {kind!r}: beyond {context} tokens its frequencies depend on the longest sample of a row or "
                f"batch, and the longest sample has {longest}; balanced minibatches need samples of at most {context} "
                "tokens, or another rope_type (yarn, linear, llama3)"
            )
    for config in configs:
        chunk = getattr(config, "attention_chunk_size", None)
        if isinstance(chunk, int) and max_tokens > chunk:
            raise UnsupportedError(
                f"attention_chunk_size={chunk}: attention is cut into chunks by the place in a row, so samples packed "
                f"into rows of up to {max_tokens} tokens would be cut elsewhere; give max_tokens of at most {chunk}"
            )
    return min((context for _, context in contexts), default=None)


def _rotary_contexts(config: Any) -> Iterator[tuple[str, int]]:
    """Kinds of rotary embeddings that depend on the longest sample, each with the length up to which they do not."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, Mapping):
            continue
        for parameters in (given, *(one for one in given.values() if isinstance(one, Mapping))):
            kind = str(parameters.get("rope_type", parameters.get("type")))
            whole = getattr(config, "max_position_embeddings", None)
            if kind in ("longrope", "su"):
                original = parameters.get("original_max_position_embeddings")
                yield kind, int(original or getattr(config, "original_max_position_embeddings", None) or whole or 0)
            elif "dynamic" in kind:
                yield kind, int(whole or 0)


# Ranks with different numbers of microbatches


def check_uneven(model: nn.Module, name: str) -> None:
    """Ranks with different numbers of microbatches need a model whose communication can be patched, all of it.

    [Note: An output layer that is not called] TRL's fused head uses only the weight of a language model's output layer.
    If that layer is a separate FSDP2 unit, as accelerate makes it in a model with adapters, FSDP does not gather the
    weight. TRL gathers it by a collective in every microbatch, so ranks with different numbers of microbatches would
    wait forever. A frozen layer is gathered before the model runs (:func:`gather_head`), so TRL finds it.

    Args:
        name: of the way to balance.

    Raises:
        UnsupportedError: the model is not sharded by FSDP, or such a layer is trained.
    """
    if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            f"balancing by {name!r} gives ranks different numbers of microbatches, but the model is a "
            f"{type(model).__name__} without FSDP, whose collectives need equal numbers: turn FSDP on, or use a "
            "policy with equal numbers (lb-micro)"
        )
    head = _head_of_its_own(model)
    if head is not None and head.weight.requires_grad:
        raise UnsupportedError(
            f"balancing by {name!r} gives ranks different numbers of microbatches, but the output layer is trained and "
            "an FSDP2 unit of its own, whose weight TRL gathers by a collective in each microbatch: leave it out of "
            "modules_to_save (peft), or use a policy with equal numbers (lb-micro)"
        )


def gather_head(model: Any) -> None:
    """Gather an output layer that is not called before ``model`` runs, if it is frozen: no gradient has to come back.
    See [Note: An output layer that is not called]."""
    head = _head_of_its_own(model)
    if head is not None and not head.weight.requires_grad:
        head.unshard()


def _head_of_its_own(model: Any) -> Any:
    """None: the layer is called, or it is in a unit with others, which gather it when they are."""
    base = base_model(model)
    is_fused = "fused_lm_head" in getattr(getattr(base, "forward", None), "__code__", _NOTHING).co_varnames
    head = base.get_output_embeddings() if is_fused else None
    if not isinstance(head, FSDPModule):
        return None
    group = head._get_fsdp_state()._fsdp_param_group
    return None if group is None or len(group.modules) > 1 else head
