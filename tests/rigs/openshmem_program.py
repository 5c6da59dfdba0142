"""What each process of ``test_nvshmem_openshmem.py`` runs: ``openshmem_program.py FOLDER HEAP PARTS BREAK`` by oshrun.

``HEAP`` is ``direct``, where a heap's operation is a call of the library, or ``kernels``, where the real heap launches
its kernels. ``PARTS`` are keys of :data:`PARTS` with commas between them, ``BREAK`` is one of :func:`break_it` or
nothing. Each writes to ``FOLDER/RANK.json`` what has ``passed``, the ``error`` or null, and the ``calls`` by function.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import openshmem_kernels
import pytest
import streamed_minibatches as streams
import test_transport_conformance as suite
import torch
import torch.distributed as dist
from fake_nvshmem import FakeNvshmemTransport, registered_fakes
from openshmem_heap import OpenshmemHeap, library

from odc.cuda.nvshmem import NvshmemHeap
from odc.setup.agreement import ProcessGroupExchange
from odc.setup.topology import Topology
from odc.transports import registry
from odc.transports.nvshmem import NvshmemTransport

KINDS = ("allocate", "allocate_host")
_LATE: list[Callable[[], None]] = []


class AnotherSizeError(Exception):
    """The test is for another number of ranks."""


def make_heap(transport: Any) -> NvshmemHeap:
    return OpenshmemHeap(transport.fake.engine().run)


HEAPS = {
    "direct": (make_heap, nullcontext),
    "kernels": (openshmem_kernels.Heap, openshmem_kernels.nvshmem_on_openshmem),
}


def on_transport(name: str, world_size: int, body: Callable[..., Any], signals: int = 8, locks: int = 2) -> list[Any]:
    """In the place of the suite's own: ranks are these processes."""
    if world_size != dist.get_world_size():
        raise AnotherSizeError
    exchange = ProcessGroupExchange()
    host = f"host{exchange.rank if world_size == 2 else max(exchange.rank, 1)}"
    topology = Topology.discover(exchange, host if name in suite.FAR else "")
    device = torch.device("cpu")
    transport = registry.choose(name, topology, device, exchange)(exchange, topology, 30.0, device)
    try:
        transport.open(num_signals=signals, num_locks=locks, num_bytes=1 << 20)
        result = body(transport, exchange)
        suite.meet(transport, exchange)
    finally:
        transport.close()
    results: list[Any] = [None] * world_size
    dist.all_gather_object(results, result)
    return results


def conformance(far: bool) -> list[str]:
    """Every test of the suite for so many ranks, by both kinds of stream; the names of those that ran."""
    FakeNvshmemTransport.staging_bytes = 1 << 20
    passed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "on_transport", on_transport)
        patch.setattr(suite, "FAR", suite.FAR if far else [])
        wanted = {"name", "far" if far else "near"}
        for title, test in inspect.getmembers(suite, inspect.isfunction):
            parameters = set(inspect.signature(test).parameters)
            if not title.startswith("test_") or not parameters & wanted or "fork" in title:
                continue
            for name in ("fake_nvshmem", "fake_nvshmem_streams"):
                for kind in KINDS if "kind" in parameters else ("",):
                    options = {"kind": kind} if kind else {}
                    try:
                        test(name, **options)
                    except AnotherSizeError:
                        continue
                    passed.append(f"{'far' if far else 'near'} {title} {name} {kind}".rstrip())
    return passed


def protocol(near: bool) -> list[str]:
    """The minibatch protocol on streams that lag behind, one rank's more than the others'; on two hosts or on one."""
    exchange, passed = ProcessGroupExchange(), []
    counts = tuple(row[: exchange.world_size] for row in ((1, 2, 0), (2, 1, 1), (0, 3, 1), (1, 1, 2)))
    original = streams.RuntimeConfig
    with pytest.MonkeyPatch.context() as patch:
        if near:  # the case asks for cuda_ipc then
            patch.setattr(streams, "RuntimeConfig", lambda **options: original(**{**options, "host_id": ""}))
        for mode, blind, seed in itertools.product((("daemon", False), ("daemon", True)), (False, True), (1, 2)):
            slow = streams.ADVERSARY.slow
            case = streams.Case(counts, num_units=2, seed=seed, mode=mode, blind=blind, hosts=2, slow=slow)
            checks = streams.RankRun(case, exchange).run()
            assert checks == streams.num_checks(case)[exchange.rank]
            passed.append(f"{'near' if near else 'far'} {mode} blind={blind} seed={seed}")
    return passed


# What must be noticed


def put_late(heap: OpenshmemHeap, source: torch.Tensor, own: torch.Tensor, rank: int) -> None:
    """As `put`, but what was put is there one call later."""

    def work() -> None:
        copied = source.clone()
        for put in _LATE:
            put()
        _LATE[:] = [lambda: heap._call("shmem_putmem_nbi", own.data_ptr(), copied.data_ptr(), copied.numel(), rank)]

    heap._run(work)


def break_it(how: str, kernels: Any) -> None:
    if how == "no add":
        OpenshmemHeap.wait_limit_s = 0.2
        OpenshmemHeap.signal = lambda self, address, rank: None  # type: ignore[method-assign]
    elif how == "late put":
        OpenshmemHeap.put = put_late  # type: ignore[method-assign]
    elif how == "no quiet after a put":
        kernels.signals.quiet_on_stream = lambda modules, device: None
    elif how == "no quiet in kernels":
        kernels.transfer.quiet = lambda: None
    elif how == "no wait":
        streams.without_order(pytest.MonkeyPatch(), NvshmemTransport, range(2))
    elif how:
        raise ValueError(how)


PARTS: dict[str, Callable[[], list[str]]] = {
    "conformance": lambda: conformance(far=True) + conformance(far=False),
    "protocol": lambda: protocol(near=False) + protocol(near=True),
    "far protocol": lambda: protocol(near=False),
}


def main() -> None:
    folder, heap, parts, how = sys.argv[1:]
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{word}"]) for word in ("RANK", "SIZE"))
    shmem = library()
    store = dist.FileStore(os.path.join(folder, "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    make, surroundings = HEAPS[heap]
    FakeNvshmemTransport._make_heap = lambda transport: make(transport)  # type: ignore[method-assign]
    found: dict[str, Any] = {"passed": [], "error": None}
    try:
        with registered_fakes(), surroundings() as kernels:
            break_it(how, kernels)
            for part in parts.split(","):
                found["passed"] += PARTS[part]()
    except BaseException:
        found["error"] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps({**found, "calls": OpenshmemHeap.calls}))
    if found["error"]:
        os._exit(1)  # the others would wait for this rank; oshrun ends them
    dist.barrier()
    shmem.shmem_finalize()
    os._exit(0)


if __name__ == "__main__":
    main()
