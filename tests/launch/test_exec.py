"""Layers 1 and 4: ``odc exec``: commands that start ranks, as scripts or as functions, and what is none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import process_ranks
import pytest

from odc.launch.main import starts_ranks

SCRIPTS = Path(process_ranks.__file__).parent / "scripts"
ODC = [sys.executable, "-m", "odc"]
RUN_BY_TORCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
BY_ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--use_fsdp", "--num_processes", "2", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    *("--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    *("--fsdp_sync_module_states", "false", "--fsdp_cpu_ram_efficient_loading", "false"),  # as accelerators do only
]


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


def trained(text: str, mode: str = "plain") -> list[str]:
    """The script's own lines; the last digits of sums depend on their order."""
    return [line[:-2] for line in text.splitlines() if line.startswith(f"2 {mode}")]


FUNCTIONS = """
import os, runpy, subprocess, sys
import torch.distributed as dist

def rank_of(number, script, port, kind, mode):
    place = {"init_method": f"tcp://127.0.0.1:{port}", "rank": number, "world_size": 2} if number is not None else {}
    sys.argv = [script, kind, mode]
    dist.init_process_group("gloo", **place)
    runpy.run_path(script, run_name="__main__")
    if mode != "open":
        dist.destroy_process_group()

if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    if how == "task":  # of a launcher that nobody knows
        rank_of(int(os.environ["NUMBER"]), *arguments)
    elif how == "tasks":
        words = [sys.executable, __file__, "task", *arguments]
        tasks = [subprocess.Popen(words, env={**os.environ, "NUMBER": str(number)}) for number in (0, 1)]
        sys.exit(max(task.wait() for task in tasks))
    elif how == "spawn":
        import torch.multiprocessing
        torch.multiprocessing.spawn(rank_of, tuple(arguments), nprocs=2)
    else:
        import accelerate
        accelerate.notebook_launcher(rank_of, (None, *arguments), num_processes=2, use_port=arguments[1])
"""
"""Ranks that no launcher has named: each has its number from the script that starts it."""


def run_functions(folder: Path, how: str, mode: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "functions.py").write_text(FUNCTIONS)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    words = [str(folder / "functions.py"), how, str(SCRIPTS / "train.py"), port, "2", mode]
    return ended([*ODC, "exec", *options, "--", sys.executable, *words])


@pytest.mark.parametrize(
    ("how", "mode"),
    [
        ("spawn", "plain"),
        pytest.param("spawn", "open", marks=pytest.mark.extended),
        pytest.param("tasks", "open", marks=pytest.mark.extended),
        pytest.param("notebook", "plain", marks=pytest.mark.extended),
    ],
)
def test_functions_and_tasks_are_ranks(tmp_path: Path, how: str, mode: str) -> None:
    """Their group destroyed by them, or left open to the end of the process."""
    ours = run_functions(tmp_path, how, mode, "--deterministic")
    assert ours.returncode == 0, ours.stderr
    said = ("odc: patched Sequential (FSDP2): 3 units over 2 ranks", "odc: 3 minibatches on 2 ranks")
    assert [ours.stderr.count(words) for words in said] == [1, 1]  # by rank 0
    assert len(trained(ours.stdout, mode)) == 4


@pytest.mark.parametrize("how", ["spawn", pytest.param("tasks", marks=pytest.mark.extended)])
def test_a_function_that_raises_ends_all(tmp_path: Path, how: str) -> None:
    ours = run_functions(tmp_path, how, "raise")
    assert ours.returncode == 1
    assert "ValueError: rank 1 has had enough" in ours.stderr
    assert "minibatches on 2 ranks" not in ours.stderr


@pytest.mark.parametrize("how", ["spawn", "tasks"])
def test_a_dry_run_says_once_how_it_ended(tmp_path: Path, how: str) -> None:
    """Of functions, and of scripts, whose exit handlers no longer see by what they ended."""
    ours = run_functions(tmp_path, how, "plain", "--dry-run")
    assert ours.returncode == 0, ours.stderr
    assert "odc: would patch Sequential (FSDP2): 3 units over 2 ranks" in ours.stderr
    assert [line for line in ours.stderr.splitlines() if line.startswith("odc: dry run")] == [
        "odc: dry run: stopped after the first optimizer step; nothing was patched"
    ]


def test_ranks_of_a_launcher_are_patched_and_train_the_same() -> None:
    command = [*RUN_BY_TORCH, str(SCRIPTS / "train.py"), "2", "plain"]
    plain, ours = ended(command), ended([*ODC, "exec", "--deterministic", "--", *command])
    assert plain.returncode == ours.returncode == 0, ours.stderr
    assert trained(ours.stdout) == trained(plain.stdout) != []
    assert "odc: patched Sequential (FSDP2): 3 units over 2 ranks" in ours.stderr
    assert "odc: 3 minibatches on 2 ranks" in ours.stderr


AS_LAUNCHED = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import hf_trainer
make = hf_trainer.TrainingArguments
hf_trainer.TrainingArguments = lambda fsdp, fsdp_config, **options: make(**options)
hf_trainer.main()
"""
"""The example, where its launcher says how to shard."""
BALANCED = ["--balance", "lb-mini", "--max-tokens", "400"]


@pytest.mark.extended
@pytest.mark.parametrize("version", ["1", "2"])
def test_a_trainer_shards_as_accelerate_launch_says_and_trains_the_same(tmp_path: Path, version: str) -> None:
    (tmp_path / "train.py").write_text(AS_LAUNCHED)
    script = [str(tmp_path / "train.py"), str(SCRIPTS.parents[2] / "examples"), "--steps", "4", "--log-json"]
    losses: list[list[float]] = []
    for number, before in enumerate(([], [*ODC, "exec", "--"], [*ODC, "exec", *BALANCED, "--"])):
        log = tmp_path / f"{number}.json"
        done = ended([*before, *BY_ACCELERATE, "--fsdp_version", version, *script, str(log)])
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"odc: patched LlamaForCausalLM (FSDP{version})") == bool(before)
        assert ("odc: balanced by lb-mini: 4 minibatches planned" in done.stderr) == (number == 2)
        losses.append(json.loads(log.read_text())["losses"])
    plain, ours, balanced = losses
    assert len(plain) == 4
    assert ours == pytest.approx(plain, rel=1e-6)
    assert balanced == pytest.approx(plain, rel=1e-5)


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
