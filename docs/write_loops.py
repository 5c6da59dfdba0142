"""Writes docs/loops.md: the training loops that the tests run over FSDP's collectives and under ODC.

``.venv/bin/python docs/write_loops.py``; a test fails where the page is not what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).with_name("loops.md")

sys.path[:0] = [str(_ROOT / "tests" / folder) for folder in ("rigs", "fsdp")]

import test_fsdp1_scripts as fsdp1  # noqa: E402
import test_fsdp2_scripts as fsdp2  # noqa: E402
from fsdp_scripts import changing, pairs  # noqa: E402
from fsdp_scripts.run import Case  # noqa: E402

_HEAD = """\
# Loops

{number} training loops that the tests run twice on the same ranks: over FSDP's collectives, and with one line more,
`odc.patch_fsdp(model)`. Losses, gradients, norms and parameters are compared, each rank its own part: bit by bit where
sums have one order, else within the tolerance. Is a loop like yours among them? The names are those of the tests
([FSDP2](../tests/fsdp/test_fsdp2_scripts.py), [FSDP1](../tests/fsdp/test_fsdp1_scripts.py),
[weights that change](../tests/fsdp/test_changing_scripts.py)); [the loops themselves](../tests/rigs/fsdp_scripts).

Two things differ from plain FSDP on purpose:

- From patching on, and after `zero_grad()`, a `.grad` is not None but the coming gradient
  ([what that is](quickstart.md#what-grad-is)).
- Plain FSDP2 leaves the parameters of the root full behind an evaluation, until the next backward. What clips or clears
  `model.parameters()` then finds no gradients of the root; and if the script steps before that backward, the next
  forward computes with the root of before the step. Under ODC an evaluation changes nothing, as in one process
  ([test](../tests/fsdp/test_evaluation_alone.py)).

Beside them there are [108 combinations of options](conformance.md), and generated scripts (`odc bench parity`).
"""


def page() -> str:
    """The page as it should be."""
    elsewhere = {*fsdp1.PAIRS, *changing.FSDP1_CASES}
    of_gradients = {name: case for name, case in fsdp1.CASES.items() if name not in elsewhere}
    groups: list[tuple[str, Mapping[str, Case], Mapping[str, Case]]] = [
        ("What is done with gradients, and when", fsdp2.LOOPS, of_gradients),
        ("Models, and when their units are gathered and pushed", fsdp2.MODELS | fsdp2.COMPILED, {}),
        ("Weights that change between steps", changing.CASES, changing.FSDP1_CASES),
        ("Replicas (HSDP), four ranks that pose as two hosts", {**fsdp2.HYBRID, **fsdp2.FURTHER_HYBRID}, {}),
    ]
    number = sum(len(ours) + len(theirs) for _, ours, theirs in groups) + len(fsdp1.PAIRS)
    parts = [_HEAD.format(number=number)]
    for title, ours, theirs in groups:
        parts += [f"## {title}\n", *_rows(ours, theirs)]
    return "\n".join([*parts, *_pairs()]) + "\n"


def _rows(ours: Mapping[str, Case], theirs: Mapping[str, Case]) -> Iterator[str]:
    """A table of some loops by FSDP."""
    names = sorted({**ours, **theirs}, key=str.lower)
    columns = [("FSDP2", ours), ("FSDP1", theirs)][: 1 + bool(theirs)]
    yield from _table(
        ["loop", *(name for name, _ in columns)],
        [[name, *(_equality(cases.get(name)) for _, cases in columns)] for name in names],
    )


def _equality(case: Case | None) -> str:
    if case is None:
        return ""
    return f"within {case.tolerance:g}" if case.tolerance else "bit-equal"


def _pairs() -> Iterator[str]:
    yield "## Everything else a loop may do, in pairs\n"
    yield "Each pair of these values is in one of the loops. All of them run with `-m extended`, under both FSDPs.\n"
    yield from _table(list(pairs.FACTORS), [list(map(_word, loop.values())) for loop in pairs.covering(pairs.FACTORS)])


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
