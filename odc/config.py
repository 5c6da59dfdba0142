"""Configuration: one frozen dataclass, and the only place that reads environment variables.

Precedence: an environment variable wins over the argument, the argument over the default. (The person who runs a
job can thus change a limit without editing the script that somebody else wrote.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from odc.errors import ConfigError

TIMEOUT = "ODC_TIMEOUT"  # seconds without progress after which a wait fails
FAULT = "ODC_FAULT"  # fault injection, see odc/faults.py
HOST_ID = "ODC_HOST_ID"  # pretend to be another host (tests)
TRANSPORT = "ODC_TRANSPORT"  # overrides transport=
ACCUMULATE = "ODC_ACCUMULATE"  # overrides accumulate=

ACCUMULATE_MODES = ("auto", "direct", "daemon")
ACCUMULATE_DTYPES = (torch.float32, torch.float64)


@dataclass(frozen=True)
class RuntimeConfig:
    """Options of one runtime. The same on every rank; set-up compares them."""

    transport: str = "auto"
    """Name of a registered transport, or "auto": the first one that works for all ranks."""

    accumulate: str = "auto"
    """"direct": the client adds into the owner's accumulator; "daemon": a thread of the owner does; "auto": the
    faster one for the transport."""

    accumulate_dtype: torch.dtype = torch.float32
    """dtype of the accumulators: float32 or float64. Sums in a 16-bit dtype would depend on arrival order."""

    deterministic: bool = False
    """Bit-equal gradients whatever the timing, for one more full gradient of memory per rank."""

    timeout_s: float = 600.0
    """Seconds without progress of the awaited rank after which a wait raises."""

    fault: str = ""
    """Fault to inject, see :mod:`odc.faults`. May differ between ranks."""

    host_id: str = ""
    """Replaces the detected host identity if not empty. May differ between ranks."""

    def __post_init__(self) -> None:
        if self.accumulate not in ACCUMULATE_MODES:
            raise _bad_option("accumulate", self.accumulate, f"one of {', '.join(ACCUMULATE_MODES)}")
        if self.accumulate_dtype not in ACCUMULATE_DTYPES:
            raise _bad_option("accumulate_dtype", self.accumulate_dtype, "torch.float32 or torch.float64")
        if not (isinstance(self.timeout_s, (int, float)) and 0 < self.timeout_s < math.inf):
            raise _bad_option("timeout_s", self.timeout_s, "a number of seconds greater than 0")

    @classmethod
    def from_environment(
        cls,
        *,
        transport: str = "auto",
        accumulate: str = "auto",
        accumulate_dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        timeout_s: float = 600.0,
        environ: Mapping[str, str] | None = None,
    ) -> RuntimeConfig:
        """The arguments, overridden by the ``ODC_*`` variables of ``environ`` (default: the process's own).

        Raises:
            ConfigError: a variable or an argument has a value that cannot be used.
        """
        env = os.environ if environ is None else environ
        return cls(
            transport=env.get(TRANSPORT, transport),
            accumulate=env.get(ACCUMULATE, accumulate),
            accumulate_dtype=accumulate_dtype,
            deterministic=deterministic,
            timeout_s=_read_seconds(env, TIMEOUT, timeout_s),
            fault=env.get(FAULT, ""),
            host_id=env.get(HOST_ID, ""),
        )

    def shared(self) -> dict[str, str]:
        """The options that must be the same on every rank, as text."""
        return {
            "transport": self.transport,
            "accumulate": self.accumulate,
            "accumulate_dtype": str(self.accumulate_dtype),
            "deterministic": str(self.deterministic),
        }


def _read_seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise _bad_option(name, text, "a number of seconds") from None


def _bad_option(option: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{option}={value!r} cannot be used: expected {expected}")
