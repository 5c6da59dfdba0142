"""Layer 3: ranks as processes. Finding a session, closing it too early, and a model that is dropped without closing."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from training import build, loss_of, optimizer_of, shard, start, tokens, use_up, wrap

import odc
from odc.fsdp_patch.automatic import AutomaticPatching
from odc.launch.report import Measurements


class Around(nn.Module):
    """As a trainer holds a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def finding(rank: int, world_size: int) -> None:
    policy, reference = shard(build(), world_size), shard(build(), world_size)
    reference.requires_grad_(False)
    session, frozen = odc.patch_fsdp(policy), odc.patch_fsdp(reference)
    assert odc.session_of(policy) is session
    assert odc.session_of(policy.blocks[0]) is session
    assert odc.session_of(Around(policy)) is session
    assert odc.session_of(reference) is frozen
    session.close()
    with pytest.raises(odc.OdcError, match="FSDPNet is not patched"):
        odc.session_of(policy)
    assert odc.session_of(reference) is frozen
    frozen.close()


def test_a_session_is_found_by_its_model_a_part_of_it_or_what_holds_it() -> None:
    run_ranks(2, finding)


def closing(rank: int, world_size: int) -> list[str]:
    """Warnings of closing in the middle of a minibatch, before it, behind it, and in an error."""
    found = []
    for how in ("middle", "before", "behind", "error"):
        model, session, optimizer = start(world_size)
        if how != "before":
            loss_of(model, tokens(0, rank, 0)).backward()
        if how == "behind":
            optimizer.step()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                if how == "error":
                    raise RuntimeError("the script's own")
            except RuntimeError:
                session.close()
            session.close()
        found.append("; ".join(str(w.message) for w in caught if "odc" in str(w.message)))
    return found


def test_closing_in_the_middle_of_a_minibatch_warns_of_what_is_lost() -> None:
    for middle, *others in run_ranks(2, closing):
        assert "closed in the middle of a minibatch: gradients of 3 units" in middle
        assert others == ["", "", ""]


def train_and_drop(rank: int, world_size: int, kind: str) -> weakref.ref[nn.Module]:
    model = shard(build(), world_size) if kind == "fsdp2" else wrap(build(), use_orig_params=True)
    optimizer = optimizer_of(model)
    loss_of(model, tokens(0, rank, 0)).backward()
    use_up(optimizer)
    return weakref.ref(model)


def descriptors() -> int:
    """Doorbells and watched processes of this process; gloo has none."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += entry.readlink().name in ("anon_inode:[eventfd]", "anon_inode:[pidfd]")
    return found


def dropping(rank: int, world_size: int, kind: str) -> tuple[int, int, int]:
    """Models alive, more descriptors than before, and reports, after two models that nobody closed."""
    init_device_mesh("cpu", (world_size,))
    measurements = Measurements()
    patching = AutomaticPatching(odc.patch_fsdp, lambda text: None, on_patched=measurements.begin)
    train_and_drop(rank, world_size, kind)  # what torch keeps of the first
    gc.collect()
    before = descriptors()
    models = [train_and_drop(rank, world_size, kind) for _ in range(2)]
    gc.collect()
    alive = sum(model() is not None for model in models)
    more = descriptors() - before
    accounts = measurements.accounts()
    assert all(account.times and account.times[0] for account in accounts)
    measurements.close()
    patching.close()
    return alive, more, len(accounts)


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_a_model_that_is_dropped_is_freed_and_still_in_the_report(kind: str) -> None:
    assert run_ranks(2, dropping, kind) == [(0, 0, 3)] * 2


def without_sessions(rank: int, world_size: int) -> bool:
    """``.grad`` under a session that waits, and of a tensor that is no parameter of it."""
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model)
    loss_of(model, tokens(0, rank, 0)).backward()
    other = nn.Parameter(torch.ones(2))
    other.sum().backward()
    assert other.grad is not None
    still_open = session.stats().minibatches == 0
    gradient = next(model.parameters()).grad
    assert gradient is not None
    assert gradient.shape == next(model.parameters()).shape
    assert session.stats().minibatches == 0, "what needs no data ends nothing"
    gradient.norm()
    session.close()
    return still_open and session.stats().minibatches == 1


def reading_inside(rank: int, world_size: int) -> None:
    """In a block that ends the minibatch itself, in a hook of backward, and behind the block."""
    model = shard(build(), world_size)
    seen: list[torch.Tensor | None] = []
    with odc.patch_fsdp(model) as session:
        with session.minibatch():
            loss = loss_of(model, tokens(0, rank, 0))
            loss.register_hook(lambda gradient: seen.append(next(model.parameters()).grad))
            loss.backward()
            loss_of(model, tokens(0, rank, 1)).backward()
            with pytest.raises(odc.MisuseError, match=r"using .grad \(test_sessions.py, line \d+\) inside the mini"):
                next(model.parameters()).grad.norm()
        assert next(model.parameters()).grad.norm() > 0
    assert seen == [None]


def test_gradients_cannot_be_read_inside_the_block_of_a_minibatch() -> None:
    run_ranks(2, reading_inside)


def test_gradients_of_others_do_not_end_a_minibatch() -> None:
    assert run_ranks(2, without_sessions) == [True, True]
