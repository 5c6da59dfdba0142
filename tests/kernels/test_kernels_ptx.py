"""Layer 1: no processes. Compiled kernels on the CPU: launchers compile them for sm_90, and the PTX, translated to C,
runs thread by thread: the project's own checks of each kernel against its twin, to the bit.

No GPU. This shows what the compiled code computes, for each thread, and that every access is aligned to its size and
stays in memory that belongs to the launch. It cannot show the order of memory between threads and GPUs, atomics that
race, a barrier that is missing, what ptxas makes of the PTX (test_kernels_aot.py reads that), scheduling, or any speed.
Kernels that are linked with NVSHMEM's device library are not among them (`ptx_driver.NOT_COVERED`).
"""

from __future__ import annotations

import ctypes
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_kernels_interpreted
import test_kernels_parts
import test_kernels_slots
import torch
from kernel_cases import SparseMemory
from ptx_cpu import AccessError, Program, PtxError
from ptx_driver import COVERED, NOT_COVERED, PtxDriver, compiled, modules

from odc.bench.gpu import kernels
from odc.bench.gpu.setting import CheckFailedError
from odc.kernels import aot_list, fill

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
HOST = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps what has been compiled."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def driver(folder: Path) -> Iterator[PtxDriver]:
    with compiled(folder) as driver:
        yield driver


# The project's checks


def test_each_kernel_aligned_and_not(driver: PtxDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first case of each part of the check that GPUs are to pass. Whole vectors only, some elements more, and at
    odd addresses; infinities, NaN and halfway cases are in."""
    monkeypatch.setattr(kernels, "_casts", lambda: [(FP32, BF16)])
    for numel, offset in ((4104, 0), (4099, 0), (4099, 1)):
        monkeypatch.setattr(kernels, "OFFSETS", (offset,))
        for part in kernels.PARTS:
            next(part(HOST, (numel,)))
    for part in kernels.PARTS:  # some have cases of their own
        list(part(HOST, ()))
    wanted = {(entry.kernel.__name__, entry.constants["VECTOR"] > 1) for entry in COVERED}
    found = {(entry.kernel.__name__, entry.constants["VECTOR"] > 1) for entry in COVERED if entry.name in driver.ran}
    assert found == wanted


@pytest.mark.extended
def test_every_kernel_of_the_list(driver: PtxDriver) -> None:
    """All cases of that check, and with them all kernels that are compiled ahead of time."""
    for part in kernels.PARTS:
        for _ in part(HOST, kernels.SIZES):
            pass
    assert driver.ran == {entry.name for entry in aot_list.entries()} - set(NOT_COVERED)


@pytest.mark.parametrize(
    ("source", "out"), [(FP16, FP32), (BF16, FP32), (FP32, FP16), (FP32, BF16)], ids=lambda dtype: str(dtype)[6:]
)
def test_every_number_of_16_bits(driver: PtxDriver, source: torch.dtype, out: torch.dtype) -> None:
    """All there are, and what lies halfway between two of them, or next to that."""
    words = torch.arange(1 << 16).to(torch.int32)
    if source == FP32:
        exact = words.to(torch.int16).view(out).float().view(torch.int32)
        half = 1 << 12 if out == FP16 else 1 << 15  # the bits that fp32 has more
        values = torch.cat([exact + bits for bits in (0, 1, half - 1, half, half + 1)]).view(FP32)
    else:
        values = words.to(torch.int16).view(source)
    result = torch.empty(values.numel(), dtype=out)
    fill.copy_cast(result, values)
    integers = torch.int32 if out == FP32 else torch.int16
    same = result.view(integers) == values.to(out).view(integers)
    assert (same | (result.isnan() & values.isnan())).all()


# The tests of kernels in the interpreter, with compiled ones

INTERPRETED = (test_kernels_interpreted, test_kernels_slots, test_kernels_parts)


@pytest.fixture
def k(driver: PtxDriver, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    for module in INTERPRETED:
        monkeypatch.setattr(module, "only_program", driver.only_program)

    def enter(memory: SparseMemory) -> SparseMemory:
        driver.memory.others.append((memory.address, memory.address + memory.nbytes))
        return memory

    monkeypatch.setattr(SparseMemory, "__enter__", enter)
    return modules()


far, rows = test_kernels_interpreted.far, test_kernels_parts.rows  # fixtures
for _module in INTERPRETED:
    for _name, _class in inspect.getmembers(_module, inspect.isclass):
        if _name.startswith("Test"):
            _compiled = f"{_name}_{_module.__name__.removeprefix('test_kernels_')}"
            globals()[_compiled] = pytest.mark.extended(type(_compiled, (_class,), {}))


# Faults that are planted


def planted(driver: PtxDriver, monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str) -> None:
    """One case of accumulate, with the first such instruction of its PTX replaced."""

    def change(ptx: str) -> str:
        changed = re.sub(pattern, replacement, ptx, count=1)
        assert changed != ptx
        return changed

    driver.change = change
    monkeypatch.setattr(kernels, "OFFSETS", (0,))
    next(kernels._accumulate(HOST, (4099,)))


def test_a_wrong_constant_is_seen(driver: PtxDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckFailedError, match="accumulate of 4099"):
        planted(driver, monkeypatch, r"(add\.s64\s+%rd\d+, %rd\d+, )4096;", r"\g<1>4080;")


@pytest.mark.parametrize("kind", ["ld", "st"])
def test_a_misaligned_vector_is_seen(driver: PtxDriver, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with pytest.raises(
        AccessError, match=rf"bytes at 0x\w+: misaligned; program 0, thread 0, line \d+ .* {kind}\.global"
    ):
        planted(driver, monkeypatch, rf"({kind}\.global\.v[^\n]*%rd\d+ \+ )0", r"\g<1>4")


@pytest.mark.parametrize("kind", ["ld", "st"])
def test_a_mask_that_does_not_mask_is_seen(driver: PtxDriver, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    with pytest.raises(AccessError, match=rf"outside of the memory of this launch; program 1, .*{kind}\.global"):
        planted(driver, monkeypatch, rf"@%p\d+ ({kind}\.global\.v)", r"\1")


# The translation

TEMPLATE = """\
.version 8.7
.target sm_90a
.address_size 64
.visible .entry kernel(
	.param .u64 .ptr .global .align 1 kernel_param_0,
	.param .u32 kernel_param_1
)
.reqntid 2
{
	.reg .pred 	%p<4>;
	.reg .b16 	%rs<8>;
	.reg .b32 	%r<8>;
	.reg .b64 	%rd<8>;
	@BODY@
	ret;
}
"""
OF_TWO_WARPS = ".extern .shared .align 16 .b8 global_smem[];\n" + TEMPLATE.replace(".reqntid 2", ".reqntid 64")

REFUSED = [
    "bar.sync 1;",
    "bar.sync 0, 64;",
    "@%p1 bar.sync 0;",
    "bar.warp.sync -1;",
    "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",  # of two threads
    "redux.sync.add.s32 %r1, %r2, -1;",
    "vote.sync.any.pred %p1, %p2, -1;",
    "ld.shared.b32 %r1, [%rd1];",
    "st.shared.b32 [%rd1], %r1;",
    "ld.global.b32 %r1, [global_smem];",
    "atom.shared.add.f32 %r1, [%r2], %r3;",
    ".shared .align 16 .b8 room[64];",
    "ld.volatile.global.b32 %r1, [%rd1];",
    "ld.global.nc.b32 %r1, [%rd1];",
    "ld.acquire.sys.global.b32 %r1, [%rd1];",
    "ld.global.L1::evict_last.L2::cache_hint.b32 %r1, [%rd1], %rd2;",
    "ld.global.v2.b32 {%r1}, [%rd1];",
    "ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%rd1];",
    "ld.global.b32 %r1, [%r2];",
    "ld.param.b64 %rd1, [kernel_param_1];",
    "ld.param.b64 %rd1, [kernel_param_0+4];",
    "atom.global.gpu.relaxed.add.f32 %r1, [%rd1], %r2;",
    "atom.global.sys.acq_rel.add.f32 %r1, [%rd1], %r2;",
    "atom.global.sys.relaxed.add.u32 %r1, [%rd1], %r2;",
    "atom.global.sys.relaxed.max.f32 %r1, [%rd1], %r2;",
    "add.sat.s32 %r1, %r2, %r3;",
    "add.rz.f32 %r1, %r2, %r3;",
    "add.ftz.f32 %r1, %r2, %r3;",
    "add.s32 %r1, %rd2, %r3;",
    "add.s32 %rd1, %r2, %r3;",
    "add.s32 %r1, %r2;",
    "add.s32 %r1, %r2, %r3, %r4;",
    "mul.f32 %r1, %r2, %r3;",
    "setp.lt.and.s32 %p1, %r1, %r2, %p2;",
    "setp.lt.b32 %p1, %r1, %r2;",
    "setp.lt.f32 %p1, %r1, %r2;",
    "cvt.rz.bf16.f32 %rs1, %r1;",
    "cvt.rn.relu.bf16.f32 %rs1, %r1;",
    "cvt.rn.bf16x2.f32 %r1, %r2;",
    "cvt.sat.u16.u32 %rs1, %r1;",
    "mov.u32 %r1, %laneid;",
    "mov.u32 %r1, %tid.y;",
    "mov.b64 %rd1, %globaltimer;",
    "call.uni (retval0), somewhere, (param0);",
    "@%r1 bra $L__BB0_1;",
    ".reg .b32 other;",
    "exit;",
    "membar.sys;",
    "{",
]

REFUSED_IN_WARPS = [
    "shfl.sync.bfly.b32 %r1, %r2, 1, 31, 15;",
    "shfl.sync.bfly.b32 %r1, %r2, 1, 15, -1;",
    "shfl.sync.up.b32 %r1, %r2, %r3, 0, -1;",
    "shfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1;",
    "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;",
    "@%p1 redux.sync.add.s32 %r1, %r2, -1;",
    "redux.sync.min.s32 %r1, %r2, -1;",
    "redux.sync.max.u32 %r1, %r2, -1;",
]


@pytest.mark.parametrize(
    ("template", "text"),
    [(TEMPLATE, text) for text in REFUSED] + [(OF_TWO_WARPS, text) for text in REFUSED_IN_WARPS],
)
def test_what_is_not_known_is_refused(template: str, text: str, tmp_path: Path) -> None:
    number = template[: template.index("@BODY@")].count("\n") + 1
    with pytest.raises(PtxError, match=re.escape(f"line {number} of the PTX, {text!r}: ")):
        Program(template.replace("@BODY@", text), tmp_path)


@pytest.mark.parametrize("text", [".shared .align 4 .b8 a[4];", ".func somewhere()", ".const .align 8 .b8 state[776];"])
def test_nothing_else_may_be_beside_the_kernel(text: str, tmp_path: Path) -> None:
    for ptx in (TEMPLATE.replace(".visible", f"{text}\n.visible"), f"{TEMPLATE}{text}\n"):
        with pytest.raises(PtxError, match=r"line \d+ of the PTX, .* not known here"):
            Program(ptx, tmp_path)


def bits(value: float, dtype: torch.dtype) -> int:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return int(torch.tensor(value, dtype=dtype).view(integers)) % (1 << 8 * dtype.itemsize)


# Each: instructions whose first operand is number 0 of its kind, and whose others are numbers 1 to 3; what these hold,
# and the result. %r1, %rs1 and %p1 are the low bits of %rd1.
INSTRUCTIONS: list[tuple[str, tuple[int, ...], int]] = [
    ("add.s32 %r0, %r1, %r2;", (2**31 - 1, 1), 2**31),
    ("add.s64 %rd0, %rd1, -8;", (4,), -4),
    ("sub.s64 %rd0, %rd1, %rd2;", (3, 5), -2),
    ("mul.lo.s32 %r0, %r1, %r2;", (-3, 2**31 - 1), -3 * (2**31 - 1)),
    ("mul.lo.s64 %rd0, %rd1, %rd2;", (-3, 2**40), -3 * 2**40),
    ("mad.lo.s64 %rd0, %rd1, %rd2, %rd3;", (2**33, 5, -1), 5 * 2**33 - 1),
    ("rem.s32 %r0, %r1, %r2;", (-7, 3), -1),
    ("mul.wide.u32 %rd0, %r1, %r2;", (2**32 - 1, 4096), (2**32 - 1) * 4096),
    ("mul.wide.s32 %rd0, %r1, %r2;", (2**32 - 1, 4096), -4096),
    ("mad.wide.s32 %rd0, %r1, 4, %rd3;", (-2, 0, 2**40), 2**40 - 8),
    ("mad.wide.u32 %rd0, %r1, 4, %rd3;", (-2, 0, 2**40), 2**40 + 4 * (2**32 - 2)),
    ("and.b32 %r0, %r1, -4;", (7,), 4),
    ("or.b64 %rd0, %rd1, %rd2;", (2**40, 5), 2**40 + 5),
    ("xor.b16 %rs0, %rs1, %rs2;", (0xF0F0, 0xFFFF), 0x0F0F),
    ("not.b16 %rs0, %rs1;", (1,), 0xFFFE),
    ("neg.s64 %rd0, %rd1;", (5,), -5),
    ("min.s64 %rd0, %rd1, 4096;", (-1,), -1),
    ("min.u32 %r0, %r1, 4096;", (-1,), 4096),
    ("max.s32 %r0, %r1, %r2;", (-1, 3), 3),
    ("shl.b32 %r0, %r1, %r2;", (3, 31), 2**31),
    ("shl.b32 %r0, %r1, %r2;", (3, 32), 0),
    ("shr.u32 %r0, %r1, 30;", (-1,), 3),
    ("shr.s32 %r0, %r1, 31;", (-5,), -1),
    ("shr.s64 %rd0, %rd1, 70;", (-5,), -1),
    ("shr.u64 %rd0, %rd1, 64;", (-5,), 0),
    ("setp.lt.s32 %p0, %r1, %r2; selp.b32 %r0, 7, %r3, %p0;", (-1, 0, 9), 7),
    ("setp.lt.u32 %p0, %r1, %r2; selp.b32 %r0, 7, %r3, %p0;", (-1, 0, 9), 9),
    ("setp.le.s64 %p0, %rd1, %rd2; selp.b64 %rd0, %rd1, %rd3, %p0;", (5, 5, 9), 5),
    ("setp.eq.b32 %p0, %r1, %r2; not.pred %p0, %p0; selp.b32 %r0, 1, 0, %p0;", (2**32, 0), 0),
    ("and.pred %p0, %p1, %p2; selp.b32 %r0, 1, 0, %p0;", (1, 0), 0),
    ("or.pred %p0, %p1, %p2; selp.b32 %r0, 1, 0, %p0;", (1, 0), 1),
    ("bfe.u32 %r0, %r1, 5, 3;", (0b1101_00000,), 0b101),
    ("mov.b32 %r0, {%rs1, %rs2};", (0x1234, 0x5678), 0x56781234),
    ("mov.b64 {%r3, %r0}, %rd1;", (0x5678_0000_1234,), 0x5678),
    ("mov.b64 {_, %r0}, %rd1;", (0x5678_0000_1234,), 0x5678),
    ("mov.b32 %r0, 0f3F800000;", (), bits(1.0, FP32)),
    ("mov.u32 %r0, %tid.x;", (), 1),
    ("mov.u32 %r0, %ntid.x;", (), 2),
    ("mov.u32 %r0, %ctaid.x;", (), 2),
    ("mov.u32 %r0, %nctaid.x;", (), 3),
    ("ld.param.b32 %r0, [kernel_param_1];", (), -3),
    ("cvt.s64.s32 %rd0, %r1;", (-2,), -2),
    ("cvt.u64.u32 %rd0, %r1;", (-2,), 2**32 - 2),
    ("cvt.s64.s32 %rd0, %rd1;", (2**40 + 2**32 - 2,), -2),
    ("cvt.u32.u64 %r0, %rd1;", (2**32 + 5,), 5),
    ("cvt.rn.f32.f64 %r0, %rd1;", (bits(1 + 2**-24, FP64),), bits(1.0, FP32)),
    ("cvt.f64.f32 %rd0, %r1;", (bits(0.1, FP32),), bits(torch.tensor(0.1).item(), FP64)),
    ("cvt.f64.bf16 %rd0, %rs1;", (bits(-1.5, BF16),), bits(-1.5, FP64)),
    ("cvt.f64.f16 %rd0, %rs1;", (1,), bits(2**-24, FP64)),
    ("cvt.rn.bf16x2.f32 %r0, %r1, %r2;", (bits(2, FP32), bits(3, FP32)), bits(2, BF16) << 16 | bits(3, BF16)),
    ("cvt.rn.f16x2.f32 %r0, %r1, %r2;", (bits(2, FP32), bits(3, FP32)), bits(2, FP16) << 16 | bits(3, FP16)),
    ("add.f32 %r0, %r1, %r2;", (bits(1, FP32), bits(2**-24, FP32)), bits(1, FP32)),
    ("sub.f64 %rd0, %rd1, %rd2;", (bits(1, FP64), bits(2**-53, FP64)), bits(1 - 2**-53, FP64)),
    (
        "fma.rn.f32 %r0, %r1, %r1, %r3;",
        (bits(1 + 2**-12, FP32), 0, bits(-1 - 2**-11, FP32)),
        bits(2**-24, FP32),
    ),
    ("mov.b32 %r0, 1; @%p1 bra $over; mov.b32 %r0, 2; $over:", (1,), 1),
    ("mov.b32 %r0, 1; @!%p1 bra.uni $under; mov.b32 %r0, 2; $under:", (1,), 2),
    ("@!%p1 mov.b32 %r0, 1; @%p1 mov.b32 %r0, 2;", (1,), 2),
    ("st.global.v2.b32 [%rd4+32], {%r1, %r2}; ld.global.cg.b64 %rd0, [ %rd4 + 32 ];", (5, 6), 6 << 32 | 5),
    ("st.global.b64 [%rd4+32], %rd1; ld.global.L1::evict_last.v2.b32 {%r3, %r0}, [%rd4+32];", (6 << 32,), 6),
    (
        "st.global.b32 [%rd4+32], %r1; atom.global.sys.relaxed.add.f32 %r3, [%rd4+32], %r2; "
        "ld.global.b32 %r0, [%rd4+32];",
        (bits(1, FP32), bits(2, FP32)),
        bits(3, FP32),
    ),
    (
        "st.global.b32 [%rd4+32], %r1; atom.global.sys.relaxed.add.f32 %r0, [%rd4+32], %r2;",
        (bits(1, FP32), bits(2, FP32)),
        bits(1, FP32),
    ),
    (
        "st.global.v2.b32 [%rd4+32], {%r1, %r2}; red.relaxed.sys.global.add.v2.f32 [%rd4+32], {%r2, %r2}; "
        "ld.global.b32 %r0, [%rd4+36];",
        (bits(1, FP32), bits(2, FP32)),
        bits(4, FP32),
    ),
    (  # subnormal numbers are taken for zero
        "st.global.b32 [%rd4+32], %r1; red.relaxed.sys.global.add.f32 [%rd4+32], %r2; ld.global.b32 %r0, [%rd4+32];",
        (0x8000_0001, 0x8000_0002),
        0x8000_0000,
    ),
]


def test_instructions(tmp_path: Path) -> None:
    """All of them in one kernel; each finds its operands in memory, and leaves the result there."""
    room, body = (ctypes.c_int64 * (8 * len(INSTRUCTIONS)))(), ["ld.param.b64 %rd4, [kernel_param_0];"]
    for number, (text, values, _) in enumerate(INSTRUCTIONS):
        for operand in range(1, 4):
            room[8 * number + operand] = values[operand - 1] if operand <= len(values) else 0
            body.append(f"ld.global.b64 %rd{operand}, [%rd4+{8 * operand}];")
            body.append(f"cvt.u32.u64 %r{operand}, %rd{operand}; cvt.u16.u32 %rs{operand}, %r{operand};")
            body.append(f"setp.ne.s64 %p{operand}, %rd{operand}, 0;")
        body.append("mov.b64 %rd0, 0; mov.b32 %r0, 0; mov.b16 %rs0, 0;")
        body.append(text)
        if "%r0" in text:
            body.append("cvt.u64.u32 %rd0, %r0;")
        if "%rs0" in text:
            body.append("cvt.u64.u16 %rd0, %rs0;")
        body.append("st.global.b64 [%rd4], %rd0; add.s64 %rd4, %rd4, 64;")
    address = ctypes.addressof(room)
    program = Program(TEMPLATE.replace("@BODY@", "\n".join(body)), tmp_path)
    program.run([address, -3], [(address, address + ctypes.sizeof(room))], 3)
    for number, (text, values, expected) in enumerate(INSTRUCTIONS):
        width = 64 if "%rd0" in text else 32 if "%r0" in text else 16
        assert room[8 * number] % (1 << width) == expected % (1 << width), (text, values)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    program = Program(TEMPLATE.replace("@BODY@", ""), tmp_path)
    program.run([64, -(2**31)], [], 1)
    with pytest.raises(ValueError, match="4294967296 for a parameter of type u32"):
        program.run([64, 2**32], [], 1)


def of_two_warps(body: str, tmp_path: Path, shared_bytes: int = 256) -> list[int]:
    """What 64 threads leave in %r1, which begins as their number, as does %r0."""
    room = (ctypes.c_int32 * 64)()
    address = ctypes.addressof(room)
    begin = "mov.u32 %r0, %tid.x; mov.b32 %r1, %r0; setp.lt.u32 %p0, %r0, 40; shl.b32 %r2, %r0, 2;"
    end = "ld.param.b64 %rd1, [kernel_param_0]; mad.wide.u32 %rd1, %r0, 4, %rd1; st.global.b32 [%rd1], %r1;"
    program = Program(OF_TWO_WARPS.replace("@BODY@", f"{begin}\n{body}\n$end: {end}"), tmp_path, shared_bytes)
    program.run([address, 0], [(address, address + ctypes.sizeof(room))], 1)
    return list(room)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shfl.sync.up.b32 %r1, %r0, 4, 0, -1;", [t - 4 if t % 32 >= 4 else t for t in range(64)]),
        ("shfl.sync.bfly.b32 %r1, %r0, 5, 31, -1;", [t ^ 5 for t in range(64)]),
        ("redux.sync.add.s32 %r1, %r0, -1;", [496] * 32 + [1520] * 32),
        ("neg.s32 %r1, %r0; mov.b32 %r3, -1; redux.sync.max.s32 %r1, %r1, %r3;", [0] * 32 + [-32] * 32),
        (  # reversed by way of shared memory
            "st.shared.b32 [ %r2 + 0 ], %r0; bar.sync 0; sub.s32 %r3, 252, %r2; ld.shared.b32 %r1, [%r3];",
            list(range(63, -1, -1)),
        ),
        (
            "mov.b32 %r3, global_smem; add.s32 %r3, %r3, %r2; st.shared.b32 [%r3], %r0; bar.sync 0; "
            "ld.shared.v2.b32 {%r4, %r1}, [global_smem+16];",
            [5] * 64,
        ),
    ],
)
def test_threads_exchange(body: str, expected: list[int], tmp_path: Path) -> None:
    assert of_two_warps(body, tmp_path) == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("@%p0 bra $end; bar.sync 0;", "not for all threads; program 0, thread 40"),
        ("@%p0 bra $other; bar.sync 0; bra $end; $other: bar.sync 0;", "not for all threads"),
        ("@%p0 bra $end; redux.sync.add.s32 %r1, %r0, -1;", "not for all threads"),
        ("redux.sync.add.s32 %r1, %r0, %r0;", "not for all threads; program 0, thread 0"),
        ("st.shared.b32 [%r2+4], %r0;", "outside of the memory of this launch; program 0, thread 63"),
        ("st.shared.v2.b32 [%r2], {%r0, %r1};", "misaligned; program 0, thread 1"),
    ],
)
def test_threads_that_part_and_shared_memory_that_is_none_are_seen(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=message):
        of_two_warps(body, tmp_path)
