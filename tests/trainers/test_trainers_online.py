"""Layer 1: one rank. Trainers and loops on samples whose lengths are known only once they are read."""

from __future__ import annotations

import gc
import itertools
import json
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from accelerate.utils import DataLoaderConfiguration
from kernel_cases import some_of
from tiny_trainers import Recorder, hf_trainer, losses, losses_of, model, options, pad, samples, samples_in, tokenizer
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from odc.balance.data.exchange import Alone
from odc.balance.grouping.alignment import Unaligned
from odc.errors import ConfigError, UnsupportedError
from odc.trainers import BalanceOptions, balance, minibatches
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Bundle, StepEnd, check_step
from odc.trainers.streamed import StreamedBatches, load_stream, save_stream, streamed_loader

KNOWN = [sample["input_ids"] for sample in samples(37)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples(37))


def online(trainer: Trainer, max_tokens: int = 64, **options: Any) -> Trainer:
    balance(trainer, online=True, max_tokens=max_tokens, **options)
    return trainer


def trained(folder: Path, *, resumed: str | None = None, max_tokens: int = 64, **changed: Any) -> tuple[Any, Any]:
    """An online trainer that has trained, and its steps."""
    made = model()
    recorder = Recorder(made)
    trainer = online(hf_trainer(folder, built=made, extra={"callbacks": [recorder]}, **changed), max_tokens=max_tokens)
    trainer.train(resume_from_checkpoint=resumed)
    return trainer, [sorted(map(number_of, step)) for step in recorder.steps]


def number_of(tokens: list[int]) -> int:
    return KNOWN.index(tokens)


def numbers_in(rows: Iterable[Any]) -> list[int]:
    return [number_of(tokens) for row in rows for tokens in samples_in(row)]


def tokens_of(steps: list[list[int]]) -> list[list[list[int]]]:
    return [[KNOWN[i] for i in step] for step in steps]


def test_an_epoch_has_every_sample_once_and_as_many_steps_as_before(tmp_path: Path) -> None:
    trainer, steps = trained(tmp_path / "ours")
    assert len(steps) == trainer.state.global_step == 10  # ceil(37 / 8) per epoch
    for epoch in (steps[:5], steps[5:]):
        assert sorted(i for step in epoch for i in step) == list(range(37))
    assert steps[:5] != steps[5:]
    assert losses(trainer) == pytest.approx(losses_of(tmp_path / "reference", tokens_of(steps), 10), rel=1e-5)
    assert trainer.state.epoch == 2.0


@pytest.mark.parametrize("kind", ["indexed", pytest.param("iterable", marks=pytest.mark.extended), "datasets"])
def test_training_resumes_where_it_was(tmp_path: Path, kind: str, recwarn: pytest.WarningsRecorder) -> None:
    """With an evaluation in between, which gets batches as they are."""
    dataset = {"indexed": None, "iterable": Stream(), "datasets": as_stream(3)}[kind]
    more: dict[str, Any] = {} if kind == "indexed" else {"max_steps": 8}
    whole, steps = trained(
        tmp_path, dataset=dataset, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=2, **more
    )
    assert len(whole.state.log_history) > len(steps)
    for number in (3, 6) if kind == "indexed" else (3,):
        checkpoint = tmp_path / f"checkpoint-{number}"
        again, rest = trained(tmp_path / "again", resumed=str(checkpoint), dataset=dataset, **more)
        assert rest == steps[number:]
        assert losses(again)[number:] == pytest.approx(losses(whole)[number:], rel=1e-6)
    if kind == "indexed":
        (checkpoint / "odc_stream_0.json").unlink()
        assert trained(tmp_path / "again", resumed=str(checkpoint))[1] == steps[6:]


def as_stream(num_shards: int) -> Any:
    return datasets.Dataset.from_list(samples(37)).to_iterable_dataset(num_shards=num_shards)


def test_a_checkpoint_without_a_stream_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, steps = trained(tmp_path, save_strategy="steps", save_steps=7)
    checkpoint = tmp_path / "checkpoint-7"
    (checkpoint / "odc_stream_0.json").unlink()
    assert trained(tmp_path / "again", resumed=str(checkpoint))[1] == steps[7:]
    assert "checkpoint-7 has no odc_stream_*.json of ranks [0]" in caplog.text
    assert "samples are read again from the beginning of the epoch" in caplog.text


def test_a_checkpoint_of_other_ranks_or_in_pieces_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="steps", save_steps=3, num_train_epochs=1)
    path = tmp_path / "checkpoint-3" / "odc_stream_0.json"
    state = json.loads(path.read_text())
    state["stream"]["world_size"] = 4
    path.write_text(json.dumps(state))
    with pytest.raises(ConfigError, match=r"checkpoint-3 is of 4 ranks, this job has 1"):
        trained(tmp_path / "again", resumed=str(path.parent))
    for text in ("{", '{"step": 3}', "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"odc_stream_0.json does not say where a stream was"):
            trained(tmp_path / "again", resumed=str(path.parent))


class EndsEpoch(TrainerCallback):
    """After the third step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_epoch_stop = state.global_step == 3


def test_an_epoch_that_was_stopped_early_is_gone_through_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = hf_trainer(tmp_path, save_strategy="steps", save_steps=1, extra={"callbacks": [EndsEpoch()]})
    online(trainer).train()
    for number in (2, 4):
        caplog.clear()
        _, steps = trained(tmp_path / "again", resumed=str(tmp_path / f"checkpoint-{number}"))
        assert len(steps) == 10 - number
        assert ("was left in another epoch than its number of steps tells" in caplog.text) == (number > 3)


@pytest.mark.parametrize("strategy", ["group_by_length", pytest.param("random", marks=pytest.mark.extended)])
def test_orders_of_random_states_are_those_of_their_epoch(tmp_path: Path, strategy: str) -> None:
    more: dict[str, Any] = {
        "train_sampling_strategy": strategy,
        "accelerator_config": {"use_seedable_sampler": False},
    }
    _, steps = trained(tmp_path, save_strategy="steps", save_steps=7, **more)
    torch.rand(7)
    assert trained(tmp_path / "again", resumed=str(tmp_path / "checkpoint-7"), **more)[1] == steps[7:]


class Looks(TrainerCallback):
    """At the loader, while it is trained from."""

    trainer: Any = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert len(self.trainer.get_train_dataloader()) == 20


def test_a_callback_may_look_at_the_loader(tmp_path: Path) -> None:
    looks = Looks()
    trainer = looks.trainer = online(hf_trainer(tmp_path, extra={"callbacks": [looks]}, num_train_epochs=1))
    trainer.train()
    assert len(losses(trainer)) == 5


def test_a_balanced_trainer_does_not_hold_itself(tmp_path: Path) -> None:
    trainer = online(hf_trainer(tmp_path))
    alive = weakref.ref(trainer.train)
    gc.disable()
    try:
        del trainer
        assert alive() is None
    finally:
        gc.enable()


def test_a_checkpoint_of_another_stream_is_refused_by_name(tmp_path: Path) -> None:
    trained(tmp_path, save_strategy="steps", save_steps=3, num_train_epochs=1)
    with pytest.raises(ValueError, match="the state has max_tokens=64, this loader max_tokens=80"):
        trained(tmp_path / "again", resumed=str(tmp_path / "checkpoint-3"), max_tokens=80)
    _, steps = trained(
        tmp_path / "again",
        resumed=str(tmp_path / "checkpoint-3"),
        max_tokens=80,
        ignore_data_skip=True,
        num_train_epochs=2,
    )
    assert len(steps) == 7  # of ten; data begins anew


def test_iterables_go_on_until_the_last_step(tmp_path: Path) -> None:
    trainer, steps = trained(tmp_path, dataset=Stream(), max_steps=20)
    assert len(steps) == 20
    counts = Counter(i for step in steps for i in step)
    assert set(counts) == set(range(37))
    assert 6 <= sum(counts.values()) / 20 <= 10
    assert losses(trainer) == pytest.approx(losses_of(tmp_path / "reference", tokens_of(steps), 20), rel=1e-5)


def test_workers_change_nothing(tmp_path: Path) -> None:
    whole, steps = trained(tmp_path)
    ours, same = trained(tmp_path, dataloader_num_workers=2, dataloader_persistent_workers=True)
    assert same == steps
    assert losses(ours) == losses(whole)


def test_the_order_is_that_of_the_trainers_sampler(tmp_path: Path) -> None:
    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    _, steps = trained(tmp_path, cls=InOrder, num_train_epochs=1)
    _, shuffled = trained(tmp_path, num_train_epochs=1)
    assert sum(step[0] < 8 * i + 8 for i, step in enumerate(steps)) == 5
    assert steps != shuffled


def test_trl_on_a_streamed_dataset(tmp_path: Path) -> None:
    texts = [" ".join(map(str, sample["input_ids"])) for sample in samples(37)]
    arguments = options(tmp_path, bf16=False, max_length=None, activation_checkpointing=False, max_steps=4)
    trainer = SFTTrainer(
        model=model(),
        args=SFTConfig(**arguments),
        train_dataset=datasets.Dataset.from_dict({"text": texts}).to_iterable_dataset(),
        processing_class=tokenizer(),
    )
    online(trainer).train()
    assert len(losses(trainer)) == 4
    assert losses(trainer)[-1] < losses(trainer)[0]
    assert all("mean_token_accuracy" in entry for entry in trainer.state.log_history if "loss" in entry)


# Loops of one's own


def seeded() -> Accelerator:
    """Shuffles by epoch."""
    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def loop_of(dataset: Any, **changed: Any) -> tuple[Accelerator, Any]:
    accelerator = seeded()
    loader = accelerator.prepare(DataLoader(dataset, **{"batch_size": 2, "collate_fn": pad, **changed}))
    return accelerator, minibatches(accelerator, model(), loader, 4, online=True, max_tokens=64)


def test_a_loop_gets_steps_until_its_data_ends() -> None:
    for dataset in (samples(37), Stream()):
        _, steps = loop_of(dataset)
        if dataset.__class__ is list:
            assert len(steps) == 5
        else:
            with pytest.raises(TypeError, match="no length"):
                len(steps)
        found = [numbers_in(step) for step in steps]
        assert sorted(i for step in found for i in step) == list(range(37))
        assert 4 <= len(found) <= 6


@pytest.mark.parametrize("dataset", [samples(37), Stream()])
@pytest.mark.filterwarnings("ignore:rank 0 iterates again")
def test_a_loop_goes_on_from_a_state(dataset: Any) -> None:
    _, steps = loop_of(dataset, shuffle=isinstance(dataset, list))
    states, found = [], []
    for epoch in range(2):
        steps.set_epoch(epoch)
        for step in steps:
            found.append(numbers_in(step))
            states.append(json.dumps(steps.state_dict()))
    half = len(found) // 2
    for number in (1, half, half + 2):  # behind the first epoch, the next begins
        _, again = loop_of(dataset, shuffle=isinstance(dataset, list))
        again.load_state_dict(json.loads(states[number - 1]))
        rest = []
        for epoch in range(1 if number >= half else 0, 2):
            again.set_epoch(epoch)
            rest += [numbers_in(step) for step in again]
        assert rest == found[number:]


def test_a_state_is_there_before_the_first_step_and_brings_its_epoch() -> None:
    _, steps = loop_of(samples(37), shuffle=True)
    found = [numbers_in(step) for _ in range(2) for step in steps]  # accelerate counts
    _, other = loop_of(samples(37), shuffle=True)
    other.load_state_dict(json.loads(json.dumps(other.state_dict())))
    assert [numbers_in(step) for step in itertools.chain(other, itertools.islice(other, 2))] == found[:7]
    state = json.loads(json.dumps(other.state_dict()))
    other.close()
    _, again = loop_of(samples(37), shuffle=True)
    again.load_state_dict(state)
    assert again.state_dict() == state  # also before it goes on
    assert [numbers_in(step) for step in again] == found[7:]


def test_states_are_of_online_loops_only() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(samples(8), 2, collate_fn=pad))
    for policy in ("lb-mini", None):
        steps = minibatches(accelerator, model(), loader, 2, policy=policy)
        with pytest.raises(UnsupportedError, match="only online balancing has a state"):
            steps.state_dict()


# Which samples are whose


def shared(dataset: Any, rank: int, **changed: Any) -> Any:
    """What accelerate makes of a loader on one of two ranks."""
    loader = DataLoader(dataset, batch_size=4, collate_fn=pad)
    return prepare_data_loader(loader, num_processes=2, process_index=rank, put_on_device=True, **changed)


@pytest.mark.parametrize(("dispatches", "num_shards"), some_of([True, False], [None, 1, 2, 5]))
def test_ranks_share_an_iterable_however_accelerate_would_have_dealt_it_out(
    dispatches: bool, num_shards: int | None
) -> None:
    found: list[int] = []
    for rank in (0, 1):
        given = shared(Stream() if num_shards is None else as_stream(num_shards), rank, dispatch_batches=dispatches)
        loader = streamed_loader(given, ONLINE, DataRanks(rank, 2), accumulation_steps=2)
        stream = loader.batch_sampler.stream
        assert stream.alignment.minibatch_size == 8
        with pytest.MonkeyPatch.context() as patch:  # alone: what this rank reads, whatever the other does
            patch.setattr(stream, "_own_exchange", Alone)
            patch.setattr(stream, "alignment", Unaligned())
            found += [i for bundle in loader for i in numbers_in(bundle.microbatches)]
    assert sorted(found) == list(range(37))


def test_ranks_that_shuffle_their_shards_differently_or_have_other_data_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = DataRanks(1, 2)
    monkeypatch.setattr("odc.trainers.accelerate.same_on_all_ranks", lambda values: values + 1)
    with pytest.raises(ConfigError, match="rank 1 goes through its streaming dataset in another order than rank 0"):
        streamed_loader(shared(as_stream(4).shuffle(), 1, dispatch_batches=True), ONLINE, ranks, accumulation_steps=2)
    with pytest.raises(ConfigError, match="rank 1 has a dataset of 37 samples and an order of 37, rank 0 one of 38"):
        streamed_loader(shared(samples(37), 1, dispatch_batches=False), ONLINE, ranks, accumulation_steps=2)


def test_ranks_share_each_batch_that_is_split() -> None:
    for dataset in (samples(16), Stream()):
        given = shared(dataset, 0, split_batches=True, dispatch_batches=False)
        batches = streamed_loader(given, ONLINE, DataRanks(0, 2), accumulation_steps=3).batch_sampler
        assert batches.stream.alignment.minibatch_size == 2 * 3


ONLINE = BalanceOptions(online=True, max_tokens=64)


def test_a_checkpoint_is_of_the_ranks_that_have_samples_of_their_own(tmp_path: Path) -> None:
    """A tensor parallel partner of this rank does not count."""
    given = Accelerator().prepare(DataLoader(samples(37), batch_size=4, collate_fn=pad))
    make = partial(streamed_loader, given, ONLINE, DataRanks(0, 1), accumulation_steps=1)
    both = SimpleNamespace(process_index=1, num_processes=2, device="cpu", gather=lambda row: row.repeat(2, 1))
    trainer: Any = SimpleNamespace(accelerator=both, state=SimpleNamespace(global_step=2))
    bundles = [*make().batch_sampler]
    save_stream(trainer, tmp_path, bundles[1].end)
    again = make().batch_sampler
    load_stream(trainer, tmp_path, again)
    resumed = [*again]
    assert [bundle.is_placeholder for bundle in resumed[:3]] == [True, True, False]
    assert [numbers_in(bundle.microbatches) for bundle in resumed[2:]] == [
        numbers_in(bundle.microbatches) for bundle in bundles[2:]
    ]


# Refusals


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"policy": "lb-mini", "online": True, "max_tokens": 5}, "policy='lb-mini' with online=True"),
        ({"online": True}, "online balancing needs max_tokens"),
        ({"pool_size": 5}, "pool_size=5 is of online balancing"),
        ({"online": True, "max_tokens": 5, "pool_size": 0}, "pool_size=0: expected at least 1"),
        ({"online": True, "max_tokens": 5, "microbatch_cost": 1.0}, "microbatch_cost=1.0: online balancing does not"),
        ({"online": True, "max_tokens": 0}, "max_tokens=0"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, given: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        balance(hf_trainer(tmp_path), **given)


def test_what_cannot_be_streamed_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="patch=False"):
        online(hf_trainer(tmp_path), patch=False)
    trainer = online(hf_trainer(tmp_path), pool_size=9)
    with pytest.raises(ConfigError, match="pool_size=9 with 8 samples of a rank in a step .* expected at least 32"):
        trainer.train()
    trainer = online(hf_trainer(tmp_path, dataset=Sized()))
    with pytest.raises(UnsupportedError, match="set max_steps, the number of optimizer steps"):
        trainer.train()
    stream = partial(streamed_loader, options=ONLINE, ranks=DataRanks(0, 1), accumulation_steps=1)
    with pytest.raises(UnsupportedError, match="the training loader is a DataLoader"):
        stream(DataLoader(samples(4), 2, collate_fn=pad))
    accelerator = Accelerator(cpu=True)
    odd = accelerator.prepare(DataLoader(samples(4), batch_sampler=Fours(), collate_fn=pad))
    with pytest.raises(UnsupportedError, match=r"Fours has no batch_size"):
        stream(odd)
    sized = Fours()
    sized.batch_size = 4
    with pytest.raises(UnsupportedError, match=r"the batch sampler \(Fours\) has no sampler of a known length"):
        stream(accelerator.prepare(DataLoader(samples(4), batch_sampler=sized, collate_fn=pad)))
    four = IterableDatasetShard(Stream(), num_processes=4)
    with pytest.raises(UnsupportedError, match="deals out batches to 4 ranks, and 2 have samples"):
        stream(accelerator.prepare(DataLoader(four, 2, collate_fn=pad)), ranks=DataRanks(0, 2))


class Sized(Stream):
    def __len__(self) -> int:
        return 37


class Fours:
    """A batch sampler of its own."""

    batch_size: int | None = None

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3]])

    def __len__(self) -> int:
        return 1


def left(batch: list[Any]) -> Any:
    made = pad(batch)
    return {name: values.flip(1) for name, values in made.items()} if len(batch) > 1 else made


def with_names(batch: list[Any]) -> Any:
    made = pad(batch)
    odd = [sample["input_ids"][0] % 2 for sample in batch]
    return {**made, **({"token_type_ids": torch.zeros_like(made["input_ids"])} if any(odd) else {})}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"collate": left}, r"(padding|others in a batch)"),
        ({"collate": with_names}, "packed samples need the same ones"),
        ({"max_tokens": 30}, r"it has 3\d tokens, more than max_tokens=30"),
        ({"dataset": [{"text": "a"}] * 9}, "input_ids"),
    ],
)
def test_samples_that_cannot_be_packed_are_refused_and_named(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises((UnsupportedError, ValueError, KeyError)) as caught:
        trained(tmp_path, num_train_epochs=1, remove_unused_columns=False, **changed)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(named, text), text
    assert re.search(r"when samples? \[?\d+", text), text


def test_steps_are_taken_whole() -> None:
    end = StepEnd()
    check_step([Bundle([]), Bundle([], end=end)])
    for bundles in ([Bundle([])], [Bundle([], end=end), Bundle([], end=end)], [Bundle([], end=end), Bundle([])]):
        with pytest.raises(UnsupportedError, match=f"takes {len(bundles)} batches for an optimizer step"):
            check_step(bundles)
    with pytest.raises(UnsupportedError, match="begins with a batch that was trained on before"):
        check_step([Bundle([], is_placeholder=True)])


def test_placeholders_stand_for_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = seeded()
    given = accelerator.prepare(DataLoader(samples(37), 2, collate_fn=pad, shuffle=True))
    make = partial(streamed_loader, given, ONLINE, DataRanks(0, 1), accumulation_steps=4)
    batches: StreamedBatches = make().batch_sampler
    whole = list(batches)
    ends = [bundle.end for bundle in whole if bundle.end is not None]
    assert [end.state["step"] for end in ends] == [1, 2, 3, 4, 5]
    assert sum(bundle.num_first_labels for bundle in whole) == 37  # each sample had one
    resumed = make()
    resumed.batch_sampler.load_state_dict(json.loads(json.dumps(ends[1].state)))
    rest = list(accelerator.skip_first_batches(resumed, 8))
    rows = [[row["input_ids"].tolist() for row in bundle.microbatches] for bundle in [*rest, *whole[8:]]]
    assert len(rest) == 12
    assert rows[:12] == rows[12:]
