"""Layer 1: no processes. Each error and warning of the source says what to do, or has a row in docs/troubleshooting.md.

Each row there belongs to a message of the source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from odc import errors

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
_TYPES = "\n## Types of errors\n"
_ROOMS = ("odc", "fsdp_patch", "balance", "trainers", "launch", "cli", "kernels", "bench")
_REPORTS = "cli/doctor/"  # what odc doctor prints has its advice beside it

# What makes an error or a warning of its arguments, beside calls whose name ends in Error or Exit.
_MAKERS = frozenset(("refusal", "_refusal", "_failed", "FaultInjected"))
_WARNERS = frozenset(("warn", "warn_explicit", "warning", "error"))  # of their first argument
_TELLERS = frozenset(
    ("cause_of_death", "describe_silence", "describe_collective")
)  # their text becomes a part of errors
_LEAST_LETTERS = 10  # of a row. A message of fewer is another's text with a name before it
_MOST_TEXTS = 40  # that one expression can be

# A message needs no row if it says what is expected or what to do: a clause of it begins with one of these verbs.
_SAYS_WHAT_TO_DO = re.compile(
    r"\b(?:expect(?:ed|s)?|must|needs?|ha[sv]e? to)\b|(?:[.:;,(] |\b(?:or|and|first|then) )(?:"
    r"call|change|clear|close|compute|evaluate|filter|free|give|initialise|install|keep|"
    r"leave|load|lower|make|measure|name|pad|pass|patch|pip|prepare|put|raise|rename|restore|"
    r"run|set|shard|shuffle|skip|start|switch|take|tokenize|train|unset|update|use|work|wrap|write"
    r")\b",
    re.IGNORECASE,
)


class Message(NamedTuple):
    """One text of the source, "..." for what is not literal in it, as the end of a traceback shows it."""

    where: str
    text: str


class _Module:
    def __init__(self, source: str, name: str) -> None:
        self._name = name
        self._tree = ast.parse(source)
        self._functions: dict[str, list[ast.FunctionDef]] = {}
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef):
                self._functions.setdefault(node.name, []).append(node)
        self._local: dict[ast.FunctionDef, dict[str, list[ast.expr]]] = {}
        self._constants: dict[str, list[ast.expr]] = {"OUR_FAULT": [ast.Constant(errors.OUR_FAULT)]}
        self._constants.update(_assigned(self._tree.body))

    def messages(self) -> Iterator[Message]:
        shown = self._name if self._name.startswith("odc/") else f"odc/{self._name}"
        for scope, node in _scoped(self._tree, None):
            said, maker = _said(node, scope)
            if said and scope is not None and scope not in self._local:
                self._local[scope] = _assigned(ast.walk(scope))
            local = {} if scope is None else self._local.get(scope, {})
            for expression in said:
                for text in self._texts(expression, local, 3):
                    plain = " ".join(re.sub(r"%(\.\d+)?[a-z]", "...", text).split())
                    if _letters(plain) >= _LEAST_LETTERS and " " in plain:
                        yield Message(f"{self._name}:{expression.lineno}", f'File "{shown}" {maker}: {plain}')

    def _texts(self, node: ast.expr | None, local: dict[str, list[ast.expr]], depth: int) -> list[str]:
        """What the expression can be: names are followed through the function and the module, ``depth`` times."""
        if isinstance(node, ast.Constant):
            return [node.value] if isinstance(node.value, str) else ["..."]
        if isinstance(node, ast.JoinedStr):
            texts = [""]
            for part in node.values:
                words = self._texts(part, local, depth)
                texts = [text + word for text in texts for word in words][:_MOST_TEXTS]
            return texts
        if isinstance(node, ast.FormattedValue):
            return self._texts(node.value, local, depth - 1) if isinstance(node.value, ast.Name) else ["..."]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self._texts(node.left, local, depth), self._texts(node.right, local, depth)
            return [one + other for one in left for other in right][:_MOST_TEXTS]
        if isinstance(node, ast.IfExp):
            return self._texts(node.body, local, depth) + self._texts(node.orelse, local, depth)
        if depth > 0 and isinstance(node, ast.Name):
            values = local.get(node.id) or self._constants.get(node.id) or []
            return [text for value in values for text in self._texts(value, local, depth - 1)] or ["..."]
        if depth > 0 and isinstance(node, ast.Call):
            functions = self._functions.get(_last_name(node.func), [])
            parts = [part for function in functions for part in ast.walk(function) if isinstance(part, ast.Return)]
            return [text for part in parts for text in self._texts(part.value, {}, depth - 1)] or ["..."]
        return ["..."]


def _scoped(node: ast.AST, scope: ast.FunctionDef | None) -> Iterator[tuple[ast.FunctionDef | None, ast.AST]]:
    """All nodes below, each with the function that it is in; the parts of an f-string are not nodes of their own."""
    for child in ast.iter_child_nodes(node):
        inner = child if isinstance(child, ast.FunctionDef) else scope
        yield inner, child
        if not isinstance(child, ast.JoinedStr):
            yield from _scoped(child, inner)


def _said(node: ast.AST, scope: ast.FunctionDef | None) -> tuple[list[ast.expr], str]:
    """The expressions of a node that are messages, and what makes errors of them."""
    if isinstance(node, ast.Call):
        maker = _last_name(node.func)
        if maker.endswith(("Error", "Exit")) or maker in _MAKERS:
            return [*node.args, *(keyword.value for keyword in node.keywords)], maker
        if maker in _WARNERS:
            return node.args[:1], maker
    elif isinstance(node, ast.Return) and node.value is not None and scope is not None:
        # Why something cannot be had, or None.
        if scope.name in _TELLERS or (scope.returns is not None and ast.unparse(scope.returns) == "str | None"):
            return [node.value], scope.name
    elif isinstance(node, ast.Constant | ast.JoinedStr):  # what is printed
        first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
        text = first.value if isinstance(first, ast.Constant) else None
        if isinstance(text, str) and text.startswith(("odc: ", "odc run: ")):
            return [node], "printed"
    return [], ""


def _assigned(nodes: Iterable[ast.AST]) -> dict[str, list[ast.expr]]:
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                found.setdefault(target.id, []).append(node.value)
    return found


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _letters(text: str) -> int:
    return len(re.sub(r"\.\.\.|\s", "", text))


def _read(rooms: Iterable[str]) -> list[Message]:
    # rglob does not follow the links to the rooms inside odc/: it finds each module once.
    names = [path.relative_to(ROOT).as_posix() for room in rooms for path in sorted((ROOT / room).rglob("*.py"))]
    return [
        message
        for name in names
        if not name.startswith(_REPORTS)
        for message in _Module((ROOT / name).read_text(), name).messages()
    ]


def _rows() -> list[str]:
    """The texts in the first column, without the types of errors, which end the page."""
    cells = re.findall(r"^\| (`.+?`) \| ", PAGE.read_text().partition(_TYPES)[0], re.MULTILINE)
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def _pattern(row: str) -> re.Pattern[str]:
    """As docs/_static/paste.js looks for it: the words between the dots, in their order."""
    return re.compile(".*?".join(re.escape(part) for part in re.split(r"\s*\.\.\.\s*", row) if part))


def _unexplained(messages: Iterable[Message]) -> list[Message]:
    """Those that neither have a row nor say what to do."""
    patterns = [_SAYS_WHAT_TO_DO, *map(_pattern, _rows())]
    return [message for message in messages if not any(pattern.search(message.text) for pattern in patterns)]


@pytest.fixture(scope="module")
def messages() -> list[Message]:
    found = _read(_ROOMS)
    assert len(found) > 800
    return found


def test_every_message_says_what_to_do_or_has_a_row(messages: list[Message]) -> None:
    missing = sorted({f"{where}: {text}" for where, text in _unexplained(messages)})
    assert not missing, "\n".join(["say what to do in these, or write a row of docs/troubleshooting.md:", *missing])


def test_every_row_has_a_message(messages: list[Message]) -> None:
    text = "\n".join(message.text for message in messages)
    assert [row for row in _rows() if not _pattern(row).search(text)] == []


def test_rows_have_words_enough_and_are_there_once() -> None:
    rows = _rows()
    assert len(rows) == len(set(rows))
    assert [row for row in rows if _letters(row) < _LEAST_LETTERS] == []


def test_each_type_of_error_has_the_first_paragraph_of_its_docstring() -> None:
    assert dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE.read_text().partition(_TYPES)[2], re.MULTILINE)) == {
        name: " ".join(str(kind.__doc__).partition("\n\n")[0].split())
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.OdcError)
    }


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError(f"the moon is now {size} too large")',
        'def f() -> None:\n    text = "the moon is now " + phase\n    raise SetupError(text)',
        'def f() -> str:\n    return f"the moon is now {phase}"\ndef g() -> None:\n    raise OdcError(f())',
        'warnings.warn("the moon is large", stacklevel=2)',
        'logger.warning("the moon is now %s", size)',
        'def f() -> str | None:\n    return "the moon is large"',
        'print(f"odc: the moon is now {size}")',
    ],
)
def test_a_new_message_is_found_and_unexplained(source: str) -> None:
    found = list(_Module(source, "odc/new.py").messages())
    assert [message for message in _unexplained(found) if "the moon is" in message.text]


@pytest.mark.parametrize(
    "remedy", [": use a smaller one", ": expected at most 4", ". Raise max_moons, or leave it out"]
)
def test_a_new_message_that_says_what_to_do_needs_no_row(remedy: str) -> None:
    assert not _unexplained(_Module(f'raise ValueError("the moon is too large{remedy}")', "odc/new.py").messages())
