"""For the fork server of the ranks: what each of them would import by itself.

What a rank runs is a function of a module of tests, which imports pytest and more: a third of what a short rank does.
Only modules: what torch works out beside (DTensor's caches, say) belongs to one process group.
"""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import rich.console  # noqa: F401
import torch._functorch.aot_autograd  # torch.compile imports it with its first backend
import torch.distributed.checkpoint.state_dict  # noqa: F401
import training  # noqa: F401

import odc.balance.data.loader
import odc.balance.multimodal
import odc.bench.harness.benchmark  # noqa: F401

gc.freeze()  # else the first collection in each rank touches, and so copies, what it has of this process
