"""Balanced minibatches in a custom training loop on accelerate.

A loop over single batches cannot be balanced from outside: its objective is a mean of batch means, which depends on how
samples share batches, and it counts batches to decide when to step. A loop that takes all batches of an optimizer step
together and divides the sum of their losses by the step's tokens, as accelerate recommends for language models, needs
only one line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from odc.balance import CostModel
from odc.errors import UnsupportedError
from odc.fsdp_patch.automatic import is_patching
from odc.fsdp_patch.session import Session
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Bundle, Microbatch, StepEnd, Tally, microbatches_of
from odc.trainers.models import check_uneven, configs_of
from odc.trainers.options import BalanceOptions, launched
from odc.trainers.planned import balanced_loader
from odc.trainers.streamed import StreamedBatches, streamed_loader


class Minibatches:
    """Iterates over the optimizer steps of an epoch; each is the list of this rank's batches. See :func:`minibatches`.

    With ``online``, ``state_dict()`` returns this rank's position after the last yielded step, as JSON values. After
    ``load_state_dict`` the next iteration continues from there, in the epoch of the state. All ranks must do this, each
    with its own state.

    Example:
        >>> steps = minibatches(accelerator, model, loader, 4, policy="lb-mini", max_tokens=128)
        >>> len(steps)  # of 10 padded batches, four in a step
        3
        >>> sum(len(batches) for batches in steps) < 10  # packed
        True
    """

    def __init__(self, loader: Any, accumulation_steps: int, tally: Tally) -> None:
        self._loader = loader
        self._accumulation_steps = accumulation_steps
        self._tally = tally
        batches = getattr(loader, "batch_sampler", None)
        self._stream = batches if isinstance(batches, StreamedBatches) else None
        self._end: StepEnd | None = None

    def __len__(self) -> int:
        """Optimizer steps per epoch.

        Raises:
            TypeError: the dataset is an iterable.
        """
        return -(-len(self._loader) // self._accumulation_steps)

    def set_epoch(self, epoch: int) -> None:
        """Choose the shuffle of this epoch."""
        self._loader.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See the class.

        Raises:
            UnsupportedError: samples are balanced by a policy, or not at all.
        """
        batches = self._streamed()
        return batches.state_dict() if self._end is None else self._end.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See the class.

        Raises:
            UnsupportedError: samples are balanced by a policy, or not at all.
            ValueError: the state belongs to another stream.
        """
        batches = self._streamed()
        batches.load_state_dict(state)
        self._loader.set_epoch(batches.stream.epoch)  # or it would begin with the epoch that it has counted to
        self._end = None

    def close(self) -> None:
        """End persistent workers and the connections of a stream. Idempotent."""
        if self._stream is not None:
            self._stream.stream.close()

    def _streamed(self) -> StreamedBatches:
        if self._stream is None:
            raise UnsupportedError(
                "only online balancing has a state: skip what is done with accelerator.skip_first_batches(loader, "
                "steps * accumulation_steps), as without balancing"
            )
        return self._stream

    def __iter__(self) -> Iterator[list[Microbatch]]:
        items: list[Any] = []
        for item in self._loader:
            if not isinstance(item, Bundle):
                is_whole = len(items) + 1 == self._accumulation_steps
            elif item.is_placeholder:
                continue
            else:
                self._tally.add(item)
                self._end = item.end or self._end
                is_whole = item.end is not None
            items.append(item)
            if is_whole:
                yield microbatches_of(items)
                items = []
        if items:
            yield microbatches_of(items)


def minibatches(
    accelerator: Any,
    model: nn.Module,
    loader: Any,
    accumulation_steps: int,
    *,
    policy: str | None = None,
    max_tokens: int | None = None,
    cost: CostModel | None = None,
    microbatch_cost: float = 0.0,
    online: bool = False,
    pool_size: int | None = None,
    session: Session | None = None,
) -> Minibatches:
    """The optimizer steps of ``loader``, each as a list of this rank's batches (at least one).

    Without a policy (here or in ``odc run --balance``), a list has ``accumulation_steps`` batches of the loader. With a
    policy, it has packed microbatches (``input_ids``, ``labels``, ``position_ids`` of one row) of the same samples,
    balanced over the ranks; ranks may get different numbers. So the loop must iterate over the list, step once per
    list, and divide the *sum* of losses by the step's number of loss tokens on all ranks::

        for batches in minibatches(accelerator, model, loader, 4, policy="lb-mini"):
            num_items = accelerator.reduce(sum(count(batch) for batch in batches), "sum")
            for batch in batches:
                loss = model(**batch, num_items_in_batch=num_items).loss
                accelerator.backward(loss * accelerator.num_processes)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    with ``Accelerator(gradient_accumulation_steps=1)``, since ``backward`` divides by that. ``use_cache`` is set to
    False in the configurations of the model and its parts, as in transformers' ``Trainer``: with a cache, packed
    samples would attend to each other.

    In a trainer ODC measures whether packing changes the loss (:mod:`odc.trainers.probe`). Here the loop computes the
    loss, so you must make sure of the following. A row has ``position_ids`` that start at 0 in each sample, and no
    mask: the model must separate samples by them in attention, convolutions and recurrences. The first label of each
    sample is -100: the model must predict next tokens and shift labels itself, and the loss must be a sum over tokens
    divided by ``num_items_in_batch``. This holds for Llama, Qwen, Gemma and GPT-2. OPT, BERT, GPT-OSS, Mamba hybrids
    and token classifiers would silently train on another loss.

    Args:
        accelerator: the ``Accelerator`` that has prepared ``model`` and ``loader``.
        model: sharded by FSDP, or wrapped in DDP for policies with equal numbers of microbatches. Costs come from its
            ``config``.
        loader: a prepared ``DataLoader`` with a collator that returns ``input_ids`` and ``labels``.
        accumulation_steps: batches per rank and optimizer step.
        policy, max_tokens, cost, microbatch_cost, online, pool_size: see :class:`~odc.trainers.BalanceOptions`;
            default: those of ``odc run --balance`` or ``--online``. With ``online`` a step has other samples than the
            loader's, equally many on average, and the dataset may be an iterable.
        session: the result of ``odc.patch_fsdp(model)``; not needed under ``odc run``.

    Raises:
        UnsupportedError: the loader or the model's rotary embeddings cannot be balanced, or the policy gives ranks
            different numbers of microbatches and ODC is not active.
        ConfigError: a sample is longer than ``max_tokens``.

    Example:
        >>> for batches in minibatches(accelerator, model, loader, 4, policy="lb-mini"):
        ...     own = sum(count_loss_tokens(batch["labels"]) for batch in batches)
        ...     num_items = accelerator.reduce(torch.tensor(own), "sum")
        ...     for batch in batches:
        ...         loss = model(**batch, num_items_in_batch=num_items).loss
        ...         accelerator.backward(loss * accelerator.num_processes)
        ...     norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise UnsupportedError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} of the Accelerator: it would "
            "divide the loss by that and step by counting batches; make it 1 and give accumulation_steps here"
        )
    tally, chosen = Tally(), launched()
    if policy is not None or online:
        options = BalanceOptions.choose(
            policy,
            online=online,
            max_tokens=max_tokens,
            cost=cost,
            microbatch_cost=microbatch_cost,
            pool_size=pool_size,
        )
    elif chosen is not None:
        chosen.used = True
        options, tally = chosen.options, chosen.tally
    else:
        return Minibatches(loader, accumulation_steps, tally)
    if options.late_binding:
        raise UnsupportedError(
            "late_binding=True in a loop of one's own, which goes through the batches of a step twice: to count their "
            "tokens, and to train. With late binding they are chosen while it trains. Leave it out, or take "
            "odc.balance.MinibatchLoader(late_binding=True), whose minibatches say by what to divide"
        )
    ranks = DataRanks.of(accelerator)
    if not options.equal_counts and ranks.world_size > 1:
        check_uneven(model, options.name)
        if session is None and not is_patching():
            raise UnsupportedError(
                f"balancing by {options.name!r} gives ranks different numbers of microbatches, which FSDP's "
                "collectives cannot follow: start the script with `odc run`, or give session=odc.patch_fsdp(model)"
            )
    configs = configs_of(model)
    for config in configs:
        if getattr(config, "use_cache", False):
            config.use_cache = False  # transformers looks for packed samples only where nothing is cached
    make = streamed_loader if options.online else balanced_loader
    made = make(loader, options, ranks, accumulation_steps=accumulation_steps, configs=configs)
    return Minibatches(made, accumulation_steps, tally)
