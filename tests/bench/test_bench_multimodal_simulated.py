"""Layer 1: no processes. Costs of the models against counted FLOPs, and the simulated figures on few ranks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode

from odc.balance import karmarkar_karp
from odc.balance.rearrange.post_balance import post_balance
from odc.balance.simulate.modalities import sample_modalities
from odc.bench.harness.results import tables_of
from odc.bench.planning import multimodal_simulated as bench
from odc.bench.planning.multimodal_sizes import MEL_BANDS, PATCH, SIZES, audio, vision

PARAMETERS = {"MLLM-10B": (1.81, 0.63), "MLLM-18B": (2.76, 0.63), "MLLM-84B": (5.53, 5.44)}
"""Billions, of the layers of vision and audio: the paper rounds to 2, 3, 6 and 0.6, 0.6, 6."""


class Layer(torch.nn.Module):
    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.qkvo = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(hidden, ffn, bias=False), torch.nn.Linear(ffn, hidden, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x) for part in self.qkvo[:3])
        return self.mlp(self.qkvo[3]((q @ k.T).softmax(-1) @ v))


@pytest.mark.parametrize("name", ["vision", "audio"])
def test_costs_are_three_times_the_flops_of_a_forward(name: str) -> None:
    layers, hidden, ffn, rate, language = 2, 16, 64, 4, 24
    tokens = 32
    blocks = [Layer(hidden, ffn) for _ in range(layers)]
    connector = torch.nn.Sequential(torch.nn.Linear(hidden, language), torch.nn.Linear(language, language))
    with FlopCounterMode(display=False) as counter:
        if name == "vision":
            x = torch.nn.Linear(3 * PATCH**2, hidden)(torch.zeros(tokens, 3 * PATCH**2))
        else:
            first = torch.nn.Conv1d(MEL_BANDS, hidden, 3, padding=1)
            second = torch.nn.Conv1d(hidden, hidden, 3, stride=2, padding=1)
            x = second(first(torch.zeros(1, MEL_BANDS, 2 * tokens)))[0].T
        for block in blocks:
            x = block(x)
        connector(x.reshape(-1, rate, hidden).mean(1))
    make = {"vision": vision, "audio": audio}[name]
    found = make(layers, hidden, ffn, rate).cost(language)(np.array([tokens]))
    assert float(found[0]) == 3 * counter.get_total_flops()


@pytest.mark.parametrize("name", list(SIZES))
def test_models_are_as_large_as_the_paper_says(name: str) -> None:
    size = SIZES[name]
    assert [encoder.layer_weights / 1e9 for encoder in size.encoders.values()] == pytest.approx(
        PARAMETERS[name], abs=0.01
    )
    assert size.encoders["vision"].layout == "packed"
    assert size.encoders["audio"].layout == "padded"
    lengths = size.minibatch(sample_modalities(4000), 8)
    rows = np.zeros(lengths.num_samples, dtype=np.int64)
    for items in lengths.items.values():
        np.add.at(rows, items.sample, items.output)
    assert (lengths.language > rows).all()
    assert int(lengths.items["vision"].encoder.max()) <= (size.resolution // PATCH) ** 2
    texts = size.bytes_of(lengths)["text"]
    assert (texts == 16 * (lengths.language - rows)).all()


@pytest.fixture(scope="module")
def entry() -> Any:
    done: list[int] = []
    found = bench.compare(SIZES["MLLM-18B"], 8, 6, 2, lambda: done.append(1))
    assert len(done) == 2 * len(bench.WAYS)
    return found


def test_none_takes_as_long_as_its_slowest_ranks(entry: Any) -> None:
    """From the lengths alone, phase by phase."""
    size, total, whole = SIZES["MLLM-18B"], 0.0, 0.0
    for number in range(2):
        samples = sample_modalities(48, number)
        whole += float(size.sample_costs(samples).sum())
        length = samples.text.copy()
        for phase in size.phases:
            tokens = size.tokens(samples)[phase.name]
            length += size.rows(phase.name, tokens)
            of_ranks = [[t for t in mine.tolist() if t] for mine in tokens.reshape(8, 6)]
            costs = [[float(c) for c in phase.cost(mine)] for mine in of_ranks]
            if phase.layout == "packed":
                total += max(sum(mine) for mine in costs)
            else:
                total += max(len(mine) * max(mine, default=0.0) for mine in costs)
        total += float(size.language.cost(length).reshape(8, 6).sum(axis=1).max())
    none = entry["ways"]["none"]
    assert none["makespan_flops"] == pytest.approx(total / 2)
    assert none["busy"] == pytest.approx(whole / (8 * total))
    assert entry["flops_per_sample"] == pytest.approx(whole / 96)
    assert sum(entry["share_of_phase"].values()) == pytest.approx(1)


def test_every_way_trains_on_the_same_samples(entry: Any) -> None:
    ways = entry["ways"]
    assert list(ways) == [f"{way}{odc}" for way in bench.WAYS for odc in ("", ", ODC")]
    first = ways["none"]["makespan_flops"]
    for row in ways.values():
        assert row["ratio"] == pytest.approx(first / row["makespan_flops"])
        assert row["busy"] == pytest.approx(ways["none"]["busy"] * row["ratio"])  # the same useful work
        assert 0 <= row["bubble"] <= 1 - row["busy"] + 1e-12
    for way in bench.WAYS:
        assert ways[f"{way}, ODC"]["ratio"] >= ways[way]["ratio"] * (1 - 1e-12)
    assert ways["all"]["ratio"] > ways["language"]["ratio"] > 1
    assert ways["whole, ODC"]["ratio"] > ways["whole"]["ratio"]


def test_figures_of_the_ablations() -> None:
    size = SIZES["MLLM-84B"]
    rigid = bench.rigid(size, 16, 1)
    assert rigid["tailored"] > max(rigid["all rmpad"], rigid["all pad"])
    moving = bench.moving(size, 16, 1)
    assert list(moving) == ["text", "vision inputs", "vision outputs", "audio inputs", "audio outputs"]
    for row in moving.values():
        assert row["between_nodes_bytes"] <= row["between_nodes_most_bytes"] <= row["all_to_all_bytes"]
        assert row["all_to_all_bytes"] <= row["all_to_all_bound_bytes"] < row["all_gather_bytes"]
    # Algorithm 3 has one aim, the most that a rank sends; of samples without anything else, it is never missed.
    assert moving["text"]["placed_over_unplaced_most"] <= 1
    planning = bench.planning(16, 4, 2)
    assert 0 < planning["time_s"]["min"] <= planning["time_s"]["median"] <= planning["time_s"]["max"]


def test_bytes_between_nodes_are_those_of_the_items() -> None:
    size = SIZES["MLLM-10B"]
    lengths = bench.draw(size, 16, 5, 0)
    schedule = bench.orchestrator(size, 16, "all").plan(lengths)
    volumes = dict(bench.journeys(size, schedule, placed=True))
    route, num_bytes = schedule.outputs["vision"], size.bytes_of(lengths)["vision outputs"]
    expected = np.zeros((16, 16))
    for source, made in enumerate(route.source):
        for target, wanted in enumerate(route.target):
            expected[source, target] = sum(int(num_bytes[item]) for item in set(made.tolist()) & set(wanted.tolist()))
    assert (volumes["vision outputs"] == expected).all()
    assert expected.sum() == float(lengths.items["vision"].output.sum()) * 3584 * 2
    # Not placed, batch i of each phase's algorithm is on rank i: it makes its outputs there, and gets its inputs there.
    unplaced = dict(bench.journeys(size, schedule, placed=False))
    phase = size.phases[0]
    batches = post_balance(lengths.items["vision"].encoder, 16, cost=phase.cost, layout=phase.layout)
    inputs, outputs = (size.bytes_of(lengths)[f"vision {kind}"] for kind in ("inputs", "outputs"))
    assert unplaced["vision inputs"].sum(axis=0).tolist() == [float(inputs[batch].sum()) for batch in batches]
    assert unplaced["vision outputs"].sum(axis=1).tolist() == [float(outputs[batch].sum()) for batch in batches]
    wanted = karmarkar_karp(size.language.cost(lengths.language), 16)
    texts = [float(size.bytes_of(lengths)["text"][batch].sum()) for batch in wanted]
    assert unplaced["text"].sum(axis=0).tolist() == texts


def test_tables_show_the_figures(entry: Any) -> None:
    size = SIZES["MLLM-84B"]
    rigid = bench.rigid(size, 8, 1)
    moving = [{"model": size.name, "what": what, **row} for what, row in bench.moving(size, 16, 1).items()]
    found = {"comparisons": [entry], "rigid": [{"model": size.name, **rigid}], "moving": moving}
    console = Console(width=150, record=True, file=io.StringIO())
    for table in tables_of(bench.BENCHMARK, {**found, "planning": [bench.planning(16, 4, 1)], "paper_ratio": [1.5, 2]}):
        console.print(table)
    text = console.export_text()
    assert f"{entry['ways']['all']['ratio']:.3f}" in text
    assert f"{100 * rigid['all pad']:.1f}%" in text
    assert "…" not in text


def test_smaller_minibatches_of_the_baseline_are_taken_into_account() -> None:
    def made(samples: int, none: float) -> dict[str, Any]:
        ways = {"none": {"busy": none}, "all": {"busy": 0.9}, "all, ODC": {"busy": 0.96}}
        return {"model": "MLLM-84B", "ranks": 2560, "samples_per_rank": samples, "ways": ways}

    found = bench.add_paper_sizes({"comparisons": [made(30, 0.6), made(15, 0.5)]})["against_smaller_minibatches"]
    assert [(row["model"], row["ratio"], row["ratio_odc"]) for row in found] == [("MLLM-84B", 1.8, 1.92)]
