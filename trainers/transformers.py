"""Balanced minibatches inside a transformers ``Trainer`` or a subclass such as TRL's ``SFTTrainer``.

The trainer's loop does not change. From its loader it gets bundles instead of batches, the same number per optimizer
step (:mod:`odc.trainers.batches`). The four methods that read a batch are replaced by versions for bundles, on the
trainer and not on its class, and only during ``train()``. (Trainers of rollouts and pairs: :mod:`odc.trainers.trl`.)

The loss of a step needs no correction: the trainer divides the sum over tokens by the number of tokens of the step on
all ranks, which does not depend on microbatches.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from odc.balance import CostModel
from odc.balance.data.probe import Identity
from odc.errors import UnsupportedError
from odc.fsdp_patch.automatic import AutomaticPatching, is_patching
from odc.fsdp_patch.patching import patch_fsdp
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Bundle, Microbatch, StepEnd, Tally, check_step, counted_batches_of, microbatches_of
from odc.trainers.late import LateSteps
from odc.trainers.models import base_model, check_uneven, configs_of, gather_head
from odc.trainers.options import BalanceOptions, Launched
from odc.trainers.overrides import Overrides, RankMetrics
from odc.trainers.planned import balanced_loader
from odc.trainers.probe import check_packing, refusal
from odc.trainers.streamed import StreamedBatches, load_stream, save_stream, streamed_loader
from odc.trainers.trl import Form, StepBatches, form_of, form_problem

logger = logging.getLogger("odc")

_MARK = "_odc_balance"


def balance(
    trainer: Any,
    policy: str | None = None,
    *,
    max_tokens: int | None = None,
    cost: CostModel | None = None,
    microbatch_cost: float = 0.0,
    online: bool = False,
    pool_size: int | None = None,
    late_binding: bool = False,
    patch: bool = True,
    **patch_options: Any,
) -> None:
    """Make ``trainer.train()`` run balanced minibatches with on-demand communication. Call it before ``train()``.

    Each optimizer step has the same samples and, up to rounding, the same loss as before. The policy chooses the rank
    and microbatch of each sample. ``per_device_train_batch_size`` only sets the number of samples per step. A
    microbatch is one packed row of at most ``max_tokens`` tokens.

    With ``online`` lengths need not be known, and the dataset may be an iterable (then ``max_steps`` must be given). A
    step has the same number of samples on average, and an epoch the same number of steps, but other samples share a
    step: each rank fills an equal quota of cost from a pool of samples that it has read. Checkpoints save the position
    of the pool, and training resumes from there.

    Args:
        trainer: a ``transformers.Trainer``, ``trl.SFTTrainer`` or subclass, whose model FSDP (1 or 2) will shard.
        policy, max_tokens, cost, microbatch_cost, online, pool_size, late_binding: see
            :class:`~odc.trainers.BalanceOptions`; by default the policy is "lb-mini".
        patch: patch FSDP while training (``odc run`` has done so already). False keeps FSDP's collectives, for policies
            that give all ranks the same number of microbatches.
        patch_options: further arguments of :func:`odc.patch_fsdp`.

    Raises:
        UnsupportedError: the trainer does something that cannot be balanced; the message names it. ``train()`` also
            raises this error at its first step if packed samples attend to each other in the model
            (:mod:`odc.trainers.probe`).
        ValueError: the policy is not known, or an argument is out of range.

    Example:
        >>> balance(trainer, "lb-mini", max_tokens=64)  # trainer: a transformers.Trainer
        >>> trainer.train().global_step
        10
    """
    options = BalanceOptions.choose(
        policy,
        online=online,
        max_tokens=max_tokens,
        cost=cost,
        microbatch_cost=microbatch_cost,
        pool_size=pool_size,
        late_binding=late_binding,
    )
    check_trainer(trainer, options)
    if not patch and not options.equal_counts:
        raise UnsupportedError(
            f"balancing by {options.name!r} gives ranks different numbers of microbatches, so patch=False, which keeps "
            "FSDP's collectives, cannot be had; use a policy with equal numbers (lb-micro)"
        )
    # A trainer that held its own method would hold its model until garbage is collected.
    is_own = trainer.train == types.MethodType(type(trainer).train, trainer)
    reference, replaced = weakref.ref(trainer), None if is_own else trainer.train

    def balanced_train(*args: Any, **kwargs: Any) -> Any:
        itself: Any = reference()
        train = functools.partial(type(itself).train, itself) if replaced is None else replaced
        with patched_fsdp(patch_options) if patch else nullcontext():
            tally = Tally()
            result = train_balanced(itself, options, tally, functools.partial(train, *args, **kwargs))
            logger.info("odc: balanced by %s: %s", options.name, tally)
            return result

    trainer.train = balanced_train


@contextmanager
def patched_fsdp(options: Mapping[str, Any]) -> Iterator[None]:
    """Patch each FSDP model at its first forward in the block; plain FSDP again behind it.

    An error in the block is told to the other ranks. Under ``odc run`` all of this is done already.
    """
    if is_patching():
        yield
        return
    with closing(AutomaticPatching(functools.partial(patch_fsdp, **options), logger.info)) as patching:
        try:
            yield
        except BaseException as error:
            patching.abort(error)
            raise


def install(
    policy: str | None = None,
    max_tokens: int | None = None,
    *,
    online: bool = False,
    pool_size: int | None = None,
    late_binding: bool = False,
) -> Launched:
    """From now on balance every ``Trainer.train()`` and every :func:`~odc.trainers.minibatches` of this process.

    Args:
        policy, max_tokens, online, pool_size, late_binding: see :class:`~odc.trainers.BalanceOptions`.

    Raises:
        ValueError: the policy is not known, or an option is out of range.

    Example:
        >>> launched = install("lb-mini", max_tokens=64)  # as odc run --balance does, before the script
        >>> trainer.train().global_step
        10
        >>> launched.close()
    """
    options = BalanceOptions.choose(
        policy, online=online, max_tokens=max_tokens, pool_size=pool_size, late_binding=late_binding
    )
    if importlib.util.find_spec("transformers") is None:
        return Launched(options, lambda: None)
    from transformers import Trainer

    def train(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
        launched.used = True
        whole = functools.partial(original, trainer, *args, **kwargs)
        return train_balanced(trainer, launched.options, launched.tally, whole)

    overrides = Overrides(Trainer)
    original = overrides.replace("train", train)
    launched = Launched(options, overrides.close)
    return launched


def train_balanced(trainer: Any, options: BalanceOptions, tally: Tally, train: Callable[[], Any]) -> Any:
    """``train()`` with balanced minibatches; as it is inside itself."""
    if hasattr(trainer, _MARK):  # balance() inside `odc run --balance`: the script's own choice holds
        return train()
    form = check_trainer(trainer, options)
    with Overrides(trainer) as overrides:
        overrides.replace(_MARK, options)
        # Their methods are the trainer's until the overrides end.
        if form is None:
            BundleSteps(trainer, options, tally, overrides)
        else:
            StepBatches(trainer, form, options, tally, overrides)
        return train()


class BundleSteps:
    """The methods that take the place of a trainer's own while it trains."""

    def __init__(self, trainer: Any, options: BalanceOptions, tally: Tally, overrides: Overrides) -> None:
        self._trainer = trainer
        self._options = options
        self._tally = tally
        self._overrides = overrides
        self._ranks = DataRanks.of(trainer.accelerator)
        self._is_checked = False
        self._identity = Identity.of(base_model(trainer.model))
        self._example: Microbatch = {}
        self._end: StepEnd | None = None
        """Of the step that the trainer is in, of a stream. (Its loader is ahead of it.)"""

        self._late: LateSteps | None = None
        self._streams: list[StreamedBatches] = []
        """Of all loaders that were made: a script may look at one of its own."""

        if hasattr(trainer, "_metrics") and hasattr(trainer, "_total_train_tokens"):  # as TRL's has
            metrics = RankMetrics(trainer, overrides, self._ranks.num_partners(trainer.accelerator))
            overrides.replace("compute_loss", metrics.compute_loss)
        self._get_train_dataloader = overrides.replace("get_train_dataloader", self.get_train_dataloader)
        self._training_step = overrides.replace("training_step", self.training_step)
        self._num_items = overrides.replace("_get_num_items_in_batch", self.num_items)
        self._floating_point_ops = overrides.replace("floating_point_ops", self.floating_point_ops)
        if options.online:
            name = "_load_optimizer_and_scheduler"
            self._save_rng_state = overrides.replace("_save_rng_state", self.save_rng_state)
            self._load_optimizer_and_scheduler = overrides.replace(name, self.load_optimizer_and_scheduler)

    def get_train_dataloader(self) -> Any:
        """Of the same length, with bundles."""
        trainer, options = self._trainer, self._options
        given = self._get_train_dataloader()
        of_step: dict[str, Any] = {
            "accumulation_steps": trainer.args.gradient_accumulation_steps,
            "configs": configs_of(trainer.model),
        }
        if options.online:
            num_steps, timeout_s = _num_steps(trainer, given), float(trainer.args.ddp_timeout)
            loader = streamed_loader(given, options, self._ranks, num_steps=num_steps, timeout_s=timeout_s, **of_step)
            self._streams.append(loader.batch_sampler)
            self._overrides.callback(loader.batch_sampler.stream.close)
            return loader
        column = trainer.args.length_column_name
        loader = balanced_loader(given, options, self._ranks, length_column=column, **of_step)
        self._example = loader.dataset.example
        if loader.dataset.planner.binds_late:
            self._late = LateSteps(trainer.accelerator, loader.dataset)
        return loader

    def training_step(self, model: Any, inputs: Bundle, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of all microbatches of a bundle: forwards, backwards, the sum of their losses, 0 for none."""
        if not self._is_checked:  # here, as only now the model is what it will be, and nothing has changed it yet
            self._check(model)
            self._is_checked = True
        rows = iter(inputs.microbatches) if inputs.late is None or self._late is None else self._late.rows()
        inputs.microbatches = []  # from here on those that this rank has run
        total = torch.zeros((), device=self._trainer.args.device)
        for row in rows:
            gather_head(model)
            total = total + self._training_step(model, row, *args, **kwargs)
            inputs.microbatches.append(row)
        self._tally.add(inputs)
        if self._late is not None:
            self._tally.num_taken = self._late.num_taken
        return total

    def _check(self, model: Any) -> None:
        """All ranks come here at the same point, their first bundle, also with an empty one."""
        if not self._options.equal_counts and self._ranks.world_size > 1:
            check_uneven(model, self._options.name)
        check_packing(self._trainer, model, self._identity, self._example, equal_counts=self._options.equal_counts)

    def num_items(self, batch_samples: list[Any], *args: Any, **kwargs: Any) -> Any:
        """Labels in all microbatches of the step, summed over ranks: as many as in the user's batches. The trainer asks
        for them when it has taken all bundles of a step."""
        bundles = [item for item in batch_samples if isinstance(item, Bundle)]  # none, where it evaluates
        if bundles:
            check_step(bundles)
            self._example = self._example or next(iter(microbatches_of(bundles)), {})
            self._end = bundles[-1].end
            if self._late is not None:
                self._late.begin(bundles[-1])
        return self._num_items(counted_batches_of(batch_samples), *args, **kwargs)

    def save_rng_state(self, output_dir: str) -> None:
        """And where the stream is: both are each rank's own."""
        self._save_rng_state(output_dir)
        if self._end is not None:
            save_stream(self._trainer, Path(output_dir), self._end)

    def load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """And the stream: this is where the trainer goes back to a checkpoint, before its first batch."""
        self._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and not self._trainer.args.ignore_data_skip:
            for batches in self._streams:
                load_stream(self._trainer, Path(checkpoint), batches)

    def floating_point_ops(self, inputs: Any) -> int:
        """Of all microbatches of a bundle."""
        return sum(int(self._floating_point_ops(microbatch)) for microbatch in microbatches_of([inputs]))


def _num_steps(trainer: Any, loader: Any) -> int | None:
    """Optimizer steps of a trainer, where only its arguments can tell them; None: its dataset has a length.

    Raises:
        UnsupportedError: nothing tells them.
    """
    if not isinstance(loader.dataset, IterableDataset):
        return None
    if trainer.args.max_steps <= 0:
        raise refusal(
            trainer,
            "how many samples an iterable dataset gives is not known: set max_steps, the number of optimizer steps",
        )
    return int(trainer.args.max_steps)


# Refusals


def check_trainer(trainer: Any, options: BalanceOptions) -> Form | None:
    """Refuse what would make a step's loss depend on how its samples share microbatches, or ranks wait for one another.

    Returns:
        See :func:`~odc.trainers.trl.form_of`.

    Raises:
        UnsupportedError: names the option and what to do.
    """
    form = form_of(trainer)
    problem = _problem(trainer, form, options)
    if problem is not None:
        raise refusal(trainer, problem)
    return form


def _problem(trainer: Any, form: Form | None, options: BalanceOptions) -> str | None:
    args = trainer.args
    if form is not None and options.late_binding:
        return (
            f"late_binding=True, but it trains on {form.trains_on}, which lie with the rank that has made them, so no "
            "other one could take them; leave late_binding out"
        )
    if form is not None and options.online:
        return (
            f"it trains on {form.trains_on}, which are balanced by a policy once they are there; use --balance lb-mini "
            "in place of --online"
        )
    if not args.average_tokens_across_devices:
        return "average_tokens_across_devices=False: the loss depends on which rank has which samples; set it to True"
    if args.train_sampling_strategy == "batch_rebalance":
        return "train_sampling_strategy='batch_rebalance' deals out samples itself; use 'random' or 'group_by_length'"
    if args.include_num_input_tokens_seen not in ("no", False):
        return "include_num_input_tokens_seen makes ranks wait for one another in every microbatch; set it to 'no'"
    if form is None and not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None:
        return (
            f"{type(trainer.model).__name__} does not accept num_items_in_batch, so its loss is a mean of microbatch "
            "means, which depends on how samples share microbatches; give compute_loss_func, or use another model"
        )
    if "position_ids" not in inspect.signature(type(base_model(trainer.model)).forward).parameters:
        return f"{type(trainer.model).__name__}.forward has no position_ids, by which packed samples are told apart"
    if getattr(trainer, "neftune_noise_alpha", None):
        return (
            f"neftune_noise_alpha={trainer.neftune_noise_alpha}: the scale of its noise depends on the length of a row,"
            " padded or packed, and so on how samples share microbatches; set it to None"
        )
    if args.use_cache:
        return "use_cache=True lets packed samples attend to one another; set it to False, the default"
    has_auxiliary = any(getattr(config, "output_router_logits", False) for config in configs_of(trainer.model))
    if has_auxiliary or getattr(trainer, "aux_loss_enabled", False):
        return (
            "the auxiliary loss of a mixture of experts is a mean over microbatches, which depends on how samples "
            "share them; set router_aux_loss_coef=0 (TRL), output_router_logits=False"
        )
    return None if form is None else form_problem(trainer, form)
