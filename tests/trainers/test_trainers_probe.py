"""Layer 1: no ranks. What the probe of trainers measures of a model, what it refuses, and that it leaves nothing."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from process_ranks import run_ranks
from tiny_trainers import hf_trainer, losses, model, other_model, pad, sft_trainer, train_pair
from transformers import Trainer

from odc.balance.data.probe import Identity, ProbeSamples, Rounding
from odc.errors import UnsupportedError
from odc.trainers import balance
from odc.trainers.probe import check_packing


def probe(trainer: Trainer, example: dict[str, torch.Tensor] | None = None) -> None:
    """As at the first step of ``train()``, of a model that was not wrapped."""
    trainer.model.config.use_cache = False
    check_packing(trainer, trainer.model, Identity.of(trainer.model), example or {}, equal_counts=False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("OPTForCausalLM", r"other tokens in the sample before change a sample's logits by 0\.\d+ of their size"),
        ("BertForMaskedLM", "other tokens in the sample before"),
        ("BambaForCausalLM", "other tokens in the sample before"),
        ("Lfm2ForCausalLM", "other tokens in the sample before"),
        ("LlamaForTokenClassification", "is not a sum over tokens divided by num_items_in_batch: for 8 it is 1"),
    ],
)
def test_models_whose_loss_packing_would_change_are_refused_before_a_step(tmp_path: Path, name: str, why: str) -> None:
    made = other_model(name)
    before = {key: value.clone() for key, value in made.state_dict().items()}
    trainer = hf_trainer(tmp_path, built=made)
    balance(trainer, "lb-mini", max_tokens=64)
    with pytest.raises(UnsupportedError, match=f"in this Trainer: .*{name}.*{why}"):
        trainer.train()
    assert trainer.state.global_step == 0
    torch.testing.assert_close(made.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MixtralForCausalLM"])
def test_losses_of_other_models_do_not_change(tmp_path: Path, name: str) -> None:
    def make(folder: Path) -> Trainer:
        return hf_trainer(folder, built=other_model(name), num_train_epochs=1)

    plain, ours = train_pair(tmp_path, make)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BambaForCausalLM", "Lfm2ForCausalLM", "OPTForCausalLM"])
def test_a_leak_shows_also_in_a_coarse_dtype(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnsupportedError, match="does not tell packed samples apart"):
        probe(hf_trainer(tmp_path, built=other_model(name).to(torch.bfloat16)))
    probe(hf_trainer(tmp_path, built=other_model("GPT2LMHeadModel").to(torch.bfloat16)))


def test_positions_of_another_kind_are_refused(tmp_path: Path) -> None:
    """No leak here, since a packed row's mask is made: but these positions begin at 2."""

    class Apart(transformers.RobertaForMaskedLM):
        def forward(self, input_ids: Any, position_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            if position_ids is not None:
                sample = (position_ids == 0).cumsum(1)
                attention_mask = (sample[:, :, None] == sample[:, None, :])[:, None]
            return super().forward(input_ids, attention_mask, position_ids=position_ids, **kwargs)

    made = other_model("RobertaForMaskedLM")
    made.__class__ = Apart
    with pytest.raises(UnsupportedError, match=r"Apart .* differ from those of each alone by (1|0\.\d)"):
        probe(hf_trainer(tmp_path, built=made))


@pytest.mark.parametrize("make", [hf_trainer, sft_trainer])
def test_the_probe_leaves_nothing_behind(tmp_path: Path, make: Any) -> None:
    trainer = make(tmp_path)
    made = trainer.model
    made.config.use_cache = False
    made.train()
    made.model.layers[0].mlp.eval()
    torch.manual_seed(7)
    random_state, modes = torch.get_rng_state(), [module.training for module in made.modules()]
    called: list[bool] = []
    handle = made.register_forward_hook(
        lambda module, args, output: called.append(
            torch.is_grad_enabled() or any(m.training for m in made.model.modules())
        )
    )
    attributes = set(vars(trainer)), set(vars(trainer.accelerator))
    probe(trainer)
    handle.remove()
    assert called == [False] * 10
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [module.training for module in made.modules()] == modes
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in made.parameters())
    assert attributes == (set(vars(trainer)), set(vars(trainer.accelerator)))
    assert not any(getattr(trainer, "_metrics", {"eval": {}})["eval"].values())


def test_modes_are_put_back_after_a_refusal(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, built=other_model("BertForMaskedLM").train())
    random_state = torch.get_rng_state()
    with pytest.raises(UnsupportedError):
        probe(trainer)
    assert all(module.training for module in trainer.model.modules())
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_model_that_cannot_be_probed_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Failing(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            raise RuntimeError("only on Tuesdays")

    class Bare(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return (super().forward(input_ids, position_ids=position_ids, **kwargs).logits,)

    for cls, why in ((Failing, "RuntimeError: only on Tuesdays"), (Bare, r"logits NoneType; expected \(1, 9,")):
        made = model()
        made.__class__ = cls
        with pytest.raises(UnsupportedError, match=f"{cls.__name__} .* could not be measured: .*{why}"):
            probe(hf_trainer(tmp_path, built=made))


def test_a_model_without_a_vocabulary_size_is_refused(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path)
    trainer.model.config = argparse.Namespace(hidden_size=32)
    with pytest.raises(UnsupportedError, match="its config is a Namespace; expected .* vocab_size"):
        Identity.of(trainer.model)


def test_a_model_in_which_nothing_shows_yet_is_refused(tmp_path: Path) -> None:
    made = model()
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight.zero_()
    with pytest.raises(UnsupportedError, match="cannot be measured: its logits depend on the tokens before by 0 of"):
        probe(hf_trainer(tmp_path, built=made))


def test_losses_that_do_not_add_up_are_refused(tmp_path: Path) -> None:
    def not_shifted(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits[0], labels[0], reduction="sum") / num_items_in_batch

    def mean(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[0, 1:]) / num_items_in_batch

    for loss in (not_shifted, mean):
        with pytest.raises(UnsupportedError, match="the losses of LlamaForCausalLM do not add up: two samples in one"):
            probe(hf_trainer(tmp_path, extra={"compute_loss_func": loss}))


class PassingOn(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


class OfItsOwn(Trainer):
    """A sum over tokens of another loss, divided as it must be."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        labels = inputs.pop("labels")
        each = torch.nn.functional.cross_entropy(model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return each * (labels[:, 1:] != -100).sum() / num_items_in_batch


class Mean(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs)


class Regularized(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        return loss + model.lm_head.weight.square().mean() if model.training else loss


class Gathering(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        dist.all_reduce(loss.detach().clone())
        return loss


class OfLongSamples(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert inputs["input_ids"].shape[1] >= 10
        return super().compute_loss(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("cls", [PassingOn, OfItsOwn])
def test_an_overridden_loss_that_adds_up_does_not_change(tmp_path: Path, cls: type[Trainer]) -> None:
    plain, ours = train_pair(tmp_path, hf_trainer, cls=cls, num_train_epochs=1)
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize(
    ("cls", "problem"),
    [
        (Mean, r"is not a sum over tokens divided by num_items_in_batch: for 8 it is (\S+), for twice as many \1"),
        (Regularized, "is not a sum over tokens divided by num_items_in_batch"),
        (OfLongSamples, "could not be measured: .* raised AssertionError"),
    ],
)
def test_an_overridden_loss_that_does_not_add_up_is_refused(tmp_path: Path, cls: type[Trainer], problem: str) -> None:
    """So is one that cannot be asked."""
    trainer = hf_trainer(tmp_path, cls=cls, num_train_epochs=1)
    balance(trainer, "lb-mini", max_tokens=64)
    with pytest.raises(UnsupportedError, match=f"in this {cls.__name__}: .*{problem}"):
        trainer.train()
    assert trainer.state.global_step == 0


class OfLabelledTokens(Trainer):
    """Takes no sample whose first token has a label, as ms-swift's, which keeps the logits before labels only, and
    counts what is right among them."""

    custom_metrics: dict[str, list[int]]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if (inputs["labels"][:, 0] != -100).any():
            raise ValueError("Expected input batch_size (4) to match target batch_size (5).")
        self.custom_metrics["train"].append(1)
        return super().compute_loss(model, inputs, *args, **kwargs)


def test_a_loss_that_takes_no_label_on_a_first_token_is_asked_without_and_counts_nothing(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, cls=OfLabelledTokens)
    trainer.custom_metrics = {"train": []}
    probe(trainer)
    assert trainer.custom_metrics == {"train": []}


def gather_losses(rank: int, world_size: int, folder: str) -> None:
    with pytest.raises(UnsupportedError, match="the loss of one microbatch takes 1 collectives of a process group"):
        probe(hf_trainer(Path(folder, str(rank)), cls=Gathering))


def test_a_loss_in_which_ranks_meet_is_refused(tmp_path: Path) -> None:
    run_ranks(2, gather_losses, str(tmp_path))


def test_the_probe_has_the_columns_of_the_collator_and_ordinary_tokens(tmp_path: Path) -> None:
    class Weighing(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            assert inputs.pop("weights").shape == inputs["input_ids"].shape
            return super().compute_loss(model, inputs, *args, **kwargs)

    def weigh(batch: list[Any]) -> dict[str, torch.Tensor]:
        made = pad(batch)
        return {**made, "weights": made["attention_mask"].float()}

    trainer = hf_trainer(tmp_path, cls=Weighing, collate=weigh, num_train_epochs=1, remove_unused_columns=False)
    balance(trainer)
    trainer.train()
    assert len(losses(trainer)) == 5
    identity = Identity.of(trainer.model)
    assert {trainer.model.config.bos_token_id, trainer.model.config.eos_token_id} <= identity.special
    made = ProbeSamples.of(identity, {"weights": torch.tensor([1.0, 2.0])})
    assert made.second["weights"].tolist() == [1, 2, 1, 2, 1]
    tokens = [one["input_ids"].tolist() for one in (made.first, made.second, made.other_first)]
    assert tokens[0][3] == tokens[1][3]
    assert len({token for one in tokens for token in one}) == 12
    assert not identity.special & {token for one in tokens for token in one}


def test_rounding_leaves_out_what_no_loss_sees() -> None:
    exact, coarse = Rounding(torch.finfo(torch.float32).eps), Rounding(torch.finfo(torch.bfloat16).eps)
    logits = torch.randn(1, 5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert exact.difference(logits + 3, logits) < 1e-12
    assert exact.difference(logits * 1.01, logits) == pytest.approx(0.01, rel=1e-2)
    assert exact.difference(logits - 100, logits - 100 + 0.3 * logits) > exact.tolerance
    rounded = (logits - 100).bfloat16().double()
    assert coarse.difference(rounded, logits - 100) < coarse.tolerance
    assert exact.tolerance < coarse.tolerance < 0.1
