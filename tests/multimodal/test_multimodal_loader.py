"""Layer 3: ranks as processes. Minibatches of several modalities out of the loaders: all samples, resumed, refused."""

from __future__ import annotations

import threading
import time
from collections import Counter
from multiprocessing import popen_fork
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loaders import known_loader, stream_loader
from process_ranks import run_ranks, start_ranks
from toy_modalities import COSTS, Toy, encoders, make_sample, orchestrator, split

from odc import AbortedError
from odc.balance.multimodal import MultimodalLoader, MultimodalMinibatch, Orchestrator, run_minibatch

NUM_SAMPLES = 40


class Samples:
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return make_sample(index)


def length_of(sample: dict[str, Any]) -> int:
    return len(sample["ids"])


def loader_of(kind: str, rank: int, world_size: int) -> Any:
    if kind == "minibatch":
        lengths = [length_of(make_sample(i)) for i in range(NUM_SAMPLES)]
        return known_loader(
            Samples(), lengths, list, rank, world_size, minibatch_size=4, cost=COSTS["language"], max_tokens=200,
            comm="odc", drop_last=False,
        )  # fmt: skip
    return stream_loader(
        Samples(), list, rank, world_size, max_tokens=200, length=length_of, grouping="pack", align="minibatch",
        minibatch_size=4, pool_size=16, cost=COSTS["language"], comm="odc",
    )  # fmt: skip


def multimodal(kind: str, rank: int, world_size: int, **options: Any) -> MultimodalLoader[dict[str, Any]]:
    return MultimodalLoader(loader_of(kind, rank, world_size), split, orchestrator(world_size, **options), rank)


def numbers_of(minibatch: MultimodalMinibatch) -> list[int]:
    return [int(part.text["number"]) for part in minibatch.parts]


def go_on(rank: int, world_size: int, kind: str) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """The samples of each minibatch of an epoch; those after a resumption in the middle; and the losses."""
    whole = multimodal(kind, rank, world_size)
    seen, states, losses = [], [], []
    for minibatch in whole:
        seen.append(numbers_of(minibatch))
        states.append(whole.state_dict())
        model = Toy()
        losses.append(float(sum(run_minibatch(minibatch, encoders(model), model.loss), torch.zeros(()))))
        language = minibatch.schedule.language
        assert minibatch.schedule.samples.is_at_rest  # the loader has balanced the language model already
        assert language.num_microbatches[rank] == len(language.microbatches[rank])
    assert len(whole.planning_s) == len(seen)
    whole.close()
    again = multimodal(kind, rank, world_size)
    again.load_state_dict(states[1])
    resumed = [numbers_of(minibatch) for minibatch in again]
    again.close()
    return seen, resumed, losses


@pytest.mark.parametrize("kind", ["minibatch", "stream"])
def test_every_sample_comes_once_and_states_resume(kind: str) -> None:
    results = run_ranks(2, go_on, kind)
    counts = Counter(number for seen, _, _ in results for numbers in seen for number in numbers)
    assert counts == Counter(range(NUM_SAMPLES))
    for seen, resumed, losses in results:
        assert resumed == seen[2:]  # what was drawn ahead when the state was taken comes again
        assert len(seen) > 3
        assert sum(losses) > 0


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_workers_serve_several_epochs(persistent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forks of this thread, not of the one that prepares minibatches: with that they would end, and in a fork
    of it what this thread has is torn down."""
    forking: list[threading.Thread] = []
    launch = popen_fork.Popen._launch

    def recorded(self: popen_fork.Popen, process: Any) -> None:
        forking.append(threading.current_thread())
        launch(self, process)

    monkeypatch.setattr(popen_fork.Popen, "_launch", recorded)
    lengths = [length_of(make_sample(i)) for i in range(NUM_SAMPLES)]
    loader = known_loader(
        Samples(), lengths, list, 0, 1, minibatch_size=8, cost=COSTS["language"], max_tokens=200, comm="odc",
        num_workers=1, persistent_workers=persistent, worker_timeout_s=20,
    )  # fmt: skip
    several = MultimodalLoader(loader, split, orchestrator(1), 0)
    for epoch in range(3):
        several.set_epoch(epoch)
        assert sorted(n for minibatch in several for n in numbers_of(minibatch)) == list(range(NUM_SAMPLES))
    next(iter(several))  # left in the middle
    several.close()
    assert forking == [threading.current_thread()] * (1 if persistent else 4)


def fail(rank: int, world_size: int, what: str) -> tuple[str, str]:
    options: dict[str, Any] = {}
    if what == "orchestrators":
        options["policy"] = "lb-mini" if rank == 1 else "local"
    loader = multimodal("minibatch", rank, world_size, **options)
    if rank == 1:
        original = loader._split

        def broken(sample: dict[str, Any]) -> Any:
            parts = original(sample)
            lengths = dict(parts.lengths.items)
            if what == "no length" and lengths:
                lengths[next(iter(lengths))] = []
            if what == "modality":
                lengths["smell"] = []
                parts.items["smell"] = []  # type: ignore[index]
            if what == "kind":
                parts.text["wave"] = torch.zeros(1, dtype=torch.complex64)  # type: ignore[index]
            if what == "name":
                parts.text["two\nlines"] = torch.zeros(1)  # type: ignore[index]
            return type(parts)(parts.text, parts.items, type(parts.lengths)(parts.lengths.length, lengths))

        loader._split = broken
        if what == "plans":
            plan = Orchestrator.plan

            def other(self: Orchestrator, lengths: Any) -> Any:
                found = plan(self, lengths)
                vision = found.encoders["vision"]
                swapped = type(vision)(
                    vision.microbatches[::-1], vision.lengths, vision.costs, vision.max_tokens, vision.policy
                )
                found.encoders["vision"] = swapped  # type: ignore[index]
                return found

            Orchestrator.plan = other  # type: ignore[method-assign]
    done = 0
    try:
        for _ in loader:
            done += 1
            if what == "leaves" and rank == 1:
                break
    except Exception as error:
        return type(error).__name__, f"{error} {getattr(error, '__notes__', '')}"
    if what == "leaves":
        dist.barrier()
    return "", f"{done} minibatches"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no length", "items and 0 lengths of items"),
        ("modality", "has items of 'smell', and the orchestrator has no such encoder"),
        ("kind", "column 'wave' has dtype torch.complex64: expected one of torch.float32"),
        ("name", "expected a name of one line"),
        ("plans", "have planned a minibatch differently: phase 'vision': vision item"),
        ("orchestrators", "differ in policy"),
    ],
)
def test_what_cannot_go_on_is_refused_on_all_ranks(what: str, words: str) -> None:
    results = run_ranks(2, fail, what)
    assert all(kind in ("ValueError", "AbortedError") for kind, _ in results), results
    assert all(words in text for _, text in results), results


def test_a_rank_that_leaves_its_loop_is_named() -> None:
    results = start_ranks(2, fail, "leaves").join(60, expendable=[1])
    assert "rank 1 has left its loop after 1 minibatches" in (results[0].value or [""])[1], results


LATE = "a loader with late_binding=True: the samples of all ranks are shared out anew"


@pytest.mark.parametrize(
    ("late_binding", "change", "error", "words"),
    [
        (False, {"rank": 2}, ValueError, "rank=2: expected less than world_size=2"),
        (True, {}, ValueError, LATE),
        (False, {"split": 3}, TypeError, "split=3: expected a function"),
        (False, {"prefetch": 0}, ValueError, "prefetch=0"),
    ],
)
def test_arguments_are_checked(late_binding: bool, change: dict[str, Any], error: type[Exception], words: str) -> None:
    loader = loader_of("minibatch", 0, 2)
    loader.late_binding = late_binding
    with pytest.raises(error, match=words):
        MultimodalLoader(loader, **{"split": split, "orchestrator": orchestrator(2), "rank": 0, **change})


def leave_and_iterate_again(rank: int, world_size: int, how: str) -> list[list[list[int]]]:
    """All ranks take two minibatches of each epoch. What rank 0 prepares takes longer than its peers' patience."""
    loader = multimodal("minibatch", rank, world_size)
    original, begun = loader._split, set[int]()

    def slow(sample: dict[str, Any]) -> Any:
        epoch = loader.loader.state_dict()["epoch"]
        if rank == 0 and len(epochs[-1]) == 2 and epoch not in begun:
            begun.add(epoch)
            time.sleep(0.8)
        if how == "error" and rank == 1 and epoch == 0:
            raise OSError("a file is missing")
        return original(sample)

    loader._split = slow
    epochs: list[list[list[int]]] = []
    kept = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([])
        iterator = iter(loader)
        if how == "kept":
            kept.append(iterator)
        try:
            for _ in range(2):
                epochs[-1].append(numbers_of(next(iterator)))
        except (OSError, AbortedError):
            epochs[-1] = []
        dist.barrier()
        time.sleep(0.05)  # the thread goes on
        if how == "closed":
            iterator.close()  # type: ignore[attr-defined]
        del iterator
    loader.close()
    assert [t.name for t in threading.enumerate()].count("odc-multimodal") == 0
    return epochs


@pytest.mark.parametrize("how", ["closed", "kept", "error"])
def test_all_ranks_may_leave_and_iterate_again(how: str) -> None:
    results = run_ranks(2, leave_and_iterate_again, how)
    for epochs in results:
        assert [len(seen) for seen in epochs] == [0 if how == "error" else 2, 2]
