"""What a check is told, and what it answers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class CheckFailedError(Exception):
    """What was checked is not so; the text says what was found and what was expected."""


class NotRunError(Exception):
    """The check cannot be made on this machine; the text says why."""


def require(condition: bool, text: str) -> None:
    """Fail the check with ``text`` unless ``condition`` holds."""
    if not condition:
        raise CheckFailedError(text)


@dataclass(frozen=True)
class Setting:
    """Where and how thoroughly to check. The same for every check and every rank."""

    transport: str = "cuda_ipc"
    device_type: str = "cuda"
    num_gpus: int = 0
    worlds: tuple[int, ...] = (2, 4)
    """Numbers of ranks to check with."""
    minibatches: int = 1000
    """Of the soak test."""
    quick: bool = False
    """Fewer cases, sizes and repetitions: a first look, not a proof."""
    transfer_table: str = ""
    """File for the table of measured transfers, if not empty."""
    prepare: str = ""
    """``"module:function"`` to call in every process first: tests register transports there."""

    def owns_gpus(self, world_size: int) -> bool:
        """Whether every rank has a GPU of its own."""
        return self.device_type == "cuda" and self.num_gpus >= world_size

    def device(self, rank: int) -> torch.device:
        """Where ``rank`` computes. Ranks share GPUs if there are fewer of them."""
        if self.device_type != "cuda":
            return torch.device(self.device_type)
        return torch.device("cuda", rank % max(self.num_gpus, 1))

    def backend(self, world_size: int) -> str:
        """The process group for set-up and baselines: NCCL refuses two ranks on one GPU."""
        return "cpu:gloo,cuda:nccl" if self.owns_gpus(world_size) else "gloo"

    @property
    def group_limit_s(self) -> float:
        """How long the ranks of one process group may take."""
        return 90.0 if self.quick else 240.0

    def be_prepared(self) -> None:
        if self.prepare:
            resolve(self.prepare)()


@dataclass(frozen=True)
class TableData:
    """A table for people, as text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Report:
    """What a check that passed has measured."""

    figures: str
    """One line for the table."""
    data: dict[str, Any] = field(default_factory=dict)
    """Everything, as JSON."""
    tables: tuple[TableData, ...] = ()


Body = Callable[[Setting], Report]
"""A check. Passes by returning; a module-level function, since it runs in a process of its own."""


def resolve(location: str) -> Callable[..., Any]:
    """The function at ``"module:name"``."""
    module, _, name = location.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
