"""The figures of README.md and of documents, from the committed results.

    python -m odc.bench.harness.readme            # after measuring anew: writes the figures into them
    python -m odc.bench.harness.readme --check    # changes nothing, status 1 if a figure is not its file's

From the root of the repository. A figure is a sentence or a row of a table with numbers in it. Which numbers it has now
does not matter for finding it; words that a result would change (how many repetitions) have to be changed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

README, RELIABILITY, STREAMS = Path("README.md"), Path("docs/reliability.md"), Path("docs/streams.md")
GPU, MULTIMODAL = Path("docs/gpu.md"), Path("docs/multimodal.md")
DOCUMENTS = (README, RELIABILITY, STREAMS, GPU, MULTIMODAL)
RESULTS = Path("bench/results")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*(?:e[-+]?\d+)?")
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_MB = 1 << 20


@dataclass(frozen=True)
class Figure:
    """What ``document`` has to say: ``fixed`` finds the place, the numbers in ``text`` come from ``source``."""

    document: Path
    source: str
    fixed: str
    text: str

    @property
    def words(self) -> str:
        return self.fixed + self.text

    def pattern(self) -> re.Pattern[str]:
        """Matches the words with any numbers behind ``fixed``."""
        return re.compile(re.escape(self.fixed) + _NUMBER.pattern.join(map(re.escape, _NUMBER.split(self.text))))


def figures(results: Path = RESULTS) -> Iterator[Figure]:
    """All of them, in the documents' order."""
    for document, name, make in (
        (README, "demo_cpu_2ranks", _demo),
        (README, "trainers_cpu_2ranks", _trainers),
        (README, "conformance", _conformance),
        (README, "tables", _tables),
        (README, "partition_quality", _partition_quality),
        (README, "batching", _batching),
        (STREAMS, "batching", _batching_table),
        (STREAMS, "batching_peers", _peers),
        (STREAMS, "loading", _loading),
        (STREAMS, "stream_training", _stream_training),
        (README, "multimodal_cpu_2ranks", _multimodal),
        (MULTIMODAL, "multimodal_cpu_2ranks", _multimodal_table),
        (MULTIMODAL, "multimodal_cpu_4ranks", _multimodal_4ranks),
        (MULTIMODAL, "multimodal_emulated", _multimodal_emulated),
        (MULTIMODAL, "multimodal_simulated", _multimodal_simulated),
        (MULTIMODAL, "planning", _planning_moved),
        (README, "planning", _planning),
        (README, "partition_speed", _partition_speed),
        (README, "primitives_cpu_2ranks", _primitives),
        (README, "primitives_tcp_cpu_2ranks", _primitives_tcp),
        (README, "host_time", _host_time),
        (README, "fsdp_host_time", _fsdp_host_time),
        (README, "fsdp_host_time_before", _fsdp_host_time_before),
        (README, "emulated", _emulated),
        (GPU, "uneven", _uneven),
        (GPU, "uneven_before", _uneven_before),
        (GPU, "host_time_streams", _host_time_streams),
        (RELIABILITY, "chaos", _chaos),
        (RELIABILITY, "parity", _parity),
    ):
        for fixed, text in make(json.loads((results / f"{name}.json").read_text())):
            yield Figure(document, f"{name}.json", fixed, text)


def update(texts: dict[Path, str], wanted: Iterable[Figure]) -> tuple[list[Figure], list[Figure]]:
    """Put the figures into the ``texts`` of the documents; those that were other ones, and those whose place is not
    there once."""
    changed, lost = [], []
    for figure in wanted:
        text = texts[figure.document]
        found = figure.pattern().findall(text)
        if len(found) != 1:
            lost.append(figure)
        elif found[0] != figure.words:
            changed.append(figure)
            texts[figure.document] = text.replace(found[0], figure.words)
    return changed, lost


Figures = Iterator[tuple[str, str]]


def _demo(result: dict[str, Any]) -> Figures:
    names = {
        "collective-lb-micro": "FSDP2 collectives + LB-Micro",
        "odc-lb-micro": "ODC + LB-Micro",
        "odc-lb-mini": "ODC + LB-Mini",
    }
    for key, name in names.items():
        run = result["runs"][key]
        difference = f"{run['max_loss_difference']:.1e}" if key.startswith("odc") else "-"
        yield (
            f"| {name} |",
            f" {run['samples_per_s']:.1f} | {run['speedup']:.2f}x | {run['tokens_per_s']:.0f} | "
            f"{100 * run['bubble_rate']:.1f} % | {run['losses'][-1]:.4f} | {difference} |",
        )
    yield "", f"Medians of {_WORDS[result['settings']['repetitions']]} interleaved repetitions on a noisy "
    yield "", f"on a noisy {result['environment']['num_cpus']}-core machine"


def _trainers(result: dict[str, Any]) -> Figures:
    settings = result["settings"]
    yield "", f"{settings['steps']} steps, medians of {_WORDS[settings['repetitions']]} interleaved runs"
    rows = {(row["script"], row["way"]): row for row in result["rows"]}
    names = {"accelerate_sft": "accelerate loop", "hf_trainer": "transformers `Trainer`", "trl_sft": "TRL `SFTTrainer`"}
    for script, name in names.items():
        ways = ("torchrun", "odc run", "odc run --balance lb-mini", "odc run --online")
        plain, odc, balanced, online = (rows[script, way] for way in ways)
        by_hand = ", with its one line" if script == "accelerate_sft" else ""
        worst = max(row["largest_loss_difference"] for row in (plain, odc, balanced))
        speedups = f"{_speedup(odc)} | {_speedup(balanced)}{by_hand} | {_speedup(online)}{by_hand}"
        yield f"| {name} |", f" {plain['samples_per_s']:.0f} samples/s | {speedups} | {worst:.1e} |"


def _speedup(row: dict[str, Any]) -> str:
    slowest, fastest = row["speedup_range"]
    return f"{row['speedup']:.2f}x ({slowest:.2f}-{fastest:.2f})"


def _conformance(result: dict[str, Any]) -> Figures:
    yield "", f"(docs/conformance.md) compares {len(result['cells'])} combinations"


def _tables(result: dict[str, Any]) -> Figures:
    errors = result["rms_error_points"]
    fitted = {data: errors[f"{data} 1.5B"] for data in ("LongAlign", "SWE-Smith", "AIME")}
    others = [error for cell, error in errors.items() if not cell.endswith(" 1.5B")]
    yield (
        "Root mean square errors on the 1.5B rows, to which the length laws were fitted: ",
        f"{fitted['LongAlign']:.2f} points for LongAlign, {fitted['SWE-Smith']:.2f} for SWE-Smith, "
        f"{fitted['AIME']:.2f} for AIME; the other sizes, unfitted, {min(others):.1f} to {max(others):.1f}",
    )
    yield "", f"[all {len(result['cells'])} cells](bench/results/tables.json)"


def _bubbles(result: dict[str, Any], kind: str) -> list[float]:
    return [row["bubble_percent"] for row in result["streams"] if row["kind"] == kind]


def _batching(result: dict[str, Any]) -> Figures:
    ours, dgap, steps = (_bubbles(result, kind) for kind in ("minibatch", "dgap", "steps"))
    yield "", f"bubbles are {ours[0]:.1f} % (LongAlign) and {ours[1]:.1f} % (ShareGPT4o), with no length known"
    yield "", f"online dynamic batching leaves {dgap[0]:.1f} % and {dgap[1]:.1f} %, and its contract"
    yield "", f'(`align="steps"`, padded) {steps[0]:.1f} % and {steps[1]:.1f} %'


def _batching_table(result: dict[str, Any]) -> Figures:
    cells = {kind: " % / ".join(f"{rate:.1f}" for rate in _bubbles(result, kind)) for kind in ("dgap", "steps")}
    yield "(online dynamic batching) | collectives |", f" {cells['dgap']} % |"
    yield "the microbatches of a step **cost** the same | collectives, a cost model |", f" {cells['steps']} % |"
    ours, known, pool_sort = (_bubbles(result, kind) for kind in ("minibatch", "LB-Mini (known)", "pool-sort"))
    yield "padded or packed | ODC, a cost model |", f" {ours[0]:.1f} % / {ours[1]:.1f} % |"
    yield "at one time | |", f" {pool_sort[0]:.1f} % / {pool_sort[1]:.1f} % (pool sort, pools of {result['pool_size']})"
    yield "the samples of each minibatch together, has ", f"{known[0]:.1f} % / {known[1]:.1f} %."


def _peers(result: dict[str, Any]) -> Figures:
    rows = {(row["law"], row["kind"]): row for row in (*result["streams"], *result["peers"])}
    names = {
        "steps": 'here, `"steps"`',
        "minibatch": 'here, `"minibatch"`, under ODC',
        "LB-Mini (known)": "here, LB-Mini, lengths known, under ODC",
        "ODB": "ODB 0.1.2, as it comes",
        "ODB, no warm-up": "the same, `no_warmup=True`",
        "cosmos-rl": "cosmos-rl 0.4.7, one packed batch",
        "cosmos-rl, 4 a step": "the same, four batches",
        "cosmos-rl, 4 a step, at steps": "these under ODC",
        "lhotse, 2048": "lhotse 1.33.0, a buffer of all ranks' pools",
        "lhotse, 20000": "the same, its own buffer",
        "verl (known), 32": "verl 0.9.1, lengths known, 4 samples",
        "verl (known), 256": "the same, 32 samples",
        "verl (known), 256, at steps": "these too under ODC",
    }
    for kind, name in names.items():
        cells = []
        for law in ("longalign", "sharegpt4o"):
            row = rows[law, kind]
            cells.append(f"{row['time_per_1000']:.1f} | {row['bubble_percent']:.1f} % | {row['samples_per_step']:.1f}")
        yield f"| {name} |", f" {' | '.join(cells)} |"
    dgap, published = rows["longalign", "dgap"], rows["longalign", "ODB, no warm-up"]
    yield (
        "",
        f"ODB's own code without its warm-up takes {published['time_per_1000']:.1f}, where our rounds of "
        f'`"dgap"` take {dgap["time_per_1000"]:.1f}',
    )

    def counts(kind: str, of: str) -> tuple[int, int]:
        return rows["longalign", kind][of], rows["sharegpt4o", kind][of]

    (lost, also_lost), (again, also_again) = counts("cosmos-rl", "lost"), counts("cosmos-rl", "twice")
    yield (
        "",
        f"cosmos-rl leaves {lost} out and takes {again} again (ShareGPT4o: {also_lost} and {also_again})",
    )
    (lost, also_lost), (all_lost, all_also_lost) = (
        counts("verl (known), 32", "lost"),
        counts("verl (known), 256", "lost"),
    )
    yield (
        "verl leaves out its last batch, ",
        f"{lost} or {all_lost} samples (ShareGPT4o: {also_lost} or {all_also_lost})",
    )
    yield "lhotse repeats ", f"{max(*counts('lhotse, 2048', 'twice'), *counts('lhotse, 20000', 'twice'))} at most"
    yield "ODB's sampler repeats ", f"{counts('ODB', 'twice')[1]} of ShareGPT4o"


def _loading(result: dict[str, Any]) -> Figures:
    rows = {row["loader"]: row for row in result["rows"]}
    times = sorted(rows["minibatch"]["us_per_sample"])
    per_minibatch_ms = 8 * times[len(times) // 2] / 1000
    yield "Loading takes ", f'{rows["dgap"]["times_torch"]:.2f}x (`"dgap"`) of the time per sample'
    yield "", f'{rows["steps"]["times_torch"]:.2f}x, `"minibatch"` with 8 samples in a minibatch'
    yield (
        "8 samples in a minibatch ",
        f"{rows['minibatch']['times_torch']:.2f}x, which is {per_minibatch_ms:.0f} ms per minibatch",
    )


def _stream_training(result: dict[str, Any]) -> Figures:
    names = {
        "collective-dgap": 'collectives, `"dgap"`, padded',
        "collective-steps": 'collectives, `"steps"`, padded',
        "odc-minibatch": 'ODC, `"minibatch"`, packed',
        "odc-lb-mini": "ODC, LB-Mini, lengths known",
    }
    for row in result["rows"]:
        rates = sorted(row["samples_per_s"])
        yield (
            f"| {names[row['name']]} |",
            f" {rates[len(rates) // 2]:.1f} ({row['times_first']:.2f}x) | {row['waiting_percent']:.1f} % | "
            f"{row['minibatches']} | {statistics.fmean(row['losses'][-4:]):.3f} |",  # of twelve parts
        )


def _partition_quality(result: dict[str, Any]) -> Figures:
    worst = max(row["points_above"] for row in result["laws"])
    yield "", f"its bubble rate is at most {worst:.2f} points above the least possible"
    free, equal = sorted(result["random"], key=lambda row: row["equal_size"])
    yield (
        "",
        f"on {free['num_instances']} random small instances the mean excess over exhaustive search is "
        f"{free['mean_excess']:.3%} (equal sizes: {equal['mean_excess']:.3%}, where plain Karmarkar-Karp leaves "
        f"{equal['mean_excess_of_plain_differencing']:.1%})",
    )


_MULTIMODAL_WAYS = {
    "none": "nothing, FSDP2",
    "language": "language model, FSDP2",
    "all": "all phases, FSDP2",
    "all-odc": "all phases, ODC",
}


def _multimodal(result: dict[str, Any]) -> Figures:
    language, everything, odc = (result["runs"][name]["speedup"] for name in ("language", "all", "all-odc"))
    yield "", f"under ODC: {language:.2f}x, {everything:.2f}x and {odc:.2f}x the samples/s of none"


def _multimodal_table(result: dict[str, Any]) -> Figures:
    settings = result["settings"]
    times = f"{settings['minibatches']} steps, medians of {_WORDS[settings['repetitions']]} interleaved repetitions"
    yield "Two CPU ranks,", f" {times} on a {result['environment']['num_cpus']}-core machine"
    for name, title in _MULTIMODAL_WAYS.items():
        run = result["runs"][name]
        speeds = [repetition["speedup"] for repetition in run["repetitions"]]
        speedup, differences = "1", "-"
        if name != "none":
            speedup = f"{run['speedup']:.2f}x ({min(speeds):.2f}-{max(speeds):.2f})"
            differences = f"{run['max_loss_difference']:.1e}, {run['max_gradient_difference']:.1e}"
        yield (
            f"| {title} |",
            f" {run['samples_per_s']:.1f} | {speedup} | {100 * run['bubble_rate']:.1f} % | "
            f"{run['exchanges_per_minibatch']:.0f} | {differences} |",
        )


def _multimodal_4ranks(result: dict[str, Any]) -> Figures:
    language, everything, odc = (result["runs"][name]["speedup"] for name in ("language", "all", "all-odc"))
    yield "", f"Four ranks on its two cores: {language:.2f}x, {everything:.2f}x and {odc:.2f}x"


def _multimodal_emulated(result: dict[str, Any]) -> Figures:
    for model, entries in result["models"].items():
        ways = {entry["way"]: entry for entry in entries}
        ratios = " | ".join(f"{ways[way]['ratio']:.2f}x" for way in ("language", "all", "all, ODC"))
        odc = ways["all, ODC"]
        yield (
            f"| {model}, emulated |",
            f" {ratios} | {odc['planned_ratio']:.2f}x | {100 * odc['waiting']:.1f} % | {100 * odc['moving']:.1f} % |",
        )


def _multimodal_simulated(result: dict[str, Any]) -> Figures:
    against_smaller = {entry["model"]: entry["ratio_odc"] for entry in result["against_smaller_minibatches"]}
    shown = set[str]()
    for entry in result["comparisons"]:
        name, ways = f"{entry['model']}, {entry['ranks']} ranks", entry["ways"]
        if entry["ranks"] == 8 or name in shown:  # once more with smaller minibatches
            continue
        shown.add(name)
        text = f" {ways['language']['ratio']:.2f}x | {ways['all']['ratio']:.2f}x | {ways['all, ODC']['ratio']:.2f}x |"
        if entry["ranks"] == 2560:
            text += f" {against_smaller[entry['model']]:.2f}x |"
        yield f"| {name} |", text


def _planning_moved(result: dict[str, Any]) -> Figures:
    moved, plan = result["rebalance"][-1], result["plan"][-1]
    yield (
        "",
        f"On {moved['ranks']} ranks, samples of {result['model']}, {moved['moved']:.1%} of the cost changes ranks and "
        f"{moved['between_nodes']:.1%} of the tokens nodes; all phases are planned in {_s(plan)} s",
    )


def _planning(result: dict[str, Any]) -> Figures:
    for row, old in zip(result["loader"][-2:], result["before"]["loader"][-2:], strict=True):
        yield (
            f"| {row['ranks']} ranks, {row['samples_per_rank']} samples each |",
            f" {1e3 * row['cpu_s']['median']:.0f} ms | {1e3 * old['cpu_s']['median']:.0f} ms |",
        )
    plan, old = result["plan"][-1], result["before"]["plan"][-1]
    yield f"| {result['model']}, {plan['ranks']} ranks |", f" {_s(plan)} s | {_s(old)} s |"


def _s(row: dict[str, Any]) -> str:
    return f"{row['cpu_s']['median']:.2f}"


def _partition_speed(result: dict[str, Any]) -> Figures:
    for row in result["results"]:
        ours, textbook = row["odc"], row.get("textbook")
        if textbook is None:
            theirs, speedup, excess = "-", "-", "-"
        else:
            theirs, speedup = f"{1e3 * textbook['median_s']:.0f} ms", f"{row['speedup']:.0f}x"
            excess = f"{textbook['largest_excess']:.2%}"
        yield (
            f"| {row['n']}, {row['k']} |",
            f" {1e3 * ours['median_s']:.0f} ms | {theirs} | {speedup} | {ours['largest_excess']:.2%}, {excess} |",
        )


def _milliseconds(row: dict[str, Any]) -> str:
    return f"{1e3 * row['median_s']:.1f} ms ({1e3 * row['p20_s']:.1f}-{1e3 * row['p80_s']:.1f})"


def _by_size(result: dict[str, Any], num_bytes: int) -> dict[str, dict[str, Any]]:
    return {row["primitive"]: row for row in result["rows"] if row["num_bytes"] == num_bytes}


def _primitives(result: dict[str, Any]) -> Figures:
    rows = _by_size(result, 64 * _MB)
    ranks = rows["gather"]["world_size"]
    moved = {"gather": (ranks - 1) / ranks, "scatter_accumulate": 1.0}  # of what the memory operation touches
    rivals = {"gather": ("all_gather", "copy"), "scatter_accumulate": ("reduce_scatter", "add")}
    for name, (collective, memory) in rivals.items():
        ours, theirs = rows[name], rows[collective]
        yield (
            f"| `{name}` |",
            f" {_milliseconds(ours)} | {theirs['median_s'] / ours['median_s']:.1f}x `{collective}`, "
            f"{_milliseconds(theirs)} | {rows[memory]['median_s'] * moved[name] / ours['median_s']:.2f}x `{memory}_` |",
        )
    faster = rows["reduce_scatter"]["median_s"] / rows["add"]["median_s"]
    yield "", f"a bare `add_` is itself {faster:.1f}x the speed of gloo's reduce-scatter here"


def _primitives_tcp(result: dict[str, Any]) -> Figures:
    rows, small = _by_size(result, 64 * _MB), _by_size(result, 1 << 16)

    def ratio(of: dict[str, dict[str, Any]], name: str, collective: str) -> str:
        return f"{of[collective]['median_s'] / of[name]['median_s']:.1f}x"

    gather, push = ("gather", "all_gather"), ("scatter_accumulate", "reduce_scatter")
    yield (
        "",
        f"`gather` {_milliseconds(rows['gather'])}, {ratio(rows, *gather)} `all_gather`; "
        f"`scatter_accumulate` {_milliseconds(rows['scatter_accumulate'])}, {ratio(rows, *push)} `reduce_scatter`; "
        f"at 64 KB {ratio(small, *gather)} and {ratio(small, *push)}",
    )


def _host_time(result: dict[str, Any]) -> Figures:
    for cell in result["cells"]:
        if cell["accumulate"] == "direct":
            calls = [cell["operations"][name]["cpu_us"]["median"] for name in ("publish", "gather", "push", "finish")]
            costs = " | ".join(f"{microseconds:.0f} us" for microseconds in calls)
            yield f"| {cell['ranks']} |", f" {costs} | {1e3 * cell['setup']['cpu_s']['median']:.0f} ms |"


def _fsdp_host_time(result: dict[str, Any]) -> Figures:
    own_us = result["parts"]["FSDP2's own"]["us"]["median"]
    parts = {name: part["percent"]["median"] for name, part in result["parts"].items()}
    yield (
        "**What of that meets FSDP2?** ",
        f"For a unit of 12 parameters and a microbatch FSDP2 itself needs {own_us:.0f} us of the host; ODC adds "
        f"{parts['all of ODC']:.0f} %, bytes aside: {parts['interception']:.1f} % by standing between, "
        f"{parts['guard']:.1f} % by looking whether parameters were changed, {parts['transfers']:.1f} % by two gathers "
        "and a push",
    )


def _fsdp_host_time_before(result: dict[str, Any]) -> Figures:
    parts = {name: part["percent"]["median"] for name, part in result["parts"].items()}
    yield (
        "while `.grad` was watched by an attribute of its own, ",
        f"it was {parts['all of ODC']:.0f} %, and models that are not patched paid {parts['other models']:.0f} %",
    )


def _uneven(result: dict[str, Any]) -> Figures:
    slower, longer = ({cell["accumulate"]: cell for cell in part} for part in _halves(result["cells"]))
    yield (
        "",
        f"the others need {slower['direct']['of_own']:.2f} times their own computation to their last push where "
        f"clients add, {slower['daemon']['of_own']:.2f} times where daemons do",
    )
    yield (
        "",
        f"takes {longer['direct']['of_longest']:.2f} and {longer['daemon']['of_longest']:.2f} times the longest "
        f"computation, and would take {longer['direct']['lockstep_s'] / longer['direct']['longest_s']:.2f} times in "
        "lockstep",
    )


def _uneven_before(result: dict[str, Any]) -> Figures:
    slower, longer = ({cell["accumulate"]: cell for cell in part} for part in _halves(result["cells"]))
    yield "", f"it was {slower['daemon']['of_own']:.1f} and {longer['daemon']['of_longest']:.2f} times with daemons"


def _halves(cells: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those of the first plan, those of the second one."""
    return [cell for cell in cells if cell["plan"] == cells[0]["plan"]], [
        cell for cell in cells if cell["plan"] != cells[0]["plan"]
    ]


def _host_time_streams(result: dict[str, Any]) -> Figures:
    cells = {(cell["ranks"], cell["accumulate"]): cell["operations"] for cell in result["cells"]}
    for ranks in sorted({ranks for ranks, _ in cells}):
        direct, daemon = cells[ranks, "direct"], cells[ranks, "daemon"]
        rows = [direct["publish"], direct["gather"], direct["push"], daemon["push"]]
        costs = " | ".join(f"{row['cpu_us']['median']:.0f} us, {row['driver_calls']:.0f}" for row in rows)
        yield f"| {ranks} |", f" {costs} |"


def _emulated(result: dict[str, Any]) -> Figures:
    settings, run = result["settings"], result["runs"]["lb-mini"]
    planned, measured, waiting = (100 * run[key] for key in ("planned_bubble", "bubble", "waiting"))
    yield (
        "**Does a run reach its plan?** ",
        f"{settings['ranks']} ranks with emulated compute (a layer is a sleep; LongAlign, LB-Mini, "
        f"{settings['minibatch_size']} samples a rank) were planned to idle {planned:.1f} % of their time and idled "
        f"{measured:.1f} %, of which they waited for one another {waiting:.1f} %",
    )


def _chaos(result: dict[str, Any]) -> Figures:
    counts = result["counts"]
    slowest: dict[bool, float] = {}
    for row in result["by_transport_and_action"]:
        stop = row["action"] == "stop"
        slowest[stop] = max(slowest.get(stop, 0.0), row["slowest_s"] or 0.0)
    yield (
        "",
        f"of {sum(counts.values())} trials {counts['right']} ended as documented, the last rank at most "
        f"{slowest[False]:.1f} s after a death or an error, {slowest[True]:.1f} s after a rank was stopped for ever",
    )


def _parity(result: dict[str, Any]) -> Figures:
    counts = result["counts"]
    yield (
        "",
        f"of {sum(counts.values())} generated scripts {counts['equal']} train to the numbers of plain FSDP (largest "
        f"error of a gradient in fp32: {result['largest_errors_fp32']['gradients']:.1e} of the largest term of its "
        f"sum), {counts['refused']} are refused by name, {counts['different']} differ",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="odc.bench.harness.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    texts = {document: document.read_text() for document in DOCUMENTS}
    changed, lost = update(texts, figures())
    for figure in changed:
        print(f"{figure.source}: {figure.words}")
    for figure in lost:
        print(f"{figure.source}: {figure.document} has not exactly one place for: {figure.words}", file=sys.stderr)
    for document, text in texts.items() if not check else ():
        document.write_text(text)
    sys.exit(1 if lost or (check and changed) else 0)


if __name__ == "__main__":
    main()
