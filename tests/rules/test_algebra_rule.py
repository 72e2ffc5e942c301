"""The rule `algebra`: every published rule of the algebra is one of its points, and its other points are sound."""

import itertools
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml
from tests.support.folders import ROOT
from torch import Tensor
from typer.testing import CliRunner

import deltalab
from deltalab import InputError, plugin_files, registry
from deltalab.authoring.files.rule_file import write_rule
from deltalab.authoring.inputs import Inputs, draw, parts
from deltalab.authoring.rule_checks.rule_suite import check_rule
from deltalab.cli.app import app
from deltalab.export.modules import modules
from deltalab.models.layer import RuleLayer, initialize
from deltalab.models.spec import ModelSpec
from deltalab.rule import UpdateRule
from deltalab.store import Store
from deltalab.study.reports.rule_from_search import found_rule
from deltalab.study.running.run import run_study_file
from deltalab.study.specs.sections.search_space import combinations
from deltalab.study.specs.study_file import load_study
from deltalab_rules.algebra import OUTSIDE, POINTS

EXACT = 1e-10
SYMBOLS: Mapping[str, Mapping[str, str]] = {
    "gated_deltanet2": {"w": "value"},
    "rwkv6": {"u": "bonus"},
    "rwkv7": {"a": "b"},
}
"""Where a published rule has another symbol for a gate."""
PARAMETERS = {"dt.dt_bias": "dt.bias"}
"""Where a published gate has another name for a parameter."""


def near(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(
            got[name], value, rtol=EXACT, atol=EXACT, msg=lambda text, name=name: f"{name}: {text}"
        )


def evaluated(rule: UpdateRule, x: Inputs, backend: Any) -> dict[str, Tensor]:
    """The output, the states, and the gradients of all inputs."""
    x = x.map(lambda part: part.detach().requires_grad_())
    o, state = deltalab.scan(rule, x.q, x.k, x.v, x.gates, state=x.state, backend=backend, chunk_size=4)
    results = {"o": o, **parts(state)}
    total = torch.stack([(y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in results.values()]).sum()
    given = x.named()
    found = torch.autograd.grad(total, list(given.values()), materialize_grads=True)
    return results | {f"gradient of {name}": y for name, y in zip(given, found, strict=True)}


def renamed(name: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {SYMBOLS.get(name, {}).get(symbol, symbol): value for symbol, value in values.items()}


FOUND = {
    "pre_state_sgla": {
        "low_rank": "none", "value": "value_sigmoid", "read": "decayed", "d": {"head": {"init": 0.02}},
        "pre_state": True,
    },
    "pre_state_deltanet": {"decay": "none", "b": "head_sigmoid", "d": {"head": {"init": 0.02}}, "pre_state": True},
}  # fmt: skip
"""The rules that searches found and that came to plugins, as knobs of `algebra`."""
KNOWN = {**POINTS, **FOUND, "mamba2": {**POINTS["mamba2"], "qk": "silu"}}
"""Every rule that is a point. `POINTS` has mamba2 without its SiLU: the hash of that file is in the keys of trials."""


LATER = {
    "differential_attention": OUTSIDE["attention"],
    **dict.fromkeys(("h3", "hgrn", "lru", "min_gru", "rg_lru", "rwkv4", "s4d", "s5"), "an element-wise recurrence"),
    **dict.fromkeys(("memora", "recurrent_fast_weights", "slstm"), "its state enters a nonlinearity"),
    "learned_ttt": "its error passes through a norm before it is written",
    "hyena": "a long convolution",
    "rwkv5": "its decay is learned for each channel, and does not depend on the token",
    "erase_then_delta": "erases at an address of its own before the delta rule does",
    "gated_oja": "exchanges keys and values",
    **dict.fromkeys(("kaczmarz", "q_delta"), "its key of erasure depends on the length of k, or on q"),
    "kalman_linear_attention": "carries a precision from token to token",
    "mamba3_mimo": "reads several times for each token",
    "mdn": "has a momentum beside its state",
    "memory_caching": "a state for each segment",
    **dict.fromkeys(("landmark_attention", "moba", "nsa", "reformer"), "keeps all keys, and chooses among them"),
    "infini_attention": "softmax attention inside of a segment, whose tokens enter the memory together",
}
"""Further rules outside, with the reason. The file of `algebra` cannot list them: its hash is in the keys of trials."""


class TestPoints:
    def test_every_rule_is_a_point_or_says_why_not(self) -> None:
        rules = [
            name for name in deltalab.list_rules() if registry.rule_plugin(name).file.parent.name == "deltalab_rules"
        ]
        assert sorted([*KNOWN, *OUTSIDE, *LATER, "algebra"]) == rules

    @pytest.mark.parametrize("backend", ["recurrent", "chunked"])
    # The beta of metala is a gate that shares g's projection: only a layer makes it 1 - alpha, as it is here.
    @pytest.mark.parametrize("name", [name for name in KNOWN if name != "metala"])
    def test_is_its_published_rule_on_drawn_inputs(
        self, name: str, backend: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Outputs, states and gradients, after a state that other tokens left."""
        theirs, ours = deltalab.get_rule(name), deltalab.get_rule("algebra", **KNOWN[name])
        monkeypatch.setattr(type(theirs), "scale", UpdateRule.scale)  # that of mamba2 is 1
        x = draw(theirs, batch=2, length=11, heads=2, key_dim=4, value_dim=3)
        first = x.span(0, 5)
        x = x.span(5, state=deltalab.scan(theirs, first.q, first.k, first.v, first.gates)[1])
        y = Inputs(x.q, x.k, x.v, renamed(name, x.gates), x.state)
        want, got = evaluated(theirs, x, backend), evaluated(ours, y, backend)
        symbols = {f"gradient of {old}": f"gradient of {new}" for old, new in SYMBOLS.get(name, {}).items()}
        near(got, {symbols.get(key, key): value for key, value in want.items()})

    @pytest.mark.parametrize("name", KNOWN)
    def test_is_its_published_rule_as_a_layer(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same parameters give the same outputs, states and gradients, whatever gates share a projection."""
        monkeypatch.setattr(type(deltalab.get_rule(name)), "scale", UpdateRule.scale)  # that of mamba2 is 1
        theirs, ours = (
            RuleLayer(rule, 8, 2, key_dim=4, value_dim=3).double()
            for rule in (deltalab.get_rule(name), deltalab.get_rule("algebra", **KNOWN[name]))
        )
        initialize(theirs, seed=0)
        names = {n: _ours(name, n) for n, _ in theirs.named_parameters()}
        ours.load_state_dict({names[n]: value for n, value in theirs.state_dict().items()})
        results = []
        for layer in (theirs, ours):
            x = torch.randn(
                2, 7, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
            )
            y, cache = layer.advance(x)
            found = {"y": y, **{f"state[{i}]": part for i, part in enumerate(cache.state)}}
            weights = dict(layer.named_parameters())
            gradients = torch.autograd.grad(y.square().sum(), [x, *weights.values()])
            results.append(found | dict(zip(["x", *weights], gradients, strict=True)))
        near(results[1], {names.get(key, key): value for key, value in results[0].items()})


NEW: list[dict[str, Any]] = [
    {
        "decay": "diagonal",
        "low_rank": "free",
        "direction": "w",
        "erase": "own",
        "b": "sigmoid",
        "d": {"head": {"init": 1}},
    },
    {"decay": "diagonal", "g": "gla_decay", "micro_steps": 2, "reflects": True},
    {"reads": "state", "b": "sigmoid", "pre_state": True, "bonus": 1, "value": "value_sigmoid"},
    {"decay": "diagonal", "decay_by": "selection", "low_rank": "none", "d": {"head": {"init": 1}}},
    {"residual": "log_cosh", "gamma": "sigmoid", "strength": "exact", "d": {"head": {"init": 1}}, "reads": "state"},
    {"signed": True, "low_rank": "none"},
]
"""Settings that no published rule has."""


class TestOthers:
    @pytest.mark.parametrize("knobs", NEW, ids=str)
    def test_runs_on_the_kernels(self, knobs: Mapping[str, Any]) -> None:
        """Outputs, states and gradients of the kernels in fp32, against the recurrence in fp64."""
        rule = deltalab.get_rule("algebra", **knobs)
        x = draw(rule, batch=1, length=5, heads=1, key_dim=16, value_dim=16)
        first = x.span(0, 2)
        x = x.span(2, state=deltalab.scan(rule, first.q, first.k, first.v, first.gates)[1])
        x = x.map(Tensor.float).map(Tensor.double)
        want, got = evaluated(rule, x, "recurrent"), evaluated(rule, x.map(Tensor.float), "triton")
        for name, value in want.items():
            assert (got[name].double() - value).norm() <= 2e-5 * value.norm().clamp_min(1e-3), name

    def test_forms_agree_at_many_settings(self) -> None:
        for rule in random_points(30, seed=2):
            x = draw(rule, batch=2, length=9, heads=2, key_dim=4, value_dim=3)
            first = x.span(0, 4)
            x = x.span(4, state=deltalab.scan(rule, first.q, first.k, first.v, first.gates)[1])
            near(evaluated(rule, x, "chunked"), evaluated(rule, x, "recurrent"))

    @pytest.mark.slow(keep="bonus")
    @pytest.mark.parametrize("knobs", NEW, ids=str)
    def test_passes_the_quick_checks(self, knobs: Mapping[str, Any]) -> None:
        found = check_rule(deltalab.get_rule("algebra", **knobs), quick=True)
        # A needed gate has one form, and its constant option stands for that: the two are one function here.
        assert [result.message for result in found if not result.passed and result.name != "knob options"] == []

    @pytest.mark.parametrize(
        ("knobs", "said"),
        [
            ({"decay": "none", "g": "gla_decay"}, r"algebra\.g gla_decay.* takes decay scalar or diagonal, not none"),
            ({"g": 0}, r"algebra\.g const\(value=0\) forgets nothing: take decay none"),
            ({"low_rank": "none", "b": "sigmoid"}, r"algebra\.b .* takes low_rank tied or free, not none"),
            ({"b": "channel_sigmoid"}, "b channel_sigmoid takes low_rank free"),
            ({"low_rank": "free"}, "along k with one strength for each head is low_rank tied"),
            ({"beta": "mamba2_step"}, "erase beta needs a beta of its own"),
            ({"qk": "raw"}, "erasing along k needs its norm to be 1"),
            ({"beta": {"sigmoid": {"max": 2}}, "reflects": True}, "erases up to 4 of what it reads"),
            ({"reads": "state", "reflects": True}, "erases up to 2 of what it reads"),
            ({"decay": "diagonal", "g": "retnet_decay"}, "one number for each head"),
            ({"micro_steps": 2, "value": "value_sigmoid"}, "micro_steps above 1 take no"),
            ({"residual": "l2", "pre_state": True}, "residual takes"),
            ({"residual": "l2", "decay": "diagonal"}, "has no kernel with a diagonal decay"),
        ],
    )
    def test_refuses_what_has_no_effect_or_would_grow_in_one_line(self, knobs: Mapping[str, Any], said: str) -> None:
        with pytest.raises(InputError, match=said) as refused:
            deltalab.get_rule("algebra", **knobs)
        assert "\n" not in str(refused.value)

    def test_settings_that_are_one_rule_are_said_alike(self) -> None:
        """Without effect a knob rests, so that a search tries no rule twice."""
        some = deltalab.get_rule("algebra", decay="none", low_rank="none", beta=1)
        again = deltalab.get_rule("algebra", **{n: v for n, v in some.spec().items() if n != "name"})
        assert some == again
        assert some.gates["g"].kind == "const"


def _ours(rule: str, parameter: str) -> str:
    """The name that a parameter of a published rule's layer has in that of its point."""
    for old, new in PARAMETERS.items():
        parameter = parameter.replace(old, new)
    parts = parameter.split(".")
    if parts[0] == "gates":
        parts[2] = SYMBOLS.get(rule, {}).get(parts[2], parts[2])
    return ".".join(parts)


def random_points(count: int, seed: int) -> list[UpdateRule]:
    """Different settings that the rule accepts, with a third of the knobs turned."""
    chance, kind, found = random.Random(seed), type(deltalab.get_rule("algebra")), {}
    while len(found) < count:
        turned = {name: chance.choice(given) for name, given in kind.options().items() if chance.random() < 0.35}
        with suppress(InputError):
            rule = kind(**turned)
            found[str(rule.spec())] = rule
    return list(found.values())


def written(rule: UpdateRule, folder: Path, name: str = "mine") -> UpdateRule:
    """The rule of the file that `write_rule` makes of another rule."""
    file = folder / f"{name}.py"
    file.write_text(write_rule(rule, name, "Found by a test."))
    module = plugin_files.import_file(file)
    (kind,) = registry._kinds(module)
    assert issubclass(kind, UpdateRule)
    return kind()


OTHERS = [
    ("comba", {"transition": "iplr", "d": 0, "b": 1, "silu": "qk"}),
    ("comba", {"beta": "mamba2_step", "normalize": False}),
    ("rla", {"loss": "log_cosh", "output": "sum", "gamma": "like_beta"}),
    ("delta_product", {"n_h": 3, "g": "mamba2_decay"}),
    ("hgrn2", {}),
    ("gated_deltanet2", {"w": 1}),
    ("rwkv7", {"rho": 0}),
    ("mamba", {"a": 1}),
    ("longhorn", {"transition": "householder"}),
]


class TestWritten:
    @pytest.mark.parametrize("name", POINTS)
    def test_the_file_of_a_point_computes_what_the_point_does(self, name: str, tmp_path: Path) -> None:
        self.agree(deltalab.get_rule("algebra", **POINTS[name]), tmp_path)

    @pytest.mark.parametrize("rule", random_points(25, seed=0), ids=lambda rule: type(rule)().turned(rule))
    def test_the_file_of_any_setting_computes_what_it_does(self, rule: UpdateRule, tmp_path: Path) -> None:
        self.agree(rule, tmp_path)

    @pytest.mark.parametrize(("name", "knobs"), OTHERS)
    def test_the_file_of_another_rule_computes_what_it_does(
        self, name: str, knobs: Mapping[str, Any], tmp_path: Path
    ) -> None:
        self.agree(deltalab.get_rule(name, **knobs), tmp_path)

    def agree(self, rule: UpdateRule, folder: Path) -> None:
        alone = written(rule, folder)
        assert [name for name, gate in alone.gates.items() if gate.kind == "const"] == []
        assert (alone.features, alone.silu_of_v, alone.eigenvalues) == (
            rule.features,
            rule.silu_of_v or rule.features == "raw",
            rule.eigenvalues,
        )
        x = draw(rule, batch=2, length=9, heads=2, key_dim=4, value_dim=3)
        first = x.span(0, 4)
        x = x.span(4, state=deltalab.scan(rule, first.q, first.k, first.v, first.gates)[1])
        near(evaluated(alone, x, "chunked"), evaluated(rule, x, "chunked"))

    @pytest.mark.slow
    def test_files_are_formatted(self, tmp_path: Path) -> None:
        """Those of all points, of other settings, and with a name and an origin that are long."""
        rules = [deltalab.get_rule("algebra", **knobs) for knobs in POINTS.values()] + random_points(60, seed=1)
        rules += [deltalab.get_rule(name, **knobs) for name, knobs in OTHERS]
        for i, rule in enumerate(rules):
            name = f"rule_with_a_long_name_that_is_number_{i}"
            (tmp_path / f"{name}.py").write_text(write_rule(rule, name, "Found by the search of a study. " * 20))
        for command in (["format", "--check"], ["check", "--ignore", "D"]):  # as in plugins/
            config = ["--config", str(ROOT / "pyproject.toml")]
            found = subprocess.run(
                [sys.executable, "-m", "ruff", *command, *config, tmp_path],
                cwd=ROOT,  # where the sources of `src` lie
                capture_output=True,
                text=True,
                check=False,
            )
            assert found.returncode == 0, found.stdout

    def test_the_equation_is_that_of_the_setting(self) -> None:
        text = write_rule(deltalab.get_rule("algebra", **POINTS["rwkv7"]), "mine", "Found.")
        assert "S_t = (diag(alpha_t) - (b_t * x_t) x_t^T) S_{t-1} + k'_t v_t^T" in text
        assert "x_t = normalize(xi * k_t)" in text
        text = write_rule(deltalab.get_rule("algebra", **POINTS["comba"]), "mine", "Found.")
        assert "S_t = (alpha_t I - b beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T" in text
        assert "o_t = scale S_t^T (q_t - d k_t)" in text
        text = write_rule(deltalab.get_rule("algebra", **KNOWN["pre_state_sgla"]), "mine", "Found.")
        assert "o_t = scale S_{t-1}^T (alpha_t q_t - d k_t)" in text
        text = write_rule(deltalab.get_rule("algebra", low_rank="none", read="decayed"), "mine", "Found.")
        assert "o_t = scale alpha_t S_t^T q_t" in text

    @pytest.mark.slow
    def test_a_file_passes_the_quick_checks_and_is_exported(self, tmp_path: Path) -> None:
        file = tmp_path / "winner.py"
        file.write_text(write_rule(deltalab.get_rule("algebra", **NEW[4]), "winner", "Found by a test."))
        with registry.isolated():
            registry.add_plugin(file)
            assert [result.message for result in check_rule("winner", quick=True) if not result.passed] == []
            exported = modules(ModelSpec.of({"rule": "winner", "d_model": 8, "heads": 1, "layers": 1, "vocab_size": 8}))
        assert "def _exact(beta" in exported["rule_winner"]

    @pytest.mark.parametrize("name", ["gka", "lightnet"])
    def test_a_rule_that_cannot_be_written_says_what_to_do(self, name: str) -> None:
        with pytest.raises(InputError, match="copy its file, or take it in a study as"):
            write_rule(deltalab.get_rule(name), "mine", "Found.")


class TestDiscover:
    @pytest.mark.slow
    def test_no_two_candidates_are_the_same_model(self) -> None:
        """Neither two names of one rule, nor rules of the same gates that compute the same."""
        space = load_study(ROOT / "studies" / "discover.yaml").search
        assert space is not None
        # These are in no condition but pre_state, and each of their values computes something else.
        aside = {"rule.value": 1, "rule.d": 0, "rule.read": "q", "rule.pre_state": False}
        knobs = {
            name: knob.model_copy(update={"choice": (aside[name],)}) if name in aside else knob
            for name, knob in space.knobs.items()
            if name.startswith("rule.")
        }
        made: dict[str, list[UpdateRule]] = {}
        for candidate in combinations(knobs):
            with suppress(InputError):
                rule = deltalab.get_rule("algebra", **{path.removeprefix("rule."): v for path, v in candidate.items()})
                gates = {name: gate.spec() for name, gate in rule.gates.items() if not gate.constant}
                made.setdefault(str((rule.transition, rule.features, rule.second_state, gates)), []).append(rule)
        assert sum(map(len, made.values())) > 500
        for alike in made.values():
            outputs = []
            for rule in alike:
                x = draw(rule, batch=1, length=6, heads=1, key_dim=4, value_dim=2)
                outputs.append(deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="recurrent")[0])
            for (one, y), (other, z) in itertools.combinations(zip(alike, outputs, strict=True), 2):
                assert not torch.allclose(y, z), f"{one.spec()} and {other.spec()} are one"


class TestFromSearch:
    """The command, on a tiny search over algebra."""

    STUDY: ClassVar[dict[str, Any]] = {
        "name": "tiny_algebra",
        "task": {"mqar": {"length": 8, "pairs": 1, "vocab_size": 16}},
        "base": {
            "rule": "linear_attention",
            "model": {"d_model": 8, "layers": 1, "heads": 1, "mlp": False},
            "train": {"steps": 2, "batch_size": 2, "lr": 1e-2, "evaluations": 1, "eval_batches": 1},
        },
        "search": {
            "rule": {
                "choice": [{"name": "algebra", "low_rank": "none"}, {"name": "algebra", "value": "value_sigmoid"}]
            },
            "trials": 2,
            "finalists": 1,
        },
        "seeds": 1,
    }

    @pytest.fixture(scope="class")
    def db(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        folder = tmp_path_factory.mktemp("search")
        for name, spec in (
            ("tiny_algebra", self.STUDY),
            ("plain", {**self.STUDY, "name": "plain", "search": None, "arms": {"other": {"rule": "deltanet"}}}),
        ):
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump({key: value for key, value in spec.items() if value is not None}))
            run_study_file(file, db=folder / "lab.db", executor="inline", unchecked=True)
        return folder / "lab.db"

    def command(self, db: Path, *given: str) -> Any:
        return CliRunner().invoke(app, ["rule", "from-search", *given, "--db", str(db)])

    @pytest.mark.slow
    def test_writes_a_rule_that_is_found_and_equal(self, db: Path, tmp_path: Path) -> None:
        file = tmp_path / "winner.py"
        words = "tiny_algebra", "--arm", "found_1", "--name", "winner", "--out"
        ended = self.command(db, *words, str(tmp_path / "json.py"), "--json")
        assert json.loads(ended.output) == {"name": "winner", "file": str(tmp_path / "json.py")}
        ended = self.command(db, *words, str(file))
        assert ended.exit_code == 0, ended.output
        assert f"deltalab rule check {file}" in ended.output
        text = file.read_text()
        assert "Found by the search of study tiny_algebra" in text
        assert "{" not in text.split('"""')[1], "a commit is a word"
        with Store.open(db) as store:
            rule, _ = found_rule(store, store.study("tiny_algebra").id, "found_1")
        (kind,) = registry._kinds(plugin_files.import_file(file))
        x = draw(rule, batch=2, length=9, heads=2, key_dim=4, value_dim=3)
        near(evaluated(kind(), x, "chunked"), evaluated(rule, x, "chunked"))  # type: ignore[call-arg, arg-type]

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (["plain", "--arm", "other", "--name", "winner"], "study 'plain' has no search"),
            (["tiny_algebra", "--arm", "found_2", "--name", "winner"], "did you mean 'found_1'"),
            (["tiny_algebra", "--arm", "base", "--name", "winner"], "unknown arm 'base'"),
            (["tiny_algebr", "--arm", "found_1", "--name", "winner"], "did you mean 'tiny_algebra'"),
            (["tiny_algebra", "--arm", "found_1", "--name", "comba"], "there is a rule 'comba' already"),
            (["tiny_algebra", "--arm", "found_1", "--name", "two words"], "cannot name a rule"),
            (["tiny_algebra", "--arm", "found_1", "--name", "winner", "--out", "winner.txt"], "ends in .py"),
            (["tiny_algebra", "--arm", "found_1", "--name", "winner", "--out", "taken.py"], "exists already"),
        ],
    )
    def test_a_wrong_input_is_one_line_and_writes_nothing(
        self, db: Path, given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "taken.py").write_text("mine")
        ended = self.command(db, *given)
        assert isinstance(ended.exception, InputError)
        assert said in str(ended.exception)
        assert "\n" not in str(ended.exception)
        assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"taken.py": "mine"}
