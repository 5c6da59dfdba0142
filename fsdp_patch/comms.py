"""The two objects that stand behind FSDP2's doors, one pair per unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

if TYPE_CHECKING:
    from odc.fsdp_patch.session import Session


class _UnitComm:
    """What both directions of one unit share. FSDP asks them for their buffers; plain memory serves."""

    def __init__(self, session: Session, unit: int) -> None:
        self._session = session
        self._unit = unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OdcAllGather(_UnitComm, AllGather):
    """FSDP's all-gather of one unit, as a gather on demand."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # FSDP has put this rank's shard (input_tensor) into its place in output_tensor.
        self._session.gather(self._unit, output_tensor)
        return None


class OdcReduceScatter(_UnitComm, ReduceScatter):
    """FSDP's reduce-scatter of one unit, as a push to the owners."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._session.scatter_accumulate(self._unit, input_tensor)
        # [Note: Nothing until final] FSDP adds this output to .grad now, but the sum is known only at the end of the
        # minibatch. Zeros leave an existing .grad as it was, and FsdpUnit.watch_post_backward takes a .grad that FSDP
        # makes of them away again. Session.finish adds the sum, divided as FSDP would have divided it. (For a forced
        # sum FSDP divides this output afterwards: zeros again.)
        output_tensor.zero_()
        return None
