"""Copy engines or a kernel: which moves a gather of a given size faster, from a measured table.

Copy engines occupy no multiprocessor, so compute that overlaps is not slowed down; but each owner's shard is a copy of
its own, and a copy costs microseconds to start. One kernel reads all owners at once. Where the lines cross depends on
the machine: ``python -m odc.bench.gpu_check`` measures them and prints the table.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from odc.errors import ConfigError

KERNEL, COPY_ENGINE = "kernel", "copy_engine"


@dataclass(frozen=True)
class TransferTable:
    """Rows of (up to so many bytes, "kernel" or "copy_engine"), in rising order; the last one has 0 bytes: no limit."""

    rows: tuple[tuple[int, str], ...]

    def __post_init__(self) -> None:
        limits = [limit for limit, _ in self.rows]
        if not self.rows or limits[-1] != 0 or any(limit <= 0 for limit in limits[:-1]):
            raise ConfigError(f"transfer table {self.rows}: the last row, and no other, has 0 bytes, for no limit")
        if limits[:-1] != sorted(set(limits[:-1])):
            raise ConfigError(f"transfer table {self.rows}: bytes must rise from row to row")
        unknown = {way for _, way in self.rows} - {KERNEL, COPY_ENGINE}
        if unknown:
            raise ConfigError(f"transfer table: {sorted(unknown)} is neither {KERNEL!r} nor {COPY_ENGINE!r}")

    @classmethod
    def default(cls) -> TransferTable:
        """Copy engines for everything, as the paper does within a node (appendix B): nothing measured says better."""
        return cls(((0, COPY_ENGINE),))

    @classmethod
    def of_measurements(cls, sizes: Sequence[int], kernel_s: Sequence[float], copy_s: Sequence[float]) -> TransferTable:
        """From times of the same gathers done both ways; a limit is the geometric mean of the sizes around a crossing.

        >>> TransferTable.of_measurements([1000, 4000, 16000], [1.0, 2.0, 9.0], [3.0, 3.0, 8.0]).rows
        ((8000, 'kernel'), (0, 'copy_engine'))
        """
        ways = [KERNEL if kernel < copy else COPY_ENGINE for kernel, copy in zip(kernel_s, copy_s, strict=True)]
        rows = [
            (int((sizes[i] * sizes[i + 1]) ** 0.5), ways[i]) for i in range(len(sizes) - 1) if ways[i] != ways[i + 1]
        ]
        return cls((*rows, (0, ways[-1])))

    @classmethod
    def load(cls, path: Path) -> TransferTable:
        """From a JSON file that :meth:`save` or ``gpu_check`` wrote.

        Raises:
            ConfigError: the file cannot be read, or holds no such table.
        """
        try:
            rows = json.loads(path.read_text())["transfer_table"]
            return cls(tuple((int(limit), str(way)) for limit, way in rows))
        except (OSError, ValueError, KeyError, TypeError) as problem:
            raise ConfigError(f"{path} holds no transfer table: {problem!r}") from None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"transfer_table": self.rows}) + "\n")

    def by_kernel(self, num_bytes: int) -> bool:
        """Whether a kernel is the faster way to gather ``num_bytes``."""
        return next(way for limit, way in self.rows if limit == 0 or num_bytes <= limit) == KERNEL
