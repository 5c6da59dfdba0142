"""Compile one entry for one architecture without a GPU, and read what ptxas and its machine code say about it."""

# mypy: disable-error-code="import-untyped,import-not-found"
from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from odc.kernels.aot_entry import AotEntry
from odc.kernels.nvshmem.bitcode import READABLE, architecture, find_bitcode
from odc.kernels.sass import disassemble, lanes_are_contiguous, read_facts


@dataclass(frozen=True)
class AotResult:
    """What became of one entry on one architecture; the numbers are zero if ``error`` is not None."""

    kernel: str
    arch: str
    cubin_bytes: int = 0
    registers: int = 0
    """Per thread."""
    spill_bytes: int = 0
    """Stores and loads of registers that did not fit, in bytes of code, over all functions of the binary."""
    stack_bytes: int = 0
    """Per thread, the largest frame of any function."""
    shared_bytes: int = 0
    """Per program."""
    load_bits: dict[int, int] = field(default_factory=dict)
    """Loads from global memory in the machine code, by width; this and what follows: see `SassFacts`."""
    store_bits: dict[int, int] = field(default_factory=dict)
    atomics: dict[str, int] = field(default_factory=dict)
    local_accesses: int = 0
    shared_accesses: int = 0
    contiguous_lanes: bool | None = None
    """See `lanes_are_contiguous`."""
    seconds: float = 0.0
    nvshmem_version: str | None = None
    """Of the device library that was linked, as the library itself says."""
    error: str | None = None

    @property
    def failed(self) -> bool:
        return self.error is not None or self.spill_bytes > 0 or self.local_accesses > 0


def compile_entry(
    entry: AotEntry, arch: str, *, nvshmem_folder: str | None = None, keep: str | None = None
) -> AotResult:
    """Compile ``entry`` for ``arch``; errors of the compiler, and a missing device library, are part of the result.

    Nothing is taken from or left in Triton's cache. With ``keep``, the PTX and the binary are written to that folder.
    """
    begin = time.perf_counter()
    try:
        compiled, log = _compile(entry, arch, nvshmem_folder)
    except Exception as error:  # whatever a broken kernel does to the compiler is this entry's result
        seconds = time.perf_counter() - begin
        return AotResult(entry.name, arch, seconds=seconds, error=_explain(error))
    if keep is not None:
        _write(Path(keep), entry.name, arch, compiled)
    usage, facts = read_usage(log), read_facts(disassemble(compiled.asm["cubin"]))
    return AotResult(
        kernel=entry.name,
        arch=arch,
        cubin_bytes=len(compiled.asm["cubin"]),
        registers=usage["registers"],
        spill_bytes=usage["spill"],
        stack_bytes=usage["stack"],
        shared_bytes=int(compiled.metadata.shared),
        **dataclasses.asdict(facts),
        contiguous_lanes=lanes_are_contiguous(compiled.asm["ttgir"], facts),
        seconds=round(time.perf_counter() - begin, 2),
        nvshmem_version=linked_version(compiled.asm["ptx"]),
    )


def compile_named(entries_module: str, name: str, arch: str, nvshmem_folder: str | None, keep: str | None) -> AotResult:
    """`compile_entry` by name, for a worker process: kernels cannot be sent to one."""
    try:
        found = {entry.name: entry for entry in importlib.import_module(entries_module).entries()}
    except Exception as error:
        return AotResult(name, arch, error=_explain(error))
    return compile_entry(found[name], arch, nvshmem_folder=nvshmem_folder, keep=keep)


def _compile(entry: AotEntry, arch: str, nvshmem_folder: str | None) -> tuple[Any, str]:
    options: dict[str, Any] = {"num_warps": entry.num_warps}
    if entry.nvshmem:
        options["extern_libs"] = {"libnvshmem_device": str(find_bitcode(arch, nvshmem_folder))}
    source = ASTSource(entry.kernel, dict(entry.signature), dict(entry.constants))
    log = io.StringIO()
    knobs = triton.knobs
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.nvidia.scope():
        knobs.cache.dir = cache  # also makes sure that ptxas runs: a cached binary has no log
        knobs.nvidia.dump_ptxas_log = True
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, GPUTarget("cuda", architecture(arch), 32), options)
    return compiled, log.getvalue()


def _explain(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    if "Failed to parse library" in text:
        text += f". Triton {triton.__version__} cannot read this NVSHMEM release's bitcode: pip install {READABLE}"
    return text


def _write(folder: Path, name: str, arch: str, compiled: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stem = file_stem(name, arch)
    (folder / f"{stem}.ptx").write_text(compiled.asm["ptx"])
    (folder / f"{stem}.cubin").write_bytes(compiled.asm["cubin"])


def file_stem(name: str, arch: str) -> str:
    """
    >>> file_stem("copy_cast[bf16->fp32, aligned]", "sm_90")
    'copy_cast-bf16-fp32-aligned.sm_90'
    """
    return f"{re.sub(r'[^a-z0-9_]+', '-', name).strip('-')}.{arch}"


def read_usage(log: str) -> dict[str, int]:
    """Registers, spill and stack in what ``ptxas -v`` prints; raises ValueError if that is not what it prints.

    >>> read_usage('''ptxas info    : Function properties for k
    ...     8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
    ... ptxas info    : Used 24 registers, used 1 barriers''')
    {'registers': 24, 'spill': 16, 'stack': 8}
    """
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not frames:
        raise ValueError(f"no resource usage in the output of ptxas -v, expected 'Used N registers': {log[:500]!r}")
    return {
        "registers": max(registers),
        "spill": sum(int(stores) + int(loads) for _, stores, loads in frames),
        "stack": max(int(stack) for stack, _, _ in frames),
    }


def linked_version(ptx: str) -> str | None:
    """The NVSHMEM release in ``ptx``, None if it is not linked with NVSHMEM.

    >>> linked_version(".const .align 4 .b8 nvshmemi_device_lib_version_d[12] = {3, 0, 0, 0, 4, 0, 0, 0, 5};")
    '3.4.5'
    """
    match = re.search(r"nvshmemi_device_lib_version_d\[12\] = \{([\d, ]+)\}", ptx)
    if match is None:
        return None
    numbers = bytes(int(n) for n in match[1].split(",")).ljust(12, b"\0")  # trailing zeros are left out
    return ".".join(str(int.from_bytes(numbers[i : i + 4], "little")) for i in (0, 4, 8))
