"""Balanced minibatches inside a transformers ``Trainer`` or a subclass such as TRL's ``SFTTrainer``.

The trainer's loop does not change. From its loader it gets bundles instead of batches, the same number per optimizer
step (:mod:`odc.trainers.batches`). The four methods that read a batch are replaced by versions for bundles, on the
trainer and not on its class, and only during ``train()``.

The loss of a step needs no correction: the trainer divides the sum over tokens by the number of tokens of the step on
all ranks, which does not depend on microbatches.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from odc.balance import CostModel
from odc.balance.data.probe import Identity
from odc.errors import UnsupportedError
from odc.fsdp_patch.automatic import AutomaticPatching, is_patching
from odc.fsdp_patch.patching import patch_fsdp
from odc.trainers.batches import Bundle, Microbatch, StepEnd, check_step, counted_batches_of, microbatches_of
from odc.trainers.checks import base_model, check_sharded, check_steps, check_trainer, configs_of
from odc.trainers.forms import form_of
from odc.trainers.heads import check_head, gather_head
from odc.trainers.late import LateSteps
from odc.trainers.loader import balanced_loader
from odc.trainers.options import BalanceOptions, Tally
from odc.trainers.overrides import Overrides, RankMetrics
from odc.trainers.prepared import DataRanks
from odc.trainers.probe import check_packing
from odc.trainers.step_batches import StepBatches
from odc.trainers.streamed import StreamedBatches, load_stream, save_stream, streamed_loader

logger = logging.getLogger("odc")

_MARK = "_odc_balance"


@contextmanager
def patched_fsdp(options: Mapping[str, Any]) -> Iterator[None]:
    """Patch each FSDP model at its first forward in the block; plain FSDP again behind it.

    An error in the block is told to the other ranks. Under ``odc run`` all of this is done already.
    """
    if is_patching():
        yield
        return
    patching = AutomaticPatching(functools.partial(patch_fsdp, **options), logger.info)
    try:
        yield
    except BaseException as error:
        patching.abort(error)
        raise
    finally:
        patching.close()


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
    check_trainer(trainer, form_of(trainer), options)
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
        with patched_fsdp(patch_options) if patch else _nothing():
            tally = Tally()
            result = train_balanced(itself, options, tally, functools.partial(train, *args, **kwargs))
            logger.info("odc: balanced by %s: %s", options.name, tally)
            return result

    trainer.train = balanced_train


def train_balanced(trainer: Any, options: BalanceOptions, tally: Tally, train: Callable[[], Any]) -> Any:
    """``train()`` with balanced minibatches; as it is inside itself."""
    if hasattr(trainer, _MARK):  # balance() inside `odc run --balance`: the script's own choice holds
        return train()
    form = form_of(trainer)
    check_trainer(trainer, form, options)
    with Overrides(trainer) as overrides:
        overrides.set(_MARK, options)
        made = _Balanced(trainer, options, tally) if form is None else StepBatches(trainer, form, options, tally)
        with closing(made) as balanced:
            balanced.enter(overrides)
            return train()


class _Balanced:
    """The methods that take the place of a trainer's own while it trains."""

    def __init__(self, trainer: Any, options: BalanceOptions, tally: Tally) -> None:
        self._trainer = trainer
        self._options = options
        self._tally = tally
        self._checked = False
        self._identity = Identity.of(base_model(trainer.model))
        self._example: Microbatch = {}
        self._end: StepEnd | None = None
        """Of the step that the trainer is in, of a stream. (Its loader is ahead of it.)"""

        self._late: LateSteps | None = None
        self._streams: list[StreamedBatches] = []
        """Of all loaders that were made: a script may look at one of its own."""
        # Bound now: afterwards the trainer's attributes are ours.
        self._get_train_dataloader = trainer.get_train_dataloader
        self._training_step = trainer.training_step
        self._num_items = trainer._get_num_items_in_batch
        self._floating_point_ops = trainer.floating_point_ops
        self._save_rng_state = trainer._save_rng_state
        self._load_optimizer_and_scheduler = trainer._load_optimizer_and_scheduler

    def enter(self, overrides: Overrides) -> None:
        """Take their places."""
        RankMetrics.enter(overrides, self._trainer)
        overrides.set("get_train_dataloader", self.get_train_dataloader)
        overrides.set("training_step", self.training_step)
        overrides.set("_get_num_items_in_batch", self.num_items)
        overrides.set("floating_point_ops", self.floating_point_ops)
        if self._options.online:
            overrides.set("_save_rng_state", self.save_rng_state)
            overrides.set("_load_optimizer_and_scheduler", self.load_optimizer_and_scheduler)

    def close(self) -> None:
        """End what reads samples. Idempotent."""
        for batches in self._streams:
            batches.stream.close()
        self._streams = []

    def get_train_dataloader(self) -> Any:
        """Of the same length, with bundles."""
        trainer = self._trainer
        given = self._get_train_dataloader()
        ranks = DataRanks.of(trainer.accelerator)
        shape: dict[str, Any] = {
            "rank": ranks.rank,
            "world_size": ranks.world_size,
            "accumulation_steps": trainer.args.gradient_accumulation_steps,
            "configs": configs_of(trainer.model),
        }
        if not self._options.online:
            loader = balanced_loader(given, self._options, length_column=trainer.args.length_column_name, **shape)
            self._example = loader.dataset.example
            if self._options.late_binding and ranks.world_size > 1:
                self._late = LateSteps(trainer.accelerator, loader.dataset)
            return loader
        shape |= {"group": ranks.group, "timeout_s": float(trainer.args.ddp_timeout)}
        loader = streamed_loader(given, self._options, num_steps=check_steps(trainer, given), **shape)
        self._streams.append(loader.batch_sampler)
        return loader

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Of all microbatches of a bundle: forwards, backwards, the sum of their losses, 0 for none."""
        if not self._checked:  # here, as only now the model is what it will be, and nothing has changed it yet
            self._check(model)
            self._checked = True
        total = torch.zeros((), device=self._trainer.args.device)
        if isinstance(inputs, Bundle) and inputs.late is not None:
            assert self._late is not None
            inputs.microbatches = []  # from here on those that this rank has run
            for microbatch in self._late.rows():
                gather_head(model)
                total = total + self._training_step(model, microbatch, *args, **kwargs)
                inputs.microbatches.append(microbatch)
            self._tally.num_taken = self._late.num_taken
        else:
            for microbatch in microbatches_of([inputs]):
                gather_head(model)
                total = total + self._training_step(model, microbatch, *args, **kwargs)
        self._tally.add_item(inputs)
        return total

    def _check(self, model: Any) -> None:
        """All ranks come here at the same point, their first bundle, also with an empty one."""
        if not self._options.equal_counts and DataRanks.of(self._trainer.accelerator).world_size > 1:
            check_sharded(model, self._options.name)
            check_head(model, self._options.name)
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
        if not isinstance(inputs, Bundle):
            return int(self._floating_point_ops(inputs))
        return sum(int(self._floating_point_ops(microbatch)) for microbatch in inputs.microbatches)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


# ``odc run --balance``: every ``Trainer`` of a script that knows nothing of it


_current: Launched | None = None


class Launched:
    """The changes that :func:`install` made to this process; :meth:`close` undoes them.

    Example:
        >>> launched = install("lb-micro")
        >>> launched.close()
    """

    def __init__(self, options: BalanceOptions) -> None:
        self.options = options
        self.used = False
        """Whether anything was balanced."""

        self.tally = Tally()

        self._trainer: Any = None
        self._train: Any = None

    def enter(self) -> None:
        """Into ``Trainer.train``, if transformers is installed."""
        global _current
        _current = self
        if importlib.util.find_spec("transformers") is None:
            return
        from transformers import Trainer

        original = Trainer.train

        @functools.wraps(original)
        def train(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
            self.used = True
            return train_balanced(
                trainer, self.options, self.tally, functools.partial(original, trainer, *args, **kwargs)
            )

        self._trainer, self._train = Trainer, original
        Trainer.train = train

    def close(self) -> None:
        """Leave the class as it was. Idempotent."""
        global _current
        if _current is self:
            _current = None
        if self._trainer is not None:
            self._trainer.train = self._train
            self._trainer = None


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
    launched = Launched(options)
    launched.enter()
    return launched


def current() -> Launched | None:
    """What ``odc run --balance`` installed in this process; None: nothing."""
    return _current
