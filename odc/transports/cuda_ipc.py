"""The ``cuda_ipc`` transport: GPUs of one host, each rank reading and writing the others' memory by CUDA IPC.

Signals, locks and liveness are those of the host (:mod:`odc.transports.base`); no multiprocessor polls. For each signal
there is also a *word* in host memory, mapped by all ranks and registered with their devices, that shows the progress of
the stream. When a signal is posted, the poster's stream sets the word. :meth:`CudaIpcTransport.order_after` makes the
reader's stream wait for it, and :meth:`CudaIpcTransport.has_arrived` checks it. The reader's host sees the signal
before its stream waits, so a stream waits only for submitted work and never for a host.
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

from odc import limits
from odc.config import connections_problem
from odc.cuda.runtime import GRANULARITY, HANDLE_BYTES, CudaRuntime, unavailable
from odc.errors import OUR_FAULT, OdcError, SetupError
from odc.setup.agreement import Exchange, gather_together
from odc.setup.topology import Topology
from odc.transports._control import Closing, order_memory
from odc.transports._peers import Peer
from odc.transports.base import HOST, SymmetricBuffer, Transport, not_on_this_host

logger = logging.getLogger("odc")

_EXPORT = struct.Struct(f"={HANDLE_BYTES}sQQQQ")  # handle, offset, bytes, pid, address
_HALF = 1 << 31
_FAR = 1 << 30  # further than any wait that can be under way

# Of transports that could not let go of their device. Memory that is still registered must keep its address: what is
# mapped there next could not be registered. And what an engine has pinned may still be read.
_still_registered: list[object] = []


class CudaIpcTransport(Transport):
    """See :class:`~odc.transports.base.Transport`."""

    name: ClassVar[str] = "cuda_ipc"

    def __init__(self, exchange: Exchange, topology: Topology, timeout_s: float, device: torch.device = HOST) -> None:
        self._owned: list[int] = []
        self._mapped: list[int] = []
        self._registered: list[int] = []
        self._words: dict[int, npt.NDArray[np.uint32]] = {}  # of the ranks of this host
        self._seen: dict[int, memoryview] = {}  # the same, read one at a time
        self._word_addresses: dict[int, int] = {}
        self._posted: dict[int, int] = {}
        super().__init__(exchange, topology, timeout_s, device)
        try:
            self._together(self._start_device)
            self._require_reachable()
        except BaseException:
            self.close()
            raise

    @classmethod
    def unavailable(cls, topology: Topology, device: torch.device) -> str | None:
        return unavailable(device) or not_on_this_host(topology)

    def _start_device(self) -> None:
        if self.topology.me == 0 and (problem := connections_problem()) is not None:
            logger.warning("odc: %s", problem)
        self._cuda = self._make_runtime()
        self.engine = self._cuda.engine()
        self.device = self._cuda.device

    def _make_runtime(self) -> CudaRuntime:
        return CudaRuntime(self.device)

    def _require_reachable(self) -> None:
        """Every device must be able to share memory, and reach every other one, both ways. Collective."""
        identities = gather_together(self.exchange, self._shareable_identity)
        self._together(lambda: self._require_reach(identities))

    def no_atomics(self) -> str | None:
        identities = gather_together(self.exchange, self._cuda.identity)
        rows = gather_together(self.exchange, lambda: [self._cuda.no_atomics(identity) for identity in identities])
        found: list[str] = [reason for row in rows for reason in row if reason is not None]
        return found[0] if found else None

    def _shareable_identity(self) -> str:
        refusal = self._cuda.cannot_share()
        if refusal is not None:
            raise SetupError(refusal)
        return self._cuda.identity()

    def _require_reach(self, identities: Sequence[str]) -> None:
        for rank, identity in enumerate(identities):
            reason = self._cuda.cannot_reach(identity)
            if reason is not None:
                raise SetupError(
                    f"{reason} (rank {self.topology.me} to rank {self.topology.global_rank(rank)}). Choose devices "
                    "that reach each other (`nvidia-smi topo -p2p rw`, CUDA_VISIBLE_DEVICES); on bare metal IOMMU or "
                    "PCIe ACS may be in the way; or keep FSDP's own collectives."
                )

    # Memory

    def open(self, *, num_signals: int, num_locks: int, num_bytes: int = 0) -> None:
        self._probe = num_signals  # one more, for set-up
        super().open(num_signals=num_signals + 1, num_locks=num_locks, num_bytes=num_bytes)
        words = self.allocate_host(4 * (num_signals + 1), "stream words")
        self._words = {rank: words.peer(rank).view(torch.int32).numpy().view(np.uint32) for rank in self._here}
        self._seen = {rank: row.data for rank, row in self._words.items()}
        self._together(lambda: self._register(words))

    def _register(self, words: SymmetricBuffer) -> None:
        for rank in self._here:
            address = words.peer(rank).data_ptr()
            self._word_addresses[rank] = self._cuda.register(address, words.num_bytes)
            self._registered.append(address)

    def seal(self) -> None:
        super().seal()
        self._together(lambda: self.post(self._probe))
        self._together(self._prove_words)

    def _prove_words(self) -> None:
        """Streams can wait for words that others' streams have set, and hosts see them."""
        self._cuda.wait_values([(self._word_addresses[rank] + 4 * self._probe, 1) for rank in self._here])
        self.order_after(self._elsewhere, self._probe, 1)
        if not self.engine.synchronize(self._timeout_s):
            self.release_streams()
            raise SetupError(
                f"a stream of rank {self.topology.me} has waited {self._timeout_s:g} s for words that streams of the "
                "other ranks were to set: stream memory operations do not work between these devices. Keep FSDP's own "
                "collectives"
            )
        unseen = [self.topology.global_rank(rank) for rank in self._here if not self._has_reached(rank, self._probe, 1)]
        if unseen:
            raise SetupError(
                f"rank {self.topology.me} does not see in host memory what streams of ranks {unseen} have set there"
            )

    def allocate(self, num_bytes: int, label: str) -> SymmetricBuffer:
        num_bytes = max(num_bytes, 1)
        rows = gather_together(self.exchange, lambda: self._export(num_bytes).hex())
        views = self._together(
            lambda: [self._view(rank, bytes.fromhex(rows[rank]), num_bytes, label) for rank in self._world]
        )
        self.peers.memory.append(None)
        return self._keep(views, label)

    def _export(self, num_bytes: int) -> bytes:
        address = self._cuda.malloc(num_bytes)
        self._owned.append(address)
        self.extra_bytes += -num_bytes % GRANULARITY
        handle, offset = self._cuda.export(address)
        return _EXPORT.pack(handle, offset, num_bytes, os.getpid(), address)

    def _view(self, rank: int, row: bytes, num_bytes: int, label: str) -> torch.Tensor:
        if len(row) != _EXPORT.size:
            raise SetupError(
                f"{label!r}: {self.topology.describe(rank)} sent {len(row)} bytes, not a memory handle. {OUR_FAULT}"
            )
        handle, offset, size, pid, address = _EXPORT.unpack(row)
        if size != num_bytes:
            raise SetupError(
                f"{label!r}: {self.topology.describe(rank)} has {size} bytes, rank {self.topology.me} {num_bytes}. "
                f"{OUR_FAULT}"
            )
        if pid == os.getpid():  # a handle cannot be opened where it was made
            return self._cuda.tensor(address, num_bytes)
        base = self._cuda.open(handle)
        self._mapped.append(base)
        return self._cuda.tensor(base + offset, num_bytes)

    # Signals, and the order of streams

    # [Note: A signal has one poster] A word is set, not added to, so two posts of one signal must come from one stream,
    # or from streams that are ordered: else the second could be overtaken by the first. They are: a unit is published
    # and a push acknowledged by one stream, and each push is ordered after the one before it by who sends them.

    def post(self, index: int, *, to: int | None = None, daemon: bool = False) -> None:
        self._cuda.write_values([(self._word_addresses[self._rank] + 4 * index, self._next_value(index))])
        super().post(index, to=to, daemon=daemon)

    def _next_value(self, index: int) -> int:
        count = self._posted[index] = self._posted.get(index, 0) + 1
        return count % (2 * _HALF)

    def acknowledge(self, posts: Sequence[tuple[int, int]]) -> None:
        # The words alone: who waits for one looks at it, since a device wakes nobody.
        base = self._word_addresses[self._rank]
        self._cuda.write_values([(base + 4 * index, self._next_value(index)) for index, _ in posts])

    def order_after(self, ranks: Sequence[int], index: int, count: int) -> None:
        # Reached already? Then whatever this thread submits next comes later, without the device being asked.
        late = [rank for rank in ranks if not self._has_reached(rank, index, count)]
        if late:
            value = count % (2 * _HALF)
            self._cuda.wait_values([(self._word_addresses[rank] + 4 * index, value) for rank in late])

    def _has_reached(self, rank: int, index: int, count: int) -> bool:
        reached: bool = (self._seen[rank][index] - count) % (2 * _HALF) < _HALF
        return reached

    def has_arrived(self, rank: int, index: int, count: int) -> bool:
        if not self._has_reached(rank, index, count):
            return False
        order_memory()
        return True

    # [Note: Words of a job that has failed] The words that a stream waits for are those of the rank that posts, and all
    # ranks of the host wait for the same ones. So whoever lets its own streams go on lets those of the others go on: it
    # has told them before that the job has failed, and what they compute then is not used.

    def release_streams(self) -> None:
        self.peers.failing = True
        for rank, words in self._words.items():
            # From what hosts have counted, beyond which nobody waits: not from the words, which others set free, too.
            counts = [self._blocks[rank].count(index) for index in range(len(words))]
            words[:] = [(count + _FAR) % (2 * _HALF) for count in counts]

    # The end

    def _let_go(self) -> bool:
        """Wait for this rank's device, then give up the peers' memory.

        After an error nothing is waited for, unmapped or freed: a stream may be blocked, and the process is about to
        end, which does all of it.
        """
        self.peers.abort_notice()
        is_idle = not self.peers.failing and self._is_idle()
        if not is_idle:
            if not self.peers.failing:
                limit = f"{limits.CLOSE_DEVICE_S:g} s"
                self.peers.abort(f"{self.topology.whoami}: its device has not come to rest within {limit} of close()")
            self.release_streams()
            _still_registered.append((self._words, self.engine))
            return False
        for release, addresses in ((self._cuda.unmap, self._mapped), (self._cuda.unregister, self._registered)):
            self._for_each(release, addresses)
        try:
            self.engine.close()
        except OdcError as problem:
            logger.warning("odc: while closing: %s", problem)
        return True

    def _is_idle(self) -> bool:
        try:
            return self.engine.synchronize(limits.CLOSE_DEVICE_S)
        except RuntimeError as problem:  # an error of the device, which every call repeats from now on
            logger.warning("odc: while closing: %s", problem)
            return False

    def _readers(self) -> dict[int, Peer]:
        return dict(self.peers.others) if self._owned and not self.peers.failing else {}

    def _take_back(self) -> None:
        """Free this rank's memory if nobody reads it any more: importers close before the exporter frees."""
        if self.peers.failing or not self._owned:
            return
        users = [r for r, p in self.peers.others.items() if p.closing is not Closing.COMPLETE and not p.is_dead]
        if users:
            logger.warning(
                "odc: ranks %s have not closed their session and give no sign of life, so this rank's device memory "
                "stays until its process ends",
                users,
            )
            return
        self._for_each(self._cuda.free, self._owned)

    @staticmethod
    def _for_each(release: Callable[[int], None], addresses: list[int]) -> None:
        while addresses:
            try:
                release(addresses.pop())
            except OdcError as problem:
                logger.warning("odc: while closing: %s", problem)
