"""Layer 1: no processes. Every way to read gradients is noticed, and torch is left as it was."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torch.optim import optimizer as torch_optimizer

from odc.errors import UnsupportedError
from odc.fsdp_patch import interception
from odc.fsdp_patch.gradient_events import Listener, Listeners
from odc.fsdp_patch.interception import InnerFunction

METHODS = [
    (torch.amp.GradScaler, "unscale_"),
    (torch.amp.GradScaler, "step"),
    (ShardedGradScaler, "unscale_"),
    (FullyShardedDataParallel, "clip_grad_norm_"),
    (state_dict, "_init_optim_state"),
    (torch.optim.Optimizer, "zero_grad"),
    (nn.Module, "zero_grad"),
    (nn.Module, "_apply"),
    (FSDPModule, "_apply"),
    (FullyShardedDataParallel, "_apply"),
]
FUNCTIONS = [clip_grad_norm_, clip_grad_value_]


def objects() -> list[Any]:
    """What listening exchanges, as it is now."""
    methods = [owner.__dict__[name] for owner, name in METHODS]
    cells = [cell.cell_contents for function in FUNCTIONS for cell in function.__closure__]
    return methods + cells


class Ear(Listener):
    """A listener that writes down what it is told."""

    def __init__(self, owns: bool = True) -> None:
        self.heard: list[tuple[str, list[int]]] = []
        self._owns = owns
        self.undo = interception.listen(self)

    def owns(self, tensors: Sequence[torch.Tensor]) -> bool:
        return self._owns

    def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        self.heard.append((what, [id(t) for t in tensors]))

    def before_clearing(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        self.heard.append((f"clearing {what}", [id(t) for t in tensors]))

    def after_clearing(self, tensors: Sequence[torch.Tensor]) -> None:
        self.heard.append(("cleared", [id(t) for t in tensors]))

    def after_step(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
        self.heard.append((f"after {what}", [id(t) for t in tensors]))

    def after_scaled_step(self, tensors: Sequence[torch.Tensor]) -> None:
        self.heard.append(("after scaled step", [id(t) for t in tensors]))

    @property
    def names(self) -> list[str]:
        return [what for what, _ in self.heard]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """After every test torch holds the very same objects as before."""
    before = objects()
    yield
    assert all(now is then for now, then in zip(objects(), before, strict=True))
    assert not torch_optimizer._global_optimizer_pre_hooks
    assert not torch_optimizer._global_optimizer_post_hooks


@pytest.fixture
def ear() -> Iterator[Ear]:
    one = Ear()
    yield one
    one.undo()


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(3, 2)
    linear(torch.ones(1, 3)).sum().backward()
    return linear


def ids(model: nn.Module) -> list[int]:
    return [id(p) for p in model.parameters()]


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda m: clip_grad_norm_(m.parameters(), 1.0), "clip_grad_norm_"),
        (lambda m: clip_grad_norm_(list(m.parameters()), 1.0), "clip_grad_norm_"),
        (lambda m: clip_grad_norm_(parameters=m.parameters(), max_norm=1.0), "clip_grad_norm_"),
        (lambda m: clip_grad_norm_(max_norm=1.0, parameters=list(m.parameters())), "clip_grad_norm_"),
        (lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), max_norm=1.0), "clip_grad_norm_"),
        (lambda m: clip_grad_value_(m.parameters(), 0.1), "clip_grad_value_"),
        (lambda m: clip_grad_value_(clip_value=0.1, parameters=m.parameters()), "clip_grad_value_"),
    ],
)
def test_clipping_is_noticed_however_it_is_called(
    ear: Ear, model: nn.Linear, call: Callable[[nn.Module], object], what: str
) -> None:
    call(model)
    assert ear.heard[0] == (what, ids(model))
    clipped = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    largest = clipped.norm() if what == "clip_grad_norm_" else clipped.abs().max()
    assert float(largest) == pytest.approx(1.0 if what == "clip_grad_norm_" else 0.1)


def test_one_tensor_is_clipped(ear: Ear, model: nn.Linear) -> None:
    clip_grad_norm_(model.weight, 0.5)
    assert ear.heard[0] == ("clip_grad_norm_", [id(model.weight)])


def test_torch_complains_as_ever_about_wrong_calls(ear: Ear) -> None:
    with pytest.raises(TypeError, match="max_norm"):
        clip_grad_norm_([])
    with pytest.raises(TypeError, match="parameters"):
        clip_grad_norm_(max_norm=1.0)
    with pytest.warns(UserWarning, match="empty generator"):
        clip_grad_norm_((p for p in ()), 1.0)
    assert ear.names == []


@pytest.mark.parametrize("keyword", [False, True])
def test_a_scaler_is_noticed(ear: Ear, model: nn.Linear, keyword: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))  # creates the scale
    if keyword:
        scaler.unscale_(optimizer=optimizer)
        scaler.step(optimizer=optimizer)
    else:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert ear.names == [
        *["GradScaler.unscale_", "GradScaler.step", "optimizer.step", "after optimizer.step", "after scaled step"],
    ]
    assert all(tensors == ids(model) for _, tensors in ear.heard)


def test_steps_and_clearings_are_noticed(ear: Ear, model: nn.Linear) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad(set_to_none=True)
    assert ear.names == [
        *["optimizer.step", "after optimizer.step"],
        *["clearing Optimizer.zero_grad", "cleared", "clearing Module.zero_grad", "cleared"],
    ]
    assert all(tensors == ids(model) for _, tensors in ear.heard)


@pytest.mark.parametrize("keyword", [False, True])
def test_with_a_closure_gradients_are_final_behind_it(ear: Ear, model: nn.Linear, keyword: bool) -> None:
    optimizer = torch.optim.Adam(model.parameters())

    def closure() -> torch.Tensor:
        ear.heard.append(("closure", []))
        return torch.tensor(7.0)

    loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert loss == 7.0
    assert ear.names == ["closure", "optimizer.step", "after optimizer.step"]


def test_lbfgs_is_refused_only_for_parameters_of_a_listener(model: nn.Linear) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    stranger, owner = Ear(owns=False), Ear(owns=False)
    optimizer.step(lambda: model(torch.ones(1, 3)).sum())
    owner.undo()
    owner = Ear(owns=True)
    before = model.weight.clone()
    with pytest.raises(UnsupportedError, match="LBFGS"):
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())
    assert torch.equal(model.weight, before)
    owner.undo()
    stranger.undo()


def test_two_listeners_hear_the_same_until_each_leaves(model: nn.Linear) -> None:
    first, second = Ear(), Ear()
    clip_grad_norm_(model.parameters(), 1.0)
    first.undo()
    first.undo()  # idempotent, and does not remove the other one
    clip_grad_value_(model.parameters(), 1.0)
    assert (first.names, second.names) == (["clip_grad_norm_"], ["clip_grad_norm_", "clip_grad_value_"])
    second.undo()
    clip_grad_norm_(model.parameters(), 1.0)
    assert len(second.names) == 2


@pytest.mark.parametrize("reading", ["clip", "step", "closure"])
def test_who_begins_to_listen_while_others_are_told_is_told_as_well(model: nn.Linear, reading: str) -> None:
    late: list[Ear] = []

    class Patching(Listener):
        def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
            if not late:
                late.append(Ear())

    patching = Patching()
    undo = interception.listen(patching)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if reading == "clip":
        clip_grad_norm_(model.parameters(), 1.0)
    elif reading == "step":
        optimizer.step()
    else:
        optimizer.step(lambda: 0.0)
    assert late[0].heard[0] == ("clip_grad_norm_" if reading == "clip" else "optimizer.step", ids(model))
    late[0].undo()
    undo()


@pytest.mark.parametrize("reading", ["clip", "step", "closure"])
def test_an_exception_of_a_listener_comes_before_anything_changes(model: nn.Linear, reading: str) -> None:
    class Refusing(Listener):
        def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
            raise RuntimeError(f"refused {what}")

    refusing = Refusing()
    undo = interception.listen(refusing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, gradient = model.weight.clone(), model.weight.grad.clone()
    read: dict[str, Callable[[], object]] = {
        "clip": lambda: clip_grad_norm_(model.parameters(), 0.1),
        "step": optimizer.step,
        "closure": lambda: optimizer.step(lambda: 0.0),
    }
    with pytest.raises(RuntimeError, match="refused"):
        read[reading]()
    assert torch.equal(model.weight, weight)
    assert torch.equal(model.weight.grad, gradient)
    undo()
    clip_grad_norm_(model.parameters(), 0.1)  # the listener is gone: nothing refuses
    optimizer.step()
    assert not torch.equal(model.weight, weight)


def test_who_wraps_a_function_of_torch_meanwhile_keeps_it_wrapped(
    model: nn.Linear, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    first = Ear()
    telling = torch.optim.Optimizer.zero_grad

    def wrapped(*args: Any, **kwargs: Any) -> None:
        calls.append("wrapped")
        telling(*args, **kwargs)

    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", wrapped)
    first.undo()
    assert torch.optim.Optimizer.zero_grad is wrapped
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    assert calls == ["wrapped"]
    assert first.names == []
    second = Ear()
    optimizer.zero_grad()
    assert second.names == [
        "clearing Optimizer.zero_grad",
        "cleared",
    ]  # once, not once per listener that there has been
    monkeypatch.undo()
    second.undo()


# What other libraries put in the place of torch's clipping, before anybody listens and before odc is imported


def by_function(original: Any) -> Any:
    def clip(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return clip


def by_wraps(original: Any) -> Any:
    return functools.wraps(original)(by_function(original))


def by_global(original: Any) -> Any:
    """A plain function, no closure: the original is not to be found."""
    scope: dict[str, Any] = {"original": original}
    exec("def clip(*args, **kwargs): return original(*args, **kwargs)", scope)
    return scope["clip"]


class Clipper:
    """An instance that can be called."""

    def __init__(self, original: Any) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


def by_several_callables(original: Any) -> Any:
    """A wrapper whose closure holds other callables and an empty cell, before the one that matters."""
    before, after = print, Ear

    def clip(*args: Any, **kwargs: Any) -> Any:
        if args == ():
            before(never, after)
        return original(*args, **kwargs)

    if original is None:
        never = 1
    return clip


def by_a_stranger(original: Any) -> Any:
    """It does not call the original."""

    def clip_grad_norm_(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> torch.Tensor:
        gradients = [p.grad for p in parameters]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_(min(1.0, max_norm / float(norm)))
        return norm

    return clip_grad_norm_


REPLACEMENTS: list[Callable[[Any], Any]] = [
    *(by_function, by_wraps, by_global, by_several_callables, by_a_stranger, Clipper),
    lambda original: functools.partial(original, norm_type=2.0),
    lambda original: functools.partial(by_wraps(original), error_if_nonfinite=False),
    lambda original: Clipper(by_function(original)).method,
]


@pytest.mark.parametrize("replace", REPLACEMENTS)
@pytest.mark.parametrize("where", [[clip_grad], [clip_grad, nn.utils], [nn.utils]], ids=["module", "both", "package"])
def test_clipping_that_another_library_has_replaced_is_noticed_and_stays_replaced(
    model: nn.Linear, monkeypatch: pytest.MonkeyPatch, replace: Callable[[Any], Any], where: list[Any]
) -> None:
    theirs = replace(clip_grad_norm_)
    for module in where:
        monkeypatch.setattr(module, "clip_grad_norm_", theirs)
    before = [*objects(), clip_grad.clip_grad_norm_, nn.utils.clip_grad_norm_]
    heard: list[str] = []

    class Hearing(Listener):
        def before_reading(self, what: str, tensors: Sequence[torch.Tensor]) -> None:
            assert len(tensors) == 2
            heard.append(what)

    hearing, listeners = Hearing(), Listeners(lambda: None, lambda: None)
    function = InnerFunction(clip_grad.clip_grad_norm_, listeners)
    undo = listeners.add(hearing)
    for opened in (True, True, False):
        function.enter() if opened else function.leave()
        for module in where if where != [nn.utils] else [clip_grad]:
            called = len(heard)
            assert float(module.clip_grad_norm_(model.parameters(), 0.5)) > 0
            assert heard[called:] == ["clip_grad_norm_"] * opened  # once, whoever calls whom
        if replace is not by_a_stranger and replace is not by_global:
            assert clip_grad.clip_grad_norm_ is before[-2]  # what is theirs was not touched
            clip_grad_norm_(model.parameters(), 0.5)  # imported before anybody replaced it
            assert heard[called + 1 :] == ["clip_grad_norm_"] * opened
    undo()
    assert [*objects(), clip_grad.clip_grad_norm_, nn.utils.clip_grad_norm_] == before


CLIPPING_REPLACED = """
import functools, torch
from torch.nn.utils import clip_grad
class Clipper:
    def __call__(self, parameters, max_norm): return torch.tensor(7.0)
clip_grad.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_ = Clipper()
clip_grad.clip_grad_value_ = functools.partial(clip_grad.clip_grad_value_, foreach=False)
theirs = dict(vars(clip_grad))
import odc.fsdp_patch
assert vars(clip_grad) == theirs
from odc.fsdp_patch import interception
from odc.fsdp_patch.gradient_events import Listener
class Ear(Listener):
    def before_reading(self, what, tensors): print(what)
ear = Ear()
undo = interception.listen(ear)
parameter = torch.nn.Parameter(torch.ones(2))
parameter.grad = torch.ones(2)
assert torch.nn.utils.clip_grad_norm_([parameter], 1.0) == 7.0
torch.nn.utils.clip_grad_value_([parameter], clip_value=1.0)
clip_grad.clip_grad_value_([parameter], clip_value=1.0)
undo()
assert vars(clip_grad) == theirs
"""


AT_THE_END = """
import gc
from odc.fsdp_patch import interception
from odc.fsdp_patch.gradient_events import Listener
gc.disable()
listener = Listener()
interception.listen(listener)
"""


FORKS = """
import gc, os, sys, torch._dynamo, torch.distributed.fsdp, torch.distributed.tensor
gc.freeze()  # else each fork would look at all of torch when it ends
for script in sys.argv[1:]:
    child = os.fork()
    if not child:
        for stream, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{name} {sys.argv.index(script)}", os.O_WRONLY | os.O_CREAT), stream)
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    script = ""
exec(script)
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors of scripts. Each has an interpreter that has torch, but has not met odc."""
    folder = tmp_path_factory.mktemp("interpreters")
    scripts = (CLIPPING_REPLACED, AT_THE_END)
    command = [sys.executable, "-c", FORKS, *scripts]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {
        script: (int(code), (folder / f"out {number}").read_text(), (folder / f"err {number}").read_text())
        for number, (script, code) in enumerate(zip(scripts, done.stdout.split(), strict=True), 1)
    }


def test_odc_is_imported_where_clipping_was_replaced(ended: dict[str, tuple[int, str, str]]) -> None:
    code, printed, errors = ended[CLIPPING_REPLACED]
    assert code == 0, errors
    assert printed.split() == ["clip_grad_norm_", "clip_grad_value_", "clip_grad_value_"]


class Lookahead(torch.optim.Optimizer):
    """Changes parameters after the step of the optimizer that it wraps."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.5)


def test_a_step_inside_a_step_is_over_with_the_outer_one(ear: Ear, model: nn.Linear) -> None:
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    nested = Lookahead(plain)
    nested.step()
    assert ear.names == ["optimizer.step", "optimizer.step", "after optimizer.step"]
    plain.step()
    assert ear.names[-1] == "after optimizer.step"
    assert len(ear.names) == 5


def test_a_listener_is_not_kept_alive(model: nn.Linear) -> None:
    before = objects()
    ear = Ear()
    assert objects() != before
    del ear
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(now is then for now, then in zip(objects(), before, strict=True))


def test_a_listener_that_goes_with_the_interpreter_says_nothing(ended: dict[str, tuple[int, str, str]]) -> None:
    assert ended[AT_THE_END] == (0, "", "")
