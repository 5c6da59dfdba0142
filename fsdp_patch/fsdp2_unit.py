"""One communication unit of FSDP2 (``FSDPParamGroup``).

ODC uses ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``, and where possible replaces the
functions that stage for these (:mod:`odc.fsdp_patch.fsdp2_in_place`). FSDP's private attributes are read in this
module. Only one is changed: ``post_backward`` of the parameter group is replaced on the instance, reversibly. Only
there it is known which parameters of the unit received a gradient (FSDP passes only their concatenation to a custom
reduce-scatter), and it keeps FSDP from all-reducing a hybrid unit in every microbatch. For parameters with an
all-gather extension, FSDP also gets the sizes and metadata that it would have recorded itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh, _get_device_handle
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from odc.config import STAGING as STAGING_VARIABLE
from odc.errors import UnsupportedError
from odc.fsdp_patch.compat import is_tested, mp_policy, param_groups
from odc.fsdp_patch.fsdp2_in_place import STAGING, Held, InPlace, is_small
from odc.fsdp_patch.fsdp2_param import FsdpParam, have_gradients, reaches_optimizer
from odc.fsdp_patch.pending import only_expected
from odc.fsdp_patch.sharing import Sharing
from odc.fsdp_patch.unit import (
    Communication,
    GradientShard,
    Undo,
    Unit,
    Watched,
    cast_within,
    shadow,
    waiting_gradients,
)
from odc.units import ParamSlice, UnitSpec


class _OfUnit:
    """What FSDP calls for one unit. It asks for buffers, too: plain memory serves."""

    def __init__(self, unit: Fsdp2Unit, index: int, communication: Communication) -> None:
        self._unit = unit
        self._index = index
        self._communication = communication

    @property
    def in_place(self) -> InPlace | None:
        """How the unit does without staging, if it does."""
        return self._unit.in_place

    @property
    def is_extended(self) -> bool:
        return self._unit.is_extended

    @property
    def device(self) -> torch.device:
        return self._unit.device

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class OdcAllGather(_OfUnit, AllGather):
    """FSDP's all-gather of one unit, as a gather on demand."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self._unit.begin_gather()
        # FSDP has put this rank's shard (input_tensor) into its place in output_tensor.
        self._communication.gather(self._index, output_tensor, own_in_place=True)
        return None  # complete, or in the order of the stream

    @property
    def is_in_forward(self) -> bool:
        """Whether FSDP gathers for a forward."""
        return bool(self._unit.group._training_state == TrainingState.FORWARD)

    @torch.no_grad()
    def gather_extended(self, into: Any, over: Any) -> AllGatherResult:
        """What owners have made of their shards (:mod:`odc.fsdp_patch.fsdp2_extension`), for FSDP2 to copy out: it
        would make it anew. Allocated on one stream of a device, and gathered over another, as FSDP2 does."""
        unit, handle = self._unit, _get_device_handle(self.device.type)
        unit.begin_gather()
        numels = [[numel for numel, _ in inputs] for inputs in unit.inputs]
        dtypes = [[dtype for _, dtype in inputs] for inputs in unit.inputs]
        sizes = [numel * dtype.itemsize for inputs in unit.inputs for numel, dtype in inputs]
        with handle.stream(into):
            whole = torch.empty(unit.shard_group.size() * sum(sizes), dtype=torch.uint8, device=self.device)
        over.wait_stream(into)
        with handle.stream(over):
            self._communication.gather(self._index, whole, own_in_place=False)
            unit.hand_on_metadata()
            return AllGatherResult(whole, over.record_event(), None, dtypes, numels, sizes)

    def gather_in_place(self) -> None:
        """The same without staging: into the parameters."""
        in_place = self._unit.in_place
        assert in_place is not None
        self._unit.begin_gather()
        with torch.inference_mode(False):  # memory that outlives an evaluation: training writes there, too
            places = in_place.allocate()
        # Unless there was an evaluation before the session: tensors of inference have no version.
        versions = () if in_place.gathered[0].is_inference() else in_place.gathered
        with torch.no_grad(), _unsafe_preserve_version_counter(versions):
            self._communication.gather(self._index, places, own_in_place=False)
            in_place.hand_out()


class OdcReduceScatter(_OfUnit, ReduceScatter):
    """FSDP's reduce-scatter of one unit, as a push to the owners."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        present = self._unit.begin_push()
        self._communication.scatter_accumulate(self._index, self._unit.in_grad_dtype(input_tensor), present)
        # [Note: Nothing until final] FSDP makes a .grad of this output now, but the sum is known only at the end of the
        # minibatch. Whatever is in it, Fsdp2Unit takes that .grad away again. Session.finish adds the sum, divided as
        # FSDP would have divided it.
        return None

    @torch.no_grad()
    def push_in_place(self, grads: dict[int, torch.Tensor]) -> None:
        """The same without staging: from the gradients, by the id of each FSDPParam that has one."""
        in_place = self._unit.in_place
        assert in_place is not None
        present = self._unit.begin_push()
        self._communication.scatter_accumulate(self._index, in_place.rows(grads), present)


_REPLACED = ("Default", "ProcessGroupAlloc")
"""Torch's own communication, by the beginning of its name: the second is a hint where it should allocate
(``set_allocate_memory_from_process_group_for_comm``), and is there again when a session has closed."""


class Fsdp2Unit(Unit):
    """One ``FSDPParamGroup`` and the module that carries its doors."""

    staging = f"staged ({STAGING_VARIABLE}=on)"

    def __init__(self, module: FSDPModule, group: Any, name: str, param_names: dict[int, str]) -> None:
        super().__init__()
        self.module = module
        self.group = group
        self.name = name
        self.params = [
            FsdpParam(p, param_names.get(id(p.sharded_param), f"{name}.<unnamed {i}>"))
            for i, p in enumerate(group.fsdp_params)
        ]
        self._is_offloaded = any(p.inner.offload_to_cpu for p in self.params)  # FSDP would wait before adding
        smaller = group.post_forward_mesh_info
        # Of ``reshard_after_forward=<int>``. On demand the ranks of each of its groups share the unit, in the forward,
        # too, and FSDP2 keeps no shard of its own between forward and backward.
        self._smaller = None if smaller is None or smaller == group.mesh_info else smaller
        if self._smaller is not None and self.copy_group is None:
            self.sharing = Sharing(smaller.shard_process_group, smaller.replicate_process_group, "group")
        self._extensions = [p.extension for p in self.params if p.extension is not None]
        self.is_extended = bool(self._extensions)
        self.in_place: InPlace | None = None
        self._sort()
        self._numels: list[int] = []  # of each parameter in a flat shard (bytes, if the unit travels as bytes)
        self._touched: Sequence[bool] = []  # by the minibatch that has ended
        self._present: list[bool] = []
        self._is_sent = False  # in this post-backward
        self._has_sent = False  # in a backward pass that may not have completed

    def _sort(self) -> None:
        self.trainable = [p for p in self.params if p.sharded.requires_grad]
        self._frozen = [p for p in self.params if not p.sharded.requires_grad]
        self._gradient_shards = [GradientShard(p.sharded, p.local) for p in self.trainable]

    def do_without_staging(self, held: Held) -> None:
        if reason := self.why_staged():
            self.staging = f"staged ({reason})"
            return
        self.staging = "in place"
        self.params.sort(key=is_small)
        self._sort()
        params = list(zip(self.params, self.compute_dtypes, strict=True))
        self.in_place = InPlace(params, self.grad_dtype, self.shard_group.size(), self.device, held)

    def why_staged(self) -> str:
        """What keeps this unit from :meth:`do_without_staging`; or nothing."""
        if not is_tested():
            return f"nobody has tried torch {torch.__version__}"
        if self.is_extended:
            return "with an all-gather extension"
        if self._is_offloaded:
            return "with CPU offload"
        if self.gather_dtype == torch.uint8:
            return "with several compute dtypes in a unit"
        if self.grad_dtype not in (torch.float32, torch.bfloat16):
            return f"with gradients in {self.grad_dtype}"
        return ""

    # What it is

    @property
    def is_sharded(self) -> bool:
        """False for a mesh that only replicates."""
        return hasattr(self.group.mesh_info, "shard_process_group")

    @property
    def shard_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def copy_group(self) -> dist.ProcessGroup | None:
        group: dist.ProcessGroup | None = getattr(self.group.mesh_info, "replicate_process_group", None)
        return group

    @property
    def partner_groups(self) -> list[dist.ProcessGroup]:
        own = self.group.mesh_info.mesh.mesh_dim_names or ()
        meshes = [param.sharded.device_mesh for param in self.params]  # type: ignore[attr-defined]
        whole: DeviceMesh = max(meshes, key=lambda mesh: mesh.ndim)
        return [whole.get_group(name) for name in whole.mesh_dim_names or () if name not in own]

    @property
    def device(self) -> torch.device:
        device: torch.device = self.group.device
        return device

    @property
    def divide_factor(self) -> float:
        """Of the sum of what is pushed: FSDP divides gradients of other dtypes than these two by a power of two before
        the reduction."""
        factor, before = float(self.group.gradient_divide_factor or self.num_ranks), 1.0
        if self._is_divided_before:
            while factor % before == 0 and factor / before > before:
                before *= 2
        return factor / before

    @cached_property
    def _is_divided_before(self) -> bool:
        return self.grad_dtype not in (torch.float32, torch.bfloat16)

    @cached_property
    def num_ranks(self) -> int:
        """Whose gradients are summed."""
        return self.shard_group.size() * (self.copy_group.size() if self.copy_group else 1)

    @property
    def pushes_behind_backward(self) -> bool:
        return bool(self.trainable) and self.group.reduce_grads is True  # not under set_requires_gradient_sync(False)

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
        return dtypes.pop() if len(dtypes) == 1 and not self.is_extended else torch.uint8

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype in which gradients reach the reduce-scatter."""
        reduce_dtype: torch.dtype | None = mp_policy(self.group).reduce_dtype
        if reduce_dtype is not None:
            return reduce_dtype
        return self.trainable[0].grad_dtype(self.param_dtype) if self.trainable else torch.float32

    @property
    def inputs(self) -> list[list[tuple[int, torch.dtype]]]:
        """Elements and dtype of each tensor that travels of each parameter."""
        return [
            [(p.numel, dtype)] if p.extension is None else p.extension.inputs
            for p, dtype in zip(self.params, self.compute_dtypes, strict=True)
        ]

    @property
    def communicates(self) -> bool:
        return any(extension.communicates for extension in self._extensions)

    def measure(self) -> dict[str, str]:
        return {p.name: p.extension.measure() for p in self.params if p.extension is not None}

    def hand_on_metadata(self) -> None:
        """Of this rank's last publication, to FSDP2."""
        for extension in self._extensions:
            extension.hand_on()

    def in_grad_dtype(self, grads: torch.Tensor) -> torch.Tensor:
        """Gradients as they are pushed: FSDP2 reduces them in the dtype in which they come, unless it has a
        ``reduce_dtype``; what an extension makes of a parameter may have another one than parameters are computed in.

        Raises:
            UnsupportedError: they would be rounded, or FSDP2 has divided them.
        """
        if grads.dtype == self.grad_dtype or not self.is_extended:
            return grads
        if (grads.dtype, self.grad_dtype) != (torch.bfloat16, torch.float32):
            raise UnsupportedError(
                f"unit {self.name!r} has an all-gather extension and gradients in {grads.dtype}, where parameters are "
                f"computed in {self.grad_dtype}: set reduce_dtype in the mixed precision policy"
            )
        return grads.to(self.grad_dtype)

    def own_spec(self) -> UnitSpec:
        mixed = self.gather_dtype == torch.uint8
        self._numels = [
            sum(numel * (dtype.itemsize if mixed else 1) for numel, dtype in inputs) for inputs in self.inputs
        ]
        return UnitSpec(
            name=self.name,
            shard_numel=sum(self._numels),
            dtype=self.gather_dtype,
            params=tuple(ParamSlice(p.name, p.numel) for p in self.trainable),
            grad_dtype=self.grad_dtype,
        )

    def agreement(self) -> tuple[str, dict[str, str]]:
        policy = mp_policy(self.group)
        options = (
            f"divide by {self.agreed_factor:.17g}, param_dtype {policy.param_dtype}, reduce_dtype {policy.reduce_dtype}"
        )
        return options, {p.name: p.describe() for p in self.params}

    # Its parameters

    def watched(self) -> list[Watched]:
        watched = []
        for p in self.params:
            if p.extension is None:
                sharded, local = p.inner.sharded_param, p.local
                watched.append(Watched((sharded, local), p.inner._sharded_param_data, slice(local.numel())))
            else:
                watched += [Watched((p.sharded, p.local, m), m, slice(None), p.local) for m in p.extension.memory]
        return watched

    def is_unfrozen(self) -> bool:
        return any(param.sharded.requires_grad for param in self._frozen)

    def trainable_parameters(self) -> list[nn.Parameter]:
        return [p.sharded for p in self.trainable]

    def full_parameters(self) -> list[tuple[torch.Tensor, nn.Parameter]] | None:
        return [(p.full, p.sharded) for p in self.trainable if p.full is not None]

    def take_over_place(self) -> None:
        for param in self.params:
            if param.dtype != param.patched_dtype:
                raise cast_within(param.name, param.patched_dtype, param.dtype)

    def fill_shard(self, out: torch.Tensor) -> None:
        parts, data = [], []
        for param, dtype, part in self._parts(out):
            if param.extension is not None:
                param.extension.fill(part)
            else:
                parts.append(part)
                data.append(param.padded if part.dtype == dtype else _as_bytes(param, dtype))
        if parts:
            torch._foreach_copy_(parts, data)  # on a device one launch for all parameters

    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for param, dtype, part in self._parts(published):
            if param.extension is not None:
                yield param.extension.beside()
            else:
                shard = param.inner._sharded_param_data
                yield part, shard.to(dtype) if part.dtype == dtype else _as_bytes(param, dtype)

    def beside_by_name(self, published: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        return zip((param.name for param in self.params), self.beside(published), strict=True)

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[FsdpParam, torch.dtype, torch.Tensor]]:
        """Each parameter, what it is computed in, and its place in a flat shard."""
        return zip(self.params, self.compute_dtypes, flat.split_with_sizes(self._numels), strict=True)

    def install(self, mean: torch.Tensor, touched: Sequence[bool]) -> None:
        if any(touched) and self.holds_unsent:
            raise waiting_gradients(self.name)
        self._touched = touched
        offset = 0
        for index, (param, here) in enumerate(zip(self.trainable, touched, strict=True)):
            one = self.expected.get(index)
            if here and (one is None or one.was_there):
                handle = one.handle if one is not None and one.parameter is param.sharded else None
                param.add_to_grad(mean[offset : offset + param.local.numel()], handle)
            offset += param.numel

    def gradient_shards(self) -> Sequence[GradientShard]:
        known = self._gradient_shards
        sharded = [param.inner.sharded_param for param in self.trainable]
        if [id(one) for shard in known for one in shard] != [id(t) for p in sharded for t in (p, p._local_tensor)]:
            # A checkpoint was loaded as new parameters, or they were moved.
            self._gradient_shards = known = [GradientShard(p.sharded, p.local) for p in self.trainable]
        return known

    def as_gradient(self, index: int, local: torch.Tensor) -> torch.Tensor:
        return self.trainable[index].as_dtensor(local)

    @property
    def steps_in_backward(self) -> bool:
        hooked = [param for param in self.trainable if param.inner.sharded_param._post_accumulate_grad_hooks]
        return any(reaches_optimizer(hook) for param in hooked for hook in param.hooks.values())

    def call_hooks(self) -> None:
        touched, self._touched = self._touched, []
        for param, here in zip(self.trainable, touched, strict=False):
            for hook in list(param.hooks.values()) if here else ():
                hook(param.sharded)

    @property
    def holds_unsent(self) -> bool:
        return any(have_gradients(self.trainable))

    def incomplete_backward(self) -> bool:
        # A final callback of FSDP that was queued and has not run: the autograd engine drops it with an exception, and
        # FSDP waits for it for good, queueing no other.
        is_waiting = self._context.post_backward_final_callback_queued
        return bool(is_waiting) and (self._has_sent or any(have_gradients(self.params)))

    def discard_gathered(self) -> None:
        self.waiting_factor = None
        self._forget_interrupted_pass()
        if not self.group.is_sharded:
            self.module.reshard()
        if self.in_place is not None:
            self.in_place.free_unused()

    def end_evaluation(self, is_by_hand: bool) -> None:
        if is_by_hand and not self.group.is_sharded:
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
        undo_comms = self.swap_comms(
            OdcAllGather(self, index, communication), OdcReduceScatter(self, index, communication)
        )
        undos = [undo_comms, self._shadow_post_backward(communication)]
        if self._smaller is not None:
            if not self.group.is_sharded:  # since before this session, in FSDP2's own way
                self.module.reshard()
            undos.append(shadow(self.group, post_forward_mesh_info=self.group.mesh_info))
        if self.in_place is not None:
            undos += [STAGING.enter(), self.in_place.enter(), self._forget_results]
        elif self.is_extended:
            undos.append(STAGING.enter())

        def undo() -> None:
            while undos:
                undos.pop()()

        return undo

    def _forget_results(self) -> None:
        """Of gathers without staging that an exception has kept FSDP from using: it would take them for its own."""
        result = self.group._all_gather_result
        if result is not None and isinstance(result.all_gather_output, OdcAllGather):
            self.group._all_gather_result = None
        state = getattr(self.group.comm_ctx, "all_gather_state", None)
        if state is not None and isinstance(state.all_gather_result.all_gather_output, OdcAllGather):
            self.group.comm_ctx.all_gather_state = None

    def begin_gather(self) -> None:
        """FSDP gathers: a backward that has sent gradients may be over."""
        if self._has_sent and not self._context.post_backward_final_callback_queued:
            self._has_sent = False

    def begin_push(self) -> Sequence[bool]:
        """FSDP reduces: which trainable parameters have a gradient in it."""
        self._has_sent = self._is_sent = True
        return self._present

    def swap_comms(self, all_gather: Any, reduce_scatter: Any) -> Undo:
        """Enter by the public doors, which torch keeps shut for a module of several groups; returns the undo."""
        if len(param_groups(self.module)) > 1:
            return shadow(self.group, _all_gather_comm=all_gather, _reduce_scatter_comm=reduce_scatter)
        before = (self.group._all_gather_comm, self.group._reduce_scatter_comm)
        self.module.set_custom_all_gather(all_gather)
        self.module.set_custom_reduce_scatter(reduce_scatter)

        def undo() -> None:
            if self.group._all_gather_comm is all_gather:
                self.module.set_custom_all_gather(before[0])
            if self.group._reduce_scatter_comm is reduce_scatter:
                self.module.set_custom_reduce_scatter(before[1])

        return undo

    def _shadow_post_backward(self, communication: Communication) -> Undo:
        """Note who has a gradient, before each post-backward of this unit; leave no trace of it in ``.grad``.

        FSDP would add to what is there. It finds nothing, and what it puts there goes again. What has been sent is
        pending from then on; to that FSDP adds nothing (``PendingGradient.__iadd__``), at a fraction of the cost.
        """
        original = self.group.post_backward

        @functools.wraps(original)
        def post_backward(*args: Any) -> None:
            if self._frozen:
                self._check_late_gradients()
            self._check_settings()
            self._present = self._coming_gradients()
            self._is_sent = False
            parameters = [param.inner.sharded_param for param in self.trainable]
            is_expected = not self._is_offloaded and only_expected(self.expected, parameters)
            aside = [] if is_expected else [(parameter, parameter.grad) for parameter in parameters]
            for parameter, grad in aside:
                if grad is not None:
                    parameter.grad = None
            all_reduce_grads, self.group.all_reduce_grads = self.group.all_reduce_grads, False
            has_hooks = any([parameter._post_accumulate_grad_hooks for parameter in parameters])  # noqa: C419 (faster)
            hooked = [param for param in self.trainable if param.hooks] if has_hooks else []
            for param in hooked:  # they are called with what is final
                param.hide_hooks()
            self.reduction.is_running = True
            try:
                original(*args)
            finally:
                self.reduction.is_running = False
                for param in hooked:
                    param.show_hooks()
                self.group.all_reduce_grads = all_reduce_grads
                self.group._partial_reduce_output = None  # zeros, kept by FSDP for an all-reduce that never comes
                for parameter, grad in aside:
                    parameter.grad = grad
            if self._is_sent:
                is_waiting = self.copy_group is not None and not all_reduce_grads
                self.waiting_factor = self.divide_factor if is_waiting else None
                if not is_expected:
                    self.expect(communication.data_of, old=True)
                for index, here in enumerate(self._present):
                    if here:
                        self.expected[index].pending.is_sent = True

        return shadow(self.group, post_backward=post_backward)

    def _check_settings(self) -> None:
        """Refuse what the script has set since the model was patched, and would not be honoured."""
        self.check_doors(is_entered=True)
        if self.waiting_factor is None or self.waiting_factor == self.divide_factor:
            return
        if self.group.force_sum_reduction_for_comms or self._is_divided_before:
            raise UnsupportedError(
                f"unit {self.name!r}: set_gradient_divide_factor was called behind a microbatch with "
                "set_requires_all_reduce(False), which FSDP2 divides by the factor of the next one that all-reduces: "
                "leave set_requires_all_reduce out (ODC sums over replicas once a step, whatever it says)"
            )

    def check_doors(self, *, is_entered: bool) -> None:
        """Refuse communication of the script's own, which this session replaces or would be replaced by.

        Raises:
            UnsupportedError: naming the option.
        """
        group = self.group
        for comm, option in (
            (group._all_gather_comm, "set_custom_all_gather"),
            (group._reduce_scatter_comm, "set_custom_reduce_scatter"),
        ):
            kind = type(comm).__name__
            if isinstance(comm, _OfUnit) if is_entered else kind.startswith(_REPLACED):
                continue
            setter = "set_symm_mem_for_comm" if kind.startswith("SymmMem") else option
            raise UnsupportedError(
                f"unit {self.name!r}: {setter} ({kind}) cannot be used beside on-demand communication, which takes the "
                "place of what it sets: leave it out"
            )
        if group._all_reduce_hook is not None:
            raise UnsupportedError(
                f"unit {self.name!r}: set_all_reduce_hook is not supported (gradients are final only at the end): work "
                "on gradients after the last backward of a step"
            )

    def _coming_gradients(self) -> list[bool]:
        """Which trainable parameters the coming reduction will contain; asked when post-backward begins."""
        have = have_gradients(self.trainable)
        if getattr(self.group, "reduce_scatter_unused_params", False):
            return [here or p.full is not None for here, p in zip(have, self.trainable, strict=True)]
        return have

    def _check_late_gradients(self) -> None:
        late = [p.name for p, here in zip(self._frozen, have_gradients(self._frozen), strict=True) if here]
        if late:
            raise UnsupportedError(
                f"parameters {late} received a gradient but were frozen when the model was patched: set "
                "requires_grad before patch_fsdp (under odc run: before the first forward), or close() the session and "
                "patch again"
            )


def _as_bytes(param: FsdpParam, dtype: torch.dtype) -> torch.Tensor:
    """The shard of a parameter, where several compute dtypes in one unit travel as bytes."""
    return param.padded.to(dtype).view(torch.uint8)
