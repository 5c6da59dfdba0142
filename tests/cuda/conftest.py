"""What several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from engine_rig import Rig
from host_cuda import HostCuda, interpreted_engine


@pytest.fixture(scope="module")
def k() -> Iterator[SimpleNamespace]:
    with interpreted_engine() as modules:
        yield modules


@pytest.fixture
def rig(k: SimpleNamespace) -> Iterator[Rig]:
    cuda = HostCuda()
    with cuda.installed(k):
        yield Rig(k, cuda)
