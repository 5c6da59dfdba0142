"""A partition as a mixed integer program for the solver CBC, which comes with the package pulp.

CBC runs as a process of its own. It reads the program from a file and writes its solution into another one; both
have no name in any folder, so nothing is left behind however this process ends. It writes its log into a pipe.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import tempfile
import time
from typing import IO, Any

import numpy as np

from odc._version import install_command
from odc.balance.checks import FloatArray
from odc.balance.partition.differencing import Parts
from odc.balance.partition.instance import ROUNDING, TOLERANCE, Instance

# CBC looks at its clock rarely: it is killed this many seconds after the time limit.
GRACE_S = 2.0

# Larger programs are left alone: pulp takes about 2 KB and 20 us to write a variable, all in one go at the end,
# and CBC closes no gap in programs of this size anyway.
MAX_VARIABLES = 100_000
_CLOCK_EVERY = 1000  # variables

# CBC's tolerances are absolute, about 1e-7: it gets costs for which the lower bound is this number.
_SCALE = 1000.0

# An item and a part that it may go to.
_Pair = tuple[int, int]


def solve_mip(instance: Instance) -> None:
    """Let CBC look for a partition that is better by half of ``TOLERANCE`` or more.

    Does nothing if the program would have more than ``MAX_VARIABLES``, or if the time is over before it is written.

    Raises:
        ImportError: pulp is not installed.
        RuntimeError: CBC is not there, or fails.
    """
    unit = instance.bound
    target = instance.makespan / unit * (1 - TOLERANCE / 2)
    if count_variables(instance, target * unit) > MAX_VARIABLES:
        return
    pulp, cbc = find_solver()
    with tempfile.TemporaryFile() as model, tempfile.TemporaryFile() as solution:
        pairs = _write_model(pulp, instance, target, unit, model)
        limit_s = instance.seconds_left()
        if pairs is None or limit_s <= 0:
            return
        log, seconds = run_cbc(cbc, limit_s, model, solution)
        solution.seek(0)
        answer = solution.read().decode().splitlines()
    parts = read_parts(instance, answer, pairs)
    if parts is not None:
        instance.offer(parts)
    bound = read_bound(answer[0] if answer else "", log, target, in_time=seconds < limit_s / 2)
    instance.raise_bound(bound * unit)


def run_cbc(cbc: str, limit_s: float, model: IO[bytes], solution: IO[bytes]) -> tuple[str, float]:
    """Run CBC. Returns its log, and how long it ran.

    It is in a session of its own: an interrupt of the terminal reaches only this process, which kills it;
    should this process be killed itself, CBC ends at its next line of log.
    """
    options = ["-ratio", "0", "-allow", "0", "-timeMode", "elapsed", "-sec", f"{limit_s:.3f}"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [cbc, _path(model), *options, "-solve", "-solution", _path(solution)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        pass_fds=(model.fileno(), solution.fileno()),
    )
    try:
        log, _ = process.communicate(timeout=limit_s + GRACE_S)
    except subprocess.TimeoutExpired:
        return "", time.perf_counter() - begin
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    if process.returncode:
        raise RuntimeError(f"CBC ended with status {process.returncode}; the end of its log: {log[-500:]}")
    return log, time.perf_counter() - begin


def read_parts(instance: Instance, answer: list[str], pairs: list[_Pair]) -> Parts | None:
    """The partition in CBC's solution file; None if there is none (it also writes fractional points)."""
    parts: Parts = [[] for _ in instance.speeds]
    for line in answer[1:]:
        _, name, value, *_ = line.replace("**", "").split()
        if name.startswith("x") and float(value) > 0.5:
            item, part = pairs[int(name[1:])]
            parts[part].append(int(instance.order[item]))
    whole = sorted(item for part in parts for item in part) == list(range(instance.costs.size))
    return parts if whole and all(instance.part_size in (None, len(part)) for part in parts) else None


def read_bound(status: str, log: str, target: float, *, in_time: bool) -> float:
    """The bound that CBC proved, 0 if none, as a multiple of the bound it was given.

    "Infeasible" means that nothing beats ``target``, but CBC 2.10 also says so where the time ran out in its
    preprocessing, hence ``in_time``. Otherwise there is the value of the optimum, or the line "Lower bound:",
    printed with three decimals, which is missing if CBC was killed.
    """
    if status.startswith(("Infeasible", "Integer infeasible")):
        return target * (1 - TOLERANCE / 10) if in_time else 0.0
    if status.startswith("Optimal"):
        return min(target, float(status.split()[-1]) / _SCALE) * (1 - TOLERANCE / 2)
    found = re.search(r"^Lower bound:\s+(\S+)$", log, re.MULTILINE)
    return min(target, (float(found[1]) - 0.001) / _SCALE) * (1 - TOLERANCE / 10) if found else 0.0


def find_solver() -> tuple[Any, str]:
    """The module pulp, and the command of CBC."""
    try:
        pulp = importlib.import_module("pulp")
    except ImportError as error:
        raise ImportError(f"this instance needs CBC, which comes with pulp: {install_command('exact')}") from error
    bundled = getattr(getattr(pulp, "PULP_CBC_CMD", None), "pulp_cbc_path", None)
    cbc = next((path for path in (bundled, "cbc") if path and shutil.which(path)), None)
    if cbc is None:
        raise RuntimeError("found no CBC: expected the one bundled with pulp, or the command cbc on the PATH")
    return pulp, cbc


def _path(file: IO[bytes]) -> str:
    """A path under which this process, and one that was passed the file, can open it."""
    return f"/proc/self/fd/{file.fileno()}"


def _write_model(pulp: Any, instance: Instance, target: float, unit: float, file: IO[bytes]) -> list[_Pair] | None:
    """Write the program for makespans of at most ``target``; variable x<i> is the i-th pair returned.

    None if the time is over before that.
    """
    costs, target = instance.sorted_costs / unit * _SCALE, target * _SCALE
    program = pulp.LpProblem("partition", pulp.LpMinimize)
    makespan = program.add_variable("M", _SCALE * (1 - 1e-9), target)
    program.setObjective(pulp.LpAffineExpression([(makespan, 1.0)]))
    pairs = _allowed_pairs(costs, instance.speeds, target)
    by_item: list[list[Any]] = [[] for _ in costs]
    by_part: list[list[tuple[Any, float]]] = [[] for _ in instance.speeds]
    for number, (item, part) in enumerate(pairs):
        if number % _CLOCK_EVERY == 0 and instance.seconds_left() <= 0:
            return None
        variable = program.add_variable(f"x{number}", 0, 1, "Binary")
        by_item[item].append(variable)
        by_part[part].append((variable, float(costs[item])))
    for variables in by_item:
        program.addConstraint(pulp.LpAffineExpression([(x, 1.0) for x in variables]) == 1)
    for terms, speed in zip(by_part, instance.speeds.tolist(), strict=True):
        load = pulp.LpAffineExpression(terms)
        program.addConstraint(load - speed * makespan <= 0)
        # At least what the other parts cannot take.
        program.addConstraint(load >= float(costs.sum()) * (1 - 1e-9) - target * float(instance.speeds.sum() - speed))
        if instance.part_size is not None:
            program.addConstraint(pulp.LpAffineExpression([(x, 1.0) for x, _ in terms]) == instance.part_size)
    if instance.seconds_left() <= 0:
        return None
    program.writeMPS(_path(file))
    return pairs


def count_variables(instance: Instance, target: float) -> int:
    """About as many as :func:`_allowed_pairs` returns, without listing them."""
    num_items, speeds = instance.costs.size, instance.speeds
    if (speeds == speeds[0]).all():
        return int(np.minimum(np.arange(1, num_items + 1), speeds.size).sum())
    too_slow = np.searchsorted(np.sort(speeds), instance.sorted_costs / target * (1 - ROUNDING))
    return num_items * speeds.size - int(too_slow.sum())


def _allowed_pairs(costs: FloatArray, speeds: FloatArray, target: float) -> list[_Pair]:
    """The parts that each item may go to, items in the order of costs.

    Item i may go to the parts 0 .. i only if the parts are alike, and only to those that end in time even if
    they hold nothing else.
    """
    k, alike = speeds.size, bool((speeds == speeds[0]).all())
    return [
        (item, part)
        for item, cost in enumerate(costs.tolist())
        for part in range(min(item + 1, k) if alike else k)
        if cost <= target * speeds[part] * (1 + ROUNDING)
    ]
