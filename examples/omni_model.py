"""A real omni-modal model, tiny and with random weights, in phases: encode images, encode audio, language model.

It is Qwen2.5-Omni's thinker: windowed attention over an image's patches, convolutions and chunked attention over sound,
multimodal rotary positions in the language model. Its own forward does everything for one batch of samples. Here each
phase is a method that takes a list of items or samples, packs them one behind the other and pads nothing, so that each
phase can have a batch of its own:

    images = model.encode_images([image for sample in mine for image in sample.images])
    audio = model.encode_audio([clip for sample in mine for clip in sample.audio])
    loss = model.language([sample.sequence for sample in mine], {"image": images, "audio": audio})

The sum of the losses and all gradients are those of the model's own forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import omni_data
import packed_attention
import torch
import torch.nn.functional as F
from omni_data import Image
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

from odc.balance import QuadraticCost, TransformerCost

PHASES = ("encode_images", "encode_audio", "language")
_FLOPS = 6.0  # of a multiply-add, forward and backward


class OmniModel(Qwen2_5OmniThinkerForConditionalGeneration):
    """The thinker of Qwen2.5-Omni with a method for each phase."""

    def encode_images(self, images: Sequence[Image]) -> list[torch.Tensor]:
        """Embeddings of each image, (num_patches / MERGE_SIZE**2, hidden_size), none influenced by another.

        All patches go through the vision encoder as one sequence.
        """
        if not images:
            return []
        grids = torch.stack([image.grid_thw for image in images])
        encoded = self.model.visual(torch.cat([image.patches for image in images]), grid_thw=grids).pooler_output
        return _apart(encoded, [omni_data.image_lengths(*grid[1:]).output for grid in grids.tolist()])

    def encode_audio(self, clips: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Embeddings of each clip of log-mel features, (num_mels, num_frames): (about num_frames / 4, hidden_size).

        The encoder cuts clips into chunks of ``2 * n_window`` frames. For its convolutions only, it pads shorter ones
        to the longest, and masks what that adds.
        """
        if not clips:
            return []
        num_frames = torch.tensor([clip.shape[1] for clip in clips])
        encoded = self.model.audio_tower(torch.cat(list(clips), dim=1), feature_lens=num_frames).last_hidden_state
        return _apart(encoded, [omni_data.audio_lengths(n).output for n in num_frames.tolist()])

    def language(
        self, sequences: Sequence[torch.Tensor], embeddings: Mapping[str, Sequence[torch.Tensor]]
    ) -> torch.Tensor:
        """Sum of the cross entropies of the labelled tokens of all samples, a float32 scalar.

        Args:
            sequences: of each sample (:attr:`omni_data.Sample.sequence`), (length, 5); at least one. They are packed:
                each attends to itself only.
            embeddings: of "image" and "audio", those of all items, in the order of the samples and of their items.

        Raises:
            ValueError: there are more or fewer embeddings than placeholders.
        """
        rows = torch.cat(list(sequences))
        tokens, positions = rows[:, 0], rows[:, 2:].T[:, None]
        embedded = self.model.language_model.embed_tokens(tokens[None])
        for modality, placeholder in (("image", omni_data.IMAGE), ("audio", omni_data.AUDIO)):
            embedded = _put(embedded, tokens == placeholder, embeddings.get(modality, ()), modality)
        lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
        hidden = self.model.language_model(
            inputs_embeds=embedded, position_ids=positions, cu_seqlens=lengths.cumsum(0), use_cache=False
        ).last_hidden_state
        logits = self.lm_head(hidden)[0].float()
        # The last token of a sample predicts nothing, least of all the next sample's first.
        expected = torch.cat([F.pad(sequence[1:, 1], (0, 1), value=omni_data.IGNORED) for sequence in sequences])
        return F.cross_entropy(logits, expected, ignore_index=omni_data.IGNORED, reduction="sum")


def _apart(encoded: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Copies, each in memory of its own: FSDP2 warns of views, and an item lives as long as it is needed by itself."""
    return [part.clone() for part in encoded.split(list(sizes))]


def _put(embedded: torch.Tensor, where: torch.Tensor, items: Sequence[torch.Tensor], modality: str) -> torch.Tensor:
    """``embedded`` (1, num_tokens, hidden_size) with the items' rows, one after the other, where ``where`` is true."""
    num_rows, num_places = sum(len(item) for item in items), int(where.sum())
    if num_rows != num_places:
        raise ValueError(
            f"{num_rows} {modality} embeddings of {len(items)} items for {num_places} places: expected those of all "
            "items of these samples, in the samples' order"
        )
    if not items:
        return embedded
    return embedded.masked_scatter(where[None, :, None], torch.cat(list(items)))


def tiny_config(hidden_size: int = 64, *, tie_embeddings: bool = False) -> Qwen2_5OmniThinkerConfig:
    """A configuration of which each phase takes comparable time on a CPU for the samples of ``omni_data.py``.

    Args:
        hidden_size: of all three parts, a multiple of 32.
        tie_embeddings: one matrix for embedding and head (Qwen2.5-Omni has two).
    """
    if hidden_size < 32 or hidden_size % 32:
        raise ValueError(f"hidden_size={hidden_size}: expected a multiple of 32")
    num_heads = hidden_size // 16
    return Qwen2_5OmniThinkerConfig(
        vision_config={
            "depth": 4,
            "hidden_size": hidden_size,
            "intermediate_size": 3 * hidden_size,
            "num_heads": num_heads,
            "out_hidden_size": hidden_size,
            "patch_size": omni_data.PATCH_SIZE,
            "spatial_merge_size": omni_data.MERGE_SIZE,
            "temporal_patch_size": omni_data.TEMPORAL_PATCH_SIZE,
            "window_size": 8 * omni_data.PATCH_SIZE,
            "fullatt_block_indexes": [1, 3],
        },
        audio_config={
            "encoder_layers": 4,
            "d_model": hidden_size,
            "encoder_ffn_dim": 4 * hidden_size,
            "encoder_attention_heads": num_heads,
            "num_mel_bins": omni_data.NUM_MELS,
            "output_dim": hidden_size,
            "n_window": 100,
        },
        text_config={
            "vocab_size": omni_data.VOCAB_SIZE,
            "hidden_size": hidden_size,
            "intermediate_size": 4 * hidden_size,
            "num_hidden_layers": 2,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "tie_word_embeddings": tie_embeddings,
        },
        image_token_index=omni_data.IMAGE,
        video_token_index=omni_data.VIDEO,
        audio_token_index=omni_data.AUDIO,
        vision_start_token_id=omni_data.IMAGE_START,
        vision_end_token_id=omni_data.IMAGE_END,
        audio_start_token_id=omni_data.AUDIO_START,
        audio_end_token_id=omni_data.AUDIO_END,
        tie_word_embeddings=tie_embeddings,
    )


def tiny_omni(seed: int = 0, config: Qwen2_5OmniThinkerConfig | None = None) -> OmniModel:
    """The model, float32, with weights that depend on ``seed`` and ``config`` alone (default: ``tiny_config()``)."""
    attention = {"text_config": packed_attention.register(), "vision_config": "sdpa", "audio_config": "sdpa"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: OmniModel = OmniModel._from_config(config or tiny_config(), attn_implementation=attention)
    return model


def shard(model: OmniModel, mesh: DeviceMesh | None = None) -> OmniModel:
    """Apply FSDP2 in place: a unit for each block or layer, for what is left of each encoder, for embedding and head.

    A phase begins at the root: FSDP2 takes the first module that runs for the root of all, so none of its parts may be
    called by itself before. The root has no parameters of its own: a phase gathers what it computes with and no more.
    """
    thinker, language = model.model, model.model.language_model
    for layer in (*thinker.visual.blocks, *thinker.audio_tower.layers, *language.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(thinker.visual, mesh=mesh)
    fully_shard(thinker.audio_tower, mesh=mesh)
    # What the end of the forward needs, the backward needs first.
    if model.lm_head.weight is language.embed_tokens.weight:
        fully_shard([language.embed_tokens, language.norm, model.lm_head], reshard_after_forward=False, mesh=mesh)
    else:
        fully_shard(language.embed_tokens, mesh=mesh)
        fully_shard([language.norm, model.lm_head], reshard_after_forward=False, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule)
    for phase in PHASES:
        register_fsdp_forward_method(model, phase)
    return model


def costs(config: Qwen2_5OmniThinkerConfig) -> dict[str, QuadraticCost]:
    """FLOPs of forward and backward of "image", "audio" and "language", by patches, frames and tokens.

    Matrix products only; the backward counts as two forwards. Attention's pairs cost ``a`` where all attend to all
    (half of them if causal), and are part of ``b`` in windows and chunks, which count as full.
    """
    return {
        "image": _vision_cost(config.vision_config),
        "audio": _audio_cost(config.audio_config),
        "language": _language_cost(config.text_config),
    }


def _vision_cost(config: Any) -> QuadraticCost:
    hidden, merged = config.hidden_size, config.hidden_size * config.spatial_merge_size**2
    pair = 2 * hidden  # a score, and its part of the weighted sum
    window = (config.window_size // config.patch_size) ** 2
    num_full = len(config.fullatt_block_indexes)
    block = 4 * hidden**2 + 3 * hidden * config.intermediate_size
    embedding = config.in_channels * config.temporal_patch_size * config.patch_size**2 * hidden
    merger = merged * (merged + config.out_hidden_size) / config.spatial_merge_size**2
    per_patch = config.depth * block + (config.depth - num_full) * window * pair + embedding + merger
    return QuadraticCost(a=_FLOPS * num_full * pair, b=_FLOPS * per_patch)


def _audio_cost(config: Any) -> QuadraticCost:
    hidden = config.d_model
    # After the convolutions, a position is two frames, and attends to a chunk of n_window positions.
    layer = 4 * hidden**2 + 2 * hidden * config.encoder_ffn_dim + config.n_window * 2 * hidden
    convolutions = 3 * config.num_mel_bins * hidden + 3 * hidden**2 / 2
    per_frame = convolutions + config.encoder_layers * layer / 2 + hidden * config.output_dim / 4
    return QuadraticCost(a=0.0, b=_FLOPS * per_frame)


def _language_cost(config: Any) -> QuadraticCost:
    cost = TransformerCost.from_config(config)
    return QuadraticCost(a=cost.flops_per_squared_token, b=cost.flops_per_token)
