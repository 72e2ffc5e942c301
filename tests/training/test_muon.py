"""Muon moves the matrices of the blocks as torch's own does; everything else moves as by AdamW."""

import math
from dataclasses import replace

import pytest
import torch

from deltalab import InputError, get_task
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.training.muon import orthogonal
from deltalab.training.optimizer import Adam, AdamW, Layout, Moments
from deltalab.training.spec import TrainSpec, stackable
from deltalab.training.train import train

TASK = get_task("mqar", length=16, pairs=2, vocab_size=32)
MODEL = ModelSpec(rule="comba", vocab_size=32, d_model=16, heads=2)
SPEC = TrainSpec(steps=8, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 5, 12), (12, 5)])
def test_a_step_has_the_singular_vectors_of_the_gradient(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    inside = u.mT @ orthogonal(x) @ v.mT
    values = inside.diagonal(dim1=-2, dim2=-1)
    assert bool(((values > 0.5) & (values < 1.3)).all())
    torch.testing.assert_close(inside, torch.diag_embed(values), rtol=0, atol=1e-9)


def test_an_update_is_that_of_torch() -> None:
    """torch iterates in bf16, which moves a step by some percent."""
    runs = [Adam([0.1, 0.05, 0.1], 0.1, (0.95, 0.95), 1.0), Adam([1e-2, 1e-2, 0.0], 0.0, (0.8, 0.999), 0.0)]
    model, draw = build_model(MODEL), torch.Generator().manual_seed(0)
    layout = Layout(model)
    networks = [build_model(MODEL, seed=seed) for seed in range(2)]
    rows = torch.stack([layout.pack(network.state_dict()) for network in networks])
    state = Moments(rows, torch.zeros_like(rows), torch.zeros_like(rows))
    plain = Moments(*(part.clone() for part in state))
    optimizer, adamw = (AdamW(runs, layout, torch.device("cpu"), 3, muon=muon) for muon in (True, False))
    for each in (optimizer, adamw):
        each.load(0, each.rates_of(0, 3))
    linear = [
        f"{path}.weight"
        for path, part in model.named_modules()
        if path.startswith("blocks.") and isinstance(part, torch.nn.Linear)
    ]
    torches = [
        torch.optim.Muon(
            [network.get_parameter(name) for name in linear], weight_decay=run.weight_decay, momentum=run.betas[0],
            adjust_lr_fn="match_rms_adamw",
        )
        for network, run in zip(networks, runs, strict=True)
    ]  # fmt: skip
    for step in range(3):
        given = {name: torch.randn(2, *p.shape, generator=draw) for name, p in model.named_parameters()}
        grads = torch.stack([layout.pack({name: value[i] for name, value in given.items()}) for i in range(2)])
        before = layout.unpack(state.weights.clone())
        optimizer.step(state, torch.zeros(2), grads.clone())
        adamw.step(plain, torch.zeros(2), grads.clone())
        found, other = layout.unpack(state.weights), layout.unpack(plain.weights)
        for i, (network, theirs, run) in enumerate(zip(networks, torches, runs, strict=True)):
            for name, p in network.named_parameters():
                p.grad = given[name][i].clone()
            torch.nn.utils.clip_grad_norm_(network.parameters(), run.clip or math.inf)
            theirs.param_groups[0]["lr"] = run.lr[step]
            theirs.step()
            for name in found:
                if name not in linear:
                    assert torch.equal(found[name][i], other[name][i]), name
                    continue
                want = network.get_parameter(name).detach()
                moved = float((want - before[name][i]).norm())
                assert float((found[name][i] - want).norm()) <= 0.06 * moved + 1e-6, name
                network.get_parameter(name).data.copy_(found[name][i])


def test_a_training_by_muon_learns_and_stacks_as_alone() -> None:
    spec = replace(SPEC, steps=40, optimizer="muon")
    together = train(TASK, MODEL, spec, [1, 2]).runs
    alone = train(TASK, MODEL, spec, [2]).runs[0]
    losses = [value for split, name, _, value in alone.metrics if (split, name) == ("train", "loss")]
    assert losses[-1] < 4
    for name, value in alone.weights.items():
        torch.testing.assert_close(together[1].weights[name], value, rtol=1e-3, atol=1e-4)
    other = train(TASK, MODEL, replace(spec, optimizer="adamw"), [2]).runs[0]
    assert not torch.equal(other.weights["blocks.0.mixer.out.weight"], alone.weights["blocks.0.mixer.out.weight"])


def test_a_run_that_diverges_stays() -> None:
    run = train(TASK, MODEL, replace(SPEC, optimizer="muon", lr=1e30, clip=0.0), [1]).runs[0]
    assert run.diverged_at is not None


def test_what_does_not_go_together() -> None:
    with pytest.raises(InputError, match="unknown optimizer 'muan'; did you mean 'muon'"):
        TrainSpec(steps=10, batch_size=1, lr=1.0, optimizer="muan")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"muon does not go with model\.base_width"):
        train(TASK, replace(MODEL, base_width=8), replace(SPEC, optimizer="muon"), [1])
    assert not stackable((MODEL, SPEC), (MODEL, replace(SPEC, optimizer="muon")))


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"schedule": "cosine", "final": 0.2}, [0.1, 1.0, 1.0, 0.6, 0.2]),
        ({"schedule": "linear"}, [0.1, 1.0, 1.0, 0.5, 0.0]),
        ({"schedule": "linear", "final": 0.1}, [0.1, 1.0, 1.0, 0.55, 0.1]),
        ({"schedule": "constant"}, [0.1, 1.0, 1.0, 1.0, 1.0]),
        ({"schedule": "wsd"}, [0.1, 1.0, 1.0, 1.0, 0.0]),
        ({"schedule": "wsd", "stable": 0.5, "decay": "sqrt"}, [0.1, 1.0, 1.0, 0.684, 0.0]),
        ({"schedule": "wsd", "stable": 0.5, "decay": "cosine", "final": 0.2}, [0.1, 1.0, 1.0, 0.98, 0.2]),
    ],
    ids=str,
)
def test_schedules(given: dict[str, object], rates: list[float]) -> None:
    spec = TrainSpec(steps=100, batch_size=1, lr=1.0, **given)  # type: ignore[arg-type]
    assert [round(spec.learning_rate(step), 3) for step in (0, 9, 10, 55, 100)] == rates
    if given == {"schedule": "wsd"}:
        assert [round(spec.learning_rate(step), 3) for step in (89, 90, 95)] == [1.0, 1.0, 0.5]
    if given["schedule"] == "constant":
        with pytest.raises(InputError, match=r"train\.final has no effect on a constant schedule"):
            replace(spec, final=0.1)
