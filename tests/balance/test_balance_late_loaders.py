"""Layer 1: no processes. Late binding where ranks have different loaders, or use them in different ways.

Ranks are coroutines that take turns at random, with a store in memory. Beside the loop that all train in, a rank makes
further loaders, looks at minibatches, evaluates, lists microbatches or leaves loops; each sample of a step must be
computed once.
"""

from __future__ import annotations

import copy
import itertools
import random
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from late_ranks import Clock
from loaders import known_loader

from odc.balance import LinearCost, MinibatchLoader
from odc.balance.data import loader as loader_module
from odc.balance.data.iteration import Trained
from odc.balance.data.watched_store import WatchedStore
from odc.balance.late_binding import estimates, microbatches, work_queues
from odc.balance.late_binding.steal_policy import WorkQueue
from odc.errors import PeerDiedError

Rank = Iterator[str]
"""What a rank yields says whether it goes on whenever it likes, or waits for the others at the end of a step."""
DISTURBANCES = ("none", "alike", "kept", "other", "other order", "listed", "ahead", "skipped", "evaluates", "own")


class Rows:
    def __getitem__(self, index: int) -> int:
        return index


class OwnClocks:
    """In place of the module ``time``: that of each rank's host is an hour ahead of the last one's."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def monotonic(self) -> float:
        return self._job.seconds(self._job.now)


class Job:
    """Ranks of one configuration, and what they have computed."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch) -> None:
        self.rng = random.Random(seed)
        self.world_size = self.rng.randint(2, 4)
        self.clock = Clock()
        self.store = dist.HashStore()
        self.now = 0
        self.trained = [Trained(0, 0, 0.0) for _ in range(self.world_size)]
        self.computed: dict[Any, list[int]] = defaultdict(list)
        """By epoch and minibatch: samples that any rank has computed."""
        self.planned: dict[Any, set[int]] = {}
        self.num_taken = 0
        self.lengths = [self.rng.randint(1, 12) for _ in range(self.rng.choice([24, 40]))]
        self.size = self.rng.randint(1, 4)
        self.num_epochs = self.rng.randint(1, 3)
        self.sets_epoch, self.new_loaders, self.all_leave, self.all_evaluate = (
            self.rng.random() < chance for chance in (0.7, 0.3, 0.3, 0.3)
        )
        self.slow = [self.rng.choice([1.0, 1.0, 4.0]) for _ in range(self.world_size)]
        self.disturbance = [self.rng.choice(DISTURBANCES) for _ in range(self.world_size)]
        patch.setattr(loader_module, "own_store", lambda: self.store)
        patch.setattr(work_queues, "trained", lambda: self.trained[self.now])
        patch.setattr(microbatches, "ranks_go_in_step", lambda: False)
        for module in (estimates, work_queues):
            patch.setattr(module, "time", OwnClocks(self))

    def seconds(self, rank: int) -> float:
        return self.clock.now + 3600.0 * rank

    def make(self, rank: int, seed: int = 0, lengths: list[int] | None = None) -> MinibatchLoader[int, list[int]]:
        return known_loader(
            Rows(), lengths or self.lengths, list, rank, self.world_size, minibatch_size=self.size, max_tokens=14,
            cost=LinearCost(), late_binding=True, seed=seed,
        )  # fmt: skip

    def run(self) -> None:
        """Until all ranks have ended, the order in which they go on drawn anew each time."""
        ranks = [self.rank(rank) for rank in range(self.world_size)]
        going, meeting = set(range(self.world_size)), set[int]()
        while going:
            self.now = self.rng.choice(sorted(going))
            self.clock.now += self.rng.uniform(0.0, 0.3) * self.slow[self.now]
            if (state := next(ranks[self.now], "ended")) != "goes on":
                going.discard(self.now)
                meeting |= {self.now} if state == "meets" else set()
            if not going:
                going, meeting = meeting, set()
                for rank in going:
                    before = self.trained[rank]
                    self.trained[rank] = Trained(before.minibatches + 1, before.backwards, self.seconds(rank))

    def rank(self, rank: int) -> Rank:
        how, kept = self.disturbance[rank], list[Any]()
        if how == "other order":  # of two that all make
            self.make(rank, 1)
        loader = self.make(rank)
        if how != "other order":
            self.make(rank, 1)
        for epoch in range(self.num_epochs):
            if how in ("alike", "kept", "own"):
                looked = loader if how == "own" else self.make(rank)
                at = iter(looked)
                kept.append((at, list(next(at).microbatches)))
                yield "goes on"
            if self.new_loaders and epoch:
                loader = self.make(rank)
            if self.sets_epoch:
                loader.set_epoch(epoch)
            for number, minibatch in enumerate(loader):
                yield from self.step(rank, how, kept, (epoch, number), minibatch)
                yield "meets"
                if self.all_leave and number == 1:
                    break
            self.num_taken += loader.num_taken
            if self.all_evaluate or how == "evaluates":
                for number, minibatch in enumerate(self.make(rank, 2)):
                    at = ("evaluation", epoch, number) if self.all_evaluate else ("alone", rank, epoch, number)
                    if self.all_evaluate:
                        self.plans(at, minibatch)
                    for samples in minibatch.microbatches:
                        self.computed[at] += samples
                        yield "goes on"

    def step(self, rank: int, how: str, kept: list[Any], at: Any, minibatch: Any) -> Rank:
        self.plans(at, minibatch)
        found = iter(minibatch.microbatches)
        if how == "listed" and self.rng.random() < 0.5:
            found = iter(list(found))
        following = next(found, None) if how == "ahead" else None
        while (samples := following if how == "ahead" else next(found, None)) is not None:
            following = next(found, None) if how == "ahead" else None
            yield "goes on"
            if how == "other":
                kept.append(next(iter(self.make(rank, 3, self.lengths[::-1]))))
            if how == "kept" and kept and self.rng.random() < 0.2:  # looked at further, while another loader trains
                list(next((minibatch.microbatches for minibatch in kept[0][0]), ()))
            self.computed[at] += samples
            if how != "skipped" or self.rng.random() < 0.5:
                before = self.trained[rank]
                self.trained[rank] = before._replace(backwards=before.backwards + 1)
            yield "goes on"

    def plans(self, at: Any, minibatch: Any) -> None:
        """The minibatch begins on one of the ranks."""
        assert minibatch.plan is not None
        self.planned.setdefault(at, set()).add(minibatch.num_samples)


class Pair:
    """Two ranks, each in the loop of a loader of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, **differs: Any) -> None:
        self.job = Job(0, patch)
        self.job.world_size, self.job.size = 2, 4
        self.job.trained = self.job.trained[:1] * 2
        self.loaders = [self.job.make(0), self.job.make(1, **differs)]
        self.minibatches = zip(*self.loaders, strict=True)

    def queues(self, rank: int) -> work_queues.WorkQueues:
        found = self.loaders[rank]._queues
        assert found is not None
        return found

    def alike(self) -> Pair:
        """The same ranks, with a second loader each."""
        found = copy.copy(self)
        found.loaders = [self.job.make(rank) for rank in range(2)]
        found.minibatches = zip(*found.loaders, strict=True)
        return found

    def run(self, num_minibatches: int) -> None:
        """Rank 0 first. All compute each microbatch when it is asked for."""
        for _ in range(num_minibatches):
            self.compute()
            self.job.trained = [before._replace(minibatches=before.minibatches + 1) for before in self.job.trained]

    def compute(self) -> None:
        both = next(self.minibatches)
        for self.job.now, minibatch in enumerate(both):
            for _ in minibatch.microbatches:
                self.backward()

    def backward(self) -> None:
        self.job.clock.now += 1.0
        before = self.job.trained[self.job.now]
        self.job.trained[self.job.now] = before._replace(backwards=before.backwards + 1)


def test_nothing_is_opened_before_a_loader_is_seen_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    own = pair.queues(0)
    for minibatch in pair.job.make(0):  # a look
        list(minibatch.microbatches)
    found = iter(next(iter(pair.loaders[0])).microbatches)
    next(found)
    assert not own.binds
    assert not pair.job.store.check([own._name(0)])
    pair.backward()
    next(found)
    assert own.binds
    assert pair.job.store.check([own._name(0)])


@pytest.mark.parametrize("differs", [{}, {"seed": 5}, {"lengths": [3] * 40}])
def test_a_rank_with_another_loader_is_named_and_binds_alone(
    differs: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(monkeypatch, **differs)
    pair.run(4)
    warnings = [record.message for record in caplog.records if "late binding goes on without ranks" in record.message]
    assert len(warnings) == (2 if differs else 0)  # each says so of the other
    assert all("They train with a loader that has other arguments" in warning for warning in warnings)


@pytest.mark.parametrize("is_listed", [False, True])
def test_who_reads_ahead_takes_nothing_and_is_told(
    is_listed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(monkeypatch)
    pair.run(2)
    before, (slow, fast) = pair.loaders[1].num_taken, next(pair.minibatches)
    pair.job.now = 0
    next(iter(slow.microbatches))
    pair.job.now = 1
    for _ in list(fast.microbatches) if is_listed else fast.microbatches:
        pair.backward()
    assert (pair.loaders[1].num_taken == before) == is_listed
    warnings = [record.message for record in caplog.records if "before the last one had a backward" in record.message]
    assert len(warnings) == is_listed


def test_who_always_reads_ahead_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It never takes part, and nobody else could say why."""
    pair = Pair(monkeypatch)
    for minibatch in itertools.islice(pair.loaders[0], 3):
        for _ in list(minibatch.microbatches):
            pair.backward()
    assert not pair.queues(0).binds
    assert [record.message[:40] for record in caplog.records] == ["odc: rank 0 has asked for a microbatch b"]


def test_a_rank_that_had_nothing_to_compute_takes_part_with_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(monkeypatch)
    idle = pair.queues(1)
    pair.job.now = 1
    idle.open(idle.expect("0.0"), [])
    idle.is_through()
    idle.handed_out([])
    assert not idle.binds
    pair.job.trained[1] = Trained(1, 0, 0.0)
    idle.expect("0.1")
    assert idle.binds


def test_two_loaders_alike_that_train_in_one_step_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank could take samples from the queue of one of them for the loop of the other."""
    pair = Pair(monkeypatch)
    pair.compute()
    with pytest.raises(RuntimeError, match="rank 0 has begun a minibatch twice in one step, with two loaders alike"):
        pair.alike().compute()


def test_two_loaders_alike_may_take_turns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Each with steps of its own, as of a GAN's two models. Nobody is said to be alone."""
    first = Pair(monkeypatch)
    second = first.alike()
    for _ in range(4):
        first.run(1)
        second.run(1)
    assert not caplog.records


def test_a_store_is_asked_in_a_thread_that_ends_with_its_loader() -> None:
    before = set(threading.enumerate())
    store = WatchedStore(dist.HashStore, "tests ask")
    for _ in range(2):  # closed, and asked again
        assert store.compare_set("word", "", "mine") == b"mine"
        (thread,) = set(threading.enumerate()) - before
        store.close()
        assert not thread.is_alive()
    with pytest.raises(TypeError, match="cannot pickle"):  # and not a word of the store
        copy.deepcopy(store)
    with pytest.raises(PeerDiedError, match=r"wanted an answer of the store of torch.distributed, by which tests ask"):
        store.ask(lambda there: there.no_such_method(), 1.0)
    with pytest.raises(PeerDiedError):  # lost once, it is asked no more
        store.check(["word"])


def test_hosts_have_no_clock_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's host is an hour ahead. Both met at 100 s; rank 0 began at 103 s, and is seen from there at 107 s."""
    pair = Pair(monkeypatch)
    pair.job.trained = [Trained(1, 0, pair.job.seconds(rank)) for rank in range(2)]
    for pair.job.now, after_s in ((0, 3.0), (1, 4.0)):
        pair.job.clock.now += after_s
        own = pair.queues(pair.job.now)
        own.binds = True
        own.open(own.expect("0.0"), [[0], [1]])
        own.begin(own.mine(1).microbatches, 5.0)
    assert (own.of_others()[0].since, own.now) == (3.0, 7.0)


def outcomes(seeds: range, change: Callable[[pytest.MonkeyPatch], object]) -> Counter[str]:
    """How many configurations ended well, by an error that names the reason, or wrongly; and samples taken."""
    found = Counter[str]()
    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            job = Job(seed, patch)
            try:
                job.run()
            except RuntimeError as error:
                found["named" if "begun a minibatch twice in one step" in str(error) else "failed"] += 1
                continue
            counts = [(numbers, Counter(job.computed[at])) for at, numbers in job.planned.items()]
            is_right = all({max(once.values()) * once.total()} == numbers for numbers, once in counts)
            found["right" if is_right else "wrong"] += 1
            found["taken"] += job.num_taken
            found.update(job.disturbance)
    return found


SEEDS = [range(25), *(pytest.param(range(at, at + 50), marks=pytest.mark.extended) for at in range(0, 300, 50))]


@pytest.mark.parametrize("seeds", SEEDS)
def test_each_sample_counts_once_whatever_loaders_ranks_have(seeds: range) -> None:
    """A configuration for each."""
    found = outcomes(seeds, lambda patch: None)
    assert found["right"] == len(seeds)
    assert found["taken"] > 2 * len(seeds) - 20
    assert set(DISTURBANCES) <= set(found)


def take_part_from_the_start(patch: pytest.MonkeyPatch) -> None:
    begin_pass = work_queues.WorkQueues.begin_pass

    def begin(self: work_queues.WorkQueues) -> None:
        begin_pass(self)
        self.binds = True

    patch.setattr(work_queues.WorkQueues, "begin_pass", begin)


def test_a_loader_that_takes_part_before_it_is_seen_to_train_is_named() -> None:
    found = outcomes(range(6, 14), take_part_from_the_start)
    assert found["named"] > 1
    assert found["named"] + found["right"] == 8


def test_loaders_alike_that_do_not_notice_each_other_compute_samples_twice() -> None:
    def change(patch: pytest.MonkeyPatch) -> None:
        take_part_from_the_start(patch)
        patch.setattr(work_queues.uuid, "uuid4", lambda: uuid.UUID(int=0))
        patch.setattr(WorkQueue, "is_torn", False)

    assert outcomes(range(12, 25), change)["wrong"] > 1
