"""What the scripts share: a run on one rank, plain or patched, and how exact its numbers must be."""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from training import Net, build, each_way, largest_difference, loss_of, optimizer_of, tokens, use_up

import odc

STEPS = 3
Outcome = dict[str, Any]
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class Run:
    """One run of a script on one rank."""

    rank: int
    world_size: int
    patched: bool
    mesh: DeviceMesh
    num_blocks: int = 2
    """Of models whose script does not say so."""
    models: list[nn.Module] = field(default_factory=list)
    sessions: list[weakref.ref[odc.Session]] = field(default_factory=list)

    def patch(self, model: ModelT, **options: Any) -> ModelT:
        """The one line; returns the model. As in a script, nobody keeps what that line returns."""
        self.models.append(model)
        if self.patched:
            self.sessions.append(weakref.ref(odc.patch_fsdp(model, **options)))
        return model

    def start(self, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
        """What most scripts begin with: a model that is patched, and its optimizer."""
        model = self.patch(self.net(**options))
        return model, optimizer_of(model)

    def live_sessions(self) -> list[odc.Session]:
        found = [session() for session in self.sessions]
        assert None not in found, "a session must live as long as its model"
        return [session for session in found if session is not None]

    def backward(self, model: nn.Module, step: int, microbatch: int = 0, **options: Any) -> torch.Tensor:
        loss = loss_of(model, tokens(step, self.rank, microbatch), **options)
        (loss * 0.02).backward()
        return loss.detach()

    def steps(self, model: nn.Module, microbatches: int = 1) -> Iterator[int]:
        """Of a loop: each begins with so many microbatches."""
        for step in range(STEPS):
            for microbatch in range(microbatches):
                self.backward(model, step, microbatch)
            yield step

    def backward_unless(self, idle: bool, model: nn.Module, step: int) -> None:
        """A microbatch, if this rank has one. Plain FSDP needs one of weight zero where it has none."""
        if not idle:
            self.backward(model, step)
        elif not self.patched:
            (loss_of(model, tokens(step, self.rank, 0)) * 0.0).backward()

    def net(self, **options: Any) -> Net:
        return self.shard(build(num_blocks=self.num_blocks), **options)

    def shard(self, model: Net, **options: Any) -> Net:
        for block in model.blocks:
            fully_shard(block, mesh=self.mesh, **options)
        fully_shard(model, mesh=self.mesh, **options)
        return model


Script = Callable[[Run], Outcome | None]


@dataclass(frozen=True)
class Case:
    """A script, and how far its numbers may be from those of plain FSDP2."""

    script: Script
    tolerance: float = 0.0
    minibatches: int | None = STEPS  # of each session; None: they differ
    pushes: bool = True


def with_(script: Callable[..., Outcome | None], *args: Any, **options: Any) -> Script:
    return lambda run: script(run, *args, **options)


def train(run: Run, model: nn.Module, steps: int = STEPS, **options: Any) -> None:
    optimizer = optimizer_of(model)
    for step in range(steps):
        run.backward(model, step, **options)
        use_up(optimizer, model)


def norms_of_steps(run: Run, norm: Callable[[Any], torch.Tensor]) -> Outcome:
    """``norm`` asks for it, and may clip."""
    model, optimizer = run.start()
    norms = []
    for _ in run.steps(model):
        norms.append(full(norm(model)))
        use_up(optimizer)
    return {"norms": torch.stack(norms)}


def perform(case: Case, run: Run) -> Outcome:
    """Run a script; returns what it returns and the parameters of its models in the end."""
    try:
        found = case.script(run) or {}
        for session in run.live_sessions():
            stats = session.stats()
            assert stats.gathers, "patched, yet nothing was gathered on demand"
            assert stats.pushes or not case.pushes, "patched, yet nothing was pushed"
            assert case.minibatches in (None, stats.minibatches), f"{stats.minibatches} minibatches"
        for index, model in enumerate(run.models):
            found.update({f"parameter {index} {n}": p for n, p in model.named_parameters()})
        parts = {key: _local(value) for key, value in found.items()}  # each rank compares what it has
        return {key: part for key, part in parts.items() if part.numel()}  # FSDP1 shards may be empty
    finally:
        for session in run.live_sessions():
            session.close()


def full(value: Any) -> torch.Tensor:
    """The whole of a DTensor; of anything else this rank's part."""
    tensor: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return tensor.detach().clone()


def _local(value: Any) -> torch.Tensor:
    """This rank's part."""
    tensor: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return tensor.detach().clone()


def difference(case: Case, make_run: Callable[[bool], Run]) -> float | str:
    """The largest difference between plain and patched, or how the script failed."""
    return differences(case, make_run, ["small"])["small"]


def differences(case: Case, make_run: Callable[[bool], Run], ways: Sequence[str]) -> dict[str, float | str]:
    """The same for each of the ways of :func:`training.communicating`; the plain script runs once."""
    try:
        plain = perform(case, make_run(False))
    except Exception:
        return dict.fromkeys(ways, traceback.format_exc())
    return dict(zip(ways, each_way(ways, _compare, case, make_run, plain), strict=True))


def _compare(case: Case, make_run: Callable[[bool], Run], plain: Outcome) -> float | str:
    try:
        ours = perform(case, make_run(True))
    except Exception:
        return traceback.format_exc()
    if set(plain) == set(ours) and all(torch.equal(plain[key], ours[key]) for key in plain):
        return 0.0
    return largest_difference(ours, plain)
