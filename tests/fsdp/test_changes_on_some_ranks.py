"""Layer 3: ranks as processes. Parameters that some ranks change and others do not: all fail, and name both."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import start_ranks
from training import build, loss_of, optimizer_of, shard, tokens, use_up

import odc

USES = ("step", "idle step", "evaluation", "collective")


def schedule_of(seed: int) -> tuple[list[str], int, str]:
    """What all ranks do, which of the changes one of two ranks leaves out, and which model is changed: the one that is
    trained, or a frozen one beside it. Behind each change something uses it, and there are steps in the end."""
    draw = random.Random(seed)
    pairs = [(draw.choice(("change", "swap", "step")), draw.choice(USES)) for _ in range(4)]
    operations = ["step", *(one for pair in pairs for one in pair), "change", draw.choice(USES), "step", "step"]
    changes = [index for index, operation in enumerate(operations) if operation in ("change", "swap")]
    return operations, draw.choice(changes), draw.choice(["trained", "frozen"])


def follow(rank: int, world_size: int, seed: int, differs: bool) -> float:
    """Returns after how many seconds behind what the ranks do differently this one has failed; 0.0: it has not."""
    operations, left_out, kind = schedule_of(seed)
    model, teacher = shard(build(num_blocks=1), world_size), shard(build(num_blocks=1), world_size)
    teacher.requires_grad_(False)
    changed: Any = model if kind == "trained" else teacher
    odc.patch_fsdp(model, timeout_s=60)
    odc.patch_fsdp(teacher, timeout_s=60)
    optimizer, since = optimizer_of(model), 0.0
    idle = random.Random(seed).randrange(2)
    quiet = random.Random(seed + 1).randrange(2)  # who leaves it out
    try:
        for index, operation in enumerate(operations):
            data = tokens(index, rank, 0)
            if operation == "step" or (operation == "idle step" and rank != idle):
                with torch.no_grad():
                    expected = teacher(data)
                teacher.reshard()  # type: ignore[operator]
                (torch.nn.functional.mse_loss(model(data), expected)).backward()
            if operation in ("step", "idle step"):
                use_up(optimizer)
            elif operation == "evaluation":
                with torch.no_grad():
                    loss_of(changed, data)
                changed.reshard()
            elif operation == "collective":
                dist.all_reduce(torch.ones(()))
            elif differs and index == left_out and rank == quiet:
                since = time.monotonic()
            else:
                with torch.no_grad():
                    for parameter in changed.parameters():
                        parameter.mul_(0.9)
                        if operation == "swap":
                            parameter.data.div_(0.7)
                since = time.monotonic() if index == left_out else since
    except odc.OdcError as error:
        error.add_note(f"{time.monotonic() - since:.1f} s")
        raise
    return 0.0


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.extended) if n > 1 else n for n in range(20)])
def test_a_change_that_one_rank_leaves_out_is_an_error_on_all(seed: int) -> None:
    results = start_ranks(2, follow, seed, True).join(60)
    assert all(result.error_type in ("ProtocolError", "AbortedError") for result in results), results
    assert any(result.error_type == "ProtocolError" for result in results), results
    for result in results:
        assert "rank 0" in (result.error or ""), result
        assert "rank 1" in (result.error or ""), result


@pytest.mark.parametrize("seed", [pytest.param(n, marks=pytest.mark.extended) if n > 1 else n for n in range(20)])
def test_the_same_change_on_all_ranks_is_none(seed: int) -> None:
    assert [result.value for result in start_ranks(2, follow, seed, False).join(60)] == [0.0, 0.0]
