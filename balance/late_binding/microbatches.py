"""The microbatches of a rank, each chosen when it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from odc.balance.data.iteration import ranks_go_in_step, sums_are_in_order
from odc.balance.data.reader import as_it_is
from odc.balance.late_binding.outlook import Outlook, Share
from odc.balance.late_binding.shares import Shares
from odc.balance.partition.differencing import Parts
from odc.balance.plan import PlannedMinibatch

BatchT = TypeVar("BatchT")
BatchT_co = TypeVar("BatchT_co", covariant=True)


def check_late_binding() -> None:
    """Refuse minibatches that are bound late where that is not at work which they need.

    Raises:
        RuntimeError: gradients are added up in one order, or ODC is not at work.
    """
    if sums_are_in_order():
        raise RuntimeError(
            "late_binding=True with deterministic=True of ODC: which rank computes a sample depends on timing, and "
            "with it the order in which gradients are added. Leave one of them out"
        )
    if ranks_go_in_step():
        raise RuntimeError(
            "late_binding=True, and ODC is not at work in this process: ranks would have different numbers of "
            "microbatches, for which the collectives of FSDP or DDP would wait forever. Call odc.patch_fsdp(model) "
            "before the first minibatch, or start the script with `odc run`"
        )


class MakesMicrobatches(Protocol[BatchT_co]):
    """What is indexed by samples, and gives microbatches."""

    def __getitem__(self, samples: list[int], /) -> BatchT_co:
        """The microbatch of these."""


class LateMicrobatches(Generic[BatchT]):
    """The microbatches of one rank and minibatch, each chosen when it is asked for: those of the plan, but for what
    others have taken; then what this rank takes. That may join the last one of the plan. To be iterated once, and how
    many there will be nobody knows before.

    Args:
        shares: of all ranks.
        key: of the minibatch in the pass over the data, the same on all ranks.
        planned: its plan, :func:`falling`.
        batches: gives the microbatches of this rank's share, in the order of the plan, which workers make ahead; None:
            nobody does.
        dataset: makes any other microbatch of what ``planned`` knows its samples by.
    """

    def __init__(
        self,
        shares: Shares,
        key: str,
        planned: PlannedMinibatch,
        batches: Iterator[BatchT] | None,
        dataset: MakesMicrobatches[BatchT],
    ) -> None:
        self._shares = shares
        self._number = shares.expect(key)
        self._planned = planned
        self._batches = batches
        self._dataset = dataset
        self._unread = [] if batches is None else list(planned.plan.microbatches[shares.rank])
        self._change: Callable[[BatchT], Any] = as_it_is

    def __len__(self) -> int:
        raise TypeError("with late_binding=True nobody knows the number of microbatches before they are through")

    def changed(self, change: Callable[[BatchT], BatchT]) -> LateMicrobatches[BatchT]:
        """The same, to be iterated in place of these, each changed when it is asked for."""
        found = copy.copy(self)
        found._change = lambda batch: change(self._change(batch))
        return found

    def close(self) -> None:
        """Read no more of it: what is made already is dropped."""
        while self._unread:
            self._next_made()

    def __iter__(self) -> Iterator[BatchT]:
        shares = self._shares
        planned = self._planned.plan.microbatches[shares.rank]
        shares.open(self._number, planned)
        if not shares.leads:
            yield from self._as_told(planned)
            return
        while parts := (own := shares.mine(self._number)).microbatches:
            outlook, others = self._outlook(own), None
            if outlook.may_split(parts):
                others = shares.of_others()
                parts = outlook.split(parts, list(others.values()))
            part, *behind = parts
            if not shares.begin(parts, outlook.running(part)):
                continue
            if not behind and outlook.may_join(len(planned)):
                part = self._joined(outlook, part, shares.of_others() if others is None else others)
            yield from self._timed(part)
        while part := self._taken():
            shares.is_through(self._outlook(shares.mine(self._number)).running(part))
            yield from self._timed(part)
        shares.is_through()
        shares.handed_out([])
        if shares.binds:
            shares.estimates.tell(shares.times)

    def _as_told(self, planned: Parts) -> Iterator[BatchT]:
        """Those of the plan, until this rank and the one that leads both know that they train; then what that one
        tells."""
        shares, left = self._shares, list(planned)
        own = {sample for part in planned for sample in part}
        while part := (shares.hear(self._number) if shares.binds else left.pop(0) if left else []):
            shares.num_taken += len(set(part) - own)
            shares.handed_out(part)
            yield self._change(self._read(part))
            shares.came_back()

    def _timed(self, part: list[int]) -> Iterator[BatchT]:
        shares, plan = self._shares, self._planned.plan
        batch = self._change(self._read(part))
        shares.times.begin(float(plan.costs[part].sum()), plan.microbatch_cost)
        shares.handed_out(part)
        yield batch
        shares.times.end(is_computed=shares.came_back())

    def _read(self, part: list[int]) -> BatchT:
        if part not in self._unread:
            return self._dataset[self._planned.samples[part].tolist()]
        while self._unread[0] != part:  # others have taken it, or some of it
            self._next_made()
        return self._next_made()

    def _next_made(self) -> BatchT:
        assert self._batches is not None
        del self._unread[0]
        return next(self._batches)

    def _joined(self, outlook: Outlook, part: list[int], others: dict[int, Share]) -> list[int]:
        """``part``, which is begun, and what another rank, which will be the last one, has left of its own."""
        for _ in range(2):
            last = max(others, key=lambda rank: outlook.end(others[rank]), default=None)
            if last is None or not (more := outlook.join(part, others[last])):
                break
            if self._shares.take(last, others[last], more):
                self._shares.is_through(outlook.running(part + more))
                return part + more
            others = self._shares.of_others()  # another rank was faster, or it has begun more: look again
        return part

    def _outlook(self, own: Share) -> Outlook:
        times = self._shares.times
        return Outlook(self._planned.plan, self._shares.now, times.rate, None if times.is_idle else own)

    def _taken(self) -> list[int]:
        """Samples that this rank, which has nothing left, has taken from another one; none: nothing is worth it."""
        shares = self._shares
        while shares.times.rate:
            outlook, found = self._outlook(shares.mine(self._number)), shares.of_others()
            for rank in sorted(found, key=lambda rank: -outlook.end(found[rank])):
                if part := outlook.take(found[rank]):
                    if shares.take(rank, found[rank], part):
                        return part
                    break  # it has begun more meanwhile, or another rank was faster: look again
            else:
                return []
        return []
