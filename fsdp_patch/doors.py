"""Functions of torch that are entered while anybody listens, and left as they were after that.

[Note: Imported by name] Scripts say ``from torch.nn.utils import clip_grad_norm_`` before they patch anything, so
replacing that attribute would miss them. Torch defines both clipping functions as a wrapper around an inner function
that the wrapper holds in a closure cell (``clip_grad._no_grad``, torch 2.9 to 2.13); the cell is what is exchanged.

[Note: Compiled scripts] Scripts compile what they do with gradients too (``torch.compile`` of a function that scales
them, or around ``optimizer.step``). What listens there looks at frames, waits for other ranks and patches models, none
of which can be traced: the compiler breaks its graph at it.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import GeneratorType
from typing import Any, ClassVar

import torch

from odc.fsdp_patch.listeners import Listeners


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """See [Note: Compiled scripts]."""
    reason = "a script asks for gradients here, for which on-demand communication may have to wait"
    disabled: Callable[..., Any] = torch.compiler.disable(function, reason=reason)  # type: ignore[no-untyped-call]
    return disabled


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """All parameters that an optimizer updates."""
    return [p for group in optimizer.param_groups for p in group["params"]]


@dataclass(frozen=True)
class Argument:
    """Where a function takes what it reads the gradients of: by position or by name, as the caller likes."""

    position: int
    name: str
    parameters: Callable[[Any], tuple[Any, Sequence[torch.Tensor]]]
    """The argument to hand on (a generator is used up by looking), and the parameters in it."""

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Sequence[torch.Tensor]]:
        """The arguments to hand on, and the parameters. Without the argument: as they are, for torch to complain."""
        if self.name in kwargs:
            value, tensors = self.parameters(kwargs[self.name])
            return args, {**kwargs, self.name: value}, tensors
        if self.position < len(args):
            value, tensors = self.parameters(args[self.position])
            return (*args[: self.position], value, *args[self.position + 1 :]), kwargs, tensors
        return args, kwargs, []


def _tensors(parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
    if isinstance(parameters, torch.Tensor):
        return parameters, [parameters]
    tensors = list(parameters)
    # A generator stays one: torch warns about an empty generator, and not about an empty list.
    return (_generate(tensors) if isinstance(parameters, GeneratorType) else tensors), tensors


def _generate(tensors: Sequence[torch.Tensor]) -> Iterable[torch.Tensor]:
    """A generator of ``tensors``."""
    yield from tensors


PARAMETERS = Argument(0, "parameters", _tensors)
OPTIMIZER = Argument(1, "optimizer", lambda optimizer: (optimizer, parameters_of(optimizer)))
SELF_OPTIMIZER = Argument(0, "self", lambda optimizer: (optimizer, parameters_of(optimizer)))
MODULE = Argument(0, "self", lambda module: (module, list(module.parameters())))


class Door(ABC):
    """One function of torch."""

    inside: ClassVar[list[Door]] = []
    """Doors that are being gone through: clip_grad_norm_ calls clip_grads_with_norm_, but the script reads once."""

    def __init__(self, name: str, listeners: Listeners) -> None:
        self.name = name
        self.listeners = listeners
        self._original: Any = None
        self._telling: Any = None

    def open(self) -> None:
        """Enter the function, unless that was done before."""
        if self._telling is None:
            self._original = self._read()
            telling = functools.wraps(self._original, updated=())(self._make_telling(self._original))
            self._telling = untraced(telling)
            self._write(self._telling)

    def shut(self) -> None:
        """Put back what was there. Somebody else may have wrapped it meanwhile: then it stays, and tells nobody."""
        if self._read() is self._telling:
            self._write(self._original)
            self._original = self._telling = None

    def go_through(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``; what it does with gradients is no news."""
        self.inside.append(self)
        try:
            return function(*args, **kwargs)
        finally:
            self.inside.pop()

    @abstractmethod
    def _make_telling(self, original: Any) -> Any: ...

    @abstractmethod
    def _read(self) -> Any: ...

    @abstractmethod
    def _write(self, function: Any) -> None: ...


class _ReadingDoor(Door):
    """Tells before gradients are read."""

    def __init__(self, name: str, listeners: Listeners, argument: Argument) -> None:
        super().__init__(name, listeners)
        self._argument = argument

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return original(*args, **kwargs)
            args, kwargs, tensors = self._argument.look(args, kwargs)
            if tensors:
                self.listeners.tell(lambda listener: listener.before_reading(self.name, tensors))
            result = self.go_through(original, args, kwargs)
            self._after(tensors)
            return result

        return telling

    def _after(self, tensors: Sequence[torch.Tensor]) -> None:
        """Told when the function has returned."""


class InnerFunction(_ReadingDoor):
    """See [Note: Imported by name]."""

    def __init__(self, wrapper: Any, listeners: Listeners) -> None:
        super().__init__(wrapper.__name__.removeprefix("_"), listeners, PARAMETERS)
        self._cell = next(cell for cell in wrapper.__closure__ if callable(cell.cell_contents))

    def _read(self) -> Any:
        return self._cell.cell_contents

    def _write(self, function: Any) -> None:
        self._cell.cell_contents = function


class Method(_ReadingDoor):
    """A method of a class."""

    def __init__(self, owner: type, method: str, listeners: Listeners, argument: Argument) -> None:
        super().__init__(f"{owner.__name__}.{method}", listeners, argument)
        self._owner = owner
        self._method = method

    def _read(self) -> Any:
        return self._owner.__dict__[self._method]

    def _write(self, function: Any) -> None:
        setattr(self._owner, self._method, function)


class ScaledStep(Method):
    """``GradScaler.step``, which skips the optimizer's step where a gradient is not finite."""

    def _after(self, tensors: Sequence[torch.Tensor]) -> None:
        self.listeners.tell(lambda listener: listener.after_scaled_step(tensors))


class Clearing(Method):
    """A method of a class that clears gradients: told before and afterwards."""

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            tensors = self._argument.look(args, kwargs)[2]
            if not self.inside:
                self.listeners.tell(lambda listener: listener.before_clearing(self.name, tensors))
            result = self.go_through(original, args, kwargs)
            self.listeners.tell(lambda listener: listener.after_clearing(tensors))
            return result

        return telling
