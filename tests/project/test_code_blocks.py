"""Layer 3: ranks as processes. The Python blocks of the documents run on two ranks; their commands have such options.

A block that cannot run here says so in the document: ``<!--- skip: next, "reason" -->`` in front of it.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import typer
from documents import Prepared, on_rank, told
from process_ranks import run_ranks
from sybil.document import Document
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from odc.cli.app import app
from odc.cli.bench import command_of, show_comparison, show_list, update_figures, write_lengths
from odc.cli.deprecated import modern
from odc.cli.run import rank_options

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELLS = ("sh", "bash", "console")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"^cat > (\S+\.py) <<'?(\w+)'?\n(.*?)^\2$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|[;|] *|&& *)(?:\$ )?((?:\w+=\S+ )*(?:torchrun [^#\n]*?-m )?odc[. ][^#\n]*)", re.MULTILINE)
_TIMEOUT_S = 240.0


def blocks(document: Path, languages: tuple[str, ...]) -> list[str]:
    return [text for language, text in _FENCE.findall(document.read_text()) if language in languages]


def scripts(document: Path) -> list[tuple[str, str]]:
    """Python scripts that a document's commands write."""
    return [(name, text) for block in blocks(document, SHELLS) for name, _, text in _SCRIPT.findall(block)]


def commands(document: Path) -> list[str]:
    """Those of ``odc``, without their comments, each on one line."""
    found = []
    for block in blocks(document, SHELLS):
        text = re.sub(r"\\\n\s*", " ", _SCRIPT.sub("", block))
        found += [command.strip() for command in _COMMAND.findall(text)]
    return found


def run_blocks(path: Path, prepared: Prepared) -> Iterator[str]:
    """Failures."""
    document = Document.parse(str(path), CodeBlockParser("python", PythonEvaluator()), SkipParser())
    document.namespace = prepared
    for example in document.examples():
        try:
            example.evaluate()
        except unittest.SkipTest as skipped:
            if not str(skipped):
                yield f"{path.name}:{example.line} is skipped without a reason"
        except Exception as error:
            yield told(f"{path.name}:{example.line}", error)
            return  # those behind it need what it has not made, and the other rank waits for neither
    for name, text in scripts(path):
        try:
            exec(compile(text, f"{path.name}: {name}", "exec"), {"__name__": "__main__"})
        except Exception as error:
            yield told(f"{path.name}: {name}", error)


WITH_BLOCKS = [path for path in DOCUMENTS if blocks(path, ("python",)) or scripts(path)]


def run_documents(rank: int, world_size: int, folder: Path) -> dict[Path, list[str]]:
    # They are in a job already, of which the examples know nothing.
    dist.init_process_group = dist.destroy_process_group = lambda *args, **options: None
    found = {}
    for path in WITH_BLOCKS:
        (folder / path.name).mkdir(exist_ok=True)
        os.chdir(folder / path.name)
        found[path] = on_rank(functools.partial(run_blocks, path), rank, world_size)
    return found


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Path, list[str]]]:
    """All in one job: half of them import libraries of training, which takes longer than they do."""
    return run_ranks(2, run_documents, tmp_path_factory.mktemp("documents"), timeout_s=_TIMEOUT_S)


@pytest.mark.parametrize("document", WITH_BLOCKS, ids=lambda path: path.name)
def test_the_python_blocks_of_a_document_run(document: Path, failures: list[dict[Path, list[str]]]) -> None:
    assert [of_rank[document] for of_rank in failures] == [[], []]


def test_a_block_that_fails_is_told(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    skipped = '<!--- skip: next, "why" -->\n```python\n1 / 0\n```\n'
    page.write_text(f"```python\nlengths[0]\n```\n\n{skipped}\n```python\nnone_such\n```\n")
    (failure,) = run_blocks(page, Prepared(0, 2))
    assert "page.md:10: NameError: name 'none_such' is not defined" in failure


def parse(command: str) -> None:
    """Raises what the command would, or ends as it would, were an option not known or a value out of range."""
    words = shlex.split(re.sub(r"^(\w+=\S+ )+", "", command))
    if words[0] == "torchrun":
        words = words[words.index("-m") + 1 :]
    if words[0] == "odc.run":
        words[:1] = ["odc", "run"]
    name, *rest = words[1:] or ["--help"]
    if name in ("--help", "-h", "--version"):
        return
    if name == "run":
        for word in rest:
            if word.endswith(".py") and not os.path.exists(word):
                Path(word).parent.mkdir(parents=True, exist_ok=True)
                Path(word).touch()
        rank_options(rest)
        return
    if name == "bench":
        others = {
            "list": show_list,
            "compare": show_comparison,
            "figures": update_figures,
            "multimodal-lengths": write_lengths,
        }
        name, *rest = rest or ["list"]
        alone = typer.Typer(add_completion=False)
        alone.command()(others.get(name) or command_of(name))
        command_line: Any = typer.main.get_command(alone)
    else:
        known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
        name, rest, warning = modern(name, rest, known)
        assert not warning
        command_line = known[name]
    with command_line.make_context(name, rest):
        pass


COMMANDS = [(path, command) for path in DOCUMENTS for command in commands(path)]


def test_commands_have_options_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 10
    wrong = []
    for path, command in COMMANDS:
        try:
            parse(command)
        except (Exception, SystemExit) as error:
            wrong.append(f"{path.name}: {command}: {error or type(error).__name__}")
    assert wrong == []


@pytest.mark.parametrize(
    "command", ["odc plan longalign --no-such 1", "odc run --no-such a.py", "odc bench tables --no-such"]
)
def test_a_command_with_an_unknown_option_is_refused(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises((Exception, SystemExit)):
        parse(command)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [
        (path.name, target)
        for path in DOCUMENTS
        for block in blocks(path, SHELLS)
        for target in re.findall(r"^make ([\w-]+)", block, re.MULTILINE)
    ]
    assert named
    assert [(path, target) for path, target in named if target not in targets] == []
