"""Layer 3: ranks as processes. The script that the quick start makes, under ``odc run`` as it says."""

from __future__ import annotations

import contextlib
import io
import os
import re
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from process_ranks import run_ranks

from odc.launch.main import main
from odc.launch.script import run_script

QUICKSTART = (Path(__file__).parents[2] / "docs" / "quickstart.md").read_text()


def _run_rank(rank: int, world_size: int, script: str, port: int) -> list[tuple[str, str]]:
    """What it prints under a dry run, under ODC and under plain FSDP; what ODC says of these."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    ended = []
    for attempt, arguments in enumerate((["--dry-run", script], [script], [])):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            contextlib.suppress(SystemExit),
            patch.object(dist, "init_process_group"),  # this process is in a group already, and stays there
            patch.object(dist, "destroy_process_group"),
        ):
            main(arguments) if arguments else run_script(script, [])
        ended.append((out.getvalue(), err.getvalue()))
    return ended


@pytest.mark.extended
def test_the_script_of_the_quick_start_does_what_is_said(tmp_path: Path) -> None:
    (script,) = re.findall(r"^cat > train.py <<'END'\n(.+?)^END$", QUICKSTART, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = run_ranks(2, _run_rank, str(tmp_path / "train.py"), store.port, timeout_s=120)
    (_, said_dry), (trained, said), (plain, _) = ranks[0]
    (shown,) = re.findall(r"^```text\n(odc: would patch .+?)^```$", QUICKSTART, re.MULTILINE | re.DOTALL)
    assert said_dry == shown
    assert said.startswith("odc: patched Sequential (FSDP2): 4 units over 2 ranks, transport shm, in place\n")
    reports = [said for _, (_, said), _ in ranks if "odc: 10 minibatches on 2 ranks in " in said]
    assert len(reports) == 1  # by the last rank to come, whichever it is
    assert trained == plain != ""
