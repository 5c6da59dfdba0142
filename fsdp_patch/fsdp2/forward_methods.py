"""Methods that a script has made forwards of FSDP2 (``register_fsdp_forward_method``): no module hook sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


def watch_forward_methods(model: nn.Module, begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Call ``begin`` before and ``end`` after such methods, of any module of ``model``. Returns the undo.

    They look up the two halves of FSDP2's forward in the module's state each time; its own hooks were bound once.
    """
    found = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    states = {id(state): state for state in found}.values()  # one may belong to several modules
    undos = [_shadow(state, "_pre_forward", begin) for state in states]
    undos += [_shadow(state, "_post_forward", end) for state in states]

    def undo() -> None:
        for one in undos:
            one()

    return undo


def _shadow(state: Any, half: str, tell: Callable[[], None]) -> Callable[[], None]:
    original, own = getattr(state, half), state.__dict__.get(half)

    @functools.wraps(original)
    def telling(*args: Any, **kwargs: Any) -> Any:
        tell()
        return original(*args, **kwargs)

    setattr(state, half, telling)

    def undo() -> None:
        if state.__dict__.get(half) is not telling:
            return  # somebody else has wrapped it meanwhile
        if own is None:
            delattr(state, half)
        else:
            setattr(state, half, own)

    return undo
