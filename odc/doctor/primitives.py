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

    from odc.transports._control import ControlBlock

_BYTES = 4096
_SLEEP_S = 10.0  # it takes no time, but a machine may be busy
_SANDBOX = "Allow it in the sandbox: docker run --security-opt seccomp=unconfined; gVisor may not have it at all."


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


def locks() -> Finding:
    """A lock in shared memory: taken, refused to another one, given back."""
    with _control_block() as (block, problem):
        if block is None:
            return error(f"does not work: {problem}", "Use glibc 2.28 or newer, or musl, on 64-bit Linux.")
        taken = [block.try_lock(0, 0), block.try_lock(0, 1), block.lock(0, 1, 0.01)]
        block.unlock(0)
        taken.append(block.try_lock(0, 1))
    if taken != [True, False, False, True]:
        return error(f"it should be had at first and at last, but: {taken}", "Use glibc 2.28 or newer, or musl.")
    return ok("POSIX semaphore as a lock: taken, refused, given back")


def signals() -> Finding:
    """A signal in shared memory: posted, counted, and a sleeper woken by it."""
    with _control_block() as (block, problem):
        if block is None:
            return error(f"does not work: {problem}", "Use glibc 2.28 or newer, or musl, on 64-bit Linux.")
        ticket = block.events.ticket
        sleeper = threading.Thread(target=block.events.sleep, args=(ticket, _SLEEP_S), name="odc-doctor")
        sleeper.start()
        block.post(0)
        sleeper.join(_SLEEP_S / 2)
        is_asleep, count = sleeper.is_alive(), block.count(0)
        sleeper.join()
    if is_asleep or block.events.ticket == ticket:
        return error("a futex does not wake who sleeps on it", f"It needs FUTEX_WAKE_OP. {_SANDBOX}")
    return ok("futex: woken by a signal") if count == 1 else error(f"posted once, counted {count}", _SANDBOX)


@contextlib.contextmanager
def _control_block() -> Iterator[tuple[ControlBlock | None, str]]:
    """A block with one signal and one lock; or None, and why there is none."""
    from odc.transports import _control

    with _page(_control.control_bytes(1, 1)) as memory:
        block, problem = _control.ControlBlock(memory, 1, 1), _control.problem() or ""
        try:
            block.initialise()
        except (AttributeError, OSError) as failure:
            problem = str(failure)
        yield (None if problem else block), problem
