"""Fences: wait until published shards may be replaced between steps, in one runtime or several. See PROTOCOL.md."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from odc import limits
from odc.errors import ProtocolError
from odc.minibatch.protocol import CHANGE_EVERYWHERE, End
from odc.minibatch.runtime import Runtime
from odc.transports._peers import IN_COLLECTIVE, PeerState


class _Stillness:
    """For how long no other rank has worked, as far as one wait has seen: each waits for one that is seen from here, or
    in a collective, or is gone."""

    def __init__(self, runtimes: Sequence[Runtime]) -> None:
        self._jobs = [runtime._waiter.job for runtime in runtimes]
        num_seen = len({rank for job in self._jobs for rank in (job.rank, *job.others)})
        sees_all = not dist.is_initialized() or num_seen >= dist.get_world_size()
        self._pace = 1.0 if sees_all else limits.FENCE_UNSEEN_FACTOR
        self._seen: dict[int, int] = {}
        self._since = self._last_look = time.monotonic()

    def look(self) -> float:
        """Seconds; less than these where some ranks of the job are not seen."""
        now, seen, waiting = time.monotonic(), dict[int, int](), set[int]()
        for job in self._jobs:
            for rank in job.others:
                if (peer := job.peer(rank)).state is PeerState.ALIVE:
                    seen[rank] = seen.get(rank, 0) + peer.heartbeats.progress
                    whom = peer.waiting_on  # one that is not seen from here may work
                    waiting |= {rank} if whom is not None and (whom >= IN_COLLECTIVE or job.sees(whom)) else set()
        was_absent = now - self._last_look > limits.ABSENCE_S  # suspended, as the others may have been
        if seen != self._seen or was_absent or len(waiting) < len(seen):
            self._seen, self._since = seen, now
        self._last_look = now
        return (now - self._since) / self._pace

    def whom(self, rank: int) -> int | None:
        """For whom it waits, by its number in the job."""
        found = [job.peer(rank).waiting_on for job in self._jobs if job.sees(rank)]
        return next((whom for whom in found if whom is not None), None)


def pass_fences(
    runtimes: Sequence[Runtime], hows: Sequence[End], beside: Sequence[Runtime], *, may_leave: bool = False
) -> Iterator[Runtime]:
    """Wait until nobody reads the published shards of these runtimes any more, see
    :meth:`odc.minibatch.protocol.MinibatchProtocol.begin_fence`; each as soon as it can be, for others may wait for one
    of them and not have come to another yet. Publish what is yielded at once.

    Args:
        hows: what this rank says of itself, to those of each.
        beside: all runtimes of this process, in which others may wait instead.
        may_leave: go on without the rest when no other rank works, or one that is awaited is gone. To be called again
            before anything else is done with these.

    Raises:
        ProtocolError: no other rank works, and those that are awaited wait for something else; or have ended this
            minibatch in another way.
        MisuseError: a minibatch is open, or shards are unpublished.
    """
    for runtime, how in zip(runtimes, hows, strict=True):
        with runtime.reporting:
            runtime._protocol.begin_fence(how)
    rest = list(runtimes)
    while rest:
        over = [runtime for runtime in rest if not _late_mesh(runtime)]
        if not over:
            _wait_for_any(rest, beside, may_leave)
            if not any(over := [runtime for runtime in rest if not _late_mesh(runtime)]):
                return
        rest = [runtime for runtime in rest if runtime not in over]
        for runtime in over:
            with runtime.reporting:
                runtime._protocol.end_fence()
            yield runtime


def _late_mesh(runtime: Runtime) -> Runtime | None:
    """The first of its meshes on which a rank has yet to come to the fence."""
    return next((mesh for mesh in runtime.meshes if mesh._protocol.late()), None)


def _wait_for_any(runtimes: Sequence[Runtime], beside: Sequence[Runtime], may_leave: bool) -> None:
    """Until one of these fences is over."""
    stillness, is_left = _Stillness(beside), False

    def is_gone(mesh: Runtime) -> bool:
        peers = mesh._transport.peers.by_rank
        return any(peers[rank].state is not PeerState.ALIVE for rank in mesh._protocol.late())

    def awaited(mesh: Runtime) -> list[int]:
        nonlocal is_left
        if not all(map(_late_mesh, runtimes)):
            return []
        still_s, late = stillness.look(), mesh._protocol.late()
        meshes = [one for runtime in runtimes for one in runtime.meshes]
        is_left = may_leave and (still_s > limits.FENCE_AWAY_S or any(map(is_gone, meshes)))
        if late and still_s > limits.FENCE_STUCK_S and not is_left:
            number = mesh.topology.global_rank(late[0])
            raise ProtocolError(_why_it_does_not_come(mesh, number, stillness.whom(number)))
        return [] if is_left else late

    try:
        while not is_left and all(meshes := [_late_mesh(runtime) for runtime in runtimes]):
            mesh = meshes[0]
            assert mesh is not None
            mesh._waiter.wait(functools.partial(awaited, mesh), lambda: "others that publish changed parameters, too")
    except BaseException as error:
        for runtime in beside:  # where others may wait
            runtime._report(error)
        raise


def _why_it_does_not_come(runtime: Runtime, number: int, whom: int | None) -> str:
    me = runtime.topology.me
    whom = me if whom is None else whom
    where = "in a collective of the script" if whom >= IN_COLLECTIVE else f"for rank {whom}"
    return (
        f"rank {me} has changed parameters since minibatch {runtime.minibatch} was published, and waits for the other "
        f"ranks to publish theirs anew; rank {number} has not changed any, and waits {where}. {CHANGE_EVERYWHERE}"
    )
