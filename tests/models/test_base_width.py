"""`model.base_width`: one learning rate for all widths."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltalab.errors import InputError
from deltalab.models.model import Model, build_model, parameter_groups
from deltalab.models.spec import ModelSpec
from deltalab.registry import list_rules
from deltalab.training.optimizer import Adam, AdamW, Layout, Moments

BASE = 32
LR = 1e-2


def narrow(rule: str = "gated_deltanet", **given: object) -> ModelSpec:
    spec = {"vocab_size": 32, "d_model": BASE, "layers": 1, "heads": 2, "mlp": False, "base_width": BASE, **given}
    return ModelSpec(rule=rule, **spec)  # type: ignore[arg-type]


def widened(spec: ModelSpec, width: int) -> ModelSpec:
    """The model with heads of the same width, and more of them."""
    return replace(spec, d_model=width, heads=spec.heads * width // spec.d_model)


def sizes(spec: ModelSpec, steps: int = 3) -> dict[str, float]:
    """The RMS of what each part puts out after a few steps, and by how much the steps moved it."""
    torch.manual_seed(0)
    model = Model(spec)
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: object, out: Tensor | tuple[Tensor, ...]) -> None:
            seen[name] = (out[0] if isinstance(out, tuple) else out).detach().clone()

        module.register_forward_hook(hook)

    keep("projections", model.blocks[0].get_submodule("mixer.qkv"))
    keep("mixer", model.blocks[0].get_submodule("mixer.out"))
    keep("last sum", model.norm)
    tokens, targets = torch.randint(spec.vocab_size, (2, 1, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1, LR), lr=LR, betas=(0.9, 0.95))
    before: dict[str, Tensor] = {}
    for step in range(steps + 1):
        logits = model(tokens)
        seen["logits"] = logits.detach()
        before = before or dict(seen)
        if step < steps:
            optimizer.zero_grad()
            F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
            optimizer.step()
    rms = {name: float(value.square().mean().sqrt()) for name, value in seen.items()}
    moved = {f"{name}, moved": float((seen[name] - before[name]).square().mean().sqrt()) for name in seen}
    return {**rms, **moved}


@pytest.mark.slow(keep="comba")
@pytest.mark.parametrize("rule", list_rules())
def test_activations_keep_their_size_in_wide_models(rule: str) -> None:
    """A coordinate check (Yang et al. 2022, arXiv:2203.03466) over 32 times the width."""
    spec = narrow(rule)
    found, wide = sizes(spec), sizes(widened(spec, 1024))
    apart = {name: wide[name] / found[name] for name in found}
    # Chance products with the token just read, which add to logits, fall with d^-0.5.
    logits = [apart.pop("logits"), apart.pop("logits, moved")]
    assert all(0.65 < ratio < 1.5 for ratio in apart.values()), apart
    assert all(0.33 < ratio < 1.5 for ratio in logits), logits


def test_without_a_base_width_they_grow() -> None:
    spec = replace(narrow(), base_width=None)
    found, wide = sizes(spec), sizes(widened(spec, 1024))
    assert wide["last sum, moved"] > 5 * found["last sum, moved"]


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_of_the_base_width_is_the_plain_model(tied: bool) -> None:
    spec = narrow(tie_embeddings=tied, mlp=True)
    plain = replace(spec, base_width=None)
    tokens = torch.arange(8)[None]
    assert torch.equal(build_model(spec, seed=1)(tokens), build_model(plain, seed=1)(tokens))
    groups = [parameter_groups(build_model(one), 0.1, LR) for one in (spec, plain)]
    assert [len(group) for group in groups] == [2, 2]


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_wide_models_start_no_larger(tied: bool) -> None:
    tokens = torch.arange(8)[None]
    stds = [
        float(build_model(widened(narrow(tie_embeddings=tied), width), seed=1)(tokens).detach().std())
        for width in (32, 512)
    ]
    assert stds[1] < 1.1 * stds[0]


def test_matrices_that_width_enters_learn_slower_and_the_others_do_not() -> None:
    model = build_model(narrow("gla", d_model=128, heads=8, gate_rank=4, mlp=True, tie_embeddings=False))
    scaled, decayed, free = parameter_groups(model, 0.2, LR)
    names = {id(p): name for name, p in model.named_parameters()}
    assert (scaled["lr"], scaled["weight_decay"]) == (LR / 4, 0.8)
    # A step decays all matrices alike: lr weight_decay.
    assert scaled["lr"] * scaled["weight_decay"] == pytest.approx(LR * decayed["weight_decay"])
    assert "lr" not in decayed and "lr" not in free  # noqa: PT018
    slow = {names[id(p)].removeprefix("blocks.0.") for p in scaled["params"]}
    assert {"mixer.qkv.weight", "mixer.out.weight", "mlp.into.weight", "mlp.out.weight", "unembed.weight"} <= slow
    # A low-rank pair: d_model enters the first matrix alone.
    assert "mixer.gate.0.weight" in slow
    assert {names[id(p)] for p in decayed["params"]} >= {"embed.weight", "blocks.0.mixer.gate.1.weight"}
    assert sum(len(group["params"]) for group in (scaled, decayed, free)) == len(list(model.parameters()))


def test_a_rate_is_asked_for_where_it_is_needed() -> None:
    with pytest.raises(InputError, match=r"0\.25 times"):
        parameter_groups(build_model(narrow(d_model=128)), 0.1)


def test_stacks_train_as_torch_does() -> None:
    """AdamW of a stack of one, against torch's with the groups."""
    model = build_model(narrow(d_model=128, mlp=True), seed=3)
    layout = Layout(model)
    row = layout.pack(model.state_dict())[None]
    state = Moments(row, torch.zeros_like(row), torch.zeros_like(row))
    ours = AdamW([Adam([LR, LR / 2], 0.1, (0.9, 0.95), 0.0)], layout, torch.device("cpu"), 2)
    ours.load(0, ours.rates_of(0, 2))
    theirs = torch.optim.AdamW(parameter_groups(model, 0.1, LR), lr=LR, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(0)
    for step in range(2):
        grads = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
        ours.step(state, torch.zeros(1), layout.pack(grads)[None])
        for name, p in model.named_parameters():
            p.grad = grads[name]
        for group in theirs.param_groups:
            group["lr"] /= 2**step
        theirs.step()
    found = layout.unpack(state.weights)
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name][0], p.detach(), rtol=1e-5, atol=1e-6, msg=name)
