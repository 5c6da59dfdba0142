"""On-demand communication for the time of a training, unless ``odc run`` provides it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from odc.fsdp_patch.automatic import AutomaticPatching, is_patching
from odc.fsdp_patch.patching import patch_fsdp

logger = logging.getLogger("odc")


@contextmanager
def patched_fsdp(options: Mapping[str, Any]) -> Iterator[None]:
    """Patch each FSDP model at its first forward in the block; plain FSDP again behind it.

    An error in the block is told to the other ranks. Under ``odc run`` all of this is done already.
    """
    if is_patching():
        yield
        return
    patching = AutomaticPatching(functools.partial(patch_fsdp, **options), logger.info)
    try:
        yield
    except BaseException as error:
        patching.abort(error)
        raise
    finally:
        patching.close()
