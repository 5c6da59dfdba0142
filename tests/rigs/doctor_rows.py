"""What the tests of ``odc doctor`` share: statuses, machines, what a row says."""

from __future__ import annotations

from odc.cli.doctor.cuda import CudaDevice, CudaDriver
from odc.cli.doctor.finding import Finding, Status

OK, WARNING, MISSING, NOT_NEEDED, ERROR = Status.OK, Status.WARNING, Status.MISSING, Status.NOT_NEEDED, Status.ERROR
FIX = "pip install 'odc-fsdp[cuda13]'"
H200 = CudaDevice("NVIDIA H200", 141 << 30, (9, 0))
DRIVER = CudaDriver("580.65", "13.0", (H200, H200))
NO_DRIVER = CudaDriver()


def says(finding: Finding, status: Status, found: str, advice: str = "") -> None:
    """Status and words; there is advice exactly where something can be done."""
    assert (finding.status, found in finding.found, advice in finding.advice) == (status, True, True), finding
    if status in (WARNING, MISSING, ERROR):
        assert advice, "a test of a bad branch states its advice"
        assert finding.advice
