"""Patch every FSDP model of a process at its first use, until the end of a block or a script.

The first use is the first forward, or the first use of gradients on a rank that had nothing to compute. By then the
script has done all its wrapping and loading. For the same reason FSDP itself initializes a model at the first forward
("lazy init"): FSDP2 in ``FSDPState._lazy_init``, FSDP1 in ``FullyShardedDataParallel.forward``. Both methods, and those
that make modules FSDP modules, are replaced on their classes until :meth:`FsdpRoots.close`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp._runtime_utils import _lazy_init

from odc.errors import UnsupportedError
from odc.fsdp_patch.fsdp2 import find_fsdp2_units
from odc.fsdp_patch.gradient_events import Listener
from odc.fsdp_patch.interception import listen, listening, untraced
from odc.fsdp_patch.patching import default_group
from odc.fsdp_patch.session import Session, find_session
from odc.fsdp_patch.unit import shadow
from odc.setup.agreement import ProcessGroupExchange, gather_json

Patch = Callable[[nn.Module], Session]
Say = Callable[[str], None]
Agree = Callable[[nn.Module, tuple[int, int]], Sequence[Sequence[int]]]
"""Every rank's two numbers, over the ranks of a module's mesh."""

OnPatched = Callable[[nn.Module, Session, bool], None]
"""Told of each model that was patched, here or by the script; the bool: in a forward of it, whose hooks torch has
collected already."""

_SETS_UP = "a model may be patched here, for which ranks wait for each other"


def gather_numbers(module: nn.Module, numbers: tuple[int, int]) -> Sequence[Sequence[int]]:
    """Each rank's ``numbers``. Collective over the mesh of ``module``."""
    group, device = default_group(module)
    everyone: list[list[int]] = gather_json(ProcessGroupExchange(group, device), numbers)
    return everyone


class AutomaticPatching(Listener):
    """Patches each FSDP root when it is first used; the owner of the sessions, with :meth:`close`.

    A root that the script has patched by itself stays as it is, and its session is adopted: reported, aborted, closed.

    [Note: One order] Patching is collective, and ranks may come to it with different roots: one computes with a
    reference model first, another has no microbatch, comes with the policy that its optimizer updates, and will not use
    the reference model in this minibatch at all. So the ranks that come tell each other the number of their root. If it
    is the same, they patch that one. If not, they patch all roots that all of them have so far, in the order of their
    numbers: every rank wraps its models in the same order. Not always all: others may not be loaded yet.
    """

    def __init__(
        self, patch: Patch, say: Say, agree: Agree = gather_numbers, on_patched: OnPatched | None = None
    ) -> None:
        self._patch = patch
        self._say = say
        self._agree = agree
        self._on_patched = on_patched
        self._sessions: list[weakref.ref[Session]] = []
        self.learned = ""
        """By loaders, what they say of it."""
        self._roots = FsdpRoots(self._on_root)
        # From the start: the first closure of optimizer.step(closure) contains the first forward.
        self._undo = listen(self)

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """A rank without a microbatch patches where it comes for the other ranks' gradients."""
        self._roots.gradients_read(tensors)

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._roots.pending(tensors))

    def _on_root(self, module: nn.Module, computes: bool) -> None:
        wanted = self._roots.number(module)
        while True:  # [Note: One order]
            everyone = self._agree(module, (wanted, self._roots.num_known))
            if all(number == wanted for number, _ in everyone):
                self._patch_root(module, computes)
                return
            limit = min(num_known for _, num_known in everyone)
            roots = [m for m in [module, *self._roots.pending()] if self._roots.number(m) < limit]
            roots = [m for m in roots if _ranks(m) == _ranks(module)]
            if not roots:
                raise UnsupportedError(
                    f"this rank uses {model_name(module)} while another rank first uses a model that this rank does "
                    "not have or has used before. Wrap models in the same order on all ranks."
                )
            for root in sorted(roots, key=self._roots.number):
                self._roots.mark(root)
                self._patch_root(root, computes and root is module)
            if module in roots:
                return

    def _patch_root(self, module: nn.Module, computes: bool) -> None:
        name = model_name(module)
        session = find_session(module)
        if session is not None:
            if session not in self.sessions:  # of which this module may be one of several roots
                self._adopt(module, session, computes)
                self._say(f"odc: {name} was patched by the script, with the script's options: {session.describe()}")
            return
        try:
            session = self._patch(module)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from error
        self._adopt(module, session, computes)
        self._say(f"odc: patched {name}: {session.describe()}")

    def _adopt(self, module: nn.Module, session: Session, computes: bool) -> None:
        self._sessions.append(weakref.ref(session))
        if self._on_patched is not None:
            self._on_patched(module, session, computes)

    @property
    def sessions(self) -> Sequence[Session]:
        """Of the models that are still there."""
        return [session for ref in self._sessions if (session := ref()) is not None]

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        for session in self.sessions:
            session.abort(error)

    def close(self) -> None:
        """Give every model back to plain FSDP, also if one cannot be closed. A second call does nothing."""
        with contextlib.ExitStack() as stack:
            for session in self.sessions:
                stack.callback(session.close)
            stack.callback(self._undo)
            stack.callback(self._roots.close)


def _ranks(module: nn.Module) -> list[int]:
    """Over which a root is sharded; none if its process group was destroyed."""
    try:
        return dist.get_process_group_ranks(default_group(module)[0])
    except KeyError:
        return []


def model_name(module: nn.Module) -> str:
    """The class of a model as its author knows it, and which FSDP shards it."""
    inner = getattr(module, "_fsdp_wrapped_module", None)
    if inner is not None:
        return f"{type(inner).__name__} (FSDP1)"
    return f"{type(module).__name__.removeprefix('FSDP')} (FSDP2)"


def is_patching() -> bool:
    """Whether FSDP models of this process are patched at their first use."""
    return any(isinstance(listener, AutomaticPatching) for listener in listening())


def is_sharded(model: nn.Module) -> bool:
    """Whether any unit of an FSDP model is sharded rather than only replicated."""
    if isinstance(model, FullyShardedDataParallel):
        return True
    return any(unit.is_sharded for unit in find_fsdp2_units(model))  # torch's replicate() shares FSDP2's class


class FsdpRoots:
    """Calls ``on_root(module, computes)`` once for every FSDP root, before its first use goes on.

    ``computes`` tells a first forward from a first reading of gradients. Roots have numbers, in the order in which
    their modules became FSDP modules, which is the same on every rank.
    """

    def __init__(self, on_root: Callable[[nn.Module, bool], None]) -> None:
        self._on_root = on_root
        self._undo: list[Callable[[], None]] = []
        self._known: list[weakref.ref[nn.Module]] = []
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        sharded = (FSDPModule, FullyShardedDataParallel)
        gc.collect()  # a model that was dropped, and not collected yet on one rank only, would have a number there
        for module in [m for m in gc.get_objects() if issubclass(type(m), sharded)]:  # isinstance would ask proxies
            self._register(module)
        # Whoever is given its own parameters by name may call one of them `self` or `module`, so shadows take theirs by
        # position only.
        self._enter_fsdp2()
        self._enter_fsdp1()

    def number(self, module: nn.Module) -> int:
        """Of an FSDP module."""
        return self._numbers[module]

    @property
    def num_known(self) -> int:
        """FSDP modules that this rank has made so far: the next number."""
        return len(self._known)

    def mark(self, module: nn.Module) -> bool:
        """From now on this root and all below it were met. Returns whether they were not before."""
        if module in self._met:
            return False
        self._met.update(m for m in module.modules() if m in self._numbers)
        if isinstance(module, FSDPModule):
            module._get_fsdp_state()._lazy_init()
        else:
            _lazy_init(module, module)
        return True

    def pending(self, tensors: Sequence[torch.Tensor] | None = None) -> list[nn.Module]:
        """Roots that were not met yet, in the order of their numbers: all, or those with any of these parameters.

        FSDP refuses to compute with a module around one that has computed as a root: it never becomes one.
        """
        modules = [m for ref in self._known if (m := ref()) is not None and m not in self._met]
        modules = [m for m in modules if all(inner not in self._met for inner in m.modules())]
        if not modules:
            return []
        below = {id(inner) for m in modules for inner in m.modules() if inner is not m}
        roots = [m for m in modules if id(m) not in below]
        if tensors is not None:
            wanted = {id(t) for t in tensors}
            roots = [m for m in roots if not wanted.isdisjoint(map(id, m.parameters()))]
        return [m for m in roots if is_sharded(m)]

    def gradients_read(self, tensors: Sequence[torch.Tensor]) -> None:
        """A script is about to read the gradients of these parameters."""
        for module in self.pending(tensors):
            if self.mark(module):
                self._on_root(module, False)

    def _register(self, module: nn.Module) -> None:
        if module not in self._numbers:
            self._numbers[module] = len(self._known)
            self._known.append(weakref.ref(module))

    def _enter_fsdp2(self) -> None:
        original_init, original_lazy_init = FSDPState.init, FSDPState._lazy_init

        @functools.wraps(original_init)
        def init(state: Any, /, *args: Any, **kwargs: Any) -> None:
            original_init(state, *args, **kwargs)
            self._register(state._modules[0])

        @functools.wraps(original_lazy_init)
        def lazy_init(state: Any, /) -> None:
            original_lazy_init(state)
            self._meet_fsdp2(state)

        self._undo.append(shadow(FSDPState, init=init, _lazy_init=untraced(lazy_init, _SETS_UP)))

    def _enter_fsdp1(self) -> None:
        original_init, original_forward = FullyShardedDataParallel.__init__, FullyShardedDataParallel.forward
        meet = untraced(self._meet_fsdp1, _SETS_UP)

        @functools.wraps(original_init)
        def init(wrapper: Any, /, *args: Any, **kwargs: Any) -> None:
            original_init(wrapper, *args, **kwargs)
            self._register(wrapper)

        @functools.wraps(original_forward)
        def forward(wrapper: Any, /, *args: Any, **kwargs: Any) -> Any:
            meet(wrapper)
            return original_forward(wrapper, *args, **kwargs)

        self._undo.append(shadow(FullyShardedDataParallel, __init__=init, forward=forward))

    def _meet_fsdp2(self, state: Any) -> None:
        module = state._modules[0]
        if state._is_root and self._is_new(module):
            self._met.update(m for m in module.modules() if m in self._numbers)
            if is_sharded(module):
                self._on_root(module, True)

    def _meet_fsdp1(self, module: Any) -> None:
        if self._is_new(module):
            _lazy_init(module, module)
            if module._is_root and self.mark(module):
                self._on_root(module, True)

    def _is_new(self, module: nn.Module) -> bool:
        """Whether it has not been met. To one that is closed, and that another wrapper still calls, none is."""
        return module not in self._met and bool(self._undo)

    def close(self) -> None:
        """Leave the classes of torch as they were. Idempotent."""
        while self._undo:
            self._undo.pop()()
