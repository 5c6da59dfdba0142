"""What a case must show: the numbers of plain FSDP, to the rounding of a sum in another order.

And cases on ranks, which are measured there.
"""

from __future__ import annotations

import functools
import math
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

import odc
from odc.bench.harness.ranks import meet
from odc.bench.proof.groups import Message, Prepare, Suite, collect, run_jobs
from odc.bench.proof.parity import training
from odc.bench.proof.parity.cases import EQUAL_COUNTS, Case
from odc.bench.proof.parity.training import STEPS, Run, largest_terms, train
from odc.bench.proof.sharding import mesh_of
from odc.config import HOST_ID, SHARE, STAGING, TIMEOUT
from odc.fsdp_patch import fsdp2_in_place
from odc.timeline import Stats

TOLERANCES = {"fp32": 1e-6, "bf16": 2e-2}
"""Of the largest term of each sum, times the number of steps so far: a difference of rounding in the parameters is one
in all that follows. In bf16 the first step's gradients must agree as in fp32; later, a difference of rounding in a
parameter may be one of its last bit in bfloat16."""
REDUCED_TOLERANCE = 1e-2
"""Where plain FSDP reduces in bfloat16 and ODC sums in float32; of gradients, times the number of steps so far."""
OUTCOMES = ("equal", "refused", "different", "hang", "crash", "not plain")


@dataclass
class Outcome:
    """How a case ended."""

    number: int
    case: Case
    status: str
    """One of ``OUTCOMES``. "refused": by an error of ODC that says what cannot be done; "not plain": plain FSDP itself
    cannot run this script."""
    reason: str = ""
    errors: dict[str, float] | None = None
    """The largest error of losses, gradients, what the script has seen of gradients, and parameters."""
    seconds: float = 0.0


class PlainFails(Exception):
    """Plain FSDP cannot run the script."""


def measure(case: Case, mesh: DeviceMesh) -> tuple[dict[str, float], list[str]]:
    """Train twice; the largest errors on this rank, and what is wrong in words. Collective.

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
    """The largest; infinite where there is nothing to compare, or a value is not finite."""
    if found is None or found.shape != expected.shape:
        return math.inf
    differences = (found.double() - expected.double()).abs()
    return largest(differences.nan_to_num(nan=math.inf, posinf=math.inf))


def largest(tensor: torch.Tensor) -> float:
    """Absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _error(theirs: torch.Tensor | None, ours: torch.Tensor | None, size: float) -> float:
    off = math.inf if theirs is None else difference(ours, theirs)
    return off if theirs is None or off in (0.0, math.inf) else off / max(size, largest(theirs))


# Cases on ranks


CASE_LIMIT_S = 60.0  # a case takes a second or two
SILENCE_LIMIT_S = 8  # of one rank towards another, with ODC
_GROUP_LIMIT_S = 20  # of a collective of the script
_SMALL_NUMEL = 24  # of a slice: matrices are larger, biases and norms smaller, as real ones are to ODC's own limit
_LAST_WORDS_S = 10.0  # for the other ranks, once one has failed
_REFUSALS = (odc.UnsupportedError.__name__, odc.ProtocolError.__name__, odc.ConfigError.__name__)


def run_cases(
    cases: Mapping[int, Case],
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    prepare: Prepare | None = None,
    log: Path | None = None,
) -> list[Outcome]:
    """Measure cases, which have numbers, on CPU processes of this machine.

    Args:
        log: takes what the ranks write on standard error, which is nowhere otherwise.
    """

    def judge(number: int, case: Case, pipes: Sequence[Connection]) -> tuple[Outcome, bool]:
        started = time.monotonic()
        outcome = _judge(number, case, collect(pipes, CASE_LIMIT_S, _LAST_WORDS_S))
        outcome.seconds = round(time.monotonic() - started, 1)
        on_outcome(outcome)
        return outcome, outcome.status in ("equal", "different")  # else a rank has raised, or is late

    suite = Suite(functools.partial(_set_up, log), _measure, _tell)
    # Of new ranks soon: torch keeps the process groups of every mesh, with three threads of gloo each.
    outcomes = run_jobs(cases, lambda case: case.world_size, suite, judge, prepare, 30)
    return [outcomes[number] for number in sorted(outcomes)]


def _judge(number: int, case: Case, messages: Sequence[dict[str, Any] | None]) -> Outcome:
    failures = [(rank, m) for rank, m in enumerate(messages) if m is not None and "error" in m]
    told = [f"rank {rank}: {m['error']}: {m['text']}" for rank, m in failures]
    silent = [rank for rank, message in enumerate(messages) if message is None]
    reason = "; ".join([*told, *(f"rank {rank}: no word" for rank in silent)])
    refusals = [f"{m['error']}: {m['text']}" for _, m in failures if m["error"] in _REFUSALS]
    is_late = any(m["error"] == odc.PeerSilentError.__name__ or "imed out" in m["text"] for _, m in failures)
    ends = {
        "not plain": any(m.get("plain") for _, m in failures),
        "refused": bool(refusals),
        "hang": bool(silent and not failures) or is_late,
        "crash": bool(failures),
    }
    if status := next((status for status, is_so in ends.items() if is_so), ""):
        return Outcome(number, case, status, refusals[0] if status == "refused" else reason)
    complete = [message for message in messages if message is not None]
    errors = {what: max(m["errors"][what] for m in complete) for what in complete[0]["errors"]}
    wrong = [f"rank {rank}: {text}" for rank, m in enumerate(complete) for text in m["wrong"]]
    if wrong:
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        return Outcome(number, case, "different", "; ".join(wrong[:3]) + more, errors)
    return Outcome(number, case, "equal", "", errors)


def kind_of(reason: str) -> str:
    """A refusal without the names and numbers that differ from case to case, for counting."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "_", reason.split(". ")[0])[:160]


def _measure(case: Case, rank: int, meshes: Mapping[bool, DeviceMesh]) -> Message:
    os.environ[HOST_ID] = _host_of(case, rank)
    os.environ[STAGING] = "on" if case.staging == "staged" else "auto"
    os.environ[SHARE] = "auto" if case.transport == "shared" else "off"
    errors, wrong = measure(case, meshes[case.is_replicated])
    return {"errors": errors, "wrong": wrong}


def _tell(error: BaseException) -> Message:
    is_plain = isinstance(error, PlainFails)
    text = f"{error} ({_place(error.__cause__ if is_plain else error)})"
    return {"error": type(error).__name__, "text": text, "plain": is_plain}


def _place(error: BaseException | None) -> str:
    """Where in the script it was raised, and where in ODC."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    inside = [frame for frame in frames if "/torch/" not in frame.filename and "contextlib" not in frame.filename]
    script = [frame.line for frame in inside if frame.filename == training.__file__]
    return (
        f"in {script[-1] if script else '?'} -> {Path(inside[-1].filename).name}:{inside[-1].name}" if inside else "?"
    )


def _host_of(case: Case, rank: int) -> str:
    """Which host a rank poses as being on: over tcp no shard group is on one host, and where it has four ranks, on two
    of two."""
    if case.transport == "shm":
        return f"host-{rank // 2}" if case.is_replicated else "host-0"
    if case.transport != "shared" and (case.is_replicated or case.reshard == "int"):
        return f"host-{rank % 2}"
    return f"host-{rank // 2}" if case.ranks == "4" else f"host-{rank}"


def _set_up(log: Path | None, rank: int, world_size: int, store: str) -> dict[bool, DeviceMesh]:
    """The meshes without and with replicas."""
    descriptor = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    warnings.simplefilter("ignore")  # FSDP1 has much to say about its own future
    torch.set_num_threads(1)
    os.environ[TIMEOUT] = str(SILENCE_LIMIT_S)
    fsdp2_in_place.SMALL_NUMEL = _SMALL_NUMEL
    meet(rank, world_size, store, "gloo", _GROUP_LIMIT_S)
    kinds = (False, True) if world_size == 4 else (False,)
    return {is_replicated: mesh_of(world_size, is_replicated=is_replicated) for is_replicated in kinds}
