"""Layer 3. Interrupted tests leave no process behind, whatever their processes do about signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watching import scheduler_state, until

LIMIT_S = 60.0  # the promise is 5 s, on a machine that has time for it

FOLDER = Path(__file__).parents[1]
RUN = """
import sys
import supervising
supervising._GRACE_S = float(sys.argv[1])
share = "import sharing, sys; sharing.FOLDER = sharing.Path(sys.argv[1]); sys.exit(sharing.main(sys.argv[2:]))"
sys.exit(supervising.main(["-c", share, *sys.argv[2:]]))
"""

COMMON = """
import os, signal, subprocess, sys, time
from pathlib import Path
import pytest

NOTES = Path(__file__).parent / "notes"
IGNORE = "import signal; [signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]; "
SLEEP = "import time; time.sleep(300)"

def note(name, pid):
    (NOTES / f"{name}.new").write_text(str(pid))
    (NOTES / f"{name}.new").rename(NOTES / name)

def start(name, code, **options):
    process = subprocess.Popen([sys.executable, "-c", code], **options)
    note(name, process.pid)
    return process
"""

TESTS = {
    # One file per process that runs tests: each of them is claimed by another one, since none of them ends.
    "test_torn_down.py": """
@pytest.fixture
def helper():
    process = start("helper", SLEEP, start_new_session=True)
    yield
    process.kill()
    process.wait()
    note("torn down", os.getpid())

def test(helper):
    start("ignores", IGNORE + SLEEP)
    note("share 1", os.getpid())
    time.sleep(300)
""",
    "test_in_c.py": """
def test():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
    Path(f"/dev/shm/torch_{os.getpid()}_1_0").touch()
    start("in a session", IGNORE + SLEEP, start_new_session=True)
    note("share 2", os.getpid())
    time.sleep(300)
""",
    "test_orphan.py": """
def test():
    # A process whose parent is gone, in a session of its own, that starts another one.
    code = "import subprocess as s, sys; print(s.Popen([sys.executable, '-c', sys.argv[1]], stdout=s.DEVNULL).pid)"
    command = [sys.executable, "-c", IGNORE + code, IGNORE + SLEEP]
    note("orphan", subprocess.run(command, stdout=-1, start_new_session=True, check=True).stdout.decode())
    process = start("stopped", SLEEP)
    process.send_signal(signal.SIGSTOP)
    note("share 3", os.getpid())
    time.sleep(300)
""",
}
NOTED = ("helper", "ignores", "in a session", "orphan", "stopped", "share 1", "share 2", "share 3")


class Runner:
    """The runner of the tests, with three tests that do not end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, folder / "notes"
        self.temporary = folder / "temporary"
        self.process: subprocess.Popen[str] | None = None

    def start(self, grace_s: float) -> subprocess.Popen[str]:
        self.notes.mkdir()
        self.temporary.mkdir()
        for name, body in TESTS.items():
            (self.folder / name).write_text(COMMON + body)
        options = ["-q", f"--rootdir={self.folder}", f"--confcutdir={self.folder}"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, str(grace_s), str(self.folder), *options],
            cwd=FOLDER,
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "output.txt").open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # what a terminal would send to its foreground group reaches this one only
        )
        until(lambda: all((self.notes / name).exists() for name in NOTED), f"not all have started: {self.output()}")
        return self.process

    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def pids(self) -> dict[str, int]:
        return {path.name: int(path.read_text()) for path in self.notes.iterdir() if path.suffix != ".new"}

    def alive(self) -> list[str]:
        return [name for name, pid in self.pids().items() if scheduler_state(pid) != "Z"]


@pytest.fixture
def runner(tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(tmp_path)
    yield runner
    if runner.process is not None:
        runner.process.kill()
        runner.process.wait()
    for name in runner.alive():
        os.kill(runner.pids()[name], signal.SIGKILL)
    for left in Path("/dev/shm").glob("torch_*"):
        left.unlink()


def ctrl_c(pid: int) -> None:
    os.killpg(pid, signal.SIGINT)


def ctrl_c_twice(pid: int) -> None:
    ctrl_c(pid)
    until(lambda: not is_pending(pid, signal.SIGINT), "the signal was not received")  # two that are pending are one
    ctrl_c(pid)


def is_pending(pid: int, number: signal.Signals) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pending = next(int(line.split()[1], 16) for line in lines if line.startswith("ShdPnd:"))
    return bool(pending & 1 << (number - 1))


def terminate(pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


@pytest.mark.parametrize(("end", "code"), [(ctrl_c, 130), (terminate, 143)])
@pytest.mark.parametrize("grace_s", [0.5, 10 * LIMIT_S])
def test_nothing_is_left_of_interrupted_tests(
    runner: Runner, end: Callable[[int], None], code: int, grace_s: float
) -> None:
    process = runner.start(grace_s)
    assert sorted(runner.alive()) == sorted(NOTED)
    end(process.pid)
    if grace_s > LIMIT_S:  # tests tear down what they have set up; then one who does not wait for the rest
        until(lambda: (runner.notes / "torn down").exists(), f"nothing was torn down: {runner.output()}")
        end(process.pid)
    assert process.wait(LIMIT_S) == code, runner.output()
    assert runner.alive() == []
    assert list(Path("/dev/shm").glob("torch_*")) == []


def test_a_second_signal_leaves_no_time_to_tear_down(runner: Runner) -> None:
    process = runner.start(10 * LIMIT_S)
    ctrl_c_twice(process.pid)
    assert process.wait(LIMIT_S) == 130, runner.output()
    assert runner.alive() == []
    assert list(Path("/dev/shm").glob("torch_*")) == []


LEAVE_BEHIND = """
def test():
    start("left", IGNORE + SLEEP, start_new_session=True)
"""


def test_what_outlives_its_test_is_named_and_ends_with_the_tests(runner: Runner, tmp_path: Path) -> None:
    (runner.notes).mkdir()
    (tmp_path / "test_leaving.py").write_text(COMMON + LEAVE_BEHIND)
    command = [sys.executable, "-c", RUN, "0.5", str(tmp_path), f"--rootdir={tmp_path}"]
    done = subprocess.run(
        [*command, f"--confcutdir={tmp_path}"], cwd=FOLDER, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert runner.alive() == []
    assert f"outlived the tests, and are killed: {runner.pids()['left']} (python" in done.stderr
