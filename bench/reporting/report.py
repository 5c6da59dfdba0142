"""A report of this machine: the benchmarks that make sense without a GPU, with fixed settings, as one document.

    odc bench report            # from the repository's root: runs/report/REPORT.md, its pictures beside it
    odc bench report --quick    # a first look, of small sizes: runs/report-quick/REPORT.md

The text is fixed, so that two reports differ in figures only. A section that fails says so, with the benchmark's name,
and does not lose the others; the command then ends with 1. The document is written anew behind each section, and holds
no folder of this machine.
"""

from __future__ import annotations

import inspect
import re
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from odc.bench.harness import catalogue, results
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Run, Table, as_settings, check_known
from odc.bench.harness.environment import commit, describe_environment
from odc.bench.harness.ranks import NotRunError
from odc.bench.reporting.sections import SECTIONS, Section
from odc.bench.training.demo import SCRIPT
from odc.bench.training.runs import check_examples

INTRODUCTION = """# What was measured on this machine

Written by `odc bench report` (`make report`), with fixed settings and a fixed text: two reports differ in figures only.
Absolute times are this machine's; ratios were measured in one run. Where a paper is quoted, it is *Revisiting Parameter
Server in LLM Post-Training*, whose figures are from A100 GPUs."""


class Report:
    """What a section is given: other benchmarks, and a folder for pictures."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.quick = run.quick
        self.folder, self._run, self._prefix = folder, run, ""
        self._measuring = ""
        """The benchmark that runs: of whatever fails meanwhile, the document names it."""

    def measure(self, name: str, quick: Mapping[str, Any], **options: Any) -> Entries:
        """The result of a benchmark with these options; with ``--quick``, the benchmark's own and then ``quick``
        replace them."""
        benchmark = catalogue.find(name)
        if self.quick:
            options = {**options, **benchmark.quick, **quick}
        parameters = list(inspect.signature(benchmark.measure).parameters.values())[1:]
        options = {**{p.name: p.default for p in parameters}, **options}
        part = self._run.part(self._prefix, {"benchmark": name, "settings": as_settings(options)})
        self._measuring = name
        found = part.document(benchmark.measure(part, **options))
        self._measuring = ""
        # Not by `miss`: with --quick a benchmark has left out aims by itself, and what is left are wrong results.
        self._run.missed += [f"{name}: {text}" for text in part.missed]
        return found

    def tables(self, name: str, document: Entries, *rows: str) -> str:
        """The tables of a benchmark, of all entries or of ``rows``."""
        chosen = [t for t in catalogue.find(name).tables if (not rows or t.rows in rows) and document.get(t.rows)]
        return "\n\n".join(results.markdown(table, document[table.rows], document) for table in chosen)

    def picture(self, name: str, alternative: str) -> tuple[Path, str]:
        """Where to draw one, and how the document shows it."""
        path = self.folder / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path, f"![{alternative}]({self.folder.name}/{path.name})"

    def write(self, number: int, section: Section) -> tuple[str, str]:
        """The section, and its outcome: "ok", "missed", "not run" or "failed"."""
        self._prefix, self._measuring = f"{number}/{len(SECTIONS)} {section.title}", ""
        self._run.begin(1)
        num_missed = len(self._run.missed)
        blocks, outcome = [f"## {section.title}", section.text], "ok"
        try:
            blocks += section.measure(self) if section.measure else ()
        except NotRunError as error:
            blocks, outcome = [*blocks[:2], f"**Not run on this machine:** {self._said(str(error))}"], "not run"
        except Exception as error:
            self._run.note(traceback.format_exc())
            text = self._said(f"{type(error).__name__}: {error}")
            blocks, outcome = [*blocks[:2], f"**This section failed:** {text}"], "failed"
        if missed := self._run.missed[num_missed:]:
            blocks += (f"**Missed:** {without_folders(text)}" for text in missed)
            outcome = "missed" if outcome == "ok" else outcome
        return "\n\n".join(blocks), outcome

    def _said(self, text: str) -> str:
        """The first line of an error, behind the benchmark's name."""
        benchmark = f"`odc bench {self._measuring}`: " if self._measuring else ""
        return benchmark + without_folders(text.partition("\n")[0])


def without_folders(text: str) -> str:
    """Of absolute paths only the last name: errors of commands and of the system have this machine's folders.

    >>> without_folders("/home/me/.venv/bin/python examples/sft.py: 3/4 of '/tmp/a/b.json'")
    "python examples/sft.py: 3/4 of 'b.json'"
    """
    return re.sub(r"(?<![\w.:/])/(?:[^\s/'\",;:]+/)+", "", text)


def _measured_on() -> str:
    environment = {"commit": commit() or "unknown", **describe_environment()}
    lines = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in environment.items())]
    return "\n".join(lines)


def measure(
    run: Run,
    out: Annotated[Path, typer.Option(help="The document; pictures go to the folder report/ beside it.")] = Path(
        "runs/report/REPORT.md"
    ),
    section: Annotated[
        list[str] | None, typer.Option(help=f"Only these: {', '.join(section.name for section in SECTIONS)}.")
    ] = None,
) -> Entries:
    check_known(section=(section, [each.name for each in SECTIONS]))
    check_examples(SCRIPT, "transformers", "tokenizers", "matplotlib")
    report, written, rows = Report(run, out.parent / "report"), [INTRODUCTION, _measured_on()], []
    out.parent.mkdir(parents=True, exist_ok=True)
    for number, each in enumerate(SECTIONS, 1):
        if section and each.name not in section:
            continue
        started = time.monotonic()
        text, outcome = report.write(number, each)
        written.append(text)
        rows.append({"section": each.name, "outcome": outcome, "seconds": time.monotonic() - started})
        out.write_text("\n\n".join(written) + "\n")
        run.note(f"{each.title}: {outcome}, {rows[-1]['seconds']:.0f} s")
    if any(row["outcome"] == "failed" for row in rows):
        run.status = 1
    run.note(f"{out}: {len(rows)} sections")
    return {"sections": rows}


BENCHMARK = Benchmark(
    measure,
    "22 min, quick 3 min",
    (
        Table(
            "sections",
            "sections of the report",
            (Column("section", "section"),),
            (Column("outcome", "outcome"), Column("s", "seconds", ".0f")),
        ),
    ),
    quick={"out": Path("runs/report-quick/REPORT.md")},
    needs="the extras examples and plot, the repository",
)
