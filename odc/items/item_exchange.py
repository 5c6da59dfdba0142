"""Items on demand: a rank reads results of another rank from that rank's published memory.

In multimodal training a rank encodes images and audio of samples for which other ranks run the language model. The
producer publishes its outputs part by part, and a consumer reads an item when it needs it. A rank waits only for
producers of items that it reads. Gradients go back in the same way, in a separate channel.

PROTOCOL.md in this folder states the rules and why they suffice. tests/items (test_items.py, _streams.py) run this code
under random delays, and check that it fails if any ordering is removed.
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
    """Exchanges items between ranks. Make it with :meth:`create` (collective); close it with :meth:`close`, or use it
    as a context manager.

    Items move in *rounds* of a *channel*, usually one round per minibatch. Channels are independent of each other. Only
    one thread at a time may use an exchange.

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
            capacity_bytes: the initial capacity of one round of a channel on each rank; every item counts rounded up to
                64 bytes. Twice this is allocated per channel. A round that needs more makes the channel grow
                (:meth:`begin`). NVSHMEM's heap has a fixed size and may have no room to grow.
            device: the device of the items; default: host memory.
            beside: another context of this rank over the same ranks, such as the runtime of its model. A failure in one
                is reported in the other, and a rank that waits in one does not count as silent in the other.

        Raises:
            SetupError: the ranks differ, or a resource is missing; the message names it. Raised on all ranks.
            ValueError: ``channels`` is empty or has a name twice, or ``capacity_bytes`` is negative. The other ranks
                raise a SetupError.
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
        """Begin the next round of ``channel``. Every rank must begin every round, with the same routes.

        Usually does not wait. It waits in two cases: for ranks that have not yet read what this rank published four
        rounds ago; and, if the round needs more than the channel's capacity, for all ranks to begin this round. Then
        all ranks double the capacity until it suffices. So begin all rounds of a minibatch before its first publish or
        read, in the same order on all ranks.

        Args:
            routes: ``routes[rank][part]`` lists (item, bytes, consumer) for all items of one part, which that rank
                publishes together.

        Raises:
            ValueError: no channel has this name, or the routes are invalid (see :meth:`odc.items.routes.Layout.of`).
            MisuseError: this rank has not published all parts of the last round, or has not ended the round before it.
            ProtocolError: the channel has to grow, and ranks have different routes or are at different places of their
                scripts. Raised on all ranks.
            SetupError: there is no memory to grow. Raised on all ranks.
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
        """The device of the items."""
        return self._transport.device

    # Observation

    def start_timeline(self, timeline: Timeline | None = None) -> Timeline:
        """Record spans ("publish", "read", "wait") from now on. ``timeline``: that of another context of this rank;
        default: a new one."""
        self.timeline = self._waiter.timeline = timeline = timeline or Timeline(self.topology.rank)
        return timeline

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's memory for items, by channel, and the transport's overhead."""
        channels = {name: channel.num_bytes for name, channel in self._channels.items()}
        return {**channels, "transport": self._transport.extra_bytes}


def _check_channels(channels: Sequence[str], capacity_bytes: int) -> None:
    if not channels or len(set(channels)) != len(channels) or capacity_bytes < 0:
        raise ValueError(
            f"channels {list(channels)} of {capacity_bytes} bytes: expected at least one name, each once, and 0 bytes "
            "or more"
        )
