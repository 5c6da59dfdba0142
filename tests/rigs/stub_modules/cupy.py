"""Cupy without a GPU: what ODC calls of it, on the driver of ``stub_libcuda.c``. Calls have cupy's signatures."""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

# As the first lines of cupy's docstrings have them; a test compares.
SIGNATURES = """
deviceCanAccessPeer(int device, int peerDevice) -> int
deviceGetAttribute(int attrib, int device) -> int
deviceGetByPCIBusId(str pci_bus_id) -> int
deviceGetPCIBusId(int device) -> str
deviceSynchronize()
driverGetVersion() -> int
free(intptr_t ptr)
getDeviceCount() -> int
hostRegister(intptr_t ptr, size_t size, unsigned int flags)
hostUnregister(intptr_t ptr)
ipcCloseMemHandle(intptr_t devPtr)
ipcGetMemHandle(intptr_t devPtr)
ipcOpenMemHandle(bytes handle, unsigned int flags=cudaIpcMemLazyEnablePeerAccess)
malloc(size_t size) -> intptr_t
memGetInfo()
memset(intptr_t ptr, int value, size_t size)
setDevice(int device)
streamCreateWithPriority(unsigned int flags, int priority) -> intptr_t
""".strip().splitlines()
_DEFAULTS = {"cudaIpcMemLazyEnablePeerAccess": 1}
_TYPES = {"int": int, "size_t": int, "intptr_t": int, "unsigned int": int, "str": str, "bytes": bytes}


class CUDARuntimeError(RuntimeError):
    """As cupy's."""


def _driver(name: str, *arguments: Any) -> None:
    library = ctypes.CDLL("libcuda.so.1")
    code = getattr(library, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        raise CUDARuntimeError(f"{name}: {code}: {(text.value or b'').decode()}")


def _integer(name: str, *arguments: Any) -> int:
    found = ctypes.c_int()
    _driver(name, ctypes.byref(found), *arguments)
    return found.value


def _address(name: str, *arguments: Any) -> int:
    found = ctypes.c_uint64()
    _driver(name, ctypes.byref(found), *arguments)
    return found.value


class _Handle(ctypes.Structure):  # passed by value
    _fields_ = [("reserved", ctypes.c_char * 64)]


def _pci_bus_id(device: int) -> str:
    text = ctypes.create_string_buffer(16)
    _driver("cuDeviceGetPCIBusId", text, len(text), device)
    return text.value.decode()


def _memory_info() -> tuple[int, int]:
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _driver("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def _ipc_handle(address: int) -> bytes:
    handle = _Handle()
    _driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
    return bytes(handle)


def _set_device(device: int) -> None:
    assert 0 <= device < _integer("cuDeviceGetCount")


_CALLS: dict[str, Callable[..., Any]] = {
    "deviceCanAccessPeer": lambda device, peer: _integer("cuDeviceCanAccessPeer", device, peer),
    "deviceGetAttribute": lambda attribute, device: _integer("cuDeviceGetAttribute", attribute, device),
    "deviceGetByPCIBusId": lambda name: _integer("cuDeviceGetByPCIBusId", name.encode()),
    "deviceGetPCIBusId": _pci_bus_id,
    "deviceSynchronize": lambda: _driver("cuCtxSynchronize"),
    "driverGetVersion": lambda: _integer("cuDriverGetVersion"),
    "free": lambda address: _driver("cuMemFree_v2", ctypes.c_uint64(address)),
    "getDeviceCount": lambda: _integer("cuDeviceGetCount"),
    "hostRegister": lambda a, size, f: _driver("cuMemHostRegister_v2", ctypes.c_void_p(a), ctypes.c_size_t(size), f),
    "hostUnregister": lambda address: _driver("cuMemHostUnregister", ctypes.c_void_p(address)),
    "ipcCloseMemHandle": lambda address: _driver("cuIpcCloseMemHandle", ctypes.c_uint64(address)),
    "ipcGetMemHandle": _ipc_handle,
    "ipcOpenMemHandle": lambda raw, flags: _address("cuIpcOpenMemHandle_v2", _Handle.from_buffer_copy(raw), flags),
    "malloc": lambda size: _address("cuMemAlloc_v2", ctypes.c_size_t(size)),
    "memGetInfo": _memory_info,
    "memset": lambda a, value, size: _driver("cuMemsetD8_v2", ctypes.c_uint64(a), value, ctypes.c_size_t(size)),
    "setDevice": _set_device,
    "streamCreateWithPriority": lambda flags, priority: _address("cuStreamCreateWithPriority", flags, priority),
}


def _bound(text: str) -> Callable[..., Any]:
    name, _, rest = text.partition("(")
    parts = [part.strip() for part in rest.partition(")")[0].split(",") if part.strip()]
    kinds, parameters = [], []
    for part in parts:
        declared, _, default = part.partition("=")
        kind, _, parameter = declared.rpartition(" ")
        kinds.append(_TYPES[kind])
        value = _DEFAULTS[default] if default else inspect.Parameter.empty
        parameters.append(inspect.Parameter(parameter, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    signature = inspect.Signature(parameters)

    def call(*arguments: Any, **options: Any) -> Any:
        bound = signature.bind(*arguments, **options)
        bound.apply_defaults()
        values = list(bound.arguments.values())
        for kind, value in zip(kinds, values, strict=True):
            if not isinstance(value, kind):
                raise TypeError(f"{text}: {value!r} is no {kind.__name__}")
        return _CALLS[name](*values)

    call.__name__, call.__doc__ = name, text
    return call


class UnownedMemory:
    """As cupy's."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """As cupy's."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


class ndarray:
    """As cupy's, of bytes; torch takes it for host memory."""

    def __init__(self, shape: tuple[int], dtype: str, memptr: MemoryPointer) -> None:
        assert dtype == "uint8"
        assert shape[0] <= memptr.mem.size
        self._host = torch.frombuffer((ctypes.c_uint8 * shape[0]).from_address(memptr.ptr), dtype=torch.uint8)

    def __dlpack__(self, **_: object) -> object:
        return self._host.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self._host.__dlpack_device__()


cuda = SimpleNamespace(
    runtime=SimpleNamespace(
        CUDARuntimeError=CUDARuntimeError, **{text.partition("(")[0]: _bound(text) for text in SIGNATURES}
    ),
    UnownedMemory=UnownedMemory,
    MemoryPointer=MemoryPointer,
)
