"""A check says a status, what it found, and what to do about that."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import partial


class Status(str, enum.Enum):
    """How well one thing serves ODC."""

    OK = "ok"
    WARNING = "warning"
    """Works, but slower, less far or untested."""
    MISSING = "missing"
    """Not here, and this machine could use it; CPU training works without."""
    NOT_NEEDED = "not needed"
    ERROR = "error"
    """Something is refused until this is put right: CPU training, or what the row is about."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``advice`` is empty where there is nothing to do."""

    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Row:
    """A finding under the name of its check. ``gpus_only``: CPU training has nothing to do with it."""

    check: str
    finding: Finding
    gpus_only: bool = False

    def to_json(self) -> dict[str, str]:
        """``check``, ``status``, ``found`` and ``advice``, as text."""
        finding = self.finding
        return {"check": self.check, "status": finding.status.value, "found": finding.found, "advice": finding.advice}


ok, warning, missing, not_needed, error = (partial(Finding, status) for status in Status)


def absent(fix: str, *, has_gpu: bool, found: str = "not installed") -> Finding:
    """What only GPUs need is not here; ``fix``: what to do about it where there is one."""
    return missing(found, fix) if has_gpu else not_needed(f"{found}; no CUDA device")
