"""What becomes of a job when anything happens to one of its ranks, at any time?

    python -m odc.bench.proof.chaos --trials 200 --seed 0 --json bench/results/chaos.json
    python -m odc.bench.proof.chaos --seed 0 --only-trial 17

In each trial 2 to 4 CPU ranks train; one of them is killed, stopped, leaves or raises, in one of the phases of a step
or at a random time. The others must end in time, with the right exit code, and their last error must name that rank in
the numbering of the whole job, and say why; one that is stopped for a while only must make no difference. Nothing may
be left: no process, no file in /dev/shm or in the ranks' temporary folder (a process's sockets end with it).
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from odc.bench.harness.environment import describe_environment
from odc.bench.harness.progress import progress_bar
from odc.bench.proof.chaos.launch import OUTCOMES, Outcome, run_trials
from odc.bench.proof.chaos.trials import ACTIONS, PHASES, TRANSPORTS, Trial, generate


def main(
    trials: Annotated[int, typer.Option(min=1, help="How many trials.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed, the same trials.")] = 0,
    only_trial: Annotated[int | None, typer.Option(min=0, help="Only this one of them, whatever their number.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Trials side by side.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
) -> None:
    """Hurt one rank of each of many small jobs, and look how the others end. Takes 15 to 25 minutes for 200 trials.

    Prints each trial that did not end as documented, and how to repeat it; exits with 1 if there is one.
    """
    if only_trial is not None and json_file is not None:
        raise typer.BadParameter("a result file is of all trials: leave out --only-trial", param_hint="--json")
    wanted = range(trials) if only_trial is None else range(only_trial, only_trial + 1)
    outcomes = _run(list(itertools.islice(generate(seed), wanted.start, wanted.stop)), seed, jobs)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if only_trial is not None:
        print_outcome(console, outcomes[0], seed)
        for rank, error in outcomes[0].last_errors.items():
            console.print(f"rank {rank} ended with: {error}", markup=False, highlight=False, soft_wrap=True)
    console.print(_table(outcomes))
    if json_file:
        write_json(json_file, outcomes, seed)
    if not all(outcome.is_good for outcome in outcomes):
        raise typer.Exit(1)


def _run(trials: list[Trial], seed: int, jobs: int) -> list[Outcome]:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    console = Console(stderr=True, width=None if sys.stderr.isatty() else 140)
    with progress_bar(console) as progress:
        task = progress.add_task("trials", total=len(trials))

        def show(outcome: Outcome) -> None:
            progress.update(task, advance=1, description=f"trial {outcome.trial.number}")
            if not outcome.is_good and len(trials) > 1:
                print_outcome(progress.console, outcome, seed)

        return run_trials(trials, show, jobs)


def print_outcome(console: Console, outcome: Outcome, seed: int) -> None:
    text = (
        f"trial {outcome.trial.number} {outcome.status}: {outcome.trial.describe()}\n"
        f"  {outcome.reason}\n  python -m odc.bench.proof.chaos --seed {seed} --only-trial {outcome.trial.number}"
    )
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _counts(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """A row for each transport and action: how its trials ended, and the slowest end."""
    rows: list[dict[str, object]] = []
    for transport, action in itertools.product(TRANSPORTS, ACTIONS):
        some = [o for o in outcomes if (o.trial.transport, o.trial.action) == (transport, action)]
        if some:
            counts = Counter(outcome.status for outcome in some)
            slowest = max((o.slowest_s for o in some if o.slowest_s is not None and action != "pause"), default=None)
            rows.append({"transport": transport, "action": action, **counts, "slowest_s": slowest})
    return rows


def _table(outcomes: Sequence[Outcome]) -> Table:
    seen = [status for status in OUTCOMES if any(outcome.status == status for outcome in outcomes)]
    table = Table("transport", "one rank", *seen, "slowest end (s)", title="How the other ranks ended")
    for row in _counts(outcomes):
        table.add_row(*(str(row.get(key) or "") for key in ("transport", "action", *seen, "slowest_s")))
    table.add_section()
    counts = Counter(outcome.status for outcome in outcomes)
    table.add_row("all", "", *(str(counts[status]) for status in seen), "")
    return table


def write_json(path: Path, outcomes: Sequence[Outcome], seed: int) -> None:
    """All outcomes with what they were seen on."""
    counts = Counter(outcome.status for outcome in outcomes)
    document = {
        "environment": {**describe_environment(), "threads_per_rank": 1},
        "command": f"python -m odc.bench.proof.chaos --trials {len(outcomes)} --seed {seed}",
        "seed": seed,
        "meanings": {"transports": TRANSPORTS, "actions": ACTIONS, "phases": PHASES, "outcomes": OUTCOMES},
        "counts": {status: counts[status] for status in OUTCOMES},
        "by_transport_and_action": _counts(outcomes),
        "trials": [outcome.as_row() for outcome in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
