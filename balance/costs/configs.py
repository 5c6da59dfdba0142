"""Open a model's configuration, wherever it comes from, and read checked values from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from odc.balance.costs.presets import preset, preset_names
from odc.errors import shown

# Fields that announce layers whose cost follows other laws. Not listed by model: new models reuse the names.
_REFUSED = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_key_heads": "linear attention",
    "linear_attn_config": "linear attention",
    "mamba_d_state": "Mamba layers",
    "mamba_d_conv": "Mamba layers",
    "ssm_state_size": "state-space layers",
    "state_size": "state-space layers",
    "attn_layer_period": "a mixture of attention and state-space layers",
    "conv_L_cache": "convolution layers",
    "lru_width": "recurrent layers",
    "attention_chunk_size": "chunked attention",
    "num_kv_shared_layers": "layers that share keys and values",
    "global_head_dim": "heads of different sizes",
    "moe_layer_start_index": "experts placed by moe_layer_start_index",
    "is_encoder_decoder": "an encoder and a decoder",
}


@dataclass(frozen=True)
class Config:
    """One configuration, read by field names.

    Build it with :func:`open_config`.
    """

    source: object
    """A mapping, or an object with attributes."""

    outer: object = None
    """The configuration of the whole multimodal model whose ``text_config`` this is; None: there is none."""

    def get(self, *names: str) -> object:
        """The first value that is there and not None; None if there is no such."""
        for name in names:
            value = _read(self.source, name)
            if value is not None:
                return value
        return None

    def size(self, *names: str, default: int | None = None) -> int:
        """The first of these fields that is there.

        Raises:
            ValueError: none is there and there is no default, or it is not a positive integer.
        """
        for name in names:
            value = self.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
                raise ValueError(f"{name}={shown(value)} in the config: expected a positive integer")
            return int(value)
        if default is None:
            raise ValueError(
                f"the config has no {' or '.join(names)}: put it there. A config.json may leave out defaults: "
                "then give the config object, as transformers.AutoConfig.from_pretrained loads it"
            )
        return default

    def count(self, *names: str) -> int:
        """Like :meth:`size`, but 0 is allowed, and is the default."""
        return 0 if self.get(*names) in (None, 0) else self.size(*names)

    def flag(self, name: str | bool, default: bool) -> bool:
        """A field that says yes or no. A bool in place of its name: that is so, whatever the config says.

        Raises:
            ValueError: it is there and is not a bool.
        """
        value = name if isinstance(name, bool) else self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{name}={shown(value)} in the config: expected true or false")
        return value

    def per_layer(self, name: str, num_layers: int) -> list[object] | None:
        """A field with one entry for each layer; None if it is not there.

        Raises:
            ValueError: it is there, and is not a list of ``num_layers`` entries.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != num_layers:
            per_layer = f"a list with one entry per layer, {num_layers}"
            raise ValueError(f"{name}={shown(value)} in the config: expected {per_layer}")
        return list(value)

    @property
    def model_type(self) -> str:
        """Which family of models this is, as transformers calls it; empty if the config does not say."""
        return str(self.get("model_type") or "")

    def tied(self, default: bool) -> bool:
        """Whether the head shares the embedding's weights. The whole model decides, else its text part."""
        outer = Config(self.outer).get("tie_word_embeddings")
        return outer if isinstance(outer, bool) else self.flag("tie_word_embeddings", default)


def open_config(config: object) -> Config:
    """``config`` for reading: a mapping, an object, a path of a ``config.json`` or its folder, or a preset's name.

    A configuration that has a ``text_config`` (multimodal models) stands for that one.

    Raises:
        ValueError: there is no such file or preset, the file is not a JSON object, or the model has parts that
            the cost models of this package do not describe.
    """
    source = _load(config) if isinstance(config, (str, Path)) else config
    text = _read(source, "text_config")
    opened = Config(source) if text is None else Config(text, outer=source)
    for name, reason in _REFUSED.items():
        if opened.get(name):
            raise ValueError(
                f"the config of {opened.model_type or 'this model'} has {name}={shown(opened.get(name))}: {reason}, "
                "whose cost is not known here; measure some lengths and use fit_cost instead"
            )
    return opened


def _load(config: str | Path) -> object:
    path = Path(config)
    if isinstance(config, str) and config.lower() in preset_names():
        return preset(config)
    try:
        if path.is_dir():
            path /= "config.json"
        exists = path.exists()
    except OSError as error:  # a name that no file can have
        raise ValueError(f"{shown(str(config))} is no path of a model's config.json: {error.strerror}") from None
    if not exists:
        if isinstance(config, str) and path.suffix != ".json":
            return preset(config)
        raise ValueError(f"there is no file {shown(str(config))}: expected the path of a model's config.json")
    try:
        loaded = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} holds a {type(loaded).__name__}: expected a JSON object, a model's config.json")
    return loaded


def _read(source: object, name: str) -> object:
    if isinstance(source, Mapping):
        return source.get(name)
    try:
        return getattr(source, name, None)
    except Exception as error:  # transformers has configs whose values differ from layer to layer, and that say so
        raise ValueError(f"the config's {name} cannot be read: {error}") from error
