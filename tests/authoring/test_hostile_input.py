"""Input that is hostile or far too large: refused in one line, soon, and without much memory."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.support.folders import ROOT
from tests.support.hostile import VALID, hostile
from tests.support.watched import Watched

from deltalab import reading, registry, rule
from deltalab.errors import InputError
from deltalab.models import costs
from deltalab.models.settings import limits
from deltalab.reading import read_json, read_yaml
from deltalab.study.forecast import notes, step_time
from deltalab.study.specs import method_settings
from deltalab.study.specs import study_file as study
from deltalab.study.specs.sections import ladder_sizes, search_space
from deltalab.tasks import corpus, task
from deltalab.training import spec as training

FILES = 60


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    found = Watched(tmp_path_factory.mktemp("hostile"))
    yield found
    found.close()


@pytest.mark.slow
def test_hostile_files_are_planned_or_refused_in_one_line(watched: Watched) -> None:
    wrong = []
    for number in range(FILES):
        if why := watched.plan(hostile(random.Random(number))).wrong:
            wrong.append(f"hostile(Random({number})): {why}")
    assert not wrong, "\n".join(wrong)


# Texts that are no YAML for us.

TEXTS = [
    ("a: " + "1" * 5000, "is no int"),
    ("a: " + "9" * 20, "is not between -2^63 and 2^63"),
    ("a: .inf", ".inf is not a finite number"),
    ("a: .nan", ".nan is not a finite number"),
    ("a: 1e999", "1e999 is not a finite number"),
    ("a: !!set {b, c}", "takes no tag !!set"),
    ("a: !!binary aGk=", "takes no tag !!binary"),
    ("a: !!timestamp 2020-01-01", "takes no tag !!timestamp"),
    ("a: !!python/name:os.system", "takes no tag !!python/name:os.system"),
    ("a: !!int x", "'x' is no int"),
    ("a: !!float x", "'x' is no float"),
    ("a: !!bool x", "'x' is no bool"),
    ("a: !!map [1]", "is no mapping"),
    ('a: "\\0"', "has the character U+0000 in a text"),
    ('a: "\\uD800"', "has the character U+D800 in a text"),
    ('a: "\\u202e"', "has the character U+202E in a text"),
    ('"\\0": a', "has the character U+0000 in a text"),
    ("a: &a [*a]", "an alias stands inside of what it names"),
    ("a: &a {b: *a}", "an alias stands inside of what it names"),
    ("a: " + "[" * 40 + "]" * 40, "nests more than 32 mappings and lists"),
    ("[" * 100_000, "nests more than 32 mappings and lists"),
    ("a: [" + "1, " * 10_000 + "1]", "has more than 10,000 values"),
    ("a: " + "x" * 10_001, "has 10,001 letters in one text"),
    ("\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]" for i in range(1, 9))]), "10,000 values"),
    (
        "\n".join(["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 9}]}}" for i in range(1, 9))]),
        "10,000 values",
    ),
    ("1: a", "key 1 must be text"),
    ("null: a", "key None must be text"),
    ("a: 1\na: 2", "key 'a' is given twice"),
    ("%YAML 9.9\n---\na: 1", "found incompatible YAML document"),
]


@pytest.mark.parametrize(("text", "says"), TEXTS, ids=[f"{text[:20]!r}" for text, _ in TEXTS])
def test_yaml_beyond_the_limits_is_refused(text: str, says: str) -> None:
    with pytest.raises(InputError) as raised:
        read_yaml(text, where="file")
    assert str(raised.value).startswith("file")
    assert says in str(raised.value)


def test_a_date_is_text_and_an_alias_is_what_it_names() -> None:
    assert read_yaml("a: &x [2020-13-45]\nb: *x\nc: *x", where="") == {key: ["2020-13-45"] for key in "abc"}


def test_json_that_nests_without_end_or_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("[" * 100_000, "9" * 5000, "{", "[]", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=r"config\.json"):
            read_json(file)


def test_a_file_that_is_no_text_or_too_large_is_refused_without_reading_it(watched: Watched) -> None:
    folder = watched.folder
    os.mkfifo(folder / "pipe.yaml")
    (folder / "folder.yaml").mkdir()
    (folder / "binary.yaml").write_bytes(bytes(range(256)) * 9)
    with (folder / "large.yaml").open("wb") as large:
        large.truncate(100 * 10**6)
    for name, says in (
        ("pipe", "it is a pipe or a device"),
        ("folder", "it is a folder"),
        ("binary", "can't decode"),
        ("large", "it has 100,000,000 bytes, and at most 262,144 are read"),
    ):
        answer = watched.ask("study", "plan", f"{name}.yaml")
        assert answer.wrong is None
        assert answer.code == 2
        assert f"{name}.yaml: cannot be read: " in answer.said
        assert says in answer.said
        assert answer.seconds < 2


# Numbers that would take hours or gigabytes.

LARGE = [
    ("layers: 10000000", "model.layers must be at most 1,000, not 10,000,000"),
    ("layers: {repeat: 1000, pattern: [rule, rule]}", "model.layers lists 2,000 blocks"),
    ("layers: {repeat: 1000000000, pattern: [rule]}", "model.layers repeat must be at most"),
    ("d_model: 1000000", "model.d_model must be at most 65,536"),
    ("heads: 1000000", "model.heads must be at most 4,096"),
    ("expand_v: 100000", "model.expand_v must be a number above 0, and at most 256"),
]


@pytest.mark.slow(keep="heads")
@pytest.mark.parametrize(("given", "says"), LARGE, ids=[given for given, _ in LARGE])
def test_a_model_beyond_the_limits_is_refused(watched: Watched, given: str, says: str) -> None:
    key = given.partition(":")[0]
    text = VALID.replace("    d_model: 8\n" if key == "d_model" else "    heads: 1\n", f"    {given}\n")
    assert given in text
    if key not in ("d_model", "heads"):
        text = text.replace(f"    {given}\n", f"    {given}\n    heads: 1\n")
    answer = watched.plan(text.encode())
    assert (answer.code, answer.wrong) == (2, None)
    assert says in answer.said


REST = [
    ("batch_size: 2", "batch_size: 1000000000", "train.batch_size must be at most 1,048,576"),
    ("batch_size: 2", "batch_size: 1000000\n    eval_batches: 1", None),
    ("length: 16", "length: 1000000000", "parameter 'length' must be at most 1,048,576"),
    ("length: 16", "length: 1048576", None),
    ("vocab_size: 32", "vocab_size: 1000000000", "parameter 'vocab_size' must be at most 16,777,216"),
    ("seeds: 2", "seeds: 2\nresources: {cpu: 1000000000}", "resources.cpu must be less than or equal to 4096"),
    ("seeds: 2", "seeds: 2\nresources: {cpu: 4096}", None),
    ("seeds: 2", "seeds: 2\nresources: {gpu: 1.0e-300}", "resources.gpu: must be 0, or at least 0.01"),
    ("seeds: 2", "seeds: 1000000000", "seeds must be less than or equal to 1000"),
    ("d_model: 8", "d_model: 16384", None),
    ("heads: 1", "heads: 1\n    kv_rank: 65536", None),
    ("    heads: 1\n  rule: gla", "    heads: 1\n    key_dim: 65536\n  rule: rwkv6", None),
    ("    heads: 1\n  rule: gla", "    heads: 1\n    key_dim: 4096\n  rule: s5", None),
    ("    heads: 1\n  rule: gla", "    heads: 1\n    key_dim: 8192\n    expand_v: 2\n  rule: comba", None),
    (
        "seeds: 2",
        "seeds: {at_least: 2, at_most: 1000}\narms: {"
        + ", ".join(f"a{i}: {{train: {{lr: {i + 1}}}}}" for i in range(12))
        + "}",
        None,
    ),
    (
        "rule: gla",
        "rule: {name: gka, iterations: 1048576}",
        "hostile.yaml: arm 'base': a pass of a block over 16 tokens takes over 10,000 calls of PyTorch's operators",
    ),
    ("seeds: 2", "seeds: 3\nscales: {model.d_model: [" + ", ".join(map(str, range(8, 176, 8))) + "]}", "at most 20"),
    (
        "seeds: 2",
        "seeds: 2\narms: {" + ", ".join(f"a{i}: {{train: {{lr: {i + 1}}}}}" for i in range(500)) + "}",
        "501 arms",
    ),
]


@pytest.mark.slow(keep="seeds: 1000000000")
@pytest.mark.parametrize(("was", "now", "says"), REST, ids=[now[:60] for _, now, _ in REST])
def test_a_study_beyond_the_limits_is_refused_and_a_large_one_is_planned(
    watched: Watched, was: str, now: str, says: str | None
) -> None:
    assert was in VALID
    answer = watched.plan(VALID.replace(was, now).encode())
    assert (answer.code, answer.wrong) == (2 if says else 0, None), answer
    assert (says or "") in answer.said


def test_a_rule_without_end_is_refused_on_images_too(watched: Watched) -> None:
    rule, study = {"name": "gka", "iterations": 1_048_576}, yaml.safe_load(VALID)
    answer = watched.plan(
        yaml.safe_dump(study | {"task": {"shapes": {}}, "base": study["base"] | {"rule": rule}}).encode()
    )
    assert (answer.code, answer.wrong) == (2, None), answer
    assert "arm 'base': a pass of a block over 64 tokens takes over 40,000 calls" in answer.said


@pytest.mark.slow
def test_a_rule_of_many_slots_is_planned_on_images(watched: Watched) -> None:
    rule, study = {"name": "raven", "p": {"router": {"slots": 65_536}}}, yaml.safe_load(VALID)
    answer = watched.plan(
        yaml.safe_dump(study | {"task": {"shapes": {}}, "base": study["base"] | {"rule": rule}}).encode()
    )
    assert (answer.code, answer.wrong) == (0, None), answer


@pytest.mark.slow
def test_a_search_whose_candidates_share_a_rule_without_end_is_refused_once(watched: Watched) -> None:
    rule, study = {"name": "gka", "iterations": 1_048_576}, yaml.safe_load(VALID)
    search = {
        "trials": 6,
        "model.mlp_width": {"integers": [16, 4096]},
        "model.conv": {"integers": [1, 16]},
        "constrain": {"state": {"at_most": 40_960}},
    }
    base = study["base"] | {"rule": rule}
    answer = watched.plan(yaml.safe_dump(study | {"task": {"shapes": {}}, "base": base, "search": search}).encode())
    assert (answer.code, answer.wrong) == (2, None), answer
    assert "candidates drawn is feasible" in answer.said
    assert "a pass of a block over 64 tokens takes over 40,000 calls" in answer.said


def test_a_folder_of_text_with_too_many_files_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "MOST_FILES", 10)
    for i in range(11):
        (tmp_path / f"{i}.txt").write_text("text")
    monkeypatch.setattr(corpus, "_blocks", pytest.fail)
    with pytest.raises(InputError, match="holds over 10 files"):
        corpus.load(str(tmp_path), library=False)


def test_the_table_of_limits_has_every_limit() -> None:
    table = (ROOT / "docs/reference/limits.md").read_text()
    numbers = (
        *(reading.MOST_BYTES, reading.MOST_JSON, reading.MOST_VALUES, reading.MOST_DEPTH, reading.MOST_LETTERS),
        *(
            study.MOST_ARMS,
            search_space.MOST_TRIALS,
            search_space.MOST_SETTINGS,
            search_space.MOST_CHOICES,
            search_space.MOST_PLACES,
        ),
        *(
            *limits.MOST.values(),
            limits.MOST_EXPANDED,
            *training.MOST.values(),
            method_settings.MOST_TOKENS,
            rule.MOST_KNOB,
        ),
        *(task.MOST, task.MOST_LENGTH, task.MOST_VOCABULARY),
        *(corpus.MOST_FILES, corpus.MOST_BYTES, costs.MOST_CALLS, ladder_sizes.MOST_SIZES),
        *(notes.MOST_WRITTEN, notes.MOST_MODELS, step_time.MOST_TIMED_WRITTEN),
    )
    assert [f"{number:,}" for number in numbers if f"{number:,}" not in table] == []


# Plugins.

RULE = """
from dataclasses import dataclass
from typing import ClassVar
from deltalab.rule import UpdateRule
from deltalab.structure import ADDITIVE, Transition

@dataclass(frozen=True, kw_only=True)
class Odd(UpdateRule):
    name = {name}
    transition: Transition = ADDITIVE
"""

BROKEN = [
    (RULE.format(name="''"), "Odd: a name has letters, digits"),
    (RULE.format(name="'../../x'"), "Odd: a name has letters, digits"),
    (RULE.format(name="3"), "Odd: a name has letters, digits"),
    ("class E(BaseException): ...\nraise E('no')", "line 2: does not import: E: no"),
    ("raise GeneratorExit", "does not import: GeneratorExit"),
    ("import os\nos._exit(0)", "it ends the process, with exit code 0"),
    ("import os\nos.abort()", "it ends the process, with SIGABRT"),
    ("while True: ...", "it takes over 1 s"),
    ("raise KeyboardInterrupt", "does not import: KeyboardInterrupt"),
    ("import sys\nsys.modules.clear()\nimport nothing_like_it", "does not import"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "something kills the process that imports it"),
]

KILLED_ONCE = """
import os, signal
from pathlib import Path
if not Path("killed").exists():
    Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""

LISTS = """
import sys
from deltalab import plugin_files
from deltalab.cli.app import main
plugin_files.IMPORT_SECONDS = 1.0
sys.argv = ["platform", *sys.argv[1:]]
main()
"""


def platform(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: without threads, so that it tries imports first."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    return subprocess.run(
        [sys.executable, "-c", LISTS, *words], cwd=folder, env=environment, capture_output=True, text=True
    )


@pytest.mark.slow
def test_broken_plugins_are_named_and_do_not_stop_the_others(tmp_path: Path) -> None:
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    for number, (source, _) in enumerate(BROKEN):
        (plugins / f"broken_{number}.py").write_text(source)
    (plugins / "killed_once.py").write_text(KILLED_ONCE)
    (plugins / "evil.py").write_text("def __getattr__(name): raise RuntimeError(name)\n")
    (plugins / "good.py").write_text("print('loud')\nimport os\nos.system('echo louder')\n" + RULE.format(name="'odd'"))
    listed = platform(tmp_path, "rule", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert {"comba", "odd"} <= {row["name"] for row in json.loads(listed.stdout)}
    lines = listed.stderr.splitlines()
    assert {"loud", "louder"} <= {*lines}
    assert "killed_once" not in listed.stderr
    for number, (_, says) in enumerate(BROKEN):
        (line,) = [line for line in lines if f"broken_{number}.py" in line]
        assert line.startswith("warning: left out: ")
        assert says in line
    (tmp_path / "s.yaml").write_text(VALID.replace("gla", "odder"))
    refused = platform(tmp_path, "study", "plan", "s.yaml")
    assert refused.returncode == 2
    assert refused.stderr.count("error: ") == 1
    assert "left out: " in refused.stderr
    assert "broken_9.py, line 3: does not import" in refused.stderr


def test_an_entry_point_to_a_missing_module_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint, entry_points

    missing = EntryPoint("mine", "no_such_module_at_all", "deltalab.rules")
    monkeypatch.setattr(registry, "entry_points", lambda group: [missing, *entry_points(group=group)])
    with registry.isolated():
        assert "comba" in registry.list_rules()
        assert any("no_such_module_at_all" in line for line in registry.left_out())


@pytest.mark.slow(keep="--storage")
@pytest.mark.parametrize(
    "words",
    [
        ("study", "run", "hostile.yaml", "--storage", ""),
        ("study", "run", "hostile.yaml", "--address", " "),
        ("study", "run", "hostile.yaml", "--db", ""),
        ("study", "run", "hostile.yaml", "--profile", ""),
        ("study", "run", "hostile.yaml", "--workers", "1000000000"),
        ("study", "run", ""),
        ("study", "plan", "x" * 5000),
        ("study", "plan", "hostile.yaml", "--sd", "nan"),
        ("task", "show", "mqar", "length=" + "9" * 5000),
        ("task", "show", "mqar", "length=.inf"),
        ("--plugin", "", "rule", "list"),
    ],
    ids=lambda words: " ".join(words)[:60],
)
def test_an_empty_or_enormous_option_is_one_line(watched: Watched, words: tuple[str, ...]) -> None:
    (watched.folder / "hostile.yaml").write_text(VALID)
    answer = watched.ask(*words)
    assert (answer.code, answer.wrong) == (2, None), answer
