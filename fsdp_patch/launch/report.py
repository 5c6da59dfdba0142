"""One report of all ranks at the end of a run, without a rank waiting for another.

Each rank leaves its account in torchrun's key-value store, which outlives the ranks; the last one to do so finds all
the others' and prints. A rank that failed leaves none, and nothing is printed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from odc.config import LaunchEnvironment
from odc.fsdp_patch.launch.savings import Times, describe, savings

_STORE_TIMEOUT = timedelta(seconds=5)


class Store(Protocol):
    """What is used of a key-value store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...


@dataclass(frozen=True)
class Account:
    """What one rank has to say about one model."""

    model: str
    wall_s: float
    waited_s: float
    times: Times
    transfers_s: float = 0.0
    """In ODC's operations, besides waiting."""


def open_store(launch: LaunchEnvironment) -> Store | None:
    """torchrun's store; None where there is none that outlives the ranks."""
    if not launch.agent_store:
        return None
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # bound in C++, not in __all__
        launch.master_addr, launch.master_port, is_master=False, timeout=_STORE_TIMEOUT
    )
    return store


def leave(store: Store, launch: LaunchEnvironment, accounts: Sequence[Account]) -> list[str] | None:
    """Leave this rank's accounts; on the last rank to come, the lines to print."""
    prefix = f"odc/report/{launch.attempt}"
    store.set(f"{prefix}/{launch.rank}", json.dumps([asdict(account) for account in accounts]))
    if store.add(f"{prefix}/count", 1) < launch.world_size:
        return None
    return summarise([json.loads(store.get(f"{prefix}/{rank}")) for rank in range(launch.world_size)])


def summarise(ranks: Sequence[Sequence[dict[str, object]]]) -> list[str]:
    """One line per model that was trained, and patched on all ranks at the same place of their accounts.

    Models of which only some ranks have a part (stages of a pipeline) are left out: their ranks do not run in step.
    """
    together = [
        same_model
        for same_model in zip(*([Account(**fields) for fields in accounts] for accounts in ranks), strict=False)  # type: ignore[arg-type]
        if any(account.times for account in same_model) and len({account.model for account in same_model}) == 1
    ]
    return [
        describe(
            savings([account.times for account in same_model]),
            [account.waited_s for account in same_model],
            max(account.wall_s for account in same_model),
            [account.transfers_s for account in same_model],
            same_model[0].model if len(together) > 1 else "",
        )
        for same_model in together
    ]
