"""Attention over depth: a plain loop over readers, decoding, packing, stacking, and what has no effect."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deltalab import InputError, get_task
from deltalab.models.block import Block
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.model import Model, build_model
from deltalab.models.parts.depth import DepthNorm
from deltalab.models.spec import ModelSpec
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "comba", "vocab_size": 16, "d_model": 8, "heads": 2, "layers": 3}
GROUPS = [1, 2, 3, 10]
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 16


def net(group: int, **settings: Any) -> Model:
    """A model whose readers weigh outputs unequally."""
    model = build_model({**SIZES, "attention_residuals": group, **settings}, seed=1).double()
    with torch.no_grad():
        for part in model.modules():
            if isinstance(part, DepthNorm):
                part.query.normal_()
                part.keys.weight.add_(0.1 * torch.randn(8))
    return model


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def read(norm: DepthNorm, embedding: Tensor, outputs: list[Tensor], group: int, eps: float) -> Tensor:
    """What a reader sees, token by token."""
    sources = [embedding]
    for start in range(0, len(outputs), group):
        sources.append(torch.stack(outputs[start : start + group]).sum(0))
    mean = torch.zeros_like(embedding)
    for b in range(embedding.shape[0]):
        for t in range(embedding.shape[1]):
            keys = [rms(source[b, t], norm.keys.weight, eps) for source in sources]
            weights = torch.stack([key @ norm.query for key in keys]).exp()
            for weight, source in zip(weights / weights.sum(), sources, strict=True):
                mean[b, t] += weight * source[b, t]
    return rms(mean, norm.norm.weight, eps)


@pytest.mark.parametrize("group", GROUPS)
def test_a_model_is_its_statement(group: int) -> None:
    model, eps = net(group), ModelSpec.of(SIZES).norm_eps
    embedding, outputs = model.embed(TOKENS), list[Tensor]()
    for block in model.blocks:
        assert isinstance(block, Block)
        assert block.mlp is not None
        outputs.append(block.mixer(read(block.norm, embedding, outputs, group, eps)))  # type: ignore[arg-type]
        outputs.append(block.mlp(read(block.mlp_norm, embedding, outputs, group, eps)))  # type: ignore[arg-type]
    want = read(model.norm, embedding, outputs, group, eps)  # type: ignore[arg-type]
    torch.testing.assert_close(model.transform(embedding)[0], want)


@pytest.mark.parametrize("settings", [{}, {"canon": ["A", "C"]}, {"beside": "gla"}], ids=str)
@pytest.mark.parametrize("group", [1, 2])
def test_tokens_one_by_one_and_packed_are_the_whole(group: int, settings: dict[str, Any]) -> None:
    model = net(group, **settings)
    want = model(TOKENS)
    logits, cache = model.step(TOKENS[:, :2])
    parts = [logits]
    for i in range(2, 10):
        logits, cache = model.step(TOKENS[:, i : i + 1], cache)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    packed = model(TOKENS.reshape(1, 20), cu_seqlens=torch.tensor([0, 10, 20]))
    torch.testing.assert_close(packed.reshape(want.shape), want)
    at = torch.tensor([[1, 4], [0, 9]])
    torch.testing.assert_close(
        model.features(TOKENS, at), model.features(TOKENS).gather(1, at[..., None].expand(2, 2, 8))
    )


def test_activations_computed_again_give_the_same_gradients() -> None:
    plain, again = net(2), net(2)
    again.load_state_dict(plain.state_dict())
    plain.hidden(TOKENS)[0].square().sum().backward()
    hidden = again.transform(again.embed(TOKENS), checkpoint=lambda *args: checkpoint(*args, use_reentrant=False))[0]
    hidden.square().sum().backward()
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_reader_starts_as_the_mean_of_its_sources() -> None:
    norm, x = DepthNorm(8, 1, 1e-5), torch.randn(3, 2, 4, 8)
    outputs = norm(norm(x[0], None)[0], x[1])[0]
    torch.testing.assert_close(norm(outputs, x[2])[1], rms(x.mean(0), torch.ones(8), 1e-5))


def test_models_without_are_as_before() -> None:
    assert not [name for name in build_model(SIZES).state_dict() if "query" in name]
    assert ModelSpec.of(SIZES) == ModelSpec.of({**SIZES, "attention_residuals": 0})


def test_costs_are_counted_and_nothing_is_dead() -> None:
    spec, plain = ModelSpec.of({**SIZES, "attention_residuals": 1}), ModelSpec.of(SIZES)
    found, before = (CostCounter().costs(given, 40) for given in (spec, plain))
    assert found.parameters == sum(p.numel() for p in build_model(spec).parameters())
    assert found.parameters - before.parameters == (2 * 3 + 1) * (8 + 8)
    assert found.cache == before.cache
    assert dead_parameters(spec, 40) == 0


def test_a_stack_is_as_each_alone() -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1)
    model = ModelSpec.of({**SIZES, "vocab_size": 32, "attention_residuals": 2})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    assert alone.weights["blocks.1.norm.query"].abs().max() > 0
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [-1, 1.5, True, "full"])
def test_a_wrong_number_is_one_line(value: object) -> None:
    with pytest.raises(InputError, match=r"model\.attention_residuals must be a whole number of at least 0"):
        ModelSpec.of({**SIZES, "attention_residuals": value})
