"""Transports by name: loud when the user named one, quiet when it was "auto"."""

from __future__ import annotations

import importlib

import torch

from odc.errors import ConfigError, SetupError
from odc.topology import Topology
from odc.transports.base import Transport

# In the order in which "auto" tries them. Classes are imported on use: a transport may need libraries that are
# not installed.
_LOCATIONS = {"shm": "odc.transports.shm:ShmTransport"}


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


def choose(name: str, topology: Topology, device: torch.device) -> type[Transport]:
    """The transport called ``name``, or the first available one for "auto".

    Raises:
        ConfigError: no transport has this name.
        SetupError: the named transport (or, for "auto", every transport) cannot serve this group; with reasons.
    """
    if name != "auto" and name not in _LOCATIONS:
        raise ConfigError(f"transport={name!r} is unknown: expected auto or one of {', '.join(_LOCATIONS)}")
    reasons = []
    for candidate in _LOCATIONS if name == "auto" else [name]:
        cls = load(candidate)
        reason = cls.unavailable(topology, device)
        if reason is None:
            return cls
        reasons.append(f"{candidate}: {reason}")
    raise SetupError(f"no transport can serve this group of {topology.world_size} ranks. " + "; ".join(reasons))
