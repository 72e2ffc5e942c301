"""Defines the model sizes of papers, and brings a trial's model to one of these sizes.

A scale fixes the width of the model and of its heads. The rule, the block and everything else stay the trial's. The
depth is the scale's if the model then has the number of parameters that the scale is named after. Mixers differ in
size, so it often has not. Then the depth is chosen that brings the model nearest to that number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.costs import CostCounter
from deltalab.models.settings.layer_list import Layer
from deltalab.models.spec import ModelSpec

WITHIN = 0.03
"""How far the number of parameters may be from the number that a scale is named after, as a share of the latter."""

VOCABULARY = 32_000
"""The vocabulary of a scale without a tokenizer: that of Llama 2 and Mistral, which the papers' baselines use."""

PADDED = 64
"""A tokenizer's vocabulary is padded to a multiple of this, for the speed of the product with the output matrix."""


@dataclass(frozen=True)
class Scale:
    """A size of a paper, with its training.

    Attributes:
        parameters: The number of parameters that the scale is named after.
        d_model: The width of the model.
        layers: The depth of the model.
        head_dim: The width of a head's keys and values.
        tokens: The tokens of the whole training.
        batch: The tokens of a step.
        length: The tokens of a sequence.
        source: The paper, and the table or section in it.
    """

    parameters: float
    d_model: int
    layers: int
    head_dim: int
    tokens: float
    batch: int
    length: int
    source: str


COMBA_PAPER = "Comba (Hu et al. 2025, arXiv:2506.02475)"
LENGTH_IS_OURS = "; the length is ours"
RLA_PAPER = "Enhancing Linear Attention with Residual Learning (RLA and RDN, 2025)"
LLAMA_PAPER = "LLaMA (Touvron et al. 2023, arXiv:2302.13971)"
SCALES: Mapping[str, Scale] = {
    "340M": Scale(
        3.4e8, 1024, 24, 128, 15e9, 2**19, 2048,
        f"{COMBA_PAPER}, table 6: 340M, 15B tokens, batches of 0.5M tokens{LENGTH_IS_OURS}",
    ),
    "1.3B": Scale(
        1.3e9, 2048, 24, 128, 100e9, 2**20, 2048,
        f"{COMBA_PAPER}, table 6: 1.3B, 100B tokens, batches of 1M tokens{LENGTH_IS_OURS}",
    ),
    "1.5B": Scale(
        1.55e9, 2048, 16, 128, 100e9, 2**22, 2048,
        f"{RLA_PAPER}, tables 6 and 7: 1.55B, 100B tokens, batches of 4M tokens{LENGTH_IS_OURS}",
    ),
    "2.7B": Scale(
        2.7e9, 2560, 32, 128, 100e9, 2**21, 4096,
        "Gated KalmaNet, section 5.3.1: 2.8B, 100B tokens, batches of 2M tokens, 4K context",
    ),
    **{
        name: Scale(
            parameters, d_model, layers, 128, tokens, 2**22, 2048,
            f"{LLAMA_PAPER}, table 2: {parameters / 1e9:g}B, {tokens / 1e12:.1f}T tokens, batches of 4M tokens"
            f"{LENGTH_IS_OURS}",
        )
        for name, parameters, d_model, layers, tokens in (
            ("7B", 6.7e9, 4096, 32, 1e12),
            ("13B", 13.0e9, 5120, 40, 1e12),
            ("33B", 32.5e9, 6656, 60, 1.4e12),
            ("65B", 65.2e9, 8192, 80, 1.4e12),
        )
    },
}  # fmt: skip
"""The scales by name. The papers give parameters, tokens and batches. RLA and LLaMA give widths and depths, too; others
are common for models of these names (GPT-3, Mamba). Heads of 128 are those of table 6 of RLA, and of LLaMA."""

OF_THE_WIDTH = ("gate_rank", "q_rank", "kv_rank", "mlp_width")
"""The settings that keep their ratio to d_model."""


def find_scale(name: str) -> Scale:
    """Returns the scale of a name.

    Raises:
        InputError: If no scale has the name.
    """
    if name not in SCALES:
        raise unknown("scale", name, SCALES, where="--scale")
    return SCALES[name]


def parameter_count(model: ModelSpec, counter: CostCounter | None = None) -> int:
    """Counts the numbers that a model trains.

    Args:
        model: The model.
        counter: Keeps what it has counted for the next call; None counts everything anew.
    """
    return (counter or CostCounter()).costs(model, 1).parameters


def widened(model: ModelSpec, scale: Scale, vocabulary: int) -> dict[str, Any]:
    """Returns the fields of `ModelSpec` that a scale changes besides the depth, with their new values.

    Heads get the scale's width. The widths of keys, of their rotary positions and of the MLP, the numbers of shared
    heads, and the ranks of gates and latents keep their ratios.

    Raises:
        InputError: If the new number of heads cannot be shared in groups of the same size.
    """
    heads = scale.d_model // scale.head_dim
    new: dict[str, Any] = {"vocab_size": vocabulary, "d_model": scale.d_model, "heads": heads}
    kept = ("key_dim", "rope_dim", "qk_heads", "kv_heads", *OF_THE_WIDTH)
    before = {name: getattr(model, name) for name in kept}
    new |= _proportional(before, model, model.heads, heads, scale)
    if model.experts is not None and (width := model.experts["width"]):
        new["experts"] = {**model.experts, "width": max(1, round(width * scale.d_model / model.d_model))}
    if not isinstance(model.layers, int):
        new["layers"] = tuple(_entry(entry, model, scale) for entry in model.layers)
    return {name: value for name, value in new.items() if value != getattr(model, name)}


def _entry(entry: Layer, model: ModelSpec, scale: Scale) -> Layer:
    """An entry of a list of layers. The settings that the entry overrides grow with the model."""
    if isinstance(entry, str) or not (settings := entry.get("layer")):
        return entry
    before = settings.get("heads", model.heads)
    if before * scale.d_model // scale.head_dim % model.heads:
        raise InputError(
            f"--scale: a layer with {before} heads beside {model.heads} cannot keep that ratio; give model.layers with "
            "--set"
        )
    heads = before * (scale.d_model // scale.head_dim) // model.heads
    new_heads = {"heads": heads} if "heads" in settings else {}
    return {**entry, "layer": {**settings, **new_heads, **_proportional(settings, model, before, heads, scale)}}


def _proportional(
    settings: Mapping[str, Any], model: ModelSpec, before: int, heads: int, scale: Scale
) -> dict[str, Any]:
    """The settings that keep their ratio to the width, or to the heads, whose number goes from `before` to `heads`."""
    new: dict[str, Any] = {}
    for name in ("qk_heads", "kv_heads"):
        if shared := settings.get(name):
            if heads % (before // shared):
                raise InputError(
                    f"--scale: model.{name} {shared} of {before} heads are groups of {before // shared}, which do not "
                    f"divide {heads} heads; give model.{name} with --set"
                )
            new[name] = heads // (before // shared)
    if key_dim := settings.get("key_dim"):
        new["key_dim"] = max(1, round(key_dim * before / model.d_model * scale.d_model / heads))
    if rope_dim := settings.get("rope_dim"):
        new["rope_dim"] = 2 * max(1, round(rope_dim * before / model.d_model * scale.d_model / heads / 2))
    for name in OF_THE_WIDTH:
        if width := settings.get(name):
            new[name] = max(1, round(width * scale.d_model / model.d_model))
    return new


def deepened(model: ModelSpec, layers: int) -> ModelSpec:
    """Returns the model with another depth. A list of layers, and the places of attention, repeat from the start."""
    if not isinstance(model.layers, int):
        return replace(model, layers=tuple(model.layers[i % len(model.layers)] for i in range(layers)))
    if isinstance(model.attention, str) or not model.attention:
        return replace(model, layers=layers)
    places = tuple(i for i in range(layers * model.depth // model.layers) if i % model.depth in model.attention)
    return replace(model, layers=layers, attention=places)


def at_scale(
    model: ModelSpec, name: str, vocabulary: int | None, fixed: Mapping[str, Any]
) -> tuple[ModelSpec, list[str]]:
    """Returns a trial's model at a scale, and a line for each change that a user may not expect.

    Args:
        model: The model of the trial.
        name: The name of the scale.
        vocabulary: The number of tokens of the tokenizer; None means `VOCABULARY`.
        fixed: The fields of `ModelSpec` that the user gave, which the scale leaves alone. With `layers` among them, the
            scale does not choose the depth.

    Raises:
        InputError: If the scale does not exist, or if no depth comes within 3% of its number of parameters.
    """
    scale, counter = find_scale(name), CostCounter()
    size = VOCABULARY if vocabulary is None else -(-vocabulary // PADDED) * PADDED
    wide = replace(model, **{**widened(model, scale, size), **fixed})
    deep = wide if "layers" in fixed else deepened(wide, _depth(wide, scale, counter))
    count = parameter_count(deep, counter)
    if abs(count / scale.parameters - 1) > WITHIN:
        raise InputError(
            f"--scale {name}: the nearest model has {count:,} parameters, {count / scale.parameters - 1:+.1%}, and a "
            f"scale is within {WITHIN:.0%}; leave --scale out and give model.d_model and model.layers with --set"
        )
    return deep, _notes(model, deep, scale)


def _depth(model: ModelSpec, scale: Scale, counter: CostCounter) -> int:
    """The scale's depth if it gives the scale's parameters within 3%, else the depth that comes nearest to them."""

    def off(layers: int) -> float:
        return parameter_count(deepened(model, layers), counter) / scale.parameters - 1

    layers = scale.layers
    if abs(off(layers)) <= WITHIN:
        return layers
    step = 1 if off(layers) < 0 else -1
    while layers + step > 0 and abs(off(layers + step)) < abs(off(layers)):
        layers += step
    return layers


def _notes(before: ModelSpec, after: ModelSpec, scale: Scale) -> list[str]:
    """A line for each change of the layers that a user may not expect."""
    lines = []
    if isinstance(after.layers, int) and after.layers != scale.layers:
        lines.append(
            f"{after.layers} layers, not the table's {scale.layers}, come nearest to {scale.parameters:,.0f} parameters"
        )
    if not isinstance(before.layers, int):
        whole, rest = divmod(after.depth, before.depth)
        cut = f", and the last time cut after {rest} of its layers" if rest else ""
        lines.append(f"the list of {before.depth} layers is repeated to {after.depth}: {whole} times{cut}")
    elif before.attention and not isinstance(before.attention, str):
        lines.append(f"attention in {len(after.attention)} of {after.depth} layers, as in every {before.depth}")
    return lines
