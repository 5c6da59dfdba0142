"""The only room that knows ``torch.distributed.fsdp``: puts ODC behind its doors, and takes it out."""

from odc.fsdp_patch.fsdp2 import Observation, observe_fsdp
from odc.fsdp_patch.patching import patch_fsdp
from odc.fsdp_patch.session import Session, session_of
from odc.fsdp_patch.unit_steps import step_by_unit

__all__ = ["Observation", "Session", "observe_fsdp", "patch_fsdp", "session_of", "step_by_unit"]
