"""Layer 1: no processes. Device kernels in Triton's interpreter, on the CPU: each against its plain-torch twin and
against float64.

No GPU. This shows which elements a kernel touches, in which order and with which arithmetic. It cannot show what needs
a GPU or the compiled code (that it exists: test_kernels_aot.py; that it does the same, as far as a CPU can tell:
test_kernels_ptx.py, which runs these tests too): that peers' memory is visible when it should be, that programs which
really run side by side do not disturb each other, nor any speed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_cases import SparseMemory, numbers, only_program, shifted

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (BF16, FP16, FP32, FP64)
SIZES = (1, 3, 1023, 4095, 4096, 4097, 9001)
GIB = 1 << 30

# Beyond 2**31 bytes with an index that fits 32 bits, and beyond 2**31 elements: fp32 elements.
FAR = {"bytes": (1 << 29) + 4096 + 8, "elements": (1 << 31) + 4096 + 8}
"""With the zeros around it that 32-bit arithmetic would reach: 8 GiB to each side of what is addressed."""


@pytest.fixture
def far() -> Iterator[SparseMemory]:
    with SparseMemory(40 * GIB) as memory:
        yield memory


def shards(world_size: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [shifted(numbers(numel, dtype, seed=rank), 0) for rank in range(world_size)]


def test_nothing_of_the_interpreter_leaks(k: SimpleNamespace) -> None:
    import triton

    from odc.kernels import gather

    child = [sys.executable, "-c", "import os; print(os.environ.get('TRITON_INTERPRET'))"]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == "None"
    assert os.environ.get("TRITON_INTERPRET") is None
    assert gather is k.gather  # the fixture's copy while it lasts
    assert not isinstance(gather._gather_kernel, triton.JITFunction)
    assert isinstance(triton.jit(_a_kernel), triton.JITFunction)
    assert isinstance(triton.language.cdiv, triton.JITFunction)  # decorated when Triton was imported


def _a_kernel() -> None: ...


class TestGather:
    def both(self, k: SimpleNamespace, buffers: list[torch.Tensor], numel: int, out: torch.Tensor, **how: Any) -> None:
        """Kernel and twin leave the same bits in ``out``, and the float64 reference agrees."""
        table = k.peers.PeerTable.of(buffers)
        twin = out.clone()
        how["source_dtype"] = buffers[0].dtype
        k.gather.gather_from_peers(out, table, numel, **how)
        k.gather.gather_from_peers_reference(twin, table, numel, **how)
        assert torch.equal(out, twin)
        offset = how.get("offset", 0)
        expected = torch.cat([b[offset : offset + numel].double() for b in buffers]).to(out.dtype)
        if how.get("own_in_place"):
            return
        torch.testing.assert_close(out, expected, rtol=torch.finfo(out.dtype).eps, atol=1e-300)

    @pytest.mark.parametrize("source", FLOATS, ids=str)
    @pytest.mark.parametrize("out", FLOATS, ids=str)
    def test_every_pair_of_dtypes(self, k: SimpleNamespace, source: torch.dtype, out: torch.dtype) -> None:
        buffers, result = shards(3, 1023, source), torch.full((3 * 1023,), -7, dtype=out)
        if source == FP64 and out.itemsize == 2:
            with pytest.raises(ValueError, match="rounded twice"):
                self.both(k, buffers, 1023, result, rank=1)
            return
        self.both(k, buffers, 1023, result, rank=1)

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize("offset", [0, 1, 8])
    @pytest.mark.parametrize("shift", [0, 3])
    def test_sizes_and_alignments(self, k: SimpleNamespace, numel: int, offset: int, shift: int) -> None:
        out = shifted(torch.full((2 * numel,), -7, dtype=BF16), shift)
        self.both(k, shards(2, numel + offset, BF16), numel, out, rank=0, offset=offset)

    @pytest.mark.parametrize("numel", [5, 4095, 4096, 4097, 4100])
    @pytest.mark.parametrize("before", [1, 4])
    def test_neighbours_are_left_alone(self, k: SimpleNamespace, numel: int, before: int) -> None:
        room = shifted(torch.full((2 * numel + 2 * before,), -7.0), 0)
        inner = room[before:-before]
        table = k.peers.PeerTable.of(buffers := shards(2, numel, FP32))
        k.gather.gather_from_peers(inner, table, numel, rank=0, source_dtype=FP32)
        assert (room[:before] == -7).all()
        assert (room[-before:] == -7).all()
        assert torch.equal(inner, torch.cat(buffers))
        own = torch.full((2 * numel,), -7.0)  # the row of rank 1 comes first and must not reach into the next
        k.gather.gather_from_peers(own, table, numel, rank=1, source_dtype=FP32, own_in_place=True)
        assert (own[numel:] == -7).all()

    @pytest.mark.parametrize("num_programs", [1, 2, 3, 64])
    def test_any_number_of_programs(self, k: SimpleNamespace, num_programs: int) -> None:
        table = k.peers.PeerTable.of(buffers := shards(3, 9001, FP32))
        out = torch.zeros(3 * 9001)
        k.gather.gather_from_peers(out, table, 9001, rank=2, source_dtype=FP32, num_programs=num_programs)
        assert torch.equal(out, torch.cat(buffers))

    @pytest.mark.parametrize("rank", range(4))
    def test_rotation(self, k: SimpleNamespace, rank: int) -> None:
        """The owners that s steps visit are the s ranks after this one: its own row is the last."""
        table = k.peers.PeerTable.of(buffers := shards(4, 5, FP32))
        for steps in range(5):
            out = torch.full((4, 5), -7.0)
            arguments = (out, table.tensor, rank, 4, steps, 5, 5, 0)
            k.gather._gather_kernel[(2,)](*arguments, SOURCE=k.launching.DTYPES[FP32], VECTOR=1, BLOCK=4096)
            visited = [(rank + 1 + step) % 4 for step in range(steps)]
            for owner in range(4):
                expected = buffers[owner] if owner in visited else torch.full((5,), -7.0)
                assert torch.equal(out[owner], expected)
        assert k.peers.rotated(rank, 4) == visited

    @pytest.mark.parametrize("rank", range(3))
    def test_own_row_in_place(self, k: SimpleNamespace, rank: int) -> None:
        out = torch.full((3 * 4097,), -7.0)
        self.both(k, shards(3, 4097, FP32), 4097, out, rank=rank, own_in_place=True)
        rows = out.view(3, 4097)
        assert (rows[rank] == -7).all()
        assert (rows[(rank + 1) % 3] != -7).all()

    @pytest.mark.parametrize("offset", FAR.values(), ids=FAR)
    def test_far_offset(self, k: SimpleNamespace, far: SparseMemory, offset: int) -> None:
        values = far.view(12 * GIB + offset * 4, 5, FP32).copy_(numbers(5, FP32))
        table = k.peers.PeerTable.build([far.address + 12 * GIB], "cpu")
        out = torch.zeros(5)
        k.gather.gather_from_peers(out, table, 5, rank=0, source_dtype=FP32, offset=offset)
        assert torch.equal(out, values)

    @pytest.mark.parametrize("stride", FAR.values(), ids=FAR)
    def test_far_row(self, k: SimpleNamespace, far: SparseMemory, stride: int) -> None:
        table = k.peers.PeerTable.of(buffers := shards(2, 5, FP32))
        out = far.view(12 * GIB, 5, FP32)
        arguments = (out, table.tensor, 0, 2, 1, 5, stride, 0)  # one step: the row of rank 1
        k.gather._gather_kernel[(1,)](*arguments, SOURCE=k.launching.DTYPES[FP32], VECTOR=1, BLOCK=4096)
        assert torch.equal(far.view(12 * GIB + stride * 4, 5, FP32), buffers[1])

    @pytest.mark.parametrize("numel", FAR.values(), ids=FAR)
    def test_far_block(self, k: SimpleNamespace, far: SparseMemory, numel: int) -> None:
        """The last program of a shard this large: eight elements, behind all the others."""
        values = far.view(12 * GIB + (numel - 8) * 4, 8, FP32).copy_(numbers(8, FP32))
        table = k.peers.PeerTable.build([far.address + 12 * GIB], "cpu")
        out = far.view(26 * GIB, 8, FP32)
        blocks = k.launching.blocks(numel)
        with only_program(blocks - 1, blocks):
            arguments = (out, table.tensor, 0, 1, 1, numel, numel, 0)
            k.gather._gather_kernel[(1,)](*arguments, SOURCE=k.launching.DTYPES[FP32], VECTOR=1, BLOCK=4096)
        assert torch.equal(far.view(26 * GIB + (numel - 8) * 4, 8, FP32), values)


class TestAccumulate:
    def both(self, k: SimpleNamespace, total: torch.Tensor, addend: torch.Tensor, first: bool) -> None:
        twin = total.clone()
        expected = addend.double() if first else total.double() + addend.double()
        k.accumulate.accumulate(total, addend, first=first)
        k.accumulate.accumulate_reference(twin, addend, first=first)
        assert torch.equal(total, twin)
        torch.testing.assert_close(total, expected.to(total.dtype), rtol=torch.finfo(total.dtype).eps, atol=0)

    @pytest.mark.parametrize("addend", FLOATS, ids=str)
    @pytest.mark.parametrize("total", [FP32, FP64], ids=str)
    @pytest.mark.parametrize("first", [False, True])
    def test_every_pair_of_dtypes(
        self, k: SimpleNamespace, total: torch.dtype, addend: torch.dtype, first: bool
    ) -> None:
        if total == FP32 and addend == FP64:
            with pytest.raises(ValueError, match="nothing wider than"):
                k.accumulate.accumulate(numbers(3, total), numbers(3, addend), first=first)
            return
        self.both(k, numbers(1023, total, 1), numbers(1023, addend, 2), first)

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize(("shift", "other"), [(0, 0), (1, 0), (0, 3), (5, 7)])
    def test_sizes_and_alignments(self, k: SimpleNamespace, numel: int, shift: int, other: int) -> None:
        self.both(k, shifted(numbers(numel, FP32, 1), shift), shifted(numbers(numel, BF16, 2), other), False)

    def test_first_does_not_read(self, k: SimpleNamespace) -> None:
        total = torch.full((4097,), torch.nan)
        self.both(k, total, numbers(4097, BF16), True)

    @pytest.mark.parametrize("numel", [5, 4095, 4096, 4097])
    @pytest.mark.parametrize("before", [1, 4])
    def test_neighbours_are_left_alone(self, k: SimpleNamespace, numel: int, before: int) -> None:
        room = shifted(torch.full((numel + 2 * before,), 5.0), 0)
        k.accumulate.accumulate(room[before:-before], shifted(torch.ones(numel), 0))
        assert (room[:before] == 5).all()
        assert (room[-before:] == 5).all()
        assert (room[before:-before] == 6).all()

    @pytest.mark.parametrize("first", [False, True])
    @pytest.mark.parametrize("numel", FAR.values(), ids=FAR)
    def test_far_block(self, k: SimpleNamespace, far: SparseMemory, numel: int, first: bool) -> None:
        total = far.view(12 * GIB + (numel - 8) * 4, 8, FP32).fill_(1)
        addend = far.view(26 * GIB + (numel - 8) * 4, 8, FP32).copy_(numbers(8, FP32))
        blocks = k.launching.blocks(numel)
        with only_program(blocks - 1, blocks):
            heads = (far.view(12 * GIB, 1, FP32), far.view(26 * GIB, 1, FP32))
            k.accumulate._accumulate_kernel[(1,)](*heads, numel, FIRST=first, VECTOR=1, BLOCK=4096)
        assert torch.equal(total, addend if first else addend + 1)


class TestScatterAccumulate:
    def both(self, k: SimpleNamespace, sums: list[torch.Tensor], grads: torch.Tensor, **how: Any) -> None:
        twins = [total.clone() for total in sums]
        table, twin_table = k.peers.PeerTable.of(sums), k.peers.PeerTable.of(twins)
        numel, offset = grads.numel() // len(sums), how.get("offset", 0)
        expected = [total.double() for total in sums]
        for owner, total in enumerate(expected):
            total[offset : offset + numel] += grads[owner * numel : (owner + 1) * numel].double()
        k.accumulate.scatter_accumulate_direct(table, grads, **how)
        k.accumulate.scatter_accumulate_direct_reference(twin_table, grads, **how)
        for total, twin, reference in zip(sums, twins, expected, strict=True):
            assert torch.equal(total, twin)
            torch.testing.assert_close(total, reference.float(), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
    @pytest.mark.parametrize("rank", range(3))
    def test_every_dtype_and_rank(self, k: SimpleNamespace, dtype: torch.dtype, rank: int) -> None:
        self.both(k, shards(3, 1023, FP32), numbers(3 * 1023, dtype, 9), rank=rank)

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize(("offset", "shift"), [(0, 0), (4, 0), (1, 0), (0, 3)])
    def test_sizes_and_alignments(self, k: SimpleNamespace, numel: int, offset: int, shift: int) -> None:
        sums = shards(2, numel + offset + 2, FP32)
        self.both(k, sums, shifted(numbers(2 * numel, BF16, 9), shift), rank=1, offset=offset)

    def test_all_clients_add(self, k: SimpleNamespace) -> None:
        sums = [torch.zeros(4097) for _ in range(3)]
        table = k.peers.PeerTable.of(sums)
        for rank in range(3):
            grads = torch.arange(3, dtype=FP32).repeat_interleave(4097) + 1
            k.accumulate.scatter_accumulate_direct(table, grads, rank=rank)
        for owner, total in enumerate(sums):
            assert (total == 3 * (owner + 1)).all()

    @pytest.mark.parametrize("rank", range(4))
    def test_rotation(self, k: SimpleNamespace, rank: int) -> None:
        for steps in range(5):
            sums = [torch.zeros(5) for _ in range(4)]
            table = k.peers.PeerTable.of(sums)
            arguments = (table.tensor, torch.ones(20), rank, 4, steps, 5, 5, 0)
            k.accumulate._scatter_accumulate_kernel[(2,)](*arguments, VECTOR=1, BLOCK=4096)
            visited = {(rank + 1 + step) % 4 for step in range(steps)}
            assert [total.sum().item() for total in sums] == [5.0 * (owner in visited) for owner in range(4)]

    @pytest.mark.parametrize("offset", FAR.values(), ids=FAR)
    def test_far_offset(self, k: SimpleNamespace, far: SparseMemory, offset: int) -> None:
        table = k.peers.PeerTable.build([far.address + 12 * GIB], "cpu")
        k.accumulate.scatter_accumulate_direct(table, torch.ones(5), rank=0, offset=offset)
        assert (far.view(12 * GIB + offset * 4, 5, FP32) == 1).all()

    @pytest.mark.parametrize("numel", FAR.values(), ids=FAR)
    def test_far_row_and_block(self, k: SimpleNamespace, far: SparseMemory, numel: int) -> None:
        """The last program of the first step: rank 1's row begins ``numel`` elements into the gradients."""
        values = far.view(8 * GIB + (2 * numel - 8) * 4, 8, FP32).copy_(numbers(8, FP32))
        table = k.peers.PeerTable.build([64, far.address + 30 * GIB - numel * 4], "cpu")
        blocks = k.launching.blocks(numel)
        with only_program(blocks - 1, blocks):
            arguments = (table.tensor, far.view(8 * GIB, 1, FP32), 0, 2, 1, numel, numel, 0)
            k.accumulate._scatter_accumulate_kernel[(1,)](*arguments, VECTOR=1, BLOCK=4096)
        assert torch.equal(far.view(30 * GIB - 8 * 4, 8, FP32), values)


class TestFillAndCopy:
    @pytest.mark.parametrize("dtype", FLOATS, ids=str)
    @pytest.mark.parametrize("value", [0.0, 0.5, -3.14159274101257324, float("inf"), 1e-30])
    def test_fill(self, k: SimpleNamespace, dtype: torch.dtype, value: float) -> None:
        value = torch.tensor(value, dtype=FP32).item()
        for numel in SIZES:
            for shift in (0, 1):
                room = shifted(torch.full((numel + 16,), 7, dtype=dtype), 0)
                twin = room.clone()
                k.fill.fill(room[8 + shift : 8 + shift + numel], value)
                k.fill.fill_reference(twin[8 + shift : 8 + shift + numel], value)
                assert torch.equal(room, twin)

    @pytest.mark.parametrize("source", FLOATS, ids=str)
    @pytest.mark.parametrize("out", FLOATS, ids=str)
    def test_every_cast(self, k: SimpleNamespace, source: torch.dtype, out: torch.dtype) -> None:
        values = numbers(4097, source)
        result, twin = torch.empty(4097, dtype=out), torch.empty(4097, dtype=out)
        if source == FP64 and out.itemsize == 2:
            with pytest.raises(ValueError, match="rounded twice"):
                k.fill.copy_cast(result, values)
            return
        k.fill.copy_cast(result, values)
        k.fill.copy_cast_reference(twin, values)
        assert torch.equal(result, twin)

    def test_ties_go_to_even(self, k: SimpleNamespace) -> None:
        values = torch.tensor([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8])
        out = torch.empty(5, dtype=BF16)
        k.fill.copy_cast(out, values)
        assert out.tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0]

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize(("shift", "other"), [(0, 0), (1, 0), (0, 3)])
    def test_sizes_and_alignments(self, k: SimpleNamespace, numel: int, shift: int, other: int) -> None:
        source = shifted(numbers(numel, FP32), other)
        out = shifted(torch.zeros(numel, dtype=BF16), shift)
        k.fill.copy_cast(out, source)
        assert torch.equal(out, source.to(BF16))

    @pytest.mark.parametrize("numel", [5, 4095, 4096, 4097])
    @pytest.mark.parametrize("before", [1, 4])
    def test_neighbours_are_left_alone(self, k: SimpleNamespace, numel: int, before: int) -> None:
        room = shifted(torch.full((numel + 2 * before,), 5.0), 0)
        k.fill.copy_cast(room[before:-before], shifted(torch.ones(numel), 0))
        assert (room[:before] == 5).all()
        assert (room[-before:] == 5).all()
        assert (room[before:-before] == 1).all()

    @pytest.mark.parametrize("numel", FAR.values(), ids=FAR)
    def test_far_block(self, k: SimpleNamespace, far: SparseMemory, numel: int) -> None:
        values = far.view(12 * GIB + (numel - 8) * 4, 8, FP32).copy_(numbers(8, FP32))
        out = far.view(26 * GIB + (numel - 8) * 4, 8, FP32)
        blocks = k.launching.blocks(numel)
        heads = (far.view(26 * GIB, 1, FP32), far.view(12 * GIB, 1, FP32))
        with only_program(blocks - 1, blocks):
            k.fill._copy_cast_kernel[(1,)](*heads, numel, VECTOR=1, BLOCK=4096)
            assert torch.equal(out, values)
            k.fill._fill_kernel[(1,)](heads[0], 0.5, numel, VECTOR=1, BLOCK=4096)
            assert (out == 0.5).all()
