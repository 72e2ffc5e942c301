"""A search with proposals: what a program proposes competes with the samplers, and a bad one costs its own place."""

import json
import os
import re
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.support.folders import ROOT
from tests.support.studies import LEAST

from deltalab import InputError, registry, trust
from deltalab.authoring.quarantine import Quarantined
from deltalab.store import Store
from deltalab.study.planning.make import make_plan
from deltalab.study.running.run import run_study_file
from deltalab.study.searching import evolution, proposers
from deltalab.study.searching.results import candidate_results
from deltalab.study.searching.rivals import Rivals
from deltalab.study.specs.sections.budget import Searching
from deltalab.study.specs.study_file import load_study

STUDY: dict[str, Any] = {
    "name": "proposed",
    **LEAST,
    "search": {
        "rule": {"choice": ["linear_attention", "mamba2", "gla"]},
        "model.layers": {"choice": [1, 2]},
        "train.lr": {"log_uniform": [1e-3, 1e-2]},
        "trials": 24,
        "finalists": 2,
        "trainings": 3,
    },
    "seeds": 2,
}
RULE = (ROOT / "plugins/deltalab_rules/deltanet.py").read_text().replace('"deltanet"', '"proposed_rule"')


def study(**search: Any) -> dict[str, Any]:
    return {**STUDY, "search": {**STUDY["search"], **search}}


def program(folder: Path, code: str) -> str:
    """The command of a program that has the request in `request`."""
    file = folder / "propose.py"
    file.write_text(f"import json, sys\nrequest = json.load(sys.stdin)\n{textwrap.dedent(code)}")
    return f"{sys.executable} {file}"


def drawn(db: Path) -> dict[str, list[dict[str, Any]]]:
    """The candidates of the search by what drew them."""
    with Store.open(db, create=False) as store:
        row = store.study("proposed")
        by_source: dict[str, list[dict[str, Any]]] = {}
        for result in candidate_results(row.spec, store, row.id):
            by_source.setdefault(result.drawn_by, []).append(result.values)
        return by_source


def proposer(folder: Path, command: str) -> proposers.Proposer:
    space = Searching.model_validate({**STUDY["search"], "proposals": command})
    return proposers.Proposer(space, {"study": "proposed", "objectives": [], "base": {}}, folder / "proposals")


POINT = {"rule": "gla", "model.layers": 2, "train.lr": 0.005}


def test_the_proposer_that_ships_competes_with_the_sampler_and_leaves_the_control_alone(lab: Path) -> None:
    result = run_study_file(study(proposals="evolution"), db=lab / "lab.db", executor="inline")
    assert result.state == "done"
    by_source = drawn(lab / "lab.db")
    assert {*by_source} == {"mixed", "random", "proposed"}
    assert len(by_source["random"]) == round(0.2 * 24), "random always has its share"
    assert sum(map(len, by_source.values())) == 24
    assert "proposed candidate" in json.dumps(json.loads(result.report.to_json()))
    again = run_study_file(study(proposals="evolution"), db=lab / "lab.db", executor="inline")
    assert again.known == again.trials


def test_a_search_that_was_killed_goes_on_with_the_same_candidates(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_study_file(study(proposals="evolution"), db=lab / "whole.db", executor="inline")
    calls = Counter[str]()
    record = Store.record_trial

    def killed(self: Store, *words: Any) -> Any:
        calls["trials"] += 1
        if calls["trials"] == 16:
            raise KeyboardInterrupt
        return record(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "record_trial", killed)
        with pytest.raises(KeyboardInterrupt):
            run_study_file(study(proposals="evolution"), db=lab / "killed.db", executor="inline")
    before = drawn(lab / "killed.db")
    assert len(before["proposed"]) >= 2
    run_study_file(study(proposals="evolution"), db=lab / "killed.db", executor="inline")
    assert drawn(lab / "killed.db") == drawn(lab / "whole.db")


def test_a_rule_of_a_program_trains_and_is_confirmed_beside_what_the_samplers_found(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart, too, where the registry knows nothing of the rule."""
    monkeypatch.setattr(proposers, "quarantined", lambda file: Quarantined("proposed_rule", None))
    source = program(
        lab, f"print(json.dumps({{'proposals': [{{'source': {RULE!r}, 'values': {{'model.layers': 2}}}}]}}))"
    )
    given = study(proposals=source, finalists=3)
    with registry.isolated():
        first = run_study_file(given, db=lab / "lab.db", executor="inline")
    proposed = drawn(lab / "lab.db")["proposed"]
    assert {"rule": "proposed_rule", "model.layers": 2} in proposed
    with registry.isolated():
        again = run_study_file(given, db=lab / "lab.db", executor="inline")
    assert again.known == again.trials == first.trials
    assert again.failed == 0
    assert again.report.to_json() == first.report.to_json()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('hello')", "no answer"),
        ("sys.exit(3)", "ended with exit code 3"),
        ("print(json.dumps([1]))", r'must be {"proposals": \[...\]}'),
        ("while True: pass", "did not end within 1 s"),
        ("while True: print('x' * 10**6)", "ended with exit code"),
        ("print(json.dumps({'proposals': [7]}))", "must be a mapping, not 7"),
        ("print(json.dumps({'proposals': [{'value': {}}]}))", "unknown key 'value'; did you mean 'values'"),
        ("print(json.dumps({'proposals': [{'values': {'model.layer': 1}}]}))", "did you mean 'model.layers'"),
        ("print(json.dumps({'proposals': [{'values': {'rule': 'comba'}}]}))", "is no point of the space"),
        ("print(json.dumps({'proposals': [{'source': 'x = 1'}]}))", "defines no UpdateRule"),
        ("print(json.dumps({'proposals': [{'source': '', 'values': {'rule': 'gla'}}]}))", "beside it"),
        ("print(json.dumps({'proposals': [{'source': '', 'values': {'model.layers': 7}}]}))", "must be one of 1, 2"),
    ],
)
def test_what_a_program_does_wrong_is_one_line_and_no_candidate(
    lab: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str, said: str
) -> None:
    monkeypatch.setattr(proposers, "SECONDS", 1.0 if "while True: pass" in code else 60.0)
    asked = proposer(lab, program(lab, code))
    assert asked.next(0, [], []) is None
    (line,) = caplog.messages
    assert re.search(said, line), line
    assert "\n" not in line


def test_a_program_that_keeps_failing_is_asked_no_more(lab: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = proposer(lab, program(lab, "open(sys.argv[0] + '.calls', 'a').write('x')\nprint('no')"))
    assert [asked.next(0, [], []) for _ in range(6)] == [None] * 6
    assert (lab / "propose.py.calls").read_text() == "xxx"
    assert "no more are made" in caplog.messages[-1]


def test_the_processes_that_a_program_leaves_behind_end_with_it(lab: Path) -> None:
    code = """
    import os, time
    if os.fork() == 0:
        open(sys.argv[0] + '.pid', 'w').write(str(os.getpid()))
        time.sleep(60)
    time.sleep(0.5)
    print(json.dumps({'proposals': [{'values': %r}]}))
    """
    assert proposer(lab, program(lab, code % POINT)).next(0, [], []) == POINT
    pid = int((lab / "propose.py.pid").read_text())
    for _ in range(50):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("the child lives on")


def test_a_function_is_asked_as_a_program_is(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may print what it likes, and gets the front with its scores."""
    lines = "print('hello')", "return {'proposals': [{'values': request['front'][0]['values']}]}"
    (lab / "mine.py").write_text("def propose(request):\n" + "".join(f"    {line}\n" for line in lines))
    asked = proposer(lab, "mine:propose")
    assert asked.next(0, [{"values": POINT, "scores": {"accuracy@mqar": 0.5}}], []) == POINT


@pytest.mark.parametrize("form", ["mine:propose", "random:propose", "{python} mine.py"])
def test_a_file_of_the_working_folder_takes_no_librarys_place(
    form: str, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the file that is named. One beside it is found where no library has its name."""
    for name in ("json", "random", "torch", "yaml", "sitecustomize", "usercustomize"):
        (lab / f"{name}.py").write_text(f"open({str(lab / 'ran')!r}, 'a').write({name!r})")
    (lab / "besides.py").write_text(f"VALUES = {POINT!r}")
    named = lab / ("random.py" if form.startswith("random") else "mine.py")
    named.write_text("import besides, random, yaml\ndef propose(request):\n    random.random\n    yaml.safe_load\n"
                     "    return {'proposals': [{'values': besides.VALUES}]}\n")  # fmt: skip
    if "python" in form:  # whose folder Python itself puts first: what it imports lies in another one
        (lab / "other").mkdir()
        code = f"import json, random, yaml\nprint(json.dumps({{'proposals': [{{'values': {POINT!r}}}]}}))"
        (lab / "other" / "mine.py").write_text(code)
        form = f"{sys.executable} {lab / 'other' / 'mine.py'}"
    assert proposer(lab, form).next(0, [], []) == POINT
    assert not (lab / "ran").exists()


def test_children_are_points_of_the_space_and_new() -> None:
    space = Searching.model_validate(STUDY["search"])
    knobs = {path: knob.model_dump(mode="json") for path, knob in space.searched.items()}
    other = {"rule": "mamba2", "model.layers": 1, "train.lr": 0.002}
    request = {"space": knobs, "front": [{"values": POINT}, {"values": other}], "tried": [POINT, other], "wanted": 40}
    children = [child["values"] for child in evolution.propose({**request, "seed": 1})["proposals"]]
    assert len(children) == 40
    assert all(space.drawn(child) is not None and child not in (POINT, other) for child in children)
    from_both = [child for child in children if child["train.lr"] == 0.002 and child["model.layers"] == 2]
    assert from_both, "crossover takes knobs of both parents"
    assert evolution.propose({**request, "front": [], "seed": 1}) == {"proposals": []}


def test_places_go_to_who_finds_more() -> None:
    rivals = Rivals("search")
    for step in range(30):
        rivals.learn("proposed", (-float(step), 0.0), None)
        rivals.learn("sampler", (1.0, 1.0), None)
    turns = Counter(rivals.turn(number) for number in range(1000))
    assert turns["proposed"] > 950
    assert [point for point, _ in rivals.front] == [(-29.0, 0.0)]


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"proposals": ""}, "proposals: is empty"),
        ({"proposals": "no-such-program --fast"}, "unknown command 'no-such-program'"),
        ({"proposals": "evolutio"}, "did you mean 'evolution'"),
        ({"proposals": "python 'x"}, "proposals: is no command: No closing quotation"),
        ({"proposals": "evolution", "sampler": "random"}, "proposals: compete with a sampler"),
        ({"proposal": "evolution"}, "did you mean 'proposals'"),
    ],
)
def test_wrong_proposals_are_refused_at_planning(search: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)) as refused:
        make_plan(load_study(study(**search)))
    assert "\n" not in str(refused.value)


def test_a_program_of_a_file_runs_where_its_folder_is_trusted(lab: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(lab / "config"))
    monkeypatch.setenv("DELTALAB_TRUST", "")
    file = lab / "foreign.yaml"
    file.write_text(json.dumps(study(proposals=f"touch {lab / 'ran'}")))
    said = r"foreign.yaml: its search.proposals runs a program, and its folder is not"
    with pytest.raises(InputError, match=said) as refused:
        run_study_file(file, db=lab / "lab.db", executor="inline")
    assert refused.value.mend == f"read it, then `deltalab trust {lab}` lets it run"
    assert not (lab / "ran").exists()
    trust.record(lab)
    assert run_study_file(file, db=lab / "lab.db", executor="inline", unchecked=True).state == "done"
    assert (lab / "ran").exists()


def test_a_function_of_a_working_folder_that_is_not_trusted_does_not_run(
    lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(lab / "config"))
    monkeypatch.setenv("DELTALAB_TRUST", str(lab / "studies"))
    (lab / "studies").mkdir()
    file = lab / "studies" / "s.yaml"
    file.write_text(json.dumps(study(proposals="mine:propose")))
    (lab / "mine.py").write_text(f"open({str(lab / 'ran')!r}, 'w')")
    with pytest.raises(InputError, match=r"mine\.py: search\.proposals 'mine:propose' runs it"):
        run_study_file(file, db=lab / "lab.db", executor="inline")
    assert not (lab / "ran").exists()


def test_evolution_waits_for_the_first_result(tmp_path: Path) -> None:
    asked = proposer(tmp_path, "evolution")
    assert [asked.next(number, [], []) for number in range(5)] == [None] * 5
    assert asked.next(5, [{"values": POINT, "scores": {}}], [POINT]) is not None


def test_a_program_that_fails_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = program(tmp_path, "sys.exit('no key for the model')")
    assert proposer(tmp_path, command).next(0, [], []) is None
    assert "ended with exit code 1: no key for the model" in caplog.text
