"""ODC's threads; pauses in waits without a signal, and reminders about waits that take too long."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from odc import limits
from odc.errors import SetupError

_CGROUP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")
_MACHINE = Path("/proc/sys/kernel/threads-max")


class HelperThread(threading.Thread):
    """Works beside the training loop, and does not keep the interpreter alive. Whoever starts it joins it."""

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)

    def start(self) -> None:
        """
        Raises:
            SetupError: this process may have no further thread; with the limits that there are.
        """
        try:
            super().start()
        except RuntimeError as problem:
            if self.ident is not None:  # started before: a mistake of ours
                raise
            raise SetupError(
                f"{problem} ({self.name}): {_describe_limits()}. Raise the one that is reached, or run fewer ranks and "
                "DataLoader workers on this host."
            ) from None

    def end(self) -> None:
        """Join it, if it has been started and is not the caller itself; whoever asked it to end calls this."""
        if self.is_alive() and self is not threading.current_thread():
            self.join()


def in_helper() -> bool:
    """Whether this is such a thread: what it waits for, the training loop does not."""
    return isinstance(threading.current_thread(), HelperThread)


def _describe_limits() -> str:
    """What limits the number of threads of this process, for people."""
    processes, space = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NPROC, resource.RLIMIT_AS))
    found = [
        f"{threading.active_count()} threads of Python here",
        f"processes and threads of this user: {_amount(processes)} (ulimit -u)",
    ]
    group = cgroup_limit()
    if group is not None:
        found.append(f"of this container: {group[1]}, {group[0]} in use (pids.max; docker run --pids-limit=-1)")
    if _MACHINE.exists():
        found.append(f"of this machine: {_MACHINE.read_text().strip()} (kernel.threads-max)")
    found.append(f"address space, of which each takes a stack: {_amount(space)} (ulimit -v)")
    return "; ".join(found)


def _amount(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"limit {limit}"


def cgroup_limit() -> tuple[int, int] | None:
    """Tasks in this process's control group and their limit; None where there is none."""
    try:
        rows = [line.split(":", 2) for line in _CGROUP.read_text().splitlines()]
    except OSError:
        return None
    for _, controllers, path in rows:
        folders = [_CGROUPS / path.lstrip("/"), _CGROUPS]
        if controllers:
            folders = [_CGROUPS / "pids" / path.lstrip("/"), _CGROUPS / "pids"] if controllers == "pids" else []
        for folder in folders:
            try:
                current, most = (int((folder / name).read_text()) for name in ("pids.current", "pids.max"))
            except (OSError, ValueError):  # no such group, or "max"
                continue
            return current, most
    return None


class Reminder:
    """Says when to warn of a wait: after ten seconds, and each time it has doubled since."""

    def __init__(self) -> None:
        self.due_s = limits.FIRST_REMINDER_S

    def is_due(self, waited_s: float) -> bool:
        """Whether to warn now, ``waited_s`` seconds into the wait; if so, the next time is twice as far."""
        if waited_s <= self.due_s:
            return False
        self.due_s *= 2
        return True


def look_until(is_completed: Callable[[], bool], look: Callable[[float], None]) -> None:
    """Return when ``is_completed()``, looked at often at first and then every 2 ms.

    Args:
        is_completed: cheap; it may raise.
        look: called with the seconds waited so far after each look in vain; ends the wait by raising.
    """
    started, pause_s = time.monotonic(), limits.LOOK_PAUSES_S[0]
    while not is_completed():
        look(time.monotonic() - started)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, limits.LOOK_PAUSES_S[1])
