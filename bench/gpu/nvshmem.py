"""Check ``nvshmem``: the checks of a transport's memory, order and protocol, for the transport of that name.

On one host, where NVSHMEM maps its heap; what goes through a network card needs two hosts: bench/slurm.
"""

from __future__ import annotations

from dataclasses import replace

from odc.bench.gpu import protocol, soak, transport
from odc.bench.gpu.setting import Report, Setting
from odc.bench.harness.ranks import NotRunError
from odc.config import nvshmem_heap_bytes, set_nvshmem_heap_bytes
from odc.transports import registry

NAME = "nvshmem"
_SOAK_MINIBATCHES = 200
_HEAP_BYTES = 8 << 30  # it is never given back, and a check makes a runtime per case


def why_not(setting: Setting) -> str | None:
    """Why NVSHMEM cannot be checked here, or None."""
    if NAME not in registry.names():
        return "this version has no transport of that name"
    if not setting.owns_gpus(min(setting.worlds)):
        return f"needs a GPU per rank: {setting.num_gpus} for {min(setting.worlds)} ranks (several share one under MPS)"
    return None


def check(setting: Setting) -> Report:
    reason = why_not(setting)
    if reason is not None:
        raise NotRunError(reason)
    worlds = tuple(world for world in setting.worlds if setting.owns_gpus(world))
    minibatches = min(setting.minibatches, _SOAK_MINIBATCHES)
    chosen = replace(setting, transport=NAME, worlds=worlds, minibatches=minibatches, quick=True)
    if nvshmem_heap_bytes() is None:
        set_nvshmem_heap_bytes(_HEAP_BYTES)
    parts = {module.__name__.rpartition(".")[2]: module.check(chosen) for module in (transport, protocol, soak)}
    text = f"memory, order, protocol and soak on {', '.join(map(str, worlds))} ranks"
    return Report(text, {name: report.data for name, report in parts.items()})
