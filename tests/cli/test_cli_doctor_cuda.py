"""Layer 1: no processes. What ``odc doctor`` says of drivers and devices, NVSHMEM and the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctor_rows import DRIVER, ERROR, FIX, H200, MISSING, NO_DRIVER, NOT_NEEDED, OK, WARNING, says

from odc import config
from odc.cli.doctor import cuda, nvshmem
from odc.cli.doctor.cuda import CudaDevice, CudaDriver
from odc.cli.doctor.finding import Status
from odc.cli.doctor.nvshmem import NvshmemFile, RdmaPort
from odc.cuda import runtime

# CUDA


class Nvml:
    """A driver with two H200 that do not reach each other, the second with MIG on. ``failing`` calls return 999."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.shut_down = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: 999 if name in self.failing else getattr(self, f"_{name}")(*arguments) or 0

    def _nvmlInit_v2(self) -> int:
        return 0

    def _nvmlShutdown(self) -> None:
        self.shut_down = True

    def _nvmlSystemGetDriverVersion(self, text, size) -> None:
        text.value = b"580.65.06"

    def _nvmlSystemGetCudaDriverVersion_v2(self, version) -> None:
        version._obj.value = 12080

    def _nvmlDeviceGetCount_v2(self, count) -> None:
        count._obj.value = 2

    def _nvmlDeviceGetHandleByIndex_v2(self, index, handle) -> None:
        handle._obj.value = index + 1

    def _nvmlDeviceGetHandleByPciBusId_v2(self, name, handle) -> None:
        handle._obj.value = int(name[-4:-2])  # of "0000:00:01.0"

    def _nvmlDeviceGetName(self, handle, text, size) -> None:
        text.value = b"NVIDIA H200"

    def _nvmlDeviceGetMemoryInfo(self, handle, memory) -> None:
        memory._obj.total = 141 << 30

    def _nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> None:
        major._obj.value, minor._obj.value = 9, 0

    def _nvmlDeviceGetMigMode(self, handle, current, pending) -> None:
        current._obj.value = handle.value - 1

    def _nvmlDeviceGetP2PStatus(self, one, other, capability, status) -> None:
        # 1 -> 0 can be read, not written; 0 -> 1 has no atomics.
        status._obj.value = 0 if (capability != 3 and one.value == 1) or capability == 0 else 5


def test_the_driver_is_asked() -> None:
    library = Nvml()
    found = cuda.read_driver(lambda name: library)
    assert found == CudaDriver(
        "580.65.06",
        "12.8",
        (H200, CudaDevice("NVIDIA H200", 141 << 30, (9, 0), mig=True)),
        frozenset({(1, 0)}),
        frozenset({(0, 1), (1, 0)}),
    )
    assert library.shut_down


@pytest.mark.parametrize(("code", "expected"), [(5, False), (0, True)])
def test_atomics_are_asked_for_by_bus_id(code: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of devices that CUDA_VISIBLE_DEVICES hides, and no driver's number names here."""

    def status(self: Nvml, one, other, capability, status) -> None:
        assert (one.value, other.value, capability) in ((1, 2, 3), (None, None, 3))  # None: not found before
        status._obj.value = code

    monkeypatch.setattr(Nvml, "_nvmlDeviceGetP2PStatus", status)
    ids = ("0000:00:01.0", "0000:00:02.0")
    assert runtime.nvml_has_atomics(*ids, lambda name: Nvml()) is expected
    for call in ("nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetP2PStatus"):
        assert runtime.nvml_has_atomics(*ids, lambda name, call=call: Nvml(call)) is None
    assert runtime.nvml_has_atomics(*ids, lambda name: SimpleNamespace()) is None


@pytest.mark.parametrize(("value", "found"), [("1", True), ("4", True), ("8", False), ("32", False), ("", False)])
def test_streams_that_share_a_queue_are_told(value: str, found: bool) -> None:
    driver = CudaDriver("580", "13.0", (H200,))
    problem = config.connections_problem({"CUDA_DEVICE_MAX_CONNECTIONS": value})
    finding = cuda.devices(driver, {}, problem)
    assert (finding.status == WARNING) == found
    assert ("Megatron" in finding.advice) == found


def test_what_a_driver_does_not_know() -> None:
    found = cuda.read_driver(
        lambda name: Nvml("nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetP2PStatus")
    )
    assert found.devices == (CudaDevice("NVIDIA H200", 0, (9, 0)),) * 2
    assert found.unreachable == {(0, 1), (1, 0)}
    assert "memory unknown" in cuda.devices(found, {}).found


@pytest.mark.parametrize("call", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetName"])
def test_a_driver_that_fails_is_told(call: str) -> None:
    found = cuda.read_driver(lambda name: Nvml(call))
    assert not found.devices
    says(cuda.driver(found, "13.0"), WARNING, "failed with code 999", "NVIDIA_DRIVER_CAPABILITIES=compute,utility")


def test_a_library_without_the_calls_is_told() -> None:
    assert "nvmlInit_v2" in cuda.read_driver(lambda name: SimpleNamespace()).problem


def test_a_machine_without_driver_or_with_half_of_one() -> None:
    def without(*absent: str) -> CudaDriver:
        def load(name: str) -> object:
            if name in absent:
                raise OSError(name)
            return object()

        return cuda.read_driver(load)

    assert without("libnvidia-ml.so.1", "libcuda.so.1") == NO_DRIVER
    says(cuda.driver(without("libnvidia-ml.so.1"), None), WARNING, "libnvidia-ml.so.1 is not", "--gpus all")


@pytest.mark.parametrize(
    ("driver", "torch_cuda", "status", "found", "advice"),
    [
        (NO_DRIVER, None, NOT_NEEDED, "no NVIDIA driver", ""),
        (DRIVER, None, OK, "580.65, runs CUDA up to 13.0", ""),
        (CudaDriver("570", "12.4"), "12.8", OK, "12.4", ""),  # minor versions of one major are compatible
        (CudaDriver("570", "12.8"), "13.0", WARNING, "torch is built for CUDA 13.0", "Update the driver"),
    ],
)
def test_driver(driver: CudaDriver, torch_cuda: str | None, status: Status, found: str, advice: str) -> None:
    says(cuda.driver(driver, torch_cuda), status, found, advice)


def of_gpu(name: str, memory: int, capability: tuple[int, int]) -> CudaDriver:
    return CudaDriver("580", "12.9", (CudaDevice(name, memory, capability),))


MIXED = CudaDriver("580", "13.0", (H200, CudaDevice("NVIDIA H200", 141 << 30, (9, 0), mig=True)))
ALIKE = "0,1: NVIDIA H200, 141 GiB, compute capability 9.0, MIG off"
DIFFERENT = "1: NVIDIA H200, 141 GiB, compute capability 9.0, MIG on"


@pytest.mark.parametrize(
    ("driver", "variables", "status", "found", "advice"),
    [
        (NO_DRIVER, {}, NOT_NEEDED, "none", ""),
        (DRIVER, {"CUDA_VISIBLE_DEVICES": "1"}, OK, f"{ALIKE}\nCUDA_VISIBLE_DEVICES=1", ""),
        (MIXED, {}, WARNING, DIFFERENT, "nvidia-smi -mig 0"),
        (of_gpu("Tesla V100", 16 << 30, (7, 0)), {}, OK, "compute capability 7.0", ""),
        (of_gpu("Tesla P100", 16 << 30, (6, 0)), {}, WARNING, "6.0", "compute capability 7.0"),
    ],
)
def test_devices(driver: CudaDriver, variables: dict[str, str], status: Status, found: str, advice: str) -> None:
    says(cuda.devices(driver, variables), status, found, advice)


def of_devices(number: int, *unreachable: tuple[int, int]) -> CudaDriver:
    return CudaDriver("580", "13.0", (H200,) * number, frozenset(unreachable))


OVER_PCIE = replace(DRIVER, without_atomics=frozenset({(0, 1)}))
TABLE = "0: -x.\n1: x-x\n2: ..-"


@pytest.mark.parametrize(
    ("driver", "status", "found", "advice"),
    [
        (NO_DRIVER, NOT_NEEDED, "0 devices", ""),
        (of_devices(1), NOT_NEEDED, "1 device:", ""),
        (DRIVER, OK, "each of the 2 devices reads and writes all others, and adds to them atomically", ""),
        (OVER_PCIE, OK, "others, not atomically all of them, so their owners add gradients", ""),
        (of_devices(3, (0, 2), (2, 0), (2, 1)), WARNING, TABLE, "nvidia-smi topo -p2p rw"),
    ],
)
def test_peer_access(driver: CudaDriver, status: Status, found: str, advice: str) -> None:
    says(cuda.peer_access(driver), status, found, advice)


def test_numbers_of_many_devices_are_aligned() -> None:
    assert cuda.peer_access(of_devices(11, (0, 1))).found.startswith(" 0: -.x")


@pytest.mark.parametrize(
    ("driver", "cupy", "kernel", "status", "found", "advice"),
    [
        (NO_DRIVER, None, "6.8.0", NOT_NEEDED, "no CUDA device", ""),
        (DRIVER, None, "6.8.0", MISSING, "cupy", FIX),
        (DRIVER, "13.6.0", "6.8.0", OK, "not tried", ""),
        (DRIVER, "13.6.0", "5.15.1-microsoft-standard-WSL2", WARNING, "WSL 2", "Linux itself"),
    ],
)
def test_cuda_ipc(driver: CudaDriver, cupy: str | None, kernel: str, status: Status, found: str, advice: str) -> None:
    says(cuda.ipc(driver, cupy, {}, kernel, FIX), status, found, advice)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_harmless(name: str) -> None:
    on, off = ({name: f"max_split_size_mb:64,expandable_segments:{value}"} for value in ("True", "False"))
    says(cuda.ipc(DRIVER, "13.6.0", on, "6.8.0", FIX), OK, f"{name} has expandable_segments, which is harmless")
    assert "expandable" not in cuda.ipc(DRIVER, "13.6.0", off, "6.8.0", FIX).found


# NVSHMEM


def install_nvshmem(prefix: Path, header: str = "", banner: str = "") -> Path:
    """Files as the wheels have them; returns the folder of the libraries."""
    folder = prefix / "lib"
    folder.mkdir(parents=True)
    (folder / "libnvshmem_host.so.3").write_bytes(b"\x7fELF" + bytes(5000) + banner.encode() + bytes(100))
    (folder / "libnvshmem_device.bc").write_bytes(b"BC\xc0\xde")
    if header:
        names = zip(("MAJOR", "MINOR", "PATCH"), header.split("."), strict=True)
        text = "".join(f"#define NVSHMEM_VENDOR_{name}_VERSION {part}\n" for name, part in names)
        (prefix / "include/non_abi").mkdir(parents=True)
        (prefix / "include/non_abi/nvshmem_version.h").write_text(text)
    return folder


def test_nvshmem_files_are_found_in_their_order(tmp_path: Path) -> None:
    folders = {name: install_nvshmem(tmp_path / name) for name in ("wheel", "chosen", "home", "system")}
    variables = {"NVSHMEM_LIB_DIR": str(folders["chosen"]), "NVSHMEM_HOME": str(tmp_path / "home")}
    wheels, system = [folders["wheel"]], [folders["system"]]

    def found(find, variables, wheels):
        host = find(variables, wheels, system)
        return host and host.parent.parent.name

    for find, *given, expected in (
        (nvshmem.find_host, variables, wheels, "wheel"),
        (nvshmem.find_host, variables, [], "home"),
        (nvshmem.find_host, {}, [], "system"),
        (nvshmem.find_bitcode, variables, wheels, "chosen"),
        (nvshmem.find_bitcode, {}, wheels, "wheel"),
    ):
        assert found(find, *given) == expected
    assert nvshmem.find_bitcode({}, [], [tmp_path]) is None


def test_nvshmem_versions_are_those_of_the_files(tmp_path: Path) -> None:
    folder = install_nvshmem(tmp_path / "both", header="3.5.1", banner="NVSHMEM v3.4.5")
    assert nvshmem.describe_file(folder / "libnvshmem_host.so.3").version == (3, 4, 5)
    assert nvshmem.describe_file(folder / "libnvshmem_device.bc").version == (3, 5, 1)
    bare = install_nvshmem(tmp_path / "bare")
    assert nvshmem.describe_file(bare / "libnvshmem_host.so.3").version is None
    assert nvshmem.describe_file(bare / "libnvshmem_device.bc").version is None
    assert nvshmem.describe_file(None) is None


def host(*version: int) -> NvshmemFile:
    return NvshmemFile(Path("/lib/libnvshmem_host.so.3"), version or None)


def device(*version: int) -> NvshmemFile:
    return NvshmemFile(Path("/lib/libnvshmem_device.bc"), version or None)


@pytest.mark.parametrize(
    ("library", "wheels", "has_gpu", "status", "found", "advice"),
    [
        (None, [], False, NOT_NEEDED, "not found", ""),
        (None, [], True, MISSING, "not found", FIX),
        (host(3, 4, 5), ["nvidia-nvshmem-cu13"], True, OK, "3.4.5, /lib/libnvshmem_host.so.3", ""),
        (host(3, 2, 5), [], True, WARNING, "3.2.5", "3.3 or newer: " + FIX),
        (host(), [], True, WARNING, "version unknown", FIX),
        (host(3, 4, 5), list(nvshmem.WHEELS), True, WARNING, "overwrite each other", "pip uninstall -y nvidia-nvshmem"),
    ],
)
def test_nvshmem_library(library, wheels, has_gpu: bool, status: Status, found: str, advice: str) -> None:
    finding = nvshmem.library(library, dict.fromkeys(wheels, "3.4.5"), has_gpu=has_gpu, fix=FIX)
    says(finding, status, found, advice)


@pytest.mark.parametrize(
    ("library", "bitcode", "has_gpu", "status", "found", "advice"),
    [
        (host(3, 4, 5), device(3, 4, 5), True, OK, "fits", ""),
        (host(3, 4, 0), device(3, 4, 5), True, OK, "fits", ""),  # the patch number does not matter
        (host(3, 5, 0), device(3, 4, 5), True, OK, "fits", ""),
        (host(3, 5, 21), device(3, 5, 21), True, WARNING, "newer than any tested", "Install NVSHMEM 3.4, with a torch"),
        (host(3, 4, 5), device(3, 5, 0), True, WARNING, "newer than the host library 3.4.5", "NVSHMEM_LIB_DIR"),
        (None, device(3, 4, 5), True, WARNING, "the host library is missing", FIX),
        (host(3, 4, 5), device(), True, WARNING, "a version is unknown", FIX),
        (host(3, 4, 5), None, True, MISSING, "not found", FIX),
        (None, None, False, NOT_NEEDED, "not found", ""),
    ],
)
def test_nvshmem_bitcode(library, bitcode, has_gpu: bool, status: Status, found: str, advice: str) -> None:
    says(nvshmem.bitcode(library, bitcode, has_gpu=has_gpu, fix=FIX), status, found, advice)


def test_nvshmem_options() -> None:
    off, on = {"NVSHMEM_SYMMETRIC_SIZE": "1G"}, {"NVSHMEM_IB_ENABLE_IBGDA": "1"}
    says(nvshmem.options({}, None, has_gpu=True), OK, "no variable")
    says(nvshmem.options(off, None, has_gpu=True), OK, "NVSHMEM_SYMMETRIC_SIZE=1G")
    says(nvshmem.options(on, "lost", has_gpu=True), ERROR, "lost", "unset NVSHMEM_IB_ENABLE_IBGDA")
    says(nvshmem.options(on, "lost", has_gpu=False), NOT_NEEDED, "no CUDA device")


# Network


def test_rdma_ports_are_read(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0/ports/1"
    port.mkdir(parents=True)
    for name, text in (("link_layer", "InfiniBand"), ("rate", "400 Gb/sec (4X NDR)"), ("state", "4: ACTIVE")):
        (port / name).write_text(f"{text}\n")
    (tmp_path / "mlx5_1/ports/1").mkdir(parents=True)
    found = nvshmem.read_ports(tmp_path)
    assert found == (
        RdmaPort("mlx5_0", "1", "InfiniBand", "400 Gb/sec (4X NDR)", True),
        RdmaPort("mlx5_1", "1", "unknown", "unknown", False),
    )
    assert nvshmem.read_ports(tmp_path / "nowhere") == ()


def test_rdma() -> None:
    up, down = (RdmaPort("mlx5_0", "1", "InfiniBand", "400 Gb/sec", active) for active in (True, False))
    says(nvshmem.ports([]), NOT_NEEDED, "no InfiniBand")
    says(nvshmem.ports([down, up], True), OK, "mlx5_0 port 1: InfiniBand, 400 Gb/sec, active")
    says(nvshmem.ports([down], True), WARNING, "down", "ibstat")
    says(nvshmem.ports([up], False), WARNING, "no /dev/infiniband", "--device /dev/infiniband")
