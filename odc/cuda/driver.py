"""The few calls of the CUDA driver that neither torch nor cupy offers: stream memory operations and address lookups.

Stream memory operations let a stream wait for, and set, a word in memory without occupying a multiprocessor. The word
lies in host memory that all ranks of a host have mapped and registered, so the host can read it, and can release a
stream whose peer has died.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from odc.errors import OdcError, SetupError

# From cuda.h.
_SUCCESS = 0
_WAIT_GEQ = 0x0  # until (int32)(*address - value) >= 0
_WAIT_FLUSH = 1 << 30  # and writes of other devices that came before the word have arrived
_WRITE_DEFAULT = 0x0  # what the stream did before is visible to whoever sees the value
_HANDLE, _ADDRESS = ctypes.c_void_p, ctypes.c_ulonglong


@functools.cache
def _library() -> ctypes.CDLL:
    """libcuda, with prototypes.

    Raises:
        SetupError: there is no NVIDIA driver, or one from before CUDA 12.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuStreamWaitValue32_v2.argtypes = [_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint]
        library.cuStreamWriteValue32_v2.argtypes = [_HANDLE, _ADDRESS, ctypes.c_uint32, ctypes.c_uint]
        library.cuMemHostGetDevicePointer_v2.argtypes = [ctypes.POINTER(_ADDRESS), ctypes.c_void_p, ctypes.c_uint]
        library.cuMemGetAddressRange_v2.argtypes = [
            ctypes.POINTER(_ADDRESS), ctypes.POINTER(ctypes.c_size_t), _ADDRESS,
        ]  # fmt: skip
        library.cuGetErrorString.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)]
    except OSError:
        raise SetupError("libcuda.so.1 was not found: install the NVIDIA driver (in docker: --gpus all)") from None
    except AttributeError as missing:
        raise SetupError(
            f"the NVIDIA driver is too old ({missing}): stream memory operations need CUDA 12, driver 525 or newer"
        ) from None
    return library


def problem() -> str | None:
    """Why these calls cannot be made on this machine, or None."""
    try:
        _library()
    except SetupError as error:
        return str(error)
    return None


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    code = getattr(library, name)(*arguments)
    if code != _SUCCESS:
        text = ctypes.c_char_p()
        library.cuGetErrorString(code, ctypes.byref(text))
        reason = text.value.decode() if text.value else "unknown error"
        raise OdcError(f"{name} failed with code {code}: {reason}")


def wait_value(stream: int, address: int, value: int, flush: bool) -> None:
    """Let ``stream`` go on when the 32-bit word at ``address`` has reached ``value`` (modulo 2**32).

    Args:
        flush: for devices that can and may need it (``CAN_FLUSH_REMOTE_WRITES``).
    """
    _call("cuStreamWaitValue32_v2", stream, address, value, _WAIT_GEQ | (_WAIT_FLUSH if flush else 0))


def write_value(stream: int, address: int, value: int) -> None:
    """Let ``stream`` set the word when all it was given before is done, and visible to who reads the word."""
    _call("cuStreamWriteValue32_v2", stream, address, value, _WRITE_DEFAULT)


def device_address(host_address: int) -> int:
    """Where the device sees registered host memory."""
    found = _ADDRESS()
    _call("cuMemHostGetDevicePointer_v2", ctypes.byref(found), host_address, 0)
    return int(found.value)


def allocation_base(address: int) -> int:
    """First byte of the allocation that ``address`` lies in: what an IPC handle names."""
    base, size = _ADDRESS(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    return int(base.value)
