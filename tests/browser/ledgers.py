"""Ledgers with a study of every kind, recorded in a second; one tiny study trains."""

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord, trainings
from deltalab.store.models import StudyState
from deltalab.study.planning.tuning_candidates import RANDOM_FROM, WARM_FROM
from deltalab.study.running.run import run_study_file

TASKS = {
    "mqar": {"metric": "accuracy", "maximize": True, "chance": 1 / 64, "version": 1},
    "text": {"metric": "bits_per_byte", "maximize": False, "chance": 8.0, "version": 1},
}
TUNE = {"trials": 4, "train.lr": {"log_uniform": [1e-3, 1e-1]}, "rule.beta": {"choice": ["sigmoid", "one"]}}
SEARCH = {
    "rule.decay": {"choice": ["none", "scalar"]},
    "rule.start": {"choice": ["slow", "fast"], "when": {"rule.decay": ["scalar"]}},
    "train.lr": {"log_uniform": [0.01, 0.1]},
    "objectives": ["accuracy", "flops_per_token"],
    "trials": 24,
    "finalists": 1,
}
BASE = {
    "rule": {"name": "comba"},
    "model": {"d_model": 8, "layers": 1, "heads": 1},
    "train": {"steps": 400, "batch_size": 4, "lr": 0.01},
}
SEEDS = range(1, 7)
STEPS = range(50, 401, 50)
ERROR = "Traceback (most recent call last):\n  File 'x.py', line 7\nRuntimeError: out of memory <b>at</b> *step* 7\n"
HOSTILE = {
    "base": "base",
    "html": "<img src=x onerror=document.title='owned'><script>document.title='owned'</script>",
    "markdown": "[a](http://evil.example/x) ![b](http://evil.example/y.png) # $x$ :red[no] `c` | d",
    "unicode": "ψ̂ 层 \u202eevil 🔥 é",
    "formula": "=HYPERLINK('http://evil.example')",
    "long": "an_arm_whose_name_is_as_long_as_names_get_" * 4,
}
"""Names of arms that a page must show as they are."""
HOSTILE_STUDY = "hostile <b>*[x](http://evil.example)*"
TRAINS = {
    "name": "trained",
    "description": "The one study here that trains.",
    "task": {"mqar": {"length": 16, "pairs": 2, "vocab_size": 32}},
    "base": {
        "rule": "gated_deltanet",
        "model": {"d_model": 8, "layers": 1, "heads": 1, "mlp": False},
        "train": {"steps": 4, "batch_size": 4, "lr": 1e-2, "evaluations": 2, "eval_batches": 1},
    },
    "ablate": ["g"],
    "tune": {"train.lr": {"log_uniform": [3e-3, 3e-2]}, "trials": 2},
    "seeds": 2,
}


@dataclass(frozen=True)
class Ledgers:
    """Three databases. labels: of the studies in `full`, as the URL names them, by kind."""

    full: Path
    empty: Path
    trainings: Path
    labels: dict[str, str]


@contextmanager
def ledgers(folder: Path) -> Iterator[Ledgers]:
    """Builds the ledgers; the study `running` runs until the end of the block."""
    full = folder / "full.db"
    (folder / "trained.yaml").write_text(yaml.safe_dump(TRAINS))
    run_study_file(folder / "trained.yaml", db=full, executor="inline")
    Store.open(folder / "empty.db").close()
    with Store.open(folder / "trainings.db") as store:
        _trainings(store, folder / "alone")
    with ExitStack() as opened:  # a study runs as long as the store is open that began it
        for name, write in KINDS.items():
            write(opened.enter_context(Store.open(full)), name)
        _trainings(opened.enter_context(Store.open(full)), folder / "runs")
        labels = {kind: f"{number} {kind}" for number, kind in enumerate(("trained", *KINDS), 1)}
        yield Ledgers(full, folder / "empty.db", folder / "trainings.db", labels)


def _begin(
    store: Store,
    name: str,
    arms: Mapping[str, Mapping[str, Any]],
    tasks: Mapping[str, Mapping[str, Any]] = TASKS,
    **spec: Any,
) -> int:
    spec = {"name": name, "task": {task: {} for task in tasks}, "base": {"rule": "comba"}, "seeds": len(SEEDS), **spec}
    records = [
        ArmRecord(arm, not change, dict(change), dict.fromkeys(tasks, BASE))
        for arm, change in arms.items()
    ]  # fmt: skip
    return store.begin_study(name, None, name, spec, records, {"tasks": dict(tasks), "git": {"commit": "abc"}})


def _record(
    store: Store,
    study: int,
    arm: str,
    task: str,
    last: Sequence[float],
    stage: str = "confirm",
    number: int = 0,
    values: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    about: Mapping[str, Any] = TASKS,
    **given: Any,
) -> None:
    """A trial whose run i ends at last[i]; NaN is a diverged run. metrics: others of the last step, by name."""
    metric = about[task]["metric"]
    start = about[task]["chance"]
    runs = []
    for seed, end in enumerate(last, 1):
        reached = start if math.isnan(end) else end
        curve = [(step, start + (reached - start) * step / STEPS[-1]) for step in STEPS]
        if math.isnan(end):
            curve = curve[: len(curve) // 2]
        found = [("validation", metric, step, value) for step, value in curve]
        if stage == "confirm" and not math.isnan(end):
            found.append(("test", metric, STEPS[-1], end))
        splits = ("validation", "test") if stage == "confirm" else ("validation",)
        found += [(split, name, STEPS[-1], value) for split in splits for name, value in (metrics or {}).items()]
        found += [("cost", "flops_per_token", STEPS[-1], 1e3), ("cost", "state_size", STEPS[-1], 64.0)]
        runs.append(RunRecord(seed, "diverged" if math.isnan(end) else "done", metrics=found))
    trial: dict[str, Any] = {
        "key": f"{study} {arm} {task} {stage} {number}",
        "task": task,
        "task_version": 1,
        "stage": stage,
        "config": BASE,
        "state": "done",
        "started_at": 1e9 + number,
        "finished_at": 1e9 + number + 10,
        "seconds": 10.0,
        "rule": RuleRecord("comba", "9f" * 32, "S = 'as it ran'"),
        "parameters": 1000,
        "state_size": 64,
        "tokens_per_second": 5e4,
        "hardware": {"device": "cpu"},
        "runs": runs,
    }
    store.record_trial(study, arm, TrialRecord(**(trial | given)), number, dict(values or {}))


def _ends(task: str, shift: float = 0.0) -> list[float]:
    """Where the seeds of an arm end. shift: how much better than the base, of either metric."""
    draw = random.Random(f"{task} {shift}")
    middle = 0.8 + shift if task == "mqar" else 1.5 - shift
    return [middle + draw.uniform(-0.02, 0.02) for _ in SEEDS]


def _compare(store: Store, study: int, arms: Mapping[str, float], stage: str = "confirm") -> None:
    for task in TASKS:
        for arm, shift in arms.items():
            _record(store, study, arm, task, _ends(task, shift), stage)


THREE = {"base": {}, "no_*d*": {"rule.d": [{"head": {"init": 0.02}}, None]}, "late": {"rule.w": [1, 2]}}


def _ablation(store: Store, name: str) -> None:
    study = _begin(store, name, THREE, description="Two tasks, *three* arms.")
    _compare(store, study, {"base": 0.0, "no_*d*": -0.3, "late": 0.15})
    store.finish_study(study, "done")


def _tuned(store: Store, name: str) -> None:
    study = _begin(store, name, THREE, tune=TUNE)
    best = {"train.lr": 0.01, "rule.beta": "sigmoid"}
    for task in TASKS:
        for arm, shift in {"base": 0.0, "no_*d*": -0.3, "late": 0.15}.items():
            for number, lr in enumerate((0.001, 0.003, 0.01, 0.1)):
                tried = {"train.lr": lr, "rule.beta": "one" if number % 2 else "sigmoid"}
                _record(store, study, arm, task, _ends(task, shift - 0.02 * abs(2 - number))[:1], "tune", number, tried)
            _record(store, study, arm, task, _ends(task, shift), values=best)
    store.finish_study(study, "done")


def _search(store: Store, name: str) -> None:
    tasks = {"mqar": {**TASKS["mqar"], "bounds": [0, 1]}}
    study = _begin(store, name, {"base": {}, "found_1": {"rule.decay": ["none", "scalar"]}}, tasks, search=SEARCH)
    draw = random.Random(0)
    for number in [*range(1, 18), *range(RANDOM_FROM, RANDOM_FROM + 6), WARM_FROM]:
        values = {"rule.decay": draw.choice(["none", "scalar"]), "train.lr": round(10 ** draw.uniform(-2, -1), 5)}
        if values["rule.decay"] == "scalar":
            values["rule.start"] = draw.choice(["slow", "fast"])
        score = 0.2 + 0.5 * (values["rule.decay"] == "scalar") + 0.01 * draw.random()
        found = [("validation", "accuracy", 400, score), ("cost", "flops_per_token", 400, 1e3 + 900 * score)]
        runs = [RunRecord(1_000_001, metrics=found)]
        _record(store, study, "base", "mqar", [], "tune", number, values, runs=runs)
    why = "width 17 is no multiple of 4 heads; take 16"
    _record(
        store,
        study,
        "base",
        "mqar",
        [],
        "tune",
        40,
        {"rule.decay": "none", "train.lr": 0.1},
        state="infeasible",
        error=why,
    )
    _record(store, study, "base", "mqar", _ends("mqar"), values={"train.lr": 0.02})
    best = {"rule.decay": "scalar", "rule.start": "fast", "train.lr": 0.02}
    _record(store, study, "found_1", "mqar", _ends("mqar", 0.1), values=best)
    store.finish_study(study, "done")


def _ladder(store: Store, name: str) -> None:
    widths = (8, 16, 32)
    tasks = {f"text.d_model={width}": {**TASKS["text"], "length": 16} for width in widths}
    study = _begin(
        store,
        name,
        {"base": {}, "no_d": {"rule.d": [1, 0]}},
        tasks,
        scales={"model.d_model": list(widths)},
        task={"text": {}},
    )
    for size, task in enumerate(tasks):
        for arm, apart in (("base", 0.0), ("no_d", 0.5)):
            runs = [
                RunRecord(
                    seed,
                    metrics=[
                        *(
                            (split, metric, 10, 3 - size + apart + 0.01 * seed)
                            for split in ("validation", "test")
                            for metric in ("bits_per_byte", "loss")
                        ),
                        ("cost", "flops_per_token", 10, 1e3 * 4.0**size),
                    ],
                )
                for seed in SEEDS
            ]
            config = {**BASE, "train": {**BASE["train"], "steps": 10}}
            _record(store, study, arm, task, [], about=tasks, runs=runs, config=config)
    store.finish_study(study, "done")


def _lengths(store: Store, name: str) -> None:
    study = _begin(store, name, THREE)
    for task in TASKS:
        for arm, shift in {"base": 0.0, "no_*d*": -0.3, "late": 0.15}.items():
            at = {
                f"{TASKS[task]['metric']}@{length}": _ends(task, shift)[0] - length / 1e4 for length in (64, 256, 1024)
            }
            _record(store, study, arm, task, _ends(task, shift), metrics=at)
    store.finish_study(study, "done")


def _running(store: Store, name: str) -> None:
    study = _begin(store, name, THREE, tune=TUNE)
    _compare(store, study, {"base": 0.0, "no_*d*": -0.3}, "tune")


def _begun(store: Store, name: str) -> None:
    _begin(store, name, THREE)


def _ended(state: StudyState, stage: str = "confirm") -> Any:
    def write(store: Store, name: str) -> None:
        study = _begin(store, name, THREE, tune=TUNE)
        _compare(store, study, {"base": 0.0, "no_*d*": -0.3}, stage)
        if state == "failed":
            _record(store, study, "late", "text", [], state="failed", error=ERROR, tokens_per_second=None)
        store.finish_study(study, state)

    return write


def _diverged(store: Store, name: str) -> None:
    study = _begin(store, name, THREE)
    _compare(store, study, {"base": 0.0, "no_*d*": -0.3})
    _record(store, study, "late", "mqar", [math.nan] * len(SEEDS))
    _record(store, study, "late", "text", [math.nan, *_ends("text")[1:]])
    store.finish_study(study, "done")


def _many(store: Store, name: str) -> None:
    arms = {"base": {}, **{f"gate_is_{i}": {"model.gate": [0, i]} for i in range(13)}}
    study = _begin(store, name, arms, {"mqar": TASKS["mqar"]})
    for number, arm in enumerate(arms):
        _record(store, study, arm, "mqar", _ends("mqar", -0.01 * number))
    store.finish_study(study, "done")


def _hostile(store: Store, name: str) -> None:
    arms = {arm: {} if kind == "base" else {f"rule.{arm}": [arm, {arm: arm}]} for kind, arm in HOSTILE.items()}
    study = _begin(store, name, arms, description=" ".join(HOSTILE.values()))
    _compare(store, study, {arm: -0.05 * number for number, arm in enumerate(HOSTILE.values())})
    for number, arm in enumerate(HOSTILE.values(), 1):
        _record(store, study, arm, "mqar", [], "tune", number, state="failed", error=f"RuntimeError: {arm}")
    store.finish_study(study, "failed")


KINDS = {
    "ablation": _ablation,
    "tuned": _tuned,
    "search": _search,
    "ladder": _ladder,
    "lengths": _lengths,
    "running": _running,
    "begun": _begun,
    "failed": _ended("failed"),
    "incomplete": _ended("incomplete"),
    "interrupted": _ended("interrupted", "tune"),
    "diverged": _diverged,
    "many": _many,
    HOSTILE_STUDY: _hostile,
}


def _trainings(store: Store, folder: Path) -> None:
    for number, arm in enumerate(("base", "no_*d*")):
        run = folder / f"comba-340M-{number}"
        run.mkdir(parents=True)
        about = {
            "id": f"r{number}", "export": "/elsewhere/exported", "rule": "comba", "study": "ablation", "arm": arm,
            "provenance": {"study": "ablation", "arm": arm}, "engine": "torchtitan", "command": [], "gpus": 2,
            "nodes": 1, "parameters": 394_000_000, "recipe": {"batch": {"sequences": 8, "length": 16}, "steps": 40},
            "started": "2026-01-02T10:00:00+00:00",
        }  # fmt: skip
        (run / "run.json").write_text(json.dumps(about))
        lines = [{"step": step, "split": "train", "name": "loss", "value": 5 - step / 10} for step in range(1, 20)]
        lines += [
            {"step": step, "split": "train", "name": "tokens_per_second", "value": 256.0} for step in range(1, 20)
        ]
        lines.append({"step": 19, "split": "validation", "name": "loss", "value": 3.2})
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        trainings.record(store, run)
