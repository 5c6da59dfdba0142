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


def test_nothing_of_the_interpreter_leaks(k: SimpleNamespace) -> None:
    import triton

    from odc.kernels import parts

    child = [sys.executable, "-c", "import os; print(os.environ.get('TRITON_INTERPRET'))"]
    assert subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip() == "None"
    assert os.environ.get("TRITON_INTERPRET") is None
    assert parts is k.parts  # the fixture's copy while it lasts
    assert not isinstance(parts._gather_parts_kernel, triton.JITFunction)
    assert isinstance(triton.jit(_a_kernel), triton.JITFunction)
    assert isinstance(triton.language.cdiv, triton.JITFunction)  # decorated when Triton was imported


def _a_kernel() -> None: ...


class TestAccumulate:
    def both(self, k: SimpleNamespace, total: torch.Tensor, addend: torch.Tensor) -> None:
        twin = total.clone()
        expected = total.double() + addend.double()
        k.accumulate.accumulate(total, addend)
        k.accumulate.accumulate_reference(twin, addend)
        assert torch.equal(total, twin)
        torch.testing.assert_close(total, expected.to(total.dtype), rtol=torch.finfo(total.dtype).eps, atol=0)

    @pytest.mark.parametrize("addend", FLOATS, ids=str)
    @pytest.mark.parametrize("total", [FP32, FP64], ids=str)
    def test_every_pair_of_dtypes(self, k: SimpleNamespace, total: torch.dtype, addend: torch.dtype) -> None:
        if total == FP32 and addend == FP64:
            with pytest.raises(ValueError, match="nothing wider than"):
                k.accumulate.accumulate(numbers(3, total), numbers(3, addend))
            return
        self.both(k, numbers(1023, total, 1), numbers(1023, addend, 2))

    @pytest.mark.parametrize("numel", SIZES)
    @pytest.mark.parametrize(("shift", "other"), [(0, 0), (1, 0), (0, 3), (5, 7)])
    def test_sizes_and_alignments(self, k: SimpleNamespace, numel: int, shift: int, other: int) -> None:
        self.both(k, shifted(numbers(numel, FP32, 1), shift), shifted(numbers(numel, BF16, 2), other))

    @pytest.mark.parametrize("numel", FAR.values(), ids=FAR)
    def test_far_block(self, k: SimpleNamespace, far: SparseMemory, numel: int) -> None:
        total = far.view(12 * GIB + (numel - 8) * 4, 8, FP32).fill_(1)
        addend = far.view(26 * GIB + (numel - 8) * 4, 8, FP32).copy_(numbers(8, FP32))
        blocks = k.launching.blocks(numel)
        with only_program(blocks - 1, blocks):
            heads = (far.view(12 * GIB, 1, FP32), far.view(26 * GIB, 1, FP32))
            k.accumulate._accumulate_kernel[(1,)](*heads, numel, VECTOR=1, BLOCK=4096)
        assert torch.equal(total, addend + 1)


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


@pytest.mark.parametrize("numel", [5, 4095, 4096, 4097])
@pytest.mark.parametrize("before", [1, 4])
@pytest.mark.parametrize(("room_name", "name", "result"), [("accumulate", "accumulate", 6), ("fill", "copy_cast", 1)])
def test_neighbours_are_left_alone(
    k: SimpleNamespace, numel: int, before: int, room_name: str, name: str, result: int
) -> None:
    room = shifted(torch.full((numel + 2 * before,), 5.0), 0)
    getattr(getattr(k, room_name), name)(room[before:-before], shifted(torch.ones(numel), 0))
    assert room.tolist() == [5.0] * before + [float(result)] * numel + [5.0] * before
