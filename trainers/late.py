"""Late binding in a trainer's step: a rank that finishes early takes samples from slower ranks.

The trainer takes all bundles of a step before it runs one, and counts their labels. So the last bundle of a rank holds
its whole queue of the plan, collated by the loader's workers. When this bundle runs, its microbatches are chosen one by
one (:mod:`odc.balance.late_binding`). Samples taken from other ranks are read and collated in this process. The trainer
divides losses by the number of labels on all ranks, so it does not matter which rank runs a sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from odc.balance.checks import IntArray, fingerprint
from odc.balance.data.place import Place
from odc.balance.late_binding.microbatches import LateMicrobatches, check_late_binding
from odc.balance.late_binding.steal_policy import pack_largest_first
from odc.balance.late_binding.work_queues import WorkQueues, own_store, together_on
from odc.balance.plan import Plan, PlannedMinibatch
from odc.errors import UnsupportedError
from odc.trainers.accelerate import DataRanks, random_states_kept
from odc.trainers.batches import Bundle, Microbatch
from odc.trainers.packing import counts_of
from odc.trainers.planned import PackedDataset


class LateSteps:
    """The steps of one trainer. All ranks make it at the same time.

    Args:
        accelerator: that of the trainer.
        dataset: reads and packs samples.
    """

    def __init__(self, accelerator: Any, dataset: PackedDataset) -> None:
        ranks = DataRanks.of(accelerator)
        together = together_on(None if ranks.group is None else accelerator.torch_device_mesh["dp"])
        job = dataset.planner.job
        work = [job.max_tokens, fingerprint(job.lengths.tobytes()), fingerprint(job.costs.tobytes())]
        self._queues = WorkQueues(
            Place(ranks.rank, ranks.world_size),
            f"trainer {work}",
            own_store(),
            together=together,
            microbatch_cost=job.microbatch_cost,
        )
        self._accelerator = accelerator
        self._ranks = ranks
        self._dataset = dataset
        self._num_steps = 0
        self._microbatches: LateMicrobatches[list[Microbatch]] | None = None

    @property
    def num_taken(self) -> int:
        """Samples that this rank has taken from others so far."""
        return self._queues.num_taken

    def begin(self, bundle: Bundle) -> None:
        """The step that ends with this bundle is next. Collective: all ranks come to know what each has collated."""
        late = bundle.late
        assert late is not None
        check_late_binding()
        planner = self._dataset.planner
        job = planner.job.of(late.samples)
        microbatches = pack_largest_first(late.shares, job.lengths, job.costs, job.max_tokens)
        estimates = self._queues.estimates.plan_with(0, self._num_steps)
        plan = Plan(
            microbatches, job.lengths, job.costs, job.max_tokens, planner.options.policy, estimates.microbatch_cost
        )
        mine = list(itertools.chain(*microbatches[self._ranks.rank]))
        counts = np.zeros((2, late.samples.size), dtype=np.int64)
        counts[:, mine] = late.counts
        accelerator = self._accelerator
        summed: torch.Tensor = accelerator.reduce(torch.from_numpy(counts).to(accelerator.device), "sum")
        made = _Made(self._dataset, late.samples, summed // self._ranks.num_partners(accelerator))
        rows = iter(bundle.microbatches)
        batches = iter([list(itertools.islice(rows, number)) for number in late.num_rows])
        planned = PlannedMinibatch(np.arange(late.samples.size), plan)
        self._num_steps += 1
        self._microbatches = LateMicrobatches(self._queues, f"{self._num_steps}", planned, batches, made)

    def rows(self) -> Iterator[Microbatch]:
        """What this rank is to run of the step, each row chosen when it is asked for; at least one, of nothing."""
        assert self._microbatches is not None
        is_run = False
        for rows in self._microbatches:
            is_run = True
            yield from rows
        if not is_run:
            yield from self._dataset.rows([])
        self._microbatches = None


class _Made:
    """Makes the rows of a microbatch of samples, given by their positions in the step, as :class:`PackedDataset` does.

    Raises:
        UnsupportedError: a sample is not collated as it was where it was planned.
    """

    def __init__(self, dataset: PackedDataset, samples: IntArray, counts: torch.Tensor) -> None:
        self._dataset = dataset
        self._samples = samples
        self._counts = counts.to("cpu", non_blocking=True)  # nobody waits for it before something is taken
        self._copied = torch.cuda.Event() if counts.is_cuda else None  # type: ignore[no-untyped-call]
        if self._copied is not None:
            self._copied.record()

    def __getitem__(self, positions: list[int]) -> list[Microbatch]:
        with random_states_kept():  # whatever is taken, the model's random numbers are the same
            return self._dataset.rows([self._collated(position) for position in positions])

    def _collated(self, position: int) -> tuple[int, Microbatch]:
        sample = int(self._samples[position])
        alone = self._dataset.collated(sample)
        if self._copied is not None:
            self._copied.synchronize()
        found, expected = counts_of(alone), tuple(self._counts[:, position].tolist())
        if found != expected:
            raise UnsupportedError(
                f"sample {sample} of the dataset has {found[0]} tokens and {found[1]} labels where it was taken, and "
                f"{expected[0]} and {expected[1]} where the loader collated it, by which losses are divided: with "
                "late_binding=True a data_collator must make the same of a sample each time"
            )
        return sample, alone
