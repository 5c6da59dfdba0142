"""What every Python process below ``odc exec`` runs first: one that is a rank goes on as ``python -m odc.run``.

``odc exec`` lays this file as ``sitecustomize.py`` into a folder on PYTHONPATH, where Python's start finds it. So it
imports nothing but the standard library, and reads the environment by itself. A rank is a process with the variables
that torchrun sets, or ``srun`` or ``mpirun`` for each of several tasks, and with a script or module of its own. A
launcher is none, nor is what a rank starts; but a task of ``srun`` may start ``torchrun``, whose ranks are.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shlex
import sys
from collections.abc import Sequence

OPTIONS = "_ODC_EXEC_OPTIONS"
"""The options of ``odc run`` for the ranks, as a shell has them."""
ENTERED = "_ODC_EXEC_ENTERED"
"""Set in a rank, and so in what it starts: the variable that has told its number."""
_OF_A_RANK = (
    ("RANK", "LOCAL_RANK", "MASTER_ADDR"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE"),
)
"""By launcher: its number, that on its host, and what one task by itself has not, or as 1."""
_LAUNCHERS = {
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "deepspeed"),
    *("accelerate launch", "accelerate.commands.launch", "odc.run"),
}


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Python's own options, and what it runs with its arguments: a script, or -m and a module. None: neither.

    >>> split_command(["python", "-uX", "dev", "train.py", "--lr", "1"])
    (['-uX', 'dev'], ['train.py', '--lr', '1'])
    >>> split_command(["python", "-um", "train", "--lr", "1"])
    (['-u'], ['-m', 'train', '--lr', '1'])
    """
    flags, rest = list[str](), list(words[1:])
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        word = rest.pop(0)
        # Letters before the first that takes a value, this one, and its value, unless that is the next word.
        [(before, kind, value)] = re.findall(r"^(--.*|-[^cmWX]*)([cmWX]?)(.*)$", word)
        if kind == "c":
            return None
        if kind == "m":
            return flags + [before] * (before != "-"), ["-m", *filter(None, [value]), *rest]
        flags += [word, *rest[: bool(kind and not value)]]
        rest = rest[bool(kind and not value) :]
    rest = rest[rest[:1] == ["--"] :]
    return (flags, rest) if rest and rest[0] != "-" else None


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether that is the command line of a launcher: what it starts are ranks, and it is none.

    >>> starts_ranks(["python", "-u", "-m", "torch.distributed.run", "x.py"]), starts_ranks(["accelerate", "env"])
    (True, False)
    """
    if os.path.basename(words[0]).startswith("python"):
        found = split_command(words)
        words = ["", ""] if found is None else found[1][found[1][:1] == ["-m"] :]
    name = os.path.basename(words[0])
    return bool(_LAUNCHERS & {name, " ".join([name, *words[1:2]])})


def number_variable() -> str | None:
    """The variable with this process's number, if it is a rank."""
    if starts_ranks(sys.orig_argv):
        return None
    for names in _OF_A_RANK:
        if os.environ.keys() >= set(names) and os.environ[names[2]] != "1":
            return None if os.environ.get(ENTERED) in ("RANK", names[0]) else names[0]
    return None


def enter() -> None:
    """Go on as ``odc run`` if this process is a rank; else let another ``sitecustomize``, which this one hides, run."""
    found = split_command(sys.orig_argv)
    folder = os.path.dirname(os.path.abspath(__file__))
    number = number_variable()
    if found is not None and number is not None:
        flags, script = found
        os.environ[ENTERED] = number
        with open(os.path.join(folder, f"rank{os.environ[number]}"), "w"):
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
