"""Break ODC in one small way at a time, and see that tests notice: ``python mutants/run.py [NAME ...]``.

``table.py`` has the mutants: faults that somebody could really make, and which tests have to notice. Each is made in a
copy of this tree, and these tests are run there, by the Python that runs this file. A failure kills the mutant, and so
does a run beyond the time limit. What survives is a gap in the tests. First the tests have to pass without a mutant.

[Note: The copy is what is imported] ODC may be installed from this very tree, where Python would find it. So the copy's
package comes first in PYTHONPATH, which ranks and commands inherit; and a line behind the mutated file notes that it
was executed. Where no process has, the run says nothing, and counts as an error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from table import MUTANTS, Mutant

HERE = Path(__file__).resolve().parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "runs", "*.egg-info")
TIME_LIMIT_S = 300.0
_KILLER = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of one; ``by``: the test that has killed it, or why it lives."""

    name: str
    is_killed: bool
    by: str
    seconds: float


def apply(mutant: Mutant, tree: Path) -> None:
    """Make its fault in a copy.

    Raises:
        ValueError: what it changes does not stand there once.
    """
    path = tree / mutant.file
    text = path.read_text()
    for before, after in mutant.changes:
        if text.count(before) != 1:
            raise ValueError(f"{mutant.file} has {before!r} {text.count(before)} times; make the fault in today's code")
        text = text.replace(before, after)
    path.write_text(text)


def run_tests(tests: Sequence[str], limit_s: float, mutant: Mutant | None = None) -> tuple[int | None, str]:
    """pytest in a copy of the tree: its exit code, None beyond the time limit, and what it has said. No process stays.

    Raises:
        ValueError: the mutant does not fit, or no process has executed it.
    """
    with tempfile.TemporaryDirectory(prefix="odc-mutant-") as folder:
        tree, first, executed = Path(folder, "tree"), Path(folder, "first"), Path(folder, "executed")
        shutil.copytree(HERE.parent, tree, symlinks=True, ignore=LEFT_OUT)
        first.mkdir()
        (first / "odc").symlink_to("../tree/odc")
        if mutant is not None:
            apply(mutant, tree)
            with (tree / mutant.file).open("a") as file:
                file.write(f"\n\n__import__('pathlib').Path({str(executed)!r}).touch()  # by mutants/run.py\n")
        path = os.pathsep.join(filter(None, [str(first), os.environ.get("PYTHONPATH")]))
        command = [sys.executable, "tests/supervising.py", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        with Path(folder, "said").open("w+") as said:
            # A session of its own: Ctrl-C of the terminal is for this process, which then ends that one.
            # Compiled modules are kept: many interpreters are started.
            env, code = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": ""}, None
            run = subprocess.Popen(command, cwd=tree, env=env, stdout=said, stderr=said, start_new_session=True)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = run.wait(limit_s)
            finally:
                run.send_signal(signal.SIGTERM)
                run.wait()
            said.seek(0)
            text = said.read()
        if mutant is not None and not executed.exists():
            raise ValueError(f"no process has executed it: {text[-500:]}")
        return code, text


def outcome(mutant: Mutant) -> Outcome:
    """Run one."""
    started = time.monotonic()
    try:
        code, said = run_tests(mutant.tests, TIME_LIMIT_S, mutant)
        killer = _KILLER.search(said) if code == 1 else None
        ways = {None: "time limit", 0: "survived"}
        by = killer[1] if killer else ways.get(code, f"pytest ended with {code}: {said[-500:]}")
        is_killed = code is None or killer is not None
    except ValueError as problem:
        is_killed, by = False, str(problem)
    return Outcome(mutant.name, is_killed, by, round(time.monotonic() - started, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description="Break ODC in one small way at a time, and see that tests notice.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; default: all")
    parser.add_argument("--list", action="store_true", help="only say which there are, and their tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    options, console = parser.parse_args(), Console(highlight=False)
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no mutant {unknown[0]!r}: see --list")
    chosen = [known[name] for name in options.names or known]
    if options.list:
        for mutant in chosen:
            console.print(f"{mutant.name}: {' '.join(mutant.tests)}", soft_wrap=True, markup=False)
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C: what runs is ended
    outcomes: list[Outcome] = []
    with console.status("without any mutant") as status:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        code, said = run_tests(tests, TIME_LIMIT_S * len(chosen))
        if code != 0:
            console.print(f"without any mutant pytest ends with {code}:\n{said[-3000:]}", style="red", markup=False)
            return 1
        for number, mutant in enumerate(chosen, start=1):
            status.update(f"{number} of {len(chosen)}: {mutant.name}")
            outcomes.append(outcome(mutant))
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    num_killed = sum(one.is_killed for one in outcomes)
    columns = "mutant", Column("killed by", overflow="fold"), "seconds"
    table = Table(*columns, title=f"{num_killed} of {len(outcomes)} killed")
    for one in outcomes:
        table.add_row(one.name, Text(one.by, "" if one.is_killed else "red"), f"{one.seconds:.0f}")
    console.print(table)
    return 0 if num_killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
