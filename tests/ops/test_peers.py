"""The back ends of published kernels: given the function of the rule, and refused in one line where they have none."""

from typing import Any

import pytest
import torch
from tests.support.published_ops import pretend
from torch import Tensor

import deltalab
from deltalab.authoring.inputs import draw
from deltalab.authoring.rule_checks.backend_checks import check_backend
from deltalab.errors import InputError
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec
from deltalab.ops.peers import scans, table
from deltalab.training.train import TrainSpec, train

RULES = ["linear_attention", "retnet", "gla", "deltanet", "gated_deltanet", "comba", "kda", "rwkv7", "rwkv6"]


@pytest.mark.parametrize("name", RULES)
def test_a_published_kernel_computes_the_rule(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    results = check_backend(deltalab.get_rule(name), "fla")
    assert [result.name for result in results] == [
        f"{kind}, {dtype}" for dtype in ("bfloat16", "float16") for kind in ("sequences", "packed")
    ]
    assert all(result.passed for result in results), [r.message for r in results if not r.passed]


def test_flash_qla_has_the_gated_delta_rule_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    assert all(result.passed for result in check_backend(deltalab.get_rule("gated_deltanet"), "flash_qla"))
    with pytest.raises(InputError, match="'flash_qla' has the gated delta rule alone, and no kda"):
        check_backend(deltalab.get_rule("kda"), "flash_qla")


@pytest.mark.parametrize("wrong", ["strength", "state", "scale"])
def test_a_wrong_kernel_fails(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    right = scans._call

    def broken(*given: Any) -> Any:
        function, arguments, options = right(*given)
        if wrong == "strength":
            arguments["beta"] = 0.5 * arguments["beta"]

        def run(*, initial_state: Tensor | None, scale: float, **more: Any) -> Any:
            before = None if wrong == "state" else initial_state
            return function(initial_state=before, scale=1.1 * scale if wrong == "scale" else scale, **more)

        return run, arguments, options

    monkeypatch.setattr(scans, "_call", broken)
    assert not any(result.passed for result in check_backend(deltalab.get_rule("gated_deltanet"), "fla"))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gka", "rule 'gka' is no single recurrence of the algebra"),
        ("rdn", "no published op has a second state"),
        ("delta_product", "no published op takes 2 steps per token"),
    ],
)
def test_a_rule_without_an_op_is_refused(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    rule = deltalab.get_rule(name)
    x = draw(rule, batch=1, length=3, heads=1, key_dim=4, value_dim=4)
    with pytest.raises(InputError, match=f"backend 'fla': {says}: use 'auto', 'chunked' or 'recurrent'"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="fla")
    with pytest.raises(InputError, match=f"model.backend 'fla': {says}"):
        ModelSpec.of({"vocab_size": 8, "rule": name, "backend": "fla"})


def test_strengths_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    rule = deltalab.get_rule("comba", transition="iplr")
    x = draw(rule, batch=1, length=3, heads=1, key_dim=4, value_dim=4).map(Tensor.bfloat16)
    with pytest.raises(InputError, match="gated_delta_rule erases and writes with one strength"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="fla")


def test_what_is_missing_is_said() -> None:
    rule = deltalab.get_rule("gla")
    x = draw(rule, batch=1, length=3, heads=1, key_dim=4, value_dim=4)
    with pytest.raises(InputError, match="backend 'fla': not installed"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="fla")
    with pytest.raises(InputError, match="unknown backend 'flaa'"):
        ModelSpec.of({"vocab_size": 8, "rule": "gla", "backend": "flaa"})


def test_fp32_and_a_refusal_of_the_library_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    rule = deltalab.get_rule("gla")
    x = draw(rule, batch=1, length=3, heads=1, key_dim=4, value_dim=4)
    with pytest.raises(InputError, match=r"takes q, k and v in bf16 or fp16, not torch\.float64"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="fla")

    def refuse(**_: Any) -> None:
        raise AssertionError("head dim must be\n256 or less")

    monkeypatch.setattr(scans, "_call", lambda *_: (refuse, {}, {}))
    with pytest.raises(InputError, match="backend 'fla' refuses these inputs: head dim must be 256 or less"):
        deltalab.scan(rule, x.q, x.k, x.v, x.gates, backend="fla")


def test_layers_of_a_model_take_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    calls: list[str] = []
    right = scans._call
    monkeypatch.setattr(scans, "_call", lambda name, *given: (calls.append(name), right(name, *given))[1])
    spec = {"vocab_size": 8, "rule": "gated_deltanet", "d_model": 16, "layers": 3, "attention": (1,)}
    tokens = torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(0))
    made = {}
    for backend in ("auto", "fla"):
        torch.manual_seed(0)
        model = Model(ModelSpec.of({**spec, "backend": backend})).bfloat16()
        made[backend] = model(tokens).float()
    assert calls == ["fla", "fla"], "the attention layer takes none"
    torch.testing.assert_close(made["fla"], made["auto"], rtol=0.1, atol=0.1)
    of_algebra = {rule.transition is None for rule in ModelSpec.of(spec).rules()}
    assert of_algebra == {True, False}
    preset = ModelSpec.of({**spec, "rule": "gated_deltanet@published", "backend": "fla"})
    assert preset.backend == "fla", "a preset chooses no code"
    assert table.hindrance(deltalab.get_rule("gated_deltanet")) is None


def test_a_training_takes_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    calls: list[str] = []
    right = scans._call
    monkeypatch.setattr(scans, "_call", lambda name, *given: (calls.append(name), right(name, *given))[1])
    task = deltalab.get_task("mqar", length=16, pairs=2, vocab_size=16)
    how = TrainSpec(steps=3, batch_size=4, lr=1e-2, precision="bf16", device="cpu", evaluations=1)
    losses = {}
    for backend in ("auto", "fla"):
        model = ModelSpec.of(
            {"vocab_size": 16, "rule": "gated_deltanet", "d_model": 16, "layers": 1, "backend": backend}
        )
        result = train(task, model, how, seeds=(0, 1), test=False)
        losses[backend] = [value for run in result.runs for _, name, _, value in run.metrics if name == "loss"]
    assert len(calls) >= 3
    assert losses["fla"] == pytest.approx(losses["auto"], rel=0.02)
