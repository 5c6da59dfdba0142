"""FSDP2's all-gather extension: parameters with their own all-gather hooks (float8, NF4).

A tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` chooses the inputs of the all-gather (data
in float8, or packed to 2 bits, or several tensors of several dtypes), keeps metadata (a scale), and makes the full
parameter from the outputs. FSDP2 calls both at every gather. Under ODC an owner makes the inputs once, when it
publishes. A rank keeps the metadata of its last publication and passes them on at each gather.

The inputs of such a unit are sent as bytes and gathered into one flat buffer, from which FSDP2's own function copies.

[Note: Collectives in a publication] A scale of the whole parameter needs a maximum over the ranks, so
``fsdp_pre_all_gather`` may contain a collective. Then publishing is collective, too: all ranks must publish the same
units in the same order, with no other collective in between. This holds at places that all ranks reach: when a model is
patched, after the steps of optimizers, when gradients are cleared, in ``session.publish()``, and after a fence if all
such units are published there, changed or not. It does not hold when a rank first uses the model or waits for others,
because an idle rank does not reach that place. Publishing there is refused
(:meth:`odc.fsdp_patch.publishing.Publisher.publish_all`).

[Note: The state of a parameter] ``fsdp_pre_all_gather`` cannot be called for a comparison: it may be collective, or
round randomly. So changes of such a parameter are detected by its state: the memory of its tensors, and its attributes,
which scripts may set, too (a computed scale). Of the state at publication only sums are kept, over rows and over
columns of all elements: a hundredth of a copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from odc.errors import UnsupportedError
from odc.fsdp_patch.unit import as_integers

_COLUMNS = 256


def has_extension(tensor: torch.Tensor) -> bool:
    """Whether FSDP2 asks this shard what should travel."""
    return hasattr(tensor, "fsdp_pre_all_gather")


class Extension:
    """What travels of one parameter that has an extension, and whether it has changed since it was published.

    Args:
        inner: its ``FSDPParam``.
        name: for people.
    """

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name
        self.kind = type(self.local).__name__
        """For people."""
        self.inputs: list[tuple[int, torch.dtype]] = []
        """Elements and dtype of each tensor that travels, once measured."""
        self.communicates = False
        """See [Note: Collectives in a publication]."""
        self._metadata: Any = None
        self._sizes: Sequence[torch.Size] = ()
        self._dtypes: list[torch.dtype] = []
        self._flat: list[tuple[torch.Tensor, int, torch.Tensor]] = []  # what is in its state, where, and flat
        self._nothing = torch.empty(0, device="cpu")
        self._published = self._nothing

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard."""
        tensor: torch.Tensor = self._inner._sharded_local_tensor
        return tensor

    def measure(self) -> str:
        """Find out what travels, for :attr:`inputs`; as one line that must be equal on all ranks. As collective as a
        publication."""
        self.inputs = [(tensor.numel(), tensor.dtype) for tensor in self._evaluate()]
        return self._describe()

    def check(self) -> None:
        """Refuse a shard that has no extension any more.

        Raises:
            UnsupportedError: naming the parameter.
        """
        if not has_extension(self.local):
            raise UnsupportedError(
                f"parameter {self._name!r} had the all-gather extension of {self.kind} when the model was patched, and "
                "has none now (load_state_dict(assign=True) may have replaced it): load into what is there, or close() "
                "the session before and patch again"
            )

    def fill(self, out: torch.Tensor) -> None:
        """Write what travels, as bytes. What it was made of is what is published from then on.

        Raises:
            UnsupportedError: it is not what was measured.
        """
        self.check()
        before, made = self._describe(), self._evaluate()
        if self.inputs != [(tensor.numel(), tensor.dtype) for tensor in made]:
            raise UnsupportedError(
                f"parameter {self._name!r}: fsdp_pre_all_gather of {self.kind} has returned {before} when the model "
                f"was patched, and now {self._describe()}: sizes and dtypes have to stay what they were"
            )
        parts = out.split_with_sizes([tensor.nbytes for tensor in made])
        torch._foreach_copy_(list(parts), [tensor.view(torch.uint8) for tensor in made])
        self._published = self._sums()

    def _evaluate(self) -> list[torch.Tensor]:
        """What ``fsdp_pre_all_gather`` makes of the shard as it is: flat. FSDP2 asks for it, with its arguments."""
        inner, data = self._inner, self._inner._extensions_data
        state, handed = inner.sharded_state, (data.all_gather_metadata, data.all_gather_input_sizes)
        num_before = num_collectives()
        inner.sharded_state = ShardedState.SHARDED  # it may be full, behind an evaluation; the shard is there as well
        try:
            with torch.no_grad(), torch.inference_mode(False):  # metadata outlive an evaluation: training saves them
                made: list[torch.Tensor] = inner.all_gather_inputs
            self._metadata, self._sizes = data.all_gather_metadata, data.all_gather_input_sizes
        finally:
            inner.sharded_state = state
            data.all_gather_metadata, data.all_gather_input_sizes = handed
        self.communicates |= num_collectives() != num_before
        self._dtypes = [tensor.dtype for tensor in made]
        return made

    def _describe(self) -> str:
        return " and ".join(f"{list(size)} {dtype}" for size, dtype in zip(self._sizes, self._dtypes, strict=True))

    def hand_on(self) -> None:
        """Let FSDP2 make the full parameter of what is gathered with the metadata of the last publication."""
        data = self._inner._extensions_data
        data.all_gather_metadata, data.all_gather_input_sizes = self._metadata, self._sizes

    # See [Note: The state of a parameter].

    @property
    def memory(self) -> list[torch.Tensor]:
        """Flat views of all tensors of its state; the same ones as long as those are the same, in the same memory."""
        state = state_of(self.local)
        if [(id(one), one.data_ptr()) for one in state] != [(id(one), address) for one, address, _ in self._flat]:
            self._flat = [(one, one.data_ptr(), _flat_view(one)) for one in state]
        return [view for _, _, view in self._flat] or [self._nothing]

    def beside(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What was published beside what is there now: tensors that are equal if the states are."""
        now = self._sums()
        if now.shape != self._published.shape:  # it consists of other tensors
            return torch.zeros_like(now), torch.ones_like(now)
        return self._published, now

    def _sums(self) -> torch.Tensor:
        values = vars(self.local).values()
        numbers = [value for value in values if isinstance(value, float)]
        sums = [
            torch.tensor(numbers, dtype=torch.float64, device="cpu").view(torch.int64),
            torch.tensor([hash(value) for value in values if isinstance(value, int)], dtype=torch.int64, device="cpu"),
        ]
        for flat in self.memory:
            bits = as_integers(flat)
            whole = bits.numel() // _COLUMNS * _COLUMNS
            rows = bits[:whole].view(-1, _COLUMNS)
            sums += [rows.sum(0, dtype=torch.int64), rows.sum(1, dtype=torch.int64), bits[whole:].to(torch.int64)]
        return torch.cat([one.to(self._inner.device) for one in sums])


def state_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with memory of which one of a subclass consists: itself, what it wraps, and its attributes.

    >>> scaled = torch.ones(2)
    >>> scaled.scale = torch.tensor(3.0)
    >>> state_of(scaled)
    [tensor([1., 1.]), tensor(3.)]
    """
    found, todo = dict[int, torch.Tensor](), [tensor]
    while todo:
        one = todo.pop(0)
        if id(one) in found:
            continue
        found[id(one)] = one
        todo += [value for value in (*_wrapped(one), *vars(one).values()) if isinstance(value, torch.Tensor)]
    return [one for one in found.values() if one.data_ptr()]


def _wrapped(tensor: Any) -> list[Any]:
    if not is_traceable_wrapper_subclass(tensor):
        return []
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of torch's own type with its elements, or those of what it wraps first."""
    state = state_of(tensor) if has_extension(tensor) else []
    return _flat_view(state[0]) if state else tensor


def _flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """That shares its memory and its version. Of one that is not contiguous, nothing."""
    plain = tensor.detach().as_subclass(torch.Tensor)
    return plain.view(-1) if plain.is_contiguous() else plain.flatten()[:0]


def num_collectives(among: Collection[int] | None = None) -> int:
    """That this rank has entered, in all groups that count them, or in those of at least two ranks of ``among``."""
    total = 0
    groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
    if among is not None:
        groups = [one for one in groups if len(set(among).intersection(dist.get_process_group_ranks(one))) > 1]
    for group in groups:
        try:
            total += group._get_sequence_number_for_group()
        except RuntimeError:  # this backend does not count
            continue
    return total
