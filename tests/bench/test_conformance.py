"""Layer 3: ranks as processes. Every cell of the conformance suite, against plain FSDP and the committed table."""

from __future__ import annotations

import functools
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from typer.testing import CliRunner

import odc
from odc.bench.proof.conformance.benchmark import COLUMNS, ROW, write_markdown
from odc.bench.proof.conformance.cells import AXES, MEANINGS, Cell, Outcome, all_cells, run_cells, select
from odc.bench.proof.parity import jobs
from odc.bench.proof.parity.cases import impossible
from odc.bench.proof.parity.jobs import Prepare
from odc.bench.proof.parity.training import STEPS
from odc.cli.app import app
from odc.fsdp_patch.session import Session
from odc.minibatch.runtime import Runtime

TABLE = Path(__file__).parents[2] / "docs" / "conformance.md"
CELLS = all_cells()


def cells_of(words: str) -> list[Cell]:
    return select(CELLS, words.split())


def read_statuses(markdown: str) -> dict[str, str]:
    """Status of each cell by name, from what :func:`write_markdown` wrote."""
    found = {}
    for line in markdown.splitlines():
        row = [entry.strip() for entry in line.split("|")[1:-1]]
        if row and row[0] in AXES["FSDP"]:
            for column, entry in zip(COLUMNS, row[len(ROW) :], strict=True):
                if entry:
                    found["/".join((*row[: len(ROW)], *column))] = entry if entry.isalpha() else "passed"
    return found


def latin_square() -> list[Cell]:
    """Each kind of FSDP with each sharding once, and every value of the other axes with each of both."""
    axes = {name: list(values) for name, values in AXES.items()}
    names = []
    for i, fsdp in enumerate(axes["FSDP"]):
        for j, sharding in enumerate(axes["sharding"]):
            accumulation = axes["accumulation"][(i + j) % 3]
            precision, clipping = axes["precision"][(i + j) % 2], axes["clipping"][(i + j // 2) % 2]
            names.append(f"{fsdp}/{precision}/{sharding}/{accumulation}/{clipping}")
    return [cell for cell in CELLS if cell.name in names]


def check_against_the_table(cells: list[Cell]) -> None:
    """Every cell passes or is refused with a reason, as the committed table says."""
    committed = read_statuses(TABLE.read_text())
    for outcome in run_cells(cells):
        assert outcome.status in ("passed", "refused"), (outcome.cell.name, outcome.reason)
        assert (outcome.status == "refused") == bool(outcome.reason)
        assert committed[outcome.cell.name] == outcome.status


@pytest.mark.extended
def test_cells_of_a_latin_square() -> None:
    cells = latin_square()
    assert len(cells) == 9
    check_against_the_table(cells)


@pytest.mark.extended
def test_all_cells() -> None:
    check_against_the_table(CELLS)


def test_the_committed_table_is_complete() -> None:
    text = TABLE.read_text()
    committed = read_statuses(text)
    assert set(committed) == {cell.name for cell in CELLS}
    passed, refused = (list(committed.values()).count(status) for status in ("passed", "refused"))
    assert f"**{len(CELLS)} cells: {passed} passed, {refused} refused, 0 failed**" in text


# The checks can fail: each perturbation of the ODC run fails the cells, for the reason one expects.


def drop_one_push(minibatch: int, rank: int) -> None:
    """Rank 1 loses its push of the first unit in one minibatch."""
    push = Runtime.scatter_accumulate

    def scatter_accumulate(self: Runtime, unit: int, grads: Any, *, present: Any = None) -> None:
        if (rank, unit, self.minibatch) != (1, 0, minibatch):
            push(self, unit, grads, present=present)

    Runtime.scatter_accumulate = scatter_accumulate  # type: ignore[method-assign]


def patch_nothing(rank: int) -> None:
    """ODC enters the model and leaves it at once."""
    patch = odc.patch_fsdp

    class Idle(Session):
        def finish(self) -> None:
            """The gradients are FSDP's, hence final."""

    def patch_and_close(model: nn.Module) -> odc.Session:
        session = patch(model)
        session.close()
        session.__class__ = Idle
        return session

    odc.patch_fsdp = patch_and_close  # type: ignore[assignment]


further = functools.partial(pytest.param, marks=pytest.mark.extended)


@pytest.mark.parametrize(
    ("words", "prepare", "reason"),
    [
        ("fp32 full 1 clip", functools.partial(drop_one_push, 1), "gradients (0, "),
        further("bf16 full 1 clip", functools.partial(drop_one_push, 1), "gradients (0, "),
        further("fp32 full 1 no-clip", functools.partial(drop_one_push, STEPS), f"gradients ({STEPS - 1}, "),
        ("fp32 full 1 no-clip", patch_nothing, f"0 gathers and 0 pushes in 0 of {STEPS} minibatches"),
    ],
)
def test_a_wrong_run_fails_its_cells(words: str, prepare: Prepare, reason: str) -> None:
    cells = cells_of(words)
    assert [cell.fsdp for cell in cells] == list(AXES["FSDP"])
    for outcome in run_cells(cells, prepare=prepare):
        assert outcome.status == "failed"
        assert reason in outcome.reason


@pytest.mark.extended
def test_a_lost_push_between_hybrid_ranks_fails_its_cells() -> None:
    for outcome in run_cells(cells_of("bf16 hybrid 1 clip"), prepare=functools.partial(drop_one_push, 1)):
        assert outcome.status == "failed"
        assert "gradients (0, " in outcome.reason


def break_fsdp1(rank: int) -> None:
    """FSDP1 with flat parameters raises on one rank, with original ones it is refused.

    The rank whose news is read first: what then fails on the other may have arrived as well by then.
    """
    patch = odc.patch_fsdp

    def broken(model: nn.Module) -> odc.Session:
        if isinstance(model, FSDPModule):
            return patch(model)
        if isinstance(model, FullyShardedDataParallel) and model._use_orig_params:
            raise odc.UnsupportedError("not today")
        if rank == 0:
            raise RuntimeError("broken on purpose")
        return patch(model)

    odc.patch_fsdp = broken  # type: ignore[assignment]


def test_errors_fail_their_cell_only_and_refusals_say_why() -> None:
    cells = cells_of("fp32 full 1 clip")
    flat, original, fsdp2 = run_cells(cells, prepare=break_fsdp1)
    assert (flat.status, original.status, fsdp2.status) == ("failed", "refused", "passed")
    assert "rank 0: RuntimeError: broken on purpose" in flat.reason
    assert original.reason.startswith("not today (in session = odc.patch_fsdp")


def begin_after(marker: Path, rank: int) -> None:
    """No rank may have a result before the limit has been looked at."""
    deadline = time.monotonic() + 60.0
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_no_result_in_time_fails_the_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(jobs, "CASE_LIMIT_S", 0.0)
    marker = tmp_path / "over"
    cells, prepare = cells_of("fsdp2 fp32 full 1 clip"), functools.partial(begin_after, marker)
    (outcome,) = run_cells(cells, lambda outcome: marker.touch(), prepare)
    assert (outcome.status, outcome.reason) == ("failed", "rank 0: no word; rank 1: no word")


# The table and the command line, without ranks.


def test_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = [Outcome(CELLS[0], "passed", "", 0.0, 1e-7, 2e-6), Outcome(CELLS[1], "refused", "a | b\nc")]
    write_markdown(tmp_path / "table.md", written, {"torch": "2", "date": "today"})
    text = (tmp_path / "table.md").read_text()
    assert read_statuses(text) == {CELLS[0].name: "passed", CELLS[1].name: "refused"}
    assert "**2 cells: 1 passed, 1 refused, 0 failed**" in text
    assert r"a \| b c" in text


def test_every_cell_has_a_script_of_its_own_that_plain_fsdp_can_run() -> None:
    cases = [cell.case for cell in CELLS]
    assert len({case.describe() for case in cases}) == len(CELLS)
    assert [reason for case in cases if (reason := impossible(asdict(case)))] == []


def test_every_value_has_a_meaning() -> None:
    assert [value for values in AXES.values() for value in values] == list(MEANINGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filter", "fp23"], "is no value of an axis"),
        (["--filter", "clip no-clip"], "no cell has all of clip no-clip"),
        (["--filter", "fp32", "--markdown", "part.md"], "leave out --filter"),
    ],
)
def test_bad_options_are_explained(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "conformance", *arguments], terminal_width=200)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
