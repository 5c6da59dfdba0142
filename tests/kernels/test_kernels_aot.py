"""Layer 1: no processes. Device kernels compiled ahead of time, by the command that users run: one of each kind, also
of those that are linked with NVSHMEM, for sm_90; with `-m extended`, all for all architectures.

One command that compiles, no GPU; what it says of kernels that fail is shown in this process. It shows that every
kernel compiles, is linked with NVSHMEM's device library, spills nothing, and uses the instructions it is meant to use,
with which widths and lanes. It cannot show that a GPU computes what it should: the same kernels do in the interpreter
(test_kernels_interpreted.py), and their PTX does on a CPU (test_kernels_ptx.py).

The NVSHMEM kernels need a device library that Triton can read (the release in constraints.txt). ``NVSHMEM_LIB`` names
the folder of another one.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_driver import no_gpu

from odc.kernels import aot, aot_list
from odc.kernels.aot import main
from odc.kernels.aot_compile import file_stem, linked_version, read_usage
from odc.kernels.launching import DTYPES
from odc.kernels.sass import SassFacts, lanes_are_contiguous, read_facts

ARCHS = ("sm_80", "sm_90", "sm_100")
ENTRIES = {entry.name: entry for entry in aot_list.entries()}
NVSHMEM = [name for name, entry in ENTRIES.items() if entry.nvshmem]
PLAIN = [name for name, entry in ENTRIES.items() if not entry.nvshmem]
FEW = (
    "nvshmem_put_signal",  # of those that are linked with NVSHMEM
    *("gather_parts[i32, aligned]", "gather_parts[i16, unaligned]", "scatter_parts[i32, aligned]"),
    *("scatter_accumulate_parts[bf16->fp32, aligned]", "scatter_accumulate_parts[bf16->fp32, unaligned]"),
    *("accumulate[bf16->fp32, aligned]", "accumulate_slots[bf16->fp32, aligned]"),
    *("fill[bf16, aligned]", "copy_cast[fp32->bf16, aligned]"),
)
"""What every run compiles, by one command. (To link one with NVSHMEM's device library takes 5 to 20 seconds of a
core.)"""


def kind_of(name: str) -> Sequence[str]:
    """Those that one command compiles together with it."""
    return next(kind for kind in (FEW, NVSHMEM, PLAIN) if name in kind)


def launched(name: str, arch: str) -> bool:
    return ENTRIES[name].since <= divmod(int(arch.removeprefix("sm_")), 10)


def cases(choice: Callable[[str], bool] = lambda name: True) -> pytest.MarkDecorator:
    """Kernels and architectures; those that take long to compile are extended."""
    return pytest.mark.parametrize(
        ("name", "arch"),
        [
            pytest.param(name, arch, marks=() if daily else pytest.mark.extended)
            for name in ENTRIES
            for arch in ARCHS
            if choice(name) and launched(name, arch)
            for daily in [arch == "sm_90" and name in FEW]
        ],
    )


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "odc.kernels.aot", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=900)


def library() -> list[str]:
    folder = os.environ.get("NVSHMEM_LIB")
    return ["--nvshmem-lib", folder] if folder else []


@dataclass(frozen=True)
class Compiled:
    process: subprocess.CompletedProcess[str]
    document: dict[str, Any]
    folder: Path

    def result(self, name: str, arch: str) -> dict[str, Any]:
        (found,) = [r for r in self.document["results"] if (r["kernel"], r["arch"]) == (name, arch)]
        return dict(found)

    def ptx(self, name: str, arch: str) -> str:
        return (self.folder / f"{file_stem(name, arch)}.ptx").read_text()


@pytest.fixture(scope="module")
def compile_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Compiled]:
    """A kernel for an architecture, by a command that compiles all of its kind, once."""

    @functools.cache
    def compile_all(names: tuple[str, ...], archs: tuple[str, ...]) -> Compiled:
        folder = tmp_path_factory.mktemp("aot")
        options = ("--json", str(folder / "aot.json"), "--keep", str(folder), *library())
        if names == FEW:  # compiled sooner than another worker has imported Triton
            options = (*options, "--workers", "1")
        process = run_command("--arch", *archs, "--kernels", *names, *options)
        assert (folder / "aot.json").exists(), process.stderr
        return Compiled(process, json.loads((folder / "aot.json").read_text()), folder)

    def compile_kind(name: str, arch: str) -> Compiled:
        return compile_all(tuple(kind_of(name)), (arch,))

    return compile_kind


@pytest.fixture
def compiled(compile_for: Callable[[str, str], Compiled], name: str, arch: str) -> Compiled:
    return compile_for(name, arch)


@cases(lambda name: name in (FEW[1], PLAIN[-1], NVSHMEM[0], NVSHMEM[-1]))
def test_the_command_succeeds(compiled: Compiled, name: str, arch: str) -> None:
    assert compiled.process.returncode == 0, compiled.process.stderr
    results = compiled.document["results"]
    assert f"{len(results)} binaries" in compiled.process.stdout
    assert compiled.document["triton_version"]
    if name in NVSHMEM:
        assert re.fullmatch(r"3\.\d+\.\d+", compiled.document["nvshmem_version"])
    names = {r["kernel"] for r in results}
    assert names >= set(kind_of(name)) - {n for n in PLAIN if not launched(n, arch)}
    assert {(r["kernel"], r["arch"]) for r in results if not launched(r["kernel"], r["arch"])} == set()


@cases()
def test_every_kernel_on_every_architecture(compiled: Compiled, name: str, arch: str) -> None:
    result = compiled.result(name, arch)
    assert result["error"] is None
    assert result["cubin_bytes"] == (compiled.folder / f"{file_stem(name, arch)}.cubin").stat().st_size > 0
    assert 0 < result["registers"] <= 128  # at least two programs of 256 threads on a multiprocessor
    assert result["spill_bytes"] == result["local_accesses"] == 0
    assert re.search(rf"^\.target {arch}a?$", compiled.ptx(name, arch), re.M)


@cases(lambda name: name in NVSHMEM)
def test_nvshmem_is_linked(compiled: Compiled, name: str, arch: str) -> None:
    ptx = compiled.ptx(name, arch)
    assert ".extern .func" not in ptx  # a function that nobody defines
    assert linked_version(ptx) == compiled.document["nvshmem_version"]
    cubin = (compiled.folder / f"{file_stem(name, arch)}.cubin").read_bytes()
    assert b"nvshmemi_device_state_d" in cubin
    defined = set(re.findall(r"\.func\s+(?:\([^)]*\)\s*)?(\w+)", ptx))
    assert set(re.findall(r"call\.uni\s+(?:\([^)]*\),\s*)?(\w+)", ptx)) <= defined


TABLE_WORDS = {"accumulate_slots": 4, "gather_parts": 5, "scatter_parts": 6, "scatter_accumulate_parts": 6}
"""What a kernel loads of tables: of addresses, of rows."""
BITS = {"i16": 16, "i32": 32, "bf16": 16, "fp16": 16, "fp32": 32, "fp64": 64}
PER_THREAD = 4096 // 256


def widths(name: str) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """The loads, stores and atomics that a kernel should have, by width: what `read_facts` should find.

    A thread has 16 elements of a block. With alignment it takes 128 bits of the widest dtype with each instruction and
    as many elements of the other, which is half as wide or less: full lines for a warp, without gaps. (Eight bf16 in
    128 bits would make every other access of fp32 begin 32 bytes after its neighbour.) In addition, one instruction
    for the elements behind the last vector of a row. Without alignment, one element per instruction.
    """
    kernel, types, options = re.fullmatch(r"(\w+)\[([^,]+), (.*)\]", name).groups()  # type: ignore[union-attr]
    source, _, out = types.partition("->")
    out = out or source
    elements = 128 // max(BITS[source], BITS[out]) if options == "aligned" else 1
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    atomics: dict[str, int] = {}

    def access(counts: Counter[int], dtype: str) -> None:
        counts[elements * BITS[dtype]] += PER_THREAD // elements
        counts[BITS[dtype]] += elements > 1

    if kernel != "fill":
        access(loads, source)
    if kernel.startswith("accumulate"):
        access(loads, out)
    loads[64] += TABLE_WORDS.get(kernel, 0)
    if kernel == "scatter_parts":
        stores[BITS[out]] += PER_THREAD  # zeros, one by one
    if kernel.startswith("scatter_accumulate"):
        access(stores, out)
        atomics, stores = {f"RED {width} SYS": count for width, count in stores.items() if count}, Counter()
    else:
        access(stores, out)
    return {str(w): n for w, n in loads.items() if n}, {str(w): n for w, n in stores.items() if n}, atomics


@cases(lambda name: name in PLAIN)
def test_accesses_are_wide_and_lanes_contiguous(compiled: Compiled, name: str, arch: str) -> None:
    """In the machine code: exactly the loads, stores and atomics that there should be, and no exchange of lanes."""
    result = compiled.result(name, arch)
    assert (result["load_bits"], result["store_bits"], result["atomics"]) == widths(name)
    assert result["contiguous_lanes"] is True
    if "_parts" in name:  # rows of the table are counted through it, a word per warp
        assert result["shared_bytes"] <= 32
        assert result["shared_accesses"] < 16
    else:
        assert result["shared_bytes"] == result["shared_accesses"] == 0


@cases(lambda name: name.startswith("scatter_accumulate"))
def test_remote_additions_are_atomic_for_the_whole_system(compiled: Compiled, name: str, arch: str) -> None:
    """Nothing is returned (RED), and on sm_80, which has no vector atomics, the aligned kernel is never launched."""
    atomics = compiled.result(name, arch)["atomics"]
    assert set(atomics) == ({"RED 128 SYS", "RED 32 SYS"} if ", aligned]" in name else {"RED 32 SYS"})
    assert not launched("scatter_accumulate_parts[bf16->fp32, aligned]", "sm_80")
    written = re.findall(r"\b(?:atom|red)\.global\.\S+", compiled.ptx(name, arch))
    assert all(re.match(r"(atom|red)\.global\.sys\.relaxed\.add(\.v4)?\.f32$", atomic) for atomic in written)


@cases(lambda name: name.startswith("copy_cast[fp32->bf16"))
def test_bf16_is_rounded_to_nearest(compiled: Compiled, name: str, arch: str) -> None:
    conversions = set(re.findall(r"cvt\S*\.bf16(?:x2)?\.f32", compiled.ptx(name, arch)))
    assert conversions
    assert all(conversion.startswith("cvt.rn.") for conversion in conversions)


@cases(lambda name: name.startswith(("gather", "accumulate_slots")))
def test_what_peers_write_is_read_past_l1(compiled: Compiled, name: str, arch: str) -> None:
    past, through = set(), set()
    for load in re.findall(r"\bld\.global\S*", compiled.ptx(name, arch)):
        (past if ".cg" in load else through).add(load)
    assert past
    if name.startswith("gather"):
        assert through == {"ld.global.b64"}  # tables


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.extended) for name in PLAIN]
)
def test_a_launch_compiles_the_same_code_once(
    compile_for: Callable[[str, str], Compiled], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """Triton's own way at run time, up to loading: no argument's value or address makes it compile another kernel."""
    entry = ENTRIES[name]
    kinds = {f"*{short}": dtype for dtype, short in DTYPES.items()}
    kinds |= {"*i64": torch.int64, "*i32": torch.int32, "*i16": torch.int16, "*u8": torch.uint8}
    seen = []
    with no_gpu(monkeypatch, tmp_path):
        for number, shift in ((1, 0), (16, 1), (2**40, 8)):
            values = {"i64": number, "i32": min(number, 2**31 - 1), "fp32": float(number)}
            arguments = {
                n: torch.zeros(9, dtype=kinds[kind])[shift:] if kind.startswith("*") else values[kind]
                for n, kind in entry.signature.items()
                if kind != "constexpr"
            }
            options = {"num_warps": entry.num_warps, "grid": (1,), "warmup": True}
            seen.append(entry.kernel.run(**arguments, **entry.constants, **options))
    assert seen[0] is seen[1] is seen[2]
    assert seen[0].asm["ptx"] == compile_for(name, "sm_90").ptx(name, "sm_90")


BROKEN = """
import triton
import triton.language as tl
from odc.kernels.aot_entry import entry
from odc.kernels.parts import aot_entries

@triton.jit
def _broken_kernel(out, BLOCK: tl.constexpr):
    tl.store(out + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))

@triton.jit
def _spilling_kernel(out):
    lanes = tl.arange(0, 16384)
    values = tl.load(out + lanes)
    tl.debug_barrier()
    tl.store(out + lanes, values + 1)

@triton.jit
def _narrow_kernel(out, other, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    values = tl.load(tl.multiple_of(other + lanes, 16))  # 8 elements per thread
    tl.store(tl.multiple_of(out + lanes, 16), values.to(tl.float32))

def entries():
    return [
        entry("broken", _broken_kernel, {"out": "*i32"}, {"BLOCK": 64}, 4),
        entry("spilling", _spilling_kernel, {"out": "*fp64"}, {}, 1),
        entry("exchanged", _narrow_kernel, {"out": "*fp32", "other": "*bf16"}, {"BLOCK": 4096}, 8),
        aot_entries()[0],
    ]
"""


class Here(Executor):
    """Workers take seconds to have imported torch and Triton; those of the command above are processes."""

    def __init__(self, max_workers: int, mp_context: object) -> None:
        pass

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "ProcessPoolExecutor", Here)


@pytest.fixture
def others(in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module with other kernels."""
    folder = tmp_path / "others"
    folder.mkdir()
    (folder / "other_kernels.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(folder)
    yield "other_kernels"
    sys.modules.pop("other_kernels", None)


def test_a_broken_kernel_is_named_and_fails(others: str, capsys: pytest.CaptureFixture[str]) -> None:
    architectures = ("sm_80", "sm_100")
    assert main(["--arch", *architectures, "--entries", others, "--kernels", "broken", "gather"]) == 1
    printed = capsys.readouterr()
    for arch in architectures:
        (failure,) = [line for line in printed.err.splitlines() if line.startswith(f"broken for {arch}: ")]
        assert "CompilationError" in failure
        assert re.search(rf"gather_parts\[i32, aligned\] +│ {arch} +│ +\d+", printed.out)  # the others are compiled


def test_a_spill_fails(others: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "aot.json"
    assert main(["--arch", "sm_90", "--entries", others, "--kernels", "spilling", "--json", str(file)]) == 1
    (result,) = json.loads(file.read_text())["results"]
    assert result["error"] is None
    assert result["spill_bytes"] > 0
    assert result["local_accesses"] > 0
    assert f"spilling for sm_90: spills {result['spill_bytes']} bytes of registers" in capsys.readouterr().err


def test_exchanged_lanes_are_seen(others: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the facts above exclude, in a kernel that does it: eight bf16 per thread to load, four fp32 to store."""
    file = tmp_path / "aot.json"
    how = ("--arch", "sm_80", "--entries", others, "--json", str(file))
    assert main([*how, "--kernels", "exchanged"]) == 0
    (found,) = json.loads(file.read_text())["results"]
    assert found["shared_accesses"] > 0
    assert found["shared_bytes"] > 0
    assert re.search(r"exchanged +│ sm_80 .* 128 +│ 128 +│ +│ contiguous", capsys.readouterr().out)


LAYOUT = """
#blocked = #ttg.blocked<{sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>
  %owner = tt.load %table : !tt.ptr<i64> loc(#loc)
  %values = tt.load %source, %inside : tensor<4096x!tt.ptr<bf16>, #blocked> loc(#loc)
  %old = tt.atomic_rmw fadd, relaxed, sys, %target, %values, %inside : (tensor<4096x!tt.ptr<f32>, #blocked>, \
tensor<4096xf32, #blocked>, tensor<4096xi1, #blocked>) -> tensor<4096xf32, #blocked> loc(#loc)
"""


@pytest.mark.parametrize(
    ("layout", "atomics", "contiguous"),
    [
        (LAYOUT, {"RED 128 SYS": 4}, True),
        (LAYOUT, {"RED 32 SYS": 16}, False),  # four per thread one by one: lanes 16 bytes apart
        (LAYOUT, {"RED 64 SYS": 8}, False),
        (LAYOUT, {"RED 128 SYS": 4, "RED 32 SYS": 1}, False),  # one that no layout accounts for
        (LAYOUT.replace("threadsPerWarp = [32]", "threadsPerWarp = [16]"), {"RED 128 SYS": 4}, False),
        (LAYOUT.replace("order = [0]", "order = [1]"), {"RED 128 SYS": 4}, False),
        (LAYOUT.replace("tensor<4096x!tt.ptr<f32>, #blocked>", "tensor<4096x!tt.ptr<f32>, #mma>"), {}, False),
    ],
)
def test_strided_lanes_are_seen(layout: str, atomics: dict[str, int], contiguous: bool) -> None:
    facts = SassFacts({64: 5}, {}, atomics, 0, 0)
    assert lanes_are_contiguous(layout, facts) is contiguous


def test_without_vectors_nothing_is_said_of_lanes() -> None:
    assert lanes_are_contiguous("%owner = tt.load %table : !tt.ptr<i64>", SassFacts({64: 9}, {}, {}, 0, 0)) is None


def test_machine_code_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no instructions in what nvdisasm printed"):
        read_facts("nvdisasm fatal : no such file")


@pytest.mark.usefixtures("in_process")
def test_a_missing_device_library_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "aot.json"
    how = ("--arch", "sm_90", "--kernels", "nvshmem_quiet", "fill[bf16, aligned]", "--nvshmem-lib", str(tmp_path))
    assert main([*how, "--json", str(file)]) == 1
    printed = capsys.readouterr().err
    assert "nvshmem_quiet for sm_90: FileNotFoundError: no NVSHMEM device library" in printed
    assert "pip install nvidia-nvshmem-cu13" in printed
    missing, fill = json.loads(file.read_text())["results"]
    assert "pip install" in missing["error"]
    assert fill["cubin_bytes"] > 0


@pytest.mark.usefixtures("in_process")
def test_an_unreadable_device_library_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A release whose bitcode is of a newer LLVM than Triton's looks like this to Triton."""
    (tmp_path / "libnvshmem_device.bc").write_bytes(b"BC\xc0\xde" + bytes(64))
    assert main(["--arch", "sm_90", "--kernels", "nvshmem_quiet", "--nvshmem-lib", str(tmp_path)]) == 1
    words = r"Triton 3\S+ cannot read this NVSHMEM release's bitcode: pip install nvidia"
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm90"), "architecture 'sm90', expected sm_"),
        (("--arch", "sm_90", "--kernels", "gater"), "--kernels gater: no such kernel"),
        ((), "--arch"),
    ],
)
def test_a_wrong_command_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for word in ("examples:", "exit code", "--nvshmem-lib", "pip install", "sm_90"):
        assert word in text


def test_usage_that_is_not_there_is_an_error() -> None:
    with pytest.raises(ValueError, match="no resource usage in the output of ptxas"):
        read_usage("ptxas info    : 0 bytes gmem")
