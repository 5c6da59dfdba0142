"""All ranks draw the same batches, whatever their random states have come to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def same_on_all_ranks(batches: Sequence[Sequence[int]]) -> list[list[int]]:
    """Rank 0's, for all ranks. Collective, once per epoch.

    Samplers that are not seeded by the epoch draw from torch's global random state. Ranks that run different numbers of
    microbatches use it differently (dropout), and would plan different minibatches from the second epoch on.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast

    state = PartialState()
    if state.num_processes == 1:
        return [list(batch) for batch in batches]

    def agreed(values: Any) -> list[int]:
        result: list[int] = broadcast(torch.tensor(values, dtype=torch.int64, device=state.device)).tolist()
        return result

    num_batches, num_samples = agreed([len(batches), sum(map(len, batches))])
    sizes = agreed(_fit([len(batch) for batch in batches], num_batches))
    samples = iter(agreed(_fit([sample for batch in batches for sample in batch], num_samples)))
    return [[next(samples) for _ in range(size)] for size in sizes]


def _fit(values: list[int], size: int) -> list[int]:
    """Of the size that rank 0 sends."""
    return (values + [0] * size)[:size]
