"""Layer 1: what three processes leave each other of the tests, without any of these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from sharing import FOLDER, PROCESSES, SECONDS, Share, missing_or_twice, position


class File:
    """As much of a collected test as is looked at: one per file."""

    def __init__(self, name: str) -> None:
        self.path, self.nodeid, self.session = Path(name), f"tests/{name}::test", Mock()


NAMES = [path.name for path in sorted(FOLDER.rglob("test_*.py"))]


def collect(share: Share) -> list[Any]:
    items: list[Any] = [File(name) for name in NAMES]
    share.order(cast(list[pytest.Item], items))
    return items


def test_each_test_runs_in_one_process_and_all_meet(tmp_path: Path) -> None:
    shares = [Share(tmp_path, name) for name in PROCESSES]
    left = [iter(collect(share)) for share in shares]
    for turn in [0, 1, 2, 1, 0, 0, 2, 0] * len(NAMES):  # the first one is quicker
        for item in left[turn]:  # until one is its own
            is_its_own = shares[turn].pytest_runtest_protocol(item) is None
            assert is_its_own == (item.nodeid in shares[turn].ran)
            if is_its_own:
                break
    for share in shares:
        share.pytest_sessionfinish()
    found = [json.loads((tmp_path / f"{name}.json").read_text()) for name in PROCESSES]
    assert all(len(one["ran"]) > len(NAMES) // 6 for one in found)
    assert missing_or_twice([f"tests/{name}::test" for name in NAMES], found) == []


def test_what_did_not_run_once_is_told() -> None:
    found = [{"ran": ["a", "b"]}, {"ran": ["b"]}]
    assert missing_or_twice(["a", "b", "c"], found) == ["b", "c"]


RUN_ALONE = """
import sys
from pathlib import Path
import sharing
sharing.FOLDER = Path(sys.argv[1])
sys.exit(sharing.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(("line", "code"), [("pass", 0), ("assert False", 1), ("os.kill(os.getpid(), 9)", 1)])
def test_a_failure_in_any_process_is_one_of_all(tmp_path: Path, line: str, code: int) -> None:
    for number in range(6):
        body = f"import os\ndef test():\n print('said {number}')\n {line if number == 4 else 'pass'}\n"
        (tmp_path / f"test_file_{number}.py").write_text(body)
    command = [
        sys.executable,
        "-c",
        RUN_ALONE,
        str(tmp_path),
        "-q",
        f"--rootdir={tmp_path}",
        f"--confcutdir={tmp_path}",
    ]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # which a process that is killed leaves something in
    done = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode != 0) == (code != 0), done.stdout + done.stderr
    if "kill" not in line:  # whether a process that is killed has its output captured yet depends on which one it is
        assert ("said 4" in done.stdout) == (line == "assert False")


def test_ranks_that_compute_come_first_and_the_longest_files_at_the_ends() -> None:
    seconds = {"test_ends.py": 9.0, "test_sessions.py": 2.0, "test_soak.py": 3.0, "test_cli_plan.py": 8.0}
    names = sorted([*seconds, "test_new.py"], key=lambda name: position(name, seconds))
    assert names == ["test_ends.py", "test_sessions.py", "test_new.py", "test_soak.py", "test_cli_plan.py"]


def test_recorded_seconds_are_of_files_that_exist() -> None:
    assert set(json.loads(SECONDS.read_text())) <= set(NAMES)
