"""Exported models, and imported ones, beside FLA's layers stated in plain PyTorch from the source of FLA 0.6.

FLA's kernels need a GPU. What they compute is written here again, token by token and in fp64, from FLA's names of the
weights and options alone.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab.errors import InputError
from deltalab.export.fla import from_fla, to_fla
from deltalab.models.model import Model, build_model

save_file = pytest.importorskip("safetensors.torch").save_file

MAMBA3 = {
    "rule": {"name": "mamba3@published", "a": "rate", "theta": {"shared_angular_velocity": {"pairs": 4}}},
    "vocab_size": 20, "block": "mamba", "d_model": 16, "heads": 4, "key_dim": 8, "expand_v": 2.0, "layers": 1,
}  # fmt: skip


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """x [.., N] with its first channels turned, each pair of neighbours by an angle [.., P]."""
    pairs = angle.shape[-1]
    one, other = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    cos, sin = angle.cos(), angle.sin()
    both = torch.stack([one * cos - other * sin, one * sin + other * cos], dim=-1).flatten(-2)
    return torch.cat([both, x[..., 2 * pairs :]], dim=-1)


def mamba3_layer(x: Tensor, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """`Mamba3` of fla/layers/mamba3.py, SISO. Its kernel is `mamba3_siso_combined` of the package mamba_ssm."""
    N, P, G, eps = options["state_size"], options["head_dim"], options["n_groups"], options["norm_eps"]
    width = int(options["expand"] * options["hidden_size"])
    H, angles = width // P, int(N * options["rope_fraction"]) // 2
    projected = x @ weights["in_proj.weight"].T
    z, v, B, C, dt, a, trap, angle = projected.split([width, width, G * N, G * N, H, H, H, angles], dim=-1)
    z, v = (y.unflatten(-1, (H, P)) for y in (z, v))
    B, C = (
        rms(y.unflatten(-1, (G, N)), weights[f"{name}_norm.weight"], eps).repeat_interleave(H // G, dim=2)
        + weights[f"{name}_bias"].squeeze(1)
        for name, y in (("B", B), ("C", C))
    )
    dt = F.softplus(dt + weights["dt_bias"])
    rate = -F.softplus(a).clamp(min=options["A_floor"])
    state, phase = x.new_zeros(len(x), H, P, N), x.new_zeros(len(x), H, angles)
    past_k, past_v, outputs = x.new_zeros(len(x), H, N), x.new_zeros(len(x), H, P), []
    for t in range(x.shape[1]):
        step, share = dt[:, t], trap[:, t].sigmoid()
        phase = phase + math.pi * angle[:, t].tanh()[:, None] * step[..., None]
        k, q, alpha = turned(B[:, t], phase), turned(C[:, t], phase), (rate[:, t] * step).exp()
        state = alpha[..., None, None] * state
        state = state + ((1 - share) * step * alpha)[..., None, None] * past_v[..., None] * past_k[..., None, :]
        state = state + (share * step)[..., None, None] * v[:, t][..., None] * k[..., None, :]
        outputs.append(torch.einsum("bhpn,bhn->bhp", state, q) + weights["D"][:, None] * v[:, t])
        past_k, past_v = k, v[:, t]
    y = torch.stack(outputs, dim=1)
    if options["is_outproj_norm"]:
        y = rms(y, weights["norm.weight"].unflatten(0, (H, P)), eps)
    return (y * F.silu(z)).flatten(-2) @ weights["out_proj.weight"].T


def mamba3(tokens: Tensor, weights: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """`Mamba3ForCausalLM` of fla/models/mamba3/modeling_mamba3.py."""
    eps = options["norm_eps"]
    x = weights["backbone.embeddings.weight"][tokens]
    for i in range(options["num_hidden_layers"]):
        own = {
            name.removeprefix(f"backbone.layers.{i}."): value
            for name, value in weights.items()
            if name.startswith(f"backbone.layers.{i}.")
        }
        mixer = {name.removeprefix("mixer."): value for name, value in own.items()}
        x = x + mamba3_layer(rms(x, own["norm.weight"], eps), mixer, options)
    head = "backbone.embeddings.weight" if options["tie_word_embeddings"] else "lm_head.weight"
    return rms(x, weights["backbone.norm_f.weight"], eps) @ weights[head].T


DEFAULTS = {"A_floor": 1e-4}
"""FLA's defaults of options that an export leaves out."""


def shaken(model: Model) -> Model:
    """The model in fp64, with no parameter at a value where a mistake would cancel."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for value in model.double().parameters():
            value.add_(0.3 * torch.randn(value.shape, generator=generator))
    return model


def away(found: Tensor, wanted: Tensor) -> float:
    return ((found - wanted).norm() / wanted.norm()).item()


TOKENS = torch.randint(0, 20, (2, 12), generator=torch.Generator().manual_seed(3))

OURS: dict[str, dict[str, Any]] = {
    "half of the pairs": {"rule": {**MAMBA3["rule"], "theta": {"shared_angular_velocity": {"pairs": 2}}}},  # type: ignore[dict-item]
    "all pairs": {},
    "groups": {"qk_heads": 2, "tie_embeddings": False},
    "without a skip": {"skip": False, "norm_eps": 1e-3},
    "with a norm of the output": {"output_norm": True},
}


@pytest.mark.parametrize("settings", OURS.values(), ids=OURS)
def test_an_exported_mamba3_has_the_logits_and_gradients_of_flas_statement(settings: dict[str, Any]) -> None:
    model = shaken(build_model({**MAMBA3, **settings}, seed=1))
    config, weights = to_fla(model.spec, model.state_dict())
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    logits, stated = model(TOKENS), mamba3(TOKENS, leaves, {**DEFAULTS, **config})
    assert away(stated, logits) < 1e-9
    logits.square().sum().backward()
    stated.square().sum().backward()
    name = "blocks.0.mixer.out.weight"
    assert away(leaves["backbone.layers.0.mixer.out_proj.weight"].grad, model.get_parameter(name).grad) < 1e-9  # type: ignore[arg-type]
    assert (
        away(
            leaves["backbone.layers.0.mixer.dt_bias"].grad,
            model.get_parameter("blocks.0.mixer.gates.learned.dt.dt_bias").grad,
        )
        < 1e-9
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_an_imported_mamba3_has_the_logits_of_flas_statement(fraction: float, tmp_path: Path) -> None:
    file = json.loads((Path(__file__).parent / "fla/mamba3.json").read_text())
    config = {**file["config"], "rope_fraction": fraction}
    more = 0 if fraction == 0.5 else config["state_size"] // 4
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn([shape[0] + more * name.endswith("in_proj.weight"), *shape[1:]], generator=generator) * 0.4
        for name, shape in file["parameters"].items()
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    spec, ours, _ = from_fla(tmp_path)
    model = Model(spec).double()
    model.load_state_dict(ours)
    doubled = {name: value.double() for name, value in weights.items()}
    assert away(model(TOKENS), mamba3(TOKENS, doubled, config)) < 1e-9


def test_an_imported_norm_of_the_output_has_the_same_weights_in_all_heads(tmp_path: Path) -> None:
    model = shaken(build_model({**MAMBA3, "output_norm": True}, seed=1)).float()
    config, weights = to_fla(model.spec, model.state_dict())
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(
        from_fla(tmp_path)[1]["blocks.1.mixer.norm.weight"], model.get_parameter("blocks.1.mixer.norm.weight")
    )
    weights["backbone.layers.1.mixer.norm.weight"][-1] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="our norm has the same weights in all heads"):
        from_fla(tmp_path)
