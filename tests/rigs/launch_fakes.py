"""What the tests of ``odc run`` use in place of a session."""

from __future__ import annotations

from collections.abc import Callable

from odc.timeline import Stats


class FakeSession:
    """Time passes by hand; a push is what a backward does."""

    def __init__(self) -> None:
        self.on_finish: Callable[[], None] | None = None
        self.now_s = 0.0
        self._stats = Stats()

    def stats(self) -> Stats:
        return Stats(**self._stats.as_dict())  # type: ignore[arg-type]

    @property
    def counters(self) -> Stats:
        return self._stats

    def clock(self) -> float:
        return self.now_s

    def compute(self, seconds: float, waiting_s: float = 0.0, pushes: int = 0) -> None:
        self.now_s += seconds + waiting_s
        self._stats.gather_s += waiting_s
        self._stats.pushes += pushes

    def finish(self) -> None:
        assert self.on_finish is not None
        self.on_finish()
        self.compute(0.0, 5.0)  # waiting for the others
