"""Layer 1, and processes of made-up packages: batches of others, counted and measured by hand."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from watching import until

from odc.balance import LinearCost
from odc.bench.batching import batching, peers
from odc.bench.batching.peer_programs import PROGRAMS, Batches
from odc.bench.batching.peers import (
    PEERS,
    Peer,
    PeerError,
    check_packages,
    count_samples,
    epoch_of,
    rows_of,
    run_program,
)
from odc.bench.harness.benchmark import Run
from odc.bench.planning.paper_costs import paper_cost

LENGTHS = np.array([100, 200, 300, 400, 50])
# Rank 0 has two microbatches in its first step, rank 1 a second step.
BATCHES: Batches = [[[[0, 1], [2]]], [[[3]], [[4]]]]
FAKE = Peer("fake", "cosmos", "cosmos-rl==0.4.7", True, {"pool_size": 2})


def lay(folder: Path, body: str, version: str = "0.4.7") -> Path:
    """A package of the name of one of the peers', whose data set iterates as ``body`` says."""
    inner = folder / "cosmos_rl/dispatcher/data"
    inner.mkdir(parents=True)
    for name in ("cosmos_rl", "cosmos_rl/dispatcher", "cosmos_rl/dispatcher/data"):
        (folder / name / "__init__.py").write_text("raise ImportError('a whole framework')\n")
    (folder / f"cosmos_rl-{version}.dist-info").mkdir()
    (folder / f"cosmos_rl-{version}.dist-info/METADATA").write_text(f"Name: cosmos_rl\nVersion: {version}\n")
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    (inner / "load_balanced_dataset.py").write_text(f"""import os, subprocess, sys
class LoadBalancedDataset:
    def __init__(self, samples, max_tokens_for_batch, dp_rank, dp_world_size, pool_size):
        print("noise where progress is reported")
        self.samples, self.rank, self.world_size = samples, dp_rank, dp_world_size
    def __iter__(self):
{lines}
""")
    return folder


def is_gone(pid: int) -> bool:
    try:
        return "(sleep) Z" in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_given_batches_cost_by_hand() -> None:
    padded = epoch_of(BATCHES, LENGTHS, LinearCost(), is_packed=False)
    assert padded.costs.tolist() == [[400, 400], [300, 0], [0, 50]]
    assert (padded.num_samples.tolist(), padded.tokens, padded.padded_tokens) == ([3, 1, 1], 1050, 1150)
    assert padded.time_per_1000 == pytest.approx((400 + 300 + 50) * 1000 / 5)
    assert padded.bubble_rate() == pytest.approx(1 - 1150 / (2 * 750))
    assert padded.padding_percent == pytest.approx(100 * (1 - 1050 / 1150))
    packed = epoch_of(BATCHES, LENGTHS, LinearCost(), is_packed=True)
    assert packed.costs.tolist() == [[300, 400], [300, 0], [0, 50]]
    assert packed.padding_percent == 0
    at_steps = epoch_of(BATCHES, LENGTHS, LinearCost(), is_packed=True, waits_at_steps=True)
    assert (at_steps.costs.tolist(), at_steps.num_samples.tolist()) == ([[600, 400], [0, 50]], [4, 1])
    assert peers.largest_microbatch(BATCHES, LENGTHS, is_packed=False) == 400
    assert peers.largest_microbatch([[[[0, 2], [1]]]], LENGTHS, is_packed=False) == 600


def test_what_is_lost_and_what_comes_twice() -> None:
    assert count_samples(BATCHES, 5) == (0, 0)
    assert count_samples(BATCHES, 7) == (2, 0)
    assert count_samples([[[[0, 1]], [[1]]], [[[1]], [[4]]]], 5) == (2, 2)


def test_a_second_row_only_where_steps_have_several_microbatches() -> None:
    first, at_steps = rows_of(FAKE, "longalign", 400, LENGTHS, BATCHES)
    assert (first.kind, at_steps.kind) == ("fake", "fake, at steps")
    assert first.time_per_1000 > at_steps.time_per_1000
    assert (first.samples_per_step, at_steps.samples_per_step) == (1.25, 1.25)  # of 2 ranks in 2 steps
    assert dict(first.settings) == {"token budget": 400, "pool_size": 2}
    (alone,) = rows_of(replace(FAKE, is_packed=False), "longalign", 400, LENGTHS, [[[[0]], [[2]]], [[[3, 4]], [[1]]]])
    assert (alone.waits_at, alone.lost, alone.twice, alone.largest_tokens) == ("microbatches", 0, 0, 800)


def test_missing_packages_are_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "simulate_streams", None)
    wanted = " ".join(dict.fromkeys(peer.package for peer in PEERS))
    with pytest.raises(PeerError, match=f"python -m pip install --no-deps --upgrade --target {tmp_path} {wanted}"):
        peers.measure(Run(), tmp_path)


def test_another_version_counts_as_missing_and_what_the_environment_has_does_not(tmp_path: Path) -> None:
    lay(tmp_path, "yield []", version="0.4.6")
    with pytest.raises(PeerError, match="cosmos-rl==0.4.7$"):
        check_packages(tmp_path, [FAKE])
    lay(tmp_path / "right", "yield []")
    check_packages(tmp_path / "right", [replace(FAKE, needs=("numpy==1.0",), examples=("torch",))])
    with pytest.raises(PeerError, match=r"--target \S*right no-such-thing==3$"):
        check_packages(tmp_path / "right", [replace(FAKE, needs=("no-such-thing==3",))])
    with pytest.raises(PeerError, match=r"cosmos-rl==0.4.7 imports no-such-thing"):
        check_packages(tmp_path / "right", [replace(FAKE, examples=("no-such-thing",))])


def test_a_peer_that_crashes_says_why(tmp_path: Path) -> None:
    folder = lay(tmp_path, "yield [[self.samples[0]]]\nraise RuntimeError('out of paint')")
    with pytest.raises(
        PeerError, match=r"(?s)fake \(cosmos-rl==0.4.7\) ended with status 1.*RuntimeError: out of paint"
    ):
        run_program(FAKE, folder, LENGTHS, 400, 2)


def test_a_peer_that_gives_what_there_is_not(tmp_path: Path) -> None:
    folder = lay(tmp_path, "while True: yield [[{'index': 5}]]")
    with pytest.raises(PeerError, match="expected 2 ranks, and samples from 0 to 4"):
        run_program(FAKE, folder, LENGTHS, 400, 2)


def test_a_peer_that_loses_repeats_and_leaves_a_process_behind(tmp_path: Path) -> None:
    body = """left = subprocess.Popen(["sleep", "600"])
open(os.path.join(os.path.dirname(__file__), f"left{self.rank}"), "w").write(str(left.pid))
while True: yield [[self.samples[self.rank], self.samples[2 + self.rank]]]"""
    folder = lay(tmp_path, body)
    done: list[int] = []
    batches = run_program(FAKE, folder, LENGTHS, 400, 2, done.append)
    assert batches == [[[[0, 2]], [[0, 2]]], [[[1, 3]], [[1, 3]]]]
    assert (done, count_samples(batches, 5)) == ([4, 4], (1, 4))
    for rank in range(2):
        pid = int((folder / f"cosmos_rl/dispatcher/data/left{rank}").read_text())
        until(functools.partial(is_gone, pid), f"process {pid} lives on")


def test_rows_stand_beside_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lay(tmp_path, "for i in range(self.rank, len(self.samples), self.world_size): yield [[self.samples[i]]]")
    monkeypatch.setattr(peers, "WAITING", (("longalign", 64, 65536),))
    monkeypatch.setattr(peers, "PEERS", (FAKE,))
    document = peers.measure(Run(), folder)
    assert [row["kind"] for row in document["streams"]] == [*batching.STREAMS, "LB-Mini (known)"]
    (row,) = document["peers"]
    assert (row["kind"], row["lost"], row["twice"], row["samples_per_step"]) == ("fake", 0, 0, 1.0)


def test_the_committed_result_is_of_all_peers() -> None:
    document = json.loads((Path(__file__).parents[2] / "bench/results/batching_peers.json").read_text())
    for law, _, max_tokens in peers.WAITING:
        rows = {row["kind"]: row for row in document["peers"] if row["law"] == law}
        for peer in PEERS:
            row = rows[peer.kind]
            assert peer.program in PROGRAMS
            assert (row["package"], row["settings"]) == (peer.package, {"token budget": max_tokens, **peer.settings})
            assert row["largest_tokens"] <= max_tokens
    published = json.loads((Path(__file__).parents[2] / "bench/results/batching.json").read_text())
    assert document["streams"] == published["streams"]


def test_buckets_know_where_attention_costs_what_all_else_does() -> None:
    length = next(float(peer.settings["quadratic_duration"]) for peer in PEERS if peer.program == "lhotse")
    once, twice = paper_cost("1.5B")([length, 2 * length])
    assert twice / once == pytest.approx(3, rel=1e-4)  # 2 + 4 to 1 + 1
