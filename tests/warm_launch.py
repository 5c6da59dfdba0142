"""Launches of training scripts without the minutes of importing: ranks are forks of a process that has the libraries.

What ``torchrun`` and ``odc run`` do with their options is not part of it: each rank does what ``torchrun script.py`` or
``torchrun -m odc.run script.py`` has it do, in a process of its own that ends like any other interpreter.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "odc.launch.main", "accelerate", "datasets"),
    *("transformers.trainer", "transformers.models.llama.modeling_llama", "trl.trainer.sft_trainer"),
)
"""Modules: packages of training libraries import little by themselves."""
LIMIT_S = 300.0
_OTHERS_LIMIT_S = 30.0
"""How long ranks may go on when one has failed: as long as torchrun gives them."""


class WarmLauncher:
    """The process that has the libraries. :meth:`close` ends it."""

    def __init__(self, env: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, *LIBRARIES]
        self._process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[str], folder: Path, *, with_odc: bool, world_size: int = 2) -> tuple[int, str]:
        """Run a script in ``folder``; the first exit code that is not 0, and what the ranks printed, rank by rank."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        job = {"arguments": [*arguments], "folder": str(folder), "odc": with_odc, "ranks": world_size}
        self._process.stdin.write(json.dumps({**job, "port": store.port}) + "\n")
        self._process.stdin.flush()
        codes = json.loads(self._process.stdout.readline())
        texts = [_output(folder, rank).read_text() for rank in range(world_size)]
        return next((code for code in codes if code), 0), "".join(texts)

    def close(self) -> None:
        self._process.communicate(timeout=60)


def _output(folder: Path, rank: int) -> Path:
    return folder / f"output of rank {rank}.txt"


def _serve() -> dict[str, Any] | None:
    """Start the ranks of each job that is asked for. Returns in each rank, with the job, and in the end with None."""
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        children = []
        for rank in range(job["ranks"]):
            pid = os.fork()
            if not pid:
                return {**job, "rank": rank}
            children.append(pid)
        os.write(1, json.dumps(_exit_codes(children)).encode() + b"\n")
    return None


def _exit_codes(children: Sequence[int]) -> list[int]:
    """Of all children, in their order. When one has failed, or all are late, the others are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + LIMIT_S
    while len(codes) < len(children):
        for child in children:
            if child in codes:
                continue
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
                if codes[child]:
                    deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT_S)
        time.sleep(0.02)
    return [codes[child] for child in children]


def _enter(job: Mapping[str, Any]) -> None:
    """What torchrun gives a rank."""
    rank, size = str(job["rank"]), str(job["ranks"])
    os.environ.update(
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        GROUP_RANK="0",
        ROLE_RANK=rank,
        ROLE_WORLD_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job["port"]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT="0",
        TORCHELASTIC_MAX_RESTARTS="0",
        TORCHELASTIC_RUN_ID="warm",
    )
    os.chdir(job["folder"])
    descriptor = os.open(_output(Path(job["folder"]), job["rank"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _main() -> None:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    job = _serve()
    if job is None:
        return
    _enter(job)
    from odc.launch.main import main
    from odc.launch.script import run_script

    if job["odc"]:
        main(job["arguments"])
    else:
        run_script(job["arguments"][0], job["arguments"][1:])


if __name__ == "__main__":
    _main()
