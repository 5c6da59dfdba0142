"""Counters of one rank's runtime."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """What this rank has done since the runtime was created. Seconds are wall-clock, bytes are payload."""

    minibatches: int = 0
    gathers: int = 0
    gather_bytes: int = 0
    gather_s: float = 0.0
    """In gathers, waiting for owners included."""
    pushes: int = 0
    push_bytes: int = 0
    push_s: float = 0.0
    """In scatter_accumulate, waiting for locks and slots included."""
    publish_bytes: int = 0
    publish_s: float = 0.0
    finish_s: float = 0.0
    """At the ends of minibatches, waiting for the other ranks included."""
    waits: int = 0
    wait_s: float = 0.0
    """Blocked until another rank did something; part of the times above."""

    @property
    def communication_s(self) -> float:
        """Wall-clock seconds inside ODC's operations, waiting included."""
        return self.gather_s + self.push_s + self.publish_s + self.finish_s

    def as_dict(self) -> dict[str, float]:
        return asdict(self)
