"""Layer 2: ranks as threads. Sums at the owner: complete pushes, partial pushes, refused and interrupted ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadExchange, begin, run_runtimes, run_threads, sum_of, values
from watching import until

from odc import OdcError, ParamSlice, ProtocolError, Runtime, RuntimeConfig, UnitSpec
from odc.errors import FaultInjected
from odc.minibatch.accumulators import Arrived

UNITS = [
    UnitSpec("a", 6, torch.float32, (ParamSlice("w", 4), ParamSlice("b", 2), ParamSlice("g", 3))),
    UnitSpec("b", 4, torch.float32, (ParamSlice("w", 9),)),  # the same size as "a": as large
    UnitSpec("c", 4, torch.float32, (ParamSlice("w", 5),), grad_dtype=torch.bfloat16),
    UnitSpec("frozen", 4, torch.float32),
]
MODES = [
    pytest.param({}, id="direct"),
    pytest.param({"accumulate": "daemon"}, id="daemon"),
    pytest.param({"deterministic": True}, id="direct-deterministic"),
    pytest.param({"accumulate": "daemon", "deterministic": True}, id="daemon-deterministic"),
]


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_sums_equal_an_independent_sum(mode: dict, data: st.DataObject) -> None:
    """Random pushes of random parameter subsets by 1-3 ranks over three minibatches, against numpy in float64."""
    world_size = data.draw(st.integers(1, 3))
    flags = [st.tuples(*[st.booleans()] * len(u.params)).filter(any) for u in UNITS[:3]]
    push = st.integers(0, 2).flatmap(lambda u: st.tuples(st.just(u), flags[u], st.integers(-8, 8)))
    pushes = data.draw(
        st.lists(
            st.lists(st.lists(push, max_size=4), min_size=world_size, max_size=world_size),
            min_size=3,
            max_size=3,
        )
    )

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        for k in range(3):
            begin(runtime)
            for unit, present, value in pushes[k][exchange.rank]:
                numel = sum(p.numel for p, here in zip(UNITS[unit].params, present, strict=True) if here)
                grads = torch.arange(numel * world_size, dtype=torch.float32).remainder(7) + value
                runtime.scatter_accumulate(unit, grads.to(UNITS[unit].grad_dtype), present=present)
            runtime.finish()
            for unit in range(4):
                compare(runtime, unit, exchange.rank, pushes[k], world_size)

    run_runtimes(world_size, UNITS, body, **mode)


def compare(runtime: Runtime, unit: int, owner: int, pushes: list, world_size: int) -> None:
    expected = np.zeros(UNITS[unit].grad_numel)
    touched = [False] * len(UNITS[unit].params)
    for _, present, value in [p for rank in pushes for p in rank if p[0] == unit]:
        numel = sum(p.numel for p, here in zip(UNITS[unit].params, present, strict=True) if here)
        row = (np.arange(numel * world_size) % 7 + value).reshape(world_size, -1)[owner]
        source = offset = 0
        for i, param in enumerate(UNITS[unit].params):
            if present[i]:
                expected[offset : offset + param.numel] += row[source : source + param.numel]
                source += param.numel
                touched[i] = True
            offset += param.numel
    result = runtime.gradient(unit)
    if not any(touched):
        assert result is None
        return
    assert result is not None
    assert result[1] == touched
    assert np.array_equal(result[0].numpy().astype(np.float64), expected)


INTERRUPTED = [
    ({}, "scatter.after_chunk", 3),
    ({}, "scatter.added", 3),
    ({"deterministic": True}, "scatter.added", 3),
    ({"accumulate": "daemon"}, "scatter.before_post", 2),
    ({"accumulate": "daemon", "deterministic": True}, "scatter.before_post", 2),
]


@pytest.mark.parametrize(("mode", "point", "number"), INTERRUPTED)
def test_an_interrupted_push_gets_into_no_step(mode: dict, point: str, number: int) -> None:
    """Rank 1 fails in its second push, whose minibatch then never ends; the lock of rank 0 is free."""

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        begin(runtime)
        if exchange.rank == 0:
            runtime.scatter_accumulate(0, torch.ones(18))
        exchange.all_gather(b"")
        if exchange.rank == 1:
            runtime.scatter_accumulate(0, torch.ones(18))
            with pytest.raises(FaultInjected):
                runtime.scatter_accumulate(0, torch.full((18,), 1e3))
        exchange.all_gather(b"")
        with pytest.raises(OdcError, match="rank 1.*FaultInjected"):
            runtime.finish()
        with pytest.raises(ProtocolError, match="is not final"):
            runtime.gradient(0)
        if not mode:
            assert runtime._transport.peers.blocks[0].holder(0) is None
        exchange.all_gather(b"")

    # Rank 1 adds at owner 0, then at itself: the third pass is its second push to rank 0. A slot's push is for both.
    fault = f"rank=1,point={point},at={number},do=raise"
    run_runtimes(2, UNITS[1:2], body, fault=fault, **mode)


def has_added(runtime: Runtime) -> bool:
    """Whether any rank has, to the first unit in the first minibatch."""
    return runtime._store.collect(0, 1) is not None


def test_who_finds_the_lock_of_a_sum_taken_waits_for_it() -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        begin(runtime)
        peers = runtime._transport.peers
        assert exchange.rank == 1 or peers.blocks[0].try_lock(0, 0)
        exchange.all_gather(b"")
        if exchange.rank == 1:
            runtime.scatter_accumulate(0, torch.ones(18))
        else:
            until(lambda: peers.by_rank[1].waiting_on is not None or has_added(runtime), "rank 1 does not come", 10.0)
            assert not has_added(runtime), "rank 1 has added without the lock"
            peers.blocks[0].unlock(0)
        runtime.finish()
        assert sum_of(runtime).tolist() == [1.0] * 9

    run_runtimes(2, UNITS[1:2], body)


def test_a_slot_is_given_back_when_its_push_has_been_added() -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        daemon, store, add = runtime._daemon, runtime._store, runtime._store.add_arrived
        assert daemon is not None

        def look(pushes: Sequence[Arrived], *slots: Any) -> None:
            for push in pushes:
                given_back = runtime._transport.count(exchange.rank, daemon._acked_at + push.client)
                assert given_back == daemon._handled[push.client], "the slot of a push that is not added yet"
            add(pushes, *slots)

        store.add_arrived = look  # type: ignore[method-assign]
        begin(runtime)
        for _ in range(5):
            runtime.scatter_accumulate(0, torch.ones(18))
        runtime.finish()
        assert sum_of(runtime).tolist() == [10.0] * 9

    run_runtimes(2, UNITS[1:2], body, accumulate="daemon")


def test_shapes_are_checked_before_anything_is_sent() -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        begin(runtime)
        with pytest.raises(ValueError, match="18 x torch.float32, got shape"):
            runtime.scatter_accumulate(0, torch.ones(17))
        with pytest.raises(ValueError, match="push of 'c', grads: expected .* torch.bfloat16"):
            runtime.scatter_accumulate(2, torch.ones(10))
        with pytest.raises(ValueError, match="2 flags for 3 parameters"):
            runtime.scatter_accumulate(0, torch.ones(18), present=[True, False])
        with pytest.raises(ValueError, match="gather of 'a', out"):
            runtime.gather(0, torch.ones(12, dtype=torch.bfloat16))
        runtime.finish()
        assert all(runtime.gradient(unit) is None for unit in range(4))

    run_runtimes(2, UNITS, body)


def test_deterministic_costs_one_gradient_per_rank_and_shared_one_shard() -> None:
    def body(exchange: ThreadExchange) -> tuple[int, int]:
        sizes = []
        for deterministic in (False, True):
            with Runtime.create(exchange, UNITS, RuntimeConfig(deterministic=deterministic)) as runtime:
                sizes.append(runtime.memory()["sums"])
                exchange.all_gather(b"")
        return sizes[0], sizes[1]

    shared, per_client = values(run_threads(3, body))[0]
    floats = 4 * 16 * 3  # 64-byte aligned
    assert floats <= shared < floats + 300
    assert 3 * 4 * 16 * 3 <= per_client < 3 * 4 * 16 * 3 + 400
