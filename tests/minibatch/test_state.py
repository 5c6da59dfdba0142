"""Layer 1: no ranks. Where one rank is in its minibatches, by itself: whatever is called in whatever order."""

from __future__ import annotations

import contextlib
import copy

from hypothesis import given, settings
from hypothesis import strategies as st

from odc import MisuseError
from odc.minibatch.state import MinibatchState, Phase

STEPS = ("open", "publish", "keep", "begin", "gather", "push", "check_finish", "finish", "fence", "gradient")


def take(state: MinibatchState, step: str, unit: int) -> None:
    if step == "open":
        state.open(unit)
    elif step in ("publish", "keep"):
        state.open(unit)  # as the protocol does: pushes of a minibatch may come as soon as its shards are out
        state.publish(unit, is_changed=step == "publish")
    elif step == "push":
        was_first = not state.pushed
        assert state.push(unit) == was_first
    elif step in ("gather", "gradient"):
        getattr(state, f"check_{step}")(unit)
    else:
        getattr(state, step)()


def check(state: MinibatchState) -> None:
    """What holds between any two steps."""
    is_final = state.phase is Phase.FINISHED
    assert state.coming == state.minibatch + is_final
    for unit, published in enumerate(state.published):
        assert published in ((state.minibatch, state.coming) if is_final else (state.minibatch,))
        assert state.changed[unit] <= published <= state.opened[unit] <= state.coming
    if is_final:
        assert min(state.published) == state.minibatch, "the last publication enters the next minibatch"
    assert state.phase is Phase.OPEN or not state.pushed
    assert state.is_ready == (state.phase in (Phase.PUBLISHED, Phase.FENCED))


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2)), max_size=60))
def test_every_order_of_steps_is_refused_or_leaves_a_state_that_is_one(
    num_units: int, steps: list[tuple[str, int]]
) -> None:
    state, num_finished = MinibatchState([f"layers.{i}" for i in range(num_units)]), 0
    for step, unit in steps:
        before = copy.deepcopy(vars(state))
        try:
            take(state, step, unit % num_units)
        except MisuseError:
            before["opened"] = state.opened if step in ("publish", "keep") else before["opened"]
            assert vars(state) == before, f"{step} was refused, and has changed something"
            continue
        num_finished += step == "finish"
        assert state.minibatch == num_finished + (state.phase is not Phase.FINISHED)
        check(state)


def test_one_minibatch_and_a_fence() -> None:
    state = MinibatchState(["a", "b"])
    for unit in (1, 0):
        assert state.open(unit) == (unit == 0)
        state.publish(unit, is_changed=True)
    assert (state.phase, state.minibatch) == (Phase.PUBLISHED, 1)
    state.begin()
    assert [state.push(1), state.push(1), state.push(0)] == [True, False, False]
    assert (state.pushes, state.pushed) == ([1, 2], [0, 1])
    state.finish()
    state.check_gradient(0)
    state.open(0)
    with contextlib.suppress(MisuseError):
        state.check_gradient(0)
        raise AssertionError("its sum is the others' again")
    state.publish(0, is_changed=False)
    assert [state.is_published(unit) for unit in (0, 1)] == [True, False]
    state.publish(1, is_changed=True)
    assert (state.phase, state.minibatch, state.changed) == (Phase.PUBLISHED, 2, [1, 2])
    state.fence()
    assert (state.phase, state.is_ready) == (Phase.FENCED, True)
    state.finish()
    assert (state.phase, state.coming) == (Phase.FINISHED, 3)
