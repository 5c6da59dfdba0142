"""What a balancing policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_count, as_lengths, check_fit
from odc.balance.costs import CostModel, evaluate
from odc.balance.partition.differencing import Parts
from odc.balance.plan import Plan


class Policy(ABC):
    """Decides which rank trains on which samples, and packs them. Stateless and deterministic.

    Within a rank, microbatches are in the order of their cost, the costliest first (:class:`LocalSort`: of
    their length). Where all ranks have the same number, no other order has a smaller makespan under
    collectives.
    """

    name: ClassVar[str]
    """What :func:`get_policy` knows it by."""

    def plan(self, lengths: npt.ArrayLike, *, world_size: int, max_tokens: int, cost: CostModel) -> Plan:
        """Plan one minibatch.

        Args:
            lengths: tokens of each sample of the global minibatch, integers of at least 1; may be empty.
            world_size: number of ranks.
            max_tokens: most tokens in one microbatch, what memory allows.
            cost: what a sample costs, see :mod:`odc.balance.costs`.

        Raises:
            ValueError: a sample is longer than ``max_tokens``, or an argument is out of range.
        """
        tokens = as_lengths(lengths)
        world_size, max_tokens = as_count(world_size, "world_size"), as_count(max_tokens, "max_tokens")
        check_fit(tokens, max_tokens)
        costs = evaluate(cost, tokens)
        microbatches = self.assign(tokens, costs, world_size, max_tokens)
        return Plan(microbatches, tokens, costs, max_tokens, self.name)

    @abstractmethod
    def assign(self, lengths: IntArray, costs: FloatArray, world_size: int, max_tokens: int) -> list[Parts]:
        """``microbatches[rank][m]`` as lists of sample indices. The arguments are checked already."""
