"""Layers 3 and 4: ``odc run`` on scripts that know nothing of it, on two ranks; then whole commands.

Most tests fork the ranks and call what ``torchrun -m odc.run`` calls, which saves importing torch each time.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import process_ranks
import pytest
import torch.distributed as dist
from process_ranks import run_ranks

from odc.launch.main import main
from odc.launch.script import run_script

SCRIPTS = Path(process_ranks.__file__).parent / "scripts"
TRAIN = str(SCRIPTS / "train.py")
ODC_RUN = [sys.executable, "-m", "odc", "run", "--nproc-per-node", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


class Ended(NamedTuple):
    """What a rank printed, and its exit code or its error."""

    out: str
    err: str
    code: Any


def _run_rank(rank: int, world_size: int, launches: list[tuple[bool, list[str]]], port: int) -> list[Ended]:
    """``launches``: with ODC or plain, and the command line; one after the other in this process."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE=str(bool(port)),
    )
    ended = []
    for attempt, (with_odc, arguments) in enumerate(launches):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        out, err, code = io.StringIO(), io.StringIO(), None
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(arguments) if with_odc else run_script(arguments[0], arguments[1:])
            except SystemExit as error:
                code = error.code
            except Exception as error:
                code = f"{type(error).__name__}: {error}"
        ended.append(Ended(out.getvalue(), err.getvalue(), code))
    return ended


def launch(*launches: tuple[bool, list[str]], world_size: int = 2) -> list[list[Ended]]:
    """Per launch, how each rank ended. The ranks leave their reports in a store of this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = run_ranks(world_size, _run_rank, list(launches), store.port, timeout_s=240)
    return [list(of_launch) for of_launch in zip(*ranks, strict=True)]


def assert_same_lines(ours: str, theirs: str) -> None:
    """The last word of each is a number, whose last digit may differ: sums of pushes depend on their order."""
    assert len(ours.splitlines()) == len(theirs.splitlines())
    for mine, its in zip(ours.splitlines(), theirs.splitlines(), strict=True):
        (words, number), (its_words, its_number) = mine.rsplit(" ", 1), its.rsplit(" ", 1)
        num_digits = len(its_number.partition(".")[2])
        assert (words, len(number.partition(".")[2])) == (its_words, num_digits)
        assert float(number) == pytest.approx(float(its_number), rel=0, abs=1.5 * 10**-num_digits)


@pytest.mark.parametrize(
    "mode",
    ["clip", *(pytest.param(mode, marks=pytest.mark.extended) for mode in ("optimizers", "accumulate", "closure"))],
)
def test_an_unmodified_script_prints_the_same_losses(mode: str) -> None:
    plain, odc = launch((False, [TRAIN, "2,1,1o", mode]), (True, [TRAIN, "2,1,1o", mode]))
    assert len(plain[0].out.splitlines()) == 3 * 4
    assert_same_lines(odc[0].out, plain[0].out)
    assert [rank.code for rank in odc] == [None, None]
    patched = [line for line in odc[0].err.splitlines() if line.startswith("odc: patched")]
    assert [line.partition(":")[2].partition(":")[0] for line in patched] == [
        " patched Sequential (FSDP2)",
        " patched Sequential (FSDP1)",
        " patched Sequential (FSDP1)",
    ]
    reports = [line for rank in odc for line in rank.err.splitlines() if "ranks waited for one another" in line]
    assert len(reports) == 3  # by the last rank to come, whichever it is
    assert all("3 minibatches on 2 ranks" in line for line in reports)
    assert "odc: patched" not in odc[1].err


def test_a_script_that_patches_by_itself_keeps_its_session() -> None:
    """Also where a rank has nothing to compute in the first minibatch."""
    plain, odc, idle, dry = launch(
        (False, [TRAIN, "2,1", "by-itself"]),
        (True, [TRAIN, "2,1", "by-itself"]),
        (True, [TRAIN, "2", "by-itself-none-first"]),
        (True, ["--dry-run", TRAIN, "2", "by-itself-none-first"]),
    )
    assert [rank.code for rank in (*odc, *idle)] == [None] * 4
    assert_same_lines(odc[0].out, plain[0].out)
    for ended, names in ((odc, ["Sequential (FSDP2)", "Sequential (FSDP1)"]), (idle, ["Sequential (FSDP2)"])):
        said = [line for line in ended[0].err.splitlines() if "patched" in line]
        assert [line.partition(", with the script's options: ")[0] for line in said] == [
            f"odc: {name} was patched by the script" for name in names
        ]
        assert sum("3 minibatches on 2 ranks" in line for rank in ended for line in rank.err.splitlines()) == len(names)
    assert [rank.code for rank in dry] == [0, 0]
    first, *_, last = dry[0].err.splitlines()
    assert first.startswith("odc: Sequential (FSDP2) was patched by the script, with the script's options: 3 units")
    assert last == "odc: dry run: stopped after the first optimizer step; nothing else was patched"


@pytest.mark.extended
def test_a_compiled_update_and_a_module_that_is_never_called_itself() -> None:
    modes = ("compiled", "parts")
    ended = launch(*[(with_odc, [TRAIN, "2", mode]) for mode in modes for with_odc in (False, True)])
    for plain, odc in (ended[:2], ended[2:]):
        assert [rank.code for rank in odc] == [None, None]
        assert len(plain[0].out.splitlines()) == 4
        assert_same_lines(odc[0].out, plain[0].out)
    assert ended[1][0].err.count("odc: patched Sequential (FSDP2)") == 1
    assert ended[3][0].err.count("odc: patched Block (FSDP2)") == 2


@pytest.mark.parametrize(
    ("mode", "kinds"), [("", "2,1,1o"), pytest.param("reference-", "2", marks=pytest.mark.extended)]
)
def test_a_rank_may_have_nothing_to_compute_in_the_first_minibatch(mode: str, kinds: str) -> None:
    """Its first contact is clipping, or the step; with a reference model the other rank comes with another root."""
    plain, odc = launch((False, [TRAIN, kinds, f"{mode}zero-first"]), (True, [TRAIN, kinds, f"{mode}none-first"]))
    assert odc[0].code is None, odc[0].code
    assert_same_lines(odc[0].out, plain[0].out.replace("zero-first", "none-first"))
    assert len(plain[0].out.splitlines()) == len(kinds.split(",")) * 4


def test_the_error_of_one_rank_reaches_the_other() -> None:
    (odc,) = launch((True, [TRAIN, "2", "raise"]))
    assert odc[1].code == "ValueError: rank 1 has had enough"
    assert "rank 1" in odc[0].code
    assert "rank 1 has had enough" in odc[0].code
    assert "ranks waited" not in odc[0].err + odc[1].err


@pytest.mark.extended
def test_exit_codes_of_the_script() -> None:
    three, zero = launch((True, [TRAIN, "2", "exit"]), (True, [TRAIN, "1", "exit-0"]))
    assert [rank.code for rank in three] == [3, 3]
    assert "ranks waited" not in three[0].err + three[1].err
    assert [rank.code for rank in zero] == [None, None]
    assert (zero[0].err + zero[1].err).count("3 minibatches on 2 ranks") == 1


def test_what_cannot_be_honoured_is_refused_by_name() -> None:
    lbfgs, lbfgs_dry, hook, hook_dry = launch(
        (True, [TRAIN, "2", "lbfgs"]),
        (True, ["--dry-run", TRAIN, "2", "lbfgs"]),
        (True, [TRAIN, "2", "hook"]),
        (True, ["--dry-run", TRAIN, "2", "hook"]),
    )
    assert all("LBFGS evaluates its closure several times" in rank.code for rank in lbfgs)
    assert [rank.code for rank in lbfgs_dry] == [1, 1]
    assert "odc: would refuse this script: LBFGS" in lbfgs_dry[0].err
    for rank in hook:
        assert rank.code.startswith("odc: refused: Sequential (FSDP2): unit ")
        assert rank.code.endswith(")")
        assert f"({TRAIN}, line " in rank.code
        assert "set_all_reduce_hook" in rank.code
    assert [rank.code for rank in hook_dry] == [1, 1]
    assert "would refuse Sequential (FSDP2)" in hook_dry[0].err


def test_a_dry_run_tells_and_stops() -> None:
    plain, dry = launch((False, [TRAIN, "1o", "clip"]), (True, ["--dry-run", TRAIN, "1o", "clip"]))
    assert plain[0].out.startswith("1o clip 0")
    assert [(rank.code, rank.out) for rank in dry] == [(0, ""), (0, "")]  # stopped before the first step's line
    first, second, third = dry[0].err.splitlines()
    assert first.startswith("odc: would patch Sequential (FSDP1): 3 units over 2 ranks; per rank")
    assert second == "odc: a minibatch would end at FullyShardedDataParallel.clip_grad_norm_"
    assert third == "odc: dry run: stopped after the first optimizer step; nothing was patched"
    assert dry[1].err == ""


@pytest.fixture(scope="module")
def plain_script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A script with no FSDP that tells what it finds; also when imported by a worker that it spawns."""
    path = tmp_path_factory.mktemp("script") / "facts.py"
    path.write_text(
        """
import atexit, json, multiprocessing, os, sys

class Thing:
    pass

def find(_):
    return [__name__, os.path.basename(__file__), sys.argv[1:], Thing.__module__]

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.map(find, [0])[0]
    import pickle
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    print(json.dumps({
        "argv": sys.argv, "path": sys.path, "file": __file__, "name": __name__, "spec": __spec__ is None,
        "package": __package__, "main": sys.modules["__main__"].__file__, "spawned": spawned,
        "annotations": find.__code__.co_flags & 0x1000000,
    }))
    atexit.register(lambda: print("main at exit", sys.modules["__main__"].Thing is Thing))
"""
    )
    return str(path)


def run(command: list[str], folder: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", **env}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.extended
def test_alone_and_without_fsdp_a_script_finds_what_python_would_show_it(plain_script: str) -> None:
    folder, name = os.path.split(plain_script)
    arguments = [os.path.join(os.path.basename(folder), name), "--dry-run", "--", "-m", "x"]
    python = run([sys.executable, *arguments], os.path.dirname(folder))
    odc = run([sys.executable, "-m", "odc.run", *arguments], os.path.dirname(folder))
    assert python.returncode == 0, python.stderr
    assert odc.returncode == 0, odc.stderr
    assert odc.stdout == python.stdout
    assert json.loads(odc.stdout.splitlines()[0])["argv"] == arguments
    assert odc.stdout.splitlines()[1] == "main at exit True"
    assert odc.stderr.strip() == "odc: nothing was patched: no FSDP model computed anything in this script"


@pytest.mark.extended
def test_one_rank_has_nothing_to_communicate() -> None:
    plain, odc = launch((False, [TRAIN, "2,1", "clip"]), (True, [TRAIN, "2,1", "clip"]), world_size=1)
    assert odc[0].out == plain[0].out
    lines = odc[0].err.splitlines()
    assert lines == [
        "odc: patched Sequential (FSDP2): nothing to communicate in a shard group of one rank",
        "odc: patched Sequential (FSDP1): nothing to communicate in a shard group of one rank",
    ]


@pytest.mark.extended
def test_two_launches_at_once_and_arguments_that_look_like_options(tmp_path: Path) -> None:
    script = tmp_path / "arguments.py"
    script.write_text(
        f"import json, runpy, sys\nprint(json.dumps(sys.argv[1:]))\nsys.argv[1:] = ['2', 'clip']\n"
        f"runpy.run_path({TRAIN!r}, run_name='__main__')\n"
    )
    arguments = ["--dry-run", "--nproc-per-node", "7", "--help"]
    commands = [
        [*ODC_RUN, "--deterministic", str(script), *arguments],
        [*TORCHRUN, *RENDEZVOUS, "-m", "odc.run", "-m", "arguments", *arguments],
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    launches = [
        subprocess.Popen(c, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for c in commands
    ]
    try:
        printed = [launched.communicate(timeout=300) for launched in launches]
    finally:
        for launched in launches:
            launched.kill()
    for launched, (out, err) in zip(launches, printed, strict=True):
        assert launched.returncode == 0, err
        assert out.count(json.dumps(arguments)) == 2
        assert out.count("2 clip") == 4
        assert err.count("odc: patched Sequential (FSDP2): 3 units over 2 ranks, transport shm") == 1
        assert err.count("3 minibatches on 2 ranks") == 1


@pytest.mark.extended
@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("hook", r"Sequential \(FSDP2\): unit '<root>': set_all_reduce_hook is not supported .*"),
        ("misuse", r"setting \.grad to None between backward and step: .*"),
    ],
)
def test_a_refusal_is_the_last_thing_that_a_launch_says(mode: str, said: str, tmp_path: Path) -> None:
    failed = run([*ODC_RUN, TRAIN, "2", mode], tmp_path)
    assert failed.returncode == 1
    lines = failed.stderr.strip().splitlines()
    assert re.fullmatch(rf"odc: refused: {said} \({re.escape(TRAIN)}, line \d+\)(, on rank 1)?", lines[-1]), lines[-1]
    assert failed.stderr.count(lines[-1][:60]) == 1
    assert "Traceback" not in failed.stderr
    assert len(lines) < 10  # torchrun's own


def test_a_failed_launch_ends_with_the_rank_its_error_and_the_scripts_line(tmp_path: Path) -> None:
    mark = f"odc-test-{os.getpid()}"
    failed = run([*ODC_RUN, TRAIN, "2", "raise", mark], tmp_path)
    assert failed.returncode == 1
    lines = failed.stderr.strip().splitlines()
    said = rf"odc: failed: rank 1: ValueError: rank 1 has had enough \({re.escape(TRAIN)}, line \d+\)"
    assert re.fullmatch(said, lines[-1]), lines[-1]
    first = lines.index("[rank1]: Traceback (most recent call last):")
    assert f'File "{TRAIN}"' in lines[first + 1]  # and no frame of ODC's above it
    assert "Root Cause" not in failed.stderr
    assert "ranks waited" not in failed.stderr
    assert not processes_with(mark)


def processes_with(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().decode(errors="replace") if entry.name.isdigit() else ""
            found += [command] if mark in command else []
    return found


@pytest.mark.extended
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.extended), signal.SIGTERM])
def test_a_signal_ends_the_ranks_and_is_told_in_one_line(tmp_path: Path, sent: signal.Signals) -> None:
    script = tmp_path / "waiting.py"
    script.write_text("import signal\nprint('started', flush=True)\nsignal.pause()\n")
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    launched = subprocess.Popen(
        [*ODC_RUN, str(script)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert launched.stdout is not None
        assert [launched.stdout.readline().strip() for _ in range(2)] == ["started"] * 2
        launched.send_signal(sent)
        _, err = launched.communicate(timeout=300)
    finally:
        launched.kill()
    assert launched.returncode == 128 + sent
    assert err.strip().splitlines()[-1] == f"odc run: ended by {sent.name}"
    assert not processes_with(str(script))
