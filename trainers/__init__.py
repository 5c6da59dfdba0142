"""Balanced minibatches inside training libraries: transformers' ``Trainer``, TRL's ``SFTTrainer``, accelerate loops.

Nothing is imported from those libraries until it is used.
"""

from odc.trainers.loop import Minibatches, minibatches
from odc.trainers.options import BalanceOptions
from odc.trainers.trainer import Launched, balance, install

__all__ = ["BalanceOptions", "Launched", "Minibatches", "balance", "install", "minibatches"]
