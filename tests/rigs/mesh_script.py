"""A user's script: a trainer whose model lies on a mesh of two dimensions. It knows nothing of ODC, but for "loop".

torchrun --nproc-per-node 4 tests/rigs/mesh_script.py FOLDER TRAINER MESH [CHECKPOINTS]

TRAINER: "hf"; "slow", the same with two slow ranks; "trl"; or "loop", on accelerate. MESH: "tp", tensor parallelism
beside FSDP2, both by transformers; "accelerate", the same by accelerate, of a model whose layers torch has
parallelized; "replicas", HSDP by accelerate.
With CHECKPOINTS, a folder, a trainer saves one there behind its second of four steps; or resumes from it, if it is
there. Writes what each rank has trained on, and what it has logged, to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import tiny_trainers
import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM, Trainer
from transformers.distributed import DistributedConfig
from transformers.integrations import tensor_parallel

from odc.balance import count_loss_tokens
from odc.trainers import minibatches

FSDP = {"fsdp": True, "fsdp_config": {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


class Recorder(tiny_trainers.Recorder):
    """The rows of tokens that this rank's model gets in each step, and the samples in each of them."""

    def _on_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if module.training:
            time.sleep(0.05 * (sys.argv[2] == "slow" and PartialState().process_index > 1))
            self._samples.append([kwargs["input_ids"].tolist(), tiny_trainers.samples_in(kwargs)])


class ReplicateParallel:
    """What accelerate imports from transformers, which has it no more (accelerate 1.15, transformers 5.23)."""

    def prepare_module_tp(self, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        def replicated(module: Any, inputs: Any, mesh: DeviceMesh) -> tuple[Any, ...]:
            first, *others = inputs
            is_local = not isinstance(first, DTensor)
            return DTensor.from_local(first, mesh, [Replicate()], run_check=False) if is_local else first, *others

        def local(module: Any, output: Any, mesh: DeviceMesh) -> Any:
            return output.to_local() if isinstance(output, DTensor) else output

        distribute_module(module, mesh, lambda *_: None, replicated, local)


def parallelized() -> tuple[Any, dict[str, Any]]:
    """As accelerate wants it: what is not replicated is divided already, and the model says so."""
    tensor_parallel.ReplicateParallel = ReplicateParallel
    config, model = ParallelismConfig(dp_shard_size=2, tp_size=2), tiny_trainers.model()
    plan: dict[str, Any] = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {"mlp.down_proj": RowwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, config.get_device_mesh("cpu")["tp"], plan)
    model._tp_size, model.config.distributed_config = 2, DistributedConfig(tp_size=2, fsdp_size=2)
    return model, {**FSDP, "parallelism_config": config}


def sharded(folder: Path, state: PartialState) -> tuple[Any, dict[str, Any]]:
    """Model and options of its trainer."""
    if sys.argv[3] == "replicas":
        return tiny_trainers.model(), {
            **FSDP,
            "parallelism_config": ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
        }
    if sys.argv[3] == "accelerate":
        return parallelized()
    if state.is_main_process:
        tiny_trainers.model().save_pretrained(folder / "model")
    state.wait_for_everyone()
    config = DistributedConfig(tp_size=2, fsdp_size=2)
    return LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=config), {}


def main(folder: Path) -> None:
    state = PartialState(cpu=True)
    state.device = torch.device("cpu")
    state.distributed_type = DistributedType.MULTI_GPU  # or accelerate would not use FSDP on CPU ranks
    model, options = sharded(folder, state)
    recorder = Recorder(model)
    log = loop(model, recorder) if sys.argv[2] == "loop" else trained(folder, model, recorder, options)
    (folder / f"{state.process_index}.json").write_text(json.dumps({"steps": recorder.steps, "log": log}))
    state.wait_for_everyone()
    state.destroy_process_group()


def trained(folder: Path, model: Any, recorder: Recorder, options: dict[str, Any]) -> Any:
    """By a trainer; what it has logged."""
    options |= {"num_train_epochs": 1, "accelerator_config": {"use_configured_state": True}}
    checkpoint = None
    if sys.argv[4:]:
        folder = Path(sys.argv[4])
        checkpoint = folder / "checkpoint-2"
        options |= {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        if "fsdp_config" in options:
            options["fsdp_config"] = {**options["fsdp_config"], "state_dict_type": "SHARDED_STATE_DICT"}
    make: Any = tiny_trainers.sft_trainer if sys.argv[2] == "trl" else tiny_trainers.hf_trainer
    trainer: Trainer = make(folder, built=model, **options)
    trainer.add_callback(recorder)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint and checkpoint.exists() else None)
    return trainer.state.log_history


def loop(model: Any, recorder: Recorder) -> Any:
    """The same without a trainer."""
    accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=2, tp_size=2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1.0, foreach=False)  # parameters lie on two meshes
    given: Any = DataLoader(tiny_trainers.samples(37), 2, collate_fn=tiny_trainers.pad)  # type: ignore[arg-type]
    optimizer, loader = accelerator.prepare(optimizer, given)
    log = []
    model.train()
    for batches in minibatches(accelerator, model, loader, 4):
        own = sum(count_loss_tokens(batch["labels"]) for batch in batches)
        num_items = accelerator.reduce(torch.tensor(own), "sum")
        total = torch.zeros(())
        for batch in batches:
            loss = model(**batch, num_items_in_batch=num_items).loss * accelerator.num_processes
            accelerator.backward(loss)
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        recorder.on_step_end()
        log.append({"loss": accelerator.reduce(total, "mean").item()})
    return log


if __name__ == "__main__":
    main(Path(sys.argv[1]))
