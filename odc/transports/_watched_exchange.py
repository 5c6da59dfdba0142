"""An exchange over ranks whose processes are watched: when it breaks, it can say whose end that was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from odc.errors import SetupError
from odc.exchange import BrokenExchangeError, Exchange

_MOMENT_S = 1.0  # a process that ends closes its connections first, and is seen to be dead a little later
_POLL_S = 0.02


class WatchedExchange:
    """See :class:`~odc.exchange.Exchange`. ``gone``: describes the ranks that have ended."""

    def __init__(self, exchange: Exchange, gone: Callable[[], Sequence[str]]) -> None:
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self._exchange = exchange
        self._gone = gone

    def all_gather(self, payload: bytes) -> list[bytes]:
        try:
            return self._exchange.all_gather(payload)
        except BrokenExchangeError as problem:
            deadline = time.monotonic() + _MOMENT_S
            while not (gone := self._gone()):
                if time.monotonic() > deadline:
                    raise SetupError(str(problem)) from None
                time.sleep(_POLL_S)
            raise SetupError(f"set-up cannot go on: {'; '.join(gone)}") from None
