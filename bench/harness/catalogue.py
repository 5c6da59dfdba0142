"""The list of benchmarks. A new benchmark is a module in a room, and a line here.

Listing the benchmarks imports none of them: their modules load torch.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from odc.bench.harness.benchmark import Benchmark

_REPOSITORY = "the extra examples, the repository"


class Entry(NamedTuple):
    """A benchmark as ``odc bench list`` shows it."""

    room: str
    name: str
    takes: str
    """Time with the defaults, and with ``--quick``, on two cores."""
    needs: str = ""
    """What the benchmark needs besides two cores."""

    @property
    def path(self) -> Path:
        """The path of the benchmark's module. A benchmark of several modules is a folder."""
        path = Path(__file__).parents[1] / self.room / self.name
        return path / "benchmark.py" if path.is_dir() else path.with_suffix(".py")

    @property
    def title(self) -> str:
        """The title from the module's docstring. The module is read, not imported."""
        return title_of(ast.get_docstring(ast.parse(self.path.read_text())) or "")


ENTRIES = (
    Entry("communication", "primitives", "6 min, quick 40 s", "GPUs with NCCL beside, or 2 cores"),
    Entry("communication", "fsdp_host_time", "2 min, quick 1 min"),
    Entry("communication", "memory", "5 min, quick 30 s"),
    Entry("communication", "uneven", "1 min, quick 40 s"),
    Entry("communication", "links", "20 s, quick 2 s"),
    Entry("training", "demo", "3 min (with --alternatives 7), quick 50 s", _REPOSITORY),
    Entry("training", "demo_rl", "8 min, quick 50 s", _REPOSITORY),
    Entry("training", "multimodal", "4 min, quick 30 s", _REPOSITORY),
    Entry("training", "vlm", "5 min, quick 2 min", _REPOSITORY),
    Entry("training", "stream_training", "10 min, quick 30 s", _REPOSITORY),
    Entry("training", "trainers", "20 min, quick 2 min", _REPOSITORY),
    Entry("training", "emulated", "5 min, quick 40 s"),
    Entry("training", "late_binding", "20 min, quick 1 min"),
    Entry("training", "context_parallel", "9 min, quick 40 s"),
    Entry("training", "multimodal_emulated", "8 min, quick 40 s"),
    Entry("batching", "batching", "3 min, quick 30 s"),
    Entry("planning", "planning", "1 min, quick 5 s"),
    Entry("planning", "tables", "2 min, quick 6 s"),
    Entry("planning", "partition_quality", "10 min, quick 10 s"),
    Entry("planning", "post_balance", "4 min, quick 10 s", "CBC (pulp) for a part"),
    Entry("planning", "multimodal_simulated", "15 min, quick 5 s"),
    Entry("proof", "conformance", "3 min, quick 30 s"),
    Entry("proof", "parity", "15 min, quick 30 s"),
    Entry("proof", "chaos", "20 min, quick 30 s"),
    Entry("gpu", "gpu", "5 min on one GPU, up to 1 h on several; quick less", "a GPU; one for each rank for a part"),
)


def entry_of(name: str) -> Entry:
    """The entry of this name; hyphens and underscores are equal.

    Raises:
        ValueError: there is no such benchmark.
    """
    for entry in ENTRIES:
        if entry.name == name.replace("-", "_"):
            return entry
    known = ", ".join(written(entry.name) for entry in ENTRIES)
    raise ValueError(f"there is no benchmark {name!r}: expected one of {known}")


def find(name: str) -> Benchmark:
    """The benchmark of this name. Imports its module.

    Raises:
        ValueError: there is none of that name.
    """
    path = entry_of(name).path
    module = ".".join(path.relative_to(Path(__file__).parents[1]).with_suffix("").parts)
    found: Benchmark = importlib.import_module(f"odc.bench.{module}").BENCHMARK
    return found


def title_of(says: str) -> str:
    """The first words of a benchmark's documentation."""
    return re.split(r"[:.]( |$)", says.split("\n\n")[0].replace("\n", " ").replace("``", ""))[0]


def written(name: str) -> str:
    """The name as a user types it."""
    return name.replace("_", "-")


def all_of_them() -> Iterator[Benchmark]:
    """All benchmarks. Imports their modules."""
    for entry in ENTRIES:
        yield find(entry.name)
