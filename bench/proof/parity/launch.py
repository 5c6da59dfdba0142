"""Cases on ranks: one process group for many cases, a new one after a case that broke it."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import odc
from odc.bench.harness.ranks import meet, rank_processes
from odc.bench.proof.parity import training
from odc.bench.proof.parity.cases import Case
from odc.bench.proof.parity.comparison import Outcome, PlainFails, measure
from odc.config import HOST_ID, SHARE, STAGING, TIMEOUT
from odc.fsdp_patch import fsdp2_in_place

CASE_LIMIT_S = 60.0  # a case takes a second or two
SILENCE_LIMIT_S = 8  # of one rank towards another, with ODC
_GROUP_LIMIT_S = 20  # of a collective of the script
_SMALL_NUMEL = 24  # of a slice: matrices are larger, biases and norms smaller, as real ones are to ODC's own limit
_LAST_WORDS_S = 10.0  # for the other ranks, once one has failed
_REFUSALS = (odc.UnsupportedError.__name__, odc.ProtocolError.__name__, odc.ConfigError.__name__)
Prepare = Callable[[int], None]
"""Called with its rank in every rank before the first case; a module-level function. Tests break something here."""


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
    outcomes = {}
    for world_size in sorted({case.world_size for case in cases.values()}):
        left = {number: case for number, case in cases.items() if case.world_size == world_size}
        while left:
            # Of new ranks soon: torch keeps the process groups of every mesh, with three threads of gloo each.
            for outcome in _run_on_one_group(world_size, dict(list(left.items())[:30]), prepare, log):
                outcomes[outcome.number] = outcome
                del left[outcome.number]
                on_outcome(outcome)
    return [outcomes[number] for number in sorted(outcomes)]


def _run_on_one_group(
    world_size: int, cases: Mapping[int, Case], prepare: Prepare | None, log: Path | None
) -> Iterator[Outcome]:
    """One outcome after the other, until the last one or one that broke the group."""
    with rank_processes(world_size, _main, (dict(cases), prepare, log)) as pipes:
        for number, case in list(cases.items()):
            started = time.monotonic()
            messages = _collect(pipes)
            outcome = _judge(number, case, messages)
            outcome.seconds = round(time.monotonic() - started, 1)
            yield outcome
            if outcome.status != "equal":
                for pipe in pipes:
                    pipe.close()
                return


def _collect(pipes: Sequence[Connection]) -> list[dict[str, Any] | None]:
    """What each rank has to say; None of one that says nothing in time, or soon after another one has failed."""
    messages: list[dict[str, Any] | None] = [None] * len(pipes)
    left, deadline = list(pipes), time.monotonic() + CASE_LIMIT_S
    while left and (ready := wait(left, max(deadline - time.monotonic(), 0.0))):
        for rank, pipe in enumerate(pipes):
            if pipe in ready:
                left.remove(pipe)
                message = messages[rank] = _receive(pipe)
                if "error" in message:
                    deadline = min(deadline, time.monotonic() + _LAST_WORDS_S)
    return messages


def _receive(pipe: Connection) -> dict[str, Any]:
    try:
        message: dict[str, Any] = json.loads(pipe.recv_bytes())
    except EOFError:
        return {"error": "Died", "text": "its process ended without a word"}
    return message


def _judge(number: int, case: Case, messages: Sequence[dict[str, Any] | None]) -> Outcome:
    failures = [(rank, m) for rank, m in enumerate(messages) if m is not None and "error" in m]
    told = [f"rank {rank}: {m['error']}: {m['text']}" for rank, m in failures]
    silent = [rank for rank, message in enumerate(messages) if message is None]
    reason = "; ".join([*told, *(f"rank {rank}: no word" for rank in silent)])
    if any(m.get("plain") for _, m in failures):
        return Outcome(number, case, "not plain", reason)
    for _, message in failures:
        if message["error"] in _REFUSALS:
            return Outcome(number, case, "refused", f"{message['error']}: {message['text']}")
    is_late = any(m["error"] == odc.PeerSilentError.__name__ or "imed out" in m["text"] for _, m in failures)
    if (silent and not failures) or is_late:
        return Outcome(number, case, "hang", reason)
    if failures:
        return Outcome(number, case, "crash", reason)
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


def _main(
    rank: int,
    world_size: int,
    store: str,
    pipe: Connection,
    cases: Mapping[int, Case],
    prepare: Prepare | None,
    log: Path | None,
) -> None:
    descriptor = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    try:
        meshes = _set_up(rank, world_size, store)
        if prepare is not None:
            prepare(rank)
        for case in cases.values():
            os.environ[HOST_ID] = _host_of(case, rank)
            os.environ[STAGING] = "on" if case.staging == "staged" else "auto"
            os.environ[SHARE] = "auto" if case.transport == "shared" else "off"
            errors, wrong = measure(case, meshes[case.is_replicated])
            pipe.send_bytes(json.dumps({"errors": errors, "wrong": wrong}).encode())
    except BaseException as error:
        traceback.print_exc()
        is_plain = isinstance(error, PlainFails)
        text = f"{error} ({_place(error.__cause__ if is_plain else error)})"
        message = {"error": type(error).__name__, "text": text, "plain": is_plain}
        pipe.send_bytes(json.dumps(message).encode())
        os._exit(1)  # a failed rank does nothing collective on its way out
    dist.destroy_process_group()


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


def _set_up(rank: int, world_size: int, store: str) -> dict[bool, DeviceMesh]:
    """The meshes without and with replicas."""
    warnings.simplefilter("ignore")  # FSDP1 has much to say about its own future
    torch.set_num_threads(1)
    os.environ[TIMEOUT] = str(SILENCE_LIMIT_S)
    fsdp2_in_place.SMALL_NUMEL = _SMALL_NUMEL
    meet(rank, world_size, store, "gloo", _GROUP_LIMIT_S)
    meshes = {False: init_device_mesh("cpu", (world_size,))}
    if world_size == 4:
        meshes[True] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return meshes
