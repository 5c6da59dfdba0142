"""Layer 1: no processes. Kernels that move all parameters of a unit in one launch: in Triton's interpreter, against
their twins.

No GPU. What this shows and what it cannot: see test_kernels_interpreted.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from kernel_cases import SparseMemory, numbers, only_program, shifted, some_of

BF16, FP16, FP32, FP64, I64 = torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64
FLOATS = (BF16, FP16, FP32, FP64)
WORLD_SIZE, GUARD, POISON = 3, 8, -7
GIB = 1 << 30
ALIGNED = 64  # elements: what follows begins at a multiple of 16 bytes
NUMEL = (1 << 31) + 4096 + 8  # beyond 2**31 elements
SLICES: dict[str, list[int]] = {
    "one": [4097],
    "one of one element": [1],
    "one of whole vectors": [4104],
    "two": [ALIGNED, 4096],
    "odd": [5, 4099, 1, 9001],
    "even": [6, 4098, 2],
    "empty ones": [0, ALIGNED, 0, 0, 5, 0],
    "12": [8 * (n % 4 + 1) for n in range(12)],
    "exactly one block": [4096, 4096],
}


@pytest.fixture
def rows(k: SimpleNamespace) -> Any:
    return k.parts.PartRows(torch.full((k.parts.MAX_PARTS, k.parts.COLUMNS), -1, dtype=I64))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def with_payloads(values: torch.Tensor) -> torch.Tensor:
    """NaN with a payload now and then, which no conversion would keep."""
    bits(values)[::7] = -1
    return values


class Guarded:
    """A tensor between elements that must stay as they are."""

    def __init__(self, numel: int, dtype: torch.dtype, shift: int = 0) -> None:
        self.whole = shifted(torch.full((numel + 2 * GUARD,), POISON, dtype=dtype), shift)
        self.view = self.whole[GUARD : GUARD + numel]

    def expect(self, wanted: torch.Tensor) -> None:
        assert torch.equal(bits(self.view), bits(wanted))
        assert (self.whole[:GUARD] == POISON).all()
        assert (self.whole[GUARD + len(self.view) :] == POISON).all()


class TestGather:
    def check(
        self,
        k: SimpleNamespace,
        rows: Any,
        numels: Sequence[int],
        dtype: torch.dtype,
        *,
        before: int = 0,
        shift: int = 0,
        rank: int = 1,
        own_in_place: bool = False,
        **how: Any,
    ) -> None:
        """What the kernel leaves, what its twin leaves, and what is meant."""
        shards = [
            shifted(with_payloads(numbers(before + sum(numels), dtype, seed=owner)), 0) for owner in range(WORLD_SIZE)
        ]
        outs, twins = ([Guarded(WORLD_SIZE * n, dtype, shift) for n in numels] for _ in range(2))
        table = k.peers.PeerTable.of(shards)
        words = {"rank": rank, "offset_bytes": before * dtype.itemsize, "own_in_place": own_in_place}
        k.parts.gather_parts(rows, [o.view for o in outs], table, **words, **how)
        k.parts.gather_parts_reference([t.view for t in twins], table, **words)
        if own_in_place:
            shards[rank].fill_(POISON)
        low = before
        for out, twin, numel in zip(outs, twins, numels, strict=True):
            wanted = torch.cat([shard[low : low + numel] for shard in shards])
            out.expect(wanted)
            twin.expect(wanted)
            low += numel

    @pytest.mark.parametrize(("numels", "dtype"), some_of([*SLICES.values()], FLOATS), ids=str)
    def test_slices(self, k: SimpleNamespace, rows: Any, numels: list[int], dtype: torch.dtype) -> None:
        self.check(k, rows, numels, dtype)

    @pytest.mark.parametrize(
        ("slices", "place"),
        some_of([([ALIGNED, 4096, ALIGNED], BF16), ([4104], FP32)], [(8, 0), (2, 0), (1, 0), (0, 1), (0, 2), (3, 5)]),
    )
    def test_places(self, k: SimpleNamespace, rows: Any, slices: Any, place: tuple[int, int]) -> None:
        before, shift = place
        self.check(k, rows, *slices, before=before, shift=shift)

    @pytest.mark.parametrize(("rank", "num_programs"), some_of(range(WORLD_SIZE), [1, 2, 7, 64]))
    def test_ranks_and_programs(self, k: SimpleNamespace, rows: Any, rank: int, num_programs: int) -> None:
        self.check(k, rows, [9001, 0, 3, 5000, 1, 1, 1], FP32, rank=rank, num_programs=num_programs)

    def test_nothing(self, k: SimpleNamespace, rows: Any) -> None:
        self.check(k, rows, [0, 0], FP32, before=8)

    @pytest.mark.parametrize("rank", range(WORLD_SIZE))
    @pytest.mark.parametrize("numels", [[4097], [64, 0, 9001]], ids=str)
    def test_own_row_in_place(self, k: SimpleNamespace, rows: Any, rank: int, numels: list[int]) -> None:
        self.check(k, rows, numels, FP32, rank=rank, own_in_place=True)

    def test_far(self, k: SimpleNamespace) -> None:
        """Slices, rows and blocks beyond 2**31 bytes and elements: the last program of the first step."""
        with SparseMemory(40 * GIB) as far:
            low = 3 * (NUMEL // 4) * 2
            values = far.view(2 * low + NUMEL * 2 - 16, 8, BF16).copy_(numbers(8, BF16))
            words = torch.tensor([[far.address + 20 * GIB, low, NUMEL * 2, 0]])
            table = k.peers.PeerTable.build([64, far.address], "cpu")
            with only_program(k.launching.blocks(NUMEL) - 1, 2 * k.launching.blocks(NUMEL)):
                arguments = (words.data_ptr(), 1, table.tensor, 0, 2, 2, low)
                constants = {"WORD": tl.int16, "VECTOR": 1, "ROWS": 256, "BLOCK": 4096}
                k.parts._gather_parts_kernel[(1,)](*arguments, **constants)
            assert torch.equal(far.view(20 * GIB + 2 * NUMEL * 2 - 16, 8, BF16), values)


class Push:
    """Gradients of slices of ``numels`` elements, of which the last rows lack some."""

    def __init__(
        self, numels: Sequence[int], dtype: torch.dtype, missing: Sequence[int] = (), *, shift: int = 0, gap: int = 0
    ) -> None:
        """``missing``: elements, of each gradient in turn. ``gap``: elements between the slices in a buffer."""
        self.numels, self.dtype, self.gap = list(numels), dtype, gap
        self.starts = [sum(numels[:i]) + gap * i for i in range(len(numels))]
        self.length = sum(numels) + gap * len(numels)
        totals = [
            max(0, WORLD_SIZE * n - (missing[i % len(missing)] if missing else 0)) for i, n in enumerate(self.numels)
        ]
        self.grads = []
        for i, total in enumerate(totals):
            room = shifted(numbers(total + GUARD, dtype, seed=i), shift)
            bits(room)[total:] = -1  # NaN: not to be read
            self.grads.append(room[:total])

    def row(self, owner: int, i: int) -> torch.Tensor:
        """With zeros for what is missing."""
        row = self.grads[i][owner * self.numels[i] : (owner + 1) * self.numels[i]]
        return torch.cat([row, torch.zeros(self.numels[i] - len(row), dtype=self.dtype)])

    def offsets(self, itemsize: int) -> list[int]:
        return [start * itemsize for start in self.starts]


MISSING: dict[str, list[int]] = {
    "nothing": [],
    "some of the last row": [3, 0, 1],
    "a row, and some": [4100, 6, 70],
    "all": [0, 1 << 20],
}


SHORT = [[4097], [ALIGNED, 4096, 8200], [5, 4099, 0, 1, 9001]]


class Pushes:
    """What both kinds of pushes are tested with; ``check`` compares one with its twin, and with what is expected."""

    check: Callable[..., None]

    @pytest.mark.parametrize(("numels", "dtype"), some_of([*SLICES.values()], [BF16, FP16, FP32]), ids=str)
    def test_slices(self, k: SimpleNamespace, rows: Any, numels: list[int], dtype: torch.dtype) -> None:
        self.check(k, rows, Push(numels, dtype))

    @pytest.mark.parametrize(("numels", "missing", "dtype"), some_of(SHORT, [*MISSING.values()], [BF16, FP32]), ids=str)
    def test_short_rows(
        self, k: SimpleNamespace, rows: Any, numels: list[int], missing: list[int], dtype: torch.dtype
    ) -> None:
        self.check(k, rows, Push(numels, dtype, missing))

    @pytest.mark.parametrize(
        ("before", "shift", "of_grads", "gap"), [(8, 0, 0, 8), (4, 0, 0, 4), (1, 0, 0, 0), (0, 1, 0, 3), (0, 0, 2, 2)]
    )
    def test_places(self, k: SimpleNamespace, rows: Any, before: int, shift: int, of_grads: int, gap: int) -> None:
        push = Push([ALIGNED, 4104, 8], BF16, [5], shift=of_grads, gap=gap)
        self.check(k, rows, push, before=before, shift=shift)

    @pytest.mark.parametrize(("rank", "num_programs"), some_of(range(WORLD_SIZE), [1, 2, 7, 64]))
    def test_ranks_and_programs(self, k: SimpleNamespace, rows: Any, rank: int, num_programs: int) -> None:
        push = Push([9001, 0, 3, 5000, 1, 1, 1], FP32, [4500, 0])
        self.check(k, rows, push, rank=rank, num_programs=num_programs)


class TestScatterAccumulate(Pushes):
    def check(
        self, k: SimpleNamespace, rows: Any, push: Push, *, rank: int = 1, before: int = 0, shift: int = 0, **how: Any
    ) -> None:
        length = before + push.length
        sums = [numbers(length, FP32, seed=70 + owner) for owner in range(WORLD_SIZE)]
        found, twins = ([Guarded(length, FP32, shift) for _ in sums] for _ in range(2))
        for total, one, other in zip(sums, found, twins, strict=True):
            one.view.copy_(total)
            other.view.copy_(total)
        arguments = (push.grads, push.offsets(4), push.numels)
        words = {"rank": rank, "offset_bytes": 4 * before}
        table = k.peers.PeerTable.of([one.view for one in found])
        k.parts.scatter_accumulate_parts(rows, table, *arguments, **words, **how)
        table = k.peers.PeerTable.of([one.view for one in twins])
        k.parts.scatter_accumulate_parts_reference(table, *arguments, **words)
        for owner, total in enumerate(sums):
            for i, (start, numel) in enumerate(zip(push.starts, push.numels, strict=True)):
                total[before + start : before + start + numel] += push.row(owner, i).float()
            found[owner].expect(total)
            twins[owner].expect(total)

    def test_all_clients_add(self, k: SimpleNamespace, rows: Any) -> None:
        sums = [torch.zeros(4097 + 5) for _ in range(WORLD_SIZE)]
        for rank in range(WORLD_SIZE):
            grads = [torch.ones(WORLD_SIZE * 4097), torch.full((WORLD_SIZE * 5 - 2,), 2.0)]
            table = k.peers.PeerTable.of(sums)
            k.parts.scatter_accumulate_parts(rows, table, grads, [0, 4 * 4097], [4097, 5], rank=rank)
        assert all((total[:4097] == 3).all() for total in sums)
        assert [total[4097:].tolist() for total in sums] == [[6.0] * 5, [6.0] * 5, [6.0] * 3 + [0.0] * 2]

    def test_far(self, k: SimpleNamespace) -> None:
        """The row of rank 1 begins and ends beyond 2**31 elements; so do the sums."""
        with SparseMemory(40 * GIB) as far:
            values = far.view(2 * NUMEL * 2 - 16, 8, BF16).copy_(numbers(8, BF16))
            words = torch.tensor([[far.address, 16 * GIB, NUMEL * 2, 2 * NUMEL * 2]])
            table = k.peers.PeerTable.build([64, far.address], "cpu")
            with only_program(k.launching.blocks(NUMEL) - 1, 2 * k.launching.blocks(NUMEL)):
                arguments = (words.data_ptr(), 1, table.tensor, 0, 2, 2, 4 * GIB)
                constants = {"WORD": k.launching.DTYPES[BF16], "VECTOR": 1, "ROWS": 256, "BLOCK": 4096}
                k.parts._scatter_accumulate_parts_kernel[(1,)](*arguments, **constants)
            assert torch.equal(far.view(20 * GIB + NUMEL * 4 - 32, 8, FP32), values.float())


class TestScatter(Pushes):
    def check(
        self, k: SimpleNamespace, rows: Any, push: Push, *, rank: int = 1, before: int = 0, shift: int = 0, **how: Any
    ) -> None:
        for grad in push.grads:
            with_payloads(grad)
        size, length = push.dtype.itemsize, before + push.length
        found, twins = ([Guarded(length, push.dtype, shift) for _ in range(WORLD_SIZE)] for _ in range(2))
        arguments = (push.grads, push.offsets(size), push.numels)
        words = {"rank": rank, "offset_bytes": size * before}
        table = k.peers.PeerTable.of([one.view for one in found])
        k.parts.scatter_parts(rows, table, *arguments, **words, **how)
        table = k.peers.PeerTable.of([one.view for one in twins])
        k.parts.scatter_parts_reference(table, *arguments, **words)
        for owner in range(WORLD_SIZE):
            wanted = torch.full((length,), POISON, dtype=push.dtype)
            for i, (start, numel) in enumerate(zip(push.starts, push.numels, strict=True)):
                wanted[before + start : before + start + numel] = push.row(owner, i)
            found[owner].expect(wanted)
            twins[owner].expect(wanted)

    @pytest.mark.parametrize("missing", MISSING.values(), ids=str)
    def test_bytes_of_any_dtype(self, k: SimpleNamespace, rows: Any, missing: list[int]) -> None:
        self.check(k, rows, Push(SHORT[1], torch.float64, missing))

    def test_far(self, k: SimpleNamespace) -> None:
        """The row of rank 1 begins and ends beyond 2**31 elements; so does its place. It lacks the last four."""
        with SparseMemory(40 * GIB) as far:
            values = far.view(2 * NUMEL * 2 - 16, 8, BF16).copy_(numbers(8, BF16)).clone()
            far.view(20 * GIB + NUMEL * 2 - 16, 8, BF16).fill_(POISON)
            words = torch.tensor([[far.address, 16 * GIB, NUMEL * 2, (2 * NUMEL - 4) * 2]])
            table = k.peers.PeerTable.build([64, far.address], "cpu")
            with only_program(k.launching.blocks(NUMEL) - 1, 2 * k.launching.blocks(NUMEL)):
                arguments = (words.data_ptr(), 1, table.tensor, 0, 2, 2, 4 * GIB)
                constants = {"WORD": tl.int16, "VECTOR": 1, "ROWS": 256, "BLOCK": 4096}
                k.parts._scatter_parts_kernel[(1,)](*arguments, **constants)
            values[4:] = 0
            assert torch.equal(far.view(20 * GIB + NUMEL * 2 - 16, 8, BF16), values)


class TestOrder:
    @pytest.mark.parametrize("rank", range(4))
    def test_owners(self, k: SimpleNamespace, rows: Any, rank: int) -> None:
        """Program s of four, of one block per owner, is with the s-th owner: the s-th rank after this one, itself
        last."""
        order = [(rank + 1 + step) % 4 for step in range(4)]
        assert k.peers.rotated(rank, 4) == order
        ones = torch.ones(4, 5)
        for step, owner in enumerate(order):
            out, slots, sums = torch.zeros(3, 4, 5)
            shards, *tables = (k.peers.PeerTable.of(list(one)) for one in (ones, slots, sums))
            with only_program(step, 4):
                k.parts.gather_parts(rows, [out], shards, rank=rank, num_programs=1)
                for push, table in zip((k.parts.scatter_parts, k.parts.scatter_accumulate_parts), tables, strict=True):
                    push(rows, table, [ones], [0], [5], rank=rank, num_programs=1)
            for found in (out, slots, sums):
                assert found.sum(1).tolist() == [5.0 * (other == owner) for other in range(4)]


@pytest.mark.parametrize("num_programs", [3, 4, 6])
def test_neighbouring_programs_are_with_different_owners(
    k: SimpleNamespace, rows: Any, num_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At their beginning, and when all have moved as many blocks; so in any step that is not the last."""
    shards, out = list(torch.zeros(4, 12 * 4096)), torch.zeros(4 * 12 * 4096)
    first, length = shards[0].data_ptr(), shards[0].nbytes
    visited: list[int] = []
    monkeypatch.setattr(k.parts, "move_block", lambda out, place, *how: visited.append(place))
    table, owners = k.peers.PeerTable.of(shards), []
    for program in range(num_programs):
        visited.clear()
        with only_program(program, num_programs):
            k.parts.gather_parts(rows, [out], table, rank=1, num_programs=1, num_warps=8)
        owners.append([(int(place.handle.data.item()) - first) // length for place in visited])
    assert sorted(owner for of_program in owners for owner in of_program) == sorted([*range(4)] * 12)
    for at_once in itertools.islice(zip(*owners, strict=False), 12 // num_programs):
        assert max(Counter(at_once).values()) == -(-num_programs // 4)
