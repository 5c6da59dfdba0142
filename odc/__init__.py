"""ODC: on-demand communication for sharded LLM training.

Replaces the collectives of FSDP by one-sided ``gather`` and ``scatter_accumulate`` with one synchronization per
minibatch, so that ranks may run different numbers of microbatches. Importing it has no side effects and needs neither
a GPU nor Triton nor NVSHMEM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc._lazy import lazy
from odc._version import __version__

if TYPE_CHECKING:
    from odc.config import RuntimeConfig
    from odc.errors import (
        AbortedError,
        ConfigError,
        MisuseError,
        OdcError,
        PeerClosedError,
        PeerDiedError,
        PeerSilentError,
        ProtocolError,
        SetupError,
        UnsupportedError,
    )
    from odc.fsdp_patch import Session, patch_fsdp, session_of, step_by_unit
    from odc.items.channel import ItemStats
    from odc.items.item_exchange import ItemExchange
    from odc.items.rounds import Round
    from odc.items.routes import Item
    from odc.minibatch.runtime import Runtime
    from odc.timeline import MinibatchStats, Stats, Timeline
    from odc.units import ParamSlice, UnitSpec

__all__ = [
    "AbortedError",
    "ConfigError",
    "Item",
    "ItemExchange",
    "ItemStats",
    "MinibatchStats",
    "MisuseError",
    "OdcError",
    "ParamSlice",
    "PeerClosedError",
    "PeerDiedError",
    "PeerSilentError",
    "ProtocolError",
    "Round",
    "Runtime",
    "RuntimeConfig",
    "Session",
    "SetupError",
    "Stats",
    "Timeline",
    "UnitSpec",
    "UnsupportedError",
    "__version__",
    "patch_fsdp",
    "session_of",
    "step_by_unit",
]

# Loaded on first use: odc.balance needs numpy only, and should not pay for torch; nobody should pay for FSDP before
# patching it.
_HOMES = {
    "AbortedError": "odc.errors",
    "ConfigError": "odc.errors",
    "Item": "odc.items.routes",
    "ItemExchange": "odc.items.item_exchange",
    "ItemStats": "odc.items.channel",
    "MinibatchStats": "odc.timeline",
    "MisuseError": "odc.errors",
    "OdcError": "odc.errors",
    "ParamSlice": "odc.units",
    "PeerClosedError": "odc.errors",
    "PeerDiedError": "odc.errors",
    "PeerSilentError": "odc.errors",
    "ProtocolError": "odc.errors",
    "Round": "odc.items.rounds",
    "Runtime": "odc.minibatch.runtime",
    "RuntimeConfig": "odc.config",
    "Session": "odc.fsdp_patch",
    "SetupError": "odc.errors",
    "Stats": "odc.timeline",
    "Timeline": "odc.timeline",
    "UnitSpec": "odc.units",
    "UnsupportedError": "odc.errors",
    "patch_fsdp": "odc.fsdp_patch",
    "session_of": "odc.fsdp_patch",
    "step_by_unit": "odc.fsdp_patch",
}

__getattr__, __dir__ = lazy(__name__, _HOMES, __all__)
