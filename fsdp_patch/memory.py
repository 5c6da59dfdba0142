"""Where this rank's bytes are: parameters, gradients, and what ODC adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from odc.fsdp_patch.unit import Unit


@dataclass(frozen=True)
class MemoryReport:
    """Bytes on this rank. Print it."""

    parameters: int
    """Shards as the optimizer holds them."""
    gradients: int
    """``.grad``, where there is one now: from the end of a minibatch until the script clears it."""
    published_shards: int
    """Shards in the compute dtype, for the other ranks to read."""
    sums: int
    """One gradient shard per unit, in the accumulators' dtype: where the ranks' gradients are added up."""
    spare_sums: int
    """What makes a push all or nothing."""
    slots: int
    """Where clients leave pushes for a daemon."""
    transport: int
    """What the transport rounds up to, and its staging memory."""

    @property
    def overhead(self) -> int:
        """How much more than plain FSDP: all of ODC's buffers."""
        return self.published_shards + self.sums + self.spare_sums + self.slots + self.transport

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "overhead": self.overhead}

    def __str__(self) -> str:
        rows = [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("published shards", self.published_shards),
            ("sums", self.sums),
            ("spare sums", self.spare_sums),
            ("slots", self.slots),
            ("transport", self.transport),
            ("more than plain FSDP", self.overhead),
        ]
        return "\n".join(f"{name:<22}{num_bytes / 2**20:>12.1f} MiB" for name, num_bytes in rows)


def report(units: Sequence[Unit], buffers: Mapping[str, int]) -> MemoryReport:
    """The report of the units of one session; ``buffers``: of the runtime, by purpose."""
    resident = [pair for unit in units for pair in unit.resident()]
    parameters = sum(shard.nbytes for shard, _ in resident)
    gradients = sum(grad.nbytes for _, grad in resident if grad is not None)
    return MemoryReport(
        parameters=parameters,
        gradients=gradients,
        published_shards=buffers["published_shards"],
        sums=buffers["sums"],
        spare_sums=buffers["spare_sums"],
        slots=buffers["slots"],
        transport=buffers["transport"],
    )
