"""In place of kernels: recorders of what would have been launched."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import triton

from odc.kernels import accumulate, fill, parts, slots
from odc.kernels.aot_entry import AotEntry
from odc.kernels.launching import DTYPES
from odc.kernels.nvshmem import signals, transfer

Launches = list[tuple[Any, dict[str, Any], tuple[int, ...]]]
KERNELS = {
    accumulate: ("_accumulate_kernel",),
    slots: ("_accumulate_slots_kernel",),
    parts: ("_gather_parts_kernel", "_scatter_accumulate_parts_kernel", "_scatter_parts_kernel"),
    fill: ("_fill_kernel", "_copy_cast_kernel"),
    transfer: ("_nvshmem_gather_kernel", "_nvshmem_put_signal_kernel"),
    signals: ("_nvshmem_order_kernel",),
}


class Recorder:
    """In place of a kernel: what it would have been launched with."""

    def __init__(self, kernel: Any, launches: Launches) -> None:
        self.kernel, self.launches, self.__name__ = kernel, launches, kernel.__name__
        self.result: object = None
        """What a launch returns: Triton's is the compiled kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        def launch(*arguments: object, **keywords: object) -> object:
            named = dict(zip(self.kernel.arg_names, arguments, strict=False)) | keywords
            self.launches.append((self.kernel, named, grid))
            return self.result

        return launch


def record_launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """What kernels are launched with from now on."""
    seen: Launches = []
    for module, names in KERNELS.items():
        for name in names:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), seen))
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))  # any context manager
    return seen


def load(kernel: Any, module: int) -> None:
    """What Triton does when it has loaded a kernel."""
    triton.knobs.runtime.kernel_load_end_hook(module, 0, kernel.__name__, {}, "hash")


def _variant(kernel: Any, signature: dict[str, str], constants: dict[str, Any], num_warps: int) -> tuple[Any, ...]:
    pointers = tuple(sorted((n, t) for n, t in signature.items() if t.startswith("*")))
    return kernel.__name__, pointers, tuple(sorted((n, str(c)) for n, c in constants.items())), num_warps


def launched_variant(kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """Which of :func:`variants` a recorded launch is."""
    names = DTYPES | {torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64"}
    signature = {n: f"*{names[a.dtype]}" for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    return _variant(kernel, signature, constants, arguments["num_warps"])


def variants(entries: Iterable[AotEntry]) -> set[tuple[Any, ...]]:
    return {_variant(e.kernel, dict(e.signature), dict(e.constants), e.num_warps) for e in entries}
