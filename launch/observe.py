"""Shows what ranks do while ``odc run`` runs: columns in a Trainer's log, ``--timeline`` and ``--live``.

All figures come from :class:`odc.MinibatchStats` and :class:`odc.Timeline`. Scripts under ``torchrun`` can use
``session.on_minibatch`` and ``session.start_timeline`` for the same.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from odc.config import LaunchEnvironment
from odc.fsdp_patch import Session
from odc.fsdp_patch.automatic import Say
from odc.fsdp_patch.session import find_session
from odc.timeline import MinibatchStats, Timeline

if TYPE_CHECKING:
    from rich.live import Live

KEPT = 8
"""Minibatches of a timeline: the latest ones."""
_SAVING_SHARE = 0.02  # of the time, at most: a rank that is killed leaves what it had saved
_SAY_EVERY_S = 60.0  # where there is no terminal
_MOST_BARS, _BAR_WIDTH = 16, 40


class Observation:
    """Of all models that this rank has patched, until :meth:`close`.

    Args:
        folder: where the rank saves its timeline; None: it records none. Of several hosts, which may share the folder,
            each has one of its own in it: their clocks differ.
        is_live: rank 0 shows each minibatch: on a terminal as a block that is drawn anew, else as a line a minute.
    """

    def __init__(self, launch: LaunchEnvironment, folder: str | None, is_live: bool, say: Say) -> None:
        self._say = say
        self._timeline = None if folder is None else Timeline(launch.rank)
        host = socket.gethostname() if launch.world_size > launch.local_world_size else ""
        self._path = Path(folder or "", host, f"timeline-rank{launch.rank}.json")
        self._is_live = is_live and launch.rank == 0
        self._view: Live | None = None
        self._undo: list[Callable[[], None]] = []
        self._has_columns = False
        self._add_columns()
        self._started_ns = time.monotonic_ns()
        self._said_s = time.monotonic()
        self._next_save_s = 0.0

    def begin(self, session: Session) -> None:
        """A model was patched."""
        self._add_columns()
        if self._timeline is not None:
            session.start_timeline(self._timeline)
        if self._timeline is not None or self._is_live:
            self._undo.append(session.on_minibatch(self._on_minibatch))

    def _add_columns(self) -> None:
        """To the logs of Trainers; at once where balancing has imported them, which holds on to their methods."""
        if not self._has_columns and "transformers.trainer" in sys.modules:
            self._undo.append(_log_minibatches(sys.modules["transformers.trainer"].Trainer))
            self._has_columns = True

    def _on_minibatch(self, last: MinibatchStats) -> None:
        now_s = time.monotonic()
        if self._timeline is not None:
            self._end_minibatch(self._timeline)
            if now_s >= self._next_save_s:
                self._save(self._timeline)
        if self._is_live and sys.stderr.isatty():
            self._show(last)
        elif self._is_live and now_s - self._said_s > _SAY_EVERY_S:
            self._said_s = now_s
            self._say(f"odc: {last}")

    def _end_minibatch(self, timeline: Timeline) -> None:
        timeline.record("minibatch", str(timeline.minibatch), self._started_ns)
        timeline.minibatch, self._started_ns = timeline.minibatch + 1, time.monotonic_ns()
        timeline.spans = [span for span in timeline.spans if span.minibatch >= timeline.minibatch - KEPT]

    def _save(self, timeline: Timeline) -> None:
        started_s = time.monotonic()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            timeline.save(new := self._path.with_suffix(".new"))
            os.replace(new, self._path)
        except OSError as error:  # a full disk ends no run
            self._say(f"odc: --timeline: {error}")
        ended_s = time.monotonic()
        self._next_save_s = ended_s + (ended_s - started_s) / _SAVING_SHARE

    def _show(self, last: MinibatchStats) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        if self._view is None:
            self._view = Live(console=Console(stderr=True), auto_refresh=False)
            self._view.start()
        self._view.update(Text(bars_of(last)), refresh=True)

    def close(self, *, has_failed: bool) -> None:
        """Save the timeline, where the script has failed with what there is of the last minibatch; leave sessions."""
        while self._undo:
            self._undo.pop()()
        if self._view is not None:
            self._view.stop()
        if self._timeline is not None:
            if has_failed:
                self._end_minibatch(self._timeline)
            self._save(self._timeline)


def bars_of(last: MinibatchStats) -> str:
    """A line for the minibatch, and one for each rank, the slowest ones first: the part of the time it computed in."""
    lines = [f"odc: {last}"]
    slowest_first = sorted(last.compute_s.items(), key=lambda item: -item[1])
    for rank, seconds in slowest_first[:_MOST_BARS]:
        bar = "█" * round(_BAR_WIDTH * min(1.0, seconds / last.seconds))
        lines.append(f"rank {rank:<5}{bar:·<{_BAR_WIDTH}}{seconds:9.2f} s")
    if len(slowest_first) > _MOST_BARS:
        lines.append(f"and {len(slowest_first) - _MOST_BARS} ranks that were faster")
    return "\n".join(lines)


def _log_minibatches(trainer_class: Any) -> Callable[[], None]:
    """Add :meth:`odc.MinibatchStats.metrics` to what a transformers ``Trainer`` logs with a loss. Returns the undo."""
    original = trainer_class.log

    @functools.wraps(original)
    def log(trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        model: nn.Module | None = getattr(trainer, "model", None)
        session = find_session(model) if "loss" in logs and model is not None else None
        if session is not None and session.last_minibatch is not None:
            logs.update(session.last_minibatch.metrics())
        return original(trainer, logs, *args, **kwargs)

    def undo() -> None:
        if trainer_class.log is log:
            trainer_class.log = original

    trainer_class.log = log
    return undo
