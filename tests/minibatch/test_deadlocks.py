"""Layer 2: ranks as threads. A script's own collectives inside the minibatch, on devices whose streams share queues.

A device has a number of hardware queues; more streams than that share them. A kernel of a collective spins until it has
been started on every rank, so whatever stands in front of it in its queue, and waits for a rank that has not come to
that collective yet, waits for ever. The queues are those of ``bench/fake/cuda.py``: strictly one thing after the other,
which is less than a device can do, so what ends there ends on a device. The searches go through random schedules: how
many microbatches each rank has, where in them its collectives are, which streams wait for these; in two thirds of them
pairs of ranks compute together, and meet in collectives inside forward and backward, too. Two further ones show that
the search finds what it looks for, in a daemon that lets its stream wait for pushes that have not arrived, say.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_nvshmem import AsynchronousFakeNvshmemTransport, registered_fakes
from thread_ranks import ThreadExchange, _Board, of_one_unit, run_threads, sum_of, values

from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.bench.fake import streams
from odc.bench.fake.cuda import AsynchronousFakeCudaTransport, FakeEngine
from odc.bench.fake.streams import FakeDeviceError
from odc.errors import OdcError
from odc.minibatch.accumulators import Arrived
from odc.minibatch.daemon import NUM_SLOTS, AccumulationDaemon
from odc.minibatch.protocol import MinibatchProtocol
from odc.transports.base import SymmetricBuffer
from odc.transports.cuda_ipc import CudaIpcTransport

NUMEL, NUM_UNITS = 4, 3
QUEUES = (1, 2, 8, 32)
KINDS = ("alone", "beside", "inside")
"""Whether pairs of ranks compute together: each of them in a shard group of its own, as tensor parallel ranks are, or
both in one, as context parallel ranks are."""
LENGTH = 15  # minibatches of a schedule
SCHEDULES = len(KINDS) * LENGTH  # of each mode in every run, and five times as many with ``-m extended``
STUCK_S = 0.4


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(AsynchronousFakeCudaTransport, "delay_s", 0.0)
    monkeypatch.setattr(AsynchronousFakeNvshmemTransport, "delay_s", 0.0)
    monkeypatch.setattr("odc.limits.DAEMON_PATIENCE_S", 0.005)
    with registered_fakes():
        yield


class Collectives:
    """The script's, of all ranks: each call is a kernel that spins until it runs on every rank."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._arrived: dict[str, int] = {}
        self._changed = threading.Condition()

    def kernel(self, name: str, num_ranks: int) -> None:
        deadline = time.monotonic() + self._limit_s
        with self._changed:
            self._arrived[name] = self._arrived.get(name, 0) + 1
            self._changed.notify_all()
            while self._arrived[name] < num_ranks:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise TimeoutError(f"collective {name} ran on {self._arrived[name]} of {num_ranks} ranks")


@dataclass(frozen=True)
class Schedule:
    """One minibatch: what each group of ranks that compute together does, or each rank, in its order."""

    microbatches: Sequence[int]
    """Of each group."""
    places: Sequence[Sequence[float]]
    """Of each group: where its collectives are, as parts of its minibatch, rising; equally many everywhere."""
    awaited: Sequence[bool]
    """Whether the script's stream waits for this collective."""
    after: bool
    """Another one between the end of the minibatch and the step, as of clipping."""

    @classmethod
    def draw(cls, rng: random.Random, num_groups: int) -> Schedule:
        number = rng.randint(0, 3)
        return cls(
            microbatches=[rng.choice((0, 1, 1, 2, 4)) for _ in range(num_groups)],
            places=[sorted(rng.choice((0.0, rng.random(), 1.0)) for _ in range(number)) for _ in range(num_groups)],
            awaited=[rng.random() < 0.7 for _ in range(number)],
            after=rng.random() < 0.5,
        )


class Script:
    """What one rank runs: FSDP's streams, two for collectives, and one that others are likely to share queues with.

    Args:
        group, num_partners: of ranks that compute together. Of ``num_ranks`` in all.
    """

    def __init__(
        self,
        runtime: Runtime,
        collectives: Collectives,
        rng: random.Random,
        num_ranks: int,
        group: int | None = None,
        num_partners: int = 1,
    ) -> None:
        engine = runtime._transport.engine
        assert isinstance(engine, FakeEngine)
        self.runtime, self.engine, self.collectives, self.rng = runtime, engine, collectives, rng
        self.world_size = runtime.topology.world_size
        self.num_ranks, self.num_partners = num_ranks, num_partners
        self.group = runtime.topology.rank if group is None else group
        self.wrong: list[str] = []
        streams = ["main", "gather", "push", "nccl", "other", *["partners"] * (num_partners > 1)]
        rng.shuffle(streams)
        for name in streams:  # in which order they are made says which share a queue
            engine._stream(name)

    def wait(self, stream: str, other: str) -> None:
        """``stream`` goes on when ``other`` has done what it has been given."""
        with self.engine.on(stream):
            self.engine.wait_for(other)

    def collective(self, name: str, is_awaited: bool, stream: str = "nccl", num_ranks: int = 0) -> None:
        self.wait(stream, "main")
        with self.engine.on(stream):
            self.engine.run(lambda: self.collectives.kernel(name, num_ranks or self.num_ranks))
        if is_awaited:
            self.wait("main", stream)

    def meet_partners(self, number: int, index: int) -> None:
        """Perhaps, at a place inside forward or backward: the same on all of them."""
        name = f"{number}, group {self.group}: {index}"
        rng = random.Random(name)
        if self.num_partners > 1 and rng.random() < 0.7:
            self.collective(name, rng.random() < 0.7, "partners", self.num_partners)

    def publish(self, number: int) -> None:
        for unit in range(NUM_UNITS):
            self.runtime.publish(unit, lambda shard: shard.fill_(float(number)))

    def minibatch(self, number: int, schedule: Schedule) -> None:
        self.publish(number)
        self.runtime.begin()
        steps = [(kind, unit) for _ in range(schedule.microbatches[self.group]) for kind, unit in self.microbatch()]
        places = [int(place * len(steps)) for place in schedule.places[self.group]]
        for index in range(len(steps) + 1):
            for j, place in enumerate(places):
                if place == index:
                    self.collective(f"{number}:{j}", schedule.awaited[j])
            if index < len(steps):
                self.step(number, *steps[index])
                self.meet_partners(number, index)
        self.runtime.finish()
        if schedule.after:
            self.collective(f"{number}:after", True)
        self.check(number, sum(schedule.microbatches) * self.world_size // len(schedule.microbatches))

    def microbatch(self) -> list[tuple[str, int]]:
        return [("gather", unit) for unit in range(NUM_UNITS)] + [("push", unit) for unit in range(NUM_UNITS)]

    def step(self, number: int, kind: str, unit: int) -> None:
        if kind == "gather":
            out = torch.zeros(NUMEL * self.world_size)
            with self.engine.on("gather"):
                self.runtime.gather(unit, out)
            self.wait("main", "gather")
            self.expect(f"gather {number}", out, float(number))
        else:
            grads = torch.zeros(NUMEL * self.world_size)
            self.engine.run(lambda: grads.fill_(1.0))
            self.wait("push", "main")
            with self.engine.on("push"):
                self.runtime.scatter_accumulate(unit, grads)
                self.engine.run(lambda: grads.fill_(float("nan")))

    def check(self, number: int, pushes: int) -> None:
        for unit in range(NUM_UNITS):
            result = self.runtime.gradient(unit)
            if result is None:
                assert pushes == 0
            else:
                self.expect(f"sum {number}", result[0], float(pushes))

    def expect(self, what: str, found: torch.Tensor, wanted: float) -> None:
        def compare() -> None:
            if not bool((found == wanted).all()):
                self.wrong.append(f"{what}: {found.tolist()}, expected {wanted}")

        self.engine.run(compare)


def part_of(board: _Board, ranks: Sequence[int], rank: int) -> ThreadExchange:
    """Between some of the ranks."""
    exchange = ThreadExchange(board, ranks.index(rank))
    exchange.global_ranks = ranks  # type: ignore[assignment]
    return exchange


def run_schedules(schedules: Sequence[Schedule], mode: str, seed: int, limit_s: float, kind: str) -> int:
    """How many pushes clients have kept for want of a slot. Raises what went wrong."""
    num_partners = 1 if kind == "alone" else 2
    num_ranks = len(schedules[0].microbatches) * num_partners
    collectives = Collectives(limit_s)
    boards = {number: _Board(2, 60.0) for number in range(num_ranks)}  # of shard groups, and of partners behind them
    units = [UnitSpec(f"u{u}", NUMEL, torch.float32, (ParamSlice("w", NUMEL),)) for u in range(NUM_UNITS)]

    def body(whole: ThreadExchange) -> int:
        rank, exchange, partners = whole.rank, whole, []
        group = rank // num_partners
        if kind != "alone":
            both = [2 * group, 2 * group + 1]
            partners = [(part_of(boards[2 + group], both, rank), lambda: [0])]
        if kind == "beside":
            exchange = part_of(boards[rank % 2], range(rank % 2, num_ranks, 2), rank)
        named: dict[str, Any] = {"transport": "fake_cuda_streams", "accumulate": mode}
        if mode == "hosts":
            named = {"transport": "fake_nvshmem_streams", "host_id": f"host{exchange.rank % 2}"}
        options = RuntimeConfig(timeout_s=limit_s, **named)
        kept = 0
        with Runtime.create(exchange, units, options, partners=partners) as runtime:
            script = Script(runtime, collectives, random.Random(seed * 17), num_ranks, group, num_partners)
            if runtime._daemon is not None:
                keep = runtime._daemon._keep

                def count(push: object) -> None:
                    nonlocal kept
                    kept += 1
                    keep(push)  # type: ignore[arg-type]

                runtime._daemon._keep = count  # type: ignore[method-assign]
            for number, schedule in enumerate(schedules, start=1):
                script.minibatch(number, schedule)
                assert not script.engine.errors, script.engine.errors
            script.publish(len(schedules) + 1)
            assert script.engine.synchronize(limit_s), "the device never comes to rest"
            whole.all_gather(b"")
            assert not script.engine.errors, script.engine.errors
            assert not script.wrong, script.wrong
        return kept

    return sum(values(run_threads(num_ranks, body, timeout_s=60 + 2 * limit_s)))


def search(monkeypatch: pytest.MonkeyPatch, mode: str, queues: int, number: int, limit_s: float = 30.0) -> int:
    for kind in (AsynchronousFakeCudaTransport, AsynchronousFakeNvshmemTransport):
        monkeypatch.setattr(kind, "num_queues", queues)
    kept, done, seed = 0, 0, 0
    while done < number:
        rng = random.Random(f"{queues} {seed}")
        kind = KINDS[seed % len(KINDS)]
        schedules = [Schedule.draw(rng, rng.choice((3, 4)) if kind == "alone" else 2)]
        schedules += [Schedule.draw(rng, len(schedules[0].microbatches)) for _ in range(LENGTH - 1)]
        kept += run_schedules(schedules, mode, seed, limit_s, kind)
        done, seed = done + len(schedules), seed + 1
    return kept


@pytest.mark.parametrize(
    ("mode", "queues", "number"),
    [
        pytest.param(mode, queues, number, marks=() if queues == number == 1 else pytest.mark.extended)
        for mode in ("daemon", "direct", "hosts")
        for queues in QUEUES
        for number in ((1, 5) if queues == 1 else (5,))
    ],
)
def test_no_schedule_ends_in_a_deadlock(mode: str, queues: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = search(monkeypatch, mode, queues, number * SCHEDULES)
    if mode != "direct" and queues == 1:
        assert kept > 0  # without which these schedules would not end


def wait_for_what_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's stream waits for each push, in the order in which hosts have announced them."""
    original, add = CudaIpcTransport.has_arrived, AccumulationDaemon._read_header

    def has_arrived(self: CudaIpcTransport, rank: int, index: int, count: int) -> bool:
        if index == MinibatchProtocol.num_signals(NUM_UNITS):  # posted
            return self.count(rank, index) >= count
        return original(self, rank, index, count)

    def read_header(self: AccumulationDaemon, client: int) -> Arrived:
        self._transport.order_after([client], self._posted, self._handled[client] + 1)
        return add(self, client)

    monkeypatch.setattr(CudaIpcTransport, "has_arrived", has_arrived)
    monkeypatch.setattr(AccumulationDaemon, "_read_header", read_header)


def find_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.limits.CLOSE_DEVICE_S", 0.1)
    monkeypatch.setattr(streams, "WAIT_LIMIT_S", STUCK_S)
    raised = (AssertionError, FakeDeviceError, OdcError)
    with pytest.raises(raised, match="on [123] of [234] ranks|never|waited|waits for"):
        search(monkeypatch, "daemon", 1, 1000, limit_s=STUCK_S)


def test_a_stream_that_waits_for_pushes_ends_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_what_is_announced(monkeypatch)
    find_deadlock(monkeypatch)


def test_a_client_that_waits_for_slots_ends_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the owner serves: its stream may share a queue with a kernel that waits for that client."""
    monkeypatch.setattr("odc.limits.DAEMON_PATIENCE_S", 1e9)
    find_deadlock(monkeypatch)


# Without any deadlock, too, a rank that is late holds up nobody but itself.


def come_to_rest_without_rank_0(mode: str, limit_s: float) -> None:
    """Rank 0 announces pushes that its device does not come to before those of the others are through with the whole
    minibatch.

    Raises:
        AssertionError: these have not come to rest within ``limit_s``.
    """
    world_size, microbatches = 4, 4
    units = [UnitSpec(f"u{u}", NUMEL, torch.float32, (ParamSlice("w", NUMEL),)) for u in range(NUM_UNITS)]
    release = threading.Event()

    def body(exchange: ThreadExchange) -> bool:
        options = RuntimeConfig(transport="fake_cuda_streams", timeout_s=30, accumulate=mode)
        with Runtime.create(exchange, units, options) as runtime:
            script = Script(runtime, Collectives(30), random.Random(0), world_size)
            script.publish(1)
            runtime.begin()
            if exchange.rank == 0:
                script.engine.run(lambda: release.wait(20))
                for unit in range(NUM_SLOTS):
                    script.step(1, "push", unit)
            exchange.all_gather(b"")  # all that is late has been announced
            is_at_rest = True
            if exchange.rank:
                for _ in range(microbatches):
                    for kind, unit in script.microbatch():
                        script.step(1, kind, unit)
                is_at_rest = script.engine.synchronize(limit_s)
            exchange.all_gather(b"")
            release.set()
            runtime.finish()
            late = [1.0, 1.0, 0.0]
            for unit in range(NUM_UNITS):
                script.expect("sum", sum_of(runtime, unit), 3.0 * microbatches + late[unit])
            assert script.engine.synchronize(15)
            assert not script.engine.errors
            assert not script.wrong, script.wrong
            return is_at_rest

    assert all(values(run_threads(world_size, body))), "a device waits for a slow one"


@pytest.mark.parametrize("mode", ["daemon", "direct"])
def test_no_device_waits_for_a_slow_one(mode: str) -> None:
    come_to_rest_without_rank_0(mode, 15)


def test_behind_a_stream_that_waits_for_pushes_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_what_is_announced(monkeypatch)
    with pytest.raises(AssertionError, match="a device waits for a slow one"):
        come_to_rest_without_rank_0("daemon", 1)


def push_past_an_owner(exchange: ThreadExchange, number: int, is_stuck: bool = True) -> list[float]:
    """Rank 1 pushes ``number`` times, while rank 0's daemon has no turn if it is stuck; what is in the sums then."""
    options = {"transport": "fake_cuda_streams", "accumulate": "daemon"}
    with of_one_unit(exchange, NUMEL, timeout_s=20, **options) as runtime:
        engine, release = runtime._transport.engine, threading.Event()
        assert isinstance(engine, FakeEngine)
        if exchange.rank == 0 and is_stuck:
            engine._stream("daemon").submit(lambda: release.wait(15))
        exchange.all_gather(b"")
        runtime.publish(0, lambda shard: shard.zero_())
        runtime.begin()
        for value in range(number) if exchange.rank else ():
            grads = torch.full((2 * NUMEL,), value + 1.0)
            runtime.scatter_accumulate(0, grads)
            engine.run(lambda grads=grads: grads.fill_(float("nan")))  # type: ignore[misc]
        exchange.all_gather(b"")
        release.set()
        runtime.finish()
        found = sum_of(runtime)
        assert engine.synchronize(15)
        return found.tolist()


def test_pushes_that_find_no_slot_are_kept_and_come_in_later(caplog: pytest.LogCaptureFixture) -> None:
    found = values(run_threads(2, lambda exchange: push_past_an_owner(exchange, 9)))
    assert found == [[45.0] * NUMEL] * 2
    (said,) = [record.message for record in caplog.records if "keeps pushes" in record.message]
    assert "rank 1 keeps pushes in memory of its own: for 0.005 s, rank 0 has not come to add earlier ones" in said


def test_a_slow_owner_slows_its_clients_before_they_keep_more_than_all_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most: list[int] = []
    keep = AccumulationDaemon._keep

    def note(self: AccumulationDaemon, push: object) -> None:
        keep(self, push)  # type: ignore[arg-type]
        most.append(self._kept_bytes)

    monkeypatch.setattr(AccumulationDaemon, "_keep", note)
    add_slots = FakeEngine.add_slots

    def add_slowly(self: FakeEngine, *arguments: Any) -> None:
        self.run(lambda: time.sleep(0.02))
        add_slots(self, *arguments)

    monkeypatch.setattr(FakeEngine, "add_slots", add_slowly)
    monkeypatch.setattr("odc.limits.DAEMON_PATIENCE_S", 10.0)
    monkeypatch.setattr(AccumulationDaemon, "_await_room", impatient(AccumulationDaemon._await_room))
    found = values(run_threads(2, lambda exchange: push_past_an_owner(exchange, 20, is_stuck=False)))
    assert found == [[210.0] * NUMEL] * 2
    one = 2 * NUMEL * 4  # bytes of a push, which is of all units
    assert one < max(most) <= 2 * one


def impatient(original: Callable[[AccumulationDaemon, float], bool]) -> Callable[[AccumulationDaemon, float], bool]:
    """With patience for what is kept already only."""
    return lambda self, patience_s: original(self, patience_s if self._kept else 0.0)


def test_the_buffers_of_a_daemon_are_two_slots_of_each_client() -> None:
    def body(exchange: ThreadExchange) -> int:
        with of_one_unit(exchange, 100, transport="fake_cuda", accumulate="daemon") as runtime:
            assert runtime._daemon is not None
            slots: SymmetricBuffer = runtime._daemon._slots
            return slots.num_bytes

    assert values(run_threads(2, body)) == [2 * NUM_SLOTS * 448] * 2
