"""Other people's batching on the samples of the streams' table: their own code, our metrics.

    odc bench peers --folder runs/peers

The packages are no dependencies of this project. They lie in a folder of their own, which is on the path of one process
per row only (:mod:`.peer_programs`); where one is missing, the error says what to install. Such a process gets
the lengths of the shuffled samples and gives back which samples each rank has in each microbatch. All else is done
here, as for our own rows. Peers train under collectives: their ranks wait for the slowest at every microbatch. Where
steps have several microbatches, a second row, "at steps", is of the same batches if ranks waited at steps only, as
they would with on-demand communication.

The settings are those that a package's own documentation or trainer has, with the token budget and the pool of the
streams, and steps of about as many samples; each row says which.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from odc.balance.checks import IntArray
from odc.balance.costs import CostModel, evaluate
from odc.balance.grouping.rounds import Entry
from odc.bench.batching.peer_programs import Batches
from odc.bench.batching.streamed import StreamedEpoch, load_of
from odc.bench.batching.waiting import (
    MINIBATCH_SIZE,
    SMALL_POOL,
    STREAM_COLUMNS,
    STREAM_KEYS,
    WAITING,
    WORLD_SIZE,
    StreamRow,
    shuffled,
    simulate_streams,
)
from odc.bench.harness.benchmark import Benchmark, Column, Entries, Figures, Run, Table
from odc.bench.harness.ranks import BenchError
from odc.bench.planning.paper_costs import paper_cost

_LAST_LINES = 12  # of a process that has failed
_FOR_LHOTSE = (
    *("soundfile==0.14.0", "cffi==2.1.1", "intervaltree==3.2.1", "sortedcontainers==2.4.0", "cytoolz==1.2.0"),
    *("toolz==1.2.0", "urllib3==2.8.0", "click==8.5.1", "tqdm==4.70.1", "pyyaml==6.0.3", "packaging==26.3"),
)
_FOR_VERL = (
    *("ray==2.60.0", "tensordict==0.10.0", "attrs==26.1.0", "certifi==2026.10.18", "charset-normalizer==3.5.2"),
    *("click==8.5.1", "cloudpickle==3.1.2", "idna==3.20", "jsonschema==4.26.0", "msgpack==1.2.4", "packaging==26.3"),
    *("jsonschema-specifications==2025.9.1", "protobuf==7.36.2", "pyvers==0.2.3", "pyyaml==6.0.3", "tqdm==4.70.1"),
    *("referencing==0.37.0", "requests==2.34.2", "rpds-py==2026.9.1", "urllib3==2.8.0"),
)

Settings = Mapping[str, int | float | bool | str]


class PeerError(BenchError):
    """Packages are missing, or the process of a peer has failed."""


@dataclass(frozen=True)
class Peer:
    """A row: a package with settings."""

    kind: str
    program: str
    """One of :data:`.peer_programs.PROGRAMS`."""

    package: str
    """Name and version."""

    is_packed: bool
    settings: Settings
    """Of the package, besides the token budget, by its own names."""

    needs: tuple[str, ...] = ()
    """What its modules import besides torch and numpy, and versions that are known to do."""

    examples: tuple[str, ...] = ()
    """What they import that this project's extra "examples" has, with all that it needs itself."""


_ODB, _COSMOS, _LHOTSE, _VERL = "online-dynamic-batching==0.1.2", "cosmos-rl==0.4.7", "lhotse==1.33.0", "verl==0.9.1"
# As many samples ahead as its own example has (4 workers x 64), with fewer processes: the batches are the same.
_POOLED: Settings = {
    "num_workers": 1,
    "prefetch_factor": SMALL_POOL,
    "buffer_size": SMALL_POOL,
    "loss_scaling": "exact",
}
_PACKED: Settings = {"pool_size": SMALL_POOL, "seq_packing_enabled": True}
# 30 buckets as in recipes; the length at which attention costs what all else does, of the model whose costs these are.
_BUCKETS: Settings = {"num_buckets": 30, "shuffle": True, "quadratic_duration": 42166.0}
PEERS = (
    Peer("ODB", "odb", _ODB, False, {**_POOLED, "join": True}),
    Peer("ODB, no warm-up", "odb", _ODB, False, {**_POOLED, "join": True, "no_warmup": True}),
    Peer("cosmos-rl", "cosmos", _COSMOS, True, {**_PACKED, "accumulate_steps": 1}),
    Peer("cosmos-rl, 4 a step", "cosmos", _COSMOS, True, {**_PACKED, "accumulate_steps": 4}),
    # Each rank looks at the samples of all: the pools of all ranks together, and the buffer that is the default.
    Peer("lhotse, 2048", "lhotse", _LHOTSE, False, {**_BUCKETS, "buffer_size": WORLD_SIZE * SMALL_POOL}, _FOR_LHOTSE),
    Peer("lhotse, 20000", "lhotse", _LHOTSE, False, {**_BUCKETS, "buffer_size": 20_000}, _FOR_LHOTSE),
    # As many samples in a step as in the minibatches of the streams, and the trainer's default.
    Peer(
        "verl (known), 32",
        "verl",
        _VERL,
        True,
        {"train_batch_size": WORLD_SIZE * MINIBATCH_SIZE},
        _FOR_VERL,
        ("transformers",),
    ),
    Peer("verl (known), 256", "verl", _VERL, True, {"train_batch_size": 256}, _FOR_VERL, ("transformers",)),
)
"""What is run on each law. "Known": lengths are known in advance."""


def check_packages(folder: Path, peers: Iterable[Peer]) -> None:
    """The peers' packages are in the folder, in their versions; what they need is there or in this environment.

    Raises:
        PeerError: some are not; how to install them.
    """
    peers = tuple(peers)
    inside = _installed([str(folder)])
    here = {**_installed(sys.path), **inside}
    wanted = dict.fromkeys(peer.package for peer in peers)
    missing = [pin for pin in wanted if inside.get(pin.partition("==")[0]) != pin.partition("==")[2]]
    needed = dict.fromkeys(pin for peer in peers for pin in peer.needs)
    missing += [pin for pin in needed if pin.partition("==")[0] not in here]
    if missing:
        command = ["python", "-m", "pip", "install", "--no-deps", "--upgrade", "--target", str(folder), *missing]
        raise PeerError(f"{folder} lacks packages of others. Install them with\n\n{shlex.join(command)}")
    for peer in peers:
        for name in peer.examples:
            if name not in here:
                raise PeerError(f"{peer.package} imports {name}. Install it with\n\npython -m pip install {name}")


def _installed(path: list[str]) -> dict[str, str]:
    """Name -> version of what is installed on a path."""
    found = metadata.distributions(path=path)
    return {one.name.lower().replace("_", "-"): one.version for one in found}


def run_program(
    peer: Peer,
    folder: Path,
    lengths: IntArray,
    max_tokens: int,
    world_size: int = WORLD_SIZE,
    on_progress: Callable[[int], object] = lambda done: None,
) -> Batches:
    """The batches of all ranks, from a process with the packages in ``folder`` on its path. None of its processes
    outlives this call.

    Args:
        lengths: of the shuffled samples, (num_samples,).
        on_progress: called with how many samples more are in batches.

    Raises:
        PeerError: it failed, or what it gave back are no batches of these samples.
    """
    with tempfile.TemporaryDirectory(prefix="odc-peer-") as scratch:
        job, answer, errors = (Path(scratch, name) for name in ("job.json", "answer.json", "errors.txt"))
        words = {"lengths": lengths.tolist(), "max_tokens": max_tokens, "world_size": world_size}
        job.write_text(json.dumps({**words, "settings": dict(peer.settings)}))
        path = os.pathsep.join([str(folder.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        with errors.open("wb") as written:
            process = subprocess.Popen(
                [sys.executable, "-m", "odc.bench.batching.peer_programs", peer.program, str(job), str(answer)],
                stdout=subprocess.PIPE,
                stderr=written,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # and so a process group of all that it starts
                text=True,
            )
            assert process.stdout is not None
            try:
                with process.stdout as progress:
                    for line in progress:
                        on_progress(int(line))
                status = process.wait()
            finally:
                with contextlib.suppress(ProcessLookupError):  # nothing is left of the group
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if status != 0:
            last = "\n".join(errors.read_text(errors="replace").splitlines()[-_LAST_LINES:])
            raise PeerError(f"{peer.kind} ({peer.package}) ended with status {status}. Its last lines:\n{last}")
        batches: Batches = json.loads(answer.read_text())
    indices = [index for mine in batches for step in mine for part in step for index in part]
    if len(batches) != world_size or not indices or min(indices) < 0 or max(indices) >= lengths.size:
        raise PeerError(
            f"{peer.kind} ({peer.package}) gave batches for {len(batches)} ranks with {len(indices)} samples: expected "
            f"{world_size} ranks, and samples from 0 to {lengths.size - 1}"
        )
    return batches


def epoch_of(
    batches: Batches, lengths: IntArray, cost: CostModel, *, is_packed: bool, waits_at_steps: bool = False
) -> StreamedEpoch:
    """What the batches cost. A rank that has fewer steps or microbatches than others waits for them.

    Args:
        lengths: of the shuffled samples, (num_samples,).
        waits_at_steps: ranks wait for the slowest at the end of each step only, not of each microbatch.
    """
    costs = evaluate(cost, lengths).tolist()
    entries = [Entry(i, length, length, costs[i]) for i, length in enumerate(lengths.tolist())]
    table: list[list[float]] = []
    numbers: list[int] = []
    tokens = padded_tokens = 0
    for step in range(max(map(len, batches))):
        own = [mine[step] if step < len(mine) else [] for mine in batches]
        parts = [[[entries[index] for index in part] for part in mine if part] for mine in own]
        synchronized = (
            [parts] if waits_at_steps else [[mine[i : i + 1] for mine in parts] for i in range(max(map(len, parts)))]
        )
        for each in synchronized:
            loads = [load_of(mine, is_packed) for mine in each]
            table.append([load for load, _, _ in loads])
            numbers.append(sum(len(part) for mine in each for part in mine))
            tokens += sum(plain for _, plain, _ in loads)
            padded_tokens += sum(padded for _, _, padded in loads)
    return StreamedEpoch(np.array(table), np.array(numbers), tokens, padded_tokens, oldest=0)


def count_samples(batches: Batches, num_samples: int) -> tuple[int, int]:
    """How many samples come in no batch; how often samples come again."""
    indices = [index for mine in batches for step in mine for part in step for index in part]
    times = np.bincount(indices, minlength=num_samples)
    return int((times == 0).sum()), int((times[times > 0] - 1).sum())


def largest_microbatch(batches: Batches, lengths: IntArray, *, is_packed: bool) -> int:
    """Tokens of the largest one, with padding."""
    parts = [lengths[part] for mine in batches for step in mine for part in step if part]
    return max(int(part.sum() if is_packed else part.max() * part.size) for part in parts)


@dataclass(frozen=True)
class PeerRow(StreamRow):
    """A row of a peer."""

    lost: int = 0
    """Samples that come in no batch."""

    twice: int = 0
    """How often samples come again."""

    largest_tokens: int = 0
    """Of a microbatch, with padding."""

    waits_at: str = "microbatches"
    package: str = ""
    settings: Settings = field(default_factory=dict)


def rows_of(peer: Peer, law: str, max_tokens: int, lengths: IntArray, batches: Batches) -> list[PeerRow]:
    """The peer's row; where steps have several microbatches, also that of ranks that wait at steps only."""
    cost, is_packed = paper_cost("1.5B"), peer.is_packed
    lost, twice = count_samples(batches, lengths.size)
    per_step = (
        sum(len(part) for mine in batches for step in mine for part in step) / len(batches) / max(map(len, batches))
    )
    several = any(len(step) > 1 for mine in batches for step in mine)
    rows = []
    for waits_at_steps in (False, True) if several else (False,):
        epoch = epoch_of(batches, lengths, cost, is_packed=is_packed, waits_at_steps=waits_at_steps)
        figures = asdict(StreamRow.of(law, f"{peer.kind}{', at steps' if waits_at_steps else ''}", epoch))
        figures["samples_per_step"] = round(per_step, 2)
        rows.append(
            PeerRow(
                **figures,
                lost=lost,
                twice=twice,
                largest_tokens=largest_microbatch(batches, lengths, is_packed=is_packed),
                waits_at="steps" if waits_at_steps else "microbatches",
                package=peer.package,
                settings={"token budget": max_tokens, **peer.settings},
            )
        )
    return rows


def measure(
    run: Run,
    folder: Annotated[Path, typer.Option(help="Where the packages are installed.")] = Path("runs/peers"),
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths and their order.")] = 0,
    law: Annotated[str, typer.Option(help="Only this one, of longalign and sharegpt4o.")] = "",
) -> Entries:
    check_packages(folder, PEERS)
    waiting = [each for each in WAITING if law in each[0]]
    ours: list[StreamRow] = []
    theirs: list[PeerRow] = []
    run.begin(sum(num_samples for _, num_samples, _ in waiting) * (len(PEERS) + 1), "our streams")
    for name, num_samples, max_tokens in waiting:
        ours += simulate_streams(name, num_samples, max_tokens, seed)
        run.advance(num_samples)
    for name, num_samples, max_tokens in waiting:
        lengths = shuffled(name, num_samples, seed)
        for peer in PEERS:
            run.describe(f"{peer.kind}, {name}")
            batches = run_program(peer, folder, lengths, max_tokens, on_progress=run.advance)
            theirs += rows_of(peer, name, max_tokens, lengths, batches)
    settings = {"small_pool": SMALL_POOL, "world_size": WORLD_SIZE}
    return {"streams": [asdict(row) for row in ours], "peers": [asdict(row) for row in theirs], **settings}


def figures(result: Entries) -> Figures:
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
    yield "", f"cosmos-rl leaves {lost} out and takes {again} again (ShareGPT4o: {also_lost} and {also_again})"
    few, many = counts("verl (known), 32", "lost"), counts("verl (known), 256", "lost")
    yield (
        "verl leaves out its last batch, ",
        f"{few[0]} or {many[0]} samples (ShareGPT4o: {few[1]} or {many[1]})",
    )
    yield "lhotse repeats ", f"{max(*counts('lhotse, 2048', 'twice'), *counts('lhotse, 20000', 'twice'))} at most"
    yield "ODB's sampler repeats ", f"{counts('ODB', 'twice')[1]} of ShareGPT4o"


_TITLE = f"on {WORLD_SIZE} ranks, pools of {SMALL_POOL}"
BENCHMARK = Benchmark(
    measure,
    "30 min, quick 8 min",
    (
        Table("streams", f"streams {_TITLE}", STREAM_KEYS, STREAM_COLUMNS),
        Table(
            "peers",
            f"batches of other packages {_TITLE}",
            (Column("data set", "law"), Column("batches of", "kind")),
            (*STREAM_COLUMNS, Column("lost", "lost"), Column("twice", "twice")),
            "Lost: in no batch. Twice: how often samples come again.\n"
            + "\n".join(f"{p.kind}: {', '.join(f'{key}={value}' for key, value in p.settings.items())}" for p in PEERS),
        ),
    ),
    quick={"law": "longalign"},
    needs="other packages; it says which",
    figures=(("docs/streams.md", figures, ["batching_peers"]),),
)
