"""A user's script whose samples' lengths are known only once they are read: a resume, evaluations, any kind of dataset.

torchrun --nproc-per-node 2 tests/rigs/online_script.py FOLDER KIND

Writes what each rank has trained on in each step to FOLDER/KIND-RANK.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from tiny_trainers import Recorder, hf_trainer, losses, model, samples
from torch.utils.data import IterableDataset
from transformers import Trainer

NUM_SAMPLES = 41
STEPS = 8


class Stream(IterableDataset[Any]):
    """Samples as they come."""

    def __iter__(self) -> Iterator[Any]:
        return iter(samples(NUM_SAMPLES))


def dataset_of(kind: str) -> Any:
    if kind == "indexed":
        return samples(NUM_SAMPLES)
    if kind == "iterable":
        return Stream()
    return datasets.Dataset.from_list(samples(NUM_SAMPLES)).to_iterable_dataset(num_shards=int(kind))


def main(folder: Path, kind: str) -> None:
    state = PartialState(cpu=True)
    state.device = torch.device("cpu")
    state.distributed_type = DistributedType.MULTI_GPU  # or accelerate would not use FSDP on CPU ranks
    document: dict[str, Any] = {}
    for name, resumed in (("whole", None), ("rest", str(folder / kind / "checkpoint-3"))):
        made = model()
        recorder = Recorder(made)
        trained = trainer(folder / kind, kind, built=made, extra={"callbacks": [recorder]})
        trained.train(resume_from_checkpoint=resumed)
        trained.accelerator.wait_for_everyone()
        evaluations = [entry["eval_loss"] for entry in trained.state.log_history if "eval_loss" in entry]
        document[name] = {"steps": recorder.steps, "losses": losses(trained), "evaluations": evaluations}
    (folder / f"{kind}-{state.process_index}.json").write_text(json.dumps(document))
    trained.accelerator.wait_for_everyone()
    trained.accelerator.end_training()


def trainer(folder: Path, kind: str, **changed: Any) -> Trainer:
    steps = {"num_train_epochs": 2} if kind == "indexed" else {"max_steps": STEPS}
    return hf_trainer(
        folder,
        dataset=dataset_of(kind),
        eval_strategy="steps",
        eval_steps=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        dataloader_num_workers=2 if kind == "4" else 0,
        dataloader_persistent_workers=kind == "4",
        save_strategy="steps",
        save_steps=3,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        accelerator_config={"use_configured_state": True},
        **steps,
        **changed,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
