"""NVSHMEM's device functions as Triton externs. Addresses are integers: NVSHMEM takes untyped pointers.

``_block``: all threads of the program must call together, and the data is copied by all of them. ``_nbi``: returns at
once; neither buffer may be touched before `quiet`. Remote addresses are *symmetric*: the address of the same object on
this PE. Local buffers of transfers between hosts must lie in the symmetric heap, or be registered with NVSHMEM.

Every thread executes what a Triton program calls on scalars. That is what ``_block`` functions need, and `quiet`
permits it; a plain signal operation would be made once per thread (128 additions, for example) and is therefore not
here: `putmem_signal_block` signals once.

Names and numbers are from the headers of NVSHMEM 3: ``device/nvshmem_defines.h``, ``device/nvshmemx_defines.h`` and
``device_host_transport/nvshmem_common_transport.h`` (``nvshmemx_signal_op_t``).
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

from typing import Any

import triton.language as tl
from triton.language import core

SIGNAL_SET = tl.constexpr(9)

_I32 = core.dtype("int32")
_I64 = core.dtype("int64")


def _call(symbol: str, types: tuple[Any, ...], arguments: list[Any], semantic: Any) -> Any:
    # Triton has no extern without a result; that of a void function is never read, and LLVM drops it when it inlines.
    return core.extern_elementwise("", "", arguments, {types: (symbol, _I32)}, is_pure=False, _semantic=semantic)


_COPY = (_I64, _I64, _I64, _I32)


@core.extern
def getmem_nbi_block(local: Any, remote: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    """Copy int64 ``nbytes`` from ``remote`` at int32 ``pe`` to ``local``; done after the next `quiet`."""
    return _call("nvshmemx_getmem_nbi_block", _COPY, [local, remote, nbytes, pe], _semantic)


@core.extern
def putmem_nbi_block(remote: Any, local: Any, nbytes: Any, pe: Any, _semantic: Any = None) -> Any:
    """Copy int64 ``nbytes`` from ``local`` to ``remote`` at int32 ``pe``.

    ``local`` is free, and the data is there, after the next `quiet`.
    """
    return _call("nvshmemx_putmem_nbi_block", _COPY, [remote, local, nbytes, pe], _semantic)


_PUT_SIGNAL = (_I64, _I64, _I64, _I64, _I64, _I32, _I32)


@core.extern
def putmem_signal_block(
    remote: Any, local: Any, nbytes: Any, signal: Any, value: Any, operation: Any, pe: Any, _semantic: Any = None
) -> Any:
    """Copy int64 ``nbytes`` from ``local`` to ``remote`` at int32 ``pe``, then signal it once.

    To signal is to set (``operation`` `SIGNAL_SET`) the word at address ``signal`` of ``pe`` to int64 ``value``. Who
    sees the signal sees the data of this call, but not necessarily that of earlier ones. ``local`` is free when it
    returns; the data is there after the next `quiet`.
    """
    arguments = [remote, local, nbytes, signal, value, operation, pe]
    return _call("nvshmemx_putmem_signal_block", _PUT_SIGNAL, arguments, _semantic)


@core.extern
def quiet(_semantic: Any = None) -> Any:
    """Wait until all transfers of this program are complete: gets are here, puts are there."""
    return _call("nvshmem_quiet", (), [], _semantic)
