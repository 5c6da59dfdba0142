"""Rewrites arguments of an older release before they are parsed. A warning says what to write instead."""

from __future__ import annotations

import shlex
from collections.abc import Container, Sequence

_OF_COSTS = ("timings", "mfu", "microbatch-cost", "chars-per-token", "seed")
_OF_PLANS = ("samples", "minibatches", "batch-size", "noise", "speeds", "gather-ms", "scatter-ms", "odc-slower")

RENAMED = {
    "simulate": {f"--{key}": f"--set {key}={{}}" for key in _OF_COSTS},
    "plan": {
        **{f"--{key}": f"--set {key}={{}}" for key in (*_OF_COSTS, *_OF_PLANS, "overlap", "panel")},
        "--recompute": "--set recompute=yes",
        "--no-recompute": "--set recompute=no",
        "--reorder": "--set reorder=yes",
        "--no-reorder": "--set reorder=no",
        "--truncate": "--set truncate=yes",
        "--context-parallel": "context-parallel --sizes {}",
        "--hosts": "hosts --hosts {}",
        "--rollouts": "rollouts",
        "--modality": "modalities --modality {}",
        "--modalities": "modalities --modality {}",
    },
}
"""By command: an old option, and what to write now, with {} for its value. A first word without hyphens is a mode, the
second word of a command."""


def modern(command: str, words: Sequence[str], commands: Container[str]) -> tuple[str, list[str], str]:
    """Which of the commands is called, its arguments as they are written now, and a warning if they were not so.

    Raises:
        ValueError: two old options are those of different modes.
    """
    modes = {word for word in words[:1] if f"{command} {word}" in commands}
    renamed = RENAMED.get(command, {})
    if modes:  # options of modes have kept their names
        renamed = {old: new for old, new in renamed.items() if new.startswith("--")}
    arguments, found = [], []
    rest = iter(words[len(modes) :])
    for word in rest:
        old, equals, value = word.partition("=")
        if old not in renamed:
            arguments.append(word)
            continue
        found.append(old)
        new = renamed[old]
        if new.endswith("{}") and not equals:
            value = next(rest, "")
        written = [part.format(value) for part in new.split()]
        if not new.startswith("--"):
            modes.add(written.pop(0))
        arguments += written
    if modes == {"rollouts", "hosts"}:  # plans of rollouts have hosts, too
        modes = {"rollouts"}
    if len(modes) > 1:
        raise ValueError(f"{' and '.join(sorted(modes))} are different plans: expected the options of one of them")
    name = " ".join([command, *modes])
    if not found:
        return name, arguments, ""
    old_ones = ", ".join(dict.fromkeys(found))
    line = f"odc {name} {shlex.join(arguments)}"
    return name, arguments, f"DeprecationWarning: {old_ones} will go with the next minor release. Write: {line}"
