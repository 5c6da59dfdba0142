"""Alignments of ranks by name: their rounds, and which options go together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from odc.balance.checks import FloatArray, as_count, as_one_of, as_optional_count
from odc.balance.costs import CostModel, evaluate
from odc.balance.grouping.methods import Grouping
from odc.balance.grouping.rounds import AlignedRounds, EqualStepRounds, FreeRounds, QuotaRounds, Rounds

Align = Literal["dgap", "steps", "minibatch", "none"]
"""See :class:`~odc.balance.StreamLoader`."""


@dataclass(frozen=True)
class Alignment:
    """What the ranks of a stream have in common. The arguments are those of :class:`~odc.balance.StreamLoader`.

    Raises:
        ValueError: there is no such way, or an argument makes no sense beside another.
    """

    name: Align
    grouping: Grouping
    pool_size: int
    rank: int
    world_size: int
    cost: CostModel
    minibatch_size: int | None = None
    accumulated: int = 1
    """Steps that make one minibatch (``gradient_accumulation_steps``)."""

    join: bool = True

    def __post_init__(self) -> None:
        as_one_of(self.name, "align", get_args(Align))
        as_count(self.accumulated, "gradient_accumulation_steps")
        as_optional_count(self.minibatch_size, "minibatch_size")
        if self.name == "minibatch":
            if self.minibatch_size is None:
                raise ValueError(
                    "align='minibatch' needs minibatch_size, the samples of a rank in a minibatch on average"
                )
            if self.pool_size < 4 * self.minibatch_size:
                raise ValueError(
                    f"pool_size={self.pool_size} with minibatch_size={self.minibatch_size}: expected at least four "
                    "times as many, as some are chosen from while others are trained on; 16 times balance well"
                )
            if self.accumulated > 1:
                raise ValueError(
                    f"gradient_accumulation_steps={self.accumulated} with align='minibatch', whose minibatches have as "
                    "many microbatches as their samples need: raise minibatch_size instead"
                )
        elif self.minibatch_size is not None:
            raise ValueError(
                f"minibatch_size={self.minibatch_size} with align={self.name!r}, whose minibatches are as many "
                "samples as fit into their microbatches: leave it out, or use align='minibatch'"
            )
        if self.name == "steps" and self.grouping.name != "token-budget":
            raise ValueError(
                f"grouping={self.grouping.name!r} with align='steps', which makes padded groups of equal cost itself: "
                "leave grouping at 'token-budget'"
            )
        if not self.join and self.name != "dgap":
            raise ValueError(f"join=False with align={self.name!r}: it is a way to end the rounds of align='dgap'")

    @property
    def among(self) -> tuple[int, int]:
        """This rank, and how many there are, of those that agree on steps."""
        return (0, 1) if self.name == "none" else (self.rank, self.world_size)

    def rounds(self, num_samples: int | None) -> Rounds:
        """With an empty pool.

        Args:
            num_samples: of an epoch, all ranks together; None: not known, or without end.
        """
        arguments = (self.grouping, self.pool_size, *self.among)
        if self.name == "dgap":
            return AlignedRounds(*arguments, joins=self.join)
        if self.name == "steps":
            return EqualStepRounds(*arguments, cost=self.cost)
        if self.name == "minibatch":
            assert self.minibatch_size is not None
            return QuotaRounds(*arguments, minibatch_size=self.minibatch_size, num_samples=num_samples)
        return FreeRounds(*arguments)

    def costs_of_some(self) -> FloatArray:
        """Of 16 lengths from 1 to the longest, which tell cost models apart; none where costs do not matter."""
        if self.name not in ("steps", "minibatch"):
            return np.zeros(0)
        return evaluate(self.cost, np.unique(np.geomspace(1, self.grouping.max_tokens, num=16).astype(np.int64)))
