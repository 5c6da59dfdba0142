"""Which layers of a model attend to a window only, read from its configuration."""

from __future__ import annotations

from odc.balance.costs.configs import Config
from odc.balance.costs.families import Family

# The second names are what configurations of older versions of transformers say.
_LAYER_TYPES = {
    "full_attention": False,
    "attention": False,
    "sliding_attention": True,
}


def read_windows(config: Config, family: Family, num_layers: int) -> list[int | None]:
    """The window of each layer in tokens, the token itself included; None: all tokens before it.

    As in transformers: ``use_sliding_window`` switches windows off, ``layer_types`` says which layers have one,
    and without it the family's rule does:

    - ``every``: all layers.
    - ``upper``: layers from ``max_window_layers`` on (Qwen2, Qwen3).
    - ``lower_even``: layers 0, 2, 4, ... below ``max_window_layers`` (Qwen2-MoE).
    - ``pattern``: all but every ``sliding_window_pattern``-th layer (Gemma 2 and 3).
    - ``none``: the family has no windows, whatever its configuration says.
    - ``guess``: ``upper`` or ``pattern`` if their field is there, else ``every``.

    Raises:
        ValueError: a layer type is unknown, or there is no window for a layer that has one.
    """
    has_window = _by_layer_types(config, num_layers)
    off = not config.flag("use_sliding_window", family.window_default)
    if has_window is None:
        if off or not config.count("sliding_window"):
            return [None] * num_layers
        has_window = _by_rule(config, family, num_layers)
    if off or not any(has_window):
        return [None] * num_layers
    window = config.size("sliding_window")
    return [window if windowed else None for windowed in has_window]


def _by_layer_types(config: Config, num_layers: int) -> list[bool] | None:
    types = config.per_layer("layer_types", num_layers)
    if types is None:
        return None
    if unknown := sorted({str(kind) for kind in types if kind not in _LAYER_TYPES}):
        raise ValueError(
            f"layer_types of the config has {', '.join(unknown)}: expected full_attention and sliding_attention, "
            "the cost of other layers is not known; measure some lengths and use fit_cost instead"
        )
    return [_LAYER_TYPES[str(kind)] for kind in types]


def _by_rule(config: Config, family: Family, num_layers: int) -> list[bool]:
    rule = family.windows
    if rule == "guess":
        rule = "pattern" if config.get("sliding_window_pattern") else "every"
        rule = "upper" if config.get("max_window_layers") is not None else rule
    layers = range(num_layers)
    if rule == "pattern":
        pattern = config.size("sliding_window_pattern", default=family.window_pattern)
        return [(layer + 1) % pattern != 0 for layer in layers]
    # The default of transformers, of no meaning for a model of another number of layers.
    limit = 28 if config.get("max_window_layers") is None else config.count("max_window_layers")
    if rule == "upper":
        return [layer >= limit for layer in layers]
    if rule == "lower_even":
        return [layer % 2 == 0 and layer < limit for layer in layers]
    return [rule == "every"] * num_layers
