"""Each planted bug of a rule fails its own check, and each check fails for some bug."""

import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tests.support import folders
from tests.support.folders import PLANTED
from torch import Tensor

import deltalab
from deltalab import gates, registry
from deltalab.authoring.rule_checks import form_checks, number_checks, rule_suite
from deltalab.authoring.rule_checks.rule_suite import CHECKS, CheckResult, check_rule
from deltalab.ops import reference
from deltalab.ops.fused.convolution import features
from deltalab.rule import Operands, State, UpdateRule, knob
from deltalab.structure import ADDITIVE, HOUSEHOLDER, IPLR, SPLR, Transition

UNUSUAL = sorted(folders.UNUSUAL.glob("*.py"))

# File -> the check that must fail, and a part of its message.
CAUGHT: dict[str, tuple[str, str]] = {
    "backward_factor": ("gradients", "with respect to v at T=13 from finite differences"),
    "backward_sign": ("gradients", "with respect to v at T=13 from finite differences"),
    "batch_mean": ("rows of the batch", "goes over the batch"),
    "clamps_chunks": ("large values", "the code clamps numbers"),
    "coarse_decay": ("precision", "triton in bf16 to fp64"),
    "detached_gate": ("gradients", "from finite differences"),
    "diverging_descent": ("long sequences", "not finite at T=2048 in fp32, in a layer"),
    "dropped_scale": ("scale", "change of the output at twice the scale"),
    "explodes": ("long sequences", "in a layer"),
    "fast_path": ("uneven sequences", "one look at all numbers, such as their mean, decides"),
    "first_head_for_all": ("channels", "the code does not read head 1 of beta"),
    "gradient_at_zero": ("zeros", "k of one token are 0: gradient of k"),
    "half_ignored_state": ("initial state", "the code does not read part 1 of the given state"),
    "heads_swapped": ("heads", "a value of one head is used for another"),
    "ignored_start": ("initial state", "does not begin with `initial_state`"),
    "kernel_in_its_dtype": ("kernel", "kernel to recurrent in bfloat16"),
    "kernel_without_knob": ("kernel", "[shape=squared]"),
    "long_approximation": ("long chunks", "takes another path in long sequences"),
    "longer_keys": ("eigenvalues", "measured -1.25 to 1, from the declared 0 to 1"),
    "lost_state_gradient": ("gradients", "with respect to state at T=13"),
    "many_heads": ("heads", "of heads [5, 0, 2] of 8 when they are alone"),
    "norm_at_zero": ("zeros", "k of one token are 0: o, state"),
    "normed_over_heads": ("heads", "goes over the heads"),
    "normed_over_time": ("causality of values", "depends on later tokens"),
    "overwritten_state": ("repetition", "change of state itself by a call"),
    "own_scale": ("scale", "has K ** -0.5 in its place"),
    "peek_in_chunk": ("causality of values", "change of outputs before token 41 of 150"),
    "random_dropout": ("repetition", "the code draws random numbers"),
    "raw_keys": ("eigenvalues", "features 'raw' leave them longer"),
    "rounded_state": ("precision", "relative difference of state, recurrent in bf16 to fp64 at T=150"),
    "same_options": ("knob options", "between form=unit and form=normed is 0"),
    "scale_twice": ("scale", "the power of the scale in the output, 2, from 1"),
    "single_precision_branch": ("precision", "in fp32 to fp64"),
    "softmax_scale_twice": ("scale", "1 minus the change by a scale that is applied twice"),
    "softmax_without_scale": ("scale", "change of the output at twice the scale"),
    "spec_lost": ("spec", "`__post_init__` changes gain"),
    "square_state": ("other sizes", "at H=8, K=4, V=4"),
    "state_in_bf16": ("sizes", "dtype of part 0 of the state, which sums over tokens"),
    "sums_of_decays": ("long sequences", "exp(-g.cumsum(1))"),
    "two_equations": ("step", "this form and `step` are two different equations"),
    "block_of_48": ("step", "at T=3, H=1, K=64, V=64"),
    "decay_of_the_next_chunk": ("slow decays", "what is older than some number of tokens"),
    "dropout_in_training": ("repetition", "after torch.manual_seed(2), recurrent, with gradients"),
    "evaluates_in_bf16": ("repetition", "difference of o with gradients from o without, chunked"),
    "forgets_after_64": ("slow decays", "what is older than some number of tokens"),
    "heavy_ball": ("products of steps", "with keys that turn, at beta=1, is inf"),
    "log_of_sigmoid": ("gate gradients", "values of 'g' that are finite in fp64 and not in fp32 at inputs of 200"),
    "mean_of_all_tokens": ("far tokens", "change of the first 1100 outputs with 948 more tokens"),
    "noisy_gradients": ("repetition", "after torch.manual_seed(2), recurrent, with gradients"),
    "one_sided_range": ("eigenvalues", "part of the declared range -3 to 1 beyond the eigenvalues"),
    "pads_to_100": ("every length", "chunked to recurrent at T=9"),
    "reads_the_last_of_many": ("far tokens", "before token 1500 of 2048 with other inputs after it"),
    "resumes_at_one_row": ("packed sequences", "keeps something between calls"),
    "root_gate": ("gate gradients", "gradients of 'g' that are not finite in fp32 at inputs of 1000"),
    "rows_in_groups": ("many rows and heads", "of the last 16 sequences by themselves of a batch of 33"),
    "same_as_another_knob": ("twin options", "between write=halved and read=halved is 0"),
    "same_write": ("twin options", "between form=strong and keys=doubled is 0"),
    "sign_without_gradient": ("gate liveness", "`Operands.sign` passes no gradient to 'b'"),
    "softplus_by_where": ("gate gradients", "gradients of 'g' that are not finite in fp32 at inputs of 1000"),
    "stretching_mix": ("products of steps", "at beta=2.5, is inf"),
    "two_halves_of_the_batch": ("many rows and heads", "of the last 16 sequences by themselves of a batch of 33"),
    "two_knobs": ("eigenvalues", "c=2"),
    "values_of_64": ("step", "K=128, V=128"),
    "wide_range": ("eigenvalues", "part of the declared range -4 to 4 beyond the eigenvalues"),
    "wrong_at_37": ("every length", "chunked to recurrent at T="),
    "unread_channel": ("channels", "the code does not read head 0, channel 3 of q"),
    "unread_value_channel": ("channels", "the code does not read head 0, channel 2 of v"),
    "value_of_another_head": ("heads", "a value of one head is used for another"),
    "wide_keys": ("other sizes", "at H=3, K=6, V=10"),
    "dead_gate": ("gate liveness", "a later normalization cancels the gate"),
    "dead_in_one_combination": ("gate liveness", "[feedback=equal, output=plain]: gradient of the layer's output"),
    "dead_knob": ("knob options", "between correction=on and correction=off is 0, must be at least"),
    "decay_overflow": ("extreme gates", "not finite at g=-1000, triton"),
    "decayed_read": ("kernel", "the kernel reads the decayed state, but the rule declares reads='state'"),
    "eigenvalue_range": ("eigenvalues", "[beta=sigmoid(max=2)]: distance of the eigenvalues, measured -1 to 1, from"),
    "future_leak": ("causality of values", "with other inputs after it, layer,"),
    "growing_state": ("eigenvalues", "`operands` gives a log-decay g of up to inf; above 0 it makes"),
    "gate_range": ("gate ranges", "[beta=twice_sigmoid()]: distance of 'beta', measured"),
    "forgotten_token": ("state carry", "it lacks values that later tokens need"),
    "lost_state": ("state carry", "the given state is not used"),
    "raises": ("backends", "[form=mean]: raised ZeroDivisionError: nothing to divide by (raises.py:22)"),
    "small_state": ("sizes", "initial_state for torch.bfloat16"),
}


def planted(file: Path) -> UpdateRule:
    """The rule of a file, without the registry."""
    kinds = [x for x in runpy.run_path(str(file)).values() if isinstance(x, type) and issubclass(x, UpdateRule)]
    [kind] = [kind for kind in kinds if kind.__module__ == "<run_path>"]
    return kind()


def failures(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results if not result.passed}


def of_check(name: str, rule: UpdateRule) -> CheckResult | None:
    """The result of one check alone."""
    [check] = [check for check in CHECKS if check.name == name]
    return rule_suite._run(rule, False, check)


def worst(check: str, rule: UpdateRule) -> float:
    """The distance of one setting of a rule beyond the limit of a check; above 0 the check fails."""
    [found] = [c for c in CHECKS if c.name == check]
    figures = [found.slack(measured.figure, measured.limit) for measured in found.measure(rule)]
    assert figures
    return -min(figures)


def test_every_planted_file_is_expected_to_be_caught() -> None:
    assert {file.stem for file in PLANTED.glob("*.py")} == set(CAUGHT)


@pytest.mark.parametrize("name", CAUGHT)
def test_planted_bug_is_caught_by_its_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_suite, "MOST_SECONDS", 4)  # a slow processor would try fewer settings
    check, message = CAUGHT[name]
    result = of_check(check, planted(PLANTED / f"{name}.py"))
    assert result is not None
    assert not result.passed
    assert message in result.message


@pytest.mark.slow(keep="signs")
@pytest.mark.parametrize("file", UNUSUAL, ids=lambda file: file.stem)
def test_a_right_but_unusual_rule_passes_all_checks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_suite, "MOST_SECONDS", 3)
    assert [result.message for result in check_rule(planted(file)) if not result.passed] == []


@pytest.mark.slow
def test_what_does_not_apply_is_left_out() -> None:
    listed = {name: {r.name for r in check_rule(deltalab.get_rule(name))} for name in ("attention", "linear_attention")}
    every = {check.name for check in CHECKS}
    of_gates = {"extreme gates", "gate ranges", "gate liveness", "gate gradients"}
    alone = {"kernel", "step"}
    assert every - listed["linear_attention"] == {
        *of_gates,
        *alone,
        "twin options",
        "scale",
        "nothing independent",
        "other numbers",
    }
    assert every - listed["attention"] == {*of_gates, *alone, "knobs together", "twin options", "eigenvalues"}


def test_noise_is_named_in_all_failures() -> None:
    failed = failures(check_rule(planted(PLANTED / "random_dropout.py"), quick=True))
    causes = {name: result.message.partition("likely cause: ")[2] for name, result in failed.items()}
    assert "draws random numbers" in causes.pop("repetition")
    assert len(causes) > 2
    assert set(causes.values()) == {rule_suite.NOISE}


@pytest.mark.parametrize(("name", "bounded"), [("momentum_deltanet", 0.2), ("titans", 0.2)])
def test_a_momentum_beyond_its_bound_diverges(name: str, bounded: float, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = deltalab.get_rule(name)
    assert rule.gates["eta"].high == bounded
    assert worst("products of steps", rule) <= 0
    eta = replace(rule.gates["eta"], high=0.85)
    monkeypatch.setattr(type(rule), "gates", {**rule.gates, "eta": eta})
    assert worst("products of steps", rule) > 0


def test_the_cause_of_an_extreme_gate_is_the_gate_that_breaks() -> None:
    class Subtracted(Sound):
        g: gates.Gate = knob(gates.mamba2_decay())

        def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, g: Tensor) -> Operands:  # type: ignore[override]
            return Operands(r=q * (g - g)[..., None].exp(), k=k, u=v, e=beta, beta=beta)

    class Inverse(Sound):
        def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
            return Operands(r=q, k=k, u=v / beta[..., None], e=beta, beta=beta)

    causes = {m.cause for m in number_checks.extreme_gates(dataclass(frozen=True, kw_only=True)(Subtracted)())}
    assert causes == {"the code computes -inf - -inf or 0 * inf where the log-decay g is -inf: clamp it first"}
    causes = {measured.cause for measured in number_checks.extreme_gates(Inverse())}
    assert causes == {"the code is not finite at beta = 0: look for a division, a root, a logarithm or an exp"}


def test_gradients_are_checked_where_the_caller_has_turned_them_off() -> None:
    with torch.no_grad():
        assert not failures(check_rule(deltalab.get_rule("deltanet")))


def test_settings_that_are_not_all_tried_are_said_to_be_so() -> None:
    @dataclass(frozen=True, kw_only=True)
    class ManyKnobs(UpdateRule):
        name: ClassVar[str] = "many_knobs"
        paper: ClassVar[str] = "none"
        transition: Transition = ADDITIVE
        beta: gates.Gate = knob(gates.sigmoid())
        a: int = knob(1, 2, 3)
        b: int = knob(1, 2, 3)
        c: int = knob(1, 2, 3)
        d: int = knob(1, 2, 3)
        e: int = knob(1, 2, 3)

        def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
            powers = self.a + self.b * q + self.c * q**2 + self.d * q**3 + self.e * q**4
            return Operands(r=powers, k=k, u=beta[..., None] * v)

    liveness = of_check("gate liveness", ManyKnobs())
    assert liveness is not None
    assert liveness.passed
    assert re.search("tried [12][0-9] of 243 settings, with each pair of options in one of them", liveness.message)


@pytest.mark.parametrize("end", [0, 1], ids=["low", "high"])
@pytest.mark.parametrize(
    "rule",
    [
        deltalab.get_rule("comba"),
        deltalab.get_rule("comba", transition="iplr"),
        deltalab.get_rule("deltanet"),
        deltalab.get_rule("gated_deltanet", beta={"sigmoid": {"max": 1.5}}),
        deltalab.get_rule("comba", transition="dplr"),
        deltalab.get_rule("delta_product", n_h=1),
        deltalab.get_rule("gla"),
        deltalab.get_rule("kda", beta={"sigmoid": {"max": 1.5}}),
        deltalab.get_rule("mamba2"),
        deltalab.get_rule("linear_attention"),
        deltalab.get_rule("rdn"),
        deltalab.get_rule("rwkv7"),
    ],
    ids=lambda rule: f"{rule.name}-{rule.transition}",
)
def test_a_range_of_eigenvalues_slightly_too_narrow_is_caught(
    rule: UpdateRule, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = list(rule.eigenvalues)
    assert worst("eigenvalues", rule) <= 0
    declared[end] += 1e-6 if end == 0 else -1e-6
    monkeypatch.setattr(type(rule), "eigenvalues", tuple(declared))
    assert worst("eigenvalues", rule) > 0


def test_a_second_state_is_held_to_the_range_too() -> None:
    class Stronger(type(deltalab.get_rule("rdn"))):  # type: ignore[misc]
        def operands(self, q: Tensor, k: Tensor, v: Tensor, **gates: Any) -> Operands:
            x = super().operands(q, k, v, **gates)
            return replace(x, fit=replace(x.fit, e=3 * x.fit.e))

    assert worst("eigenvalues", deltalab.get_rule("rdn")) <= 0
    assert worst("eigenvalues", Stronger()) > 0
    found = max(number_checks.eigenvalues(Stronger()), key=lambda measured: measured.figure)
    assert "distance of the eigenvalues of the second state, measured -2 to 1" in found.what


def test_steps_may_turn_the_state_but_not_stretch_it() -> None:
    class Stretching(type(deltalab.get_rule("delta_product"))):  # type: ignore[misc]
        def operands(self, q: Tensor, k: Tensor, v: Tensor, **gates: Any) -> Operands:
            x = super().operands(q, k, v, **gates)
            return replace(x, e=1.01 * x.e)

    assert worst("eigenvalues", deltalab.get_rule("delta_product")) <= 0
    assert worst("eigenvalues", Stretching()) > 0


def test_an_infinite_decay_times_nothing_is_caught() -> None:
    class Masked(type(deltalab.get_rule("delta_product"))):  # type: ignore[misc]
        def operands(self, q: Tensor, k: Tensor, v: Tensor, **gates: Any) -> Operands:
            x = super().operands(q, k, v, **gates)
            first = torch.arange(k.shape[1]) % self.n_h == 0
            return replace(x, g=gates["g"].repeat_interleave(self.n_h, dim=1) * first[:, None])

    rule = Masked(g=gates.mamba2_decay())
    assert worst("extreme gates", deltalab.get_rule("delta_product", g="mamba2_decay")) <= 0
    assert worst("extreme gates", rule) > 0


# --- a check ends with a line, whatever the rule does -------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sound(UpdateRule):
    """A rule that passes all checks, for subclasses to break."""

    name: ClassVar[str] = "sound"
    transition: Transition = HOUSEHOLDER
    beta: gates.Gate = knob(gates.sigmoid())

    @property
    def eigenvalues(self) -> tuple[float, float]:
        return (0.0, 1.0)

    def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
        return Operands(r=q, k=k, u=v, e=beta, beta=beta)


def raising(error: BaseException) -> Callable[..., Any]:
    def method(self: Any = None, q: Any = None, k: Any = None, v: Any = None, *_: Any, **__: Any) -> Any:
        raise error

    return method


@pytest.mark.slow(keep="variants")
@pytest.mark.parametrize(
    "method",
    [
        "operands",
        "initial_state",
        "lacks_kernel",
        "eigenvalues",
        "features",
        "steps",
        "gates",
        "variants",
        "options",
        "knobs",
    ],
)
def test_an_error_in_any_method_is_a_failed_check(method: str) -> None:
    broken = raising(ValueError(f"in {method}"))
    kind = type(
        "Broken", (Sound,), {method: property(broken) if isinstance(getattr(Sound, method), property) else broken}
    )
    failed = failures(check_rule(kind()))
    assert failed
    assert any(f"raised ValueError: in {method}" in result.message for result in failed.values())


def test_a_rule_that_exits_is_a_failed_check_and_ctrl_c_is_not() -> None:
    class Exits(Sound):
        operands = raising(SystemExit(0))

    class Interrupted(Sound):
        operands = raising(KeyboardInterrupt())

    [failed] = failures(check_rule(Exits())).values()
    assert failed.message.startswith("sound [as declared]: raised SystemExit: 0 (test_rule_checks.py:")
    assert "checks raised it: repetition, " in failed.message
    with pytest.raises(KeyboardInterrupt):
        check_rule(Interrupted())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("field", ["r", "k", "u", "e", "beta"])
def test_operands_that_are_not_finite_fail_with_their_cause(field: str, value: float) -> None:
    class NotFinite(Sound):
        def operands(self, q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor) -> Operands:
            x = super().operands(q, k, v, beta=beta)
            return replace(x, **{field: value * getattr(x, field)})

    [backends] = [check for check in CHECKS if check.name == "backends"]
    found = rule_suite._run(NotFinite(), False, backends)
    assert found is not None
    assert (found.passed, found.figure) == (False, None)
    assert "likely cause: the rule or task computes values that are not finite" in found.message
    assert (worst("eigenvalues", NotFinite()) > 0) == (field != "r")


def test_an_error_whose_text_is_not_unicode_can_be_printed() -> None:
    class Garbled(Sound):
        operands = raising(ValueError("\n\ud800"))

    message = failures(check_rule(Garbled()))["repetition"].message
    assert message.encode().startswith(b"sound [as declared]: raised ValueError: \\ud800 (test_rule_checks.py:")


@pytest.mark.slow
def test_a_crash_fails_its_check_and_the_others_go_on() -> None:
    class Crashes(Sound):
        @property
        def eigenvalues(self) -> tuple[float, float]:
            os.kill(os.getpid(), signal.SIGKILL)
            return (0.0, 1.0)

    results = check_rule(Crashes(), forked=True)
    failed = failures(results)
    assert set(failed) == {"eigenvalues", "products of steps"}
    for result in failed.values():
        assert result.message.startswith("sound: the process of this check was killed by SIGKILL; likely cause: a kern")
    assert [result.name for result in results] == [result.name for result in check_rule(Sound())]


@pytest.mark.slow
def test_the_command_ends_with_exit_1_and_valid_json_after_a_crash(tmp_path: Path) -> None:
    source = (PLANTED / "raises.py").read_text()
    (tmp_path / "crashes.py").write_text(source.replace("raise ZeroDivisionError", "__import__('os').abort() #"))
    command = [
        sys.executable,
        "-c",
        "from deltalab.cli.app import main; main()",
        "rule",
        "check",
        "crashes.py",
        "--json",
    ]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (1, "")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    checks = json.loads(ended.stdout, parse_constant=refuse)["checks"]
    assert {check["name"]: check["passed"] for check in checks}["eigenvalues"] is False


def test_a_rule_that_cannot_be_made_is_wrong_input(tmp_path: Path) -> None:
    source = (PLANTED / "raises.py").read_text().replace("planted_raises", "planted_unmade")
    (tmp_path / "unmade.py").write_text(source + "\n    def __post_init__(self) -> None:\n        1 / 0\n")
    with registry.isolated():
        registry.add_plugin(tmp_path / "unmade.py")
        with pytest.raises(deltalab.InputError, match="line 26\\) cannot be made: ZeroDivisionError"):
            deltalab.get_rule("planted_unmade")


# --- mutations of the code below the rules ------------------------------------------------------------------

chunked = reference.chunked


def detached(field: str) -> Callable[..., tuple[Tensor, State]]:
    """The parallel form with the gradient of one operand lost."""

    def mutant(transition: Transition, x: Operands, *, state: State | None, **rest: Any) -> tuple[Tensor, State]:
        if field == "state":
            state = None if state is None else tuple(part.detach() for part in state)
        else:
            x = replace(x, **{field: getattr(x, field).detach()})
        return chunked(transition, x, state=state, **rest)

    return mutant


def fit_detached(field: str) -> Callable[..., tuple[Tensor, State]]:
    """The parallel form with the gradient of one operand of the second state lost."""

    def mutant(transition: Transition, x: Operands, **rest: Any) -> tuple[Tensor, State]:
        assert x.fit is not None
        fit: Any = {field: getattr(x.fit, field).detach()}
        return chunked(transition, replace(x, fit=replace(x.fit, **fit)), **rest)

    return mutant


def off_by(place: str, amount: float) -> Callable[..., tuple[Tensor, State]]:
    """The parallel form with a small relative error in its output or its state."""

    def mutant(*given: Any, **rest: Any) -> tuple[Tensor, State]:
        o, state = chunked(*given, **rest)
        return (o * (1 + amount), state) if place == "o" else (o, tuple(part * (1 + amount) for part in state))

    return mutant


def ignores_state(*given: Any, state: State | None, **rest: Any) -> tuple[Tensor, State]:
    return chunked(*given, state=None, **rest)


def reads_the_other(transition: Transition, *given: Any, **rest: Any) -> tuple[Tensor, State]:
    return chunked(
        replace(transition, reads="decayed_state" if transition.reads == "state" else "state"), *given, **rest
    )


def drops_the_rest(transition: Transition, x: Operands, *, chunk_size: int, **rest: Any) -> tuple[Tensor, State]:
    """The parallel form without the writes of the tokens in a last chunk that is not full."""
    whole = torch.arange(x.k.shape[1]) < max(x.k.shape[1] // chunk_size, 1) * chunk_size
    return chunked(transition, replace(x, u=x.u * whole[:, None, None]), chunk_size=chunk_size, **rest)


@pytest.mark.parametrize(
    "rule", [deltalab.get_rule("comba"), deltalab.get_rule("gated_deltanet")], ids=lambda r: r.name
)
@pytest.mark.parametrize(
    "mutant",
    [
        *(pytest.param(detached(field), id=f"no gradient in {field}") for field in ("r", "k", "u", "g", "e", "state")),
        *(pytest.param(off_by(place, 1e-9), id=f"{place} off by 1e-9") for place in ("o", "state")),
        ignores_state,
        reads_the_other,
        drops_the_rest,
    ],
)
def test_a_wrong_parallel_form_is_caught(
    rule: UpdateRule, mutant: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst("backends", rule) <= 0
    monkeypatch.setattr(reference, "chunked", mutant)
    assert worst("backends", rule) > 0


@pytest.mark.slow(keep="rwkv7-mutant2")
@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        *(("rwkv7", detached(field)) for field in ("g", "a", "b")),
        *(("delta_product", detached(field)) for field in ("r", "k", "u", "e")),
        *(("kda", detached(field)) for field in ("g", "e")),
        *(("rdn", detached(field)) for field in ("r", "k", "u", "g", "e")),
        *(("rdn", fit_detached(field)) for field in ("r", "v", "strength", "e")),
        ("rdn", ignores_state),
        ("kda", reads_the_other),
        ("rwkv7", reads_the_other),
    ],
)
def test_a_wrong_parallel_form_of_the_wider_algebra_is_caught(
    name: str, mutant: Callable[..., tuple[Tensor, State]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert worst("backends", deltalab.get_rule(name)) <= 0
    monkeypatch.setattr(reference, "chunked", mutant)
    assert worst("backends", deltalab.get_rule(name)) > 0


def test_decays_as_differences_of_sums_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def subtracted(g: Tensor) -> Tensor:
        total = g.cumsum(-1)
        future = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).triu(1)
        return (total[..., :, None] - total[..., None, :]).masked_fill(future, -math.inf).exp()

    monkeypatch.setattr(reference, "decays", subtracted)
    assert worst("backends", deltalab.get_rule("mamba2")) <= 0
    assert worst("extreme gates", deltalab.get_rule("mamba2")) > 0


@pytest.mark.parametrize("check", ["causality of values", "causality of gradients"])
def test_a_convolution_that_looks_ahead_is_caught(check: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the whole layer shows a leak outside the rule."""

    def ahead(qkv: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return features(F.pad(qkv[:, 1:], (0, 0, 0, 1)), *rest)

    assert worst(check, deltalab.get_rule("linear_attention")) <= 0
    monkeypatch.setattr("deltalab.models.layer.features", ahead)
    assert worst(check, deltalab.get_rule("linear_attention")) > 0


@pytest.mark.parametrize("transition", [SPLR, IPLR], ids=str)
def test_a_kernel_that_is_wrong_otherwise_is_not_blamed_on_the_read(transition: Transition) -> None:
    class Wrong(type(deltalab.get_rule("comba"))):  # type: ignore[misc]
        def fused(self, q: Tensor, k: Tensor, v: Tensor, gates: Any, **rest: Any) -> tuple[Tensor, Tensor]:
            o, (state,) = deltalab.scan(replace(self), q, k, v, gates, state=(rest["state"],), backend="recurrent")
            return 2 * o, state

    causes = {measured.cause for measured in form_checks.kernel(Wrong(transition=transition))}
    assert causes == {""}
    assert worst("kernel", Wrong(transition=transition)) > 0
