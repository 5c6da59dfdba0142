"""Writes docs/loops.md: the training loops that the tests run over FSDP's collectives and under ODC.

Run ``.venv/bin/python docs/write_loops.py``. A test fails if the page differs from its output.
"""

from __future__ import annotations

import itertools
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
order, otherwise within the tolerance shown. For your own loop, see
[what your loop may do](quickstart.md#what-your-loop-may-do). Names are those in the tests
([FSDP2](../tests/fsdp/test_fsdp2_scripts.py), [FSDP1](../tests/fsdp/test_fsdp1_scripts.py),
[changing weights](../tests/fsdp/test_changing_scripts.py)); [the code of the loops](../tests/rigs/fsdp_scripts).
See also [108 combinations of options](conformance.md) and generated scripts (`odc bench parity`).

Two differences from plain FSDP are intended:

- `.grad` [is not None](quickstart.md#what-grad-is) after `patch_fsdp` and after `zero_grad()`.
- After an evaluation, plain FSDP2 leaves the root's parameters gathered until the next backward. Clipping or clearing
  `model.parameters()` then misses the root's gradients. If the script steps before that backward, the next forward uses
  the root's old parameters. Under ODC an evaluation changes nothing
  ([test](../tests/fsdp/test_evaluation_alone.py)).
"""

_PAIRS = """\
## All pairs of other choices

{number} generated loops contain every pair of these choices; `-m extended` runs them under FSDP1 and FSDP2:

- what first asks for gradients: clipping by norm or value, scaling by hand, reading by hand, or the step
- how gradients are cleared, and when
- who updates parameters: one optimizer, two, one for some parameters, a `GradScaler`, or the script
- whether ranks have no microbatch in turn, or never
- whether gradients are read after the step, a loss is all-reduced, all ranks evaluate before each step, views of
  gradients are kept, parameters are resharded after the forward

Left out: some loops that step by hand and also all-reduce or evaluate. They need
[`session.finish()` and `session.publish()`](quickstart.md#what-your-loop-may-do).
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
        parts += [f"## {title}\n", *_lists(ours, theirs)]
    return "\n".join([*parts, _PAIRS.format(number=len(pairs.covering(pairs.FACTORS)))])


def _lists(ours: Mapping[str, Case], theirs: Mapping[str, Case]) -> Iterator[str]:
    """The names of some loops, by what they equal under which FSDP."""
    groups: dict[str, list[str]] = {}
    for name in sorted({**ours, **theirs}, key=str.lower):
        run = {fsdp: cases[name].tolerance for fsdp, cases in (("FSDP2", ours), ("FSDP1", theirs)) if name in cases}
        (tolerance,) = set(run.values())  # of both, if both run it
        equality = f"within {tolerance:g}" if tolerance else "bit-equal"
        groups.setdefault(f"{' and '.join(run)}, {equality}", []).append(name)
    for group in sorted(groups, key=lambda group: -len(groups[group])):
        yield "\n".join([f"**{group}**\n", *(f"- {line}" for line in _variants(groups[group])), ""])


def _variants(names: Sequence[str]) -> Iterator[str]:
    """Names that begin with the same words up to a comma as one: "a; a, b; a, c" as "a (plain; b; c)"."""
    for base, group in itertools.groupby(names, key=lambda name: name.partition(", ")[0]):
        variants = "; ".join(name.partition(", ")[2] or "plain" for name in group)
        yield base if variants == "plain" else f"{base} ({variants})"


if __name__ == "__main__":
    PAGE.write_text(page())
