"""All checks in the order in which ``odc doctor`` shows them, and how they are run. Two of them ask the registry which
transport a runtime would choose here.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from odc._version import __version__
from odc.cli.doctor import cuda, machine, nvshmem, software
from odc.cli.doctor.finding import Finding, Row, Status, error, missing, not_needed, ok, warning
from odc.cli.doctor.software import Facts

_FOR_CUDA = "CUDA transport"


def _choose(device: str, transport: str) -> str:
    """The transport that two ranks of this host would get.

    Raises:
        ConfigError, SetupError: none; the message has the reasons.
    """
    import torch

    from odc.setup.topology import Topology
    from odc.transports import registry

    host, pid = os.uname().nodename, os.getpid()
    topology = Topology(0, (host, host), (host, host), (pid, pid))
    return registry.choose(transport, topology, torch.device(device)).name


def variables() -> Finding:
    """Whether the ODC_* variables have values that can be used."""
    from odc.config import RuntimeConfig
    from odc.errors import ConfigError
    from odc.liveness.faults import FaultSpec

    try:
        config = RuntimeConfig.from_environment()
        if config.fault:
            FaultSpec.parse(config.fault)
    except ConfigError as problem:
        return error(str(problem), "Correct the variable, or unset it.")
    if config.fault:
        return warning(f"ODC_FAULT={config.fault}: a fault will be injected", "unset ODC_FAULT")
    if config.host_id:
        return warning(f"ODC_HOST_ID={config.host_id}: ranks pose as another host", "unset ODC_HOST_ID")
    return ok(f"transport={config.transport}, accumulate={config.accumulate}, timeout {config.timeout_s:g} s")


def for_cpu() -> Finding:
    """What CPU ranks of this host would use."""
    from odc.config import RuntimeConfig
    from odc.errors import OdcError

    try:
        return ok(_choose("cpu", RuntimeConfig.from_environment().transport))
    except OdcError as problem:
        return error(str(problem), "See the other rows; unset ODC_TRANSPORT if it is set.")


def for_cuda(*, has_gpu: bool) -> Finding:
    """What CUDA ranks of this host would use; nothing but a transport's own word for it is asked."""
    from odc.errors import OdcError

    if not has_gpu:
        return not_needed("no CUDA device")
    try:
        return ok(_choose("cuda", "auto"))
    except OdcError as problem:
        return missing(str(problem), "See the rows on cupy, NVSHMEM and the devices.")


@dataclass(frozen=True)
class Check:
    """One row. ``required``: CPU training does not work without. ``gpus_only``: it has nothing to do with it."""

    name: str
    run: Callable[[Facts], Finding]
    required: bool = False
    gpus_only: bool = False


@dataclass(frozen=True)
class Report:
    """What all checks found."""

    rows: tuple[Row, ...]

    def named(self, status: Status) -> list[str]:
        """The checks with this status."""
        return [row.check for row in self.rows if row.finding.status is status]

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.named(Status.ERROR)

    @property
    def cpu_works(self) -> bool:
        """Whether CPU training works here."""
        return not any(row.finding.status is Status.ERROR and not row.gpus_only for row in self.rows)

    @property
    def gpus_work(self) -> bool:
        """Whether training on GPUs of this machine works."""
        return self.ok and any(row.check == _FOR_CUDA and row.finding.status is Status.OK for row in self.rows)

    def to_json(self) -> dict[str, object]:
        """``odc`` (its version), ``ok``, ``trains`` on "cpu" and "gpu" or not, and ``rows`` of check, status, found and
        advice."""
        trains = {"cpu": self.cpu_works, "gpu": self.gpus_work}
        return {"odc": __version__, "ok": self.ok, "trains": trains, "rows": [row.to_json() for row in self.rows]}


def examine(checks: Iterable[Check] | None = None, facts: Facts | None = None) -> Report:
    """Run the checks (default: all). Never raises: a check that fails becomes a row with its error."""
    facts = Facts() if facts is None else facts
    checks = CHECKS if checks is None else checks
    return Report(tuple(Row(check.name, _guarded(check, facts), check.gpus_only) for check in checks))


def _guarded(check: Check, facts: Facts) -> Finding:
    try:
        return check.run(facts)
    except Exception as problem:  # whatever it is: the other rows are wanted all the same
        found = f"could not be checked: {type(problem).__name__}: {problem}"
        advice = "See the other rows; if they are fine, please report this."
        return error(found, advice) if check.required else warning(found, advice)


def _system() -> Finding:
    return software.system(platform.system(), platform.release(), platform.machine())


def _shm_folder_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return None
    return status.f_blocks * status.f_frsize


def _limit(name: str) -> machine.Limit:
    import resource  # not on every system

    return machine.Limit(*resource.getrlimit(getattr(resource, name)))


def _memory(_: Facts) -> Finding:
    from odc.transports._memfd import available_bytes

    return machine.memory(available_bytes())


def _descriptors(_: Facts) -> Finding:
    from odc.transports._rendezvous import PER_PEER, SPARE

    return machine.descriptors(_limit("RLIMIT_NOFILE"), len(os.listdir("/proc/self/fd")), PER_PEER, SPARE)


def _cores(facts: Facts) -> Finding:
    here = facts.variables.get("LOCAL_WORLD_SIZE")
    return machine.cores(len(os.sched_getaffinity(0)), machine.cpu_quota(), here)


def _triton(facts: Facts) -> Finding:
    return software.triton(facts.versions, software.compiler_problem(facts.variables), has_gpu=facts.has_gpu)


def _cuda_ipc(facts: Facts) -> Finding:
    version = software.cupy_version(facts.versions)
    return cuda.ipc(facts.cuda, version, facts.variables, platform.release(), facts.fix)


def _nvshmem4py(facts: Facts) -> Finding:
    return _for_hosts(facts, software.nvshmem4py(facts.versions, facts.cuda_major, has_gpu=facts.has_gpu))


def _nvshmem_library(facts: Facts) -> Finding:
    wheels = {name: facts.versions[name] for name in nvshmem.WHEELS if name in facts.versions}
    return _for_hosts(facts, nvshmem.library(facts.nvshmem_host, wheels, has_gpu=facts.has_gpu, fix=facts.fix))


def _nvshmem_bitcode(facts: Facts) -> Finding:
    host, device = facts.nvshmem_host, facts.nvshmem_device
    return _for_hosts(facts, nvshmem.bitcode(host, device, has_gpu=facts.has_gpu, fix=facts.fix))


def _for_hosts(facts: Facts, finding: Finding) -> Finding:
    """NVSHMEM is for GPUs of several hosts: a machine that has no network for it lacks nothing."""
    if finding.status is not Status.MISSING or facts.rdma:
        return finding
    return not_needed(f"{finding.found}; no InfiniBand or RoCE device", f"For GPUs of several hosts: {finding.advice}")


def _devices(facts: Facts) -> Finding:
    from odc.config import connections_problem

    return cuda.devices(facts.cuda, facts.variables, connections_problem(facts.variables))


def _nvshmem_options(facts: Facts) -> Finding:
    from odc.config import ibgda_problem

    return nvshmem.options(facts.variables, ibgda_problem(facts.variables), has_gpu=facts.has_gpu)


def _trainer(name: str) -> Check:
    return Check(name, lambda facts: software.trainer(name, facts.versions))


CHECKS = (
    Check("Python", lambda _: software.python(sys.version_info[:3], sys.executable), required=True),
    Check("system", lambda _: _system(), required=True),
    Check("torch", lambda facts: software.torch(facts.torch, has_gpu=facts.has_gpu), required=True),
    Check("ODC variables", lambda _: variables(), required=True),
    Check("shared memory", lambda _: machine.shared_memory(), required=True),
    Check("passing files", lambda _: machine.descriptor_passing(), required=True),
    Check("watching ranks", lambda _: machine.process_watching(), required=True),
    Check("signals", lambda _: machine.signals(), required=True),
    Check("locks", lambda _: machine.locks(), required=True),
    Check("memory", _memory),
    Check("/dev/shm", lambda _: machine.shm_folder(_shm_folder_bytes())),
    Check("open files", _descriptors),
    Check("address space", lambda _: machine.address_space(_limit("RLIMIT_AS"))),
    Check("CPU cores", _cores),
    Check("ptrace", lambda _: machine.ptrace(machine.ptrace_scope())),
    Check("CPU transport", lambda _: for_cpu(), required=True),
    Check("CUDA driver", lambda facts: cuda.driver(facts.cuda, facts.torch.cuda)),
    Check("CUDA devices", _devices),
    Check("peer access", lambda facts: cuda.peer_access(facts.cuda)),
    Check("triton", _triton),
    Check("cupy", lambda facts: software.cupy(facts.versions, facts.cuda_major, has_gpu=facts.has_gpu)),
    Check("CUDA IPC", _cuda_ipc),
    Check("nvshmem4py", _nvshmem4py),
    Check("NVSHMEM library", _nvshmem_library),
    Check("NVSHMEM bitcode", _nvshmem_bitcode),
    Check("NVSHMEM options", _nvshmem_options, gpus_only=True),
    Check("RDMA", lambda facts: nvshmem.ports(facts.rdma)),
    Check("locked memory", lambda facts: machine.locked_memory(_limit("RLIMIT_MEMLOCK"), has_rdma=bool(facts.rdma))),
    Check(_FOR_CUDA, lambda facts: for_cuda(has_gpu=facts.has_gpu)),
    *map(_trainer, ("transformers", "accelerate", "trl")),
)
