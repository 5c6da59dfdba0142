"""A seeded choice of trials: what happens to which rank, and where; and what must follow."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

SILENCE_LIMIT_S = 5.0  # ODC_TIMEOUT
COLLECTIVE_LIMIT_S = 8.0  # of a collective of torch, which is what ends one with a rank that has stopped for ever
NOTICE_S = 10.0  # for a death or an error to end all ranks, as in the tests of docs/reliability.md: machines are busy
STEPS = 24
RAISED = "chaos: raised on purpose"
EXIT_CODE = 3

TRANSPORTS = {
    "shm": "one host",
    "tcp": "every rank poses as a host; four ranks as two hosts",
    "replicas": "two replicas of a shard group of two, each on a host",
    "shared": "four ranks on two hosts, which share parameters and gradients in each",
}
WAYS = {
    "in place": "matrices by themselves, what is small together",
    "staged": "ODC_STAGING=on",
    "": "FSDP1, which has no such choice",
}
ACTIONS = {
    "kill": "SIGKILL",
    "pause": "SIGSTOP, and SIGCONT after a while: training goes on, to the right numbers",
    "stop": "SIGSTOP for ever",
    "raise": "an exception of the script",
    "exit": "sys.exit(3)",
    "_exit": "os._exit(0)",
    "terminate": "SIGTERM",
    "interrupt": "SIGINT",
    "segfault": "a segmentation fault",
}
PHASES = {
    "any": "at a random time, wherever the rank is (signals only)",
    "set-up": "before it patches its model, or in it",
    "gather": "in the middle of a forward, before or between reads of shards",
    "push": "in the middle of a backward, before or between additions to sums",
    "finish": "before it ends its minibatch, or before it says that it has",
    "clip": "between the end of the minibatch and the all-reduce of clipping",
    "step": "before its optimizer's step",
    "publish": "between the publications of two units",
    "collective": "before a collective of the script's own",
    "evaluation": "in the middle of an evaluation",
    "save": "before the collectives that gather a checkpoint",
}
POINTS = {
    "set-up": ("setup",),
    "gather": ("gather.before", "gather.after_chunk"),
    "push": ("scatter.before", "scatter.after_chunk", "scatter.added"),
    "finish": ("finish.before", "finish.before_done"),
    "publish": ("publish.before", "publish.after"),
}
"""Points in ODC's own code where a fault of a phase may be injected, instead of in the script."""
INJECTED = {"kill": "kill", "pause": "stop", "stop": "stop", "_exit": "exit", "segfault": "segv"}
"""By action, what ODC is told to do at a point (``ODC_FAULT``)."""
MESHES = {
    "dp tp": "FSDP2 beside tensor parallelism",
    "dp cp": "FSDP2 over dp and cp, flattened to one dimension; each block looks at tokens of its partners",
    "replicate dp tp": "the first, in two replicas",
    "dp cp tp": "both at once",
}
"""Meshes; each dimension has two ranks. Ranks that differ only in "cp" or "tp" compute together."""
DIFFER = "differ"
DIFFERS = "a microbatch more or less than the ranks that it computes with"
STORE = -1
"""In place of a rank as victim: the process of the store through which ranks tell each other what they have begun."""
CLAIM = "claim"
CLAIMS = "between the claim of a sample that is bound late and its microbatch"
SIGNALS = {
    "kill": signal.SIGKILL,
    "pause": signal.SIGSTOP,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
}
"""The actions that are a signal, from outside or by the rank to itself."""


@dataclass(frozen=True)
class Trial:
    """One job, and what happens to one of its ranks."""

    number: int
    fsdp: str
    transport: str
    world_size: int
    victim: int
    action: str
    phase: str
    point: str
    """A point of ``ODC_FAULT``, or "" for a place in the script or a random time."""
    at: int
    """The step, or the pass of the point (from 1)."""
    delay_s: float
    """Seconds after training has begun, in phase "any"."""
    pause_s: float
    idle: bool
    """Whether in each step another rank has no microbatch."""
    staging: str
    """How FSDP2 communicates, one of ``WAYS``."""
    mesh: str = ""
    """One of ``MESHES``, or none."""
    late: bool = False
    """Whether samples are bound to ranks late, when ranks come to them."""

    def host_of(self, rank: int) -> str:
        if self.transport == "shm":
            return "host-0"
        if self.mesh:  # two hosts, which cut through the last dimension or through the first
            return f"host-{rank % 2 if self.number % 2 else 2 * rank // self.world_size}"
        return f"host-{rank // 2 if self.world_size == 4 else rank}"

    @property
    def is_shared(self) -> bool:
        """Whether ranks of a host share parameters and gradients, if the mesh allows that."""
        return self.transport == "shared" or (bool(self.mesh) and self.number % 3 == 0)

    @property
    def num_partners(self) -> int:
        """How many ranks compute together. Their numbers follow one another."""
        return 1 << sum(name in ("cp", "tp") for name in self.mesh.split())

    @property
    def num_groups(self) -> int:
        """Number of groups of such ranks."""
        return self.world_size // self.num_partners

    def num_microbatches(self, step: int, rank: int) -> int:
        group = rank // self.num_partners
        number = 0 if self.idle and step % self.num_groups == group else 1 + (step + group) % 2
        return abs(number - 1) if self.action == DIFFER and (rank, step) == (self.victim, self.at) else number

    @property
    def limit_s(self) -> float:
        """The limit from the event to the end of the last rank."""
        if self.action != "stop":
            return NOTICE_S
        return NOTICE_S + max(
            SILENCE_LIMIT_S, COLLECTIVE_LIMIT_S if self.phase in ("collective", "save", "any") else 0.0
        )

    @property
    def exit_codes(self) -> tuple[int, ...]:
        """Exit codes with which the victim may end; negative ones are signals."""
        codes = {
            "pause": (0,),
            "raise": (1,),
            "exit": (EXIT_CODE,),
            "_exit": (0,),
            "terminate": (-15,),
            "interrupt": (-2, 1),
            "segfault": (-11,),
            DIFFER: (1,),
        }
        return codes.get(self.action, (-9,))

    def says_why(self, text: str, reporter: int) -> bool:
        """Whether an error that comes from ``reporter`` tells the cause. A rank of another host cannot know how a
        process has ended."""
        if self.victim == STORE:
            return "an answer of the store of torch.distributed" in text
        here = self.host_of(reporter) == self.host_of(self.victim)
        here &= not (self.mesh and self.phase == "set-up")  # some come to their first group with the victim behind that
        if self.phase == "set-up" and not self.point:  # nothing of ODC is there yet that could tell more
            return "has ended" in text
        words = {
            "kill": "signal 9",
            "stop": "silent|no sign of life|answered nothing",
            "raise": RAISED,
            "exit": "exit|closed|gone|ended|dead",
            "_exit": "exit|closed|gone|ended|dead",
            "terminate": "signal 15",
            "interrupt": "KeyboardInterrupt|signal 2",
            "segfault": "signal 11",
            DIFFER: "have different numbers of microbatches",
        }
        gone = "|dead|gone|ended|closed|cannot be reached" if not here and self.action not in ("raise", DIFFER) else ""
        return re.search(words[self.action] + gone, text) is not None

    def describe(self) -> str:
        where = f"{self.point} pass {self.at}" if self.point else f"step {self.at}"
        where = f"after {self.delay_s:.2f} s" if self.phase == "any" else where
        idle = ", idle ranks" if self.idle else ""
        return (
            f"{self.fsdp}{self.staging and ' ' + self.staging}, {self.world_size} ranks"
            f"{self.mesh and f' ({self.mesh})'}{', late binding' * self.late}, {self.transport}{idle}: "
            f"{'store' if self.victim == STORE else f'rank {self.victim}'} {self.action} in {self.phase} ({where})"
        )


def generate(seed: int) -> Iterator[Trial]:
    """Trials without end, the same for the same seed. Transports, actions and phases come equally often. Of FSDP2's two
    ways, staged and in place, a trial takes the one that has met the rest of the trial more seldom."""
    chance = random.Random(seed)
    seen: Counter[tuple[object, ...]] = Counter()
    number = 0
    while True:
        rows = [(t, a, p) for t in TRANSPORTS for a in ACTIONS for p in PHASES if _is_possible(a, p)]
        chance.shuffle(rows)
        for transport, action, phase in rows:
            drawn = _trial(number, transport, action, phase, chance)
            each = [replace(drawn, staging=way) for way in WAYS if bool(way) == (drawn.fsdp == "fsdp2")]
            trial = max(each, key=lambda one: sum(1 / (1 + seen[pair]) for pair in _pairs(one)))
            seen.update(_pairs(trial))
            yield trial
            number += 1


def generate_on_meshes(seed: int) -> Iterator[Trial]:
    """As :func:`generate`, on :data:`MESHES`: each of them meets each action equally often."""
    chance, number = random.Random(f"meshes {seed}"), 0
    while True:
        rows = [(mesh, action) for mesh in MESHES for action in (*ACTIONS, DIFFER)]
        chance.shuffle(rows)
        for mesh, action in rows:
            phase = chance.choice([p for p in PHASES if _is_possible(action, p)]) if action != DIFFER else DIFFER
            world_size = 2 ** len(mesh.split())
            yield replace(
                _trial(number, chance.choice(["shm", "tcp"]), action, phase, chance),
                mesh=mesh,
                world_size=world_size,
                victim=chance.randrange(world_size),
                fsdp="fsdp2",
                staging=chance.choice(["in place", "staged"]),
            )
            number += 1


def generate_late(seed: int) -> Iterator[Trial]:
    """As :func:`generate`, with samples that are bound late. A third of the trials is in phase :data:`CLAIM`. In a
    fifth the fault hits the store at a random time, and no rank."""
    for trial in generate(seed):
        late = replace(trial, late=True, idle=False)
        if trial.number % 5 == 4:
            action, delay_s = ("kill", "stop")[trial.number % 2], 2 * trial.delay_s
            yield replace(late, victim=STORE, action=action, phase="any", point="", delay_s=delay_s)
        else:
            yield replace(late, phase=CLAIM, point="", at=1 + trial.number % 8) if trial.number % 3 == 0 else late


def _pairs(trial: Trial) -> list[tuple[object, ...]]:
    """Of the staging with each of the rest."""
    rest = ("transport", "world_size", "action", "phase", "point", "idle")
    return [(trial.staging, name, getattr(trial, name)) for name in rest]


def _is_possible(action: str, phase: str) -> bool:
    if phase == "any":
        return action in SIGNALS
    if phase == "set-up" and action == "stop":
        return False  # set-up waits for ten minutes at the least, as it is documented to
    return phase != "publish" or action in INJECTED


def _trial(number: int, transport: str, action: str, phase: str, chance: random.Random) -> Trial:
    world_size = 4 if transport in ("replicas", "shared") else chance.choice([2, 3, 4])
    points = POINTS.get(phase, ()) if action in INJECTED else ()
    point = chance.choice(points) if points and (phase == "publish" or chance.random() < 0.6) else ""
    at = chance.randint(1, 8)
    if point:
        at = 1 if phase == "set-up" else chance.randint(2, 9) if phase == "finish" else chance.randint(9, 40)
    trial = Trial(
        number=number,
        fsdp=chance.choice(["fsdp2", "fsdp2", "fsdp1-flat", "fsdp1-orig"]),
        transport=transport,
        world_size=world_size,
        victim=chance.randrange(world_size),
        action=action,
        phase=phase,
        point=point,
        at=at,
        delay_s=round(chance.uniform(0.0, 0.6), 3),
        pause_s=round(chance.uniform(0.5, 3.0), 2),
        idle=False,
        staging="",  # chosen later
    )
    chance.choice(("on", "off"))  # of what is no more: a seed goes on to mean the trials of the committed results
    return replace(trial, idle=chance.random() < 0.25)
