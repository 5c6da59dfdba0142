"""ODC in every FSDP model of a process, from its first use to the end of the script."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import UnsupportedError
from odc.exchange import ProcessGroupExchange, gather_json
from odc.fsdp_patch import ends
from odc.fsdp_patch.launch.meter import MicrobatchMeter
from odc.fsdp_patch.launch.report import Account
from odc.fsdp_patch.launch.roots import RootWatch
from odc.fsdp_patch.listeners import Listener, Reader
from odc.fsdp_patch.models import default_group
from odc.fsdp_patch.session import Session
from odc.stats import Stats

Patch = Callable[[nn.Module], Session]
Say = Callable[[str], None]
Agree = Callable[[nn.Module, tuple[int, int]], Sequence[Sequence[int]]]
"""Every rank's two numbers, over the ranks of a module's mesh."""


@dataclass
class _Patched:
    """What is known of a patched model. It does not keep the model: scripts drop one and make the next."""

    name: str
    started_s: float
    session: weakref.ref[Session]
    meter: weakref.ref[MicrobatchMeter]
    counters: Stats
    times: list[list[float]]


def gather_numbers(module: nn.Module, numbers: tuple[int, int]) -> Sequence[Sequence[int]]:
    """Each rank's ``numbers``. Collective over the mesh of ``module``."""
    group, device = default_group(module)
    everyone: list[list[int]] = gather_json(ProcessGroupExchange(group, device), numbers)
    return everyone


class AutomaticPatching(Listener):
    """Patches each FSDP root when it is first used; the owner of the sessions, with :meth:`close`.

    [Note: One order] Patching is collective, and ranks may come to it with different roots: one computes with a
    reference model first, another has no microbatch, comes with the policy that its optimizer updates, and will not use
    the reference model in this minibatch at all. So the ranks that come tell each other the number of their root. If it
    is the same, they patch that one. If not, they patch all roots that all of them have so far, in the order of their
    numbers: every rank wraps its models in the same order. Not always all: others may not be loaded yet.
    """

    def __init__(self, patch: Patch, say: Say, agree: Agree = gather_numbers) -> None:
        self._patch = patch
        self._say = say
        self._agree = agree
        self._patched: list[_Patched] = []
        self._watch = RootWatch(self._on_root)
        self._looked_at: dict[tuple[int, int], str] = {}  # where gradients of models not patched yet were read
        # From the start: the first closure of optimizer.step(closure) contains the first forward.
        self._undo = ends.listen(self)

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        """A rank without a microbatch patches where it comes for the other ranks' gradients."""
        self._watch.gradients_read(tensors)

    @property
    def notes_readers(self) -> bool:
        return bool(self._watch.pending())

    def before_reading_by_hand(self, reader: Reader, tensors: Sequence[torch.Tensor]) -> None:
        """There is nothing to read yet; the session will want to know."""
        self._looked_at[reader.place, reader.path] = str(reader)

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return bool(self._watch.pending(tensors))

    def _on_root(self, module: nn.Module, computes: bool) -> None:
        wanted = self._watch.number(module)
        while True:  # [Note: One order]
            everyone = self._agree(module, (wanted, self._watch.num_known))
            if all(number == wanted for number, _ in everyone):
                self._patch_root(module, computes)
                return
            limit = min(num_known for _, num_known in everyone)
            roots = [m for m in [module, *self._watch.pending()] if self._watch.number(m) < limit]
            roots = [m for m in roots if _ranks(m) == _ranks(module)]
            if not roots:
                raise UnsupportedError(
                    f"this rank uses {model_name(module)} while another rank first uses a model that this rank does "
                    "not have or has used before. Wrap models in the same order on all ranks."
                )
            for root in sorted(roots, key=self._watch.number):
                self._watch.mark(root)
                self._patch_root(root, computes and root is module)
            if module in roots:
                return

    def _patch_root(self, module: nn.Module, computes: bool) -> None:
        name = model_name(module)
        try:
            session = self._patch(module)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from error
        session.looked_before(self._looked_at)
        meter = MicrobatchMeter(module, session)
        self._patched.append(
            _Patched(
                name, time.monotonic(), weakref.ref(session), weakref.ref(meter), session.counters, meter.minibatches
            )
        )
        if computes:
            meter.start()  # torch has collected the hooks of this forward already
        self._say(f"odc: patched {name}: {session.describe()}")

    @property
    def sessions(self) -> Sequence[Session]:
        """Of the models that are still there."""
        return [session for patched in self._patched if (session := patched.session()) is not None]

    def accounts(self) -> list[Account]:
        """What this rank has measured, model by model."""
        now_s = time.monotonic()
        return [
            Account(
                p.name,
                now_s - p.started_s,
                p.counters.wait_s,
                p.times,
                max(0.0, p.counters.communication_s - p.counters.wait_s),
            )
            for p in self._patched
        ]

    def abort(self, error: BaseException) -> None:
        """Tell the other ranks why this one ends."""
        for session in self.sessions:
            session.abort(error)

    def close(self) -> None:
        """Give every model back to plain FSDP, also if one cannot be closed. Idempotent, never waits."""
        with contextlib.ExitStack() as stack:
            for session in self.sessions:
                stack.callback(session.close)
            for meter in (patched.meter() for patched in self._patched):
                if meter is not None:
                    stack.callback(meter.close)
            stack.callback(self._undo)
            stack.callback(self._watch.close)


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
