"""Layers 1 and 3. What we ask of NVSHMEM, put to NVIDIA's own packages, as far as they go without a GPU.

The real library starts here: processes find each other by its unique id. Then it looks for a GPU and stops. So these
tests show that names, arguments and their order are those of the packages, and that set-up is right up to that point.
They need the packages of an extra (``pip install --target FOLDER nvshmem4py-cu13 'nvidia-nvshmem-cu13<3.5'``) and
``ODC_TEST_NVSHMEM4PY=FOLDER``, or to have them installed beside torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process_ranks import run_ranks, start_ranks
from thread_ranks import run_threads

from odc import SetupError
from odc.cli.doctor import nvshmem as doctor
from odc.config import nvshmem_heap_bytes
from odc.cuda import nvshmem
from odc.cuda.nvshmem import NvshmemHeap
from odc.kernels.nvshmem.bitcode import WHEELS
from odc.setup.agreement import ProcessGroupExchange

FOLDER = os.environ.get("ODC_TEST_NVSHMEM4PY", "")
NEEDS_NVSHMEM4PY = pytest.mark.skipif(
    not FOLDER and importlib.util.find_spec("nvshmem") is None,
    reason="nvshmem4py is not installed; ODC_TEST_NVSHMEM4PY names a folder that has it",
)
NEEDS_NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: NVSHMEM would start")


def wheel() -> Path:
    """Where NVIDIA's wheel of the library lies, which needs no Python side."""
    for name in WHEELS:
        try:
            return Path(str(importlib.metadata.distribution(name).locate_file("nvidia/nvshmem")))
        except importlib.metadata.PackageNotFoundError:
            continue
    pytest.skip("NVSHMEM's wheel is not installed (extra: dev)")


def new_heap(timeout_s: float = 30.0, device: Callable[[], object] | None = lambda: None) -> NvshmemHeap:
    """With nvshmem4py in reach; ``device`` stands in for the GPU, unless it is None."""
    if FOLDER and FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
        importlib.invalidate_caches()
    heap = NvshmemHeap(torch.device("cuda", 0), lambda address, num_bytes: torch.empty(num_bytes), timeout_s)
    if device is not None:
        heap._own_device = device  # type: ignore[method-assign]
    return heap


# Its wheel alone


def test_the_library_has_what_is_called_past_nvshmem4py() -> None:
    """Allocation, which is ours by ctypes, as its header has it; and what the bindings look up when first called."""
    header = (wheel() / "include/host/nvshmem_api.h").read_text()
    assert re.search(r"void \*nvshmem_calloc\(size_t( \w+)?, size_t( \w+)?\);", header)
    names = "calloc ptr my_pe n_pes x_init_status x_cumodule_init x_signal_op_on_stream x_signal_wait_until_on_stream"
    symbols = [f"nvshmem{name}" if name.startswith("x_") else f"nvshmem_{name}" for name in names.split()]
    library = wheel() / "lib" / nvshmem._LIBRARY
    script = "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); [getattr(library, s) for s in sys.argv[2:]]"
    subprocess.run([sys.executable, "-c", script, str(library), *symbols], check=True, timeout=120)


# With its Python side


def signature(function: Any) -> inspect.Signature:
    """Of a function of the bindings, whose parameters stand with their C types in the first line of its text."""
    line = function.__doc__.splitlines()[0]
    match = re.fullmatch(r"\w+\((.*)\)( -> \w+)?", line)
    assert match is not None, line
    names = [part.split()[-1] for part in match[1].split(",") if part.strip()]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names])


def calls_of_the_heap(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """What the heap hands to each function of the bindings, by the names of its parameters in the real ones."""
    heap = new_heap()
    heap._load(1 << 20)
    real, calls = heap._bindings, {}

    def recorder(name: str, result: int) -> Callable[..., int]:
        def call(*arguments: object) -> int:
            calls[name] = dict(signature(getattr(real, name)).bind(*arguments).arguments)
            return result

        return call

    results = {"cumodule_init": 0, "ptr": 4096, "signal_op_on_stream": 0, "signal_wait_until_on_stream": 0}
    recorders = {name: recorder(name, result) for name, result in results.items()}
    assert [int(real.my_pe()), int(real.n_pes())] == [0, 0]  # not started: it may be asked
    heap._bindings = types.SimpleNamespace(Signal_op=real.Signal_op, Cmp_type=real.Cmp_type, **recorders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvshmemHeap, "_stream", 77)
        heap._initialise_module(11)
        assert heap.address_at(22, 3) == 4096
        heap.signal(33, 4)
        heap.wait(44, 5)
    inspect.signature(heap._core.init).bind(device=None, uid=None, rank=0, nranks=1, initializer_method="uid")
    inspect.signature(heap._core.get_unique_id).bind(empty=True)
    return calls


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
def test_every_argument_has_the_place_that_the_bindings_give_it() -> None:
    (calls,) = run_ranks(1, calls_of_the_heap)
    assert calls == {
        "cumodule_init": {"module": 11},
        "ptr": {"dest": 22, "pe": 3},
        "signal_op_on_stream": {"sig_addr": 33, "signal": 1, "sig_op": 10, "pe": 4, "cstrm": 77},  # NVSHMEM_SIGNAL_ADD
        "signal_wait_until_on_stream": {"sig_addr": 44, "cmp": 5, "cmp_value": 5, "cstream": 77},  # NVSHMEM_CMP_GE
    }


def library_that_is_loaded(rank: int, world_size: int) -> tuple[list[str], str, str, str]:
    """What this process has mapped, and what nvshmem4py and the doctor say of it."""
    heap = new_heap()
    copies = {str(path.resolve()) for folder in sys.path for path in Path(folder).glob("nvidia/nvshmem/lib/*host.so.3")}
    if len(copies) > 1:  # cuda.pathfinder looks into site-packages first, importlib in the order of sys.path
        return sorted(copies), "", "", ""
    heap._load(1 << 20)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "nvshmem_host" in line}
    found = doctor.describe_file(doctor.find_host({}, doctor.wheel_folders()))
    assert found is not None
    assert found.version is not None
    version = ".".join(str(part) for part in found.version)
    return sorted(mapped), str(found.path.resolve()), heap._core.get_version().libnvshmem_version, version


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
def test_the_doctor_names_the_library_that_nvshmem4py_loads() -> None:
    ((mapped, named, version, described),) = run_ranks(1, library_that_is_loaded)
    if len(mapped) > 1:
        pytest.skip(f"the library is installed more than once: {mapped}")
    assert mapped == [named]
    assert version == described


def start(rank: int, world_size: int) -> tuple[str, str, int, int, int]:
    """How set-up ends, and what NVSHMEM knows of the job then."""
    heap = new_heap()
    try:
        heap.start(ProcessGroupExchange(), 12345)
    except Exception as error:
        bindings = heap._bindings
        status = int(bindings.init_status())
        return type(error).__name__, str(error), status, int(bindings.my_pe()), int(bindings.n_pes())
    return "no error", "", 0, 0, 0


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
@NEEDS_NO_GPU
def test_two_processes_meet_by_its_unique_id_and_say_that_there_is_no_gpu() -> None:
    for rank, (kind, text, status, pe, num_pes) in enumerate(run_ranks(2, start)):
        assert (status, pe, num_pes) == (1, rank, 2), text  # NVSHMEM_STATUS_IS_BOOTSTRAPPED
        assert kind == "SetupError"
        assert "the ranks have met, but it cannot use their GPUs. NVSHMEM_DEBUG=WARN" in text


def start_with_a_unique_id_that_is_a_copy(rank: int, world_size: int) -> str:
    """Rank 1 writes what it is sent where NVSHMEM does not read it."""
    heap = new_heap(timeout_s=3.0)
    whole = heap._unique_id

    def unique_id(is_first: bool) -> Any:
        uid = whole(is_first)
        if is_first:
            return uid
        uid._data.view(np.uint8)[:] = 0
        return types.SimpleNamespace(_data=uid._data.copy(), ptr=uid.ptr)

    heap._unique_id = unique_id  # type: ignore[method-assign]
    try:
        heap.start(ProcessGroupExchange(), 12345)
    except SetupError as error:
        return str(error)
    return "no error"


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
@NEEDS_NO_GPU
def test_without_the_unique_id_they_do_not_meet_and_nobody_waits_for_ever() -> None:
    """What the test above would miss; and that the limit on its start holds inside the real library."""
    group = start_ranks(2, start_with_a_unique_id_that_is_a_copy)
    first, second = group.join(60.0)
    assert "NVSHMEM did not start: Status code" in str(second.value), second
    assert "its reason is on standard error" in str(second.value)
    assert first.exitcode == 1, first  # ended by its own time limit, from within
    assert time.monotonic() - group.started < 50


def start_here(rank: int, world_size: int, env: dict[str, str], has_device: bool) -> str:
    os.environ.update(env)
    try:
        new_heap(device=(lambda: None) if has_device else None).start(ProcessGroupExchange(), 12345)
    except SetupError as error:
        return str(error)
    return "no error"


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
@NEEDS_NO_GPU
def test_a_machine_without_a_driver_is_told_so() -> None:
    for text in run_ranks(2, start_here, {}, False):
        assert re.search(r"cuda.core, by which nvshmem4py is told the GPU, cannot use cuda:0: .*(libcuda|driver)", text)
        assert "pip install 'odc-fsdp[cuda" in text


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
def test_a_network_that_does_not_exist_is_named_by_its_variable() -> None:
    env = {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "nowhere0"}
    for text in run_ranks(2, start_here, env, True):
        assert "NVSHMEM finds no network to start by (Status code" in text
        assert "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME chooses one" in text


_SIZE = r"NVSHMEM_SYMMETRIC_SIZE +(\d+) "


def size_read_by_nvshmem(setting: str | None) -> str:
    """What the library prints when it is started by our code, with a heap for 5 MiB."""
    script = (
        "import test_nvshmem_library as t\n"
        "result, = t.run_threads(1, lambda exchange: t.new_heap().start(exchange, 5 << 20))\n"
        "assert 'the ranks have met' in str(result), result\n"
    )
    env = {**os.environ, "NVSHMEM_INFO": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env = env if setting is None else {**env, "NVSHMEM_SYMMETRIC_SIZE": setting}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.extended
@NEEDS_NVSHMEM4PY
@NEEDS_NO_GPU
@pytest.mark.parametrize("setting", [None, "1.5G", "512m", "100000000", "75000KB", "2T", "128 MB"])
def test_nvshmem_reads_the_heap_size_that_we_take_it_to_have(setting: str | None) -> None:
    """Also the one that we set ourselves, after the library has been loaded."""
    read = re.search(_SIZE, size_read_by_nvshmem(setting))
    assert read is not None
    expected = (5 + 64) << 20 if setting is None else nvshmem_heap_bytes({"NVSHMEM_SYMMETRIC_SIZE": setting})
    assert int(read[1]) == expected


# What these packages do wrong in versions that are not installed


def test_the_device_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[object] = []
    holder: Any = types.ModuleType("cuda.core")
    holder.Device = lambda index: types.SimpleNamespace(set_current=lambda: chosen.append(index))
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.core", holder)
    heap = NvshmemHeap(torch.device("cuda", 3), lambda address, num_bytes: torch.empty(num_bytes), 1.0)
    assert heap._own_device() is not None
    assert chosen == [3]


def test_a_python_side_that_cannot_be_imported_is_a_set_up_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    heap = NvshmemHeap(torch.device("cuda", 0), lambda address, num_bytes: torch.empty(num_bytes), 1.0)
    (result,) = run_threads(1, lambda exchange: heap.start(exchange, 1))
    assert isinstance(result, SetupError)
    assert "the NVSHMEM library cannot be loaded: No module named 'nvshmem.bindings'" in str(result)
