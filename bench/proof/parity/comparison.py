"""What a case must show: the numbers of plain FSDP, except for the rounding of a sum in another order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from odc.bench.proof.parity.cases import EQUAL_COUNTS, Case
from odc.bench.proof.parity.training import STEPS, Run, largest_terms, train
from odc.config import STAGING
from odc.timeline import Stats

TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2}
"""Relative to the largest term of each sum, times the number of steps so far, because a difference of rounding in the
parameters goes on in all later steps. In bf16 the first step's gradients must agree as in fp32; later a difference of
rounding in a parameter may become one of its last bit in bfloat16."""
REDUCED_TOLERANCE = 1e-2
"""Where plain FSDP reduces in bfloat16 and ODC sums in float32; of gradients, times the number of steps so far."""


class PlainFails(Exception):
    """Plain FSDP cannot run the script."""


def measure(case: Case, mesh: DeviceMesh) -> tuple[dict[str, float], list[str]]:
    """Train twice; return the largest errors on this rank, and in words what is wrong. Collective.

    Raises:
        PlainFails: the run without ODC has raised.
    """
    try:
        expected = train(case, mesh, patch=False)
    except Exception as error:
        raise PlainFails(f"{type(error).__name__}: {error}") from error
    return compare(case, expected, train(case, mesh, patch=True), largest_terms(case))


def compare(case: Case, expected: Run, found: Run, terms: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The largest error of each quantity on this rank, and every one beyond the tolerance in words.

    Errors of gradients are relative to the larger of the largest term of any such sum (``terms``, by parameter), made
    smaller where the script does, and the largest element of what plain FSDP has. All others to the latter alone.

    Where plain FSDP has no gradient a script may see zeros, if that is the first that it uses in a minibatch: until one
    is used no rank can know whether another one brings it. Behind the step there must be none.
    """
    tables: dict[str, tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]] = {
        "gradients": (expected.gradients, found.gradients),  # first: what is wrong there is wrong in all that follows
        "losses": (expected.losses, found.losses),
        "seen": (expected.seen, found.seen),
        "parameters": (expected.parameters, found.parameters),
    }
    errors, wrong = {}, []
    for quantity, (theirs, ours) in tables.items():
        errors[quantity] = 0.0
        for key in [*theirs, *(key for key in ours if key not in theirs)]:
            if quantity == "seen" and case.gradients == "logged" and key not in theirs and not ours[key].any():
                continue  # see :func:`compare`
            size, step = 0.0, None
            if isinstance(key, tuple):
                step, name = key
                size = _largest_of(name.removeprefix("kept "), terms) * expected.clipped_to[step]
            error = _error(theirs.get(key), ours.get(key), size)
            errors[quantity] = max(errors[quantity], error)
            if not error <= _tolerance(case, quantity, step):
                wrong.append(f"{quantity} {key}: {_in_words(error, theirs.get(key), ours.get(key))}")
    wrong += [f"{found.description!r} without {word!r}" for word in _way(case) if word not in found.description]
    return errors, wrong + (_idle(found.stats) if case.counts in EQUAL_COUNTS and found.stats else [])


def _tolerance(case: Case, quantity: str, step: int | None) -> float:
    """For a value of this step; None: for one of the whole training."""
    if case.precision == "bf16-reduced":
        return REDUCED_TOLERANCE * (1 if step is None else 1 + step)
    is_first = quantity == "gradients" and step == 0
    if case.precision == "bf16" and not is_first:
        return TOLERANCES["bf16"]
    return TOLERANCES["fp32"] * (STEPS if step is None else 1 + step)


def _idle(stats: Stats) -> list[str]:
    """What ODC should have done on this rank, which has microbatches in every step, and did not."""
    if stats.gathers and stats.pushes and stats.minibatches == STEPS:
        return []
    return [f"{stats.gathers} gathers and {stats.pushes} pushes in {stats.minibatches} of {STEPS} minibatches"]


def _way(case: Case) -> list[str]:
    """What a session says of itself that communicates as this case wants it."""
    staging = {"in-place": "in place", "staged": f"staged ({STAGING}=on)", "none": ""}[case.staging]
    return ["shared by the 2 of each " if case.transport == "shared" else case.transport, staging]


def _in_words(error: float, theirs: torch.Tensor | None, ours: torch.Tensor | None) -> str:
    if theirs is None or ours is None:
        return f"there is one {'with ODC' if theirs is None else 'under plain FSDP'} only"
    return f"off by {error:.1e} (largest {largest(theirs):.2e}, with ODC {largest(ours):.2e})"


def _largest_of(name: str, terms: Mapping[str, float]) -> float:
    """The largest term of a parameter, or of all those in a flat one."""
    name = name.replace("_fsdp_wrapped_module.", "")
    if not name.endswith("_flat_param"):
        return terms[name]
    unit = name.removesuffix("_flat_param")
    return max(v for n, v in terms.items() if n.startswith(unit) and (unit or not n.startswith("blocks.")))


def difference(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    """The largest difference; infinite where there is nothing to compare, or a value is not finite."""
    if found is None or found.shape != expected.shape:
        return math.inf
    differences = (found.double() - expected.double()).abs()
    return largest(differences.nan_to_num(nan=math.inf, posinf=math.inf))


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value; 0 of an empty tensor."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _error(theirs: torch.Tensor | None, ours: torch.Tensor | None, size: float) -> float:
    off = math.inf if theirs is None else difference(ours, theirs)
    return off if theirs is None or off in (0.0, math.inf) else off / max(size, largest(theirs))
