"""The contract, once: every rule and every variant conforms, equals its paper's recurrence, and has the right limits.

The recurrences are written as the papers write them: a loop over tokens, states as [V, K] matrices, transitions as
explicit [K, K] matrices. They share no code and no layout with `deltalab.reference`.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import deltalab
from deltalab.conformance import check_rule
from deltalab.inputs import Inputs, draw, parts
from deltalab.layer import Gates, initialize
from deltalab.rule import UpdateRule

EXACT = 1e-10
RULES = ["attention", "comba", "deltanet", "gated_deltanet", "linear_attention", "mamba2"]
VARIANTS = [variant for name in RULES for variant in deltalab.get_rule(name).variants()]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def label(rule: UpdateRule) -> str:
    return f"{rule.name} [{type(rule)().turned(rule)}]"


def assert_near(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=EXACT, atol=EXACT)


# --- the papers' recurrences --------------------------------------------------------------------------------

# Of one head: q, k [T, K]; v [T, V]; gates [T]; the state before them [V, K] -> o [T, V], the state after them.
Loop: TypeAlias = Callable[[UpdateRule, Tensor, Tensor, Tensor, dict[str, Tensor], Tensor], tuple[Tensor, Tensor]]


def loop(step: Callable[..., tuple[Tensor, Tensor]]) -> Loop:
    """The recurrence of a step (rule, S, q, k, v, gates) -> (S, o without the scale)."""

    def run(
        rule: UpdateRule, q: Tensor, k: Tensor, v: Tensor, gates: dict[str, Tensor], state: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = []
        for t in range(len(q)):
            now = {name: value[t] for name, value in gates.items()}
            state, o = step(rule, state, q[t], k[t], v[t], **now)
            outputs.append(q.shape[1] ** -0.5 * o)
        return torch.stack(outputs), state

    return run


@loop
def linear_attention(rule: UpdateRule, S: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    S = S + torch.outer(v, k)
    return S, S @ q


@loop
def mamba2(
    rule: UpdateRule, S: Tensor, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """arXiv:2506.02475, Table 1: S_t = alpha_t S_{t-1} + beta_t v_t k_t^T."""
    S = g.exp() * S + beta * torch.outer(v, k)
    return S, S @ q


@loop
def deltanet(rule: UpdateRule, S: Tensor, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> tuple[Tensor, Tensor]:
    """arXiv:2406.06484, Section 2: v_old = S k; S <- S - v_old k^T + (beta v + (1 - beta) v_old) k^T."""
    v_old = S @ k
    v_new = beta * v + (1 - beta) * v_old
    S = S - torch.outer(v_old, k) + torch.outer(v_new, k)
    return S, S @ q


@loop
def gated_deltanet(
    rule: UpdateRule, S: Tensor, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """arXiv:2412.06464, Eq. 10: S_t = S_{t-1} (alpha_t (I - beta_t k_t k_t^T)) + beta_t v_t k_t^T."""
    S = S @ (g.exp() * (torch.eye(len(k), dtype=k.dtype) - beta * torch.outer(k, k))) + beta * torch.outer(v, k)
    return S, S @ q


@loop
def comba(
    rule: Any, S: Tensor, q: Tensor, k: Tensor, v: Tensor, *, g: Tensor, beta: Tensor, b: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """arXiv:2506.02475, Eq. 5 with the transitions of Table 4, feedback strength b beta; q - d p as in App. B.3."""
    identity, feedback = torch.eye(len(k), dtype=k.dtype), b * beta
    transition = {
        "splr": g.exp() * identity - feedback * torch.outer(k, k),
        "iplr": g.exp() * (identity - 2 * feedback * torch.outer(k, k)),
    }[rule.transition.name]
    S = S @ transition + beta * torch.outer(v, k)
    return S, S @ (q - d * {"k": k, "p": b * k}[rule.correction])


LOOPS: dict[str, Loop] = {
    "comba": comba,
    "deltanet": deltanet,
    "gated_deltanet": gated_deltanet,
    "linear_attention": linear_attention,
    "mamba2": mamba2,
}


def softmax_attention(x: Inputs, window: int) -> Tensor:
    """Every output from its own softmax, over the tokens that it may see."""
    o = torch.zeros_like(x.v)
    batch, length, heads, key_dim = x.q.shape
    for b, t, h in torch.cartesian_prod(torch.arange(batch), torch.arange(length), torch.arange(heads)).tolist():
        first = max(0, t + 1 - window) if window else 0
        weights = torch.stack([(x.q[b, t, h] @ x.k[b, i, h] / key_dim**0.5).exp() for i in range(first, t + 1)])
        o[b, t, h] = (weights[:, None] / weights.sum() * x.v[b, first : t + 1, h]).sum(0)
    return o


def every_gate(rule: UpdateRule, x: Inputs) -> dict[str, Tensor]:
    """Gates as [B, T, H], the constant ones among them."""
    given = {name: x.gates.get(name, torch.tensor(gate.low)) for name, gate in rule.gates.items()}
    return {name: value.double().expand(x.v.shape[:3]) for name, value in given.items()}


def inputs(rule: UpdateRule, **sizes: int) -> Inputs:
    return draw(rule, **({"batch": 2, "length": 11, "heads": 2, "key_dim": 4, "value_dim": 3} | sizes))


# --- the contract -------------------------------------------------------------------------------------------


class TestContract:
    """What every rule is held to; a new built-in rule is added to RULES and, in the algebra, to LOOPS."""

    @pytest.mark.parametrize("name", RULES)
    def test_conforms(self, name: str) -> None:
        assert [result.message for result in check_rule(deltalab.get_rule(name)) if not result.passed] == []

    @pytest.mark.parametrize("backend", ["recurrent", "chunked"])
    @pytest.mark.parametrize("rule", [v for v in VARIANTS if v.transition is not None], ids=label)
    def test_equals_its_paper(self, rule: UpdateRule, backend: Any) -> None:
        x = inputs(rule)
        before = torch.randn(2, 2, 4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        o, after = deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=before, backend=backend, chunk_size=4)
        assert isinstance(after, Tensor)
        gates = every_gate(rule, x)
        for b in range(2):
            for h in range(2):
                of_head = {name: value[b, :, h] for name, value in gates.items()}
                want, state = LOOPS[rule.name](rule, x.q[b, :, h], x.k[b, :, h], x.v[b, :, h], of_head, before[b, h].T)
                assert_near(o[b, :, h], want)
                assert_near(after[b, h], state.T)

    @pytest.mark.parametrize("rule", VARIANTS, ids=label)
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(
        length=st.integers(1, 40),
        chunk_size=st.integers(1, 48),
        batch=st.integers(1, 3),
        heads=st.integers(1, 3),
        key_dim=st.integers(1, 8),
        value_dim=st.integers(1, 8),
        past=st.integers(0, 3),
        seed=st.integers(0, 1000),
    )
    def test_forms_agree_at_any_shape(
        self,
        rule: UpdateRule,
        length: int,
        chunk_size: int,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        past: int,
        seed: int,
    ) -> None:
        """Outputs, states and all gradients; after a state that `past` tokens left, where there are any."""
        sizes = {"batch": batch, "heads": heads, "key_dim": key_dim, "value_dim": value_dim, "seed": seed}
        x = inputs(rule, length=past + length, **sizes)
        if past:
            first = x.span(0, past)
            x = x.span(past, state=deltalab.scan(rule, first.q, first.k, first.v, first.gates)[1])
        results = []
        for backend in ("recurrent", "chunked"):
            leaves = x.map(lambda part: part.detach().requires_grad_())
            o, state = deltalab.scan(
                rule, leaves.q, leaves.k, leaves.v, leaves.gates,
                state=leaves.state, backend=backend, chunk_size=chunk_size,
            )  # fmt: skip
            outputs = [o, *parts(state).values()]
            total = torch.stack([(y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs]).sum()
            gradients = torch.autograd.grad(total, list(leaves.named().values()), materialize_grads=True)
            results.append([*outputs, *gradients])
        for want, got in zip(*results, strict=True):
            assert_near(got, want)


def test_every_installed_rule_is_held_to_the_contract() -> None:
    assert set(RULES) == set(deltalab.list_rules())
    assert {name for name in RULES if deltalab.get_rule(name).transition is not None} == set(LOOPS)


@pytest.mark.parametrize("window", [0, 1, 5, 11, 12])
def test_attention_is_softmax_attention(window: int) -> None:
    rule = deltalab.get_rule("attention", window=window)
    x = inputs(rule)
    o, (keys, values) = deltalab.scan(rule, x.q, x.k, x.v, {})
    assert_near(o, softmax_attention(x, window))
    kept = 11 if not window else min(11, window - 1)
    assert_near(keys, x.k.transpose(1, 2)[:, :, 11 - kept :])
    assert_near(values, x.v.transpose(1, 2)[:, :, 11 - kept :])


# --- Comba's listings, as printed but for their misprints ---------------------------------------------------


def listing_1(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, b: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """arXiv:2506.02475, App. B.1. Printed `_At` is alpha, `d, d` of the state its head dimensions."""
    q_new = q - d * k
    o, S = torch.zeros_like(v), q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    for i in range(q.shape[1]):
        _q, _k, _alpha, _beta = q_new[:, i], k[:, i], alpha[:, i], beta[:, i]
        _v_new = _beta[..., None] * (v[:, i] - b * (S * _k[..., None]).sum(-2))
        S = _alpha[..., None, None] * S + _k.unsqueeze(-1) * _v_new.unsqueeze(-2)
        o[:, i] = torch.einsum("bhd,bhdm->bhm", _q, S)
    return o, S


def listing_2(q: Tensor, k: Tensor, v: Tensor, p: Tensor, At: Tensor, dt: Tensor, D: Tensor) -> tuple[Tensor, Tensor]:
    """arXiv:2506.02475, App. B.3."""
    q_new = q - D[..., None] * p
    o, S = torch.zeros_like(v), q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    for i in range(q.shape[1]):
        _q, _k, _p, _At, _dt = q_new[:, i], k[:, i], p[:, i], At[:, i], dt[:, i]
        _v_new = _dt[..., None] * (v[:, i] - (S * _p[..., None]).sum(-2))
        S = _At[..., None, None] * S + _k.unsqueeze(-1) * _v_new.unsqueeze(-2)
        o[:, i] = torch.einsum("bhd,bhdm->bhm", _q, S)
    return o, S


@pytest.mark.parametrize("correction", ["k", "p"])
def test_comba_is_its_listings(correction: str) -> None:
    rule = deltalab.get_rule("comba", correction=correction)
    x = inputs(rule)
    g, beta, b, d = (x.gates[name] for name in ("g", "beta", "b", "d"))
    o, S = deltalab.scan(rule, x.q, x.k, x.v, x.gates, scale=1.0)
    if correction == "k":
        want = listing_1(x.q, x.k, x.v, g.exp(), beta, b[:, None], d[:, None])
    else:
        want = listing_2(x.q, x.k, x.v, b[:, None] * x.k, g.exp(), beta, d)
    assert isinstance(S, Tensor)
    assert_near(o, want[0])
    assert_near(S, want[1])


# --- limits -------------------------------------------------------------------------------------------------


def both(
    a: UpdateRule, gates_a: dict[str, Tensor], b: UpdateRule, gates_b: dict[str, Tensor], x: Inputs
) -> tuple[tuple[Tensor, Any], tuple[Tensor, Any]]:
    return deltalab.scan(a, x.q, x.k, x.v, gates_a), deltalab.scan(b, x.q, x.k, x.v, gates_b)


@pytest.mark.parametrize(
    ("rule", "fixed", "limit"),
    [
        ("gated_deltanet", {"g": 0.0}, "deltanet"),
        ("comba", {"g": 0.0, "b": 1.0, "d": 0.0}, "deltanet"),
        ("mamba2", {"g": 0.0, "beta": 1.0}, "linear_attention"),
        ("comba", {"b": 0.0, "d": 0.0}, "mamba2"),
    ],
)
def test_limits(rule: str, fixed: dict[str, float], limit: str) -> None:
    """A rule with gates held at these values is the simpler rule; with them free it is not."""
    full, simple = deltalab.get_rule(rule), deltalab.get_rule(limit)
    x = inputs(full)
    shared = {name: value for name, value in x.gates.items() if name in simple.gates and name not in fixed}
    held = {name: torch.full_like(value, fixed[name]) if name in fixed else value for name, value in x.gates.items()}
    (o, state), (want, want_state) = both(full, held, simple, shared, x)
    assert_near(o, want)
    assert_near(state, want_state)
    (o, _), _ = both(full, dict(x.gates), simple, shared, x)
    assert not torch.allclose(o, want, atol=1e-3)


def test_comba_iplr_with_half_the_feedback_is_gated_deltanet() -> None:
    full, simple = deltalab.get_rule("comba", transition="iplr", d=0), deltalab.get_rule("gated_deltanet")
    x = inputs(full)
    gates = dict(x.gates) | {"b": torch.full((2,), 0.5, dtype=torch.float64)}
    shared = {"g": x.gates["g"], "beta": x.gates["beta"]}
    (o, state), (want, want_state) = both(full, gates, simple, shared, x)
    assert_near(o, want)
    assert_near(state, want_state)


@pytest.mark.parametrize(("window", "same"), [(11, True), (40, True), (10, False)])
def test_a_window_of_the_whole_sequence_is_none(window: int, same: bool) -> None:
    x = inputs(deltalab.get_rule("attention"))
    narrow, full = (deltalab.scan(deltalab.get_rule("attention", window=w), x.q, x.k, x.v, {})[0] for w in (window, 0))
    assert torch.allclose(narrow, full, rtol=EXACT, atol=EXACT) == same


def test_mamba2_writes_in_proportion_to_what_it_forgets() -> None:
    """Table 5: alpha = exp(-a softplus(W x + c)) and beta = softplus(W x + c) of one W and c, so g = -a beta."""
    module = Gates(deltalab.get_rule("mamba2").gates, 8, 2).double()
    initialize(module, seed=3)
    values = module(torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    a = values["g"] / -values["beta"]
    assert_near(a, module.learned["g"]["log_a"].exp().expand_as(a))  # type: ignore[index]
    assert bool(((a >= 1) & (a <= 16)).all())
