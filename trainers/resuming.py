"""Where a stream is, in the checkpoints of a trainer: a file of each rank, beside its random state."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import torch

from odc.errors import ConfigError
from odc.trainers.bundles import StepEnd
from odc.trainers.streamed import StreamedBatches, state_of

logger = logging.getLogger("odc")

_AGAIN = (
    "samples are read again from the beginning of the epoch, and those of the steps that are done are skipped. To "
    "begin the data anew instead: ignore_data_skip=True"
)


def save_stream(trainer: Any, folder: Path, end: StepEnd) -> None:
    """Into a checkpoint, which holds the step that the trainer is in as done."""
    path = _path(folder, trainer.accelerator.process_index)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(state_of(end)))
    os.replace(unfinished, path)


def load_stream(trainer: Any, folder: Path, batches: StreamedBatches) -> None:
    """From a checkpoint that the trainer goes on from. Collective.

    Where a rank finds nothing in it, or the trainer counts its steps in another way than they came (an epoch was
    stopped early), the stream is gone through again from the beginning of the epoch, and a warning says so.

    Raises:
        ConfigError: the checkpoint is of another number of ranks, or a file of it cannot be read.
        ValueError: it is of another stream; names what differs.
    """
    accelerator = trainer.accelerator
    state = _read(_path(folder, accelerator.process_index))
    counted = state is not None and _place(state) == _counted_by(trainer, batches)
    mine = [-1 if state is None else int(state["stream"]["world_size"]), int(counted)]
    ranks = accelerator.gather(torch.tensor([mine], device=accelerator.device)).tolist()
    others = {size for size, _ in ranks if size not in (-1, accelerator.num_processes)}
    if others:
        raise ConfigError(
            f"{folder} is of {others.pop()} ranks, this job has {accelerator.num_processes}: their streams are not the "
            "same, so neither are the steps that are done. Resume with as many ranks, or set ignore_data_skip=True, "
            "which begins the data anew"
        )
    missing = [rank for rank, (size, _) in enumerate(ranks) if size == -1]
    if missing:
        logger.warning("odc: %s has no odc_stream_*.json of ranks %s: %s", folder, missing, _AGAIN)
    elif not all(counted for _, counted in ranks):
        logger.warning("odc: %s was left in another epoch than its number of steps tells: %s", folder, _AGAIN)
    else:
        assert state is not None
        batches.load_state_dict(state)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_text())
        numbers = (state["stream"]["world_size"], state["stream"]["epoch"], state["step"])
        if not all(isinstance(number, int) for number in numbers):
            raise TypeError(f"expected three integers, not {numbers}")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} does not say where a stream was ({type(error).__name__}: {error}): restore it, or remove the "
            "odc_stream_*.json of all ranks, so that samples are read again from the beginning of the epoch"
        ) from None
    return dict(state)


def _place(state: dict[str, Any]) -> tuple[int, int]:
    return int(state["stream"]["epoch"]), int(state["step"])


def _counted_by(trainer: Any, batches: StreamedBatches) -> tuple[int, int]:
    """The epoch and its steps that a trainer takes for done, as it was left at the end of a step."""
    in_epoch = batches.num_steps or trainer.args.max_steps
    epoch, step = divmod(int(trainer.state.global_step) - 1, in_epoch)
    return epoch, step + 1


def _path(folder: Path, rank: int) -> Path:
    return folder / f"odc_stream_{rank}.json"
