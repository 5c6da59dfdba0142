"""The training script that every rank of a trial runs, with a fault in one rank; and the process that forks the ranks.

A process that has imported torch, and has made nothing with it yet, forks the ranks of one trial after the other. A
rank goes on as a script that Python has just started: its errors end the interpreter, with all that belongs to that. (A
child of :mod:`multiprocessing` leaves by ``os._exit``, which hides what a process waits for when it ends.) Trials come
as lines of JSON on standard input; the process reports what happens as lines of JSON on standard output.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import odc
from odc.balance import LinearCost, Minibatch, MinibatchLoader, MinibatchSampler
from odc.bench.harness.ranks import die_with_parent, keep_from_collector, meet
from odc.bench.harness.warm_launch import KILL, answer, fork_ranks, reap, redirect
from odc.bench.proof.chaos.trials import (
    CLAIM,
    COLLECTIVE_LIMIT_S,
    DIFFER,
    EXIT_CODE,
    INJECTED,
    RAISED,
    SIGNALS,
    SILENCE_LIMIT_S,
    STEPS,
    Trial,
)
from odc.bench.proof.sharding import LanguageModel, by_unit, mesh_of, tokens_of, wrap_of
from odc.config import FAULT, HOST_ID, SHARE, STAGING, TIMEOUT
from odc.fsdp_patch import fsdp2_in_place

WIDTH = 9
VOCABULARY = 11
TOLERANCE = 1e-5  # of the largest value of each parameter, against one process in float64
WRONG_NUMBERS = "wrong numbers"
_SMALL_NUMEL = 20  # of a slice: matrices are larger and biases smaller, as real ones are to ODC's own limit
_BETWEEN_SAVES = 3
_BETWEEN_COLLECTIVES = 4
LATE_TOKENS = 6
_SAMPLES_PER_RANK = 4
_SLOW_S = 0.02  # of a microbatch, in each step on another rank


class Fault:
    """The fault of this rank, if it is the victim. It happens when the rank comes to the place."""

    def __init__(self, trial: Trial, rank: int, folder: Path) -> None:
        self._phase = trial.phase if rank == trial.victim and not trial.point else None
        self._action = trial.action
        self._at = trial.at
        self._fired = folder / "fired"
        self.step = 0

    def at(self, phase: str) -> None:
        """Called at every place of the script where a fault may happen."""
        if phase != self._phase or (phase != "set-up" and self.step < self._at):
            return
        self._phase = None
        self._fired.write_text(str(time.monotonic()))
        self._act()

    def _act(self) -> None:
        if self._action == DIFFER:
            return
        if self._action == "raise":
            raise ValueError(RAISED)
        if self._action == "exit":
            sys.exit(EXIT_CODE)
        if self._action == "_exit":
            os._exit(0)
        if self._action == "segfault":
            ctypes.string_at(0)
        os.kill(os.getpid(), SIGNALS[self._action])


class AllTokens(torch.autograd.Function):
    """Joins the tokens of all ranks of ``group`` along ``dim``. Each rank has a part of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole = grad.contiguous()
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], None, None


class Block(nn.Module):
    all_tokens: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Makes all tokens of a sample out of this rank's part; None: no token looks at others."""

    def __init__(self, at_middle: Callable[[], None]) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self._at_middle = at_middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._at_middle()
        hidden = torch.tanh(self.up(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._at_middle())  # type: ignore[no-untyped-call]
        if self.all_tokens is not None:
            hidden = hidden + self.all_tokens(hidden).mean(1, keepdim=True)
        out: torch.Tensor = x + self.down(hidden)
        return out


def keep_store(folder: Path) -> NoReturn:
    """Run the process whose store the ranks meet through, as a launcher does."""
    die_with_parent()
    server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "new").write_text(f"{server.port}")
    (folder / "new").rename(folder / "store")
    while True:
        signal.pause()


def _store_of(folder: Path) -> Store:
    while not (folder / "store").exists():
        time.sleep(0.01)
    return TCPStore("127.0.0.1", int((folder / "store").read_text()), is_master=False)


def train(trial: Trial, rank: int, folder: Path) -> None:
    """Train until the end, or until the fault. Returns only if the numbers are right."""
    fault = Fault(trial, rank, folder)
    torch.set_num_threads(1)
    os.environ[TIMEOUT] = str(SILENCE_LIMIT_S)
    os.environ[HOST_ID] = trial.host_of(rank)
    os.environ[STAGING] = "on" if trial.staging == "staged" else "auto"
    os.environ[SHARE] = "auto" if trial.is_shared else "off"
    fsdp2_in_place.SMALL_NUMEL = _SMALL_NUMEL
    if trial.point and rank == trial.victim:
        os.environ[FAULT] = f"point={trial.point},at={trial.at},do={INJECTED[trial.action]}"
    store = _store_of(folder) if trial.late else FileStore(str(folder / "store"), trial.world_size)
    meet(rank, trial.world_size, store, "gloo", COLLECTIVE_LIMIT_S)
    where, group = ["gather"], rank // trial.num_partners
    part, num_parts = _part_of_tokens(trial, rank)
    model = _shard(trial, _build(trial, lambda: fault.at(where[0])))
    fault.at("set-up")
    session = odc.patch_fsdp(model)
    assert trial.staging in session.describe(), session.describe()
    optimizer = _optimizer(model)
    (folder / f"training{rank}").touch()
    minibatches = _late_minibatches(trial, rank, fault) if trial.late else None
    for step in range(STEPS):
        fault.step = step
        fault.at(DIFFER)
        total = torch.zeros(1)
        late = None if minibatches is None else next(minibatches)
        microbatches: Iterable[Any] = range(trial.num_microbatches(step, rank)) if late is None else late.microbatches
        for microbatch in microbatches:
            where[0] = "gather"
            if late is None:
                loss = _loss(trial, model, step, group, microbatch, part, num_parts)
            else:
                time.sleep(_SLOW_S * (step % trial.world_size == rank))
                loss = _sum_of_losses(model, microbatch) * late.loss_scale
            where[0] = "push"
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if trial.phase == "collective" or step % _BETWEEN_COLLECTIVES == 0:  # elsewhere ODC is who waits
            fault.at("collective")
            dist.all_reduce(total)
        fault.at("finish")
        if trial.phase == "clip":
            session.finish()
            fault.at("clip")
        _clip(trial, model)
        fault.at("step")
        optimizer.step()
        optimizer.zero_grad()
        where[0] = "evaluation"
        with torch.no_grad():
            _loss(trial, model, 99, 0, 0, part, num_parts)
        if step % _BETWEEN_SAVES == 0:
            fault.at("save")
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    session.close()  # others may still be evaluating
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if found and trial.action == "pause":
        _check(found, _reference(trial))
    dist.barrier()
    dist.destroy_process_group()


def _build(trial: Trial, at_middle: Callable[[], None]) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(VOCABULARY, WIDTH, (Block(at_middle) for _ in range(3)))
    for block in model.blocks if "cp" in trial.mesh else ():
        assert isinstance(block, Block)
        block.all_tokens = lambda tokens: tokens
    return model


def _part_of_tokens(trial: Trial, rank: int) -> tuple[int, int]:
    """Which one of how many parts of each sample's tokens a rank has."""
    names = trial.mesh.split()
    return (rank >> (len(names) - 1 - names.index("cp")) & 1, 2) if "cp" in names else (0, 1)


def _shard_over_mesh(trial: Trial, model: LanguageModel) -> nn.Module:
    names = tuple(trial.mesh.split())
    mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
    over = mesh["dp", "cp"]._flatten("dp_cp") if "cp" in names else mesh[tuple(name for name in names if name != "tp")]
    group = mesh.get_group("cp") if "cp" in names else None
    for block in model.blocks:
        assert isinstance(block, Block)
        if group is not None:
            block.all_tokens = lambda tokens: AllTokens.apply(tokens, 1, group)  # type: ignore[no-untyped-call]
        if "tp" in names:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return by_unit(model, wrap_of(trial.fsdp, over))


def _shard(trial: Trial, model: LanguageModel) -> nn.Module:
    if trial.mesh:
        return _shard_over_mesh(trial, model)
    return by_unit(model, wrap_of(trial.fsdp, mesh_of(trial.world_size, is_replicated=trial.transport == "replicas")))


def _loss(
    trial: Trial, model: nn.Module, step: int, group: int, microbatch: int, part: int = 0, num_parts: int = 1
) -> torch.Tensor:
    tokens = tokens_of(step, group, microbatch, VOCABULARY, (2, 7 if trial.mesh else 6))
    inputs, labels = (some.chunk(num_parts, 1)[part] for some in (tokens[:, :-1], tokens[:, 1:]))
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())


class Samples:
    """Samples of the trials that bind late. A rank reads a sample when it has claimed it."""

    def __init__(self, on_read: Callable[[], None]) -> None:
        self._on_read = on_read

    def __getitem__(self, index: int) -> torch.Tensor:
        self._on_read()
        return torch.randint(0, VOCABULARY, (1, LATE_TOKENS), generator=torch.Generator().manual_seed(index))


def _late_minibatches(trial: Trial, rank: int, fault: Fault) -> Iterator[Minibatch[torch.Tensor]]:
    sampler = MinibatchSampler(
        [LATE_TOKENS] * (_SAMPLES_PER_RANK * trial.world_size * STEPS), minibatch_size=_SAMPLES_PER_RANK,
        world_size=trial.world_size, cost=LinearCost(), max_tokens=2 * LATE_TOKENS, shuffle=False,
    )  # fmt: skip
    samples = Samples(lambda: fault.at(CLAIM))
    return iter(MinibatchLoader(samples, sampler, torch.cat, rank, late_binding=True))


def _sum_of_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


def _clip(trial: Trial, model: nn.Module) -> None:
    if isinstance(model, FullyShardedDataParallel):
        model.clip_grad_norm_(0.1)
        return
    parts = [list(model.parameters())]
    if trial.mesh:  # torch clips no parameters of several meshes: those beside tensor parallel ones by themselves
        assert isinstance(model, LanguageModel)
        parts = [list(model.blocks.parameters()), [*model.embed.parameters(), *model.head.parameters()]]
    for parameters in parts:
        torch.nn.utils.clip_grad_norm_(parameters, 0.1)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # About the size of the gradients: with torch's 1e-8 Adam makes a whole step of mere rounding.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)


def _reference(trial: Trial) -> dict[str, torch.Tensor]:
    """The same training in one process in float64, without FSDP and without ODC."""
    model = _build(trial, lambda: None).double()
    optimizer = _optimizer(model)
    samples, num_samples = Samples(lambda: None), _SAMPLES_PER_RANK * trial.world_size
    for step in range(STEPS):
        for index in range(step * num_samples, (step + 1) * num_samples) if trial.late else ():
            loss = _sum_of_losses(model, samples[index]) / (num_samples * (LATE_TOKENS - 1))
            loss.backward()  # type: ignore[no-untyped-call]
        for group in range(0 if trial.late else trial.num_groups):
            for microbatch in range(trial.num_microbatches(step, group * trial.num_partners)):
                loss = _loss(trial, model, step, group, microbatch) / trial.num_groups
                loss.backward()  # type: ignore[no-untyped-call]
        _clip(trial, model)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _check(found: dict[str, Any], expected: dict[str, torch.Tensor]) -> None:
    if set(found) != set(expected):
        raise AssertionError(f"{WRONG_NUMBERS}: parameters {sorted(found)}, expected {sorted(expected)}")
    for name, value in expected.items():
        error = float((found[name].double() - value).abs().max() / value.abs().max())
        if not error <= TOLERANCE:
            raise AssertionError(f"{WRONG_NUMBERS}: parameter {name} is off by {error:.1e}")


# The process that forks the ranks


_PR_SET_CHILD_SUBREAPER = 36


def serve() -> tuple[Trial, int, Path] | None:
    """Run trials until standard input ends. Returns in each rank's process, with its trial, its number and its
    folder."""
    import torch._dynamo  # noqa: F401  # or fully_shard and optimizers, most of a short rank's time

    # What a rank leaves behind becomes our child, wherever it went.
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    keep_from_collector()  # or the end of each rank's interpreter copies all of it
    answer({"ready": True})
    while line := sys.stdin.readline():
        if (order := json.loads(line)) == KILL:
            continue  # it came too late, all ranks had ended
        trial, folder = Trial(**order["trial"]), Path(order["folder"])
        rank, pids = fork_ranks(trial.world_size)
        if rank is not None:
            _enter(rank, folder)
            return trial, rank, folder
        store = [os.fork()] if trial.late else []
        if store == [0]:
            keep_store(folder)
        answer({"pids": [*pids, *store]})
        reap(pids)
        for pid in store:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        answer({"left": _children()})
    return None


def _enter(rank: int, folder: Path) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where all this runs in the background
    redirect(folder / f"log{rank}")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")


def _children() -> list[str]:
    """What the ranks have left running: our only children now. They are killed."""
    left = []
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        left.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        os.kill(int(pid), signal.SIGKILL)
        os.waitpid(int(pid), 0)
    return left


if __name__ == "__main__":
    die_with_parent()
    work = serve()
    if work is not None:
        train(*work)
