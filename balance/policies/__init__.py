"""Balancing policies by name: from the lengths of one minibatch to a plan."""

from __future__ import annotations

from odc.balance.policies.base import Policy
from odc.balance.policies.micro import LBMicro, LBMicroGlobal, VerlNative, VerlOptimized
from odc.balance.policies.mini import LBMini, LBMiniEqual
from odc.balance.policies.unpacked import LocalSort, NoBalance
from odc.errors import shown

__all__ = [
    "LBMicro",
    "LBMicroGlobal",
    "LBMini",
    "LBMiniEqual",
    "LocalSort",
    "NoBalance",
    "Policy",
    "VerlNative",
    "VerlOptimized",
    "get_policy",
    "policy_names",
]

_POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (NoBalance, LocalSort, VerlNative, VerlOptimized, LBMicro, LBMicroGlobal, LBMini, LBMiniEqual)
}


def policy_names() -> list[str]:
    """All names of policies for :func:`get_policy`.

    Example:
        >>> {"lb-micro", "lb-mini"} <= set(policy_names())
        True
    """
    return list(_POLICIES)


def get_policy(name: str) -> Policy:
    """The policy called ``name``.

    Raises:
        ValueError: there is no policy of that name, or ``name`` is not a string.

    Example:
        >>> policy = get_policy("lb-mini")
        >>> plan = policy.plan([900, 500, 400, 200, 100], world_size=2, max_tokens=1000, cost=LinearCost())
        >>> plan.microbatches[0], plan.microbatches[1]
        ([[0], [3]], [[1, 2, 4]])
    """
    if not isinstance(name, str) or name not in _POLICIES:
        raise ValueError(f"policy {shown(name)} is not known: expected one of {', '.join(policy_names())}")
    return _POLICIES[name]()
