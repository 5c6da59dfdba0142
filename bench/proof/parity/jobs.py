"""Cases on ranks of this machine: one process group for many cases, a new one after a case that broke its ranks."""

from __future__ import annotations

import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import odc
from odc.bench.harness.ranks import meet, rank_processes
from odc.bench.proof.parity import training
from odc.bench.proof.parity.cases import Case
from odc.bench.proof.parity.comparison import PlainFails, measure
from odc.bench.proof.sharding import mesh_of
from odc.config import HOST_ID, SHARE, STAGING, TIMEOUT
from odc.fsdp_patch import fsdp2_in_place

Prepare = Callable[[int], None]
"""Called with its rank in every rank before the first case. It is a function of a module. Tests break something
here."""
Message = dict[str, Any]
"""What a rank reports of a case: what it has measured, or "error" and "text"."""
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


CASE_LIMIT_S = 60.0  # a case takes a second or two
SILENCE_LIMIT_S = 8  # of one rank towards another, with ODC
_GROUP_LIMIT_S = 20  # of a collective of the script
_SMALL_NUMEL = 24  # of a slice: matrices are larger, biases and norms smaller, as real ones are to ODC's own limit
_CASES_OF_A_GROUP = 30  # torch keeps the process groups of every mesh, with three threads of gloo each
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
    outcomes: dict[int, Outcome] = {}
    for world_size in sorted({case.world_size for case in cases.values()}):
        left = [number for number, case in cases.items() if case.world_size == world_size]
        while left:
            some = [cases[number] for number in left[:_CASES_OF_A_GROUP]]
            with rank_processes(world_size, _main, (some, prepare, log)) as pipes:
                for case in some:
                    number = left.pop(0)
                    outcome = outcomes[number] = _await(number, case, pipes)
                    on_outcome(outcome)
                    if outcome.status not in ("equal", "different"):  # a rank has raised, or is late
                        for pipe in pipes:
                            pipe.close()
                        break
    return [outcomes[number] for number in sorted(outcomes)]


def _await(number: int, case: Case, pipes: Sequence[Connection]) -> Outcome:
    started = time.monotonic()
    outcome = _judge(number, case, collect(pipes, CASE_LIMIT_S, _LAST_WORDS_S))
    outcome.seconds = round(time.monotonic() - started, 1)
    return outcome


def collect(pipes: Sequence[Connection], limit_s: float, last_words_s: float) -> list[Message | None]:
    """The message of each rank. It is None if a rank says nothing in time, or soon after another rank has failed."""
    messages: list[Message | None] = [None] * len(pipes)
    left, deadline = list(pipes), time.monotonic() + limit_s
    while left and (ready := wait(left, max(deadline - time.monotonic(), 0.0))):
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                left.remove(pipe)
                message = messages[rank] = _receive(pipe)
                if "error" in message:
                    deadline = min(deadline, time.monotonic() + last_words_s)
    return messages


def _receive(pipe: Connection) -> Message:
    try:
        message: Message = pipe.recv()
    except EOFError:
        return {"error": "Died", "text": "its process ended without a word"}
    return message


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
    """A refusal without names and numbers, which differ from case to case, for counting."""
    return re.sub(r"'[^']*'|\d+(\.\d+)?", "_", reason.split(". ")[0])[:160]


def _main(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    cases: Sequence[Case],
    prepare: Prepare | None,
    log: Path | None,
) -> None:
    try:
        meshes = _set_up(log, rank, world_size, store)
        if prepare is not None:
            prepare(rank)
        for case in cases:
            os.environ[HOST_ID] = _host_of(case, rank)
            os.environ[STAGING] = "on" if case.staging == "staged" else "auto"
            os.environ[SHARE] = "auto" if case.transport == "shared" else "off"
            errors, wrong = measure(case, meshes[case.is_replicated])
            pipe.send({"errors": errors, "wrong": wrong})
    except BaseException as error:
        traceback.print_exc()
        pipe.send(_tell(error))
        os._exit(1)  # a failed rank does nothing collective on its way out
    dist.destroy_process_group()


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
