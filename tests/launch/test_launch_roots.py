"""Layer 1: no processes. The roots that ``odc run`` meets and patches."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launch_fakes import FakeSession
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from odc.errors import UnsupportedError
from odc.fsdp_patch.automatic import AutomaticPatching, FsdpRoots, model_name


def shard2(width: int = 3) -> nn.Module:
    model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))
    fully_shard(model[0])
    return fully_shard(model)


def shard1(width: int = 3) -> nn.Module:
    options: dict[str, Any] = {"device_id": torch.device("cpu"), "use_orig_params": True}
    inner = FullyShardedDataParallel(nn.Linear(width, width), **options)
    return FullyShardedDataParallel(nn.Sequential(inner, nn.Linear(width, width)), **options)


WATCHED = [
    (FSDPState, "init"),
    (FSDPState, "_lazy_init"),
    (FullyShardedDataParallel, "__init__"),
    (FullyShardedDataParallel, "forward"),
]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shard", [shard1, shard2])
def test_each_root_is_met_once_and_torch_left_as_it_was(shard: Callable[[], nn.Module]) -> None:
    before = [owner.__dict__[name] for owner, name in WATCHED]
    old = shard()
    met: list[tuple[nn.Module, bool]] = []
    watch = FsdpRoots(lambda module, computes: met.append((module, computes)))
    try:
        first, second, third = shard(), shard(), shard()
        for model in (second, first, second, old):
            model(torch.ones(1, 3)).sum().backward()
        assert met == [(second, True), (first, True), (old, True)]
        watch.gradients_read(list(first.parameters()))
        assert len(met) == 3
        assert watch.pending(list(third.parameters())) == [third]
        watch.gradients_read(list(third.parameters()))
        third(torch.ones(1, 3))
        assert met[3:] == [(third, False)]
        numbers = [watch.number(model) for model in (old, first, second, third)]
        assert numbers == sorted(numbers)
        assert numbers[-1] < watch.num_known
        assert model_name(first) == f"Sequential (FSDP{2 if shard is shard2 else 1})"
    finally:
        watch.close()
    watch.close()
    assert all(owner.__dict__[name] is then for (owner, name), then in zip(WATCHED, before, strict=True))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(("owner", "name"), WATCHED)
def test_what_another_library_has_wrapped_meanwhile_stays_and_tells_nobody(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    met: list[nn.Module] = []
    calls: list[str] = []
    before = [owner.__dict__[name] for owner, name in WATCHED]
    monkeypatch.setattr(owner, name, owner.__dict__[name])  # put back at the end, whatever happens
    watch = FsdpRoots(lambda module, computes: met.append(module))
    ours = owner.__dict__[name]

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return ours(*args, **kwargs)

    setattr(owner, name, theirs)
    watch.close()
    assert owner.__dict__[name] is theirs
    shadowed = [owner.__dict__[name] for owner, name in WATCHED]
    assert sum(now is not then for now, then in zip(shadowed, before, strict=True)) == 1
    for shard in (shard1, shard2):
        shard()(torch.ones(1, 3))
    assert name in calls
    assert not met


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("shard", [shard1, shard2])
def test_a_model_that_was_dropped_before_has_no_number(shard: Callable[[], nn.Module]) -> None:
    """Numbers are the same on every rank, whenever each collects its garbage."""

    def num_known() -> int:
        watch = FsdpRoots(lambda module, computes: None)
        watch.close()
        return watch.num_known

    gc.collect()
    others = num_known()  # of tests before, whose graphs keep them
    gc.disable()
    try:
        shard()(torch.ones(1, 3)).sum().backward()
        assert num_known() == others
    finally:
        gc.enable()


@pytest.mark.usefixtures("one_rank")
def test_a_model_at_the_address_of_a_forgotten_one_is_met() -> None:
    met: list[bool] = []
    watch = FsdpRoots(lambda module, computes: met.append(computes))
    try:
        for count in range(1, 21):
            shard1()(torch.ones(1, 3))
            assert len(met) == count
    finally:
        watch.close()


class FakePatched(FakeSession):
    """A session that does nothing but say its name and remember its end; the model that it is in keeps it."""

    def __init__(self, model: nn.Module, ended: list[str], broken: bool = False) -> None:
        super().__init__()
        model.register_forward_hook(self.is_kept)
        self._ended = ended
        self._broken = broken

    def is_kept(self, *args: object) -> None:
        """By being called from the model."""

    def describe(self) -> str:
        return "fake"

    def close(self) -> None:
        self._ended.append("closed")
        if self._broken:
            raise RuntimeError("broken")


class OtherRank:
    """What another rank says when this one comes with a root; the same as this one unless told otherwise."""

    def __init__(self) -> None:
        self.comes_with: list[tuple[int, int]] = []

    def agree(self, module: nn.Module, numbers: tuple[int, int]) -> list[tuple[int, int]]:
        return [numbers, self.comes_with.pop(0) if self.comes_with else numbers]


@pytest.mark.usefixtures("one_rank")
def test_ranks_that_come_with_different_roots_patch_all_that_both_have() -> None:
    patched: list[nn.Module] = []
    said: list[str] = []
    ended: list[str] = []
    other = OtherRank()

    def patch(module: nn.Module) -> Any:
        patched.append(module)
        return FakePatched(module, ended)

    patching = AutomaticPatching(patch, said.append, other.agree)
    try:
        policy, reference = shard2(), shard2()
        watch = patching._roots
        both, later = watch.num_known, shard2()
        other.comes_with = [(watch.number(reference), both)]  # it computes with the reference, before the third exists
        torch.optim.SGD(policy.parameters(), lr=0.1).step()
        assert patched == [policy, reference]
        reference(torch.ones(1, 3))
        policy(torch.ones(1, 3))
        assert len(patched) == 2
        later(torch.ones(1, 3))
        assert patched == [policy, reference, later]
        assert said == ["odc: patched Sequential (FSDP2): fake"] * 3
    finally:
        patching.close()
    assert ended == ["closed"] * 3


@pytest.mark.usefixtures("one_rank")
def test_a_rank_that_is_ahead_waits_for_the_other_to_have_its_root() -> None:
    patched: list[nn.Module] = []
    other = OtherRank()

    def patch(module: nn.Module) -> Any:
        patched.append(module)
        return FakePatched(module, [])

    patching = AutomaticPatching(patch, lambda text: None, other.agree)
    try:
        first = shard2()
        known, second = patching._roots.num_known, shard2()
        other.comes_with = [(patching._roots.number(first), known)]  # then it comes with the second
        second(torch.ones(1, 3))
        assert patched == [first, second]
        assert not other.comes_with
    finally:
        patching.close()


@pytest.mark.usefixtures("one_rank")
def test_a_root_that_another_rank_uses_and_this_one_has_used_before_is_an_error() -> None:
    other = OtherRank()
    patching = AutomaticPatching(lambda module: FakePatched(module, []), lambda text: None, other.agree)
    try:
        first = shard2()
        known, second = patching._roots.num_known, shard2()
        first(torch.ones(1, 3))
        other.comes_with = [(patching._roots.number(first), known)]
        with pytest.raises(UnsupportedError, match="Wrap models in the same order"):
            second(torch.ones(1, 3))
    finally:
        patching.close()


@pytest.mark.usefixtures("one_rank")
def test_closing_goes_on_where_one_model_cannot_be_closed() -> None:
    before = [owner.__dict__[name] for owner, name in WATCHED]
    ended: list[str] = []
    patching = AutomaticPatching(lambda module: FakePatched(module, ended, broken=True), lambda text: None)
    models = [shard2(), shard1()]
    for model in models:
        model(torch.ones(1, 3))
    with pytest.raises(RuntimeError, match="broken"):
        patching.close()
    assert ended == ["closed", "closed"]
    assert all(owner.__dict__[name] is then for (owner, name), then in zip(WATCHED, before, strict=True))
