"""Kernels for all parameters of a unit at once: gather each into its own memory, push from each gradient. A flat buffer
counts as one parameter.

Three kernels, each with its launcher and its plain-torch twin: `_gather_parts_kernel` (`gather_parts`),
`_scatter_accumulate_parts_kernel` (`scatter_accumulate_parts`) and `_scatter_parts_kernel` (`scatter_parts`). One
launch covers all owners and all parameters. An owner's shard holds the slices of the parameters back to back. A
parameter's memory is dense: row r is the slice of owner r. A table in host memory, written by the launcher and read by
the kernel, lists the parameters with address and length.
"""

# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
from __future__ import annotations

import ctypes
import functools
import itertools
import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from odc.kernels.aot_entry import AotEntry, alignment, entry
from odc.kernels.arguments import FLOATS, check_positive, check_rank, check_same_device
from odc.kernels.launching import (
    DTYPES,
    REMOTE_PROGRAMS,
    REMOTE_WARPS,
    VECTOR_ATOMICS,
    WARP_BLOCK,
    blocks,
    device_of,
    grid,
    has_vector_atomics,
    move_block,
    vector,
)
from odc.kernels.peers import PeerTable, rotated

COLUMNS = 4
"""int64 words of a row: address of the parameter's memory; and in bytes, the slice's place in an owner's buffer, its
length, and the length of the parameter's memory."""
MAX_PARTS = 256
"""Parameters of one launch."""
GRADIENTS = (torch.bfloat16, torch.float16, torch.float32)
"""What can be added to fp32 by atomics."""


class PartRows:
    """Host memory for the rows of one launch: its launcher writes them, and they must stay until the kernel is done."""

    def __init__(self, memory: torch.Tensor) -> None:
        """``memory``: int64 [MAX_PARTS, COLUMNS], dense, on the host; pinned and mapped, where a GPU reads it."""
        if memory.dtype != torch.int64 or memory.shape != (MAX_PARTS, COLUMNS) or not memory.is_contiguous():
            raise ValueError(
                f"memory is {memory.dtype} {tuple(memory.shape)}, expected dense torch.int64 ({MAX_PARTS}, {COLUMNS})"
            )
        if memory.device.type != "cpu":
            raise ValueError(f"memory is on {memory.device}, expected the host's: the launcher writes it")
        self._memory = memory
        self.address = memory.data_ptr()
        words = (ctypes.c_int64 * (MAX_PARTS * COLUMNS)).from_address(self.address)
        self._words = memoryview(words).cast("B").cast("q")

    def write(self, rows: array[int], addresses: Sequence[int]) -> None:
        words = rows[:]
        words[::COLUMNS] = array("q", addresses)
        self._words[: len(words)] = words


# [Note: Rows are found, not walked]
# The table lies in host memory, a microsecond away. A program loads the lengths of all rows by one load, whose sectors
# bring the rows' other words into L1 as well; nobody writes the table while the kernel runs. The blocks of all rows are
# numbered, and the row of a block is found by counting the rows that end before it: a program looks at the rows that
# it has blocks of, and not at all others. The counting takes a few words of shared memory.
@triton.jit
def _ends_of_rows(words: tl.tensor, num_rows: tl.tensor, BLOCK_BYTES: tl.constexpr, ROWS: tl.constexpr) -> Any:
    """The number of blocks of each row and of those before it."""
    numbers = tl.arange(0, ROWS)
    lengths = tl.load(words + numbers * 4 + 2, mask=numbers < num_rows, other=0)
    return tl.cumsum(((lengths + BLOCK_BYTES - 1) // BLOCK_BYTES).to(tl.int32), 0)


@triton.jit
def _move_parts(
    rows: tl.tensor,
    num_rows: tl.tensor,
    table: tl.tensor,
    rank: tl.tensor,
    world_size: tl.tensor,
    num_steps: tl.tensor,
    offset: tl.tensor,
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PULL: tl.constexpr,
    ADD: tl.constexpr,
) -> None:
    """What all kernels do with the first ``num_steps`` owners after ``rank``; ``WORD``: what a parameter's memory is
    made of here. ``PULL``: from the owners; else to them, as sums of fp32 with ``ADD``."""
    SIZE: tl.constexpr = WORD.primitive_bitwidth // 8
    PLACE: tl.constexpr = tl.float32 if ADD else WORD
    HOW: tl.constexpr = "atomic" if ADD else "copy"
    words = rows.to(tl.int64).to(tl.pointer_type(tl.int64))
    ends = _ends_of_rows(words, num_rows, BLOCK * SIZE, ROWS)
    num_blocks = tl.max(ends, 0)
    # Neighbouring programs begin with different owners, so that at any moment a launch is with all of them. Ranks that
    # are out of step would else meet at one owner, whose link they would share, while others are idle.
    first = tl.program_id(0) % num_steps
    owner = tl.where(rank + first < world_size, rank + first, rank + first - world_size)
    block = (tl.program_id(0) + tl.num_programs(0) - first * num_blocks % tl.num_programs(0)) % tl.num_programs(0)
    step = 0
    while step < num_steps:
        owner = tl.where(owner + 1 < world_size, owner + 1, 0)
        buffer = tl.load(table + owner) + offset
        while block < num_blocks:
            before = ends <= block
            word = words + tl.sum(before.to(tl.int32), 0) * 4
            start = (block - tl.max(tl.where(before, ends, 0), 0)).to(tl.int64) * BLOCK
            numel = tl.load(word + 2) // SIZE
            place = (buffer + tl.load(word + 1)).to(tl.pointer_type(PLACE))
            row = tl.load(word).to(tl.pointer_type(WORD)) + owner * numel
            present = numel
            if not PULL:
                present = tl.load(word + 3) // SIZE - owner * numel  # of this row: the memory may end early
            while start < numel:
                room = tl.minimum(numel - start, BLOCK).to(tl.int32)
                # .cg: the owner writes what is gathered, so this GPU's L1 must not keep what it read before. What is
                # pushed is read once, and L1 is for the table.
                if PULL:
                    move_block(row + start, place + start, room, "copy", ".cg", VECTOR, BLOCK)
                else:
                    left = tl.maximum(tl.minimum(room, present - start), 0).to(tl.int32)
                    move_block(place + start, row + start, left, HOW, ".cg", VECTOR, BLOCK)
                    if not ADD and left < room:  # what the row lacks; rare, so one by one
                        lanes = tl.arange(0, BLOCK)
                        lacking = (lanes >= left) & (lanes < room)
                        tl.store(place + start + lanes, tl.full([BLOCK], 0, WORD), mask=lacking)
                start += tl.num_programs(0).to(tl.int64) * BLOCK
                block += tl.num_programs(0)
        step += 1
        is_around = first + step == num_steps
        owner = tl.where(is_around, rank, owner)
        # The blocks of all rows of all owners are dealt out in turn.
        block = tl.where(is_around, tl.program_id(0), block - num_blocks)


# Nothing is specialized: see [Note: No argument is specialized] in launching.py.
_NUMBERS = ["rows", "num_rows", "table", "rank", "world_size", "num_steps", "offset"]


@triton.jit(do_not_specialize=_NUMBERS)
def _gather_parts_kernel(
    rows: tl.int64,
    num_rows: tl.int32,
    table: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    num_steps: tl.int32,
    offset: tl.int64,
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    _move_parts(
        rows, num_rows, table, rank, world_size, num_steps, offset, WORD, VECTOR, ROWS, BLOCK, PULL=True, ADD=False
    )


@triton.jit(do_not_specialize=_NUMBERS)
def _scatter_accumulate_parts_kernel(
    rows: tl.int64,
    num_rows: tl.int32,
    table: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    num_steps: tl.int32,
    offset: tl.int64,
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    _move_parts(
        rows, num_rows, table, rank, world_size, num_steps, offset, WORD, VECTOR, ROWS, BLOCK, PULL=False, ADD=True
    )


@triton.jit(do_not_specialize=_NUMBERS)
def _scatter_parts_kernel(
    rows: tl.int64,
    num_rows: tl.int32,
    table: tl.tensor,
    rank: tl.int32,
    world_size: tl.int32,
    num_steps: tl.int32,
    offset: tl.int64,
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    _move_parts(
        rows, num_rows, table, rank, world_size, num_steps, offset, WORD, VECTOR, ROWS, BLOCK, PULL=False, ADD=False
    )


class _Layout(NamedTuple):
    """What is the same in each step: all but addresses."""

    rows: array[int]
    """The table, with addresses to be filled in."""
    lengths: int
    """Bits that are set in any slice's length, in bytes; so the addresses of rows are as aligned as their parameter's
    and this."""
    offsets: int
    """Bits that are set in any slice's place, in bytes."""
    totals: int
    """Bits that are set in any parameter's length, in bytes."""
    num_blocks: int
    """Of one owner."""


def _bits(numbers: Iterable[int]) -> int:
    """
    >>> _bits([8, 16, 32])
    56
    """
    return functools.reduce(operator.or_, numbers, 0)


@functools.lru_cache(maxsize=4096)
def _layout(
    name: str,
    offsets: tuple[int, ...] | None,
    numels: tuple[int, ...] | None,
    totals: tuple[int, ...],
    world_size: int,
    itemsize: int,
    target_itemsize: int,
    block: int,
) -> _Layout:
    """Slices of ``numels`` at byte ``offsets`` of the owners' buffers, of parameters of ``totals`` elements. Without
    ``numels`` these are whole rows; without ``offsets`` slices lie back to back."""
    if numels is None:
        for number, total in enumerate(totals):
            if total % world_size:
                raise ValueError(
                    f"{name}[{number}] has {total} elements, expected a multiple of the world size {world_size}: one "
                    "row per owner"
                )
        numels = tuple(total // world_size for total in totals)
    if offsets is None:
        offsets = tuple(itertools.accumulate([numel * itemsize for numel in numels[:-1]], initial=0))
    if not len(totals) == len(offsets) == len(numels):
        raise ValueError(
            f"{len(totals)} {name}, {len(offsets)} offsets, {len(numels)} numels, expected as many of each"
        )
    words = array("q")
    for number, (offset, numel, total) in enumerate(zip(offsets, numels, totals, strict=True)):
        if numel < 0 or total > world_size * numel:
            raise ValueError(
                f"{name}[{number}] has {total} elements, expected at most {world_size * numel}: one row of {numel} per "
                f"owner"
            )
        if offset < 0 or offset % target_itemsize:
            raise ValueError(f"offset {number} is {offset} bytes, expected a multiple of {target_itemsize}, 0 or more")
        words.extend((0, offset, numel * itemsize, total * itemsize))
    small = max(itemsize // _LARGEST_WORD, 1)  # words per element
    num_blocks = sum(blocks(numel * small, block) for numel in numels)
    return _Layout(words, _bits(numels) * itemsize, _bits(offsets), _bits(totals) * itemsize, num_blocks)


def _check_parts(
    name: str,
    tensors: Sequence[torch.Tensor],
    dtypes: Sequence[torch.dtype],
    table: PeerTable,
    rank: int,
    num_programs: int = 1,
) -> torch.dtype:
    """The dtype of all ``tensors``."""
    if not 0 <= rank < table.world_size or num_programs <= 0:
        check_rank(rank, table.world_size)
        check_positive(num_programs=num_programs)
    if not 0 < len(tensors) <= MAX_PARTS:
        raise ValueError(f"{name} has {len(tensors)} tensors, expected 1 to {MAX_PARTS}")
    found = {tensor.dtype for tensor in tensors}
    dtype = found.pop()
    if found or dtype not in dtypes:
        names = ", ".join(sorted(str(one) for one in {dtype, *found}))
        raise ValueError(f"{name} has tensors of {names}, expected one of {', '.join(map(str, dtypes))}")
    if not all(map(torch.Tensor.is_contiguous, tensors)):
        strides = [(number, one.stride()) for number, one in enumerate(tensors) if not one.is_contiguous()]
        raise ValueError(f"{name}[{strides[0][0]}] has strides {strides[0][1]}, expected a dense tensor")
    if {tensor.device for tensor in tensors} != {table.tensor.device}:
        check_same_device(**{f"{name}[{number}]": one for number, one in enumerate(tensors)}, table=table.tensor)
    return dtype


def _check(
    name: str,
    table: PeerTable,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int] | None,
    numels: Sequence[int] | None,
    rank: int,
    offset_bytes: int,
    dtypes: Sequence[torch.dtype],
    target: torch.dtype | None = None,
    width: tuple[int, int] = (1, REMOTE_WARPS),
) -> tuple[torch.dtype, _Layout]:
    """The dtype, and what is known without addresses. ``target``: dtype at the owners, if another; ``width``: programs,
    and warps of each."""
    num_programs, num_warps = width
    dtype = _check_parts(name, tensors, dtypes, table, rank, num_programs)
    size, totals = (target or dtype).itemsize, tuple(map(torch.Tensor.numel, tensors))
    offsets, numels = (None if each is None else tuple(each) for each in (offsets, numels))
    block = num_warps * WARP_BLOCK
    layout = _layout(name, offsets, numels, totals, table.world_size, dtype.itemsize, size, block)
    if offset_bytes < 0 or (table.address_bits | offset_bytes) % size:
        raise ValueError(
            f"byte {offset_bytes} of buffers at {', '.join(map(hex, table.addresses))}, expected all to be multiples "
            f"of {size}, and 0 or more"
        )
    return dtype, layout


_LARGEST_WORD = torch.int32.itemsize
_WORDS = ((16, tl.int32, vector((0, torch.int32))), (4, tl.int32, 1), (2, tl.int16, 1))
"""Bytes that all places are multiples of, the word by which they are copied, and how many of them at once."""


def _words(places: int) -> tuple[Any, int]:
    """Triton's word, and how many at once, for places in which these bits are set."""
    return next((word, elements) for size, word, elements in _WORDS if places % size == 0)


def _launch(
    kernel: Any,
    rows: PartRows,
    tensors: Sequence[torch.Tensor],
    addresses: Sequence[int],
    table: PeerTable,
    layout: _Layout,
    rank: int,
    num_steps: int,
    offset_bytes: int,
    width: tuple[int, int],
    word: Any,
    elements: int,
) -> None:
    """For ``num_steps`` owners; ``elements`` of type ``word`` at once. ``width``: programs, and warps of each."""
    if num_steps * layout.num_blocks == 0:
        return
    num_programs, num_warps = width
    advice = f"use {kernel.__name__[1:].removesuffix('_kernel')}_reference for host memory"
    with device_of(kernel, tensors[0], advice):
        rows.write(layout.rows, addresses)
        kernel[grid(num_steps * layout.num_blocks, num_programs)](
            rows.address,
            len(tensors),
            table.tensor,
            rank,
            table.world_size,
            num_steps,
            offset_bytes,
            WORD=word,
            VECTOR=elements,
            ROWS=MAX_PARTS,
            BLOCK=num_warps * WARP_BLOCK,
            num_warps=num_warps,
        )


def gather_parts(
    rows: PartRows,
    outs: Sequence[torch.Tensor],
    table: PeerTable,
    *,
    rank: int,
    offset_bytes: int = 0,
    offsets: Sequence[int] | None = None,
    own_in_place: bool = False,
    num_programs: int = REMOTE_PROGRAMS,
    num_warps: int = REMOTE_WARPS,
) -> None:
    """Row r of ``outs[i]`` = slice i of rank r's buffer, for every r and i; slices lie back to back from byte
    ``offset_bytes`` on, or slice i at byte ``offsets[i]`` behind it.

    ``outs``: up to 256 dense tensors of one dtype (bf16, fp16, fp32 or fp64), each of ``world_size`` rows; ``table``
    holds buffers of the same dtype. Bytes are copied as they are. Neighbouring programs begin with different owners;
    with ``own_in_place`` the own rank's rows are there already, and are left as they are. The outputs must not overlap,
    which is not checked.

    On return the kernel is enqueued on the current stream; ``outs`` are complete for what is enqueued there next.
    ``rows`` has been written and must stay as it is until then. The caller has made sure that every owner's buffer is
    readable until then; the kernel waits for nobody.

    With shards [1, 2, 3] and [4, 5, 6] of ranks 0 and 1, ``outs`` of 2 and 4 elements are [1, 4] and [2, 3, 5, 6].

    Raises ValueError for wrong sizes, dtypes, devices, ranks or misaligned buffers, and launches nothing then.
    """
    width = num_programs, num_warps
    _, layout = _check("outs", table, outs, offsets, None, rank, offset_bytes, FLOATS, width=width)
    addresses = list(map(torch.Tensor.data_ptr, outs))
    words = _words(_bits(addresses) | layout.lengths | layout.offsets | table.address_bits | offset_bytes)
    steps = table.world_size - own_in_place
    _launch(_gather_parts_kernel, rows, outs, addresses, table, layout, rank, steps, offset_bytes, width, *words)


def gather_parts_reference(
    outs: Sequence[torch.Tensor],
    table: PeerTable,
    *,
    rank: int,
    offset_bytes: int = 0,
    offsets: Sequence[int] | None = None,
    own_in_place: bool = False,
) -> None:
    """`gather_parts` in plain torch on host memory; complete on return.

    >>> shards = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0, 6.0])]
    >>> outs = [torch.zeros(2), torch.zeros(4)]
    >>> gather_parts_reference(outs, PeerTable.of(shards), rank=0)
    >>> outs
    [tensor([1., 4.]), tensor([2., 3., 5., 6.])]
    """
    dtype, layout = _check("outs", table, outs, offsets, None, rank, offset_bytes, FLOATS)
    for owner in rotated(rank, table.world_size)[: table.world_size - own_in_place]:
        for number, out in enumerate(outs):
            if out.numel():
                low = offset_bytes + layout.rows[number * COLUMNS + 1]
                row = out.view(table.world_size, -1)[owner]
                row.copy_(table.host_view(owner, low, row.numel(), dtype))


def scatter_accumulate_parts(
    rows: PartRows,
    table: PeerTable,
    grads: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numels: Sequence[int],
    *,
    rank: int,
    offset_bytes: int = 0,
    num_programs: int = REMOTE_PROGRAMS,
    num_warps: int = REMOTE_WARPS,
) -> None:
    """Add row r of ``grads[i]`` to the fp32 sums at byte ``offset_bytes + offsets[i]`` of rank r's buffer, for every r
    and i.

    ``grads``: up to 256 dense tensors of one dtype (bf16, fp16 or fp32); row r of ``grads[i]`` begins at element ``r *
    numels[i]`` and has as many, or fewer where the memory ends: nothing is read behind it. ``table`` holds the ranks'
    buffers. Neighbouring programs begin with different owners. The own sums are added to by atomics as well,
    because the peers add to them at the same time. Concurrent clients' additions arrive in any order, so the last bits
    of a sum differ from run to run; where that matters, push into slots and let the owner `accumulate_slots`. Atomics
    flush subnormal numbers (below 1.2e-38) to zero. The sums must not overlap, which is not checked.

    On return the kernel is enqueued on the current stream, and what is enqueued there next finds all additions made,
    also at the peers. ``rows`` has been written and must stay as it is until then. The owners' sums must be open for
    this push (the kernel waits for nobody), and nobody but atomics may write them meanwhile.

    Two ranks that both push [1, 2] and [3, 4, 5] with numels 1 and 2 add 2 and 6, 8 to the sums of rank 0, and 4 and 10
    to those of rank 1.

    Raises ValueError for wrong sizes, dtypes, devices, ranks or misaligned places, and launches nothing then.
    """
    width = num_programs, num_warps
    dtype, layout = _check("grads", table, grads, offsets, numels, rank, offset_bytes, GRADIENTS, torch.float32, width)
    addresses = list(map(torch.Tensor.data_ptr, grads))
    elements = vector(
        (_bits(addresses) | layout.lengths, dtype), (layout.offsets | table.address_bits | offset_bytes, torch.float32)
    )
    words = DTYPES[dtype], elements if has_vector_atomics(grads[0].device) else 1
    kernel, steps = _scatter_accumulate_parts_kernel, table.world_size
    _launch(kernel, rows, grads, addresses, table, layout, rank, steps, offset_bytes, width, *words)


def scatter_accumulate_parts_reference(
    table: PeerTable,
    grads: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numels: Sequence[int],
    *,
    rank: int,
    offset_bytes: int = 0,
) -> None:
    """`scatter_accumulate_parts` in plain torch on host memory, for one client at a time; complete on return.

    >>> sums = [torch.zeros(3), torch.zeros(3)]
    >>> grads = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    >>> scatter_accumulate_parts_reference(PeerTable.of(sums), grads, [0, 4], [1, 2], rank=0)
    >>> sums
    [tensor([1., 3., 4.]), tensor([2., 5., 0.])]
    """
    _check("grads", table, grads, offsets, numels, rank, offset_bytes, GRADIENTS, torch.float32)
    for owner in rotated(rank, table.world_size):
        for grad, offset, numel in zip(grads, offsets, numels, strict=True):
            row = grad.view(-1)[owner * numel : (owner + 1) * numel]
            if row.numel():
                table.host_view(owner, offset_bytes + offset, row.numel(), torch.float32).add_(row.to(torch.float32))


def scatter_parts(
    rows: PartRows,
    table: PeerTable,
    grads: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numels: Sequence[int],
    *,
    rank: int,
    offset_bytes: int = 0,
    num_programs: int = REMOTE_PROGRAMS,
    num_warps: int = REMOTE_WARPS,
) -> None:
    """Copy row r of ``grads[i]``, bytes as they are, to byte ``offset_bytes + offsets[i]`` of rank r's buffer, for
    every r and i.

    ``grads``: up to 256 dense tensors of one dtype (bf16, fp16, fp32 or fp64); row r of ``grads[i]`` begins at element
    ``r * numels[i]`` and has as many, or fewer where the memory ends: the others are zeros at the owner. ``table``
    holds buffers of bytes. Neighbouring programs begin with different owners. The places must not overlap,
    which is not checked.

    On return the kernel is enqueued on the current stream; what is enqueued there next finds all rows at the owners,
    and ``grads`` free. ``rows`` has been written and must stay as it is until then. The places must be this rank's to
    write until then; the kernel waits for nobody.

    A rank that scatters [1, 2] and [3, 4, 5] with numels 1 and 2 leaves 1 and 3, 4 with rank 0, and 2 and 5, 0 with
    rank 1.

    Raises ValueError for wrong sizes, dtypes, devices, ranks or misaligned places, and launches nothing then.
    """
    width = num_programs, num_warps
    _, layout = _check("grads", table, grads, offsets, numels, rank, offset_bytes, FLOATS, width=width)
    addresses = list(map(torch.Tensor.data_ptr, grads))
    places = _bits(addresses) | layout.lengths | layout.offsets | table.address_bits | offset_bytes
    words = _words(places | layout.totals % _LARGEST_WORD)  # a gradient may end anywhere, but not in a word
    kernel, steps = _scatter_parts_kernel, table.world_size
    _launch(kernel, rows, grads, addresses, table, layout, rank, steps, offset_bytes, width, *words)


def scatter_parts_reference(
    table: PeerTable,
    grads: Sequence[torch.Tensor],
    offsets: Sequence[int],
    numels: Sequence[int],
    *,
    rank: int,
    offset_bytes: int = 0,
) -> None:
    """`scatter_parts` in plain torch on host memory; complete on return.

    >>> slots = [torch.ones(3), torch.ones(3)]
    >>> grads = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0, 5.0])]
    >>> scatter_parts_reference(PeerTable.of(slots), grads, [0, 4], [1, 2], rank=0)
    >>> slots
    [tensor([1., 3., 4.]), tensor([2., 5., 0.])]
    """
    dtype, _ = _check("grads", table, grads, offsets, numels, rank, offset_bytes, FLOATS)
    for owner in rotated(rank, table.world_size):
        for grad, offset, numel in zip(grads, offsets, numels, strict=True):
            row = grad.view(-1)[owner * numel : (owner + 1) * numel]
            if numel:
                slot = table.host_view(owner, offset_bytes + offset, numel, dtype)
                slot[: row.numel()].copy_(row)
                slot[row.numel() :].zero_()


def aot_entries(atomic: Sequence[torch.dtype] = GRADIENTS, num_warps: int = REMOTE_WARPS) -> list[AotEntry]:
    table, room = {"table": "*i64"}, {"ROWS": MAX_PARTS, "BLOCK": num_warps * WARP_BLOCK}
    copies = [
        entry(
            f"{name}[{'i32' if word is tl.int32 else 'i16'}, {alignment(elements > 1)}]",
            kernel,
            table,
            {"WORD": word, "VECTOR": elements, **room},
            num_warps,
        )
        for name, kernel in (("gather_parts", _gather_parts_kernel), ("scatter_parts", _scatter_parts_kernel))
        for _, word, elements in _WORDS
    ]
    return copies + [
        entry(
            f"scatter_accumulate_parts[{DTYPES[grads]}->fp32, {alignment(aligned)}]",
            _scatter_accumulate_parts_kernel,
            table,
            {"WORD": DTYPES[grads], "VECTOR": vector((int(not aligned), torch.float32), (0, grads)), **room},
            num_warps,
            since=VECTOR_ATOMICS if aligned else (8, 0),
        )
        for grads in atomic
        for aligned in (True, False)
    ]
