"""What ``python -m odc.bench.X`` has been called since there is ``odc bench``. To go with the next release."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from odc.bench.harness.catalogue import ROOMS, written

OTHERS = {
    "readme": "odc bench figures",
    "gpu_check": "odc bench gpu",
    "guard": "odc bench fsdp-host-time",
    "gpu.bandwidth": "odc bench primitives",
    "multimodal_sizes": "odc bench multimodal-lengths",
}
"""Names that are not those of a benchmark."""


def new_name(words: Sequence[str]) -> str | None:
    """The command in the place of ``python -m odc.bench.X``, whose command line ``words`` are; None for another one."""
    module = next((after for word, after in itertools.pairwise(words) if word == "-m"), "")
    name = module.removeprefix("odc.bench.")
    if name in OTHERS:
        return OTHERS[name]
    known = {each for room, names in ROOMS.items() if room != "gpu" for each in names}
    return f"odc bench {written(name)}" if module != name and name in known else None
