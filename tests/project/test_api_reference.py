"""Layer 3: ranks as processes. The reference has each public name once, with an example, which runs on two ranks."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from documents import IMPORTED, Prepared, example, failure, on_rank
from process_ranks import run_ranks, start_ranks

PAGES = Path(__file__).parents[2] / "docs" / "api"
PACKAGES = ("odc", "odc.balance", "odc.trainers", "odc.trainers.verl")
_ENTRY = re.compile(r"^\.\. auto\w+:: ([\w.]+)(?:\(\))?$", re.MULTILINE)
_ENDS = [f"odc.{name}" for name in ("AbortedError", "PeerClosedError", "PeerDiedError", "PeerSilentError")]
"""What these show ends the job, on rank 0."""
_IN_TRAINERS = [
    *(f"odc.trainers.{name}" for name in ("Launched", "Minibatches", "balance", "install", "minibatches")),
    *(f"odc.trainers.verl.{name}" for name in ("BalancedEngine", "Installed", "balance", "install")),
]
"""Run by tests/trainers, where the libraries are."""
_TIMEOUT_S = 240.0


def public() -> list[str]:
    """Every name that a package exports, with the package's."""
    packages = {package: importlib.import_module(package) for package in PACKAGES}
    return [f"{package}.{name}" for package, module in packages.items() for name in module.__all__ if name[:2] != "__"]


def entries() -> Counter[str]:
    return Counter(name for page in PAGES.glob("*.md") for name in _ENTRY.findall(page.read_text()))


def test_each_public_name_has_one_entry() -> None:
    found, names = entries(), public()
    assert len(names) > 50
    assert {name: found[name] for name in names if found[name] != 1} == {}
    assert sorted(set(found) - set(names)) == []


def run_examples(rank: int, world_size: int, names: list[str]) -> list[str]:
    failures: list[str] = []
    for name in names:
        failures += on_rank(lambda prepared, name=name: _run(name, prepared), rank, world_size, **IMPORTED)  # type: ignore[misc]
    return failures


def _run(name: str, prepared: Prepared) -> Iterator[str]:
    test = example(name, prepared)
    if test is None:
        return
    if name in _ENDS and "patch_fsdp" not in str(test.docstring):
        assert prepared["session"] is not None  # patched on both ranks, before one is lost
        dist.barrier()
    yield from filter(None, [failure(test)])


def test_each_public_name_has_an_example_that_runs() -> None:
    names = public()
    assert [name for name in names if example(name, Prepared(0, 2, **IMPORTED)) is None] == []
    on_all = [name for name in names if name not in {*_ENDS, *_IN_TRAINERS}]
    assert run_ranks(2, run_examples, on_all, timeout_s=_TIMEOUT_S) == [[], []]


@pytest.mark.parametrize("name", _ENDS)
def test_an_example_in_which_another_rank_is_lost(name: str) -> None:
    result = start_ranks(2, run_examples, [name]).join(_TIMEOUT_S)[0]
    assert (result.error, result.value) == (None, [])


def test_an_example_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    balance = importlib.import_module("odc.balance")
    monkeypatch.setattr(balance.policy_names, "__doc__", ">>> policy_names()\n[]\n")
    (told,) = _run("odc.balance.policy_names", Prepared(0, 2, **IMPORTED))
    assert "Expected:" in told
    assert "lb-mini" in told
