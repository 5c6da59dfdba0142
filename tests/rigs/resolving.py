"""What pip would install, found out from metadata: nothing is installed, and no wheel that is large is downloaded.

pip asks its own configured index. It reads the metadata of a wheel alone if the index offers it beside the wheel (or
serves parts of files), and downloads all of the wheel if not: then there is no answer here, because CUDA builds of
torch and what they demand are gigabytes.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_PIP = "pip>=26"  # older ones download in a dry run
_SMALL = "nvshmem4py-cu13"  # to try with what an index can do
_LIMIT_S = 300.0
_NOTHING = re.compile(r"No matching distribution found for|Could not find a version that satisfies")
_NO_INDEX = re.compile(r"ConnectionError|NewConnectionError|Max retries exceeded|Could not fetch URL|ConnectTimeout")
_WHOLE_WHEEL = re.compile(r"^ *Downloading \S+\.whl \(", re.MULTILINE)


class NotResolvedError(Exception):
    """pip has no solution, or nothing to make one from; the text is what it said."""


@dataclass(frozen=True)
class Resolver:
    """A pip that reads metadata only. ``folder`` is for its files."""

    pip: Path
    folder: Path

    def resolve(self, *requirements: object, options: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """The metadata of what pip would install into an empty environment, by normalized name.

        Raises:
            NotResolvedError: there is no solution.
        """
        report = self.folder / "report.json"
        report.unlink(missing_ok=True)
        how = ("--dry-run", "--ignore-installed", "--no-cache-dir", "--use-feature=fast-deps", "--report", str(report))
        done = self.run("install", *how, "--only-binary=:all:", *options, *map(str, requirements))
        if done.returncode != 0:
            raise NotResolvedError(f"{done.stdout}\n{done.stderr}")
        if whole := _WHOLE_WHEEL.findall(done.stdout):
            pytest.skip(f"the package index has no metadata apart from the wheels:{whole[0]}")
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
        return {re.sub(r"[-_.]+", "-", metadata["name"]).lower(): metadata for metadata in found}

    def versions(self, *requirements: object, options: Sequence[str] = ()) -> dict[str, str]:
        """The same, as versions by name."""
        return {n: str(m["version"]) for n, m in self.resolve(*requirements, options=options).items()}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(self.pip), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False, cwd=self.folder)

    def download(self, requirement: str) -> Path:
        """The wheel of one requirement, without what it requires; skips the test if the index does not have it."""
        folder = self.folder / re.sub(r"\W+", "_", requirement)
        done = self.run(
            "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "-d", str(folder), requirement
        )
        if done.returncode != 0:
            reason = reason_to_skip(done.stderr)
            if reason is None:
                raise NotResolvedError(done.stderr)
            pytest.skip(f"{requirement}: {reason}")
        (wheel,) = folder.iterdir()
        return wheel


def reason_to_skip(output: str) -> str | None:
    """Why pip's failure says nothing about versions, or None: it does."""
    if _NO_INDEX.search(output):
        return "the package index cannot be reached"
    if _NOTHING.search(output) and "conflict" not in output:
        return "the package index does not have it for this platform and this Python"
    return None


def make_resolver(folder: Path) -> Resolver:
    """Skips the test where there is no index, or one that serves whole wheels only."""
    pip = folder / "pip"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(pip), _PIP]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"{_PIP}, which resolves without downloading, cannot be installed: {done.stderr.strip()[-200:]}")
    resolver = Resolver(pip / "pip", folder)
    try:
        resolver.resolve(_SMALL, options=["--no-deps"])
    except NotResolvedError as problem:
        pytest.skip(f"{_SMALL}: {reason_to_skip(str(problem)) or problem}")
    return resolver
