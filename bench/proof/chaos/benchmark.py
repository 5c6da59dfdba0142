"""What becomes of a job when anything happens to one of its ranks, at any time?

    odc bench chaos --only-trial 17

In each trial 2 to 4 CPU ranks train. One of them is killed, stopped, leaves or raises, in one of the phases of a step
or at a random time. The others must end in time, with the right exit code; their last error must name this rank in the
numbering of the whole job, and say why. A rank that is stopped only for a while must make no difference.

With --meshes 4 or 8 ranks train on a mesh, beside tensor or context parallelism or both. In further trials one of the
ranks that compute together has a microbatch more or less than its partners: all errors must name it and a partner.

With --late-binding ranks take samples from each other, and in each step one of them is slow. In a fifth of these trials
the process of the store, which a launcher has, is killed or stopped in place of a rank.

Nothing may be left behind: no process, no file in /dev/shm or in the ranks' temporary folder (a process's sockets end
with it).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.proof.chaos.launch import OUTCOMES, Outcome, run_trials
from odc.bench.proof.chaos.trials import (
    ACTIONS,
    CLAIM,
    CLAIMS,
    DIFFER,
    DIFFERS,
    MESHES,
    PHASES,
    TRANSPORTS,
    WAYS,
    generate,
    generate_late,
    generate_on_meshes,
)


def measure(
    run: Run,
    trials: Annotated[int, typer.Option(min=1, help="How many trials.")] = 200,
    seed: Annotated[int, typer.Option(help="The same seed, the same trials.")] = 0,
    only_trial: Annotated[int, typer.Option(min=-1, help="Only this one of them, whatever their number.")] = -1,
    jobs: Annotated[int, typer.Option(min=1, help="Trials side by side.")] = 2,
    meshes: Annotated[bool, typer.Option(help="Trials on meshes.")] = False,
    late_binding: Annotated[bool, typer.Option(help="Trials with samples that are bound late.")] = False,
) -> Entries:
    if meshes and late_binding:
        raise ValueError("--meshes with --late-binding, which partners cannot have: give one of them")
    wanted = range(trials) if only_trial < 0 else range(only_trial, only_trial + 1)
    run.begin(len(wanted), "trials")

    def show(outcome: Outcome) -> None:
        run.advance()
        run.describe(f"trial {outcome.trial.number}")
        if not outcome.is_good or only_trial >= 0:
            run.note(in_words(outcome, seed))

    drawn = generate_on_meshes(seed) if meshes else generate_late(seed) if late_binding else generate(seed)

    outcomes = run_trials(list(itertools.islice(drawn, wanted.start, wanted.stop)), show, jobs)
    if bad := sum(not outcome.is_good for outcome in outcomes):
        run.missed.append(f"{bad} of {len(outcomes)} trials did not end as documented")
    counts = Counter(outcome.status for outcome in outcomes)
    run.environment["threads_per_rank"] = 1
    return {
        "meanings": {
            "transports": TRANSPORTS,
            "meshes": MESHES,
            "staging": WAYS,
            "actions": {**ACTIONS, DIFFER: DIFFERS},
            "phases": {**PHASES, CLAIM: CLAIMS},
            "outcomes": OUTCOMES,
        },
        "counts": {status: counts[status] for status in OUTCOMES},
        "by_transport_and_action": _counts(outcomes),
        "trials": [asdict(outcome) for outcome in outcomes if not outcome.is_good],
    }


def in_words(outcome: Outcome, seed: int) -> str:
    """How a trial has ended, and how to repeat it."""
    lines = [
        f"trial {outcome.trial.number} {outcome.status}: {outcome.trial.describe()}",
        f"  {outcome.reason}",
        f"  odc bench chaos --seed {seed} --only-trial {outcome.trial.number}"
        + " --meshes" * bool(outcome.trial.mesh)
        + " --late-binding" * outcome.trial.late,
        *(f"rank {rank} ended with: {error}" for rank, error in outcome.last_errors.items()),
    ]
    return "\n".join(lines)


def _counts(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    """A row for each transport, or mesh, and action: how its trials ended, and the slowest end."""
    rows: list[dict[str, object]] = []
    for transport, action in itertools.product((*TRANSPORTS, *MESHES), (*ACTIONS, DIFFER)):
        some = [o for o in outcomes if (o.trial.mesh or o.trial.transport, o.trial.action) == (transport, action)]
        if some:
            counts = Counter(outcome.status for outcome in some)
            slowest = max((o.slowest_s for o in some if o.slowest_s is not None and action != "pause"), default=None)
            rows.append({"transport": transport, "action": action, **counts, "slowest_s": slowest})
    return rows


def figures(result: Entries, where: str = "") -> Figures:
    counts = result["counts"]
    slowest: dict[bool, float] = {}
    for row in result["by_transport_and_action"]:
        stop = row["action"] == "stop"
        slowest[stop] = max(slowest.get(stop, 0.0), row["slowest_s"] or 0.0)
    yield (
        "",
        f"of {sum(counts.values())} trials {where}{counts['right']} ended as documented, the last rank at most "
        f"{slowest[False]:.1f} s after a death or an error, {slowest[True]:.1f} s after a rank was stopped for ever",
    )


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "by_transport_and_action",
            "how the other ranks ended",
            (Column("transport or mesh", "transport"), Column("one rank", "action")),
            (*(Column(status, status) for status in OUTCOMES), Column("slowest end (s)", "slowest_s", ".2f")),
        ),
    ),
    quick={"trials": 6},
    figures=(
        ("docs/reliability.md", figures, ["chaos"]),
        ("docs/reliability.md", partial(figures, where="on meshes "), ["chaos_meshes"]),
        ("docs/reliability.md", partial(figures, where="with late binding "), ["chaos_late_binding"]),
    ),
)
