"""Studies whose runs an engine trains: what a plan refuses, what the ledger gets, and that no kill changes a number."""

import json
import lzma
import math
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from tests.support.drivers import Executed
from tests.support.folders import ROOT

from deltalab.engines.deltalab_train import launcher
from deltalab.errors import InputError
from deltalab.export.papers import find_recipe, recipe_names
from deltalab.export.recipe import by_a_paper, make_recipe, named_settings
from deltalab.export.scales import SCALES
from deltalab.export.write import export
from deltalab.models.costs import CostCounter
from deltalab.models.model import Model
from deltalab.models.spec import ModelSpec
from deltalab.registry import get_task
from deltalab.store import Store
from deltalab.study.forecast.arm_times import StepTimes
from deltalab.study.forecast.engine_costs import BESIDE_STEPS
from deltalab.study.forecast.estimate import estimate
from deltalab.study.forecast.evaluation_time import SECONDS_A_LAYER
from deltalab.study.planning.engine_recipe import GIVEN
from deltalab.study.planning.known_trials import known_trials
from deltalab.study.planning.make import plan_study
from deltalab.study.reports.report import open_report
from deltalab.study.running.run import run_study_file
from deltalab.study.winners.best_run import best_run
from deltalab.tasks.text import Text
from deltalab.training.spec import TrainSpec

LENGTH = 16
STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"text": {"length": LENGTH, "times": [2]}},
    "base": {
        "rule": "gated_deltanet",
        "model": {"d_model": 16, "layers": 1, "heads": 2},
        "train": {"steps": 40, "batch_size": 8, "lr": 0.02, "evaluations": 4, "eval_batches": 2},
    },
    "arms": {"comba": {"rule": "comba"}},
    "compare": {"text": ["recall_bits_per_byte"]},
    "seeds": 2,
    "engine": {"name": "torchtitan", "processes": 2, "settings": {"log.every": 1, "checkpoint.every": 8}},
}
OF_RECIPE: dict[str, Any] = {
    "engine": {"name": "accelerate", "recipe": "rla", "settings": {"log.every": 1}},
    "base": {**STUDY["base"], "train": {"steps": 20, "batch_size": 8, "evaluations": 2, "eval_batches": 2}},
}
"""Changes that train by the recipe of a paper that states each value, the start of the matrices too."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packed bytes."""
    lab = tmp_path_factory.mktemp("lab")
    (lab / "text.txt").write_text("".join(f"line {n}: {'abcdefghij'[n % 10] * (n % 7 + 3)}\n\n" for n in range(3000)))
    command = ["data", "pack", "text.txt", "--out", "packed", "--separator", "\n\n"]
    shares = ["--split", "train=0.8,validation=0.1,test=0.1"]
    subprocess.run([sys.executable, "-m", "deltalab", *command, *shares], cwd=lab, check=True, capture_output=True)
    return lab / "packed"


def study(packed: Path, **changes: Any) -> dict[str, Any]:
    merged = {**STUDY, **changes}
    tasks = {name: {"corpus": str(packed), **params} for name, params in merged["task"].items()}
    return {**merged, "task": tasks}


# ----------------------------------------------------------------------------------------------------------------------
# What a plan refuses


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "titan"}, "engine.name"),
        ({"engine": {"name": "torchtitan", "settings": {"compiled": True}}}, "did you mean 'compile'"),
        (
            {"engine": {"name": "torchtitan", "settings": {"parallelism.tensor_parallel_degree": 2}}},
            "no engine takes 'parallelism.tensor_parallel_degree': GPUs share a model by FSDP2",
        ),
        ({"engine": {"name": "torchtitan", "settings": {"optimizer.lr": 1.0}}}, "unknown setting 'optimizer.lr'"),
        (
            {"engine": {"name": "torchtitan", "settings": {"validation.sequences": 0}}},
            "unknown setting 'validation.seq",
        ),
        (
            {"engine": {"name": "torchtitan", "settings": {"graphs": True}}},
            "engine.settings.graphs: only a training on one GPU replays CUDA graphs, and this one has 0: leave it out",
        ),
        (
            {
                "engine": {"name": "accelerate", "settings": {"graphs": True, "batch.documents": "reset"}},
                "resources": {"gpu": 1},
            },
            "engine.settings.graphs: there are no CUDA graphs with batch.documents: reset",
        ),
        (
            {
                "engine": {"name": "torchtitan", "settings": {"graphs": True}},
                "resources": {"gpu": 1},
                "arms": {"mine": {"model": {"attention_residuals": 1}}},
            },
            "arms.mine: engine.settings.graphs: there are no CUDA graphs with model.attention_residuals: leave it out",
        ),
        (
            {"engine": {"name": "torchtitan", "processes": 3, "settings": {"context_parallel": 2}}},
            "base: engine.settings.context_parallel 2 must divide the number of processes, 3",
        ),
        (
            {"engine": {"name": "torchtitan", "processes": 3, "settings": {"context_parallel": 3}}},
            "base: engine.settings.context_parallel 3 must divide the task's length 16",
        ),
        (
            {"engine": {"name": "accelerate", "processes": 2, "settings": {"context_parallel": 2}}},
            "base: engine.settings.context_parallel 2: accelerate gives each process whole sequences",
        ),
        (
            {
                "engine": {"name": "torchtitan", "processes": 2, "settings": {"context_parallel": 2}},
                "arms": {"mine": {"model": {"mixer": {"module": "torch.nn.Identity"}}}},
            },
            "arms.mine: engine.settings.context_parallel 2: layer 0 is the module 'torch.nn.Identity', which keeps no",
        ),
        ({"engine": {"name": "torchtitan", "settings": {"compile": 3}}}, "compile: must be true or false, not 3"),
        ({"engine": {"name": "torchtitan", "processes": 3}}, "base: train.batch_size 8 must be a multiple of the 3"),
        ({"task": {"text": {"length": LENGTH, "corpus": None}}}, "task.text.corpus must be a folder that `deltalab"),
        (
            {"task": {"text": {"length": LENGTH, "corpus": "nowhere"}}},
            "study: task.text.corpus: nowhere: no such folder, and torchtitan trains on packed data: `deltalab data "
            "pack TEXT --out nowhere` makes it",
        ),
        ({"task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32, "corpus": None}}}, "mqar"),
        (
            {"arms": {"comba": {"rule": "comba", "train": {"seconds": 9}}}},
            "arms.comba sets train.seconds, and all arms train for as many: give it in base",
        ),
        (
            {"base": {**STUDY["base"], "train": {"batch_size": 8, "lr": 0.02, "seconds": 9, "flops": 1e9}}},
            "base sets train.seconds beside train.flops: leave one out",
        ),
        ({"resources": {"gpu": 0.5}}, "resources.gpu must be a whole number with an engine, not 0.5"),
        ({"resources": {"gpu": 1}}, "engine.processes is for CPUs"),
        ({"resources": {"gpu": 2}, "engine": None}, "resources.gpu must be at most 1 without an engine, not 2"),
        (
            {"engine": {"name": "accelerate", "evaluate": ["needel"]}},
            "engine.evaluate: unknown task 'needel'; did you mean",
        ),
        ({"engine": {"name": "accelerate", "evaluate": ["needle"]}}, "do not fit into 64 tokens"),
        ({"engine": {"name": "accelerate", "evaluate": ["ruler/vtt"]}}, "did you mean 'vt'"),
        ({"engine": {"name": "accelerate", "evaluate": ["lm"], "lengths": [64]}}, "suite 'lm' has no lengths"),
        ({"engine": {"name": "accelerate", "evaluate": ["recall"], "files": "nowhere"}}, "engine.files: nowhere: no"),
        (
            {"engine": {"name": "accelerate", "evaluate": ["recall/fda"], "files": "."}},
            "study: engine.files .: holds no folder hazyresearch/based-fda: `hf download --repo-type dataset hazyres",
        ),
        (
            {"engine": {"name": "accelerate", "evaluate": ["recall/fda"], "lengths": [50]}},
            "study: engine.lengths: 50 tokens are too few for recall",
        ),
        ({"engine": {"name": "accelerate", "evaluate_every": 4}}, "evaluate_every is of the tasks that evaluate names"),
        (
            {"engine": {"name": "accelerate", "evaluate": ["loss"], "evaluate_every": 40}},
            "base: engine.evaluate_every 40 must be below train.steps 40",
        ),
        (
            {"engine": {**STUDY["engine"], "evaluate": ["loss"], "evaluate_every": 12}},
            "engine: evaluate_every 12 must be a multiple of settings.checkpoint.every 8",
        ),
        (
            {"engine": {"name": "torchtitan", "evaluate": ["loss"], "settings": {"milestones": 4}}},
            "unknown setting 'milestones'",
        ),
        ({"engine": {"name": "accelerate", "limit": 4}}, "limit is of the tasks that evaluate names"),
        ({"engine": {"name": "accelerate", "evaluate": ["proxy"]}}, "engine.evaluate: proxy asks"),
        ({"engine": {"name": "accelerate", "recipe": "combo"}}, "unknown recipe 'combo'; did you mean 'comba'?"),
        (
            {"engine": {"name": "accelerate", "recipe": "comba"}},
            "base sets train.lr, and so does engine.recipe comba: leave it out",
        ),
        (
            {**OF_RECIPE, "for_task": {"text": {"train": {"clip": 2.0}}}},
            "for_task.text sets train.clip, and so does engine.recipe rla",
        ),
        (
            {**OF_RECIPE, "base": {**OF_RECIPE["base"], "model": {"d_model": 16, "init_std": 0.1}}},
            "base sets model.init_std, and so does engine.recipe rla",
        ),
        ({"compare": {"text": ["recal_bits_per_byte"]}}, "did you mean 'recall_bits_per_byte'"),
        ({"compare": {"text": ["bits_per_byte"]}}, "compare.text: bits_per_byte is the task's own metric"),
        ({"engine": {"name": "torchtitan", "proceses": 2}}, "engine: unknown key 'proceses'; did you mean 'processes'"),
        ({"compare": {"txt": ["loss"]}}, "compare: unknown task 'txt'; did you mean 'text'"),
        ({"compare": {"text": ["needle exact_match@16"]}}, "compare.text: unknown metric 'needle exact_match@16'"),
        (
            {"engine": {"name": "accelerate", "evaluate": ["recall"]}, "compare": {"text": ["recall WRONG"]}},
            "compare.text: unknown metric 'recall WRONG'; allowed: recall mean@1000",
        ),
        (
            {
                "engine": {"name": "accelerate", "evaluate": ["recall"]},
                "compare": {"text": ["recall/fda contains@100"]},
            },
            "unknown metric 'recall/fda contains@100'; did you mean 'recall/fda contains@1000'? allowed: recall",
        ),
        (
            {"engine": {"name": "accelerate", "evaluate": ["loss"]}, "compare": {"text": ["loss loss@8"]}},
            "unknown metric 'loss loss@8'; did you mean 'loss loss@64'? allowed: loss loss@16, loss bits_per_byte@16, ",
        ),
        (
            {"engine": {"name": "accelerate", "evaluate": ["zero_shot"]}, "compare": {"text": ["hellaswag acc"]}},
            "unknown metric 'hellaswag acc'; did you mean 'hellaswag acc_norm'? allowed: hellaswag acc_norm",
        ),
        (
            {"engine": {"name": "accelerate", "evaluate": ["arc_easy"]}, "compare": {"text": ["arc_easy"]}},
            "unknown metric 'arc_easy'; did you mean 'arc_easy METRIC'? allowed: ",
        ),
        (
            {"engine": {"name": "accelerate", "evaluate": ["ruler"]}, "compare": {"text": ["ruler mean@2048"]}},
            "unknown metric 'ruler mean@2048'; did you mean 'ruler mean_of_11@2048'? allowed: ruler mean_of_",
        ),
        (
            {"engine": {"name": "accelerate", "evaluate": ["ruler/vt"], "lengths": [64]}},
            "study: engine.evaluate: ruler/vt@64: its shortest text does not fit into 64 tokens, but into",
        ),
        ({"margin": {"recall_bits": 0.1}}, "margin: unknown metric 'recall_bits'; did you mean 'recall_bits_per_byte'"),
    ],
)
def test_a_plan_refuses_what_an_engine_cannot_train(packed: Path, changes: dict[str, Any], message: str) -> None:
    wrong = study(packed, **changes)
    for params in wrong["task"].values():
        if params["corpus"] is None:
            del params["corpus"]
    with pytest.raises(InputError) as error:
        plan_study(wrong)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_plan_takes_what_evaluations_measure(packed: Path) -> None:
    """Of a task of the harness that no suite has, any metric is taken: only a run tells its metrics and bounds."""
    section = {"name": "accelerate", "evaluate": ["zero_shot", "lm", "ruler/vt", "arc_easy", "wmt16-en-ro"]}
    metrics = {
        "zero_shot mean": (True, (0.0, 1.0), 0.0),
        "wikitext word_perplexity": (False, None, 0.0),
        "loss loss_at_0_to_4": (False, None, 0.0),
        "ruler/vt match@2048": (True, (0.0, 1.0), 0.0),
        "arc_easy exact_match (strict-match)": (True, (0.0, 1.0), 0.01),
        "wmt16-en-ro bleu": (True, None, 0.0),
        "wmt16-en-ro ter": (False, None, 0.0),
    }
    plan = plan_study(study(packed, engine=section, compare={"text": [*metrics]}))
    assert {of["metric"]: (of["maximize"], of["bounds"], of["margin"]) for of in plan.further} == metrics


def test_an_engine_is_part_of_a_trial_and_its_free_settings_are_not(packed: Path) -> None:
    def keys(**changes: Any) -> list[str]:
        plan = plan_study(study(packed, **changes))
        return [plan.job(arm, "confirm", 0, {}).key for arm in plan.arms]

    with_engine = keys()
    assert with_engine != keys(engine=None)
    assert with_engine != keys(engine="accelerate")
    assert with_engine == keys(engine="torchtitan")
    assert with_engine == keys(engine={"name": "torchtitan", "settings": {"compile": True}})
    assert with_engine != keys(engine={"name": "torchtitan", "settings": {"batch.documents": "reset"}})
    with_loss = keys(engine={"name": "torchtitan", "evaluate": ["loss"]})
    assert with_engine != with_loss
    assert with_loss != keys(engine={"name": "torchtitan", "evaluate": ["loss"], "evaluate_every": 8})


def named_by_paper(name: str, train: TrainSpec, parameters: float) -> dict[str, Any]:
    """The settings of the recipe that `deltalab export --recipe` writes."""
    return named_settings(by_a_paper(make_recipe(train, LENGTH, 1, "a test"), find_recipe(name), parameters))


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_gives_a_study_what_it_gives_an_export(packed: Path, name: str) -> None:
    train = {"evaluations": 2}
    base = {**STUDY["base"], "train": train}
    arms = {"comba": {"rule": "comba"}, "other": {"rule": "comba", "train": {"lr": 0.5, "final": 0.25}}}
    section = {"name": "torchtitan", "recipe": name, "settings": {"batch.micro": 8}}
    plan = plan_study(study(packed, engine=section, base=base, arms=arms))
    jobs = {arm.name: plan.job(arm, "confirm", 0, {}) for arm in plan.arms}
    for arm in ("base", "comba"):
        model, spec = jobs[arm].specs
        ours = named_settings(make_recipe(spec, LENGTH, 1, "a test"))
        paper = named_by_paper(name, spec, 1e4)
        assert paper.pop("batch.length") == SCALES[find_recipe(name).nearest(1e4)].length
        # A study has sequences of its task's length, as many tokens a step as the paper, and its own seeds.
        assert ours.pop("batch.length") == LENGTH
        assert ours.pop("batch.sequences") * LENGTH == paper.pop("batch.sequences") * 2048 * (1 + (name == "gka"))
        assert ours.pop("seed") == 1
        del paper["seed"]
        assert ours == {key: value for key, value in paper.items() if key != "z_loss"}
        std = find_recipe(name).init_std
        assert model.init_std == (None if std is None else std.value)
    lr = jobs["base"].config["train"]["lr"]
    assert jobs["other"].config["train"] == {**jobs["base"].config["train"], "lr": 0.5, "final": 0.25}
    (note,) = [note for note in estimate(plan, workers=1).notes if note.startswith("engine.recipe")]
    assert f"{name} at {find_recipe(name).nearest(1e4)}" in note
    assert f"lr={lr:.3g}" in note
    assert "vocabulary 256 (paper: " in note


def test_a_recipe_leaves_a_study_its_own_batch_steps_and_operations(packed: Path) -> None:
    def trains(**train: Any) -> dict[str, Any]:
        base = {**OF_RECIPE["base"], "train": {"evaluations": 2, **train}}
        return plan_study(study(packed, **{**OF_RECIPE, "base": base})).arms[0].config["train"]  # type: ignore[no-any-return]

    assert [trains(steps=20, batch_size=8)[key] for key in ("steps", "batch_size")] == [20, 8]
    assert trains(batch_size=8)["steps"] == round(100e9 / 2**22)
    assert 20 < trains(batch_size=8, flops=1e9)["steps"] < 10_000
    by_hand = {key: value for key, value in trains(steps=20, batch_size=8).items() if key in GIVEN}
    base = {**OF_RECIPE["base"], "train": {**OF_RECIPE["base"]["train"], **by_hand}}
    base["model"] = {**base["model"], "init_std": 0.006}
    keys = [
        [plan.job(arm, "confirm", 0, {}).key for arm in plan.arms]
        for changes in (OF_RECIPE, {"base": base, "engine": "accelerate"})
        for plan in [plan_study(study(packed, **changes))]
    ]
    assert keys[0] == keys[1], "the values are the trial, and not the recipe's name"


def test_a_recipe_sizes_by_the_base_and_has_one_rate_on_a_ladder(packed: Path) -> None:
    def steps(d_model: int, **changes: Any) -> set[tuple[float, int]]:
        model = {"d_model": d_model, "layers": 24, "heads": 8, "key_dim": 128}
        train = {"batch_size": 32, "evaluations": 1}
        base = {"rule": "gated_deltanet", "model": model, "train": train}
        section = {"name": "torchtitan", "recipe": "comba"}
        plan = plan_study(study(packed, base=base, arms={}, engine=section, **changes))
        return {(arm.config["train"]["lr"], arm.config["train"]["steps"]) for arm in plan.arms}

    small, large = {(3e-4, round(15e9 / 2**19))}, {(3e-4, round(100e9 / 2**20))}
    assert steps(1024) == small
    assert steps(2048) == large
    assert steps(1024, scales={"model.d_model": [1024, 2048], "transfer": "mup"}) == small


@pytest.mark.parametrize(("profile", "parameters"), [("60M", 41_200_000), ("125M", 93_000_000)])
def test_the_shipped_study_trains_on_packed_data(packed: Path, profile: str, parameters: int) -> None:
    plan = plan_study("pretrain", profile=profile, overrides={"task.text.corpus": str(packed)})
    models = [plan.job(arm, "confirm", 0, {}).specs[0] for arm in plan.arms]
    sizes = [CostCounter().costs(model, 1024).parameters for model in models]
    assert [size / parameters for size in sizes] == pytest.approx([1.0] * 4, abs=0.03), "without 16,128 more tokens"
    assert {of["metric"] for of in plan.further} == {"recall_bits_per_byte", "needle_text v2 exact_match@1024"}


def test_the_shipped_study_sweeps_the_rates_of_all_arms(packed: Path) -> None:
    plan = plan_study("pretrain", profile="rates", overrides={"task.text.corpus": str(packed)})
    at_60m = plan_study("pretrain", profile="60M", overrides={"task.text.corpus": str(packed)})
    assert [arm.config for arm in plan.arms] == [arm.config for arm in at_60m.arms], "the middle rate is that of 60M"
    assert plan.spec.tune is not None
    assert (plan.runs, plan.spec.tune.searched["train.lr"].choice) == (4 * 3 * 2, (1e-3, 2e-3, 4e-3))


def test_each_seed_is_a_trial_of_its_own_that_more_seeds_keep(packed: Path) -> None:
    def keys(seeds: Any) -> list[str]:
        plan = plan_study(study(packed, seeds=seeds))
        parts = plan.spec.trained_in_parts(is_base=False)
        jobs = [plan.job(plan.arms[0], "confirm", 0, {}, part) for part in range(len(parts))]
        assert [job.seeds for job in jobs] == [(seed,) for seed in range(1, parts[-1] + 1)]
        return [job.key for job in jobs]

    six, looks = keys(6), keys({"at_least": 6, "at_most": 9})
    assert len(set(looks)) == 9
    assert looks[:6] == six
    identities = {plan_study(study(packed, seeds=seeds)).identity for seeds in (6, 7, {"at_least": 6, "at_most": 7})}
    assert len(identities) == 3


def test_a_plan_says_what_an_engine_takes(packed: Path) -> None:
    forecast = estimate(plan_study(study(packed)), workers=1)
    assert forecast.seconds is not None
    assert forecast.seconds > 4 * BESIDE_STEPS["cpu"], "each of 4 runs starts an engine"
    notes = [note for note in forecast.notes if note.startswith("engine: ")]
    tokens = 4 * 40 * 8 * LENGTH
    assert len(notes) == 1
    assert f"trains 4 runs one by one on 2 processes each: {tokens:,} tokens" in notes[0]


def test_a_plan_counts_the_evaluations_of_trained_models(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is read in a third of the time of training on it, and each is written in the time of a layer."""
    times = StepTimes([0.6, 0.6], "here", "how")
    monkeypatch.setattr("deltalab.study.forecast.estimate.step_times", lambda *given: times)

    def planned(**engine: Any) -> tuple[float, list[str]]:
        section = {**STUDY["engine"], **engine}
        # A question about a needle fits into 256 tokens.
        task = {"text": {"length": 256}}
        forecast = estimate(plan_study(study(packed, engine=section, task=task, compare={})), workers=1)
        assert forecast.seconds is not None
        return forecast.seconds, [note for note in forecast.notes if note.startswith("engine.evaluate: ")]

    without, none = planned()
    assert none == []
    of_token = 0.6 / (3 * 8 * 256)
    rows = [4 * 256, 2 * 512, 1 * 1024]
    with_loss, notes = planned(evaluate=["loss"], limit=4)
    assert with_loss - without == pytest.approx(4 * sum(rows) * of_token)
    assert notes == ["engine.evaluate: 4 evaluations in all, each of loss, in the time."]
    more, notes = planned(evaluate=["lm"], limit=4, evaluate_every=16)  # after steps 16, 32 and 40
    assert more - without == pytest.approx(3 * (with_loss - without))
    assert notes == ["engine.evaluate: 12 evaluations in all, each of loss, in the time."]
    with_ruler, notes = planned(evaluate=["ruler/vt", "recall/fda"], lengths=[2048], limit=10)
    written = 4 * 10 * 30 * SECONDS_A_LAYER + 4 * 10 * 48 * SECONDS_A_LAYER  # one text after the other on a CPU
    assert with_ruler - without == pytest.approx(4 * 2 * 10 * 2048 * of_token + written)
    assert notes == ["engine.evaluate: 4 evaluations in all, each of ruler/vt, recall/fda, in the time."]
    with_others, notes = planned(evaluate=["lm", "recall/fda", "longbench/longbench_qasper"])
    assert with_others > without
    assert notes == [
        "engine.evaluate: 4 evaluations in all, each of loss, in the time; and of recall/fda, "
        "longbench/longbench_qasper, not in the time, since only their data tell how many examples they have."
    ]
    with_needle, _ = planned(evaluate=["needle"], limit=20)
    assert planned(evaluate=["needle", "needle"], limit=20)[0] == with_needle, "which asks once"
    sizes = (256, 512, 1024)
    question = 16  # a byte a token: twice a space and seven digits
    read = 20 * sum(size - question for size in sizes)
    batches = sum(-(-20 // (2**14 // size)) for size in sizes)
    assert with_needle - without == pytest.approx(4 * (read * of_token + batches * question * SECONDS_A_LAYER))


@pytest.mark.parametrize("profile", ["60M", "125M"])
def test_a_plan_counts_a_needle_once(packed: Path, tmp_path: Path, profile: str) -> None:
    """Of recorded runs, the time beside the steps is that of the needles, as a plan counts them, and `BESIDE_STEPS`."""
    file = tmp_path / "pretrain.db"
    file.write_bytes(lzma.decompress((ROOT / "benchmarks/ledgers/pretrain_h200.db.xz").read_bytes()))
    # Of the other arms of 125M, some runs went on from a checkpoint, and their seconds are those since then.
    arms = "1 = 1" if profile == "60M" else "json_extract(config, '$.rule.name') IN ('gated_deltanet', 'comba')"
    width = {"60M": 512, "125M": 768}[profile]
    with closing(sqlite3.connect(file)) as ledger:
        query = (
            f"SELECT seconds, tokens_per_second FROM trial WHERE json_extract(config, '$.model.d_model') = ? AND {arms}"
        )
        whole = ledger.execute(query, (width,)).fetchall()
    tokens = 500 * 64 * 1024
    recorded = statistics.mean(seconds - tokens / speed for seconds, speed in whole)

    def planned(**changes: Any) -> float:
        overrides = {"task.text.corpus": str(packed), **changes}
        plan = plan_study("pretrain", profile=profile, overrides=overrides)
        forecast = estimate(plan, workers=1)
        assert forecast.seconds is not None
        return forecast.seconds / plan.runs

    needles = planned() - planned(**{"engine.evaluate": [], "compare.text": ["recall_bits_per_byte"]})
    assert 5 < needles < 10
    assert recorded == pytest.approx(needles + BESIDE_STEPS["gpu"], rel=0.15)


# ----------------------------------------------------------------------------------------------------------------------
# What the ledger gets


def finals(store: Store, split: str, metric: str) -> dict[tuple[str, int], float]:
    rows = store.final_metrics(1, metrics={(split, metric)})
    return {(row.trial, row.seed): row.value for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torchtitan", "accelerate"])
def test_the_engine_trains_and_the_trial_is_measured_as_ever(packed: Path, tmp_path: Path, engine: str) -> None:
    db, file = tmp_path / "lab.db", tmp_path / "s.yaml"
    both = engine == "torchtitan"
    settings = {**STUDY["engine"]["settings"], "context_parallel": 1 + both}
    section = {"name": engine, "processes": 1 + both, "settings": settings, "evaluate": ["loss"], "evaluate_every": 16}
    changes = {"engine": section, "seeds": 1} if both else {"engine": section, "arms": {}}
    file.write_text(yaml.safe_dump(study(packed, **changes)))
    given: dict[str, Any] = {"db": db, "executor": "inline", "unchecked": True}
    first = run_study_file(file, **given)
    assert (first.state, first.trials, first.known) == ("done", 2, 0)
    again = run_study_file(file, **given)
    assert (again.state, again.known) == ("done", 2)
    with Store.open(db) as store:
        trial = next(row for row in store.trials(1) if row.arm == "base" and 1 in row.runs)
        assert trial.hardware["engine"].startswith(engine)
        assert trial.hardware["processes"] == str(1 + both)
        curve = [point.step for point in store.curves(1, "text", "bits_per_byte", "validation") if point.arm == "base"]
        assert sorted(set(curve)) == [10, 20, 30, 40]
        scores = finals(store, "test", "bits_per_byte")
        assert len(set(scores.values())) == 2, "seeds and arms differ"
        assert len(finals(store, "test", "loss loss@16")) == 2, "what the engine's section evaluates"
        between = store.curves(1, "text", "loss loss@16", "test")
        assert [point.step for point in between if point.arm == "base" and point.seed == 1] == [16, 32, 40]
        assert len({point.value for point in between}) == 6, "each is of other weights"
        artifact = next(a for _, run, a in store.artifacts(1, "base") if run.seed == 1)
        weights = torch.load(artifact.path, weights_only=True)
        model = Model(ModelSpec.of({**trial.config["model"], "rule": trial.config["rule"]}))
        model.load_state_dict(weights)
        task = get_task("text", **STUDY["task"]["text"] | {"corpus": str(packed)})
        assert isinstance(task, Text)
        assert scores[trial.key, 1] == pytest.approx(bits_per_byte(model, task), rel=1e-4)
        chosen = best_run(store, 1, arm="base", best=False, task=None).source
    assert not [*tmp_path.glob("runs/engines/*/seed_*/checkpoints/step-16")]
    later = {**given, "db": tmp_path / "later.db"}  # as after a kill between a measurement and its record
    assert run_study_file(file, **later).state == "done"
    with Store.open(tmp_path / "later.db") as store:
        again = store.curves(1, "text", "loss loss@16", "test")
    assert {(of.trial, of.seed, of.step, of.value) for of in again} == {
        (of.trial, of.seed, of.step, of.value) for of in between
    }
    export(chosen, tmp_path / "out")
    assert (tmp_path / "out/model.safetensors").is_file()
    assert (tmp_path / "out/tokenizer.json").is_file()
    tables = {table.task: table for table in open_report("s", db=db).tables}
    assert list(tables) == ["text", "text: recall_bits_per_byte"]
    assert tables["text: recall_bits_per_byte"].metric == "recall_bits_per_byte"
    assert tables["text"].rows[0].score.mean == pytest.approx(
        scores[trial.key, 1] if both else sum(scores.values()) / 2
    )


@pytest.mark.slow
def test_trained_models_are_compared_on_the_recall_suite_of_a_folder(packed: Path, tmp_path: Path) -> None:
    pair = {"key": "owner", "value": "Ann", "text": "The owner is Ann.\n\nowner:"}
    rows: dict[str, dict[str, Any]] = {"based-fda": pair, "based-swde-v2": pair}
    rows["based-squad"] = {"value": "the mill", "text": "It has the mill. In it stands"}
    cloze = {"context": "A man in a hat.", "question": "The man wears", "answers": ["a hat"]}
    rows |= dict.fromkeys(("based_triviaqa", "based_nq_512", "based_drop"), cloze)
    for name, row in rows.items():
        (tmp_path / "files/hazyresearch" / name).mkdir(parents=True)
        text = "".join(json.dumps({**row, "doc_id": str(i)}) + "\n" for i in range(9))
        (tmp_path / "files/hazyresearch" / name / "validation.jsonl").write_text(text)
    section = {"name": "accelerate", "evaluate": ["recall"], "lengths": [100], "limit": 8}
    section["files"] = str(tmp_path / "files")
    compare = {"text": ["recall mean@100", "recall/fda contains@100"]}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study(packed, engine=section, compare=compare, seeds=1)))
    outcome = run_study_file(tmp_path / "s.yaml", db=tmp_path / "lab.db", executor="inline", unchecked=True)
    assert outcome.state == "done"
    tables = {table.task: table for table in open_report("s", db=tmp_path / "lab.db").tables}
    assert list(tables) == ["text", "text: recall mean@100", "text: recall/fda contains@100"]
    for table in list(tables.values())[1:]:
        assert table.maximize
        assert [(row.arm, row.score.n) for row in table.rows] == [("base", 1), ("comba", 1)]


def bits_per_byte(model: Model, task: Text) -> float:
    """The test score by its definition, without the trainer: 2 batches of 8."""
    nats = count = 0.0
    for step in range(2):
        batch = task.batch("test", 8, 0, step)
        with torch.no_grad():
            logits = model(batch.inputs)
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum").item()
        count += batch.targets.numel()
    return nats / count / math.log(2) / task.bytes_per_token


@pytest.mark.slow
def test_the_engine_trains_by_the_recipe_of_a_paper_for_as_many_operations(packed: Path, tmp_path: Path) -> None:
    db, file = tmp_path / "lab.db", tmp_path / "s.yaml"
    train = {"flops": 1.7e8, "batch_size": 8, "evaluations": 2, "eval_batches": 2}
    changes = {**OF_RECIPE, "base": {**STUDY["base"], "train": train}, "arms": {}, "seeds": 1, "compare": {}}
    file.write_text(yaml.safe_dump(study(packed, **changes)))
    steps = plan_study(file).arms[0].config["train"]["steps"]
    assert steps % 2, "the last step is none of those after which validation is due"
    assert run_study_file(file, db=db, executor="inline", unchecked=True).state == "done"
    (written,) = tmp_path.glob("runs/engines/*/model/recipe.yaml")
    recipe = yaml.safe_load(written.read_text())
    (ran,) = tmp_path.glob("runs/engines/*/seed_1/run.json")
    trained = json.loads(ran.read_text())["recipe"]
    for found in (recipe, trained):
        assert found["optimizer"] == {
            "name": "adamw",
            "lr": 3e-4,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.1,
        }
        assert [found["schedule"][key] for key in ("kind", "final")] == ["cosine", 0.1]
        assert (found["clip"], found["steps"], found["batch"]["sequences"]) == (1.0, steps, 8)
    assert recipe["origin"]["lr"] == {"from": "arm base on text, by recipe rla"}
    model = json.loads((written.parent / "config.json").read_text())
    assert model["init_std"] == 0.006
    with Store.open(db) as store:
        assert max(point.step for point in store.curves(1, "text", "loss", "train")) == steps
    notes = open_report("s", db=db).notes
    assert any(f"1.7e+08 on text, in {steps} steps" in note for note in notes)
    assert any("all arms have the learning rate of recipe rla, 0.0003. " in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "all arms have the learning rate of the file, 0.02. "),
        (
            {"arms": {"comba": {"rule": "comba", "train": {"lr": 0.01}}}},
            "other arms have the learning rate of the file, 0.02; comba has 0.01. ",
        ),
        (
            {"arms": {"comba": {"rule": "comba", "train": {"lr": 1e-3}}}, **OF_RECIPE},
            "other arms have the learning rate of recipe rla, 0.0003; comba has 0.001. ",
        ),
        (
            {"tune": {"train.lr": {"choice": [0.01, 0.02, 0.04]}, "trials": 3}},
            "3 learning rates were swept at this size, 0.01 to 0.04. ",
        ),
        (
            {"tune": {"train.lr": {"choice": [0.01, 0.02]}, "trials": 2}, "scales": {"model.d_model": [8, 16]}},
            "2 learning rates were swept at each size, 0.01 to 0.02. ",
        ),
        (
            {"scales": {"model.d_model": [8, 16], "transfer": "mup"}},
            "all arms have the learning rate of the file, 0.02 at width 16, which mup scales. ",
        ),
        (
            {
                "arms": {},
                "ablate": [],
                "search": {
                    "train.lr": {"choice": [0.01, 0.02]},
                    "rule": {"choice": ["comba", "gla", "deltanet", "mamba2"]},
                    "trials": 8,
                },
            },
            "2 learning rates were swept at this size, 0.01 to 0.02. ",
        ),
    ],
    ids=["file", "own", "recipe", "tune", "tune at sizes", "mup", "search"],
)
def test_the_report_says_which_learning_rates_the_arms_had(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], said: str
) -> None:
    Executed(monkeypatch)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study(packed, **{"compare": {}, **changes})))
    run_study_file(tmp_path / "s.yaml", db=tmp_path / "lab.db", executor="inline", unchecked=True)
    (note,) = [note for note in open_report("s", db=tmp_path / "lab.db").notes if "was trained by" in note]
    assert note.partition("; ")[2].startswith(said)


def test_a_plan_says_in_what_an_engine_differs_from_the_recorded_one(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Executed(monkeypatch)
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(study(packed)))
    run_study_file(tmp_path / "s.yaml", db=tmp_path / "lab.db", executor="inline", unchecked=True)
    changed = {"evaluate": ["lm"], "evaluate_every": 8, "limit": 4}
    with Store.open(tmp_path / "lab.db") as store:
        assert known_trials(plan_study(study(packed)), store) == "The ledger knows 2 of the first 2 trials."
        said = known_trials(plan_study(study(packed, engine=STUDY["engine"] | changed)), store)
    assert said is not None
    assert said.endswith("2 differ in engine.evaluate and engine.evaluate_every and engine.limit.")


# ----------------------------------------------------------------------------------------------------------------------
# Kills


def test_a_process_ends_with_the_command_that_launched_it(tmp_path: Path) -> None:
    """Of a launcher that is killed by SIGKILL, which can tell nobody, the worker ends within seconds."""
    worker = (
        "import time; from deltalab.engines.deltalab_train.launcher import end_with_launcher; end_with_launcher(); "
        "print('watches', flush=True); time.sleep(60)"
    )
    code = (
        "import os, subprocess, sys; from deltalab.engines.deltalab_train import launcher as l\n"
        "os.environ[l.VARIABLE] = l.identity(os.getpid())\n"
        f"subprocess.run([sys.executable, '-c', {worker!r}])"
    )
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    assert command.stdout.readline() == "watches\n"
    (child,) = psutil.Process(command.pid).children()
    command.kill()
    command.wait()
    child.wait(timeout=20)


def test_a_process_that_nobody_launched_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(launcher.VARIABLE, raising=False)
    launcher.end_with_launcher()
    assert launcher.identity(os.getpid()) == launcher.identity(os.getpid())
    assert launcher.identity(2**22) is None


def command(file: Path, name: str) -> list[str]:
    options = ["--executor", "inline", "--unchecked", "--db", f"{name}.db", "--storage", str(file.parent / name)]
    return [sys.executable, "-m", "deltalab", "study", "run", str(file), *options]


def losses(db: Path) -> dict[tuple[str, str], float]:
    with Store.open(db) as store:
        rows = store.final_metrics(1, metrics={(split, "loss") for split in ("train", "validation", "test")})
        return {(row.trial, row.split): row.value for row in rows}


@pytest.fixture(scope="module")
def whole(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a study of one run, and the ledger of a driver that nothing killed."""
    lab = tmp_path_factory.mktemp("whole")
    (lab / "s.yaml").write_text(yaml.safe_dump(study(packed, arms={}, seeds=1, compare={})))
    subprocess.run(command(lab / "s.yaml", "whole"), cwd=lab, check=True, capture_output=True)
    assert len(losses(lab / "whole.db")) == 3
    return lab


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["driver", "torch.distributed.run", "rank"])
def test_no_kill_changes_a_loss(whole: Path, victim: str) -> None:
    killed = command(whole / "s.yaml", victim)
    driver = subprocess.Popen(killed, cwd=whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 120
    while not list((whole / victim).glob("engines/*/seed_1/checkpoints/step-8/.metadata")):
        assert time.monotonic() < until, "no checkpoint"
        assert driver.poll() is None, "it trained to its end before the kill"
        time.sleep(0.05)
    family = psutil.Process(driver.pid).children(recursive=True)
    named = [child.pid for child in family if victim in " ".join(child.cmdline())]
    ranks = [child.pid for child in family if "LOCAL_RANK" in child.environ()]
    os.kill({"driver": [driver.pid], "rank": ranks}.get(victim, named)[0], signal.SIGKILL)
    if victim == "driver":
        driver.wait()
        driver = subprocess.Popen(killed, cwd=whole, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert driver.wait(timeout=240) == 0
    assert losses(whole / f"{victim}.db") == losses(whole / "whole.db")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "moments"), [("torchtitan", ["training"]), ("accelerate", ["training", "evaluating"])]
)
def test_no_kill_changes_the_curve_of_evaluations(
    packed: Path, tmp_path: Path, engine: str, moments: list[str]
) -> None:
    """The kill comes between the first two milestones: of the training, or of their evaluations."""
    steps, apart, every = 400, 120, 20
    settings = {"log.every": 10, "checkpoint.every": every, "checkpoint.keep": 2}
    section = {"name": engine, "settings": settings, "evaluate": ["loss"], "evaluate_every": apart}
    train = {**STUDY["base"]["train"], "steps": steps}
    changed = study(packed, arms={}, seeds=1, compare={}, engine=section, base={**STUDY["base"], "train": train})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(changed))
    subprocess.run(command(tmp_path / "s.yaml", "whole"), cwd=tmp_path, check=True, capture_output=True)
    whole = evaluated(tmp_path / "whole.db")
    assert {step for _, step in whole} == {apart, 2 * apart, 3 * apart, steps}
    assert len(set(whole.values())) == len(whole), "each is of other weights"
    # The first milestone is no more among the newest checkpoints, or it has been measured.
    reached = {"training": f"checkpoints/step-{apart + 2 * every}", "evaluating": "evaluations.json"}
    for moment in moments:
        run, folder = command(tmp_path / "s.yaml", moment), tmp_path / moment
        kill_at(partial(folder.glob, f"engines/*/seed_1/{reached[moment]}"), run, tmp_path)
        left = {int(file.name[5:]) for file in folder.glob("engines/*/seed_1/checkpoints/step-*")}
        assert (2 * apart in left) == (moment == "evaluating"), left
        done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert evaluated(tmp_path / f"{moment}.db") == whole, moment


def kill_at(signs: Callable[[], Iterable[object]], run: list[str], folder: Path) -> None:
    """Starts a driver in a folder, kills it at the first sign, and waits for the end of all that it started."""
    driver = subprocess.Popen(run, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while not [*signs()]:
        assert time.monotonic() < until, "no sign"
        assert driver.poll() is None, "it ended before the kill"
        time.sleep(0.01)
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.kill()
    driver.wait()
    psutil.wait_procs(family, timeout=60)


def evaluated(db: Path) -> dict[tuple[str, int], float]:
    """What the section `engine` evaluated, by metric and step."""
    found = {}
    with Store.open(db) as store:
        for metric in (f"loss loss@{times * LENGTH}" for times in (1, 2, 4)):
            points = store.curves(1, "text", metric, "test")
            found |= {(metric, point.step): point.value for point in points}
    return found


SECONDS = 6.0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torchtitan", "accelerate"])
def test_time_ends_a_training_and_goes_on_after_a_kill(packed: Path, tmp_path: Path, engine: str) -> None:
    """All ranks end with one step, whose weights are measured; rates and seconds go on from the checkpoint."""
    train = {**STUDY["base"]["train"], "steps": 100_000, "seconds": SECONDS, "evaluations": 1000}
    section = {**STUDY["engine"], "name": engine, "settings": {"log.every": 1, "checkpoint.every": 10}}
    changed = study(packed, arms={}, seeds=1, compare={}, engine=section, base={**STUDY["base"], "train": train})
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(changed))
    run = command(tmp_path / "s.yaml", "runs")
    kill_at(lambda: (spent for spent in seconds_of(tmp_path).values() if spent >= SECONDS / 3), run, tmp_path)
    before = seconds_of(tmp_path)
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    after = seconds_of(tmp_path)
    last = max(after)
    assert min(after[step] for step in after if step > max(before)) > max(before.values()), "the time goes on"
    assert SECONDS <= after[last] < 2 * SECONDS
    with Store.open(tmp_path / "runs.db") as store:
        (validated,) = (row.step for row in store.final_metrics(1, metrics=[("validation", "loss")]))
        rates = [(point.step, point.value) for point in store.curves(1, "text", "lr", "train")]
        (steps,) = finals(store, "cost", "steps").values()
        assert finals(store, "test", "bits_per_byte")
    assert (validated, steps, max(rates)[0]) == (last, last, last)
    assert max(rates)[1] < 0.2 * max(rate for _, rate in rates), "the schedule ends where the time does"
    assert f"or for 100,000 steps if these ended before. Steps reached: base {last:,}." in " ".join(done.stdout.split())


def seconds_of(lab: Path) -> dict[int, float]:
    """The seconds of a study's only run at each of its checkpoints."""
    files = [*lab.glob("runs/engines/*/seed_1/metrics.jsonl")]
    lines = files[0].read_text().splitlines(keepends=True) if files else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["value"] for row in rows if row["name"] == "seconds"}
