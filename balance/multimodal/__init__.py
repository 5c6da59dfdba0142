"""Samples of several modalities: a distribution over the ranks for each encoder and for the language model.

Plan with :class:`Orchestrator` (numpy only); feed it with :class:`MultimodalLoader` and train with
:func:`run_minibatch`, which need torch and are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
    "Encoder": "run",
    "InStep": "carriers",
    "MultimodalLoader": "loader",
    "MultimodalMinibatch": "run",
    "OnDemand": "carriers",
    "SampleParts": "payload",
    "channels_of": "carriers",
    "run_minibatch": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_NEED_TORCH[name]}"), name)
