"""What one rank does: counters, per-minibatch statistics, and spans on a clock that all ranks of a host share.

:class:`Stats` are always counted, and :class:`MinibatchStats` are made at the end of each minibatch. A
:class:`Timeline` that is off costs one ``None`` check per operation. If it is on, it stores spans, from which ODC
measures the bubble rate, draws a picture of all ranks and writes a Chrome/Perfetto trace
(:mod:`odc.bench.training.bubble` describes its events).
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
    """Counters of this rank since the model was patched. Seconds are wall-clock time, bytes are payload.

    Example:
        >>> before = session.stats()
        >>> loss(model, minibatches[0][0]).backward()
        >>> session.finish()
        >>> session.stats().since(before).pushes > 0
        True
    """

    minibatches: int = 0
    gathers: int = 0
    gather_bytes: int = 0
    gather_s: float = 0.0
    """Time in gathers, including waits for owners."""
    pushes: int = 0
    push_bytes: int = 0
    push_s: float = 0.0
    """Time in scatter_accumulate, including waits for locks and slots."""
    publish_bytes: int = 0
    publish_s: float = 0.0
    finish_s: float = 0.0
    """Time at the ends of minibatches, including waits for other ranks."""
    waits: int = 0
    wait_s: float = 0.0
    """Time blocked until another rank did something; part of the times above."""
    waited_for_s: dict[int, float] = field(default_factory=dict)
    """``wait_s`` by the global rank that was awaited last. Waits in collectives are not attributed to a rank."""

    def add_wait(self, seconds: float, whom: int | None) -> None:
        """Add a wait of this rank. ``whom`` is the rank that was awaited last; None: unknown."""
        self.waits += 1
        self.wait_s += seconds
        if whom is not None:
            self.waited_for_s[whom] = self.waited_for_s.get(whom, 0.0) + seconds

    @property
    def communication_s(self) -> float:
        """Wall-clock seconds inside ODC's operations, including waits."""
        return self.gather_s + self.push_s + self.publish_s + self.finish_s

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def since(self, before: Stats) -> Stats:
        """The counters since ``before``, an earlier copy. ``since(Stats())`` is a copy of the current counters."""
        known = before.waited_for_s
        new = {rank: seconds - known.get(rank, 0.0) for rank, seconds in dict(self.waited_for_s).items()}
        numbers = {name: now - getattr(before, name) for name, now in vars(self).items() if name != "waited_for_s"}
        return Stats(**numbers, waited_for_s={rank: seconds for rank, seconds in new.items() if seconds > 0})


@dataclass(frozen=True)
class MinibatchStats:
    """One minibatch, from the end of the previous one to its own end. All ranks meet at these ends.

    Seconds are measured by the hosts' clocks. If a script never waits for its GPU, compute time is the time in which
    the host launches the work.

    Example:
        >>> remove = session.on_minibatch(lambda last: print(last.microbatches == len(minibatches[0])))
        >>> for microbatch in minibatches[0]:
        ...     loss(model, microbatch).backward()
        >>> optimizer.step()
        True
        >>> remove()
        >>> sorted(session.last_minibatch.metrics())
        ['odc/bubble_rate', 'odc/slowest_rank', 'odc/waiting_s']
    """

    number: int
    """Number of the minibatch, from 1, as in error messages. Publishing parameters again between steps also counts as
    one."""
    seconds: float
    """Seconds, including the optimizer step, data loading and evaluations since the previous end."""
    microbatches: int
    """Of this rank."""
    done: Stats
    """Counters of this rank in this minibatch."""
    compute_s: Mapping[int, float]
    """Seconds outside of ODC's operations, by global rank, for all ranks that train the model."""

    @property
    def bubble_rate(self) -> float:
        """The overhead rate: the fraction of all ranks' time, from 0 to 1, that was not compute, but waits and ODC's
        transfers. In plans and benchmarks the bubble rate is waiting alone."""
        return max(0.0, 1 - sum(self.compute_s.values()) / (len(self.compute_s) * self.seconds))

    @property
    def slowest_rank(self) -> int:
        """The global rank that computed longest. The others wait for it at the end."""
        return max(self.compute_s, key=self.compute_s.__getitem__)

    def metrics(self) -> dict[str, float]:
        """Values for a logger: the overhead rate, the seconds that this rank waited for others, the slowest rank."""
        return {
            "odc/bubble_rate": self.bubble_rate,
            "odc/waiting_s": self.done.wait_s,
            "odc/slowest_rank": self.slowest_rank,
        }

    def __str__(self) -> str:
        slowest, least_s = self.slowest_rank, min(self.compute_s.values())
        return (
            f"minibatch {self.number}: {self.seconds:.2f} s, overhead {100 * self.bubble_rate:.0f} %, rank {slowest} "
            f"computed longest ({self.compute_s[slowest]:.2f} s, the least {least_s:.2f} s)"
        )


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
    """Further facts: ``bytes`` of a "gather" (all shards of the unit), "scatter" (the whole gradient), "publish" and
    "read"; ``peer`` of a "wait" outside of collectives, the global rank that was awaited last; ``microbatch`` of a
    "phase" that is a microbatch."""

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


class Timeline:
    """Spans of one rank, ordered by their end.

    Spans get the current value of ``minibatch``, which the training loop sets.

    Example:
        >>> timeline = session.start_timeline()
        >>> loss(model, minibatches[0][0]).backward()
        >>> session.finish()
        >>> "gather" in {span.kind for span in timeline.spans}
        True
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.minibatch = 0
        self.spans: list[Span] = []

    def record(self, kind: str, label: str, start_ns: int, end_ns: int | None = None, **arguments: Any) -> None:
        """Add a span from ``start_ns`` to ``end_ns`` (default: now). ``arguments`` must be values that JSON has."""
        if kind not in KINDS:
            raise ValueError(f"unknown span kind {kind!r}: expected one of {', '.join(KINDS)}. {OUR_FAULT}")
        end = time.monotonic_ns() if end_ns is None else end_ns
        self.spans.append(Span(kind, label, start_ns, end, self.minibatch, arguments))

    @contextmanager
    def span(self, kind: str, label: str, **arguments: Any) -> Iterator[None]:
        """Record the body of a ``with`` block as a span, also if it raises."""
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
