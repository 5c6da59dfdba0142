"""Transports by name: loud when the user named one, quiet when it was "auto"."""

from __future__ import annotations

import importlib

import torch

from odc.errors import ConfigError, SetupError
from odc.setup.agreement import Exchange, gather_json
from odc.setup.topology import Topology
from odc.transports.base import Transport

# In the order in which "auto" tries them. Classes are imported on use: a transport may need libraries that are
# not installed.
_LOCATIONS = {
    "shm": "odc.transports.shm:ShmTransport",
    "tcp": "odc.transports.tcp:TcpTransport",
    "cuda_ipc": "odc.transports.cuda_ipc:CudaIpcTransport",
    "nvshmem": "odc.transports.nvshmem:NvshmemTransport",
}


def names() -> list[str]:
    """The registered transports."""
    return list(_LOCATIONS)


def register(name: str, location: str) -> None:
    """Add a transport, as ``"module:Class"``. It is tried after the ones already there."""
    _LOCATIONS[name] = location


def load(name: str) -> type[Transport]:
    """The class of a registered transport."""
    module, _, attribute = _LOCATIONS[name].partition(":")
    cls = getattr(importlib.import_module(module), attribute)
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise ConfigError(f"transport {name!r}: {_LOCATIONS[name]} is not a Transport")
    return cls


def check_name(name: str) -> None:
    """Whether a transport has this name, or it is "auto".

    Raises:
        ConfigError: neither.
    """
    if name != "auto" and name not in _LOCATIONS:
        raise ConfigError(f"transport={name!r} is unknown: expected auto or one of {', '.join(_LOCATIONS)}")


def choose(name: str, topology: Topology, device: torch.device, exchange: Exchange | None = None) -> type[Transport]:
    """The transport called ``name``, or the first available one for "auto".

    Args:
        exchange: asks all ranks, so that all choose the same one; None: only this rank counts.

    Raises:
        ConfigError: no transport has this name.
        SetupError: the named transport (or, for "auto", every transport) cannot serve this group; with reasons.
    """
    check_name(name)
    refused = []
    for candidate in _LOCATIONS if name == "auto" else [name]:
        cls = load(candidate)
        reason = _first_reason(cls.unavailable(topology, device), exchange)
        if reason is None:
            return cls
        refused.append(f"{candidate}: {reason}")
    raise SetupError(f"no transport can serve this group of {topology.world_size} ranks. " + "; ".join(refused))


def _first_reason(reason: str | None, exchange: Exchange | None) -> str | None:
    """Why the first rank that cannot use a transport cannot; the rank is named where others can."""
    by_rank = [reason] if exchange is None else gather_json(exchange, reason)
    found = {rank: str(text) for rank, text in enumerate(by_rank) if text is not None}
    if not found:
        return None
    rank, text = next(iter(found.items()))
    if exchange is None or len(found) == len(by_rank):
        return text
    return f"on rank {exchange.global_ranks[rank]}: {text}"
