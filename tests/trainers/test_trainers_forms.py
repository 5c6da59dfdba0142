"""Layer 1: what TRL's trainers of rollouts and pairs train on, taken apart and put together; what is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from tiny_trainers import VOCAB_SIZE, model, options, other_model, tokenizer
from transformers import LlamaForSequenceClassification
from trl.trainer.utils import add_fused_lm_head

from odc.balance.data.probe import Identity
from odc.errors import UnsupportedError
from odc.trainers import balance, install
from odc.trainers.trl import Comparisons, PackedModel, Preferences, Rollouts, Sample, check_packed_model


def rollouts() -> dict[str, torch.Tensor]:
    """Three rows: prompts of 2, 3, 1 tokens, completions of 4, 1, 2, the last of which is left out of the loss."""
    prompt_mask = torch.tensor([[0, 1, 1], [1, 1, 1], [0, 0, 1]])
    completion_mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
    return {
        "prompt_ids": torch.arange(9).view(3, 3) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.arange(20, 32).view(3, 4) * torch.tensor([[1] * 4, [1, 0, 0, 0], [1, 1, 0, 0]]),
        "completion_mask": completion_mask,
        "tool_mask": torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 0]]),
        "advantages": torch.tensor([0.5, -1.0, 0.25]),
        "old_per_token_logps": -torch.arange(12.0).view(3, 4) * completion_mask,
        "importance_sampling_ratio": torch.tensor([[1.5], [0.5], [2.0]]),
        "num_items_in_batch": torch.tensor(7),
    }


def test_rollouts_are_taken_apart_and_put_together() -> None:
    form, inputs = Rollouts(), rollouts()
    samples = form.samples_of(inputs)
    assert [form.lengths_of(sample) for sample in samples] == [[6], [4], [1]]
    assert [form.num_loss_tokens_of(sample) for sample in samples] == [3, 1, 0]
    assert samples[0]["prompt_ids"].tolist() == [1, 2]
    assert [len(sample["completion_ids"]) for sample in samples] == [4, 1, 1]
    again = form.batch_of(samples)
    assert again.keys() == inputs.keys()
    again["completion_ids"][2, 1] = inputs["completion_ids"][2, 1]  # of what is left out one token is kept
    again["tool_mask"][2, 1:] = 0
    for name, value in inputs.items():
        assert torch.equal(again[name], value), name
        assert again[name].dtype == value.dtype
    shorter = form.batch_of([samples[1], samples[2]])
    assert shorter["completion_ids"].shape == (2, 1)
    assert shorter["prompt_ids"].tolist() == [[3, 4, 5], [0, 0, 8]]
    assert shorter["num_items_in_batch"] == 7
    for sample, number in zip(samples, (4, 1, 2), strict=True):
        sample["importance_sampling_ratio"] = torch.full((number,), 0.5)  # of tokens
    assert form.batch_of(samples[:2])["importance_sampling_ratio"].tolist() == [[0.5] * 4, [0.5, 1, 1, 1]]


def pairs() -> dict[str, torch.Tensor]:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    return {
        "input_ids": torch.arange(1, 17).view(4, 4) * mask,
        "attention_mask": mask,
        "completion_mask": mask * torch.tensor([0, 1, 1, 1]),
        "ref_chosen_logps": torch.tensor([-1.0, -2.0]),
    }


def test_pairs_stay_together() -> None:
    form, inputs = Preferences(), pairs()
    samples: list[Sample] = form.samples_of(inputs)
    assert [form.lengths_of(sample) for sample in samples] == [[3, 4], [4, 2]]
    again = form.batch_of(samples)
    for name, value in inputs.items():
        assert torch.equal(again[name], value), name
    second = form.batch_of(samples[1:])
    assert second["input_ids"].tolist() == [[5, 6, 7, 8], [13, 14, 0, 0]]
    assert second["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert second["ref_chosen_logps"].tolist() == [-2.0]


# Models on packed rows


def rows(*, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [3, 7, 5]
    mask = torch.tensor([[0] * (left * (7 - n)) + [1] * n + [0] * ((not left) * (7 - n)) for n in lengths])
    return torch.randint(2, VOCAB_SIZE, (3, 7), generator=torch.Generator().manual_seed(1)) * mask, mask


@pytest.mark.parametrize("left", [False, True])
def test_a_packed_model_gives_what_the_model_gives(left: bool) -> None:
    made = model()
    outputs = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
    add_fused_lm_head(made, outputs=outputs)
    ids, mask = rows(left=left)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, : 5 if left else 3] = -100  # prompts
    both = [
        called(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        for called in (made, PackedModel(made))
    ]
    counted = labels[:, 1:] != -100
    for name in outputs:
        torch.testing.assert_close(both[1][name][counted], both[0][name][counted], rtol=1e-4, atol=1e-5)
    gradients = []
    for output in both:
        made.zero_grad()
        (output.log_probs * counted).sum().backward()
        gradients.append(made.model.layers[0].mlp.up_proj.weight.grad.clone())
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("padding", [0, 7])
def test_a_packed_model_scores_each_sample(padding: int) -> None:
    """Also where a sample ends with the token that pads: the model takes the token before."""
    config = model().config
    config.num_labels, config.pad_token_id = 1, padding
    made = LlamaForSequenceClassification(config)
    ids, mask = rows(left=False)
    ids = ids.masked_fill(mask == 0, padding)
    ids[1, 6] = padding
    expected = made(input_ids=ids, attention_mask=mask, use_cache=False).logits
    found = PackedModel(made)(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert made.score.weight.grad is not None
    assert made.score(torch.zeros(1, 2, 32)).shape == (1, 2, 1)  # without the hook


def probe(made: Any, *, left: bool, scores: bool = False) -> None:
    trainer: Any = SimpleNamespace(
        model=made,
        args=SimpleNamespace(device=torch.device("cpu")),
        accelerator=SimpleNamespace(
            autocast=lambda: torch.autocast("cpu", enabled=False), mixed_precision="no", state=SimpleNamespace()
        ),
    )
    check_packed_model(trainer, made, Identity.of(trainer.model), left=left, scores=scores)


def test_models_that_packing_changes_are_refused() -> None:
    def with_head(made: Any) -> Any:
        add_fused_lm_head(made)
        return made

    probe(with_head(model()), left=True)
    config = transformers.GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2)
    gpt2 = with_head(transformers.GPT2LMHeadModel(config))
    probe(gpt2, left=False)
    with pytest.raises(UnsupportedError, match="GPT2LMHeadModel .* and by the padding on the left of their prompts"):
        probe(gpt2, left=True)
    for name in ("OPTForCausalLM", "BambaForCausalLM"):
        with pytest.raises(UnsupportedError, match=f"{name} does not tell packed samples apart"):
            probe(with_head(other_model(name)), left=False)


# What is refused


def trainer_of(kind: str, folder: Path, *, cls: Any = None, **changed: Any) -> Any:
    texts = [{"prompt": f"3 {i}", "chosen": " 5 6" * i, "rejected": " 7" * (9 - i)} for i in range(1, 9)]
    arguments = options(folder, bf16=False, gradient_checkpointing=False, num_train_epochs=1, **changed)
    config, trainer = getattr(trl, f"{kind}Config"), cls or getattr(trl, f"{kind}Trainer")
    common = {"args": config(**arguments), "train_dataset": Dataset.from_list(texts), "processing_class": tokenizer()}
    if kind == "GRPO":
        return trainer(model=model(), reward_funcs=lambda completions, **_: [0.0] * len(completions), **common)
    if kind == "DPO":
        return trainer(model=model(), ref_model=model(), **common)
    scored = LlamaForSequenceClassification(model(pad_token_id=0, num_labels=1).config)
    return trainer(model=scored, **common)


class OwnLoss(trl.DPOTrainer):
    def _compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super()._compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("GRPO", {"loss_type": "bnpo"}, "loss_type='bnpo' is the mean over the tokens of a microbatch"),
        ("GRPO", {"top_entropy_quantile": 0.5}, "top_entropy_quantile=0.5: the quantile is one of a microbatch"),
        ("GRPO", {"entropy_coef": 0.1}, "entropy_coef and use_adaptive_entropy add the mean entropy"),
        ("DPO", {"loss_type": "aot"}, "loss_type='aot' sorts the pairs of a microbatch"),
        ("DPO", {"loss_type": ["sigmoid", "sft"]}, "loss_type='sft' is the mean over the tokens of a microbatch"),
        ("DPO", {"cls": OwnLoss}, "_compute_loss is overridden, and what it does with a batch is not known"),
    ],
)
def test_what_a_microbatch_decides_is_refused_by_name(
    tmp_path: Path, kind: str, changed: dict[str, Any], words: str
) -> None:
    settings = {"per_device_train_batch_size": 4, "num_generations": 4} if kind == "GRPO" else {}
    with pytest.raises(UnsupportedError) as refused:
        balance(trainer_of(kind, tmp_path, **settings, **changed))
    assert words in str(refused.value)


def test_a_score_of_several_numbers_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of("Reward", tmp_path)
    balance(trainer)
    trainer.model.score = torch.nn.Linear(32, 2)
    with pytest.raises(UnsupportedError, match="has no linear layer 'score' of one output"):
        balance(trainer)
    assert Comparisons().option_in_the_way(trainer)


def test_online_is_told_what_to_take_instead(tmp_path: Path) -> None:
    trainer = trainer_of("DPO", tmp_path)
    words = "trains on pairs of answers, which are balanced by a policy once"
    with contextlib.closing(install(None, 64, online=True)), pytest.raises(UnsupportedError, match=words):
        trainer.train()


def test_a_process_alone_trains_the_same(tmp_path: Path) -> None:
    losses = []
    for is_balanced in (False, True):
        trainer = trainer_of("DPO", tmp_path, max_steps=2)
        if is_balanced:
            balance(trainer, max_tokens=60)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][0] != losses[0][1]
    assert not hasattr(trainer, "_odc_balance")
    assert not isinstance(trainer.ref_model, PackedModel)
