"""A search whose every figure is known, recorded in a ledger."""

import random
from collections.abc import Mapping
from typing import Any, Self

from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord
from deltalab.store.models import Stage
from deltalab.study.planning.tuning_candidates import RANDOM_FROM, WARM_FROM

TASKS = {"mqar": {"metric": "accuracy", "maximize": True, "chance": 0.03, "version": 1, "bounds": [0, 1]}}


BASE = {
    "rule": {"name": "algebra", "decay": "scalar", "start": "slow"},
    "model": {"heads": 2},
    "train": {"lr": 0.02, "steps": 60},
}


SEARCH = {
    "rule.decay": {"choice": ["none", "scalar"]},
    "rule.start": {"choice": ["slow", "fast"], "when": {"rule.decay": ["scalar"]}},
    "train.lr": {"log_uniform": [0.01, 0.1]},
    "trials": 40,
    "finalists": 2,
    "fidelity": {"train.steps": [20, 60], "keep": 0.25},
}


SPEC = {
    "name": "s",
    "task": {"mqar": {}},
    "base": {"rule": "algebra"},
    "search": SEARCH,
    "seeds": 2,
}


class Lab:
    """A search being recorded."""

    def __init__(self, store: Store, *objectives: str, space: Mapping[str, Any] = SEARCH) -> None:
        self.store = store
        spec = {**SPEC, "search": {**space, **({"objectives": objectives} if objectives else {})}}
        arms = [ArmRecord(name, name == "base", {}, {"mqar": BASE}) for name in ("base", "found_1", "found_2")]
        self.id = store.begin_study("s", None, "id", spec, arms, {"tasks": TASKS})

    @classmethod
    def of(cls, store: Store, study_id: int) -> Self:
        """The lab of a search that is recorded already."""
        lab = cls.__new__(cls)
        lab.store, lab.id = store, study_id
        return lab

    def record(
        self,
        number: int,
        values: Mapping[str, Any],
        score: float,
        *,
        flops: float = 1000.0,
        decode: float | None = None,
        steps: int = 20,
        arm: str = "base",
        error: str | None = None,
        finished: float = 1010.0,
    ) -> None:
        stage: Stage = "tune" if number else "confirm"
        train = {**BASE["train"], "steps": steps}
        knobs = {path.removeprefix("rule."): value for path, value in values.items() if path.startswith("rule.")}
        rule = {**BASE["rule"], **knobs}
        splits = ("validation",) if stage == "tune" else ("validation", "test")
        metrics = [(split, "accuracy", steps, score) for split in splits]
        metrics += [("cost", "flops_per_token", steps, flops), ("cost", "state_size", steps, 64.0)]
        metrics += [("cost", "decode_us", steps, decode)] if decode else []
        runs = [RunRecord(seed, metrics=metrics) for seed in ((1, 2) if stage == "confirm" else (1_000_001,))]
        trial = TrialRecord(
            key=f"{arm} {number} {steps} {finished}",
            task="mqar",
            task_version=1,
            stage=stage,
            config={**BASE, "rule": rule, "train": train},
            state="infeasible" if error else "done",
            started_at=1000.0,
            finished_at=finished,
            seconds=10.0,
            rule=RuleRecord("algebra", "h", "source"),
            error=error,
            parameters=100,
            state_size=64,
            runs=[] if error else runs,
        )
        self.store.record_trial(self.id, arm, trial, number, dict(values))


def values(draw: random.Random) -> dict[str, Any]:
    own = {"rule.decay": draw.choice(["none", "scalar"]), "train.lr": round(10 ** draw.uniform(-2, -1), 5)}
    return own | ({"rule.start": draw.choice(["slow", "fast"])} if own["rule.decay"] == "scalar" else {})


BEST = {"rule.decay": "scalar", "rule.start": "fast", "train.lr": 0.02}


CHEAP = {"rule.decay": "none", "train.lr": 0.05}


TUNED = {"train.lr": 0.02}


def record_search(store: Store) -> int:
    """32 candidates of the sampler and 8 of random search, of which 3 train on; a decay is worth 0.5."""
    lab, draw = Lab(store), random.Random(0)
    for number in [*range(1, 32), *range(RANDOM_FROM, RANDOM_FROM + 8)]:
        own = values(draw)
        lab.record(number, own, 0.2 + 0.5 * (own["rule.decay"] == "scalar") + 0.01 * draw.random())
    lab.record(WARM_FROM, BEST, 0.8)
    lab.record(WARM_FROM, BEST, 0.9, steps=60)
    lab.record(WARM_FROM + 1, CHEAP, 0.25, flops=500.0)
    lab.record(WARM_FROM + 1, CHEAP, 0.3, flops=500.0, steps=60)
    lab.record(40, {**BEST, "train.lr": 0.1}, 0.5, error="width 17 is no multiple of 4 heads; take 16")
    lab.record(41, {**BEST, "train.lr": 0.09}, 0.5, error="width 19 is no multiple of 4 heads")
    lab.record(0, TUNED, 0.7, steps=60)
    lab.record(0, BEST, 0.88, steps=60, arm="found_1")
    lab.record(0, CHEAP, 0.31, steps=60, arm="found_2")
    store.finish_study(lab.id, "done")
    return lab.id
