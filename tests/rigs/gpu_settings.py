"""Settings of ``odc.bench.gpu`` for checks without a GPU: the fake transports, whole and broken on purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc.balance.late_binding.work_queues import WorkQueues
from odc.bench.fake import streams
from odc.bench.fake.cuda import AsynchronousFakeCudaTransport, register_fakes, register_prompt_fakes
from odc.bench.gpu.setting import Setting
from odc.items.channel import Signal
from odc.minibatch.accumulators import AccumulatorStore, SharedStore
from odc.transports.base import Transport
from odc.transports.cuda_ipc import CudaIpcTransport

HERE = __name__
ROOT = Path(__file__).parents[2]
HAS_GPU = torch.cuda.is_available()
LONG_BUSY_S = 15.0  # less than what a stream of the fake waits for another


def lose_every_order() -> None:
    register_fakes()
    AsynchronousFakeCudaTransport.order_after = lambda self, ranks, index, count: None  # type: ignore[method-assign]


def lose_the_words_of_a_signal() -> None:
    """Streams wait for it as long as they ever do: hosts see it, and no stream sets its word."""
    register_fakes()
    streams.WAIT_LIMIT_S = 1.0
    post = CudaIpcTransport.post

    def post_to_hosts(self: CudaIpcTransport, index: int, **options: Any) -> None:
        (Transport.post if index == Signal.PUBLISHED else post)(self, index, **options)

    AsynchronousFakeCudaTransport.post = post_to_hosts  # type: ignore[method-assign]


def lose_a_push() -> None:
    """One push that a client makes is not added."""
    register_fakes()
    calls: list[int] = []

    def losing(original: Callable[..., None], lost: Callable[..., tuple[Any, ...] | None]) -> Callable[..., None]:
        def add(self: AccumulatorStore, *arguments: Any) -> None:
            calls.append(1)
            left = lost(*arguments) if len(calls) == 3 else arguments
            if left is not None:
                original(self, *left)

        return add

    for name in ("add", "add_to_all"):
        setattr(SharedStore, name, losing(getattr(SharedStore, name), lambda *arguments: None))
    SharedStore.add_arrived = losing(  # type: ignore[method-assign]
        AccumulatorStore.add_arrived, lambda pushes, *others: (pushes[1:], *others)
    )


def take_and_leave() -> None:
    """What a rank takes from another's share is left there, too."""
    register_fakes()
    WorkQueues.steal = lambda self, rank, queue, part: True  # type: ignore[method-assign]


def be_busy_until_the_host_waits() -> None:
    """In the check that hosts run ahead: a stream is busy for long, so that a host that is held up is not taken for one
    that waits, and is done as soon as the host is.
    """
    register_fakes()
    from odc.bench.gpu import waiting
    from odc.bench.gpu.streams import Streams

    synchronize, is_over = Streams.synchronize, threading.Event()

    def delay(self: Streams, seconds: float) -> None:
        is_over.clear()
        self.engine.run(lambda: is_over.wait(seconds))

    def end_and_synchronize(self: Streams) -> None:
        is_over.set()
        synchronize(self)

    waiting.BUSY_S = LONG_BUSY_S
    Streams.delay, Streams.synchronize = delay, end_and_synchronize  # type: ignore[method-assign]


def wait_in_finish() -> None:
    """A runtime whose host waits for its device at the end of a minibatch."""
    register_fakes()
    from odc.minibatch.protocol import End, MinibatchProtocol

    finish = MinibatchProtocol.finish

    def patient(self: MinibatchProtocol, how: End | None = None) -> None:
        self._end.engine.synchronize(10.0)
        finish(self, how)

    MinibatchProtocol.finish = patient  # type: ignore[method-assign]


def be_in_lockstep() -> None:
    """A gather waits until the devices of all ranks have come to it, as a collective does."""
    register_prompt_fakes()
    from odc.minibatch.protocol import MinibatchProtocol

    gather = MinibatchProtocol.gather

    def gather_together(self: MinibatchProtocol, *arguments: Any) -> None:
        self._end.engine.synchronize(10.0)
        dist.barrier()
        gather(self, *arguments)

    MinibatchProtocol.gather = gather_together  # type: ignore[method-assign]


STREAMS = Setting(
    "fake_cuda_streams", "cpu", worlds=(2,), minibatches=4, quick=True, prepare="odc.bench.fake.cuda:register_fakes"
)
WITHIN = replace(STREAMS, transport="fake_cuda")
