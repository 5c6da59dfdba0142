"""The common part of loaders: one iteration at a time, checks of states, and numbers of microbatches under collectives.

If ranks synchronize at every microbatch, different numbers are refused or filled up with empty microbatches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist

from odc.balance.plan import Plan
from odc.errors import PeerSilentError, shown

Comm = Literal["auto", "odc", "collective"]
"""How the ranks that train communicate, see :class:`~odc.balance.MinibatchLoader`."""

COMMS: tuple[str, ...] = get_args(Comm)

_PAUSES_S = 5e-5, 2e-3
_LONGEST_WAIT_S = 600.0
_INTERCEPTION = "odc.fsdp_patch.interception"


class Iterations:
    """Numbers the iterations of a loader, of which the last one alone goes on.

    Two at once would mix what belongs to two epochs or states, on each rank at the point that its own had reached.
    """

    def __init__(self) -> None:
        self._last = 0

    def begin(self) -> int:
        """The number of a new iteration; those before it end."""
        self._last += 1
        return self._last

    def check(self, number: int, num_done: int) -> None:
        """Refuse to go on if the iteration of this number has ended, after ``num_done`` minibatches of the epoch.

        Raises:
            RuntimeError: it has.
        """
        if number != self._last:
            raise RuntimeError(
                f"this iteration ended after minibatch {num_done - 1}: the loader was iterated again, or given "
                "another epoch or state. Start a new iteration, or make a loader for each"
            )


def check_state(state: object, identity: Mapping[str, int | str], place: tuple[str, ...]) -> Mapping[str, Any]:
    """Refuse a state that a loader of this identity cannot go on from.

    Args:
        identity: what the loader whose state this is must have in common with this one.
        place: names of the other entries.

    Raises:
        TypeError: the state is not a mapping.
        ValueError: the state is of another loader, or lacks something.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is a {type(state).__name__}: expected what state_dict() returned, a mapping")
    if missing := [name for name in place if name not in state]:
        raise ValueError(f"the state has no {' and no '.join(missing)}: expected what state_dict() returned")
    for name in [*identity, *(name for name in state if name not in (*identity, *place))]:
        mine, its = identity.get(name), state.get(name)
        if not (isinstance(its, int | str) and its == mine):
            raise ValueError(
                f"the state has {name}={shown(its)}, this loader {name}={shown(mine)}: "
                "their minibatches are not the same ones"
            )
    return state


def ranks_go_in_step() -> bool:
    """Whether this process is one of several ranks, and ODC is not there to let them run different numbers."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 and not _listening()


def check_counts(plan: Plan, what: str) -> None:
    """Refuse a plan under which collectives would wait forever. ``what``: it is a plan of.

    Raises:
        RuntimeError: ranks have different numbers of microbatches, and ODC is not at work in this process.
    """
    # The numbers of all ranks last: for those, all are packed.
    if ranks_go_in_step() and len(set(plan.num_microbatches)) > 1:
        raise RuntimeError(
            f"policy {plan.policy!r} gives the ranks {list(plan.num_microbatches)} microbatches in {what}, and ODC is "
            "not at work in this process: the collectives of FSDP or DDP would wait forever. Call "
            "odc.patch_fsdp(model) before the first minibatch, or start the script with `odc run`. Otherwise pass "
            "comm='collective' (ranks with fewer get empty microbatches), use a policy with equal numbers (lb-micro), "
            "or pass comm='odc' if your ranks communicate once per minibatch in another way"
        )


def filled_up(plan: Plan) -> Plan:
    """With empty microbatches for the ranks that have fewer than others."""
    most = max(plan.num_microbatches)
    return replace(plan, microbatches=[[*mine, *([] for _ in range(most - len(mine)))] for mine in plan.microbatches])


def sums_are_in_order() -> bool:
    """Whether ODC is at work here and adds up the gradients of ranks in one order, whatever the timing."""
    return any(one.is_deterministic for one in _listening())


def wait_for_rank(is_there: Callable[[], bool], what: str, rank: int | None) -> None:
    """Wait for what a rank, by its number in ``torch.distributed``, leaves in a store; or, None, for a store itself.

    Raises:
        OdcError: that rank, or another, has failed meanwhile, where ODC is at work; or nothing came for 10 minutes, or
            as long as ODC was told to wait.
    """
    for one in _listening():
        if one.wait_until(is_there, what, rank):
            return
    started, pause_s = time.monotonic(), _PAUSES_S[0]
    while not is_there():
        if time.monotonic() - started > _LONGEST_WAIT_S:
            who = "" if rank is None else f" rank {rank}, which was to leave"
            raise PeerSilentError(f"{_LONGEST_WAIT_S:g} s have gone by in waiting for{who} {what}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSES_S[1])


class Trained(NamedTuple):
    """What this process has trained under ODC since it began; see the class of this name in ``odc.fsdp_patch``."""

    minibatches: int
    backwards: int
    met_s: float


def trained() -> Trained:
    interception = sys.modules.get(_INTERCEPTION)
    found = None if interception is None else interception.trained()
    return Trained(0, 0, 0.0) if found is None else Trained(found.minibatches, found.backwards, found.met_s)


def report_learned(text: str) -> None:
    """What loaders have learned, for the report of `odc run`."""
    for one in _listening():
        if hasattr(one, "learned"):
            one.learned = text


def _listening() -> Sequence[Any]:
    """Who of ODC listens for the ends of minibatches: sessions, and `odc run`, which makes sessions later."""
    # Asked for, not imported: this package does without the rest of ODC, and what is not loaded is not at work.
    interception = sys.modules.get(_INTERCEPTION)
    return () if interception is None else interception.listening()
