"""Layer 4: whole commands, as a user types them. Small sizes; what they compute is checked, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
RENDEZVOUS = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]


def run(command: list[str], folder: Path) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_command_line_explains_itself(tmp_path: Path) -> None:
    text = run([sys.executable, "-m", "odc", "--help"], tmp_path)
    for words in ("odc.patch_fsdp(model)", "odc run", "doctor", "ODC_TIMEOUT"):
        assert words in text
    facts = json.loads(run([sys.executable, "-m", "odc", "doctor", "--json"], tmp_path))
    assert facts["ok"]
    assert run([sys.executable, "-m", "odc", "--version"], tmp_path).strip() == f"odc {facts['odc']}"


PRIMITIVES = ["bench", "primitives", "--json", "out.json", "-b", "64K", "-e", "1M", "-f", "16", "--repetitions", "2"]


@pytest.mark.extended
@pytest.mark.parametrize(("hosts", "transport"), [("0", "shm"), ("2", "tcp")])
def test_the_primitive_benchmark_on_ranks_of_torchrun(hosts: str, transport: str, tmp_path: Path) -> None:
    options = [*PRIMITIVES, "--hosts", hosts, "--late", "0", "--plot", "out.png"]
    text = run([*TORCHRUN, *RENDEZVOUS, "-m", "odc", *options], tmp_path)
    assert text.count(f"# one-sided primitives on 2 ranks (cpu), by {transport}\n#  Rank   0 Pid") == 1
    assert "# Out of bounds values : 0 OK" in text
    assert max(map(len, text.splitlines())) <= 100
    document = json.loads((tmp_path / "out.json").read_text())
    primitives = {"gather", "scatter_accumulate", "all_gather", "reduce_scatter", "copy", "add"}
    assert {(r["operation"], r["num_bytes"]) for r in document["rows"]} == {
        (name, size) for name in primitives for size in (65536, 1048576)
    }
    for row in document["rows"]:
        assert 0 < row["time_s"]["p20"] <= row["time_s"]["median"] <= row["time_s"]["p80"]
        assert row["algbw"] == pytest.approx(row["num_bytes"] / row["time_s"]["median"] / 1e9)
        assert row["busbw"] == row["algbw"] / (1 if row["operation"] in ("copy", "add") else 2)
        assert row.get("wrong", 0) == 0
        assert ("wrong" in row) == (row["by"] != "torch")
    assert {row["by"] for row in document["rows"]} == {transport, "gloo", "torch"}
    assert (document["benchmark"], document["ranks"], document["device"]) == ("primitives", 2, "cpu")
    assert document["environment"]["torch"]
    assert (tmp_path / "out.png").stat().st_size > 10_000


@pytest.mark.extended
def test_a_small_demo_trains_three_ways_to_the_same_losses(tmp_path: Path) -> None:
    sizes = ["--repetitions", "1", "--minibatches", "5", "--hidden-size", "64", "--num-layers", "1"]
    run([sys.executable, "-m", "odc", "bench", "demo", "--out", str(tmp_path), *sizes], ROOT)
    runs = {row["name"]: row for row in json.loads((tmp_path / "summary.json").read_text())["runs"]}
    assert set(runs) == {"collective-lb-micro", "odc-lb-micro", "odc-lb-mini"}
    for result in runs.values():
        assert result["losses"] == pytest.approx(runs["collective-lb-micro"]["losses"], rel=1e-4)
        assert result["losses"][-1] < result["losses"][0]
        assert 0 <= result["bubble_rate"] < 1
        assert result["samples_per_s"] > 0
    for picture in ("losses.png", "timeline.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    known = {event["cat"]: event["args"].keys() for event in events if event.get("args", {}).keys() >= {"microbatch"}}
    assert known["gather"] == known["scatter"] == {"minibatch", "microbatch", "unit", "bytes"}
    assert known["compute"] == known["phase"] == {"minibatch", "microbatch"}
    assert any("peer" in event["args"] for event in events)
