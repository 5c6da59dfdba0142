"""Layers 1 and 3. Gradients that are not there yet: whoever uses their data makes them final, once, whoever it is."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from odc.fsdp_patch.pending import Expected, Pending, PendingGradient, Reduction, settled

FINAL = torch.arange(12.0).reshape(4, 3)


class Ender:
    """Makes the gradient of a parameter final when it is asked for, as a session does."""

    def __init__(self, parameter: nn.Parameter, as_gradient: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.parameter, self.as_gradient = parameter, as_gradient
        self.num_ends, self.reduction = 0, Reduction()
        like = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.detach()
        self.expected = Expected(parameter, like, self.end, self.reduction, as_gradient)

    def end(self, pending: Pending, *, is_zeroed: bool = False) -> torch.Tensor:
        if is_zeroed:
            return pending.now()
        self.num_ends += 1
        self.expected.withdraw()
        if self.expected.was_there:
            self.parameter.grad = self.as_gradient(FINAL + (0 if pending.base is None else pending.base))
        self.expected.settle()
        assert pending.final is not None
        return pending.final


def plain() -> Ender:
    return Ender(nn.Parameter(torch.ones(4, 3)), lambda tensor: tensor)


USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "norm": lambda p: p.grad.norm(),
    "in place": lambda p: p.grad.mul_(2.0),
    "augmented": lambda p: exec("p.grad *= 2", {"p": p}),
    "foreach": lambda p: torch._foreach_norm([p.grad]),
    "clip_grad_norm_": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "clip_grad_value_": lambda p: nn.utils.clip_grad_value_([p], 1.0),
    "clone": lambda p: p.grad.clone(),
    "data": lambda p: p.grad.data.sum(),
    "detach": lambda p: p.grad.detach().sum(),
    "a view": lambda p: p.grad.flatten()[0],
    "copied": lambda p: torch.zeros(4, 3).copy_(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad),
    "isfinite": lambda p: torch.isfinite(p.grad).all(),
    "a step": lambda p: torch.optim.SGD([p], lr=1.0).step(),
    "an optimizer that is fused": lambda p: torch.optim.AdamW([p], fused=True).step(),
    "compiled": lambda p: torch.compile(lambda q: q.grad.mul_(2.0), backend="eager")(p),
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "saved": lambda p: torch.save(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad, io.BytesIO()),
}
ON_TENSORS: dict[str, Callable[[nn.Parameter], Any]] = {
    "numpy": lambda p: p.grad.numpy(),
    "tolist": lambda p: p.grad.tolist(),
    "data_ptr": lambda p: p.grad.data_ptr(),
    "dlpack": lambda p: torch.from_dlpack(p.grad),
}
NO_USES: dict[str, Callable[[nn.Parameter], Any]] = {
    "is None": lambda p: p.grad is None,
    "shape": lambda p: (p.grad.shape, p.grad.numel(), p.grad.nbytes, p.grad.stride()),
    "kind": lambda p: (p.grad.dtype, p.grad.device, p.grad.is_sparse, p.grad.requires_grad, p.grad.is_cuda),
    "an alias": lambda p: (p.grad.data, p.grad.detach()),
    "printed": lambda p: repr(p.grad),
    "autograd's flags": lambda p: (p.grad.detach_(), p.grad.requires_grad_(False)),
    "zero_grad of nothing": lambda p: torch.optim.SGD([p]).zero_grad(set_to_none=False),
}


@pytest.mark.parametrize("use", [*USES, *ON_TENSORS])
def test_a_use_ends_once(use: str) -> None:
    ender = plain()
    handle = ender.parameter.grad
    {**USES, **ON_TENSORS}[use](ender.parameter)
    assert ender.num_ends == 1
    assert handle is not None
    float(handle.sum())  # the one taken before is final too
    {**USES, **ON_TENSORS}[use](ender.parameter)
    assert ender.num_ends == 1


@pytest.mark.parametrize("use", NO_USES)
def test_what_needs_no_data_ends_nothing(use: str) -> None:
    ender = plain()
    NO_USES[use](ender.parameter)
    assert ender.num_ends == 0
    assert settled(ender.parameter.grad) is None


def with_dtensors(rank: int, world_size: int) -> dict[str, tuple[int, bool]]:
    """How often each use has ended, and whether what is in ``.grad`` then is an ordinary gradient."""
    mesh = init_device_mesh("cpu", (1,))
    found = {}
    for name, use in {**USES, **NO_USES}.items():
        parameter = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        ender = Ender(parameter, lambda tensor, spec=parameter._spec: DTensor(tensor, spec, requires_grad=False))
        use(parameter)
        gradient: Any = parameter.grad
        found[name] = (ender.num_ends, not isinstance(gradient._local_tensor, PendingGradient))
    return found


def test_under_a_dtensor_it_is_the_same() -> None:
    (found,) = run_ranks(1, with_dtensors)
    assert found == {name: (int(name in USES), name in USES) for name in (*USES, *NO_USES)}


def test_an_earlier_gradient_is_added_to_where_it_is() -> None:
    parameter = nn.Parameter(torch.ones(4, 3))
    parameter.grad = torch.full((4, 3), 100.0)
    ender = Ender(parameter, lambda tensor: tensor)
    assert torch.equal(settled(parameter.grad), torch.full((4, 3), 100.0))  # type: ignore[arg-type]
    assert torch.equal(parameter.grad + 0, FINAL + 100.0)
    assert ender.num_ends == 1


def test_what_a_script_puts_there_stays() -> None:
    cleared, replaced = plain(), plain()
    cleared.expected.pending.is_sent = True
    cleared.parameter.grad = None
    replaced.parameter.grad = torch.full((4, 3), 7.0)
    for ender in (cleared, replaced):
        assert not ender.expected.is_there
        ender.end(ender.expected.pending)
    assert cleared.expected.is_cleared
    assert cleared.parameter.grad is None
    assert float(replaced.parameter.grad.mean()) == 7.0


def test_clearing_what_is_expected_loses_nothing_that_others_bring() -> None:
    """And what was there before is gone."""
    ender = plain()
    for base in (None, FINAL):
        ender.parameter.grad = base
        ender.expected = Expected(ender.parameter, ender.parameter.detach(), ender.end, ender.reduction)
        ender.parameter.grad = None
        ender.end(ender.expected.pending)
        assert torch.equal(ender.parameter.grad, FINAL)


def test_it_keeps_neither_the_parameter_nor_its_gradient_alive() -> None:
    """Nor does who has it at hand."""
    ender = plain()
    gradient, parameter = ender.parameter.grad, weakref.ref(ender.parameter)
    gc.disable()
    try:
        del ender.parameter, ender.expected
        assert parameter() is None
    finally:
        gc.enable()
    assert isinstance(gradient, PendingGradient)
    assert torch.equal(gradient.pending.now(), torch.zeros(4, 3))


def test_nothing_refers_weakly_to_what_a_script_may_swap() -> None:
    ender = plain()
    parameter = ender.parameter
    assert not [*weakref.getweakrefs(parameter), *weakref.getweakrefs(parameter.grad)]
