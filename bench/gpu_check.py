"""``python -m odc.bench.gpu_check``: see :mod:`odc.bench.gpu.command`."""

from __future__ import annotations

import sys

from odc.bench.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
