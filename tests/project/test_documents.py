"""Layer 1: no processes. What the documents name exists, and what they tell people to install is this project."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from odc._version import DISTRIBUTION, install_command
from odc.balance import policy_names
from odc.bench.gpu.speed import LAYERS, parameters
from odc.bench.harness.results import Figure, figures, update
from odc.bench.planning import multimodal_sizes
from odc.cli.app import app
from odc.transports import registry

ROOT = Path(__file__).parents[2]
README, QUICKSTART, PERFORMANCE = Path("README.md"), Path("docs/quickstart.md"), Path("docs/performance.md")
DOCUMENTS = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "odc/*/*.md", "bench/results/*.md")
    for path in sorted(ROOT.glob(pattern))
]
_QUOTED = re.compile(r"`([\w.]+/[\w./]+\.\w+)`")
_LINKED_HEADING = re.compile(r"\]\((?!https?:)([^)#]*\.md)?#([^)]+)\)")
_LINKED = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = (ROOT / document).read_text()
    folders = [ROOT, ROOT / document.parent]
    named = [*_QUOTED.findall(text), *_LINKED.findall(text)]
    outputs = ("runs/",)  # what commands write
    missing = [
        name
        for name in named
        if not name.startswith(outputs) and not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


def _anchors(text: str) -> set[str]:
    """What GitHub and MyST call the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_headings_that_a_document_links_to_exist(document: Path) -> None:
    text = (ROOT / document).read_text()
    missing = []
    for name, anchor in _LINKED_HEADING.findall(text):
        target = (ROOT / document.parent / name) if name else ROOT / document
        if target.exists() and anchor not in _anchors(target.read_text()):
            missing.append(f"{name}#{anchor}")
    assert missing == []


def test_most_documents_name_files() -> None:
    counts = [len(_QUOTED.findall((ROOT / document).read_text())) for document in DOCUMENTS]
    assert sum(counts) > 80


def _project(pattern: str) -> list[str]:
    """From pyproject.toml; Python 3.10 has no parser for it."""
    return re.findall(pattern, (ROOT / "pyproject.toml").read_text(), re.MULTILINE)


EXTRAS = _project(r"^(\w+) = \[(?=[\n ]*\".*>=)")
# Who is named before an extra in brackets; "." is the clone itself.
_HINT = re.compile(rf"""([\w.{{}}-]*)\[(?:(?:{"|".join(EXTRAS)}),?)+\]""")
_OTHER_PROJECT = re.compile(r"""\binstall(?: -\S+)* ['"]?odc(?![\w-])""")


def test_the_distribution_has_one_name() -> None:
    assert _project(r'^name = "(.+)"$') == [DISTRIBUTION]
    assert DISTRIBUTION != "odc"  # another project on the package index
    assert set(EXTRAS) >= {"cuda12", "cuda13", "plot", "examples", "dev"}
    assert install_command("plot") == f"pip install '{DISTRIBUTION}[plot]'"


def test_every_hint_to_install_names_this_project() -> None:
    suffixes = (".py", ".md", ".sh", ".sbatch", ".toml", ".txt", "Makefile")
    skipped = {"runs", "build"}
    files = [
        path
        for path in ROOT.rglob("*")
        if path.name.endswith(suffixes)
        and not any(part.startswith(".") or part in skipped for part in path.relative_to(ROOT).parts)
    ]
    allowed = {"", ".", DISTRIBUTION, "{DISTRIBUTION}"}
    hints = [(path, name) for path in files for name in _HINT.findall(path.read_text(errors="replace"))]
    assert len(hints) > 10
    assert [(path, name) for path, name in hints if name not in allowed] == []
    assert [path for path in files if _OTHER_PROJECT.search(path.read_text(errors="replace"))] == []


def test_every_figure_of_a_document_is_its_files() -> None:
    wanted = list(figures(ROOT / "bench" / "results"))
    texts = {document: (ROOT / document).read_text() for document in {figure.document for figure in wanted}}
    assert PERFORMANCE in texts
    changed, lost = update(texts, wanted)
    assert [figure.words for figure in lost] == []
    assert [figure.words for figure in changed] == []  # odc bench figures writes them


def test_figures_measured_anew_find_their_places() -> None:
    old, new = (Figure(README, "a.json", "| ODC |", text) for text in (" 1.46x | 1.6e-07 |", " 12x | 3e-9 |"))
    other = "| FSDP | 1.00x | - |"
    texts = {README: f"{old.words}\n{other}", PERFORMANCE: old.words}
    assert update(texts, [new]) == ([new], [])
    assert texts == {README: f"{new.words}\n{other}", PERFORMANCE: old.words}
    assert update({README: other}, [new]) == ([], [new])
    assert update({README: f"{old.words}{old.words}"}, [new]) == ([], [new])  # which of them?
    assert sum(1 for _ in figures(ROOT / "bench" / "results")) >= 80


def _lines(text: str) -> list[str]:
    """But for the time of planning."""
    return [re.sub(r" +\d+\.\d m?s", " ms", line.rstrip()) for line in text.strip().splitlines()]


def test_the_plan_in_documents_is_what_the_command_prints() -> None:
    command, shown = re.findall(r"`odc (plan .+)` prints:\n\n```text\n(.+?)```", (ROOT / QUICKSTART).read_text(), re.S)[
        0
    ]
    printed = _lines(CliRunner().invoke(app, command.split()).stdout)
    assert printed == _lines(shown)
    readme = (ROOT / README).read_text()
    assert f"\nodc {command} " in readme
    advice = re.findall(r"That of the last command:\n\n```text\n(.+?)```", readme, re.S)[0]
    assert _lines(advice) == printed[printed.index("") + 1 :] != []


def test_the_estimate_for_eight_gpus_is_the_arithmetic_that_it_names() -> None:
    """Link 350 GB/s, copies 2.7 TB/s, 450 TFLOP/s."""
    text = (ROOT / "docs/gpu.md").read_text().split("## What to expect on eight H100s")[1].split("\n## ")[0]
    rows = {
        name.strip(): cells
        for name, *cells in (line.strip("|").split("|") for line in text.splitlines() if line[:2] == "| ")
    }
    for column, (layer, (width, *_)) in enumerate(LAYERS.items()):
        params = sum(parameters(layer))
        forwards = [(2 * params * T + 2 * T * T * width) / 450e9 for T in (1024, 4096, 16384)]
        gather, staged = 7 / 8 * 2 * params / 350e6, 2 * params / 2.7e9
        expected = [f"{2 * params / 1e6:.0f} MB", f"{gather:.2f}", f"{2 * gather:.2f}", "the same"]
        expected += [f"{2 * staged:.2f} and {3 * staged:.2f}", *(f"{ms:.1f}" for ms in forwards)]
        assert [cells[column].strip() for cells in list(rows.values())[1:]] == expected


@pytest.mark.parametrize(
    ("document", "names"), [("docs/hosts.md", registry.names()), ("docs/policies.md", policy_names())]
)
def test_every_transport_and_policy_has_its_row(document: str, names: Sequence[str]) -> None:
    rows = re.findall(r"^\| `([a-z_-]+)` \|", (ROOT / document).read_text(), re.M)
    assert set(names) <= set(rows)


def test_the_readme_is_short() -> None:
    """What a reader asks for next has a page."""
    text = (ROOT / README).read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1300


def test_the_plan_of_modalities_is_what_the_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, planned, shown = re.findall(
        r"```sh\nodc (bench multimodal-lengths .+?)\nodc (plan .+?)```\n\n```text\n(.+?)```",
        (ROOT / "docs" / "multimodal.md").read_text(),
        re.S,
    )[0]
    monkeypatch.chdir(tmp_path)
    written = CliRunner().invoke(app, made.split())
    assert written.exit_code == 0, written.output
    planned = planned.replace("\\\n", " ")
    # Its encoders and language model are those that are planned.
    options = [part for part in written.stdout.split() if ":" in part]
    assert [part for part in planned.split() if ":" in part] == options != []
    assert _lines(CliRunner().invoke(app, planned.split()).stdout) == _lines(shown)


def test_lengths_of_made_up_samples_of_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'MLLM-1B' is not known: expected of MLLM-10B, MLLM-18B, MLLM-84B"):
        multimodal_sizes.write_lengths("MLLM-1B", tmp_path / "a.jsonl", 10, 0)
