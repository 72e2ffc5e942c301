"""What the README says works: its rule passes every check, its study can be planned, its figures are reported ones."""

import re
from pathlib import Path

import pytest
from tests.support.folders import ROOT

from deltalab import registry
from deltalab.authoring.rule_checks.rule_suite import check_rule
from deltalab.study.planning.make import make_plan
from deltalab.study.specs.study_file import load_study

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
SIZES = {"60M": "50M", "125M": "105M"}
"""The profiles of `pretrain` in README's answer, each with the size that its models have."""


def _block(language: str) -> str:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)[0]


@pytest.fixture
def balanced(tmp_path, monkeypatch):
    """The README's rule, where a user would put it."""
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "balanced.py").write_text(_block("python"))
    monkeypatch.chdir(tmp_path)
    with registry.isolated():
        yield tmp_path


@pytest.mark.slow
def test_the_rule_of_the_readme_passes_its_checks(balanced):
    code = [line for line in _block("python").splitlines() if line]
    assert len(code) <= 30
    failed = [result.message for result in check_rule(registry.get_rule("balanced")) if not result.passed]
    assert failed == []


def test_the_study_of_the_readme_can_be_planned(balanced):
    file = balanced / "study.yaml"
    file.write_text(_block("yaml"))
    assert make_plan(load_study(file)).names == ["base", "without_beta", "alpha_near_1", "gated_deltanet"]


def test_the_readme_is_one_page():
    """Words are what stands between spaces, as `wc -w` counts them: a table's bars and code count, too."""
    assert len(TEXT.split()) <= 800


def test_the_readme_names_no_commit():
    assert re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b", TEXT) == []


def test_the_answer_of_the_readme_is_one_of_the_reports():
    rows = TEXT.split("| verdict |")[1].split("\n\n")[0].splitlines()[2:]
    text = (ROOT / "docs/studies.md").read_text(encoding="utf-8").split("## pretrain")[1]
    tables = [text.split(f"### {profile}: text (version 2): bits_per_byte")[1].split("###")[0] for profile in SIZES]
    reported = [
        [f"{cells[1]}, {size}", *cells[3:7]]
        for size, table in zip(SIZES.values(), tables, strict=True)
        for cells in ([cell.strip() for cell in row.split("|")] for row in table.splitlines() if row.startswith("| "))
        if cells[1] not in ("arm", "---")
    ]
    assert [[cell.strip() for cell in row.split("|")][1:-1] for row in rows] == reported


def test_the_folders_of_the_readme_are_there():
    cells = [row.split("|")[1] for row in TEXT.split("| folder |")[1].split("\n\n")[0].splitlines()[2:]]
    for cell in cells:
        first, *beside = re.findall(r"`([^`]+)`", cell)
        folders = [first.removesuffix("*.py"), *(str(Path(first).parent / name) for name in beside)]
        assert all((ROOT / name).is_dir() or (ROOT / Path(name).name).is_dir() for name in folders), cell


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", TEXT))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
