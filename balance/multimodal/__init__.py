"""Samples of several modalities: a distribution over the ranks for each encoder and for the language model.

Plan with :class:`Orchestrator` (numpy only); feed it with :class:`MultimodalLoader` and train with
:func:`run_minibatch`, which need torch and are imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from odc._lazy import lazy
from odc.balance.multimodal.lengths import ItemLengths, Items, MinibatchLengths, Phase, RankLengths, SampleLengths
from odc.balance.multimodal.orchestrator import Orchestrator
from odc.balance.multimodal.schedule import MinibatchSchedule
from odc.balance.multimodal.simulate import StepTimes, step_times

if TYPE_CHECKING:
    from odc.balance.multimodal.carriers import InStep, OnDemand, channels_of
    from odc.balance.multimodal.loader import MultimodalLoader
    from odc.balance.multimodal.payload import SampleParts
    from odc.balance.multimodal.run import Encoder, MultimodalMinibatch, run_minibatch

__all__ = [
    "Encoder",
    "InStep",
    "ItemLengths",
    "Items",
    "MinibatchLengths",
    "MinibatchSchedule",
    "MultimodalLoader",
    "MultimodalMinibatch",
    "OnDemand",
    "Orchestrator",
    "Phase",
    "RankLengths",
    "SampleLengths",
    "SampleParts",
    "StepTimes",
    "channels_of",
    "run_minibatch",
    "step_times",
]

_NEED_TORCH = {
    "Encoder": "odc.balance.multimodal.run",
    "InStep": "odc.balance.multimodal.carriers",
    "MultimodalLoader": "odc.balance.multimodal.loader",
    "MultimodalMinibatch": "odc.balance.multimodal.run",
    "OnDemand": "odc.balance.multimodal.carriers",
    "SampleParts": "odc.balance.multimodal.payload",
    "channels_of": "odc.balance.multimodal.carriers",
    "run_minibatch": "odc.balance.multimodal.run",
}

__getattr__, __dir__ = lazy(__name__, _NEED_TORCH, __all__)
