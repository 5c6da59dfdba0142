"""Plan a minibatch of several modalities: a distribution over the ranks for each phase, and what moves between them.

Source: OrchMLLM section 6. Every phase (an encoder, the language model) has a plan of its own; what an encoder makes
goes from where it was made to where its sample's sequence is, in one step (rearrangement composition).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from odc.balance.checks import FloatArray, IntArray, as_count, as_one_of, check_fit
from odc.balance.costs import QuadraticCost, attention_costs, evaluate
from odc.balance.layout import FlatMicrobatches, Layout, by_rank, microbatch_tokens, permuted, split
from odc.balance.multimodal.lengths import Items, MinibatchLengths, Phase, SampleLengths
from odc.balance.multimodal.schedule import FORWARD_SHARE, MinibatchSchedule, forward_ends
from odc.balance.multimodal.simulate import step_times
from odc.balance.partition.differencing import Parts
from odc.balance.plan import Comm, Plan
from odc.balance.policies import LBMini, Policy, get_policy
from odc.balance.policies.base import costliest_first, renumber
from odc.balance.policies.packing import pack, pack_together
from odc.balance.rearrange.nodes import place_items
from odc.balance.rearrange.post_balance import post_balanced
from odc.balance.rearrange.rearrangement import Rearrangement, owners
from odc.balance.rearrange.rebalance import rebalanced
from odc.errors import shown

_PROBES: IntArray = 2 ** np.arange(0, 18, 3)
"""Lengths by whose costs cost models are compared."""

_OWN_POLICIES = ("local", "joint", "whole")
"""That look at several phases, or at none."""


def _in_time(language: Plan, encoders: Mapping[str, Plan], lengths: MinibatchLengths) -> Plan:
    """The language model's microbatches of each rank in an order in which nobody waits for long.

    What an encoder makes is there after its forward, and the encoder's backward waits for its gradient: so microbatches
    with items run as soon as all of these are there, the costliest items first, and those without fill the gaps.
    """
    flat = FlatMicrobatches.of(language.microbatches)
    if flat.counts.max() <= 1:
        return language
    ready, weight = np.zeros((2, language.num_samples))
    clocks = np.zeros(language.world_size)
    for name, plan in encoders.items():
        encoder, sample_of = FlatMicrobatches.of(plan.microbatches), lengths.items[name].sample
        weight += np.bincount(sample_of, plan.costs, minlength=weight.size)
        ends, clocks = forward_ends(plan, clocks)
        np.maximum.at(ready, sample_of[encoder.samples], np.repeat(ends, encoder.sizes))
    starts, times = flat.largest(ready), language.microbatch_times()
    weights = np.bincount(np.repeat(np.arange(flat.sizes.size), flat.sizes), weight[flat.samples], flat.sizes.size)
    order = np.arange(flat.sizes.size)
    for rank, mine in enumerate(split(order, np.cumsum([0, *flat.counts.tolist()]))):
        if mine.size > 1:
            jobs = starts[mine].tolist(), weights[mine].tolist(), times[rank].tolist()
            mine[:] = mine[_list_schedule(float(clocks[rank]), *jobs)]
    return replace(language, microbatches=flat.reordered(order))


def _list_schedule(clock: float, starts: list[float], weights: list[float], times: list[float]) -> list[int]:
    """Jobs of one machine: of those that can start, the one of most weight; if none can, the first one to come."""
    left, order = list(range(len(starts))), list[int]()
    while left:
        can = [job for job in left if starts[job] <= clock]
        job = max(can, key=lambda job: weights[job]) if can else min(left, key=lambda job: starts[job])
        left.remove(job)
        order.append(job)
        clock = max(clock, starts[job]) + times[job]
    return order


class Orchestrator:
    """Plans the phases of minibatches with several modalities. Stateless and deterministic: every rank makes the same
    plan.

    Args:
        encoders: one phase per modality; may be empty.
        language: the phase in which all modalities meet.
        num_ranks: how many ranks share a minibatch.
        policy: how samples are assigned to the language models of ranks and to microbatches. A name or policy of
            :func:`~odc.balance.get_policy`; needs ``language.max_tokens``. "joint": balances the sum of all phases, so
            that the language model compensates for uneven encoders (a few long clips). Needs ODC, with which ranks do
            not synchronize after each phase. "whole": balances samples by their cost in all phases together and encodes
            items on the rank of their sequence, so that no output moves; with ODC nearly as even
            (``balance_encoders=False``). "local": each rank keeps the samples that it has read, packed into few
            microbatches. None: the same, with the microbatches of the loader (a :class:`~odc.balance.MinibatchLoader`
            has balanced them already).
        balance_encoders: redistribute the items of each encoder, so that its cost is equal on all ranks
            (post-balancing). False: items are encoded on the rank of their sequence, as in pre-balancing.
        ranks_per_node: assign batches to ranks so that little data moves between nodes (algorithm 3). None: all ranks
            are on one node, and little data should move between ranks.
        comm: "odc": ranks may have different numbers of microbatches in every phase. "collective": ranks with fewer
            also get empty ones, because FSDP's collectives need equal numbers.

    Raises:
        ValueError: names are not distinct, a number is out of range, or the policy needs a limit of tokens.

    Example:
        >>> orchestrator = Orchestrator(
        ...     [Phase("image", image_cost), Phase("audio", audio_cost, layout="padded")],
        ...     Phase("language", language_cost, max_tokens=8192),
        ...     num_ranks=8,
        ...     policy="lb-mini",
        ... )
        >>> orchestrator.modalities
        ('image', 'audio')
    """

    def __init__(
        self,
        encoders: Sequence[Phase],
        language: Phase,
        num_ranks: int,
        *,
        policy: str | Policy | None = None,
        balance_encoders: bool = True,
        ranks_per_node: int | None = None,
        comm: Comm = "odc",
    ) -> None:
        self.encoders = {phase.name: phase for phase in encoders}
        self.language = language
        self.num_ranks = as_count(num_ranks, "num_ranks")
        names = [phase.name for phase in (*encoders, language)]
        if len(set(names)) < len(names):
            raise ValueError(f"phases are called {', '.join(map(repr, names))}: expected names that are all different")
        for phase in encoders:
            if phase.layout != "packed" and not isinstance(phase.cost, QuadraticCost):
                raise ValueError(
                    f"phase {phase.name!r} has layout {phase.layout!r} and cost {shown(phase.cost)}: expected a "
                    "QuadraticCost, whose parts padding affects in a known way"
                )
        if language.layout != "packed":
            raise ValueError(f"phase {language.name!r} has layout {language.layout!r}: expected 'packed'")
        self.policy = get_policy(policy) if isinstance(policy, str) and policy not in _OWN_POLICIES else policy
        if policy == "joint" and comm != "odc":
            raise ValueError(
                f"policy='joint' with comm={shown(comm)}: collectives keep ranks in step in each phase, and a sum over "
                "phases has no meaning; expected comm='odc'"
            )
        if policy is not None and language.max_tokens is None:
            raise ValueError(f"policy={shown(policy)} needs max_tokens of phase {language.name!r}")
        if policy == "whole" and balance_encoders:
            raise ValueError("policy='whole' balances all phases at once: expected balance_encoders=False beside it")
        self.balance_encoders = balance_encoders
        self.ranks_per_node = ranks_per_node
        if ranks_per_node is not None and num_ranks % as_count(ranks_per_node, "ranks_per_node"):
            raise ValueError(f"{num_ranks} ranks on nodes of ranks_per_node={ranks_per_node}: expected full nodes")
        self.comm: Comm = as_one_of(comm, "comm", ("odc", "collective"))

    @property
    def modalities(self) -> tuple[str, ...]:
        """Names of the encoders."""
        return tuple(self.encoders)

    def identity(self) -> dict[str, str]:
        """What must be the same on all ranks."""
        return {
            "encoders": repr([_identity(phase) for phase in self.encoders.values()]),
            "language": repr(_identity(self.language)),
            "policy": self.policy.name if isinstance(self.policy, Policy) else repr(self.policy),
            "options": repr((self.num_ranks, self.balance_encoders, self.ranks_per_node, self.comm)),
        }

    def plan(self, lengths: MinibatchLengths | Sequence[Sequence[SampleLengths]]) -> MinibatchSchedule:
        """Plan one minibatch.

        Args:
            lengths: the lengths of the samples that each rank has read.

        Raises:
            ValueError: the number of ranks is not ``num_ranks``, or an item or a sample exceeds its phase's
                ``max_tokens`` (the message names phase and sample).
        """
        if not isinstance(lengths, MinibatchLengths):
            lengths = MinibatchLengths.of_samples(lengths, self.modalities)
        if lengths.num_ranks != self.num_ranks:
            raise ValueError(f"lengths of {lengths.num_ranks} ranks: expected num_ranks={self.num_ranks}")
        if self.policy != "joint" or not self.balance_encoders:
            return self._schedule(lengths, None)
        # Evening out the sum may let encoders wait for gradients. Where that costs more, each phase is even by itself.
        read = self._items_of(lengths, by_rank(lengths.microbatches))
        first = self._schedule(lengths, self._plan_encoders(lengths, read, read))
        second = self._schedule(lengths, None)
        return min(first, second, key=lambda schedule: step_times(schedule, "odc").makespan)

    def _schedule(self, lengths: MinibatchLengths, encoders: dict[str, Plan] | None) -> MinibatchSchedule:
        """A schedule; its language model makes up for what ``encoders`` that are planned already cost."""
        has = by_rank(lengths.microbatches)
        read = self._items_of(lengths, has)
        if encoders is not None:
            language = self._plan_language(lengths, has, self._loads(encoders))
        else:
            language = self._plan_language(lengths, has, np.zeros(self.num_ranks))
            encoders = self._plan_encoders(lengths, read, self._items_of(lengths, by_rank(language.microbatches)))
        if self.comm == "odc":
            language = _in_time(language, encoders, lengths)
        wants = by_rank(language.microbatches)
        needed = self._items_of(lengths, wants)
        inputs, outputs = {}, {}
        for name, plan in encoders.items():
            inputs[name] = Rearrangement.between(read[name], by_rank(plan.microbatches))
            outputs[name] = Rearrangement.between(inputs[name].target, needed[name])
        samples = Rearrangement.between(has, wants)
        frozen = {name: phase.frozen for name, phase in self.encoders.items()}
        return MinibatchSchedule(lengths, language, encoders, samples, inputs, outputs, frozen)

    def _items_of(self, lengths: MinibatchLengths, samples: list[IntArray]) -> dict[str, list[IntArray]]:
        """Of each encoder, the items of the samples of each rank."""
        return {name: lengths.items[name].of_ranks(samples) for name in self.encoders}

    def _plan_encoders(
        self, lengths: MinibatchLengths, has: Mapping[str, list[IntArray]], wants: Mapping[str, list[IntArray]]
    ) -> dict[str, Plan]:
        """Of each encoder; items are read by who ``has`` them, and their sequences are of who ``wants`` them."""
        return {
            name: self._plan_encoder(phase, lengths, has[name], wants[name]) for name, phase in self.encoders.items()
        }

    def _loads(self, encoders: Mapping[str, Plan]) -> FloatArray:
        """What encoders cost on each rank."""
        loads = np.zeros(self.num_ranks)
        for name, plan in encoders.items():
            loads += plan.microbatch_times().sum(axis=1) * (FORWARD_SHARE if self.encoders[name].frozen else 1.0)
        return loads

    def _plan_language(self, lengths: MinibatchLengths, has: list[IntArray], loads: FloatArray) -> Plan:
        """``loads``: what else ranks have to compute."""
        phase = self.language
        costs = evaluate(phase.cost, lengths.language)
        microbatches: Sequence[Parts] = lengths.microbatches
        limit = phase.max_tokens
        _check_fit(phase, lengths, lengths.language)
        if limit is None:  # and so no policy
            limit = max((int(lengths.language[m].sum()) for rank in microbatches for m in rank), default=1)
        if self.policy == "local":
            microbatches, name = self._packed(lengths.language, costs, has, limit), "local"
        elif self.policy in ("joint", "whole") or type(self.policy) is LBMini:
            shared = self._whole_costs(lengths, costs) if self.policy == "whole" else costs
            batches = rebalanced(shared, has, loads=loads, ranks_per_node=self.ranks_per_node)
            name = self.policy if isinstance(self.policy, str) else LBMini.name
            microbatches = self._packed(lengths.language, costs, batches, limit)
        elif isinstance(self.policy, Policy):
            plan = self.policy.plan(lengths.language, world_size=self.num_ranks, max_tokens=limit, cost=phase.cost)
            microbatches, name = self._filled(self._at_home(plan, has)), plan.policy
        else:
            microbatches, name = self._filled(microbatches), "as loaded"
        return Plan(microbatches, lengths.language, costs, max(limit, 1), name)

    def _whole_costs(self, lengths: MinibatchLengths, costs: FloatArray) -> FloatArray:
        """Of each sample in all phases, padding apart, given those in the language model."""
        found = costs.copy()
        for name, phase in self.encoders.items():
            items = lengths.items[name]
            share = FORWARD_SHARE if phase.frozen else 1.0
            np.add.at(found, items.sample, share * evaluate(phase.cost, items.encoder))
        return found

    def _packed(self, lengths: IntArray, costs: FloatArray, batches: Sequence[IntArray], limit: int) -> Sequence[Parts]:
        """Each rank's samples in microbatches; of collectives all ranks need as many."""
        together = self._one_each(batches)
        if lengths.size and microbatch_tokens(together, lengths, "packed").max() <= limit:  # also without packing
            return together
        if self.comm == "collective":
            parts = pack_together([lengths[mine] for mine in batches], [costs[mine] for mine in batches], limit)
        else:
            parts = [pack(lengths[mine], costs[mine], limit) for mine in batches]
        return [costliest_first(renumber(found, mine), costs) for found, mine in zip(parts, batches, strict=True)]

    def _at_home(self, plan: Plan, has: list[IntArray]) -> list[Parts]:
        """The batches of all ranks, each given to a rank that has much of it, or whose node has."""
        ranks_per_node = self.ranks_per_node or self.num_ranks
        placed = place_items(
            owners(has), owners(by_rank(plan.microbatches)), plan.lengths, self.num_ranks, ranks_per_node
        )
        return permuted(plan.microbatches, placed)

    def _plan_encoder(
        self, phase: Phase, lengths: MinibatchLengths, has: list[IntArray], wants: list[IntArray]
    ) -> Plan:
        items = lengths.items[phase.name]
        _check_fit(phase, lengths, items.encoder)
        costs = evaluate(phase.cost, items.encoder)
        batches = self._balanced(phase, items, costs, has, wants) if self.balance_encoders else wants
        if phase.max_tokens is None:
            microbatches: Sequence[Parts] = self._one_each(batches)
            limit = int(microbatch_tokens(microbatches, items.encoder, phase.layout).max(initial=1))
        else:
            limit = phase.max_tokens
            microbatches = self._filled([_cut(phase.layout, limit, items.encoder, costs, batch) for batch in batches])
        attention = attention_costs(phase.cost, items.encoder) if phase.layout == "padded-attention" else None
        name = "post-balancing" if self.balance_encoders else "as the language model"
        return Plan(microbatches, items.encoder, costs, limit, name, layout=phase.layout, attention_costs=attention)

    def _balanced(
        self, phase: Phase, items: Items, costs: FloatArray, has: list[IntArray], wants: list[IntArray]
    ) -> list[IntArray]:
        if phase.layout == "packed":
            # From where outputs are wanted: these and their gradients are more than what was read.
            return rebalanced(costs, wants, ranks_per_node=self.ranks_per_node)
        batches = post_balanced(items.encoder, self.num_ranks, cost=phase.cost, layout=phase.layout)
        # Inputs come from where samples were read; outputs go to where sequences are, and their gradients come back.
        has_bytes = bool(items.num_bytes.any())
        into, out = (items.num_bytes if has_bytes else items.encoder), items.output
        if has_bytes and phase.row_bytes is not None:
            weight = float(phase.row_bytes * (1 if phase.frozen else 2))
        else:
            weight = float(into.sum()) / float(out.sum()) if out.any() else 0.0
        placed = place_items(
            np.concatenate([owners(has), owners(wants)]),
            np.tile(owners(batches), 2),
            np.concatenate([into, weight * out]),
            self.num_ranks,
            self.ranks_per_node or self.num_ranks,
        )
        return permuted(batches, placed)

    def _one_each(self, batches: Sequence[IntArray]) -> FlatMicrobatches:
        return FlatMicrobatches.one_each(batches, keep_empty=self.comm == "collective")

    def _filled(self, microbatches: Sequence[Parts]) -> Sequence[Parts]:
        """Under collectives all ranks have as many microbatches: those with fewer get empty ones."""
        if self.comm == "odc":
            return microbatches
        most = max(map(len, microbatches))
        return [[*mine, *([] for _ in range(most - len(mine)))] for mine in microbatches]


def _check_fit(phase: Phase, lengths: MinibatchLengths, tokens: IntArray) -> None:
    """Check the limit of a phase, whose items (for the language model: samples) have so many tokens."""
    if phase.max_tokens is None:
        return
    try:
        check_fit(tokens, phase.max_tokens)
    except ValueError as error:
        worst = int(np.argmax(tokens))
        where = f"sample {worst} of the minibatch (read by rank {lengths.rank_of(worst)})"
        if phase.name in lengths.items:
            where = lengths.name(phase.name, worst)
        raise ValueError(f"phase {phase.name!r}, {where}: {error}") from None


def _identity(phase: Phase) -> dict[str, object]:
    """What makes a phase the same on two ranks: of its cost model not the name, in which there may be an address, but
    costs."""
    costs = [f"{cost:.9g}" for cost in evaluate(phase.cost, _PROBES).tolist()]
    return {**{field.name: getattr(phase, field.name) for field in fields(phase)}, "cost": costs}


def _cut(layout: Layout, max_tokens: int, lengths: IntArray, costs: FloatArray, items: IntArray) -> Parts:
    """One rank's items of an encoder in microbatches that keep its limit."""
    if layout == "packed":
        return costliest_first(renumber(pack(lengths[items], costs[items], max_tokens), items), costs)
    # Neighbours in length go together, so that little is padding.
    parts: Parts = []
    total = 0
    for item in items[np.argsort(-lengths[items], kind="stable")].tolist():
        longest = int(lengths[parts[-1][0]]) if parts else 0
        total = longest * (len(parts[-1]) + 1) if parts and layout == "padded" else total + int(lengths[item])
        if not parts or total > max_tokens:
            parts.append([])
            total = int(lengths[item])
        parts[-1].append(item)
    return parts
