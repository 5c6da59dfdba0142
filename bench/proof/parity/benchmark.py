"""Do scripts made up by chance train under ODC as under plain FSDP? Pairs of everything a script may do.

    odc bench parity --only-case 17

Each case is a training script of four steps on 2 to 4 CPU ranks, which runs over FSDP's collectives and then with ODC.
The benchmark compares losses, the gradients of every step, and the last parameters. Where ranks have unequal numbers of
microbatches, plain FSDP runs further microbatches whose loss is zero.

Not covered: GPUs, checkpoints, GradScaler, compilation.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.proof.parity.cases import FACTORS, generate
from odc.bench.proof.parity.comparison import TOLERANCES
from odc.bench.proof.parity.jobs import OUTCOMES, Outcome, kind_of, run_cases

GOOD = ("equal", "refused")


def measure(
    run: Run,
    cases: Annotated[int, typer.Option(min=1, help="How many cases.")] = 300,
    seed: Annotated[int, typer.Option(help="The same seed, the same cases.")] = 0,
    only_case: Annotated[int, typer.Option(min=-1, help="Only this one of them, whatever their number.")] = -1,
    log: Annotated[Path | None, typer.Option(help="Append what ranks write on standard error to this file.")] = None,
) -> Entries:
    numbers = range(cases) if only_case < 0 else range(only_case, only_case + 1)
    generated = dict(enumerate(itertools.islice(generate(seed), numbers.stop)))
    run.begin(len(numbers), "cases")

    def show(outcome: Outcome) -> None:
        run.advance()
        run.describe(f"case {outcome.number}")
        if outcome.status not in GOOD or only_case >= 0:
            run.note(
                f"case {outcome.number} {outcome.status}: {outcome.reason} {outcome.errors}\n  "
                f"{outcome.case.describe()}\n  odc bench parity --seed {seed} --only-case {outcome.number}"
            )

    outcomes = run_cases({number: generated[number] for number in numbers}, show, log=log)
    if bad := sum(outcome.status not in GOOD for outcome in outcomes):
        run.missed.append(f"{bad} of {len(outcomes)} cases are neither equal nor refused by name")
    counts = Counter(outcome.status for outcome in outcomes)
    refusals = Counter(kind_of(outcome.reason) for outcome in outcomes if outcome.status == "refused")
    compared = [outcome.errors for outcome in outcomes if outcome.errors and outcome.case.precision == "fp32"]
    run.environment["threads_per_rank"] = 1
    return {
        "tolerances": TOLERANCES,
        "counts": {status: counts[status] for status in OUTCOMES},
        "by_kind": list(_counts(outcomes)),
        "refused": [{"why": why, "times": times} for why, times in refusals.most_common()],
        "largest_errors_fp32": {w: max(errors[w] for errors in compared) for w in compared[0]} if compared else {},
        "cases": [asdict(outcome) for outcome in outcomes if outcome.status not in GOOD],
    }


def _counts(outcomes: Sequence[Outcome]) -> Iterator[dict[str, object]]:
    """By kind of FSDP, ranks and transport."""
    for fsdp, ranks, transport in itertools.product(FACTORS["fsdp"], FACTORS["ranks"], FACTORS["transport"]):
        some = [o for o in outcomes if (o.case.fsdp, o.case.ranks, o.case.transport) == (fsdp, ranks, transport)]
        if some:
            counts = Counter(outcome.status for outcome in some)
            yield {"fsdp": fsdp, "ranks": ranks, "transport": transport, **counts}


def figures(result: Entries) -> Figures:
    counts = result["counts"]
    yield (
        "",
        f"of {sum(counts.values())} generated scripts {counts['equal']} train to the numbers of plain FSDP (largest "
        f"error of a gradient in fp32: {result['largest_errors_fp32']['gradients']:.1e} of the largest term of its "
        f"sum), {counts['refused']} are refused by name, {counts['different']} differ",
    )


BENCHMARK = Benchmark(
    measure,
    (
        Table(
            "by_kind",
            "generated scripts under ODC and plain FSDP",
            (Column("FSDP", "fsdp"), Column("ranks", "ranks"), Column("transport", "transport")),
            tuple(Column(status, status) for status in OUTCOMES),
        ),
        Table("refused", "refused by name", (Column("why", "why"),), (Column("times", "times"),)),
    ),
    quick={"cases": 12},
    figures=(("docs/reliability.md", figures, ["parity"]),),
)
