"""CPU ranks count as accelerators in accelerate, which shards on these only, where this is ``sitecustomize.py``.

For commands that make their own trainers; scripts of ours say so themselves (``examples/trainer_parts.py``).
"""

import os
from typing import Any

if "LOCAL_RANK" in os.environ:  # a rank, and not its launcher
    import torch
    from accelerate import PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    make, build_device_mesh = PartialState.__init__, ParallelismConfig.build_device_mesh

    def init(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        make(self, True, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.device, self.distributed_type = torch.device("cpu"), DistributedType.MULTI_GPU

    PartialState.__init__ = init  # type: ignore[method-assign]
    ParallelismConfig.build_device_mesh = lambda self, _: build_device_mesh(self, "cpu")  # axolotl's is of "cuda"
