"""Random minibatches over one runtime, with everything that touches a tensor on a stream.

As under FSDP a rank gathers on one stream, pushes on another and publishes and steps on a third. Each stream is kept
busy for random times, so that the hosts run ahead of their devices and the streams of the ranks lag behind one another.
Every value is a whole number that fp32 holds, so every comparison is of bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.gpu.streams import Verdicts, engine_of, streams_of
from odc.bench.harness.ranks import Rank
from odc.setup.agreement import ProcessGroupExchange

MODES = {"daemon": ("daemon", False), "direct": ("direct", False), "deterministic": ("auto", True)}
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Case:
    """One random run: microbatches of [minibatch][rank]."""

    counts: tuple[tuple[int, ...], ...]
    mode: str = "daemon"
    num_units: int = 2
    numel: int = 40
    blind: bool = False
    """Pushes come without gathers before them."""
    seed: int = 0
    longest_delay_s: float = 1e-3
    slow_rank: int = -1
    """This rank's streams are always busy for the longest delay, the others' never; -1: all at random."""

    @classmethod
    def draw(cls, generator: random.Random, world_size: int, mode: str, numels: tuple[int, ...]) -> Case:
        return cls(
            counts=tuple(
                tuple(generator.randint(0, 3) for _ in range(world_size)) for _ in range(generator.randint(2, 4))
            ),
            mode=mode,
            num_units=generator.randint(1, 3),
            numel=generator.choice(numels),
            blind=generator.random() < 0.5,
            seed=generator.randrange(10**6),
        )


def version(minibatch: int, unit: int) -> float:
    """What a shard of this version holds, but for the owner's number."""
    return minibatch * 100.0 + unit * 10.0


def contribution(minibatch: int, unit: int, client: int, microbatch: int) -> float:
    """What a push holds, but for 1000 times the owner's number."""
    return float(((minibatch * 7 + unit * 5 + client * 3 + microbatch) % 1000) + 1)


def create_runtime(rank: Rank, units: list[UnitSpec], mode: str) -> Runtime:
    """A runtime on the transport of the setting. Collective."""
    accumulate, deterministic = MODES[mode]
    options = RuntimeConfig(
        transport=rank.place.transport, accumulate=accumulate, deterministic=deterministic, timeout_s=TIMEOUT_S
    )
    return Runtime.create(ProcessGroupExchange(), units, options, device=rank.device)


class RandomRun:
    """One rank's part of a case."""

    def __init__(self, case: Case, rank: Rank) -> None:
        self.case, self.rank = case, rank
        self.random = random.Random(case.seed * 31 + rank.rank)
        params = (ParamSlice("w", case.numel),)
        units = [UnitSpec(f"u{unit}", case.numel, torch.float32, params) for unit in range(case.num_units)]
        self.runtime = create_runtime(rank, units, case.mode)
        self.streams = streams_of(engine_of(self.runtime), rank.device)
        self.verdicts = Verdicts(self.streams)
        owners = torch.arange(rank.world_size, dtype=torch.float32, device=rank.device)
        self.owners = owners.repeat_interleave(case.numel)
        self.streams.synchronize()  # from here on every stream may read it
        self._after_push: Callable[[], object] = lambda: None

    def run(
        self, before_finish: Callable[[], object] = lambda: None, after_push: Callable[[], object] = lambda: None
    ) -> list[str]:
        """What went wrong. Collective. The callbacks are code of a user, at these points of each rank."""
        self._after_push = after_push
        with self.runtime:
            for minibatch, counts in enumerate(self.case.counts, start=1):
                self._publish(minibatch)
                self.runtime.begin()
                for microbatch in range(counts[self.rank.rank]):
                    self._microbatch(minibatch, microbatch)
                before_finish()
                self.runtime.finish()
                for unit in self._order():
                    self._check_sum(minibatch, unit, counts)
            return self.verdicts.failures()

    def _order(self) -> list[int]:
        return self.random.sample(range(self.case.num_units), self.case.num_units)

    def _delay(self) -> None:
        if self.case.slow_rank < 0:
            self.streams.delay(self.random.random() * self.case.longest_delay_s)
        elif self.case.slow_rank == self.rank.rank:
            self.streams.delay(self.case.longest_delay_s)

    def _publish(self, minibatch: int) -> None:
        for unit in self._order():
            self._delay()
            value = version(minibatch, unit) + self.rank.rank
            self.runtime.publish(unit, lambda shard, value=value: shard.fill_(value))  # type: ignore[misc]

    def _microbatch(self, minibatch: int, microbatch: int) -> None:
        order = self._order()
        with self.streams.on("gather"):
            for unit in order if not self.case.blind else ():
                self._delay()
                out = torch.full_like(self.owners, -1.0)
                self.runtime.gather(unit, out)
                wanted = self.owners + version(minibatch, unit)
                self.verdicts.expect(f"gather of unit {unit}, minibatch {minibatch}", out, wanted)
        with self.streams.on("push"):
            for unit in reversed(order):
                self._push(unit, contribution(minibatch, unit, self.rank.rank, microbatch))

    def _push(self, unit: int, value: float) -> None:
        grads, rows = torch.zeros_like(self.owners), self.owners * 1000.0 + value
        self._delay()
        self.streams.engine.run(lambda: grads.copy_(rows))  # computed on the stream, long after the call below
        self.runtime.scatter_accumulate(unit, grads)
        self.streams.engine.run(lambda: grads.fill_(float("nan")))  # may be reused, in the order of the stream
        self._after_push()

    def _check_sum(self, minibatch: int, unit: int, counts: tuple[int, ...]) -> None:
        pushes = [(client, m) for client in range(self.rank.world_size) for m in range(counts[client])]
        result = self.runtime.gradient(unit)
        if result is None or not pushes:
            if (result is None) == bool(pushes):
                raise ValueError(f"unit {unit}, minibatch {minibatch}: {result} after {len(pushes)} pushes")
            return
        wanted = sum(1000.0 * self.rank.rank + contribution(minibatch, unit, client, m) for client, m in pushes)
        self._delay()
        self.verdicts.expect(f"sum of unit {unit}, minibatch {minibatch}", result[0], wanted)
