"""Parameters that a script changes between steps: averages, swaps, clamps, masks, perturbations, merges.

In each of them rank 1 has no microbatch in every second step, and all ranks meet in a collective of the script: there
it comes before the others have used what was changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from training import evaluated, loss_of, optimizer_of, reshard, tokens, use_up

import odc
from fsdp_scripts.run import Case, Outcome, Run, with_

STEPS = 5
Parameters = Sequence[nn.Parameter]


def train(
    run: Run,
    model: nn.Module,
    change: Callable[[int], object],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Outcome:
    """``change(step)`` behind each step."""
    optimizer, found = optimizer or optimizer_of(model), list[torch.Tensor]()
    for step in range(STEPS):
        is_idle = run.rank == 1 and step % 2 == 1
        here = torch.zeros(())
        if not is_idle or not run.patched:  # plain FSDP needs a microbatch of weight zero where there is none
            data = tokens(step, run.rank, 0)
            here = (loss or (lambda data: loss_of(model, data)))(data) * (0.0 if is_idle else 0.02)
            here.backward()
        total = here.detach().clone()
        dist.all_reduce(total)
        found.append(total)
        use_up(optimizer, model)
        with torch.no_grad():
            change(step)
    return {"losses": torch.stack(found)}


# Ways to write to parameters


def counted(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.copy_(value)


def through_data(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data.copy_(value)


def through_local(parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Nothing that torch counts."""
    parameter.to_local().data.copy_(value.to_local())  # type: ignore[attr-defined]


WAYS = {"in place": counted, "data": through_data, "data of the shard": through_local}
Write = Callable[[nn.Parameter, torch.Tensor], None]


# Scripts


def teacher(run: Run, write: Write, every: int = 1, limit: float = 1e6) -> Outcome:
    """An average of the weights, itself sharded, from which the model learns; or a reference that follows seldom. With
    a ``limit``, both models change, and an evaluation of the average comes before the next microbatch."""
    model, average = run.net(), run.net()
    average.requires_grad_(False).eval()
    run.patch(model)
    run.patch(average)

    def follow(step: int) -> None:
        if step % every == every - 1:
            for theirs, ours in zip(average.parameters(), model.parameters(), strict=True):
                write(theirs, torch.lerp(theirs, ours, 0.3))
        if limit < 1.0:
            for ours in model.parameters():
                ours.clamp_(-limit, limit)
            evaluated(average, run.rank, reshards=True)

    def loss(data: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            expected = average(data)
        reshard(average)
        return nn.functional.mse_loss(model(data), 0.5 * expected, reduction="sum")

    return train(run, model, follow, loss=loss)


@contextmanager
def swapped(parameters: Parameters, others: Sequence[torch.Tensor], write: Write) -> Iterator[None]:
    """The other weights inside, the own ones behind it."""
    own = [parameter.detach().clone() for parameter in parameters]
    for parameter, other in zip(parameters, others, strict=True):
        write(parameter, other)
    yield
    for parameter, other in zip(parameters, own, strict=True):
        write(parameter, other)


def averages_evaluated(run: Run, write: Write) -> Outcome:
    """Averaged weights, swapped in for an evaluation and out again."""
    model = run.patch(run.net())
    parameters, losses = list(model.parameters()), list[torch.Tensor]()
    average = [parameter.detach().clone() for parameter in parameters]

    def evaluate(step: int) -> None:
        for mean, parameter in zip(average, parameters, strict=True):
            mean.lerp_(parameter, 0.3)
        with swapped(parameters, average, write):
            losses.append(evaluated(model, run.rank, reshards=True))

    return {**train(run, model, evaluate), "evaluations": torch.stack(losses)}


def averages_taken(run: Run) -> Outcome:
    """Stochastic weight averaging: the mean of the last steps takes the place of the weights."""
    model = run.patch(run.net())
    parameters = list(model.parameters())
    mean = [torch.zeros_like(parameter) for parameter in parameters]

    def add(step: int) -> None:
        for total, parameter in zip(mean, parameters, strict=True):
            total.add_(parameter / STEPS)

    found = train(run, model, add)
    with torch.no_grad():
        for parameter, total in zip(parameters, mean, strict=True):
            parameter.copy_(total)
    return {**found, "evaluation": evaluated(model, run.rank, reshards=True)}


class ScheduleFree(torch.optim.SGD):
    """The weights are one point while training, and another one, between it and the average, in an evaluation."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters, lr=0.05)
        self.averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for average, parameter in zip(self.averages, self.param_groups[0]["params"], strict=True):
            average.lerp_(parameter, 0.2)

    @torch.no_grad()
    def eval(self) -> None:
        for average, parameter in zip(self.averages, self.param_groups[0]["params"], strict=True):
            parameter.lerp_(average, 0.9)

    @torch.no_grad()
    def train(self) -> None:
        for average, parameter in zip(self.averages, self.param_groups[0]["params"], strict=True):
            parameter.lerp_(average, 1 - 1 / 0.1)


class Normalizing(torch.optim.SGD):
    """With collectives inside the step, as optimizers have them that look at whole gradients."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            total = parameter.grad.to_local().square().sum()
            dist.all_reduce(total)
            parameter.add_(parameter.grad, alpha=-0.01 / (1.0 + float(total)))


def collectives_in_steps(run: Run) -> Outcome:
    """Nothing is changed behind the step, so that nothing is published twice."""
    model = run.patch(run.net())
    return train(run, model, lambda step: None, optimizer=Normalizing(model.parameters(), lr=0.1))


def schedule_free(run: Run) -> Outcome:
    model = run.patch(run.net())
    optimizer, losses = ScheduleFree(list(model.parameters())), list[torch.Tensor]()

    def evaluate(step: int) -> None:
        optimizer.eval()
        losses.append(evaluated(model, run.rank, reshards=True))
        optimizer.train()

    return {**train(run, model, evaluate, optimizer=optimizer), "evaluations": torch.stack(losses)}


def lookahead(run: Run) -> Outcome:
    """By hand, behind the step: each second time the weights go back towards the slow ones."""
    model = run.patch(run.net())
    slow = [parameter.detach().clone() for parameter in model.parameters()]

    def look_back(step: int) -> None:
        if step % 2:
            for mean, parameter in zip(slow, model.parameters(), strict=True):
                parameter.copy_(mean.lerp_(parameter, 0.5))

    return train(run, model, look_back)


def clamped(run: Run, limit: float, name: str = "") -> Outcome:
    """All parameters; or one whose elements are all on one rank, so that nothing changes on the others."""
    model = run.patch(run.net())

    def clamp(step: int) -> None:
        for own_name, parameter in model.named_parameters():
            if clean_tensor_name(own_name).startswith(name):
                parameter.clamp_(-limit, limit)

    return train(run, model, clamp)


def summoned(run: Run, name: str) -> Outcome:
    """FSDP1 writes full parameters back, of which one is changed, that a part of the ranks has."""
    model = run.patch(run.net())

    def shrink(step: int) -> None:
        with FullyShardedDataParallel.summon_full_params(model):
            for own_name, parameter in model.named_parameters():
                if clean_tensor_name(own_name) == name:
                    parameter.mul_(0.5)

    return train(run, model, shrink)


def masked(run: Run, by_foreach: bool) -> Outcome:
    """Pruned weights stay zero."""
    model = run.patch(run.net())
    parameters = list(model.parameters())
    masks = [(parameter.detach() > 0).to(parameter.dtype) for parameter in parameters]

    def mask(step: int) -> None:
        if by_foreach:  # not counted, of DTensors
            torch._foreach_mul_(parameters, masks)
            return
        for parameter, kept in zip(parameters, masks, strict=True):
            parameter.mul_(kept)

    return train(run, model, mask)


def zeroth_order(run: Run) -> Outcome:
    """MeZO: two forwards with the weights moved along one random direction and back, no backward."""
    model = run.patch(run.net())
    parameters, losses = list(model.parameters()), list[torch.Tensor]()
    own = [parameter.to_local() for parameter in parameters]  # type: ignore[attr-defined]

    def move(step: int, by: float) -> None:
        generator = torch.Generator().manual_seed(step * 2 + run.rank)
        for part in own:
            part.add_(torch.randn(part.shape, generator=generator), alpha=by)

    with torch.no_grad():
        for step in range(STEPS):
            for by in (1e-2, -2e-2):
                move(step, by)
                loss = loss_of(model, tokens(step, run.rank, 0))
                model.reshard()
                dist.all_reduce(loss)
                losses.append(loss)
            move(step, 1e-2 - 1e-4 * float(losses[-2] - losses[-1]))
    return {"losses": torch.stack(losses)}


def outer_steps(run: Run) -> Outcome:
    """DiLoCo: each second step an outer optimizer moves the weights, with a collective for each of them."""
    model = run.patch(run.net())
    parameters = list(model.parameters())
    anchors = [parameter.detach().clone() for parameter in parameters]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)

    def step_outside(step: int) -> None:
        if step % 2 == 0:
            return
        for anchor, parameter in zip(anchors, parameters, strict=True):
            delta = anchor.detach() - parameter
            norm = delta.to_local().square().sum()
            dist.all_reduce(norm)  # of all replicas, where there are several
            anchor.grad = delta * (1.0 / (1.0 + float(norm)))
        outer.step()
        for anchor, parameter in zip(anchors, parameters, strict=True):
            parameter.data.copy_(anchor)

    return train(run, model, step_outside)


def merged_adapters(run: Run) -> Outcome:
    """Frozen weights with what adapters add to them, for a rollout, and without it again."""
    model = run.net()
    frozen = [parameter for name, parameter in model.named_parameters() if name.endswith("down.weight")]
    for parameter in frozen:
        parameter.requires_grad_(False)
    run.patch(model)
    optimizer = optimizer_of(model)
    losses = list[torch.Tensor]()

    def roll_out(step: int) -> None:
        added = [0.1 * parameter.detach().sign() * (step + 1) for parameter in frozen]
        for parameter, delta in zip(frozen, added, strict=True):
            parameter.data.add_(delta)
        losses.append(evaluated(model, run.rank, reshards=True))
        for parameter, delta in zip(frozen, added, strict=True):
            parameter.data.sub_(delta)

    return {**train(run, model, roll_out, optimizer=optimizer), "evaluations": torch.stack(losses)}


def evaluated_alone(run: Run, name: str = "") -> Outcome:
    """Other weights on all ranks, or one, while rank 0 alone evaluates, which the others await. Plain FSDP needs all of
    them."""
    model = run.patch(run.net())
    named, losses = list(model.named_parameters()), list[torch.Tensor]()
    parameters = [parameter for own_name, parameter in named if clean_tensor_name(own_name).startswith(name)]

    def evaluate(step: int) -> None:
        halved = [0.5 * parameter.detach() for parameter in parameters]
        with swapped(parameters, halved, counted):
            if run.rank == 0 or not run.patched:
                loss = evaluated(model, run.rank, reshards=True)
                losses.extend([loss] if run.rank == 0 else [])
            dist.barrier()

    found = train(run, model, evaluate)
    return {**found, **({"evaluations": torch.stack(losses)} if losses else {})}


def stepped_by_hand(run: Run) -> Outcome:
    """Without an optimizer. The collective comes behind the step, and rank 1 uses the model only after that."""
    model = run.patch(run.net())
    losses = list[torch.Tensor]()
    for step in range(STEPS):
        run.backward_unless(run.rank == 1 and step % 2 == 1, model, step)
        if run.patched:
            odc.session_of(model).finish()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        if run.rank == 0 or not run.patched:
            losses.extend([evaluated(model, run.rank, reshards=True)][: 1 - run.rank])
        dist.barrier()
    return {"evaluations": torch.stack(losses)} if losses else {}


def changed_and_said(run: Run) -> Outcome:
    """``publish()`` on every rank, as before."""
    model = run.patch(run.net())

    def shrink(step: int) -> None:
        for parameter in model.parameters():
            parameter.data.mul_(0.9)
        if run.patched:
            odc.session_of(model).publish()

    return train(run, model, shrink)


def case(script: Callable[..., Outcome], *args: object, **options: object) -> Case:
    return Case(with_(script, *args, **options), minibatches=None, pushes=False)


FSDP1_CASES = {
    "sharded teacher, data": case(teacher, through_data),
    "averages swapped in, data": case(averages_evaluated, through_data),
    "averages swapped in, in place": case(averages_evaluated, counted),
    "schedule-free optimizer": case(schedule_free),
    "clamped": case(clamped, 0.2),
    "clamped on one rank": case(clamped, 0.2, "head.bias"),
    "one weight summoned": case(summoned, "blocks.0.down.weight"),
    "a bias summoned": case(summoned, "head.bias"),
    "evaluated alone, changed on one rank": case(evaluated_alone, "head.bias"),
}
"""Those that know nothing of DTensors."""
CASES = {
    **{f"sharded teacher, {name}": case(teacher, write) for name, write in WAYS.items()},
    "reference that follows seldom": case(teacher, counted, every=2),
    "teacher of a clamped model": case(teacher, counted, limit=0.2),
    **{f"averages swapped in, {name}": case(averages_evaluated, write) for name, write in WAYS.items()},
    "stochastic weight averaging": case(averages_taken),
    "schedule-free optimizer": case(schedule_free),
    "collectives in the step": Case(collectives_in_steps, minibatches=STEPS),
    "lookahead by hand": case(lookahead),
    "clamped": case(clamped, 0.2),
    "clamped on one rank": case(clamped, 0.2, "head.bias"),
    "clamped to no effect": case(clamped, 1e6),
    "pruned": case(masked, by_foreach=False),
    "pruned by foreach": case(masked, by_foreach=True),
    "zeroth order": case(zeroth_order),
    "outer steps": case(outer_steps),
    "adapters merged": case(merged_adapters),
    "evaluated alone": case(evaluated_alone),
    "stepped by hand": case(stepped_by_hand),
    "changed and said": case(changed_and_said),
}
