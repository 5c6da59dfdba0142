"""Whether parameters are still what was published, asked without making a host wait for its device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar

import torch

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]


class Comparison(ABC):
    """Compares tensors bit by bit, and says which were found to differ: at once, or when it is known."""

    answers_at_once: ClassVar[bool]
    """Else later; and then looking at a few elements often is not cheap."""

    @abstractmethod
    def compare(self, pairs: Pairs, what: str) -> str | None:
        """Ask whether the tensors of each pair, integers of equal shape, are equal.

        Returns:
            the ``what`` of a comparison, this one or an earlier one, that has found a difference; else None.
        """

    @abstractmethod
    def found(self) -> str | None:
        """As :meth:`compare`, asking nothing new."""


class HostComparison(Comparison):
    """On a CPU the answer is there at once."""

    answers_at_once = True

    def compare(self, pairs: Pairs, what: str) -> str | None:
        return None if all(torch.equal(left, right) for left, right in pairs) else what

    def found(self) -> str | None:
        return None


Verdict = Callable[[], bool | None]


class DeviceComparison(Comparison):
    """On a GPU the answer comes later: usually within the same minibatch, before its gradients are used.

    ``torch.equal`` would make the host wait until the stream has come to the comparison. Few elements would cost as
    many launches as all of them, so all are compared, once per minibatch, and versions are checked in between.

    Args:
        read_later: starts to read a bool of the device; what it returns gives the bool, or None if it is not here yet.
    """

    answers_at_once = False

    def __init__(self, read_later: Callable[[torch.Tensor], Verdict] | None = None) -> None:
        self._read_later = read_later or _read_later
        self._pending: deque[tuple[str, Verdict]] = deque()
        self._found: str | None = None

    def compare(self, pairs: Pairs, what: str) -> str | None:
        flags = [torch.ne(left, right).any() for left, right in pairs if left.numel()]
        if flags:
            self._pending.append((what, self._read_later(torch.stack(flags).any())))
        return self.found()

    def found(self) -> str | None:
        while self._pending and self._found is None:
            what, verdict = self._pending[0]
            differs = verdict()
            if differs is None:
                break
            self._pending.popleft()
            if differs:
                self._found = what
        return self._found


def _read_later(flag: torch.Tensor) -> Verdict:
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    event = torch.cuda.current_stream(flag.device).record_event()
    return lambda: bool(host) if event.query() else None


def comparison_for(device: torch.device) -> Comparison:
    """What compares tensors on ``device``."""
    return HostComparison() if device.type == "cpu" else DeviceComparison()
