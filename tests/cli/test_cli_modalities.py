"""Layer 1: no processes. ``odc plan modalities``: samples of several modalities, as users call it."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import cli_calls
import numpy as np
import pytest
from cli_calls import plan, printed, timings, words

from odc.balance import Scenario, TransformerCost
from odc.cli.costs import make_training
from odc.cli.lengths import some_of
from odc.cli.modalities import encoder_flops, parse_modalities, read_dataset
from odc.cli.phases import compare_phases
from odc.cli.records import RecordReader, TokenCounter

VISION = "vision:layers=24,hidden=1024,ffn=4096"
AUDIO = "audio:layers=32,hidden=1280,ffn=5120,layout=padded"
MODEL = ("--model", "qwen2.5-1.5b")
FLOPS_PER_S = 0.4 * 989e12

Record = dict[str, object]


def plan_json(*arguments: str) -> dict[str, Any]:
    return plan("modalities", *arguments, *MODEL)


def rows(found: dict[str, object]) -> dict[tuple[str, str], dict[str, object]]:
    return {(row["balanced"], row["comm"]): row for row in found["choices"]}


def error(*arguments: str) -> str:
    return cli_calls.error("plan", "modalities", *arguments, *MODEL)


def write(path: Path, records: list[Record]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def mix(tmp_path: Path) -> str:
    """Text with images, with sound, with both, and with nothing."""
    draw = random.Random(0)
    records: list[Record] = []
    for number in range(400):
        vision = [[patches, patches // 4] for patches in draw.choices(range(64, 1025, 4), k=(2, 0, 1, 0)[number % 4])]
        audio = [[frames, -(-frames // 2)] for frames in draw.choices(range(2, 3000), k=(0, 1, 1, 0)[number % 4])]
        length = int(draw.lognormvariate(5.5, 0.8)) + 8 + sum(item[1] for item in vision + audio)
        records.append({"length": length, "vision": vision, "audio": audio})
    return write(tmp_path / "mix.jsonl", records)


def test_table_fits_80_columns(mix: str) -> None:
    both = ("--modality", VISION, "--modality", AUDIO, *MODEL)
    text = printed("plan", "modalities", mix, *both, "--ranks-per-node", "4", "--set", "minibatches=3")
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    table = [re.split(r" *│ *", line)[1:-1] for line in lines if line.startswith("│")]
    assert [row[:2] for row in table] == [
        *(["none", "FSDP"], ["none", "ODC"], ["language", "FSDP"], ["language", "ODC"], ["whole", "ODC"]),
        *(["all", "FSDP"], ["all", "ODC"], ["joint", "ODC"]),
    ]
    assert {len(row) for row in table} == {8}
    assert table[0][-2:] == ["0", "0"]
    assert all(0 < float(row[-1].replace(",", "")) < float(row[-2].replace(",", "")) for row in table[2:])
    assert "vision: 300 items, encoder length median" in text


@pytest.mark.parametrize("frozen", [False, True])
def test_figures_of_a_minibatch_worked_out_by_hand(tmp_path: Path, frozen: bool) -> None:
    """Two ranks, one sequence each of equal length; one has four items, the other none."""
    records: list[Record] = [{"length": 500, "vision": [[100, 10]] * 4}, {"length": 500}]
    option = "vision:linear=1e12,bytes=3" + (",frozen" if frozen else "")
    size = ("--world-size", "2", "--minibatch-size", "1", "--modality", option)
    found = rows(plan_json(write(tmp_path / "a.jsonl", records), *size, "--ranks-per-node", "1"))
    language = float(TransformerCost.from_config("qwen2.5-1.5b")([500])[0]) / FLOPS_PER_S
    encoder = 400 * 1e12 / FLOPS_PER_S * (1 / 3 if frozen else 1)
    for comm in ("collective", "odc"):
        none, apart, balanced = (found[choice, comm] for choice in ("none", "language", "all"))
        assert none["samples_per_s"] == pytest.approx(2 / (language + encoder))
        assert none["bubble_rate"] == pytest.approx(encoder / 2 / (language + encoder))
        assert apart["samples_per_s"] == none["samples_per_s"]
        assert balanced["speedup"] == pytest.approx((language + encoder) / (language + encoder / 2))
        assert balanced["bubble_rate"] == pytest.approx(0, abs=1e-12)
        assert apart["moved"]["bytes"] == none["moved"]["bytes"] == 0
        # Two items of 100 tokens go there, two times 10 rows of 1536 numbers in bf16 back, their gradients there.
        outputs = 2 * 10 * 1536 * 2 * (1 if frozen else 2)
        moved = {"bytes": 600 + outputs, "item_bytes": 600, "output_bytes": outputs, "text_bytes": 0}
        assert balanced["moved"] == balanced["moved_between_nodes"] == moved


def test_a_few_long_clips_are_made_up_for_by_the_language_model(tmp_path: Path) -> None:
    """One clip in 32 samples of text, and so about 4 on 8 ranks: the encoder cannot be even, the sum of all can."""
    records: list[Record] = [{"length": 300, "audio": [[400, 50]]}, *[{"length": 300}] * 31]
    path = write(tmp_path / "a.jsonl", records * 20)
    size = ("--world-size", "8", "--minibatch-size", "16", "--set", "minibatches=4")
    found = plan_json(path, *size, "--modality", "audio:linear=1e11")
    row = rows(found)
    assert row["joint", "odc"]["bubble_rate"] < row["all", "odc"]["bubble_rate"] - 0.1
    assert row["joint", "odc"]["speedup"] > 1.1 * row["all", "odc"]["speedup"]
    # Whole samples do as well here, and leave outputs where they are: that is what is recommended.
    assert row["whole", "odc"]["bubble_rate"] < row["joint", "odc"]["bubble_rate"] + 0.01
    assert row["whole", "odc"]["moved"]["output_bytes"] == 0 < row["joint", "odc"]["moved"]["output_bytes"]
    assert [row[choice, "odc"]["policy"] for choice in ("whole", "joint")] == ["whole", "joint"]
    assert str(found["recommendation"]).startswith("Balance whole samples over all phases, with ODC: ")
    assert {key for key in row if key[0] in ("whole", "joint")} == {("whole", "odc"), ("joint", "odc")}


def test_samples_that_move_take_their_items_along(mix: str) -> None:
    """Whole samples are evened out, so something moves; no outputs do, whatever the minibatch."""
    found = rows(plan_json(mix, "--modality", VISION, "--modality", AUDIO, "--set", "minibatches=3"))
    moved = found["whole", "odc"]["moved"]
    assert moved["output_bytes"] == 0 < min(moved["item_bytes"], moved["text_bytes"])
    assert found["all", "odc"]["moved"]["output_bytes"] > 0
    assert found["whole", "odc"]["bubble_rate"] < found["none", "odc"]["bubble_rate"]


def test_what_a_choice_moves_within_a_node_is_not_between_nodes(mix: str) -> None:
    found = plan_json(mix, "--modality", VISION, "--modality", AUDIO, "--set", "minibatches=2", "--ranks-per-node", "8")
    assert rows(found)["all", "odc"]["moved"]["bytes"] > 0
    assert {row["moved_between_nodes"]["bytes"] for row in found["choices"]} == {0}
    alone = plan_json(mix, "--modality", VISION, "--modality", AUDIO, "--set", "minibatches=2")
    assert "moved_between_nodes" not in alone["choices"][0]


def test_one_integer_per_item_and_a_rate(tmp_path: Path) -> None:
    pairs: list[Record] = [{"length": 900, "vision": [[400, 100], [401, 101]]}, {"length": 800, "vision": [[4, 1]]}] * 8
    integers: list[Record] = [{"length": 900, "vision": [400, 401]}, {"length": 800, "vision": [4]}] * 8
    size = ("--world-size", "2", "--minibatch-size", "2")
    one = plan_json(write(tmp_path / "a.jsonl", pairs), *size, "--modality", VISION)
    other = plan_json(write(tmp_path / "b.jsonl", integers), *size, "--modality", f"{VISION},rate=4")
    for first, second in zip(one["choices"], other["choices"], strict=True):
        assert first.pop("planning_s_per_minibatch") > 0 < second.pop("planning_s_per_minibatch")
        assert first == second
    exact = parse_modalities(["a:linear=1,rate=0.1"], 1.0)
    read = read_dataset(
        write(tmp_path / "c.jsonl", [{"length": 99, "a": [3]}]), exact, RecordReader((), TokenCounter(None, 4.0))
    )
    assert read.items["a"].output.tolist() == [30]


def test_rows_are_added_to_text(tmp_path: Path) -> None:
    records: list[Record] = [{"text": "x" * 400, "vision": [[64, 16], [64, 4]]}, {"text": "x" * 40, "vision": None}]
    path, modalities = write(tmp_path / "a.jsonl", records), parse_modalities([VISION], 1.0)
    read = read_dataset(path, modalities, RecordReader((), TokenCounter(None, 4.0)))
    assert read.tokens.tolist() == [120, 10]
    assert read.about.endswith("4 characters per token, an estimate (--tokenizer counts), and rows of encoders")


def test_flops_of_an_encoder() -> None:
    """By the matrices of the encoders of the paper's table 1, of 2B and 0.6B parameters."""
    for layers, hidden, ffn, billions in ((36, 2048, 8192, 1.812), (32, 1280, 5120, 0.629)):
        cost = encoder_flops(layers, hidden, ffn)
        assert cost.b / 6 / 1e9 == pytest.approx(billions, abs=5e-4)
        # All pairs, where a decoder with as many heads counts half of them.
        size = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 16, "intermediate_size": ffn}
        decoder = TransformerCost.from_config({**size, "vocab_size": 1}, gated_mlp=False)
        assert cost.a == 2 * decoder.flops_per_squared_token
        assert cost.b == pytest.approx(decoder.flops_per_token, rel=1e-5)
        assert encoder_flops(layers, hidden, ffn, gated=True).b > 1.3 * cost.b


def test_costs_by_coefficients_and_by_timings(tmp_path: Path) -> None:
    measured = timings(tmp_path / "t.csv", (10, 100, 500, 1000), lambda s: 1e-6 * s * s + 1e-4 * s + 0.01)
    given = ["a:linear=1000,quadratic=10,max-tokens=50,frozen", f"b:timings={measured},layout=padded-attention"]
    a, b = parse_modalities(given, 1e7)
    assert (a.phase.cost([100]), a.microbatch_s) == (pytest.approx([(10 * 100**2 + 1000 * 100) / 1e7]), 0.0)
    assert (a.phase.max_tokens, a.phase.frozen, b.phase.layout) == (50, True, "padded-attention")
    assert (b.phase.cost([100]), b.microbatch_s) == (pytest.approx([0.02], rel=1e-3), pytest.approx(0.01, rel=1e-3))


def test_microbatches_cost_what_timings_say(tmp_path: Path) -> None:
    """One rank: all work in a row, and each microbatch's own time besides."""
    measured = timings(tmp_path / "t.csv", (10, 100, 500, 1000), lambda s: 1e-4 * s + 0.5)
    path = write(tmp_path / "a.jsonl", [{"length": 100, "a": [[40, 1], [40, 1], [40, 1]]}])
    size = ("--world-size", "1", "--minibatch-size", "1")
    for limit, number in (("", 1), (",max-tokens=80", 2), (",max-tokens=40", 3)):
        found = plan_json(path, *size, "--modality", f"a:timings={measured}{limit}", "--set", f"timings={measured}")
        seconds = 0.0220 + 0.5 * (1 + number)
        assert [1 / row["samples_per_s"] for row in found["choices"]] == pytest.approx([seconds] * 8, rel=1e-6)


def test_minibatches_are_those_of_text(mix: str) -> None:
    modalities = parse_modalities([VISION, AUDIO], FLOPS_PER_S)
    dataset = read_dataset(mix, modalities, RecordReader((), TokenCounter(None, 4.0)))
    training = make_training("qwen2.5-1.5b", "h100", 0.4, 4, recompute=True, timings=None)
    size = {"num_ranks": 4, "minibatch_size": 3, "num_minibatches": 5, "seed": 7}
    found = compare_phases(dataset, modalities, training, **size)
    tokens = some_of(dataset.tokens, 60, 7)
    sampler = Scenario(tokens, training.cost, 4, 3, max_tokens=int(tokens.max()), seed=7).sampler("none")
    drawn = [sorted(tokens[minibatch.samples].tolist()) for minibatch in sampler]
    assert np.sort(dataset.tokens[found.order].reshape(5, 12), axis=1).tolist() == drawn
    assert len(set(found.order.tolist())) == 60
    for outcome in found.outcomes:
        assert all(loads.shape == (3, 4) for loads in outcome.loads)
        assert np.sum(outcome.makespans) >= float(outcome.work.sum()) / 4 * (1 - 1e-9)


def test_balancing_more_waits_less(mix: str) -> None:
    found = plan_json(mix, "--modality", VISION, "--modality", AUDIO, "--world-size", "4", "--minibatch-size", "8")
    assert found["num_minibatches"] == 12
    assert found["costs"]["audio"] == "FLOPs of 32 layers of 1280 and 5120, padded"
    for comm in ("collective", "odc"):
        speeds = [rows(found)[choice, comm]["speedup"] for choice in ("none", "language", "all")]
        assert speeds == sorted(speeds)
    assert re.match("Balance (the sum of )?all phases, with ODC", str(found["recommendation"]))
    assert rows(found)["all", "odc"]["phases"]["audio"]["padding"] > 0
    assert rows(found)["all", "odc"]["phases"]["vision"]["padding"] == pytest.approx(0, abs=1e-12)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever starts to plan fails."""

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("planned something")

    monkeypatch.setattr("odc.cli.plan.compare_phases", fail)
    monkeypatch.setattr("odc.cli.plan.Scenario", fail)


GOOD: Record = {"length": 300, "vision": [[64, 16]]}


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"length": 9, "vision": [[64]]}, "line 2, modality 'vision', item 0 is [64], which says no lengths"),
        ({"length": 99, "vision": [[64, 16], {}]}, "line 2, modality 'vision', item 1 is {}, which says no lengths"),
        ({"length": 9, "vision": [64]}, "line 2, modality 'vision', item 0 is 64, one integer: expected [encoder"),
        ({"length": 9, "vision": [[True, 1]]}, "line 2, modality 'vision', item 0 is [True, 1], which says no lengths"),
        ({"length": 9, "vision": 64}, "line 2, modality 'vision' is 64: expected a list of items"),
        ({"length": 9, "vision": [[0, 1]]}, "line 2, modality 'vision', item 0, the encoder length is 0: expected"),
        ({"length": 9, "vision": [[4, -1]]}, "line 2, modality 'vision', item 0 puts -1 rows into the sequence"),
        ({"length": 9, "vision": [[4, 10**13]]}, "line 2, modality 'vision', item 0, the second number is 1000"),
        ({"length": 9, "audio": [[4, 1]]}, "line 2, modality 'audio': no --modality is called so, only 'vision'; add"),
        ({"length": 9, "vision": [[64, 16]]}, "line 2: a sequence of 9 tokens, into which items put 16 rows (modality"),
        ({"length": 999, "vision": [[513, 1]]}, "line 2, modality 'vision', item 0 has 513 tokens: expected at most"),
        ({"vision": [[64, 16]]}, "line 2 has no field 'length', only 'vision'"),
        ({"length": 0}, "line 2, field 'length' is 0: expected a length of at least 1 token"),
        ({"length": 10**9 + 1}, "1 of 9 samples are longer than --max-tokens 1000000000: raise --max-tokens to 10000"),
    ],
)
def test_errors_name_line_and_modality(
    tmp_path: Path, record: Record, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "longer" in message:
        monkeypatch.setattr("odc.cli.plan.compare_phases", compare_phases)
    path = write(tmp_path / "a.jsonl", [GOOD, record, *[GOOD] * 7])
    size = ("--world-size", "2", "--minibatch-size", "2", "--max-tokens", "1000000000")
    assert message in error(path, "--modality", f"{VISION},max-tokens=512", *size)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        (
            [{"length": 9}],
            [],
            "a.jsonl has no items of 'vision' in any of its 1 samples, whose fields are 'length': exp",
        ),
        (
            [{"length": 9, "vision": []}],
            [],
            "fields are 'length', 'vision': expected e.g. {\"length\": 812, \"vision\": ",
        ),
        ([GOOD], ["--modality", "audio:linear=1"], "has no items of 'audio' in any"),
        ([], [], "a.jsonl holds no samples"),
        ([{"vision": [[1, 1]]}], [], "'vision' looks like items of a modality, and none holds the length of the whole"),
        ([GOOD], ["--field", "vision"], "line 1, field 'vision' holds items of a modality, not a length: odc plan"),
        ([GOOD], ["--set", "truncate=yes"], "--set: 'truncate=yes' is not known: expected of timings=, mfu="),
        ([GOOD], ["--set", "gather-ms=1"], "--set: 'gather-ms=1' is not known: expected of timings=, mfu="),
        ([GOOD], ["--modality", VISION], "--modality vision is given twice"),
        ([GOOD], [], "1 samples make no minibatch of 4 samples on each of 8 ranks"),
    ],
)
def test_files_and_options_that_do_not_fit(
    tmp_path: Path, records: list[Record], options: list[str], message: str
) -> None:
    assert message in error(write(tmp_path / "a.jsonl", records), "--modality", VISION, *options)


@pytest.mark.usefixtures("unplanned")
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("vision", "says nothing of what it costs: expected one of its encoder's layers=, hidden= and ffn=, or"),
        ("layers=1,hidden=2,ffn=3", "expected a name first, e.g. --modality vision:"),
        ("vision:layers=1,hidden=2", "has no ffn=: expected layers=, hidden= and ffn="),
        ("vision:layers=1,linear=2", "says layers and linear of what it costs"),
        ("vision:linear=0", "linear and quadratic are 0"),
        ("vision:linear=-1", "linear is '-1', expected a finite number of at least 0"),
        ("vision:layers=1.5,hidden=2,ffn=3", "layers is '1.5', expected an integer of at least 1"),
        ("vision:linear=1,rate=0", "rate is '0', expected a finite number above 0"),
        ("vision:linear=1,rate=1e400", "rate is '1e400', expected a finite number above 0"),
        ("vision:linear=1,speed=3", "'speed=3' is not known: expected of layers=, hidden="),
        ("vision:linear=1,frozen=yes", "'frozen=yes' is not known"),
        ("vision:linear=1,rate", "'rate' is not known"),
        ("vision:linear=1,linear=2", "linear is said twice"),
        ("vision:linear=1,gated", "gated goes with the sizes of an encoder"),
        ("vision:linear=1,layout=tight", "layout is 'tight', expected one of packed, padded, padded-attention"),
        ("vision:timings=no.csv", "there is no file 'no.csv'"),
        ("language:linear=1", "'language' is what the language model is called here"),
    ],
)
def test_options_that_cannot_be_read(tmp_path: Path, option: str, message: str) -> None:
    assert message in error(write(tmp_path / "a.jsonl", [GOOD] * 64), "--modality", option)


def test_other_sources_have_no_items(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("12\n")
    assert "a.txt holds no items of modalities: --modality ne" in error(str(tmp_path / "a.txt"), "--modality", VISION)
    assert "'llava' is no file: --modality ne" in error("llava", "--modality", VISION)
    path = write(tmp_path / "b.jsonl", [GOOD] * 64)
    assert "expected full nodes" in error(path, "--modality", VISION, "--ranks-per-node", "3")


def test_items_without_the_option(tmp_path: Path) -> None:
    """Lengths are planned as before, and it is said that encoders are not."""
    records: list[Record] = [{"length": 300}, *[{"length": 300, "vision": [[64, 16]], "labels": [1, 2]}] * 63]
    said = " ".join(printed("plan", write(tmp_path / "a.jsonl", records), "--policy", "none", *MODEL).split())
    note = (
        "odc plan modalities --modality vision:... plans their encoders (odc plan modalities --help tells how), here "
        "they count for nothing"
    )
    assert f"Lengths: field 'length': the length that it says; not counted: 'labels'; {note}." in said
    message = cli_calls.error("plan", write(tmp_path / "b.jsonl", [{"id": 1, "vision": [[64, 16]]}]))
    assert "'vision' looks like items of a modality, and none holds the length of the whole interleaved" in message
    assert "odc plan modalities --modality vision:... plans their encoders" in message


def test_pictures(mix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is an optional package")
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    from odc.cli.plots import _LANGUAGE

    saved: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    size = ("--world-size", "18", "--minibatch-size", "4", "--set", "minibatches=3")
    path = tmp_path / "a.png"
    text = printed(
        "plan", "modalities", mix, *size, "--modality", VISION, "--modality", AUDIO, *MODEL, "--plot", str(path)
    )
    assert "Pictures: " in text
    before, after = saved[0].axes
    assert before.get_title(loc="left") == "nothing balanced, FSDP"
    assert after.get_title(loc="left") == "all phases balanced, ODC"
    assert len(before.get_yticks()) == 16
    assert before.get_ylabel() == "16 of 18 ranks"
    ends = [max(bar.get_x() + bar.get_width() for bar in axes.patches) for axes in (before, after)]
    assert ends[1] < 0.9 * ends[0]
    # Under collectives all ranks begin with the language model together, under ODC each when its encoders are done.
    starts = [
        {round(bar.get_x(), 9) for bar in axes.patches if to_hex(bar.get_facecolor()) == _LANGUAGE}
        for axes in (before, after)
    ]
    assert len(starts[0]) == 1 < len(starts[1])


def test_help_teaches_it() -> None:
    text = words("plan", "modalities", "--help")
    assert "--modality NAME:KEY=VALUE,..." in text
    assert "the language model, whole samples, all phases, or their sum" in text
    assert '{"length": 812, "vision": [[1024, 256], [576, 144]]} has the length of the whole sequence' in text
    for key in ("layers=", "quadratic=", "timings=FILE", "rate=", "padded-attention", "max-tokens=", "frozen", "gated"):
        assert key in text
