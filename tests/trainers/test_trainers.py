"""Layer 1: balanced minibatches inside training libraries, in this process. (Ranks: test_trainer_scripts.py.)"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate.data_loader
import pytest
import torch
import transformers
import trl
from accelerate import Accelerator, ParallelismConfig
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from documents import example, failure
from tiny_trainers import hf_trainer, losses, model, pad, samples, sft_trainer, train_pair
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers import Trainer

from odc.balance import LinearCost, count_loss_tokens, policy_names
from odc.errors import ConfigError, UnsupportedError
from odc.trainers import BalanceOptions, balance, install, minibatches
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Bundle, Tally, counted_batches_of, cut, microbatches_of
from odc.trainers.options import Planner
from odc.trainers.overrides import Overrides
from odc.trainers.packing import collate_alone, pack
from odc.trainers.planned import BalancedBatches, balanced_loader, sample_lengths

# Bundles


@pytest.mark.parametrize("num_microbatches", range(1, 9))
@pytest.mark.parametrize("num_bundles", [1, 3, 4])
def test_a_cut_keeps_the_order_and_leaves_something_for_the_last_bundle(
    num_microbatches: int, num_bundles: int
) -> None:
    bundles = cut(range(num_microbatches), num_bundles)
    assert len(bundles) == num_bundles
    assert [one for bundle in bundles for one in bundle] == list(range(num_microbatches))
    assert bundles[-1]


def test_a_bundle_moves_like_a_tensor() -> None:
    bundle = Bundle([{"input_ids": torch.zeros(1, 3)}, {"input_ids": torch.ones(1, 2)}])
    moved = accelerate.data_loader.send_to_device(bundle, torch.device("meta"))
    assert [one["input_ids"].device.type for one in moved.microbatches] == ["meta", "meta"]
    assert microbatches_of([bundle, Bundle([]), {"labels": 1}]) == [*bundle.microbatches, {"labels": 1}]


def test_first_labels_are_counted_where_the_trainer_counts_them() -> None:
    labels = torch.tensor([[-100, 5, 6, -100, 7]])
    bundles = [Bundle([{"labels": labels}, {"labels": labels}], 3), Bundle([]), {"labels": labels}]
    batches = counted_batches_of([one.to("cpu") if isinstance(one, Bundle) else one for one in bundles])
    assert sum(int((batch["labels"] != -100).sum()) for batch in batches) == 3 * 3 + 3
    assert sum(int((batch["labels"][..., 1:] != -100).sum()) for batch in batches) == 3 * 3
    assert counted_batches_of(bundles[2:]) == bundles[2:]


# Packing


def test_a_packed_row_has_the_loss_of_its_samples() -> None:
    made = model(use_cache=False)
    alone = [collate_alone(pad, sample) for sample in samples(4)]
    row = pack(alone)
    assert row["input_ids"].shape == row["labels"].shape == row["position_ids"].shape
    apart = sum(made(input_ids=one["input_ids"], labels=one["labels"], num_items_in_batch=100).loss for one in alone)
    torch.testing.assert_close(made(**row, num_items_in_batch=100).loss, apart)
    # With a cache transformers does not look for packed samples: why use_cache is refused, or switched off.
    assert abs(made(**row, num_items_in_batch=100, use_cache=True).loss - apart) > 1e-4


def test_nothing_packed_is_a_row_without_loss() -> None:
    row = pack([])
    assert row["labels"].tolist() == [[-100, -100]]
    assert model()(**row, num_items_in_batch=7).loss == 0


def test_padding_of_a_single_sample_is_taken_off() -> None:
    def pad_to_8(batch: list[Any]) -> dict[str, torch.Tensor]:
        made = pad(batch)
        missing = -made["input_ids"].shape[1] % 8
        return {
            k: torch.nn.functional.pad(v, (0, missing), value=-100 if k == "labels" else 0) for k, v in made.items()
        }

    sample = {"input_ids": [5, 6, 7]}
    assert collate_alone(pad_to_8, sample)["input_ids"].tolist() == [[5, 6, 7]]
    assert pack([collate_alone(pad_to_8, sample)])["position_ids"].tolist() == [[0, 1, 2]]


ONE = pad([{"input_ids": [5, 6, 7]}])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({**ONE, "pixel_values": torch.zeros(1, 3, 4, 4)}, "pixel_values of shape"),
        ({**ONE, "cu_seq_lens_q": torch.zeros(2)}, "padding_free=False"),
        ({**ONE, "shift_labels": torch.zeros(1, 3)}, "shift_labels"),
        ({**ONE, "names": ["a"]}, "names"),
        ({"input_ids": torch.zeros(1, 3)}, "data_collator"),
        ([{}], "not a mapping"),
    ],
)
def test_what_is_not_per_token_or_has_no_labels_is_refused_by_name(given: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        collate_alone(lambda batch: given, {"input_ids": [5, 6, 7]})


# Lengths


def test_lengths_of_lists_tables_and_length_columns() -> None:
    rows = samples(50)
    expected = [len(row["input_ids"]) for row in rows]
    assert sample_lengths(rows).tolist() == expected
    table = Dataset.from_list(rows)
    assert sample_lengths(table).tolist() == expected
    assert sample_lengths(table.select([3, 1])).tolist() == [expected[3], expected[1]]
    assert sample_lengths(table.add_column("length", [7] * 50)).tolist() == [7] * 50


@pytest.mark.parametrize(("dataset", "named"), [([{"text": "a"}], "no input_ids"), (iter([]), "iterable")])
def test_unknown_lengths_are_refused(dataset: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        sample_lengths(dataset)


# The samples of a step


def batches_of(
    count: int, world_size: int, even: bool = True, split: bool = False, size: int | None = 2, drop_last: bool = False
) -> tuple[BalancedBatches, list[list[list[int]]]]:
    """Four per step; and what the library gives to each rank."""
    inner: Any = BatchSampler(SequentialSampler(range(count)), size or 3, drop_last)
    if size is None:
        inner.batch_size = None  # of different sizes, as far as accelerate knows

    dealt_out = {"even_batches": even, "split_batches": split}
    plain = [list(map(list, BatchSamplerShard(inner, world_size, rank, **dealt_out))) for rank in range(world_size)]
    return BalancedBatches(inner, world_size, 4, **dealt_out), plain


def planned(planner: Planner, step: Sequence[int], rank: int) -> list[list[int]]:
    """A rank's microbatches of these samples."""
    return planner.microbatches(planner.plan(step), step, rank)


def planner_of(count: int, world_size: int, policy: str = "lb-mini", **options: Any) -> Planner:
    lengths = [len(sample["input_ids"]) for sample in samples(count)]
    return BalanceOptions(policy, cost=LinearCost(), **options).planner(lengths, world_size, None)


@pytest.mark.parametrize(
    "options", [{}, {"even": False}, {"split": True, "size": 6}, {"size": None}, {"drop_last": True}]
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("count", [37, 5, 48, 2, 49])
def test_each_step_has_the_samples_it_would_have_had(count: int, world_size: int, options: dict[str, Any]) -> None:
    """The last, smaller one and the samples that accelerate repeats or leaves out included."""
    ours, plain = batches_of(count, world_size, **options)
    parts = list(ours)
    assert len(parts) == max(map(len, plain))
    if "size" not in options:  # accelerate's own count is wrong where it splits a short batch or knows no size
        assert len(ours) == len(parts)
    for start in range(0, len(parts), 4):
        expected = Counter(s for mine in plain for batch in mine[start : start + 4] for s in batch)
        step = parts[start : start + 4]
        assert [(part.index, part.num_parts) for part in step] == [(i, len(step)) for i in range(len(step))]
        assert all(Counter(part.samples.tolist()) == expected for part in step)
        following = parts[start + 4].samples.tolist() if start + 4 < len(parts) else None
        assert [None if p.following is None else p.following.tolist() for p in step] == [following] * len(step)


@pytest.mark.parametrize("policy", policy_names())
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_a_step_and_each_has_something_to_run(policy: str, world_size: int) -> None:
    planner = planner_of(48, world_size, policy)
    for step in ([*range(20), 3], [7]):
        ranks = [planned(planner, step, rank) for rank in range(world_size)]
        assert Counter(s for mine in ranks for m in mine for s in m) == Counter(step)
        assert all(ranks)


def test_the_start_of_an_epoch_asks_the_library_for_its_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank deals out for all ranks: over whole epochs that would be ranks times batches."""
    world_size, num_drawn = 64, 0
    inner = BatchSampler(SequentialSampler(range(40_003)), 2, drop_last=False)

    class Counting(BatchSamplerShard):
        def __iter__(self) -> Any:
            nonlocal num_drawn
            num_drawn += len(self.batch_sampler)
            return super().__iter__()

    monkeypatch.setattr(accelerate.data_loader, "BatchSamplerShard", Counting)
    ours = BalancedBatches(inner, world_size, 4)
    rounds = ours.rounds()
    assert len(rounds) == 313
    assert sum(map(len, rounds)) == 313 * 64 * 2
    assert num_drawn < world_size * 2 * world_size


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads that have planned a step, in the order of these."""
    found: list[str] = []
    original = Planner.plan

    def plan(planner: Planner, step: Any) -> Any:
        found.append(threading.current_thread().name)
        return original(planner, step)

    monkeypatch.setattr(Planner, "plan", plan)
    return found


def fifty_steps() -> tuple[Accelerator, Any]:
    """A loader of four bundles for each."""
    accelerator, loader = prepared(DataLoader(samples(400), 2, collate_fn=pad))
    return accelerator, balanced_loader(loader, BalanceOptions(), DataRanks(0, 1), accumulation_steps=4)


def test_skipped_steps_are_not_planned(planners: list[str]) -> None:
    accelerator, ours = fifty_steps()
    assert len(list(accelerator.skip_first_batches(ours, 4 * 48 + 2))) == 6  # two bundles of one step are left out
    assert len(planners) == 2


def test_ranks_get_different_numbers_of_microbatches_under_lb_mini_and_equal_ones_under_lb_micro() -> None:
    steps = [range(24 * i, 24 * i + 24) for i in range(4)]
    for policy in ("lb-mini", "lb-micro"):
        planner = planner_of(96, 3, policy)
        counts = [[len(planned(planner, step, rank)) for step in steps] for rank in range(3)]
        for mine in counts:
            tally = Tally()
            for count in mine:
                tally.add(Bundle([{}] * count, 0, count))
                tally.add(Bundle([]))  # another bundle of the same step
            assert str(tally) == (
                f"4 minibatches planned; microbatches of this rank: {sum(mine)}, {min(mine)} to {max(mine)} in a "
                "minibatch"
            )
        assert (counts[0] == counts[1] == counts[2]) is (policy == "lb-micro")


def test_the_next_step_is_planned_in_a_thread_while_one_is_trained_on(planners: list[str]) -> None:
    assert sum(bundle.end is not None for bundle in fifty_steps()[1]) == 50
    assert planners == ["MainThread"] + ["odc-ahead"] * 49
    assert "odc-ahead" not in {thread.name for thread in threading.enumerate()}


def test_a_microbatch_keeps_the_token_limit_and_a_longer_sample_is_refused() -> None:
    lengths = [len(sample["input_ids"]) for sample in samples(37)]
    planner = planner_of(37, 2, max_tokens=50)
    for microbatch in [*planned(planner, range(37), 0), *planned(planner, range(37), 1)]:
        assert sum(lengths[s] for s in microbatch) <= 50
    with pytest.raises(ConfigError, match=f"longest sample has {max(lengths)} tokens"):
        planner_of(37, 2, max_tokens=20)


def test_bad_options_are_refused() -> None:
    with pytest.raises(ValueError, match="policy 'lb-nano' is not known"):
        BalanceOptions("lb-nano")
    with pytest.raises(ConfigError, match="max_tokens=0"):
        BalanceOptions(max_tokens=0)


# Loaders


def prepared(loader: Any, **options: Any) -> tuple[Accelerator, Any]:
    accelerator = Accelerator(cpu=True, **options)
    return accelerator, accelerator.prepare(loader)


def test_a_balanced_loader_has_the_length_workers_and_epochs_of_the_loader() -> None:
    _, loader = prepared(DataLoader(samples(20), 2, shuffle=True, collate_fn=pad, num_workers=2))
    ours = balanced_loader(
        loader, BalanceOptions(max_tokens=64), DataRanks(0, 1), accumulation_steps=4, configs=[model().config]
    )
    assert len(ours) == len(loader) == 10
    assert ours.num_workers == 2
    epochs = [[m["input_ids"].tolist() for bundle in ours for m in bundle.microbatches] for _ in range(2)]
    tokens = sum(len(sample["input_ids"]) for sample in samples(20))
    assert [sum(len(row) for rows in epoch for row in rows) for epoch in epochs] == [tokens, tokens]
    assert epochs[0] != epochs[1]
    assert len(accelerate.data_loader.skip_first_batches(ours, 4)) == 6


class OwnShards:
    """A batch sampler that gives its rank's batches, as ms-swift's does."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.drop_last, self.epoch = batch_size, False, 0

    @property
    def rank(self) -> int:
        return 1

    @property
    def world_size(self) -> int:
        return 2

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Any:
        drawn = torch.randperm(18, generator=torch.Generator().manual_seed(self.epoch))
        return iter(drawn[self.rank :: self.world_size].split(self.batch_size))


def test_batches_of_a_sampler_that_knows_its_rank_are_those_of_all_ranks() -> None:
    loader = DataLoader(samples(18), batch_sampler=OwnShards(2), collate_fn=pad)
    ranks = [balanced_loader(loader, BalanceOptions(), DataRanks(rank, 2), accumulation_steps=2) for rank in (0, 1)]
    for epoch in range(2):
        for ours in ranks:
            ours.set_epoch(epoch)
        drawn = torch.randperm(18, generator=torch.Generator().manual_seed(epoch)).tolist()
        steps = list(zip(*([part.samples.tolist() for part in ours.batch_sampler] for ours in ranks), strict=True))
        assert len(steps) == len(ranks[0]) == 5
        assert all(mine == theirs for mine, theirs in steps)
        assert [sorted(steps[part][0]) for part in (0, 2, 4)] == [sorted(drawn[a : a + 8]) for a in (0, 8, 16)]
    with pytest.raises(UnsupportedError, match="deals out batches to 2 ranks, and 4 have samples of their own"):
        balanced_loader(loader, BalanceOptions(), DataRanks(0, 4), accumulation_steps=2)


def test_loaders_that_cannot_be_balanced_are_refused_by_name() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(samples(4))

    _, loader = prepared(DataLoader(Stream(), 2, collate_fn=pad))
    with pytest.raises(UnsupportedError, match="Stream: an iterable dataset"):
        balanced_loader(loader, BalanceOptions(), DataRanks(0, 1), accumulation_steps=1)
    _, loader = prepared(DataLoader(samples(4), 2, collate_fn=pad))
    with pytest.raises(UnsupportedError, match="is not dealt out to ranks by accelerate"):
        balanced_loader(loader, BalanceOptions(), DataRanks(0, 2), accumulation_steps=1)
    with pytest.raises(UnsupportedError, match="the training loader is a DataLoader"):
        balanced_loader(
            DataLoader(samples(4), 2, collate_fn=pad), BalanceOptions(), DataRanks(0, 1), accumulation_steps=1
        )
    dispatcher = accelerate.data_loader.DataLoaderDispatcher(samples(4), batch_size=2, collate_fn=pad)
    with pytest.raises(UnsupportedError, match="dispatch_batches"):
        balanced_loader(dispatcher, BalanceOptions(), DataRanks(0, 1), accumulation_steps=1)


@pytest.mark.parametrize("sizes", [{"cp_size": 2}, {"sp_size": 2}])
def test_ranks_that_share_out_rows_are_refused(sizes: dict[str, int]) -> None:
    config = ParallelismConfig(dp_shard_size=2, **sizes)
    accelerator = SimpleNamespace(parallelism_config=config, torch_device_mesh=None, gradient_accumulation_steps=1)
    with pytest.raises(UnsupportedError, match="ranks share out each row of a batch"):
        minibatches(accelerator, model(), [], 4, policy="lb-mini")


def test_ranks_of_one_tensor_parallel_group_alone_have_the_same_samples() -> None:
    config = ParallelismConfig(tp_size=2)
    accelerator = SimpleNamespace(parallelism_config=config, torch_device_mesh="tp", process_index=1, num_processes=2)
    assert DataRanks.of(accelerator) == (0, 1, None)


def test_the_steps_of_a_loop_are_the_loaders_batches_without_a_policy_and_packed_rows_with_one() -> None:
    accelerator, loader = prepared(DataLoader(samples(19), 2, collate_fn=pad))
    made = model()
    assert made.config.use_cache
    plain = list(minibatches(accelerator, made, loader, 4))
    assert [len(batches) for batches in plain] == [4, 4, 2]
    assert made.config.use_cache
    steps = minibatches(accelerator, made, loader, 4, policy="lb-mini")
    assert len(steps) == 3
    assert not made.config.use_cache
    for ours, theirs in zip(steps, plain, strict=True):
        assert all(batch["input_ids"].shape[0] == 1 for batch in ours)
        assert sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in ours) == sum(
            int((batch["labels"][:, 1:] != -100).sum()) for batch in theirs
        )
    divides = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(UnsupportedError, match="gradient_accumulation_steps=2"):
        minibatches(divides, made, loader, 4, policy="lb-mini")


# Trainers


@pytest.mark.parametrize("make", [hf_trainer, sft_trainer])
def test_losses_do_not_change_also_at_the_end_of_an_epoch(tmp_path: Path, make: Any) -> None:
    plain, ours = train_pair(tmp_path, make)
    assert len(losses(plain)) == 10
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    for mine, theirs in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_losses_do_not_change_with_workers_lengths_groups_and_evaluations(tmp_path: Path) -> None:
    plain, ours = train_pair(
        tmp_path,
        hf_trainer,
        dataloader_num_workers=2,
        train_sampling_strategy="group_by_length",
        eval_strategy="steps",
        eval_steps=3,
        num_train_epochs=1,
    )
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-5)
    evaluations = [[entry["eval_loss"] for entry in t.state.log_history if "eval_loss" in entry] for t in (plain, ours)]
    assert evaluations[0]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=1e-4)


def test_training_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    plain, _ = train_pair(tmp_path, hf_trainer, save_strategy="steps", save_steps=3)
    resumed = hf_trainer(tmp_path / "ours")
    balance(resumed, "lb-mini", max_tokens=64)
    resumed.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-3"))
    assert losses(resumed) == pytest.approx(losses(plain), rel=1e-5)


def test_metrics_of_trl_are_means_over_tokens(tmp_path: Path) -> None:
    """One microbatch per step on either side: then TRL's own mean over microbatches is one over tokens too."""
    plain, ours = (
        sft_trainer(tmp_path / name, gradient_accumulation_steps=1, per_device_train_batch_size=8, num_train_epochs=1)
        for name in ("plain", "ours")
    )
    balance(ours, max_tokens=100_000)
    for trainer in (plain, ours):
        trainer.train()
    for name in ("entropy", "mean_token_accuracy", "num_tokens"):
        expected = [entry[name] for entry in plain.state.log_history if "loss" in entry]
        assert [entry[name] for entry in ours.state.log_history if "loss" in entry] == pytest.approx(expected, rel=1e-4)


def fail(batch: list[Any]) -> Any:
    raise KeyError("text")


OURS = {
    *("get_train_dataloader", "training_step", "_get_num_items_in_batch", "floating_point_ops", "log", "compute_loss"),
    *("_save_rng_state", "_load_optimizer_and_scheduler", "_odc_balance", "gather_for_metrics"),
}


@pytest.mark.parametrize(
    ("options", "num_workers"), [({}, 0), ({"online": True, "max_tokens": 64}, 2)], ids=["planned", "online"]
)
@pytest.mark.parametrize(("make", "changed"), [(hf_trainer, {}), (sft_trainer, {}), (hf_trainer, {"collate": fail})])
def test_everything_is_put_back_after_training_and_after_a_failure(
    tmp_path: Path, make: Any, changed: dict[str, Any], options: dict[str, Any], num_workers: int
) -> None:
    trainer = make(tmp_path, num_train_epochs=1, dataloader_num_workers=num_workers, **changed)
    before = {*vars(trainer), *vars(trainer.accelerator)}
    assert not OURS & before
    balance(trainer, **options)
    failing = pytest.raises(KeyError, match=r"when sample \d+ (of the dataset was read|was transformed)")
    with failing if changed else contextlib.nullcontext():
        trainer.train()
    assert not OURS & ({*vars(trainer), *vars(trainer.accelerator)} - before)
    assert not torch.multiprocessing.active_children()


def test_overrides_put_back_what_was_there() -> None:
    class Target:
        value = 1

    target = Target()
    with Overrides(target) as overrides:
        overrides.replace("value", 2)
        overrides.replace("value", 3)
        assert target.value == 3
    assert vars(target) == {}
    target.value = 5
    with Overrides(target) as overrides:
        overrides.replace("value", 2)
    assert target.value == 5


def test_the_launchers_hook_balances_every_trainer_and_is_undone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    original = Trainer.train
    with pytest.raises(ValueError, match="lb-nano"):
        install("lb-nano")
    with contextlib.closing(install("lb-mini", 64)) as launched:
        assert Trainer.train is not original
        trainer = hf_trainer(tmp_path, num_train_epochs=1)
        trainer.train()
        assert launched.used
        assert launched.tally.minibatches == 5
        assert launched.tally.num_run > 5
        own = hf_trainer(tmp_path, num_train_epochs=1)
        with caplog.at_level(logging.INFO, "odc"):
            balance(own, "lb-mini")  # the script's own choice holds
            own.train()
        assert "balanced by lb-mini: 5 minibatches" in caplog.text
        assert launched.tally.minibatches == 5
        accelerator, loader = prepared(DataLoader(samples(8), 2, collate_fn=pad))
        list(minibatches(accelerator, model(), loader, 4))
        assert launched.tally.minibatches == 6
    assert Trainer.train is original
    launched.close()


# Refusals


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
        ({"train_sampling_strategy": "batch_rebalance"}, "batch_rebalance"),
        ({"include_num_input_tokens_seen": "all"}, "include_num_input_tokens_seen"),
        ({"use_cache": True}, "use_cache=True"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"in this .*: .*{named}"):
        balance(hf_trainer(tmp_path, **changed))


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("RLOOTrainer", "rollouts"),
        ("ORPOTrainer", "pairs of answers"),
        ("KTOTrainer", "answers that are compared within a batch"),
    ],
)
@pytest.mark.parametrize("is_own", [False, True], ids=["trl", "own"])
@pytest.mark.parametrize("online", [False, True])
def test_trainers_of_rollouts_and_pairs_are_told_what_works(name: str, what: str, is_own: bool, online: bool) -> None:
    """Before anything of the trainer is looked at: it is not theirs to change an option, or to tokenize anything."""
    kind: type[Trainer] = getattr(trl, name, None) or type(name, (Trainer,), {})
    if is_own:
        kind = type("Mine", (kind,), {})
    launched = contextlib.closing(install(None if online else "lb-mini", 64, online=online))
    with launched, pytest.raises(UnsupportedError) as refused:
        kind.__new__(kind).train()
    text = str(refused.value)
    assert f"in this {kind.__name__}: a {name} trains on {what}" in text
    assert "`odc run` without --balance and --online" in text
    assert "tokenize" not in text


def test_models_that_cannot_be_balanced_are_refused_by_name(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=1)
    trainer = hf_trainer(tmp_path, built=transformers.GPT2LMHeadModel(config))
    trainer.model_accepts_loss_kwargs = False
    with pytest.raises(UnsupportedError, match="does not accept num_items_in_batch"):
        balance(trainer)
    mixture = model()
    mixture.config.output_router_logits = True
    with pytest.raises(UnsupportedError, match="auxiliary loss"):
        balance(hf_trainer(tmp_path, built=mixture))
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=16, n_layer=1, n_head=2))
    with pytest.raises(UnsupportedError, match="position_ids"):
        balance(hf_trainer(tmp_path, built=bloom))


def test_unequal_counts_without_on_demand_communication_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="patch=False"):
        balance(hf_trainer(tmp_path), "lb-mini", patch=False)
    balance(hf_trainer(tmp_path), "lb-micro", patch=False)


@pytest.mark.parametrize("name", ["Launched", "Minibatches", "balance", "install", "minibatches"])
def test_an_example_of_the_reference_runs(name: str, tmp_path: Path) -> None:
    accelerator, loader = prepared(DataLoader(samples(20), 2, collate_fn=pad))
    trainer, made = hf_trainer(tmp_path), model()
    trainer.remove_callback(transformers.PrinterCallback)  # prints what doctest would compare
    names: dict[str, Any] = {
        "accelerator": accelerator,
        "loader": loader,
        "model": made,
        "optimizer": torch.optim.AdamW(made.parameters()),
        "trainer": trainer,
        "torch": torch,
        "count_loss_tokens": count_loss_tokens,
    }
    test = example(f"odc.trainers.{name}", names)
    assert test is not None
    assert failure(test) == ""
