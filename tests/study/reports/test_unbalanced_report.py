"""A study with more seeds of the base than of an arm: run on a tiny task, tested as groups, and reported as such."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.schedules import STUDY
from tests.support.studies import ledger, planned, write

from deltalab.cli.app import main
from deltalab.statistics.unbalanced import Groups, compare_groups
from deltalab.store import Store
from deltalab.study.forecast import step_time
from deltalab.study.reports.report import Report, report
from deltalab.study.running.run import run_study_file

SEEDS = {"arms": 6, "base": 9}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the file of a study and the ledger that it ran in."""
    folder = tmp_path_factory.mktemp("unbalanced")
    file = write(folder / "s.yaml", **{**STUDY, "seeds": SEEDS, "ablate": ["d", "b"]}, tune=None)
    run_study_file(file, db=str(folder / "l.db"), executor="inline", quiet=True, unchecked=True)
    return folder


@pytest.fixture
def reported(lab: Path) -> Callable[..., Report]:
    def of(against: str | None = None) -> Report:
        with Store.open(str(lab / "l.db")) as store:
            return report(store, store.study("s").id, against=against)

    return of


def test_the_base_trains_its_further_seeds_in_a_trial_of_their_own(lab: Path) -> None:
    plan = planned(lab / "s.yaml")
    assert (plan.trials, plan.runs) == (4, 2 * 6 + 9)
    places = [(arm, number) for _, arm, _, _, number, *_ in ledger(lab / "l.db")["places"]]
    assert places == [("base", 0), ("base", 0), ("without_b", 0), ("without_d", 0)]
    base, arm = plan.arms[:2]
    assert [plan.job(base, "confirm", 0, {}, part).seeds for part in (0, 1)] == [(1, 2, 3, 4, 5, 6), (7, 8, 9)]
    assert plan.job(arm, "confirm", 0, {}).seeds == (1, 2, 3, 4, 5, 6)
    in_pairs = planned(write(lab / "pairs.yaml", **{**STUDY, "seeds": 6, "ablate": ["d", "b"]}, tune=None))
    assert in_pairs.job(base, "confirm", 0, {}).key == plan.job(base, "confirm", 0, {}).key, "trained once for both"
    assert in_pairs.identity != plan.identity


def test_the_report_says_which_test_it_has(reported: Callable[..., Report]) -> None:
    found = reported()
    base, *arms = found.tables[0].rows
    groups = [Groups.plain(*([s.score for s in row.scores.values()] for row in (arm, base))) for arm in arms]
    expected = compare_groups(groups, margins=[0.01, 0.01])
    for arm, difference in zip(arms, expected, strict=True):
        assert arm.difference is not None
        assert (arm.difference.mean, arm.difference.p) == (pytest.approx(difference.mean), difference.p)
        assert (arm.difference.n, arm.difference.of_base, arm.by_seed, arm.seeds_needed) == (6, 9, {}, None)
        assert arm.difference.mean == pytest.approx(arm.score.mean - base.score.mean)
    text = found.to_markdown()
    assert "Differences are arm minus base, 6 seeds against 9, not paired." in text
    assert "Welch's test if that is larger, times the number of the study's arms" in text
    assert "paired by seed" not in text
    assert "Arms have different numbers of seeds" not in text
    assert "further look" not in text
    assert json.loads(found.to_json())["tables"][0]["rows"][1]["difference"]["of_base"] == 9
    assert found.to_frame()["difference_of_base"].tolist()[1:] == [9, 9]


def test_another_reference_is_compared_in_pairs_on_the_seeds_that_all_have(reported: Callable[..., Report]) -> None:
    found = reported(against="without_d")
    for row in found.tables[0].rows:
        if row.difference is not None:
            assert (row.difference.n, row.difference.of_base, list(row.by_seed)) == (6, None, [1, 2, 3, 4, 5, 6])
    text = found.to_markdown()
    assert "Differences are arm minus without_d, paired by seed, on the 6 that all have." in text
    assert "the last that both reached" not in text


@pytest.fixture
def planning(
    lab: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`deltalab study plan` of the file: exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        argv = ["platform", "study", "plan", str(lab / "s.yaml"), *words, "--db", str(lab / "none.db")]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_a_plan_says_that_the_base_has_more(
    planning: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_time, "_timed", lambda task, model, spec, runs: 0.01)  # whatever loads the machine
    code, out, _ = planning("--json")
    found = json.loads(out)
    assert code == 0
    assert (found["seeds"], found["seeds_of_base"], found["trials"], found["runs"]) == (6, 9, 4, 21)
    assert (
        "seeds: {arms: 6, base: 9} are not paired; every arm is compared with the base, which so has more."
        in (found["notes"])
    )
    of_base, of_arm = (found["arms"][i]["seconds"] for i in (0, 1))
    assert of_base == pytest.approx(1.5 * of_arm), "the base has half as many runs again"


@pytest.mark.parametrize(
    ("seeds", "says"),
    [
        ("{arms: 1, base: 9}", "seeds.arms must be greater than or equal to 6, not 1"),
        ("{arms: 9, base: 6}", "seeds: base 6 must be more than arms 9"),
    ],
)
def test_too_few_seeds_are_one_line(planning: Callable[..., tuple[int, str, str]], seeds: str, says: str) -> None:
    code, out, err = planning(f"seeds={seeds}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err
