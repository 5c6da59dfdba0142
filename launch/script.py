"""Running a script as ``python script.py`` would, and the one line with which it ends where an error of ODC ended it.

What a script finds in ``sys`` and in its own module is the same.

A rank leaves its line where torchrun looks for the error of a rank, instead of a traceback that torchrun's own output
would bury; ``odc run`` finds what the ranks of its host have left and says one line, last: of the rank whose error
explains those of the others. Under torchrun alone each rank says its own.
"""

from __future__ import annotations

import importlib.machinery
import io
import json
import os
import runpy
import sys
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from odc.config import LaunchEnvironment
from odc.errors import (
    AbortedError,
    ConfigError,
    OdcError,
    PeerClosedError,
    PeerDiedError,
    PeerSilentError,
    ProtocolError,
    SetupError,
    UnsupportedError,
)

_REFUSALS = (ConfigError, SetupError, UnsupportedError, ProtocolError)
_OTHERS_FAULT = (PeerClosedError, PeerDiedError, PeerSilentError)
_MARK = "odc"
"""Key of ODC's part of torchrun's error file."""


class Word(NamedTuple):
    """What a rank leaves for the launcher. The least one explains the others."""

    distance: int
    """From the cause: 0 where this rank's own error is it, 1 where it has found another rank gone, 2 where it was told
    of another rank's error."""
    at: float
    """On the clock of the host."""
    line: str


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


def last_line(error: BaseException) -> str | None:
    """The line for people if ``error`` is one of ODC's, with the script's line where it came up; else None."""
    if not isinstance(error, OdcError):
        return None
    what = "refused" if isinstance(error, _REFUSALS) else "failed"
    return f"odc: {what}: {' '.join(str(error).split())}{_where(error)}"


def leave_last_words(launch: LaunchEnvironment, error: BaseException) -> bool:
    """Leave :func:`last_line` of ``error`` for the launcher; whether there is such a line, and a launcher to find it.

    Only of errors that are ODC's: what a script raises itself has its own traceback.
    """
    line = last_line(error)
    if line is None or not launch.error_file:
        return False
    distance = 2 if isinstance(error, AbortedError) else 1 if isinstance(error, _OTHERS_FAULT) else 0
    word = Word(distance, time.time(), line)
    more = {"timestamp": str(int(word.at)), "py_callstack": line, _MARK: word}  # shown in place of a traceback
    try:
        Path(launch.error_file).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))
    except OSError as problem:  # a full disk does not hide why a script was refused
        print(f"odc: rank {launch.rank} cannot leave its error at {launch.error_file}: {problem}", flush=True)
        return False
    return True


def last_words(failures: Mapping[int, Failure]) -> str | None:
    """What explains the end of the ranks, if each of them ended with an error of ODC, or by a signal; else None.

    A rank that has failed for a reason of its own has said it in its own traceback.
    """
    left = {rank: _left(failure) for rank, failure in failures.items()}
    if any(word is None and failures[rank].exitcode >= 0 for rank, word in left.items()):
        return None
    words = {rank: word for rank, word in left.items() if word is not None}
    if not words:
        return None
    rank = min(words, key=lambda rank: (words[rank], rank))
    is_everyones = len({word.line for word in words.values()}) == 1
    return words[rank].line if is_everyones else f"{words[rank].line}, on rank {rank}"


def _left(failure: Failure) -> Word | None:
    """The word that a rank left, if any."""
    message = failure.message
    word = message.get("extraInfo", {}).get(_MARK) if isinstance(message, Mapping) else None
    return Word(*word) if word is not None else None


def _where(error: BaseException) -> str:
    """The innermost line of the script itself, which asked for what is refused."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        spec = frame.f_globals.get("__spec__")
        if frame.f_globals.get("__name__") == "__main__" and (spec is None or spec.name != "odc.run"):
            return f" ({frame.f_code.co_filename}, line {number})"
    return ""
