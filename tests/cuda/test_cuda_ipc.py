"""Layers 1 to 3. The ``cuda_ipc`` transport: what it refuses at set-up, what it does when a rank dies, how it ends.

There is no GPU where CI runs, so a fake CUDA runtime (``bench/fake``) stands in for the device; the transport is the
real one, and ranks that die are real processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvshmem import registered_fakes
from process_ranks import start_ranks, wait_until
from thread_ranks import ThreadExchange, run_threads, values

from odc import AbortedError, OdcError, ParamSlice, Runtime, RuntimeConfig, SetupError, UnitSpec
from odc.bench.fake import cuda as fake_cuda
from odc.bench.fake.cuda import AsynchronousFakeCudaTransport, FakeCudaTransport, FakeEngine
from odc.cuda import runtime as cuda_runtime
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports.cuda_ipc import CudaIpcTransport

pytestmark = pytest.mark.usefixtures("fakes")

UNITS = [UnitSpec("layers.0", 1000, torch.float32, (ParamSlice("w", 1000),))]


def create(exchange: ThreadExchange | ProcessGroupExchange, name: str = "fake_cuda", **options: Any) -> Runtime:
    return Runtime.create(exchange, UNITS, RuntimeConfig(transport=name, timeout_s=10, **options))


def refusals(world_size: int = 2) -> list[str]:
    """What each rank is told at set-up."""
    results = run_threads(world_size, lambda exchange: create(exchange).close())
    assert all(isinstance(result, SetupError) for result in results), results
    return [str(result) for result in results]


# What is refused at set-up


def test_a_device_that_cannot_share_is_named_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCudaTransport, "refuses", "NVIDIA A100 MIG 1g.5gb is a MIG instance: switch MIG off")
    assert all("MIG instance: switch MIG off" in text for text in refusals())


def test_devices_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCudaTransport, "isolated", True)
    for text in refusals():
        assert "has no peer access to fake:" in text
        assert "CUDA_VISIBLE_DEVICES" in text


def test_too_little_device_memory_fails_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeCudaTransport, "limit_bytes", 1024)
    assert all("cudaMalloc of" in text for text in refusals(3))


def test_whatever_cuda_says_on_one_rank_fails_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    original = fake_cuda.FakeCuda.export

    def export(self: fake_cuda.FakeCuda, address: int) -> tuple[bytes, int]:
        if self._engine._seed == 2:  # of rank 1
            raise OdcError("ipcGetMemHandle: cudaErrorNotSupported")
        return original(self, address)

    monkeypatch.setattr(fake_cuda.FakeCuda, "export", export)
    results = run_threads(3, lambda exchange: create(exchange).close())
    assert isinstance(results[1], OdcError)
    for result in (results[0], results[2]):
        assert isinstance(result, SetupError)
        assert "set-up failed on rank 1: OdcError: ipcGetMemHandle: cudaErrorNotSupported" in str(result)


def test_sizes_that_differ_are_named() -> None:
    def body(exchange: ThreadExchange) -> None:
        topology = Topology.discover(exchange)
        transport = FakeCudaTransport(exchange, topology, 10.0)
        try:
            transport.allocate(64 * (exchange.rank + 1), "sums")
        finally:
            transport.close()

    results = run_threads(2, body)
    assert all("'sums': rank" in str(result) and "bytes, rank" in str(result) for result in results)


def test_a_handle_of_another_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    original = CudaIpcTransport._export
    monkeypatch.setattr(CudaIpcTransport, "_export", lambda self, num_bytes: original(self, num_bytes)[:-1])
    assert all("not a memory handle" in text for text in refusals())


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("cupy", "cupy, which allocates the memory that is shared, is not installed: pip install 'odc-fsdp[cuda"),
        ("triton", "triton, which compiles the kernels, is not installed: pip install triton"),
    ],
)
def test_a_missing_package_is_named_with_the_command(broken: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cupy", "triton"):
        monkeypatch.setitem(sys.modules, name, None if name == broken else types.ModuleType(name))
    reason = cuda_runtime.unavailable(torch.device("cuda"))
    assert reason is not None
    assert reason.startswith(words)


@pytest.mark.parametrize("broken", ["cupy", "triton"])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("raise ImportError('libnvrtc.so.13: cannot open')", "ImportError: libnvrtc.so.13: cannot open"),
        ("import fastrlock_that_is_gone", "ModuleNotFoundError: No module named 'fastrlock_that_is_gone'"),
        ("raise OSError('libcudart')", "OSError: libcudart"),
        ("None.runtime", "AttributeError: 'NoneType' object has no attribute 'runtime'"),
    ],
)
def test_a_package_that_cannot_be_imported_is_a_reason(
    broken: str, body: str, told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not an exception on this rank, while the others wait for its answer."""
    for name in ("cupy", "triton"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.delitem(sys.modules, broken)
    (tmp_path / f"{broken}.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    topology = Topology(0, ("h",), ("h",), (os.getpid(),))
    reason = CudaIpcTransport.unavailable(topology, torch.device("cuda")) or ""
    assert reason.startswith(f"{broken}, which ")
    assert f"is installed but cannot be imported ({told}): uninstall it, and pip install" in reason


@pytest.mark.parametrize("problem", [RuntimeError("cudaErrorInsufficientDriver"), AttributeError("no runtime")])
def test_a_cupy_that_the_driver_does_not_fit_is_a_reason(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise problem

    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(driverGetVersion=lambda: 13000, getDeviceCount=fail)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_runtime, "driver_problem", lambda: None)
    reason = cuda_runtime.unavailable(torch.device("cuda")) or ""
    assert f"cupy cannot use the driver ({type(problem).__name__}: {problem}): update the driver" in reason


def test_no_driver_and_an_old_one_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runtime, "_library", cuda_runtime._library.__wrapped__)  # without its cache

    def load(library: object) -> str:
        def open_library(name: str) -> object:
            if library is None:
                raise OSError
            return library

        monkeypatch.setattr(ctypes, "CDLL", open_library)
        return cuda_runtime.driver_problem() or ""

    assert "install the NVIDIA driver (in docker: --gpus all)" in load(None)
    assert "needs CUDA 12" not in load(None)
    assert "too old" in load(object())
    assert "driver 525 or newer" in load(object())


def test_a_driver_call_that_fails_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        @staticmethod
        def cuStreamBatchMemOp_v2(*_: object) -> int:
            return 801

        @staticmethod
        def cuGetErrorString(code: int, text: Any) -> int:
            text._obj.value = b"operation not supported"
            return 0

    monkeypatch.setattr(cuda_runtime, "_library", Library)
    with pytest.raises(OdcError, match="cuStreamBatchMemOp_v2 failed with code 801: operation not supported"):
        cuda_runtime.wait_values(0, [(4096, 1)], False)


def test_streams_need_nothing_that_cupy_13_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver: high priority, not blocked by the default stream, and used again once they are given back."""
    made: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def cuStreamCreateWithPriority(stream: Any, flags: int, priority: int) -> int:
            made.append((flags, priority))
            stream._obj.value = 4096 + len(made)
            return 0

    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.SimpleNamespace(
        runtime=types.SimpleNamespace(deviceGetAttribute=lambda *_: 1, setDevice=lambda device: None)
    )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(cuda_runtime, "_library", Library)
    monkeypatch.setattr(cuda_runtime, "_spare_streams", {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: types.SimpleNamespace(cuda_stream=handle, device=device)
    )
    runtime = cuda_runtime.CudaRuntime(torch.device("cuda", 0))
    first, second = runtime._new_stream(), runtime._new_stream()
    assert (first.cuda_stream, second.cuda_stream, made) == (4097, 4098, [(1, -1), (1, -1)])
    runtime._give_back_stream(first)
    assert runtime._new_stream().cuda_stream == 4097
    assert len(made) == 2


def test_cpu_tensors_are_not_its_business() -> None:
    topology = Topology(0, ("h",), ("h",), (os.getpid(),))
    reason = CudaIpcTransport.unavailable(topology, torch.device("cpu"))
    assert reason == "it serves CUDA tensors, the model is on cpu"


def test_auto_names_every_transport_and_its_reason() -> None:
    topology = Topology(0, ("h",), ("h",), (os.getpid(),))
    words = r"shm: it serves CPU tensors, the model is on cuda; tcp: .*; cuda_ipc: .*install.*; nvshmem: .*install"
    with pytest.raises(SetupError, match=words):
        registry.choose("auto", topology, torch.device("cuda"))


def test_one_rank_that_cannot_use_a_transport_keeps_all_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(cls: type, topology: Topology, device: torch.device) -> str | None:
        return "cupy is not installed" if topology.rank == 1 else None

    monkeypatch.setattr(FakeCudaTransport, "unavailable", classmethod(unavailable))
    assert all("fake_cuda: on rank 1: cupy is not installed" in text for text in refusals(3))


# How it ends


def test_close_gives_everything_back_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.limits.CLOSE_GRACE_S", 30.0)  # a rank may be slow to close

    def body(exchange: ThreadExchange) -> list[str]:
        with create(exchange) as runtime:
            transport = runtime._transport
            exchange.all_gather(b"")
        assert isinstance(transport, FakeCudaTransport)
        return transport.leaked

    assert values(run_threads(3, body)) == [[], [], []]


def test_memory_that_a_peer_still_reads_is_freed_when_it_has_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.limits.CLOSE_GRACE_S", 0.05)

    def body(exchange: ThreadExchange) -> tuple[bool, float, list[str]]:
        runtime = create(exchange)
        transport = runtime._transport
        assert isinstance(transport, FakeCudaTransport)
        runtime.publish(0, lambda shard: shard.fill_(7.0))
        out = torch.zeros(runtime.units[0].shard_numel * 2)
        exchange.all_gather(b"")
        if exchange.rank == 0:
            runtime.close()
        exchange.all_gather(b"")
        is_held = hasattr(transport, "leaked")
        if exchange.rank == 1:
            runtime.gather(0, out)
            runtime.close()
        wait_until(lambda: hasattr(transport, "leaked"), "closing has not ended")
        return is_held, float(out.max()), transport.leaked

    assert values(run_threads(2, body)) == [(False, 0.0, []), (False, 7.0, [])]


def test_memory_that_a_stopped_peer_may_read_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("odc.transports._peers.Readers.left", lambda *_: [])  # as at the end of the process

    def body(exchange: ThreadExchange) -> list[str]:
        runtime = create(exchange)
        transport = runtime._transport
        assert isinstance(transport, FakeCudaTransport)
        if exchange.rank == 0:
            runtime.close()
        exchange.all_gather(b"")
        runtime.close()
        return transport.leaked

    early, late = values(run_threads(2, body))
    assert len(early) == 1
    assert early[0].endswith(" x memory")  # nothing mapped, nothing registered
    assert late == []
    assert "ranks [1] have not closed their session and give no sign of life" in caplog.text


# What it does when a rank dies


def die_with_work_under_way(rank: int, world_size: int, waiting: str) -> str:
    """Rank 1 dies before its stream has written what rank 0's stream waits for."""
    fake_cuda.AsynchronousFakeCudaTransport.delay_s = 0.0
    with registered_fakes():
        runtime = create(ProcessGroupExchange(), "fake_cuda_streams")
    engine = runtime._transport.engine
    assert isinstance(engine, FakeEngine)
    runtime.publish(0, lambda shard: time.sleep(30) if rank == 1 else shard.fill_(1.0))
    if rank == 1:
        while not Path(waiting).exists():  # the host has posted, the stream is still at it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    runtime.begin()
    runtime.gather(0, torch.zeros(2000))
    Path(waiting).touch()
    started = time.monotonic()
    assert engine.synchronize(15.0), "the stream still waits for the dead rank"
    waited = time.monotonic() - started
    try:
        runtime.finish()
    except OdcError as error:
        runtime.close()
        return f"{waited < 10} {type(error).__name__}: {error}"
    return "no error"


def test_a_stream_that_waits_for_a_dead_rank_is_freed_and_the_next_operation_says_why(tmp_path: Path) -> None:
    results = start_ranks(2, die_with_work_under_way, str(tmp_path / "waiting")).join(90.0, expendable=[1])
    text = str(results[0].value)
    assert text.startswith("True PeerDiedError: rank 0: rank 1 (host"), results[0]
    assert "killed by signal 9" in text
    assert "what they compute now is not valid" in text


def test_the_first_cause_is_told_and_not_that_its_rank_is_gone() -> None:
    """Rank 1 raises and closes while rank 0 computes for longer than the watchdog looks away."""

    def body(exchange: ThreadExchange) -> None:
        runtime = create(exchange)
        runtime.publish(0, lambda shard: shard.fill_(1.0))
        runtime.begin()
        exchange.all_gather(b"")
        if exchange.rank == 1:
            with runtime:
                raise ValueError("sample 17 has no answer")
        with runtime:
            time.sleep(1.5)
            runtime.finish()

    first, second = run_threads(2, body)
    assert isinstance(second, ValueError)
    assert isinstance(first, AbortedError), first
    assert "ValueError: sample 17 has no answer" in str(first)


def end_after_closing(rank: int, world_size: int) -> bool:
    """Rank 1 closes and ends; rank 0's streams must not be set free by that."""
    with registered_fakes():
        runtime = create(ProcessGroupExchange(), "fake_cuda")
    transport = runtime._transport
    assert isinstance(transport, AsynchronousFakeCudaTransport | FakeCudaTransport)
    runtime.publish(0, lambda shard: shard.fill_(1.0))
    runtime.begin()
    runtime.finish()
    if rank == 1:
        runtime.close()
        return True
    time.sleep(1.5)
    words = [int(word) for word in transport._words[0]]
    failed = runtime.has_failed
    runtime.close()
    return not failed and max(words) < 1000


def test_a_rank_that_has_closed_may_end() -> None:
    results = start_ranks(2, end_after_closing).join(90.0)
    assert [result.value for result in results] == [True, True], results


# The order of streams: counters of 32 bits that wrap


def test_a_forked_child_that_closes_leaves_its_parents_watchdog_asleep() -> None:
    def body(exchange: ThreadExchange) -> list[tuple[int, int]]:
        with create(exchange) as runtime:
            child = os.fork()
            if child == 0:
                try:
                    runtime.close()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            assert runtime._watchdog is not None
            poll = select.poll()
            poll.register(runtime._watchdog._stop_fd, select.POLLIN)
            return poll.poll(0)

    assert values(run_threads(1, body)) == [[]]


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 3])
def test_words_wrap(start: int) -> None:
    def body(exchange: ThreadExchange) -> int:
        topology = Topology.discover(exchange)
        transport = FakeCudaTransport(exchange, topology, 10.0)
        try:
            transport.open(num_signals=1, num_locks=0)
            transport._words[exchange.rank][:] = start % 2**32
            transport._posted[0] = transport.peers.own._signals[0] = start
            exchange.all_gather(b"")
            peer = 1 - exchange.rank
            for count in range(1, 6):
                transport.post(0)
                while transport.count(peer, 0) < start + count:
                    time.sleep(1e-3)
                transport.order_after([peer], 0, start + count)
                assert not transport.fake.waits  # already there: the device is not asked
            transport.order_after([peer], 0, start + 7)
            waited, transport.fake.waits = transport.fake.waits, 0
            exchange.all_gather(b"")
            transport.release_streams()
            transport.order_after([peer], 0, start + 7)
            assert not transport.fake.waits
            return waited
        finally:
            transport.peers.failing = False
            transport.close()

    def wait_values(self: fake_cuda.FakeCuda, words: Sequence[tuple[int, int]]) -> None:
        self.waits += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_cuda.FakeCuda, "wait_values", wait_values)
        assert values(run_threads(2, body)) == [1, 1]
