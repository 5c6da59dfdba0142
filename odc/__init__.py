"""ODC: on-demand communication for sharded LLM training.

Replaces the collectives of FSDP by one-sided ``gather`` and ``scatter_accumulate`` with one synchronization per
minibatch, so that ranks may run different numbers of microbatches. Importing it has no side effects and needs neither
a GPU nor Triton nor NVSHMEM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from odc._version import __version__
from odc.config import RuntimeConfig
from odc.errors import (
    AbortedError,
    ConfigError,
    OdcError,
    PeerClosedError,
    PeerDiedError,
    PeerSilentError,
    ProtocolError,
    SetupError,
    UnsupportedError,
)
from odc.runtime import Runtime
from odc.units import ParamSlice, UnitSpec

if TYPE_CHECKING:
    from odc.fsdp_patch import Session, patch_fsdp

__all__ = [
    "AbortedError",
    "ConfigError",
    "OdcError",
    "ParamSlice",
    "PeerClosedError",
    "PeerDiedError",
    "PeerSilentError",
    "ProtocolError",
    "Runtime",
    "RuntimeConfig",
    "Session",
    "SetupError",
    "UnitSpec",
    "UnsupportedError",
    "__version__",
    "patch_fsdp",
]


def __getattr__(name: str) -> Any:
    # The patch is the only room that knows torch.distributed.fsdp; it is loaded when it is asked for.
    if name in ("patch_fsdp", "Session"):
        import odc.fsdp_patch

        return getattr(odc.fsdp_patch, name)
    raise AttributeError(f"module 'odc' has no attribute {name!r}")
