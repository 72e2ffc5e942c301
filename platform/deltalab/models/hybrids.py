"""Published models as presets: `model: {preset: qwen3_next}` sets the rule, the list of layers and their settings."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deltalab.errors import InputError, unknown
from deltalab.models.settings.layer_list import RULE
from deltalab.models.spec import ModelSpec

PRESET = "preset"
"""The key of a model that names a hybrid."""


@dataclass(frozen=True)
class Hybrid:
    """A published model at any width, whose layers are of several kinds or need more than `RULE@published` can say.

    Attributes:
        source: The paper or code.
        rule: The rule of most layers, as `ModelSpec.rule`.
        pattern: The layers from the first on, which repeat: `rule`, or an entry of `ModelSpec.layers`.
        settings: The settings of the model. `heads/n` is that share of the heads, and at least 1. `d_model/n` is that
            share of the width, and `head*m/n` that of d_model / heads.
        lacks: What the authors' model has beyond this one.
    """

    source: str
    rule: str | Mapping[str, Any]
    pattern: Sequence[Any]
    lacks: str
    settings: Mapping[str, Any] = field(default_factory=dict)


def _attention(window: int = 0, **layer: Any) -> dict[str, Any]:
    """An entry for a layer of plain attention, whatever the rule's own layers have."""
    plain = {
        "conv": 0, "conv_bias": False, "expand_v": 1.0, "features": None, "gate_rank": None, "key_dim": None,
        "low_rank_bias": False, "output_gate": False, "output_norm": False, "qk_heads": "heads", "scale": None,
        "skip": False,
    }  # fmt: skip
    return {"name": "attention", **({"window": window} if window else {}), "layer": {**plain, **layer}}


HYBRIDS: Mapping[str, Hybrid] = {
    "kimi_linear": Hybrid(
        "arXiv:2510.26692; models/kimi_linear of transformers",
        "kda@published",
        # 512 channels of the latent for 32 heads with 128 keys, 64 more that all heads share, and 128 values.
        (RULE, RULE, RULE, _attention(kv_rank="d_model/8", key_dim="head*3/2", rope_dim="head/2", expand_v=2 / 3)),
        "mixture of experts; heads whose width times their number is 16/9 of d_model, where this has d_model",
    ),
    "qwen3_next": Hybrid(
        "models/qwen3_next of transformers (Qwen3-Next-80B-A3B)",
        "gated_deltanet@published",
        (RULE, RULE, RULE, _attention(kv_heads="heads/8", qk_norm=True, rope=1e7, output_gate="sigmoid")),
        "mixture of experts; rotary positions on a quarter of the channels, where this has them on all; half as many "
        "heads of attention, of twice the width; norms whose weights are centred at 0",
        {"qk_heads": "heads/2"},
    ),
    "jet_nemotron": Hybrid(
        "arXiv:2508.15884 (2B: attention in layers 15 and 20, windows in 21 and 22 of 28)",
        "gated_deltanet@published",
        tuple(
            _attention(0 if layer in (15, 20) else 1152, kv_heads="heads/6", rope=1e6)
            if layer in (15, 20, 21, 22)
            else RULE
            for layer in range(28)
        ),
        "the dynamic convolution of v in place of ours on q, k and v. Whether its layers count from 0, as here, or "
        "from 1 was not to be had",
    ),
    "samba": Hybrid(
        "arXiv:2406.07522",
        "mamba",
        (RULE, _attention(2048, rope=True)),
        "Mamba's own block, with twice the width, its gate and its skip, where this has deltalab's layer",
    ),
    "jamba": Hybrid(
        "arXiv:2403.19887; models/jamba of transformers",
        "mamba",
        (*(RULE,) * 4, _attention(kv_heads="heads/4"), *(RULE,) * 3),
        "a mixture of experts in every other layer; Mamba's own block with norms inside",
    ),
    "nemotron_h": Hybrid(
        "arXiv:2504.03624 (8B: 24 layers of Mamba2, 4 of attention)",
        "mamba2@published",
        (*(RULE,) * 4, *(_attention(kv_heads="heads/4"), *(RULE,) * 5) * 4),
        "an MLP of squared ReLU as a layer of its own, where each block here has SwiGLU; q and k in 8 groups",
    ),
    "griffin": Hybrid(
        "arXiv:2402.19427; models/recurrent_gemma of transformers",
        "rg_lru",
        (RULE, RULE, _attention(1024, kv_heads=1, rope=True)),
        "GeGLU; block-diagonal gates; rotary positions on half of the channels; the gated branch is our output gate "
        "without norm",
        {"output_norm": False, "output_gate": "silu"},
    ),
    "olmo_hybrid": Hybrid(
        "models/olmo_hybrid of transformers (Olmo-Hybrid-7B)",
        {"name": "gated_deltanet@published", "beta": {"sigmoid": {"max": 2}}},
        (RULE, RULE, RULE, _attention(qk_norm=True)),
        "a norm of q and k over all heads together, where this norms each head; norms after attention; keys of 3/4 "
        "of d_model / heads, where these are whole",
        {"expand_v": 2.0},
    ),
    "rwkv6": Hybrid(
        "arXiv:2404.05892; fla/models/rwkv6 of fla-org/flash-linear-attention",
        {"name": "rwkv6", "g": {"rwkv6_decay": {"rank": 64}}},
        (RULE,) * 12,
        "starts that differ by channel and layer; an eps of the output norm that is 64 times as large",
        {"conv": 0, "token_shift": {"rank": 32}, "output_norm": "group", "output_gate": "silu", "scale": 1.0,
         "low_rank_activation": {"g": "tanh"}, "mlp": "gated_relu2", "mlp_shift": True, "norm": "layer",
         "first_norm": True, "tie_embeddings": False},
    ),
    # Ranks of the model of 168M, of width 768. Those of gates are numbers of the rule, which no width changes.
    "rwkv7": Hybrid(
        "arXiv:2503.14456 (168M); fla/models/rwkv7 of fla-org/flash-linear-attention",
        {"name": "rwkv7", "g": {"rwkv7_decay": {"rank": 64}}, "a": {"channel_sigmoid": {"rank": 64}},
         "xi": {"head_channel": {"init": 0.71}}, "rho": {"head_channel": {"init": 1.02}}},
        (RULE,) * 12,
        "starts that differ by channel and layer; orthogonal and zero starts of matrices",
        {"conv": 0, "token_shift": "each", "output_norm": "group", "output_gate": "linear", "gate_rank": "d_model/6",
         "low_rank_activation": {"g": "tanh", "output_gate": "sigmoid"}, "low_rank_bias": ["a"], "bonus": True,
         "value_residual": {"rank": "d_model/24"}, "mlp": "relu2", "mlp_shift": True, "norm": "layer",
         "first_norm": True, "tie_embeddings": False},
    ),
}  # fmt: skip


def find_hybrid(name: object) -> Hybrid:
    """Returns a hybrid by name.

    Raises:
        InputError: There is none.
    """
    if not isinstance(name, str) or name not in HYBRIDS:
        raise unknown("preset", name, HYBRIDS, where=f"model.{PRESET}")
    return HYBRIDS[name]


def with_hybrid(model: Mapping[str, Any], inherited: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Writes out the preset of a model, if it names one.

    Args:
        model: Settings of a model, without its rule.
        inherited: Settings that hold where `model` says nothing: those of the base of a study.

    Returns:
        The settings, with the list of layers: as many as `layers` says, or one pattern.

    Raises:
        InputError: There is no such preset, or a setting beside it that it sets.

    Examples:
        >>> [entry if isinstance(entry, str) else entry["name"] for entry in with_hybrid({"preset": "jamba"})["layers"]]
        ['rule', 'rule', 'rule', 'rule', 'attention', 'rule', 'rule', 'rule']
    """
    if PRESET not in model:
        return dict(model)
    hybrid = find_hybrid(model[PRESET])
    sizes = {**(inherited or {}), **model}
    heads, count = sizes.get("heads", ModelSpec.heads), sizes.get("layers", len(hybrid.pattern))
    width = sizes.get("d_model", ModelSpec.d_model)
    for key in ("attention", "window"):
        if key in model:
            raise InputError(f"model.{key}: model.{PRESET} '{model[PRESET]}' says which layers are attention")
    if "layers" not in model and not isinstance(count, int):
        count = len(hybrid.pattern)  # the base lists its layers
    for key, number in (("d_model", width), ("heads", heads), ("layers", count)):
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"model.{key} beside model.{PRESET} must be a whole number of at least 1, not {number!r}")
    layers = [_sized(hybrid.pattern[i % len(hybrid.pattern)], heads, width) for i in range(count)]
    rest = {key: value for key, value in model.items() if key not in (PRESET, "layers")}
    return {**_sized(hybrid.settings, heads, width), "layers": layers, **rest}


def _sized(value: Any, heads: int, width: int) -> Any:
    """Puts numbers in place of shares. That of the heads is the largest number that divides them."""
    if isinstance(value, Mapping):
        return {key: _sized(part, heads, width) for key, part in value.items()}
    share = re.fullmatch(r"(heads|d_model|head)(?:\*(\d+))?(?:/(\d+))?", value) if isinstance(value, str) else None
    if share is None:
        return value
    whole = {"heads": heads, "d_model": width, "head": width // heads}[share[1]]
    most = max(1, whole * int(share[2] or 1) // int(share[3] or 1))
    if share[1] != "heads":
        return most
    return next(count for count in range(most, 0, -1) if heads % count == 0)


def hybrid_text(name: str, **sizes: Any) -> dict[str, Any]:
    """Returns what a preset stands for: its source, what it lacks, its rule, and its settings at the sizes given.

    Raises:
        InputError: There is no such preset, or a size does not fit.
    """
    hybrid = find_hybrid(name)
    return {
        "name": name,
        "source": hybrid.source,
        "lacks": hybrid.lacks,
        "rule": hybrid.rule,
        "model": with_hybrid({PRESET: name, **sizes}),
    }
