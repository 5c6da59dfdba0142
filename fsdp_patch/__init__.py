"""The only package that uses ``torch.distributed.fsdp``: connects ODC to FSDP's hooks, and disconnects it."""

from odc.fsdp_patch.fsdp2 import Observation, observe_fsdp
from odc.fsdp_patch.patching import patch_fsdp
from odc.fsdp_patch.session import Session, session_of
from odc.fsdp_patch.unit_steps import step_by_unit

__all__ = ["Observation", "Session", "observe_fsdp", "patch_fsdp", "session_of", "step_by_unit"]
