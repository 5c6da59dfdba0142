"""A plan: which rank trains on which samples of one minibatch, packed how, and what that costs."""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from odc.balance.checks import FloatArray, IntArray, as_cost, as_costs, as_count, as_lengths, as_speeds
from odc.balance.layout import FlatMicrobatches, Layout, OfRanks, as_layout, microbatch_costs, microbatch_tokens
from odc.balance.partition.differencing import Parts
from odc.errors import shown

Comm = Literal["odc", "collective"]


class PackedOnDemand(OfRanks):
    """:attr:`Plan.microbatches` where each rank packs for itself: a rank's samples are packed when they are asked for.

    So a rank that trains by a plan packs its own, and only what looks at all ranks packs for all.

    Args:
        ranks: the samples of each rank.
        pack: makes microbatches of the samples of one rank, always the same.
        check: called with a rank and its microbatches, once they are packed.
    """

    def __init__(
        self, ranks: Parts, pack: Callable[[list[int]], Parts], check: Callable[[int, Parts], None] | None = None
    ) -> None:
        self.ranks = ranks
        self._pack = pack
        self._check = check
        self._packed: list[Parts | None] = [None] * len(ranks)

    def checked(self, check: Callable[[int, Parts], None]) -> PackedOnDemand:
        """The same, of which each rank is checked."""
        return PackedOnDemand(self.ranks, self._pack, check)

    def __len__(self) -> int:
        return len(self.ranks)

    def of_rank(self, rank: int) -> Parts:
        if (found := self._packed[rank]) is None:
            # Threads that come here at once pack the same.
            found = self._pack(self.ranks[rank])
            if sorted(itertools.chain.from_iterable(found)) != sorted(self.ranks[rank]):
                raise ValueError(f"rank {rank} has samples {self.ranks[rank]}, packed into {found}: expected the same")
            if self._check is not None:
                self._check(rank, found)
            self._packed[rank] = found
        return found

    def __repr__(self) -> str:
        """The samples of the first ranks; packs nothing."""
        num_packed = len(self) - self._packed.count(None)
        return f"PackedOnDemand({reprlib.repr(self.ranks)}, num_ranks={len(self)}, num_packed={num_packed})"


@dataclass(frozen=True, eq=False)
class Plan:
    """The microbatches of every rank for one minibatch. Plans are validated; do not change them.

    Sample indices are positions in ``lengths`` and ``costs``. Ranks may have different numbers of microbatches, also
    none. An empty microbatch has no sample: under collectives, which all ranks must join equally often, the rank runs a
    dummy forward and backward without loss.

    Raises:
        ValueError: a sample is missing or occurs twice, a microbatch exceeds ``max_tokens``, there is no rank, lengths
            or costs are invalid, or ``attention_costs`` and ``layout`` do not go together.

    Example:
        >>> policy = get_policy("lb-mini")
        >>> plan = policy.plan([900, 500, 400, 200, 100], world_size=2, max_tokens=1000, cost=LinearCost())
        >>> plan.num_microbatches, plan.makespan("odc")
        ((2, 1), 1100.0)
        >>> print(plan.explain())
        lb-mini: 5 samples, 2100 tokens on 2 ranks, at most 1000 tokens a microbatch
        bubble rate 4.5% with ODC, 12.5% with collectives
        rank 0: 2 samples in 2 microbatches, 1100 tokens, 105% of the mean time
        rank 1: 3 samples in 1 microbatch, 1000 tokens, 95% of the mean time
    """

    microbatches: Sequence[Parts]
    """``microbatches[rank][m]``: the samples of microbatch m of a rank, in the order of execution. If each rank packs
    its own samples, the lists of a rank are made and checked only when they are accessed."""

    lengths: IntArray
    """Tokens of each sample, (num_samples,) int64."""

    costs: FloatArray
    """Cost of each sample in the unit of the cost model, (num_samples,) float64."""

    max_tokens: int
    """Maximum tokens per microbatch."""

    policy: str
    """Name of the policy that made the plan."""

    microbatch_cost: float = 0.0
    """Fixed cost of every microbatch, also of empty ones, in addition to its samples."""

    speeds: tuple[float, ...] | None = None
    """Rank r needs the time cost / ``speeds[r]``; None: all ranks are equally fast."""

    layout: Layout = "packed"
    """Whether the samples of a microbatch are packed one after the other, or padded to the longest one, everywhere or
    in attention only."""

    attention_costs: FloatArray | None = None
    """The attention part of ``costs``, (num_samples,) float64; given if and only if ``layout`` is "padded-attention".
    Attention then costs that of the longest sample times the number of samples."""

    def __post_init__(self) -> None:
        lengths, costs = as_lengths(self.lengths).copy(), as_costs(self.costs).copy()
        lengths.flags.writeable = costs.flags.writeable = False
        checked: dict[str, object] = {
            "lengths": lengths,
            "costs": costs,
            "max_tokens": as_count(self.max_tokens, "max_tokens"),
            "layout": as_layout(self.layout),
            "microbatch_cost": as_cost(self.microbatch_cost, "microbatch_cost"),
        }
        if self.speeds is not None:
            checked["speeds"] = tuple(as_speeds(self.speeds, len(self.microbatches)).tolist())
        if self.attention_costs is not None:
            attention = as_costs(self.attention_costs, "attention_costs").copy()
            attention.flags.writeable = False
            checked["attention_costs"] = attention
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        self._check_attention()
        object.__setattr__(self, "microbatches", self._checked_microbatches())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            (self.max_tokens, self.policy) == (other.max_tokens, other.policy)
            and (self.microbatch_cost, self.speeds, self.layout) == (other.microbatch_cost, other.speeds, other.layout)
            and np.array_equal(self.lengths, other.lengths)
            and np.array_equal(self.costs, other.costs)
            # Of equal layouts, so both or none of them are None.
            and (self.attention_costs is None or np.array_equal(self.attention_costs, other.attention_costs))  # type: ignore[arg-type]
            and list(self.microbatches) == list(other.microbatches)
        )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.microbatches)

    @property
    def num_samples(self) -> int:
        """Number of samples of the minibatch on all ranks together."""
        return int(self.lengths.size)

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Number of microbatches of each rank, including empty ones."""
        return tuple(FlatMicrobatches.of(self.microbatches).counts.tolist())

    def tokens(self, rank: int) -> int:
        """Number of tokens that ``rank`` trains on, without padding."""
        return sum(int(self.lengths[microbatch].sum()) for microbatch in self.microbatches[rank])

    @property
    def peak_tokens(self) -> int:
        """Number of tokens of the largest microbatch, including padding: activation memory must hold it."""
        return int(self.microbatch_tokens().max(initial=0))

    @property
    def padding_fraction(self) -> float:
        """Fraction of tokens that are padding, from 0 to 1; 0 for an empty plan, and if only attention is padded."""
        total = int(self.microbatch_tokens().sum())
        return 1.0 - int(self.lengths.sum()) / total if total else 0.0

    def microbatch_tokens(self) -> IntArray:
        """Tokens of each microbatch, including padding, (world_size, largest number of microbatches)."""
        return microbatch_tokens(self.microbatches, self.lengths, self.layout)

    def microbatch_times(self) -> FloatArray:
        """Time of each microbatch in units of cost, (world_size, largest number of microbatches).

        The time is the cost of the samples plus ``microbatch_cost``, divided by the speed of the rank; 0 for
        microbatches that a rank does not have. In a padded layout, the cost of the samples is their number times the
        cost of the longest; with padded attention this applies to the attention part only.
        """
        times = self._sample_costs()
        if self.microbatch_cost:
            exists = np.arange(times.shape[1]) < np.array(self.num_microbatches)[:, None]
            times += self.microbatch_cost * exists
        return times if self.speeds is None else times / np.array(self.speeds)[:, None]

    def makespan(self, comm: Comm = "odc") -> float:
        """Time until the last rank finishes, in units of cost. Communication takes no time.

        ``"collective"`` is equation (1) of the paper: every microbatch takes as long as its slowest rank, and the
        minibatch takes their sum. ``"odc"``: ranks wait for each other only at the end of the minibatch, so it takes as
        long as the slowest rank's sum. Microbatches that a rank does not have cost 0.

        Raises:
            ValueError: ``comm`` is neither.
        """
        return makespan(self.microbatch_times(), comm)

    def bubble_rate(self, comm: Comm = "odc") -> float:
        """Idle device time divided by total device time, from 0 to 1 (paper section 5.2, appendix G).

        The total is ``world_size * makespan(comm)``, of which ``microbatch_times().sum()`` is work. 0 for an
        empty plan.
        """
        return bubble_rate([self], comm)

    def explain(self) -> str:
        """A short text that shows what each rank gets and how long it would wait."""
        lines = [
            f"{self.policy}: {_count(self.num_samples, 'sample')}, {_count(int(self.lengths.sum()), 'token')} "
            f"on {_count(self.world_size, 'rank')}, at most {_count(self.max_tokens, 'token')} a microbatch"
            + self._explain_padding(),
            f"bubble rate {self.bubble_rate('odc'):.1%} with ODC, "
            f"{self.bubble_rate('collective'):.1%} with collectives",
        ]
        loads = self.microbatch_times().sum(axis=1)
        mean = float(loads.mean()) or 1.0
        for rank, mine in enumerate(self.microbatches):
            num_empty = sum(not microbatch for microbatch in mine)
            lines.append(
                f"rank {rank}: {_count(sum(map(len, mine)), 'sample')} in {_count(len(mine), 'microbatch')}"
                + (f" ({num_empty} empty)" if num_empty else "")
                + f", {_count(self.tokens(rank), 'token')}, {loads[rank] / mean:.0%} of the mean time"
            )
        return "\n".join(lines)

    def _sample_costs(self) -> FloatArray:
        """Cost of the samples of each microbatch, padding included."""
        return microbatch_costs(self.microbatches, self.costs, self.lengths, self.layout, self.attention_costs)

    def _explain_padding(self) -> str:
        if self.layout == "padded":
            return f", {self.padding_fraction:.1%} of all tokens are padding"
        if self.layout == "padded-attention":
            total = float(self._sample_costs().sum())
            share = 1.0 - float(self.costs.sum()) / total if total else 0.0
            # Sums in different orders: no padding is 0, not -1e-16.
            return f", {max(0.0, share):.1%} of the cost is padding in attention"
        return ""

    def _check_attention(self) -> None:
        if (self.attention_costs is not None) != (self.layout == "padded-attention"):
            given = "no attention_costs" if self.attention_costs is None else "attention_costs"
            raise ValueError(
                f"{given} with layout={self.layout!r}: expected them with 'padded-attention', where attention is "
                "padded apart from the rest, and with no other layout; attention_costs(cost, lengths) of "
                "odc.balance.costs works them out"
            )
        if self.attention_costs is None:
            return
        if self.attention_costs.size != self.num_samples:
            raise ValueError(
                f"{self.attention_costs.size} attention_costs for {self.num_samples} lengths: expected one per sample"
            )
        if (more := np.flatnonzero(self.attention_costs > self.costs)).size:
            raise ValueError(
                f"attention_costs[{more[0]}] is {self.attention_costs[more[0]]}, costs[{more[0]}] only "
                f"{self.costs[more[0]]}: expected attention to be a part of the sample's whole cost"
            )

    def _checked_microbatches(self) -> Sequence[Parts]:
        """The plan's own copy, where they are lists."""
        if not len(self.microbatches):
            raise ValueError("the plan has no rank: expected at least one")
        if self.costs.size != self.num_samples:
            raise ValueError(f"{self.costs.size} costs for {self.num_samples} lengths: expected one per sample")
        check = partial(_check_limit, self.policy, self.lengths, self.layout, int(self.max_tokens))
        if isinstance(self.microbatches, PackedOnDemand):
            self._check_samples(np.array([sample for mine in self.microbatches.ranks for sample in mine]))
            return self.microbatches.checked(check)
        chain = itertools.chain.from_iterable
        microbatches: Sequence[Parts] = self.microbatches
        if isinstance(microbatches, FlatMicrobatches):
            samples = microbatches.samples
        else:
            if set(map(type, chain(chain(self.microbatches)))) <= {int}:
                microbatches = [list(map(list, mine)) for mine in self.microbatches]
            else:
                microbatches = [[list(map(operator.index, part)) for part in mine] for mine in self.microbatches]
            samples = np.array(list(chain(chain(microbatches))))
        self._check_samples(samples)
        tokens = microbatch_tokens(microbatches, self.lengths, self.layout)
        for rank in np.flatnonzero((tokens > self.max_tokens).any(axis=1)).tolist():
            check(rank, microbatches[rank])
        return microbatches

    def _check_samples(self, found: npt.NDArray[Any]) -> None:
        number = self.num_samples
        if found.size == number and (
            not number or (found.min() >= 0 and found.max() < number and np.bincount(found, minlength=number).all())
        ):
            return
        samples: list[int] = sorted(found.tolist())
        unknown = sorted({s for s in samples if not 0 <= s < number})
        missing = sorted(set(range(number)) - set(samples))
        repeated = sorted({a for a, b in itertools.pairwise(samples) if a == b})
        raise ValueError(
            f"{self.policy}: every sample 0..{number - 1} must be in the plan once; "
            f"missing: {missing}, repeated: {repeated}, unknown: {unknown}"
        )


def _check_limit(policy: str, lengths: IntArray, layout: Layout, max_tokens: int, rank: int, parts: Parts) -> None:
    tokens = microbatch_tokens([parts], lengths, layout)[0]
    for m in np.flatnonzero(tokens > max_tokens).tolist():
        padded = " with its padding" if layout == "padded" else ""
        raise ValueError(
            f"{policy}: microbatch {m} of rank {rank} has {tokens[m]} tokens{padded}: "
            f"expected at most max_tokens={max_tokens}"
        )


@dataclass(frozen=True, eq=False)
class PlannedMinibatch:
    """One global minibatch: its samples of the dataset, and the rank and microbatch of each.

    Example:
        >>> options = {"minibatch_size": 2, "world_size": 2, "policy": "lb-mini", "cost": LinearCost()}
        >>> sampler = MinibatchSampler([5, 90, 30, 40], **options)
        >>> (planned,) = sampler
        >>> sorted(planned.samples.tolist()), planned.of_rank(0)
        ([0, 1, 2, 3], [[3, 2, 0]])
    """

    samples: IntArray
    """Dataset indices, (num_samples,) int64; sample i of ``plan`` is ``samples[i]``."""

    plan: Plan

    def of_rank(self, rank: int) -> list[list[int]]:
        """Dataset indices of each microbatch of ``rank``."""
        return [self.samples[microbatch].tolist() for microbatch in self.plan.microbatches[rank]]


def _count(number: int, noun: str) -> str:
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def makespan(times: FloatArray, comm: Comm) -> float:
    """:meth:`Plan.makespan` for a table of times, (world_size, num_microbatches)."""
    if comm == "odc":
        return float(times.sum(axis=1).max(initial=0.0))
    if comm == "collective":
        return float(times.max(axis=0, initial=0.0).sum())
    raise ValueError(f"comm={shown(comm)}: expected 'odc' or 'collective'")


def bubble_rate(plans: Iterable[Plan], comm: Comm = "odc") -> float:
    """Total idle device time divided by total device time of several minibatches (paper appendix G).

    This is not the mean of the minibatches' rates: longer minibatches count more. 0 if there is no work.

    Example:
        >>> policy = get_policy("lb-mini")
        >>> plans = [
        ...     policy.plan(lengths, world_size=2, max_tokens=1000, cost=LinearCost())
        ...     for lengths in ([900, 500, 400], [300, 300, 200, 100])
        ... ]
        >>> round(bubble_rate(plans, "odc"), 3)
        0.036
    """
    work = total = 0.0
    for plan in plans:
        times = plan.microbatch_times()
        work += float(times.sum())
        total += plan.world_size * makespan(times, comm)
    # Sums in different orders may differ in their last bits: the rate of a perfect plan is 0, not -1e-16.
    return max(0.0, 1.0 - work / total) if total > 0 else 0.0
