"""Placing attention: which placements train, what a second call costs, and what is refused."""

import json
import math
import re
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.folders import STUDIES
from tests.support.studies import LEAST

from deltalab import InputError
from deltalab.cli.app import main
from deltalab.store import RunRecord, Store, TrialRecord
from deltalab.study.placing import place as placing
from deltalab.study.placing import placements
from deltalab.study.placing.hybrid import hybrid_of
from deltalab.study.placing.placements import confirmed, ranked, scored_placements
from deltalab.study.placing.supernet import Supernet
from deltalab.study.running.settings import RunSettings
from deltalab.study.workers.jobs import Job
from deltalab.study.workers.train_stack import Start, _record

BASE = {**LEAST["base"], "model": {**LEAST["base"]["model"], "layers": 4, "attention": [1, 3]}}
STUDY: dict[str, Any] = {"name": "hybrid", "task": LEAST["task"], "base": BASE, "seeds": 2}


def gain(placement: Sequence[int]) -> float:
    """The accuracy of a placement: layer 0 matters most."""
    return 0.9 - 0.1 * sum(placement) - 0.01 * max(placement)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were asked for, which all have the accuracy that `gain` says."""
    jobs: list[Job] = []

    def execute(worker: object, stack: Sequence[Job], *_: object) -> list[TrialRecord]:
        jobs.extend(stack)
        records = []
        for job in stack:
            value = gain(job.config["model"]["attention"])
            metrics = [(split, "accuracy", 4, value) for split in ("validation", "test")]
            runs = [RunRecord(seed, "done", None, metrics, []) for seed in job.seeds]
            records.append(_record(job, Start.now(), 1, runs=runs))
        return records

    monkeypatch.setattr("deltalab.study.workers.worker.Worker.execute", execute)
    return jobs


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The placements that a supernet was asked for, which has all right but that it takes the best for the worst."""
    asked: list[tuple[int, ...]] = []

    class Fake:
        def __init__(self, *_: object) -> None:
            self.device = torch.device("cpu")

        def advance(self, *_: object) -> None:
            pass

        def score(self, placement: tuple[int, ...]) -> float:
            asked.append(placement)
            return 0.0 if placement == (0, 1) else gain(placement)

    monkeypatch.setattr(placing, "Supernet", Fake)
    return asked


def settings(folder: Path) -> RunSettings:
    return RunSettings(db=folder / "placed.db", executor="inline")


def test_the_best_others_and_the_worst_train_as_arms(
    trained: list[Job], scored: list[tuple[int, ...]], tmp_path: Path
) -> None:
    found = placing.place(STUDY, settings(tmp_path), best=2, spread=2)
    assert scored == [*combinations(range(4), 2)]
    assert (found.possible, found.scored, found.layers) == (6, 6, 4)
    # The order of the supernet: (0, 2), (0, 3) or (1, 2) by the larger layer, ..., and (0, 1) last.
    assert [(arm.name, arm.placement, arm.rank) for arm in found.arms] == [
        ("base", (1, 3), 4),
        ("rank_1", (0, 2), 1),
        ("rank_2", (1, 2), 2),
        ("rank_5", (2, 3), 5),
        ("rank_6", (0, 1), 6),
    ]
    assert {tuple(job.config["model"]["attention"]) for job in trained} == {arm.placement for arm in found.arms}
    for arm in found.arms:
        assert arm.trained == pytest.approx(gain(arm.placement))
    # The trained order is rank_6, rank_1, rank_2, base, rank_5: d^2 sums to 16 + 3 * 1 + 1.
    assert found.correlation == pytest.approx(1 - 6 * 20 / (5 * 24))
    assert found.study == "hybrid.placed"
    with Store.open(tmp_path / "placed.db") as store:
        assert [study.name for study in store.studies()] == ["hybrid.placed"]


def test_a_second_call_trains_and_scores_nothing(
    trained: list[Job], scored: list[tuple[int, ...]], tmp_path: Path
) -> None:
    first = placing.place(STUDY, settings(tmp_path), best=2, spread=2)
    jobs = len(trained)
    again = placing.place(STUDY, settings(tmp_path), best=2, spread=2)
    assert (len(trained), len(scored)) == (jobs, 6)
    assert again.to_json() == first.to_json()
    placing.place(STUDY, settings(tmp_path), best=2, spread=2, steps=3)  # another supernet
    assert (len(trained), len(scored)) == (jobs, 12)


def test_a_kill_while_placements_are_scored_loses_few_scores(
    trained: list[Job], scored: list[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = placing.Supernet.score

    def dying(self: Any, placement: tuple[int, ...]) -> float:
        if len(scored) == 4:
            raise KeyboardInterrupt
        return whole(self, placement)

    monkeypatch.setattr(placing.Supernet, "score", dying)
    with pytest.raises(KeyboardInterrupt):
        placing.place(STUDY, settings(tmp_path))
    monkeypatch.setattr(placing.Supernet, "score", whole)
    placing.place(STUDY, settings(tmp_path))
    assert scored == [*combinations(range(4), 2)]


def test_a_supernet_goes_on_from_its_checkpoint_after_a_kill(
    trained: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    advance, score = Supernet.advance, Supernet.score

    def noted(self: Supernet, *calls: Any) -> None:
        steps.append(self.step)
        advance(self, *calls)

    def dying(self: Supernet, placement: tuple[int, ...]) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(Supernet, "advance", noted)
    monkeypatch.setattr(Supernet, "score", dying)
    with pytest.raises(KeyboardInterrupt):
        placing.place(STUDY, settings(tmp_path))
    assert [file.suffix for file in (tmp_path / "placements").iterdir()] == [".pt"]
    monkeypatch.setattr(Supernet, "score", score)
    placing.place(STUDY, settings(tmp_path))
    assert steps == [0, 4]
    assert [file.suffix for file in (tmp_path / "placements").iterdir()] == [".json"]


def test_a_damaged_checkpoint_starts_over(trained: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supernet, "score", lambda self, placement: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        placing.place(STUDY, settings(tmp_path))
    (file,) = (tmp_path / "placements").iterdir()
    file.write_bytes(file.read_bytes()[:100])
    monkeypatch.undo()
    steps: list[int] = []
    advance = Supernet.advance
    monkeypatch.setattr(Supernet, "advance", lambda self, *calls: (steps.append(self.step), advance(self, *calls)))
    monkeypatch.setattr(placing, "_trained", lambda *_: ("hybrid.placed", {}, None))
    placing.place(STUDY, settings(tmp_path))
    assert steps == [0]


def test_all_placements_are_scored_if_few_and_the_best_is_found_if_many(monkeypatch: pytest.MonkeyPatch) -> None:
    best = (3, 8, 21, 30)
    loss = lambda placement: sum(abs(a - b) for a, b in zip(placement, best, strict=True))  # noqa: E731
    found = scored_placements(40, 4, (9, 19, 29, 39), loss)
    assert len(found) == placements.MOST_SCORED
    assert loss(ranked(found)[0]) <= 4, "40 choose 4 is 91,390, of which 500 at random come no nearer than about 8"
    flat = scored_placements(40, 4, (9, 19, 29, 39), lambda placement: math.nan)
    assert len(flat) == placements.MOST_SCORED


def test_the_base_trains_once_and_the_worst_always() -> None:
    order = [(n,) for n in range(6)]
    assert confirmed(order, (0,), best=1, spread=1) == [(1,), (5,)]
    assert confirmed(order, (5,), best=1, spread=1) == [(0,), (4,)]
    assert confirmed(order, (3,), best=9, spread=1) == [(0,), (1,), (2,), (4,), (5,)]
    assert ranked({(0,): math.nan, (1,): 2.0, (2,): 1.0}) == [(2,), (1,), (0,)]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"base": LEAST["base"]}, "base: model.layers: one layer leaves no choice: give at least 2"),
        ({"base": {**BASE, "model": {**BASE["model"], "attention": []}}}, "names 0 of 4 layers: name those"),
        ({"base": {**BASE, "model": {**BASE["model"], "attention": [0, 1, 2, 3]}}}, "names 4 of 4 layers"),
        ({"base": {**BASE, "model": {"layers": ["rule", "attention"], "d_model": 8}}}, "model.layers lists its layers"),
        ({"base": {**BASE, "rule": "attention"}}, "base: rule: all layers are attention"),
        ({"base": {**BASE, "model": {**BASE["model"], "beside": "gla"}}}, "model.beside: a layer has one mixer"),
        ({"base": {**BASE, "train": {**BASE["train"], "seconds": 3}}}, "train.seconds: a supernet trains for steps"),
        ({"task": {"mqar": LEAST["task"]["mqar"], "parity": {}}}, "task: attention is placed for one task"),
        ({"tune": {"model.layers": {"choice": [4, 6]}, "trials": 2}}, "tune: model.layers changes what a placement is"),
        ({"scales": {"model.d_model": [8, 16]}}, "scales: placements are confirmed at one size"),
        ({"search": {"train.lr": {"log_uniform": [1e-3, 1e-2]}, "trials": 4}}, "search: the supernet searches"),
        ({"arms": {"rank_1": {"model": {"attention": [0, 1]}}}}, "arms.rank_1: placements have such names"),
    ],
)
def test_what_cannot_be_placed_is_refused_in_one_line(
    change: dict[str, Any], line: str, trained: list[Job], scored: list[tuple[int, ...]], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(line)) as refused:
        placing.place({**STUDY, **change}, settings(tmp_path))
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith("study: ")
    assert (trained, scored) == ([], [])


def test_a_supernet_has_as_many_steps_as_a_training_may_have(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^--steps: train\.steps must be at most"):
        placing.place(STUDY, settings(tmp_path), steps=10**12)


def test_the_command_prints_json_alone(
    trained: list[Job],
    scored: list[tuple[int, ...]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, db = tmp_path / "hybrid.yaml", tmp_path / "placed.db"
    file.write_text(json.dumps(STUDY))
    words = ["deltalab", "place", str(file), "--db", str(db), "--executor", "inline", "--best", "1", "--spread", "1"]
    monkeypatch.setattr("sys.argv", [*words, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 0
    found = json.loads(said.out)
    assert [arm["name"] for arm in found["arms"]] == ["base", "rank_1", "rank_6"]
    assert (found["study"], found["metric"], found["scored"]) == ("hybrid.placed", "accuracy", 6)
    assert "placements scored: 6 of at most 6" in said.err
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert "Rank correlation of both scores over these 3 placements: -0.50" in out
    assert "more is better; all were scored" in out


def test_the_shipped_study_can_be_placed() -> None:
    from deltalab.study.planning.make import plan_study

    for profile in (None, "gpu"):
        model, _ = hybrid_of(plan_study(STUDIES / "placement.yaml", profile=profile))
        assert 1 < math.comb(model.depth, len(model.attention)) <= placements.MOST_SCORED
