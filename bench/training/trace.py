"""A Chrome/Perfetto trace of several runs: one process per configuration, one thread per rank.

Each event is something that a rank did (``cat`` is its kind, one of :data:`odc.timeline.KINDS`, or "compute": what no
other kind covers of a minibatch), with what is known of it in ``args``:

========== ============================================ ================================================
argument   of                                           what it is
========== ============================================ ================================================
minibatch  all                                          its number, from 0, warm-up included
microbatch all inside one                               its number on this rank, from 0
unit       gather, scatter, publish                     the FSDP unit
bytes      gather, scatter, publish                     of the whole unit; of a publish, those written
peer       wait                                         the rank that was awaited last; not of a collective
========== ============================================ ================================================

Where ranks wait in FSDP's collectives is worked out (:mod:`odc.bench.training.bubble`): "wait for ranks".
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from odc.bench.training.bubble import Recording, Segment
from odc.timeline import Span

_OF_UNITS = ("gather", "scatter", "publish")
_NAMED = ("minibatch", "phase")  # by their labels


def write_trace(path: Path, runs: Mapping[str, Recording]) -> None:
    """Open the file at ui.perfetto.dev or in chrome://tracing. Every run starts at time 0."""
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
