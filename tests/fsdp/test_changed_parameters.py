"""Layer 3: ranks as processes. Parameters that a script changes where they cannot be published anew are noticed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import assert_one_says, run_ranks, start_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from training import DEVICE, build, evaluated, loss_of, read_at_once, shard, sharded_by, tokens, use_up, wrap

import odc
from odc.fsdp_patch.guard import SAMPLE_BYTES, SAMPLE_PLACES, DeviceComparison


def few_elements(model: Any, rank: int) -> None:
    """Nothing that torch counts, and too few for a sample: at the latest the next minibatch sees them."""
    evaluated(model, reshards=True)
    for parameter in model.parameters():
        local = parameter.data._local_tensor if isinstance(parameter, DTensor) else parameter.data
        if local.nbytes > 2 * SAMPLE_PLACES * SAMPLE_BYTES:
            place = local.numel() // 2 // SAMPLE_PLACES  # between two places of the sample
            local.data.view(-1)[place].add_(1.0)  # nor does the version of the local tensor tell
    loss_of(model, tokens(0, rank, 0)).backward()


def smallest_of(model: nn.Module) -> nn.Parameter:
    """Of those with a part on this rank."""
    return min((p for p in model.parameters() if p.numel()), key=lambda parameter: parameter.numel())


def one_between_microbatches(model: Any, rank: int, through_data: bool = False) -> None:
    """Which the next gather need not look at: its gradient is not sent."""
    loss_of(model, tokens(0, rank, 0)).backward()
    parameter = smallest_of(model)
    with torch.no_grad():
        (parameter.data if through_data else parameter).add_(1.0)
    loss_of(model, tokens(0, rank, 1)).backward()


def sharded(kind: str, world_size: int) -> Any:
    net = build(num_blocks=2, width=65)  # most parameters are larger than a sample
    return sharded_by(kind, net, world_size)


def changed_through_data(rank: int, world_size: int, kind: str, change: Callable[[Any, int], None]) -> None:
    model = sharded(kind, world_size)
    session = odc.patch_fsdp(model, timeout_s=20)
    change(model, rank)
    session.close()


CHANGES = [few_elements, one_between_microbatches, functools.partial(one_between_microbatches, through_data=True)]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_parameters_changed_through_data_after_their_first_use_are_refused(
    kind: str, change: Callable[[Any, int], None]
) -> None:
    results = start_ranks(2, changed_through_data, kind, change).join(120)
    assert_one_says(results, "MisuseError", "was changed after it was published")


NAMED = "blocks.0.down.weight"  # neither the first of the model nor of its unit


def named(model: Any) -> nn.Parameter:
    return next(p for name, p in model.named_parameters() if clean_tensor_name(name) == NAMED)


def one_by_hand(model: Any) -> None:
    with torch.no_grad():
        named(model).add_(1.0)


def one_through_data(model: Any) -> None:
    named(model).data.add_(1.0)


def one_summoned(model: Any) -> None:
    """FSDP1 writes all parameters back, as they were but for this one."""
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        named(model).add_(1.0)


def name_of_changed(
    rank: int, world_size: int, kind: str, change: Callable[[Any], None], on_device: bool, use_orig_params: bool
) -> str:
    net = build(num_blocks=2, width=65)
    model: Any = shard(net, world_size) if kind == "fsdp2" else wrap(net, use_orig_params=use_orig_params)
    session = odc.patch_fsdp(model, timeout_s=20)
    if on_device:
        session._guard._comparison = DeviceComparison(read_at_once)
    evaluated(model, reshards=True)
    change(model)
    try:
        for index in range(len(session._units)):
            session._guard.compare(index)
    except odc.ProtocolError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "change", "on_device", "use_orig_params"),
    [
        ("fsdp2", one_by_hand, False, True),
        ("fsdp2", one_through_data, True, True),
        ("fsdp1", one_by_hand, True, True),
        ("fsdp1", one_through_data, False, True),
        ("fsdp1", one_summoned, False, True),
        ("fsdp1", one_summoned, False, False),
    ],
)
def test_the_parameter_that_was_changed_is_named(
    kind: str, change: Callable[[Any], None], on_device: bool, use_orig_params: bool
) -> None:
    ranks = start_ranks(2, name_of_changed, kind, change, on_device, use_orig_params).join(120)
    said = [rank.value or rank.error or "" for rank in ranks]
    assert any(text.startswith(f"parameter {NAMED!r} was changed") for text in said), said
    assert all(repr(NAMED) in text for text in said if "was changed" in text), said


def changed_in_between(rank: int, world_size: int, kind: str, where: str) -> str:
    """Rank 0 computes the second forward with other weights of the middle layer than the backward behind it."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)]
    net: Any = nn.Sequential(*layers)
    net.requires_grad_(where != "teacher")
    layers[1].requires_grad_(where == "without sync")
    if kind == "fsdp2":
        for part in (*layers, net):
            fully_shard(part)
    else:
        net = FullyShardedDataParallel(
            net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True, device_id=DEVICE
        )
    x = torch.randn(3, 16, requires_grad=True)

    def change(factor: float) -> None:
        weight = layers[1].weight
        with torch.no_grad():
            (weight.to_local() if isinstance(weight, DTensor) else weight).mul_(factor if rank == 0 else 1.0)

    with odc.patch_fsdp(net, timeout_s=20) as session:
        without_sync = contextlib.nullcontext()
        if where == "without sync" and kind == "fsdp2":
            net.set_requires_gradient_sync(False)
        elif where == "without sync":
            without_sync = net.no_sync()
        said = "nothing"
        try:
            with without_sync:
                net(x).sum().backward()
                loss = net(x).sum()
                change(2.0)
                loss.backward()
        except odc.MisuseError as error:
            said = str(error)
        change(0.5)
        with contextlib.suppress(odc.AbortedError):  # who comes later hears of it, in what is published anew here
            dist.barrier()  # both have come so far
        session.abort(AssertionError("the end of the test"))
        return said


@pytest.mark.parametrize("where", ["frozen", "without sync", "teacher"])
@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_what_is_changed_between_a_forward_and_a_backward_that_pushes_nothing_of_it(kind: str, where: str) -> None:
    """No push comes behind it, which would be looked at; and at the end of the minibatch it is what it was."""
    said = [rank.value or rank.error or "" for rank in start_ranks(2, changed_in_between, kind, where).join(120)]
    assert "was changed after it was published" in said[0], said


def decayed_before_the_step(rank: int, world_size: int, kind: str) -> None:
    """All microbatches have been sent by then, so nobody computes with it."""
    model = sharded(kind, world_size)
    session = odc.patch_fsdp(model, timeout_s=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for microbatch in range(2):
            loss_of(model, tokens(step, rank, microbatch)).backward()
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        use_up(optimizer)
    session.close()


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp1"])
def test_parameters_may_be_changed_once_all_gradients_are_sent(kind: str) -> None:
    run_ranks(2, decayed_before_the_step, kind)
