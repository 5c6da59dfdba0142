"""Check ``protocol``: random minibatches on real streams, and that they would show a missing order.

The host logic of the protocol is proven without a GPU, on streams that are threads. Here the streams are the device's:
gathers, pushes and steps on three streams of each of 2 and 4 ranks, random microbatch counts (0 included), pushes by
daemon, by atomics, and one sum per client.
"""

from __future__ import annotations

import random
from typing import Any

from odc.bench.gpu.minibatches import MODES, Case, RandomRun
from odc.bench.gpu.setting import CheckFailedError, Report, Setting, run_ranks
from odc.bench.harness.ranks import Rank

CASES, QUICK_CASES = 20, 2
NUMELS = (40, 4099, 1_000_003)
_CONTROL_TRIES = 5


def check(setting: Setting) -> Report:
    data: dict[str, Any] = {}
    for world_size in setting.worlds:
        data[f"{world_size} ranks"] = run_ranks(setting, world_size, run_cases)[0]
    data["violations seen without order"] = sum(run_ranks(setting, min(setting.worlds), run_without_order))
    if not data["violations seen without order"]:
        raise CheckFailedError("with the order of streams taken away nothing was seen: these streams hide mistakes")
    comparisons = sum(data[f"{world_size} ranks"]["comparisons"] for world_size in setting.worlds)
    cases = sum(data[f"{world_size} ranks"]["cases"] for world_size in setting.worlds)
    return Report(f"{cases} cases, {comparisons} comparisons per rank; a control without order is seen", data)


def run_cases(rank: Rank) -> dict[str, int]:
    """All random cases; the same ones on every rank."""
    numels = NUMELS if rank.device.type == "cuda" else NUMELS[:2]
    done = {"cases": 0, "comparisons": 0}
    for mode in MODES:
        generator = random.Random(f"{mode} {rank.world_size}")
        for _ in range(QUICK_CASES if rank.place.quick else CASES):
            case = Case.draw(generator, rank.world_size, mode, numels)
            run = RandomRun(case, rank)
            failures = run.run()
            if failures:
                raise CheckFailedError(f"{case}: {failures[0]} (and {len(failures) - 1} more)")
            done["cases"] += 1
            done["comparisons"] += run.verdicts.count
            rank.meet()
    return done


def run_without_order(rank: Rank) -> int:
    """How many wrong values this rank sees when its streams ignore what other ranks' streams have not done yet.

    Nobody waits for a device then, only for signals of hosts, so this ends whatever is read.
    """
    seen = 0
    for seed in range(_CONTROL_TRIES):
        counts = ((1,) * rank.world_size,) * 3
        case = Case(counts=counts, numel=4099, seed=seed, slow_rank=rank.world_size - 1, longest_delay_s=0.02)
        run = RandomRun(case, rank)
        transport: Any = run.runtime._transport
        transport.order_after = lambda ranks, index, count: None
        seen += len(run.run())
        rank.meet()
    return seen
