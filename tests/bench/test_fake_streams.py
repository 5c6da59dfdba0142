"""Layer 1. Streams of the fake that fail: nothing goes on as if they had not, and whoever calls next is told why."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from odc.bench.fake import streams
from odc.bench.fake.cuda import FakeCuda, FakeEngine, end_of_fake
from odc.bench.fake.streams import FakeDeviceError


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine(0.0, seed=1)
    yield made
    made.close()


def never() -> bool:
    return threading.Event().wait(0.01)


def fail_after_waiting(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WAIT_LIMIT_S", 0.1)
    with engine.on("reader"):
        engine.await_condition(never, "what never comes")
    with pytest.raises(FakeDeviceError, match="has failed"):
        engine.synchronize(60)


def test_a_wait_of_a_stream_that_is_too_long_is_told_by_every_later_call(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_after_waiting(engine, monkeypatch)
    said = "stream of the fake has failed: the fake's stream 'reader' waits for what never comes: not within 0.1 s"
    with pytest.raises(FakeDeviceError, match=said):
        engine.synchronize(60)
    with pytest.raises(FakeDeviceError, match=said):
        engine.run(bool)
    assert len(engine.errors) == 1


def test_behind_it_no_stream_does_anything(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WAIT_LIMIT_S", 0.1)
    done: list[str] = []
    with engine.on("reader"):
        engine.await_condition(never, "what never comes")
        engine.run(lambda: done.append("what stands behind it"))
    with engine.on("other"):
        engine.wait_for("reader")  # which ends, since the stream that it waits for has
        engine.run(lambda: done.append("what is ordered after it"))
    engine.close()
    assert done == []


def test_an_error_of_the_work_itself_is_told_likewise(engine: FakeEngine) -> None:
    engine.run(lambda: [].pop())
    with pytest.raises(FakeDeviceError, match="pop from empty list"):
        engine._stream("main").event().wait(60)


def test_words_that_are_not_set_in_time_are_named(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(engine)
    address = cuda.malloc(64)
    cuda.wait_values([(address, 0)])
    assert engine.synchronize(60)
    monkeypatch.setattr(streams, "WAIT_LIMIT_S", 0.1)
    cuda.wait_values([(address, 0), (address + 4, 7)])
    with pytest.raises(FakeDeviceError, match=f"'main' waits for 0 in the word at .* and 7 in .*{address + 4:#x}"):
        engine.synchronize(60)
    cuda.end_of_process()


def test_a_stream_that_is_late_is_no_failure(engine: FakeEngine) -> None:
    held = threading.Event()
    engine.run(held.wait)
    assert not engine._stream("main").event().wait(0.1)
    assert not engine.synchronize(0.1)
    held.set()
    assert engine.synchronize(60)
    assert not engine.errors


def test_an_error_behind_the_last_call_is_logged(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streams, "WAIT_LIMIT_S", 0.1)
    engine.await_condition(never, "what never comes")
    end_of_fake(SimpleNamespace(fake=FakeCuda(engine)))
    assert "a stream of the fake has failed: the fake's stream 'main' waits for what never comes" in caplog.text
