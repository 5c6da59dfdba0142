"""Lazy exports (PEP 562): names are loaded on first use, so that importing a package is cheap."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy(
    package: str, homes: Mapping[str, str], exported: Sequence[str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``.

    Args:
        homes: the module of each name that is loaded when it is first used.
        exported: what ``dir()`` shows, and completion with it: the package's ``__all__``.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    def show() -> list[str]:
        return sorted(exported)

    return get, show
