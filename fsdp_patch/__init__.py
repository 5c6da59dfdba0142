"""The only room that knows ``torch.distributed.fsdp``: puts ODC behind the public doors of FSDP2, and takes it out."""

from odc.fsdp_patch.observe import Observation, observe_fsdp
from odc.fsdp_patch.session import Session, patch_fsdp

__all__ = ["Observation", "Session", "observe_fsdp", "patch_fsdp"]
