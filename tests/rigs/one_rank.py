"""One rank of a session without processes, FSDP or memory that is shared: what the others do is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from odc.errors import MisuseError, OdcError, ProtocolError
from odc.fsdp_patch.session import Connection, Session
from odc.fsdp_patch.unit import GradientShard, Unit, Watched
from odc.minibatch.protocol import End
from odc.minibatch.state import MinibatchState
from odc.timeline import Stats
from odc.units import ParamSlice, UnitSpec

Sums = list[torch.Tensor | None]


class OneParameter(Unit):
    """A unit of which this rank has all of one parameter. What it does not define says None."""

    device = torch.device("cpu")
    shard_group: Any = SimpleNamespace(size=lambda: 2)
    copy_group = None
    divide_factor = 1.0

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        super().__init__()
        self.name, self.parameter, self._local = name, parameter, parameter.detach()
        self._shards = [GradientShard(parameter, self._local)]

    def spec(self) -> UnitSpec:
        numel = self._local.numel()
        return UnitSpec(self.name, numel, torch.float32, (ParamSlice(self.name, numel),))

    def watched(self) -> list[Watched]:
        return [Watched((self.parameter, self._local), self._local, slice(None))]

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [self.parameter]

    def fill_shard(self, out: torch.Tensor) -> None:
        out.copy_(self._local)

    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield published, self._local

    def beside_by_name(self, published: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        yield self.name, (published, self._local)

    def install(self, mean: torch.Tensor, touched: Sequence[bool]) -> None:
        one = self.expected.get(0)
        if not any(touched) or (one is not None and not one.was_there):
            return
        grad = self.parameter.grad
        self.parameter.grad = mean if grad is None else grad.add_(mean)

    def gradient_shards(self) -> Sequence[GradientShard]:
        return self._shards

    def enter(self, index: int, communication: Any) -> Callable[[], None]:
        return lambda: None


OneParameter.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class OneRank:
    """The runtime of a session, with the state of a real one.

    Args:
        others: how the other rank has ended each minibatch, and all sums of it. None: this rank is the one that tells
            another, and has all microbatches.
    """

    transport_name, has_failed, timeline = "none", False, None

    def __init__(self, units: Sequence[OneParameter], others: Sequence[tuple[End, Sums]] | None) -> None:
        self.units = [unit.spec() for unit in units]
        self.state = MinibatchState([unit.name for unit in units])
        self.meshes = [self]
        self.config = SimpleNamespace(deterministic=False, accumulate_dtype=torch.float32, timeout_s=1.0)
        self.topology = SimpleNamespace(rank=int(others is not None), me=int(others is not None))
        self.stats = Stats()
        self.reporting, self.at_home = contextlib.nullcontext(), contextlib.nullcontext
        self.told: list[tuple[End, Sums]] = []
        """How this rank has ended each minibatch, and its sums."""
        self.ends: list[End] = []
        self._others = others
        self._shards = [torch.zeros(spec.shard_numel) for spec in self.units]
        self.begin, self.published_shard = self.state.begin, self._shards.__getitem__
        self._own: Sums = [None] * len(self.units)
        self._final: Sums = []

    @property
    def minibatch(self) -> int:
        return self.state.minibatch

    def __getattr__(self, name: str) -> Any:
        """The rest is for other ranks."""
        return lambda *args, **kwargs: None

    def publish(self, unit: int, fill: Callable[[torch.Tensor], object] | None) -> None:
        self.state.publish(unit, fill is not None)
        if fill is not None:
            fill(self._shards[unit])

    def gather(self, unit: int, out: torch.Tensor, *, own_in_place: bool) -> None:
        self.state.check_gather(unit)

    def scatter_accumulate(self, unit: int, grads: torch.Tensor, *, present: Sequence[bool]) -> None:
        self.state.push(unit)
        own = self._own[unit]
        self._own[unit] = grads.clone() if own is None else own + grads

    def finish(self, how: End) -> None:
        own = End(how.kind, how.notes, bool(self.state.pushed))
        number, sums = len(self.told), self._own
        self.told.append((own, sums))
        if self._others is None:
            self.ends = [own, own]
        elif number >= len(self._others):
            raise ProtocolError("this rank ends a minibatch more than the other one")
        else:
            other, sums = self._others[number]
            self.ends = [other, own]
            if other.kind is not own.kind:
                raise ProtocolError(f"this rank ends it {own.kind}, the other one {other.kind}")
        self._final, self._own = list(sums), [None] * len(self.units)
        self.state.finish()

    def fence(self, how: End) -> None:
        """An empty minibatch."""
        self.state.fence()
        self.finish(how)

    def gradient(self, unit: int) -> tuple[torch.Tensor, list[bool]] | None:
        found = self._final[unit]
        return None if found is None else (found.clone(), [True])

    def refusal(self, text: str, kind: type[OdcError] = MisuseError) -> OdcError:
        return kind(text)


def session_of(model: nn.Module, others: Sequence[tuple[End, Sums]] | None) -> tuple[Session, Any]:
    """A session of a model, a unit for each parameter; and its runtime, see :class:`OneRank`."""
    units = [OneParameter(name, parameter) for name, parameter in model.named_parameters()]
    runtime: Any = OneRank(units, others)
    session = Session(Connection([units], runtime, []), lambda model, stats: Connection([], runtime, []))
    session.start(model)
    return session, runtime


def pass_fences(runtimes: Sequence[OneRank], hows: Sequence[End], *_: Any, **__: Any) -> Iterator[OneRank]:
    """In place of :func:`odc.minibatch.fences.pass_fences`."""
    for runtime, how in zip(runtimes, hows, strict=True):
        runtime.fence(how)
        yield runtime


def gather(session: Session, *, keeps_graph: bool) -> None:
    """A forward of this rank."""
    session._gradients.end_if_cleared()  # as a hook of the model does
    state = session._runtime.state
    state.enter_forward(keeps_graph=keeps_graph)
    for index, spec in enumerate(session._runtime.units):
        session.gather(index, torch.empty(2 * spec.shard_numel), own_in_place=False)
    state.leave_forward()


def microbatch(session: Session, gradients: Sequence[torch.Tensor]) -> None:
    """A forward and a backward of this rank, as units do it."""
    gather(session, keeps_graph=True)
    for index, (unit, gradient) in enumerate(zip(session._units, gradients, strict=True)):
        session.scatter_accumulate(index, gradient, [True])
        unit.expect(session.data_of, old=True)
        unit.expected[0].pending.is_sent = True
