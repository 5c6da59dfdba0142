"""Layer 1: no processes. Cost models, and what the balance package may import."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import odc.balance
from odc.balance import LinearCost, QuadraticCost, TransformerCost
from odc.balance.costs import LayerGroup

TINY = {
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}
BAD = (-1.0, float("nan"), float("inf"))


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


def test_recomputation_adds_a_third_to_the_layers() -> None:
    lengths = np.array([1, 7, 100])
    plain, recomputed = (TransformerCost.from_config(TINY, recompute=flag) for flag in (False, True))
    head = 3 * 2.0 * 8 * 32 * lengths
    np.testing.assert_allclose(recomputed(lengths) - head, (plain(lengths) - head) * 4 / 3, rtol=1e-12)
    np.testing.assert_array_equal(recomputed.by_group(lengths)[-1], head)


def test_groups_are_kinds_of_layers() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = {**TINY, **experts, "mlp_only_layers": [1], "layer_types": types, "sliding_window": 5}
    cost = TransformerCost.from_config(config)
    assert cost.counts == (2, 1, 1)
    assert [group.window for group in cost.groups] == [5, None, None]
    lengths = np.array([[1, 5], [6, 100]])
    by_group = cost.by_group(lengths)
    assert by_group.shape == (3, 2, 2)
    np.testing.assert_allclose(cost(lengths), 2 * by_group[0] + by_group[1] + by_group[2], rtol=1e-12)
    attention = 2 * 8 * 8 + 2 * 8 * 4
    sparse = 6 * (attention + 8 * 4 + 2 * 3 * 8 * 6) * lengths
    pairs = np.array([[0.5, 12.5], [17.5, 5 * 100 - 12.5]])
    np.testing.assert_allclose(by_group[0], sparse + 12 * 8 * pairs, rtol=1e-12)
    dense = 6 * (attention + 3 * 8 * 16) * lengths
    np.testing.assert_allclose(by_group[1], dense + 12 * 8 * lengths**2 / 2, rtol=1e-12)
    with pytest.raises(ValueError, match="window"):
        cost.flops_per_squared_token  # noqa: B018


def test_a_window_that_no_sample_reaches_costs_nothing_less() -> None:
    full = TransformerCost.from_config(TINY)
    wide, narrow = (TransformerCost.from_config({**TINY, "sliding_window": window}) for window in (100, 99))
    np.testing.assert_array_equal(wide([7, 100]), full([7, 100]))
    assert narrow([100])[0] < full([100])[0]


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


def group(**sizes: Any) -> LayerGroup:
    return LayerGroup(**{"num_layers": 1, "flops_per_token": 1.0, **sizes})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TransformerCost(()), "groups is empty"),
        (lambda: TransformerCost((LayerGroup(1, 0.0),)), "flops_per_token and flops_per_pair must not be 0"),
        (lambda: group(num_layers=0), "num_layers"),
        (lambda: group(flops_per_token=-1.0), "flops_per_token"),
        (lambda: group(flops_per_pair=float("nan")), "flops_per_pair"),
        (lambda: group(window=0), "window"),
        *((partial(LinearCost, bad), "b=") for bad in BAD),
        *((partial(QuadraticCost, bad, 1.0), "a=") for bad in BAD),
        (lambda: QuadraticCost(0.0, 0.0), "a and b must not be 0"),
    ],
)
def test_bad_groups_and_coefficients(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def imports_of(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


WITHOUT_TORCH = ("__init__.py", "sampler.py")  # of the folder that makes batches
# Of the folders that move tensors, run minibatches of them, or tell through torch's store who runs what.
WITH_TORCH = {
    "late_binding": ("estimates.py", "work_queues.py"),
    "rearrange": ("exchange.py",),
    "multimodal": ("carriers.py", "loader.py", "payload.py", "run.py"),
}
LEAVES = ("odc._lazy", "odc._version", "odc.errors")
"""Which import nothing but the standard library: late imports, names, and how input is quoted."""


def test_imports_stay_in_the_room() -> None:
    """Numpy only, torch where batches are made or moved, and nothing of the runtime."""
    files = sorted(Path(odc.balance.__file__).parent.rglob("*.py"))
    assert len(files) > 5
    for path in files:
        for name in imports_of(path):
            assert name.split(".")[0] != "odc" or name.startswith("odc.balance") or name in LEAVES, (path.name, name)
            makes_batches = path.parent.name == "data" and path.name not in WITHOUT_TORCH
            moves_tensors = path.name in WITH_TORCH.get(path.parent.name, ())
            assert name.split(".")[0] != "torch" or makes_batches or moves_tensors, (path.name, name)


def test_what_every_room_may_import_imports_nothing() -> None:
    for leaf in LEAVES:
        path = Path(str(importlib.import_module(leaf).__file__))
        assert imports_of(path) <= {"__future__", "collections.abc", "importlib", "reprlib", "typing"}, leaf


def test_every_exported_name_exists() -> None:
    for name in odc.balance.__all__:
        assert getattr(odc.balance, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        odc.balance.no_such_name  # noqa: B018
