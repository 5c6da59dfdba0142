"""All tests in three processes, on two cores: ``python tests/sharing.py [pytest options]``, as ``make test`` calls it
(through ``supervising.py``).

One process collects the tests, which takes as long as many of them, and then forks the others. The files stand in one
order: those whose ranks compute first, the longest of them at the front, then those that need one core or mostly wait,
the longest of them at the back. One process takes files from the front and two from the back, until they meet. So what
needs both cores runs beside what does not, and what comes last is short. Each file runs in one of the processes, each
test once: that is checked in the end.
"""

from __future__ import annotations

import ctypes
import fnmatch
import gc
import json
import os
import shutil
import signal
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
    *("test_closing.py", "test_layout.py", "test_mutants.py", "test_network.py", "test_set_up_ends.py", "test_soak.py"),
)
"""Files of tests that need one core or mostly wait."""
COMPUTE = ("test_balance_loader*.py", "test_bench_gpu*.py", "test_bench_parity.py")
"""Exceptions from that."""
_PR_SET_PDEATHSIG = 1
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

    def __init__(self, folder: Path, name: str = PROCESSES[0]) -> None:
        self.folder, self.name = folder, name
        self.children: dict[int, str] = {}  # by process number
        self.claims: dict[str, bool] = {}
        self.seconds: dict[str, float] = {}
        self.ran: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if session.testsfailed or session.config.option.collectonly:
            return
        (self.folder / "collected.json").write_text(json.dumps([item.nodeid for item in session.items]))
        gc.collect()
        gc.freeze()  # what all have imported is looked at, and so copied, by none of them
        gc.set_threshold(20_000, 20, 20)
        gc.enable()
        for name in PROCESSES[1:]:
            pid = os.fork()
            if pid == 0:
                self.name, self.children = name, {}
                self._be_alone(session.config)
                break
            self.children[pid] = name
        self.order(session.items)

    def _be_alone(self, config: pytest.Config) -> None:
        """In a fork: nothing is shared with the others that one of them would change."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        capture: Any = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()
        output = os.open(self.output_of(self.name), os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        capture.start_global_capturing()
        capture.suspend_global_capture()
        import own_shm  # not above: whatever a process of ranks imports of this script, it has no path to that

        own_shm.leave_dev_shm()

    def output_of(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def order(self, items: list[pytest.Item]) -> None:
        """As this process takes them."""
        seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        names = sorted({item.path.name for item in items}, key=lambda name: (position(name, seconds), name))
        ranks = {name: i for i, name in enumerate(names if self.name == PROCESSES[0] else reversed(names))}
        items.sort(key=lambda item: ranks[item.path.name])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if not self._is_ours(item.path.name):
            return True  # another process runs it
        item.session._setupstate.teardown_exact(item)  # of the folder before, if what came in between was not run here
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
        found = {"ran": self.ran, "seconds": self.seconds}
        (self.folder / f"{self.name}.json").write_text(json.dumps(found))

    def await_others(self) -> list[int]:
        """The exit codes of the other processes, and on standard output what they have said."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # they get it, too, and end
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.children]
        for name in self.children.values():
            sys.stdout.write(self.output_of(name).read_text(errors="replace"))
        return codes


def missing_or_twice(collected: Sequence[str], found: Sequence[dict[str, Any]]) -> list[str]:
    """Tests that did not run exactly once."""
    ran = Counter(test for one in found for test in one["ran"])
    return sorted(test for test in {*collected, *ran} if ran[test] != 1)


def main(options: Sequence[str]) -> int:
    """Run all tests; the worst of the processes' exit codes, or 1 if a test was left out."""
    folder = Path(tempfile.mkdtemp(prefix="odc-tests-"))
    try:
        return _run_all(folder, options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run_all(folder: Path, options: Sequence[str]) -> int:
    is_recorded = "--record" in options
    share = Share(folder)
    arguments = [str(FOLDER), "--durations=10", *(o for o in options if o != "--record")]
    codes = [1]
    gc.disable()  # while imported objects become more and more, all of them would be looked at again and again
    try:
        codes = [int(pytest.main(arguments, plugins=[share]))]
    finally:
        gc.enable()
        sys.stdout.flush()
        if share.name != PROCESSES[0]:
            os._exit(codes[0])  # a fork: what is around this call belongs to the first process
    codes += share.await_others()
    if not share.children:  # nothing was to be run
        return codes[0]
    results = [folder / f"{name}.json" for name in PROCESSES]
    if not all(result.exists() for result in results):
        print("a test process ended before its end")
        return max(*map(abs, codes), 1)
    found = [json.loads(result.read_text()) for result in results]
    wrong = missing_or_twice(json.loads((folder / "collected.json").read_text()), found)
    if wrong and not any(codes):
        print("did not run exactly once:", *wrong, sep="\n  ")
    if is_recorded and not any(codes):
        seconds = {name: round(s) for one in found for name, s in one["seconds"].items() if s >= 1}
        SECONDS.write_text(json.dumps(seconds, indent=1, sort_keys=True) + "\n")
    return max(*map(abs, codes), int(bool(wrong)))


if __name__ == "__main__":
    import sharing  # by the name that its test has for it

    sys.exit(sharing.main(sys.argv[1:]))
