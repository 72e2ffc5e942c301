"""The file of a new rule, task or study works as it stands, and no existing file is overwritten."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.support.folders import DOCS

from deltalab import check_rule, check_task, list_rules, registry
from deltalab.authoring.check import Measurement
from deltalab.authoring.files.scaffold import new_rule, new_study, new_task
from deltalab.authoring.files.study_folder import shipped_studies, study_file
from deltalab.authoring.inputs import draw, normal
from deltalab.authoring.rule_checks.form_checks import kernel
from deltalab.errors import InputError
from deltalab.ops.scan import scan
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

torch.set_num_threads(1)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with its own plugins."""
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield tmp_path


def test_a_rule_passes_every_check_as_it_stands(here):
    file = new_rule("my_first_rule")
    assert file == here.relative_to(here) / "plugins/my_first_rule.py"
    registry.refresh()
    rule = registry.get_rule("my_first_rule")
    results = check_rule(rule)
    assert [f"{result.name}: {result.message}" for result in results if not result.passed] == []
    assert type(rule).__name__ == "MyFirstRule"
    assert len(rule.gates) == 2
    assert len(rule.options()) == 3
    rule.without("write")


@pytest.mark.slow
def test_a_rule_with_its_own_kernel_works_as_it_stands(here, monkeypatch):
    """A check turns further knobs for 3 s: in the interpreter, one setting takes as long."""
    monkeypatch.setattr("deltalab.authoring.rule_checks.rule_suite.MOST_SECONDS", 3)
    new_rule("own", kernel=True)
    registry.refresh()
    rule = registry.get_rule("own")
    results = check_rule(rule)
    assert [f"{result.name}: {result.message}" for result in results if not result.passed] == []
    assert "kernel" in [result.name for result in results]


@pytest.mark.slow(keep="dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kernel_of_a_new_rule_computes_its_equation_in_its_own_dtype(here, dtype):
    """K and V are no powers of 2, and V takes two programs."""
    new_rule("own", kernel=True)
    registry.refresh()
    rule = registry.get_rule("own", bound=2.0)
    x = draw(rule, batch=2, length=7, heads=3, key_dim=5, value_dim=33)
    start = normal(2, 3, 5, 33, seed=7).float()
    most = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    found = []
    for backend, kind in (("recurrent", torch.float64), ("triton", dtype)):
        rounded = [part.to(dtype) for part in (x.q, x.k, x.v)]
        given = [part.to(kind).requires_grad_() for part in rounded]
        given += [part.to(torch.promote_types(kind, torch.float32)).requires_grad_() for part in (x.gates["g"], start)]
        q, k, v, g, S = given
        o, (last,) = scan(rule, q, k, v, {"g": g}, state=(S,), backend=backend)
        found.append([o, last, *torch.autograd.grad(o.double().square().sum() + last.double().sin().sum(), given)])
    for want, got in zip(*found, strict=True):
        assert (got.double() - want).norm() < most * want.norm()


def test_a_stack_of_runs_is_one_launch_of_the_kernel(here):
    """vmap gives each run's output and gradients; a gate without a time axis is shared by all runs."""
    new_rule("own", kernel=True)
    registry.refresh()
    rule = registry.get_rule("own")
    q, k, v = (normal(3, 2, 4, 2, width, seed=width).requires_grad_() for width in (5, 5, 6))
    k = q.detach().clone().requires_grad_()
    g = -normal(2, seed=1).abs().requires_grad_()

    def o(q, k, v):
        return scan(rule, q, k, v, {"g": g}, backend="triton")[0]

    stacked, single = torch.func.vmap(o)(q, k, v), torch.stack([o(q[i], k[i], v[i]) for i in range(3)])
    torch.testing.assert_close(stacked, single)
    for got, want in zip(*(torch.autograd.grad(y.sin().sum(), (q, k, v, g)) for y in (stacked, single)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.slow(keep="one head for all")
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("part = row + block * tl.num_programs(0) * T", "part = row", "H=3, K=20, V=40"),
        ("S = z / tl.sqrt(1", "S = (z / tl.sqrt(1", "all rounded to bf16"),
        ("row = (head // H * T + t) * H + head % H", "row = (head // H * T + t) * H", "H=3, K=20, V=40"),
        (
            "tl.store(d_v + row * V + j, tl.sum(dz * k_t, 0)",
            "tl.store(d_v + row * V + j, -tl.sum(dz * k_t, 0)",
            "gradient of v",
        ),
    ],
    ids=["blocks overwrite each other", "rounded state", "one head for all", "sign"],
)
def test_bugs_in_a_kernel_are_caught(here, right, wrong, said):
    file = new_rule("own", kernel=True)
    text = file.read_text().replace(right, wrong, 1)
    if "rounded" in said:
        at = "(z / bound) * (z / bound))\n        tl.store(o +"
        text = text.replace(at, at.replace("bound))", "bound))).to(v.dtype.element_ty).to(tl.float32)"), 1)
    file.write_text(text)
    (plugin,) = registry.add_plugin(file)
    found = [measured for measured in kernel(plugin.kind()) if isinstance(measured, Measurement)]
    wrong_ones = [m.what for m in found if m.figure > (1e-2 if m.limit is None else m.limit)]
    assert wrong_ones
    assert any(said in what for what in wrong_ones)


def test_the_kernel_says_what_it_does_not_take(here):
    new_rule("own", kernel=True)
    registry.refresh()
    k, v = torch.ones(1, 2, 1, 257), torch.ones(1, 2, 1, 4)
    with pytest.raises(InputError, match="the kernel of own takes K up to 256, not 257: use backend 'auto'"):
        scan(registry.get_rule("own"), k, k, v, {"g": -torch.ones(1, 2, 1)}, backend="triton")


def test_the_page_on_kernels_shows_the_whole_file(here):
    file = new_rule("my_kernel", kernel=True)
    page = (DOCS / "how-to/own-kernel.md").read_text()
    shown = "\n".join(re.findall(r"^```py\n(.*?)^```", page, re.M | re.S))
    code, shown = ([line.strip() for line in text.splitlines() if line] for text in (file.read_text(), shown))
    assert shown == code


@pytest.mark.slow
def test_a_task_passes_every_check_as_it_stands(here):
    new_task("my_first_task")
    registry.refresh()
    task = registry.get_task("my_first_task", **registry.task_plugin("my_first_task").kind.example)
    assert [f"{result.name}: {result.message}" for result in check_task(task) if not result.passed] == []
    assert type(task).__name__ == "MyFirstTask"


def test_a_study_can_be_planned_as_it_stands(here):
    file = new_study("my_first_study")
    assert file == here.relative_to(here) / "studies/my_first_study.yaml"
    assert "NAME" not in file.read_text()
    for profile in (None, "longer"):
        plan = make_plan(load_study(file, profile=profile), profile=profile, study_file=str(file))
        assert plan.spec.name == "my_first_study"
        assert plan.names == ["base", "without_g", "linear_attention", "one_head"]


def test_a_name_that_no_study_can_have(here):
    for name, says in (("My_study", "take lower case, as in my_study"), ("a b", "cannot name a study")):
        with pytest.raises(InputError, match=says):
            new_study(name)
    with pytest.raises(InputError, match="there is a study 'quickstart' already"):
        new_study("quickstart")


def test_a_shipped_study_is_found_by_its_name_from_any_folder(here):
    assert {"quickstart", "comba_ablation"} <= set(shipped_studies())
    assert load_study("quickstart").name == "quickstart"
    with pytest.raises(InputError, match="unknown study 'quickstar'; did you mean 'quickstart'"):
        study_file("quickstar")


def test_a_file_goes_before_a_shipped_study_of_its_name(here):
    (here / "quickstart").write_text("a study without an ending")
    assert study_file("quickstart") == here.relative_to(here) / "quickstart"
    assert study_file("missing.yaml").name == "missing.yaml", "its reader says that it is missing"


def test_a_study_of_ones_own_is_found_by_its_name(here):
    new_study("mine")
    assert study_file("mine") == Path("studies/mine.yaml")


@pytest.mark.parametrize(
    ("new", "most"),
    [(new_rule, 60), (new_task, 60), (partial(new_rule, kernel=True), 150)],
    ids=["rule", "task", "kernel"],
)
def test_it_is_a_tidy_file(here, new, most):
    new("tidy")
    text = (here / "plugins/tidy.py").read_text()
    assert len(text.splitlines()) < most
    assert "NAME" not in text
    assert "CLASS" not in text
    for command in (
        ["check", "--select", "E,F,I,UP,B", "--config", "lint.isort.known-first-party=['deltalab']"],
        ["format", "--check"],
    ):
        run = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--line-length", "120", "plugins/tidy.py"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("name", ["gate", "update_rule", "operands", "tensor", "Étude", "a1"])
def test_any_name_makes_a_rule_that_imports(here, name):
    (plugin,) = registry.add_plugin(new_rule(name))
    assert plugin.kind.name == name
    assert plugin.kind().gates["erase"].high == 1


@pytest.mark.parametrize("name", ["scan", "folded", "triton", "mapping", "a1"])
def test_any_name_makes_a_rule_with_a_kernel_that_imports(here, name):
    (plugin,) = registry.add_plugin(new_rule(name, kernel=True))
    assert plugin.kind.name == name
    assert plugin.kind().brings_kernel


@pytest.mark.parametrize("name", ["batch", "task", "random", "map", "a1"])
def test_any_name_makes_a_task_that_imports(here, name):
    (plugin,) = registry.add_plugin(new_task(name))
    assert plugin.kind.name == name
    assert plugin.kind(tokens=4).length == 8


@pytest.mark.parametrize("name", ["", "my-rule", "2nd", "class", "_hidden", "a/b", "../up", "a b"])
def test_an_invalid_name_is_refused(here, name):
    with pytest.raises(
        InputError, match=r"cannot name a rule: (take letters, digits and _|it is a word of Python's own)"
    ):
        new_rule(name)
    assert not list(here.iterdir())


def test_a_taken_name_is_refused(here):
    assert "comba" in list_rules()
    with pytest.raises(InputError, match="there is a rule 'comba' already"):
        new_rule("comba")
    (here / "plugins").mkdir()
    (here / "plugins/notes.py").write_text("kept = True\n")
    with pytest.raises(InputError, match=r"plugins/notes.py exists already"):
        new_rule("notes")
    assert (here / "plugins/notes.py").read_text() == "kept = True\n"


def test_an_unwritable_folder_is_refused(here, monkeypatch):
    (here / "plugins").write_text("a file\n")
    with pytest.raises(InputError, match=r"plugins/mine.py: cannot be written: (File exists|Not a directory)"):
        new_rule("mine")
    (here / "plugins").unlink()

    def full(self, text, encoding):
        os.close(os.open(self, os.O_CREAT))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(InputError, match="No space left on device"):
        new_rule("mine")
    assert not list((here / "plugins").iterdir())
