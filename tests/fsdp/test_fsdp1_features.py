"""Layer 3: ranks as processes. Habits of FSDP1 scripts that must keep working under ODC, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from process_ranks import assert_all_say, found_by, run_ranks, start_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from training import (
    TOLERANCE,
    Block,
    Net,
    build,
    full_parameters_of_fsdp1,
    gradient_now,
    largest_difference,
    loss_of,
    num_tokens,
    optimizer_of,
    reference,
    tokens,
    use_up,
    wrap,
)

import odc


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    rank: int,
    counts: tuple[int, int] = (1, 1),
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> None:
    """A script that says nothing about minibatches: the step ends them."""
    for step in steps:
        for m in range(counts[rank]):
            (loss(model, tokens(step, rank, m)) * (len(counts) / num_tokens(step, counts))).backward()
        use_up(optimizer)


# Scripts that run as they are and patched, and must give the same tensors

SESSIONS: list[odc.Session] = []


def patched(model: nn.Module, use_odc: bool) -> odc.Session | None:
    if not use_odc:
        return None
    SESSIONS.append(odc.patch_fsdp(model))
    return SESSIONS[-1]


def state_dicts(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))  # SHARDED_STATE_DICT gives DTensors then
    kinds = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]
    return save_and_load(rank, use_odc, kinds, use_orig_params=use_orig_params, device_mesh=mesh)


def local_state_dict(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    return save_and_load(rank, use_odc, [StateDictType.LOCAL_STATE_DICT], use_orig_params=False)


def save_and_load(rank: int, use_odc: bool, kinds: list[StateDictType], **options: Any) -> dict[str, Any]:
    """Checkpoints between steps; each is loaded later, into the patched model."""
    model = wrap(build(), **options)
    session = patched(model, use_odc)
    optimizer = optimizer_of(model)
    result = {}
    for number, kind in enumerate(kinds):
        train(model, optimizer, range(number, number + 1), rank)
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = copied(model.state_dict())
            train(model, optimizer, range(number + 10, number + 11), rank)
            model.load_state_dict(state)
        if session:
            with session.minibatch():  # publishes what was loaded
                pass
        result.update({f"{kind.name} {n}": v for n, v in full_parameters_of_fsdp1(model).items()})
    train(model, optimizer, range(20, 22), rank)
    optimizer_state = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    result.update({f"exp_avg {name}": of["exp_avg"] for name, of in optimizer_state.items() if "exp_avg" in of})
    return {**result, **full_parameters_of_fsdp1(model)}


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """Memory of its own for every tensor. LOCAL_STATE_DICT gives ShardedTensors, which have no clone()."""
    for value in state.values():
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            shard.tensor = shard.tensor.detach().clone()
    return {n: v if hasattr(v, "local_shards") else v.detach().clone() for n, v in state.items()}


def summoned(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    """Full parameters read between steps, then changed."""
    model = wrap(build(), use_orig_params=use_orig_params)
    session = patched(model, use_odc)
    optimizer = optimizer_of(model)
    for step in range(3):
        train(model, optimizer, range(step, step + 1), rank)
        with FullyShardedDataParallel.summon_full_params(model):  # writes back what it has read: no change
            largest = max(float(p.abs().max()) for p in model.parameters())
        if step == 1:
            with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
                for parameter in model.parameters():
                    parameter.div_(largest)
            if session:
                session.publish()
    return full_parameters_of_fsdp1(model)


def replaced_data(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    """``param.data = ...`` between steps, which FSDP1 takes over in its next forward."""
    model = wrap(build(), use_orig_params=True)
    session = patched(model, use_odc)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(2), rank)
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5
    if session:
        session.publish()
    train(model, optimizer, range(2, 4), rank)
    return full_parameters_of_fsdp1(model)


class TwoRoots(nn.Module):
    """A plain module with an own parameter around two FSDP models."""

    def __init__(self, use_orig_params: bool) -> None:
        super().__init__()
        first, second = build(), build()
        self.first = wrap(nn.Sequential(first.embed, *first.blocks), use_orig_params=use_orig_params)
        self.second = wrap(nn.Sequential(*second.blocks, second.head), use_orig_params=use_orig_params)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(data))


def two_roots(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    model = TwoRoots(use_orig_params)
    session = patched(model, use_odc)
    train(model, optimizer_of(model), range(3), rank)
    if session:
        assert session.stats().minibatches == 3  # one for both
    return full_parameters_of_fsdp1(model)


def ignored(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    """A module that FSDP leaves alone: its gradients stay this rank's own, under ODC as without."""
    model = build()
    return three_steps(rank, use_odc, use_orig_params, model, ignored_states=[model.head.weight, model.head.bias])


def tied(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    model = build()
    model.head.weight = model.embed.weight
    return three_steps(rank, use_odc, use_orig_params, model)


def three_steps(rank: int, use_odc: bool, use_orig_params: bool, net: Net, **options: Any) -> dict[str, Any]:
    model = wrap(net, use_orig_params=use_orig_params, **options)
    patched(model, use_odc)
    train(model, optimizer_of(model), range(3), rank)
    return full_parameters_of_fsdp1(model)


def closed(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    """After close() nothing of ours is left, and plain FSDP1 goes on."""
    model = wrap(build(), use_orig_params=use_orig_params)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1), rank)
    for number in range(2):
        before = left_overs(model)
        session = patched(model, use_odc)
        assert (left_overs(model) != before) == use_odc
        for step in range(2):
            train(model, optimizer, range(2 * number + step, 2 * number + step + 1), rank)
        loss_of(model, tokens(9, rank, 0)).backward()
        if session:
            session.finish()
            session.close()  # with gradients that lie in our memory
            assert left_overs(model) == before
        use_up(optimizer)
    train(model, optimizer, range(4, 7), rank)
    return full_parameters_of_fsdp1(model)


def left_overs(model: nn.Module) -> list[Any]:
    """Attribute names of everything FSDP1 made, and the values of those slots that we use."""
    found: list[Any] = []
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            found.append((sorted(vars(module)), module._comm_hook, module._exec_order_data._checking_order))
            handle = module._handle
            if handle is not None:
                found.append((sorted(vars(handle)), sorted(vars(handle.flat_param))))
    return found


def moved(rank: int, use_odc: bool, use_orig_params: bool) -> dict[str, Any]:
    """To another device and back, anywhere in the loop: under ODC alone. Plain FSDP1 trains with cleared gradients
    behind that, and with the parameters of before a step."""
    model = wrap(build(), use_orig_params=use_orig_params)
    patched(model, use_odc)
    optimizer = optimizer_of(model)
    for step in range(3):
        move(model, use_odc)
        (loss_of(model, tokens(step, rank, 0)) * 0.02).backward()
        move(model, use_odc)
        optimizer.step()
        move(model, use_odc)
        optimizer.zero_grad()
    return full_parameters_of_fsdp1(model)


def move(model: nn.Module, is_moved: bool) -> None:
    if is_moved:
        model.to("cpu")._apply(torch.clone)


Script = Callable[[int, bool, bool], dict[str, Any]]
SCRIPTS: dict[str, Script] = {
    function.__name__: function
    for function in (state_dicts, local_state_dict, summoned, replaced_data, two_roots, ignored, tied, closed, moved)
}


def differences(rank: int, world_size: int, use_orig_params: bool) -> dict[str, float]:
    found = {}
    for name, script in SCRIPTS.items():
        theirs, ours = script(rank, False, use_orig_params), script(rank, True, use_orig_params)
        assert SESSIONS, name
        while SESSIONS:
            session = SESSIONS.pop()
            assert session.stats().pushes > 0, name
            session.close()
        found[name] = largest_difference(ours, theirs)
    return found


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.extended)], ids=["orig", "flat"])
def found(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    return run_ranks(2, differences, request.param, timeout_s=300)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_give_what_they_give_under_plain_fsdp1(found: list[dict[str, float]], name: str) -> None:
    assert max(of_rank[name] for of_rank in found) < TOLERANCE


# Under ODC only


def nothing_until_final(rank: int, world_size: int) -> None:
    for use_orig_params in (True, False):
        model = wrap(build(), use_orig_params=use_orig_params)
        flats = [m._handle.flat_param for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle]
        with odc.patch_fsdp(model) as session:
            for step in range(2):
                with session.minibatch():
                    for m in range(2):
                        loss_of(model, tokens(step, rank, m)).backward()
                        for flat in flats:
                            assert gradient_now(flat) is None, "a gradient-sized buffer inside a minibatch"
                            assert not hasattr(flat, "_saved_grad_shard")
                        assert all(gradient_now(p) is None for p in model.parameters())
                assert all(flat.grad.shape == flat._local_shard.shape for flat in flats)
                model.zero_grad()
                session.publish()
        for flat in flats:
            flat.grad = None


def test_a_minibatch_holds_no_gradients_before_they_are_final() -> None:
    assert found_by(nothing_until_final, TOGETHER) == [None, None]


def evaluates_where_a_rank_has_no_microbatch(rank: int, world_size: int) -> list[float]:
    """The evaluation leaves parameters unsharded; rank 1 has no backward that would free them before the next one."""
    model = wrap(build(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    losses = []
    with odc.patch_fsdp(model):
        optimizer = optimizer_of(model)
        for step in range(3):
            train(model, optimizer, range(step, step + 1), rank, (1, 0))
            losses.append(float(training.evaluated(model)))
    return losses


def test_an_evaluation_never_sees_parameters_of_the_minibatch_before() -> None:
    ours, without = found_by(evaluates_where_a_rank_has_no_microbatch, TOGETHER)
    assert without == ours
    assert len(set(ours)) == 3


def uneven(rank: int, world_size: int) -> dict[str, Any]:
    dist.set_debug_level_from_env()  # torch reads it when it is imported, which was before
    model = wrap(build())
    with odc.patch_fsdp(model):
        training.train(model, None, rank, world_size, (2, 0), 3)
    return full_parameters_of_fsdp1(model)


def test_the_order_check_of_debug_runs_is_off() -> None:
    """Else FSDP1 calls a collective in every forward, and rank 0 would wait for rank 1 for ever."""
    ours = run_ranks(2, uneven, timeout_s=120, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})[0]
    assert largest_difference(ours, reference([2, 0], 3)) < TOLERANCE


# Refusals and misuse


def offload(model: Net) -> nn.Module:
    return wrap(model, cpu_offload=CPUOffload(offload_params=True))


def comm_hook(model: Net) -> nn.Module:
    wrapped = wrap(model)
    wrapped.register_comm_hook(None, lambda state, grads, out: None)
    return wrapped


def twice(model: Net) -> nn.Module:
    wrapped = wrap(model)
    wrapped.kept = odc.patch_fsdp(wrapped)  # type: ignore[assignment]
    return wrapped


def half_reduce(model: Net) -> nn.Module:
    return wrap(model, mixed_precision=MixedPrecision(torch.bfloat16, torch.float16))


def low_precision_gradients(model: Net) -> nn.Module:
    return wrap(model, mixed_precision=MixedPrecision(torch.bfloat16, keep_low_precision_grads=True))


def a_part(model: Net) -> nn.Module:
    wrapped = wrap(model)
    loss_of(wrapped, tokens(0, 0, 0))
    return wrapped.module.blocks[0]


def part_of_a_mesh(model: Net) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_mod_ep", "ep"))
    return wrap(model, device_mesh=mesh["dp_mod_ep"])


REFUSED: list[tuple[Callable[[Net], nn.Module], str]] = [
    (offload, "CPUOffload(offload_params=True)"),
    (comm_hook, "register_comm_hook"),
    (twice, "patched already"),
    (half_reduce, "gradients are reduced in torch.float16"),
    (low_precision_gradients, "keep_low_precision_grads=True"),
    (a_part, "patch the whole model"),
    (part_of_a_mesh, "device_mesh (dp_mod_ep=2) is a part of a larger mesh"),
]


def refusals(rank: int, world_size: int) -> list[str]:
    found = []
    for prepare, _ in REFUSED:
        model = prepare(build())
        try:
            odc.patch_fsdp(model)
            found.append("nothing raised")
        except odc.UnsupportedError as error:
            found.append(str(error))
    return found


def test_what_is_not_supported_is_named_when_patching() -> None:
    for texts in found_by(refusals, TOGETHER):
        for (_, words), text in zip(REFUSED, texts, strict=True):
            assert words in text


TOGETHER = (nothing_until_final, evaluates_where_a_rank_has_no_microbatch, refusals)


def misused(rank: int, world_size: int, how: str) -> None:
    model = build()
    model.blocks[1].up.weight.requires_grad_(False)
    model = wrap(model, use_orig_params=True)
    odc.patch_fsdp(model)
    optimizer = optimizer_of(model)
    if how == "unsynchronized" and rank == 1:
        with model.no_sync():
            loss_of(model, tokens(0, rank, 0)).backward()
    else:
        loss_of(model, tokens(0, rank, 0)).backward()
    optimizer.step()
    if how == "changed":
        loss = loss_of(model, tokens(1, rank, 0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)
        loss.backward()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("unsynchronized", "still holds gradients of backward passes under no_sync()"),
        ("changed", "'blocks.1.norm.weight' was changed after it was published"),
    ],
)
def test_misuse_is_named(how: str, words: str) -> None:
    results = start_ranks(2, misused, how).join(120)
    assert any(words in f"{r.error_type}: {r.error}" for r in results), results


def differing(rank: int, world_size: int) -> None:
    model = build()
    if rank == 1:
        model.blocks[1].up.weight.requires_grad_(False)
    odc.patch_fsdp(wrap(model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Block})))


def test_ranks_that_froze_other_parameters_are_told() -> None:
    assert_all_say(start_ranks(2, differing).join(120), "blocks.1.up.weight", kinds=["SetupError"])


# Gradients that stay over a step, in every precision: dtypes and values of plain FSDP1

BF16 = torch.bfloat16
PRECISIONS = {
    "fp32": MixedPrecision(),
    "compute": MixedPrecision(BF16, torch.float32),
    "reduce": MixedPrecision(reduce_dtype=BF16),
    "both": MixedPrecision(BF16),
}
CLEARINGS: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "kept": lambda optimizer: None,
    "zeroed": lambda optimizer: optimizer.zero_grad(set_to_none=False),
    "none": lambda optimizer: optimizer.zero_grad(),
}
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


def gradients_of_steps(
    rank: int, use_odc: bool, precision: MixedPrecision, clear: Callable[[torch.optim.Optimizer], None], **options: Any
) -> list[list[torch.Tensor | None]]:
    """``.grad`` of every parameter after each of three steps' backward passes."""
    model = wrap(build(), mixed_precision=precision, **options)
    patched(model, use_odc)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        for m in range(2):
            (loss_of(model, tokens(step, rank, m)) * 0.02).backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        clear(optimizer)
        training.evaluated(model, rank)  # gathers while gradients are kept
    while SESSIONS:
        SESSIONS.pop().close()
    return found


def largest_error(ours: list[torch.Tensor | None], theirs: list[torch.Tensor | None]) -> float:
    """Relative to the largest gradient: this rank may have only a few elements of a parameter."""
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None and b.numel()]
    return max(float((a - b).abs().max()) for a, b in pairs) / max(float(b.abs().max()) for _, b in pairs)


def kept_gradients(rank: int, world_size: int, use_orig_params: bool, half: int) -> list[str]:
    """What differs, in every second one of all combinations."""
    wrong = []
    for i, (name, precision) in enumerate(PRECISIONS.items()):
        for how, clear in list(CLEARINGS.items())[(i + half) % 2 :: 2]:
            for strategy in STRATEGIES if name == "both" else STRATEGIES[:1]:
                options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
                theirs = gradients_of_steps(rank, False, precision, clear, **options)
                ours = gradients_of_steps(rank, True, precision, clear, **options)
                where = f"{name}, {how}, {strategy.name}"
                kinds = [
                    [[None if g is None else (g.dtype, g.shape) for g in s] for s in run] for run in (ours, theirs)
                ]
                if kinds[0] != kinds[1]:
                    wrong.append(f"{where}: dtypes {kinds}")
                    continue
                far = [largest_error(s, t) for s, t in zip(ours, theirs, strict=True)]
                # FSDP1 sums bf16 in bf16, or sees weights that differ by a rounding of bf16
                if max(far) > (TOLERANCE if name == "fp32" else 3e-2):
                    wrong.append(f"{where}: {max(far)}")
    return wrong


@pytest.mark.parametrize(
    ("use_orig_params", "half"),
    [
        pytest.param(use_orig_params, half, marks=() if use_orig_params and half else pytest.mark.extended)
        for use_orig_params in (True, False)
        for half in (0, 1)
    ],  # in every run FSDP1's pairs (test_bench_parity.py), and flat ones: test_fsdp1_parity.py
)
def test_gradients_that_stay_over_a_step_are_those_of_plain_fsdp1(use_orig_params: bool, half: int) -> None:
    for wrong in run_ranks(2, kept_gradients, use_orig_params, half, timeout_s=300):
        assert not wrong, wrong
