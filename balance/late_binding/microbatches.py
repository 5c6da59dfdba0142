"""The microbatches of a rank, each chosen when it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from odc.balance.data.iteration import ranks_go_in_step, sums_are_in_order
from odc.balance.data.reader import as_it_is
from odc.balance.late_binding.steal_policy import StealPolicy, WorkQueue
from odc.balance.late_binding.work_queues import WorkQueues
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
        queues: of all ranks.
        key: of the minibatch in the pass over the data, the same on all ranks.
        planned: its plan, :func:`largest_first`.
        batches: gives the microbatches of this rank's queue, in the order of the plan, which workers make ahead; None:
            nobody does.
        dataset: makes any other microbatch of what ``planned`` knows its samples by.
    """

    def __init__(
        self,
        queues: WorkQueues,
        key: str,
        planned: PlannedMinibatch,
        batches: Iterator[BatchT] | None,
        dataset: MakesMicrobatches[BatchT],
    ) -> None:
        self._queues = queues
        self._number = queues.expect(key)
        self._planned = planned
        self._batches = batches
        self._dataset = dataset
        self._unread = [] if batches is None else list(planned.plan.microbatches[queues.rank])
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
        queues = self._queues
        planned = self._planned.plan.microbatches[queues.rank]
        queues.open(self._number, planned)
        if not queues.leads:
            yield from self._as_told(planned)
            return
        while parts := (own := queues.mine(self._number)).microbatches:
            policy, others = self._policy(own), None
            if policy.may_split(parts):
                others = queues.of_others()
                parts = policy.split(parts, list(others.values()))
            part, *behind = parts
            if not queues.begin(parts, policy.running(part)):
                continue
            if not behind and policy.may_join(len(planned)):
                part = self._joined(policy, part, queues.of_others() if others is None else others)
            yield from self._timed(part)
        while part := self._taken():
            queues.is_through(self._policy(queues.mine(self._number)).running(part))
            yield from self._timed(part)
        queues.is_through()
        queues.handed_out([])
        if queues.binds:
            queues.estimates.tell(queues.times)

    def _as_told(self, planned: Parts) -> Iterator[BatchT]:
        """Those of the plan, until this rank and the one that leads both know that they train; then what that one
        tells."""
        queues, left = self._queues, list(planned)
        own = {sample for part in planned for sample in part}
        while part := (queues.hear(self._number) if queues.binds else left.pop(0) if left else []):
            queues.num_taken += len(set(part) - own)
            queues.handed_out(part)
            yield self._change(self._read(part))
            queues.came_back()

    def _timed(self, part: list[int]) -> Iterator[BatchT]:
        queues, plan = self._queues, self._planned.plan
        batch = self._change(self._read(part))
        queues.times.begin(float(plan.costs[part].sum()), plan.microbatch_cost)
        queues.handed_out(part)
        yield batch
        queues.times.end(is_computed=queues.came_back())

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

    def _joined(self, policy: StealPolicy, part: list[int], others: dict[int, WorkQueue]) -> list[int]:
        """``part``, which is begun, and what another rank, which will be the last one, has left of its own."""
        for _ in range(2):
            last = max(others, key=lambda rank: policy.end(others[rank]), default=None)
            if last is None or not (more := policy.join(part, others[last])):
                break
            if self._queues.steal(last, others[last], more):
                self._queues.is_through(policy.running(part + more))
                return part + more
            others = self._queues.of_others()  # another rank was faster, or it has begun more: look again
        return part

    def _policy(self, own: WorkQueue) -> StealPolicy:
        times = self._queues.times
        return StealPolicy(self._planned.plan, self._queues.now, times.rate, None if times.is_idle else own)

    def _taken(self) -> list[int]:
        """Samples that this rank, which has nothing left, has taken from another one; none: nothing is worth it."""
        queues = self._queues
        while queues.times.rate:
            policy, found = self._policy(queues.mine(self._number)), queues.of_others()
            for rank in sorted(found, key=lambda rank: -policy.end(found[rank])):
                if part := policy.steal(found[rank]):
                    if queues.steal(rank, found[rank], part):
                        return part
                    break  # it has begun more meanwhile, or another rank was faster: look again
            else:
                return []
        return []
