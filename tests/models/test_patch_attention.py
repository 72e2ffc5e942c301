"""PatchAttention is DeiT's attention, written out; a module that is not causal is taken for images alone."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.stacks import trained_stacked
from torch import Tensor, nn

import deltalab
from deltalab import registry
from deltalab.errors import InputError
from deltalab.models.model import Model, build_model
from deltalab.models.parts.module_layer import ModuleLayer
from deltalab.models.patch_attention import AgentAttention, Linformer, PatchAttention
from deltalab.models.spec import ModelSpec
from deltalab.own_module import OwnModule
from deltalab.softmax import attend
from deltalab.tasks.images.digit_patches import DigitPatches

PATH = "deltalab.models.patch_attention.PatchAttention"
SEES_ALL: dict[str, Any] = {"module": PATH, "kwargs": {"heads": "$heads"}}
SIZES: dict[str, Any] = {"vocab_size": 10, "d_model": 16, "heads": 2, "layers": 1, "chunk_size": 16}
IMAGES: dict[str, Any] = {**SIZES, "patches": [4, 4, 4]}
MODULES = [
    ("PatchAttention", {"heads": 1}),
    ("PatchAttention", {"heads": 2}),
    ("Linformer", {"heads": 2, "patches": 16, "rows": 4}),
    ("AgentAttention", {"heads": 2, "side": 4, "agents": 4}),
]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_loop(module: PatchAttention, x: Tensor) -> Tensor:
    """One image, head and patch at a time, as timm's `Attention` divides the matrix of q, k and v."""
    width, dim = x.shape[-1] // module.heads, x.shape[-1]
    images = []
    for image in x:
        heads = []
        for h in range(module.heads):
            q, k, v = (
                image @ module.qkv.weight[part * dim + h * width : part * dim + (h + 1) * width].T
                + (0 if module.qkv.bias is None else module.qkv.bias[part * dim + h * width :][:width])
                for part in range(3)
            )
            weights = [torch.stack([q_t @ k_i / width**0.5 for k_i in k]).softmax(0) for q_t in q]
            heads.append(torch.stack([sum(w[i] * v[i] for i in range(len(v))) for w in weights]))
        images.append(torch.cat(heads, dim=-1) @ module.out.weight.T + module.out.bias)
    return torch.stack(images)


@pytest.mark.parametrize("qkv_bias", [True, False])
def test_is_the_attention_of_deit(qkv_bias: bool) -> None:
    module = PatchAttention(12, 3, qkv_bias).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    x = drawn(2, 7, 12)
    torch.testing.assert_close(module(x), by_loop(module, x), rtol=0, atol=1e-9)
    # The order of patches is that of positions alone.
    torch.testing.assert_close(module(x.flip(1)), module(x).flip(1))


def given(module: PatchAttention) -> PatchAttention:
    module = module.double()
    for n, parameter in enumerate(module.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(n))
    return module


def parts_of(module: PatchAttention, x: Tensor) -> list[Tensor]:
    """q, k and v of each image and head, [B, H, T, K] each."""
    return [z.unflatten(-1, (module.heads, -1)).transpose(1, 2) for z in module.qkv(x).chunk(3, dim=-1)]


def weighed(weights: Tensor, values: Tensor) -> Tensor:
    return torch.stack([torch.stack([w * v for w, v in zip(row, values, strict=True)]).sum(0) for row in weights])


@pytest.mark.parametrize("shared", [True, False])
def test_linformer_attends_to_sums_of_keys_and_values(shared: bool) -> None:
    module = given(Linformer(12, 3, patches=9, rows=4, shared=shared))
    x, width = drawn(2, 9, 12), 4
    q, k, v = parts_of(module, x)
    E, F = module.of_keys.weight, module.of_values.weight
    assert (E is F) == shared
    o = torch.zeros(2, 9, 12, dtype=torch.float64)
    for b in range(2):
        for h in range(3):
            keys, values = weighed(E, k[b, h]), weighed(F, v[b, h])
            weights = [torch.stack([q_t @ key / width**0.5 for key in keys]).softmax(0) for q_t in q[b, h]]
            o[b, :, h * width : (h + 1) * width] = weighed(torch.stack(weights), values)
    torch.testing.assert_close(module(x), module.out(o), rtol=0, atol=1e-9)
    with pytest.raises(InputError, match=r"^Linformer is for images of 9 patches, not 7$"):
        module(x[:, :7])


def stretched(table: Tensor, side: int) -> Tensor:
    """A table of 7 x 7 between its centres, [side, side]."""
    rows = torch.zeros(side, 7, dtype=table.dtype)
    for i in range(side):
        at = max(0.0, (i + 0.5) * 7 / side - 0.5)
        low = min(int(at), 6)
        rows[i, low] += 1 - (at - low)
        rows[i, min(low + 1, 6)] += at - low
    return rows @ table @ rows.T


def test_agents_see_all_patches_and_patches_see_agents() -> None:
    module = given(AgentAttention(12, 3, side=4, agents=4))
    x, width, side = drawn(2, 16, 12), 4, 4
    q, k, v = parts_of(module, x)
    o = torch.zeros(2, 16, 12, dtype=torch.float64)
    biases = []
    for of in ("agents", "patches"):
        table, row, column = (module.get_parameter(f"{of}_{part}") for part in ("table", "row", "column"))
        biases.append([[stretched(table[h, a], side) + row[h, a] + column[h, a] for a in range(4)] for h in range(3)])
    for b in range(2):
        for h in range(3):
            cells = q[b, h].view(side, side, width)
            agents = [cells[2 * i : 2 * i + 2, 2 * j : 2 * j + 2].mean((0, 1)) for i in range(2) for j in range(2)]
            seen = []
            for a, agent in enumerate(agents):
                logits = torch.stack([agent @ key / width**0.5 for key in k[b, h]]) + biases[0][h][a].flatten()
                seen.append((logits.softmax(0)[:, None] * v[b, h]).sum(0))
            for t in range(16):
                bias = torch.stack([biases[1][h][a].flatten()[t] for a in range(4)])
                weights = (torch.stack([q[b, h, t] @ agent / width**0.5 for agent in agents]) + bias).softmax(0)
                y = sum(w * s for w, s in zip(weights, seen, strict=True))
                for c in range(width):
                    kernel, total = module.near.weight[h * width + c, 0], module.near.bias[h * width + c]
                    for di in (-1, 0, 1):
                        for dj in (-1, 0, 1):
                            i, j = t // side + di, t % side + dj
                            if 0 <= i < side and 0 <= j < side:
                                total = total + kernel[di + 1, dj + 1] * v[b, h, i * side + j, c]
                    o[b, t, h * width + c] = y[c] + total
    torch.testing.assert_close(module(x), module.out(o), rtol=0, atol=1e-9)
    with pytest.raises(InputError, match=r"^AgentAttention is for images of 16 patches, not 9$"):
        module(x[:, :9])
    with pytest.raises(InputError, match=r"^agents must be a square, such as 9 or 49, not 8$"):
        AgentAttention(12, 3, side=4, agents=8)


def test_starts_as_in_deits_code() -> None:
    module = PatchAttention(96, 3)
    for part in (module.qkv, module.out):
        assert float(part.weight.detach().std()) == pytest.approx(0.02, rel=0.05)
    assert not module.qkv.bias.any()
    assert not module.out.bias.any()
    with pytest.raises(InputError, match=r"^heads 5 must divide the width 96$"):
        PatchAttention(96, 5)


def test_attention_to_all_shares_keys_among_heads_and_is_batched() -> None:
    q, k, v = drawn(3, 1, 4, 5, 2), drawn(3, 1, 2, 5, 2) + 1, drawn(3, 1, 2, 5, 2) - 1
    want = torch.einsum(
        "nbhts,nbhsk->nbhtk",
        torch.einsum("nbhtk,nbhsk->nbhts", q, k.repeat_interleave(2, 2)).softmax(-1),
        v.repeat_interleave(2, 2),
    )
    stacked = torch.vmap(lambda q, k, v: attend(q, k, v, scale=1.0, causal=False))(q, k, v)
    torch.testing.assert_close(stacked, want)
    torch.testing.assert_close(attend(q[0], k[0], v[0], scale=1.0, causal=False), want[0])


def reads(network: Model) -> list[int]:
    """The places that the first patch of a model's mixers sees."""
    x = torch.randn(1, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    network.transform(x)[0][0, 0].square().sum().backward()
    assert x.grad is not None
    return [i for i, size in enumerate(x.grad[0].abs().sum(-1)) if size > 0]


@pytest.mark.parametrize(("name", "kwargs"), MODULES)
def test_the_first_patch_sees_all(name: str, kwargs: dict[str, int]) -> None:
    mixer = {"module": f"deltalab.models.patch_attention.{name}", "kwargs": kwargs}
    assert reads(build_model({**IMAGES, "mixer": mixer, "mlp": False})) == [*range(16)]


def test_scans_belong_to_rules_and_add_nothing_to_a_module_that_sees_all() -> None:
    """Models that are equal but for scans are equal, and a hybrid scans the layers of its rule alone."""
    plain, scanned = (
        ModelSpec.of({**IMAGES, "mixer": SEES_ALL, **scans}) for scans in ({}, {"bidirectional": True, "axes": 2})
    )
    assert plain == scanned
    hybrid = {**IMAGES, "rule": "mamba", "layers": ["rule", SEES_ALL], "bidirectional": True, "axes": 2}
    scans = [block.scans for block in build_model(hybrid).blocks]
    assert scans[0] is not None
    assert scans[1] is None
    [beside] = build_model({**IMAGES, "rule": "mamba", "beside": SEES_ALL, "bidirectional": True}).blocks
    assert beside.scans is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"mixer": SEES_ALL},
        {"rule": "comba", "layers": ["rule", SEES_ALL]},
        {"rule": "comba", "beside": SEES_ALL},
        {"mixer": SEES_ALL, "bidirectional": True},
    ],
)
def test_is_refused_where_there_are_tokens(settings: Mapping[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        ModelSpec.of({**SIZES, **settings})
    assert f"module '{PATH}' is not causal, and needs a task of images: this one has tokens" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_layer_for_models_of_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="is not causal, and needs a task of images"):
        deltalab.layer({"name": PATH, "heads": 2}, dim=16)


def test_goes_on_from_no_cache() -> None:
    rule = deltalab.get_rule(PATH, heads=2)
    assert isinstance(rule, OwnModule)
    layer = ModuleLayer(rule, {"d_model": 16})
    y, cache = layer.advance(torch.ones(1, 3, 16))
    assert y.shape == (1, 3, 16)
    with pytest.raises(InputError, match=rf"^module '{PATH}' is not causal: tokens that follow others would change"):
        layer.advance(torch.ones(1, 1, 16), cache)


def test_a_module_of_deltalab_is_known_by_its_file() -> None:
    """A change elsewhere in deltalab makes no other trial of it, as of a rule."""
    assert registry.rule_plugin(PATH).package == ""


@pytest.mark.parametrize(("name", "kwargs"), MODULES)
def test_stacked_runs_equal_runs_alone(name: str, kwargs: dict[str, int]) -> None:
    module = f"deltalab.models.patch_attention.{name}"
    spec = ModelSpec.of({**IMAGES, "mixer": {"module": module, "kwargs": kwargs}})
    trained_stacked(DigitPatches(), spec)
