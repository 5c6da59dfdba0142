"""Layer 1: no processes. The options and variables of ``odc run``, and the script's own view."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from odc.cli.run import rank_options
from odc.config import LaunchEnvironment
from odc.errors import ConfigError
from odc.fsdp_patch.launch import main as launch_main
from odc.fsdp_patch.launch.automatic import AutomaticPatching
from odc.fsdp_patch.launch.main import odc_options, option_arguments
from odc.fsdp_patch.launch.script import run_script

# Options


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--dry-run", "--deterministic"],
        ["--transport", "shm", "--accumulate", "daemon", "--timeout", "2.5"],
        ["--balance", "lb-mini", "--max-tokens", "0"],
    ],
)
def test_options_reach_the_ranks(arguments: list[str]) -> None:
    options = odc_options().parse_args(arguments)
    assert odc_options().parse_args(option_arguments(options)) == options


def test_torchrun_starts_odc_with_the_script_and_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.touch()
    own = ["--dry-run", "--nproc-per-node", "7", "--", "-m", "x"]
    options = rank_options(["--nproc-per-node", "2", "--timeout", "9", str(script), *own])
    assert (options.training_script, options.module, options.nproc_per_node) == ("odc.run", True, "2")
    assert options.standalone  # a free port
    separator = options.training_script_args.index(str(script))
    assert options.training_script_args[separator + 1 :] == own
    assert not odc_options().parse_args(options.training_script_args[:separator]).dry_run
    options = rank_options(["--master-port", "12345", "--dry-run", "-m", "package.module", "--flag"])
    assert not options.standalone
    assert options.training_script_args[-4:] == ["--dry-run", "--module", "package.module", "--flag"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-python", "train"], "--no-python and --run-path cannot be used"),
        (["--run-path", "train"], "--no-python and --run-path cannot be used"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["--accumulate", "later", "x.py"], "invalid choice: 'later'"),
        ([], "required: training_script"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rank_options(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_odc_first_and_fits_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        rank_options(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert text.index("on-demand communication:") < text.index("--dry-run") < text.index("\ntorchrun:")
    assert text.index("\ntorchrun:") < text.index("--nproc-per-node")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "first"}, "RANK='first' cannot be used: expected an integer from 0 to 0"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK='2'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE=''"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' cannot be used: expected an integer of at least 1"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
    ],
)
def test_wrong_variables_are_named(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as refused:
        LaunchEnvironment.from_environment(variables)
    assert message in str(refused.value)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        launch_main.main([str(tmp_path)])
    assert str(ended.value.code).startswith("odc run: ")
    assert message in str(ended.value.code)


def test_variables_of_torchrun() -> None:
    assert LaunchEnvironment.from_environment({}) == LaunchEnvironment()
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "host", "MASTER_PORT": "5"}
    restart = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert LaunchEnvironment.from_environment({**variables, "LOCAL_RANK": "1", **restart}) == LaunchEnvironment(
        rank=1, local_rank=1, world_size=2, master_addr="host", master_port=5, agent_store=True, attempt="3"
    )
    assert not LaunchEnvironment.from_environment({"TORCHELASTIC_USE_AGENT_STORE": "False"}).agent_store


def test_ranks_refuse_before_they_run_anything(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("raise AssertionError('ran')")
    for arguments, message in (
        (["--timeout", "-1", str(script)], "timeout_s=-1.0"),
        (["no.py"], "no such script: no.py"),
    ):
        with pytest.raises(SystemExit) as ended:
            launch_main.main(arguments)
        assert message in str(ended.value.code)


# Scripts


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What running a script changes is put back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


@pytest.mark.usefixtures("interpreter")
def test_a_folder_with_a_main_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "__main__.py").write_text("import sys, beside\nprint(sys.path[0], sys.argv[1:])")
    (tmp_path / "beside.py").touch()
    length = len(sys.path)
    run_script(str(tmp_path), ["a"])
    assert capsys.readouterr().out.strip() == f"{tmp_path} ['a']"
    assert len(sys.path) == length - 1  # the folder has gone, and python -m's stays replaced


@pytest.mark.usefixtures("interpreter")
def test_a_forked_child_of_the_script_neither_reports_nor_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "s.py"
    script.write_text("raise RuntimeError('in the child')")
    pid = 1  # until the script runs: others ask for it too, finalizers for one, whenever they like
    monkeypatch.setattr(launch_main.os, "getpid", lambda: pid)

    def run_forked(path: str, arguments: list[str]) -> None:
        nonlocal pid
        pid = 2
        run_script(path, arguments)

    monkeypatch.setattr(launch_main, "run_script", run_forked)
    closed: list[str] = []
    close = AutomaticPatching.close
    monkeypatch.setattr(AutomaticPatching, "close", lambda self: closed.append("closed"))
    monkeypatch.setattr(AutomaticPatching, "abort", lambda self, error: closed.append("aborted"))
    patchings: list[AutomaticPatching] = []
    monkeypatch.setattr(
        launch_main, "AutomaticPatching", lambda *a: patchings.append(AutomaticPatching(*a)) or patchings[0]
    )
    with pytest.raises(RuntimeError, match="in the child"):
        launch_main.main([str(script)])
    assert closed == []
    close(patchings[0])


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("text", "raised"), [("raise KeyError('mine')", KeyError), ("", RuntimeError)])
def test_what_the_script_died_of_matters_more_than_trouble_in_closing(
    text: str,
    raised: type[Exception],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = tmp_path / "s.py"
    script.write_text(text)
    close = AutomaticPatching.close

    def fail(self: AutomaticPatching) -> None:
        close(self)
        raise RuntimeError("cannot close")

    monkeypatch.setattr(AutomaticPatching, "close", fail)
    with pytest.raises(raised):
        launch_main.main([str(script)])
    assert ("odc: closing: RuntimeError: cannot close" in capsys.readouterr().err) == (raised is KeyError)
