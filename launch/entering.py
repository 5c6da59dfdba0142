"""What every Python process below ``odc exec`` runs first: one that is a rank goes on as ``python -m odc.run``.

``odc exec`` lays this file as ``sitecustomize.py`` into a folder on PYTHONPATH, where Python's start finds it. So it
imports nothing but the standard library, and reads the environment by itself. A rank is a process with RANK, LOCAL_RANK
and MASTER_ADDR, as torchrun and those that call it set them, and with a script or module of its own; what a rank starts
is none.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence

OPTIONS = "_ODC_EXEC_OPTIONS"
"""The options of ``odc run`` for the ranks, as a shell has them."""
ENTERED = "_ODC_EXEC_ENTERED"
"""Set in a rank, and so in what it starts."""
_OF_A_RANK = {"RANK", "LOCAL_RANK", "MASTER_ADDR"}
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs")


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Python's own options, and what it runs with its arguments: a script, or -m and a module. None: neither.

    >>> split_command(["python", "-u", "-X", "dev", "train.py", "--lr", "1"])
    (['-u', '-X', 'dev'], ['train.py', '--lr', '1'])
    """
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-m":
        if words[at].startswith("-c") or words[at] == "-":
            return None
        at += 2 if words[at] in _WITH_VALUE else 1
    return (list(words[1:at]), list(words[at:])) if at < len(words) else None


def enter() -> None:
    """Go on as ``odc run`` if this process is a rank; else let another ``sitecustomize``, which this one hides, run."""
    found = split_command(sys.orig_argv)
    folder = os.path.dirname(os.path.abspath(__file__))
    if found is not None and os.environ.keys() >= _OF_A_RANK and ENTERED not in os.environ:
        flags, script = found
        os.environ[ENTERED] = "1"
        with open(os.path.join(folder, f"rank{os.environ['RANK']}"), "w"):
            pass  # for `odc exec` to see
        options = shlex.split(os.environ.get(OPTIONS, ""))
        os.execv(sys.executable, [sys.executable, *flags, "-m", "odc.run", *options, *script])
    others = [path for path in sys.path if os.path.abspath(path) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    enter()
