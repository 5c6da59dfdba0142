"""Layer 1: no processes. The law of samples of several modalities: pinned draws, and what its sources say."""

from __future__ import annotations

import numpy as np
import pytest

from odc.balance import sample_lengths
from odc.balance.simulate.modalities import SOURCES, ModalitySamples, sample_modalities

NUM_SAMPLES = 60_000
PINNED = {
    "source": [8, 10, 6, 10, 3, 0],
    "text": [216, 73, 75, 76, 162, 182],
    "long_side": [640, 0, 640, 0, 500, 640],
    "short_side": [617, 0, 480, 0, 333, 480],
    "seconds": [0.0, 15.3695, 0.0, 14.705871, 0.0, 0.0],
}


@pytest.fixture(scope="module")
def samples() -> ModalitySamples:
    return sample_modalities(NUM_SAMPLES, seed=3)


def of(samples: ModalitySamples, name: str) -> np.ndarray:
    found: np.ndarray = samples.source == [source.name for source in SOURCES].index(name)
    return found


def test_draws_are_pinned_and_differ_by_seed() -> None:
    few = sample_modalities(6, seed=1)
    assert {name: getattr(few, name).round(6).tolist() for name in PINNED} == PINNED
    assert sample_modalities(6, seed=2).text.tolist() != PINNED["text"]
    for arguments, name in (((0, 0), "num_samples"), ((1, -1), "seed")):
        with pytest.raises(ValueError, match=name):
            sample_modalities(*arguments)


def test_shares_are_those_of_the_data_sets(samples: ModalitySamples) -> None:
    total = sum(source.num_samples for source in SOURCES)
    for number, source in enumerate(SOURCES):
        assert float((samples.source == number).mean()) == pytest.approx(source.num_samples / total, abs=0.006)
    has_image, has_audio = samples.long_side > 0, samples.seconds > 0
    assert not (has_image & has_audio).any()
    assert ((has_image | has_audio) == ~of(samples, "ShareGPT")).all()
    assert float((~has_image & ~has_audio).mean()) == pytest.approx(40 / total, abs=0.004)
    assert (samples.text > 0).all()


def test_speech_and_its_transcript_go_together_and_questions_do_not(samples: ModalitySamples) -> None:
    """Section 3.1: what makes the composition incoherent."""
    speech, questions = of(samples, "LibriSpeech"), of(samples, "AIR-Bench")
    assert np.corrcoef(samples.seconds[speech], samples.text[speech])[0, 1] > 0.85
    assert abs(np.corrcoef(samples.seconds[questions], samples.text[questions])[0, 1]) < 0.1
    assert float(samples.seconds[speech].mean()) == pytest.approx(12.3, abs=0.3)
    assert 0.6 < float((samples.seconds[speech] > 12).mean()) < 0.8
    # 281,241 utterances of 960 hours have 9.4 million words, about 33 each; with the template.
    assert float(samples.text[speech].mean()) == pytest.approx(20 + 1.284 * 33.4, rel=0.05)
    assert float(samples.seconds.max()) < 30


def test_text_of_instructions_is_that_of_a_fitted_law(samples: ModalitySamples) -> None:
    """Images as Qwen3-VL counts them: a token for 32 x 32 pixels."""
    mine = of(samples, "LLaVA instructions")
    whole = samples.text[mine] + samples.patches(10_000, patch=32)[mine]
    assert float(whole.mean()) == pytest.approx(float(sample_lengths("llava", 50_000).mean()), rel=0.03)


@pytest.mark.parametrize("resolution", [448, 672, 896])
def test_patches_keep_the_bound_and_the_shape(samples: ModalitySamples, resolution: int) -> None:
    patches = samples.patches(resolution)
    has_image = samples.long_side > 0
    assert (patches[~has_image] == 0).all()
    assert (patches[has_image] > 0).all()
    assert int(patches.max()) <= (resolution // 14) ** 2
    # Of an image that is not made smaller, its area; of one that is, that of the bound and its shape.
    scale = np.minimum(1, resolution / samples.long_side[has_image])
    area = samples.long_side[has_image] * samples.short_side[has_image] * scale**2 / 14**2
    assert np.abs(patches[has_image] / area - 1).max() < 0.08
    small = has_image & (samples.long_side <= 448)
    assert not small.any() or (patches[small] == samples.patches(448)[small]).all()


def test_composition_varies_from_sample_to_sample(samples: ModalitySamples) -> None:
    """Figure 3: the shares of images and of audio in a sequence have a substantial variance."""
    images, clips = samples.patches(672) // 4, samples.frames(50) // 2
    length = samples.text + images + clips
    for rows, least in ((images, 0.2), (clips, 0.3)):
        assert float(np.std(rows / length)) > least
    shares = (images / length)[images > 0]
    assert float(np.quantile(shares, 0.05)) < 0.45
    assert float(np.quantile(shares, 0.95)) > 0.85


def test_whole_minibatches_of_2560_ranks_are_drawn_at_once() -> None:
    """Shares do not depend on how many are drawn, nor where one stops."""
    many = sample_modalities(153_600)
    assert many.number == 153_600
    assert float((many.seconds > 0).mean()) == pytest.approx(302 / 966, abs=0.005)
