"""What the scripts of small models have in common: what a run leaves behind (losses, times, on request who did what
when), what it shows meanwhile, and how it ends."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import rich.progress
import torch
import torch.distributed as dist
from rich.console import Console

import odc
from odc.balance import Minibatch
from odc.fsdp_patch import observe_fsdp
from odc.timeline import Timeline

IGNORED = -100  # label of a token without loss
T = TypeVar("T")


class RunRecord:
    """Times every minibatch on this rank; the first ``num_untimed`` are warm-up, left out of the totals.

    Args:
        alone: what is between minibatches (rollouts) is left out, too: each begins on all ranks together.
    """

    def __init__(self, num_untimed: int, timeline: Timeline | None, *, alone: bool = False) -> None:
        self.losses: list[float] = []
        self._alone = alone
        self._num_untimed = num_untimed
        self._timeline = timeline
        self._num_minibatches = 0
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._started = 0.0
        self._seconds: list[float] = []

    @contextmanager
    def minibatch(self, minibatch: Minibatch[dict[str, torch.Tensor]]) -> Iterator[None]:
        """Around one minibatch, from its first forward to the end of ``optimizer.step``."""
        tokens = sum(_num_tokens(microbatch) for microbatch in minibatch.microbatches)
        with self.minibatch_of(minibatch.num_samples, tokens):
            yield

    @contextmanager
    def minibatch_of(self, num_samples: int, num_tokens: int) -> Iterator[None]:
        """The same, of so many samples of all ranks and so many tokens of this one."""
        number = self._num_minibatches
        if number == self._num_untimed or self._alone:
            dist.barrier()  # the timed part starts together
        if number == self._num_untimed:
            self._started = time.perf_counter()
        if self._timeline:
            self._timeline.minibatch = number
        started = time.perf_counter()
        with self.span("minibatch", f"minibatch {number}"):
            yield
        self._num_minibatches += 1
        self._samples.append(num_samples)
        self._tokens.append(num_tokens)
        if number >= self._num_untimed:
            self._seconds.append(time.perf_counter() - started)

    def microbatches(self, microbatches: Sequence[T]) -> Iterator[T]:
        """The same ones; the timeline shows when the loop's body runs for each."""
        for number, microbatch in enumerate(microbatches):
            with self.span("phase", f"microbatch {number}", microbatch=number):
                yield microbatch

    @property
    def num_samples(self) -> int:
        """Of all ranks and minibatches so far, untimed ones included."""
        return sum(self._samples)

    def span(self, kind: str, label: str, **arguments: object) -> AbstractContextManager[None]:
        """Record a ``with`` block in the timeline, if there is one."""
        return self._timeline.span(kind, label, **arguments) if self._timeline else nullcontext()

    def save(self, folder: Path) -> None:
        """Write ``result.json`` (rank 0) and ``timeline-rank{r}.json`` (every rank). Collective.

        Samples and tokens are those of all ranks; times are the slowest rank's.
        """
        folder.mkdir(parents=True, exist_ok=True)
        times = torch.tensor([time.perf_counter() - self._started, *self._seconds], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        tokens = torch.tensor(self._tokens)
        dist.all_reduce(tokens)
        if dist.get_rank() == 0:
            result = {
                "losses": self.losses,
                "untimed": self._num_untimed,
                "samples": sum(self._samples[self._num_untimed :]),
                "tokens": int(tokens[self._num_untimed :].sum()),
                "minibatch_samples": self._samples,
                "minibatch_tokens": tokens.tolist(),
                "seconds": times[1:].sum().item() if self._alone else times[0].item(),
                "minibatch_seconds": times[1:].tolist(),
            }
            (folder / "result.json").write_text(json.dumps(result, indent=1))
        if self._timeline:
            self._timeline.save(folder / f"timeline-rank{dist.get_rank()}.json")


def _num_tokens(microbatch: dict[str, torch.Tensor]) -> int:
    """Without padding; a dummy has no loss, and no tokens."""
    if bool((microbatch["labels"] == IGNORED).all()):
        return 0
    return (
        int(microbatch["attention_mask"].sum()) if "attention_mask" in microbatch else microbatch["input_ids"].numel()
    )


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


def start_timeline(model: torch.nn.Module, session: odc.Session | None) -> Timeline:
    """Record what this rank does when, with either kind of communication."""
    if session:
        return session.start_timeline()
    timeline = Timeline(dist.get_rank())
    observe_fsdp(model, timeline)
    return timeline


def endless(loader: Any) -> Generator[Any, None, None]:
    """Epoch after epoch, each in its own order."""
    for epoch in itertools.count():
        loader.set_epoch(epoch)
        yield from loader


def leave() -> None:
    """End the process group.

    Gloo's threads let go of the last results a moment after they are used, and abort the process if Python begins to
    end just then ("terminate called without an active exception"). Torch waits for those threads only where nothing
    else holds the process group, as its caches for DTensor do.
    """
    dist.destroy_process_group()
    time.sleep(0.2)


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the line breaks of the description and shows defaults."""


def add_output(parser: argparse.ArgumentParser, folder: str, *files: str) -> argparse._ArgumentGroup:
    """The options that say what :class:`RunRecord` leaves, and where, beside which ``files``."""
    out = parser.add_argument_group("output")
    out.add_argument(
        "--out", type=Path, default=Path(folder), help=f"folder for {' and '.join(('result.json', *files))}"
    )
    out.add_argument("--untimed", type=int, default=2, help="first minibatches left out of the timing")
    out.add_argument("--timeline", action="store_true", help="also write who did what when: timeline-rank*.json")
    return out


def check_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Whether there are ranks, and something to time."""
    if args.minibatches <= args.untimed:
        parser.error(f"--minibatches {args.minibatches}: expected more than --untimed {args.untimed}")
    if "RANK" not in os.environ:
        parser.error(f"no ranks: start it with torchrun --nproc-per-node 2 examples/{parser.prog}, then these options")


def check_model(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Whether the model can be made, and trained as --comm and --policy say."""
    if args.comm == "collective" and args.policy == "lb-mini":
        parser.error(
            "--policy lb-mini gives the ranks different numbers of microbatches, so with --comm collective "
            "some would wait forever in a collective: use --comm odc, or --policy lb-micro"
        )
    if args.hidden_size % 64 or args.hidden_size < 64:
        parser.error(f"--hidden-size {args.hidden_size}: expected a multiple of 64 (heads of 32, two per key)")
