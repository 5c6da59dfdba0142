"""Checks before training: options of a transformers ``Trainer`` that cannot be balanced are refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import IterableDataset

from odc.errors import UnsupportedError

if TYPE_CHECKING:
    from odc.trainers.forms import Form
    from odc.trainers.options import BalanceOptions

_ROLLOUTS, _PAIRS = "rollouts that it makes itself", "pairs of answers"
_TRAINS_ON = {
    "RLOOTrainer": _ROLLOUTS,
    "PPOTrainer": _ROLLOUTS,
    "OnlineDPOTrainer": _ROLLOUTS,
    "DistillationTrainer": _ROLLOUTS,
    "GKDTrainer": _ROLLOUTS,
    "ORPOTrainer": _PAIRS,
    "CPOTrainer": _PAIRS,
    "KTOTrainer": "answers that are compared within a batch",
}
"""What is no sequence of tokens with labels, by the names of TRL's classes, which forks keep."""


def check_trainer(trainer: Any, form: Form | None, options: BalanceOptions) -> None:
    """Refuse what would make a step's loss depend on how its samples share microbatches, or ranks wait for one another.

    Args:
        form: of what it trains on, where that is no dataset of sequences.

    Raises:
        UnsupportedError: names the option and what to do.
    """
    problem = _problem(trainer, form, options)
    if problem is not None:
        raise refusal(trainer, problem)


def refusal(trainer: Any, problem: str) -> UnsupportedError:
    """The error that says why a trainer is not balanced."""
    return UnsupportedError(f"balanced minibatches cannot be had in this {type(trainer).__name__}: {problem}")


def check_sharded(model: nn.Module, name: str) -> None:
    """Ranks with different numbers of microbatches need a model whose communication can be patched.

    Args:
        name: of the way to balance.

    Raises:
        UnsupportedError: the model is not sharded by FSDP.
    """
    if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        raise UnsupportedError(
            f"balancing by {name!r} gives ranks different numbers of microbatches, but the model is a "
            f"{type(model).__name__} without FSDP, whose collectives need equal numbers: turn FSDP on, or use a "
            "policy with equal numbers (lb-micro)"
        )


def check_steps(trainer: Any, loader: Any) -> int | None:
    """Optimizer steps of a trainer, where only its arguments can tell them; None: its dataset has a length.

    Raises:
        UnsupportedError: nothing tells them.
    """
    if not isinstance(loader.dataset, IterableDataset):
        return None
    if trainer.args.max_steps <= 0:
        raise refusal(
            trainer,
            "how many samples an iterable dataset gives is not known: set max_steps, the number of optimizer steps",
        )
    return int(trainer.args.max_steps)


def configs_of(model: nn.Module) -> list[Any]:
    """The configurations of a model and its parts, the model's own first, whatever it is wrapped in: DDP, FSDP, peft,
    ``torch.compile``, a module of one's own."""
    found = (getattr(module, "config", None) for module in model.modules())
    return list({id(config): config for config in found if config is not None}.values())


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


def _problem(trainer: Any, form: Form | None, options: BalanceOptions) -> str | None:
    known = next((one.__name__ for one in type(trainer).__mro__ if one.__name__ in _TRAINS_ON), None)
    if known is not None:
        return (
            f"a {known} trains on {_TRAINS_ON[known]}, not on samples that can be packed one by one. What works is "
            "`odc run` without --balance and --online (or odc.patch_fsdp alone): it trains as under plain FSDP"
        )
    args = trainer.args
    if form is not None and options.late_binding:
        return (
            f"late_binding=True, but it trains on {form.trains_on}, which lie with the rank that has made them, so no "
            "other one could take them; leave late_binding out"
        )
    if form is not None and options.online:
        return (
            f"it trains on {form.trains_on}, which are balanced by a policy once they are there; use --balance lb-mini "
            "in place of --online"
        )
    if not args.average_tokens_across_devices:
        return "average_tokens_across_devices=False: the loss depends on which rank has which samples; set it to True"
    if args.train_sampling_strategy == "batch_rebalance":
        return "train_sampling_strategy='batch_rebalance' deals out samples itself; use 'random' or 'group_by_length'"
    if args.include_num_input_tokens_seen not in ("no", False):
        return "include_num_input_tokens_seen makes ranks wait for one another in every microbatch; set it to 'no'"
    if form is None and not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return (
            f"{type(trainer.model).__name__} does not accept num_items_in_batch, so its loss is a mean of microbatch "
            "means, which depends on how samples share microbatches; give compute_loss_func, or use another model"
        )
    if not _accepts_positions(trainer.model):
        return f"{type(trainer.model).__name__}.forward has no position_ids, by which packed samples are told apart"
    if getattr(trainer, "neftune_noise_alpha", None):
        return (
            f"neftune_noise_alpha={trainer.neftune_noise_alpha}: the scale of its noise depends on the length of a row,"
            " padded or packed, and so on how samples share microbatches; set it to None"
        )
    if args.use_cache:
        return "use_cache=True lets packed samples attend to one another; set it to False, the default"
    if getattr(trainer, "aux_loss_enabled", False) or _config_flag(trainer.model, "output_router_logits"):
        return (
            "the auxiliary loss of a mixture of experts is a mean over microbatches, which depends on how samples "
            "share them; set router_aux_loss_coef=0 (TRL), output_router_logits=False"
        )
    return None if form is None else form.problem(trainer)


def base_model(model: Any) -> Any:
    """Without peft around it, whose forward takes anything."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def _accepts_positions(model: Any) -> bool:
    return "position_ids" in inspect.signature(type(base_model(model)).forward).parameters


def _config_flag(model: Any, name: str) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, name, False)) or bool(getattr(getattr(config, "text_config", None), name, False))
