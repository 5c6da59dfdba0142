"""Layer 3: ranks as processes. Checkpoints of model and optimizer cross over between ODC and plain FSDP.

Two ranks with one microbatch each: a gradient is a sum of two numbers, so it is the same bits whoever adds them. Every
training here that is interrupted by a checkpoint must therefore be bit-equal to one of plain FSDP that is not.
"""

from __future__ import annotations

import functools
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from training import (
    build,
    clip,
    communicating,
    full_parameters,
    loss_of,
    optimizer_of,
    sharded_by,
    tokens,
    use_up,
)

import odc

KINDS = ["fsdp2", "fsdp1-orig", "fsdp1-flat"]
SAVED_AT, STEPS = 1, 3


@dataclass
class Training:
    """A model with its optimizer, on one rank."""

    model: Any
    optimizer: torch.optim.Optimizer
    rank: int
    kind: str

    def run(self, start: int, end: int, counts: Sequence[int] = (1, 1)) -> None:
        """Steps ``start`` to ``end``; rank r has ``counts[r]`` microbatches. Clipping ends a minibatch."""
        for step in range(start, end):
            for m in range(counts[self.rank]):
                self.backward(step, m)
            self.update()

    def backward(self, step: int, microbatch: int = 0) -> None:
        (loss_of(self.model, tokens(step, self.rank, microbatch)) * 0.02).backward()

    def update(self) -> None:
        clip(self.model)
        use_up(self.optimizer)

    def numbers(self) -> dict[str, torch.Tensor]:
        """Parameters and optimizer state. Collective."""
        found = full_parameters(self.model)
        for index, parameter in enumerate(self.model.parameters()):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{key} {index}"] = value.to_local() if hasattr(value, "to_local") else value
        return {name: torch.as_tensor(value).clone() for name, value in found.items()}


def begin(kind: str, rank: int, world_size: int, seed: int = 0, of_dtensors: bool = False) -> Training:
    """``of_dtensors``: FSDP1 makes sharded state dicts of DTensors, as FSDP2 does, rather than of ShardedTensors."""
    options = {"device_mesh": init_device_mesh("cpu", (world_size,))} if of_dtensors else {}
    model: Any = build(num_blocks=1)
    if seed:
        torch.manual_seed(seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    model = sharded_by(kind, model, world_size, **options)
    return Training(model, optimizer_of(model), rank, kind)


@functools.cache
def uninterrupted(kind: str, rank: int, steps: int) -> dict[str, torch.Tensor]:
    """Plain FSDP, one microbatch per rank."""
    training = begin(kind, rank, 2)
    training.run(0, steps)
    return training.numbers()


def assert_bit_equal(ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(ours) == set(expected)
    different = [name for name in ours if not torch.equal(ours[name], expected[name])]
    assert not different, different


# Formats: save(training, folder) and load(training, folder), both on all ranks

FULL = StateDictOptions(full_state_dict=True)


def save_full(training: Training, folder: str) -> None:
    # FSDP1 frees a full parameter on a CPU before it is copied to the CPU, which ends in a segmentation fault.
    options = StateDictOptions(full_state_dict=True, cpu_offload=training.kind == "fsdp2")
    state = {
        "model": get_model_state_dict(training.model, options=options),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer, options=options),
    }
    if training.rank == 0:
        Path(folder).mkdir()
        torch.save(state, f"{folder}/all.pt")
    dist.barrier()


def load_full(training: Training, folder: str) -> None:
    state = torch.load(f"{folder}/all.pt")
    set_model_state_dict(training.model, state["model"], options=FULL)
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"], options=FULL)


def load_full_optimizer_first(training: Training, folder: str) -> None:
    state = torch.load(f"{folder}/all.pt")
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"], options=FULL)
    set_model_state_dict(training.model, state["model"], options=FULL)


def load_full_broadcast(training: Training, folder: str) -> None:
    """Rank 0 alone reads the file."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = torch.load(f"{folder}/all.pt") if training.rank == 0 else {"model": {}, "optimizer": {}}
    set_model_state_dict(training.model, state["model"], options=options)
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"], options=options)


def sharded_state(training: Training) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(training.model),
        "optimizer": get_optimizer_state_dict(training.model, training.optimizer),
    }


def save_sharded(training: Training, folder: str) -> None:
    dcp.save(sharded_state(training), checkpoint_id=folder)


def load_sharded(training: Training, folder: str) -> None:
    state = sharded_state(training)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(training.model, state["model"])
    set_optimizer_state_dict(training.model, training.optimizer, state["optimizer"])


def save_async(training: Training, folder: str) -> Future[Any]:
    """Its copy is complete when it returns; the writing goes on beside the training, over a group of its own."""
    saving = dcp.async_save(sharded_state(training), checkpoint_id=folder, process_group=background_group())
    assert isinstance(saving, Future)
    return saving


@functools.cache
def background_group() -> dist.ProcessGroup | None:
    return dist.new_group(backend="gloo")


def save_by_rank(training: Training, folder: str) -> None:
    """Each rank its own shards, without a collective."""
    Path(folder).mkdir(exist_ok=True)
    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    torch.save(state, f"{folder}/{training.rank}.pt")


def load_by_rank(training: Training, folder: str) -> None:
    state = torch.load(f"{folder}/{training.rank}.pt", weights_only=False)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])


def own_full(training: Training) -> Any:
    # offload_to_cpu, the default, gives wrong numbers for models that are on the CPU already, under plain FSDP1 too.
    return FullyShardedDataParallel.state_dict_type(
        training.model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(offload_to_cpu=False),
    )


def save_own_full(training: Training, folder: str) -> None:
    with own_full(training):
        state = {
            "model": training.model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(training.model, training.optimizer),
        }
    Path(folder).mkdir(exist_ok=True)
    torch.save(state, f"{folder}/{training.rank}.pt")


def load_own_full(training: Training, folder: str) -> None:
    state = torch.load(f"{folder}/{training.rank}.pt")
    with own_full(training):
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(training.model, training.optimizer, state["optimizer"])
        )


def own_sharded(training: Training) -> Any:
    return FullyShardedDataParallel.state_dict_type(
        training.model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )


def save_own_sharded(training: Training, folder: str) -> None:
    with own_sharded(training):
        state = {
            "model": training.model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(training.model, training.optimizer),
        }
    dcp.save(state, checkpoint_id=folder)


def load_own_sharded(training: Training, folder: str) -> None:
    with own_sharded(training):
        state = {"model": training.model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        training.model.load_state_dict(state["model"])
        loaded = load_sharded_optimizer_state_dict(
            training.model.state_dict(), "optimizer", dcp.FileSystemReader(folder)
        )
        training.optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(training.model, training.optimizer, loaded["optimizer"])
        )


@dataclass(frozen=True)
class Format:
    save: Callable[[Training, str], Future[Any] | None]
    load: Callable[[Training, str], None]
    of_dtensors: bool = False


FORMATS: dict[str, Format] = {
    "full": Format(save_full, load_full),
    "full, optimizer first": Format(save_full, load_full_optimizer_first),
    "full, broadcast": Format(save_full, load_full_broadcast),
    "sharded": Format(save_sharded, load_sharded),
    "async": Format(save_async, load_sharded, of_dtensors=True),
}
FORMATS_OF = {
    "fsdp2": {**FORMATS, "by rank": Format(save_by_rank, load_by_rank)},
    "fsdp1-orig": {
        **FORMATS,
        "own full": Format(save_own_full, load_own_full),
        "own sharded": Format(save_own_sharded, load_own_sharded),
    },
}
FORMATS_OF["fsdp1-flat"] = FORMATS_OF["fsdp1-orig"]


PAIRS = [
    {True: ("plain", "after"), False: ("before",)},
    {True: ("plain", "before"), False: ("after",)},
]
"""How a checkpoint is loaded that was saved under ODC, or was not: without ODC, or before or after the model is
patched. One for every other format."""
PRODUCTS = {True: ("plain", "before", "after"), False: ("before", "after")}


def crossing(rank: int, world_size: int, kind: str, name: str, products: bool, folder: str) -> None:
    """Saved under either, loaded under either: the training that goes on is the one that was never interrupted.

    The training that was saved goes on too, and is not disturbed by it.
    """
    chosen, expected = FORMATS_OF[kind][name], uninterrupted(kind, rank, STEPS)
    ways = PRODUCTS if products else PAIRS[list(FORMATS_OF[kind]).index(name) % 2]
    for saved_under_odc in (True, False):
        place = f"{folder}/{saved_under_odc}"
        training = begin(kind, rank, world_size, of_dtensors=chosen.of_dtensors)
        session = odc.patch_fsdp(training.model) if saved_under_odc else None
        training.run(0, SAVED_AT)
        saving = chosen.save(training, place)
        training.run(SAVED_AT, STEPS)
        if saving is not None:
            saving.result()
        assert_bit_equal(training.numbers(), expected)
        if session:
            assert session.stats().pushes > 0
            session.close()
        for loads in ways[saved_under_odc]:
            training = begin(kind, rank, world_size, seed=7, of_dtensors=chosen.of_dtensors)
            session = odc.patch_fsdp(training.model) if loads == "after" else None
            chosen.load(training, place)
            if loads == "before":
                session = odc.patch_fsdp(training.model)
            training.run(SAVED_AT, STEPS)
            assert_bit_equal(training.numbers(), expected)
            if session:
                session.close()


def crossing_staged(rank: int, world_size: int, kind: str, folder: str) -> None:
    """The same through FSDP2's flat buffers."""
    with communicating("staged"):
        crossing(rank, world_size, kind, "sharded", False, folder)


# What else may happen around a checkpoint, with every format that is collective and one that is not


def uneven(rank: int, world_size: int, kind: str, folder: str) -> None:
    """Ranks with other numbers of microbatches come to the checkpoint at other times; deterministic sums."""
    counts = (3, 0)
    whole = begin(kind, rank, world_size)
    with odc.patch_fsdp(whole.model, deterministic=True):
        whole.run(0, STEPS, counts)
        expected = whole.numbers()
    for name in ("full", "sharded"):
        chosen, place = FORMATS_OF[kind][name], f"{folder}/{name}"
        training = begin(kind, rank, world_size)
        with odc.patch_fsdp(training.model, deterministic=True):
            training.run(0, SAVED_AT, counts)
            chosen.save(training, place)
        for before in (True, False):
            training = begin(kind, rank, world_size, seed=7)
            if before:
                chosen.load(training, place)
            with odc.patch_fsdp(training.model, deterministic=True):
                if not before:
                    chosen.load(training, place)
                training.run(SAVED_AT, STEPS, counts)
                assert_bit_equal(training.numbers(), expected)


def before_the_first_step(rank: int, world_size: int, kind: str, folder: str) -> None:
    """Torch fills an empty optimizer by a step with zero gradients and lr 0, on all ranks."""
    expected = uninterrupted(kind, rank, STEPS)
    training = begin(kind, rank, world_size)
    with odc.patch_fsdp(training.model):
        save_sharded(training, f"{folder}/0")
        assert training.optimizer.param_groups[0]["lr"] > 0
        load_sharded(training, f"{folder}/0")
        training.run(0, STEPS)
    found = training.numbers()
    # That step counts: Adam's own step numbers are those of plain FSDP after the same.
    plain = begin(kind, rank, world_size)
    save_sharded(plain, f"{folder}/1")
    load_sharded(plain, f"{folder}/1")
    plain.run(0, STEPS)
    assert_bit_equal(found, plain.numbers())
    assert set(found) == set(expected)


def going_back(rank: int, world_size: int, kind: str, folder: str) -> None:
    """An older checkpoint into a session that has trained on, with a new optimizer; evaluated at once, then trained."""
    expected = uninterrupted(kind, rank, STEPS)
    for name in ("full", "sharded"):
        training = begin(kind, rank, world_size)
        with odc.patch_fsdp(training.model):
            training.run(0, SAVED_AT)
            FORMATS_OF[kind][name].save(training, f"{folder}/{name}")
            training.run(50, 52)
            FORMATS_OF[kind][name].load(training, f"{folder}/{name}")
            training.run(SAVED_AT, SAVED_AT + 1)
            training.optimizer = optimizer_of(training.model)
            FORMATS_OF[kind][name].load(training, f"{folder}/{name}")
            with torch.no_grad():
                loss_of(training.model, tokens(0, 0, 0))
            training.run(SAVED_AT, STEPS)
            assert_bit_equal(training.numbers(), expected)


def one_rank_ahead(rank: int, world_size: int, kind: str, folder: str) -> None:
    """Rank 0 has all its gradients of the next minibatch pushed before rank 1 starts to save its shards."""
    if kind != "fsdp2":
        return  # FSDP1 has no state dict without collectives but the deprecated local one
    expected = uninterrupted(kind, rank, STEPS)
    training = begin(kind, rank, world_size)
    with odc.patch_fsdp(training.model) as session:
        training.run(0, SAVED_AT)
        flag = torch.zeros(1)
        if rank == 0:
            save_by_rank(training, folder)
            training.backward(SAVED_AT)
            dist.send(flag, 1)
        else:
            dist.recv(flag, 0)
            save_by_rank(training, folder)
            training.backward(SAVED_AT)
        training.update()
        training.run(SAVED_AT + 1, STEPS)
        assert_bit_equal(training.numbers(), expected)
        assert session.stats().minibatches == STEPS
    training = begin(kind, rank, world_size, seed=7)
    load_by_rank(training, folder)
    assert_bit_equal(training.numbers(), uninterrupted(kind, rank, SAVED_AT))


def inside_a_minibatch(rank: int, world_size: int, kind: str, folder: str) -> None:
    """Saved between the microbatches of a minibatch: the parameters of its beginning, and it is not disturbed."""
    counts, expected = (2, 2), {}
    for saves in (False, True):
        training = begin(kind, rank, world_size)
        with odc.patch_fsdp(training.model, deterministic=True):
            training.run(0, SAVED_AT)
            training.backward(SAVED_AT, 0)
            if saves:
                save_full(training, f"{folder}/full")
                save_sharded(training, f"{folder}/sharded")
            training.backward(SAVED_AT, 1)
            training.update()
            training.run(SAVED_AT + 1, STEPS, counts)
            expected = expected or training.numbers()
            assert_bit_equal(training.numbers(), expected)
    for name in ("full", "sharded"):
        training = begin(kind, rank, world_size, seed=7)
        FORMATS_OF[kind][name].load(training, f"{folder}/{name}")
        assert_bit_equal(training.numbers(), uninterrupted(kind, rank, SAVED_AT))


def assigned_within_a_minibatch(rank: int, world_size: int, kind: str, folder: str) -> None:
    """New parameters between two backwards: plain FSDP2 forgets the gradients of before, which others have added."""
    if kind != "fsdp2":
        return  # FSDP1 loads into the parameters that it has
    training = begin(kind, rank, world_size)
    with odc.patch_fsdp(training.model) as session:
        training.run(0, SAVED_AT)
        state = {name: value.detach().clone() for name, value in training.model.state_dict().items()}
        training.backward(SAVED_AT, 0)
        with pytest.raises(odc.MisuseError, match=r"load_state_dict\(assign=True\) within a minibatch"):
            training.model.load_state_dict(state, assign=True)
        session.discard()
        training.optimizer = optimizer_of(training.model)
        training.backward(SAVED_AT)
        training.update()


SCENARIOS: list[Callable[[int, int, str, str], None]] = [
    *(uneven, before_the_first_step, going_back, one_rank_ahead, inside_a_minibatch, assigned_within_a_minibatch),
    crossing_staged,
]


def scenarios(rank: int, world_size: int, kind: str, products: bool, folder: str) -> dict[str, str]:
    """Each scenario's failure, if any."""
    bodies: dict[str, Callable[[str], None]] = {
        name: functools.partial(crossing, rank, world_size, kind, name, products) for name in FORMATS_OF[kind]
    }
    if not products:
        bodies.update({body.__name__: functools.partial(body, rank, world_size, kind) for body in SCENARIOS})
    failures = {}
    for number, (name, body) in enumerate(bodies.items()):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        try:
            body(str(place))
        except Exception:
            failures[name] = traceback.format_exc()
    return failures


@functools.cache
def failures(kind: str, products: bool) -> list[dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(2, scenarios, kind, products, folder, timeout_s=300)


def check(kind: str, name: str, products: bool = False) -> None:
    for of_rank in failures(kind, products):
        assert name not in of_rank, of_rank[name]


def marked(kind: str, name: str) -> Any:
    """FSDP1's take as long again; test_fsdp1_features.py has their state dicts."""
    return pytest.param(kind, name, marks=[] if kind == "fsdp2" else [pytest.mark.extended])


@pytest.mark.parametrize(("kind", "name"), [marked(kind, name) for kind in KINDS for name in FORMATS_OF[kind]])
def test_checkpoints_cross_over_in_both_directions(kind: str, name: str) -> None:
    check(kind, name)


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in FORMATS_OF[kind]])
def test_checkpoints_cross_over_from_each_to_each(kind: str, name: str) -> None:
    check(kind, name, products=True)


@pytest.mark.parametrize(("kind", "name"), [marked(kind, body.__name__) for kind in KINDS for body in SCENARIOS])
def test_around_a_checkpoint(kind: str, name: str) -> None:
    check(kind, name)
