"""Layer 1: no ranks. What ``odc doctor`` says of a machine's limits and of what shared memory is made of."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from doctor_rows import ERROR, NOT_NEEDED, OK, WARNING, says

from odc import limits
from odc.cli.doctor import machine
from odc.cli.doctor.finding import Finding, Status
from odc.cli.doctor.machine import UNLIMITED, Limit

CONTROL = "odc.transports._control"

# Limits


ALL, SMALL = Limit(UNLIMITED, UNLIMITED), Limit(8 << 20, 8 << 20)


@pytest.mark.parametrize(
    ("check", "given", "status", "words"),
    [
        (machine.memory, {"available": 16 << 30}, OK, ["16.0 GiB"]),
        (machine.memory, {"available": 500 << 20}, WARNING, ["500 MiB", "docker run --memory"]),
        (machine.memory, {"available": None}, WARNING, ["unknown", "/proc"]),
        (machine.shm_folder, {"total": 8 << 30}, OK, ["8.0 GiB"]),
        (machine.shm_folder, {"total": 64 << 20}, WARNING, ["64 MiB", "--shm-size=8g"]),
        (machine.shm_folder, {"total": None}, WARNING, ["no /dev/shm", "--shm-size=8g"]),
        (machine.locked_memory, {"limit": ALL, "has_rdma": True}, OK, ["unlimited"]),
        (machine.locked_memory, {"limit": SMALL, "has_rdma": False}, NOT_NEEDED, ["8 MiB"]),
        (
            machine.locked_memory,
            {"limit": SMALL, "has_rdma": True},
            WARNING,
            ["8 MiB", "ulimit -l unlimited, or docker run"],
        ),
        (machine.address_space, {"limit": ALL}, OK, ["unlimited"]),
        (machine.address_space, {"limit": SMALL}, WARNING, ["8 MiB", "ulimit -v unlimited"]),
    ],
)
def test_memory_and_its_limits(
    check: Callable[..., Finding], given: dict[str, Any], status: Status, words: list[str]
) -> None:
    says(check(**given), status, *words)


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
        (f"{CONTROL}.ControlBlock.initialise", machine.locks, "glibc"),
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


@pytest.mark.parametrize(
    ("name", "replacement", "check", "found", "advice"),
    [
        ("os.eventfd_write", lambda *_: None, machine.descriptor_passing, "does not work", "eventfd"),
        (
            "odc.liveness.process.WatchedProcess.is_dead",
            lambda _: True,
            machine.process_watching,
            "this process is dead",
            "sandbox",
        ),
        (f"{CONTROL}.ControlBlock.count", lambda *_: 0, machine.signals, "posted once, counted 0", "sandbox"),
        (f"{CONTROL}.SleepWord.advance", lambda _: None, machine.signals, "does not wake", "FUTEX_WAKE_OP"),
        (f"{CONTROL}.platform.machine", lambda: "pdp11", machine.signals, "not known for pdp11", "glibc"),
        (
            f"{CONTROL}.ControlBlock.try_lock",
            lambda *_: True,
            machine.locks,
            "should be had at first and at last",
            "glibc",
        ),
    ],
)
def test_a_call_that_does_not_do_what_it_should(
    name: str,
    replacement: Callable[..., object],
    check: Callable[[], Finding],
    found: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(name, replacement)
    monkeypatch.setattr(limits, "DOCTOR_SLEEP_S", 0.2)
    says(check(), ERROR, found, advice)
