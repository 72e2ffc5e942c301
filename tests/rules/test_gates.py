"""Gate parameterizations against the formulas of arXiv:2506.02475 Table 5 and of their own papers, and their starts."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import deltalab
from deltalab import gates
from deltalab.errors import InputError
from deltalab.gates import Gate
from deltalab.models.layer import initialize
from deltalab.models.rule_inputs.gates import Gates

D, H, K = 24, 3, 4


def values(given: dict[str, Gate], heads: int = H, key_dim: int = K) -> tuple[Gates, Tensor, dict[str, Tensor]]:
    module = Gates(given, D, heads, key_dim, key_dim)
    initialize(module, 0)
    x = torch.randn(2, 64, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return module.double(), x, module.double()(x)


def projected(module: Gates, name: str, x: Tensor) -> Tensor:
    """W x, or W_1 W_2 x, from the weights themselves."""
    weights = [weight for key, weight in module.named_parameters() if key.startswith(f"project.{name}.")]
    for weight in weights:
        x = x @ weight.T
    return x


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def test_mamba2_alpha_and_beta_come_of_one_projection():
    """alpha = exp(-a softplus(W x + c)), beta = softplus(W x + c): beta a = -g."""
    module, x, got = values(deltalab.get_rule("mamba2").gates)
    assert list(module.project) == ["g"]
    a, c = module.learned["g"]["log_a"].exp(), module.learned["g"]["dt_bias"]
    step = torch.log1p(torch.exp(projected(module, "g", x) + c))
    close(got["g"].exp(), torch.exp(-a * step))
    close(got["beta"], step)
    close(got["beta"] * a, -got["g"])


def test_mamba2_starts_with_alpha_near_1():
    """a uniform in [1, 16], dt log-uniform in [0.001, 0.1], as Mamba2 has them."""
    module, _, got = values({"g": gates.mamba2_decay()}, heads=4096)
    a, c = module.learned["g"]["log_a"].exp(), module.learned["g"]["dt_bias"]
    dt = F.softplus(c)
    tight = 1 + 1e-5
    assert 1 / tight <= a.min() < 1.1
    assert 15.9 < a.max() <= 16 * tight
    assert abs(a.mean() - 8.5) < 0.3
    assert 0.001 / tight <= dt.min() < 0.0011
    assert 0.09 < dt.max() <= 0.1 * tight
    assert abs(dt.log().mean() - math.log(0.01)) < 0.1
    assert (torch.exp(-a * dt) >= math.exp(-1.6) / tight).all()
    assert got["g"].exp().median() > 0.9  # 0.93, with x of unit variance
    narrow, _, _ = values({"g": gates.mamba2_decay(a_min=2, a_max=2, dt_min=0.05, dt_max=0.05)}, heads=8)
    rate = narrow.learned["g"]["log_a"].exp() * F.softplus(narrow.learned["g"]["dt_bias"])
    torch.testing.assert_close(rate, torch.full_like(rate, 0.1), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("tau", "low", "high"), [(16, 0.94, 0.97), (1, 0.45, 0.55)])
def test_gla_decay_is_the_taurooth_of_a_sigmoid(tau, low, high):
    """alpha = sigmoid(W_1 W_2 x)^(1/tau), for each channel: tau moves its start from 1/2 to near 1."""
    rule = deltalab.get_rule("gla", g={"gla_decay": {"tau": tau}})
    module, x, got = values(rule.gates)
    alpha = projected(module, "g", x).unflatten(-1, (H, K)).sigmoid() ** (1 / tau)
    close(got["g"].exp(), alpha)
    assert low < alpha.median() < high
    assert module.project["g"][0].out_features == 16


def test_gla_decay_of_a_head_is_one_number():
    _, _, got = values(deltalab.get_rule("gated_deltanet", g="gla_decay").gates)
    assert got["g"].shape == (2, 64, H)


def test_metala_forgets_what_it_writes():
    """alpha = sigmoid(W x), beta = 1 - sigmoid(W x): together 1, and alpha around 1/2 at the start."""
    module, x, got = values(deltalab.get_rule("metala").gates)
    alpha = 1 / (1 + torch.exp(-projected(module, "g", x)))
    close(got["g"].exp(), alpha)
    close(got["beta"], 1 - alpha)
    assert 0.45 < alpha.median() < 0.55


def test_hgrn2_decays_by_channel():
    module, x, got = values(deltalab.get_rule("hgrn2").gates)
    close(got["g"].exp(), projected(module, "g", x).unflatten(-1, (H, K)).sigmoid())


def test_comba_has_its_own_beta_and_scalars_of_each_head():
    """beta = sigmoid(W_beta x), apart from alpha's W; b = sigmoid of a scalar, d starts at 0.02: not of the input."""
    module, x, got = values(deltalab.get_rule("comba").gates)
    close(got["beta"], projected(module, "beta", x).sigmoid())
    assert set(module.project) == {"g", "beta"}
    assert got["b"].shape == got["d"].shape == (H,)
    close(got["b"], module.learned["b"]["logit"].sigmoid())
    assert got["b"].min() > 0
    assert got["b"].max() < 1
    torch.testing.assert_close(got["d"], torch.full((H,), 0.02).double())


def test_delta_products_beta_is_one_for_each_step():
    rule = deltalab.get_rule("delta_product", n_h=3)
    module = Gates(rule.gates, D, H, K, K, rule.steps)
    x = torch.randn(2, 5, D)
    beta = module(x)["beta"]
    flat = 2 * (x @ module.project["beta"].weight.T).sigmoid()
    for t in range(5):
        for i in range(3):
            torch.testing.assert_close(beta[:, 3 * t + i], flat[:, t, i * H : (i + 1) * H])


@pytest.mark.parametrize("name", ["rla", "rdn"])
def test_gamma_may_be_beta(name):
    module, x, got = values(deltalab.get_rule(name, gamma="like_beta").gates)
    close(got["gamma"], got["beta"])
    close(got["beta"], projected(module, "beta", x).sigmoid())
    _, _, own = values(deltalab.get_rule(name).gates)
    assert (own["gamma"] - own["beta"]).abs().max() > 0.1


def test_rwkv7_decay_stays_above_exp_of_minus_exp_of_minus_a_half():
    """w = exp(-e^(-1/2) sigmoid(d)) in [0.545, 1], and its learning rate in [0, 1], by channel."""
    module, x, got = values(deltalab.get_rule("rwkv7").gates)
    d = projected(module, "g", x).unflatten(-1, (H, K)) + module.learned["g"]["bias"]
    close(got["g"].exp(), torch.exp(-0.6065306597126334 * d.sigmoid()))
    close(got["a"], projected(module, "a", x).unflatten(-1, (H, K)).sigmoid())
    gate = gates.rwkv7_decay()
    bias = {"bias": torch.zeros(1)}
    ends = gate.value(torch.tensor([-1e4, 1e4]), bias).exp()
    torch.testing.assert_close(ends, torch.tensor([1.0, 0.5452]), atol=1e-4, rtol=0)
    assert math.exp(gate.low) == pytest.approx(0.54524, abs=1e-5)
    assert gate.high == 0


def test_fixed_decays():
    """RetNet: 1 - 2^(-5 - h), h = 0 .. H - 1. Lightning: exp(-2^(-8 h / H)), h = 1 .. H, ALiBi's slopes."""
    zeros = torch.zeros(8, dtype=torch.float64)
    retnet = [31 / 32, 63 / 64, 127 / 128, 255 / 256, 511 / 512, 1023 / 1024, 2047 / 2048, 4095 / 4096]
    close(gates.retnet_decay().value(zeros, {}).exp(), torch.tensor(retnet, dtype=torch.float64))
    close(gates.lightning_decay().value(zeros, {}), -torch.tensor([2.0**-h for h in range(1, 9)], dtype=torch.float64))
    for gate in (gates.retnet_decay(), gates.lightning_decay()):
        fixed = gate.value(zeros, {})
        assert gate.constant
        assert gate.low <= fixed.min()
        assert fixed.max() <= gate.high


def test_a_value_sigmoid_of_rank_0_has_one_matrix():
    module, x, found = values({"z": gates.value_sigmoid(rank=0), "w": gates.value_sigmoid()})
    torch.testing.assert_close(found["z"], projected(module, "z", x).unflatten(-1, (H, K)).sigmoid())
    assert [tuple(w.shape) for name, w in module.named_parameters() if name.startswith("project.z")] == [(H * K, D)]
    with pytest.raises(deltalab.InputError, match="rank must be at least 0, not -1"):
        gates.value_sigmoid(rank=-1)


def test_learned_numbers_of_pairs_slots_and_matrices_have_their_shapes():
    value_dim = 5
    per = {"pair": gates.pair_step(), "channel": gates.channel_step(), "slot": gates.slot_rate(slots=3)}
    assert {name: gate.shape(H, K, value_dim) for name, gate in per.items()} == {
        "pair": (H, 3),
        "channel": (H, 5),
        "slot": (H, 15),
    }
    assert deltalab.get_rule("slstm").gates["r"].shape(H, K, value_dim) == (H, 4 * 5 * 5)


def test_frequencies_and_rates_of_slots_start_as_in_s4d_lin():
    _, _, found = values({"omega": gates.slot_frequency(slots=3), "rate": gates.slot_rate(slots=3)})
    torch.testing.assert_close(found["omega"].view(H, K, 3)[1, 2], math.pi * torch.arange(3.0, dtype=torch.float64))
    torch.testing.assert_close(found["rate"], torch.full_like(found["rate"], 0.5))


@pytest.mark.parametrize("make", [gates.channel_step, gates.pair_step])
def test_steps_start_between_their_ends(make):
    _, _, found = values({"dt": make(dt_min=0.01, dt_max=0.02)})
    assert ((found["dt"] >= 0.01 - 1e-6) & (found["dt"] <= 0.02 + 1e-6)).all()
    with pytest.raises(deltalab.InputError, match="dt_min must not exceed dt_max"):
        make(dt_min=1.0, dt_max=0.1)


def test_kdas_decays_have_an_a_for_each_head_and_pass_through_as_many_channels_as_values():
    """FLA's naive_kda_gate and naive_kda_lowerbound_gate."""
    given = {"g": gates.kda_decay(), "s": gates.kda_bounded_decay(least=-5)}
    module = Gates(given, D, H, K, 6)
    initialize(module, 0)
    assert module.learned["s"]["log_a"].tolist() == [0, 0, 0]
    with torch.no_grad():
        module.learned["s"]["log_a"].copy_(torch.tensor([0.1, 0.2, -0.3]))
    x = torch.randn(2, 64, D, dtype=torch.float64)
    got = module.double()(x)
    z = {name: projected(module, name, x).unflatten(-1, (H, K)) + module.learned[name]["dt_bias"] for name in given}
    assert all(module.project[name][0].out_features == 6 for name in given)
    close(got["g"], -module.learned["g"]["log_a"].exp().view(H, 1) * F.softplus(z["g"]))
    close(got["s"], -5 * (module.learned["s"]["log_a"].exp().view(H, 1) * z["s"]).sigmoid())
    second = Gates({"g": gates.kda_decay(rank=3)}, D, H, K, 6, bias=True).project["g"]
    assert (second[0].out_features, second[1].bias) == (3, None)


def test_all_heads_may_share_the_angles_of_mamba3():
    module, x, got = values(deltalab.get_rule("mamba3", theta="shared_angular_velocity").gates)
    angles = math.pi * projected(module, "theta", x).tanh()
    assert angles.shape == (2, 64, 2)
    close(got["theta"], angles[:, :, None].expand(2, 64, H, 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gates.mamba2_decay(a_min=-1), "mamba2_decay.a_min must be at least 0, not -1"),
        (lambda: gates.kda_decay(rank=-1), "kda_decay.rank must be at least 0, not -1"),
        (lambda: gates.kda_bounded_decay(least=1), "kda_bounded_decay.least must be negative, not 1"),
    ],
)
def test_numbers_that_make_no_gate(make, message):
    with pytest.raises(InputError, match=re.escape(message)):
        make()
