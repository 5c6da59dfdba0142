"""Ranks with different numbers of microbatches: refused, or filled up, where collectives need equal ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from odc.balance.data.iteration import ranks_go_in_step
from odc.balance.plan import Plan

Comm = Literal["auto", "odc", "collective"]
"""How the ranks that train communicate, see :class:`~odc.balance.MinibatchLoader`."""

COMMS: tuple[str, ...] = get_args(Comm)


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
