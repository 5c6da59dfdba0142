"""A platform of verl's for CPUs, in place of what it would take of a GPU. Imported before verl's engines are.

verl imports it by itself where ``VERL_USE_EXTERNAL_MODULES`` names it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from torch.distributed.fsdp import FullyShardedDataParallel
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import set_platform


class CpuPlatform(PlatformBase):  # type: ignore[misc]
    """Device "cpu", gloo, no allocator, no profiler."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = SimpleNamespace(
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        is_available=lambda: False,
        max_memory_allocated=lambda: 0,
        max_memory_reserved=lambda: 0,
        memory_allocated=lambda: 0,
        memory_reserved=lambda: 0,
        mem_get_info=lambda: (1, 1),
        get_device_name=lambda: "CPU",
        set_device=lambda _: None,
        set_rng_state=lambda _: None,
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None: ...

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def cudart(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def is_ipc_supported(self) -> bool:
        return False


_meet = torch.distributed.init_process_group


def meet(backend: str, **options: Any) -> None:
    """verl names a backend for CPUs and one for its device, which are the same here."""
    _meet("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **options)


torch.distributed.init_process_group = meet  # type: ignore[assignment]
os.environ["VERL_ENGINE_DEVICE"] = "cuda"  # engines are registered by device; FSDP's is the same for all
set_platform(CpuPlatform())


def enter_engine() -> None:
    """What verl's engine asks of GPUs by name."""
    heads: Any = importlib.import_module("transformers").AutoModelForTokenClassification
    from_pretrained = heads.from_pretrained  # critics have flash attention, whatever the configuration says
    heads.from_pretrained = lambda *args, **kwargs: from_pretrained(*args, **{**kwargs, "attn_implementation": "sdpa"})
    # FSDP1 broadcasts the parameters of rank 0, which torch wants on a GPU.
    wrapping: Any = importlib.import_module("torch.distributed.fsdp._init_utils")
    wrapping._check_module_states_for_sync_module_states = lambda states: None
    engine: Any = importlib.import_module("verl.workers.engine.fsdp.transformer_impl")
    load = engine.load_fsdp_model_to_gpu  # of FSDP1 to a numbered device

    def loaded(module: torch.nn.Module) -> None:
        if not isinstance(module, FullyShardedDataParallel):
            load(module)

    engine.load_fsdp_model_to_gpu = loaded
    offload = engine.CPUOffloadPolicy  # of reference models
    engine.CPUOffloadPolicy = lambda **_: offload(pin_memory=False)
