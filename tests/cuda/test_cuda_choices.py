"""Layer 2: ranks as threads. What set-up of ``cuda_ipc`` finds out of a machine, and chooses by it: who adds, whether
words of streams work, and which way bytes go.

Over the fake CUDA runtime of ``bench/fake/cuda.py``; the transport and the runtime are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from thread_ranks import ThreadExchange, run_threads, values

from odc import ConfigError, ParamSlice, Runtime, RuntimeConfig, SetupError, UnitSpec
from odc.bench.fake import cuda as fake_cuda
from odc.bench.fake import streams
from odc.bench.fake.cuda import AsynchronousFakeCudaTransport, FakeCudaTransport, FakeEngine
from odc.engines.base import TransferTable
from odc.setup.topology import Topology

pytestmark = pytest.mark.usefixtures("fakes")

UNITS = [UnitSpec("layers.0", 1000, torch.float32, (ParamSlice("w", 1000),))]


def create(exchange: ThreadExchange, **options: Any) -> Runtime:
    return Runtime.create(exchange, UNITS, RuntimeConfig(transport="fake_cuda", timeout_s=10, **options))


# Atomic additions, and words of streams, are not taken on trust


def test_where_additions_could_be_lost_direct_is_refused_and_auto_takes_the_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert values(run_threads(2, lambda e: slots_of(create(e)))) == [0, 0]
    reason = "device 1 has no native atomics in the memory of 0 (no NVLink between them)"
    monkeypatch.setattr(FakeCudaTransport, "atomics_missing", reason)
    assert min(values(run_threads(2, lambda e: slots_of(create(e))))) > 0
    assert min(values(run_threads(2, lambda e: slots_of(create(e, deterministic=True))))) > 0
    for result in run_threads(2, lambda e: slots_of(create(e, accumulate="direct"))):
        assert isinstance(result, ConfigError)
        assert str(result) == f"accumulate='direct' would lose additions: {reason}: use 'daemon' or 'auto'"


def test_a_measured_table_may_prefer_the_daemon(tmp_path: Path) -> None:
    """One rank's table is enough; who asks for "direct" gets it."""
    TransferTable(((0, "copy_engine"),), "daemon").save(tmp_path / "table.json")

    def slots(exchange: ThreadExchange, **options: Any) -> int:
        table = str(tmp_path / "table.json") if exchange.rank == 1 else ""
        return slots_of(create(exchange, transfer_table=table, **options))

    assert min(values(run_threads(2, slots))) > 0
    assert values(run_threads(2, lambda e: slots(e, accumulate="direct"))) == [0, 0]
    with pytest.raises(ConfigError, match="accumulate is 'pigeon', neither"):
        TransferTable(((0, "copy_engine"),), "pigeon")


def test_gradients_reduced_in_bf16_take_slots() -> None:
    """Atomic additions would carry float32."""
    unit = UnitSpec("layers.0", 1000, torch.bfloat16, (ParamSlice("w", 1000),), torch.bfloat16)
    frozen = UnitSpec("layers.1", 1000, torch.bfloat16)

    def slots(exchange: ThreadExchange, units: Sequence[UnitSpec], **options: Any) -> int:
        return slots_of(Runtime.create(exchange, units, RuntimeConfig(transport="fake_cuda", timeout_s=10, **options)))

    assert min(values(run_threads(2, lambda e: slots(e, [unit, frozen])))) > 0
    assert values(run_threads(2, lambda e: slots(e, [unit, frozen], accumulate="direct"))) == [0, 0]
    assert values(run_threads(2, lambda e: slots(e, [unit, *UNITS]))) == [0, 0]


def test_one_rank_without_native_atomics_decides_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_atomics(self: fake_cuda.FakeCuda, identity: str) -> str | None:
        return "no NVLink" if threading.current_thread() is slow[0] else None

    slow: list[threading.Thread] = []
    monkeypatch.setattr(fake_cuda.FakeCuda, "no_atomics", no_atomics)

    def body(exchange: ThreadExchange) -> int:
        if exchange.rank == 1:
            slow.append(threading.current_thread())
        exchange.all_gather(b"")
        return slots_of(create(exchange))

    with caplog.at_level("WARNING"):
        assert min(values(run_threads(3, body))) > 0
    assert [r.getMessage() for r in caplog.records] == [
        "odc: gradients take slots and one more pass: accumulate='direct' would lose additions: no NVLink"
    ]


def slots_of(runtime: Runtime) -> int:
    with runtime:
        return runtime.memory()["slots"]


def test_set_up_tries_a_write_and_a_wait_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's streams set nothing."""
    write_values = fake_cuda.FakeCuda.write_values

    def write(self: fake_cuda.FakeCuda, row: Sequence[tuple[int, int]]) -> None:
        if self is not mute[0]:
            write_values(self, row)

    mute: list[fake_cuda.FakeCuda] = []
    monkeypatch.setattr(fake_cuda.FakeCuda, "write_values", write)
    monkeypatch.setattr(streams, "WAIT_LIMIT_S", 2.0)

    def body(exchange: ThreadExchange) -> None:
        topology = Topology.discover(exchange)
        transport = AsynchronousFakeCudaTransport(exchange, topology, 0.5)
        try:
            if exchange.rank == 1:
                mute.append(transport.fake)
            exchange.all_gather(b"")
            transport.open(num_signals=2, num_locks=0)
            transport.seal()
        finally:
            transport._failing = True
            transport.close()

    results = run_threads(2, body)
    assert all(isinstance(result, SetupError) for result in results), results
    assert "has waited 0.5 s for words that streams of the other ranks were to set" in str(results[0])


# Copy engines or a kernel


def test_the_table_of_transfers_chooses_by_size(tmp_path: Path) -> None:
    table = TransferTable(((1 << 20, "kernel"), (0, "copy_engine")))
    assert [table.by_kernel(size) for size in (1, 1 << 20, (1 << 20) + 1, 1 << 40)] == [True, True, False, False]
    table.save(tmp_path / "table.json")
    assert TransferTable.load(tmp_path / "table.json") == table
    assert [TransferTable.default().by_kernel(size) for size in (1, 8 << 20, 1 << 30)] == [True, True, False]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((), "the last row"),
        (((5, "kernel"),), "the last row"),
        (((5, "kernel"), (5, "kernel"), (0, "kernel")), "must rise"),
        (((0, "carrier pigeon"),), "neither"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(rows: tuple[tuple[int, str], ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TransferTable(rows)


def test_a_measured_table_reaches_the_engine_or_fails_on_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TransferTable(((1 << 20, "kernel"), (0, "copy_engine")))
    table.save(tmp_path / "table.json")
    chosen: list[TransferTable] = []
    monkeypatch.setattr(FakeEngine, "choose_by", lambda self, table: chosen.append(table))
    values(run_threads(2, lambda e: create(e, transfer_table=str(tmp_path / "table.json")).close()))
    assert chosen == [table, table]
    results = run_threads(2, lambda e: create(e, transfer_table="absent.json" if e.rank else "").close())
    assert isinstance(results[1], ConfigError)
    assert isinstance(results[0], SetupError)
    assert "set-up failed on rank 1: ConfigError: absent.json holds no transfer table" in str(results[0])


def test_a_file_without_a_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    for name in ("x.json", "absent.json"):
        with pytest.raises(ConfigError, match=f"{name} holds no transfer table"):
            TransferTable.load(tmp_path / name)
