"""Layer 2: ranks as threads. A minibatch on several meshes at once, of which none has all ranks."""

from __future__ import annotations

import random
import time

import pytest
import torch
from thread_ranks import ThreadExchange, _Board, begin, publish_all, run_threads, values

from odc import ParamSlice, RuntimeConfig, UnitSpec, limits
from odc.minibatch import fences
from odc.minibatch.fences import pass_fences
from odc.minibatch.protocol import NUM_NOTES, End, EndKind
from odc.minibatch.runtime import Mesh, Runtime
from odc.minibatch.state import Phase

NUMEL, MINIBATCHES = 5, 6
Boards = dict[tuple[int, ...], _Board]


def over(boards: Boards, rank: int, ranks: tuple[int, ...]) -> ThreadExchange:
    exchange = ThreadExchange(boards.setdefault(ranks, _Board(len(ranks), 60)), ranks.index(rank))
    exchange.global_ranks = ranks  # type: ignore[assignment]
    return exchange


def columns_and_rows(rank: int) -> list[tuple[int, ...]]:
    """Of ranks in a square: rank 0 has no mesh in common with rank 3, nor 1 with 2."""
    return [(rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)]


def unit_of(name: str) -> UnitSpec:
    return UnitSpec(name, NUMEL, torch.float32, (ParamSlice(f"{name}.w", NUMEL),))


def connect(boards: Boards, rank: int, accumulate: str = "auto") -> tuple[Runtime, list[tuple[int, ...]]]:
    """And the ranks of each unit: two on the first mesh, one on the second."""
    first, second = columns_and_rows(rank)
    config = RuntimeConfig(timeout_s=20, accumulate=accumulate)
    others = [Mesh([unit_of("c")], over(boards, rank, second))]
    units = [unit_of("a"), unit_of("b")]
    runtime = Runtime.create(over(boards, rank, first), units, config, others=others)
    return runtime, [first, first, second]


def count_of(minibatch: int, rank: int, unit: int) -> int:
    """How often a rank pushes."""
    return random.Random(1000 * minibatch + 10 * rank + unit).randrange(3)


def value_of(minibatch: int, rank: int, unit: int) -> float:
    return float(100 * minibatch + 10 * rank + unit)


def train(runtime: Runtime, ranks: list[tuple[int, ...]], rank: int, shuffle: random.Random) -> None:
    for minibatch in range(1, MINIBATCHES + 1):
        for unit in shuffle.sample(range(3), 3):
            value = value_of(minibatch, rank, unit)
            runtime.publish(unit, lambda shard, value=value: shard.fill_(value))  # type: ignore[misc]
        runtime.begin()
        assert runtime.state.phase is Phase.OPEN
        work = [(unit, True) for unit in range(3) for _ in range(count_of(minibatch, rank, unit))]
        work += [(unit, False) for unit in range(3)]
        for unit, is_push in shuffle.sample(work, len(work)):
            time.sleep(0.05 * (rank == minibatch % 4) * shuffle.random())  # a late one
            world_size = len(ranks[unit])
            if is_push:
                runtime.scatter_accumulate(unit, torch.full((world_size * NUMEL,), value_of(minibatch, rank, unit)))
                continue
            out = torch.empty(world_size, NUMEL)
            runtime.gather(unit, out.view(-1))
            assert out[:, 0].tolist() == [value_of(minibatch, other, unit) for other in ranks[unit]]
        runtime.finish(End(notes=(rank,) * NUM_NOTES))
        first, _, second = ranks
        assert [end.notes[0] for end in runtime.ends] == [*first, *second]
        for end in runtime.ends:  # on any mesh, also on one that this rank does not see
            assert end.has_pushed == any(count_of(minibatch, end.notes[0], unit) for unit in range(3))
        for unit in range(3):
            expected = sum(count_of(minibatch, other, unit) * value_of(minibatch, other, unit) for other in ranks[unit])
            found = runtime.gradient(unit)
            assert (0.0 if found is None else found[0].tolist()) == ([expected] * NUMEL if found else 0.0)
            assert (found is None) == (expected == 0.0)
        if minibatch % 2:
            runtime.open_sums()
    assert runtime.stats.minibatches == MINIBATCHES


@pytest.mark.parametrize("accumulate", ["direct", "daemon"])
def test_versions_and_sums_are_those_of_the_minibatch_on_every_mesh(accumulate: str) -> None:
    boards: Boards = {}

    def body(exchange: ThreadExchange) -> None:
        runtime, ranks = connect(boards, exchange.rank, accumulate)
        with runtime:
            train(runtime, ranks, exchange.rank, random.Random(exchange.rank))
        assert [mesh._transport._closed for mesh in runtime.meshes] == [True, True]

    values(run_threads(4, body))


def test_a_fence_is_over_when_the_ranks_of_all_meshes_have_come() -> None:
    boards: Boards = {}

    def body(exchange: ThreadExchange) -> None:
        runtime, _ = connect(boards, exchange.rank)
        with runtime:
            publish_all(runtime)
            exchange.all_gather(b"")
            if exchange.rank != 1:  # rank 0 and rank 3 wait for it, each on another mesh
                runtime._protocol.begin_fence(End(EndKind.FENCE))
            exchange.all_gather(b"")
            if exchange.rank != 1:
                assert (fences._late_mesh(runtime) is None) == (exchange.rank == 2)
            exchange.all_gather(b"")
            assert list(pass_fences([runtime], [End(EndKind.FENCE)], [runtime])) == [runtime]
            assert runtime.state.phase is Phase.FINISHED
            assert runtime.minibatch == runtime.stats.minibatches == 1

    values(run_threads(4, body))


def test_who_waits_in_a_fence_does_not_take_a_rank_that_it_does_not_see_for_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 3 is late in a minibatch, ranks 1 and 2 wait for it there, and rank 0, which does not see it, for these."""
    monkeypatch.setattr(limits, "FENCE_STUCK_S", 0.3)
    boards: Boards = {}

    def body(exchange: ThreadExchange) -> None:
        runtime, _ = connect(boards, exchange.rank)
        with runtime:
            for _ in range(2):
                publish_all(runtime)
                if not runtime.stats.minibatches:
                    runtime.begin()
                    time.sleep(1.5 * (exchange.rank == 3))
                    runtime.finish()
            assert list(pass_fences([runtime], [End(EndKind.FENCE)], [runtime])) == [runtime]

    values(run_threads(4, body))


def test_ranks_that_end_it_in_different_ways_fail_though_they_share_no_mesh() -> None:
    boards: Boards = {}

    def body(exchange: ThreadExchange) -> None:
        runtime, _ = connect(boards, exchange.rank)
        with runtime:
            for _ in range(2):
                begin(runtime)
                runtime.finish(End(EndKind.DISCARD if exchange.rank == 3 else EndKind.USE))

    for found in run_threads(4, body):
        assert "ended minibatch 1 in different ways" in str(found)
