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


RWKV7: dict[str, Any] = {
    "preset": "rwkv7", "vocab_size": 20, "d_model": 24, "heads": 3, "layers": 3, "mlp_width": 40, "gate_rank": 5,
    "value_residual": {"rank": 4},
}  # fmt: skip


class Memory(dict[str, Tensor]):
    """What FLA's cache holds of a layer: `conv_state`, `ffn_state` and `recurrent_state`, by layer."""


def layer_norm(x: Tensor, weights: Mapping[str, Tensor], name: str, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def rwkv7_layer(
    x: Tensor, first: Tensor | None, weights: Mapping[str, Tensor], options: Mapping[str, Any], memory: Memory, at: str
) -> tuple[Tensor, Tensor]:
    """`RWKV7Attention` of fla/layers/rwkv7.py for one token [B, d], and the values that later layers read."""
    H, K = options["num_heads"], options["head_dim"]
    delta = memory.get(f"{at}.conv_state", torch.zeros_like(x)) - x
    memory[f"{at}.conv_state"] = x
    r, w, k, v, a, g = (x + delta * weights[f"x_{name}"].flatten() for name in "rwkvag")

    def lora(name: str, x: Tensor, inside: Any = lambda z: z) -> Tensor:
        inner = inside(x @ weights[f"{name}.lora.0.weight"].T)
        return inner @ weights[f"{name}.lora.2.weight"].T + weights.get(f"{name}.lora.2.bias", 0)

    r, k, v_in = r @ weights["r_proj.weight"].T, k @ weights["k_proj.weight"].T, v
    v = v_in @ weights["v_proj.weight"].T
    w = -0.6065306597126334 * lora("w_lora", w, torch.tanh).sigmoid()
    if first is not None:
        v = torch.lerp(v, first, lora("v_lora", v_in).sigmoid())
    a, g = lora("a_lora", a).sigmoid(), lora("g_lora", g, torch.sigmoid)
    kk = F.normalize((k * weights["k_k"]).unflatten(-1, (H, K)), dim=-1)
    k = k + k * (a - 1) * weights["k_a"]
    r, w, k, a = (y.unflatten(-1, (H, K)) for y in (r, w, k, a))
    v_heads = v.unflatten(-1, (H, -1))
    state = memory.get(f"{at}.recurrent_state", x.new_zeros(len(x), H, K, v_heads.shape[-1]))
    read = torch.einsum("bhkv,bhk->bhv", state, -kk)
    state = w.exp()[..., None] * state + (kk * a)[..., None] * read[..., None, :] + k[..., None] * v_heads[..., None, :]
    memory[f"{at}.recurrent_state"] = state
    o = torch.einsum("bhkv,bhk->bhv", state, r)
    o = F.group_norm(o.flatten(1), H, weights["g_norm.weight"], weights["g_norm.bias"], K * options["norm_eps"])
    o = o + ((r * k * weights["r_k"]).sum(-1, keepdim=True) * v_heads).flatten(1)
    return (o * g) @ weights["o_proj.weight"].T, v


RWKV6: dict[str, Any] = {
    "preset": "rwkv6", "vocab_size": 20, "d_model": 24, "heads": 2, "key_dim": 6, "expand_v": 2.0, "layers": 2,
    "token_shift": {"rank": 5},
}  # fmt: skip


def rwkv6_layer(
    x: Tensor, first: Tensor | None, weights: Mapping[str, Tensor], options: Mapping[str, Any], memory: Memory, at: str
) -> tuple[Tensor, Tensor]:
    """`RWKV6Attention` of fla/layers/rwkv6.py for one token [B, d]."""
    H, rank = options["num_heads"], options["proj_low_rank_dim"]
    delta = memory.get(f"{at}.conv_state", torch.zeros_like(x)) - x
    memory[f"{at}.conv_state"] = x
    inner = ((x + delta * weights["x_proj.0.mu"]) @ weights["x_proj.0.linear.weight"].T).tanh().view(len(x), 5, rank)
    shares = torch.einsum("bnr,hnr->bnh", inner, weights["x_proj.2.weight"].view(x.shape[-1], 5, rank))
    means = (x + delta * share for share in (shares + weights["x_bias"]).unbind(1))
    r, w, k, v, g = means
    lora = "w_proj.linear.lora"
    w = (w @ weights[f"{lora}.0.weight"].T).tanh() @ weights[f"{lora}.2.weight"].T + weights[f"{lora}.2.bias"]
    r, k, v, g = (y @ weights[f"{name}_proj.linear.weight"].T for name, y in (("r", r), ("k", k), ("v", v), ("g", g)))
    r, w, k, v = (y.unflatten(-1, (H, -1)) for y in (r, w, k, v))
    written = k[..., None] * v[..., None, :]
    state = memory.get(f"{at}.recurrent_state", torch.zeros_like(written))
    o = torch.einsum("bhkv,bhk->bhv", state + weights["bonus"][..., None] * written, r)
    memory[f"{at}.recurrent_state"] = (-w.exp()).exp()[..., None] * state + written
    o = F.group_norm(o.flatten(1), H, weights["g_norm.weight"], weights["g_norm.bias"], options["norm_eps"])
    return (o * F.silu(g)) @ weights["o_proj.weight"].T, v


def rwkv7_mlp(x: Tensor, delta: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """`RWKV7FeedForward`."""
    key = (x + delta * weights["x_k"]) @ weights["key.weight"].T
    return key.clamp(min=0).square() @ weights["value.weight"].T


def rwkv6_mlp(x: Tensor, delta: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """`RWKV6FeedForward`."""
    key, receptance = (
        (x + delta * weights[f"{name}.mu"]) @ weights[f"{name}.linear.weight"].T for name in ("key", "receptance")
    )
    return receptance.sigmoid() * (key.clamp(min=0).square() @ weights["value.weight"].T)


PARTS = {"rwkv7": (rwkv7_layer, rwkv7_mlp), "rwkv6": (rwkv6_layer, rwkv6_mlp)}


def rwkv(
    tokens: Tensor,
    weights: Mapping[str, Tensor],
    options: Mapping[str, Any],
    mask: Tensor | None = None,
    memory: Memory | None = None,
) -> Tensor:
    """The model of fla/models/rwkv7/modeling_rwkv7.py or rwkv6. Its mask sets what layer and MLP read to 0."""
    eps, logits = options["norm_eps"], []
    memory = Memory() if memory is None else memory
    layer, mlp = PARTS[options["model_type"]]
    for t in range(tokens.shape[1]):
        keep = torch.ones(len(tokens), 1) if mask is None else mask[:, t, None]
        x, first = weights["model.embeddings.weight"][tokens[:, t]], None
        for i in range(options["num_hidden_layers"]):
            prefix = f"model.layers.{i}."
            own, mixer, fed = (
                {name.removeprefix(start): value for name, value in weights.items() if name.startswith(start)}
                for start in (prefix, f"{prefix}attn.", f"{prefix}ffn.")
            )
            if i == 0 and options["norm_first"]:
                x = layer_norm(x, own, "pre_norm", eps)
            y, values = layer(layer_norm(x, own, "attn_norm", eps) * keep, first, mixer, options, memory, prefix)
            first, x = values if first is None else first, x + y
            z = layer_norm(x, own, "ffn_norm", eps) * keep
            delta = memory.get(f"{prefix}.ffn_state", torch.zeros_like(z)) - z
            memory[f"{prefix}.ffn_state"] = z
            x = x + mlp(z, delta, fed)
        head = "model.embeddings.weight" if options["tie_word_embeddings"] else "lm_head.weight"
        logits.append(layer_norm(x, {k[6:]: v for k, v in weights.items()}, "norm", eps) @ weights[head].T)
    return torch.stack(logits, dim=1)


OURS_OF_RWKV: dict[str, dict[str, Any]] = {
    "rwkv7": RWKV7,
    "rwkv7, tied": {**RWKV7, "tie_embeddings": True},
    "rwkv7 without a first norm": {**RWKV7, "first_norm": False, "norm_eps": 1e-3},
    "rwkv7 of wide values": {**RWKV7, "expand_v": 2, "gate_rank": 0},
    "rwkv6": RWKV6,
    "rwkv6, tied": {**RWKV6, "tie_embeddings": True, "mlp_width": 40},
    "rwkv6 without a first norm": {**RWKV6, "first_norm": False, "norm_eps": 1e-3, "layers": 1},
}


@pytest.mark.parametrize("settings", OURS_OF_RWKV.values(), ids=OURS_OF_RWKV)
def test_an_exported_rwkv_has_the_logits_and_gradients_of_flas_statement(settings: dict[str, Any]) -> None:
    model = shaken(build_model(settings, seed=1))
    config, weights = to_fla(model.spec, model.state_dict())
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    logits, stated = model(TOKENS), rwkv(TOKENS, leaves, config)
    assert away(stated, logits) < 1e-9
    logits.square().sum().backward()
    stated.square().sum().backward()
    # What is moved without being changed has one gradient: all of it, but for the embedding where it is tied.
    gradients = to_fla(model.spec, {name: value.grad for name, value in model.named_parameters()})[1]  # type: ignore[misc]
    changed = (
        {"model.embeddings.weight", "model.norm.weight", "model.norm.bias"} if model.spec.tie_embeddings else set()
    )
    for name, wanted in gradients.items():
        found = leaves[name].grad
        assert found is not None, name
        assert name in changed or away(found, wanted) < 1e-9, name


@pytest.mark.parametrize(
    ("settings", "held"), [(RWKV7, 24 + 24 + 3 * 8 * 8), (RWKV6, 24 + 24 + 2 * 6 * 12)], ids=["rwkv7", "rwkv6"]
)
def test_an_exported_rwkv_decodes_and_pads_as_flas_statement(settings: dict[str, Any], held: int) -> None:
    model = shaken(build_model(settings, seed=1))
    config, weights = to_fla(model.spec, model.state_dict())
    whole, memory, cache = rwkv(TOKENS, weights, config), Memory(), None
    for first, last in ((0, 5), (5, 6), (6, 12)):
        theirs = rwkv(TOKENS[:, first:last], weights, config, memory=memory)
        ours, cache = model.step(TOKENS[:, first:last], cache)
        assert away(theirs, whole[:, first:last]) < 1e-9
        assert away(ours, whole[:, first:last]) < 1e-9
    of_layer = {name: value for name, value in memory.items() if "layers.1." in name}
    assert sum(value.numel() for value in of_layer.values()) == cache[1].numel() == 2 * held
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    padded, ours = rwkv(TOKENS, weights, config, mask=mask), model(TOKENS, attention_mask=mask)
    assert away(ours[mask == 1], padded[mask == 1]) < 1e-9


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("rwkv7", {}),
        ("rwkv7", {"norm_first": False, "norm_eps": 1e-3}),
        ("rwkv7", {"head_dim": None}),
        ("rwkv6", {}),
        ("rwkv6", {"norm_first": False, "norm_eps": 1e-3}),
    ],
)
def test_an_imported_rwkv_has_the_logits_of_flas_statement(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    file = json.loads((Path(__file__).parent / f"fla/{name}.json").read_text())
    config = {**file["config"], **options}
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in file["parameters"].items()
        if config["norm_first"] or "pre_norm" not in name
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    spec, ours, _ = from_fla(tmp_path)
    model = Model(spec).double()
    model.load_state_dict(ours)
    doubled = {name: value.double() for name, value in weights.items()}
    assert away(model(TOKENS), rwkv(TOKENS, doubled, {**config, "head_dim": file["config"].get("head_dim")})) < 1e-9
