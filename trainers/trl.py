"""Balanced minibatches inside TRL's trainers of rollouts and pairs: batches are balanced after they were made.

Such a trainer makes its inputs itself (it generates, scores, runs a reference model), and its loss reads them. So its
loader and inputs do not change. Before the first batch of an optimizer step, all batches of the step are made; samples
change ranks and are packed; and a bundle of microbatches replaces each batch.

A sample holds what its row of a batch has, without padding; for pairs, both rows. The loss of a microbatch is the
trainer's loss, times the fraction of the step's samples in it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from odc.balance.data.batch import balance_batch
from odc.balance.data.collate import IGNORED
from odc.balance.data.probe import Identity, Rounding
from odc.errors import UnsupportedError
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Bundle, Microbatch, StepEnd, Tally, cut
from odc.trainers.models import base_model, check_rows, check_uneven, configs_of, default_cost, gather_head
from odc.trainers.options import BalanceOptions
from odc.trainers.overrides import Overrides, RankMetrics
from odc.trainers.probe import refusal, refuse_packing

Sample = dict[str, Any]


# What a trainer trains on


_ROLLOUTS = "rollouts that it makes itself"


class Form(ABC):
    """Of one kind of trainer."""

    trains_on: ClassVar[str]
    """For messages."""

    pads_left: ClassVar[bool] = False
    has_scores: ClassVar[bool] = False
    """The model gives one number for a sequence."""

    whole_step: ClassVar[tuple[str, ...]] = ()
    """Losses that the trainer divides by a number of the whole step; others are means over a microbatch's samples."""

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
    def batch_of(self, samples: Sequence[Sample]) -> Microbatch:
        """The inverse of :meth:`samples_of`, of any samples of an optimizer step."""


class Rollouts(Form):
    """``GRPOTrainer``: prompts padded on the left, completions padded on the right."""

    trains_on = _ROLLOUTS
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

    def batch_of(self, samples: Sequence[Sample]) -> Microbatch:
        found: Microbatch = {}
        for name, value in samples[0].items():
            values = [sample[name] for sample in samples]
            if name == "num_items_in_batch":
                found[name] = value
            elif value.dim() == 0 or (name == "importance_sampling_ratio" and all(v.numel() == 1 for v in values)):
                found[name] = torch.stack(values)
            else:
                left = name in ("prompt_ids", "prompt_mask")
                found[name] = _padded_rows(values, self._PADDED_BY.get(name, 0), left=left)
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

    def batch_of(self, samples: Sequence[Sample]) -> Microbatch:
        found: Microbatch = {}
        for name, value in samples[0].items():
            values = [sample[name] for sample in samples]
            if isinstance(value, tuple):
                rows = [both[side] for side in (0, 1) for both in values]
                found[name] = _padded_rows(rows, 0)
                if name == "input_ids":
                    found["attention_mask"] = _padded_rows([torch.ones_like(row) for row in rows], 0)
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


def _padded_rows(rows: Sequence[torch.Tensor], value: int, *, left: bool = False) -> torch.Tensor:
    side = "left" if left else "right"
    return nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value, padding_side=side)


_TRAINS_ON: dict[str, Form | str] = {
    "GRPOTrainer": Rollouts(),
    "DPOTrainer": Preferences(),
    "RewardTrainer": Comparisons(),
    "RLOOTrainer": _ROLLOUTS,
    "PPOTrainer": _ROLLOUTS,
    "OnlineDPOTrainer": _ROLLOUTS,
    "DistillationTrainer": _ROLLOUTS,
    "GKDTrainer": _ROLLOUTS,
    "ORPOTrainer": Pairs.trains_on,
    "CPOTrainer": Pairs.trains_on,
    "KTOTrainer": "answers that are compared within a batch",
}
"""What is no sequence of tokens with labels, by the names of TRL's classes, which forks keep."""
_KEPT = ("compute_loss", "_compute_loss", "_prepare_inputs", "training_step", "_get_per_token_logps_and_entropies")


def form_of(trainer: Any) -> Form | None:
    """What a trainer of TRL's, or one made of it, trains on; None: sequences of tokens with labels.

    Raises:
        UnsupportedError: it cannot be packed one by one.
    """
    known = next((one for one in type(trainer).__mro__ if one.__name__ in _TRAINS_ON), None)
    if known is None:
        return None
    found = _TRAINS_ON[known.__name__]
    if isinstance(found, str):
        raise refusal(
            trainer,
            f"a {known.__name__} trains on {found}, not on samples that can be packed one by one. What works is "
            "`odc run` without --balance and --online (or odc.patch_fsdp alone): it trains as under plain FSDP",
        )
    return found


def form_problem(trainer: Any, form: Form) -> str | None:
    """What is in the way of balancing a trainer of :func:`form_of`; None: nothing."""
    known = next(one for one in type(trainer).__mro__ if one.__name__ in _TRAINS_ON)
    trl: Any = sys.modules.get("trl")
    if trl is None or getattr(trl, known.__name__, None) is not known:
        return f"it is made of a {known.__name__} that is not TRL's, and how that computes its loss is not known"
    for name in _KEPT:
        mine = inspect.getattr_static(type(trainer), name, None)
        if mine is not inspect.getattr_static(known, name, None):
            return f"{name} is overridden, and what it does with a batch is not known; use {known.__name__} itself"
    return form.option_in_the_way(trainer)


# Models on packed rows


_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of what TRL's fused head returns, (batch, num_tokens - 1): of all tokens but the first."""


class PackedModel:
    """Takes the place of ``model`` in a call; everything else is the model's.

    TRL's trainers of rollouts and pairs call the model themselves, and use its output by rows of a padded batch. This
    takes and returns such rows; inside, the tokens of all rows are packed without padding.

    Args:
        model: a language model with TRL's fused head, or one that scores sequences.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As the model's, where no padding is between tokens that are attended to. (batch, num_tokens) each."""
        mask = attention_mask.bool()
        positions = (mask.cumsum(dim=1) - 1)[mask][None]
        row = {"input_ids": input_ids[mask][None], "position_ids": positions}
        if labels is None:
            return self._scored(row, input_ids, mask, options)
        own = labels[mask][None].masked_fill(positions == 0, IGNORED)
        gather_head(self._model)
        output = copy.copy(self._model(**row, labels=own, **options))
        for name in _PER_TOKEN:
            if (value := output.get(name)) is not None:
                per_token = torch.cat([value.new_zeros(1), value[0]])
                output[name] = value.new_zeros(mask.shape).masked_scatter(mask, per_token)[:, 1:]
        return output

    def _scored(
        self, row: dict[str, torch.Tensor], input_ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
    ) -> Any:
        """The scores of all samples: the model's head gives them for each token, and the model takes one of these.

        [Note: Through the model's output] What the head's hook returns is taken by the model as scores of tokens, each
        of which holds those of all samples. So they leave through the output of the whole model, where FSDP expects the
        gradient to come back.
        """
        model = base_model(self._model)
        padding = model.config.get_text_config().pad_token_id
        counts = mask if padding is None else mask & (input_ids != padding)  # as the model looks for the last token
        places = torch.arange(mask.shape[1], device=mask.device)
        last = (places * counts).argmax(dim=1)
        ends = (mask.flatten().cumsum(dim=0) - 1).view(mask.shape)[torch.arange(len(mask), device=mask.device), last]

        def all_scores(module: nn.Module, args: Any, scores: torch.Tensor) -> torch.Tensor:
            return scores[0, ends, 0].expand(1, scores.shape[1], -1)

        handle = model.score.register_forward_hook(all_scores)
        try:
            output = copy.copy(self._model(**row, **options))
        finally:
            handle.remove()
        output["logits"] = output["logits"].view(-1, 1)
        return output


def check_packed_model(trainer: Any, model: nn.Module, identity: Identity, *, left: bool, scores: bool) -> None:
    """Refuse a model whose outputs change with packing, or with padding on the left. Four tiny forwards; every rank
    must come here.

    Args:
        model: as the trainer calls it: wrapped, sharded, on its device.
        identity: of the same model before it was wrapped.
        left: the trainer pads on the left, too.
        scores: the model gives one score for a sequence.

    Raises:
        UnsupportedError: the model's name and what was measured, or why it could not be.
    """
    with trainer.accelerator.autocast():
        problem_of = partial(_packing_problem, trainer, model, identity, left, scores)
        refuse_packing(trainer, model, identity, problem_of)


def _packing_problem(trainer: Any, model: nn.Module, identity: Identity, left: bool, scores: bool) -> str | None:
    padding, *tokens = identity.spread(14)
    first, second, other = tokens[:4], tokens[4:9], tokens[9:]
    if scores:  # by which the model finds the last token
        padding = base_model(model).config.get_text_config().pad_token_id
    device = trainer.args.device

    def outputs(called: Any, *samples: list[int]) -> torch.Tensor:
        """Of the last sample: one number per token, or one."""
        width = max(map(len, samples)) + 2
        ids = torch.tensor([_padded(one, width, padding, left) for one in samples], device=device)
        mask = torch.tensor([_padded([1] * len(one), width, 0, left) for one in samples], device=device)
        if scores:
            found: torch.Tensor = called(input_ids=ids, attention_mask=mask, use_cache=False).logits[-1:, 0]
            return found.double()
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, : width - 3] = IGNORED if left else labels[:, : width - 3]
        found = called(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[-1]
        return found[labels[-1, 1:] != IGNORED].double()

    packed = PackedModel(model)
    with Rounding.watched(model) as rounding:
        expected, together = outputs(model, first, second), outputs(packed, first, second)
    scale = rounding(expected)
    allowed, differs = scale.tolerance, _relative if scores else scale.difference
    difference = differs(together, expected)
    if not difference <= allowed:  # also of nan
        padded = " and by the padding on the left of their prompts" if left else ""
        return (
            f"{identity.name} does not tell packed samples apart by position_ids{padded}: what it gives for a sample "
            f"in a packed row differs by {difference:.2g} of its size from what it gives in a padded batch (rounding: "
            f"at most {allowed:.2g})"
        )
    # As in odc.balance.data.probe: equal to the bit, unless the model rounds by the tokens of a row.
    again, behind = outputs(packed, first, second), outputs(packed, other, second)
    exact = not identity.rounds_by_row and torch.equal(again, together)
    influence = differs(behind, together)
    if influence > (0.0 if exact else allowed):
        return (
            f"{identity.name} does not tell packed samples apart by position_ids: other tokens in the sample before "
            f"change what it gives for a sample by {influence:.2g} of its size"
        )
    return None


def _padded(values: list[int], width: int, value: int, left: bool) -> list[int]:
    """On the right, or on both sides."""
    missing = [value] * (width - len(values))
    return [*missing[1:], *values, *missing[:1]] if left else [*values, *missing]


def _relative(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm().clamp(min=1e-30))


# Steps


class StepBatches:
    """The methods that take the place of a trainer's own while it trains."""

    def __init__(self, trainer: Any, form: Form, options: BalanceOptions, tally: Tally, overrides: Overrides) -> None:
        self._trainer = trainer
        self._form = form
        self._options = options
        self._tally = tally
        self._identity = Identity.of(base_model(trainer.model))
        self._configs = configs_of(trainer.model)
        self._cost = options.cost or default_cost(self._configs[0])
        self._ranks = DataRanks.of(trainer.accelerator)
        self._is_checked = False
        self._batches: list[Any] = []
        """Of this optimizer step, as the loader gave them."""

        self._bundles: list[Bundle] = []
        """Of this optimizer step, that are still to be trained on."""

        self._metrics = RankMetrics(trainer, overrides, self._ranks.num_partners(trainer.accelerator))
        self._get_batch_samples = overrides.replace("get_batch_samples", self.get_batch_samples)
        self._prepare_inputs = overrides.replace("_prepare_inputs", self.prepare_inputs)
        self._compute_loss = overrides.replace("compute_loss", self.compute_loss)
        self._logps: Any = None
        if hasattr(trainer, "_get_per_token_logps_and_entropies"):
            self._logps = overrides.replace("_get_per_token_logps_and_entropies", self.per_token_logps)
        elif getattr(trainer, "ref_model", None) is not None:
            overrides.replace("ref_model", PackedModel(trainer.ref_model))

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Which batches an optimizer step has."""
        found = self._get_batch_samples(*args, **kwargs)
        self._batches, self._bundles = list(found[0]), []
        return found

    def prepare_inputs(self, inputs: Any) -> Any:
        """A bundle in place of a batch; all of a step are made with the first one."""
        if not self._batches or not self._trainer.model.training:
            return self._prepare_inputs(inputs)
        if not self._bundles:
            self._bundles = self._begin_step()
        bundle = self._bundles.pop(0)
        if bundle.end is not None:
            self._batches = []
        self._tally.add(bundle)
        return bundle

    def per_token_logps(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, on packed rows."""
        return self._logps(PackedModel(model), *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Of all microbatches of a bundle. The backward of the last one is the trainer's."""
        trainer = self._trainer
        if not isinstance(inputs, Bundle):
            return self._compute_loss(model, inputs, *args, **kwargs)
        called = model if self._logps is not None else PackedModel(model)
        accumulated = 1 if trainer.loss_is_scaled_for_ga else trainer.current_gradient_accumulation_steps
        total = torch.zeros((), device=trainer.args.device)
        last = total.clone().requires_grad_()  # of a bundle without microbatches
        for number, one in enumerate(inputs.microbatches, 1):
            loss = self._metrics.measured(one["num_loss_tokens"], called, one["inputs"], *args, **kwargs)
            last = one["weight"] * loss
            if number < len(inputs.microbatches):
                trainer.accelerator.backward(last / accumulated)
                total += last.detach()
        return last + total

    def _begin_step(self) -> list[Bundle]:
        if not self._is_checked:
            self._check(self._trainer.model_wrapped)
            self._is_checked = True
        windows = self._windows()
        num_batches = len(self._batches)
        rows: list[tuple[list[Sample], int]] = []
        num_samples = 0
        for samples in windows:
            lengths = [self._form.lengths_of(sample) for sample in samples]
            batch = balance_batch(
                samples,
                lengths,
                cost=self._cost,
                max_tokens=self._options.max_tokens,
                policy=self._options.policy,
                microbatch_cost=self._options.microbatch_cost,
                group=self._ranks.group,
            )
            check_rows(self._configs, int(batch.plan.lengths.max()), batch.plan.max_tokens)
            num_samples += batch.num_samples
            # A rank that has none runs one of its own that counts nothing, as all ranks do where collectives go.
            dummy = samples[min(range(len(samples)), key=lambda i: sum(lengths[i]))]
            rows += [(one or [dummy], len(one)) for one in batch.microbatches or [[]]]
        if num_samples != self._ranks.world_size * sum(map(len, windows)):
            raise UnsupportedError(
                f"an optimizer step has {num_samples} samples, and {sum(map(len, windows))} of them were on one of "
                f"{self._ranks.world_size} ranks: the trainer's loss is a mean of means over batches, which needs as "
                "many in each; set dataloader_drop_last=True"
            )
        share = num_batches * self._ranks.world_size / num_samples
        whole = getattr(self._trainer, "loss_type", None) in self._form.whole_step
        microbatches = [
            {
                "inputs": self._form.batch_of(one),
                "weight": float(count > 0) if whole else count * share,
                "num_loss_tokens": sum(map(self._form.num_loss_tokens_of, one)) if count else 0,
            }
            for one, count in rows
        ]
        bundles = [Bundle(part) for part in cut(microbatches, num_batches)]
        bundles[0].planned = len(microbatches)
        bundles[-1].end = StepEnd()
        return bundles

    def _check(self, model: nn.Module) -> None:
        if not self._options.equal_counts and self._ranks.world_size > 1:
            check_uneven(model, self._options.name)
        check_packed_model(
            self._trainer, model, self._identity, left=self._form.pads_left, scores=self._form.has_scores
        )

    def _windows(self) -> list[list[Sample]]:
        """The samples of this rank in this optimizer step, apart where they come from several generations."""
        trainer = self._trainer
        step = getattr(trainer, "_step", None)  # of one that generates: batches until now, by which it does so
        windows: dict[int, list[Sample]] = {}
        for number, batch in enumerate(self._batches):
            window = 0
            if step is not None:
                trainer._step = step + number
                window = trainer._step // trainer.args.steps_per_generation
            windows.setdefault(window, []).extend(self._form.samples_of(self._prepare_inputs(batch)))
        if step is not None:
            trainer._step = step
        return list(windows.values())
