"""``odc run --dry-run`` takes one optimizer step under plain FSDP, and shows what ODC would patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from odc.errors import UnsupportedError
from odc.fsdp_patch.automatic import FsdpRoots, Say, model_name
from odc.fsdp_patch.gradient_events import Listener
from odc.fsdp_patch.interception import listen
from odc.fsdp_patch.patching import by_mesh, supported_units
from odc.fsdp_patch.session import find_session
from odc.fsdp_patch.unit import Unit, describe_meshes


class DryRun(Listener):
    """Looks at each FSDP root at its first forward, changes nothing, and ends the script after its first step."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.refused: UnsupportedError | None = None
        """The first refusal."""

        self.is_complete = False
        """Whether it has ended the script."""
        self._trainable: set[int] = set()
        self._ended_by: str | None = None
        self._others = ""
        self._roots = FsdpRoots(self._on_root)
        self._undo = listen(self)

    def _on_root(self, module: nn.Module, computes: bool) -> None:
        name = model_name(module)
        self._trainable |= {id(p) for p in module.parameters() if p.requires_grad}
        session = find_session(module)
        if session is not None:
            self._others = " else"
            self._say(f"odc: {name} was patched by the script, with the script's options: {session.describe()}")
            return
        try:
            units = supported_units(module)
        except UnsupportedError as error:
            self.refused = self.refused or UnsupportedError(f"{name}: {error}")
            self._say(f"odc: would refuse {name}: {error}")
            return
        self._say(f"odc: would patch {name}: {describe_units(units)}")

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if any(find_session(root) is None for root in self._roots.pending(tensors)):
            self.is_complete = True
            raise SystemExit(
                f"odc: dry run: stopped at {what}: this rank has computed nothing, which plain FSDP cannot run. Give "
                "each rank a microbatch in the first optimizer step of a dry run"
            )
        self._roots.gradients_read(tensors)
        if self._ended_by is None and any(id(t) in self._trainable for t in tensors):
            self._ended_by = what
            self._say(f"odc: a minibatch would end at {what}")

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        if any(id(t) in self._trainable for t in tensors):
            self._say(f"odc: dry run: stopped after the first optimizer step; nothing{self._others} was patched")
            self.is_complete = True
            raise SystemExit(0 if self.refused is None else 1)

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._roots.pending(tensors)) or any(id(t) in self._trainable for t in tensors)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._roots.close()
        self._undo()


def describe_units(units: Sequence[Unit]) -> str:
    """Number of units, and the memory that ODC would add per rank."""
    specs = [unit.spec() for unit in units]
    published = sum(spec.shard_bytes for spec in specs)
    accumulators = 4 * sum(spec.grad_numel for spec in specs)
    return (
        f"{describe_meshes(by_mesh(units))}; per rank {_mib(published)} of published shards, {_mib(accumulators)} of "
        "gradient sums"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
