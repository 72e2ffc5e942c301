"""The papers' sizes, and how a trial's model becomes one of them.

A scale fixes the width of the model and of its heads. The rule, the block and everything else stay the trial's, and the
depth is the table's where this gives the parameters that the scale is named after, else the depth that comes nearest:
mixers differ in size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.spec import Layer, ModelSpec
from deltalab.study.planning.model_costs import Sizer

WITHIN = 0.03
"""How far the number of parameters may be from the one that a scale is named after, as a share of it."""

VOCABULARY = 32_000
"""The vocabulary of a scale where no tokenizer is given: Llama 2's and Mistral's, which the papers' baselines use."""

PADDED = 64
"""A tokenizer's vocabulary is padded to a multiple of this, for the speed of the product with the output matrix."""


@dataclass(frozen=True)
class Scale:
    """A size of a paper.

    parameters: what the scale is named after. d_model, layers: width and depth. head_dim: of keys and values.
    tokens, batch, length: of the training, in tokens.
    """

    parameters: float
    d_model: int
    layers: int
    head_dim: int
    tokens: float
    batch: int
    length: int
    source: str


COMBA = "Comba (Hu et al. 2025, arXiv:2506.02475)"
SCALES: Mapping[str, Scale] = {
    "340M": Scale(
        3.4e8, 1024, 24, 128, 15e9, 2**19, 2048, f"{COMBA}, table 6: 340M, 15B tokens, batches of 0.5M tokens"
    ),
    "1.3B": Scale(
        1.3e9, 2048, 24, 128, 100e9, 2**20, 2048, f"{COMBA}, table 6: 1.3B, 100B tokens, batches of 1M tokens"
    ),
    "2.7B": Scale(
        2.7e9, 2560, 32, 128, 100e9, 2**21, 4096,
        "Gated KalmaNet, section 5.3.1: 2.8B, 100B tokens, batches of 2M tokens, 4K context",
    ),
}  # fmt: skip
"""The scales by name. The papers give parameters, tokens and batches. Widths and depths are those that models of these
names commonly have (GPT-3, Mamba), and 128 the width of heads in residual linear attention's table 6."""


def find(name: str) -> Scale:
    """Raises `InputError` for a name that no scale has."""
    if name not in SCALES:
        raise unknown("scale", name, SCALES, where="--scale")
    return SCALES[name]


def parameters(model: ModelSpec, sizer: Sizer | None = None) -> int:
    """How many numbers a model trains."""
    return (sizer or Sizer()).sizes(model, 1).parameters


def widened(model: ModelSpec, scale: Scale, vocabulary: int) -> dict[str, Any]:
    """What a scale changes in a model besides its depth: the fields of `ModelSpec`, with their new values.

    Heads get the scale's width. Widths of keys and of the MLP, shared heads and the rank of gates keep their ratios.

    Raises `InputError` where heads that are shared in groups do not divide the new number of heads.
    """
    heads = scale.d_model // scale.head_dim
    changed: dict[str, Any] = {"vocab_size": vocabulary, "d_model": scale.d_model, "heads": heads}
    own = {name: getattr(model, name) for name in ("key_dim", "qk_heads", "kv_heads", "gate_rank", "mlp_width")}
    changed |= _proportional(own, model, model.heads, heads, scale)
    if not isinstance(model.layers, int):
        changed["layers"] = tuple(_entry(entry, model, scale) for entry in model.layers)
    return {name: value for name, value in changed.items() if value != getattr(model, name)}


def _entry(entry: Layer, model: ModelSpec, scale: Scale) -> Layer:
    """A layer of a list whose own heads and widths grow with the model's."""
    if isinstance(entry, str) or not (given := entry.get("layer")):
        return entry
    before = given.get("heads", model.heads)
    if before * scale.d_model // scale.head_dim % model.heads:
        raise InputError(
            f"--scale: a layer with {before} heads beside {model.heads} cannot keep that ratio; give model.layers with "
            "--set"
        )
    heads = before * (scale.d_model // scale.head_dim) // model.heads
    own = {"heads": heads} if "heads" in given else {}
    return {**entry, "layer": {**given, **own, **_proportional(given, model, before, heads, scale)}}


def _proportional(given: Mapping[str, Any], model: ModelSpec, before: int, heads: int, scale: Scale) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("qk_heads", "kv_heads"):
        if shared := given.get(name):
            if heads % (before // shared):
                raise InputError(
                    f"--scale: model.{name} {shared} of {before} heads are groups of {before // shared}, which do not "
                    f"divide {heads} heads; give model.{name} with --set"
                )
            found[name] = heads // (before // shared)
    if key_dim := given.get("key_dim"):
        found["key_dim"] = max(1, round(key_dim * before / model.d_model * scale.d_model / heads))
    for name in ("gate_rank", "mlp_width"):
        if width := given.get(name):
            found[name] = max(1, round(width * scale.d_model / model.d_model))
    return found


def deepened(model: ModelSpec, layers: int) -> ModelSpec:
    """The model with another depth: a list of layers, and the places of attention layers, repeat from the start."""
    if not isinstance(model.layers, int):
        return replace(model, layers=tuple(model.layers[i % len(model.layers)] for i in range(layers)))
    if isinstance(model.attention, str) or not model.attention:
        return replace(model, layers=layers)
    places = tuple(i for i in range(layers * model.depth // model.layers) if i % model.depth in model.attention)
    return replace(model, layers=layers, attention=places)


def at_scale(
    model: ModelSpec, name: str, vocabulary: int | None, fixed: Mapping[str, Any]
) -> tuple[ModelSpec, list[str]]:
    """A trial's model at a scale, and a line for each thing that a user may not expect.

    vocabulary: of the tokenizer, `VOCABULARY` where None. fixed: fields of `ModelSpec` that the user gave, which the
    scale leaves alone. Where `layers` is one of them, the scale does not choose the depth.

    Raises `InputError` for a scale that does not exist, and where no depth comes within 3% of its parameters.
    """
    scale, sizer = find(name), Sizer()
    size = VOCABULARY if vocabulary is None else -(-vocabulary // PADDED) * PADDED
    wide = replace(model, **{**widened(model, scale, size), **fixed})
    deep = wide if "layers" in fixed else deepened(wide, _depth(wide, scale, sizer))
    found = parameters(deep, sizer)
    if abs(found / scale.parameters - 1) > WITHIN:
        raise InputError(
            f"--scale {name}: the nearest model has {found:,} parameters, {found / scale.parameters - 1:+.1%}, and a "
            f"scale is within {WITHIN:.0%}; leave --scale out and give model.d_model and model.layers with --set"
        )
    return deep, _said(model, deep, scale)


def _depth(model: ModelSpec, scale: Scale, sizer: Sizer) -> int:
    """The table's depth where it gives the scale's parameters within 3%, else the one that comes nearest."""

    def off(layers: int) -> float:
        return parameters(deepened(model, layers), sizer) / scale.parameters - 1

    layers = scale.layers
    if abs(off(layers)) <= WITHIN:
        return layers
    step = 1 if off(layers) < 0 else -1
    while layers + step > 0 and abs(off(layers + step)) < abs(off(layers)):
        layers += step
    return layers


def _said(before: ModelSpec, after: ModelSpec, scale: Scale) -> list[str]:
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
