"""The checks: what each proves, where its body is, how long it may take, and where it cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from odc.bench.gpu import nvshmem
from odc.bench.gpu.setting import Setting
from odc.bench.harness.benchmark import check_known


def _always(setting: Setting) -> str | None:
    return None


def _no_peers(setting: Setting) -> str | None:
    world_size = min(setting.worlds)
    if setting.owns_gpus(world_size):
        return None
    return f"needs a GPU per rank: {setting.num_gpus} for {world_size} ranks, so there is no link to measure"


def _none_shared(setting: Setting) -> str | None:
    if any(not setting.owns_gpus(world) for world in setting.worlds):
        return None
    return "every rank has a GPU of its own: see peer_bandwidth"


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    proves: str
    body: str
    """``"module:function"``, a :data:`~odc.bench.gpu.setting.Body`."""
    limit_s: float
    why_not: Callable[[Setting], str | None] = _always
    """Why it cannot run here, or None."""
    optional: bool = False
    """That it does not run here leaves nothing unproven: another check shows more."""


CHECKS = (
    Check("kernels", "kernels equal their plain-torch twins", "odc.bench.gpu.kernels:check", 900),
    Check("kernel_speed", "kernels move bytes as fast as copies", "odc.bench.gpu.kernel_speed:check", 600),
    Check("host_time", "what asking costs a host, with real layers", "odc.bench.gpu.host_time:check", 300),
    Check("overlap", "what transfers take from a matmul", "odc.bench.gpu.overlap:check", 300),
    Check("transport", "memory and order between processes", "odc.bench.gpu.transport:check", 600),
    Check("protocol", "random minibatches on real streams", "odc.bench.gpu.protocol:check", 1200),
    Check("soak", "no push is lost under uneven load", "odc.bench.gpu.soak:check", 1800),
    Check("uneven", "no device waits for a slower one", "odc.bench.gpu.uneven:check", 600),
    Check("items", "outputs of encoders move on real streams", "odc.bench.gpu.items:check", 600),
    Check("sft", "losses of FSDP1 and FSDP2 training", "odc.bench.gpu.sft:check", 900),
    Check("forms", "losses of further models and loops", "odc.bench.gpu.forms:check", 900),
    Check("late_binding", "microbatches bound by events of devices", "odc.bench.gpu.late_binding:check", 600),
    Check("no_host_sync", "hosts run ahead of their devices", "odc.bench.gpu.no_host_sync:check", 600),
    Check("synchronize_does_not_hang", "waiting for a device ends", "odc.bench.gpu.hangs:check", 600),
    Check(
        "bandwidth",
        "throughput of ranks that share a GPU",
        "odc.bench.gpu.bandwidth:check_shared",
        1200,
        _none_shared,
        optional=True,
    ),
    Check(
        "peer_bandwidth", "throughput between GPUs, NCCL beside", "odc.bench.gpu.bandwidth:check_peers", 1200, _no_peers
    ),
    Check("nvshmem", "the same over NVSHMEM", "odc.bench.gpu.nvshmem:check", 1800, nvshmem.why_not),
)


def select(names: Sequence[str] | None, checks: Sequence[Check] = CHECKS) -> list[Check]:
    """The named checks in the order of the list, or all of them.

    Raises:
        ValueError: a name is unknown.
    """
    check_known(only=(names, [check.name for check in checks]))
    return [check for check in checks if not names or check.name in names]
