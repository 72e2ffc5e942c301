"""Engines take the steps of a study: its learning rates, and the updates of its optimizers."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deltalab.data.pack import pack
from deltalab.data.sources import Reading
from deltalab.data.token_shards import Packed
from deltalab.engines import checkpoints, launch
from deltalab.engines.deltalab_train.batches import Rows
from deltalab.engines.preparation import Launch, prepare
from deltalab.errors import InputError
from deltalab.export.recipe import make_recipe
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.models.model import Model, build_model, parameter_groups
from deltalab.models.spec import ModelSpec
from deltalab.training.muon import MuonWithAdamW
from deltalab.training.optimizer import Adam, AdamW, Layout, Moments
from deltalab.training.recipe_keys import rate_factor, with_defaults
from deltalab.training.spec import TrainSpec

SPEC = ModelSpec.of({"rule": "comba", "vocab_size": 256, "d_model": 16, "heads": 2, "layers": 1})
TRAIN = TrainSpec(steps=8, batch_size=8, lr=0.02, warmup=0.25, optimizer="muon", evaluations=1)
LENGTH, SEED = 16, 3


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packed bytes, and a model that a trial by Muon is the source of."""
    lab = tmp_path_factory.mktemp("lab")
    (lab / "text.txt").write_text("\n".join(f"line {n}: {'abcdefghij'[n % 10] * (n % 7 + 3)}" for n in range(300)))
    pack([str(lab / "text.txt")], lab / "packed", reading=Reading(separator="\n"), shares={"train": 1.0})
    source = Source(SPEC, None, make_recipe(TRAIN, LENGTH, SEED, "trial k"), {}, {}, "bytes")
    assert export(source, lab / "model", to="torchtitan").notes == []
    return lab


def trained(
    lab: Path, run: Path, monkeypatch: pytest.MonkeyPatch, *given: str, begins: str = "from the start", **options: Any
) -> Launch:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = ["log.every=1", "validation.sequences=0", *given]
    ready = prepare(lab / "model", lab / "packed", run=run, gpus=0, given=settings, **options)
    said: list[str] = []
    assert launch.start(ready, say=said.append) == 0, (run / "log.txt").read_text()[-3000:]
    assert said[0] == begins
    return ready


def logged(run: Path, name: str) -> list[float]:
    """The values that a run logged, by step; the last line of a step counts."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {row["step"]: row["value"] for row in rows if (row["split"], row["name"]) == ("train", name)}
    return [found[step] for step in sorted(found)]


def by_a_study(lab: Path, train: TrainSpec) -> list[float]:
    """The losses of a training by a study's own optimizer and rates."""
    model = build_model(SPEC, seed=SEED)
    layout, rates = Layout(model), [train.learning_rate(step) for step in range(train.steps)]
    row = layout.pack(model.state_dict())[None]
    state = Moments(row, torch.zeros_like(row), torch.zeros_like(row))
    run = Adam(rates, train.weight_decay, train.betas, train.clip)
    optimizer = AdamW([run], layout, torch.device("cpu"), train.steps, muon=train.optimizer == "muon")
    optimizer.load(0, optimizer.rates_of(0, train.steps))
    rows, found = Rows(Packed(lab / "packed").split("train"), LENGTH, SEED), []
    for step in range(train.steps):
        model.load_state_dict({name: value[0] for name, value in layout.unpack(state.weights).items()}, strict=False)
        size = train.batch_size
        tokens = torch.from_numpy(np.stack([rows[index][0] for index in range(step * size, (step + 1) * size)]))
        loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        model.zero_grad()
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step(state, loss.detach()[None], layout.pack(grads)[None])
        found.append(loss.item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("engine", ["torchtitan", "accelerate"])
def test_a_training_by_muon_has_the_losses_of_the_study_and_goes_on_with_them(
    engine: str, processes: int, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, given = tmp_path / "run", ["checkpoint.every=4"]
    ready = trained(lab, run, monkeypatch, *given, engine=engine, processes=processes)
    assert ready.recipe["optimizer"]["name"] == "muon"
    assert logged(run, "lr") == pytest.approx([TRAIN.learning_rate(step) for step in range(TRAIN.steps)], rel=1e-6)
    expected, losses = by_a_study(lab, TRAIN), logged(run, "loss")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0] - 0.1
    last = checkpoints.complete_checkpoints(run)[-1]
    weights = checkpoints.read_checkpoint(last)
    for file in sorted(last.rglob("*"), reverse=True):
        file.unlink() if file.is_file() else file.rmdir()
    last.rmdir()
    trained(lab, run, monkeypatch, *given, begins="from step-4", engine=engine, processes=processes)
    assert logged(run, "loss") == pytest.approx(expected, rel=1e-5), "the momentum is part of the checkpoint"
    for name, value in checkpoints.read_checkpoint(last).items():
        torch.testing.assert_close(value, weights[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torchtitan", "accelerate"])
def test_a_training_by_adamw_has_the_losses_of_the_study(
    engine: str, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(lab, tmp_path / "run", monkeypatch, "optimizer.name=adamw", engine=engine)
    losses = logged(tmp_path / "run", "loss")
    assert losses == pytest.approx(by_a_study(lab, replace(TRAIN, optimizer="adamw")), rel=1e-5)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.slow
def test_two_pairs_that_share_sequences_have_the_losses_of_the_study_and_one_process_goes_on(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, expected = tmp_path / "run", by_a_study(lab, replace(TRAIN, optimizer="adamw"))
    given = ["optimizer.name=adamw", "checkpoint.every=4", "batch.micro=2"]
    trained(lab, run, monkeypatch, *given, "context_parallel=2", processes=4)
    assert logged(run, "loss") == pytest.approx(expected, rel=1e-5)
    shutil.rmtree(checkpoints.complete_checkpoints(run)[-1])
    trained(lab, run, monkeypatch, *given, begins="from step-4")
    assert logged(run, "loss") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_processes_that_share_packed_documents_measure_the_losses_and_gradients_of_one(
    lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack([str(lab / "text.txt")], tmp_path / "packed", reading=Reading(separator="\n"))
    (tmp_path / "model").symlink_to(lab / "model")
    found: dict[str, dict[tuple[int, str, str], float]] = {}
    for name, count, *more in (("alone", 1), ("shared", 2, "context_parallel=2", "activation_checkpointing=true")):
        settings = ["validation.sequences=6", "log.every=1", "steps=3", "batch.documents=reset", *more]
        trained(tmp_path, tmp_path / name, monkeypatch, *settings, processes=count)
        rows = map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())
        found[name] = {(row["step"], row["split"], row["name"]): row["value"] for row in rows}
    wanted = [key for key in found["alone"] if key[2] in ("loss", "grad_norm")]
    assert {key[1] for key in wanted} == {"train", "validation"}
    for key in wanted:
        assert found["shared"][key] == pytest.approx(found["alone"][key], rel=1e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torchtitan", "accelerate"])
@pytest.mark.parametrize(
    "given",
    [
        {"kind": "cosine", "final": 0.1},
        {"kind": "wsd", "final": 0.1, "stable": 0.5, "decay": "sqrt"},
    ],
    ids=lambda given: str(given["kind"]),
)
def test_an_engine_logs_the_rates_of_the_schedule(
    given: dict[str, Any], engine: str, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"schedule.{name}={value}" for name, value in given.items()]
    ready = trained(lab, tmp_path / "run", monkeypatch, "optimizer.name=adamw", *settings, engine=engine)
    rates = logged(tmp_path / "run", "lr")
    assert rates == pytest.approx([0.02 * rate_factor(ready.recipe, step) for step in range(8)], rel=1e-6)
    assert rates[:2] == pytest.approx([0.01, 0.02], rel=1e-6), "the first step of a warm-up is one that learns"
    if given["kind"] == "wsd":
        shares = [1, 1, 1, 0.1 + 0.9 * 0.5, 0.1 + 0.9 * (1 - 0.5**0.5)]
        assert [rates[step] for step in (2, 3, 4, 5, 6)] == pytest.approx([0.02 * share for share in shares], rel=1e-6)
    else:
        study = TrainSpec(steps=8, batch_size=1, lr=0.02, warmup=0.25, schedule="cosine", final=0.1, evaluations=1)
        assert rates == pytest.approx([study.learning_rate(step) for step in range(8)], rel=1e-6)


@pytest.mark.parametrize(
    "given",
    [{"schedule": "linear", "final": 0.1}, {"schedule": "wsd"}, {"schedule": "wsd", "stable": 0.5, "decay": "sqrt"}],
    ids=str,
)
def test_a_recipe_has_the_schedule_of_the_study(given: dict[str, Any]) -> None:
    study = TrainSpec(steps=40, batch_size=1, lr=0.02, warmup=0.25, evaluations=1, **given)
    recipe = with_defaults(make_recipe(study, LENGTH, SEED, "a test"))
    rates = [study.learning_rate(step) for step in range(40)]
    assert [0.02 * rate_factor(recipe, step) for step in range(40)] == pytest.approx(rates, rel=1e-12)


@pytest.mark.parametrize("experts", [None, {"count": 4, "top": 2}])
def test_muon_of_parameters_moves_a_model_as_that_of_rows(experts: dict[str, int] | None) -> None:
    model = build_model(ModelSpec.of({**vars(SPEC), "experts": experts}), seed=1)
    layout, draw = Layout(model), torch.Generator().manual_seed(0)
    run = Adam([0.01, 0.02, 0.005], 0.1, (0.9, 0.95), 1.0)
    row = layout.pack(model.state_dict())[None]
    state = Moments(row, torch.zeros_like(row), torch.zeros_like(row))
    study = AdamW([run], layout, torch.device("cpu"), 3, muon=True)
    study.load(0, study.rates_of(0, 3))
    engine = MuonWithAdamW(parameter_groups(model, 0.1, 0.01, muon=True), lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    for rate in run.lr:
        grads = {name: torch.randn(p.shape, generator=draw) for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = grads[name].clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in engine.param_groups:
            group["lr"] = rate
        engine.step()
        study.step(state, torch.zeros(1), layout.pack(grads)[None])
    for name, value in layout.unpack(state.weights).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value[0], rtol=1e-5, atol=1e-6)


def test_a_model_with_a_base_width_does_not_train_by_muon(lab: Path, tmp_path: Path) -> None:
    spec = ModelSpec.of({**vars(SPEC), "base_width": 4})
    recipe = make_recipe(TrainSpec(steps=8, batch_size=8, lr=0.02, evaluations=1), LENGTH, SEED, "trial k")
    export(Source(spec, None, recipe, {}, {}, "bytes"), tmp_path / "wide", to="torchtitan")
    with pytest.raises(InputError, match=r"optimizer.name muon does not go with base_width 4 of .*/wide"):
        prepare(tmp_path / "wide", lab / "packed", gpus=0, given=["optimizer.name=muon"])
    with pytest.raises(InputError, match="muon does not go with a base_width"):
        parameter_groups(Model(spec), 0.1, 0.01, muon=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("schedule.stable=0.8", "has no effect on a schedule of kind cosine, only on wsd"),
        ("schedule.decay=sqrt", "has no effect on a schedule of kind cosine, only on wsd"),
        ("schedule.stable=1.5", "must be a number from 0 to 1, not 1.5"),
        ("schedule.decay=sqr", "did you mean 'sqrt'"),
    ],
)
def test_settings_of_a_schedule_that_would_do_nothing_are_refused(given: str, message: str, lab: Path) -> None:
    with pytest.raises(InputError, match=message):
        prepare(lab / "model", lab / "packed", gpus=0, given=[given])


def test_no_setting_of_a_recipe_is_missing_from_its_schedule() -> None:
    recipe = with_defaults({"steps": 10, "schedule": {"kind": "wsd", "stable": 0.5, "decay": "cosine"}})
    assert [round(rate_factor(recipe, step), 3) for step in (0, 5, 6, 9)] == [1.0, 1.0, 0.905, 0.095]
