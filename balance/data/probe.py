"""Measures whether packed samples attend to each other in a model, by running the model. (Needs torch.)

An argument ``position_ids`` proves little: a model may use it for rotary embeddings and still attend to the previous
sample, carry over a convolution or a recurrent state, or ignore it. So two tiny samples go through the model, packed as
in training and each alone.

Not detected: effects that begin beyond nine tokens, or only in training mode.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from odc.balance.data.collate import concatenate
from odc.errors import UnsupportedError

Forward = Callable[[dict[str, torch.Tensor]], Any]
"""From a batch to the logits of its tokens, (batch, num_tokens, num_classes), or to an output that has ``logits``."""


def check_packing(model: nn.Module, forward: Forward | None = None, *, vocab_size: int | None = None) -> None:
    """Refuse a model in which packed samples attend to each other. Runs five tiny forwards; call it before training.

    If the model is sharded but not patched, call this on all ranks at the same time. Gradients, random states and each
    module's mode stay as they were. No graph is kept, so no minibatch begins.

    Args:
        model: the model to train, on its device.
        forward: calls the model as the training loop does: takes a row of :func:`pack_collate` on the model's device
            and returns logits. Default: ``model(input_ids=row["input_ids"], position_ids=row["position_ids"])``. Pass
            all arguments that the loop passes: models of transformers need ``use_cache=False``.
        vocab_size: token ids are smaller than this; default: that of ``model.config``.

    Raises:
        UnsupportedError: packed samples attend to each other, or this cannot be measured; the message says what was
            measured.

    Example:
        >>> def forward(row):
        ...     return model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits
        >>> odc.balance.check_packing(model, forward)
        >>> odc.balance.check_packing(model)  # with transformers' default, a cache
        Traceback (most recent call last):
            ...
        odc.errors.UnsupportedError: ... does not tell packed samples apart by position_ids: ...
    """
    device = next(model.parameters()).device

    def logits(batch: dict[str, torch.Tensor]) -> Any:
        row = {name: column.to(device) for name, column in batch.items()}
        if forward is not None:
            return forward(row)
        return model(input_ids=row["input_ids"], position_ids=row["position_ids"])

    identity = Identity.of(model, vocab_size)
    with aside(model, device):
        problem = (
            Probe(model, identity, logits, ProbeSamples.of(identity), lambda one: concatenate([one])).measure().problem
        )
    if problem is not None:
        raise UnsupportedError(
            f"{problem}. Call it with use_cache=False (transformers looks for packed samples only where nothing is "
            "cached), or with what its attention needs to tell samples apart; or train on padded batches"
        )


# Forwards beside the training, of which nothing is left behind


@contextmanager
def aside(model: nn.Module, device: torch.device) -> Iterator[None]:
    """In the block ``model`` can be called as in an evaluation.

    Without gradients, so nothing is reduced and no minibatch begins. Behind it random states and every module's mode
    are what they were.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = [] if device.type in ("cpu", "mps") else [device]
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type), _uncompiled():
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

    @classmethod
    @contextmanager
    def watched(cls, model: nn.Module) -> Iterator[Callable[[torch.Tensor], Rounding]]:
        """In the block ``model`` computes some logits; what is yielded gives their rounding, by all dtypes that modules
        have put out meanwhile: FSDP's mixed precision and autocast may lie inside, and the logits be float32 again."""
        dtypes = {parameter.dtype for parameter in model.parameters()}

        def note(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                dtypes.add(output.dtype)

        def of(logits: torch.Tensor) -> Rounding:
            found = [torch.finfo(dtype).eps for dtype in {logits.dtype, *dtypes} if dtype.is_floating_point]
            return cls(max(*found, 0.0 if logits.device.type == "cpu" else _TF32))

        with contextlib.ExitStack() as stack:
            for module in model.modules():
                stack.callback(module.register_forward_hook(note).remove)
            yield of

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


def _centred(logits: torch.Tensor) -> torch.Tensor:
    return logits - logits.mean(dim=-1, keepdim=True)


# Tiny samples that any language model takes


_NUM_TOKENS = 12


@dataclass(frozen=True)
class Identity:
    """What is asked of a model before it is wrapped, after which it may have another class and another ``forward``."""

    name: str
    vocab_size: int
    special: frozenset[int]
    """Tokens with a meaning of their own: padding, images."""

    takes_mask: bool
    rounds_by_row: bool
    """What a token's logits round to depends on the other tokens of the row: those that go to the same expert, or those
    that are quantized by one scale."""

    @classmethod
    def of(cls, model: nn.Module, vocab_size: int | None = None) -> Identity:
        """Of a model with a configuration as transformers' are, or of whatever has a ``vocab_size``.

        Raises:
            UnsupportedError: its configuration does not tell the size of the vocabulary.
        """
        whole: Any = getattr(model, "config", None)
        config: Any = whole.get_text_config() if hasattr(whole, "get_text_config") else whole
        size = vocab_size or getattr(config, "vocab_size", None)
        if size is None:
            raise UnsupportedError(
                f"whether {type(model).__name__} tells packed samples apart cannot be measured: its config is a "
                f"{type(config).__name__}; expected a transformers configuration with a vocab_size"
            )
        values = {**_values(whole), **_values(config)}
        special = [value for name, value in values.items() if name.endswith(("_token_id", "_token_index"))]
        has_experts = any("expert" in name and isinstance(value, int) and value > 1 for name, value in values.items())
        return cls(
            name=type(model).__name__,
            vocab_size=int(size),
            special=frozenset(v for v in special if isinstance(v, int)),
            takes_mask="attention_mask" in inspect.signature(type(model).forward).parameters,
            rounds_by_row=has_experts or bool(values.get("quantization_config")),
        )

    def spread(self, count: int) -> list[int]:
        """Ordinary tokens from all over the vocabulary."""
        usable = [token for token in range(self.vocab_size) if token not in self.special]
        return [usable[(2 * i + 1) * len(usable) // (2 * count)] for i in range(count)]


def _values(config: Any) -> Mapping[str, Any]:
    return config.to_dict() if hasattr(config, "to_dict") else getattr(config, "__dict__", {})


Sample = Mapping[str, torch.Tensor]
"""``input_ids``, ``labels`` and further columns, (num_tokens,)."""


@dataclass(frozen=True)
class ProbeSamples:
    """The same on all ranks. Every token has a label."""

    first: Sample
    """Four tokens."""

    second: Sample
    """Five others, except the fourth: what a model makes of it in each sample tells how far it depends on the tokens
    before."""

    other_first: Sample
    """Four others again, to stand in the place of the first."""

    @classmethod
    def of(cls, identity: Identity, further: Sample | None = None) -> ProbeSamples:
        """For this model. ``further``: columns besides, of another sample of any length."""
        a, b, c, d, *others = identity.spread(_NUM_TOKENS)

        def sample(*tokens: int) -> Sample:
            ids = torch.tensor(tokens, device="cpu")
            at = torch.arange(len(tokens), device="cpu")
            columns = {name: column[at % len(column)] for name, column in (further or {}).items()}
            return {**columns, "input_ids": ids, "labels": ids.clone()}

        return cls(sample(a, b, c, d), sample(*others[:3], d, others[3]), sample(*others[4:]))


# The question


_SHUT_OFF = 1e9
"""Logits beyond it are those of tokens that a model never gives."""


class Measured(NamedTuple):
    """What a probe has found."""

    problem: str | None
    """What is wrong with the model; None: its samples see nothing of one another."""

    num_classes: int
    tolerance: float
    """Of numbers that this model computes, relative."""


@dataclass(frozen=True)
class Probe:
    """To be used :func:`aside`, on all ranks of a model that is sharded without ODC."""

    model: nn.Module
    identity: Identity
    forward: Forward
    samples: ProbeSamples
    alone: Callable[[Sample], dict[str, torch.Tensor]]
    """A batch of one sample, as the model would have been given it without packing."""

    def measure(self) -> Measured:
        with Rounding.watched(self.model) as rounding:
            row = self._logits(self.row(self.samples.first))
        scale = rounding(row)
        problem = self._influence_problem(row, scale) or self._alone_problem(row, scale)
        return Measured(problem, row.shape[-1], scale.tolerance)

    def row(self, first: Sample) -> dict[str, torch.Tensor]:
        """``first``, and the second sample behind it."""
        return concatenate([first, self.samples.second])

    def _influence_problem(self, row: torch.Tensor, scale: Rounding) -> str | None:
        """[Note: To the bit] Whatever is in front of a sample, its logits come from the same kernels on the same
        shapes. So they are equal to the bit in any dtype, and a leak shows however weak it is: a new model's
        convolutions and recurrences give next to nothing, those of a trained one as much as its attention. Only what
        depends on all tokens of a row may round: experts, quantized activations, kernels that are not deterministic.
        """
        start = self.samples.first["input_ids"].numel()
        behind, again = (
            self._logits(self.row(first))[:, start:] for first in (self.samples.other_first, self.samples.first)
        )
        before = row[:, start:]
        exact = not self.identity.rounds_by_row and torch.equal(again, before)
        allowed = 0.0 if exact else scale.tolerance
        influence = scale.difference(behind.double(), before.double())
        if influence <= allowed:
            return None
        return (
            f"{self.identity.name} does not tell packed samples apart by position_ids: other tokens in the sample "
            f"before change a sample's logits by {influence:.2g} of their size (allowed: {allowed:.2g})"
        )

    def _alone_problem(self, row: torch.Tensor, scale: Rounding) -> str | None:
        alone = [self._logits(self.alone(one)).double() for one in (self.samples.first, self.samples.second)]
        start = alone[0].shape[1]
        packed = (row[:, :start].double(), row[:, start:].double())
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

    def _logits(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = self.forward(batch)
        logits = output if torch.is_tensor(output) else getattr(output, "logits", None)
        expected = tuple(batch["input_ids"].shape)
        if not torch.is_tensor(logits) or logits.shape[:-1] != expected:
            given = tuple(logits.shape) if torch.is_tensor(logits) else type(logits).__name__
            raise ValueError(f"its output has logits {given}; expected {(*expected, 'num_classes')}")
        return logits.masked_fill(logits.abs() > _SHUT_OFF, 0.0)
