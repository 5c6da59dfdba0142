"""Layer 1: no processes. What ``odc run`` saved, and its report."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.balance.data.iteration import report_learned
from odc.config import LaunchEnvironment
from odc.fsdp_patch.automatic import AutomaticPatching
from odc.launch import main as launch_main
from odc.launch import report
from odc.launch.report import Account, describe, leave, savings, summarise

# What was saved


def test_savings_by_hand() -> None:
    result = savings([[[1.0, 3.0], [2.0]], [[3.0, 1.0], [1.0, 1.0]]])
    assert result.minibatches == 2
    assert result.compute_s == 2 * 2.0 + 2.0  # mean of 4 and 4, of 2 and 2
    assert (result.critical_s, result.lockstep_s, result.saved_s) == (4.0 + 2.0, 6.0 + 3.0, 3.0)


def test_minibatches_are_aligned_from_the_end() -> None:
    assert savings([[[9.0], [1.0]], [[2.0]]]) == savings([[[1.0]], [[2.0]]])
    assert savings([]) == savings([[[1.0]], []])
    assert savings([[[1.0]], []]).minibatches == 0


TIMES = st.lists(st.lists(st.integers(0, 9).map(float), max_size=4), max_size=4)


def in_step(ranks: Sequence[Sequence[float]]) -> float:
    """One minibatch, played: each microbatch begins when all ranks have ended the one before."""
    now_s, microbatch = 0.0, 0
    while any(microbatch < len(times) for times in ranks):
        now_s = max([now_s + times[microbatch] for times in ranks if microbatch < len(times)])
        microbatch += 1
    return now_s


@settings(deadline=None)
@given(st.lists(TIMES, min_size=1, max_size=4))
def test_savings_equal_a_simulation_and_are_never_negative(ranks: list[list[list[float]]]) -> None:
    result = savings(ranks)
    count = min(len(times) for times in ranks)
    latest = [[times[len(times) - count + i] for times in ranks] for i in range(count)]
    assert result.lockstep_s == pytest.approx(sum(map(in_step, latest)))
    assert result.critical_s == pytest.approx(sum(max(map(sum, minibatch)) for minibatch in latest))
    assert result.saved_s >= 0
    assert result.compute_s <= result.critical_s + 1e-9


def test_one_line_for_people() -> None:
    text = describe(savings([[[1.0, 3.0]], [[3.0, 1.0]]]), [1.0, 2.0], 10.0, [1.0, 2.0])
    assert text == (
        "odc: 1 minibatches on 2 ranks in 10.0 s; ranks waited for one another 1.5 s each (15 %). "
        "Synchronizing at every microbatch, as FSDP does, would have taken at least 2.0 s longer (20 %)."
    )
    none = describe(savings([[], []]), [0.0, 0.0], 0.0, [0.0, 0.0], "Net")
    assert none.endswith("0.0 s each (-).")
    assert none.startswith("odc: Net: 0 minibatches")


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([[[2.0]], [[4.0]]], "ranks synchronized once a minibatch anyway"),
        ([[[2.0, 3.0]], [[2.0, 3.01]]], "the slowest rank was so at every microbatch"),
    ],
)
def test_that_nothing_was_saved_is_said_in_a_line(times: list[list[list[float]]], reason: str) -> None:
    text = describe(savings(times), [1.0, 1.0], 10.0, [2.0, 4.0])
    assert text.endswith(f"one another 1.0 s each (10 %). No waiting was saved: {reason}.")
    assert len(text) < 160


def test_that_communication_cost_more_than_was_saved_is_said_plainly() -> None:
    times = [[[1.0, 3.0]], [[3.0, 1.0]]]
    assert describe(savings(times), [1.0, 1.0], 10.0, [2.0, 4.0]).endswith(
        "at least 2.0 s longer (20 %). ODC's own transfers took more, 3.0 s of each rank: compare with torchrun."
    )
    assert "own transfers" not in describe(savings(times), [1.0, 1.0], 10.0, [1.0, 2.0])


# The report


class FakeStore:
    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        total = int(self.values.get(key, b"0")) + amount
        self.values[key] = str(total).encode()
        return total


def account(model: str = "Net", times: Sequence[Sequence[float]] = ((1.0,), (2.0,))) -> Account:
    return Account(model, 10.0, 1.0, times)


def environment(rank: int, world_size: int = 3, attempt: str = "0", agent_store: bool = True) -> LaunchEnvironment:
    return LaunchEnvironment(rank=rank, world_size=world_size, attempt=attempt, agent_store=agent_store)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_the_last_rank_to_come_has_the_lines(order: tuple[int, ...]) -> None:
    store = FakeStore()
    for model in ("of the first process group", "of the next one"):
        lines = [leave(store, environment(rank), [account(model, [[1.0]] * len(model))]) for rank in order]
        assert lines[:2] == [None, None]
        assert lines[2] is not None
        assert len(lines[2]) == 1
        assert f"{len(model)} minibatches on 3 ranks in 10.0 s" in lines[2][0]


def test_where_rank_0_has_the_store_it_reports() -> None:
    store = FakeStore()
    lines = [leave(store, environment(rank, agent_store=False), [account()]) for rank in (1, 2, 0)]
    assert lines[:2] == [None, None]
    assert "2 minibatches on 3 ranks in 10.0 s" in str(lines[2])


def test_without_every_rank_there_is_no_report_and_a_restart_counts_anew() -> None:
    store = FakeStore()
    assert leave(store, environment(0), [account()]) is None
    assert leave(store, environment(2), [account()]) is None
    assert [leave(store, environment(rank, attempt="1"), [account()]) for rank in range(3)][:2] == [None, None]
    assert leave(store, environment(1), [account()]) is not None


def test_accounts_survive_json() -> None:
    one = account(times=[[0.1, 1 / 3], []])
    assert Account(**json.loads(json.dumps(asdict(one)))) == one


def test_models_are_told_apart_and_those_never_trained_left_out() -> None:
    def ranks(*accounts: Account) -> list[list[dict[str, object]]]:
        return [[asdict(one) for one in accounts]] * 2

    assert len(summarise(ranks(account("Policy"), account("Reference", ())))) == 1
    assert "Policy" not in summarise(ranks(account("Policy"), account("Reference", ())))[0]
    several = summarise(ranks(account("Policy"), account("Critic")))
    assert [line.split(":")[1] for line in several] == [" Policy", " Critic"]
    stages = [[asdict(account("First"))], [asdict(account("Last"))]]
    assert (summarise(stages), summarise([[], [asdict(account())]])) == ([], [])


def test_no_store_no_report() -> None:
    assert report.open_store(LaunchEnvironment(master_addr="localhost", master_port=1)) is None


def test_a_store_that_is_gone_does_not_fail_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gone(launch: LaunchEnvironment) -> None:
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(report, "open_store", gone)
    launch_main._report(environment(1), [account()], "")
    said = capsys.readouterr().err
    assert "no report from rank 1: PeerDiedError: a process is gone" in said
    assert "(connection refused)" in said


def test_a_store_that_is_silent_does_not_hold_up_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = threading.Event()
    monkeypatch.setattr(launch_main, "_REPORT_S", 0.05)
    monkeypatch.setattr(report, "open_store", lambda launch: stopped.wait())
    launch_main._report(environment(1), [account()], "")
    stopped.set()
    assert "no report from rank 1: PeerSilentError: 0.05 s have gone by" in capsys.readouterr().err


def test_what_loaders_have_learned_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = FakeStore()
    monkeypatch.setattr(report, "open_store", lambda launch: store)
    patching = AutomaticPatching(lambda module: None, lambda text: None)
    report_learned("a microbatch takes 3")
    patching.close()
    for rank in range(3):
        launch_main._report(environment(rank), [account()], patching.learned)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1] == "odc: a microbatch takes 3"


def test_a_closed_stderr_does_not_fail_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with open(tmp_path / "closed", "w") as closed:
        pass
    monkeypatch.setattr(sys, "stderr", closed)
    with pytest.raises(ValueError, match="closed"):
        print("a line", file=sys.stderr)
    launch_main._print("a line")
