"""Layer 1: no processes. Statements of each room against ``budget.json``. Docstrings and comments are free.

A room's number falls with it, and rises only by what another room of the same sum has given:
``python tests/project/test_budget.py`` writes the table anew, unless the product's sum or that of the tests would rise.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("budget.json")
Budget = dict[str, dict[str, int]]
"""Rooms and their statements, by sum: "product" or "tests"."""


def num_statements(source: str) -> int:
    """Without docstrings, also those of attributes."""
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in ast.walk(ast.parse(source)))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def room_of(path: Path) -> str:
    """The first folder; in ``odc`` and ``tests``, where rooms stand in one house, also the second."""
    folders = path.parent.parts
    return "/".join(folders[: 2 if folders[0] in ("odc", "tests") else 1])


def found(root: Path = ROOT) -> Budget:
    """What is there; a folder that stands elsewhere (``odc/balance``) counts there."""
    counts: dict[str, Counter[str]] = {"product": Counter(), "tests": Counter()}
    for path in (path.relative_to(root) for path in root.glob("[!.]*/**/*.py")):
        if path.parts[0] not in ("build", "runs"):
            kind = "tests" if path.parts[0] in ("tests", "mutants") else "product"
            counts[kind][room_of(path)] += num_statements((root / path).read_text())
    return {kind: dict(sorted(rooms.items())) for kind, rooms in counts.items()}


def differences(budget: Budget, now: Budget) -> list[str]:
    """A line for each room that has more or less than its number."""
    return [
        f"{room}: {now[kind].get(room, 0)} statements, its budget is {budget[kind].get(room, 0)}"
        for kind in budget
        for room in sorted({*budget[kind], *now[kind]})
        if now[kind].get(room, 0) != budget[kind].get(room, 0)
    ]


def risen(budget: Budget, now: Budget) -> list[str]:
    """A line for each sum that is higher than that of the budget."""
    sums = {kind: (sum(now[kind].values()), sum(budget[kind].values())) for kind in budget}
    return [f"{kind}: {after} statements, {before} before" for kind, (after, before) in sums.items() if after > before]


def test_each_room_has_what_its_budget_says() -> None:
    different = differences(json.loads(TABLE.read_text()), found())
    assert not different, "\n".join([*different, "`python tests/project/test_budget.py` writes it, if no sum rises"])


def test_a_statement_is_no_text_and_rooms_of_a_sum_make_up_for_each_other(tmp_path: Path) -> None:
    (tmp_path / "odc/wire").mkdir(parents=True)
    (tmp_path / "odc/wire/tcp.py").write_text(
        '"""Text."""\nx = 1  # why\n"""Of x."""\ndef f():\n    """Text."""\n    g()\n'
    )
    now = found(tmp_path)
    assert now == {"product": {"odc/wire": 3}, "tests": {}}
    moved: Budget = {"product": {"odc/wire": 1, "cli": 2}, "tests": {}}
    assert len(differences(moved, now)) == 2
    assert not risen(moved, now)
    assert risen({"product": {"odc/wire": 2}, "tests": {"tests/cli": 9}}, now) == ["product: 3 statements, 2 before"]


if __name__ == "__main__":
    higher = risen(json.loads(TABLE.read_text()), found()) if TABLE.exists() else []
    if higher:
        sys.exit("\n".join([*higher, "take out as many statements of another room in the same change"]))
    TABLE.write_text(json.dumps(found(), indent=1) + "\n")
