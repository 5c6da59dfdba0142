"""A user's training script with everything that comes between steps: epochs with a rest, evaluation, a resume.

torchrun --nproc-per-node 2 tests/rigs/lifecycle_script.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from tiny_trainers import hf_trainer, losses
from transformers import Trainer


def main(folder: Path) -> None:
    state = PartialState(cpu=True)
    state.device = torch.device("cpu")
    state.distributed_type = DistributedType.MULTI_GPU  # or accelerate would not use FSDP on CPU ranks
    first = trainer(folder, save_strategy="steps", save_steps=3)
    first.train()
    first.accelerator.wait_for_everyone()
    resumed = trainer(folder)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    if state.is_main_process:
        evaluations = [entry["eval_loss"] for entry in first.state.log_history if "eval_loss" in entry]
        document = {"losses": losses(first), "resumed": losses(resumed), "evaluations": evaluations}
        (folder / "result.json").write_text(json.dumps(document))
    first.accelerator.wait_for_everyone()
    first.accelerator.end_training()


def trainer(folder: Path, **changed: object) -> Trainer:
    return hf_trainer(
        folder,
        count=41,  # 11 batches per rank and epoch with the repeated ones: three steps of three and one of two
        eval_strategy="epoch",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
        fsdp=True,
        fsdp_config={"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        accelerator_config={"use_configured_state": True},
        **changed,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
