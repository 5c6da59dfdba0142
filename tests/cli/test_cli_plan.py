"""Layer 1: no processes. ``odc plan`` and ``odc simulate``, as users call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_calls import plan, printed, refused, saved, timings, words

from odc.balance import sample_lengths
from odc.cli.app import app

SMALL = ["--set", "samples=512", "--set", "minibatches=8", "--model", "qwen2.5-1.5b"]


def test_table_fits_80_columns() -> None:
    table = printed("plan", "longalign", *SMALL, "--set", "minibatches=4", "--policy", "all")
    assert max(map(len, table.splitlines())) <= 80
    for name in ("lb-mini", "verl-native", "local-sort"):
        assert f"│ {name} " in table
    assert "use ODC with lb-mini" in table


def test_figures_are_those_of_the_plans() -> None:
    found = plan("longalign", *SMALL)
    rows = {(row["policy"], row["comm"]): row for row in found["policies"]}
    assert ("lb-mini", "collective") not in rows
    mini, micro = rows["lb-mini", "odc"], rows["lb-micro", "collective"]
    assert micro["speedup"] == 1.0
    assert mini["speedup"] == pytest.approx(mini["samples_per_s"] / micro["samples_per_s"])
    # The work is the same: throughput goes with the part of the time that is not waiting.
    assert mini["speedup"] == pytest.approx((1 - mini["bubble_rate"]) / (1 - micro["bubble_rate"]))
    assert all(0 <= row["bubble_rate"] < 1 and row["memory_bytes"] > 0 for row in rows.values())
    assert found["num_minibatches"] == 8
    assert "lb-mini" in found["recommendation"]


def test_lengths_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, sample_lengths("aime", 200))))
    found = plan(str(path), "--world-size", "4", "--minibatch-size", "2", "--max-tokens", "30000")
    assert (found["world_size"], found["minibatch_size"], found["max_tokens"]) == (4, 2, 30000)
    assert found["num_minibatches"] == 25


def test_equal_lengths_leave_nothing_to_gain(tmp_path: Path) -> None:
    found = plan(saved(tmp_path / "lengths.npy", [1000] * 256))
    assert found["recommendation"].startswith("With samples shuffled, stay with FSDP")


def test_noise_makes_ranks_wait() -> None:
    arguments = ("aime", *SMALL, "--minibatch-size", "8", "--policy", "lb-mini")
    quiet, noisy = plan(*arguments), plan(*arguments, "--set", "noise=0.3")
    assert quiet["policies"][0]["bubble_rate"] < 0.01 < noisy["policies"][0]["bubble_rate"]


def test_communication_that_nothing_hides_costs_time() -> None:
    arguments = ("aime", *SMALL, "--policy", "lb-micro")
    free = plan(*arguments)
    paid = plan(
        *arguments, "--set", "gather-ms=50", "--set", "scatter-ms=50", "--set", "odc-slower=2", "--set", "overlap=0"
    )
    for before, after in zip(free["policies"], paid["policies"], strict=True):
        assert after["samples_per_s"] < 0.99 * before["samples_per_s"]
    (collective, odc), (free_collective, free_odc) = paid["policies"], free["policies"]
    lost = [
        1 / a["samples_per_s"] - 1 / b["samples_per_s"] for a, b in ((collective, free_collective), (odc, free_odc))
    ]
    assert lost[1] > 1.5 * lost[0]  # twice as long; ranks with fewer microbatches have less of it


@pytest.mark.parametrize(
    ("options", "counted"),
    [
        ((), "1.17 ms to gather a layer and 2.33 to push its gradients"),  # as docs/gpu.md has them
        (("--set", "gather-ms=0"), "0 ms to gather a layer and 2.33"),
        (("--set", "scatter-ms=3"), "1.17 ms to gather a layer and 3 "),
        (("--device", "a100"), "1.75 ms to gather a layer and 3.5 "),
        (("--world-size", "1"), None),
        (("--world-size", "16"), None),
        (("--set", "timings=timings"), None),
    ],
    ids=str,
)
def test_transfers_within_a_host_are_counted_unless_they_are_given(
    options: tuple[str, ...], counted: str | None, tmp_path: Path
) -> None:
    measured = timings(tmp_path / "t.csv", range(1000, 9000, 1000), lambda tokens: tokens / 1000)
    given = (option.replace("=timings", f"={measured}") for option in options)
    costs = str(plan("aime", "--model", "qwen2.5-7b", "--set", "minibatches=2", *given)["costs"])
    assert (" to gather " in costs) == (counted is not None)
    assert (counted or "") in costs


def test_a_slow_rank_gets_less() -> None:
    arguments = ("aime", *SMALL, "--policy", "lb-mini", "--minibatch-size", "8", "--world-size", "4")
    found = plan(*arguments, "--set", "speeds=1,1,1,0.5")
    assert found["policies"][0]["bubble_rate"] < 0.01
    assert "speeds has 2 entries" in refused("plan", *arguments, "--set", "speeds=1,1")


def test_long_samples_are_refused_or_cut() -> None:
    message = refused("plan", "longalign", *SMALL, "--max-tokens", "20000")
    assert "longer than --max-tokens 20000: raise --max-tokens to 65" in message
    assert "cut them with --set truncate=yes" in message
    assert plan("longalign", *SMALL, "--max-tokens", "20000", "--set", "truncate=yes")["max_tokens"] == 20000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rollouts", "aime", "--set", "reorder=no"], "--set: 'reorder=no' is not known: expected of timings="),
        (["aime", "--set", "microbatch-cost=inf"], "microbatch-cost is 'inf', expected a finite number of at least 0"),
        (["nowhere.txt"], "neither a file nor a length law"),
        (["aime", "--model", "qwen9"], "'qwen9' is neither a file nor a preset"),
        (["aime", "--policy", "lb-nano"], "'lb-nano' is not known"),
        (["aime", "--set", "samples=10"], "lower --minibatch-size or --world-size, or raise samples"),
        (["aime", "--set", "timings=none.csv"], "there is no file"),
        (["aime", "--policy", "verl-native", "--set", "batch-size=6"], "batch_size=6: expected a multiple"),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], message: str) -> None:
    assert message in refused("plan", *arguments)


def test_rollouts_stay_as_far_as_the_policy_can() -> None:
    options = [*SMALL, "--world-size", "8", "--minibatch-size", "8"]
    found = plan("rollouts", "aime", *options, "--ranks-per-node", "4")
    moved = found["moved"]
    assert moved["none"] == {"share": 0.0, "between_nodes": 0.0, "most_bytes": 0.0, "seconds": 0.0}
    mini, micro = moved["lb-mini"], moved["lb-micro"]
    assert 0 < mini["between_nodes"] < mini["share"] < micro["share"] < 1
    assert mini["most_bytes"] == pytest.approx(mini["seconds"] * 50e9)  # InfiniBand of an H100
    # As good as without: only where batches go is another question.
    plain = {row["policy"]: row["bubble_rate"] for row in plan("aime", *options)["policies"]}
    for row in found["policies"]:
        if row["comm"] == "odc" and row["policy"] in ("lb-micro", "lb-mini"):
            assert row["bubble_rate"] == pytest.approx(plain[row["policy"]], abs=2e-3)
    text = words("plan", "rollouts", "aime", *options, "--set", "minibatches=2")
    assert "Rollouts that change ranks, of all tokens: lb-micro" in text
    assert "MB a step (32 bytes a token)" in text
    text = words("plan", "rollouts", "aime", *options, "--set", "minibatches=2", "--policy", "none")
    assert "Rollouts stay where they were generated." in text


def test_pictures(tmp_path: Path) -> None:
    for command, name in (("plan", "plan.png"), ("simulate", "studies.svg")):
        extra = (
            [*SMALL, "--set", "minibatches=2"]
            if command == "plan"
            else ["--samples", "256", "--factor", "devices", "--values", "2,4"]
        )
        text = printed(command, "longalign", *extra, "--plot", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 10_000
        assert name in text.replace("\n", "")


def test_simulate_follows_figure_10() -> None:
    """The trends that section 5.3 of the paper describes."""
    studies = json.loads(printed("simulate", "--samples", "256", "--json"))["studies"]
    gains = {name: [point["speedup"] - 1 for point in points] for name, points in studies.items()}
    sizes = gains["minibatch_size"]
    assert sizes[0] == pytest.approx(0.0, abs=1e-9)  # one sample each: nothing can be moved
    assert 0 < sizes.index(max(sizes)) < len(sizes) - 1
    assert gains["max_length"][0] < gains["max_length"][3]
    assert gains["packing_ratio"][0] > gains["packing_ratio"][2] + 0.05
    assert gains["devices"][0] + 0.05 < gains["devices"][2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--factor", "weather"], "'weather' is not known"),
        (["--values", "1,2"], "--values is for a single factor"),
        (["--factor", "devices", "--values", "1,x"], "expected numbers separated by commas"),
        (["--factor", "devices", "--values", "2.5"], "devices=2.5: expected an integer"),
        (["--factor", "packing-ratio", "--values", "0.5"], "packing_ratio=0.5: expected at least 1"),
    ],
)
def test_simulate_errors(arguments: list[str], message: str) -> None:
    assert message in refused("simulate", "--samples", "256", *arguments)


def test_help_teaches() -> None:
    for command in ("plan", "simulate"):
        text = printed(command, "--help")
        assert "Examples" in text
        examples = [line for line in text.splitlines() if line.strip().startswith(f"odc {command}")]
        assert len(examples) == (5 if command == "plan" else 2)
        assert max(map(len, map(str.rstrip, examples))) < 70


def test_a_command_has_few_options() -> None:
    commands: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    counts = {name: len(command.params) for name, command in commands.items() if name.startswith(("plan", "simulate"))}
    assert len(counts) == 6
    assert max(counts.values()) <= 15


def test_help_is_readable_at_80_columns() -> None:
    text = printed("plan", "--help")
    assert "--set recompute=...: Whether activations" in text
    assert "is trained" not in [" ".join(line.split()[:2]) for line in text.splitlines()]  # a break of the source


def test_planning_needs_no_torch() -> None:
    """It would cost seconds before the first progress bar."""
    script = "import sys; import odc.cli; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0
