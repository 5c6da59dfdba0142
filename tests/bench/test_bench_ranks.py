"""Layer 3: ranks as processes. What becomes of a benchmark's ranks when one of them fails."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from odc.bench.harness import ranks
from odc.bench.harness.ranks import Rank, RankFailedError, run_ranks
from odc.bench.harness.warm_launch import WarmLauncher, output_of


def fail(me: Rank, how: str) -> int:
    rank, world_size = me.rank, me.world_size
    me.report(rank + 0.5)
    if rank == world_size - 1 and how == "raise":
        raise ValueError("on purpose")
    if rank == world_size - 1 and how == "exit":
        os._exit(0)
    if how != "none":
        dist.recv(torch.zeros(1), world_size - 1)
    return rank * world_size


def test_what_ranks_return_and_report() -> None:
    reported: list[float] = []
    assert run_ranks(3, fail, "none", on_progress=reported.append) == [0, 3, 6]
    assert sorted(reported) == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("how", ["raise", "exit"])
def test_one_that_fails_ends_all(how: str) -> None:
    """The other may be the first to say so: its connection ends."""
    with pytest.raises(
        RankFailedError,
        match="rank 1 of 2: ValueError: on purpose|rank 1 of 2: its process ended without|rank 0 of 2: ",
    ):
        run_ranks(2, fail, how)


def stay(me: Rank) -> int:
    """Give a result; rank 1's process does not end behind it."""
    if me.rank == 1:
        threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    return me.rank


def test_a_rank_that_hangs_behind_its_result_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ranks, "_END_LIMIT_S", 3.0)
    assert run_ranks(2, stay) == [0, 1]
    assert "rank 1 (pid " in caplog.text
    assert "has not ended within 3 s behind its result, and is killed" in caplog.text


def test_variables_of_one_launch(warm_launcher: WarmLauncher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(os.environ.get('ODC_STAGING'))")
    for environment, said in (({"ODC_STAGING": "on"}, "on"), ({}, "None")):
        assert warm_launcher.run([str(script)], tmp_path, environment=environment) == [0, 0]
        assert [output_of(tmp_path, rank).read_text().strip() for rank in range(2)] == [said] * 2


ENDS = {
    "pass": (0, ""),
    "sys.exit(3)": (3, ""),
    "sys.exit('no more')": (1, "no more"),
    "raise ValueError": (1, "ValueError"),
}
"""Of a script: the exit code, and the last words."""


@pytest.mark.parametrize("ends_at_once", [False, True])
def test_a_launch_ends_as_an_interpreter_does(warm_launcher: WarmLauncher, tmp_path: Path, ends_at_once: bool) -> None:
    """Behind its threads and exit handlers."""
    script = tmp_path / "script.py"
    last = (
        "threading.Thread(target=lambda: (time.sleep(0.3), print('thread'))).start()\natexit.register(print, 'handler')"
    )
    script.write_text(f"import atexit, os, sys, threading, time\n{last}\nexec({list(ENDS)}[int(os.environ['RANK'])])")
    codes = warm_launcher.run([str(script)], tmp_path, world_size=len(ENDS), ends_at_once=ends_at_once)
    assert codes == [code for code, _ in ENDS.values()]
    for rank, (_, words) in enumerate(ENDS.values()):
        text = output_of(tmp_path, rank).read_text()
        assert text.count("thread\n") == text.count("handler\n") == 1
        assert text.index("thread\n") < text.index("handler\n")
        assert words in text
