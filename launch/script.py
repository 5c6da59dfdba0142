"""Runs a script as ``python script.py`` would, and prints one line if it fails. ``sys`` and the module are the same.

A rank writes its line to the file in which torchrun looks for errors. ``odc run`` reads the lines of the ranks of its
host, and how ranks without a line have ended. At the end it prints one line, of the rank whose error explains the
others. Under torchrun alone each rank prints its own line.
"""

from __future__ import annotations

import importlib.machinery
import io
import json
import os
import re
import runpy
import signal
import sys
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
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
    shorten,
    shown,
)
from odc.liveness.process import killed_by

_REFUSALS = (ConfigError, SetupError, UnsupportedError, ProtocolError)
_OTHERS_FAULT = (PeerClosedError, PeerDiedError, PeerSilentError)
_MARK = "odc"
"""Key of ODC's part of torchrun's error file."""


class Word(NamedTuple):
    """What a rank leaves for the launcher. The least one explains the others."""

    distance: int
    """From the cause: 0 where this rank's own error is it, 1 where it has found another rank gone, 2 where it was told
    of another rank's error, or a collective has failed under it."""
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


def last_line(error: BaseException, rank: int) -> str:
    """The line for people: of an error of ODC or of the script's own, with the script's line where it came up."""
    what = " ".join(str(error).split())
    if isinstance(error, OdcError):
        kind = "refused" if isinstance(error, _REFUSALS) else "failed"
        return f"odc: {kind}: {what}{_where(error)}"
    named = f"{type(error).__name__}: {shorten(what)}".removesuffix(": ")
    if isinstance(error, SystemExit):
        named = f"sys.exit({shown(error.code)})"
    return f"odc: failed: rank {rank}: {named}{_where(error)}"


def leave_last_words(launch: LaunchEnvironment, error: BaseException) -> bool:
    """Leave :func:`last_line` of ``error`` for the launcher; whether there is one to find it."""
    if not launch.error_file:
        return False
    line = last_line(error, launch.rank)
    word = Word(_distance(error), time.time(), line)
    # Shown in place of a traceback by torchrun, to which the oldest is the cause, and of two in one second the first.
    more = {"timestamp": str(int(word.at) + word.distance), "py_callstack": line, _MARK: word}
    try:
        Path(launch.error_file).write_text(json.dumps({"message": {"message": line, "extraInfo": more}}))
    except OSError as problem:  # a full disk does not hide why a script was refused
        print(f"odc: rank {launch.rank} cannot leave its error at {launch.error_file}: {problem}", flush=True)
        return False
    return True


def _distance(error: BaseException) -> int:
    if isinstance(error, OdcError):
        return 2 if isinstance(error, AbortedError) else 1 if isinstance(error, _OTHERS_FAULT) else 0
    raised_in = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return 2 if raised_in and raised_in[-1].startswith("torch.distributed") else 0


def last_words(failures: Mapping[int, Failure]) -> str:
    """What explains the end of the ranks: of those of this host that have failed, what the one says that is next to the
    cause, and how those have ended that say nothing."""
    words = {rank: word for rank, failure in failures.items() if (word := _left(failure)) is not None}
    lost = {
        rank: _how(failure.exitcode)
        for rank, failure in failures.items()
        if rank not in words and failure.exitcode != -signal.SIGTERM  # with which torchrun ends what is left
    }
    ends = "; ".join(f"rank {rank} {how}" for rank, how in sorted(lost.items()))
    rank = min(words, key=lambda rank: (words[rank], rank), default=-1)
    if rank == -1 or (words[rank].distance == 2 and lost):
        return f"odc: failed: {ends or 'the ranks were ended by SIGTERM'}; what they printed, or dmesg, may tell why"
    line = words[rank].line
    if len({word.line for word in words.values()}) > 1 and not re.search(rf"\brank {rank}\b", line):
        line = f"{line}, on rank {rank}"
    is_said = words[rank].distance == 0 or all(how.removeprefix("was ") in line for how in lost.values())
    return line if is_said else f"{line}; {ends}"


def _how(exitcode: int) -> str:
    return f"exited with status {exitcode}" if exitcode >= 0 else f"was {killed_by(-exitcode)}"


def _left(failure: Failure) -> Word | None:
    """The word that a rank left, if any."""
    message = failure.message
    word = message.get("extraInfo", {}).get(_MARK) if isinstance(message, Mapping) else None
    return Word(*word) if word is not None else None


def without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the script's first line on, as Python would print it; all of it if it never came there."""
    found = trace
    while found is not None and not _is_script(found.tb_frame):
        found = found.tb_next
    return found or trace


def _where(error: BaseException) -> str:
    """The innermost line of the script itself: that asked for what is refused, or raised."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        if _is_script(frame):
            return f" ({frame.f_code.co_filename}, line {number})"
    return ""


def _is_script(frame: FrameType) -> bool:
    spec = frame.f_globals.get("__spec__")
    return frame.f_globals.get("__name__") == "__main__" and (spec is None or spec.name != "odc.run")
