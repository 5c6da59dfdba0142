"""What a training leaves on the disk: checkpoints to resume from, a line per step, a summary."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)


class Checkpoints:
    """``folder/step-000100`` and so on: DCP's shards of model and optimizer, and what each rank has for itself.

    A folder of that name is complete: it has another name until all ranks have written. All hosts must see it.
    """

    def __init__(self, folder: Path, num_kept: int) -> None:
        self._folder = folder
        self._num_kept = num_kept

    def complete(self) -> list[Path]:
        """Those that are there, the newest last."""
        return sorted(path for path in self._folder.glob("step-*") if not path.name.endswith(".partial"))

    def path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def newest(self) -> Path | None:
        """As rank 0 sees it: on a shared file system others may not see yet what it sees. Collective."""
        found = self.complete() if dist.get_rank() == 0 else []
        step = torch.tensor(int(found[-1].name.removeprefix("step-")) if found else -1)
        dist.broadcast(step, src=0)
        return self.path(int(step)) if step >= 0 else None

    def save(self, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, own: Mapping[str, Any]) -> None:
        """Collective. ``own``: what this rank wants back besides; its random state is kept anyway."""
        path = self.path(step)
        partial = path.with_suffix(".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier()
        dcp.save(_tensors(model, optimizer), checkpoint_id=partial / "sharded")
        random = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            random["cuda"] = torch.cuda.get_rng_state()
        mine = {"world_size": dist.get_world_size(), "step": step, "random": random, **own}
        torch.save(mine, partial / f"rank{dist.get_rank()}.pt")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)  # of a run that went on from further back
            os.replace(partial, path)
            for old in self.complete()[: -self._num_kept]:
                shutil.rmtree(old)

    @staticmethod
    def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Put everything back; returns ``own`` and the step. Collective.

        Raises:
            ValueError: the checkpoint is of another number of ranks.
        """
        mine = path / f"rank{dist.get_rank()}.pt"
        saved = torch.load(mine if mine.exists() else path / "rank0.pt", weights_only=True)
        if saved["world_size"] != dist.get_world_size():
            raise ValueError(
                f"{path} is of {saved['world_size']} ranks, and these are {dist.get_world_size()}: who has seen which "
                "samples is known for that number only. Start on as many, or give the weights as --weights"
            )
        tensors = _tensors(model, optimizer)
        dcp.load(tensors, checkpoint_id=path / "sharded")
        set_model_state_dict(model, tensors["model"])
        set_optimizer_state_dict(model, optimizer, tensors["optimizer"])
        torch.set_rng_state(saved["random"]["cpu"])
        if torch.cuda.is_available() and "cuda" in saved["random"]:
            torch.cuda.set_rng_state(saved["random"]["cuda"])
        return dict(saved)


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


class RunLog:
    """On rank 0: ``steps.jsonl``, which grows line by line, and ``result.json`` in the end; elsewhere nothing."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], first_step: int) -> None:
        self._folder = folder
        self._settings = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
        self._writes = dist.get_rank() == 0
        self._steps: list[dict[str, Any]] = []
        if not self._writes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "steps.jsonl"
        if first_step and path.exists():  # of the run that goes on; steps after the checkpoint are done again
            self._steps = [row for row in map(json.loads, path.read_text().splitlines()) if row["step"] <= first_step]
        path.write_text("".join(json.dumps(row) + "\n" for row in self._steps))

    def step(self, row: Mapping[str, Any], num_steps: int) -> None:
        """Keep and show what a step has shown."""
        if not self._writes:
            return
        self._steps.append(dict(row))
        with (self._folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        words = [f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "loss", "eval_loss")]
        evaluated = f" eval_loss {row['eval_loss']:.4f}" if "eval_loss" in row else ""
        print(f"step {row['step']}/{num_steps} loss {row['loss']:.4f}{evaluated}", *words, flush=True)

    def say(self, text: str) -> None:
        """A line of rank 0."""
        if self._writes:
            print(text, flush=True)

    def finish(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Write ``result.json``; returns what is in it."""
        result = {
            "settings": self._settings,
            "ranks": dist.get_world_size(),
            "torch": torch.__version__,
            **more,
            "losses": [row["loss"] for row in self._steps],
            "eval_losses": {row["step"]: row["eval_loss"] for row in self._steps if "eval_loss" in row},
        }
        if self._writes:
            (self._folder / "result.json").write_text(json.dumps(result, indent=1))
        return result
