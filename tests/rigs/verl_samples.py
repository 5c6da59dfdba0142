"""What verl's trainer for supervised fine-tuning reads in place of its dataset of chats: ``data.custom_cls``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

VOCAB_SIZE = 64
LENGTHS = [24, 10, 10, 10, 11, 10, 9, 10, 22, 9, 10, 11, 10, 10, 9, 12]
"""Of an epoch: two minibatches of 8 samples."""


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The first third of each has no loss."""

    def __init__(self, **_: Any) -> None:
        rng = np.random.default_rng(0)
        self._ids = [torch.from_numpy(rng.integers(2, VOCAB_SIZE, length)) for length in LENGTHS]

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._ids[index]
        mask = torch.ones_like(ids)
        mask[: len(ids) // 3] = 0
        return {"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask}
