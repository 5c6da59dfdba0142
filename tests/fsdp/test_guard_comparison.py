"""Layer 1: no processes. Comparisons whose answer comes late, as on a GPU: here the test decides when it comes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from odc import MisuseError
from odc.fsdp_patch.guard import (
    SAMPLE_BYTES,
    SAMPLE_PLACES,
    Comparison,
    DeviceComparison,
    Guard,
    HostComparison,
    Verdict,
    comparison_for,
    have_equal_bits,
    sample_of,
)
from odc.fsdp_patch.unit import Watched

ONE, TWO = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])


class Later:
    """Answers that are held back until the test lets them go."""

    def __init__(self) -> None:
        self.is_here = False
        self.asked = 0

    def __call__(self, flag: torch.Tensor) -> Verdict:
        self.asked += 1
        return lambda: bool(flag) if self.is_here else None


def test_a_host_knows_at_once() -> None:
    comparison: Comparison = HostComparison()
    assert comparison.compare([(ONE, ONE)], "u") is None
    assert comparison.compare([(ONE, ONE), (ONE, TWO)], "u") == "u"
    assert comparison.found() is None


def test_a_device_tells_when_it_gets_there() -> None:
    later = Later()
    comparison = DeviceComparison(later)
    assert comparison.compare([(ONE, ONE)], "first") is None
    assert comparison.compare([(ONE, ONE), (ONE, TWO)], "second") is None
    assert comparison.found() is None
    later.is_here = True
    assert comparison.found() == "second"
    assert comparison.compare([(ONE, ONE)], "third") == "second"  # a difference is not forgotten


def test_a_device_is_asked_once_for_a_unit_and_not_for_nothing() -> None:
    later = Later()
    comparison = DeviceComparison(later)
    empty = torch.empty(0, dtype=torch.int64)
    comparison.compare([(empty, empty)], "empty")
    assert later.asked == 0
    comparison.compare([(ONE, ONE)] * 5, "unit")
    assert later.asked == 1
    later.is_here = True
    assert comparison.found() is None


def test_the_device_decides() -> None:
    assert isinstance(comparison_for(torch.device("cpu")), HostComparison)
    assert isinstance(comparison_for(torch.device("cuda")), DeviceComparison)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8])
@pytest.mark.parametrize("numel", [0, 1, 3, 63, 64, 65, 1000, 100_003])
def test_a_sample_sees_the_first_and_the_last_element(numel: int, dtype: torch.dtype) -> None:
    tensor = torch.zeros(numel, dtype=dtype)
    sample = sample_of(tensor)
    assert sum(map(len, sample)) <= SAMPLE_PLACES * SAMPLE_BYTES
    assert not any(b"".join(sample))
    for place in (0, -1) if numel else ():
        tensor[place] = 1
        assert any(b"".join(sample))
        tensor[place] = 0


def test_bits_are_compared_and_not_numbers() -> None:
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.zeros(2)
    for columns in (1, 2):  # contiguous memory is compared by another function
        left, right = nan.repeat(columns, 1).T, nan.repeat(columns, 1).T
        assert have_equal_bits(left, right)
        assert not have_equal_bits(zero.repeat(columns, 1).T, -zero.repeat(columns, 1).T)


class ThreeParameters:
    """A unit of them, and the runtime that has published it."""

    name, device = "u", torch.device("cpu")

    def __init__(self) -> None:
        self.parameters = [torch.full((5,), float(i)) for i in range(3)]
        self.published = torch.cat(self.parameters)

    def trainable_parameters(self) -> list[torch.Tensor]:
        return self.parameters

    def watched(self) -> list[Watched]:
        return [Watched((parameter,), parameter, slice(None)) for parameter in self.parameters]

    def own_part(self, published: torch.Tensor) -> torch.Tensor:
        return published

    def beside(self, published: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return zip(published.split(5), self.parameters, strict=True)

    def beside_by_name(self, published: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        return zip("abc", self.beside(published), strict=True)

    def published_shard(self, unit: int) -> torch.Tensor:
        return self.published

    def refusal(self, text: str) -> MisuseError:
        return MisuseError(text)


@pytest.mark.parametrize("changed", range(3))
@pytest.mark.parametrize("is_counted", [True, False])
def test_before_a_push_every_parameter_of_the_unit_is_looked_at(changed: int, is_counted: bool) -> None:
    unit: Any = ThreeParameters()
    guard = Guard([unit], unit)
    guard.record(0)
    guard.check_push(0)
    parameter = unit.parameters[changed]
    (parameter if is_counted else parameter.data).add_(1.0)
    with pytest.raises(MisuseError, match=f"parameter '{'abc'[changed]}' was changed after it was published"):
        guard.check_push(0)
