"""Break ODC in one small way at a time, and see that tests fail: ``python mutants/run.py [NAME ...]``.

Each ``*.patch`` beside this file is a mutant: a fault that somebody could really make, as a diff, with a text above it
that says what is broken, what a user would see, and which tests have to notice (``Tests:``, arguments of pytest). It is
applied to a copy of this tree and these tests are run there, with the interpreter that runs this file. A failure kills
it, and so does a run beyond the time limit. What survives is a gap in the tests. The same tests have to pass first in a
copy without any mutant.

[Note: The copy is what is imported] ODC may be installed from this very tree, and Python started elsewhere would find
that. So the copy's package comes first in PYTHONPATH, which ranks and commands inherit; and a line behind the mutated
file notes that it was executed. Where no process has, the run says nothing, and counts as an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
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
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "__pycache__", ".*_cache", "build", "runs", "*.egg-info")
TIME_LIMIT = "time limit"
_KILLER = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
_END_S = 20.0  # of a supervised run that was told to end


@dataclass(frozen=True)
class Mutant:
    """One patch."""

    name: str
    text: str

    @property
    def tests(self) -> list[str]:
        """Arguments of pytest."""
        (line,) = re.findall(r"^Tests: (.+)$", self.text, re.MULTILINE)
        return shlex.split(line)

    @property
    def files(self) -> list[str]:
        """What it changes."""
        return re.findall(r"^\+\+\+ b/(.+)$", self.text, re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant; ``by``: the test that has killed it, or why not."""

    name: str
    is_killed: bool
    by: str
    seconds: float = 0.0


def mutants() -> list[Mutant]:
    """All there are, by name."""
    return [Mutant(path.stem, path.read_text()) for path in sorted(HERE.glob("*.patch"))]


def apply(mutant: Mutant, tree: Path) -> str | None:
    """Apply it to a copy; why that cannot be, or None."""
    # Else git takes the copy for a part of a repository around it, and skips what it does not find there.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    command = ["git", "apply", "-"]
    done = subprocess.run(command, cwd=tree, env=env, input=mutant.text, text=True, capture_output=True, check=False)
    return done.stderr.strip() or None if done.returncode else None


def run_tests(tests: Sequence[str], tree: Path, limit_s: float) -> tuple[int | None, str]:
    """pytest in the copy: its exit code, None beyond the time limit, and what it has said. Leaves no process behind."""
    found_first = tree / ".first"
    found_first.mkdir()
    (found_first / "odc").symlink_to("../odc")
    path = os.pathsep.join(filter(None, [str(found_first), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "tests/supervising.py", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    with (tree / ".said").open("w+") as said:
        # A session of its own: Ctrl-C of the terminal is for this process, which then ends that one.
        run = subprocess.Popen(
            command, cwd=tree, env={**os.environ, "PYTHONPATH": path}, stdout=said, stderr=said, start_new_session=True
        )
        try:
            code: int | None = run.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGTERM)
                run.wait(_END_S)
        said.seek(0)
        return code, said.read()


def outcome(mutant: Mutant, limit_s: float) -> Outcome:
    """Run one."""
    with tempfile.TemporaryDirectory(prefix=f"odc-{mutant.name}-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        if (problem := apply(mutant, tree)) is not None:
            return Outcome(mutant.name, False, f"does not apply: {problem}")
        for name in mutant.files:
            note = f"__import__('pathlib').Path({str(tree / '.executed')!r}).touch()"
            with (tree / name).open("a") as file:
                file.write(f"\n\n{note}  # by mutants/run.py\n")
        started = time.monotonic()
        code, said = run_tests(mutant.tests, tree, limit_s)
        seconds = round(time.monotonic() - started, 1)
        if not (tree / ".executed").exists():
            return Outcome(mutant.name, False, f"was not imported: {said[-500:]}", seconds)
    if code is None:
        return Outcome(mutant.name, True, TIME_LIMIT, seconds)
    if code == 0:
        return Outcome(mutant.name, False, "survived", seconds)
    killer = _KILLER.search(said)
    if code != 1 or killer is None:
        return Outcome(mutant.name, False, f"pytest ended with {code}: {said[-500:]}", seconds)
    return Outcome(mutant.name, True, killer[1], seconds)


def passes_without(tests: Sequence[str], limit_s: float, console: Console) -> bool:
    """Whether tests pass where nothing is broken."""
    with tempfile.TemporaryDirectory(prefix="odc-unchanged-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
        code, said = run_tests(tests, tree, limit_s)
    if code != 0:
        console.print(f"[red]without any mutant the tests do not pass[/] ({code}):\n{said[-3000:]}", highlight=False)
    return code == 0


def table_of(outcomes: Sequence[Outcome]) -> Table:
    num_killed = sum(one.is_killed for one in outcomes)
    table = Table("mutant", "killed by", "seconds", title=f"{num_killed} of {len(outcomes)} killed")
    for one in outcomes:
        table.add_row(one.name, one.by if one.is_killed else f"[red]{one.by}[/]", f"{one.seconds:.0f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Break ODC in one small way at a time, and see that tests fail.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutants; default: all")
    parser.add_argument("--list", action="store_true", help="only say which there are, and their tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes there, too")
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="S", help="of each (default: %(default)g)")
    options = parser.parse_args()
    console = Console()
    known = {mutant.name: mutant for mutant in mutants()}
    if unknown := sorted(set(options.names) - set(known)):
        parser.error(f"no mutant {unknown[0]!r}: see --list")
    chosen = [known[name] for name in options.names or known]
    if options.list:
        for mutant in chosen:
            console.print(f"{mutant.name}: {' '.join(mutant.tests)}", highlight=False, soft_wrap=True)
        return 0
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # as Ctrl-C: what runs is ended
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    outcomes: list[Outcome] = []
    with console.status("without any mutant") as status:
        if not passes_without(tests, options.time_limit * len(chosen), console):
            return 1
        for number, mutant in enumerate(chosen, start=1):
            status.update(f"{number} of {len(chosen)}: {mutant.name}")
            outcomes.append(outcome(mutant, options.time_limit))
            if options.json is not None:
                options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    console.print(table_of(outcomes))
    return 0 if all(one.is_killed for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
