"""Transfer of samples and their lengths from workers, many samples in one piece. (Needs torch.)

A single sample would cost more to transfer than to read: each tensor of a worker takes a file descriptor and a mapping.
So a worker writes all samples of a request into one buffer.
"""

from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils import data as torch_data

from odc.balance.checks import as_integer
from odc.balance.data.reader import name_samples
from odc.errors import shown

NUM_FIRST = 12
"""Items at the beginning of a lap by which it is told whether all ranks and workers go through them in one order."""

IterableYields = Literal["all", "rank", "worker"]
"""What an iterable dataset yields, see :class:`~odc.balance.StreamLoader`."""


class Read(NamedTuple):
    """A request for samples of a dataset with indices."""

    indices: list[int]


class Snapshot(NamedTuple):
    """Where a worker is in an iterable dataset that tells its state."""

    state: Any
    """What ``dataset.state_dict()`` has returned; fit for JSON."""

    num_yielded: int
    """By the dataset in this lap, whoever these are for."""

    num_read: int
    """Samples of this worker in this lap."""


class Start(NamedTuple):
    """Where a worker is to begin."""

    snapshot: Snapshot | None
    """None: at the beginning of the lap."""

    skipped: int
    """Samples to read and leave out behind that."""

    is_ended: bool
    """It has nothing more to read in this lap."""


class Continue(NamedTuple):
    """A request for the next samples of an iterable dataset."""

    iteration: int
    """A worker that was in another one, or in another lap, begins anew."""

    lap: int
    epoch: int
    """For ``dataset.set_epoch``, if it has that."""

    most: int
    starts: tuple[Start, ...] = ()
    """For each worker that begins this lap, where; none: at the beginning."""


@dataclass
class Chunk:
    """What a request was answered with."""

    samples: list[Any] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    num_loss_tokens: list[int] = field(default_factory=list)
    names: list[int | str] = field(default_factory=list)
    """What the user knows them by: their index in the dataset, or which one they are of what it yields."""

    worker: int = 0
    lap: int = 0
    is_end: bool = False
    """Of the lap, for this worker."""

    after: Snapshot | None = None
    """Where the worker is now; None: the dataset has no state."""

    first: list[int] = field(default_factory=list)
    """Of what the first items hold that the dataset has yielded in this lap, whoever they are for; where each rank or
    worker keeps its part of them."""

    sums: list[int] = field(default_factory=list)
    """Of what the samples hold, to tell whether a state has led back to them; 0 where nothing could."""

    def add(self, sample: Any, length: int, num_loss_tokens: int, name: int | str, sum: int) -> None:
        """Another sample."""
        self.samples.append(sample)
        self.lengths.append(length)
        self.num_loss_tokens.append(num_loss_tokens)
        self.names.append(name)
        self.sums.append(sum)


@dataclass(frozen=True, eq=False)
class Measure:
    """Tells a sample's tokens and loss tokens, or what is wrong with them.

    Raises:
        ValueError: a number is missing or out of range. Errors of the functions keep their type.
    """

    length: Callable[[Any], int]
    num_loss_tokens: Callable[[Any], int] | None
    max_tokens: int

    def __call__(self, sample: Any) -> tuple[int, int]:
        length = _as_number(self.length(sample), "length", 1)
        if length > self.max_tokens:
            raise ValueError(
                f"it has {length} tokens, more than max_tokens={self.max_tokens}: raise max_tokens, or truncate it or "
                "leave it out where it is made"
            )
        if self.num_loss_tokens is None:
            return length, length - 1
        count = _as_number(self.num_loss_tokens(sample), "num_loss_tokens", 0)
        if count > length:
            raise ValueError(f"num_loss_tokens of it is {count}: expected at most its length, {length}")
        return length, count


@dataclass(eq=False)
class SampleDataset(torch_data.Dataset[Any]):
    """A dataset of chunks: its "index" is a request. One copy in each worker, which keeps its place in an iterable."""

    dataset: Any
    transform: Callable[[Any], Any] | None
    """Of what the dataset gives, see :class:`~odc.balance.StreamLoader`."""

    measure: Measure
    rank: int
    world_size: int
    iterable_yields: IterableYields

    _at: tuple[int, int] | None = None
    _iterator: Iterator[Any] = field(default_factory=lambda: iter(()))
    _num_read: int = 0
    """Samples of this worker in this lap."""
    _num_yielded: int = 0
    _first: list[int] = field(default_factory=list)
    _has_state: bool = False
    _initial: list[Any] = field(default_factory=list)
    """The state of the dataset before another one was loaded, if one was."""

    def __post_init__(self) -> None:
        self._has_state = hasattr(self.dataset, "state_dict") and hasattr(self.dataset, "load_state_dict")

    def __getitem__(self, request: Read | Continue | None) -> Chunk | bytes | torch.Tensor | None:
        if request is None:
            return None
        info = torch_data.get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        if isinstance(request, Read):
            chunk = self._read(request.indices)
        else:
            chunk = self._continue(request, worker, num_workers)
        chunk.worker = worker
        return chunk if info is None else self._packed(chunk)

    def announce_epoch(self, epoch: int) -> None:
        """Choose the epoch of a dataset that workers share with this process, before they begin to iterate.

        ``datasets`` keeps it in shared memory and adds the difference to it: two workers that chose the same epoch at a
        time would come to another one.
        """
        if hasattr(self.dataset, "epoch"):
            self._set_epoch(epoch)

    def _set_epoch(self, epoch: int) -> None:
        if hasattr(self.dataset, "set_epoch") and getattr(self.dataset, "epoch", None) != epoch:
            self.dataset.set_epoch(epoch)

    def _packed(self, chunk: Chunk) -> bytes | torch.Tensor:
        try:
            return pack_chunk(chunk)
        except Exception as error:
            for name, sample in zip(chunk.names, chunk.samples, strict=True):
                try:
                    pack_chunk(Chunk([sample]))
                except Exception as its:
                    name_samples(its, f"when sample {name} was handed over by its worker")
                    raise its from error
            raise

    def _read(self, indices: list[int]) -> Chunk:
        chunk = Chunk()
        for index in indices:
            try:
                sample = self.dataset[index]
            except Exception as error:
                name_samples(error, f"when sample {index} was read")
                raise
            self._add(chunk, sample, index)
        return chunk

    def _continue(self, request: Continue, worker: int, num_workers: int) -> Chunk:
        chunk = Chunk(lap=request.lap)
        if self._at != (request.iteration, request.lap):
            self._at = (request.iteration, request.lap)
            start = request.starts[worker] if request.starts else Start(None, 0, False)
            try:
                self._begin(start, request.epoch, worker, num_workers)
            except Exception as error:
                name_samples(error, f"when rank {self.rank} began to iterate over its dataset, epoch {request.epoch}")
                raise
            self._read_on(Chunk(), start.skipped, worker, num_workers)
        self._read_on(chunk, request.most, worker, num_workers)
        chunk.after = self._snapshot()
        chunk.first = self._first
        return chunk

    def _begin(self, start: Start, epoch: int, worker: int, num_workers: int) -> None:
        self._num_read = self._num_yielded = 0
        self._first = []
        self._set_epoch(epoch)
        if start.snapshot is not None:
            if self._has_state and not self._initial:
                self._initial.append(self.dataset.state_dict())
            state, self._num_yielded, self._num_read = start.snapshot
            self.dataset.load_state_dict(state)
        elif self._initial:  # or the state that was loaded once would be where each iteration begins
            self.dataset.load_state_dict(self._initial[0])
        self._iterator = iter(()) if start.is_ended else self._part(worker, num_workers)

    def _read_on(self, chunk: Chunk, most: int, worker: int, num_workers: int) -> None:
        for _ in range(most):
            name = self._name(worker, num_workers)
            try:
                sample = next(self._iterator)
            except StopIteration:
                chunk.is_end = True
                self._iterator = iter(())  # what it has open is closed now
                return
            except Exception as error:
                name_samples(error, f"when sample {name} was read")
                raise
            self._add(chunk, sample, name)
            self._num_read += 1

    def _snapshot(self) -> Snapshot | None:
        """None also of a dataset that has a state, if it cannot be written to a file of JSON."""
        if not self._has_state:
            return None
        try:
            state = json.loads(json.dumps(self.dataset.state_dict()))
        except (TypeError, ValueError, NotImplementedError):
            self._has_state = False
            return None
        return Snapshot(state, self._num_yielded, self._num_read)

    def _part(self, worker: int, num_workers: int) -> Iterator[Any]:
        """What this worker is to yield of what the dataset does."""
        if self.iterable_yields == "worker":
            return self._every(iter(self.dataset), 0, 1)
        whole = iter(_without_worker_info(self.dataset)) if num_workers > 1 else iter(self.dataset)
        first, every = worker, num_workers
        if self.iterable_yields == "all":
            first, every = worker * self.world_size + self.rank, num_workers * self.world_size
        return self._every(whole, first, every)

    def _every(self, items: Iterator[Any], first: int, every: int) -> Iterator[Any]:
        # Not itertools.islice: that would read on to the next multiple before it gives the last one.
        for item in items:
            self._num_yielded += 1
            if every > 1 and self._num_yielded == len(self._first) + 1 <= NUM_FIRST:
                self._first = [*self._first, sum_of(item)]
            if (self._num_yielded - 1) % every == first:
                yield item

    def _name(self, worker: int, num_workers: int) -> int | str:
        number = self._num_read
        if self.iterable_yields == "worker" and num_workers > 1:
            return f"{number} of worker {worker} of rank {self.rank}"
        number = number * num_workers + worker
        if self.iterable_yields == "all":
            return number * self.world_size + self.rank
        return f"{number} of rank {self.rank}"

    def _add(self, chunk: Chunk, sample: Any, name: int | str) -> None:
        done = "transformed"
        try:
            if self.transform is not None:
                sample = self.transform(sample)
            done = "measured"
            length, count = self.measure(sample)
        except Exception as error:
            name_samples(error, f"when sample {name} was {done}")
            raise
        chunk.add(sample, length, count, name, sum_of(sample) if self._has_state else 0)


def _without_worker_info(dataset: Iterable[Any]) -> Iterator[Any]:
    """Iterate over a dataset as if this process were no worker.

    Many iterable datasets split themselves between workers. What is split here must not have been split before: samples
    would be lost without a word.
    """
    from torch.utils.data._utils import worker as torch_worker

    info = torch_worker._worker_info
    iterator = None
    while True:
        torch_worker._worker_info = None
        try:
            if iterator is None:
                iterator = iter(dataset)
            item = next(iterator)
        except StopIteration:
            return
        finally:
            torch_worker._worker_info = info
        yield item


def _as_number(value: Any, name: str, minimum: int) -> int:
    number = as_integer(value, minimum)
    if number is None:
        raise ValueError(f"{name} of it is {shown(value)}: expected an integer of at least {minimum}")
    return number


# One buffer per chunk.


class _Pickler(pickle.Pickler):
    """Writes tensors as the bytes they are. (torch would put each into shared memory of its own.)"""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized:
            return NotImplemented  # as torch does it
        try:
            return torch.from_numpy, (value.numpy(),)
        except (TypeError, RuntimeError):  # a type that numpy has not
            data = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor_of, (data, value.dtype, tuple(value.shape))


def _tensor_of(data: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)


def sum_of(sample: Any) -> int:
    """Of what a sample holds, the same in every process; 0 where it cannot be told."""
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5).dump(sample)
    except (pickle.PicklingError, TypeError, AttributeError):
        return 0
    return zlib.crc32(file.getbuffer())


_MOST_IN_PIPE = 2**20
"""Bytes that are faster handed over in a pipe than as a file of shared memory."""


def pack_chunk(chunk: Chunk) -> bytes | torch.Tensor:
    """A chunk as bytes; where these are many, as a (n,) uint8 tensor, which torch hands over in shared memory."""
    file = io.BytesIO()
    _Pickler(file, protocol=5).dump(chunk)
    if file.tell() <= _MOST_IN_PIPE:
        return file.getvalue()
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def unpack_chunk(data: bytes | torch.Tensor) -> Chunk:
    """The chunk that :func:`pack_chunk` made this of."""
    chunk = pickle.loads(data if isinstance(data, bytes) else data.numpy().data)
    assert isinstance(chunk, Chunk)
    return chunk
