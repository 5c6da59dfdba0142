"""Layer 1: no processes. What ``odc plan --modality`` recommends, and what it says holds ranks back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_cli_modalities import FLOPS_PER_S, VISION, Record, plan_json, write
from test_cli_modalities import mix as mix  # a fixture

from odc.cli.costs import make_training
from odc.cli.modalities import parse_modalities, read_dataset
from odc.cli.phase_report import _about_small_encoders, _what_is_awaited, recommend_phases
from odc.cli.phases import Balanced, Pieces, compare_phases
from odc.cli.records import RecordReader, TokenCounter


def advice(path: str, *arguments: str) -> str:
    size = ("--world-size", "4", "--minibatch-size", "2", "--set", "minibatches=12")
    return str(plan_json(path, *size, *arguments)["recommendation"])


def test_advice_about_one_long_clip(tmp_path: Path) -> None:
    """One of 8 items takes 8 times as long: more than a quarter of 15; of 32 items, 8 is less than a quarter of 60."""
    clips = [800, *[100] * 7]
    path = write(tmp_path / "a.jsonl", [{"length": 50, "audio": [[clip, 10]]} for clip in clips] * 60)
    text = advice(path, "--modality", "audio:linear=1e11", "--set", "minibatches=40")
    assert "What holds it back is audio: one item alone takes longer than a rank's fair share of that phase in " in text
    assert text.endswith("of the minibatches; with --minibatch-size 8, in fewer than half.")
    few = advice(write(tmp_path / "b.jsonl", [{"length": 50, "audio": [[8, 1]]}, *[{"length": 50}] * 3]), *FEW)
    assert few.endswith("; a larger minibatch would hide it.")


def test_advice_about_one_large_sample(tmp_path: Path) -> None:
    """A sample with four clips is more than a rank's share of all phases; one of its clips is not."""
    clips: list[Record] = [{"length": 300, "audio": [[100, 10]] * 4}, *[{"length": 300}] * 3]
    modalities = parse_modalities(["audio:linear=3.5e10,frozen"], FLOPS_PER_S)
    path = write(tmp_path / "a.jsonl", clips * 60)
    dataset = read_dataset(path, modalities, RecordReader((), TokenCounter(None, 4.0)))
    training = make_training("qwen2.5-1.5b", "h100", 0.4, 4, recompute=True, timings=None)
    found = compare_phases(dataset, modalities, training, num_ranks=4, minibatch_size=1)
    language = float(training.cost([300])[0])
    clip = 400 * 3.5e10 / FLOPS_PER_S / 3  # of a frozen encoder the forward counts
    whole, joint = Pieces(found, "whole", 0), Pieces(found, "joint", 0)
    held = {}
    for size in (1, 2):
        number = (found.order.reshape(-1, 4 * size) % 4 == 0).sum(axis=1)  # with clips
        held[size] = float(((number > 0) & (language + clip > size * language + clip * number / 4)).mean())
        assert whole.held_by_one(size) == held[size]
    assert joint.held_by_one(1) == 0
    assert held[1] > 0.5 > held[2]
    assert whole.size_that_hides_one() == 2
    said = _what_is_awaited(found, found.of("whole", "odc"))
    assert said == (
        "What holds it back is whole samples: one whole sample alone takes longer than a rank's fair share of all "
        f"phases in {held[1]:.0%} of the minibatches; with --minibatch-size 2, in fewer than half."
    )
    said = _what_is_awaited(found, found.of("joint", "odc"))
    assert said == "Most of the waiting that is left is for what other ranks' encoders make."


def test_advice_where_the_sum_of_all_phases_stays_uneven(tmp_path: Path) -> None:
    """Three samples of one length on two ranks; the clip of one costs next to nothing."""
    modalities = parse_modalities(["audio:linear=1"], FLOPS_PER_S)
    records: list[Record] = [{"length": 300, "audio": [[10, 1]]}, {"length": 300}, {"length": 300}, {"length": 2}]
    dataset = read_dataset(write(tmp_path / "a.jsonl", records), modalities, RecordReader((), TokenCounter(None, 4.0)))
    training = make_training("qwen2.5-1.5b", "h100", 0.4, 2, recompute=True, timings=None)
    found = compare_phases(dataset, modalities, training, num_ranks=2, minibatch_size=2)
    for balanced, pieces in (("whole", "whole samples, whose items stay with them,"), ("joint", "items and samples")):
        outcome = found.of(balanced, "odc")
        assert outcome.bubble_rate == pytest.approx(1 / 4, abs=0.01)
        assert _what_is_awaited(found, outcome) == (
            f"Most of the waiting that is left is what {pieces} do not even out; a larger minibatch has more of them."
        )


FEW = ("--minibatch-size", "1", "--modality", "audio:linear=1e11")


def test_advice_about_a_small_encoder(mix: str) -> None:
    small = ["vision:layers=1,hidden=64,ffn=256", "audio:layers=1,hidden=64,ffn=64"]
    text = advice(mix, *(part for option in small for part in ("--modality", option)))
    assert text.startswith("Balance the language model only, with ODC: ")
    assert re.search(r"Balancing vision \(0\.\d% of the work\) and audio \(0\.\d% of the work\) gains under 1%\.", text)
    one = advice(mix, "--modality", VISION, "--modality", small[1])
    assert one.startswith("Balance whole samples over all phases, with ODC: ")
    assert " Balancing audio (0.0% of the work) gains under 1%. Most of the waiting that is left is what whole " in one


def test_advice_prefers_what_moves_fewer_bytes(mix: str) -> None:
    """With tiny encoders three choices are as good as each other."""
    modalities = parse_modalities(["vision:layers=1,hidden=64,ffn=256", "audio:layers=1,hidden=64,ffn=64"], FLOPS_PER_S)
    dataset = read_dataset(mix, modalities, RecordReader((), TokenCounter(None, 4.0)))
    training = make_training("qwen2.5-1.5b", "h100", 0.4, 4, recompute=True, timings=None)
    found = compare_phases(dataset, modalities, training, num_ranks=4, minibatch_size=4)
    choices: tuple[Balanced, ...] = ("language", "whole", "all")
    fewest = min(sum(found.of(choice, "odc").moved.values()) for choice in choices)
    for choice, said in zip(choices, ("the language model only", "whole samples", "all phases"), strict=True):
        moved = found.of(choice, "odc").moved
        before = moved["text"]
        moved["text"] += fewest / 2 - sum(moved.values())
        assert recommend_phases(found).startswith(f"Balance {said}")
        moved["text"] = before
    # What each encoder gains by itself is under 1 %; a choice for all of them gains by what they add up to.
    assert " and audio (0." in _about_small_encoders(found, found.of("language", "odc"))
    for choice in ("whole", "joint", "all"):
        assert _about_small_encoders(found, found.of(choice, "odc")) == ""


def test_advice_to_change_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"length": 100, "vision": [[64, 16]]}] * 64)
    text = advice(path, "--modality", VISION)
    assert text == (
        "Leave minibatches as they are: ranks wait for 0.0% of the time, and balancing all phases with FSDP would be "
        "no faster."
    )


def test_advice_about_padding(tmp_path: Path) -> None:
    """Two ranks with a long and a short item each: where they are, half of each batch is padding."""
    path = write(tmp_path / "a.jsonl", [{"length": 50, "audio": [[1000, 1], [10, 1]]}] * 40)
    text = advice(path, "--world-size", "2", "--minibatch-size", "1", "--modality", "audio:linear=1e9,layout=padded")
    assert text.startswith("Leave minibatches as they are")
    assert re.search(r"Padding of audio takes 4\d% of the time\.$", text)
