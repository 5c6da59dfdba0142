"""What this machine can do for ODC, and what to change where it cannot: the checks behind ``odc doctor``.

A check looks at facts (versions, limits, devices) and says what it found and what to do. Those that judge are pure
functions of what they are given; :class:`Facts` collects, once and without a CUDA context.
"""

from __future__ import annotations

from odc.doctor.checks import CHECKS, Check, Report, examine
from odc.doctor.finding import Finding, Row, Status
from odc.doctor.software import Facts

__all__ = ["CHECKS", "Check", "Facts", "Finding", "Report", "Row", "Status", "examine"]
