"""Gradients that are not there yet: what stands in ``.grad`` until the minibatch ends, and ends it when it is used.

A script that asks for a gradient says so by using its data. So ``.grad`` of what was pushed is a tensor without data
(:class:`PendingGradient`; under FSDP2 a DTensor around one), and the first operation on it ends the minibatch and goes
on with the final gradient. That knows no reader by name: a norm by hand, ``foreach`` functions, compiled ones, torch's
own pipeline schedules, libraries that nobody here has heard of. What can be asked without data (``is None``, shapes,
devices) ends nothing, and nobody pays for a gradient that is not used.

[Note: Gradients that others will bring] A gradient is also pending where this rank has pushed none, since the others
may: under plain FSDP a rank without a microbatch runs one that counts nothing, and finds gradients afterwards. So, once
a gradient was cleared, and as soon as this rank has pushed anything, what would be None is pending as well. If nobody
brings any, it is None when the minibatch has ended, and zeros to who has it at hand by then (``is None`` was asked when
no rank could know). Where an old gradient was not cleared, a look at it and the use of the coming one differ by their
place in the script only, see [Note: Old gradients on an idle rank].
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.weak import TensorWeakRef

_aten = torch.ops.aten
_ALIASES = (_aten.detach.default, _aten.alias.default)  # .data, .detach()
_ON_ITSELF = (_aten.detach_.default,)
_ZEROES = (_aten.zero_.default, _aten._foreach_zero_.default)

Use = Callable[["Pending"], torch.Tensor]
"""Gives the data of a gradient to somebody who needs it: now, or after ending the minibatch."""


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
        return wrapper

    def __init__(self, like: torch.Tensor, pending: Pending) -> None:
        self.pending = pending

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _ALIASES:
            return PendingGradient(args[0], args[0].pending)
        if func in _ON_ITSELF:
            return args[0]
        is_clearing = func in _ZEROES

        def data(wrapper: PendingGradient) -> torch.Tensor:
            pending = wrapper.pending
            if is_clearing and pending.is_nothing:
                return torch.empty(0, device=wrapper.device)  # zeros already, wherever the others are
            return pending.data()

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
    """The coming gradient of one parameter, in its ``.grad``. It keeps neither that nor the parameter.

    Args:
        parameter: as an optimizer holds it.
        like: shape, dtype and device of this rank's part of the gradient.
        use: called when somebody needs the data.
        reduction: tells when FSDP, and not the script, is at work.
        as_gradient: makes what stands in ``.grad`` of a tensor (under FSDP2, a DTensor).
    """

    __slots__ = ("_aside", "_handle", "_like", "_parameter", "_use", "base", "final", "is_sent", "reduction", "stood")

    def __init__(
        self,
        parameter: nn.Parameter,
        like: torch.Tensor,
        use: Use,
        reduction: Reduction,
        as_gradient: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> None:
        earlier = parameter.grad
        self.base = earlier._local_tensor if isinstance(earlier, DTensor) else earlier
        """The gradient that was there, to which it will be added."""
        self.final: torch.Tensor | None = None
        self.is_sent = False
        """This rank has pushed to it."""
        self.stood = True
        """The script had neither cleared nor replaced it when the minibatch ended."""
        self._use = use
        self.reduction = reduction
        self._like = (like.size(), like.dtype, like.device)
        self._parameter = TensorWeakRef(parameter)  # a plain reference loses tensors up to torch 2.9
        self._aside: torch.Tensor | None = None
        wrapper = PendingGradient(like if self.base is None else self.base, self)
        if isinstance(earlier, DTensor):  # whoever has it at hand has the coming one
            earlier._local_tensor = wrapper
            handle: torch.Tensor = earlier
        else:
            handle = as_gradient(wrapper)
            parameter.grad = handle
        self._handle = TensorWeakRef(handle)

    def data(self) -> torch.Tensor:
        """For who needs it."""
        return self._use(self) if self.final is None else self.final

    def now(self) -> torch.Tensor:
        """What there is before the end of the minibatch."""
        size, dtype, device = self._like
        return torch.zeros(size, dtype=dtype, device=device) if self.base is None else self.base

    def is_of(self, parameter: nn.Parameter) -> bool:
        return self._parameter() is parameter

    @property
    def key(self) -> int:
        """The id of the parameter."""
        return id(self._parameter())

    @property
    def handle(self) -> torch.Tensor | None:
        """What stands, or has stood, in ``.grad``, if anybody has it still."""
        handle: torch.Tensor | None = self._handle()
        return handle

    @property
    def is_nothing(self) -> bool:
        """Zeros so far, as far as this rank is concerned."""
        return self.final is None and self.base is None and not self.is_sent

    @property
    def stands(self) -> bool:
        """Whether it is what the script finds: it has neither cleared nor replaced it."""
        parameter = self._parameter()
        gradient = None if parameter is None else parameter.grad
        return self._aside is not None or (gradient is not None and gradient is self._handle())

    @property
    def is_cleared(self) -> bool:
        """Whether the script has put None in its place."""
        parameter = self._parameter()
        return self._aside is None and parameter is not None and parameter.grad is None

    def withdraw(self) -> None:
        """Leave in ``.grad`` what was there before, unless the script has put something else there."""
        if self._aside is not None:
            return
        self.stood = self.stands
        parameter, handle = self._parameter(), self._handle()
        if isinstance(handle, DTensor) and self.base is not None:
            handle._local_tensor = self.base
        elif self.stood and parameter is not None:
            parameter.grad = self.base

    def step_aside(self, *, leave_base: bool = True) -> bool:
        """While FSDP is at work: as :meth:`withdraw`, or leave None. Whether it has stood there."""
        parameter = self._parameter()
        if parameter is None or self._aside is not None or not self.stands:
            return False
        self._aside, parameter.grad = parameter.grad, self.base if leave_base else None
        return True

    def spare_base(self) -> None:
        """While it has stepped aside: FSDP1 is about to write into the tensor that it finds in ``.grad``."""
        parameter = self._parameter()
        if self._aside is not None and parameter is not None and parameter.grad is self.base:
            parameter.grad = None

    def step_back(self) -> None:
        """FSDP has done its work."""
        parameter = self._parameter()
        if self._aside is not None and parameter is not None:
            parameter.grad, self._aside = self._aside, None

    def settle(self) -> None:
        """The minibatch has ended, and ``.grad`` is final: so is what anybody has at hand."""
        parameter, handle = self._parameter(), self._handle()
        gradient = parameter.grad if self.stood and parameter is not None else None
        local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        self.final = self.now() if local is None else local
        self._aside = None
        if isinstance(handle, DTensor):
            handle._local_tensor = self.final


def stand_alone(gradients: Mapping[int, Pending], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether each parameter has a pending gradient, which the script finds in ``.grad``, and no earlier one in it.
    Asked of all of a unit behind each backward, so at once; ``gradients``: by number of the parameter."""
    for index, parameter in enumerate(parameters):
        pending, gradient = gradients.get(index), parameter.grad
        if pending is None or gradient is None or gradient is not pending._handle() or pending.base is not None:
            return False
    return True


def settled(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """What there is of a ``.grad`` without the coming minibatch (of one that is pending, this rank's part). None:
    nothing, or only that will bring any."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if not isinstance(local, PendingGradient):
        return gradient
    return local.pending.base if local.pending.final is None else local.pending.final
