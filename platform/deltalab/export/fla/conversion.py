"""Converts whole models to flash-linear-attention (FLA 0.6) and back: the code that all of FLA's models share.

The modules named `..._forms` have the code for single model types.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deltalab.errors import InputError, NotInstalled, unknown
from deltalab.export.fla.attention_forms import FORGETTING, LATENT, TRANSFORMER, attention, from_attention
from deltalab.export.fla.channel_forms import KDA, PRECONDITIONED_KDA
from deltalab.export.fla.delta_forms import (
    COMBA,
    DELTA_PRODUCT,
    DELTANET,
    GATED_DELTANET,
    PRECONDITIONED,
    UNDECAYED,
)
from deltalab.export.fla.layer_form import Form, Part, needs, same
from deltalab.export.fla.linear_forms import GLA, HGRN, HGRN2, LIGHTNET, LINEAR_ATTENTION, RETNET
from deltalab.export.fla.mamba_forms import LOG_LINEAR_MAMBA2, MAMBA2, MAMBA3
from deltalab.export.fla.ridge_forms import MESA_NET
from deltalab.export.fla.rwkv_forms import RWKV6, RWKV7
from deltalab.export.fla.slot_forms import ABC, GSA, RAVEN
from deltalab.models.block import mlp_width
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec

FORMS = (
    GATED_DELTANET, DELTANET, UNDECAYED, COMBA, KDA, DELTA_PRODUCT, PRECONDITIONED, PRECONDITIONED_KDA,
    GLA, RETNET, HGRN, HGRN2, LINEAR_ATTENTION, LIGHTNET, ABC, GSA, RAVEN, MAMBA2, LOG_LINEAR_MAMBA2,
    MAMBA3, MESA_NET, RWKV7, RWKV6, FORGETTING, TRANSFORMER, LATENT,
)  # fmt: skip
"""All forms. If a rule has several forms, they are tried in this order."""

WHY_NOT = {
    "based": "FLA has this layer, and no model of it",
    "gated_deltanet2": "FLA has this layer, and no model of it",
    "hgrn": "FLA's HGRN is real, ours is complex as in its paper; rule min_gru is FLA's",
    "mamba": "FLA's Mamba has a step for each channel of the model, and no heads",
    "mamba3_mimo": "FLA's MIMO gates each rank by its own learned factors, and its skip is mixed by ranks, too",
    "mom": "FLA's router belongs to the layer, ours to each head",
    "momentum_deltanet": "FLA has this layer, and no model of it",
    "path_attention": "FLA's beta has a bias, ours none, and its convolution leaves out q, k and v",
    "rebased": "FLA has this layer, and no model of it",
    "rodimus": "FLA's gates read a short convolution of twice the model's width, which is also a residual",
    "sgla": "FLA has this layer (simple GLA), and no model of it",
}
"""The reason that no model of FLA computes a rule, by rule. A rule with neither form nor reason is not in FLA 0.6."""

SHARED: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "vocab_size": 32000,
    "norm_eps": 1e-6,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "elementwise_affine": True,
    "tie_word_embeddings": False,
    "attn": None,
    "attnres_block_size": None,
}
"""Options that FLA's models share and that change logits, with the defaults that most models have."""

FIXED = {"hidden_act": "swish", "elementwise_affine": True, "attnres_block_size": None}
"""Shared options for which our models can reproduce only one value, with this value."""

# fmt: off
WITHOUT_EFFECT = frozenset({
    "_name_or_path", "architectures", "attn_mode", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype",
    "eos_token_id", "fuse_cross_entropy", "fuse_linear_cross_entropy", "fuse_norm", "fuse_swiglu", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "max_position_embeddings", "model_type",
    "output_attentions", "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "torch_dtype",
    "transformers_version", "use_cache", "use_l2warp",
})
# fmt: on
"""Options that change how FLA computes, initializes or stores a model, but not its logits."""


def to_fla(spec: ModelSpec, weights: Mapping[str, Tensor] | None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Converts a model of ours to a model of FLA with the same logits.

    With tied embeddings, our model multiplies the last hidden states by a factor (`ModelSpec.tied_factor`). FLA has no
    such factor, so the weights of its last norm hold it.

    Args:
        spec: Our model.
        weights: `Model(spec).state_dict()`, or None for an untrained model.

    Returns:
        The contents of FLA's `config.json`, and FLA's weights, which are empty if `weights` is None.

    Raises:
        InputError: If FLA has no equal of the model; the message has the reason.
    """
    form, config = _form_of(spec)
    if weights is None:
        if form.needs_weights:
            raise InputError(f"export to fla: {form.needs_weights}, so that an untrained model has no equal")
        return config, {}
    theirs: dict[str, Tensor] = {}
    for part in _parts(spec, form):
        ours = [weights[name].detach() for name in part.ours]
        theirs.update(zip(part.theirs, (value.contiguous() for value in part.split(ours)), strict=True))
    if spec.tie_embeddings:
        for name in _last_norm(form).intersection(theirs):
            theirs[name] = theirs[name] * spec.tied_factor
    else:
        theirs["lm_head.weight"] = weights["unembed.weight"].detach()
    return config, theirs


def from_fla(folder: Path) -> tuple[ModelSpec, dict[str, Tensor], dict[str, Any]]:
    """Converts a checkpoint of FLA to a model of ours with the same logits.

    Args:
        folder: A folder with `config.json` and `model.safetensors`, or with shards of the weights and their index.

    Returns:
        Our model, its weights in fp32, and its provenance.

    Raises:
        InputError: If the model type, an option or the value of a parameter has no equal of ours, or if weights are
            missing, left over or of another shape.
    """
    config = _read_config(folder)
    form, spec = _spec_of(config, folder / "config.json")
    theirs = form.newer(_read_weights(folder))
    weights: dict[str, Tensor] = {}
    try:
        for part in _parts(spec, form):
            weights.update(zip(part.ours, part.join([theirs.pop(name).float() for name in part.theirs]), strict=True))
        if spec.tie_embeddings:
            for name in {"norm.weight", "norm.bias"}.intersection(weights):
                weights[name] = weights[name] / spec.tied_factor
            theirs.pop("lm_head.weight", None)  # the embeddings once more, where a file has it at all
        else:
            weights["unembed.weight"] = theirs.pop("lm_head.weight").float()
        Model(spec).load_state_dict(weights)
    except KeyError as error:
        raise InputError(f"{folder}: the weights lack {error.args[0]}") from None
    except RuntimeError as error:
        raise InputError(f"{folder}: the weights do not fit config.json: {' '.join(str(error).split())}") from None
    except InputError as error:
        raise InputError(f"{folder}: {error}") from None
    if theirs:
        raise InputError(f"{folder}: the weights have {next(iter(theirs))}, which config.json does not call for")
    return spec, weights, {"source": f"flash-linear-attention {form.model_type}", "folder": folder.name}


def why_not(rule: str) -> str | None:
    """Returns the reason that no model of FLA computes a rule, or None if some settings of the rule have an equal."""
    return None if any(form.rule == rule for form in FORMS) else WHY_NOT.get(rule, "FLA 0.6 lacks this rule")


def _form_of(spec: ModelSpec) -> tuple[Form, dict[str, Any]]:
    """The first form that takes the model, and its config. Raises the first refusal if no form takes it."""
    layers = [spec.at(layer) for layer in range(spec.depth)]
    mixers = [layer for layer in layers if layer.make_rule().name != "attention"] or layers
    rule = mixers[0].make_rule().name
    if (reason := why_not(rule)) is not None:
        raise InputError(f"export to fla: rule '{rule}': {reason}")
    for layer in mixers:
        if replace(layer, value_residual=None) != replace(mixers[0], value_residual=None):
            raise InputError("export to fla: FLA's layers are alike, but for those of attention; these differ")
    refusals = []
    for form in FORMS:
        if form.rule != rule or not form.takes(mixers[0]):
            continue
        try:
            # The first layer has no value residual, and else the last is like it.
            return form, {**_shared(spec, form, layers), **form.config(mixers[-1])}
        except InputError as error:
            refusals.append(error)
    raise refusals[0]


def _shared(spec: ModelSpec, form: Form, layers: list[ModelSpec]) -> dict[str, Any]:
    """The options that all models of FLA share, including the one that says which layers are attention."""
    has_mlp = form.block == "transformer"
    usual: dict[str, tuple[object, ...]] = {
        "readout": ("position",),
        "block": (form.block,),
        "mlp": (has_mlp,),
        "mlp_shift": (False,),
        "norm": ("rms",),
        "first_norm": (False,),
        "canon": ((),),
        "beside": (None,),
        "attention_residuals": (0,),
        "value_residual": (None,),
        "logit_cap": (None,),
        "experts": (None,),
    }
    needs(spec, form.model_type, **{name: values for name, values in usual.items() if name not in form.own})
    usual = {"bonus": (False,), "low_rank_activation": (None,), "low_rank_bias": (False, True)}
    for layer in layers:
        needs(layer, form.model_type, **{name: values for name, values in usual.items() if name not in form.own})
    if any(layer.mlp_width != spec.mlp_width for layer in layers):
        raise InputError(f"export to fla: FLA's {form.model_type} has MLPs of one width, that of model.mlp_width")
    attn: list[dict[str, Any]] = []
    for i, layer in enumerate(layers):
        if form.rule != "attention" and layer.make_rule().name == "attention":
            if not form.hybrid:
                raise InputError(f"export to fla: FLA's {form.model_type} takes no layers of attention; layer {i} is")
            options = attention(layer, form.model_type)
            same_options = next((group for group in attn if {**group, "layers": 0} == {**options, "layers": 0}), None)
            if same_options is None:
                attn.append({**options, "layers": [i]})
            else:
                same_options["layers"].append(i)
    return {
        "architectures": [form.architecture],
        "model_type": form.model_type,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.depth,
        "vocab_size": spec.vocab_size,
        "norm_eps": spec.norm_eps,
        **({"hidden_ratio": None, "intermediate_size": _mlp_width(spec)} if has_mlp else {}),
        **({"hidden_act": form.fixed.get("hidden_act", "swish")} if has_mlp else {}),
        **({"attn": attn[0] if len(attn) == 1 else attn} if attn else {}),
        "tie_word_embeddings": spec.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float32",
    }


def _spec_of(config: Mapping[str, Any], file: Path) -> tuple[Form, ModelSpec]:
    """The form of a `config.json` of FLA, and our model that equals it."""
    forms = {form.model_type: form for form in reversed(FORMS)}
    if config.get("model_type") not in forms:
        if reason := WHY_NOT.get(str(config.get("model_type"))):
            raise InputError(f"{file}: model_type '{config['model_type']}' has no equal here: {reason}")
        raise unknown("model_type with an equal here", config.get("model_type"), sorted(forms), where=str(file))
    form = forms[config["model_type"]]
    options = {**SHARED, **form.options}
    for name, value in config.items():
        if name in options:
            options[name] = list(value) if isinstance(value, tuple) else value
        elif name not in WITHOUT_EFFECT and name not in form.idle and value not in (None, False):
            raise InputError(f"{file}: option '{name}' ({value!r}) has no equal here")
    for name, value in {**FIXED, **form.fixed}.items():
        if options[name] != value:
            raise InputError(f"{file}: option '{name}' {options[name]!r} has no equal here; only {value!r} has")
    if options["attn"] and not form.hybrid:
        raise InputError(f"{file}: option 'attn' has no equal here: FLA's {form.model_type} ignores it")
    depth, d_model = options["num_hidden_layers"], options["hidden_size"]
    hidden = options["intermediate_size"]
    if hidden is None:
        hidden = form.mlp_width(d_model, options["hidden_ratio"])
    try:
        settings = {
            "vocab_size": options["vocab_size"],
            "d_model": d_model,
            "norm_eps": options["norm_eps"],
            "tie_embeddings": options["tie_word_embeddings"],
            **form.settings(options),
        }
        spec = ModelSpec.of({**settings, "layers": _layers(options["attn"], depth, settings)})
        if spec.mlp and hidden != _mlp_width(spec):
            spec = replace(spec, mlp_width=hidden)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return form, spec


def _layers(attn: Any, depth: int, settings: Mapping[str, Any]) -> Any:
    """`ModelSpec.layers`: a number if all layers are alike. With `mamba` blocks it counts pairs of layers."""
    layers: list[Any] = ["rule"] * depth
    if not attn:
        in_pairs = settings.get("block") == "mamba"
        return layers if in_pairs and depth % 2 else depth // 2 if in_pairs else depth
    inherited = {
        "features": None, "scale": None, "low_rank_bias": False, "gate_rank": None, "token_shift": False,
        "conv_bias": False, "skip": False,
    }  # fmt: skip
    for options in attn if isinstance(attn, list) else [attn]:
        if options.get("qkv_bias"):
            raise InputError("option 'attn.qkv_bias' True has no equal here; only False has")
        rule, of_attention = from_attention(options, settings["d_model"])
        for layer in options["layers"]:
            reset = {name: value for name, value in inherited.items() if settings.get(name, value) != value}
            layers[layer] = {**rule, "layer": {**of_attention, **reset}}
    return layers


def _mlp_width(spec: ModelSpec) -> int:
    """The width of the MLP."""
    return spec.mlp_width or mlp_width(spec.d_model, spec.mlp)


def _last_norm(form: Form) -> set[str]:
    """FLA's names of what the norm before the output matrix may have."""
    return {f"{form.trunk}.{form.last_norm}.{name}" for name in ("weight", "bias")}


def _parts(spec: ModelSpec, form: Form) -> list[Part]:
    """The parameters of the whole model without the output matrix."""
    parts = [
        same("embed.weight", f"{form.trunk}.embeddings.weight"),
        same("norm.weight", f"{form.trunk}.{form.last_norm}.weight"),
        *(part.within("", f"{form.trunk}.") for part in form.end_parts(spec)),
    ]
    for i in range(spec.depth):
        layer = spec.at(i)
        is_attention = form.rule != "attention" and layer.make_rule().name == "attention"
        mixer = [
            part.within("mixer.", f"{form.mixer}.") for part in (TRANSFORMER if is_attention else form).parts(layer)
        ]
        block = [same("norm.weight", "norm.weight"), *mixer]
        if form.block == "transformer":
            block = [*(_swiglu_block(form) if form.block_parts is None else form.block_parts()), *mixer]
        parts += [part.within(f"blocks.{i}.", f"{form.trunk}.layers.{i}.") for part in block]
    return parts


def _swiglu_block(form: Form) -> list[Part]:
    """The parameters of a block with RMS norms and SwiGLU, but those of its mixer."""
    mlp = Part(
        ("mlp.into.weight",),
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        lambda ours: ours[0].chunk(2),
        lambda theirs: [torch.cat(list(theirs))],
    )
    return [
        same("norm.weight", f"{form.mixer}_norm.weight"),
        same("mlp_norm.weight", "mlp_norm.weight"),
        mlp,
        same("mlp.out.weight", "mlp.down_proj.weight"),
    ]


def _read_config(folder: Path) -> dict[str, Any]:
    """The contents of a folder's `config.json`."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(), object_hook=_number)
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{file}: holds no options")
    return config


def _number(value: dict[str, Any]) -> Any:
    """A JSON object, or infinity, which `transformers` writes as {"__float__": "Infinity"}."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """FLA's weights in a folder, read from one file or from several."""
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise NotInstalled("import from fla needs safetensors", "'deltalab[hf]'") from None
    index = folder / "model.safetensors.index.json"
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    weights: dict[str, Tensor] = {}
    for name in files:
        try:
            weights.update(load_file(folder / name))
        except Exception as error:
            raise InputError(f"{folder / name}: the weights cannot be read: {error}") from None
    return weights
