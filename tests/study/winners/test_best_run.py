"""What leaves a study: the trial that the report shows, and its training, which a folder gives again."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

from deltalab import registry
from deltalab.data.pack import pack
from deltalab.data.sources import Reading
from deltalab.data.vocabulary import train_tokenizer
from deltalab.errors import InputError
from deltalab.export import rebuild
from deltalab.export.source import Source
from deltalab.export.write import export
from deltalab.store import RuleRecord, RunRecord, Store, TrialRecord
from deltalab.study.reports.report import report
from deltalab.study.running.run import run_study_file
from deltalab.study.winners.best_run import best_run
from deltalab.tasks.packed_corpus import PackedCorpus
from deltalab.training.train import TrainSpec

STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "mine",
        "model": {"d_model": 16, "layers": ["rule", "other"], "heads": 2, "chunk_size": 16},
        "train": {"steps": 12, "batch_size": 4, "lr": 0.01, "evaluations": 6, "eval_batches": 1},
    },
    "arms": {"wide": {"model": {"conv": 2}}},
    "seeds": 2,
}


def rule(file: Path, name: str) -> Path:
    """A copy of a shipped rule under another name, as a user's plugin."""
    source = registry.rule_plugin("gla").source.replace('"gla"', f'"{name}"')
    assert f'"{name}"' in source
    file.write_text(source)
    return file


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished study."""
    folder = tmp_path_factory.mktemp("lab")
    file = folder / "s.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    with registry.isolated():
        for name in ("mine", "other"):
            registry.add_plugin(rule(folder / f"{name}.py", name))
        run_study_file(file, db=folder / "s.db", executor="inline", unchecked=True)
    return folder


@pytest.fixture
def study(lab: Path):
    with registry.isolated(), Store.open(lab / "s.db") as store:
        for name in ("mine", "other"):
            registry.add_plugin(lab / f"{name}.py")
        yield store


@pytest.fixture
def own(lab: Path, tmp_path: Path) -> Iterator[Store]:
    """A copy of the ledger, which a test may change."""
    (tmp_path / "s.db").write_bytes((lab / "s.db").read_bytes())
    with registry.isolated(), Store.open(tmp_path / "s.db") as store:
        for name in ("mine", "other"):
            registry.add_plugin(lab / f"{name}.py")
        yield store


@pytest.mark.slow
def test_a_folder_alone_trains_its_trial_again_to_the_bit(lab: Path, tmp_path: Path) -> None:
    with registry.isolated(), Store.open(lab / "s.db") as store:
        for name in ("mine", "other"):
            registry.add_plugin(lab / f"{name}.py")
        found = best_run(store, 1, arm="wide", best=False, task=None)
        export(found.source, tmp_path / "out", scale="340M")
        key, seed = found.source.provenance["trial"], found.source.provenance["seed"]
        curve = [p for p in store.curves(1, "mqar", "loss", "train") if (p.trial, p.seed) == (key, seed)]
    with registry.isolated():
        assert "mine" not in registry.list_rules(), "the rule comes from the folder"
        losses = rebuild(tmp_path / "out", steps=200)
    assert len(losses) == 12
    assert {point.step: point.value for point in curve} == {step: losses[step - 1] for step in (2, 4, 6, 8, 10, 12)}


def test_the_best_arm_is_that_of_the_report(study: Store) -> None:
    rows = report(study, 1).tables[0].rows
    best = max(rows, key=lambda row: (row.score.mean, row.is_base))
    found = best_run(study, 1, arm=None, best=True, task=None)
    assert found.source.provenance["arm"] == best.arm
    if best.is_base:
        assert "no arm has a better accuracy" in found.summary
    else:
        assert f"over the base: {best.verdict})" in found.summary


def test_a_better_arm_is_named_with_its_difference_and_verdict(own: Store) -> None:
    better(own, "wide", "b" * 64, values={}, accuracy=0.9)
    found = best_run(own, 1, arm=None, best=True, task=None)
    assert found.source.provenance["arm"] == "wide"
    assert "arm wide (accuracy 0.900 [0.900, 0.900], +0." in found.summary
    assert "over the base: undecidable: needs 6 seeds)" in found.summary


def test_an_arm_that_differs_by_nothing_from_the_base_is_not_the_best(own: Store) -> None:
    better(own, "base", "a" * 64, values={}, accuracy=0.9)
    better(own, "wide", "b" * 64, values={}, accuracy=0.9)
    message = "arms base, wide have the same accuracy 0.9, so that none is best: name one with --arm"
    with pytest.raises(InputError, match=message):
        best_run(own, 1, arm=None, best=True, task=None)
    assert best_run(own, 1, arm="wide", best=False, task=None).source.provenance["arm"] == "wide"


def better(store: Store, arm: str, key: str, *, values: dict[str, Any], accuracy: float, later: float = 1e9) -> None:
    """Records a second trial as candidate 0 of an arm, `later` seconds after the first."""
    first = next(row for row in store.trials(1) if row.arm == arm)
    config = json.loads(json.dumps(first.config))
    config["train"]["lr"] = values.get("train.lr", config["train"]["lr"])
    metrics = [(split, "accuracy", 12, accuracy) for split in ("validation", "test")]
    start = first.started_at.timestamp() + later
    record = TrialRecord(
        key, first.task, first.task_version, "confirm", config, "done", start, start + 1, 1.0,
        RuleRecord(first.rule, first.rule_hash, ""), runs=[RunRecord(seed, metrics=metrics) for seed in first.runs],
        hardware=first.hardware,
    )  # fmt: skip
    store.record_trial(1, arm, record, 0, values)


@pytest.mark.parametrize("later", [1e6, -1e6])
def test_a_superseded_trial_is_neither_shown_nor_exported(own: Store, later: float) -> None:
    """After failed trials ran again, an arm may have another candidate of the same number."""
    first = next(row for row in own.trials(1) if row.arm == "wide")
    accuracy = 0.0 if later > 0 else 1.0  # the superseded trial is the better one
    better(own, "wide", "b" * 64, values={"train.lr": 0.5}, accuracy=accuracy, later=later)
    row = next(row for row in report(own, 1).tables[0].rows if row.arm == "wide")
    found = best_run(own, 1, arm="wide", best=False, task=None).source
    newer = later > 0
    assert row.tuned == ({"train.lr": 0.5} if newer else {})
    assert (row.score.mean == accuracy) == newer
    assert found.provenance["trial"] == ("b" * 64 if newer else first.key)
    assert found.recipe["optimizer"]["lr"] == (0.5 if newer else 0.01)


@pytest.mark.parametrize("name", ["mine", "other"])
def test_the_rule_of_every_layer_must_be_the_one_that_was_trained(lab: Path, tmp_path: Path, name: str) -> None:
    with registry.isolated(), Store.open(lab / "s.db") as store:
        for each in ("mine", "other"):
            file = rule(tmp_path / f"{each}.py", each)
            if each == name:
                file.write_text(file.read_text() + "\n# edited\n")
            registry.add_plugin(file)
        with pytest.raises(InputError, match=f"rule '{name}' has changed since it was trained"):
            best_run(store, 1, arm="base", best=False, task=None)


def test_weights_that_are_gone_do_not_matter_where_none_are_asked_for(study: Store, tmp_path: Path) -> None:
    found = best_run(study, 1, arm="base", best=False, task=None).source
    (_, _, artifact), *_ = study.artifacts(1, "base")
    moved = [Path(a.path) for _, _, a in study.artifacts(1, "base")]
    assert artifact.path in map(str, moved)
    for file in moved:
        file.rename(file.with_suffix(".away"))
    try:
        with pytest.raises(InputError, match="the weights cannot be read: No such file"):
            export(found, tmp_path / "out")
        assert not export(found, tmp_path / "out", weights=False).trained
    finally:
        for file in moved:
            file.with_suffix(".away").rename(file)


def test_a_folder_of_another_release_is_refused(study: Store, tmp_path: Path) -> None:
    export(best_run(study, 1, arm="base", best=False, task=None).source, tmp_path / "out")
    recipe = yaml.safe_load((tmp_path / "out/recipe.yaml").read_text())
    recipe["trial"]["task"]["version"] += 1
    (tmp_path / "out/recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(InputError, match="install the release of deltalab that ran it"):
        rebuild(tmp_path / "out")
    del recipe["trial"]
    (tmp_path / "out/recipe.yaml").write_text(yaml.safe_dump(recipe))
    with pytest.raises(InputError, match="names no trial"):
        rebuild(tmp_path / "out")


def test_losses_end_where_the_trial_diverges(study: Store, tmp_path: Path) -> None:
    source = best_run(study, 1, arm="base", best=False, task=None).source
    train = {**source.recipe["trial"]["train"], "lr": 1e38, "clip": 0.0, "weight_decay": 0.0}
    assert TrainSpec(**train).lr == 1e38
    recipe = {**source.recipe, "trial": {**source.recipe["trial"], "train": train}}
    export(replace(source, recipe=recipe), tmp_path / "out", weights=False)
    losses = rebuild(tmp_path / "out")
    assert 1 <= len(losses) < 12
    assert all(torch.tensor(losses).isfinite())


def test_a_model_of_packed_text_leaves_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"line {n} of {n % 7} tales by the old mill.\n\n" for n in range(400)))
    train_tokenizer(["text.txt"], Path("bpe.json"), vocab_size=300)
    shares = {"train": 0.6, "validation": 0.2, "test": 0.2}
    pack(["text.txt"], Path("packed"), tokenizer="bpe.json", reading=Reading(separator="\n\n"), shares=shares)
    base = {**STUDY["base"], "rule": "gla", "model": {"d_model": 8, "layers": 1, "heads": 1}}
    task = {"text": {"length": 8, "corpus": "packed", "times": []}}
    Path("s.yaml").write_text(yaml.safe_dump({"name": "s", "task": task, "base": base, "seeds": 1}))
    run_study_file("s.yaml", db="s.db", executor="inline", unchecked=True)

    def chosen() -> Source:
        with Store.open("s.db") as store:
            return best_run(store, 1, arm="base", best=False, task=None).source

    export(chosen(), tmp_path / "out")
    of_data, exported = (AutoTokenizer.from_pretrained(folder, trust_remote_code=True) for folder in ("packed", "out"))
    text = "the old mill"
    assert exported(text)["input_ids"] == of_data(text)["input_ids"]
    assert len(exported(text)["input_ids"]) < len(text)
    monkeypatch.setattr(PackedCorpus, "fingerprint", "of other data, by another tokenizer")
    assert chosen().tokenizer is None
