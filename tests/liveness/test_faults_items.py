"""Layer 3: ranks as processes that exchange items. What the others learn when one of them dies, stops or raises; and
growing in earnest, where ranks agree through a store.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from faulty_ranks import NOTICE_S, assert_told, fault, survivors
from process_ranks import RankResult, across, assert_all_say, run_ranks, start_ranks

from odc import ItemExchange, RuntimeConfig
from odc.setup.agreement import ProcessGroupExchange

NUMEL = 100


def ring(world_size: int, numel: int = NUMEL) -> list[list[list[tuple[int, int, int]]]]:
    """Each rank publishes two parts for the next one, the first one for itself, too."""
    rows = [(rank, (rank + 1) % world_size) for rank in range(world_size)]
    return [[[(3 * a, 4 * numel, b), (3 * a + 1, 8, a)], [(3 * a + 2, 4 * numel, b)]] for a, b in rows]


def a_round(items: ItemExchange, rank: int, world_size: int, number: int, numel: int = NUMEL) -> None:
    one = items.begin("outputs", ring(world_size, numel))
    before = (rank - 1) % world_size
    value = torch.full((numel,), float(number * 10 + rank))
    one.publish(0, [value, torch.tensor([number])])
    own = torch.zeros(1, dtype=torch.int64)
    outs = [torch.zeros(numel), torch.zeros(numel)]
    one.read(3 * before, outs[0])
    one.publish(1, [value])
    one.read_many([3 * before + 2, 3 * rank + 1], [outs[1], own])
    assert all(out.eq(number * 10 + before).all() for out in outs)
    assert int(own) == number
    one.done()


def endless(rank: int, world_size: int) -> None:
    """Exchange until something happens."""
    config = RuntimeConfig.from_environment()
    with ItemExchange.create(ProcessGroupExchange(), ["outputs"], config, capacity_bytes=1 << 12) as items:
        for number in range(1, 100_000):
            a_round(items, rank, world_size, number)


def start(world_size: int, hosts: int, body: Callable[..., Any], env: dict[str, str]) -> Any:
    return start_ranks(world_size, across, hosts, body, env=env)


@pytest.mark.parametrize(
    ("point", "do", "hosts"),
    [
        ("items.publish.before_post", "kill", 1),
        ("items.publish.before", "exit", 2),
        ("items.read.after_chunk", "kill", 2),
        pytest.param("items.read.before", "segv", 1, marks=pytest.mark.extended),
        pytest.param("items.done.before", "kill", 1, marks=pytest.mark.extended),
        pytest.param("items.publish.before_post", "kill", 2, marks=pytest.mark.extended),
    ],
)
def test_a_rank_that_ends_is_named_by_all_others(point: str, do: str, hosts: int) -> None:
    group = start(3, hosts, endless, fault(point, do, at=9))
    results = group.join(120)
    for result in survivors(results):
        assert_told(result, "rank 1", f"pid {group.pids[1]}", "of round ", "'outputs'")
    if do == "kill":
        assert results[1].exitcode == -signal.SIGKILL
    if do == "kill" and hosts == 1:  # another host sees that a process has ended, and not how
        assert all("signal 9" in (result.error or "") for result in survivors(results))
    times = [result.seconds for result in survivors(results)]
    assert max(times) - min(times) < NOTICE_S


def test_a_rank_that_raises_is_quoted_by_all_others() -> None:
    results = start(3, 2, endless, fault("items.read.before", "raise")).join(120)
    assert results[1].error_type == "FaultInjected"
    words = "FaultInjected: fault injected at items.read.before"
    assert_all_say(survivors(results), "rank 1", words, kinds=["AbortedError"])


def test_a_rank_that_is_stopped_is_silent_and_not_dead() -> None:
    env = {**fault("items.publish.before", "stop"), "ODC_TIMEOUT": "1"}
    group = start(3, 1, endless, env)
    results: list[RankResult] = group.join(60, expendable=[1])
    kinds = {result.error_type for result in survivors(results)}
    assert kinds <= {"PeerSilentError", "AbortedError"}
    assert "PeerSilentError" in kinds
    assert_all_say(survivors(results), "rank 1 is alive but silent")


def grow(rank: int, world_size: int) -> tuple[str, dict[str, int]]:
    """Rounds of more and more bytes; the ranks come at different times."""
    config = RuntimeConfig.from_environment()
    with ItemExchange.create(ProcessGroupExchange(), ["outputs"], config, capacity_bytes=64) as items:
        for number, numel in enumerate([1, 100, 50, 10_000, 100, 300_000, 10], start=1):
            time.sleep(0.01 * rank)
            a_round(items, rank, world_size, number, numel)
        return items.transport_name, items.memory()


@pytest.mark.parametrize(("hosts", "name"), [(1, "shm"), (2, "tcp")])
def test_processes_grow_together(hosts: int, name: str) -> None:
    for transport, memory in run_ranks(3, across, hosts, grow):
        assert transport == name
        assert memory["outputs"] >= 2 * 2 * 4 * 300_000


def grow_or_die(rank: int, world_size: int) -> None:
    config = RuntimeConfig.from_environment()
    with ItemExchange.create(ProcessGroupExchange(), ["outputs"], config, capacity_bytes=1 << 12) as items:
        a_round(items, rank, world_size, 1)
        if rank == 1:
            signal.raise_signal(signal.SIGKILL)
        a_round(items, rank, world_size, 2, 100_000)


def test_a_rank_that_dies_before_it_grows_is_named_by_all_others() -> None:
    group = start_ranks(3, grow_or_die, env={"ODC_TIMEOUT": "60"})
    results = group.join(120)
    for result in survivors(results):
        assert_told(result, "rank 1", f"pid {group.pids[1]}", "signal 9")
    assert any("the channel has to grow from 4096 to" in (result.error or "") for result in survivors(results))
