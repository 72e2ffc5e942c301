"""Experts: a plain loop over tokens, decoding, packing, the balance loss, costs, stacking, Muon, and wrong inputs."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils.checkpoint import checkpoint

from deltalab import InputError, get_task
from deltalab.models.block import Block, SwiGLU
from deltalab.models.costs import CostCounter
from deltalab.models.dead_parameters import dead_parameters
from deltalab.models.model import Model, build_model, parameter_groups
from deltalab.models.parts.experts import EXPERTS, Experts
from deltalab.models.spec import ModelSpec
from deltalab.models.start import widening
from deltalab.training import evaluation, muon
from deltalab.training.optimizer import Layout
from deltalab.training.spec import TrainSpec
from deltalab.training.train import train

SIZES: dict[str, Any] = {"rule": "comba", "vocab_size": 16, "d_model": 8, "heads": 2}
TOKENS = torch.arange(20).reshape(2, 10) * 7 % 16
GIVEN: list[dict[str, Any]] = [
    {},
    {"count": 5, "top": 3, "shared": 0},
    {"count": 3, "top": 3, "shared": 2, "width": 5, "balance": 0.5},
]


def net(experts: dict[str, Any], **settings: Any) -> Model:
    return build_model({**SIZES, "experts": experts, **settings}, seed=1).double()


def layer(model: Model, number: int = 0) -> Experts:
    block = model.blocks[number]
    assert isinstance(block, Block)
    assert isinstance(block.mlp, Experts)
    return block.mlp


def statement(experts: Experts, x: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The output and the balance loss of tokens [N, d], token by token."""

    def mlp(into: Tensor, out: Tensor, token: Tensor) -> Tensor:
        gate, up = (token @ into).chunk(2)
        return (gate / (1 + (-gate).exp()) * up) @ out

    count = len(experts.router.weight)
    y, chosen, shares = torch.zeros_like(x), torch.zeros(count, dtype=x.dtype), torch.zeros(count, dtype=x.dtype)
    for n, token in enumerate(x):
        share = (experts.router.weight @ token).exp()
        share = share / share.sum()
        best = sorted(range(count), key=lambda e: -share[e].item())[:top]
        for e in best:
            y[n] += share[e] / share[best].sum() * mlp(experts.into.weight[e], experts.out.weight[e], token)
            chosen[e] += 1
        if isinstance(experts.shared, SwiGLU):
            hidden = experts.shared.hidden
            width = experts.into.weight.shape[-1] // 2
            for first in range(0, hidden, width):  # each shared expert by itself
                part = slice(first, first + width)
                into = torch.cat([half[part] for half in experts.shared.into.weight.split(hidden)]).T
                y[n] += mlp(into, experts.shared.out.weight[:, part].T, token)
        shares = shares + share
    return y, experts.balance * count * (chosen / (len(x) * top) * shares / len(x)).sum()


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_experts_are_their_statement(given: dict[str, Any]) -> None:
    experts, x = layer(net(given)), torch.randn(2, 7, 8, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    found, balance = experts(inputs[0])
    want, even = statement(experts, inputs[1].flatten(0, 1), experts.top)
    torch.testing.assert_close(found.flatten(0, 1), want)
    torch.testing.assert_close(balance, even)
    pairs = []
    for y, loss, read in ((found.flatten(0, 1), balance, inputs[0]), (want, even, inputs[1])):
        grads = torch.autograd.grad((y.cos().sum() + loss), [read, *experts.parameters()])
        pairs.append(grads)
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b)


def test_a_block_is_its_statement() -> None:
    model, x = net({}, canon=["A", "C"]), torch.randn(2, 7, 8, dtype=torch.float64)
    block = model.blocks[0]
    assert isinstance(block, Block)
    after = x + block.mixer(block.canon["A"](block.norm(x, None)[1], None, None)[0])
    y, even = layer(model)(block.canon["C"](block.mlp_norm(after, None)[1], None, None)[0])
    found, branch, cache = block(x, None)
    torch.testing.assert_close(found + branch, after + y)
    torch.testing.assert_close(cache.balance, even)


@pytest.mark.parametrize("settings", [{}, {"canon": ["A", "C"]}, {"attention_residuals": 1}], ids=str)
def test_tokens_one_by_one_and_packed_are_the_whole(settings: dict[str, Any]) -> None:
    model = net({}, **settings)
    want = model(TOKENS)
    logits, cache = model.step(TOKENS[:, :2])
    parts = [logits]
    for i in range(2, 10):
        logits, cache = model.step(TOKENS[:, i : i + 1], cache)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), want)
    packed = model(TOKENS.reshape(1, 20), cu_seqlens=torch.tensor([0, 10, 20]))
    torch.testing.assert_close(packed.reshape(want.shape), want)
    later = TOKENS.clone()
    later[:, 6:] = 3
    torch.testing.assert_close(model(later)[:, :6], want[:, :6])
    assert cache[0].rows(torch.tensor([1])).numel() == cache[0].numel() / 2


def test_the_loss_has_the_balance_of_all_blocks_in_training_alone() -> None:
    model, without = net({"balance": 0.3}), net({"balance": 0})
    hidden, caches = model.hidden(TOKENS)
    even = sum(cache.balance for cache in caches if cache.balance is not None)
    assert isinstance(even, Tensor)
    assert even > 0.5
    torch.testing.assert_close(model.loss(TOKENS, TOKENS), model.cross_entropy(hidden, TOKENS) + even)
    torch.testing.assert_close(model.loss(TOKENS, TOKENS), without.loss(TOKENS, TOKENS) + even)
    model.eval()
    torch.testing.assert_close(model.loss(TOKENS, TOKENS), without.loss(TOKENS, TOKENS))
    assert without.read(TOKENS)[1] is None


def test_even_choices_lose_the_weight_and_training_evens_them() -> None:
    experts = layer(net({"shared": 0, "balance": 0.5}))
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 8, dtype=torch.float64, generator=draw)
    x[:, 0] = 2.0
    with torch.no_grad():
        experts.router.weight[0, 0] += 2.0  # all tokens choose the first
    before = experts(x)[1]
    optimizer = torch.optim.Adam([experts.router.weight], lr=0.02)
    for _ in range(200):
        loss = experts(x)[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = experts(x)[1]
    assert before > 0.6
    torch.testing.assert_close(after, torch.full_like(after, 0.5), rtol=0.02, atol=0)


def test_activations_computed_again_give_the_same_gradients() -> None:
    plain, again = net({"balance": 0.5}), net({"balance": 0.5})
    plain.loss(TOKENS, TOKENS).backward()
    hidden, caches = again.transform(
        again.embed(TOKENS), checkpoint=lambda *args: checkpoint(*args, use_reentrant=False)
    )
    even = torch.stack([cache.balance for cache in caches if cache.balance is not None]).sum()
    (again.cross_entropy(hidden, TOKENS) + even).backward()
    for a, b in zip(plain.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_routing_is_in_fp32_under_autocast() -> None:
    experts, x = layer(net({})).float(), torch.randn(50, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, even = experts(x)
    want, exact = experts(x)
    torch.testing.assert_close(even, exact)
    torch.testing.assert_close(found.float(), want, rtol=0.1, atol=0.05)


def test_many_models_are_computed_as_one() -> None:
    experts = layer(net(GIVEN[1]))
    rows = {name: torch.stack([value, -value, 2 * value]) for name, value in experts.state_dict().items()}
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64)
    found = vmap(lambda parameters, z: functional_call(experts, parameters, (z,)))(rows, x)
    for i in range(3):
        want = functional_call(experts, {name: value[i] for name, value in rows.items()}, (x[i],))
        torch.testing.assert_close(tuple(part[i] for part in found), want)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_stack_is_as_each_alone(optimizer: Any) -> None:
    task = get_task("mqar", length=16, pairs=2, vocab_size=32)
    spec = TrainSpec(steps=4, batch_size=4, lr=1e-2, evaluations=1, eval_batches=1, optimizer=optimizer)
    model = ModelSpec.of({**SIZES, "vocab_size": 32, "experts": {"balance": 0.5}})
    together, alone = train(task, model, spec, [1, 2]).runs[1], train(task, model, spec, [2]).runs[0]
    for name, value in alone.weights.items():
        torch.testing.assert_close(together.weights[name], value, rtol=1e-4, atol=1e-5)
    plain = ModelSpec.of({**SIZES, "vocab_size": 32, "experts": {"balance": 0}})
    unbalanced = train(task, plain, spec, [2]).runs[0].weights["blocks.0.mlp.router.weight"]
    assert not torch.allclose(alone.weights["blocks.0.mlp.router.weight"], unbalanced)


def test_muon_takes_each_expert_by_itself() -> None:
    model = net(GIVEN[2]).float()
    layout = Layout(model)
    state = {name: value.detach() for name, value in model.named_parameters()}
    taken = muon.Muon(layout.matrices).taken(layout.pack(state)[None])
    found = dict(zip(layout.matrices, taken, strict=True))
    for name in ("into", "out"):
        for number in range(2):
            weight = state[f"blocks.{number}.mlp.{name}.weight"]
            matrices = found[weight.shape[1:]][0]
            assert all(any(torch.equal(matrix, expert) for matrix in matrices) for expert in weight)


def test_costs_are_those_of_active_experts_and_nothing_is_dead() -> None:
    sizes = {"count": 6, "top": 2, "shared": 1, "width": 8}
    spec, plain = ModelSpec.of({**SIZES, "experts": sizes}), ModelSpec.of({**SIZES, "mlp_width": 24})
    found, before = (CostCounter().costs(given, 40) for given in (spec, plain))
    assert found.parameters == sum(p.numel() for p in build_model(spec).parameters())
    each, blocks = 3 * 8 * 8, 2
    assert found.parameters - before.parameters == blocks * (6 * 8 + (6 + 1) * each - 3 * each)
    assert found.cache == before.cache
    # As many as the MLP of the same width, and the router.
    assert found.flops_per_token - before.flops_per_token == blocks * 2 * 6 * 8
    model = build_model(spec)
    costs = {name: value for _, name, _, value in evaluation.costs(model, 16, 0)}
    assert costs["flops_per_token"] == found.flops_per_token
    without = {name: value for _, name, _, value in evaluation.counted_without_numbers(model, 16, 0)}
    assert without["flops_per_token"] == found.flops_per_token
    assert dead_parameters(spec, 40) == 0
    assert dead_parameters(ModelSpec.of({**SIZES, "experts": {"count": 64}}), 8) == 0


def test_experts_start_as_an_mlp_does() -> None:
    sizes: dict[str, Any] = {**SIZES, "d_model": 64, "layers": 3}
    model = build_model({**sizes, "experts": {}})
    experts, shrink = layer(model), 6**-0.5
    assert isinstance(experts.shared, SwiGLU)
    hidden = 64  # 176 over three experts, as a multiple of 8
    assert experts.into.weight.shape == (8, 64, 2 * hidden)
    assert experts.out.weight.shape == (8, hidden, 64)
    assert experts.shared.hidden == hidden
    for weight, std in (
        (experts.router.weight, 1 / 8),
        (experts.into.weight, 1 / 8),
        (experts.out.weight, shrink / 8),
        (experts.shared.out.weight, shrink / 8),
    ):
        assert abs(weight.std() / std - 1) < 0.15
    spread = layer(build_model({**sizes, "experts": {}, "init_std": 0.02}))
    assert isinstance(spread.shared, SwiGLU)
    for weight, std in (
        (spread.router.weight, 0.02),
        (spread.into.weight, 0.02),
        (spread.out.weight, 0.02 * shrink),
        (spread.shared.out.weight, 0.02 * shrink),
    ):
        assert abs(weight.std() / std - 1) < 0.15


def test_experts_are_decayed_and_scaled_with_the_width() -> None:
    model = build_model({**SIZES, "experts": {}, "base_width": 4})
    scaled, *_ = parameter_groups(model, 0.1, 1e-2)
    ours = {id(p) for p in layer(model).parameters()}
    assert ours <= {id(p) for p in scaled["params"]} == {id(p) for p in widening(model)}
    decayed, _ = parameter_groups(build_model({**SIZES, "experts": {}}), 0.1)
    assert [p for p in decayed["params"] if p.dim() == 3]


def test_models_without_are_as_before() -> None:
    assert ModelSpec.of(SIZES) == ModelSpec.of({**SIZES, "experts": None})
    assert ModelSpec.of({**SIZES, "experts": {}}).experts == EXPERTS
    assert not [name for name in build_model(SIZES).state_dict() if "router" in name]
    torch.testing.assert_close(
        build_model(SIZES).loss(TOKENS, TOKENS), F.cross_entropy(build_model(SIZES)(TOKENS).mT, TOKENS)
    )


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"experts": 8}, "model.experts must be {count, top, shared, width, balance}, or null, not 8"),
    ({"experts": {"counts": 8}}, "model.experts: unknown key 'counts'; did you mean 'count'?"),
    ({"experts": {"count": 1}}, "model.experts.count must be a whole number of at least 2, not 1"),
    ({"experts": {"top": 1}}, "model.experts.top must be a whole number of at least 2, not 1"),
    ({"experts": {"count": 4, "top": 5}}, "model.experts.top must be at most count 4, not 5"),
    ({"experts": {"shared": -1}}, "model.experts.shared must be a whole number of at least 0"),
    ({"experts": {"width": 0}}, "model.experts.width must be a whole number of at least 1"),
    ({"experts": {"count": 5000}}, "model.experts.count must be at most 4,096"),
    ({"experts": {"balance": -0.1}}, "model.experts.balance must be a number from 0 to 1"),
    ({"experts": {"balance": True}}, "model.experts.balance must be a number from 0 to 1"),
    ({"experts": {}, "mlp": False}, "model.experts has no effect without an MLP"),
    ({"experts": {}, "block": "mamba"}, "model.experts has no effect without an MLP"),
    ({"experts": {}, "canon": ["D"]}, "model.canon D stands inside of an MLP"),
    ({"experts": {"width": 8}, "mlp_width": 8}, "model.mlp_width has no effect with model.experts.width"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=str)
def test_wrong_experts_are_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ModelSpec.of({**SIZES, **settings})
    assert message in str(raised.value)
