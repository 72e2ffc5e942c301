"""How benchmarks/calibrate.py computes verdicts of many studies at once, and which figures its JSON file has."""

import json

import numpy as np
import pytest
from tests.support.folders import BENCHMARKS
from tests.support.scripts import loaded

from deltalab.statistics import joint_test
from deltalab.statistics.joint_test import one_look
from deltalab.statistics.looks import spread_looks

calibrate = loaded("calibrate")
many = loaded("calibration/many_studies")


@pytest.mark.parametrize("looks", [one_look(7), spread_looks(6, 9)], ids=["at once", "in looks"])
def test_the_verdicts_of_many_studies_are_those_of_the_joint_test(looks) -> None:
    scores = np.random.default_rng(3).normal(size=(12, 4, looks[-1].seeds))
    scores[:, 1] += np.linspace(0, 3, 12)[:, None]
    d = scores[:, 1:] - scores[:, :1]
    told, seeds, _ = many.follow(d, looks)
    assert 0 < told[:, 0].sum() < 12
    for study, verdicts, counts in zip(d, told, seeds, strict=True):
        differences = [outcome.difference for outcome in joint_test.follow(list(study), looks)]
        assert [difference.decided for difference in differences] == verdicts.tolist()
        assert [difference.n for difference in differences] == counts.tolist()


def test_a_verdict_that_differs_is_counted() -> None:
    d = np.random.default_rng(4).normal(size=(2, 3, 7))
    checked = many.Checked(per=2)
    told, seeds, _ = many.follow(d, one_look(7))
    told[1, 2] ^= True
    checked.add(d, one_look(7), told, seeds)
    assert (checked.studies, checked.rows, checked.differ) == (2, 6, 1)


def test_the_file_of_figures_has_every_part() -> None:
    figures = json.loads((BENCHMARKS / "calibration.json").read_text(encoding="utf-8"))
    assert {name for name, rows in figures.items() if isinstance(rows, list)} == set(calibrate.PARTS)
