"""Layer 3: verl's own trainer, workers and FSDP engine on two CPU ranks, with and without balanced minibatches."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from documents import example, failure
from process_ranks import run_ranks
from torch.distributed.tensor import DTensor
from verl_ranks import FOLDER, IS_INSTALLED, enter_verl, overrides, rollouts, save_model, sft_config, training_worker

from odc.balance import Policy, balance_batch
from odc.balance.policies.base import Job
from odc.errors import UnsupportedError

pytestmark = [
    pytest.mark.extended,  # verl is not among the extras
    pytest.mark.skipif(
        not IS_INSTALLED, reason="verl is not installed; ODC_TEST_VERL names a folder that has it (CONTRIBUTING.md)"
    ),
]

STRATEGIES = ("fsdp", "fsdp2")
LENGTHS = [24, 10, 10, 10, 9, 10, 23, 10, 10, 9, 10, 11, 10, 10, 9, 12]
"""Of rollouts: four of each half are a minibatch, with one that fills a microbatch."""


def enter(rank: int, world_size: int, folder: Path) -> None:
    enter_verl(rank, world_size)
    if rank == 0:
        save_model(folder / "model")
    dist.barrier()


def note_plans(balanced: Any) -> list[tuple[int, ...]]:
    """The numbers of microbatches of all ranks, a minibatch each, from now on."""
    noted: list[tuple[int, ...]] = []
    prepared = balanced._prepared

    def note(*args: Any, **kwargs: Any) -> Any:
        found = prepared(*args, **kwargs)
        noted.append(balanced.plan.num_microbatches)
        return found

    balanced._prepared = note
    return noted


def weights_of(engine: Any) -> list[torch.Tensor]:
    """As verl sends them to what generates rollouts. Collective. Of LoRA: this rank's shards."""
    if engine.model_config.lora_rank:
        return [parameter.detach().clone() for parameter in engine.module.parameters()]
    parameters, _ = engine.get_per_tensor_param()
    return [(t.full_tensor() if isinstance(t, DTensor) else t).clone() for _, t in sorted(parameters)]


def differences(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


def fine_tune(folder: Path, enter_odc: Callable[[Any], Any], *overrides: str) -> dict[str, Any]:
    """verl's trainer from its construction to the end of ``fit``; what it logged, and its weights."""
    from verl.trainer import sft_trainer

    logged: list[dict[str, float]] = []

    class Tracking:
        def __init__(self, **_: Any) -> None: ...

        def log(self, data: dict[str, float], step: int) -> None:
            logged.append(data)

    sft_trainer.Tracking = Tracking
    trainer = sft_trainer.SFTTrainer(sft_config(folder, *overrides))
    balanced = enter_odc(trainer)
    plans = [] if balanced is None else note_plans(balanced)
    trainer.fit()
    found = {name: [data[name] for data in logged if name in data] for name in ("train/loss", "train/grad_norm")}
    found["val/loss"] = [data["val/loss"] for data in logged if "val/loss" in data]
    weights = weights_of(trainer.engine)
    if balanced is not None:
        balanced.close()
        assert "forward_backward_batch" not in vars(trainer.engine)
    return {**found, "plans": plans, "weights": weights}


def supervised(rank: int, world_size: int, folder: Path, strategy: str) -> dict[str, Any]:
    import odc.trainers.verl as with_odc

    enter(rank, world_size, folder)
    options = (f"engine.strategy={strategy}", "data.val_files=none", "trainer.test_freq=2", "trainer.save_freq=1")
    plain = fine_tune(folder, lambda _: None, *options, "trainer.save_freq=-1")
    found = {"plain": plain, "balanced": fine_tune(folder, with_odc.balance, *options)}
    resume = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}/checkpoints/global_step_1")
    installed = with_odc.install("lb-mini")
    found["resumed"] = fine_tune(folder, lambda trainer: vars(trainer.engine)["_odc_balanced"], *options, *resume)
    installed.close()
    weights = {name: run.pop("weights") for name, run in found.items()}
    for name, run in found.items():
        run["difference"] = differences(weights[name], weights["plain"])
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_supervised_fine_tuning_is_verls_with_unequal_numbers_of_microbatches(tmp_path: Path, strategy: str) -> None:
    found, other = run_ranks(2, supervised, tmp_path, strategy, timeout_s=400)
    plain, balanced, resumed = found["plain"], found["balanced"], found["resumed"]
    assert any(a != b for a, b in balanced["plans"])
    assert len(plain["train/loss"]) == len(balanced["plans"]) == 4
    for name in ("train/loss", "train/grad_norm"):
        assert balanced[name] == pytest.approx(plain[name], rel=1e-5)
        assert resumed[name] == pytest.approx(plain[name][1:], rel=1e-5)
    assert balanced["val/loss"] == pytest.approx(plain["val/loss"], rel=1e-5)
    assert resumed["val/loss"] == pytest.approx(plain["val/loss"], rel=1e-5)
    for run in (found, other):
        assert max(run[name]["difference"] for name in ("balanced", "resumed")) < 1e-4


BOTH = ("engine.use_no_sync_for_gradient_accumulation=True", "engine.optimizer_offload=True")
OPTIONS = {
    "fsdp": (*BOTH, "engine.use_orig_params=True", "engine.fsdp_size=2", "model.lora_rank=4"),
    "fsdp2": (*BOTH, "engine.reshard_after_forward=False", "model.use_remove_padding=False", "model.lora_rank=4"),
}


def with_options(
    rank: int, world_size: int, folder: Path, strategy: str, options: Sequence[str]
) -> dict[str, dict[str, Any]]:
    enter(rank, world_size, folder)
    import odc.trainers.verl as with_odc

    found = {}
    for option in options:
        more = (f"engine.strategy={strategy}", option, "trainer.total_epochs=1")
        runs = []
        for entered in (lambda _: None, with_odc.balance):
            torch.manual_seed(0)  # adapters are new
            runs.append(fine_tune(folder, entered, *more))
        runs[1]["difference"] = differences(*(run.pop("weights") for run in runs))
        found[option] = {"plain": runs[0], "balanced": runs[1]}
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_options_of_verl_work(tmp_path: Path, strategy: str, world_size: int) -> None:
    """On four ranks: two replicas of two shards each."""
    options = OPTIONS[strategy] if world_size == 2 else ["engine.fsdp_size=2"]
    found = run_ranks(world_size, with_options, tmp_path, strategy, options, timeout_s=400)[0]
    for plain, balanced in (runs.values() for runs in found.values()):
        for name in ("train/loss", "train/grad_norm"):
            assert balanced[name] == pytest.approx(plain[name], rel=1e-5)
        assert len(balanced["train/loss"]) == 2
        assert balanced["difference"] < 1e-4
        assert any(len(set(counts)) > 1 for counts in balanced["plans"])


def actor_loss(**options: Any) -> Any:
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    mode = options.pop("loss_mode", "vanilla")
    config = ActorConfig(
        strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(loss_mode=mode), **options
    )
    return partial(ppo_loss, config=config)


def critic_loss() -> Any:
    from verl.workers.config import CriticConfig
    from verl.workers.utils.losses import value_loss

    return partial(value_loss, config=CriticConfig(strategy="fsdp", use_dynamic_bsz=True))


def update(worker: Any, data: Any) -> dict[str, list[float]]:
    """An update of an actor or critic, several optimizer steps; its metrics, a value each step."""
    from verl.utils import tensordict_utils as tu

    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    return {name: list(map(float, values)) for name, values in metrics.items() if not name.startswith(("perf", "mfu"))}


class AllOnOne(Policy):
    """Another rank has nothing to compute."""

    name = "all-on-one"
    equal_counts = False

    def assign(self, job: Job) -> list[list[list[int]]]:
        return [[[i] for i in range(len(job.lengths))], *([] for _ in range(job.world_size - 1))]


def updated(
    folder: Path, rank: int, kind: str, loss: Any, *overrides: str, policy: Policy | None = None, epochs: int = 2
) -> list[Any]:
    """Metrics of both ways, the difference of their weights, and numbers of microbatches."""
    import odc.trainers.verl as with_odc

    if policy is not None:  # one without a name
        with_odc.balance_batch = lambda *args, **kwargs: balance_batch(*args, **{**kwargs, "policy": policy})
    common: dict[str, Any] = {"mini_batch_size": 8, "global_batch_size": 8, "epochs": epochs, "calculate_entropy": True}
    metrics, weights, plans = [], [], []
    for is_ours in (False, True):
        torch.manual_seed(0)  # a critic's head is new
        worker = training_worker(folder, kind, loss(), *overrides)
        balanced = with_odc.balance(worker, "lb-mini") if is_ours else None
        if balanced is not None:
            plans = note_plans(balanced)
        metrics.append(update(worker, rollouts(rank, 2, LENGTHS, **common)))
        weights.append(weights_of(worker.engine))
        if balanced is not None:
            balanced.close()
    return [*metrics, differences(*weights), plans]


def actors_and_critics(rank: int, world_size: int, folder: Path, strategy: str) -> dict[str, list[Any]]:
    enter(rank, world_size, folder)
    option, actor = f"engine.strategy={strategy}", partial(actor_loss, entropy_coeff=0.01)
    return {
        "actor": updated(folder, rank, "language_model", actor, option),
        "critic": updated(folder, rank, "value_model", critic_loss, option),
        "alone": updated(folder, rank, "language_model", actor, option, policy=AllOnOne(), epochs=1),
    }


STATISTICS = ("pg_clipfrac", "ppo_kl", "clipfrac", "vpred")
"""Means over microbatches of what these have on average, in verl too, so they depend on what shares a microbatch."""


def assert_equal(metrics: dict[str, list[float]], plain: dict[str, list[float]]) -> None:
    assert set(metrics) == set(plain)
    assert {"loss", "grad_norm"} <= set(metrics)
    for name, values in plain.items():
        if not any(word in name for word in STATISTICS):
            assert metrics[name] == pytest.approx(values, rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_updates_of_actor_and_critic_are_verls_with_unequal_numbers_of_microbatches(
    tmp_path: Path, strategy: str
) -> None:
    found, _ = run_ranks(2, actors_and_critics, tmp_path, strategy, timeout_s=400)
    for plain, metrics, difference, plans in found.values():
        assert_equal(metrics, plain)
        assert all(a != b for a, b in plans)
        assert difference < 1e-4
    assert [len(found[name][3]) for name in ("actor", "critic", "alone")] == [4, 4, 2]
    assert [min(counts) for counts in found["alone"][3]] == [0, 0]


LOSSES = {"dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "cispo"}
AGGREGATIONS = {"seq-mean-token-sum", "seq-mean-token-mean", "token-sum", "seq-mean-token-sum-norm"}


def other_losses(rank: int, world_size: int, folder: Path) -> dict[str, list[Any]]:
    enter(rank, world_size, folder)
    losses = {name: partial(actor_loss, loss_mode=name) for name in LOSSES - {"gspo"}}
    losses["gspo"] = partial(actor_loss, loss_mode="gspo", loss_agg_mode="seq-mean-token-mean")
    losses |= {name: partial(actor_loss, loss_agg_mode=name) for name in AGGREGATIONS}
    return {
        name: updated(folder, rank, "language_model", losses[name], "engine.strategy=fsdp2", epochs=1)
        for name in sorted(losses)
    }


def test_other_losses_of_actors_are_verls(tmp_path: Path) -> None:
    found, _ = run_ranks(2, other_losses, tmp_path, timeout_s=400)
    assert set(found) == LOSSES | AGGREGATIONS
    for plain, metrics, difference, plans in found.values():
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7)
        assert difference < 1e-4
        assert all(a != b for a, b in plans)


def refused(rank: int, world_size: int, folder: Path) -> list[str]:
    enter(rank, world_size, folder)
    from verl.utils import tensordict_utils as tu

    import odc.trainers.verl as with_odc

    said: list[str] = []

    def attempt(run: Callable[[], object]) -> None:
        with pytest.raises(UnsupportedError) as caught:
            run()
        said.append(str(caught.value))

    worker = training_worker(folder, "language_model", actor_loss(), "engine.strategy=fsdp2")
    engine, data = worker.engine, rollouts(rank, world_size, LENGTHS)
    loss = {mode: actor_loss(loss_mode=mode) for mode in ("vanilla", "clip_cov")}
    attempt(lambda: with_odc.check_minibatch(data, loss["clip_cov"]))
    for name, value in (("return_model_output", True), ("force_group_size", 2)):
        changed = data.copy()
        tu.assign_non_tensor(changed, **{name: value})
        attempt(lambda changed=changed: with_odc.check_minibatch(changed, loss["vanilla"]))  # type: ignore[misc]
    with_odc.check_minibatch(data, loss["vanilla"])
    mask = torch.nested.as_nested_tensor([torch.tensor([0, 1]), torch.tensor([1, 1, 1])], layout=torch.jagged)
    attempt(lambda: with_odc.check_minibatch({"loss_mask": mask, "input_ids": mask}, None))
    ids = torch.nested.as_nested_tensor([torch.arange(4), torch.arange(5)], layout=torch.jagged)
    with_odc.check_minibatch({"loss_mask": mask, "input_ids": ids}, None)  # of their responses
    attempt(lambda: with_odc.balance(SimpleNamespace()))
    with with_odc.balance(engine) as balanced:
        attempt(lambda: worker.to("device", optimizer=False))
        worker.to("device", model=False, grad=False)
        tu.assign_non_tensor(data, use_dynamic_bsz=False)
        attempt(lambda: balanced._max_tokens(data))
        again = with_odc.balance(worker)  # of the same engine: the first one ends
        again.close()
    adapted = training_worker(folder, "language_model", None, "engine.strategy=fsdp2", "model.lora_rank=4")
    with with_odc.balance(adapted):
        attempt(adapted.engine.get_per_tensor_param)
    engine._is_offload_param = True
    attempt(lambda: with_odc.balance(engine))
    del engine.module
    attempt(lambda: with_odc.balance(engine))
    return said


def test_what_cannot_be_balanced_is_refused(tmp_path: Path) -> None:
    said, _ = run_ranks(2, refused, tmp_path)
    words = ["loss_mode='clip_cov'", "return_model_output", "force_group_size", "begins with 1", "no FSDP engine"]
    words += ["model=False", "use_dynamic_bsz=False", "lora_rank", "param_offload=False", "after reset"]
    for sentence, word in zip(said, words, strict=True):
        assert word in sentence


def examples(rank: int, world_size: int, folder: Path) -> list[str]:
    enter(rank, world_size, folder)
    from verl.trainer.sft_trainer import SFTTrainer

    trainer = SFTTrainer(sft_config(folder, "engine.strategy=fsdp2", "trainer.save_freq=-1"))
    fit, names = trainer.fit, {"trainer": trainer}

    def fit_quietly() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            fit()

    trainer.fit = fit_quietly
    shown = [
        example(f"odc.trainers.verl.{name}", names) for name in ("balance", "BalancedEngine", "install", "Installed")
    ]
    return [failure(test) for test in shown if test is not None]


def test_the_examples_of_the_reference_run(tmp_path: Path) -> None:
    assert run_ranks(2, examples, tmp_path) == [["", "", "", ""]] * 2


BALANCED = """
import logging, os
from odc.trainers import verl
verl.install("lb-mini")
logging.getLogger("odc").addHandler(logging.FileHandler("said-by-rank-" + os.environ["RANK"]))
logging.getLogger("odc").setLevel(logging.INFO)
"""


def test_the_command_of_verl_takes_it_by_its_configuration(tmp_path: Path) -> None:
    """`torchrun -m verl.trainer.sft_trainer` as it is, with a module that `model.external_lib` names."""
    run_ranks(1, enter, tmp_path)
    (tmp_path / "balanced.py").write_text(BALANCED)
    paths = [str(tmp_path), str(Path(__file__).parents[1] / "rigs"), FOLDER]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "VERL_USE_EXTERNAL_MODULES": "verl_cpu"}
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "verl.trainer.sft_trainer"]
    losses = []
    for more in ([], ["model.external_lib=balanced"]):
        words = [*overrides(tmp_path), "engine.strategy=fsdp2", "trainer.logger=[console]", *more]
        done = subprocess.run(
            [sys.executable, *command, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr[-4000:]
        losses.append(re.findall(r"train/loss:([0-9.]+)", done.stdout))
    for rank in range(2):
        assert "2 ranks, transport shm" in (tmp_path / f"said-by-rank-{rank}").read_text()
    assert len(losses[0]) == 4
    assert list(map(float, losses[1])) == pytest.approx(list(map(float, losses[0])), rel=1e-5)


def merged(rank: int, world_size: int) -> list[dict[str, float]]:
    """What verl says of a metric of each kind: of three microbatches of both ranks, and of two of rank 0 alone."""
    enter_verl(rank, world_size)
    from verl.utils.metric import AggregationType, Metric

    from odc.trainers.verl import BalancedEngine

    said = []
    for values in ([[1.0, 3.0], [8.0]], [[1.0, 3.0], []]):
        balanced: Any = BalancedEngine.__new__(BalancedEngine)
        balanced._group, balanced.plan = None, SimpleNamespace(num_microbatches=tuple(map(len, values)))
        mine = {kind.value: Metric(aggregation=kind) for kind in AggregationType if values[rank]}
        for metric in mine.values():
            metric.extend(values[rank])
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, balanced._merged(mine))
        said.append({kind: float(Metric.aggregate_dp([one[kind] for one in everyone])) for kind in everyone[0]})
    return said


def test_metrics_are_those_of_all_microbatches_of_all_ranks() -> None:
    """verl refuses those of ranks with different numbers. Sums it divides by the ranks, as it scales losses by them."""
    of_both, of_one = run_ranks(2, merged)[0]
    assert of_both == {"mean": 4.0, "sum": 6.0, "min": 1.0, "max": 8.0}
    assert of_one == {"mean": 2.0, "sum": 2.0, "min": 1.0, "max": 3.0}
