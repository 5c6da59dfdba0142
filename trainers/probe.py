"""Whether a model's packed samples are told apart and its losses add up: asked of the model itself.

That ``position_ids`` is an argument says little: models use it for rotary embeddings and still attend to the sample
before, carry a convolution or a recurrent state over, or ignore it. So two tiny samples go through the model that will
be trained, packed as training packs them and each alone as the user's collator would have given it.

What it does not see: what begins beyond nine tokens, or only in training mode. (Rotary scaling by the longest sample of
a row and attention in chunks are refused by configuration, :func:`odc.trainers.checks.check_rows`.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import OdcError
from odc.trainers.aside import aside
from odc.trainers.bundles import Microbatch
from odc.trainers.checks import refusal
from odc.trainers.packing import pack
from odc.trainers.probe_samples import Identity, ProbeSamples, probe_samples
from odc.trainers.rounding import Rounding, rounding

_NUM_ITEMS = 8.0
_SHUT_OFF = 1e9
"""Logits beyond it are those of tokens that a model never gives."""
_INSTEAD = "Train it without balancing, on padded batches: `odc run` alone does not change its loss"


def check_packing(trainer: Any, model: nn.Module, identity: Identity, example: Mapping[str, torch.Tensor]) -> None:
    """Refuse a model whose loss would change with packing. Nine tiny forwards; every rank must come here.

    Args:
        trainer: that trains.
        model: as the trainer calls it: wrapped, sharded, on its device.
        identity: of the same model before it was wrapped.
        example: a sample of the dataset as it is packed, for the columns that the collator gives.

    Raises:
        UnsupportedError: the model's name and what was measured, or why it could not be.
    """
    try:
        with aside(trainer, model), trainer.compute_loss_context_manager():
            problem = _Probe(trainer, model, identity, probe_samples(identity, example)).problem()
    except (OdcError, dist.DistError, torch.OutOfMemoryError):
        raise  # says nothing about packing
    except Exception as error:
        raise refusal(
            trainer,
            f"whether {identity.name} tells packed samples apart could not be measured: its forward on two samples of "
            f"4 and 5 tokens raised {type(error).__name__}: {error}. {_INSTEAD}",
        ) from error
    if problem is not None:
        raise refusal(trainer, f"{problem}. {_INSTEAD}")


@dataclass(frozen=True)
class _Probe:
    trainer: Any
    model: nn.Module
    identity: Identity
    samples: ProbeSamples

    def problem(self) -> str | None:
        """What is wrong with the model; None: nothing."""
        first, second = self.samples.first, self.samples.second
        row = self._logits(pack([first, second]))
        scale = rounding(self.trainer, self.model, row)
        return (
            self._influence_problem(row, scale)
            or self._alone_problem(row, scale)
            or self._loss_problem(row.shape[-1], scale.tolerance)
        )

    def _influence_problem(self, row: torch.Tensor, scale: Rounding) -> str | None:
        """[Note: To the bit] Whatever is in front of a sample, its logits come from the same kernels on the same
        shapes. So they are equal to the bit in any dtype, and a leak shows however weak it is: a new model's
        convolutions and recurrences give next to nothing, those of a trained one as much as its attention. Only what
        depends on all tokens of a row may round: experts, quantized activations, kernels that are not deterministic.
        """
        second = self.samples.second
        start = self.samples.first["input_ids"].shape[1]
        behind, again = (
            _finite(self._logits(pack([sample, second]))[:, start:])
            for sample in (self.samples.other_first, self.samples.first)
        )
        before = _finite(row[:, start:])
        exact = not self.identity.rounds_by_row and torch.equal(again, before)
        allowed = 0.0 if exact else scale.tolerance
        influence = scale.difference(behind, before)
        if influence <= allowed:
            return None
        return (
            f"{self.identity.name} does not tell packed samples apart by position_ids: other tokens in the sample "
            f"before change a sample's logits by {influence:.2g} of their size (allowed: {allowed:.2g})"
        )

    def _alone_problem(self, row: torch.Tensor, scale: Rounding) -> str | None:
        alone = [_finite(self._logits(self._alone(one))) for one in (self.samples.first, self.samples.second)]
        start = alone[0].shape[1]
        packed = (_finite(row[:, :start]), _finite(row[:, start:]))
        differences = [scale.difference(mine, its) for mine, its in zip(packed, alone, strict=True)]
        if not max(differences) <= scale.tolerance:  # also of nan
            return (
                f"{self.identity.name} does not tell packed samples apart by position_ids: the logits of two samples "
                f"in one row differ from those of each alone by {differences[0]:.2g} and {differences[1]:.2g} of "
                f"their size (rounding: at most {scale.tolerance:.2g})"
            )
        context = scale.difference(alone[1][:, start - 1], alone[0][:, start - 1])  # the same token in both
        if not context > (scale.tolerance if self.identity.rounds_by_row else 0.0):
            return (
                f"whether {self.identity.name} tells packed samples apart cannot be measured: its logits depend on "
                f"the tokens before by {context:.2g} of their size, no more than they may round"
            )
        return None

    def _loss_problem(self, num_classes: int, tolerance: float) -> str | None:
        both = (self.samples.first, self.samples.second)
        samples = [{**sample, "labels": sample["labels"] % num_classes} for sample in both]
        row = pack(samples)
        packed, half = self._loss(row, _NUM_ITEMS), self._loss(row, 2 * _NUM_ITEMS)
        if not abs(2 * half - packed) <= tolerance * abs(packed):
            return (
                f"the loss of {self.identity.name} is not a sum over tokens divided by num_items_in_batch: for "
                f"{_NUM_ITEMS:.0f} it is {packed:.4g}, for twice as many {half:.4g}, where half was expected. So the "
                "loss of a step depends on how samples share microbatches"
            )
        apart = sum(self._loss(self._alone(sample), _NUM_ITEMS) for sample in samples)
        if not abs(apart - packed) <= tolerance * abs(apart):
            return (
                f"the losses of {self.identity.name} do not add up: two samples in one row have {packed:.4g}, each "
                f"alone {apart:.4g} together. A packed sample's first label is left out, as nothing predicts it where "
                "labels are those of next tokens; and the loss must be a sum over tokens"
            )
        return None

    def _alone(self, sample: Microbatch) -> Microbatch:
        """What the user's collator gives for the sample: with a mask, without positions."""
        batch = {k: v for k, v in sample.items() if k != "position_ids"}
        if self.identity.takes_mask:
            batch["attention_mask"] = torch.ones_like(sample["input_ids"])
        return batch

    def _logits(self, batch: Microbatch) -> torch.Tensor:
        inputs = {k: v for k, v in batch.items() if k != "labels"}
        outputs = self.model(**self.trainer._prepare_inputs(inputs), **self.identity.options)
        logits = getattr(outputs, "logits", None)
        expected = tuple(batch["input_ids"].shape)
        if not torch.is_tensor(logits) or logits.shape[:-1] != expected:
            given = tuple(logits.shape) if torch.is_tensor(logits) else type(logits).__name__
            raise ValueError(f"its output has logits {given}; expected {(*expected, 'num_classes')}")
        return logits

    def _loss(self, batch: Microbatch, num_items: float) -> float:
        """As the trainer computes it."""
        count = torch.tensor(num_items, device=self.trainer.args.device)
        inputs = self.trainer._prepare_inputs(dict(batch))
        return float(self.trainer.compute_loss(self.model, inputs, num_items_in_batch=count))


def _finite(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.double()
    return logits.masked_fill(logits.abs() > _SHUT_OFF, 0.0)
