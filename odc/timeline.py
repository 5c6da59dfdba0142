"""What one rank has done: counters, and spans on a clock that every rank of a host shares.

:class:`Stats` is always kept. A :class:`Timeline` costs one ``None`` check per operation while it is off. Switched on,
it keeps spans, from which the bubble rate is measured, the per-rank picture is drawn and a Chrome/Perfetto trace is
written (:mod:`odc.bench.training.trace`, which also says what an event of it has).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from odc.errors import OUR_FAULT


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


# What a span can be. "wait" spans lie inside the operation that waited; "minibatch" spans enclose all others of
# their minibatch, so that compute is what no other kind covers.
KINDS = ("minibatch", "phase", "gather", "scatter", "wait", "publish", "read", "finish")


@dataclass(frozen=True, slots=True)
class Span:
    """One interval of one rank: ``kind`` is one of :data:`KINDS`; times are ``time.monotonic_ns()``."""

    kind: str
    label: str
    start_ns: int
    end_ns: int
    minibatch: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What else is known of it: ``bytes`` of a "gather" (all shards of the unit), "scatter" (the whole gradient),
    "publish" (what was written) and "read"; ``peer`` of a "wait", but in collectives: the global rank that was awaited
    last; ``microbatch`` of a "phase" that is one."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


class Timeline:
    """Spans of one rank, in the order in which they ended.

    ``minibatch`` numbers the spans that end from now on; the training loop sets it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.minibatch = 0
        self.spans: list[Span] = []

    def record(self, kind: str, label: str, start_ns: int, end_ns: int | None = None, **arguments: Any) -> None:
        """Add a span that started at ``start_ns`` and ends now (or at ``end_ns``); ``arguments``: as JSON has them."""
        if kind not in KINDS:
            raise ValueError(f"unknown span kind {kind!r}: expected one of {', '.join(KINDS)}. {OUR_FAULT}")
        end = time.monotonic_ns() if end_ns is None else end_ns
        self.spans.append(Span(kind, label, start_ns, end, self.minibatch, arguments))

    @contextmanager
    def span(self, kind: str, label: str, **arguments: Any) -> Iterator[None]:
        """Record the body of a ``with`` block, also when it raises."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.record(kind, label, start, **arguments)

    def save(self, path: str | Path) -> None:
        """Write ``{"rank": int, "spans": [[kind, label, start_ns, end_ns, minibatch, arguments], ...]}``."""
        rows = [list(asdict(span).values()) for span in self.spans]
        Path(path).write_text(json.dumps({"rank": self.rank, "spans": rows}))

    @classmethod
    def load(cls, path: str | Path) -> Timeline:
        """Read what :meth:`save` wrote."""
        data = json.loads(Path(path).read_text())
        timeline = cls(int(data["rank"]))
        timeline.spans = [Span(*row) for row in data["spans"]]
        return timeline
