"""Launches of training scripts without the seconds of importing: ranks are forks of a process that has the libraries.

Each rank does what ``torchrun script.py`` or ``torchrun -m odc.run script.py`` makes a rank do, in a process of its own
that ends like any other interpreter, or sooner. The options of ``torchrun`` and ``odc run`` are not covered.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch.distributed as dist

from odc.bench.harness.ranks import die_with_parent, keep_from_collector

LIMIT_S = 300.0
_OTHERS_LIMIT_S = 30.0
"""How long ranks may go on when one has failed: as long as torchrun gives them."""
_POLL_S = 0.2
_BETWEEN_LOOKS_S = 0.01


class Forker:
    """A process that forks ranks. It takes jobs as lines of JSON and answers in lines of JSON. No rank outlives it.
    Close it.

    Args:
        module: what it runs, with ``words``.
        options: of :class:`subprocess.Popen`.
    """

    def __init__(self, module: str, *words: str, **options: Any) -> None:
        command = [sys.executable, "-m", module, *words]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._process: Any = subprocess.Popen(command, **pipes, **options)
        self._rest = b""

    def send(self, job: object) -> None:
        """Send a job as the next line."""
        with contextlib.suppress(BrokenPipeError):  # then there is no answer
            self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def answer(self, limit_s: float) -> Any:
        """The next answer, or None if there is none within the limit.

        Raises:
            RuntimeError: the process has ended; what it said is on standard error.
        """
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                return None
            piece = os.read(self._process.stdout.fileno(), 65536)
            if not piece:
                raise RuntimeError(f"the process that forks the ranks has ended with {self._process.wait()}")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the process; also in the middle of a job, whose ranks it takes along."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            pipe.close()


def answer(facts: object) -> None:
    """In the process that forks: send an answer to the process that has started it."""
    os.write(1, json.dumps(facts).encode() + b"\n")


KILL = "kill"
"""Sent in place of a job: all ranks of the last job are to be killed."""


def fork_ranks(world_size: int) -> tuple[int | None, dict[int, int]]:
    """Fork ranks. Returns in a rank's process its number; in the process that forks None, and the ranks by process
    id."""
    pids: dict[int, int] = {}
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            return rank, {}
        pids[pid] = rank
    return None, pids


def reap(pids: dict[int, int]) -> None:
    """In the process that forks: answer with the end of each rank, and kill the ranks when told to."""
    while pids:
        ready, _, _ = select.select([sys.stdin], [], [], _BETWEEN_LOOKS_S)
        if ready:
            line = sys.stdin.readline()
            for pid in pids if not line or json.loads(line) == KILL else ():
                os.kill(pid, signal.SIGKILL)
        for pid in list(pids):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                answer({"rank": pids.pop(pid), "code": os.waitstatus_to_exitcode(status), "at": time.monotonic()})


def redirect(log: Path) -> None:
    """Make standard input empty from now on, and have output go to ``log``."""
    for descriptor, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)


class WarmLauncher(Forker):
    """Runs scripts on ranks that are forks of a process with the libraries.

    Args:
        libraries: modules to import: packages of training libraries import little by themselves.
        environment: of the process that forks, and so of all ranks. They see no GPU.
    """

    def __init__(self, libraries: Sequence[str], environment: Mapping[str, str]) -> None:
        # `python -m` has the current folder on the path: in the repository's, rooms would have a second name.
        super().__init__(
            "odc.bench.harness.warm_launch", *libraries, cwd="/", env={**environment, "CUDA_VISIBLE_DEVICES": ""}
        )

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        with_odc: bool = False,
        ends_at_once: bool = False,
        world_size: int = 2,
        cwd: Path | None = None,
        limit_s: float = LIMIT_S,
        environment: Mapping[str, str] = MappingProxyType({}),
        on_wait: Callable[[], object] = lambda: None,
    ) -> list[int]:
        """Run a script on every rank of this machine. Returns the ranks' exit codes, -9 for a rank that had to be
        killed.

        Args:
            arguments: the script's path and its arguments; ``with_odc``, those of ``odc.run``.
            folder: each rank's output goes to :func:`output_of` it there.
            ends_at_once: once threads and exit handlers are through. An interpreter then takes apart all that has been
                imported, which takes half a second of a core with training libraries.
            cwd: where the script runs; by default in ``folder``.
            limit_s: how long the ranks may take together.
            environment: variables of the ranks, besides those of the process that has the libraries.
            on_wait: called a few times per second until they have ended.

        Raises:
            RuntimeError: the process that has the libraries has ended; what it said is on standard error.
        """
        store = dist.TCPStore(  # type: ignore[attr-defined]  # bound in C++, not in __all__
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        job = {
            "arguments": [*arguments],
            "folder": str(folder.resolve()),
            "cwd": str((cwd or folder).resolve()),
            "odc": with_odc,
            "at_once": ends_at_once,
            "ranks": world_size,
            "port": store.port,
            "environment": {**environment},
        }
        self.send(job)
        codes: dict[int, int] = {}
        deadline = time.monotonic() + limit_s
        while len(codes) < world_size:
            end = self.answer(_POLL_S)
            if end is None:
                on_wait()
            else:
                codes[end["rank"]] = end["code"]
                if end["code"]:
                    deadline = min(deadline, time.monotonic() + _OTHERS_LIMIT_S)
            if time.monotonic() > deadline:
                self.send(KILL)
                deadline = math.inf
        return [codes[rank] for rank in range(world_size)]


def output_of(folder: Path, rank: int) -> Path:
    """The file with what a rank of a run in ``folder`` printed."""
    return folder / f"rank{rank}.log"


def _serve() -> dict[str, Any] | None:
    """Start the ranks of each job that is asked for. Returns in each rank, with the job, and in the end with None."""
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        if job == KILL:
            continue  # it came too late, all ranks had ended
        rank, pids = fork_ranks(job["ranks"])
        if rank is not None:
            return {**job, "rank": rank}
        reap(pids)
    return None


def _enter(job: Mapping[str, Any]) -> None:
    """What torchrun gives a rank."""
    rank, size = str(job["rank"]), str(job["ranks"])
    os.environ.update(
        job["environment"],
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
    os.chdir(job["cwd"])
    redirect(output_of(Path(job["folder"]), job["rank"]))


def _main() -> None:
    die_with_parent()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    keep_from_collector()
    job = _serve()
    if job is None:
        return
    die_with_parent()  # a fork is not told by what its parent has asked for
    _enter(job)
    if job["at_once"]:
        _end_at_once(job)
    _run(job)


def _run(job: Mapping[str, Any]) -> None:
    from odc.launch.main import main
    from odc.launch.script import run_script

    if job["odc"]:
        main(job["arguments"])
    else:
        run_script(job["arguments"][0], job["arguments"][1:])


def _end_at_once(job: Mapping[str, Any]) -> NoReturn:
    """Run it, and end with its exit code and its last words; what an interpreter does behind these is left out."""
    code = 0
    try:
        _run(job)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            code = ended.code
        elif ended.code is not None:
            print(ended.code, file=sys.stderr)
            code = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
