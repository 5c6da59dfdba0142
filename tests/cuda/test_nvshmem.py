"""Layers 1 and 2. The ``nvshmem`` transport: what it refuses, how it sizes the heap, what it moves how.

There is neither a GPU nor a second host where CI runs: a fake heap (``bench/fake``) stands in. That streams keep
their order over it is in ``test_stream_order.py``, that it is a transport in ``test_transport_conformance.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_nvshmem import FakeNvshmemTransport
from thread_ranks import ThreadExchange, run_threads, values

from odc import ConfigError, ParamSlice, Runtime, RuntimeConfig, SetupError, UnitSpec
from odc.config import ibgda_problem, nvshmem_heap_bytes
from odc.cuda import nvshmem
from odc.cuda.nvshmem import NvshmemHeap, heap_problem

pytestmark = pytest.mark.usefixtures("fakes")

NUMEL = 1000
UNITS = [UnitSpec("layers.0", NUMEL, torch.float32, (ParamSlice("w", NUMEL),))]


def create(exchange: ThreadExchange, hosts: int = 2) -> Runtime:
    host = f"host{exchange.rank * hosts // exchange.world_size}"
    return Runtime.create(exchange, UNITS, RuntimeConfig(transport="fake_nvshmem", timeout_s=10, host_id=host))


def test_a_heap_that_is_too_small_is_an_error_that_states_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeNvshmemTransport, "heap_bytes", 4096)
    results = run_threads(4, lambda exchange: create(exchange).close())
    needed = {word for result in results for word in str(result).split() if word.startswith("NVSHMEM_SYMMETRIC_SIZE=")}
    assert all(isinstance(result, SetupError) for result in results), results
    assert "NVSHMEM_SYMMETRIC_SIZE=4096" in needed
    (stated,) = needed - {"NVSHMEM_SYMMETRIC_SIZE=4096"}
    # published shard and two slots per rank, staging memory, alignment
    assert 9 * 4 * NUMEL < int(stated.partition("=")[2]) < 9 * 4 * NUMEL + 10_000
    monkeypatch.setattr(FakeNvshmemTransport, "heap_bytes", int(stated.partition("=")[2]))
    values(run_threads(4, lambda exchange: create(exchange).close()))


def test_an_unset_heap_size_is_no_problem() -> None:
    assert heap_problem(1 << 40, None) is None
    assert heap_problem(100, 100) is None
    assert "unset it: ODC then asks for what it needs" in (heap_problem(101, 100) or "")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1073741824", 1 << 30), ("1.5G", 3 << 29), ("512m", 512 << 20), ("64 KB", 64 << 10), ("2T", 2 << 40), ("", None)],
)
def test_sizes_as_nvshmem_reads_them(text: str, num_bytes: int | None) -> None:
    assert nvshmem_heap_bytes({"NVSHMEM_SYMMETRIC_SIZE": text}) == num_bytes
    assert nvshmem_heap_bytes({}) is None


def test_a_size_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="NVSHMEM_SYMMETRIC_SIZE='plenty' cannot be used: expected a number of bytes"):
        nvshmem_heap_bytes({"NVSHMEM_SYMMETRIC_SIZE": "plenty"})


def test_peers_of_this_host_are_copied_from_and_the_others_got_in_one_gather() -> None:
    """Two hosts of two ranks: a gather gets two shards, a push puts two slices, in limited pieces."""

    def body(exchange: ThreadExchange) -> tuple[list[float], Counter[tuple[str, int]], int]:
        with create(exchange) as runtime:
            transport = runtime._transport
            assert isinstance(transport, FakeNvshmemTransport)
            transport.heap.moved.clear()  # the test of the memory at set-up
            runtime.publish(0, lambda shard: shard.fill_(exchange.rank + 1.0))
            runtime.begin()
            out = torch.empty(4 * NUMEL)
            runtime.gather(0, out)
            runtime.scatter_accumulate(0, torch.ones(4 * NUMEL))
            runtime.finish()
            result = runtime.gradient(0)
            assert result is not None
            assert result[0].eq(4.0).all()
            moved: Counter[tuple[str, int]] = Counter()
            for kind, rank, num_bytes in transport.heap.moved:
                moved[kind, rank] += num_bytes
            largest = max(num_bytes for _, _, num_bytes in transport.heap.moved)
            return out.view(4, -1)[:, 0].tolist(), moved, largest

    for rank, (rows, moved, largest) in enumerate(values(run_threads(4, body))):
        assert rows == [1.0, 2.0, 3.0, 4.0]
        others = (2, 3) if rank < 2 else (0, 1)
        assert moved == {(kind, other): 4 * NUMEL for kind in ("get", "put") for other in others}
        assert largest <= FakeNvshmemTransport.staging_bytes


def test_gathers_get_from_all_hosts_at_the_same_time() -> None:
    """One kernel serves all that are far away."""

    def body(exchange: ThreadExchange) -> list[list[int]]:
        with create(exchange, hosts=3) as runtime:
            transport = runtime._transport
            assert isinstance(transport, FakeNvshmemTransport)
            runtime.publish(0, lambda shard: shard.copy_(torch.arange(NUMEL) + 2000.0 * exchange.rank))
            runtime.begin()
            out = torch.empty(3 * NUMEL)
            transport.heap.gets.clear()
            runtime.gather(0, out)
            runtime.finish()
            assert torch.equal(out.view(3, NUMEL), torch.arange(NUMEL) + 2000.0 * torch.arange(3)[:, None])
            return transport.heap.gets

    half = FakeNvshmemTransport.staging_bytes // 2 // 16 * 16  # of the staging memory, for two far ranks
    turns = -(-4 * NUMEL // (half // 2 // 16 * 16))
    for rank, gets in enumerate(values(run_threads(3, body))):
        assert gets == [[(rank + 1) % 3, (rank + 2) % 3]] * turns


# The real heap, as far as it goes without NVSHMEM


def with_nvshmem(status: int, monkeypatch: pytest.MonkeyPatch, pes: tuple[int, int] = (0, 1)) -> NvshmemHeap:
    """The heap on a bare stand-in for nvshmem4py that is initialised already."""
    bindings: Any = types.ModuleType("nvshmem.bindings")
    names = ("NOT_INITIALIZED", "IS_BOOTSTRAPPED", "IS_INITIALIZED", "LIMITED_MPG", "FULL_MPG")
    bindings.Init_status = types.SimpleNamespace(**{f"STATUS_{name}": number for number, name in enumerate(names)})
    bindings.init_status, bindings.my_pe, bindings.n_pes = lambda: status, lambda: pes[0], lambda: pes[1]
    package: Any = types.ModuleType("nvshmem")
    package.bindings, package.core = bindings, types.ModuleType("nvshmem.core")
    package.core.get_version = lambda: None
    for name, module in (("nvshmem", package), ("nvshmem.bindings", bindings), ("nvshmem.core", package.core)):
        monkeypatch.setitem(sys.modules, name, module)
    return NvshmemHeap(torch.device("cuda", 0), lambda address, num_bytes: torch.empty(num_bytes), 10.0)


def test_ranks_that_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = with_nvshmem(3, monkeypatch)
    (result,) = run_threads(1, lambda exchange: heap.start(exchange, 1))
    assert isinstance(result, SetupError)
    assert "several ranks share one GPU" in str(result)
    assert "transport='cuda_ipc'" in str(result)


def test_a_library_that_cannot_be_loaded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = with_nvshmem(2, monkeypatch)

    def get_version() -> None:
        raise RuntimeError("Failure finding libnvshmem_host.so")

    monkeypatch.setattr(sys.modules["nvshmem"].core, "get_version", get_version)
    (result,) = run_threads(1, lambda exchange: heap.start(exchange, 1))
    assert isinstance(result, SetupError)
    assert "cannot be loaded: Failure finding libnvshmem_host.so. pip install 'odc-fsdp[cuda" in str(result)


def test_an_nvshmem_of_another_group_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    heap = with_nvshmem(2, monkeypatch, pes=(1, 4))
    (result,) = run_threads(1, lambda exchange: heap.start(exchange, 1))
    assert isinstance(result, SetupError)
    assert "its PEs are [[1, 4]], the ranks of this one are 0 to 0" in str(result)


@pytest.mark.parametrize("value", ["1", "yes", "off", ""])
def test_gpus_that_drive_the_network_card_are_refused_before_anything_is_loaded(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVSHMEM takes "off" and an empty text for yes."""
    monkeypatch.setenv("NVSHMEM_IB_ENABLE_IBGDA", value)
    heap = with_nvshmem(0, monkeypatch)
    touched: list[str] = []
    monkeypatch.setattr(sys.modules["nvshmem"].core, "get_version", lambda: touched.append("loaded"))
    monkeypatch.setattr(sys.modules["nvshmem"].bindings, "init_status", lambda: touched.append("asked") or 0)
    (result,) = run_threads(1, lambda exchange: heap.start(exchange, 1))
    assert isinstance(result, SetupError)
    assert f"NVSHMEM_IB_ENABLE_IBGDA={value!r} lets GPUs drive the network card themselves" in str(result)
    assert "Unset NVSHMEM_IB_ENABLE_IBGDA on all hosts" in str(result)
    assert touched == []


@pytest.mark.parametrize("value", [None, "0", "false", "No"])
def test_a_proxy_that_drives_the_network_card_is_what_is_wanted(value: str | None) -> None:
    assert ibgda_problem({} if value is None else {"NVSHMEM_IB_ENABLE_IBGDA": value}) is None


def test_nothing_here_advises_what_is_refused() -> None:
    root = Path(__file__).parents[2]
    files = [*root.glob("bench/slurm/*.*"), *root.glob("docs/*.md"), *root.glob("*.md"), *root.glob("examples/*.py")]
    advised = [path for path in files if "ENABLE_IBGDA=1" in path.read_text()]
    assert len(files) > 10
    assert advised == []


def test_one_rank_whose_variable_is_set_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with_nvshmem(0, monkeypatch)
    refusals = iter(["IBGDA is on", None, None])
    monkeypatch.setattr(nvshmem, "ibgda_problem", lambda: next(refusals))
    heap = NvshmemHeap(torch.device("cuda", 0), lambda address, num_bytes: torch.empty(num_bytes), 10.0)
    results = run_threads(2, lambda exchange: heap.start(exchange, 1))
    assert all(isinstance(result, SetupError) and "IBGDA is on" in str(result) for result in results), results


def test_a_small_heap_is_refused_before_nvshmem_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1M")
    heap = with_nvshmem(0, monkeypatch)
    (result,) = run_threads(1, lambda exchange: heap.start(exchange, 5 << 20))
    assert isinstance(result, SetupError)
    assert "NVSHMEM_SYMMETRIC_SIZE=1048576 (1 MiB)" in str(result)
    assert f"NVSHMEM_SYMMETRIC_SIZE={(5 + 64) << 20} (69 MiB)" in str(result)


def test_a_call_that_never_returns_ends_the_process_and_says_what_to_look_at() -> None:
    script = """
import threading, time
from odc import limits
from odc.cuda import nvshmem as limit
limits.FIRST_REMINDER_S = 0.2
warned = threading.Event()
limit.logger.addFilter(lambda record: warned.set() or True)
with limit.time_limit("NVSHMEM's start", 60.0):
    warned.wait(30)
with limit.time_limit("NVSHMEM's allocation", 1.0):
    time.sleep(60)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert re.search(r"NVSHMEM's start has not returned for \d+ s\. A rank has not", done.stderr)  # and then it did
    ended = r"NVSHMEM's allocation has not returned for \d+ s; ending this process\. A rank has not"
    assert re.search(ended, done.stderr), done.stderr


@pytest.mark.parametrize("missing", ["nvshmem", "bitcode"])
def test_a_missing_piece_is_named_with_the_command(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem.runtime, "unavailable", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    if missing == "nvshmem":
        monkeypatch.setitem(sys.modules, "nvshmem", None)
    else:
        install_fakes(monkeypatch)

    def find_bitcode(arch: str, folder: str | None) -> None:
        assert arch == "sm_90"
        raise FileNotFoundError("no NVSHMEM device library for sm_90: pip install nvidia-nvshmem-cu13")

    monkeypatch.setattr(nvshmem, "find_bitcode", find_bitcode)
    reason = nvshmem.unavailable(torch.device("cuda"))
    assert reason is not None
    assert "pip install" in reason
    assert ("nvshmem4py) is not installed" in reason or "nvshmem4py), is not installed" in reason) == (
        missing == "nvshmem"
    )


def install_fakes(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> None:
    """nvshmem4py and cuda.core that can be imported; ``modules`` in their places, with __ for a dot."""
    names = ("nvshmem", "nvshmem.bindings", "nvshmem.core", "cuda", "cuda.core")
    for name in names:
        fake: Any = types.ModuleType(name)
        fake.Device = object
        monkeypatch.setitem(sys.modules, name, modules.get(name.replace(".", "__"), fake))


BROKEN = "raise ImportError('libnvshmem_host.so.3: cannot open shared object file')"


def test_an_nvshmem4py_that_cannot_be_imported_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvshmem.runtime, "unavailable", lambda device: None)
    for name in ("nvshmem", "nvshmem.bindings", "nvshmem.core"):
        monkeypatch.setitem(sys.modules, name, None)  # so that it is restored; what is imported here goes again
        del sys.modules[name]
    (tmp_path / "nvshmem").mkdir()
    (tmp_path / "nvshmem/__init__.py").touch()
    (tmp_path / "nvshmem/bindings.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(tmp_path)
    reason = nvshmem.unavailable(torch.device("cuda"))
    assert reason is not None
    assert "cannot be imported (ImportError: libnvshmem_host.so.3: cannot open shared object file)" in reason


def test_a_cuda_core_that_is_too_old_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem.runtime, "unavailable", lambda device: None)
    install_fakes(monkeypatch, cuda__core=types.ModuleType("cuda.core"))
    reason = nvshmem.unavailable(torch.device("cuda"))
    assert reason is not None
    assert "cuda.core, which nvshmem4py takes devices from, is too old, it has no Device: pip install --up" in reason
