"""Pending gradients: placeholders in ``.grad`` that end the minibatch when they are used.

After a push, ``.grad`` is a tensor without data (:class:`PendingGradient`; under FSDP2 a DTensor around one). The first
operation on its data ends the minibatch and continues with the final gradient. This works for every reader: a norm by
hand, ``foreach`` functions, compiled ones, torch's pipeline schedules, any library. Queries without data (``is None``,
shapes, devices) end nothing, and unused gradients cost nothing.

[Note: Gradients that others will bring] A gradient is also pending if this rank has pushed none, since other ranks may:
under plain FSDP a rank without a microbatch runs a dummy one and finds gradients afterwards. So after patching, after a
gradient was cleared, and after this rank has pushed anything, a ``.grad`` that would be None is pending. If no rank
pushes a gradient for it, it becomes None at the end of the minibatch. Code that already holds the placeholder reads
zeros, since no rank could know the answer to ``is None`` before. If an old gradient was not cleared, reading the old
one and using the new one differ only by their place in the script, see [Note: Old gradients on an idle rank] in
``gradient_state.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)  # .data, .detach()
_ON_ITSELF = (_aten.detach_.default,)
_ZEROES = (_aten.zero_.default, _aten._foreach_zero_.default)


class Use(Protocol):
    """Gives the data of a gradient to somebody who needs it."""

    def __call__(self, pending: Pending, *, is_zeroed: bool = False) -> torch.Tensor:
        """Now, or after ending the minibatch. ``is_zeroed``: to somebody who zeroes what is nothing so far."""
        ...


class PendingGradient(torch.Tensor):
    """A tensor whose data is that of :attr:`pending`, once it is there. It has no memory of its own."""

    pending: Pending

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, like: torch.Tensor, pending: Pending) -> PendingGradient:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=like.device, layout=like.layout
        )
        assert isinstance(wrapper, cls)
        wrapper.pending = pending
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALIASES:
            return PendingGradient(args[0], args[0].pending)
        if func in _ON_ITSELF:
            return args[0]
        is_clearing = func in _ZEROES

        def data(wrapper: PendingGradient) -> torch.Tensor:
            pending = wrapper.pending
            return pending.use(pending, is_zeroed=True) if is_clearing and pending.is_nothing else pending.data()

        return func(*tree_map_only(cls, data, args), **tree_map_only(cls, data, kwargs or {}))

    def __iadd__(self, other: Any) -> Any:  # type: ignore[misc]
        if self.pending.reduction.is_running:  # FSDP2 adds what the reduction has left, which is nothing yet
            return self
        return super().__iadd__(other)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return copy.deepcopy(self.pending.data(), memo)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        pending = self.pending  # debuggers and tracebacks must not wait for other ranks
        if pending.final is not None:
            return repr(pending.final)
        return f"PendingGradient(shape={tuple(self.shape)}, dtype={self.dtype}; its first use ends the minibatch)"


def _of_data(name: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self.pending.data(), name)(*args, **kwargs)


for _name in ("numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__reduce_ex__"):
    setattr(PendingGradient, _name, _of_data(_name))  # they ask for memory, and not for an operation


class Reduction:
    """What FSDP does with the gradients of one unit behind a backward."""

    __slots__ = ("is_running",)

    def __init__(self) -> None:
        self.is_running = False


class Pending:
    """The coming gradient of one parameter, for whoever has it at hand. It keeps neither the parameter nor what stands
    in ``.grad``, of which it is a part.

    Args:
        key: the id of the parameter.
        use: called when somebody needs the data.
        reduction: tells when FSDP, and not the script, is at work.
    """

    __slots__ = ("base", "final", "is_sent", "key", "like", "reduction", "use")

    def __init__(self, key: int, use: Use, reduction: Reduction) -> None:
        self.base: torch.Tensor | None = None
        """The gradient that was there, to which it will be added."""
        self.like = (torch.Size(), torch.float32, torch.device("cpu"))
        """Shape, dtype and device of this rank's part of the gradient."""
        self.final: torch.Tensor | None = None
        self.is_sent = False
        """This rank has pushed to it."""
        self.key = key
        self.reduction = reduction
        self.use = use

    def data(self) -> torch.Tensor:
        """For who needs it."""
        return self.use(self) if self.final is None else self.final

    def now(self) -> torch.Tensor:
        """What there is before the end of the minibatch."""
        size, dtype, device = self.like
        return torch.zeros(size, dtype=dtype, device=device) if self.base is None else self.base

    @property
    def is_nothing(self) -> bool:
        """Zeros so far, as far as this rank is concerned."""
        return self.final is None and self.base is None and not self.is_sent


class Expected:
    """A pending gradient in the ``.grad`` of its parameter, from when it is expected until the minibatch ends.

    [Note: No weak references] It has plain ones to the parameter and to what stands there. ``Module.to`` and
    ``torch.utils.swap_tensors`` refuse tensors that anybody refers to weakly. So it belongs to the unit, and nothing
    that a script can have at hand leads to it: as long as a gradient, which the parameter keeps, leads to the
    parameter, the collector cannot free either.

    Args:
        parameter: as an optimizer holds it.
        like: of the shape, dtype and device of this rank's part of the gradient.
        use, reduction: see :class:`Pending`.
        as_gradient: makes what stands in ``.grad`` of a tensor (under FSDP2, a DTensor).
    """

    __slots__ = ("_as_gradient", "_aside", "handle", "parameter", "pending", "was_there")

    def __init__(
        self,
        parameter: nn.Parameter,
        like: torch.Tensor,
        use: Use,
        reduction: Reduction,
        as_gradient: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        self.parameter = parameter
        self.pending = Pending(id(parameter), use, reduction)
        self.was_there = True
        """The script had neither cleared nor replaced it when it was withdrawn."""
        self.handle: torch.Tensor
        """What is, or was, in ``.grad``."""
        self._aside: torch.Tensor | None = None
        self._as_gradient = as_gradient
        self.put(like)

    def put(self, like: torch.Tensor) -> None:
        """Put it in ``.grad``, in place of what is there: at first, and again behind :meth:`withdraw`."""
        earlier = self.parameter.grad
        base = self.pending.base = earlier._local_tensor if isinstance(earlier, DTensor) else earlier
        self.pending.like = (like.size(), like.dtype, like.device)
        wrapper = PendingGradient(like if base is None else base, self.pending)
        if isinstance(earlier, DTensor):  # whoever has it at hand has the coming one
            earlier._local_tensor = wrapper
            self.handle = earlier
        else:
            self.handle = self.parameter.grad = self._as_gradient(wrapper)

    @property
    def is_there(self) -> bool:
        """Whether it is what the script finds: it has neither cleared nor replaced it."""
        return self._aside is not None or self.parameter.grad is self.handle

    @property
    def is_cleared(self) -> bool:
        """Whether the script has put None in its place."""
        return self._aside is None and self.parameter.grad is None

    def withdraw(self) -> None:
        """Leave in ``.grad`` what was there before, unless the script has put something else there."""
        if self._aside is not None:
            return
        if self.is_cleared and not self.pending.is_sent:  # of no use to who cleared it: others may bring one yet
            self.pending.base = None
        self.was_there, base = self.is_there or (self.is_cleared and not self.pending.is_sent), self.pending.base
        if isinstance(self.handle, DTensor) and base is not None:
            self.handle._local_tensor = base
        elif self.was_there:
            self.parameter.grad = base

    def take_out(self, *, leave_base: bool = True) -> bool:
        """While FSDP is at work: as :meth:`withdraw`, or leave None. Whether it was there."""
        if self._aside is not None or not self.is_there:
            return False
        self._aside, self.parameter.grad = self.parameter.grad, self.pending.base if leave_base else None
        return True

    def spare_base(self) -> None:
        """While it is out: FSDP1 is about to write into the tensor that it finds in ``.grad``."""
        if self._aside is not None and self.parameter.grad is self.pending.base:
            self.parameter.grad = None

    def free(self) -> None:
        """Free the memory that it was given, in a round that looks at gradients only: it is given some again."""
        if isinstance(self.handle, DTensor):
            self.handle._local_tensor = self.handle._local_tensor.new_empty(0)

    def put_back(self) -> None:
        """FSDP has done its work."""
        if self._aside is not None:
            self.parameter.grad, self._aside = self._aside, None

    def settle(self) -> None:
        """The minibatch has ended, and ``.grad`` is final: so is what anybody has at hand."""
        gradient = self.parameter.grad if self.was_there else None
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        final = self.pending.final = self.pending.now() if local is None else local
        self._aside = None
        if isinstance(self.handle, DTensor):
            self.handle._local_tensor = final


def only_expected(gradients: Mapping[int, Expected], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether each parameter has a pending gradient, which the script finds in ``.grad``, and no earlier one in it.
    Asked of all of a unit behind each backward, so at once; ``gradients``: by number of the parameter."""
    for index, parameter in enumerate(parameters):
        one = gradients.get(index)
        if one is None or parameter.grad is not one.handle or one.pending.base is not None:
            return False
    return True


def settled(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What there is of a ``.grad`` without the coming minibatch (of one that is pending, this rank's part). None:
    nothing, or only that will bring any."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if not isinstance(local, PendingGradient):
        return gradient
    return local.pending.base if local.pending.final is None else local.pending.final
