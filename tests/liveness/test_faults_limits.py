"""Layer 3: ranks as processes. Fault test 14: a process may have too few descriptors or too little address space.

Limits count from what a rank uses when it comes to patch, so that torch and the process group have what they need.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from faulty_ranks import TIMEOUT
from process_ranks import RankResult, across, start_ranks
from training import build, full_parameters, largest_difference, reference, shard, train
from watching import until

import odc
from odc import ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.liveness.gloo import num_connections
from odc.setup.agreement import ProcessGroupExchange

WORLD_SIZE = 3
COUNTS = [1, 3, 2]
MIB = 1 << 20
_M_ARENA_MAX = -8
ROOM = 96 * MIB  # address space that is left

HOSTS = pytest.mark.parametrize("hosts", [1, WORLD_SIZE], ids=["one host", "three hosts"])
LIMITED = pytest.mark.parametrize(
    "limited", [[1], pytest.param([0, 1, 2], marks=pytest.mark.extended)], ids=["one rank", "all ranks"]
)


class Limit:
    """A soft limit of this process, a little above what it uses now, while a block runs."""

    def __init__(self, kind: int, more: int) -> None:
        self._kind = kind
        self._old = resource.getrlimit(kind)
        self.value = used(kind) + more

    def __enter__(self) -> Limit:
        resource.setrlimit(self._kind, (self.value, self._old[1]))
        return self

    def __exit__(self, *error: object) -> None:
        resource.setrlimit(self._kind, self._old)


def used(kind: int) -> int:
    if kind == resource.RLIMIT_NOFILE:
        return len(os.listdir("/proc/self/fd")) - 1  # one is listdir's own
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def holdings() -> tuple[int, list[str]]:
    """Open descriptors, and threads that are ODC's."""
    gc.collect()  # whatever it closes is not to be closed between two counts
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("odc-")]
    return used(resource.RLIMIT_NOFILE), names


def failure_under(limit: Limit, action: Callable[[], object]) -> tuple[str, str]:
    """How ``action`` fails under a limit."""
    try:
        with limit:
            action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "it did not fail"


def assert_all_fail_and_say(results: list[RankResult], limited: list[int], *words: str) -> None:
    """A :class:`SetupError` on every rank: with ``words``, and on those with room enough who it was."""
    assert all(r.error is None for r in results), [r.error for r in results]
    for rank, result in enumerate(results):
        kind, text = result.value
        assert kind == "SetupError", result.value
        for word in words:
            assert word in text, f"rank {rank}: {word!r} not in: {text}"
        if rank not in limited:
            assert f"set-up failed on rank {limited[0]}: " in text


# Descriptors


def with_few_descriptors(rank: int, world_size: int, more: int, limited: list[int]) -> tuple[str, str]:
    """How patching fails. Nothing is left of it, and a second one, without the limit, trains."""
    model = shard(build(), world_size)
    before = holdings()
    limit = Limit(resource.RLIMIT_NOFILE, more if rank in limited else 10_000)
    failure = failure_under(limit, lambda: odc.patch_fsdp(model))
    assert holdings() == before
    session = odc.patch_fsdp(model)
    train(model, session, rank, world_size, COUNTS, 3)
    session.close()
    assert largest_difference(full_parameters(model), reference(COUNTS, 3)) < 1e-5
    return failure


@pytest.mark.parametrize(
    ("more", "limited", "hosts"),
    [
        pytest.param(more, limited, hosts, marks=() if more == 2 and hosts == len(limited) else pytest.mark.extended)
        for more in (1, 2, 35)
        for limited in ([1], [0, 1, 2])
        for hosts in (1, WORLD_SIZE)
    ],
)
def test_too_few_descriptors_are_named_on_all_ranks(more: int, limited: list[int], hosts: int) -> None:
    """One or two to spare, and almost enough: the kernel is not asked for what it would refuse half-way.

    Without any, a rank cannot ask a store that is a file, and so cannot tell the others.
    """
    results = start_ranks(WORLD_SIZE, across, hosts, with_few_descriptors, more, limited, env=TIMEOUT).join(150)
    assert_all_fail_and_say(results, limited, "too few file descriptors", "limit ", "Raise it with `ulimit -n 4096`")
    for rank in limited:
        assert " in use, " in results[rank].value[1]


def test_connections_are_not_counted_where_no_descriptor_is_left_to_look_with() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        found = num_connections()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found is None
    assert num_connections() is not None


def with_just_enough_descriptors(rank: int, world_size: int, accumulate: str) -> int:
    """Patch with as many as set-up asks for, and then with one fewer. How many it asks for."""
    model = shard(build(), world_size)
    gc.collect()
    with Limit(resource.RLIMIT_NOFILE, 2), pytest.raises(odc.SetupError) as caught:
        odc.patch_fsdp(model, accumulate=accumulate)
    needed = int(str(caught.value).partition(" in use, ")[2].split()[0])
    with Limit(resource.RLIMIT_NOFILE, needed), pytest.raises(odc.SetupError, match="too few file descriptors"):
        odc.patch_fsdp(model, accumulate=accumulate)  # finding out what is in use takes one
    with Limit(resource.RLIMIT_NOFILE, needed + 1):
        session = odc.patch_fsdp(model, accumulate=accumulate)
        train(model, session, rank, world_size, [1] * world_size, 2)
        session.close()
    return needed


@pytest.mark.parametrize(
    ("world_size", "hosts"),
    [(3, 1), (3, 3), pytest.param(12, 1, marks=pytest.mark.extended), pytest.param(8, 8, marks=pytest.mark.extended)],
)
def test_as_many_descriptors_as_set_up_asks_for_are_enough(world_size: int, hosts: int) -> None:
    results = start_ranks(world_size, across, hosts, with_just_enough_descriptors, "daemon", env=TIMEOUT).join(240)
    assert all(r.error is None for r in results), [r.error for r in results]
    assert all(r.value > 2 for r in results)


# Address space


def one_arena() -> None:
    """Else malloc takes 64 MiB of address space for some threads, it depends on chance for how many."""
    assert ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1) == 1


def with_little_room(rank: int, world_size: int, limited: list[int], numel: int, stack: int) -> tuple[str, str]:
    """As :func:`with_few_descriptors`, with :data:`ROOM` left.

    Args:
        numel: of each rank's shard of the only unit, in elements of 4 bytes.
        stack: size of a thread's stack.
    """
    one_arena()
    large, small = (UnitSpec("layers.0", n, torch.float32, (ParamSlice("w", n),)) for n in (numel, 4))
    config = RuntimeConfig.from_environment(accumulate="daemon")
    exchange = ProcessGroupExchange()
    before, space = holdings(), used(resource.RLIMIT_AS)
    threading.stack_size(stack if rank in limited else 0)
    limit = Limit(resource.RLIMIT_AS, ROOM if rank in limited else 1 << 40)
    failure = failure_under(limit, lambda: Runtime.create(exchange, [large], config))
    threading.stack_size(0)
    assert holdings() == before
    # A thread that has been joined gives its stack back when it is next scheduled.
    until(lambda: used(resource.RLIMIT_AS) - space < ROOM // 2, "what was mapped stays mapped", 20.0)
    with Runtime.create(exchange, [small], config) as runtime:
        runtime.publish(0, lambda out: out.fill_(rank))
        runtime.begin()
        out = torch.empty(4 * world_size)
        runtime.gather(0, out)
        runtime.scatter_accumulate(0, torch.ones(4 * world_size))
        runtime.finish()
        assert out.tolist() == [float(owner) for owner in range(world_size) for _ in range(4)]
        assert runtime.gradient(0)[0].tolist() == [float(world_size)] * 4  # type: ignore[index]
        exchange.all_gather(b"")
    return failure


LARGE = {"numel": ROOM // 4 + MIB, "stack": 0}
THREADS = {"numel": 4, "stack": 4 * ROOM}


def without_room(hosts: int, limited: list[int], numel: int, stack: int) -> list[RankResult]:
    return start_ranks(WORLD_SIZE, across, hosts, with_little_room, limited, numel, stack, env=TIMEOUT).join(150)


@HOSTS
@LIMITED
def test_too_little_address_space_for_memory_is_an_error_on_all_ranks(limited: list[int], hosts: int) -> None:
    results = without_room(hosts, limited, **LARGE)
    words = ("cannot map ", " MiB of shared memory: Cannot allocate memory", "address space", "ulimit -v unlimited")
    assert_all_fail_and_say(results, limited, *words)


@pytest.mark.parametrize("hosts", [pytest.param(1, marks=pytest.mark.extended), WORLD_SIZE])
@LIMITED
def test_too_little_address_space_for_a_thread_is_an_error_on_all_ranks(limited: list[int], hosts: int) -> None:
    results = without_room(hosts, limited, **THREADS)
    assert all(r.error is None for r in results), [r.error for r in results]
    for rank, result in enumerate(results):
        assert result.value[0] == "SetupError", result.value
        assert "can't start new thread" in result.value[1]
        for words in ("(ulimit -u)", "address space, of which each takes a stack: limit ", "(ulimit -v)"):
            assert words in result.value[1] or rank not in limited, result.value[1]
