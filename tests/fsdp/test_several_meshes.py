"""Layer 3: ranks as processes. Units of one model on several meshes: experts, or an embedding, beside the rest."""

from __future__ import annotations

import functools
import gc
import os
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_nvshmem import registered_fakes
from process_ranks import assert_all_say, found_by, run_ranks, start_ranks
from test_compute_groups import Block, part
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import BOTH, DEVICE, each_way, largest_difference, multiply, use_up

import odc
from odc.fsdp_patch.compat import param_groups, torch_version

CAN_PLACE = torch_version() >= (2, 12)
DIM, HIDDEN, NUM_EXPERTS, VOCABULARY = 6, 5, 4, 17


class AllToAll(torch.autograd.Function):
    """Rows to and from the ranks that have the experts, as a script exchanges them."""

    @staticmethod
    def forward(ctx: Any, rows: Any, received: Any, sent: Any, group: Any) -> Any:
        ctx.back = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return AllToAll.apply(grads[0], *ctx.back), None, None, None


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(rows)))


class Grouped(nn.Module):
    """All experts of a rank in one unit."""

    def __init__(self, experts: Sequence[Expert]) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.stack([expert.up.weight.detach() for expert in experts]))
        self.down = nn.Parameter(torch.stack([expert.down.weight.detach() for expert in experts]))

    def forward(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        return [torch.tanh(x @ u.T) @ d.T for x, u, d in zip(rows, up, down, strict=True)]


class Mixture(nn.Module):
    """A token goes to the expert that its number says. ``experts``: a list of modules, or one for all of them."""

    def __init__(self, grouped: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 1)
        experts = [Expert() for _ in range(NUM_EXPERTS)]
        self.experts = Grouped(experts) if grouped else nn.ModuleList(experts)
        self.group: dist.ProcessGroup | None = None
        self.skips_idle = False
        """Experts without a token are not called. With collectives that hangs where another rank has one."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(ids % NUM_EXPERTS, stable=True)
        num_ranks = 1 if self.group is None else self.group.size()
        going = torch.bincount(ids % NUM_EXPERTS, minlength=NUM_EXPERTS).view(num_ranks, -1)
        coming, rows = going, x[order]
        if self.group is not None:
            coming = torch.empty_like(going)
            dist.all_to_all_single(coming, going, group=self.group)
            rows = AllToAll.apply(rows, coming.sum(1).tolist(), going.sum(1).tolist(), self.group)
        pieces = rows.split(coming.flatten().tolist())  # by rank, and by expert
        num_local = coming.shape[1]
        by_expert = [torch.cat(pieces[expert::num_local]) for expert in range(num_local)]
        if isinstance(self.experts, nn.ModuleList):
            pairs = zip(self.experts, by_expert, strict=True)
            outs = [rows if self.skips_idle and not len(rows) else expert(rows) for expert, rows in pairs]
        else:
            outs = self.experts(by_expert)
        back = [out.split(counts) for out, counts in zip(outs, coming.T.tolist(), strict=True)]
        out = torch.cat([back[expert][rank] for rank in range(num_ranks) for expert in range(num_local)])
        if self.group is not None:
            out = AllToAll.apply(out, going.sum(1).tolist(), coming.sum(1).tolist(), self.group)
        return x + torch.sigmoid(self.gate(x)) * out[torch.argsort(order)]


class Net(nn.Module):
    def __init__(self, grouped: bool, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Mixture(grouped) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, ids)
        return self.head(x)


def build(layout: str) -> Net:
    torch.manual_seed(0)
    return Net(grouped=layout in ("dtensor", "placed"), num_blocks=2 if layout == "dtensor" else 1)


LAYOUTS = {
    "modules": ((2, 2), ("dp_mod_ep", "ep")),  # experts as modules, each on its ranks, as Megatron has them
    "dtensor": ((2, 2), ("dp_mod_ep", "ep")),  # one tensor for all of a layer, as torchtitan has them
    "placed": ((2, 2), ("dp_mod_ep", "ep")),  # the same in one module with others, by shard_placement_fn
    "alone": ((1, 4), ("dp_mod_ep", "ep")),  # an expert for each rank: FSDP communicates nothing for it
    "hybrid": ((2, 2), ("dp_mod_ep", "ep")),  # the rest has its replicas where the experts have their shards
    "embedding": ((2, 2), ("replicate", "shard")),  # over all ranks; the rest over pairs, with replicas
    "head": ((2, 2), ("replicate", "shard")),  # the same for the last layer: the mesh with replicas comes first
    "crossed": ((2, 2), ("row", "column")),  # no mesh is of all ranks
}


@functools.cache
def make_mesh(shape: tuple[int, int], names: tuple[str, str]) -> tuple[DeviceMesh, DeviceMesh]:
    """One of two dimensions, and one of all ranks. Each once, and with a name of its own: DTensor takes equal ones for
    one."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return mesh, mesh._flatten(f"all_{names[0]}_{shape[0]}")


def placement_over(mesh: DeviceMesh) -> Any:
    """Experts, which are DTensors, over ``mesh``, all else over the default."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    placed = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    return lambda parameter: placed if isinstance(parameter, DTensor) else None


def divide_by_all(module: FSDPModule) -> None:
    module.set_gradient_divide_factor(dist.get_world_size())
    # Gloo has no other. Torch divides twice where there is one rank; 2.9 does reduce there.
    if torch_version() < (2, 10) or any(group.mesh_info.shard_mesh_size > 1 for group in param_groups(module)):
        module.set_force_sum_reduction_for_comms(True)


def shard(model: Net, layout: str) -> Net:
    mesh, everyone = make_mesh(*LAYOUTS[layout])
    if layout in ("embedding", "head"):
        fully_shard(model.embed if layout == "embedding" else model.head, mesh=everyone)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if layout == "crossed":
        for block in model.blocks:
            fully_shard(block, mesh=mesh["row"])
        return fully_shard(model, mesh=mesh["column"])
    rest = mesh if layout == "hybrid" else everyone
    ep, rank = mesh["ep"].size(), mesh["ep"].get_local_rank()
    for block in model.blocks:
        block.group = mesh["ep"].get_group()
        if isinstance(block.experts, Grouped):
            for name, parameter in list(block.experts.named_parameters()):
                setattr(block.experts, name, nn.Parameter(distribute_tensor(parameter, mesh["ep"], [Shard(0)])))
            if layout == "placed":
                fully_shard(block, mesh=rest, shard_placement_fn=placement_over(mesh["dp_mod_ep"]))
                divide_by_all(block)
                continue
            fully_shard(block.experts, mesh=mesh["dp_mod_ep"])
        else:
            num = NUM_EXPERTS // ep
            block.experts = block.experts[rank * num : (rank + 1) * num]
            for expert in block.experts:
                fully_shard(expert, mesh=mesh["dp_mod_ep"])
        for module in block.experts.modules():
            if isinstance(module, FSDPModule):
                divide_by_all(module)
        fully_shard(block, mesh=rest)
    return fully_shard(model, mesh=rest)


def batch(step: int, rank: int, microbatch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 100 * rank + microbatch)
    return torch.randint(0, VOCABULARY, (7,), generator=generator)


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids), ids.roll(1), reduction="sum") / 10


@torch.no_grad()
def loss_of_batch(model: nn.Module, rank: int) -> float:
    return loss_of(model, batch(0, rank, 0)).item()


def by_mesh(model: nn.Module) -> dict[Any, list[nn.Parameter]]:
    meshes: dict[Any, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return meshes


def clip(model: nn.Module, max_norm: float) -> float:
    """As scripts with experts do it: torch clips no parameters of several meshes."""
    meshes, total = by_mesh(model), torch.zeros(())
    for mesh, parameters in meshes.items():
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        square = (norm.full_tensor() if isinstance(norm, DTensor) else norm).double().square()
        if mesh is not None and mesh.mesh_dim_names == ("dp_mod_ep",):  # each rank of "ep" has other experts
            dist.all_reduce(square, group=model.blocks[0].group)
        total = total + square
    for parameters in meshes.values():
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.sqrt())
    return float(total.sqrt())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": parameters} for parameters in by_mesh(model).values()]  # torch steps each by itself
    return torch.optim.AdamW(groups, lr=1e-2, fused=True)


def train(
    model: nn.Module,
    counts: Sequence[int],
    ranks: Sequence[int],
    steps: Sequence[int],
    session: odc.Session | None = None,
    discarded: int = -1,
    optimizer: torch.optim.Optimizer | None = None,
    in_place: bool = False,
) -> list[float]:
    """Clip norms. ``counts``: microbatches of each rank; ``ranks``: whose this process runs; ``discarded``: the step of
    which nothing remains; ``in_place``: how gradients are cleared."""
    optimizer, norms = optimizer or optimizer_of(model), []
    for step in steps:
        with session.minibatch() if session is not None and 0 in counts else nullcontext():
            for rank in ranks:
                for m in range(counts[rank]):
                    loss_of(model, batch(step, rank, m)).backward()
        if step == discarded:
            assert session is not None
            session.discard()
            continue
        norms.append(clip(model, 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not in_place)
    return norms


def local_parameters(model: nn.Module) -> dict[str, Any]:
    own = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name: value.detach().clone().numpy() for name, value in own.items() if value.numel()}


def expected_part(name: str, whole: dict[str, torch.Tensor], layout: str, rank: int) -> Any:
    """What a rank has of a parameter."""
    (rows, columns), _ = LAYOUTS[layout]
    row, column = divmod(rank, columns)
    if layout in ("embedding", "head"):
        return chunk(whole[name], 4, rank) if layout.startswith(name[:4]) else chunk(whole[name], columns, column)
    if ".experts." not in name:
        return chunk(whole[name], columns, column) if layout == "hybrid" else chunk(whole[name], 4, rank)
    if layout == "dtensor":
        return chunk(chunk(whole[name], columns, column), rows, row)
    block, _, rest = name.partition(".experts.")
    number, _, rest = rest.partition(".")
    number = str(int(number) + column * NUM_EXPERTS // columns)
    return chunk(whole[f"{block}.experts.{number}.{rest}"], rows, row)


def chunk(whole: torch.Tensor, of: int, place: int) -> torch.Tensor:
    return (*whole.chunk(of), *[whole[:0]] * of)[place]


def check(found: Sequence[Any], layout: str, counts: Sequence[int], steps: Sequence[int], **options: Any) -> None:
    """What each rank has found is that of one process, in float64."""
    model = build(layout).double()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / 4)  # as FSDP divides
    norms = train(model, counts, range(4), steps, **options)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    for rank, (our_norms, ours) in enumerate(found):
        assert our_norms == pytest.approx(norms, rel=1e-5)
        assert largest_difference(ours, {name: expected_part(name, whole, layout, rank) for name in ours}) < 1e-5


def run(
    rank: int, layout: str, counts: Sequence[int], steps: Sequence[int], use_odc: bool = True, **options: Any
) -> Any:
    model = shard(build(layout), layout)
    for block in model.blocks:
        block.skips_idle = len(set(counts)) > 1
    with odc.patch_fsdp(model) if use_odc else nullcontext() as session:
        norms = train(model, counts, [rank], steps, session, **options)
        if session is not None:
            assert session.stats().minibatches == len(steps)
            assert (session.stats().pushes > 0) == (counts[rank] > 0)
    return norms, local_parameters(model)


EVEN, UNEVEN, IDLE = [2, 2, 2, 2], [2, 2, 3, 3], [0, 0, 2, 2]
"""Microbatches of each rank; ranks 0 and 1 exchange rows of experts, and so have as many."""
COUNTS = {"uneven": UNEVEN, "idle": IDLE}
SMALL, STAGED = BOTH
CHECKED = {
    ("modules", "uneven"): SMALL,
    ("modules", "idle"): STAGED,
    ("dtensor", "uneven"): STAGED,
    ("dtensor", "idle"): SMALL,
}
"""The two kinds of experts with both, each in one way."""
REST = {
    ("hybrid", "uneven"): SMALL,
    ("hybrid", "idle"): STAGED,
    ("embedding", "uneven"): STAGED,
    ("embedding", "idle"): SMALL,
    ("head", "uneven"): STAGED,
    ("head", "idle"): SMALL,
}
STEPS = 2
further = functools.partial(pytest.param, marks=pytest.mark.extended)
UNDER_PLAIN = ("hybrid",)
REST_UNDER_PLAIN = ("modules", "dtensor", "head", "alone", *(["placed"] if CAN_PLACE else []))
"""Those that are CHECKED beside one process in every run are beside plain FSDP2 with ``-m extended``."""


def all_runs(
    rank: int, world_size: int, layouts: Sequence[str], chosen: Mapping[tuple[str, str], str]
) -> tuple[dict[str, Any], dict[tuple[str, str], Any]]:
    even = {}
    for layout in layouts:
        ways = BOTH if layout == "dtensor" else BOTH[:1]
        plain = run(rank, layout, EVEN, range(STEPS), use_odc=False)
        even[layout] = plain, each_way(ways, run, rank, layout, EVEN, range(STEPS))
    return even, {
        (layout, name): each_way([way], run, rank, layout, COUNTS[name], range(STEPS))[0]
        for (layout, name), way in chosen.items()
    }


@pytest.fixture(
    scope="module", params=[(UNDER_PLAIN, CHECKED), further((REST_UNDER_PLAIN, REST))], ids=["some", "rest"]
)
def on_one_host(request: pytest.FixtureRequest) -> list[Any]:
    return run_ranks(4, all_runs, *request.param, timeout_s=400)


def test_units_on_several_meshes_train_as_under_plain_fsdp2(on_one_host: list[Any]) -> None:
    for even, _ in on_one_host:
        for (their_norms, theirs), found in even.values():
            for our_norms, ours in found:
                assert our_norms == pytest.approx(their_norms, rel=1e-6)
                assert largest_difference(ours, theirs) < 1e-6


def test_uneven_microbatches_train_as_one_process(on_one_host: list[Any]) -> None:
    for layout, name in on_one_host[0][1]:
        check([uneven[layout, name] for _, uneven in on_one_host], layout, COUNTS[name], range(STEPS))


# Beside tensor parallelism, and under FSDP1


def build_dense() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), Block())


def rows_of(step: int, group: int, microbatch: int) -> torch.Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(1000 * step + 100 * group + microbatch))


def train_dense(model: nn.Module, counts: Sequence[int], groups: Sequence[int]) -> dict[str, Any]:
    optimizer = optimizer_of(model)
    dtype = next(model.parameters()).dtype
    for step in range(STEPS):
        for group in groups:
            for m in range(counts[group]):
                (model(rows_of(step, group, m).to(dtype)).square().sum() / 10).backward()
        use_up(optimizer)
    return local_parameters(model)


def tensor_run(rank: int, counts: Sequence[int], use_odc: bool) -> dict[str, Any]:
    """A layer over all ranks, before one in two parts, each over two ranks."""
    mesh, everyone = make_mesh((2, 2), ("dp", "tp"))
    model = build_dense()
    parallelize_module(model[1], mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model[0], mesh=everyone)
    fully_shard(model[1], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    with odc.patch_fsdp(model) if use_odc else nullcontext():
        return train_dense(model, counts, [rank // 2])


def fsdp1_run(rank: int, counts: Sequence[int], use_odc: bool, pairs: Sequence[dist.ProcessGroup]) -> dict[str, Any]:
    """A layer over two ranks each, inside a model over all."""
    model = build_dense()
    options: dict[str, Any] = {"device_id": DEVICE, "use_orig_params": True}
    model[1] = FullyShardedDataParallel(model[1], process_group=pairs[rank // 2], **options)
    wrapped = FullyShardedDataParallel(model, **options)
    with odc.patch_fsdp(wrapped) if use_odc else nullcontext():
        return train_dense(wrapped, counts, [rank // 2])


def dense_runs(rank: int, world_size: int) -> list[Any]:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    return [
        (tensor_run(rank, [2, 2], False), tensor_run(rank, [2, 2], True)),
        tensor_run(rank, [2, 3], True),
        (fsdp1_run(rank, [2, 2], False, pairs), fsdp1_run(rank, [2, 2], True, pairs)),
    ]


def test_several_meshes_beside_tensor_parallelism_and_under_fsdp1() -> None:
    expected = build_dense().double()
    for parameter in expected.parameters():
        parameter.register_hook(lambda grad: grad / 2)
    whole = {name: torch.from_numpy(value) for name, value in train_dense(expected, [2, 3], range(2)).items()}
    for rank, (tensor, uneven, fsdp1) in enumerate(found_by(dense_runs, TOGETHER, 4)):
        assert largest_difference(tensor[1], tensor[0]) < 1e-6
        assert largest_difference(fsdp1[1], fsdp1[0]) < 1e-6
        for name, ours in uneven.items():
            if name.startswith("0."):
                theirs = chunk(whole[name], 4, rank)
            else:
                theirs = torch.from_numpy(part(name, whole[name].numpy(), rank))
            assert largest_difference({name: ours}, {name: theirs}) < 1e-5


# Beyond steps


def runs_on_hosts(rank: int, world_size: int, hosts: Sequence[int]) -> Any:
    os.environ["ODC_HOST_ID"] = f"host-{hosts[rank]}"
    return run(rank, "modules", UNEVEN, range(3))


@pytest.mark.parametrize(
    "hosts",
    [
        pytest.param([0, 1, 0, 1], id="experts-on-one-host"),  # whose shards go through memory, all others over links
        further([0, 0, 1, 1], id="experts-over-hosts"),
    ],
)
def test_several_meshes_on_several_hosts_train_as_one_process(hosts: Sequence[int]) -> None:
    check(run_ranks(4, runs_on_hosts, hosts, timeout_s=120), "modules", UNEVEN, range(3))


ON_DEVICES: dict[str, dict[str, Any]] = {"dtensor": {}, "head": {"accumulate": "daemon"}}
"""Options by layout."""


def runs_on_devices(rank: int, world_size: int) -> dict[str, Any]:
    found = {}
    with registered_fakes():
        for layout, options in ON_DEVICES.items():
            model = shard(build(layout), layout)
            with odc.patch_fsdp(model, transport="fake_cuda", **options) as session:
                found[layout] = train(model, UNEVEN, [rank], range(3)), local_parameters(model)
                assert session.transport == "fake_cuda"
    return found


@pytest.mark.extended
@pytest.mark.on_host
def test_several_meshes_over_memory_of_devices_train_as_one_process() -> None:
    found = run_ranks(4, runs_on_devices, timeout_s=120)
    for layout in ON_DEVICES:
        check([of_rank[layout] for of_rank in found], layout, UNEVEN, range(3))


DISCARDED = {"dtensor": False, "alone": True}
"""By layout: whether gradients are cleared in place, so that there are some when the minibatch begins."""


def discarding_runs(rank: int, world_size: int) -> Any:
    return [run(rank, layout, EVEN, range(3), discarded=1, in_place=DISCARDED[layout]) for layout in DISCARDED]


def test_of_a_discarded_minibatch_nothing_remains_on_any_mesh() -> None:
    found = found_by(discarding_runs, TOGETHER, 4)
    for number, (layout, in_place) in enumerate(DISCARDED.items()):
        check([of_rank[number] for of_rank in found], layout, EVEN, [0, 2], in_place=in_place)


def dropping_run(rank: int, world_size: int) -> bool:
    """Whether a model that nobody closes is freed, once it is dropped on all ranks."""
    model = shard(build("dtensor"), "dtensor")
    session = odc.patch_fsdp(model)
    train(model, EVEN, [rank], [0])
    runtimes = [weakref.ref(one) for one in session._runtime.meshes]
    dist.barrier()
    del model, session
    gc.collect()
    return [runtime() for runtime in runtimes] == [None, None]


def test_a_model_that_is_dropped_is_freed_on_all_meshes() -> None:
    assert found_by(dropping_run, TOGETHER, 4) == [True] * 4


def changing_run(rank: int, world_size: int) -> Any:
    """Parameters changed by hand, loaded, and experts that are trained later."""
    model = shard(build("modules"), "modules")
    for block in model.blocks:
        block.experts.requires_grad_(False)
    with odc.patch_fsdp(model) as session:
        text = session.describe()
        memory = session.memory()
        assert memory.published_shards > 0 < memory.sums
        optimizer = optimizer_of(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        multiply(model, 0.5)
        halved = loss_of_batch(model, rank)
        model.load_state_dict(before)
        norms = train(model, EVEN, [rank], [0], session, optimizer=optimizer)
        model.requires_grad_(True)
        norms += train(model, EVEN, [rank], [1], session, optimizer=optimizer)
        timeline = session.start_timeline()
        loss_of_batch(model, rank)
        gathered = {span.label for span in timeline.spans if span.kind == "gather"}
        assert any("experts" in name for name in gathered)
        assert "<root>" in gathered
        assert odc.session_of(model) is session
    return text, halved, norms, local_parameters(model)


def test_changes_loads_and_unfreezing_reach_all_meshes() -> None:
    model, halved = build("modules").double(), build("modules").double()
    multiply(halved, 0.5)
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad / 4)
    for block in model.blocks:
        block.experts.requires_grad_(False)
    optimizer = optimizer_of(model)
    norms = train(model, EVEN, range(4), [0], optimizer=optimizer)
    model.requires_grad_(True)
    norms += train(model, EVEN, range(4), [1], optimizer=optimizer)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    for rank, (text, loss, our_norms, ours) in enumerate(found_by(changing_run, TOGETHER, 4)):
        assert text == "2 units over 4 ranks and 2 units over 2 ranks, transport shm, in place"
        assert loss == pytest.approx(loss_of_batch(halved, rank), rel=1e-5)
        assert our_norms == pytest.approx(norms, rel=1e-5)
        expected = {name: expected_part(name, whole, "modules", rank) for name in ours}
        assert largest_difference(ours, expected) < 1e-5


TOGETHER = (discarding_runs, dropping_run, changing_run, dense_runs)

# Failures


def failing_run(rank: int, world_size: int, layout: str, where: str) -> None:
    model = shard(build(layout), layout)

    def fail(*args: Any) -> None:
        raise RuntimeError("out of luck")

    with odc.patch_fsdp(model):
        train(model, EVEN, [rank], [0])
        if rank == 3:
            block = model.blocks[0]
            (block.register_forward_pre_hook if where == "forward" else block.register_full_backward_hook)(fail)
        train(model, EVEN, [rank], [1])


@pytest.mark.parametrize(
    ("layout", "where"), [("dtensor", "backward"), further("dtensor", "forward"), further("crossed", "forward")]
)
def test_all_ranks_hear_of_a_failure_on_any_mesh(layout: str, where: str) -> None:
    results = start_ranks(4, failing_run, layout, where).join(60)
    assert [result.error_type for result in results] == ["AbortedError"] * 3 + ["RuntimeError"]
    assert_all_say(results[:3], "rank 3", "out of luck")


def dying_run(rank: int, world_size: int) -> None:
    model = shard(build("crossed"), "crossed")
    with odc.patch_fsdp(model):
        train(model, EVEN, [rank], [0])
        if rank == 3:
            os._exit(1)
        train(model, EVEN, [rank], [1])


def test_all_ranks_hear_of_a_death_on_any_mesh() -> None:
    """Rank 0 shares no mesh with rank 3."""
    assert_all_say(start_ranks(4, dying_run).join(60, expendable=[3])[:3], "rank 3")


def differing_run(rank: int, world_size: int, layout: str, how: str) -> None:
    model = shard(build(layout), layout)
    with odc.patch_fsdp(model) as session:
        train(model, EVEN, [rank], [0])
        if how == "kind":
            train(model, EVEN, [rank], [1], session, discarded=1 if rank == 3 else -1)
        else:
            train(model, [2, 2, 2, 1] if how == "fewer" else EVEN, [rank], [1])


@pytest.mark.parametrize(
    ("layout", "how", "words"),
    [
        ("modules", "kind", "the ranks have ended minibatch 2 in different ways"),
        ("dtensor", "fewer", "have different numbers of microbatches"),
        further("crossed", "kind", "the ranks have ended minibatch 2 in different ways"),
        further("modules", "fewer", "have different numbers of microbatches"),
        further("alone", "fewer", ""),  # "ep" is all ranks, and has no group of its own
    ],
)
def test_ranks_that_end_a_minibatch_differently_are_named(layout: str, how: str, words: str) -> None:
    assert_all_say(start_ranks(4, differing_run, layout, how, env={"ODC_TIMEOUT": "10"}).join(90), words, "rank 3")
