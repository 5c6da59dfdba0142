"""``odc bench``: runs a benchmark, lists them, compares two results, and writes figures into the documents."""

from __future__ import annotations

import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from odc.cli.options import parameters_of, with_parameters
from odc.cli.output import check_plot, errors_in_one_line, output

_WIDTH = 130  # columns of a table where there is no terminal
_HELP = {"help_option_names": ["-h", "--help"]}


def bench(context: typer.Context) -> None:
    """Run a benchmark, list them, or compare two results.

    odc bench list
    odc bench NAME [options] --json FILE
    odc bench compare BEFORE.json AFTER.json
    """
    name, *words = context.args or ["list"]
    others: dict[str, Callable[..., None]] = {
        **dict.fromkeys(("-h", "--help", "list"), show_list),
        "compare": show_comparison,
        "figures": update_figures,
        "multimodal-lengths": write_lengths,
    }
    with errors_in_one_line():
        command = others.get(name) or command_of(name)
    app = typer.Typer(add_completion=False, context_settings=_HELP, rich_markup_mode=None)
    app.command(help=_kept(inspect.getdoc(command) or ""))(command)
    app(words, prog_name=f"odc bench {name}")


def _kept(text: str) -> str:
    """Help with the line breaks that it has."""
    return "\n\n".join("\b\n" + paragraph for paragraph in text.split("\n\n"))


def show_list() -> None:
    """What each benchmark measures, how long it takes on two cores, and what it needs."""
    from odc.bench.harness.catalogue import ENTRIES, written

    table = Table(box=None, pad_edge=False)
    for heading in ("", "odc bench", "measures", "takes", "needs"):
        table.add_column(heading, no_wrap=heading in ("", "odc bench"))
    last = ""
    for entry in ENTRIES:
        names = (entry.room if entry.room != last else "", written(entry.name))
        table.add_row(*names, escape(entry.title), entry.takes, entry.needs)
        last = entry.room
    output(_WIDTH).print(table)
    typer.echo(
        "\nodc bench NAME -h lists its options; all have --quick, --json FILE and, where there is a picture, --plot "
        "FILE.\nodc bench compare BEFORE.json AFTER.json shows two results side by side; odc bench figures writes the "
        "committed ones into the documents."
    )


def show_comparison(
    before: Annotated[Path, typer.Argument(help="A result of --json.")],
    after: Annotated[Path, typer.Argument(help="Another one, of the same benchmark.")],
) -> None:
    """Each value of two results of one benchmark, side by side.

    A change in bold is beyond the spread of both results; one with a ~ is not.
    """
    from odc.bench.harness import results

    with errors_in_one_line():
        documents = results.read(before), results.read(after)
        for table in results.compare(*documents):
            output(_WIDTH).print(table)
        for line in results.differences(*documents):
            typer.echo(line)


def update_figures(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; status 1 if a figure is not its file's.")] = (
        False
    ),
) -> None:
    """Write the figures of bench/results into README.md and docs/. From the root of the repository."""
    from odc.bench.harness.results import figures, update

    with errors_in_one_line():
        wanted = list(figures())
        texts = {document: document.read_text() for document in {figure.document for figure in wanted}}
    changed, lost = update(texts, wanted)
    for figure in changed:
        typer.echo(f"{figure.source}: {figure.words}")
    for figure in lost:
        typer.echo(f"{figure.source}: {figure.document} has not exactly one place for: {figure.words}", err=True)
    for document, text in texts.items() if not check else ():
        document.write_text(text)
    raise typer.Exit(1 if lost or (check and changed) else 0)


def write_lengths(
    model: Annotated[str, typer.Argument(help="MLLM-10B, MLLM-18B or MLLM-84B.")],
    out: Annotated[Path, typer.Option(help="The file to write, .jsonl.")],
    samples: Annotated[int, typer.Option(min=1, help="How many to draw.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Draws others.")] = 0,
) -> None:
    """Write lengths of made-up samples as a model of OrchMLLM's table 1 sees them, for odc plan modalities.

    One line each: the whole sequence, and of each item its tokens in the encoder and the rows that come out.
    """
    from odc.bench.planning.multimodal_sizes import write_lengths as write

    with errors_in_one_line():
        typer.echo(write(model, out, samples, seed))


def command_of(name: str) -> Callable[..., None]:
    """A benchmark as a command: the options of its function, and those that all have.

    Raises:
        ValueError: there is no such benchmark.
    """
    from odc.bench.harness.benchmark import Benchmark
    from odc.bench.harness.catalogue import find, written

    benchmark: Benchmark = find(name)
    name = written(name.replace("-", "_"))

    def command(
        context: typer.Context,
        quick: Annotated[bool, typer.Option("--quick", help="Small sizes, few repetitions: a first look.")] = False,
        json: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
        plot: Annotated[Path | None, typer.Option("--plot", help="Draw the result (needs matplotlib).")] = None,
        **options: Any,
    ) -> None:
        sources = {n: context.get_parameter_source(n) for n in options}
        given = {n for n, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
        if quick:
            options |= {n: value for n, value in benchmark.quick.items() if n not in given}
        words = [_option(n, options[n]) for n in options if n in given]
        line = " ".join([f"odc bench {name}", *["--quick"] * quick, *words])
        run_benchmark(benchmark, name, options, line, quick, json, plot)

    context, *shared = parameters_of(command)[: 4 if benchmark.picture else 3]
    return with_parameters(command, [context, *parameters_of(benchmark.measure)[1:], *shared], benchmark.says)


def _option(name: str, value: Any) -> str:
    """As it is typed."""
    from odc.bench.harness.benchmark import typed

    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option} {typed(value)}"


def run_benchmark(
    benchmark: Any,
    name: str,
    options: dict[str, Any],
    line: str,
    quick: bool = False,
    json: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure, show, write. Exits with 1 if ranks failed or an aim was missed, with 2 if it cannot run here."""
    from odc.bench.harness import results
    from odc.bench.harness.benchmark import Run, as_settings
    from odc.bench.harness.ranks import BenchError, NotRunError

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank outlives us
    with errors_in_one_line():
        check_plot(plot)
        about = {"benchmark": name, "command": line, "settings": as_settings(options)}
        run = Run(quick=quick, is_quiet=False, json=json, about=about)
        try:
            with run.progress:
                found = benchmark.measure(run, **options)
        except BenchError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(2 if isinstance(error, NotRunError) else 1) from None
        document = run.document(found)
        run.keep(found)
        if run.is_first:
            for table in results.tables_of(benchmark, document):
                output(_WIDTH).print(table)
            if plot is not None:
                from odc.bench.harness.catalogue import title_of
                from odc.bench.harness.pictures import draw

                draw(plot, benchmark.picture, document, title_of(benchmark.says))
    for text in run.missed if run.is_first else ():
        typer.echo(text)
    if run.missed or run.status:
        raise typer.Exit(1 if run.missed else run.status)
