"""Layer 3: ranks as processes. Weights of which FSDP2's all-gather extension makes what travels.

Loops with such weights are among those of ``test_fsdp2_scripts.py``, on two ranks. Here are four ranks, what is made
how often, checkpoints, what is refused; and torchao's own weights, where there is a torchao.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from extended_weights import Extended, Made, Rounded, RowScaled, Scaled, extend, precompute_scales
from fsdp_scripts import extended
from fsdp_scripts.run import Case, Outcome, Run, differences, with_
from process_ranks import assert_all_say, assert_one_says, found_by, run_ranks, start_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from training import (
    BOTH,
    build,
    full_parameters,
    largest_difference,
    loss_of,
    multiply,
    optimizer_of,
    read_at_once,
    shard,
    tokens,
    train,
    use_up,
)

import odc
from odc.fsdp_patch import guard

FOLDER = os.environ.get("ODC_TEST_TORCHAO", "")
NEEDS_TORCHAO = pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("torchao") is None,
    reason="torchao is not installed; ODC_TEST_TORCHAO names a folder that has it",
)


def uneven(run: Run, kind: extended.Kind) -> Outcome:
    """Of four ranks two in turn have no microbatch. Some weights have five rows: the last rank has padding alone."""
    model = build(num_blocks=2, width=5)
    extend(model, kind, 1 if kind is RowScaled else run.mesh.shape[-1])
    run.patch(run.shard(model))
    optimizer = optimizer_of(model)
    for step in range(4):
        run.backward_unless(run.rank // 2 == step % 2, model, step)
        use_up(optimizer, model)
    return {}


def find_uneven(rank: int, world_size: int) -> dict[str, dict[str, float | str]]:
    os.environ["ODC_HOST_ID"] = f"host-{rank // 2}"
    meshes = {
        "full": init_device_mesh("cpu", (world_size,)),
        "hybrid": init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard")),
    }
    return {
        f"{kind.__name__} {name}": differences(
            Case(with_(uneven, kind), minibatches=4), functools.partial(Run, rank, world_size, mesh=mesh), BOTH[:1]
        )
        for name, mesh in meshes.items()
        for kind in (Scaled, RowScaled)
    }


@functools.cache
def found_uneven() -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(4, find_uneven, timeout_s=300)


@pytest.mark.parametrize("mesh", ["full", "hybrid"])
@pytest.mark.parametrize("kind", [Scaled, RowScaled])
def test_four_ranks_of_which_two_are_idle(kind: type[Extended], mesh: str) -> None:
    assert [of_rank[f"{kind.__name__} {mesh}"] for of_rank in found_uneven()] == [{"small": 0.0}] * 4


def what_is_made(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """How often, behind patching and behind each of two steps; and bytes of a gather of all units without and with."""
    numbers, num_bytes = [], []
    for extends in (False, True):
        model = build(num_blocks=2, width=16)
        if extends:
            extend(model.blocks, Rounded)
        Extended.evaluations = 0
        with odc.patch_fsdp(shard(model, world_size)) as session:
            numbers.append(Extended.evaluations)
            for _ in range(2):
                train(model, session, rank, world_size, [3, 1], 1)
                numbers.append(Extended.evaluations)
            num_bytes.append(session.stats().gather_bytes // session.stats().gathers)
            assert ("staged (with an all-gather extension)" in session.describe()) == extends
    return numbers[3:], num_bytes


def test_what_travels_is_made_once_a_publication_and_not_for_each_gather() -> None:
    for numbers, (plain, rounded) in found_by(what_is_made, TOGETHER):
        num_weights = 4
        assert numbers == [2 * num_weights, 3 * num_weights, 4 * num_weights]  # one to know how much it is
        assert rounded < 0.7 * plain


def made_with_scales(rank: int, world_size: int) -> list[list[int]]:
    """How often within each step, with scales that are computed in a step hook, and behind the step."""
    found = []
    for in_hook in (True, False):
        model = build(num_blocks=1, width=16)
        extend(model.blocks, Scaled)
        numbers = []
        with odc.patch_fsdp(shard(model, world_size)):
            optimizer = optimizer_of(model)
            if in_hook:
                optimizer.register_step_post_hook(lambda *_, model=model: precompute_scales(model))
            for step in range(3):
                Extended.evaluations = 0
                loss_of(model, tokens(step, rank, 0)).backward()
                use_up(optimizer)
                numbers.append(Extended.evaluations)
                if not in_hook:
                    precompute_scales(model)
        found.append(numbers)
    return found


def test_scales_that_are_computed_in_a_step_hook_are_published_with_the_step() -> None:
    num_weights = 2
    for in_hook, behind in found_by(made_with_scales, TOGETHER):
        assert in_hook == [num_weights] * 3
        assert behind == [num_weights, 2 * num_weights, 2 * num_weights]  # anew when the model is next used


def killed(rank: int, world_size: int) -> None:
    model = build(num_blocks=1, width=16)
    extend(model.blocks, Scaled)
    with odc.patch_fsdp(shard(model, world_size)) as session:
        loss_of(model, tokens(0, rank, 0)).backward()
        session.finish()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer_of(model).step()


def test_a_rank_that_dies_before_a_collective_of_a_publication_is_named() -> None:
    told, _ = start_ranks(2, killed).join(60)
    assert_all_say([told], "rank 1 ", "is dead: killed by signal 9", kinds=["PeerDiedError"])
    assert told.seconds < 30


CHANGING = [name for name in extended.CASES if name.endswith(("clamped", "changed on one", "behind the step"))]


def find_changes(rank: int, world_size: int) -> list[dict[str, float | str]]:
    """Found by traces, as on a host, and by comparisons that the host waits for, as on a device."""
    make_run = functools.partial(Run, rank, world_size, mesh=init_device_mesh("cpu", (world_size,)))
    found = [differences(extended.CASES[name], make_run, BOTH[:1]) for name in CHANGING]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "comparison_for", lambda device: guard.DeviceComparison(read_at_once))
        return found + [differences(extended.CASES[name], make_run, BOTH[:1]) for name in CHANGING]


def test_changes_between_steps_are_published_anew() -> None:
    assert run_ranks(2, find_changes, env={"ODC_TIMEOUT": "20"}) == [[{"small": 0.0}] * 2 * len(CHANGING)] * 2


# Checkpoints


def crossing(rank: int, world_size: int, folder: str) -> float:
    """Saved under ODC and loaded under plain FSDP2, and trained on, beside a run that goes on."""
    torch.serialization.add_safe_globals([RowScaled])
    counts, models = [1] * world_size, [build(num_blocks=1), build(num_blocks=1)]
    for model in models:
        extend(model, RowScaled)
        shard(model, world_size)
    first, second = models
    with odc.patch_fsdp(first) as session:
        train(first, session, rank, world_size, counts, 2)
        weight = first.state_dict()["blocks.0.up.weight"]
        assert weight.dtype == torch.float32
        assert isinstance(weight._local_tensor, RowScaled)
        dcp.save({"model": first.state_dict()}, checkpoint_id=folder)
        train(first, session, rank, world_size, counts, 2)
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    second.load_state_dict(state["model"])
    train(second, None, rank, world_size, counts, 2)
    return largest_difference(full_parameters(first), full_parameters(second))


def test_checkpoints_have_the_high_precision_weights(tmp_path: Path) -> None:
    assert max(run_ranks(2, crossing, str(tmp_path))) < 1e-5


# Gradients of another dtype than that of the weights


class AsItTravels(Rounded):
    """The full weight is in bfloat16, whatever the policy says."""

    def full(self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        return outputs[0]


class InFloat64(Rounded):
    def full(self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype) -> torch.Tensor:
        return outputs[0].to(torch.float64)


class OfItsWeight(nn.Linear):
    """Computes in the dtype of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


def dtypes(run: Run, kind: extended.Kind, **options: Any) -> None:
    """One rank has the microbatch, so that what the ranks have to add needs no rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(*(OfItsWeight(8, 8, bias=False) for _ in range(2)))
    extend(model, kind)
    for part in (*model, model):
        fully_shard(part, mesh=run.mesh, **options)
    run.patch(model)
    optimizer = optimizer_of(model)
    for step in range(3):
        if run.rank == step % 2 or not run.patched:
            weight = float(run.rank == step % 2)
            (model(torch.arange(16.0).view(2, 8) / 10).square().sum() * weight).backward()
        use_up(optimizer)


def find_dtypes(rank: int, world_size: int) -> list[dict[str, float | str]]:
    mesh = init_device_mesh("cpu", (world_size,))
    summed = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return [
        differences(Case(with_(dtypes, kind, **options)), functools.partial(Run, rank, world_size, mesh=mesh), BOTH[:1])
        for kind, options in ((AsItTravels, {}), (InFloat64, {"mp_policy": summed}), (InFloat64, {}))
    ]


def test_gradients_in_the_dtype_of_the_full_weight() -> None:
    """As FSDP2, which reduces them as they come, unless it is told to."""
    found = found_by(find_dtypes, TOGETHER)
    for in_bfloat16, told, _ in found:
        assert in_bfloat16 == {"small": 0.0}
        assert told == {"small": 0.0}
    words = "gradients in torch.float64, where parameters are computed in torch.float32: set reduce_dtype"
    assert any(words in str(untold) for _, _, untold in found)


# What is refused


class WithoutPadding(RowScaled):
    """On ranks with fewer rows less travels. FSDP2 would hang, or say so on those ranks only."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Made:  # type: ignore[override]
        return (self.inner.to(torch.bfloat16),), None


class FailingOnOne(RowScaled):
    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Made:  # type: ignore[override]
        raise LookupError("what travels is nowhere")


def refused_at_once(rank: int, world_size: int) -> list[str]:
    """Each with its words, before any memory is taken."""
    found = []
    for kind in (
        WithoutPadding,
        Rounded if rank else RowScaled,
        FailingOnOne if rank == 1 else RowScaled,
    ):
        model = build(num_blocks=1)
        extend(model, kind)
        if kind is FailingOnOne:  # the ranks have agreed before that in what they have
            FailingOnOne.__name__ = "RowScaled"
        with pytest.raises((odc.OdcError, LookupError)) as caught:
            odc.patch_fsdp(shard(model, world_size))
        found.append(f"{caught.typename}: {caught.value}")
    return found


def test_what_cannot_be_is_refused_by_name_on_all_ranks() -> None:
    for rank, (unpadded, mixed, failing) in enumerate(run_ranks(4, refused_at_once)):
        assert "UnsupportedError: parameter 'head.weight': fsdp_pre_all_gather returns [5, 13] torch.bf" in unpadded
        assert "on rank 0 and [2, 13] torch.bfloat16 on rank 3: let it pad what it returns" in unpadded
        assert "differs from rank 0 in parameters" in mixed
        assert "all-gather extension of RowScaled, rank 1 has" in mixed
        assert "what travels is nowhere" in failing
        assert ("LookupError" if rank == 1 else "set-up failed on rank 1") in failing


def step_by_hand(model: nn.Module, session: odc.Session, rank: int, *, says: bool) -> None:
    for step in range(2):
        extended.Run(rank, 2, True, None).backward(model, step)  # type: ignore[arg-type]
        session.finish()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        if says:
            session.publish()


def two_changed(rank: int, world_size: int, *, says: bool) -> None:
    models = [build(num_blocks=1, width=16) for _ in range(2)]
    sessions = []
    for model in models:
        extend(model.blocks, Scaled)
        sessions.append(odc.patch_fsdp(shard(model, world_size)))
    try:
        for model, session in zip(models, sessions, strict=True):
            multiply(model, 0.5)
            if says:
                session.publish()
        extended.Run(rank, world_size, True, None).backward(models[0], 0)  # type: ignore[arg-type]
    finally:
        for session in sessions:
            session.close()


class ChangesItsMind(Rounded):
    dtype_of_bytes = torch.bfloat16

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Made:
        return (self.inner.to(self.dtype_of_bytes),), None


def in_other_dtype(rank: int, world_size: int) -> None:
    model = build(num_blocks=1)
    extend(model, ChangesItsMind, world_size)
    with odc.patch_fsdp(shard(model, world_size)) as session:
        ChangesItsMind.dtype_of_bytes = torch.float16
        multiply(model, 0.5)
        session.publish()
        ChangesItsMind.dtype_of_bytes = torch.float32
        session.publish()


def assigned(rank: int, world_size: int) -> None:
    model, other = build(num_blocks=1), shard(build(num_blocks=1), world_size)
    extend(model, RowScaled)
    with odc.patch_fsdp(shard(model, world_size)) as session:
        model.load_state_dict({name: nn.Parameter(value) for name, value in other.state_dict().items()}, assign=True)
        session.publish()


def by_hand(rank: int, world_size: int, *, says: bool) -> None:
    model = build(num_blocks=1, width=16)
    extend(model.blocks, Scaled)
    with odc.patch_fsdp(shard(model, world_size)) as session:
        step_by_hand(model, session, rank, says=says)


REFUSED: list[tuple[Callable[[int, int], None], str]] = [
    (functools.partial(by_hand, says=False), "would be published where this rank first uses the model or waits for"),
    (functools.partial(two_changed, says=False), "2 models have changed since they were published"),
    (in_other_dtype, "has returned [13, 13] torch.bfloat16 when the model was patched, and now [13, 13] torch.float16"),
    (assigned, "had the all-gather extension of RowScaled when the model was patched, and has none now"),
]


def refused_later(rank: int, world_size: int, index: int) -> None:
    REFUSED[index][0](rank, world_size)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_what_cannot_be_followed_is_refused_by_name(index: int) -> None:
    results = start_ranks(2, refused_later, index).join(120)
    assert_one_says(results, "UnsupportedError", REFUSED[index][1])


def said(rank: int, world_size: int) -> None:
    by_hand(rank, world_size, says=True)
    two_changed(rank, world_size, says=True)


def test_what_is_said_is_done_where_that_communicates() -> None:
    assert found_by(said, TOGETHER) == [None, None]


TOGETHER = (what_is_made, made_with_scales, find_dtypes, said)


# torchao's


def quantized(run: Run, how: str, *, scales: str = "", **options: Any) -> Outcome:
    """Blocks of torchao's weights. Those without operators to compare them are compared by norms and losses."""
    model = build(num_blocks=2, width=64 if how == "nf4" else 16)
    optimizer = optimizer_of
    if how == "float8":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        convert_to_float8_training(model.blocks, config=config)
    elif how == "nf4":
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        for block in model.blocks:
            block.up.weight = nn.Parameter(to_nf4(block.up.weight.detach(), 64, 16), requires_grad=False)
    else:
        from torchao.prototype import quantized_training
        from torchao.quantization import quantize_

        quantize_(model.blocks, getattr(quantized_training, how)())
    if how == "int8_weight_only_quantized_training":
        optimizer = of_sgd
    run.patch(run.shard(model, **options))
    if optimizer is not optimizer_of or how == "nf4":
        run.models.clear()
    precompute: Any = None
    if scales:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp as precompute
    where = {scales: precompute} if scales else {}
    return extended.train(run, model, context=torch.no_grad, make_optimizer=optimizer, **where)


def of_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)


IN_BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
QUANTIZED = {
    "float8": Case(with_(quantized, "float8"), minibatches=4),
    "float8 in bfloat16": Case(with_(quantized, "float8", **IN_BFLOAT16), minibatches=4),
    "float8, scales behind the step": Case(with_(quantized, "float8", scales="behind_step"), minibatches=None),
    "float8, scales in a step hook": Case(with_(quantized, "float8", scales="in_step"), minibatches=4),
    "int8": Case(with_(quantized, "int8_weight_only_quantized_training"), minibatches=4),
    "int8 products": Case(with_(quantized, "int8_mixed_precision_training", **IN_BFLOAT16), minibatches=4),
    "bitnet": Case(with_(quantized, "bitnet_training"), minibatches=4),
    "nf4": Case(with_(quantized, "nf4"), minibatches=4),
}


def find_quantized(rank: int, world_size: int) -> dict[str, dict[str, float | str]]:
    if FOLDER:
        sys.path.insert(0, FOLDER)
    make_run = functools.partial(Run, rank, world_size, mesh=init_device_mesh("cpu", (world_size,)))
    return {name: differences(case, make_run, BOTH[:1]) for name, case in QUANTIZED.items()}


@functools.cache
def found_quantized() -> list[dict[str, dict[str, float | str]]]:
    return run_ranks(2, find_quantized, timeout_s=300)


@pytest.mark.extended
@NEEDS_TORCHAO
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_of_torchao(name: str) -> None:
    for of_rank in found_quantized():
        assert of_rank[name] == {"small": 0.0}, of_rank[name]
