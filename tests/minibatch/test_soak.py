"""Layers 2 and 3. What accumulates: many runtimes one after the other, many microbatches in one, counters near their
limits; and what is left of a runtime that has been closed, or that a forked child has inherited.

Long runs are ``extended``; each has a short one beside it.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import streamed_minibatches
import test_protocol
import torch
from process_ranks import across, run_ranks
from thread_ranks import ThreadExchange, begin, create, run_runtimes, run_threads, sum_of, values

from odc import OdcError, ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.setup.agreement import ProcessGroupExchange
from odc.transports._control import SleepWord
from odc.transports._frames import Frame, Kind
from odc.transports._peers import notify
from odc.transports.base import Transport
from odc.transports.cuda_ipc import CudaIpcTransport
from odc.transports.nvshmem import NvshmemTransport

pytestmark = pytest.mark.usefixtures("fakes")
EXTENDED = pytest.mark.extended
DAEMON = {"accumulate": "daemon", "deterministic": True}


def units_of(numel: int, number: int = 2) -> list[UnitSpec]:
    return [UnitSpec(f"layers.{u}", numel, torch.float32, (ParamSlice("w", numel),)) for u in range(number)]


def train(runtime: Runtime, num_microbatches: int = 1) -> None:
    """One minibatch; parameters and sums are checked to the last bit."""
    world_size, rank = runtime.topology.world_size, runtime.topology.rank
    number = runtime.minibatch + 1
    for unit in range(len(runtime.units)):
        runtime.publish(unit, lambda out: out.fill_(number % 1000 + rank))
    runtime.begin()
    for microbatch in range(num_microbatches):
        for unit, spec in enumerate(runtime.units):
            out = torch.empty(world_size * spec.shard_numel)
            runtime.gather(unit, out)
            expected = [float(number % 1000 + owner) for owner in range(world_size)]
            assert torch.equal(out, torch.tensor(expected).repeat_interleave(spec.shard_numel))
            runtime.scatter_accumulate(unit, torch.full((world_size * spec.grad_numel,), rank + microbatch % 7 + 1.0))
    runtime.finish()
    addends = [r + m % 7 + 1 for r in range(world_size) for m in range(num_microbatches)]
    for unit in range(len(runtime.units)):
        assert bool((sum_of(runtime, unit) == float(sum(addends))).all())


@dataclass(frozen=True)
class Holdings:
    """What this process holds."""

    descriptors: int
    threads: int
    mappings: int
    resident_bytes: int

    @classmethod
    def now(cls) -> Holdings:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free but not given back is no leak
        status = Path("/proc/self/statm").read_text().split()
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=num_threads(),
            mappings=len(Path("/proc/self/maps").read_text().splitlines()),
            resident_bytes=int(status[1]) * os.sysconf("SC_PAGE_SIZE"),
        )

    def growth(self, before: Holdings) -> tuple[int, int, int, int]:
        return (
            self.descriptors - before.descriptors,
            self.threads - before.threads,
            self.mappings - before.mappings,
            self.resident_bytes - before.resident_bytes,
        )


# Fault test 25: many runtimes

SETTLED = 40  # runtimes after which what Python and torch keep for themselves does not grow any more
UNIT_BYTES = 1 << 20


def create_and_close(
    rank: int, world_size: int, warm_up: int, number: int, options: dict[str, Any]
) -> tuple[int, int, int, int]:
    """How much more this process holds after ``number`` runtimes than before them. Each of them has trained."""
    exchange = ProcessGroupExchange()
    for turn in range(warm_up + number):
        if turn == warm_up:
            before = Holdings.now()
        threads = num_threads()
        runtime = Runtime.create(exchange, units_of(UNIT_BYTES // 4), RuntimeConfig.from_environment(**options))
        train(runtime)
        runtime.close()
        gc.collect()  # garbage of many turns would leave holes between what stays
        if turn:  # the first one may start threads that stay
            await_end_of_threads(threads)
    return Holdings.now().growth(before)


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def await_end_of_threads(left: int) -> None:
    """A thread that has been joined is gone, with its stack, when it is next scheduled."""
    deadline = time.monotonic() + 20
    while num_threads() > left and time.monotonic() < deadline:
        time.sleep(1e-3)


def assert_constant(
    growths: list[tuple[int, int, int, int]], allowed_bytes: int = 512 << 10, allowed_mappings: int = 4
) -> None:
    for descriptors, threads, mappings, resident_bytes in growths:
        assert descriptors <= 0
        assert threads <= 0
        assert mappings <= allowed_mappings  # the heap's own come and go
        assert resident_bytes < allowed_bytes


FEW = (5, 10, 2 * UNIT_BYTES, 9)
"""Runtimes before it is counted and after, and what may grow. A leaked buffer of each would be 10 MiB, and 10 mappings.
So few leave the heap unsettled."""


@pytest.mark.parametrize(
    ("hosts", "options", "warm_up", "number", "allowed_bytes", "allowed_mappings"),
    [
        pytest.param(1, {}, *FEW, id="a few"),
        pytest.param(2, {}, *FEW, id="a few-tcp"),
        # With 3 KB left behind by each, 512 KB.
        pytest.param(1, {}, SETTLED, 200, 512 << 10, 4, id="many", marks=EXTENDED),
        pytest.param(1, DAEMON, SETTLED, 200, 512 << 10, 4, id="many-daemon", marks=EXTENDED),
        pytest.param(2, {}, SETTLED, 100, 512 << 10, 4, id="many-tcp", marks=EXTENDED),
    ],
)
def test_runtimes_leave_nothing(
    hosts: int, options: dict[str, Any], warm_up: int, number: int, allowed_bytes: int, allowed_mappings: int
) -> None:
    growths = run_ranks(2, across, hosts, create_and_close, warm_up, number, options, timeout_s=600)
    assert_constant(growths, allowed_bytes, allowed_mappings)


# Fault test 25: many microbatches

MICROBATCHES = 50  # of a minibatch


def many_microbatches(rank: int, world_size: int, number: int, options: dict[str, Any]) -> tuple[int, int, int, int]:
    units = units_of(16, number=1)
    with Runtime.create(ProcessGroupExchange(), units, RuntimeConfig.from_environment(**options)) as runtime:
        for _ in range(10):
            train(runtime, MICROBATCHES)
        before = Holdings.now()
        for _ in range(number // MICROBATCHES):
            train(runtime, MICROBATCHES)
        assert runtime.stats.pushes == number + 10 * MICROBATCHES
        return Holdings.now().growth(before)


MODES = [
    pytest.param(1, {}, id="direct"),
    pytest.param(1, {"accumulate": "daemon"}, id="daemon"),
    pytest.param(1, {"deterministic": True}, id="deterministic", marks=EXTENDED),
    pytest.param(2, {}, id="tcp"),
]


@pytest.mark.parametrize(("hosts", "options"), MODES)
@pytest.mark.parametrize("number", [1000, pytest.param(20_000, marks=EXTENDED)])
def test_many_microbatches_are_counted_and_leave_nothing(hosts: int, options: dict[str, Any], number: int) -> None:
    """With 30 bytes left behind by each of the larger number, 600 KB."""
    assert_constant(run_ranks(2, across, hosts, many_microbatches, number, options, timeout_s=800))


# Fault test 25: counters near their limits


def begin_at(runtime: Runtime, exchange: ThreadExchange, number: int) -> None:
    """As if so many minibatches, pushes, requests and signs of progress had been counted already."""
    protocol, transport = runtime._protocol, runtime._transport
    assert isinstance(transport, Transport)
    world_size, num_units = runtime.topology.world_size, len(runtime.units)
    if runtime._daemon is not None:  # first: it compares with the signals
        runtime._daemon._handled = [number] * world_size
        runtime._daemon._sent = number
    seen = [transport.peers.own, *(transport._blocks[rank] for rank in transport._elsewhere)]
    for signals in (block._signals for block in seen):
        signals[:] = array.array("q", [number] * len(signals))
    if isinstance(transport, CudaIpcTransport):
        transport._posted = dict.fromkeys(range(len(transport.peers.own._signals)), number)
        transport._words[transport._rank][:] = number % 2**32
    if isinstance(transport, NvshmemTransport):
        assert transport._word_view is not None
        transport._word_view.fill_(number)
    for link in transport._links.by_rank.values() if transport._links else ():
        link._requests = number
    transport.peers.own._status[0] = number  # progress
    runtime._store.close(number)
    protocol.state.minibatch = number
    protocol.state.published, protocol._ready = [number] * num_units, [number] * num_units
    exchange.all_gather(b"")  # nobody signals before everybody counts from there


def run_from(number: int, make_run: Callable[[ThreadExchange], Any], num_minibatches: int) -> None:
    def body(exchange: ThreadExchange) -> int:
        run = make_run(exchange)
        begin_at(run.runtime, exchange, number)
        run.run()
        return run.runtime.minibatch

    assert values(run_threads(2, body)) == [number + num_minibatches] * 2


LIMITS = [2**31 - 3, 2**32 - 3, 2**53 - 3]


@pytest.mark.parametrize(
    ("number", "hosts", "mode"),
    [  # each mode at one limit at least, those that count most at all of them
        pytest.param(number, hosts, mode, marks=() if number == LIMITS[1] or not mode[1] else EXTENDED)
        for number in LIMITS
        for hosts, mode in (
            *((1, mode) for mode in test_protocol.MODES),
            *((2, ("daemon", one)) for one in (False, True)),
        )
    ],
)
def test_counters_pass_their_limits(mode: tuple[str, bool], hosts: int, number: int) -> None:
    """Minibatches, signals, pushes, requests and progress across 31, 32 and 53 bits: every push and version counts."""
    case = test_protocol.Case(((1, 2), (2, 0), (0, 1), (1, 1), (2, 1), (1, 1)), 2, 0, 0.0, mode, hosts=hosts)

    run_from(number, lambda exchange: test_protocol.RankRun(case, exchange), len(case.counts))


@pytest.mark.parametrize("number", LIMITS)
@pytest.mark.parametrize(("hosts", "mode"), [(1, ("daemon", False)), (1, ("direct", False)), (2, ("daemon", False))])
def test_words_of_streams_pass_their_limits(hosts: int, mode: tuple[str, bool], number: int) -> None:
    """They have 32 bits on a device, and are compared across the end."""
    slow = (("fill", 1, 0.02), ("push", 1, 0.02))
    counts = ((1, 2), (2, 1), (1, 1), (1, 1), (2, 1), (1, 1))
    case = streamed_minibatches.Case(counts, 2, 0, mode, hosts=hosts, slow=slow)

    run_from(number, lambda exchange: streamed_minibatches.RankRun(case, exchange), len(counts))


@pytest.mark.parametrize("start", [2**31 - 2, 2**32 - 2])
def test_a_word_to_sleep_on_wraps(start: int) -> None:
    """It only has to differ from what it was."""
    memory = torch.zeros(64, dtype=torch.uint8)
    word = SleepWord(memory)
    word._word[0] = start
    for _ in range(4):
        ticket = word.ticket
        began = time.monotonic()
        word.sleep(ticket, 0.05)
        assert time.monotonic() - began > 0.04
        word.advance()
        word.sleep(ticket, 30.0)  # has been advanced since: returns at once
        assert time.monotonic() - began < 25.0
    assert word.ticket == (start + 4) % 2**32


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_rank_that_has_not_looked_for_long_reads_the_right_version(hosts: int) -> None:
    """Signals wait unread where a rank has no microbatch."""

    def body(runtime: Runtime, exchange: ThreadExchange) -> int:
        for _ in range(300):
            begin(runtime)
            runtime.finish()
        exchange.all_gather(b"")
        posted = runtime._transport.count(1 - exchange.rank, 0)
        exchange.all_gather(b"")
        train(runtime, 3)
        exchange.all_gather(b"")
        return posted

    assert run_runtimes(2, units_of(16), body, hosts=hosts) == [300, 300]


def test_what_is_counted_travels_in_64_bits() -> None:
    """Progress and requests of a link: at one per nanosecond they would last for 584 years."""
    for counted in (2**31, 2**32, 2**64 - 1):
        for frame in (Frame(Kind.STATUS, a=counted), Frame(Kind.READ, c=counted)):
            assert Frame.unpack(frame.pack()) == frame


def test_a_doorbell_at_its_limit_still_rings() -> None:
    bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        os.eventfd_write(bell, 2**64 - 2)
        notify(bell)  # would wait for ever, or raise
        assert os.eventfd_read(bell) == 2**64 - 2
    finally:
        os.close(bell)


# Fault test 25: closed runtimes

OPERATIONS: dict[str, Callable[[Runtime], object]] = {
    "publish": lambda runtime: runtime.publish(0, lambda out: out.zero_()),
    "begin": lambda runtime: runtime.begin(),
    "gather": lambda runtime: runtime.gather(0, torch.empty(32)),
    "scatter_accumulate": lambda runtime: runtime.scatter_accumulate(0, torch.ones(32)),
    "finish": lambda runtime: runtime.finish(),
    "gradient": lambda runtime: runtime.gradient(0),
    "published_shard": lambda runtime: runtime.published_shard(0),
}
CLOSABLE = [
    pytest.param({}, id="direct"),
    pytest.param({"accumulate": "daemon"}, id="daemon"),
    pytest.param({"deterministic": True}, id="deterministic"),
    pytest.param({"hosts": 2}, id="tcp"),
    pytest.param({"transport": "fake_cuda"}, id="cuda"),
]


@pytest.mark.parametrize("options", CLOSABLE)
@pytest.mark.parametrize("within", [False, True], ids=["after a minibatch", "within one"])
def test_a_closed_runtime_can_be_closed_again_and_not_used(options: dict[str, Any], within: bool) -> None:
    def body(exchange: ThreadExchange) -> None:
        runtime = create(exchange, units_of(16), **options)
        train(runtime)
        if within:
            begin(runtime)
            runtime.gather(0, torch.empty(32))
        exchange.all_gather(b"")
        for _ in range(3):
            runtime.close()
        runtime.abort(ValueError("too late to tell anybody"))
        for name, operation in OPERATIONS.items():
            with pytest.raises((OdcError, ValueError)) as caught:
                operation(runtime)
            if name not in ("gradient", "published_shard"):
                assert str(caught.value) == "this runtime is closed", name
        runtime.close()
        with runtime:
            pass
        assert not runtime.has_failed

    values(run_threads(2, body))


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["shared", "per-client"])
def test_what_a_closed_runtime_has_given_out_stays_readable(options: dict[str, Any]) -> None:
    def body(exchange: ThreadExchange) -> None:
        runtime = create(exchange, units_of(1 << 20, 1), **options)
        train(runtime)
        kept, shard = sum_of(runtime), runtime.published_shard(0)
        exchange.all_gather(b"")
        runtime.close()
        del runtime
        gc.collect()
        exchange.all_gather(b"")
        assert bool((kept == 3.0).all())
        assert bool((shard == 1.0 + exchange.rank).all())

    values(run_threads(2, body))


# Fault test 25: children of a rank

HUNG, REFUSED, ACCEPTED, OTHER = 20, 21, 22, 23


def in_child(action: Callable[[], object]) -> int:
    """The exit code of a forked child that does ``action``; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        code = OTHER
        try:
            action()
            code = ACCEPTED
        except OdcError:
            code = REFUSED
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return HUNG


def raising(runtime: Runtime) -> None:
    """What a script does that holds a runtime by ``with``, and whose child fails."""
    with runtime:
        raise OdcError("in a child")


CHILDREN: dict[str, Callable[[Runtime], object]] = {
    "close": lambda runtime: [runtime.close(), runtime.close()],
    "end of the interpreter": lambda runtime: atexit._run_exitfuncs(),
    "use": lambda runtime: runtime.gather(0, torch.empty(32)),
    "push": lambda runtime: runtime.scatter_accumulate(0, torch.ones(32)),
    "read": lambda runtime: [runtime.gradient(0), runtime.published_shard(0).sum().item()],
    "fail": raising,
    "nothing": lambda runtime: None,
}


def forking(rank: int, world_size: int, options: dict[str, Any]) -> list[tuple[int, int]]:
    """How children ended that were forked between two minibatches, and within one."""
    config = RuntimeConfig.from_environment(timeout_s=90, **options)
    runtime = Runtime.create(ProcessGroupExchange(), units_of(16), config)
    codes = []
    for name in CHILDREN:
        train(runtime)
        between = in_child(lambda name=name: CHILDREN[name](runtime))  # type: ignore[misc]
        train(runtime)
        begin(runtime)
        runtime.gather(0, torch.empty(32))
        runtime.scatter_accumulate(0, torch.ones(32))
        within = in_child(lambda name=name: CHILDREN[name](runtime))  # type: ignore[misc]
        codes.append((between, within))
        runtime.scatter_accumulate(0, torch.ones(32))
        runtime.finish()
        assert bool((sum_of(runtime) == 2.0 * world_size).all())
    for _ in range(3):
        train(runtime, 2)
    assert not runtime.has_failed
    runtime.close()
    return codes


ON_HOSTS = [
    pytest.param(1, {}, id="direct"),
    pytest.param(1, {"accumulate": "daemon"}, id="daemon"),
    pytest.param(2, {}, id="tcp"),
]


@pytest.mark.parametrize(("hosts", "options"), ON_HOSTS)
def test_a_forked_child_does_not_disturb_its_parent(hosts: int, options: dict[str, Any]) -> None:
    """Whatever it does with what it has inherited, however it ends. Who uses a runtime is told that it cannot, instead
    of ending by a signal."""
    for codes in run_ranks(2, across, hosts, forking, options):
        for name, found in zip(CHILDREN, codes, strict=True):
            expected = ACCEPTED if name in ("close", "end of the interpreter", "nothing") else REFUSED
            assert found == (expected, expected), name
