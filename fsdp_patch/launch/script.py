"""Running a script as ``python script.py`` would: what it finds in ``sys`` and in its own module is the same."""

from __future__ import annotations

import importlib.machinery
import io
import os
import runpy
import sys
import types
from collections.abc import Sequence
from pathlib import Path


def run_module(name: str, arguments: Sequence[str]) -> None:
    """As ``python -m name arguments`` would, in a process started by ``python -m``."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python path arguments`` would, in a process started by ``python -m``.

    Not by ``runpy.run_path``, which shows the script another ``__file__`` or another ``sys.argv[0]``, and takes its
    module away before exit handlers run.

    Raises:
        FileNotFoundError: there is no such script.
    """
    if not Path(path).exists():
        raise FileNotFoundError(path)
    sys.argv = [path, *arguments]
    if Path(path).is_dir():  # with a __main__.py in it
        if not _is_safe_path():
            sys.path.pop(0)  # run_path puts the folder there
        runpy.run_path(path, run_name="__main__")
        return
    absolute = os.path.abspath(path)
    with io.open_code(absolute) as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=absolute,
        __builtins__=__builtins__,
        __cached__=None,
        __loader__=importlib.machinery.SourceFileLoader("__main__", absolute),
    )
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _set_first_path(folder: str) -> None:
    """``python -m`` has put the current folder first, ``python script`` puts the script's there."""
    if not _is_safe_path():
        sys.path[0] = folder


def _is_safe_path() -> bool:
    """Whether Python puts no folder first (``python -P``); there is no such flag in Python 3.10."""
    return bool(getattr(sys.flags, "safe_path", False))
