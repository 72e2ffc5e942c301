"""Makes ledgers whose every figure is known, and reads the dashboard's pages of them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from streamlit.testing.v1 import AppTest

import deltalab_dashboard
from deltalab.store import ArmRecord, RuleRecord, RunRecord, Store, TrialRecord

APP = Path(deltalab_dashboard.__file__).parent / "app.py"
TASKS = {
    "mqar": {"metric": "accuracy", "maximize": True, "chance": 1 / 64, "version": 1},
    "text": {"metric": "bits_per_byte", "maximize": False, "chance": 8.0, "version": 1},
}
BOUNDED = TASKS | {"mqar": {**TASKS["mqar"], "bounds": [0, 1]}}
"""The same tasks, with a best possible value of each: their studies have a table over tasks."""
ARMS = {"base": {}, "no_*d*": {"rule.d": [{"head": {"init": 0.02}}, {"const": {"value": 0.0}}]}, "late": {"x": [1, 2]}}
TUNE = {"trials": 2, "train.lr": {"log_uniform": [1e-3, 1e-1]}}
SPEC = {"description": "Two tasks", "tune": TUNE, "seeds": 8}
TRACEBACK = "Traceback (most recent call last):\n  File 'x.py'\nRuntimeError: out of memory\n"
BASE = [0.90, 0.92, 0.94, 0.91, 0.93, 0.95, 0.90, 0.92]


def begin(
    store: Store,
    name: str,
    profile: str | None = None,
    changes: Mapping[str, Any] = ARMS,
    tasks: Mapping[str, Any] = TASKS,
    **spec: Any,
) -> int:
    """Begins a study of two tasks, and returns its id.

    Args:
        store: The ledger.
        name: The name of the study.
        profile: The study's profile.
        changes: arm -> what it changes. An arm without a change is the base.
        tasks: What the ledger says of the tasks. They must be among `TASKS`.
        spec: Keys of the study's file.
    """
    arms = [
        ArmRecord(arm, not change, change, {task: {"rule": {"name": "comba"}} for task in tasks})
        for arm, change in changes.items()
    ]
    provenance = {
        "tasks": tasks,
        "git": {"commit": "abc"},
        "command": ["platform", "--db", "postgresql://me:SECRET@h/l"],
    }
    return store.begin_study(name, profile, f"{name} {profile}", SPEC | spec, arms, provenance)


def record(
    store: Store,
    study: int,
    arm: str,
    task: str,
    values: list[float],
    stage: str = "confirm",
    number: int = 0,
    tuned: Mapping[str, Any] = MappingProxyType({"train.lr": 0.01}),
    look: int = 0,
    **fields: Any,
) -> None:
    """Records a trial.

    Args:
        store: The ledger.
        study: The id of the study.
        arm: The trial's arm.
        task: A key of `TASKS`.
        values: The score of each seed at the last step. NaN makes a run that diverged.
        stage: "tune" or "confirm".
        number: The number of the trial's candidate.
        tuned: The values that the candidate has.
        look: The number of the look at the data, which tells trials of one candidate apart.
        fields: Further fields of the trial's record.
    """
    metric, last = TASKS[task]["metric"], "test" if stage == "confirm" else "validation"
    runs = [
        RunRecord(
            seed,
            "diverged" if math.isnan(value) else "done",
            metrics=[("validation", metric, 50, 0.01), ("validation", metric, 100, value), (last, metric, 100, value)][
                : 3 if stage == "confirm" else 2
            ],
        )
        for seed, value in enumerate(values, 1)
    ]
    values_by_field: dict[str, Any] = {
        "state": "done",
        "rule": RuleRecord("comba", "9f" * 32, "S = 'as it ran'"),
        "runs": runs,
        "tokens_per_second": 5e4,
    }
    values_by_field |= fields
    trial = TrialRecord(
        f"{study} {arm} {task} {stage} {number} {look}",
        task,
        1,
        stage,
        {},
        started_at=1e9,
        finished_at=1e9,
        seconds=10.0,
        **values_by_field,
    )  # type: ignore[arg-type]
    store.record_trial(study, arm, trial, number, dict(tuned))


def open_page(page: str = "answer.py", **query: Any) -> AppTest:
    """Opens a page by an address with this query."""
    app = AppTest.from_file(APP, default_timeout=60)
    app.query_params.update(query)
    app.switch_page(f"views/{page}").run()
    assert not app.exception
    return app


def texts(app: AppTest) -> str:
    """Returns the words of a page, without the backslashes that escape Markdown."""
    kinds = (app.title, app.subheader, app.markdown, app.caption, app.info, app.warning, app.error)
    return "\n".join(str(element.value) for kind in kinds for element in kind).replace("\\", "")


def charts(app: AppTest) -> list[Any]:
    """Returns the charts of a page as Vega-Lite."""
    return [json.loads(chart.proto.spec) for chart in app.get("vega_lite_chart")]


def cells(table: Any) -> dict[str, list[str]]:
    """Returns the columns of a table, without the backslashes that escape Markdown."""
    return {key.replace("\\", ""): [str(cell).replace("\\", "") for cell in table[key]] for key in table}
