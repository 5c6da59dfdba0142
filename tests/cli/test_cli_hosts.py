"""Layer 1: no processes. ``odc plan hosts``: what crosses between hosts, and which way to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cli_calls import plan, printed, refused, timings, words

SMALL = ("longalign", "--set", "samples=1024", "--set", "minibatches=4", "--world-size", "16")


def ways_of(found: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(way["comm"], way["sharding"]): way for way in found["ways"]}


def test_what_crosses_and_the_memory_it_takes_are_counted_for_each_way() -> None:
    """The sums of docs/meshes.md: 7.6 billion parameters, 2 hosts of 8 ranks, 4 microbatches on each."""
    found = plan("hosts", *SMALL, "--hosts", "2", "--max-tokens", "65536", "--policy", "none")
    ways = ways_of(found)
    gigabytes = {way: row["bytes_into_a_host"] / 1e9 for way, row in ways.items()}
    assert gigabytes == pytest.approx(
        {
            ("collective", "full"): 228,
            ("collective", "hybrid"): 30.5,
            ("odc", "shared"): 22.8,
            ("odc", "hybrid"): 30.5,
            ("odc", "full"): 975,
        },
        rel=3e-3,
    )
    memory = {way: row["memory_bytes"] / 1e9 for way, row in ways.items()}
    more = memory["odc", "shared"] - memory["odc", "full"]
    assert more == pytest.approx(6 * 7.616 * (1 / 8 - 1 / 16), rel=1e-3)  # published, and summed
    more = memory["collective", "hybrid"] - memory["collective", "full"]
    assert more == pytest.approx(16 * 7.616 * (1 / 8 - 1 / 16), rel=1e-3)  # master, gradient, moments
    rows = {row["comm"]: row for row in found["policies"]}
    assert rows["odc"]["memory_bytes"] == ways["odc", "shared"]["memory_bytes"]
    for comm, sharding in (("collective", "full"), ("odc", "shared")):
        assert rows[comm]["samples_per_s"] == ways[comm, sharding]["samples_per_s"]


def test_a_slow_network_is_for_what_crosses_once_and_a_fast_one_for_all() -> None:
    slow, fast = (ways_of(plan("hosts", *SMALL, "--hosts", "2", "--between", speed)) for speed in ("10Gb", "100GB"))
    order = sorted(slow, key=lambda way: slow[way]["samples_per_s"])
    assert order == [
        *(("odc", "full"), ("collective", "full"), ("collective", "hybrid"), ("odc", "hybrid"), ("odc", "shared"))
    ]
    for way in slow:
        assert slow[way]["hidden"] <= fast[way]["hidden"] <= 1
        assert slow[way]["samples_per_s"] < fast[way]["samples_per_s"]
    # What crosses at the end of a step is not hidden: 22.8 GB at 1.25 GB/s.
    one_host = plan(
        *SMALL, "--policy", "lb-mini", "--set", "reorder=no", "--set", "gather-ms=0", "--set", "scatter-ms=0"
    )
    options = ("--hosts", "2", "--between", "10Gb", "--set", "gather-ms=0", "--set", "scatter-ms=0")
    over_two = plan("hosts", *SMALL, "--policy", "lb-mini", "--set", "reorder=no", *options)
    step_s = [64 / found["policies"][0]["samples_per_s"] for found in (one_host, over_two)]
    assert step_s[1] - step_s[0] == pytest.approx(22.85 / 1.25, rel=1e-3)


def test_the_table_fits_and_says_what_to_take() -> None:
    table = printed("plan", "hosts", *SMALL, "--hosts", "2", "--between", "100Gbit/s")
    assert max(map(len, table.splitlines())) <= 80
    text = " ".join(table.split())
    for said in (
        "Over 2 hosts with 12.5 GB/s into each",
        "│ ODC, shared in host │ 22.8 GB",
        "odc run and odc.patch_fsdp",
    ):
        assert said in text
    assert "Over these hosts, take ODC, shared in host: 1." in text
    assert "Over these hosts, none of these ways fits." in words(
        "plan", "hosts", *SMALL, "--hosts", "2", "--model", "qwen2.5-72b"
    )


def test_layers_communicate_also_where_costs_are_measured(tmp_path: Path) -> None:
    """28 layers are gathered twice and pushed once, in each microbatch."""
    measured = timings(tmp_path / "t.csv", range(1000, 9000, 1000), lambda tokens: tokens / 1000)
    options = (*SMALL, "--set", f"timings={measured}", "--policy", "none", "--set", "reorder=no", "--set", "overlap=0")
    free, paid = (plan(*options, "--set", f"gather-ms={gather}") for gather in ("0", "1000"))
    steps = [{row["comm"]: 64 / row["samples_per_s"] for row in found["policies"]} for found in (free, paid)]
    assert steps[1]["odc"] - steps[0]["odc"] == pytest.approx(4 * 2 * 28)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hosts", "3"), "--hosts 3: expected as many of 16 ranks on each, 2 or more"),
        (("--hosts", "16"), "--hosts 16: expected as many of 16 ranks on each"),
        (
            ("--hosts", "1", "--between", "100Gb"),
            "--between '100Gb' is between hosts: expected --hosts of 2 or more, too",
        ),
        (("--hosts", "2", "--between", "fast"), "--between 'fast': expected what a host receives per second"),
        (("--hosts", "2", "--between", "0Gb"), "--between '0Gb': expected"),
        (("--hosts", "2", "--between", "100GBit/s"), "--between '100GBit/s': expected"),  # bits, or bytes?
        (("--hosts", "2", "--sizes", "1,2"), "No such option: --sizes"),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused("plan", "hosts", *SMALL, *arguments)
