"""One rule as the limit of another: what the papers say becomes what, at which values of the gates."""

import pytest
import torch
from torch import Tensor

import deltalab
from deltalab.authoring import inputs
from deltalab.authoring.inputs import normal
from deltalab.rule import UpdateRule

B, T, H, K, V = 2, 11, 3, 5, 4
Inputs = dict[str, Tensor]


def rule(name: str, **knobs) -> UpdateRule:
    return deltalab.get_rule(name, **knobs)


def draw(of: UpdateRule) -> Inputs:
    return inputs.draw(of, batch=B, length=T, heads=H, key_dim=K, value_dim=V).named()


def scan(of: UpdateRule, x: Inputs, backend: str, state=None):
    gates = {name: value for name, value in x.items() if name not in "qkv"}
    return deltalab.scan(of, x["q"], x["k"], x["v"], gates, scale=1.0, state=state, backend=backend, chunk_size=4)


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def apart(ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).abs().max() > 1e-3)


def agree(one: UpdateRule, x: Inputs, other: UpdateRule, y: Inputs) -> None:
    """The parallel form of one, token by token of the other, from a state that is given."""
    state = (normal(B, H, K, V, seed=97),)
    ours, (after,) = scan(one, x, "chunked", state)
    theirs, (last,) = scan(other, y, "recurrent", state)
    close(ours, theirs)
    close(after, last)


def only(x: Inputs, *names: str, **values: Tensor) -> Inputs:
    return {name: x[name] for name in ("q", "k", "v", *names)} | values


def channels(g: Tensor) -> Tensor:
    return g[..., None].expand(*g.shape, K)


def test_gated_deltanet_without_decay_is_deltanet():
    x = draw(rule("deltanet"))
    agree(rule("gated_deltanet", g=0), x, rule("deltanet"), x)


@pytest.mark.parametrize(("transition", "b"), [("splr", 1.0), ("iplr", 0.5), ("dplr", 1.0)])
def test_comba_without_decay_and_feedback_control_is_deltanet(transition, b):
    """b = 1, alpha = 1, d = 0; b = 1/2 for IPLR, which doubles it (000 Table 4)."""
    comba, x = rule("comba", transition=transition, d=0), draw(rule("deltanet"))
    g = torch.zeros(B, T, H, *[K] * (transition == "dplr"), dtype=torch.float64)
    agree(comba, x | {"g": g, "b": torch.full((H,), b, dtype=torch.float64)}, rule("deltanet"), x)


def test_comba_iplr_at_half_the_feedback_is_gated_deltanet():
    x = draw(rule("gated_deltanet"))
    half = torch.full((H,), 0.5, dtype=torch.float64)
    agree(rule("comba", transition="iplr", d=0), x | {"b": half}, rule("gated_deltanet"), x)


def test_equal_channels_are_a_scalar():
    """DPLR contains SPLR, KDA Gated DeltaNet, and GLA the scalar decay."""
    x = draw(rule("comba"))
    wide = x | {"g": channels(x["g"])}
    agree(rule("comba", transition="dplr"), wide, rule("comba"), x)
    agree(rule("kda"), only(wide, "g", "beta"), rule("gated_deltanet"), only(x, "g", "beta"))
    agree(rule("gla"), only(wide, "g"), rule("sgla", beta=1), only(x, "g"))


def test_rules_that_differ_in_their_gates_alone():
    x = draw(rule("sgla"))
    agree(rule("mamba2"), x, rule("sgla"), x)
    balanced = x | {"beta": 1 - x["g"].exp()}
    agree(rule("metala"), balanced, rule("sgla"), balanced)
    still = torch.zeros(B, T, H, dtype=torch.float64)
    agree(rule("mamba2", beta=1), only(x, g=still), rule("linear_attention"), only(x))
    agree(rule("comba", b={"head_sigmoid": {}}, d=0), x | {"b": still[0, 0]}, rule("mamba2"), x)
    fixed = torch.log(1 - 2.0 ** (-5 - torch.arange(H, dtype=torch.float64)))
    agree(rule("retnet"), only(x), rule("mamba2", beta=1), only(x, g=fixed.expand(B, T, H)))
    y = draw(rule("hgrn2"))
    agree(rule("hgrn2"), y, rule("gla"), only(y, "g", k=1 - y["g"].exp()))


def test_delta_product_of_one_step_is_deltanet_and_of_n_is_deltanet_on_n_times_the_tokens():
    beta = {"sigmoid": {"max": 2}}
    x = draw(rule("delta_product", n_h=1))
    agree(rule("delta_product", n_h=1), x, rule("deltanet", beta=beta), x)
    x = draw(rule("delta_product", n_h=3))
    o, (state,) = scan(rule("delta_product", n_h=3), x, "chunked")
    longer = x | {"q": x["q"].repeat_interleave(3, dim=1)}
    every, (last,) = scan(rule("deltanet", beta=beta), longer, "recurrent")
    close(o, every[:, 2::3])
    close(state, last)


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_rwkv7_with_one_learning_rate_for_all_channels_is_comba_dplr(rho):
    """a = beta, xi = 1 and unit keys: (diag(alpha) - beta k k^T) S + k~ v^T. At rho = 1, k~ = beta k and the rules are
    one; at rho = 0, k~ = k, and it is the tied delta rule that writes v where Comba is given v / beta."""
    comba = rule("comba", transition="dplr", b=1, d=0)
    x = draw(comba)
    fixed = {name: torch.full((H, K), value, dtype=torch.float64) for name, value in (("xi", 1.0), ("rho", rho))}
    y = only(x, "g", a=channels(x["beta"]), **fixed)
    x["v"] = x["v"] if rho else x["v"] / x["beta"][..., None]
    agree(rule("rwkv7"), y, comba, x)


def test_without_fitting_the_residual_rules_are_one_step_of_the_delta_rule():
    """001 Section 3.1: at alpha = 1 the output is that of S_{t-1} + gamma (v - S_{t-1} k) k^T. S itself goes on as
    before, which for RDN with gamma = beta is the very same step: DeltaNet."""
    knobs = {"fitting": False, "loss": "l2"}
    x = draw(rule("rdn")) | {"g": torch.zeros(B, T, H, dtype=torch.float64)}
    o, (S, _) = scan(rule("rdn", **knobs), x | {"gamma": x["beta"]}, "chunked")
    theirs, (last,) = scan(rule("deltanet"), only(x, "beta"), "recurrent")
    close(o, theirs)
    close(S, last)

    o, _ = scan(rule("rla", **knobs), x, "chunked")
    before = (torch.zeros(B, H, K, V, dtype=torch.float64),)
    for t in range(T):
        now = {name: value[:, t : t + 1] for name, value in x.items()}
        one, _ = scan(rule("deltanet"), only(now, beta=now["gamma"]), "recurrent", before)
        close(o[:, t : t + 1], one)
        _, before = scan(rule("sgla", g=0), only(now, "beta"), "recurrent", before)


def test_a_window_as_long_as_the_sequence_is_none():
    x = draw(rule("attention"))
    full = scan(rule("attention"), x, "chunked")[0]
    close(scan(rule("attention", window=T), x, "chunked")[0], full)
    assert apart(scan(rule("attention", window=T - 1), x, "chunked")[0], full)
