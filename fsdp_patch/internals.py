"""What ODC reads of FSDP2 that has no public door, all in this file.

Read-only but for one thing: :meth:`FsdpUnit.watch_post_backward` shadows one method of one instance, reversibly, to
learn which parameters of a unit received a gradient; FSDP hands a custom reduce-scatter only their concatenation.
Everything else goes through ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``. Written for
torch 2.9 to 2.13.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc.units import ParamSlice, UnitSpec

WRITTEN_FOR_TORCH = ((2, 9), (2, 13))


def warn_if_untested() -> None:
    """Warn about a torch whose FSDP2 internals nobody has compared with this file."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not WRITTEN_FOR_TORCH[0] <= version <= WRITTEN_FOR_TORCH[1]:
        low, high = (".".join(map(str, v)) for v in WRITTEN_FOR_TORCH)
        warnings.warn(f"odc was written for torch {low} to {high}, this is {torch.__version__}", stacklevel=3)


class FsdpParam:
    """One parameter of a unit, as FSDP shards it."""

    def __init__(self, inner: Any, name: str) -> None:
        self._inner = inner
        self.name = name

    @property
    def sharded(self) -> nn.Parameter:
        """The sharded DTensor parameter the optimizer sees."""
        parameter: nn.Parameter = self._inner.sharded_param
        return parameter

    @property
    def local(self) -> torch.Tensor:
        """This rank's shard, without padding."""
        tensor: torch.Tensor = self.sharded._local_tensor  # type: ignore[attr-defined]
        return tensor

    @property
    def padded(self) -> torch.Tensor:
        """This rank's shard, flat, padded to the same length on every rank; shares memory with ``local``."""
        tensor: torch.Tensor = self._inner._sharded_param_data
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.sharded.dtype

    def compute_dtype(self, param_dtype: torch.dtype | None) -> torch.dtype:
        """What FSDP casts the parameter to for the all-gather."""
        return param_dtype if param_dtype is not None and self.dtype.is_floating_point else self.dtype

    @property
    def version(self) -> int:
        """Grows with every in-place change of the shard, through the DTensor or through its local tensor."""
        return self.sharded._version + self.local._version

    @property
    def has_gradient(self) -> bool:
        """Whether backward has left an unsharded gradient that the next reduction will take."""
        if not hasattr(self._inner, "_unsharded_param"):
            return False
        return self._inner.unsharded_accumulated_grad is not None or self._inner._unsharded_param.grad is not None

    @property
    def was_unsharded(self) -> bool:
        return hasattr(self._inner, "_unsharded_param")

    @property
    def global_shape(self) -> torch.Size:
        return self.sharded.size()

    @property
    def shard_dim(self) -> int:
        return int(self._inner.fsdp_placement.dim)


class FsdpUnit:
    """One communication unit (``FSDPParamGroup``) and the module that carries its doors."""

    def __init__(self, module: FSDPModule, group: Any, name: str, param_names: dict[int, str]) -> None:
        self.module = module
        self.group = group
        self.name = name
        self.params = [
            FsdpParam(p, param_names.get(id(p.sharded_param), f"{name}.<unnamed {i}>"))
            for i, p in enumerate(group.fsdp_params)
        ]
        self.trainable = [p for p in self.params if p.sharded.requires_grad]

    @property
    def process_group(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.group.mesh_info.shard_process_group
        return group

    @property
    def device(self) -> torch.device:
        device: torch.device = self.group.device
        return device

    @property
    def divide_factor(self) -> float:
        """What FSDP divides the sum of the ranks' gradients by."""
        factor = self.group.gradient_divide_factor
        return float(self.process_group.size()) if factor is None else float(factor)

    @property
    def param_dtype(self) -> torch.dtype | None:
        dtype: torch.dtype | None = self.group.mp_policy.param_dtype
        return dtype

    @property
    def gather_dtype(self) -> torch.dtype:
        """dtype of the all-gather: the parameters' common compute dtype, or bytes if they have several."""
        dtypes = {p.compute_dtype(self.param_dtype) for p in self.params}
        return dtypes.pop() if len(dtypes) == 1 else torch.uint8

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype in which gradients reach the reduce-scatter."""
        if self.group.mp_policy.reduce_dtype is not None:
            reduce_dtype: torch.dtype = self.group.mp_policy.reduce_dtype
            return reduce_dtype
        return self.trainable[0].compute_dtype(self.param_dtype) if self.trainable else torch.float32

    def spec(self) -> UnitSpec:
        """The unit in the runtime's terms."""
        mixed = self.gather_dtype == torch.uint8
        numel = sum(
            p.padded.numel() * (p.compute_dtype(self.param_dtype).itemsize if mixed else 1) for p in self.params
        )
        return UnitSpec(
            name=self.name,
            shard_numel=numel,
            dtype=self.gather_dtype,
            params=tuple(ParamSlice(p.name, p.padded.numel()) for p in self.trainable),
            grad_dtype=self.grad_dtype,
        )

    def fill_shard(self, out: torch.Tensor) -> None:
        """Write this rank's shard in the layout of FSDP's all-gather input, cast to the compute dtype."""
        for part, data in self._parts(out):
            part.copy_(data)

    def matches_shard(self, published: torch.Tensor) -> bool:
        """Whether ``published`` is, bit for bit, what :meth:`fill_shard` would write now."""
        return all(torch.equal(_bits(part), _bits(data.to(part.dtype))) for part, data in self._parts(published))

    def _parts(self, flat: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each parameter's place in a flat shard, and its data, of equal length."""
        offset = 0
        for param in self.params:
            dtype = param.compute_dtype(self.param_dtype)
            data = param.padded
            if flat.dtype != dtype:  # several compute dtypes in one unit travel as bytes
                data = data.to(dtype).view(torch.uint8)
            yield flat[offset : offset + data.numel()], data
            offset += data.numel()

    def present(self) -> list[bool]:
        """Which trainable parameters the coming reduction will contain; asked when post-backward begins."""
        include_unused = bool(getattr(self.group, "reduce_scatter_unused_params", False))
        return [p.has_gradient or (include_unused and p.was_unsharded) for p in self.trainable]

    def watch_post_backward(self, before: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` at the start of each post-backward of this unit; returns the undo.

        Afterwards a ``.grad`` that was None is None again: what FSDP put there is not the gradient yet, and code that
        looks too early (clipping inside the minibatch) should find nothing rather than zeros.
        """
        original = self.group.post_backward

        def post_backward(*args: Any) -> None:
            before()
            empty = [p.sharded for p in self.trainable if p.sharded.grad is None]
            original(*args)
            for parameter in empty:
                parameter.grad = None

        self.group.post_backward = post_backward

        def undo() -> None:
            if self.group.__dict__.get("post_backward") is post_backward:
                del self.group.post_backward

        return undo

    def swap_comms(self, all_gather: Any, reduce_scatter: Any) -> Callable[[], None]:
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


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same width: NaN equals itself and 0.0 is not -0.0."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])


def param_groups(module: nn.Module) -> list[Any]:
    """The FSDP2 parameter groups of exactly this module."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12: at most one group
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def find_units(model: nn.Module) -> list[FsdpUnit]:
    """All units below ``model`` in module order (a unit shared by several modules appears once)."""
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    units: dict[int, FsdpUnit] = {}
    for name, module, group in _walk(model):
        if id(group) not in units:
            units[id(group)] = FsdpUnit(module, group, name or "<root>", names)
    return list(units.values())


def _walk(model: nn.Module) -> Iterator[tuple[str, FSDPModule, Any]]:
    for name, module in model.named_modules():
        for group in param_groups(module):
            assert isinstance(module, FSDPModule)
            yield name, module, group


def all_params(units: Sequence[FsdpUnit]) -> Iterator[FsdpParam]:
    return itertools.chain.from_iterable(unit.params for unit in units)
