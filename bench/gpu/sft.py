"""Check ``sft``: fine-tuning under ODC has the losses of one process that trains alone.

A small language model, FSDP2 and FSDP1, fp32 and bf16 mixed precision. In every step the ranks have one to three
microbatches each, and one of them has none. The reference trains in float64, without FSDP and without ODC, on the same
microbatches.
"""

from __future__ import annotations

from odc.bench.gpu.models import FSDPS, PRECISIONS, language_model, shard
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.training import microbatches_of_all, train, train_alone
from odc.bench.harness.ranks import Rank

STEPS, QUICK_STEPS = 8, 3
TOLERANCES = {"fp32": 1e-5, "bf16": 1e-2}


def check(setting: Setting) -> Report:
    steps = QUICK_STEPS if setting.quick else STEPS
    errors: dict[str, float] = {}
    for world_size in setting.worlds:
        wanted, cells = run_ranks(setting, world_size, train_all, steps)[0]
        for name, losses in cells.items():
            key = f"{name}, {world_size} ranks"
            errors[key] = max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True))
            limit = TOLERANCES[name.split()[1]]
            require(errors[key] <= limit, f"{key}: losses {losses}, reference {wanted}: off by {errors[key]:.1e}")
    worst = {p: max(error for key, error in errors.items() if f" {p}," in key) for p in PRECISIONS}
    text = f"largest relative error of a loss {worst['fp32']:.0e} in fp32, {worst['bf16']:.0e} in bf16"
    return Report(text, {"steps": steps, "errors": errors})


def train_all(rank: Rank, steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """Losses of the reference (rank 0 only), and of each way to shard."""
    wanted = (
        train_alone(language_model().to(rank.device), microbatches_of_all(rank.world_size, steps))
        if rank.rank == 0
        else []
    )
    rank.meet()
    cells = {}
    for fsdp in FSDPS:
        for precision in PRECISIONS:
            model = shard(language_model(), fsdp, precision, rank.device, rank.world_size)
            cells[f"{fsdp} {precision}"] = train(rank, model, steps)
            rank.meet()
    return wanted, cells
