"""Layer 1: no processes. What ``odc plan`` recommends, and how it writes numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli_calls import plan, printed, saved, timings, words

from odc.cli.output import gigabytes, significant

SMALL = ["--set", "samples=1024", "--set", "minibatches=16", "--model", "qwen2.5-1.5b", "--set", "reorder=no"]
BOTH = ["--policy", "lb-micro", "--policy", "lb-mini"]


def advice(*arguments: str) -> str:
    return str(plan(*arguments)["recommendation"])


def test_says_how_much_slower_odc_is_and_why() -> None:
    arguments = (
        "aime",
        *SMALL,
        *BOTH,
        "--set",
        "gather-ms=5",
        "--set",
        "scatter-ms=5",
        "--set",
        "overlap=0",
        "--set",
        "odc-slower=5",
    )
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
    text = advice(saved(tmp_path / "a.npy", [*[1000] * 7, longest] * 256), *SMALL[2:], "--minibatch-size", "1")
    assert "longest samples hold ODC back" in text
    assert f"with --minibatch-size {size}, in fewer than half. odc plan context-parallel divides them." in text


def test_somebody_who_may_reorder_and_one_who_may_not() -> None:
    """What plain FSDP has with lengths grouped is not kept from the first, nor its price from the second."""
    found = plan("longalign", "--set", "samples=1024", "--model", "qwen2.5-1.5b")
    rates = {
        order: {(row["policy"], row["comm"]): row["samples_per_s"] for row in each["policies"]}
        for order, each in found["orders"].items()
    }
    shuffled, grouped = rates["shuffled"]["lb-mini", "odc"], rates["grouped"]
    assert ("none", "odc") not in grouped  # without a gain of its own
    assert rates["shuffled"]["none", "collective"] < shuffled < grouped["none", "collective"]
    fsdp = max(rate for (_, comm), rate in grouped.items() if comm == "collective")
    text = found["recommendation"]
    assert text.startswith("With samples shuffled, use ODC with lb-mini: 1.")
    assert "If your training allows steps of similar lengths (group_by_length; " in text
    assert f"FSDP with lb-micro-global {fsdp / shuffled:.2f}x, ODC with lb-mini " in text
    packed = rates["packed"]["bfd", "collective"]
    assert f" samples a step): {packed / shuffled:.2f}x" in text
    varies = {order: each["variation_of_lengths"] for order, each in found["orders"].items()}
    assert varies["grouped"] < varies["shuffled"] / 2
    assert f"vary by {varies['grouped']:.0%} of their mean, not {varies['shuffled']:.0%}" in text
    table = printed("plan", "longalign", "--set", "samples=256", "--set", "minibatches=4")
    assert table.index("│ lengths grouped │") < table.index("│ packed by TRL   │")


@pytest.mark.parametrize("policies", [[], ["--policy", "lb-mini"], ["--policy", "none"]])
def test_orders_of_few_policies_and_equal_lengths(policies: list[str], tmp_path: Path) -> None:
    text = advice(saved(tmp_path / "a.npy", [1000] * 2048), *policies)
    assert text.startswith("With samples shuffled, ")
    assert "Steps of similar lengths (group_by_length) would bring less than 2% more." in text


def test_few_minibatches_are_called_rough() -> None:
    arguments = ("longalign", *SMALL[:2], *SMALL[4:], *BOTH, "--minibatches")
    assert "This is rough: 3 minibatches only" in advice(*arguments, "3")
    assert "rough" not in advice(*arguments, "16")


def test_what_a_microbatch_costs_besides() -> None:
    """Of samples of which each has a microbatch of its own, four a rank, a rank takes four times that longer."""
    free, paid = (
        plan("longalign", *SMALL, "--policy", "none", *extra) for extra in ([], ["--set", "microbatch-cost=0.5"])
    )
    for before, after in zip(free["policies"], paid["policies"], strict=True):
        assert 32 / after["samples_per_s"] == pytest.approx(32 / before["samples_per_s"] + 4 * 0.5)
    assert "0.5 s for each microbatch" in paid["costs"]
    assert "0.5 s for each" in printed(
        "simulate", "aime", "--factor", "devices", "--values", "2", "--set", "microbatch-cost=0.5"
    )


def test_the_hint_without_a_size_that_is_enough(tmp_path: Path) -> None:
    lengths = [10] * 63 + [1_000_000]
    text = advice(saved(tmp_path / "a.npy", lengths * 16), *SMALL[2:], "--world-size", "64", "--minibatch-size", "1")
    assert text.endswith("a larger minibatch would hide them. odc plan context-parallel divides them.")
    equal = advice(saved(tmp_path / "b.npy", [1000] * 2048), *SMALL[2:], "--minibatch-size", "1")
    assert "longest samples" not in equal


def test_where_only_fsdp_fits_it_is_advised(tmp_path: Path) -> None:
    """32B on eight H100s: ODC's own memory is what is too much."""
    lengths = saved(tmp_path / "a.npy", [900, 300, 200, 100] * 64)
    found = plan(lengths, "--model", "qwen2.5-32b", "--world-size", "8", "--max-tokens", "1000", "--set", "reorder=no")
    fits = {row["comm"]: row["fits"] for row in found["policies"]}
    assert fits == {"collective": True, "odc": False}
    assert found["recommendation"].startswith("Stay with FSDP and ")
    assert ": with ODC the model's sharded state alone needs 102 GB of 80 GB. Use more" in found["recommendation"]


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
    found = plan(*arguments, "--set", "recompute=no")
    assert found["recommendation"].startswith("Does not fit: the largest microbatch, ")
    assert "Use --set recompute=yes, or odc plan context-parallel, or --max-tokens " in found["recommendation"]
    limit = found["recommendation"].split("--max-tokens ")[1].split()[0]
    assert f"--max-tokens {limit} --set truncate=yes, or a device" in found["recommendation"]
    cut = plan(*arguments, "--set", "recompute=no", "--max-tokens", limit, "--set", "truncate=yes")
    assert all(row["fits"] for row in cut["policies"])
    one_more = plan(*arguments, "--set", "recompute=no", "--max-tokens", str(int(limit) + 1), "--set", "truncate=yes")
    assert not all(row["fits"] for row in one_more["policies"])


def test_recompute_is_not_proposed_where_it_is_on() -> None:
    arguments = ("aime", *SMALL[:4], "--model", "qwen2.5-7b", *BOTH, "--minibatch-size", "64")
    text = advice(*arguments, "--max-tokens", "120000")
    assert text.startswith("Does not fit: the largest microbatch")
    assert "recompute=yes" not in text
    assert "truncate=yes" not in text  # what fits is more than the longest sample
    assert re.search(r"more ranks, or --max-tokens \d{5,6}, or a device with more memory", text)
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
    lengths = saved(tmp_path / "a.npy", [3, 5] * 500)
    measured = timings(tmp_path / "t.csv", (1, 2, 4, 8), lambda tokens: tokens / 1e5)
    text = printed("plan", lengths, "--set", f"timings={measured}", "--policy", "all", "--world-size", "64")
    assert "speedup over lb-micro with FSDP" in text
    assert "GiB" not in text
    assert "e+0" not in text
    assert max(map(len, text.splitlines())) <= 80
    costs = " ".join(text.split("Costs:")[1].split("(")[0].split())
    assert ":" not in costs
    title = printed("plan", "aime", *SMALL, "--policy", "none")
    assert "speedup over none with FSDP" in title
    assert "the best FSDP plan" in words("plan", "longalign", *SMALL)


def test_simulate_says_what_it_uses(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("10\n" * 300)
    arguments = ("simulate", str(path), "--factor", "devices", "--values", "2")
    assert printed(*arguments).startswith("300 samples, 3,000 tokens; ")
    text = words(*arguments, "--samples", "100")
    assert "100 samples with 1,000 tokens are used" in text
    found = json.loads(printed(*arguments, "--samples", "100", "--json"))
    assert (found["samples_read"], found["samples_used"]) == (300, 100)
    assert "of a file" in words("simulate", "--help")
