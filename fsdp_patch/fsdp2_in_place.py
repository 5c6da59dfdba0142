"""FSDP2 without staging buffers: a gather writes directly into parameters, a push reads directly from gradients.

A collective needs one flat buffer, so FSDP2 copies its own shard into it, the gathered data out of it into each
parameter, and all gradients into one buffer before the reduce-scatter. One-sided communication needs none of these
copies. FSDP2's public hooks (``set_custom_all_gather``) get these buffers, so they are called too late. But three
functions do all of the staging, the same ones in torch 2.9 to 2.14. During a session they are replaced for its units
(:data:`STAGING`). Everything else (states, prefetching, resharding, freeing of parameters) stays FSDP2's own.

A parameter sharded on dimension 0 consists of its owners' slices, padded to equal length; one sharded on another
dimension is a view of such slices. So both have one row per owner (:class:`~odc.units.Destination`,
:class:`~odc.units.Rows`). For small slices calls would cost more than bytes, so only these go through one buffer
(:data:`SMALL_NUMEL`).

On a CPU a gather runs when the parameters are needed, and a prefetch only requests it. On a GPU it runs on FSDP2's
all-gather stream, parallel to the computation of another unit.

[Note: Memory that is read until later] FSDP2 frees parameters when the host has launched what computes with them. That
is safe for memory of the computing stream; but that of a gather belongs to the stream that gathers, which would write
the next unit's parameters there, beside the computation. So memory that FSDP2 frees is kept (:class:`Held`) until the
gathering stream has waited for the computation. In a forward that is after the next gather, which thus overlaps with
it; in a backward before it, since the gather in question is a prefetch for the unit after the one that computes. So
the parameters of two units are there at a time, where FSDP2 has those of one and two buffers.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as torch_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult

from odc.fsdp_patch.compat import reduced
from odc.fsdp_patch.fsdp2_param import FsdpParam
from odc.fsdp_patch.unit import Undo, shadow
from odc.units import Destination, Rows

SMALL_NUMEL = 4096
"""Elements of a slice up to which one more call costs more than two more copies (16 KiB of float32: 1 us)."""


def is_small(param: FsdpParam) -> bool:
    """Whether its slices travel with those of others. These parameters are the last ones of a unit."""
    return param.numel <= SMALL_NUMEL and param.shard_dim == 0


class Held:
    """Units of one model that FSDP2 has freed, and whose memory is there still, the earliest first."""

    def __init__(self) -> None:
        self._units: deque[tuple[InPlace, Any]] = deque()

    def has(self, unit: InPlace) -> bool:
        return any(one is unit for one, _ in self._units)

    def keep(self, unit: InPlace, event: Any) -> None:
        """``event``: behind it nothing reads that memory."""
        self._units.append((unit, event))

    def make_room(self, keep: int) -> None:
        """Free all but the ``keep`` last ones."""
        while len(self._units) > keep:
            unit, event = self._units.popleft()
            unit.free(event)

    def take_back(self, unit: InPlace) -> Any:
        """The event behind which the memory of this one may be written again; None if it is not held."""
        for index, (one, event) in enumerate(self._units):
            if one is unit:
                del self._units[index]
                return event
        return None


class InPlace:
    """The parameters of one unit, and their gradients, as rows by owner.

    Args:
        params: with the dtype each is computed in; small ones last, as in the published shards and in the sums.
        grad_dtype: of what is pushed, at most.
        held: the model's, for memory that a device may still read.
    """

    def __init__(
        self,
        params: Sequence[tuple[FsdpParam, torch.dtype]],
        grad_dtype: torch.dtype,
        world_size: int,
        device: torch.device,
        held: Held,
    ) -> None:
        self._params = params
        self._grad_dtype, self._world_size, self._device = grad_dtype, world_size, device
        self._held = held
        self._stream: Any = None  # whose memory it is, on a device
        # A device takes one launch for all parts, however small.
        small = [param for param, _ in params if is_small(param)] if device.type == "cpu" else []
        self._small = small if len(small) > 1 else []
        self._trainable = [param for param, _ in params if param.sharded.requires_grad]
        self._small_grads = {id(param) for param in self._trainable if param in small}
        self._places: Destination | None = None
        self.gathered: tuple[torch.Tensor, ...] = ()
        """All memory that a gather writes; none if there was none for the first one."""
        self._small_rows = torch.empty(0, dtype=params[0][1], device=device)

    def enter(self) -> Undo:
        """On a device, keep memory that FSDP2 frees. See [Note: Memory that is read until later]."""
        if self._device.type == "cpu":
            return lambda: None
        undos = []
        for inner in [param.inner for param, _ in self._params]:
            free_later = functools.partial(self._free_later, inner.free_unsharded_param)
            undos.append(shadow(inner, free_unsharded_param=free_later))

        def undo() -> None:
            self.free_held()
            for one in undos:
                one()
            if self._stream is not None:  # full still, as an exception has left it: FSDP2 will free it at any time
                for tensor in self.gathered:
                    tensor.record_stream(_get_device_handle(self._device.type).current_stream())
                self._stream = None

        return undo

    def _free_later(self, free_now: Callable[[], None]) -> None:
        """FSDP2 calls it for each parameter."""
        if self._stream is None:  # gathered before the session came
            free_now()
        else:
            self._keep()

    def _keep(self) -> None:
        if not self._held.has(self):
            self._held.keep(self, _get_device_handle(self._device.type).current_stream().record_event())

    def free_held(self) -> None:
        """What FSDP2 has freed before, of all units."""
        self._held.make_room(keep=0)

    def free_unused(self) -> None:
        """At the end of a minibatch, when the unit is sharded: also what was gathered for a computation that did not
        come."""
        if self._stream is not None:
            self._keep()
        self.free_held()

    def free(self, event: Any) -> None:
        """The parameters' memory, which nothing reads behind ``event``."""
        self._stream.wait_event(event)
        self._stream = None
        for tensor in self.gathered:
            tensor.untyped_storage().resize_(0)

    def make_room(self, stream: Any, *, is_forward: bool) -> None:
        """Before :meth:`allocate` on this stream of a device."""
        event = self._held.take_back(self)
        self._held.make_room(keep=1 if is_forward else 0)
        if event is not None:
            stream.wait_event(event)
        elif self._stream is None:
            self._stream = stream

    def allocate(self) -> Destination:
        """Give the parameters their memory. Where a gather has to put them: the same each time."""
        for param, dtype in self._params:
            param.allocate_full(self._world_size, dtype, self._device)
        if self._places is None:
            large = self._params[: -len(self._small) or None]
            rows = [param.rows_of(param.gathered, self._world_size) for param, _ in large]
            if self._small:
                numel = sum(param.numel for param in self._small)
                self._small_rows = torch.empty(self._world_size, numel, dtype=self._params[0][1], device=self._device)
                rows.append(self._small_rows)
            self._places, self.gathered = Destination(rows), tuple(param.gathered for param, _ in self._params)
        elif self._small:
            self._small_rows.untyped_storage().resize_(self._small_rows.nbytes)
        return self._places

    def hand_out(self) -> None:
        """What was gathered into one buffer, the small ones, into each of them."""
        if self._small:
            sizes = [param.numel for param in self._small]
            outs = [param.gathered.view(self._world_size, -1) for param in self._small]
            torch.split_with_sizes_copy(self._small_rows, sizes, dim=1, out=outs)
            self._small_rows.untyped_storage().resize_(0)

    def rows(self, grads: dict[int, torch.Tensor]) -> list[Rows]:
        """Gradients as they are pushed; ``grads``: by the id of the FSDPParam, unsharded."""
        here = [(param, grads[id(param.inner)]) for param in self._trainable if id(param.inner) in grads]
        small = [(param, grad) for param, grad in here if id(param) in self._small_grads]
        if len(small) < 2 or len(small) < len(self._small_grads):
            small = []
        rows = []
        for param, grad in here[: -len(small) or None]:
            if grad.dtype.itemsize > self._grad_dtype.itemsize:  # what is sent is rounded, as by a reduce-scatter
                grad = grad.to(self._grad_dtype)
            rows.append(Rows(param.rows_of(grad.contiguous(), self._world_size), param.numel))
        if small:
            numel = sum(param.numel for param, _ in small)
            # As they were computed; but some may have been accumulated in the dtype of the reduction.
            dtype, *others = {grad.dtype for _, grad in small}
            if others or dtype.itemsize > self._grad_dtype.itemsize:
                dtype = self._grad_dtype
            together = torch.empty(self._world_size, numel, dtype=dtype, device=self._device)
            small_grads = [grad.to(dtype) for _, grad in small]
            torch._chunk_cat(small_grads, 0, self._world_size, out=together)
            rows.append(Rows(together, numel))
        return rows


class Gathering(Protocol):
    """The communication of one of our units (``fsdp2_unit.OdcAllGather``) from FSDP2's all-gather to its copy-out. It
    travels through FSDP2 as the ``all_gather_output`` of the result, where that of other units is their flat buffer."""

    @property
    def device(self) -> torch.device: ...
    def gather_in_place(self) -> None: ...


class _Functions:
    """Torch's three functions that stage, as FSDP2 calls them, by position: for the communication of units that has an
    ``in_place`` those that do not. Where a parameter has an all-gather extension, only the first one: it would ask for
    what travels. What is not an argument of interest is handed on.

    Args:
        staged: what there was before, by name, for all other units.
    """

    names = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")

    def __init__(self, staged: Sequence[Callable[..., Any]]) -> None:
        self._all_gather, self._copy_out, self._reduce = staged

    @property
    def by_name(self) -> dict[str, Callable[..., Any]]:
        return dict(zip(self.names, (self.all_gather, self.copy_out, self.reduce), strict=True))

    def all_gather(self, params: Any, group: Any, is_async: Any, into: Any, over: Any, device: Any, comm: Any) -> Any:
        if getattr(comm, "is_extended", False):
            return comm.gather_extended(into, over)
        if getattr(comm, "in_place", None) is None:
            return self._all_gather(params, group, is_async, into, over, device, comm)
        if device.type == "cpu":
            return AllGatherResult(comm, None, None, [], [], [])  # made by copy_out, where the parameters are needed
        with _get_device_handle(device.type).stream(over):
            comm.in_place.make_room(over, is_forward=comm.is_in_forward)
            comm.gather_in_place()
            return AllGatherResult(comm, over.record_event(), None, [], [], [])

    def copy_out(self, result: Any, params: Any, group: Any) -> None:
        gathering: Gathering | torch.Tensor = result.all_gather_output
        if isinstance(gathering, torch.Tensor):
            self._copy_out(result, params, group)
        elif result.all_gather_event is None:
            gathering.gather_in_place()
        else:
            _get_device_handle(gathering.device.type).current_stream().wait_event(result.all_gather_event)

    def reduce(self, params: Any, grads: Any, group: Any, stream: Any, comm: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(comm, "in_place", None) is None:
            return self._reduce(params, grads, group, stream, comm, *args, **kwargs)
        by_param = {id(param): grad for param, grad in zip(params, grads, strict=True)}
        grads.clear()
        if comm.device.type == "cpu":
            comm.push_in_place(by_param)
            return reduced(stream, None)
        handle = _get_device_handle(comm.device.type)
        stream.wait_stream(handle.current_stream())
        with handle.stream(stream):
            comm.push_in_place(by_param)
            return reduced(stream, by_param)


class _Staging:
    """Lets FSDP2 call :class:`_Functions`, while any unit is entered."""

    def __init__(self) -> None:
        self._num_units = 0
        self._undo: Undo | None = None

    def enter(self) -> Undo:
        if self._undo is None:
            # Others each time: somebody may have wrapped the last ones, and goes on calling them, which must not come
            # back to the wrapper.
            staged = [getattr(torch_group, name) for name in _Functions.names]
            self._undo = shadow(torch_group, **_Functions(staged).by_name)
        self._num_units += 1
        return self._leave

    def _leave(self) -> None:
        self._num_units -= 1
        if not self._num_units and self._undo is not None:
            self._undo()
            self._undo = None


STAGING = _Staging()
"""One for the process, as these functions are."""
