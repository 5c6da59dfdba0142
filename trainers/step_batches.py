"""Balanced minibatches inside TRL's trainers of rollouts and pairs: batches are balanced after they were made.

Such a trainer makes its inputs itself (it generates, scores, runs a reference model), and its loss reads them. So its
loader and inputs do not change. Before the first batch of an optimizer step, all batches of the step are made; samples
change ranks and are packed; and a bundle of microbatches replaces each batch.

The loss of a microbatch is the trainer's loss, times the fraction of the step's samples in it.
"""

from __future__ import annotations

from typing import Any

import torch

from odc.balance.data.batch import balance_batch
from odc.balance.data.probe import Identity
from odc.errors import UnsupportedError
from odc.trainers.batches import Bundle, StepEnd, cut
from odc.trainers.checks import base_model, check_rows, check_sharded, configs_of
from odc.trainers.forms import Form, Sample
from odc.trainers.heads import check_head
from odc.trainers.options import BalanceOptions, Tally, default_cost
from odc.trainers.overrides import Overrides, RankMetrics
from odc.trainers.packed_model import PackedModel, check_packed_model
from odc.trainers.prepared import DataRanks


class StepBatches:
    """The methods that take the place of a trainer's own while it trains."""

    def __init__(self, trainer: Any, form: Form, options: BalanceOptions, tally: Tally) -> None:
        self._trainer = trainer
        self._form = form
        self._options = options
        self._tally = tally
        self._identity = Identity.of(base_model(trainer.model))
        self._configs = configs_of(trainer.model)
        self._cost = options.cost or default_cost(self._configs[0])
        self._checked = False
        self._batches: list[Any] = []
        """Of this optimizer step, as the loader gave them."""

        self._bundles: list[Bundle] | None = None
        self._metrics = RankMetrics(trainer)
        self._get_batch_samples = trainer.get_batch_samples
        self._prepare_inputs = trainer._prepare_inputs
        self._compute_loss = trainer.compute_loss
        self._logps = getattr(trainer, "_get_per_token_logps_and_entropies", None)

    def enter(self, overrides: Overrides) -> None:
        """Take their places."""
        overrides.set("get_batch_samples", self.get_batch_samples)
        overrides.set("_prepare_inputs", self.prepare_inputs)
        overrides.set("compute_loss", self.compute_loss)
        overrides.set("log", self._metrics.log)
        if self._logps is not None:
            overrides.set("_get_per_token_logps_and_entropies", self.per_token_logps)
        elif getattr(self._trainer, "ref_model", None) is not None:
            overrides.set("ref_model", PackedModel(self._trainer.ref_model))

    def close(self) -> None:
        """Drop what was made for a step that has not ended."""
        self._batches, self._bundles = [], None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Which batches an optimizer step has."""
        found = self._get_batch_samples(*args, **kwargs)
        self._batches, self._bundles = list(found[0]), None
        return found

    def prepare_inputs(self, inputs: Any) -> Any:
        """A bundle in place of a batch; all of a step are made with the first one."""
        if not self._batches or not self._trainer.model.training:
            return self._prepare_inputs(inputs)
        if self._bundles is None:
            self._bundles = self._begin_step()
        bundle = self._bundles.pop(0)
        if bundle.end is not None:
            self._batches, self._bundles = [], None
        self._tally.add_item(bundle)
        return bundle

    def per_token_logps(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own, on packed rows."""
        assert self._logps is not None
        return self._logps(PackedModel(model), *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Of all microbatches of a bundle. The backward of the last one is the trainer's."""
        trainer = self._trainer
        if not isinstance(inputs, Bundle):
            return self._compute_loss(model, inputs, *args, **kwargs)
        called = model if self._logps is not None else PackedModel(model)
        accumulated = 1 if trainer.loss_is_scaled_for_ga else trainer.current_gradient_accumulation_steps
        total = torch.zeros((), device=trainer.args.device)
        last = total.clone().requires_grad_()  # of a bundle without microbatches
        for number, one in enumerate(inputs.microbatches, 1):
            last = one["weight"] * self._metrics.measured(
                one["num_loss_tokens"], called, one["inputs"], *args, **kwargs
            )
            if number < len(inputs.microbatches):
                trainer.accelerator.backward(last / accumulated)
                total += last.detach()
        return last + total

    def _begin_step(self) -> list[Bundle]:
        trainer = self._trainer
        ranks = DataRanks.of(trainer.accelerator)
        if not self._checked:
            if not self._options.equal_counts and ranks.world_size > 1:
                check_sharded(trainer.model_wrapped, self._options.name)
                check_head(trainer.model_wrapped, self._options.name)
            check_packed_model(
                trainer,
                trainer.model_wrapped,
                self._identity,
                left=self._form.pads_left,
                scores=self._form.has_scores,
            )
            self._checked = True
        windows = self._windows()
        num_batches = len(self._batches)
        rows: list[tuple[list[Sample], int]] = []
        num_samples = 0
        for samples in windows:
            lengths = [self._form.lengths_of(sample) for sample in samples]
            batch = balance_batch(
                samples,
                lengths,
                cost=self._cost,
                max_tokens=self._options.max_tokens,
                policy=self._options.policy,
                microbatch_cost=self._options.microbatch_cost,
                group=ranks.group,
            )
            check_rows(self._configs, int(batch.plan.lengths.max()), batch.plan.max_tokens)
            num_samples += batch.num_samples
            # A rank that has none runs one of its own that counts nothing, as all ranks do where collectives go.
            dummy = samples[min(range(len(samples)), key=lambda i: sum(lengths[i]))]
            rows += [(one or [dummy], len(one)) for one in batch.microbatches or [[]]]
        if num_samples != ranks.world_size * sum(map(len, windows)):
            raise UnsupportedError(
                f"an optimizer step has {num_samples} samples, and {sum(map(len, windows))} of them were on one of "
                f"{ranks.world_size} ranks: the trainer's loss is a mean of means over batches, which needs as many in "
                "each; set dataloader_drop_last=True"
            )
        share = num_batches * ranks.world_size / num_samples
        whole = self._form.is_of_whole_step(trainer)
        microbatches = [
            {
                "inputs": self._form.batch_of(one),
                "weight": float(count > 0) if whole else count * share,
                "num_loss_tokens": sum(map(self._form.num_loss_tokens_of, one)) if count else 0,
            }
            for one, count in rows
        ]
        bundles = [Bundle(part) for part in cut(microbatches, num_batches)]
        bundles[0].planned = len(microbatches)
        bundles[-1].end = StepEnd()
        return bundles

    def _windows(self) -> list[list[Sample]]:
        """The samples of this rank in this optimizer step, apart where they come from several generations."""
        trainer = self._trainer
        step = getattr(trainer, "_step", None)  # of one that generates: batches until now, by which it does so
        windows: dict[int, list[Sample]] = {}
        for number, batch in enumerate(self._batches):
            window = 0
            if step is not None:
                trainer._step = step + number
                window = trainer._step // trainer.args.steps_per_generation
            windows.setdefault(window, []).extend(self._form.samples_of(self._prepare_inputs(batch)))
        if step is not None:
            trainer._step = step
        return list(windows.values())
