"""Trials on ranks of this machine: started, disturbed, watched until all have ended, and judged."""

from __future__ import annotations

import os
import queue
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from odc.bench.harness.warm_launch import KILL, Forker
from odc.bench.proof.chaos.script import WRONG_NUMBERS
from odc.bench.proof.chaos.trials import DIFFER, SIGNALS, STORE, Trial

TRIAL_LIMIT_S = 60.0  # from its start, whatever happens
_GRACE_S = 8.0  # to tell what is late from what hangs
_BETWEEN_LOOKS_S = 0.02
OUTCOMES = {
    "right": "as promised",
    "unnamed": "a rank's last error names nobody",
    "wrong rank": "a rank's last error names another rank",
    "wrong cause": "a rank's last error does not say why",
    "exit code": "a rank has ended with a code that does not belong to it",
    "late": "a rank has ended later than documented",
    "hang": "a rank had to be killed",
    "wrong numbers": "training went on to wrong parameters",
    "left": "something was left behind",
    "no fault": "the fault never came: something else ended training, or nothing",
}


@dataclass
class Outcome:
    """How a trial ended."""

    trial: Trial
    status: str
    """One of ``OUTCOMES``."""
    reason: str = ""
    slowest_s: float | None = None
    """Seconds from the event to the end of the last rank that could end."""
    last_errors: dict[int, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.status == "right"


@dataclass
class _Seen:
    """What one trial has shown from outside."""

    pids: list[int]
    happened_at: float | None = None
    ends: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Exit code and time, by rank."""
    killed: set[int] = field(default_factory=set)
    """Ranks that did not end by themselves."""
    left: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What each rank has written."""


class Ranks(Forker):
    """A warm process that forks the ranks of one trial after the other."""

    def __init__(self) -> None:
        super().__init__("odc.bench.proof.chaos.script")
        if not self.answer(TRIAL_LIMIT_S):
            raise RuntimeError("the process that starts ranks does not start itself: see its error above")

    def run(self, trial: Trial) -> Outcome:
        with tempfile.TemporaryDirectory(prefix="odc-chaos-") as name:
            folder = Path(name)
            (folder / "tmp").mkdir()
            self.send({"trial": asdict(trial), "folder": str(folder)})
            seen = _Seen((self.answer(TRIAL_LIMIT_S) or {})["pids"])
            self._watch(trial, folder, seen)
            logs = [_read(folder / f"log{rank}") for rank in range(trial.world_size)]
            seen.texts = [re.sub(r"^\[rank\d+\]: ?", "", log, flags=re.MULTILINE) for log in logs]  # torch's excepthook
            seen.left += [f"{path.name} in its temporary folder" for path in (folder / "tmp").iterdir()]
        return judge(trial, seen)

    def _watch(self, trial: Trial, folder: Path, seen: _Seen) -> None:
        """Until all ranks have ended. Sends the signals that come from outside."""
        started = time.monotonic()
        victim, send_at, resume_at = seen.pids[trial.victim], None, None
        while True:
            event, now = self.answer(_BETWEEN_LOOKS_S), time.monotonic()
            if event and "left" in event:
                seen.left += event["left"]
                return
            if event and "rank" in event:
                seen.ends[event["rank"]] = event["code"], event["at"]
                seen.happened_at = seen.happened_at or event["at"]
            if seen.happened_at is None and (fired := _read(folder / "fired")):
                seen.happened_at = float(fired)
            if trial.phase == "any" and trial.victim not in seen.ends and send_at != 0.0:
                if send_at is None and (folder / f"training{max(trial.victim, 0)}").exists():
                    send_at = now + trial.delay_s
                elif send_at is not None and now >= send_at:
                    os.kill(victim, SIGNALS[trial.action])
                    seen.happened_at, send_at = now, 0.0
            if trial.action in ("pause", "stop") and trial.victim not in seen.ends and _is_stopped(victim):
                seen.happened_at = seen.happened_at or now
                resume_at = resume_at or now + trial.pause_s
                if trial.action == "pause" and now >= resume_at:
                    os.kill(victim, signal.SIGCONT)
            self._end_if_over(trial, seen, now, now - started)

    def _end_if_over(self, trial: Trial, seen: _Seen, now: float, run_s: float) -> None:
        left = set(range(trial.world_size)) - set(seen.ends)
        if seen.killed or not left:
            return
        is_late = (
            trial.action != "pause"
            and seen.happened_at is not None
            and now > seen.happened_at + trial.limit_s + _GRACE_S
        )
        if is_late or run_s > TRIAL_LIMIT_S or (trial.action == "stop" and left == {trial.victim}):
            seen.killed = left
            self.send(KILL)


def run_trials(
    trials: Sequence[Trial], on_outcome: Callable[[Outcome], None] = lambda _: None, jobs: int = 2
) -> list[Outcome]:
    """Run trials, ``jobs`` of them side by side; the outcomes in the order of ``trials``."""
    free: queue.SimpleQueue[Ranks] = queue.SimpleQueue()
    lock = threading.Lock()

    def run(trial: Trial) -> Outcome:
        ranks = free.get()
        try:
            outcome = ranks.run(trial)
        finally:
            free.put(ranks)
        with lock:
            on_outcome(outcome)
        return outcome

    with ExitStack() as stack:
        for _ in range(min(jobs, len(trials))):
            free.put(stack.enter_context(closing(Ranks())))
        with ThreadPoolExecutor(jobs, thread_name_prefix="odc-chaos") as pool:
            return list(pool.map(run, trials))


def judge(trial: Trial, seen: _Seen) -> Outcome:
    """Judge a trial in this order: all ranks end, in time, with the right exit codes, and their errors name the rank
    and the cause."""
    errors = {rank: last_error(text) for rank, text in enumerate(seen.texts)}
    others = [rank for rank in range(trial.world_size) if rank != trial.victim]
    ends = [at for rank, (_, at) in seen.ends.items() if rank not in seen.killed]
    slowest = round(max(ends) - seen.happened_at, 2) if ends and seen.happened_at is not None else None

    def outcome(status: str, reason: str = "") -> Outcome:
        return Outcome(trial, status, reason, slowest, {rank: error for rank, error in errors.items() if error})

    hung = [rank for rank in seen.killed if not (trial.action == "stop" and rank == trial.victim)]
    if hung:
        return outcome("hang", f"ranks {hung} had to be killed")
    if trial.action == "pause":
        return _judge_pause(trial, seen, errors, outcome)
    code = seen.ends[trial.victim][0] if trial.victim != STORE else trial.exit_codes[0]
    if code not in trial.exit_codes:
        if code == 0 or _ended_by_another(errors[trial.victim]):
            return outcome("no fault", f"rank {trial.victim} ended with {code}: {errors[trial.victim]}")
        return outcome("exit code", f"rank {trial.victim} ended with {code}, expected {trial.exit_codes}")
    for rank in others:
        if seen.ends[rank][0] != 1:
            return outcome("exit code", f"rank {rank} ended with {seen.ends[rank][0]}, expected 1")
    if slowest is None or slowest > trial.limit_s:
        return outcome("late", f"the last rank ended after {slowest} s, the limit is {trial.limit_s:g} s")
    if left := [*seen.left, *_shared_memory_of(seen.pids)]:
        return outcome("left", ", ".join(left))
    return _judge_errors(trial, errors, others, outcome)


def _judge_pause(trial: Trial, seen: _Seen, errors: dict[int, str], outcome: Callable[[str, str], Outcome]) -> Outcome:
    for rank in range(trial.world_size):
        if WRONG_NUMBERS in errors[rank]:
            return outcome("wrong numbers", errors[rank])
    failed = [rank for rank, (code, _) in sorted(seen.ends.items()) if code != 0]
    if failed:
        return outcome("exit code", f"rank {failed[0]} ended with {seen.ends[failed[0]][0]}: {errors[failed[0]]}")
    if seen.left:
        return outcome("left", ", ".join(seen.left))
    return outcome("right", "") if seen.happened_at < _first_end(seen) else outcome("no fault", "it never stopped")  # type: ignore[operator]


def _first_end(seen: _Seen) -> float:
    return min(at for _, at in seen.ends.values())


def _judge_errors(
    trial: Trial,
    errors: dict[int, str],
    others: Sequence[int],
    outcome: Callable[..., Outcome],
) -> Outcome:
    for rank in others:
        if trial.action == DIFFER:
            if not _names_partners(errors[rank], trial):
                return outcome("wrong rank", f"rank {rank}: {errors[rank]}")
            continue
        blamed = trial.victim if trial.victim == STORE else blamed_rank(errors[rank], rank)
        if blamed is None:
            return outcome("unnamed", f"rank {rank}: {errors[rank]}")
        if blamed != trial.victim:
            return outcome("wrong rank", f"rank {rank}: {errors[rank]}")
        if not trial.says_why(errors[rank], _reporter(errors[rank], rank)[0]):
            return outcome("wrong cause", f"rank {rank}: {errors[rank]}")
    return outcome("right")


def _names_partners(error: str, trial: Trial) -> bool:
    """Whether an error names the rank with other microbatches and one that it computes with, and says so."""
    _, _, told = error.partition("have different numbers of microbatches")
    named = {int(rank) for rank in re.findall(r"\brank (\d+)", told.partition(". Give both")[0])}
    groups = {rank // trial.num_partners for rank in named}
    return trial.victim in named and len(named) == 2 and groups == {trial.victim // trial.num_partners}


def _reporter(error: str, own: int) -> tuple[int, str]:
    """The rank that has found what rank ``own`` says, and its own words."""
    parts = re.split(r"because rank (\d+) \(pid \d+\): ", error)
    return (int(parts[-2]), parts[-1]) if len(parts) > 1 else (own, error)


def last_error(text: str) -> str:
    """The error that a rank's output ends with, in one line; empty if it ends with none."""
    found = list(re.finditer(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Injected|Exit)\b.*", text, re.MULTILINE))
    return " ".join(text[found[-1].start() :].split())[:2000] if found else ""


def blamed_rank(error: str, own: int) -> int | None:
    """The rank that an error names as its cause, in the numbering of the whole job: the last cause in a chain of
    them."""
    if causes := re.findall(r"Cause: rank (\d+)", error):
        return int(causes[-1])
    reporter, told = _reporter(error, own)
    if reporter != own and not re.match(r"Peer\w+Error", told):
        return reporter
    named = [int(rank) for rank in re.findall(r"\brank (\d+)", told) if int(rank) != reporter]
    return named[-1] if named else None


def _ended_by_another(error: str) -> bool:
    """The victim itself had an error that it was not given."""
    return bool(error) and "chaos" not in error and "fault injected" not in error


def _shared_memory_of(pids: Sequence[int]) -> list[str]:
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return [f"/dev/shm/{name}" for name in names if any(re.search(rf"(?<!\d){pid}(?!\d)", name) for pid in pids)]


def _is_stopped(pid: int) -> bool:
    return _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] == ["T"]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
