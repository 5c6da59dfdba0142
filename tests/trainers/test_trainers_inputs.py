"""Layer 1: no ranks. Inputs that packing would change: refused by name, or the losses of the plain loop on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset
from tiny_trainers import VOCAB_SIZE, model, pad, samples, tokenizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling

from odc.errors import ConfigError, UnsupportedError
from odc.trainers import BalanceOptions, minibatches
from odc.trainers.accelerate import DataRanks
from odc.trainers.batches import Bundle
from odc.trainers.models import check_rows, configs_of
from odc.trainers.packing import collate_alone, pack
from odc.trainers.planned import balanced_loader, sample_lengths

Rows = list[dict[str, Any]]


def steps_of(made: nn.Module, policy: str | None, dataset: Any = None, collate: Any = pad, batch_size: int = 2) -> Any:
    """Of four batches each; with a policy in rows of at most 64 tokens."""
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(samples(37) if dataset is None else dataset, batch_size, collate_fn=collate)
    limit = {} if policy is None else {"max_tokens": 64}
    return minibatches(accelerator, made, accelerator.prepare(loader), 4, policy=policy, **limit)


@torch.no_grad()
def step_losses(made: nn.Module, steps: Any) -> list[float]:
    return [sum(float(made(**batch, num_items_in_batch=100).loss) for batch in step) for step in steps]


def assert_same_losses(build: Callable[[], Any] = model, **changed: Any) -> None:
    made = build()
    plain = step_losses(made, steps_of(made, None, **changed))
    assert step_losses(made, steps_of(made, "lb-mini", **changed)) == pytest.approx(plain, rel=1e-5)


def assert_refused(named: str, build: Callable[[], Any] = model, **changed: Any) -> None:
    """Before a step with it."""
    with pytest.raises(UnsupportedError, match=named):
        list(steps_of(build(), "lb-mini", **changed))


# Wrapped models in a loop


class Wrapper(nn.Module):
    """Of one's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **batch: Any) -> Any:
        return self.inner(**batch)


@pytest.mark.parametrize(
    "wrap", [DistributedDataParallel, Wrapper, lambda inner: DistributedDataParallel(Wrapper(inner))]
)
def test_the_losses_of_a_loop_do_not_change_whatever_wraps_the_model(one_rank: None, wrap: Callable[..., Any]) -> None:
    wrapped = wrap(model())
    plain = step_losses(wrapped, steps_of(wrapped, None))
    assert step_losses(wrapped, steps_of(wrapped, "lb-micro")) == pytest.approx(plain, rel=1e-5)
    assert [config.use_cache for config in configs_of(wrapped)] == [False]


# Positions and masks


def with_positions(positions: Callable[[int], torch.Tensor]) -> Callable[[Rows], Any]:
    def collate(batch: Rows) -> Any:
        made = pad(batch)
        width = made["input_ids"].shape[1]
        return {**made, "position_ids": torch.stack([positions(width) for _ in batch])}

    return collate


def jump(width: int) -> torch.Tensor:
    positions = torch.arange(width)
    positions[width // 2 :] += 5
    return positions


def test_positions_that_jump_in_a_sample_are_refused_and_others_are_not() -> None:
    assert_refused(r"position_ids are not 0, 1, 2, .*: at token \d+ it is", collate=with_positions(jump))
    assert_refused("at token 0 it is 2", collate=with_positions(lambda width: torch.arange(width) + 2))
    assert_same_losses(collate=with_positions(torch.arange))


def test_a_jump_in_one_sample_is_refused_by_its_index() -> None:
    given = samples(37)
    marked = given[21]["input_ids"]  # neither the longest nor the shortest, which are tried out before

    def collate(batch: Rows) -> Any:
        return with_positions(jump if any(one["input_ids"] == marked for one in batch) else torch.arange)(batch)

    assert_refused("sample 21 of the dataset: .*position_ids", collate=collate)


def stock_collator(side: str) -> DataCollatorForLanguageModeling:
    made = tokenizer()
    made.padding_side = side
    return DataCollatorForLanguageModeling(made, mlm=False)


def test_padding_on_the_left_is_refused_and_on_the_right_it_is_not() -> None:
    assert_refused("in a batch with another: .*attention_mask begins with", collate=stock_collator("left"))
    assert_same_losses(collate=stock_collator("right"))


def test_a_side_without_anything_to_pad_does_not_matter() -> None:
    assert_same_losses(collate=stock_collator("left"), batch_size=1)


def without_mask(left: bool) -> Callable[[Rows], Any]:
    def collate(batch: Rows) -> Any:
        ids = [torch.tensor(sample["input_ids"]) for sample in batch]
        side = "left" if left else "right"
        padded = [
            torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=value, padding_side=side)
            for value in (0, -100)
        ]
        return {"input_ids": padded[0], "labels": padded[1]}

    return collate


def test_padding_is_found_without_a_mask() -> None:
    assert_refused("padding on the left", collate=without_mask(True))
    assert_same_losses(collate=without_mask(False))


def masked(change: Callable[[torch.Tensor], None], labels: bool = True) -> Callable[[Rows], Any]:
    def collate(batch: Rows) -> Any:
        made = pad(batch)
        change(made["attention_mask"])
        if labels:
            made["labels"] = made["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
        return made

    return collate


def hole(mask: torch.Tensor) -> None:
    mask[:, 1] = 0


def test_masks_with_holes_are_refused() -> None:
    assert_refused(r"zeros between tokens that are attended to \(the first at token 1\)", collate=masked(hole))


def test_padding_that_has_a_loss_is_refused() -> None:
    """Labels copied from padded input_ids, a common slip: its loss depends on the batch."""

    def half(mask: torch.Tensor) -> None:
        mask[:, 3:] = 0

    assert_refused(r"\d+ tokens of its padding \(attention_mask 0\) have labels", collate=masked(half, False))

    def no_ignored(batch: Rows) -> Any:
        made = pad(batch)
        return {**made, "labels": made["input_ids"]}

    assert_refused("in a batch with another: .*tokens of its padding", collate=no_ignored)


def test_a_collator_whose_samples_depend_on_one_another_is_refused() -> None:
    def in_batch(batch: Rows) -> Any:
        made = pad(batch)
        made["labels"][:, :2] = -100 if len(batch) > 1 else 7
        return made

    assert_refused("its labels of sample .* are others in a batch", collate=in_batch)


def test_a_collator_that_draws_at_random_is_not_mistaken_for_one() -> None:
    def drop(batch: Rows) -> Any:
        made = pad(batch)
        made["labels"][torch.rand(made["labels"].shape) < 0.3] = -100
        return made

    state = torch.random.get_rng_state()
    loader = Accelerator(cpu=True).prepare(DataLoader(samples(19), 2, collate_fn=drop))
    ours = balanced_loader(loader, BalanceOptions(), DataRanks(0, 1), accumulation_steps=4)
    assert torch.equal(torch.random.get_rng_state(), state)  # the first epoch's order is what it would have been
    assert len(list(ours)) == 10


# Rotary embeddings that depend on the longest sample

DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "factor": 4.0,
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


def rotary(kind: dict[str, Any], context: int) -> Any:
    if kind is DYNAMIC:
        return model(initializer_range=0.5, rope_parameters=dict(kind), max_position_embeddings=context)
    parameters = {**kind, "original_max_position_embeddings": context}
    return model(initializer_range=0.5, rope_parameters=parameters, max_position_embeddings=4 * context)


@pytest.mark.parametrize("kind", [DYNAMIC, LONGROPE], ids=["dynamic", "longrope"])
def test_rotary_embeddings_are_refused_beyond_their_context(kind: dict[str, Any]) -> None:
    rows = [{"input_ids": list(range(2, 2 + length))} for length in (6, 40)]
    made = rotary(kind, 16)
    made.config.use_cache = False
    made.requires_grad_(False)
    alone = [collate_alone(pad, row) for row in rows]
    packed = float(made(**pack(alone), num_items_in_batch=40).loss)
    apart = sum(
        float(made(input_ids=one["input_ids"], labels=one["labels"], num_items_in_batch=40).loss) for one in alone
    )
    assert abs(packed - apart) > 1e-4  # why
    name = kind["rope_type"]
    assert_refused(f"rope_type '{name}': beyond 16 tokens .* longest sample has 40", build=lambda: rotary(kind, 16))
    assert_same_losses(build=lambda: rotary(kind, 40))


def test_a_sample_that_turns_out_longer_than_the_context_is_refused() -> None:
    made = {"dataset": [{"input_ids": [3] * n} for n in (5, 12, 9, 6)], "build": lambda: rotary(DYNAMIC, 16)}
    named = r"sample \d of the dataset has \d+ tokens after data_collator .* beyond 16 the model's rotary frequencies"
    assert_refused(named, collate=partial(pad_with_a_start, size=9), **made)


def test_chunks_of_attention_are_refused_in_longer_rows() -> None:
    chunked = model().config
    chunked.attention_chunk_size = 32
    assert check_rows([chunked], longest=8, max_tokens=32) is None
    with pytest.raises(UnsupportedError, match="attention_chunk_size=32: .* rows of up to 33 tokens"):
        check_rows([chunked], longest=8, max_tokens=33)


# The token limit where lengths lie

LIMIT = 50


def pad_table(batch: Rows) -> Any:
    return pad([{"input_ids": one["input_ids"]} for one in batch])


def prepared(dataset: Any, collate: Any, world_size: int = 1, rank: int = 0, **options: Any) -> Any:
    loader = DataLoader(dataset, 2, collate_fn=collate)
    return prepare_data_loader(loader, num_processes=world_size, process_index=rank, put_on_device=False, **options)


def microbatches(loader: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    ours = balanced_loader(loader, BalanceOptions(**options), DataRanks(0, 1), accumulation_steps=4)
    assert all(isinstance(bundle, Bundle) for bundle in ours)
    return [one for bundle in ours for one in bundle.microbatches]


def in_words(count: int) -> Dataset:
    """A third of the tokens, except where a few samples are compared with the column."""
    compared = {0, 5, 10, 15, 20, 25, 30, 36}
    rows = samples(count)
    lengths = [len(row["input_ids"]) // (1 if i in compared else 3) for i, row in enumerate(rows)]
    return Dataset.from_list(rows).add_column("length", lengths)


def doubled() -> Dataset:
    table = Dataset.from_list(samples(37))
    table.set_transform(lambda rows: {"input_ids": [[*ids[:20], *ids[:20]] for ids in rows["input_ids"]]})
    return table


def pad_with_a_start(batch: Rows, size: int = 3) -> Any:
    return pad([{"input_ids": [1] * size + list(one["input_ids"])} for one in batch])


@pytest.mark.parametrize(
    ("dataset", "collate"),
    [(in_words(37), pad_table), (doubled(), pad_table), (samples(37), pad_with_a_start)],
    ids=["a column in words", "set_transform", "tokens added"],
)
def test_the_token_limit_holds_whatever_lengths_say(dataset: Any, collate: Any) -> None:
    rows = microbatches(prepared(dataset, collate), max_tokens=LIMIT)
    assert max(row["input_ids"].shape[1] for row in rows) <= LIMIT
    assert sum(row["input_ids"].shape[1] for row in rows) == sum(
        collate_alone(collate, dataset[i])["input_ids"].shape[1] for i in range(37)
    )
    assert_same_losses(dataset=dataset, collate=collate)


def test_a_column_that_counts_something_else_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    table = Dataset.from_list(samples(37))
    expected = [len(row["input_ids"]) for row in samples(37)]
    words = table.add_column("length", [length // 3 for length in expected])
    assert sample_lengths(words, num_tokens_of=lambda i: expected[i]).tolist() == expected
    assert "column 'length' says" in caplog.text
    close = table.add_column("length", [length + 1 for length in expected])
    assert sample_lengths(close, num_tokens_of=lambda i: expected[i]).tolist() == [n + 1 for n in expected]
    for value in ("12", None, -1):
        with pytest.raises(UnsupportedError, match=f"column 'length' is {value!r} for sample 0"):
            sample_lengths(table.add_column("length", [value] * 37))


def test_a_sample_that_turns_out_too_long_is_refused_by_index_and_numbers() -> None:
    dataset = in_words(37)
    lengths = [len(row["input_ids"]) for row in samples(37)]
    worst = max(range(37), key=lambda i: lengths[i] if dataset[i]["length"] < lengths[i] else 0)
    limit = max(lengths[i] for i in range(37) if dataset[i]["length"] == lengths[i])
    limit = min(limit, lengths[worst] - 1)
    named = (
        rf"sample \d+ of the dataset has \d+ tokens after data_collator, more than max_tokens={limit}; its length says"
    )
    with pytest.raises(ConfigError, match=f"{named}|the longest sample has"):
        microbatches(prepared(dataset, pad_table), max_tokens=limit)
    assert microbatches(prepared(dataset, pad_table))  # without a limit the longest sample is its own microbatch


def test_equal_numbers_cannot_be_split_so_the_sample_is_named() -> None:
    options = BalanceOptions("lb-micro", max_tokens=LIMIT)
    loader = prepared(samples(37), partial(pad_with_a_start, size=9), world_size=2)
    ours = balanced_loader(loader, options, DataRanks(0, 2), accumulation_steps=4)
    with pytest.raises(
        ConfigError, match=r"has \d+ tokens after data_collator, more than max_tokens=50: sample \d+ of"
    ):
        list(ours)


# Samples without tokens, ranks without samples


def test_a_sample_without_tokens_has_no_loss_and_does_not_end_training() -> None:
    dataset = samples(37)
    dataset[0]["input_ids"] = []
    dataset[11]["input_ids"] = []
    assert_same_losses(dataset=dataset)
    empty = microbatches(prepared([{"input_ids": []}, {"input_ids": [3, 4]}, {"input_ids": []}], pad))
    assert sum(int((row["labels"] != -100).sum()) for row in empty) == 1


def with_weights(batch: Rows) -> Any:
    made = pad(batch)
    return {**made, "weights": torch.full(made["input_ids"].shape, 0.5)}


def test_a_rank_without_samples_has_the_columns_of_the_others() -> None:
    """Two batches for four ranks, without even_batches."""
    columns = []
    for rank in range(4):
        loader = prepared(samples(3), with_weights, 4, rank, even_batches=False)
        ours = balanced_loader(loader, BalanceOptions(), DataRanks(rank, 4), accumulation_steps=1)
        columns += [one for bundle in ours for one in bundle.microbatches]
    assert len(columns) == 4
    assert {tuple(sorted(one)) for one in columns} == {("input_ids", "labels", "position_ids", "weights")}
    assert {one["weights"].dtype for one in columns} == {torch.float32}
    (dummy,) = (one for one in columns if (one["labels"] == -100).all())
    assert dummy["input_ids"].shape == dummy["weights"].shape == (1, 2)
    assert int(dummy["input_ids"].max()) < VOCAB_SIZE


def test_a_column_that_only_some_samples_have_is_refused_by_index() -> None:
    def sometimes(batch: Rows) -> Any:
        made = with_weights(batch)
        return made if len(batch[0]["input_ids"]) != 7 else pad(batch)

    with pytest.raises(UnsupportedError, match=r"sample \d+ of the dataset: data_collator gives the columns"):
        microbatches(prepared([{"input_ids": [3] * n} for n in (9, 7, 4, 8, 6, 6)], sometimes))
