"""Layer 1 and 3: gathers that overlap with compute, in a copy thread."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from thread_ranks import ThreadExchange, run_threads, values
from training import build, full_parameters, largest_difference, reference, shard, train
from watching import until

import odc
from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.copier import CopyThread
from odc.protocol import MinibatchProtocol
from odc.transports.shm import ShmTransport

COUNTS = [3, 1]


def test_the_thread_copies_while_its_owner_does_something_else() -> None:
    copied_by: list[str] = []
    done = threading.Event()
    copier = CopyThread()

    def copy() -> None:
        copied_by.append(threading.current_thread().name)
        done.set()

    pending = copier.submit(copy)
    assert done.wait(10)  # nobody has waited for the copy itself
    pending.wait(lambda: None)
    copier.close()
    assert copied_by == ["odc-copy"]


def test_what_has_not_begun_is_done_by_whoever_waits() -> None:
    copied_by: list[str] = []
    busy, begun = threading.Event(), threading.Event()
    copier = CopyThread()

    def keep_busy() -> None:
        begun.set()
        busy.wait(10)

    first = copier.submit(keep_busy)
    assert begun.wait(10)
    second = copier.submit(lambda: copied_by.append(threading.current_thread().name))
    second.wait(lambda: None)
    assert copied_by == [threading.current_thread().name]
    busy.set()
    first.wait(lambda: None)
    copier.close()


def test_an_error_is_raised_where_the_copy_is_awaited_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise ValueError("no such memory")

    copier, done = CopyThread(), threading.Event()
    pending = copier.submit(fail)
    copier.submit(done.set)
    assert done.wait(10)
    with pytest.raises(ValueError, match="no such memory"):
        pending.wait(lambda: None)
    copier.close()
    copier.close()
    assert "odc-copy" not in [thread.name for thread in threading.enumerate()]


def test_a_wait_for_a_running_copy_notices_failures() -> None:
    busy, begun = threading.Event(), threading.Event()
    copier = CopyThread()

    def keep_busy() -> None:
        begun.set()
        busy.wait(10)

    pending = copier.submit(keep_busy)
    assert begun.wait(10)

    def failed() -> None:
        raise odc.AbortedError("rank 1 failed")

    with pytest.raises(odc.AbortedError):
        pending.wait(failed, slice_s=0.01)
    busy.set()
    copier.close()


def test_finish_completes_prefetches_that_nobody_waited_for() -> None:
    """Else the thread could read the next minibatch's shards, or memory that close() has unmapped."""

    def body(exchange: ThreadExchange) -> tuple[list[float], list[float]]:
        spec = UnitSpec("u", 1000, torch.float32, (ParamSlice("w", 1000),))
        with Runtime.create(exchange, [spec], RuntimeConfig(timeout_s=10, copy_thread="on")) as runtime:
            out = torch.zeros(2000)
            runtime.publish(0, lambda shard: shard.fill_(1.0))
            runtime.begin()
            assert runtime.gather_ahead(0, out) is None  # owners had to be waited for
            out.zero_()
            assert runtime._copier is not None
            held, release = threading.Event(), threading.Event()

            def hold() -> None:
                held.set()
                release.wait(30)

            holding = runtime._copier.submit(hold)  # as where the thread gets no core: it copies nothing meanwhile
            assert held.wait(10)
            try:
                assert runtime.gather_ahead(0, out) is not None
                before = out.unique().tolist()
                runtime.finish()
                after = out.unique().tolist()
            finally:
                release.set()
            holding.wait(lambda: None)
            exchange.all_gather(b"")
            return before, after

    assert values(run_threads(2, body)) == [([0.0], [1.0]), ([0.0], [1.0])]


def test_who_waits_for_a_prefetch_says_for_whom_and_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it is blamed for the silence of the rank that the copy thread reads from."""
    is_read, go_on = threading.Event(), threading.Event()
    read = ShmTransport.read

    def stuck(self: ShmTransport, *args: Any) -> None:
        if threading.current_thread().name == "odc-copy":
            is_read.set()
            assert go_on.wait(60)
        read(self, *args)

    def body(exchange: ThreadExchange) -> None:
        spec = UnitSpec("u", 1000, torch.float32, (ParamSlice("w", 1000),))
        with Runtime.create(exchange, [spec], RuntimeConfig(timeout_s=60, copy_thread="on")) as runtime:
            out = torch.zeros(2000)
            runtime.publish(0, lambda shard: shard.fill_(1.0))
            runtime.begin()
            runtime.gather(0, out)
            exchange.all_gather(b"")
            if exchange.rank == 0:
                monkeypatch.setattr(ShmTransport, "read", stuck)
                wait = runtime.gather_ahead(0, out, own_in_place=True)
                assert wait is not None
                assert is_read.wait(60)
                wait()
                assert runtime._transport.waiting_on(0) is None
            else:
                transport = runtime._transport
                until(lambda: transport.waiting_on(0) == 1, "rank 0 did not say for whom it waits")
                looks = transport.signs(0).looks
                until(lambda: transport.signs(0).looks > looks + 1, "rank 0 waits without a sign of life")
                go_on.set()
            runtime.finish()
            exchange.all_gather(b"")

    values(run_threads(2, body))


def overlapped(rank: int, world_size: int, mode: str) -> tuple[dict[str, Any], int]:
    ahead = []
    original = MinibatchProtocol.gather_ahead

    def counted(self: MinibatchProtocol, *args: Any) -> Any:
        wait = original(self, *args)
        ahead.append(wait is not None)
        return wait

    MinibatchProtocol.gather_ahead = counted  # type: ignore[method-assign]
    model = shard(build(), world_size)
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
    with odc.patch_fsdp(model) as session:
        train(model, session, rank, world_size, COUNTS, 6)
        names = [thread.name for thread in threading.enumerate()]
        assert ("odc-copy" in names) == (mode == "on")
        return full_parameters(model), sum(ahead)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_training_with_prefetches_is_the_same_with_and_without_the_thread(mode: str) -> None:
    results = run_ranks(2, overlapped, mode, env={"ODC_COPY_THREAD": mode}, timeout_s=180)
    assert largest_difference(results[0][0], reference(COUNTS, 6)) < 1e-5
    assert (results[0][1] > 0) == (mode == "on")


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(odc.ConfigError, match="copy_thread='sometimes'"):
        RuntimeConfig(copy_thread="sometimes")
