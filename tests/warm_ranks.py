"""For the fork server of the ranks: what each of them would import and work out by itself, before they are forked.

What a rank runs is a function of a module of tests, which imports pytest. And DTensor finds out how the result of each
operation is sharded by running it on fake tensors: for a rank that trains a few steps that is most of its time. Found
once for a group that communicates with nobody, it serves all ranks.
"""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import rich.console  # noqa: F401
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from torch.nn.utils import clip_grad_norm_
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import build, optimizer_of, shard


def warm(world_size: int) -> None:
    """Clip and step what most tests train. No backward pass: autograd would refuse to run in forked processes."""
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    model = shard(build(num_blocks=2), world_size)
    optimizer = optimizer_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    dist.destroy_process_group()


torch.set_num_threads(1)  # threads do not outlive a fork
for size in (2, 4):
    warm(size)
gc.freeze()  # else the first collection in each rank touches, and so copies, what it has of this process
