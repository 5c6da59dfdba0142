"""Ranks of any script share one GPU, where this folder is in ``PYTHONPATH``.

A launcher gives each rank a GPU of its own, and NCCL takes no two ranks on one. Here all have the first, and
collectives are gloo's, through the host; what there is of ODC is as ever.

    PYTHONPATH=tests/rigs/one_gpu odc run --nproc-per-node 2 examples/hf_trainer.py
"""

import os
import sys
from pathlib import Path
from typing import Any

if "LOCAL_RANK" in os.environ:  # a rank, and not its launcher
    os.environ["LOCAL_RANK"] = "0"
    sys.path.append(str(Path(__file__).parents[1]))

    import on_device
    import torch.distributed as dist

    KEPT = on_device.through_the_host()
    _init_process_group = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        _init_process_group("gloo", *args, **kwargs)

    dist.init_process_group = init_process_group
    dist.distributed_c10d.init_process_group = init_process_group
