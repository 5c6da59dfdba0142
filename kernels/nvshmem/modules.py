"""What makes a loaded kernel able to use NVSHMEM: its device state, copied into each loaded module once."""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import triton

from odc.kernels.aot_entry import AotEntry
from odc.kernels.prepare import load_entry

_LIBRARY = "libnvshmem_device"

# [Note: What is registered stays loaded]
# Modules of NVSHMEM kernels that Triton has loaded into this process, each with the compiled kernel that it belongs to.
# Triton may unload a module when its compiled kernel is freed (3.9 does), and nothing else need hold that: caches of
# kernels can be cleared. NVSHMEM would then be left with a handle that is dead, or that means another module. So the
# kernels are held here, for as long as the process lives, and a later KernelModules (NVSHMEM was finalized and
# initialized again) meets them already loaded.
_loaded: dict[int, Any] = {}


class KernelModules:
    """The NVSHMEM kernels of one initialized NVSHMEM: launches them and has every module initialized before it runs.

    A kernel linked with NVSHMEM's device library has a copy of its device state (which PE am I, where is the symmetric
    heap) in its own constant memory. ``initialize`` gets the CUmodule as an integer and fills that in: it calls
    ``nvshmemx_cumodule_init`` and raises if that fails. ``finalize``, if given, is called for each module at `close`.
    ``bitcode`` is the library of the current device's architecture, see `find_bitcode`.

    Raises RuntimeError if this Triton has no chain of load hooks (before 3.5): its single hook would be taken away
    from others.
    """

    def __init__(
        self, bitcode: Path, initialize: Callable[[int], None], finalize: Callable[[int], None] | None = None
    ) -> None:
        if not bitcode.is_file():
            raise ValueError(f"bitcode={str(bitcode)!r} is no file, expected what find_bitcode returns")
        self._extern_libs = {_LIBRARY: str(bitcode)}
        self._initialize = initialize
        self._finalize = finalize
        self._names: set[str] = set()
        self._failed: dict[str, BaseException] = {}
        self._modules: list[int] = []
        self._hooks = triton.knobs.runtime.kernel_load_end_hook
        if not hasattr(self._hooks, "add"):
            raise RuntimeError(f"Triton {triton.__version__} has no chain of load hooks, expected 3.5 or later")
        for module in _loaded:
            self._prepare(module)
        self._hooks.add(self._on_load)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
        """Enqueue ``kernel`` on the current stream, linked with the device library; the first launch compiles it.

        The first compilation takes about 6 s per kernel (linking 30 MB of bitcode); Triton keeps the result on disk.
        Raises RuntimeError if the kernel's module could not be initialized, now or at an earlier launch.
        """
        name = kernel.__name__
        if name in self._failed:
            raise RuntimeError(f"{name} was loaded but NVSHMEM could not be set up in it") from self._failed[name]
        self._names.add(name)
        _hold(kernel[grid](*arguments, extern_libs=self._extern_libs, **options))

    def prepare(self, entries: Iterable[AotEntry]) -> None:
        """Compile and load ``entries`` for the current device, so that no launch has to. Nothing is launched.

        ``transfer.aot_entries()`` and ``signals.aot_entries()`` are all there are.
        """
        for entry in entries:
            self._names.add(entry.kernel.__name__)
            _hold(load_entry(entry, extern_libs=self._extern_libs))

    def close(self) -> None:
        """Finalize all modules and leave Triton's hooks. Nothing may be launched or running any more."""
        self._hooks.remove(self._on_load)
        modules, self._modules = self._modules, []
        if self._finalize is not None:
            for module in modules:
                self._finalize(module)

    def _prepare(self, module: int) -> None:
        self._initialize(module)
        self._modules.append(module)

    def _on_load(self, module: int, function: object, name: str, *rest: object) -> None:
        """Triton has loaded a kernel, any kernel; exactly once per module, and before it first runs."""
        if name not in self._names:
            return
        try:
            self._prepare(module)
        except BaseException as error:
            # Triton takes the kernel for usable from now on: the next launch must be stopped here.
            self._failed[name] = error
            raise
        _loaded[module] = None  # until the kernel is known, see `_hold`


def _hold(compiled: Any) -> None:
    """See [Note: What is registered stays loaded]: the hook is told the module only, who launches gets the kernel."""
    module = getattr(compiled, "module", None)
    if module in _loaded:
        _loaded[module] = compiled
