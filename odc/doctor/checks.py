"""All checks in the order in which they are shown, and how they are run."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from odc._version import __version__
from odc.doctor import cuda, limits, nvshmem, primitives, rdma, software, transports
from odc.doctor.facts import Facts
from odc.doctor.finding import Finding, Row, Status, error, warning


@dataclass(frozen=True)
class Check:
    """One row. ``required``: CPU training does not work without."""

    name: str
    run: Callable[[Facts], Finding]
    required: bool = False


@dataclass(frozen=True)
class Report:
    """What all checks found."""

    rows: tuple[Row, ...]

    def named(self, status: Status) -> list[str]:
        """The checks with this status."""
        return [row.check for row in self.rows if row.finding.status is status]

    @property
    def ok(self) -> bool:
        """Whether CPU training works here."""
        return not self.named(Status.ERROR)

    def to_json(self) -> dict[str, object]:
        """``odc`` (its version), ``ok``, and ``rows`` of check, status, found and advice."""
        return {"odc": __version__, "ok": self.ok, "rows": [row.to_json() for row in self.rows]}


def examine(checks: Iterable[Check] | None = None, facts: Facts | None = None) -> Report:
    """Run the checks (default: all). Never raises: a check that fails becomes a row with its error."""
    facts = Facts() if facts is None else facts
    checks = CHECKS if checks is None else checks
    return Report(tuple(Row(check.name, _guarded(check, facts)) for check in checks))


def _guarded(check: Check, facts: Facts) -> Finding:
    try:
        return check.run(facts)
    except Exception as problem:  # whatever it is: the other rows are wanted all the same
        found = f"could not be checked: {type(problem).__name__}: {problem}"
        advice = "See the rows above; if they are fine, please report this."
        return error(found, advice) if check.required else warning(found, advice)


def _python(_: Facts) -> Finding:
    return software.python(sys.version_info[:3], sys.executable)


def _system(_: Facts) -> Finding:
    return software.system(platform.system(), platform.release(), platform.machine())


def _nvshmem_library(facts: Facts) -> Finding:
    host = nvshmem.describe_file(nvshmem.find_host(facts.variables, nvshmem.wheel_folders()))
    wheels = {name: facts.versions[name] for name in nvshmem.WHEELS if name in facts.versions}
    return nvshmem.library(host, wheels, has_gpu=facts.has_gpu, fix=software.fix(facts.cuda_major))


def _nvshmem_bitcode(facts: Facts) -> Finding:
    wheels = nvshmem.wheel_folders()
    host = nvshmem.describe_file(nvshmem.find_host(facts.variables, wheels))
    device = nvshmem.describe_file(nvshmem.find_bitcode(facts.variables, wheels))
    return nvshmem.bitcode(host, device, has_gpu=facts.has_gpu, fix=software.fix(facts.cuda_major))


def _cuda_ipc(facts: Facts) -> Finding:
    version, fix = software.cupy_version(facts.versions), software.fix(facts.cuda_major)
    return cuda.ipc(facts.cuda, version, facts.variables, platform.release(), fix)


def _memory(_: Facts) -> Finding:
    from odc.transports._memfd import available_bytes

    return limits.memory(available_bytes())


def _shm_folder(_: Facts) -> Finding:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return limits.shm_folder(None)
    return limits.shm_folder(status.f_blocks * status.f_frsize)


def _limit(name: str) -> limits.Limit:
    import resource  # not on every system

    return limits.Limit(*resource.getrlimit(getattr(resource, name)))


def _descriptors(_: Facts) -> Finding:
    from odc.transports._rendezvous import PER_PEER, SPARE

    return limits.descriptors(_limit("RLIMIT_NOFILE"), len(os.listdir("/proc/self/fd")), PER_PEER, SPARE)


def _cores(facts: Facts) -> Finding:
    return limits.cores(len(os.sched_getaffinity(0)), limits.cpu_quota(), limits.local_ranks(facts.variables))


def _trainer(name: str) -> Check:
    return Check(name, lambda facts: software.trainer(name, facts.versions))


CHECKS = (
    Check("Python", _python, required=True),
    Check("system", _system, required=True),
    Check("torch", lambda facts: software.torch(facts.torch, has_gpu=facts.has_gpu), required=True),
    Check("ODC variables", lambda _: transports.variables(), required=True),
    Check("shared memory", lambda _: primitives.shared_memory(), required=True),
    Check("passing files", lambda _: primitives.descriptor_passing(), required=True),
    Check("watching ranks", lambda _: primitives.process_watching(), required=True),
    Check("signals", lambda _: primitives.signals(), required=True),
    Check("locks", lambda _: primitives.locks(), required=True),
    Check("memory", _memory),
    Check("/dev/shm", _shm_folder),
    Check("open files", _descriptors),
    Check("address space", lambda _: limits.address_space(_limit("RLIMIT_AS"))),
    Check("CPU cores", _cores),
    Check("ptrace", lambda _: limits.ptrace(limits.ptrace_scope())),
    Check("CPU transport", lambda _: transports.for_cpu(), required=True),
    Check("CUDA driver", lambda facts: cuda.driver(facts.cuda, facts.torch.cuda)),
    Check("CUDA devices", lambda facts: cuda.devices(facts.cuda, facts.variables)),
    Check("peer access", lambda facts: cuda.peer_access(facts.cuda)),
    Check("triton", lambda facts: software.triton(facts.versions, has_gpu=facts.has_gpu)),
    Check("cupy", lambda facts: software.cupy(facts.versions, facts.cuda_major, has_gpu=facts.has_gpu)),
    Check("CUDA IPC", _cuda_ipc),
    Check("nvshmem4py", lambda facts: software.nvshmem4py(facts.versions, facts.cuda_major, has_gpu=facts.has_gpu)),
    Check("NVSHMEM library", _nvshmem_library),
    Check("NVSHMEM bitcode", _nvshmem_bitcode),
    Check("RDMA", lambda facts: rdma.ports(facts.rdma)),
    Check("locked memory", lambda facts: limits.locked_memory(_limit("RLIMIT_MEMLOCK"), has_rdma=bool(facts.rdma))),
    Check("CUDA transport", lambda facts: transports.for_cuda(has_gpu=facts.has_gpu)),
    *map(_trainer, ("transformers", "accelerate", "trl")),
)
