"""Check ``late_binding``: a loader that binds microbatches late, on ranks whose hosts are ahead of their devices.

One rank's device takes four times as long as the plan says: computation is a kernel that only takes time, in front of
a small model's. Its events tell how fast each rank is, and a microbatch is bound when the device has begun the one
before. Each sample must be computed once, some by ranks that have taken them, and the losses must be those of one
process that trains alone in float64 on the same minibatches.

Ranks that share a GPU take turns on it, so that the minibatch is not shorter for it: that wants a GPU per rank.
"""

from __future__ import annotations

import itertools
import random
import time

import torch
import torch.distributed as dist

import odc
from odc.balance import MinibatchLoader, QuadraticCost
from odc.bench.gpu.device import cycles_per_s, spin
from odc.bench.gpu.models import VOCABULARY, language_model, shard
from odc.bench.gpu.setting import Report, Setting, require, run_ranks
from odc.bench.gpu.training import TIMEOUT_S, loss_of, optimizer_of, train_alone
from odc.bench.harness.ranks import Rank

STEPS, QUICK_STEPS = 24, 8
PER_RANK, MAX_TOKENS = 6, 12
TOLERANCE = 1e-5
SLOW_RANK, SLOWER, SECONDS_PER_TOKEN = 1, 4, 1e-3
Sample = tuple[int, torch.Tensor]


class Samples:
    """Tokens of a few lengths; ``lengths`` is what the plan takes for their costs."""

    def __init__(self, num_samples: int) -> None:
        generator = random.Random(0)
        self.lengths = [generator.randint(1, 8) for _ in range(num_samples)]

    def __getitem__(self, index: int) -> Sample:
        generator = torch.Generator().manual_seed(index)
        return index, torch.randint(0, VOCABULARY, (1, 9), generator=generator)


def check(setting: Setting) -> Report:
    steps = QUICK_STEPS if setting.quick else STEPS
    data: dict[str, object] = {"steps": steps}
    errors, taken = [], 0
    for world_size in setting.worlds:
        ranks = run_ranks(setting, world_size, train, steps)
        computed = [indices for indices, *_ in ranks]
        minibatches = [sorted(itertools.chain(*of_ranks)) for of_ranks in zip(*computed, strict=True)]
        samples = sorted(itertools.chain(*minibatches))
        require(samples == list(range(len(samples))), f"{world_size} ranks: a sample was computed twice, or not at all")
        dataset = Samples(len(samples))
        together = [(torch.cat([dataset[index][1] for index in indices]), len(indices)) for indices in minibatches]
        wanted = train_alone(language_model(), [([tokens], count) for tokens, count in together])
        losses = ranks[0][1]
        errors.append(max(abs(a - b) / abs(b) for a, b in zip(losses, wanted, strict=True)))
        text = f"{world_size} ranks: losses {losses}, reference {wanted}: off by {errors[-1]:.1e}"
        require(errors[-1] <= TOLERANCE, text)
        of_world = sum(num_taken for *_, num_taken, _ in ranks)
        require(of_world > 0, f"{world_size} ranks: nobody has taken a sample of the slow rank")
        taken += of_world
        data[f"{world_size} ranks"] = {"taken": of_world, "speeds": ranks[0][3], "largest_error": errors[-1]}
    return Report(f"{taken} samples taken, each computed once; largest relative error {max(errors):.0e}", data)


def _delay(device: torch.device, seconds: float) -> None:
    if device.type == "cuda":
        spin(int(seconds * cycles_per_s()))
    else:
        time.sleep(seconds)


def train(rank: Rank, steps: int) -> tuple[list[list[int]], list[float], int, list[float]]:
    """Samples that this rank has computed in each step; the losses of all; how many it has taken; learned speeds."""
    dataset = Samples(rank.world_size * PER_RANK * steps)
    slower = SLOWER if rank.rank == SLOW_RANK else 1
    model = shard(language_model(), "fsdp2", "fp32", rank.device, rank.world_size)
    optimizer = optimizer_of(model)
    computed, losses = list[list[int]](), list[torch.Tensor]()
    with odc.patch_fsdp(model, transport=rank.place.transport, timeout_s=TIMEOUT_S):
        loader: MinibatchLoader[Sample, list[Sample]] = MinibatchLoader(
            dataset, dataset.lengths, list, rank.rank, rank.world_size, minibatch_size=PER_RANK, max_tokens=MAX_TOKENS,
            cost=QuadraticCost(a=0.0, b=1.0), late_binding=True,
        )  # fmt: skip
        for minibatch in loader:
            own, mine = torch.zeros((), device=rank.device), list[int]()
            for samples in minibatch.microbatches:
                indices = [index for index, _ in samples]
                tokens = torch.cat([tokens for _, tokens in samples]).to(rank.device, non_blocking=True)
                _delay(rank.device, SECONDS_PER_TOKEN * slower * sum(dataset.lengths[index] for index in indices))
                loss = loss_of(model, tokens) / (rank.world_size * PER_RANK)
                (loss * rank.world_size).backward()  # type: ignore[no-untyped-call]
                own, mine = own + loss.detach(), mine + indices
            optimizer.step()
            optimizer.zero_grad()
            computed.append(mine)
            losses.append(own)
        loader.close()
        total = torch.stack(losses).double().cpu()
        dist.all_reduce(total)
        return computed, total.tolist(), loader.num_taken, loader.speeds
