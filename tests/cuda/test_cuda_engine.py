"""Layer 1: the real CudaEngine, operation by operation, on host memory (``host_cuda.py``). No processes, no GPU.

Its kernels are interpreted, and nothing happens before the test lets its streams go on. What this cannot show: that the
compiled kernels and torch's own operations on a GPU do the same.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_rig import CPU, DEVICE, INDEX, Rig
from host_cuda import HostCuda
from kernel_cases import numbers
from kernel_driver import no_gpu

from odc.bench.gpu import speed
from odc.engines.base import COPY_ENGINE, KERNEL, Addition, Part, TransferTable
from odc.errors import SetupError, UnsupportedError
from odc.kernels import fill, prepare
from odc.kernels.aot_entry import AotEntry

BF16, FP16, FP32, FP64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
FP8 = torch.float8_e4m3fn
FLOATS = (BF16, FP16, FP32, FP64)
BY_KERNEL, BY_COPIES = TransferTable(((0, KERNEL),)), TransferTable(((0, COPY_ENGINE),))


def on(rig: Rig, engine: Any, values: torch.Tensor, shift: int = 0) -> torch.Tensor:
    """``values`` where this engine has its memory."""
    return rig.put(values, shift) if engine is rig.engine else values


def integers(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(numel) * 7 % 100 - 50).to(dtype)


def some(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return numbers(numel, dtype, seed) if dtype in FLOATS else integers(numel, torch.int8).to(dtype)


# One tensor


@pytest.mark.parametrize(
    ("out", "source", "kernel"),
    [
        (FP32, FP32, False),
        (FP32, BF16, True),
        (BF16, FP32, True),
        (FP64, FP16, True),
        (FP32, FP64, True),
        (BF16, FP64, False),  # a kernel would round twice
        (I64, I64, False),
        (FP32, I64, False),
        (FP32, torch.int32, False),
        (I64, FP32, False),
        (FP8, FP8, False),
        (FP8, BF16, False),
        (BF16, FP8, False),
    ],
    ids=str,
)
def test_copy(rig: Rig, out: torch.dtype, source: torch.dtype, kernel: bool) -> None:
    values, calls = some(5001, source), list[Any]()

    def copy(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        for shift in (0, 3):
            engine.copy([outs[shift]], [on(rig, engine, values, shift)], lambda: calls.append(engine))

    rig.same_as_cpu([some(5001, out, 9) for _ in range(4)], copy)
    assert rig.cuda.launches == ["_copy_cast_kernel"] * 2 * kernel
    assert calls.count(rig.engine) == 2


@pytest.mark.parametrize(
    ("total", "addend", "kernel"),
    [
        (FP32, FP32, True),
        (FP32, BF16, True),
        (FP64, FP32, True),
        (FP64, FP64, True),
        (FP32, FP64, False),
        (FP32, I64, False),
        (FP32, torch.int32, False),
        (I64, I64, False),
        (BF16, BF16, False),
    ],
    ids=str,
)
def test_add(rig: Rig, total: torch.dtype, addend: torch.dtype, kernel: bool) -> None:
    values = some(4099, addend, 1)
    rig.same_as_cpu([some(4099, total)], lambda engine, outs: engine.add(outs, [on(rig, engine, values)]))
    assert rig.cuda.launches == ["_accumulate_kernel"] * kernel


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, FP64, I64, torch.uint8, FP8, torch.bool], ids=str)
def test_zero(rig: Rig, dtype: torch.dtype) -> None:
    rig.same_as_cpu([some(4099, dtype)], lambda engine, outs: engine.zero(outs[0][1:-1]))


# All ranks


def test_addresses_of_peers_are_sent_to_the_device_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What sends them waits for the device."""
    build, sent = rig.k.peers.PeerTable.build, list[Any]()

    def noted(*arguments: Any) -> Any:
        sent.append(arguments)
        return build(*arguments)

    monkeypatch.setattr(rig.k.engine.PeerTable, "build", noted)
    memory = [rig.put(some(64, FP32, rank)) for rank in range(2)]
    for low in (0, 8, 32):
        out = rig.put(torch.zeros(16))
        rig.engine.read_rows([out], [one[low : low + 8] for one in memory], 0)
        wanted = torch.cat([rig.cuda.read(one)[low : low + 8] for one in memory])
        assert torch.equal(rig.done(out), wanted)
        part = Part(rig.put(torch.zeros(16)), 4 * low, 8)
        rig.engine.add_rows([one.view(torch.uint8) for one in memory], [part], 0)
    assert len(sent) == 1


# All parameters of a unit

SLICES: dict[str, list[int]] = {
    "one": [4097],
    "aligned": [64, 4096, 8],
    "odd": [5, 0, 4099, 1],
    "260": [n % 4 * (n % 250 < 10) for n in range(260)],
}


def of_slices(*cases: tuple[torch.dtype, int], many: bool = False) -> list[Any]:
    """Each with all slices. More than a table has rows for take long: in every run if ``many``, and once."""
    return [
        pytest.param(
            numels,
            *case,
            id=f"{name}-{case[0]}",
            marks=pytest.mark.extended if name == "260" and not (many and number == 0) else (),
        )
        for name, numels in SLICES.items()
        for number, case in enumerate(cases)
    ]


def launches_of(rig: Rig, kernel: str, numels: Sequence[int]) -> bool:
    """One, or two if no table has rows for all."""
    return rig.cuda.launches.count(kernel) == (1 if len(numels) <= 256 else 2)


@pytest.mark.parametrize("way", [BY_KERNEL, BY_COPIES], ids=[KERNEL, COPY_ENGINE])
@pytest.mark.parametrize(
    ("numels", "dtype", "before"), of_slices((BF16, 0), (FP16, 3), (FP32, 4), (FP64, 1), (I64, 0), (FP8, 5), many=True)
)
@pytest.mark.parametrize("own_in_place", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_read_rows(
    rig: Rig, way: TransferTable, numels: list[int], dtype: torch.dtype, before: int, own_in_place: bool
) -> None:
    memory = [some(before + sum(numels) + 5, dtype, 10 + rank) for rank in range(3)]

    def read_rows(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        parts = [out[: 3 * numel] for out, numel in zip(outs, numels, strict=True)]
        shards = [on(rig, engine, one)[before : before + sum(numels)] for one in memory]
        engine.read_rows(parts, shards, 1, own_in_place)

    rig.engine.choose_by(way)
    rig.same_as_cpu([torch.ones(3 * numel + 2, dtype=FP32).to(dtype) for numel in numels], read_rows)
    if way is BY_KERNEL and dtype in FLOATS:
        assert launches_of(rig, "_gather_parts_kernel", numels)
        assert len(rig.cuda.launches) <= 2
    else:
        assert rig.cuda.launches == ["copies"]


def test_own_rows_in_place(rig: Rig) -> None:
    shards, outs = (
        [rig.put(torch.tensor([1.0 + rank, 5.0])) for rank in range(3)],
        [rig.put(torch.zeros(3)), rig.put(torch.zeros(3))],
    )
    rig.engine.read_rows(outs, shards, 1, own_in_place=True)
    assert [rig.done(out).tolist() for out in outs] == [[1.0, 0.0, 3.0], [5.0, 0.0, 5.0]]
    assert rig.cuda.launches == ["_gather_parts_kernel"]


def test_read_rows_of_another_dtype(rig: Rig) -> None:
    """No kernel of parts casts."""
    shards = [some(77, FP32, rank) for rank in range(3)]
    rig.same_as_cpu(
        [torch.zeros(3 * numel, dtype=BF16) for numel in (7, 70)],
        lambda engine, outs: engine.read_rows(outs, [on(rig, engine, shard) for shard in shards], 0),
    )
    assert "_gather_parts_kernel" not in rig.cuda.launches


def test_slices_lie_back_to_back() -> None:
    shards = [torch.arange(6) + 10 * rank for rank in range(2)]
    outs = [torch.zeros(2 * numel, dtype=I64) for numel in (1, 3, 0, 2)]
    CPU.read_rows(outs, shards, 1)
    assert [out.tolist() for out in outs] == [[0, 10], [1, 2, 3, 11, 12, 13], [], [4, 5, 14, 15]]


def parts_of(
    numels: Sequence[int], dtype: torch.dtype, itemsize: int, put: Any, missing: Sequence[int] = (0,), gap: int = 0
) -> list[Part]:
    """Gradients for three ranks, of which the last rows lack some elements; between slices there is a gap."""
    parts, low = [], gap
    for number, numel in enumerate(numels):
        total = max(0, 3 * numel - missing[number % len(missing)])
        parts.append(Part(put(some(total, dtype, number)), low * itemsize, numel))
        low += numel + gap
    return parts


@pytest.mark.parametrize("way", [BY_KERNEL, BY_COPIES], ids=[KERNEL, COPY_ENGINE])
@pytest.mark.parametrize(
    ("numels", "dtype", "gap"), of_slices((BF16, 0), (FP16, 3), (FP32, 4), (FP64, 1), (I64, 1), (FP8, 3))
)
def test_write_rows(rig: Rig, way: TransferTable, numels: list[int], dtype: torch.dtype, gap: int) -> None:
    size = dtype.itemsize
    buffers = [torch.full((size * (sum(numels) + gap * len(numels) + 9),), 77, dtype=torch.uint8) for _ in range(3)]

    def copy(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        parts = parts_of(numels, dtype, size, lambda grads: on(rig, engine, grads), [0, 2, 4200], gap)
        engine.write_rows([out[: out.numel() // 8 * 8] for out in outs], parts, 1)

    rig.engine.choose_by(way)
    rig.same_as_cpu(buffers, copy)
    if way is BY_KERNEL and dtype in FLOATS:
        assert launches_of(rig, "_scatter_parts_kernel", numels)
        assert len(rig.cuda.launches) <= 2
    else:
        assert rig.cuda.launches.count("copies") == 1
        assert ("_scatter_parts_kernel" in rig.cuda.launches) <= (dtype in FLOATS)


def test_what_a_row_lacks_is_zeros() -> None:
    buffers = [torch.full((10,), 7, dtype=torch.uint8) for _ in range(3)]
    parts = [
        Part(torch.tensor([1, 2, 3, 4, 5], dtype=torch.int16), 2, 3),
        Part(torch.tensor([6], dtype=torch.uint8), 8, 1),
    ]
    CPU.write_rows(buffers, parts, 0)
    rows = [buffer[2:8].view(torch.int16).tolist() for buffer in buffers]
    assert rows == [[1, 2, 3], [4, 5, 0], [0, 0, 0]]
    assert [buffer[8:].tolist() for buffer in buffers] == [[6, 7], [0, 7], [0, 7]]
    assert all((buffer[:2] == 7).all() for buffer in buffers)


@pytest.mark.parametrize(
    ("numels", "dtype", "gap"), of_slices(*((dtype, 4) for dtype in (BF16, FP16, FP32, FP64, torch.int32)))
)
def test_add_rows(rig: Rig, numels: list[int], dtype: torch.dtype, gap: int) -> None:
    missing = [0, 2, 4200]
    sums = [some(sum(numels) + gap * len(numels) + 9, FP32, 50 + rank) for rank in range(3)]
    ours = [rig.put(total, 4) for total in sums]
    parts = parts_of(numels, dtype, 4, rig.put, missing, gap)
    rig.engine.add_rows([one.view(torch.uint8) for one in ours], parts, 2)
    del parts  # what the engine has cast is nobody's
    rig.cuda.run()
    for rank, (mine, total) in enumerate(zip(ours, sums, strict=True)):
        for grads, offset_bytes, numel in parts_of(numels, dtype, 4, torch.Tensor.clone, missing, gap):
            row = grads[rank * numel : (rank + 1) * numel].float()
            total[offset_bytes // 4 : offset_bytes // 4 + len(row)] += row
        assert torch.equal(rig.cuda.read(mine), total)
    assert launches_of(rig, "_scatter_accumulate_parts_kernel", numels)


def test_a_cpu_adds_no_parts() -> None:
    with pytest.raises(UnsupportedError, match="no atomic addition on a CPU"):
        CPU.add_rows([torch.zeros(8, dtype=torch.uint8)], [Part(torch.ones(2), 0, 2)], 0)


def test_parts_of_several_dtypes(rig: Rig) -> None:
    """A launch for each."""

    def copy(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        parts = [
            Part(on(rig, engine, some(3 * 8, dtype, number)), 64 * number, 8)
            for number, dtype in enumerate((BF16, FP32, BF16, FP64))
        ]
        engine.write_rows(outs, parts, 1)

    rig.same_as_cpu([torch.full((256,), 7, dtype=torch.uint8) for _ in range(3)], copy)
    assert rig.cuda.launches == ["_scatter_parts_kernel"] * 3
    sums = [rig.put(torch.zeros(64)) for _ in range(2)]
    parts = [Part(rig.put(torch.ones(2, dtype=dtype)), 4 * at, 1) for at, dtype in enumerate((BF16, FP32))]
    rig.engine.add_rows([one.view(torch.uint8) for one in sums], parts, 1)
    assert all(rig.done(one).tolist() == [1.0, 1.0, *[0.0] * 62] for one in sums)
    assert rig.cuda.launches[3:] == ["_scatter_accumulate_parts_kernel"] * 2


def test_the_table_of_transfers_decides_of_each_part(rig: Rig) -> None:
    """Those of up to 240 bytes by one launch, those beyond by copies; of rows that lack something, by a launch, too."""
    rig.engine.choose_by(TransferTable(((240, KERNEL), (0, COPY_ENGINE))))
    numels = [1, 21, 0, 30, 20]
    shards = [some(4 + sum(numels), FP32, rank) for rank in range(3)]
    rig.same_as_cpu(
        [torch.ones(3 * numel) for numel in numels],
        lambda engine, outs: engine.read_rows(outs, [on(rig, engine, shard)[4:] for shard in shards], 1),
    )
    assert rig.cuda.launches == ["_gather_parts_kernel", "copies"]

    def push(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        parts = parts_of(numels, FP32, 4, lambda grads: on(rig, engine, grads), [0, 0, 0, 1], gap=2)
        engine.write_rows(outs, parts, 1)

    rig.same_as_cpu([torch.full((4 * (sum(numels) + 20),), 7, dtype=torch.uint8) for _ in range(3)], push)
    assert rig.cuda.launches[2:] == ["_scatter_parts_kernel", "copies"]


def test_a_layer_takes_a_launch_and_a_call_for_all_its_copies(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many owners and parameters it has. The check of what a host pays for it has the real shapes."""
    monkeypatch.setitem(speed.LAYERS, "tiny", (16, 8, 48))
    rig.engine.choose_by(TransferTable(((256, KERNEL), (0, COPY_ENGINE))))
    with rig.cuda.running(seed=1):
        cell = speed.costs(rig.engine, DEVICE, "tiny", 2, 1)
    assert cell["gather"]["median"] > 0
    both = [
        ["_gather_parts_kernel", "copies"],
        ["_scatter_accumulate_parts_kernel"],
        ["_scatter_parts_kernel", "copies"],
    ]
    assert rig.cuda.launches == 3 * [call for calls in both for call in calls]


def test_progress_of_parts(rig: Rig) -> None:
    calls: list[Any] = []
    for engine in (rig.engine, CPU):
        shards = [on(rig, engine, torch.zeros(2)) for _ in range(2)]
        grads, buffers = on(rig, engine, torch.zeros(4)), [shard.view(torch.uint8) for shard in shards]
        engine.read_rows([grads], shards, 0, after_chunk=lambda: calls.append("gather"))
        engine.write_rows(buffers, [Part(grads, 0, 2)], 0, lambda: calls.append("push"))
    rig.engine.add_rows(buffers_of(rig), [Part(rig.put(torch.zeros(4)), 0, 2)], 0, lambda: calls.append("add"))
    assert calls == ["gather", "push", "gather", "gather", "push", "push", "add"]


def buffers_of(rig: Rig) -> list[torch.Tensor]:
    return [rig.put(torch.zeros(2)).view(torch.uint8) for _ in range(2)]


def test_rows_of_parts_are_written_anew_when_their_launch_is_over(rig: Rig) -> None:
    engine, cuda = rig.engine, rig.cuda
    num_tables = len(engine._part_rows)
    shards, outs = [rig.put(torch.tensor([1.0, 2.0]))], [rig.put(torch.zeros(1)) for _ in range(num_tables + 9)]
    asked: list[int] = []

    def on_query(event: Any) -> None:
        if event.mark is not None and not event.mark.is_passed:
            asked.append(len(cuda.launches))
            while len(asked) % 3 == 0 and not event.mark.is_passed:  # the device is slow
                assert cuda.step(cuda.streams)

    cuda.on_query = on_query
    for number, out in enumerate(outs):
        engine.read_rows([out], [shards[0][number % 2 :][:1]], 0)
    assert sorted(set(asked)) == list(range(num_tables, num_tables + 9))
    cuda.run()
    assert [cuda.read(out).item() for out in outs] == [1.0 + number % 2 for number in range(num_tables + 9)]


def test_a_refused_launch_leaves_its_rows(rig: Rig) -> None:
    num_tables = len(rig.engine._part_rows)
    for _ in range(num_tables + 1):
        with pytest.raises(ValueError, match="at most 2"):
            rig.engine.add_rows(buffers_of(rig), [Part(rig.put(torch.zeros(4)), 0, 1)], 0)
        rig.cuda.run()
    assert len(rig.engine._part_rows) == num_tables
    assert not rig.cuda.launches


# Slots


def additions_of(totals: Sequence[torch.Tensor], rows: Sequence[tuple[Sequence[int], int, bool]]) -> list[Addition]:
    return [Addition(total, slots, low, first) for total, (slots, low, first) in zip(totals, rows, strict=True)]


ROWS: dict[str, list[tuple[Sequence[int], int, bool]]] = {
    "one unit": [((0, 2, 3), 0, True)],
    "several units": [((0, 3), 0, False), ((1,), 0, True), ((2,), 0, False)],
    "first without any": [((), 0, True), ((1,), 8, False), ((), 0, False)],
    "parts": [((2,), 0, True), ((), 0, True), ((2,), 104, True), ((2,), 160, False)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize(
    ("total", "addend", "kernel"),
    [
        (FP32, FP32, True),
        (FP32, BF16, True),
        (FP64, FP16, True),
        (FP64, FP64, True),
        (FP32, FP64, False),
        (FP32, I64, False),
        (I64, I64, False),
    ],
    ids=str,
)
def test_add_slots(
    rig: Rig,
    rows: list[tuple[Sequence[int], int, bool]],
    total: torch.dtype,
    addend: torch.dtype,
    kernel: bool,
) -> None:
    slot_bytes = 1024
    slots = some(4 * slot_bytes // addend.itemsize, addend).view(torch.uint8)
    totals = [some(40 + 9 * number, total, number) for number in range(len(rows))]

    def add(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        engine.add_slots(on(rig, engine, slots), slot_bytes, addend, additions_of(outs, rows))

    rig.same_as_cpu(totals, add)
    assert ("_accumulate_slots_kernel" in rig.cuda.launches) == kernel
    assert not kernel or len(rig.cuda.launches) == 1


def test_more_slots_than_one_launch_adds(rig: Rig) -> None:
    """33 ranks of two slots each."""
    rows: list[tuple[Sequence[int], int, bool]] = [
        (range(66), 0, True),
        ((1, 62, 63, 65), 4, False),
        ((63,), 8, True),
        ((64, 65), 0, False),
        ((), 0, True),
        ((5,), 0, True),
    ]
    slots = torch.cat([some(16, FP32, 3 + slot) for slot in range(66)]).view(torch.uint8)

    def add(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        engine.add_slots(on(rig, engine, slots), 64, FP32, additions_of(outs, rows))

    rig.same_as_cpu([some(11 + number, FP32, number) for number in range(len(rows))], add)
    assert len(rig.cuda.launches) == 2


def test_more_sums_than_a_table_has_rows(rig: Rig) -> None:
    slots = some(64, FP32).view(torch.uint8)
    rows: list[tuple[Sequence[int], int, bool]] = [((n % 4,), 4 * (n % 8), n % 3 == 0) for n in range(131)]

    def add(engine: Any, outs: Sequence[torch.Tensor]) -> None:
        engine.add_slots(on(rig, engine, slots), 64, FP32, additions_of(outs, rows))

    wanted = {0, 30, 62, 63, 64, 65, 127, 128, 130}  # the others are empty: each program looks at each row
    rig.same_as_cpu([some(5 if number in wanted else 0, FP32, number) for number in range(131)], add)
    assert len(rig.cuda.launches) == 3


def test_a_table_is_written_anew_when_its_launch_is_over(rig: Rig) -> None:
    """The host is ahead by as many launches as there are tables; the next one waits for the first."""
    engine, cuda = rig.engine, rig.cuda
    num_tables = len(engine._row_tables)
    slots, total = rig.put(torch.tensor([1.0, 2.0]).view(torch.uint8)), rig.put(torch.zeros(num_tables + 9, 1))
    asked: list[int] = []

    def on_query(event: Any) -> None:
        if event.mark is None or event.mark.is_passed:
            return
        asked.append(len(cuda.launches))
        if len(asked) % 3 == 0:  # the device is slow
            while not event.mark.is_passed:
                assert cuda.step(cuda.streams)

    cuda.on_query = on_query
    for number in range(num_tables + 9):
        engine.add_slots(slots, 4, FP32, [Addition(total[number], [number % 2], 0, False)])
    assert sorted(set(asked)) == list(range(num_tables, num_tables + 9))
    assert len(asked) == 3 * 9
    wanted = torch.tensor([1.0 + number % 2 for number in range(num_tables + 9)])
    assert torch.equal(rig.done(total).flatten(), wanted)


# Set-up


def test_prepare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On the engine's device, whichever is current, all that is needed is compiled, and one kernel launched."""
    from odc.engines.cuda import CudaEngine

    loaded: list[tuple[str, int]] = []
    cuda = HostCuda()

    def load(entry: AotEntry) -> None:
        loaded.append((entry.name, cuda.current_device()))

    monkeypatch.setattr(prepare, "load_entry", load)
    monkeypatch.setattr(fill, "device_of", lambda kernel, tensor, advice: cuda.device(cuda.device_of(tensor)))
    units = [(BF16, BF16, FP32), (FP8, FP32, FP32)]
    needed = prepare.needed_entries([prepare.UnitDtypes(*each) for each in units])
    with cuda.installed():
        new_stream, copy = (functools.partial(call, INDEX) for call in (cuda.new_stream, cuda.copy_memory))
        engine = CudaEngine(DEVICE, new_stream, lambda stream: None, copy)  # type: ignore[arg-type]
        with no_gpu(monkeypatch, tmp_path) as driver:
            engine.prepare(units)
            assert loaded == [(entry.name, INDEX) for entry in needed]
            assert driver.launched == ["_fill_kernel"]
            assert cuda.current_device() == 0
        for where in ("prepare_kernels", "fill"):
            monkeypatch.setattr(f"odc.engines.cuda.{where}", no_gcc)
            with pytest.raises(SetupError, match=r"RuntimeError: no gcc.*TRITON_CACHE_DIR"):
                engine.prepare(units)
            monkeypatch.setattr(f"odc.engines.cuda.{where}", lambda *arguments: 0)


def no_gcc(*arguments: object) -> None:
    raise RuntimeError("no gcc")
