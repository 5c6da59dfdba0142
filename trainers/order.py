"""All ranks go by the same numbers, whatever their random states and datasets have come to."""

from __future__ import annotations

import numpy as np
import torch

from odc.balance.checks import IntArray


def same_on_all_ranks(values: IntArray) -> IntArray:
    """Rank 0's (any number of) integers, for all ranks. Collective.

    Samplers that are not seeded by the epoch draw from torch's global random state. Ranks that run different numbers of
    microbatches use it differently (dropout), and would plan different minibatches from the second epoch on. So would
    ranks that read different lengths of the same samples.
    """
    from accelerate import PartialState
    from accelerate.utils import broadcast

    state = PartialState()
    if state.num_processes == 1:
        return values
    size = int(broadcast(torch.tensor([values.size], device=state.device)).item())
    mine = np.resize(values, size)  # of the size that rank 0 sends
    agreed: IntArray = broadcast(torch.tensor(mine, dtype=torch.int64, device=state.device)).cpu().numpy()
    return agreed
