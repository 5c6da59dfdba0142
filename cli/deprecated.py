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
    },
}
"""By command: an old option, and what to write now, with {} for its value."""

NOW_COMMANDS = {
    "plan modalities": {"--modality": "--modality {}", "--modalities": "--modality {}"},
    "plan context-parallel": {"--context-parallel": "--sizes {}"},
    "plan rollouts": {"--rollouts": ""},
    "plan hosts": {"--hosts": "--hosts {}"},
}
"""Options of ``odc plan`` for which there is a command now, and what to write behind that. The first one that is found
decides: a plan of rollouts has ``--hosts``, too."""


def modern(command: str, words: Sequence[str], commands: Container[str]) -> tuple[str, list[str], str]:
    """Which of the commands is called, its arguments as they are written now, and a warning if they were not so."""
    renamed = RENAMED.get(command, {})
    name = f"{command} {words[0]}" if words else command
    if name in commands:
        words = words[1:]
    else:
        given = {word.partition("=")[0] for word in words}
        name = next((new for new, old in NOW_COMMANDS.items() if command == "plan" and given & old.keys()), command)
        renamed = {**renamed, **NOW_COMMANDS.get(name, {})}
    arguments, found = [], {}
    rest = iter(words)
    for word in rest:
        old, equals, value = word.partition("=")
        if old not in renamed:
            arguments.append(word)
            continue
        found[old] = True
        if "{}" in renamed[old] and not equals:
            value = next(rest, "")
        arguments += [part.format(value) for part in renamed[old].split()]
    line = f"{', '.join(found)} will go with the next minor release. Write: odc {name} {shlex.join(arguments)}"
    return name, arguments, f"DeprecationWarning: {line}" if found else ""
