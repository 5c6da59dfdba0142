"""Whether a model's packed samples are told apart and its losses add up: asked of the model itself.

That ``position_ids`` is an argument says little: models use it for rotary embeddings and still attend to the sample
before, carry a convolution or a recurrent state over, or ignore it. So two tiny samples go through the model that will
be trained, packed as training packs them and each alone as the user's collator would have given it.

What it does not see: what begins beyond nine tokens, or only in training mode. (Rotary scaling by the longest sample of
a row and attention in chunks are refused by configuration, :func:`odc.trainers.checks.check_rows`.)
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import OdcError
from odc.trainers.batches import Microbatch
from odc.trainers.checks import base_model, refusal
from odc.trainers.overrides import Overrides
from odc.trainers.packing import pack

# Forwards beside the training, of which nothing is left behind


@contextmanager
def aside(trainer: Any, model: nn.Module) -> Iterator[None]:
    """In the block ``model`` and ``trainer.compute_loss`` can be called as in an evaluation.

    Without gradients, so nothing is reduced and no minibatch begins. Behind it random states, every module's mode and
    TRL's metrics are what they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    device: torch.device = trainer.args.device
    devices = [] if device.type in ("cpu", "mps") else [device]
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices, device_type=device.type),
        _uncompiled(),
        Overrides(trainer) as of_trainer,
        Overrides(trainer.accelerator) as of_accelerator,
    ):
        if hasattr(trainer, "_metrics"):
            of_trainer.set("_metrics", copy.deepcopy(trainer._metrics))
            of_accelerator.set("gather_for_metrics", lambda input_data, *_, **__: input_data)
        try:
            for module, _ in modes:
                module.training = False  # not eval(): some modules do more in it (merge adapters)
            yield
        finally:
            for module, training in modes:
                module.training = training


def _uncompiled() -> contextlib.AbstractContextManager[Any]:
    """A few tiny shapes are not worth compiling, and each would count towards dynamo's limit of recompilations."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


# How much two computations of the same logits may differ


_LEAST, _MOST = 2e-4, 0.15
"""A tolerance's range: positions that are not honoured show by 0.3 and more."""

_TF32 = 2.0**-10
"""Rounding of float32 matrix products on GPUs that may use TF32."""


@dataclass(frozen=True)
class Rounding:
    """Of logits computed in several dtypes, of which the coarsest counts."""

    epsilon: float
    """From 1 to the next number."""

    @property
    def tolerance(self) -> float:
        """For :meth:`difference` of a row and a shorter one, which other kernels may compute."""
        return min(max(_LEAST, 8 * self.epsilon), _MOST)

    def difference(self, given: torch.Tensor, expected: torch.Tensor) -> float:
        """Of the token that differs most, relative to its logits' size.

        Logits (..., num_classes) in float64. Their mean is left out, since no loss sees it, except for its rounding:
        some models' logits are all near -100.
        """
        size = _centred(expected).norm(dim=-1) + expected.norm(dim=-1) * (self.epsilon / self.tolerance)
        return float((_centred(given - expected).norm(dim=-1) / size).max())


def rounding(trainer: Any, model: nn.Module, logits: torch.Tensor) -> Rounding:
    """Of this model as this trainer runs it: its parameters' dtypes, autocast, FSDP's mixed precision."""
    dtypes: set[torch.dtype | None] = {logits.dtype, *(p.dtype for p in model.parameters())}
    dtypes.add({"bf16": torch.bfloat16, "fp16": torch.float16}.get(trainer.accelerator.mixed_precision))
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    dtypes.add(getattr(getattr(plugin, "mixed_precision_policy", None), "param_dtype", None))
    epsilons = [torch.finfo(dtype).eps for dtype in dtypes if dtype is not None and dtype.is_floating_point]
    return Rounding(max(*epsilons, 0.0 if logits.device.type == "cpu" else _TF32))


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(dim=-1, keepdim=True)


# Tiny samples that any language model takes


_NUM_TOKENS = 12


@dataclass(frozen=True)
class Identity:
    """What is asked of a model before it is wrapped, after which it has another class and another ``forward``."""

    name: str
    vocab_size: int
    special: frozenset[int]
    """Tokens with a meaning of their own: padding, images."""

    takes_mask: bool
    rounds_by_row: bool
    """What a token's logits round to depends on the other tokens of the row: those that go to the same expert, or those
    that are quantized by one scale."""

    options: Mapping[str, Any]
    """Arguments with which the trainer calls the model besides the batch."""


@dataclass(frozen=True)
class ProbeSamples:
    """As :func:`~odc.trainers.packing.collate_alone` gives them."""

    first: Microbatch
    """Four tokens."""

    second: Microbatch
    """Five others, except the fourth: what a model makes of it in each sample tells how far it depends on the tokens
    before."""

    other_first: Microbatch
    """Four others again, to stand in the place of the first."""


def identity_of(trainer: Any) -> Identity:
    """Of the trainer's model.

    Raises:
        UnsupportedError: its configuration does not tell the size of the vocabulary.
    """
    model = base_model(trainer.model)
    whole: Any = getattr(model, "config", None)
    config: Any = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
    if whole is None or getattr(config, "vocab_size", None) is None or not hasattr(config, "to_dict"):
        raise refusal(
            trainer,
            f"whether {type(model).__name__} tells packed samples apart cannot be measured: its config is a "
            f"{type(config).__name__}; expected a transformers configuration with a vocab_size",
        )
    values = {**whole.to_dict(), **config.to_dict()}
    special = [value for name, value in values.items() if name.endswith(("_token_id", "_token_index"))]
    return Identity(
        name=type(model).__name__,
        vocab_size=int(config.vocab_size),
        special=frozenset(v for v in special if isinstance(v, int)),
        rounds_by_row=_rounds_by_row(values),
        takes_mask="attention_mask" in inspect.signature(type(model).forward).parameters,
        options={"use_cache": False} if _is_trls(trainer) else {},
    )


def probe_samples(identity: Identity, example: Mapping[str, torch.Tensor]) -> ProbeSamples:
    """The same on all ranks. Every token has a label. Columns that only the collator knows come from ``example``."""
    a, b, c, d, *others = spread(identity, _NUM_TOKENS)
    first, second, other = [a, b, c, d], [*others[:3], d, others[3]], others[4:]
    return ProbeSamples(*(_sample(tokens, example) for tokens in (first, second, other)))


def spread(identity: Identity, count: int) -> list[int]:
    """Ordinary tokens from all over the vocabulary."""
    usable = [token for token in range(identity.vocab_size) if token not in identity.special]
    return [usable[(2 * i + 1) * len(usable) // (2 * count)] for i in range(count)]


def _sample(tokens: list[int], example: Mapping[str, torch.Tensor]) -> Microbatch:
    ids = torch.tensor([tokens], device="cpu")
    at = torch.arange(len(tokens), device="cpu")
    own = {"input_ids": ids, "labels": ids.clone(), "position_ids": at[None]}
    further = {k: v[:, at % v.shape[1]] for k, v in example.items() if k not in own}
    return {**further, **own}


def _rounds_by_row(config: Mapping[str, Any]) -> bool:
    experts = [value for name, value in config.items() if "expert" in name and isinstance(value, int)]
    return any(value > 1 for value in experts) or bool(config.get("quantization_config"))


def _is_trls(trainer: Any) -> bool:
    """TRL switches the cache off in every call, and not in the configuration."""
    if "trl" not in sys.modules:
        return False
    from trl import SFTTrainer

    return isinstance(trainer, SFTTrainer)


# The question


_NUM_ITEMS = 8.0
_SHUT_OFF = 1e9
"""Logits beyond it are those of tokens that a model never gives."""
INSTEAD = "Train it without balancing, on padded batches: `odc run` alone does not change its loss"


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
    with aside(trainer, model), trainer.compute_loss_context_manager():
        refuse_packing(
            trainer, identity, lambda: _Probe(trainer, model, identity, probe_samples(identity, example)).problem()
        )


def refuse_packing(trainer: Any, identity: Identity, problem_of: Callable[[], str | None]) -> None:
    """Refuse a model for what ``problem_of`` finds, or because that could not be found out.

    Raises:
        UnsupportedError: the model's name and what was measured, or why it could not be.
    """
    try:
        problem = problem_of()
    except (OdcError, dist.DistError, torch.OutOfMemoryError):
        raise  # says nothing about packing
    except Exception as error:
        raise refusal(
            trainer,
            f"whether {identity.name} tells packed samples apart could not be measured: its forward on two samples of "
            f"4 and 5 tokens raised {type(error).__name__}: {error}. {INSTEAD}",
        ) from error
    if problem is not None:
        raise refusal(trainer, f"{problem}. {INSTEAD}")


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
