"""Which transport a runtime would choose here, by the registry's own rules."""

from __future__ import annotations

import os

from odc.doctor.finding import Finding, error, missing, not_needed, ok, warning


def _choose(device: str, transport: str) -> str:
    """The transport that two ranks of this host would get.

    Raises:
        ConfigError, SetupError: none; the message has the reasons.
    """
    import torch

    from odc.topology import Topology
    from odc.transports import registry

    host, pid = os.uname().nodename, os.getpid()
    topology = Topology(0, (host, host), (host, host), (pid, pid))
    return registry.choose(transport, topology, torch.device(device)).name


def variables() -> Finding:
    """Whether the ODC_* variables have values that can be used."""
    from odc.config import RuntimeConfig
    from odc.errors import ConfigError
    from odc.faults import FaultSpec

    try:
        config = RuntimeConfig.from_environment()
        if config.fault:
            FaultSpec.parse(config.fault)
    except ConfigError as problem:
        return error(str(problem), "Correct the variable, or unset it.")
    if config.fault:
        return warning(f"ODC_FAULT={config.fault}: a fault will be injected", "unset ODC_FAULT")
    if config.host_id:
        return warning(f"ODC_HOST_ID={config.host_id}: ranks pose as another host", "unset ODC_HOST_ID")
    return ok(f"transport={config.transport}, accumulate={config.accumulate}, timeout {config.timeout_s:g} s")


def for_cpu() -> Finding:
    """What CPU ranks of this host would use."""
    from odc.config import RuntimeConfig
    from odc.errors import OdcError

    try:
        return ok(_choose("cpu", RuntimeConfig.from_environment().transport))
    except OdcError as problem:
        return error(str(problem), "See the rows above; unset ODC_TRANSPORT if it is set.")


def for_cuda(*, has_gpu: bool) -> Finding:
    """What CUDA ranks of this host would use; nothing but a transport's own word for it is asked."""
    from odc.errors import OdcError

    if not has_gpu:
        return not_needed("no CUDA device")
    try:
        return ok(_choose("cuda", "auto"))
    except OdcError as problem:
        return missing(str(problem), "See the rows above on cupy, NVSHMEM and the devices.")
