"""The CUDA runtime as the transport needs it: a small interface, and its implementation by cupy.

Memory is plain cudaMalloc memory: what torch's caching allocator hands out cannot always be exported (expandable
segments, cudaMallocAsync), and cannot be kept from being reused while a peer still reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from odc.cuda import driver
from odc.engine import Engine
from odc.errors import OdcError, SetupError

HANDLE_BYTES = 64
GRANULARITY = 2 << 20
"""cudaMalloc carves smaller allocations out of shared blocks of this size, and a handle exports the whole block."""

_CAN_FLUSH_REMOTE_WRITES = 98  # cudaDeviceAttr of driver_types.h, as the next two
_NEEDED = ((41, "unified addressing"), (99, "registration of host memory"))
_REGISTER_PORTABLE_MAPPED = 0x1 | 0x2
_NON_BLOCKING = 0x1
_HIGH_PRIORITY = -1
_spare_streams: dict[int, list[int]] = {}  # by device; idle


class CudaRuntime(Protocol):
    """One device, as one process sees it. Addresses are integers; all failures are :class:`OdcError`."""

    @property
    def device(self) -> torch.device:
        """Where tensors of this device's memory are."""
        ...

    def engine(self) -> Engine:
        """What moves and adds bytes on this device."""
        ...

    def identity(self) -> str:
        """The device's name among all devices of the host, the same in every process."""
        ...

    def cannot_share(self) -> str | None:
        """Why no memory of this device can be shared with other processes, or None."""
        ...

    def cannot_reach(self, identity: str) -> str | None:
        """Why this device cannot read and write the memory of another one, or None (also: not known)."""
        ...

    def malloc(self, num_bytes: int) -> int:
        """Zeroed device memory that can be exported.

        Raises:
            SetupError: the device has not that much.
        """
        ...

    def free(self, address: int) -> None: ...

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of :data:`HANDLE_BYTES` for other processes, and where ``address`` lies in what it names."""
        ...

    def open(self, handle: bytes) -> int:
        """Map another process's memory; returns its base."""
        ...

    def unmap(self, base: int) -> None: ...

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        """Flat uint8 tensor on this memory, which it does not own. Memory of peers counts as this device's own."""
        ...

    def register(self, address: int, num_bytes: int) -> int:
        """Make host memory known to the device; returns the device's address of it."""
        ...

    def unregister(self, address: int) -> None: ...

    def wait_value(self, address: int, value: int) -> None:
        """The current stream goes on when the 32-bit word at ``address`` has reached ``value`` (modulo 2**32)."""
        ...

    def write_value(self, address: int, value: int) -> None:
        """The current stream sets the word after all it was given before."""
        ...


class CupyRuntime:
    """See :class:`CudaRuntime`."""

    def __init__(self, device: torch.device) -> None:
        import cupy

        self._cupy: Any = cupy
        self._device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._bound = threading.local()
        attribute = cupy.cuda.runtime.deviceGetAttribute
        self._can_flush = bool(self._call(attribute, _CAN_FLUSH_REMOTE_WRITES, self._device.index))

    @property
    def device(self) -> torch.device:
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
        from odc.cuda.engine import CudaEngine  # needs triton, which a CPU machine may not have

        return CudaEngine(self._device, self._new_stream, self._give_back_stream)

    def _new_stream(self) -> torch.cuda.Stream:
        """One that nobody else has: torch hands out the same few again and again.

        Of high priority, as FSDP's streams for communication: its kernels are short, and other ranks wait for them.
        """
        spare = _spare_streams.setdefault(self._device.index, [])
        create = self._cupy.cuda.runtime.streamCreateWithPriority
        handle = spare.pop() if spare else self._call(create, _NON_BLOCKING, _HIGH_PRIORITY)
        stream: torch.cuda.Stream = torch.cuda.ExternalStream(handle, device=self._device)  # type: ignore[no-untyped-call]
        return stream

    def _give_back_stream(self, stream: torch.cuda.Stream) -> None:
        """For the next session: torch's allocator may use a stream that memory was made for as long as it has that."""
        _spare_streams[self._device.index].append(int(stream.cuda_stream))

    def identity(self) -> str:
        return str(self._call(self._cupy.cuda.runtime.deviceGetPCIBusId, self._device.index)).lower()

    def cannot_share(self) -> str | None:
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

    def malloc(self, num_bytes: int) -> int:
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
        handle = bytes(self._call(self._cupy.cuda.runtime.ipcGetMemHandle, address))
        return handle, address - int(self._call(driver.allocation_base, address))

    def open(self, handle: bytes) -> int:
        return int(self._call(self._cupy.cuda.runtime.ipcOpenMemHandle, handle))

    def unmap(self, base: int) -> None:
        self._call(self._cupy.cuda.runtime.ipcCloseMemHandle, base)

    def tensor(self, address: int, num_bytes: int) -> torch.Tensor:
        # By DLPack, which takes cupy's word for the device. torch would ask the driver about the bare address, call
        # mapped peer memory another device's, and make a context there.
        memory = self._cupy.cuda.UnownedMemory(address, num_bytes, self, self._device.index)
        array = self._cupy.ndarray((num_bytes,), dtype="uint8", memptr=self._cupy.cuda.MemoryPointer(memory, 0))
        return from_dlpack(array)

    def register(self, address: int, num_bytes: int) -> int:
        self._call(self._cupy.cuda.runtime.hostRegister, address, num_bytes, _REGISTER_PORTABLE_MAPPED)
        return int(self._call(driver.device_address, address))

    def unregister(self, address: int) -> None:
        self._call(self._cupy.cuda.runtime.hostUnregister, address)

    @property
    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    # Handle 0, the default stream, is that of the current device.

    def wait_value(self, address: int, value: int) -> None:
        self._call(driver.wait_value, self._stream, address, value, self._can_flush)

    def write_value(self, address: int, value: int) -> None:
        self._call(driver.write_value, self._stream, address, value)
