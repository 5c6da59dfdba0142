"""The final report. It times microbatches, and estimates how much waiting one synchronization per minibatch has saved.

No rank waits for another. Each puts its numbers into torchrun's key-value store, which outlives the ranks. The last
rank to do so reads the numbers of all ranks and prints the report. If a rank has failed, its numbers are missing and
nothing is printed. Without torchrun, rank 0 has the store, waits for the numbers of the others, and prints the report.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import zip_longest
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from odc.config import LaunchEnvironment
from odc.fsdp_patch import Session
from odc.fsdp_patch.automatic import model_name
from odc.fsdp_patch.interception import untraced
from odc.timeline import Stats

MAX_MICROBATCHES = 100_000
"""Kept for the report; the latest ones count."""

# Below this part of the time nothing was saved, as far as clocks can tell.
_NOTHING = 0.005

Times = Sequence[Sequence[float]]
"""Of one rank: seconds of each microbatch, minibatch by minibatch."""

_STORE_TIMEOUT = timedelta(seconds=5)


# Measured on each rank


class MicrobatchMeter:
    """Times microbatches from the root's forward to the next one, or to the end of the minibatch.

    Host time, on a GPU as on a CPU: what the rank spends outside ODC. A forward without a backward (an evaluation) is
    not a microbatch. One that keeps a graph but pushes nothing is the first part of the next microbatch: a model used
    twice per backward, or gradients accumulated without synchronization.
    """

    def __init__(self, model: nn.Module, session: Session, clock: Callable[[], float] = time.monotonic) -> None:
        self._session = session
        self._clock = clock
        self._started_s: float | None = None
        self._keeps_graph = False
        self._communication_s = 0.0
        self._pushes = 0
        self._unpushed_s = 0.0
        self._current: list[float] = []
        self._kept = 0
        self.minibatches: list[list[float]] = []
        """Seconds per microbatch, minibatch by minibatch."""
        start = untraced(lambda module, args: self.start(), "the time of a microbatch is taken here")
        self._hook = model.register_forward_pre_hook(start, prepend=True)
        session.on_finish = self._end_minibatch

    def start(self) -> None:
        """A forward begins."""
        self._stop()
        stats = self._session.stats()
        self._started_s, self._communication_s, self._pushes = self._clock(), stats.communication_s, stats.pushes
        self._keeps_graph = torch.is_grad_enabled()

    def _stop(self) -> None:
        if self._started_s is None:
            return
        stats = self._session.stats()
        elapsed_s = self._clock() - self._started_s - (stats.communication_s - self._communication_s)
        if stats.pushes > self._pushes:
            self._current.append(self._unpushed_s + elapsed_s)
            self._unpushed_s = 0.0
        elif self._keeps_graph:
            self._unpushed_s += elapsed_s
        self._started_s = None

    def _end_minibatch(self) -> None:
        self._stop()
        self._unpushed_s = 0.0
        self.minibatches.append(self._current)
        self._kept += len(self._current)
        self._current = []
        while self._kept > MAX_MICROBATCHES:
            self._kept -= len(self.minibatches.pop(0))

    def close(self) -> None:
        """Take the hook out of the model. Idempotent."""
        self._hook.remove()
        self._session.on_finish = None


@dataclass(frozen=True)
class Account:
    """What one rank has to say about one model."""

    model: str
    wall_s: float
    waited_s: float
    times: Times
    transfers_s: float = 0.0
    """In ODC's operations, besides waiting."""


@dataclass
class _Measured:
    """What is known of a patched model. It does not keep the model: scripts drop one and make the next."""

    name: str
    started_s: float
    meter: weakref.ref[MicrobatchMeter]
    counters: Stats
    times: Times


class Measurements:
    """Of all models that this rank has patched, until :meth:`close`."""

    def __init__(self) -> None:
        self._of_models: list[_Measured] = []

    def begin(self, module: nn.Module, session: Session, computes: bool) -> None:
        """A model was patched; ``computes``: in a forward of it, whose hooks torch has collected already."""
        meter = MicrobatchMeter(module, session)
        self._of_models.append(
            _Measured(model_name(module), time.monotonic(), weakref.ref(meter), session.counters, meter.minibatches)
        )
        if computes:
            meter.start()

    def accounts(self) -> list[Account]:
        """Model by model."""
        now_s = time.monotonic()
        return [
            Account(
                one.name,
                now_s - one.started_s,
                one.counters.wait_s,
                one.times,
                max(0.0, one.counters.communication_s - one.counters.wait_s),
            )
            for one in self._of_models
        ]

    def close(self) -> None:
        """Take the meters out of the models that are still there. Idempotent."""
        with contextlib.ExitStack() as stack:
            for meter in (one.meter() for one in self._of_models):
                if meter is not None:
                    stack.callback(meter.close)


# Computed from all ranks' measurements


@dataclass(frozen=True)
class Savings:
    """Sums over minibatches, in seconds."""

    minibatches: int
    compute_s: float
    """Mean over ranks of the time spent in microbatches, communication excluded."""
    critical_s: float
    """With one synchronization per minibatch: the sum of each minibatch's slowest rank."""
    lockstep_s: float
    """With one per microbatch: the sum of each microbatch's slowest rank. Collectives synchronize at every layer, so
    this is the least that they would take."""
    most_microbatches: int = 0
    """Of a rank in a minibatch."""

    @property
    def saved_s(self) -> float:
        return self.lockstep_s - self.critical_s


def savings(ranks: Sequence[Times]) -> Savings:
    """Compare one synchronization per minibatch with one per microbatch, for the same microbatches.

    Minibatches are aligned from the last one, since long runs keep only the latest. A rank with fewer microbatches
    counts as 0 s in the ones it lacks.

    >>> savings([[[1.0, 3.0]], [[3.0, 1.0]]]).saved_s
    2.0
    """
    count = min((len(times) for times in ranks), default=0)
    compute_s = critical_s = lockstep_s = 0.0
    most = 0
    for index in range(count):
        minibatch = [times[len(times) - count + index] for times in ranks]
        busy = [sum(microbatches) for microbatches in minibatch]
        compute_s += sum(busy) / len(ranks)
        critical_s += max(busy)
        lockstep_s += sum(max(row) for row in zip_longest(*minibatch, fillvalue=0.0))
        most = max(most, *map(len, minibatch))
    return Savings(count, compute_s, critical_s, lockstep_s, most)


def describe(
    result: Savings, waited_s: Sequence[float], wall_s: float, transfers_s: Sequence[float], model: str = ""
) -> str:
    """One line for people.

    Args:
        model: its name, where there are several.
        waited_s: measured seconds each rank was blocked by another one.
        wall_s: wall-clock seconds from patching to the end.
        transfers_s: measured seconds of each rank in ODC's operations, besides waiting.
    """
    mean_wait_s = sum(waited_s) / len(waited_s)
    whose = f"{model}: " if model else ""
    text = (
        f"odc: {whose}{result.minibatches} minibatches on {len(waited_s)} ranks in {wall_s:.1f} s; ranks waited for "
        f"one another {mean_wait_s:.1f} s each ({_percent(mean_wait_s, wall_s)})."
    )
    if not result.minibatches:
        return text
    if result.saved_s < _NOTHING * wall_s:
        is_one = result.most_microbatches < 2
        why = "ranks synchronized once a minibatch anyway" if is_one else "the slowest rank was so at every microbatch"
        return f"{text} No waiting was saved: {why}."
    text = (
        f"{text} Synchronizing at every microbatch, as FSDP does, would have taken at least {result.saved_s:.1f} s "
        f"longer ({_percent(result.saved_s, wall_s)})."
    )
    mean_transfer_s = sum(transfers_s) / len(transfers_s)
    if mean_transfer_s <= result.saved_s:
        return text
    return f"{text} ODC's own transfers took more, {mean_transfer_s:.1f} s of each rank: compare with torchrun."


def _percent(part_s: float, whole_s: float) -> str:
    return f"{100 * part_s / whole_s:.0f} %" if whole_s > 0 else "-"


# Between the ranks


class Store(Protocol):
    """What is used of a key-value store."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def add(self, key: str, amount: int) -> int: ...


def open_store(launch: LaunchEnvironment) -> Store | None:
    """torchrun's store; None where there is none that outlives the ranks."""
    if not launch.agent_store:
        return None
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]  # bound in C++, not in __all__
        launch.master_addr, launch.master_port, is_master=False, timeout=_STORE_TIMEOUT
    )
    return store


def leave(store: Store, launch: LaunchEnvironment, accounts: Sequence[Account]) -> list[str] | None:
    """Leave this rank's accounts. Returns the lines to print, to the last rank to come or the owner of the store."""
    prefix = f"odc/report/{launch.attempt}"
    store.set(f"{prefix}/{launch.rank}", json.dumps([asdict(account) for account in accounts]))
    is_last = store.add(f"{prefix}/count", 1) % launch.world_size == 0  # a job may make one process group after another
    if not (is_last if launch.agent_store else launch.rank == 0):
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
