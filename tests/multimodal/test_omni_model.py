"""Layer 3: one process, and two ranks. The omni-modal example in phases against the model's own forward."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_ranks
from torch.utils.flop_counter import FlopCounterMode

import odc

pytest.importorskip("transformers", reason="the examples need transformers and tokenizers (extra: examples)")

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))  # the examples import each other as scripts do
omni_data: Any = importlib.import_module("omni_data")
omni_model: Any = importlib.import_module("omni_model")

IGNORED = -100
UNUSED = "model.audio_tower.audio_bos_eos_token.weight"
"""Qwen2.5-Omni's talker uses it."""

Samples = Sequence[Any]


DATASET = omni_data.OmniDataset(200)


def samples_of(*tasks: str) -> list[Any]:
    """The next sample of each task in turn."""
    indices = iter(range(len(DATASET)))
    return [DATASET[next(i for i in indices if DATASET.recipe(i).task == task)] for task in tasks]


@pytest.fixture(scope="module")
def samples() -> list[Any]:
    return samples_of(*omni_data.TASKS, "text", "images", "transcript")


@pytest.fixture(scope="module")
def precise() -> Any:
    """In float64, where rounding cannot hide an error."""
    return omni_model.tiny_omni(1).double()


def encode(model: Any, samples: Samples) -> dict[str, list[torch.Tensor]]:
    return {
        "image": model.encode_images([image for sample in samples for image in sample.images]),
        "audio": model.encode_audio([clip for sample in samples for clip in sample.audio]),
    }


def phases_loss(model: Any, samples: Samples) -> torch.Tensor:
    loss: torch.Tensor = model.language([sample.sequence for sample in samples], encode(model, samples))
    return loss


def whole_loss(model: Any, samples: Samples) -> torch.Tensor:
    """transformers' own forward on a padded batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    columns = [sample.sequence.T for sample in samples]
    labels = pad([column[1] for column in columns], batch_first=True, padding_value=IGNORED)
    inputs = {
        "input_ids": pad([column[0] for column in columns], batch_first=True),
        "attention_mask": pad([torch.ones_like(column[0]) for column in columns], batch_first=True),
    }
    if images := [image for sample in samples for image in sample.images]:
        inputs["pixel_values"] = torch.cat([image.patches for image in images])
        inputs["image_grid_thw"] = torch.stack([image.grid_thw for image in images])
    if clips := [clip.T for sample in samples for clip in sample.audio]:
        inputs["input_features"] = pad(clips, batch_first=True).transpose(1, 2)
        inputs["feature_attention_mask"] = pad([torch.ones(len(clip)).long() for clip in clips], batch_first=True)
    mean: torch.Tensor = model(**inputs, labels=labels).loss
    return mean * (labels[:, 1:] != IGNORED).sum()


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Of each parameter, relative to its largest."""
    assert given.keys() == expected.keys()
    for name, wanted in expected.items():
        largest = float(wanted.abs().max())
        assert largest > 0, f"{name}: no gradient to compare"
        assert float((given[name] - wanted).abs().max()) <= tolerance * largest, name


@pytest.mark.parametrize(("dtype", "tied", "tolerance"), [(torch.float64, True, 1e-12), (torch.float32, False, 1e-5)])
def test_phases_give_loss_and_gradients_of_the_whole_forward(
    samples: list[Any], dtype: torch.dtype, tied: bool, tolerance: float
) -> None:
    model = omni_model.tiny_omni(1, omni_model.tiny_config(tie_embeddings=tied)).to(dtype)
    stock = omni_model.Qwen2_5OmniThinkerForConditionalGeneration._from_config(
        omni_model.tiny_config(tie_embeddings=tied), attn_implementation="sdpa"
    ).to(dtype)
    stock.load_state_dict(model.state_dict())
    loss = phases_loss(model, samples)
    loss.backward()
    found = gradients(model)
    assert found.keys() == {name for name, _ in model.named_parameters()} - {UNUSED}

    one_by_one = torch.zeros(())
    for sample in samples:
        own = whole_loss(stock, [sample])
        own.backward()
        one_by_one += own.detach()
    torch.testing.assert_close(loss, one_by_one, rtol=1e-5, atol=0.0)
    assert_same_gradients(found, gradients(stock), tolerance)

    batch = whole_loss(stock, samples)
    batch.backward()
    torch.testing.assert_close(loss, batch, rtol=1e-5, atol=0.0)
    assert_same_gradients(found, gradients(stock), tolerance)


def test_packing_changes_no_sample(precise: Any, samples: list[Any]) -> None:
    with torch.no_grad():
        alone = [phases_loss(precise, [sample]) for sample in samples]
        for order in (samples, samples[::-1]):
            torch.testing.assert_close(phases_loss(precise, order), torch.stack(alone).sum(), rtol=1e-6, atol=0.0)
        half = phases_loss(precise, samples[:4])
    torch.testing.assert_close(half, torch.stack(alone[:4]).sum(), rtol=1e-6, atol=0.0)


def test_the_last_token_of_a_sample_does_not_predict_the_next_sample(precise: Any) -> None:
    texts = [sample.sequence.clone() for sample in samples_of("text", "text")]
    for sequence in texts:
        sequence[:, 1] = sequence[:, 0]  # the first tokens are labelled, too
    with torch.no_grad():
        alone = sum(precise.language([sequence], {}) for sequence in texts)
        torch.testing.assert_close(precise.language(texts, {}), alone, rtol=1e-6, atol=0.0)


def test_items_of_a_batch_do_not_influence_one_another(precise: Any, samples: list[Any]) -> None:
    """Clips end in chunks of different lengths, so most are padded in a batch."""
    images = [image for sample in samples for image in sample.images]
    clips = [clip for sample in samples for clip in sample.audio] + [
        torch.randn(omni_data.NUM_MELS, n) for n in (3, 201)
    ]
    assert len(images) > 5
    assert len({clip.shape[1] % 200 for clip in clips}) > 4
    with torch.no_grad():
        for encode_items, items in ((precise.encode_images, images), (precise.encode_audio, clips)):
            for item, together in zip(items, encode_items(items), strict=True):
                torch.testing.assert_close(together, encode_items([item])[0], rtol=0.0, atol=1e-12)
    assert precise.encode_images([]) == precise.encode_audio([]) == []


def test_text_needs_no_encoder(precise: Any) -> None:
    texts = samples_of("text", "text")
    phases_loss(precise, texts).backward()
    found = gradients(precise)
    assert found.keys() == {
        name for name, _ in precise.named_parameters() if "visual" not in name and "audio" not in name
    }


def test_a_frozen_encoder_has_no_gradient_and_changes_no_other(precise: Any, samples: list[Any]) -> None:
    phases_loss(precise, samples).backward()
    expected = gradients(precise)
    frozen = copy.deepcopy(precise)
    frozen.model.visual.requires_grad_(False)
    phases_loss(frozen, samples).backward()
    found = gradients(frozen)
    assert_same_gradients(found, {name: g for name, g in expected.items() if "visual" not in name}, 1e-12)


def test_lengths_and_positions_are_the_models(precise: Any, samples: list[Any]) -> None:
    for sample in samples:
        length, items = omni_data.lengths(sample)
        encoded = encode(precise, [sample])
        assert {k: [item.output for item in items[k]] for k in items} == {
            k: [len(e) for e in encoded[k]] for k in encoded
        }
        assert [item.encoder for item in items["image"]] == [len(image.patches) for image in sample.images]
        assert length == len(sample.sequence)
        positions, _ = precise.model.get_rope_index(
            sample.sequence[None, :, 0],
            torch.stack([image.grid_thw for image in sample.images]) if sample.images else None,
            attention_mask=torch.ones(1, length),
            audio_seqlens=torch.tensor([clip.shape[1] for clip in sample.audio]) if sample.audio else None,
        )
        torch.testing.assert_close(sample.sequence[:, 2:].T, positions[:, 0])
    with torch.no_grad():
        clips = [torch.zeros(omni_data.NUM_MELS, n) for n in range(3, 12)]
        assert [len(encoded) for encoded in precise.encode_audio(clips)] == [
            omni_data.audio_lengths(n).output for n in range(3, 12)
        ]


def test_dummies_are_the_smallest_items(precise: Any) -> None:
    image, clip = omni_data.dummy_image(), omni_data.dummy_audio()
    assert [len(encoded) for encoded in precise.encode_images([image]) + precise.encode_audio([clip])] == [1, 1]
    assert len(precise.encode_audio([clip[:, 1:]])[0]) == 0
    assert precise.language([omni_data.dummy_sequence()], {}).item() == 0.0


def test_embeddings_must_fit_the_placeholders(precise: Any, samples: list[Any]) -> None:
    embeddings = encode(precise, samples)
    embeddings["image"].pop()
    with pytest.raises(ValueError, match=r"image embeddings of \d+ items for \d+ places: expected those of all items"):
        precise.language([sample.sequence for sample in samples], embeddings)


def test_costs_are_the_counted_flops() -> None:
    """All but the gradients of what is given to the encoders' first layers, which nobody asks for."""
    model = omni_model.tiny_omni(0)
    model.set_attn_implementation({"vision_config": "eager", "audio_config": "eager", "text_config": "eager"})
    cost, hidden = omni_model.costs(model.config), model.config.text_config.hidden_size

    def counted(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run().sum().backward()
        return int(counter.get_total_flops())

    first = omni_data.dummy_image().patches.shape[1] * hidden
    for side in (8, 24):  # whole windows
        image = omni_data.patchify(torch.zeros(3, side * omni_data.PATCH_SIZE, side * omni_data.PATCH_SIZE))
        flops = counted(lambda image=image: model.encode_images([image])[0])
        assert flops == cost["image"](side**2) - 2 * first * side**2
    for num_frames in (200, 600):  # whole chunks
        clip = torch.zeros(omni_data.NUM_MELS, num_frames)
        flops = counted(lambda clip=clip: model.encode_audio([clip])[0])
        assert flops == cost["audio"](num_frames) - 2 * 3 * omni_data.NUM_MELS * hidden * num_frames
    sequence = omni_data.dummy_sequence().repeat(100, 1)
    causal = cost["language"].a * 100**2  # the half of the pairs that is masked, but computed
    assert counted(lambda: model.language([sequence], {})) == cost["language"](100) + causal


def test_weights_depend_on_the_seed_alone() -> None:
    before = torch.get_rng_state()
    first, second, third = (omni_model.tiny_omni(seed).state_dict() for seed in (0, 0, 1))
    torch.testing.assert_close(first, second, rtol=0.0, atol=0.0)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])
    assert torch.equal(before, torch.get_rng_state())


def test_any_rank_makes_a_sample_alone() -> None:
    dataset, other = omni_data.OmniDataset(50, seed=3), omni_data.OmniDataset(9, seed=3)
    mine, theirs = vars(other[8]), vars(dataset[8])
    assert mine.pop("task") == theirs.pop("task") == dataset.recipe(8).task
    torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.0)
    assert not torch.equal(dataset[8].sequence, omni_data.OmniDataset(50, seed=4)[8].sequence)
    assert all(dataset.lengths(i) == omni_data.lengths(dataset[i]) for i in range(20))
    with pytest.raises(IndexError, match="there are 9 samples"):
        other[9]
    with pytest.raises(ValueError, match="'video'.* not known: expected some of"):
        omni_data.OmniDataset(1, tasks={"video": 1.0})


def test_tasks_differ_in_their_modalities() -> None:
    """Modality composition incoherence (OrchMLLM, figure 3): sound goes with as much text, or with hardly any."""
    expected = {"transcript": (0.9, 1.1), "spoken question": (0.0, 0.5)}
    dataset = omni_data.OmniDataset(400)
    recipes = [dataset.recipe(i) for i in range(len(dataset))]
    measured = [omni_data.lengths(recipe) for recipe in recipes]
    assert {recipe.task for recipe in recipes} == set(omni_data.TASKS)
    for modality in ("image", "audio"):
        sizes = [item.encoder for m in measured for item in m.items[modality]]
        assert max(sizes) >= 10 * min(sizes)
        shares = [sum(item.output for item in m.items[modality]) / m.length for m in measured]
        assert sum(share == 0 for share in shares) > 100
        assert sum(share > 0.5 for share in shares) > 20
    for recipe, m in zip(recipes, measured, strict=True):
        ratio = len(recipe.answer) / max(1, sum(item.output for item in m.items["audio"]))
        if recipe.task in expected:
            assert expected[recipe.task][0] <= ratio < expected[recipe.task][1], recipe.task


def test_a_sentence_is_labelled_and_the_rest_is_not() -> None:
    (sample,) = samples_of("caption")
    tokens, labels = sample.sequence[:, 0], sample.sequence[:, 1]
    answer = labels[labels != IGNORED]
    assert bytes(answer[:-1].tolist()).decode().endswith(".")
    assert answer[-1] == omni_data.END
    assert torch.equal(tokens[-len(answer) :], answer)
    assert tokens[labels == IGNORED][0] == omni_data.IMAGE_START


def test_patches_of_a_token_stand_together() -> None:
    side = omni_data.PATCH_SIZE
    pixels = torch.arange(6)[:, None] * 4 + torch.arange(4)  # a number per patch
    pixels = pixels.repeat_interleave(side, 0).repeat_interleave(side, 1).expand(3, -1, -1).float()
    image = omni_data.patchify(pixels)
    assert image.grid_thw.tolist() == [1, 6, 4]
    assert image.patches[:, 0].tolist()[:8] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert bool((image.patches == image.patches[:, :1]).all())
    with pytest.raises(ValueError, match="expected sides that are multiples of 8"):
        omni_data.patchify(pixels[:, 4:])


# Under FSDP2

CASES = ["tied, vision frozen", "phase by phase", "dummies on rank 1", "tied, none on rank 1, ODC"]


def check_sharded(rank: int, world_size: int) -> list[str]:
    """Compare ranks with one process; the cases in which they were the same."""
    everything = samples_of("image and voice", "images", "transcript", "text", "image and voice", "images", "text")
    done = []
    for case in CASES:
        model = omni_model.tiny_omni(1, omni_model.tiny_config(32, tie_embeddings="tied" in case))
        model.model.visual.requires_grad_("frozen" not in case)
        single = copy.deepcopy(model)
        omni_model.shard(model)
        parts = [everything[:4], everything[-1:] if "rank 1" in case else everything[4:6]]
        session = odc.patch_fsdp(model) if "ODC" in case else None
        for _ in range(2):  # also when FSDP has done it once
            model.zero_grad()
            with session.minibatch() if session else nullcontext():
                total = backward(model, parts[rank], case).detach()
        dist.all_reduce(total)
        found = {name: p.grad.full_tensor() * world_size for name, p in model.named_parameters() if p.grad is not None}
        if session:
            session.close()
        expected = phases_loss(single, parts[0] + parts[1])
        expected.backward()
        torch.testing.assert_close(total, expected.detach(), rtol=1e-5, atol=0.0)
        assert_same_gradients(found, gradients(single), 1e-5)
        done.append(case)
    return done


def backward(model: Any, samples: Samples, case: str) -> torch.Tensor:
    """The loss, after its backward."""
    if case == "phase by phase":
        return backward_by_phase(model, samples)
    loss = loss_with_dummies(model, samples) if "dummies" in case else phases_loss(model, samples)
    loss.backward()
    return loss


def loss_with_dummies(model: Any, samples: Samples) -> torch.Tensor:
    """Collectives of an encoder are run by all ranks, and in the backward, too."""
    encoded = encode(model, samples)
    loss = torch.zeros(())
    if not encoded["image"]:
        loss = loss + 0.0 * model.encode_images([omni_data.dummy_image()])[0].sum()
    if not encoded["audio"]:
        loss = loss + 0.0 * model.encode_audio([omni_data.dummy_audio()])[0].sum()
    language: torch.Tensor = model.language([sample.sequence for sample in samples], encoded)
    return language + loss


def backward_by_phase(model: Any, samples: Samples) -> torch.Tensor:
    """As if the encoders' outputs came from elsewhere; images are encoded in two batches."""
    images = [image for sample in samples for image in sample.images]
    clips = [clip for sample in samples for clip in sample.audio]
    found = {
        "image": [*model.encode_images(images[:1]), *model.encode_images(images[1:])],
        "audio": model.encode_audio(clips),
    }
    given = {name: [tensor.detach().requires_grad_() for tensor in tensors] for name, tensors in found.items()}
    loss: torch.Tensor = model.language([sample.sequence for sample in samples], given)
    loss.backward()
    for name in ("audio", "image"):
        torch.autograd.backward(found[name], [tensor.grad for tensor in given[name]])
    return loss


@pytest.mark.extended
def test_sharded_phases_give_the_single_process_gradients() -> None:
    """Also where a rank has dummies in place of images and sound, and with ODC without any."""
    assert run_ranks(2, check_sharded) == [CASES, CASES]
