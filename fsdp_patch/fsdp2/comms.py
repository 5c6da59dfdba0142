"""The two objects that stand behind FSDP2's doors, one pair per unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class _PlainMemory:
    """FSDP asks its communication for buffers; plain memory serves."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class GatherWork(dist.Work):
    """A gather under way, as FSDP2 waits for one."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait: Callable[[], None] | None = wait

    def wait(self, timeout: object = None) -> bool:
        """Return when the parameters are there. May be called again."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return True


class OdcAllGather(_PlainMemory, AllGather):
    """FSDP's all-gather of one unit, as a gather on demand."""

    def __init__(self, gather: Callable[[torch.Tensor, dist.ProcessGroup], Callable[[], None] | None]) -> None:
        self._gather = gather

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        # FSDP has put this rank's shard (input_tensor) into its place in output_tensor.
        wait = self._gather(output_tensor, group)
        return None if wait is None else GatherWork(wait)


class OdcReduceScatter(_PlainMemory, ReduceScatter):
    """FSDP's reduce-scatter of one unit, as a push to the owners."""

    def __init__(self, push: Callable[[torch.Tensor], None]) -> None:
        self._push = push

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._push(input_tensor)
        # [Note: Nothing until final] FSDP adds this output to .grad now, but the sum is known only at the end of the
        # minibatch. Zeros leave an existing .grad as it was, and Fsdp2Unit takes a .grad that FSDP makes of them away
        # again. Session.finish adds the sum, divided as FSDP would have divided it. (For a forced sum FSDP divides
        # this output afterwards: zeros again.)
        output_tensor.zero_()
        return None
