"""All tests in three processes, on two cores: ``python tests/sharing.py [pytest options]``, as ``make test`` calls it.

The files stand in one order: those whose ranks compute first, the longest of them at the front, then those that need
one core or mostly wait, the longest of them at the back. One process takes files from the front and two from the back,
until they meet. So what needs both cores runs beside what does not, and what comes last is short. Each file runs in
one of the processes, each test once: that is checked in the end.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
PROCESSES = ("front", "back", "back too")
BESIDE = (
    *("test_balance_*.py", "test_bench_*.py", "test_cli_*.py", "test_kernels_*.py", "test_faults*.py", "test_link*.py"),
    *("test_closing.py", "test_layout.py", "test_network.py", "test_set_up_ends.py", "test_soak.py"),
)
"""Files of tests that need one core or mostly wait."""
COMPUTE = ("test_balance_loader*.py", "test_bench_gpu*.py", "test_bench_parity.py")
"""Exceptions from that."""
SECONDS = FOLDER / "seconds.json"
"""What each file took on two cores. ``--record`` writes it anew; a file that it lacks counts as short."""


def position(name: str, seconds: dict[str, float]) -> float:
    """Where a file stands between front (negative) and back."""
    waits = any(fnmatch.fnmatch(name, p) for p in BESIDE) and not any(fnmatch.fnmatch(name, p) for p in COMPUTE)
    return seconds.get(name, 0.0) * (1 if waits else -1)


class Share:
    """A pytest plugin: this process's part of the tests.

    A file is claimed by making a file of its name in a folder that the processes share, which only one of them can do.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.claims: dict[str, bool] = {}
        self.seconds: dict[str, float] = {}
        self.collected: list[str] = []
        self.ran: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        names = sorted({item.path.name for item in items}, key=lambda name: (position(name, seconds), name))
        ranks = {name: i for i, name in enumerate(names if self.name == "front" else reversed(names))}
        items.sort(key=lambda item: ranks[item.path.name])
        self.collected = [item.nodeid for item in items]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._is_ours(item.path.name):
            return True  # the other process runs it
        self.ran.append(item.nodeid)
        return None

    def _is_ours(self, name: str) -> bool:
        if name not in self.claims:
            try:
                os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
                self.claims[name] = True
            except FileExistsError:
                self.claims[name] = False
        return self.claims[name]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = Path(report.fspath).name
        self.seconds[name] = self.seconds.get(name, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        found = {"collected": self.collected, "ran": self.ran, "seconds": self.seconds}
        (self.folder / f"{self.name}.json").write_text(json.dumps(found))


def missing_or_twice(found: Sequence[dict[str, Any]]) -> list[str]:
    """Tests that did not run exactly once. All processes have collected the same."""
    ran = Counter(test for one in found for test in one["ran"])
    return sorted(test for test in {t for one in found for t in one["collected"]} | set(ran) if ran[test] != 1)


def main(options: Sequence[str]) -> int:
    """Run all tests; the worse of the two exit codes, or 1 if a test was left out."""
    is_recorded = "--record" in options
    command = [sys.executable, "-m", "pytest", str(FOLDER), "--durations=10", *(o for o in options if o != "--record")]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="odc-tests-"))
        # What the first one says is shown at once, what the others say when all have ended.
        outputs = [None, *(stack.enter_context(tempfile.TemporaryFile("w+")) for _ in PROCESSES[1:])]
        shares = [f"--share={name}:{folder}" for name in PROCESSES]
        processes = [
            subprocess.Popen([*command, share], stdout=output) for share, output in zip(shares, outputs, strict=True)
        ]
        try:
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.terminate()
                process.wait()
        for output in filter(None, outputs):
            output.seek(0)
            sys.stdout.write(output.read())
        results = [Path(folder, f"{name}.json") for name in PROCESSES]
        if not all(result.exists() for result in results):
            print("a test process ended before its end")
            return max(*codes, 1)
        found = [json.loads(result.read_text()) for result in results]
    wrong = missing_or_twice(found)
    if wrong and not any(codes):
        print("did not run exactly once:", *wrong, sep="\n  ")
    if is_recorded and not any(codes):
        seconds = {name: round(s) for one in found for name, s in one["seconds"].items() if s >= 1}
        SECONDS.write_text(json.dumps(seconds, indent=1, sort_keys=True) + "\n")
    return max(*map(abs, codes), int(bool(wrong)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
