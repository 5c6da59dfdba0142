"""Layer 1: no processes of ours (the solver CBC is one). exact_partition: exhaustive search, bounds, traces."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import IO

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from odc.balance import karmarkar_karp
from odc.balance.partition import cover, exact, instance, mip
from odc.balance.partition.exact import ExactPartition, exact_partition
from odc.balance.partition.instance import TOLERANCE, Instance


def optimum(costs: np.ndarray, k: int, *, equal_size: bool = False, speeds: np.ndarray | None = None) -> float:
    """The smallest makespan of all k ** n assignments."""
    owners = np.array(list(itertools.product(range(k), repeat=costs.size)))
    if equal_size:
        sizes = np.stack([(owners == part).sum(axis=1) for part in range(k)])
        owners = owners[(sizes == costs.size // k).all(axis=0)]
    times = [(owners == part) @ costs / (1.0 if speeds is None else speeds[part]) for part in range(k)]
    return float(np.max(times, axis=0).min())


def makespan(costs: np.ndarray, parts: list[list[int]], speeds: np.ndarray | None = None) -> float:
    speeds = np.ones(len(parts)) if speeds is None else speeds
    return max(float(costs[part].sum() / speed) for part, speed in zip(parts, speeds, strict=True))


def check(result: ExactPartition, costs: np.ndarray, k: int, speeds: np.ndarray | None = None) -> None:
    """What holds for every result."""
    assert len(result.parts) == k
    assert sorted(itertools.chain(*result.parts)) == list(range(costs.size))
    assert all(part == sorted(part) for part in result.parts)
    assert result.makespan == pytest.approx(makespan(costs, result.parts, speeds), rel=1e-12)
    assert 0 <= result.lower_bound <= result.makespan
    assert (result.gap == 0) == result.optimal
    assert result.seconds >= 0
    if speeds is None:
        assert result.parts == sorted(result.parts, key=lambda part: (not part, part))
        assert sum(not part for part in result.parts) == max(0, k - costs.size)


def hard() -> np.ndarray:
    """63 costs that can be split perfectly into 9 parts, which is hard to find: equal sums, cut at random."""
    return np.random.default_rng(1).dirichlet(np.ones(7), 9).ravel()


@pytest.fixture
def cbc_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that needs a search goes to CBC."""
    pytest.importorskip("pulp", reason="pulp is an optional package (extra: exact)")
    monkeypatch.setattr(exact, "MAX_ITEMS", 0)


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing counts as optimal by being close to the bound, so large instances do not end early."""
    set_tolerance(monkeypatch, 1e-13)


def set_tolerance(monkeypatch: pytest.MonkeyPatch, tolerance: float) -> None:
    for module in (exact, instance, mip):
        monkeypatch.setattr(module, "TOLERANCE", tolerance)


COST = st.just(0.0) | st.floats(1e-140, 1e6) | st.integers(0, 12).map(float) | st.floats(0.2, 1.0)
INSTANCE = st.tuples(st.lists(COST, max_size=7), st.integers(1, 4))
SPEEDS = st.lists(st.sampled_from([0.25, 1.0, 1.0, 3.0]) | st.floats(0.1, 10), min_size=4, max_size=4)
QUICK = settings(deadline=None, max_examples=24, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(QUICK, max_examples=20)


def compare(costs: list[float], k: int, equal_size: bool, speeds: list[float] | None) -> None:
    array = np.array(costs[: len(costs) // k * k] if equal_size else costs)
    speed = None if speeds is None else np.array(speeds[:k])
    result = exact_partition(array, k, equal_size=equal_size, speeds=speed, time_limit_s=20)
    check(result, array, k, speed)
    if equal_size:
        assert {len(part) for part in result.parts} == {array.size // k}
    best = optimum(array, k, equal_size=equal_size, speeds=speed)
    assert result.optimal
    assert best * (1 - 1e-12) <= result.makespan <= best * (1 + TOLERANCE)
    assert result.lower_bound <= best * (1 + 1e-12)


@pytest.fixture(params=[True, False], ids=["heuristic", "no heuristic"])
def start(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the start is good, or whatever comes first, so that the solvers find all of the way."""
    if not request.param:
        monkeypatch.setattr(exact, "split_by_cost", chunks)


def chunks(costs: np.ndarray, k: int, *, equal_size: bool, speeds: np.ndarray | None = None) -> list[list[int]]:
    return [list(range(part * costs.size // k, (part + 1) * costs.size // k)) for part in range(k)]


@QUICK
@given(INSTANCE, st.booleans(), st.none() | SPEEDS)
def test_search_against_exhaustive_search(
    start: None, instance: tuple[list[float], int], equal_size: bool, speeds: list[float] | None
) -> None:
    compare(*instance, equal_size, speeds)


@FEW
@given(INSTANCE, st.booleans(), st.none() | SPEEDS)
def test_mip_against_exhaustive_search(
    cbc_only: None, start: None, instance: tuple[list[float], int], equal_size: bool, speeds: list[float] | None
) -> None:
    compare(*instance, equal_size, speeds)


@pytest.mark.parametrize("max_items", [40, 0])
@pytest.mark.parametrize("speeds", [None, [0.5, 1.0, 0.5, 1.0]])
def test_from_nothing(monkeypatch: pytest.MonkeyPatch, max_items: int, speeds: list[float] | None) -> None:
    if not max_items:
        pytest.importorskip("pulp", reason="pulp is an optional package (extra: exact)")
    monkeypatch.setattr(exact, "MAX_ITEMS", max_items)
    monkeypatch.setattr(exact, "split_by_cost", chunks)
    rng = np.random.default_rng(3)
    for n, k, equal_size in [(9, 3, True), (9, 3, False), (8, 4, True), (8, 4, False)] * 2:
        compare(rng.lognormal(0.0, 0.7, n).tolist(), k, equal_size, speeds)


def test_search_and_mip_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pulp", reason="pulp is an optional package (extra: exact)")
    rng = np.random.default_rng(4)
    instances = [(rng.uniform(0.2, 1.0, n), n // 2, None) for n in (16, 16, 18)]
    instances += [(rng.uniform(0.2, 1.0, 10), 3, rng.choice([0.5, 0.8, 1.0], 3)) for _ in range(3)]
    by_search = [exact_partition(costs, k, speeds=speeds) for costs, k, speeds in instances]
    monkeypatch.setattr(exact, "MAX_ITEMS", 0)
    by_mip = [exact_partition(costs, k, speeds=speeds) for costs, k, speeds in instances]
    assert all(result.optimal for result in by_search + by_mip)
    for one, other in zip(by_search, by_mip, strict=True):
        assert one.makespan == pytest.approx(other.makespan, rel=2 * TOLERANCE)
        assert max(one.lower_bound, other.lower_bound) <= min(one.makespan, other.makespan) * (1 + 1e-12)


def test_minibatches_of_the_size_in_the_paper_are_proved() -> None:
    rng = np.random.default_rng(0)
    for n, k, equal_size in itertools.product((16, 32), (4, 8), (False, True)):
        lengths = rng.uniform(0.2, 1.0, n)
        costs = 0.2 * lengths**2 + lengths
        result = exact_partition(costs, k, equal_size=equal_size, time_limit_s=20)
        check(result, costs, k)
        assert result.optimal
        assert result.makespan <= makespan(costs, karmarkar_karp(costs, k, equal_size=equal_size)) * (1 + 1e-12)


def test_more_parts_than_items_with_speeds() -> None:
    speeds = np.array([0.1] * 50 + [1.0, 2.0])
    result = exact_partition([3.0, 2.0, 2.0], 52, speeds=speeds)
    assert result.makespan == 2.5  # two items at speed 2, while the third ends at 2
    assert result.optimal
    assert [len(part) for part in result.parts] == [0] * 50 + [1, 2]


def test_a_bound_that_is_met_starts_no_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "search_covers", None)
    monkeypatch.setattr(exact, "solve_mip", None)
    assert exact_partition([4.0, 3.0, 3.0, 2.0], 2).makespan == 6.0
    # 5 integers of 3 in 2 parts: a mean of 7.5, and no part of 8 is needed to see that 9 is best.
    assert exact_partition([3.0] * 5, 2).lower_bound == pytest.approx(9.0)
    with pytest.raises(TypeError):
        exact_partition([7.1, 5.3, 4.2, 3.9, 1.7], 2)


def test_sums_of_integers_are_multiples_of_their_divisor() -> None:
    result = exact_partition(np.arange(1.0, 51.0) * 3, 8, time_limit_s=1)
    assert result.lower_bound == 480.0  # the mean is 478.125
    assert exact_partition(np.arange(1.0, 51.0) * 3 + 2**-10, 8, time_limit_s=1).lower_bound < 479


@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("speeds", [None, [1.0, 2.0, 1.0]])
def test_no_cost(n: int, speeds: list[float] | None) -> None:
    result = exact_partition([0.0] * n, 3, speeds=speeds)
    assert sorted(itertools.chain(*result.parts)) == list(range(n))
    assert (result.makespan, result.lower_bound, result.gap, result.optimal) == (0.0, 0.0, 0.0, True)
    assert "proved optimal" in result.explain()


@pytest.mark.usefixtures("cbc_only", "strict")
@pytest.mark.parametrize("time_limit_s", [0.03, 1.0])
def test_time_limit(time_limit_s: float) -> None:
    costs = hard()
    best = costs.sum() / 9
    result = exact_partition(costs, 9, time_limit_s=time_limit_s)
    check(result, costs, 9)
    assert result.seconds < time_limit_s + 30  # it would take hours
    assert not result.optimal
    assert result.lower_bound <= best * (1 + 1e-12)
    assert result.gap == pytest.approx(result.makespan / result.lower_bound - 1)
    assert "above the optimum" in result.explain()


def crowded(n: int = 220, k: int = 100) -> tuple[np.ndarray, int]:
    """Two or three items a part: no heuristic meets the bound."""
    return np.random.default_rng(0).lognormal(9.0, 0.3, n), k


@pytest.mark.parametrize("speeds", [None, np.linspace(0.7, 1.3, 1150)], ids=["alike", "speeds"])
def test_a_program_that_would_be_too_large_is_not_built(
    monkeypatch: pytest.MonkeyPatch, speeds: np.ndarray | None
) -> None:
    """About 2 million variables would take pulp 40 seconds and 4 GB."""
    monkeypatch.setattr(mip, "find_solver", None)
    monkeypatch.setattr(mip, "_write_model", None)
    costs, k = crowded(2500, 1150)
    result = exact_partition(costs, k, speeds=speeds, time_limit_s=60)
    check(result, costs, k, speeds)
    assert 0 < result.gap < 0.1
    assert result.seconds < 30


@pytest.mark.usefixtures("cbc_only", "strict")
def test_the_cap_is_on_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[float] = []

    def run_cbc(cbc: str, limit_s: float, model: IO[bytes], solution: IO[bytes]) -> tuple[str, float]:
        solved.append(limit_s)
        return "", 0.0

    monkeypatch.setattr(mip, "run_cbc", run_cbc)
    for too_many, num_solved in ((0, 1), (1, 0)):
        solved.clear()
        # 63 items in 9 parts: the first 8 items may go to fewer parts.
        monkeypatch.setattr(mip, "MAX_VARIABLES", 63 * 9 - 36 - too_many)
        exact_partition(hard(), 9)
        assert len(solved) == num_solved


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 5), min_size=1, max_size=12), st.lists(st.floats(0.1, 5), min_size=1, max_size=5))
def test_variables_are_counted_before_they_are_made(costs: list[float], speeds: list[float]) -> None:
    problem = Instance(np.array(costs), np.array(speeds), None, 0.0)
    target = sum(costs) / max(speeds)  # what one part takes for all
    assert mip.count_variables(problem, target) == len(mip._allowed_pairs(problem.sorted_costs, problem.speeds, target))


@pytest.mark.usefixtures("cbc_only", "strict")
def test_building_stops_on_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock strikes while the variables are made, of which there are 17,000."""
    costs, k = crowded()
    asked: list[int] = []

    def seconds_left(problem: Instance) -> float:
        asked.append(1)
        return 1.0 if len(asked) < 4 else -1.0

    monkeypatch.setattr(Instance, "seconds_left", seconds_left)
    monkeypatch.setattr(mip, "run_cbc", None)
    result = exact_partition(costs, k)
    check(result, costs, k)
    assert result.gap > 0
    assert len(asked) < 8


def test_empty_parts_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "split_by_cost", lambda *_, **__: [[0, 1, 2, 3], [], []])
    costs = np.array([4.0, 0.0, 0.0, 0.0])
    check(exact_partition(costs, 3), costs, 3)


@pytest.mark.usefixtures("strict")
def test_search_stops_on_time_and_when_memory_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = np.random.default_rng(0).lognormal(0.0, 1.0, 24)
    full = exact_partition(costs, 6)
    for name, value in [("MAX_STATES", 2), ("MAX_COLUMNS", 3)]:
        with monkeypatch.context() as patch:
            patch.setattr(cover, name, value)
            patch.setattr(exact, "solve_mip", lambda instance: None)
            result = exact_partition(costs, 6)
        check(result, costs, 6)
        assert not result.optimal
        assert result.lower_bound <= full.makespan
    result = exact_partition(costs, 6, time_limit_s=1e-6)
    check(result, costs, 6)
    assert result.lower_bound <= full.makespan


def test_never_worse_than_the_start() -> None:
    costs, k = hard(), 9
    perfect = [list(range(7 * p, 7 * p + 7)) for p in range(k)]
    result = exact_partition(costs, k, start=perfect)
    assert result.optimal
    assert result.parts == perfect  # which no heuristic finds
    assert makespan(costs, karmarkar_karp(costs, k)) > result.makespan * (1 + 1e-9)


INFEASIBLE = "Integer infeasible - objective value 1000.00000000"
STOPPED = "Stopped on time (no integer solution - continuous used) - objective value 1000.00000000"


@pytest.mark.parametrize(
    ("status", "log", "in_time", "bound"),
    [
        (INFEASIBLE, "", True, 1.1),
        (INFEASIBLE, "", False, 0.0),  # said of instances that have a solution when the time is up
        (STOPPED, "No feasible solution found\nLower bound:                    1000.500\nGap: 1\n", True, 1.0005),
        (STOPPED, "Lower bound:                    1e+50\n", True, 1.1),
        (STOPPED, "", True, 0.0),
        ("Optimal - objective value 1020.39407367", "", True, 1.02039407367),
        ("", "", True, 0.0),
    ],
)
def test_what_is_taken_from_cbc(status: str, log: str, in_time: bool, bound: float) -> None:
    read = mip.read_bound(status, log, 1.1, in_time=in_time)
    assert read <= bound
    assert read == pytest.approx(bound, rel=2e-6)


@pytest.mark.usefixtures("cbc_only", "strict")
@pytest.mark.parametrize(("seconds", "optimal"), [(1.0, True), (99.0, False)])
def test_infeasible_is_believed_only_in_time(monkeypatch: pytest.MonkeyPatch, seconds: float, optimal: bool) -> None:
    def run_cbc(cbc: str, limit_s: float, model: IO[bytes], solution: IO[bytes]) -> tuple[str, float]:
        solution.write(INFEASIBLE.encode())
        return "", seconds

    monkeypatch.setattr(mip, "run_cbc", run_cbc)
    set_tolerance(monkeypatch, 1e-9)
    assert exact_partition(hard(), 9, time_limit_s=100).optimal == optimal


def test_fractional_points_are_no_partition() -> None:
    problem = Instance(np.array([2.0, 1.0]), np.ones(2), None, 0.0)
    pairs = [(0, 0), (1, 0), (1, 1)]
    answer = ["", "0 M 3 0", "** 1 x0 1 0", "2 x1 0.5 0", "3 x2 0.5 0"]
    assert mip.read_parts(problem, answer, pairs) is None
    assert mip.read_parts(problem, [*answer[:3], "3 x2 0.99999 0"], pairs) == [[0], [1]]


@pytest.mark.usefixtures("cbc_only", "strict")
def test_missing_pulp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    with pytest.raises(ImportError, match=r"pip install 'odc-fsdp\[exact\]'"):
        exact_partition(hard(), 9)


@pytest.mark.usefixtures("cbc_only", "strict")
def test_missing_cbc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mip.shutil, "which", lambda _: None)
    with pytest.raises(RuntimeError, match="found no CBC"):
        exact_partition(hard(), 9)


def test_small_instances_need_no_pulp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pulp", None)
    assert exact_partition(np.random.default_rng(0).uniform(0.2, 1.0, 16), 8).optimal


def children() -> list[str]:
    return [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The working directory and the one for temporary files, both empty."""
    folders = [tmp_path / "cwd", tmp_path / "tmp"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.chdir(folders[0])
    monkeypatch.setattr(tempfile, "tempdir", str(folders[1]))
    return folders


@pytest.mark.usefixtures("cbc_only", "strict")
def test_no_traces(places: list[Path], capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder) -> None:
    gc.collect()  # what other tests have left may warn when it goes
    recwarn.clear()
    before = children()
    exact_partition(hard(), 9, time_limit_s=0.5)
    assert [os.listdir(place) for place in places] == [[], []]
    assert children() == before
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


@pytest.mark.usefixtures("cbc_only", "strict")
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts children in /proc")
def test_no_traces_of_an_interrupt(places: list[Path]) -> None:
    before, during, open_files = children(), [], set(os.listdir("/proc/self/fd"))

    def interrupt(_: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not subprocess.Popen.communicate.__code__:
            frame = frame.f_back
        if frame is None:
            return  # the solver does not run yet
        signal.setitimer(signal.ITIMER_REAL, 0)
        during.append((len(children()) - len(before), len(os.listdir(places[1]))))
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            exact_partition(hard(), 9, time_limit_s=30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert during == [(1, 0)]  # a solver to leave behind, and never a file, so none after SIGKILL either
    assert children() == before
    assert [os.listdir(place) for place in places] == [[], []]
    assert set(os.listdir("/proc/self/fd")) <= open_files


@pytest.mark.usefixtures("cbc_only", "strict")
def test_a_solver_that_does_not_stop_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mip, "GRACE_S", -59.5)  # before it could stop by itself
    before, costs = children(), hard()
    result = exact_partition(costs, 9, time_limit_s=60.0)
    check(result, costs, 9)
    assert result.seconds < 30
    assert children() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0: expected an integer"),
        ({"costs": [1.0, -1.0]}, r"costs\[1\] is -1.0"),
        ({"k": 2, "equal_size": True}, "3 items cannot be split into k=2 parts of equal size"),
        ({"time_limit_s": 0.0}, "time_limit_s=0.0: expected"),
        ({"time_limit_s": math.nan}, "time_limit_s=nan: expected"),
        ({"time_limit_s": math.inf}, "time_limit_s=inf: expected"),
        ({"speeds": [1.0]}, "speeds has 1 entries"),
        ({"speeds": [1.0, 0.0, 1.0]}, r"speeds\[1\] is 0"),
        ({"start": [[0], [1, 2]]}, "start has 3 indices in 2 lists: expected k=3"),
        ({"start": [[0], [1], [1]]}, "each of 0 .. 2 once"),
        ({"start": [[0], [1], [2.0]]}, "an index in start=2.0"),
        ({"start": [0, 1, 2]}, "expected k=3 lists of indices"),
        ({"start": [[0, 1], [2], []], "equal_size": True}, r"parts of \[2, 1, 0\] items: equal_size needs 1"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    given_arguments: dict[str, object] = {"costs": [1.0, 2.0, 3.0], "k": 3, **arguments}
    with pytest.raises(ValueError, match=message):
        exact_partition(**given_arguments)  # type: ignore[arg-type]


def test_results_are_frozen_and_arguments_left_alone() -> None:
    costs, start = np.array([1.0, 3.0, 2.0]), [[2, 1], [0]]
    result = exact_partition(costs, 2, start=start)
    np.testing.assert_array_equal(costs, [1.0, 3.0, 2.0])
    assert start == [[2, 1], [0]]
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.makespan = 0.0  # type: ignore[misc]
