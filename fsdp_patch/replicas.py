"""Communication between hosts, once per minibatch.

On-demand communication runs inside a group of ranks (typically one host). Across hosts, ranks with the same place in
their groups are replicas of one another (hybrid sharding), or counterparts, which share a model's parameters and sums
among their groups (:mod:`odc.fsdp_patch.sharing`). FSDP all-reduces between replicas in every microbatch; ODC does so
once per minibatch, after its one synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from odc.errors import ProtocolError
from odc.minibatch.protocol import NUM_NOTES, End, EndKind, require_same_end
from odc.minibatch.runtime import Runtime


class Replicas:
    """Collectives of one rank with its replicas, under the runtime's time limit and abort notices."""

    def __init__(self, group: dist.ProcessGroup, runtime: Runtime, device: torch.device) -> None:
        self._group = group
        self._runtime = runtime
        self._device = device
        self._met_in = 0
        self._ranks = dist.get_process_group_ranks(group)
        # Flags that Python reads travel between hosts: reading them from a device would make each host wait for it.
        self._host_group = group
        if device.type != "cpu":
            self._host_group = dist.new_group(self._ranks, backend="gloo", use_local_synchronization=True)

    @property
    def size(self) -> int:
        """How many ranks hold a copy of each shard."""
        return len(self._ranks)

    @property
    def rank(self) -> int:
        """This rank's number among its replicas."""
        return dist.get_rank(self._group)

    def meet(self) -> None:
        """Wait until all have come to the end of the minibatch.

        Once per minibatch: at its end every rank comes to the same collectives, and waits for nobody in between.
        """
        if self._met_in != self._runtime.minibatch:
            self._runtime.meet_replicas(f"end of minibatch {self._runtime.minibatch}, with replica ranks {self._ranks}")
            self._met_in = self._runtime.minibatch

    def ends(self) -> list[End]:
        """How each rank of the other shard groups has ended the minibatch.

        Collective, once per minibatch, behind its end within the group.

        Raises:
            ProtocolError: the groups are at different minibatches, or have ended this one in different ways.
        """
        self.meet()
        minibatch, ends = self._runtime.minibatch, self._runtime.ends
        words = [minibatch, *(word for end in ends for word in (end.kind, end.has_pushed, *end.notes))]
        own = torch.tensor(words, dtype=torch.int64, device="cpu")
        rows = [torch.empty_like(own) for _ in self._ranks]
        work = dist.all_gather(rows, own, group=self._host_group, async_op=True)
        self.wait(work, f"end of minibatch {minibatch}", on_host=True)
        found = list[End]()
        for rank, (theirs, *rest) in zip(self._ranks, (row.tolist() for row in rows), strict=True):
            if theirs != minibatch:
                raise ProtocolError(
                    f"rank {rank} is at the end of minibatch {theirs}, this rank ({self._ranks[self.rank]}) at that of "
                    f"{minibatch}: the replicas have taken different numbers of steps"
                )
            of_group = [
                End(EndKind(kind), tuple(notes), bool(pushed))
                for kind, pushed, *notes in zip(*[iter(rest)] * (2 + NUM_NOTES), strict=True)
            ]
            require_same_end(minibatch, {self._ranks[self.rank]: ends[0], rank: of_group[0]})
            found += of_group if rank != self._ranks[self.rank] else []
        return found

    def union(self, flags: Sequence[bool]) -> list[bool]:
        """Element-wise "or" over the replicas."""
        self.meet()
        words = torch.tensor(flags, dtype=torch.int32, device="cpu")
        if words.numel():
            work = dist.all_reduce(words, dist.ReduceOp.MAX, group=self._host_group, async_op=True)
            self.wait(work, "which parameters received a gradient", on_host=True)
        return [bool(word) for word in words.tolist()]

    def begin_sum(self, tensor: torch.Tensor) -> dist.Work | None:
        """Replace ``tensor`` by the sum over the replicas, until :meth:`wait`."""
        work: dist.Work | None = dist.all_reduce(tensor, group=self._group, async_op=True)
        return work

    def meet_to_publish(self) -> None:
        """Wait until all have come to publish, too. Before :meth:`all_gather`."""
        self._runtime.meet_replicas(f"a publication, with replica ranks {self._ranks}", to_publish=True)

    def all_gather(self, rows: torch.Tensor) -> dist.Work | None:
        """Fill row r of ``rows`` with that row of replica r, until :meth:`wait`; this rank's own is in place."""
        own = rows[self.rank].clone()
        work: dist.Work | None = dist.all_gather(list(rows), own, group=self._group, async_op=True)
        return work

    def swap_rows(self, rows: torch.Tensor, arriving: torch.Tensor) -> dist.Work | None:
        """Fill row r of ``arriving`` with what replica r has of this rank's row, until :meth:`wait`."""
        # Gloo's reduce-scatter runs inside wait(), where nothing can watch it, and its all-reduce sends twice as much.
        work: dist.Work | None = dist.all_to_all_single(arriving, rows, group=self._group, async_op=True)
        return work

    def close(self) -> None:
        """Give up what this object made. Local, idempotent; after an error it is left alone, as a collective may be
        under way in it."""
        if self._host_group is not self._group and not self._runtime.has_failed:
            dist.destroy_process_group(self._host_group)
        self._host_group = self._group

    def wait(self, work: dist.Work | None, what: str, on_host: bool | None = None) -> None:
        """For a collective that was begun; on a device, the current stream does."""
        assert work is not None
        on_host = self._device.type == "cpu" if on_host is None else on_host
        self._runtime.wait_for_work(work, f"{what}, with replica ranks {self._ranks}", self._ranks, on_host=on_host)
