"""Move tensors between ranks by all-to-all of the process group, with gradients. (Needs torch.)

Source: OrchMLLM section 5.2.1. Only what moves is sent: a rank's part of an all-to-all is at most its own batch and the
batch that it gets (equation 4), where an all-gather would carry all batches to all ranks (equation 3).
"""

from __future__ import annotations

import json
import math
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _get_default_store

from odc.balance.data.watched_store import WatchedStore
from odc.balance.rearrange.rearrangement import Rearrangement
from odc.errors import AbortedError, OdcError, PeerDiedError, PeerSilentError, ProtocolError, shorten, shown

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
_MAX_DIMS = 6
_META = 3 + _MAX_DIMS
"""What is said of a tensor: dtype, whether it has a gradient, number of dimensions, and these."""
_FORWARD, _BACKWARD, _TELLING = 1, 2, 3
_FRAME = 9
"""Numbers that ranks swap first, whatever they are at: gloo ends a process that gets more or less than it expects."""
_ROLL_CALL_S, _LOOK_EVERY_S = 3.0, 0.05
_GONE = ("closed by peer", "reset by peer", "timed out", "broken pipe", "refused")
T = TypeVar("T")
_numbers: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""Of the last exchange of each group; the same on all of its ranks."""


def exchange(
    tensors: Sequence[torch.Tensor], rearrangement: Rearrangement, group: dist.ProcessGroup | None = None
) -> Received:
    """Move tensors between ranks as the rearrangement says. Collective, and so is the backward.

    Every rank must call it with its own tensors and the same rearrangement, also a rank that has or gets nothing.
    Shapes (also with a first dimension of 0) and dtypes may differ between items; the sender transmits them. Tensors
    that stay on their rank do not go through the process group.

    Args:
        tensors: one for each item of ``rearrangement.source[rank]``, in that order; at most 6 dimensions, all on the
            device of the group.
        rearrangement: where each item is and goes; its ranks are those of the group.
        group: default: all of ``torch.distributed``.

    Returns:
        One tensor for each item of ``rearrangement.target[rank]``, in that order. They are part of the graph:
        see :class:`Received` for how gradients go back.

    Raises:
        ValueError: a rank's tensors do not fit the rearrangement, or ranks have different rearrangements; the message
            names the first difference. Raised on all ranks before anything is sent.
        ProtocolError: another rank is at a different exchange, or at the backward of one.
        OdcError: another rank has ended or cannot be reached.

    Example:
        >>> home = [[0, 1], [2]]
        >>> rearrangement = Rearrangement.between(home, [[0], [1, 2]])  # item 1 goes from rank 0 to rank 1
        >>> received = exchange([torch.full((2,), float(item)) for item in home[rank]], rearrangement)  # on every rank
        >>> [tensor[0].item() for tensor in received] == ([0.0], [1.0, 2.0])[rank]
        True
    """
    return Received.of_group(group, list(tensors), rearrangement)


class Received(Sequence[torch.Tensor]):
    """The tensors that this rank received, in order. Made by :func:`exchange`.

    The backward is also collective: every rank must send the gradients of received tensors back to their owners. If a
    loss depends on received tensors, ``loss.backward()`` does this. A rank that received nothing, or whose loss does
    not depend on it, must call :meth:`backward`, which sends zeros. For several microbatches, compute with
    :attr:`leaves`, which accumulate gradients, and call :meth:`backward` after the last one. An extra call does
    nothing. If a rank does not come and begins another exchange, the error names it.

    Example:
        >>> home = [[0, 1], [2]]
        >>> mine = [torch.full((2,), float(item), requires_grad=True) for item in home[rank]]
        >>> received = exchange(mine, Rearrangement.between(home, [[0], [1, 2]]))
        >>> for leaf in received.leaves:  # as many microbatches as this rank got items
        ...     leaf.square().sum().backward()
        >>> received.backward()  # sends the gradients home
        >>> [tensor.grad.tolist() for tensor in mine] == [[2.0 * item] * 2 for item in home[rank]]
        True
    """

    def __init__(self, journey: _Journey, tensors: Sequence[torch.Tensor]) -> None:
        self._journey = journey
        anchor = torch.zeros((), device="cpu", requires_grad=torch.is_grad_enabled())
        self._anchor, *self._tensors = _Exchange.apply(journey, anchor, *tensors)  # type: ignore[no-untyped-call]
        self._leaves: list[torch.Tensor] | None = None
        self._has_sent_leaves = False

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup | None,
        tensors: Sequence[torch.Tensor],
        rearrangement: Rearrangement,
        problem: ValueError | None = None,
    ) -> Received:
        """:func:`exchange`; or its refusal on all ranks, because of a ``problem`` that this one has."""
        return cls(_Journey(Meeting(group), tensors, rearrangement, problem), tensors)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[torch.Tensor]: ...
    def __getitem__(self, index: int | slice) -> torch.Tensor | list[torch.Tensor]:
        found: torch.Tensor | list[torch.Tensor] = self._tensors[index]
        return found

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def leaves(self) -> list[torch.Tensor]:
        """The same tensors as leaves of separate graphs. :meth:`backward` sends their ``.grad`` to the owners."""
        if self._leaves is None:
            self._leaves = [t.detach().requires_grad_(t.requires_grad) for t in self._tensors]
        return self._leaves

    def backward(self) -> None:
        """Send the gradients of received tensors to their owners, and continue the backward of the tensors that this
        rank sent. Collective.

        Does nothing if a backward has already passed through the received tensors, or if no rank sent a tensor that has
        a gradient.
        """
        if (
            self._journey.has_returned
            and not self._has_sent_leaves
            and any(t.grad is not None for t in self._leaves or ())
        ):
            raise ProtocolError(
                "the gradients of received.leaves cannot go home: a backward has come through the tensors of the "
                "exchange themselves before. Compute with received.leaves alone, in every microbatch"
            )
        if self._journey.has_returned or not self._journey.has_gradients:
            return
        self._has_sent_leaves = True
        pairs = [
            (tensor, leaf.grad)
            for tensor, leaf in zip(self._tensors, self._leaves or (), strict=False)
            if tensor.requires_grad and leaf.grad is not None
        ]
        tensors, gradients = [tensor for tensor, _ in pairs], [grad for _, grad in pairs]
        torch.autograd.backward([self._anchor, *tensors], [torch.zeros((), device="cpu"), *gradients])


class _Exchange(torch.autograd.Function):
    """The exchange as an operation of a graph. The anchor lets a rank take part that has no tensor with a gradient."""

    @staticmethod
    def forward(ctx: Any, journey: _Journey, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.journey = journey
        out = journey.go(tensors)
        ctx.mark_non_differentiable(*[t for t, has in zip(out, journey.gets_gradients, strict=True) if not has])
        return (torch.zeros((), device="cpu"), *out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: torch.Tensor, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.journey.come_back(gradients))


class _Journey:
    """One exchange: forward, and at most once backward."""

    def __init__(
        self,
        meeting: Meeting,
        tensors: Sequence[torch.Tensor],
        rearrangement: Rearrangement,
        problem: ValueError | None = None,
    ) -> None:
        self._meeting = meeting
        self._route = rearrangement
        self.has_returned = False
        problem = problem or _problem_of(tensors, rearrangement, meeting)
        has = problem is None and torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        kinds = [device.type for device in meeting.devices]
        where = kinds.index(tensors[0].device.type) if problem is None and len(tensors) else None
        self.has_gradients = meeting.agree(rearrangement, problem, has, where)
        """Whether any rank has given a tensor away that has a gradient."""
        self.gets_gradients: list[bool] = []
        self._sent_gradients = [torch.is_grad_enabled() and t.requires_grad for t in tensors]
        self._sent_like: list[tuple[torch.Size, torch.dtype]] = [(t.shape, t.dtype) for t in tensors]

    def go(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows = [_describe(t, has) for t, has in zip(tensors, self._sent_gradients, strict=True)]
        described = [torch.tensor(row, dtype=torch.int64, device=self._meeting.device) for row in rows]
        meta = self._move(described, self._route, lambda item: ((_META,), torch.int64), self._meeting.device)
        shapes = {}
        for item, row in zip(self._route.target[self._meeting.rank].tolist(), meta, strict=True):
            dtype, has, num_dims, *dims = row.tolist()
            self.gets_gradients.append(bool(has))
            shapes[item] = (tuple(dims[:num_dims]), DTYPES[dtype])
        return self._move([t.detach() for t in tensors], self._route, shapes.__getitem__, self._meeting.data_device)

    def come_back(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        if self.has_returned:
            raise ProtocolError(
                "a second backward through one exchange: the gradients of what was received go home once. For several "
                "microbatches compute with received.leaves, and call received.backward() after the last one"
            )
        self.has_returned = True
        self._meeting.come_back(self._route)
        rank = self._meeting.rank
        # What has no gradient stays where it is, as nothing.
        like = {
            item: (tuple(shape) if has else (0,), dtype)
            for item, (shape, dtype), has in zip(
                self._route.source[rank].tolist(), self._sent_like, self._sent_gradients, strict=True
            )
        }
        given = [g if has else g.new_empty(0) for g, has in zip(gradients, self.gets_gradients, strict=True)]
        home = self._move(given, self._route.inverse(), like.__getitem__, self._meeting.data_device)
        return [g if has else None for g, has in zip(home, self._sent_gradients, strict=True)]

    def _move(
        self,
        tensors: Sequence[torch.Tensor],
        route: Rearrangement,
        shape_of: Callable[[int], tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
    ) -> list[torch.Tensor]:
        """This rank's items after ``route``; ``shape_of`` tells shape and dtype of those that come."""
        meeting, rank = self._meeting, self._meeting.rank
        mine = dict(zip(route.source[rank].tolist(), tensors, strict=True))
        others = [r for r in range(route.num_ranks) if r != rank]
        out_bytes: list[torch.Tensor] = []
        sends, receives = [0] * route.num_ranks, [0] * route.num_ranks
        for to in others:
            parts = [mine[item].contiguous().reshape(-1).view(torch.uint8) for item in route.sends(rank, to)]
            sends[to] = sum(part.numel() for part in parts)
            out_bytes += parts
        coming = {r: route.sends(r, rank) for r in others}
        for r, items in coming.items():
            receives[r] = sum(_num_bytes(*shape_of(item)) for item in items)
        empty = torch.empty(0, dtype=torch.uint8, device=device)
        came = meeting.all_to_all(torch.cat(out_bytes) if out_bytes else empty, sends, receives)
        found: dict[int, torch.Tensor] = {}
        offset = 0
        for r in others:
            for item in coming[r]:
                shape, dtype = shape_of(item)
                size = _num_bytes(shape, dtype)
                # Memory of its own: neighbours of other dtypes would leave it at an odd address.
                found[item] = came[offset : offset + size].clone().view(dtype).view(shape)
                offset += size
        return [found[item] if item in found else mine[item].clone() for item in route.target[rank].tolist()]


class Meeting:
    """The ranks of a group, and what they say to each other before they exchange.

    Args:
        group: default: all of ``torch.distributed``.

    Raises:
        RuntimeError: there is no process group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        if not dist.is_initialized():
            raise RuntimeError("exchange() needs ranks: call torch.distributed.init_process_group first")
        self.group = group
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.number = 0
        """Of this exchange among those of the group."""
        self.devices = devices_of(group)
        self.device = self.devices[0]
        """Where ranks talk."""
        self.data_device = self.device
        """Where tensors travel; the same kind on all ranks."""

    @property
    def _whole(self) -> dist.ProcessGroup:
        found: dist.ProcessGroup = self.group or dist.GroupMember.WORLD  # type: ignore[assignment]
        return found

    def name(self, rank: int) -> int:
        """The number in the job of a rank of this group, for messages."""
        return dist.get_process_group_ranks(self._whole)[rank]

    def agree(
        self, rearrangement: Rearrangement, problem: ValueError | None, has_gradients: bool, where: int | None
    ) -> bool:
        """Whether any rank has gradients to come home; refused on all ranks where one has something else in mind.

        Args:
            where: of :attr:`devices`, the one that this rank's tensors are on; None: it has none.

        Raises:
            ValueError, ProtocolError: see :func:`exchange`.
        """
        rows = self._swap_frames(_FORWARD, rearrangement, problem is not None, has_gradients, where)
        # All begin the same one, so the largest is right wherever an error has left some ranks behind.
        self.number = _numbers[self._whole] = max(row[1] for row in rows)
        if any(row[2] for row in rows):
            texts = self.tell("" if problem is None else shorten(str(problem)))
            if problem is not None:
                raise problem
            rank = next(rank for rank, row in enumerate(rows) if row[2])
            raise AbortedError(f"rank {self.name(rank)} has refused an exchange: {texts[rank]}")
        if len({tuple(row[5:]) for row in rows}) > 1:
            raise ValueError(self._difference(rearrangement))
        places = {row[4]: rank for rank, row in enumerate(rows) if row[4] >= 0}
        if len(places) > 1:
            (one, first), (other, second) = sorted(places.items())
            raise ValueError(
                f"items of rank {self.name(first)} are on {self.devices[one].type}, those of rank {self.name(second)} "
                f"on {self.devices[other].type}: expected one kind of device"
            )
        self.data_device = self.devices[next(iter(places), 0)]
        return any(row[3] for row in rows)

    def come_back(self, rearrangement: Rearrangement) -> None:
        """All ranks are at the backward of one exchange.

        Raises:
            ProtocolError: another one is somewhere else.
        """
        rows = self._swap_frames(_BACKWARD, rearrangement, False, False, None)
        if len({(row[1], *row[5:]) for row in rows}) > 1:
            raise ProtocolError(
                "ranks go back through different exchanges: backwards must come in the same order on all of them. "
                "Where the loss of a rank depends on some only of what it has received, compute with received.leaves, "
                "and call received.backward() of each exchange in one order on all ranks"
            )

    def _swap_frames(
        self, kind: int, rearrangement: Rearrangement, is_bad: bool, has: bool, where: int | None
    ) -> list[list[int]]:
        digest = np.frombuffer(rearrangement.digest(), dtype="<i8").tolist()
        number = _numbers.get(self._whole, 0) + 1 if kind == _FORWARD else self.number
        return self._swap_words([kind, number, is_bad, has, -1 if where is None else where, *digest])

    def _swap_words(self, words: list[int]) -> list[list[int]]:
        kind = words[0]
        frame = torch.tensor([*words, *[0] * (_FRAME - len(words))], dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(frame) for _ in range(self.world_size)]
        self._named(lambda: dist.all_gather(rows, frame, group=self.group))
        table = [row.tolist() for row in rows]
        for rank, row in enumerate(table):
            if row[0] != kind and _TELLING in (row[0], kind):
                one, other = map(self.name, (rank, self.rank) if kind == _TELLING else (self.rank, rank))
                raise ProtocolError(
                    f"rank {one} exchanges items, while rank {other} begins to balance a batch: every rank must call "
                    "balance_batch, and split, as often as the others, and in the same order"
                )
            if row[0] != kind:
                late, ahead = map(self.name, (rank, self.rank) if row[0] == _BACKWARD else (self.rank, rank))
                raise ProtocolError(
                    f"rank {late} is at the backward of an exchange, while rank {ahead} begins another one: its loss "
                    "did not depend on what it had received; call received.backward() on every rank after its last "
                    "backward"
                )
        return table

    def tell(self, text: str) -> list[str]:
        """What each rank says, of any length. Collective."""
        data = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8).to(self.device)
        sizes = [row[1] for row in self._swap_words([_TELLING, data.numel()])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
        padded[: data.numel()] = data
        rows = [torch.empty_like(padded) for _ in range(self.world_size)]
        self._named(lambda: dist.all_gather(rows, padded, group=self.group))
        return [row[:size].cpu().numpy().tobytes().decode() for row, size in zip(rows, sizes, strict=True)]

    def _difference(self, mine: Rearrangement) -> str:
        """What two ranks differ in; they exchange all they have."""
        lists = [[items.tolist() for items in end] for end in (mine.source, mine.target)]
        texts = self.tell(json.dumps(lists))
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        first, second = (Rearrangement.between(*json.loads(texts[rank])) for rank in (0, other))
        whose = f"ranks {self.name(0)} and {self.name(other)}"
        return f"{whose} have different rearrangements: {first.difference(second)}"

    def all_to_all(self, data: torch.Tensor, sends: list[int], receives: list[int]) -> torch.Tensor:
        """Bytes to all ranks, back to back, and from all; (sum(receives),) uint8."""
        out = torch.empty(sum(receives), dtype=torch.uint8, device=data.device)
        self._named(lambda: dist.all_to_all_single(out, data, receives, sends, group=self.group))
        return out

    def _named(self, operation: Callable[[], T]) -> T:
        """``operation``; where a connection breaks, the error says who is gone."""
        try:
            return operation()
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in _GONE):
                raise
            raise self._who_is_gone("timed out" in str(error).lower(), shorten(str(error))) from error

    def _who_is_gone(self, was_long: bool, why: str) -> OdcError:
        """Every rank of a broken exchange gets an error, and says so in the store; who is gone, or does something else,
        does not. ``was_long``: this rank has waited as long as the group allows."""
        ranks = dist.get_process_group_ranks(self._whole)
        name, silent = f"odc/exchange/{hash(tuple(ranks))}", [r for r in range(self.world_size) if r != self.rank]
        try:
            store = WatchedStore(_get_default_store, "ranks tell who is there")
            store.ask(lambda there: there.set(f"{name}/{self.rank}", "alive"), _ROLL_CALL_S)
            until = time.monotonic() + _ROLL_CALL_S
            while silent and time.monotonic() < until:
                silent = store.ask(partial(_missing, name, silent), _ROLL_CALL_S)
                time.sleep(_LOOK_EVERY_S)
        except RuntimeError:
            return PeerDiedError(
                "a rank is gone in the middle of an exchange of items, and with it the store of the process group "
                f"({why})"
            )
        if not silent:
            return PeerDiedError(
                "the connections between the ranks broke in the middle of an exchange of items; all ranks are alive "
                f"({why})"
            )
        numbers = f"rank{'s' if len(silent) > 1 else ''} {' and '.join(str(ranks[rank]) for rank in silent)}"
        if was_long:
            return PeerSilentError(
                f"{numbers} did not come to an exchange of items in time. If there is much to do before it (an "
                f"evaluation, a checkpoint), raise the timeout of the process group ({why})"
            )
        return PeerDiedError(f"{numbers} gone in the middle of an exchange of items ({why})")


def _missing(name: str, ranks: list[int], store: Any) -> list[int]:
    """Those that have not said in a store that they are alive."""
    return [rank for rank in ranks if not store.check([f"{name}/{rank}"])]


def devices_of(group: dist.ProcessGroup | None) -> list[torch.device]:
    """What tensors of a process group may be on, host memory first if it has a backend for that; with the index of the
    current device."""
    whole: Any = group or dist.GroupMember.WORLD
    found = []
    for kind in sorted({device.type for device in whole._device_types}, key=lambda kind: kind != "cpu"):
        if kind == "cpu":
            found.append(torch.device("cpu"))
        # gloo takes tensors of a device for some collectives, and not for all-to-all.
        elif torch.cuda.is_available() and whole._get_backend(torch.device(kind)).name() != "gloo":
            found.append(torch.device(kind, torch.cuda.current_device()))
    return found


def _problem_of(tensors: Sequence[Any], rearrangement: Rearrangement, meeting: Meeting) -> ValueError | None:
    """Why these tensors cannot be exchanged. Not raised here: the other ranks wait for this one's answer."""
    if rearrangement.num_ranks != meeting.world_size:
        return ValueError(
            f"the rearrangement is one of {rearrangement.num_ranks} ranks, the group has {meeting.world_size}"
        )
    items, me = rearrangement.source[meeting.rank].tolist(), meeting.name(meeting.rank)
    if len(tensors) != len(items):
        return ValueError(
            f"rank {me} gives {len(tensors)} tensors for {len(items)} items: expected one for each item of "
            "rearrangement.source"
        )
    for item, tensor in zip(items, tensors, strict=True):
        where = f"item {item} of rank {me}"
        if not isinstance(tensor, torch.Tensor):
            return ValueError(f"{where} is {shown(tensor)}: expected a tensor")
        if tensor.dtype not in DTYPES:
            return ValueError(f"{where} has dtype {tensor.dtype}: expected one of {', '.join(map(str, DTYPES))}")
        if tensor.dim() > _MAX_DIMS:
            return ValueError(f"{where} has {tensor.dim()} dimensions: expected at most {_MAX_DIMS}")
        if tensor.device.type not in [device.type for device in meeting.devices]:
            kinds = " and ".join(device.type for device in meeting.devices)
            return ValueError(f"{where} is on {tensor.device}: the group communicates on {kinds}")
        if tensor.device.type != tensors[0].device.type:
            return ValueError(f"{where} is on {tensor.device}, another one on {tensors[0].device}: expected one device")
    return None


def _describe(tensor: torch.Tensor, has_gradient: bool) -> list[int]:
    padding = [0] * (_MAX_DIMS - tensor.dim())
    return [DTYPES.index(tensor.dtype), has_gradient, tensor.dim(), *tensor.shape, *padding]


def _num_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
