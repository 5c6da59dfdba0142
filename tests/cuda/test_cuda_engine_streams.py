"""Layer 1: which streams of the real CudaEngine wait for which, on host memory (``host_cuda.py``). No processes.

A stream does nothing until a test lets it, and the worst order there is comes first. What this cannot show: that
torch's own streams and events do as their documentation says.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_rig import DEVICE, INDEX, Rig
from host_cuda import Stream

# The order of streams. Each scenario asks for one order, and gets what is wrong if it is not kept.


def scenario_join(rig: Rig) -> bool:
    """What was noted in two streams has been read when the third one overwrites it."""
    shard, outs = rig.put(torch.ones(4)), [rig.put(torch.zeros(4)) for _ in range(2)]
    streams = [rig.stream(), rig.stream()]
    for stream, out in zip(streams, outs, strict=True):
        with rig.cuda.stream(stream):
            rig.engine.copy([out], [shard])
            rig.engine.note_use()
    rig.engine.join()
    rig.engine.zero(shard)
    rig.cuda.run(last=streams)
    return all(bool((rig.cuda.read(out) == 1).all()) for out in outs)


def scenario_join_background(rig: Rig) -> bool:
    total, out = rig.put(torch.zeros(4)), rig.put(torch.zeros(4))
    with rig.engine.background():
        rig.engine.add([total], [rig.put(torch.ones(4))])
    rig.engine.join_background()
    rig.engine.copy([out], [total])
    rig.cuda.run(rig.cuda.current_stream())
    return bool((rig.cuda.read(out) == 1).all())


def scenario_take(rig: Rig) -> bool:
    """Two streams, one after the other, by way of the same memory."""
    staging, ones, outs = rig.put(torch.zeros(4)), rig.put(torch.ones(4)), [rig.put(torch.zeros(4)) for _ in "ab"]
    streams = [rig.stream(), rig.stream()]
    for number, stream in enumerate(streams):
        with rig.cuda.stream(stream), rig.engine.take("staging"):
            rig.engine.zero(staging)
            for _ in range(number + 1):
                rig.engine.add([staging], [ones])
            rig.engine.copy([outs[number]], [staging])
    order = [streams[1], streams[0]]
    while rig.cuda.step(order):
        order.reverse()
    rig.cuda.run()
    return [rig.cuda.read(out)[0].item() for out in outs] == [1, 2]


def scenario_at_home(rig: Rig) -> bool:
    """A sum is read where it became final, after what the caller's stream had before; the caller goes on behind it."""
    engine, total, out = rig.engine, rig.put(torch.zeros(4)), rig.put(torch.zeros(4))
    home, step = rig.stream(), rig.stream()
    result = rig.put(torch.zeros(4))
    with rig.cuda.stream(home):
        engine.join()
        engine.add([total], [rig.put(torch.ones(4))])
    with rig.cuda.stream(step):
        engine.add([out], [rig.put(torch.full((4,), 3.0))])
        with engine.at_home():
            assert rig.cuda.current_stream() is home
            engine.add([out], [total])
        assert rig.cuda.current_stream() is step
        engine.copy([result], [out])
    with rig.cuda.stream(home):
        engine.zero(total)
    rig.cuda.run(step)
    return bool((rig.cuda.read(result) == 4).all())


def scenario_at_home_after_the_caller(rig: Rig) -> bool:
    engine, grads, out = rig.engine, rig.put(torch.zeros(4)), rig.put(torch.zeros(4))
    home, step = rig.stream(), rig.stream()
    with rig.cuda.stream(home):
        engine.join()
    with rig.cuda.stream(step):
        engine.add([grads], [rig.put(torch.ones(4))])
        with engine.at_home():
            engine.copy([out], [grads])
    rig.cuda.run(home)
    return bool((rig.cuda.read(out) == 1).all())


def scenario_hold(rig: Rig) -> bool:
    """Memory that one stream was given and another one uses is let go."""
    engine, out, later = rig.engine, rig.put(torch.zeros(4)), rig.stream()
    with rig.cuda.stream(rig.stream()):
        with engine.take("kept"):
            kept = torch.empty_like(out)
            engine.copy([kept], [rig.put(torch.ones(4))])
    with rig.cuda.stream(later), engine.take("kept"):
        engine.copy([out], [kept])
        engine.hold(kept)
    del kept
    rig.cuda.run(last=[later])
    return bool((rig.cuda.read(out) == 1).all())


SCENARIOS: dict[str, tuple[Callable[[Rig], bool], str]] = {
    "join": (scenario_join, "join"),
    "note_use": (scenario_join, "note_use"),
    "join_background": (scenario_join_background, "join_background"),
    "take": (scenario_take, "take"),
    "at_home": (scenario_at_home, "at_home"),
    "at_home, before it": (scenario_at_home_after_the_caller, "at_home"),
    "hold": (scenario_hold, "hold"),
}


def of_no_effect(engine: Any, operation: str) -> Callable[..., Any]:
    """In its place: nothing is waited for."""

    def at_home() -> AbstractContextManager[object]:
        return torch.cuda.stream(engine._home)

    others: dict[str, Callable[..., Any]] = {"at_home": at_home, "take": lambda memory: nullcontext()}
    return others.get(operation, lambda *arguments: None)


@pytest.mark.parametrize(("scenario", "operation"), SCENARIOS.values(), ids=SCENARIOS)
def test_order(
    rig: Rig, k: SimpleNamespace, scenario: Callable[[Rig], bool], operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is kept; and it is needed: without it a wrong number is seen."""
    assert scenario(rig)
    without = Rig(k, rig.cuda)
    monkeypatch.setattr(without.engine, operation, of_no_effect(without.engine, operation))
    assert not scenario(without)


def test_nothing_waits_for_what_was_not_noted(rig: Rig) -> None:
    """Streams of others are none of a minibatch's business."""
    other = rig.stream()
    rig.cuda.submit(other, lambda: None, lambda: False)
    rig.engine.join()
    with rig.engine.on_side_stream():
        rig.engine.zero(rig.put(torch.ones(3)))
    total = rig.put(torch.ones(4))
    rig.engine.zero(total)
    while rig.cuda.step(rig.cuda.streams):
        pass
    assert (rig.cuda.read(total) == 0).all()
    assert len(other.steps) == 1


def test_the_streams_of_the_engine_are_current_inside_only(rig: Rig) -> None:
    """And a thread that is new to CUDA has this engine's device inside."""
    cuda, engine = rig.cuda, rig.engine
    main, seen = cuda.current_stream(DEVICE), list[tuple[Stream, int]]()
    cuda.set_device(0)
    for inside in (engine.background, engine.on_side_stream):
        with inside():
            seen.append((cuda.current_stream(), cuda.current_device()))
            engine.zero(rig.put(torch.ones(3)))
        assert cuda.current_stream(DEVICE) is main
    assert [device for _, device in seen] == [INDEX, INDEX]
    assert len({stream for stream, _ in seen} | {main}) == 3
    assert [len(stream.steps) > 0 for stream, _ in seen] == [True, True]
    assert engine.stream_key() == main.cuda_stream
    engine.close()
    assert set(rig.given_back) == {stream for stream, _ in seen}


@pytest.mark.parametrize("where", ["current", "background", "aside", "used", "home"])
def test_synchronize(rig: Rig, where: str) -> None:
    """It waits for every stream that the engine knows of, and not for longer than it was told to."""
    engine, cuda = rig.engine, rig.cuda
    stream = rig.stream()
    with rig.cuda.stream(stream):
        {"used": engine.note_use, "home": engine.join}.get(where, lambda: None)()
    places = {"background": engine.background, "aside": engine.on_side_stream, "current": nullcontext}
    let_go: list[int] = []
    with places[where]() if where in places else rig.cuda.stream(stream):
        cuda.submit(cuda.current_stream(), lambda: None, lambda: bool(let_go))
    cuda.on_query = lambda event: cuda.step(cuda.streams)
    assert not engine.synchronize(0.02)
    let_go.append(1)
    assert engine.synchronize(20)
