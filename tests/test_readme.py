"""What the README says works: its rule passes every check, its study can be planned, its names exist."""

import re
from pathlib import Path

import pytest

from deltalab import registry
from deltalab.authoring.rule_checks import check_rule
from deltalab.study.plan import make_plan
from deltalab.study.spec import load_study
from deltalab.tasks import BUILTIN

README = Path(__file__).parents[1] / "README.md"
TEXT = README.read_text(encoding="utf-8")


def _block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)[0]


def _first_column(title: str) -> list[str]:
    rows = TEXT.split(f"| {title} |")[1].split("\n\n")[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]


@pytest.fixture
def balanced(tmp_path, monkeypatch):
    """The README's rule, where a user would put it."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "balanced.py").write_text(_block("python"))
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield tmp_path


def test_the_rule_of_the_readme_passes_its_checks(balanced):
    assert len(_block("python").splitlines()) < 60
    failed = [result.message for result in check_rule(registry.get_rule("balanced")) if not result.passed]
    assert failed == []


def test_the_study_of_the_readme_can_be_planned(balanced):
    file = balanced / "study.yaml"
    file.write_text(_block("yaml"))
    assert make_plan(load_study(file)).names == ["base", "without_beta", "alpha_near_1", "gated_deltanet"]


def test_the_rules_of_the_readme_are_the_rules_there_are():
    assert sorted(_first_column("rule")) == registry.list_rules()


def test_the_tasks_of_the_readme_are_the_tasks_there_are():
    assert sorted(_first_column("task")) == sorted(BUILTIN)


def test_the_studies_of_the_readme_are_the_studies_there_are():
    assert sorted(_first_column("study")) == sorted(file.stem for file in README.parent.glob("studies/*.yaml"))


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link):
    assert (README.parent / link).exists()
