"""An exchange over ranks whose processes are watched: when it breaks, it can say whose end that was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from odc.errors import SetupError
from odc.exchange import BrokenExchangeError, Exchange, no_op

_MOMENT_S = 0.5  # for which an exchange goes on without a rank that has ended: it may have brought its part before


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
        gone_since: float | None = None

        def check_all() -> None:
            nonlocal gone_since
            check()
            if (notice := self._notice()) is not None:
                raise SetupError(f"set-up failed on {notice}")
            gone = self._gone()
            if not gone:
                gone_since = None
                return
            gone_since = time.monotonic() if gone_since is None else gone_since
            if time.monotonic() - gone_since > _MOMENT_S:
                raise SetupError(f"set-up cannot go on: {'; '.join(gone)}")

        try:
            return self._exchange.all_gather(payload, check_all)
        except BrokenExchangeError:
            check_all()  # its own account of what happened is better than ours
            raise
