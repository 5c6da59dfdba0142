"""Layers 1 and 3. What ODC calls of the CUDA driver and of cupy: by their headers, and on a driver that checks.

The driver is ``stub_libcuda.c``, built against NVIDIA's cuda.h; cupy is a stand-in held to cupy's signatures. Over them
run the real ``CudaRuntime`` and ``CudaIpcTransport``, ranks as processes (``stub_cuda.py``). What this cannot show:
what a real driver makes of calls that are right.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stub_cuda
import torch
from process_ranks import RankResult, run_ranks, start_ranks, wait_until
from stub_cuda import Call, StubCudaTransport, StubRuntime, calls, stub_driver

from odc import OdcError, ParamSlice, Runtime, RuntimeConfig, UnitSpec
from odc.cuda import runtime
from odc.setup.agreement import ProcessGroupExchange

pytestmark = pytest.mark.skipif(stub_cuda.why_not() is not None, reason=str(stub_cuda.why_not()))
CUPY = os.environ.get("ODC_TEST_CUPY", "")
NEEDS_CUPY = pytest.mark.skipif(
    not CUPY and importlib.util.find_spec("cupy") is None,
    reason="cupy is not installed; ODC_TEST_CUPY names folders that have it and cuda.pathfinder, with colons between",
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(stub_cuda.build(tmp_path_factory.mktemp("stub")))


# By the header

_TYPES = {
    "CUstream": ctypes.c_void_p,
    "CUstream *": ctypes.POINTER(ctypes.c_void_p),
    "CUdeviceptr": ctypes.c_ulonglong,
    "CUdeviceptr *": ctypes.POINTER(ctypes.c_ulonglong),
    "CUdevice": ctypes.c_int,
    "CUdevice_P2PAttribute": ctypes.c_int,
    "CUresult": ctypes.c_int,
    "cuuint32_t": ctypes.c_uint32,
    "unsigned int": ctypes.c_uint,
    "int": ctypes.c_int,
    "int *": ctypes.POINTER(ctypes.c_int),
    "size_t": ctypes.c_size_t,
    "size_t *": ctypes.POINTER(ctypes.c_size_t),
    "void *": ctypes.c_void_p,
    "const char * *": ctypes.POINTER(ctypes.c_char_p),
}
_SIZES = {"CUstreamBatchMemOpParams *": 48, "CUmemcpyAttributes *": 24}


def prototype(name: str) -> list[str]:
    """The types of a driver function's parameters. What is exported by a name is declared by it behind all others, or
    by one without a version that the header maps to it."""
    text = Path(str(stub_cuda.header())).read_text()
    plain = re.search(rf"#define\s+(\w+)\s+(?:__CUDA_API_PTSZ\()?{name}\)?\s", text)
    match = re.search(rf"^ +CUresult CUDAAPI {name}\(([^)]*)\);", text, re.MULTILINE) or (
        re.search(rf"^CUresult CUDAAPI {plain[1] if plain else name}\(([^)]*)\);", text, re.MULTILINE)
    )
    assert match is not None, name
    return [" ".join(re.sub(r"\*", " * ", part).split()[:-1]) for part in match[1].split(",")]


def is_same(found: Any, expected: Any) -> bool:
    """Whether a call passes the same bytes by both. ctypes has several names for one integer."""
    if found is expected or not (issubclass(found, ctypes._SimpleCData) and issubclass(expected, ctypes._SimpleCData)):
        return bool(found is expected)
    kinds = {found._type_, expected._type_}
    return (
        ctypes.sizeof(found) == ctypes.sizeof(expected) and "P" not in kinds and len({k.isupper() for k in kinds}) == 1
    )


def mismatches(rank: int, world_size: int, library: str) -> tuple[list[str], list[str]]:
    """The functions whose prototypes are declared, and what of them is not as the header has it."""
    with stub_driver(library, os.devnull):
        functions = {name: value for name, value in vars(runtime._library()).items() if name.startswith("cu")}
    found = []
    for name, function in functions.items():
        ours, theirs = list(function.argtypes), prototype(name)
        if len(ours) != len(theirs):
            found.append(f"{name}: {ours}, {theirs}")
        for mine, expected in zip(ours, theirs, strict=False):
            if expected in _SIZES:
                is_right = ctypes.sizeof(mine._type_) == _SIZES[expected]
            elif name == "cuMemcpyBatchAsync" and mine is ctypes.c_void_p and expected != "CUstream":
                is_right = expected in ("CUdeviceptr *", "size_t *")  # addresses of arrays
            else:
                is_right = is_same(mine, _TYPES[expected])
            if not is_right:
                found.append(f"{name}: {mine} for {expected}")
    return list(functions), found


def test_prototypes_are_those_of_the_header(library: str) -> None:
    ((functions, wrong),) = run_ranks(1, mismatches, library)
    assert {"cuStreamBatchMemOp_v2", "cuMemHostGetDevicePointer_v2", "cuMemcpyBatchAsync"} <= set(functions)
    assert wrong == []


def test_the_comparison_tells_types_apart() -> None:
    assert len(prototype("cuMemcpyBatchAsync")) == len(prototype("cuMemcpyBatchAsync_v2")) + 1
    assert prototype("cuStreamWaitValue32_v2") == ["CUstream", "CUdeviceptr", "cuuint32_t", "unsigned int"]
    assert is_same(ctypes.c_uint64, ctypes.c_ulonglong)
    assert not is_same(ctypes.c_uint32, ctypes.c_ulonglong)
    assert not is_same(ctypes.c_int, ctypes.c_uint)
    assert not is_same(ctypes.c_ulonglong, ctypes.c_void_p)


def test_numbers_are_those_of_the_header() -> None:
    text = Path(str(stub_cuda.header())).read_text()
    header: dict[str, int] = {
        name: eval(value) for name, value in re.findall(r"\b(CU_\w+)\s*=\s*(0x[0-9a-fA-F]+|\d+(?:<<\d+)?)", text)
    }
    define = re.search(r"#define CU_IPC_HANDLE_SIZE (\d+)", text)
    assert define is not None
    flags = dict(re.findall(r"#define (CU_MEMHOSTREGISTER_\w+)\s+(0x\d+)", text))
    register = int(flags["CU_MEMHOSTREGISTER_PORTABLE"], 16) | int(flags["CU_MEMHOSTREGISTER_DEVICEMAP"], 16)
    assert {
        "wait": (runtime._WAIT_GEQ, runtime._WAIT_FLUSH),
        "write": runtime._WRITE_DEFAULT,
        "attributes": [
            runtime._CAN_FLUSH_REMOTE_WRITES,
            runtime._CAPABILITY_MAJOR,
            *(number for number, _ in runtime._NEEDED),
        ],
        "handle": runtime.HANDLE_BYTES,
        "register": runtime._REGISTER_PORTABLE_MAPPED,
        "stream": runtime._NON_BLOCKING,
        "operations": [runtime._WAIT_VALUE_32, runtime._WRITE_VALUE_32],
        "atomics": runtime._NATIVE_ATOMICS,
        "copies": [runtime._IN_STREAM_ORDER, runtime._BESIDE_COMPUTE],
    } == {
        "wait": (header["CU_STREAM_WAIT_VALUE_GEQ"], header["CU_STREAM_WAIT_VALUE_FLUSH"]),
        "write": header["CU_STREAM_WRITE_VALUE_DEFAULT"],
        "attributes": [
            header[f"CU_DEVICE_ATTRIBUTE_{name}"]
            for name in (
                *("CAN_FLUSH_REMOTE_WRITES", "COMPUTE_CAPABILITY_MAJOR"),
                *("UNIFIED_ADDRESSING", "HOST_REGISTER_SUPPORTED"),
            )
        ],
        "handle": int(define[1]),
        "register": register,
        "stream": header["CU_STREAM_NON_BLOCKING"],
        "operations": [header["CU_STREAM_MEM_OP_WAIT_VALUE_32"], header["CU_STREAM_MEM_OP_WRITE_VALUE_32"]],
        "atomics": header["CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED"],
        "copies": [
            header["CU_MEMCPY_SRC_ACCESS_ORDER_STREAM"],
            header["CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE"],
        ],
    }


# The real runtime and transport on a driver that checks


def train(rank: int, world_size: int, library: str, folder: str, broken: str, env: dict[str, str]) -> int:
    """Three minibatches on streams that lag behind, as ``test_stream_order.py`` has them; how much was checked.

    ``env`` is rank 1's.
    """
    import streamed_minibatches as streams

    if rank == 1:
        os.environ.update(env)
    with stub_driver(library, f"{folder}/{rank}.log") as stub, pytest.MonkeyPatch.context() as patch:
        patch.setattr("odc.limits.CLOSE_GRACE_S", 30.0)  # a rank may be slow to close
        if broken == "host address":
            patch.setattr(runtime, "device_address", lambda address: address)
        elif broken == "offset":
            export = StubRuntime.export
            patch.setattr(StubRuntime, "export", lambda self, address: (export(self, address)[0], 0))
        elif broken == "unmap":
            patch.setattr(StubRuntime, "unmap", lambda self, base: None)
        elif broken == "order":
            streams.without_order(patch, StubCudaTransport, range(2))
        case = streams.Case(((1, 2), (2, 1), (0, 3)), num_units=2, seed=3, slow=streams.ADVERSARY.slow)
        try:
            return streams.RankRun(case, ProcessGroupExchange()).run()
        finally:
            stub.stub_leftovers()


def outcome(
    library: str, folder: Path, broken: str = "", env: dict[str, str] | None = None
) -> tuple[list[RankResult], list[list[Call]]]:
    results = start_ranks(2, train, library, str(folder), broken, env or {}).join(100.0)
    return results, [calls(folder / f"{rank}.log") for rank in range(2)]


def wrong(log: list[Call]) -> list[Call]:
    return [call for call in log if call.text.startswith("WRONG")]


NOTHING = {"allocated": "0", "opened": "0", "registered": "0"}


def left(log: list[Call]) -> dict[str, str]:
    found: dict[str, str] = {}
    for call in log:
        if call.name == "left":
            found |= call.arguments
    return found


def test_a_driver_finds_nothing_wrong_and_gets_everything_back(library: str, tmp_path: Path) -> None:
    results, logs = outcome(library, tmp_path)
    assert [result.value for result in results] == [12, 18], results
    for rank, log in enumerate(logs):
        assert wrong(log) == []
        # Spare streams are kept for the next session, see _give_back_stream.
        assert left(log) == {**NOTHING, "streams": "3"}
        count = Counter(call.name for call in log)
        assert (
            count["cuMemAlloc"] == count["cuMemFree"] == count["cuIpcOpenMemHandle"] == count["cuIpcGetMemHandle"] > 0
        )
        assert count["cuMemHostRegister"] == count["cuMemHostUnregister"] == count["cuMemHostGetDevicePointer"] == 2
        stream_calls = [call.arguments for call in log if call.name.startswith("cuStreamW")]
        assert {call["flags"] for call in stream_calls} == {hex(1 << 30), "0"}  # waits flush: this device can
        assert len({call["stream"] for call in stream_calls}) >= 3  # gathering, pushing, the daemon's own
        released = [call.time_ns for call in logs[1 - rank] if call.name == "cuIpcCloseMemHandle"]
        freed = [call.time_ns for call in log if call.name == "cuMemFree"]
        assert max(released) < min(freed), "freed while a peer had it mapped"
        asked = [call.text for call in log if call.name == "cuDeviceCanAccessPeer"]
        assert asked == [f"device={rank} peer={1 - rank}"]


def words(log: list[Call], name: str) -> dict[str, list[int]]:
    """The values of a kind of call, by address."""
    found: dict[str, list[int]] = {}
    for call in log:
        if call.name == name and call.code == 0:
            found.setdefault(call.arguments["address"], []).append(int(call.arguments["value"]))
    return found


def test_every_word_is_written_in_order_by_one_process(library: str, tmp_path: Path) -> None:
    """[Note: A signal has one poster]: counts that rise by one; and nobody waits for more than was ever written."""
    _, logs = outcome(library, tmp_path)
    most = []
    for log in logs:
        written = words(log, "cuStreamWriteValue32")
        assert all(values == list(range(1, len(values) + 1)) for values in written.values()), written
        most.append(max(len(values) for values in written.values()))
    for log in logs:
        waited = words(log, "cuStreamWaitValue32")
        assert max((max(values) for values in waited.values()), default=0) <= max(most)


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ("host address", "not known to the device"),
        ("offset", "the test of device memory failed"),
        ("unmap", "opened=[1-9]"),
        ("order", "Violation"),
    ],
)
def test_what_is_done_wrong_is_noticed(broken: str, found: str, library: str, tmp_path: Path) -> None:
    results, logs = outcome(library, tmp_path, broken)
    said = " ".join(result.error or "" for result in results)
    logged = " ".join(call.text for log in logs for call in log if call.name == "left" or call in wrong(log))
    assert re.search(found, f"{said} {logged}"), (said, logged)


@pytest.mark.parametrize(
    "fail",
    [
        "cuMemAlloc:2",
        "cuIpcGetMemHandle:801",
        "cuIpcOpenMemHandle:201",
        "cuMemGetAddressRange:801",
        "cuMemHostRegister:712",
        "cuMemHostGetDevicePointer:801",
    ],
)
def test_a_driver_that_refuses_fails_set_up_on_all_ranks_and_gets_everything_back(
    fail: str, library: str, tmp_path: Path
) -> None:
    results, logs = outcome(library, tmp_path, env={"ODC_STUB_CUDA_FAIL": fail})
    code = fail.partition(":")[2]
    assert all(result.error is not None for result in results), results
    assert results[0].error_type == "SetupError"
    assert "set-up failed on rank 1" in str(results[0].error)
    assert all(code in str(result.error) and "as the stub was told" in str(result.error) for result in results)
    assert [wrong(log) for log in logs] == [[], []]
    assert [{**left(log), "streams": 0} for log in logs] == [{**NOTHING, "streams": 0}] * 2


def test_devices_that_do_not_reach_each_other_are_named(library: str, tmp_path: Path) -> None:
    results, logs = outcome(library, tmp_path, env={"ODC_STUB_CUDA_NO_PEERS": "1"})
    assert all(result.error_type == "SetupError" for result in results), results
    for result in results:
        words = "device 0000:02:00.0 has no peer access to 0000:01:00.0 (rank 1 to rank 0). Choose devices"
        assert words in str(result.error)
    assert [wrong(log) for log in logs] == [[], []]


def die_before_writing(rank: int, world_size: int, library: str, folder: str) -> str:
    """Rank 1 dies before its stream comes to the word that rank 0's stream waits for, inside the driver."""
    with stub_driver(library, f"{folder}/{rank}.log") as stub:
        units = [UnitSpec("w", 1000, torch.float32, (ParamSlice("w", 1000),))]
        options = RuntimeConfig(transport=StubCudaTransport.name, timeout_s=10)
        made = Runtime.create(ProcessGroupExchange(), units, options)
        made.publish(0, lambda shard: time.sleep(30) if rank == 1 else shard.fill_(1.0))
        waiting = Path(folder, "waiting")
        if rank == 1:
            wait_until(waiting.exists, "rank 0 has not come to wait")
            os.kill(os.getpid(), signal.SIGKILL)
        made.begin()
        made.gather(0, torch.zeros(2000))
        log = Path(folder, "0.log")
        wait_until(lambda: any(call.name == "cuStreamWaitValue32" for call in calls(log)), "no stream waits")
        waiting.touch()
        assert made._transport.engine.synchronize(15.0), "the stream still waits for the dead rank"
        with pytest.raises(OdcError) as caught:
            made.finish()
        made.close()
        stub.stub_leftovers()
        return f"{caught.type.__name__}: {caught.value}"


def test_a_stream_inside_the_driver_is_freed_when_its_peer_dies(library: str, tmp_path: Path) -> None:
    """By a word that the host writes at its own address of it; and then nothing is given back that a stream may use."""
    results = start_ranks(2, die_before_writing, library, str(tmp_path)).join(90.0, expendable=[1])
    assert str(results[0].value).startswith("PeerDiedError: rank 0: rank 1 (host"), results[0]
    log = calls(tmp_path / "0.log")
    assert wrong(log) == []  # no wait came to its limit
    assert not [call for call in log if call.name in ("cuMemFree", "cuMemHostUnregister", "cuIpcCloseMemHandle")]
    assert left(log)["registered"] == "2"


def misuse(rank: int, world_size: int, library: str, folder: str) -> list[str]:
    """What the stub makes of calls that a driver would refuse, by way of our own code where that can make them."""
    with stub_driver(library, f"{folder}/{rank}.log"):
        made = StubRuntime(0, 0.0, 1)
        memory = made.malloc(100)
        page = (ctypes.c_char * 4096).from_address(memory & ~4095)  # shared pages, as those of a transport
        host = ctypes.addressof(page)
        known = made.register(host, 4096)
        handle, offset = made.export(memory)
        assert offset > 0
        attempts = [
            lambda: runtime.wait_values(0, [(known + 2, 0)], False),
            lambda: runtime.wait_values(0x77, [(known, 0)], False),
            lambda: runtime.write_values(0, [(known, 1), (known + 4096, 1)]),
            lambda: runtime._operate(0, runtime._WAIT_VALUE_32, [(known, 0)], 8),
            lambda: runtime._operate(0, runtime._WRITE_VALUE_32, [(known, 0)], 1),
            lambda: runtime.device_address(host + 64),
            lambda: made.register(host, 4096),
            lambda: made.unregister(known),
            lambda: made.open(handle),
            lambda: made.unmap(memory),
            lambda: made.free(memory + 512),
            lambda: runtime.allocation_base(4096),
        ]
        made._stub_engine.close()
        StubCudaTransport.current = None  # from here on stream calls are made at once
        told = []
        for attempt in attempts:
            try:
                attempt()
                told.append("nothing")
            except OdcError as error:
                told.append(str(error))
        made.unregister(host)
        made.free(memory)
        return told


def test_the_stub_refuses_what_a_driver_would(library: str, tmp_path: Path) -> None:
    (told,) = run_ranks(1, misuse, library, str(tmp_path))
    assert len(told) == 12
    assert all("invalid argument" in text for text in told), told
    assert len(wrong(calls(tmp_path / "0.log"))) == 12


def batches(rank: int, world_size: int, library: str, folder: str) -> tuple[list[int], list[int]]:
    with stub_driver(library, f"{folder}/{rank}.log") as stub:
        made = StubRuntime(0, 0.0, 1)
        made._stub_engine.close()
        memory = made.malloc(64)
        codes = []
        for entries in (
            [(2, memory, 7, 0), (2, memory + 4, 8, 0), (1, memory, 7, 1 << 30), (2, memory + 8, 9, 0)],
            [(2, memory + 2, 7, 0)],
            [(3, memory, 0, 0)],
            [],
        ):
            rows = [runtime.MemoryOperation(kind, address, value, 0, flags) for kind, address, value, flags in entries]
            array = (runtime.MemoryOperation * len(rows))(*rows)
            codes.append(stub.cuStreamBatchMemOp_v2(ctypes.c_void_p(0), len(entries), array, 0))
        value = ctypes.c_int()
        codes.append(stub.cuDeviceGetP2PAttribute(ctypes.byref(value), 3, 0, 1))
        codes.append(stub.cuDeviceGetP2PAttribute(ctypes.byref(value), 3, 0, 0))
        seen = (ctypes.c_uint32 * 3).from_address(memory)[:]
        made.free(memory)
        return codes, [*seen, value.value]


def test_the_stub_performs_batches_and_tells_of_atomics(library: str, tmp_path: Path) -> None:
    assert ctypes.sizeof(runtime.MemoryOperation) == 48
    ((codes, seen),) = run_ranks(1, batches, library, str(tmp_path))
    assert codes == [0, 1, 1, 1, 0, 1]
    assert seen == [7, 8, 9, 1]


def copied(rank: int, world_size: int, library: str, folder: str) -> list[tuple[str, bytes, list[str]]]:
    """Three slices of an allocation to another one: what went wrong, what is there, and what was called."""
    log = Path(folder, f"{rank}.log")
    with stub_driver(library, str(log)):
        made = StubRuntime(0, 0.0, 1)
        made._stub_engine.close()
        source, target, stream = made.malloc(64), made.malloc(64), runtime.create_stream()
        ctypes.memmove(source, bytes(range(64)), 64)
        found = []
        for where, size, in_a_batch in ((stream, 8, True), (stream, 8, False), (0, 8, True), (stream, 1 << 40, True)):
            ctypes.memset(target, 0, 64)
            so_far, told = len(calls(log)), ""
            try:
                places = [target, target + 16, target + 40], [source + 32, source, source + 8]
                runtime.copy_memory(where, *places, [8, 3, size], in_a_batch)
            except OdcError as error:
                told = str(error)
            found.append((told, ctypes.string_at(target, 64), [call.name for call in calls(log)[so_far:]]))
        made.free(source)
        made.free(target)
        return found


def copied_by_a_driver_without_batches(rank: int, world_size: int, library: str, folder: str) -> list[str]:
    """What a runtime calls, the first time and the second."""
    log = Path(folder, f"{rank}.log")
    os.environ["ODC_STUB_CUDA_FAIL"] = "cuMemcpyBatchAsync:801"
    with stub_driver(library, str(log)):
        made = StubRuntime(0, 0.0, 1)
        made._stub_engine.close()
        memory, here = made.malloc(64), SimpleNamespace(cuda_stream=runtime.create_stream())
        StubCudaTransport.current = SimpleNamespace(handle=here)  # type: ignore[assignment]
        for _ in range(2):
            made.copy_memory([memory, memory + 8], [memory + 32, memory + 40], [8, 8])
        made.free(memory)
        return [call.name for call in calls(log) if call.name.startswith("cuMemcpy")]


def test_a_driver_that_refuses_batches_is_asked_for_each_copy(library: str, tmp_path: Path) -> None:
    (called,) = run_ranks(1, copied_by_a_driver_without_batches, library, str(tmp_path))
    assert called == ["cuMemcpyBatchAsync", *["cuMemcpyAsync"] * 4]


def test_many_copies_are_one_call_where_the_driver_takes_batches(library: str, tmp_path: Path) -> None:
    assert ctypes.sizeof(runtime.CopyAttributes) == 24
    ((batch, alone, default, refused),) = run_ranks(1, copied, library, str(tmp_path))
    numbers = bytes(range(64))
    wanted = bytearray(64)
    wanted[:8], wanted[16:19], wanted[40:48] = numbers[32:40], numbers[:3], numbers[8:16]
    for told, there, called in (batch, alone, default):
        assert (told, there) == ("", wanted)
        assert called == (["cuMemcpyBatchAsync"] if called == batch[2] else ["cuMemcpyAsync"] * 3)
    assert alone[2] == default[2] != batch[2]
    assert refused[0].startswith("cuMemcpyBatchAsync failed with code 1: invalid argument")


# The stand-in for cupy, by the real one

_COMPARE = """
import sys
sys.path.insert(0, sys.argv[1])
import cupy as stand_in
del sys.modules["cupy"], sys.path[0]
sys.path[:0] = sys.argv[2].split(":")
import cupy
from odc.cuda import runtime
real = cupy.cuda.runtime
for line in stand_in.SIGNATURES:
    assert getattr(real, line.partition("(")[0]).__doc__.splitlines()[0] == line, line
assert real.cudaIpcMemLazyEnablePeerAccess == 1
assert issubclass(real.CUDARuntimeError, RuntimeError)
assert cupy.cuda.UnownedMemory.__doc__.startswith("UnownedMemory(intptr_t ptr, size_t size, owner, int device_id=-1)")
assert cupy.cuda.MemoryPointer.__doc__.startswith("MemoryPointer(BaseMemory mem, ptrdiff_t offset)")
assert "__init__(shape, dtype=float, memptr=None, strides=None, order='C')" in cupy.ndarray.__doc__
print(runtime._cupy_problem())
"""


@pytest.mark.extended
@NEEDS_CUPY
def test_the_stand_in_has_the_signatures_of_cupy_which_says_that_there_is_no_driver() -> None:
    modules = str(Path(stub_cuda.__file__).with_name("stub_modules"))
    command = [sys.executable, "-c", _COMPARE, modules, CUPY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "cupy cannot use the driver (" in done.stdout
    assert "update the driver, or install the cupy for its CUDA version" in done.stdout
