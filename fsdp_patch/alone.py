"""Units whose shard group is one rank, beside others or without: FSDP communicates nothing for them.

Experts may be such units: where there are as many parts of them as ranks, each rank has one of its own. Nothing is done
on demand for them. FSDP adds to ``.grad`` in each backward, so that they are final as soon as the others are; only
what a minibatch that is thrown away has added there has to be taken away again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from odc.fsdp_patch.unit import Unit


class Alone:
    """The trainable parameters of such units of one session."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._parameters: list[nn.Parameter] = [p for unit in units for p in unit.trainable_parameters()]
        self._before: list[torch.Tensor | None] | None = None

    def begin(self) -> None:
        """A forward of the minibatch begins: what is in ``.grad`` now, stays, whatever becomes of it."""
        if self._before is None:
            self._before = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters]

    def end(self, *, is_discarded: bool) -> None:
        """The minibatch is over. Without :meth:`begin` nothing was in ``.grad`` before it."""
        for unit in self.units:
            unit.discard_gathered()
        before, self._before = self._before, None
        if is_discarded:
            for parameter, gradient in zip(self._parameters, before or [None] * len(self._parameters), strict=True):
                parameter.grad = gradient
