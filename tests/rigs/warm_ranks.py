"""For the fork server of the ranks: what each of them would import and work out by itself.

What a rank runs is a function of a module of tests, which imports pytest and more: a third of what a short rank does.
Of what is left two thirds are what torch prepares in each process when a model is first sharded, run and clipped. So a
small model is trained here, by a rank that has no others: its collectives do nothing.

[Note: A world of no test] What DTensor has worked out belongs to a mesh, and names process groups. Meshes are compared
by their ranks, so that of this training has more ranks than any test: none finds its results, which would be of groups
that are no more.
"""

from __future__ import annotations

import gc
import warnings

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import rich.console  # noqa: F401
import torch._functorch.aot_autograd  # torch.compile imports it with its first backend
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import training
from torch.testing._internal.distributed.fake_pg import FakeStore

import odc.balance.data.loader
import odc.balance.multimodal
import odc.bench.harness.benchmark  # noqa: F401

_WORLD_SIZE = 61

# A process that has used a GPU cannot be forked; nor, where torch is built for CUDA, one that has made a backward.
if training.DEVICE.type == "cpu" and not torch.backends.cuda.is_built():
    with warnings.catch_warnings(action="ignore"):
        torch.set_num_threads(1)  # a fork has none of the others
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD_SIZE)
        for sharded in (training.shard(training.build(), _WORLD_SIZE), training.wrap(training.build())):
            training.train(sharded, None, 0, _WORLD_SIZE, counts=(1,), steps=2)
        dist.destroy_process_group()
gc.collect()
gc.freeze()  # else the first collection in each rank touches, and so copies, what it has of this process
