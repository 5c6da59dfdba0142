"""Other people's batching, each in a process of its own: the samples' lengths in, every rank's batches out.

    python -m odc.bench.batching.peer_programs lhotse job.json answer.json    # what peers.py starts

Their packages are on this process's path only (:mod:`.peers` puts them there). They do their own work through
their own doors; a sample's data is nothing but its length. Each line on standard output is how many samples more have
been put into batches; whatever a package prints goes to standard error.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Batches = list[list[list[list[int]]]]
"""Of every rank every step, of every step its microbatches in their order, of every microbatch the samples' indices."""
Report = Callable[[int], None]
"""Told how many samples more are in batches."""


@dataclass(frozen=True)
class Job:
    """What is to be put into batches."""

    lengths: list[int]
    """Of the shuffled samples, in tokens."""

    max_tokens: int
    """The token budget of a microbatch."""

    world_size: int
    settings: dict[str, Any]
    """Of the package, by its own names."""


def without_its_parents(module: str) -> Any:
    """Import a module without what the packages around it import: a whole framework that the module makes no use of."""
    parts = module.split(".")
    for end in range(1, len(parts)):
        name = ".".join(parts[:end])
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"no package {name} on {sys.path}", name=name)
        sys.modules[name] = importlib.util.module_from_spec(spec)  # made, not run
    return importlib.import_module(module)


class Samples:
    """A data set whose samples are no more than their lengths."""

    def __init__(self, lengths: Sequence[int], make_tokens: Callable[[int], Any]) -> None:
        self.lengths, self.make_tokens = lengths, make_tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.make_tokens(self.lengths[index]), "index": index}


def odb(job: Job, report: Report) -> Batches:
    """Ranks as processes in a gloo group, each with a worker and a process that groups, as its loader starts them."""
    from odc.bench.harness.ranks import run_ranks

    steps = run_ranks(job.world_size, _odb_rank, job, on_progress=lambda done: report(int(done)), have_children=True)
    return [[[batch] for batch in mine] for mine in steps]


def _odb_rank(me: Any, job: Job) -> list[list[int]]:
    import torch
    import torch.distributed as dist
    from torch.utils.data import DistributedSampler

    samples: Any = Samples(job.lengths, lambda length: torch.empty(length, device="meta"))  # a length, no memory
    package: Any = importlib.import_module("odb")
    loader = package.ODBDataLoader(
        samples,
        token_budget=job.max_tokens,
        sampler=DistributedSampler(samples, me.world_size, me.rank, shuffle=False),  # they are shuffled already
        collate_fn=_collate_indices,
        multiprocessing_context="fork",  # its grouping process uses the group of its rank
        **job.settings,
    )
    found = []
    for batch in loader:
        found.append(batch["indices"])
        me.report(len(found[-1]))
    dist.barrier()  # the grouping process of a rank that has no more takes part until all are done
    return found


def _collate_indices(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A batch that says which samples are in it; one without ``input_ids`` counts as none."""
    return {"input_ids": [], "indices": [sample["index"] for sample in samples]}


def cosmos(job: Job, report: Report) -> Batches:
    """The data set of each rank. It begins anew where it ends, as in the trainer, which counts steps instead of epochs:
    here as many as it takes until as many samples as there are have been in batches."""
    module = without_its_parents("cosmos_rl.dispatcher.data.load_balanced_dataset")
    ranks = [
        iter(
            module.LoadBalancedDataset(
                Samples(job.lengths, range),
                max_tokens_for_batch=job.max_tokens,
                dp_rank=rank,
                dp_world_size=job.world_size,
                **job.settings,
            )
        )
        for rank in range(job.world_size)
    ]
    found: Batches = [[] for _ in ranks]
    done = 0
    while done < len(job.lengths):
        before = done
        for mine, rank in zip(found, ranks, strict=True):
            mine.append([[sample["index"] for sample in batch] for batch in next(rank)])
            done += sum(map(len, mine[-1]))
        report(done - before)
    return found


def lhotse(job: Job, report: Report) -> Batches:
    """The sampler of each rank: every one goes through all samples. A sample is a cut as long as it has tokens."""
    warnings.filterwarnings("ignore", module="lhotse")
    package: Any = importlib.import_module("lhotse")
    sampling = importlib.import_module("lhotse.dataset.sampling.dynamic_bucketing")
    found: Batches = []
    for rank in range(job.world_size):
        cuts = (
            package.MonoCut(id=str(index), start=0, duration=float(length), channel=0)
            for index, length in enumerate(job.lengths)
        )
        sampler = sampling.DynamicBucketingSampler(
            package.CutSet.from_cuts(cuts),
            max_duration=float(job.max_tokens),
            rank=rank,
            world_size=job.world_size,
            **job.settings,
        )
        found.append([])
        for batch in sampler:
            found[-1].append([[int(cut.id.partition("_")[0]) for cut in batch]])  # 12_dup0: 12 once more
            report(len(batch))
    return found


def verl(job: Job, report: Report) -> Batches:
    """Batches of the samples in their order, balanced over the ranks and split into microbatches as by the trainer for
    supervised fine-tuning (``balance_batch``, ``use_dynamic_bsz``), without the last batch if it is not full."""
    import torch

    module = without_its_parents("verl.utils.seqlen_balancing")
    tensordict: Any = importlib.import_module("tensordict")
    size = int(job.settings["train_batch_size"])

    def split(lengths: Any, least: int | None) -> list[list[int]]:
        tokens = torch.arange(int(lengths.max())) < lengths[:, None]
        batch = tensordict.TensorDict({"input_ids": tokens, "attention_mask": tokens}, batch_size=[len(lengths)])
        found = module.rearrange_micro_batches(batch, max_token_len=job.max_tokens, min_num_micro_batch=least)
        return [list(part) for part in found[1]]

    found: Batches = [[] for _ in range(job.world_size)]
    for start in range(0, len(job.lengths) - size + 1, size):
        lengths = torch.tensor(job.lengths[start : start + size])
        work = module.calculate_workload(lengths.float())
        shares = module.get_seqlen_balanced_partitions(work.tolist(), k_partitions=job.world_size, equal_size=True)
        for share in shares:  # small ones first and last, as the trainer orders them
            share.sort(key=lambda i: (float(work[i]), i))
            share[:] = share[::2] + share[1::2][::-1]
        parts = [split(lengths[share], None) for share in shares]
        most = max(map(len, parts))  # what the ranks agree on through their group, which there is none of here
        for mine, share, own in zip(found, shares, parts, strict=True):
            equal = own if len(own) == most else split(lengths[share], most)
            mine.append([[start + share[i] for i in part] for part in equal])
        report(size)
    return found


PROGRAMS: dict[str, Callable[[Job, Report], Batches]] = {"odb": odb, "cosmos": cosmos, "lhotse": lhotse, "verl": verl}


def main(program: str, job_file: str, answer_file: str) -> None:
    """Read the job, let the program do it, write the batches."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    job = Job(**json.loads(Path(job_file).read_text()))
    batches = PROGRAMS[program](job, lambda done: print(done, file=output))
    Path(answer_file).write_text(json.dumps(batches))


if __name__ == "__main__":
    main(*sys.argv[1:])
