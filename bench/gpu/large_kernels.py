"""Kernels on buffers of more than 2**31 elements or bytes, where a 32-bit offset would wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from odc.bench.gpu.setting import require
from odc.kernels.accumulate import accumulate
from odc.kernels.fill import copy_cast, fill
from odc.kernels.parts import COLUMNS, MAX_PARTS, PartRows, gather_parts, scatter_accumulate_parts
from odc.kernels.peers import PeerTable

NEEDED_BYTES = 16 << 30
NUMEL = (1 << 31) + 4099  # elements: offsets in elements wrap, and those in bytes long before
_CHUNK = 1 << 26
_PERIOD = 251  # of the pattern: whole numbers that bf16 holds


def check_large(device: torch.device) -> str:
    """Every kernel once; which ones, for people."""
    parts: tuple[Callable[[torch.device], None], ...] = (
        _fill,
        _copy_cast,
        _accumulate,
        _gather_parts,
        _push_parts,
    )
    for part in parts:
        part(device)
        torch.cuda.empty_cache()  # the next one needs the memory
    return f"{len(parts)} kernels"


def _chunks(numel: int) -> Iterator[slice]:
    for low in range(0, numel, _CHUNK):
        yield slice(low, min(low + _CHUNK, numel))


def _pattern(part: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(part.start, part.stop, dtype=torch.int64, device=device).remainder_(_PERIOD)


def _patterned(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Element i is i modulo 251."""
    out = torch.empty(numel, dtype=dtype, device=device)
    for part in _chunks(numel):
        out[part] = _pattern(part, device).to(dtype)
    return out


def _expect(found: torch.Tensor, factor: float, added: float, what: str, first: int = 0) -> None:
    """Element i is ``factor`` times the pattern's element ``first + i``, plus ``added``."""
    for part in _chunks(found.numel()):
        place = slice(first + part.start, first + part.stop)
        wanted = (_pattern(place, found.device) * factor + added).to(found.dtype)
        require(torch.equal(found[part], wanted), f"{what}: wrong in elements {part.start} to {part.stop}")


def _fill(device: torch.device) -> None:
    out = torch.zeros(NUMEL, dtype=torch.bfloat16, device=device)
    fill(out, 3.0)
    _expect(out, 0.0, 3.0, "fill")


def _copy_cast(device: torch.device) -> None:
    source = _patterned(NUMEL, torch.bfloat16, device)
    out = torch.empty_like(source)
    copy_cast(out, source)
    _expect(out, 1.0, 0.0, "copy_cast")


def _accumulate(device: torch.device) -> None:
    addend = _patterned(NUMEL, torch.bfloat16, device)
    total = torch.ones(NUMEL, dtype=torch.float32, device=device)
    accumulate(total, addend)
    _expect(total, 1.0, 1.0, "accumulate")


def _rows(device: torch.device) -> PartRows:
    return PartRows(torch.zeros(MAX_PARTS, COLUMNS, dtype=torch.int64, pin_memory=device.type == "cuda"))


def _gather_parts(device: torch.device) -> None:
    """The output is beyond 2**31, and so is the place of its shards in their buffers, behind a small parameter."""
    numel, before = NUMEL // 2, 1 << 10
    buffer = _patterned((1 << 30) + numel, torch.bfloat16, device)
    outs = [torch.empty(2 * n, dtype=torch.bfloat16, device=device) for n in (before, numel)]
    rows, table = _rows(device), PeerTable.of([buffer, buffer])
    gather_parts(rows, outs, table, rank=0, offset_bytes=2 * ((1 << 30) - before))
    for row in range(2):
        _expect(outs[1][row * numel : (row + 1) * numel], 1.0, 0.0, f"gather_parts, row {row}", first=1 << 30)


def _push_parts(device: torch.device) -> None:
    numel = NUMEL // 2
    grads = _patterned(2 * numel, torch.bfloat16, device)
    totals = [torch.ones(numel, device=device) for _ in range(2)]
    rows, table = _rows(device), PeerTable.of(totals)
    scatter_accumulate_parts(rows, table, [grads[:-9]], [0], [numel], rank=0)
    _expect(totals[0], 1.0, 1.0, "scatter_accumulate_parts, owner 0")
    _expect(totals[1][:-9], 1.0, 1.0, "scatter_accumulate_parts, owner 1", first=numel)
    _expect(totals[1][-9:], 0.0, 1.0, "scatter_accumulate_parts, missing elements")
