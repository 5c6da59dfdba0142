"""Layer 1: scripts that set torch's default device. What the package makes for itself is where it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("odc", "balance", "cli", "fsdp_patch", "kernels", "launch", "trainers")
FACTORIES = {
    *("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "scalar_tensor"),
    *("tensor", "zeros"),
}


def without_device(source: str) -> list[int]:
    """Lines that make a tensor wherever the script's default device is."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FACTORIES
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_each_tensor_is_made_on_a_device_that_is_told(room: str) -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}"
        for path in (ROOT / room).rglob("*.py")  # rglob follows no links
        for line in without_device(path.read_text())
    }
    assert not found, f"the script may have set a default device: tell {sorted(found)} theirs"


def test_what_tells_none_is_found() -> None:
    assert without_device("torch.zeros(2)\ntorch.zeros(2, device=there)\ntorch.zeros(2, **options)\n") == [1]
