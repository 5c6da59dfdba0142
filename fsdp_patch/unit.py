"""The interface of an FSDP communication unit for a session, the same for FSDP1 and FSDP2."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import ProtocolError, UnsupportedError
from odc.fsdp_patch.pending import Expected, Reduction, Use
from odc.fsdp_patch.replicas import Replicas
from odc.fsdp_patch.sharing import Sharing
from odc.units import Destination, Rows, UnitSpec

Undo = Callable[[], None]

# In which gradients may be pushed. FSDP divides those in float16 before the reduction, in part, lest they overflow.
_GRADIENT_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def check_grad_dtype(where: str, dtype: torch.dtype) -> None:
    """Refuse a unit (``where``) that is trained and whose gradients are reduced in a dtype that is not supported."""
    if dtype in _GRADIENT_DTYPES:
        return
    cause = (
        ". A trainer sets it for fp16 mixed precision (fp16=True, accelerate's mixed_precision='fp16'), some of them "
        "also for weights in float32 (ms-swift: --torch_dtype float32): take bf16"
        if dtype == torch.float16
        else ""
    )
    raise UnsupportedError(
        f"{where}: gradients are reduced in {dtype} (reduce_dtype of the mixed precision policy, or the parameters' "
        f"own dtype), which is not supported; use float32, float64 or bfloat16{cause}"
    )


class Communication(Protocol):
    """What a unit calls instead of FSDP's collectives. ``unit`` is the unit's number in its session."""

    def gather(self, unit: int, out: torch.Tensor | Destination, *, own_in_place: bool) -> None:
        """Fill ``out`` (one row per rank of the unit's process group) with the shards of all owners."""
        ...

    def scatter_accumulate(self, unit: int, grads: torch.Tensor | Sequence[Rows], present: Sequence[bool]) -> None:
        """Push ``grads`` (one row per rank): the gradients of the ``present`` trainable parameters."""
        ...

    @property
    def data_of(self) -> Use:
        """Gives the data of a gradient to somebody who needs it; keeps nothing alive."""
        ...


class GradientShard(NamedTuple):
    """Where this rank's part of the gradient of one trainable parameter goes."""

    parameter: nn.Parameter
    like: torch.Tensor
    """Of the shape, dtype and device of that part."""


class FinalSum(NamedTuple):
    """The gradient of one unit's shard: flat sum, and which parameters received one."""

    total: torch.Tensor
    touched: list[bool]


class Watched(NamedTuple):
    """What tells that one parameter was changed."""

    counted: tuple[torch.Tensor, ...]
    """The version counter of one of these moves with every change that torch counts."""

    memory: torch.Tensor
    """What this rank's part of the parameter lies in: flat and contiguous."""

    part: slice
    """Where in it."""

    holder: torch.Tensor | None = None
    """Whose attributes belong to it: with those a script may set, it changes."""


class Unit(ABC):
    """One group of parameters that FSDP gathers and reduces together."""

    name: str
    replicas: Replicas | None = None
    """Set by the session where there is a :attr:`replica_group`."""
    sharing: Sharing | None = None
    """Which few of the ranks of :attr:`shard_group` publish for each other, if not all do. Before :meth:`spec`."""

    own: UnitSpec
    """What there is of it on this rank; known since :meth:`spec`."""

    def __init__(self) -> None:
        self.expected: dict[int, Expected] = {}
        """The coming gradients, by the number of the shard, see :meth:`gradient_shards`."""
        self.reduction = Reduction()
        """FSDP's own work on this unit's gradients, in which these are no news."""
        self._gathered: tuple[Destination, Destination] | None = None  # the last one that was asked for, and at home
        self._arriving: dist.Work | None = None

    # What it is

    @property
    @abstractmethod
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks over which FSDP shards the parameters."""

    @property
    @abstractmethod
    def copy_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same place in their shard groups (hybrid sharding); None without."""

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that publish for this one and push to it."""
        return self.shard_group if self.sharing is None else self.sharing.home

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same place in other such groups, whose sums are added up at the end of a minibatch; None
        where there are no others."""
        return self.copy_group if self.sharing is None else self.sharing.counterparts

    @property
    def partner_groups(self) -> list[dist.ProcessGroup]:
        """The ranks that run each microbatch together with this one, each for a part of every parameter (tensor
        parallelism): a group for each dimension of the mesh over which parameters are distributed beside FSDP's."""
        return []

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where it computes."""

    @property
    @abstractmethod
    def divide_factor(self) -> float:
        """What FSDP divides the sum of all ranks' gradients by, as the script has it now."""

    @functools.cached_property
    def agreed_factor(self) -> float:
        """The :attr:`divide_factor` that the ranks have agreed on, by which its sums are divided."""
        return self.divide_factor

    def _as_agreed(self, grads: torch.Tensor | Sequence[Rows]) -> torch.Tensor | Sequence[Rows]:
        """What to push of gradients, so that :attr:`agreed_factor` divides them as :attr:`divide_factor` does now: a
        script may change that between microbatches, and on one rank alone."""
        factor = self.divide_factor
        if factor == self.agreed_factor:
            return grads
        scale = self.agreed_factor / factor
        if isinstance(grads, torch.Tensor):
            return grads * scale
        return [Rows(part.grads * scale, part.numel) for part in grads]

    @property
    def pushes_behind_backward(self) -> bool:
        """Whether a backward that gathers this unit will surely push its gradients."""
        return False

    staging: str | None = None
    """For people: whether gathers and pushes go through flat buffers of FSDP's, and why. None: it has none."""

    def do_without_staging(self, held: Any) -> None:
        """From now on gather into the parameters and push from the gradients, if that can be. Before :meth:`spec`.

        ``held``: the :class:`~odc.fsdp_patch.fsdp2_in_place.Held` of the model.
        """
        return

    is_extended = False
    """Whether a parameter says itself what of it travels (FSDP2's all-gather extension)."""

    @property
    def communicates(self) -> bool:
        """Whether to publish it is collective, see [Note: Collectives in a publication] in ``fsdp2_extension.py``."""
        return False

    def measure(self) -> dict[str, str]:
        """Find out how much travels of what :attr:`is_extended`, before :meth:`spec`: by parameter, equal on all ranks.
        As collective as a publication."""
        return {}

    def spec(self) -> UnitSpec:
        """The unit in the runtime's terms."""
        self.own = self.own_spec()
        return self.own if self.sharing is None else self.sharing.spec(self.own)

    @abstractmethod
    def own_spec(self) -> UnitSpec:
        """What there is of it on this rank, in the runtime's terms."""

    def destination(self, out: torch.Tensor | Destination) -> torch.Tensor | Destination:
        """Where a gather puts what FSDP wants in ``out``: a row for each rank of :attr:`shard_group`."""
        if self.sharing is None:
            return out
        if isinstance(out, torch.Tensor):
            return self.sharing.destination(Destination([out.view(self.shard_group.size(), -1)]))
        if self._gathered is None or self._gathered[0] is not out:  # in place it is the same one each time
            self._gathered = out, self.sharing.destination(out)
        return self._gathered[1]

    def pushed(
        self, grads: torch.Tensor | Sequence[Rows], present: Sequence[bool]
    ) -> tuple[torch.Tensor | Sequence[Rows], Sequence[bool]]:
        """What to push of FSDP's gradients of the ``present`` parameters, and which of :meth:`spec` these are."""
        grads = self._as_agreed(grads)
        if self.sharing is None:
            return grads, present
        if isinstance(grads, torch.Tensor):
            grads = Rows.of_flat(grads, self.own, None if all(present) else present, self.shard_group.size())
        return self.sharing.rows(grads), list(present) * self.sharing.num_homes

    @abstractmethod
    def agreement(self) -> tuple[str, dict[str, str]]:
        """What must be equal on all ranks: the unit's options, and a description of each parameter."""

    # Its parameters

    @abstractmethod
    def watched(self) -> list[Watched]:
        """What tells that a parameter was changed, for each of them."""

    @abstractmethod
    def is_unfrozen(self) -> bool:
        """Whether any parameter requires a gradient that did not when the model was patched."""

    @abstractmethod
    def trainable_parameters(self) -> list[nn.Parameter]:
        """The trainable parameters as an optimizer holds them."""

    def full_parameters(self) -> list[tuple[torch.Tensor, nn.Parameter]] | None:
        """What stands in the module for each trainable parameter while the unit is not sharded, and its sharded one;
        none before the first time. None where both are one object."""
        return None

    @abstractmethod
    def fill_shard(self, out: torch.Tensor) -> None:
        """Write this rank's shard in the layout of FSDP's all-gather input, cast to the compute dtype."""

    def begin_filling(self, out: torch.Tensor) -> None:
        """Write this rank's shard into what it publishes, and ask for those of its counterparts, which it has met."""
        assert self.sharing is not None
        assert self.replicas is not None
        self.fill_shard(self.own_part(out))
        self._arriving = self.replicas.all_gather(out.view(self.sharing.num_homes, -1))

    def fill_published(self, out: torch.Tensor) -> None:
        """Write what this rank publishes, or what :meth:`begin_filling` lacks of it. Collective, where it shares."""
        if self.sharing is None:
            self.fill_shard(out)
            return
        assert self.replicas is not None
        if self._arriving is None:
            self.replicas.meet_to_publish()
            self.begin_filling(out)
        arriving, self._arriving = self._arriving, None
        self.replicas.wait(arriving, f"parameters of {self.name!r}")

    def own_part(self, published: torch.Tensor) -> torch.Tensor:
        """Of what this rank publishes, its own shard."""
        if self.sharing is None:
            return published
        assert self.replicas is not None
        return published.view(self.sharing.num_homes, -1)[self.replicas.rank]

    def take_over_data(self) -> None:
        """Take what the script has put into parameters (``param.data = ...``) for this rank's shard, where FSDP does so
        only when it uses them."""
        return

    @abstractmethod
    def take_over_place(self) -> None:
        """The script has moved parameters (``Module.to``): take where they are for this rank's shard.

        Raises:
            UnsupportedError: they have another dtype.
        """

    @abstractmethod
    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of ``published``, this rank's own shard, beside what :meth:`fill_shard` would write there now, or what
        stands for both: of equal shape and dtype."""

    @abstractmethod
    def beside_by_name(self, published: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        """As :meth:`beside`, parameter by parameter, with their names."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether hooks behind the accumulation of its gradients step an optimizer (optimizer in backward). FSDP1 never
        calls those of its original parameters, but has a way of its own."""
        return False

    def call_hooks(self) -> None:
        """Call the hooks behind the accumulation of its gradients, with those of the minibatch that has ended."""
        return

    def clear_gradients(self) -> None:
        """Free the gradients of its trainable parameters."""
        for parameter in self.trainable_parameters():
            parameter.grad = None
        for one in self.expected.values():
            one.free()

    @property
    @abstractmethod
    def holds_unsent(self) -> bool:
        """Whether it has gradients of backward passes under ``no_sync()`` or ``set_requires_gradient_sync(False)``,
        which the next synchronization will send along."""

    waiting_factor: float | None = None
    """The :attr:`divide_factor` of gradients that it has pushed under ``set_requires_all_reduce(False)``: plain FSDP2
    would sum them over the replicas with those of a later microbatch, which has not come. None: there are none."""

    @abstractmethod
    def incomplete_backward(self) -> bool:
        """Whether an exception has ended a backward pass of this minibatch, caught by the script, that had computed or
        sent a part of its gradients. Asked outside of forward and backward."""

    @abstractmethod
    def discard_gathered(self) -> None:
        """Free full parameters that FSDP kept from a forward without a backward (an evaluation, a microbatch that an
        exception interrupted), and let FSDP forget an interrupted pass: at the end of a minibatch, which is outside of
        forward and backward. After the step they are not the parameters any more, and a rank without microbatches runs
        no backward that would free them."""

    @abstractmethod
    def end_evaluation(self, is_by_hand: bool) -> None:
        """A forward of the model without a graph has returned, which may have left full parameters.

        ``is_by_hand``: the script uses gradients by hand, which those of full parameters are not.
        """

    def begin_sum(
        self, own: tuple[torch.Tensor, list[bool]] | None, spec: UnitSpec, dtype: torch.dtype
    ) -> Callable[[], FinalSum | None]:
        """From the sum over :attr:`process_group`, which may be changed, to that over all ranks; None if nobody
        contributed. What is returned waits for it.

        Collective over the replicas, if there are any.
        """
        if self.replicas is None or not spec.params:
            found = FinalSum(*own) if own else None
            return lambda: found
        replicas, num_homes = self.replicas, 1 if self.sharing is None else self.sharing.num_homes
        flags = own[1] if own else [False] * len(spec.params)
        touched = replicas.union(flags[: len(flags) // num_homes])  # of all homes the same
        if not any(touched):
            return lambda: None
        total = own[0] if own else torch.zeros(spec.grad_numel, dtype=dtype, device=self.device)
        if self.sharing is None:
            arriving, work = total, replicas.begin_sum(total)
        else:
            # In bf16 where the script reduces in that; each is rounded once, and added in ``dtype``.
            rows = total.view(num_homes, -1).to(torch.bfloat16 if spec.grad_dtype == torch.bfloat16 else dtype)
            arriving = torch.empty_like(rows)
            work = replicas.swap_rows(rows, arriving)

        def complete() -> FinalSum:
            replicas.wait(work, f"gradient of {self.name!r}")
            return FinalSum(arriving if self.sharing is None else arriving.sum(0, dtype=dtype), touched)

        return complete

    @abstractmethod
    def install(self, mean: torch.Tensor, touched: Sequence[bool]) -> None:
        """Add the mean gradient of this rank's shard to ``.grad`` of the touched parameters, but for those whose
        gradient the script has replaced. Between :meth:`withdraw` and :meth:`settle`.

        Args:
            mean: flat, in the accumulator's dtype, already divided. Where there is no ``.grad`` yet it becomes that: it
                belongs to the script from then on.
            touched: per trainable parameter of :meth:`spec`, whether any rank contributed. The others keep ``.grad``
                as it is (None stays None, so that the optimizer skips them as it does under FSDP).
        """

    @abstractmethod
    def resident(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Per parameter: this rank's shard, and its part of ``.grad``."""

    # Gradients to come

    @property
    def is_summoned(self) -> bool:
        """Whether the script is in FSDP1's ``summon_full_params``, where there is no place for parts of gradients."""
        return False

    @abstractmethod
    def gradient_shards(self) -> Sequence[GradientShard]:
        """Where gradients of this rank's part of the trainable parameters go; none for parameters that it has no part
        of. The same ones each time."""

    def as_gradient(self, index: int, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient as it stands in ``.grad``."""
        return local

    def expect(self, use: Use, *, none: bool = True, old: bool) -> None:
        """Let gradients be pending: where there are none (``none``), and where there are (``old``)."""
        for index, shard in enumerate(self.gradient_shards()):
            known = self.expected.get(index)
            if known is not None and known.parameter is shard.parameter and (known.pending.is_sent or known.is_there):
                continue
            if none if shard.parameter.grad is None else old:
                make = functools.partial(self.as_gradient, index)
                self.expected[index] = Expected(shard.parameter, shard.like, use, self.reduction, make)

    def withdraw(self) -> None:
        """Leave the gradients as they were before."""
        for one in self.expected.values():
            one.withdraw()

    def expect_again(self) -> None:
        """Behind :meth:`withdraw`, where the script has moved parameters, or replaced them: expect the gradients of
        those that are there now."""
        for index, shard in enumerate(self.gradient_shards()):
            one = self.expected.get(index)
            if one is None or not one.was_there:
                continue
            if one.parameter is shard.parameter:
                one.put(shard.like)
            elif shard.parameter.grad is None:
                make = functools.partial(self.as_gradient, index)
                self.expected[index] = Expected(shard.parameter, shard.like, one.pending.use, self.reduction, make)

    def settle(self) -> None:
        """The minibatch has ended, and what is in ``.grad`` is final."""
        for one in self.expected.values():
            one.settle()
        self.expected.clear()

    # Entering it

    @abstractmethod
    def enter(self, index: int, communication: Communication) -> Undo:
        """Let FSDP call ``communication`` for this unit; returns the undo."""


def shadow(owner: Any, **replacements: Any) -> Undo:
    """Put ``replacements`` in place of attributes of an object or a class. The undo leaves alone what somebody else has
    put there meanwhile."""
    before = {name: vars(owner)[name] for name in replacements if name in vars(owner)}
    for name, replacement in replacements.items():
        setattr(owner, name, replacement)

    def undo() -> None:
        for name, replacement in replacements.items():
            if vars(owner).get(name) is not replacement:
                continue
            if name in before:
                setattr(owner, name, before[name])
            else:  # it was the class's
                delattr(owner, name)

    return undo


def check_backward_complete(units: Sequence[Unit]) -> None:
    """Refuse to end a minibatch in which a backward pass did not complete.

    Raises:
        ProtocolError: naming the first unit and what to do.
    """
    found = [unit.name for unit in units if unit.incomplete_backward()]
    if not found:
        return
    raise ProtocolError(
        f"a backward pass of this rank did not complete: it ended with an exception, and a part of its gradients "
        f"(unit {found[0]!r}) has been added to this minibatch, which therefore cannot be used for a step. Go back to "
        "a checkpoint; or where such exceptions are caught, call session.discard() on every rank in place of the step"
    )


def waiting_gradients(name: str) -> ProtocolError:
    """What to say about a unit that has gradients of this minibatch which were not sent."""
    return ProtocolError(
        f"unit {name!r} still holds gradients of backward passes under no_sync() or set_requires_gradient_sync(False): "
        "run the last microbatch of every minibatch with synchronization, and let it use every unit that the others "
        "used"
    )


def cast_within(name: str, before: torch.dtype, now: torch.dtype) -> UnsupportedError:
    """What to say where a script has cast a parameter of a patched model."""
    return UnsupportedError(
        f"parameter {name!r} was {before} when the model was patched, and has been cast to {now} (model.to, .float(), "
        ".half()): cast before patch_fsdp, or close() the session, cast, and patch again"
    )


def describe_meshes(meshes: Sequence[Sequence[Unit]]) -> str:
    """How many units are on each, for people: "5 units over 4 ranks and 2 units over 2 ranks"."""
    found = []
    for units in meshes:
        first, more = units[0], ""
        if first.sharing is not None:
            more = f", {first.sharing.describe([unit.own for unit in units])}"
        elif first.copy_group is not None:
            more = f", {first.copy_group.size()} replicas"
        found.append(f"{len(units)} units over {first.shard_group.size()} ranks{more}")
    return " and ".join(found)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as integers of the same width; of wider elements, as several."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(tensor.itemsize, torch.int64))


class Alone:
    """Units whose shard group is one rank, beside others or without: FSDP communicates nothing for them.

    Experts may be such units: where there are as many parts of them as ranks, each rank has one of its own. Nothing is
    done on demand for them. FSDP adds to ``.grad`` in each backward, so that they are final as soon as the others are;
    only what a minibatch that is thrown away has added there has to be taken away again.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self._parameters: list[nn.Parameter] = [p for unit in units for p in unit.trainable_parameters()]
        self._before: list[torch.Tensor | None] | None = None

    def begin(self) -> None:
        """A forward of the minibatch begins: what is in ``.grad`` now, stays, whatever becomes of it."""
        if self._before is None:
            self._before = [None if p.grad is None else p.grad.detach().clone() for p in self._parameters]

    def end(self, *, is_discarded: bool) -> None:
        """The minibatch is over. Without :meth:`begin` nothing was in ``.grad`` before it."""
        for unit in self.units:
            unit.discard_gathered()
        before, self._before = self._before, None
        if is_discarded:
            for parameter, gradient in zip(self._parameters, before or [None] * len(self._parameters), strict=True):
                parameter.grad = gradient
