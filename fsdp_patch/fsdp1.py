"""FSDP1: the units of a model (a ``FullyShardedDataParallel`` module with its flat parameter each), and unsupported
options.

ODC gets gradients through the slot of ``register_comm_hook``. (The public method takes one state for the whole model,
and refuses hybrid sharding because FSDP then skips its all-reduce; ODC wants that.) For gathers there is no hook, so
``FlatParamHandle._all_gather_flat_param`` is replaced on the instance, reversibly.

[Note: Nothing until final] FSDP1 uses the output of the hook as the sharded gradient, or adds it to an earlier one. The
sum is known only at the end of the minibatch, so the hook returns zeros: one expanded element, which needs no memory.
``prepare_gradient_for_optim`` (end of backward) is replaced to remove a ``.grad`` that has only these zeros, and
:meth:`Fsdp1Unit.install` adds the mean gradient when it is final. Before FSDP1 itself reads ``.grad``, pending
gradients are removed from it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState, clean_tensor_name
from torch.distributed.fsdp._runtime_utils import _lazy_init

from odc.errors import UnsupportedError
from odc.fsdp_patch.interception import untraced
from odc.fsdp_patch.pending import Expected, PendingGradient, Use, settled
from odc.fsdp_patch.unit import (
    Communication,
    GradientShard,
    Undo,
    Unit,
    Watched,
    cast_within,
    check_grad_dtype,
    shadow,
    waiting_gradients,
)
from odc.units import ParamSlice, UnitSpec

logger = logging.getLogger("odc")

_COMMUNICATES = "on-demand communication moves memory of other ranks here"
_SHARDED = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.HYBRID_SHARD,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)


class Fsdp1Unit(Unit):
    """One ``FullyShardedDataParallel`` module that has parameters of its own."""

    def __init__(self, module: FullyShardedDataParallel, name: str) -> None:
        super().__init__()
        self.module = module
        self.name = name or "<root>"
        self.handle: Any = module._handle
        self._state: Any = module  # the same, for attributes that are None only before FSDP1 is initialised
        prefix = f"{name}." if name else ""
        self._names = [prefix + fqn for fqn in self.flat_param._fqns]
        self._trainable = {id(p) for p in self.trainable_parameters()}
        shard = self.flat_param._local_shard
        self._zero = torch.zeros(1, dtype=shard.dtype, device=shard.device)
        self._sent_in: int | None = None  # autograd's number of a backward pass with a push that has not completed yet
        self._is_incomplete = False
        self._is_touched = False  # by the minibatch that has ended
        self._steps_in_backward = bool(vars(self.handle)["_has_optim_in_backward"])

    # What it is

    @property
    def shard_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self._state.process_group
        return group

    @property
    def copy_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = getattr(self.module, "_inter_node_pg", None)
        return group

    @property
    def device(self) -> torch.device:
        device: torch.device = self._state.compute_device
        return device

    @property
    def divide_factor(self) -> float:
        return float(self.module._gradient_predivide_factor * self.module._gradient_postdivide_factor)

    @property
    def flat_param(self) -> Any:
        return self.handle.flat_param

    @property
    def gather_dtype(self) -> torch.dtype:
        """dtype of the all-gather: the compute dtype under mixed precision."""
        flat: torch.Tensor = self.flat_param._local_shard
        dtype: torch.dtype = self.handle._fwd_bwd_param_dtype if self.handle._uses_param_mixed_precision else flat.dtype
        return dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype in which gradients reach the reduce-scatter."""
        dtype: torch.dtype = self.handle._reduce_dtype
        return dtype

    def own_spec(self) -> UnitSpec:
        numel = self.flat_param._local_shard.numel()
        return UnitSpec(
            name=self.name,
            shard_numel=numel,
            dtype=self.gather_dtype,
            # FSDP1 reduces a unit as a whole: any trainable parameter makes the whole flat gradient.
            params=(ParamSlice(f"{self.name} (flat)", numel),) if self._trainable else (),
            grad_dtype=self.grad_dtype,
        )

    def agreement(self) -> tuple[str, dict[str, str]]:
        precision, flat = self.module.mixed_precision, self.flat_param
        options = (
            f"{self.module.sharding_strategy.name}, divide by {self.agreed_factor:.17g}, use_orig_params "
            f"{self.handle._use_orig_params}, param_dtype {precision.param_dtype}, reduce_dtype "
            f"{precision.reduce_dtype}"
        )
        held = flat._params if self.handle._use_orig_params else [flat] * len(flat._fqns)
        return options, {
            name: f"{list(shape)} {flat.dtype}{'' if parameter.requires_grad else ' frozen'}"
            for name, shape, parameter in zip(self._names, flat._shapes, held, strict=True)
        }

    # Its parameters

    def watched(self) -> list[Watched]:
        # Tensors that share memory through .data do not share version counters, and any of them may be updated.
        flat = self.flat_param
        shard, parts = flat._local_shard, {index: part for index, _, part in self._in_shard()}
        return [
            Watched((p, flat, shard), shard, parts.get(index, slice(0))) for index, p in enumerate(flat._params or ())
        ] or [Watched((flat, shard), shard, slice(None))]

    def is_unfrozen(self) -> bool:
        return bool(self._unfrozen())

    def _unfrozen(self) -> list[str]:
        return [name for name, p in self._held() if p.requires_grad and id(p) not in self._trainable]

    def trainable_parameters(self) -> list[nn.Parameter]:
        held = self.flat_param._params if self.handle._use_orig_params else [self.flat_param]
        return [p for p in held if p.requires_grad]

    def take_over_data(self) -> None:
        if self._idle and self.handle._use_orig_params:
            self._take_over_gradients()  # else FSDP1 writes zeros over cleared ones, which the script may have kept
            self.handle._writeback_orig_params()  # FSDP1 itself takes over a `param.data = ...` in its next unshard

    def take_over_place(self) -> None:
        flat, dtype = self.flat_param, self._zero.dtype
        if flat.dtype != dtype:
            raise cast_within(self.name, dtype, flat.dtype)
        if self._idle and flat.shape == flat._local_shard.shape:
            flat._local_shard = flat.data

    def fill_shard(self, out: torch.Tensor) -> None:
        self.take_over_data()
        out.copy_(self.flat_param._local_shard)

    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield published, self.flat_param._local_shard.to(published.dtype)

    def beside_by_name(self, published: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        shard = self.flat_param._local_shard
        for name, info in zip(self._names, self.flat_param._shard_param_infos, strict=True):
            if info.in_shard:
                part = slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)
                yield name, (published[part], shard[part].to(published.dtype))

    def incomplete_backward(self) -> bool:
        return self._is_incomplete or self._sent_in is not None

    def discard_gathered(self) -> None:
        handle = self.handle
        was_interrupted = self._leave_interrupted_pass()
        if self._idle and (handle._skipped_use_sharded_views or not handle.needs_unshard()):
            handle.reshard(free_unsharded_flat_param=True)
            handle.post_reshard()
            handle._prefetched = False
        if was_interrupted:
            self._restore_gradient()

    def end_evaluation(self, is_by_hand: bool) -> None:
        # A rank without a backward would have them until the minibatch ends, which may be while the script goes over
        # the parameters: FSDP1 takes full ones out of the modules and puts sharded ones in.
        self.discard_gathered()

    def _leave_interrupted_pass(self) -> bool:
        """What FSDP1 still believes to be within, when neither forward nor backward is running, an exception has
        ended."""
        self._sent_in, self._is_incomplete = None, False
        if self._state.training_state == TrainingState.FORWARD_BACKWARD:
            self._state.training_state = TrainingState.IDLE
        if self._idle or self.is_summoned:
            return False
        self.handle._training_state = HandleTrainingState.IDLE
        return True

    def _restore_gradient(self) -> None:
        """Put back the earlier ``.grad`` that a backward pass has laid aside to add to at its end."""
        flat = self.flat_param
        if flat.grad is not None:  # not laid aside, or summed under no_sync()
            return
        flat._post_backward_called = False
        earlier = flat.__dict__.pop("_saved_grad_shard", None)
        if earlier is not None and not self._is_nothing(earlier):
            flat.grad = earlier
            if self.handle._use_orig_params:
                self.handle._use_sharded_grad_views()

    def install(self, mean: torch.Tensor, touched: Sequence[bool]) -> None:
        if not any(touched):
            return
        self._is_touched = True
        flat = self.flat_param
        shard = flat._local_shard
        self._leave_replaced(mean)
        self._take_over_gradients()
        if flat.grad is None:
            flat.grad = mean.to(device=shard.device, dtype=shard.dtype)
        elif flat.grad.shape == shard.shape:
            flat.grad.add_(mean.to(shard.device))
        else:
            raise waiting_gradients(self.name)
        if self.handle._use_orig_params:
            flat._is_grad_none_mask[:] = [not p.requires_grad for p in flat._params]
            self.handle._use_sharded_grad_views()

    @property
    def steps_in_backward(self) -> bool:
        return self._steps_in_backward

    def call_hooks(self) -> None:
        is_touched, self._is_touched = self._is_touched, False
        for parameter in self.flat_param._params or () if is_touched and self._steps_in_backward else ():
            optimizers = getattr(parameter, "_in_backward_optimizers", ())
            for optimizer in optimizers:  # also of parameters of which this rank has no part: all ranks step as often
                optimizer.step()
            if optimizers:
                parameter.grad = None

    def clear_gradients(self) -> None:
        super().clear_gradients()
        self._take_over_gradients()

    def resident(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(self.flat_param._local_shard, settled(self.flat_param.grad))]

    def _leave_replaced(self, mean: torch.Tensor) -> None:
        """Nothing is added to gradients that the script has replaced."""
        gone = {one.pending.key for one in self.expected.values() if not one.was_there}
        if id(self.flat_param) in gone:
            mean.zero_()
        for _, parameter, part in self._in_shard():
            if id(parameter) in gone:
                mean[part].zero_()

    def gradient_shards(self) -> Sequence[GradientShard]:
        shard = self.flat_param._local_shard
        if not self.handle._use_orig_params:
            return [GradientShard(self.flat_param, shard)] if self._trainable else []
        return [GradientShard(p, shard[part]) for _, p, part in self._in_shard() if id(p) in self._trainable]

    def expect(self, use: Use, *, none: bool = True, old: bool) -> None:
        flat, shard = self.flat_param, self.flat_param._local_shard
        if flat.shape == shard.shape and not self.handle._skipped_use_sharded_views and not self.holds_unsent:
            super().expect(use, none=none, old=old)  # else it follows at the end of this backward

    def _take_over_gradients(self) -> None:
        """Make the flat gradient what the original parameters' ``.grad`` say.

        ``zero_grad()`` sets those to None, and a script may assign them. FSDP1 looks at them when the next forward
        begins, which a rank without microbatches never does.
        """
        flat = self.flat_param
        self._unwrap()
        if not self.handle._use_orig_params or self.holds_unsent:
            return
        grads = [settled(p.grad) for p in flat._params]
        if all(grad is None for grad in grads):
            flat.grad = None
            return
        if flat.grad is None:
            flat.grad = torch.zeros_like(flat._local_shard)
        for index, _, part in self._in_shard():
            grad = grads[index]
            if grad is None:
                flat.grad[part].zero_()
                flat._is_grad_none_mask[index] = True
            elif grad.untyped_storage().data_ptr() != flat.grad.untyped_storage().data_ptr():
                flat.grad[part].copy_(grad)

    def _unwrap(self) -> None:
        """Put final gradients where a script has put back what stood for them (``p.grad *= 2`` does)."""
        for parameter in (self.flat_param, *(self.flat_param._params or ())):
            if isinstance(parameter.grad, PendingGradient) and parameter.grad.pending.final is not None:
                parameter.grad = parameter.grad.pending.final

    @property
    def holds_unsent(self) -> bool:  # then the flat gradient is an unsharded one
        grad = self.flat_param.grad
        return grad is not None and grad.shape != self.flat_param._local_shard.shape

    def _in_shard(self) -> Iterator[tuple[int, nn.Parameter, slice]]:
        """Index and original parameter of what this rank's shard holds a part of, and where in the shard that is."""
        flat = self.flat_param
        for index, (parameter, info) in enumerate(zip(flat._params or [], flat._shard_param_infos, strict=False)):
            if info.in_shard:
                yield index, parameter, slice(info.offset_in_shard, info.offset_in_shard + info.numel_in_shard)

    # Entering it

    def enter(self, index: int, communication: Communication) -> Undo:
        all_gather, prepare = self.handle._all_gather_flat_param, self.handle.prepare_gradient_for_optim
        unshard_grad, reshard_grad = self.handle.unshard_grad, self.handle.reshard_grad

        @functools.wraps(all_gather)
        def all_gather_flat_param(padded_unsharded_flat_param: torch.Tensor) -> torch.Tensor:
            if self._is_collective(padded_unsharded_flat_param):
                gathered: torch.Tensor = all_gather(padded_unsharded_flat_param)
                return gathered
            communication.gather(index, padded_unsharded_flat_param, own_in_place=False)
            return padded_unsharded_flat_param

        def push(state: object, grads: torch.Tensor, out: torch.Tensor) -> None:
            self._check_push(grads)
            if self._sent_in is None:
                self._sent_in = torch._C._current_graph_task_id()
            communication.scatter_accumulate(index, grads, [True])
            out.data = self._zero.expand(out.numel())
            if self._is_nothing(getattr(self.flat_param, "_saved_grad_shard", None)):
                # A second push in one backward (reentrant checkpointing of several modules of a unit): FSDP would add
                # in place to these zeros, which are one element.
                del self.flat_param._saved_grad_shard

        @functools.wraps(prepare)
        def prepare_gradient_for_optim() -> None:
            was_sent = self._sent_in is not None
            self._completed(torch._C._current_graph_task_id())
            self._take_out()
            prepare()
            flat = self.flat_param
            if self._is_nothing(flat.grad):
                flat.grad = None
                for parameter in chain(flat._params or [], flat._shared_params or []):
                    parameter.grad = None
            for one in self.expected.values():
                one.put_back()
            if was_sent:
                self.expect(communication.data_of, old=True)
                for one in self.expected.values():
                    one.pending.is_sent = True

        @functools.wraps(unshard_grad)
        def show_full_gradients() -> None:  # `summon_full_params(with_grads=True)`, for which the minibatch has ended
            self._unwrap()
            for one in self.expected.values():
                one.take_out(leave_base=False)
            unshard_grad()

        @functools.wraps(reshard_grad)
        def take_full_gradients_away() -> None:
            reshard_grad()
            for one in self.expected.values():
                one.put_back()

        undo_methods = shadow(
            self.handle,
            _has_optim_in_backward=False,  # it would step in each backward, see `call_hooks`
            _all_gather_flat_param=untraced(all_gather_flat_param, _COMMUNICATES),
            prepare_gradient_for_optim=untraced(prepare_gradient_for_optim, _COMMUNICATES),
            unshard_grad=show_full_gradients,
            reshard_grad=take_full_gradients_away,
            prepare_gradient_for_backward=self._before(self.handle.prepare_gradient_for_backward),
            _writeback_orig_params=self._around(self.handle._writeback_orig_params),
            _use_sharded_grad_views=self._around(self.handle._use_sharded_grad_views),
            _use_unsharded_grad_views=self._sparing(self.handle._use_unsharded_grad_views),
            _reset_flat_param_grad_info_if_needed=self._around(self.handle._reset_flat_param_grad_info_if_needed),
        )
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL FSDP1 compares in every forward, by a collective, what the ranks run next.
        # Under ODC they need not run the same.
        undo_order = shadow(self.module._exec_order_data, _checking_order=False)
        undo_push = shadow(self.module, _comm_hook=push)

        def undo() -> None:
            undo_push()
            undo_order()
            undo_methods()

        return undo

    def _before(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """The method of the handle that lays gradients aside until the end of backward."""

        @functools.wraps(original)
        def method() -> Any:
            flat = self.flat_param
            self._unwrap()
            for one in self.expected.values():
                is_flat = one.parameter is flat  # it is unsharded: no sharded gradient can be put there now
                if one.take_out(leave_base=not is_flat) and is_flat and one.pending.base is not None:
                    flat._saved_grad_shard = one.pending.base
            return original()

        return method

    def _sparing(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """The method of the handle that shows unsharded gradients by ``.grad.data``, in whatever tensor it finds there:
        not in the gradients of earlier minibatches, to which those of this one will be added."""

        @functools.wraps(original)
        def method() -> Any:
            for one in self.expected.values():
                one.spare_base()
            return original()

        return method

    def _around(self, original: Callable[[], Any]) -> Callable[[], Any]:
        """A method of the handle that looks at gradients."""

        @functools.wraps(original)
        def method() -> Any:
            aside = self._take_out()
            try:
                return original()
            finally:
                for one in aside:
                    one.put_back()

        return method

    def _take_out(self) -> list[Expected]:
        """Those that were in ``.grad``. None where the script has full parameters (``summon_full_params``): there
        FSDP1 has nothing to do with gradients, and a part of one could not be put back."""
        self._unwrap()
        flat = self.flat_param
        if flat.shape != flat._local_shard.shape and any(p.shape != like.shape for p, like in self.gradient_shards()):
            return []
        return [one for one in self.expected.values() if one.take_out()]

    def _completed(self, backward: int) -> None:
        """A backward pass has come to its end. One that has sent gradients before it, and is not a part of it (these
        have higher numbers), never will."""
        self._is_incomplete |= self._sent_in is not None and self._sent_in < backward
        self._sent_in = None

    @property
    def is_summoned(self) -> bool:
        return bool(self.handle._training_state == HandleTrainingState.SUMMON_FULL_PARAMS)

    @property
    def _idle(self) -> bool:
        """Whether FSDP1 is outside of forward, backward and ``summon_full_params`` of this unit."""
        return bool(self.handle._training_state == HandleTrainingState.IDLE)

    def _is_nothing(self, grad: torch.Tensor | None) -> bool:
        """Whether a gradient is the zeros of [Note: Nothing until final]."""
        return grad is not None and grad.data_ptr() == self._zero.data_ptr()

    def _is_collective(self, out: torch.Tensor) -> bool:
        """Whether this all-gather is part of something that all ranks do together: a full state dict,
        ``summon_full_params``, or an evaluation in full precision, which is not what is published."""
        return self.is_summoned or out.dtype != self.gather_dtype

    def _check_push(self, grads: torch.Tensor) -> None:
        late = self._unfrozen()
        if late:
            raise UnsupportedError(
                f"parameters {late} received a gradient but were frozen when the model was patched: set requires_grad "
                "before patch_fsdp (under odc run: before the first forward), or close() the session and patch again"
            )
        if grads.dtype != self.grad_dtype:
            raise UnsupportedError(
                f"unit {self.name!r}: backward in eval mode under FSDP_USE_FULL_PREC_IN_EVAL=1 reduces gradients in "
                f"{grads.dtype}, not in the {self.grad_dtype} of its mixed precision: train in train() mode, or "
                "without that variable"
            )

    def _held(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters as an optimizer may hold them."""
        if self.handle._use_orig_params:
            yield from zip(self._names, self.flat_param._params, strict=True)
        else:
            yield f"{self.name} (flat)", self.flat_param


def find_fsdp1_roots(model: nn.Module) -> list[tuple[str, Any]]:
    """The outermost ``FullyShardedDataParallel`` modules, with their names."""
    roots: list[tuple[str, Any]] = []
    inside: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel) and id(module) not in inside:
            roots.append((name, module))
            inside.update(id(m) for m in module.modules())
    return roots


def largest_fsdp1_module(model: nn.Module) -> Any:
    """The first of the modules that are sharded over the most ranks; the outermost one where none is sharded."""
    found = [m for m in model.modules() if isinstance(m, FullyShardedDataParallel)]
    sharded = [m for m in found if m._handle is not None and not _is_replicated(m)]

    def size(module: Any) -> tuple[bool, int]:
        ranks, replicas = module.process_group.size(), getattr(module, "_inter_node_pg", None)
        return ranks > 1, ranks * (1 if replicas is None else replicas.size())

    return max(sharded or found[:1], key=size)


def find_fsdp1_units(model: nn.Module) -> list[Fsdp1Unit]:
    """All FSDP1 units below ``model`` in module order, initialised as their first forward would."""
    for _, root in find_fsdp1_roots(model):
        _lazy_init(root, root)
    return [
        Fsdp1Unit(module, clean_tensor_name(name + ".").rstrip("."))
        for name, module in model.named_modules()
        if isinstance(module, FullyShardedDataParallel) and module._handle is not None and not _is_replicated(module)
    ]


def _is_replicated(module: Any) -> bool:
    """Whether it shards nothing, so that there is nothing to gather on demand: it is left to FSDP1. (That makes
    NO_SHARD of every strategy in a group of one, where ODC has nothing to do either.)"""
    return module.sharding_strategy not in _SHARDED and module.process_group.size() > 1


def check_fsdp1_model(model: nn.Module) -> None:
    """Refuse what cannot be honoured, before FSDP is initialised.

    Raises:
        UnsupportedError: naming the module, the option and what to do.
        ValueError: parameters are on the meta device.
    """
    for name, root in find_fsdp1_roots(model):
        if root._is_root is False:
            raise UnsupportedError(f"{_where(name)} is a part of a larger FSDP model: patch the whole model")
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            _check_module(module, _where(name))


def _check_module(module: Any, where: str) -> None:
    if _is_replicated(module):
        logger.warning(
            "odc: %s has sharding_strategy=%s, which shards nothing and is left to FSDP1: it all-reduces these "
            "gradients in every backward, so every rank must run as many microbatches",
            where,
            module.sharding_strategy.name,
        )
        return
    if module.cpu_offload.offload_params:
        raise UnsupportedError(
            f"{where}: cpu_offload=CPUOffload(offload_params=True) is not supported under FSDP1: use fully_shard"
        )
    if module._comm_hook is not None and not _is_patched(module):
        raise UnsupportedError(f"{where}: register_comm_hook is in use already and would be overridden: leave it out")
    if module._fsdp_extension is not None:
        mesh = module._device_mesh
        sizes = ", ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        raise UnsupportedError(
            f"{where}: its device_mesh ({sizes}) is a part of a larger mesh, as with tensor or expert parallelism, "
            "which is not supported: shard by FSDP alone, or keep the collectives"
        )
    if module._handle is not None and module._handle.flat_param.device.type == "meta":
        raise ValueError(f"{where}: its parameters are on the meta device; materialise the model before patching")


def _is_patched(module: Any) -> bool:
    return module._handle is not None and "_all_gather_flat_param" in vars(module._handle)


def _where(name: str) -> str:
    return f"module {name!r}" if name else "the model"


def check_fsdp1_units(units: Sequence[Fsdp1Unit]) -> None:
    """As :func:`check_fsdp1_model`, for what is known once FSDP is initialised."""
    if not units:
        raise ValueError(
            "the model's FullyShardedDataParallel modules have no parameters that are sharded (NO_SHARD shards none), "
            "so there is nothing to gather on demand: use FULL_SHARD, SHARD_GRAD_OP or HYBRID_SHARD"
        )
    for unit in units:
        _check_unit(unit)


def _check_unit(unit: Fsdp1Unit) -> None:
    where = f"unit {unit.name!r}"
    if _is_patched(unit.module):
        raise UnsupportedError(f"{where} is patched already: close() the other session first")
    if unit.handle._keep_low_precision_grads:
        raise UnsupportedError(
            f"{where}: MixedPrecision(keep_low_precision_grads=True) is not supported: gradients are summed in float32"
        )
    if unit.trainable_parameters():
        check_grad_dtype(where, unit.grad_dtype)
