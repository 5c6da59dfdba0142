"""Layer 1: no processes. What is compiled before the first step is all that steps launch.

No GPU. Launches go Triton's own way up to a driver that has no GPU: with what they compile and load counted. It cannot
show how long a driver takes to load a kernel.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_driver import NoGpu, no_gpu
from kernel_recorder import launched_variant, record_launches, variants

from odc.kernels import accumulate, fill, parts, slots
from odc.kernels.launching import DTYPES
from odc.kernels.peers import PeerTable
from odc.kernels.prepare import UnitDtypes, needed_entries, prepare_kernels

BF16, FP16, FP32, FP64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
TRAINING = UnitDtypes(BF16, BF16, FP32)
UNITS = [
    UnitDtypes(published, grads, sums)
    for published in (BF16, FP32, FP16)
    for grads in (BF16, FP32)
    for sums in (FP32, FP64)
]


def room(choice: random.Random, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Somewhere, aligned or not."""
    shift = choice.choice((0, 0, 1, 2, 4, 8))
    storage = torch.zeros(numel + shift + 64, dtype=dtype)
    start = -storage.data_ptr() % 64 // dtype.itemsize + shift
    return storage[start : start + numel]


class Even(random.Random):
    """Chooses what is aligned."""

    def choice(self, options: Any) -> Any:
        return options[0]


def launch_all(unit: UnitDtypes, choice: random.Random) -> None:
    """One launch of each kind that a step of this unit could make, of some size at some place."""
    if choice.random() < 0.5:
        choice = Even()
    numel, offset, stride = choice.choice((64, 4, 8, 13)), choice.choice((0, 1, 8)), choice.choice((64, 65))
    narrow = {unit.published} if unit.published.itemsize < unit.grads.itemsize else set()  # pushed as computed
    for addend in {*narrow, *({unit.grads} if unit.grads.itemsize <= unit.sums.itemsize else ()), unit.sums}:
        accumulate.accumulate(room(choice, numel, unit.sums), room(choice, numel, addend))
        arrived, rows = room(choice, 4096, torch.uint8), torch.zeros(1, 4, dtype=I64)
        arrived = arrived[-arrived.data_ptr() % 8 :][:2048]
        row = slots.SlotRow(room(choice, numel, unit.sums).data_ptr(), offset * addend.itemsize, numel, 3)
        dtypes = {"total_dtype": unit.sums, "addend_dtype": addend}
        aligned = slots.write_rows(rows, [row], arrived, 1024, **dtypes)
        slots.accumulate_slots(rows.data_ptr(), 1, arrived, 1024, aligned=aligned, **dtypes)
    memory = parts.PartRows(torch.zeros(parts.MAX_PARTS, parts.COLUMNS, dtype=I64))
    everywhere = PeerTable.of([room(Even(), 4096, torch.uint8) for _ in range(2)])
    if unit.sums == FP32:
        for dtype in {*narrow, unit.grads, FP32}:
            pushed, which = [room(choice, 2 * n - 1, dtype) for n in (numel, stride)], ([0, 1024], [numel, stride])
            parts.scatter_accumulate_parts(memory, everywhere, pushed, *which, rank=0, offset_bytes=4 * offset)
    for dtype in (FP32, BF16):
        low = offset * dtype.itemsize
        gathered = [room(choice, 2 * numel, dtype), room(choice, 2 * stride, dtype)]
        parts.gather_parts(memory, gathered, everywhere, rank=1, offset_bytes=low)
        parts.scatter_parts(memory, everywhere, gathered, [0, 1024], [numel, stride], rank=1, offset_bytes=low)
    dtypes = (unit.published, unit.grads, unit.sums)
    for dtype in dtypes:
        fill.fill(room(choice, numel, dtype))
    for origin, out in itertools.product(dtypes, repeat=2):
        if origin != FP64 or out.itemsize > 2:
            fill.copy_cast(room(choice, numel, out), room(choice, numel, origin))


@pytest.mark.parametrize("unit", UNITS, ids=lambda u: "-".join(str(DTYPES[d]) for d in vars(u).values()))
def test_every_variant_that_launchers_launch_is_needed(monkeypatch: pytest.MonkeyPatch, unit: UnitDtypes) -> None:
    """Also the other way round: what is prepared is launched at some size and place."""
    needed = variants(needed_entries([unit]))
    launches = record_launches(monkeypatch)
    choice = random.Random(0)
    for _ in range(80):
        launch_all(unit, choice)
    assert {launched_variant(kernel, arguments) for kernel, arguments, _ in launches} == needed


def test_units_share_what_they_can() -> None:
    once, twice = needed_entries([TRAINING]), needed_entries([TRAINING, TRAINING])
    assert [e.name for e in once] == [e.name for e in twice]
    both = needed_entries([TRAINING, UnitDtypes(FP16, BF16, FP32)])
    assert len({e.name for e in both}) == len(both) > len(once)


def test_other_dtypes_are_no_kernels_business() -> None:
    names = [e.name for e in needed_entries([UnitDtypes(I64, torch.int32, I64)])]
    words = ("[i32, aligned]", "[i32, unaligned]", "[i16, unaligned]")
    assert names == [kernel + word for kernel in ("gather_parts", "scatter_parts") for word in words]


def compiled_in_steps(
    unit: UnitDtypes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int], prepare: bool
) -> tuple[NoGpu, int]:
    """The driver after preparing and many launches, or after a single one, and how many variants were prepared."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    anywhere: Callable[..., Any] = lambda kernel, tensor, advice: contextlib.nullcontext()  # noqa: E731
    for module in (accumulate, fill, parts, slots):
        monkeypatch.setattr(module, "device_of", anywhere)
    monkeypatch.setattr(parts, "has_vector_atomics", lambda device: capability >= (9, 0))
    with no_gpu(monkeypatch, tmp_path, capability[0] * 10 + capability[1]) as driver:
        count = prepare_kernels(torch.device("cuda", 0), [unit]) if prepare else 0
        assert len(driver.compiled) == len(driver.loaded) == count
        assert not driver.launched
        choice = random.Random(1)
        if not prepare:
            fill.fill(room(choice, 64, unit.sums))
        for _ in range(20 * prepare):
            launch_all(unit, choice)
    return driver, count


@pytest.mark.parametrize(
    ("unit", "capability"),
    [
        (UnitDtypes(FP32, FP32, FP32), (9, 0)),
        pytest.param(TRAINING, (9, 0), marks=pytest.mark.extended),
        pytest.param(TRAINING, (8, 0), marks=pytest.mark.extended),
        pytest.param(UnitDtypes(FP32, FP32, FP32), (10, 0), marks=pytest.mark.extended),
        pytest.param(UnitDtypes(BF16, FP16, FP64), (9, 0), marks=pytest.mark.extended),
    ],
)
def test_nothing_is_compiled_or_loaded_in_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, unit: UnitDtypes, capability: tuple[int, int]
) -> None:
    driver, count = compiled_in_steps(unit, monkeypatch, tmp_path, capability, prepare=True)
    assert count == len([e for e in needed_entries([unit]) if e.since <= capability]) > 15
    assert len(driver.compiled) == len(driver.loaded) == count
    assert len(driver.launched) > 300


def test_without_preparing_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The counters count."""
    driver, _ = compiled_in_steps(TRAINING, monkeypatch, tmp_path, (9, 0), prepare=False)
    assert len(driver.compiled) == len(driver.loaded) == 1
