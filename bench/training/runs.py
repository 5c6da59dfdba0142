"""Launch a training script on all ranks, watch it, read its results, and summarize them."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from odc.bench.harness.benchmark import Column, Table, spread
from odc.bench.harness.benchmark import Run as Bench
from odc.bench.harness.ranks import BenchError, NotRunError
from odc.bench.harness.warm_launch import WarmLauncher, output_of
from odc.bench.training.bubble import Recording, Segment, shares

RUN_LIMIT_S = 900.0  # for one training run; a run of the demo takes less than half a minute
_GRACE_S = 40.0  # torchrun gives its ranks 30 seconds to end before it kills them
_SHOWN_LINES = 60

CHILD_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",  # ranks on CPUs, whatever else is there
    # One thread per rank: two ranks on two cores would otherwise fight over them.
    "OMP_NUM_THREADS": "1",
    # glibc keeps memory once it has it: giving it back and touching it anew would be timed as compute.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 25),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 31),
}


class ChildError(BenchError):
    """A child process failed; the message ends with the last lines of its stderr."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    script: Path
    name: str
    comm: str
    options: tuple[str, ...]
    """Options for the script."""
    environment: Mapping[str, str] = field(default_factory=dict)


def way_of(script: Path, comm: str, policy: str, stream: str | None = None) -> Way:
    """A way to run ``examples/sft.py`` or ``examples/grpo.py``.

    Args:
        stream: in place of the policy, for samples whose lengths are not known.
    """
    options: tuple[str, ...] = ("--comm", comm, "--policy", policy)
    if stream is not None:
        options += ("--stream", stream)
    return Way(script, f"{comm}-{stream or policy}", comm, options)


POLICIES = (("collective", "lb-micro"), ("odc", "lb-micro"), ("odc", "lb-mini"))
"""Communication and policy of the ways that need known lengths."""


@dataclass(frozen=True)
class Run:
    """The results of one training run. Rates are of the timed minibatches and of all ranks together."""

    samples_per_s: float
    tokens_per_s: float
    seconds: float
    minibatch_seconds: list[float]
    losses: list[float]
    shares: dict[str, float]
    """Part of the ranks' time in each of :data:`.bubble.ACTIVITIES`."""
    folder: Path
    num_untimed: int
    collectives: bool
    minibatch_samples: tuple[int, ...] = ()
    """Samples of each minibatch, of all ranks, untimed minibatches included. The next field has the tokens."""
    minibatch_tokens: tuple[int, ...] = ()

    def segments(self, minibatches: Sequence[int] | None = None) -> list[list[Segment]]:
        """Each rank's time cut into activities; by default of all timed minibatches."""
        chosen = range(self.num_untimed, len(self.losses)) if minibatches is None else minibatches
        return self.recording.segments(chosen)

    @property
    def recording(self) -> Recording:
        return Recording.read(self.folder, collectives=self.collectives)

    def phases(self, minibatch: int) -> list[list[Segment]]:
        """Each rank's time in one minibatch: its "phase" spans by label, "" outside of phases. "wait" comes last, to be
        drawn over them."""
        found, recording = [], self.recording
        for timeline, cut in zip(recording.timelines, recording.segments([minibatch]), strict=True):
            spans = [s for s in timeline.spans if s.minibatch == minibatch and s.kind in ("minibatch", "phase")]
            # What encloses is drawn first.
            spans.sort(key=lambda span: (span.kind != "minibatch", span.start_ns - span.end_ns))
            mine = [Segment("" if s.kind == "minibatch" else s.label, s.start_ns, s.end_ns) for s in spans]
            waits = [Segment("wait", s.start_ns, s.end_ns) for s in cut if s.activity == "wait"]
            found.append(mine + waits)
        return found


LIBRARIES = (
    *("torch._dynamo", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2"),
    *("odc.fsdp_patch", "odc.transports.shm", "odc.balance"),
)
"""Modules that each rank would otherwise import in each run."""


def train(
    launcher: WarmLauncher,
    way: Way,
    folder: Path,
    *,
    num_ranks: int,
    options: Sequence[str],
    on_progress: Callable[[int], None],
) -> Run:
    """Train once; ``on_progress`` gets the number of minibatches done so far.

    Raises:
        ChildError: the run failed, or did not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [str(way.script), *way.options, "--timeline", "--out", str(folder), *options]
    first = output_of(folder, 0)
    first.write_bytes(b"")  # that of an earlier run there
    try:
        codes = launcher.run(
            arguments,
            folder,
            ends_at_once=True,
            world_size=num_ranks,
            cwd=Path(),
            limit_s=RUN_LIMIT_S,
            environment=way.environment,
            on_wait=lambda: on_progress(_minibatches_done(first)),
        )
    except RuntimeError as error:
        raise ChildError(f"{error}: what it said is above") from None
    # Of ranks that fail, the one that was not killed for it says why.
    for rank in sorted(range(num_ranks), key=lambda rank: codes[rank] < 0):
        if codes[rank]:
            path = output_of(folder, rank)
            why = f"rank {rank} of {num_ranks} ended with {codes[rank]}"
            raise ChildError(f"{' '.join(arguments)}\n{why}. The end of its output ({path}):\n{_last_lines(path)}")
    on_progress(_minibatches_done(first))
    return read_run(folder, collectives=way.comm == "collective")


def check_examples(script: Path, *packages: str) -> None:
    """Refuse to start a script that cannot run here.

    Raises:
        NotRunError: this is not the root of the repository, or packages are missing.
    """
    if not script.exists():
        raise NotRunError(f"{script} is not here: run this from the root of the repository")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise NotRunError(f"this needs {', '.join(missing)}: pip install '.[examples]'")


def train_in_turns(
    run: Bench,
    ways: Sequence[Way],
    out: Path,
    *,
    repetitions: int,
    num_ranks: int,
    options: Mapping[str, object],
    minibatches: int = 1,
    libraries: Sequence[str] = LIBRARIES,
) -> dict[str, list[Run]]:
    """Train each way ``repetitions`` times, in turns, so that a drift of the machine's speed affects all of them.

    Args:
        options: of the scripts.
        minibatches: of a run, if that is known.

    Raises:
        ChildError: a run failed.
    """
    runs: dict[str, list[Run]] = {way.name: [] for way in ways}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run.begin(len(ways) * repetitions * minibatches, "starting")
    run.environment["threads_per_rank"] = 1
    with closing(WarmLauncher(libraries, {**os.environ, **CHILD_ENVIRONMENT})) as launcher:
        for repetition in range(1, repetitions + 1):
            for way in ways:
                run.describe(f"{way.name} {repetition}/{repetitions}")
                done = 0

                def show(now: int) -> None:
                    nonlocal done
                    run.advance(min(now, minibatches) - done)
                    done = min(now, minibatches)

                folder = out / way.name / f"repetition-{repetition}"
                trained = train(launcher, way, folder, num_ranks=num_ranks, options=words, on_progress=show)
                show(minibatches)
                runs[way.name].append(trained)
                run.note(
                    f"{way.name} {repetition}/{repetitions}: {trained.samples_per_s:.2f} samples/s, "
                    f"{trained.seconds:.1f} s"
                )
    return runs


def run_child(command: Sequence[str], folder: Path) -> None:
    """Run a command with its output in ``folder``, until it ends. It never outlives this call.

    Raises:
        ChildError: it failed, or did not end within ``RUN_LIMIT_S``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    out_path, err_path = folder / "stdout.log", folder / "stderr.log"
    environment = {**os.environ, **CHILD_ENVIRONMENT}
    with out_path.open("wb") as out, err_path.open("wb") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=environment)
        try:
            with suppress(subprocess.TimeoutExpired):
                child.wait(RUN_LIMIT_S)
            timed_out = child.poll() is None
        finally:
            _end(child)
    if timed_out or child.returncode != 0:
        why = f"did not end within {RUN_LIMIT_S:g} s" if timed_out else f"ended with {child.returncode}"
        raise ChildError(f"{' '.join(command)}\n{why}. The end of its stderr ({err_path}):\n{_last_lines(err_path)}")


def read_run(folder: Path, *, collectives: bool) -> Run:
    """Read what a run has written into its folder."""
    result = json.loads((folder / "result.json").read_text())
    timed = range(result["untimed"], len(result["losses"]))
    spent = shares(Recording.read(folder, collectives=collectives).segments(timed))
    return Run(
        samples_per_s=result["samples"] / result["seconds"],
        tokens_per_s=result["tokens"] / result["seconds"],
        seconds=result["seconds"],
        minibatch_seconds=result["minibatch_seconds"],
        losses=result["losses"],
        shares=spent,
        folder=folder,
        num_untimed=result["untimed"],
        collectives=collectives,
        minibatch_samples=tuple(result["minibatch_samples"]),
        minibatch_tokens=tuple(result["minibatch_tokens"]),
    )


def _last_lines(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])


def _minibatches_done(out_path: Path) -> int:
    lines = re.findall(rb"^minibatch (\d+)/", out_path.read_bytes(), flags=re.MULTILINE)
    return int(lines[-1]) if lines else 0


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is not None:
        return
    child.terminate()  # torchrun passes it on to the ranks
    try:
        child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


# Medians over repetitions, and a table of them


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference between two loss curves, over all minibatches.

    Raises:
        ValueError: the curves differ in length.
    """
    pairs = zip(losses, reference, strict=True)
    return max(abs(ours - theirs) / abs(theirs) for ours, theirs in pairs)


def summarize(runs: Mapping[str, Sequence[Run]]) -> list[dict[str, Any]]:
    """The rows of a result, one for each way to train.

    ``runs`` has for each configuration its runs in the order of the repetitions; the first configuration is
    the one that the others are compared with, repetition by repetition, since those ran one after the other.
    """
    baseline = next(iter(runs.values()))
    return [{"name": name, **_summarize(repeated, baseline)} for name, repeated in runs.items()]


def _summarize(runs: Sequence[Run], baseline: Sequence[Run]) -> dict[str, Any]:
    speedups = [run.samples_per_s / base.samples_per_s for run, base in zip(runs, baseline, strict=True)]
    differences = [loss_difference(r.losses, b.losses) for r, b in zip(runs, baseline, strict=True)]

    def middle(value: Callable[[Run], float]) -> float:
        return median(value(run) for run in runs)

    return {
        "samples_per_s": middle(lambda run: run.samples_per_s),
        "tokens_per_s": middle(lambda run: run.tokens_per_s),
        "bubble_rate": middle(lambda run: run.shares["wait"]),
        "transfer_rate": middle(lambda run: sum(run.shares[kind] for kind in ("gather", "scatter", "other"))),
        "speedup": median(speedups),
        "losses": runs[0].losses,
        "max_loss_difference": max(differences),
        "repetitions": [
            {
                "samples_per_s": run.samples_per_s,
                "tokens_per_s": run.tokens_per_s,
                "seconds": run.seconds,
                "speedup": speedup,
                "max_loss_difference": difference,
                "time_shares": run.shares,
                "minibatch_seconds": run.minibatch_seconds,
            }
            for run, speedup, difference in zip(runs, speedups, differences, strict=True)
        ],
    }


def quietest(runs: Mapping[str, Sequence[Run]]) -> dict[str, Run]:
    """For a picture, the runs of the repetition that took the least time in all, by configuration.

    Runs of one repetition are neighbours in time, and this one was disturbed least.
    """
    repetitions = list(zip(*runs.values(), strict=True))
    best = min(repetitions, key=lambda repetition: sum(run.seconds for run in repetition))
    return dict(zip(runs, best, strict=True))


def _spread(entry: Mapping[str, Any], key: str) -> dict[str, float]:
    return spread([repetition[key] for repetition in entry["repetitions"]])


def runs_table(*columns: Column) -> Table:
    """A table with one row per way to train, and further ``columns``."""
    return Table(
        "runs",
        "{settings[ranks]} ranks, medians of {settings[repetitions]} runs (lowest-highest)",
        (Column("way", "name"),),
        (
            Column("samples/s", lambda row: _spread(row, "samples_per_s"), ".1f"),
            Column("speedup", lambda row: _spread(row, "speedup"), ".2f"),
            Column("tokens/s", "tokens_per_s", ".0f"),
            Column("bubble rate", "bubble_rate", ".1%"),
            Column("transfer", "transfer_rate", ".1%"),
            *columns,
            Column("final loss", lambda row: f"{row['losses'][-1]:.4f}"),
            Column("loss diff.", "max_loss_difference", ".1e"),
        ),
        "bubble rate: measured, time in which a rank waits for another one. transfer: time in which it moves\n"
        "parameters and gradients. loss diff.: largest relative difference from the first way's losses.",
    )
