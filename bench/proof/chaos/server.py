"""A process that has imported torch and made nothing with it yet, and forks the ranks of one trial after the other.

A rank goes on as a script that Python has just started would: its errors end the interpreter, with all that belongs to
that. (A child of :mod:`multiprocessing` leaves by ``os._exit``, which hides what a process waits for when it ends.)
Trials come as lines of JSON on standard input; what happens is reported as lines of JSON on standard output.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import torch._dynamo  # fully_shard and optimizers import it when first used, most of a short rank's time
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401  # as above

from odc.bench.harness.ranks import die_with_parent
from odc.bench.proof.chaos.script import keep_store, train
from odc.bench.proof.chaos.trials import Trial

KILL = "kill"
_BETWEEN_LOOKS_S = 0.01
_PR_SET_CHILD_SUBREAPER = 36


def serve() -> tuple[Trial, int, Path] | None:
    """Run trials until standard input ends; in each rank's process, what that is to do."""
    # What a rank leaves behind becomes our child, wherever it went.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    gc.collect()
    gc.freeze()  # or the end of each rank's interpreter copies all of it
    _report(ready=True)
    while line := sys.stdin.readline():
        if line.strip() == KILL:
            continue  # it came too late, all ranks had ended
        order = json.loads(line)
        trial, folder = Trial(**order["trial"]), Path(order["folder"])
        pids: dict[int, int] = {}
        for rank in range(trial.world_size):
            pid = os.fork()
            if pid == 0:
                _enter(rank, folder)
                return trial, rank, folder
            pids[pid] = rank
        store = [os.fork()] if trial.late else []
        if store == [0]:
            keep_store(folder)
        _report(pids=[*pids, *store])
        _reap(pids)
        for pid in store:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        _report(left=_children())
    return None


def _enter(rank: int, folder: Path) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where all this runs in the background
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")


def _reap(pids: dict[int, int]) -> None:
    """Report each rank's end; kill them when told to."""
    while pids:
        ready, _, _ = select.select([sys.stdin], [], [], _BETWEEN_LOOKS_S)
        if ready:
            line = sys.stdin.readline()
            for pid in pids if not line or line.strip() == KILL else ():
                os.kill(pid, signal.SIGKILL)
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                _report(rank=pids.pop(pid), code=os.waitstatus_to_exitcode(status), at=time.monotonic())


def _children() -> list[str]:
    """What the ranks have left running: our only children now. They are killed."""
    left = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        left.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    return left


def _report(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def order(trial: Trial, folder: Path) -> str:
    """The line that starts a trial."""
    return json.dumps({"trial": asdict(trial), "folder": str(folder)}) + "\n"


if __name__ == "__main__":
    die_with_parent()
    work = serve()
    if work is not None:
        train(*work)
