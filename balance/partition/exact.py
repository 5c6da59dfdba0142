"""The partition with the smallest makespan, proved: a search for covers, then a mixed integer program."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_costs, as_count, as_speeds
from odc.balance.partition.bounds import lower_bound
from odc.balance.partition.differencing import Parts
from odc.balance.partition.kway import balance, canonical, fill_empty

# A makespan this close (relative) to its lower bound counts as optimal: no cost model is that exact.
TOLERANCE = 1e-6
_ROUNDING = 1e-12  # of sums of floats, relative, with room to spare

# The search for covers lists the subsets of each half of the items, and stops where memory would grow large.
_MAX_ITEMS, _MAX_COLUMNS, _MAX_STATES, _CHUNK = 40, 1_000_000, 2_000_000, 2_000_000
_FIRST_GAP, _GAP_GROWTH, _FEW_COLUMNS = 1e-8, 1.4, 100
_COLUMN = np.dtype([("mask", "i8"), ("kind", "i8"), ("load", "f8")])
_STATE = np.dtype([("mask", "i8"), ("used", "i8"), ("left", "f8"), ("speed", "f8"), ("time", "f8"), ("node", "i8")])

# CBC's tolerances are absolute, about 1e-7: it gets costs for which the lower bound is this number.
_MIP_SCALE = 1000.0
_MIP_GRACE_S = 2.0  # it looks at its clock rarely


@dataclass(frozen=True)
class ExactPartition:
    """A partition, and how much better another one can be at most. Makespans are in units of cost / speed."""

    parts: list[list[int]]
    makespan: float
    lower_bound: float  # proved: no partition has a smaller makespan
    seconds: float

    @property
    def optimal(self) -> bool:
        """Whether no partition has a makespan smaller by more than the relative ``TOLERANCE``."""
        return self.makespan <= self.lower_bound * (1 + TOLERANCE)

    @property
    def gap(self) -> float:
        """``(makespan - lower_bound) / lower_bound``; 0 if ``optimal``."""
        return 0.0 if self.optimal else self.makespan / self.lower_bound - 1

    def explain(self) -> str:
        """One sentence for a log."""
        proof = "proved optimal" if self.optimal else f"at most {self.gap:.2g} (relative) above the optimum"
        return f"{len(self.parts)} parts with makespan {self.makespan:.6g}, {proof}, in {self.seconds:.3g} s."


def exact_partition(
    costs: npt.ArrayLike,
    k: int,
    *,
    equal_size: bool = False,
    speeds: npt.ArrayLike | None = None,
    time_limit_s: float = 60.0,
    start: Sequence[Sequence[int]] | None = None,
) -> ExactPartition:
    """Split the items 0 .. len(costs) - 1 into ``k`` parts with the smallest makespan.

    The makespan is the largest total cost of a part, divided by the part's speed if there are ``speeds``.
    The best of ``start`` and the heuristics is what a solver must beat; if that meets a lower bound, none
    is started. Up to 40 items are searched by :class:`_Cover`; more items, and instances for which that would
    take too much memory, are a mixed integer program for the solver CBC.

    Args:
        costs: one number per item, finite and at least 0.
        k: number of parts, at least 1.
        equal_size: all parts get ``len(costs) / k`` items.
        speeds: one number above 0 per part. Default: all 1.
        time_limit_s: for all of it; may be exceeded by 2 seconds.
        start: ``k`` lists of indices, together every index once.

    Returns:
        The partition, never worse than ``start``. Without ``speeds`` its parts are in the order of
        :func:`odc.balance.karmarkar_karp`, else part ``p`` has speed ``speeds[p]``.

    Raises:
        ValueError: an argument is not as described.
        ImportError: CBC is needed and pulp is not installed.
        RuntimeError: CBC is needed and is not there, or fails.
    """
    begin = time.perf_counter()
    task = _checked(as_costs(costs), as_count(k, "k"), equal_size, speeds, time_limit_s, start)
    if not task.proved and task.costs.size <= _MAX_ITEMS:
        _Cover(task).run()
    if not task.proved and time.perf_counter() < task.deadline:
        _solve_mip(task)
    parts = [sorted(part) for part in task.parts]
    if speeds is None:
        if not equal_size:
            fill_empty(task.costs, parts)
        parts = canonical(parts)
    makespan = task.measure(parts)
    return ExactPartition(parts, makespan, min(task.bound, makespan), time.perf_counter() - begin)


@dataclass
class _Task:
    """The checked instance, the best partition so far, and the best bound so far."""

    costs: FloatArray
    speeds: FloatArray
    size: int | None  # items per part
    deadline: float
    parts: Parts = field(default_factory=list)
    makespan: float = math.inf
    bound: float = 0.0

    def __post_init__(self) -> None:
        self.order: IntArray = np.argsort(-self.costs, kind="stable")
        self.sorted_costs: FloatArray = self.costs[self.order]
        # Of integers all sums are multiples of their greatest common divisor.
        integers = (self.costs % 1 == 0).all() and (self.speeds == 1).all() and self.costs.sum() < 1e9
        self.unit = int(np.gcd.reduce(self.costs.astype(np.int64), initial=0)) if integers else 0

    @property
    def proved(self) -> bool:
        return self.makespan <= self.bound * (1 + TOLERANCE)

    def measure(self, parts: Parts) -> float:
        return max(float(self.costs[part].sum() / speed) for part, speed in zip(parts, self.speeds, strict=True))

    def offer(self, parts: Parts) -> None:
        if (makespan := self.measure(parts)) < self.makespan:
            self.parts, self.makespan = parts, makespan

    def raise_bound(self, bound: float) -> None:
        if self.unit:
            bound = self.unit * math.ceil(bound / self.unit * (1 - 1e-10))
        self.bound = max(self.bound, bound)


def _checked(
    costs: FloatArray,
    k: int,
    equal_size: bool,
    speeds: npt.ArrayLike | None,
    time_limit_s: float,
    start: Sequence[Sequence[int]] | None,
) -> _Task:
    deadline = time.perf_counter() + time_limit_s
    if not 0 < time_limit_s < math.inf:
        raise ValueError(f"time_limit_s={time_limit_s}: expected a finite number of seconds above 0")
    if equal_size and costs.size % k:
        raise ValueError(
            f"{costs.size} items cannot be split into k={k} parts of equal size: expected a multiple of {k}; "
            f"drop {costs.size % k} items, add {k - costs.size % k}, or pass equal_size=False"
        )
    given = None if speeds is None else as_speeds(speeds, k)
    size = costs.size // k if equal_size else None
    task = _Task(costs, np.ones(k) if given is None else given, size, deadline)
    if start is not None:
        task.offer(_checked_start(start, k, costs.size, size))
    task.offer(balance(costs, k, equal_size=equal_size, speeds=given) if costs.size else [[] for _ in range(k)])
    task.raise_bound(lower_bound(costs, k, equal_size=equal_size, speeds=given) * (1 - _ROUNDING))
    return task


def _checked_start(start: Sequence[Sequence[int]], k: int, num_items: int, size: int | None) -> Parts:
    try:
        parts = [[as_count(item, "an index in start", 0) for item in part] for part in start]
    except TypeError as error:
        raise ValueError(f"start={start!r}: expected k={k} lists of indices") from error
    if len(parts) != k or sorted(item for part in parts for item in part) != list(range(num_items)):
        raise ValueError(
            f"start has {sum(len(part) for part in parts)} indices in {len(parts)} lists: expected k={k} lists "
            f"that together hold each of 0 .. {num_items - 1} once"
        )
    if size is not None and any(len(part) != size for part in parts):
        raise ValueError(f"start has parts of {[len(part) for part in parts]} items: equal_size needs {size} in each")
    return parts


class _Cover:
    """Search for the best partition of at most 40 items among those with a makespan up to some level.

    If no part ends after the level, each part's load is at least the total minus what the other parts can take
    until then. Near the optimum this window is narrow and few subsets of the items fall into it: the columns.
    They are found from the sorted subset sums of two halves of the items (Horowitz and Sahni 1974). Partitions
    are built from them breadth first, always covering the largest item left, and merged where they cover the
    same items. The level rises until there is a partition, which then is the best one, or until it meets the
    makespan to beat (Schreiber and Korf 2014, cached iterative weakening, use a similar scheme).
    """

    def __init__(self, task: _Task) -> None:
        self.task, self.costs, self.n = task, task.sorted_costs, task.costs.size
        # Of more parts than items, the slowest stay empty.
        self.fastest = np.argsort(-task.speeds, kind="stable")[: self.n]
        self.speeds, self.counts = np.unique(task.speeds[self.fastest], return_counts=True)
        # How many parts of each speed are used, as digits of one number.
        self.radix = np.cumprod(np.concatenate([[1], self.counts + 1]))[:-1]
        self.total, self.total_speed = float(self.costs.sum()), float(self.speeds @ self.counts)
        self.slack = _ROUNDING * self.total
        half = self.n // 2
        self.left, self.right = (_subsets(self.costs[:half], 0), _subsets(self.costs[half:], half))

    def run(self) -> None:
        """Improve the task's partition and bound until it is proved, or time or memory is used up."""
        task, gap = self.task, _FIRST_GAP
        top, floor = task.makespan * (1 - 1e-9), task.bound
        while not task.proved and time.perf_counter() < task.deadline:
            level = min(floor * (1 + gap), top)
            columns = self._columns(level)
            if columns is None:
                return
            if columns.size < _FEW_COLUMNS and level < top:
                gap *= 2
                continue
            complete, parts = self._join(columns, level)
            if parts is not None:
                task.offer(parts)
            if not complete:
                return
            task.raise_bound((level if parts is None else task.makespan) * (1 - _ROUNDING))
            gap *= _GAP_GROWTH

    def _columns(self, level: float) -> npt.NDArray[np.void] | None:
        """The subsets that can be a part if no part ends after ``level``; None if there are too many."""
        (sums_l, masks_l), (sums_r, masks_r) = self.left, self.right
        pieces, num_columns = [], 0
        for kind, speed in enumerate(self.speeds):
            lightest = self.total - level * (self.total_speed - speed) - self.slack
            first = np.searchsorted(sums_r, lightest - sums_l, "left")
            count = np.searchsorted(sums_r, level * speed + self.slack - sums_l, "right") - first
            num_columns += int(count.sum())
            if num_columns > _MAX_COLUMNS:
                return None
            i = np.repeat(np.arange(count.size), count)
            j = np.arange(i.size) - np.repeat(np.cumsum(count) - count - first, count)
            piece = np.zeros(i.size, dtype=_COLUMN)
            piece["mask"], piece["kind"], piece["load"] = masks_l[i] | masks_r[j], kind, sums_l[i] + sums_r[j]
            pieces.append(piece[(piece["mask"] != 0) & self._fits_size(piece["mask"])])
        return np.concatenate(pieces)

    def _fits_size(self, masks: IntArray) -> npt.NDArray[np.bool_]:
        if self.task.size is None:
            return np.ones(masks.size, dtype=bool)
        sizes = np.sum([(masks >> i) & 1 for i in range(self.n)], axis=0)
        fits: npt.NDArray[np.bool_] = sizes == self.task.size
        return fits

    def _join(self, columns: npt.NDArray[np.void], level: float) -> tuple[bool, Parts | None]:
        """Whether the search went through, and the best partition of at most ``level`` that it met."""
        self.parents: list[IntArray] = [np.array([-1])]
        self.chosen: list[IntArray] = [np.array([-1])]
        self.num_nodes = 1
        self.best_time, best_node = self.task.makespan, -1
        lowest = _lowest_item(columns["mask"])
        waiting = {0: [np.array([(0, 0, self.total, self.total_speed, 0.0, 0)], dtype=_STATE)]}
        for item in range(self.n):
            states = _distinct(np.concatenate(waiting.pop(item, [np.zeros(0, dtype=_STATE)])))
            mine = np.flatnonzero(lowest == item)
            rows = max(1, _CHUNK // max(1, mine.size))
            for a in range(0, states.size, rows):
                if time.perf_counter() > self.task.deadline or self.num_nodes > _MAX_STATES:
                    return False, self._parts(columns, best_node)
                new = self._extend(states[a : a + rows], columns, mine, level)
                done = new[new["mask"] == (1 << self.n) - 1]
                if done.size:
                    best = done[np.argmin(done["time"])]
                    self.best_time, best_node = float(best["time"]), int(best["node"])
                new = new[new["time"] < self.best_time]
                uncovered = _lowest_item(~new["mask"])
                for next_item in np.unique(uncovered).tolist():
                    waiting.setdefault(next_item, []).append(new[uncovered == next_item])
        return True, self._parts(columns, best_node)

    def _extend(
        self, states: npt.NDArray[np.void], columns: npt.NDArray[np.void], mine: IntArray, level: float
    ) -> npt.NDArray[np.void]:
        """Every state with every column of ``mine`` that is free of its items and leaves no too large rest."""
        i, j = np.nonzero((states["mask"][:, None] & columns["mask"][mine]) == 0)
        old, added = states[i], columns[mine[j]]
        kind = added["kind"]
        speed, radix = self.speeds[kind], self.radix[kind]
        new = np.empty(i.size, dtype=_STATE)
        new["mask"], new["used"] = old["mask"] | added["mask"], old["used"] + radix
        new["left"], new["speed"] = old["left"] - added["load"], old["speed"] - speed
        new["time"] = np.maximum(old["time"], added["load"] / speed)
        keep = (new["left"] <= level * new["speed"] + self.slack) & (new["time"] < self.best_time)
        keep &= old["used"] // radix % (self.counts[kind] + 1) < self.counts[kind]
        new = new[keep]
        new["node"] = self.num_nodes + np.arange(new.size)
        self.num_nodes += new.size
        self.parents.append(old["node"][keep])
        self.chosen.append(mine[j][keep])
        return new

    def _parts(self, columns: npt.NDArray[np.void], node: int) -> Parts | None:
        if node < 0:
            return None
        parents, chosen = np.concatenate(self.parents), np.concatenate(self.chosen)
        parts: Parts = [[] for _ in range(self.task.speeds.size)]
        free = {speed: [p for p in self.fastest.tolist() if self.task.speeds[p] == speed] for speed in self.speeds}
        while chosen[node] >= 0:
            column = columns[chosen[node]]
            items = [i for i in range(self.n) if int(column["mask"]) >> i & 1]
            parts[free[self.speeds[column["kind"]]].pop()] = self.task.order[items].tolist()
            node = int(parents[node])
        return parts


def _subsets(costs: FloatArray, first_bit: int) -> tuple[FloatArray, IntArray]:
    """The sums of all subsets, ascending, and the subsets as bits from ``first_bit`` on."""
    sums, masks = np.zeros(1), np.zeros(1, dtype=np.int64)
    for i, cost in enumerate(costs):
        sums = np.concatenate([sums, sums + cost])
        masks = np.concatenate([masks, masks | (1 << (first_bit + i))])
    order = np.argsort(sums, kind="stable")
    return sums[order], masks[order]


def _lowest_item(masks: IntArray) -> IntArray:
    """The index of the lowest set bit of every mask, of which each has at most 52 and at least one."""
    return np.frexp((masks & -masks).astype(np.float64))[1].astype(np.int64) - 1


def _distinct(states: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Of states that cover the same items with as many parts of each speed, the one that ends first."""
    states = states[np.lexsort((states["time"], states["used"], states["mask"]))]
    same = (states["mask"][1:] == states["mask"][:-1]) & (states["used"][1:] == states["used"][:-1])
    distinct: npt.NDArray[np.void] = states[np.concatenate([np.ones(min(1, states.size), dtype=bool), ~same])]
    return distinct


def _solve_mip(task: _Task) -> None:
    """Let CBC look for a partition that is better by half of ``TOLERANCE`` or more."""
    try:
        pulp = importlib.import_module("pulp")
    except ImportError as error:
        raise ImportError("this instance needs CBC, which comes with pulp: pip install 'odc[exact]'") from error
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    cbc = next((path for path in (bundled, "cbc") if path and shutil.which(path)), None)
    if cbc is None:
        raise RuntimeError("found no CBC: expected the one bundled with pulp, or the command cbc on the PATH")
    unit = task.bound
    with tempfile.TemporaryDirectory(prefix="odc-exact-") as folder:
        model, solution = Path(folder, "model.mps"), Path(folder, "solution")
        target = task.makespan / unit * (1 - TOLERANCE / 2)
        pairs = _write_model(pulp, task, target, unit, model)
        limit_s = task.deadline - time.perf_counter()
        if limit_s <= 0:
            return
        log, seconds = _run_cbc([cbc, str(model)], limit_s, solution)
        answer = solution.read_text().splitlines() if solution.exists() else []
    parts = _read_parts(task, answer, pairs)
    if parts is not None:
        task.offer(parts)
    bound = _read_bound(answer[0] if answer else "", log, target, in_time=seconds < limit_s / 2)
    task.raise_bound(bound * unit)


def _write_model(pulp: Any, task: _Task, target: float, unit: float, path: Path) -> list[tuple[int, int]]:
    """Write the program for makespans of at most ``target``; variable x<i> is the i-th (item, part) returned.

    Item i in the order of costs may go to the parts 0 .. i only if the parts are alike, and only to those that
    end in time even if they hold nothing else. A part's load is at least what the other ones cannot take.
    """
    costs, speeds = task.sorted_costs / unit * _MIP_SCALE, task.speeds
    target, k = target * _MIP_SCALE, speeds.size
    alike = bool((speeds == speeds[0]).all())
    program = pulp.LpProblem("partition", pulp.LpMinimize)
    makespan = program.add_variable("M", _MIP_SCALE * (1 - 1e-9), target)
    program.setObjective(pulp.LpAffineExpression([(makespan, 1.0)]))
    by_item: list[list[Any]] = [[] for _ in costs]
    by_part: list[list[tuple[Any, float]]] = [[] for _ in speeds]
    pairs: list[tuple[int, int]] = []
    for item, cost in enumerate(costs.tolist()):
        for part in range(min(item + 1, k) if alike else k):
            if cost <= target * speeds[part] * (1 + _ROUNDING):
                variable = program.add_variable(f"x{len(pairs)}", 0, 1, "Binary")
                pairs.append((item, part))
                by_item[item].append(variable)
                by_part[part].append((variable, cost))
    for variables in by_item:
        program.addConstraint(pulp.LpAffineExpression([(x, 1.0) for x in variables]) == 1)
    for part, terms in enumerate(by_part):
        speed = float(speeds[part])
        load = pulp.LpAffineExpression(terms)
        program.addConstraint(load - speed * makespan <= 0)
        program.addConstraint(load >= float(costs.sum()) * (1 - 1e-9) - target * float(speeds.sum() - speed))
        if task.size is not None:
            program.addConstraint(pulp.LpAffineExpression([(x, 1.0) for x, _ in terms]) == task.size)
    program.writeMPS(str(path))
    return pairs


def _run_cbc(command: list[str], limit_s: float, solution: Path) -> tuple[str, float]:
    """Run CBC. Returns its log, and how long it ran.

    It writes its log into a pipe, and is in a session of its own: an interrupt of the terminal reaches only
    this process, which kills it; should this process be killed itself, CBC ends at its next line of log.
    """
    options = ["-ratio", "0", "-allow", "0", "-timeMode", "elapsed", "-sec", f"{limit_s:.3f}"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [*command, *options, "-solve", "-solution", str(solution)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        log, _ = process.communicate(timeout=limit_s + _MIP_GRACE_S)
    except subprocess.TimeoutExpired:
        return "", time.perf_counter() - begin
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode:
        raise RuntimeError(f"CBC ended with status {process.returncode}; the end of its log: {log[-500:]}")
    return log, time.perf_counter() - begin


def _read_parts(task: _Task, answer: list[str], pairs: list[tuple[int, int]]) -> Parts | None:
    """The partition in CBC's solution file; None if there is none (it also writes fractional points)."""
    parts: Parts = [[] for _ in task.speeds]
    for line in answer[1:]:
        _, name, value, *_ = line.replace("**", "").split()
        if name.startswith("x") and float(value) > 0.5:
            item, part = pairs[int(name[1:])]
            parts[part].append(int(task.order[item]))
    whole = sorted(item for part in parts for item in part) == list(range(task.costs.size))
    return parts if whole and all(task.size in (None, len(part)) for part in parts) else None


def _read_bound(status: str, log: str, target: float, *, in_time: bool) -> float:
    """The bound that CBC proved, 0 if none, as a multiple of the bound it was given.

    "Infeasible" means that nothing beats ``target``, but CBC 2.10 also says so where the time ran out in its
    preprocessing, hence ``in_time``. Otherwise there is the value of the optimum, or the line "Lower bound:",
    printed with three decimals, which is missing if CBC was killed.
    """
    if status.startswith(("Infeasible", "Integer infeasible")):
        return target * (1 - TOLERANCE / 10) if in_time else 0.0
    if status.startswith("Optimal"):
        return min(target, float(status.split()[-1]) / _MIP_SCALE) * (1 - TOLERANCE / 2)
    found = re.search(r"^Lower bound:\s+(\S+)$", log, re.MULTILINE)
    return min(target, (float(found[1]) - 0.001) / _MIP_SCALE) * (1 - TOLERANCE / 10) if found else 0.0
