"""Interception: finds the place at which an unmodified script ends a minibatch, its first use of final gradients.

This is the first use of a gradient's data (:mod:`odc.fsdp_patch.pending`). Some functions are also intercepted by name.
``optimizer.step`` does not read gradients that are None, and ``GradScaler.step`` may skip the step; torch has public
hooks for it. Clipping (``torch.nn.utils.clip_grad_norm_`` and ``clip_grad_value_``, FSDP1's own ``clip_grad_norm_``)
and ``unscale_`` are intercepted because a rank without a microbatch may not be patched yet, or may hold full
parameters, which have no gradients; and because ranks wait for each other there, so that messages can name the
function. These functions of torch are replaced while there is a listener (:func:`listen`), and restored afterwards.

[Note: Imported by name] Scripts say ``from torch.nn.utils import clip_grad_norm_`` before they patch anything, so
replacing that attribute would miss them. Torch defines both clipping functions as a wrapper around an inner function in
a closure cell (``clip_grad._no_grad``, torch 2.9 to 2.13); ODC replaces the content of the cell.

[Note: Compiled scripts] Scripts may compile their use of gradients (``torch.compile`` of a function that scales them,
or around ``optimizer.step``), and the model itself, around FSDP. ODC's listeners wait for other ranks, patch models and
move memory, which cannot be traced, so the compiler breaks its graph there.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_sharded_data_parallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from odc.errors import UnsupportedError
from odc.fsdp_patch.gradient_events import Listener, Listeners, Trained

STEP = "optimizer.step"


def untraced(
    function: Callable[..., Any],
    reason: str = "a script asks for gradients here, for which on-demand communication may have to wait",
) -> Callable[..., Any]:
    """See [Note: Compiled scripts]."""
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

    def put(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> tuple[Any, Any]:
        """The arguments with another value for this one."""
        if self.name in kwargs:
            return args, {**kwargs, self.name: value}
        return (*args[: self.position], value, *args[self.position + 1 :]), kwargs


def _tensors(parameters: torch.Tensor | Iterable[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
    if isinstance(parameters, torch.Tensor):
        return parameters, [parameters]
    tensors = list(parameters)
    # A generator stays one: torch warns about an empty generator, and not about an empty list.
    return ((tensor for tensor in tensors) if isinstance(parameters, GeneratorType) else tensors), tensors


PARAMETERS = Argument(0, "parameters", _tensors)
OPTIMIZER = Argument(1, "optimizer", lambda optimizer: (optimizer, parameters_of(optimizer)))
OPTIMIZER_FIRST = Argument(0, "optim", lambda optimizer: (optimizer, parameters_of(optimizer)))
SELF_OPTIMIZER = Argument(0, "self", lambda optimizer: (optimizer, parameters_of(optimizer)))
MODULE = Argument(0, "self", lambda module: (module, list(module.parameters())))
FSDP1_MODULE = Argument(0, "module", MODULE.parameters)


class Intercepted(ABC):
    """One function of torch."""

    running: ClassVar[list[Intercepted]] = []
    """Those that are running: FSDP1's clip_grad_norm_ may call torch's, but the script reads once."""

    def __init__(self, name: str, listeners: Listeners) -> None:
        self.name = name
        self.listeners = listeners
        self._original: Any = None
        self._telling: Any = None

    def enter(self) -> None:
        """Enter the function, unless that was done before."""
        if self._telling is None:
            self._original = self._read()
            telling = functools.wraps(self._original, updated=())(self._make_telling(self._original))
            self._telling = untraced(telling)
            self._write(self._telling)

    def leave(self) -> None:
        """Put back what was there. Somebody else may have wrapped it meanwhile: then it stays, and tells nobody."""
        if self._read() is self._telling:
            self._write(self._original)
            self._original = self._telling = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``; what it does with gradients is no news."""
        self.running.append(self)
        try:
            return function(*args, **kwargs)
        finally:
            self.running.pop()

    @abstractmethod
    def _make_telling(self, original: Any) -> Any: ...

    @abstractmethod
    def _read(self) -> Any: ...

    @abstractmethod
    def _write(self, function: Any) -> None: ...


class _Reading(Intercepted):
    """Tells before gradients are read."""

    def __init__(self, name: str, listeners: Listeners, argument: Argument) -> None:
        super().__init__(name, listeners)
        self._argument = argument

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            if self.running:
                return original(*args, **kwargs)
            args, kwargs, tensors = self._argument.look(args, kwargs)
            if tensors:
                self.listeners.tell(lambda listener: listener.before_reading(self.name, tensors))
            meant = [self.listeners.sharded(tensor) for tensor in tensors]
            if any(one is not other for one, other in zip(tensors, meant, strict=True)):
                args, kwargs = self._argument.put(args, kwargs, meant)
            result = self.listeners.run_collective(self.name, tensors, lambda: self.run(original, args, kwargs))
            self._after(tensors)
            return result

        return telling

    def _after(self, tensors: Sequence[torch.Tensor]) -> None:
        """Told when the function has returned."""


class InnerFunction(_Reading):
    """A function of ``torch.nn.utils.clip_grad``, see [Note: Imported by name].

    Other libraries replace these functions too, by anything that can be called. What they have put there is left as it
    is; torch's own function is looked for behind it when it is entered. Where it cannot be found, because the
    replacement does not call it, the attribute of the module is exchanged.
    """

    def __init__(self, wrapper: Any, listeners: Listeners) -> None:
        self._attribute = next(name for name, value in vars(clip_grad).items() if value is wrapper)
        super().__init__(self._attribute.removeprefix("_"), listeners, PARAMETERS)
        self._cell: CellType | None = None

    def enter(self) -> None:
        if self._telling is None:
            self._cell = _inner_cell(getattr(clip_grad, self._attribute), self._attribute)
        super().enter()

    def _read(self) -> Any:
        return getattr(clip_grad, self._attribute) if self._cell is None else self._cell.cell_contents

    def _write(self, function: Any) -> None:
        if self._cell is not None:
            self._cell.cell_contents = function
            return
        before = self._read()
        for module in (clip_grad, nn.utils):
            if getattr(module, self._attribute, None) is before:
                setattr(module, self._attribute, function)


def _inner_cell(start: Any, name: str) -> CellType | None:
    """The closure cell with torch's own function ``name``, of whatever ``start`` leads to."""
    todo, seen = [start], set()
    while todo:
        thing = todo.pop(0)
        if id(thing) in seen or isinstance(thing, type):
            continue
        seen.add(id(thing))
        if isinstance(thing, functools.partial):
            todo.append(thing.func)
        elif isinstance(thing, MethodType):
            todo += [thing.__func__, thing.__self__]
        elif isinstance(thing, FunctionType):
            for cell in thing.__closure__ or ():
                if _is_inner_function(inner := _content(cell), name):
                    return cell
                todo += [inner] * callable(inner)
        elif callable(thing):
            todo.append(type(thing).__call__)
        todo += filter(callable, getattr(thing, "__dict__", {}).values())  # __wrapped__ is there too
    return None


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _is_inner_function(thing: Any, name: str) -> bool:
    """Its wrapper has the same name and module, and says that it is one."""
    is_of_torch = isinstance(thing, FunctionType) and thing.__globals__ is vars(clip_grad)
    return is_of_torch and thing.__name__ == name and not hasattr(thing, "__wrapped__")


class Method(_Reading):
    """A method of a class, or a function that its module looks up by name."""

    def __init__(self, owner: type | ModuleType, method: str, listeners: Listeners, argument: Argument) -> None:
        super().__init__(f"{owner.__name__}.{method}", listeners, argument)
        self._owner = owner
        self._method = method

    def _read(self) -> Any:
        return self._owner.__dict__[self._method]

    def _write(self, function: Any) -> None:
        setattr(self._owner, self._method, function)


class Summoning(Method):
    """What ``summon_full_params`` of FSDP1 does, which may show gradients, too."""

    def __init__(self, listeners: Listeners) -> None:
        super().__init__(fully_sharded_data_parallel, "_unshard_params", listeners, FSDP1_MODULE)
        self.name = "summon_full_params(with_grads=True)"

    def _make_telling(self, original: Any) -> Any:
        reading, signature = super()._make_telling(original), inspect.signature(original)

        def telling(*args: Any, **kwargs: Any) -> Any:
            with_grads = signature.bind(*args, **kwargs).arguments["with_grads"]
            return (reading if with_grads else original)(*args, **kwargs)

        return telling


class ScaledStep(Method):
    """``GradScaler.step``, which skips the optimizer's step where a gradient is not finite."""

    def _after(self, tensors: Sequence[torch.Tensor]) -> None:
        self.listeners.tell(lambda listener: listener.after_scaled_step(tensors))


class Clearing(Method):
    """A method of a class that clears gradients: told before and afterwards."""

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            tensors = self._argument.look(args, kwargs)[2]
            if not self.running:
                self.listeners.tell(lambda listener: listener.before_clearing(self.name, tensors))
            result = self.run(original, args, kwargs)
            self.listeners.tell(lambda listener: listener.after_clearing(tensors))
            return result

        return telling


class Moving(Method):
    """``Module._apply``, below ``to``, ``cpu``, ``float`` and others, which exchanges parameters and gradients. FSDP's
    own goes on behind that of its base."""

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            if self.running:
                return original(*args, **kwargs)
            tensors = self._argument.look(args, kwargs)[2]
            self.listeners.tell(lambda listener: listener.before_moving(tensors))
            try:
                return self.run(original, args, kwargs)
            finally:
                self.listeners.tell(lambda listener: listener.after_moving(tensors))

        return telling


class Initialising(Method):
    """The function with which checkpoints give an optimizer a state before its first step: if it finds no gradients.
    Those that are pending are none, for one that never steps afterwards either (SGD has no state)."""

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            tensors = self._argument.look(args, kwargs)[2]
            if not any(one in _stepped for one in (*args, *kwargs.values())):
                self.listeners.tell(lambda listener: listener.before_initialising(tensors))
            return original(*args, **kwargs)

        return telling


class Wait(Method):
    """A method of a class that waits for other ranks."""

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            return self.listeners.run_collective("a collective of the script", None, lambda: original(*args, **kwargs))

        return telling


class Backward(Method):
    """The work of autograd, with waits for collectives that no :class:`Wait` sees: in C++, or in compiled code."""

    def _make_telling(self, original: Any) -> Any:
        def telling(*args: Any, **kwargs: Any) -> Any:
            return self.listeners.run_backward(lambda: original(*args, **kwargs))

        return telling


# All of them

_hooks: list[Any] = []
_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def listen(listener: Listener) -> Callable[[], None]:
    """Tell ``listener`` what this process does with gradients, until it is gone or the returned undo is called."""
    return _LISTENERS.add(listener)


def listening() -> list[Listener]:
    """All who listen."""
    return _LISTENERS.all()


def trained() -> Trained:
    """What this process has trained so far. Sessions add to it."""
    return _LISTENERS.trained


def _enter() -> None:
    for one in _INTERCEPTED:
        one.enter()
    _hooks[:] = [
        register_optimizer_step_pre_hook(untraced(_before_step)),
        register_optimizer_step_post_hook(untraced(_after_step)),
    ]


def _leave() -> None:
    while _hooks:
        _hooks.pop().remove()
    for one in _INTERCEPTED:
        one.leave()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """A closure runs backward inside step(): gradients are final after it, not before it."""
    tensors = parameters_of(optimizer)
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
    if closure is None:
        _LISTENERS.tell(lambda listener: listener.before_reading(STEP, tensors))
        return None
    if isinstance(optimizer, torch.optim.LBFGS):
        if not any(listener.owns(tensors) for listener in _LISTENERS.all()):
            return None
        raise UnsupportedError(
            "LBFGS evaluates its closure several times inside one step() and changes the parameters in between, which "
            "on-demand communication cannot follow: use another optimizer, or plain FSDP"
        )

    def final_closure() -> Any:
        loss = closure()
        _LISTENERS.tell(lambda listener: listener.before_reading(STEP, tensors))
        return loss

    if "closure" in kwargs:
        return args, {**kwargs, "closure": final_closure}
    return (args[0], final_closure, *args[2:]), kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _steps_inside_another(optimizer):
        return  # Lookahead and its like change the parameters again when the inner step has returned
    tensors = parameters_of(optimizer)
    _stepped.add(optimizer)
    _LISTENERS.tell(lambda listener: listener.after_step(STEP, tensors))


def _steps_inside_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step of another optimizer, as torch wraps it for its hooks, is waiting for this one."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        frame = caller
        if frame.f_code is _STEP_WRAPPER:
            outer = frame.f_locals["args"][0]
            if outer is not optimizer:
                return True
    return False


_LISTENERS = Listeners(_enter, _leave)
_STEP_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__
_INTERCEPTED: tuple[Intercepted, ...] = (
    InnerFunction(clip_grad.clip_grad_norm_, _LISTENERS),
    InnerFunction(clip_grad.clip_grad_value_, _LISTENERS),
    Method(torch.amp.GradScaler, "unscale_", _LISTENERS, OPTIMIZER),
    ScaledStep(torch.amp.GradScaler, "step", _LISTENERS, OPTIMIZER),  # a fused optimizer unscales by itself
    Method(ShardedGradScaler, "unscale_", _LISTENERS, OPTIMIZER),
    Method(FullyShardedDataParallel, "clip_grad_norm_", _LISTENERS, MODULE),
    Summoning(_LISTENERS),
    Initialising(state_dict, "_init_optim_state", _LISTENERS, OPTIMIZER_FIRST),
    Clearing(torch.optim.Optimizer, "zero_grad", _LISTENERS, SELF_OPTIMIZER),
    Clearing(nn.Module, "zero_grad", _LISTENERS, MODULE),
    Moving(nn.Module, "_apply", _LISTENERS, MODULE),
    Moving(FSDPModule, "_apply", _LISTENERS, MODULE),
    Moving(FullyShardedDataParallel, "_apply", _LISTENERS, MODULE),
    Wait(dist.Work, "wait", _LISTENERS, MODULE),
    Wait(AsyncCollectiveTensor, "wait", _LISTENERS, MODULE),  # collectives of DTensors: checkpoints, full_tensor()
    Wait(AsyncCollectiveTensor, "trigger_wait", _LISTENERS, MODULE),
    Backward(torch.autograd, "_engine_run_backward", _LISTENERS, MODULE),
)
