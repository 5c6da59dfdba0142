"""Layer 1, and one pair of ranks: what all benchmarks share, on a made-up one; the primitives' choices and checks."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from odc.bench.communication import primitives
from odc.bench.gpu.setting import Setting
from odc.bench.harness import catalogue
from odc.bench.harness.benchmark import (
    Benchmark,
    Column,
    Entries,
    Numbers,
    Picture,
    Run,
    Table,
    commit,
    numbers,
    summary,
)
from odc.bench.harness.ranks import BenchError, NotRunError, Place, Rank, run_ranks
from odc.cli.app import app
from odc.config import LaunchEnvironment

RESULTS = Path(catalogue.__file__).parent.parent / "results"


def measure(
    run: Run,
    sizes: Annotated[Numbers, typer.Option(parser=numbers, help="Of what is made up.")] = Numbers(1, 2),  # noqa: B008
    factor: Annotated[float, typer.Option(help="Of all times.")] = 1.0,
    how: Annotated[str, typer.Option(help="It ends.")] = "",
) -> Entries:
    if how == "here":
        raise NotRunError("no such hardware")
    if how == "fail":
        raise BenchError("rank 1 is gone")
    if how == "miss":
        run.miss("an aim of 3")
    run.begin(len(sizes))
    rows = []
    for size in sizes:
        rows.append({"size": size, "time_s": summary([factor * size * part for part in (0.9, 1.0, 1.1)]), "name": "x"})
        run.advance()
    return {"rows": rows}


MADE_UP = Benchmark(
    measure,
    (Table("rows", "{settings[factor]}", (Column("size", "size"),), (Column("ms", "time_s", ".1f", 1e3),)),),
    quick={"sizes": Numbers(7), "factor": 2.0},
    picture=Picture("rows", Column("s", "time_s"), ["name"], Column("size", "size")),
)


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    find = catalogue.find
    monkeypatch.setattr(catalogue, "find", lambda name: MADE_UP if name == "made-up" else find(name))


def bench(*words: str) -> Any:
    return CliRunner().invoke(app, ["bench", *words], env={"COLUMNS": "120"})


def test_options_table_and_result(tmp_path: Path) -> None:
    path, picture = tmp_path / "new" / "a.json", tmp_path / "a.png"
    done = bench("made-up", "--sizes", "3,4", "--json", str(path), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert "3000.0 (2820.0-3180.0)" in done.output
    document = json.loads(path.read_text())
    assert document["command"] == "odc bench made-up --sizes 3,4"
    assert document["settings"] == {"sizes": "3,4", "factor": 1.0, "how": ""}
    assert [row["size"] for row in document["rows"]] == [3, 4]
    assert {"date", "torch", "cpu"} <= set(document["environment"])
    assert picture.stat().st_size > 5000


def test_quick_sets_what_is_not_given(tmp_path: Path) -> None:
    bench("made-up", "--quick", "--factor", "5", "--json", str(tmp_path / "a.json"))
    document = json.loads((tmp_path / "a.json").read_text())
    assert document["settings"] == {"sizes": "7", "factor": 5.0, "how": ""}
    assert document["command"] == "odc bench made-up --quick --factor 5.0"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["--how", "here"], 2, "no such hardware"),
        (["--how", "fail"], 1, "rank 1 is gone"),
        (["--how", "miss"], 1, "an aim of 3"),
        (["--how", "miss", "--quick"], 0, ""),
        (["--sizes", "0"], 2, "expected numbers of at least 1"),
        (["--plot", "a.txt"], 2, "expected one of"),
    ],
)
def test_how_it_ends(words: list[str], code: int, text: str) -> None:
    done = bench("made-up", *words)
    assert done.exit_code == code
    assert text in " ".join(done.output.split())
    assert done.exception is None or isinstance(done.exception, SystemExit)  # no traceback


def test_changes_beyond_the_spread_are_told_from_others(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"{factor}.json") for factor in (1, 1.05, 2)]
    for path, factor in zip(paths, ("1", "1.05", "2"), strict=True):
        bench("made-up", "--factor", factor, "--json", path)
    within, beyond = (bench("compare", paths[0], path).output for path in paths[1:])
    assert within.count("~1.05") == 2
    assert beyond.count(" 2.00") == 2
    assert "~" not in beyond
    assert "factor: 1.0 -> 2.0" in beyond


def test_only_results_of_one_benchmark_are_compared(tmp_path: Path) -> None:
    bench("made-up", "--json", str(tmp_path / "a.json"))
    done = bench("compare", str(tmp_path / "a.json"), str(RESULTS / "planning.json"))
    assert (done.exit_code, "expected two of one benchmark" in done.output) == (2, True)
    (tmp_path / "b.json").write_text("{}")
    assert bench("compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")).exit_code == 2
    done = bench("nonsense")
    assert done.exit_code == 2
    assert "expected one of primitives, fsdp-host-time" in " ".join(done.output.split())


def test_every_benchmark_is_in_its_room_and_shows_its_committed_results() -> None:
    names = [entry.name for entry in catalogue.ENTRIES]
    listed = bench("list").output
    assert [name for name in names if catalogue.written(name) not in listed] == []
    # That of peers is of packages that are not run any more.
    of_benchmarks = [path for path in RESULTS.glob("*.json") if path.name != "batching_peers.json"]
    with_tables = [path for path in of_benchmarks if not path.name.startswith("gpu_check_")]  # which has verdicts
    shown = {path.name: bench("compare", str(path), str(path)) for path in with_tables}
    assert len(shown) > 25
    assert {name for name, done in shown.items() if done.exit_code} == set()
    documents = [json.loads(path.read_text()) for path in of_benchmarks]
    assert {document["benchmark"] for document in documents} <= {catalogue.written(name) for name in names}


# The primitives


@pytest.mark.parametrize(("gpus", "ranks"), [(8, 8), (1, 2)])
def test_a_machine_that_says_it_has_gpus_is_measured_on_them(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int
) -> None:
    """Also one that only poses as such. NCCL is the baseline where each rank has a GPU of its own."""
    asked: list[Any] = []

    def ranks_of(run: Run, world_size: int, body: Any, *arguments: Any, place: Place) -> list[Any]:
        asked.append((world_size, place, place.backend(world_size), arguments[0]))
        return [([], [], {})] * world_size

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(Run, "ranks", ranks_of)
    found = primitives.measure(Run(), smallest=1 << 20, largest=1 << 24, factor=4)
    backend = "cpu:gloo,cuda:nccl" if gpus >= ranks else "gloo"
    assert asked == [(ranks, Place(device_type="cuda", num_gpus=gpus), backend, [1 << 20, 1 << 22, 1 << 24])]
    assert (found["ranks"], found["device"]) == (ranks, "cuda")
    with pytest.raises(ValueError, match="do not pose as several hosts"):
        primitives.measure(Run(), hosts=2)


def test_without_gpus_it_is_gloo_on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    place = Place.of_this_machine()
    assert (primitives.choose(place, 0, 0), place.backend(2)) == (2, "gloo")
    for options, words in (({"dtype": ["fp8"]}, "fp8"), ({"ranks": 1}, "at least 2"), ({"hosts": 3}, "at most one")):
        with pytest.raises(ValueError, match=words):
            primitives.measure(Run(), **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in this order"):
        primitives.measure(Run(), smallest=1 << 20, largest=1 << 10)


def break_a_push(me: Rank, dtype: str) -> list[dict[str, Any]]:
    """With sources that are off by one in one element of one rank."""
    made = primitives.Workload

    class Broken(made):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.source[3] += 1.0 if me.rank == 1 and dtype == "fp32" else 0.0

    primitives.Workload = Broken  # type: ignore[misc]
    return primitives.measure_size(me, 1 << 12, 1, dtype=primitives.DTYPES[dtype])


@pytest.mark.parametrize("transport", ["shm", pytest.param("fake_cuda_streams", marks=pytest.mark.extended)])
def test_a_wrong_element_is_counted(transport: str) -> None:
    place = Place()
    if transport != "shm":
        place = Setting(transport, "cpu", prepare="odc.bench.fake.cuda:register_prompt_fakes")
    for dtype, wrong in (("fp32", 1), ("bf16", 0)):
        rows = {row["operation"]: row for row in run_ranks(2, break_a_push, dtype, place=place)[0]}
        assert {rows[name]["by"] for name in ("gather", "scatter_accumulate")} == {transport}
        assert [rows[name]["wrong"] for name in ("gather", "all_gather")] == [0, 0]
        assert [rows[name]["wrong"] for name in ("scatter_accumulate", "reduce_scatter")] == [wrong, wrong]
        entries = {"ranks": 2, "device": "cpu", "processes": [], "rows": [*rows.values()]}
        text = primitives.as_nccl_tests(entries)
        assert text.endswith(f"# Out of bounds values : {2 * wrong} {'FAILED' if wrong else 'OK'}")


def lose_time(me: Rank) -> list[dict[str, Any]]:
    from odc.bench.communication import late

    late.LATE_S, late.COMPUTE_S = 0.1, 0.001
    return late.measure_late(me, 1, 0)


def test_under_load_who_waits_for_whom() -> None:
    rows = {(row["late"], row["by"]): row for row in run_ranks(2, lose_time)[0]}
    assert {by for _, by in rows} == {"shm", "gloo"}
    for late in ("the last rank", "each in turn"):
        for name in ("on_time_s", "others_lose_s", "minibatch_loses_s"):
            assert set(rows[late, "shm"][name]) == {"median", "p20", "p80"}
        # Whatever the machine is busy with: a sleep is never too short, and collectives wait for it.
        assert (
            rows[late, "gloo"]["minibatch_loses_s"]["median"] > 0.2 or rows[late, "gloo"]["on_time_s"]["median"] > 0.4
        )


def test_ranks_of_torchrun_must_be_as_many_as_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LaunchEnvironment, "from_environment", lambda: LaunchEnvironment(1, 1, 4, 4, "here", 1))
    run = Run()
    assert not run.is_first
    with pytest.raises(ValueError, match="torchrun has started 4 ranks, and 2 are asked for"):
        run.ranks(2, lose_time)


def test_what_benchmarks_write_does_not_make_their_commit_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that two runs in turn are of the same code."""
    monkeypatch.chdir(tmp_path)
    for name in ("code.py", "bench/results/demo.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before\n")
    for arguments in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "c"]):
        subprocess.run(["git", *arguments], check=True)
    clean = commit()
    assert clean
    (tmp_path / "bench/results/demo.json").write_text("after\n")
    assert commit() == clean
    (tmp_path / "code.py").write_text("after\n")
    assert commit() == f"{clean}-dirty"
