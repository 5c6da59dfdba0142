"""The transport's small interface to the CUDA runtime, its implementation with cupy, and checks of its requirements.

Memory comes from cudaMalloc: memory of torch's caching allocator cannot always be exported (expandable segments,
cudaMallocAsync), and torch might reuse it while another rank still reads it.

The driver is called directly for functions that torch and cupy do not have. Stream memory operations let a stream wait
for and set a word in memory without occupying a multiprocessor. The word is in host memory that all ranks of a host
have mapped and registered, so the host can read it and can release a stream whose peer has died. Another call starts
many copies at once.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from odc._version import DISTRIBUTION
from odc.engines.base import Engine
from odc.errors import OdcError, SetupError

logger = logging.getLogger("odc")

# From cuda.h.
_SUCCESS = 0
_WAIT_VALUE_32, _WRITE_VALUE_32 = 1, 2
_WAIT_GEQ = 0x0  # until (int32)(*address - value) >= 0
_WAIT_FLUSH = 1 << 30  # and writes of other devices that came before the word have arrived
_WRITE_DEFAULT = 0x0  # what the stream did before is visible to whoever sees the value
_MOST_OPERATIONS = 256  # that one call takes
_NATIVE_ATOMICS = 0x03  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
_NVML_ATOMICS = 3  # NVML_P2P_CAPS_INDEX_ATOMICS of nvml.h
_NON_BLOCKING = 0x1  # by the default stream
_HIGH_PRIORITY = -1
_IN_STREAM_ORDER = 0x1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_BESIDE_COMPUTE = 0x1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_HANDLE, _ADDRESS, _SIZE = ctypes.c_void_p, ctypes.c_ulonglong, ctypes.c_size_t


class MemoryOperation(ctypes.Structure):
    """CUstreamBatchMemOpParams, a union of 48 bytes, as its members for 32-bit words have it."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", _ADDRESS),
        ("value", ctypes.c_uint32),
        ("_upper", ctypes.c_uint32),
        ("flags", ctypes.c_uint),
        ("alias", _ADDRESS),
        ("_padding", ctypes.c_uint64),
    )


class CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes of all copies of a batch. Only managed memory has need of the hints where it lies."""

    _fields_ = (("order", ctypes.c_uint), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))


@functools.cache
def _library() -> ctypes.CDLL:
    """libcuda, with prototypes.

    Raises:
        SetupError: there is no NVIDIA driver, or one from before CUDA 12.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuStreamBatchMemOp_v2.argtypes = [
            _HANDLE, ctypes.c_uint, ctypes.POINTER(MemoryOperation), ctypes.c_uint,
        ]  # fmt: skip
        library.cuDeviceGetP2PAttribute.argtypes = [
            ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int, ctypes.c_int,
        ]  # fmt: skip
        library.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.POINTER(_ADDRESS), ctypes.c_void_p, ctypes.c_uint]
        library.cuMemGetAddressRange_v2.argtypes = [
            ctypes.POINTER(_ADDRESS), ctypes.POINTER(_SIZE), _ADDRESS,
        ]  # fmt: skip
        library.cuMemcpyAsync.argtypes = [_ADDRESS, _ADDRESS, _SIZE, _HANDLE]
        if hasattr(library, "cuMemcpyBatchAsync"):  # CUDA 12.8; by this name it is the same with later drivers, too
            library.cuMemcpyBatchAsync.argtypes = [
                *[ctypes.c_void_p] * 3, _SIZE, ctypes.POINTER(CopyAttributes),
                ctypes.POINTER(_SIZE), _SIZE, ctypes.POINTER(_SIZE), _HANDLE,
            ]  # fmt: skip
        library.cuStreamCreateWithPriority.argtypes = [ctypes.POINTER(_HANDLE), ctypes.c_uint, ctypes.c_int]
        library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    except OSError:
        raise SetupError("libcuda.so.1 was not found: install the NVIDIA driver (in docker: --gpus all)") from None
    except AttributeError as missing:
        raise SetupError(
            f"the NVIDIA driver is too old ({missing}): stream memory operations need CUDA 12, driver 525 or newer"
        ) from None
    return library


def driver_problem() -> str | None:
    """Why these calls cannot be made on this machine, or None."""
    try:
        _library()
    except SetupError as error:
        return str(error)
    return None


def _call_driver(name: str, *arguments: Any) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code != _SUCCESS:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise OdcError(f"{name} failed with code {code}: {reason}")


def wait_values(stream: int, words: Sequence[tuple[int, int]], flush: bool) -> None:
    """Let ``stream`` go on when the 32-bit word at each address has reached its value (modulo 2**32).

    Args:
        words: (address, value).
        flush: for devices that can and may need it (``CAN_FLUSH_REMOTE_WRITES``).
    """
    _operate(stream, _WAIT_VALUE_32, words, _WAIT_GEQ | (_WAIT_FLUSH if flush else 0))


def write_values(stream: int, words: Sequence[tuple[int, int]]) -> None:
    """Let ``stream`` set words when all it was given before is done, and visible to who reads a word."""
    _operate(stream, _WRITE_VALUE_32, words, _WRITE_DEFAULT)


def _operate(stream: int, operation: int, words: Sequence[tuple[int, int]], flags: int) -> None:
    for low in range(0, len(words), _MOST_OPERATIONS):
        part = words[low : low + _MOST_OPERATIONS]
        rows = [MemoryOperation(operation, address, value, 0, flags, 0, 0) for address, value in part]
        _call_driver("cuStreamBatchMemOp_v2", stream, len(rows), (MemoryOperation * len(rows))(*rows), 0)


def copy_memory(
    stream: int, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], in_a_batch: bool
) -> None:
    """Let ``stream`` copy ``sizes[i]`` bytes from one address to another, for every i, in any order.

    Args:
        in_a_batch: by one call, where the driver has that and ``stream`` is not the default one, which takes none.
    """
    if in_a_batch and stream and hasattr(_library(), "cuMemcpyBatchAsync"):
        numbers = [array("Q", each) for each in (targets, sources, sizes)]
        attributes, first, failed = CopyAttributes(_IN_STREAM_ORDER, flags=_BESIDE_COMPUTE), _SIZE(0), _SIZE()
        to, of, by = (each.buffer_info()[0] for each in numbers)
        _call_driver("cuMemcpyBatchAsync", to, of, by, len(sizes), attributes, first, 1, failed, stream)
        return
    for target, source, size in zip(targets, sources, sizes, strict=True):
        _call_driver("cuMemcpyAsync", target, source, size, stream)


def has_native_atomics(device: int, peer: int) -> bool:
    """Whether atomic operations of ``device`` on memory of ``peer`` are atomic; both by their numbers here."""
    found = ctypes.c_int()
    _call_driver("cuDeviceGetP2PAttribute", ctypes.byref(found), _NATIVE_ATOMICS, device, peer)
    return bool(found.value)


def nvml_has_atomics(identity: str, peer_identity: str, load: Callable[[str], Any] = ctypes.CDLL) -> bool | None:
    """The same by PCI bus ids, also of devices that are hidden from this process; None: NVML cannot tell."""
    found, one, two = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    try:
        nvml = load("libnvidia-ml.so.1")
        codes = (
            nvml.nvmlInit_v2(),
            nvml.nvmlDeviceGetHandleByPciBusId_v2(identity.encode(), ctypes.byref(one)),
            nvml.nvmlDeviceGetHandleByPciBusId_v2(peer_identity.encode(), ctypes.byref(two)),
            nvml.nvmlDeviceGetP2PStatus(one, two, _NVML_ATOMICS, ctypes.byref(found)),
        )
    except (OSError, AttributeError):
        return None
    return None if any(codes) else found.value == 0


def device_address(host_address: int) -> int:
    """Where the device sees registered host memory."""
    found = _ADDRESS()
    _call_driver("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host_address, 0)
    return int(found.value)


def allocation_base(address: int) -> int:
    """First byte of the allocation that ``address`` lies in: what an IPC handle names."""
    base, size = _ADDRESS(), _SIZE()
    _call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return int(base.value)


def create_stream() -> int:
    """A stream of high priority in the current device's context. cupy makes none with a priority before version 14."""
    found = _HANDLE()
    _call_driver("cuStreamCreateWithPriority", ctypes.byref(found), _NON_BLOCKING, _HIGH_PRIORITY)
    return int(found.value or 0)


def unavailable(device: torch.device) -> str | None:
    """Why this rank cannot use CUDA IPC on ``device``, or None. Makes no context."""
    if device.type != "cuda":
        return f"it serves CUDA tensors, the model is on {device.type}"
    return module_problem("cupy", "allocates the memory that is shared", extra()) or (
        module_problem("triton", "compiles the kernels", "triton") or driver_problem() or _cupy_problem()
    )


def module_problem(name: str, purpose: str, package: str, needs: str = "") -> str | None:
    """Why a module cannot be imported, or does not have what is needed of it, or None. Never raises.

    It is imported, because being installed is not enough: libraries that it loads may be missing, or of another CUDA.
    """
    subject = f"{name}, which {purpose},"
    try:
        module = importlib.import_module(name)
    except Exception as problem:  # a broken installation raises OSError, AttributeError and others
        if isinstance(problem, ModuleNotFoundError) and f"{name}.".startswith(f"{problem.name}."):
            return f"{subject} is not installed: pip install {package}"
        text = f"{type(problem).__name__}: {problem}"
        return f"{subject} is installed but cannot be imported ({text}): uninstall it, and pip install {package}"
    if needs and not hasattr(module, needs):
        return f"{subject} is too old, it has no {needs}: pip install --upgrade {package}"
    return None


def extra() -> str:
    """This project with the extra that fits the CUDA which torch was built for, quoted for ``pip install``."""
    version = torch.version.cuda
    return f"'{DISTRIBUTION}[{'cuda12' if version and version.startswith('12') else 'cuda13'}]'"


def _cupy_problem() -> str | None:
    """What :func:`module_problem` does not see: whether cupy and the driver fit."""
    try:
        import cupy

        cupy.cuda.runtime.driverGetVersion()
        cupy.cuda.runtime.getDeviceCount()
    except Exception as problem:  # a CUDARuntimeError; whatever a broken installation raises
        text = f"{type(problem).__name__}: {problem}"
        return f"cupy cannot use the driver ({text}): update the driver, or install the cupy for its CUDA version"
    return None


HANDLE_BYTES = 64
GRANULARITY = 2 << 20
"""cudaMalloc carves smaller allocations out of shared blocks of this size, and a handle exports the whole block."""

_CAN_FLUSH_REMOTE_WRITES, _CAPABILITY_MAJOR = 98, 75  # cudaDeviceAttr of driver_types.h, as the next two
_BLACKWELL = 10
_NEEDED = ((41, "unified addressing"), (99, "registration of host memory"))
_REGISTER_PORTABLE_MAPPED = 0x1 | 0x2
_spare_streams: dict[int, list[int]] = {}  # by device; idle


class CudaRuntime:
    """One device, as one process sees it, by cupy. Addresses are integers; all failures are :class:`OdcError`."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._cupy: Any = cupy
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._bound = threading.local()
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self._can_flush = bool(self._call(attribute, _CAN_FLUSH_REMOTE_WRITES, self._device.index))
        # It is reported that drivers crash with batches on Blackwell, where this has not run.
        self._takes_batches = self._call(attribute, _CAPABILITY_MAJOR, self._device.index) < _BLACKWELL

    @property
    def device(self) -> torch.device:
        """Where tensors of this device's memory are."""
        return self._device

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            with torch.cuda.device(self._device):  # whatever thread this is, and whatever it is busy with
                self._bind()
                return function(*arguments)
        except RuntimeError as error:  # CUDARuntimeError
            raise OdcError(f"{getattr(function, '__name__', function)}: {error}") from None

    def _bind(self) -> None:
        """Give a thread that is new to CUDA the device's context. torch takes device 0 for bound, and does nothing."""
        if not hasattr(self._bound, "to_device"):
            self._cupy.cuda.runtime.setDevice(self._device.index)
            self._bound.to_device = True

    def engine(self) -> Engine:
        """What moves and adds bytes on this device."""
        from odc.engines.cuda import CudaEngine  # needs triton, which a CPU machine may not have

        return CudaEngine(self._device, self._new_stream, self._give_back_stream, self.copy_memory)

    def _new_stream(self) -> torch.cuda.Stream:
        """One that nobody else has: torch hands out the same few again and again.

        Of high priority, as FSDP's streams for communication: its kernels are short, and other ranks wait for them.
        """
        spare = _spare_streams.setdefault(self._device.index, [])
        handle = spare.pop() if spare else self._call(create_stream)
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device=self._device)  # type: ignore[no-untyped-call]
        return stream

    def _give_back_stream(self, stream: torch.cuda.Stream) -> None:
        """For the next session: torch's allocator may use a stream that memory was made for as long as it has that."""
        _spare_streams[self._device.index].append(int(stream.cuda_stream))

    def identity(self) -> str:
        """The device's name among all devices of the host, the same in every process."""
        return str(self._call(self._cupy.cuda.runtime.deviceGetPCIBusId, self._device.index)).lower()

    def cannot_share(self) -> str | None:
        """Why no memory of this device can be shared with other processes, or None."""
        name = torch.cuda.get_device_name(self._device)
        if " MIG " in f"{name} ":
            return (
                f"{name} is a MIG instance: instances have neither peer access nor CUDA IPC between them. Switch MIG "
                "off (`sudo nvidia-smi -mig 0`), or run one rank"
            )
        for attribute, what in _NEEDED:
            if not self._call(self._cupy.cuda.runtime.deviceGetAttribute, attribute, self._device.index):
                return f"{name} has no {what} here (a virtual machine, or WSL 2): keep FSDP's own collectives"
        return None

    def cannot_reach(self, identity: str) -> str | None:
        """Why this device cannot read and write the memory of another one, or None (also: not known)."""
        if identity == self.identity():
            return None
        runtime = self._cupy.cuda.runtime
        try:
            other = runtime.deviceGetByPCIBusId(identity)
        except RuntimeError:
            return None  # hidden from this process (CUDA_VISIBLE_DEVICES): the memory test will tell
        if runtime.deviceCanAccessPeer(self._device.index, other):
            return None
        return f"device {self.identity()} has no peer access to {identity}"

    def no_atomics(self, identity: str) -> str | None:
        """Why atomic additions of this device to memory of another one may be lost, or None."""
        if identity == self.identity():
            return None
        try:
            other = self._cupy.cuda.runtime.deviceGetByPCIBusId(identity)
        except RuntimeError:
            found = nvml_has_atomics(self.identity(), identity)
            if found is None:
                return f"device {identity} is hidden from this process (CUDA_VISIBLE_DEVICES), also from NVML"
        else:
            found = self._call(has_native_atomics, self._device.index, other)
        if found:
            return None
        return f"device {self.identity()} has no native atomics in the memory of {identity} (no NVLink between them)"

    def malloc(self, num_bytes: int) -> int:
        """Zeroed device memory that can be exported.

        Raises:
            SetupError: the device has not that much.
        """
        runtime = self._cupy.cuda.runtime
        size = -(-num_bytes // GRANULARITY) * GRANULARITY
        try:
            address = int(self._call(runtime.malloc, size))
        except OdcError as error:
            free, total = self._call(runtime.memGetInfo)
            raise SetupError(
                f"cudaMalloc of {size / 2**20:.0f} MiB failed ({error}). {free / 2**20:.0f} of {total / 2**20:.0f} MiB "
                "are free. Patch the model before other memory is taken, call torch.cuda.empty_cache() first, or "
                "shard over more ranks."
            ) from None
        self._call(runtime.memset, address, 0, size)
        self._call(runtime.deviceSynchronize)  # memset of device memory returns early
        return address

    def free(self, address: int) -> None:
        self._call(self._cupy.cuda.runtime.free, address)

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of :data:`HANDLE_BYTES` for other processes, and where ``address`` lies in what it names."""
        handle = bytes(self._call(self._cupy.cuda.runtime.ipcGetMemHandle, address))
        return handle, address - int(self._call(allocation_base, address))

    def open(self, handle: bytes) -> int:
        """Map another process's memory; returns its base."""
        return int(self._call(self._cupy.cuda.runtime.ipcOpenMemHandle, handle))

    def unmap(self, base: int) -> None:
        self._call(self._cupy.cuda.runtime.ipcCloseMemHandle, base)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Flat uint8 tensor on this memory, which it does not own. Memory of peers counts as this device's own."""
        # By DLPack, which takes cupy's word for the device. torch would ask the driver about the bare address, call
        # mapped peer memory another device's, and make a context there.
        memory = self._cupy.cuda.UnownedMemory(address, num_bytes, self, self._device.index)
        pointer = self._cupy.cuda.MemoryPointer(memory, 0)
        return from_dlpack(self._cupy.ndarray((num_bytes,), dtype="uint8", memptr=pointer))

    def register(self, address: int, num_bytes: int) -> int:
        """Make host memory known to the device; returns the device's address of it."""
        self._call(self._cupy.cuda.runtime.hostRegister, address, num_bytes, _REGISTER_PORTABLE_MAPPED)
        try:
            return int(self._call(device_address, address))
        except OdcError:
            self.unregister(address)
            raise

    def unregister(self, address: int) -> None:
        self._call(self._cupy.cuda.runtime.hostUnregister, address)

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    # Handle 0, the default stream, is that of the current device.

    def wait_values(self, words: Sequence[tuple[int, int]]) -> None:
        """The current stream goes on when the 32-bit word at each address has reached its value (modulo 2**32)."""
        self._call(wait_values, self._stream, words, self._can_flush)

    def write_values(self, words: Sequence[tuple[int, int]]) -> None:
        """The current stream sets the word at each address to a value, after all it was given before."""
        self._call(write_values, self._stream, words)

    def copy_memory(self, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
        """The current stream copies ``sizes[i]`` bytes from one address to another, for every i, in any order."""
        in_a_batch = self._takes_batches
        try:
            self._call(copy_memory, self._stream, targets, sources, sizes, in_a_batch)
        except OdcError as problem:
            if not in_a_batch:
                raise
            self._takes_batches = False  # not of this memory, or not here; if it is something else, that comes again
            logger.warning("odc: copies are asked for one by one, which takes a host longer: %s", problem)
            self.copy_memory(targets, sources, sizes)
