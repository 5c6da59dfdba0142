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
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    for state in states:
        _tell(state, begin, end)

    def undo() -> None:
        for state in states:
            for half in ("_pre_forward", "_post_forward"):
                state.__dict__.pop(half, None)

    return undo


def _tell(state: Any, begin: Callable[[], None], end: Callable[[], None]) -> None:
    pre_forward, post_forward = state._pre_forward, state._post_forward

    @functools.wraps(pre_forward)
    def telling_pre_forward(*args: Any, **kwargs: Any) -> Any:
        begin()
        return pre_forward(*args, **kwargs)

    @functools.wraps(post_forward)
    def telling_post_forward(*args: Any, **kwargs: Any) -> Any:
        end()
        return post_forward(*args, **kwargs)

    state._pre_forward, state._post_forward = telling_pre_forward, telling_post_forward
