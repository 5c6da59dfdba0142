"""Layer 3: ranks as processes. ``.grad`` is the script's own memory; misuse that changed nothing ends nothing."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import assert_all_say, run_ranks, start_ranks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import clip_grad_norm_
from training import build, clip, full_parameters, loss_of, optimizer_of, shard, sharded_by, tokens, use_up

import odc

KINDS = ["fsdp2", "fsdp1", "fsdp1-flat"]


def local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


def read_in_a_forked_child(rank: int, world_size: int, kind: str) -> tuple[int, bool]:
    model = sharded_by(kind, build(), world_size)
    with odc.patch_fsdp(model) as session:
        loss_of(model, tokens(0, rank, 0)).backward()
        session.finish()
        gradients = [p.grad for p in model.parameters() if p.grad is not None and local(p.grad).numel()]
        child = os.fork()
        if child == 0:
            total = sum(float(local(g).abs().sum()) for g in gradients)
            os._exit(7 if total > 0 else 8)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, bool(gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_a_forked_child_can_read_gradients(kind: str) -> None:
    """A child has no mapping of the memory that ranks share."""
    assert run_ranks(2, read_in_a_forked_child, kind) == [(7, True)] * 2


def kept_by_views(rank: int, world_size: int, kind: str) -> int:
    """Parts of gradients, kept while later minibatches run and after the session has closed."""
    model = sharded_by(kind, build(), world_size)
    optimizer = optimizer_of(model)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    with odc.patch_fsdp(model):
        for step in range(3):
            loss_of(model, tokens(step, rank, 0)).backward()
            clip(model)
            views = [local(p.grad).flatten()[:4] for p in model.parameters() if p.grad is not None]
            kept += [(view, view.clone()) for view in views]
            use_up(optimizer)
            for view, copy in kept:
                assert torch.equal(view, copy), f"changed in minibatch {step + 1}"
    assert all(torch.equal(view, copy) for view, copy in kept), "changed when the session closed"
    return len(kept)


@pytest.mark.parametrize("kind", KINDS)
def test_views_of_gradients_stay_as_they_are(kind: str) -> None:
    assert all(run_ranks(2, kept_by_views, kind))


# One rank has no microbatch, has not cleared its gradients, and the script has a collective of its own.


def idle_and_uncleared(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    model = sharded_by(kind, build(), world_size)
    optimizer = optimizer_of(model)
    with odc.patch_fsdp(model, timeout_s=20):
        for step in range(4):
            total = torch.zeros(())
            if step % 2 == 0 or rank == 0:
                loss = loss_of(model, tokens(step, rank, 0))
                loss.backward()
                total += loss.detach()
            dist.all_reduce(total)
            clip(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    return full_parameters(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_waits_for_no_script(kind: str) -> None:
    run_ranks(2, idle_and_uncleared, kind)


# Misuse


def trained(rank: int, world_size: int, kind: str, misuses: bool) -> tuple[list[str], dict[str, Any]]:
    model = sharded_by(kind, build(), world_size)
    session = odc.patch_fsdp(model, timeout_s=20)
    optimizer = optimizer_of(model)
    refused = []

    def nested() -> None:
        with session.minibatch():
            raise AssertionError("a block inside a minibatch began")

    def summoned() -> None:  # parts of gradients have no place there
        with FullyShardedDataParallel.summon_full_params(model):
            clip_grad_norm_(model.parameters(), 1.0)  # with use_orig_params=False these are others, of no session
            session.finish()

    def attempt(*what: Any) -> None:
        for misuse in what if misuses else ():
            with pytest.raises(odc.MisuseError) as caught:
                misuse()
            refused.append(str(caught.value))

    for step in range(3):
        loss_of(model, tokens(step, rank, 0)).backward()
        attempt(session.publish, nested, torch.optim.SGD(list(model.parameters())[:1]).zero_grad)
        attempt(*([] if kind == "fsdp2" else [summoned]))
        session.finish()
        attempt(session._runtime.finish)
        use_up(optimizer)
        attempt(session._runtime.finish)
    assert not session._runtime.has_failed
    session.close()
    return refused, full_parameters(model)


@pytest.mark.parametrize("kind", KINDS)
def test_misuse_that_changed_nothing_is_an_ordinary_exception(kind: str) -> None:
    """On every rank, several times a minibatch; and the numbers are those of a run without."""
    for (refused, disturbed), (_, plain) in zip(
        run_ranks(2, trained, kind, True), run_ranks(2, trained, kind, False), strict=True
    ):
        assert len(refused) == 3 * (5 if kind == "fsdp2" else 6)
        assert "publish() inside minibatch 1" in refused[0]
        assert "a minibatch cannot begin now" in refused[1]
        assert "between backward and step" in refused[2]
        assert kind == "fsdp2" or "would end inside summon_full_params" in refused[3]
        assert all((disturbed[name] == plain[name]).all() for name in plain)


def different_ends(rank: int, world_size: int) -> None:
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, timeout_s=20)
    loss_of(model, tokens(0, rank, 0)).backward()
    if rank == 0:
        session.finish()
    else:
        session.discard()


def test_ranks_that_disagree_about_a_minibatch_all_fail_at_once() -> None:
    assert_all_say(
        start_ranks(2, different_ends).join(120), "in different ways", kinds=("ProtocolError", "AbortedError")
    )
