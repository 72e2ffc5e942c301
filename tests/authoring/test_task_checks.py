"""Each planted bug of a task fails its own check; a new task file goes from `task new` to a study's report."""

import json
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.support import folders
from tests.support.examples import example

from deltalab import check_task, registry
from deltalab.authoring.check import CheckResult
from deltalab.authoring.files.scaffold import new_task
from deltalab.authoring.task_checks import task_suite
from deltalab.authoring.task_checks.task_suite import CHECKS
from deltalab.cli.app import main
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study
from deltalab.study.workers.jobs import Job
from deltalab.tasks import BUILTIN, IGNORE, MQAR, Batch, Random, Task

PLANTED = folders.PLANTED / "tasks"

# File -> the checks that must fail, and a part of the first one's message. All others must pass.
CAUGHT: dict[str, tuple[list[str], str]] = {
    "answer_before_the_query": (["near inputs", "facts"], "validation that the input 1 positions before names"),
    "answer_in_code": (
        ["near inputs", "classes", "facts"],
        "that the input at the same position decides, whatever precedes it, is 1",
    ),
    "answer_is_first": (
        ["one input", "facts"],
        "that the input at position 1 names, beyond the share in other examples, is 1",
    ),
    "a_coin_in_the_answer": (["knowable"], "the inputs up to a scored position do not decide its target"),
    "answer_at_a_distance": (
        ["distances", "chance", "facts"],
        "that the input 7 positions before names, beyond chance",
    ),
    "asked_in_order": (["one input"], "that the input at a position decided by the question's turn names"),
    "smallest_token": (["classes"], "that the smallest token decides"),
    "one_answer_for_a_batch": (["order"], "with the first answer of another of their batch, beyond other batches"),
    "answers_by_length": (["classes", "streams", "splits"], "the number of tokens beside the most frequent decides"),
    "eight_examples": (["fixed answers", "streams", "alike"], "validation has only 8 different examples among 512"),
    "facts_of_all": (["facts"], "the input at their position and the one at place 0 gave in training is 1"),
    "sorted_answers": (["order", "most scored", "fixed answers"], "`draw` sorts the answers of an example"),
    "sorted_by_class": (["order", "classes"], "`draw` sorts examples by their answers: shuffle them"),
    "test_is_another_seed": (["own streams"], "takes the evaluation's examples from the stream of training"),
    "validation_is_late_training": (["own streams"], "number of streams that validation and training draw from"),
    "answers_by_place": (
        ["fixed answers", "order"],
        "for the most frequent answer at each position, 1, beyond `chance` 0.0312",
    ),
    "answers_of_another": (["knowable"], "give such positions the target IGNORE"),
    "asks_for_what_was_not_said": (["knowable"], "the inputs up to a scored position do not decide its target"),
    "beyond_vocabulary": (["token range"], "outside [0, vocab_size = 64) in train, [64], is 1"),
    "by_the_host": (
        ["device"],
        "drawing train on a device, RuntimeError: Tensor.item() cannot be called on meta tensors",
    ),
    "chance_of_a_word": (["chance"], "`chance` 0.25 from the metric of guesses, 0.0155 to 0.0308"),
    "counts_calls": (["repeatability"], "number of tokens that differ in a batch drawn again from"),
    "easier_test": (["alike"], "`draw` makes the test split easier or harder than validation"),
    "easier_than_training": (["alike"], "`draw` makes validation easier than training"),
    "facts_of_a_split": (
        ["knowable", "near inputs", "classes"],
        "the inputs up to a scored position do not decide its target",
    ),
    "global_generator": (["repeatability"], "`draw` uses randomness other than its argument `random`"),
    "grows": (["parameters", "repeatability"], "`__post_init__` changes a parameter"),
    "image_of_few": (["streams"], "`draw` takes examples from a small number of them: say so by `train_examples`"),
    "image_of_training": (["splits", "streams"], "share of examples of validation that are also in train is"),
    "image_sorted": (["order"], "with the first answer of another of their batch, beyond other batches"),
    "loss_in_bits": (["loss"], "'loss' is in bits: leave out the division by log 2"),
    "loss_over_all": (["loss"], "'loss' counts positions whose target is IGNORE"),
    "mean_of_means": (["sums"], "`measure` returns a mean instead of a total"),
    "mixed_rows": (["sums"], "relative difference of the total of 'accuracy'"),
    "narrow_bounds": (["metrics"], "mismatch between `bounds` (0.5, 1.0) and the `metric` of a guess"),
    "near_copies": (
        ["near copies"],
        "that differ from one of training in 1 or 2 tokens, beyond the 0 of training itself",
    ),
    "new_tokens_in_test": (["vocabulary"], "share of answers of test that training does not have is 0.5"),
    "next_token": (["perfect"], "difference of 'accuracy' for the right answers, 0, from 1 is 1"),
    "no_loss": (["metrics", "loss"], "missing metrics, ['loss']"),
    "no_number": (["declaration"], "mismatch between `version` (a whole number of at least 1) and '1.0' is 1"),
    "no_targets": (["scored", "vocabulary"], "every target is IGNORE"),
    "noisy_answers": (["knowable"], "the inputs up to a scored position do not decide its target"),
    "one_longer": (["form"], "the inputs of train ([1, 33] torch.int64 on cpu) and the required form ([1, 32] torch"),
    "other_seed_for_test": (["streams", "own streams"], "are those of training, moved by a number"),
    "other_vocabulary": (
        ["declaration", "token range", "metrics", "sums", "loss", "chance"],
        "`vocab_size`",
    ),
    "raises": (
        ["form", "device"],
        "raised NotImplementedError: no test split yet (raises.py:13); 22 checks raised it: form, token range",
    ),
    "ranks_rows": (["pool"], "`draw` lets a row depend on more than the same row"),
    "repeats_batches": (["streams"], "share of training examples that occur at other seeds or steps"),
    "said_too_late": (["knowable"], "the inputs up to a scored position do not decide its target"),
    "same_batches": (["addresses", "streams", "fixed answers"], "`draw` does not use its argument `random`"),
    "same_splits": (
        ["splits", "streams", "own streams"],
        "share of examples of validation that are also in train is 1",
    ),
    "scores_more": (["most scored"], "number of scored positions of a training example above 3 is 1"),
    "scores_padding": (
        ["fixed answers", "most scored", "near inputs"],
        "for the answer 0 everywhere, 0.833, beyond `chance`",
    ),
    "seed_plus_step": (["streams", "addresses", "fixed answers"], "training examples that occur at other seeds or"),
    "shifted_twice": (
        ["shift"],
        "2 positions later is 1, must be at most 0.99; likely cause: targets are shifted twice",
    ),
    "skewed_answers": (["fixed answers"], "for the answer 63 everywhere"),
    "small_pool": (["streams"], "`draw` takes examples from a small number of them"),
    "smoothed_loss": (["loss", "perfect"], "`measure` computes another loss: take `surprisal(batch, logits)`"),
    "squared_loss": (["loss"], "`measure` computes another loss: take `surprisal(batch, logits)`"),
    "token_changed": (["near copies", "own streams", "splits"], "by changing a few tokens: draw each anew"),
    "unshifted": (
        ["shift", "near inputs", "classes", "facts"],
        "a target is the input token at its own position: targets are not shifted",
    ),
}
IN_ANOTHER_PROCESS = "hashes_text"
"""The planted task that is the same whenever this process draws it."""


@pytest.fixture(autouse=True)
def one_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares other tests the seconds in which another process imports torch."""
    if "process" not in request.node.name:
        monkeypatch.setattr(task_suite, "CHECKS", tuple(check for check in CHECKS if check.name != "processes"))


def planted(name: str) -> Task:
    """The task of a file, without the registry."""
    kinds = [x for x in runpy.run_path(str(PLANTED / f"{name}.py")).values() if isinstance(x, type)]
    [kind] = [x for x in kinds if issubclass(x, Task) and getattr(x, "name", "").startswith("planted")]
    return kind(**({"length": 96} if kind.example == {} else kind.example))


def failures(results: list[CheckResult]) -> dict[str, CheckResult]:
    return {result.name: result for result in results if not result.passed}


def test_every_planted_file_is_expected_to_be_caught() -> None:
    assert {file.stem for file in PLANTED.glob("*.py")} == {*CAUGHT, IN_ANOTHER_PROCESS}


@pytest.mark.slow(keep="chance_of_a_word")
@pytest.mark.parametrize("name", CAUGHT)
def test_planted_bug_is_caught_by_its_check_and_by_no_other(name: str) -> None:
    names, message = CAUGHT[name]
    failed = failures(check_task(planted(name)))
    assert set(failed) == set(names)
    assert message in failed[names[0]].message


def test_every_check_has_a_bug_that_it_catches() -> None:
    assert {check for name, (checks, _) in CAUGHT.items() if name != "raises" for check in checks} == {
        check.name for check in CHECKS
    } - {"processes"}


@pytest.mark.slow
def test_a_batch_that_another_process_draws_differently_is_caught() -> None:
    failed = failures(check_task(planted(IN_ANOTHER_PROCESS)))
    assert set(failed) == {"processes"}
    assert "`draw` uses `hash` of a text or the order of a set" in failed["processes"].message


@pytest.mark.slow
def test_another_process_draws_the_same_batches_of_a_builtin_task() -> None:
    parity = registry.get_task("parity")
    assert "processes" in {result.name for result in check_task(parity) if result.passed}


@pytest.mark.slow(keep="mqar")
@pytest.mark.parametrize("name", BUILTIN)
def test_builtin_tasks_pass(name: str) -> None:
    assert [
        result.message for result in check_task(registry.get_task(name, **example(name))) if not result.passed
    ] == []


def test_what_does_not_apply_is_left_out() -> None:
    listed = {result.name for result in check_task(MQAR(length=32, pairs=4, vocab_size=64))}
    assert {check.name for check in CHECKS} - listed == {"pool", "processes"}


def test_global_generators_are_left_as_they_were() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    check_task(MQAR(length=32, pairs=4, vocab_size=64))
    after = torch.rand(()), np.random.rand(), random.random()
    torch.manual_seed(7)
    np.random.seed(7)
    random.seed(7)
    assert after == (torch.rand(()), np.random.rand(), random.random())


@dataclass(frozen=True, kw_only=True)
class Longer(MQAR):
    """A task with one training length and two evaluation lengths; the longer one has no targets if `wrong`."""

    name: ClassVar[str] = "longer"
    wrong: bool = False

    def evaluations(self) -> dict[str, Task]:
        return {"32": self, "64": replace(self, length=64, wrong=True) if self.wrong else replace(self, length=64)}

    def draw(self, split: str, size: int, random: Random) -> Batch:
        batch = super().draw(split, size, random)
        if self.wrong and self.length == 64:
            batch.targets.fill_(IGNORE)
        return batch


@pytest.mark.slow
def test_what_a_task_is_evaluated_on_is_checked_too() -> None:
    right = Longer(length=32, pairs=4, vocab_size=64)
    assert failures(check_task(right)) == {}
    assert "scored" in failures(check_task(replace(right, wrong=True)))


# --- a stranger's file --------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with its own plugins."""
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield tmp_path


@pytest.fixture
def platform(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs the command in this process; returns its exit code, stdout and stderr."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["platform", *map(str, words)])
        registry.refresh()
        with pytest.raises(SystemExit) as ended:
            main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


STUDY = """
name: mine
task: {my_copy: {tokens: 4, vocab_size: 8}}
base:
  rule: deltanet
  model: {d_model: 8, layers: 1, heads: 1, mlp: false}
  train: {steps: 4, batch_size: 4, lr: 1e-2, evaluations: 2, eval_batches: 1}
arms: {linear: {rule: linear_attention}}
seeds: 2
"""


@pytest.mark.slow
def test_a_new_task_passes_its_checks_and_stands_in_a_study(platform: Callable[..., Any], here: Path) -> None:
    code, out, _ = platform("task", "new", "my_copy")
    assert (code, out) == (0, "plugins/my_copy.py: change it, then: deltalab task check plugins/my_copy.py\n")
    for words in (("my_copy",), ("plugins/my_copy.py",), ("my_copy", "tokens=20", "vocab_size=9")):
        code, out, _ = platform("task", "check", *words, "--json")
        found = json.loads(out)
        assert (code, found["task"]) == (0, "my_copy")
        assert [check["message"] for check in found["checks"] if not check["passed"]] == []
    code, out, _ = platform("task", "show", "plugins/my_copy.py", "tokens=3", "--json")
    shown = json.loads(out)
    assert shown["inputs"] == [*shown["targets"][3:], 0, *shown["targets"][3:5]]
    assert "my_copy" in platform("task", "list")[1]
    (here / "study.yaml").write_text(STUDY)
    code, out, err = platform("study", "run", "study.yaml", "--executor", "inline", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert [table["task"] for table in report["tables"]] == ["my_copy"]


def test_a_changed_task_is_another_trial(here: Path) -> None:
    (here / "study.yaml").write_text(STUDY)

    def planned() -> Job:
        registry.refresh()
        plan = make_plan(load_study(here / "study.yaml"))
        return plan.job(plan.arms[0], "confirm", 0, {})

    file = new_task("my_copy")
    before = planned()
    assert planned().key == before.key
    file.write_text(file.read_text() + "\n# other data, same version\n")
    with registry.isolated():
        assert planned().key != before.key


def test_a_task_of_any_file_is_found_by_the_option(platform: Callable[..., Any], here: Path) -> None:
    new_task("elsewhere", here / "somewhere")
    code, _, err = platform("task", "check", "elsewhere")
    assert code == 2
    assert "unknown task 'elsewhere'" in err
    assert platform("--plugin", "somewhere/elsewhere.py", "task", "check", "elsewhere")[0] == 0


def test_a_task_of_an_installed_package_is_found_by_its_entry_point(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_task("packaged", here / "their_tasks")
    (here / "their_tasks" / "__init__.py").touch()
    (here / "theirs-1.dist-info").mkdir()
    (here / "theirs-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (here / "theirs-1.dist-info" / "entry_points.txt").write_text("[deltalab.tasks]\ntheirs = their_tasks\n")
    monkeypatch.syspath_prepend(here)
    registry.refresh()
    assert "packaged" in registry.list_tasks()
    assert registry.task_plugin("packaged").file == here / "their_tasks" / "packaged.py"


def test_a_failed_check_is_exit_1(platform: Callable[..., Any], here: Path) -> None:
    file = new_task("leaky", here)
    file.write_text(
        file.read_text().replace(
            "again = torch.cat([torch.zeros_like(said[:, :1]), said[:, :-1]], dim=1)", "again = said"
        )
    )
    code, out, err = platform("task", "check", "leaky.py")
    assert (code, err) == (1, "")
    assert "FAILED  shift" in out
    assert "targets are not shifted" in " ".join(out.split())


RULE = """
from dataclasses import dataclass
from typing import ClassVar
from deltalab.rule import UpdateRule
class Mine(UpdateRule):
    name: ClassVar[str] = "mine"
"""

WRONG = [
    ("task check mqra", "", "", "unknown task 'mqra'; did you mean 'mqar'?"),
    ("task check nope.py", "", "", "nope.py: no such plugin file"),
    ("task check mqar length=30 pairs=8", "", "", "parameter 'length' must be at least 4 x pairs = 32, not 30"),
    ("task check mqar pair=8", "", "", "unknown parameter 'pair'; did you mean 'pairs'?"),
    ("task check mqar pairs", "", "", "'pairs': give settings as KEY=VALUE"),
    ("task new mqar", "", "", "there is a task 'mqar' already: take another name"),
    ("task new 3x", "", "", "'3x' cannot name a task: take letters, digits and _, a letter first, as in my_task"),
    ("task new mine", "", "", "mine.py exists already"),
    ("task check mine.py", "version: ClassVar[int]", "other: ClassVar[int]", "Mine needs version"),
    ("task check mine.py", "metric: ClassVar[str]", "other: ClassVar[str]", "Mine needs metric"),
    (
        "task check mine.py",
        "def draw",
        "def drawn",
        "task 'mine' cannot be made: TypeError: Can't instantiate abstract",
    ),
    ("task check mine.py", "@dataclass(frozen=True, kw_only=True)\n", "", "task 'mine'"),
    ("task check mine.py", '{"tokens": 8}', "{}", "task 'mine': needs tokens"),
    (
        "task check mine.py",
        '"tokens": 8',
        '"token": 8',
        "task 'mine': unknown parameter 'token'; did you mean 'tokens'?",
    ),
    (
        "task check mine.py",
        "    tokens: int\n",
        "    tokens: set\n",
        "a bool, int, float, str or None, or a tuple of such, not <class 'set'>",
    ),
    ("task check mine.py", "super().__post_init__()", "1 / 0", ", line 33) cannot be made: ZeroDivisionError"),
    (
        "task check mine.py",
        "from typing",
        "from typo",
        "mine.py, line 5: does not import: ModuleNotFoundError: No module named 'typo'",
    ),
    ("task check mine.py", "", RULE, "mine.py: defines no Task"),
    ("rule check mine.py", "tokens", "tokens", "mine.py: defines no UpdateRule"),
]


@pytest.mark.parametrize(("words", "old", "new", "says"), WRONG)
def test_wrong_input_is_one_line(
    platform: Callable[..., Any], here: Path, words: str, old: str, new: str, says: str
) -> None:
    source = new_task("mine", here).read_text()
    assert old in source
    (here / "mine.py").write_text(source.replace(old, new) if old else new)
    words = words.replace("task new mine", f"task new mine --folder {here}")
    code, out, err = platform(*words.split())
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1
