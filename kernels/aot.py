"""``python -m odc.kernels.aot``: compile all kernels ahead of time, without a GPU, and show what they need.

What this proves: every kernel compiles and links for these architectures, no register spills, and how wide and by which
lanes its machine code accesses memory. What it does not: that a kernel computes what it should (the tests do, in
Triton's interpreter), or that it is fast.
"""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from odc.kernels.aot_compile import AotResult, compile_named
from odc.kernels.nvshmem.bitcode import READABLE, architecture

ENTRIES = "odc.kernels.aot_list"
EPILOG = f"""
The exit code is 1 if any kernel does not compile, spills registers, or lacks NVSHMEM's device library, and 2 if the
command line is wrong. The device library is looked for in --nvshmem-lib if given, else in the wheels
nvidia-nvshmem-cu13 and -cu12, else in system folders; Triton must be able to read it: pip install {READABLE}.

columns: loads and stores of global memory by width in bits; atomics by kind, width and scope; local and shared:
instructions that access such memory; lanes: whether those of a warp are proven to touch adjacent bytes.

examples:
  python -m odc.kernels.aot --arch sm_90                           what an H100 or H200 would run
  python -m odc.kernels.aot --arch sm_80 sm_90 --kernels gather    only kernels whose names begin with gather
  python -m odc.kernels.aot --arch sm_90 --keep runs/ptx           keep PTX and binaries to read them
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m odc.kernels.aot",
        description="Compile every device kernel ahead of time; no GPU is needed.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", nargs="+", required=True, metavar="SM", help="architectures: sm_80 sm_90 sm_100")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="only kernels whose names begin with one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write PTX and binaries there")
    parser.add_argument("--nvshmem-lib", type=Path, metavar="DIR", help="folder of libnvshmem_device*.bc")
    cores = min(8, os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=cores, help="processes, 1 GiB each (default: %(default)s)")
    parser.add_argument("--entries", default=ENTRIES, metavar="MODULE", help="has entries() (default: %(default)s)")
    return parser


def _selected(module: str, prefixes: Sequence[str] | None) -> list[str]:
    names = [entry.name for entry in importlib.import_module(module).entries()]
    if prefixes is None:
        return names
    unknown = [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]
    if unknown:
        raise ValueError(f"--kernels {' '.join(unknown)}: no such kernel, expected the beginning of {', '.join(names)}")
    return [name for name in names if name.startswith(tuple(prefixes))]


def _compile_all(arguments: argparse.Namespace, names: Sequence[str]) -> list[AotResult]:
    """All results, in the order of the list; a line per result as they come."""
    folder = str(arguments.nvshmem_lib) if arguments.nvshmem_lib else None
    keep = str(arguments.keep) if arguments.keep else None
    since = {entry.name: entry.since for entry in importlib.import_module(arguments.entries).entries()}
    jobs = [(name, arch) for name in names for arch in arguments.arch if divmod(architecture(arch), 10) >= since[name]]
    done: dict[tuple[str, str], AotResult] = {}
    # Spawned, not forked: LLVM has threads of its own.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, arguments.workers), mp_context=context) as pool:
        futures = {
            pool.submit(compile_named, arguments.entries, name, arch, folder, keep): (name, arch) for name, arch in jobs
        }
        for future in as_completed(futures):
            job = futures[future]
            try:
                done[job] = future.result()
            except Exception as error:  # the worker itself died
                done[job] = AotResult(*job, error=f"{type(error).__name__}: {error}")
            print(f"[{len(done)}/{len(jobs)}] {_line(done[job])}", file=sys.stderr, flush=True)
    return [done[job] for job in jobs]


def _line(result: AotResult) -> str:
    state = "failed" if result.failed else "ok"
    return f"{result.arch} {result.kernel}: {state}, {result.seconds:.1f} s"


def _show(results: Sequence[AotResult], seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{len(results)} binaries in {seconds:.0f} s")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in _TEXTS else "right", no_wrap=column == "kernel")
    for r in results:
        name = r.kernel.replace("[", r"\[")
        table.add_row(name, r.arch, *_cells(r), r.nvshmem_version or "", style="red" if r.failed else None)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


_TEXTS = ("kernel", "arch", "loads", "stores", "atomics", "lanes", "NVSHMEM")
_COLUMNS = (
    *("kernel", "arch", "cubin B", "registers", "spill B", "stack B", "shared B", "local", "shared"),
    *("loads", "stores", "atomics", "lanes", "NVSHMEM"),
)


def _cells(r: AotResult) -> list[str]:
    """
    >>> _cells(AotResult("k", "sm_90", 9, 8, load_bits={16: 1, 128: 4}, atomics={"RED 128 SYS": 4}))[5:]
    ['0', '0', '16 128', '', 'RED 128 SYS', '']
    """
    if r.error:
        return ["failed"] + [""] * 10
    numbers = (r.cubin_bytes, r.registers, r.spill_bytes, r.stack_bytes, r.shared_bytes)
    accesses = (r.local_accesses, r.shared_accesses)
    widths = [" ".join(map(str, bits)) for bits in (r.load_bits, r.store_bits)]
    lanes = {True: "contiguous", False: "gaps", None: ""}[r.contiguous_lanes]
    return [*map(str, numbers), *map(str, accesses), *widths, ", ".join(r.atomics), lanes]


def _report(results: Sequence[AotResult], seconds: float, file: Path) -> None:
    import triton

    versions = sorted({r.nvshmem_version for r in results if r.nvshmem_version})
    document = {
        "triton_version": triton.__version__,
        "nvshmem_version": versions[0] if len(versions) == 1 else versions or None,
        "seconds": round(seconds, 1),
        "results": [dataclasses.asdict(r) for r in results],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(document, indent=1) + "\n")


def _failures(results: Sequence[AotResult]) -> list[str]:
    """
    >>> _failures([AotResult("gather", "sm_90", spill_bytes=8)])
    ['gather for sm_90: spills 8 bytes of registers']
    """
    lines = []
    for r in results:
        if r.error is not None:
            lines.append(f"{r.kernel} for {r.arch}: {r.error}")
        elif r.spill_bytes:
            lines.append(f"{r.kernel} for {r.arch}: spills {r.spill_bytes} bytes of registers")
        elif r.local_accesses:
            lines.append(f"{r.kernel} for {r.arch}: {r.local_accesses} accesses to local memory")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    begin = time.perf_counter()
    try:
        for arch in arguments.arch:
            architecture(arch)
        names = _selected(arguments.entries, arguments.kernels)
    except ValueError as error:
        parser.error(str(error))
    results = _compile_all(arguments, names)
    seconds = time.perf_counter() - begin
    _show(results, seconds)
    if arguments.json is not None:
        _report(results, seconds, arguments.json)
    failures = _failures(results)
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
