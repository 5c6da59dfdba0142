"""One communication unit of FSDP2 (``FSDPParamGroup``).

ODC enters by ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``. What has no public door is read
here and in ``params.py``, read-only but for one thing: ``post_backward`` of the parameter group is shadowed on the
instance, reversibly. It is the only place that knows which parameters of the unit received a gradient (FSDP hands a
custom reduce-scatter only their concatenation), and it keeps FSDP from all-reducing a hybrid unit in every microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from odc.errors import UnsupportedError
from odc.fsdp_patch.compat import mp_policy
from odc.fsdp_patch.fsdp2.comms import OdcAllGather, OdcReduceScatter
from odc.fsdp_patch.fsdp2.params import FsdpParam
from odc.fsdp_patch.unit import Communication, Undo, Unit, Watched, waiting_gradients
from odc.units import ParamSlice, UnitSpec


class Fsdp2Unit(Unit):
    """One ``FSDPParamGroup`` and the module that carries its doors."""

    def __init__(self, module: FSDPModule, group: Any, name: str, param_names: dict[int, str]) -> None:
        self.module = module
        self.group = group
        self.name = name
        self.params = [
            FsdpParam(p, param_names.get(id(p.sharded_param), f"{name}.<unnamed {i}>"))
            for i, p in enumerate(group.fsdp_params)
        ]
        self.trainable = [p for p in self.params if p.sharded.requires_grad]
        self._present: list[bool] = []
        self._has_sent = False  # in a backward pass that may not have completed

    # What it is

    @property
    def is_sharded(self) -> bool:
        """False for a mesh that only replicates."""
        return hasattr(self.group.mesh_info, "shard_process_group")

    @property
    def process_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = getattr(self.group.mesh_info, "replicate_process_group", None)
        return group

    @property
    def device(self) -> torch.device:
        device: torch.device = self.group.device
        return device

    @property
    def divide_factor(self) -> float:
        factor = self.group.gradient_divide_factor
        if factor is not None:
            return float(factor)
        return float(self.process_group.size() * (self.replica_group.size() if self.replica_group else 1))

    @property
    def param_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = mp_policy(self.group).param_dtype
        return dtype

    @cached_property
    def compute_dtypes(self) -> list[torch.dtype]:
        """Of the parameters: what FSDP casts each to for the all-gather."""
        return [p.compute_dtype(self.param_dtype) for p in self.params]

    @property
    def gather_dtype(self) -> torch.dtype:
        """dtype of the all-gather: the parameters' common compute dtype, or bytes if they have several."""
        dtypes = set(self.compute_dtypes)
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype in which gradients reach the reduce-scatter."""
        reduce_dtype: torch.dtype | None = mp_policy(self.group).reduce_dtype
        if reduce_dtype is not None:
            return reduce_dtype
        return self.trainable[0].grad_dtype(self.param_dtype) if self.trainable else torch.float32

    def spec(self) -> UnitSpec:
        mixed = self.gather_dtype == torch.uint8
        numel = sum(
            p.padded.numel() * (dtype.itemsize if mixed else 1)
            for p, dtype in zip(self.params, self.compute_dtypes, strict=True)
        )
        return UnitSpec(
            name=self.name,
            shard_numel=numel,
            dtype=self.gather_dtype,
            params=tuple(ParamSlice(p.name, p.padded.numel()) for p in self.trainable),
            grad_dtype=self.grad_dtype,
        )

    def agreement(self) -> tuple[str, dict[str, str]]:
        policy = mp_policy(self.group)
        options = (
            f"divide by {self.divide_factor:g}, param_dtype {policy.param_dtype}, reduce_dtype {policy.reduce_dtype}"
        )
        return options, {p.name: p.describe() for p in self.params}

    # Its parameters

    def watched(self) -> list[Watched]:
        return [Watched(p.name, (p.sharded, p.local), p.padded, slice(p.local.numel())) for p in self.params]

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p.sharded for p in self.trainable]

    def full_parameters(self) -> list[tuple[torch.Tensor, nn.Parameter]] | None:
        return [(p.full, p.sharded) for p in self.trainable if p.full is not None]

    def fill_shard(self, out: torch.Tensor) -> None:
        for part, data in self._parts(out):
            part.copy_(data)

    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return ((part, data.to(part.dtype)) for part, data in self._parts(published))

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter's place in a flat shard, and its data, of equal length."""
        offset = 0
        for param, dtype in zip(self.params, self.compute_dtypes, strict=True):
            data = param.padded
            if flat.dtype != dtype:  # several compute dtypes in one unit travel as bytes
                data = data.to(dtype).view(torch.uint8)
            end = offset + data.numel()
            yield flat[offset:end], data
            offset = end

    def install(self, mean: torch.Tensor, touched: Sequence[bool]) -> None:
        if any(touched) and any(param.has_gradient for param in self.trainable):
            raise waiting_gradients(self.name)
        offset = 0
        for param, here in zip(self.trainable, touched, strict=True):
            if here:
                param.add_to_grad(mean[offset : offset + param.local.numel()])
            offset += param.padded.numel()

    def check_hooks(self) -> None:
        for param in self.params:
            param.check_hooks(f"unit {self.name!r}")

    def incomplete_backward(self) -> bool:
        # A final callback of FSDP that was queued and has not run: the autograd engine drops it with an exception, and
        # FSDP waits for it for good, queueing no other.
        is_waiting = self._context.post_backward_final_callback_queued
        return bool(is_waiting) and (self._has_sent or any(p.has_gradient for p in self.params))

    def discard_gathered(self) -> None:
        self._forget_interrupted_pass()
        if not self.group.is_sharded:
            self.module.reshard()

    def _forget_interrupted_pass(self) -> None:
        """What FSDP2 still believes to be within, when neither forward nor backward is running, an exception has
        ended."""
        if self.group._training_state in (TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD):
            for param in self.params:
                param.drop_gradient()
        if self.group._all_gather_result is not None:  # a prefetch for a forward that did not come
            self.group.finalize_backward()
        state = self.module._get_fsdp_state()
        state._training_state = self.group._training_state = TrainingState.IDLE
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        self._has_sent = False

    @property
    def _context(self) -> Any:
        """What FSDP2 shares among all units of a root, once it has run."""
        return self.module._get_fsdp_state()._state_ctx

    def resident(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        return [(p.padded, p.local_grad) for p in self.params]

    # Entering it

    def enter(self, index: int, communication: Communication) -> Undo:
        def all_gather(out: torch.Tensor, group: dist.ProcessGroup) -> Callable[[], None] | None:
            if not self._context.post_backward_final_callback_queued:
                self._has_sent = False  # that backward is over
            return self._gather(index, communication, out, group)

        def reduce_scatter(grads: torch.Tensor) -> None:
            self._has_sent = True
            self._push(index, communication, grads)

        undo_comms = self.swap_comms(OdcAllGather(all_gather), OdcReduceScatter(reduce_scatter))
        undo_post_backward = self._shadow_post_backward()

        def undo() -> None:
            undo_post_backward()
            undo_comms()

        return undo

    def _gather(
        self, index: int, communication: Communication, out: torch.Tensor, group: dist.ProcessGroup
    ) -> Callable[[], None] | None:
        return communication.gather_ahead(index, out, own_in_place=True)

    def _push(self, index: int, communication: Communication, grads: torch.Tensor) -> None:
        communication.scatter_accumulate(index, grads, self._present)

    def swap_comms(self, all_gather: Any, reduce_scatter: Any) -> Undo:
        """Enter by the public doors; returns the undo."""
        before = (self.group._all_gather_comm, self.group._reduce_scatter_comm)
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)

        def undo() -> None:
            if self.group._all_gather_comm is all_gather:
                self.module.set_custom_all_gather(before[0])
            if self.group._reduce_scatter_comm is reduce_scatter:
                self.module.set_custom_reduce_scatter(before[1])

        return undo

    def _shadow_post_backward(self) -> Undo:
        """Note who has a gradient, before each post-backward of this unit; leave no trace of it in ``.grad``.

        A ``.grad`` that was None is None again afterwards: what FSDP put there is not the gradient yet, and code that
        looks too early (clipping inside the minibatch) should find nothing rather than zeros.
        """
        original = self.group.post_backward

        @functools.wraps(original)
        def post_backward(*args: Any) -> None:
            self._check_late_gradients()
            self._present = self._coming_gradients()
            empty = [p.sharded for p in self.trainable if p.sharded.grad is None]
            all_reduce_grads, self.group.all_reduce_grads = self.group.all_reduce_grads, False
            try:
                original(*args)
            finally:
                self.group.all_reduce_grads = all_reduce_grads
                self.group._partial_reduce_output = None  # zeros, kept by FSDP for an all-reduce that never comes
            for parameter in empty:
                parameter.grad = None

        self.group.post_backward = post_backward

        def undo() -> None:
            if self.group.__dict__.get("post_backward") is post_backward:
                del self.group.post_backward

        return undo

    def _coming_gradients(self) -> list[bool]:
        """Which trainable parameters the coming reduction will contain; asked when post-backward begins."""
        include_unused = bool(getattr(self.group, "reduce_scatter_unused_params", False))
        return [p.has_gradient or (include_unused and p.was_unsharded) for p in self.trainable]

    def _check_late_gradients(self) -> None:
        late = [p.name for p in self.params if p.has_gradient and p not in self.trainable]
        if late:
            raise UnsupportedError(
                f"parameters {late} received a gradient but were frozen when the model was patched: set "
                "requires_grad before patch_fsdp (under odc run: before the first forward), or close() the session and "
                "patch again"
            )
