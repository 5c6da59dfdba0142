"""Layer 1: no processes. The kernel that adds all slots in one launch: in Triton's interpreter, against its twin.

No GPU. What this shows and what it cannot: see test_kernels_interpreted.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from kernel_cases import SparseMemory, numbers, only_program, shifted

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (BF16, FP16, FP32, FP64)
SIZES = (0, 1, 3, 1023, 4095, 4096, 4097, 9001)
GIB = 1 << 30
PAIRS = [(total, addend) for total in (FP32, FP64) for addend in FLOATS if addend.itemsize <= total.itemsize]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


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
                if overwrite:
                    single.copy_(part)
                else:
                    k.accumulate.accumulate(single, part)
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
