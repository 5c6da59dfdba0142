"""All tests, or any command of Python, and an end to whatever it has started: ``supervising.py sharing.py``.

Ctrl-C reaches the foreground group of processes of a terminal. Tests start ranks that ignore it, that wait in C code,
or that are in sessions of their own; and who interrupts tests, or kills them, wants all of that to be gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE_S = 3.0
"""How long an interrupted tree may take to end by itself; the promise is that all of it is gone within 5 s."""
_KILLED_S = 10.0  # what the kernel does not end within this time hangs in it
_POLL_S = 0.05
_SHARED_MEMORY = Path("/dev/shm")


def main(options: Sequence[str]) -> int:
    """Run Python with these options in a child process, and supervise it.

    SIGINT, SIGTERM and SIGHUP are for this process alone, as the child has a session of its own. The first of them
    becomes a SIGINT for all processes that descend from it, so that tests tear down what they have set up; 3 s later,
    at a second signal, or as soon as the child has ended, those that are left are killed. None can hide: who loses its
    parent becomes a child of this process.

    Returns:
        The child's exit code, or 128 and the number of the signal.
    """
    # An ignored signal stays one: nohup, and commands in the background of a shell.
    wanted = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*wanted, signal.SIGCHLD])
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if child == 0:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execv(sys.executable, [sys.executable, *options])
    return _supervise(child, wanted)


def _supervise(child: int, wanted: list[signal.Signals]) -> int:
    codes: dict[int, int] = {}
    received = 0
    while child not in codes and not received:
        received = signal.sigwait([*wanted, signal.SIGCHLD])
        received = 0 if received == signal.SIGCHLD else received
        _reap(codes)
    if received:
        _send(signal.SIGINT, _descendants())
    deadline = time.monotonic() + _GRACE_S
    while time.monotonic() < deadline and not (received and child in codes):
        if not _reap(codes):
            break
        if again := signal.sigtimedwait(wanted, _POLL_S):
            received = received or again.si_signo
            break
    if not received and (left := _descendants()):
        print(f"processes that outlived the tests, and are killed: {_names(left)}", file=sys.stderr)
    if left := _kill_all(codes):
        print(f"processes that do not end though they have been killed: {_names(left)}", file=sys.stderr)
    return 128 + received if received else codes[child]


def _kill_all(codes: dict[int, int]) -> set[int]:
    """What is left then."""
    killed: set[int] = set()
    deadline = time.monotonic() + _KILLED_S
    while _reap(codes) and time.monotonic() < deadline:  # again: while one look is taken, a process may start others
        found = _descendants()
        _send(signal.SIGKILL, found)
        killed |= found
        time.sleep(_POLL_S / 10)
    _remove_shared_memory(killed)
    return _descendants()


def _reap(codes: dict[int, int]) -> bool:
    """Take note of children that have ended; whether there are others, without which nothing descends from this one."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return False
    return True


def _descendants() -> set[int]:
    """All processes that descend from this one."""
    parents = {int(entry): _parent(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()}
    found: set[int] = set()
    new = {os.getpid()}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new}
        found |= new
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # it has ended since
        return None


def _send(number: signal.Signals, pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # ended since, or another user's: whatever is left is named
            continue


def _remove_shared_memory(pids: Iterable[int]) -> None:
    """Files that torch has named after these processes. Others have unlinked theirs, or keep them in a /dev/shm of
    their own (``own_shm.leave_dev_shm``)."""
    for pid in pids:
        for path in _SHARED_MEMORY.glob(f"torch_{pid}_*"):
            path.unlink(missing_ok=True)


def _names(pids: Iterable[int]) -> str:
    names = []
    for pid in sorted(pids):
        try:
            names.append(f"{pid} ({Path(f'/proc/{pid}/comm').read_text().strip()})")
        except OSError:
            names.append(str(pid))
    return ", ".join(names)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
