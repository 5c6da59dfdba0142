"""Layer 3. Ranks on two hosts with a real network between them, also when it fails.

Ranks that merely pose as hosts are in ``test_links.py``: those tests run everywhere, but their network cannot be cut.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty_ranks import stoppable, wait_for_training
from process_ranks import RankResult, start_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import (
    build,
    full_parameters,
    largest_difference,
    loss_of,
    reference,
    shard,
    start,
    tokens,
    train,
    use_up,
)
from watching import wait_for_all

import odc
from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.harness import network
from odc.setup.agreement import ProcessGroupExchange

pytestmark = pytest.mark.skipif(network.why_not() is not None, reason=str(network.why_not()))

SILENCE_S = 7.0  # without an answer on the pulse, after which a host counts as lost
SLACK_S = 8.0  # for this machine, and the end of a process; far below the limit on silence


@pytest.fixture
def hosts() -> Iterator[network.TwoHosts]:
    with network.two_hosts() as hosts:
        yield hosts


def on_hosts(rank: int, world_size: int, counts: list[int], share_in_host: str) -> tuple[Any, ...]:
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, share_in_host=share_in_host)
    train(model, session, rank, world_size, counts, 6)
    name, topology = session.transport, session._runtime.topology
    session.close()
    return name, topology.host_names, topology.addresses, full_parameters(model)


@pytest.mark.parametrize("share_in_host", ["off", "auto"])
def test_hosts_are_told_apart_and_found(share_in_host: str, hosts: network.TwoHosts) -> None:
    """Nothing is set: host names, addresses and the transport are found, and training gives the right numbers."""
    counts, names = [1, 3, 0, 2], (hosts.hosts[0],) * 2 + (hosts.hosts[1],) * 2
    results = start_ranks(4, on_hosts, counts, share_in_host, enter=hosts.enter).join(150)
    assert all(r.error is None for r in results), [r.error for r in results]
    for rank, (*found, parameters) in enumerate(r.value for r in results):
        shared = ["shm", (hosts.hosts[rank // 2],) * 2, ("127.0.0.1",) * 2]
        assert found == (["tcp", names, ("10.77.0.1",) * 2 + ("10.77.0.2",) * 2] if share_in_host == "off" else shared)
        assert largest_difference(parameters, reference(counts, 6)) < 1e-5


CROSSES = {
    ("FSDP2", "full", 4): ((3.0, 12.0), (2.25, 9.0)),
    ("FSDP2", "hybrid", 4): ((1.0, 4.0), (1.0, 4.0)),
    ("ODC", "full", 4): ((3.0, 12.0), (1.5, 6.0)),
    ("ODC", "hybrid", 4): ((1.0, 1.0), (1.0, 1.0)),
    ("ODC", "shared", 4): ((1.0, 1.0), (0.75, 0.75)),
    ("ODC", "shared", 8): ((1.0, 1.0), (0.75, 0.75)),
}
"""What comes into each of two hosts with so many ranks in all, in sizes of the model in float32: in minibatches of one
and of four microbatches, which compute in float32, and in bf16. Gloo sends what it reduce-scatters twice. Where
parameters and gradients are shared, one rank has no microbatch."""

EVERY_RUN = (
    ("ODC", "full", 4, torch.float32),
    *(("ODC", sharding, 4, torch.bfloat16) for sharding in ("full", "hybrid", "shared")),
)


def count_received(rank: int, world_size: int, system: str, sharding: str, dtype: torch.dtype) -> list[float]:
    shape, names = ((2, world_size // 2), ("replicate", "shard")) if sharding == "hybrid" else ((world_size,), None)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = build(width=512)
    numel = sum(parameter.numel() for parameter in model.parameters())
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    share_in_host = "on" if sharding == "shared" else "off"
    session = odc.patch_fsdp(model, share_in_host=share_in_host) if system == "ODC" else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step, microbatches in enumerate((1, 1, 4)):  # the first one is not counted
        dist.barrier()
        before = network.received_bytes()
        dist.barrier()
        for microbatch in range(0 if sharding == "shared" and rank == 1 else microbatches):
            loss_of(model, tokens(step, rank, microbatch)).backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        found.append((network.received_bytes() - before) / (4 * numel))
    if session is not None:
        session.close()
    return found[1:]


@pytest.mark.parametrize(
    ("system", "sharding", "num_ranks", "dtype"),
    [
        pytest.param(*way, dtype, marks=() if (*way, dtype) in EVERY_RUN else pytest.mark.extended)
        for way in CROSSES
        for dtype in (torch.float32, torch.bfloat16)
    ],
    ids=str,
)
def test_what_crosses_hosts(
    system: str, sharding: str, num_ranks: int, dtype: torch.dtype, hosts: network.TwoHosts
) -> None:
    """With parameters and gradients shared in a host: each of them once in a step, however many microbatches."""
    results = start_ranks(num_ranks, count_received, system, sharding, dtype, enter=hosts.enter).join(150)
    assert all(r.error is None for r in results), [r.error for r in results]
    expected = CROSSES[system, sharding, num_ranks][dtype == torch.bfloat16]
    for result in results:
        assert result.value == pytest.approx(expected, rel=0.03)


def until_told(rank: int, world_size: int, started: str, pause_s: float = 0.0) -> None:
    """Train until something happens; ``pause_s``: rank 0 then computes for so long in every minibatch."""
    model, session, optimizer = start(world_size)
    for step in range(100_000):
        with session.minibatch():
            loss_of(model, tokens(step, rank, 0)).backward()
            if step == 3:
                Path(f"{started}{rank}").touch()
            if rank == 0 and step >= 3:
                time.sleep(pause_s)
        use_up(optimizer)


def assert_all_name_the_other_host(results: list[RankResult], other_ranks: list[set[int]]) -> None:
    for result, others in zip(results, other_ranks, strict=True):
        assert result.error_type in ("PeerDiedError", "AbortedError"), result.error
        assert "no sign of life from its host or the network" in (result.error or "")
        assert any(f"rank {other} (host odc-" in (result.error or "") for other in others), result.error


@pytest.mark.extended
def test_a_cut_network_is_noticed_on_both_sides(hosts: network.TwoHosts, tmp_path: Path) -> None:
    """Ranks that wait learn within seconds that the other host is gone, not after the time limit."""
    started = tmp_path / "started"
    group = start_ranks(4, until_told, str(started), enter=hosts.enter, env={"ODC_TIMEOUT": "60"})
    wait_for_all(started, 4)
    hosts.cut()
    cut_at = time.monotonic() - group.started
    results = group.join(200)
    assert_all_name_the_other_host(results, [{2, 3}, {2, 3}, {0, 1}, {0, 1}])
    assert max(r.seconds for r in results) - cut_at < SILENCE_S + SLACK_S


@pytest.mark.extended
def test_a_rank_that_computes_meanwhile_is_told_at_its_next_operation(hosts: network.TwoHosts, tmp_path: Path) -> None:
    started = tmp_path / "started"
    pause_s = SILENCE_S + 5
    group = start_ranks(2, until_told, str(started), pause_s, enter=hosts.enter, env={"ODC_TIMEOUT": "60"})
    wait_for_all(started, 2)
    hosts.cut()
    cut_at = time.monotonic() - group.started
    results = group.join(200)
    assert_all_name_the_other_host(results, [{1}, {0}])
    assert results[1].seconds - cut_at < SILENCE_S + SLACK_S
    assert results[0].seconds - cut_at < pause_s + SLACK_S


CUT_S = 4.0
LONGEST_CUT_S = 5.0  # which is never taken for the end of a host


@pytest.mark.extended
def test_a_network_that_comes_back_in_time_changes_nothing(hosts: network.TwoHosts, tmp_path: Path) -> None:
    """Four seconds without it: packets are sent again, no byte is lost or taken twice, the sums are bit-equal."""
    steps = 40
    env = {"ODC_TIMEOUT": "60", "ODC_FAULT": "point=gather.before,do=delay:0.002"}
    for attempt in range(5):  # where this machine is busy, a cut may last too long
        started, cut = tmp_path / f"started{attempt}-", tmp_path / f"cut{attempt}"
        group = start_ranks(2, stoppable, steps, str(started), str(cut), enter=hosts.enter, env=env)
        wait_for_training(started)
        began = time.monotonic()
        hosts.cut()
        cut_at = time.monotonic() - group.started
        cut.touch()
        time.sleep(CUT_S)
        hosts.mend()
        lasted_s = time.monotonic() - began
        results = group.join(150)
        if lasted_s < LONGEST_CUT_S:
            break
    assert all(r.error is None for r in results), [r.error for r in results]
    assert min(r.seconds for r in results) > cut_at + CUT_S, "the ranks had ended before the cut: nothing was tested"
    undisturbed = start_ranks(2, stoppable, steps, str(started), str(cut)).join(150)
    assert largest_difference(results[0].value, undisturbed[0].value) == 0.0


def alive_until(rank: int, world_size: int, noticed: str) -> tuple[str, float]:
    """Wait for the other rank without end; how that ended, and when."""
    unit = UnitSpec("u", 4, torch.float32, (ParamSlice("w", 4),))
    with Runtime.create(ProcessGroupExchange(), [unit], RuntimeConfig(timeout_s=100)) as runtime:
        runtime.publish(0, lambda out: out.fill_(rank))
        runtime.begin()
        runtime.gather(0, torch.empty(4 * world_size))
        Path(f"{noticed}{rank}").touch()
        with pytest.raises(odc.OdcError) as caught:
            runtime._waiter.wait(lambda: [1 - rank], lambda: "nothing")
        return str(caught.value), time.monotonic()


@pytest.mark.parametrize(
    "how", ["the interface is down", pytest.param("the switch is off", marks=pytest.mark.extended)]
)
def test_the_end_of_a_network_is_noticed_within_the_stated_time(
    hosts: network.TwoHosts, tmp_path: Path, how: str
) -> None:
    """On both sides, whatever the kernel has heard of the way there meanwhile."""
    group = start_ranks(2, alive_until, str(tmp_path / "set-up"), enter=hosts.enter)
    wait_for_all(tmp_path / "set-up", 2)
    if how == "the switch is off":
        hosts.cut()
    else:
        hosts.unplug(0)
    cut_at = time.monotonic()  # one clock for all processes of a machine
    results = group.join(90)
    assert all(r.error is None for r in results), [r.error for r in results]
    for text, noticed_at in (r.value for r in results):
        assert "no sign of life from its host or the network" in text
        # Not before a short cut would be over; not long after what the documents say.
        assert LONGEST_CUT_S - 0.5 < noticed_at - cut_at < SILENCE_S + 3.0
