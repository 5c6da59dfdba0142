"""What a check is told, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from odc.bench.harness import ranks
from odc.bench.harness.benchmark import Table
from odc.bench.harness.ranks import BenchError, Place, RankFailedError


class CheckFailedError(BenchError):
    """What was checked is not so; the text says what was found and what was expected.

    Args:
        data: what was measured all the same, as that of a :class:`Report`.
        tables: what of it is for people.
    """

    def __init__(self, text: str, data: dict[str, Any] | None = None, tables: tuple[Table, ...] = ()) -> None:
        super().__init__(text)
        self.data, self.tables = data or {}, tables


def require(condition: bool, text: str) -> None:
    """Fail the check with ``text`` unless ``condition`` holds."""
    if not condition:
        raise CheckFailedError(text)


@dataclass(frozen=True)
class Setting(Place):
    """Where and how thoroughly to check. The same for every check and every rank."""

    transport: str = "cuda_ipc"
    device_type: str = "cuda"
    worlds: tuple[int, ...] = (2, 4)
    """Numbers of ranks to check with."""
    minibatches: int = 1000
    """Of the soak test."""
    transfer_table: str = ""
    """File for the table of measured transfers, if not empty."""

    @property
    def group_limit_s(self) -> float:
        """How long the ranks of one process group may take."""
        return 90.0 if self.quick else 240.0


def run_ranks(
    setting: Setting,
    world_size: int,
    body: Callable[..., Any],
    *arguments: Any,
    limit_s: float | None = None,
    expendable: Collection[int] = (),
) -> list[Any]:
    """What ``body(rank, *arguments)`` returned on every rank; None for the ``expendable`` ones, which may die.

    Raises:
        NotRunError: a rank raised it.
        CheckFailedError: a rank failed, died, or had not ended after ``limit_s`` (default: the setting's).
    """
    try:
        return ranks.run_ranks(
            world_size,
            body,
            *arguments,
            place=setting,
            limit_s=limit_s or setting.group_limit_s,
            expendable=expendable,
            preload=(),  # of the checks, each of which has a fork server for its ranks, few train
        )
    except RankFailedError as failure:
        raise CheckFailedError(str(failure)) from None


@dataclass(frozen=True)
class Report:
    """What a check has measured."""

    figures: str
    """One line for the table."""
    data: dict[str, Any] = field(default_factory=dict)
    """Everything, as JSON."""
    tables: tuple[Table, ...] = ()
    """What of it is for people. Made in the check's process, so without lambdas."""


Body = Callable[[Setting], Report]
"""A check. Passes by returning; a module-level function, since it runs in a process of its own."""
