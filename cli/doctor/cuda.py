"""Asks NVML about the CUDA driver and its devices. NVML needs no CUDA context, and so no memory on any device."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from odc.cli.doctor.finding import Finding, missing, not_needed, ok, warning

# From nvml.h.
_NVML_SUCCESS = 0
_P2P_CAPS_READ = 0
_P2P_CAPS_WRITE = 1
_P2P_CAPS_ATOMICS = 3
_NAME_BYTES = 96
_OLDEST_CAPABILITY = (7, 0)  # of NVSHMEM and Triton
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_WSL = "microsoft"  # in the kernel's release


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


@dataclass(frozen=True)
class CudaDevice:
    """One physical GPU."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    mig: bool = False


@dataclass(frozen=True)
class CudaDriver:
    """The driver and what it drives. ``problem`` says why nothing could be asked; empty fields: no driver."""

    version: str = ""
    cuda_version: str = ""
    """The newest CUDA that the driver runs, e.g. "13.0"."""

    devices: tuple[CudaDevice, ...] = ()
    unreachable: frozenset[tuple[int, int]] = frozenset()
    """Pairs (from, to) of devices without peer access for both reading and writing."""

    without_atomics: frozenset[tuple[int, int]] = frozenset()
    """Pairs (from, to) of devices between which additions are not atomic."""

    problem: str = ""


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> CudaDriver:
    """Ask NVML. Never raises: a machine without a driver has an empty one, with ``problem`` if it is half there."""
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return CudaDriver(problem=_driver_without_nvml(load))
    try:
        _check(library.nvmlInit_v2(), "nvmlInit")
        try:
            return _ask(library)
        finally:
            library.nvmlShutdown()
    except (OSError, AttributeError, ctypes.ArgumentError) as problem:
        return CudaDriver(problem=str(problem))


def _driver_without_nvml(load: Callable[[str], Any]) -> str:
    try:
        load("libcuda.so.1")
    except OSError:
        return ""
    return "libcuda.so.1 is here, libnvidia-ml.so.1 is not"


def _ask(library: Any) -> CudaDriver:
    version = ctypes.create_string_buffer(_NAME_BYTES)
    _check(library.nvmlSystemGetDriverVersion(version, _NAME_BYTES), "nvmlSystemGetDriverVersion")
    cuda, count = ctypes.c_int(), ctypes.c_uint()
    _check(library.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(cuda)), "nvmlSystemGetCudaDriverVersion")
    _check(library.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
    handles = [_handle(library, index) for index in range(count.value)]
    return CudaDriver(
        version=version.value.decode(errors="replace"),
        cuda_version=f"{cuda.value // 1000}.{cuda.value % 1000 // 10}",
        devices=tuple(_device(library, handle) for handle in handles),
        unreachable=frozenset(_pairs_without(library, handles, _P2P_CAPS_READ, _P2P_CAPS_WRITE)),
        without_atomics=frozenset(_pairs_without(library, handles, _P2P_CAPS_ATOMICS)),
    )


def _handle(library: Any, index: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _check(library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)), "nvmlDeviceGetHandleByIndex")
    return handle


def _device(library: Any, handle: ctypes.c_void_p) -> CudaDevice:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), _Memory()
    major, minor = ctypes.c_int(), ctypes.c_int()
    mig, pending = ctypes.c_uint(), ctypes.c_uint()
    _check(library.nvmlDeviceGetName(handle, name, _NAME_BYTES), "nvmlDeviceGetName")
    # Devices that share the host's memory have no answer to this one; 0 is shown as unknown.
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
    capability = library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    _check(capability, "nvmlDeviceGetCudaComputeCapability")
    known = library.nvmlDeviceGetMigMode(handle, ctypes.byref(mig), ctypes.byref(pending)) == _NVML_SUCCESS
    return CudaDevice(
        name.value.decode(errors="replace"), memory.total, (major.value, minor.value), known and mig.value == 1
    )


def _pairs_without(library: Any, handles: list[ctypes.c_void_p], *capabilities: int) -> Iterable[tuple[int, int]]:
    for source, one in enumerate(handles):
        for target, other in enumerate(handles):
            if source != target and not all(_p2p(library, one, other, c) for c in capabilities):
                yield source, target


def _p2p(library: Any, one: ctypes.c_void_p, other: ctypes.c_void_p, capability: int) -> bool:
    status = ctypes.c_int(-1)
    code = library.nvmlDeviceGetP2PStatus(one, other, capability, ctypes.byref(status))
    return bool(code == _NVML_SUCCESS and status.value == 0)


def _check(code: int, call: str) -> None:
    if code != _NVML_SUCCESS:
        raise OSError(f"{call} failed with code {code}")


def driver(driver: CudaDriver, torch_cuda: str | None) -> Finding:
    """The driver, and whether it is new enough for torch (a driver runs every CUDA of its major version and before)."""
    if driver.problem:
        advice = "Repair the driver; in docker: --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return warning(driver.problem, advice)
    if not driver.version:
        return not_needed("no NVIDIA driver: CPU ranks only")
    found = f"{driver.version}, runs CUDA up to {driver.cuda_version}"
    if torch_cuda and int(torch_cuda.split(".")[0]) > int(driver.cuda_version.split(".")[0]):
        advice = f"Update the driver, or install a torch built for CUDA {driver.cuda_version.split('.')[0]}."
        return warning(f"{found}; torch is built for CUDA {torch_cuda}", advice)
    return ok(found)


def devices(driver: CudaDriver, variables: Mapping[str, str], connections: str | None = None) -> Finding:
    """Name, memory, compute capability and MIG of every device, and what is wrong with ``connections`` to them."""
    if not driver.devices:
        return not_needed("none: CPU ranks only")
    found = "\n".join(_grouped(driver.devices))
    if _VISIBLE in variables:
        found += f"\n{_VISIBLE}={variables[_VISIBLE]}"
    if any(device.mig for device in driver.devices):
        return warning(
            found,
            "MIG instances have neither peer access nor CUDA IPC between them. For several ranks on one host: "
            "`sudo nvidia-smi -mig 0`",
        )
    if any(device.capability < _OLDEST_CAPABILITY for device in driver.devices):
        return warning(found, "NVSHMEM and Triton need compute capability 7.0 or newer: leave the older devices out.")
    if connections is not None:
        return warning(found, f"{connections}.")
    return ok(found)


def _grouped(devices: Iterable[CudaDevice]) -> list[str]:
    """A line per kind of device, with the indices of that kind."""
    kinds: dict[CudaDevice, list[int]] = {}
    for index, device in enumerate(devices):
        kinds.setdefault(device, []).append(index)
    return [f"{','.join(map(str, indices))}: {_describe(device)}" for device, indices in kinds.items()]


def _describe(device: CudaDevice) -> str:
    memory = f"{device.memory_bytes / 2**30:.0f} GiB" if device.memory_bytes else "memory unknown"
    major, minor = device.capability
    return f"{device.name}, {memory}, compute capability {major}.{minor}, MIG {'on' if device.mig else 'off'}"


def peer_access(driver: CudaDriver) -> Finding:
    """Which devices reach which, as a matrix where not all do."""
    count = len(driver.devices)
    if count < 2:
        return not_needed(f"{count} device{'' if count == 1 else 's'}: no peers")
    if not driver.unreachable:
        how = (
            "not atomically all of them, so their owners add gradients (accumulate='daemon')"
            if driver.without_atomics
            else "and adds to them atomically"
        )
        return ok(f"each of the {count} devices reads and writes all others, {how}")
    return warning(
        _matrix(count, driver.unreachable),
        "Row: from, column: to; a dot is a pair without peer access. Use devices that all reach each other "
        "(`nvidia-smi topo -p2p rw`); on bare metal, switching off IOMMU or PCIe ACS often brings it back.",
    )


def _matrix(count: int, unreachable: frozenset[tuple[int, int]]) -> str:
    """A row per device, a mark per peer: narrow enough for 32 devices in a table of 80 columns."""

    def mark(source: int, target: int) -> str:
        return "-" if source == target else "." if (source, target) in unreachable else "x"

    width = len(str(count - 1))
    rows = ("".join(mark(source, target) for target in range(count)) for source in range(count))
    return "\n".join(f"{source:>{width}}: {row}" for source, row in enumerate(rows))


def ipc(driver: CudaDriver, cupy: str | None, variables: Mapping[str, str], kernel: str, fix: str) -> Finding:
    """Whether memory can be exported to other processes, as far as can be told without a CUDA context."""
    if not driver.devices:
        return not_needed("no CUDA device")
    note = _allocator_note(variables)
    if _WSL in kernel.lower():
        return warning(f"not under WSL 2{note}", "Use Linux itself: WSL 2 exports no CUDA memory.")
    if cupy is None:
        return missing(f"cupy, which allocates what is exported, is not installed{note}", fix)
    return ok(f"cupy {cupy} can allocate memory to export (not tried: that would need a CUDA context){note}")


def _allocator_note(variables: Mapping[str, str]) -> str:
    """Torch's expandable segments cannot be exported: a well-known trap that is none here."""
    for name in _ALLOCATOR:
        if "expandable_segments:true" in variables.get(name, "").lower().replace(" ", ""):
            return f"; {name} has expandable_segments, which is harmless: ODC allocates memory of its own"
    return ""
