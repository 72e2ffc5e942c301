"""Studies of zoology and mad-lab are read as text: nothing of them runs, and what has no counterpart is listed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deltalab import InputError
from deltalab.authoring.imports.config_text import ConfigText
from deltalab.authoring.imports.config_values import Unread
from deltalab.authoring.imports.mad import TASKS, from_mad
from deltalab.authoring.imports.written import write_study
from deltalab.authoring.imports.zoology import from_zoology
from deltalab.cli.app import app
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

SWEEP = """
import uuid
import numpy as np
from zoology.config import TrainConfig, ModelConfig, DataConfig
from zoology.data.multiquery_ar import MQARConfig

sweep = "mine" + uuid.uuid4().hex[:6]
configs = []
for length, pairs in [(64, 4), (32, 2)]:
    shared = {"vocab_size": 64, "input_seq_len": length, "random_non_queries": False}
    data = DataConfig(
        train_configs=[MQARConfig(num_examples=1_000, num_kv_pairs=pairs, **shared)],
        test_configs=[MQARConfig(num_examples=100, num_kv_pairs=pairs, **shared)],
        batch_size=(50, 10),
    )
    for d_model in [16, 32]:
        for lr in np.logspace(-4, -2, 3):
            MIXERS = {
                "attention": dict(name="zoology.mixers.attention.MHA", kwargs={"dropout": 0.1, "num_heads": 1}),
                "delta": dict(name="zoology.mixers.delta_net.DeltaNet", kwargs={}),
            }
            for mixer in ["attention", "delta"]:
                if mixer == "delta" and d_model == 16:
                    continue
                model = ModelConfig(
                    d_model=d_model, n_layers=2, vocab_size=64, sequence_mixer=MIXERS[mixer], name=f"my-{mixer}",
                    state_mixer=dict(name="torch.nn.Identity", kwargs={}),
                )
                run = f"{mixer}{lr}"
                configs.append(TrainConfig(model=model, data=data, learning_rate=lr, max_epochs=4, run_id=run))
"""


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "config.py").write_text(text)
        return tmp_path / "config.py"

    return write


def test_a_sweep_becomes_a_study(config: Callable[[str], Path], tmp_path: Path) -> None:
    imported = from_zoology(config(SWEEP))
    assert imported.tasks == {
        f"mqar_{length}x{pairs}": {
            "task": "mqar", "length": length, "vocab_size": 64, "pairs": pairs, "train_examples": 1000,
        }
        for length, pairs in ((64, 4), (32, 2))
    }  # fmt: skip
    assert imported.base["rule"] == "attention"
    assert imported.base["model"] == {"d_model": 32, "layers": 2, "mlp": False, "heads": 1}
    assert imported.base["train"] == {"steps": 80, "batch_size": 50, "lr": pytest.approx(1e-3), "weight_decay": 0.1}
    assert imported.arms == {"my_delta": {"rule": "deltanet"}}
    assert imported.rates == pytest.approx([1e-4, 1e-3, 1e-2])
    assert any("d_model 16, 32: those of 32 are taken" in note for note in imported.left_out)
    assert any("zoology.mixers.attention.MHA: dropout" in note for note in imported.left_out)
    write_study(imported, tmp_path / "s.yaml")
    plan = make_plan(load_study(tmp_path / "s.yaml"))
    assert [(arm.task, arm.name) for arm in plan.arms] == [
        (task, arm) for task in ("mqar_64x4", "mqar_32x2") for arm in ("base", "my_delta")
    ]


def test_a_mixture_its_tests_and_hybrids(config: Callable[[str], Path]) -> None:
    text = """
from zoology.config import TrainConfig, DataConfig, ModelConfig, ModuleConfig
from zoology.data.multiquery_ar import MQARConfig
parts = [MQARConfig(num_examples=100), MQARConfig(num_kv_pairs=n) for n in []]
"""
    with pytest.raises(InputError, match=r"config\.py, line 4: no Python"):
        from_zoology(config(text))
    text = """
def add(models, conv, **more):
    for width in [32]:
        based = dict(name="zoology.mixers.based.Based", kwargs={"num_heads": 2})
        mixer = ModuleConfig(name="zoology.mixers.hybrid.Hybrid", kwargs={"configs": [conv, based]})
        models.append(ModelConfig(d_model=width, n_layers=4, sequence_mixer=mixer, **more))
    return models

parts = [MQARConfig(input_seq_len=64 * n, num_examples=10 * n, num_kv_pairs=4 * n) for n in range(1, 3)]
longer = MQARConfig(input_seq_len=256, num_examples=9, num_kv_pairs=8)
data = DataConfig(train_configs=parts, test_configs=[*parts, longer])
conv = dict(name="zoology.mixers.base_conv.BaseConv", kwargs={"kernel_size": 3})
models = add([], conv, name="hybrid")
configs = [TrainConfig(model=model, data=data) for model in models if "h" in model.name]
"""
    imported = from_zoology(config(text))
    (task,) = imported.tasks.values()
    assert task["mixture"] == [[64, 4, 10], [128, 8, 20]]
    assert task["tests"] == [[64, 4], [128, 8], [256, 8]]
    assert task["random_non_queries"] is True
    conv = {"module": "zoology.mixers.base_conv.BaseConv", "kwargs": {"kernel_size": 3}}
    assert imported.base["model"]["layers"] == [conv, "rule", conv, "rule"]
    assert (imported.base["rule"], imported.base["model"]["heads"]) == ("based", 2)


def test_functions_of_the_repository_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "zoology" / "experiments"
    folder.mkdir(parents=True)
    (folder / "repo.py").write_text("def widths(n):\n    return [n * w for w in (1, 2)]\n")
    (folder / "mine.py").write_text("from zoology.experiments.repo import widths\nw = widths(8)\n")
    assert ConfigText(folder / "mine.py").values["w"] == [8, 16]


def test_nothing_runs(config: Callable[[str], Path], tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    text = f"""
import os, subprocess
open({str(mark)!r}, "w").write("x")
os.system("touch {mark}")
x = __import__("os").system("touch {mark}")
y = eval("1 + 1")
z = (lambda: open({str(mark)!r}, "w"))()
w = [os.mkdir({str(mark)!r}) for _ in range(2)]
v = "".__class__.__mro__[1].__subclasses__()
class A:
    open({str(mark)!r}, "w")
configs = TrainConfig.__init__.__globals__
"""
    read = ConfigText(config(text))
    assert not mark.exists()
    assert all(isinstance(read.values[name], Unread) for name in ("x", "y", "z", "v", "configs"))
    with pytest.raises(InputError, match=r"makes no list `configs` that can be read: .*line 3: calls open"):
        from_zoology(config(text))


ENDLESS: dict[str, str] = {
    "a list that grows while it is read": "x = [0]\nfor i in x:\n    x.append(i)\n    y = [*range(9 ** 9)]\n",
    "a function that calls itself": "def f():\n    return f()\nx = f()\n",
    "a tree of calls": "def f(n):\n    return [f(n - 1), f(n - 1)] if n else 0\nx = f(35)\n",
    "a long text": 'x = "a" * 10 ** 9\n',
    "a text that is replaced": "x = 'aaaa'\nfor i in range(12):\n    x = x.replace('a', 'aaaaaaaa')\n",
    "a list that doubles": "x = [1]\nfor i in range(64):\n    x = x + x\n",
    "a list that is extended by itself": "x = [1]\nfor i in range(64):\n    x.extend(x)\n",
    "lists of lists": "x = [[i for i in range(10 ** 6)] for j in range(10 ** 6)]\n",
    "copies of a list": "x = [0] * 100000\ny = [x[:] for i in range(20000)]\n",
    "a power": "x = 9 ** 9 ** 9 ** 9\n",
    "a number that is squared": "x = 10\nfor i in range(64):\n    x = x * x\n",
    "a number that is rounded": "x = round(10 ** 60, -10 ** 9)\n",
    "all pairs": "import itertools\nx = itertools.product(range(100000), range(100000))\n",
    "lists of the same two lists": "x = [1]\nfor i in range(40):\n    x = [x, x]\ny = [x] == [x, x]\n",
    "a list that holds itself": "configs = [1]\nconfigs.append(configs)\n",
    "sums without end": "x = " + "+".join(["1"] * 50000) + "\n",
    "signs without end": "x = " + "-" * 50000 + "1\n",
    "conditions without end": "x = 1\nif x == 0:\n    pass\n" + "elif x == 2:\n    pass\n" * 5000,
    "one mapping many times": "d = {}\nfor i in range(9000):\n    d[i] = i\nx = {" + "**d, " * 50000 + "}\n",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_file_without_end_is_refused(name: str, config: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"config\.py(, line \d+)?: (takes|makes|nests|functions)") as raised:
        ConfigText(config(ENDLESS[name]))
    assert "\n" not in str(raised.value)


def test_what_is_not_read_is_said_with_its_line(config: Callable[[str], Path]) -> None:
    text = """
from zoology.experiments.models_repo import add_attention
from zoology.data.stacked import ContinuousMQARConfig as MQARConfig
import secrets
models = add_attention([])
for model in models:
    pass
if secrets.choice([True, False]):
    width = 64
a, b = 5
more = ModelConfig(**somewhere)
name = f"{width}"
chosen = [n for n in (1, 2) if n in models]
data = MQARConfig(num_kv_pairs=-(+4))
"""
    read = ConfigText(config(text))
    where = str(config(text))
    called = f"{where}, line 5: calls add_attention from zoology.experiments.models_repo, which is not read"
    assert read.notes == [
        f"{where}, line 6: a loop over what is not read ({called})",
        f"{where}, line 8: a condition that is not read ({where}, line 8: calls secrets.choice, which is not read)",
        f"{where}, line 10: a statement that is not read: TypeError: 'int' object is not iterable",
    ]
    for name in ("models", "more", "name", "chosen"):
        assert isinstance(read.values[name], Unread)
    assert (read.values["data"].name, read.values["data"].given) == ("ContinuousMQARConfig", {"num_kv_pairs": -4})


@pytest.mark.parametrize(
    "text", ["return 5\n", "break\n", "for i in 5:\n    pass\n", "d = {}\nd[[1]] = 2\n", "a.b = 1\n"]
)
def test_python_that_would_not_run_is_no_traceback(text: str, config: Callable[[str], Path]) -> None:
    with pytest.raises(InputError, match=r"config\.py"):
        from_zoology(config(text))


WRONG: list[tuple[str, str]] = [
    ("configs = []\n", "makes no list `configs`"),
    ("x = 1\n", "makes no list `configs`"),
    ("configs = [1]\n", "`configs` holds no TrainConfig"),
    (
        "configs = [TrainConfig(data=DataConfig(train_configs=[ParityConfig()], test_configs=[]))]\n",
        "no data of it has",
    ),
    ("configs = [\n", "no Python"),
    ("configs = [TrainConfig(learning_rate=rate()) for rate in rates]\n", "makes no list `configs`"),
]


@pytest.mark.parametrize(("text", "message"), WRONG)
def test_what_cannot_be_read_is_one_line(text: str, message: str, config: Callable[[str], Path]) -> None:
    with pytest.raises(InputError) as raised:
        from_zoology(config(text))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("task", TASKS)
def test_a_task_of_mad_becomes_a_study(task: str, tmp_path: Path) -> None:
    length = 36 if task.startswith("fuzzy") else 32
    given: dict[str, Any] = {
        "baseline": {"vocab_size": 64, "seq_len": length, "num_train_examples": 1280, "multi_query": True},
        "changes": {"vocab_size": [128], "num_train_examples": [640, 320]},
    }
    if task == "selective-copying":
        given["baseline"]["num_tokens_to_copy"] = 8
    (tmp_path / f"{task}.yml").write_text(yaml.safe_dump(given))
    imported = from_mad(tmp_path / f"{task}.yml")
    assert len(imported.tasks) == 4
    assert imported.base["train"] == {"steps": 2000, "batch_size": 128, "lr": 5e-4, "weight_decay": 0.0}
    assert "multi_query: True" in imported.left_out
    write_study(imported, tmp_path / "s.yaml")
    assert len({arm.task for arm in make_plan(load_study(tmp_path / "s.yaml")).arms}) == 4


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Callable[[str], Path]) -> None:
    monkeypatch.chdir(tmp_path)
    file = config(SWEEP)
    run = CliRunner().invoke(app, ["study", "import", "zoology", str(file), "--out", "mine.yaml"])
    assert run.exit_code == 0
    assert "not as in zoology: models of d_model 16, 32" in run.output
    assert "# - models of d_model 16, 32" in (tmp_path / "mine.yaml").read_text()
    for words, message in (
        (["zoology", str(file), "--out", "mine.yaml"], "mine.yaml: exists"),
        (["zoologie", str(file)], "unknown tool 'zoologie'; did you mean 'zoology'?"),
        (["zoology", "none.py"], "none.py: No such file or directory"),
        (["mad", str(file)], "config.py"),
    ):
        assert message in str(CliRunner().invoke(app, ["study", "import", *words]).exception)
    (tmp_path / "parity.yml").write_text("baseline: {seq_len: 4}\n")
    run = CliRunner().invoke(app, ["study", "import", "mad", "parity.yml"])
    assert "unknown task of mad-lab 'parity'" in str(run.exception)
