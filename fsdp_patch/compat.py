"""The versions of torch that this package supports, and their differences.

| what | 2.9 | 2.10 | 2.11 | 2.12 | 2.13 | 2.14 | here |
|---|---|---|---|---|---|---|---|
| ``_fsdp_param_group`` or ``_fsdp_param_groups`` | one | one | one | list | list | list | ``param_groups`` |
| a padded shard gets new tensors at the first forward | yes | - | - | - | - | - | ``Guard`` |
| ``replicate()`` is FSDP2 without a shard group | - | yes | yes | yes | yes | yes | ``Fsdp2Unit.is_sharded`` |
| a shard group of one calls the custom reduce-scatter | yes | - | - | - | - | - | such groups are not patched |
| a recomputed forward (checkpointing) gathers once more | yes | - | - | - | - | - | gathers are legal at any time |
| custom communication refused by a module of several groups | - | - | - | yes | yes | yes | ``Fsdp2Unit.swap_comms`` |
| ``set_reduce_scatter_unused_params`` | - | - | - | - | yes | yes | ``Fsdp2Unit._coming_gradients`` |
| a process group for the reduce-scatter alone | - | - | - | - | yes | yes | groups are never compared by identity |
| ``all_gather_single``, ``reduce_scatter_single`` | - | - | - | - | yes | yes | FSDP is not entered through these |
| integer parameters | - | - | - | yes | yes | yes | torch refuses them before 2.12 |
| pipeline schedules over plain FSDP2 crash in gloo | yes | yes | yes | - | - | - | not tested there |
| a reduction returns the stream that it ended on, too | - | - | - | - | yes | yes | ``reduced`` |
| a mesh says itself which one it is a part of | - | yes | yes | yes | yes | yes | ``root_mesh`` |
| parameters with types of ``spmd_types``, by which gathered ones are made anew | - | - | - | - | - | yes | refused |

Newer: torch 2.15 keeps the mixed precision policy with each parameter instead of the group (:func:`mp_policy`), and
without a ``reduce_dtype`` it reduces in the parameters' own dtype (``FsdpParam.grad_dtype``).

The same in all six: what a process group of a mesh is called, where it is not the default group
(:mod:`odc.fsdp_patch.patching`), and how it counts its collectives; how FSDP2 calls custom communication, the three
functions that stage for it (:mod:`odc.fsdp_patch.fsdp2_in_place`) and all-gather extensions
(:mod:`odc.fsdp_patch.fsdp2_extension`), in which order it divides, the layout of ``reshard_after_forward=<int>``, and
all that is used of FSDP1.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from odc.errors import UnsupportedError

COMPARED_WITH = ((2, 9), (2, 14))


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def warn_if_untested() -> None:
    """Warn about a torch whose FSDP nobody has compared with this package."""
    if not is_tested():
        low, high = (".".join(map(str, v)) for v in COMPARED_WITH)
        warnings.warn(f"odc was written for torch {low} to {high}, this is {torch.__version__}", stacklevel=3)


def is_tested() -> bool:
    """Whether somebody has compared the installed torch with this package."""
    return COMPARED_WITH[0] <= torch_version() <= COMPARED_WITH[1]


def reduced(stream: Any, sent: object) -> tuple[Any, ...]:
    """What FSDP2's ``foreach_reduce`` returns where gradients were sent elsewhere: nothing to add or all-reduce, but
    ``sent``, to be kept until ``stream`` has done what it was given."""
    event = stream.record_event()
    ended = (stream, event) if torch_version() >= (2, 13) else (event,)
    return (sent, event, *ended, None, None, None)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh of which this is a part; itself, if it is whole."""
    own = getattr(mesh, "_get_root_mesh", None)
    root: DeviceMesh = own() if own is not None else _mesh_resources.get_root_mesh(mesh)
    return root


def param_groups(module: nn.Module | FSDPModule) -> list[Any]:
    """The FSDP2 parameter groups of exactly this module."""
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def mp_policy(group: Any) -> MixedPrecisionPolicy:
    """The mixed precision policy of an FSDP2 parameter group.

    Raises:
        UnsupportedError: its parameters have several (``param_dtype_override_fn``, torch 2.15).
    """
    if hasattr(group, "mp_policy"):
        policy: MixedPrecisionPolicy = group.mp_policy
        return policy
    policies = {param.mp_policy for param in group.fsdp_params}
    if len(policies) > 1:
        raise UnsupportedError(
            f"{len(policies)} mixed precision policies in one unit: wrap modules that need another dtype on their own"
        )
    return policies.pop() if policies else MixedPrecisionPolicy()
