"""Layers 1 and 4: ``odc exec``: what a process is is told by its command line and environment; then whole commands."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import process_ranks
import pytest

from odc.launch.entering import split_command, starts_ranks

SCRIPTS = Path(process_ranks.__file__).parent / "scripts"
ODC = [sys.executable, "-m", "odc"]
RUN_BY_TORCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
BY_ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -u -X dev train.py -c 1", ("-u -X dev", "train.py -c 1")),
        ("python -Wignore -m package.train --lr 1", ("-Wignore", "-m package.train --lr 1")),
        ("python -uX dev -W ignore train.py", ("-uX dev -W ignore", "train.py")),
        ("python -um train x", ("-u", "-m train x")),
        ("python -mtrain x", ("", "-m train x")),
        ("python --help-all -- train.py", ("--help-all", "train.py")),
        ("python -c from_multiprocessing train.py", None),
        ("python -uc pass", None),
        ("python -u -cpass", None),
        ("python -", None),
        ("python -i", None),
        ("python", None),
    ],
)
def test_what_a_process_runs(words: str, expected: tuple[str, str] | None) -> None:
    found = split_command(words.split())
    assert (found and (" ".join(found[0]), " ".join(found[1]))) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        *(("/opt/bin/torchrun x.py", True), ("python3.11 -u -m torch.distributed.run x.py", True)),
        *(("accelerate launch x.py", True), ("python /bin/accelerate launch x.py", True)),
        *(("accelerate env", False), ("pip install deepspeed", False), ("which torchrun", False), ("python", False)),
        *(("python train.py torchrun", False), ("python -m train torchrun", False), ("python -c 1", False)),
    ],
)
def test_a_launcher_is_no_rank_and_is_no_other_command(words: str, expected: bool) -> None:
    assert starts_ranks(words.split()) is expected


def ended(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **env})


def trained(text: str) -> list[str]:
    """The script's own lines; the last digits of sums depend on their order."""
    return [line[:-2] for line in text.splitlines() if line.startswith("2 plain")]


BY_TASKS = """
import os, subprocess, sys
names, words = sys.argv[1].split(","), [sys.executable, *sys.argv[2:]]
values = [(str(rank), str(rank), "2") for rank in (0, 1)]
tasks = [subprocess.Popen(words, env={**os.environ, **dict(zip(names, each))}) for each in values]
sys.exit(max(task.wait() for task in tasks))
"""
"""What ``srun`` and ``mpirun`` do, as far as a rank can tell: two tasks with variables of theirs."""
OF_A_TASK = """
import os, runpy, sys
import torch.distributed as dist
rank = int(os.environ[sys.argv.pop(1)])
os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv.pop(1))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
    "names",
    [
        "SLURM_PROCID,SLURM_LOCALID,SLURM_NTASKS",
        pytest.param("PMI_RANK,MPI_LOCALRANKID,PMI_SIZE", marks=pytest.mark.extended),
    ],
)
def test_tasks_of_slurm_and_mpi_are_ranks(tmp_path: Path, names: str) -> None:
    (tmp_path / "srun.py").write_text(BY_TASKS)
    (tmp_path / "train.py").write_text(OF_A_TASK)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    script = [str(tmp_path / "train.py"), names.partition(",")[0], port, str(SCRIPTS / "train.py"), "2", "plain"]
    ours = ended([*ODC, "exec", "--deterministic", "--", sys.executable, str(tmp_path / "srun.py"), names, *script])
    assert ours.returncode == 0, ours.stderr
    assert ours.stderr.count("odc: patched Sequential (FSDP2): 3 units over 2 ranks") == 1  # by rank 0
    assert len(trained(ours.stdout)) == 4


@pytest.mark.parametrize("launcher", [RUN_BY_TORCH, pytest.param(BY_ACCELERATE, marks=pytest.mark.extended)])
def test_ranks_of_a_launcher_are_patched_and_train_the_same(launcher: list[str]) -> None:
    command = [*launcher, str(SCRIPTS / "train.py"), "2", "plain"]
    plain, ours = ended(command), ended([*ODC, "exec", "--deterministic", "--", *command])
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert trained(ours.stdout) == trained(plain.stdout) != []
    assert "odc: patched Sequential (FSDP2): 3 units over 2 ranks" in ours.stderr
    assert "odc: 3 minibatches on 2 ranks" in ours.stderr


def test_what_is_no_rank_runs_as_it_is_and_is_told(tmp_path: Path) -> None:
    """With its own ``sitecustomize``; by a process that has no script, though it has a rank's environment."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.customized = True\n")
    ours = ended(
        [*ODC, "exec", sys.executable, "-c", "import sys; print(sys.customized); sys.exit(3)"],
        PYTHONPATH=str(tmp_path),
        RANK="0",
        LOCAL_RANK="0",
        MASTER_ADDR="here",
    )
    assert (ours.stdout, ours.returncode) == ("True\n", 3)
    assert "odc exec: the command ran without ODC" in ours.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command: expected one that starts ranks"),
        (["--", "no-such-command"], "there is no command 'no-such-command'"),
        (["--max-tokens", "5", "--", "ls"], "--max-tokens is of --balance"),
    ],
)
def test_what_cannot_be_run_is_refused(words: list[str], message: str) -> None:
    ours = ended([*ODC, "exec", *words])
    assert ours.returncode == 2
    assert message in ours.stderr


def test_a_script_that_starts_ranks_under_odc_run_is_told_of_exec(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text('import subprocess\nsubprocess.check_call(["torchrun", "--help", "x.py"])\n')
    ours = ended([*ODC, "run", "--nproc-per-node", "1", str(tmp_path / "starts.py")])
    assert ours.returncode == 1
    assert "give the command to odc exec" in ours.stderr
