"""Judges the limits of a machine by their values, and tries each part of the shared-memory transport once, on a page of
memory.

Only trying tells: containers and sandboxes refuse system calls that the kernel has. A check imports the modules that
need torch itself, so that a broken torch is reported like everything else.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from odc import limits
from odc.cli.doctor.finding import Finding, error, not_needed, ok, warning
from odc.cli.doctor.nvshmem import DOCKER

if TYPE_CHECKING:
    import torch

    from odc.transports._control import ControlBlock


UNLIMITED = -1  # resource.RLIM_INFINITY on Linux
_ENOUGH_RANKS = 64  # on one host
_ENOUGH_DESCRIPTORS = 65536
_SMALL_MEMORY_BYTES = 2**30
_DOCKER_SHM_BYTES = 64 * 2**20
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
_CPU_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class Limit:
    """A soft and a hard limit, as ``getrlimit`` has them."""

    soft: int
    hard: int

    @property
    def unlimited(self) -> bool:
        return self.soft == UNLIMITED

    def describe(self) -> str:
        return f"soft limit {_number(self.soft)}, hard limit {_number(self.hard)}"


def _number(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:,}"


def size(num_bytes: int) -> str:
    """In GiB, or in MiB below one."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"


def memory(available: int | None) -> Finding:
    """What shared memory can be reserved from."""
    if available is None:
        return warning("unknown: neither /proc/meminfo nor a control group tells", "Mount /proc in this container.")
    found = f"{size(available)} available (the machine's, or what the container's limit leaves)"
    if available < _SMALL_MEMORY_BYTES:
        return warning(found, "Free memory, or raise the container's limit: docker run --memory=16g")
    return ok(found)


def shm_folder(total: int | None) -> Finding:
    """The size of /dev/shm, which ODC leaves alone and DataLoader workers fill."""
    if total is None:
        return warning("no /dev/shm", "ODC does not use it, DataLoader workers do: docker run --shm-size=8g")
    if total <= _DOCKER_SHM_BYTES:
        advice = "ODC does not use it, DataLoader workers do: docker run --shm-size=8g (or --ipc=host)"
        return warning(size(total), advice)
    return ok(f"{size(total)} (for DataLoader workers; ODC does not use it)")


def descriptors(limit: Limit, used: int, per_rank: int, spare: int) -> Finding:
    """How many ranks of one host the limit of open files allows; units cost no descriptors."""
    if limit.unlimited:
        return ok("unlimited")
    ranks = max(limit.soft - used - spare, 0) // per_rank
    found = f"{limit.describe()}: enough for {ranks:,} ranks on this host, with any number of units"
    if ranks >= _ENOUGH_RANKS:
        return ok(found)
    return (error if ranks < 2 else warning)(found, _raise_descriptors(limit))


def _raise_descriptors(limit: Limit) -> str:
    goal = _ENOUGH_DESCRIPTORS if limit.hard == UNLIMITED else min(limit.hard, _ENOUGH_DESCRIPTORS)
    docker = f"docker run --ulimit nofile={_ENOUGH_DESCRIPTORS}"
    if goal <= limit.soft:
        return f"The hard limit has to be raised, by root: {docker}, or LimitNOFILE= of the service"
    return f"ulimit -n {goal}" + ("" if goal == _ENOUGH_DESCRIPTORS else f"; for more: {docker}")


def locked_memory(limit: Limit, *, has_rdma: bool) -> Finding:
    """Only RDMA devices need memory that is locked by the process."""
    if limit.unlimited:
        return ok("unlimited")
    found = f"soft limit {size(limit.soft)}"
    if not has_rdma:
        return not_needed(f"{found}; no RDMA device")
    return warning(found, f"RDMA registers memory by locking it: ulimit -l unlimited, or {DOCKER}")


def address_space(limit: Limit) -> Finding:
    """Every rank maps the buffers of all ranks of its host."""
    if limit.unlimited:
        return ok("unlimited")
    advice = "Every rank maps the buffers of all ranks of its host: ulimit -v unlimited"
    return warning(f"soft limit {size(limit.soft)}", advice)


def cores(affinity: int, quota: float | None, local_ranks: str | None) -> Finding:
    """The cores that this process may use, and how many CPU ranks they carry.

    ``quota`` are the cores that a container may use on average, ``local_ranks`` is torchrun's LOCAL_WORLD_SIZE.
    """
    usable = affinity if quota is None else min(float(affinity), quota)
    ranks = max(int(usable), 1)
    found = f"{usable:g} usable: {ranks} CPU rank{'' if ranks == 1 else 's'} without sharing a core"
    if local_ranks is not None and local_ranks.isdigit() and int(local_ranks) > ranks:
        return warning(f"{found}; LOCAL_WORLD_SIZE={local_ranks}", f"Use torchrun --nproc-per-node {ranks}")
    if ranks < 2:
        return warning(found, "Two ranks would take turns on one core: docker run --cpus=2, or a larger machine.")
    return ok(found)


def cpu_quota(maximum: Path = _CPU_MAX, quota: Path = _CPU_QUOTA, period: Path = _CPU_PERIOD) -> float | None:
    """Cores that this process's control group may use on average (version 2, then 1); None: no limit."""
    parts = _words(maximum) or _words(quota) + _words(period)
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return None  # no control group, "max", or -1
    return int(parts[0]) / int(parts[1])


def ptrace(scope: str | None) -> Finding:
    """ODC passes descriptors over sockets and needs no ptrace; debuggers do."""
    if scope in (None, "0"):
        return not_needed("unrestricted")
    advice = "To look into a rank that hangs (py-spy, gdb): docker run --cap-add SYS_PTRACE, or sudo"
    return not_needed(f"restricted (kernel.yama.ptrace_scope={scope})", advice)


def ptrace_scope(path: Path = _PTRACE_SCOPE) -> str | None:
    """The kernel's setting, None where it has none."""
    return next(iter(_words(path)), None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


_BYTES = 4096
_SANDBOX = "Allow it in the sandbox: docker run --security-opt seccomp=unconfined; gVisor may not have it at all."
_OLD_LIBC = "Use glibc 2.28 or newer, or musl, on 64-bit Linux."


def _tried(what: str, advice: str) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
    """A check that tries something: if a call is refused, that is its finding."""

    def wrap(check: Callable[[], Finding]) -> Callable[[], Finding]:
        @functools.wraps(check)
        def run() -> Finding:
            from odc.errors import SetupError

            try:
                return check()
            except (AttributeError, OSError, ValueError, SetupError) as problem:
                return error(f"{what}: {problem}", advice)

        return run

    return wrap


@contextlib.contextmanager
def _page(num_bytes: int = _BYTES) -> Iterator[torch.Tensor]:
    """A piece of sealed shared memory, as the transport makes it."""
    from odc.transports import _memfd

    fd = _memfd.create(num_bytes, "doctor")
    try:
        _memfd.check(fd, num_bytes)
        yield _memfd.map_bytes(fd, num_bytes)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _control_block() -> Iterator[ControlBlock]:
    """A block with one signal and one lock."""
    from odc.transports import _control

    with _page(_control.control_bytes(1, 1)) as memory:
        block = _control.ControlBlock(memory, 1, 1)
        block.initialise()
        if (problem := _control.problem()) is not None:
            raise OSError(problem)
        yield block


@_tried("memfd does not work", f"It needs memfd_create and F_ADD_SEALS. {_SANDBOX}")
def shared_memory() -> Finding:
    """memfd: created, reserved, sealed, mapped, written."""
    with _page() as memory:
        memory.fill_(1)
    return ok("memfd: reserved, sealed, mapped, written")


@_tried("does not work", f"It needs eventfd, abstract Unix sockets, SCM_RIGHTS. {_SANDBOX}")
def descriptor_passing() -> Finding:
    """Descriptors over Unix sockets, abstract addresses, eventfd."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"\0odc-doctor-{secrets.token_hex(8)}")
        ours, theirs = map(opened.enter_context, socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        opened.callback(os.close, bell)
        socket.send_fds(ours, [b"x"], [bell])
        (received,) = socket.recv_fds(theirs, 1, 1)[1]
        opened.callback(os.close, received)
        os.eventfd_write(received, 1)
        os.eventfd_read(bell)  # raises BlockingIOError if it did not ring
    return ok("eventfd over a Unix socket: passed, rung")


@_tried("pidfd_open does not work", f"It needs Linux 5.3 or newer. {_SANDBOX}")
def process_watching() -> Finding:
    """A pidfd, which tells at once when a rank dies."""
    from odc.liveness.process import WatchedProcess

    with contextlib.closing(WatchedProcess(os.getpid())) as process:
        if process.is_dead():
            return error("a pidfd says that this process is dead", _SANDBOX)
    return ok("pidfd: opened, polled")


@_tried("does not work", _OLD_LIBC)
def locks() -> Finding:
    """A lock in shared memory: taken, refused to another one, given back."""
    with _control_block() as block:
        taken = [block.try_lock(0, 0), block.try_lock(0, 1), block.lock(0, 1, 0.01)]
        block.unlock(0)
        taken.append(block.try_lock(0, 1))
    if taken != [True, False, False, True]:
        return error(f"it should be had at first and at last, but: {taken}", "Use glibc 2.28 or newer, or musl.")
    return ok("POSIX semaphore as a lock: taken, refused, given back")


@_tried("does not work", _OLD_LIBC)
def signals() -> Finding:
    """A signal in shared memory: posted, counted, and a sleeper woken by it."""
    with _control_block() as block:
        ticket = block.events.ticket
        sleeper = threading.Thread(target=block.events.sleep, args=(ticket, limits.DOCTOR_SLEEP_S), name="odc-doctor")
        sleeper.start()
        block.post(0)
        sleeper.join(limits.DOCTOR_SLEEP_S / 2)
        is_asleep, count = sleeper.is_alive(), block.count(0)
        sleeper.join()
    if is_asleep or block.events.ticket == ticket:
        return error("a futex does not wake who sleeps on it", f"It needs FUTEX_WAKE_OP. {_SANDBOX}")
    return ok("futex: woken by a signal") if count == 1 else error(f"posted once, counted {count}", _SANDBOX)
