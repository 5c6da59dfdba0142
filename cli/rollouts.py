"""``odc plan rollouts`` counts what moves if each sample is on some rank before samples are balanced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from odc.balance.rearrange.from_home import samples_of
from odc.balance.rearrange.rearrangement import owners
from odc.balance.simulate import PlannedEpoch
from odc.cli.output import significant

BYTES_PER_TOKEN = 32
"""Of a rollout: its id and mask (8 bytes each), log-probabilities when it was sampled, of the old policy and of the
reference, an advantage (4 each)."""

LINK = "infiniband"
"""The slower of what connects ranks of several nodes."""


@dataclass(frozen=True)
class Moved:
    """What changes ranks in a step, under one policy."""

    share: float
    """Of all tokens."""

    between_nodes: float
    """Of all tokens, those that change nodes."""

    most_bytes: float
    """That one rank receives, in the mean over steps."""

    seconds: float
    """That this takes over the link of the device."""


def moved(epoch: PlannedEpoch, ranks_per_node: int | None, bytes_per_s: float) -> Moved:
    """Of minibatches whose sample i is on rank ``i % world_size`` before."""
    world_size = epoch.sampler.world_size
    total = away = beyond = most = 0.0
    for minibatch in epoch.minibatches:
        lengths = minibatch.plan.lengths
        home, owner = np.arange(lengths.size) % world_size, owners(samples_of(minibatch.plan))
        leaves = home != owner
        nodes = ranks_per_node or world_size
        total += float(lengths.sum())
        away += float(lengths[leaves].sum())
        beyond += float(lengths[home // nodes != owner // nodes].sum())
        most += float(np.bincount(owner[leaves], lengths[leaves], minlength=world_size).max())
    received = most / len(epoch.minibatches) * BYTES_PER_TOKEN
    return Moved(away / total, beyond / total, received, received / bytes_per_s)


def describe_moved(found: Mapping[str, Moved], *, with_nodes: bool) -> str:
    """A few sentences."""
    shares = [f"{name} {each.share:.0%}" for name, each in found.items() if each.share]
    if not shares:
        return "Rollouts stay where they were generated."
    text = f"Rollouts that change ranks, of all tokens: {', '.join(shares)}."
    if with_nodes:
        beyond = [f"{name} {each.between_nodes:.0%}" for name, each in found.items() if each.share]
        text += f" Between nodes: {', '.join(beyond)}."
    worst = max(found.values(), key=lambda each: each.seconds)
    return (
        f"{text} A rank receives up to {significant(worst.most_bytes / 1e6)} MB a step ({BYTES_PER_TOKEN} bytes a "
        f"token), {significant(1e3 * worst.seconds)} ms over {LINK}; the plans do not count that."
    )
