"""Where a stream is, in the checkpoints of a trainer: a file of each rank, beside its random state."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from odc.trainers.bundles import StepEnd
from odc.trainers.streamed import StreamedBatches

logger = logging.getLogger("odc")


class ResumableStream:
    """The stream that a trainer takes its bundles from.

    Args:
        trainer: a transformers ``Trainer``.
        batches: of its loader.
    """

    def __init__(self, trainer: Any, batches: StreamedBatches) -> None:
        self.end: StepEnd | None = None
        """Of the step that the trainer is in. (What the loader has handed out may be of the next one.)"""

        self._accelerator = trainer.accelerator
        self._batches = batches

    def save(self, folder: Path) -> None:
        """Into a checkpoint, which holds what the trainer is in as done."""
        if self.end is None:
            return
        path = self._path(folder)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self._batches.state_of(self.end)))
        os.replace(unfinished, path)

    def load(self, folder: Path) -> None:
        """From a checkpoint. Collective.

        Where a rank finds nothing in it, the stream is gone through again from the beginning of the epoch: it is the
        same one, but every sample until then is read.

        Raises:
            ValueError: the checkpoint is of another stream; names what differs.
        """
        path = self._path(folder)
        here = torch.tensor([int(path.is_file())], device=self._accelerator.device)
        num_here = int(self._accelerator.reduce(here, "sum").item())
        if num_here < self._accelerator.num_processes:
            logger.warning(
                "odc: %d of %d ranks find no %s: samples are read again from the beginning of the epoch",
                self._accelerator.num_processes - num_here,
                self._accelerator.num_processes,
                path if not path.is_file() else "odc_stream_*.json in the checkpoint",
            )
            return
        self._batches.load_state_dict(json.loads(path.read_text()))

    def close(self) -> None:
        """End workers and connections. Idempotent."""
        self._batches.stream.close()

    def _path(self, folder: Path) -> Path:
        return folder / f"odc_stream_{self._accelerator.process_index}.json"
