"""Layers 1 and 2: no processes, ranks as threads. Units whose parameters have memory of their own: gathers into a
``Destination``, pushes out of ``Rows``, against whole tensors in float64.

Gradients are small integers: every sum is exact, in bfloat16 too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_ranks import ThreadExchange, create, run_runtimes, run_threads, sum_of, values
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import odc.kernels.chunked
from odc import ParamSlice, Runtime, UnitSpec
from odc.minibatch.daemon import AccumulationDaemon
from odc.units import Destination, Layout, Rows, segments

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a row of a few elements is several of them."""
    monkeypatch.setattr(odc.kernels.chunked, "CHUNK_BYTES", 24)


@dataclass(frozen=True)
class Param:
    """As FSDP2 shards it: on dimension 0 unevenly, on dimension 1 evenly."""

    rows: int
    columns: int
    dim: int = 0

    def local_numel(self, world_size: int) -> int:
        """With padding."""
        if self.dim == 1:
            return self.rows * self.columns
        return math.ceil(self.rows / world_size) * self.columns

    def whole(self, world_size: int, seed: int) -> torch.Tensor:
        """Values of the unsharded parameter, small integers."""
        columns = self.columns * (world_size if self.dim == 1 else 1)
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(-4, 5, (self.rows, columns), generator=generator, dtype=torch.float64)

    def by_owner(self, whole: torch.Tensor, world_size: int) -> torch.Tensor:
        """[world_size, local_numel], with zeros for padding."""
        if self.dim == 1:
            return whole.view(self.rows, world_size, self.columns).transpose(0, 1).reshape(world_size, -1)
        padded = torch.zeros(world_size * self.local_numel(world_size), dtype=whole.dtype)
        padded[: whole.numel()] = whole.flatten()
        return padded.view(world_size, -1)

    def room(self, world_size: int, dtype: torch.dtype) -> torch.Tensor:
        """What a gather fills: rows by owner of memory in the parameter's own layout."""
        memory = torch.full((world_size * self.local_numel(world_size),), -99.0).to(dtype)
        if self.dim == 1:
            return memory.view(self.rows, world_size, self.columns).transpose(0, 1)
        return memory.view(world_size, -1)

    def as_rows(self, whole: torch.Tensor, world_size: int) -> Rows:
        """Of a contiguous gradient, without a copy; as FsdpParam.rows_of."""
        numel = self.local_numel(world_size)
        if self.dim == 1:
            return Rows(whole.view(self.rows, world_size, self.columns).transpose(0, 1), numel)
        exact = whole.numel() == world_size * numel
        return Rows(whole.view(world_size, numel) if exact else whole.view(-1), numel)


@dataclass(frozen=True)
class Push:
    unit: int
    present: tuple[bool, ...]
    joined: int
    """How many of the present parameters at the end travel in one part, if they follow one another."""
    is_flat: bool
    """As one flat tensor, the way of a collective."""
    dtype: torch.dtype
    seed: int


PARAM = st.builds(Param, st.integers(1, 7), st.integers(1, 5), st.sampled_from([0, 0, 0, 1]))
UNIT = st.tuples(st.lists(PARAM, min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16]))


def specs_of(units: Sequence[Any], world_size: int) -> list[UnitSpec]:
    found = []
    for number, (params, grad_dtype) in enumerate(units):
        slices = tuple(ParamSlice(f"p{i}", p.local_numel(world_size)) for i, p in enumerate(params))
        numel = sum(one.numel for one in slices)
        found.append(UnitSpec(f"u{number}", numel, torch.float32, slices, grad_dtype))
    return found


@st.composite
def pushes_of(draw: st.DrawFn, units: Sequence[Any]) -> Push:
    unit = draw(st.integers(0, len(units) - 1))
    params, grad_dtype = units[unit]
    present = draw(st.tuples(*[st.booleans()] * len(params)).filter(any) | st.just((True,) * len(params)))
    is_flat = draw(st.sampled_from([False, False, False, True]))
    # Gradients in bfloat16 may travel as they are where float32 is agreed on; a flat push is in the dtype agreed on.
    dtype = grad_dtype if is_flat else draw(st.sampled_from([torch.bfloat16, grad_dtype]))
    return Push(unit, present, draw(st.integers(0, 3)), is_flat, dtype, draw(st.integers(0, 99)))


def gradient_of(push: Push, index: int, param: Param, world_size: int, rank: int) -> torch.Tensor:
    return param.whole(world_size, push.seed * 1000 + rank * 100 + index)


def as_pushed(push: Push, params: Sequence[Param], world_size: int, rank: int) -> torch.Tensor | list[Rows]:
    here = [(i, p) for i, p in enumerate(params) if push.present[i]]
    wholes = [gradient_of(push, i, p, world_size, rank).to(push.dtype) for i, p in here]
    by_owner = [p.by_owner(whole, world_size) for (_, p), whole in zip(here, wholes, strict=True)]
    if push.is_flat:
        return torch.cat(by_owner, dim=1).flatten()
    joined = min(push.joined, len(here))
    numbers = [i for i, _ in here[len(here) - joined :]]
    if not joined or numbers != list(range(numbers[0], numbers[0] + joined)):
        joined = 0
    alone = list(zip(here, wholes, strict=True))[: len(here) - joined]
    rows = [p.as_rows(whole, world_size) for (_, p), whole in alone]
    if joined:
        together = torch.cat(by_owner[len(here) - joined :], dim=1)
        rows.append(Rows(together, together.shape[1]))
    return rows


def check_sums(runtime: Runtime, units: Sequence[Any], pushes: Sequence[Sequence[Push]], owner: int) -> None:
    """``pushes``: of each rank. Padding is zero."""
    world_size = runtime.topology.world_size
    for number, (params, _) in enumerate(units):
        expected = [torch.zeros(p.local_numel(world_size), dtype=torch.float64) for p in params]
        touched = [False] * len(params)
        for rank, of_rank in enumerate(pushes):
            for push in (one for one in of_rank if one.unit == number):
                for i, param in enumerate(params):
                    if push.present[i]:
                        whole = gradient_of(push, i, param, world_size, rank)
                        expected[i] += param.by_owner(whole, world_size)[owner]
                        touched[i] = True
        found = runtime.gradient(number)
        if not any(touched):
            assert found is None
            continue
        assert found is not None
        assert found[1] == touched
        assert found[0].tolist() == torch.cat(expected).tolist()


MODES = {
    "shared": {},
    "per-client": {"deterministic": True},
    "daemon": {"accumulate": "daemon"},
    "daemon-per-client": {"accumulate": "daemon", "deterministic": True},
    "hosts": {"hosts": 2},
    "atomic": {"transport": "fake_cuda", "accumulate": "direct"},
    "device-daemon": {"transport": "fake_cuda", "accumulate": "daemon"},
    "device-hosts": {"transport": "fake_nvshmem", "hosts": 2},
}


def begin(runtime: Runtime) -> None:
    for unit, spec in enumerate(runtime.units):
        numbers = torch.arange(spec.shard_numel) + 1000.0 * runtime.topology.rank + runtime.minibatch
        runtime.publish(unit, lambda out, numbers=numbers: out.copy_(numbers))
    runtime.begin()


def check_gathers(runtime: Runtime, places: Sequence[Destination]) -> None:
    world_size, published = runtime.topology.world_size, runtime.minibatch - 1
    for unit, there in enumerate(places):
        for out in there.outs:
            out.fill_(-99.0)
        runtime.gather(unit, there)
        start = 0
        for out, numel in zip(there.outs, [shape.numel() for shape in there.shapes], strict=True):
            for rank in range(world_size):
                expected = torch.arange(start, start + numel) + 1000.0 * rank + published
                assert out[rank].flatten().tolist() == expected.tolist()
            start += numel


@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_parts_travel_like_whole_tensors(mode: str, data: st.DataObject) -> None:
    """Random units, pushes of random parameters in random parts by 1 to 3 ranks over three minibatches: the first push
    of a minibatch is written, later ones are added, what none has is zero."""
    world_size = data.draw(st.integers(2 if "hosts" in MODES[mode] else 1, 3))
    units = data.draw(st.lists(UNIT, min_size=1, max_size=2))
    of_rank = st.lists(pushes_of(units), max_size=3)
    of_minibatch = st.lists(of_rank, min_size=world_size, max_size=world_size)
    pushes = data.draw(st.lists(of_minibatch, min_size=3, max_size=3))

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        places = [Destination([p.room(world_size, torch.float32) for p in params]) for params, _ in units]
        for k in range(3):
            begin(runtime)
            check_gathers(runtime, places)
            for push in pushes[k][exchange.rank]:
                grads = as_pushed(push, units[push.unit][0], world_size, exchange.rank)
                runtime.scatter_accumulate(push.unit, grads, present=push.present)
            runtime.finish()
            check_sums(runtime, units, pushes[k], exchange.rank)

    run_runtimes(world_size, specs_of(units, world_size), body, **MODES[mode])


@given(params=st.lists(PARAM, min_size=1, max_size=5), world_size=st.integers(1, 4), data=st.data())
def test_each_part_of_a_push_finds_its_place(params: list[Param], world_size: int, data: st.DataObject) -> None:
    spec = specs_of([(params, torch.float32)], world_size)[0]
    present = data.draw(st.tuples(*[st.booleans()] * len(params)).filter(any))
    here = [i for i, flag in enumerate(present) if flag]
    numels = [spec.params[i].numel for i in here]
    starts = [sum(p.numel for p in spec.params[:i]) for i in here]
    layout = Layout.of(spec, numels, present)
    assert list(layout.offsets) == starts
    assert sum(numels) + sum(numel for _, numel in layout.gaps) == spec.grad_numel
    assert {at for at, _ in layout.gaps} == {s.offset for s in segments(spec, present) if s.source is None}
    if all(present):
        assert list(Layout.of(spec, numels, None).offsets) == starts


@given(param=PARAM, world_size=st.integers(1, 5))
def test_rows_of_a_gradient_are_its_owners_without_padding(param: Param, world_size: int) -> None:
    whole = param.whole(world_size, 0)
    rows = param.as_rows(whole, world_size).unbind(world_size)
    assert len(rows) == world_size
    assert sum(row.numel() for row in rows) == whole.numel()
    for row, expected in zip(rows, param.by_owner(whole, world_size), strict=True):
        assert row.flatten().tolist() == expected[: row.numel()].tolist()
        assert not expected[row.numel() :].any()
        assert row.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


@given(params=st.lists(PARAM, min_size=1, max_size=4), world_size=st.integers(1, 4))
def test_a_destination_cuts_shards_as_they_were_published(params: list[Param], world_size: int) -> None:
    there = Destination([p.room(world_size, torch.float32) for p in params])
    assert there.shard_numel == sum(p.local_numel(world_size) for p in params)
    assert there.nbytes == 4 * world_size * there.shard_numel
    shard = torch.arange(float(there.shard_numel))
    parts = there.parts_of(shard)
    assert torch.equal(torch.cat([part.flatten() for part in parts]), shard)
    assert [part.shape for part in parts] == [row.shape for row in there.rows[0]]
    for out, flat in zip(there.outs, there.flat, strict=True):
        assert (flat is not None) == out.is_contiguous()
        assert flat is None or flat.data_ptr() == out.data_ptr()


@pytest.mark.parametrize("mode", ["daemon", "hosts", "device-daemon", "device-hosts"])
def test_what_a_slot_held_before_is_no_padding(mode: str) -> None:
    """Slots are used again: what a short row lacks must be zero there."""
    params = [Param(3, 2), Param(1, 4)]  # on two ranks: the last owner has one row of two, and none
    units = [(params, torch.float32)]

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        for _ in range(2):
            begin(runtime)
            full = torch.full((2 * 8,), 7.0)
            short = [params[i].as_rows(torch.ones(params[i].rows, params[i].columns), 2) for i in range(2)]
            for grads in (full, full, short, short):  # two slots for each client
                runtime.scatter_accumulate(0, grads)
            runtime.finish()
            lacks = [[False] * 8, [False, False, True, True, True, True, True, True]][exchange.rank]
            assert sum_of(runtime).tolist() == [28.0 if empty else 32.0 for empty in lacks]

    run_runtimes(2, specs_of(units, 2), body, **MODES[mode])


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mode", ["daemon", "hosts", "device-daemon", "device-hosts"])
def test_sums_of_what_is_sent_in_bf16_have_the_bits_of_float32(mode: str, world_size: int) -> None:
    """Also where another push of the same minibatch travels in float32. Half the bytes are sent."""
    params = [Param(world_size, 300), Param(2 * world_size, 5)]
    units = [(params, torch.float32)]

    def gradients(rank: int, number: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(10 * rank + number)
        values = [torch.randn(p.rows, p.columns, generator=generator) for p in params]
        return [one if (rank + number) % 3 == 0 else one.bfloat16() for one in values]

    def body(exchange: ThreadExchange) -> None:
        rank = exchange.rank
        with create(exchange, specs_of(units, world_size), **MODES[mode] | {"deterministic": True}) as runtime:
            transport, sent = runtime._transport, list[int]()
            write = transport.write
            transport.write = lambda *words: sent.append(sum(s.nbytes for s in words[3])) or write(*words)  # type: ignore[assignment, func-returns-value]
            begin(runtime)
            for number in range(3):
                grads = gradients(rank, number)
                sent.clear()
                runtime.scatter_accumulate(0, [p.as_rows(g, world_size) for p, g in zip(params, grads, strict=True)])
                assert set(sent) <= {310 * grads[0].itemsize}
                assert bool(sent) == ("hosts" in mode)
            runtime.finish()
            expected = torch.zeros(310)
            for client in range(world_size):
                rows = [
                    torch.cat([g.float().view(world_size, -1)[rank] for g in gradients(client, n)]) for n in range(3)
                ]
                expected += rows[0] + rows[1] + rows[2]
            assert torch.equal(sum_of(runtime), expected)

    values(run_threads(world_size, body))


@pytest.mark.parametrize("mode", ["daemon", "device-daemon"])
def test_pushes_of_two_dtypes_that_arrive_together_are_added(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To one sum, whichever comes first; nobody has pushed to it before."""
    look, sizes = AccumulationDaemon._look, list[int]()

    def look_for_all(self: AccumulationDaemon) -> tuple[list[int], list[int]]:
        announced, arrived = look(self)
        if len(arrived) < 3:
            return announced, []
        sizes.append(len(arrived))
        return announced, arrived

    monkeypatch.setattr(AccumulationDaemon, "_look", look_for_all)
    units = [([Param(3, 5), Param(6, 2)], torch.float32)]

    def body(runtime: Runtime, exchange: ThreadExchange) -> None:
        dtype = torch.float32 if exchange.rank == 1 else torch.bfloat16
        for minibatch in range(2):
            begin(runtime)
            pushes = [[Push(0, (True, True), 0, False, dtype, minibatch)]] * 3
            runtime.scatter_accumulate(0, as_pushed(pushes[0][0], units[0][0], 3, exchange.rank))
            runtime.finish()
            check_sums(runtime, units, pushes, exchange.rank)

    run_runtimes(3, specs_of(units, 3), body, **MODES[mode])
    assert sizes == [3] * 6


class Allocated(TorchDispatchMode):
    """Memory that operations of this thread allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.numels: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {one.untyped_storage().data_ptr() for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)}
        made = [one for one in tree_leaves(result) if torch.is_tensor(one)]
        self.numels += [one.numel() for one in made if one.untyped_storage().data_ptr() not in given]
        return result


BETWEEN_HOSTS = {
    # Parameters; dtype of gradients; elements that a gather and a push allocate for a rank of another host.
    "dense": ([Param(8, 50), Param(6, 7), Param(2, 90)], torch.float32, [], []),
    "columns": ([Param(8, 50), Param(6, 7, dim=1), Param(2, 90)], torch.float32, [42], [42]),
    "uneven": ([Param(8, 50), Param(5, 7), Param(1, 90)], torch.float32, [], [7, 90]),
    "narrower": ([Param(8, 50), Param(6, 7)], torch.bfloat16, [], []),
    "wider": ([Param(8, 50), Param(6, 7)], torch.float64, [], [200, 21]),
}


@pytest.mark.parametrize("mode", ["hosts", "device-hosts"])
@pytest.mark.parametrize("case", BETWEEN_HOSTS)
def test_between_hosts_nothing_lies_between_parameters_and_the_link(case: str, mode: str) -> None:
    """But rows that are not dense, those of a wider dtype than what is sent, and padding."""
    params, dtype, for_gather, for_push = BETWEEN_HOSTS[case]
    units = [(params, torch.float32)]

    def body(runtime: Runtime, exchange: ThreadExchange) -> tuple[list[int], list[int]]:
        places = [Destination([p.room(2, torch.float32) for p in params])]
        whole = Push(0, (True,) * len(params), 0, False, dtype, 3)
        grads = as_pushed(whole, params, 2, exchange.rank)
        for _ in range(2):  # the first ones look up what stays
            begin(runtime)
            with Allocated() as by_gather:
                runtime.gather(0, places[0])
            with Allocated() as by_push:
                runtime.scatter_accumulate(0, grads)
            runtime.finish()
            check_sums(runtime, units, [[whole], [whole]], exchange.rank)
        return by_gather.numels, by_push.numels

    found = run_runtimes(2, specs_of(units, 2), body, **MODES[mode])
    assert (
        max(numel for of_rank in found for numels in of_rank for numel in [*numels, 0])
        < specs_of(units, 2)[0].shard_numel
    )
    if mode == "hosts":  # a device has its staging memory, too
        assert found[0] == (for_gather, for_push)
        assert found[1] == (for_gather, [] if case == "uneven" else for_push)  # the first rank lacks nothing


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (1, 24), (24,), (2, 3, 4)])
@pytest.mark.parametrize("kind", ["copy", "add"])
def test_large_rows_of_several_dimensions_go_chunk_by_chunk(
    kind: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank shows its progress, and can be interrupted, at least so often."""
    monkeypatch.setattr(odc.kernels.chunked, "CHUNK_BYTES", 32)
    out, source = torch.zeros(24).view(shape), torch.arange(1.0, 25.0).view(shape)
    seen = [0]
    move = odc.kernels.copy_chunked if kind == "copy" else odc.kernels.add_chunked
    move([out], [source], lambda: seen.append(int((out != 0).sum())))
    assert torch.equal(out, source)
    steps = [after - before for before, after in itertools.pairwise(seen)]
    assert sum(steps) == 24
    assert min(steps) > 0
    assert max(steps) <= 8
