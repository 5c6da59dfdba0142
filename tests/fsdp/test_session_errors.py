"""Layer 3: ranks as processes. What is not supported says so when patching; misuse says what to do instead."""

from __future__ import annotations

import linecache
import re
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp_scripts.loops import divide_by
from process_ranks import found_by, run_ranks, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.utils import clip_grad_norm_
from training import DEVICE, build, evaluated, loss_of, multiply, optimizer_of, shard, sharded_by, start, tokens, use_up

import odc
import odc.fsdp_patch.fsdp2_unit
import odc.fsdp_patch.session
import odc.rank.context
from odc.fsdp_patch.compat import param_groups


def no_sharding(model: nn.Module, world_size: int) -> None:
    model.wrapped = FullyShardedDataParallel(
        nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=DEVICE
    )


def half_reduce(model: nn.Module, world_size: int) -> None:
    shard(model, world_size, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float16))


def all_reduce_hook(model: nn.Module, world_size: int) -> None:
    shard(model, world_size)
    model.set_all_reduce_hook(lambda grad: None)


def custom_comm(model: nn.Module, world_size: int, name: str = "Mine") -> None:
    shard(model, world_size)
    model.set_custom_all_gather(type(name, (DefaultAllGather,), {})())


def with_types(model: nn.Module, world_size: int) -> None:
    """As torch 2.14 marks parameters that were annotated by spmd_types."""
    shard(model, world_size)
    param_groups(model)[0].fsdp_params[0].is_spmd_types = True


def twice(model: nn.Module, world_size: int) -> None:
    shard(model, world_size)
    model.kept = odc.patch_fsdp(model)  # type: ignore[assignment]


def nothing(model: nn.Module, world_size: int) -> None:
    """No fully_shard at all."""


REFUSED: list[tuple[Callable[[nn.Module, int], None], str]] = [
    (no_sharding, "NO_SHARD"),
    (half_reduce, "gradients are reduced in torch.float16 (reduce_dtype of the mixed precision policy"),
    (half_reduce, "fp16 mixed precision (fp16=True, accelerate's mixed_precision='fp16'), some of them"),
    (all_reduce_hook, "set_all_reduce_hook"),
    (custom_comm, "set_custom_all_gather (Mine)"),
    # As set_symm_mem_for_comm does, which asks for NCCL
    (partial(custom_comm, name="SymmMemAllGather"), "set_symm_mem_for_comm (SymmMemAllGather) cannot be used beside"),
    (with_types, "has types of spmd_types, which is not supported"),
    (twice, "patched already"),
    (nothing, "fully_shard"),
]


def hook_within_a_step(model: nn.Module, rank: int) -> None:
    model.set_all_reduce_hook(lambda grad: None)


def comm_within_a_step(model: nn.Module, rank: int) -> None:
    model.set_custom_reduce_scatter(DefaultReduceScatter())


def factor_of_what_waits(model: nn.Module, rank: int) -> None:
    """The all-reduce is yet to come, and what it sums is divided behind it."""
    model.set_requires_all_reduce(False)
    loss_of(model, tokens(0, rank, 1)).backward()
    divide_by(model, 3.0)


def no_all_reduce(model: nn.Module, rank: int) -> None:
    model.set_requires_all_reduce(False)


def cast_within_a_step(model: nn.Module, rank: int) -> None:
    model.double()


def changed_within_a_step(model: nn.Module, rank: int) -> None:
    model._apply(lambda tensor: tensor * 0.5)


REFUSED_LATER: list[tuple[Callable[[nn.Module, int], None], str]] = [
    (hook_within_a_step, "'<root>': set_all_reduce_hook is not supported"),
    (comm_within_a_step, "set_custom_reduce_scatter (DefaultReduceScatter)"),
    (factor_of_what_waits, "set_gradient_divide_factor was called behind a microbatch"),
    (cast_within_a_step, "was torch.float32 when the model was patched, and has been cast to torch.float64"),
    (changed_within_a_step, "changed by Module._apply between backward and step"),
    (no_all_reduce, "ran under set_requires_all_reduce(False)"),
]
"""Set while a session is in the model, and named at the next microbatch, or the end."""


def late_refusals(rank: int, world_size: int) -> list[tuple[str, str]]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for prepare, _ in REFUSED_LATER:
        model = fully_shard(build(), mesh=mesh)
        session = odc.patch_fsdp(model)
        loss_of(model, tokens(0, rank, 0)).backward()
        try:
            prepare(model, rank)
            loss_of(model, tokens(0, rank, 1)).backward()
            optimizer_of(model).step()
            found.append(("nothing raised", ""))
        except odc.OdcError as error:
            found.append((type(error).__name__, str(error)))
        session.close()
    return found


def refusals(rank: int, world_size: int) -> list[tuple[str, str]]:
    found = []
    for prepare, _ in REFUSED:
        model = build()
        prepare(model, world_size)
        try:
            odc.patch_fsdp(model)
            found.append(("nothing raised", ""))
        except (odc.UnsupportedError, ValueError) as error:
            found.append((type(error).__name__, str(error)))
    return [*found, *late_refusals(rank, world_size)]


def test_every_unsupported_option_is_named() -> None:
    for results in run_ranks(4, refusals, timeout_s=180):
        for (prepare, words), (kind, text) in zip(REFUSED + REFUSED_LATER, results, strict=True):
            assert kind in ("UnsupportedError", "MisuseError", "ValueError"), (prepare, kind)
            assert words in text, (prepare, text)


FAILING_STEPS = [
    (odc.fsdp_patch.session, "GradientUse"),
    (odc.fsdp_patch.session.Publisher, "publish_all"),
    (odc.fsdp_patch.fsdp2_unit.Fsdp2Unit, "enter"),
    (odc.fsdp_patch.session, "listen"),
]


def patch_and_step(model: nn.Module, rank: int) -> None:
    odc.patch_fsdp(model)
    loss_of(model, tokens(0, rank, 0)).backward()
    optimizer_of(model).step()


def failing_while_a_session_is_made(rank: int, world_size: int) -> list[tuple[str, str, float]]:
    """How each rank learns that rank 1 has failed, in the middle of ``patch_fsdp``, and how long after that."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise LookupError("nobody has thought of this")

    found = []
    for holder, name in FAILING_STEPS:
        model = shard(build(), world_size)
        dist.barrier()
        started = time.monotonic()
        original = getattr(holder, name)
        if rank == 1:
            setattr(holder, name, fail)
        with pytest.raises((LookupError, odc.OdcError)) as caught:
            patch_and_step(model, rank)
        setattr(holder, name, original)
        found.append((caught.typename, str(caught.value), time.monotonic() - started))
        del caught
        dist.barrier()
    return found


def test_a_failure_while_a_session_is_made_reaches_all_ranks() -> None:
    told, own = run_ranks(2, failing_while_a_session_is_made)
    assert [kind for kind, _, _ in own] == ["LookupError"] * len(FAILING_STEPS)
    for kind, text, seconds in told:
        assert kind in ("AbortedError", "SetupError"), text
        assert "rank 1 (pid " in text
        assert "LookupError: nobody has thought of this" in text
        assert seconds < 30  # not after the limit on silence, ten minutes


ODD: dict[str, tuple[str, ...]] = {
    "shape": ("SetupError", "differs from rank 0 in parameters", "'embed.weight'", "[17, 13]", "[18, 13]"),
    "frozen": ("SetupError", "differs from rank 0 in parameters", "'blocks.1.up.weight'", "frozen"),
    "dtype": ("SetupError", "differs from rank 0 in FSDP options", "torch.float32", "torch.bfloat16"),
    "option": ("SetupError", "in options", "'deterministic'", "rank 0 has False, rank 1 has True"),
    "version": ("SetupError", "in versions", "'odc'", "9.9.9"),
    "hook": ("UnsupportedError", "set_all_reduce_hook"),
    "address": ("ConfigError", "ODC_ADDRESS='0.0.0.0' cannot be used"),
}
"""What rank 1 has unlike the other: its own error there, and what both say."""


def odd_models(rank: int, world_size: int) -> list[str]:
    """Fault test 20: the parameter table, a dtype, an option or a version differs on rank 1; or it alone refuses."""
    told = []
    for odd in ODD if rank == 1 else [""] * len(ODD):
        model = build(vocabulary=18 if odd == "shape" else 17)
        model.blocks[1].up.weight.requires_grad_(odd != "frozen")
        policy = MixedPrecisionPolicy(torch.bfloat16 if odd == "dtype" else torch.float32, torch.float32)
        model = shard(model, world_size, mp_policy=policy)
        if odd == "hook":
            model.set_all_reduce_hook(lambda grad: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(odc.rank.context, "__version__", "9.9.9" if odd == "version" else odc.__version__)
            patch.setenv("ODC_ADDRESS", "0.0.0.0" if odd == "address" else "127.0.0.1")
            with pytest.raises(odc.OdcError) as caught:
                odc.patch_fsdp(model, deterministic=odd == "option")
        told.append(f"{caught.typename}: {caught.value}")
        dist.barrier()
    return told


def test_what_differs_on_one_rank_or_is_refused_there_is_named_on_all() -> None:
    for (kind, *words), told, own in zip(ODD.values(), *found_by(odd_models, TOGETHER), strict=True):
        assert told.startswith("SetupError: rank 1 differs" if kind == "SetupError" else "SetupError: "), told
        assert own.startswith(f"{kind}: "), own
        assert kind == "SetupError" or f"rank 1: {kind}" in told
        assert all(word in told and word in own for word in words), (told, own)


def misuse(rank: int, world_size: int) -> None:
    model, session, optimizer = start(world_size)
    with session.minibatch():
        loss_of(model, tokens(0, rank, 0)).backward()
        with pytest.raises(odc.ProtocolError, match=r"optimizer.step inside the minibatch"):
            optimizer.step()
    dist.barrier()
    use_up(optimizer)
    with torch.no_grad():
        model.head.weight.mul_(0.5)  # by hand, after publication
    session.publish()  # on every rank: allowed
    with session.minibatch():
        loss_of(model, tokens(1, rank, 0)).backward()
    optimizer.step()
    loss = loss_of(model, tokens(2, rank, 0))
    with torch.no_grad():
        model.blocks[1].down.weight.mul_(0.5)
    with pytest.raises(odc.ProtocolError, match=r"1.down.weight' was changed after it was published.*session.publish"):
        loss.backward()
    session.close()


def test_misuse_is_refused_and_says_what_to_do() -> None:
    assert found_by(misuse, TOGETHER) == [None, None]


def changed_behind(rank: int, world_size: int) -> list[float]:
    """Change parameters after publication in ways that version counters or hooks may miss, then evaluate."""
    losses = []
    for use_odc in (False, True):
        model = shard(build(), world_size)
        with odc.patch_fsdp(model) if use_odc else nullcontext(), torch.no_grad():
            for change in ("data", "part"):
                if change == "data":
                    model.head.weight.data.mul_(2.0)
                else:
                    model.blocks[0].load_state_dict({k: v * 2.0 for k, v in model.blocks[0].state_dict().items()})
                losses.append(float(loss_of(model, tokens(0, rank, 0))))
                model.reshard()  # type: ignore[operator]
    return losses


def test_stale_parameters_are_never_computed_with() -> None:
    for losses in found_by(changed_behind, TOGETHER):
        assert losses[:2] == losses[2:]
        assert len(set(losses)) == 2


def loaded_then_used(rank: int, world_size: int) -> list[float]:
    """A checkpoint loaded into the patched model, before a forward, an evaluation, or no microbatch at all."""
    losses = []
    for use_odc in (False, True):
        model = shard(build(), world_size)
        with odc.patch_fsdp(model, timeout_s=20) if use_odc else nullcontext():
            optimizer = optimizer_of(model)
            for step in range(3):
                model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})
                if step == 1:
                    losses.append(evaluated(model, rank).item())
                if rank == 0 or step != 2 or not use_odc:
                    weight = 0.0 if rank == 1 and step == 2 else 1.0
                    (loss_of(model, tokens(step, rank, 0)) * weight).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                use_up(optimizer)
            losses.append(evaluated(model, rank).item())
    return losses


def test_a_checkpoint_loaded_into_a_patched_model_is_used_at_once() -> None:
    for losses in found_by(loaded_then_used, TOGETHER):
        assert losses[2:] == pytest.approx(losses[:2], rel=1e-5)


def evaluated_without_microbatches(rank: int, world_size: int) -> list[float]:
    """Evaluations leave the root gathered; a rank without a backward must not go on with the old parameters."""
    model, session, optimizer = start(world_size)
    losses = []
    for step in range(3):
        if rank == 0:
            loss_of(model, tokens(step, 0, 0)).backward()
        use_up(optimizer)
        losses.append(evaluated(model).item())
    session.close()
    return losses


def test_a_rank_without_microbatches_evaluates_the_new_parameters() -> None:
    first, second = found_by(evaluated_without_microbatches, TOGETHER)
    assert first == second
    assert len(set(first)) == 3


def reloaded_then_evaluated(rank: int, world_size: int) -> list[float]:
    losses = []
    for use_odc in (False, True):
        model = shard(build(), world_size)
        session = odc.patch_fsdp(model) if use_odc else None
        optimizer = torch.optim.SGD([model.head.weight], lr=0.1)  # the other parameters are in no optimizer
        with session.minibatch() if session else torch.enable_grad():
            loss_of(model, tokens(0, rank, 0)).backward()
        optimizer.step()
        model.zero_grad()
        multiply(model, 1.5)
        if session:
            session.publish()  # some units were published by the step, some not
        losses.append(evaluated(model).item())
    return losses


def test_publish_makes_parameters_changed_by_hand_visible() -> None:
    for plain, ours in found_by(reloaded_then_evaluated, TOGETHER):
        assert ours == pytest.approx(plain, rel=1e-6)


def skipped_step(rank: int, world_size: int) -> None:
    """A GradScaler that found infinities does not call step; the script zeroes the gradients, perhaps goes back to
    older parameters, and goes on."""
    model, session, optimizer = start(world_size)
    for step in range(6):
        with session.minibatch():
            loss_of(model, tokens(step, rank, 0)).backward()
        optimizer.zero_grad()
        if step > 2:
            model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
        evaluated(model)
    session.close()


def test_an_evaluation_after_a_skipped_step() -> None:
    assert found_by(skipped_step, TOGETHER) == [None, None]


def skipped_step_and_idle_rank(rank: int, world_size: int) -> list[int]:
    """Step 1 is skipped on all ranks; in step 2 rank 1 has no microbatch and comes straight to clipping. In step 3 no
    rank has gradients, so that the optimizer asks again: those that are there were used before."""
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, timeout_s=10)
    optimizer = optimizer_of(model)
    for step, counts in enumerate([(1, 1), (1, 1), (2, 0), (0, 0), (1, 2)]):
        for microbatch in range(counts[rank]):
            loss_of(model, tokens(step, rank, microbatch)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # Again: taken for the next minibatch, in which this rank could have no microbatch. It is empty.
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != 1:
            optimizer.step()
        optimizer.zero_grad()
    minibatches = session.stats().minibatches
    session.close()
    return [minibatches]


def test_an_idle_rank_joins_the_minibatch_after_a_skipped_step() -> None:
    assert found_by(skipped_step_and_idle_rank, TOGETHER) == [[11], [11]]


# Refusals that a script has caught: the ranks that wait for it say so


def caught(rank: int, world_size: int, transport: str, then: str) -> None:
    """Rank 1 catches a refusal of its second minibatch, and then does something else than the others."""
    model = shard(build(), world_size)
    session = odc.patch_fsdp(model, transport=transport, timeout_s=2)
    optimizer = optimizer_of(model)
    for step in range(3):
        loss_of(model, tokens(step, rank, 0)).backward()
        if rank == 1 and step == 1:
            if then == "goes on":
                with pytest.raises(odc.MisuseError):
                    session.publish()
            else:
                model.head.weight.grad = None
                with pytest.raises(odc.MisuseError):
                    optimizer.step()
                break
        use_up(optimizer)
    if rank == 1:
        if then != "sleeps":
            session.close()
        time.sleep(5 if then == "sleeps" else 2)
    else:
        session.finish()


REFUSED_ON_1 = r"after rank 1 had refused what its script did \(minibatch 2, microbatch 1: MisuseError: setting \.grad"


@pytest.mark.parametrize(
    ("transport", "then", "error_type", "said"),
    [
        ("shm", "sleeps", "PeerSilentError", rf"rank 1 is alive but silent for .*, {REFUSED_ON_1}"),
        ("tcp", "closes", "PeerClosedError", rf"rank 1 is still running, but it closed its session, {REFUSED_ON_1}"),
        ("shm", "goes on", "PeerClosedError", r"minibatch 4.*rank 1 is gone: it closed its session\n"),
    ],
)
def test_a_rank_that_has_caught_a_refusal_is_not_called_gone(
    transport: str, then: str, error_type: str, said: str
) -> None:
    first, second = start_ranks(2, caught, transport, then).join(60)
    assert first.error_type == error_type, first
    assert re.search(said, first.error or ""), first.error
    assert second.error is None


# Gradients that are never synchronized


UNSYNCHRONIZED: list[tuple[str, list[str], str]] = [
    ("fsdp2", [], "unit '<root>' and 2 others"),
    ("fsdp2", ["", "blocks.0"], "unit 'blocks.1':"),
    ("fsdp1", [], "unit '<root>' and 2 others"),
    ("fsdp2", ["", "blocks.0", "blocks.1"], ""),
]
"""By kind of FSDP: the units that are synchronized, and of which it is told that they are not."""


def unsynchronized(rank: int, world_size: int) -> list[tuple[list[str], list[float]]]:
    return [synchronizing(rank, world_size, kind, names) for kind, names, _ in UNSYNCHRONIZED]


def synchronizing(rank: int, world_size: int, kind: str, names: list[str]) -> tuple[list[str], list[float]]:
    """Two minibatches in which only the units of these names are synchronized; warnings and norms."""
    model = sharded_by(kind, build(), world_size)
    odc.patch_fsdp(model)
    if kind == "fsdp2":
        model.set_requires_gradient_sync(False)
        for name, module in model.named_modules():
            if name in names:
                module.set_requires_gradient_sync(True, recurse=False)
    norms = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            for microbatch in range(2):
                with model.no_sync() if kind == "fsdp1" else nullcontext():
                    loss_of(model, tokens(step, rank, microbatch)).backward()
            norms.append(clip_grad_norm_(model.parameters(), 1.0) if kind == "fsdp2" else model.clip_grad_norm_(1.0))
            model.zero_grad()
    said = [one for one in caught if "has synchronized" in str(one.message)]
    lines = [linecache.getline(one.filename, one.lineno).strip() for one in said if one.filename == __file__]
    return [f"{one.message} {line}" for one, line in zip(said, lines, strict=True)], [float(norm) for norm in norms]


def test_gradients_that_no_microbatch_synchronizes_are_told_once() -> None:
    first, second = found_by(unsynchronized, TOGETHER)
    for (kind, names, of), (said, norms) in zip(UNSYNCHRONIZED, first, strict=True):
        words = f"no microbatch of minibatch 1 has synchronized the gradients of {of}"
        assert [words in one and "norms.append(clip_grad_norm_" in one for one in said] == [True] * bool(of), said
        assert kind == "fsdp1" or all(bool(norm) is bool(names) for norm in norms)
    assert all(said == [] for said, _ in second)


TOGETHER = (
    *(odd_models, changed_behind, loaded_then_used, evaluated_without_microbatches),
    *(reloaded_then_evaluated, skipped_step, skipped_step_and_idle_rank, misuse, unsynchronized),
)
