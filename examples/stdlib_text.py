"""Real text that every machine has: functions and classes of the running Python's standard library.

Nothing is downloaded and no module is imported: source files are read and parsed. A definition gives up to
two pairs. The prompt is its module and signature; the answer is its docstring ("describe") or its body
("write"). Docstrings are short, bodies of classes can be thousands of tokens: the lengths are long-tailed, as
they are in real fine-tuning data.
"""

from __future__ import annotations

import ast
import os
import random
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Not installed everywhere, or generated, or not what anyone would train on.
SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
MIN_ANSWER_CHARACTERS = 20


@dataclass(frozen=True)
class Pair:
    """One training sample as text."""

    prompt: str
    answer: str


def stdlib_files() -> list[tuple[str, Path]]:
    """(module name, source file) of the standard library, sorted by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS]  # site-packages can be large
        for path in (Path(folder, name) for name in names if name.endswith(".py")):
            parts = path.relative_to(root).with_suffix("").parts
            if not SKIPPED_FOLDERS.intersection(parts):
                files.append((".".join(parts).removesuffix(".__init__"), path))
    return sorted(files)


def pairs_of_source(module: str, source: str) -> Iterator[Pair]:
    """The pairs of one source file, in the order of their definitions."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        header = f"# {module}\n{_signature(node)}\n"
        docstring = ast.get_docstring(node) or ""
        body = textwrap.dedent("\n".join(lines[node.body[0].lineno - 1 : node.end_lineno]))
        for task, answer in (("describe", docstring), ("write", body)):
            if len(answer) >= MIN_ANSWER_CHARACTERS:
                yield Pair(f"{header}# {task}:\n", answer)


def stdlib_pairs(num_pairs: int, seed: int = 0) -> list[Pair]:
    """``num_pairs`` pairs in random order; the same for the same Python, number and seed.

    Reads files in random order and no more of them than it needs.

    Raises:
        ValueError: the standard library does not have that many.
    """
    generator = random.Random(seed)
    files = stdlib_files()
    generator.shuffle(files)
    pairs: list[Pair] = []
    for module, path in files:
        if len(pairs) >= num_pairs:
            break
        pairs.extend(_pairs_of_file(module, path))
    if len(pairs) < num_pairs:
        raise ValueError(f"num_pairs={num_pairs}: this Python's standard library has only {len(pairs)}")
    generator.shuffle(pairs)
    return pairs[:num_pairs]


def _pairs_of_file(module: str, path: Path) -> list[Pair]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # odd escapes in old files are not our concern
            return list(pairs_of_source(module, path.read_text(encoding="utf-8")))
    except (SyntaxError, UnicodeDecodeError):  # the library has such files, for its own tests
        return []


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"
