"""Running a script as ``python script.py`` would, and the one line with which it ends where ODC refused it.

What a script finds in ``sys`` and in its own module is the same.

A rank that refuses leaves its sentence where torchrun looks for the error of a rank, instead of a traceback that
torchrun's own output would bury; ``odc run`` finds it there and says it once, last. Under torchrun alone the rank says
it itself.
"""

from __future__ import annotations

import importlib.machinery
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from odc.config import LaunchEnvironment
from odc.errors import AbortedError, ConfigError, PeerClosedError, PeerDiedError, SetupError, UnsupportedError

_REFUSALS = (UnsupportedError, SetupError, ConfigError)
_OTHERS_FAULT = (AbortedError, PeerClosedError, PeerDiedError)
_MARK = "odc"
"""Key of what this rank's end was, in torchrun's error file: "refused", or "told" where another rank failed first."""


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


class Failure(Protocol):
    """What torchrun knows of a rank that failed."""

    exitcode: int
    message: Any


def refusal(error: BaseException) -> str | None:
    """The line for people if ``error`` is ODC refusing a script, with the script's line where it did; else None."""
    if not isinstance(error, _REFUSALS):
        return None
    return f"odc: refused: {' '.join(str(error).split())}{_where(error)}"


def leave_last_words(launch: LaunchEnvironment, error: BaseException, line: str | None = None) -> None:
    """Leave ``line``, or what ``error`` says, for the launcher, if one looks for it.

    Only of errors that are ODC's: what a script raises itself has its own traceback.
    """
    kind = "refused" if line is not None else "told" if isinstance(error, _OTHERS_FAULT) else None
    if kind is None or not launch.error_file:
        return
    text = line or f"{type(error).__name__}: {error}"
    more = {"timestamp": str(int(time.time())), "py_callstack": text, _MARK: kind}  # shown in place of a traceback
    try:
        Path(launch.error_file).write_text(json.dumps({"message": {"message": text, "extraInfo": more}}))
    except OSError as problem:  # a full disk does not hide why a script was refused
        print(f"odc: rank {launch.rank} cannot leave its error at {launch.error_file}: {problem}", flush=True)


def last_words(failures: Mapping[int, Failure]) -> str | None:
    """What the ranks left if ODC refused the script on one and no other failed for a reason of its own; else None."""
    left = {rank: _left(failure) for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    lines = [line for _, (kind, line) in sorted(left.items()) if kind == "refused"]
    return lines[0] if lines and all(kind for kind, _ in left.values()) else None


def _left(failure: Failure) -> tuple[str, str]:
    """What kind of word a rank left, and the word; both empty if none."""
    if not isinstance(failure.message, Mapping):
        return "", ""
    kind = failure.message.get("extraInfo", {}).get(_MARK, "")
    return str(kind), str(failure.message.get("message", ""))


def _where(error: BaseException) -> str:
    """The innermost line of the script itself, which asked for what is refused."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        spec = frame.f_globals.get("__spec__")
        if frame.f_globals.get("__name__") == "__main__" and (spec is None or spec.name != "odc.run"):
            return f" ({frame.f_code.co_filename}, line {number})"
    return ""
