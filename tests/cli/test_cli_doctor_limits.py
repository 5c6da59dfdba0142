"""Layer 1: no ranks. What ``odc doctor`` says of a machine's limits and of what shared memory is made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from doctor_rows import ERROR, NOT_NEEDED, OK, WARNING, says

from odc import limits
from odc.cli.doctor import machine
from odc.cli.doctor.finding import Finding, Status
from odc.cli.doctor.machine import UNLIMITED, Limit
from odc.transports import _control
from odc.transports._control import ControlBlock, SleepWord

# Limits


def test_memory_and_shm() -> None:
    says(machine.memory(16 << 30), OK, "16.0 GiB")
    says(machine.memory(500 << 20), WARNING, "500 MiB", "docker run --memory")
    says(machine.memory(None), WARNING, "unknown", "/proc")
    says(machine.shm_folder(8 << 30), OK, "8.0 GiB")
    says(machine.shm_folder(64 << 20), WARNING, "64 MiB", "--shm-size=8g")
    says(machine.shm_folder(None), WARNING, "no /dev/shm", "--shm-size=8g")


@pytest.mark.parametrize(
    ("soft", "hard", "status", "found", "advice"),
    [
        (UNLIMITED, UNLIMITED, OK, "unlimited", ""),
        (1024, 1048576, OK, "soft limit 1,024, hard limit 1,048,576: enough for 196 ranks", ""),
        (256, 4096, WARNING, "enough for 42 ranks", "ulimit -n 4096; for more: docker run --ulimit nofile=65536"),
        (256, UNLIMITED, WARNING, "hard limit unlimited", "ulimit -n 65536"),
        (256, 256, WARNING, "enough for 42 ranks", "The hard limit has to be raised, by root: docker run --ulimit"),
        (50, 1024, ERROR, "enough for 1 ranks", "ulimit -n 1024"),
        (20, 1024, ERROR, "enough for 0 ranks", "ulimit -n 1024"),
    ],
)
def test_descriptors(soft: int, hard: int, status: Status, found: str, advice: str) -> None:
    says(machine.descriptors(Limit(soft, hard), used=10, per_rank=5, spare=32), status, found, advice)


def test_memory_limits() -> None:
    unlimited, small = Limit(UNLIMITED, UNLIMITED), Limit(8 << 20, 8 << 20)
    says(machine.locked_memory(unlimited, has_rdma=True), OK, "unlimited")
    says(machine.locked_memory(small, has_rdma=False), NOT_NEEDED, "8 MiB")
    says(machine.locked_memory(small, has_rdma=True), WARNING, "8 MiB", "ulimit -l unlimited, or docker run")
    says(machine.address_space(unlimited), OK, "unlimited")
    says(machine.address_space(small), WARNING, "8 MiB", "ulimit -v unlimited")


@pytest.mark.parametrize(
    ("affinity", "quota", "local_ranks", "status", "found", "advice"),
    [
        (8, None, None, OK, "8 usable: 8 CPU ranks", ""),
        (8, 2.5, None, OK, "2.5 usable: 2 CPU ranks", ""),
        (2, 64.0, "2", OK, "2 usable", ""),
        (4, None, "8", WARNING, "LOCAL_WORLD_SIZE=8", "--nproc-per-node 4"),
        (8, 0.5, None, WARNING, "0.5 usable: 1 CPU rank ", "docker run --cpus=2"),
        (1, None, None, WARNING, "1 usable: 1 CPU rank ", "docker run --cpus=2"),
    ],
)
def test_cores(affinity: int, quota: float | None, local_ranks: str | None, status, found: str, advice: str) -> None:
    says(machine.cores(affinity, quota, local_ranks), status, found, advice)


def test_cpu_quota_of_either_version_of_control_groups(tmp_path: Path) -> None:
    maximum, quota, period = (tmp_path / name for name in ("max", "quota", "period"))
    assert machine.cpu_quota(maximum, quota, period) is None
    quota.write_text("-1\n")
    period.write_text("100000\n")
    assert machine.cpu_quota(maximum, quota, period) is None
    quota.write_text("150000\n")
    assert machine.cpu_quota(maximum, quota, period) == 1.5
    maximum.write_text("max 100000\n")
    assert machine.cpu_quota(maximum, quota, period) is None
    maximum.write_text("400000 100000\n")
    assert machine.cpu_quota(maximum, quota, period) == 4


def test_ptrace(tmp_path: Path) -> None:
    path = tmp_path / "scope"
    assert machine.ptrace_scope(path) is None
    path.write_text("1\n")
    assert machine.ptrace_scope(path) == "1"
    says(machine.ptrace("1"), NOT_NEEDED, "ptrace_scope=1", "--cap-add SYS_PTRACE")
    assert machine.ptrace("0") == machine.ptrace(None) == Finding(NOT_NEEDED, "unrestricted")


# What the shared-memory transport is made of


@pytest.mark.parametrize(
    "check",
    [
        machine.shared_memory,
        machine.descriptor_passing,
        machine.process_watching,
        machine.signals,
        machine.locks,
    ],
)
def test_primitives_work_and_leave_nothing(check: Callable[[], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DOCTOR_SLEEP_S", 60.0)  # a thread may be slow to wake
    assert check().status is OK  # whatever the first use opens for good
    before = set(os.listdir("/proc/self/fd"))
    assert check().status is OK
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("call", "check", "advice"),
    [
        ("os.memfd_create", machine.shared_memory, "seccomp"),
        ("fcntl.fcntl", machine.shared_memory, "F_ADD_SEALS"),
        ("os.eventfd", machine.descriptor_passing, "eventfd"),
        ("socket.send_fds", machine.descriptor_passing, "SCM_RIGHTS"),
        ("os.pidfd_open", machine.process_watching, "Linux 5.3"),
    ],
)
def test_a_sandbox_that_refuses_a_call(
    call: str, check: Callable[[], Finding], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(call, refuse)
    before = set(os.listdir("/proc/self/fd"))
    says(check(), ERROR, "Operation not permitted", advice)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("memfd_create", machine.shared_memory),
        ("eventfd", machine.descriptor_passing),
        ("pidfd_open", machine.process_watching),
    ],
)
def test_a_system_without_a_call(name: str, check: Callable[[], Finding], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, name)
    says(check(), ERROR, f"no attribute '{name}'", "It needs")


def test_a_bell_that_does_not_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "eventfd_write", lambda *_: None)
    says(machine.descriptor_passing(), ERROR, "does not work", "eventfd")


def test_a_pidfd_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.liveness.process.WatchedProcess.is_dead", lambda _: True)
    says(machine.process_watching(), ERROR, "this process is dead", "sandbox")


def test_signals_that_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlBlock, "count", lambda *_: 0)
    says(machine.signals(), ERROR, "posted once, counted 0", "sandbox")


def test_futexes_that_wake_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SleepWord, "advance", lambda _: None)
    monkeypatch.setattr(limits, "DOCTOR_SLEEP_S", 0.2)
    says(machine.signals(), ERROR, "does not wake", "FUTEX_WAKE_OP")


def test_an_architecture_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_control.platform, "machine", lambda: "pdp11")
    says(machine.signals(), ERROR, "not known for pdp11", "glibc")


def test_locks_that_do_not_exclude(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlBlock, "try_lock", lambda *_: True)
    says(machine.locks(), ERROR, "should be had at first and at last", "glibc")


def test_locks_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: ControlBlock) -> None:
        raise OSError("sem_init failed")

    monkeypatch.setattr(ControlBlock, "initialise", refuse)
    says(machine.locks(), ERROR, "sem_init failed", "glibc")
