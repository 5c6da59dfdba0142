"""Models: checkpointing, tied weights, several models, offload, prefetching, loading, compiled blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint
from training import Block, Net, build, optimizer_of, tokens, use_up

import odc
from fsdp_scripts.run import STEPS, Outcome, Run, full, train


class Checkpointed(Net):
    """Blocks run again in backward."""

    use_reentrant = False

    def forward(self, data: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embed(data)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


def checkpointing(run: Run, use_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Checkpointed(num_blocks=2)
    model.use_reentrant = use_reentrant
    run.patch(run.shard(model))
    train(run, model)


def wrapped_checkpointing(run: Run, **options: Any) -> None:
    model = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, **options)
    run.patch(run.shard(model))
    train(run, model)


class Tied(Net):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(num_blocks=2)
        self.head = nn.Linear(13, 17, bias=False)
        self.head.weight = self.embed.weight


def tied_in_the_root(run: Run) -> None:
    torch.manual_seed(0)
    model = run.shard(Tied())
    train(run, run.patch(model))


def tied_in_a_list(run: Run) -> None:
    torch.manual_seed(0)
    model = Tied()
    fully_shard([model.embed, model.head], mesh=run.mesh)
    run.patch(run.shard(model))
    train(run, model)


def unit_of_a_list(run: Run) -> None:
    model = build(num_blocks=3)
    fully_shard([model.blocks[0], model.blocks[2]], mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    train(run, run.patch(model))


def root_without_parameters(run: Run) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(17, 13), Block(), nn.Linear(13, 17))
    for part in model:
        fully_shard(part, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    train(run, run.patch(model))


def units_without_a_root(run: Run) -> None:
    """Only the blocks are sharded; the script reduces the rest itself, as for a small head."""
    model = build()
    for block in model.blocks:
        fully_shard(block, mesh=run.mesh)
    run.patch(model)
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (model.blocks, model.embed, model.head)]
    for _ in run.steps(model):
        for parameter in (*model.embed.parameters(), *model.head.parameters()):
            dist.all_reduce(parameter.grad)
        for optimizer in optimizers:
            use_up(optimizer)


def _steps_beside_a_reference(run: Run, *, is_patched: bool = True) -> Iterator[tuple[nn.Module, Any]]:
    """The policy that is trained, behind each of its steps, and the frozen model, which ``is_patched`` too."""
    policy, reference = run.net(), run.net()
    reference.requires_grad_(False).eval()
    for model in (policy, reference)[: 1 + is_patched]:
        run.patch(model)
    optimizer = optimizer_of(policy)
    for step in range(STEPS):
        data = tokens(step, run.rank, 0)
        with torch.no_grad():
            expected = reference(data)
        (nn.functional.mse_loss(policy(data), 0.5 * expected, reduction="sum") * 0.01).backward()
        clip_grad_norm_(policy.parameters(), 0.5)
        use_up(optimizer)
        yield policy, reference


def policy_and_reference(run: Run) -> None:
    for _ in _steps_beside_a_reference(run):
        continue


def following_reference(run: Run) -> None:
    """A frozen model that follows the trained one: moved towards it in place, or given its values. It says so."""
    for step, (policy, reference) in enumerate(_steps_beside_a_reference(run)):
        reference.reshard()  # FSDP2 leaves a root gathered behind its forward
        with torch.no_grad():
            for theirs, ours in zip(reference.parameters(), policy.parameters(), strict=True):
                if step % 2:
                    theirs.lerp_(ours, 0.3)
                else:
                    theirs.data.copy_(ours.data)
        if run.patched:
            odc.session_of(reference).publish()


def reference_stays_plain(run: Run) -> None:
    """It keeps FSDP's collectives."""
    for _ in _steps_beside_a_reference(run, is_patched=False):
        continue


def two_trained_models(run: Run) -> None:
    """As a generator and a discriminator: in turns, through each other."""
    first, second = run.net(), run.net()
    run.patch(first)
    run.patch(second)
    optimizers = [optimizer_of(first), torch.optim.SGD(second.parameters(), lr=1e-2)]
    for step in range(STEPS):
        run.backward(first, step)
        run.backward(second, step + 100)
        clip_grad_norm_(first.parameters(), 0.5)
        optimizers[0].step()
        optimizers[0].zero_grad()
        if step % 2:
            clip_grad_norm_(second.parameters(), 0.5)
            optimizers[1].step()
            optimizers[1].zero_grad()
        with torch.no_grad():
            first(tokens(step, 0, 0))


def one_optimizer_for_two_models(run: Run) -> None:
    first, second = run.net(), run.net()
    run.patch(first)
    run.patch(second)
    both = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(both, lr=3e-3)
    for step in range(STEPS):
        run.backward(first, step)
        run.backward(second, step + 100)
        clip_grad_norm_(both, 0.5)
        use_up(optimizer)


def prefetching(run: Run) -> None:
    """And with a hint where torch's own communication should allocate."""
    model = run.shard(build(num_blocks=3))
    model.set_allocate_memory_from_process_group_for_comm(True)
    blocks: list[FSDPModule] = list(model.blocks)  # type: ignore[arg-type]
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
    train(run, run.patch(model))


def toggled_resharding(run: Run) -> None:
    model, optimizer = run.start()
    for step in range(STEPS):
        model.set_reshard_after_forward(step % 2 == 0)
        run.backward(model, step)
        use_up(optimizer)


def gathered_by_hand(run: Run) -> None:
    """``unshard`` and ``reshard`` called by the script, asynchronously too."""
    model, optimizer = run.start()
    for step in range(STEPS):
        handle = model.unshard(async_op=True)
        model.blocks[0].unshard()
        handle.wait()
        run.backward(model, step)
        model.reshard()
        use_up(optimizer)


def offloaded(run: Run) -> None:
    model = run.patch(run.net(offload_policy=CPUOffloadPolicy(pin_memory=False)))
    train(run, model)


def with_ignored_parameters(run: Run) -> None:
    """A parameter that FSDP leaves alone: the script reduces its gradient itself."""
    model = build()
    ignored = model.head.bias
    for block in model.blocks:
        fully_shard(block, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh, ignored_params={ignored})
    run.patch(model)
    optimizer = torch.optim.SGD(
        [{"params": [ignored]}, {"params": [p for p in model.parameters() if p is not ignored]}], lr=1e-2
    )
    for _ in run.steps(model):
        dist.all_reduce(ignored.grad)
        use_up(optimizer)


def from_meta(run: Run, assign: bool) -> None:
    weights = build().state_dict()
    with torch.device("meta"):
        model = Net(num_blocks=2)
    run.shard(model)
    if not assign:
        model.to_empty(device="cpu")
    state = {
        name: nn.Parameter(value) if assign else value for name, value in sharded_like(model, weights, run.mesh).items()
    }
    model.load_state_dict(state, assign=assign)
    train(run, run.patch(model))


def sharded_like(model: nn.Module, weights: dict[str, torch.Tensor], mesh: DeviceMesh) -> dict[str, Any]:
    from torch.distributed.tensor import distribute_tensor

    return {
        name: distribute_tensor(weights[name], mesh, p.placements, src_data_rank=None)  # type: ignore[attr-defined]
        for name, p in model.named_parameters()
    }


def loaded_after_patching(run: Run, assign: bool) -> None:
    """``assign=True`` puts other parameters into the model."""
    model = run.patch(run.net())
    weights = {name: value * 1.5 for name, value in build().state_dict().items()}
    state = sharded_like(model, weights, run.mesh)
    model.load_state_dict({n: nn.Parameter(v) for n, v in state.items()} if assign else state, assign=assign)
    train(run, model)


def moved_between_steps(run: Run) -> None:
    """As evaluation code does that "makes sure", or frees a device for a while; and everywhere in the loop."""
    model, optimizer = run.start()
    for step in range(STEPS):
        model.to("cpu")
        move(model)
        run.backward(model, step)
        move(model)
        clip_grad_norm_(model.parameters(), 0.5)
        model.blocks[0].float()
        optimizer.step()
        move(model)
        optimizer.zero_grad()
        model.cpu()


def move(model: nn.Module) -> None:
    """What ``to`` does from one device to another, where there is but one."""
    model._apply(torch.clone)


def replaced_between_steps(run: Run, replace: Callable[[nn.Module], object]) -> Outcome:
    """Rank 1 has no microbatch then, and uses gradients by hand."""
    model = run.patch(run.net())
    norms = {}
    for step in range(4):
        optimizer = optimizer_of(model)
        run.backward_unless(run.rank == 1 and step == 2, model, step)
        norms[str(step)] = sum(full(p.grad).norm() for p in model.parameters())
        use_up(optimizer)
        replace(model)
    return norms


def assign(model: nn.Module) -> None:
    state = {name: nn.Parameter(value.detach() * 0.9) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        gradient, parameter.grad = parameter.grad, None
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        parameter.grad = gradient


def added_at_the_end(run: Run) -> None:
    """``add_param_group`` while training: layers thaw one after another (all were trainable when patching)."""
    model = run.patch(run.net())
    optimizer = torch.optim.SGD(model.head.parameters(), lr=1e-2)
    for step in range(STEPS):
        if step == 2:
            optimizer.add_param_group({"params": list(model.blocks.parameters())})
        run.backward(model, step)
        optimizer.step()
        model.zero_grad()


def weight_averages(run: Run) -> Outcome:
    """An average of the weights, kept by an optimizer hook of the script."""
    model, optimizer = run.start()
    average = [p.detach().to_local().clone() for p in model.parameters()]

    def update(*args: Any) -> None:
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach().to_local(), 0.1)

    optimizer.register_step_post_hook(update)
    for _ in run.steps(model):
        use_up(optimizer)
    return {f"average {i}": mean for i, mean in enumerate(average) if mean.numel()}


def compiled(run: Run, backend: str) -> None:
    model = build()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=backend)  # type: ignore[assignment]
    run.shard(model)
    train(run, run.patch(model), 2)
    torch._dynamo.reset()
