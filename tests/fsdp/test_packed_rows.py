"""Layer 3: ranks as processes. Who trains on packed samples that see one another is told so; nobody else is."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_
from training import use_up, wrap

import odc
from odc.balance import check_packing, pack_collate
from odc.fsdp_patch.packed_rows import watch_packed_rows

SAMPLES = [{"input_ids": torch.arange(1, 8)}, {"input_ids": torch.arange(9, 3, -1)}]
ROW = {name: column for name, column in pack_collate(SAMPLES).items() if name in ("input_ids", "position_ids")}


def language_model(attention: str = "sdpa", dropout: float = 0.0) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32, num_hidden_layers=2, attn_implementation=attention, attention_dropout=dropout, **shape
        )
    )


class Around(nn.Module):
    """A loss around a model, which calls a part of it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, row: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
        hidden = self.model.base_model(**row, **options).last_hidden_state
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits


def given_by_name(model: Any, row: dict[str, torch.Tensor], **options: Any) -> Any:
    return model(**row, **options).logits


def given_in_order(model: Any, row: dict[str, torch.Tensor], **options: Any) -> Any:
    return model(row["input_ids"], None, row["position_ids"], **options).logits


def masked(model: Any, row: dict[str, torch.Tensor], **options: Any) -> Any:
    """By a mask of its own, with which a cache does no harm."""
    sample = (row["position_ids"] == 0).cumsum(dim=1)
    other = (sample[:, :, None] != sample[:, None, :]) | torch.ones(13, 13).triu(1).bool()
    return model(**row, attention_mask=other[:, None] * -1e9, **options).logits


def in_a_wrapper(model: Any, row: dict[str, torch.Tensor], **options: Any) -> Any:
    return Around(model)(row, **options)


def warned(run: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [one for one in found if "packed samples see one another" in str(one.message)]


@pytest.mark.parametrize("call", [given_by_name, given_in_order, masked, in_a_wrapper])
@pytest.mark.parametrize("options", [{}, {"use_cache": True}, {"use_cache": False}], ids=str)
@pytest.mark.parametrize("made", ["as it is", "cache off", "checkpointed", "eager"])
def test_a_warning_comes_where_samples_see_one_another_and_only_there(
    made: str, options: dict[str, Any], call: Callable[..., Any]
) -> None:
    model = language_model("eager" if made == "eager" else "sdpa").train()
    if made == "cache off":
        model.config.use_cache = False
    if made == "checkpointed":
        model.gradient_checkpointing_enable()
    alone = model(input_ids=ROW["input_ids"][:, 7:], use_cache=False).logits
    leaks = (call(model, ROW, **options)[:, 7:] - alone).abs().max() > 1e-4
    undo = watch_packed_rows(Around(model))
    assert model._forward_pre_hooks
    found = warned(lambda: [call(model, ROW, **options) for _ in range(3)])
    assert len(found) == leaks
    if call is not masked:
        assert not model._forward_pre_hooks  # nothing is looked at any more
        assert not model.model._forward_pre_hooks
    assert [one.filename for one in found] == [__file__] * bool(leaks)
    undo()
    assert not model._forward_pre_hooks


def test_what_is_no_packed_row_is_not_taken_for_one() -> None:
    model = language_model().train()
    undo = watch_packed_rows(model)
    one = pack_collate(SAMPLES[:1])

    def others() -> None:
        with torch.no_grad():
            given_by_name(model, ROW)  # a look at logits
        model(input_ids=ROW["input_ids"])
        model(input_ids=one["input_ids"], position_ids=one["position_ids"])
        model(input_ids=ROW["input_ids"], position_ids=torch.arange(13)[None] * 2)  # of a part of a long sample

    assert warned(others) == []
    assert len(warned(lambda: given_by_name(model, ROW))) == 1  # still looked for
    undo()
    undo = watch_packed_rows(model)
    for _ in range(200):  # a script that packs nothing is left alone after a while
        model.forward = lambda **others: None
        model(input_ids=ROW["input_ids"])
    assert not model._forward_pre_hooks
    undo()


def backward(model: nn.Module, row: dict[str, torch.Tensor]) -> None:
    given_by_name(model, row).square().mean().backward()


def train(rank: int, world_size: int, fsdp: int) -> list[Any]:
    """Rank 1 has no microbatch in the first minibatch. Rank 0 alone measures its model."""
    model = language_model(dropout=0.1)
    if fsdp == 2:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = wrap(model, auto_wrap_policy=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, norms, refused = [], [], ""
    with odc.patch_fsdp(model):
        if rank == 0:
            check_packing(model, lambda row: model(**{n: row[n] for n in ROW}, use_cache=False))
            with pytest.raises(odc.UnsupportedError, match="other tokens in the sample before") as error:
                check_packing(model)
            refused = str(error.value)
        for number in range(3):
            row = {name: column[:, : 9 + rank + number] for name, column in ROW.items()}
            if number or rank == 0:
                found += warned(functools.partial(backward, model, row))
            norms.append(float(model.clip_grad_norm_(1e9) if fsdp == 1 else clip_grad_norm_(model.parameters(), 1e9)))
            use_up(optimizer)
    hooks = sum(len(module._forward_pre_hooks) for module in model.modules())
    return [[one.filename for one in found], "with use_cache=False" in refused, norms, hooks]


@pytest.mark.parametrize("fsdp", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_ranks_that_train_are_told_once_and_an_idle_one_waits_for_nothing(fsdp: int) -> None:
    first, second = run_ranks(2, train, fsdp)
    assert first[:2] == [[__file__], True]
    assert second[:2] == [[__file__], False]
    assert first[2] == second[2]
    assert min(first[2]) > 0
    assert first[3] == second[3]
