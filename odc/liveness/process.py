"""Watching another process of this host through a pidfd.

A pidfd becomes readable when its process ends, for any reason, even if forked children of the process (DataLoader
workers) keep its sockets open. It identifies the process itself, so a reused pid is not mistaken for it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from pathlib import Path

# PIDFD_GET_INFO of linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info); exit information exists since Linux 6.15.
_INFO_BYTES = 80
_PIDFD_GET_INFO = (3 << 30) | (_INFO_BYTES << 16) | (0xFF << 8) | 11
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60
_STAT_EXIT_CODE = 49  # field 52 of /proc/PID/stat, counted after the command name
_LOOKS, _BETWEEN_LOOKS_S = 5, 2e-3  # for a moment neither tells: it is being reaped

_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "D": "in uninterruptible I/O",
    "Z": "a zombie",
}


def killed_by(number: int) -> str:
    """For people: "killed by signal 9 (SIGKILL)"."""
    try:
        name = signal.Signals(number).name
    except ValueError:  # real-time signals have no name of their own
        name = "real-time"
    return f"killed by signal {number} ({name})"


class WatchedProcess:
    """Another process, held by pidfd. Raises ``ProcessLookupError`` if it is gone already."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._fd

    def is_dead(self) -> bool:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def cause_of_death(self) -> str:
        """How the process ended, as far as the kernel tells (Linux 6.15 or newer tells all)."""
        status = self._exit_status()
        if status is None:
            return "its process is gone"
        if os.WIFSIGNALED(status):
            return killed_by(os.WTERMSIG(status))
        return f"it exited with status {os.WEXITSTATUS(status)} without closing its session"

    def describe_alive(self) -> str:
        """What the scheduler says of a living process, for example "stopped by a signal"."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "running"
        return _STATES.get(state, "running")

    def _exit_status(self) -> int | None:
        """The wait status: from /proc while nobody has reaped the process, from its pidfd afterwards."""
        for _ in range(_LOOKS):
            for read in (self._status_of_zombie, self._status_of_pidfd):
                status = read()
                if status is not None:
                    return status
            time.sleep(_BETWEEN_LOOKS_S)
        return None

    def _status_of_zombie(self) -> int | None:
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return int(fields[_STAT_EXIT_CODE]) if fields[0] == "Z" else None

    def _status_of_pidfd(self) -> int | None:
        info = bytearray(_INFO_BYTES)
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(self._fd, _PIDFD_GET_INFO, info)
        except OSError:
            return None  # a kernel without exit information
        if not struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT:
            return None
        return int(struct.unpack_from("i", info, _EXIT_CODE_OFFSET)[0])

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
