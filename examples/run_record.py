"""What a run leaves behind: losses, times, on request who did what when; and what it shows meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType

import rich.progress
import torch
import torch.distributed as dist
from rich.console import Console

from odc.balance import Plan
from odc.timeline import Timeline


class RunRecord:
    """Times every minibatch on this rank; the first ``num_untimed`` are warm-up, left out of the totals."""

    def __init__(self, num_untimed: int, timeline: Timeline | None) -> None:
        self.losses: list[float] = []
        self._num_untimed = num_untimed
        self._timeline = timeline
        self._num_minibatches = 0
        self._num_samples = 0
        self._num_tokens = 0
        self._started = 0.0
        self._seconds: list[float] = []

    @contextmanager
    def minibatch(self, plan: Plan) -> Iterator[None]:
        """Around one minibatch, from its first forward to the end of ``optimizer.step``."""
        number = self._num_minibatches
        if number == self._num_untimed:
            dist.barrier()  # the timed part starts together
            self._started = time.perf_counter()
        if self._timeline:
            self._timeline.minibatch = number
        started = time.perf_counter()
        with self.span("minibatch", f"minibatch {number}"):
            yield
        self._num_minibatches += 1
        if number >= self._num_untimed:
            self._seconds.append(time.perf_counter() - started)
            self._num_samples += plan.num_samples
            self._num_tokens += int(plan.lengths.sum())

    def span(self, kind: str, label: str) -> AbstractContextManager[None]:
        """Record a ``with`` block in the timeline, if there is one."""
        return self._timeline.span(kind, label) if self._timeline else nullcontext()

    def save(self, folder: Path) -> None:
        """Write ``result.json`` (rank 0) and ``timeline-rank{r}.json`` (every rank). Collective.

        Samples and tokens are those of all ranks; times are the slowest rank's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        times = torch.tensor([time.perf_counter() - self._started, *self._seconds], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            result = {
                "losses": self.losses,
                "untimed": self._num_untimed,
                "samples": self._num_samples,
                "tokens": self._num_tokens,
                "seconds": times[0].item(),
                "minibatch_seconds": times[1:].tolist(),
            }
            (folder / "result.json").write_text(json.dumps(result, indent=1))
        if self._timeline:
            self._timeline.save(folder / f"timeline-rank{dist.get_rank()}.json")


class Progress:
    """On rank 0 a progress bar, or one line per minibatch where there is no terminal; else silent."""

    def __init__(self, num_minibatches: int) -> None:
        self._total = num_minibatches
        self._console = Console(quiet=dist.get_rank() != 0)
        self._bar = rich.progress.Progress(
            "{task.description}",
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_minibatches)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, losses: list[float]) -> None:
        """Called after every minibatch."""
        self._bar.update(self._task, completed=len(losses), description=f"loss {losses[-1]:.4f}")
        if not self._console.is_terminal:
            self._console.print(f"minibatch {len(losses)}/{self._total} loss {losses[-1]:.4f}")
            self._console.file.flush()
