"""Pairs of things that each work by themselves: ranks without microbatches, and everything else a loop may do.

The scripts are generated from a few factors; :func:`covering` picks few of their combinations that contain every pair
of values. Under plain FSDP a rank without a microbatch runs one whose loss counts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import loss_of, optimizer_of, tokens

from fsdp_scripts.run import Case, Outcome, Run, full

STEPS = 6


@dataclass(frozen=True)
class Loop:
    """What a training loop does."""

    ends: str = "norm"  # what first asks for gradients
    clears: str = "none"  # how gradients are cleared
    steps: str = "adamw"  # who updates the parameters
    idles: str = "in turn"  # which ranks have no microbatch in some steps
    reads: bool = False  # gradients are read after the step
    reduces: bool = False  # the script sums a loss over the ranks before that
    evaluates: bool = False  # before each step, all ranks together
    keeps: bool = False  # views of gradients are kept and looked at two steps later
    reshards: bool = True  # after forward
    fsdp: str = "fsdp2"  # under which it runs; with -m extended under both

    def __call__(self, run: Run) -> Outcome:
        return _Training(self, run).train()

    @property
    def first_idle_step(self) -> int:
        """Nothing tells of a step by hand; how a script makes one is learned from minibatches with a microbatch."""
        return 3 if self.steps in ("by hand", "through data") else 1

    @property
    def is_followed(self) -> bool:
        """Not always where a rank steps by hand and clears in a way that nobody sees. Its parameters are published at
        their next use, and others may wait for them before a collective of the script; and an evaluation that comes
        next is refused, because nothing tells that the gradients have been used. Nor where it steps by hand behind an
        evaluation and no backward, and nothing asked for gradients: FSDP2 has left it whole parameters then.
        """
        by_hand = self.steps in ("by hand", "through data")
        if not by_hand or self.clears == "module":
            return not (by_hand and self.evaluates and self.ends == "step")
        return not self.reduces and not self.evaluates


FACTORS: Mapping[str, Sequence[object]] = {
    "ends": ("norm", "value", "by hand", "scaled by hand", "step"),
    "clears": ("none", "in place", "own", "own first", "in the loop", "module", "never"),
    "steps": ("adamw", "two", "some", "scaler", "by hand", "through data"),
    "idles": ("in turn", "never"),
    "reads": (False, True),
    "reduces": (False, True),
    "evaluates": (False, True),
    "keeps": (False, True),
    "reshards": (True, False),
    "fsdp": ("fsdp2", "fsdp1"),
}
JOINT = ("clears", "steps", "reduces", "evaluates", "ends")
"""Factors that decide together what can be followed."""
assert list(FACTORS) == [field.name for field in fields(Loop)]


Pair = tuple[tuple[str, object], tuple[str, object]]


def covering(factors: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Few combinations that contain every possible pair of values of two factors; the same ones in each process.

    Each begins with the first pair that is missing, and takes value by value what brings in the most missing pairs.
    """
    missing = dict.fromkeys(all_pairs(factors))
    chosen = []
    while missing:
        combination = dict(next(iter(missing)))
        for name in sorted(factors, key=lambda name: -len(factors[name])):
            if name not in combination:
                values = [v for v in factors[name] if is_possible({**combination, name: v})]
                combination[name] = max(values, key=lambda v: len(missing.keys() & pairs({**combination, name: v})))
        chosen.append({name: combination[name] for name in factors})
        for pair in pairs(chosen[-1]):
            missing.pop(pair, None)
    return chosen


def all_pairs(factors: Mapping[str, Sequence[object]]) -> list[Pair]:
    """Every pair of values of two factors that some loop has which can be followed."""
    every = (
        ((one, value), (other, other_value))
        for one, other in itertools.combinations(factors, 2)
        for value, other_value in itertools.product(factors[one], factors[other])
    )
    return [pair for pair in every if is_possible(dict(pair))]


def is_possible(fixed: Mapping[str, object]) -> bool:
    """Whether some loop with these values can be followed."""
    rest = [[(name, value) for value in FACTORS[name]] for name in JOINT if name not in fixed]
    return any(Loop(**{**fixed, **dict(more)}).is_followed for more in itertools.product(*rest))  # type: ignore[arg-type]


def pairs(combination: Mapping[str, object]) -> set[Pair]:
    """The pairs of values in it, as :func:`all_pairs` writes them."""
    order = list(FACTORS)
    return set(itertools.combinations(sorted(combination.items(), key=lambda item: order.index(item[0])), 2))


class _Training:
    """One rank's run of a loop."""

    def __init__(self, loop: Loop, run: Run) -> None:
        self.loop, self.run = loop, run
        model = run.net(reshard_after_forward=loop.reshards) if not loop.reshards else run.net()
        self.model: nn.Module = model
        run.patch(model)
        parameters = list(model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
        half = len(parameters) // 2
        self.optimizers: list[torch.optim.Optimizer] = {
            "two": lambda: [torch.optim.SGD(parameters[:half], lr=0.1), torch.optim.AdamW(parameters[half:], lr=3e-3)],
            "some": lambda: [torch.optim.SGD(parameters[:half], lr=0.1)],
            "by hand": list,
            "through data": list,
        }.get(loop.steps, lambda: [optimizer_of(model)])()
        self.kept: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        self.losses: list[torch.Tensor] = []

    def train(self) -> Outcome:
        for step in range(STEPS):
            self.step(step)
        return {"losses": torch.stack(self.losses)}

    def step(self, step: int) -> None:
        if self.loop.clears == "own first":
            self.clear_by_hand()
        total = torch.zeros(())
        if self.loop.evaluates and step:
            with torch.no_grad():
                total += loss_of(self.model, tokens(100 + step, 0, 0))
        counts = self.counts(step)
        for microbatch in range(counts if self.run.patched else max(counts, 1)):
            total += self.microbatch(step, microbatch, 0.02 if counts else 0.0)
        if self.loop.reduces:
            dist.all_reduce(total)
        self.losses.append(total)
        self.end()
        self.look_at_kept()
        self.update()
        if self.loop.reads:
            self.read()
        self.clear()

    def counts(self, step: int) -> int:
        """Microbatches of this rank: rank 1 has none in every second step, rank 0 once; at first all have one."""
        if self.loop.idles == "never":
            return 1
        idle = (step % 2 == 1 and step >= self.loop.first_idle_step) if self.run.rank % 2 else step == 4
        return 0 if idle else 1

    def microbatch(self, step: int, microbatch: int, weight: float) -> torch.Tensor:
        if self.loop.clears == "in the loop" and microbatch == 0 and weight:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
        loss = loss_of(self.model, tokens(step, self.run.rank, microbatch)) * weight
        (self.scaler.scale(loss) if self.loop.steps == "scaler" else loss).backward()
        return loss.detach()

    def end(self) -> None:
        if self.loop.steps == "scaler":
            self.scaler.unscale_(self.optimizers[0])
        if self.loop.ends == "norm":
            self.losses.append(full(clip_grad_norm_(self.model.parameters(), 0.5)).reshape(()))
        elif self.loop.ends == "value":
            clip_grad_value_(self.model.parameters(), 0.01)
        elif self.loop.ends == "scaled by hand":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.25)
        elif self.loop.ends == "by hand":
            self.read()

    def read(self) -> None:
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.losses.append(full(parameter.grad).norm().reshape(()))

    def look_at_kept(self) -> None:
        """A view of a gradient is the script's own: it changes when the script changes the gradient, and never else."""
        if not self.loop.keeps:
            return
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if self.loop.clears == "module" or (self.loop.clears == "none" and self.loop.steps != "some"):
            for views in self.kept if self.run.patched else ():
                assert all(torch.equal(view, copy) for view, copy in views), "a gradient that was kept has changed"
        local = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
        views = [g.flatten()[:4] for g in local if g.numel()]
        self.kept = [*self.kept[-1:], [(view, view.clone()) for view in views]]

    def update(self) -> None:
        if self.loop.steps == "scaler":
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
        elif self.loop.steps == "by hand":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.5 * parameter.grad)
        elif self.loop.steps == "through data":
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(0.5 * parameter.grad.data)
        else:
            for optimizer in self.optimizers:
                optimizer.step()

    def clear(self) -> None:
        clears = self.loop.clears
        if clears == "module":
            self.model.zero_grad()
        elif clears in ("none", "in place") and self.optimizers:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=clears == "none")
        elif clears in ("none", "in place", "own"):
            self.clear_by_hand()

    def clear_by_hand(self) -> None:
        """As optimizers with a ``zero_grad`` of their own do it."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()


def name_of(combination: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in combination.items())


PAIRS: dict[str, Case] = {
    name_of(combination): Case(Loop(**combination), minibatches=None)  # type: ignore[arg-type]
    for combination in covering(FACTORS)
}


def pairs_of(fsdp: str) -> dict[str, Case]:
    """The scripts that run under this FSDP."""
    return {name: case for name, case in PAIRS.items() if isinstance(case.script, Loop) and case.script.fsdp == fsdp}
