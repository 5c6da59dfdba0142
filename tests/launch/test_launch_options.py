"""Layer 1: no processes. The options and variables of ``odc run``, and the script's own view."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typer
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner

from odc import errors
from odc.cli.app import app
from odc.cli.run import launch, rank_options
from odc.config import LaunchEnvironment
from odc.errors import (
    AbortedError,
    ConfigError,
    MisuseError,
    OdcError,
    PeerDiedError,
    PeerSilentError,
    SetupError,
    UnsupportedError,
)
from odc.fsdp_patch.automatic import AutomaticPatching
from odc.launch import main as launch_main
from odc.launch.options import odc_options, option_arguments
from odc.launch.script import last_words, leave_last_words, run_script


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What running a script changes is put back."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


# Options


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that these options are answered with."""
    with pytest.raises(SystemExit) as ended:
        rank_options(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--dry-run", "--deterministic", "--traceback"],
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
    options = rank_options(["--master-port", "12345", "--dry-run", "-m", "json.tool", "--flag"])
    assert not options.standalone
    assert options.training_script_args[-4:] == ["--launcher-tells", "--module", "json.tool", "--flag"]
    assert "--dry-run" in options.training_script_args


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-python", "train"], "--no-python and --run-path cannot be used"),
        (["--run-path", "train"], "--no-python and --run-path cannot be used"),
        (["nowhere.py"], "no such script: nowhere.py"),
        (["--accumulate", "later", "x.py"], "invalid choice: 'later'"),
        ([], "required: training_script"),
        (["--blance", "lb-mini", "x.py"], "unrecognized arguments: --blance; did you mean --balance?"),
        (["--nproc_per_nod=2", "--dryrun", "x.py"], "--dryrun; did you mean --dry-run?"),
        (["--colour", "x.py"], "unrecognized arguments: --colour (odc run -h"),
    ],
)
def test_wrong_command_lines(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(arguments, capsys)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--lr", "1", "--nproc-per-node", "2"], "--nproc-per-node"),
        (["--nproc_per_node=2"], "--nproc_per_node=2"),
        (["--balance", "lb-mini", "--dry-run"], "--balance"),
        (["--max-tokens", "3", "--balanced", "a--dry-run", "--timeout=4"], None),
    ],
)
def test_options_behind_the_script_are_its_own_and_a_line_says_so(
    given: list[str], named: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    script = tmp_path / "x.py"
    script.touch()
    options = rank_options([str(script), *given])
    assert options.training_script_args[-len(given) :] == given
    assert options.nproc_per_node == "1"
    said = capsys.readouterr().err
    assert said.count("\n") == (named is not None)
    assert said.startswith(f"odc run: {named} stands behind the script, which gets it;" if named else "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--transport", "foo"], "transport='foo' is unknown: expected auto, one of shm, "),
        (["--balance", "lb-mega"], "--balance: policy 'lb-mega' is not known: expected one of none, local-sort"),
        (["--balance", "lb-mini", "--max-tokens", "0"], "--balance: max_tokens=0: expected at least 1"),
        (["--max-tokens", "9"], "--max-tokens is of --balance and --online: give that, too"),
        (["--timeout", "nan"], "timeout_s=nan cannot be used"),
        (["--timeout", "soon"], "argument --timeout: invalid float value: 'soon'"),
        (
            ["--nproc-per-node", "abc"],
            "Unsupported nproc_per_node value: abc",
        ),
        (["--nproc-per-node", "0"], "--nproc-per-node '0': expected 1 to 1024 ranks on a host"),
        (["--nproc-per-node", "1000000"], "--nproc-per-node '1000000': expected 1 to 1024"),
        (["--nnodes", "abc"], "--nnodes 'abc': expected a number of hosts, or MIN:MAX"),
        (["--nnodes", "1:2:3"], "--nnodes '1:2:3': expected a number of hosts"),
        (["--nnodes", "0"], "--nnodes 0: expected at least 1 host"),
        (["--nnodes", "2:1"], "--nnodes 2:1: expected at least 1 host, and MIN not above MAX"),
        (["--standalone", "--nnodes", "2"], "--standalone is for one host: leave it out, or --nnodes 2"),
        (["--max-restarts", "abc"], "argument --max-restarts/--max_restarts: invalid int value: 'abc'"),
        (["--monitor-interval", "0"], "--monitor-interval 0.0: expected a number of seconds above 0"),
        (["--node-rank", "2", "--nnodes", "2"], "--node-rank 2: expected 0 to 1"),
        (["--signals-to-handle", "SIGFOO"], "--signals-to-handle 'SIGFOO': expected names of signals"),
        (["--local-addr", "no\x00where"], "is no address of this host"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_options_that_no_rank_could_use_are_refused_before_one_is_started(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "s.py"
    script.touch()
    if arguments[0] == "--signals-to-handle" and arguments[0] not in get_args_parser()._option_string_actions:
        pytest.skip(f"the torchrun of this torch has no {arguments[0]}")
    assert message in refused([*arguments, str(script)], capsys)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ODC_TRANSPORT", "foo", "transport='foo' is unknown"),
        ("ODC_TIMEOUT", "soon", "ODC_TIMEOUT='soon' cannot be used"),
        ("ODC_ACCUMULATE", "later", "accumulate='later'"),
        ("ODC_FAULT", "rank=1,do=explode,point=wait", "do='explode'"),
    ],
)
def test_so_are_variables(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, value)
    assert message in refused(["-m", "json.tool"], capsys)


def test_scripts_and_modules_that_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder without a __main__.py" in refused([str(tmp_path)], capsys)
    assert "there is no module 'no_such'" in refused(["-m", "no_such.module"], capsys)
    assert "there is no module ''" in refused(["-m", ".relative"], capsys)
    long = "x" * 100_000
    for arguments in ([long], ["-m", long], ["--nnodes", long, "-m", "json"], ["--transport", long, "-m", "json"]):
        assert len(refused(arguments, capsys)) < 1000


def test_what_only_torchrun_finds_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.py").touch()
    with pytest.raises(typer.Exit) as ended:
        launch(["--rdzv-backend", "foo", str(tmp_path / "s.py")])
    assert ended.value.exit_code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("odc run: torchrun could not start the ranks: ValueError: The rendezvous backend 'foo'")
    assert len(last) < 500


@pytest.mark.parametrize("arguments", [["-h"], ["plan", "-h"], ["simulate", "-h"], ["doctor", "-h"], ["run", "-h"]])
def test_short_help(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "usage" in result.output.lower()


# How an error of ODC ends


@dataclass
class Failed:
    """What torchrun knows of a rank that failed."""

    exitcode: int = 1
    message: Any = "To enable traceback see"


def left_by(error: Exception, tmp_path: Path) -> Failed:
    """What torchrun finds of a rank that ended with ``error``."""
    file = tmp_path / "error.json"
    file.unlink(missing_ok=True)
    leave_last_words(LaunchEnvironment(error_file=str(file)), error)
    return Failed(message=json.loads(file.read_text())["message"]) if file.exists() else Failed()


def test_one_line_is_said_whatever_became_of_the_other_ranks(tmp_path: Path) -> None:
    refused = left_by(UnsupportedError("two\nlines"), tmp_path)
    assert ProcessFailure(0, 1, 1, str(tmp_path / "error.json")).message == refused.message  # torch reads it
    told, own = left_by(AbortedError("rank 0 refused"), tmp_path), left_by(KeyError("mine"), tmp_path)
    line, why = "odc: refused: two lines", "; what they printed, or dmesg, may tell why"
    assert last_words({0: refused, 1: refused}) == line
    assert last_words({0: Failed(-15), 1: refused}) == line  # ended by torchrun
    assert last_words({0: told, 1: refused}) == f"{line}, on rank 1"
    assert last_words({0: told, 1: own}) == "odc: failed: rank 0: KeyError: 'mine', on rank 1"
    assert last_words({0: told, 1: told}) == "odc: failed: rank 0 refused"  # which is of another host
    assert last_words({0: Failed(-9), 1: Failed(-15)}) == f"odc: failed: rank 0 was killed by signal 9 (SIGKILL){why}"
    assert last_words({0: Failed(-15)}) == f"odc: failed: the ranks were ended by SIGTERM{why}"
    assert last_words({0: Failed(7), 2: Failed(-11)}) == (
        f"odc: failed: rank 0 exited with status 7; rank 2 was killed by signal 11 (SIGSEGV){why}"
    )
    theirs = Failed(message={"message": "ConfigError: of another library", "extraInfo": {"timestamp": "1"}})
    assert last_words({0: theirs}) == f"odc: failed: rank 0 exited with status 1{why}"


def test_what_the_launcher_knows_is_added_to_what_a_rank_has_found(tmp_path: Path) -> None:
    gone = left_by(PeerDiedError("rank 0 waited for rank 1. Cause: its process is gone"), tmp_path)
    known = left_by(PeerDiedError("rank 0 waited for rank 1. Cause: killed by signal 9 (SIGKILL)"), tmp_path)
    killed = {1: Failed(-9), 2: Failed(-15)}
    assert last_words({0: known, **killed}).endswith(" Cause: killed by signal 9 (SIGKILL)")
    assert last_words({0: gone, **killed}).endswith("process is gone; rank 1 was killed by signal 9 (SIGKILL)")
    collective = left_by(dist.DistNetworkError("closed by peer"), tmp_path)
    assert last_words({0: collective, 1: Failed(-15)}).startswith("odc: failed: rank 0: DistNetworkError: closed")
    try:
        dist.all_reduce(torch.ones(1))
    except ValueError as error:
        collective = left_by(error, tmp_path)
    assert last_words({0: collective, **killed}).startswith("odc: failed: rank 1 was killed by signal 9")


def test_the_rank_that_explains_is_heard(tmp_path: Path) -> None:
    told = left_by(AbortedError("rank 0 aborted because rank 2: PeerDiedError"), tmp_path)
    first, later = (left_by(MisuseError(text), tmp_path) for text in ("the cause", "what followed"))
    silent, dead = (left_by(kind("rank 1"), tmp_path) for kind in (PeerSilentError, PeerDiedError))
    assert last_words({0: told, 1: Failed(-15), 2: dead}) == "odc: failed: rank 1, on rank 2"
    assert last_words({0: silent, 1: later, 2: first}) == "odc: refused: the cause, on rank 2"
    assert last_words({0: told, 1: told, 2: left_by(SetupError("rank 3 was killed"), tmp_path), 3: Failed(-9)}) == (
        "odc: refused: rank 3 was killed, on rank 2"
    )


def errors_of_odc(base: type[OdcError] = OdcError) -> list[type[OdcError]]:
    """Every class of ``odc.errors``, and what other files have made of them."""
    return [base, *(found for one in base.__subclasses__() for found in errors_of_odc(one))]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("error", errors_of_odc(), ids=lambda error: error.__name__)
def test_every_error_of_odc_ends_a_rank_in_one_line(
    error: type[OdcError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "s.py"
    script.write_text(f"from {error.__module__} import {error.__name__}\n\nraise {error.__name__}('not\\nthis')")
    with pytest.raises(SystemExit) as ended:
        launch_main.main([str(script)])
    line = str(ended.value.code)
    assert re.fullmatch(rf"odc: (refused|failed): not this \({re.escape(str(script))}, line 3\)", line), line
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        launch_main.main(["--launcher-tells", str(script)])
    assert ended.value.code == 1
    assert last_words({0: ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))}) == line
    assert "Traceback" not in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        launch_main.main(["--launcher-tells", "--traceback", str(script)])
    assert f'{script}", line 3' in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "error.json"))  # it cannot be left there
    with pytest.raises(SystemExit) as ended:
        launch_main.main(["--launcher-tells", str(script)])
    assert ended.value.code == line


def test_all_errors_that_are_documented_are_looked_at() -> None:
    named = {one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, Exception)}
    assert {MisuseError, PeerDiedError} < named <= set(errors_of_odc())


@pytest.mark.usefixtures("interpreter")
def test_a_rank_leaves_its_line_before_the_others_hear_of_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end then, and torchrun ends those that are left."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    heard: list[bool] = []
    monkeypatch.setattr(
        AutomaticPatching, "abort", lambda patching, error: heard.append((tmp_path / "error.json").exists())
    )
    script = tmp_path / "s.py"
    script.write_text("from odc.errors import MisuseError\n\nraise MisuseError('not this')")
    with pytest.raises(SystemExit):
        launch_main.main(["--launcher-tells", str(script)])
    assert heard == [True]
    ended = ProcessFailure(0, 1, -15, str(tmp_path / "error.json"))
    (tmp_path / "other").mkdir()
    told = left_by(AbortedError("told"), tmp_path / "other")
    assert last_words({0: ended, 1: told}).startswith("odc: refused: not this")


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
@pytest.mark.parametrize("text", ["bar = tqdm.tqdm(total=3); bar.update(1)", "list(tqdm.tqdm([1]))", ""])
def test_a_line_is_not_glued_to_a_progress_bar(
    arguments: list[str], text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "s.py"
    script.write_text(f"import tqdm\n{text}")
    with pytest.raises(SystemExit) if arguments else contextlib.nullcontext():
        launch_main.main([*arguments, str(script)])
    lines = capfd.readouterr().err.removesuffix("\n").split("\n")
    assert lines[-1].startswith("odc: ")
    assert len(lines) == 1 + bool(text)


@pytest.mark.usefixtures("interpreter")
def test_what_closing_finds_ends_in_one_line_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = AutomaticPatching.close

    def close(patching: AutomaticPatching) -> None:
        original(patching)
        raise PeerDiedError("while closing")

    monkeypatch.setattr(AutomaticPatching, "close", close)
    script = tmp_path / "s.py"
    script.touch()
    with pytest.raises(SystemExit) as ended:
        launch_main.main([str(script)])
    assert ended.value.code == "odc: failed: while closing"


@pytest.mark.usefixtures("interpreter")
def test_a_dry_run_leaves_its_refusal_to_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "s.py"
    script.write_text("from odc.errors import UnsupportedError\n\nraise UnsupportedError('not this')")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        launch_main.main(["--launcher-tells", "--dry-run", str(script)])
    assert ended.value.code == 1
    line = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert line == f"odc: refused: not this ({script}, line 3)"


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
        rank=1,
        local_rank=1,
        world_size=2,
        local_world_size=2,
        master_addr="host",
        master_port=5,
        agent_store=True,
        attempt="3",
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
        launch_main, "AutomaticPatching", lambda *a, **k: patchings.append(AutomaticPatching(*a, **k)) or patchings[0]
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
