"""Layer 1: no processes. ``odc plan context-parallel``: groups of devices that compute together."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_calls import plan, printed, refused, saved, timings, words

from odc.cli import plots
from odc.cli.costs import make_training

SMALL = ("--set", "samples=1024", "--set", "minibatches=8")
TINY = ("--set", "samples=256", "--set", "minibatches=2")
"""Where what is planned does not matter."""
SIZES = ("--sizes", "1,2,4,8")


def groups(*arguments: str) -> dict[str, Any]:
    """What ``odc plan context-parallel --json`` prints."""
    return plan("context-parallel", *arguments)


def rows_of(found: dict[str, Any]) -> dict[tuple[int, str, str], dict[str, Any]]:
    return {
        (group["context_parallel"], row["policy"], row["comm"]): row
        for group in found["groups"]
        for row in group["policies"]
    }


def linear_costs(folder: Path) -> str:
    """1 ms a token."""
    return timings(folder / "t.csv", (100, 200, 400, 800), lambda tokens: tokens / 1000)


def test_tables_fit_80_columns() -> None:
    table = printed(
        "plan",
        "context-parallel",
        "longalign",
        *TINY,
        *SIZES,
        "--policy",
        "all",
        "--world-size",
        "16",
        "--set",
        "noise=0.1",
    )
    assert max(map(len, table.splitlines())) <= 80
    for text in (
        "│     8 │ lb-micro-global ",
        "│     1 │ verl-native ",
        "450 GB/s",
        "4 samples per device",
    ):
        assert text in table
    assert "nothing hides" in " ".join(table.split())


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "noise=0.2", "--set", "gather-ms=3", "--set", "scatter-ms=3"),
        *(
            pytest.param(options, marks=pytest.mark.extended)
            for options in ((), ("--set", "speeds=1,1,1,1,1,1,1,0.5"), "timings")
        ),
    ],
    ids=str,
)
def test_groups_of_one_are_the_plain_plan(options: Any, tmp_path: Path) -> None:
    if options == "timings":
        options = ("--set", f"timings={linear_costs(tmp_path)}")
    plain = plan("longalign", *TINY, *options, "--policy", "all")
    found = groups("longalign", *TINY, *options, "--policy", "all", "--sizes", "1,2", "--link", "1")
    (alone,) = (group for group in found["groups"] if group["context_parallel"] == 1)
    for ours, theirs in zip(alone["policies"], plain["policies"], strict=True):
        assert ours.pop("planning_s_per_minibatch") > 0
        assert theirs.pop("planning_s_per_minibatch") > 0
        assert ours == theirs
    assert alone["max_tokens"] == plain["max_tokens"]
    assert found["num_minibatches"] == plain["num_minibatches"]


def test_the_exchange_by_hand(tmp_path: Path) -> None:
    """One step, of work that fits evenly: 1 ms a token, side by side in groups, and the exchange of each token."""
    lengths = saved(tmp_path / "a.npy", [1000, 200, 200, 200] * 64)
    arguments = (lengths, "--set", f"timings={linear_costs(tmp_path)}", "--world-size", "4", "--minibatch-size", "64")
    found = groups(*arguments, "--sizes", "1,2,4", "--link", "0.001", "--policy", "lb-mini")
    kv_bytes = 28 * 2 * (4 * 128) * 2  # layers, keys and values, heads of 128, 16 bits
    total = 64 * 1600
    for size, group in zip((1, 2, 4), found["groups"], strict=True):
        exchange_s = 3 * kv_bytes * (size - 1) / size / 1e6
        assert group["exchange_s_per_token"] == pytest.approx(exchange_s)
        seconds = total * 1e-3 / 4 + total * exchange_s / (4 / size)
        assert group["policies"][0]["samples_per_s"] == pytest.approx(256 / seconds, rel=1e-3)


def test_the_longest_sample_by_hand(tmp_path: Path) -> None:
    """One step has them all: 1000 tokens beside 3 x 200, at 1 ms a token."""
    lengths = saved(tmp_path / "a.npy", [1000, 200, 200, 200])
    arguments = (lengths, "--set", f"timings={linear_costs(tmp_path)}", "--world-size", "4", "--minibatch-size", "1")
    found = groups(*arguments, "--sizes", "1,2,4", "--link", "1e12", "--policy", "lb-mini")
    rows = rows_of(found)
    for size, seconds in ((1, 1.0), (2, 0.5), (4, 0.4)):
        row = rows[size, "lb-mini", "odc"]
        assert row["samples_per_s"] == pytest.approx(4 / seconds, rel=1e-6)
        assert row["bubble_rate"] == pytest.approx(1 - 1.6 / (4 * seconds), abs=1e-6)
        assert row["speedup"] == pytest.approx(1 / seconds, rel=1e-6)


@pytest.mark.parametrize("seed", range(2))
def test_lb_mini_on_groups_is_the_best_of_all_ways(seed: int, tmp_path: Path) -> None:
    """To share out six samples to the groups: all 3^6 or 2^6 ways are tried. A sample costs its square."""
    lengths = [int(each) for each in np.random.default_rng(seed).integers(100, 1000, 6)]
    squares = timings(tmp_path / "t.csv", (100, 200, 400, 800), lambda tokens: tokens * tokens / 1e6)
    arguments = (saved(tmp_path / "a.npy", lengths), "--set", f"timings={squares}", "--world-size", "6", "--policy")
    found = groups(*arguments, "lb-mini", "--minibatch-size", "1", "--sizes", "2,3,6", "--link", "10")
    for group in found["groups"]:
        size, num_groups = group["context_parallel"], 6 // group["context_parallel"]
        seconds = [each * each / 1e6 / size + each * group["exchange_s_per_token"] for each in lengths]
        least = min(
            max(sum(s for s, at in zip(seconds, way, strict=True) if at == number) for number in range(num_groups))
            for way in itertools.product(range(num_groups), repeat=6)
        )
        assert 6 / group["policies"][0]["samples_per_s"] == pytest.approx(least, rel=1e-6)


def test_a_faster_link_does_not_hurt() -> None:
    slow, fast, faster = (rows_of(groups("longalign", *TINY, *SIZES, "--link", link)) for link in ("5", "50", "nvlink"))
    for key, row in slow.items():
        rates = [found[key]["samples_per_s"] for found in (slow, fast, faster)]
        if key[0] == 1:
            assert len(set(rates)) == 1
        elif key[0] == 8:  # one group, so nothing but time to win
            assert rates[0] < rates[1] < rates[2]
        else:  # partitions of other costs are as good, to their heuristics
            assert rates[0] <= rates[1] * 1.005 <= rates[2] * 1.01
        assert row["bubble_rate"] >= 0


def test_links_have_names_and_may_differ() -> None:
    arguments = ("aime", *TINY, "--sizes", "8,2", "--device", "a100")
    found = groups(*arguments, "--link", "infiniband,nvlink")
    assert [(group["context_parallel"], group["link_bytes_per_s"]) for group in found["groups"]] == [
        (2, 300e9),
        (8, 25e9),
    ]
    (pcie,) = {group["link_bytes_per_s"] for group in groups(*arguments, "--link", "pcie")["groups"]}
    assert pcie == 32e9


def test_memory_falls_with_the_size_and_longer_samples_fit() -> None:
    training = make_training("qwen2.5-7b", "h100", 0.4, 8, recompute=True, timings=None)
    split = [training.on_groups(size, 1e9) for size in (1, 2, 4, 8)]
    memory = [each.memory_bytes(65_536) for each in split]
    assert memory == sorted(memory, reverse=True)
    assert memory[0] == training.memory_bytes(65_536)
    assert memory[3] > training.state.bytes  # weights are not divided
    most = [each.most_tokens() for each in split]
    for each, tokens, size in zip(split, most, (1, 2, 4, 8), strict=True):
        assert each.memory_bytes(tokens) <= training.device.memory_bytes < each.memory_bytes(tokens + 1)
        assert 0.9 * size * most[0] < tokens <= size * most[0]  # keys and values of others take the rest
    found = groups("longalign", *SMALL, *SIZES)
    assert [group["longest_sample_that_fits"] for group in found["groups"]] == most
    rows = rows_of(found)
    for (_, policy, comm), row in rows.items():
        assert row["memory_bytes"] <= 1.04 * rows[1, policy, comm]["memory_bytes"]  # as many tokens on each device


def test_what_is_too_long_for_a_device_fits_a_group(tmp_path: Path) -> None:
    """150,000 tokens of 7B are more than 80 GB hold."""
    lengths = saved(tmp_path / "a.npy", [150_000, 4000, 3000, 2000] * 64)
    found = groups(lengths, "--sizes", "1,2,4")
    fits = {size: row["fits"] for (size, *_), row in rows_of(found).items()}
    assert fits == {1: False, 2: True, 4: True}
    assert "on groups of" in found["recommendation"]
    assert "Without groups it does not fit into memory." in found["recommendation"]
    limits = [group["max_tokens"] for group in found["groups"]]
    most = [group["longest_sample_that_fits"] for group in found["groups"]]
    assert limits == [150_000, most[1], most[2]]  # not twice what does not fit
    assert "Use odc plan context-parallel, or --max-tokens" in plan(lengths)["recommendation"]
    longer = saved(tmp_path / "b.npy", [900_000, 4000, 3000, 2000] * 64)
    text = groups(longer, "--sizes", "1,2")["recommendation"]
    assert text.startswith("Does not fit: the largest microbatch, 900,000 tokens, needs ")
    limit = int(text.split("--max-tokens ")[1].split()[0])
    cut = groups(longer, "--sizes", "2", "--set", "truncate=yes", "--max-tokens", str(limit))
    assert all(row["fits"] for (*_, comm), row in rows_of(cut).items() if comm == "collective")


def test_max_tokens_counts_per_device(tmp_path: Path) -> None:
    lengths = saved(tmp_path / "a.npy", [64_000, 4000, 3000, 2000] * 64)
    found = groups(lengths, "--sizes", "4,8", "--max-tokens", "16000")
    assert [group["max_tokens"] for group in found["groups"]] == [64_000, 128_000]
    assert max(row["peak_tokens"] for row in rows_of(found).values()) <= 128_000
    message = refused("plan", "context-parallel", lengths, "--sizes", "2,4", "--max-tokens", "16000")
    assert "longer than --max-tokens 16000 on each of 2 devices: raise --max-tokens to 32000, 1/2 of" in message
    cut = groups(lengths, "--sizes", "2,4", "--max-tokens", "16000", "--set", "truncate=yes")
    assert [group["max_tokens"] for group in cut["groups"]] == [32_000, 64_000]


def test_fsdp_with_groups_is_recommended_where_it_is_as_fast() -> None:
    found = groups("longalign", *SMALL, *SIZES, "--minibatch-size", "1")
    text, rows = found["recommendation"], rows_of(found)
    assert text.startswith("Stay with FSDP and lb-micro")
    best = max(row["samples_per_s"] for row in rows.values())
    size = int(text.split("on groups of ")[1].split(":")[0])
    fsdp = max(row["samples_per_s"] for (each, _, comm), row in rows.items() if (each, comm) == (size, "collective"))
    assert fsdp * 1.02 >= best
    for smaller in (each for each in (1, 2, 4) if each < size):
        assert all(row["samples_per_s"] * 1.02 < best for (each, *_), row in rows.items() if each == smaller)
    alone = max(row["samples_per_s"] for (each, *_), row in rows.items() if each == 1)
    assert f"Groups bring {fsdp / alone:.2f}x over the best without them (FSDP with lb-micro)." in text
    assert "noise= and speeds= (--set) show what else ODC evens out" in text


def test_odc_is_recommended_where_groups_do_not_even_out_what_differs() -> None:
    """A slow device makes its group slow, which gets less to do only where numbers may differ; and errors of costs."""
    speeds = ",".join(["1"] * 7 + ["0.5"])
    arguments = ("longalign", *SMALL, "--minibatch-size", "4", "--sizes", "1,2", "--link", "pcie")
    found = groups(*arguments, "--set", "noise=0.3", "--set", f"speeds={speeds}")
    rows = rows_of(found)
    text = found["recommendation"]
    assert text.startswith("Use ODC with lb-mini")
    odc = max(row["samples_per_s"] for (*_, comm), row in rows.items() if comm == "odc")
    fsdp = max(row["samples_per_s"] for (*_, comm), row in rows.items() if comm == "collective")
    assert odc > 1.02 * fsdp
    speedup = float(text.split(": ")[1].split("x speedup")[0])
    assert speedup == pytest.approx(odc / fsdp, rel=0.03)  # of plans that are simpler by groups, and nearly as fast
    assert "(--set) show" not in text


def test_small_groups_under_odc_beside_large_ones_without_it() -> None:
    """Over a slow link groups cost more than they bring, but FSDP needs them."""
    found = groups("longalign", *SMALL, "--sizes", "1,2", "--link", "7")
    rows, text = rows_of(found), found["recommendation"]
    alone, fsdp = rows[1, "lb-mini", "odc"], rows[2, "lb-micro-global", "collective"]
    assert alone["samples_per_s"] > 1.02 * fsdp["samples_per_s"]
    speedup = alone["samples_per_s"] / fsdp["samples_per_s"]
    assert text.startswith(
        f"Use ODC with lb-mini: {speedup:.2f}x speedup over the best FSDP plan (lb-micro-global on gr"
    )
    assert f"; ranks wait for {alone['bubble_rate']:.1%} of the time. Groups of 2 would be " in text


def test_groups_that_bring_nothing_are_called_so(tmp_path: Path) -> None:
    lengths = saved(tmp_path / "a.npy", [4000] * 512)
    found = groups(lengths, *SIZES, "--link", "5")
    rows = rows_of(found)
    slower = 1 - rows[2, "lb-micro", "collective"]["samples_per_s"] / rows[1, "lb-micro", "collective"]["samples_per_s"]
    assert slower > 0.05
    assert found["recommendation"].startswith("Stay with FSDP and lb-micro: ranks wait for 0.0% of the time")
    assert f"Groups of 2 would be {slower:.1%} slower." in found["recommendation"]
    assert "noise=" in found["recommendation"]


def test_exchange_has_its_part_of_the_time(tmp_path: Path) -> None:
    lengths = saved(tmp_path / "a.npy", [4000] * 512)
    free, paid = (groups(lengths, "--sizes", "8", "--link", link) for link in ("1e9", "5"))
    without, having = (rows_of(found)[8, "lb-mini", "odc"]["samples_per_s"] for found in (free, paid))
    text = printed("plan", "context-parallel", lengths, "--sizes", "8", "--link", "5")
    assert f" {1 - having / without:.1%} │" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "3"], "that divide --world-size 8: 1, 2, 4, 8"),
        (["--sizes", "1,0"], "that divide --world-size 8"),
        (["--sizes", "2,x"], "'2,x': expected sizes of groups, separated by commas"),
        (["--sizes", "16"], "that divide --world-size 8"),
        ([*SIZES, "--link", "ethernet"], "'ethernet' is not known: expected nvlink, pcie, infiniband, or a number"),
        ([*SIZES, "--link", "0"], "'0' is not known"),
        ([*SIZES, "--link", "nan"], "'nan' is not known"),
        ([*SIZES, "--link", "nvlink,pcie"], "expected one for all groups, or one for each of the 4"),
        (
            [*SIZES, "--set", "panel=minibatch"],
            "--set: 'panel=minibatch' is not known: expected of timings=, mfu=",
        ),
        ([*SIZES, "--modality", "vision:linear=1"], "No such option: --modality"),
    ],
)
def test_errors_come_before_anything_is_read(arguments: list[str], message: str) -> None:
    found = refused("plan", "context-parallel", "nowhere.txt", *arguments)
    assert message in found
    assert "nowhere" not in found


def test_the_picture_shows_the_fastest_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_of = pytest.importorskip("matplotlib.figure", reason="matplotlib is an optional package").Figure
    figures = []
    monkeypatch.setattr(figure_of, "savefig", lambda figure, *_, **__: figures.append(figure))
    found = groups("longalign", *SMALL, "--sizes", "1,2,8", "--plot", str(tmp_path / "a.png"))
    (figure,) = figures
    throughput, bubbles = figure.axes
    for number, comm in enumerate(("collective", "odc")):
        best = [
            max(
                (r for (s, _, kind), r in rows_of(found).items() if (s, kind) == (size, comm)),
                key=lambda r: r["speedup"],
            )
            for size in (1, 2, 8)
        ]
        assert plots.COMM_NAMES[comm] in throughput.lines[number].get_label()
        assert list(throughput.lines[number].get_xdata()) == [1, 2, 8]
        np.testing.assert_allclose(throughput.lines[number].get_ydata(), [row["samples_per_s"] for row in best])
        np.testing.assert_allclose(bubbles.lines[number].get_ydata(), [100 * row["bubble_rate"] for row in best])


def test_help_says_that_samples_count_per_device() -> None:
    text = words("plan", "context-parallel", "--help")
    assert "--minibatch-size and the memory for a microbatch are per device" in text
    assert "in each layer, not hidden" in text
