"""The three models of OrchMLLM (table 1) as phases that cost FLOPs, and minibatches of their lengths.

What the paper gives, and where: layers, hidden and FFN sizes (table 1); the architectures, Qwen2, ViT and the encoder
of Whisper, MLPs as connectors, downsampling by 1, 4, 4 (images) and 2, 2, 4 (audio) in front of them (section 8,
models); bounds of 448, 672, 896 pixels, patches of 14, audio at 16 kHz, images packed, audio padded because of its
convolutions, sequences packed (section 8, input preprocessing); minibatch sizes of 75, 50, 25 a rank on 128 GPUs
(section 8.3), 80, 60, 30 on 2560, and 65, 40, 15 there without balance, as memory allowed (section 8.1).

What follows from the architectures: table 1's language models have the sizes of Qwen2.5-7B, 14B and 72B, and so their
heads, vocabulary and gated MLPs. Encoders have two matrices in an MLP and as many heads of keys as of queries (``4 h^2
+ 2 h f`` weights a layer: 1.8, 2.8, 5.5, and 0.6, 0.6, 5.4 billion; the paper says 2, 3, 6 and 0.6, 0.6, 6). They
attend to all pairs of an item's tokens; the language model attends to half of the pairs. Whisper makes 100 frames of 80
mel bands out of a second of 16 kHz audio, and one token out of two frames (two convolutions of width 3, the second with
stride 2).

What is assumed: downsampling averages tokens, and connectors have two matrices (``h H + H^2``). A multiply-add is two
FLOPs, a backward costs two forwards. Not counted: softmax, norms, activations, lookups, and recomputation of
activations.

``odc bench multimodal-lengths MLLM-10B --out mix.jsonl`` writes lengths of made-up samples
(:mod:`odc.balance.simulate.modalities`) as one of the models sees them, for ``odc plan modalities``.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odc.balance import QuadraticCost, TransformerCost, TransformerShape
from odc.balance.checks import FloatArray, IntArray
from odc.balance.layout import Layout
from odc.balance.multimodal import Items, MinibatchLengths, Phase
from odc.balance.simulate.modalities import ModalitySamples, sample_modalities

PATCH = 14
MEL_BANDS = 80
FRAMES_PER_TOKEN = 2
AUDIO_TOKENS_PER_S = 50
VALUE_BYTES = 2
"""Bytes of a pixel's colour, of a mel value, of an element of an activation: bfloat16."""
TEXT_TOKEN_BYTES = 16
"""Bytes of a token's number and its label, int64 each."""
_FLOPS = 6.0  # of a weight and token, forward and backward


@dataclass(frozen=True)
class EncoderSize:
    """A transformer encoder of table 1."""

    layers: int
    hidden: int
    ffn: int
    rate: int
    """How many tokens of the encoder become one of the language model."""

    layout: Layout
    front_weights: int
    """Multiplications for each token before the first layer: patch embedding, convolutions."""

    token_bytes: int
    """Bytes of the encoder's input, for each token."""

    @property
    def layer_weights(self) -> int:
        """Weights of attention and MLP in all layers."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.ffn)

    def cost(self, language_hidden: int) -> QuadraticCost:
        """FLOPs of an item by its tokens, forward and backward, with its part of the connector."""
        connector = (self.hidden * language_hidden + language_hidden**2) / self.rate
        # Scores and weighted sum, of all pairs.
        per_pair = _FLOPS * 2 * self.hidden * self.layers
        return QuadraticCost(per_pair, _FLOPS * (self.layer_weights + self.front_weights + connector))


def vision(layers: int, hidden: int, ffn: int, rate: int) -> EncoderSize:
    """A ViT."""
    return EncoderSize(layers, hidden, ffn, rate, "packed", 3 * PATCH**2 * hidden, 3 * PATCH**2 * VALUE_BYTES)


def audio(layers: int, hidden: int, ffn: int, rate: int) -> EncoderSize:
    """The encoder of Whisper."""
    front = 3 * MEL_BANDS * hidden * FRAMES_PER_TOKEN + 3 * hidden**2
    return EncoderSize(layers, hidden, ffn, rate, "padded", front, MEL_BANDS * FRAMES_PER_TOKEN * VALUE_BYTES)


@dataclass(frozen=True)
class ModelSize:
    """A row of table 1, and the minibatches that it is trained with."""

    name: str
    preset: str
    """Preset of the language model."""

    encoders: Mapping[str, EncoderSize]
    resolution: int
    """Upper bound of an image's side, pixels."""

    minibatch_size: Mapping[int, int]
    """Samples of a rank by the number of ranks. Other numbers of ranks have those of 128."""

    unbalanced_size: int
    """Samples of a rank that the paper's baseline without balance could hold, on 2560."""

    @property
    def hidden(self) -> int:
        """Hidden size of the language model, and so the width of the encoders' outputs."""
        return TransformerShape.from_config(self.preset).hidden_size

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of the encoders."""
        row_bytes = self.hidden * VALUE_BYTES
        return tuple(
            Phase(name, size.cost(self.hidden), size.layout, row_bytes=row_bytes)
            for name, size in self.encoders.items()
        )

    @property
    def language(self) -> Phase:
        """The phase of the language model."""
        cost = TransformerCost.from_config(self.preset)
        return Phase("language", QuadraticCost(cost.flops_per_squared_token, cost.flops_per_token), max_tokens=2**40)

    def samples_per_rank(self, num_ranks: int) -> int:
        """The paper's minibatch size."""
        return self.minibatch_size.get(num_ranks, self.minibatch_size[128])

    def minibatch(self, samples: ModalitySamples, ranks: Sequence[Sequence[int]] | int) -> MinibatchLengths:
        """The lengths of a minibatch, one microbatch per rank.

        Args:
            ranks: which samples each rank has; or how many ranks there are, all with as many, one after the other.
        """
        if isinstance(ranks, int):
            ends = [rank * samples.number // ranks for rank in range(ranks + 1)]
        else:
            samples = samples.take([sample for mine in ranks for sample in mine])
            ends = [0, *itertools.accumulate(map(len, ranks))]
        language, items = samples.text.copy(), {}
        for name, tokens in self.tokens(samples).items():
            owners = np.flatnonzero(tokens)
            rows = self.rows(name, tokens[owners])
            items[name] = Items(owners, tokens[owners], rows, np.zeros_like(rows))
            language[owners] += rows
        return MinibatchLengths(
            [[list(range(a, b))] for a, b in itertools.pairwise(ends)], language, np.zeros_like(language), items
        )

    def tokens(self, samples: ModalitySamples) -> dict[str, IntArray]:
        """Tokens of each sample in each encoder; 0 where the sample has no such item."""
        return {"vision": samples.patches(self.resolution, PATCH), "audio": samples.frames(AUDIO_TOKENS_PER_S)}

    def rows(self, name: str, tokens: IntArray) -> IntArray:
        """Rows that an encoder makes of items with so many tokens."""
        return -(-tokens // self.encoders[name].rate)

    def sample_costs(self, samples: ModalitySamples) -> FloatArray:
        """FLOPs of whole samples, in all phases together, without padding."""
        length, total = samples.text.copy(), np.zeros(samples.number)
        for phase in self.phases:
            tokens = self.tokens(samples)[phase.name]
            total += phase.cost(tokens)
            length += self.rows(phase.name, tokens)
        return total + self.language.cost(length)

    def bytes_of(self, lengths: MinibatchLengths) -> dict[str, IntArray]:
        """Bytes that move with each item: ``text`` of samples, and inputs and outputs of each modality."""
        text = lengths.language.copy()
        found = {}
        for name, items in lengths.items.items():
            np.subtract.at(text, items.sample, items.output)
            found[f"{name} inputs"] = items.encoder * self.encoders[name].token_bytes
            found[f"{name} outputs"] = items.output * self.hidden * VALUE_BYTES
        return {"text": text * TEXT_TOKEN_BYTES, **found}


SIZES = {
    size.name: size
    for size in (
        ModelSize(
            "MLLM-10B",
            "qwen2.5-7b",
            {"vision": vision(36, 2048, 8192, 1), "audio": audio(32, 1280, 5120, 2)},
            448,
            {128: 75, 2560: 80},
            65,
        ),
        ModelSize(
            "MLLM-18B",
            "qwen2.5-14b",
            {"vision": vision(40, 2400, 9600, 4), "audio": audio(32, 1280, 5120, 2)},
            672,
            {128: 50, 2560: 60},
            40,
        ),
        ModelSize(
            "MLLM-84B",
            "qwen2.5-72b",
            {"vision": vision(45, 3200, 12800, 4), "audio": audio(48, 3072, 12288, 4)},
            896,
            {128: 25, 2560: 30},
            15,
        ),
    )
}


def write_lengths(model: str, out: Path, samples: int, seed: int) -> str:
    """Write the lengths of samples as a model sees them (``odc bench multimodal-lengths``).

    Returns:
        The command that plans with them.

    Raises:
        ValueError: there is no such model.
    """
    if model not in SIZES:
        raise ValueError(f"{model!r} is not known: expected of {', '.join(SIZES)}")
    size = SIZES[model]
    lengths = size.minibatch(sample_modalities(samples, seed), 1)
    records: list[dict[str, object]] = [{"length": length} for length in lengths.language.tolist()]
    for name, items in lengths.items.items():
        columns = (items.sample.tolist(), items.encoder.tolist(), items.output.tolist())
        for sample, encoder, output in zip(*columns, strict=True):
            records[sample][name] = [[encoder, output]]  # no sample has two of a modality
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = [
        f"--modality {name}:layers={each.layers},hidden={each.hidden},ffn={each.ffn}"
        + ("" if each.layout == "packed" else f",layout={each.layout}")
        for name, each in size.encoders.items()
    ]
    return f"odc plan modalities {out} --model {size.preset} {' '.join(options)}"
