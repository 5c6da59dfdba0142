"""Threads of ODC's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class HelperThread(threading.Thread):
    """Works beside the training loop, and does not keep the interpreter alive. Whoever starts it joins it."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)


def in_helper() -> bool:
    """Whether this is such a thread: what it waits for, the training loop does not."""
    return isinstance(threading.current_thread(), HelperThread)
