"""Layer 1: no processes. What ``odc plan`` recommends, and how it writes numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from odc.cli.app import app
from odc.cli.output import gigabytes, significant

SMALL = ["--samples", "1024", "--minibatches", "8", "--model", "qwen2.5-1.5b"]
BOTH = ["--policy", "lb-micro", "--policy", "lb-mini"]


def call(*arguments: str) -> Result:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.output
    return result


def plan(*arguments: str) -> dict[str, object]:
    return json.loads(call("plan", *arguments, "--json").stdout)


def advice(*arguments: str) -> str:
    return str(plan(*arguments)["recommendation"])


def test_says_how_much_slower_odc_is_and_why() -> None:
    arguments = ("aime", *SMALL, *BOTH, "--gather-ms", "5", "--scatter-ms", "5", "--overlap", "0", "--odc-slower", "5")
    found = plan(*arguments)
    rows = {(row["policy"], row["comm"]): row["samples_per_s"] for row in found["policies"]}
    fsdp = rows["lb-micro", "collective"]
    slower = 1 - max(rows["lb-micro", "odc"], rows["lb-mini", "odc"]) / fsdp
    assert found["recommendation"].startswith("Stay with FSDP and lb-micro")
    assert f"ODC would be {slower:.1%} slower: its transfers take " in found["recommendation"]


def test_no_gain_is_called_so() -> None:
    text = advice("aime", *SMALL, "--minibatch-size", "1")
    assert text.startswith("Stay with FSDP")
    assert "ODC would be no faster" in text


@pytest.mark.parametrize(("longest", "size"), [(5_000, 4), (10_000, 8)])
def test_one_sample_each_hints_at_the_minibatch_size(longest: int, size: int, tmp_path: Path) -> None:
    """One sample of 8 takes x times as long: the mean rank has (7 + x)n / 8, above x from n = 3.3 and 4.7."""
    text = advice(_saved(tmp_path / "a.npy", [1000] * 7 + [longest]), *SMALL[2:], "--minibatch-size", "1")
    assert "longest samples hold ODC back" in text
    assert f"with --minibatch-size {size}, in fewer than half. --context-parallel divides them." in text


def test_the_hint_without_a_size_that_is_enough(tmp_path: Path) -> None:
    lengths = [10] * 63 + [1_000_000]
    text = advice(_saved(tmp_path / "a.npy", lengths, 8), *SMALL[2:], "--world-size", "64", "--minibatch-size", "1")
    assert text.endswith("a larger minibatch would hide them. --context-parallel divides them.")
    equal = advice(_saved(tmp_path / "b.npy", [1000] * 8), *SMALL[2:], "--minibatch-size", "1")
    assert "longest samples" not in equal


def _saved(path: Path, pattern: list[int], times: int = 256) -> str:
    np.save(path, np.array(pattern * times))
    return str(path)


def test_a_state_that_does_not_fit() -> None:
    found = plan("aime", *SMALL[:4], "--model", "qwen2.5-72b", "--world-size", "2", *BOTH)
    assert found["recommendation"].startswith("Does not fit: the model's sharded state alone needs ")
    assert "of 80 GB. Use more ranks, or a device with more memory." in found["recommendation"]
    assert [row["fits"] for row in found["policies"]] == [False] * 3


def test_a_microbatch_that_does_not_fit() -> None:
    arguments = ("longalign", *SMALL[:4], "--model", "qwen2.5-7b", *BOTH)
    fitting = plan(*arguments)
    assert all(row["fits"] for row in fitting["policies"])
    assert "Does not fit" not in fitting["recommendation"]
    found = plan(*arguments, "--no-recompute")
    assert found["recommendation"].startswith("Does not fit: the largest microbatch, ")
    assert "Use --recompute, or --context-parallel, or --max-tokens " in found["recommendation"]
    limit = found["recommendation"].split("--max-tokens ")[1].split()[0]
    assert f"--max-tokens {limit} --truncate, or a device" in found["recommendation"]
    cut = plan(*arguments, "--no-recompute", "--max-tokens", limit, "--truncate")
    assert all(row["fits"] for row in cut["policies"])
    one_more = plan(*arguments, "--no-recompute", "--max-tokens", str(int(limit) + 1), "--truncate")
    assert not all(row["fits"] for row in one_more["policies"])


def test_recompute_is_not_proposed_where_it_is_on() -> None:
    arguments = ("aime", *SMALL[:4], "--model", "qwen2.5-7b", *BOTH, "--minibatch-size", "64")
    text = advice(*arguments, "--max-tokens", "120000")
    assert text.startswith("Does not fit: the largest microbatch")
    assert "--recompute" not in text
    assert "--truncate" not in text  # what fits is more than the longest sample
    assert re.search(r"more ranks, or --max-tokens \d{6}, or a device with more memory", text)
    # No number of ranks shards activations.
    assert "Use --max-tokens" in advice(*arguments, "--max-tokens", "400000")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (24123.4, "24,100"),
        (2.1, "2.10"),
        (9.996, "10.0"),
        (999.6, "1,000"),
        (0.07661, "0.0766"),
        (1.234e-7, "0.000000123"),
        (1.5e9, "1,500,000,000"),
        (0.0, "0"),
    ],
)
def test_three_significant_digits(value: float, text: str) -> None:
    assert significant(value) == text


def test_memory_is_rounded_up() -> None:
    assert (gigabytes(80e9), gigabytes(80e9 + 1), gigabytes(1.5e12)) == ("80 GB", "81 GB", "1,500 GB")


def test_the_table_names_its_baseline_and_one_unit(tmp_path: Path) -> None:
    lengths = tmp_path / "a.txt"
    lengths.write_text("3\n5\n" * 500)
    timings = tmp_path / "t.csv"
    timings.write_text("length,seconds\n1,0.00001\n2,0.00002\n4,0.00004\n8,0.00008\n")
    text = call("plan", str(lengths), "--timings", str(timings), "--policy", "all", "--world-size", "64").stdout
    assert "speedup over lb-micro with FSDP" in text
    assert "GiB" not in text
    assert "e+0" not in text
    assert max(map(len, text.splitlines())) <= 80
    costs = " ".join(text.split("Costs:")[1].split("(")[0].split())
    assert ":" not in costs
    title = call("plan", "aime", *SMALL, "--policy", "none").stdout
    assert "speedup over none with FSDP" in title
    assert "the best FSDP plan" in call("plan", "longalign", *SMALL).stdout.replace("\n", " ")


def test_simulate_says_what_it_uses(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("10\n" * 300)
    arguments = ("simulate", str(path), "--factor", "devices", "--values", "2")
    assert call(*arguments).stdout.startswith("300 samples, 3,000 tokens; ")
    text = " ".join(call(*arguments, "--samples", "100").stdout.split())
    assert "100 samples with 1,000 tokens are used" in text
    found = json.loads(call(*arguments, "--samples", "100", "--json").stdout)
    assert (found["samples_read"], found["samples_used"]) == (300, 100)
    assert "of a file" in " ".join(call("simulate", "--help").stdout.replace("│", " ").split())
