"""Layer 1: no processes. How ``odc run`` times microbatches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from launch_fakes import FakeSession
from torch import nn

from odc.launch import report
from odc.launch.report import MicrobatchMeter


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def model() -> nn.Module:
    return nn.Identity()


@pytest.fixture
def metered(session: FakeSession, model: nn.Module) -> Iterator[MicrobatchMeter]:
    meter = MicrobatchMeter(model, session, session.clock)
    yield meter
    meter.close()


def test_microbatches_are_timed_without_communication(
    session: FakeSession, model: nn.Module, metered: MicrobatchMeter
) -> None:
    for seconds in (1.0, 2.0):
        model(0)
        session.compute(seconds, waiting_s=3.0, pushes=2)
    session.finish()
    model(0)
    session.compute(4.0, pushes=2)
    session.finish()
    session.finish()  # a minibatch without microbatches on this rank
    assert metered.minibatches == [[1.0, 2.0], [4.0], []]


def test_an_evaluation_is_no_microbatch(session: FakeSession, model: nn.Module, metered: MicrobatchMeter) -> None:
    with torch.no_grad():
        model(0)
        session.compute(7.0)
    model(0)
    session.compute(1.0, pushes=1)
    with torch.no_grad():
        model(0)
        session.compute(7.0)
    session.finish()
    assert metered.minibatches == [[1.0]]


def test_forwards_before_a_push_are_one_microbatch(
    session: FakeSession, model: nn.Module, metered: MicrobatchMeter
) -> None:
    model(0)
    session.compute(1.0)
    model(0)
    session.compute(2.0, pushes=1)
    model(0)
    session.compute(9.0)  # never pushed
    session.finish()
    model(0)
    session.compute(4.0, pushes=1)
    session.finish()
    assert metered.minibatches == [[3.0], [4.0]]


def test_only_the_latest_microbatches_are_kept(
    session: FakeSession, model: nn.Module, metered: MicrobatchMeter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_MICROBATCHES", 3)
    for seconds in range(1, 6):
        for _ in range(2):
            model(0)
            session.compute(float(seconds), pushes=1)
        session.finish()
    assert metered.minibatches == [[5.0, 5.0]]


def test_a_closed_meter_leaves_nothing(session: FakeSession, model: nn.Module) -> None:
    meter = MicrobatchMeter(model, session, session.clock)
    assert model._forward_pre_hooks
    meter.close()
    meter.close()
    assert not model._forward_pre_hooks
    assert session.on_finish is None
