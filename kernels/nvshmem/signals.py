"""Signals and completion: kernels that wait, order and check, and their launchers."""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from odc.kernels.aot_entry import AotEntry, entry
from odc.kernels.arguments import check_flat, check_positive, check_same_device
from odc.kernels.launching import device_of
from odc.kernels.nvshmem.device import CMP_GE, fence, my_pe, n_pes, quiet, signal_wait_until
from odc.kernels.nvshmem.modules import KernelModules

_NO_TWIN = "NVSHMEM has no symmetric heap in host memory"


# [Note: A wait on the device has a limit]
# NVSHMEM's own wait has none, and a kernel that never ends holds the stream, the device and the process for good. So
# this one polls by the clock, and calls NVSHMEM's wait only when the signal is there: that returns at once, after what
# the transport needs to make the data visible to this GPU.
@triton.jit(do_not_specialize=["signals", "expected", "observed", "timeout_ns"])
def _nvshmem_wait_kernel(signals: tl.tensor, expected: tl.tensor, observed: tl.tensor, timeout_ns: tl.int64) -> None:
    signal = signals + tl.program_id(0)
    target = tl.load(expected + tl.program_id(0))
    begin = globaltimer()
    seen = tl.load(signal, volatile=True)
    while (seen < target) & (globaltimer() - begin < timeout_ns):
        seen = tl.load(signal, volatile=True)
    if seen >= target:
        signal_wait_until(signal.to(tl.int64), CMP_GE, target)
    tl.store(observed + tl.program_id(0), seen)


@triton.jit
def _nvshmem_order_kernel(COMPLETE: tl.constexpr) -> None:
    if COMPLETE:
        quiet()
    else:
        fence()


@triton.jit(do_not_specialize=["out"])
def _nvshmem_pes_kernel(out: tl.tensor) -> None:
    tl.store(out, my_pe())
    tl.store(out + 1, n_pes())


def wait_for_signals(
    modules: KernelModules,
    signals: torch.Tensor,
    expected: torch.Tensor,
    observed: torch.Tensor,
    *,
    timeout_s: float,
) -> None:
    """Wait until ``signals[i] >= expected[i]`` for every i, but no longer than ``timeout_s``; one program for each i.

    All int64 [n], dense; ``signals`` in this PE's symmetric heap. On return the kernel is enqueued on the current
    stream. When it has ended, ``observed[i]`` is the last value seen: if it is less than expected, the time was over,
    and the data that belongs to this signal must not be read. Everything else that was put is readable on this stream.

    Expecting [3, 3] when the signals stand at [3, 2] leaves [3, 2] in ``observed``, after ``timeout_s``.

    Raises ValueError for wrong shapes, dtypes, devices or times, and launches nothing then.
    """
    check_flat("signals", signals, [torch.int64])
    check_positive(signals_numel=signals.numel(), timeout_s=timeout_s)
    check_flat("expected", expected, [torch.int64], signals.numel())
    check_flat("observed", observed, [torch.int64], signals.numel())
    check_same_device(signals=signals, expected=expected, observed=observed)
    with device_of(_nvshmem_wait_kernel, signals, _NO_TWIN):
        modules.launch(
            _nvshmem_wait_kernel,
            (signals.numel(),),
            signals,
            expected,
            observed,
            int(timeout_s * 1e9),
            num_warps=1,  # all threads poll: one warp reads the word with one access
        )


def wait_for_signals_reference(signals: torch.Tensor, expected: torch.Tensor, observed: torch.Tensor) -> bool:
    """What `wait_for_signals` leaves in ``observed`` when the signals stand as they do; whether it would have waited.

    >>> observed = torch.zeros(2, dtype=torch.int64)
    >>> wait_for_signals_reference(torch.tensor([3, 2]), torch.tensor([3, 3]), observed), observed
    (True, tensor([3, 2]))
    """
    observed.copy_(signals)
    return bool((signals < expected).any())


def _order(modules: KernelModules, device: torch.device, complete: bool) -> None:
    with torch.cuda.device(device):
        modules.launch(_nvshmem_order_kernel, (1,), COMPLETE=complete, num_warps=1)


def quiet_on_stream(modules: KernelModules, device: torch.device) -> None:
    """Enqueue a wait until all transfers that this PE's earlier kernels on the current stream started are complete."""
    _order(modules, device, True)


def fence_on_stream(modules: KernelModules, device: torch.device) -> None:
    """Enqueue an order: puts of earlier kernels on the current stream arrive at each PE before those of later ones."""
    _order(modules, device, False)


def read_pes(modules: KernelModules, out: torch.Tensor) -> None:
    """``out`` = [this PE, number of PEs] as kernels see it: int32 [2].

    The check that a loaded module has NVSHMEM's device state: compare with what the host says. Enqueued on the current
    stream. PE 1 of 4 reads [1, 4].
    """
    check_flat("out", out, [torch.int32], 2)
    with device_of(_nvshmem_pes_kernel, out, _NO_TWIN):
        modules.launch(_nvshmem_pes_kernel, (1,), out, num_warps=1)


def aot_entries() -> list[AotEntry]:
    words = {"signals": "*i64", "expected": "*i64", "observed": "*i64"}
    return [
        entry("nvshmem_wait", _nvshmem_wait_kernel, words, {}, 1, nvshmem=True),
        entry("nvshmem_quiet", _nvshmem_order_kernel, {}, {"COMPLETE": True}, 1, nvshmem=True),
        entry("nvshmem_fence", _nvshmem_order_kernel, {}, {"COMPLETE": False}, 1, nvshmem=True),
        entry("nvshmem_pes", _nvshmem_pes_kernel, {"out": "*i32"}, {}, 1, nvshmem=True),
    ]
