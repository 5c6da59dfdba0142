"""Layer 3: ranks as processes. What ODC adds to a rank's memory, for three model sizes and both FSDPs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from training import Net, build, gradient_now, loss_of, optimizer_of, shard, tokens

import odc
from odc.bench.communication.memory import shared_bytes

SIZES = [(2, 64), (4, 128), (6, 256)]  # blocks, width


def wrap(model: Net, kind: str, world_size: int) -> nn.Module:
    if kind.startswith("fsdp2"):
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind.endswith("bf16") else None
        return shard(model, world_size, **({"mp_policy": policy} if policy else {}))
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": kind == "fsdp1"}
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def live_bytes(model: nn.Module) -> int:
    """Parameters and gradients as this process holds them: storages of this rank's shards, each counted once."""
    storages = {}
    for parameter in model.parameters():
        for tensor in (parameter, gradient_now(parameter)):
            if tensor is not None:
                local = getattr(tensor, "_local_tensor", tensor)
                storages[local.untyped_storage().data_ptr()] = local.untyped_storage().nbytes()
    return sum(storages.values())


def peak(rank: int, world_size: int, kind: str, size: tuple[int, int], use_odc: bool) -> tuple[int, dict[str, int]]:
    """Largest sum of parameters, gradients and ODC's buffers over three steps, and the session's own report."""
    model = wrap(build(num_blocks=size[0], width=size[1]), kind, world_size)
    session = odc.patch_fsdp(model) if use_odc else None
    optimizer = optimizer_of(model)
    seen, reported = [], {}

    def look() -> None:
        seen.append(live_bytes(model) + shared_bytes(world_size))

    for step in range(3):
        for m in range(2):
            (loss_of(model, tokens(step, rank, m)) / 40).backward()
            look()
        if session:
            session.finish()
        look()
        if session and step == 1:
            reported = session.memory().as_dict()
        optimizer.step()
        look()
        optimizer.zero_grad()
        look()
    if session:
        session.close()
    return max(seen), reported


def peaks(rank: int, world_size: int, kind: str, use_odc: bool) -> list[tuple[int, dict[str, int]]]:
    return [peak(rank, world_size, kind, size, use_odc) for size in SIZES]


def largest_unit(size: tuple[int, int]) -> int:
    """Bytes of the largest unit's gradient in float32: what "one slot per client" of it takes on a rank."""
    model = build(num_blocks=size[0], width=size[1])
    block = sum(p.numel() for p in model.blocks[0].parameters())
    root = sum(p.numel() for p in model.parameters()) - size[0] * block
    return 4 * max(block, root)


@pytest.mark.parametrize(
    "kind",
    ["fsdp2", *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("fsdp1", "fsdp2-bf16", "fsdp1-flat"))],
)
@pytest.mark.on_host
def test_overhead_is_published_shards_sums_and_one_units_slots(kind: str) -> None:
    with_odc, without = run_ranks(2, peaks, kind, True)[0], run_ranks(2, peaks, kind, False)[0]
    for size, (ours, report), (plain, _) in zip(SIZES, with_odc, without, strict=True):
        pages = 6 * 4096  # signals, locks and rounding to pages are not in the report
        allowed = report["published_shards"] + report["sums"] + largest_unit(size) + pages
        assert 0 < ours - plain <= allowed, (size, ours, plain, report)
        assert 0 < report["gradients"] <= report["parameters"]  # the script's own, as under plain FSDP
        assert abs(ours - plain - report["overhead"]) <= 0.02 * plain + pages, (size, ours, plain, report)
