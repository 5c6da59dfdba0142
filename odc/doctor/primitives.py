"""What the shared-memory transport is made of, each tried once on a page of memory.

Trying is the only way to know: containers and sandboxes refuse system calls that the kernel has. Modules that need
torch are imported by the check that uses them, so that a broken torch is reported like everything else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from odc.doctor.finding import Finding, error, ok

if TYPE_CHECKING:
    import torch

_BYTES = 4096
_MUTEX_TIMEOUT_S = 10.0  # it takes no time, but a thread may be slow to end
_SANDBOX = "Allow it in the sandbox: docker run --security-opt seccomp=unconfined; gVisor may not have it at all."


@contextlib.contextmanager
def _page() -> Iterator[torch.Tensor]:
    """A page of sealed shared memory, as the transport makes it."""
    from odc.transports import _memfd

    fd = _memfd.create(_BYTES, "doctor")
    try:
        _memfd.check(fd, _BYTES)
        yield _memfd.map_bytes(fd, _BYTES)
    finally:
        os.close(fd)


def shared_memory() -> Finding:
    """memfd: created, reserved, sealed, mapped, written."""
    from odc.errors import SetupError

    try:
        with _page() as memory:
            memory.fill_(1)
    except (AttributeError, OSError, SetupError) as problem:
        return error(f"memfd does not work: {problem}", f"It needs memfd_create and F_ADD_SEALS. {_SANDBOX}")
    return ok("memfd: reserved, sealed, mapped, written")


def descriptor_passing() -> Finding:
    """Descriptors over Unix sockets, abstract addresses, eventfd."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(f"\0odc-doctor-{secrets.token_hex(8)}")
        _pass_an_eventfd()
    except (AttributeError, OSError, ValueError) as problem:
        return error(f"does not work: {problem}", f"It needs eventfd, abstract Unix sockets, SCM_RIGHTS. {_SANDBOX}")
    return ok("eventfd over a Unix socket: passed, rung")


def _pass_an_eventfd() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, contextlib.ExitStack() as opened:
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        opened.callback(os.close, bell)
        socket.send_fds(ours, [b"x"], [bell])
        (received,) = socket.recv_fds(theirs, 1, 1)[1]
        opened.callback(os.close, received)
        os.eventfd_write(received, 1)
        os.eventfd_read(bell)  # raises BlockingIOError if it did not ring


def process_watching() -> Finding:
    """A pidfd, which tells at once when a rank dies."""
    from odc.transports._process import WatchedProcess

    try:
        process = WatchedProcess(os.getpid())
    except (AttributeError, OSError) as problem:
        return error(f"pidfd_open does not work: {problem}", f"It needs Linux 5.3 or newer. {_SANDBOX}")
    try:
        if process.is_dead():
            return error("a pidfd says that this process is dead", _SANDBOX)
    finally:
        process.close()
    return ok("pidfd: opened, polled")


def semaphores() -> Finding:
    """A process-shared POSIX semaphore: posted, counted."""
    from odc.transports._semaphore import SignalCounter

    with _page() as memory:
        counter = SignalCounter(memory.data_ptr())
        try:
            counter.initialise()
            counter.post()
            count = counter.count()
        except (AttributeError, OSError) as problem:
            return error(f"does not work: {problem}", "Use glibc 2.28 or newer, or musl, on 64-bit Linux.")
    if count != 1:
        return error(f"posted once, counted {count}", "Use glibc 2.28 or newer, or musl, on 64-bit Linux.")
    return ok("POSIX semaphore: posted, counted")


def robust_mutexes() -> Finding:
    """A robust mutex: taken by a thread that ends with it, and handed on."""
    from odc.transports._robust_mutex import RobustMutex
    from odc.transports.base import LockOutcome

    with _page() as memory:
        mutex = RobustMutex(memory.data_ptr())
        try:
            mutex.initialise()
            holder = threading.Thread(target=mutex.acquire, args=(0.0,), name="odc-doctor")
            holder.start()
            holder.join()
            # The kernel hands the mutex on when the thread has really ended, a moment after Python says so.
            outcome = mutex.acquire(_MUTEX_TIMEOUT_S)
            if outcome is not LockOutcome.TIMED_OUT:
                mutex.release()
        except (AttributeError, OSError) as problem:
            return error(f"does not work: {problem}", "Use glibc 2.28 or newer, or musl, on 64-bit Linux.")
    if outcome is not LockOutcome.RECOVERED:
        found = f"a holder that died should have handed it on, but: {outcome.value}"
        return error(found, f"It needs set_robust_list. {_SANDBOX}")
    return ok("robust mutex: handed on when its holder ended")
