"""How the epochs of a loader end."""

from __future__ import annotations

from collections.abc import Iterable


def failure(loader: Iterable[object]) -> tuple[type[Exception], str]:
    """The error that an epoch ends with, and its notes. It must not outlive this: its traceback holds the workers."""
    try:
        list(loader)
    except Exception as error:
        return type(error), "\n".join([str(error), *getattr(error, "__notes__", [])])
    raise AssertionError("there was no error")
