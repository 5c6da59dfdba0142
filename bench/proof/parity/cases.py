"""What a generated script may do, and a seeded choice of scripts that covers every pair of its options."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, make_dataclass
from typing import Any

FACTORS: dict[str, dict[str, str]] = {
    "fsdp": {
        "fsdp2": "fully_shard",
        "fsdp1-flat": "FullyShardedDataParallel",
        "fsdp1-orig": "FullyShardedDataParallel with use_orig_params",
    },
    "ranks": {"2": "", "3": "", "4": "", "2x2": "two replicas of a shard group of two"},
    "transport": {
        "shm": "one host",
        "tcp": "the ranks pose as hosts of one rank, or two where there are four",
        "shared": "four ranks pose as two hosts, and share parameters and gradients in each",
    },
    "staging": {
        "in-place": "matrices by themselves, what is small together",
        "staged": "ODC_STAGING=on",
        "none": "FSDP1, whose parameters are one flat tensor",
    },
    "units": {str(n): "" for n in range(1, 6)},
    "shapes": {
        "even": "divisible by the number of ranks",
        "odd": "not divisible",
        "small": "some first dimensions smaller than the number of ranks",
    },
    "tie": {"no": "", "tied": "embedding and head share their weight"},
    "frozen": {"no": "", "unit": "a whole unit", "some": "one parameter of each unit"},
    "unused": {"no": "", "always": "a unit that no forward uses", "odd-steps": "a unit that every second step uses"},
    "twice": {"no": "", "twice": "a unit that each forward uses twice"},
    "counts": {
        "one": "a microbatch per rank and step",
        "three": "three",
        "uneven": "one to three, other numbers on each rank and in each step",
        "idle-first": "as uneven, but the last rank has none in the first step",
        "idle-later": "as uneven, but rank 0 has none in the second and third step",
        "idle-always": "as uneven, but the last rank never has any",
    },
    "sync": {"all": "", "last": "no_sync, or set_requires_gradient_sync(False), for all microbatches but the last"},
    "evaluation": {
        "none": "",
        "first": "before the first step",
        "between": "after each step, when gradients have been cleared",
        "uncleared": "after each step, when they have not",
        "inside": "before the last microbatch of each step",
    },
    "evaluated_by": {"all": "", "one": "rank 0 alone; under plain FSDP all ranks"},
    "reshard": {"yes": "reshard_after_forward, FULL_SHARD", "no": "SHARD_GRAD_OP", "int": "in groups of two"},
    "sums": {"auto": "", "daemon": "accumulate='daemon'", "deterministic": "deterministic=True"},
    "gradients": {
        "untouched": "",
        "norm": "clip_grad_norm_",
        "value": "clip_grad_value_",
        "scaled": "p.grad.mul_(0.1) by hand where there is one",
        "logged": "read before the step",
        "logged-after": "read after the step",
        "kept": "views of them are kept while the next step runs",
    },
    "clearing": {
        "none": "optimizer.zero_grad() after the step",
        "zeros": "optimizer.zero_grad(set_to_none=False) after the step",
        "model": "model.zero_grad() after the step",
        "hand": "p.grad = None after the step",
        "start": "optimizer.zero_grad() before the microbatches",
        "loop": "optimizer.zero_grad() in the first microbatch, so not by a rank that has none",
        "never": "gradients add up over the steps",
    },
    "optimizer": {"sgd": "", "adamw": "", "own": "one with a zero_grad of its own", "two": "AdamW and SGD"},
    "reduction": {
        "none": "",
        "before": "the script sums the loss over the ranks before it touches gradients",
        "after": "behind the step",
    },
    "precision": {"fp32": "", "bf16": "parameters in bfloat16, reduction in float32"},
    "end": {"implicit": "", "block": "with session.minibatch()"},
}
EQUAL_COUNTS = {"one": 1, "three": 3, "four": 4}
"""Microbatches of each rank in each step, where all ranks have as many. Only conformance has four."""
_CANDIDATES = 24  # of which the one with the rarest pairs becomes a case
_ATTEMPTS = 400  # to complete a pair, before it counts as impossible


_Values: Any = make_dataclass("_Values", [(name, str) for name in FACTORS], frozen=True)


class Case(_Values):  # type: ignore[misc]  # its fields are told once, above
    """One generated script. Each field has the name of a factor in ``FACTORS``, and one of its values; conformance also
    has four microbatches ("four") and reduction in bfloat16 ("bf16-reduced")."""

    @property
    def world_size(self) -> int:
        return 4 if self.is_replicated else int(self.ranks)

    @property
    def is_replicated(self) -> bool:
        return bool(self.ranks == "2x2")

    @property
    def num_blocks(self) -> int:
        """Units beside the root, which is one itself."""
        return int(self.units) - 1

    def num_microbatches(self, step: int, rank: int) -> int:
        """Microbatches of this rank in this step; at least one rank has some."""
        if self.counts in EQUAL_COUNTS:
            return EQUAL_COUNTS[self.counts]
        is_idle = {
            "idle-first": step == 0 and rank == self.world_size - 1,
            "idle-later": step in (1, 2) and rank == 0,
            "idle-always": rank == self.world_size - 1,
        }
        return 0 if is_idle.get(self.counts, False) else 1 + (step + 2 * rank) % 3

    def uses(self, block: int, step: int) -> bool:
        """Whether the forwards of this step use this block. Only the last block may be left out."""
        if self.unused == "no" or block != self.num_blocks - 1:
            return True
        return self.unused == "odd-steps" and step % 2 == 1

    def describe(self) -> str:
        """The values that are not the plainest of their factor, for people."""
        words = [
            f"{name}={value}"
            for name, value in asdict(self).items()
            if name in ("fsdp", "ranks", "transport", "staging", "units") or value != next(iter(FACTORS[name]))
        ]
        return " ".join(words)


def impossible(values: Mapping[str, str]) -> str | None:
    """Why no script can combine these values; None if one can."""
    is_fsdp1 = values["fsdp"] != "fsdp2"
    needs_a_unit = values["frozen"] == "unit" or values["unused"] != "no" or values["twice"] != "no"
    is_last_of_several = values["sync"] == "last" and values["unused"] != "no" and values["counts"] != "one"
    reasons = {
        "FSDP2 alone has buffers to do without": is_fsdp1 != (values["staging"] == "none"),
        "reshard_after_forward takes a number under FSDP2 only, and the number must divide the ranks": (
            values["reshard"] == "int" and (is_fsdp1 or values["ranks"] != "4")
        ),
        "two hosts of two ranks share": values["transport"] == "shared" and values["ranks"] != "4",
        "HYBRID_SHARD reshards": values["reshard"] == "no" and is_fsdp1 and values["ranks"] == "2x2",
        "there is no unit beside the root": values["units"] == "1" and needs_a_unit,
        "a flat parameter is frozen or not": values["frozen"] == "some" and values["fsdp"] == "fsdp1-flat",
        "FSDP2 itself fails: set_requires_gradient_sync(False), an unused unit and reduction in another dtype": (
            not is_fsdp1 and values["precision"] == "bf16" and is_last_of_several
        ),
        "nothing is evaluated": values["evaluation"] == "none" and values["evaluated_by"] != "all",
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def generate(seed: int) -> Iterator[Case]:
    """Cases without end, the same for the same seed. Each case includes pairs of values that were rarest before."""
    chance = random.Random(seed)
    seen: Counter[tuple[Any, ...]] = Counter()
    missing = list(all_pairs())
    chance.shuffle(missing)
    while True:
        candidates = [_random_values(chance) for _ in range(_CANDIDATES)]
        while missing and not (wanted := _candidates_with(missing[0], chance)):
            missing.pop(0)
        best = max(wanted if missing else candidates, key=lambda values: sum(1 / (1 + seen[p]) for p in pairs(values)))
        seen.update(pairs(best))
        missing = [pair for pair in missing if pair not in seen]
        yield Case(**best)


def all_pairs() -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """Every pair of values of two factors, possible or not."""
    for one, other in itertools.combinations(FACTORS, 2):
        for value, other_value in itertools.product(FACTORS[one], FACTORS[other]):
            yield (one, value), (other, other_value)


def pairs(values: Mapping[str, str]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    """The pairs of values that meet in a case, as :func:`all_pairs` writes them."""
    return itertools.combinations(values.items(), 2)


def _random_values(chance: random.Random) -> dict[str, str]:
    while True:
        values = _draw(chance, {})
        if impossible(values) is None:
            return values


def _draw(chance: random.Random, fixed: Mapping[str, str]) -> dict[str, str]:
    return {name: fixed.get(name) or chance.choice(list(values)) for name, values in FACTORS.items()}


def _candidates_with(pair: tuple[tuple[str, str], ...], chance: random.Random) -> list[dict[str, str]]:
    """Some possible cases in which this pair meets; none if there are none."""
    drawn = (_draw(chance, dict(pair)) for _ in range(_ATTEMPTS))
    return list(itertools.islice((values for values in drawn if impossible(values) is None), _CANDIDATES))
