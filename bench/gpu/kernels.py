"""Check ``kernels``: every Triton kernel against its plain-torch twin, on the GPU, also at offsets beyond 2**31."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from odc.bench.gpu.device import new_stream
from odc.bench.gpu.setting import Report, Setting, require
from odc.kernels.accumulate import PAIRS, accumulate, accumulate_reference
from odc.kernels.arguments import FLOATS, MASTER_FLOATS
from odc.kernels.fill import copy_cast, copy_cast_reference, fill, fill_reference
from odc.kernels.parts import (
    COLUMNS,
    GRADIENTS,
    MAX_PARTS,
    PartRows,
    gather_parts,
    gather_parts_reference,
    scatter_accumulate_parts,
    scatter_accumulate_parts_reference,
    scatter_parts,
    scatter_parts_reference,
)
from odc.kernels.peers import PeerTable
from odc.kernels.slots import SlotRow, accumulate_slots, accumulate_slots_reference, write_rows

SIZES = (1, 2, 7, 255, 4095, 4096, 4097, 12_289, 1_000_003)
QUICK_SIZES = (1, 7, 4097, 4104)  # 4104: rows of whole vectors, so kernels have their wide accesses
OFFSETS = (0, 1, 3)  # elements: 16-byte aligned, and not
_GUARD = 64  # elements on each side
_POISON = 7.0
_SPECIAL = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1.00390625, 1.01171875, 65504.0, 6e-8, -3.0)
_CLIENTS = 3
_SLOT_PROGRAMS = 4  # the interpreter runs one after the other


def check(setting: Setting) -> Report:
    """Check ``kernels``: every Triton kernel against its plain-torch twin, on the GPU, to the bit.

    The interpreter runs the same source on every test run; what it cannot show is what the compiler and the device make
    of it: wide and masked accesses at odd addresses, conversions, atomics of many programs, offsets beyond 2**31.
    Inputs hold infinities, NaN, signed zeros and halfway cases; outputs are poisoned, and lie between guards that must
    stay as they were.
    """
    device = setting.device(0)
    sizes = QUICK_SIZES if setting.quick else SIZES
    counts = {part.__name__.strip("_"): sum(1 for _ in part(device, sizes)) for part in PARTS}
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    large = "offsets beyond 2**31 not run"
    if free >= NEEDED_BYTES:
        large = f"{check_large(device)} with offsets beyond 2**31"
    cases = sum(counts.values())
    return Report(f"{cases} cases equal to their twins; {large}", {"cases": counts, "large": large})


class Guarded:
    """A view of ``numel`` elements at an odd place, between guards. Its twin lies on the host."""

    def __init__(self, numel: int, dtype: torch.dtype, offset: int, device: torch.device) -> None:
        self._whole = torch.full((numel + 2 * _GUARD + offset,), _POISON, dtype=dtype, device=device)
        self._inner = slice(_GUARD + offset, _GUARD + offset + numel)
        self.view = self._whole[self._inner]

    def filled(self, values: torch.Tensor) -> Guarded:
        self.view.copy_(values)
        return self

    def expect(self, wanted: torch.Tensor, what: str) -> None:
        """Require that the view has the bits of ``wanted`` (any NaN equals NaN), and that the guards are unchanged."""
        found = self._whole.cpu()
        inside = found[self._inner]
        guards = torch.cat([found[: self._inner.start], found[self._inner.stop :]])
        require(bool((guards == _POISON).all()), f"{what} wrote outside of its output")
        same = (_bits(inside) == _bits(wanted)) | (inside.isnan() & wanted.isnan())
        if not bool(same.all()):
            at = int((~same).nonzero()[0])
            require(False, f"{what}: element {at} is {float(inside[at])!r}, expected {float(wanted[at])!r}")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def _values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers on the host, with special ones among them."""
    values = torch.randn(numel, dtype=torch.float64) * 3
    special = torch.tensor(_SPECIAL, dtype=torch.float64)
    values[::5] = special[torch.arange(len(values[::5])) % len(special)]
    return values.to(dtype)


def _cases(sizes: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Sizes, each with two offsets: one per operand."""
    generator = random.Random(0)
    for numel in sizes:
        for offset in OFFSETS:
            yield numel, offset, generator.choice((offset, *OFFSETS))


def _fill(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    for numel, offset, _ in _cases(sizes):
        for dtype in FLOATS:
            for value in (0.0, 0.5, float("inf")):
                out, wanted = Guarded(numel, dtype, offset, device), torch.empty(numel, dtype=dtype)
                fill(out.view, value)
                fill_reference(wanted, value)
                out.expect(wanted, f"fill of {numel} x {dtype} at {offset}")
                yield


def _copy_cast(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    return _element_by_element(device, sizes, _casts(), copy_cast, copy_cast_reference)


def _casts() -> list[tuple[torch.dtype, torch.dtype]]:
    """Source and destination: all but float64 to 16 bits, which the launchers refuse."""
    return [(s, out) for s in FLOATS for out in FLOATS if s != torch.float64 or out.itemsize > 2]


def _accumulate(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    pairs = [(addend, total) for total in MASTER_FLOATS for addend in FLOATS if addend.itemsize <= total.itemsize]
    return _element_by_element(device, sizes, pairs, accumulate, accumulate_reference)


def _element_by_element(
    device: torch.device,
    sizes: tuple[int, ...],
    pairs: Sequence[tuple[torch.dtype, torch.dtype]],
    kernel: Callable[[torch.Tensor, torch.Tensor], None],
    reference: Callable[[torch.Tensor, torch.Tensor], None],
) -> Iterator[None]:
    """From a source to an output, of pairs of dtypes."""
    name = reference.__name__.removesuffix("_reference")
    for numel, offset, other in _cases(sizes):
        for source_dtype, dtype in pairs:
            source, wanted = _values(numel, source_dtype), _values(numel, dtype)
            out = Guarded(numel, dtype, offset, device).filled(wanted)
            kernel(out.view, Guarded(numel, source_dtype, other, device).filled(source).view)
            reference(wanted, source)
            out.expect(wanted, f"{name} of {numel} x {source_dtype} to {dtype} at {other}, {offset}")
            yield


def _accumulate_slots(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    """Two sums per launch, by a table in pinned memory."""
    for numel, offset, other in _cases(sizes):
        for dtype, addend_dtype in PAIRS:
            slot_bytes = -(-(numel + other) * addend_dtype.itemsize // 16) * 16
            arrived = _values(_CLIENTS * slot_bytes // addend_dtype.itemsize, addend_dtype).view(torch.uint8)
            sums = [_values(numel, dtype), _values(numel, dtype)]
            found = [
                Guarded(numel, dtype, at, device).filled(total) for at, total in zip((offset, 0), sums, strict=True)
            ]
            slots, places = arrived.to(device), [guarded.view for guarded in found]
            rows, is_aligned = _slot_rows(places, slots, slot_bytes, other, addend_dtype)
            dtypes: dict[str, Any] = {"total_dtype": dtype, "addend_dtype": addend_dtype}
            accumulate_slots(
                rows.data_ptr(), 2, slots, slot_bytes, aligned=is_aligned, num_programs=_SLOT_PROGRAMS, **dtypes
            )
            _wait(device)  # before the rows are freed
            rows, _ = _slot_rows(sums, arrived, slot_bytes, other, addend_dtype)
            accumulate_slots_reference(rows.data_ptr(), 2, arrived, slot_bytes, **dtypes)
            for guarded, total in zip(found, sums, strict=True):
                guarded.expect(total, f"accumulate_slots of {numel} x {addend_dtype} to {dtype} at {other}, {offset}")
            yield


def _slot_rows(
    sums: list[torch.Tensor], slots: torch.Tensor, slot_bytes: int, offset: int, addend_dtype: torch.dtype
) -> tuple[torch.Tensor, bool]:
    """The table of two sums, of which the second is overwritten, and whether all is aligned."""
    table = torch.zeros(2, 4, dtype=torch.int64, pin_memory=slots.is_cuda)
    rows = [
        SlotRow(total.data_ptr(), offset * addend_dtype.itemsize, total.numel(), which, first)
        for total, which, first in zip(sums, (0b101, 0b111), (False, True), strict=True)
    ]
    dtypes = {"total_dtype": sums[0].dtype, "addend_dtype": addend_dtype}
    return table, write_rows(table, rows, slots, slot_bytes, **dtypes)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def part_rows(device: torch.device) -> PartRows:
    """A table of rows for launches, in memory that the device reads."""
    return PartRows(torch.zeros(MAX_PARTS, COLUMNS, dtype=torch.int64, pin_memory=device.type == "cuda"))


def _part_cases(sizes: tuple[int, ...]) -> Iterator[tuple[list[int], int, int]]:
    """Slices of one parameter and of many, with two offsets as in :func:`_cases`; the last case is aligned in all
    places."""
    for numel, offset, other in _cases(sizes):
        yield [numel], offset, other
        yield [5 + offset, numel, 0, *range(1, 12), 4097], offset, other
    yield [8, 40_000, 4096], 0, 8


def _gather_parts(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    rows = part_rows(device)
    for numels, offset, other in _part_cases(sizes):
        for dtype in FLOATS:
            for own_in_place in (False, True):
                values = [_values(other + sum(numels), dtype) for _ in range(_CLIENTS)]
                shards = [Guarded(len(v), dtype, 0, device).filled(v) for v in values]
                outs = [Guarded(_CLIENTS * n, dtype, offset, device) for n in numels]
                wanted = [torch.full((_CLIENTS * n,), _POISON).to(dtype) for n in numels]
                words: dict[str, Any] = {"rank": 1, "offset_bytes": other * dtype.itemsize}
                words["own_in_place"] = own_in_place
                gather_parts(rows, [out.view for out in outs], PeerTable.of([s.view for s in shards]), **words)
                gather_parts_reference(wanted, PeerTable.of(values), **words)
                for number, out in enumerate(outs):
                    out.expect(wanted[number], f"gather_parts of {numels[number]} x {dtype} at {other}, {offset}")
                yield


class _Push:
    """Gradients, some of which end early: there, NaN follows that must not be read."""

    def __init__(self, numels: list[int], dtype: torch.dtype, offset: int, device: torch.device) -> None:
        self.numels = numels
        totals = [_CLIENTS * n - (n + n // 3) * (i % 2) for i, n in enumerate(numels)]
        rooms = [torch.cat([_values(n, dtype), torch.full((_GUARD,), torch.nan, dtype=dtype)]) for n in totals]
        self.grads = [room[:n] for room, n in zip(rooms, totals, strict=True)]
        self.on_device = [
            Guarded(len(room), dtype, offset, device).filled(room).view[:n]
            for room, n in zip(rooms, totals, strict=True)
        ]

    def offsets(self, itemsize: int) -> list[int]:
        return [sum(self.numels[:i]) * itemsize for i in range(len(self.numels))]


def _scatter_accumulate_parts(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    pair = scatter_accumulate_parts, scatter_accumulate_parts_reference
    return _pushes_of_parts(device, sizes, GRADIENTS, *pair, lambda numel, dtype: torch.randn(numel))


def _scatter_parts(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    pair = scatter_parts, scatter_parts_reference
    return _pushes_of_parts(
        device, sizes, FLOATS, *pair, lambda numel, dtype: torch.full((numel,), _POISON, dtype=dtype)
    )


def _pushes_of_parts(
    device: torch.device,
    sizes: tuple[int, ...],
    dtypes: Sequence[torch.dtype],
    push_parts: Callable[..., None],
    push_parts_reference: Callable[..., None],
    before: Callable[[int, torch.dtype], torch.Tensor],
) -> Iterator[None]:
    """Of gradients of a dtype, to owners who have ``before`` of so many elements."""
    rows = part_rows(device)
    for numels, offset, other in _part_cases(sizes):
        for dtype in dtypes:
            push = _Push(numels, dtype, offset, device)
            wanted = [before(other + sum(push.numels), dtype) for _ in range(_CLIENTS)]
            found = [Guarded(len(out), out.dtype, 0, device).filled(out) for out in wanted]
            itemsize = wanted[0].itemsize
            words = {"rank": 1, "offset_bytes": other * itemsize}
            table = PeerTable.of([out.view for out in found])
            push_parts(rows, table, push.on_device, push.offsets(itemsize), push.numels, **words)
            push_parts_reference(PeerTable.of(wanted), push.grads, push.offsets(itemsize), push.numels, **words)
            for owner in range(_CLIENTS):
                found[owner].expect(
                    wanted[owner], f"{push_parts.__name__} of {numels} x {dtype} at {offset} to {owner}"
                )
            yield


def _concurrent_atomics(device: torch.device, sizes: tuple[int, ...]) -> Iterator[None]:
    """Launches on many streams add to the same sums at the same time; whole numbers, so any order is exact."""
    for numel in sizes:
        total = torch.zeros(numel, device=device)
        addends = [torch.arange(numel, device=device).remainder_(11).to(torch.float32) + i for i in range(8)]
        _on_many_streams(device, [_adding(part_rows(device), PeerTable.of([total]), addend) for addend in addends])
        wanted = torch.stack([addend.double() for addend in addends]).sum(0)
        require(torch.equal(total.double(), wanted), f"concurrent atomic additions of {numel} elements lose some")
        yield


def _adding(rows: PartRows, table: PeerTable, addend: torch.Tensor) -> Callable[[], None]:
    return lambda: scatter_accumulate_parts(rows, table, [addend], [0], [addend.numel()], rank=0)


def _on_many_streams(device: torch.device, works: list[Callable[[], None]]) -> None:
    if device.type != "cuda":
        for work in works:
            work()
        return
    torch.cuda.synchronize(device)
    for work in works:
        with torch.cuda.stream(new_stream(device)):
            work()
    torch.cuda.synchronize(device)


PARTS: tuple[Callable[[torch.device, tuple[int, ...]], Iterator[None]], ...] = (
    _fill,
    _copy_cast,
    _accumulate,
    _accumulate_slots,
    _gather_parts,
    _scatter_accumulate_parts,
    _scatter_parts,
    _concurrent_atomics,
)


# Buffers of more than 2**31 elements or bytes, where a 32-bit offset would wrap


NEEDED_BYTES = 16 << 30
NUMEL = (1 << 31) + 4099  # elements: offsets in elements wrap, and those in bytes long before
_CHUNK = 1 << 26
_PERIOD = 251  # of the pattern: whole numbers that bf16 holds


def check_large(device: torch.device) -> str:
    """Run every kernel once on buffers beyond 2**31. Returns their number in words."""
    parts: tuple[Callable[[torch.device], None], ...] = (
        _large_fill,
        _large_copy_cast,
        _large_accumulate,
        _large_gather_parts,
        _large_push_parts,
    )
    for part in parts:
        part(device)
        torch.cuda.empty_cache()  # the next one needs the memory
    return f"{len(parts)} kernels"


def _chunks(numel: int) -> Iterator[slice]:
    for low in range(0, numel, _CHUNK):
        yield slice(low, min(low + _CHUNK, numel))


def _pattern(part: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device).remainder_(_PERIOD)


def _patterned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Element i is i modulo 251."""
    out = torch.empty(numel, dtype=dtype, device=device)
    for part in _chunks(numel):
        out[part] = _pattern(part, device).to(dtype)
    return out


def _expect(found: torch.Tensor, factor: float, added: float, what: str, first: int = 0) -> None:
    """Element i is ``factor`` times the pattern's element ``first + i``, plus ``added``."""
    for part in _chunks(found.numel()):
        place = slice(first + part.start, first + part.stop)
        wanted = (_pattern(place, found.device) * factor + added).to(found.dtype)
        require(torch.equal(found[part], wanted), f"{what}: wrong in elements {part.start} to {part.stop}")


def _large_fill(device: torch.device) -> None:
    out = torch.zeros(NUMEL, dtype=torch.bfloat16, device=device)
    fill(out, 3.0)
    _expect(out, 0.0, 3.0, "fill")


def _large_copy_cast(device: torch.device) -> None:
    source = _patterned(NUMEL, torch.bfloat16, device)
    out = torch.empty_like(source)
    copy_cast(out, source)
    _expect(out, 1.0, 0.0, "copy_cast")


def _large_accumulate(device: torch.device) -> None:
    addend = _patterned(NUMEL, torch.bfloat16, device)
    total = torch.ones(NUMEL, dtype=torch.float32, device=device)
    accumulate(total, addend)
    _expect(total, 1.0, 1.0, "accumulate")


def _large_gather_parts(device: torch.device) -> None:
    """The output is beyond 2**31, and so is the place of its shards in their buffers, behind a small parameter."""
    numel, before = NUMEL // 2, 1 << 10
    buffer = _patterned((1 << 30) + numel, torch.bfloat16, device)
    outs = [torch.empty(2 * n, dtype=torch.bfloat16, device=device) for n in (before, numel)]
    rows, table = part_rows(device), PeerTable.of([buffer, buffer])
    gather_parts(rows, outs, table, rank=0, offset_bytes=2 * ((1 << 30) - before))
    for row in range(2):
        _expect(outs[1][row * numel : (row + 1) * numel], 1.0, 0.0, f"gather_parts, row {row}", first=1 << 30)


def _large_push_parts(device: torch.device) -> None:
    numel = NUMEL // 2
    grads = _patterned(2 * numel, torch.bfloat16, device)
    totals = [torch.ones(numel, device=device) for _ in range(2)]
    rows, table = part_rows(device), PeerTable.of(totals)
    scatter_accumulate_parts(rows, table, [grads[:-9]], [0], [numel], rank=0)
    _expect(totals[0], 1.0, 1.0, "scatter_accumulate_parts, owner 0")
    _expect(totals[1][:-9], 1.0, 1.0, "scatter_accumulate_parts, owner 1", first=numel)
    _expect(totals[1][-9:], 0.0, 1.0, "scatter_accumulate_parts, missing elements")
