"""Balanced minibatches inside training libraries: transformers' ``Trainer``, TRL's ``SFTTrainer``, accelerate loops.

Nothing is imported from those libraries until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc._lazy import lazy

if TYPE_CHECKING:
    from odc.trainers.loop import Minibatches, minibatches
    from odc.trainers.options import BalanceOptions
    from odc.trainers.trainer import Launched, balance, install

__all__ = ["BalanceOptions", "Launched", "Minibatches", "balance", "install", "minibatches"]

_HOMES = {
    "BalanceOptions": "odc.trainers.options",
    "Launched": "odc.trainers.trainer",
    "Minibatches": "odc.trainers.loop",
    "balance": "odc.trainers.trainer",
    "install": "odc.trainers.trainer",
    "minibatches": "odc.trainers.loop",
}

__getattr__, __dir__ = lazy(__name__, _HOMES, __all__)
