"""Redistribute samples that ranks have made themselves (rollouts, pairs of answers).

Unlike a loader, this module reads nothing: ranks exchange lengths, make a plan, and send whole samples to other ranks,
as few as the plan allows. (Needs torch.)
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from odc.balance.checks import FloatArray, IntArray, as_cost, as_count, as_lengths, as_one_of, check_fit
from odc.balance.costs import CostModel, evaluate
from odc.balance.data.iteration import COMMS, Comm, check_counts, filled_up
from odc.balance.data.loss_tokens import as_loss_tokens, check_length
from odc.balance.data.loss_weights import loss_weights
from odc.balance.data.microbatches import SampleT
from odc.balance.data.place import Place
from odc.balance.layout import split
from odc.balance.multimodal.payload import check_sample, from_row, to_row
from odc.balance.plan import Plan
from odc.balance.policies import Policy, get_policy
from odc.balance.policies.base import Job
from odc.balance.random_numbers import random_generator
from odc.balance.rearrange.exchange import Meeting, exchange
from odc.balance.rearrange.from_home import plan_from_home, samples_of
from odc.balance.rearrange.rearrangement import Rearrangement, owners
from odc.errors import AbortedError, shorten, shown

T = TypeVar("T")

_groups: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], dist.ProcessGroup]] = weakref.WeakKeyDictionary()
"""Of meshes of several dimensions, made once for each process group of the whole job."""


@dataclass(frozen=True, eq=False)
class BalancedBatch(Generic[SampleT]):
    """The samples of an optimizer step that this rank trains on. Made by :func:`balance_batch`.

    Example:
        >>> mine = [{"input_ids": torch.arange(length)} for length in ([9, 2, 3], [4])[rank]]
        >>> batch = balance_batch(mine, [len(one["input_ids"]) for one in mine], cost=LinearCost(), max_tokens=9)
        >>> sum(len(sample["input_ids"]) for sample in batch.samples)  # on either rank: 9 there, 2 + 3 + 4 here
        9
        >>> batch.num_samples  # of all ranks
        4
    """

    microbatches: list[list[SampleT]]
    """This rank's microbatches in the order of execution, each a list of whole samples; may be empty."""

    plan: Plan
    """The plan of all ranks. Samples are numbered by their position on their first rank: the first sample of each rank,
    then the second of each, and so on."""

    sent_bytes: int
    """Bytes of the samples that this rank has sent to others for this batch."""

    _known: _Known
    _own: dict[int, SampleT]

    @property
    def samples(self) -> list[SampleT]:
        """This rank's samples in the order of its microbatches."""
        return [sample for microbatch in self.microbatches for sample in microbatch]

    @property
    def num_samples(self) -> int:
        """Number of samples of all ranks."""
        return self.plan.num_samples

    @property
    def num_loss_tokens(self) -> int | None:
        """Number of loss tokens of all ranks; None: ``num_loss_tokens`` was not given."""
        found = self._known.num_loss_tokens
        return None if found is None else int(found.sum())

    def loss_weights(
        self, loss_type: str, *, max_completion_length: int | None = None, dtype: torch.dtype = torch.float32
    ) -> list[torch.Tensor]:
        """For each microbatch, the factors of its samples, (num_samples,), in host memory.

        The loss of a microbatch is the sum over its samples of the factor times the *sum* of the sample's token losses.
        FSDP sums gradients and divides them by the number of ranks; the result is the gradient of the loss of the whole
        step in one process:

        ========================== ========================================================================
        loss_type                  the loss of a step
        ========================== ========================================================================
        "dapo", "cispo", "vespo"   mean over its tokens
        "grpo", "sapo"             mean over its samples of the mean over their tokens
        "dr_grpo"                  sum over its tokens, over samples times ``max_completion_length``
        "sample"                   mean over samples of one number each (pairs, "luspo")
        ========================== ========================================================================

        Advantages are part of the samples, so completions of one prompt may be on several ranks.

        Args:
            loss_type: names as in TRL.
            max_completion_length: required for "dr_grpo".

        Raises:
            UnsupportedError: the loss depends on which samples share a microbatch ("bnpo").
            ValueError: the loss is not known, or its divisor was not given.
        """
        known = self._known
        weights = torch.from_numpy(
            loss_weights(
                loss_type,
                known.num_loss_tokens,
                known.world_size,
                num_samples=self.num_samples,
                max_completion_length=max_completion_length,
            )
        ).to(dtype)
        return [weights[numbers] for numbers in self.plan.microbatches[known.rank]]

    def split(self, num_minibatches: int, *, seed: int) -> list[BalancedBatch[SampleT]]:
        """Shuffle the samples and cut them into minibatches, one for each optimizer step. Collective.

        Each minibatch is balanced and normalized separately, as for PPO's epochs over one batch. Samples move with
        everything that was stored in them. To train several epochs on the same minibatches, iterate over
        ``microbatches`` again instead.

        Args:
            num_minibatches: number of minibatches; their numbers of samples differ by at most one.
            seed: seed of the shuffle, the same on all ranks. Use another seed for each epoch.

        Raises:
            ValueError: there are fewer samples than minibatches, or arguments differ between ranks. Raised on all
                ranks.
        """
        known = self._known

        def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
            number = as_count(num_minibatches, "num_minibatches")
            if number > self.num_samples:
                raise ValueError(
                    f"num_minibatches={number}: expected at most the {self.num_samples} samples of the batch, so that "
                    "each optimizer step has one"
                )
            for i, sample in self._own.items():
                check_sample(sample, f"sample {i} of the batch")
            return {"num_minibatches": number, "seed": as_count(seed, "seed", minimum=0)}, {}

        _agreed(known.meeting, "split", prepare)
        keys = random_generator("minibatches", seed).random_raw(self.num_samples)
        parts = np.array_split(np.argsort(keys, kind="stable"), num_minibatches)
        return known.arranged([np.sort(part) for part in parts], self._own)


@dataclass(frozen=True, eq=False)
class _Known:
    """What all ranks know of a batch, and how it is to be balanced."""

    meeting: Meeting | None
    """None: this process is alone."""

    lengths: IntArray
    costs: FloatArray
    num_loss_tokens: IntArray | None
    home: list[IntArray]
    """The samples that each rank has."""

    policy: Policy
    max_tokens: int
    microbatch_cost: float
    ranks_per_node: int
    comm: Comm

    @property
    def rank(self) -> int:
        return 0 if self.meeting is None else self.meeting.rank

    @property
    def world_size(self) -> int:
        return len(self.home)

    def arranged(self, parts: list[IntArray], own: dict[int, SampleT]) -> list[BalancedBatch[SampleT]]:
        """Minibatches of these samples, all together every sample once, for which all move in one exchange."""
        plans = [self._plan(part) for part in parts]
        wanted = [[part[mine] for mine in samples_of(plan)] for part, plan in zip(parts, plans, strict=True)]
        target = [np.concatenate(mine) for mine in zip(*wanted, strict=True)]
        mine, sent = self._moved(target, own)
        found = []
        for part, plan, has in zip(parts, plans, wanted, strict=True):
            known = replace(
                self,
                lengths=self.lengths[part],
                costs=self.costs[part],
                num_loss_tokens=None if self.num_loss_tokens is None else self.num_loss_tokens[part],
                home=[np.searchsorted(part, numbers) for numbers in has],
            )
            microbatches = [[mine[int(part[i])] for i in one] for one in plan.microbatches[self.rank]]
            kept = {i: mine[int(part[i])] for i in known.home[self.rank].tolist()}
            num_bytes = sum(sent.get(i, 0) for i in part.tolist())
            found.append(BalancedBatch(microbatches, plan, num_bytes, known, kept))
        return found

    def _plan(self, part: IntArray) -> Plan:
        """Of some samples, by their places in ``part``."""
        job = Job(self.lengths[part], self.costs[part], self.world_size, self.max_tokens, self.microbatch_cost, None)
        has = [np.searchsorted(part, mine[np.isin(mine, part)]) for mine in self.home]
        plan = plan_from_home(self.policy, job, has, self.ranks_per_node)
        if self.comm == "auto":
            check_counts(plan, "this batch")
        return filled_up(plan) if self.comm == "collective" else plan

    def _moved(self, target: Sequence[IntArray], own: dict[int, T]) -> tuple[dict[int, T], dict[int, int]]:
        """The samples that this rank shall have, by number, those that stay as the same objects; and the bytes of those
        that it gave away."""
        route = Rearrangement.between(self.home, target)
        if self.meeting is None or route.is_at_rest:
            return own, {}
        stays = owners(route.source) == owners(route.target)
        device = self.meeting.devices[-1]  # an accelerator, if the group communicates on one
        nothing = torch.empty(0, dtype=torch.uint8, device=device)
        had, gets = route.source[self.rank].tolist(), route.target[self.rank].tolist()
        given = {i: nothing if stays[i] else to_row(own[i], device) for i in had}
        came = exchange([*given.values()], route, self.meeting.group)
        found = {i: own[i] if stays[i] else from_row(row) for i, row in zip(gets, came, strict=True)}
        return found, {i: row.nbytes for i, row in given.items()}


def balance_batch(
    samples: Sequence[SampleT],
    lengths: Sequence[int | Sequence[int]] | npt.NDArray[Any],
    *,
    cost: CostModel,
    max_tokens: int | None = None,
    policy: str | Policy = "lb-mini",
    num_loss_tokens: npt.ArrayLike | None = None,
    microbatch_cost: float = 0.0,
    ranks_per_node: int | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    comm: Comm = "auto",
) -> BalancedBatch[SampleT]:
    """Redistribute samples that are on the ranks already, and pack each rank's samples into microbatches. Collective.

    For samples with lengths that were not known in advance, such as rollouts that each rank has generated. Ranks
    exchange lengths, compute the same plan, and send whole samples to the ranks that train on them, in one all-to-all.
    "lb-mini" moves little more than the excess of overloaded ranks, within nodes first
    (:func:`~odc.balance.rebalance`). With other policies, a batch goes to the rank that has most of it.

    Ranks may have any number of samples, also none, and may get different numbers of microbatches, also none. A pass
    without gradient (log-probabilities of a reference model) can use the same microbatches. Its results may be stored
    in the samples, and move with them in :meth:`BalancedBatch.split`.

    Args:
        samples: this rank's samples: tensors without gradient, numbers and texts, in dicts (they arrive as plain
            dicts), lists and tuples. Samples that stay on their rank are the same objects.
        lengths: tokens of each sample. If a sample has several sequences that stay together (a pair of answers), a list
            of their tokens; the cost is their sum.
        cost: see :mod:`odc.balance.costs`.
        max_tokens: maximum tokens per microbatch; default: the longest sample of all ranks.
        policy: a name or a :class:`~odc.balance.Policy`.
        num_loss_tokens: tokens of each sample that have a loss, for :meth:`BalancedBatch.loss_weights`.
        microbatch_cost: see :meth:`~odc.balance.Policy.plan`.
        ranks_per_node: ranks 0 .. ranks_per_node - 1 are on one node, and so on; default: all ranks are on one node.
        group: the ranks that share the samples; default: all of ``torch.distributed``, or this process alone.
        mesh: instead of ``group``, see :class:`~odc.balance.MinibatchLoader`.
        comm: see :class:`~odc.balance.MinibatchLoader`.

    Raises:
        ValueError: an argument is out of range; a sample is longer than ``max_tokens``, has ``input_ids`` that differ
            from its length, or cannot be sent; or, on all ranks, arguments differ between ranks. Nothing was moved.
        AbortedError: the arguments of another rank were refused; the message names it.
        RuntimeError: ranks have different numbers of microbatches and ``comm="auto"`` finds no active ODC.

    Example:
        >>> completions = ([3, 9, 4, 8], [2, 1, 2, 2])[rank]  # tokens
        >>> rollouts = [{"ids": torch.arange(n), "advantage": 0.5} for n in completions]
        >>> batch = balance_batch(
        ...     rollouts, completions, cost=LinearCost(), max_tokens=10, num_loss_tokens=completions
        ... )
        >>> sum(len(sample["ids"]) for sample in batch.samples) in (15, 16)  # of 24 and 7
        True
        >>> for microbatch, weights in zip(batch.microbatches, batch.loss_weights("dapo")):
        ...     pass  # loss = sum(weight * token_losses(sample).sum() for each of its samples); loss.backward()
        >>> len(batch.split(2, seed=0))  # two optimizer steps of the next epoch
        2
    """
    meeting = Meeting(_group_of(mesh, group)) if dist.is_available() and dist.is_initialized() else None
    num_ranks = 1 if meeting is None else meeting.world_size

    def prepare() -> tuple[dict[str, Any], dict[str, Any]]:
        chosen = _policy_of(policy)
        most = None if max_tokens is None else as_count(max_tokens, "max_tokens")
        per_node = as_count(num_ranks if ranks_per_node is None else ranks_per_node, "ranks_per_node")
        if num_ranks % per_node:
            raise ValueError(f"{num_ranks} ranks on nodes of ranks_per_node={per_node}: expected full nodes")
        tokens, costs = _tokens_and_costs(samples, lengths, cost)
        if most is not None:
            check_fit(tokens, most)
        counts = None if num_loss_tokens is None else as_loss_tokens(tokens, num_loss_tokens)
        for i, sample in enumerate(samples):
            check_sample(sample, f"samples[{i}]")
            check_length(sample, int(tokens[i]), f"samples[{i}]")
        arguments = {
            "policy": chosen.name,
            "max_tokens": most,
            "microbatch_cost": as_cost(microbatch_cost, "microbatch_cost"),
            "ranks_per_node": per_node,
            "comm": as_one_of(comm, "comm", COMMS),
            "num_loss_tokens": "not given" if counts is None else "given",
            "cost (of 1 and of 1024 tokens)": evaluate(cost, np.array([1, 1024])).tolist(),
        }
        told = {"tokens": tokens.tolist(), "costs": costs.tolist()}
        return arguments, told if counts is None else {**told, "counts": counts.tolist()}

    told = _agreed(meeting, "balance_batch", prepare)
    numbers = _numbered([len(one["tokens"]) for one in told])
    order = np.argsort(np.concatenate(numbers))
    tokens, costs, *counts = (
        np.concatenate([np.array(one[name], dtype=kind) for one in told])[order]
        for name, kind in (("tokens", np.int64), ("costs", np.float64), ("counts", np.int64))
        if name in told[0]
    )
    known = _Known(
        meeting=meeting,
        lengths=tokens,
        costs=costs,
        num_loss_tokens=counts[0] if counts else None,
        home=numbers,
        policy=_policy_of(policy),
        max_tokens=int(tokens.max(initial=1)) if max_tokens is None else int(max_tokens),
        microbatch_cost=float(microbatch_cost),
        ranks_per_node=int(ranks_per_node or num_ranks),
        comm=comm,
    )
    own = dict(zip(numbers[known.rank].tolist(), samples, strict=True))
    return known.arranged([np.arange(order.size)], own)[0]


def _agreed(
    meeting: Meeting | None, call: str, prepare: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What each rank tells. Collective.

    Args:
        prepare: returns the arguments, which must be the same on all ranks, and what else this one tells; or raises.

    Raises:
        ValueError: on all ranks: they have different arguments.
        AbortedError: another rank's ``prepare`` has raised.
    """
    try:
        arguments, told = prepare()
    except Exception as error:
        if meeting is not None:
            meeting.tell(json.dumps({"problem": shorten(str(error))}))
        raise
    if meeting is None:
        return [told]
    arguments = {"call": call, **arguments}
    texts = [json.loads(text) for text in meeting.tell(json.dumps({"arguments": arguments, "told": told}))]
    for rank, text in enumerate(texts):
        if "problem" in text:
            raise AbortedError(f"rank {meeting.name(rank)} cannot balance its batch: {text['problem']}")
    for name in arguments:
        values: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            values.setdefault(json.dumps(text["arguments"].get(name)), []).append(meeting.name(rank))
        if len(values) > 1:
            who = ", ".join(f"{value} on ranks {ranks}" for value, ranks in values.items())
            raise ValueError(
                f"ranks that balance a batch together have different arguments: {name} is {who}. Give the same on all"
            )
    return [text["told"] for text in texts]


def _policy_of(policy: str | Policy) -> Policy:
    if not isinstance(policy, str | Policy):
        raise ValueError(f"policy={shown(policy)}: expected a name or a Policy")
    return get_policy(policy) if isinstance(policy, str) else policy


def _tokens_and_costs(samples: Sequence[Any], lengths: Any, cost: CostModel) -> tuple[IntArray, FloatArray]:
    """Of each sample, (num_samples,): the sums over its sequences."""
    given = [as_lengths([n] if np.ndim(n) == 0 else n, f"lengths[{i}]") for i, n in enumerate(lengths)]
    if len(given) != len(samples):
        raise ValueError(f"{len(given)} lengths for {len(samples)} samples: expected one for each sample")
    if empty := [i for i, sequences in enumerate(given) if not sequences.size]:
        raise ValueError(f"lengths[{empty[0]}] is empty: expected the tokens of at least one sequence")
    if not given:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    flat, starts = np.concatenate(given), np.cumsum([0, *map(len, given)])[:-1]
    with np.errstate(over="ignore", invalid="ignore"):
        costs = evaluate(cost, flat)
    return as_lengths(np.add.reduceat(flat, starts)), np.add.reduceat(costs, starts)


def _numbered(sizes: Sequence[int]) -> list[IntArray]:
    """Numbers for the samples of ranks that have so many: the first of each rank, the second of each, and so on."""
    ranks = np.repeat(np.arange(len(sizes)), sizes)
    places = np.concatenate([np.arange(size) for size in sizes])
    numbers = np.empty(ranks.size, dtype=np.int64)
    numbers[np.lexsort((ranks, places))] = np.arange(ranks.size)
    return split(numbers, np.cumsum([0, *sizes]))


def _group_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group of the ranks that share the samples; of a mesh of several dimensions it is made at the first call."""
    if mesh is None:
        return group
    place = Place.of(None, None, mesh, group)
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(place.global_ranks(None))
    made = _groups.setdefault(dist.GroupMember.WORLD, {})
    if ranks not in made:
        made[ranks] = dist.new_group(list(ranks), use_local_synchronization=True)
    return made[ranks]
