"""What a result was measured on."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch

import odc


def describe_environment() -> dict[str, object]:
    """Hardware, versions and date, for the ``environment`` entry of a result file."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "odc": odc.__version__,
        "threads_per_rank": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
