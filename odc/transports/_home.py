"""This rank, as its links to other hosts see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from odc.errors import AbortedError
from odc.threads import in_helper
from odc.topology import Topology
from odc.transports._control import ControlBlock


class Home:
    """Where links deliver; see :class:`odc.transports._link.LinkOwner`."""

    def __init__(self, topology: Topology, on_loss: Callable[[], None]) -> None:
        self._topology = topology
        self.shown: list[ControlBlock] = []
        """Where this rank shows its progress and its waits."""
        self.own_check: Callable[[], None] | None = None
        """Raises what else has failed at this rank."""
        self._on_loss = on_loss
        self._block: ControlBlock | None = None
        self._copies: Mapping[int, ControlBlock] = {}
        self._memory: list[memoryview | None] = []

    def open(self, block: ControlBlock, copies: Mapping[int, ControlBlock]) -> None:
        """From now on signals can be delivered; ``copies``: this rank's own of the blocks of other hosts' ranks."""
        self._block, self._copies = block, copies
        self.shown = [block]

    def add(self, memory: torch.Tensor | None) -> None:
        """The next buffer; None: not for links. All ranks allocate in the same order, so it has one number on all."""
        self._memory.append(None if memory is None else memory.numpy().data)

    @property
    def num_buffers(self) -> int:
        return len(self._memory)

    def deliver(self, rank: int, index: int, daemon: bool) -> None:
        assert self._block is not None
        self._copies[rank].post_to(index, self._block.calls if daemon else self._block.events)

    def memory(self, buffer: int) -> memoryview | None:
        return self._memory[buffer] if buffer < len(self._memory) else None

    def notice(self, text: str) -> None:
        if self._block is not None:
            self._block.leave_abort(text)

    def lost(self) -> None:
        if self._block is not None:
            self._block.wake()
        self._on_loss()

    def check(self) -> None:
        if self.own_check is not None:
            self.own_check()
        notice = self._block.abort_notice() if self._block is not None else None
        if notice is not None:
            raise AbortedError(f"rank {self._topology.me} aborted because {notice}")

    def waits_for(self, rank: int | None) -> None:
        if in_helper():
            return
        for block in self.shown:
            if rank is None:
                block.tick()  # before the next line: nobody may see "not waiting, long silent"
            block.waiting_on = None if rank is None else self._topology.global_rank(rank)

    def close(self) -> None:
        """Let go of the memory; links have ended."""
        self._block, self._copies, self._memory, self.shown = None, {}, [], []
