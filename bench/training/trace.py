"""A Chrome/Perfetto trace of several runs: one process per configuration, one thread per rank."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odc.bench.training.runs import Run, read_timelines


def write_trace(path: Path, runs: Mapping[str, Run]) -> None:
    """Open the file at ui.perfetto.dev or in chrome://tracing. Every run starts at time 0."""
    events: list[dict[str, Any]] = []
    for number, (name, run) in enumerate(runs.items(), 1):
        events.append(_name("process_name", number, 0, name))
        events.extend(_run_events(number, run))
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _run_events(process: int, run: Run) -> list[dict[str, Any]]:
    timelines = read_timelines(run.folder)
    idle = run.segments() if run.collectives else [[] for _ in timelines]  # collectives record no waits
    start_ns = min(span.start_ns for timeline in timelines for span in timeline.spans)
    events: list[dict[str, Any]] = []
    for timeline, segments in zip(timelines, idle, strict=True):
        events.append(_name("thread_name", process, timeline.rank, f"rank {timeline.rank}"))
        spans = [(s.kind, f"{s.kind} {s.label}".strip(), s.start_ns, s.end_ns) for s in timeline.spans]
        spans += [("wait", "wait for ranks", s.start_ns, s.end_ns) for s in segments if s.activity == "wait"]
        for kind, label, begin_ns, end_ns in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": process,
                    "tid": timeline.rank,
                    "cat": kind,
                    "name": label,
                    "ts": (begin_ns - start_ns) / 1e3,  # microseconds
                    "dur": (end_ns - begin_ns) / 1e3,
                }
            )
    return events


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}
