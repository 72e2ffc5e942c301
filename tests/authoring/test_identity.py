"""A trial is known by what it computes: the code of a user's rule and task is part of it."""

from pathlib import Path

from deltalab import registry
from deltalab.study.planning.make import make_plan
from deltalab.study.planning.plan import Plan
from deltalab.study.specs.study_file import StudySpec

TASK = '''
from dataclasses import dataclass
from deltalab.tasks import MQAR

@dataclass(frozen=True, kw_only=True)
class Mine(MQAR):
    """Recall, drawn as mqar draws it."""
    name = "mine"
    version = 1
    metric = "accuracy"
    maximize = True
'''


def planned(task: str, **resources: float) -> Plan:
    train = {"steps": 2, "batch_size": 2, "lr": 1e-2, "evaluations": 1}
    given = {
        "name": "tiny",
        "task": {task: {"length": 16, "pairs": 2, "vocab_size": 16}},
        "base": {"rule": "comba", "model": {"d_model": 16, "layers": 1, "heads": 1}, "train": train},
        "seeds": 1,
        "resources": resources,
    }
    return make_plan(StudySpec.model_validate(given))


def key(task: str, **resources: float) -> str:
    plan = planned(task, **resources)
    return plan.job(plan.arms[0], "confirm", 0, {}).key


def test_the_code_of_a_users_task_is_in_a_trials_identity(tmp_path: Path) -> None:
    keys = []
    for folder, source in (("a", TASK), ("b", TASK), ("c", TASK.replace("as mqar draws it", "otherwise"))):
        file = tmp_path / folder / "mine.py"
        file.parent.mkdir()
        file.write_text(source)
        with registry.isolated():
            registry.add_plugin(file)
            keys.append(key("mine"))
    assert keys[0] == keys[1], "wherever the file is"
    assert keys[2] != keys[0], "the version is the same, and the code is not"


def with_model(**model: object) -> str:
    plan = planned("mqar")
    return plan.job(plan.arms[0], "confirm", 0, {f"model.{name}": value for name, value in model.items()}).key


def test_a_later_releases_setting_is_in_a_trials_identity_where_it_is_not_the_default() -> None:
    """tests/store/test_released.py holds the keys that came before these settings."""
    settings = {"rope": True, "qk_norm": True, "token_shift": True, "qk_heads": 1, "kv_heads": 1}
    keys = [key("mqar"), *(with_model(**{name: value}) for name, value in settings.items())]
    assert len(set(keys)) == len(keys)
    assert with_model(rope=False, qk_heads=None) == keys[0]
    listed = with_model(layers=["rule"])
    assert listed != keys[0]
    assert listed == with_model(layers=["comba"]) == with_model(layers={"repeat": 1, "pattern": ["rule"]})


def test_the_machine_is_not_in_a_trials_identity() -> None:
    """docs/decisions/201-auto-device-identity.md says why, and how to tell the two apart."""
    assert key("mqar") == key("mqar", gpu=1)
    plans = planned("mqar"), planned("mqar", gpu=1)
    on_cpu, wherever = (plan.job(plan.arms[0], "confirm", 0, {}).specs[1].device for plan in plans)
    assert (on_cpu, wherever) == ("cpu", "auto")
