"""What an evaluation is said to report before it is asked is what it reports."""

from dataclasses import replace
from pathlib import Path

import pytest

from deltalab.data.token_shards import Packed
from deltalab.errors import InputError
from deltalab.evaluation.evaluate import evaluate
from deltalab.evaluation.metric_names import Evaluated, metric_names
from deltalab.evaluation.model_folder import open_model
from deltalab.evaluation.results import OWN
from deltalab.evaluation.suites.measure import SuiteOptions, measure

pytest.importorskip("transformers")


def pairs(asked: Evaluated) -> set[tuple[str, str]]:
    found, of_harness = metric_names(asked)
    assert of_harness == []
    return set(found)


@pytest.mark.parametrize("length", [16, 150])
def test_our_tasks_report_these_names(folder: Path, data: Path, length: int) -> None:
    asked = Evaluated([name for name in OWN if name != "proxy"], Packed(data), "test", length, limit=2)
    if length == 16:  # no needle fits, which its evaluation refuses
        asked = replace(asked, names=["loss", "lm"])
    with open_model(str(folder)) as model:
        names = [name for name in asked.names if name != "lm"]
        found = evaluate(model, names, data=asked.data, split="test", length=length, limit=2)
    assert pairs(asked) == {(result.task, result.metric) for result in found}


@pytest.mark.parametrize("names", [["lm", "ruler"], ["ruler/vt", "ruler/niah_single_2"]])
def test_suites_report_these_names(folder: Path, data: Path, names: list[str]) -> None:
    asked = Evaluated(names, Packed(data), "test", 64, lengths=(120, 1800), limit=1)
    if "lm" in names:
        asked = replace(asked, lengths=())
    with open_model(str(folder)) as model:
        options = SuiteOptions(asked.data, "test", 64, asked.lengths, 1)
        found, left_out, _ = measure(model, names, options)
    told = pairs(asked)
    assert told == {(result.task, result.metric) for result in found}
    if "lm" in names:
        assert {"ruler/qa_1", "ruler/qa_2"} < set(left_out), "no file, or no room"
        assert {task for task, metric in told if metric.startswith("mean_of_")} == {"ruler"}
    else:
        assert {name.rpartition("@")[2] for _, name in told} == {"1800"}, "120 tokens are too few"


def test_suites_of_data_sets_report_these_names(data: Path) -> None:
    of_one = Evaluated(["recall/nq", "zero_shot/lambada_openai"], Packed(data), "test", 64, lengths=())
    assert pairs(of_one) == {
        ("recall/nq", "contains@1000"),
        ("lambada_openai", "acc"),
        ("lambada_openai", "perplexity"),
    }
    whole = replace(of_one, names=["recall_twice"], lengths=(512, 2000))
    means = {(task, metric) for task, metric in pairs(whole) if task == "recall_twice"}
    assert means == {("recall_twice", "mean@512"), ("recall_twice", "mean@2000")}
    assert len(pairs(whole)) == 2 * (6 + 1)


def test_of_a_task_of_the_harness_the_name_alone_is_known(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("task: mine\n")
    asked = Evaluated(["arc_easy", str(tmp_path / "a.yaml")], Packed(data), "test", 64)
    assert metric_names(asked) == ([], ["arc_easy", "mine"])


def test_a_suite_that_would_ask_nothing_is_refused_with_the_reason(data: Path) -> None:
    asked = Evaluated(["ruler/qa_1", "ruler/vt"], Packed(data), "test", 64, lengths=(64,))
    with pytest.raises(InputError) as refused:
        metric_names(asked)
    assert "ruler/vt@64: its shortest text does not fit into 64 tokens, but into" in str(refused.value)
    assert "ruler/qa_1@64: it needs dev-v2.0.json: give --files DIR with it" in str(refused.value)
