"""Change detection: finds parameters that a script has changed after they were published, at less than a tenth of a
gather's cost.

[Note: Changed by hand] The other ranks compute with published parameters, so a rank must not change its parameters
before its next step. The cost of a check is small compared with the operation at which it happens:

- At every gather, before the parameters are used: a sample of the largest parameter of the unit, and the trace of
  another parameter, in turn. A change of all parameters (averaged weights swapped in, decay by hand) is noticed at
  once, a change of one parameter some gathers later. (Not in a backward that will push gradients of the unit, since the
  push follows at once.)
- At every push, before it is sent: the traces of all parameters of the unit.
- All elements: of a unit at its first gather after a publication outside of training; of all units on every rank when a
  minibatch begins, before anything of it is sent.

The *trace* of a parameter has three parts: its version counters, which show writes that torch counts (in place through
the parameter or its local tensor: an optimizer, ``copy_`` under ``no_grad``); its address; and on a CPU a sample of its
elements, which shows writes that torch does not count: ``.data``, NumPy, C extensions, ``torch._foreach_*`` on
DTensors.

So every change is noticed at the latest when the next minibatch begins. A change during a minibatch is noticed before
the next gradients of that unit are sent, except for a few elements changed in an uncounted way, which the step
overwrites. Changes after the last push of a minibatch do not matter to other ranks and are not checked.

A write need not be a change: FSDP1's ``summon_full_params`` writes back what it has read, torch 2.9 gives padded shards
new tensors at the first forward, a step with a learning rate of 0 changes nothing, and a change may vanish in the
rounding to the compute dtype. So a changed trace only triggers a comparison of all elements, which decides.

On a GPU a comparison gives its result later (:class:`DeviceComparison`). If nothing is trainable, so that there are no
minibatches, all elements are compared at every gather: a GPU's memory is faster than the link.

Changes that are noticed before a model is used are published again, see :meth:`Guard.changed`: on a GPU those that
torch has counted; the others, whose detection needs a wait, only where a script is likely to have made them, see
:meth:`odc.fsdp_patch.publishing.Publisher.is_any_changed`.
"""

from __future__ import annotations

import ctypes
import itertools
import operator
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, NoReturn

import torch

from odc.errors import ProtocolError
from odc.fsdp_patch.unit import Unit, Watched, as_integers
from odc.minibatch.runtime import Runtime

SAMPLE_PLACES, SAMPLE_BYTES = 4, 64  # of a parameter: so many places, and so many bytes at each (a cache line)

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Guard:
    """Refuses to compute with parameters of one session that are not what was published.

    See [Note: Changed by hand].
    """

    def __init__(self, units: Sequence[Unit], runtime: Runtime) -> None:
        self._units = units
        self._runtime = runtime
        self._comparison = comparison_for(units[0].device if units else torch.device("cpu"))
        self._is_any_trained = any(unit.trainable_parameters() for unit in units)
        self._traces: list[list[_Trace]] = [[] for _ in units]
        self._whole = [_Whole([]) for _ in units]
        self._turns: list[list[_Trace]] = [[] for _ in units]  # of those with a part of the shard, the largest first
        self._next = [0] * len(units)
        self._is_compared = [False] * len(units)  # all elements, since publication

    def record(self, index: int) -> None:
        """A unit is published as it is now."""
        before, now = self._traces[index], self._units[index].watched()
        if _are_of(before, now):
            if not self._whole[index].is_unchanged():
                for trace in before:
                    trace.renew()
                self._whole[index].renew()
        else:
            has_sample = self._comparison.answers_at_once
            traces = self._traces[index] = [_Trace(watched, has_sample) for watched in now]
            self._whole[index] = _Whole(traces)
            self._turns[index] = sorted((t for t in traces if t.num_bytes), key=lambda t: t.num_bytes, reverse=True)
        self._is_compared[index] = False

    def forget(self) -> None:
        """The session is closed: no parameter is kept."""
        self._traces, self._turns, self._whole = [], [], []

    def check_gather(self, index: int, is_training: bool) -> None:
        """Refuse to compute with a unit that was changed.

        Raises:
            MisuseError: naming the parameter, or the unit. Nothing was computed with it.
            ProtocolError: the answer has come late, after it was computed with; on all ranks.
        """
        is_due = not (self._is_compared[index] or is_training)
        if is_due or not (self._is_any_trained or self._comparison.answers_at_once):
            self.compare(index)
            return
        turns = self._turns[index]
        self._next[index] = turn = (self._next[index] + 1) % max(len(turns), 1)
        if (turns and not turns[0].is_sample_equal()) or (turn < len(turns) and not turns[turn].is_unchanged()):
            self.compare(index)
        elif not self._comparison.answers_at_once:
            self.check_answers()

    def check_push(self, index: int) -> None:
        """Refuse to send gradients of a unit that was changed. Raises as :meth:`check_gather`."""
        if not self._whole[index].is_unchanged():
            self.compare(index)
        elif not self._comparison.answers_at_once:
            self.check_answers()

    def compare(self, index: int) -> None:
        """Refuse a unit of which any element was changed. Raises as :meth:`check_gather`."""
        found = self._comparison.compare(self._units[index].beside(self._published(index)), index)
        if found is not None:
            self._fail(found)
        self.record(index)
        self._is_compared[index] = True

    def check_answers(self) -> None:
        """Refuse to use gradients of parameters that a comparison has found changed since it was asked.

        Raises:
            ProtocolError: as :meth:`check_gather`.
        """
        found = self._comparison.found()
        if found is not None:
            self._fail(found)

    def changed(self, units: Iterable[int], *, waits: bool) -> list[int]:
        """Those of these units that a script has changed since they were published, or found to be as published; or
        written: then others may find theirs changed, and this one, which may have no part of it, has to know.

        Args:
            waits: for a device, to compare all elements there; else only where something tells of a change.
        """
        found, quiet = [], []
        for index in units:
            if self._whole[index].is_unchanged():
                quiet.append(index)
            elif self.is_any_written([index]) or self.is_any_changed([index]):
                found.append(index)
            else:
                self.record(index)
        if waits and not self._comparison.answers_at_once and self.is_any_changed(quiet):
            found += [index for index in quiet if self.is_any_changed([index])]
        return found

    def touched(self, index: int) -> list[torch.Tensor]:
        """The parameters of a unit of which something tells that they have changed since it was published."""
        return [trace.counted[0] for trace in self._traces[index] if not trace.is_unchanged()]

    def is_any_written(self, units: Iterable[int]) -> bool:
        """Whether anything in these units was written that torch has counted, changed or not."""
        return any(trace.is_written() for index in units for trace in self._traces[index])

    def is_any_changed(self, units: Iterable[int]) -> bool:
        """Whether any element of these units differs from what was published. Waits for the device."""
        pairs = (pair for i in units for pair in self._units[i].beside(self._published(i)))
        return self._comparison.any_differ(pairs)

    def _published(self, index: int) -> torch.Tensor:
        return self._units[index].own_part(self._runtime.published_shard(index))

    def _fail(self, index: int) -> NoReturn:
        unit = self._units[index]  # by its elements: a write that torch has counted may have changed others of them
        parts = unit.beside_by_name(self._published(index))
        name = next((name for name, pair in parts if not have_equal_bits(*pair)), None)
        what = f"a parameter of unit {unit.name!r}" if name is None else f"parameter {name!r}"
        text = (
            f"{what} was changed after it was published to the other ranks. Change parameters before optimizer.step, "
            "or call session.publish() on every rank after changing them (odc.session_of(model) finds the session)."
        )
        if self._comparison.answers_at_once:
            raise self._runtime.refusal(text)
        with self._runtime.reporting:  # the answer came late: they have been used
            raise ProtocolError(text)


class _Trace:
    """What a parameter was like when it was published, or last found to be as published."""

    __slots__ = (
        "_attributes",
        "_sampled",
        "_version",
        "address",
        "counted",
        "holder",
        "memory",
        "num_bytes",
        "sample",
    )

    def __init__(self, watched: Watched, has_sample: bool) -> None:
        self.counted = watched.counted
        self.holder = watched.holder
        self.memory = watched.memory
        self.address = self.memory.data_ptr()
        part = watched.memory[watched.part]
        self.num_bytes = part.nbytes
        self.sample = sample_of(part) if has_sample else []
        self.renew()

    def renew(self) -> None:
        """It is as it should be now."""
        self._version = self._count()
        self._sampled = b"".join(self.sample)
        self._attributes = [] if self.holder is None else list(vars(self.holder).values())

    def _count(self) -> int:
        version = 0
        for tensor in self.counted:
            version += tensor._version
        return version

    def is_written(self) -> bool:
        """Whether torch has counted a write, or an attribute was set."""
        return self._count() != self._version or not self.has_same_attributes()

    def has_same_attributes(self) -> bool:
        """Whether nobody has set one: the same objects, or equal numbers."""
        if self.holder is None:
            return True
        before, now = self._attributes, list(vars(self.holder).values())
        return len(before) == len(now) and all(
            one is other or (isinstance(one, (int, float)) and one == other)
            for one, other in zip(before, now, strict=True)
        )

    def is_unchanged(self) -> bool:
        """Whether nothing tells of a change."""
        return not self.is_written() and self.is_sample_equal()

    def is_sample_equal(self) -> bool:
        """Whether it lies where it was, and some elements there are what they were."""
        return self.memory.data_ptr() == self.address and b"".join(self.sample) == self._sampled


def _are_of(traces: Sequence[_Trace], watched: Sequence[Watched]) -> bool:
    """Whether parameters still consist of the same tensors, in the same memory."""
    are_same = [
        trace.memory is now.memory
        and trace.holder is now.holder
        and trace.address == now.memory.data_ptr()
        and all(map(operator.is_, trace.counted, now.counted))
        for trace, now in zip(traces, watched, strict=False)
    ]
    return len(traces) == len(watched) and all(are_same)


class _Whole:
    """The traces of all parameters of a unit at once, for a third of the time."""

    def __init__(self, traces: Sequence[_Trace]) -> None:
        self._counted = list({id(tensor): tensor for trace in traces for tensor in trace.counted}.values())
        self._with_attributes = [trace for trace in traces if trace.holder is not None]
        self._memory = [trace.memory for trace in traces]
        self._addresses = [memory.data_ptr() for memory in self._memory]
        self._sample = [view for trace in traces for view in trace.sample]
        self.renew()

    def renew(self) -> None:
        """It is as it should be now."""
        self._version = self._count()
        self._sampled = b"".join(self._sample)

    def _count(self) -> int:
        return sum([tensor._version for tensor in self._counted])

    def is_unchanged(self) -> bool:
        """Whether nothing tells of a change."""
        return (
            self._count() == self._version  # versions only grow
            and [memory.data_ptr() for memory in self._memory] == self._addresses  # before the samples are read there
            and b"".join(self._sample) == self._sampled
            and all([trace.has_same_attributes() for trace in self._with_attributes])  # noqa: C419 (mostly none)
        )


def sample_of(tensor: torch.Tensor) -> list[memoryview]:
    """A view of some memory of a flat, contiguous tensor on the host: evenly spread, the first and last bytes included.

    Plain addresses, read in a fiftieth of the time that torch takes. They are valid as long as ``tensor`` lives and
    ``data_ptr`` is what it was.
    """
    size = min(SAMPLE_BYTES, tensor.nbytes)
    places = min(SAMPLE_PLACES, -(-tensor.nbytes // SAMPLE_BYTES))
    starts = [(tensor.nbytes - size) * place // max(places - 1, 1) for place in range(places)]
    return [memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr() + start)) for start in starts]


class Comparison(ABC):
    """Compares tensors bit by bit, and says which were found to differ: at once, or when it is known."""

    answers_at_once: ClassVar[bool]
    """Else later; and then looking at a few elements often is not cheap."""

    @abstractmethod
    def compare(self, pairs: Pairs, index: int) -> int | None:
        """Ask whether the tensors of each pair, of equal shape and dtype, are equal bit by bit.

        Returns:
            the ``index`` of a comparison, this one or an earlier one, that has found a difference; else None.
        """

    @abstractmethod
    def found(self) -> int | None:
        """As :meth:`compare`, asking nothing new."""

    @abstractmethod
    def any_differ(self, pairs: Pairs) -> bool:
        """Whether the tensors of any pair differ. Waits for the device, once."""


class HostComparison(Comparison):
    """On a CPU the answer is there at once."""

    answers_at_once = True

    def compare(self, pairs: Pairs, index: int) -> int | None:
        return index if self.any_differ(pairs) else None

    def found(self) -> int | None:
        return None

    def any_differ(self, pairs: Pairs) -> bool:
        return not all(itertools.starmap(have_equal_bits, pairs))


Verdict = Callable[[], bool | None]


class DeviceComparison(Comparison):
    """On a GPU the answer comes later: usually within the same minibatch, before its gradients are used.

    ``torch.equal`` would make the host wait until the stream has come to the comparison.

    Args:
        read_later: starts to read a bool of the device; what it returns gives the bool, or None if it is not here yet.
    """

    answers_at_once = False

    def __init__(self, read_later: Callable[[torch.Tensor], Verdict] | None = None) -> None:
        self._read_later = read_later or _read_later
        self._pending: deque[tuple[int, Verdict]] = deque()
        self._found: int | None = None

    def compare(self, pairs: Pairs, index: int) -> int | None:
        if flags := _differences(pairs):
            self._pending.append((index, self._read_later(torch.stack(flags).any())))
        return self.found()

    def any_differ(self, pairs: Pairs) -> bool:
        flags = _differences(pairs)
        return bool(flags) and bool(torch.stack(flags).any())

    def found(self) -> int | None:
        while self._pending and self._found is None:
            index, verdict = self._pending[0]
            differs = verdict()
            if differs is None:
                break
            self._pending.popleft()
            if differs:
                self._found = index
        return self._found


def _differences(pairs: Pairs) -> list[torch.Tensor]:
    together = (_on_one_device(left, right) for left, right in pairs if left.numel())
    return [torch.ne(as_integers(left), as_integers(right)).any() for left, right in together]


def _on_one_device(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """With CPU offload the parameter is in the host's memory, and what was published of it in a device's."""
    device = right.device if left.is_cpu else left.device
    return left.to(device, non_blocking=True), right.to(device, non_blocking=True)


def _read_later(flag: torch.Tensor) -> Verdict:
    host = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.current_stream(flag.device).record_event()
    return lambda: bool(host) if event.query() else None


def comparison_for(device: torch.device) -> Comparison:
    """What compares tensors on ``device``."""
    return HostComparison() if device.type == "cpu" else DeviceComparison()


def have_equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of equal shape and dtype are equal, where NaN equals itself and 0.0 is not -0.0."""
    if left.is_cpu and right.is_cpu and left.is_contiguous() and right.is_contiguous():  # a third of torch.equal's time
        return bool(_memcmp(left.data_ptr(), right.data_ptr(), left.nbytes) == 0)
    left, right = _on_one_device(left, right)
    return torch.equal(as_integers(left), as_integers(right))


_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
