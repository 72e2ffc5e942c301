"""Rules that learn in their state equal a plain loop with autograd as the inner gradient, and their linear limits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import Inputs, draw, normal, parts
from deltalab.rule import UpdateRule

EXACT = 1e-9
LENGTH = 11

SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *(
        (name, {"mini_batch": b, "norm": norm, "residual": residual})
        for name in ("ttt_linear", "ttt_mlp")
        for b, norm, residual in [
            (1, True, True),
            (4, True, True),
            (4, False, True),
            (16, True, False),
            (1, False, False),
        ]
    ),
    ("ttt_mlp", {"mini_batch": 4, "beta": {"sigmoid": {"max": 1}}}),
    *(("titans", {"mini_batch": b}) for b in (1, 4, 16)),
    ("titans", {"eta": 0}),
    ("titans", {"g": 0, "mini_batch": 4}),
    *(("miras", {"p": p, "mini_batch": b}) for p in (1.0, 1.5, 2.0) for b in (1, 4)),
    ("miras", {"p": 1.5, "reads": "decayed_state"}),
    ("miras", {"p": 1.0, "smooth": 1e-2}),
    ("miras", {"p": 3.0, "beta": {"sigmoid": {"max": 0.1}}}),
]


def inputs(rule: UpdateRule, *, key_dim: int = 4, value_dim: int = 3) -> Inputs:
    return draw(rule, batch=2, length=LENGTH, heads=2, key_dim=key_dim, value_dim=value_dim, seed=3)


# --- the papers' recurrences again --------------------------------------------------------------------------


def read(weights: list[Tensor], x: Tensor, rule: Any) -> Tensor:
    """f(x; W) for one token, x [B, H, K]."""
    z = torch.einsum("bhk,bhkv->bhv", x, weights[0])
    if len(weights) == 2:
        z = torch.einsum("bhk,bhkv->bhv", F.gelu(z, approximate="tanh"), weights[1])
    if getattr(rule, "norm", False):
        z = F.layer_norm(z, z.shape[-1:], eps=1e-6)
    if getattr(rule, "residual", False):
        size = min(x.shape[-1], z.shape[-1])
        z = torch.cat([z[..., :size] + x[..., :size], z[..., size:]], dim=-1)
    return z


def loss(weights: list[Tensor], k: Tensor, v: Tensor, rule: Any) -> Tensor:
    e = read(weights, k, rule) - v
    if rule.name == "miras" and rule.p != 2:
        return ((e**2 + rule.smooth) ** (rule.p / 2)).sum() / rule.p
    return (e**2).sum() / 2


def by_autograd(rule: Any, x: Inputs) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """o, the weights and their momentum after the last token."""
    gates = {name: value if value.dim() == 3 else value.expand(x.k.shape[:3]) for name, value in x.gates.items()}
    now = [w.requires_grad_() for w in rule.start(x.k, x.v)[: 2 if rule.name == "ttt_mlp" else 1]]
    moved = [torch.zeros_like(w) for w in now]
    out = []
    for t in range(LENGTH):
        if t % rule.mini_batch == 0:
            begun = now
        step = gates["theta" if rule.name == "titans" else "beta"][:, t, :, None, None]
        alpha = gates["g"][:, t, :, None, None].exp() if "g" in gates else torch.ones_like(step)
        eta = gates["eta"][:, t, :, None, None] if "eta" in gates else torch.zeros_like(step)
        at = [alpha * w for w in begun] if getattr(rule, "reads", "state") == "decayed_state" else begun
        gradients = torch.autograd.grad(loss(at, x.k[:, t], x.v[:, t], rule), at, create_graph=True)
        moved = [eta * z - step * gradient for z, gradient in zip(moved, gradients, strict=True)]
        now = [alpha * w + z for w, z in zip(now, moved, strict=True)]
        out.append(read(now, x.q[:, t], rule))
    return x.k.shape[-1] ** -0.5 * torch.stack(out, dim=1), now, moved


def with_gradients(o: Tensor, states: list[Tensor], x: Inputs) -> list[Tensor]:
    """o, states, and the gradient of a weighted sum of all of them in every input."""
    results = [o, *states]
    total = torch.stack([(y * normal(*y.shape, seed=i)).sum() for i, y in enumerate(results)]).sum()
    return [*results, *torch.autograd.grad(total, list(x.named().values()))]


def assert_close(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("split", [None, 1, 6], ids=lambda split: f"split-{split}")
@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(("name", "knobs"), SETTINGS, ids=lambda part: str(part) if isinstance(part, dict) else part)
def test_rule_equals_its_paper(name: str, knobs: dict[str, Any], backend: Any, split: int | None) -> None:
    rule: Any = deltalab.get_rule(name, **knobs)
    x = inputs(rule).map(lambda part: part.requires_grad_())
    o, weights, momentum = by_autograd(rule, x)
    expected = [*weights, *momentum] if name == "titans" else weights
    want = with_gradients(o, expected, x)

    outputs, state = [], None
    for tokens in [(0, LENGTH)] if split is None else [(0, split), (split, LENGTH)]:
        part = x.span(*tokens)
        got, state = deltalab.scan(rule, part.q, part.k, part.v, part.gates, state=state, backend=backend)
        outputs.append(got)
    states = list(parts(state).values())
    assert_close(with_gradients(torch.cat(outputs, dim=1), states[: len(expected)], x), want)


# --- limits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "limit", "fixed"),
    [
        (("ttt_linear", {"mini_batch": 1, "norm": False, "residual": False}), "deltanet", {}),
        (("titans", {"g": 0, "eta": 0}), "deltanet", {}),
        (("miras", {"p": 2.0, "g": 0}), "deltanet", {}),
        (("miras", {"p": 2.0}), "comba", {"b": 1.0, "d": 0.0}),
        (("miras", {"p": 2.0, "reads": "decayed_state"}), "gated_deltanet", {}),
    ],
    ids=lambda part: str(part),
)
def test_limit(rule: tuple[str, dict[str, Any]], limit: str, fixed: dict[str, float]) -> None:
    nonlinear, linear = deltalab.get_rule(rule[0], **rule[1]), deltalab.get_rule(limit)
    x = inputs(nonlinear, key_dim=5, value_dim=5).map(lambda part: part.requires_grad_())
    renamed = {"beta" if name == "theta" else name: gate for name, gate in x.gates.items()}
    renamed |= {name: torch.full((2,), number, dtype=torch.float64) for name, number in fixed.items()}
    for backend in ("recurrent", "chunked"):
        o, state = deltalab.scan(nonlinear, x.q, x.k, x.v, x.gates, backend=backend)  # type: ignore[arg-type]
        want, after = deltalab.scan(linear, x.q, x.k, x.v, renamed)
        assert_close(with_gradients(o, [state[0]], x), with_gradients(want, [*after], x))


@pytest.mark.parametrize("backend", ["recurrent", "chunked"])
@pytest.mark.parametrize(
    "knobs",
    [{}, {"p": 1.0}, {"p": 1.0, "smooth": 1e-2}, {"p": 2.0}, {"p": 3.0}, {"g": 0}],
    ids=lambda knobs: str(knobs),
)
def test_a_written_state_is_where_its_own_gradient_is_taken(knobs: dict[str, Any], backend: Any) -> None:
    """S_t = alpha_t S_{t-1} - beta_t grad L(S_t), for each token."""
    rule: Any = deltalab.get_rule("miras", reads="written_state", **knobs)
    x = inputs(rule)
    before = normal(2, 2, 4, 3, seed=5)
    for t in range(LENGTH):
        now = x.span(t, t + 1)
        beta, g = (now.gates.get(name, torch.zeros(2, 1, 2, dtype=torch.float64)) for name in ("beta", "g"))
        o, (after,) = deltalab.scan(rule, now.q, now.k, now.v, now.gates, scale=1.0, state=(before,), backend=backend)
        written = after.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss([written], now.k[:, 0], now.v[:, 0], rule), written)
        left = after + beta[:, 0, :, None, None] * gradient
        torch.testing.assert_close(left, g[:, 0, :, None, None].exp() * before, rtol=0, atol=1e-12)
        torch.testing.assert_close(o[:, 0], read([after], now.q[:, 0], rule))
        before = after


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
def test_a_written_state_has_the_gradient_of_the_exact_solution(p: float) -> None:
    rule = deltalab.get_rule("miras", reads="written_state", p=p, smooth=1e-2)
    x = inputs(rule).span(0, 3).map(lambda part: part.requires_grad_())
    names = list(x.gates)

    def written(q: Tensor, k: Tensor, v: Tensor, *gates: Tensor) -> Tensor:
        return deltalab.scan(rule, q, k, v, dict(zip(names, gates, strict=True)))[0]

    assert torch.autograd.gradcheck(written, (x.q, x.k, x.v, *x.gates.values()))


def test_a_written_state_is_the_delta_rule_with_a_step_that_cannot_overshoot() -> None:
    """For p = 2 and unit keys the minimum is Gated DeltaNet's, with beta / (1 + beta)."""
    rule = deltalab.get_rule("miras", p=2.0, reads="written_state")
    x = inputs(rule)
    o, (state,) = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    shorter = x.gates | {"beta": x.gates["beta"] / (1 + x.gates["beta"])}
    want, (after,) = deltalab.scan(deltalab.get_rule("gated_deltanet"), x.q, x.k, x.v, shorter)
    assert_close([o, state], [want, after])


def test_titans_of_one_long_mini_batch_is_the_papers_sum() -> None:
    """M_t = beta_t M_0 - sum_i theta_i beta_t / beta_i grad(M_0; x_i): Eq. 16, without momentum."""
    rule = deltalab.get_rule("titans", eta=0, mini_batch=LENGTH)
    x = inputs(rule)
    _, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    decay = x.gates["g"].cumsum(1)
    strength = x.gates["theta"] * (decay[:, -1:] - decay).exp()
    torch.testing.assert_close(state[0], torch.einsum("bth,bthk,bthv->bhkv", strength, x.k, x.v))


# --- starts and edges ---------------------------------------------------------------------------------------


def test_every_sequence_starts_from_the_same_weights() -> None:
    k, v = torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 5)
    for name in ("ttt_linear", "ttt_mlp"):
        rule = deltalab.get_rule(name, mini_batch=1)
        torch.manual_seed(1)
        first = rule.start(k, v)
        torch.manual_seed(2)
        again = rule.start(k.expand(2, 7, 3, 4), v.expand(2, 7, 3, 5))
        for part, same in zip(first, again, strict=True):
            assert torch.equal(part, same)
            assert torch.equal(part[0], part[1])
            assert (part[:, 0] != part[:, 1]).all()
    plain = deltalab.get_rule("ttt_linear", mini_batch=1, norm=False)
    (zeros,) = plain.start(k, v)
    assert torch.equal(zeros, torch.zeros(2, 3, 4, 5))


def test_a_mini_batch_goes_on_in_the_next_part() -> None:
    rule = deltalab.get_rule("ttt_linear", mini_batch=4)
    x = inputs(rule)
    gone = [deltalab.scan(rule, y.q, y.k, y.v, y.gates)[1][-1].shape for y in (x.span(0, n) for n in range(1, 9))]
    assert [tuple(shape) for shape in gone] == [(2, 2, n, 0) for n in (1, 2, 3, 0, 1, 2, 3, 0)]


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0])
def test_errors_of_zero_have_finite_gradients(p: float) -> None:
    rule = deltalab.get_rule("miras", p=p)
    x = inputs(rule)
    x = Inputs(x.q, x.k, torch.zeros_like(x.v), x.gates).map(lambda part: part.requires_grad_())
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates)
    assert all(part.isfinite().all() for part in with_gradients(o, list(parts(state).values()), x))


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"reads": "decayed_state", "mini_batch": 4}, "reads decayed_state takes mini_batch 1"),
        ({"reads": "written_state", "mini_batch": 4}, "reads written_state takes mini_batch 1"),
        ({"p": 2.0, "smooth": 0.01}, "smooth has no effect with p 2"),
    ],
)
def test_what_miras_cannot_honour_is_refused(knobs: dict[str, Any], reason: str) -> None:
    with pytest.raises(deltalab.InputError, match=reason):
        deltalab.get_rule("miras", **knobs)
