"""Layer 1: no processes. Comparisons whose answer comes late, as on a GPU: here the test decides when it comes."""

from __future__ import annotations

import torch

from odc.fsdp_patch.guard import Comparison, DeviceComparison, HostComparison, Verdict, comparison_for

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
