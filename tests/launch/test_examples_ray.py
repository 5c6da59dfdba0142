"""Layer 4: the example for Ray Train on two workers of this machine: the plain loop's losses, and a lost worker."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from odc.bench.harness.warm_launch import WarmLauncher, output_of

MISSING = [name for name in ("ray", "transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.extended,  # Ray starts and ends a cluster
    pytest.mark.skipif(bool(MISSING), reason=f"the example needs {', '.join(MISSING)} (extras: examples, ray)"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
STEPS = 12
WORDS = ["--tiny", "--steps", str(STEPS), "--save-every", "2"]
LIMIT_S = 300.0


class Job:
    """The example as a process, with a Ray of its own."""

    def __init__(self, out: Path, room: Path, *words: str, before: Sequence[str] = ()) -> None:
        self.out, self._log = out, out.parent / f"{out.name}.log"
        script = [sys.executable, str(EXAMPLES / "ray_train_sft.py"), "--num-workers", "2", "--out", str(out)]
        command = [*before, *script]
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_TMPDIR": str(room), "ODC_TIMEOUT": "60"}
        own |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "RAY_ADDRESS": "local"}
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, *WORDS, *words],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=out.parent,
            )

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def workers(self, rank: int) -> list[int]:
        """The processes that have been this rank, one after the other. Ray may show a line twice."""
        return [*dict.fromkeys(map(int, re.findall(rf"rank {rank} is process (\d+)", self.said())))]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def result(self) -> dict[str, Any]:
        """Once it has ended well; its workers have ended too."""
        code = self.process.wait(LIMIT_S)
        assert code == 0, self.said()
        pids = [pid for rank in range(2) for pid in self.workers(rank)]
        deadline = time.monotonic() + 20
        while any(is_alive(pid) for pid in pids):
            assert time.monotonic() < deadline, pids
            time.sleep(0.05)
        result: dict[str, Any] = json.loads((self.out / "result.json").read_text())
        return result

    def close(self) -> None:
        """Ray ends what it has started when the process that asked for it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Of Ray's sockets, whose paths have to be short."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, room: Path) -> dict[str, Any]:
    """The result of a job that loses nobody."""
    with closing(Job(tmp_path_factory.mktemp("whole") / "out", room, "--deterministic")) as job:
        result = job.result()
        assert [len(job.workers(rank)) for rank in range(2)] == [1, 1]
        return result


def test_workers_of_ray_train_as_the_plain_loop_does(tmp_path: Path, whole: dict[str, Any]) -> None:
    libraries = ("torch._dynamo", "torch.distributed.fsdp", "transformers.models.qwen2.modeling_qwen2", "accelerate")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with closing(WarmLauncher(libraries, environment)) as launcher:
        words = [str(EXAMPLES / "long_context_sft.py"), "--out", str(tmp_path), *WORDS, "--no-odc"]
        codes = launcher.run(words, tmp_path, ends_at_once=True)
        assert codes == [0, 0], output_of(tmp_path, 0).read_text() + output_of(tmp_path, 1).read_text()
    plain = json.loads((tmp_path / "result.json").read_text())
    assert (whole["ranks"], len(whole["losses"])) == (2, STEPS)
    assert whole["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert whole["eval_losses"] == pytest.approx(plain["eval_losses"], rel=1e-5)


def test_workers_are_ranks_of_odc_exec(tmp_path: Path, whole: dict[str, Any], room: Path) -> None:
    """Of a loop that knows nothing of ODC."""
    before = (sys.executable, "-m", "odc", "exec", "--deterministic", "--")
    with closing(Job(tmp_path / "out", room, "--no-odc", before=before)) as job:
        result, said = job.result(), job.said()
    assert "odc: patched LossModel (FSDP2): 3 units over 2 ranks" in said
    assert re.search(r"odc: \d+ minibatches on 2 ranks", said)
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_when_a_worker_is_killed_all_go_on_from_the_newest_checkpoint(
    tmp_path: Path, whole: dict[str, Any], room: Path
) -> None:
    with closing(Job(tmp_path / "out", room, "--deterministic")) as job:
        steps = tmp_path / "out" / "steps.jsonl"
        job.wait_for(lambda: steps.exists() and len(steps.read_text().splitlines()) >= 5)
        os.kill(job.workers(1)[0], signal.SIGKILL)
        result = job.result()
        said = job.said()
        assert [len(job.workers(rank)) for rank in range(2)] == [2, 2], said
    begun = set(re.findall(r"pid=(\d+)\)\S* starting at the beginning", said))
    ((pid, step),) = set(re.findall(r"pid=(\d+)\)\S* resumed from \S+/step-(\d{6})", said))
    assert [*map(int, (*begun, pid))] == job.workers(0)
    assert int(step) in range(4, STEPS, 2)
    assert (result["losses"], result["eval_losses"]) == (whole["losses"], whole["eval_losses"])
