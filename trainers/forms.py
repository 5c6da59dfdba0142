"""Converts batches of TRL's trainers of rollouts and pairs into samples that can change ranks, and back.

A sample holds what its row of a batch has, without padding; for pairs, both rows.
"""

from __future__ import annotations

import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from odc.trainers.checks import base_model

Sample = dict[str, Any]
Inputs = dict[str, Any]


class Form(ABC):
    """Of one kind of trainer."""

    trains_on: ClassVar[str]
    """For messages."""

    pads_left: ClassVar[bool] = False
    has_scores: ClassVar[bool] = False
    """The model gives one number for a sequence."""

    whole_step: ClassVar[tuple[str, ...]] = ()
    """Losses that the trainer divides by a number of the whole step; others are means over a microbatch's samples."""

    def problem(self, trainer: Any) -> str | None:
        """What is in the way of balancing it; None: nothing."""
        trl: Any = sys.modules.get("trl")
        known = next(one for one in type(trainer).__mro__ if one.__name__ in _FORMS)
        if trl is None or getattr(trl, known.__name__, None) is not known:
            return f"it is made of a {known.__name__} that is not TRL's, and how that computes its loss is not known"
        for name in _KEPT:
            mine = inspect.getattr_static(type(trainer), name, None)
            if mine is not inspect.getattr_static(known, name, None):
                return f"{name} is overridden, and what it does with a batch is not known; use {known.__name__} itself"
        return self.option_in_the_way(trainer)

    @abstractmethod
    def option_in_the_way(self, trainer: Any) -> str | None:
        """Of this kind of trainer; None: there is none."""

    @abstractmethod
    def samples_of(self, inputs: Mapping[str, Any]) -> list[Sample]:
        """Of a batch, as the trainer's loss takes it."""

    @abstractmethod
    def lengths_of(self, sample: Sample) -> list[int]:
        """Tokens of each sequence of a sample."""

    @abstractmethod
    def num_loss_tokens_of(self, sample: Sample) -> int:
        """For metrics, which are means over these."""

    @abstractmethod
    def batch_of(self, samples: Sequence[Sample]) -> Inputs:
        """The inverse of :meth:`samples_of`, of any samples of an optimizer step."""

    def is_of_whole_step(self, trainer: Any) -> bool:
        """Whether the trainer's loss of a microbatch is a part of the step's as it is."""
        return getattr(trainer, "loss_type", None) in self.whole_step


class Rollouts(Form):
    """``GRPOTrainer``: prompts padded on the left, completions padded on the right."""

    trains_on = "rollouts that it makes itself"
    pads_left = True
    whole_step = ("cispo", "dapo", "vespo")
    _MEANS = ("grpo", "sapo", "dr_grpo", "luspo")
    _PADDED_BY: ClassVar[Mapping[str, int]] = {"tool_mask": 1, "importance_sampling_ratio": 1}
    """As TRL does, whose loss multiplies the ratios of whole rows ("vespo"); by 0 what is not here."""

    def option_in_the_way(self, trainer: Any) -> str | None:
        if trainer.loss_type == "bnpo":
            return (
                "loss_type='bnpo' is the mean over the tokens of a microbatch, which depends on which samples share "
                "one; use 'dapo', the mean over those of the step"
            )
        if trainer.loss_type not in (*self.whole_step, *self._MEANS):
            return f"how loss_type={trainer.loss_type!r} is normalized is not known; use 'dapo'"
        if trainer.top_entropy_quantile < 1.0:
            return (
                f"top_entropy_quantile={trainer.top_entropy_quantile}: the quantile is one of a microbatch, in which "
                "ranks also wait for one another; set it to 1.0"
            )
        if trainer._entropy_bonus_enabled:
            return (
                "entropy_coef and use_adaptive_entropy add the mean entropy of a microbatch, which depends on which "
                "samples share one; set entropy_coef=0 and use_adaptive_entropy=False"
            )
        if trainer._is_vlm:
            return "images of rollouts cannot change ranks; use a model of text, and its tokenizer as processing_class"
        return None

    def samples_of(self, inputs: Mapping[str, Any]) -> list[Sample]:
        prompts, masks = inputs["prompt_mask"].bool(), inputs["completion_mask"].bool()
        width = masks.shape[1]
        # Of a completion that is left out (mask_truncated_completions) no token is needed, and one is kept.
        ends = (masks * torch.arange(1, width + 1, device=masks.device)).amax(dim=1).clamp(min=1).tolist()
        shared = {name: value for name, value in inputs.items() if torch.is_tensor(value) and value.dim() == 0}
        found: list[Sample] = []
        for row, end in enumerate(ends):
            sample: Sample = dict(shared)
            for name, value in inputs.items():
                if name in shared or value is None:
                    continue
                if name in ("prompt_ids", "prompt_mask"):
                    sample[name] = value[row][prompts[row]]
                elif value.dim() > 1 and value.shape[1] == width:
                    sample[name] = value[row, :end]
                else:
                    sample[name] = value[row]
            found.append(sample)
        return found

    def lengths_of(self, sample: Sample) -> list[int]:
        return [sample["prompt_ids"].numel() + int(sample["completion_mask"].sum())]

    def num_loss_tokens_of(self, sample: Sample) -> int:
        return int((sample["completion_mask"] * sample.get("tool_mask", 1)).sum())

    def batch_of(self, samples: Sequence[Sample]) -> Inputs:
        found: Inputs = {}
        for name, value in samples[0].items():
            values = [sample[name] for sample in samples]
            if name == "num_items_in_batch":
                found[name] = value
            elif value.dim() == 0 or (name == "importance_sampling_ratio" and all(v.numel() == 1 for v in values)):
                found[name] = torch.stack(values)
            else:
                left = name in ("prompt_ids", "prompt_mask")
                found[name] = _padded(values, self._PADDED_BY.get(name, 0), left=left)
        return found


class Pairs(Form):
    """Batches of pairs: the rows of all chosen answers, then those of the rejected ones."""

    trains_on = "pairs of answers"
    _ROWS = ("input_ids", "completion_mask")

    def samples_of(self, inputs: Mapping[str, Any]) -> list[Sample]:
        mask = inputs["attention_mask"].bool()
        count = len(mask) // 2
        found: list[Sample] = []
        for pair in range(count):
            sample: Sample = {}
            for name, value in inputs.items():
                if name in self._ROWS:
                    sample[name] = tuple(value[row][mask[row]] for row in (pair, count + pair))
                elif name != "attention_mask":
                    sample[name] = value[pair]
            found.append(sample)
        return found

    def lengths_of(self, sample: Sample) -> list[int]:
        return [ids.numel() for ids in sample["input_ids"]]

    def num_loss_tokens_of(self, sample: Sample) -> int:
        return 1  # metrics are means over pairs

    def batch_of(self, samples: Sequence[Sample]) -> Inputs:
        found: Inputs = {}
        for name, value in samples[0].items():
            values = [sample[name] for sample in samples]
            if isinstance(value, tuple):
                rows = [both[side] for side in (0, 1) for both in values]
                found[name] = _padded(rows, 0)
                if name == "input_ids":
                    found["attention_mask"] = _padded([torch.ones_like(row) for row in rows], 0)
            else:
                found[name] = torch.stack(values)
        return found


class Preferences(Pairs):
    """``DPOTrainer``."""

    _OF_A_MICROBATCH: ClassVar[Mapping[str, str]] = {
        "aot": "sorts the pairs of a microbatch",
        "aot_unpaired": "sorts the pairs of a microbatch",
        "sft": "is the mean over the tokens of a microbatch",
    }

    def option_in_the_way(self, trainer: Any) -> str | None:
        for loss_type in trainer.loss_types:
            if loss_type in self._OF_A_MICROBATCH:
                return (
                    f"loss_type={loss_type!r} {self._OF_A_MICROBATCH[loss_type]}, so it depends on which pairs share "
                    "one; use a loss of single pairs ('sigmoid')"
                )
        if getattr(trainer, "_is_vision_dataset", False):
            return "images of pairs cannot change ranks; use a dataset of text"
        return None


class Comparisons(Pairs):
    """``RewardTrainer``."""

    has_scores = True

    def option_in_the_way(self, trainer: Any) -> str | None:
        model = base_model(trainer.model)
        head = getattr(model, "score", None)
        head = getattr(head, "original_module", head)  # of which peft trains a copy
        if not isinstance(head, nn.Linear) or head.out_features != 1:
            return (
                f"{type(model).__name__} has no linear layer 'score' of one output, which packed sequences are scored "
                "by; use an AutoModelForSequenceClassification with num_labels=1"
            )
        return None


_FORMS: dict[str, type[Form]] = {"GRPOTrainer": Rollouts, "DPOTrainer": Preferences, "RewardTrainer": Comparisons}
_KEPT = ("compute_loss", "_compute_loss", "_prepare_inputs", "training_step", "_get_per_token_logps_and_entropies")


def form_of(trainer: Any) -> Form | None:
    """Of TRL's classes, and of those made of them; None: the trainer is no such."""
    found = next((_FORMS[one.__name__] for one in type(trainer).__mro__ if one.__name__ in _FORMS), None)
    return None if found is None else found()


def _padded(rows: Sequence[torch.Tensor], value: int, *, left: bool = False) -> torch.Tensor:
    side = "left" if left else "right"
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)
