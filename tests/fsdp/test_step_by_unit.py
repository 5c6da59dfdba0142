"""Layer 3: ranks as processes. Steps unit by unit: memory, ranks without microbatches, replicas, meshes, what is
refused, and what fails in the middle. The same loops as under plain FSDP are scripts: ``fsdp_scripts/by_unit.py``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import test_compute_groups as partners
import test_several_meshes as meshes
import torch
from fsdp_scripts import by_unit
from process_ranks import assert_all_say, found_by, run_ranks, start_ranks
from test_fsdp2_hybrid import FULL_PRECISION, shard_hybrid, unused_on_host_1
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import _apply_optimizer_in_backward
from training import (
    BOTH,
    TOLERANCE,
    build,
    each_way,
    evaluated,
    full_parameters,
    gradient_now,
    largest_difference,
    loss_of,
    num_tokens,
    optimizer_of,
    reference,
    shard,
    sharded_by,
    tokens,
    use_up,
    wrap,
)

import odc
from odc.fsdp_patch.automatic import AutomaticPatching
from odc.fsdp_patch.fsdp2_unit import Fsdp2Unit
from odc.launch.dry_run import DryRun

STEPS, MESH_STEPS, WEIGHT = 3, 2, 0.02


def backward(model: nn.Module, step: int, rank: int, microbatch: int = 0, weight: float = WEIGHT) -> None:
    (loss_of(model, tokens(step, rank, microbatch)) * weight).backward()


# Ranks with other numbers of microbatches, against one process in float64


def uneven(rank: int, world_size: int, kind: str, counts: Sequence[int]) -> dict[str, Any]:
    """The loop of :func:`training.train`."""
    options = unused_on_host_1 if kind in ("hsdp", "int") else lambda *_: {}
    if kind in ("hsdp", "int", "offload"):
        model: Any = shard_hybrid(build(), rank, world_size, kind, FULL_PRECISION)
    else:
        model = sharded_by(kind, build(), world_size)
    session = odc.patch_fsdp(model, deterministic=kind == "hsdp")
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        scale = world_size / num_tokens(step, counts)
        for m in range(counts[rank]):
            (loss_of(model, tokens(step, rank, m), **options(step, rank, m)) * scale).backward()
        odc.step_by_unit(model, optimizer, max_norm=0.5)
        assert session.memory().gradients == 0
    assert session.stats().minibatches == STEPS
    session.close()
    return full_parameters(model)


def uneven_each_way(rank: int, world_size: int, kinds: Sequence[str], counts: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for kind in kinds:
        found += each_way(BOTH if kind in ("fsdp2", "hsdp") else BOTH[:1], uneven, rank, world_size, kind, counts)
    return found


@pytest.mark.parametrize(
    ("kinds", "counts"),
    [
        (["fsdp2", "fsdp1"], [3, 0, 1]),
        (["int"], [3, 0, 1, 2]),
        pytest.param(["fsdp1-flat", "offload"], [3, 0, 1], marks=pytest.mark.extended),
        pytest.param(["hsdp"], [3, 0, 1, 2], marks=pytest.mark.extended),
    ],
)
def test_the_numbers_are_those_of_one_process_whatever_each_rank_has(kinds: list[str], counts: list[int]) -> None:
    options = unused_on_host_1 if len(counts) == 4 else lambda *_: {}
    expected = reference(counts, STEPS, options)  # type: ignore[arg-type]
    for ours in run_ranks(len(counts), uneven_each_way, kinds, counts, timeout_s=180)[0]:
        assert largest_difference(ours, expected) < TOLERANCE


def on_meshes(rank: int, layout: str, counts: Sequence[int], by_unit: bool, max_norm: float | None) -> Any:
    model = meshes.shard(meshes.build(layout), layout)
    for block in model.blocks:
        block.skips_idle = True
    norms: list[float] = []
    with odc.patch_fsdp(model):
        optimizer = meshes.optimizer_of(model)
        for step in range(MESH_STEPS):
            for m in range(counts[rank]):
                meshes.loss_of(model, meshes.batch(step, rank, m)).backward()
            if by_unit:
                norm = odc.step_by_unit(model, optimizer, max_norm=max_norm)
                norms += [] if norm is None else [float(norm)]
            else:
                use_up(optimizer)
        return norms, meshes.local_parameters(model)


def on_several_meshes(rank: int, world_size: int) -> Any:
    """With a norm, where the mesh of the experts tells that they are spread over all ranks; else without."""
    clipped = [on_meshes(rank, "dtensor", counts, True, 0.5) for counts in (meshes.UNEVEN, meshes.IDLE)]
    differences = []
    for layout in ("modules", "alone", "embedding"):
        counts = meshes.EVEN if layout == "alone" else meshes.UNEVEN  # there all ranks exchange rows
        ours, usual = (on_meshes(rank, layout, counts, by_unit, None)[1] for by_unit in (True, False))
        differences.append(largest_difference(ours, usual))
    return clipped, differences


@pytest.mark.extended
def test_units_on_several_meshes() -> None:
    found = run_ranks(4, on_several_meshes, env={"ODC_TIMEOUT": "60"})
    for number, counts in enumerate((meshes.UNEVEN, meshes.IDLE)):
        meshes.check([clipped[number] for clipped, _ in found], "dtensor", counts, range(MESH_STEPS))
    for _, differences in found:
        assert max(differences) < TOLERANCE


def partly_hooked(rank: int, hooked: bool) -> dict[str, Any]:
    """Hooks step all of one mesh, and the step behind the backward the rest."""
    model = meshes.shard(meshes.build("embedding"), "embedding")
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.embed.parameters()}
    rest = torch.optim.SGD([p for p in model.parameters() if p not in own], lr=0.1)
    if hooked:
        by_unit.hook_each(model, own)
    with odc.patch_fsdp(model):
        for step in range(3):
            meshes.loss_of(model, meshes.batch(step, rank, 0)).backward()
            for optimizer in [rest] if hooked else [*own.values(), rest]:
                use_up(optimizer)
        return meshes.local_parameters(model)


def compared_partly_hooked(rank: int, world_size: int) -> float:
    return largest_difference(*(partly_hooked(rank, hooked) for hooked in (True, False)))


@pytest.mark.extended
def test_hooks_that_step_one_of_several_meshes() -> None:
    assert max(run_ranks(4, compared_partly_hooked, env={"ODC_TIMEOUT": "60"})) < TOLERANCE


def beside_tensor_parallelism(rank: int, world_size: int, counts: Sequence[int]) -> Any:
    model = partners.shard(partners.build(), partners.make_mesh(world_size))
    norms = []
    with odc.patch_fsdp(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        for step in range(partners.STEPS):
            for m in range(counts[rank // 2]):
                (model(partners.batch(step, rank // 2, m)).square().sum() / 10).backward()
            norms.append(float(odc.step_by_unit(model, optimizer, max_norm=1.0)))  # type: ignore[arg-type]
    own = {name: p.to_local() for name, p in model.named_parameters()}  # type: ignore[operator]
    return norms, {name: value.detach().numpy() for name, value in own.items()}


@pytest.mark.extended
def test_the_norm_beside_tensor_parallelism() -> None:
    counts = [0, 2]
    partners.check(run_ranks(4, beside_tensor_parallelism, counts, timeout_s=120), counts)


def a_norm_of_experts(rank: int, world_size: int) -> None:
    on_meshes(rank, "modules", meshes.UNEVEN, True, 0.5)


def test_a_norm_is_refused_where_no_mesh_tells_who_has_what() -> None:
    results = start_ranks(4, a_norm_of_experts).join(60)
    assert "UnsupportedError" in [result.error_type for result in results]
    assert_all_say(results, "whether other ranks have copies or other parameters is not known here")


# Between them


def with_others(rank: int, world_size: int, by_unit: bool) -> dict[str, Any]:
    """Patched where it is first used, which is the step of a rank without a microbatch. Then one rank after the other
    evaluates, and a minibatch is thrown away."""
    patching = AutomaticPatching(odc.patch_fsdp, lambda text: None)
    model = shard(build(), world_size)
    optimizer = optimizer_of(model)
    for step in range(5):
        if rank == 0 or step:
            backward(model, step, rank)
        if step == 2:
            odc.session_of(model).discard()
        elif by_unit:
            odc.step_by_unit(model, optimizer)
        else:
            use_up(optimizer)
        if rank == step % 2:
            evaluated(model)
    session = odc.session_of(model)
    assert session.stats().minibatches == 5
    patching.close()
    model.reshard()
    return full_parameters(model)


def difference_with_others(rank: int, world_size: int) -> float:
    return largest_difference(with_others(rank, world_size, True), with_others(rank, world_size, False))


def test_idle_ranks_evaluations_and_what_is_thrown_away() -> None:
    assert found_by(difference_with_others, TOGETHER) == [0.0, 0.0]


def resumed(rank: int, world_size: int, hooked: bool) -> float:
    """From a checkpoint as from the first step on."""
    ends: list[dict[str, Any]] = []
    saved: Any = None
    for resumes in (False, True):
        model = shard(build(num_blocks=1), world_size)
        optimizers = by_unit.adamw_by_parameter(model)
        if hooked:
            by_unit.hook_each(model, optimizers)
        session = odc.patch_fsdp(model)
        if resumes:
            set_state_dict(model, optimizers.values(), model_state_dict=saved[0], optim_state_dict=saved[1])
        for step in range(2 * resumes, 4):
            backward(model, step, rank)
            if not hooked:
                odc.step_by_unit(model, optimizers)
            if step == 1:
                saved = copy.deepcopy(get_state_dict(model, optimizers.values()))
        session.close()
        ends.append(full_parameters(model))
    return largest_difference(ends[1], ends[0])


def resumed_both(rank: int, world_size: int) -> list[float]:
    return [resumed(rank, world_size, hooked) for hooked in (False, True)]


def test_from_a_checkpoint() -> None:
    assert found_by(resumed_both, TOGETHER) == [[0.0, 0.0]] * 2


OF_TORCH: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "Adamax": torch.optim.Adamax,
    "AdamW, foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, t0=1),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.requires_grad]),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
}
"""With one of them for the whole model, which steps once for each unit. (Adafactor and Rprop step no DTensors.)"""


SOME_OF_TORCH = [*OF_TORCH][::4]


def with_some_of_torch(rank: int, world_size: int, names: Sequence[str] = SOME_OF_TORCH) -> dict[str, float]:
    found = {}
    for name in names:
        ends = []
        for is_by_unit in (True, False):
            model = build(num_blocks=1)
            for parameter in model.parameters() if name == "Muon" else ():
                parameter.requires_grad_(parameter.ndim == 2)
            optimizer = OF_TORCH[name](shard(model, world_size).parameters())
            with odc.patch_fsdp(model):
                for step in range(2):
                    backward(model, step, rank)
                    if is_by_unit:
                        odc.step_by_unit(model, optimizer)
                    else:
                        use_up(optimizer)
            ends.append(full_parameters(model))
        found[name] = largest_difference(*ends)
    return found


def test_an_optimizer_of_torch_for_the_whole_model() -> None:
    assert found_by(with_some_of_torch, TOGETHER) == [dict.fromkeys(SOME_OF_TORCH, 0.0)] * 2


@pytest.mark.extended
def test_each_optimizer_of_torch_for_the_whole_model() -> None:
    assert run_ranks(2, with_some_of_torch, [*OF_TORCH]) == [dict.fromkeys(OF_TORCH, 0.0)] * 2


def in_a_dry_run(rank: int, world_size: int) -> list[str]:
    said: list[str] = []
    dry_run = DryRun(said.append)
    model = shard(build(num_blocks=1), world_size)
    try:
        backward(model, 0, rank)
        with pytest.raises(SystemExit):
            odc.step_by_unit(model, optimizer_of(model))
    finally:
        dry_run.close()
    return said


def test_a_dry_run_ends_at_it() -> None:
    for said in found_by(in_a_dry_run, TOGETHER):
        assert said[1] == "odc: a minibatch would end at odc.step_by_unit"
        assert "stopped after the first optimizer step" in said[2]


# Memory


def watch(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> list[int]:
    """How many gradients there are whenever that of a unit is about to be made, in ``.grad`` or anywhere else."""
    found, made = [], list[weakref.ref[torch.Tensor]]()
    install = Fsdp2Unit.install

    def watching(unit: Fsdp2Unit, mean: torch.Tensor, touched: Sequence[bool]) -> None:
        in_place = [p for p in model.parameters() if gradient_now(p) is not None]
        found.append(len(in_place) + sum(ref() is not None for ref in made))
        install(unit, mean, touched)
        made.extend(weakref.ref(p.grad._local_tensor) for p in unit.trainable_parameters() if p.grad is not None)  # type: ignore[attr-defined]

    monkeypatch.setattr(Fsdp2Unit, "install", watching)
    return found


def gradients_at_once(rank: int, world_size: int, how: str) -> list[int]:
    model = shard(build(num_blocks=3), world_size)
    session = odc.patch_fsdp(model)
    optimizers = by_unit.adamw_by_parameter(model)
    if how == "hooks":
        by_unit.hook_each(model, optimizers)
    with pytest.MonkeyPatch.context() as patch:
        found = watch(patch, model)
        for step in range(2):
            if rank == 0 or step:
                backward(model, step, rank)
            elif how == "hooks":
                session.finish()
            if how == "step":
                for optimizer in optimizers.values():
                    use_up(optimizer)
            elif how != "hooks":
                odc.step_by_unit(model, optimizers, max_norm=0.1 if how == "clipped" else None)
    session.close()
    return found


def gradients_in_each_way(rank: int, world_size: int) -> list[list[int]]:
    return [gradients_at_once(rank, world_size, how) for how in ("by unit", "hooks", "clipped", "step")]


def test_there_is_never_more_than_the_gradient_of_one_unit() -> None:
    """A usual step has them all."""
    for by_unit_, hooks, clipped, usual in found_by(gradients_in_each_way, TOGETHER):
        assert by_unit_ == hooks == [0] * 2 * 4
        assert clipped == [0] * 2 * 4 * 2
        assert max(usual) > 20


# Optimizers in backward


def applied_in_backward(rank: int, world_size: int) -> list[float]:
    """FSDP1's own way."""
    found: list[Any] = []
    for patched in (False, True):
        model = wrap(build(), use_orig_params=True)
        options = {"lr": 1e-2, "momentum": 0.9}
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), options, register_hook=False)
        with odc.patch_fsdp(model) if patched else nullcontext() as session:
            for step in range(STEPS):
                for m in range(2):
                    backward(model, step, rank, m)
            assert session is None or session.stats().minibatches == 2 * STEPS
        found.append(full_parameters(model))
    return [
        largest_difference(found[1], found[0]),
        largest_difference(found[1], dict(build().state_dict())),
    ]


@pytest.mark.parametrize(
    ("world_size", "tolerance"),
    [pytest.param(2, 0.0, marks=pytest.mark.extended), (3, TOLERANCE)],  # of 3 ranks one has parts of nothing
)
def test_optimizers_in_the_backward_of_fsdp1(world_size: int, tolerance: float) -> None:
    for difference, change in run_ranks(world_size, applied_in_backward):
        assert difference <= tolerance < change


def a_block_around_hooks(rank: int, world_size: int) -> float:
    """Inside a block a minibatch has several microbatches, or none: its hooks step once."""
    found = []
    for patched in (False, True):
        model = shard(build(num_blocks=1), world_size)
        optimizers = by_unit.momentum_by_parameter(model)
        if patched:
            by_unit.hook_each(model, optimizers)
        with odc.patch_fsdp(model) if patched else nullcontext() as session:
            for step in range(STEPS):
                with session.minibatch() if session else nullcontext():
                    for m in range(2):
                        if rank == 0 or not patched:
                            backward(model, step, rank, m, WEIGHT * (rank == 0))
                for optimizer in optimizers.values() if not patched else ():
                    use_up(optimizer)
            assert session is None or session.stats().minibatches == STEPS
        found.append(full_parameters(model))
    return largest_difference(found[1], found[0])


def test_in_a_block_hooks_step_once() -> None:
    assert max(found_by(a_block_around_hooks, TOGETHER)) < TOLERANCE


def an_optimizer_of_all(rank: int, world_size: int) -> None:
    model = shard(build(num_blocks=1), world_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    odc.patch_fsdp(model)
    backward(model, 0, rank)


def test_an_optimizer_of_several_units_in_a_hook_is_refused() -> None:
    words = "the optimizer has parameters of other units, whose gradients are not there"
    assert_all_say(start_ranks(2, an_optimizer_of_all).join(60), words, kinds=["UnsupportedError", "AbortedError"])


# What is refused, and what fails


def of_another_model(model: nn.Module, world_size: int) -> Any:
    model.other = shard(build(num_blocks=1), world_size)  # type: ignore[assignment]
    model.kept = odc.patch_fsdp(model.other)  # type: ignore[assignment]
    return torch.optim.SGD([*model.blocks.parameters(), *model.other.parameters()], lr=0.1)  # type: ignore[union-attr]


def with_a_hook(model: nn.Module, world_size: int) -> Any:
    optimizer = by_unit.momentum(model)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def kept_gradients(model: nn.Module, world_size: int) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return by_unit.momentum(model)


REFUSED: list[tuple[Callable[[nn.Module, int], Any], dict[str, Any], str, str]] = [
    (
        lambda model, _: by_unit.Mine(model.parameters()),
        {},
        "UnsupportedError",
        "(Mine) has parameters of units '<root>'",
    ),
    (with_a_hook, {}, "UnsupportedError", "(SGD) has parameters of units '<root>' and 'blocks.0'"),
    (of_another_model, {}, "UnsupportedError", "(SGD) has parameters of another patched model"),
    (
        lambda model, _: [torch.optim.SGD(block.parameters()) for block in model.blocks],
        {},
        "MisuseError",
        "parameters of unit '<root>' are in none of the optimizers",
    ),
    (kept_gradients, {}, "MisuseError", "gradients of an earlier minibatch are in .grad of unit '<root>'"),
    (lambda model, _: by_unit.momentum(model), {"skip_nonfinite": True}, "ValueError", "asks for a norm"),
    (lambda model, _: model.parameters(), {}, "ValueError", "expects optimizers of torch.optim.Optimizer"),
]


def refusals(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    """Behind each the same minibatch goes on, and is as it was."""
    expected = None
    found = []
    for prepare, options, _, _ in [(lambda *_: None, {}, "", ""), *REFUSED]:
        model = shard(build(), world_size)
        session, kind, text = odc.patch_fsdp(model), "nothing raised", ""
        optimizers = prepare(model, world_size)  # type: ignore[no-untyped-call]
        backward(model, 0, rank)
        try:
            if optimizers is not None:
                odc.step_by_unit(model, optimizers, **options)
        except (odc.OdcError, ValueError) as error:
            kind, text = type(error).__name__, str(error)
        optimizer = by_unit.momentum(model)
        optimizer.step()
        session.close()
        now = {name: p for name, p in full_parameters(model).items() if not name.startswith("other")}
        expected = expected or now
        found.append((kind, text, largest_difference(now, expected)))
    return found[1:]


def test_what_cannot_step_by_unit_is_refused_and_changes_nothing() -> None:
    for results in found_by(refusals, TOGETHER):
        for (_, _, kind, words), (found, text, difference) in zip(REFUSED, results, strict=True):
            assert (found, difference) == (kind, 0.0), text
            assert words in text


def too_late(rank: int, world_size: int, how: str) -> None:
    model = shard(build(num_blocks=1), world_size)
    session, optimizer = odc.patch_fsdp(model), by_unit.momentum(model)
    if how == "clipped":
        backward(model, 0, rank)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        odc.step_by_unit(model, optimizer)
    with session.minibatch():
        odc.step_by_unit(model, optimizer)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("clipped", "behind the end of minibatch 1: all its gradients are in .grad already"),
        ("inside", "inside the mini"),
    ],
)
def test_a_step_by_unit_at_the_wrong_place_says_so(how: str, words: str) -> None:
    assert_all_say(start_ranks(2, too_late, how).join(60), words, kinds=["MisuseError", "AbortedError"])


def fails_half_way(rank: int, world_size: int) -> None:
    model = shard(build(), world_size)
    odc.patch_fsdp(model, timeout_s=60)
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model.blocks]
    held = {id(p) for block in model.blocks for p in block.parameters()}
    optimizers.append(torch.optim.SGD([p for p in model.parameters() if id(p) not in held], lr=0.1))

    def fail(*_: Any) -> None:
        if rank == 1:
            raise KeyError("no such state")

    optimizers[0].register_step_pre_hook(fail)
    for step in range(2):
        backward(model, step, rank)
        try:
            odc.step_by_unit(model, optimizers)
        except KeyError:
            backward(model, step, rank)  # a script that goes on all the same


def test_a_step_that_fails_half_way_ends_the_job_on_all_ranks() -> None:
    results = start_ranks(2, fails_half_way).join(60)
    assert [result.error_type for result in results] == ["AbortedError", "OdcError"]
    assert_all_say(results, "KeyError: 'no such state'")


TOGETHER = (
    *(difference_with_others, resumed_both, with_some_of_torch, in_a_dry_run, gradients_in_each_way),
    *(a_block_around_hooks, refusals),
)
