"""Samples of text, images and audio: a law with Modality Composition Incoherence (OrchMLLM, sections 3.1 and 8).

The paper trains on the instruction tuning data of LLaVA-1.5 (images), on LibriSpeech (speech recognition) and on
AIR-Bench (questions about audio), drawn at random from all of them. It prints shares of the modalities as pictures
only, so this law is not fitted to it: it is put together from what is published of each data set, and from assumptions.

Known: how many samples each data set has (LLaVA-1.5, table 7; LibriSpeech's 281,241 training utterances; about 19,000
and 2,000 of AIR-Bench), and so the mixture; which images they have (COCO's longer side is 640, OpenImages' 1024);
LibriSpeech's mean of 12.3 s, its shape (most utterances are cut at 12 to 17 s), and 2.7 words a second; that ShareGPT's
conversations are cut at 2,048 tokens; that answers to questions about audio do not depend on its length.

Assumed: everything about text but that (lognormal laws, from the number of questions that LLaVA-1.5 puts into one
conversation; for LLaVA's own instructions such that, with images as Qwen3-VL counts them, the mean is that of the law
``llava`` of :mod:`odc.balance.simulate.laws`), the sides of Visual Genome's images and of book covers, how often
photographs are 4:3 and 3:2, and the lengths of AIR-Bench's clips. A sample has at most one item of a modality, and none
has an image and audio, as in these data sets. All of it stands in :data:`SOURCES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odc.balance.checks import FloatArray, IntArray, as_count
from odc.balance.random_numbers import normal_quantiles, random_generator, uniform

Mixture = tuple[tuple[float, float, float], ...]
"""Uniform laws: (share, lowest, highest) of each; shares sum to 1."""

_PHOTOGRAPHS: Mixture = ((0.45, 4 / 3, 4 / 3), (0.30, 3 / 2, 3 / 2), (0.25, 1.0, 16 / 9))
"""Longer side over shorter side: of most cameras, and anything else."""


@dataclass(frozen=True)
class Source:
    """One data set of the mixture."""

    name: str
    num_samples: float
    """In thousands: its weight in the mixture."""

    text: tuple[float, float, int, int]
    """Tokens of the text, template included, transcripts not: median, standard deviation of the logarithm, and the
    limits that they are clipped to."""

    sides: Mixture = ()
    """Pixels of the longer side of its image; empty: it has no images."""

    ratios: Mixture = _PHOTOGRAPHS
    """Longer over shorter side."""

    seconds: Mixture = ()
    """Of its clip; empty: it has no audio."""

    tokens_per_s: float = 0.0
    """Of a transcript; its logarithm has a standard deviation of 0.15. 0: there is none."""


_COCO: Mixture = ((1.0, 640.0, 640.0),)
_VISUAL_GENOME: Mixture = ((0.55, 500.0, 500.0), (0.25, 800.0, 800.0), (0.20, 1024.0, 1024.0))
SOURCES: tuple[Source, ...] = (
    Source("LLaVA instructions", 158, (185, 0.55, 30, 800), _COCO),
    Source("ShareGPT", 40, (900, 0.70, 50, 2048)),
    Source("VQAv2", 83, (90, 0.35, 30, 400), _COCO),
    Source("GQA", 72, (200, 0.40, 30, 800), _VISUAL_GENOME),
    Source("OKVQA", 9, (45, 0.30, 25, 150), _COCO),
    Source("OCR-VQA", 80, (100, 0.30, 30, 300), ((1.0, 475.0, 500.0),), ((1.0, 1.25, 1.6),)),
    Source("A-OKVQA", 66, (75, 0.25, 40, 200), _COCO),
    Source("TextCaps", 22, (80, 0.40, 30, 400), ((1.0, 1024.0, 1024.0),)),
    Source("RefCOCO", 48, (250, 0.60, 40, 1500), _COCO),
    Source("Visual Genome", 86, (400, 0.40, 60, 1500), _VISUAL_GENOME),
    # 1.284 tokens a word at 2.7 words a second; 70 % of the utterances are near the length at which they were cut.
    Source("LibriSpeech", 281, (20, 0.10, 15, 30), seconds=((0.30, 1.5, 12.0), (0.70, 12.0, 17.0)), tokens_per_s=3.47),
    Source("AIR-Bench", 21, (80, 0.50, 20, 500), seconds=((0.50, 2.0, 8.0), (0.40, 8.0, 12.0), (0.10, 12.0, 30.0))),
)
_TRANSCRIPT_SIGMA = 0.15


@dataclass(frozen=True, eq=False)
class ModalitySamples:
    """Samples before any model has seen them. All arrays have one entry per sample."""

    source: IntArray
    """Index into :data:`SOURCES`."""

    text: IntArray
    """Tokens."""

    long_side: IntArray
    """Pixels of the longer side of the image; 0: there is none."""

    short_side: IntArray
    """Of its shorter side."""

    seconds: FloatArray
    """Of the clip; 0: there is none."""

    @property
    def number(self) -> int:
        """How many there are."""
        return int(self.source.size)

    def take(self, which: Sequence[int] | IntArray) -> ModalitySamples:
        """Some of them, in this order."""
        chosen = np.asarray(which, dtype=np.int64)
        source, text, long_side, short_side = (
            column[chosen] for column in (self.source, self.text, self.long_side, self.short_side)
        )
        return ModalitySamples(source, text, long_side, short_side, self.seconds[chosen])

    def patches(self, resolution: int, patch: int = 14) -> IntArray:
        """Patches of each image, 0 where there is none: images whose longer side exceeds ``resolution`` are made
        smaller, and both sides are rounded to whole patches. (That the bound is one of the longer side is assumed.)"""
        scale = np.minimum(1.0, resolution / np.maximum(self.long_side, 1))
        sides = [np.rint(side * scale / patch).astype(np.int64) for side in (self.long_side, self.short_side)]
        # No more than the bound allows where it is no multiple, and at least one.
        sides = [np.clip(side, 1, max(1, resolution // patch)) for side in sides]
        return np.where(self.long_side > 0, sides[0] * sides[1], 0)

    def frames(self, per_s: int) -> IntArray:
        """Tokens of each clip in an encoder that makes ``per_s`` a second, 0 where there is none."""
        return np.ceil(self.seconds * per_s).astype(np.int64)


def sample_modalities(num_samples: int, seed: int = 0) -> ModalitySamples:
    """Draw samples from the mixture of :data:`SOURCES`; the same for the same arguments, whatever the numpy version.

    Raises:
        ValueError: a number is out of range.
    """
    count, seed = as_count(num_samples, "num_samples"), as_count(seed, "seed", minimum=0, maximum=None)
    which, of_text, of_item, in_item, of_ratio, in_ratio, of_speech = (
        uniform(random_generator("modalities", seed, column), count) for column in range(7)
    )
    weights = np.cumsum([source.num_samples for source in SOURCES])
    sources = np.searchsorted(weights / weights[-1], which, side="right").clip(max=len(SOURCES) - 1)
    text, long_side, short_side, seconds = np.zeros((4, count))
    normal, speech = normal_quantiles(of_text), normal_quantiles(of_speech)
    for number, source in enumerate(SOURCES):
        mine = sources == number
        median, sigma, low, high = source.text
        text[mine] = np.clip(median * np.exp(sigma * normal[mine]), low, high)
        if source.sides:
            long_side[mine] = np.rint(_quantiles(source.sides, of_item[mine], in_item[mine]))
            short_side[mine] = np.rint(long_side[mine] / _quantiles(source.ratios, of_ratio[mine], in_ratio[mine]))
        if source.seconds:
            seconds[mine] = _quantiles(source.seconds, of_item[mine], in_item[mine])
            text[mine] += source.tokens_per_s * seconds[mine] * np.exp(_TRANSCRIPT_SIGMA * speech[mine])
    tokens, long_pixels, short_pixels = (np.rint(values).astype(np.int64) for values in (text, long_side, short_side))
    return ModalitySamples(sources.astype(np.int64), tokens, long_pixels, short_pixels, seconds)


def _quantiles(law: Mixture, u: FloatArray, v: FloatArray) -> FloatArray:
    """Of a mixture, for independent uniform numbers in (0, 1)."""
    shares, low, high = (np.array(column) for column in zip(*law, strict=True))
    chosen = np.searchsorted(np.cumsum(shares)[:-1], u, side="right")
    found: FloatArray = low[chosen] + (high - low)[chosen] * v
    return found
