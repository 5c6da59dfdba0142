"""What the tests of ``odc bench gpu`` share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def server_of_all_tests() -> None:
    """There is one per process. One that a check started would lack what ranks of other tests need."""
    from process_ranks import _start_server  # only here: it imports torch

    _start_server()


@pytest.fixture
def ranks_find_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``gpu_settings.py``."""
    rigs = Path(__file__).parents[1] / "rigs"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(rigs), os.environ.get("PYTHONPATH", "")]))
