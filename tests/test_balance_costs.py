"""Layer 1: no processes. Cost models, and what the balance package may import."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import odc.balance
from odc.balance import LinearCost, QuadraticCost, TransformerCost

TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


def test_linear_and_quadratic_values() -> None:
    np.testing.assert_array_equal(LinearCost(0.5)([2, 4]), [1.0, 2.0])
    costs = QuadraticCost(2.0, 3.0)(np.array([1, 10], dtype=np.int32))
    np.testing.assert_array_equal(costs, [5.0, 230.0])
    assert costs.dtype == np.float64


def test_no_integer_overflow_on_long_samples() -> None:
    assert QuadraticCost(1.0, 0.0)(np.array([70000], dtype=np.int32))[0] == 4.9e9


def forward_flops(s: int) -> float:
    """FLOPs of one forward of the TINY model, product by product: (rows x inner) @ (inner x columns)."""

    def product(rows: int, inner: int, columns: int) -> float:
        return 2.0 * rows * inner * columns

    head_dim = 2
    layer = product(s, 8, 8) + 2 * product(s, 8, 4) + product(s, 8, 8)  # q, k and v, o
    scores = 4 * (product(s, head_dim, s) + product(s, s, head_dim))
    layer += scores / 2  # causal
    layer += 2 * product(s, 8, 16) + product(s, 16, 8)  # gate and up, down
    return 3 * layer + product(s, 8, 32)


def test_transformer_flops_match_a_count_by_hand() -> None:
    cost = TransformerCost.from_config(TINY)
    lengths = np.array([1, 7, 100])
    expected = [3 * forward_flops(s) for s in lengths.tolist()]
    np.testing.assert_allclose(cost(lengths), expected, rtol=1e-12)


def test_transformer_config_forms() -> None:
    cost = TransformerCost.from_config(TINY)
    assert TransformerCost.from_config(SimpleNamespace(**TINY, head_dim=None)) == cost
    assert TransformerCost.from_config({**TINY, "head_dim": 2}) == cost
    wider = TransformerCost.from_config({**TINY, "head_dim": 4})
    assert wider.flops_per_squared_token == 2 * cost.flops_per_squared_token
    without_groups = {name: size for name, size in TINY.items() if name != "num_key_value_heads"}
    full = TransformerCost.from_config({**TINY, "num_key_value_heads": 4})
    assert TransformerCost.from_config(without_groups) == full
    plain_mlp = TransformerCost.from_config(TINY, gated_mlp=False)
    assert cost.flops_per_token - plain_mlp.flops_per_token == 6 * 3 * 8 * 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "no vocab_size"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 is not a multiple of num_key_value_heads=3"),
        ({"hidden_size": 9}, "hidden_size=9 is not a multiple of num_attention_heads=4"),
    ],
)
def test_bad_configs(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerCost.from_config({**TINY, **change})


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_coefficients(value: float) -> None:
    with pytest.raises(ValueError, match="b="):
        LinearCost(value)
    with pytest.raises(ValueError, match="a="):
        QuadraticCost(value, 1.0)


def test_all_zero_coefficients() -> None:
    with pytest.raises(ValueError, match="a and b must not be 0"):
        QuadraticCost(0.0, 0.0)


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_imports_stay_in_the_room() -> None:
    """Numpy only, torch where batches are made, and nothing of the runtime."""
    files = sorted(Path(odc.balance.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    for path in files:
        for name in imports_of(path):
            assert name.split(".")[0] != "odc" or name.startswith("odc.balance"), (path.name, name)
            assert name.split(".")[0] != "torch" or path.name == "collate.py", (path.name, name)


def test_every_exported_name_exists() -> None:
    for name in odc.balance.__all__:
        assert getattr(odc.balance, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        odc.balance.no_such_name  # noqa: B018
