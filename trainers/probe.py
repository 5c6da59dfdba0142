"""Measures whether packing changes the loss of a trainer's model, by running the model as the trainer does.

Two tiny samples go through the model, packed as in training and each alone as the user's collator returns it. Logits
are compared as in :mod:`odc.balance.data.probe`, and also losses. (Rotary scaling by the longest sample of a row and
attention in chunks are refused by configuration, :func:`odc.trainers.models.check_rows`.)

A trainer may override ``compute_loss``. In the same way the probe measures whether the loss is a sum over tokens
divided by ``num_items_in_batch`` (including terms that exist only with ``model.training``), and whether
``compute_loss`` communicates.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from odc.balance.data import probe
from odc.balance.data.collate import IGNORED, concatenate
from odc.balance.data.probe import Identity, Probe, ProbeSamples, Sample
from odc.errors import OdcError, UnsupportedError
from odc.fsdp_patch.fsdp2_extension import num_collectives
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Microbatch
from odc.trainers.overrides import Overrides, gather_by

_NUM_ITEMS = 8.0
_OF_OTHER_THINGS = (OdcError, dist.DistError, torch.OutOfMemoryError)
"""Errors that say nothing about packing."""
_INSTEAD = "Train it without balancing, on padded batches: `odc run` alone does not change its loss"


def refusal(trainer: Any, problem: str) -> UnsupportedError:
    """The error that says why a trainer is not balanced."""
    return UnsupportedError(f"balanced minibatches cannot be had in this {type(trainer).__name__}: {problem}")


def check_packing(
    trainer: Any, model: nn.Module, identity: Identity, example: Mapping[str, torch.Tensor], *, equal_counts: bool
) -> None:
    """Refuse a model whose loss would change with packing. About ten tiny forwards; every rank must come here.

    Args:
        trainer: that trains.
        model: as the trainer calls it: wrapped, sharded, on its device.
        identity: of the same model before it was wrapped.
        example: a sample of the dataset, by itself or packed, for the columns that the collator gives.
        equal_counts: ranks will run as many microbatches each, and may meet in them.

    Raises:
        UnsupportedError: the model's name and what was measured, or why it could not be.
    """
    further = {name: column[0] for name, column in example.items() if name != "position_ids"}
    with trainer.compute_loss_context_manager():
        refuse_packing(trainer, model, identity, partial(_problem, trainer, model, identity, further, equal_counts))


def refuse_packing(trainer: Any, model: nn.Module, identity: Identity, problem_of: Callable[[], str | None]) -> None:
    """Refuse a model for what ``problem_of`` finds, or because that could not be found out. It may call ``model`` and
    ``trainer.compute_loss`` as in an evaluation: afterwards both are what they were.

    Raises:
        UnsupportedError: the model's name and what was measured, or why it could not be.
    """
    try:
        with _aside(trainer, model):
            problem = problem_of()
    except _OF_OTHER_THINGS:
        raise
    except Exception as error:
        raise refusal(
            trainer,
            f"whether {identity.name} tells packed samples apart could not be measured: its forward on two samples of "
            f"4 and 5 tokens raised {type(error).__name__}: {error}. {_INSTEAD}",
        ) from error
    if problem is not None:
        raise refusal(trainer, f"{problem}. {_INSTEAD}")


@contextmanager
def _aside(trainer: Any, model: nn.Module) -> Iterator[None]:
    """In the block ``model`` and ``trainer.compute_loss`` can be called as in an evaluation. Behind it TRL's and
    ms-swift's metrics, too, are what they were."""
    with (
        probe.aside(model, trainer.args.device),
        Overrides(trainer) as of_trainer,
        Overrides(trainer.accelerator) as of_accelerator,
    ):
        for name in {"_metrics", "_total_train_tokens", "custom_metrics"} & vars(trainer).keys():
            of_trainer.replace(name, copy.deepcopy(vars(trainer)[name]))
        if hasattr(trainer, "_metrics"):
            gather_by(lambda input_data, *_, **__: input_data, of_accelerator)
        yield


def _problem(trainer: Any, model: nn.Module, identity: Identity, further: Sample, equal_counts: bool) -> str | None:
    from transformers import Trainer

    trl: Any = sys.modules.get("trl")
    is_trls = trl is not None and isinstance(trainer, trl.SFTTrainer)
    options = {"use_cache": False} if is_trls else {}  # TRL switches it off in every call, not in the configuration

    def forward(batch: Microbatch) -> Any:
        inputs = {k: v for k, v in batch.items() if k not in ("labels", "cu_seqlens")}
        # Not the trainer's own way, which may look for labels.
        return model(**Trainer._prepare_inputs(trainer, inputs), **options)

    def alone(sample: Sample) -> Microbatch:
        """What the user's collator gives for the sample: with a mask, without positions."""
        batch = {name: column[None] for name, column in sample.items()}
        return {**batch, "attention_mask": torch.ones_like(batch["input_ids"])} if identity.takes_mask else batch

    def loss(batch: Microbatch, num_items: float) -> float:
        """As the trainer computes it."""
        inputs = trainer._prepare_inputs({k: v for k, v in batch.items() if k != "cu_seqlens"})
        count = torch.tensor(num_items, device=trainer.args.device)
        if type(trainer).compute_loss.__module__.partition(".")[0] not in ("transformers", "trl"):
            for module in (model, trainer.model):
                module.training = True  # but for the modules in it, so that no dropout draws
        return float(trainer.compute_loss(model, inputs, num_items_in_batch=count))

    samples = ProbeSamples.of(identity, further)
    found = Probe(model, identity, forward, samples, alone).measure()
    if found.problem is not None:
        return found.problem
    both = [{**one, "labels": one["labels"] % found.num_classes} for one in (samples.first, samples.second)]
    apart = [alone(one) for one in both]
    row = concatenate(both)
    try:
        problem = _loss_problem(identity.name, loss, row, apart, found.tolerance)
    except _OF_OTHER_THINGS:
        raise
    except (ValueError, RuntimeError):  # ms-swift's raises where a sample's first token has a label, so it has none
        for batch in apart:
            batch["labels"][:, 0] = IGNORED
        problem = _loss_problem(identity.name, loss, row, apart, found.tolerance)
    if problem is None and not equal_counts:
        group = DataRanks.of(trainer.accelerator).group if dist.is_initialized() else None
        others = dist.get_process_group_ranks(group) if dist.is_initialized() else []
        before = num_collectives(others)
        loss(row, _NUM_ITEMS)
        if (number := num_collectives(others) - before) > 0:
            problem = (
                f"computing the loss of one microbatch takes {number} collectives of a process group, in which ranks "
                "with other numbers of microbatches would wait for one another for ever; gather what is logged once a "
                "step (in training_step or log), or balance with equal numbers (--balance lb-micro)"
            )
    return problem


def _loss_problem(
    name: str, loss: Callable[[Microbatch, float], float], row: Microbatch, apart: list[Microbatch], tolerance: float
) -> str | None:
    packed, half = loss(row, _NUM_ITEMS), loss(row, 2 * _NUM_ITEMS)
    if not abs(2 * half - packed) <= 0.1 * tolerance * abs(packed):  # both numbers divide exactly
        return (
            f"the loss of {name} is not a sum over tokens divided by num_items_in_batch: for {_NUM_ITEMS:.0f} it is "
            f"{packed:.4g}, for twice as many {half:.4g}, where half was expected. So the loss of a step depends on "
            "how samples share microbatches"
        )
    together = sum(loss(batch, _NUM_ITEMS) for batch in apart)
    if not abs(together - packed) <= tolerance * abs(together):
        return (
            f"the losses of {name} do not add up: two samples in one row have {packed:.4g}, each alone {together:.4g} "
            "together. A packed sample's first label is left out, as nothing predicts it where labels are those of "
            "next tokens; and the loss must be a sum over tokens"
        )
    return None
