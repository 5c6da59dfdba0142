"""Balanced minibatches inside training libraries. Nothing is imported from these until it is used.

A file for each family: :mod:`~odc.trainers.transformers` (also TRL's ``SFTTrainer``), :mod:`~odc.trainers.trl` (its
rollouts and pairs), :mod:`~odc.trainers.loop` (a script's own, on accelerate), :mod:`~odc.trainers.verl`.

How a batch becomes microbatches, from a loader that accelerate has prepared (:mod:`~odc.trainers.accelerate`): a loader
of the same class takes its place, whose items are bundles (:mod:`~odc.trainers.batches`) of packed rows
(:mod:`~odc.trainers.packing`), planned (:mod:`~odc.trainers.planned`) or streamed (:mod:`~odc.trainers.streamed`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc._lazy import lazy

if TYPE_CHECKING:
    from odc.trainers.loop import Minibatches, minibatches
    from odc.trainers.options import BalanceOptions, Launched
    from odc.trainers.transformers import balance, install

__all__ = ["BalanceOptions", "Launched", "Minibatches", "balance", "install", "minibatches"]

_HOMES = {
    "BalanceOptions": "odc.trainers.options",
    "Launched": "odc.trainers.options",
    "Minibatches": "odc.trainers.loop",
    "balance": "odc.trainers.transformers",
    "install": "odc.trainers.transformers",
    "minibatches": "odc.trainers.loop",
}

__getattr__, __dir__ = lazy(__name__, _HOMES, __all__)
