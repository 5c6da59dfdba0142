"""Facts of a compiled kernel, read from its machine code: how wide it accesses memory, and by which lanes."""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_LOADS, _STORES, _ATOMICS = {"LDG", "LD"}, {"STG", "ST"}, {"RED", "REDG", "ATOM", "ATOMG"}
_SHARED = {"LDS", "STS", "ATOMS", "LDSM", "STSM", "LDGSTS"}
_LOCAL = {"LDL", "STL"}
_WARP = 32


@dataclass(frozen=True)
class SassFacts:
    """Instructions of one binary, counted as they stand in the code, not as often as they run."""

    load_bits: dict[int, int]
    """Loads from global memory by width: ``{16: 1, 128: 4}``."""
    store_bits: dict[int, int]
    atomics: dict[str, int]
    """By kind (RED returns nothing, ATOM the old value), width and scope: ``{"RED 128 SYS": 4}``."""
    local_accesses: int
    """Loads and stores of memory that stands in for registers."""
    shared_accesses: int


def disassemble(cubin: bytes) -> str:
    """The machine code as text, by the nvdisasm that comes with Triton."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def read_facts(sass: str) -> SassFacts:
    """Raises ValueError if there are no instructions in ``sass``.

    >>> read_facts('''
    ...     /*0310*/                   LDG.E.64 R2, desc[UR20][R2.64] ;
    ...     /*0950*/              @!P2 LDG.E.U16 R24, desc[UR20][R22.64] ;
    ...     /*0960*/               @P1 REDG.E.ADD.F32x4.FTZ.RN.STRONG.SYS desc[UR20][R10.64], R36 ;
    ... ''')
    SassFacts(load_bits={16: 1, 64: 1}, store_bits={}, atomics={'RED 128 SYS': 1}, local_accesses=0, shared_accesses=0)
    """
    opcodes = Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)", sass))
    if not opcodes:
        raise ValueError(f"no instructions in what nvdisasm printed: {sass[:200]!r}")
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    atomics: Counter[str] = Counter()
    local = shared = 0
    for opcode, count in opcodes.items():
        name = opcode.partition(".")[0]
        local += count * (name in _LOCAL)
        shared += count * (name in _SHARED)
        if name in _LOADS:
            loads[_bits(opcode)] += count
        elif name in _STORES:
            stores[_bits(opcode)] += count
        elif name in _ATOMICS:
            scope = re.search(r"\.(SYS|GPU|CTA)\b", opcode)
            atomics[f"{name.rstrip('G')} {_bits(opcode)} {scope[1] if scope else '?'}"] += count
    return SassFacts(_sorted(loads), _sorted(stores), dict(sorted(atomics.items())), local, shared)


def _sorted(counts: Counter[int]) -> dict[int, int]:
    return dict(sorted(counts.items()))


def _bits(opcode: str) -> int:
    """
    >>> [_bits(o) for o in ("LDG.E", "LDG.E.U16.STRONG.GPU", "STG.E.128", "REDG.E.ADD.F32x4.FTZ.RN", "RED.E.ADD.F64")]
    [32, 16, 128, 128, 64]
    """
    packed = re.search(r"\.[A-Z]*(16|32|64)x(\d)", opcode)
    if packed:
        return int(packed[1]) * int(packed[2])
    plain = re.search(r"\.[USF]?(8|16|32|64|128|256)\b", opcode)
    return int(plain[1]) if plain else 32


def lanes_are_contiguous(ttgir: str, facts: SassFacts) -> bool | None:
    """Whether it is proven that the lanes of a warp touch adjacent bytes with each instruction; None without vectors.

    Triton's layouts say how many adjacent elements each thread has, and that the next thread has the next ones. Lanes
    leave no gaps if one instruction takes all adjacent elements of a thread. That is proven if the machine code has
    exactly as many instructions of each width as this makes.
    """
    layouts = {
        name: (int(per_thread), int(per_warp), int(warps))
        for name, per_thread, per_warp, warps in re.findall(
            r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(\d+)\], threadsPerWarp = \[(\d+)\], "
            r"warpsPerCTA = \[(\d+)\], order = \[0\]",
            ttgir,
            re.M,
        )
    }
    wanted: dict[str, Counter[int]] = {"load": Counter(), "store": Counter(), "atomic_rmw": Counter()}
    vectors = False
    for kind, numel, element, layout in re.findall(
        r"\btt\.(load|store|atomic_rmw) [^:]*: \(?(?:tensor<(\d+)x)?!tt\.ptr<[a-z]+(\d+)>(?:, (#\w+)>)?", ttgir
    ):
        if not layout:
            wanted[kind][int(element)] += 1
            continue
        vectors = True
        per_thread, per_warp, warps = layouts.get(layout, (0, 0, 0))
        if not per_thread or per_warp != _WARP:
            return False
        wanted[kind][per_thread * int(element)] += max(1, int(numel) // (per_thread * per_warp * warps))
    atomics: Counter[int] = Counter()
    for text, count in facts.atomics.items():
        atomics[int(text.split()[1])] += count
    found = {"load": Counter(facts.load_bits), "store": Counter(facts.store_bits), "atomic_rmw": atomics}
    return found == wanted if vectors else None
