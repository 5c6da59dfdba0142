"""Layer 3: ranks as processes. FSDP2 scripts as people write them, with one more line: ``odc.patch_fsdp(model)``.

Each script runs twice on the same ranks, as it is and patched. With one microbatch per minibatch on two ranks a
gradient is a sum of two numbers, which does not depend on their order: then all numbers must be bit-equal.

Scripts run in place, as is the default. Of those of other models or other orders of gathers and pushes one of each kind
runs staged too; all others do with ``-m extended``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import pytest
import torch
from fsdp_scripts import by_unit, ends, extended, hybrid, kept, loops, models, reading
from fsdp_scripts.pairs import FACTORS, PAIRS, all_pairs, covering, pairs, pairs_of
from fsdp_scripts.run import Case, Run, differences, norms_of_steps, with_
from process_ranks import run_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from training import BOTH, TOLERANCE, loss_of, tokens

import odc
from odc.fsdp_patch.compat import torch_version

REENTRANT_WRAPPER = with_(models.wrapped_checkpointing, checkpoint_impl=CheckpointImpl.REENTRANT)
LOOPS: dict[str, Case] = {
    "clip_grad_norm_": Case(with_(norms_of_steps, ends.clipping_by_norm)),
    "clip_grad_norm_ twice": Case(with_(norms_of_steps, ends.clipping_twice)),
    "clip_grad_norm_ by keyword": Case(with_(norms_of_steps, ends.clipping_by_keyword)),
    "clip_grad_norm_ of one tensor": Case(ends.clipping_one_tensor),
    "clip_grad_value_": Case(ends.clipping_by_value),
    "GradScaler with unscale_": Case(with_(ends.scaler, True), minibatches=6),
    "GradScaler without unscale_": Case(with_(ends.scaler, False), minibatches=6),
    "GradScaler, fused optimizer": Case(with_(ends.scaler, False, fused=True), minibatches=6),
    "optimizer.step alone": Case(ends.step_alone),
    "two optimizers": Case(ends.two_optimizers),
    "two optimizers, one seldom": Case(ends.one_of_two_optimizers),
    "closure": Case(with_(ends.closure, False)),
    "closure by keyword": Case(with_(ends.closure, True)),
    "schedulers": Case(ends.schedulers),
    "zero_grad after the step": Case(with_(loops.clearing, "none")),
    "zero_grad before forward": Case(with_(loops.clearing, "none", first=True)),
    "zero_grad in place": Case(with_(loops.clearing, "in place")),
    "zero_grad in place before forward": Case(with_(loops.clearing, "in place", first=True)),
    "zero_grad of the module": Case(with_(loops.clearing, "module")),
    "grad = None by hand": Case(with_(loops.clearing, "by hand")),
    "grad = None by hand before forward": Case(with_(loops.clearing, "by hand", first=True)),
    "grad.zero_() by hand": Case(with_(loops.clearing, "by hand in place")),
    "zero_grad never": Case(loops.never_cleared, minibatches=2),
    "zero_grad twice": Case(loops.cleared_between_backward_passes),
    "gradients changed by hand": Case(loops.gradients_moved_by_hand),
    "gradients kept by reference": Case(loops.gradients_kept_by_reference),
    "collectives of the script": Case(loops.logging_between),
    **loops.CASES,
    **reading.CASES,
    **reading.FSDP2_CASES,
    **kept.CASES,
    **by_unit.FSDP2_CASES,
}
if torch_version() < (2, 10):  # plain FSDP2 hangs in them
    del LOOPS["gradients scaled in a compiled function"], LOOPS["compiled step"]
"""What is done with gradients that are there, and when."""
MODELS: dict[str, Case] = {
    "accumulation": Case(loops.accumulation, TOLERANCE),
    "accumulation without sync": Case(with_(loops.accumulation, loops.sync_last_only), TOLERANCE),
    "accumulation without sync, deterministic": Case(loops.accumulation_without_sync_and_deterministic),
    "a rank without microbatches": Case(loops.without_microbatches, minibatches=6),
    "evaluation": Case(with_(loops.evaluation, torch.no_grad), TOLERANCE),
    "evaluation in inference mode": Case(with_(loops.evaluation, torch.inference_mode), TOLERANCE),
    "evaluation only": Case(loops.evaluation_only, minibatches=0, pushes=False),
    "checkpointing": Case(with_(models.checkpointing, False)),
    "checkpointing, reentrant": Case(with_(models.checkpointing, True)),
    "checkpoint_wrapper": Case(models.wrapped_checkpointing),
    "checkpoint_wrapper, reentrant": Case(REENTRANT_WRAPPER),
    "tied weights in the root": Case(models.tied_in_the_root),
    "tied weights in a list": Case(models.tied_in_a_list),
    "unit of a list": Case(models.unit_of_a_list),
    "root without parameters": Case(models.root_without_parameters),
    "units without a root": Case(models.units_without_a_root),
    "policy and reference": Case(models.policy_and_reference, minibatches=None, pushes=False),
    "reference that follows its policy": Case(models.following_reference, minibatches=None, pushes=False),
    "reference stays plain": Case(models.reference_stays_plain),
    "two trained models": Case(models.two_trained_models, minibatches=None, tolerance=TOLERANCE),
    "one optimizer for two models": Case(models.one_optimizer_for_two_models),
    "prefetching": Case(models.prefetching),
    "set_reshard_after_backward": Case(
        with_(loops.accumulation, loops.kept_between, reshard_after_forward=False), TOLERANCE
    ),
    "set_reshard_after_forward": Case(models.toggled_resharding),
    "unshard by hand": Case(models.gathered_by_hand),
    "CPUOffloadPolicy": Case(models.offloaded),
    "ignored_params": Case(models.with_ignored_parameters),
    "meta device, to_empty": Case(with_(models.from_meta, False)),
    "meta device, assign": Case(with_(models.from_meta, True)),
    "load after patching": Case(with_(models.loaded_after_patching, False), minibatches=None),
    "load after patching, assign": Case(with_(models.loaded_after_patching, True), minibatches=None),
    "moved between steps": Case(models.moved_between_steps),
    "moved between steps, a rank without microbatches": Case(
        with_(models.replaced_between_steps, models.move), minibatches=4
    ),
    "swap_tensors between steps": Case(with_(models.replaced_between_steps, models.swap), minibatches=4),
    "loaded between steps, assign": Case(with_(models.replaced_between_steps, models.assign), minibatches=None),
    "add_param_group": Case(models.added_at_the_end),
    "averages in a step hook": Case(models.weight_averages),
    **extended.CASES,
}
"""What the models are, and when their units are gathered and pushed."""
COMPILED = {
    "aot_eager": Case(with_(models.compiled, "aot_eager"), minibatches=2),
}
HYBRID = {
    "hybrid": Case(hybrid.plain),
    "hybrid, accumulation": Case(loops.accumulation, TOLERANCE),
    "hybrid, set_requires_all_reduce": Case(with_(loops.accumulation, loops.reduce_last_only), TOLERANCE),
    "hybrid, another divide factor for each microbatch": Case(loops.divided_by_microbatch, TOLERANCE),
    "hybrid, ranks without microbatches": Case(hybrid.without_microbatches),
    "hybrid, step by unit": Case(with_(by_unit.loop, by_unit.momentum, 0.05), by_unit.CLOSE, minibatches=4),
}
FURTHER_HYBRID = {
    "hybrid, evaluation": Case(with_(loops.evaluation, torch.no_grad), TOLERANCE),
    "hybrid, optimizer in backward": Case(with_(by_unit.in_backward, by_unit.adamw_by_parameter)),
}
OTHERS = pairs_of("fsdp1")
FURTHER = (
    *("clip_grad_norm_ by keyword", "clip_grad_value_, each second step, idle", "clipping in two parts"),
    *("clip_grad_norm_ twice", "two optimizers", "zero_grad after the step", "zero_grad in place", "zero_grad never"),
    *("gradients scaled in a compiled function", "norm by hand", "step by hand through data"),
    *("skipped steps, cleared in place", "cleared instead of a step, by hand", "checkpointing, reentrant"),
    *("averages in a step hook", "swap_tensors between steps", "accumulation", "units without a root", "evaluation"),
    *("GradScaler, fused optimizer", "closure by keyword", "optimizer state asked for early, SGD", "forward method"),
    *("zero_grad before forward", "zero_grad in place before forward", "grad = None by hand before forward"),
    *("zero_grad of the module", "step by hand, cleared in place", "another divide factor, without sync"),
    *("skipped steps, cleared behind forward", "skipped by a scaler, cleared in place"),
    *("skipped by a scaler, cleared behind forward", "cleared instead of a step, in place"),
    *("cleared instead of a step, module", "optimizer in backward, several microbatches"),
    *("step by unit, an optimizer for each parameter", "step by unit, steps as usual between"),
    *("accumulation without sync", "evaluation in inference mode", "checkpointing", "checkpoint_wrapper"),
    *("tied weights in the root", "root without parameters", "reference stays plain", "two trained models"),
    *("set_reshard_after_forward", "meta device, to_empty", "load after patching, assign", "moved between steps"),
)
"""With ``-m extended``: every run has their like, here, in pairs (test_bench_parity.py), and in the states of gradients
(test_gradient_state.py)."""
BOTH_WAYS = (
    *("accumulation without sync, deterministic", "a rank without microbatches"),
    *("tied weights in a list", "unit of a list"),
    *("set_reshard_after_backward", "unshard by hand", "CPUOffloadPolicy", "ignored_params", "load after patching"),
    *("weights in float8, a scale for each row", "hybrid, accumulation"),
)
VARIANTS = {name: case for name, case in MODELS.items() if name not in BOTH_WAYS}
HYBRID_VARIANTS = {name: case for name, case in {**HYBRID, **FURTHER_HYBRID}.items() if name not in BOTH_WAYS}
GROUPS: dict[str, dict[str, Case]] = {
    "loops": {name: case for name, case in LOOPS.items() if name not in FURTHER},
    "models": {name: case for name, case in MODELS.items() if name not in FURTHER},
    "further": {name: case for name, case in {**LOOPS, **MODELS}.items() if name in FURTHER},
    "staged": {**LOOPS, **COMPILED, **VARIANTS},
    "compiled": COMPILED,
    "hybrid": HYBRID,
    "further hybrid": FURTHER_HYBRID,
    "staged hybrid": HYBRID_VARIANTS,
    "pairs": pairs_of("fsdp2"),
    "other pairs": OTHERS,
}
"""Scripts that run on the same ranks."""


def ways_of(group: str, name: str) -> Sequence[str]:
    """To communicate."""
    if group.startswith("staged"):
        return BOTH[1:]
    return BOTH if group in ("models", "hybrid", "pairs") and name not in {**VARIANTS, **HYBRID_VARIANTS} else BOTH[:1]


def find_differences(rank: int, world_size: int, group: str) -> dict[str, dict[str, float | str]]:
    """Per script and way: the largest difference between plain and patched, or how it failed."""
    mesh = init_device_mesh("cpu", (world_size,))
    if world_size == 4:
        os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    num_blocks = 1 if group == "loops" else 2  # to loops units are all the same
    make_run = functools.partial(Run, rank, world_size, mesh=mesh, num_blocks=num_blocks)
    return {name: differences(case, make_run, ways_of(group, name)) for name, case in GROUPS[group].items()}


@functools.cache
def found(group: str) -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(4 if group.endswith("hybrid") else 2, find_differences, group, timeout_s=300)


def check(group: str, name: str) -> None:
    for of_rank in found(group):
        assert list(of_rank[name]) == list(ways_of(group, name))
        for worst in of_rank[name].values():
            assert not isinstance(worst, str), worst
            assert worst <= GROUPS[group][name].tolerance, of_rank[name]


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.extended) if one in FURTHER else one for one in (*LOOPS, *MODELS)],
)
def test_scripts_keep_their_numbers(name: str) -> None:
    check("further" if name in FURTHER else "loops" if name in LOOPS else "models", name)


@pytest.mark.extended
@pytest.mark.parametrize("name", [*LOOPS, *COMPILED, *VARIANTS, *HYBRID_VARIANTS])
def test_staged_scripts_keep_their_numbers(name: str) -> None:
    check("staged hybrid" if name in HYBRID_VARIANTS else "staged", name)


@pytest.mark.extended  # every run has pairs in generated scripts, of both FSDPs: test_bench_parity.py
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_what_a_loop_may_do_keep_their_numbers(name: str) -> None:
    check("other pairs" if name in OTHERS else "pairs", name)


def test_every_pair_of_what_a_loop_may_do_is_in_a_script() -> None:
    loops = covering(FACTORS)
    assert len(loops) == len(PAIRS) < 70  # of tens of thousands
    met = {pair for loop in loops for pair in pairs(loop)}
    assert met == set(all_pairs(FACTORS))
    for one, values in FACTORS.items():
        for other, other_values in FACTORS.items():
            expected = {((one, a), (other, b)) for a in values for b in other_values} if one < other else set()
            lacking = {pair for pair in expected if pair not in met and pair[::-1] not in met}
            assert not lacking, lacking


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks(name: str) -> None:
    check("compiled", name)


@pytest.mark.parametrize("name", [*HYBRID, *(pytest.param(one, marks=pytest.mark.extended) for one in FURTHER_HYBRID)])
def test_hybrid_sharding_over_two_hosts(name: str) -> None:
    check("hybrid" if name in HYBRID else "further hybrid", name)


# What cannot be followed is refused by name


def lbfgs(model: nn.Module, rank: int) -> None:
    optimizer = torch.optim.LBFGS(model.parameters())
    optimizer.step(lambda: loss_of(model, tokens(0, rank, 0)))


def partly_cleared(model: nn.Module, rank: int) -> None:
    loss_of(model, tokens(0, rank, 0)).backward()
    model.blocks.zero_grad()  # type: ignore[operator, union-attr]


def partly_cleared_by_hand(model: nn.Module, rank: int) -> None:
    loss_of(model, tokens(0, rank, 0)).backward()
    next(model.parameters()).grad = None
    loss_of(model, tokens(0, rank, 1)).backward()


def norm_of_final_gradients(model: nn.Module, rank: int, session: odc.Session) -> None:
    loss_of(model, tokens(0, rank, 0)).backward()
    session.finish()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    assert float(norm.full_tensor()) > 1.0
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.5, norm)
    assert float(clip_grad_norm_(model.parameters(), 1.0).full_tensor()) == pytest.approx(0.5, rel=1e-4)


REFUSED = (
    lbfgs,
    partly_cleared,
    partly_cleared_by_hand,
)


def refusals(rank: int, world_size: int) -> list[str]:
    run = Run(rank, world_size, True, init_device_mesh("cpu", (world_size,)))
    found = []
    for script in REFUSED:
        model = run.net()
        with odc.patch_fsdp(model):
            try:
                script(model, rank)
                found.append("nothing raised")
            except odc.OdcError as error:
                found.append(str(error))
    model = run.net()
    with odc.patch_fsdp(model) as session:
        norm_of_final_gradients(model, rank, session)
    return found


@functools.cache
def refused() -> list[list[str]]:
    return run_ranks(2, refusals)


def test_lbfgs_is_refused() -> None:
    assert all("LBFGS" in of_rank[0] for of_rank in refused())


def test_a_part_of_the_gradients_that_others_have_added_up_cannot_be_cleared() -> None:
    for of_rank in refused():
        assert "Module.zero_grad between backward and step" in of_rank[1]
        assert "setting .grad to None between backward and step" in of_rank[2]
        assert all(".discard() does" in text for text in of_rank[1:3])
