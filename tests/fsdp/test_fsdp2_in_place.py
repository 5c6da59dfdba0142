"""Layer 3: ranks as processes. FSDP2 without staging: what is copied, what memory a step takes, how torch's functions
are entered and left, and faults within a gather or a push.

What it trains to is in test_fsdp2_in_place_numbers.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty_ranks import Fault
from process_ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_group
from torch.utils._python_dispatch import TorchDispatchMode
from training import Net, build, communicating, full_parameters, loss_of, optimizer_of, shard, tokens, use_up

import odc
from odc.fsdp_patch import compat
from odc.fsdp_patch.compat import torch_version
from odc.fsdp_patch.fsdp2_unit import OdcAllGather, OdcReduceScatter

# What a unit costs its host

OWN = os.path.dirname(odc.__file__)


def counted(found: list[tuple[int, int]], door: Callable[..., Any]) -> Callable[..., Any]:
    """``door``, which notes how many functions of ODC it calls, and in how many of them the bytes are moved."""

    def call(*args: Any) -> None:
        num_calls, deepest = 0, 0

        def note(frame: Any, event: str, function: Any) -> None:
            nonlocal num_calls, deepest
            if event == "call":
                num_calls += frame.f_code.co_filename.startswith(OWN)
            elif event == "c_call" and function.__name__ in ("_foreach_copy_", "_foreach_add_"):
                depth = 0
                while frame.f_code is not call.__code__:
                    depth, frame = depth + frame.f_code.co_filename.startswith(OWN), frame.f_back
                deepest = max(deepest, depth)

        sys.setprofile(note)
        try:
            door(*args)
        finally:
            sys.setprofile(None)
        found.append((num_calls, deepest))

    return call


def calls_of_units(rank: int, world_size: int) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {"gathers": [], "pushes": []}
    model = shard(build(num_blocks=4), world_size)
    with communicating("in place"):
        session = odc.patch_fsdp(model)
    for _ in range(2):
        loss_of(model, tokens(0, rank, 0)).backward()
    OdcAllGather.gather_in_place = counted(found["gathers"], OdcAllGather.gather_in_place)  # type: ignore[method-assign]
    OdcReduceScatter.push_in_place = counted(found["pushes"], OdcReduceScatter.push_in_place)  # type: ignore[method-assign]
    for _ in range(2):
        loss = loss_of(model, tokens(0, rank, 0))
        for turn in range(world_size):
            if turn == rank:
                loss.backward()
            dist.barrier()  # one after another: who waits for a slice's lock calls more
        session.finish()
    return found


def test_calls_of_a_unit_of_six_parameters() -> None:
    """What Python takes of a host is what it calls. The first push of a minibatch looks at all 27 parameters."""
    for found in run_ranks(2, calls_of_units):
        for operations in (found["gathers"][:8], found["pushes"][:5]):
            assert all(num_calls <= 60 and 0 < depth <= 6 for num_calls, depth in operations), operations
        assert found["pushes"][5][0] <= 380


# Large units: what is copied, and what memory that takes


class Layers(nn.Module):
    """A unit of two matrices, which are large, and biases, which are not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def layers(width: int, num_units: int, world_size: int, **options: Any) -> Any:
    """Each unit is freed behind its forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Layers(width) for _ in range(num_units)])
    mesh = init_device_mesh("cpu", (world_size,))
    for unit in model:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, **options)
    return fully_shard(model, mesh=mesh, **options)


# What moves bytes, as opposed to what computes.
_MOVERS = ("copy", "add_", "add.out", "cat", "clone", "contiguous", "zero_", "fill_")
_MAKERS = ("empty", "zeros", "full", "ones", "clone", "cat", "_to_copy")


class Moved(TorchDispatchMode):
    """Counts the elements that operations write that only move or add, for tensors of at least so many, and finds
    memory of at least so many that operations allocate which do not compute."""

    def __init__(self, at_least: int, a_unit: int) -> None:
        super().__init__()
        self._at_least, self._a_unit = at_least, a_unit
        self.elements: Counter[str] = Counter()
        self.small = 0
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        written = self._written(name, args, kwargs or {}, result)
        for numel in written:
            if numel >= self._at_least:
                self.elements[name] += numel
            else:
                self.small += numel
        is_large = isinstance(result, torch.Tensor) and result.numel() >= self._a_unit
        if is_large and any(part in name for part in _MAKERS):
            self.made.append(f"{name} {list(result.shape)}")
        return result

    def _written(self, name: str, args: Any, kwargs: Any, result: Any) -> list[int]:
        if not any(part in name for part in _MOVERS) or "view" in name or "addmm" in name:
            return []
        if "out" in kwargs:
            outs = kwargs["out"]
        elif name.startswith("fsdp.all_gather_copy_in"):
            outs = args[0]  # this rank's shard, into its place
        elif "foreach" in name or name.split(".")[1].endswith("_"):
            outs = args[0]
        else:
            outs = result
        outs = [outs] if isinstance(outs, torch.Tensor) else outs or []
        return [one.numel() for one in outs]


def moved(rank: int, world_size: int, way: str, options: dict[str, Any]) -> dict[str, Any]:
    """In one minibatch of two microbatches, without its end."""
    width, num_units = 256, 3
    with communicating("small" if way == "in place" else way):
        model = layers(width, num_units, world_size, **options)
        data = torch.randn(2, width)
        session = odc.patch_fsdp(model)
        for _ in range(2):  # the first gathers allocate what stays
            model(data).float().square().sum().backward()
        session.finish()
        model.zero_grad()
        session._publisher.publish_all()  # the next gather would do so
        before = session.stats()
        with Moved(width * width // world_size, 2 * width * width) as counter:
            for _ in range(2):
                model(data).float().square().sum().backward()
        after = session.stats()
        session.finish()
        session.close()
    return {
        "gathers": after.gathers - before.gathers,
        "pushes": after.pushes - before.pushes,
        "elements": dict(counter.elements),
        "small": counter.small,
        "made": counter.made,
    }


POLICIES = {
    "float32": {},
    "bfloat16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def moved_each_way(rank: int, world_size: int) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        dtype: {way: moved(rank, world_size, way, options) for way in ("in place", "staged")}
        for dtype, options in POLICIES.items()
    }


@pytest.fixture(scope="module")
def moves() -> list[dict[str, dict[str, dict[str, Any]]]]:
    return run_ranks(2, moved_each_way)


@pytest.mark.parametrize("dtype", POLICIES)
def test_a_gather_writes_each_element_once_and_a_push_adds_each_once(dtype: str, moves: list[Any]) -> None:
    """The biases, four rows of a unit, may take three copies each."""
    large, small = 2 * 256 * 256, 2 * 256
    for of_rank in moves:
        found = of_rank[dtype]["in place"]
        assert found["gathers"] == 2 * 2 * 3  # two microbatches, forward and backward, three units
        assert found["pushes"] == 2 * 3
        operations = found["gathers"] + found["pushes"]
        cast = found["elements"].pop("aten._to_copy.default", 0)  # once a minibatch: has anybody changed this shard?
        assert cast == (3 * large // 2 if dtype == "bfloat16" else 0)
        assert sum(found["elements"].values()) == operations * large, found
        assert found["small"] <= 3 * operations * small + 4096, found
        assert not found["made"]
        staged = of_rank[dtype]["staged"]
        assert (staged["gathers"], staged["pushes"]) == (found["gathers"], found["pushes"])
        assert sum(staged["elements"].values()) >= 1.9 * operations * large, "this test sees no staging"
        assert staged["made"]


_M_MMAP_THRESHOLD = -3  # malloc.h


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def peak(rank: int, world_size: int, way: str, width: int) -> int:
    """Of a step, above what there is between the steps: resident and shared. Of those behind the first the least: what
    libraries load or keep for themselves comes on top, now and then."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)  # what is freed is gone, and no thread keeps any
    with communicating("small" if way == "in place" else way):
        model = layers(width, 4, world_size)
        session, optimizer = odc.patch_fsdp(model), torch.optim.SGD(model.parameters(), lr=1e-3)
        data, found = torch.randn(2, width), list[int]()
        for _ in range(4):
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")  # the high water mark is what there is now
            before = status_bytes("VmRSS")
            model(data).square().sum().backward()
            found.append(status_bytes("VmHWM") - before)
            use_up(optimizer)
        session.close()
    return min(found[1:])


@pytest.mark.on_host
def test_a_step_takes_less_memory_by_the_flat_buffers() -> None:
    width = 1024
    unit = 4 * 2 * width * width
    in_place, staged = (max(run_ranks(2, peak, way, width)) for way in ("in place", "staged"))
    assert in_place + 0.6 * unit < staged, (in_place / unit, staged / unit)
    assert in_place < 2.5 * unit, in_place / unit  # its parameters and its gradients


# Torch's functions

NAMES = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


def functions() -> list[Any]:
    return [getattr(torch_group, name) for name in NAMES]


def step(model: Net, optimizer: torch.optim.Optimizer, rank: int, number: int, world_size: int = 2) -> None:
    """One microbatch per rank: sums of two numbers are equal to the bit, patched or not."""
    (loss_of(model, tokens(number, rank, 0)) * 0.02).backward()
    use_up(optimizer, model)


class Trained:
    """A model, and how many steps it has had."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self.model = shard(build(), world_size)
        self.optimizer = optimizer_of(self.model)
        self.steps = 0

    def step(self) -> None:
        step(self.model, self.optimizer, self._rank, self.steps)
        self.steps += 1

    def check(self) -> None:
        """It is where plain FSDP2 is."""
        plain = Trained(self._rank, self._world_size)
        with communicating_plainly():
            for _ in range(self.steps):
                plain.step()
        expected = full_parameters(plain.model)
        for name, value in full_parameters(self.model).items():
            assert (value == expected[name]).all(), name


@contextlib.contextmanager
def communicating_plainly() -> Iterator[None]:
    """With torch's own functions, whoever else is in them."""
    before = functions()
    for name, function in zip(NAMES, ORIGINALS, strict=True):
        setattr(torch_group, name, function)
    try:
        yield
    finally:
        for name, function in zip(NAMES, before, strict=True):
            setattr(torch_group, name, function)


ORIGINALS = functions()
IN_PLACE = {"ODC_STAGING": "auto"}


def replaced_while_any_session_is_open(rank: int, world_size: int) -> None:
    for first in (0, 1):
        models = [Trained(rank, world_size) for _ in range(2)]
        sessions = [odc.patch_fsdp(one.model) for one in models]
        assert all(now is not torchs for now, torchs in zip(functions(), ORIGINALS, strict=True))
        for one in models:
            one.step()
        sessions[first].close()
        assert all(now is not torchs for now, torchs in zip(functions(), ORIGINALS, strict=True))
        for one in models:
            one.step()
        sessions[1 - first].close()
        assert functions() == ORIGINALS
        for one in models:
            one.step()
            one.check()


def staged_sessions_leave_them_alone(rank: int, world_size: int) -> None:
    with communicating("staged"), odc.patch_fsdp(Trained(rank, world_size).model):
        assert functions() == ORIGINALS


def a_model_that_is_not_patched(rank: int, world_size: int) -> None:
    patched, plain = Trained(rank, world_size), Trained(rank, world_size)
    plain.step()
    with odc.patch_fsdp(patched.model) as session:
        for _ in range(2):
            patched.step()
            plain.step()
        assert session.stats().minibatches == 2
    patched.check()
    plain.check()


def somebody_elses_wrapper(rank: int, world_size: int) -> None:
    """Put there while a session is open: it stays, and is called; also where another session follows."""
    first, second, plain = (Trained(rank, world_size) for _ in range(3))
    calls: Counter[str] = Counter()
    session = odc.patch_fsdp(first.model)
    wrapped = functions()

    def wrapper(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    wrappers = [wrapper(name, function) for name, function in zip(NAMES, wrapped, strict=True)]
    try:
        for name, one in zip(NAMES, wrappers, strict=True):
            setattr(torch_group, name, one)
        for one in (first, plain):
            calls.clear()
            one.step()
            assert calls["foreach_all_gather"] == calls["foreach_all_gather_copy_out"] > calls["foreach_reduce"] == 3
        session.close()
        assert functions() == wrappers
        for _ in range(2):
            calls.clear()
            first.step()
            assert calls["foreach_reduce"] == 3
            with odc.patch_fsdp(second.model):
                second.step()
                calls.clear()
                plain.step()
                assert calls["foreach_reduce"] == 3, "once per unit"
            assert functions() == wrappers
    finally:
        for name, original in zip(NAMES, ORIGINALS, strict=True):
            setattr(torch_group, name, original)
    for one in (first, second, plain):
        one.check()


def a_wrapper_from_before(rank: int, world_size: int) -> None:
    """What is there before a session is there after it."""
    before = [functools.partial(function) for function in ORIGINALS]
    for name, function in zip(NAMES, before, strict=True):
        setattr(torch_group, name, function)
    try:
        one = Trained(rank, world_size)
        with odc.patch_fsdp(one.model):
            one.step()
        assert functions() == before
        one.step()
    finally:
        for name, original in zip(NAMES, ORIGINALS, strict=True):
            setattr(torch_group, name, original)
    one.check()


def closed_in_the_middle(rank: int, world_size: int) -> None:
    one = Trained(rank, world_size)
    session = odc.patch_fsdp(one.model)
    one.step()
    loss_of(one.model, tokens(9, rank, 0)).backward()
    handle = one.model.blocks[0].unshard(async_op=True)
    with pytest.warns(RuntimeWarning, match="closed in the middle of a minibatch"):
        session.close()
    assert functions() == ORIGINALS
    handle.wait()  # of a gather that did not come
    one.step()
    one.check()


def closed_behind_an_exception(rank: int, world_size: int) -> None:
    """All ranks have come as far: what FSDP2 has asked for and not used is not taken for a buffer afterwards."""
    one = Trained(rank, world_size)
    one.model.set_modules_to_forward_prefetch([one.model.blocks[0]])
    session = odc.patch_fsdp(one.model)
    one.step()
    hook = one.model.blocks[0].register_forward_pre_hook(interrupt, prepend=True)
    with pytest.raises(KeyError), session:
        loss_of(one.model, tokens(9, rank, 0))
    hook.remove()
    assert functions() == ORIGINALS
    for module in (one.model, *one.model.blocks):
        group = compat.param_groups(module)[0]
        for result in (group._all_gather_result, group.comm_ctx.all_gather_state):
            assert "odc" not in repr(result)


def interrupt(*args: Any) -> None:
    dist.barrier()  # else who comes first is the reason why others do not come here
    raise KeyError("on purpose")


def one_session_after_the_other(rank: int, world_size: int) -> None:
    one = Trained(rank, world_size)
    one.step()
    for way in ("in place", "staged", "small", "in place"):
        with communicating(way), odc.patch_fsdp(one.model) as session:
            for unit in session._units:
                assert (unit.in_place is None) == (way == "staged")  # type: ignore[attr-defined]
            one.step()
            with torch.no_grad():
                loss_of(one.model, tokens(9, rank, 0))
            one.step()
        assert functions() == ORIGINALS
        one.step()
    one.check()


def an_untested_torch(rank: int, world_size: int) -> None:
    one = Trained(rank, world_size)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setattr(compat, "is_tested", lambda: False)
        patch.setattr("odc.fsdp_patch.fsdp2_unit.is_tested", lambda: False)
        with odc.patch_fsdp(one.model) as session:
            for unit in session._units:
                assert unit.in_place is None  # type: ignore[attr-defined]
                assert unit.why_staged() == f"nobody has tried torch {torch.__version__}"  # type: ignore[attr-defined]
            assert functions() == ORIGINALS
            one.step()
    one.check()


def first_an_evaluation(rank: int, world_size: int) -> None:
    """Under inference_mode, where plain FSDP2 makes memory that no training can write."""
    for way in ("in place", "small"):
        one = Trained(rank, world_size)
        with communicating(way), odc.patch_fsdp(one.model):
            for _ in range(2):
                with torch.inference_mode():
                    loss_of(one.model, tokens(9, rank, 0))
                one.step()
        one.step()
        one.check()


def an_evaluation_before_the_session(rank: int, world_size: int) -> None:
    """Which has left memory that nothing but another evaluation can write."""
    one = Trained(rank, world_size)
    with torch.inference_mode():
        expected = loss_of(one.model, tokens(9, rank, 0))
        with odc.patch_fsdp(one.model):
            for _ in range(2):
                assert torch.equal(loss_of(one.model, tokens(9, rank, 0)), expected)


SCENARIOS: list[Callable[[int, int], None]] = [
    replaced_while_any_session_is_open,
    staged_sessions_leave_them_alone,
    a_model_that_is_not_patched,
    somebody_elses_wrapper,
    a_wrapper_from_before,
    closed_in_the_middle,
    one_session_after_the_other,
    an_untested_torch,
    # Before 2.10 padded shards get their tensors in the first forward, and none of inference_mode can be trained.
    *([first_an_evaluation, an_evaluation_before_the_session] if torch_version() >= (2, 10) else []),
    closed_behind_an_exception,  # behind it ranks are told, and may find their process group closed
]


def scenarios(rank: int, world_size: int) -> dict[str, str]:
    failures = {}
    for scenario in SCENARIOS:
        try:
            scenario(rank, world_size)
        except Exception:
            failures[scenario.__name__] = traceback.format_exc()
        gc.collect()
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(2, scenarios, env=IN_PLACE, timeout_s=300)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_torchs_functions(scenario: Callable[[int, int], None], failures: list[dict[str, str]]) -> None:
    for of_rank in failures:
        assert scenario.__name__ not in of_rank, of_rank[scenario.__name__]


# Faults: slices of two chunks of 4 MiB


def endless(rank: int, world_size: int, fault: Fault) -> None:
    model = layers(1500, 2, world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with odc.patch_fsdp(model):
        for _ in range(10_000):
            model(torch.randn(2, 1500)).square().mean().backward()
            use_up(optimizer)


@pytest.mark.parametrize("do", ["kill", "raise"])
@pytest.mark.parametrize("point", ["gather.after_chunk", "scatter.after_chunk"])
@pytest.mark.parametrize("accumulate", ["direct", pytest.param("daemon", marks=pytest.mark.extended), "hosts"])
def test_a_rank_that_fails_within_a_gather_or_a_push_is_named(accumulate: str, point: str, do: str) -> None:
    """Behind the first of several chunks of one slice; between hosts, in the middle of what is under way."""
    hosts, accumulate = (2, "daemon") if accumulate == "hosts" else (1, accumulate)
    Fault(1, point, do, endless, hosts, 2, at=19, env={**IN_PLACE, "ODC_ACCUMULATE": accumulate}).check()
