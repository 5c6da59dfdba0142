"""Fault injection for tests: hooks in the normal code path.

``ODC_FAULT="rank=1,point=scatter.after_chunk,at=3,do=kill"`` makes rank 1 kill itself the third time it passes the
point ``scatter.after_chunk``. Without ``ODC_FAULT`` a hook costs one call of a C function.

``do`` is one of ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise`` (:class:`~odc.errors.FaultInjected`), ``exit``
(``os._exit(0)``), ``segv`` (a real segmentation fault), ``delay:SECONDS`` or ``jitter:SECONDS`` (a random delay of up
to that long, at every pass). ``at`` counts from 1; without it, every pass fires.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from odc.errors import ConfigError, FaultInjected

POINTS = (
    "gather.before",
    "gather.after_chunk",
    "scatter.before",
    "scatter.after_chunk",
    "scatter.before_post",
    "scatter.added",
    "publish.before",
    "publish.after",
    "finish.before",
    "finish.before_done",
    "finish.after_done",
    "replicas.before",
    "items.publish.before",
    "items.publish.before_post",
    "items.read.before",
    "items.read.after_chunk",
    "items.done.before",
    "wait",
    "daemon.before_add",
    "daemon.after_add",
    "setup",
)
ACTIONS = ("kill", "stop", "raise", "exit", "segv", "delay", "jitter")
ANY = "*"


@dataclass(frozen=True)
class FaultSpec:
    """What to do, where, on which rank, at which pass (0: every pass)."""

    rank: int
    point: str
    do: str
    at: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> FaultSpec:
        """Read ``rank=..,point=..,at=..,do=..``; ``rank=*`` and ``point=*`` match all.

        Raises:
            ConfigError: a key, point or action is unknown or a number is not one.
        """
        fields = dict(item.partition("=")[::2] for item in text.split(",") if item)
        unknown = set(fields) - {"rank", "point", "at", "do"}
        if unknown or "do" not in fields or "point" not in fields:
            raise ConfigError(f"ODC_FAULT={text!r}: expected rank=,point=,at=,do= (point and do are required)")
        action, _, argument = fields["do"].partition(":")
        point = fields["point"]
        if action not in ACTIONS:
            raise ConfigError(f"ODC_FAULT do={action!r}: expected one of {', '.join(ACTIONS)}")
        if point != ANY and point not in POINTS:
            raise ConfigError(f"ODC_FAULT point={point!r}: expected one of {', '.join(POINTS)}")
        try:
            rank = -1 if fields.get("rank", ANY) == ANY else int(fields["rank"])
            return cls(rank, point, action, int(fields.get("at", 0)), float(argument or 0))
        except ValueError as error:
            raise ConfigError(f"ODC_FAULT={text!r}: {error}") from None


_NO_FAULT = frozenset[str]().__contains__  # every operation comes to several points: this costs no Python frame


class FaultInjector:
    """Counts the passes through each point of one rank and fires the faults that match."""

    def __init__(self, text: str, rank: int) -> None:
        specs = [FaultSpec.parse(part) for part in text.split(";") if part]
        self._specs = [spec for spec in specs if spec.rank in (-1, rank)]
        self._random = random.Random()
        self.passes: dict[str, int] = {}
        self.fired = 0
        self.hit: Callable[[str], object] = self._pass if self._specs else _NO_FAULT
        """Called by the product at each point; does nothing unless a fault is set for this rank."""

    @property
    def is_set(self) -> bool:
        """Whether this rank has any fault."""
        return bool(self._specs)

    def _pass(self, point: str) -> None:
        count = self.passes[point] = self.passes.get(point, 0) + 1
        for spec in self._specs:
            if spec.point in (ANY, point) and spec.at in (0, count):
                self.fired += 1
                self._fire(spec, point)

    def _fire(self, spec: FaultSpec, point: str) -> None:
        if spec.do == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif spec.do == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif spec.do == "exit":
            os._exit(0)
        elif spec.do == "segv":
            ctypes.string_at(0)
        elif spec.do == "raise":
            raise FaultInjected(f"fault injected at {point} (pass {self.passes[point]})")
        elif spec.do == "delay":
            time.sleep(spec.seconds)
        else:
            time.sleep(self._random.random() * spec.seconds)
