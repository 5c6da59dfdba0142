"""Layers 1 and 3. Whatever of torch or of a trainer is replaced can be called and looked at as before.

What is replaced is found by comparing everything before with everything after, so a wrapper added later is tested too.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from test_unpatching import CLASSES, KINDS, instances, make
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import clip_grad
from training import DEVICE, Block, build, largest_difference, loss_of, tokens

import odc
from odc.fsdp_patch.automatic import AutomaticPatching
from odc.trainers.overrides import Overrides

CLIPPING = [clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_]

# By `odc run` in every process, and by a session in a model of each kind.
ALWAYS = {
    *("FSDPState.init", "FSDPState._lazy_init", "FullyShardedDataParallel.__init__"),
    *("FullyShardedDataParallel.forward", "FullyShardedDataParallel.clip_grad_norm_"),
    *("GradScaler.unscale_", "GradScaler.step", "ShardedGradScaler.unscale_"),
    *("Optimizer.zero_grad", "Module.zero_grad"),
    *("Module._apply", "FSDPModule._apply", "FullyShardedDataParallel._apply"),
    *(f"{function.__name__} (inner function)" for function in CLIPPING),
}
OF_A_MODEL = {
    "fsdp2": {"FSDPState._pre_forward", "FSDPState._post_forward", "FSDPParamGroup.post_backward"},
    "fsdp1-orig": {
        *("FlatParamHandle._all_gather_flat_param", "FlatParamHandle.prepare_gradient_for_optim"),
        *("FlatParamHandle.prepare_gradient_for_backward", "FlatParamHandle._writeback_orig_params"),
        *("FlatParamHandle._use_sharded_grad_views", "FlatParamHandle._use_unsharded_grad_views"),
        *("FlatParamHandle.unshard_grad", "FlatParamHandle.reshard_grad"),
        "FlatParamHandle._reset_flat_param_grad_info_if_needed",
    },
}
OF_A_MODEL["fsdp1-flat"] = OF_A_MODEL["fsdp1-orig"]


def functions_of_torch() -> dict[str, Any]:
    found = {
        f"{kind.__name__}.{name}": value
        for kind in [*CLASSES, FSDPState]
        for name, value in vars(kind).items()
        if inspect.isroutine(value)
    }
    for function in CLIPPING:
        (cell,) = function.__closure__ or ()
        found[f"{function.__name__} (inner function)"] = cell.cell_contents
    return found


def replaced_in(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Name, what it is now, and what its class has, of each method that an instance hides."""
    for _, instance in instances(model):
        for name, value in vars(instance).items():
            if inspect.isroutine(value) and hasattr(type(instance), name):
                yield f"{type(instance).__name__}.{name}", value, getattr(type(instance), name).__get__(instance)


def layers(function: Any, original: Any) -> Iterator[Any]:
    """The wrappers around ``original``, outermost first."""
    while function is not original and getattr(function, "__func__", function) is not getattr(original, "__func__", 0):
        yield function
        assert hasattr(function, "__wrapped__"), f"{function} hides what it wraps"
        function = function.__wrapped__


def check_same_calls(name: str, function: Any, original: Any) -> None:
    """Same signature and names; and each wrapper really takes by keyword what the original takes."""
    assert inspect.signature(function) == inspect.signature(original), name
    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(function, attribute) == getattr(original, attribute), (name, attribute)
    parameters = list(inspect.signature(original).parameters.values())
    first = [parameters.pop(0).name] if parameters and parameters[0].name == "self" else []
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for wrapper in layers(function, original):
        own = inspect.signature(wrapper, follow_wrapped=False)
        own.bind(*first, **dict.fromkeys(by_name))
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            own.bind(*first, **{p: None for p in own.parameters if p not in first})  # as an argument of the original
        own.bind(*first, *by_name[: sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)])


def same_calls(rank: int, world_size: int, kind: str) -> None:
    before = functions_of_torch()
    patching = AutomaticPatching(odc.patch_fsdp, lambda text: None)
    try:
        model = make(kind, world_size)
        loss_of(model, tokens(0, rank, 0)).backward()
        assert patching.sessions
        replaced = {name: now for name, now in functions_of_torch().items() if now is not before[name]}
        assert set(replaced) == ALWAYS
        for name, now in replaced.items():
            check_same_calls(name, now, before[name])
            if "inner" not in name:
                assert pickle.loads(pickle.dumps(now)) is now
        in_model = list(replaced_in(model))
        assert {name for name, _, _ in in_model} == OF_A_MODEL[kind]
        for name, now, original in in_model:
            check_same_calls(name, now, original)
        patching.sessions[0].discard()
    finally:
        patching.close()
    assert functions_of_torch() == before


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.extended if "flat" in k else ()) for k in KINDS])
def test_what_is_replaced_looks_like_the_original(kind: str) -> None:
    run_ranks(2, same_calls, kind)


# Scripts that name their arguments


class Named(nn.Module):
    """A model whose own arguments have the names that wrappers like to use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, *, module: torch.Tensor, wrapper: int, state: int, args: int, kwargs: int) -> torch.Tensor:
        logits: torch.Tensor = self.inner(module) * (wrapper + state + args + kwargs)
        return logits


class Subclass(FullyShardedDataParallel):
    """As libraries make them."""

    def __init__(self, *, module: nn.Module, **options: Any) -> None:
        super().__init__(module=module, **options)

    def forward(self, **inputs: Any) -> Any:
        return super().forward(**inputs)

    @classmethod
    def of(cls, module: nn.Module, **options: Any) -> FullyShardedDataParallel:
        return cls(module=module, **options)


WRAPPERS: dict[str, Callable[..., FullyShardedDataParallel]] = {
    "keyword": FullyShardedDataParallel,
    "subclass": Subclass,
    "classmethod": Subclass.of,
    "partial": functools.partial(FullyShardedDataParallel, use_orig_params=False),
}


def named_arguments(rank: int, world_size: int, how: str, patched: bool) -> dict[str, Any]:
    """A script that gives everything by name, as trainers do."""
    patching = AutomaticPatching(odc.patch_fsdp, lambda text: None) if patched else None
    try:
        torch.manual_seed(0)
        options = {"use_orig_params": True} if how != "partial" else {}
        model = WRAPPERS[how](module=Named(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=DEVICE, **options)
        assert isinstance(model, FullyShardedDataParallel)
        # Not fused: such a step refuses the shape of this scaler's flag, under plain FSDP1, too.
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
        for step in range(3):
            data = tokens(step, rank, 0)
            logits = model(module=data[:, :-1], wrapper=1, state=0, args=0, kwargs=0)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
            scaler.scale(outputs=loss).backward()
            scaler.unscale_(optimizer=optimizer)
            model.clip_grad_norm_(max_norm=0.5, norm_type=2.0)
            clip_grad.clip_grad_value_(clip_value=0.2, parameters=model.parameters())
            scaler.step(optimizer=optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            model.zero_grad(set_to_none=True)
        if patching:
            assert [session.stats().minibatches for session in patching.sessions] == [3]
        with FullyShardedDataParallel.summon_full_params(module=model, writeback=False):
            return {name: p.detach().clone() for name, p in model.named_parameters()}
    finally:
        if patching:
            patching.close()


def all_named(rank: int, world_size: int) -> dict[str, float]:
    return {
        how: largest_difference(*(named_arguments(rank, world_size, how, patched) for patched in (True, False)))
        for how in WRAPPERS
    }


def test_scripts_that_name_their_arguments_train_as_without_odc() -> None:
    assert run_ranks(2, all_named) == [dict.fromkeys(WRAPPERS, 0.0)] * 2


# Methods of trainers


class Accelerator:
    """As accelerate has it."""

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Over all ranks."""
        raise AssertionError("replaced")


def test_replaced_methods_of_an_object_look_like_the_original_and_take_keywords() -> None:
    accelerator = Accelerator()
    original = accelerator.gather_for_metrics
    with Overrides(accelerator) as overrides:
        overrides.replace("gather_for_metrics", lambda input_data, *_, **__: input_data)
        overrides.replace("number", 7)
        assert accelerator.gather_for_metrics(use_gather_object=True, input_data=3) == 3
        assert inspect.signature(accelerator.gather_for_metrics) == inspect.signature(original)
        assert accelerator.gather_for_metrics.__doc__ == original.__doc__
        assert vars(accelerator)["number"] == 7
    assert not vars(accelerator)
