"""What a result was measured on, and how it is written."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import odc


def describe_environment() -> dict[str, object]:
    """Hardware, versions and date, for the ``environment`` entry of a result file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "odc": odc.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


WRITTEN = "bench/results"
"""What benchmarks write into the tree: two runs in turn are of the same code."""


WIDTH = 160
"""Of a line of a result."""


def commit() -> str:
    """Of the tree in which this runs, with "-dirty" if its code was changed since; empty where there is none."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    try:
        name = git("describe", "--always", "--exclude=*")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){WRITTEN}")
    except FileNotFoundError:
        return ""
    return f"{name}-dirty" if changed else name


def write(path: Path, document: Mapping[str, Any]) -> None:
    """As JSON, of numbers with six digits, all or nothing: whoever is killed meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    rounded = json.loads(json.dumps(document), parse_float=lambda text: float(f"{float(text):.6g}"))
    unfinished.write_text(_lines(rounded) + "\n")
    unfinished.replace(path)


def _lines(value: Any, indent: str = "") -> str:
    """JSON in which what fits stands on one line: a row of a table is one in a diff."""
    line = json.dumps(value)
    if len(indent) + len(line) <= WIDTH or not value or not isinstance(value, dict | list):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        entries = [f"{json.dumps(name)}: {_lines(entry, inner)}" for name, entry in value.items()]
    else:
        entries = [_lines(entry, inner) for entry in value]
    return f"\n{inner}".join([line[0], f",\n{inner}".join(entries)]) + f"\n{indent}{line[-1]}"
