"""Layer 1: no processes. Device kernels from the host's side: refused arguments, what exactly is launched, and what a
launch needs beforehand.

No GPU; kernels are replaced by recorders, so this shows what would be launched and never launches. It cannot show that
NVSHMEM accepts a module: that needs a GPU.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl

from odc.kernels import accumulate, aot_list, fill, launching, parts, slots
from odc.kernels.launching import DTYPES, REMOTE_PROGRAMS
from odc.kernels.nvshmem import modules, signals, transfer
from odc.kernels.peers import PeerTable

BF16, FP16, FP32, FP64, U8, I16, I32, I64 = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8, torch.int16, torch.int32, torch.int64
)  # fmt: skip
ENTRIES = aot_list.entries()


@pytest.fixture
def nvshmem(library: Path) -> Iterator[modules.KernelModules]:
    kernels = modules.KernelModules(library, lambda module: None)
    yield kernels
    kernels.close()


def room(numel: int, dtype: torch.dtype, shift: int = 0) -> torch.Tensor:
    """Zeros that start ``shift`` elements after a 64-byte boundary."""
    storage = torch.zeros(numel + shift + 64, dtype=dtype)
    start = -storage.data_ptr() % 64 // dtype.itemsize + shift
    return storage[start : start + numel]


class TestPeerTable:
    @pytest.mark.parametrize("addresses", [[], [0], [64, -1], [64, 2**63]])
    def test_bad_addresses(self, addresses: list[int]) -> None:
        with pytest.raises(ValueError, match="expected"):
            PeerTable.build(addresses, "cpu")

    def test_strided_buffers(self) -> None:
        with pytest.raises(ValueError, match=r"buffer of rank 1 has strides \(2,\)"):
            PeerTable.of([torch.zeros(3), torch.zeros(6)[::2]])

    def test_views_share_the_memory(self) -> None:
        buffer = torch.zeros(4)
        PeerTable.of([buffer]).host_view(0, 4, 2, FP32).fill_(1)
        assert buffer.tolist() == [0, 1, 1, 0]

    def test_device_addresses_are_not_viewed(self) -> None:
        table = PeerTable((64,), torch.zeros(1, dtype=I64, device="meta"))
        with pytest.raises(ValueError, match="the table is on meta"):
            table.host_view(0, 0, 1, FP32)


def table(*sizes: int) -> PeerTable:
    return PeerTable.of([room(size, FP32) for size in sizes])


ODD = PeerTable.build([64, 66], "cpu")
REFUSED: dict[str, tuple[str, Callable[[], None]]] = {
    "accumulate: half": ("accumulator is torch.bf", lambda: accumulate.accumulate(room(3, BF16), room(3, BF16))),
    "accumulate: wider": ("nothing wider", lambda: accumulate.accumulate(room(3, FP32), room(3, FP64))),
    "accumulate: length": ("4 elements, expected 3", lambda: accumulate.accumulate(room(3, FP32), room(4, FP32))),
    "accumulate: strides": ("strides", lambda: accumulate.accumulate(room(3, FP32), room(6, FP32)[::2])),
    "accumulate: overlap": ("overlap", lambda: _overlapping(accumulate.accumulate)),
    "slots: dtypes": ("torch.float64 is added to torch.float32", lambda: _slots(addend_dtype=FP64)),
    "slots: half": ("torch.bfloat16 is added to torch.bfloat16", lambda: _slots(total_dtype=BF16)),
    "slots: words": ("slots is torch.float32", lambda: _slots(slots=room(64, FP32))),
    "slots: remainder": ("expected at most 63 whole slots", lambda: _slots(slot_bytes=48)),
    "slots: too many": ("expected at most 63 whole slots: of more", lambda: _slots(slot_bytes=1)),
    "slots: odd": ("65 bytes apart|expected multiples of 2", lambda: _slots(slots=room(65, U8), slot_bytes=13)),
    "slots: nothing": ("slots_numel=0", lambda: _slots(slots=room(0, U8))),
    "slots: aligned": ("aligned, but slots are at", lambda: _slots(slots=room(64, U8, 4))),
    "slots: table": ("1 rows at 0x44, expected 0 or more at a multiple of 8", lambda: _slots(table=68)),
    "slots: rows": ("-1 rows", lambda: _slots(num_rows=-1)),
    "slots: programs": ("num_programs=0", lambda: _slots(num_programs=0)),
    "rows: beyond the slot": ("row 0 is .*, expected a part of 32 bytes of 2 slots", lambda: _rows(numel=17)),
    "rows: before the slot": ("row 0 is", lambda: _rows(offset_bytes=-2)),
    "rows: no such slot": ("expected a part of 32 bytes of 2 slots", lambda: _rows(slots=0b100)),
    "rows: null": ("expected an address", lambda: _rows(address=0)),
    "rows: misaligned sum": ("a multiple of 4 ", lambda: _rows(address=66)),
    "rows: misaligned addend": ("one of 2 ", lambda: _rows(offset_bytes=1)),
    "rows: no room": ("1 rows for 0 on cpu", lambda: _rows(torch.zeros(0, 4, dtype=I64))),
    "rows: shape": ("expected dense torch.int64 rows of 4", lambda: _rows(torch.zeros(1, 3, dtype=I64))),
    "parts: none": ("outs has 0 tensors, expected 1 to 256", lambda: _gather(outs=[])),
    "parts: too many": ("outs has 257 tensors", lambda: _gather(outs=[room(2, FP32)] * 257)),
    "parts: dtypes": ("tensors of torch.bfloat16, torch.float32", lambda: _gather(outs=[room(2, FP32), room(2, BF16)])),
    "parts: integers": ("tensors of torch.int32, expected one of", lambda: _gather(outs=[room(2, I32)])),
    "parts: strides": (r"outs\[1\] has strides \(2,\)", lambda: _gather(outs=[room(2, FP32), room(4, FP32)[::2]])),
    "parts: remainder": ("outs.2. has 5 elements, expected a multiple", lambda: _gather(outs=[*OUTS, room(5, FP32)])),
    "parts: device": ("table is on cpu, expected one device", lambda: _gather(outs=[torch.zeros(4, device="meta")])),
    "parts: devices": ("expected one device", lambda: _gather(outs=[*OUTS, torch.zeros(4, device="meta")])),
    "parts: rank": ("rank=2, expected 0 <= rank < 2", lambda: _gather(rank=2)),
    "parts: programs": ("num_programs=0", lambda: _gather(num_programs=0)),
    "parts: offset": ("byte -4 of buffers", lambda: _gather(offset_bytes=-4)),
    "parts: misaligned offset": ("expected all to be multiples of 4", lambda: _gather(offset_bytes=2)),
    "parts: misaligned buffer": ("buffers at 0x40, 0x42, expected all to be", lambda: _gather(table=ODD)),
    "push of parts: fp64": ("grads has tensors of torch.float64", lambda: _push(grads=[room(4, FP64)])),
    "push of parts: counts": ("1 grads, 2 offsets, 1 numels", lambda: _push(offsets=[0, 4])),
    "push of parts: too long": (
        "grads.0. has 5 elements, expected at most 4: one row of 2 per owner",
        lambda: _push(grads=[room(5, BF16)]),
    ),
    "push of parts: negative": ("expected at most -2", lambda: _push(numels=[-1])),
    "push of parts: offset": ("offset 0 is -4 bytes", lambda: _push(offsets=[-4])),
    "push of parts: misaligned": ("offset 0 is 2 bytes, expected a multiple of 4", lambda: _push(offsets=[2])),
    "push of parts: all misaligned": ("byte 6 of buffers", lambda: _push(offset_bytes=6)),
    "push of parts: rank": ("rank=-1", lambda: _push(rank=-1)),
    "push of parts: programs": ("num_programs=-1", lambda: _push(num_programs=-1)),
    "scatter of parts: integers": ("grads has tensors of torch.int64", lambda: _scatter(grads=[room(4, I64)])),
    "scatter of parts: offset": ("offset 0 is 1 bytes, expected a multiple of 2", lambda: _scatter(offsets=[1])),
    "scatter of parts: programs": ("num_programs=0", lambda: _scatter(num_programs=0)),
    "rows of parts: shape": (r"memory is torch.int64 \(1, 4\), expected dense", lambda: _part_rows(1, 4)),
    "rows of parts: dtype": ("memory is torch.float32", lambda: _part_rows(256, 4, dtype=FP32)),
    "rows of parts: device": ("memory is on meta", lambda: _part_rows(256, 4, device="meta")),
    "fill: value": ("not an fp32 number", lambda: fill.fill(room(3, FP32), 0.1)),
    "fill: integers": ("out is torch.int64", lambda: fill.fill(room(3, I64))),
    "copy: length": ("4 elements, expected 3", lambda: fill.copy_cast(room(3, FP32), room(4, FP32))),
    "copy: overlap": ("overlap", lambda: _overlapping(fill.copy_cast)),
    "copy: cast": ("rounded twice", lambda: fill.copy_cast(room(3, FP16), room(3, FP64))),
}


OUTS = [room(4, FP32), room(6, FP32)]


def _part_rows(*shape: int, dtype: torch.dtype = I64, device: str = "cpu") -> parts.PartRows:
    return parts.PartRows(torch.zeros(*shape, dtype=dtype, device=device))


def _gather(**change: Any) -> None:
    good = {"rows": _part_rows(256, 4), "outs": OUTS, "table": table(5, 5), "rank": 0}
    parts.gather_parts(**(good | change))


GOOD_PUSH: dict[str, Any] = {"grads": [room(4, BF16)], "offsets": [0], "numels": [2], "rank": 1}


def _push(**change: Any) -> None:
    good = {"rows": _part_rows(256, 4), "table": table(8, 8)} | GOOD_PUSH
    parts.scatter_accumulate_parts(**(good | change))


def _scatter(**change: Any) -> None:
    good = {"rows": _part_rows(256, 4), "table": table(8, 8)} | GOOD_PUSH
    parts.scatter_parts(**(good | change))


def _slots(**change: Any) -> None:
    good = {"table": 64, "num_rows": 1, "slots": room(64, U8), "slot_bytes": 32, "aligned": True}
    slots.accumulate_slots(**({"total_dtype": FP32, "addend_dtype": BF16} | good | change))


def _rows(where: torch.Tensor | None = None, **change: Any) -> bool:
    where = torch.zeros(1, 4, dtype=I64) if where is None else where
    row = slots.SlotRow(**({"address": 64, "offset_bytes": 0, "numel": 4, "slots": 0b11} | change))
    try:
        return slots.write_rows(where, [row], room(64, U8), 32, total_dtype=FP32, addend_dtype=BF16)
    except ValueError:
        assert not where.any()
        raise


def _overlapping(launcher: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    storage = room(8, FP32)
    launcher(storage[:5], storage[3:])


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_launched(case: str, launches: list[Any]) -> None:
    message, call = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        call()
    assert not launches


def test_host_memory_is_refused_with_the_name_of_the_twin() -> None:
    with pytest.raises(ValueError, match="on cpu, expected a CUDA device: use accumulate_reference"):
        accumulate.accumulate(room(3, FP32), room(3, FP32))
    for call, twin in ((_gather, "gather_parts"), (_push, "scatter_accumulate_parts"), (_scatter, "scatter_parts")):
        with pytest.raises(ValueError, match=f"use {twin}_reference"):
            call()


def test_nothing_to_do_launches_nothing(launches: list[Any]) -> None:
    accumulate.accumulate(room(0, FP32), room(0, BF16))
    fill.fill(room(0, FP32))
    fill.copy_cast(room(0, FP32), room(0, BF16))
    _slots(num_rows=0)
    _gather(outs=[room(0, FP32), room(0, FP32)])
    _gather(table=table(5), own_in_place=True)
    for push in (_push, _scatter):
        push(grads=[room(0, BF16)], numels=[0])
    assert not launches


class TestAlignment:
    """Wide accesses, 16 bytes of the widest dtype, exactly if every address that a program starts from allows them."""

    @pytest.mark.parametrize(
        ("shift", "other", "aligned"), [(0, 0, True), (4, 8, True), (0, 4, True), (1, 0, False), (0, 2, False)]
    )
    def test_local(self, launches: list[Any], shift: int, other: int, aligned: bool) -> None:
        accumulate.accumulate(room(5, FP32, shift), room(5, BF16, other))
        fill.copy_cast(room(5, FP32, shift), room(5, BF16, other))
        assert [launch[1]["VECTOR"] for launch in launches] == ([4, 4] if aligned else [1, 1])

    def test_one_by_one_where_atomics_are(self, launches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """Scalar atomics of vectors would lie 16 bytes apart in a warp."""
        for capability, elements in (((8, 0), 1), ((8, 9), 1), ((9, 0), 4), ((10, 0), 4)):
            launching.has_vector_atomics.cache_clear()
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
            assert launching.has_vector_atomics(torch.device("cuda", 0)) is (elements > 1)
            with monkeypatch.context() as patch:
                patch.setattr(parts, "has_vector_atomics", lambda device, most=elements: most > 1)
                _push(grads=[room(16, BF16)], numels=[8])
            assert launches[-1][1]["VECTOR"] == elements
        launching.has_vector_atomics.cache_clear()

    def test_slots(self, launches: list[Any]) -> None:
        for aligned in (True, False):
            _slots(aligned=aligned)
            assert launches[-1][1]["VECTOR"] == (4 if aligned else 1)
        assert _rows()
        assert not _rows(address=68)
        assert not _rows(offset_bytes=4)
        assert _rows(offset_bytes=8, numel=3)

    @pytest.mark.parametrize(
        ("dtype", "numels", "shift", "offset_bytes", "found"),
        [
            (BF16, [8, 16], 0, 0, (tl.int32, 4)),
            (BF16, [8, 16], 8, 32, (tl.int32, 4)),
            (BF16, [8, 4], 0, 0, (tl.int32, 1)),
            (BF16, [8, 16], 2, 0, (tl.int32, 1)),
            (BF16, [8, 16], 0, 4, (tl.int32, 1)),
            (BF16, [8, 7], 0, 0, (tl.int16, 1)),
            (BF16, [7], 0, 0, (tl.int16, 1)),
            (BF16, [8, 16], 1, 0, (tl.int16, 1)),
            (BF16, [8, 16], 0, 2, (tl.int16, 1)),
            (FP32, [4], 0, 0, (tl.int32, 4)),
            (FP32, [5], 0, 0, (tl.int32, 1)),
            (FP64, [2], 0, 0, (tl.int32, 4)),
            (FP64, [2], 0, 8, (tl.int32, 1)),
        ],
        ids=str,
    )
    def test_parts(
        self,
        launches: list[Any],
        dtype: torch.dtype,
        numels: list[int],
        shift: int,
        offset_bytes: int,
        found: tuple[Any, int],
    ) -> None:
        """One launch, in which all parameters are as aligned as the least aligned one. Also slices that are all aligned
        begin where those before them end."""
        memory = [room(2 * numel, dtype, shift) for numel in numels]
        _gather(outs=memory, offset_bytes=offset_bytes)
        offsets = [dtype.itemsize * sum(numels[:i]) for i in range(len(numels))]
        _scatter(grads=memory, numels=numels, offsets=offsets, offset_bytes=offset_bytes)
        for _, launched, grid in launches:
            assert (launched["WORD"], launched["VECTOR"]) == found
            assert (launched["num_rows"], launched["offset"], grid) == (len(numels), offset_bytes, (2 * len(numels),))
        assert len(launches) == 2

    def test_one_misaligned_owner(self, launches: list[Any]) -> None:
        peers = PeerTable.of([room(8, FP32), room(8, FP32, 1)])
        memory = [room(16, FP32)]
        _gather(outs=memory, table=peers)
        for push in (_push, _scatter):
            push(grads=memory, numels=[8], table=peers)
        assert [launched["VECTOR"] for _, launched, _ in launches] == [1, 1, 1]

    def test_a_gradient_that_ends_within_a_word(self, launches: list[Any]) -> None:
        for numel, word in ((16, tl.int32), (14, tl.int32), (13, tl.int16)):
            _scatter(grads=[room(numel, BF16)], numels=[8])
            assert launches[-1][1]["WORD"] == word

    @pytest.mark.parametrize(
        ("numel", "shift", "offset", "offset_bytes", "elements"),
        [
            (8, 0, 0, 0, 4),
            (4, 4, 16, 0, 4),
            (4, 0, 0, 16, 4),
            (4, 2, 0, 0, 1),
            (6, 0, 0, 0, 1),
            (8, 0, 8, 0, 1),
            (8, 0, 0, 4, 1),
        ],
    )
    def test_push_of_parts(
        self, launches: list[Any], numel: int, shift: int, offset: int, offset_bytes: int, elements: int
    ) -> None:
        grads = [room(16, BF16), room(2 * numel, BF16, shift)]
        _push(grads=grads, numels=[8, numel], offsets=[0, offset], offset_bytes=offset_bytes)
        assert launches[0][1]["VECTOR"] == elements


class TestLaunchesOfParts:
    @pytest.mark.parametrize("world_size", [1, 2, 16])
    @pytest.mark.parametrize("count", [1, 2, 30, 256])
    def test_one_for_all_owners_and_parameters(self, launches: list[Any], world_size: int, count: int) -> None:
        rows, peers = _part_rows(256, 4), PeerTable.build([64] * world_size, "cpu")
        numels = [1 + i % 7 for i in range(count)]
        memory = [room(world_size * numel, FP32) for numel in numels]
        starts = [4 * sum(numels[:i]) for i in range(count)]
        parts.gather_parts(rows, memory, peers, rank=0)
        for push in (parts.scatter_accumulate_parts, parts.scatter_parts):
            push(rows, peers, memory, starts, numels, rank=0)
        assert len(launches) == 3
        assert {grid for _, _, grid in launches} == {(min(world_size * count, REMOTE_PROGRAMS),)}
        assert {launched["num_steps"] for _, launched, _ in launches} == {world_size}
        parts.gather_parts(rows, memory, peers, rank=0, own_in_place=True)
        others = [(launched["num_steps"], grid) for _, launched, grid in launches[3:]]
        assert others == [(n, (min(n * count, REMOTE_PROGRAMS),)) for n in [world_size - 1] if n]

    def test_the_table(self, launches: list[Any]) -> None:
        memory = torch.full((256, 4), -1)
        rows, grads = parts.PartRows(memory), [room(5, BF16), room(8, BF16)]
        _push(rows=rows, grads=grads, numels=[3, 4], offsets=[12, 64], offset_bytes=8)
        assert launches[0][1]["rows"] == memory.data_ptr()
        assert memory[:2].tolist() == [[grads[0].data_ptr(), 12, 6, 10], [grads[1].data_ptr(), 64, 8, 16]]
        assert (memory[2:] == -1).all()
        _gather(rows=rows, outs=OUTS)
        assert memory[:2].tolist() == [[OUTS[0].data_ptr(), 0, 8, 16], [OUTS[1].data_ptr(), 8, 12, 24]]


def _binary(kernel: Any, types: Any, constants: Any, num_warps: int) -> tuple[Any, ...]:
    pointers = tuple(sorted((n, t) for n, t in types.items() if t.startswith("*")))
    return kernel.__name__, pointers, tuple(sorted((n, str(c)) for n, c in constants.items())), num_warps


def _launched(kernel: Any, arguments: dict[str, Any]) -> tuple[Any, ...]:
    names = DTYPES | {U8: "u8", I16: "i16", I32: "i32", I64: "i64"}
    types = {n: f"*{names[a.dtype]}" for n, a in arguments.items() if isinstance(a, torch.Tensor)}
    constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    return _binary(kernel, types, constants, arguments["num_warps"])


class TestCompiledAheadOfTime:
    """What launchers launch is what `aot_list` compiles: same types, same constants, nothing specialized."""

    def test_every_launch_is_in_the_list(self, launches: list[Any], nvshmem: modules.KernelModules) -> None:
        for shift in (0, 1):
            for addend in (BF16, FP16, FP32):
                accumulate.accumulate(room(8, FP32, shift), room(8, addend))
                _push(grads=[room(16, addend, shift)], numels=[8])
            for addend in fill.FLOATS:
                accumulate.accumulate(room(8, FP64, shift), room(8, addend))
            for total, addend in accumulate.PAIRS:
                _slots(aligned=not shift, total_dtype=total, addend_dtype=addend)
            for dtype in (FP32, BF16):
                _gather(outs=[room(8, dtype, shift)])
                _scatter(grads=[room(16, dtype, shift)], numels=[8])
            for dtype in fill.FLOATS:
                fill.fill(room(8, dtype, shift))
            for source, out in fill.CASTS:
                fill.copy_cast(room(8, out, shift), room(8, source))
        ranks, ticket = torch.zeros(2, dtype=I32), room(1, I32)
        transfer.gather_from_pes(nvshmem, room(16, BF16), room(8, BF16), ranks, rank=0)
        transfer.put_with_signal(nvshmem, room(8, BF16), room(8, BF16), room(1, I64), 1, ticket, pe=1)
        signals.quiet_on_stream(nvshmem, torch.device("cuda"))
        launched = {_launched(kernel, arguments) for kernel, arguments, _ in launches}
        assert launched == {_binary(e.kernel, e.signature, e.constants, e.num_warps) for e in ENTRIES}

    def test_nothing_is_specialized(self) -> None:
        for entry in ENTRIES:
            for param in entry.kernel.params:
                assert param.is_constexpr or param.do_not_specialize, f"{entry.name}: {param.name}"

    def test_names_are_unique(self) -> None:
        names = [entry.name for entry in ENTRIES]
        assert len(set(names)) == len(names)


class TestNvshmemArguments:
    @pytest.fixture(autouse=True)
    def _recorded(self, launches: list[Any]) -> Iterator[None]:
        yield
        assert not launches

    @pytest.mark.parametrize(
        ("message", "change"),
        [
            ("pes is torch.int64", {"pes": torch.zeros(2, dtype=I64)}),
            ("out has 15 elements, expected 16", {"out": torch.zeros(15)}),
            ("out is torch.bfloat16", {"out": torch.zeros(16, dtype=BF16)}),
            ("rank=2", {"rank": 2}),
            ("chunk_bytes=24, expected a multiple of 16", {"chunk_bytes": 24}),
            ("chunk_bytes=0", {"chunk_bytes": 0}),
            ("chunks_in_flight=0", {"chunks_in_flight": 0}),
            ("source_numel=0", {"source": torch.zeros(0)}),
        ],
    )
    def test_gather(self, nvshmem: modules.KernelModules, message: str, change: dict[str, Any]) -> None:
        good = {"out": torch.zeros(16), "source": torch.zeros(8), "pes": torch.zeros(2, dtype=I32), "rank": 0}
        with pytest.raises(ValueError, match=message):
            transfer.gather_from_pes(nvshmem, **(good | change))

    @pytest.mark.parametrize(
        ("message", "change"),
        [
            ("slot has 7 elements", {"slot": torch.zeros(7)}),
            ("slot is torch.float16", {"slot": torch.zeros(8, dtype=FP16)}),
            ("signal is torch.int32", {"signal": torch.zeros(1, dtype=I32)}),
            ("ticket has 2 elements", {"ticket": torch.zeros(2, dtype=I32)}),
            ("value=0", {"value": 0}),
            ("pe=-1", {"pe": -1}),
        ],
    )
    def test_put(self, nvshmem: modules.KernelModules, message: str, change: dict[str, Any]) -> None:
        words = {"signal": torch.zeros(1, dtype=I64), "ticket": torch.zeros(1, dtype=I32)}
        good = {"source": torch.zeros(8), "slot": torch.zeros(8), "value": 1, "pe": 1, **words}
        with pytest.raises(ValueError, match=message):
            transfer.put_with_signal(nvshmem, **(good | change))


MODULES = (
    *("peers", "arguments", "launching", "accumulate", "slots", "parts", "fill"),
    *("aot_entry", "aot_compile", "aot", "sass", "prepare"),
)


@pytest.mark.parametrize("name", [*MODULES, "nvshmem.bitcode", "nvshmem.transfer"])
def test_examples_in_docstrings(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"odc.kernels.{name}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_the_package_imports_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import odc.kernels, odc.kernels.peers, odc.kernels.arguments, odc.kernels.nvshmem\n"
        "import odc.kernels.aot_entry\n"
        "assert not [m for m in sys.modules if m.startswith('triton.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
