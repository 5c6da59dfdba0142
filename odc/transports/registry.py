"""Transports by name. A named transport that cannot work is an error; "auto" tries the next one."""

from __future__ import annotations

import importlib
import re

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
_PLACE = re.compile(r"\w+(\.\w+)*:\w+")


def names() -> list[str]:
    """The transports of this package."""
    return list(_LOCATIONS)


def load(name: str) -> type[Transport]:
    """The class of a transport: one of this package by its name, any other as ``"package.module:Class"``.

    Raises:
        ConfigError: there is no such module or class, or it is not a `Transport`.
    """
    check_name(name)
    location = _LOCATIONS.get(name, name)
    module, _, attribute = location.partition(":")
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"transport={name!r} cannot be loaded: {error}. Expected a class as package.module:Class, in a module that "
            f"every rank can import"
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Transport)):
        raise ConfigError(f"transport={name!r}: expected a subclass of odc.transports.base.Transport, got {cls!r}")
    return cls


def check_name(name: str) -> None:
    """Whether a transport may have this name: "auto", one of this package, or a place as ``"package.module:Class"``.

    Raises:
        ConfigError: it may not.
    """
    if name != "auto" and name not in _LOCATIONS and not _PLACE.fullmatch(name):
        raise ConfigError(
            f"transport={name!r} is unknown: expected auto, one of {', '.join(_LOCATIONS)}, or a class of yours as "
            f"package.module:Class"
        )


def choose(name: str, topology: Topology, device: torch.device, exchange: Exchange | None = None) -> type[Transport]:
    """The transport called ``name``, or the first available one for "auto".

    Args:
        exchange: asks all ranks, so that all choose the same one; None: only this rank counts.

    Raises:
        ConfigError: no transport has this name.
        SetupError: the named transport (or, for "auto", every transport) cannot be loaded or cannot serve this group;
            with reasons.
    """
    check_name(name)
    refused = []
    for candidate in _LOCATIONS if name == "auto" else [name]:
        try:
            cls = load(candidate)
            reason = cls.unavailable(topology, device)
        except ConfigError as error:  # the others are told, as they ask this rank
            reason = str(error)
        reason = _first_reason(reason, exchange)
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
