"""Layer 1: no processes. `odc bench report` with results made up by hand: no benchmark runs."""

from __future__ import annotations

import csv
import functools
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from odc.balance import Scenario
from odc.balance.simulate.studies import FACTORS
from odc.bench.harness import catalogue
from odc.bench.harness.benchmark import Entries, Run, numbers
from odc.bench.harness.ranks import BenchError, NotRunError
from odc.bench.planning import tables
from odc.bench.planning.paper_costs import paper_cost
from odc.bench.reporting import sections
from odc.bench.reporting.report import INTRODUCTION, without_folders
from odc.bench.reporting.sections import EMULATIONS, FIGURE_10, QUICK_EMULATIONS, SECTIONS
from odc.cli.app import app

for needed in ("matplotlib", "transformers", "tokenizers"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"the report needs {needed} (extras: examples, plot)", allow_module_level=True)

PICTURE = b"\x89PNG of the demo"
BENCHMARKS = {
    "primitives": ["primitives"],
    "demo": ["demo"],
    "emulated": ["emulated"],
    "hybrid": ["emulated"],
    "streams": ["batching", "stream-training"],
    "modalities": ["multimodal-emulated"],
    "planning": ["tables", "planning"],
    "host-time": ["host-time", "fsdp-host-time"],
    "limits": [],
}
"""What each section measures."""


def made_up(name: str, options: Mapping[str, Any], times: float) -> Entries:
    """What a benchmark returns: every figure that would be measured is multiplied by ``times``."""

    def spread(value: float) -> dict[str, float]:
        return {"median": value * times, "p20": 0.5 * value * times, "p80": 2 * value * times}

    if name == "primitives":
        gather = {"operation": "gather", "dtype": "fp32", "num_bytes": 1 << 20, "time_s": spread(0.004), "wrong": 0}
        copy = {"operation": "copy", "by": "memory", "dtype": "fp32", "num_bytes": 1 << 20, "busbw": spread(8.0)}
        rows = [{**gather, "by": "odc", "busbw": spread(2.0), "x_collective": 1.25 * times}, copy]
        late = {"late": "rank 1", "by": "odc", "on_time_s": spread(0.1), "others_lose_s": spread(0.002)}
        return {"ranks": 2, "device": "cpu", "rows": rows, "under_load": [late]}
    if name == "demo":
        for picture in ("losses", "timeline"):
            options["out"].mkdir(parents=True, exist_ok=True)
            (options["out"] / f"{picture}.png").write_bytes(PICTURE + picture.encode())
        rates = {"samples_per_s": 7.0 * times, "speedup": 1.3 * times, "bubble_rate": 0.085 * times}
        return {"runs": [{"name": "odc-lb-mini", **rates, "losses": [9.0, 6.5 * times], "repetitions": [rates]}]}
    if name == "emulated":
        ways = [(way, sharding) for way in options["way"] for sharding in options["sharding"] or ["full"]]
        return {"runs": [emulated_run(*way, 1 + number, times) for number, way in enumerate(ways)]}
    if name == "batching":
        streams = [
            {"law": "longalign", "kind": "minibatch", "time_per_1000": 12.5 * times, "bubble_percent": 3 * times}
        ]
        return {"rows": [{"simulated": 1.0}], "streams": streams, "dropped": []}
    if name == "stream-training":
        row = {"samples_per_s": [20.0 * times] * 3, "times_first": 1.4 * times, "losses": [8.0] * 8 + [6.0 * times] * 4}
        return {"rows": [{"name": "odc-minibatch", **row}]}
    if name == "multimodal-emulated":
        row = {"planned_bytes": {"vision": 1e6, "audio": 2e6 * times}, "bytes": {"vision": 4e6 * times}}
        return {"runs": [{"model": options["model"][0], "way": "all", "minibatch_s": spread(0.25), **row}]}
    if name == "tables":
        cells = [{"dataset": "AIME", "simulated": 1.0, "paper": 2.0}]
        return {"cells": cells, "errors": [{"dataset": "LongAlign", "model": "1.5B", "rms_error_points": 0.5 * times}]}
    if name == "planning":
        loader = {"ranks": 8, "samples_per_rank": 4, "cpu_s": spread(0.005)}
        plan = {"ranks": 256, "even vision": 1.25 * times}
        return {
            "model": "MLLM",
            "loader": [loader],
            "rebalance": [{"ranks": 64, "moved": 0.02 * times}],
            "plan": [plan],
        }
    if name == "host-time":
        operations = {"gather": {"cpu_us": spread(20.0), "wall_us": spread(90.0)}, "push": {"cpu_us": spread(30.0)}}
        return {"cells": [{"ranks": 4, "accumulate": "direct", "operations": operations}]}
    assert name == "fsdp-host-time"
    return {
        "parts": [{"part": "odc", "us": spread(40.0), "percent": 12.5 * times}],
        "kinds": [{"kind": "x", "us": 1.0}],
    }


def emulated_run(way: str, sharding: str, number: int, times: float) -> dict[str, Any]:
    """The first: a busy part of 0.8 * 2 s; the second, of 0.8 * 1 s."""
    parts = {"bubble": 0.5, "waiting": 0.3, "communication": 0.2, "host": 0.05, "planned_bubble": 0.4}
    measured = {name: value * times / number for name, value in parts.items()}
    seconds = {"minibatch_s": 2.0 / number, "planned_ratio": 1.1 * number, "ratio": 1.2 * number * times}
    return {"way": way, "sharding": sharding, **measured, **seconds, "overhead_mb": 3.0}


HOST_TIME = "CPU us of the calling thread, one call, median (20th-80th percentile); {} units of {} elements per shard"
TABLES: dict[str, str] = {
    "primitives": """\
**one-sided primitives on 2 ranks (cpu), bandwidths in GB/s**
| operation | by | dtype | size | time, ms | busbw | #wrong | x collective |
| gather | odc | fp32 | 1 MB | 4.000 (2.000-8.000) | 2.00 (1.00-4.00) | 0 | 1.25 |
| copy | memory | fp32 | 1 MB |  | 8.00 (4.00-16.00) |  |  |
**under load: a rank is 200 ms late in each microbatch**
| late | by | minibatch on time, ms | others lose, ms |
| rank 1 | odc | 100 (50-200) | 2 (1-4) |""",
    "demo": """\
**2 ranks, medians of 1 runs (lowest-highest)**
| way | samples/s | speedup | bubble rate | final loss |
| odc-lb-mini | 7.0 (7.0-7.0) | 1.30 (1.30-1.30) | 8.5% | 6.5000 |""",
    # Throughput of the paper: 401.3 over 299.4 samples per second and device.
    "emulated": """\
**throughput of ODC + LB-Mini over collectives + LB-Micro**
| lengths | model | ranks | samples a rank | planned | measured | without transfers | paper |
| LongAlign | 1.5B | 8 | 4 | 2.20 | 2.40 | 1.78 | 1.34 |
**bubble rates in percent: collectives + LB-Micro, then ODC + LB-Mini**
| lengths | model | ranks | samples a rank | planned | measured | waiting | transfers | host | paper \
| ODC: planned | ODC: measured | ODC: waiting | ODC: transfers | ODC: host | ODC: paper |
| LongAlign | 1.5B | 8 | 4 | 40.0 | 50.0 | 30.0 | 20.0 | 5.0 | {micro} | 20.0 | 25.0 | 15.0 | 10.0 | 2.5 | {mini} |""",
    "hybrid": """\
**4 ranks, longalign, 4 samples a rank: percent of all ranks' time**
| way | planned bubble | measured | waiting | transfers | host | s a minibatch | planned speedup | speedup | MB of ODC |
| odc-lb-mini | 40.0 | 50.0 | 30.0 | 20.0 | 5.0 | 2.00 | 1.10 | 1.20 | 3.00 |
| odc-lb-mini, hybrid | 20.0 | 25.0 | 15.0 | 10.0 | 2.5 | 1.00 | 2.20 | 2.40 | 3.00 |""",
    "streams": """\
**streams on 8 ranks, pools of 256 (pool-sort: 1024); minibatches of about 4**
| data set | aligned by | time/1000 | bubble % |
| longalign | minibatch | 12.5 | 3.00 |
**an epoch of streams: the same samples**
| way to train | samples/s | speedup | last third |
| odc-minibatch | 20.0 (20.0-20.0) | 1.40 | 6.000 |""",
    "modalities": """\
**4 ranks, tensors 64 times smaller: a minibatch in ms, parts in percent**
| model | way | measured | MB planned | MB moved |
| MLLM-84B | all | 250 (125-500) | 3.0 | 4.0 |""",
    "planning": """\
**root mean square of the differences**
| dataset | model | points |
| LongAlign | 1.5B | 0.50 |
**planned speedup by minibatch size**
|  | 1 | 2 |
| minibatch size | 1.25 | 1.50 |
**planned speedup by max length**
|  | 4096 | 8192 |
| max length | 1.25 | 1.50 |
**planned speedup by packing ratio**
|  | 1 | 1.5 |
| packing ratio | 1.25 | 1.50 |
**planned speedup by devices**
|  | 2 | 4 |
| devices | 1.25 | 1.50 |
**MinibatchLoader, CPU time per minibatch**
| ranks | samples | CPU ms |
| 8 | 4 | 5.0 (2.5-10.0) |
**rebalance, and parts of 1**
| ranks | moved |
| 64 | 0.0200 |
**all phases of MLLM: even, and between nodes**
| ranks | vision |
| 256 | 1.2500 |""",
    "host-time": f"""\
**{HOST_TIME.format(80, 64)}**
| ranks | accumulate | gather | push |
| 4 | direct | 20.0 (10.0-40.0) | 30.0 (15.0-60.0) |
**host time of a unit and microbatch, CPU us of the training thread: median (20th-80th percentile)**
| part | us | % of FSDP2's own |
| odc | 40.0 (20.0-80.0) | 12.5 |""",
    "limits": "",
}
"""Titles and tables of each section, of what :func:`made_up` makes with ``--quick``."""


@dataclass
class Written:
    """A report, and how the command ended."""

    code: int
    output: str
    text: str
    folder: Path
    asked: list[tuple[str, dict[str, Any]]]
    """Benchmarks in their order, with their options."""
    studies: list[tuple[Scenario, str, tuple[float, ...]]]

    def section(self, name: str) -> str:
        """What stands under its heading."""
        (title,) = (section.title for section in SECTIONS if section.name == name)
        (found,) = re.findall(rf"^## {title}\n\n(.*?)(?=^## |\Z)", self.text, re.MULTILINE | re.DOTALL)
        return str(found)

    def tables(self, name: str) -> str:
        """Titles and rows of a section's tables."""
        lines = [line for line in self.section(name).splitlines() if line.startswith(("|", "**"))]
        return "\n".join(line for line in lines if not line.startswith("| ---"))


@dataclass
class Reporter:
    """Writes reports whose benchmarks are made up."""

    folder: Path
    times: float = 1.0
    fails: dict[str, Exception] = field(default_factory=dict)
    misses: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)
    on_measure: Callable[[str], object] = lambda name: None
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    studies: list[tuple[Scenario, str, tuple[float, ...]]] = field(default_factory=list)

    def benchmark(self, name: str, real: Any) -> Any:
        signature = inspect.signature(real.measure)

        @functools.wraps(real.measure)
        def measure(run: Run, **options: Any) -> Entries:
            signature.bind(run, **options)
            self.asked.append((name, options))
            self.on_measure(name)
            if name in self.fails:
                raise self.fails[name]
            if name in self.misses:
                run.miss(self.misses[name])
            if name in self.wrong:
                run.missed.append(self.wrong[name])
            return made_up(name, options, self.times)

        return replace(real, measure=measure)

    def study(self, scenario: Scenario, factor: str, values: tuple[float, ...]) -> list[SimpleNamespace]:
        """Speedups of 1.25, 1.5, 1.75 and so on."""
        self.studies.append((scenario, factor, values))
        points = enumerate(values, 1)
        return [SimpleNamespace(value=value, speedup=self.times * (1 + place / 4)) for place, value in points]

    def write(self, *words: str, quick: bool = True, **changes: Any) -> Written:
        self.times, self.fails, self.misses, self.wrong = 1.0, {}, {}, {}
        self.on_measure, self.asked, self.studies = lambda name: None, [], []
        for name, value in changes.items():
            setattr(self, name, value)
        words = ("bench", "report", *["--quick"] * quick, "--out", "new/REPORT.md", *words)
        done = CliRunner().invoke(app, words, env={"COLUMNS": "140"})
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        path = self.folder / "new" / "REPORT.md"
        text = path.read_text() if path.exists() else ""
        return Written(done.exit_code, done.output, text, path.parent, self.asked, self.studies)


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reporter:
    """In a folder that looks like the repository's root."""
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "sft.py").touch()
    monkeypatch.chdir(tmp_path)
    reporter, find = Reporter(tmp_path), catalogue.find
    made = {name for names in BENCHMARKS.values() for name in names}
    monkeypatch.setattr(
        catalogue, "find", lambda name: reporter.benchmark(name, find(name)) if name in made else find(name)
    )
    monkeypatch.setattr(sections, "study", reporter.study)
    return reporter


def paper_bubble(method: str, dataset: str = "LongAlign", model: str = "1.5B", minibatch_size: int = 4) -> str:
    """A cell of the paper, as it is in the file."""
    key = [dataset, model, method, str(minibatch_size)]
    with (Path(tables.__file__).parent / "bubble_rates.csv").open() as file:
        found = [
            row
            for row in csv.DictReader(file)
            if [row[n] for n in ("dataset", "model", "method", "minibatch_size")] == key
        ]
    return f"{float(found[0]['bubble_percent']):.1f}"


def test_texts_are_fixed_and_tables_follow_from_the_results(reporter: Reporter) -> None:
    written = reporter.write("--json", "sections.json")
    assert written.code == 0, written.output
    assert written.text.startswith(f"{INTRODUCTION}\n\n| | |\n|---|---|\n| commit | ")
    assert re.findall(r"^## (.*)$", written.text, re.MULTILINE) == [section.title for section in SECTIONS]
    bubbles = {"micro": paper_bubble("Collective LB-Micro"), "mini": paper_bubble("ODC LB-Mini")}
    for section in SECTIONS:
        assert written.section(section.name).startswith(section.text), section.name
        expected = TABLES[section.name].format(**bubbles)
        assert written.tables(section.name) == expected, section.name
    assert [name for name, _ in written.asked] == [name for names in BENCHMARKS.values() for name in names]
    assert [factor for _, factor, _ in written.studies] == list(FIGURE_10)
    assert {(s.world_size, s.minibatch_size, len(s.lengths), s.cost) for s, *_ in written.studies} == {
        (8, 4, 512, paper_cost("1.5B"))
    }
    rows = json.loads((reporter.folder / "sections.json").read_text())["sections"]
    assert [(row["section"], row["outcome"]) for row in rows] == [(section.name, "ok") for section in SECTIONS]


def test_pictures_lie_beside_the_document(reporter: Reporter) -> None:
    written = reporter.write("--section", "primitives", "--section", "demo", "--section", "emulated")
    shown = re.findall(r"^!\[(.+)\]\((.+)\)$", written.text, re.MULTILINE)
    assert [name for _, name in shown] == [
        f"report/{name}.png" for name in ("primitives", "demo_losses", "demo_timeline", "emulated")
    ]
    for name in ("primitives", "emulated"):
        assert (written.folder / f"report/{name}.png").stat().st_size > 5000
    for name in ("losses", "timeline"):
        assert (written.folder / f"report/demo_{name}.png").read_bytes() == PICTURE + name.encode()


def without_figures(text: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", "#", text)


def test_two_reports_differ_in_figures_only(reporter: Reporter) -> None:
    """Also where ODC is slower than what it is compared with."""
    first, second = (reporter.write(times=times) for times in (1.0, 0.5))
    assert without_figures(first.text) == without_figures(second.text)
    changed = [name for name in TABLES if first.tables(name) != second.tables(name)]
    assert changed == [name for name in TABLES if name != "limits"]
    for name in TABLES:
        lines = zip(first.section(name).splitlines(), second.section(name).splitlines(), strict=True)
        assert all(old.startswith("| ") for old, new in lines if old != new), name


def test_the_full_report_measures_more_of_the_same(reporter: Reporter) -> None:
    quick, full = reporter.write(), reporter.write(quick=False)
    assert full.code == 0, full.output
    names = [name for name, _ in full.asked]
    assert list(dict.fromkeys(names)) == list(dict.fromkeys(name for name, _ in quick.asked))
    assert names.count("emulated") == len(EMULATIONS) + 1
    emulated = [options for name, options in full.asked if name == "emulated"][: len(EMULATIONS)]
    for each, options in zip(EMULATIONS, emulated, strict=True):
        law = tables.LAW_OF[each.dataset]
        assert (options["ranks"], options["model"], options["law"]) == (each.ranks, each.model, law)
        assert (options["minibatch_size"], options["minibatches"]) == (each.minibatch_size, each.minibatches)
        mini = "odc-lb-mini-equal" if each.dataset == "AIME" else "odc-lb-mini"
        assert options["way"] == ["collective-lb-micro", mini]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (\d+) \| (\d+) \| .* \| (\S+) \|$", full.tables("emulated"), re.MULTILINE)
    cells = [(each.dataset, each.model, each.ranks, each.minibatch_size) for each in EMULATIONS]
    assert [(dataset, model, int(ranks), int(size)) for dataset, model, ranks, size, _ in rows] == cells * 2
    papers = [paper_bubble("ODC LB-Mini", each.dataset, each.model, each.minibatch_size) for each in EMULATIONS]
    assert [paper for *_, paper in rows[len(cells) :]] == papers
    for scenario, factor, values in full.studies:
        assert values == FACTORS[factor]
        assert len(scenario.lengths) == 2048
    more = {name: dict(options) for name, options in full.asked}
    less = {name: dict(options) for name, options in quick.asked}
    assert (more["demo"]["minibatches"], less["demo"]["minibatches"]) == (24, 4)
    assert (more["demo"]["alternatives"], less["demo"]["alternatives"]) == (True, False)
    assert (more["host-time"]["ranks"], less["host-time"]["ranks"]) == (numbers("2,4,8"), numbers("2"))
    assert (more["stream-training"]["samples"], less["stream-training"]["samples"]) == (150, 60)
    assert less["stream-training"]["num_layers"] == 1  # the benchmark's own for --quick
    assert len(QUICK_EMULATIONS) == 1


@pytest.mark.parametrize(("section", "name"), [(key, name) for key, names in BENCHMARKS.items() for name in names])
def test_a_benchmark_that_fails_is_named_and_the_others_stay(reporter: Reporter, section: str, name: str) -> None:
    error = BenchError(
        f"{sys.executable} examples/x.py --out {reporter.folder}/runs: ended with 1\nthe end of its output"
    )
    words = ["--section", section, "--section", "limits"]
    written = reporter.write(*words, "--json", "sections.json", fails={name: error})
    assert written.code == 1
    command = f"{Path(sys.executable).name} examples/x.py --out runs: ended with 1"
    (text,) = (each.text for each in SECTIONS if each.name == section)
    assert (
        written.section(section).rstrip()
        == f"{text}\n\n**This section failed:** `odc bench {name}`: BenchError: {command}"
    )
    assert written.section("limits").startswith("- A sleep takes no core")
    assert "the end of its output" in written.output  # the traceback
    rows = json.loads((reporter.folder / "sections.json").read_text())["sections"]
    assert [row["outcome"] for row in rows] == ["failed", "ok"]


def test_a_failure_behind_a_benchmark_is_not_put_on_it(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, rows: object) -> None:
        raise OSError(f"[Errno 28] No space left on device: '{path.resolve()}'")

    monkeypatch.setattr(sections, "draw_emulated", fail)
    written = reporter.write("--section", "emulated")
    assert written.code == 1
    failed = "**This section failed:** OSError: [Errno 28] No space left on device: 'emulated.png'\n"
    assert written.section("emulated").endswith(failed)


def test_what_this_machine_cannot_run_is_no_failure(reporter: Reporter) -> None:
    written = reporter.write(
        "--section", "demo", "--section", "hybrid", fails={"demo": NotRunError("it needs a sea\nand a shore")}
    )
    assert written.code == 0, written.output
    assert written.section("demo").rstrip().endswith("**Not run on this machine:** `odc bench demo`: it needs a sea")
    assert written.tables("hybrid") == TABLES["hybrid"]


def test_missed_aims_and_wrong_results_are_in_the_document(reporter: Reporter) -> None:
    """With ``--quick`` too little is measured for an aim; a wrong result is one anyway."""
    words = ["--section", "planning", "--section", "limits"]
    missed = {"misses": {"tables": "LongAlign 1.5B: 3.00 points"}, "wrong": {"planning": "a plan is not even"}}
    full, quick = (reporter.write(*words, quick=quick, **missed) for quick in (False, True))
    said = {
        "full": ["**Missed:** tables: LongAlign 1.5B: 3.00 points", "**Missed:** planning: a plan is not even"],
        "quick": ["**Missed:** planning: a plan is not even"],
    }
    for written, expected in ((full, said["full"]), (quick, said["quick"])):
        assert written.code == 1
        assert re.findall(r"^\*\*Missed:.*$", written.text, re.MULTILINE) == expected
        assert re.findall(r"^\*\*Missed:.*$", written.section("planning"), re.MULTILINE) == expected
        assert written.tables("planning").count("| LongAlign | 1.5B |") == 1
        assert "planning: a plan is not even" in written.output


def test_the_document_grows_with_each_section(reporter: Reporter) -> None:
    seen: dict[str, str] = {}

    def look(name: str) -> None:
        path = reporter.folder / "new" / "REPORT.md"
        seen[name] = path.read_text() if path.exists() else ""

    words = [word for name in ("demo", "streams", "host-time") for word in ("--section", name)]
    written = reporter.write(*words, on_measure=look)
    assert seen["demo"] == ""
    assert seen["batching"].rstrip().endswith("(report/demo_timeline.png)")
    assert seen["host-time"].rstrip().endswith("| odc-minibatch | 20.0 (20.0-20.0) | 1.40 | 6.000 |")
    assert written.text.startswith(seen["host-time"].rstrip())


def test_nothing_holds_folders_of_the_machine(reporter: Reporter) -> None:
    fails: dict[str, Exception] = {
        "primitives": FileNotFoundError(2, "No such file or directory", str(reporter.folder / "x.json")),
        "demo": BenchError(f"{sys.executable} {reporter.folder}/examples/sft.py --out={reporter.folder}/runs: ended"),
        "batching": NotRunError(f"{Path.home()}/data/chats.jsonl is not here"),
    }
    written = reporter.write("--out", str(reporter.folder / "new" / "REPORT.md"), fails=fails)
    assert written.code == 1
    assert re.findall(r"(?<![\w.:/])/\w[^\s/]*/", written.text) == []
    for folder in {reporter.folder, Path(sys.prefix), Path(__file__).resolve().parents[2]}:
        assert str(folder) not in written.text
        assert not [path for path in written.folder.rglob("*.png") if str(folder).encode() in path.read_bytes()]
    assert "FileNotFoundError: [Errno 2] No such file or directory: 'x.json'" in written.section("primitives")
    kept = "BENCH 3/4 of https://example.org/a/b, 12 MB/s, examples/sft.py, ./runs/demo"
    assert without_folders(f"{kept} /a/b-c/d.e") == f"{kept} d.e"


def test_wrong_sections_and_places_are_refused(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    written = reporter.write("--section", "primitive")
    assert (written.code, written.asked) == (2, [])
    assert "--section 'primitive': expected one of primitives, demo" in " ".join(written.output.split())
    (reporter.folder / "examples" / "sft.py").unlink()
    written = reporter.write()
    assert (written.code, written.asked) == (2, [])
    assert "run this from the root of the repository" in " ".join(written.output.split())
