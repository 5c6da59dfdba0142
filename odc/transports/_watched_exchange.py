"""An exchange over ranks whose processes are watched: when it breaks, it can say whose end that was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from odc.errors import SetupError
from odc.exchange import BrokenExchangeError, Exchange, no_op

_MOMENT_S = 1.0  # a process that ends closes its connections first, and is seen to be dead a little later
_POLL_S = 0.02


class WatchedExchange:
    """See :class:`~odc.exchange.Exchange`.

    Args:
        gone: describes the ranks that have ended.
        notice: what a rank has told of its failure, which ends every wait for it.
    """

    def __init__(self, exchange: Exchange, gone: Callable[[], Sequence[str]], notice: Callable[[], str | None]) -> None:
        self.rank = exchange.rank
        self.world_size = exchange.world_size
        self.global_ranks = exchange.global_ranks
        self._exchange = exchange
        self._gone = gone
        self._notice = notice

    def all_gather(self, payload: bytes, check: Callable[[], None] = no_op) -> list[bytes]:
        def check_all() -> None:
            check()
            if (notice := self._notice()) is not None:
                raise SetupError(f"set-up failed on {notice}")

        try:
            return self._exchange.all_gather(payload, check_all)
        except BrokenExchangeError as problem:
            check_all()  # its own account of what happened is better than ours
            deadline = time.monotonic() + _MOMENT_S
            while not (gone := self._gone()):
                if time.monotonic() > deadline:
                    raise SetupError(str(problem)) from None
                time.sleep(_POLL_S)
            raise SetupError(f"set-up cannot go on: {'; '.join(gone)}") from None
