"""On-demand communication and balanced minibatches inside verl's FSDP engine: its SFT trainer, actor and critic.

The engine's loop does not change. It prepares the microbatches of a minibatch with one function. This function is
replaced and returns the microbatches of a plan for all ranks, after samples have changed ranks. The rest stays verl's
own: the number of loss tokens of the minibatch on all ranks, by which losses are divided, the clipping, the step.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from odc.balance import CostModel, Plan, balance_batch
from odc.balance.rearrange.exchange import Meeting
from odc.errors import UnsupportedError
from odc.fsdp_patch.patching import patch_fsdp
from odc.fsdp_patch.session import Session
from odc.trainers.models import default_cost
from odc.trainers.options import BalanceOptions
from odc.trainers.overrides import Overrides

__all__ = ["BalancedEngine", "Installed", "balance", "install"]

_MARK = "_odc_balanced"
_PREPARE, _LOAD = "prepare_micro_batches", "load_fsdp_model_to_gpu"
_READS_THE_MODEL = ("save_checkpoint", "get_per_tensor_param", "get_per_tensor_param_shard")
_OF_A_MICROBATCH = ("clip_cov", "geo_mean", "kl_cov")
"""Policy losses that choose tokens among those of a microbatch, or are a mean over its samples."""


def balance(
    target: Any,
    policy: str = "lb-mini",
    *,
    max_tokens: int | None = None,
    cost: CostModel | None = None,
    microbatch_cost: float = 0.0,
    **patch_options: Any,
) -> BalancedEngine:
    """Make an engine of verl run balanced minibatches with on-demand communication. Collective.

    Each minibatch (of the SFT trainer, or of the actor's or critic's update) has the same samples and, up to rounding,
    the same loss and gradients as before. The policy chooses the rank and microbatch of each sample; ranks may get
    different numbers of microbatches, also none. Metrics that are means over microbatches still average over all ranks.
    Passes without gradient (validation, log-probabilities) stay verl's own and gather on demand.

    Args:
        target: an ``SFTTrainer``, ``TrainingWorker`` or ``ActorRolloutRefWorker`` of verl, or the engine itself, after
            its initialization (``reset()``). For engines in other processes see :func:`install`.
        policy: see :func:`odc.balance.get_policy`.
        max_tokens: maximum tokens per microbatch; default: verl's ``max_token_len_per_gpu``.
        cost, microbatch_cost: see :class:`~odc.trainers.BalanceOptions`.
        patch_options: further arguments of :func:`odc.patch_fsdp`.

    Raises:
        UnsupportedError: the engine does something that cannot be balanced; the message names it. A minibatch may raise
            this, too.
        ValueError: the policy is not known, or an argument is out of range.

    Example:
        >>> with balance(trainer, "lb-mini") as balanced:  # trainer: verl's SFTTrainer
        ...     trainer.fit()
        >>> balanced.plan.peak_tokens <= trainer.config.data.max_token_len_per_gpu
        True
    """
    options = BalanceOptions.choose(
        policy, online=False, max_tokens=max_tokens, cost=cost, microbatch_cost=microbatch_cost
    )
    engine = _engine_of(target)
    _give_back(engine)
    check_engine(engine)
    return BalancedEngine(engine, options, patch_fsdp(engine.module, **patch_options))


class BalancedEngine:
    """The changes that :func:`balance` made to an engine. :meth:`close`, or leaving the ``with`` block, undoes them.

    Example:
        >>> balanced = balance(trainer, "lb-mini")
        >>> balanced.session.transport
        'shm'
        >>> balanced.close()
    """

    def __init__(self, engine: Any, options: BalanceOptions, session: Session) -> None:
        self.session = session
        """Of the engine's model."""

        self.plan: Plan | None = None
        """Of the last minibatch that was trained."""

        self._group: dist.ProcessGroup | None = None
        self._options = options
        self._cost = options.cost or default_cost(engine.model_config.hf_config)
        self._module = module_of_loop(engine)
        self._overrides = overrides = Overrides(engine)
        overrides.replace(_MARK, self)
        self._forward_backward_batch = overrides.replace("forward_backward_batch", self.forward_backward_batch)
        self._to = overrides.replace("to", self.to)
        for name in _READS_THE_MODEL:
            overrides.replace(name, self._in_place(getattr(engine, name)))
        if engine.model_config.lora_rank > 0:
            overrides.replace("get_per_tensor_param", self.adapters)

    def close(self) -> None:
        """Give the engine back to verl and plain FSDP. Idempotent."""
        self._overrides.close()
        self.session.close()

    def __enter__(self) -> BalancedEngine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._overrides.close()
        self.session.__exit__(kind, error, trace)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Moves of the optimizer's state; parameters stay where other ranks find them."""
        if model:
            raise UnsupportedError(
                f"to({device!r}, model=True) would move parameters that other ranks read; pass model=False"
            )
        self._to(device=device, model=model, optimizer=optimizer, grad=grad)

    def adapters(self, *_: Any, **__: Any) -> Any:
        """Of LoRA, for rollouts."""
        raise UnsupportedError(
            "lora_rank: verl collects adapters for rollouts by moving the model, which other ranks read. Fine-tune "
            "adapters with verl's SFTTrainer, or take lora_rank=0"
        )

    def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> Any:
        """A minibatch: when this returns, its gradients are final on all ranks."""
        if forward_only:
            return self._forward_backward_batch(data, loss_function, forward_only=True)
        with self.session.minibatch(), Overrides(self._module) as module:
            module.replace(_PREPARE, self._prepared)
            check_minibatch(data, loss_function)
            output = self._forward_backward_batch(data, loss_function)
            output["metrics"] = self._merged(output["metrics"])
        return output

    def _in_place(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, without moving the model to its GPU first: it is there, and torch cannot move a patched one."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with Overrides(self._module) as module:
                module.replace(_LOAD, lambda model: None)
                return method(*args, **kwargs)

        return call

    def _prepared(self, data: Any, dp_group: dist.ProcessGroup | None = None, **_: Any) -> tuple[list[Any], None]:
        """In place of verl's function: the microbatches of this rank. (None: where verl keeps their order, for outputs
        that are dropped.)"""
        samples, lengths = samples_of(data)
        batch = balance_batch(
            samples,
            lengths,
            cost=self._cost,
            max_tokens=self._max_tokens(data),
            policy=self._options.policy,
            microbatch_cost=self._options.microbatch_cost,
            group=dp_group,
            comm="odc",
        )
        self.plan, self._group = batch.plan, dp_group
        return [microbatch_of(data, microbatch) for microbatch in batch.microbatches], None

    def _max_tokens(self, data: Any) -> int:
        if self._options.max_tokens is not None:
            return self._options.max_tokens
        if not _option(data, "use_dynamic_bsz", True):
            raise UnsupportedError(
                "use_dynamic_bsz=False counts the samples of a microbatch, not its tokens: give max_tokens, or "
                "max_token_len_per_gpu with use_dynamic_bsz=True"
            )
        return int(_option(data, "max_token_len_per_gpu", 0)) * int(_option(data, "sp_size", 1))

    def _merged(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Each of verl's ``Metric`` with one value per rank: it aggregates ranks only if they have as many values."""
        from verl.utils.metric import AggregationType, Metric

        assert self.plan is not None
        counts = self.plan.num_microbatches
        kinds = {name: metric.aggregation for name, metric in metrics.items() if isinstance(metric, Metric)}
        if 0 in counts:  # a rank that had nothing to compute does not know what others have measured
            told = Meeting(self._group).tell(json.dumps({name: kind.value for name, kind in kinds.items()}))
            kinds = {name: AggregationType(kind) for one in told for name, kind in json.loads(one).items()}
        reduced: dict[Any, Callable[[Sequence[float]], float]] = {
            AggregationType.SUM: sum,
            # verl takes the mean over ranks of what they have here: that of all microbatches then.
            AggregationType.MEAN: lambda values: sum(values) * len(counts) / sum(counts),
            AggregationType.MIN: lambda values: min(values, default=float("inf")),
            AggregationType.MAX: lambda values: max(values, default=float("-inf")),
        }
        merged = dict(metrics)
        for name, kind in kinds.items():
            values = metrics[name].values if name in metrics else []
            merged[name] = Metric(aggregation=kind, value=reduced[kind](values))
        return merged


def install(policy: str = "lb-mini", **options: Any) -> Installed:
    """From now on balance every FSDP engine that verl initializes for training in this process.

    Use it for engines in other processes: Ray's workers, or ``python -m verl.trainer.sft_trainer``. In each of them
    verl imports a module; let that module call this function. ``model.external_lib`` names the module, or, for Ray's
    workers, the environment's ``VERL_USE_EXTERNAL_MODULES``.

    Args:
        policy, options: as for :func:`balance`.

    Raises:
        UnsupportedError: raised later, when an engine that cannot be balanced is initialized, as by :func:`balance`.
        ValueError: the policy is not known, or an option is out of range.

    Example:
        >>> installed = install("lb-mini")  # then verl makes engines, and trains
        >>> installed.close()
    """
    return Installed(policy, options)


class Installed:
    """The changes that :func:`install` made to this process. :meth:`close` undoes them, except in existing engines.

    Example:
        >>> installed = install("lb-mini", max_tokens=24)
        >>> installed.close()
    """

    def __init__(self, policy: str, options: Mapping[str, Any]) -> None:
        from verl.workers.engine.fsdp import FSDPEngine

        names = {"max_tokens", "cost", "microbatch_cost"} & set(options)
        BalanceOptions.choose(policy, online=False, **{name: options[name] for name in names})

        def initialize(engine: Any) -> None:
            _give_back(engine)
            original(engine)
            if not engine.engine_config.forward_only:
                balance(engine, policy, **options)

        self._overrides = Overrides(FSDPEngine)
        original = self._overrides.replace("initialize", initialize)

    def close(self) -> None:
        """Leave the class as it was. Idempotent."""
        self._overrides.close()


def _give_back(engine: Any) -> None:
    """By what balanced it before."""
    given = vars(engine).get(_MARK)
    if given is not None:
        given.close()


def _engine_of(target: Any) -> Any:
    """The engine in a trainer or worker of verl."""
    from verl.workers.engine.fsdp import FSDPEngine

    found = target
    while not isinstance(found, FSDPEngine):
        parts = getattr(found, "__dict__", {})
        found = parts.get("engine", parts.get("actor"))
        if found is None:
            raise UnsupportedError(
                f"{type(target).__name__} has no FSDP engine of verl: balanced minibatches need strategy fsdp or fsdp2"
            )
    return found


def check_engine(engine: Any) -> None:
    """Refuse options that would move parameters while other ranks read them, and unknown versions of verl.

    Raises:
        UnsupportedError: names the option, or what the engine does not have.
    """
    if getattr(engine, "module", None) is None:
        raise UnsupportedError("verl's engine has no model yet: call balance after reset(), or install before it")
    if engine.is_param_offload_enabled:
        raise UnsupportedError(
            "param_offload=True moves parameters between steps, while other ranks read them: set param_offload=False "
            "(optimizer_offload may stay)"
        )
    module_of_loop(engine)


def module_of_loop(engine: Any) -> ModuleType:
    """That which has the engine's loop over microbatches.

    Raises:
        UnsupportedError: the loop does not prepare its microbatches as that of verl 0.9.
    """
    for cls in type(engine).__mro__:
        loop = inspect.unwrap(vars(cls).get("forward_backward_batch", len))
        if (
            inspect.isfunction(loop)
            and _PREPARE in loop.__code__.co_names
            and {_PREPARE, _LOAD} <= set(loop.__globals__)
        ):
            return sys.modules[loop.__module__]
    raise UnsupportedError(
        f"{type(engine).__name__}.forward_backward_batch of this version of verl does not call {_PREPARE}, by which "
        "balanced microbatches come in; tested with verl 0.9.1"
    )


def check_minibatch(data: Any, loss_function: Any) -> None:
    """Refuse what would make the loss depend on how samples share microbatches, or verl's outputs be others'.

    Raises:
        UnsupportedError: names the option.
    """
    if _option(data, "return_model_output", False):
        raise UnsupportedError("return_model_output=True: the samples of this rank have run on other ranks")
    if int(_option(data, "force_group_size", 1)) > 1:
        raise UnsupportedError("force_group_size: groups of samples that share a microbatch are not kept together")
    config = getattr(loss_function, "keywords", {}).get("config")
    mode = (getattr(config, "policy_loss", None) or {}).get("loss_mode")
    if mode in _OF_A_MICROBATCH:
        raise UnsupportedError(f"loss_mode={mode!r} depends on which samples share a microbatch, and here others do")
    mask, starts = data["loss_mask"], data["input_ids"].offsets()
    # Of whole samples: `main_ppo` sends masks of responses, whose first token has a prompt before it.
    if mask.is_nested and torch.equal(mask.offsets(), starts) and bool(mask.values()[starts[:-1]].any()):
        raise UnsupportedError(
            "a sample's loss_mask begins with 1: verl would predict its first token from the sample before it in the "
            "microbatch, which is another one here. Make the first entry 0"
        )


def samples_of(data: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """The samples of this rank's part of a minibatch, and their tokens."""
    columns = {name: _rows(value) for name, value in data.items() if _is_per_sample(value)}
    names = list(columns)
    samples = [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return samples, data["input_ids"].offsets().diff().tolist()


def microbatch_of(data: Any, samples: Sequence[Mapping[str, Any]]) -> Any:
    """These samples, with what all samples of ``data`` have in common."""
    from verl.utils.tensordict_utils import get_tensordict, nested_tensor_from_tensor_list

    columns: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    for name, value in data.items():
        if not _is_per_sample(value):
            shared[name] = value.data
            continue
        rows = [sample[name] for sample in samples]
        if not isinstance(value, torch.Tensor):
            columns[name] = rows
        elif value.is_nested:
            columns[name] = nested_tensor_from_tensor_list(rows, ragged_idx=value._ragged_idx)  # type: ignore[attr-defined]
        else:
            columns[name] = torch.stack(rows)
    return get_tensordict(columns, shared)


def _is_per_sample(value: Any) -> bool:
    """Of an entry of a TensorDict: what belongs to the whole batch is no stack."""
    from tensordict.tensorclass import NonTensorStack

    return isinstance(value, torch.Tensor | NonTensorStack)


def _rows(value: Any) -> list[Any]:
    return list(value.unbind()) if isinstance(value, torch.Tensor) else value.tolist()


def _option(data: Any, name: str, default: Any) -> Any:
    """What verl's configuration has put beside the tensors."""
    from verl.utils.tensordict_utils import get_non_tensor_data

    return get_non_tensor_data(data=data, key=name, default=default)
