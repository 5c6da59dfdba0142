"""Writes docs/loops.md: the training loops that the tests run over FSDP's collectives and under ODC.

Run ``.venv/bin/python docs/write_loops.py``. A test fails if the page differs from its output.
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

The tests run these {number} training loops twice on the same ranks: over FSDP's collectives, and with one more line,
`odc.patch_fsdp(model)`. They compare losses, gradients, norms and parameters on each rank: bit by bit if sums have one
order, otherwise within the tolerance shown. Look for a loop like yours. Names are those in the tests
([FSDP2](../tests/fsdp/test_fsdp2_scripts.py), [FSDP1](../tests/fsdp/test_fsdp1_scripts.py),
[changing weights](../tests/fsdp/test_changing_scripts.py)); [the code of the loops](../tests/rigs/fsdp_scripts).

Two differences from plain FSDP are intended:

- After `patch_fsdp` and after `zero_grad()`, `.grad` is not None. It stands for the gradient to come
  ([details](quickstart.md#what-grad-is)).
- After an evaluation, plain FSDP2 leaves the root's parameters gathered until the next backward. Clipping or clearing
  `model.parameters()` then misses the root's gradients. If the script steps before that backward, the next forward uses
  the root's old parameters. Under ODC an evaluation changes nothing
  ([test](../tests/fsdp/test_evaluation_alone.py)).

See also [108 combinations of options](conformance.md) and generated scripts (`odc bench parity`).
"""


def page() -> str:
    """The page as it should be."""
    elsewhere = {*fsdp1.PAIRS, *changing.FSDP1_CASES}
    of_gradients = {name: case for name, case in fsdp1.CASES.items() if name not in elsewhere}
    groups: list[tuple[str, Mapping[str, Case], Mapping[str, Case]]] = [
        ("Gradients: clipping, clearing, accumulating", fsdp2.LOOPS, of_gradients),
        ("Models, and when their units are gathered and pushed", fsdp2.MODELS | fsdp2.COMPILED, {}),
        ("Weights that change between steps", changing.CASES, changing.FSDP1_CASES),
        ("Replicas (HSDP): four ranks that act as two hosts", {**fsdp2.HYBRID, **fsdp2.FURTHER_HYBRID}, {}),
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
    yield "## All pairs of other choices\n"
    yield "One of these loops has each pair of values. `-m extended` runs all of them under FSDP1 and FSDP2.\n"
    yield from _table(list(pairs.FACTORS), [list(map(_word, loop.values())) for loop in pairs.covering(pairs.FACTORS)])


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


if __name__ == "__main__":
    PAGE.write_text(page())
