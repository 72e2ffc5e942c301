"""A study: what its file may say, what it expands to, and in which order it runs and remembers."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.support.folders import STUDIES

from deltalab import registry
from deltalab.errors import InputError
from deltalab.reading import read_yaml
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.json_schema import schema
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.jobs import stack_from_json
from deltalab.tasks import BUILTIN

MQAR = {"length": 16, "pairs": 2, "vocab_size": 32}
STUDY: dict[str, Any] = {
    "name": "s",
    "task": {"mqar": MQAR},
    "base": {
        "rule": "comba",
        "model": {"d_model": 16, "layers": 1, "heads": 1},
        "train": {"steps": 6, "batch_size": 4, "lr": 0.01, "evaluations": 2},
    },
    "seeds": 2,
    "resources": {"stack": 1},
}
LR = {"log_uniform": [1e-3, 1e-1]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "s.yaml"


@pytest.fixture
def plan(file: Path) -> Callable[..., Plan]:
    def planned(profile: str | None = None, **given: Any) -> Plan:
        file.write_text(yaml.safe_dump({**STUDY, **given}, sort_keys=False))
        return make_plan(load_study(file, profile=profile), profile=profile, study_file="s.yaml")

    return planned


# What a study file may not say.

NEAREST = [
    ({"sedes": 3}, "unknown key 'sedes'; did you mean 'seeds'?"),
    ({"base": {**STUDY["base"], "modle": {}}}, "base: unknown key 'modle'; did you mean 'model'?"),
    ({"base": {**STUDY["base"], "rule": "combo"}}, "unknown rule 'combo'; did you mean 'comba'?"),
    ({"base": {**STUDY["base"], "rule": {"name": "comba", "dd": 0}}}, "did you mean 'd'?"),
    ({"arms": {"x": {"modle": {}}}}, "arms.x: unknown key 'modle'; did you mean 'model'?"),
    ({"arms": {"x": {"model": {"d_modl": 8}}}}, "arms.x: unknown model key 'd_modl'; did you mean 'd_model'?"),
    ({"arms": {"x": {"train": {"step": 8}}}}, "arms.x: unknown train key 'step'; did you mean 'steps'?"),
    ({"arms": {"x": {"rule": {"dd": 0}}}}, "arms.x: rule 'comba': unknown knob 'dd'; did you mean 'd'?"),
    ({"arms": {"x": {"rule": {"d": "heads"}}}}, "comba.d: unknown gate 'heads'; did you mean 'head'?"),
    ({"arms": {"x": {"rule": {"d": {"head": {"int": 1}}}}}}, "did you mean 'init'?"),
    ({"arms": {"x": {"rule": {"transition": "ipl"}}}}, "unknown option 'ipl'; did you mean 'iplr'?"),
    ({"for_task": {"mqra": {}}}, "for_task: unknown task 'mqra'; did you mean 'mqar'?"),
    ({"for_task": {"mqar": {"trian": {}}}}, "for_task.mqar: unknown key 'trian'; did you mean 'train'?"),
    ({"task": {"mqra": MQAR}}, "unknown task 'mqra'; did you mean 'mqar'?"),
    ({"task": {"mqar": {**MQAR, "vocab_siz": 8}}}, "unknown parameter 'vocab_siz'; did you mean 'vocab_size'?"),
    ({"task": {"x": {**MQAR, "task": "mqra"}}}, "unknown task 'mqra'; did you mean 'mqar'?"),
    ({"resources": {"cpus": 1}}, "resources: unknown key 'cpus'; did you mean 'cpu'?"),
    ({"ablate": ["bb"]}, "ablate: unknown part 'bb'; did you mean 'b'?"),
    ({"factorial": [["d", "convv"]]}, "factorial: unknown part 'convv'; did you mean 'conv'?"),
    ({"tune": {"trails": 3, "train.lr": LR}}, "tune: unknown key 'trails'; did you mean 'trials'?"),
    ({"tune": {"trials": 3, "train.lr": LR, "exend": True}}, "tune: unknown key 'exend'; did you mean 'extend'?"),
    ({"seeds": {"at_least": 6, "at_mots": 9}}, "seeds: unknown key 'at_mots'; did you mean 'at_most'?"),
    ({"seeds": {"atleast": 6}}, "seeds: unknown key 'atleast'; did you mean 'at_least'?"),
    ({"tune": {"trials": 3, "train.lr": {"log_uniforms": [1, 2]}}}, "tune.train.lr: unknown key 'log_uniforms'; did"),
    ({"tune": {"trials": 3, "train.lrr": LR}}, "unknown setting 'train.lrr'; did you mean 'train.lr'?"),
    ({"profiles": {"gpu": {"sedes": 3}}}, "profiles.gpu: unknown key 'sedes'; did you mean 'seeds'?"),
]

TYPES = [
    ({"seeds": True}, "seeds must be a whole number, not True"),
    ({"seeds": "3"}, "seeds must be a whole number, not '3'"),
    ({"seeds": 3.0}, "seeds must be a whole number"),
    ({"seeds": 0}, "seeds must be greater than or equal to 1"),
    ({"seeds": None}, "seeds must be a whole number"),
    ({"seeds": [6, 9]}, "seeds must be a whole number, not [6, 9]"),
    ({"seeds": {}}, "seeds.at_least is missing"),
    ({"seeds": {"after": 6}}, "seeds.at_most is missing"),
    ({"seeds": {"after": [6], "at_most": 9}}, "seeds.after must be a whole number, not [6]"),
    ({"seeds": {"after": 9, "at_most": 9}}, "seeds: at_most 9 must be more than the 9 seeds before"),
    ({"seeds": {"after": {"at_least": 6, "at_most": 9}, "at_most": 8}}, "at_most 8 must be more than the 9 seeds"),
    ({"seeds": {"at_least": 6}}, "seeds.at_most is missing"),
    ({"seeds": {"arms": 6, "bsae": 16}}, "seeds: unknown key 'bsae'; did you mean 'base'?"),
    ({"seeds": {"arms": 6}}, "seeds.base is missing"),
    ({"seeds": {"arms": 1, "base": 16}}, "seeds.arms must be greater than or equal to 6, not 1"),
    ({"seeds": {"arms": 6, "base": 6}}, "seeds: base 6 must be more than arms 6; as many for all: seeds: 6"),
    ({"seeds": {"arms": 6, "base": 1}}, "seeds: base 1 must be more than arms 6"),
    ({"seeds": {"arms": 6, "base": 16, "at_most": 20}}, "seeds: arms and base are tested once: leave out at_most"),
    ({"seeds": {"after": {"arms": 6, "base": 16}, "at_most": 20}}, "seeds: no further look can follow seeds for"),
    (
        {"seeds": {"arms": 6, "base": 16}, "scales": {"model.d_model": [16, 32]}},
        "scales: all sizes of an arm share their seeds: give seeds a number",
    ),
    ({"seeds": {"at_least": 6.0, "at_most": 9}}, "seeds.at_least must be a whole number"),
    ({"seeds": {"at_least": 1, "at_most": 9}}, "seeds.at_least must be greater than or equal to 2"),
    ({"seeds": {"at_least": 6, "at_most": 1001}}, "seeds.at_most must be less than or equal to 1000"),
    ({"seeds": {"at_least": 9, "at_most": 6}}, "seeds: at_most 6 must be more than at_least 9"),
    ({"seeds": {"at_least": 6, "at_most": 6}}, "seeds: at_most 6 must be more than at_least 6"),
    ({"family": "both"}, "family must be 'task' or 'study', not 'both'"),
    ({"margin": {"acuracy": 0.1}}, "margin: unknown metric 'acuracy'; did you mean 'accuracy'?"),
    ({"margin": {"accuracy": 1}}, "margin.accuracy must be below 1, the most that two scores differ"),
    ({"margin": {"accuracy": -0.1}}, "margin.accuracy must be greater than or equal to 0"),
    ({"margin": 0.1}, "margin must be a mapping"),
    ({"name": 3}, "name must be text, not 3"),
    ({"name": "S x"}, "name must match pattern"),
    ({"task": {}}, "task must not be empty"),
    ({"task": ["mqar"]}, "task must be a mapping"),
    ({"task": "mqar"}, "task 'mqar': needs length, pairs"),
    ({"task": {"mqar": 3}}, "task.mqar must be a mapping"),
    ({"task": {"mqar": {**MQAR, "length": "16"}}}, "parameter 'length' must be an integer, not '16'"),
    ({"task": {"x": {**MQAR, "task": ["mqar"]}}}, "task.x.task must be a task's name"),
    ({"base": "comba"}, "base must be a mapping, not 'comba'"),
    ({"base": {}}, "base.rule is missing"),
    ({"base": {**STUDY["base"], "rule": ["comba"]}}, "base.rule must be a rule's name or a mapping"),
    ({"base": {**STUDY["base"], "rule": {"d": 0}}}, "rule must be a name, or a mapping with a name"),
    ({"base": {**STUDY["base"], "model": []}}, "base.model must be a mapping"),
    ({"base": {**STUDY["base"], "train": {"steps": 1}}}, "train: needs batch_size"),
    ({"arms": ["x"]}, "arms must be a mapping"),
    ({"arms": {"x": None}}, "arms.x must be a mapping, not None"),
    ({"arms": {1: {"train": {"lr": 1}}}}, "key 1 must be text: write it in quotes"),
    ({"arms": {"[/x]": {"train": {"lr": 1}}}}, "arms.[/x] must match pattern"),
    ({"arms": {"": {"train": {"lr": 1}}}}, "must match pattern"),
    ({"task": {"a\nb": {**MQAR, "task": "mqar"}}}, "must match pattern"),
    ({"arms": {"x": {"train": {"steps": -1}}}}, "arms.x: train.steps must be a whole number of at least 1, not -1"),
    ({"arms": {"x": {"train": {"steps": True}}}}, "train.steps must be a whole number"),
    ({"arms": {"x": {"train": {"lr": "fast"}}}}, "train.lr must be a finite number"),
    ({"arms": {"x": {"train": {"betas": 3}}}}, "train.betas"),
    ({"arms": {"x": {"model": {"attention": 0}}}}, "model.attention"),
    ({"arms": {"x": {"model": {"vocab_size": 3}}}}, "model.vocab_size is set by task 'mqar'"),
    ({"arms": {"x": {"model": {"rule": "deltanet"}}}}, "model.rule stands one level up"),
    ({"arms": {"x": {"rule": {"d": [0]}}}}, "comba.d: takes one gate"),
    ({"arms": {"x": {"rule": {"d": {"head": {"init": "x"}}}}}}, "head.init takes a finite number"),
    ({"ablate": "d"}, "ablate must be a list"),
    ({"factorial": [["d"]]}, "factorial.0.1 is missing"),
    ({"resources": {"cpu": True}}, "resources.cpu must be a number, not True"),
    ({"resources": {"cpu": float("inf")}}, "inf is not a finite number"),
    ({"resources": {"gpu": -1}}, "resources.gpu must be greater than or equal to 0"),
    ({"resources": {"gpu": 2}}, "resources.gpu must be at most 1 without an engine"),
    ({"deadline": 0}, "deadline must be greater than 0"),
    ({"deadline": "1h"}, "deadline must be a number"),
    ({"retries": -1}, "retries must be greater than or equal to 0"),
    ({"retries": 1001}, "retries must be less than or equal to 1000"),
    ({"retries": "often"}, "retries must be a whole number, not 'often'"),
    ({"retry": 2}, "unknown key 'retry'; did you mean 'retries'?"),
    ({"profiles": ["gpu"]}, "profiles: must be a mapping"),
    ({"profiles": {"gpu": 3}}, "profiles: must be a mapping"),
]

TUNING = [
    ({}, "searches nothing"),
    ({"train.lr": 3}, "tune.train.lr must be a mapping"),
    ({"train.lr": {}}, "takes exactly one of"),
    ({"train.lr": {**LR, "uniform": [1, 2]}}, "takes exactly one of"),
    ({"train.lr": {"uniform": [2, 1]}}, "low < high"),
    ({"train.lr": {"uniform": ["low", 1]}}, "tune.train.lr.uniform.0 must be a number"),
    ({"train.lr": {"uniform": [0.1, float("inf")]}}, "inf is not a finite number"),
    ({"train.lr": {"uniform": [-5, 1]}}, "train.lr must be a finite number from 0 to 1e+38, not -5.0"),
    ({"train.lr": {"log_uniform": [0, 1]}}, "positive bounds"),
    ({"train.lr": {"choice": [0.1]}}, "at least two values, all different"),
    ({"train.lr": {"choice": [0.1, 0.2, 0.1]}}, "at least two values, all different"),
    ({"train.steps": {"integers": [1.0, 2]}}, "must be a whole number"),
    ({"train.steps": {"uniform": [6, 12]}}, "train.steps must be a whole number of at least 1, not 6.0"),
    ({"train.steps": {"choice": [10, -5]}}, "train.steps must be a whole number of at least 1, not -5"),
    ({"train.warmup": {"integers": [0, 5]}}, "train.warmup must be a finite number from 0 to 1, not 5"),
    ({"rule.g": {"choice": ["mamba2_decay", "nonsense"]}}, "unknown gate 'nonsense'"),
    ({"rule.name": {"choice": ["comba", "deltanet"]}}, "unknown setting 'rule.name'"),
    ({"rule.d.const.value": {"uniform": [0, 1]}}, "unknown setting 'rule.d.const.value'"),
    ({"model.vocab_size": {"choice": [32, 64]}}, "unknown setting 'model.vocab_size'"),
    ({"train.": LR}, "unknown setting 'train.'"),
    ({"trials": 3, "train.lr": {"choice": [0.1, 0.2]}}, "tune.trials 3: there are only 2 choices"),
    ({"trials": 3, "model.conv": {"integers": [3, 4]}}, "tune.trials 3: there are only 2 candidates to try"),
    ({"trials": 1, "train.lr": LR}, "tune: trials 1 leaves one candidate and nothing to choose: give at least 2"),
    ({"trials": 0, "train.lr": LR}, "tune.trials must be greater than or equal to 1, not 0"),
    ({"seeds": 2, "train.lr": LR}, "tune: leave out seeds: every seed of the study trains every candidate"),
    ({"extend": True, "train.lr": {"choice": [0.1, 0.2]}}, "extend moves a range, and every setting is searched by"),
    ({"extend": "yes", "train.lr": LR}, "tune.extend must be a valid boolean, not 'yes'"),
]

OF_A_TASK = [
    ({"train.lrr": LR}, "for_task.mqar.tune: unknown setting 'train.lrr'; did you mean 'train.lr'?"),
    ({"train.clip": {"uniform": [1, 2]}}, "for_task.mqar.tune: unknown setting 'train.clip'; allowed: train.lr"),
    ({"train.lr": {"log_uniforms": [1, 2]}}, "for_task.mqar.tune.train.lr: unknown key 'log_uniforms'; did you mean"),
    ({"train.lr": {"uniform": [2, 1]}}, "for_task.mqar.tune.train.lr: "),
    ({"train.lr": {"choice": [0.1, 0.2]}}, "for_task.mqar.tune: extend moves a range, and every setting is searched"),
    ({"train.lr": {**LR, "when": {"train.clip": 1}}}, "for_task.mqar.tune.train.lr: when goes with search"),
    ({"train.lr": {"uniform": [-5, 1]}}, "tune.train.lr: -5.0 makes no model on task 'mqar'"),
    ({"train.lr": 3}, "for_task.mqar.tune.train.lr must be a mapping, not 3"),
    ({"trials": 4}, "for_task.mqar.tune.trials is the same for all tasks and stands in tune"),
    (3, "for_task.mqar.tune must be a mapping, not 3"),
]

SEARCHING = [
    ({"train.lr": {"unform": [1, 2]}}, "search.train.lr: unknown key 'unform'; did you mean 'uniform'?"),
    ({"trails": 3, "train.lr": LR}, "search: unknown key 'trails'; did you mean 'trials'?"),
    ({"train.lr": LR, "finalists": 3}, "finalists 3 exceed trials 2"),
    ({"trials": 3, "model.conv": {"choice": [0, 4]}}, "search.trials 3: there are only 2 choices"),
    ({"rule": {"choice": ["comba", 3]}}, "rule must be a name, or a mapping with a name, not 3"),
    ({"rule": {"choice": ["comba", {"d": 0}]}}, "rule must be a name, or a mapping with a name"),
    ({"rule": {"choice": ["comba", "combo"]}}, "unknown rule 'combo'; did you mean 'comba'?"),
    ({"rule": {"choice": ["comba", None]}}, "rule must be a name, or a mapping with a name, not None"),
    ({"rule": {"uniform": [0, 1]}}, "rule must be a name, or a mapping with a name"),
    ({"rule": "comba"}, "search.rule must be a mapping"),
    ({"model": {"choice": [1, 2]}}, "search: unknown key 'model'"),
    (
        {"rule": {"choice": ["comba", "deltanet"]}, "rule.d": {"choice": [0, "head"]}},
        "s.yaml: search.rule.d cannot be searched beside search.rule: rule 'deltanet', one of its choices, has no 'd'. "
        "Give it in the choices that have it, {name: RULE, d: VALUE}, or add when: {rule: [RULE, ...]}",
    ),
    ({"train.lr": LR, "model.heads": {"choice": [3, 5]}}, "search: no combination makes a model on task 'mqar', such"),
    ({"train.lr": LR, "model.heads": {"choice": [2, 3]}}, "search.model.heads: 3 makes no model on task 'mqar': "),
    ({"model.d_model": {"integers": [16, 63]}, "model.heads": {"choice": [2, 4]}}, "search.model.d_model: 63 makes no"),
]

ARMS = [
    ({"arms": {"x": {}}}, "arm 'x' is the same as base"),
    ({"arms": {"x": {"train": {"lr": 0.01}}}}, "arm 'x' is the same as base"),
    ({"arms": {"x": {"train": {"clip": 1}}}}, "arm 'x' is the same as base"),
    ({"arms": {"x": {"model": {"expand_v": 1}}}}, "arm 'x' is the same as base"),
    ({"arms": {"x": {"rule": {"d": {"head": {"init": 0.02}}}}}}, "arm 'x' is the same as base"),
    ({"arms": {"x": {"rule": "comba"}}}, "arm 'x' is the same as base"),
    ({"ablate": ["d"], "arms": {"x": {"rule": {"d": 0}}}}, "arm 'x' is the same as 'without_d'"),
    ({"arms": {"x": {"rule": {"d": 0}}, "y": {"rule": {"d": {"const": 0.0}}}}}, "arm 'y' is the same as 'x'"),
    ({"arms": {"base": {"rule": {"d": 0}}}}, "arms.base: there is such an arm already"),
    ({"ablate": ["d"], "arms": {"without_d": {"rule": {"b": 1}}}}, "arms.without_d: there is such an arm already"),
    ({"ablate": ["d", "d"]}, "'d' is given twice"),
    ({"factorial": [["d", "d"]]}, "is the same as"),
    ({"base": {**STUDY["base"], "rule": "deltanet"}, "ablate": ["beta"]}, "'beta' has no option that takes it away"),
    ({"ablate": ["transition"]}, "'transition' has no option that takes it away"),
    ({"ablate": ["p"]}, "ablate: unknown part 'p'"),
    ({"base": {**STUDY["base"], "rule": {"name": "comba", "d": 0}}, "ablate": ["d"]}, "is the same as base"),
    ({"base": {**STUDY["base"], "rule": "deltanet"}, "ablate": ["d"]}, "ablate: unknown part 'd'"),
    ({"base": {**STUDY["base"], "model": {"d_model": 16, "conv": 0}}, "ablate": ["conv"]}, "is the same as base"),
    ({"base": {**STUDY["base"], "model": {"block": "mamba"}}, "ablate": ["mlp"]}, "is the same as base"),
    (
        {"arms": {"hot": {"train": {"lr": 1.0}}}, "tune": {"trials": 2, "train.lr": LR}},
        "arm 'hot' is the same as base on task 'mqar' once train.lr is tuned",
    ),
    ({"for_task": {"mqar": {"rule": {"d": 0}}}, "ablate": ["d"]}, "arm 'without_d' is the same as base"),
]

REFUSED = [
    *NEAREST,
    *TYPES,
    *[({"tune": {"trials": 2, **given}}, says) for given, says in TUNING],
    *[
        ({"tune": {"trials": 3, "extend": True, "train.lr": LR}, "for_task": {"mqar": {"tune": given}}}, says)
        for given, says in OF_A_TASK
    ],
    ({"for_task": {"mqar": {"tune": {"train.lr": LR}}}}, "for_task.mqar.tune has ranges of settings that the study"),
    ({"arms": {"x": {"tune": {"train.lr": LR}}}}, "arms: x.tune stands in for_task"),
    (
        {
            "tune": {"trials": 3, "train.lr": LR},
            "for_task": {"mqar": {"tune": {"train.lr": {"choice": [0.1, 0.2]}}}},
        },
        "tune.trials 3: there are only 2 choices to try on task 'mqar'",
    ),
    *[({"search": {"trials": 2, "finalists": 1, **given}}, says) for given, says in SEARCHING],
    *ARMS,
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda x: str(x)[:70])
def test_it_is_refused_in_one_line(plan: Callable[..., Plan], given: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as raised:
        plan(**given)
    message = str(raised.value)
    assert says in message
    assert "s.yaml" in message
    assert "\n" not in message


# Of every task, what cannot be met, and the rule that it breaks: training first, then what is evaluated.
UNMET: dict[str, list[tuple[dict[str, Any], str]]] = {
    "brevo": [({"nodes": 3}, "'nodes' must be at least 4, not 3")],
    "compositional_mqar": [({"length": 20, "side": 2}, "'length' must be at least 6 x side^2 = 24, not 20")],
    "depo": [({"nodes": 1}, "'nodes' must be")],
    "digits": [({"both_ways": 1}, "'both_ways' must be true or false, not 1")],
    "digit_patches": [({"train_images": 9}, "'train_images' must be from 10 to 1,197")],
    "forgetting_mqar": [({"pairs": 4, "updates": 5}, "'updates' must be between 1 and pairs = 4, not 5")],
    "lano": [({"levels": 0}, "'levels' must be")],
    "length_copy": [({"times": [0]}, "'times' must all be at least 1")],
    "mad_compression": [({"vocab_size": 2}, "'vocab_size' must be at least 3, not 2")],
    "mad_fuzzy_recall": [({"length": 17}, "'length' must be at least 18, not 17")],
    "mad_in_context_recall": [({"length": 33}, "'length' must be even and at least 4, not 33")],
    "mad_memorization": [({"vocab_size": 3}, "'vocab_size' must be at least 4, not 3")],
    "mad_noisy_recall": [({"noise_vocab": 29}, "'vocab_size' must be at least noise_vocab + 4 = 33, not 32")],
    "mad_selective_copy": [({"copies": 128}, "'length' must be at least 2 x copies + 2 = 258, not 256")],
    "mano": [({"operations": [0, 3]}, "'operations' must begin at 1 or above, not (0, 3)")],
    "mod_arithmetic": [
        ({"length_range": [40, 3]}, "'length_range' must not end before it begins, not (40, 3)"),
        ({"test_range": [4, 4]}, "'test_range' must hold an odd length, not (4, 4)"),
    ],
    "mqar": [
        ({"length": 16, "pairs": 5}, "'length' must be at least 4 x pairs = 20, not 16"),
        ({"length": 16, "pairs": 4, "vocab_size": 9}, "'vocab_size' must be at least 2 x (pairs + 1) = 10, not 9"),
        ({"length": 16, "pairs": 2, "tests": [[8, 3]]}, "must be at least 4 x pairs = 12, not 8, in 'tests'"),
        ({"length": 16, "pairs": 2, "mixture": [[8, 2, 1]]}, "[length, pairs] = [16, 2] in it, and nothing longer"),
    ],
    "niah": [
        ({"variant": 4}, "'variant' must be 1, 2 or 3, not 4"),
        ({"variant": 2, "times": [0]}, "'times' must all be at least 1, not (0,)"),
    ],
    "parity": [({"test_range": [50, 40]}, "'test_range' must not end before it begins, not (50, 40)")],
    "program_trace": [({"variables": 2}, "'variables' must be at least 3, not 2")],
    "ruler_needles": [({"times": []}, "'times' must name a multiple")],
    "ruler_variables": [({"chains": 0}, "'chains' must be")],
    "selectiv": [({"times": [0]}, "'times' must")],
    "image_folder": [
        ({}, "needs folder"),
        ({"folder": "no such folder"}, "cannot read"),
        ({"folder": "x", "side": 4}, "'side' must be from 8 to 512"),
    ],
    "shapes": [
        ({"side": 32, "patch": 5}, "'patch' must divide the 32 pixels of an image"),
        ({"side": 8}, "'side' must be from 16 to 256"),
    ],
    "text": [({"length": 0}, "'length' must be at least 1, not 0")],
    "word_problem": [
        ({"group": "S9"}, "S9"),
        ({"group": "S5", "test_lengths": [32, 1]}, "'test_lengths' must all be at least 2, not (32, 1)"),
    ],
}


@pytest.mark.parametrize(
    ("kind", "params", "rule"), [(kind, *broken) for kind, all_of in UNMET.items() for broken in all_of]
)
@pytest.mark.parametrize("label", [None, "under_another_name"])
def test_a_task_that_cannot_be_met_is_refused_with_the_rule_it_breaks(
    plan: Callable[..., Plan], kind: str, params: dict[str, Any], rule: str, label: str | None
) -> None:
    task = {kind: params} if label is None else {label: {"task": kind, **params}}
    with pytest.raises(InputError) as raised:
        plan(task={"mqar": MQAR, **task})
    said = str(raised.value)
    assert said.startswith(f"s.yaml: {'' if label is None else 'task.under_another_name: '}task '{kind}': ")
    assert rule in said
    assert "\n" not in said


def test_the_table_above_has_every_task() -> None:
    assert set(UNMET) == set(BUILTIN)


TEXTS = [
    ("", "a study is a mapping"),
    ("- a", "a study is a mapping"),
    ("name: [", "s.yaml, line 1: "),
    ("name: s\nseeds: 1\nname: t\n", "s.yaml, line 3: key 'name' is given twice"),
    ("base: {rule: comba, rule: deltanet}", "key 'rule' is given twice"),
    ("arms:\n  x: {}\n  y: {}\n  x: {}\n", "s.yaml, line 4: key 'x' is given twice"),
    ("? [a, b]\n: 3\n", "a key must be a word"),
    ("name: !!python/object:os.system {}", "line 1: takes no tag !!python/object:os.system"),
    ("\x00", "not YAML"),
]


@pytest.mark.parametrize(("text", "says"), TEXTS)
def test_text_that_is_no_study_is_refused_in_one_line(file: Path, text: str, says: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError) as raised:
        load_study(file)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quickstart.yaml").write_text("")
    with pytest.raises(InputError, match=r"no such study; did you mean .*quickstart\.yaml"):
        load_study(tmp_path / "quikstart.yaml")
    with pytest.raises(InputError, match="cannot be read: it is a folder"):
        load_study(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(InputError, match="cannot be read"):
        load_study(tmp_path / "latin.yaml")


def test_numbers_are_read_as_people_write_them() -> None:
    text = "{a: 1e-3, b: 5E+2, c: -1.5e3, d: .5e1, e: 1e-3x, f: 12}"
    assert read_yaml(text, where="") == {"a": 1e-3, "b": 500.0, "c": -1500.0, "d": 5.0, "e": "1e-3x", "f": 12}


def test_a_merge_key_is_no_duplicate() -> None:
    assert read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}", where="")["b"] == {"x": 1, "y": 3}


# Profiles.


def test_a_profile_merges_key_by_key_and_null_takes_away(plan: Callable[..., Plan]) -> None:
    found = plan(
        profile="gpu",
        task={"mqar": MQAR, "text": {"length": 16}},
        base={**STUDY["base"], "model": {**STUDY["base"]["model"], "attention": [0], "window": 4}},
        for_task={"text": {"train": {"steps": 9}}},
        arms={
            "a": {"rule": {"d": 0}, "train": {"lr": 0.02, "clip": 2}},
            "b": {"rule": {"b": 1}},
            "tune": {"model": {"conv": 0}},
        },
        tune={"trials": 2, "train.lr": LR},
        profiles={
            "gpu": {
                "task": {"mqar": {"length": 64}, "text": None},
                "base": {"rule": "gated_deltanet", "model": {"window": None}, "train": {"steps": 8}},
                "for_task": None,
                "ablate": ["g"],
                "arms": {"a": {"rule": None, "train": {"lr": 0.03}}, "b": None, "tune": {"train": {"clip": 3}}},
                "tune": {"train.lr": {"choice": [0.1, 0.2]}},
                "seeds": 7,
            },
            "bare": {"tune": None},
        },
    )
    assert list(found.tasks) == ["mqar"]
    assert found.spec.task["mqar"] == {**MQAR, "length": 64}
    assert found.names == ["base", "without_g", "a", "tune"]
    configs = {arm.name: arm.config for arm in found.arms}
    assert configs["base"]["rule"]["name"] == "gated_deltanet"
    assert configs["base"]["model"]["window"] == 0
    assert configs["base"]["model"]["d_model"] == 16
    assert configs["base"]["train"]["steps"] == 8
    assert configs["base"]["train"]["batch_size"] == 4
    assert (configs["a"]["train"]["lr"], configs["a"]["train"]["clip"]) == (0.03, 2)
    assert configs["a"]["rule"] == configs["base"]["rule"]
    assert (configs["tune"]["model"]["conv"], configs["tune"]["train"]["clip"]) == (0, 3)
    assert found.spec.tune is not None
    assert found.spec.tune.searched["train.lr"].choice == (0.1, 0.2)
    assert found.spec.tune.trials == 2
    assert found.spec.seeds == 7
    assert found.profile == "gpu"


def test_a_profile_replaces_a_gate_whole(plan: Callable[..., Plan]) -> None:
    base = {**STUDY["base"], "rule": {"name": "comba", "d": {"head": {"init": 1}}, "b": 1}}
    found = plan(profile="p", base=base, profiles={"p": {"base": {"rule": {"d": {"const": 0}}}}})
    assert found.arms[0].config["rule"]["d"] == {"const": {"value": 0.0}}
    assert found.arms[0].config["rule"]["b"] == {"const": {"value": 1.0}}


def test_a_profile_that_does_not_exist_is_refused(plan: Callable[..., Plan]) -> None:
    with pytest.raises(InputError, match="unknown profile 'gpo'; did you mean 'gpu'"):
        plan(profile="gpo", profiles={"gpu": {"seeds": 3}})


def test_profiles_leave_the_study_itself_alone(plan: Callable[..., Plan]) -> None:
    profiles = {"p": {"base": {"train": {"steps": 8}}, "arms": {"x": {"rule": {"d": 0}}}}}
    assert plan(profiles=profiles).identity == plan().identity != plan(profile="p", profiles=profiles).identity


@pytest.mark.parametrize(
    ("name", "profile"),
    [("quickstart", None), ("comba_ablation", None), ("comba_ablation", "gpu"), ("comba_ablation", "paper")],
)
def test_the_studies_that_come_with_it_can_be_planned(name: str, profile: str | None) -> None:
    found = make_plan(load_study(STUDIES / f"{name}.yaml", profile=profile), profile=profile)
    looks = found.spec.looks
    assert found.trials == len(found.tasks) * len(found.names) * found.tried(found.arms[0]) * len(looks)
    assert found.runs == len(found.tasks) * len(found.names) * found.tried(found.arms[0]) * looks[-1].seeds


def test_the_schema_knows_every_key() -> None:
    found = schema()
    assert set(STUDY) | {"ablate", "factorial", "arms", "for_task", "tune", "profiles"} <= set(found["properties"])
    assert found["additionalProperties"] is False


def test_an_error_outside_of_the_profiles_is_not_blamed_on_one(tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text("name: s\ntask: mqar\nbase: {rule: comba}\nsedes: 3\nprofiles: {longer: {seeds: 9}}\n")
    with pytest.raises(InputError) as error:
        load_study(file)
    assert "sedes" in str(error.value)
    assert "profiles.longer" not in str(error.value)


# Arms and trials.


def test_ablate_and_factorial_make_leave_one_out_arms(plan: Callable[..., Plan]) -> None:
    found = plan(ablate=["d", "output_gate", "conv"], factorial=[["d", "b"]])
    changes = {arm.name: arm.change for arm in found.arms}
    no_d = {"rule.d": [{"head": {"init": 0.02}}, {"const": {"value": 0.0}}]}
    no_b = {"rule.b": [{"head_sigmoid": {"init": 0.5}}, {"const": {"value": 1.0}}]}
    assert changes == {
        "base": {},
        "without_d": no_d,
        "without_output_gate": {"model.output_gate": [True, False]},
        "without_conv": {"model.conv": [4, 0]},
        "without_d_without_b": {**no_d, **no_b},
        "without_b": no_b,
    }


def test_parts_of_the_layer_that_the_base_has_are_taken_away(plan: Callable[..., Plan]) -> None:
    model = {**STUDY["base"]["model"], "rope": 500, "qk_norm": True, "token_shift": True}
    found = plan(base={**STUDY["base"], "model": model}, ablate=["rope", "qk_norm", "token_shift"])
    assert [arm.change for arm in found.arms[1:]] == [
        {"model.rope": [500.0, False]},
        {"model.qk_norm": [True, False]},
        {"model.token_shift": [True, False]},
    ]


def test_arms_list_other_rules_for_other_layers(plan: Callable[..., Plan]) -> None:
    found = plan(
        base={**STUDY["base"], "model": {**STUDY["base"]["model"], "layers": ["rule", "attention"]}},
        arms={
            "kda": {"rule": "kda"},
            "alone": {"model": {"layers": 2}},
            "again": {"model": {"layers": {"pattern": ["rule"]}}},
        },
    )
    names = [
        [model.at(i).make_rule().name for i in range(model.depth)]
        for model in (found.job(arm, "confirm", 0, {}).specs[0] for arm in found.arms)
    ]
    assert names == [["comba", "attention"], ["kda", "attention"], ["comba", "comba"], ["comba"]]
    plugins = [
        {name for kind, name, *_ in found.job(arm, "confirm", 0, {}).plugins if kind == "rule"} for arm in found.arms
    ]
    assert plugins == [{"comba", "attention"}, {"kda", "attention"}, {"comba"}, {"comba"}]
    with pytest.raises(InputError, match=r"arms\.x: model\.layers: rule 'kda' stands in no layer; list `rule`"):
        plan(arms={"x": {"rule": "kda", "model": {"layers": ["comba", "attention"]}}})


def test_an_arm_may_be_another_rule_altogether(plan: Callable[..., Plan]) -> None:
    base = {**STUDY["base"], "rule": {"name": "comba", "d": 0}}
    found = plan(base=base, arms={"delta": {"rule": {"name": "deltanet", "beta": {"sigmoid": {"max": 2}}}}})
    assert found.arms[1].config["rule"] == {"name": "deltanet", "beta": {"sigmoid": {"max": 2.0}}}


def test_a_task_changes_the_base_for_every_arm(plan: Callable[..., Plan]) -> None:
    found = plan(
        task={"mqar": MQAR, "long": {**MQAR, "task": "mqar", "length": 32}},
        for_task={"long": {"train": {"steps": 9}}},
        arms={"x": {"rule": {"d": 0}}},
    )
    assert {(a.task, a.name): a.config["train"]["steps"] for a in found.arms} == {
        ("mqar", "base"): 6,
        ("mqar", "x"): 6,
        ("long", "base"): 9,
        ("long", "x"): 9,
    }
    assert found.arms[0].config["model"]["vocab_size"] == 32


def test_seeds_of_a_search_and_of_confirmation_never_meet(plan: Callable[..., Plan]) -> None:
    found = plan(seeds=1000, search={"trials": 4, "seeds": 100, "train.lr": LR})
    seeds = {
        stage: {found.job(arm, stage, 0, {}).seeds for arm in found.arms}  # type: ignore[arg-type]
        for stage in ("tune", "confirm")
    }
    assert all(len(of) == 1 for of in seeds.values()), "arms are paired: they share their seeds"
    tune, confirm = set(*seeds["tune"]), set(*seeds["confirm"])
    assert (len(tune), len(confirm)) == (100, 1000)
    assert not tune & confirm
    assert 0 not in tune | confirm, "0 is the evaluation's"


def test_looks_share_out_the_seeds(plan: Callable[..., Plan]) -> None:
    found = plan(seeds={"at_least": 6, "at_most": 15}, ablate=["d"], tune={"trials": 2, "train.lr": LR})
    parts = [found.job(found.arms[0], "confirm", 0, {}, look).seeds for look in range(len(found.spec.looks))]
    assert parts == [(1, 2, 3, 4, 5, 6), (7, 8), (9, 10, 11), (12, 13, 14, 15)]
    assert (found.trials, found.runs) == (2 * 2 * 4, 2 * 2 * 15)
    assert len({found.job(found.arms[0], "confirm", 0, {}, look).key for look in range(4)}) == 4


def test_a_job_survives_json(plan: Callable[..., Plan]) -> None:
    found = plan(tune={"trials": 2, "train.lr": LR}, base={**STUDY["base"], "model": {"attention": [1]}}, deadline=9)
    job = found.job(found.arms[0], "confirm", 3, {"train.lr": 0.02})
    assert stack_from_json(json.dumps([asdict(job)])) == [job]
    assert job.config["train"]["lr"] == 0.02
    assert {(kind, name) for kind, name, *_ in job.plugins} == {
        ("rule", "comba"),
        ("rule", "attention"),
        ("task", "mqar"),
    }


NARROW = {"model.d_model": {"integers": [16, 64]}, "model.heads": {"choice": [1, 2]}}


def test_a_plan_says_which_candidates_make_no_model(plan: Callable[..., Plan]) -> None:
    for key in ("tune", "search"):
        (note,) = plan(**{key: {"trials": 4, **NARROW}}).notes
        assert note.startswith(f"{key}: ")
        assert "combinations tried make no model, such as model.d_model=19, model.heads=2: model.d_model 19" in note
    assert plan(tune={"trials": 4, "train.lr": LR}).notes == ()


def test_a_knob_may_be_searched_beside_rules_that_all_have_it(plan: Callable[..., Plan]) -> None:
    found = plan(search={"rule": {"choice": ["comba", {"name": "comba", "d": 0}]}, "rule.b": {"choice": [0.5, 1]},
                         "trials": 4})  # fmt: skip
    values = {"rule.b": 1, "rule": {"name": "comba", "d": 0}}
    rule = found.job(found.arms[0], "tune", 0, values).config["rule"]
    assert (rule["b"], rule["d"]) == ({"const": {"value": 1.0}}, {"const": {"value": 0.0}})


# Identity.


def key(found: Plan) -> str:
    return found.job(found.arms[0], "confirm", 0, {}).key


def identity_elsewhere(file: Path) -> str:
    code = (
        "import sys; from deltalab.study.planning.make import make_plan;"
        "from deltalab.study.specs.study_file import load_study;"
        "print(make_plan(load_study(sys.argv[1])).identity)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        env={**os.environ, "PYTHONHASHSEED": "12345"},
        cwd=file.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    return out.stdout.strip()


@pytest.mark.slow
def test_identity_is_the_same_in_another_process(plan: Callable[..., Plan], file: Path) -> None:
    here = plan(ablate=["d", "b"], tune={"trials": 2, "train.lr": LR}, task={"mqar": MQAR, "text": {"length": 16}})
    assert identity_elsewhere(file) == here.identity


def test_identity_does_not_depend_on_how_numbers_and_defaults_are_written(plan: Callable[..., Plan]) -> None:
    rule = {"name": "comba", "d": {"head": {"init": 0.02}}, "transition": "splr"}
    train = {**STUDY["base"]["train"], "clip": 1, "precision": "auto", "betas": [0.9, 0.95]}
    same = {"rule": rule, "model": {"heads": 1, "layers": 1, "d_model": 16, "expand_v": 1}, "train": train}
    assert key(plan(base=same)) == key(plan())
    assert plan(base=same).identity == plan().identity
    # Neither does what a trial may take, nor what the study says of itself.
    assert (
        plan(resources={"cpu": 1.5, "stack": 3}, deadline=100, retries=9, description="x").identity == plan().identity
    )


INGREDIENTS: dict[str, dict[str, Any]] = {
    "a knob": {"base": {**STUDY["base"], "rule": {"name": "comba", "d": 0}}},
    "the model": {"base": {**STUDY["base"], "model": {"d_model": 16, "layers": 1, "heads": 2}}},
    "the training": {"base": {**STUDY["base"], "train": {**STUDY["base"]["train"], "lr": 0.011}}},
    "the number of seeds": {"seeds": 3},
    "the task's parameters": {"task": {"mqar": {**MQAR, "power": 0.02}}},
    "the task's name": {"task": {"recall": {**MQAR, "task": "mqar"}}},
}


@pytest.mark.parametrize("given", INGREDIENTS.values(), ids=INGREDIENTS)
def test_every_ingredient_changes_the_identity(plan: Callable[..., Plan], given: dict[str, Any]) -> None:
    assert key(plan(**given)) != key(plan())
    assert plan(**given).identity != plan().identity


def test_arms_tuning_family_name_and_profile_change_the_study_alone(plan: Callable[..., Plan]) -> None:
    studies = [
        plan(),
        plan(ablate=["d"]),
        plan(tune={"trials": 2, "train.lr": LR}),
        plan(tune={"trials": 3, "train.lr": LR}),
        plan(tune={"trials": 2, "train.lr": LR, "extend": True}),
        plan(tune={"trials": 2, "train.lr": LR}, for_task={"mqar": {"tune": {"train.lr": {"uniform": [0.1, 0.2]}}}}),
        plan(seeds={"at_least": 2, "at_most": 3}),
        plan(seeds={"at_least": 2, "at_most": 5}),
        plan(family="task"),
        plan(margin={"accuracy": 0.1}),
        plan(name="t"),
        plan(profile="p", profiles={"p": {"description": "x"}}),
    ]
    assert len({found.identity for found in studies}) == len(studies)
    assert len({key(found) for found in studies}) == 1, "the same trial is never run twice, whoever asks"


def test_stage_is_part_of_a_trial(plan: Callable[..., Plan]) -> None:
    found = plan(search={"trials": 4, "seeds": 2, "train.lr": LR})
    assert found.job(found.arms[0], "tune", 0, {}).key != key(found)


def test_code_numerics_version_and_corpus_change_the_identity(
    plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_bytes(bytes(range(256)) * 4)
    text = {"task": {"text": {"length": 16, "corpus": str(corpus)}}}
    before, of_text = key(plan()), key(plan(**text))

    kept = registry.Plugin.hash.fget
    for edited, same in (("comba", False), ("deltanet", True)):
        with monkeypatch.context() as patch:
            changed = property(lambda one, edited=edited: "edited" if one.kind.name == edited else kept(one))
            patch.setattr(registry.Plugin, "hash", changed)
            assert (key(plan()) == before) == same
    with monkeypatch.context() as patch:
        patch.setattr("deltalab.study.planning.plan.NUMERICS", 10**6)
        assert key(plan()) != before
    with monkeypatch.context() as patch:
        patch.setattr("deltalab.tasks.MQAR.version", 10**6)
        assert key(plan()) != before
    assert key(plan()) == before

    corpus.write_bytes(bytes(range(256)) * 4 + b"!")
    from deltalab.tasks.text import open_corpus

    open_corpus.cache_clear()
    assert key(plan(**text)) != of_text


def test_the_hash_is_of_the_code_that_was_imported(tmp_path: Path) -> None:
    """A file that is edited after its import must not lend its hash to the code that runs."""
    file = tmp_path / "edited.py"
    source = (STUDIES.parent / "plugins/deltalab_rules/deltanet.py").read_text().replace('"deltanet"', '"edited"')
    file.write_text(source)
    with registry.isolated():
        (plugin,) = registry.add_plugin(file)
        before = plugin.hash, plugin.source
        file.write_text(source + "# edited\n")
        registry.refresh()
        again = registry.rule_plugin("edited")
        assert (again.hash, again.source) == before == (plugin.hash, source)
