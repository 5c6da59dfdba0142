"""How ranks spent their time, and the bubble rate: idle time over total time, measured from timelines.

Idle time means the same for both kinds of communication, waiting for another rank:

- With ODC the runtime records its waits. Every "wait" span is idle time.
- A collective does not say how long it waited. But the i-th collective of a minibatch is the same one on every rank,
  and it cannot end before the last rank has joined it. So a rank idles from its own start to the last rank's start; the
  rest is transfer. The all-reduce of the loss, which both kinds have, is treated in the same way.

Not counted: the all-reduce inside ``clip_grad_norm_``. The ranks have just met when it runs.

The second half of this module writes a Chrome/Perfetto trace of several runs, with one process per configuration and
one thread per rank.

Each event of the trace is something that a rank did. ``cat`` is its kind, one of :data:`odc.timeline.KINDS`, or
"compute" for the time of a minibatch that no other kind covers. ``args`` has further facts:

========== ============================================ ================================================
argument   of                                           what it is
========== ============================================ ================================================
minibatch  all                                          its number, from 0, warm-up included
microbatch all inside one                               its number on this rank, from 0
unit       gather, scatter, publish                     the FSDP unit
bytes      gather, scatter, publish                     of the whole unit; of a publish, those written
peer       wait                                         the rank that was awaited last; not of a collective
========== ============================================ ================================================

Waits in FSDP's collectives are computed as above. The trace shows them as "wait for ranks".
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc.timeline import Span, Timeline

# From the strongest to the weakest: where spans overlap, time belongs to the first of them. "other" is
# publishing shards and taking gradients in.
ACTIVITIES = ("wait", "gather", "scatter", "other", "compute")
_ACTIVITY_OF_KIND = {
    "wait": "wait",
    "gather": "gather",
    "read": "gather",
    "scatter": "scatter",
    "publish": "other",
    "finish": "other",
    "minibatch": "compute",
    "phase": "compute",
}
LOSS_LABEL = "loss"


@dataclass(frozen=True)
class Segment:
    """A stretch of one rank's time that belongs to one activity."""

    activity: str
    start_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) * 1e-9


def segments(timelines: Sequence[Timeline], minibatches: Collection[int], *, collectives: bool) -> list[list[Segment]]:
    """The time of each rank within its "minibatch" spans, cut into activities; the rest is compute.

    Args:
        timelines: one for each rank, of one run on one host.
        minibatches: numbers of the minibatches to look at.
        collectives: whether gathers and scatters were collectives.

    Raises:
        ValueError: a rank has no such minibatch, or ranks have different collectives in one.
    """
    chosen = [[span for span in t.spans if span.minibatch in minibatches] for t in timelines]
    for timeline, spans in zip(timelines, chosen, strict=True):
        found = {span.minibatch for span in spans if span.kind == "minibatch"}
        if missing := set(minibatches) - found:
            raise ValueError(f"rank {timeline.rank} has no minibatch span for minibatches {sorted(missing)}")
    idle = _idle_in_collectives(chosen, collectives)
    together = (
        [(_ACTIVITY_OF_KIND[span.kind], span) for span in spans + waits]
        for spans, waits in zip(chosen, idle, strict=True)
    )
    return [list(cut(spans, ACTIVITIES)) for spans in together]


@dataclass(frozen=True)
class Recording:
    """What the ranks of one run, on one host, have recorded."""

    timelines: Sequence[Timeline]
    collectives: bool = False
    """Whether gathers and scatters were collectives."""

    @classmethod
    def read(cls, folder: Path, *, collectives: bool = False) -> Recording:
        """Read the timelines that ranks have saved in the folder as ``timeline-rank<number>.json``."""
        found = [Timeline.load(path) for path in folder.glob("timeline-rank*.json")]
        return cls(sorted(found, key=lambda timeline: timeline.rank), collectives)

    @property
    def minibatches(self) -> list[int]:
        """The minibatches that all ranks have."""
        of_ranks = [{span.minibatch for span in one.spans if span.kind == "minibatch"} for one in self.timelines]
        return sorted(set.intersection(*of_ranks)) if of_ranks else []

    def segments(self, minibatches: Collection[int]) -> list[list[Segment]]:
        """See :func:`segments`."""
        return segments(self.timelines, minibatches, collectives=self.collectives)


def spent_ns(ranks: Sequence[Sequence[Segment]]) -> Counter[str]:
    """All ranks' time by activity."""
    spent: Counter[str] = Counter()
    for rank in ranks:
        for segment in rank:
            spent[segment.activity] += segment.end_ns - segment.start_ns
    return spent


def shares(ranks: Sequence[Sequence[Segment]]) -> dict[str, float]:
    """The part of all ranks' time that went into each of :data:`ACTIVITIES`; "wait" is the bubble rate.

    Raises:
        ValueError: there is no time to share.
    """
    spent = spent_ns(ranks)
    total = spent.total()
    if total == 0:
        raise ValueError("the timelines hold no time in these minibatches")
    return {activity: spent[activity] / total for activity in ACTIVITIES}


def bubble_rate(timelines: Sequence[Timeline], minibatches: Collection[int], *, collectives: bool) -> float:
    """Idle time over total time of all ranks in these minibatches, from 0 to 1. See :func:`segments`."""
    return shares(segments(timelines, minibatches, collectives=collectives))["wait"]


def _idle_in_collectives(ranks: Sequence[Sequence[Span]], collectives: bool) -> list[list[Span]]:
    """For each rank the "wait" spans from its own start of a collective to the last rank's start of it."""
    found = ([span for span in spans if _is_collective(span, collectives)] for spans in ranks)
    joined = [sorted(spans, key=lambda span: (span.minibatch, span.start_ns)) for spans in found]
    names = [[(span.minibatch, span.kind, span.label) for span in spans] for spans in joined]
    for rank, own in enumerate(names):
        if own != names[0]:
            raise ValueError(
                f"ranks 0 and {rank} have different collectives ({len(names[0])} and {len(own)}): cannot match them"
            )
    idle: list[list[Span]] = [[] for _ in ranks]
    for same in zip(*joined, strict=True):
        last_start = max(span.start_ns for span in same)
        for waits, span in zip(idle, same, strict=True):
            end = min(last_start, span.end_ns)
            waits.append(Span("wait", span.label, span.start_ns, end, span.minibatch))
    return idle


def _is_collective(span: Span, collectives: bool) -> bool:
    if span.kind == "finish":
        return span.label == LOSS_LABEL
    return collectives and span.kind in ("gather", "scatter")


def cut(spans: Iterable[tuple[str, Span]], activities: Sequence[str]) -> Iterator[Segment]:
    """Sweep over the borders of all spans; between two borders the strongest open activity has the time.

    Args:
        spans: each with its activity.
        activities: the strongest first. Outside the last one, which encloses the others, time counts for nothing:
            loading data, or another minibatch's publishing.
    """
    borders = sorted(
        border for activity, span in spans for border in ((span.start_ns, 1, activity), (span.end_ns, -1, activity))
    )
    is_open: Counter[str] = Counter()
    running: Segment | None = None
    before = 0
    for time_ns, change, activity in borders:
        current = next((a for a in activities if is_open[a]), None) if is_open[activities[-1]] else None
        if current is not None and time_ns > before:
            if running and running.activity == current and running.end_ns == before:
                running = Segment(current, running.start_ns, time_ns)
            else:
                if running:
                    yield running
                running = Segment(current, before, time_ns)
        is_open[activity] += change
        before = time_ns
    if running:
        yield running


# The trace


_OF_UNITS = ("gather", "scatter", "publish")
_NAMED = ("minibatch", "phase")  # by their labels


def write_trace(path: Path, runs: Mapping[str, Recording]) -> None:
    """Write a trace. Open the file at ui.perfetto.dev or in chrome://tracing. Every run starts at time 0."""
    events: list[dict[str, Any]] = []
    for number, (name, run) in enumerate(runs.items(), 1):
        events.append(_name("process_name", number, 0, name))
        events.extend(_run_events(number, run))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _run_events(process: int, run: Recording) -> list[dict[str, Any]]:
    timelines, numbers = run.timelines, run.minibatches
    start_ns = min(span.start_ns for timeline in timelines for span in timeline.spans)
    cut = [run.segments([number]) for number in numbers]
    events: list[dict[str, Any]] = []
    for timeline, *minibatches in zip(timelines, *cut, strict=True):
        events.append(_name("thread_name", process, timeline.rank, f"rank {timeline.rank}"))
        phases = [span for span in timeline.spans if span.kind == "phase"]
        spans = list(timeline.spans)
        for number, segments in zip(numbers, minibatches, strict=True):
            mine = [span for span in phases if span.minibatch == number]
            spans += _compute(segments, mine, number)
            if run.collectives:  # they record no waits
                waits = (segment for segment in segments if segment.activity == "wait")
                spans += [Span("wait", "for ranks", wait.start_ns, wait.end_ns, number) for wait in waits]
        spans.sort(key=lambda span: (span.start_ns, -span.end_ns))  # what encloses comes first
        events.extend(_event(process, timeline.rank, span, start_ns, phases) for span in spans)
    return events


def _compute(segments: Sequence[Segment], phases: Sequence[Span], minibatch: int) -> list[Span]:
    """Cut where a microbatch begins or ends: events of one thread may lie inside each other, and not overlap."""
    borders = sorted({border for span in phases for border in (span.start_ns, span.end_ns)})
    found = []
    for segment in segments:
        if segment.activity == "compute":
            inside = [border for border in borders if segment.start_ns < border < segment.end_ns]
            for start_ns, end_ns in itertools.pairwise([segment.start_ns, *inside, segment.end_ns]):
                found.append(Span("compute", "", start_ns, end_ns, minibatch))
    return found


def _event(process: int, rank: int, span: Span, start_ns: int, phases: Sequence[Span]) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": process,
        "tid": rank,
        "cat": span.kind,
        "name": span.label if span.kind in _NAMED else f"{span.kind} {span.label}".strip(),
        "ts": (span.start_ns - start_ns) / 1e3,  # microseconds
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": _arguments(span, phases),
    }


def _arguments(span: Span, phases: Sequence[Span]) -> dict[str, Any]:
    found: dict[str, Any] = {"minibatch": span.minibatch, **span.arguments}
    if span.kind in _OF_UNITS:
        found["unit"] = span.label
    for phase in phases:
        if "microbatch" in phase.arguments and phase.start_ns <= span.start_ns and span.end_ns <= phase.end_ns:
            found["microbatch"] = phase.arguments["microbatch"]
    return found


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
