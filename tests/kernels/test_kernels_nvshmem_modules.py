"""Layer 1: no processes. What NVSHMEM kernels need before a launch: the device library, and a loaded module that
NVSHMEM has set up.

No GPU; Triton's loading is played back. It cannot show that NVSHMEM accepts a module.
"""

from __future__ import annotations

import gc
import importlib.metadata
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.backends.nvidia
import triton.language as tl
from kernel_driver import no_gpu
from kernel_recorder import load

from odc.kernels import parts
from odc.kernels.aot_entry import entry
from odc.kernels.nvshmem import bitcode, modules, signals


class TestKernelModules:
    """`KernelModules` against Triton's own chain of hooks."""

    @pytest.fixture(autouse=True)
    def _fresh(self, monkeypatch: pytest.MonkeyPatch, launches: list[Any]) -> Iterator[None]:
        monkeypatch.setattr(modules, "_loaded", {})
        before = list(triton.knobs.runtime.kernel_load_end_hook.calls)
        yield
        assert triton.knobs.runtime.kernel_load_end_hook.calls == before

    def test_each_loaded_module_is_initialized_once(self, library: Path) -> None:
        initialized: list[int] = []
        finalized: list[int] = []
        kernels = modules.KernelModules(library, initialized.append, finalized.append)
        signals.quiet_on_stream(kernels, torch.device("cuda"))
        load(signals._nvshmem_order_kernel, 11)
        load(signals._nvshmem_order_kernel, 12)  # compiled once more, another module
        load(parts._gather_parts_kernel, 13)  # none of its business
        assert initialized == [11, 12]
        kernels.close()
        assert finalized == [11, 12]

    def test_modules_outlive_an_nvshmem(self, library: Path) -> None:
        first = modules.KernelModules(library, lambda module: None)
        signals.quiet_on_stream(first, torch.device("cuda"))
        load(signals._nvshmem_order_kernel, 11)
        first.close()
        again: list[int] = []
        second = modules.KernelModules(library, again.append)
        assert again == [11]
        second.close()

    def test_registered_modules_stay_loaded(self, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A Triton that unloads the module of a compiled kernel when nobody holds that kernel."""
        unloaded: list[int] = []

        class Compiled:
            def __init__(self, module: int) -> None:
                self.module = module
                weakref.finalize(self, unloaded.append, module)

        class Kernel:
            """Loads at the first launch, and then forgets: its cache was cleared."""

            def __init__(self, name: str, first: int) -> None:
                self.__name__ = name
                self.loads = itertools.count(first)

            def __getitem__(self, grid: tuple[int, ...]) -> Any:
                def launch(**options: object) -> Compiled:
                    compiled = Compiled(next(self.loads))
                    load(self, compiled.module)
                    return compiled

                return launch

        initialized: list[int] = []
        kernels = modules.KernelModules(library, initialized.append, initialized.remove)
        kernel, other = Kernel("_mine", 21), Kernel("_others", 31)
        kernels.launch(kernel, (1,))
        kernels.launch(kernel, (1,))
        other[(1,)]()  # none of its business, and not to be held
        gc.collect()
        assert (initialized, unloaded) == ([21, 22], [31])
        kernels.close()
        gc.collect()
        assert (initialized, unloaded) == ([], [31])
        again: list[int] = []
        modules.KernelModules(library, again.append).close()
        assert again == [21, 22]

    def test_others_hooks_are_called_too(self, library: Path) -> None:
        others: list[int] = []

        def hook(module: int, *_: object) -> None:
            others.append(module)

        chain = triton.knobs.runtime.kernel_load_end_hook
        chain.add(hook)
        kernels = modules.KernelModules(library, lambda module: None)
        load(parts._gather_parts_kernel, 13)
        kernels.close()
        load(parts._gather_parts_kernel, 14)
        chain.remove(hook)
        assert others == [13, 14]

    def test_a_kernel_that_could_not_be_initialized_is_never_launched(self, library: Path, launches: list[Any]) -> None:
        def initialize(module: int) -> None:
            raise OSError("nvshmemx_cumodule_init returned 7")

        kernels = modules.KernelModules(library, initialize)
        signals.quiet_on_stream(kernels, torch.device("cuda"))
        with pytest.raises(OSError, match="returned 7"):
            load(signals._nvshmem_order_kernel, 11)
        launches.clear()
        with pytest.raises(RuntimeError, match="_nvshmem_order_kernel was loaded but"):
            signals.quiet_on_stream(kernels, torch.device("cuda"))
        assert not launches
        kernels.close()

    def test_kernels_are_linked_with_the_library(self, library: Path, launches: list[Any]) -> None:
        kernels = modules.KernelModules(library, lambda module: None)
        signals.quiet_on_stream(kernels, torch.device("cuda"))
        assert launches[0][1]["extern_libs"] == {"libnvshmem_device": str(library)}
        kernels.close()

    def test_missing_library(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="is no file, expected what find_bitcode returns"):
            modules.KernelModules(tmp_path / "absent.bc", lambda module: None)


@triton.jit(do_not_specialize=["out", "value"])
def _store_kernel(out: tl.tensor, value: tl.int64, TWICE: tl.constexpr) -> None:
    tl.store(out, value * 2 if TWICE else value)


def test_prepared_kernels_are_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Compiled, loaded and initialized before the first launch; with a library that Triton brings along."""
    monkeypatch.setattr(modules, "_loaded", {})
    library = Path(triton.backends.nvidia.__path__[0]) / "lib/libdevice.10.bc"
    initialized: list[int] = []
    with no_gpu(monkeypatch, tmp_path, others=[_store_kernel]) as driver:
        kernels = modules.KernelModules(library, initialized.append)
        try:
            constants = [{"TWICE": twice} for twice in (False, True)]
            kernels.prepare([entry(f"store {c}", _store_kernel, {"out": "*i64"}, c, 1) for c in constants])
            assert (len(driver.compiled), len(driver.loaded), len(driver.launched)) == (2, 2, 0)
            assert initialized == [1, 2]
            assert [kernel.name for kernel in modules._loaded.values()] == ["_store_kernel"] * 2
            for chosen in constants:
                out = torch.zeros(1, dtype=torch.int64)
                kernels.launch(_store_kernel, (1,), out, 16, **chosen, num_warps=1)
        finally:
            kernels.close()
    assert (len(driver.compiled), len(driver.loaded), len(driver.launched)) == (2, 2, 2)


class TestBitcode:
    def make(self, folder: Path, *names: str) -> Path:
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).touch()
        return folder

    @pytest.mark.parametrize(("arch", "found"), [("sm_80", 80), ("sm_86", 80), ("sm_90", 90), ("sm_100", 100)])
    def test_the_newest_not_above_the_target(self, tmp_path: Path, arch: str, found: int) -> None:
        self.make(tmp_path, *(f"libnvshmem_device_sm_{n}.bc" for n in (75, 80, 90, 100)))
        assert bitcode.find_bitcode(arch, tmp_path).name == f"libnvshmem_device_sm_{found}.bc"

    def test_one_for_all(self, tmp_path: Path) -> None:
        self.make(tmp_path / "lib", "libnvshmem_device.bc", "libnvshmem_device_sm_90.bc")
        assert bitcode.find_bitcode("sm_80", tmp_path).name == "libnvshmem_device.bc"
        assert bitcode.find_bitcode("sm_90", str(tmp_path)).name == "libnvshmem_device_sm_90.bc"

    def test_a_given_folder_is_the_only_one(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}.*pip install nvidia-nvshmem-cu13"):
            bitcode.find_bitcode("sm_90", tmp_path)

    def test_wheels_then_the_system(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        wheel = self.make(tmp_path / "wheel", "libnvshmem_device.bc")
        system = self.make(tmp_path / "system", "libnvshmem_device.bc")
        monkeypatch.setattr(bitcode, "SYSTEM_FOLDERS", (str(system),))

        def distribution(name: str) -> SimpleNamespace:
            if name != "nvidia-nvshmem-cu12" or not wheel.exists():
                raise importlib.metadata.PackageNotFoundError(name)
            return SimpleNamespace(locate_file=lambda path: wheel)

        monkeypatch.setattr(importlib.metadata, "distribution", distribution)
        assert bitcode.find_bitcode("sm_90").parent == wheel
        (wheel / "libnvshmem_device.bc").rename(wheel / "other.bc")
        assert bitcode.find_bitcode("sm_90").parent == system

    @pytest.mark.parametrize("arch", ["90", "sm90", "sm_9", "compute_90", "sm_90a"])
    def test_architecture_names(self, arch: str) -> None:
        with pytest.raises(ValueError, match="expected sm_ and two or three digits"):
            bitcode.find_bitcode(arch)
