"""Items on demand: what one rank has computed and another one needs, read from its producer's published memory.

In multimodal training a rank encodes images and audio of samples whose language-model part runs on other ranks. Here a
producer publishes what it has encoded, part by part, and a consumer reads an item when it needs it: no rank waits for
one whose items it does not read. Gradients go back in the same way, in a channel of their own.

PROTOCOL.md beside this file states the rules and why they suffice; tests/items (test_items.py, _streams.py)
run this under random delays and check that it fails when any of its orders is removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from odc.config import RuntimeConfig
from odc.items.channel import RING, WORDS, Channel, ItemContext, Signal
from odc.items.rounds import Round
from odc.items.routes import Layout, Routes
from odc.rank.context import RankContext, agree, complete, connect, weak_abort
from odc.rank.watchdog import StreamWatchdog
from odc.setup.agreement import Exchange, together
from odc.timeline import Timeline
from odc.transports.base import HOST, Transport, aligned


class ItemExchange(ItemContext):
    """One rank's end of exchanges of items. Build with :meth:`create` (collective); a context manager, or
    :meth:`close`.

    Items move in *rounds* of a *channel*, a minibatch's worth each. Channels do not wait for each other. All operations
    of one exchange belong to one thread at a time.

    Example:
        >>> session = odc.patch_fsdp(model)
        >>> items = session.exchange_items(["images"], capacity_bytes=1 << 20)
        >>> parts = [odc.Item(id=0, num_bytes=16, consumer=1)], [odc.Item(id=1, num_bytes=16, consumer=0)]
        >>> images = items.begin("images", [[part] for part in parts])  # on every rank, with the same routes
        >>> images.publish(0, [torch.full((4,), 7.0)])  # this rank's part 0: one tensor for each item of it
        >>> out = torch.empty(4)
        >>> images.read(1 - rank, out)  # waits for the producer of that item, if at all
        >>> out.tolist()
        [7.0, 7.0, 7.0, 7.0]
        >>> images.done()
        >>> items.close()
        >>> session.close()
    """

    def __init__(
        self, transport: Transport, config: RuntimeConfig, channels: Sequence[str], capacity_bytes: int
    ) -> None:
        super().__init__(transport, config)
        capacity_bytes = aligned(max(capacity_bytes, 1))
        num_bytes = 2 * capacity_bytes * len(channels)
        transport.open(num_signals=len(Signal) * len(channels), num_locks=0, num_bytes=num_bytes)
        buffers = [transport.allocate(2 * capacity_bytes, f"items of {name!r}") for name in channels]
        words = transport.allocate_host(8 * len(channels) * self.topology.world_size * RING * WORDS, "words of items")
        self._channels = {
            name: Channel(self, transport, name, number, capacity_bytes, buffers[number], words)
            for number, name in enumerate(channels)
        }

    @classmethod
    def create(
        cls,
        exchange: Exchange,
        channels: Sequence[str],
        config: RuntimeConfig | None = None,
        *,
        capacity_bytes: int,
        device: torch.device | None = None,
        beside: RankContext | None = None,
    ) -> ItemExchange:
        """Connect the ranks of ``exchange``. Collective.

        Args:
            channels: the names of the channels, the same on every rank.
            capacity_bytes: what a rank can publish in one round of a channel at first, each item rounded up to 64
                bytes; twice that is allocated per channel. A round that needs more makes its channel grow
                (:meth:`begin`); but NVSHMEM's heap, which has one size, may have no room for that.
            device: where the items are; default: host memory.
            beside: another context of this rank, over the same ranks (the runtime of its model, say). What fails in one
                is heard in the other, and a rank that waits in one is not taken for silent in the other.

        Raises:
            SetupError: on all ranks, naming the first difference between them or the resource that is missing.
            ValueError: ``channels`` is empty or has a name twice, or ``capacity_bytes`` is negative; where that is so
                on other ranks only, a SetupError says it.
        """
        config = config or RuntimeConfig()
        described = {"channels": ", ".join(map(repr, channels)), "capacity_bytes": str(capacity_bytes)}
        agree(exchange, config, {"item exchange": described}, partial(_check_channels, channels, capacity_bytes))
        transport = connect(exchange, config, device or HOST)

        def finish(items: ItemExchange) -> None:
            items.faults.hit("setup")
            transport.seal()
            if transport.engine.has_streams:
                together(transport.exchange, items._start_watchdog)
            if beside is not None:
                items._waiter.job.add(beside._transport.peers)
                beside._waiter.job.add(transport.peers)

        return complete(transport, lambda: cls(transport, config, channels, capacity_bytes), finish)

    def begin(self, channel: str, routes: Routes) -> Round:
        """Begin the next round of ``channel``. Every rank begins every round of it, with the same routes.

        Waits for nobody, but for ranks that have not read yet what this one published four rounds ago; and where the
        round needs more than the channel holds. Then it waits for all ranks to begin this round, and all allocate
        memory for it, doubling what a round may take until it suffices. So begin the rounds of a minibatch together,
        before the first of its publications and reads, in one order on all ranks.

        Args:
            routes: ``routes[rank][part]``: (item, bytes, consumer) of what that rank publishes at once.

        Raises:
            ValueError: no channel has this name, or the routes cannot be (see :meth:`odc.items.routes.Layout.of`).
            MisuseError: this rank has not published all of the last round, or not ended the one before it.
            ProtocolError: on all ranks: where the channel has to grow, ranks have come with different routes, or to
                different places of their scripts.
            SetupError: on all ranks: there is no memory to grow.
        """
        if channel not in self._channels:
            raise ValueError(f"no channel {channel!r}: expected one of {', '.join(map(repr, self._channels))}")
        layout = Layout.of(routes, self.topology.rank, self.topology.world_size)
        with self.reporting:
            return Round(self._channels[channel], self._channels[channel].begin(layout))

    def _start_watchdog(self) -> None:
        self._watchdog = StreamWatchdog(self._transport, weak_abort(self))

    @property
    def device(self) -> torch.device:
        """Where items are."""
        return self._transport.device

    # Observation

    def start_timeline(self, timeline: Timeline | None = None) -> Timeline:
        """Record spans ("publish", "read", "wait") from now on, in ``timeline`` if another context of this rank has one
        already."""
        self.timeline = self._waiter.timeline = timeline = timeline or Timeline(self.topology.rank)
        return timeline

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's memory for items, by channel, and what the transport spends beyond."""
        channels = {name: channel.num_bytes for name, channel in self._channels.items()}
        return {**channels, "transport": self._transport.extra_bytes}


def _check_channels(channels: Sequence[str], capacity_bytes: int) -> None:
    if not channels or len(set(channels)) != len(channels) or capacity_bytes < 0:
        raise ValueError(
            f"channels {list(channels)} of {capacity_bytes} bytes: expected at least one name, each once, and 0 bytes "
            "or more"
        )
