"""Capped logits and z-loss: the statement and its gradients, in a model, in a stack, and where logits are read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deltalab import InputError, get_task
from deltalab.models.model import build_model
from deltalab.models.spec import ModelSpec
from deltalab.ops.fused import loss as losses
from deltalab.ops.fused.loss import linear_cross_entropy
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "gla", "vocab_size": 16, "d_model": 8, "heads": 2}


def statement(x: Tensor, weight: Tensor, targets: Tensor, cap: float | None, z: float) -> Tensor:
    logits = x @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    wanted = targets >= 0
    rest = logits[wanted].logsumexp(-1)
    return F.cross_entropy(logits, targets) + z * rest.square().mean()


@pytest.mark.parametrize("chunk", [2**18, 40])
@pytest.mark.parametrize(("cap", "z"), [(None, 0.3), (2.0, 0.0), (2.0, 0.3)])
def test_the_loss_and_its_gradients_are_the_statement(
    cap: float | None, z: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(losses.MOST_LOGITS, "cpu", chunk)
    draw = torch.Generator().manual_seed(0)
    x, weight = (3 * torch.randn(n, 5, dtype=torch.float64, generator=draw) for n in (9, 11))
    targets = torch.randint(0, 11, (9,), generator=draw)
    targets[::4] = -100
    found, want = ([each.clone().requires_grad_() for each in (x, weight)] for _ in range(2))
    y, expected = linear_cross_entropy(*found, targets, cap=cap, z=z), statement(*want, targets, cap, z)
    torch.testing.assert_close(y, expected)
    (2 * y).backward()
    (2 * expected).backward()
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_every_logit_of_a_model_is_capped() -> None:
    model, plain = (build_model({**SIZES, **given}, seed=1).double() for given in ({"logit_cap": 0.5}, {}))
    tokens = torch.arange(12).reshape(2, 6)
    want = 0.5 * (plain(tokens) / 0.5).tanh()
    torch.testing.assert_close(model(tokens), want)
    torch.testing.assert_close(model.step(tokens)[0], want)
    torch.testing.assert_close(model.loss(tokens, tokens), F.cross_entropy(want.flatten(0, 1), tokens.flatten()))
    hidden = model.hidden(tokens)[0]
    torch.testing.assert_close(model.cross_entropy(hidden, tokens), model.loss(tokens, tokens))


@pytest.mark.parametrize("given", [{"logit_cap": 0.5}, {}], ids=str)
def test_a_study_trains_and_measures_with_them(given: dict[str, Any]) -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    model = ModelSpec.of({**SIZES, "vocab_size": 32, **given})
    settings: dict[str, Any] = {"steps": 3, "batch_size": 4, "lr": 1e-2, "evaluations": 1, "eval_batches": 1}
    without = train(task, model, TrainSpec(**settings), [2]).runs[0]
    together = train(task, model, TrainSpec(**settings, z_loss=0.2), [1, 2]).runs[1]
    alone = train(task, model, TrainSpec(**settings, z_loss=0.2), [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(value, without.weights[name]) for name, value in alone.weights.items())
    if given:  # ln 32 + 1 is the most that logits in (-0.5, 0.5) can lose
        measured = {name: value for split, name, _, value in alone.metrics if split == "validation"}
        assert abs(measured["loss"] - torch.tensor(32.0).log()) < 1


@pytest.mark.parametrize("value", [0, -1.0, True, "30"])
def test_a_wrong_cap_is_one_line(value: object) -> None:
    with pytest.raises(InputError, match=r"model\.logit_cap must be a positive number"):
        ModelSpec.of({**SIZES, "logit_cap": value})


@pytest.mark.parametrize("value", [-1e-4, 2, "1e-4"])
def test_a_wrong_weight_is_one_line(value: Any) -> None:
    with pytest.raises(InputError, match=r"train\.z_loss must be a finite number from 0 to 1"):
        TrainSpec(steps=1, batch_size=1, lr=1, evaluations=1, z_loss=value)
