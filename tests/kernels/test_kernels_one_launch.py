"""Layer 1: no processes. Kernels that reach all owners, or add all slots, in one launch: in Triton's interpreter,
against their twins.

No GPU. What this shows and what it cannot: see test_kernels_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import SparseMemory, numbers, only_program, shifted, some_of

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (BF16, FP16, FP32, FP64)
PLACES = ((9600, 0, 0, 0), (9600, 16, 8, 0), (9601, 5, 3, 0), (9600, 8, 1, 3))
"""Stride, start, offset in the sums, and how far off alignment."""
SIZES = (0, 1, 3, 1023, 4095, 4096, 4097, 9001)
GIB = 1 << 30
PAIRS = [(total, addend) for total in (FP32, FP64) for addend in FLOATS if addend.itemsize <= total.itemsize]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


class TestScatterAccumulateParts:
    """Rows that are ``stride`` apart, of which some elements are added."""

    def both(self, k: SimpleNamespace, grads: torch.Tensor, **how: Any) -> list[torch.Tensor]:
        sums = [shifted(numbers(12_000, FP32, seed=owner), 0) for owner in range(3)]
        twins = [total.clone() for total in sums]
        k.accumulate.scatter_accumulate_direct(k.peers.PeerTable.of(sums), grads, **how)
        k.accumulate.scatter_accumulate_direct_reference(k.peers.PeerTable.of(twins), grads, **how)
        for total, twin in zip(sums, twins, strict=True):
            assert torch.equal(total, twin)
        return sums

    @pytest.mark.parametrize(("dtype", "numel", "place"), some_of([BF16, FP16, FP32], SIZES, PLACES), ids=str)
    def test_parts(self, k: SimpleNamespace, dtype: torch.dtype, numel: int, place: tuple[int, int, int, int]) -> None:
        stride, start, offset, shift = place
        grads = shifted(numbers(3 * stride, dtype, 9), shift)
        sums = self.both(k, grads, rank=1, offset=offset, stride=stride, start=start, numel=numel)
        for owner, total in enumerate(sums):
            expected = numbers(12_000, FP32, seed=owner)
            low = owner * stride + start
            expected[offset : offset + numel] += grads[low : low + numel].float()
            assert torch.equal(total, expected)

    def test_what_follows_the_start(self, k: SimpleNamespace) -> None:
        grads = numbers(3 * 5000, BF16)
        whole = self.both(k, grads, rank=0, start=4996, offset=7)
        part = self.both(k, grads, rank=0, stride=5000, start=4996, numel=4, offset=7)
        assert all(torch.equal(a, b) for a, b in zip(whole, part, strict=True))

    def test_the_last_row_may_end_early(self, k: SimpleNamespace) -> None:
        self.both(k, numbers(2 * 100 + 7, BF16), rank=2, stride=100, start=4, numel=3)

    @pytest.mark.parametrize("num_programs", [1, 2, 64])
    def test_any_number_of_programs(self, k: SimpleNamespace, num_programs: int) -> None:
        sums = [torch.zeros(9001) for _ in range(3)]
        grads = numbers(3 * 9100, FP32)
        how = {"rank": 1, "stride": 9100, "start": 64, "numel": 9001}
        k.accumulate.scatter_accumulate_direct(k.peers.PeerTable.of(sums), grads, num_programs=num_programs, **how)
        assert torch.equal(torch.stack(sums), grads.view(3, 9100)[:, 64 : 64 + 9001])


class TestScatter:
    def both(self, k: SimpleNamespace, buffers: list[torch.Tensor], source: torch.Tensor, **how: Any) -> None:
        twins = [buffer.clone() for buffer in buffers]
        k.scatter.scatter_to_peers(k.peers.PeerTable.of(buffers), source, **how)
        k.scatter.scatter_to_peers_reference(k.peers.PeerTable.of(twins), source, **how)
        for buffer, twin in zip(buffers, twins, strict=True):
            assert torch.equal(buffer, twin)

    @pytest.mark.parametrize(
        ("dtype", "numel", "place"), some_of(FLOATS, SIZES, [(0, 0), (8, 0), (1, 0), (8, 3), (3, 1)]), ids=str
    )
    def test_bytes_arrive_as_they_are(
        self, k: SimpleNamespace, dtype: torch.dtype, numel: int, place: tuple[int, int]
    ) -> None:
        elements, shift = place
        source = shifted(numbers(3 * numel, dtype), shift)
        bits(source)[::7] = -1  # NaN with a payload, which no conversion would keep
        buffers = [shifted(torch.full(((numel + elements) * 8 + 16,), 7, dtype=torch.uint8), 0) for _ in range(3)]
        low, size = elements * dtype.itemsize, numel * dtype.itemsize
        self.both(k, buffers, source, rank=1, offset_bytes=low)
        for owner, buffer in enumerate(buffers):
            row = bits(source[owner * numel : (owner + 1) * numel]).view(torch.uint8)
            assert torch.equal(buffer[low : low + size], row)
            assert (buffer[:low] == 7).all()
            assert (buffer[low + size :] == 7).all()

    @pytest.mark.parametrize("num_programs", [1, 2, 3, 64])
    @pytest.mark.parametrize("rank", range(3))
    def test_any_rank_and_number_of_programs(self, k: SimpleNamespace, num_programs: int, rank: int) -> None:
        buffers, source = [torch.zeros(9001) for _ in range(3)], numbers(3 * 9001, FP32)
        table = k.peers.PeerTable.of(buffers)
        k.scatter.scatter_to_peers(table, source, rank=rank, num_programs=num_programs)
        assert torch.equal(torch.cat(buffers), source)

    def test_the_own_row_is_the_last(self, k: SimpleNamespace) -> None:
        """All owners share one buffer here: what the last one wrote stays."""
        for rank in range(4):
            buffer = torch.zeros(5)
            table = k.peers.PeerTable.build([buffer.data_ptr()] * 4, "cpu")
            k.scatter.scatter_to_peers(table, torch.arange(4.0).repeat_interleave(5), rank=rank, num_programs=1)
            assert (buffer == rank).all()

    def test_far(self, k: SimpleNamespace) -> None:
        """Offsets, rows and blocks beyond 2**31 bytes and elements."""
        with SparseMemory(40 * GIB) as far:
            offset, numel = 4 * ((1 << 31) + 4096 + 8), (1 << 31) + 4096 + 8
            values = numbers(8, FP32)
            table = k.peers.PeerTable.build([far.address + 12 * GIB], "cpu")
            k.scatter.scatter_to_peers(table, values, rank=0, offset_bytes=offset)
            assert torch.equal(far.view(12 * GIB + offset, 8, FP32), values)
            # The last program of the first step: rank 1's row begins ``numel`` elements into the source.
            far.view(2 * numel * 4 - 32, 8, FP32).copy_(values)
            table = k.peers.PeerTable.build([64, far.address + 28 * GIB], "cpu")
            blocks = k.launching.blocks(numel)
            with only_program(blocks - 1, 2 * blocks):
                arguments = (table.tensor, far.view(0, 1, FP32).view(torch.int32), 0, 2, numel, 0)
                k.scatter._scatter_kernel[(1,)](*arguments, VECTOR=1, BLOCK=4096)
            assert torch.equal(far.view(28 * GIB + numel * 4 - 32, 8, FP32), values)


class TestSlots:
    """`accumulate_slots` against its twin, and against one `accumulate` per slot."""

    def rooms(self, num_slots: int, slot_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        values = numbers(num_slots * slot_bytes // dtype.itemsize, dtype, 3)
        return shifted(bits(values).view(torch.uint8), 0)

    def run(
        self,
        k: SimpleNamespace,
        totals: Sequence[torch.Tensor],
        rows: list[tuple[int, int, bool]],
        slots: torch.Tensor,
        slot_bytes: int,
        addend: torch.dtype,
        aligned: bool | None = None,
        num_programs: int = 3,
    ) -> None:
        """Add ``rows`` (byte offset, slots, first) to ``totals``; kernel, twin and single additions agree."""
        twins, singles = [t.clone() for t in totals], [shifted(t, 0) for t in totals]
        dtypes = {"total_dtype": totals[0].dtype, "addend_dtype": addend}
        table = torch.zeros(len(rows) + 2, 4, dtype=torch.int64)

        def write(sums: Sequence[torch.Tensor]) -> bool:
            found = [
                k.slots.SlotRow(total.data_ptr(), offset, total.numel(), which, first)
                for total, (offset, which, first) in zip(sums, rows, strict=True)
            ]
            return bool(k.slots.write_rows(table, found, slots, slot_bytes, **dtypes))

        can = write(totals)
        assert aligned is None or can is aligned
        arguments = (table.data_ptr(), len(rows), slots, slot_bytes)
        k.slots.accumulate_slots(*arguments, aligned=can, num_programs=num_programs, **dtypes)
        write(twins)
        k.slots.accumulate_slots_reference(*arguments, **dtypes)
        for total, twin, single, (offset, which, first) in zip(totals, twins, singles, rows, strict=True):
            overwrite = first
            if first and not which:
                single.zero_()
            for slot in [s for s in range(64) if which >> s & 1]:
                low = slot * slot_bytes + offset
                part = slots[low : low + single.numel() * addend.itemsize].view(addend)
                k.accumulate.accumulate(single, part, first=overwrite)
                overwrite = False
            assert torch.equal(bits(total), bits(single))
            assert torch.equal(bits(total), bits(twin))

    @pytest.mark.parametrize(("total", "addend"), PAIRS, ids=str)
    @pytest.mark.parametrize("shift", [0, 1])
    def test_every_pair_of_dtypes(
        self, k: SimpleNamespace, total: torch.dtype, addend: torch.dtype, shift: int
    ) -> None:
        slots = self.rooms(5, 16384, addend)
        sums = [shifted(numbers(1023, total, 1), shift), shifted(numbers(517, total, 2), 0)]
        rows = [(16 * addend.itemsize, 0b10110, False), (0, 0b01101, True)]
        self.run(k, sums, rows, slots, 16384, addend, aligned=not shift)

    @pytest.mark.parametrize("num_programs", [1, 2, 7])
    def test_rows_of_all_sizes(self, k: SimpleNamespace, num_programs: int) -> None:
        slots = self.rooms(4, 4 * 9600, BF16)
        sums = [shifted(numbers(numel, FP32, 1), 4 * i) for i, numel in enumerate(SIZES)]
        rows = [(8 * i, (5 * i + 1) % 16, i % 3 == 0) for i in range(len(SIZES))]
        self.run(k, sums, rows, slots, 4 * 9600, BF16, True, num_programs)

    @pytest.mark.parametrize(("shift", "offset", "slot_bytes"), [(1, 0, 9216), (0, 2, 9216), (0, 0, 9218)])
    def test_alignment_is_that_of_all(self, k: SimpleNamespace, shift: int, offset: int, slot_bytes: int) -> None:
        slots = self.rooms(3, slot_bytes, BF16)
        sums = [shifted(numbers(4097, FP32, 1), shift), shifted(numbers(300, FP32, 2), 0)]
        self.run(k, sums, [(offset, 0b111, False), (0, 0b010, True)], slots, slot_bytes, BF16, False)

    def test_no_slots(self, k: SimpleNamespace) -> None:
        """The sum stays as it is, or is zero: plus zero."""
        sums = [torch.full((4099,), -0.0), torch.full((4099,), torch.nan)]
        self.run(k, sums, [(0, 0, False), (0, 0, True)], self.rooms(2, 32768, FP32), 32768, FP32)
        assert (bits(sums[0]) == -(1 << 31)).all()
        assert (bits(sums[1]) == 0).all()

    def test_first_does_not_read_and_keeps_minus_zero(self, k: SimpleNamespace) -> None:
        slots = torch.full((3, 4099), -0.0).view(-1)
        slots[4099] = 0.0
        total = torch.full((4099,), torch.nan)
        self.run(k, [total], [(0, 0b111, True)], slots.view(torch.uint8), 4 * 4099, FP32)
        assert total[0].item() == 0
        assert not bits(total)[0]
        assert (bits(total)[1:] == -(1 << 31)).all()

    @pytest.mark.parametrize("numel", [5, 4095, 4096, 4097])
    @pytest.mark.parametrize("shift", [0, 1])
    def test_neighbours_are_left_alone(self, k: SimpleNamespace, numel: int, shift: int) -> None:
        room = shifted(torch.full((numel + 8,), 5.0), 0)
        total = room[4 + shift : 4 + shift + numel]
        slots = torch.ones(2 * 5000).view(torch.uint8)
        self.run(k, [total], [(0, 0b11, False)], shifted(slots, 0), 20_000, FP32, not shift)
        assert (room[: 4 + shift] == 5).all()
        assert (room[4 + shift + numel :] == 5).all()
        assert (total == 7).all()

    def test_all_slots(self, k: SimpleNamespace) -> None:
        """63 slots, far apart: the last begins beyond 2**35 bytes. All but some are zeros."""
        with SparseMemory(40 * GIB) as far:
            slot_bytes = 640 << 20
            slots = far.view(0, 63 * slot_bytes, torch.uint8)
            for slot in (1, 30, 62):
                far.view(slot * slot_bytes + 512 * 4, 40, FP32).copy_(numbers(40, FP32, slot))
            self.run(k, [numbers(40, FP32)], [(512 * 4, (1 << 63) - 1, False)], slots, slot_bytes, FP32)
            total = torch.ones(40)
            self.run(k, [total], [(512 * 4, 1 << 62, True)], slots, slot_bytes, FP32)
            assert torch.equal(total, numbers(40, FP32, 62))

    @pytest.mark.parametrize("numel", [(1 << 29) + 4096 + 8, (1 << 31) + 4096 + 8])
    def test_far_block(self, k: SimpleNamespace, numel: int) -> None:
        """The last program of a sum this large: eight elements, behind all the others."""
        with SparseMemory(40 * GIB) as far:
            slots = far.view(24 * GIB, 2 * numel * 2, torch.uint8)
            slots[-16:].view(BF16).copy_(numbers(8, BF16))
            total = far.view(8 * GIB + (numel - 8) * 4, 8, FP32).fill_(1)
            table, dtypes = torch.zeros(1, 4, dtype=torch.int64), {"total_dtype": FP32, "addend_dtype": BF16}
            row = k.slots.SlotRow(far.address + 8 * GIB, 0, numel, 0b10)
            aligned = k.slots.write_rows(table, [row], slots, numel * 2, **dtypes)
            with only_program(k.launching.blocks(numel) - 1, k.launching.blocks(numel)):
                arguments = (table.data_ptr(), 1, slots, numel * 2)
                k.slots.accumulate_slots(*arguments, aligned=aligned, num_programs=1, **dtypes)
            assert torch.equal(total, 1 + numbers(8, BF16).float())
