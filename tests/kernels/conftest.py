"""What several files of this folder use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from kernel_cases import interpreted

if TYPE_CHECKING:
    from kernel_recorder import Launches


@pytest.fixture(scope="module")
def k() -> Iterator[SimpleNamespace]:
    with interpreted() as modules:
        yield modules


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    from kernel_recorder import record_launches  # only here: it imports Triton

    return record_launches(monkeypatch)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "libnvshmem_device.bc"
    path.write_bytes(b"BC")
    return path
