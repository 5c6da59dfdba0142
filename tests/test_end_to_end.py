"""Layer 4: whole commands, as a user types them. Small sizes; what they compute is checked, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.mark.parametrize(("hosts", "transport"), [("0", "shm"), pytest.param("2", "tcp", marks=pytest.mark.extended)])
def test_the_primitive_benchmark_writes_its_rows(hosts: str, transport: str, tmp_path: Path) -> None:
    options = [
        "-m",
        "odc.bench.communication.primitives",
        "--json",
        "out.json",
        "--sizes",
        "65536",
        "1048576",
        "--repetitions",
        "2",
    ]
    text = run([*TORCHRUN, *RENDEZVOUS, *options, "--hosts", hosts], tmp_path)
    assert f"scatter_accumulate ({transport})" in text
    document = json.loads((tmp_path / "out.json").read_text())
    primitives = {"gather", "scatter_accumulate", "all_gather", "reduce_scatter", "copy", "add"}
    assert {(r["primitive"], r["num_bytes"]) for r in document["rows"]} == {
        (name, size) for name in primitives for size in (65536, 1048576)
    }
    assert all(0 < r["p20_s"] <= r["median_s"] <= r["p80_s"] and r["world_size"] == 2 for r in document["rows"])
    assert document["environment"]["torch"]


def test_a_small_demo_trains_three_ways_to_the_same_losses(tmp_path: Path) -> None:
    sizes = ["--repetitions", "1", "--minibatches", "5", "--hidden-size", "64", "--num-layers", "1"]
    run([sys.executable, "-m", "odc.bench.training.demo", "--out", str(tmp_path), *sizes], ROOT)
    runs = json.loads((tmp_path / "summary.json").read_text())["runs"]
    assert set(runs) == {"collective-lb-micro", "odc-lb-micro", "odc-lb-mini"}
    for result in runs.values():
        assert result["losses"] == pytest.approx(runs["collective-lb-micro"]["losses"], rel=1e-4)
        assert result["losses"][-1] < result["losses"][0]
        assert 0 <= result["bubble_rate"] < 1
        assert result["samples_per_s"] > 0
    for picture in ("losses.png", "timeline.png"):
        assert (tmp_path / picture).stat().st_size > 10_000
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {"gather", "scatter"} <= {event.get("cat") for event in events}
