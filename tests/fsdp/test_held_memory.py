"""Layer 1: no processes. When the memory of freed parameters may be written again, on a device whose streams are
simulated: as far as anybody has waited, one stream may be ahead of or behind another by any amount.

FSDP2's own waits between its streams are left out: they are made for buffers that are not there in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.fsdp_patch import fsdp2_in_place
from odc.fsdp_patch.fsdp2_in_place import Held, InPlace, _Functions

Clock = dict[str, int]

FUNCTIONS = _Functions([lambda *args: None] * 3)


class Stream:
    """Knows how far it is behind every other one."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.clock: Clock = {name: 0}

    def record_event(self) -> Clock:
        self.device.log.append(f"{self.name}: record")
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        self.device.log.append(f"{self.name}: wait")
        for name, time in event.items():
            self.clock[name] = max(self.clock.get(name, 0), time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(dict(other.clock))

    def launch(self) -> tuple[str, int]:
        """One more operation."""
        self.clock[self.name] += 1
        return self.name, self.clock[self.name]

    def is_behind(self, operation: tuple[str, int]) -> bool:
        return self.clock.get(operation[0], 0) >= operation[1]


class Block:
    """Memory of one stream, and what has been launched that uses it."""

    def __init__(self, owner: Stream) -> None:
        self.owner = owner
        self.writes: list[tuple[str, int]] = []
        self.reads: list[tuple[str, int]] = []
        self.recorded: list[Stream] = []


class Device:
    """What ``_get_device_handle`` returns; and torch's allocator: what is freed is the next that its stream gets."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.compute, self.gathering, self.pushing = (Stream(self, name) for name in ("compute", "gather", "push"))
        self._current = self.compute
        self.free: dict[str, list[Block]] = {}
        self.num_used = self.most_used = 0

    def current_stream(self) -> Stream:
        return self._current

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def take(self) -> Block:
        self.num_used += 1
        self.most_used = max(self.most_used, self.num_used)
        pool = self.free.setdefault(self._current.name, [])
        return pool.pop() if pool else Block(self._current)

    def give_back(self, block: Block) -> None:
        self.num_used -= 1
        if not block.recorded:  # torch asks the host when these are done; here it is as if they never were
            self.free.setdefault(block.owner.name, []).append(block)


class Memory:
    """A tensor as far as it is used here, which is its own storage."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.block: Block | None = None

    def untyped_storage(self) -> Memory:
        return self

    def resize_(self, num_bytes: int) -> None:
        if num_bytes and self.block is None:
            self.block = self.device.take()
            self.device.log.append(f"{self.name}: take")
        elif not num_bytes and self.block is not None:
            self.device.give_back(self.block)
            self.block = None
            self.device.log.append(f"{self.name}: free")

    def record_stream(self, stream: Stream) -> None:
        assert self.block is not None
        self.block.recorded.append(stream)

    def write(self) -> None:
        assert self.block is not None
        stream = self.device.current_stream()
        for operation in self.block.reads:
            assert stream.is_behind(operation), f"{self.name} is written while {operation} may still read it"
        for operation in self.block.writes:
            assert stream.is_behind(operation), f"{self.name} is written while {operation} may still write it"
        self.block.writes, self.block.reads = [stream.launch()], []

    def read(self) -> None:
        assert self.block is not None, f"{self.name} is read and was freed"
        stream = self.device.current_stream()
        for operation in self.block.writes:
            assert stream.is_behind(operation), f"{self.name} is read before {operation} has written it"
        self.block.reads.append(stream.launch())


class Inner:
    """An FSDPParam."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def free_unsharded_param(self) -> None:
        self.memory.resize_(0)


class Param:
    """An FsdpParam."""

    shard_dim = 0

    def __init__(self, device: Device, name: str) -> None:
        self.inner = Inner(Memory(device, name))
        self.sharded = torch.zeros(1, requires_grad=True)

    @property
    def gathered(self) -> Memory:
        return self.inner.memory

    def allocate_full(self, world_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.gathered.resize_(1)

    def rows_of(self, whole: Memory, world_size: int) -> torch.Tensor:
        return torch.zeros(2, 1)


class Unit:
    """What FSDP2 does with one parameter group, and what it hands to the functions that stage."""

    def __init__(self, device: Device, held: Held, number: int, num_params: int = 2) -> None:
        self.simulated, self.device = device, torch.device("meta")
        self.params = [Param(device, f"unit {number}.{i}") for i in range(num_params)]
        self.in_place = InPlace([(p, torch.float32) for p in self.params], torch.float32, 2, self.device, held)  # type: ignore[misc]
        self.is_in_forward = True
        self.result: Any = None
        self.is_sharded = True

    def gather_in_place(self) -> None:
        self.in_place.allocate()
        for param in self.params:
            param.gathered.write()

    def gather(self, is_in_forward: bool, over: Stream) -> None:
        if self.result is None and self.is_sharded:
            self.is_in_forward = is_in_forward
            self.result = FUNCTIONS.all_gather(None, None, False, None, over, self.device, self)

    def compute(self, is_in_forward: bool, over: Stream) -> None:
        self.gather(is_in_forward, over)
        if self.result is not None:
            FUNCTIONS.copy_out(self.result, None, None)
            self.result, self.is_sharded = None, False
        for param in self.params:
            param.gathered.read()

    def reshard(self) -> None:
        if not self.is_sharded:
            for param in self.params:
                param.inner.free_unsharded_param()
            self.is_sharded = True

    def end(self) -> None:
        """As Fsdp2Unit.discard_gathered."""
        if self.result is not None:  # FSDPParamGroup.finalize_backward
            self.simulated.current_stream().wait_event(self.result.all_gather_event)
            self.result = None
        self.reshard()
        self.in_place.free_unused()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(fsdp2_in_place, "_get_device_handle", lambda kind: device)
    return device


def units_of(device: Device, count: int, num_params: int = 1) -> list[Unit]:
    held = Held()
    units = [Unit(device, held, number, num_params) for number in range(count)]
    for unit in units:
        unit.undo = unit.in_place.enter()  # type: ignore[attr-defined]
    return units


def forward(units: Sequence[Unit], device: Device) -> None:
    for unit in units:
        unit.compute(True, device.gathering)
        unit.reshard()


def backward(units: Sequence[Unit], device: Device) -> None:
    """Each one's prefetch comes before its computation."""
    for number in reversed(range(len(units))):
        units[number].gather(False, device.gathering)
        if number:
            units[number - 1].gather(False, device.gathering)
        units[number].compute(False, device.gathering)
        units[number].reshard()


def test_in_a_forward_the_gather_of_a_unit_overlaps_with_the_computation_before_it(device: Device) -> None:
    units = units_of(device, 4)
    forward(units[:2], device)
    clock = dict(device.gathering.clock)
    assert "compute" not in clock  # it has waited for nothing: unit 1 was gathered beside the computation of unit 0
    device.log.clear()
    units[2].gather(True, device.gathering)
    assert device.log == ["gather: wait", "unit 0.0: free", "unit 2.0: take", "gather: record"]
    assert device.gathering.clock["compute"] == 1  # for the computation of unit 0 alone


def test_in_a_backward_the_prefetch_waits_for_the_unit_that_was_freed_last(device: Device) -> None:
    units = units_of(device, 4)
    forward(units, device)
    units[3].compute(False, device.gathering)
    units[2].gather(False, device.gathering)
    units[3].reshard()
    units[2].compute(False, device.gathering)
    device.log.clear()
    units[1].gather(False, device.gathering)
    assert device.log == ["gather: wait", "unit 3.0: free", "unit 1.0: take", "gather: record"]
    assert device.gathering.clock["compute"] == 5  # four forwards and a backward, not the one that computes now


@pytest.mark.parametrize("num_units", [1, 2, 5])
def test_two_units_are_there_at_a_time(num_units: int, device: Device) -> None:
    units = units_of(device, num_units)
    for _ in range(2):
        forward(units, device)
        backward(units, device)
    assert device.most_used == min(num_units, 2)


def test_a_unit_that_is_gathered_again_while_its_memory_is_kept_waits_and_writes_there(device: Device) -> None:
    unit = units_of(device, 1)[0]
    unit.compute(True, device.gathering)
    unit.reshard()
    memory = unit.params[0].gathered
    block = memory.block
    assert block is not None
    device.log.clear()
    unit.gather(False, device.gathering)
    assert memory.block is block
    assert device.log == ["gather: wait", "gather: record"]
    assert device.gathering.clock["compute"] == 1


def test_memory_from_before_the_session_is_freed_at_once(device: Device) -> None:
    held = Held()
    unit = Unit(device, held, 0)
    unit.is_sharded = False
    for param in unit.params:
        param.gathered.resize_(1)
    undo = unit.in_place.enter()
    unit.reshard()
    assert device.num_used == 0
    assert device.log[-1] == "unit 0.1: free"
    undo()


def test_at_the_end_of_a_minibatch_nothing_is_kept(device: Device) -> None:
    units = units_of(device, 3)
    forward(units, device)
    assert device.num_used == 2
    for unit in units:
        unit.end()
    assert device.num_used == 0


def test_a_prefetch_that_nobody_used_is_freed_at_the_end_of_the_minibatch(device: Device) -> None:
    units = units_of(device, 2)
    units[1].gather(True, device.gathering)
    for unit in units:
        unit.end()
    assert device.num_used == 0
    units[1].compute(True, device.compute)
    units[1].end()
    assert device.num_used == 0


def test_a_closed_session_keeps_nothing_and_leaves_no_trace(device: Device) -> None:
    units = units_of(device, 2)
    forward(units, device)
    for unit in units:
        unit.undo()  # type: ignore[attr-defined]
        for param in unit.params:
            assert vars(param.inner) == {"memory": param.gathered}
    assert device.num_used == 0


def test_memory_that_an_exception_has_left_full_is_not_written_while_it_is_read(device: Device) -> None:
    left, other = units_of(device, 2)
    left.compute(True, device.gathering)
    left.undo()  # type: ignore[attr-defined]
    left.reshard()  # FSDP2, whenever it likes
    assert device.num_used == 0
    other.gather(True, device.gathering)  # of another session
    assert left.params[0].gathered.block is None


def test_a_first_gather_that_finds_no_memory_leaves_nothing_to_free(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    unit = units_of(device, 1)[0]

    def out_of_memory(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(Param, "allocate_full", out_of_memory)
    monkeypatch.setattr(Param, "gathered", property(lambda self: self.inner.all_gather_outputs[0]))
    with pytest.raises(MemoryError):
        unit.gather(True, device.gathering)
    unit.in_place.free_unused()
    unit.undo()  # type: ignore[attr-defined]


ACTIONS = st.one_of(
    st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 3)),
    st.tuples(
        st.sampled_from(["prefetch forward", "prefetch backward", "compute", "by hand", "reshard"]), st.integers(0, 3)
    ),
    st.just(("end", 0)),
    st.just(("step", 0)),
)


def run_schedule(actions: Sequence[tuple[str, int]], device: Device, num_params: int = 2) -> None:
    units = units_of(device, 4, num_params)
    for action, number in actions:
        unit = units[number]
        if action in ("forward", "backward"):
            unit.compute(action == "forward", device.gathering)
            unit.reshard()
        elif action.startswith("prefetch"):
            unit.gather(action.endswith("forward"), device.gathering)
        elif action == "compute":
            unit.compute(True, device.gathering)
        elif action == "by hand":  # unshard() gathers on the current stream
            unit.compute(False, device.current_stream())
        elif action == "reshard":
            unit.reshard()
        elif action == "end":
            for one in units:
                one.end()
            assert device.num_used == 0
        elif action == "step":  # FSDP2's root forward: its streams go on behind what was launched
            device.gathering.wait_stream(device.compute)
    for one in units:
        one.end()
        one.undo()  # type: ignore[attr-defined]
    assert device.num_used == 0


@settings(max_examples=150, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40))
def test_no_schedule_writes_what_is_still_read(actions: list[tuple[str, int]]) -> None:
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp2_in_place, "_get_device_handle", lambda kind: device)
        run_schedule(actions, device)


def test_the_simulation_sees_memory_that_is_freed_too_early(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InPlace, "_free_later", lambda self, free_now: free_now())
    with pytest.raises(AssertionError, match="may still read it"):
        run_schedule([("forward", number) for number in range(3)], device)


def test_the_simulation_sees_a_gather_that_waits_for_nobody(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Held, "take_back", lambda self, unit: None)
    with pytest.raises(AssertionError, match="may still read it"):
        run_schedule([("forward", 0), ("forward", 0)], device)
