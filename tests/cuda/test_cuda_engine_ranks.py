"""Layer 2: ranks as threads. The minibatch protocol over the real CudaEngine, on the streams of ``host_cuda.py``.

The transport, the protocol, the daemon, the stores and the engine are the real ones; kernels are interpreted. As under
FSDP a rank gathers, and has its shards published, on one stream, pushes on another, and finishes and reads its sums on
a third. Then one wait of the engine at a time is taken away, and wrong numbers are seen.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_cuda import HostCuda, HostCudaTransport, Violation, interpreted_engine
from thread_ranks import ThreadExchange, run_threads, values

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.transports import registry

NUMEL = 12
TRAINED, ALL = (0, 1), (0, 1, 2)  # units
PARAMS = (ParamSlice("a", 5), ParamSlice("b", NUMEL - 6), ParamSlice("c", 1))


@dataclass(frozen=True)
class Case:
    counts: tuple[tuple[int, ...], ...] = ((1, 2), (2, 1), (0, 1))
    """Microbatches of [minibatch][rank]."""
    mode: tuple[str, bool] = ("daemon", False)
    dtype: torch.dtype = torch.float32
    slow: str | None = None
    """The streams of this name are slower than all others."""

    @property
    def world_size(self) -> int:
        return len(self.counts[0])


class RankRun:
    """One rank's part."""

    def __init__(self, case: Case, exchange: ThreadExchange) -> None:
        self.case, self.rank = case, exchange.rank
        self.cuda = HostCudaTransport.cuda
        self.cuda.set_device(self.rank)
        self.device = torch.device("cuda", self.rank)
        units = [UnitSpec(f"u{u}", NUMEL, case.dtype, PARAMS, case.dtype) for u in TRAINED]
        units.append(UnitSpec("frozen", NUMEL, torch.float8_e4m3fn))
        options = RuntimeConfig(
            transport="host_cuda", timeout_s=15, accumulate=case.mode[0], deterministic=case.mode[1]
        )
        self.runtime = Runtime.create(exchange, units, options)
        if case.mode[1]:  # beside the sums, whose tensors say that they are on the host
            store: Any = self.runtime._protocol._store
            store._sum = torch.empty(NUMEL, device=self.device)
        self.streams = {name: self.cuda.new_stream(self.rank, name) for name in ("gather", "push")}
        self.seen: list[tuple[str, torch.Tensor, list[float]]] = []

    def on(self, name: str) -> Any:
        return self.cuda.stream(self.streams[name])

    def run(self) -> int:
        """Checks made."""
        engine = self.runtime._transport.engine
        with self.runtime:
            with self.cuda.here():
                for minibatch, counts in enumerate(self.case.counts, start=1):
                    with self.on("gather") if minibatch > 1 else nullcontext(), self.runtime.at_home():
                        self.publish(minibatch)
                    self.runtime.begin()
                    for microbatch in range(counts[self.rank]):
                        self.microbatch(minibatch, microbatch)
                    self.runtime.finish()
                    for unit in TRAINED:
                        self.look_at_sum(minibatch, unit)
            assert engine.synchronize(20)
            self.runtime._transport.exchange.all_gather(b"")  # without a wait, others may still read
        for what, found, wanted in self.seen:
            if not torch.equal(found.float(), torch.tensor(wanted).repeat_interleave(NUMEL)):
                raise Violation(f"rank {self.rank}: {what}: {found.tolist()}, expected {wanted}")
        if self.cuda.errors:
            raise Violation(f"rank {self.rank}: {self.cuda.errors[0]!r}")
        return len(self.seen)

    def publish(self, minibatch: int) -> None:
        """But for the first time, FSDP's first gather has it done, on a stream of FSDP's."""
        for unit in ALL:
            value = self.version(minibatch, unit, self.rank)
            self.runtime.publish(unit, functools.partial(torch.Tensor.fill_, value=value))

    @staticmethod
    def version(minibatch: int, unit: int, owner: int) -> float:
        return float((minibatch * 3 + unit * 2 + owner) % 16)  # which 8 bits can tell apart

    @staticmethod
    def contribution(minibatch: int, unit: int, client: int, microbatch: int, owner: int) -> float:
        return float((minibatch * 5 + unit * 3 + client * 2 + microbatch) % 16 + 32 * owner + 1)

    def microbatch(self, minibatch: int, microbatch: int) -> None:
        ranks = range(self.case.world_size)
        with self.on("gather"):
            for unit in ALL:
                dtype = self.runtime.units[unit].dtype
                out = torch.full((NUMEL * len(ranks),), -1.0, dtype=dtype, device=self.device)
                self.runtime.gather(unit, out)
                versions = [self.version(minibatch, unit, owner) for owner in ranks]
                self.seen.append((f"gather of {unit} in minibatch {minibatch}", out.clone(), versions))
        with self.on("push"):
            for unit in reversed(TRAINED):
                sums = torch.tensor([self.contribution(minibatch, unit, self.rank, microbatch, r) for r in ranks])
                self.push(unit, sums.to(self.case.dtype))

    def push(self, unit: int, sums: torch.Tensor) -> None:
        """The second push of a microbatch comes in two, of which the first one lies apart at the owner."""
        for present in [[True] * 3] if unit else [[True, False, True], [False, True, False]]:
            numel = sum(param.numel for param, here in zip(PARAMS, present, strict=True) if here)
            rows = self.cuda.put(sums.repeat_interleave(numel), self.rank)
            grads = torch.zeros_like(rows)
            grads.copy_(rows)  # computed on the stream, long after the call below
            self.runtime.scatter_accumulate(unit, grads, present=present)
            grads.fill_(float("nan"))  # used for something else, in the order of the stream

    def look_at_sum(self, minibatch: int, unit: int) -> None:
        counts = self.case.counts[minibatch - 1]
        pushes = [(c, m) for c in range(self.case.world_size) for m in range(counts[c])]
        result = self.runtime.gradient(unit)
        assert result is not None
        total = sum(self.contribution(minibatch, unit, c, m, self.rank) for c, m in pushes)
        self.seen.append((f"sum of {unit} in minibatch {minibatch}", result[0].clone(), [total]))


@pytest.fixture(scope="module")
def k() -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch, interpreted_engine() as modules:
        patch.setitem(registry._LOCATIONS, "host_cuda", "host_cuda:HostCudaTransport")
        patch.setattr(modules.engine, "prepare_kernels", lambda device, units: 0)  # nothing is compiled here
        yield modules


def run_case(k: SimpleNamespace, case: Case) -> list[int]:
    cuda = HostCuda()
    HostCudaTransport.cuda, HostCudaTransport.engine_class = cuda, k.engine.CudaEngine
    with ExitStack() as stack:
        stack.enter_context(cuda.installed(k))
        stack.enter_context(cuda.running(0, case.slow))
        return values(run_threads(case.world_size, lambda exchange: RankRun(case, exchange).run(), 60))


def run_often(k: SimpleNamespace, case: Case) -> None:
    """On a busy machine a host may be slower than its slow stream."""
    for _ in range(5):
        run_case(k, case)


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (("daemon", False), torch.bfloat16),
        (("daemon", True), torch.float32),
        (("direct", False), torch.bfloat16),
        (("direct", True), torch.float32),
    ],
    ids=str,
)
def test_minibatches(k: SimpleNamespace, mode: tuple[str, bool], dtype: torch.dtype) -> None:
    assert run_case(k, Case(mode=mode, dtype=dtype)) == [15, 18]


def test_pushes_that_no_slot_was_free_for(k: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept in memory of the client's, from which other streams send them."""
    monkeypatch.setattr("odc.limits.DAEMON_PATIENCE_S", 0.0)
    hold, held = k.engine.CudaEngine.hold, list[int]()

    def noted(engine: Any, tensor: torch.Tensor) -> None:
        held.append(tensor.numel())
        hold(engine, tensor)

    monkeypatch.setattr(k.engine.CudaEngine, "hold", noted)
    run_case(k, Case(counts=((4, 4),), slow="engine"))  # so that slots are empty late
    assert held


def nothing(*arguments: object) -> None: ...


WITHOUT: dict[str, tuple[Callable[..., Any], str, tuple[str, bool]]] = {
    "note_use": (nothing, "push", ("direct", False)),
    "join": (nothing, "push", ("direct", False)),
    "join_background": (nothing, "engine", ("daemon", False)),
    "at_home": (lambda engine: nullcontext(), "main", ("direct", False)),
}


@pytest.mark.parametrize("operation", WITHOUT)
def test_without_one_wait_wrong_numbers_are_seen(
    k: SimpleNamespace, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead, slow, mode = WITHOUT[operation]
    case = Case(counts=((1, 1), (1, 1)), slow=slow, mode=mode)
    run_case(k, case)  # a slow stream alone breaks nothing
    monkeypatch.setattr(k.engine.CudaEngine, operation, instead)
    with pytest.raises(Violation):
        run_often(k, case)
