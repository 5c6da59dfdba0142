"""Layer 3: ranks as processes. ``session.close()`` gives back plain FSDP: the same numbers, and no trace.

Two ranks with one microbatch each: a gradient is a sum of two numbers, so plain and patched steps are bit-equal.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optimizers
from training import build, clip, full_parameters, loss_of, optimizer_of, sharded_by, tokens, use_up

import odc
import odc.fsdp_patch.session

KINDS = ["fsdp2", "fsdp1-orig", "fsdp1-flat"]


def make(kind: str, world_size: int) -> Any:
    return sharded_by(kind, build(), world_size)


def step(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    (loss_of(model, tokens(number, rank, 0)) * 0.02).backward()
    clip(model)
    use_up(optimizer)


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(value).clone() for name, value in full_parameters(model).items()}


def assert_equal(ours: nn.Module, theirs: nn.Module) -> None:
    expected = parameters_of(theirs)
    for name, value in parameters_of(ours).items():
        assert torch.equal(value, expected[name]), name


def plain(kind: str, rank: int, world_size: int, steps: int) -> nn.Module:
    model = make(kind, world_size)
    optimizer = optimizer_of(model)
    for number in range(steps):
        step(model, optimizer, rank, number)
    return model


# Traces


def shape_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """Names; functions by identity; hooks one by one."""
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            found[name] = [id(hook) for hook in value.values()]
        else:
            found[name] = id(value) if callable(value) else ""
    return found


def instances(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Everything in a model that FSDP or a patch might hang something on."""
    for name, module in model.named_modules():
        yield f"module {name}", module
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            yield f"state {name}", state
            for group in (
                state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
            ):
                yield f"group {name}", group
                yield from ((f"param {name} {i}", param) for i, param in enumerate(group.fsdp_params))
        if getattr(module, "_handle", None) is not None:
            yield f"handle {name}", module._handle
            yield f"flat {name}", module._handle.flat_param
            yield f"order {name}", module._exec_order_data
    yield from model.named_parameters()


CLASSES = [
    *(torch.optim.Optimizer, torch.optim.AdamW, nn.Module, torch.amp.GradScaler, ShardedGradScaler),
    *(FullyShardedDataParallel, FSDPModule, FSDPParamGroup, FSDPParam, FlatParamHandle),
]


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    found = {name: shape_of(vars(instance)) for name, instance in instances(model)}
    found.update({f"class {kind.__name__}": {k: id(v) for k, v in vars(kind).items()} for kind in CLASSES})
    found["optimizer"] = shape_of(vars(optimizer))
    found["optimizers"] = shape_of(vars(optimizers))
    found["clipping"] = {k: id(v) for k, v in vars(clip_grad).items()}
    for function in (clip_grad.clip_grad_norm_, clip_grad.clip_grad_value_):
        found[f"clipping {function.__name__}"] = [id(cell.cell_contents) for cell in function.__closure__]
    found["collectives"] = {k: id(v) for k, v in vars(torch.distributed).items() if callable(v)}
    return found


def ours_within(root: Any) -> set[str]:
    """Types and functions of this package that are reachable from an object; looks into closures, not into globals."""
    seen: set[int] = set()
    todo, found = [root], set()
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, types.ModuleType, types.FrameType)):
            continue
        seen.add(id(thing))
        named = thing if isinstance(thing, types.FunctionType) else type(thing)
        if str(getattr(named, "__module__", "")).split(".")[0] == "odc":
            found.add(f"{named.__module__}.{named.__qualname__}")
        if isinstance(thing, types.FunctionType):
            todo += [thing.__closure__, thing.__defaults__, thing.__dict__]
        else:
            todo += gc.get_referents(thing)
    return found


def descriptors() -> list[str]:
    targets = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            targets.append(os.readlink(entry.path))
        except FileNotFoundError:  # that of scandir itself
            continue
    return sorted(target for target in targets if not target.startswith("/proc"))


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{key}: {before.get(key)} -> {after.get(key)}"
        for key in {*before, *after}
        if before.get(key) != after.get(key)
    ]


def no_trace(rank: int, world_size: int, kind: str) -> None:
    """Also: what is looked at here does show a session while it is open."""
    model = make(kind, world_size)
    optimizer = optimizer_of(model)
    step(model, optimizer, rank, 0)  # FSDP initialises itself in the first step
    before, threads = fingerprint(model, optimizer), set(threading.enumerate())
    step(model, optimizer, rank, 1)
    assert not changes(before, fingerprint(model, optimizer)), "plain FSDP leaves everything as it is in a step"
    open_before = descriptors()
    for accumulate, number in (("direct", 2), ("daemon", 4)):
        session = odc.patch_fsdp(model, accumulate=accumulate)
        assert changes(before, fingerprint(model, optimizer))
        assert ours_within(model)
        assert descriptors() != open_before
        for n in (number, number + 1):
            step(model, optimizer, rank, n)
        session.close()
        session.close()
        assert not changes(before, fingerprint(model, optimizer))
        assert not ours_within(model), ours_within(model)
        assert not ours_within(optimizer), ours_within(optimizer)
        gone = weakref.ref(session)
        del session
        gc.collect()
        assert gone() is None
        assert set(threading.enumerate()) == threads
        assert descriptors() == open_before
    step(model, optimizer, rank, 6)
    assert_equal(model, plain(kind, rank, world_size, 7))


def failed_patch(rank: int, world_size: int, kind: str) -> None:
    """An error at any point inside patch_fsdp: as if it had not been called."""
    model = make(kind, world_size)
    optimizer = optimizer_of(model)
    step(model, optimizer, rank, 0)
    before, open_before = fingerprint(model, optimizer), descriptors()
    places: list[tuple[Any, str]] = [
        (odc.fsdp_patch.session, "listen"),
        (type(model), "register_load_state_dict_post_hook"),
        (odc.fsdp_patch.session.Session, "describe"),
        (odc.fsdp_patch.session.Publisher, "publish_all"),
    ]
    for owner, name in places:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(owner, name, fail, raising=True)
            with pytest.raises(RuntimeError, match="on purpose"):
                odc.patch_fsdp(model)
        assert not changes(before, fingerprint(model, optimizer)), name
        assert not ours_within(model), name
        gc.collect()
        assert descriptors() == open_before, name
    step(model, optimizer, rank, 1)
    assert_equal(model, plain(kind, rank, world_size, 2))


def fail(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("on purpose")


def patched_twice(rank: int, world_size: int, kind: str) -> None:
    model = make(kind, world_size)
    optimizer = optimizer_of(model)
    session = odc.patch_fsdp(model)
    for number in range(4):
        with pytest.raises(odc.UnsupportedError, match=r"patched already: close\(\) the other session first"):
            odc.patch_fsdp(model)
        step(model, optimizer, rank, number)
    assert session.stats().minibatches == 4
    session.close()
    with odc.patch_fsdp(model) as session:
        step(model, optimizer, rank, 4)
        assert session.stats().minibatches == 1
    with pytest.raises(odc.OdcError, match="session is closed"):
        session.finish()
    assert_equal(model, plain(kind, rank, world_size, 5))


def gradients_outlive_the_session(rank: int, world_size: int, kind: str) -> None:
    """``.grad`` may lie in memory that goes away with the session."""
    model, reference = make(kind, world_size), make(kind, world_size)
    optimizer, expected = optimizer_of(model), optimizer_of(reference)
    for number in range(2):
        (loss_of(reference, tokens(number, rank, 0)) * 0.02).backward()
        session = odc.patch_fsdp(model)
        (loss_of(model, tokens(number, rank, 0)) * 0.02).backward()
        session.finish()
        held = [p.grad for p in model.parameters()]
        session.close()
        del session
        gc.collect()
        for parameter, grad, other in zip(model.parameters(), held, reference.parameters(), strict=True):
            for found in (parameter.grad, grad):
                # FSDP1 leaves None where a parameter has no part in this rank's shard
                assert (found is None) == (other.grad is None)
                assert found is None or torch.equal(local(found), local(other.grad))
        clip_grad.clip_grad_norm_(list(model.parameters()), 1e3)  # reads and writes them
        clip_grad.clip_grad_norm_(list(reference.parameters()), 1e3)
        optimizer.step()
        expected.step()
        if number == 0:  # in the second round they are added to gradients from before patching
            optimizer.zero_grad()
            expected.zero_grad()
            for m in (model, reference):
                (loss_of(m, tokens(7, rank, 0)) * 0.02).backward()
    assert_equal(model, reference)


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def two_sessions(rank: int, world_size: int, kind: str) -> None:
    """Open at once, closed in either order; the one that is left goes on."""
    for first_to_close in (0, 1):
        models = [make(kind, world_size), make("fsdp2" if kind == "fsdp1-flat" else kind, world_size)]
        steppers = [optimizer_of(model) for model in models]
        sessions = [odc.patch_fsdp(model) for model in models]
        for number, index in itertools.product(range(2), range(2)):
            step(models[index], steppers[index], rank, number)
        sessions[first_to_close].close()
        for index in range(2):
            step(models[index], steppers[index], rank, 2)
        assert [session.stats().minibatches for session in sessions] == [2 + first_to_close, 3 - first_to_close]
        sessions[1 - first_to_close].close()
        for index, model in enumerate(models):
            step(model, steppers[index], rank, 3)
            assert not ours_within(model)
            assert_equal(model, plain("fsdp2" if kind == "fsdp1-flat" and index else kind, rank, world_size, 4))


def dropped_models(rank: int, world_size: int, kind: str) -> None:
    """Models that are thrown away with their session closed: later ones, perhaps at the same addresses, are others."""
    for _ in range(3):
        model = make(kind, world_size)
        optimizer = optimizer_of(model)
        with odc.patch_fsdp(model) as session:
            step(model, optimizer, rank, 0)
            assert session.stats().minibatches == 1
        gone = weakref.ref(model)
        del model, optimizer, session
        gc.collect()
        assert gone() is None


SCENARIOS: list[Callable[[int, int, str], None]] = [
    *(no_trace, failed_patch, patched_twice, gradients_outlive_the_session, two_sessions, dropped_models)
]


def scenarios(rank: int, world_size: int, kind: str) -> dict[str, str]:
    """Each scenario's failure, if any."""
    gc.freeze()  # what was imported is not looked through again and again
    failures = {}
    for scenario in SCENARIOS:
        try:
            scenario(rank, world_size, kind)
        except Exception:
            failures[scenario.__name__] = traceback.format_exc()
        gc.collect()
    return failures


@functools.cache
def failures(kind: str) -> list[dict[str, str]]:
    return run_ranks(2, scenarios, kind, timeout_s=300)


@pytest.mark.parametrize(
    "kind",
    [
        "fsdp2",
        pytest.param("fsdp1-orig", marks=pytest.mark.extended),
        pytest.param("fsdp1-flat", marks=pytest.mark.extended),
    ],
)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_a_closed_session(scenario: Callable[[int, int, str], None], kind: str) -> None:
    for of_rank in failures(kind):
        assert scenario.__name__ not in of_rank, of_rank[scenario.__name__]
