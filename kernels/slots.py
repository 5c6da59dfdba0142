"""Sums of slots: `_accumulate_slots_kernel`, its launcher `accumulate_slots`, its plain-torch twin.

A slot receives one client's push. All slots of an owner are in one allocation, equally spaced. A table in memory,
written by the host and read by the kernel, lists the slots to add: one launch adds all slots that have arrived, to all
sums.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from odc.kernels.accumulate import PAIRS
from odc.kernels.aot_entry import AotEntry, alignment, entry
from odc.kernels.arguments import MASTER_FLOATS, check_flat, check_positive
from odc.kernels.launching import BLOCK, DTYPES, LOCAL_PROGRAMS, NUM_WARPS, device_of, vector

COLUMNS = 4
"""int64 words of a row: address of the sum, byte offset in a slot, number of elements, slots (see `SlotRow.words`)."""
MAX_SLOTS = 63
"""Slots that one launch can add; bit 63 of the word says that the sum is overwritten."""
_FIRST = -(1 << 63)


# The table lies in host memory. Each program reads each row once, by loads that this multiprocessor's L1 keeps for its
# other programs: nobody writes the table while the kernel runs.
#
# [Note: Sums begin at minus zero]
# -0.0 + x has the bits of x for every x; 0.0 + -0.0 is 0.0. So a sum that is overwritten begins at -0.0, and has the
# bits of a copy of the first slot to which the others were added. Without any slot it is 0.0.
#
# See [Note: No argument is specialized] and, for VECTOR, [Note: Contiguous lanes] in launching.py.
@triton.jit(do_not_specialize=["table", "num_rows", "slots", "slot_bytes"])
def _accumulate_slots_kernel(
    table: tl.int64,
    num_rows: tl.int32,
    slots: tl.tensor,
    slot_bytes: tl.int64,
    TOTAL: tl.constexpr,
    ADDEND: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    lanes = tl.arange(0, BLOCK)
    word = table.to(tl.int64).to(tl.pointer_type(tl.int64))
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row = 0
    while row < num_rows:
        total = tl.load(word).to(tl.pointer_type(TOTAL))
        slot = (slots.to(tl.int64) + tl.load(word + 1)).to(tl.pointer_type(ADDEND))
        numel = tl.load(word + 2)
        which = tl.load(word + 3)
        arrived = which & 0x7FFFFFFFFFFFFFFF
        begin = tl.where(arrived == 0, 0, -2147483648).to(tl.int32).to(tl.float32, bitcast=True).to(TOTAL)
        while start < numel:
            left = tl.minimum(numel - start, BLOCK).to(tl.int32)
            whole = left // VECTOR * VECTOR
            target = tl.multiple_of(total + start + lanes, VECTOR * TOTAL.primitive_bitwidth // 8)
            inside = tl.max_constancy(lanes < whole, VECTOR)
            read = tl.where(which < 0, 0, left)  # of the sum as it is
            values = tl.load(target, mask=tl.max_constancy(lanes < read // VECTOR * VECTOR, VECTOR), other=begin)
            source = slot + start
            remaining = arrived
            while remaining != 0:
                if remaining & 1 != 0:
                    origin = tl.multiple_of(source + lanes, VECTOR * ADDEND.primitive_bitwidth // 8)
                    # .cg: peers write the slots, so this GPU's L1 must not keep what it read for an earlier push.
                    values += tl.load(origin, mask=inside, cache_modifier=".cg").to(TOTAL)
                source = (source.to(tl.int64) + slot_bytes).to(tl.pointer_type(ADDEND))
                remaining = remaining >> 1
            tl.store(target, values, mask=inside)
            if VECTOR > 1 and whole < left:
                rest = whole + tl.arange(0, VECTOR)
                last = tl.load(total + start + rest, mask=rest < read, other=begin)
                source = slot + start
                remaining = arrived
                while remaining != 0:
                    if remaining & 1 != 0:
                        last += tl.load(source + rest, mask=rest < left, cache_modifier=".cg").to(TOTAL)
                    source = (source.to(tl.int64) + slot_bytes).to(tl.pointer_type(ADDEND))
                    remaining = remaining >> 1
                tl.store(total + start + rest, last, mask=rest < left)
            start += tl.num_programs(0).to(tl.int64) * BLOCK
        start -= (numel + BLOCK - 1) // BLOCK * BLOCK  # the blocks of all rows are dealt out in turn
        word += 4
        row += 1


@dataclass(frozen=True)
class SlotRow:
    """One sum and what is added to it."""

    address: int
    """Of the sum's first element."""
    offset_bytes: int
    """Of the first addend in each slot."""
    numel: int
    """Elements of the sum, and of the addend in each slot."""
    slots: int
    """Bit s is set if slot s is added."""
    first: bool = False
    """Whether the sum is overwritten; with no slots, by zeros."""

    def words(self) -> tuple[int, int, int, int]:
        """
        >>> SlotRow(4096, 64, 5, 0b101).words(), SlotRow(4096, 64, 5, 0, first=True).words()[3] == -(2**63)
        ((4096, 64, 5, 5), True)
        """
        return self.address, self.offset_bytes, self.numel, self.slots + (_FIRST if self.first else 0)


def write_rows(
    table: torch.Tensor,
    rows: Sequence[SlotRow],
    slots: torch.Tensor,
    slot_bytes: int,
    *,
    total_dtype: torch.dtype,
    addend_dtype: torch.dtype,
) -> bool:
    """Write ``rows`` to the beginning of ``table`` for `accumulate_slots`; whether that may be told ``aligned``.

    ``table``: int64 [at least as many rows, 4], dense, on the host; the other arguments as for `accumulate_slots`.
    Rows must not overlap, which is not checked.

    Raises ValueError for rows that do not fit the table or the slots, and for addresses and offsets that are no
    multiples of the element sizes; the table is as it was then.
    """
    num_slots = _check(slots, slot_bytes, total_dtype, addend_dtype)
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[1] != COLUMNS or not table.is_contiguous():
        raise ValueError(f"table is {table.dtype} {tuple(table.shape)}, expected dense torch.int64 rows of {COLUMNS}")
    if table.device.type != "cpu" or len(rows) > table.shape[0]:
        raise ValueError(f"{len(rows)} rows for {table.shape[0]} on {table.device}, expected room for all on the host")
    for number, row in enumerate(rows):
        end = row.offset_bytes + row.numel * addend_dtype.itemsize
        if row.numel < 0 or row.offset_bytes < 0 or end > slot_bytes or not 0 <= row.slots < 1 << num_slots:
            raise ValueError(f"row {number} is {row}, expected a part of {slot_bytes} bytes of {num_slots} slots")
        is_null = row.address <= 0 and row.numel > 0  # an empty sum may lie nowhere
        if is_null or row.address % total_dtype.itemsize or row.offset_bytes % addend_dtype.itemsize:
            raise ValueError(
                f"row {number} is {row}, expected an address that is a multiple of {total_dtype.itemsize} "
                f"({total_dtype}) and an offset that is one of {addend_dtype.itemsize} ({addend_dtype})"
            )
    if rows:
        table[: len(rows)] = torch.tensor([row.words() for row in rows], dtype=torch.int64, device="cpu")
    places = [(row.address, total_dtype) for row in rows] + [(row.offset_bytes, addend_dtype) for row in rows]
    return vector((slots.data_ptr(), addend_dtype), (slot_bytes, addend_dtype), (0, total_dtype), *places) > 1


def _check(slots: torch.Tensor, slot_bytes: int, total_dtype: torch.dtype, addend_dtype: torch.dtype) -> int:
    """The number of slots."""
    if (total_dtype, addend_dtype) not in PAIRS:
        raise ValueError(
            f"{addend_dtype} is added to {total_dtype}, expected a sum of {' or '.join(map(str, MASTER_FLOATS))} and "
            f"nothing wider than it"
        )
    check_flat("slots", slots, [torch.uint8])
    check_positive(slots_numel=slots.numel(), slot_bytes=slot_bytes)
    if slots.numel() % slot_bytes or slots.numel() // slot_bytes > MAX_SLOTS:
        raise ValueError(
            f"slots has {slots.numel()} bytes for slots of {slot_bytes}, expected at most {MAX_SLOTS} whole slots: of "
            f"more, launch one part after the other"
        )
    if slots.data_ptr() % addend_dtype.itemsize or slot_bytes % addend_dtype.itemsize:
        raise ValueError(
            f"slots are at {slots.data_ptr():#x}, {slot_bytes} bytes apart, expected multiples of "
            f"{addend_dtype.itemsize} for {addend_dtype}"
        )
    return slots.numel() // slot_bytes


def accumulate_slots(
    table: int,
    num_rows: int,
    slots: torch.Tensor,
    slot_bytes: int,
    *,
    total_dtype: torch.dtype,
    addend_dtype: torch.dtype,
    aligned: bool,
    num_programs: int = LOCAL_PROGRAMS,
) -> None:
    """For each row of the table, add its slots to its sum, in ascending order and in the sum's dtype.

    ``table``: the address, as the device sees it, of ``num_rows`` rows as `write_rows` leaves them: pinned host memory
    that is mapped, or device memory. ``slots``: uint8 [num_slots * slot_bytes], dense; at most 63 slots, of more launch
    the next 63 on ``slots[63 * slot_bytes:]``, with ``first`` in the first launch only. ``total_dtype``: fp32 or fp64;
    ``addend_dtype``: bf16, fp16, fp32 or (for fp64) fp64. ``aligned``: what `write_rows` returned; wide accesses are
    used then. ``num_programs``: one per 4096 elements of all rows is enough; each reads the whole table. The sum has
    the bits of `accumulate` called for one slot after the other; of a copy of the first one where it is overwritten.

    On return the kernel is enqueued on the current stream; the sums are there for what is enqueued there next. Until
    then, the table and the slots must stay as they are.

    A sum [1, 2] and slots [0.5, 0.5], [4, 4], [8, 8] of which bits 0b101 are set give [9.5, 10.5], and [8.5, 8.5] if
    the sum is overwritten.

    Raises ValueError for wrong shapes, dtypes, devices or alignment, and launches nothing then.
    """
    _check_launch(table, num_rows, slots, slot_bytes, total_dtype, addend_dtype)
    check_positive(num_programs=num_programs)
    elements = vector((0, total_dtype), (slots.data_ptr() if aligned else 1, addend_dtype), (slot_bytes, addend_dtype))
    if aligned and elements == 1:
        raise ValueError(
            f"aligned, but slots are at {slots.data_ptr():#x}, {slot_bytes} bytes apart: expected what write_rows "
            f"returned"
        )
    if num_rows == 0:
        return
    with device_of(_accumulate_slots_kernel, slots, "use accumulate_slots_reference for host memory"):
        _accumulate_slots_kernel[(num_programs,)](
            table,
            num_rows,
            slots,
            slot_bytes,
            TOTAL=DTYPES[total_dtype],
            ADDEND=DTYPES[addend_dtype],
            VECTOR=elements,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )


def _check_launch(
    table: int, num_rows: int, slots: torch.Tensor, slot_bytes: int, total_dtype: torch.dtype, addend_dtype: torch.dtype
) -> None:
    _check(slots, slot_bytes, total_dtype, addend_dtype)
    if num_rows < 0 or table <= 0 or table % 8:
        raise ValueError(f"{num_rows} rows at {table:#x}, expected 0 or more at a multiple of 8")


def accumulate_slots_reference(
    table: int,
    num_rows: int,
    slots: torch.Tensor,
    slot_bytes: int,
    *,
    total_dtype: torch.dtype,
    addend_dtype: torch.dtype,
) -> None:
    """`accumulate_slots` in plain torch on host memory; complete on return.

    >>> total, rows = torch.tensor([1.0, 2.0]), torch.zeros(1, 4, dtype=torch.int64)
    >>> slots = torch.tensor([0.5, 0.5, 4, 4, 8, 8]).view(torch.uint8)
    >>> dtypes = {"total_dtype": torch.float32, "addend_dtype": torch.float32}
    >>> _ = write_rows(rows, [SlotRow(total.data_ptr(), 0, 2, 0b101)], slots, 8, **dtypes)
    >>> accumulate_slots_reference(rows.data_ptr(), 1, slots, 8, **dtypes)
    >>> total
    tensor([ 9.5000, 10.5000])
    """
    _check_launch(table, num_rows, slots, slot_bytes, total_dtype, addend_dtype)
    for row in range(num_rows):
        words = (ctypes.c_int64 * COLUMNS).from_address(table + row * COLUMNS * 8)
        address, offset_bytes, numel, which = list(words)
        if numel == 0:
            continue
        raw = (ctypes.c_char * (numel * total_dtype.itemsize)).from_address(address)
        total = torch.frombuffer(raw, dtype=total_dtype)
        first, arrived = which < 0, which & ~_FIRST
        if first and not arrived:
            total.zero_()
        for slot in range(slots.numel() // slot_bytes):
            if arrived >> slot & 1:
                begin = slot * slot_bytes + offset_bytes
                addend = slots[begin : begin + numel * addend_dtype.itemsize].view(addend_dtype).to(total_dtype)
                if first:
                    total.copy_(addend)
                else:
                    total.add_(addend)
                first = False


def aot_entries(pairs: Sequence[tuple[torch.dtype, torch.dtype]] = PAIRS) -> list[AotEntry]:
    return [
        entry(
            f"accumulate_slots[{DTYPES[addend]}->{DTYPES[total]}, {alignment(aligned)}]",
            _accumulate_slots_kernel,
            {"slots": "*u8"},
            {
                "TOTAL": DTYPES[total],
                "ADDEND": DTYPES[addend],
                "VECTOR": vector((int(not aligned), total), (0, addend)),
                "BLOCK": BLOCK,
            },
            NUM_WARPS,
        )
        for total, addend in pairs
        for aligned in (True, False)
    ]
