"""Layer 1: no ranks. What anybody may ask of a model: are its packed samples told apart?"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_trainers import model, other_model
from torch import nn

from odc.balance import check_packing
from odc.balance.data.probe import Rounding
from odc.errors import UnsupportedError

Row = dict[str, torch.Tensor]


def without_cache(made: Any, *, in_bfloat16: bool = False) -> Any:
    """The forward of a loop."""

    def forward(row: Row) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bfloat16):
            found = made(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False)
        logits: torch.Tensor = found.logits.float()
        return logits

    return forward


class Averages(nn.Module):
    """Not of transformers: the mean of the tokens before, of the same sample where ``cu_seqlens`` are given."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 8)

    def forward(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        num_tokens = input_ids.shape[1]
        ends = torch.tensor([num_tokens]) if cu_seqlens is None else cu_seqlens[1:]
        sample = torch.bucketize(torch.arange(num_tokens), ends, right=True)
        seen = (sample[:, None] == sample[None, :]).tril().float()
        mixed: torch.Tensor = (seen / seen.sum(1, keepdim=True)) @ self.embedding(input_ids) @ self.embedding.weight.T
        return mixed


def test_the_loop_that_everybody_copies_is_refused_without_the_word_that_it_needs() -> None:
    made = model().train()
    random_state = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=r"^LlamaForCausalLM does not tell .* Call it with use_cache=False"):
        check_packing(made)
    check_packing(made, without_cache(made))
    made.config.use_cache = False
    check_packing(made)
    assert all(module.training for module in made.modules())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not any(module._forward_hooks for module in made.modules())


@pytest.mark.parametrize("name", ["OPTForCausalLM", "BambaForCausalLM"])
def test_a_model_that_never_looks_is_refused_whatever_it_is_given(name: str) -> None:
    made = other_model(name)
    with pytest.raises(UnsupportedError, match=f"{name} does not tell packed samples apart"):
        check_packing(made, without_cache(made))


def test_a_model_rounds_as_what_computes_in_it_does() -> None:
    """Its parameters and its logits are float32, and what lies between is not."""
    made = model()
    forward = without_cache(made, in_bfloat16=True)
    check_packing(made, forward)
    with Rounding.watched(made) as rounding:
        logits = forward({"input_ids": torch.arange(3)[None], "position_ids": torch.arange(3)[None]})
    assert rounding(logits) == Rounding(torch.finfo(torch.bfloat16).eps)


def test_a_model_of_ones_own_is_asked_as_it_is_called() -> None:
    made = Averages()
    with pytest.raises(UnsupportedError, match="its config is a NoneType; expected .* vocab_size"):
        check_packing(made)
    with pytest.raises(UnsupportedError, match="Averages does not tell packed samples apart"):
        check_packing(made, lambda row: made(row["input_ids"]), vocab_size=40)
    check_packing(made, lambda row: made(row["input_ids"], cu_seqlens=row["cu_seqlens"]), vocab_size=40)
    with pytest.raises(ValueError, match=r"its output has logits \(1, 40\); expected \(1, 9, 'num_classes'\)"):
        check_packing(made, lambda row: made(row["input_ids"])[:, 0], vocab_size=40)
