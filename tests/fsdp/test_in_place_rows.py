"""Layer 1: no processes. Gradients of a unit of FSDP2 as rows by owner, whatever their shape, layout and dtype."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc import ParamSlice, UnitSpec
from odc.fsdp_patch import fsdp2_in_place
from odc.fsdp_patch.fsdp2_in_place import Held, InPlace
from odc.fsdp_patch.fsdp2_param import FsdpParam
from odc.units import Layout

CPU = torch.device("cpu")


def param_of(shape: tuple[int, ...], dim: int, world_size: int, is_trainable: bool) -> FsdpParam:
    """As rank 0 has it; dimensions other than the first are divided evenly."""
    local = list(shape)
    local[dim] = math.ceil(shape[dim] / world_size)
    sharded: Any = torch.zeros(1, requires_grad=is_trainable)  # in place of a DTensor
    sharded._local_tensor = sharded
    inner = SimpleNamespace(
        fsdp_placement=SimpleNamespace(dim=dim),
        padded_sharded_param_size=torch.Size(local),
        _sharded_param_data=torch.zeros(math.prod(local)),
        sharded_param=sharded,
    )
    return FsdpParam(inner, str(shape))


def by_owner(grad: torch.Tensor, dim: int, world_size: int, numel: int) -> torch.Tensor:
    rows = torch.zeros(world_size, numel)
    for owner, chunk in enumerate(torch.chunk(grad, world_size, dim)):
        rows[owner, : chunk.numel()] = chunk.flatten()
    return rows


def laid_out(grad: torch.Tensor, layout: str) -> torch.Tensor:
    """Equal values in other memory."""
    if layout == "transposed":
        return grad.mT.contiguous().mT if grad.dim() > 1 else grad
    if layout == "expanded":
        return grad[:1].expand_as(grad)
    if layout == "spaced":
        return torch.stack([grad, grad], dim=-1)[..., 0]
    return grad


@st.composite
def units(draw: st.DrawFn) -> tuple[int, list[dict[str, Any]]]:
    world_size = draw(st.integers(1, 4))
    params = []
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
        dim = draw(st.integers(0, len(shape) - 1))
        if dim:
            shape = (*shape[:dim], shape[dim] * world_size, *shape[dim + 1 :])
        params.append(
            {
                "shape": shape,
                "dim": dim,
                "is_trainable": draw(st.sampled_from([True, True, False])),
                "is_present": draw(st.sampled_from([True, True, True, False])),
                "layout": draw(st.sampled_from(["contiguous", "transposed", "expanded", "spaced"])),
                "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16])),
            }
        )
    return world_size, params


@given(
    unit=units(), small_numel=st.sampled_from([0, 6, 4096]), grad_dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_rows_are_the_owners_parts_of_the_gradients(
    unit: tuple[int, list[dict[str, Any]]], small_numel: int, grad_dtype: torch.dtype
) -> None:
    """Of two dtypes, where some have been accumulated in that of the reduction."""
    world_size, rows = unit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2_in_place, "SMALL_NUMEL", small_numel)
        found = [(param_of(r["shape"], r["dim"], world_size, r["is_trainable"]), r) for r in rows]
        found.sort(key=lambda pair: fsdp2_in_place.is_small(pair[0]))  # as Fsdp2Unit does
        params = [(param, torch.float32) for param, _ in found]
        in_place = InPlace(params, grad_dtype, world_size, CPU, Held())
        trainable = [(param, r) for param, r in found if r["is_trainable"]]
        present = [r["is_present"] for _, r in trainable]
        if not any(present):
            return
        generator = torch.Generator().manual_seed(len(rows))
        grads = {}
        for param, r in trainable:
            if r["is_present"]:
                grad = torch.randint(-9, 9, r["shape"], generator=generator).to(r["dtype"])
                grads[id(param.inner)] = laid_out(grad, r["layout"])
        pushed = in_place.rows(dict(grads))
    spec = UnitSpec("u", 1, torch.float32, tuple(ParamSlice(p.name, p.numel) for p, _ in trainable), grad_dtype)
    assert sum(part.numel for part in pushed) == spec.pushed_numel(present)
    layout, total = Layout.of(spec, [part.numel for part in pushed], present), torch.zeros(world_size, spec.grad_numel)
    for part, offset in zip(pushed, layout.offsets, strict=True):
        assert part.grads.dtype.itemsize <= grad_dtype.itemsize
        for owner, row in enumerate(part.unbind(world_size)):
            total[owner, offset : offset + row.numel()] = row.flatten().float()
    expected = [
        by_owner(grads[id(p.inner)].float(), r["dim"], world_size, p.numel)
        if r["is_present"]
        else torch.zeros(world_size, p.numel)
        for p, r in trainable
    ]
    assert torch.equal(total, torch.cat(expected, dim=1))


def test_a_large_contiguous_gradient_is_not_copied() -> None:
    param = param_of((4, 2048), 0, 2, True)
    frozen, columns = param_of((4, 2048), 0, 2, False), param_of((4, 4096), 1, 2, True)
    in_place = InPlace([(p, torch.float32) for p in (param, frozen, columns)], torch.float32, 2, CPU, Held())
    grads = [torch.zeros(4, 2048), torch.zeros(4, 4096)]
    pushed = in_place.rows({id(param.inner): grads[0], id(columns.inner): grads[1]})
    assert [part.grads.data_ptr() for part in pushed] == [grad.data_ptr() for grad in grads]
