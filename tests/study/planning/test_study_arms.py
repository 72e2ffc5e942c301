"""Each arm of the studies after the papers is the paper's equation: its rule, its gates, its features and its block.

The equations are those of test_papers.py, which says which paper 000, 001, 002 and 004 are.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.support.papers import (
    B,
    H,
    K,
    Step,
    T,
    V,
    by_paper,
    chebyshev,
    clip,
    close,
    comba_dplr,
    comba_iplr,
    comba_splr,
    conjugate_gradient,
    coupled,
    deltanet,
    draw,
    exact,
    gated,
    gated_deltanet,
    gka,
    kda,
    l2,
    miras,
    pair,
    plain_sum,
    random,
    rdn,
    residual_agrees,
    rla,
    scalar_gated,
    scan,
    ungated,
    without_fitting,
)

import deltalab
from deltalab.models.costs import CostCounter
from deltalab.models.layer import RuleLayer
from deltalab.models.rule_inputs.gates import Gates
from deltalab.models.spec import ModelSpec
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import PlannedArm
from deltalab.study.specs.study_file import load_study

RLA, RDN = pair(rla, clip(1), gated), pair(rdn, clip(1), gated)
COMBA = {"base": comba_splr, "without_d": comba_splr, "without_b": comba_splr, "iplr": comba_iplr}

# study -> arm -> the paper's equation. Arms of the default and of the profile `gpu`.
EQUATIONS: dict[str, dict[str, Step]] = {
    "comba_ablation": {
        **COMBA,
        "without_output_gate": comba_splr,
        "alpha_not_near_1": comba_splr,
        "init_d_1": comba_splr,
        "mamba_like": comba_splr,
        "v_without_silu": comba_splr,
        "without_normalize": comba_splr,
    },
    "gate_init": dict.fromkeys(
        [
            *("base", "gla_tau_16", "gla_tau_1", "metala", "slower", "faster", "b_near_1", "b_near_0", "no_input_gate"),
            *("mamba2_input", "metala_balanced", "gla_without_input_gate"),
        ],
        comba_splr,
    ),
    "transition": {
        "base": comba_splr,
        "iplr": comba_iplr,
        "dplr": comba_dplr,
        "dplr_full_rank": comba_dplr,
        "gated_deltanet": gated_deltanet,
        "gated_deltanet_negative": gated_deltanet,
        "deltanet": deltanet,
        "deltanet_negative": deltanet,
        "kda": kda,
        "written_state": miras(2, "written"),
    },
    "rla_ablation": {
        "base": RLA,
        "without_normalize": RLA,
        "without_fitting": pair(without_fitting(rla), l2, gated),  # 001 Section 4.3
        "gamma_is_beta": pair(coupled(rla), clip(1), gated),  # Section 3.2
        "plain_sum": pair(rla, clip(1), plain_sum),  # Table 5
        "no_clip": pair(rla, l2, gated),  # Figure 4
        "no_clip_no_norm": pair(rla, l2, gated),
        "log_cosh": pair(rla, torch.tanh, gated),  # App. B
        "ungated": pair(ungated(rla), clip(1), plain_sum),
        "v_without_silu": RLA,
        "sgla": scalar_gated,  # Listing 1
        "gated_deltanet": gated_deltanet,  # Table 1
        "rdn": RDN,
        "rdn_no_clip": pair(rdn, l2, gated),
        "rdn_gamma_is_beta": pair(coupled(rdn), clip(1), gated),
        "rdn_plain_sum": pair(rdn, clip(1), plain_sum),
        "rdn_ungated": pair(ungated(rdn), clip(1), plain_sum),
    },
    "gka_ablation": {
        "base": gka(chebyshev, 30),  # 004 (CH)
        "without_g": gka(chebyshev, 30),
        "one_iteration": gka(chebyshev, 1),
        "ten_iterations": gka(chebyshev, 10),
        "exact": gka(exact, 0),  # Table 1
        "cg": gka(conjugate_gradient, 30),
        "ridge_10x": gka(chebyshev, 30, a=0.2),
        "fixed_ridge": gka(chebyshev, 30, a=0.25, adaptive=False),  # Section 3.2
        "gated_deltanet": gated_deltanet,
    },
}


def arms(study: str, profile: str | None = None) -> Iterator[PlannedArm]:
    yield from make_plan(load_study(study, profile=profile), profile=profile).arms


@pytest.fixture(scope="module")
def planned() -> dict[str, dict[str, PlannedArm]]:
    """The arms of each study on its first task."""
    found = {}
    for study in EQUATIONS:
        every = [*arms(study), *arms(study, "gpu")]
        found[study] = {arm.name: arm for arm in every if arm.task == every[0].task}
    return found


def test_every_arm_has_an_equation(planned):
    assert {study: set(found) for study, found in planned.items()} == {s: set(e) for s, e in EQUATIONS.items()}


@pytest.mark.parametrize(("study", "arm"), [(study, arm) for study, found in EQUATIONS.items() for arm in found])
def test_an_arm_is_its_papers_recurrence(study, arm, planned):
    """In fp64, from a given state."""
    rule = ModelSpec(vocab_size=1, rule=planned[study][arm].config["rule"]).make_rule()
    step, x = EQUATIONS[study][arm], draw(rule)
    if not getattr(rule, "normalize", True):
        x["k"] = x["k"] / 2
    if rule.gates.get("gamma") and rule.gates["gamma"].of == "beta":
        x["gamma"] = x["beta"]
    if rule.second_state:
        residual_agrees(rule, step, x)
        return
    square = random(B, H, K, K, seed=95)
    own = (random(B, H, K, V, seed=99),)
    state = (square @ square.mT / K, *own) if rule.name == "gka" else own
    o, last = by_paper(step, x, rule.steps, torch.cat([state[0], state[-1].mT], 2) if len(state) > 1 else own[0].mT)
    for backend in ("recurrent", "chunked"):
        ours, after = scan(rule, x, backend, state)
        close(ours, o)
        close(after[-1], last[:, :, -V:].mT)


# --- Gates


def weight(gates: Gates, name: str) -> torch.Tensor:
    """The matrix that x is multiplied by, W_1 W_2 where it is of low rank."""
    project = gates.project[name]
    return project[1].weight @ project[0].weight if isinstance(project, torch.nn.Sequential) else project.weight


def sigmoid_of_beta(x, gates):
    return torch.sigmoid(x @ weight(gates, "beta").T)


def none(x, gates):
    return torch.ones((), dtype=x.dtype)


def mamba2_forget(x, gates):
    a, c = gates.learned["g"]["log_a"].exp().flatten(), gates.learned["g"]["dt_bias"].flatten()
    return torch.exp(-a * F.softplus(x @ weight(gates, "g").T + c))


def gla_forget(tau):
    return lambda x, gates: torch.sigmoid(x @ weight(gates, "g").T) ** (1 / tau)


def metala_forget(x, gates):
    return torch.sigmoid(x @ weight(gates, "g").T)


def mamba2_input(x, gates):
    return F.softplus(x @ weight(gates, "g").T + gates.learned["g"]["dt_bias"])


def metala_input(x, gates):
    return 1 - metala_forget(x, gates)


@pytest.mark.parametrize(
    ("study", "arm", "forget", "into"),
    [
        ("gate_init", "base", mamba2_forget, sigmoid_of_beta),
        ("gate_init", "slower", mamba2_forget, sigmoid_of_beta),
        ("gate_init", "gla_tau_16", gla_forget(16), sigmoid_of_beta),
        ("gate_init", "gla_tau_1", gla_forget(1), sigmoid_of_beta),
        ("gate_init", "metala", metala_forget, sigmoid_of_beta),
        ("gate_init", "no_input_gate", mamba2_forget, none),
        ("gate_init", "mamba2_input", mamba2_forget, mamba2_input),
        ("gate_init", "metala_balanced", metala_forget, metala_input),
        ("gate_init", "gla_without_input_gate", gla_forget(16), none),
        ("comba_ablation", "alpha_not_near_1", metala_forget, sigmoid_of_beta),
        ("transition", "dplr", mamba2_forget, sigmoid_of_beta),
        ("transition", "dplr_full_rank", mamba2_forget, sigmoid_of_beta),
    ],
)
def test_gates_are_those_of_table_5(study, arm, forget, into, planned):
    """000 Table 5: GLA's sigmoid(W_1 W_2 x)^(1/tau) and 1, Mamba2's exp(-a softplus(W x + c)) and softplus(W x + c),
    MetaLA's sigmoid(W x) and 1 - sigmoid(W x), Comba's Mamba2's and sigmoid(W_beta x)."""
    rule = ModelSpec(vocab_size=1, rule=planned[study][arm].config["rule"]).make_rule()
    gates = Gates(rule.gates, 6, H, K, K).double()
    x = random(B, T, 6, seed=7)
    values = gates(x)
    close(values["g"].exp().flatten(2), forget(x, gates))
    close(values["beta"].expand(B, T, H), into(x, gates).expand(B, T, H))


def test_the_diagonal_of_dplr_has_a_channels_decay_through_a_low_rank(planned):
    """000 Section 3: diag(w_t) with "LoRA-style" W_1 W_2."""
    ranks = {}
    for arm in ("dplr", "dplr_full_rank"):
        rule = ModelSpec(vocab_size=1, rule=planned["transition"][arm].config["rule"]).make_rule()
        ranks[arm] = torch.linalg.matrix_rank(weight(Gates(rule.gates, 64, 2, 16, 16), "g")).item()
        assert rule.gates["g"].shape(2, 16, 16) == (2, 16)
    assert ranks == {"dplr": 16, "dplr_full_rank": 32}


@pytest.mark.parametrize("arm", ["gamma_is_beta", "rdn_gamma_is_beta"])
def test_the_tied_correction_factor_is_beta(arm, planned):
    """001 Section 4.3, Figure 3."""
    rule = ModelSpec(vocab_size=1, rule=planned["rla_ablation"][arm].config["rule"]).make_rule()
    gates = Gates(rule.gates, 6, H, K, K)(torch.randn(B, T, 6))
    assert torch.equal(gates["gamma"], gates["beta"])


@pytest.mark.parametrize(
    ("rule", "knobs", "reason"),
    [
        ("comba", {"beta": "mamba2_step", "g": "metala_decay"}, "shares the projection of g mamba2_decay"),
        ("comba", {"beta": "metala_input"}, "shares the projection of g metala_decay"),
        ("comba", {"beta": "mamba2_step", "transition": "dplr"}, "is one number for each head"),
        ("comba", {"g": {"low_rank_decay": {"rank": 0}}}, "rank must be at least 1"),
        ("rla", {"gamma": "like_beta", "beta": 1}, "shares beta's projection"),
        ("rdn", {"gamma": "like_beta", "beta": 1}, "shares beta's projection"),
    ],
)
def test_a_gate_that_shares_a_projection_needs_it(rule, knobs, reason):
    with pytest.raises(deltalab.InputError, match=reason):
        deltalab.get_rule(rule, **knobs)


# --- Features and blocks


@pytest.mark.parametrize(
    ("study", "arm", "normalize", "silu_of_v"),
    [
        ("rla_ablation", "base", True, True),
        ("rla_ablation", "v_without_silu", True, False),
        ("rla_ablation", "without_normalize", False, True),
        ("rla_ablation", "no_clip_no_norm", False, True),
        ("comba_ablation", "v_without_silu", True, False),
        ("comba_ablation", "without_normalize", False, True),
    ],
)
def test_features_are_those_that_an_arm_names(study, arm, normalize, silu_of_v, planned, monkeypatch):
    """001 Section 3.4: "L2 normalization and SiLU activation applied to query and key"; 000 Section 3.3."""
    rule = ModelSpec(vocab_size=1, rule=planned[study][arm].config["rule"]).make_rule()
    layer = RuleLayer(rule, 6, H, key_dim=K, value_dim=V, conv=0).double()
    x, seen = random(B, T, 6, seed=8), []

    def spy(rule, q, k, v, gates, **how):
        seen.extend((q, k, v))
        return deltalab.scan(rule, q, k, v, gates, **how)

    monkeypatch.setattr("deltalab.models.layer.scan", spy)
    layer(x)
    parts = (x @ layer.qkv.weight.T).split([H * K, H * K, H * V], dim=-1)
    for i, (found, part) in enumerate(zip(seen, parts, strict=True)):
        right = (F.silu(part) if i < 2 or silu_of_v else part).unflatten(-1, (H, -1))
        close(found, F.normalize(right, dim=-1) if normalize and i < 2 else right)


def test_a_mamba_like_layer_has_the_state_of_the_bases():
    """000 Section 3.3: no MLP, q and k shared by all heads, twice the depth. Table 2: keys half as wide as a head's of
    the base (128 and 256), values 2D wide in all, 256 D elements in each layer's state."""
    sizer = CostCounter()
    for profile in (None, "gpu", "paper"):
        found = {(arm.task, arm.name): arm.config["model"] for arm in arms("comba_ablation", profile)}
        for task in {task for task, _ in found}:
            base, mamba = (ModelSpec(**found[task, name], rule="comba") for name in ("base", "mamba_like"))
            width, key = base.d_model // base.heads, mamba.d_model // mamba.heads
            value = round(key * mamba.expand_v)
            assert (mamba.block, mamba.mlp, mamba.depth) == ("mamba", False, 2 * base.depth)
            assert (key, mamba.heads * value) == (width / 2, 2 * base.d_model)
            assert mamba.heads * key * value == base.heads * width * width
            parameters = [sizer.costs(model, 32).parameters for model in (base, mamba)]
            assert parameters[1] == pytest.approx(parameters[0], rel=0.03)


def test_what_clips_and_what_does_not(planned):
    """001 Section 4.1: c = 1 in all main experiments; Section 4.3's stateless correction is of the plain residual."""
    rules = {arm: planned["rla_ablation"][arm].config["rule"] for arm in ("base", "without_fitting", "rdn")}
    assert [(rule["loss"], rule["clip"], rule["fitting"]) for rule in rules.values()] == [
        ("huber", 1.0, True),
        ("l2", 1.0, False),
        ("huber", 1.0, True),
    ]
