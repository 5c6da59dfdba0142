"""Layers 2 and 3. Ranks that take different numbers of steps, or leave in the middle of one. Fault test 18."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from process_ranks import across, assert_all_say, run_ranks, start_ranks
from test_faults_pushes import NUMEL, UNITS
from thread_ranks import ThreadExchange, begin, publish_all, run_runtimes, sum_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import (
    build,
    evaluated,
    full_parameters,
    largest_difference,
    loss_of,
    optimizer_of,
    shard,
    sharded_by,
    tokens,
    use_up,
)
from watching import until

import odc
from odc import AbortedError, OdcError, PeerClosedError, ProtocolError, Runtime, limits
from odc.minibatch.state import Phase

EXTENDED = pytest.mark.extended
LIMIT_S = 20.0

# Fault test 18: a rank that leaves, wherever it is in its minibatch

LEAVING = ["after finish", "after publish", "after begin", "after gather", "after push"]


def minibatch(runtime: Runtime, world_size: int) -> None:
    begin(runtime)
    runtime.gather(0, torch.empty(world_size * NUMEL))
    runtime.scatter_accumulate(0, torch.ones(world_size * NUMEL))
    runtime.finish()


def go_on(runtime: Runtime, world_size: int, num_minibatches: int) -> None:
    for _ in range(num_minibatches):
        minibatch(runtime, world_size)
        assert sum_is_whole(runtime)


def leave(runtime: Runtime, world_size: int, when: str) -> None:
    """Run a part of a minibatch and close."""
    steps: dict[str, Callable[[], None]] = {
        "after finish": lambda: None,
        "after publish": lambda: publish_all(runtime),
        "after begin": runtime.begin,
        "after gather": lambda: runtime.gather(0, torch.empty(world_size * NUMEL)),
        "after push": lambda: runtime.scatter_accumulate(0, torch.ones(world_size * NUMEL)),
    }
    for name, step in steps.items():
        step()
        if name == when:
            break
    runtime.close()


@pytest.mark.parametrize("mode", [{}, {"accumulate": "daemon"}, {"hosts": 3}], ids=["direct", "daemon", "tcp"])
@pytest.mark.parametrize("when", LEAVING)
def test_a_rank_that_leaves_early_is_named_with_the_minibatch(when: str, mode: dict[str, Any]) -> None:
    """Rank 1 ends its training in minibatch 3, without a mistake; the others want to go on."""

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        if exchange.rank == 1:
            go_on(runtime, exchange.world_size, 2)
            leave(runtime, exchange.world_size, when)
            return
        with pytest.raises((PeerClosedError, AbortedError)) as caught:
            go_on(runtime, exchange.world_size, 3)  # or told of it while it still waits for the end of minibatch 2
        assert "rank 1 (host" in str(caught.value)
        assert "minibatch 3" in str(caught.value)
        assert runtime.minibatch in (2, 3)
        if runtime.state.phase is Phase.FINISHED:  # told by the other one before it had published
            assert runtime.minibatch == 2
            assert runtime.state.is_published(0) or sum_is_whole(runtime)  # published, it is open to the others again
            return
        with pytest.raises(ProtocolError, match="is not final"):
            runtime.gradient(0)

    run_runtimes(3, UNITS, body, **mode)


def test_who_still_waits_for_the_end_of_a_minibatch_may_hear_of_a_failure_in_the_next_one() -> None:
    """A failure ends every wait, also one for what has come meanwhile: its sum is never used."""
    waits = threading.Event()

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        minibatch(runtime, exchange.world_size)
        if exchange.rank != 2:
            runtime.faults.hit = lambda point: point == "finish.before_done" and waits.wait(LIMIT_S)  # type: ignore[method-assign,assignment]
            with contextlib.suppress(AbortedError):  # rank 1 may hear of it, too
                minibatch(runtime, exchange.world_size)
            if exchange.rank == 0:
                runtime.abort(ValueError("no more"))
            return

        points: list[str] = []

        def hear(point: str) -> None:
            points.append(point)
            if point == "wait" and "finish.before_done" in points:
                waits.set()
                until(lambda: runtime._waiter.job.abort_notice() is not None, "rank 0 has not failed")

        runtime.faults.hit = hear  # type: ignore[method-assign]
        with pytest.raises(AbortedError, match=r"because rank 0 .*: ValueError: no more"):
            minibatch(runtime, exchange.world_size)
        assert runtime.minibatch == 2
        with pytest.raises(ProtocolError, match="is not final"):
            runtime.gradient(0)

    run_runtimes(3, UNITS, body)


def sum_is_whole(runtime: Runtime) -> bool:
    return bool((sum_of(runtime) == runtime.topology.world_size).all())


def test_another_ranks_failure_stays_one_whichever_thread_has_heard_of_it() -> None:
    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        runtime.abort(AbortedError("rank 0 aborted because rank 1 (pid 7): no more"))  # as the daemon does
        with pytest.raises(AbortedError, match=r"rank 0 aborted because rank 1 \(pid 7\): no more"):
            publish_all(runtime)

    run_runtimes(1, UNITS, body)


# Fault test 18: the loops of a script, each rank with its own

Plan = tuple[tuple[int, ...], ...]  # the samples of each minibatch; every one ends with a step


@dataclass(frozen=True)
class Loops:
    """What three ranks do, and for how many minibatches they agree."""

    plans: tuple[Plan, Plan, Plan]
    named: tuple[int, ...]
    """Ranks any of which may be blamed."""

    @property
    def common(self) -> int:
        return min(len(plan) for plan in self.plans)


FOUR: Plan = ((0,), (1,), (2,), (3,))
LOOPS = {
    "ends early": Loops((FOUR, FOUR[:3], FOUR), named=(1,)),
    "ends at once": Loops((FOUR, FOUR[:1], FOUR), named=(1,)),
    "one step more": Loops((FOUR, (*FOUR, (4,)), FOUR), named=(0, 2)),
    "goes on without samples": Loops((FOUR, (*FOUR, (), ()), FOUR), named=(0, 2)),
    "skips a step": Loops((FOUR, ((0,), (1, 2), (3,)), FOUR), named=(1,)),
    "steps twice": Loops((FOUR, ((0,), (1,), (), (2,), (3,)), FOUR), named=(0, 2)),
    "leaves one by one": Loops((FOUR[:3], FOUR[:2], FOUR), named=(1,)),
}


def run_loop(loops: Loops, rank: int, world_size: int) -> dict[str, Any]:
    """One rank's script, without a word about minibatches. What it got, and how it failed."""
    model = shard(build(num_blocks=1), world_size)
    shards: list[Any] = list(model.parameters())  # an error in a forward leaves others in the model
    session, optimizer = odc.patch_fsdp(model), optimizer_of(model)
    result: dict[str, Any] = {"error": None}
    agreed: list[torch.Tensor] = []
    try:
        for number, samples in enumerate(loops.plans[rank], start=1):
            for sample in samples:
                (loss_of(model, tokens(sample, rank, 0)) * 0.02).backward()
            use_up(optimizer)
            if number == loops.common:
                result["parameters"] = full_parameters(model)
                agreed = [p.to_local().clone() for p in shards]
    except OdcError as error:
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        session.close()
    result["unchanged"] = all(map(torch.equal, agreed, [p.to_local() for p in shards]))
    return result


def run_loops(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    results = {}
    for name, loops in LOOPS.items():
        results[name] = run_loop(loops, rank, world_size)
        dist.barrier()
    return results


def reference_of(loops: Loops) -> dict[str, Any]:
    """The minibatches for which the ranks agree, in one float64 process."""
    model = build(torch.float64, num_blocks=1)
    optimizer = optimizer_of(model)
    for number in range(loops.common):
        for rank, plan in enumerate(loops.plans):
            for sample in plan[number]:
                (loss_of(model, tokens(sample, rank, 0)) * 0.02 / len(loops.plans)).backward()
        use_up(optimizer)
    return dict(model.state_dict())


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=EXTENDED)], ids=["one host", "two hosts"])
def results(request: pytest.FixtureRequest) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(3, across, request.param, run_loops, env={"ODC_TIMEOUT": "60"}, timeout_s=300)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_of_different_length_fail_where_they_part(results: list[dict[str, dict[str, Any]]], name: str) -> None:
    """Whoever goes on is told who has left, in which minibatch; what was agreed until then is right, and stays."""
    loops = LOOPS[name]
    expected = reference_of(loops)
    for rank, plan in enumerate(loops.plans):
        found = results[rank][name]
        assert largest_difference(found["parameters"], expected) < 1e-5
        if len(plan) == loops.common:
            assert found["error"] is None
            continue
        assert found["unchanged"]
        assert found["error"].startswith(("PeerClosedError", "AbortedError")), found["error"]
        assert f"minibatch {loops.common + 1}" in found["error"]
        assert any(f"rank {named} (host" in found["error"] for named in loops.named), found["error"]


def clears_instead_of_stepping(rank: int, world_size: int) -> None:
    """Rank 1 throws its second minibatch away, as a script does whose loss is not a number."""
    model = shard(build(num_blocks=1), world_size)
    optimizer = optimizer_of(model)
    with odc.patch_fsdp(model):
        for step in range(4):
            loss_of(model, tokens(step, rank, 0)).backward()
            if rank != 1 or step != 1:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=EXTENDED)])
def test_a_step_that_one_rank_skips_is_refused_and_all_are_told(hosts: int) -> None:
    env = {"ODC_TIMEOUT": "60"}
    results = start_ranks(3, across, hosts, clears_instead_of_stepping, env=env).join(150)
    assert_all_say(results, "rank 1 to throw it away (discard)", kinds=["ProtocolError", "AbortedError"])


def steps_on_what_others_keep(rank: int, world_size: int, kind: str, clip: Callable[[nn.Module], object]) -> None:
    """Gradients are kept once, said explicitly; behind that only those say so who have a microbatch: rank 1 has none,
    and takes its step on what rank 0 has added to."""
    model: Any = build(num_blocks=1)
    if kind == "hybrid":
        model = fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    else:
        model = sharded_by(kind, model, world_size)
    with odc.patch_fsdp(model) as session:
        train_on_what_others_keep(rank, model, session, clip)


def train_on_what_others_keep(
    rank: int, model: nn.Module, session: odc.Session, clip: Callable[[nn.Module], object]
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        if rank % 2 == 0 or step % 2 == 0:
            (loss_of(model, tokens(step, rank, 0)) * 0.02).backward()
        if step % 2 == 0:
            session.finish()
            continue
        clip(model)
        use_up(optimizer)


def steps_alone(model: nn.Module) -> None:
    """Without clipping."""


by_norm = training.clip
"""In a collective, in which rank 1 waits for those that wait for it at the end of the next minibatch."""


def by_scaler(model: nn.Module) -> None:
    """The same where it asks all ranks whether any gradient is not finite."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.zeros(()))
    scaler.unscale_(torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize(
    ("kind", "clip"),
    [
        *(("fsdp2", steps_alone), ("fsdp1", by_norm), ("hybrid", by_norm), ("fsdp2", by_scaler)),
        *(pytest.param(kind, steps_alone, marks=EXTENDED) for kind in ("fsdp1", "hybrid")),
        pytest.param("fsdp2", by_norm, marks=EXTENDED),
    ],
)
def test_ranks_that_step_on_gradients_of_different_minibatches_are_told(
    kind: str, clip: Callable[[nn.Module], object]
) -> None:
    ranks = 4 if kind == "hybrid" else 2
    for result in start_ranks(ranks, steps_on_what_others_keep, kind, clip, env={"ODC_TIMEOUT": "300"}).join(150):
        if clip is not steps_alone:
            what = "clip_grad_norm_" if clip is by_norm else "unscale_"
            assert re.search(f"this rank is in .*{what}, with gradients of minibatch 1", result.error or "")
        else:
            assert "have not taken the same steps" in (result.error or "")
            assert re.search("rank [02] 0, rank [13] 1", result.error or "")
        assert ".finish() on every rank" in (result.error or "")


def fails_and_goes_on(rank: int, world_size: int, clip: Callable[[nn.Module], object]) -> str:
    """As in a notebook: the error is caught, nobody closes the session, and a while later another model is patched."""
    limits.BEAT_S, limits.FAILURE_GRACE_S = 0.01, 0.02  # type: ignore[misc]
    model = shard(build(num_blocks=1), world_size)
    session = odc.patch_fsdp(model)
    try:
        train_on_what_others_keep(rank, model, session, clip)
    except OdcError:
        time.sleep(0.2)  # for the watchdog
    other = shard(build(num_blocks=1), world_size)
    try:
        with odc.patch_fsdp(other):
            loss_of(other, tokens(0, rank, 0)).backward()
            optimizer_of(other).step()
    except OdcError as error:
        return str(error)
    with pytest.raises(OdcError, match="this session is closed"):
        session.finish()
    return ""


def test_another_model_can_be_patched_behind_a_session_that_has_failed() -> None:
    assert run_ranks(2, fails_and_goes_on, steps_alone) == ["", ""]


def test_who_cannot_go_on_behind_a_session_that_has_failed_is_told_what_to_do() -> None:
    for told in run_ranks(2, fails_and_goes_on, by_norm):
        assert "its process group was ended with that: on every rank call dist.destroy_process_group()" in told


def waits_elsewhere(rank: int, world_size: int) -> None:
    """The others' epoch has one minibatch more than rank 1's, which meets the collective at its end."""
    model = shard(build(num_blocks=1), world_size)
    optimizer = optimizer_of(model)
    with odc.patch_fsdp(model):
        for step in range(2 + (rank != 1)):
            loss_of(model, tokens(step, rank, 0)).backward()
            use_up(optimizer)
        dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=EXTENDED), 2])
def test_a_rank_that_waits_in_a_collective_of_its_own_is_named(hosts: int) -> None:
    """Each waits for the other, so no limit is waited for. The end of the others ends it too."""
    first, second = start_ranks(2, across, hosts, waits_elsewhere, env={"ODC_TIMEOUT": "600"}).join(150)
    words = ("rank 1 (host", "minibatch 3", "Cause: rank 1 has waited for", "and rank 0 waits here instead")
    assert_all_say([first], *words, kinds=["PeerSilentError"])
    assert "ODC_TIMEOUT" not in (first.error or "")
    assert second.error is not None
    assert "killed by the test" not in second.error


def skips_and_is_idle(rank: int, world_size: int, kind: str, clear: str, then: str) -> float:
    """A step is skipped, by clearing. Then rank 1 has no microbatch and goes to a collective of the script at once; or
    rank 0 alone evaluates, and rank 1 waits for it."""
    model = sharded_by(kind, build(num_blocks=1), world_size)
    optimizer = optimizer_of(model)
    total = torch.zeros(())
    with odc.patch_fsdp(model) as session:
        for step in range(5):
            idle = rank == 1 and step == 2
            if not idle:
                loss = loss_of(model, tokens(step, rank, 0)) * 0.02
                loss.backward()
                total += loss.detach()
            dist.all_reduce(total)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if step != 1:
                optimizer.step()
            (model if clear == "module" else optimizer).zero_grad()
            if then == "evaluation" and step == 1:
                if rank == 0:
                    evaluated(model)
                dist.barrier()
        assert session.stats().minibatches == 5
    return float(total)


@pytest.mark.parametrize(
    ("kind", "clear", "then"),
    [  # in pairs; cleared by the module: test_ways_out.py, too
        ("fsdp2", "optimizer", "evaluation"),
        ("fsdp1", "optimizer", "idle"),
        pytest.param("fsdp2", "module", "idle", marks=EXTENDED),
        pytest.param("fsdp1", "module", "evaluation", marks=EXTENDED),
    ],
)
def test_a_skipped_step_holds_up_nobody(kind: str, clear: str, then: str) -> None:
    results = start_ranks(2, skips_and_is_idle, kind, clear, then, env={"ODC_TIMEOUT": "20"}).join(100)
    assert [result.error for result in results] == [None, None]
    assert results[0].value == results[1].value


def scales_by_hand_and_is_idle(rank: int, world_size: int) -> None:
    """Gradients are set to None in a way that nobody sees: where rank 1 has no microbatch, it finds none to scale."""
    model = shard(build(num_blocks=1), world_size)
    optimizer = optimizer_of(model)
    with odc.patch_fsdp(model):
        for step in range(4):
            if rank == 0 or step != 2:
                loss_of(model, tokens(step, rank, 0)).backward()
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.25)
            optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None


def test_a_rank_that_did_without_gradients_is_named_on_all() -> None:
    results = start_ranks(2, scales_by_hand_and_is_idle, env={"ODC_TIMEOUT": "20"}).join(100)
    assert_all_say(results, "rank 1, which had no microbatch, went on without gradients where rank 0")
