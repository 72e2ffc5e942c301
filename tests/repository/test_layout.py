"""The repository's shape, where a mistake gives no error: a folder `platform` beside a module `platform`."""

import ast
import lzma
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.support.folders import ROOT

from deltalab.store.database import address, migrate

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def python(code: str) -> str:
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_platform_is_still_the_standard_librarys() -> None:
    found = python("import platform, torch; print(platform.__file__); platform.machine()")
    assert Path(found) == Path(python("import os; print(os.__file__)")).with_name("platform.py")


def test_source_roots_are_no_packages() -> None:
    for folder in ("platform", "plugins", "dashboard", "tests"):
        assert (ROOT / folder).is_dir()
        assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/ on sys.path would shadow a module"
    assert not (ROOT / "tests" / "platform").exists()


def test_the_top_level_is_what_it_was_agreed_to_be() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    files = [Path(name) for name in tracked.stdout.splitlines()]
    folders = {file.parts[0] for file in files if len(file.parts) > 1}
    assert {"platform", "plugins", "studies", "tests", "dashboard"} <= folders
    assert folders <= {"platform", "plugins", "studies", "tests", "dashboard", "docs", "benchmarks", ".ci", ".github"}
    unwanted = {"utils", "common", "core", "base", "manager", "factory", "helpers"}
    assert not [file for file in files if unwanted & {file.stem, *file.parts}]
    assert {file.parts[1] for file in files if file.parts[0] == "platform"} == {"deltalab"}


(BARE,) = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"].startswith("Training runs")]
BLOCKED = [*BARE["forbidden_modules"], "yaml", "altair", "transformers"]


def without(blocked: list[str]) -> str:
    """Code after which importing one of these raises."""
    return f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in {blocked!r} else self.finder.find_spec(name, *rest)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.mark.slow
def test_training_runs_where_the_platform_is_not_installed() -> None:
    """A GPU image has torch and numpy, and none of the rest: importing it raises here, and training works."""
    assert {"pydantic", "sqlalchemy", "optuna", "ray", "typer", "rich"} <= set(BLOCKED)
    modules = [
        ".".join(file.relative_to(ROOT / "platform").with_suffix("").parts)
        for module in BARE["source_modules"]
        for file in sorted(ROOT.glob(f"platform/{module.replace('.', '/')}/**/*.py"))
        or [ROOT / f"platform/{module.replace('.', '/')}.py"]
    ]
    assert {"deltalab.training.train", "deltalab.kernels.scalar.op"} <= set(modules)
    out = python(f"""
{without(BLOCKED)}
for module in {modules!r}:
    __import__(module.removesuffix(".__init__"))

import deltalab
from deltalab.models.spec import ModelSpec
from deltalab.training.train import TrainSpec, train

task = deltalab.get_task("mqar", length=8, pairs=2, vocab_size=16)
model = ModelSpec(rule="comba", vocab_size=16, d_model=8, layers=1, heads=1)
result = train(task, model, TrainSpec(steps=2, batch_size=2, lr=0.01, evaluations=1), [1], test=True)
print(len(deltalab.list_rules()), result.runs[0].final("test", "loss") > 0)
try:
    deltalab.run_study
except ModuleNotFoundError as error:
    print(error.name.partition(".")[0] in {BLOCKED!r})
print(sorted(set({BLOCKED!r}) & set(sys.modules)))
""")
    import deltalab

    assert out.splitlines() == [f"{len(deltalab.list_rules())} True", "True", "[]"]


@pytest.mark.slow
def test_a_process_that_only_passes_on_stacks_starts_without_torch() -> None:
    """Ray has one for the study and one for each place; torch would cost each 4 s of a core."""
    assert python("import sys, deltalab.study.running.ray.process; print('torch' in sys.modules)") == "False"


@pytest.mark.slow
def test_a_command_does_not_wait_for_a_compiler_that_it_does_not_use() -> None:
    out = python("""
import sys
import deltalab.cli.app, deltalab.study.workers.train_stack
print("torch._dynamo" in sys.modules)
""")
    assert out.strip() == "False", "half of all the time that a command starts in"


@pytest.mark.slow
def test_a_rule_that_leaves_compiled_code_loads_no_compiler_where_nothing_is_compiled() -> None:
    """GSA's first pass is a gradient within a forward pass, which compiled code cannot take."""
    out = python("""
import sys
import deltalab, torch
from deltalab.authoring.inputs import draw

rule = deltalab.get_rule("gsa")
x = draw(rule, batch=1, length=20, heads=2, key_dim=16, value_dim=16)
scanned = lambda q: deltalab.scan(rule, q, x.k, x.v, x.gates, backend="chunked")[0]
plain = scanned(x.q)
print("torch._dynamo" in sys.modules)
print(torch.equal(torch.compile(scanned, backend="eager")(x.q), plain))
""")
    assert out.splitlines() == ["False", "True"]


def test_a_plan_loads_neither_the_compiler_nor_the_statistics() -> None:
    out = python("""
import sys
from deltalab.study.forecast.estimate import estimate
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

estimate(make_plan(load_study("comba_ablation", profile="gpu"), profile="gpu"))
print(sorted({"torch._dynamo", "scipy.stats", "pandas"} & set(sys.modules)))
""")
    assert out.strip() == "[]", "these take longer to load than the plan takes"


def test_an_answer_of_a_search_loads_neither_torch_nor_what_grows_trees() -> None:
    out = python("""
import sys
import deltalab.study.answers.search_results
import deltalab.study.reports.report
print(sorted({"torch", "optuna", "sklearn", "scipy.stats", "pandas"} & set(sys.modules)))
""")
    assert out.strip() == "[]", "these take longer to load than the report takes"


def test_a_command_that_reads_a_study_loads_no_torch(tmp_path: Path) -> None:
    """A report says in what arms differ from their published form: the first one asks the rules, which import torch."""
    packed = ROOT / "benchmarks" / "ledgers" / "proxies.db.xz"
    ledger = tmp_path / "lab.db"
    ledger.write_bytes(lzma.decompress(packed.read_bytes()))
    migrate(address(ledger))
    heavy = [
        "torch",
        "transformers",
        "ray",
        "optuna",
        "sklearn",
        "scipy.stats",
        "pandas",
        "pyarrow",
        "streamlit",
        "altair",
    ]

    def loaded(*words: str) -> list[str]:
        code = f"""
import sys
from contextlib import redirect_stdout
from deltalab.cli.app import main

sys.argv = ["deltalab", *{words!r}, "--db", {str(ledger)!r}]
with redirect_stdout(sys.stderr):
    try:
        main()
    except SystemExit as done:
        assert not done.code
print(sorted(set({heavy!r}) & set(sys.modules)))
"""
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, env=environment)
        assert found.returncode == 0, found.stderr
        return list(ast.literal_eval(found.stdout))

    first = loaded("study", "report", "1", "--markdown")
    assert "torch" in first, "what the rules say of these arms was kept nowhere"
    for form in ([], ["--json"], ["--csv"], ["--html"]):
        assert loaded("study", "report", "1", *form) == []
    assert loaded("study", "list") == loaded("study", "trace", "1") == loaded("study", "diff", "1", "1") == []


def test_kernels_are_looked_up_at_run_time_in_one_file() -> None:
    """What import-linter cannot see: operators and modules that are named by a string."""
    lookups = re.compile(r"torch\.ops\.deltalab|sys\.modules\[|import_module\(|__import__\(")
    package = ROOT / "platform" / "deltalab"
    files = [file for folder in ("ops", "models", "training", "tasks") for file in package.glob(f"{folder}/**/*.py")]
    files += [
        package / f"{name}.py"
        for name in (
            "elementwise",
            "fast_weights",
            "gate",
            "gates",
            "long_convolution",
            "nonlinear",
            "operands",
            "ridge",
            "rule",
            "softmax",
            "structure",
        )
    ]
    found = [str(file.relative_to(package)) for file in files if lookups.search(file.read_text(encoding="utf-8"))]
    assert sorted(found) == ["ops/backends.py", "ops/peers/scans.py"]  # our kernels, and published ones


@pytest.mark.slow
def test_a_command_loads_no_kernels_before_it_uses_them() -> None:
    out = python("""
import sys
import deltalab.cli.app, deltalab.study.workers.train_stack
print("deltalab.ops.triton_kernels" in sys.modules)
""")
    assert out.strip() == "False"


@pytest.mark.slow
def test_tests_on_a_gpu_are_found_where_the_platform_is_not_installed() -> None:
    """Beside torch, an image to test on has pytest, hypothesis and scipy."""
    files = [file for file in ROOT.glob("tests/**/test_*.py") if "pytest.mark.gpu" in file.read_text()]
    modules = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file != Path(__file__)]
    assert "tests.kernels.test_gpu_kernels" in modules
    python(f"""
import os

os.environ["TRITON_INTERPRET"] = "1"
{without([name for name in BLOCKED if name != "scipy"])}
for module in {modules!r}:
    __import__(module)
""")


def test_starting_the_command_loads_nothing_that_only_a_study_needs() -> None:
    heavy = ["ray", "optuna", "sqlalchemy", "alembic", "pydantic", "scipy", "pandas", "streamlit"]
    assert python(f"import sys, deltalab.cli.app; print(sorted(set({heavy!r}) & set(sys.modules)))") == "[]"


def test_the_version_stands_in_one_place() -> None:
    import deltalab

    assert PROJECT["project"]["dynamic"] == ["version"]
    text = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert f'__version__ = "{deltalab.__version__}"' in text
    out = subprocess.run([sys.executable, "-m", "deltalab", "version"], cwd=ROOT, capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (0, f"{deltalab.__version__}\n"), "`python -m deltalab` is the command"


@pytest.mark.parametrize("workflow", ["ci.yml", "publish.yml"])
def test_the_hosted_ci_only_calls_targets_of_the_makefile(workflow: str) -> None:
    """Besides what a fresh machine needs first."""
    jobs = yaml.safe_load((ROOT / ".github/workflows" / workflow).read_text())["jobs"]
    lines = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    calls = [line.split() for line in lines if not line.startswith("apt-get ")]
    assert {command for command, *_ in calls} == {"make"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert [target for _, *names in calls for target in names if target not in targets] == []


def test_the_job_that_publishes_runs_no_code_of_the_repository() -> None:
    """It alone may ask PyPI for a token."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
    jobs = workflow["jobs"]
    assert workflow["permissions"] == {"contents": "read"}
    trusted = [job for job in jobs.values() if "id-token" in job.get("permissions", {})]
    assert trusted == [jobs["publish"]]
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_the_changelog_has_a_section_of_this_version() -> None:
    import deltalab

    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", text, re.M)
    assert sections[0] == ("Unreleased", "")
    assert (sections[1][0], bool(sections[1][1])) == (deltalab.__version__, True)
    names = [name for name, _ in sections]
    assert len(set(names)) == len(names)
    assert len(re.findall(r"^## ", text, re.M)) == len(sections)


def test_the_shell_completes_commands() -> None:
    """By the name that the completion was installed for."""
    for name in ("deltalab", "platform"):
        typed = {f"_{name.upper()}_COMPLETE": "complete_bash", "COMP_WORDS": f"{name} stu", "COMP_CWORD": "1"}
        code = f"import sys; from deltalab.cli.app import main; sys.argv = ['/bin/{name}']; main()"
        words = [sys.executable, "-c", code]
        out = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **typed})
        assert out.stdout.split() == ["study"], name


def test_the_pins_are_exact_and_in_order() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert not [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)]
    names = [re.sub("[-_.]+", "-", pin.partition("==")[0]).lower() for pin in pins]
    assert names == sorted(set(names))


def test_rules_announce_themselves_like_a_strangers() -> None:
    from importlib.metadata import entry_points

    assert [point.value for point in entry_points(group="deltalab.rules")] == ["deltalab_rules"]
    scripts = {point.name: point.value for point in entry_points(group="console_scripts") if "deltalab" in point.value}
    assert scripts == {"platform": "deltalab.cli.app:main", "deltalab": "deltalab.cli.app:main"}
