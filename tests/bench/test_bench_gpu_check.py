"""Layers 1 to 3. ``odc bench gpu`` without a GPU: how it runs checks, and the checks' bodies.

The bodies run on CPU ranks over the transports of ``bench/fake``: that shows that they do what they say and can
fail, not that a device does. What is CUDA's alone (the kernels' compiled form, events, sync debugging) stays unrun.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_settings import HAS_GPU, ROOT, STREAMS, WITHIN
from typer.testing import CliRunner

from odc.bench.gpu import gpu, kernels, setting, transport
from odc.bench.gpu.gpu import (
    ALL_GREEN,
    CHECKS,
    SOME_FAILED,
    SOME_NOT_RUN,
    UNUSABLE,
    Check,
    exit_code,
    run_checks,
    select,
)
from odc.bench.gpu.setting import (
    FAILED,
    NOT_RUN,
    PASSED,
    CheckFailedError,
    Outcome,
    Report,
    Setting,
    run_isolated,
    run_ranks,
)
from odc.bench.harness.benchmark import Column, Run, Table
from odc.bench.harness.ranks import NotRunError, Rank, process_of_fork_server, resolve
from odc.cli.app import app

pytestmark = pytest.mark.usefixtures("server_of_all_tests", "ranks_find_the_settings")

HERE = __name__


# The command


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_it_says_what_is_needed_and_does_not_pass() -> None:
    done = subprocess.run([sys.executable, "-m", "odc", "bench", "gpu"], capture_output=True, text=True, timeout=120)
    assert done.returncode == UNUSABLE
    assert "needs at least one NVIDIA GPU" in done.stderr
    assert "passed" not in done.stdout


def test_help_names_every_check_and_the_exit_codes() -> None:
    text = " ".join(CliRunner().invoke(app, ["bench", "gpu", "--help"], env={"COLUMNS": "200"}).output.split())
    assert [check.name for check in CHECKS if check.name not in text] == []
    assert "Exit code: 0 if all checks passed" in text


@pytest.mark.parametrize("words", [["--only", "kernals"], ["--ranks", "1"], ["--minibatches", "0"]])
def test_a_wrong_command_line_is_refused(words: list[str]) -> None:
    done = CliRunner().invoke(app, ["bench", "gpu", *words])
    assert done.exit_code == UNUSABLE
    assert words[0] in done.output


def test_every_check_exists_and_has_its_own_name() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all(callable(resolve(check.body)) for check in CHECKS)
    assert [check.name for check in select(["soak", "kernels"])] == ["kernels", "soak"]


# Isolation: what these checks do to themselves must not reach the next one


def table_of(title: str) -> Table:
    return Table("rows", title, (Column("x", "x"),), ())


def passing(setting: Setting) -> Report:
    return Report("all is well", {"ranks": list(setting.worlds), "rows": [{"x": "[y]"}]}, (table_of("a table"),))


def failing(setting: Setting) -> Report:
    print("what it printed")
    raise CheckFailedError("3 is not 4", {"rows": [{"x": "3"}]}, (table_of("what it found"),))


def erring(setting: Setting) -> Report:
    raise KeyError("surprise")


def not_here(setting: Setting) -> Report:
    raise NotRunError("no such hardware")


def crashing(setting: Setting) -> Report:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError


def hanging(setting: Setting) -> Report:
    run_ranks(setting, 2, never_end, limit_s=900.0)
    raise AssertionError


def never_end(rank: Rank) -> None:
    Path(os.environ["ODC_TEST_FOLDER"], str(rank.rank)).write_text(str(os.getpid()))
    time.sleep(900)


def answering_nothing(setting: Setting) -> Report:
    return None  # type: ignore[return-value]


def check_of(name: str, limit_s: float = 600.0, **options: Any) -> Check:
    return Check(name, f"that {name} is handled", f"{HERE}:{name}", limit_s, **options)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_check_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ODC_TEST_FOLDER", str(tmp_path))
    ranks = [tmp_path / name for name in ("0", "1")]

    def wait_for_ranks_first(objects: list[Any], limit_s: float) -> list[Any]:
        """The limit of the check that hangs begins when its ranks run: their start may take longer than it."""
        if limit_s == 5.0:
            _wait_until(lambda: all(rank.exists() and rank.read_text() for rank in ranks))
        return wait(objects, limit_s)

    monkeypatch.setattr(setting, "wait", wait_for_ranks_first)
    checks = [check_of(name) for name in ("failing", "erring", "not_here", "crashing")]
    checks += [check_of("hanging", 5.0), check_of("passing"), check_of("passing", why_not=lambda s: "one GPU only")]
    run = Run(is_quiet=False, json=tmp_path / "deep" / "results.json")
    run_checks(run, checks, STREAMS)
    assert run.status == SOME_FAILED
    document = json.loads((tmp_path / "deep" / "results.json").read_text())
    results = [(row["status"], row["figures"]) for row in document["checks"]]
    assert results == [
        (FAILED, "3 is not 4"),
        (FAILED, "KeyError: 'surprise'"),
        (NOT_RUN, "no such hardware"),
        (FAILED, "its process ended without a result: killed by SIGSEGV"),
        (FAILED, "no result within 5 s: it hung, and was killed"),
        (PASSED, "all is well"),
        (NOT_RUN, "one GPU only"),
    ]
    data = [row["data"] for row in document["checks"]]
    failed, passed = {"rows": [{"x": "3"}]}, {"ranks": [2], "rows": [{"x": "[y]"}]}
    assert data == [failed, {}, {}, {}, {}, passed, {}]
    assert {"date", "torch", "gpus", "driver"} <= set(document["environment"])
    pids = [int(rank.read_text()) for rank in ranks]
    _wait_until(lambda: not [pid for pid in pids if is_running(pid)])  # else a rank of the check that hung is left
    shown = capsys.readouterr()
    assert "what it printed" in shown.out
    assert shown.out.index("what it found") < shown.out.index("a table") < shown.out.rindex("one GPU only")
    assert "[y]" in shown.out
    assert "1 passed, 4 failed, 2 not run" in shown.out
    assert "(5/7) hanging" in shown.err


def check_twice(results: Path) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    run_checks(Run(json=results), [check_of("passing"), check_of("hanging", 900.0)], STREAMS)


def test_a_command_that_is_killed_leaves_its_results_and_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job's time limit, say: what was found so far is written, and nothing goes on using the GPU."""
    monkeypatch.setenv("ODC_TEST_FOLDER", str(tmp_path))
    results = tmp_path / "results.json"
    ranks = [tmp_path / name for name in ("0", "1")]
    process = process_of_fork_server(check_twice, results)
    process.start()
    try:
        _wait_until(lambda: all(rank.exists() and rank.read_text() for rank in ranks))
    finally:
        process.kill()
        process.join()
    assert [row["name"] for row in json.loads(results.read_text())["checks"]] == ["passing"]
    pids = [int(rank.read_text()) for rank in ranks]
    _wait_until(lambda: not [pid for pid in pids if is_running(pid)])


def _wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_check_without_a_report_has_not_passed() -> None:
    outcome = run_isolated("answering_nothing", f"{HERE}:answering_nothing", STREAMS, 600.0)
    assert (outcome.status, outcome.figures) == (FAILED, f"{HERE}:answering_nothing returned None, not a Report")
    assert 0 < outcome.seconds < 600


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([PASSED, PASSED], ALL_GREEN),
        ([PASSED, NOT_RUN], ALL_GREEN),  # which is optional
        ([NOT_RUN, PASSED], SOME_NOT_RUN),
        ([FAILED, PASSED], SOME_FAILED),
        ([NOT_RUN, FAILED], SOME_FAILED),
        ([], SOME_NOT_RUN),
    ],
)
def test_exit_codes(statuses: list[str], code: int) -> None:
    checks = [Check("a", "", "", 1.0), Check("b", "", "", 1.0, optional=True)][: len(statuses)]
    outcomes = [Outcome(check.name, status) for check, status in zip(checks, statuses, strict=True)]
    assert exit_code(checks, outcomes) == code


def test_what_one_gpu_cannot_show_is_not_run() -> None:
    one, many = Setting(num_gpus=1), Setting(num_gpus=8)
    reasons = {check.name: check.why_not(one) for check in CHECKS}
    assert "so there is no link to measure" in str(reasons["peer_bandwidth"])
    assert reasons["bandwidth"] is None
    assert reasons["nvshmem"] is not None
    assert {check.name for check in CHECKS if check.why_not(many) is None} >= {"peer_bandwidth", "protocol"}
    assert (one.backend(2), many.backend(8)) == ("gloo", "cpu:gloo,cuda:nccl")
    assert [many.device(rank).index for rank in (0, 3)] == [0, 3]
    assert [one.device(rank).index for rank in (0, 3)] == [0, 0]
    with pytest.raises(NotRunError):
        transport.check_nvshmem(one)


# Ranks


def tell(rank: Rank, word: str) -> tuple[int, str, float]:
    return rank.rank, word, rank.largest(float(rank.rank))


def fail_alone(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("rank 1 only")
    rank.meet()


def die_alone(rank: Rank) -> int:
    rank.meet()  # set-up has ended on both
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 7


def test_ranks_answer_fail_and_die() -> None:
    assert run_ranks(WITHIN, 2, tell, "word") == [(0, "word", 1.0), (1, "word", 1.0)]
    with pytest.raises(
        CheckFailedError, match=r"rank 1 of 2: ValueError: rank 1 only|rank 0 of 2: (Runtime|Dist\w+)Error"
    ):
        run_ranks(WITHIN, 2, fail_alone)
    with pytest.raises(CheckFailedError, match="rank 1 of 2: its process ended without a result"):
        run_ranks(WITHIN, 2, die_alone)
    assert run_ranks(WITHIN, 2, die_alone, expendable=[1])[0] == 7


def sleep_on(rank: Rank) -> None:
    time.sleep(600)


@pytest.mark.extended
def test_ranks_have_a_limit() -> None:
    with pytest.raises(CheckFailedError, match=r"ranks \[0, 1\] had not ended after 3 s"):
        run_ranks(WITHIN, 2, sleep_on, limit_s=3)


# What is written about it


@pytest.mark.parametrize("path", ["docs/gpu.md", "bench/results/UNPROVEN.md"])
def test_every_check_is_explained(path: str) -> None:
    text = (ROOT / path).read_text()
    assert [check.name for check in CHECKS if f"`{check.name}`" not in text] == []


RESULTS = ROOT / "bench/results"


def sections() -> dict[str, tuple[str, list[list[str]]]]:
    """Of UNPROVEN.md, by heading: the text, and the cells of its table's rows."""
    _, *parts = (RESULTS / "UNPROVEN.md").read_text().split("\n## ")
    found = {}
    for part in parts:
        heading, _, text = part.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("| ")]
        found[heading] = text, [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return found


def result(name: str) -> dict[str, Any]:
    document = json.loads((RESULTS / name).read_text())
    assert isinstance(document, dict)
    return document | {"checks": {check["name"]: check for check in document["checks"]}}


def linked(cell: str) -> list[tuple[str, str]]:
    """Checks in a cell of a table, each with the result that it links to."""
    return re.findall(r"\[`(\w+)`\]\((gpu_check_\w+\.json)\)", cell)


PROVEN = [heading for heading in sections() if heading.startswith("Proven on ")]


def test_what_is_proven_or_not_exists() -> None:
    rows = [row for _, rows in sections().values() for row in rows]
    assert {len(row) for row in rows} == {4}
    named = {name for row in rows for name in re.findall(r"`([a-z_0-9/]+(?:\.py|/))`", row[1])}
    assert len(named) > 10
    assert [name for name in named if "/" in name and not (ROOT / name).exists()] == []


@pytest.mark.parametrize("heading", PROVEN)
def test_what_is_said_to_be_proven_links_to_results_in_which_checks_have_passed(heading: str) -> None:
    _, rows = sections()[heading]
    assert len(rows) > 10
    for row in rows:
        checks = linked(row[-1])
        assert [name for name, _ in checks] == re.findall(r"`(\w+)`", row[-1]) != [], row[0]
        for name, path in checks:
            document = result(path)
            assert document["checks"][name]["status"] == PASSED, row[0]
            assert document["environment"]["gpu"] in heading
            assert "--quick" not in document["command"]


@pytest.mark.parametrize("heading", PROVEN)
def test_a_check_that_has_failed_in_a_result_is_spoken_of(heading: str) -> None:
    text = sections()[heading][0]
    spoken, paths = text[: text.index("\n|")], set(re.findall(r"\((gpu_check_\w+\.json)\)", text))
    failed = {name for path in paths for name, check in result(path)["checks"].items() if check["status"] == FAILED}
    assert [name for name in failed if f"`{name}` failed" not in spoken] == []


def proven_by() -> set[tuple[str, str]]:
    """Checks with results that prove something."""
    return {found for heading in PROVEN for row in sections()[heading][1] for found in linked(row[-1])}


def test_a_check_that_has_passed_nowhere_is_listed_as_unproven() -> None:
    assert PROVEN
    _, rows = sections()["Unproven"]
    listed = {check for row in rows for check in re.findall(r"`(\w+)`", row[-1])}
    measured = {"bandwidth"}  # nothing is proven by it
    proven = {name for name, _ in proven_by()}
    assert [check.name for check in CHECKS if check.name not in listed | proven | measured] == []


def test_what_checks_have_got_since_they_ran_is_listed_as_unproven() -> None:
    ran: dict[str, set[str]] = {"kernels": set(), "transport": set()}
    for name, path in proven_by():
        data = result(path)["checks"][name]["data"]
        if name == "kernels":
            ran[name] |= set(data["cases"])
        if name == "transport":
            ran[name] |= {part for of_world in data.values() for part in of_world["parts"]}
    new = {part.__name__.strip("_") for part in kernels.PARTS} - ran["kernels"]
    new |= {part.__name__ for part in transport.PARTS} - ran["transport"]
    assert [name for name in new if f"`{name}`" not in sections()["Unproven"][0]] == []


JOBS = {"8xgpu": 1, "2x8": 2}


@pytest.mark.parametrize("job", JOBS)
def test_slurm_jobs_launch_every_part_on_all_hosts(job: str, tmp_path: Path) -> None:
    """With a scheduler that only says what it was asked for, and fails the first part."""
    for name, body in {
        "srun": 'echo "srun $*"; case "$*" in *gpu_check*) exit 3;; esac',
        "scontrol": "echo n1; echo n2",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": str(JOBS[job]),
        "SLURM_CPUS_PER_TASK": "64",
    }
    script = str(ROOT / "bench" / "slurm" / f"{job}.sbatch")
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done.stderr
    calls = [line for line in done.stdout.splitlines() if line.startswith("srun ")]
    trained = {
        1: [["--no-odc"], []],
        2: [["--no-odc"], [], ["--no-odc", "--hybrid"], ["--hybrid"], ["--share-in-host"]],
    }
    assert "odc bench gpu --ranks 2,4,8 --json" in calls[0]
    assert ("--transfer-table runs/slurm-4242/transfers.json" in calls[0]) == (JOBS[job] == 1)
    launches = [f"torchrun --nnodes {JOBS[job]} --nproc-per-node 8", "--rdzv-endpoint n1:24242"]
    assert all(words in call for call in calls[1:] for words in launches)
    assert "-m odc bench primitives --json runs/slurm-4242/bandwidth.json" in calls[1]
    assert ("--transport nvshmem" in calls[1]) == (JOBS[job] == 2)
    ways = ("--no-odc", "--hybrid", "--share-in-host")
    assert [[way for way in ways if way in call] for call in calls[2:]] == trained[JOBS[job]]
    sys.path.append(str(ROOT / "examples"))  # as scripts find each other
    options = importlib.import_module("long_context_options")
    for call in calls[2:]:
        args = options.parse_args("", call.partition("long_context_sft.py ")[2].split())
        assert (args.model, args.data, args.max_tokens) == ("qwen2.5-1.5b", ["law:longalign"], 65536)


def test_the_command_line_becomes_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], Setting]] = []

    def note(run: Run, checks: list[Check], setting: Setting) -> dict[str, Any]:
        seen.append(([check.name for check in checks], setting))
        run.status = SOME_NOT_RUN
        return {}

    monkeypatch.setattr(gpu, "run_checks", note)
    monkeypatch.setattr(gpu, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    words = ["--ranks", "4,2", "--only", "soak", "--only", "sft", "--minibatches", "300"]
    assert CliRunner().invoke(app, ["bench", "gpu", *words]).exit_code == SOME_NOT_RUN
    assert CliRunner().invoke(app, ["bench", "gpu", "--quick"]).exit_code == SOME_NOT_RUN
    assert seen[0] == (["soak", "sft"], Setting(num_gpus=2, worlds=(2, 4), minibatches=300))
    assert seen[1][0] == [check.name for check in CHECKS]
    assert seen[1][1].quick
    assert seen[1][1].minibatches < 100
