"""Run a minibatch of several modalities, forward and backward, as its schedule says. (Needs torch.)"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from odc.balance.layout import FlatMicrobatches
from odc.balance.multimodal.carriers import Carrier, InStep, Mover, gradient_cargo, output_cargo, whole_cargo
from odc.balance.multimodal.payload import SampleParts, Tensors, from_bytes, from_named, named, to_bytes
from odc.balance.multimodal.schedule import MinibatchSchedule
from odc.errors import shown

Text = dict[str, torch.Tensor]
Outputs = dict[str, list[torch.Tensor]]
Span = Callable[[str, str], AbstractContextManager[object]]
"""Given the kind and the name of what is done inside."""


@dataclass(frozen=True)
class Encoder:
    """How to run one encoder in a minibatch.

    Example:
        >>> encoder = Encoder(encode_images, width=hidden_size, dummy=lambda: (torch.zeros(2, 6),))
        >>> [rows.shape for rows in encoder.encode([encoder.dummy()])]  # of each item, (rows, width)
        [torch.Size([2, 8])]
    """

    encode: Callable[[list[Tensors]], list[torch.Tensor]]
    """Returns the outputs of items, (rows of the item, width) each, in the same order. Items that another rank has read
    are in host memory: move them to your device."""

    width: int
    """Number of elements of a row of the outputs: the hidden size of the language model."""

    dtype: torch.dtype = torch.float32
    """dtype of the outputs and of their gradients."""

    dummy: Callable[[], Tensors] | None = None
    """Makes an item for a microbatch without items. Needed with ``comm="collective"``, where every rank runs every
    microbatch. Its output is not used."""


@dataclass(frozen=True, eq=False)
class MultimodalMinibatch:
    """What one rank gets for one minibatch; from a :class:`~odc.balance.MultimodalLoader`."""

    schedule: MinibatchSchedule
    rank: int
    parts: list[SampleParts]
    """The samples that this rank has read, ``schedule.samples.source[rank]``."""

    loss_scale: float = 1.0
    """Factor for summed losses, see :func:`odc.balance.loss_scale`."""

    num_loss_tokens: int = 0
    num_samples: int = 0


def no_span(kind: str, name: str) -> AbstractContextManager[object]:
    """Records nothing."""
    return nullcontext()


def run_minibatch(
    minibatch: MultimodalMinibatch,
    encoders: Mapping[str, Encoder],
    language: Callable[[list[Text], Outputs], torch.Tensor],
    *,
    mover: Mover | None = None,
    span: Span = no_span,
) -> list[torch.Tensor]:
    """Run forward and backward of all phases of this rank in a minibatch. Collective. Under ``torch.no_grad()`` on all
    ranks, only the forward runs (evaluation).

    Every encoder runs on its own batch of items. Its outputs go to the ranks that have the sequences, where the
    language model runs its microbatches, forward and backward. The gradients of the outputs go back and through the
    encoders. There is one exchange per encoder and direction. Afterwards gradients of parameters are in the same state
    as after the last backward of a usual gradient accumulation.

    Args:
        minibatch: this rank's part of the minibatch.
        encoders: one encoder for each phase of the orchestrator.
        language: returns the final loss of one microbatch (summed, and scaled by ``minibatch.loss_scale``). It gets the
            columns of the samples, and for each modality the outputs of all items of these samples, in order. With
            ``comm="collective"`` it may get no samples, and must then return a loss of 0 computed by the model.
        mover: moves the data; default: all-to-all of the default process group.
        span: records the times of this rank's phases.

    Returns:
        The losses of this rank's microbatches, detached.

    Raises:
        ValueError: an encoder is missing, or its outputs differ from the items in number, or from the plan in shape
            (the message names phase, item and sample); or the mover belongs to other ranks.
        Exception: any error of an encoder or the language model. With an :class:`OnDemand` mover the other ranks are
            told of the error, and the mover's exchange of items ends on all ranks.

    Example:
        >>> from odc.balance.multimodal import OnDemand, channels_of
        >>> phases = [Phase("image", image_cost), Phase("audio", audio_cost)]
        >>> orchestrator = Orchestrator(phases, Phase("language", language_cost), world_size)
        >>> encoders = {"image": Encoder(encode_images, hidden_size), "audio": Encoder(encode_audio, hidden_size)}
        >>> sampler = MinibatchSampler(lengths, world_size=world_size, minibatch_size=8, cost=language_cost)
        >>> loader = MinibatchLoader(dataset, sampler, list, rank)
        >>> minibatches = MultimodalLoader(loader, split, orchestrator, rank)
        >>> session = odc.patch_fsdp(model)
        >>> items = session.exchange_items(channels_of(orchestrator.modalities), capacity_bytes=1 << 20)
        >>> for minibatch in minibatches:
        ...     losses = run_minibatch(minibatch, encoders, language_loss, mover=OnDemand(items, rank))
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> session.stats().minibatches
        2
        >>> minibatches.close()
        >>> items.close()
        >>> session.close()
    """
    mover = mover or InStep()
    try:
        runner = _Runner(minibatch, encoders, mover, span)
        runner.give_inputs()
        runner.encode()
        losses = runner.run_language(language)
        runner.go_back()
        runner.close()
    except BaseException as error:  # the others need what this rank will not make any more
        mover.abort(error)
        raise
    return losses


class _Runner:
    def __init__(
        self, minibatch: MultimodalMinibatch, encoders: Mapping[str, Encoder], mover: Mover, span: Span
    ) -> None:
        schedule = minibatch.schedule
        if missing := [name for name in schedule.encoders if name not in encoders]:
            raise ValueError(f"no encoder for phase {missing[0]!r}: expected one for each of {list(schedule.encoders)}")
        if mover.rank != minibatch.rank:
            raise ValueError(
                f"a minibatch of rank {minibatch.rank} and a mover of rank {mover.rank}: expected one rank"
            )
        for name, plan in schedule.encoders.items():
            # On all ranks, whichever has such a microbatch: those that have none would wait for it.
            microbatches = FlatMicrobatches.of(plan.microbatches)
            empty = microbatches.places()[0][microbatches.sizes == 0]
            if empty.size and encoders[name].dummy is None:
                raise ValueError(
                    f"phase {name!r}: rank {empty[0]} has a microbatch without items, as collectives need it, and the "
                    "encoder has no dummy: give it one, or use ODC and comm='odc'"
                )
        self._schedule, self._rank = schedule, minibatch.rank
        self._encoders = {name: encoders[name] for name in schedule.encoders}
        # Without gradients (an evaluation) there is a forward only, on all ranks.
        self._trains = torch.is_grad_enabled()
        self._frozen = {name: frozen or not self._trains for name, frozen in schedule.frozen.items()}
        self._mover, self._span = mover, span
        self._done: dict[str, list[tuple[list[int], list[torch.Tensor]]]] = {name: [] for name in self._encoders}
        """The microbatches of each encoder on this rank: items, and outputs with their graphs."""
        # What this rank has read, by its numbers in the schedule.
        self._parts = dict(zip(schedule.samples.source[self._rank].tolist(), minibatch.parts, strict=True))
        self._items: dict[str, dict[int, Tensors]] = {}
        for name in self._encoders:
            items = [item for part in minibatch.parts for item in part.items.get(name, ())]
            self._items[name] = dict(zip(schedule.inputs[name].source[self._rank].tolist(), items, strict=True))
        # All at once, and in one order on all ranks: roads may have to be widened for what is to go there.
        lengths, texts = schedule.lengths, schedule.samples
        self._texts = None if texts.is_at_rest else mover.carry(whole_cargo("samples", texts, lengths.num_bytes))
        self._inputs: dict[str, Carrier | None] = {
            name: None if route.is_at_rest else mover.carry(whole_cargo(f"{name}/inputs", route, sizes))
            for name, route, sizes in [(n, schedule.inputs[n], lengths.items[n].num_bytes) for n in self._encoders]
        }
        kinds = {name: (encoder.width, encoder.dtype) for name, encoder in self._encoders.items()}
        self._outputs = {name: mover.carry(output_cargo(schedule, name, *kind)) for name, kind in kinds.items()}
        self._gradients = {
            name: mover.carry(gradient_cargo(schedule, name, *kind))
            for name, kind in kinds.items()
            if not self._frozen[name]
        }

    def close(self) -> None:
        for carrier in (self._texts, *self._inputs.values(), *self._outputs.values(), *self._gradients.values()):
            if carrier is not None:
                carrier.close()

    def give_inputs(self) -> None:
        """Samples and items to where they are needed, but for those that stay."""
        with self._span("move", "inputs"):
            if self._texts is not None:
                _put_whole(self._texts, [to_bytes(named(part.text)) for part in self._parts.values()])
            for name, carrier in self._inputs.items():
                if carrier is not None:
                    _put_whole(carrier, [to_bytes(item) for item in self._items[name].values()])

    def _raw(self, name: str, items: Sequence[int]) -> list[Tensors]:
        carrier = self._inputs[name]
        if carrier is not None:
            return [tuple(from_bytes(data)) for data in carrier.get(items)]
        return [self._items[name][item] for item in items]

    def encode(self) -> None:
        for name, encoder in self._encoders.items():
            carrier = self._outputs[name]
            problem: ValueError | None = None
            for number, items in enumerate(self._schedule.encoders[name].microbatches[self._rank]):
                with self._span("encode", name):
                    outputs = self._encode_one(name, encoder, items)
                self._done[name].append((list(items), outputs))
                problem = problem or self._problem_of(name, encoder, items, outputs)
                if problem is None:
                    with self._span("move", f"{name} outputs"):
                        carrier.put(number, [output.detach() for output in outputs[: len(items)]])
            with self._span("move", f"{name} outputs"):
                carrier.meet(problem)

    def _encode_one(self, name: str, encoder: Encoder, items: Sequence[int]) -> list[torch.Tensor]:
        raw = self._raw(name, items)
        if not raw:
            assert encoder.dummy is not None
            raw = [encoder.dummy()]
        with torch.set_grad_enabled(not self._frozen[name]):
            return list(encoder.encode(raw))

    def _problem_of(
        self, name: str, encoder: Encoder, items: Sequence[int], outputs: Sequence[torch.Tensor]
    ) -> ValueError | None:
        if not items:
            return None
        if len(outputs) != len(items):
            return ValueError(
                f"phase {name!r}: the encoder of rank {self._rank} returned {len(outputs)} outputs for {len(items)} "
                "items: expected one for each, in their order"
            )
        for item, output in zip(items, outputs, strict=True):
            problem = self._problem_of_output(name, encoder, item, output)
            if problem is not None:
                what = f"phase {name!r}: the output of {self._schedule.lengths.name(name, item)}"
                return ValueError(f"{what} {problem}")
        return None

    def _problem_of_output(self, name: str, encoder: Encoder, item: int, output: object) -> str | None:
        shape = (int(self._schedule.lengths.items[name].output[item]), encoder.width)
        if not isinstance(output, torch.Tensor):
            return f"is {shown(output)}: expected a tensor"
        if tuple(output.shape) != shape or output.dtype != encoder.dtype:
            found = f"{tuple(output.shape)} of {output.dtype}"
            return f"is {found}: expected {shape} of {encoder.dtype}, as its lengths say"
        if not self._frozen[name] and not output.requires_grad and output.numel():
            return "has no graph: run the encoder with gradients, or declare Phase(frozen=True)"
        return None

    def run_language(self, language: Callable[[list[Text], Outputs], torch.Tensor]) -> list[torch.Tensor]:
        schedule, losses = self._schedule, []
        for number, samples in enumerate(schedule.language.microbatches[self._rank]):
            columns = self._columns(samples)
            leaves: Outputs = {}
            for name in self._encoders:
                with self._span("move", f"{name} outputs"):
                    got = self._outputs[name].get(schedule.items_of(name, self._rank, number))
                leaves[name] = [t.detach().requires_grad_(not self._frozen[name]) for t in got]
            with self._span("language", f"microbatch {number}"):
                loss = language(columns, leaves)
                if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                    raise ValueError(f"the language model's loss is {shown(loss)}: expected one number, a tensor")
                if self._trains:
                    loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
            for name, carrier in self._gradients.items():
                with self._span("move", f"{name} gradients"):
                    # What the loss does not depend on has no gradient.
                    grads = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves[name]]
                    carrier.put(number, grads)
        return losses

    def _columns(self, samples: Sequence[int]) -> list[Text]:
        if self._texts is not None:
            return [from_named(from_bytes(data)) for data in self._texts.get(samples)]
        return [dict(self._parts[sample].text) for sample in samples]

    def go_back(self) -> None:
        for carrier in self._gradients.values():
            with self._span("move", "gradients"):
                carrier.meet()
        for name in reversed(list(self._gradients)):
            encoded, carrier = self._done[name], self._gradients[name]
            while encoded:
                items, outputs = encoded.pop()
                with self._span("move", f"{name} gradients"):
                    grads = carrier.get(items)
                # Of a dummy, too: where collectives are, every rank goes through every backward.
                pairs = [
                    (output, grads[at] if at < len(grads) else torch.zeros_like(output))
                    for at, output in enumerate(outputs)
                    if output.requires_grad
                ]
                if pairs:
                    with self._span("backward", name):
                        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])


def _put_whole(carrier: Carrier, tensors: list[torch.Tensor]) -> None:
    if tensors:
        carrier.put(0, tensors)
    carrier.meet()
