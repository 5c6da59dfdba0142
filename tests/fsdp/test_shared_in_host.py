"""Layer 3: ranks as processes. Ranks that pose as hosts share parameters and gradients within each: nothing crosses
inside of a minibatch, and numbers are those of one process.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from extended_weights import RowScaled, Scaled, extend
from process_ranks import assert_all_say, assert_one_says, run_ranks, start_ranks
from test_checkpoints import begin, load_sharded, save_sharded
from test_ways_out import evaluates_on_one_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import (
    build,
    communicating,
    evaluated,
    full_parameters,
    largest_difference,
    loss_of,
    multiply,
    optimizer_of,
    reference,
    shard,
    tokens,
    train,
    use_up,
    wrap,
)

import odc
from odc import ParamSlice, UnitSpec
from odc.balance import TransformerShape
from odc.fsdp_patch.replicas import Replicas
from odc.fsdp_patch.sharing import Sharing
from odc.setup.topology import Topology

KINDS = ("in place", "small", "staged", "fsdp1", "bf16", "reduced in bf16", "frozen")
COUNTS = [3, 0, 1, 2]
PRECISION = {
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "reduced in bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)},
}


def on_hosts(rank: int) -> None:
    os.environ["ODC_HOST_ID"] = f"host{rank // 2}"


def unused_on_host_1(step: int, rank: int, microbatch: int) -> dict[str, Any]:
    """Block 1 runs on one host only in odd steps."""
    return {"skip": [1]} if step % 2 and rank >= 2 else {}


def make(kind: str, world_size: int) -> Any:
    model = build()
    if kind == "frozen":
        model.blocks[0].requires_grad_(False)
        model.embed.requires_grad_(False)
    if kind == "fsdp1":
        return wrap(model)
    return shard(model, world_size, **PRECISION.get(kind, {}))


def trained(rank: int, world_size: int, kind: str, **options: Any) -> tuple[dict[str, Any], str, int, set[torch.dtype]]:
    """Parameters, the transport, how many ranks read from each other, and in what sums cross hosts."""
    crossed, swap = set(), Replicas.swap_rows
    model = make(kind, world_size)
    with communicating(kind if kind in ("in place", "staged") else "small"):
        session = odc.patch_fsdp(model, **options)
    with session, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replicas, "swap_rows", lambda it, rows, to: crossed.add(rows.dtype) or swap(it, rows, to))
        train(model, session, rank, world_size, COUNTS, 4, unused_on_host_1)
        transport, readers = session.transport, session._units[0].process_group.size()
    return full_parameters(model), transport, readers, crossed


def each_kind(rank: int, world_size: int) -> dict[str, Any]:
    on_hosts(rank)
    return {
        **{kind: trained(rank, world_size, kind) for kind in KINDS},
        "off": trained(rank, world_size, "small", share_in_host="off"),
        "frozen, off": trained(rank, world_size, "frozen", share_in_host="off"),
        "of one unit": trained(rank, world_size, "small", share_in_host=2000),
    }


@pytest.fixture(scope="module")
def of_four() -> dict[str, Any]:
    return run_ranks(4, each_kind, timeout_s=180)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_ranks_have_the_numbers_of_one_process(kind: str, of_four: dict[str, Any]) -> None:
    found, *how = of_four[kind]
    assert how == ["shm", 2, {torch.bfloat16 if kind == "reduced in bf16" else torch.float32}]
    expected = of_four["frozen, off"][0] if kind == "frozen" else reference(COUNTS, 4, unused_on_host_1)
    assert largest_difference(found, expected) < (0.1 if kind in PRECISION else 1e-5)


@pytest.mark.parametrize(("kind", "transports"), [("off", ["tcp"]), ("of one unit", ["shm", "tcp"])])
def test_what_is_not_shared_is_read_from_all_hosts(kind: str, transports: list[str], of_four: dict[str, Any]) -> None:
    found, transport, *_ = of_four[kind]
    assert sorted(transport.split(" and ")) == transports
    assert largest_difference(found, of_four["small"][0]) < 1e-5


def losses_of(
    rank: int, model: Any, optimizer: torch.optim.Optimizer, behind: Callable[[], object] = lambda: None
) -> list[float]:
    found = []
    for step in range(3):
        loss = loss_of(model, tokens(step, rank, 0))
        loss.backward()
        use_up(optimizer)
        behind()
        found.append(loss.item())
    return found


def changing(rank: int, world_size: int) -> list[list[float]]:
    """Losses where parameters, frozen ones too, change between steps, by hand, for an evaluation; not shared, and
    shared."""
    on_hosts(rank)
    found = []
    for mode in ("off", "on"):
        model = make("frozen", world_size)
        losses: list[float] = []

        def evaluate(model: Any = model, losses: list[float] = losses) -> None:
            multiply(model, 0.9)
            losses.append(evaluated(model, rank).item())
            multiply(model, 1 / 0.9)

        with odc.patch_fsdp(model, share_in_host=mode):
            found.append(losses_of(rank, model, optimizer_of(model), evaluate) + losses)
    return found


def test_parameters_that_change_between_steps_cross_again() -> None:
    for off, on in run_ranks(4, changing):
        assert on == pytest.approx(off, rel=1e-6)


def with_own_weights(rank: int, world_size: int) -> list[list[float]]:
    """Losses where what travels is made by the weights, not shared, and shared; also by a collective of all ranks."""
    on_hosts(rank)
    found = []
    for kind, mode in itertools.product((RowScaled, Scaled), ("off", "on")):
        model = build(num_blocks=1)
        extend(model, kind, world_size)
        with odc.patch_fsdp(shard(model, world_size), share_in_host=mode):
            found.append(losses_of(rank, model, torch.optim.SGD(model.parameters(), lr=1e-3)))
    return found


def test_weights_that_say_what_travels_are_shared_too() -> None:
    for by_row, by_row_shared, whole, whole_shared in run_ranks(4, with_own_weights):
        assert by_row_shared + whole_shared == pytest.approx(by_row + whole, rel=1e-6)


def changed_on_one_host(rank: int, world_size: int) -> None:
    on_hosts(rank)
    model = make("small", world_size)

    odc.patch_fsdp(model, timeout_s=30)
    losses_of(rank, model, optimizer_of(model), lambda: multiply(model, 0.5) if rank < 2 else None)


def test_a_change_on_one_host_alone_fails_by_name() -> None:
    results = start_ranks(4, changed_on_one_host).join(55)
    assert {result.error_type for result in results} <= {"ProtocolError", "AbortedError"}, results
    assert any("not all ranks have changed parameters" in (result.error or "") for result in results), results


def evaluated_on_one_host(rank: int, world_size: int) -> None:
    on_hosts(rank)
    evaluates_on_one_rank(rank, world_size)


def test_an_evaluation_before_the_step_on_one_host_alone_fails_by_name() -> None:
    results = start_ranks(4, evaluated_on_one_host, env={"ODC_TIMEOUT": "30"}).join(60)
    assert_one_says(results, "ProtocolError", "evaluate after optimizer.step()")


def other_on_host_1(rank: int, world_size: int) -> None:
    on_hosts(rank)
    reduce_dtype = torch.float32 if rank < 2 else torch.bfloat16
    odc.patch_fsdp(shard(build(), world_size, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)))


def test_hosts_that_differ_are_told_on_all_ranks() -> None:
    assert_all_say(start_ranks(4, other_on_host_1).join(60), "rank 2 differs from rank 0", kinds=["SetupError"])


def refusals(rank: int, world_size: int) -> list[str]:
    """Asked for where each rank is alone on its host, and in replicas whose shard groups are on two."""
    found = []
    meshes = init_device_mesh("cpu", (world_size,)), init_device_mesh("cpu", (1, world_size), mesh_dim_names=("r", "s"))
    for host, mesh in zip((rank, rank // 2), meshes, strict=True):
        os.environ["ODC_HOST_ID"] = f"host{host}"
        with pytest.raises(odc.ConfigError, match="share_in_host='on': the ranks that shard unit") as refused:
            odc.patch_fsdp(fully_shard(build(), mesh=mesh), share_in_host="on")
        found.append(str(refused.value))
    return found


def test_what_was_asked_for_and_cannot_be_shared_is_refused() -> None:
    alone, replicas = run_ranks(4, refusals)[0]
    assert "are alone on their hosts" in alone
    assert "have replicas" in replicas


def over_a_checkpoint(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """How far parameters and Adam's state are from those of plain FSDP that is not interrupted, by whether the training
    shared before the checkpoint, and behind it."""
    on_hosts(rank)
    counts, found = [1] * world_size, {}
    plain = begin("fsdp2", rank, world_size)
    plain.run(0, 3, counts)
    for before, behind in ((True, False), (False, True), (True, True)):
        saved, resumed = begin("fsdp2", rank, world_size), begin("fsdp2", rank, world_size, seed=7)
        with odc.patch_fsdp(saved.model, share_in_host="on") if before else nullcontext():
            saved.run(0, 1, counts)
            save_sharded(saved, f"{folder}/{before}{behind}")
        with odc.patch_fsdp(resumed.model, share_in_host="on") if behind else nullcontext():
            load_sharded(resumed, f"{folder}/{before}{behind}")
            resumed.run(1, 3, counts)
        found[f"{before}, {behind}"] = largest_difference(resumed.numbers(), plain.numbers())
    return found


def test_checkpoints_of_plain_fsdp_and_of_ranks_that_share_are_each_others(tmp_path: Path) -> None:
    for found in run_ranks(4, over_a_checkpoint, str(tmp_path)):
        assert len(found) == 3
        assert max(found.values()) < 1e-6, found


def number_beside_another_mesh(model: Any, world_size: int) -> None:
    pairs = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("other", "pair"))
    everyone = init_device_mesh("cpu", (world_size,))
    fully_shard(model.blocks[0], mesh=pairs["pair"])
    fully_shard(model.blocks[1], mesh=everyone, reshard_after_forward=2)
    fully_shard(model, mesh=everyone)


def number_beside_replicas(model: Any, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (1, world_size), mesh_dim_names=("replicate", "shard"))
    fully_shard(model.blocks[0], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)


def numbers(rank: int, world_size: int) -> list[list[float]]:
    """Losses under plain FSDP2 and ODC, of each."""
    on_hosts(rank)
    found = []
    for make_units, is_plain in itertools.product((number_beside_another_mesh, number_beside_replicas), (True, False)):
        model = build()
        make_units(model, world_size)
        with nullcontext() if is_plain else odc.patch_fsdp(model):
            found.append(losses_of(rank, model, optimizer_of(model)))
    return found


def test_a_number_for_resharding_goes_with_other_meshes_and_with_replicas() -> None:
    for one_plain, one, two_plain, two in run_ranks(4, numbers):
        assert one + two == pytest.approx(one_plain + two_plain, rel=1e-6)


@pytest.mark.parametrize(("hosts", "size"), [("aabb", 2), ("aaaa", 4), ("abab", None), ("aaab", None), ("abcd", 1)])
def test_only_hosts_with_as_many_ranks_one_after_the_other_are_shared_in(hosts: str, size: int | None) -> None:
    assert {Topology(rank, tuple(hosts), tuple(hosts), (1, 2, 3, 4)).ranks_per_host() for rank in range(4)} == {size}


def test_what_crosses_is_as_the_page_on_hosts_says() -> None:
    """Of Qwen2.5-7B, as the rank of 16 has it, on 2 hosts."""
    shard = TransformerShape.from_config("qwen2.5-7b").num_parameters // 16
    unit = UnitSpec("all", shard, torch.bfloat16, (ParamSlice("all", shard),))
    groups: Any = [SimpleNamespace(size=lambda size=size: size) for size in (8, 2)]
    page = Path(__file__).parents[2] / "docs" / "hosts.md"
    assert f"over 16 ranks, {Sharing(*groups).describe([unit])}, transport" in page.read_text()
