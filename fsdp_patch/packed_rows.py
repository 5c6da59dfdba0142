"""Warns if packed samples attend to each other: a row of several samples is given to a model with a cache.

The check computes nothing. It uses the arguments of the forward: positions that restart within a row, no mask, and a
cache, which models of transformers make by default. Such a model separates packed samples only without a cache.
``odc.balance.check_packing`` finds models that never separate them.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from odc.fsdp_patch.gradient_events import script_frame
from odc.fsdp_patch.interception import untraced

_BY_MASK = ("eager", "sdpa", "flex_attention")
"""Ways of attention that go by the mask. Others (flash attention) are given the positions themselves."""

_MOST_LOOKS = 100
"""A script that packs has done so by then. Where a model caches, a look reads positions, for which a GPU is waited."""


def watch_packed_rows(model: nn.Module) -> Callable[[], None]:
    """Warn, once, at the first packed row that ``model`` or a model in it trains on with a cache. Returns the undo.

    Local. It ends by itself with the first row of which it can say that its samples are told apart, or not.
    """
    handles: list[Any] = []
    looks = 0

    def undo() -> None:
        while handles:
            handles.pop().remove()

    def look(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        nonlocal looks
        if not torch.is_grad_enabled():  # generation has its cache
            return
        given = {**dict(zip(_names(module), args, strict=False)), **kwargs}
        positions = given.get("position_ids")
        if not isinstance(positions, torch.Tensor) or given.get("attention_mask") is not None:
            is_known = False
        elif not _caches(module, given):
            is_known = True
        elif is_known := bool((positions[..., 1:] <= positions[..., :-1]).any()):
            _warn(module)
        looks += 1
        if is_known or looks == _MOST_LOOKS:
            undo()

    hook = untraced(look, "what a model is given is looked at here")
    handles += [
        module.register_forward_pre_hook(hook, with_kwargs=True) for module in model.modules() if _may_cache(module)
    ]
    return undo


def _names(module: nn.Module) -> list[str]:
    """Of the arguments of its forward."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _may_cache(module: nn.Module) -> bool:
    is_language_model = {"position_ids", "past_key_values"} <= set(_names(module))
    return is_language_model and hasattr(getattr(module, "config", None), "use_cache")


def _caches(module: nn.Module, given: Mapping[str, object]) -> bool:
    config: Any = module.config
    wanted = given.get("use_cache")
    if not (config.use_cache if wanted is None else wanted):
        return False
    if module.training and any(getattr(part, "gradient_checkpointing", False) for part in module.modules()):
        return False  # transformers makes none then
    return getattr(config, "_attn_implementation", None) in _BY_MASK


def _warn(module: nn.Module) -> None:
    library = type(module).__module__.split(".")[0]
    frame = script_frame(*{library} - {"__main__"})
    warnings.warn_explicit(
        f"packed samples see one another: {type(module).__name__} was given a row of several samples (position_ids "
        "begin anew, without an attention_mask) and use_cache=True, the default. With a cache it does not look for "
        "packed samples, and each attends to those in front of it, so losses and gradients are others than those of "
        "the samples one by one. Call it with use_cache=False, or set model.config.use_cache = False; "
        "odc.balance.check_packing(model) tells whether that suffices",
        RuntimeWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
    )
