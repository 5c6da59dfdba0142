"""Balancing policies by name: from the lengths of one minibatch to a plan."""

from __future__ import annotations

from odc.balance.policies.base import Policy
from odc.balance.policies.paper import LBMicro, LBMicroGlobal, LBMini, LocalSort

_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (LocalSort, LBMicro, LBMicroGlobal, LBMini)}


def policy_names() -> list[str]:
    """The names that :func:`get_policy` knows."""
    return list(_POLICIES)


def get_policy(name: str) -> Policy:
    """The policy called ``name``.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _POLICIES:
        raise ValueError(f"policy {name!r} is not known: expected one of {', '.join(policy_names())}")
    return _POLICIES[name]()
