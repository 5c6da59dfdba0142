"""Layer 1: no processes. What is wrong is said in one line, with status 2, before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import call, error, saved

from odc.balance import preset_names

LONG = "x" * 5000


@pytest.fixture
def uncomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts to work fails."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("computed something")

    monkeypatch.setattr("odc.cli.given.read_lengths", fail)


@pytest.mark.usefixtures("uncomputed")
@pytest.mark.parametrize("command", ["plan", "simulate"])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder: expected a file in it"),
        ("picture", "ends in '': expected one of .png, .svg, .pdf"),
        ("picture.jpeg", "ends in '.jpeg': expected one of .png, .svg, .pdf"),
        ("nowhere/picture.png", "there is no folder"),
    ],
)
def test_pictures_that_cannot_be_saved(tmp_path: Path, command: str, name: str, message: str) -> None:
    assert message in error(command, "aime", "--plot", str(tmp_path / name))


@pytest.mark.usefixtures("uncomputed")
def test_pictures_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'odc-fsdp[plot]'" in error("plan", "aime", "--plot", str(tmp_path / "a.png"))


def test_a_picture_that_the_disk_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "a.png"))

    monkeypatch.setattr("odc.cli.plots.plot_plan", full)
    message = error("plan", "aime", "--set", "samples=64", "--plot", str(tmp_path / "a.png"))
    assert message == f"error: No space left on device: '{tmp_path / 'a.png'}'"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([LONG], "File name too long: 'xxx"),
        (["aime", "--model", LONG], "File name too long"),
        (["aime", "--set", f"timings={LONG}"], "File name too long"),
        (["aime", "--set", "timings=."], "'.' is a folder: expected a file"),
        (["no[/such].txt"], "'no[/such].txt' is neither a file nor a length law"),
        (["aime", "--set", "noise=1e300"], "error: "),
        (["aime", "--set", "noise=inf"], "noise is 'inf', expected a finite number"),
        (["aime", "--set", "gather-ms=inf"], "gather-ms is 'inf', expected a finite number"),
        (["aime", "--set", "samples=1000000000000000"], "not enough memory"),
        (["aime", "--world-size", "1" + "0" * 30], "expected an integer of at most"),
        (["aime", "--set", "panel=minibatch"], "expected --plot too"),
        (["aime", "--set", "truncate=yes"], "--set truncate=yes needs --max-tokens"),
        (["aime", "--set", "speeds=1,1,1,1,1,1,1,0"], "greater than 0"),
        (["aime", "--set", "speeds=1,1,1,1,1,1,1,-2"], "greater than 0"),
        (["aime", "--set", "speeds=1,1,1,1,1,1,1,inf"], "finite"),
    ],
)
def test_errors_are_one_short_line(arguments: list[str], message: str) -> None:
    found = error("plan", *arguments)
    assert message in found
    assert len(found) < 300


@pytest.mark.parametrize(
    ("command", "option"),
    [("plan", name) for name in ("--set", "--policy", "--model", "--tokenizer", "--plot", "--field")]
    + [("simulate", name) for name in ("--factor", "--values", "--model")],
)
def test_no_input_is_repeated_whole(command: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"length": 1}')
    for text in ("x" * 500_000, "1," * 250_000):
        factor = ["--factor", "noise"] if option == "--values" else []
        assert len(error(command, str(tmp_path / "a.jsonl"), *factor, option, text)) < 1500


@pytest.mark.parametrize(
    "arguments", [["plan", "/dev/zero"], ["simulate", "/dev/zero"], ["plan", "aime", "--set", "timings=/dev/zero"]]
)
def test_devices(arguments: list[str]) -> None:
    assert error(*arguments) == "error: '/dev/zero' is a device or a socket: expected a file"


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (PermissionError(13, "Permission denied", "a.txt"), "error: Permission denied: 'a.txt'"),
        (OverflowError("out of range"), "error: a number is too large: out of range"),
        (MemoryError(), "error: not enough memory"),
        (ValueError("two\nlines"), "error: two lines"),
    ],
)
def test_whatever_users_can_cause(raised: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("odc.cli.given.read_lengths", refuse)
    for command in ("plan", "simulate"):
        assert error(command, "a.txt") == message


@pytest.mark.parametrize("value", ["inf", "nan", "2,-inf", "1e300"])
def test_values_of_simulate_are_finite(value: str) -> None:
    found = error("simulate", "--samples", "256", "--factor", "devices", "--values", value)
    assert found.endswith("expected finite numbers, at most 1,000,000,000,000")


def test_too_few_samples(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.npy", [10] * 100)
    assert error("plan", path, "--world-size", "64").endswith("lower --minibatch-size or --world-size")
    assert error("plan", "aime", "--set", "samples=9").endswith("or raise samples")
    found = error("simulate", path, "--factor", "devices", "--values", "2,64")
    assert "4 samples on each of 64 ranks at devices=64" in found


def test_models_that_are_not_there(tmp_path: Path) -> None:
    assert f"there is no {tmp_path / 'config.json'}" in error("plan", "aime", "--model", str(tmp_path))
    assert ", ".join(preset_names()) in error("plan", "aime", "--model", "qwen9")


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_interrupts(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("odc.cli.given.make_training", interrupt)
    result = call(command, "aime")
    assert (result.exit_code, result.stdout, result.stderr.strip()) == (130, "", "interrupted")
