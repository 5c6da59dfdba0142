"""Where this rank's bytes are: parameters, gradients, and what ODC adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from odc.fsdp_patch.unit import Unit, lies_in


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank. Print it."""

    parameters: int
    """Shards as the optimizer holds them."""
    gradients: int
    """``.grad`` outside of ODC's memory. (Between the end of a minibatch and ``zero_grad``, ``.grad`` is the sum.)"""
    published_shards: int
    """Shards in the compute dtype, for the other ranks to read."""
    sums: int
    """One gradient shard per unit, in the accumulators' dtype; takes the place of ``.grad``."""
    spare_sums: int
    """What makes a push all or nothing."""
    slots: int
    """Where clients leave pushes for a daemon."""
    transport: int
    """What the transport rounds up to, and its staging memory."""
    plain_gradients: int
    """``.grad`` of plain FSDP, when all gradients are there."""

    @property
    def odc(self) -> int:
        """All of ODC's buffers."""
        return self.published_shards + self.sums + self.spare_sums + self.slots + self.transport

    @property
    def overhead(self) -> int:
        """How much more than plain FSDP, when all gradients are there: private copies of gradients included."""
        return self.odc + self.gradients - self.plain_gradients

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "overhead": self.overhead}

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters),
            ("gradients, private", self.gradients),
            ("gradients, as sums", self.sums),
            ("published shards", self.published_shards),
            ("spare sums", self.spare_sums),
            ("slots", self.slots),
            ("transport", self.transport),
            ("more than plain FSDP", self.overhead),
        ]
        return "\n".join(f"{name:<22}{num_bytes / 2**20:>12.1f} MiB" for name, num_bytes in rows)


def report(units: Sequence[Unit], buffers: Mapping[str, int], lent: Sequence[torch.Tensor]) -> MemoryReport:
    """The report of the units of one session.

    Args:
        buffers: of the runtime, by purpose.
        lent: sums that serve as ``.grad``.
    """
    parameters = gradients = plain = 0
    for unit in units:
        for shard, grad, trainable in unit.resident():
            parameters += shard.nbytes
            plain += shard.nbytes if trainable else 0
            if grad is not None and not any(lies_in(grad, sums) for sums in lent):
                gradients += grad.nbytes
    return MemoryReport(
        parameters=parameters,
        gradients=gradients,
        published_shards=buffers["published_shards"],
        sums=buffers["sums"],
        spare_sums=buffers["spare_sums"],
        slots=buffers["slots"],
        transport=buffers["transport"],
        plain_gradients=plain,
    )
