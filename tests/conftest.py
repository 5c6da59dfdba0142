"""Shared by all layers: nothing may be left behind by any test."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from odc.bench.harness.warm_launch import WarmLauncher

import own_shm
import sharing  # noqa: F401  its tests find it, though this folder is on no path below

# `python -m pytest` puts the repository's root here, and pytest this file's folder. Both have folders named like the
# rooms, which would be found by a second name: `kernels` is what transformers calls a distribution that it looks for.
_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) not in (_HERE, os.path.dirname(_HERE))]

# Before anything imports torch. On few cores, threads of several processes that wait for one another busily take most
# of the time; torchrun sets the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The client of Hugging Face's hub reads these once, when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if not own_shm.is_private:
        own_shm.leave_dev_shm()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("ODC_TEST_DEVICE") == "cuda" and item.get_closest_marker("on_host"):
        pytest.skip("it looks at memory of a host, or at what poses as a GPU there")


def _odc_descriptors() -> set[str]:
    """memfds of ours that this process still holds."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(entry.readlink().as_posix())
    return {target for target in found if "memfd:odc-" in target}


def _odc_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("odc-")]


def _soon(condition: Callable[[], bool]) -> None:
    """Give it some time to become true. What is left behind stays."""
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def pytest_sessionfinish() -> None:
    """Wait for multiprocessing's own helpers to end: no process may outlive the tests, not even for a moment."""
    from multiprocessing import forkserver, resource_tracker

    # Children that a failed test left hold the helpers' pipes, which would then be waited for without end.
    for child in multiprocessing.active_children():
        child.kill()
        child.join()
    # What CPython's own tests use; the fork server first, because it holds the tracker's pipe.
    for helper in (forkserver._forkserver, resource_tracker._resource_tracker):  # type: ignore[attr-defined]
        helper._stop()


def _launcher(*libraries: str, **environment: str) -> contextlib.closing[WarmLauncher]:
    from odc.bench.harness.warm_launch import WarmLauncher  # only here: it imports torch

    always = ("torch._dynamo", "torch.distributed.fsdp", "odc.launch.main", "odc.transports.shm")
    return contextlib.closing(WarmLauncher([*always, *libraries], {**os.environ, **environment}))


@pytest.fixture(scope="session")
def warm_launcher() -> Iterator[WarmLauncher]:
    """For scripts that use torch and ODC and nothing else."""
    with _launcher(ODC_TIMEOUT="60") as launcher:
        yield launcher


@pytest.fixture(scope="session")
def trainer_launcher() -> Iterator[WarmLauncher]:
    """For scripts that use transformers, accelerate or TRL."""
    transformers = ("trainer", "models.llama.modeling_llama", "models.qwen2.modeling_qwen2", "generation.utils")
    trl = ("sft_trainer", "grpo_trainer", "dpo_trainer", "reward_trainer")
    libraries = [*(f"transformers.{one}" for one in transformers), *(f"trl.trainer.{one}" for one in trl)]
    torch = ("torch.distributed.tensor.parallel", "torch.distributed.checkpoint")
    with _launcher(*torch, "accelerate", "datasets", *libraries, "odc.balance") as launcher:
        yield launcher


@pytest.fixture(scope="session")
def warm(trainer_launcher: WarmLauncher) -> Callable[..., str]:
    """Runs a script in a folder, ``with_odc`` or plain; returns what it printed."""
    from odc.bench.harness.warm_launch import output_of

    def run(
        words: list[str], folder: Path, *, with_odc: bool, code: int = 0, ranks: int = 2, ends_at_once: bool = True
    ) -> str:
        folder.mkdir(exist_ok=True)
        codes = trainer_launcher.run(words, folder, with_odc=with_odc, ends_at_once=ends_at_once, world_size=ranks)
        text = "".join(output_of(folder, rank).read_text() for rank in range(len(codes)))
        assert any(codes) == (code != 0), text
        return text

    return run


@pytest.fixture(scope="module")
def fakes() -> Iterator[None]:
    """The fake transports, by name."""
    from fake_nvshmem import registered_fakes  # only here: it imports torch

    with registered_fakes():
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """This process is the only rank of a process group."""
    import torch.distributed as dist  # only here: it takes long

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Collections, and looks at all objects, take the longer the more there are: what was there before a file is left
    out of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No file in /dev/shm, no rank process, no daemon thread, no descriptor of ours after a test."""
    before = own_shm.shared_memory()
    yield
    _soon(lambda: own_shm.shared_memory() <= before)  # of processes that are ending just now
    assert own_shm.shared_memory() <= before
    if _odc_descriptors() or _odc_threads():
        gc.collect()  # tracebacks of expected failures hold on to buffers; too slow to do after every test
        _soon(lambda: not _odc_threads())  # those that end just now
    assert not _odc_descriptors()
    assert not multiprocessing.active_children()
    assert not _odc_threads()
