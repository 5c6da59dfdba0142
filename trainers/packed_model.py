"""A wrapper for trainers that call the model themselves: it takes padded rows and computes on one packed row.

TRL's trainers of rollouts and pairs use the model's output by rows of a padded batch. The wrapper returns such rows;
inside it, the tokens of all rows are packed without padding.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from odc.balance.data.collate import IGNORED
from odc.balance.data.probe import Identity, Rounding
from odc.trainers.checks import base_model
from odc.trainers.heads import gather_head
from odc.trainers.probe import aside, refuse_packing

_PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of what TRL's fused head returns, (batch, num_tokens - 1): of all tokens but the first."""


class PackedModel:
    """Takes the place of ``model`` in a call; everything else is the model's.

    Args:
        model: a language model with TRL's fused head, or one that scores sequences.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        **options: Any,
    ) -> Any:
        """As the model's, where no padding is between tokens that are attended to. (batch, num_tokens) each."""
        mask = attention_mask.bool()
        positions = (mask.cumsum(dim=1) - 1)[mask][None]
        row = {"input_ids": input_ids[mask][None], "position_ids": positions}
        if labels is None:
            return self._scored(row, input_ids, mask, options)
        own = labels[mask][None].masked_fill(positions == 0, IGNORED)
        gather_head(self._model)
        output = copy.copy(self._model(**row, labels=own, **options))
        for name in _PER_TOKEN:
            if (value := output.get(name)) is not None:
                per_token = torch.cat([value.new_zeros(1), value[0]])
                output[name] = value.new_zeros(mask.shape).masked_scatter(mask, per_token)[:, 1:]
        return output

    def _scored(
        self, row: dict[str, torch.Tensor], input_ids: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]
    ) -> Any:
        """The scores of all samples: the model's head gives them for each token, and the model takes one of these.

        [Note: Through the model's output] What the head's hook returns is taken by the model as scores of tokens, each
        of which holds those of all samples. So they leave through the output of the whole model, where FSDP expects the
        gradient to come back.
        """
        model = base_model(self._model)
        padding = model.config.get_text_config().pad_token_id
        counts = mask if padding is None else mask & (input_ids != padding)  # as the model looks for the last token
        places = torch.arange(mask.shape[1], device=mask.device)
        last = (places * counts).argmax(dim=1)
        ends = (mask.flatten().cumsum(dim=0) - 1).view(mask.shape)[torch.arange(len(mask), device=mask.device), last]

        def all_scores(module: nn.Module, args: Any, scores: torch.Tensor) -> torch.Tensor:
            return scores[0, ends, 0].expand(1, scores.shape[1], -1)

        handle = model.score.register_forward_hook(all_scores)
        try:
            output = copy.copy(self._model(**row, **options))
        finally:
            handle.remove()
        output["logits"] = output["logits"].view(-1, 1)
        return output


# Whether that is the same


def check_packed_model(trainer: Any, model: nn.Module, identity: Identity, *, left: bool, scores: bool) -> None:
    """Refuse a model whose outputs change with packing, or with padding on the left. Four tiny forwards; every rank
    must come here.

    Args:
        model: as the trainer calls it: wrapped, sharded, on its device.
        identity: of the same model before it was wrapped.
        left: the trainer pads on the left, too.
        scores: the model gives one score for a sequence.

    Raises:
        UnsupportedError: the model's name and what was measured, or why it could not be.
    """
    with aside(trainer, model), trainer.accelerator.autocast():
        refuse_packing(trainer, identity, lambda: _problem(trainer, model, identity, left, scores))


def _problem(trainer: Any, model: nn.Module, identity: Identity, left: bool, scores: bool) -> str | None:
    padding, *tokens = identity.spread(14)
    first, second, other = tokens[:4], tokens[4:9], tokens[9:]
    if scores:  # by which the model finds the last token
        padding = base_model(model).config.get_text_config().pad_token_id
    device = trainer.args.device

    def outputs(called: Any, *samples: list[int]) -> torch.Tensor:
        """Of the last sample: one number per token, or one."""
        width = max(map(len, samples)) + 2
        ids = torch.tensor([_padded(one, width, padding, left) for one in samples], device=device)
        mask = torch.tensor([_padded([1] * len(one), width, 0, left) for one in samples], device=device)
        if scores:
            found: torch.Tensor = called(input_ids=ids, attention_mask=mask, use_cache=False).logits[-1:, 0]
            return found.double()
        labels = ids.masked_fill(mask == 0, IGNORED)
        labels[:, : width - 3] = IGNORED if left else labels[:, : width - 3]
        found = called(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True).log_probs[-1]
        return found[labels[-1, 1:] != IGNORED].double()

    packed = PackedModel(model)
    with Rounding.watched(model) as rounding:
        expected, together = outputs(model, first, second), outputs(packed, first, second)
    scale = rounding(expected)
    allowed, differs = scale.tolerance, _relative if scores else scale.difference
    difference = differs(together, expected)
    if not difference <= allowed:  # also of nan
        padded = " and by the padding on the left of their prompts" if left else ""
        return (
            f"{identity.name} does not tell packed samples apart by position_ids{padded}: what it gives for a sample "
            f"in a packed row differs by {difference:.2g} of its size from what it gives in a padded batch (rounding: "
            f"at most {allowed:.2g})"
        )
    # As in odc.balance.data.probe: equal to the bit, unless the model rounds by the tokens of a row.
    again, behind = outputs(packed, first, second), outputs(packed, other, second)
    exact = not identity.rounds_by_row and torch.equal(again, together)
    influence = differs(behind, together)
    if influence > (0.0 if exact else allowed):
        return (
            f"{identity.name} does not tell packed samples apart by position_ids: other tokens in the sample before "
            f"change what it gives for a sample by {influence:.2g} of its size"
        )
    return None


def _padded(values: list[int], width: int, value: int, left: bool) -> list[int]:
    """On the right, or on both sides."""
    missing = [value] * (width - len(values))
    return [*missing[1:], *values, *missing[:1]] if left else [*values, *missing]


def _relative(given: torch.Tensor, expected: torch.Tensor) -> float:
    return float((given - expected).norm() / expected.norm().clamp(min=1e-30))
